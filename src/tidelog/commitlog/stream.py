"""[shell] Streaming append: a record whose length is known only when it ends.

Chunks go straight to the data file behind a head that no reader takes for a record. When the
stream ends the real head and the checksum are written, and only then do the side files name
it. Over-long, broken, or refused by the disk: the file is cut back to the byte where it began.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator
from zlib import crc32

import numpy as np

from tidelog.commitlog.append import after_write, ceiling, check_expected, roll_if_due, roll_over, stamp
from tidelog.commitlog.codec import Batch
from tidelog.commitlog.state import State
from tidelog.errors import BadInput, Closed, Error, StreamBroken
from tidelog.formats.rows import Rows, Span
from tidelog.types import Buffer

_READ_BACK_BYTES = 1 << 20
_AROUND_BYTES = 1024  # more than any layout puts before and behind a record's data


class Stream:
    """One record in the making. `write` chunks, then `commit`; anything else ends in `roll_back`."""

    def __init__(self, state: State, batch: Batch, expected: int | None) -> None:
        self._state, self._batch = state, batch
        with state.mutex:
            state.check_writable()
            check_expected(state, expected)
            roll_if_due(state)
            if ceiling(state) <= _AROUND_BYTES and state.active.size:
                roll_over(state)  # the overflow is used up: nothing would fit
            self._seq, self._ts_us = state.highest, stamp(state)
            head = state.codec.stream_head(self._seq, self._ts_us, batch, -1)
            active = state.active
            active.settle()
            self._start = active.size + len(head)
            self._size = 0
            self._limit = min(max(ceiling(state) - len(head), 0), state.codec.record_bytes_max)
            state.streaming = True
            active.mark_dirty()
            try:
                active.data.write(active.size, head)
            except OSError as error:
                state.streaming = False
                raise active.undo(error) from error

    @property
    def limit(self) -> int:
        """The most bytes this record may have."""
        return self._limit

    def write(self, chunk: Buffer) -> None:
        """Add bytes to the record. On an error the record is rolled back and gone."""
        state = self._state
        if not state.streaming:
            raise Closed("this streamed record was already finished or rolled back; start another")
        try:
            view = memoryview(chunk).cast("B")
        except TypeError:
            self.roll_back()
            raise BadInput(f"a stream yields bytes, not {type(chunk).__name__}; the record was rolled back") from None
        if self._size + len(view) > self._limit:
            self.roll_back()
            raise StreamBroken(
                f"{state.path}: the streamed record passed its ceiling of {self._limit} bytes; it was rolled back "
                "and nothing was written, send less or raise segment_bytes_max"
            )
        with state.mutex:
            try:
                state.active.data.write(self._start + self._size, view)
            except OSError as error:
                state.streaming = False
                raise state.active.undo(error) from error
        self._size += len(view)

    def commit(self) -> int:
        """Make the record one; return its seq. What that promises is the sync policy's word."""
        state, active = self._state, self._state.active
        codec, durable = state.codec, state.config.sync != "interval"
        with state.mutex:
            if not state.streaming:
                raise Closed("this streamed record was already finished or rolled back; start another")
            try:
                head = codec.stream_head(self._seq, self._ts_us, self._batch, self._size)
                end = self._start + self._size
                tail = codec.stream_tail(head, self._pieces())
                if tail:
                    active.data.write(end, tail)
                if durable and not tail:
                    # No checksum travels with the data, so the head must not become durable before it.
                    state.latch.sync(active.data)
                active.data.write(active.size, head)
                checksum = self._checksum(head)
            except OSError as error:
                state.streaming = False
                raise active.undo(error) from error
            state.streaming = False
            one = np.ones(1, np.int64)
            data = Span(one * len(head), one * self._size)
            rows = Rows(head, one * self._seq, one * self._ts_us, one * 0, data)
            active.finish(rows, end + len(tail), durable=durable, shift=active.size, crcs=one * checksum)
            after_write(state, durable=durable)
        return self._seq

    def _checksum(self, head: bytes) -> int:
        """CRC-32 of the whole record, read back piece by piece: the head is known last but comes first."""
        checksum = crc32(head)
        for piece in self._pieces():
            checksum = crc32(piece, checksum)
        return checksum

    def roll_back(self) -> None:
        """Forget the record to the last byte. Harmless when it is finished already."""
        state = self._state
        with state.mutex:
            if state.streaming:
                state.streaming = False
                state.active.settle()

    def _pieces(self) -> Iterator[bytes]:
        """The record's data, read back in pieces."""
        data = self._state.active.data
        for pos in range(0, self._size, _READ_BACK_BYTES):
            yield data.read(self._start + pos, min(_READ_BACK_BYTES, self._size - pos))


def append_stream(state: State, chunks: Iterable[Buffer], batch: Batch, expected: int | None) -> int:
    """Write one record from an iterable of chunks; all of it or nothing."""
    with state.mutex:  # other writers wait, as they would for any append
        stream = Stream(state, batch, expected)
        try:
            for chunk in chunks:
                stream.write(chunk)
            return stream.commit()
        except Error:
            raise
        except Exception as error:
            # Whatever the caller's iterable raised: the record is not whole, so it is nothing.
            raise _broken(state, error) from error
        finally:
            stream.roll_back()


async def append_stream_async(
    state: State, chunks: AsyncIterable[Buffer], batch: Batch, expected: int | None
) -> int:
    """Write one record from an async iterable. Other appends to this log answer Busy until it ends."""
    stream = Stream(state, batch, expected)
    try:
        async for chunk in chunks:
            stream.write(chunk)
        return stream.commit()
    except Error:
        raise
    except Exception as error:
        raise _broken(state, error) from error
    finally:
        stream.roll_back()


def _broken(state: State, error: Exception) -> StreamBroken:
    return StreamBroken(
        f"{state.path}: the stream broke off ({type(error).__name__}: {error}); the record was rolled back and "
        "nothing was written, send it again"
    )
