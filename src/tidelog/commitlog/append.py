"""[shell] Append: batches to the active segment, rolled when it is full or old.

What an ack means is the sync policy's word (`LogConfig.sync`): under `each` and `batch` every
record of the call survives a power cut when the call returns; under `interval` it survives a
kill now and a power cut `sync_interval_ms` later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tidelog.commitlog import manifest, roll
from tidelog.commitlog.codec import COLUMNS, Batch, refuse, rewrite
from tidelog.commitlog.segment import Active, Sealed
from tidelog.commitlog.state import State
from tidelog.disk.atomic import SyncFailed
from tidelog.errors import BadInput, Error, TooLarge, UnexpectedSeq
from tidelog.formats.rows import Rows

# An upper bound on what a layout adds to a record: frame header, checksum, columns. Only used to decide when to roll.
_OVERHEAD_BYTES = 64


def append(state: State, batch: Batch, expected: int | None) -> range:
    """Write a batch; return its seqs. On an error nothing of the part that failed is visible, and the error's
    `acked` names the records of this call that were written before it."""
    with state.turn, state.mutex:
        state.check_writable()
        first = state.highest
        check_expected(state, expected)
        if not batch.datas:
            return range(first, first)
        check_columns(state, batch)
        largest = int(batch.lengths.max())
        limit = min(state.codec.record_bytes_max, ceiling(state, fresh=True))
        if largest > limit:
            raise TooLarge(f"{state.path}: a record", size=largest, limit=limit)
        try:
            _write_parts(state, batch)
        except Error as error:
            error.acked = range(first, state.highest)
            raise
        return range(first, state.highest)


def check_expected(state: State, expected: int | None) -> None:
    if expected is not None and expected != state.highest:
        raise UnexpectedSeq(state.path, expected=expected, actual=state.highest)


def check_columns(state: State, batch: Batch) -> None:
    """Refuse a batch that the layout has no room for before a segment is rolled, a seq reserved or a part written."""
    refuse(batch, state.codec.name, *(name for name in COLUMNS if name not in state.codec.room))


def ceiling(state: State, *, fresh: bool = False) -> int:
    """How many bytes the active segment can still take: what is left of it, and the overflow. The seed's
    `append_threshold`. `fresh`: of an empty segment."""
    used = 0 if fresh else state.active.size
    room = state.config.segment_bytes_max - used + state.config.overflow_bytes
    return min(room, state.codec.segment_bytes_limit - used)


def roll_if_due(state: State) -> None:
    """Seal the active segment when it is full or old. An empty one stays."""
    active, config = state.active, state.config
    if active.size == 0:
        return
    full = active.size >= min(config.segment_bytes_max, state.codec.segment_bytes_limit)
    index_full = config.index_bytes_max is not None and active.index_bytes >= config.index_bytes_max
    age_ms = (state.clock.now_us() - active.born_us) // 1000
    old = config.segment_age_ms_max is not None and age_ms >= config.segment_age_ms_max
    if full or index_full or old:
        roll_over(state)


def roll_over(state: State, *, next_base: int | None = None, lenient: bool = False) -> None:
    """Seal the active segment and start another, at `next_base` where numbering must jump. On an error the old one
    stays active and nothing is lost. `lenient`: nobody waits to write, so a failure to start another may be retried."""
    old = state.active
    base = old.next_seq if next_base is None else next_base
    done = roll.seal(state.files, state.latch, old, synced=state.durable == old.next_seq)
    state.durable = old.next_seq
    fresh = roll.birth(
        state.files,
        state.latch,
        base,
        now_us=state.clock.now_us(),
        last_ts_us=old.last_ts_us,
        lenient=lenient,
    )
    done.stop = base
    try:
        manifest.save(state, sealed=[*state.sealed, done], active=fresh)
    except OSError as error:
        if isinstance(error, manifest.Replaced):
            # The manifest may name the new segment already, so it is the active one. Nothing is acked in it before
            # another save of the manifest went well.
            _go_on(state, done, fresh)
            state.reserved = 0
        else:
            fresh.close()  # its files are empty and not in the manifest: the next open sweeps them
        fatal = not lenient and (state.codec.latch_on_write_error or isinstance(error, SyncFailed))
        step = state.latch.failed if fatal else state.latch.refused
        raise step(error, f"naming segment {base} in the manifest") from error
    _go_on(state, done, fresh)


def _go_on(state: State, done: Sealed, fresh: Active) -> None:
    old, state.active, state.durable = state.active, fresh, fresh.base
    state.sealed.append(done)
    old.close()


def stamp(state: State) -> int:
    """The time for the next record: now, or the last record's time when the clock went back."""
    return max(state.clock.now_us(), state.active.last_ts_us)


def after_write(state: State, *, durable: bool) -> None:
    """Account for a write: what is durable now, and whether the interval is over."""
    state.active.last_write_us = state.clock.now_us()
    if durable:
        state.durable = state.highest
        state.synced_ms = state.clock.monotonic_ms()
        return
    # With a thread that keeps the interval, an append syncs itself only when that thread was starved.
    patience = 2 if state.background else 1
    if state.clock.monotonic_ms() - state.synced_ms >= patience * state.config.sync_interval_ms:
        sync(state)


