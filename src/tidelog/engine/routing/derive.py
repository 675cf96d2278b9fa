"""[shell] Recovery of topics that routers feed: their copies are made again, at the seqs they had.

    the dest's frames   │ Router │  …  │ Reached 40, head 52 │ Append 53 │ Trimmed 61–64 │ Delete │  …  │
                        │ Create │     └ copies up to here ─┘           └ copies, holes ┘
                        from the source's records, as they physically are

One topic's frames wait for another one's records, in chains and, where that was allowed, in circles. So each topic
is replayed as far as its source has come, in turns, until all are through. Rules, in order of authority:

  1. A record that was written to the dest keeps its seq. Copies never go past the seq that a frame names.
  2. Up to the cursor that a frame names, what is missing at the source is a hole. Nothing is taken for a record.
  3. Behind the last frame everything is passed on that is there, as the running lane would; what was lost or
     deleted is left to it, because that has to be put on record.
  4. A source that ends before a cursor lost its end (class `memory`, or damage): the seqs are holes, and the lane
     goes on where the source does. A reader beside a writer stops there instead: the rest is on its way.

Nothing is written here. Where frames were replayed, a checkpoint follows before anything else is written, so that no
later recovery has to repeat this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidelog.engine.core import Core
from tidelog.engine.manifest import Manifest
from tidelog.engine.report import Report
from tidelog.engine.routing import plan as planning
from tidelog.engine.routing.holding import router_of
from tidelog.engine.routing.hops import Hops
from tidelog.engine.routing.lane import Lane, Place, apply, stepped
from tidelog.engine.routing.plan import Draft, Room
from tidelog.engine.routing.router import Router
from tidelog.engine.routing.stretch import look
from tidelog.errors import Error
from tidelog.formats import bodies
from tidelog.formats.bodies import ForwardEvent
from tidelog.formats.frame import SEQ_MAX

Event = tuple[bodies.Body | None, Callable[[], None]]  # a control frame or None, and what does it to the topic
_PLENTY = 1 << 62


@dataclass(slots=True)
class Fed:
    """A topic that is fed, on its way through its frames."""

    core: Core
    known: int  # the head that the manifest has: what was before is in it
    frames: Iterator[None]
    through: bool = False
    forced: bool = False  # nothing more will come from the source


class Derive:
    def __init__(self, cores: dict[int, Core], manifest: Manifest, report: Report, *, writable: bool) -> None:
        self._cores, self._manifest, self._report, self._writable = cores, manifest, report, writable
        self._rows = {row.id: row.fed for row in manifest.topics if row.fed is not None}

    def is_fed(self, topic_id: int) -> bool:
        """Whether the manifest knows of a lane to this topic."""
        return topic_id in self._rows

    def _restore(self) -> None:
        """The lanes of the manifest."""
        for topic in self._manifest.topics:
            self._cores[topic.id].hops = Hops(topic.hops)
        for topic_id, fed in self._rows.items():
            dest, source = self._cores[topic_id], self._cores.get(fed.source_id)
            rows = [row for row in self._manifest.routers if row.dest_id == topic_id]
            if source is None:
                self._lost(dest, [row.name for row in rows])
                continue
            lane = Lane(source, dest, fed.cursor)
            lane.direct = not fed.copying
            lane.routers = tuple(router_of(row, source.name, dest.name) for row in rows)
            lane.forwarded = {row.name: row.forwarded for row in rows}
            dest.lane = lane

    def _lost(self, dest: Core, routers: Sequence[str]) -> None:
        self._report.damage.append(f"{dest.name}: its source is gone, and with it the routers {', '.join(routers)}")

    # ── all of them ───────────────────────────────────────────────────────────────────────────

    def run(self, streams: dict[int, Iterator[Event]]) -> None:
        """Replay these topics: in turns, each as far as its source allows. All others have been."""
        self._restore()
        concerned = sorted({*streams, *(core.id for core in self._cores.values() if core.lane is not None)})
        for core in self._cores.values():
            if core.id not in concerned:
                self._pad(core)
        fed = [self._fed(topic_id, streams.get(topic_id, iter(()))) for topic_id in concerned]
        while True:
            before = [(each.core.index.head, each.core.lane and each.core.lane.place, each.through) for each in fed]
            for each in fed:
                next(each.frames, None)
            after = [(each.core.index.head, each.core.lane and each.core.lane.place, each.through) for each in fed]
            if before != after:
                continue
            stuck = [each for each in fed if not each.through and not each.forced]
            if not stuck or not self._writable:
                break
            stuck[0].forced = True
        for each in fed:
            self._settled(each.core)
            if not each.through and each.core.lane is not None:
                each.core.lane.ended = True  # a reader: what comes next is not known here
        for each in fed:
            if not each.core.lanes:
                each.core.hops = Hops()

    def _fed(self, topic_id: int, events: Iterator[Event]) -> Fed:
        core = self._cores[topic_id]
        each = Fed(core, core.index.head, iter(()))
        each.frames = self._replay(each, events)
        return each

    def _settled(self, core: Core) -> None:
        lane = core.lane
        core.last_write_ms = None
        if lane is None:
            return
        lane.traces = False
        if lane.source.dropped:
            self._lost(core, [router.name for router in lane.routers])
            lane.ended, core.lane = True, None
            return
        lane.place = Place(min(lane.place.cursor, lane.source.index.head), core.index.head)
        lane.marked = (lane.place.cursor, 0)
        lane.source.lanes.append(lane)

    def _pad(self, core: Core) -> None:
        """What was reserved may have been handed out."""
        index = core.index
        if self._writable and core.reserved > index.head:
            self._report.padded[core.name] = core.reserved - index.head
            index.pad(core.reserved)

    # ── one of them ───────────────────────────────────────────────────────────────────────────

    def _replay(self, each: Fed, events: Iterator[Event]) -> Iterator[None]:
        """Frame by frame; yields where the source has to come first."""
        core = each.core
        at_head = 0  # the head that the last Reached named: a RouterDelete stands behind one
        for body, do in events:
            match body:
                case bodies.Forward():
                    at_head = body.dest_head
                    yield from self._forward(each, body)
                case bodies.RouterCreate():
                    if body.initial_dest_base >= each.known:
                        yield from self._create(each, Router.of_body(body))
                case bodies.RouterDelete():
                    if at_head >= each.known:
                        self._delete(core, body.name)
                case None:
                    before = core.index.head
                    do()
                    if core.index.head > before and core.lane is not None:
                        core.lane.direct = True
                case _:
                    do()
        if core.lane is None or core.lane.direct:
            self._pad(core)
        each.through = True
        while True:
            if core.lane is not None:
                self._derive(core.lane, SEQ_MAX, None)
            yield

    def _forward(self, each: Fed, body: bodies.Forward) -> Iterator[None]:
        lane = each.core.lane
        copies_follow = body.event is ForwardEvent.REACHED and body.first > body.last
        if body.dest_head < each.known or lane is None:
            return
        if body.source_id == lane.source.id and body.last > lane.place.cursor:
            reached = body.event is ForwardEvent.REACHED
            total = 0 if reached or body.event is ForwardEvent.SKIPPED else _trimmed(lane, body).total
            yield from self._reach(each, lane, body.last if reached else body.first - 1, body.dest_head - total)
            if body.event is ForwardEvent.TRIMMED:
                apply(lane, stepped(lane, [_trimmed(lane, body)], each.core.index.head + 1, None))
            elif body.event is ForwardEvent.SKIPPED:
                lane.place = lane.place._replace(cursor=max(lane.place.cursor, body.last))
        each.core.index.pad(body.dest_head)
        if copies_follow:
            lane.direct = False

    def _reach(self, each: Fed, lane: Lane, cursor: int, head: int) -> Iterator[None]:
        """Make all copies up to a cursor; they end at a head."""
        core = each.core
        while lane.place.cursor < cursor:
            self._derive(lane, cursor, head)
            if lane.place.cursor >= cursor:
                break
            if not each.forced:
                yield
                continue
            each.forced = False
            lane.place = lane.place._replace(cursor=min(cursor, max(lane.source.index.head, lane.place.cursor)))
            if lane.source.config.durability in ("disk", "fsync"):
                self._report.damage.append(
                    f"{core.name}: copies of {lane.source.name} up to seq {cursor} cannot be made again, it ends at "
                    f"{lane.source.index.head}"
                )
            break
        core.index.pad(head)

    def _create(self, each: Fed, router: Router) -> Iterator[None]:
        core = each.core
        lane = core.lane
        if lane is None:
            living = (known for known in self._cores.values() if not known.dropped)
            source = next((known for known in living if known.name == router.source), None)
            if source is None:
                self._lost(core, [router.name])
                return
            lane = core.lane = Lane(source, core, router.start)
        elif any(known.name == router.name for known in lane.routers) and router.start > lane.place.cursor:
            yield from self._reach(each, lane, router.start, router.base)
        at = next((at for at, known in enumerate(lane.routers) if known.name == router.name), len(lane.routers))
        lane.routers = (*lane.routers[:at], router, *lane.routers[at + 1 :])
        lane.forwarded.setdefault(router.name, 0)

    def _delete(self, core: Core, name: str) -> None:
        lane = core.lane
        if lane is None:
            return
        lane.routers = tuple(router for router in lane.routers if router.name != name)
        lane.forwarded.pop(name, None)
        if not lane.routers:
            lane.ended, core.lane = True, None
            core.ended.append(lane)
            lane.source.lanes.append(lane)

    def _derive(self, lane: Lane, cursor: int, head: int | None) -> None:
        """Make copies from what the source physically has, up to a cursor. With a head they go no further than that;
        without, no further than the dest has room, and than what would have to be put on record."""
        dest, source, lane.traces = lane.dest, lane.source, True
        if source.dropped or not lane.routers:
            return
        try:
            while (found := look(source, lane.place.cursor, cursor, physical=True)) is not None:
                if head is None and found.kind in ("lost", "deleted"):
                    return
                drafts = planning.plan(lane.routers, source.id, found)
                if head is None:
                    drafts, full = planning.fitting(lane.routers, drafts, planning.room_of(dest, quota=False))
                else:
                    drafts, full = self._within(lane, drafts, max(head - dest.index.head, 0)), False
                dest.quota.hold(sum(int(d.copies.size.sum()) for d in drafts if d.copies is not None))
                apply(lane, stepped(lane, drafts, dest.index.head + 1, None))
                if full:
                    return
        except Error as error:
            if str(error) not in dest.damage:
                dest.damage.append(str(error))

    def _within(self, lane: Lane, drafts: Sequence[Draft], left: int) -> list[Draft]:
        """Drafts that take no more than so many seqs. Fewer holes are no loss; copies that do not fit are damage."""
        taken: list[Draft] = []
        for draft in drafts:
            if draft.act == "copies" and draft.copies is not None and len(draft.copies) > left:
                self._report.damage.append(
                    f"{lane.dest.name}: {lane.source.name} has more records up to seq {draft.last} than were passed on"
                )
                some, _ = planning.fitting(lane.routers, [draft], Room(max(left, 0), _PLENTY))
                taken += some
                taken.append(Draft("skip", draft.first, draft.last, ()))
            elif draft.act in ("holes", "trim"):
                counts, room = [], left
                for count in draft.counts:
                    counts.append(min(count, room))
                    room -= counts[-1]
                taken.append(Draft("holes", draft.first, draft.last, tuple(counts)))
            else:
                taken.append(draft)
            left -= taken[-1].total
        return taken


def _trimmed(lane: Lane, body: bodies.Forward) -> Draft:
    counts = tuple(max(body.last - max(body.first - 1, router.start), 0) for router in lane.routers)
    return Draft("trim", body.first, body.last, counts)
