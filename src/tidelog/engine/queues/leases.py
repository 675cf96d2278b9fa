"""The lease state machine: who holds which job until when, and which job is next. Seqs and times only, no I/O.

                     take, grant                        settle
    fresh ─────────────┐   ┌──────────── leased ──────────────────► pending ───► deleted      acked
      │ schedule       ▼   ▼                │ deadline < now             │
      ▼              ┌───────────┐          ▼                            ├──► delayed         nacked with a delay
    delayed ───────► │ claimable │ ◄────────┴────────────────────────────┴──► claimable       nacked, released
      not before ≤ now └─────────┘

Rules, in order of authority:
  1. A job is in one state. While it is leased or pending no other claimer gets it; an acked job is in none.
  2. A lease ends when the time is past its deadline, not at it; a delay ends at its time.
  3. Claim order: higher priority first; then returned jobs before fresh ones; then the lower seq.
  4. Only the holder's node settles or extends a lease; if it names a lease id, only that lease.
  5. Delivery counts rise with every grant and fall only when a grant is revoked.

A fresh job without a priority takes no memory: it is a seq after the cursor. Jobs after the cursor that are not
fresh are in `_known_after_cursor`, so that the cursor skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import Final, NamedTuple

from tidelog.engine.manifest import LeaseRow, QueueRow
from tidelog.formats import control_frames
from tidelog.formats.control_frames import LeaseEvent


class TimerHeap:
    """Seqs by due time. Entries are not removed when they become stale: callers skip them, and `compact` drops them."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._seqs: dict[int, list[int]] = {}
        self.size = 0

    def add(self, at_ms: int, seqs: Sequence[int]) -> None:
        due = self._seqs.get(at_ms)
        if due is None:
            self._seqs[at_ms] = list(seqs)
            heappush(self._times, at_ms)
        else:
            due += seqs
        self.size += len(seqs)

    def pop_due(self, stop_ms: int) -> Iterator[tuple[int, list[int]]]:
        """Remove and yield the seqs that are due before this time, earliest first."""
        while self._times and self._times[0] < stop_ms:
            at_ms = heappop(self._times)
            seqs = self._seqs.pop(at_ms)
            self.size -= len(seqs)
            yield at_ms, seqs

    def peek(self, is_current: Callable[[int, int], bool]) -> int | None:
        """Return the earliest time with an entry that is current; drop stale ones before it."""
        while self._times:
            at_ms = self._times[0]
            if any(is_current(seq, at_ms) for seq in self._seqs[at_ms]):
                return at_ms
            heappop(self._times)
            self.size -= len(self._seqs.pop(at_ms))
        return None

    def compact(self, entries: Iterable[tuple[int, int]]) -> None:
        """Replace all entries by the current ones."""
        self._seqs, self.size = {}, 0
        for at_ms, seq in entries:
            self._seqs.setdefault(at_ms, []).append(seq)
            self.size += 1
        self._times = list(self._seqs)
        heapify(self._times)


_STALE_TIMERS_MAX: Final = 4_096  # stale timer entries before they are compacted
_PriorityKey = tuple[int, int, int]  # minus priority, whether it is fresh, seq
NextLiveSeqs = Callable[[int, int], tuple[list[int], int]]  # (cursor, count) → live seqs from there on, next cursor


class Lease(NamedTuple):
    node: str
    lease_id: int
    deadline_ms: int
    connection: object = None  # its end releases the lease


class SweepResult(NamedTuple):
    """Jobs that became claimable by time."""

    expired: list[tuple[int, Lease]]
    ready: list[int]

    def __bool__(self) -> bool:
        return bool(self.expired or self.ready)


