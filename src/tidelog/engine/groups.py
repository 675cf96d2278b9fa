"""Consumer groups: durable, named cursors in a topic.

    group("spark") ──commit(5)──► at 5 ──commit(9)──► at 9 ──reset("earliest")──► … ──delete()──► gone
                   created by the  │ commit(7): refused, only `reset` moves back
                   first move      └ commit(head + 1): refused, there is no such record

A move is one frame in the topic's own stream of the WAL, after the records that it passed: a cursor that survives a
crash has its records below it. It waits as the topic's class says. Each group has at most one pending move; other
callers wait for it and check again, so the cursor that `expect` was compared with is the one that was replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

from tidelog.disk.process import defer_signals_in
from tidelog.engine import read, retention, segment_listing, topic_index
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.config import check_topic_name
from tidelog.engine.manifest import ConsumerRow
from tidelog.engine.results import Page
from tidelog.engine.topic_index import Gap, GroupCursorState
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, CursorConflict, Error, Throttled
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import GroupCursor
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.wal import Commit, CommitFuture

_I63_MAX: Final = (1 << 63) - 1


class timestamp_ms(int):  # noqa: N801  # reads as what it is: group.reset(timestamp_ms(1700000000000))
    """A time in milliseconds since the epoch, where a seq would be accepted too."""


ResetTarget: TypeAlias = Literal["earliest", "latest"] | int | timestamp_ms


class Lag(NamedTuple):
    """What a group has not read yet."""

    records: int
    bytes: int  # of their data and meta
    seconds: float  # age of the first of them; 0 if there is none


class Preview(NamedTuple):
    """What a reset would do."""

    from_: int
    to: int
    records: int  # that would be read again, or skipped where `to` is ahead
    bytes: int
    gap: Gap | None  # the gap that a reader at `to` gets


class GroupState(NamedTuple):
    """A group at one moment."""

    group: str
    position: int
    hold_bytes: int
    hold_broken: bool
    last_commit_ms: int | None  # None: the group does not exist yet
    head_seq: int
    lag: Lag


class CursorCommit(Commit):
    """A change of one group on its way through the WAL."""

    __slots__ = ("body", "floor", "topic", "ts_ms")
    future: CommitFuture[None]

    def __init__(self, topic: TopicState, body: GroupCursor) -> None:
        self.topic, self.body, self.ts_ms = topic, body, topic.context.now_ms()
        frames = [frame.encode(body.KIND, topic_id=topic.id, ts_ms=self.ts_ms, data=control_frames.encode(body))]
        self.floor = 0
        if body.hold_bytes and not topic.had_retention_hold:
            # From here on replay no longer derives cap floors: the current floor is logged first.
            topic.persists_floors = True
            index = topic.index
            self.floor = index.evict_floor
            watermark = control_frames.EvictWatermark(
                evict_floor=self.floor, earliest_seq=index.earliest, expiry_floor=index.watermarks.ttl + 1
            )
            encoded = frame.encode(
                frame.EVICT_WATERMARK,
                topic_id=topic.id,
                ts_ms=topic.next_timestamp_ms(),
                data=control_frames.encode(watermark),
            )
            frames.insert(0, encoded)
        super().__init__(frames, frames=len(frames), durable=topic.is_durable, future=CommitFuture(topic.shard))

    def apply(self, error: Error | None) -> None:
        topic = self.topic
        with topic.lock:
            topic.pending_cursor_commits.pop(self.body.group, None)
            if error is None:
                if topic.is_durable:
                    topic.durable_floor = max(topic.durable_floor, self.floor)
                apply_cursor(topic, self.body, self.ts_ms)
                topic.enforce_caps()  # records that were held back may go now
                topic.schedule_maintenance()


def apply_cursor(topic: TopicState, body: GroupCursor, ts_ms: int) -> None:
    """Set or delete a group. Called by the committer and by replay."""
    if body.gone:
        topic.groups.pop(body.group, None)
        return
    topic.groups[body.group] = GroupCursorState(body.seq, ts_ms, body.hold_bytes)
    if body.hold_bytes:
        topic.had_retention_hold = topic.persists_floors = True


def clamp_cursors(topic: TopicState) -> None:
    """Move cursors above the head down to it, after an accepted loss."""
    head = topic.index.head
    for name, cursor in topic.groups.items():
        if cursor.seq > head:
            topic.groups[name] = GroupCursorState(head, cursor.ts_ms, cursor.hold_bytes)


def encode_groups(topic: TopicState) -> tuple[ConsumerRow, ...]:
    return tuple(
        ConsumerRow(name, cursor.seq, cursor.ts_ms, cursor.hold_bytes) for name, cursor in sorted(topic.groups.items())
    )


def _commit_change(
    topic: TopicState, name: str, decide: Callable[[GroupCursorState | None], GroupCursor | None]
) -> None:
    """Commit the change that `decide` returns for the current cursor, under the lock; None: no change."""
    while True:
        with topic.lock:
            topic.check_writable()
            topic.context.shard(topic.id)  # raises where nothing can be written
            future, is_own = topic.pending_cursor_commits.get(name), False
            if future is None:
                body = decide(topic.groups.get(name))
                if body is None:
                    return
                _check_group_limit(topic, body)
                if topic.is_ephemeral:
                    apply_cursor(topic, body, topic.context.now_ms())
                    topic.enforce_caps()
                    topic.mark_dirty()
                    return
                commit = CursorCommit(topic, body)
                topic.submit(commit)
                future, is_own = commit.future, True
                topic.pending_cursor_commits[name] = future
        if is_own:
            future.wait()
            return
        with suppress(Error):  # its own caller gets the error
            future.wait()


def _check_group_limit(topic: TopicState, body: GroupCursor) -> None:
    limit, used = topic.context.limits.groups_max, len(topic.groups)
    if limit and body.group not in topic.groups and used >= limit:
        raise Throttled("groups", max=limit, used=used, asked=1)


@defer_signals_in("commit", "reset", "hold", "begin", "delete")
class Group:
    """A consumer group of one topic. Created by `Topic.group`; stored from its first move on."""

    def __init__(self, topic: TopicState, name: str) -> None:
        try:
            check_topic_name(name)
        except BadInput:
            raise BadInput(
                f"{name!r:.80} cannot name a group: 1 to 255 of A-Z a-z 0-9 . _ : - and a letter or digit first; "
                "nothing was created, choose another name"
            ) from None
        self._topic, self.name = topic, name

    def __repr__(self) -> str:
        return f"<group {self.name!r} of {self._topic.name!r}, at {self.position}>"

    # ── state ───────────────────────────────────────────────────────────────────────

    @property
    def topic(self) -> str:
        return self._topic.name

    @property
    def exists(self) -> bool:
        return self.name in self._topic.groups

    @property
    def position(self) -> int:
        """The last seq that was committed; 0 before the first commit."""
        cursor = self._topic.groups.get(self.name)
        return 0 if cursor is None else cursor.seq

    @property
    def hold_bytes(self) -> int:
        cursor = self._topic.groups.get(self.name)
        return 0 if cursor is None else cursor.hold_bytes

    @property
    def hold_broken(self) -> bool:
        """Whether unread records were lost although the group holds them, because its quota was too small. Cleared when
        the group moves past the loss, by a commit or a reset."""
        return self.state().hold_broken

    def lag(self) -> Lag:
        """Live records after its cursor, and the age of the first."""
        return self.state().lag

    def state(self) -> GroupState:
        """All of the above at one moment, after expiry."""
        retention.refresh_for_read(self._topic)
        state, floor = _group_info(self._topic, self.name)
        retention.persist_floor(self._topic, floor)
        return state

    # ── reading and moving ────────────────────────────────────────────────────────────────────

    def fetch(self, limit: int = 256, timeout: float | None = 0.0, node: str | list[str] | None = None) -> Page:
        """Read the records after its cursor, as `Topic.read` does. The cursor does not move: commit `next_from_seq`
        when the records are processed."""
        return read.wait_for_page(self._topic, self.position, limit, read.parse_nodes(node), 1 << 20, timeout)

    def commit(self, seq: int, *, expect: int | None = None) -> int:
        """Move the cursor to `seq`: everything up to it was processed. Durable as the topic's class says.

        Raises CursorConflict, with nothing changed, for a seq above the head, a seq below the current cursor, and a
        cursor that is not at `expect`, where that is given.
        """
        _commit_change(self._topic, self.name, lambda cursor: self._decide_commit(cursor, seq, expect))
        return seq

    def would_commit(self, seq: int, *, expect: int | None = None) -> Preview:
        """Return what `commit` would do, or raise what it would raise. Changes nothing."""
        with self._topic.lock:
            self._decide_commit(self._topic.groups.get(self.name), seq, expect)
        return self.preview(seq)

    def _decide_commit(self, cursor: GroupCursorState | None, seq: int, expect: int | None) -> GroupCursor | None:
        position = 0 if cursor is None else cursor.seq
        check_int("seq", seq, 0, SEQ_MAX)
        check_int("expect", position if expect is None else expect, 0, SEQ_MAX)
        if expect is not None and expect != position:
            raise self._conflict(seq, position, f"it is at {position}, not at {expect}")
        self._check_head(seq, position)
        if seq < position:
            raise self._conflict(seq, position, f"it is at {position} already, and only a reset moves it back")
        return None if cursor is not None and cursor.seq == seq else self._cursor_at(seq, cursor)

    def reset(self, to: ResetTarget) -> int:
        """Move to a seq (the last one that counts as read), a time (`timestamp_ms`), before the "earliest" record, or
        after the "latest". Returns the new cursor."""
        seq = self._resolve_target(to)

        def decide(cursor: GroupCursorState | None) -> GroupCursor:
            self._check_head(seq, 0 if cursor is None else cursor.seq)
            return self._cursor_at(seq, cursor)

        _commit_change(self._topic, self.name, decide)
        return seq

    def preview(self, to: ResetTarget) -> Preview:
        """Return what `reset` would do. Changes nothing."""
        seq, topic = self._resolve_target(to), self._topic
        with topic.lock:
            position, index = self.position, topic.index
            self._check_head(seq, position)
            between = index.measure(max(min(position, seq) + 1, index.earliest), max(position, seq) + 1)
            preview = Preview(
                position,
                seq,
                *between,
                topic_index.find_gap(seq, index.head, index.earliest, index.watermarks, index.trimmed_ranges),
            )
            floor = index.evict_floor
        retention.persist_floor(topic, floor)
        return preview

    def hold(self, hold_bytes: int) -> None:
        """Keep unread records from caps and age, up to `hold_bytes` live bytes beyond what those allow; 0: no hold.

        Above that the hold breaks and eviction goes on. A new group starts before the earliest record.
        """
        check_int("hold", hold_bytes, 0, _I63_MAX)

        def decide(cursor: GroupCursorState | None) -> GroupCursor | None:
            if cursor is not None and cursor.hold_bytes == hold_bytes:
                return None
            position = self._topic.index.earliest - 1 if cursor is None else cursor.seq
            return GroupCursor(group=self.name, seq=position, hold_bytes=hold_bytes)

        _commit_change(self._topic, self.name, decide)

    def begin(self, at: ResetTarget = "earliest", *, hold_bytes: int = 0) -> bool:
        """Create the group at this position if it does not exist; return whether it was created. An existing one
        stays."""
        check_int("hold", hold_bytes, 0, _I63_MAX)
        seq, is_new = self._resolve_target(at), False

        def decide(cursor: GroupCursorState | None) -> GroupCursor | None:
            nonlocal is_new
            is_new = cursor is None
            if is_new:
                self._check_head(seq, 0)
            return GroupCursor(group=self.name, seq=seq, hold_bytes=hold_bytes) if is_new else None

        _commit_change(self._topic, self.name, decide)
        return is_new

    def delete(self) -> bool:
        """Delete the group; False if it does not exist."""
        existed = False

        def decide(cursor: GroupCursorState | None) -> GroupCursor | None:
            nonlocal existed
            existed = cursor is not None
            return GroupCursor(group=self.name, gone=True) if existed else None

        _commit_change(self._topic, self.name, decide)
        return existed

    def _cursor_at(self, seq: int, cursor: GroupCursorState | None) -> GroupCursor:
        return GroupCursor(group=self.name, seq=seq, hold_bytes=0 if cursor is None else cursor.hold_bytes)

    def _resolve_target(self, to: object) -> int:
        retention.refresh_for_read(self._topic)
        topic = self._topic
        if isinstance(to, timestamp_ms):
            check_int("a moment", int(to), 0, TS_MS_MAX)
            return segment_listing.find_seq_by_time(topic, int(to)) - 1
        if to in ("earliest", "latest"):
            with topic.lock:
                topic.check_open()
                return topic.index.earliest - 1 if to == "earliest" else topic.index.head
        if isinstance(to, bool) or not isinstance(to, int):
            raise BadInput(f"a group goes to earliest, latest, a seq or a timestamp_ms, not to {to!r:.80}")
        check_int("seq", to, 0, SEQ_MAX)
        return to

    def _check_head(self, seq: int, position: int) -> None:
        head = self._topic.index.head
        if seq > head:
            raise self._conflict(seq, position, f"the head is {head}, and no record after it exists")

    def _conflict(self, seq: int, position: int, reason: str) -> CursorConflict:
        return CursorConflict(
            self.topic, self.name, seq=seq, position=position, head_seq=self._topic.index.head, reason=reason
        )


def _group_info(topic: TopicState, name: str) -> tuple[GroupState, int]:
    """Return the state of a group and the evict floor at one moment, without blocking on the disk."""
    with topic.lock:
        topic.check_open()
        index, cursor = topic.index, topic.groups.get(name)
        position = 0 if cursor is None else cursor.seq
        first = max(position + 1, index.earliest)
        waiting = index.measure(first, index.head + 1)
        oldest_ms = _first_live_ts(topic, first) if waiting.records else None
        seconds = 0.0 if oldest_ms is None else max(topic.context.now_ms() - oldest_ms, 0) / 1000
        lag = Lag(*waiting, seconds)
        if cursor is None:
            return GroupState(name, position, 0, False, None, index.head, lag), index.evict_floor
        broken = cursor.is_hold_broken(index.evict_floor)
        state = GroupState(name, position, cursor.hold_bytes, broken, cursor.ts_ms, index.head, lag)
        return state, index.evict_floor


def _first_live_ts(topic: TopicState, first: int) -> int | None:
    """Return the timestamp of the first live record from `first` on."""
    for part in topic.index.slices(first, topic.index.head + 1):
        if (seq := part.first_live()) is not None:
            return int(part.part.entries()["ts"][seq - part.part.base])
    return None


def groups_cached(topic: TopicState, count_max: int) -> list[GroupState]:
    """Return groups as last known: nothing expires first, and nothing blocks on the disk."""
    return [_group_info(topic, name)[0] for name in sorted(topic.groups.copy())[:count_max]]
