"""The `rustlog` codec: 20-byte big-endian headers, a sparse index, and a side-car of checksums.

The seed's layout has no checksum, so a power cut can leave a record whose header arrived and
whose data did not, and nobody could tell. The side-car `<base>.crc` tells: it is synced with
the data before an ack, and records behind its end were never acked. Readers of the seed's
layout never need it, and a segment without one is read as the seed says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from tidelog.commitlog.codec import Batch, Chunk, Codec, Fault, Recovered, Shape, recovered, refuse
from tidelog.commitlog.codecs import sparse
from tidelog.config import LogConfig
from tidelog.formats import rustlog
from tidelog.formats.rows import Rows, Span, Stop, Walk
from tidelog.types import Buffer, Ints

_NAME = re.compile(r"(\d{20})(\.log|\.index|\.crc)")
_TEMPORARY = re.compile(r"\d{20}(\.index\.rebuilding|\.crc\.rebuilding|\.log\.compacted)")


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
        if not config.checksums:
            self.side_suffixes, self.stale_suffixes = (".index",), (".crc",)
            self.truths = frozenset()

    def first_mark(self, base: int, /) -> int:
        return 0

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        refuse(batch, self.name, "node", "tag", "meta")
        buf = rustlog.encode(seq, ts_us, batch.datas)
        count = len(batch.datas)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        at = np.zeros(count, np.int64)
        np.cumsum(size[:-1] + rustlog.HEADER_BYTES, out=at[1:])
        return Rows(
            buf,
            np.arange(seq, seq + count, dtype=np.int64),
            np.full(count, ts_us, np.int64),
            at,
            Span(at + rustlog.HEADER_BYTES, size),
        )

    def stream_head(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        refuse(batch, self.name, "node", "tag", "meta")
        # No record is this long, so a head that was never completed is not taken for one.
        return rustlog.head(seq, ts_us, 0xFFFFFFFF if size < 0 else size)

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
        walk = rustlog.walk(data, above=base - 1, crcs=crcs)
        pieces, mark = self.sides(walk.rows, 0, base, 0)
        return recovered(walk, base, pieces, mark)

    def sealed_fault(self, shape: Shape, /) -> tuple[str | None, Fault | None]:
        if shape.sides[0] is None:
            return "the index is missing", None
        index = rustlog.read_index(shape.index)
        if index is None:
            return "its size is not a multiple of an entry", None
        fault = rustlog.index_fault(index, shape.data.size, shape.base, shape.stop)
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
        if tail.stop is not Stop.END and rustlog.index_mismatch(index[-1:], shape.data.fetch(0, shape.data.size)):
            return "its last entry points at something else", None
        if len(tail.rows) > self._every:
            return "its last entries are missing", None
        if tail.stop is Stop.END:
            return None, None
        seq = int(tail.rows.seq[-1]) + 1 if len(tail.rows) else first
        return None, Fault(min(seq, shape.stop - 1), shape.stop, start + tail.end, tail.reason)

    def read(self, shape: Shape, first: int, stop: int, bytes_max: int, /) -> Chunk:
        return sparse.read(shape, self._index(shape), self._walker(shape), rustlog.size_at, first, stop, bytes_max)

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
            return rustlog.walk_lanes(buf, starts, len(buf), crcs=part)

        return walk

    def seal(self, shape: Shape, /) -> bytes | None:
        return None

    def times(self, shape: Shape, /) -> tuple[int, int] | None:
        index = rustlog.read_index(shape.index)
        if index is None or not len(index):
            return None
        return sparse.times(self.read, shape, int(index["offset"][-1]))
