"""[shell] Groups of consumers: durable, named places in a topic.

    group("spark") ──commit(5)──► at 5 ──commit(9)──► at 9 ──reset("earliest")──► … ──delete()──► gone
                   made by the     │ commit(7): refused, a group goes back by `reset` only
                   first move      └ commit(head + 1): refused, nobody has read what is not there

A move is one frame in the topic's own stream of the WAL, behind the records that it passed: after any crash a cursor
that survives has its records under it. It waits as the topic's class says. Of one group one move is on its way at a
time: whoever comes meanwhile waits for it and looks again, so what `expect` was held against is what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from tidelog.disk.interrupts import defer_signals_in
from tidelog.engine import read, retention, segment_listing, watermarks
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.config import check_topic_name
from tidelog.engine.manifest import ConsumerRow
from tidelog.engine.results import Page
from tidelog.engine.topic_state import TopicState
from tidelog.engine.watermarks import Gap, GroupCursorState
from tidelog.errors import BadInput, CursorConflict, Error, Throttled
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import GroupCursor
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.wal import Commit, CommitFuture

_I63_MAX: Final = (1 << 63) - 1


class timestamp_ms(int):  # noqa: N801  # reads as what it is: group.reset(timestamp_ms(1700000000000))
    """A moment, in milliseconds since the epoch, where a seq could stand too."""


ResetTarget: TypeAlias = Literal["earliest", "latest"] | int | timestamp_ms


class Lag(NamedTuple):
    """What a group has still to read."""

    records: int
    bytes: int  # of their data and meta
    seconds: float  # the age of the first of them; 0 where there is none


class Preview(NamedTuple):
    """What a reset would do."""

    from_: int
    to: int
    records: int  # that would be read again, or passed over where `to` is ahead
    bytes: int
    gap: Gap | None  # what a reader at `to` is told


class GroupState(NamedTuple):
    """A group at one moment."""

    group: str
    position: int
    hold_bytes: int
    hold_broken: bool
    last_commit_ms: int | None  # None: there is no such group yet
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
            # From here on replay does not work cap floors out any more: how far they are now is said in front.
            topic.persists_floors = True
            index = topic.index
            self.floor = index.evict_floor
            told = control_frames.EvictWatermark(
                evict_floor=self.floor, earliest_seq=index.earliest, expiry_floor=index.watermarks.ttl + 1
            )
            made = frame.encode(
                frame.EVICT_WATERMARK,
                topic_id=topic.id,
                ts_ms=topic.next_timestamp_ms(),
                data=control_frames.encode(told),
            )
            frames.insert(0, made)
        super().__init__(frames, frames=len(frames), durable=topic.is_durable, future=CommitFuture(topic.shard))

    def apply(self, error: Error | None) -> None:
        core = self.topic
        with core.lock:
            core.pending_cursor_commits.pop(self.body.group, None)
            if error is None:
                if core.is_durable:
                    core.durable_floor = max(core.durable_floor, self.floor)
                apply_cursor(core, self.body, self.ts_ms)
                core.enforce_caps()  # what nobody holds any more may go
                core.schedule_maintenance()


def apply_cursor(topic: TopicState, body: GroupCursor, ts_ms: int) -> None:
    """The last word on a group. Used by the committer and by replay."""
    if body.gone:
        topic.groups.pop(body.group, None)
        return
    topic.groups[body.group] = GroupCursorState(body.seq, ts_ms, body.hold_bytes)
    if body.hold_bytes:
        topic.had_retention_hold = topic.persists_floors = True


def clamp_cursors(topic: TopicState) -> None:
    """After a loss that was accepted, nobody has passed more than there is."""
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
    """Let `decide` say, under the lock, what comes after the cursor that is there; None: nothing has to."""
    while True:
        with topic.lock:
            topic.check_writable()
            topic.context.shard(topic.id)  # refuses where nothing can be written
            token, mine = topic.pending_cursor_commits.get(name), False
            if token is None:
                body = decide(topic.groups.get(name))
                if body is None:
                    return
                _check_group_limit(topic, body)
                if topic.is_ephemeral:
                    apply_cursor(topic, body, topic.context.now_ms())
                    topic.enforce_caps()
                    return
                commit = CursorCommit(topic, body)
                topic.submit(commit)
                token, mine = commit.future, True
                topic.pending_cursor_commits[name] = token
        if mine:
            token.wait()
            return
        with suppress(Error):  # what became of another one is its caller's to hear
            token.wait()


def _check_group_limit(topic: TopicState, body: GroupCursor) -> None:
    most, used = topic.context.limits.groups_max, len(topic.groups)
    if most and body.group not in topic.groups and used >= most:
        raise Throttled("groups", max=most, used=used, asked=1)


@defer_signals_in("commit", "reset", "hold", "begin", "delete")
class Group:
    """A group of consumers of one topic. `Topic.group` makes one; it is on disk from its first move on."""

    def __init__(self, topic: TopicState, name: str) -> None:
        try:
            check_topic_name(name)
        except BadInput:
            raise BadInput(
                f"{name!r:.80} cannot name a group: 1 to 255 of A-Z a-z 0-9 . _ : - and a letter or digit first; "
                "nothing was created, choose another name"
            ) from None
        self._core, self.name = topic, name

    def __repr__(self) -> str:
        return f"<group {self.name!r} of {self._core.name!r}, at {self.position}>"

    # ── where it stands ───────────────────────────────────────────────────────────────────────

    @property
    def topic(self) -> str:
        return self._core.name

    @property
    def exists(self) -> bool:
        return self.name in self._core.groups

    @property
    def position(self) -> int:
        """The last seq that was committed; 0 before the first commit."""
        cursor = self._core.groups.get(self.name)
        return 0 if cursor is None else cursor.seq

    @property
    def hold_bytes(self) -> int:
        cursor = self._core.groups.get(self.name)
        return 0 if cursor is None else cursor.hold_bytes

    @property
    def hold_broken(self) -> bool:
        """Whether records that it had still to read were lost although it holds them: its quota was not enough. So
        until it goes on from behind them, by a commit or a reset."""
        return self.state().hold_broken

    def lag(self) -> Lag:
        """Live records that it has not passed, and how old the first of them is."""
        return self.state().lag

    def state(self) -> GroupState:
        """All of the above at one moment, as old records have it at that moment."""
        retention.refresh_for_read(self._core)
        state, floor = _group_info(self._core, self.name)
        retention.persist_floor(self._core, floor)
        return state

    # ── reading and moving ────────────────────────────────────────────────────────────────────

    def fetch(self, limit: int = 256, timeout: float | None = 0.0, node: str | list[str] | None = None) -> Page:
        """The records behind it, as `Topic.read` gives them. The group stays where it is: commit `next_from_seq` when
        they are dealt with."""
        return read.wait_for_page(self._core, self.position, limit, read.parse_nodes(node), 1 << 20, timeout)

    def commit(self, seq: int, *, expect: int | None = None) -> int:
        """Everything up to `seq` was dealt with. Durable as the topic's class has it, when this returns.

        Refused (CursorConflict), with nothing changed: a seq beyond the head, a seq before the one committed last, and
        a group that is not at `expect`, where that is given.
        """
        _commit_change(self._core, self.name, lambda cursor: self._decide_commit(cursor, seq, expect))
        return seq

    def would_commit(self, seq: int, *, expect: int | None = None) -> Preview:
        """What `commit` would do, refused where it would be. Changes nothing."""
        with self._core.lock:
            self._decide_commit(self._core.groups.get(self.name), seq, expect)
        return self.preview(seq)

    def _decide_commit(self, cursor: GroupCursorState | None, seq: int, expect: int | None) -> GroupCursor | None:
        at = 0 if cursor is None else cursor.seq
        check_int("seq", seq, 0, SEQ_MAX)
        check_int("expect", at if expect is None else expect, 0, SEQ_MAX)
        if expect is not None and expect != at:
            raise self._conflict(seq, at, f"it is at {at}, not at {expect}")
        self._check_head(seq, at)
        if seq < at:
            raise self._conflict(seq, at, f"it is at {at} already, and goes back by a reset only")
        return None if cursor is not None and cursor.seq == seq else self._cursor_at(seq, cursor)

    def reset(self, to: ResetTarget) -> int:
        """Go to a seq (the last one that counts as passed), a moment (`timestamp_ms`), before the "earliest" record, or
        behind the "latest". Returns the seq it is at then."""
        seq = self._resolve_target(to)

        def moved(cursor: GroupCursorState | None) -> GroupCursor:
            self._check_head(seq, 0 if cursor is None else cursor.seq)
            return self._cursor_at(seq, cursor)

        _commit_change(self._core, self.name, moved)
        return seq

    def preview(self, to: ResetTarget) -> Preview:
        """What `reset` would do. Changes nothing."""
        seq, core = self._resolve_target(to), self._core
        with core.lock:
            at, index = self.position, core.index
            self._check_head(seq, at)
            between = index.measure(max(min(at, seq) + 1, index.earliest), max(at, seq) + 1)
            found = Preview(
                at,
                seq,
                *between,
                watermarks.find_gap(seq, index.head, index.earliest, index.watermarks, index.trimmed_ranges),
            )
            floor = index.evict_floor
        retention.persist_floor(core, floor)
        return found

    def hold(self, hold_bytes: int) -> None:
        """Let caps and age spare what it has not passed, up to so many live bytes beyond what they allow; 0: no more.
        Past that the hold is broken, and they go on. A group that is new begins before the earliest record."""
        check_int("hold", hold_bytes, 0, _I63_MAX)

        def held(cursor: GroupCursorState | None) -> GroupCursor | None:
            if cursor is not None and cursor.hold_bytes == hold_bytes:
                return None
            at = self._core.index.earliest - 1 if cursor is None else cursor.seq
            return GroupCursor(group=self.name, seq=at, hold_bytes=hold_bytes)

        _commit_change(self._core, self.name, held)

    def begin(self, at: ResetTarget = "earliest", *, hold_bytes: int = 0) -> bool:
        """Make it where there is none, at this place; says whether it was made. One that is there stays where it is."""
        check_int("hold", hold_bytes, 0, _I63_MAX)
        seq, made = self._resolve_target(at), False

        def begun(cursor: GroupCursorState | None) -> GroupCursor | None:
            nonlocal made
            made = cursor is None
            if made:
                self._check_head(seq, 0)
            return GroupCursor(group=self.name, seq=seq, hold_bytes=hold_bytes) if made else None

        _commit_change(self._core, self.name, begun)
        return made

    def delete(self) -> bool:
        """Forget it; False where there is none. One that is made again starts anew."""
        there = False

        def gone(cursor: GroupCursorState | None) -> GroupCursor | None:
            nonlocal there
            there = cursor is not None
            return GroupCursor(group=self.name, gone=True) if there else None

        _commit_change(self._core, self.name, gone)
        return there

    def _cursor_at(self, seq: int, cursor: GroupCursorState | None) -> GroupCursor:
        return GroupCursor(group=self.name, seq=seq, hold_bytes=0 if cursor is None else cursor.hold_bytes)

    def _resolve_target(self, to: object) -> int:
        retention.refresh_for_read(self._core)
        core = self._core
        if isinstance(to, timestamp_ms):
            check_int("a moment", int(to), 0, TS_MS_MAX)
            return segment_listing.find_seq_by_time(core, int(to)) - 1
        if to in ("earliest", "latest"):
            with core.lock:
                core.check_open()
                return core.index.earliest - 1 if to == "earliest" else core.index.head
        if isinstance(to, bool) or not isinstance(to, int):
            raise BadInput(f"a group goes to earliest, latest, a seq or a timestamp_ms, not to {to!r:.80}")
        check_int("seq", to, 0, SEQ_MAX)
        return to

    def _check_head(self, seq: int, at: int) -> None:
        head = self._core.index.head
        if seq > head:
            raise self._conflict(seq, at, f"the head is {head}, and nobody has passed what is not there")

    def _conflict(self, seq: int, at: int, reason: str) -> CursorConflict:
        return CursorConflict(
            self.topic, self.name, seq=seq, position=at, head_seq=self._core.index.head, reason=reason
        )


def _group_info(topic: TopicState, name: str) -> tuple[GroupState, int]:
    """A group and the evict floor, at one moment and without waiting for anything."""
    with topic.lock:
        topic.check_open()
        index, cursor = topic.index, topic.groups.get(name)
        at = 0 if cursor is None else cursor.seq
        first = max(at + 1, index.earliest)
        waiting = index.measure(first, index.head + 1)
        oldest_ms = _first_live_ts(topic, first) if waiting.records else None
        seconds = 0.0 if oldest_ms is None else max(topic.context.now_ms() - oldest_ms, 0) / 1000
        lag = Lag(*waiting, seconds)
        if cursor is None:
            return GroupState(name, at, 0, False, None, index.head, lag), index.evict_floor
        broken = cursor.is_hold_broken(index.evict_floor)
        state = GroupState(name, at, cursor.hold_bytes, broken, cursor.ts_ms, index.head, lag)
        return state, index.evict_floor


def _first_live_ts(topic: TopicState, first: int) -> int | None:
    """When the first live record from `first` on was written."""
    for part, lo, hi in topic.index.slices(first, topic.index.head + 1):
        dead = part.deleted_mask()
        living = np.zeros(1, np.int64) if dead is None else np.flatnonzero(~dead[lo - part.base : hi - part.base])
        if len(living):
            return int(part.entries()["ts"][lo - part.base + int(living[0])])
    return None


def groups_cached(topic: TopicState, count_max: int) -> list[GroupState]:
    """Groups of a topic as they are: nothing expires for it and nobody waits for a disk."""
    return [_group_info(topic, name)[0] for name in sorted(topic.groups.copy())[:count_max]]
