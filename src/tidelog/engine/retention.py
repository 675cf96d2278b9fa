"""Retention by age: records older than `ttl_ms` expire, and the floor is durable before a reader sees it.

A floor that replay cannot derive is logged first (EvictWatermark) and moves after: a reader that was shown a gap is
shown it again after any crash. Cap floors follow from the records. They are logged only where records themselves may
be lost (class `disk`), and where a group holds records back: how far it did is not in the records.

A reader above the floor is shown no gap and needs no durable floor. Floors that moved are written with the interval
sync (`queue_moved_floors`), which costs no sync of its own, so a reader from below the floor seldom waits for one
(docs/decisions/0025).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tidelog.engine.context import MAINTENANCE_RETRY_MS, MAINTENANCE_STEP_MS, EngineContext
from tidelog.engine.routing import forwarder
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, Damaged, Error, Refused, Unavailable
from tidelog.formats import control_frames
from tidelog.wal import Commit, CommitFuture

_DUE_TOPICS_MAX: Final = 1_000  # of one pass


class WatermarkCommit(Commit):
    """An advance of the evict floor on its way through the WAL."""

    __slots__ = ("expiry", "floor", "topic")
    future: CommitFuture[int]

    def __init__(self, topic: TopicState, floor: int, expiry: int) -> None:
        self.topic, self.floor, self.expiry = topic, floor, expiry
        body = control_frames.EvictWatermark(
            # Losses at a router's source are logged separately and are not cap losses.
            evict_floor=max(topic.index.watermarks.cap + 1, expiry),
            earliest_seq=max(floor, topic.index.earliest),
            expiry_floor=expiry,
        )
        durable = topic.config.durability != "memory"
        super().__init__([topic.encode_control(body)], frames=1, durable=durable, future=CommitFuture(topic.shard))

    def apply(self, error: Error | None) -> int | Error:
        topic = self.topic
        with topic.lock:
            topic.pending_floor = None
            if error is None:
                topic.durable_floor = max(topic.durable_floor, self.floor)
                try:
                    topic.evict(min(self.expiry, topic.index.head + 1), "ttl")
                except Error as failure:
                    error = failure
        return error or self.floor


def expire_records(topic: TopicState) -> None:
    """Raise the floor to the current expiry. If it cannot be made durable, nothing expires: a writer gets the error, a
    reader continues with the records there are (`refresh_for_read`)."""
    if not topic.config.ttl_ms:
        return
    expiry = 0
    while True:
        with topic.lock:
            # Computed once: records that expire meanwhile are left to the next call.
            expiry = expiry or _expiry_floor(topic)
            future = _begin_expiry(topic, expiry)
        if future is None:
            return
        future.wait()  # it may be an earlier, lower floor: then submit another one


def _begin_expiry(topic: TopicState, expiry: int) -> CommitFuture[int] | None:
    """Start to raise the floor; None where nothing has to be waited for. With the lock held."""
    if topic.is_dropped or expiry <= topic.index.evict_floor:
        return None
    if topic.is_ephemeral or not topic.context.shards:  # nothing to log: the view of this process only
        topic.evict(expiry, "ttl")
        return None
    return _submit_floor(topic, expiry)


def run_due_maintenance(context: EngineContext) -> dict[TopicState, Exception]:
    """Expire records and seal segments of all topics that are due; return the topics that failed. One sync per shard
    makes their floors durable."""
    now_ms, failed = context.now_ms(), dict[TopicState, Exception]()
    due = context.schedule.take_due(now_ms, _DUE_TOPICS_MAX)
    remaining: dict[TopicState, int | None] = dict.fromkeys((topic for topic in due if topic.config.ttl_ms), None)
    while remaining:
        pending: dict[TopicState, tuple[int, CommitFuture[int]]] = {}
        for topic, floor in remaining.items():
            try:
                with topic.lock:
                    expiry = _expiry_floor(topic) if floor is None else floor
                    future = _begin_expiry(topic, expiry)
                if future is not None:
                    pending[topic] = expiry, future
            except Exception as error:
                failed[topic] = error
        remaining = {}
        for topic, (expiry, future) in pending.items():
            try:
                future.wait()
                remaining[topic] = expiry  # it may be an earlier, lower floor
            except Exception as error:
                failed[topic] = error
    for topic in due:
        with topic.lock:
            topic.roll_if_old()
            _roll_if_all_expired(topic)
            needs_retry = topic in failed or (topic.config.ttl_ms and _floor_by_age(topic) > topic.index.evict_floor)
            topic.schedule_maintenance(now_ms + (MAINTENANCE_RETRY_MS if needs_retry else MAINTENANCE_STEP_MS))
    return failed


def _floor_by_age(topic: TopicState) -> int:
    """Return the floor by age without group holds; 0 where the index does not verify."""
    try:
        return topic.index.floor_for_age(topic.context.now_ms() - topic.config.ttl_ms)
    except Corrupt:
        return 0


def _roll_if_all_expired(topic: TopicState) -> None:
    """Let a fully expired segment be removed: the next record starts another one. With the lock held."""
    index = topic.index
    if index.count or topic.is_dropped or index.active_segment_base() is None or not topic.config.ttl_ms:
        return
    index.roll_segment()
    if topic.is_ephemeral:
        index.drop_empty_memtables()
    else:
        topic.context.needs_checkpoint = True
    topic.mark_dirty()


def needs_expiry(topic: TopicState) -> bool:
    """Whether `expire_records` would block on the disk."""
    if not topic.config.ttl_ms or topic.is_ephemeral:
        return False
    with topic.lock:
        return _expiry_floor(topic) > topic.index.evict_floor


def _expiry_floor(topic: TopicState) -> int:
    """Return how far records may expire now. Records whose age does not verify do not expire, and writes go on."""
    try:
        expiry = topic.index.floor_for_age(topic.context.now_ms() - topic.config.ttl_ms)
    except Corrupt as error:
        topic.report_corruption(f"{error.where}, byte {error.pos}", error.reason)
        return 0
    return topic.limit_by_holds(expiry) if expiry > topic.index.evict_floor else expiry


def is_floor_durable(topic: TopicState, from_seq: int = 0) -> bool:
    """Whether a reader with this cursor needs to wait for no floor. A reader above the floor is shown no gap; 0 asks
    for the floor itself."""
    if is_upstream_lagging(topic) or needs_expiry(topic):
        return False
    return (
        not topic.must_persist_floor
        or topic.durable_floor >= topic.index.evict_floor
        or from_seq + 1 >= topic.index.evict_floor
    )


def pull_from_upstream(topic: TopicState) -> None:
    """Forward pending records of routers that write to this topic. On failure, readers see what is there."""
    if topic.upstream is not None:
        with suppress(Damaged, Unavailable, Refused):
            forwarder.pull_from_sources(topic)


def is_upstream_lagging(topic: TopicState) -> bool:
    """Whether routers have records for this topic that they did not forward yet."""
    return topic.upstream is not None and forwarder.is_lagging(topic)


def refresh_for_read(topic: TopicState) -> None:
    """Forward pending records and expire old ones before a read. A shard that cannot write keeps its records
    readable."""
    pull_from_upstream(topic)
    with suppress(Damaged, Unavailable, Refused):
        expire_records(topic)


def persist_floor(topic: TopicState, floor: int, *, always: bool = False) -> None:
    """Make a floor durable before a reader sees it, where the records above it might not survive; `always`: also where
    replay would derive it from the records."""
    needed = topic.must_persist_floor or (always and not topic.is_ephemeral)
    if not needed or topic.durable_floor >= floor or not topic.context.shards:
        return
    with suppress(Damaged, Unavailable, Refused):  # records stay readable on a failing disk
        while topic.durable_floor < floor:
            with topic.lock:
                future = _submit_floor(topic, topic.index.watermarks.ttl + 1)
            future.wait()


def persist_gap_floor(topic: TopicState, gap: Gap | None, floor: int) -> None:
    """`persist_floor` for a page that was read below this floor; without a gap nothing needs to be durable."""
    if gap is not None:
        persist_floor(topic, floor)


def queue_moved_floors(context: EngineContext) -> None:
    """Queue the floors that moved since the last call, for the next interval sync. Nothing waits for them. A shard that
    refuses them keeps them in memory, and `persist_floor` retries for a reader that needs one."""
    moved = context.moved_floors
    for _ in range(len(moved)):  # floors that other threads add meanwhile are left to the next call
        topic = moved.pop()
        with topic.lock, suppress(Error):
            if topic.must_persist_floor and not topic.is_dropped and topic.durable_floor < topic.index.evict_floor:
                _submit_floor(topic, topic.index.watermarks.ttl + 1)


def persist_floors(topics: Sequence[TopicState]) -> None:
    """Make the current floors of all topics durable, with one sync per shard."""
    due = {topic: topic.index.evict_floor for topic in topics if not topic.is_ephemeral}
    while True:
        futures = []
        for topic, floor in due.items():
            with topic.lock:
                if not topic.is_dropped and topic.durable_floor < floor:
                    futures.append(_submit_floor(topic, topic.index.watermarks.ttl + 1))
        if not futures:
            return
        for future in futures:
            future.wait()  # it may be an earlier, lower floor: then submit another one


def _submit_floor(topic: TopicState, expiry: int) -> CommitFuture[int]:
    """Submit the floor, or return the pending one: at most one is on its way, and callers check again after it."""
    if topic.pending_floor is None:
        commit = WatermarkCommit(topic, max(topic.index.evict_floor, expiry), expiry)
        topic.submit(commit)
        topic.pending_floor = commit.future
    return topic.pending_floor
