"""The `rustlog` codec: 20-byte big-endian headers, a sparse index, and a side-car of checksums.

The seed's layout has no checksum, so a power cut can leave a record whose header arrived and
whose data did not, and nobody could tell. The side-car `<base>.crc` tells: it is synced with
the data before an ack, and records behind its end were never acked. Readers of the seed's
layout never need it, and a segment without one is read as the seed says.

Logs of the RustLog program are told from the seed's by their bytes: records with 12-byte headers
and no time, file names of 20 or 12 digits. They are read and continued as they are; what their
records do not say is kept beside them, as in the laminar layout (`<base>.created`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from re import Match

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Batch, Chunk, Codec, Fault, Recovered, Salvage, Shape, recovered, refuse, salvaged
from tidelog.commitlog.codecs import sparse
from tidelog.config import LogConfig
from tidelog.errors import BadInput, UnknownLayout
from tidelog.formats import rustlog
from tidelog.formats.rows import Rows, Span, Stop, Walk
from tidelog.types import Buffer, Ints

_NAME = re.compile(r"(\d{20}|\d{12})(\.log|\.index|\.crc|\.created)")
_TEMPORARY = re.compile(r"(?:\d{20}|\d{12})(\.index\.rebuilding|\.crc\.rebuilding|\.log\.compacted|\.crc\.compacted)")
_TIMES_BYTES = 8 << 20


class RustlogCodec(Codec):
    name = "rustlog"
    stem = "{:020d}"
    data_suffix = ".log"
    names, temporaries = _NAME, _TEMPORARY
    first_seq = 0
    record_bytes_max = rustlog.RECORD_BYTES_MAX
    segment_bytes_limit = 1 << 62
    side_suffixes: tuple[str, ...] = (".index", ".crc")
    truths: frozenset[int] = frozenset((1,))
    sync_data_first = False
    latch_on_write_error = True
    full_check_on_open = False
    room: frozenset[str] = frozenset()
    extra_suffix: str | None = None
    birth_suffix: str | None = None
    reserve_bytes = 0

    def __init__(self, config: LogConfig) -> None:
        self._every = config.index_every
        self._asked = config.header_bytes
        self._use_header(config.header_bytes or rustlog.HEADER_BYTES)
        if not config.checksums:
            self.side_suffixes, self.stale_suffixes = (".index",), (".crc",)
            self.truths = frozenset()

    def _use_header(self, size: int) -> None:
        self._header = size
        # Without times in the records, a file beside the segment says how old it is.
        self.birth_suffix = None if size == rustlog.HEADER_BYTES else ".created"

    def detect(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        matches = [match for name in sorted(names) if (match := self.names.fullmatch(name)) is not None]
        digits = {len(match[1]) for match in matches}
        if len(digits) > 1:
            raise UnknownLayout(
                "segment files have names of 12 and of 20 digits, which one program does not write; nothing was "
                "changed, keep the segments of one log in a directory"
            )
        if digits:
            self.stem = f"{{:0{digits.pop()}d}}"
        found = self._header_of([match for match in matches if match[2] == self.data_suffix], read)
        if found is not None and self._asked not in (None, found):
            raise BadInput(f"the records have headers of {found} bytes, not {self._asked}; nothing was changed")
        if found is not None:
            self._use_header(found)

    def _header_of(self, matches: Sequence[Match[str]], read: Callable[[str], Buffer | None]) -> int | None:
        """The header size that the first data file with a telling record has; None where none tells."""
        unknown = ""
        for match in matches:
            data, base = read(match[0]), int(match[1])
            if not data:
                continue
            side = read(f"{match[1]}.crc")
            for header in (rustlog.HEADER_BYTES, rustlog.SHORT_HEADER_BYTES) if side else ():
                if len(rustlog.walk(data, count_max=1, crcs=rustlog.read_crcs(side or b""), header=header).rows):
                    return header
            if (found := rustlog.variant(data, base)) is not None:
                return found
            walk = rustlog.walk(data, above=base - 1, count_max=1)
            if side is not None or len(walk.rows) or rustlog.is_unfinished(data, 0, base):
                continue
            unknown = unknown or f"{match[0]} begins with no record of the rustlog layout ({walk.reason})"
        if unknown and self._asked is None:
            raise UnknownLayout(
                f"{unknown}, neither with headers of 20 bytes nor of 12; nothing was changed. If it is a damaged log "
                "of this layout, name the header size (header_bytes)"
            )
        return None

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        # The side-car that this codec keeps is not there: what was acknowledged cannot be told.
        return ".crc" in self.side_suffixes and ".crc" not in suffixes

    def first_mark(self, base: int, /) -> int:
        return 0

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        refuse(batch, self.name, "node", "tag", "meta")
        header = self._header
        ts_us = ts_us if header == rustlog.HEADER_BYTES else 0
        buf = rustlog.encode(seq, ts_us, batch.datas, header)
        count = len(batch.datas)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        at = np.zeros(count, np.int64)
        np.cumsum(size[:-1] + header, out=at[1:])
        return Rows(
            buf,
            np.arange(seq, seq + count, dtype=np.int64),
            np.full(count, ts_us, np.int64),
            at,
            Span(at + header, size),
        )

    def stream_head(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        refuse(batch, self.name, "node", "tag", "meta")
        # No record is this long, so a head that was never completed is not taken for one.
        return rustlog.head(seq, ts_us, rustlog.STREAMING if size < 0 else size, self._header)

    def stream_tail(self, head: bytes, data: Iterable[Buffer], /) -> bytes:
        return b""

    def sides(
        self, rows: Rows, shift: int, base: int, mark: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        index = rustlog.index_bytes(rows.seq, rows.at + shift, mark, self._every)
        if len(self.side_suffixes) == 1:
            return (index,), mark + len(rows)
        crc = rustlog.crc_bytes(rows.buf, rows) if crcs is None else crcs.astype("<u4").tobytes()
        return (index, crc), mark + len(rows)

    def fill(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        return sides

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> Recovered:
        crcs = rustlog.read_crcs(sides[1]) if len(sides) > 1 and sides[1] is not None else None
        walk = rustlog.walk(data, above=base - 1, crcs=crcs, header=self._header)
        pieces, mark = self.sides(walk.rows, 0, base, 0)
        found = recovered(walk, base, pieces, mark)
        if walk.stop is Stop.END or crcs is not None or len(self.side_suffixes) == 1:
            return found
        if rustlog.is_unfinished(data, walk.end, found.next_seq, self._header):
            return found
        return found._replace(stop=Stop.BAD, unexplained=True)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        side = sides[1] if len(sides) > 1 else None
        crcs = None if side is None else rustlog.read_crcs(side)
        ordinal = 0  # of the record at the byte that is read next

        def walk(pos: int, above: int) -> Walk:
            nonlocal ordinal
            rest = None if crcs is None else crcs[ordinal:]
            found = rustlog.walk(data, pos, above=above, crcs=rest, header=self._header)
            ordinal += len(found.rows)
            return found

        def resync(pos: int, above: int) -> int:
            nonlocal ordinal
            rest = None if crcs is None else crcs[ordinal:]
            after, skipped = rustlog.resync(data, pos, above, stop, rest, self._header)
            ordinal += skipped
            return after

        return salvaged(data, base, stop, walk, resync, sure=crcs is not None)

    def reach(self, shape: Shape, /) -> int:
        seqs = self._index(shape).seqs
        return sparse.reach(self.read, shape, int(seqs[-1]) if len(seqs) else None)

    def sealed_fault(self, shape: Shape, /) -> tuple[str | None, Fault | None]:
        if shape.sides[0] is None:
            return "the index is missing", None
        index = rustlog.read_index(shape.index)
        if index is None:
            return "its size is not a multiple of an entry", None
        fault = rustlog.index_fault(index, shape.data.size, shape.base, shape.stop, self._header)
        if fault is not None:
            return fault, None
        if not len(index):
            return None, None
        side = shape.sides[1] if len(shape.sides) > 1 else None
        if side is not None and len(index) != -(-len(rustlog.read_crcs(side)) // self._every):
            return f"it does not have an entry for every {self._every} records", None
        # From the last indexed record on: finds a cut-off file without reading the whole of it.
        start, first = int(index["position"][-1]), int(index["offset"][-1])
        tail = self._walker(shape)(
            shape.data.fetch(start, shape.data.size), np.zeros(1, np.int64), (len(index) - 1) * self._every
        )
        if tail.stop is not Stop.END and self._misdirected(index[-1:], shape):
            return "its last entry points at something else", None
        if len(tail.rows) > self._every:
            return "its last entries are missing", None
        if tail.stop is Stop.END:
            return None, None
        seq = int(tail.rows.seq[-1]) + 1 if len(tail.rows) else first
        return None, Fault(min(seq, shape.stop - 1), shape.stop, start + tail.end, tail.reason)

    def _misdirected(self, index: NDArray[np.void], shape: Shape) -> str | None:
        return rustlog.index_mismatch(index, shape.data.fetch(0, shape.data.size), self._header)

    def index_serves(self, shape: Shape, /) -> bool:
        # Entries at another distance. Only a side-car needs to know which record an entry is for.
        index, side = rustlog.read_index(shape.index), shape.sides[1] if len(shape.sides) > 1 else None
        if index is None or side is not None:
            return False
        fault = rustlog.index_fault(index, shape.data.size, shape.base, shape.stop, self._header)
        return fault is None and self._misdirected(index, shape) is None

    def read(self, shape: Shape, first: int, stop: int, bytes_max: int, /) -> Chunk:
        size_at = partial(rustlog.size_at, header=self._header)
        return sparse.read(shape, self._index(shape), self._walker(shape), size_at, first, stop, bytes_max)

    def position(self, shape: Shape, seq: int, /) -> tuple[int, Rows | None]:
        return sparse.position(shape, self._index(shape), self._walker(shape), seq), None

    def _index(self, shape: Shape) -> sparse.Index:
        index = rustlog.read_index(shape.index)
        if index is None:
            index = np.zeros(0, rustlog.INDEX)
        return sparse.Index(index["offset"].astype(np.int64), index["position"].astype(np.int64), self._every)

    def _walker(self, shape: Shape) -> sparse.Walker:
        side = shape.sides[1] if len(shape.sides) > 1 else None
        crcs = None if side is None else rustlog.read_crcs(side)

        def walk(buf: Buffer, starts: Ints, ordinal: int) -> Walk:
            part = None if crcs is None else crcs[ordinal:]
            return rustlog.walk_lanes(buf, starts, len(buf), crcs=part, header=self._header)

        return walk

    def seal(self, shape: Shape, /) -> bytes | None:
        return None

    def times(self, shape: Shape, /) -> tuple[int, int] | None:
        index = rustlog.read_index(shape.index)
        if self.birth_suffix is not None or index is None or not len(index):
            return None
        if len(shape.sides) > 1 and shape.sides[1] is not None and self._times_rise(shape, index):
            return sparse.times(self.read, shape, int(index["offset"][-1]))
        # Another program's clock may have stepped back: the newest record need not be the last.
        first = last = None
        seq = shape.base
        while seq < shape.stop:
            chunk = self.read(shape, seq, shape.stop, _TIMES_BYTES)
            if len(chunk.rows):
                first = int(chunk.rows.ts_us[0]) if first is None else first
                last = max(last or 0, int(chunk.rows.ts_us.max()))
            seq = chunk.next_seq if chunk.fault is None else max(chunk.fault.resume, seq + 1)
        return None if first is None or last is None else (first, last)

    def _times_rise(self, shape: Shape, index: NDArray[np.void]) -> bool:
        """Whether the times of the indexed records rise, as they do in all that this codec writes."""
        times = rustlog.times_at(shape.data.fetch(0, shape.data.size), index["position"].astype(np.int64))
        return times is not None and not bool((np.diff(times) < 0).any())