class LeaseTable:
    """The state of every job that is not fresh."""

    def __init__(self) -> None:
        self.leased: dict[int, Lease] = {}
        self.pending: dict[int, Lease | None] = {}  # in a commit in progress; None: it was not leased
        self.delayed: dict[int, int] = {}  # not claimable before this time
        self.deliveries: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.cursor = 1  # the next seq that was never claimed
        self.lease_id = 0  # the last one assigned
        self.dead_lettered = 0
        self._claimable: dict[int, _PriorityKey] = {}
        self._claim_order: list[_PriorityKey] = []  # a heap; entries that `_claimable` does not have are stale
        self._known_after_cursor: set[int] = set()
        self._deadline_timers, self._delay_timers = TimerHeap(), TimerHeap()
        self._by_connection: dict[object, set[int]] = {}

    # ── counts ────────────────────────────────────────────────────────────────────────────────

    @property
    def unavailable_count(self) -> int:
        """Number of jobs that cannot be claimed now."""
        return len(self.leased) + len(self.delayed) + len(self.pending)

    @property
    def returned_count(self) -> int:
        """Number of claimable jobs that are not fresh."""
        return len(self._claimable)

    def count_for_connection(self, connection: object) -> int:
        return len(self._by_connection.get(connection, ()))

    def known_seqs(self) -> list[int]:
        """Return every seq that is in a table, ascending."""
        known = (self.leased, self.pending, self.delayed, self.deliveries, self.priorities, self._claimable)
        return sorted(set().union(*known))

    def next_due_ms(self) -> int | None:
        """Return the next time at which a lease or a delay ends."""
        deadline_ms = self._deadline_timers.peek(self._is_deadline)
        delay_ms = self._delay_timers.peek(lambda seq, at_ms: self.delayed.get(seq) == at_ms)
        times = [time for time in (None if deadline_ms is None else deadline_ms + 1, delay_ms) if time is not None]
        return min(times, default=None)

    def _is_deadline(self, seq: int, at_ms: int) -> bool:
        lease = self.leased.get(seq)
        return lease is not None and lease.deadline_ms == at_ms

    # ── time ──────────────────────────────────────────────────────────────────────────────────

    def sweep(self, now_ms: int) -> SweepResult:
        """Make jobs claimable whose delay or lease has ended."""
        deadlines, delays = self._deadline_timers, self._delay_timers
        due: list[int] = []
        expired: list[tuple[int, Lease]] = []
        for at_ms, seqs in delays.pop_due(now_ms + 1):
            for seq in seqs:
                if self.delayed.get(seq) == at_ms:
                    del self.delayed[seq]
                    self._make_claimable(seq)
                    due.append(seq)
        for at_ms, seqs in deadlines.pop_due(now_ms):
            for seq in seqs:
                lease = self.leased.get(seq)
                if lease is not None and lease.deadline_ms == at_ms:
                    self._remove_lease(seq, lease)
                    self._make_claimable(seq)
                    expired.append((seq, lease))
        if deadlines.size > 2 * len(self.leased) + _STALE_TIMERS_MAX:
            deadlines.compact((lease.deadline_ms, seq) for seq, lease in self.leased.items())
        if delays.size > 2 * len(self.delayed) + _STALE_TIMERS_MAX:
            delays.compact((at_ms, seq) for seq, at_ms in self.delayed.items())
        return SweepResult(expired, due)

    def schedule(self, seq: int, run_at_ms: int | None, priority: int, now_ms: int) -> None:
        """Apply the schedule of a job; called once for each job, before the cursor passes it."""
        if priority:
            self.priorities[seq] = priority
        if seq in self._claimable:
            self._make_claimable(seq)  # with its priority
        elif seq >= self.cursor and seq not in self._known_after_cursor:
            if run_at_ms is None:
                self._make_claimable(seq, fresh=True)
            elif run_at_ms > now_ms:
                self._delay(seq, run_at_ms)
            else:
                self._make_claimable(seq)

    # ── claim ─────────────────────────────────────────────────────────────────────────────────

    def take(self, count_max: int, next_live_seqs: NextLiveSeqs) -> list[int]:
        """Take the next jobs in claim order. They are in no state until `grant`, `reserve_dead` or `requeue`."""
        taken = self._take_claimable(count_max, below_normal=False)
        while len(taken) < count_max:
            live, cursor = next_live_seqs(self.cursor, count_max - len(taken))
            if cursor <= self.cursor:
                break
            skipped = self._known_after_cursor.intersection(live) if self._known_after_cursor else ()
            if skipped:
                taken += [seq for seq in live if seq not in skipped]
                self._known_after_cursor -= skipped
            else:
                taken += live
            self.cursor = cursor
        return taken + self._take_claimable(count_max - len(taken), below_normal=True)

    def _take_claimable(self, most: int, *, below_normal: bool) -> list[int]:
        """Take claimable jobs that are not fresh. `below_normal`: also those of a lower priority than fresh jobs."""
        taken: list[int] = []
        order = self._claim_order
        while order and len(taken) < most and (below_normal or order[0][0] <= 0):
            key = heappop(order)
            if self._claimable.get(key[2]) == key:
                del self._claimable[key[2]]
                taken.append(key[2])
        return taken

    def grant(
        self, seqs: Sequence[int], node: str, deadline_ms: int, connection: object = None
    ) -> tuple[range, list[int]]:
        """Lease jobs that were taken; return the lease ids and the delivery count of each job."""
        ids = range(self.lease_id + 1, self.lease_id + len(seqs) + 1)
        self.lease_id += len(seqs)
        deliveries = self.deliveries
        leases = map(Lease, repeat(node), ids, repeat(deadline_ms), repeat(connection))
        self.leased.update(zip(seqs, leases, strict=False))
        all_fresh = deliveries.keys().isdisjoint(seqs)  # the common case
        counts = [1] * len(seqs) if all_fresh else [deliveries.get(seq, 0) + 1 for seq in seqs]
        deliveries.update(zip(seqs, counts, strict=True))
        if seqs:
            self._deadline_timers.add(deadline_ms, seqs)
            if connection is not None:
                self._by_connection.setdefault(connection, set()).update(seqs)
        return ids, counts

    def revoke(self, seqs: Iterable[int], ids: Iterable[int]) -> None:
        """Undo a grant: jobs that are still leased by it are claimable again and were not delivered."""
        for seq, lease_id in zip(seqs, ids, strict=True):
            lease = self.leased.get(seq)
            if lease is not None and lease.lease_id == lease_id:
                self._remove_lease(seq, lease)
                count = self.deliveries.pop(seq) - 1
                if count:
                    self.deliveries[seq] = count
                self._make_claimable(seq)

    def requeue(self, seqs: Iterable[int]) -> None:
        """Make jobs that were taken and not granted claimable again."""
        for seq in seqs:
            self._make_claimable(seq)

    def reserve_dead(self, seqs: Iterable[int]) -> None:
        """Mark taken jobs as dead letters in progress: pending until `on_acked` or `on_settle_failed`."""
        for seq in seqs:
            self.pending[seq] = None

    # ── settle ────────────────────────────────────────────────────────────────────────────────

    def begin_settle(
        self, seqs: Iterable[int], node: str, lease_ids: Iterable[int | None]
    ) -> tuple[list[tuple[int, Lease]], list[int]]:
        """Make leases of a holder pending; return them, and the seqs that it does not hold. `on_acked`, `on_released`
        or `on_settle_failed` follows."""
        ended: list[tuple[int, Lease]] = []
        skipped: list[int] = []
        pending = self.pending
        for seq, lease_id in zip(seqs, lease_ids, strict=True):
            lease = self._lease_of(seq, node, lease_id)
            if lease is None:
                skipped.append(seq)
                continue
            self._remove_lease(seq, lease)
            pending[seq] = lease
            ended.append((seq, lease))
        return ended, skipped

    def on_acked(self, seqs: Iterable[int]) -> None:
        """Forget acked jobs."""
        pending, deliveries, priorities = self.pending, self.deliveries, self.priorities
        for seq in seqs:
            pending.pop(seq, None)
            deliveries.pop(seq, None)
            if priorities:
                priorities.pop(seq, None)

    def on_settle_failed(self, seqs: Iterable[int]) -> None:
        """Restore pending leases after a failure."""
        for seq in seqs:
            if seq not in self.pending:
                continue
            lease = self.pending.pop(seq)
            if lease is None:
                self._make_claimable(seq)
                continue
            self.leased[seq] = lease
            self._deadline_timers.add(lease.deadline_ms, (seq,))
            if lease.connection is not None:
                self._by_connection.setdefault(lease.connection, set()).add(seq)

    def on_released(self, seqs: Iterable[int], ready_at_ms: int | None = None) -> None:
        """Make pending jobs claimable again, at once or from a time on."""
        for seq in seqs:
            if seq in self.pending:
                del self.pending[seq]
                if ready_at_ms is None:
                    self._make_claimable(seq)
                else:
                    self._delay(seq, ready_at_ms)

    def extend(self, seq: int, node: str, lease_id: int | None, deadline_ms: int) -> Lease | None:
        """Move the deadline of a holder's lease; return the lease before that, or None if it does not hold it."""
        lease = self._lease_of(seq, node, lease_id)
        if lease is not None:
            self._set_deadline(seq, lease, deadline_ms)
        return lease

    def undo_extend(self, seq: int, before: Lease, deadline_ms: int) -> None:
        """Undo an extension, unless the lease has changed since."""
        lease = self.leased.get(seq)
        if lease is not None and (lease.lease_id, lease.deadline_ms) == (before.lease_id, deadline_ms):
            self._set_deadline(seq, lease, before.deadline_ms)

    def release_connection(self, connection: object) -> list[tuple[int, Lease]]:
        """End the leases of a connection; return them."""
        released = [(seq, self.leased[seq]) for seq in sorted(self._by_connection.get(connection, ()))]
        for seq, lease in released:
            self._remove_lease(seq, lease)
            self._make_claimable(seq)
        return released

    def forget(self, seqs: Iterable[int]) -> None:
        """Forget jobs that the topic removed."""
        for seq in seqs:
            lease = self.leased.get(seq)
            if lease is not None:
                self._remove_lease(seq, lease)
            self.pending.pop(seq, None)
            self.delayed.pop(seq, None)
            self.deliveries.pop(seq, None)
            self.priorities.pop(seq, None)
            self._claimable.pop(seq, None)
            self._known_after_cursor.discard(seq)

    # ── restore ───────────────────────────────────────────────────────────────────────────────

    def restore(self, leased: dict[int, Lease], deliveries: dict[int, int], delayed: dict[int, int]) -> None:
        """Fill a new table with durable leases."""
        self.deliveries.update(deliveries)
        for seq, lease in leased.items():
            self.leased[seq] = lease
            self._deadline_timers.add(lease.deadline_ms, (seq,))
            self._known_after_cursor.add(seq)
        for seq, at_ms in delayed.items():
            self._delay(seq, at_ms)
        for seq in deliveries.keys() - leased.keys() - delayed.keys():
            self._make_claimable(seq)

    # ── state changes of one job ──────────────────────────────────────────────────────────────

    def _lease_of(self, seq: int, node: str, lease_id: int | None) -> Lease | None:
        lease = self.leased.get(seq)
        if lease is None or lease.node != node or lease_id not in (None, lease.lease_id):
            return None
        return lease

    def _remove_lease(self, seq: int, lease: Lease) -> None:
        del self.leased[seq]
        if lease.connection is not None:
            seqs = self._by_connection[lease.connection]
            seqs.discard(seq)
            if not seqs:
                del self._by_connection[lease.connection]

    def _set_deadline(self, seq: int, lease: Lease, deadline_ms: int) -> None:
        self.leased[seq] = lease._replace(deadline_ms=deadline_ms)
        self._deadline_timers.add(deadline_ms, (seq,))

    def _make_claimable(self, seq: int, *, fresh: bool = False) -> None:
        key = self._claimable[seq] = (-self.priorities.get(seq, 0), int(fresh), seq)
        heappush(self._claim_order, key)
        if seq >= self.cursor:
            self._known_after_cursor.add(seq)

    def _delay(self, seq: int, at_ms: int) -> None:
        self.delayed[seq] = at_ms
        self._delay_timers.add(at_ms, (seq,))
        if seq >= self.cursor:
            self._known_after_cursor.add(seq)