def sync(state: State) -> None:
    """Make everything acked so far survive a power cut."""
    if state.durable < state.highest:
        state.active.sync()
        state.durable = state.highest
    state.synced_ms = state.clock.monotonic_ms()


def _write_parts(state: State, batch: Batch) -> None:
    policy = state.config.sync
    durable = policy != "interval"
    done, count = 0, len(batch.datas)
    while done < count:
        roll_if_due(state)
        rest = batch if done == 0 else batch.part(done, count)
        take = 1 if policy == "each" else _fitting(rest, ceiling(state))
        if state.active.size and (take == 0 or (take == 1 and _weight(rest.part(0, 1)) > ceiling(state))):
            roll_over(state)
            continue
        part = rest if take == len(rest.datas) else rest.part(0, max(take, 1))
        made = state.active.place(stamp(state), part)  # first: what the layout refuses must not reach the manifest
        manifest.reserve(state, state.active.next_seq + len(part.datas))
        state.active.write(made, durable=durable)
        after_write(state, durable=durable)
        done += len(part.datas)


def _columns(batch: Batch) -> list[bytes | Sequence[bytes]]:
    return [column for column in (batch.node, batch.tag, batch.meta) if column]


def _weight(batch: Batch) -> int:
    """An upper bound on the bytes a batch takes in a segment."""
    count = len(batch.datas)
    total = int(batch.lengths.sum(dtype=np.int64)) + count * _OVERHEAD_BYTES
    for column in _columns(batch):
        total += len(column) * count if isinstance(column, bytes) else sum(map(len, column))
    return total


def _fitting(batch: Batch, room: int) -> int:
    """How many of the first records fit into `room` bytes. Nearly always all: only then is nothing done per record."""
    if _weight(batch) <= room:
        return len(batch.datas)
    weights = [size + _OVERHEAD_BYTES for size in batch.lengths.tolist()]
    for column in _columns(batch):
        more = [len(column)] * len(weights) if isinstance(column, bytes) else map(len, column)
        weights = [weight + extra for weight, extra in zip(weights, more, strict=True)]
    return sum(1 for total in accumulate(weights) if total <= room)


def append_rows(state: State, rows: Rows) -> None:
    """Write rows seqs and times as they are, in parts that fit their segments."""
    if not len(rows):
        return
    with state.turn, state.mutex:
        state.check_writable()
        first, oldest = int(rows.seq[0]), int(rows.ts_us[0])
        if first < state.highest:
            raise UnexpectedSeq(state.path, expected=first, actual=state.highest)
        if bool((np.diff(rows.seq) <= 0).any()):
            raise BadInput(f"{state.path}: seqs must rise from record to record; nothing was written")
        largest, limit = int(rows.data.size.max()), min(state.codec.record_bytes_max, ceiling(state, fresh=True))
        if largest > limit:
            raise TooLarge(f"{state.path}: a record", size=largest, limit=limit)
        if oldest < state.active.last_ts_us or bool((np.diff(rows.ts_us) < 0).any()):
            back = first if oldest < state.active.last_ts_us else int(rows.seq[1 + int(np.diff(rows.ts_us).argmin())])
            raise BadInput(
                f"{state.path}: the time of seq {back} is before that of a record before it; nothing of this batch was "
                "written, a log's times never step back. convert can raise them (clamp_times)"
            )
        durable = state.config.sync != "interval"
        spans = [span for span in (rows.data, rows.node, rows.tag, rows.meta) if span is not None]
        weights = np.sum([span.size for span in spans], axis=0) + _OVERHEAD_BYTES
        done = 0
        while done < len(rows):
            roll_if_due(state)
            take = int(np.searchsorted(np.cumsum(weights[done:]), ceiling(state), "right"))
            if take == 0 and state.active.size:
                roll_over(state)
                continue
            part = rewrite(state.codec, rows.part(done, done + max(take, 1)))
            manifest.reserve(state, int(part.seq[-1]) + 1)
            state.active.append_rows(part, durable=durable)
            after_write(state, durable=durable)
            done += max(take, 1)


def tick(state: State) -> None:
    """Sync when the interval is over and seal when the segment is old. Appends go on while the disk syncs, and a stream
    that takes long does not keep the records before it from the disk."""
    with state.mutex:
        if not state.may_sync():
            return
        # The thread that keeps the interval begins at half of it, so that the sync is over before all of it is.
        interval_ms = state.config.sync_interval_ms // (2 if state.background else 1)
        due = state.clock.monotonic_ms() - state.synced_ms >= interval_ms and state.durable < state.highest
    if due:
        sync_beside(state)
    if state.turn.acquire(blocking=False):  # a writer at work seals by itself, or the next tick does
        try:
            with state.mutex:
                if state.idle():
                    roll_if_due(state)
        finally:
            state.turn.release()


def sync_beside(state: State) -> None:
    """`sync` without the log's lock: whatever was written before is on disk when this returns, whatever comes meanwhile
    may be."""
    with state.mutex:
        active, upto = state.active, state.highest
        if state.durable >= upto:
            return
    if not active.sync_beside():
        return  # sealed in the meantime, and synced by that
    with state.mutex:
        if state.active is active:
            state.durable = max(state.durable, upto)
            state.synced_ms = state.clock.monotonic_ms()
