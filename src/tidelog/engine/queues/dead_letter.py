"""[shell] Dead letters: a job that was delivered too often goes to another topic, and then out of the queue.

    1  the copy is appended to the other topic, within its limits, and synced whatever its class is
    2  one commit deletes the job from the queue, under the queue's class, and counts it

The two may be in different WAL shards, of which a power cut keeps either: only because 1 is durable before 2 is
written a crash leaves the job in both topics at worst, never in neither. A dead letter names its queue and seq, so a
doubled one can be recognised. Where the other topic does not take it, the job is claimable again, nothing is counted,
and `Queue.dead_letter_error` says why. No lock is held over either wait.

A job of a queue that outlives the process is not moved to an ephemeral topic: no sync could make its copy durable.

[shell] Redrive: what went to a dead-letter topic goes back to the queue it came from.

Batch by batch: first the queue has the jobs again, synced whatever its class is, then they are deleted from the
dead-letter topic under that topic's class. A crash between the two may leave one batch in both places; none is ever in
neither. An ephemeral queue is the exception: what is given back to it lasts as long as its other jobs, until a restart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tidelog.clock import Clock
from tidelog.engine import batch_encoder, delete
from tidelog.engine.batch_encoder import Batch, check_int
from tidelog.engine.config import TopicConfig
from tidelog.engine.json_codec import from_json
from tidelog.engine.queues.jobs import JobChunk, select_jobs
from tidelog.engine.queues.queue_state import QueueCommit, QueueState
from tidelog.engine.read import RecordChunk, TopicScan, chunk_records
from tidelog.engine.results import Record
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Damaged, Error, NotAQueue, Refused, TopicNotFound, Unavailable
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import Rows, Span, copy_values
from tidelog.wal import CommitFuture

if TYPE_CHECKING:
    from tidelog.engine.topic import Topic

DEAD_LETTER_FROM: Final = "$dead_letter_from"
DEAD_LETTER_DELIVERIES: Final = "$dead_letter_deliveries"
DEAD_LETTER_SRC_SEQ: Final = "$dead_letter_src_seq"
DEAD_LETTER_META_KEYS: Final = (DEAD_LETTER_FROM, DEAD_LETTER_DELIVERIES, DEAD_LETTER_SRC_SEQ)
_log = logging.getLogger("tidelog.queues")
_DEAD_LETTER_META_BYTES: Final = 1_024  # what the three may take beside a meta that is as large as one may be


def move_to_dead_letter(state: QueueState, dead: Sequence[int], chunks: Sequence[JobChunk]) -> None:
    """Take these jobs, which were set aside, to the dead-letter topic; what cannot go there is claimable again."""
    failed: Error | None = None
    try:
        moved: list[int] = []
        for piece in chunks:
            done, failed = _move_chunk(state, piece)
            moved += done
            if isinstance(failed, Damaged):
                break  # its shard is latched: it takes no more
        if moved:
            delete.forward_before_delete(state.topic)
            _delete_moved(state, moved).wait()
    except Error as error:
        failed = error
    finally:
        with state.topic.lock:
            state.leases.on_settle_failed(dead)  # those that are not gone by now
    _report_failure(state, failed)


def _report_failure(state: QueueState, failed: Error | None) -> None:
    """Keep what last kept a job from its dead-letter topic; each cause is logged once in a row."""
    before, state.dead_letter_error = state.dead_letter_error, failed
    if failed is not None and str(failed) != str(before):
        name, target = state.topic.name, state.topic.config.dead_letter
        _log.warning("%s: jobs stay in the queue, they cannot be moved to %s: %s", name, target, failed)


def _move_chunk(state: QueueState, piece: JobChunk) -> tuple[list[int], Error | None]:
    """Copy jobs to the other topic; the seqs of those that are durable there now, and what kept the others."""
    seqs: list[int] = piece.rows.seq.tolist()
    done = _already_copied(state, seqs)
    left = [seq for seq in seqs if seq not in done]
    if not left:
        return seqs, None
    try:
        _append_copies(state, piece if len(left) == len(seqs) else select_jobs([piece], left)[0])
        return seqs, None
    except (Refused, Unavailable) as error:
        if len(left) == 1:
            return sorted(done), error
    except Error as error:
        return sorted(done), error
    try:
        for seq in left:  # there may be room for some of them
            _append_copies(state, select_jobs([piece], [seq])[0])
            done.add(seq)
    except Error as error:
        return sorted(done), error
    return sorted(done), None


def _already_copied(state: QueueState, seqs: list[int]) -> set[int]:
    """Which of these are durable in the other topic already, because deleting them here failed afterwards."""
    if not state.copied_dead_letters:
        return set()
    doors, name = state.topic.context.topics, state.topic.config.dead_letter
    topic = None if doors is None or name is None else doors.find(name)
    if topic is None:
        state.copied_dead_letters.clear()
    return {seq for seq in seqs if topic is not None and state.copied_dead_letters.get(seq) == topic.id}


def _append_copies(state: QueueState, piece: JobChunk) -> None:
    """Append copies to the other topic; on return they are durable there."""
    core = state.topic
    name, doors = core.config.dead_letter, core.context.topics
    assert name is not None, "only then a job can be delivered too often"
    assert doors is not None, "set before anybody has a handle"
    batch = _encode_dead_letters(state, piece)
    topic, _ = doors.ensure_topic(name, TopicConfig(), batch)
    if topic.config.durability == "ephemeral" and not core.is_ephemeral:
        raise BadInput(
            f"{name} is ephemeral and {core.name} is not: a restart would lose the job; nothing was moved, give {name} "
            "another durability"
        )
    topic.submit(batch, durable=not core.is_ephemeral).wait()
    if topic.is_dropped:
        raise TopicNotFound(name)
    state.copied_dead_letters.update(dict.fromkeys(piece.rows.seq.tolist(), topic.id))


def _encode_dead_letters(state: QueueState, piece: JobChunk) -> Batch:
    rows, limits, most = piece.rows, state.topic.context.limits, state.topic.config.max_deliveries
    marks = [
        {DEAD_LETTER_FROM: state.topic.name, DEAD_LETTER_DELIVERIES: str(most), DEAD_LETTER_SRC_SEQ: str(seq)}
        for seq in rows.seq.tolist()
    ]
    metas = [{**meta, **mark} for meta, mark in zip(_decode_metas(rows), marks, strict=True)]
    room = replace(
        limits,
        meta_bytes_max=limits.meta_bytes_max + _DEAD_LETTER_META_BYTES,
        meta_keys_max=limits.meta_keys_max + len(DEAD_LETTER_META_KEYS),
        record_bytes_max=limits.record_bytes_max + _DEAD_LETTER_META_BYTES,
        batch_records_max=max(limits.batch_records_max, len(rows)),
    )
    json = piece.json.tolist()
    whole = json[0] if len(set(json)) == 1 else json
    return batch_encoder.batch_from_texts(
        room,
        copy_values(rows.buf, rows.data),
        whole,
        decode_names(rows, rows.tag),
        decode_names(rows, rows.node),
        metas,
    )


def _decode_metas(rows: Rows) -> list[dict[str, Any]]:
    if rows.meta is None:
        return [{}] * len(rows)
    found = [from_json(text) if text else {} for text in copy_values(rows.buf, rows.meta)]
    return [meta if isinstance(meta, dict) else {} for meta in found]


def decode_names(rows: Rows, span: Span | None) -> list[str | None] | None:
    """The tags or nodes of records, as they are given to a write."""
    return None if span is None else [name.decode() or None for name in copy_values(rows.buf, span)]


def _delete_moved(state: QueueState, seqs: list[int]) -> CommitFuture[None]:
    """Delete what was moved and count it, in one commit."""
    core = state.topic
    with core.lock:
        core.check_writable()
        gone = control_frames.Delete(seqs=tuple(sorted(seqs)), bound_head=core.index.head + 1)
        finish = partial(_on_moved_deleted, state, seqs, gone)
        if core.is_ephemeral:
            finish(None)
            return CommitFuture.completed(core.shard, None)
        count = state.staged_dead_letters + len(seqs)
        taken = frame.encode(
            frame.DELETE, topic_id=core.id, ts_ms=core.next_timestamp_ms(), data=control_frames.encode(gone)
        )
        commit = QueueCommit(
            state, [taken, state.encode_lease_mark(state.lease_id_ceiling, count)], finish, durable=core.is_durable
        )
        core.submit(commit)
        state.staged_dead_letters = count
        return commit.future


def _on_moved_deleted(state: QueueState, seqs: list[int], gone: control_frames.Delete, error: Error | None) -> None:
    leases = state.leases
    if error is not None:
        state.staged_dead_letters = leases.dead_lettered
        return
    for seq in seqs:
        state.copied_dead_letters.pop(seq, None)
    ours = [seq for seq in seqs if seq in leases.pending]
    counts = [leases.deliveries.get(seq, 0) for seq in ours]
    leases.on_acked(seqs)
    leases.dead_lettered += len(seqs)
    state.staged_dead_letters = max(state.staged_dead_letters, leases.dead_lettered)
    state.history.add_step(state.topic.context.now_ms(), "dead_lettered", ours, None, None, counts)
    if not state.topic.is_dropped:
        state.remove_known(lambda: delete.apply_delete(state.topic, gone))


RecordFilter = Callable[[Record], bool]
_REDRIVE_BATCH_RECORDS: Final = 256
_REDRIVE_BATCH_BYTES: Final = 1 << 20
_CLOCK_POLL_S: Final = 0.05  # at most, between two looks at the clock


class RedriveResult(NamedTuple):
    count: int  # type: ignore[assignment]  # hides a method that nobody misses
    queues: dict[str, int]  # how many went where
    skipped: int  # of those that were meant: nobody knows where they came from, or somebody holds them


class _SelectedRecords(NamedTuple):
    chunk: RecordChunk
    records: list[Record]
    positions: list[int]  # which of them


def redrive_records(
    topic: TopicState,
    *,
    to: str | None,
    match: object,
    where: RecordFilter | None,
    rate: float | None,
    limit: int | None,
) -> RedriveResult:
    if rate is not None and not rate > 0:
        raise BadInput(f"a rate is a number of jobs a second above 0, not {rate!r}; nothing was moved")
    if limit is not None:
        check_int("limit", limit, 0, SEQ_MAX)
    if to is not None:
        _require_queue(topic, to)
    selector = delete.parse_tag_match(match)
    batch = _REDRIVE_BATCH_RECORDS if rate is None else max(min(int(rate), _REDRIVE_BATCH_RECORDS), 1)
    pace = None if rate is None else _RateLimiter(topic.context.clock, rate)
    queues: Counter[str] = Counter()
    skipped = 0
    for chosen in _select_batches(topic, selector, where, SEQ_MAX if limit is None else limit, batch):
        by_queue, homeless = _group_by_queue(topic, chosen, to)
        skipped += homeless
        for name, at in by_queue.items():
            if pace is not None:
                pace.wait(len(at))
            _move_back(topic, _require_queue(topic, name), chosen, at)
            queues[name] += len(at)
    return RedriveResult(sum(queues.values()), dict(queues), skipped)


def _select_batches(
    topic: TopicState, match: Match | None, where: RecordFilter | None, limit: int, batch: int
) -> Iterator[_SelectedRecords]:
    """What is meant, a batch at a time, of what is there now."""
    scan = TopicScan(topic, 0, frozenset())
    while limit > 0:
        stretch = next(scan.iter_chunks(batch, _REDRIVE_BATCH_BYTES), None)
        if stretch is None:
            return
        records = chunk_records(stretch)
        meant = [
            at for at, record in enumerate(records) if _matches_tag(record, match) and (where is None or where(record))
        ][:limit]
        limit -= len(meant)
        if meant:
            yield _SelectedRecords(stretch, records, meant)


def _matches_tag(record: Record, match: Match | None) -> bool:
    if match is None:
        return True
    if not record.tag:
        return False
    return record.tag == match.value if match.op is MatchOp.EXACT else record.tag.startswith(match.value)


def _group_by_queue(topic: TopicState, chosen: _SelectedRecords, to: str | None) -> tuple[dict[str, list[int]], int]:
    """Where each goes, and how many go nowhere."""
    homes: dict[str, list[int]] = {}
    held = _leased_seqs(topic, [chosen.records[at].seq for at in chosen.positions])
    left = 0
    for at in chosen.positions:
        record = chosen.records[at]
        name: Any = to if to is not None else (record.meta or {}).get(DEAD_LETTER_FROM)
        if record.seq in held or not isinstance(name, str) or (to is None and not _is_queue(topic, name)):
            left += 1
        else:
            homes.setdefault(name, []).append(at)
    return homes, left


def _leased_seqs(topic: TopicState, seqs: list[int]) -> set[int]:
    with topic.lock:
        if topic.queue_state is None:
            return set()
        topic.queue_state.refresh(topic.context.now_ms())
        leases = topic.queue_state.leases
        return {seq for seq in seqs if seq in leases.leased or seq in leases.pending}


def _is_queue(topic_state: TopicState, name: str) -> bool:
    topic = None if topic_state.context.topics is None else topic_state.context.topics.find(name)
    return topic is not None and topic.config.type == "queue" and topic.id != topic_state.id


def _require_queue(topic_state: TopicState, name: str) -> Topic:
    topic = None if topic_state.context.topics is None else topic_state.context.topics.find(name)
    if topic is None:
        raise TopicNotFound(name)
    if not _is_queue(topic_state, name):
        raise (
            NotAQueue(name)
            if topic.id != topic_state.id
            else BadInput(f"{name} is the topic that is being emptied; nothing was moved, name another queue")
        )
    return topic


def _move_back(topic: TopicState, queue: Topic, chosen: _SelectedRecords, at: list[int]) -> None:
    rows = chosen.chunk.rows.take(np.array(at, np.int64))
    json = chosen.chunk.json[at].tolist()
    metas = [
        {key: value for key, value in (chosen.records[i].meta or {}).items() if key not in DEAD_LETTER_META_KEYS}
        for i in at
    ]
    batch = batch_encoder.batch_from_texts(
        topic.context.limits,
        copy_values(rows.buf, rows.data),
        json[0] if len(set(json)) == 1 else json,
        decode_names(rows, rows.tag),
        decode_names(rows, rows.node),
        [meta or None for meta in metas],
    )
    queue.queue().put_redriven(batch, durable=not topic.is_ephemeral)
    delete.delete_records(topic, None, None, rows.seq.tolist())


class _RateLimiter:
    """So many a second, by the clock."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock, self._rate = clock, rate
        self._next_ms = float(clock.monotonic_ms())

    def wait(self, count: int) -> None:
        """Return when these may go; the next ones may a while after."""
        pause = Event()
        while (left_ms := self._next_ms - self._clock.monotonic_ms()) > 0:
            pause.wait(min(left_ms / 1000, _CLOCK_POLL_S))
        self._next_ms = max(self._next_ms, float(self._clock.monotonic_ms())) + count * 1000 / self._rate
