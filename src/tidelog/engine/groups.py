"""Consumer groups: durable, named cursors in a topic.

    group("spark") ──commit(5)──► at 5 ──commit(9)──► at 9 ──reset("earliest")──► … ──delete()──► gone
                   created by the  │ commit(7): refused, only `reset` moves back
                   first move      └ commit(head + 1): refused, there is no such record

A move is one frame in the topic's own stream of the WAL, after the records that it passed: a cursor that survives a
crash has its records below it. It waits as the topic's class says. Each group has at most one pending move; other
callers wait for it and check again, so the cursor that `expect` was compared with is the one that was replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from threading import Event
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import pyarrow as pa

from tidelog import frames
from tidelog.disk.process import defer_signals_in
from tidelog.engine import read, retention, segment_listing, topic_index
from tidelog.engine.batch_encoder import check_int, is_utf8_text
from tidelog.engine.config import check_topic_name
from tidelog.engine.group_leases import LEASE_MS_DEFAULT, ConsumerState, GroupLeases, PageT, RangeLease
from tidelog.engine.manifest import ConsumerRow
from tidelog.engine.read import OnGap
from tidelog.engine.results import Page, Record
from tidelog.engine.topic_index import Gap, GroupCursorState
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, CursorConflict, Error, GapFound, Throttled
from tidelog.formats import control_frames
from tidelog.formats.control_frames import GroupCursor
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX
from tidelog.times import Duration, Seconds, duration_ms, seconds, time_ms
from tidelog.wal import Commit, CommitFuture

_I63_MAX: Final = (1 << 63) - 1
LEASE_MS_MAX: Final = 86_400_000
_CONSUMER_CHARS_MAX: Final = 255
_READ_BYTES: Final = 1 << 20  # of one page, unless its first record is larger
_log = logging.getLogger("tidelog.group")
CommitMode: TypeAlias = Literal["each", "batch"]
GroupT = TypeVar("GroupT")


class timestamp_ms(int):  # noqa: N801  # reads as what it is: group.reset(timestamp_ms(1700000000000))
    """A time in milliseconds since the epoch, where a seq would be accepted too."""


ResetTarget: TypeAlias = Literal["earliest", "latest"] | int | timestamp_ms | datetime


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


GROUP_SCHEMA: Final = pa.schema(
    [
        pa.field("group", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("head_seq", pa.int64(), nullable=False),
        pa.field("lag_records", pa.int64(), nullable=False),
        pa.field("lag_bytes", pa.int64(), nullable=False),
        pa.field("lag_seconds", pa.float64(), nullable=False),
        pa.field("last_commit_ms", pa.timestamp("ms", tz="UTC")),
        pa.field("hold_bytes", pa.int64(), nullable=False),
        pa.field("hold_broken", pa.bool_(), nullable=False),
    ]
)


class GroupList(list[GroupT], Generic[GroupT]):
    """Groups of a topic, by name, and their states when they were listed."""

    def __init__(self, groups: Iterable[GroupT], states: Iterable[GroupState]) -> None:
        super().__init__(groups)
        self.states = list(states)

    def to_arrow(self) -> pa.Table:
        """Return the states as a table with one row for each group."""
        rows = [
            {
                **state._asdict(),
                "lag_records": state.lag.records,
                "lag_bytes": state.lag.bytes,
                "lag_seconds": state.lag.seconds,
            }
            for state in self.states
        ]
        return pa.Table.from_pylist(rows, schema=GROUP_SCHEMA)

    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)


class CursorCommit(Commit):
    """A change of one group on its way through the WAL."""

    __slots__ = ("body", "floor", "topic", "ts_ms")
    future: CommitFuture[None]

    def __init__(self, topic: TopicState, body: GroupCursor) -> None:
        self.topic, self.body, self.ts_ms = topic, body, topic.context.now_ms()
        frames = [topic.encode_control(body, ts_ms=self.ts_ms)]
        self.floor = 0
        if body.hold_bytes and not topic.had_retention_hold:
            # From here on replay no longer derives cap floors: the current floor is logged first.
            topic.persists_floors = True
            index = topic.index
            self.floor = index.evict_floor
            watermark = control_frames.EvictWatermark(
                evict_floor=self.floor, earliest_seq=index.earliest, expiry_floor=index.watermarks.ttl + 1
            )
            frames.insert(0, topic.encode_control(watermark))
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


def check_group_name(name: object) -> None:
    """Raise BadInput unless a group can have this name."""
    try:
        check_topic_name(name)
    except BadInput:
        raise BadInput(
            f"{name!r:.80} cannot name a group: 1 to 255 of A-Z a-z 0-9 . _ : - and a letter or digit first; "
            "nothing was created, choose another name"
        ) from None


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


class ConsumedGroup(Protocol):
    """A group of a directory or of a server, as the loops below use it."""

    @property
    def name(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def position(self) -> int: ...
    def fetch(self, limit: int = 256, timeout: Seconds | None = 0.0) -> Page: ...
    def commit(self, seq: int, *, expect: int | None = None) -> int: ...
    def claim(
        self, consumer: str, limit: int = 256, *, lease_ms: Duration = LEASE_MS_DEFAULT, timeout: Seconds | None = 0.0
    ) -> GroupBatch | None: ...
    def ack(self, consumer: str, lease_id: int) -> bool: ...
    def release(self, consumer: str, lease_id: int) -> bool: ...
    def extend(self, consumer: str, lease_id: int, lease_ms: Duration = LEASE_MS_DEFAULT) -> bool: ...


def follow_group(
    group: ConsumedGroup,
    /,
    *,
    commit: CommitMode = "batch",
    limit: int = 256,
    timeout: Seconds | None = None,
    on_gap: OnGap = "fail",
) -> Iterator[Record | Gap]:
    """Yield the records after its cursor and commit them, until none arrived for `timeout` seconds; None: forever.

    A record is committed when the next one is asked for: each for itself, or a batch of up to `limit` at its end.
    After a crash the records since the last commit are yielded again. `on_gap` is that of `Topic.follow`. For one
    reader: a second one gets CursorConflict. Several readers share a group with `consume`.

    >>> [record.seq for record in readers.follow(timeout=0)], readers.position
    ([1, 2, 3], 3)
    """
    if commit not in get_args(CommitMode):
        raise BadInput(f"commit is each or batch, not {commit!r:.80}; nothing was read")
    read.check_on_gap(on_gap)
    position = group.position
    while True:
        page = group.fetch(limit, timeout)
        if page.gap is not None and on_gap == "fail":
            raise GapFound(group.topic, page.gap)
        if page.gap is not None and on_gap == "emit":
            yield page.gap
        for record in page.records:
            yield record
            if commit == "each":
                position = group.commit(record.seq, expect=position)
        if page.next_from_seq == position and not page.records:
            return
        position = group.commit(page.next_from_seq, expect=position)


def consume_group(
    group: ConsumedGroup,
    /,
    consumer: str,
    batch: int = 256,
    *,
    lease_ms: Duration = LEASE_MS_DEFAULT,
    timeout: Seconds | None = None,
) -> Iterator[GroupBatch]:
    """Yield batches of records that no other consumer of the group has, until none came for `timeout` seconds;
    None: forever.

    A batch is acked when the next one is asked for, and the cursor follows the acks. A loop that ends early returns
    its last batch, unless it called `ack` itself. Batches of a consumer that crashed go to others after `lease_ms`.

    >>> for batch in readers.consume("first", batch=2, timeout=0):
    ...     print([record.seq for record in batch])
    [1, 2]
    [3]
    """
    while (claimed := group.claim(consumer, batch, lease_ms=lease_ms, timeout=timeout)) is not None:
        try:
            yield claimed
        except BaseException:
            claimed.release()
            raise
        if not claimed.is_settled and not claimed.ack():
            _log.warning(
                "%s: the lease of consumer %s of group %s on records %d to %d ended before they were processed; they "
                "are delivered again. Give a longer lease_ms, or call extend",
                *(group.topic, consumer, group.name, claimed.first_seq, claimed.last_seq),
            )


@defer_signals_in("commit", "reset", "hold", "begin", "delete")
class Group:
    """A consumer group of one topic. Created by `Topic.group`; stored from its first move on."""

    def __init__(self, topic: TopicState, name: str) -> None:
        check_group_name(name)
        self._topic, self.name = topic, name

    def __repr__(self) -> str:
        return f"<group {self.name!r} of {self._topic.name!r}, at {self.position}>"

    # ── state ───────────────────────────────────────────────────────────────────────

    @property
    def topic(self) -> str:
        """The name of its topic.

        >>> readers.topic
        'orders'
        """
        return self._topic.name

    @property
    def exists(self) -> bool:
        """Whether it was created, by a commit, a reset, a hold or `begin`.

        >>> readers.exists
        False
        """
        return self.name in self._topic.groups

    @property
    def position(self) -> int:
        """The last seq that was committed; 0 before the first commit.

        >>> readers.position
        0
        """
        cursor = self._topic.groups.get(self.name)
        return 0 if cursor is None else cursor.seq

    @property
    def hold_bytes(self) -> int:
        """How many bytes of unread records it keeps from retention; 0: none.

        >>> readers.hold_bytes
        0
        """
        cursor = self._topic.groups.get(self.name)
        return 0 if cursor is None else cursor.hold_bytes

    @property
    def hold_broken(self) -> bool:
        """Whether unread records were lost although the group holds them, because its quota was too small. Cleared when
        the group moves past the loss, by a commit or a reset.

        >>> readers.hold_broken
        False
        """
        return self.state().hold_broken

    def lag(self) -> Lag:
        """Live records after its cursor, and the age of the first.

        >>> readers.lag().records
        3
        """
        return self.state().lag

    def state(self) -> GroupState:
        """All of the above at one moment, after expiry.

        >>> state = readers.state()
        >>> state.position, state.head_seq, state.lag.records
        (0, 3, 3)
        """
        retention.refresh_for_read(self._topic)
        state, floor = _group_info(self._topic, self.name)
        retention.persist_floor(self._topic, floor)
        return state

    # ── reading and moving ────────────────────────────────────────────────────────────────────

    def fetch(self, limit: int = 256, timeout: Seconds | None = 0.0, node: str | list[str] | None = None) -> Page:
        """Read the records after its cursor, as `Topic.read` does. The cursor does not move: commit `next_from_seq`
        when the records are processed.

        >>> page = readers.fetch(limit=2)
        >>> [record.seq for record in page.records], readers.commit(page.next_from_seq)
        ([1, 2], 2)
        """
        return read.wait_for_page(self._topic, self.position, limit, read.parse_nodes(node), _READ_BYTES, timeout)

    follow = follow_group

    # ── shared consumption ────────────────────────────────────────────────────────────────────

    consume = consume_group

    def claim(
        self, consumer: str, limit: int = 256, *, lease_ms: Duration = LEASE_MS_DEFAULT, timeout: Seconds | None = 0.0
    ) -> GroupBatch | None:
        """Lease the next records to a consumer, or those that another one did not finish; None if there are none
        within `timeout` seconds.

        >>> batch = readers.claim("first", 2)
        >>> [record.seq for record in batch], batch.ack(), readers.position
        ([1, 2], True, 2)
        """
        topic, leases, clock = self._topic, self._leases, self._topic.context.clock
        woken = Event()
        timeout, lease_ms = seconds("timeout", timeout), duration_ms("lease_ms", lease_ms)
        until_ms = None if timeout is None else clock.monotonic_ms() + int(timeout * 1000)
        if timeout != 0:
            topic.add_listener(woken.set)  # before the first claim
            leases.add_listener(woken.set)
        try:
            while True:
                woken.clear()
                claimed = claim_range(
                    self,
                    consumer,
                    lambda from_seq, to_seq: read.read_page(
                        topic, from_seq, limit, read.parse_nodes(None), _READ_BYTES, to_seq=to_seq
                    ),
                    lease_ms=lease_ms,
                )
                if claimed is not None:
                    lease, page = claimed
                    return GroupBatch(self, lease.lease_id, consumer, lease.first_seq, page)
                commit_finished(self)
                now_ms, ends_ms = clock.monotonic_ms(), leases.next_deadline_ms()
                if until_ms is not None and now_ms >= until_ms:
                    return None
                pauses = [at_ms - now_ms for at_ms in (until_ms, ends_ms) if at_ms is not None]
                woken.wait(max(min(pauses), 1) / 1000 if pauses else None)
        finally:
            topic.remove_listener(woken.set)
            leases.remove_listener(woken.set)

    def ack(self, consumer: str, lease_id: int) -> bool:
        """Finish a leased range and move the cursor past all that are finished, durable as the topic's class says.
        False: the lease ended, and its records are delivered again.

        >>> batch = readers.claim("first", 2)
        >>> readers.ack("first", batch.lease_id), readers.position
        (True, 2)
        """
        check_lease(consumer, lease_id)
        return self._leases.ack(consumer, lease_id, self._commit_from)

    def release(self, consumer: str, lease_id: int) -> bool:
        """Return a leased range; the next claim gets it. False: the lease ended before.

        >>> batch = readers.claim("first", 2)
        >>> readers.release("first", batch.lease_id), readers.position
        (True, 0)
        """
        check_lease(consumer, lease_id)
        return self._leases.release(consumer, lease_id)

    def extend(self, consumer: str, lease_id: int, lease_ms: Duration = LEASE_MS_DEFAULT) -> bool:
        """Let a lease end `lease_ms` from now. False: it ended before.

        >>> batch = readers.claim("first", 2)
        >>> readers.extend("first", batch.lease_id, timedelta(minutes=5))
        True
        """
        lease_ms = duration_ms("lease_ms", lease_ms)
        check_lease(consumer, lease_id)
        check_int("lease_ms", lease_ms, 1, LEASE_MS_MAX)
        return self._leases.extend(consumer, lease_id, lease_ms)

    def leave(self, consumer: str) -> int:
        """Return all ranges of a consumer to the others; the number of them.

        >>> batch = readers.claim("first", 2)
        >>> readers.leave("first")
        1
        """
        check_consumer(consumer)
        return self._leases.leave(consumer)

    def consumers(self) -> list[ConsumerState]:
        """The consumers that have leases now, by name.

        >>> batch = readers.claim("first", 2)
        >>> [state.consumer for state in readers.consumers()]
        ['first']
        """
        return self._leases.consumers()

    @property
    def _leases(self) -> GroupLeases:
        with self._topic.lock:
            return self._topic.group_leases.setdefault(self.name, GroupLeases(self._topic, self.name))

    def _commit_from(self, seq: int, position: int) -> None:
        self.commit(seq, expect=position)

    def commit(self, seq: int, *, expect: int | None = None) -> int:
        """Move the cursor to `seq`: everything up to it was processed. Durable as the topic's class says.

        Raises CursorConflict, with nothing changed, for a seq above the head, a seq below the current cursor, and a
        cursor that is not at `expect`, where that is given.

        >>> readers.commit(2), readers.lag().records
        (2, 1)
        """
        _commit_change(self._topic, self.name, lambda cursor: self._decide_commit(cursor, seq, expect))
        return seq

    def would_commit(self, seq: int, *, expect: int | None = None) -> Preview:
        """Return what `commit` would do, or raise what it would raise. Changes nothing.

        >>> readers.would_commit(2).records, readers.position
        (2, 0)
        """
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
        """Move to a seq (the last one that counts as read), a time (a datetime or `timestamp_ms`), before the
        "earliest" record, or after the "latest". Returns the new cursor.

        >>> readers.reset("latest"), readers.reset(datetime(2000, 1, 1, tzinfo=timezone.utc))
        (3, 0)
        """
        seq = self._resolve_target(to)

        def decide(cursor: GroupCursorState | None) -> GroupCursor:
            self._check_head(seq, 0 if cursor is None else cursor.seq)
            return self._cursor_at(seq, cursor)

        _commit_change(self._topic, self.name, decide)
        return seq

    def preview(self, to: ResetTarget) -> Preview:
        """Return what `reset` would do. Changes nothing.

        >>> readers.preview("latest").records, readers.position
        (3, 0)
        """
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

        >>> readers.hold(1 << 20)
        >>> readers.hold_bytes
        1048576
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
        stays.

        >>> readers.begin("latest"), readers.begin("earliest"), readers.position
        (True, False, 3)
        """
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
        """Delete the group; False if it does not exist.

        >>> readers.commit(2), readers.delete(), readers.exists
        (2, True, False)
        """
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
        if isinstance(to, timestamp_ms | datetime):
            at_ms = time_ms("a moment", to)
            check_int("a moment", at_ms, 0, TS_MS_MAX)
            return segment_listing.find_seq_by_time(topic, at_ms) - 1
        if to in ("earliest", "latest"):
            with topic.lock:
                topic.check_open()
                return topic.index.earliest - 1 if to == "earliest" else topic.index.head
        if isinstance(to, bool) or not isinstance(to, int):
            raise BadInput(f"a group goes to earliest, latest, a seq, a datetime or a timestamp_ms, not to {to!r:.80}")
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


