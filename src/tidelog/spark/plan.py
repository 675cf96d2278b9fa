"""Plan a read on the driver: from ranges of seqs to tasks, from one snapshot.

    range     [first ······ floor ······ earliest ── seg ── seg ──  ── seg ── tail ── stop)
               └ lost: a gap  └ deleted: counted                 └ never written: counted

Every seq of the range is accounted for once: in a range of a task, or in the counts of the first task. Evicted and
expired records raise GapFound here, before anything is read, unless gaps are emitted or skipped. Conditions on topic,
seq and ts narrow the range first; the rest is counted as filtered.

All bytes to read are concatenated and split at equal distances:

    topic a                       topic b            tail
    ├────────┬────────┬───┬───────┼──┬──┬──┬──┬──┬───┼────┤        segments: large ones are split, small ones packed
    ╎            ╎           ╎           ╎           ╎    ╎        splits, moved to the start of a frame

So one topic uses all cores as evenly as many topics do, and rows stay in order inside a task. The number of tasks
follows `splitBytes` and is at least `minPartitions`; by default it is at least the number of processors, unless a task
would read less than `MIN_TASK_BYTES`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Final, NamedTuple

from tidelog.disk.process import processor_count
from tidelog.engine import Counts
from tidelog.errors import BadInput, TopicNotFound
from tidelog.spark.backends.directory import INLINE_TAIL_BYTES_MAX
from tidelog.spark.backends.interface import (
    Backend,
    BoolArray,
    PlannedFile,
    ReadRange,
    ReadTask,
    SegmentInfo,
    TopicGap,
    TopicSnapshot,
    pack_mask,
)
from tidelog.spark.filters import Bounds, RecordFilter
from tidelog.spark.groups import group_store
from tidelog.spark.options import EARLIEST, LATEST, Bound, Options

MIN_TASK_BYTES: Final = 1 << 20


class SizedRange(NamedTuple):
    """A range of seqs with their ascending byte offsets."""

    first: int
    stop: int
    offset_of: Callable[[int], int]  # of seqs in [first, stop]

    @property
    def size(self) -> int:
        return self.offset_of(self.stop) - self.offset_of(self.first)


class Slice(NamedTuple):
    range_index: int  # index in the list of ranges
    first: int
    stop: int
    size: int


def count_tasks(total_bytes: int, *, split_bytes: int, min_tasks: int | None, processors: int) -> int:
    """Return the number of tasks for `total_bytes`."""
    asked = -(-total_bytes // split_bytes)
    if min_tasks is None:
        min_tasks = min(processors, -(-total_bytes // MIN_TASK_BYTES))
    return max(asked, min_tasks, 1)


def split_ranges(ranges: Sequence[SizedRange], count: int) -> list[list[Slice]]:
    """Split the ranges into at most `count` parts of about equal size, none empty."""
    sizes = [sized_range.size for sized_range in ranges]
    total = sum(sizes)
    marks = [total * number // count for number in range(1, count)]
    parts: list[list[Slice]] = [[]]
    before = 0
    for number, (sized_range, size) in enumerate(zip(ranges, sizes, strict=True)):
        first, origin = sized_range.first, sized_range.offset_of(sized_range.first)
        while marks and marks[0] <= before + size:
            stop = _cut_near(sized_range, first, origin + marks.pop(0) - before)
            if stop > first:
                parts[-1].append(Slice(number, first, stop, sized_range.offset_of(stop) - sized_range.offset_of(first)))
                first = stop
            if parts[-1]:
                parts.append([])
        if first < sized_range.stop:
            parts[-1].append(
                Slice(
                    number,
                    first,
                    sized_range.stop,
                    sized_range.offset_of(sized_range.stop) - sized_range.offset_of(first),
                )
            )
        before += size
    return [part for part in parts if part]


def _cut_near(sized_range: SizedRange, first: int, offset: int) -> int:
    """Return the start of a frame nearest to a byte."""
    later = bisect_left(range(first, sized_range.stop), offset, key=sized_range.offset_of) + first
    if later >= sized_range.stop:
        return sized_range.stop
    earlier = (
        bisect_left(range(first, later), sized_range.offset_of(later - 1), key=sized_range.offset_of) + first
        if later > first
        else first
    )
    return later if sized_range.offset_of(later) - offset <= offset - sized_range.offset_of(earlier) else earlier


_TIMESTAMP_MS_MAX = 1 << 52


class TopicRange(NamedTuple):
    """Seqs [first, stop) of a topic. `gap`: a loss that the snapshot does not show, as of a recreated topic."""

    snapshot: TopicSnapshot
    first: int
    stop: int
    gap: TopicGap | None = None
    is_gone: bool = False  # no record can be read


# ── topics and seqs ───────────────────────────────────────────────────────────────────────────────


def resolve_topics(backend: Backend, options: Options) -> list[str]:
    """Return the subscribed topics, sorted. Raises TopicNotFound for a named topic that does not exist."""
    existing = backend.names()
    if options.pattern is not None:
        wanted = re.compile(options.pattern)
        return sorted(name for name in existing if wanted.fullmatch(name))
    if not options.subscribe:
        return sorted(existing)
    found: list[str] = []
    for name in options.subscribe:
        prefix = name if options.codec == "tide" else f"{name}/"
        matching = [each for each in existing if each == name or (prefix != name and each.startswith(prefix))]
        if not matching:
            near = get_close_matches(name, existing, n=1)
            error = TopicNotFound(name)
            hint = f", did you mean {near[0]!r}?" if near else ""
            error.args = (
                f"option subscribe: there is no topic {name!r} in {options.location}; nothing was read{hint}",
            )
            raise error
        found += matching
    return sorted(found)


def start_seq(backend: Backend, options: Options, snapshot: TopicSnapshot, *, default: int) -> int:
    """Return the first seq to read of a topic."""
    bound = options.start or Bound(default)
    if bound.group is not None:
        next_seq = group_store(backend, "startingOffsets", bound.group).fetch(bound.group, snapshot.topic)
        return max(snapshot.evict_floor, snapshot.first_seq) if next_seq is None else next_seq
    if bound.time_ms is not None:
        return _start_from_time(backend, options, snapshot, bound.time_ms)
    seq = bound.seq_for(snapshot.topic)
    if seq == EARLIEST:
        return max(snapshot.evict_floor, snapshot.first_seq)
    if seq == LATEST:
        return snapshot.next_seq
    _check_not_past_end("startingOffsets", snapshot, seq)
    return max(seq, snapshot.first_seq)


def _start_from_time(backend: Backend, options: Options, snapshot: TopicSnapshot, time_ms: int) -> int:
    seq = backend.seek(snapshot.topic, time_ms)
    if seq >= snapshot.next_seq:
        if options.on_timestamp_miss == "latest":
            return snapshot.next_seq
        raise BadInput(
            f"option startingTimestamp is {time_ms}: {snapshot.topic} has no record that late; nothing was read, give "
            "an earlier time, or onTimestampMiss=latest to start after the last record"
        )
    # If the first remaining record is the result, lost records may have been in the time range as well.
    return snapshot.first_seq if seq <= max(snapshot.earliest_seq, snapshot.evict_floor) else seq


def end_seq(backend: Backend, options: Options, snapshot: TopicSnapshot) -> int:
    """Return the seq after the last one to read of a topic."""
    bound = options.end
    if bound is None:
        return snapshot.next_seq
    if bound.group is not None:
        next_seq = group_store(backend, "endingOffsets", bound.group).fetch(bound.group, snapshot.topic)
        return snapshot.next_seq if next_seq is None else next_seq
    if bound.time_ms is not None:
        return min(backend.seek(snapshot.topic, bound.time_ms), snapshot.next_seq)
    seq = dict(bound.seqs).get(snapshot.topic, LATEST)
    if seq == EARLIEST:
        raise BadInput(f"option endingOffsets is -2 for {snapshot.topic}: there is nothing before it; nothing was read")
    if seq == LATEST:
        return snapshot.next_seq
    _check_not_past_end("endingOffsets", snapshot, seq)
    return seq


def _check_not_past_end(option: str, snapshot: TopicSnapshot, seq: int) -> None:
    if seq > snapshot.next_seq:
        raise BadInput(
            f"option {option} is {seq} for {snapshot.topic}, whose last record is {snapshot.next_seq - 1}; nothing "
            f"was read, give at most {snapshot.next_seq}"
        )


def check_topics_subscribed(bound: Bound | None, option: str, names: Iterable[str]) -> None:
    """Raise BadInput for seqs of a topic that is not read."""
    for topic, _ in () if bound is None else bound.seqs:
        if topic not in names:
            raise BadInput(f"option {option} names {topic!r}, which is not subscribed to; nothing was read")


def check_group_exists(
    backend: Backend, bound: Bound | None, option: str, options: Options, names: Sequence[str]
) -> None:
    """Raise BadInput if a named group exists in none of the topics, unless the query itself creates it."""
    group = None if bound is None else bound.group
    if group is None or group == options.group:
        return
    store = group_store(backend, option, group)
    if all(store.fetch(group, name) is None for name in names):
        raise BadInput(
            f"option {option}: {', '.join(names)} of {options.location} has no group {group!r}; nothing was read, "
            f"look at the name again, start at the earliest, or give group={group} as well and the query makes it"
        )


def batch_ranges(backend: Backend, options: Options) -> list[TopicRange]:
    names = resolve_topics(backend, options)
    check_group_exists(backend, options.start, "startingOffsets", options, names)
    check_group_exists(backend, options.end, "endingOffsets", options, names)
    check_topics_subscribed(options.start, "startingOffsets", names)
    check_topics_subscribed(options.end, "endingOffsets", names)
    found = []
    for name in names:
        snapshot = backend.snapshot(name)
        if snapshot is None:
            raise TopicNotFound(name)
        first = start_seq(backend, options, snapshot, default=EARLIEST)
        stop = end_seq(backend, options, snapshot)
        if stop < first and (options.start is not None and options.end is not None):
            raise BadInput(
                f"{name}: the range ends at {stop}, before it starts at {first}; nothing was read, look at "
                "startingOffsets and endingOffsets"
            )
        found.append(TopicRange(snapshot, first, max(stop, first)))
    return found


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _PlanBuilder:
    ranges: list[SizedRange] = field(default_factory=list)
    sources: list[tuple[TopicSnapshot, SegmentInfo | None]] = field(default_factory=list)
    gaps: list[TopicGap] = field(default_factory=list)
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers

    def add(self, snapshot: TopicSnapshot, segment: SegmentInfo | None, first: int, stop: int) -> None:
        self.ranges.append(SizedRange(first, stop, snapshot.bytes_before if segment is None else segment.frame_offset))
        self.sources.append((snapshot, segment))


def plan_tasks(
    backend: Backend, options: Options, ranges: Sequence[TopicRange], record_filter: RecordFilter
) -> list[ReadTask]:
    """Return the tasks that read these ranges: at least one, which may be empty."""
    builder = _PlanBuilder()
    for topic_range in ranges:
        _plan_range(backend, options, record_filter, topic_range, builder)
    total = sum(sized_range.size for sized_range in builder.ranges)
    count = count_tasks(
        total, split_bytes=options.split_bytes, min_tasks=options.partitions_min, processors=processor_count()
    )
    tail = sum(
        sized_range.size
        for sized_range, (_, segment) in zip(builder.ranges, builder.sources, strict=True)
        if segment is None
    )
    tasks = []
    for part in split_ranges(builder.ranges, count):
        read_ranges = _build_ranges(backend, options, builder, part, inline=tail <= INLINE_TAIL_BYTES_MAX)
        tasks.append(ReadTask(tuple(read_ranges), seq_count=sum(read_range.seq_count for read_range in read_ranges)))
    first = tasks[0] if tasks else ReadTask()
    first_task = replace(
        first, gaps=tuple(builder.gaps), counts=builder.counts, seq_count=first.seq_count + sum(builder.counts)
    )
    return [first_task, *tasks[1:]]


def raise_on_gap(options: Options, gap: TopicGap | None) -> None:
    """Raise GapFound for lost records, if onGap is fail."""
    if gap is not None and options.on_gap == "fail":
        raise gap.to_error()


def _plan_range(
    backend: Backend, options: Options, record_filter: RecordFilter, topic_range: TopicRange, builder: _PlanBuilder
) -> None:
    snapshot, first, stop = topic_range.snapshot, topic_range.first, topic_range.stop
    if topic_range.gap is not None:
        raise_on_gap(options, topic_range.gap)
        builder.gaps.append(topic_range.gap)
    if topic_range.is_gone:
        builder.counts += Counts(evicted=stop - first)
        return
    if not record_filter.accepts_topic(snapshot.topic):
        builder.counts += Counts(filtered=stop - first)
        return
    begin, end = _clip_to_bounds(record_filter.bounds("seq"), first, stop)
    builder.counts += Counts(filtered=(stop - first) - (end - begin))
    if begin < min(snapshot.evict_floor, end):
        gap = backend.gap_before(snapshot.topic, begin)
        if gap is not None:
            gap = gap.clip(end)
            raise_on_gap(options, gap)
            builder.gaps.append(gap)
        until = min(snapshot.evict_floor, end)
        builder.counts += backend.account_missing(snapshot.topic, begin, until)[0]
        begin = until
    times = record_filter.bounds("ts")
    if backend.has_timestamps and begin < end and times != Bounds():
        low, high = _clip_to_times(backend, snapshot, times, begin, end)
        builder.counts += Counts(filtered=(end - begin) - (high - low))
        begin, end = low, high
    _add_readable(backend, options, snapshot, begin, end, builder)


def _clip_to_bounds(bounds: Bounds, first: int, stop: int) -> tuple[int, int]:
    begin = min(max(first, bounds.low), stop)
    return begin, max(min(stop, bounds.high + 1), begin)


def _clip_to_times(backend: Backend, snapshot: TopicSnapshot, times: Bounds, first: int, stop: int) -> tuple[int, int]:
    """Return the seqs that may have these times: times never decrease from one record to the next."""
    low, high = times.low // 1000, times.high // 1000 + 1
    begin = first if low <= 0 else min(max(backend.seek(snapshot.topic, min(low, _TIMESTAMP_MS_MAX)), first), stop)
    end = stop if high > _TIMESTAMP_MS_MAX else min(backend.seek(snapshot.topic, max(high, 0)), stop)
    return begin, max(end, begin)


def _add_readable(
    backend: Backend, options: Options, snapshot: TopicSnapshot, begin: int, end: int, builder: _PlanBuilder
) -> None:
    """Add the readable ranges, and count the seqs between them: deleted, never written, or lost at the source of a
    router."""
    at = begin

    def account_until(seq: int) -> None:
        nonlocal at
        stop = min(seq, end)
        if at < stop:
            counts, gaps = backend.account_missing(snapshot.topic, at, stop)
            builder.counts += counts
            for gap in gaps:
                if gap.first < stop and gap.last >= at:
                    clipped = replace(gap, first=max(gap.first, at), last=min(gap.last, stop - 1))
                    raise_on_gap(options, clipped)
                    builder.gaps.append(clipped)
        at = max(at, min(seq, end))

    account_until(snapshot.earliest_seq)
    for segment in snapshot.segments:
        if segment.stop <= at or at >= end:
            continue
        account_until(segment.base)
        stop = min(segment.stop, end)
        if at < stop:
            builder.add(snapshot, segment, at, stop)
            at = stop
    if at < end:
        builder.add(snapshot, None, at, end)


def _build_ranges(
    backend: Backend, options: Options, builder: _PlanBuilder, slices: Sequence[Slice], *, inline: bool
) -> list[ReadRange]:
    found = []
    for part in slices:
        snapshot, segment = builder.sources[part.range_index]
        read_range = ReadRange(snapshot.topic, snapshot.epoch, part.first, part.stop, part.size)
        if segment is not None:
            deleted: BoolArray | None = segment.load_deleted()
            if deleted is not None:
                deleted = deleted[part.first - segment.base : part.stop - segment.base]
            file = PlannedFile(segment.base, segment.stop, segment.size, segment.is_sealed, segment.generation)
            read_range = replace(read_range, file=file, deleted_bits=pack_mask(deleted))
        elif inline:
            records = backend.read_tail_inline(snapshot.topic, part.first, part.stop)
            if records is not None:
                for gap in records.gaps:
                    raise_on_gap(options, gap)
                builder.gaps += records.gaps
                read_range = replace(read_range, inline_records=records.arrow_stream, inline_counts=records.counts)
        found.append(read_range)
    return found