class QueueSnapshot:
    """The durable state of a queue: lease frames applied to a manifest row.

        seq of the job, event          CLAIMED inserts; other events apply only to the current lease
        seq 0, RELEASED                ids up to `lease_id` may be in use; `deliveries` counts dead letters

    A nack with a delay is a RELEASED whose deadline is the end of the delay. Replay may start before the state of the
    row: its frames then repeat what the row has, in the same order, with the same result. Ids and counts never fall.
    """

    def __init__(self, row: QueueRow | None = None) -> None:
        row = row or QueueRow(0, 0)
        self.lease_id, self.dead_lettered = row.lease_id, row.dead_lettered
        self.leased = {each.seq: Lease(each.node, each.lease_id, each.deadline_ms) for each in row.leases}
        self.deliveries = dict(row.deliveries)
        self.delayed = dict(row.delayed)

    def apply(self, seq: int, body: control_frames.Lease) -> None:
        self.lease_id = max(self.lease_id, body.lease_id)
        if not seq:
            self.dead_lettered = max(self.dead_lettered, body.deliveries)
            return
        current = self.leased.get(seq)
        if body.event is LeaseEvent.CLAIMED:
            if current is None or body.lease_id >= current.lease_id:
                self.leased[seq] = Lease(body.node, body.lease_id, body.deadline_ms)
                self.delayed.pop(seq, None)
            self.deliveries[seq] = max(self.deliveries.get(seq, 0), body.deliveries)
        elif current is not None and current.lease_id == body.lease_id:
            if body.event is LeaseEvent.EXTENDED:
                self.leased[seq] = current._replace(deadline_ms=body.deadline_ms)
                return
            del self.leased[seq]
            if body.event is LeaseEvent.ACKED:
                self.deliveries.pop(seq, None)
            elif body.deadline_ms:
                self.delayed[seq] = body.deadline_ms

    def row(self) -> QueueRow | None:
        """Return its manifest row; None if it was never used."""
        if not self.lease_id and not self.dead_lettered:
            return None
        return encode_queue_row(self.lease_id, self.dead_lettered, self.leased, self.deliveries, self.delayed)


def encode_queue_row(
    lease_id: int, dead_lettered: int, leased: dict[int, Lease], deliveries: dict[int, int], delayed: dict[int, int]
) -> QueueRow:
    leases = (LeaseRow(seq, lease.lease_id, lease.deadline_ms, lease.node) for seq, lease in sorted(leased.items()))
    counts, delays = tuple(sorted(deliveries.items())), tuple(sorted(delayed.items()))
    return QueueRow(lease_id, dead_lettered, tuple(leases), counts, delays)
