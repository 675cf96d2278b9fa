"""[shell] A lane: everything routers pass on from one topic to one other, and how far that has come.

    source  ──────●──────────────────▶ head        `place`: the source's seq up to which all routers have
                  └ cursor                         passed on, and the dest's head when they had
    dest    ─ D D C C C ─ D ─ C C ───▶ head        C copies, D records written to it directly

Copies are not logged: the source's WAL has their records. What recovery could not find out is, as frames
of the dest: a trim or a skip before anybody sees it; before a direct write, where the lane had come to; and, where
seqs of direct writes are reserved ahead, that copies begin again. One pass at a time; it reads the source without
any lock but the source's own, then gets seqs under the dest's, and is published by the committer in its turn, as
any write is. Never two topics' locks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine.append import Append
from tidelog.engine.core import Core
from tidelog.engine.routing import copies as copying
from tidelog.engine.routing import plan as planning
from tidelog.engine.routing.copies import Made
from tidelog.engine.routing.plan import Draft
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.routing.stretch import look
from tidelog.errors import Error, Throttled
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import Forward, ForwardEvent
from tidelog.formats.frame import SEQ_MAX
from tidelog.wal import Commit, Token

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVENTS = {"trim": ForwardEvent.TRIMMED, "skip": ForwardEvent.SKIPPED}


class Place(NamedTuple):
    cursor: int
    head: int


class Step(NamedTuple):
    """A draft with its seqs in the dest."""

    draft: Draft
    first: int
    made: list[Made]

    @property
    def last(self) -> int:
        return self.first + self.draft.total - 1


class Lane:
    """`turn` is held over a pass and over every change of the routers. Marks are the committer's business."""

    def __init__(self, source: Core, dest: Core, cursor: int) -> None:
        self.source, self.dest = source, dest
        self.routers: tuple[Router, ...] = ()
        self.forwarded: dict[str, int] = {}
        self.place = Place(cursor, dest.index.head)
        self.saved = cursor  # as the newest manifest has it: recovery may need the source's records behind it
        self.turn = Lock()
        self.blocked = False  # the dest has no room for the next record
        self.ended = False
        self.direct = True  # direct writes may have come behind the last copies, with seqs reserved ahead
        self.loose = True  # seqs of a source that is fed itself were passed since their place was last put on record
        self.prepared: Place | None = None  # as `place`, with the pass that is being written
        failed = dest.shard.failed if dest.shared.shards else 0
        self.marked = (cursor, failed)  # the cursor that the WAL was last told of
        self.traces = False  # whether hops are noted though nobody is known to ask: recovery does not know yet

    # ── passing on ────────────────────────────────────────────────────────────────────────────

    def run(self) -> bool:
        """Pass on all that the source has now; whether anything was done."""
        target, moved = self.source.index.head, False
        while self.place.cursor < target and self.step():
            moved = True
        return moved

    def step(self) -> bool:
        """One pass over at most some records; False where there is nothing to pass on, or no room for it."""
        with self.turn:
            return self._step()

    def _step(self) -> bool:
        source, dest, routers = self.source, self.dest, self.routers
        if self.ended or not routers or dest.shared.closing or source.dropped:
            return False
        found = look(source, self.place.cursor, SEQ_MAX)
        if found is None:
            return False
        drafts, loose = planning.plan(routers, source.id, found), False
        if source.lane is not None or source.hops:
            drafts, loose = planning.pinned(routers, drafts, found, self.loose)
        with dest.lock:
            if dest.dropped or dest.shared.closing:
                return False
            taken, self.blocked = planning.fitting(routers, drafts, planning.room_of(dest))
            if not taken:
                return False
            if not any(draft.total or draft.act == "skip" for draft in taken):
                self.place = self.place._replace(cursor=taken[-1].last)
                self.loose |= loose
                return True
            commit = self._staged(taken)
            self.loose = True  # until it is known better
            if commit is None:
                return False
        if isinstance(commit, Passed):
            done = commit.token.wait()
            self.loose = loose or self.blocked or self.place != commit.place
            return done
        dest.wake()
        return True

    def _staged(self, taken: Sequence[Draft]) -> Passed | bool | None:
        """Give seqs to what is taken and put it in the queue; True where it is done already, None where it must wait
        after all. With the dest's lock held."""
        dest = self.dest
        weight = sum(int(draft.copies.size.sum()) for draft in taken if draft.copies is not None)
        try:
            dest.quota.take(weight)
        except Throttled:
            self.blocked = True
            return None
        try:
            ts_ms = dest.stamp()
            steps = stepped(self, taken, dest.tail + 1, ts_ms)
            if dest.ephemeral or not dest.shared.shards:
                apply(self, steps)
                return True
            commit = Passed(self, steps, weight, ts_ms)
            dest.shard.submit(commit)
        except BaseException:
            dest.quota.give(weight)
            raise
        dest.tail = commit.place.head
        dest.index.last_ts = ts_ms
        dest.staged_records += commit.count
        dest.staged_bytes += weight
        return commit

    # ── what recovery must be told ────────────────────────────────────────────────────────────

    def mark(self, commit: Commit) -> None:
        """Put in front of a frame of the dest how far the lane had come before it, where that is news. Asked by the
        committer, so that a pass that failed is not told of."""
        if self.ended:
            return
        place = self.prepared or self.place
        news = (place.cursor, self.dest.shard.failed)
        direct = isinstance(commit, Append)
        if news != self.marked or (direct and not self.direct):
            made = self.reached(place)
            if self.dest.config.durability == "disk":
                # A write that is lost with its mark would leave its seqs to the next copies.
                commit.lead(made)
            else:
                commit.precede(made)
            self.marked = news
        self.direct |= direct

    def reached(self, place: Place, *, again: bool = False) -> bytes:
        """The frame that says so; `again`: what follows are copies."""
        event = Forward(
            event=ForwardEvent.REACHED,
            source_id=self.source.id,
            first=place.cursor + again,
            last=place.cursor,
            dest_head=place.head,
        )
        return self.framed(event)

    def framed(self, body: bodies.Body) -> bytes:
        dest = self.dest
        return frame.encode(body.KIND, topic_id=dest.id, ts_ms=dest.shared.now_ms(), data=bodies.encode(body))


