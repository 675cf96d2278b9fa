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

from tidelog.disk.interrupts import deferring
from tidelog.engine import floors, read, retention, segments
from tidelog.engine.config import check_topic_name
from tidelog.engine.core import Core
from tidelog.engine.encode import check_number
from tidelog.engine.floors import Gap
from tidelog.engine.holds import Cursor
from tidelog.engine.manifest import ConsumerRow
from tidelog.engine.results import Page
from tidelog.errors import BadInput, CursorConflict, Error, Throttled
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import GroupCursor
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.wal import Commit, Token

_I63_MAX: Final = (1 << 63) - 1


class timestamp_ms(int):  # noqa: N801  # reads as what it is: group.reset(timestamp_ms(1700000000000))
    """A moment, in milliseconds since the epoch, where a seq could stand too."""


To: TypeAlias = Literal["earliest", "latest"] | int | timestamp_ms


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


class Move(Commit):
    """A change of one group on its way through the WAL."""

    __slots__ = ("body", "core", "floor", "token", "ts_ms")

    def __init__(self, core: Core, body: GroupCursor) -> None:
        self.core, self.body, self.ts_ms = core, body, core.shared.now_ms()
        frames = [frame.encode(body.KIND, topic_id=core.id, ts_ms=self.ts_ms, data=bodies.encode(body))]
        self.floor = 0
        if body.hold_bytes and not core.guarded:
            # From here on replay does not work cap floors out any more: how far they are now is said in front.
            core.guarding = True
            index = core.index
            self.floor = index.evict_floor
            told = bodies.EvictWatermark(
                evict_floor=self.floor, earliest_seq=index.earliest, expiry_floor=index.marks.ttl + 1
            )
            made = frame.encode(frame.EVICT_WATERMARK, topic_id=core.id, ts_ms=core.stamp(), data=bodies.encode(told))
            frames.insert(0, made)
        super().__init__(frames, frames=len(frames), durable=core.durable)
        self.token: Token[None] = Token(core.shard)

    def done(self, error: Error | None) -> None:
        core = self.core
        with core.lock:
            core.moving.pop(self.body.group, None)
            if error is None:
                if core.durable:
                    core.hardened = max(core.hardened, self.floor)
                apply(core, self.body, self.ts_ms)
                core.keep_caps()  # what nobody holds any more may go
                core.plan()
        if error is None:
            self.token.set(None)
        else:
            self.token.fail(error)


def apply(core: Core, body: GroupCursor, ts_ms: int) -> None:
    """The last word on a group. Used by the committer and by replay."""
    if body.gone:
        core.groups.pop(body.group, None)
        return
    core.groups[body.group] = Cursor(body.seq, ts_ms, body.hold_bytes)
    if body.hold_bytes:
        core.guarded = core.guarding = True


def clamp(core: Core) -> None:
    """After a loss that was accepted, nobody has passed more than there is."""
    head = core.index.head
    for name, cursor in core.groups.items():
        if cursor.seq > head:
            core.groups[name] = Cursor(head, cursor.ts_ms, cursor.hold_bytes)


def rows(core: Core) -> tuple[ConsumerRow, ...]:
    return tuple(
        ConsumerRow(name, cursor.seq, cursor.ts_ms, cursor.hold_bytes) for name, cursor in sorted(core.groups.items())
    )


def _change(core: Core, name: str, decide: Callable[[Cursor | None], GroupCursor | None]) -> None:
    """Let `decide` say, under the lock, what comes after the cursor that is there; None: nothing has to."""
    while True:
        with core.lock:
            core.check_writable()
            core.shared.shard(core.id)  # refuses where nothing can be written
            token, mine = core.moving.get(name), False
            if token is None:
                body = decide(core.groups.get(name))
                if body is None:
                    return
                _check_room(core, body)
                if core.ephemeral:
                    apply(core, body, core.shared.now_ms())
                    core.keep_caps()
                    return
                commit = Move(core, body)
                core.submit(commit)
                token, mine = commit.token, True
                core.moving[name] = token
        if mine:
            token.wait()
            return
        with suppress(Error):  # what became of another one is its caller's to hear
            token.wait()