class GroupBatch:
    """Records that are leased to one consumer of a group, from `claim` and `consume`. Iterates over its records."""

    def __init__(self, group: ConsumedGroup, lease_id: int, consumer: str, first_seq: int, page: Page) -> None:
        self._group = group
        self.records, self.gap = page.records, page.gap
        self.lease_id, self.consumer = lease_id, consumer
        self.first_seq, self.last_seq = first_seq, page.next_from_seq
        self.is_settled = False  # acked or released, or found void by one of them

    def __repr__(self) -> str:
        return f"<{len(self.records)} records of group {self._group.name!r}, {self.first_seq} to {self.last_seq}>"

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __bool__(self) -> bool:  # `while batch := group.claim(…)` does not end at a gap without records
        return True

    def ack(self) -> bool:
        """Finish the records; False: the lease ended, and they are delivered again."""
        self.is_settled = True
        return self._group.ack(self.consumer, self.lease_id)

    def release(self) -> bool:
        """Return the records to the group; False: the lease ended before."""
        self.is_settled = True
        return self._group.release(self.consumer, self.lease_id)

    def extend(self, lease_ms: Duration = LEASE_MS_DEFAULT) -> bool:
        """Keep the records for `lease_ms` from now; False: the lease ended before."""
        return self._group.extend(self.consumer, self.lease_id, lease_ms)


