"""Encode batches whose records have nothing but data into memory that is used again.

    batch.encode_many   every frame in memory of its own
    plan_frames         each frame is encoded when it is written, where the one before it was     a segment
    write_frames        all frames in one buffer, which is given back once they are written       the WAL

Fresh memory costs more to touch than to fill: a megabyte takes 0.1 ms in memory that was used before, and 0.2 to 0.6 ms
in fresh memory. The bytes are the same. Measured for 1000 values of 100 bytes, compiled and in Python: 5 µs and 60 for
their lengths; 2 µs and 10 to split them into frames.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog import native
from tidelog.formats import batch
from tidelog.formats.frame import APPEND_BATCH, MORE, OVERHEAD_BYTES, U32_MAX, encode_checksum, encode_header
from tidelog.types import Buffer


def value_lengths(datas: Sequence[bytes]) -> tuple[Sequence[int], int]:
    """Return the length of each value and their sum. A list where one is longer than a u32 can say, else an array."""
    known = native.value_lengths(datas)
    if known is None:
        lengths = list(map(len, datas))
        return (lengths if max(lengths) > U32_MAX else array("I", lengths)), sum(lengths)
    packed = array("I")
    packed.frombytes(known[0])
    return packed, known[1]


class FramePlan(NamedTuple):
    """A caller's batch that is written frame by frame, and the fields that its index needs."""

    frames: list[Callable[[], list[Buffer]]]  # each encodes one frame, as pieces, when it is to be written
    starts: list[int]  # where each frame starts
    counts: list[int]  # how many records it holds


def plan_frames(
    topic_id: int,
    first_seq: int,
    ts_ms: int,
    datas: Sequence[bytes],
    lengths: NDArray[np.uint32],
    *,
    tag: bytes = b"",
    node: bytes = b"",
    flags: int = 0,
    start: int = 0,
    allocate: Callable[[int], bytearray] = bytearray,
) -> FramePlan:
    """Plan the frames of `encode_many`, for records with data only, to be encoded one at a time; the first begins at
    position `start`.

    Each is encoded into the memory that `allocate` returns. Where that is always the same, a frame has to be written
    before the next one is encoded, and the memory of one frame stays in the processor's cache: measured 0.26 ms for a
    megabyte with two frames alive, 0.1 ms with one.
    """
    frames = _Frames(topic_id, first_seq, ts_ms, datas, lengths, tag, node, flags)
    starts, counts = [], []
    for piece in frames.pieces:
        starts.append(start)
        counts.append(piece[1] - piece[0])
        start += frames.size(*piece)

    def encode_frame(lo: int, hi: int, size: int) -> list[Buffer]:
        buffer = allocate(frames.size(lo, hi, size))
        return [memoryview(buffer)[: frames.write(buffer, 0, lo, hi, size)]]

    return FramePlan([partial(encode_frame, *piece) for piece in frames.pieces], starts, counts)


class FrameBuffers(NamedTuple):
    """A caller's batch as frames, one after the other in a borrowed buffer."""

    buffer: bytearray
    frames: list[memoryview]
    counts: list[int]  # how many records each holds


def write_frames(
    allocate: Callable[[int], bytearray],
    topic_id: int,
    first_seq: int,
    ts_ms: int,
    datas: Sequence[bytes],
    lengths: Sequence[int],
    *,
    tag: bytes = b"",
    node: bytes = b"",
    flags: int = 0,
) -> FrameBuffers:
    """Encode the frames of `encode_many`, for records with data only, at the beginning of the buffer that `allocate`
    returns, which has at least the size it is called with."""
    frames = _Frames(topic_id, first_seq, ts_ms, datas, np.asarray(lengths, "<u4"), tag, node, flags)
    buffer = allocate(sum(frames.size(*piece) for piece in frames.pieces))
    view, start, written = memoryview(buffer), 0, FrameBuffers(buffer, [], [])
    for lo, hi, size in frames.pieces:
        end = frames.write(buffer, start, lo, hi, size)
        written.frames.append(view[start:end])
        written.counts.append(hi - lo)
        start = end
    return written


class _Frames:
    """The frames of one batch: `pieces` are the records [lo, hi) of each and the bytes of their data."""

    def __init__(
        self,
        topic_id: int,
        first_seq: int,
        ts_ms: int,
        datas: Sequence[bytes],
        lengths: NDArray[np.uint32],
        tag: bytes,
        node: bytes,
        flags: int,
    ) -> None:
        self._header = partial(encode_header, APPEND_BATCH, topic_id=topic_id, ts_ms=ts_ms, node=node, tag=tag)
        self._first_seq, self._datas, self._lengths, self._flags = first_seq, datas, lengths, flags
        self._overhead_bytes = OVERHEAD_BYTES + len(node) + len(tag) + batch.HEAD_BYTES
        self.pieces = batch.split_records(lengths)

    def size(self, lo: int, hi: int, data_bytes: int) -> int:
        """Return the bytes of a frame."""
        return self._overhead_bytes + 4 * (hi - lo) + data_bytes

    def write(self, buffer: bytearray, start: int, lo: int, hi: int, data_bytes: int) -> int:
        """Encode a frame at `start` and return where it ends."""
        lengths = batch.encode_lengths(self._lengths[lo:hi])
        header = self._header(
            seq=self._first_seq + lo,
            last_seq=self._first_seq + hi - 1,
            data_len=len(lengths) + data_bytes,
            flags=self._flags | (MORE if hi < len(self._lengths) else 0),
        )
        view, pos = memoryview(buffer), start + len(header) + len(lengths)
        view[start:pos] = header + lengths
        end = native.copy_values_into(buffer, pos, self._datas, lo, hi)
        assert end == pos + data_bytes, "the lengths are those of the records"
        view[end : end + 8] = encode_checksum(view[start:end])
        return end + 8
