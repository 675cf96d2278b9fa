"""The `narwhal` codec: entries with a CRC each, a sparse index by bytes, preallocated while the segment grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import numpy as np

from tidelog.commitlog.codec import Batch, Chunk, Codec, Fault, Recovered, Salvage, Shape, recovered, refuse, salvaged
from tidelog.commitlog.codecs import sparse
from tidelog.config import LogConfig
from tidelog.errors import UnknownLayout
from tidelog.formats import narwhal
from tidelog.formats.rows import Rows, Span, Stop, Walk
from tidelog.types import Buffer, Ints

_NAME = re.compile(r"(\d{20})(\.log|\.idx)")
_TEMPORARY = re.compile(r"\d{20}(\.idx\.rebuilding|\.tmp|\.log\.compacted)")


class NarwhalCodec(Codec):
    name = "narwhal"
    stem = "{:020d}"
    data_suffix = ".log"
    names, temporaries = _NAME, _TEMPORARY
    first_seq = 1
    record_bytes_max = (1 << 32) - 1
    segment_bytes_limit = 1 << 62
    side_suffixes: tuple[str, ...] = (".idx",)
    truths: frozenset[int] = frozenset()
    sync_data_first = False
    latch_on_write_error = True
    full_check_on_open = True
    room: frozenset[str] = frozenset(("node",))
    extra_suffix: str | None = None
    birth_suffix: str | None = None

    def __init__(self, config: LogConfig) -> None:
        self._bytes_max = config.segment_bytes_max + config.overflow_bytes
        self.reserve_bytes = narwhal.index_capacity(self._bytes_max)

    def detect(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        unlike = ""
        for name in sorted(names):
            known = self.base_of(name)
            data = read(name) if known is not None and known[1] == "" else None
            if known is None or not data:
                continue
            if not narwhal.is_unlike(data, known[0]):
                return
            unlike = unlike or name
        if unlike:
            raise UnknownLayout(
                f"{unlike} begins with no entry of the narwhal layout: its seq is not that of the file's name and its "
                "lengths do not fit the file; nothing was changed, check which program wrote it"
            )

    def first_mark(self, base: int, /) -> int:
        return -1

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        refuse(batch, self.name, "tag", "meta")
        buf = narwhal.encode(seq, ts_us // 1000, batch.datas, batch.node)
        count = len(batch.datas)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        nodes = batch.node
        node_size = (
            np.full(count, len(nodes), np.int64)
            if isinstance(nodes, bytes)
            else np.fromiter(map(len, nodes), np.int64, count)
        )
        at = np.zeros(count, np.int64)
        np.cumsum((size + node_size)[:-1] + narwhal.OVERHEAD_BYTES, out=at[1:])
        head = at + narwhal.HEADER_BYTES
        return Rows(
            buf,
            np.arange(seq, seq + count, dtype=np.int64),
            np.full(count, ts_us // 1000 * 1000, np.int64),
            at,
            Span(head + node_size, size),
            Span(head, node_size) if node_size.any() else None,
        )

    def stream_head(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        refuse(batch, self.name, "tag", "meta")
        node = batch.node if isinstance(batch.node, bytes) else batch.node[0]
        if size < 0:
            return bytes(narwhal.HEADER_BYTES + len(node))  # seq 0 is no record
        return narwhal.head(seq, ts_us // 1000, node, size)

    def stream_tail(self, head: bytes, data: Iterable[Buffer], /) -> bytes:
        checksum = crc32(head)
        for piece in data:
            checksum = crc32(piece, checksum)
        return checksum.to_bytes(4, "little")

    def sides(
        self, rows: Rows, shift: int, base: int, mark: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        ends = rows.data.pos + rows.data.size + 4
        piece, mark = narwhal.index_bytes(rows.seq, rows.at + shift, ends + shift, base, mark)
        return (piece,), mark

    def fill(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        return sides

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> Recovered:
        walk = narwhal.walk(data, above=base - 1)
        pieces, mark = self.sides(walk.rows, 0, base, -1)
        return recovered(walk, base, pieces, mark)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        def walk(pos: int, above: int) -> Walk:
            return narwhal.walk(data, pos, above=above)

        def resync(pos: int, above: int) -> int:
            return narwhal.resync(data, pos, above, stop)

        return salvaged(data, base, stop, walk, resync)

    def reach(self, shape: Shape, /) -> int:
        seqs = self._index(shape).seqs
        return sparse.reach(self.read, shape, int(seqs[-1]) if len(seqs) and shape.data.size else None)

    def sealed_fault(self, shape: Shape, /) -> tuple[str | None, Fault | None]:
        if shape.sides[0] is None:
            return "the index is missing", None
        if shape.data.size == 0 and not len(shape.index):
            return None, None  # compaction took every record
        fault = narwhal.index_fault(
            shape.index, shape.data.size, narwhal.index_capacity(max(self._bytes_max, shape.data.size))
        )
        if fault is not None:
            return fault, None
        index = narwhal.read_index(shape.index)
        start = int(index["position"][-1])
        above = shape.base + int(index["relative"][-1]) - 1
        tail = narwhal.walk(shape.data.fetch(start, shape.data.size), above=above)
        if tail.stop is not Stop.END and narwhal.index_mismatch(
            index[-1:], shape.data.fetch(0, shape.data.size), shape.base
        ):
            return "its last entry points at something else", None
        again, _ = self.sides(tail.rows, 0, shape.base, -1)
        if len(narwhal.read_index(again[0])) > 1:
            return "its last entries are missing", None
        if tail.stop is Stop.END:
            return None, None
        seq = int(tail.rows.seq[-1]) + 1 if len(tail.rows) else above + 1
        return None, Fault(seq, shape.stop, start + tail.end, tail.reason)

    def _index(self, shape: Shape) -> sparse.Index:
        index = narwhal.read_index(shape.index)
        return sparse.Index(index["relative"].astype(np.int64) + shape.base, index["position"].astype(np.int64))

    def read(self, shape: Shape, first: int, stop: int, bytes_max: int, /) -> Chunk:
        return sparse.read(shape, self._index(shape), _walk, narwhal.size_at, first, stop, bytes_max)

    def position(self, shape: Shape, seq: int, /) -> tuple[int, Rows | None]:
        return sparse.position(shape, self._index(shape), _walk, seq), None

    def seal(self, shape: Shape, /) -> bytes | None:
        return None

    def times(self, shape: Shape, /) -> tuple[int, int] | None:
        seqs = self._index(shape).seqs
        return sparse.times(self.read, shape, int(seqs[-1])) if len(seqs) else None


def _walk(buf: Buffer, starts: Ints, ordinal: int) -> Walk:
    return narwhal.walk_lanes(buf, starts, len(buf))