def _check_room(core: Core, body: GroupCursor) -> None:
    most, used = core.shared.limits.groups_max, len(core.groups)
    if most and body.group not in core.groups and used >= most:
        raise Throttled("groups", max=most, used=used, asked=1)


@deferring("commit", "reset", "hold", "begin", "delete")
class Group:
    """A group of consumers of one topic. `Topic.group` makes one; it is on disk from its first move on."""

    def __init__(self, core: Core, name: str) -> None:
        try:
            check_topic_name(name)
        except BadInput:
            raise BadInput(
                f"{name!r:.80} cannot name a group: 1 to 255 of A-Z a-z 0-9 . _ : - and a letter or digit first; "
                "nothing was created, choose another name"
            ) from None
        self._core, self.name = core, name

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
        retention.observe(self._core)
        state, floor = _look(self._core, self.name)
        retention.harden(self._core, floor)
        return state

    # ── reading and moving ────────────────────────────────────────────────────────────────────

    def fetch(self, limit: int = 256, timeout: float | None = 0.0, node: str | list[str] | None = None) -> Page:
        """The records behind it, as `Topic.read` gives them. The group stays where it is: commit `next_from_seq` when
        they are dealt with."""
        return read.wait_page(self._core, self.position, limit, read.nodes_of(node), 1 << 20, timeout)

    def commit(self, seq: int, *, expect: int | None = None) -> int:
        """Everything up to `seq` was dealt with. Durable as the topic's class has it, when this returns.

        Refused (CursorConflict), with nothing changed: a seq beyond the head, a seq before the one committed last, and
        a group that is not at `expect`, where that is given.
        """
        _change(self._core, self.name, lambda cursor: self._committed(cursor, seq, expect))
        return seq

    def would_commit(self, seq: int, *, expect: int | None = None) -> Preview:
        """What `commit` would do, refused where it would be. Changes nothing."""
        with self._core.lock:
            self._committed(self._core.groups.get(self.name), seq, expect)
        return self.preview(seq)

    def _committed(self, cursor: Cursor | None, seq: int, expect: int | None) -> GroupCursor | None:
        at = 0 if cursor is None else cursor.seq
        check_number("seq", seq, 0, SEQ_MAX)
        check_number("expect", at if expect is None else expect, 0, SEQ_MAX)
        if expect is not None and expect != at:
            raise self._conflict(seq, at, f"it is at {at}, not at {expect}")
        self._check_head(seq, at)
        if seq < at:
            raise self._conflict(seq, at, f"it is at {at} already, and goes back by a reset only")
        return None if cursor is not None and cursor.seq == seq else self._at(seq, cursor)

    def reset(self, to: To) -> int:
        """Go to a seq (the last one that counts as passed), a moment (`timestamp_ms`), before the "earliest" record, or
        behind the "latest". Returns the seq it is at then."""
        seq = self._target(to)

        def moved(cursor: Cursor | None) -> GroupCursor:
            self._check_head(seq, 0 if cursor is None else cursor.seq)
            return self._at(seq, cursor)

        _change(self._core, self.name, moved)
        return seq

    def preview(self, to: To) -> Preview:
        """What `reset` would do. Changes nothing."""
        seq, core = self._target(to), self._core
        with core.lock:
            at, index = self.position, core.index
            self._check_head(seq, at)
            between = index.weigh(max(min(at, seq) + 1, index.earliest), max(at, seq) + 1)
            found = Preview(at, seq, *between, floors.gap(seq, index.head, index.earliest, index.marks, index.trims))
            floor = index.evict_floor
        retention.harden(core, floor)
        return found

    def hold(self, hold_bytes: int) -> None:
        """Let caps and age spare what it has not passed, up to so many live bytes beyond what they allow; 0: no more.
        Past that the hold is broken, and they go on. A group that is new begins before the earliest record."""
        check_number("hold", hold_bytes, 0, _I63_MAX)

        def held(cursor: Cursor | None) -> GroupCursor | None:
            if cursor is not None and cursor.hold_bytes == hold_bytes:
                return None
            at = self._core.index.earliest - 1 if cursor is None else cursor.seq
            return GroupCursor(group=self.name, seq=at, hold_bytes=hold_bytes)

        _change(self._core, self.name, held)

    def begin(self, at: To = "earliest", *, hold_bytes: int = 0) -> bool:
        """Make it where there is none, at this place; says whether it was made. One that is there stays where it is."""
        check_number("hold", hold_bytes, 0, _I63_MAX)
        seq, made = self._target(at), False

        def begun(cursor: Cursor | None) -> GroupCursor | None:
            nonlocal made
            made = cursor is None
            if made:
                self._check_head(seq, 0)
            return GroupCursor(group=self.name, seq=seq, hold_bytes=hold_bytes) if made else None

        _change(self._core, self.name, begun)
        return made

    def delete(self) -> bool:
        """Forget it; False where there is none. One that is made again starts anew."""
        there = False

        def gone(cursor: Cursor | None) -> GroupCursor | None:
            nonlocal there
            there = cursor is not None
            return GroupCursor(group=self.name, gone=True) if there else None

        _change(self._core, self.name, gone)
        return there

    def _at(self, seq: int, cursor: Cursor | None) -> GroupCursor:
        return GroupCursor(group=self.name, seq=seq, hold_bytes=0 if cursor is None else cursor.hold_bytes)

    def _target(self, to: object) -> int:
        retention.observe(self._core)
        core = self._core
        if isinstance(to, timestamp_ms):
            check_number("a moment", int(to), 0, TS_MS_MAX)
            return segments.seek(core, int(to)) - 1
        if to in ("earliest", "latest"):
            with core.lock:
                core.check()
                return core.index.earliest - 1 if to == "earliest" else core.index.head
        if isinstance(to, bool) or not isinstance(to, int):
            raise BadInput(f"a group goes to earliest, latest, a seq or a timestamp_ms, not to {to!r:.80}")
        check_number("seq", to, 0, SEQ_MAX)
        return to

    def _check_head(self, seq: int, at: int) -> None:
        head = self._core.index.head
        if seq > head:
            raise self._conflict(seq, at, f"the head is {head}, and nobody has passed what is not there")

    def _conflict(self, seq: int, at: int, reason: str) -> CursorConflict:
        return CursorConflict(
            self.topic, self.name, seq=seq, position=at, head_seq=self._core.index.head, reason=reason
        )