def check_consumer(consumer: object) -> None:
    """Raise BadInput unless a consumer can have this name."""
    if not is_utf8_text(consumer) or not 0 < len(str(consumer)) <= _CONSUMER_CHARS_MAX:
        raise BadInput(
            f"a consumer has a name of 1 to {_CONSUMER_CHARS_MAX} characters, not {consumer!r:.80}; nothing was leased"
        )


def check_lease(consumer: object, lease_id: object) -> None:
    """Raise BadInput unless this can be the lease of a consumer."""
    check_consumer(consumer)
    check_int("lease_id", lease_id, 0, SEQ_MAX)


def leases_of(group: Group) -> GroupLeases:
    """Return the ranges that consumers of a group have leased, for a caller that waits on an event loop."""
    return group._leases


def claim_range(
    group: Group, consumer: str, read_range: Callable[[int, int | None], PageT], *, lease_ms: int
) -> tuple[RangeLease, PageT] | None:
    """`Group.claim` of records in the form that `read_range(from_seq, to_seq)` returns, without waiting. Where it finds
    none, `commit_finished` follows."""
    check_consumer(consumer)
    check_int("lease_ms", lease_ms, 1, LEASE_MS_MAX)
    topic = group._topic
    topic.check_writable()
    topic.context.shard(topic.id)  # raises where nothing can be written
    return group._leases.claim(consumer, lease_ms, read_range)


def commit_finished(group: Group) -> None:
    """Move the position past ranges that `claim_range` found to be deleted, and what was acked after them."""
    if group._leases.can_commit:
        group._leases.commit_finished(group._commit_from)


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
