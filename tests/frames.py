"""Encode and read frames one at a time: what tests need and the package does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidelog.formats import batch, frame, segment_index
from tidelog.formats.frame import APPEND, MORE, Fault, Frame, read_frame
from tidelog.formats.rows import Rows, ScanStop
from tidelog.formats.scan import broken_chain, chain_interruption
from tidelog.types import Buffer


def encode_batch(topic_id: int, first_seq: int, ts_ms: int, datas: Sequence[bytes], **columns: Any) -> bytes:
    """Encode a batch that is small enough for one frame."""
    (encoded,) = batch.encode_many(topic_id, first_seq, ts_ms, datas, **columns)
    return encoded


def encode_appends(topic_id: int, first_seq: int, ts_ms: int, datas: Sequence[bytes], **fields: Any) -> bytes:
    """Encode one Append frame per record."""
    return b"".join(
        frame.encode(APPEND, topic_id=topic_id, seq=seq, ts_ms=ts_ms, data=data, **fields)
        for seq, data in enumerate(datas, first_seq)
    )


def record_kinds(rows: Rows) -> list[int]:
    """Return the kind of each record of decoded rows, by the flags that its index entry gets."""
    is_json = segment_index.record_flags(rows) & segment_index.JSON != 0
    return [batch.KIND_JSON if each else batch.KIND_BYTES for each in is_json.tolist()]


class FrameReader:
    """Reads the frames of a buffer one by one: the reference of `scan.scan_headers`."""

    def __init__(self, buf: Buffer, pos: int = 0, end: int | None = None) -> None:
        self._buf, self._limit = memoryview(buf), len(buf) if end is None else end
        self.end = pos  # one past the last good frame
        self.whole_end = pos  # one past the last frame that completes its batch
        self.stop = ScanStop.END
        self.reason = ""

    def __iter__(self) -> Iterator[Frame]:
        chained: int | None = None  # the topic whose batch is not complete yet
        while True:
            found = read_frame(self._buf, self.end, self._limit)
            if isinstance(found, Frame) and chained is not None:
                found = chain_interruption(found, chained) or found
            if isinstance(found, Fault):
                self.stop, self.reason = found if chained is None else broken_chain(found, self.whole_end)
                return
            self.end = found.end
            chained = found.topic_id if found.flags & MORE else None
            if chained is None:
                self.whole_end = found.end
            yield found
