"""The `laminar` codec: bare record bytes in a store, and an index that says where each lies and what it hashes to.

The store has no record boundaries, so the index is the truth: a record exists when its index
entry does. The store is synced before an entry is written, and an entry is never rebuilt. A
record that compaction took away is an entry of length zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Batch, Chunk, Codec, Fault, Recovered, Shape, refuse
from tidelog.config import LogConfig
from tidelog.errors import BadInput
from tidelog.formats import laminar
from tidelog.formats.rows import Rows, Span, Stop, none
from tidelog.types import Buffer, Ints

_UNIT_BYTES = (5, 9)  # how long the metadata is that holds nothing but the record's own index
_NAME = re.compile(r"(0|[1-9]\d*)(\.store|\.index|\.created)")
_TEMPORARY = re.compile(r"(0|[1-9]\d*)(\.index\.rebuilding|\.store\.compacted|\.index\.compacted)")


class LaminarCodec(Codec):
    name = "laminar"
    stem = "{}"
    data_suffix = ".store"
    names, temporaries = _NAME, _TEMPORARY
    first_seq = 0
    segment_bytes_limit = (1 << 32) - 1
    record_bytes_max = segment_bytes_limit - 16
    side_suffixes: tuple[str, ...] = (".index",)
    truths: frozenset[int] = frozenset((0,))
    sync_data_first = True
    latch_on_write_error = False  # the seed: a failed write is rolled back and the log goes on
    full_check_on_open = False
    room: frozenset[str] = frozenset(("meta",))
    extra_suffix: str | None = None
    birth_suffix: str | None = ".created"
    reserve_bytes = 0

    def __init__(self, config: LogConfig) -> None:
        self._width = config.index_width

    def first_mark(self, base: int, /) -> int:
        return base

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        refuse(batch, self.name, "node", "tag")
        count = len(batch.datas)
        heads = [self._head(seq + i, meta) for i, meta in enumerate(_each(batch.meta, count))]
        pieces = [piece for pair in zip(heads, batch.datas, strict=True) for piece in pair]
        head_size = np.fromiter(map(len, heads), np.int64, count)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        at = np.zeros(count, np.int64)
        np.cumsum((head_size + size)[:-1], out=at[1:])
        return Rows(
            b"".join(pieces),
            np.arange(seq, seq + count, dtype=np.int64),
            np.zeros(count, np.int64),
            at,
            Span(at + head_size, size),
        )

    def _head(self, seq: int, meta: bytes) -> bytes:
        if len(meta) in _UNIT_BYTES and meta[0] == 1:
            raise BadInput(f"a meta of {len(meta)} bytes that begins with 01 reads as an index; nothing was written")
        if meta:
            return len(meta).to_bytes(4, "little") + meta
        return laminar.content_header(seq, self._width)

    def stream_head(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        refuse(batch, self.name, "node", "tag")
        return self._head(seq, batch.meta if isinstance(batch.meta, bytes) else batch.meta[0])

    def stream_tail(self, head: bytes, data: Iterable[Buffer], /) -> bytes:
        return b""

    def sides(
        self, rows: Rows, shift: int, base: int, mark: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        if not len(rows):
            return (b"",), mark
        ends = rows.data.pos + rows.data.size
        stop = int(rows.seq[-1]) + 1
        entries = np.zeros(stop - mark, laminar.INDEX)
        where = rows.seq - mark
        entries["checksum"][where] = _checksums(rows) if crcs is None else crcs
        entries["length"][where] = ends - rows.at
        entries["position"][where] = rows.at + shift
        # A hole lies, with no length, where the next record starts, so that positions stay contiguous.
        holes = np.setdiff1d(np.arange(stop - mark), where, assume_unique=True)
        entries["position"][holes] = (rows.at + shift)[np.searchsorted(where, holes)]
        head = laminar.marker(base) if mark == base else b""
        return (head + entries.tobytes(),), stop

    def fill(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        index = sides[0] or laminar.marker(base)
        _, entries = laminar.read_index(index)
        holes = np.zeros(stop - base - len(entries), laminar.INDEX)
        holes["position"] = size
        return (index + holes.tobytes(),)

    def trim(self, sides: list[bytes | None], base: int, seq: int, /) -> list[bytes | None]:
        # Holes take no bytes of the store, so cutting the store does not take them away.
        return [
            None if side is None else side[: laminar.MARKER.size + (seq - base) * laminar.INDEX.itemsize]
            for side in sides
        ]

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> Recovered:
        # The marker repeats the file's name, and a position repeats the lengths before it: where either is damaged and
        # the records still match their checksums, they are only written anew.
        _, entries = laminar.read_index(sides[0] or b"")
        keep = laminar.usable(entries, len(data))
        faults, keep, reason = self._damage(data, entries, base, keep)
        if keep < len(entries):
            straight = entries.copy()
            straight["position"] = np.cumsum(entries["length"], dtype=np.int64) - entries["length"]
            fits = laminar.usable(straight, len(data))
            again, longer, why = self._damage(data, straight, base, fits)
            if longer > keep:
                entries, faults, keep, reason = straight, again, longer, why
        last = entries[keep - 1] if keep else None
        end = int(last["position"]) + int(last["length"]) if last is not None else 0
        stop = Stop.END if end == len(data) else Stop.TORN
        if stop is Stop.TORN and (reason or keep < len(entries)):
            stop = Stop.BAD  # records that may have been acked are about to be cut
        content = laminar.marker(base) + entries[:keep].tobytes() if keep else b""
        why = reason or ("" if stop is Stop.END else "bytes that no good index entry names")
        return Recovered(end, (content,), base + keep, 0, 0, keep, base + keep, stop, why, faults)

    def _damage(self, data: Buffer, entries: NDArray[np.void], base: int, keep: int) -> tuple[list[Fault], int, str]:
        """Bad records at the very end are a torn write; bad ones with good ones behind them are damage."""
        faults: list[Fault] = []
        seq = base
        while seq < base + keep:
            walk = laminar.walk(data, entries[:keep], base, first=seq)
            if walk.stop is Stop.END:
                return faults, keep, ""
            bad = int(np.searchsorted(entries["position"][:keep], walk.end, "right")) - 1 + base
            faults.append(Fault(bad, bad + 1, walk.end, walk.reason))
            seq = bad + 1
        reason = ""
        while faults and faults[-1].seq == base + keep - 1:
            keep -= 1
            reason = faults.pop().reason
        return faults, keep, reason

    def sealed_fault(self, shape: Shape, /) -> tuple[str | None, Fault | None]:
        if shape.sides[0] is None:
            return "the index is missing", None
        fault = laminar.index_fault(shape.index, shape.base, shape.data.size)
        if fault is None:
            return None, None
        _, entries = laminar.read_index(shape.index)
        keep = laminar.usable(entries, shape.data.size)
        if keep < len(entries):
            return None, Fault(shape.base + keep, shape.stop, shape.data.size, fault)
        return fault, None

    def read(self, shape: Shape, first: int, stop: int, bytes_max: int, /) -> Chunk:
        _, entries = laminar.read_index(shape.index)
        stop = min(stop, shape.base + len(entries))
        if first >= stop:
            if first < shape.stop:
                return Chunk(
                    none(),
                    first,
                    Fault(first, shape.stop, shape.data.size, "the index ends before the segment does"),
                )
            return Chunk(none(), first)
        lo = first - shape.base
        ends = entries["position"][lo : stop - shape.base].astype(np.int64)
        ends += entries["length"][lo : stop - shape.base]
        start = int(entries["position"][lo])
        count = max(int(np.searchsorted(ends, start + bytes_max, "right")), 1)
        part, high = entries[lo : lo + count].copy(), int(ends[count - 1])
        if high > shape.data.size:
            good = int(np.searchsorted(ends, shape.data.size, "right"))
            if good == 0:
                return Chunk(none(), first, Fault(first, first + 1, start, "the record lies past the end of the store"))
            part, high = part[:good], int(ends[good - 1])
        part["position"] -= np.uint32(start)
        walk = laminar.walk(shape.data.fetch(start, high), part, first)
        if walk.stop is Stop.END:
            return Chunk(walk.rows, first + len(part))
        bad = int(np.searchsorted(part["position"], walk.end, "right")) - 1 + first
        if bad > first:
            return Chunk(walk.rows, bad)
        return Chunk(none(), first, Fault(first, first + 1, start + walk.end, walk.reason))

    def position(self, shape: Shape, seq: int, /) -> tuple[int, Rows | None]:
        _, entries = laminar.read_index(shape.index)
        at = seq - shape.base
        return (int(entries["position"][at]) if at < len(entries) else shape.data.size), None

    def seal(self, shape: Shape, /) -> bytes | None:
        return None

    def times(self, shape: Shape, /) -> tuple[int, int] | None:
        return None


def _each(column: bytes | Sequence[bytes], count: int) -> Sequence[bytes]:
    return [column] * count if isinstance(column, bytes) else column


def _checksums(rows: Rows) -> list[int]:
    view = memoryview(rows.buf)
    bounds = zip(rows.at.tolist(), (rows.data.pos + rows.data.size).tolist(), strict=True)
    return [crc32(view[lo:hi]) for lo, hi in bounds]
