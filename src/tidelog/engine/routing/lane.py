"""[shell] A lane: everything routers pass on from one topic to one other, and how far that has come.

    source  ──────●──────────────────▶ head        `cursor`: the source's seq up to which all routers have passed on
                  └ cursor
    target  ─ D D C C C ─ D ─ C C ───▶ head        C copies, D records written to it directly

A copy is a record of the target and is logged there as one. In front of its frames, in the same commit, a Forward
frame says which seqs of the source they are copies of; so replay finds records and cursor together or finds neither
(docs/decisions/0028). What the source lost before it could be passed on is a Forward frame alone.

One pass at a time: it reads the source without any lock but the source's own, then gets seqs under the target's lock,
and is published by the committer in its turn, as any write is. Never two topics' locks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from tidelog.disk.interrupts import DEFERRED
from tidelog.engine import reserve
from tidelog.engine.core import Core
from tidelog.engine.parts import Weight
from tidelog.engine.reserve import Booked
from tidelog.engine.routing import copies as copying
from tidelog.engine.routing import plan as planning
from tidelog.engine.routing.copies import Made
from tidelog.engine.routing.plan import Draft
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.routing.stretch import look
from tidelog.errors import Error, Throttled
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import Forward, ForwardEvent
from tidelog.wal import Commit, Token


class Step(NamedTuple):
    """One Forward frame of a pass and the copies that follow it."""

    body: Forward
    made: Made | None  # None: records that were lost at the source

    @property
    def first(self) -> int:
        return self.body.dest_head - self.body.total + 1


class Lane:
    """`turn` is held over a pass and over every change of the routers."""

    def __init__(self, source: Core, dest: Core, cursor: int) -> None:
        self.source, self.dest = source, dest
        self.routers: tuple[Router, ...] = ()
        self.forwarded: dict[str, int] = {}
        self.cursor = cursor
        self.saved = cursor  # as the newest manifest has it: replay may begin there
        self.turn = Lock()
        self.blocked = False  # the target has no room for the next record
        self.ended = False

    def run(self) -> bool:
        """Pass on all that the source has now; whether anything was done."""
        target, moved = self.source.index.head, False
        while self.cursor < target and self.step():
            moved = True
        return moved

    def step(self) -> bool:
        """One pass over at most some records; False where there is nothing to pass on, or no room for it."""
        with DEFERRED, self.turn:
            return self.begin()()

    def begin(self) -> Callable[[], bool]:
        """Stage a pass; what it returns waits until the pass is committed. The caller holds `turn` over both calls."""
        source, dest, routers = self.source, self.dest, self.routers
        shared = dest.shared
        if self.ended or not routers or shared.closing or not shared.shards or source.dropped:
            return _nothing
        found = look(source, self.cursor)
        if found is None:
            return _nothing
        drafts = planning.plan(routers, source.id, found)
        with dest.lock:
            if dest.dropped or shared.closing:
                return _nothing
            taken, self.blocked = planning.fitting(routers, drafts, planning.room_of(dest))
            if not taken:
                return _nothing
            if not any(draft.total for draft in taken):
                # Not logged: after a crash the same seqs are looked at again.
                self.cursor = taken[-1].last
                return _done
            try:
                commit = self._staged(taken)
            except Throttled:
                self.blocked = True
                return _nothing
        if commit is None:
            dest.wake()
            return _done
        return commit.token.wait

    def _staged(self, taken: Sequence[Draft]) -> Passed | None:
        """Give seqs to what is taken and put it in the queue; None where it is done already. With the target's lock
        held."""
        dest = self.dest
        weight = sum(int(draft.copies.size.sum()) for draft in taken if draft.copies is not None)
        dest.quota.take(weight)
        try:
            ts_ms = dest.stamp()
            steps = list(_steps(self, taken, dest.tail + 1, ts_ms))
            if dest.ephemeral:
                apply(self, steps, ts_ms)
                self.cursor = taken[-1].last
                return None
            commit = Passed(self, steps, taken[-1].last, weight, ts_ms)
            dest.shard.submit(commit)
        except BaseException:
            dest.quota.give(weight)
            raise
        dest.tail = commit.last
        dest.wiring += len(steps)
        dest.index.last_ts = ts_ms
        dest.staged_records += commit.count
        dest.staged_bytes += weight
        return commit

    def framed(self, body: bodies.Body, number: int) -> bytes:
        """A frame about the routers of the target; its seq is the number."""
        dest = self.dest
        data = bodies.encode(body)
        return frame.encode(body.KIND, topic_id=dest.id, seq=number, ts_ms=dest.shared.now_ms(), data=data)


def _nothing() -> bool:
    return False


def _done() -> bool:
    return True


class Passed(Commit):
    """A pass on its way through the target's shard."""

    __slots__ = (
        "books",
        "ceiling",
        "count",
        "lane",
        "last",
        "reach",
        "reserves",
        "shard",
        "steps",
        "token",
        "ts_ms",
        "weight",
    )

    def __init__(self, lane: Lane, steps: list[Step], reach: int, weight: int, ts_ms: int) -> None:
        dest = lane.dest
        pieces: list[bytes] = []
        for number, (body, made) in enumerate(steps, dest.wiring + 1):
            pieces.append(lane.framed(body, number))
            pieces += () if made is None else made.frames
        trims = any(made is None for _, made in steps)
        # A gap that a reader was shown is shown again after a power cut.
        durable = dest.durable or (trims and dest.config.durability == "disk")
        super().__init__(pieces, frames=len(pieces), durable=durable)
        self.copied = len(pieces)
        self.vital = False  # new records, though of the target
        self.lane, self.steps, self.weight, self.ts_ms = lane, steps, weight, ts_ms
        self.reach = reach  # the cursor when it is done
        self.count = sum(made.records for _, made in steps if made is not None)
        self.last = steps[-1].body.dest_head
        self.reserves = dest.config.durability == "disk"
        self.ceiling = 0
        self.books: Booked | None = None
        self.shard = dest.shard
        self.token: Token[bool] = Token(self.shard)

    @property
    def waits(self) -> bool:
        return self.durable or (self.reserves and reserve.is_due(self.lane.dest, self.last))

    def prepare(self) -> None:
        """Class `disk`: the seqs of copies are reserved ahead, as those of all writes are."""
        if not self.reserves:
            return
        first = self.steps[0].first
        self.ceiling, self.books = reserve.cover(self, self.lane.dest, self.shard, first, self.last, self.ts_ms)

    def done(self, error: Error | None) -> None:
        lane, dest = self.lane, self.lane.dest
        with dest.lock:
            dest.staged_records -= self.count
            dest.staged_bytes -= self.weight
            reserve.covered(self, dest, self.ceiling, self.books, good=error is None)
            if error is None and not dest.dropped:
                apply(lane, self.steps, self.ts_ms)
                lane.cursor = self.reach
            else:
                dest.quota.give(self.weight)
        if error is not None:
            self.token.fail(error)
            return
        self.token.set(True)
        dest.wake()