def _look(core: Core, name: str) -> tuple[GroupState, int]:
    """A group and the evict floor, at one moment and without waiting for anything."""
    with core.lock:
        core.check()
        index, cursor = core.index, core.groups.get(name)
        at = 0 if cursor is None else cursor.seq
        first = max(at + 1, index.earliest)
        waiting = index.weigh(first, index.head + 1)
        oldest_ms = _first_ts(core, first) if waiting.records else None
        seconds = 0.0 if oldest_ms is None else max(core.shared.now_ms() - oldest_ms, 0) / 1000
        lag = Lag(*waiting, seconds)
        if cursor is None:
            return GroupState(name, at, 0, False, None, index.head, lag), index.evict_floor
        broken = cursor.is_broken(index.evict_floor)
        state = GroupState(name, at, cursor.hold_bytes, broken, cursor.ts_ms, index.head, lag)
        return state, index.evict_floor


def _first_ts(core: Core, first: int) -> int | None:
    """When the first live record from `first` on was written."""
    for part, lo, hi in core.index.slices(first, core.index.head + 1):
        dead = part.dead()
        living = np.zeros(1, np.int64) if dead is None else np.flatnonzero(~dead[lo - part.base : hi - part.base])
        if len(living):
            return int(part.entries()["ts"][lo - part.base + int(living[0])])
    return None


def glance(core: Core, most: int) -> list[GroupState]:
    """Groups of a topic as they are: nothing expires for it and nobody waits for a disk."""
    return [_look(core, name)[0] for name in sorted(core.groups.copy())[:most]]
