"""[shell] From a range of seqs to tasks, on the driver, from one snapshot.

    range     [first ······ floor ······ earliest ── seg ── seg ──  ── seg ── tail ── stop)
               └ lost: a gap  └ deleted: counted                 └ never there: counted

Every seq of the range ends up in exactly one place: in a stretch that a task reads, or in the counts that the first
task is handed. What was lost involuntarily stops the query here, before anything was read, unless it may be emitted or
skipped. Conditions on topic, seq and ts make the range smaller before it is cut; what that leaves out is filtered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import NamedTuple

from tidelog.disk.posix import processors
from tidelog.engine import Counts
from tidelog.errors import BadInput, TopicNotFound
from tidelog.spark import layout
from tidelog.spark.groups import of as groups_of
from tidelog.spark.layout import Lane, Piece
from tidelog.spark.options import EARLIEST, LATEST, Bound, Options
from tidelog.spark.path import INLINE_BYTES
from tidelog.spark.place import Place, Segment, Sight
from tidelog.spark.stretches import Bools, FilePart, Lost, Split, Stretch, packed
from tidelog.spark.where import Bounds, Where

_MS_MAX = 1 << 52


class Range(NamedTuple):
    """Seqs [first, stop) of a topic; `lost` is what is known to be gone whatever the files say."""

    sight: Sight
    first: int
    stop: int
    lost: Lost | None = None
    void: bool = False  # nothing of it can be there


# ── which topics, which seqs ──────────────────────────────────────────────────────────────────────


def topics(place: Place, options: Options) -> list[str]:
    """The topics that are subscribed to, sorted. One that is named has to be there."""
    there = place.names()
    if options.pattern is not None:
        wanted = re.compile(options.pattern)
        return sorted(name for name in there if wanted.fullmatch(name))
    if not options.subscribe:
        return sorted(there)
    found: list[str] = []
    for name in options.subscribe:
        mine = [each for each in there if each == name or (options.codec != "tide" and each.startswith(f"{name}/"))]
        if not mine:
            near = get_close_matches(name, there, n=1)
            error = TopicNotFound(name)
            hint = f", did you mean {near[0]!r}?" if near else ""
            error.args = (f"option subscribe: there is no topic {name!r} in {options.place}; nothing was read{hint}",)
            raise error
        found += mine
    return sorted(found)


def start_of(place: Place, options: Options, sight: Sight, *, default: int) -> int:
    """The first seq to read of a topic."""
    bound = options.start or Bound(default)
    if bound.group is not None:
        stands = groups_of(place, "startingOffsets", bound.group).fetch(bound.group, sight.topic)
        return max(sight.floor, sight.first) if stands is None else stands
    if bound.time_ms is not None:
        return _from_time(place, options, sight, bound.time_ms)
    seq = bound.of(sight.topic)
    if seq == EARLIEST:
        return max(sight.floor, sight.first)
    if seq == LATEST:
        return sight.next
    _check_head("startingOffsets", sight, seq)
    return max(seq, sight.first)


def _from_time(place: Place, options: Options, sight: Sight, time_ms: int) -> int:
    seq = place.seek(sight.topic, time_ms)
    if seq >= sight.next:
        if options.on_miss == "latest":
            return sight.next
        raise BadInput(
            f"option startingTimestamp is {time_ms}: {sight.topic} has no record that late; nothing was read, give an "
            "earlier time, or onTimestampMiss=latest to start behind the last record"
        )
    # Where the first record that is left is the answer, records that were lost may have been in the window as well.
    return sight.first if seq <= max(sight.earliest, sight.floor) else seq


def stop_of(place: Place, options: Options, sight: Sight) -> int:
    """One past the last seq to read of a topic."""
    bound = options.end
    if bound is None:
        return sight.next
    if bound.group is not None:
        stands = groups_of(place, "endingOffsets", bound.group).fetch(bound.group, sight.topic)
        return sight.next if stands is None else stands
    if bound.time_ms is not None:
        return min(place.seek(sight.topic, bound.time_ms), sight.next)
    seq = dict(bound.seqs).get(sight.topic, LATEST)
    if seq == EARLIEST:
        raise BadInput(f"option endingOffsets is -2 for {sight.topic}: nothing lies before it; nothing was read")
    if seq == LATEST:
        return sight.next
    _check_head("endingOffsets", sight, seq)
    return seq


def _check_head(option: str, sight: Sight, seq: int) -> None:
    if seq > sight.next:
        raise BadInput(
            f"option {option} is {seq} for {sight.topic}, whose last record is {sight.next - 1}; nothing was read, "
            f"give at most {sight.next}"
        )


def check_named(bound: Bound | None, option: str, names: Iterable[str]) -> None:
    """Seqs are given for topics that are read."""
    for topic, _ in () if bound is None else bound.seqs:
        if topic not in names:
            raise BadInput(f"option {option} names {topic!r}, which is not subscribed to; nothing was read")


def check_group(place: Place, bound: Bound | None, option: str, options: Options, names: Sequence[str]) -> None:
    """A group that is named is there, in one of the topics at least; unless the query itself is about to make it."""
    group = None if bound is None else bound.group
    if group is None or group == options.group:
        return
    kept = groups_of(place, option, group)
    if all(kept.fetch(group, name) is None for name in names):
        raise BadInput(
            f"option {option}: {', '.join(names)} of {options.place} has no group {group!r}; nothing was read, look at "
            f"the name again, start at the earliest, or give group={group} as well and the query makes it"
        )


def batch_ranges(place: Place, options: Options) -> list[Range]:
    names = topics(place, options)
    check_group(place, options.start, "startingOffsets", options, names)
    check_group(place, options.end, "endingOffsets", options, names)
    check_named(options.start, "startingOffsets", names)
    check_named(options.end, "endingOffsets", names)
    found = []
    for name in names:
        sight = place.look(name)
        if sight is None:
            raise TopicNotFound(name)
        first = start_of(place, options, sight, default=EARLIEST)
        stop = stop_of(place, options, sight)
        if stop < first and (options.start is not None and options.end is not None):
            raise BadInput(
                f"{name}: the range ends at {stop}, before it starts at {first}; nothing was read, look at "
                "startingOffsets and endingOffsets"
            )
        found.append(Range(sight, first, max(stop, first)))
    return found


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Draft:
    lanes: list[Lane] = field(default_factory=list)
    sources: list[tuple[Sight, Segment | None]] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers

    def add(self, sight: Sight, segment: Segment | None, first: int, stop: int) -> None:
        self.lanes.append(Lane(first, stop, sight.bytes_at if segment is None else segment.at))
        self.sources.append((sight, segment))


def splits(place: Place, options: Options, ranges: Sequence[Range], where: Where) -> list[Split]:
    """The tasks that read these ranges. At least one, which may have nothing to do."""
    draft = _Draft()
    for each in ranges:
        _draw(place, options, where, each, draft)
    total = sum(lane.size for lane in draft.lanes)
    count = layout.tasks(total, split_bytes=options.split_bytes, least=options.partitions_min, processors=processors())
    tail = sum(lane.size for lane, (_, segment) in zip(draft.lanes, draft.sources, strict=True) if segment is None)
    made = []
    for part in layout.cut(draft.lanes, count):
        stretches = _stretches(place, options, draft, part, inline=tail <= INLINE_BYTES)
        made.append(Split(tuple(stretches), seqs=sum(stretch.seqs for stretch in stretches)))
    first = made[0] if made else Split()
    told = replace(first, lost=tuple(draft.lost), counts=draft.counts, seqs=first.seqs + sum(draft.counts))
    return [told, *made[1:]]


def missed(options: Options, lost: Lost | None) -> None:
    """Stop where records were lost that somebody wanted to have."""
    if lost is not None and options.on_gap == "fail":
        raise lost.error()


def _draw(place: Place, options: Options, where: Where, each: Range, draft: _Draft) -> None:
    sight, first, stop = each.sight, each.first, each.stop
    if each.lost is not None:
        missed(options, each.lost)
        draft.lost.append(each.lost)
    if each.void:
        draft.counts += Counts(evicted=stop - first)
        return
    if not where.takes_topic(sight.topic):
        draft.counts += Counts(filtered=stop - first)
        return
    begin, end = _between(where.bounds("seq"), first, stop)
    draft.counts += Counts(filtered=(stop - first) - (end - begin))
    if begin < min(sight.floor, end):
        lost = place.lost(sight.topic, begin)
        if lost is not None:
            lost = replace(lost, last=min(lost.last, end - 1))
            missed(options, lost)
            draft.lost.append(lost)
        until = min(sight.floor, end)
        draft.counts += place.settle(sight.topic, begin, until)[0]
        begin = until
    times = where.bounds("ts")
    if place.timed and begin < end and times != Bounds():
        low, high = _by_time(place, sight, times, begin, end)
        draft.counts += Counts(filtered=(end - begin) - (high - low))
        begin, end = low, high
    _lay(place, options, sight, begin, end, draft)


def _between(bounds: Bounds, first: int, stop: int) -> tuple[int, int]:
    begin = min(max(first, bounds.low), stop)
    return begin, max(min(stop, bounds.high + 1), begin)


def _by_time(place: Place, sight: Sight, times: Bounds, first: int, stop: int) -> tuple[int, int]:
    """The seqs whose records may be of these times: time never falls from one record to the next."""
    low, high = times.low // 1000, times.high // 1000 + 1
    begin = first if low <= 0 else min(max(place.seek(sight.topic, min(low, _MS_MAX)), first), stop)
    end = stop if high > _MS_MAX else min(place.seek(sight.topic, max(high, 0)), stop)
    return begin, max(end, begin)


def _lay(place: Place, options: Options, sight: Sight, begin: int, end: int, draft: _Draft) -> None:
    """Lay what can be read into lanes, and settle what is between: deleted, never there, or lost at the source of a
    router."""
    at = begin

    def pass_to(seq: int) -> None:
        nonlocal at
        stop = min(seq, end)
        if at < stop:
            counts, losses = place.settle(sight.topic, at, stop)
            draft.counts += counts
            for lost in losses:
                if lost.first < stop and lost.last >= at:
                    clipped = replace(lost, first=max(lost.first, at), last=min(lost.last, stop - 1))
                    missed(options, clipped)
                    draft.lost.append(clipped)
        at = max(at, min(seq, end))

    pass_to(sight.earliest)
    for segment in sight.segments:
        if segment.stop <= at or at >= end:
            continue
        pass_to(segment.base)
        stop = min(segment.stop, end)
        if at < stop:
            draft.add(sight, segment, at, stop)
            at = stop
    if at < end:
        draft.add(sight, None, at, end)


def _stretches(place: Place, options: Options, draft: _Draft, part: Sequence[Piece], *, inline: bool) -> list[Stretch]:
    found = []
    for piece in part:
        sight, segment = draft.sources[piece.lane]
        made = Stretch(sight.topic, sight.epoch, piece.first, piece.stop, piece.size)
        if segment is not None:
            dead: Bools | None = segment.dead()
            if dead is not None:
                dead = dead[piece.first - segment.base : piece.stop - segment.base]
            file = FilePart(segment.base, segment.stop, segment.size, segment.sealed)
            made = replace(made, file=file, deleted=packed(dead))
        elif inline:
            records = place.inline(sight.topic, piece.first, piece.stop)
            if records is not None:
                for lost in records.lost:
                    missed(options, lost)
                draft.lost += records.lost
                made = replace(made, inline=records.stream, counts=records.counts)
        found.append(made)
    return found