def _steps(lane: Lane, drafts: Sequence[Draft], first: int, ts_ms: int) -> Iterator[Step]:
    """The frames of drafts, with the seqs from `first` on. With the target's lock held."""
    dest = lane.dest
    for draft in drafts:
        at = draft.first
        if draft.act == "trim" and draft.total:
            hops = (draft.total, draft.hops)
            yield Step(_forward(lane, ForwardEvent.LOST, at, draft.last, first, draft.counts, hops), None)
            first += draft.total
        if draft.copies is None or not len(draft.copies):
            continue
        for made in copying.make(dest.id, first, draft.copies, lane.routers, ts_ms=ts_ms, durable=dest.durable):
            yield Step(_forward(lane, ForwardEvent.COPIED, at, made.last, first, made.counts, made.hops), made)
            first, at = first + made.records, made.last + 1


def _forward(
    lane: Lane,
    event: ForwardEvent,
    first: int,
    last: int,
    dest_first: int,
    counts: tuple[int, ...],
    hops: tuple[int, ...],
) -> Forward:
    return Forward(
        event=event,
        source_id=lane.source.id,
        first=first,
        last=last,
        dest_head=dest_first + sum(counts) - 1,
        counts=counts,
        hops=hops,
    )


def apply(lane: Lane, steps: Sequence[Step], ts_ms: int) -> None:
    """Make steps visible. With the target's lock held."""
    dest = lane.dest
    for step in steps:
        body, made = step
        if made is not None:
            dest.publish(step.first, made.frames, made.records, made.weight, ts_ms, kept=not dest.ephemeral)
        else:
            trim(dest, step.first, body.dest_head)
        if dest.lanes:
            dest.hops.add_runs(step.first, body.hops)
        for router, count in zip(lane.routers, body.counts, strict=True):
            lane.forwarded[router.name] += count
        dest.wired += 1
        lane.cursor = body.last
    dest.wiring = max(dest.wiring, dest.wired)
    dest.tail = max(dest.tail, dest.index.head)
    dest.shared.rolled = True


def trim(dest: Core, first: int, last: int) -> None:
    """Seqs first to last stand for records that the source lost. Nothing that is there goes. With the lock held, or
    by replay."""
    dest.index.trim(first, last + 1)
    dest.shared.notes.add(dest, "source_trim", first, last, Weight(0, 0), actor="retention")


# ── all lanes that lead to a topic ────────────────────────────────────────────────────────────────


def upstream(core: Core) -> tuple[list[Lane], bool]:
    """The lanes that lead to a topic, farthest first, and whether they form a cycle."""
    order: list[Lane] = []
    seen: set[int] = set()
    circular = False
    here: Core | None = core
    while here is not None and here.lane is not None:  # a topic has one source, so this is a path
        if here.id in seen:
            circular = True
            break
        seen.add(here.id)
        order.append(here.lane)
        here = here.lane.source
    return order[::-1], circular


def catch_up(core: Core) -> None:
    """Bring to a topic all that its sources have. Raises what a write to it would raise."""
    lanes, circular = upstream(core)
    for _ in range(HOPS_MAX + 2 if circular else 1):
        if not sum([lane.run() for lane in lanes]):
            return


def pass_on(core: Core) -> None:
    """Have what a topic holds passed on, before some of it is deleted."""
    for lane in list(core.lanes):
        lane.run()


def is_behind(core: Core) -> bool:
    """Whether `catch_up` has something to do."""
    return bool(core.shared.shards) and any(lane.cursor < lane.source.index.head for lane in upstream(core)[0])
