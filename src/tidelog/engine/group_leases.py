"""Consumers that share a group: each claims a range of records, and the group's position follows the acks.

    position        7        acked   leased by b      next
    ────────────────┤ leased by a ├──────┼──────────────┼─────► head
                    8          15 16   20 21          30 31

A range is leased to one consumer for a time. An ack finishes it; the position moves to the end of the finished ranges
that follow it without a hole, in one durable commit for all acks that wait. A range goes back, and to the next consumer
that claims, when its lease ends, when it is released and when its consumer leaves.

Ranges live in the memory of the writing process. After a restart, and after a commit or reset by another caller, all
leases are void and consumption continues after the position: at least once, never less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeVar

from tidelog.engine.results import Counts
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.errors import CursorConflict, Forked, Throttled

LEASES_MAX: Final = 10_000  # of one group
LEASE_MS_DEFAULT: Final = 30_000


class ReadPage(Protocol):
    """A `Page` or a `JsonPage`."""

    @property
    def gap(self) -> Gap | None: ...
    @property
    def next_from_seq(self) -> int: ...
    @property
    def counts(self) -> Counts: ...


PageT = TypeVar("PageT", bound=ReadPage)


class RangeLease(NamedTuple):
    """The records `first_seq` to `last_seq`, leased to a consumer."""

    lease_id: int
    consumer: str
    first_seq: int
    last_seq: int
    deadline_ms: int  # of the monotonic clock


class ConsumerState(NamedTuple):
    """What a consumer of a group has leased."""

    consumer: str
    leases: int
    first_seq: int
    last_seq: int


class GroupLeases:
    """The leased, finished and returned ranges of one group. Every method may be called from any thread."""

    def __init__(self, topic: TopicState, name: str) -> None:
        self._topic, self._name = topic, name
        self._lock = Lock()  # of the fields below
        self._committing = Lock()  # held during a commit of the position; taken before `_lock`
        self._position = self._next = -1  # -1: nothing was claimed yet
        self._commit_target: int | None = None
        self._leases: dict[int, RangeLease] = {}
        self._deadlines: list[tuple[int, int]] = []  # a heap of deadlines and lease ids, also of leases that changed
        self._returned: list[tuple[int, int]] = []  # a heap: the first range goes out first
        self._finished: list[tuple[int, int]] = []  # sorted, without overlap, above the position
        # Starts at the time, so that a lease of an earlier process is no lease of this one.
        self._last_lease_id = topic.context.clock.now_us()
        self._listeners: set[Callable[[], None]] = set()

    # ── claim and settle ──────────────────────────────────────────────────────────────────────

    def claim(
        self, consumer: str, lease_ms: int, read: Callable[[int, int | None], PageT]
    ) -> tuple[RangeLease, PageT] | None:
        """Lease the next range to a consumer and return it with its records; None if there is none now.

        `read(from_seq, to_seq)` returns the page after `from_seq`; how much it reads decides how long the range is.
        A range whose records were all deleted is finished by this; `commit_finished` moves the position then.
        """
        with self._lock:
            now_ms = self._refresh()
            if len(self._leases) >= LEASES_MAX:
                raise Throttled("group leases", max=LEASES_MAX, used=len(self._leases), asked=1)
            while True:
                first, last = heappop(self._returned) if self._returned else (self._next + 1, None)
                if last is not None and last <= self._position:  # evicted, and acked as the gap of another range
                    continue
                try:
                    page = read(first - 1, last)
                except BaseException:
                    if last is not None:
                        heappush(self._returned, (first, last))
                    raise
                end = page.next_from_seq
                if last is not None and end < last:
                    heappush(self._returned, (max(end + 1, first), last))
                if end < first:
                    return None
                # A gap may reach beyond a returned range; what it covers above is delivered with it.
                while self._returned and self._returned[0][0] <= end:
                    _, above = heappop(self._returned)
                    if above > end:
                        heappush(self._returned, (end + 1, above))
                self._next = max(self._next, end)
                if page.counts.rows or page.gap is not None:
                    self._last_lease_id += 1
                    lease = RangeLease(self._last_lease_id, consumer, first, end, now_ms + lease_ms)
                    self._add(lease)
                    return lease, page
                self._finish(first, end)  # all deleted

    def ack(self, consumer: str, lease_id: int, commit: Callable[[int, int], object]) -> bool:
        """Finish a range, and move the position where all before it is finished. False: the lease is void, and its
        records are or will be delivered again.

        `commit(seq, expect)` moves the group; where it raises, the range stays finished and a later ack tries again.
        """
        with self._lock:
            self._refresh(expire=False)  # a lease that ended and was not claimed again is still its consumer's
            lease = self._take(consumer, lease_id)
            if lease is None:
                return False
            self._finish(lease.first_seq, lease.last_seq)
        return self.commit_finished(commit)

    def release(self, consumer: str, lease_id: int) -> bool:
        """Return a range unfinished; False: the lease is void."""
        with self._lock:
            self._refresh(expire=False)
            lease = self._take(consumer, lease_id)
            if lease is None:
                return False
            heappush(self._returned, (lease.first_seq, lease.last_seq))
        self.notify_listeners()
        return True

    def extend(self, consumer: str, lease_id: int, lease_ms: int) -> bool:
        """Let a lease end `lease_ms` from now; False: the lease is void."""
        with self._lock:
            now_ms = self._refresh(expire=False)
            lease = self._take(consumer, lease_id)
            if lease is None:
                return False
            self._add(lease._replace(deadline_ms=now_ms + lease_ms))
            return True

    def leave(self, consumer: str) -> int:
        """Return all ranges of a consumer unfinished; the number of them."""
        with self._lock:
            self._refresh()
            left = [lease for lease in self._leases.values() if lease.consumer == consumer]
            for lease in left:
                self._return(lease)
        if left:
            self.notify_listeners()
        return len(left)

    def consumers(self) -> list[ConsumerState]:
        """What each consumer has leased, by name."""
        with self._lock:
            self._refresh()
            by_name: dict[str, list[RangeLease]] = {}
            for lease in self._leases.values():
                by_name.setdefault(lease.consumer, []).append(lease)
        return [
            ConsumerState(
                name, len(leases), min(each.first_seq for each in leases), max(each.last_seq for each in leases)
            )
            for name, leases in sorted(by_name.items())
        ]

    # ── waiting ───────────────────────────────────────────────────────────────────────────────

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` when a range was returned. Leases that end call nothing: `next_deadline_ms` says when to look."""
        with self._lock:
            self._listeners.add(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        with suppress(Forked), self._lock:
            self._listeners.discard(wake)

    def notify_listeners(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        self._topic.context.notify(self._topic.name, listeners)

    def next_deadline_ms(self) -> int | None:
        """When the next lease ends, by the monotonic clock; None: there is none."""
        with self._lock:
            lease = self._first_to_end()
            return None if lease is None else lease.deadline_ms

    def seconds_to_next_deadline(self) -> float | None:
        """How long it is until the next lease ends; None: there is none."""
        ends_ms = self.next_deadline_ms()
        return None if ends_ms is None else max(ends_ms - self._topic.context.clock.monotonic_ms(), 1) / 1000

    # ── under the lock ────────────────────────────────────────────────────────────────────────

    def _refresh(self, *, expire: bool = True) -> int:
        """Start again after the position if another caller moved it; return ranges whose lease ended. Returns the
        time."""
        cursor = self._topic.groups.get(self._name)
        position = 0 if cursor is None else cursor.seq
        if position not in (self._position, self._commit_target):
            self._position = self._next = position
            self._leases.clear()
            self._deadlines.clear()
            self._returned.clear()
            self._finished.clear()
        now_ms = self._topic.context.clock.monotonic_ms()
        if expire:
            while (lease := self._first_to_end()) is not None and lease.deadline_ms <= now_ms:
                self._return(lease)
        return now_ms

    def _add(self, lease: RangeLease) -> None:
        self._leases[lease.lease_id] = lease
        heappush(self._deadlines, (lease.deadline_ms, lease.lease_id))
        if len(self._deadlines) > 2 * len(self._leases) + 100:  # most are of leases that were settled or extended
            self._deadlines = [(each.deadline_ms, each.lease_id) for each in self._leases.values()]
            heapify(self._deadlines)

    def _first_to_end(self) -> RangeLease | None:
        while self._deadlines:
            deadline_ms, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.deadline_ms == deadline_ms:
                return lease
            heappop(self._deadlines)
        return None

    def _take(self, consumer: str, lease_id: int) -> RangeLease | None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.consumer != consumer:
            return None
        return self._leases.pop(lease_id)

    def _return(self, lease: RangeLease) -> None:
        del self._leases[lease.lease_id]
        heappush(self._returned, (lease.first_seq, lease.last_seq))

    def _finish(self, first: int, last: int) -> None:
        """Add a range to the finished ones, joined with its neighbours."""
        first = max(first, self._position + 1)  # below: evicted, and acked as the gap of another range
        if last < first:
            return
        start = bisect_left(self._finished, (first, last))
        if start and self._finished[start - 1][1] >= first - 1:
            start -= 1
        stop = start
        while stop < len(self._finished) and self._finished[stop][0] <= last + 1:
            first, last = min(first, self._finished[stop][0]), max(last, self._finished[stop][1])
            stop += 1
        self._finished[start:stop] = [(first, last)]

    # ── the position ──────────────────────────────────────────────────────────────────────────

    @property
    def can_commit(self) -> bool:
        """Whether finished ranges follow the position."""
        with self._lock:
            return self._follows_position()

    def _follows_position(self) -> bool:
        return bool(self._finished) and self._finished[0][0] <= self._position + 1

    def commit_finished(self, commit: Callable[[int, int], object]) -> bool:
        """Move the position to the end of the finished ranges that follow it; False: another caller has moved it.

        Acks that wait for a commit share the next one.
        """
        with suppress(CursorConflict), self._committing:
            with self._lock:
                position = self._position
                if not self._follows_position():
                    return True
                target = self._commit_target = self._finished[0][1]
            try:
                commit(target, position)
                with self._lock:
                    if self._position == position:  # no other caller has moved the group meanwhile
                        self._position = target
                        self._finished = [(max(lo, target + 1), hi) for lo, hi in self._finished if hi > target]
            finally:
                with self._lock:
                    self._commit_target = None
            return True
        return False
