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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import repeat
from typing import Final, NamedTuple

from tidelog.engine.queues.alarms import Alarms as Alarms

_SLACK: Final = 4_096  # entries of alarms that may be out of date before they are gone through
_Key = tuple[int, int, int]  # minus priority, whether it is fresh, seq
Fresh = Callable[[int, int], tuple[list[int], int]]  # (cursor, how many) → live seqs from there on, and the next cursor


class Lease(NamedTuple):
    node: str
    lease_id: int
    deadline_ms: int
    conn: object = None  # whose end is the end of the lease


class Swept(NamedTuple):
    """What time has brought back."""

    expired: list[tuple[int, Lease]]
    due: list[int]

    def __bool__(self) -> bool:
        return bool(self.expired or self.due)


_NOTHING: Final = Swept([], [])


class Leases:
    def __init__(self) -> None:
        self.held: dict[int, Lease] = {}
        self.settling: dict[int, Lease | None] = {}  # by a commit that is under way; None: nobody held it
        self.delayed: dict[int, int] = {}  # not before this time
        self.deliveries: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.cursor = 1  # the next seq that was never handed out
        self.lease_id = 0  # the last that was
        self.dead_lettered = 0
        self._waiting: dict[int, _Key] = {}
        self._order: list[_Key] = []  # a heap; what `_waiting` does not say is out of date
        self._beyond: set[int] = set()
        self._ends, self._starts = Alarms(), Alarms()
        self._conns: dict[object, set[int]] = {}

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    @property
    def hidden(self) -> int:
        """Jobs that are there and cannot be claimed."""
        return len(self.held) + len(self.delayed) + len(self.settling)

    @property
    def waiting(self) -> int:
        """Jobs that can be claimed and are not fresh."""
        return len(self._waiting)

    def of(self, conn: object) -> int:
        return len(self._conns.get(conn, ()))

    def tracked(self) -> list[int]:
        """Every seq that something is known of, rising."""
        known = (self.held, self.settling, self.delayed, self.deliveries, self.priorities, self._waiting)
        return sorted(set().union(*known))

    def next_due_ms(self) -> int | None:
        """When something may come back by itself."""
        end = self._ends.first(self._ends_at)
        start = self._starts.first(lambda seq, at_ms: self.delayed.get(seq) == at_ms)
        times = [at for at in (None if end is None else end + 1, start) if at is not None]
        return min(times, default=None)

    def _ends_at(self, seq: int, at_ms: int) -> bool:
        lease = self.held.get(seq)
        return lease is not None and lease.deadline_ms == at_ms

    # ── time ──────────────────────────────────────────────────────────────────────────────────

    def sweep(self, now_ms: int) -> Swept:
        """Bring back what is due: delays that have passed, leases whose deadline has."""
        ends, starts = self._ends, self._starts
        if (
            starts.earliest > now_ms
            and ends.earliest > now_ms
            and ends.size <= 2 * len(self.held) + _SLACK
            and starts.size <= 2 * len(self.delayed) + _SLACK
        ):
            return _NOTHING
        due: list[int] = []
        expired: list[tuple[int, Lease]] = []
        for at_ms, seqs in self._starts.before(now_ms + 1):
            for seq in seqs:
                if self.delayed.get(seq) == at_ms:
                    del self.delayed[seq]
                    self._wait(seq)
                    due.append(seq)
        for at_ms, seqs in self._ends.before(now_ms):
            for seq in seqs:
                lease = self.held.get(seq)
                if lease is not None and lease.deadline_ms == at_ms:
                    self._let_go(seq, lease)
                    self._wait(seq)
                    expired.append((seq, lease))
        if self._ends.size > 2 * len(self.held) + _SLACK:
            self._ends.rebuild((lease.deadline_ms, seq) for seq, lease in self.held.items())
        if self._starts.size > 2 * len(self.delayed) + _SLACK:
            self._starts.rebuild((at_ms, seq) for seq, at_ms in self.delayed.items())
        return Swept(expired, due)

    def schedule(self, seq: int, run_at_ms: int | None, priority: int, now_ms: int) -> None:
        """What a job says of itself, told once, before the cursor is past it or a restart has made it known."""
        if priority:
            self.priorities[seq] = priority
        if seq in self._waiting:
            self._wait(seq)  # under its priority from now on
        elif seq >= self.cursor and seq not in self._beyond:
            if run_at_ms is None:
                self._wait(seq, fresh=True)
            elif run_at_ms > now_ms:
                self._delay(seq, run_at_ms)
            else:
                self._wait(seq)

    # ── handing out ───────────────────────────────────────────────────────────────────────────

    def take(self, most: int, fresh: Fresh) -> list[int]:
        """The next jobs, in their order. They are nowhere until `grant`, `set_aside` or `put_back`."""
        taken = self._take_waiting(most, behind=False)
        while len(taken) < most:
            found, cursor = fresh(self.cursor, most - len(taken))
            if cursor <= self.cursor:
                break
            passed = self._beyond.intersection(found) if self._beyond else ()
            if passed:
                taken += [seq for seq in found if seq not in passed]
                self._beyond -= passed
            else:
                taken += found
            self.cursor = cursor
        return taken + self._take_waiting(most - len(taken), behind=True)

    def _take_waiting(self, most: int, *, behind: bool) -> list[int]:
        """`behind`: also what has a lower priority than fresh jobs."""
        taken: list[int] = []
        order = self._order
        while order and len(taken) < most and (behind or order[0][0] <= 0):
            key = heappop(order)
            if self._waiting.get(key[2]) == key:
                del self._waiting[key[2]]
                taken.append(key[2])
        return taken

    def grant(self, seqs: Sequence[int], node: str, deadline_ms: int, conn: object = None) -> tuple[range, list[int]]:
        """Lease what was taken; the ids, and how often each was handed out with this time."""
        ids = range(self.lease_id + 1, self.lease_id + len(seqs) + 1)
        self.lease_id += len(seqs)
        deliveries = self.deliveries
        self.held.update(zip(seqs, map(Lease, repeat(node), ids, repeat(deadline_ms), repeat(conn)), strict=False))
        fresh = deliveries.keys().isdisjoint(seqs)  # as nearly always
        counts = [1] * len(seqs) if fresh else [deliveries.get(seq, 0) + 1 for seq in seqs]
        deliveries.update(zip(seqs, counts, strict=True))
        if seqs:
            self._ends.set(deadline_ms, seqs)
            if conn is not None:
                self._conns.setdefault(conn, set()).update(seqs)
        return ids, counts

    def revoke(self, seqs: Iterable[int], ids: Iterable[int]) -> None:
        """A grant never happened: what is still held under it can be claimed again and was not delivered."""
        for seq, lease_id in zip(seqs, ids, strict=True):
            lease = self.held.get(seq)
            if lease is not None and lease.lease_id == lease_id:
                self._let_go(seq, lease)
                count = self.deliveries.pop(seq) - 1
                if count:
                    self.deliveries[seq] = count
                self._wait(seq)

    def put_back(self, seqs: Iterable[int]) -> None:
        """What was taken and not granted can be claimed again."""
        for seq in seqs:
            self._wait(seq)

    def set_aside(self, seqs: Iterable[int]) -> None:
        """What was taken goes elsewhere: nobody gets it until `settled` or `unsettled`."""
        for seq in seqs:
            self.settling[seq] = None

    # ── settling ──────────────────────────────────────────────────────────────────────────────

    def settle(
        self, seqs: Iterable[int], node: str, lease_ids: Iterable[int | None]
    ) -> tuple[list[tuple[int, Lease]], list[int]]:
        """Begin to end leases, for their holder; those, and the seqs that are not theirs. What becomes of the jobs is
        told later."""
        ended: list[tuple[int, Lease]] = []
        skipped: list[int] = []
        settling = self.settling
        for seq, lease_id in zip(seqs, lease_ids, strict=True):
            lease = self._owned(seq, node, lease_id)
            if lease is None:
                skipped.append(seq)
                continue
            self._let_go(seq, lease)
            settling[seq] = lease
            ended.append((seq, lease))
        return ended, skipped

    def settled(self, seqs: Iterable[int]) -> None:
        """The jobs are gone."""
        settling, deliveries, priorities = self.settling, self.deliveries, self.priorities
        for seq in seqs:
            settling.pop(seq, None)
            deliveries.pop(seq, None)
            if priorities:
                priorities.pop(seq, None)

    def unsettled(self, seqs: Iterable[int]) -> None:
        """It did not happen: leases are back as they were."""
        for seq in seqs:
            if seq not in self.settling:
                continue
            lease = self.settling.pop(seq)
            if lease is None:
                self._wait(seq)
                continue
            self.held[seq] = lease
            self._ends.set(lease.deadline_ms, (seq,))
            if lease.conn is not None:
                self._conns.setdefault(lease.conn, set()).add(seq)

    def released(self, seqs: Iterable[int], ready_at_ms: int | None = None) -> None:
        """The leases are over; the jobs can be claimed again, at once or not before a time."""
        for seq in seqs:
            if seq in self.settling:
                del self.settling[seq]
                if ready_at_ms is None:
                    self._wait(seq)
                else:
                    self._delay(seq, ready_at_ms)

    def extend(self, seq: int, node: str, lease_id: int | None, deadline_ms: int) -> Lease | None:
        """Move a deadline, for the holder; the lease as it was, or None."""
        lease = self._owned(seq, node, lease_id)
        if lease is not None:
            self._end_at(seq, lease, deadline_ms)
        return lease

    def unextend(self, seq: int, before: Lease, deadline_ms: int) -> None:
        """It did not happen, unless something has happened since."""
        lease = self.held.get(seq)
        if lease is not None and (lease.lease_id, lease.deadline_ms) == (before.lease_id, deadline_ms):
            self._end_at(seq, lease, before.deadline_ms)

    def release(self, conn: object) -> list[tuple[int, Lease]]:
        """A connection is over, and with it its leases."""
        gone = [(seq, self.held[seq]) for seq in sorted(self._conns.get(conn, ()))]
        for seq, lease in gone:
            self._let_go(seq, lease)
            self._wait(seq)
        return gone

    def forget(self, seqs: Iterable[int]) -> None:
        """These jobs are gone, whoever took them away."""
        for seq in seqs:
            lease = self.held.get(seq)
            if lease is not None:
                self._let_go(seq, lease)
            self.settling.pop(seq, None)
            self.delayed.pop(seq, None)
            self.deliveries.pop(seq, None)
            self.priorities.pop(seq, None)
            self._waiting.pop(seq, None)
            self._beyond.discard(seq)

    # ── a restart ─────────────────────────────────────────────────────────────────────────────

    def restore(self, held: dict[int, Lease], deliveries: dict[int, int], delayed: dict[int, int]) -> None:
        """What was written down before: of a machine that has done nothing yet."""
        self.deliveries.update(deliveries)
        for seq, lease in held.items():
            self.held[seq] = lease
            self._ends.set(lease.deadline_ms, (seq,))
            self._beyond.add(seq)
        for seq, at_ms in delayed.items():
            self._delay(seq, at_ms)
        for seq in deliveries.keys() - held.keys() - delayed.keys():
            self._wait(seq)

    # ── in one place ──────────────────────────────────────────────────────────────────────────

    def _owned(self, seq: int, node: str, lease_id: int | None) -> Lease | None:
        lease = self.held.get(seq)
        if lease is None or lease.node != node or lease_id not in (None, lease.lease_id):
            return None
        return lease

    def _let_go(self, seq: int, lease: Lease) -> None:
        del self.held[seq]
        if lease.conn is not None:
            mine = self._conns[lease.conn]
            mine.discard(seq)
            if not mine:
                del self._conns[lease.conn]

    def _end_at(self, seq: int, lease: Lease, deadline_ms: int) -> None:
        self.held[seq] = lease._replace(deadline_ms=deadline_ms)
        self._ends.set(deadline_ms, (seq,))

    def _wait(self, seq: int, *, fresh: bool = False) -> None:
        key = self._waiting[seq] = (-self.priorities.get(seq, 0), int(fresh), seq)
        heappush(self._order, key)
        if seq >= self.cursor:
            self._beyond.add(seq)

    def _delay(self, seq: int, at_ms: int) -> None:
        self.delayed[seq] = at_ms
        self._starts.set(at_ms, (seq,))
        if seq >= self.cursor:
            self._beyond.add(seq)
