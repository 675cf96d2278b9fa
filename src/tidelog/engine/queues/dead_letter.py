"""Dead letters: a job that was delivered too often moves to another topic; redrive moves it back.

    1  append a copy to the dead-letter topic, within its limits, and sync it whatever the topic's class is
    2  one commit deletes the job from the queue, with the queue's class, and counts it

The topics may be in different WAL shards, and a power cut may keep either write. Because 1 is durable before 2 is
written, a crash leaves the job in both topics at worst, never in neither. A dead letter holds its queue and seq, so a
duplicate can be recognised. If the dead-letter topic refuses it, the job is claimable again, nothing is counted, and
`Queue.dead_letter_error` holds the reason. No lock is held while either write is waited for. A job of a queue that
survives restarts is not moved to an ephemeral topic: no sync could make its copy durable.

Redrive works in batches: append to the queue, synced whatever its class is, then delete from the dead-letter topic
with that topic's class. A crash in between may leave one batch in both; none is ever in neither. Jobs that go back to
an ephemeral queue last until the next restart, as its other jobs do. See docs/decisions/0026.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from tidelog.clock import Clock
from tidelog.disk.process import defer_signals
from tidelog.engine import append, batch_encoder, delete, large_append
from tidelog.engine.batch_encoder import Batch, check_int, from_json
from tidelog.engine.config import TopicConfig
from tidelog.engine.queues.history import JobStep
from tidelog.engine.queues.jobs import AckResult, JobChunk, JobFailure, plan_reads, read_jobs, select_jobs
from tidelog.engine.queues.queue_state import QueueCommit, QueueState, get_queue_state
from tidelog.engine.read import RecordChunk, TopicScan, chunk_records
from tidelog.engine.results import Appended, Record
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Damaged, Error, NotAQueue, Refused, TopicNotFound, Unavailable
from tidelog.formats import control_frames
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import Rows, Span, copy_values
from tidelog.wal import CommitFuture

DEAD_LETTER_FROM: Final = "$dead_letter_from"
DEAD_LETTER_DELIVERIES: Final = "$dead_letter_deliveries"
DEAD_LETTER_SRC_SEQ: Final = "$dead_letter_src_seq"
ERROR: Final = "$error"
ERROR_TYPE: Final = "$error_type"
FAILED_AT: Final = "$failed_at"
DEAD_LETTER_META_KEYS: Final = (
    *(DEAD_LETTER_FROM, DEAD_LETTER_DELIVERIES, DEAD_LETTER_SRC_SEQ),
    *(ERROR, ERROR_TYPE, FAILED_AT),
)
ERROR_CHARS_MAX: Final = 500
Ids: TypeAlias = Sequence[int | None] | None
_log = logging.getLogger("tidelog.queues")
_DEAD_LETTER_META_BYTES: Final = 8_192  # allowance for these keys beside a meta of the maximum size


def move_to_dead_letter(state: QueueState, dead: Sequence[int], chunks: Sequence[JobChunk]) -> Error | None:
    """Move these pending jobs to the dead-letter topic; those that cannot be moved are what they were before. Returns
    the error of these."""
    failure: Error | None = None
    try:
        moved: list[int] = []
        for chunk in chunks:
            copied, error = _move_chunk(state, chunk)
            moved += copied
            failure = error or failure
            if isinstance(error, Damaged):
                break  # the shard of the dead-letter topic is latched
        if moved:
            delete.forward_before_delete(state.topic)
            _delete_moved(state, moved).wait()
    except Error as error:
        failure = error
    finally:
        with state.topic.lock:
            state.leases.on_settle_failed(dead)  # those that are still pending
    _report_failure(state, failure)
    return failure


def describe_failure(error: object, now_ms: int) -> JobFailure:
    """What a dead letter says about the error of a worker: an exception, or a text."""
    if isinstance(error, BaseException):
        text, kind = str(error), type(error).__qualname__
    elif isinstance(error, tuple):
        text, kind = error
    else:
        text, kind = str(error), ""
    # Lone surrogates, as in undecodable file names, cannot be stored.
    text, kind = (each[:ERROR_CHARS_MAX].encode(errors="replace").decode() for each in (text, kind))
    return JobFailure(text, kind, now_ms)


def reject_jobs(state: QueueState, node: str, seqs: Sequence[int], lease_ids: Ids, error: object) -> AckResult:
    """Move leased jobs to the dead-letter topic now, however often they were delivered. Blocks on the disk."""
    topic = state.topic
    with topic.lock:
        topic.check_writable()
        if topic.config.dead_letter is None:
            raise BadInput(
                f"{topic.name} has no dead_letter, so its jobs cannot be rejected; nothing was done, configure one or "
                "ack the jobs"
            )
        now_ms = topic.context.now_ms()
        state.refresh(now_ms)
        leases, skipped = state.leases.begin_settle(seqs, node, lease_ids or [None] * len(seqs))
        rejected = sorted(seq for seq, _ in leases)
        if error is not None:
            state.failures.update(dict.fromkeys(rejected, describe_failure(error, now_ms)))
        plan = plan_reads(topic.index, rejected, state.read_ahead)
    failure: Error | None = None
    if rejected:
        try:
            chunks, _ = read_jobs(plan)
        except BaseException:
            with topic.lock:
                state.leases.on_settle_failed(rejected)
            raise
        failure = move_to_dead_letter(state, rejected, select_jobs(chunks, rejected))
        state.notify_listeners()
    with topic.lock:
        kept = [seq for seq in rejected if seq in state.leases.leased]
        ready, in_flight, _ = state.counts()
    if failure is not None and len(kept) == len(rejected):
        raise failure
    return AckResult(len(rejected) - len(kept), [*skipped, *kept], ready, in_flight)


def _report_failure(state: QueueState, failure: Error | None) -> None:
    """Store the outcome of the last move; log each cause once in a row."""
    before, state.dead_letter_error = state.dead_letter_error, failure
    if failure is not None and str(failure) != str(before):
        name, target = state.topic.name, state.topic.config.dead_letter
        _log.warning("%s: jobs stay in the queue, they cannot be moved to %s: %s", name, target, failure)


def _move_chunk(state: QueueState, chunk: JobChunk) -> tuple[list[int], Error | None]:
    """Copy jobs to the dead-letter topic; return the seqs that are durable there, and the error of the others."""
    seqs: list[int] = chunk.rows.seq.tolist()
    copied = _already_copied(state, seqs)
    left = [seq for seq in seqs if seq not in copied]
    if not left:
        return seqs, None
    try:
        _append_copies(state, chunk if len(left) == len(seqs) else select_jobs([chunk], left)[0])
        return seqs, None
    except (Refused, Unavailable) as error:
        if len(left) == 1:
            return sorted(copied), error
    except Error as error:
        return sorted(copied), error
    try:
        for seq in left:  # the topic may have capacity for some of them
            _append_copies(state, select_jobs([chunk], [seq])[0])
            copied.add(seq)
    except Error as error:
        return sorted(copied), error
    return sorted(copied), None


def _already_copied(state: QueueState, seqs: list[int]) -> set[int]:
    """Return the jobs that are already durable in the dead-letter topic, because deleting them here failed."""
    if not state.copied_dead_letters:
        return set()
    topics, name = state.topic.context.topics, state.topic.config.dead_letter
    topic = None if topics is None or name is None else topics.find_topic(name)
    if topic is None:
        state.copied_dead_letters.clear()
    return {seq for seq in seqs if topic is not None and state.copied_dead_letters.get(seq) == topic.id}


def _append_copies(state: QueueState, chunk: JobChunk) -> None:
    """Append copies to the dead-letter topic; on return they are durable there."""
    queue_topic = state.topic
    name, topics = queue_topic.config.dead_letter, queue_topic.context.topics
    assert name is not None, "without a dead-letter topic no job is delivered too often"
    assert topics is not None, "set before the first handle exists"
    runs = [
        (is_large, JobChunk(chunk.rows.slice(lo, hi), chunk.json[lo:hi]))
        for lo, hi, is_large in large_append.split_large(chunk.rows)
    ]
    batches = [_encode_dead_letters(state, run) for _, run in runs]
    topic, _ = topics.ensure_topic(name, TopicConfig(), batches[0])
    if topic.is_ephemeral and not queue_topic.is_ephemeral:
        raise BadInput(
            f"{name} is ephemeral and {queue_topic.name} is not: a restart would lose the job; nothing was moved, "
            f"change the durability of {name}"
        )
    for (is_large, run), batch in zip(runs, batches, strict=True):
        if is_large:
            large_append.append_copy(queue_topic, run.rows, topic, batch, durable=True)
        else:
            append.submit_write(topic, batch, durable=not queue_topic.is_ephemeral).wait()
        if topic.is_dropped:
            raise TopicNotFound(name)
        state.copied_dead_letters.update(dict.fromkeys(run.rows.seq.tolist(), topic.id))


def _encode_dead_letters(state: QueueState, chunk: JobChunk) -> Batch:
    rows, limits, most = chunk.rows, state.topic.context.limits, state.topic.config.max_deliveries
    deliveries = state.leases.deliveries
    marks = [
        {
            DEAD_LETTER_FROM: state.topic.name,
            DEAD_LETTER_DELIVERIES: str(min(deliveries.get(seq, most), most) if most else deliveries.get(seq, 0)),
            DEAD_LETTER_SRC_SEQ: str(seq),
            **_describe_error(state.failures.get(seq)),
        }
        for seq in rows.seq.tolist()
    ]
    metas = [{**meta, **mark} for meta, mark in zip(_decode_metas(rows), marks, strict=True)]
    relaxed_limits = replace(
        limits,
        meta_bytes_max=limits.meta_bytes_max + _DEAD_LETTER_META_BYTES,
        meta_keys_max=limits.meta_keys_max + len(DEAD_LETTER_META_KEYS),
        record_bytes_max=limits.record_bytes_max + _DEAD_LETTER_META_BYTES,
        batch_records_max=max(limits.batch_records_max, len(rows)),
    )
    json = chunk.json.tolist()
    return batch_encoder.batch_from_texts(
        relaxed_limits,
        copy_values(rows.buf, rows.data),
        json[0] if len(set(json)) == 1 else json,
        decode_names(rows, rows.tag),
        decode_names(rows, rows.node),
        metas,
    )


def _describe_error(failure: JobFailure | None) -> dict[str, str]:
    if failure is None:
        return {}
    return {ERROR: failure.error, ERROR_TYPE: failure.error_type, FAILED_AT: str(failure.failed_ms)}


def _decode_metas(rows: Rows) -> list[dict[str, Any]]:
    if rows.meta is None:
        return [{}] * len(rows)
    metas = [from_json(text) if text else {} for text in copy_values(rows.buf, rows.meta)]
    return [meta if isinstance(meta, dict) else {} for meta in metas]


def decode_names(rows: Rows, span: Span | None) -> list[str | None] | None:
    """Return the tags or nodes of records as arguments of a write."""
    return None if span is None else [name.decode() or None for name in copy_values(rows.buf, span)]


def _delete_moved(state: QueueState, seqs: list[int]) -> CommitFuture[None]:
    """Delete moved jobs and count them, in one commit."""
    topic = state.topic
    with topic.lock:
        topic.check_writable()
        body = control_frames.Delete(seqs=tuple(sorted(seqs)), bound_head=topic.index.head + 1)
        finish = partial(_on_moved_deleted, state, seqs, body)
        if topic.is_ephemeral:
            finish(None)
            topic.mark_dirty()
            return CommitFuture.completed(topic.shard, None)
        count = state.staged_dead_letters + len(seqs)
        delete_frame = topic.encode_control(body)
        commit = QueueCommit(
            state,
            [delete_frame, state.encode_lease_mark(state.lease_id_ceiling, count)],
            finish,
            durable=topic.is_durable,
        )
        topic.submit(commit)
        state.staged_dead_letters = count
        return commit.future


def _on_moved_deleted(state: QueueState, seqs: list[int], body: control_frames.Delete, error: Error | None) -> None:
    leases = state.leases
    if error is not None:
        state.staged_dead_letters = leases.dead_lettered
        return
    for seq in seqs:
        state.copied_dead_letters.pop(seq, None)
        state.failures.pop(seq, None)
    pending = [seq for seq in seqs if seq in leases.pending]
    counts = [leases.deliveries.get(seq, 0) for seq in pending]
    leases.on_acked(seqs)
    leases.dead_lettered += len(seqs)
    state.staged_dead_letters = max(state.staged_dead_letters, leases.dead_lettered)
    state.history.add_step(JobStep(state.topic.context.now_ms(), "dead_lettered", pending, deliveries=counts))
    if not state.topic.is_dropped:
        state.remove_known(lambda: delete.apply_delete(state.topic, body))


RecordFilter = Callable[[Record], bool]
_REDRIVE_BATCH_RECORDS: Final = 256
_REDRIVE_BATCH_BYTES: Final = 1 << 20
_CLOCK_POLL_S: Final = 0.05  # the clock is read at least this often


class RedriveResult(NamedTuple):
    count: int  # type: ignore[assignment]  # hides tuple.count
    queues: dict[str, int]  # number of jobs by queue
    skipped: int  # selected records whose queue is unknown or that are leased


class _SelectedRecords(NamedTuple):
    chunk: RecordChunk
    records: list[Record]
    positions: list[int]  # of the selected ones


def _check_rate(rate: object) -> None:
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
        raise BadInput(f"rate must be a number of jobs per second above 0, not {rate!r:.80}; nothing was moved")


def redrive_records(
    topic: TopicState,
    *,
    to: str | None,
    match: object,
    where: RecordFilter | None,
    rate: float | None,
    limit: int | None,
) -> RedriveResult:
    _check_rate(rate)
    if limit is not None:
        check_int("limit", limit, 0, SEQ_MAX)
    if to is not None:
        _require_queue(topic, to)
    selector = delete.parse_tag_match(match)
    batch = _REDRIVE_BATCH_RECORDS if rate is None else max(min(int(rate), _REDRIVE_BATCH_RECORDS), 1)
    limiter = None if rate is None else _RateLimiter(topic.context.clock, rate)
    queues: Counter[str] = Counter()
    skipped = 0
    for selected in _select_batches(topic, selector, where, SEQ_MAX if limit is None else limit, batch):
        by_queue, without_queue = _group_by_queue(topic, selected, to)
        skipped += without_queue
        for name, positions in by_queue.items():
            if limiter is not None:
                limiter.wait(len(positions))
            _move_back(topic, _require_queue(topic, name), selected, positions)
            queues[name] += len(positions)
    return RedriveResult(sum(queues.values()), dict(queues), skipped)


def _select_batches(
    topic: TopicState, match: Match | None, where: RecordFilter | None, limit: int, batch: int
) -> Iterator[_SelectedRecords]:
    """Yield the selected records of the topic in batches."""
    scan = TopicScan(topic, 0, frozenset())
    while limit > 0:
        chunk = next(scan.iter_chunks(batch, _REDRIVE_BATCH_BYTES), None)
        if chunk is None:
            return
        records = chunk_records(topic, chunk)
        positions = [
            position
            for position, record in enumerate(records)
            if _matches_tag(record, match) and (where is None or where(record))
        ][:limit]
        limit -= len(positions)
        if positions:
            yield _SelectedRecords(chunk, records, positions)


def _matches_tag(record: Record, match: Match | None) -> bool:
    if match is None:
        return True
    if not record.tag:
        return False
    return record.tag == match.value if match.op is MatchOp.EXACT else record.tag.startswith(match.value)


def _group_by_queue(topic: TopicState, selected: _SelectedRecords, to: str | None) -> tuple[dict[str, list[int]], int]:
    """Return the positions for each queue, and the number of records that are skipped."""
    by_queue: dict[str, list[int]] = {}
    leased = _leased_seqs(topic, [selected.records[position].seq for position in selected.positions])
    skipped = 0
    for position in selected.positions:
        record = selected.records[position]
        name: Any = to if to is not None else (record.meta or {}).get(DEAD_LETTER_FROM)
        if (
            record.seq in leased
            or not isinstance(name, str)
            or (to is None and isinstance(_find_queue(topic, name), Error))
        ):
            skipped += 1
        else:
            by_queue.setdefault(name, []).append(position)
    return by_queue, skipped


def _leased_seqs(topic: TopicState, seqs: list[int]) -> set[int]:
    with topic.lock:
        if topic.queue_state is None:
            return set()
        topic.queue_state.refresh(topic.context.now_ms())
        leases = topic.queue_state.leases
        return {seq for seq in seqs if seq in leases.leased or seq in leases.pending}


def _find_queue(topic: TopicState, name: str) -> TopicState | Error:
    """Return the queue of this name for the dead letters of `topic`, or why it is none."""
    queue = None if topic.context.topics is None else topic.context.topics.find_topic(name)
    if queue is None:
        return TopicNotFound(name)
    if queue.id == topic.id:
        return BadInput(f"{name} is the topic that is redriven; nothing was moved, name another queue")
    return queue if queue.config.type == "queue" else NotAQueue(name)


def _require_queue(topic: TopicState, name: str) -> TopicState:
    queue = _find_queue(topic, name)
    if isinstance(queue, Error):
        raise queue
    return queue


def _move_back(topic: TopicState, queue: TopicState, selected: _SelectedRecords, positions: list[int]) -> None:
    rows = selected.chunk.rows.take(np.array(positions, np.int64))
    for lo, hi, is_large in large_append.split_large(rows):
        _move_run_back(topic, queue, selected, positions[lo:hi], is_large=is_large)


def _move_run_back(
    topic: TopicState, queue: TopicState, selected: _SelectedRecords, positions: list[int], *, is_large: bool
) -> None:
    rows = selected.chunk.rows.take(np.array(positions, np.int64))
    json = selected.chunk.json[positions].tolist()
    metas = [
        {key: value for key, value in (selected.records[i].meta or {}).items() if key not in DEAD_LETTER_META_KEYS}
        for i in positions
    ]
    batch = batch_encoder.batch_from_texts(
        topic.context.limits,
        copy_values(rows.buf, rows.data),
        json[0] if len(set(json)) == 1 else json,
        decode_names(rows, rows.tag),
        decode_names(rows, rows.node),
        [meta or None for meta in metas],
    )
    copy = partial(large_append.append_copy, topic, rows, queue, batch, durable=True) if is_large else None
    _append_redriven(queue, batch, durable=not topic.is_ephemeral, copy=copy)
    delete.delete_records(topic, None, None, rows.seq.tolist())


@defer_signals
def _append_redriven(
    queue: TopicState, batch: Batch, *, durable: bool, copy: Callable[[], Appended] | None = None
) -> None:
    """Append jobs to their queue; `durable`: durable on return, whatever the topic's class is. `copy`: how a large one
    is appended, which is durable in any case."""
    appended = append.submit_write(queue, batch, durable=durable).wait() if copy is None else copy()
    if queue.is_dropped:
        raise TopicNotFound(queue.name)
    state = get_queue_state(queue)
    state.history.add_step(JobStep(state.topic.context.now_ms(), "redriven", appended.seqs))


class _RateLimiter:
    """Limits jobs per second."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock, self._rate = clock, rate
        self._next_ms = float(clock.monotonic_ms())

    def wait(self, count: int) -> None:
        """Block until `count` jobs may be moved."""
        pause = Event()
        while (left_ms := self._next_ms - self._clock.monotonic_ms()) > 0:
            pause.wait(min(left_ms / 1000, _CLOCK_POLL_S))
        self._next_ms = max(self._next_ms, float(self._clock.monotonic_ms())) + count * 1000 / self._rate
