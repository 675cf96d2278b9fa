"""[shell] Streaming append: a record whose length is known only when it ends.

Chunks go straight to the data file behind a head that no reader takes for a record. When the
stream ends the real head and the checksum are written, and only then do the side files name
it. Over-long, broken, or refused by the disk: the file is cut back to the byte where it began.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator
from itertools import chain

import numpy as np

from tidelog.commitlog import manifest
from tidelog.commitlog.append import after_write, ceiling, check_columns, check_expected, roll_if_due, roll_over, stamp
from tidelog.commitlog.codec import Batch
from tidelog.commitlog.state import State
from tidelog.commitlog.storage import told, told_async
from tidelog.disk.interrupts import deferring
from tidelog.errors import Closed, Error
from tidelog.formats.rows import Rows, Span
from tidelog.types import Buffer

_READ_BACK_BYTES = 1 << 20
_AROUND_BYTES = 1024  # more than any layout puts before and behind a record's data


@deferring("__init__", "write", "commit", "roll_back")
class Stream:
    """One record in the making. `write` chunks, then `commit`; anything else ends in `roll_back`."""

    def __init__(self, state: State, batch: Batch, expected: int | None) -> None:
        self._state, self._batch = state, batch
        with state.turn, state.mutex:
            state.check_writable()
            check_expected(state, expected)
            check_columns(state, batch)
            roll_if_due(state)
            if ceiling(state) <= _AROUND_BYTES and state.active.size:
                roll_over(state)  # the overflow is used up: nothing would fit
            self._seq, self._ts_us = state.highest, stamp(state)
            head = state.codec.stream_head(self._seq, self._ts_us, batch, -1)
            self._head_bytes = len(head)
            around = len(head) + len(state.codec.stream_tail(head, []))
            self._limit = min(max(ceiling(state) - around, 0), state.codec.record_bytes_max)
            manifest.reserve(state, self._seq + 1)
            state.active.settle()
            state.stream = self
            self._stage(head, None)

    @property
    def limit(self) -> int:
        """The most bytes this record may have."""
        return self._limit

    @property
    def size(self) -> int:
        """The bytes it has so far."""
        return self._state.active.data.staged - self._head_bytes

    def write(self, chunk: Buffer) -> None:
        """Add bytes to the record. On an error the record is rolled back and gone."""
        with self._state.turn, self._state.mutex:
            self._check_alive()
            self._stage(chunk, self._limit + self._head_bytes)

    def _stage(self, chunk: Buffer, threshold: int | None) -> None:
        active = self._state.active
        try:
            active.data.stage(chunk, threshold)
        except OSError as error:
            self._state.stream = None
            raise active.undo(error) from error
        except Error:
            self.roll_back()
            raise

    def commit(self) -> int:
        """Make the record one; return its seq. What that promises is the sync policy's word."""
        state, active = self._state, self._state.active
        codec, durable = state.codec, state.config.sync != "interval"
        with state.turn, state.mutex:
            self._check_alive()
            size = self.size
            try:
                head = codec.stream_head(self._seq, self._ts_us, self._batch, size)
                tail = codec.stream_tail(head, self._pieces(size))
                if tail:
                    active.data.stage(tail)
                elif durable:
                    # No checksum travels with the data, so the head must not become durable before it.
                    state.latch.sync(active.data)
                active.data.patch(0, head)
                checksum = self._checksum(head, size)
            except OSError as error:
                state.stream = None
                raise active.undo(error) from error
            state.stream = None
            one = np.ones(1, np.int64)
            data = Span(one * len(head), one * size)
            rows = Rows(head, one * self._seq, one * self._ts_us, one * 0, data)
            active.finish_stream(rows, np.array([checksum], np.uint64), durable=durable)
            after_write(state, durable=durable)
        return self._seq

    def _check_alive(self) -> None:
        self._state.check_open()
        if self._state.stream is not self:
            raise Closed("this streamed record was already finished or rolled back; start another")

    def _checksum(self, head: bytes, size: int) -> int:
        """Checksum of the whole record, read back piece by piece: the head is known last but comes first."""
        return self._state.codec.checksum(chain((head,), self._pieces(size)))

    def _pieces(self, size: int) -> Iterator[bytes]:
        for pos in range(0, size, _READ_BACK_BYTES):
            yield self._state.active.data.read_staged(self._head_bytes + pos, min(_READ_BACK_BYTES, size - pos))

    def roll_back(self) -> None:
        """Forget the record to the last byte. Harmless when it is finished already."""
        state = self._state
        with state.turn, state.mutex:
            if state.stream is self:
                state.stream = None
                if not state.closed:
                    state.active.settle()


def append_stream(state: State, chunks: Iterable[Buffer], batch: Batch, expected: int | None) -> int:
    """Write one record from an iterable of chunks; all of it or nothing."""
    with state.turn:  # other writers wait, as they would for any append; readers do not
        stream = Stream(state, batch, expected)
        try:
            for chunk in told(state.path, chunks):
                stream.write(chunk)
            return stream.commit()
        finally:
            stream.roll_back()


async def append_stream_async(state: State, chunks: AsyncIterable[Buffer], batch: Batch, expected: int | None) -> int:
    """Write one record from an async iterable. Other appends to this log answer Busy until it ends."""
    stream = Stream(state, batch, expected)
    try:
        async for chunk in told_async(state.path, chunks):
            stream.write(chunk)
        return stream.commit()
    finally:
        stream.roll_back()
