"""Append: batches, streamed records, and the background sync.

The sync policy (`LogConfig.sync`) decides what an ack means: under `each` and `batch` every record of the call is
durable when the call returns; under `interval` it survives a kill at once and a power cut `sync_interval_ms` later.

A streamed record has no known length until it ends. Its chunks go to the data file after a header that no reader takes
for a record. At the end the real header and the checksum are written, then the side files. A stream that is too long,
breaks off or meets a disk error is cut back to the byte where it began.

The thread of the `interval` policy (`Flusher`) logs and counts every exception and shows it in
`SegmentedLog.background`. It keeps running after an error: a full disk is temporary, and acked records still need a
sync. After a failed sync the log is latched and runs do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from threading import Event, Thread
from typing import Final

import numpy as np

from tidelog.commitlog import log_state, segment
from tidelog.commitlog.codec import OPTIONAL_COLUMNS, Batch, EncodedAppend, check_columns_supported, reencode
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.segment import ActiveSegment, SealedSegment
from tidelog.commitlog.storage import guard_stream, guard_stream_async
from tidelog.disk.durability import SyncFailed
from tidelog.disk.process import defer_signals_in
from tidelog.errors import BadInput, Closed, Error, TooLarge, UnexpectedSeq
from tidelog.formats.rows import Rows, Span
from tidelog.types import Buffer

_RECORD_OVERHEAD_BYTES = 64  # upper bound of header, checksum and columns; only used to decide when to roll


def append_batch(state: LogState, batch: Batch, expected: int | None) -> range:
    """Write a batch and return its seqs. On an error nothing of the failed part is visible, and the error's `acked` is
    the range of records of this call that were written before it."""
    with state.writer_lock, state.mutex:
        state.check_writable()
        first = state.highest
        check_expected_seq(state, expected)
        if not batch.datas:
            return range(first, first)
        check_columns(state, batch)
        largest = int(batch.data_lengths.max())
        limit = min(state.codec.record_bytes_max, remaining_bytes(state, empty_segment=True))
        if largest > limit:
            raise TooLarge(f"{state.path}: a record", size=largest, limit=limit)
        state.files.counters.append_calls += 1
        try:
            _write_batch(state, batch)
        except Error as error:
            error.acked = range(first, state.highest)
            raise
        return range(first, state.highest)


def check_expected_seq(state: LogState, expected: int | None) -> None:
    if expected is not None and expected != state.highest:
        raise UnexpectedSeq(state.path, expected=expected, actual=state.highest)


def check_columns(state: LogState, batch: Batch) -> None:
    """Refuse columns that the layout cannot store before a segment is rolled, a seq reserved or a part written."""
    check_columns_supported(
        batch, state.codec.name, *(name for name in OPTIONAL_COLUMNS if name not in state.codec.supported_columns)
    )


def remaining_bytes(state: LogState, *, empty_segment: bool = False) -> int:
    """Return how many bytes fit into the active segment, overflow included (laminarmq's `append_threshold`), or into an
    empty one."""
    used = 0 if empty_segment else state.active.size
    limit = min(state.config.segment_bytes_max + state.config.overflow_bytes, state.codec.segment_bytes_limit)
    return limit - used


def roll_if_needed(state: LogState) -> None:
    """Seal the active segment when it is full or old. An empty one stays."""
    active, config = state.active, state.config
    if active.size == 0:
        return
    full = active.size >= min(config.segment_bytes_max, state.codec.segment_bytes_limit)
    index_full = config.index_bytes_max is not None and active.index_bytes >= config.index_bytes_max
    age_ms = (state.clock.now_us() - active.created_us) // 1000
    old = config.segment_age_ms_max is not None and age_ms >= config.segment_age_ms_max
    if full or index_full or old:
        roll_segment(state)


def roll_segment(state: LogState, *, next_base: int | None = None, lenient: bool = False) -> None:
    """Seal the active segment and start another, at `next_base` where numbering must jump. On an error the old one
    stays active and nothing is lost. `lenient`: no write depends on it, so every failure may be retried."""
    old = state.active
    base = old.next_seq if next_base is None else next_base
    sealed = segment.seal_segment(state.files, state.latch, old, synced=state.durable == old.next_seq)
    state.durable = old.next_seq
    new = segment.create_segment(
        state.files,
        state.latch,
        base,
        now_us=state.clock.now_us(),
        last_ts_us=old.last_ts_us,
        lenient=lenient,
    )
    sealed.stop = base
    try:
        log_state.save_manifest(state, sealed=[*state.sealed, sealed], active=new)
    except OSError as error:
        if isinstance(error, log_state.ManifestReplaced):
            # The manifest may name the new segment already, so it becomes the active one. With no seqs reserved, the
            # next append saves the manifest again before it is acked.
            _switch_active(state, sealed, new)
            state.reserved_seq = 0
        else:
            new.close()  # its files are empty and not in the manifest: the next open sweeps them
        fatal = not lenient and (state.codec.latches_on_write_error or isinstance(error, SyncFailed))
        translate = state.latch.write_error if fatal else state.latch.retryable_error
        raise translate(error, f"naming segment {base} in the manifest") from error
    _switch_active(state, sealed, new)


def _switch_active(state: LogState, sealed: SealedSegment, active: ActiveSegment) -> None:
    state.files.counters.segments_sealed += 1
    old, state.active, state.durable = state.active, active, active.base
    state.sealed.append(sealed)
    old.close()


def next_ts_us(state: LogState) -> int:
    """Return the time for the next record: now, or the last record's time when the clock went back."""
    return max(state.clock.now_us(), state.active.last_ts_us)


def account_write(state: LogState, size: int, records: int, *, durable: bool) -> None:
    """Count a write of `size` bytes, update the durable seq, and sync when the interval is over."""
    state.files.counters.append_bytes += size
    state.files.counters.append_records += records
    state.active.last_write_us = state.clock.now_us()
    if durable:
        state.durable = state.highest
        state.synced_ms = state.clock.monotonic_ms()
        return
    # Beside the flusher thread an append syncs only after two intervals, when that thread was starved.
    intervals = 2 if state.has_flusher else 1
    if state.clock.monotonic_ms() - state.synced_ms >= intervals * state.config.sync_interval_ms:
        sync_active(state)


def sync_active(state: LogState) -> None:
    """Make every acked record durable."""
    if state.durable < state.highest:
        state.active.sync()
        state.durable = state.highest
    state.synced_ms = state.clock.monotonic_ms()


def _write_parts(
    state: LogState,
    count: int,
    count_fitting: Callable[[int, int], int],
    encode: Callable[[int, int], EncodedAppend],
) -> None:
    """Write `count` records in parts that fit their segments. `count_fitting(first, bytes_max)` counts the records from
    `first` on that fit, `encode(lo, hi)` encodes a part for the end of the active segment."""
    durable, done = state.config.sync != "interval", 0
    while done < count:
        roll_if_needed(state)
        fitting = count_fitting(done, remaining_bytes(state))
        if fitting == 0 and state.active.size:
            roll_segment(state)
            continue
        end = done + max(fitting, 1)
        encoded = encode(done, end)  # first: records that the layout refuses must not reach the manifest
        log_state.reserve_seqs(state, encoded.next_seq)
        before, first = state.active.size, state.highest
        state.active.write(encoded, durable=durable)
        account_write(state, state.active.size - before, state.highest - first, durable=durable)
        done = end


def _write_batch(state: LogState, batch: Batch) -> None:
    count, one_by_one = len(batch.datas), state.config.sync == "each"

    def part(lo: int, hi: int) -> Batch:
        return batch if hi - lo == count else batch.slice(lo, hi)

    def count_fitting(first: int, bytes_max: int) -> int:
        return _count_fitting(part(first, first + 1 if one_by_one else count), bytes_max)

    _write_parts(
        state, count, count_fitting, lambda lo, hi: state.active.encode_append(next_ts_us(state), part(lo, hi))
    )


def _present_columns(batch: Batch) -> list[bytes | Sequence[bytes]]:
    return [column for column in (batch.node, batch.tag, batch.meta) if column]


def _estimate_bytes(batch: Batch) -> int:
    """Return an upper bound of the bytes of a batch in a segment."""
    count = len(batch.datas)
    total = int(batch.data_lengths.sum(dtype=np.int64)) + count * _RECORD_OVERHEAD_BYTES
    for column in _present_columns(batch):
        total += len(column) * count if isinstance(column, bytes) else sum(map(len, column))
    return total


def _count_fitting(batch: Batch, bytes_max: int) -> int:
    """Count the leading records that fit into `bytes_max`. Usually all fit, and no work per record is done."""
    if _estimate_bytes(batch) <= bytes_max:
        return len(batch.datas)
    weights = [size + _RECORD_OVERHEAD_BYTES for size in batch.data_lengths.tolist()]
    for column in _present_columns(batch):
        more = [len(column)] * len(weights) if isinstance(column, bytes) else map(len, column)
        weights = [weight + extra for weight, extra in zip(weights, more, strict=True)]
    return sum(1 for total in accumulate(weights) if total <= bytes_max)


def append_rows(state: LogState, rows: Rows) -> None:
    """Write rows with their own seqs and times."""
    if not len(rows):
        return
    with state.writer_lock, state.mutex:
        state.check_writable()
        first, oldest = int(rows.seq[0]), int(rows.ts_us[0])
        if first < state.highest:
            raise UnexpectedSeq(state.path, expected=first, actual=state.highest)
        if bool((np.diff(rows.seq) <= 0).any()):
            raise BadInput(f"{state.path}: seqs must rise from record to record; nothing was written")
        largest, limit = (
            int(rows.data.size.max()),
            min(state.codec.record_bytes_max, remaining_bytes(state, empty_segment=True)),
        )
        if largest > limit:
            raise TooLarge(f"{state.path}: a record", size=largest, limit=limit)
        if oldest < state.active.last_ts_us or bool((np.diff(rows.ts_us) < 0).any()):
            back = first if oldest < state.active.last_ts_us else int(rows.seq[1 + int(np.diff(rows.ts_us).argmin())])
            raise BadInput(
                f"{state.path}: the time of seq {back} is before that of a record before it; nothing of this batch was "
                "written, a log's times never step back. convert can raise them (clamp_times)"
            )
        spans = [span for span in (rows.data, rows.node, rows.tag, rows.meta) if span is not None]
        weights = np.sum([span.size for span in spans], axis=0) + _RECORD_OVERHEAD_BYTES
        state.files.counters.append_calls += 1
        _write_parts(
            state,
            len(rows),
            lambda first, bytes_max: int(np.searchsorted(np.cumsum(weights[first:]), bytes_max, "right")),
            lambda lo, hi: state.active.encode_rows(reencode(state.codec, rows.slice(lo, hi))),
        )


def run_due_tasks(state: LogState) -> None:
    """Sync when the interval is over and seal when the segment is old. Appends continue during the sync, and a slow
    stream does not delay the sync of the records before it."""
    with state.mutex:
        if not state.can_sync():
            return
        # The flusher thread begins at half of the interval, so that the sync ends within it.
        interval_ms = state.config.sync_interval_ms // (2 if state.has_flusher else 1)
        due = state.clock.monotonic_ms() - state.synced_ms >= interval_ms and state.durable < state.highest
    if due:
        sync_concurrently(state)
    if state.writer_lock.acquire(blocking=False):  # otherwise the current writer seals, or the next tick
        try:
            with state.mutex:
                if state.can_roll():
                    roll_if_needed(state)
        finally:
            state.writer_lock.release()


def sync_concurrently(state: LogState) -> None:
    """Sync without the log's lock: every record written before the call is durable on return."""
    with state.mutex:
        active, upto = state.active, state.highest
        if state.durable >= upto:
            return
    if not active.sync_concurrently():
        return  # sealed in the meantime, which synced it
    with state.mutex:
        if state.active is active:
            state.durable = max(state.durable, upto)
            state.synced_ms = state.clock.monotonic_ms()


_READ_BACK_CHUNK_BYTES = 1 << 20
_FRAMING_BYTES_MAX = 1024  # more than any layout puts before and after a record's data


@defer_signals_in("__init__", "write", "commit", "roll_back")
class StreamAppend:
    """A record that is being streamed: `write` chunks, then `commit`, or `roll_back`."""

    def __init__(self, state: LogState, batch: Batch, expected: int | None) -> None:
        self._state, self._batch = state, batch
        self._meta = batch.meta if isinstance(batch.meta, bytes) else batch.meta[0]
        with state.writer_lock, state.mutex:
            state.check_writable()
            check_expected_seq(state, expected)
            check_columns(state, batch)
            limit = min(state.codec.record_bytes_max, remaining_bytes(state, empty_segment=True))
            if len(self._meta) > limit:
                raise TooLarge(f"{state.path}: the meta of a record", size=len(self._meta), limit=limit)
            roll_if_needed(state)
            if remaining_bytes(state) <= _FRAMING_BYTES_MAX + len(self._meta) and state.active.size:
                roll_segment(state)  # the overflow is used up: nothing would fit
            self._seq, self._ts_us = state.highest, next_ts_us(state)
            header = state.codec.encode_stream_header(self._seq, self._ts_us, batch, -1)
            self._header_bytes = len(header)
            framing_bytes = len(header) + len(state.codec.encode_stream_trailer(header, []))
            self._bytes_max = min(max(remaining_bytes(state) - framing_bytes, 0), state.codec.record_bytes_max)
            log_state.reserve_seqs(state, self._seq + 1)
            state.active.roll_back_interrupted()
            state.active_stream = self
            self._stage(header, None)

    @property
    def bytes_max(self) -> int:
        """The largest size of this record."""
        return self._bytes_max

    @property
    def size(self) -> int:
        """The bytes of data written so far."""
        return self._state.active.data.staged_bytes - self._header_bytes

    def write(self, chunk: Buffer) -> None:
        """Add bytes to the record. On an error the record is rolled back."""
        with self._state.writer_lock, self._state.mutex:
            self._check_active()
            self._stage(chunk, self._bytes_max + self._header_bytes)

    def _stage(self, chunk: Buffer, threshold: int | None) -> None:
        active = self._state.active
        try:
            active.data.stage(chunk, threshold)
        except OSError as error:
            self._state.active_stream = None
            raise active.roll_back_after(error) from error
        except Error:
            self.roll_back()
            raise

    def commit(self) -> int:
        """Complete the record and return its seq. The sync policy says whether it is durable on return."""
        state, active = self._state, self._state.active
        codec, durable = state.codec, state.config.sync != "interval"
        with state.writer_lock, state.mutex:
            self._check_active()
            size = self.size
            try:
                header = codec.encode_stream_header(self._seq, self._ts_us, self._batch, size)
                trailer = codec.encode_stream_trailer(header, self._read_back(size))
                if trailer:
                    active.data.stage(trailer)
                elif durable:
                    # Without a checksum in the data file, the header must not become durable before the data.
                    active.timed_sync(active.data)
                active.data.overwrite_staged(0, header)
                # Read back piece by piece: the header comes first and is known last.
                checksum = codec.checksum(chain((header,), self._read_back(size)))
            except OSError as error:
                state.active_stream = None
                raise active.roll_back_after(error) from error
            state.active_stream = None
            one, meta_bytes = np.ones(1, np.int64), len(self._meta)
            data = Span(one * len(header), one * size)
            meta = Span(one * (len(header) - meta_bytes), one * meta_bytes) if meta_bytes else None
            rows = Rows(header, one * self._seq, one * self._ts_us, one * 0, data, meta=meta)
            before = active.size
            active.commit_stream(rows, np.array([checksum], np.uint64), durable=durable)
            state.files.counters.append_calls += 1
            account_write(state, active.size - before, 1, durable=durable)
        return self._seq

    def _check_active(self) -> None:
        self._state.check_open()
        if self._state.active_stream is not self:
            raise Closed("this streamed record was already finished or rolled back; start another")

    def _read_back(self, size: int) -> Iterator[bytes]:
        for pos in range(0, size, _READ_BACK_CHUNK_BYTES):
            yield self._state.active.data.read_staged(self._header_bytes + pos, min(_READ_BACK_CHUNK_BYTES, size - pos))

    def roll_back(self) -> None:
        """Remove every byte of the record. Does nothing when it is finished already."""
        state = self._state
        with state.writer_lock, state.mutex:
            if state.active_stream is self:
                state.active_stream = None
                if not state.closed:
                    state.active.roll_back_interrupted()


def append_stream(state: LogState, chunks: Iterable[Buffer], batch: Batch, expected: int | None) -> int:
    """Write one record from an iterable of chunks, atomically."""
    with state.writer_lock:  # other writers wait, as for any append; readers do not
        stream = StreamAppend(state, batch, expected)
        try:
            for chunk in guard_stream(state.path, chunks):
                stream.write(chunk)
            return stream.commit()
        finally:
            stream.roll_back()


async def append_stream_async(
    state: LogState, chunks: AsyncIterable[Buffer], batch: Batch, expected: int | None
) -> int:
    """Write one record from an async iterable. Other appends to this log raise Busy until it ends."""
    stream = StreamAppend(state, batch, expected)
    try:
        async for chunk in guard_stream_async(state.path, chunks):
            stream.write(chunk)
        return stream.commit()
    finally:
        stream.roll_back()


_log = logging.getLogger("tidelog.commitlog")
_REPEAT_LOG_INTERVAL_MS: Final = 60_000  # while the same error repeats


@dataclass(frozen=True, slots=True)
class FlusherState:
    """The background syncs of a log since it was opened."""

    runs: int = 0
    failures: int = 0
    consecutive_failures: int = 0  # failures since the last run that succeeded; 0: the last one did
    last_error: str | None = None  # kept after a success
    is_latched: bool = False  # no run can succeed until the log is opened again


class Flusher:
    def __init__(self, state: LogState) -> None:
        self._state = state
        state.has_flusher = True
        self._runs = self._failures = self._consecutive_failures = 0
        self._last_error: str | None = None
        self._logged_ms = 0
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=f"tidelog sync {state.path}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> FlusherState:
        latched = self._state.latch.is_tripped
        return FlusherState(self._runs, self._failures, self._consecutive_failures, self._last_error, latched)

    def _run(self) -> None:
        pause_s = max(self._state.config.sync_interval_ms / 4000, 0.001)
        while not self._stopping.wait(pause_s):
            self.run_once()

    def run_once(self) -> None:
        """Sync and seal if due. Raises nothing."""
        if self._state.latch.is_tripped:
            return  # the run that latched it was counted, and the next append or sync raises
        self._runs += 1
        try:
            run_due_tasks(self._state)
        except Exception as error:
            self._on_error(error)
        else:
            self._consecutive_failures = 0

    def _on_error(self, error: Exception) -> None:
        self._failures, self._consecutive_failures = self._failures + 1, self._consecutive_failures + 1
        text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        now_ms = self._state.clock.monotonic_ms()
        if (
            self._consecutive_failures == 1
            or text != self._last_error
            or now_ms - self._logged_ms >= _REPEAT_LOG_INTERVAL_MS
        ):
            self._logged_ms = now_ms
            trace = None if isinstance(error, Error) else error
            _log.error("%s: a background sync failed: %s", self._state.path, text, exc_info=trace)
        self._last_error = text

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
