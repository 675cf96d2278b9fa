"""Plan a read on the driver: from ranges of seqs to tasks, from one snapshot.

    range     [first ······ floor ······ earliest ── seg ── seg ──  ── seg ── tail ── stop)
               └ lost: a gap  └ deleted: counted                 └ never written: counted

Every seq of the range is accounted for once: in a range of a task, or in the counts of the first task. Evicted and
expired records raise GapFound here, before anything is read, unless gaps are emitted or skipped. Conditions on topic,
seq and ts narrow the range first; the rest is counted as filtered.

All bytes to read are concatenated and split at equal distances:

    topic a                       topic b            tail
    ├────────┬────────┬───┬───────┼──┬──┬──┬──┬──┬───┼────┤        segments: large ones are split, small ones packed
    ╎            ╎           ╎           ╎           ╎    ╎        splits

The cost does not depend on the history: sizes are those of the manifest, and a split inside a segment is a seq in
proportion to its bytes. The two tasks beside it read the frame that it divides, each with one ranged read.

So one topic uses all cores as evenly as many topics do, and rows stay in order inside a task. The number of tasks
follows `splitBytes` and is at least `minPartitions`; by default it is at least the number of processors, unless a task
would read less than `MIN_TASK_BYTES`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tidelog.disk.process import processor_count
from tidelog.engine import Counts
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.spark.backends.directory import INLINE_TAIL_BYTES_MAX
from tidelog.spark.backends.interface import (
    Backend,
    ReadRange,
    ReadTask,
    SegmentRun,
    Segments,
    TopicGap,
    TopicSnapshot,
    no_segments,
    pack_mask,
)
from tidelog.spark.filters import Bounds, RecordFilter
from tidelog.spark.groups import group_store
from tidelog.spark.options import EARLIEST, LATEST, Bound, Options
from tidelog.types import Ints

MIN_TASK_BYTES: Final = 1 << 20
PLANNED_DELETIONS_MAX: Final = 256  # segments with deleted records whose deletions are read for the plan


@dataclass(frozen=True, slots=True, eq=False)
class SizedRange:
    """A range of seqs in pieces: segments, or a tail. Inside a piece bytes are in proportion to seqs."""

    bounds: Ints  # the first seq of each piece, and the end
    offsets: Ints  # the bytes before each of them

    @property
    def first(self) -> int:
        return int(self.bounds[0])

    @property
    def stop(self) -> int:
        return int(self.bounds[-1])

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def offset_of(self, seq: int) -> int:
        at = max(int(np.searchsorted(self.bounds, seq, "right")) - 1, 0)
        if at >= len(self.bounds) - 1:
            return self.size
        first, stop = int(self.bounds[at]), int(self.bounds[at + 1])
        low, high = int(self.offsets[at]), int(self.offsets[at + 1])
        return low + (high - low) * (seq - first) // (stop - first)

    def seq_near(self, offset: int, small_bytes: int) -> int:
        """Return the seq nearest to a byte. A piece smaller than `small_bytes` is not divided: two tasks would open
        it."""
        at = min(max(int(np.searchsorted(self.offsets, offset, "right")) - 1, 0), len(self.bounds) - 2)
        first, stop = int(self.bounds[at]), int(self.bounds[at + 1])
        low, high = int(self.offsets[at]), int(self.offsets[at + 1])
        if high - low < small_bytes or high == low:
            return first if offset - low <= high - offset else stop
        return first + ((stop - first) * (offset - low) + (high - low) // 2) // (high - low)


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
    marks = deque(total * number // count for number in range(1, count))
    small_bytes = total // count // 4
    parts: list[list[Slice]] = [[]]
    before = 0
    for number, (sized_range, size) in enumerate(zip(ranges, sizes, strict=True)):
        first, low = sized_range.first, 0
        while marks and marks[0] <= before + size:
            stop = sized_range.seq_near(marks.popleft() - before, small_bytes)
            if stop > first:
                high = sized_range.offset_of(stop)
                parts[-1].append(Slice(number, first, stop, high - low))
                first, low = stop, high
            if parts[-1]:
                parts.append([])
        if first < sized_range.stop:
            parts[-1].append(Slice(number, first, sized_range.stop, size - low))
        before += size
    return [part for part in parts if part]


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


class _Source(NamedTuple):
    snapshot: TopicSnapshot
    segments: Segments | None  # None: the tail
    lo: int = 0  # its segments: [lo, hi)
    hi: int = 0


@dataclass(slots=True)
class _PlanBuilder:
    ranges: list[SizedRange] = field(default_factory=list)
    sources: list[_Source] = field(default_factory=list)
    gaps: list[TopicGap] = field(default_factory=list)
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers

    def add_segments(
        self, snapshot: TopicSnapshot, segments: Segments, lo: int, hi: int, first: int, stop: int
    ) -> None:
        """Add seqs [first, stop) of the adjacent segments [lo, hi)."""
        table = segments.table
        bounds = np.append(table.base[lo:hi], table.stop[hi - 1])
        sizes = table.size[lo:hi].copy()
        bounds[0], bounds[-1] = first, stop
        for at, index in {0: lo, hi - lo - 1: hi - 1}.items():  # the first and the last may be cut
            seqs = int(bounds[at + 1] - bounds[at])
            sizes[at] = int(table.size[index]) * seqs // int(table.stop[index] - table.base[index])
        self.ranges.append(SizedRange(bounds, np.append(0, np.cumsum(sizes))))
        self.sources.append(_Source(snapshot, segments, lo, hi))

    def add_tail(self, snapshot: TopicSnapshot, first: int, stop: int) -> None:
        seqs = max(snapshot.next_seq - snapshot.tail_first_seq, 1)
        size = snapshot.tail_bytes * (stop - first) // seqs
        self.ranges.append(SizedRange(np.array([first, stop]), np.array([0, size])))
        self.sources.append(_Source(snapshot, None))

    @property
    def tail_size(self) -> int:
        return sum(
            sized_range.size
            for sized_range, source in zip(self.ranges, self.sources, strict=True)
            if source.segments is None
        )


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
    deletions = _Deletions(builder)
    is_inline = builder.tail_size <= INLINE_TAIL_BYTES_MAX
    tasks = []
    for slices in split_ranges(builder.ranges, count):
        parts = tuple(_build_part(backend, options, builder, deletions, part, inline=is_inline) for part in slices)
        tasks.append(ReadTask(parts, seq_count=sum(part.seq_count for part in parts)))
    first = tasks[0] if tasks else ReadTask()
    first_task = replace(
        first, gaps=tuple(builder.gaps), counts=builder.counts, seq_count=first.seq_count + sum(builder.counts)
    )
    return [first_task, *tasks[1:]]


class PlannedCounts(NamedTuple):
    """What becomes of the seqs of a plan, before filters."""

    seqs: int
    rows: int  # at most, if anything is unknown
    deleted: int
    evicted: int
    expired: int
    holes: int
    filtered: int  # outside of the bounds of a filter
    unknown: int  # deletions and seqs whose records only the tasks read


def count_planned(tasks: Sequence[ReadTask]) -> PlannedCounts:
    """Account for the seqs of a plan with what the plan knows."""
    counts, seqs, unknown = Counts(), 0, 0
    for task in tasks:
        seqs, counts = seqs + task.seq_count, counts + task.counts
        for part in task.parts:
            if isinstance(part, SegmentRun):
                unknown += part.unread_count()
                counts += Counts(deleted=part.deleted_count())
            elif part.inline_counts is not None:
                counts += part.inline_counts
            else:
                unknown += part.seq_count
    rows = seqs - sum(counts._replace(rows=0))
    return PlannedCounts(
        seqs, rows, counts.deleted, counts.evicted, counts.expired, counts.holes, counts.filtered, unknown
    )


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
    segments = snapshot.list_segments(at, end) if at < min(end, snapshot.tail_first_seq) else no_segments(at, end)
    table = segments.table
    lo = int(np.searchsorted(table.stop, at, "right"))
    hi = int(np.searchsorted(table.base, end))
    holes = np.flatnonzero(table.base[lo + 1 : hi] != table.stop[lo : hi - 1]) + lo + 1 if hi > lo else ()
    for run_lo, run_hi in pairwise([lo, *(int(each) for each in holes), hi] if hi > lo else ()):
        account_until(int(table.base[run_lo]))
        stop = min(int(table.stop[run_hi - 1]), end)
        if at < stop:
            builder.add_segments(snapshot, segments, run_lo, run_hi, at, stop)
            at = stop
    if at < end:
        builder.add_tail(snapshot, at, end)


class _Deletions:
    """The deletions of planned segments: part of the plan, or left to the tasks if too many segments have some."""

    def __init__(self, builder: _PlanBuilder) -> None:
        self._counts: dict[int, Ints] = {}  # by source, of its whole table
        marked = 0
        for source in builder.sources:
            if source.segments is not None and id(source.segments) not in self._counts:
                table = source.segments.table
                self._counts[id(source.segments)] = counts = table.stop - table.base - table.live
                marked += int((counts > 0).sum())
        self._is_planned = marked <= PLANNED_DELETIONS_MAX

    def plan(
        self, segments: Segments, lo: int, hi: int, first: int, stop: int
    ) -> tuple[Ints, tuple[tuple[int, bytes], ...]]:
        """Return for segments [lo, hi) how many deletions their tasks have to read, and the deletions of seqs
        [first, stop) that the plan has."""
        unread = self._counts[id(segments)][lo:hi].copy()
        marked = set(np.flatnonzero(unread).tolist()) if self._is_planned else set()
        found: list[tuple[int, bytes]] = []
        for at in sorted(marked | {index - lo for index in segments.must_plan if lo <= index < hi}):
            with suppress(NotFound):  # the file is gone: the task looks for the records elsewhere
                deleted = segments.load_deleted(lo + at)
                unread[at] = 0
                if deleted is not None:
                    base, end = int(segments.table.base[lo + at]), int(segments.table.stop[lo + at])
                    bits = pack_mask(deleted[max(first, base) - base : min(stop, end) - base])
                    found += [] if bits is None else [(at, bits)]
        return unread, tuple(found)


def _build_part(
    backend: Backend, options: Options, builder: _PlanBuilder, deletions: _Deletions, part: Slice, *, inline: bool
) -> ReadRange | SegmentRun:
    snapshot, segments, lo, hi = builder.sources[part.range_index]
    if segments is not None:
        lo += int(np.searchsorted(segments.table.stop[lo:hi], part.first, "right"))
        hi = lo + int(np.searchsorted(segments.table.base[lo:hi], part.stop))
        unread, bits = deletions.plan(segments, lo, hi, part.first, part.stop)
        run = SegmentRun.pack(snapshot, segments.table.slice(lo, hi), unread, part.first, part.stop, part.size)
        return replace(run, deleted_bits=bits)
    read_range = ReadRange(snapshot.topic, snapshot.epoch, part.first, part.stop, part.size)
    records = backend.read_tail_inline(snapshot.topic, part.first, part.stop) if inline else None
    if records is None:
        return read_range
    for gap in records.gaps:
        raise_on_gap(options, gap)
    builder.gaps += records.gaps
    return replace(read_range, inline_records=records.arrow_stream, inline_counts=records.counts)
