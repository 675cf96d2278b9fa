"""[shell] Age: records older than `ttl_ms` are lost, and the floor says so before anybody is told.

A floor that replay cannot work out again is made durable first (EvictWatermark) and moves after:
a reader that was shown a gap is shown it again after any crash. Caps follow from the records and
need that only where records themselves may be lost, which is the disk class, and where a group holds
them up: how far it did is not in the records.

A reader that is not below the floor is shown no gap, and nothing has to be durable for it. Floors that moved are
written with the interval sync (`write_floors`), which costs no sync of its own, so that a reader which comes
from below later does not wait for one either (docs/decisions/0025).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tidelog.engine.routing import forwarder as lanes
from tidelog.engine.topic_state import MAINTENANCE_RETRY_MS, MAINTENANCE_STEP_MS, EngineContext, TopicState
from tidelog.engine.watermarks import Gap
from tidelog.errors import Corrupt, Damaged, Error, Refused, Unavailable
from tidelog.formats import control_frames, frame
from tidelog.wal import Commit, CommitFuture


class WatermarkCommit(Commit):
    """An advance of the evict floor on its way through the WAL."""

    __slots__ = ("expiry", "floor", "topic")
    future: CommitFuture[int]

    def __init__(self, topic: TopicState, floor: int, expiry: int) -> None:
        self.topic, self.floor, self.expiry = topic, floor, expiry
        body = control_frames.EvictWatermark(
            # What was lost at the source is on record by itself, and is not lost to a cap.
            evict_floor=max(topic.index.watermarks.cap + 1, expiry),
            earliest_seq=max(floor, topic.index.earliest),
            expiry_floor=expiry,
        )
        made = frame.encode(
            frame.EVICT_WATERMARK, topic_id=topic.id, ts_ms=topic.next_timestamp_ms(), data=control_frames.encode(body)
        )
        durable = topic.config.durability != "memory"
        super().__init__([made], frames=1, durable=durable, future=CommitFuture(topic.shard))

    def apply(self, error: Error | None) -> int | Error:
        core = self.topic
        with core.lock:
            core.pending_floor = None
            if error is None:
                core.durable_floor = max(core.durable_floor, self.floor)
                try:
                    core.evict(min(self.expiry, core.index.head + 1), "ttl")
                except Error as damage:
                    error = damage
        return error or self.floor


def expire_records(topic: TopicState) -> None:
    """Bring the floor to where age puts it now. Where that cannot be made durable nothing moves and nothing is lost:
    the error is the writer's to hear, a reader goes on with what is there (`observe`)."""
    if not topic.config.ttl_ms:
        return
    expiry = 0
    while True:
        with topic.lock:
            expiry = expiry or _expiry_floor(
                topic
            )  # as of the first look: what expires while this waits is for the next one
            token = _begin_expiry(topic, expiry)
        if token is None:
            return
        token.wait()  # it may have been on its way before, and lower: then there is another one


def _begin_expiry(topic: TopicState, expiry: int) -> CommitFuture[int] | None:
    """Begin to bring the floor there; None where it is. With the lock held."""
    if topic.is_dropped or expiry <= topic.index.evict_floor:
        return None
    if topic.is_ephemeral or not topic.context.shards:  # a reader's own view is nobody else's
        topic.evict(expiry, "ttl")
        return None
    return _submit_floor(topic, expiry)


def run_due_maintenance(context: EngineContext, topics_max: int = 1_000) -> dict[TopicState, Exception]:
    """Expire records and seal segments of all topics that are due; return those where that failed. One sync a shard
    makes their floors durable."""
    now_ms, failed = context.now_ms(), dict[TopicState, Exception]()
    due = context.schedule.take_due(now_ms, topics_max)
    left: dict[TopicState, int | None] = dict.fromkeys((core for core in due if core.config.ttl_ms), None)
    while left:
        waiting: dict[TopicState, tuple[int, CommitFuture[int]]] = {}
        for core, floor in left.items():
            try:
                with core.lock:
                    expiry = _expiry_floor(core) if floor is None else floor
                    token = _begin_expiry(core, expiry)
                if token is not None:
                    waiting[core] = expiry, token
            except Exception as error:
                failed[core] = error
        left = {}
        for core, (expiry, token) in waiting.items():
            try:
                token.wait()
                left[core] = expiry  # it may have been another one's, and lower
            except Exception as error:
                failed[core] = error
    for core in due:
        with core.lock:
            core.roll_if_old()
            _roll_if_all_expired(core)
            behind = core in failed or (core.config.ttl_ms and _floor_by_age(core) > core.index.evict_floor)
            core.schedule_maintenance(now_ms + (MAINTENANCE_RETRY_MS if behind else MAINTENANCE_STEP_MS))
    return failed


def _floor_by_age(topic: TopicState) -> int:
    """How far age would go if no group held it up; 0 where it cannot be found out."""
    try:
        return topic.index.floor_for_age(topic.context.now_ms() - topic.config.ttl_ms)
    except Corrupt:
        return 0


