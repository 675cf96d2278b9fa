"""[policy] What a queue keeps over a restart: lease frames → what they come to → a row of the manifest, and back.

    seq of the job, event                    claimed inserts; the others count only for the lease that is current
    seq 0, RELEASED                          ids up to `lease_id` may have been handed out, and `deliveries` is how many
                                             jobs were dead-lettered so far

A delayed nack is a RELEASED whose deadline is the time before which the job is not to be had. Replay
may begin before the state that a row tells of: each frame then says again what the row knows, in the
old order, and the end is the same. Ids and counts never fall on the way.
"""

from __future__ import annotations

from tidelog.engine.manifest import LeaseRow, QueueRow
from tidelog.engine.queues.leases import Lease
from tidelog.formats import bodies
from tidelog.formats.bodies import LeaseEvent


class Projection:
    def __init__(self, row: QueueRow | None = None) -> None:
        row = row or QueueRow(0, 0)
        self.lease_id, self.dead_lettered = row.lease_id, row.dead_lettered
        self.held = {each.seq: Lease(each.node, each.lease_id, each.deadline_ms) for each in row.leases}
        self.deliveries = dict(row.deliveries)
        self.delayed = dict(row.delayed)

    def apply(self, seq: int, body: bodies.Lease) -> None:
        self.lease_id = max(self.lease_id, body.lease_id)
        if not seq:
            self.dead_lettered = max(self.dead_lettered, body.deliveries)
            return
        current = self.held.get(seq)
        if body.event is LeaseEvent.CLAIMED:
            if current is None or body.lease_id >= current.lease_id:
                self.held[seq] = Lease(body.node, body.lease_id, body.deadline_ms)
                self.delayed.pop(seq, None)
            self.deliveries[seq] = max(self.deliveries.get(seq, 0), body.deliveries)
        elif current is not None and current.lease_id == body.lease_id:
            if body.event is LeaseEvent.EXTENDED:
                self.held[seq] = current._replace(deadline_ms=body.deadline_ms)
                return
            del self.held[seq]
            if body.event is LeaseEvent.ACKED:
                self.deliveries.pop(seq, None)
            elif body.deadline_ms:
                self.delayed[seq] = body.deadline_ms

    def row(self) -> QueueRow | None:
        """Its row; None where there is nothing to say."""
        if not self.lease_id and not self.dead_lettered:
            return None
        return row_of(self.lease_id, self.dead_lettered, self.held, self.deliveries, self.delayed)


def row_of(
    lease_id: int, dead_lettered: int, held: dict[int, Lease], deliveries: dict[int, int], delayed: dict[int, int]
) -> QueueRow:
    leases = (LeaseRow(seq, lease.lease_id, lease.deadline_ms, lease.node) for seq, lease in sorted(held.items()))
    counts, delays = tuple(sorted(deliveries.items())), tuple(sorted(delayed.items()))
    return QueueRow(lease_id, dead_lettered, tuple(leases), counts, delays)
