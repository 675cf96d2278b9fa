"""[policy] Who holds which job, until when, and which job is next. Knows seqs and times; touches nothing.

                     take, grant                        settle
    fresh ─────────────┐   ┌────────────── held ───────────────────► settling ──► gone        acked
      │ schedule       ▼   ▼                │ deadline < now             │
      ▼              ┌──────────┐           ▼                            ├──► delayed         nacked, with a delay
    delayed ───────► │ waiting  │ ◄─────────┴────────────────────────────┴──► waiting         nacked, released
      not before ≤ now └────────┘

Rules, in order of authority:
  1. A job is in one place. While it is held or settling nobody else gets it; once acked it is nowhere.
  2. A lease ends when the time is past its deadline, not at it; a delay ends at its time.
  3. Of what can be had, the higher priority goes first; of these, what comes back before what is fresh;
     of these, the lower seq.
  4. Only the holder's node settles or extends, and where it names a lease id, only under that lease.
  5. Delivery counts rise with every grant and fall only when a grant never happened.

A fresh job of no priority costs nothing here: it is a seq behind the cursor. Everything that is
behind the cursor and is not fresh is in `_beyond`, for the cursor to pass over.

[policy] Which seqs something is due for, by time.

What was set and no longer holds is passed over by who asks, and gone through now and then (`rebuild`).

[policy] What a queue keeps over a restart: lease frames → what they come to → a row of the manifest, and back.

    seq of the job, event                    claimed inserts; the others count only for the lease that is current
    seq 0, RELEASED                          ids up to `lease_id` may have been handed out, and `deliveries` is how many
                                             jobs were dead-lettered so far

A delayed nack is a RELEASED whose deadline is the time before which the job is not to be had. Replay
may begin before the state that a row tells of: each frame then says again what the row knows, in the
old order, and the end is the same. Ids and counts never fall on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from math import inf
from typing import Final, NamedTuple

from tidelog.engine.manifest import LeaseRow, QueueRow
from tidelog.formats import control_frames
from tidelog.formats.control_frames import LeaseEvent


class TimerHeap:
    def __init__(self) -> None:
        self._times: list[int] = []
        self._seqs: dict[int, list[int]] = {}
        self.size = 0

    def add(self, at_ms: int, seqs: Sequence[int]) -> None:
        held = self._seqs.get(at_ms)
        if held is None:
            self._seqs[at_ms] = list(seqs)
            heappush(self._times, at_ms)
        else:
            held += seqs
        self.size += len(seqs)

    @property
    def earliest(self) -> float:
        """Nothing is due before this time."""
        return self._times[0] if self._times else inf

    def pop_due(self, stop_ms: int) -> Iterator[tuple[int, list[int]]]:
        """Take out what is due before this time, earliest first."""
        while self._times and self._times[0] < stop_ms:
            at_ms = heappop(self._times)
            seqs = self._seqs.pop(at_ms)
            self.size -= len(seqs)
            yield at_ms, seqs

    def peek(self, is_current: Callable[[int, int], bool]) -> int | None:
        """The earliest time for which some seq still `holds`."""
        while self._times:
            at_ms = self._times[0]
            if any(is_current(seq, at_ms) for seq in self._seqs[at_ms]):
                return at_ms
            heappop(self._times)
            self.size -= len(self._seqs.pop(at_ms))
        return None

    def compact(self, entries: Iterable[tuple[int, int]]) -> None:
        self._seqs, self.size = {}, 0
        for at_ms, seq in entries:
            self._seqs.setdefault(at_ms, []).append(seq)
            self.size += 1
        self._times = list(self._seqs)
        heapify(self._times)


_STALE_TIMERS_MAX: Final = 4_096  # entries of alarms that may be out of date before they are gone through
_PriorityKey = tuple[int, int, int]  # minus priority, whether it is fresh, seq
NextLiveSeqs = Callable[
    [int, int], tuple[list[int], int]
]  # (cursor, how many) → live seqs from there on, and the next cursor


class Lease(NamedTuple):
    node: str
    lease_id: int
    deadline_ms: int
    connection: object = None  # whose end is the end of the lease


class SweepResult(NamedTuple):
    """What time has brought back."""

    expired: list[tuple[int, Lease]]
    ready: list[int]

    def __bool__(self) -> bool:
        return bool(self.expired or self.ready)


_NOTHING_SWEPT: Final = SweepResult([], [])


class LeaseTable:
    def __init__(self) -> None:
        self.leased: dict[int, Lease] = {}
        self.pending: dict[int, Lease | None] = {}  # by a commit that is under way; None: nobody held it
        self.delayed: dict[int, int] = {}  # not before this time
        self.deliveries: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.cursor = 1  # the next seq that was never handed out
        self.lease_id = 0  # the last that was
        self.dead_lettered = 0
        self._claimable: dict[int, _PriorityKey] = {}
        self._claim_order: list[_PriorityKey] = []  # a heap; what `_waiting` does not say is out of date
        self._known_after_cursor: set[int] = set()
        self._deadline_timers, self._delay_timers = TimerHeap(), TimerHeap()
        self._by_connection: dict[object, set[int]] = {}

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    @property
    def unavailable_count(self) -> int:
        """Jobs that are there and cannot be claimed."""
        return len(self.leased) + len(self.delayed) + len(self.pending)

    @property
    def returned_count(self) -> int:
        """Jobs that can be claimed and are not fresh."""
        return len(self._claimable)

    def count_for_connection(self, conn: object) -> int:
        return len(self._by_connection.get(conn, ()))

    def known_seqs(self) -> list[int]:
        """Every seq that something is known of, rising."""
        known = (self.leased, self.pending, self.delayed, self.deliveries, self.priorities, self._claimable)
        return sorted(set().union(*known))

    def next_due_ms(self) -> int | None:
        """When something may come back by itself."""
        end = self._deadline_timers.peek(self._is_deadline)
        start = self._delay_timers.peek(lambda seq, at_ms: self.delayed.get(seq) == at_ms)
        times = [at for at in (None if end is None else end + 1, start) if at is not None]
        return min(times, default=None)

    def _is_deadline(self, seq: int, at_ms: int) -> bool:
        lease = self.leased.get(seq)
        return lease is not None and lease.deadline_ms == at_ms

    # ── time ──────────────────────────────────────────────────────────────────────────────────

    def sweep(self, now_ms: int) -> SweepResult:
        """Bring back what is due: delays that have passed, leases whose deadline has."""
        ends, starts = self._deadline_timers, self._delay_timers
        if (
            starts.earliest > now_ms
            and ends.earliest > now_ms
            and ends.size <= 2 * len(self.leased) + _STALE_TIMERS_MAX
            and starts.size <= 2 * len(self.delayed) + _STALE_TIMERS_MAX
        ):
            return _NOTHING_SWEPT
        due: list[int] = []
        expired: list[tuple[int, Lease]] = []
        for at_ms, seqs in self._delay_timers.pop_due(now_ms + 1):
            for seq in seqs:
                if self.delayed.get(seq) == at_ms:
                    del self.delayed[seq]
                    self._make_claimable(seq)
                    due.append(seq)
        for at_ms, seqs in self._deadline_timers.pop_due(now_ms):
            for seq in seqs:
                lease = self.leased.get(seq)
                if lease is not None and lease.deadline_ms == at_ms:
                    self._remove_lease(seq, lease)
                    self._make_claimable(seq)
                    expired.append((seq, lease))
        if self._deadline_timers.size > 2 * len(self.leased) + _STALE_TIMERS_MAX:
            self._deadline_timers.compact((lease.deadline_ms, seq) for seq, lease in self.leased.items())
        if self._delay_timers.size > 2 * len(self.delayed) + _STALE_TIMERS_MAX:
            self._delay_timers.compact((at_ms, seq) for seq, at_ms in self.delayed.items())
        return SweepResult(expired, due)

    def schedule(self, seq: int, run_at_ms: int | None, priority: int, now_ms: int) -> None:
        """What a job says of itself, told once, before the cursor is past it or a restart has made it known."""
        if priority:
            self.priorities[seq] = priority
        if seq in self._claimable:
            self._make_claimable(seq)  # under its priority from now on
        elif seq >= self.cursor and seq not in self._known_after_cursor:
            if run_at_ms is None:
                self._make_claimable(seq, fresh=True)
            elif run_at_ms > now_ms:
                self._delay(seq, run_at_ms)
            else:
                self._make_claimable(seq)

    # ── handing out ───────────────────────────────────────────────────────────────────────────

    def take(self, count_max: int, fresh: NextLiveSeqs) -> list[int]:
        """The next jobs, in their order. They are nowhere until `grant`, `set_aside` or `put_back`."""
        taken = self._take_claimable(count_max, below_normal=False)
        while len(taken) < count_max:
            found, cursor = fresh(self.cursor, count_max - len(taken))
            if cursor <= self.cursor:
                break
            passed = self._known_after_cursor.intersection(found) if self._known_after_cursor else ()
            if passed:
                taken += [seq for seq in found if seq not in passed]
                self._known_after_cursor -= passed
            else:
                taken += found
            self.cursor = cursor
        return taken + self._take_claimable(count_max - len(taken), below_normal=True)

    def _take_claimable(self, most: int, *, below_normal: bool) -> list[int]:
        """`behind`: also what has a lower priority than fresh jobs."""
        taken: list[int] = []
        order = self._claim_order
        while order and len(taken) < most and (below_normal or order[0][0] <= 0):
            key = heappop(order)
            if self._claimable.get(key[2]) == key:
                del self._claimable[key[2]]
                taken.append(key[2])
        return taken

    def grant(self, seqs: Sequence[int], node: str, deadline_ms: int, conn: object = None) -> tuple[range, list[int]]:
        """Lease what was taken; the ids, and how often each was handed out with this time."""
        ids = range(self.lease_id + 1, self.lease_id + len(seqs) + 1)
        self.lease_id += len(seqs)
        deliveries = self.deliveries
        self.leased.update(zip(seqs, map(Lease, repeat(node), ids, repeat(deadline_ms), repeat(conn)), strict=False))
        fresh = deliveries.keys().isdisjoint(seqs)  # as nearly always
        counts = [1] * len(seqs) if fresh else [deliveries.get(seq, 0) + 1 for seq in seqs]
        deliveries.update(zip(seqs, counts, strict=True))
        if seqs:
            self._deadline_timers.add(deadline_ms, seqs)
            if conn is not None:
                self._by_connection.setdefault(conn, set()).update(seqs)
        return ids, counts

    def revoke(self, seqs: Iterable[int], ids: Iterable[int]) -> None:
        """A grant never happened: what is still held under it can be claimed again and was not delivered."""
        for seq, lease_id in zip(seqs, ids, strict=True):
            lease = self.leased.get(seq)
            if lease is not None and lease.lease_id == lease_id:
                self._remove_lease(seq, lease)
                count = self.deliveries.pop(seq) - 1
                if count:
                    self.deliveries[seq] = count
                self._make_claimable(seq)

    def requeue(self, seqs: Iterable[int]) -> None:
        """What was taken and not granted can be claimed again."""
        for seq in seqs:
            self._make_claimable(seq)

    def reserve_dead(self, seqs: Iterable[int]) -> None:
        """What was taken goes elsewhere: nobody gets it until `settled` or `unsettled`."""
        for seq in seqs:
            self.pending[seq] = None

    # ── settling ──────────────────────────────────────────────────────────────────────────────

    def begin_settle(
        self, seqs: Iterable[int], node: str, lease_ids: Iterable[int | None]
    ) -> tuple[list[tuple[int, Lease]], list[int]]:
        """Begin to end leases, for their holder; those, and the seqs that are not theirs. What becomes of the jobs is
        told later."""
        ended: list[tuple[int, Lease]] = []
        skipped: list[int] = []
        settling = self.pending
        for seq, lease_id in zip(seqs, lease_ids, strict=True):
            lease = self._lease_of(seq, node, lease_id)
            if lease is None:
                skipped.append(seq)
                continue
            self._remove_lease(seq, lease)
            settling[seq] = lease
            ended.append((seq, lease))
        return ended, skipped

    def on_acked(self, seqs: Iterable[int]) -> None:
        """The jobs are gone."""
        settling, deliveries, priorities = self.pending, self.deliveries, self.priorities
        for seq in seqs:
            settling.pop(seq, None)
            deliveries.pop(seq, None)
            if priorities:
                priorities.pop(seq, None)

    def on_settle_failed(self, seqs: Iterable[int]) -> None:
        """It did not happen: leases are back as they were."""
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
        """The leases are over; the jobs can be claimed again, at once or not before a time."""
        for seq in seqs:
            if seq in self.pending:
                del self.pending[seq]
                if ready_at_ms is None:
                    self._make_claimable(seq)
                else:
                    self._delay(seq, ready_at_ms)

    def extend(self, seq: int, node: str, lease_id: int | None, deadline_ms: int) -> Lease | None:
        """Move a deadline, for the holder; the lease as it was, or None."""
        lease = self._lease_of(seq, node, lease_id)
        if lease is not None:
            self._set_deadline(seq, lease, deadline_ms)
        return lease

    def undo_extend(self, seq: int, before: Lease, deadline_ms: int) -> None:
        """It did not happen, unless something has happened since."""
        lease = self.leased.get(seq)
        if lease is not None and (lease.lease_id, lease.deadline_ms) == (before.lease_id, deadline_ms):
            self._set_deadline(seq, lease, before.deadline_ms)

    def release_connection(self, conn: object) -> list[tuple[int, Lease]]:
        """A connection is over, and with it its leases."""
        gone = [(seq, self.leased[seq]) for seq in sorted(self._by_connection.get(conn, ()))]
        for seq, lease in gone:
            self._remove_lease(seq, lease)
            self._make_claimable(seq)
        return gone

    def forget(self, seqs: Iterable[int]) -> None:
        """These jobs are gone, whoever took them away."""
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

    # ── a restart ─────────────────────────────────────────────────────────────────────────────

    def restore(self, held: dict[int, Lease], deliveries: dict[int, int], delayed: dict[int, int]) -> None:
        """What was written down before: of a machine that has done nothing yet."""
        self.deliveries.update(deliveries)
        for seq, lease in held.items():
            self.leased[seq] = lease
            self._deadline_timers.add(lease.deadline_ms, (seq,))
            self._known_after_cursor.add(seq)
        for seq, at_ms in delayed.items():
            self._delay(seq, at_ms)
        for seq in deliveries.keys() - held.keys() - delayed.keys():
            self._make_claimable(seq)

    # ── in one place ──────────────────────────────────────────────────────────────────────────

    def _lease_of(self, seq: int, node: str, lease_id: int | None) -> Lease | None:
        lease = self.leased.get(seq)
        if lease is None or lease.node != node or lease_id not in (None, lease.lease_id):
            return None
        return lease

    def _remove_lease(self, seq: int, lease: Lease) -> None:
        del self.leased[seq]
        if lease.connection is not None:
            mine = self._by_connection[lease.connection]
            mine.discard(seq)
            if not mine:
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
        """Its row; None where there is nothing to say."""
        if not self.lease_id and not self.dead_lettered:
            return None
        return encode_queue_row(self.lease_id, self.dead_lettered, self.leased, self.deliveries, self.delayed)


def encode_queue_row(
    lease_id: int, dead_lettered: int, held: dict[int, Lease], deliveries: dict[int, int], delayed: dict[int, int]
) -> QueueRow:
    leases = (LeaseRow(seq, lease.lease_id, lease.deadline_ms, lease.node) for seq, lease in sorted(held.items()))
    counts, delays = tuple(sorted(deliveries.items())), tuple(sorted(delayed.items()))
    return QueueRow(lease_id, dead_lettered, tuple(leases), counts, delays)