def _roll_if_all_expired(topic: TopicState) -> None:
    """Let a segment of which everything has expired be removed: the next record starts another one. With the lock
    held."""
    index = topic.index
    if index.count or topic.is_dropped or index.active_segment_base() is None or not topic.config.ttl_ms:
        return
    index.roll_segment()
    if topic.is_ephemeral:
        index.drop_empty_memtables()
    else:
        topic.context.needs_checkpoint = True


def needs_expiry(topic: TopicState) -> bool:
    """Whether `expire` would have to wait for the disk."""
    if not topic.config.ttl_ms or topic.is_ephemeral:
        return False
    with topic.lock:
        return _expiry_floor(topic) > topic.index.evict_floor


def _expiry_floor(topic: TopicState) -> int:
    """How far age may go now. Records whose age does not read do not expire, and stop no write."""
    try:
        expiry = topic.index.floor_for_age(topic.context.now_ms() - topic.config.ttl_ms)
    except Corrupt as error:
        topic.report_corruption(f"{error.where}, byte {error.pos}", error.reason)
        return 0
    return topic.limit_by_holds(expiry) if expiry > topic.index.evict_floor else expiry


def is_floor_durable(topic: TopicState, from_seq: int = 0) -> bool:
    """Whether a reader with this cursor does not have to wait until a floor is durable. One that is not below the
    floor is shown no gap; 0 asks for the floor itself."""
    if is_upstream_lagging(topic) or needs_expiry(topic):
        return False
    return (
        not topic.must_persist_floor
        or topic.durable_floor >= topic.index.evict_floor
        or from_seq + 1 >= topic.index.evict_floor
    )


def pull_from_upstream(topic: TopicState) -> None:
    """Have routers bring what they have yet to. Where they cannot, what is there is there."""
    if topic.upstream is not None:
        with suppress(Damaged, Unavailable, Refused):
            lanes.pull_from_sources(topic)


def is_upstream_lagging(topic: TopicState) -> bool:
    """Whether routers have yet to bring something."""
    return topic.upstream is not None and lanes.is_lagging(topic)


def refresh_for_read(topic: TopicState) -> None:
    """`expire` for a reader, behind what routers have yet to bring: a shard that cannot write keeps its records
    readable."""
    pull_from_upstream(topic)
    with suppress(Damaged, Unavailable, Refused):
        expire_records(topic)


def persist_floor(topic: TopicState, floor: int, *, always: bool = False) -> None:
    """Make a floor that a reader is about to be told of survive a power cut, where the records above it might not;
    `always`: also where replay would find it by the records."""
    needed = topic.must_persist_floor or (always and not topic.is_ephemeral)
    if not needed or topic.durable_floor >= floor or not topic.context.shards:
        return
    with suppress(Damaged, Unavailable, Refused):  # a failing disk keeps nobody from reading
        while topic.durable_floor < floor:
            with topic.lock:
                token = _submit_floor(topic, topic.index.watermarks.ttl + 1)
            token.wait()


def persist_gap_floor(topic: TopicState, gap: Gap | None, floor: int) -> None:
    """`harden` for a page that was read below this floor. Where it shows no gap there is nothing to take back."""
    if gap is not None:
        persist_floor(topic, floor)


def queue_moved_floors(context: EngineContext) -> None:
    """Queue the floors that moved since the last call, for the interval sync that follows. Nothing waits for them; a
    shard that refuses them keeps them in memory, and `harden` tries again for a reader that needs one."""
    moved = context.moved_floors
    for _ in range(len(moved)):  # other threads add to it meanwhile: those are the next call's
        core = moved.pop()
        with core.lock, suppress(Error):
            if core.must_persist_floor and not core.is_dropped and core.durable_floor < core.index.evict_floor:
                _submit_floor(core, core.index.watermarks.ttl + 1)


def persist_floors(topics: Sequence[TopicState]) -> None:
    """Make the floors of all topics durable, as they are now, with one sync a shard."""
    due = {core: core.index.evict_floor for core in topics if not core.is_ephemeral}
    while True:
        tokens = []
        for core, floor in due.items():
            with core.lock:
                if not core.is_dropped and core.durable_floor < floor:
                    tokens.append(_submit_floor(core, core.index.watermarks.ttl + 1))
        if not tokens:
            return
        for token in tokens:
            token.wait()  # it may have been on its way before, and lower: then there is another one


def _submit_floor(topic: TopicState, expiry: int) -> CommitFuture[int]:
    """One floor is on its way at a time; whoever comes meanwhile waits for it and looks again."""
    if topic.pending_floor is None:
        commit = WatermarkCommit(topic, max(topic.index.evict_floor, expiry), expiry)
        topic.submit(commit)
        topic.pending_floor = commit.future
    return topic.pending_floor
