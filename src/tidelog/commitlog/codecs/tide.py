"""The `tide` codec, Tidelog's own: frames in `.data`, 20 bytes a record in `.idx`, a footer once sealed.

A single record is an Append frame; several are AppendBatch frames chained into one caller's
batch, which recovery keeps whole or not at all. Sealed data is checked against the footer's
chunk checksums, once per chunk and process; where a chunk does not hold, frame by frame, so
that only what is damaged is lost.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from tidelog.commitlog.codec import Batch, Chunk, Codec, Fault, Placed, Recovered, Salvage, Shape, recovered, salvaged
from tidelog.config import LogConfig
from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import batch as batches
from tidelog.formats import footer, frame, idx, laid, scan
from tidelog.formats.footer import Footer
from tidelog.formats.rows import Rows, Span, Walk, none, together
from tidelog.types import Buffer, Ints

_log = logging.getLogger("tidelog.commitlog")
_NAME = re.compile(r"seg-(\d{16,20})(\.data|\.idx|\.foot)")
_TEMPORARY = re.compile(r"seg-\d{16,20}(\.idx\.rebuilding|\.foot\.tmp|\.data\.compacted)")
_SEQ_BITS = 64
_MEMORY_BYTES_MAX = 1 << 20
_VERIFY_BYTES = 4 << 20


_decoded = lru_cache(maxsize=256)(footer.decode)  # every read asks for it; the bytes of a footer never change


class TideCodec(Codec):
    name = "tide"
    stem = "seg-{:016d}"
    data_suffix = ".data"
    names, temporaries = _NAME, _TEMPORARY
    first_seq = 1
    segment_bytes_limit = 1 << 31
    record_bytes_max = segment_bytes_limit - (1 << 20)
    side_suffixes: tuple[str, ...] = (".idx",)
    truths: frozenset[int] = frozenset()
    sync_data_first = False
    latch_on_write_error = True
    full_check_on_open = False
    room: frozenset[str] = frozenset(("node", "tag", "meta"))
    extra_suffix: str | None = ".foot"
    birth_suffix: str | None = None
    late_index = True
    reserve_bytes = 0
    INDEX = -1  # in Shape.verified, beside the numbers of data chunks: the index was checked

    def __init__(self, config: LogConfig) -> None:
        self._memory = bytearray()  # of the frame that is being written

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def first_mark(self, base: int, /) -> int:
        return base

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        ts_ms, count = ts_us // 1000, len(batch.datas)
        if count == 1:
            node, tag, meta = (c if isinstance(c, bytes) else c[0] for c in (batch.node, batch.tag, batch.meta))
            if not meta:
                return self._one(seq, ts_ms, batch.datas[0], node, tag)
        metas = [batch.meta] * count if isinstance(batch.meta, bytes) else batch.meta
        frames = batches.encode_many(
            0,
            seq,
            ts_ms,
            batch.datas,
            metas=metas if any(metas) else None,
            nodes=None if isinstance(batch.node, bytes) else batch.node,
            tags=None if isinstance(batch.tag, bytes) else batch.tag,
            node=batch.node if isinstance(batch.node, bytes) else b"",
            tag=batch.tag if isinstance(batch.tag, bytes) else b"",
        )
        buf = frames[0] if len(frames) == 1 else b"".join(frames)
        return scan.walk(buf).rows

    def place(self, seq: int, ts_us: int, batch: Batch, shift: int, base: int, mark: int, /) -> Placed:
        ts_ms = ts_us // 1000
        alike = isinstance(batch.node, bytes) and isinstance(batch.tag, bytes) and batch.meta == b""
        if not alike or len(batch.datas) == 1 or mark % (1 << _SEQ_BITS) != seq:
            return super().place(seq, ts_us, batch, shift, base, mark)
        node, tag = bytes(batch.node), bytes(batch.tag)  # type: ignore[arg-type]
        made = laid.plan(
            0,
            seq,
            ts_ms,
            batch.datas,
            batch.lengths,
            node=node,
            tag=tag,
            shift=shift,
            take=self._take,
            compiled=batch.are_bytes,
        )
        flags = idx.BATCH | (idx.HAS_NODE if node else 0) | (idx.HAS_TAG if tag else 0)
        run = idx.Run(made.starts, made.counts, batch.lengths, ts_ms, flags)
        stop = seq + len(batch.datas)
        return Placed(made.frames, (run,), ts_ms << _SEQ_BITS | stop, stop, ts_ms * 1000, ts_ms * 1000)

    def _take(self, size: int) -> bytearray:
        """Memory for a frame, the same one again unless it is a large one: a log writes one frame after the other."""
        if size > _MEMORY_BYTES_MAX:
            return bytearray(size)
        if size > len(self._memory):
            self._memory = bytearray(min(2 * size, _MEMORY_BYTES_MAX))
        return self._memory

    def _one(self, seq: int, ts_ms: int, data: bytes, node: bytes, tag: bytes) -> Rows:
        buf = frame.encode(frame.APPEND, seq=seq, ts_ms=ts_ms, data=data, node=node, tag=tag)
        node_at, node_end = frame.HEADER_BYTES, frame.HEADER_BYTES + len(node)
        start = node_end + len(tag)
        cells = np.array([seq, ts_ms * 1000, 0, start, len(data), node_at, len(node), node_end, len(tag)], np.int64)
        return Rows(
            buf,
            cells[0:1],
            cells[1:2],
            cells[2:3],
            Span(cells[3:4], cells[4:5]),
            Span(cells[5:6], cells[6:7]) if node else None,
            Span(cells[7:8], cells[8:9]) if tag else None,
        )

    def stream_head(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        node, tag = (c if isinstance(c, bytes) else c[0] for c in (batch.node, batch.tag))
        head = frame.head(frame.APPEND, seq=seq, ts_ms=ts_us // 1000, data_len=max(size, 0), node=node, tag=tag)
        return bytes(len(head)) if size < 0 else head  # zeros are where a log ends

    def stream_tail(self, head: bytes, data: Iterable[Buffer], /) -> bytes:
        digest = xxh3_64(head[4:])
        for piece in data:
            digest.update(piece)
        return digest.intdigest().to_bytes(8, "little")

    def sides(
        self, rows: Rows, shift: int, base: int, mark: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        if not len(rows):
            return (b"",), mark
        # The mark is the next seq, with the time of the last entry above it: holes repeat that time.
        ts_before, first = divmod(mark, 1 << _SEQ_BITS)
        stop = int(rows.seq[-1]) + 1
        size = shift + max(len(rows.buf), int(rows.data.pos[-1] + rows.data.size[-1]) + 8)
        if len(rows) == 1 and stop == first + 1:
            made = idx.entry(rows, shift)
        else:
            made = idx.to_bytes(idx.entries(rows, first, stop, size, origin=shift, ts_before_ms=ts_before))
        return (made,), int(rows.ts_us[-1]) // 1000 << _SEQ_BITS | stop

    def fill(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        entries = idx.read(sides[0])
        holes = np.zeros(max(stop - base - len(entries), 0), idx.ENTRY)
        holes["frame_offset"], holes["flags"] = size, idx.HOLE
        holes["ts"] = entries["ts"][-1] if len(entries) else 0
        return (sides[0] + idx.to_bytes(holes),)

    def seal(self, shape: Shape, /) -> bytes | None:
        """The footer. Every frame is verified first: a chunk with one that does not hold gets a checksum that no bytes
        of it have, so that reads go on to check it frame by frame."""
        made = footer.make(shape.data.fetch(0, shape.data.size), shape.index, first_seq=shape.base)
        faults = self.faults(shape)
        for span, reason in faults:
            where = f"bytes {span.start} to {span.stop - 1} of {self.data_name(shape.base)}"
            _log.error("%s do not verify and are sealed as damaged: %s", where, reason)
        return footer.encode(footer.excluding(made, (span for span, _ in faults)))

    def faults(self, shape: Shape, /) -> list[tuple[range, str]]:
        """The bytes of every frame that does not verify, or is missing, and why. The index is believed; footer and
        earlier checks are not."""
        at, found = idx.read(shape.index)["frame_offset"], list[tuple[range, str]]()
        bare, seq = Shape(shape.base, shape.stop, shape.data, shape.index, shape.sides), shape.base
        while seq < shape.stop:
            _, seq, fault = self.read(bare, seq, shape.stop, _VERIFY_BYTES)
            if fault is not None:
                first, seq = fault.seq - shape.base, max(fault.resume, seq + 1)
                end = int(at[seq - shape.base]) if seq < shape.stop else int(shape.data.size)
                found.append((range(int(at[first]), max(end, int(at[first]) + 1)), fault.reason))
        return found

    # ── recovering ────────────────────────────────────────────────────────────────────────────

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> Recovered:
        walk = scan.walk(data, above=base - 1)
        pieces, mark = self.sides(walk.rows, 0, base, self.first_mark(base))
        return recovered(walk, base, pieces, mark)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        view = memoryview(data)

        def walk(pos: int, above: int) -> Walk:
            parts: list[Rows] = []
            while True:
                found = scan.walk(view, pos, above=above)
                parts.append(found.rows)
                above = int(found.rows.seq[-1]) if len(found.rows) else above
                # A frame of a batch that another frame of it broke: its records were acked and are good by themselves.
                one = scan.alone(view, found.end) if found.end < len(view) else found._replace(rows=none(view))
                if not len(one.rows) or int(one.rows.seq[0]) <= above:
                    return found._replace(rows=together(view, parts))
                parts.append(one.rows)
                pos, above = one.end, int(one.rows.seq[-1])

        return salvaged(view, base, stop, walk, lambda pos, above: scan.resync(view, pos, above, stop))

    def reach(self, shape: Shape, /) -> int:
        return shape.base + len(shape.index) // idx.ENTRY_BYTES

    def sealed_fault(self, shape: Shape, /) -> tuple[str | None, Fault | None]:
        # Sizes only: hashing every index here would read all of it at each start. The first read of a
        # segment checks its index, each chunk of data when it is read.
        if shape.sides[0] is None:
            return "the index is missing", None
        foot = self._footer(shape)
        if foot is None:
            return "the footer is missing or damaged", None
        if len(shape.index) != foot.idx_bytes:
            return f"the index has {len(shape.index)} bytes, {foot.idx_bytes} were sealed", None
        if shape.data.size == foot.data_bytes:
            return None, None
        at = idx.read(shape.index)["frame_offset"]
        seq = shape.base + int(np.searchsorted(at, min(shape.data.size, foot.data_bytes)))
        reason = f"the data has {shape.data.size} bytes, {foot.data_bytes} were sealed"
        return None, Fault(max(seq - 1, shape.base), shape.stop, shape.data.size, reason)

    def _footer(self, shape: Shape) -> Footer | None:
        if shape.extra is None:
            return None
        try:
            return _decoded(shape.extra)
        except NewerFormat:
            raise
        except Corrupt:
            return None

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def index(self, shape: Shape) -> NDArray[np.void]:
        """The entries of a segment; those of a sealed one are what was sealed."""
        foot = self._footer(shape)
        return idx.read(shape.index) if foot is None else self._checked_index(shape, foot)

    def read(self, shape: Shape, first: int, stop: int, bytes_max: int, /, *, compiled: bool = True) -> Chunk:
        foot, entries = self._footer(shape), self.index(shape)
        lo, hi = first - shape.base, min(stop - shape.base, len(entries))
        if lo >= hi:
            return Chunk(none(), stop)
        hi, low, high = self._bytes(entries["frame_offset"], lo, hi, bytes_max, shape.data.size)
        trusted = foot is not None and self._vouched(shape, foot, low, high)
        return self._decode(
            shape.data.fetch(low, high), entries[lo:hi], first, low, check=not trusted, compiled=compiled
        )

    def window(self, shape: Shape, first: int, stop: int, bytes_max: int, /) -> tuple[int, int] | None:
        """Which bytes of the data `read` would look at, if all that it trusts was checked before; else None."""
        foot = self._footer(shape)
        if foot is None or self.INDEX not in shape.verified:
            return None
        at = idx.read(shape.index)["frame_offset"]
        low, high = self._bytes(at, first - shape.base, stop - shape.base, bytes_max, shape.data.size)[1:]
        return (low, high) if self.is_checked(shape, low, high) else None

    def is_checked(self, shape: Shape, low: int, high: int, /) -> bool:
        """Whether these bytes of the data of a sealed segment were held against its footer before."""
        foot = self._footer(shape)
        if foot is None or self.INDEX not in shape.verified or high > shape.data.size:
            return False
        return shape.verified.issuperset(range(low // foot.chunk_bytes, -(-high // foot.chunk_bytes)))

    def _bytes(self, at: NDArray[np.uint32], lo: int, hi: int, bytes_max: int, size: int) -> tuple[int, int, int]:
        """Where a read of entries [lo, hi) has to stop, and the bytes that hold their frames."""
        low = int(at[lo])
        # Bisection by hand: searchsorted first copies a column of an index, which is strided, as a whole.
        hi = max(bisect_left(at, low + bytes_max, lo, hi), lo + 1)
        return hi, low, self._frame_end(at, hi, size)

    def _checked_index(self, shape: Shape, foot: Footer) -> NDArray[np.void]:
        """The index that was sealed; made again from the data, in memory, where the file is not that any more."""
        if self.INDEX not in shape.verified:
            if footer.check_index(foot, shape.index) is not None:
                found = self.recover(shape.data.fetch(0, shape.data.size), [], shape.base)
                return idx.read(self.fill(found.sides, shape.base, foot.stop_seq, found.end)[0])
            shape.verified.add(self.INDEX)
        return idx.read(shape.index)

    def _frame_end(self, at: NDArray[np.uint32], hi: int, size: int) -> int:
        """Where the frame of the record before `hi` ends: where the next one starts."""
        later = bisect_right(at, int(at[hi - 1]), hi)
        return int(at[later]) if later < len(at) else size

    def _vouched(self, shape: Shape, foot: Footer, low: int, high: int) -> bool:
        """Whether the footer's checksums hold for these bytes; each chunk is hashed once per open log."""
        step, whole = foot.chunk_bytes, shape.data.fetch(0, shape.data.size)
        for chunk in range(low // step, -(-high // step)):
            if chunk not in shape.verified:
                if footer.check(foot, whole, pos=chunk * step, end=chunk * step + 1):
                    return False
                shape.verified.add(chunk)
        return True

    def _decode(
        self, buf: Buffer, part: NDArray[np.void], first: int, low: int, *, check: bool, compiled: bool
    ) -> Chunk:
        stop = len(part)
        fault = None
        while stop:
            try:
                rows = scan.walk_indexed(buf, part, 0, stop, first, check=check, origin=low, compiled=compiled)
            except Corrupt as error:
                # What lies before the damaged frame is still good: ask for that much less.
                at, bad = part["frame_offset"], low + error.pos
                stop = min(int(np.searchsorted(at, bad)), stop - 1)
                resume = first + max(int(np.searchsorted(at, bad, "right")), stop + 1)
                fault = Fault(first + stop, resume, low + error.pos, error.reason)
            else:
                return Chunk(rows, first + stop)
        return Chunk(none(), first, fault)

    def position(self, shape: Shape, seq: int, /) -> tuple[int, Rows | None]:
        entries = idx.read(shape.index)
        at, index = entries["frame_offset"], seq - shape.base
        pos = int(at[index]) if index < len(at) else shape.data.size
        start = self._chain_start(shape, at, index, pos)
        low = int(np.searchsorted(at, start))
        if low >= index:
            return pos, None
        window = shape.data.fetch(start, self._frame_end(at, index, shape.data.size))
        return start, scan.walk_indexed(window, entries, low, index, shape.base, check=True, origin=start)

    def _chain_start(self, shape: Shape, at: NDArray[np.uint32], index: int, pos: int) -> int:
        """The first byte of the caller's batch that `pos` would cut, or `pos` where it cuts none."""
        start = pos
        while index > 0:
            index = int(np.searchsorted(at[:index], at[index - 1]))  # first record of the frame before
            before = int(at[index])
            if before == start:
                continue  # holes name the frame behind them
            if not shape.data.fetch(before + 5, before + 6)[0] & frame.MORE:
                break
            start = before
        return start

    def times(self, shape: Shape, /) -> tuple[int, int] | None:
        foot = self._footer(shape)
        if foot is not None:
            return (foot.ts_first_ms * 1000, foot.ts_last_ms * 1000) if foot.records else None
        entries = idx.read(shape.index)
        live = np.flatnonzero(entries["flags"] != idx.HOLE)
        if not len(live):
            return None
        return int(entries["ts"][live[0]]) * 1000, int(entries["ts"][live[-1]]) * 1000