class Passed(Commit):
    """A pass on its way through the dest's shard: often without a byte, only for its place among the writes."""

    __slots__ = ("before", "count", "jumps", "lane", "place", "steps", "token", "ts_ms", "weight")

    def __init__(self, lane: Lane, steps: list[Step], weight: int, ts_ms: int) -> None:
        dest = lane.dest
        pieces: list[bytes] = []
        for draft, first, _ in steps:
            if draft.pin:
                pieces.append(lane.reached(Place(draft.first - 1, first - 1)))
            if draft.act in _EVENTS:
                event = Forward(
                    event=_EVENTS[draft.act],
                    source_id=lane.source.id,
                    first=draft.first,
                    last=draft.last,
                    dest_head=first + draft.total - 1,
                )
                pieces.append(lane.framed(event))
        super().__init__(
            pieces, frames=len(pieces), durable=bool(pieces) and dest.config.durability in ("disk", "fsync")
        )
        self.lane, self.steps, self.weight, self.ts_ms = lane, steps, weight, ts_ms
        self.before = Place(lane.place.cursor, steps[0].first - 1)
        self.place = Place(steps[-1].draft.last, steps[-1].last)
        self.count = sum(made.records for step in steps for made in step.made)
        # Seqs in front of it were taken by writes that failed: recovery has to be told.
        self.jumps = not dest.staged_records and dest.tail > dest.index.head
        self.token: Token[bool] = Token(dest.shard)

    def prepare(self) -> None:
        lane = self.lane
        if self.jumps or (lane.direct and lane.dest.ceiling > self.before.head):
            self.lead(lane.reached(self.before, again=True))
            lane.marked = (self.before.cursor, lane.dest.shard.failed)
        lane.direct = False
        lane.prepared = self.place

    def done(self, error: Error | None) -> None:
        lane, dest = self.lane, self.lane.dest
        with dest.lock:
            dest.staged_records -= self.count
            dest.staged_bytes -= self.weight
            lane.prepared = None
            # A write before it that failed leaves holes which this pass did not tell of: it is tried again behind them.
            good = error is None and not dest.dropped and (self.jumps or dest.index.head == self.before.head)
            if good:
                apply(lane, self.steps)
            else:
                lane.direct |= error is not None  # nothing tells that copies begin again
                dest.quota.give(self.weight)
        if error is not None:
            self.token.fail(error)
            return
        self.token.set(True)
        if good:
            dest.wake()


def stepped(lane: Lane, drafts: Sequence[Draft], first: int, ts_ms: int | None) -> list[Step]:
    """Drafts with the seqs from `first` on. With the dest's lock held, or by recovery, which has it for itself."""
    dest, steps = lane.dest, []
    for draft in drafts:
        made: list[Made] = []
        if draft.copies is not None and len(draft.copies):
            made = list(
                copying.make(
                    dest.id,
                    first,
                    draft.copies,
                    lane.routers,
                    ts_ms=ts_ms,
                    least_ms=dest.index.last_ts,
                    durable=dest.durable,
                )
            )
        steps.append(Step(draft, first, made))
        first += draft.total
    return steps


def apply(lane: Lane, steps: Sequence[Step]) -> None:
    """Make steps visible. With the dest's lock held."""
    dest = lane.dest
    index = dest.index
    for draft, first, made in steps:
        last = first + draft.total - 1
        for part in made:
            dest.publish(first, part.frames, part.records, part.weight, part.ts_ms, kept=not dest.ephemeral)
            if dest.lanes or lane.traces:
                _note_hops(dest, first, part)
            first += part.records
        if draft.act in ("holes", "trim"):
            index.pad(last)
        if draft.act == "trim" and draft.total:
            before = index.evict_floor
            gone = index.evict(last + 1, "source")
            dest.quota.give(gone.size)
            dest.shared.notes.add(dest, "source_trim", before, last, gone, actor="retention")
        if draft.act in ("copies", "trim"):
            for router, count in zip(lane.routers, draft.counts, strict=True):
                lane.forwarded[router.name] += count
        lane.place = Place(draft.last, max(index.head, last))
    dest.tail = max(dest.tail, index.head)
    dest.shared.rolled = True  # what no WAL has is worth a checkpoint


def _note_hops(dest: Core, first: int, part: Made) -> None:
    if part.hops is None:
        dest.hops.add(first, first + part.records, 1)
        return
    hops = part.hops.tolist()
    lo = 0
    for hi in range(1, part.records + 1):
        if hi == part.records or hops[hi] != hops[lo]:
            dest.hops.add(first + lo, first + hi, hops[lo])
            lo = hi


# ── all lanes that lead to a topic ────────────────────────────────────────────────────────────────


def upstream(core: Core) -> tuple[list[Lane], bool]:
    """The lanes that lead to a topic, farthest first, and whether they form a circle."""
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
    for lane in _outgoing(core):
        lane.run()


def _outgoing(core: Core) -> Iterator[Lane]:
    return (lane for lane in list(core.lanes) if not lane.ended)


def is_behind(core: Core) -> bool:
    """Whether `catch_up` has something to do."""
    return any(lane.place.cursor < lane.source.index.head for lane in upstream(core)[0])
