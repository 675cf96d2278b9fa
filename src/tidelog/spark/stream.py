"""The streaming side of the source. It keeps nothing that a restart would miss: offsets are Spark's to keep.

    Spark says                        we say
    offset                            {"orders": {"epoch": 7, "seq": 42}}, the seq to be read next
    latestOffset(start, limit)        asked of the topics every time, never counted from what was answered before
    commit(end), latestOffset(start)  the named group has passed it, where one is named
    prepareForTriggerAvailableNow     the ends of now are the ends of the query

A topic that was dropped and made again has another epoch: its seqs are other records, so what an offset of the old one
asks for is lost, and `onGap` says what happens then. One that came since by `subscribePattern` is read from its start.

Spark calls `commit(end)` of a batch when it has planned the next one, so never for the last one of a run. It plans from
an offset only when the batch before it is in its commit log: `latestOffset(start)` says that everything before `start`
is written, also at the end of AvailableNow, where it is asked once more and finds nothing. Where Spark plans nothing
for a while, or no more, `listener` moves the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tidelog.clock import Clock, SystemClock
from tidelog.spark import groups, offsets, places, plan
from tidelog.spark.offsets import Pending, Spot, Spots
from tidelog.spark.options import LATEST, Options
from tidelog.spark.place import Place, Sight
from tidelog.spark.plan import Range
from tidelog.spark.read import Reading
from tidelog.spark.stretches import Lost, Split


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType, *, clock: Clock | None = None) -> None:
        self._options, self._schema, self._clock = options, schema, clock or SystemClock()
        self._target: Spots | None = None  # where AvailableNow ends
        self._open: Place | None = None
        self._initial: Spots | None = None  # where the query began: nothing of it was processed
        self._told: Spots | None = None  # what the group was told last
        self._asked: Spots | None = None  # and what it was to be told

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}  # what is open stays here; an executor opens its own

    @property
    def _place(self) -> Place:
        """The place as it is now."""
        if self._open is None:
            self._open = places.of(self._options)
        else:
            self._open.refresh()
        return self._open

    def stop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    # ── where it stands ───────────────────────────────────────────────────────────────────────

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        place = self._place
        if self._options.group is not None:
            groups.of(place, "group", self._options.group).check()
        names = plan.topics(place, self._options)
        plan.check_named(self._options.start, "startingOffsets", names)
        plan.check_group(place, self._options.start, "startingOffsets", self._options, names)
        found = {}
        for name in names:
            sight = place.look(name)
            if sight is not None:
                seq = plan.start_of(place, self._options, sight, default=LATEST)
                found[name] = Spot(sight.epoch, seq)
        self._initial = dict(found)
        return offsets.to_spark(found)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return offsets.to_spark(_ends(self._seen(self._place)))

    def _seen(self, place: Place) -> dict[str, Sight]:
        """Every topic of the stream that is there now, looked at once."""
        names = plan.topics(place, self._options) if self._options.pattern else self._named(place)
        return {name: sight for name in names if (sight := place.look(name)) is not None}

    def _heads(self, seen: Mapping[str, Sight], start: Spots) -> Spots:
        """Where every topic ends now. One that is gone stays where it was left."""
        found = _ends(seen)
        for name, spot in start.items():
            if name not in found:
                here = Lost(name, spot.seq, spot.seq, "dropped", spot.seq, spot.seq - 1)
                plan.missed(self._options, here)
                found[name] = spot
        return found

    def _named(self, place: Place) -> list[str]:
        if self._options.codec != "tide":
            return plan.topics(place, self._options)
        there = set(place.names())
        return [name for name in self._options.subscribe if name in there]

    # ── how much of it ────────────────────────────────────────────────────────────────────────

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.rows_max is not None:
            return ReadMaxRows(options.rows_max)
        return ReadAllAvailable() if options.bytes_max is None else ReadMaxBytes(options.bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = _ends(self._seen(self._place))

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends: what is there, or as much of it as the limits allow."""
        place, begun = self._place, offsets.of_spark(start)
        self._tell(place, begun)
        seen = self._seen(place)
        ends = self._until(self._heads(seen, begun), begun)
        pending, spots = [], dict(ends)
        for name in sorted(ends):
            spot, end, sight = begun.get(name), ends[name], seen.get(name)
            if sight is None or sight.epoch != end.epoch:
                continue
            first = self._first(place, sight, spot)
            pending.append(Pending(name, min(first, end.seq), end.seq, sight.bytes_at))
        rows_max, bytes_max = self._limits(limit)
        if self._waits(place, pending):
            return offsets.to_spark({name: begun.get(name, spots[name]) for name in spots if name in begun})
        for name, seq in offsets.admit(pending, rows_max, bytes_max).items():
            spots[name] = Spot(ends[name].epoch, seq)
        return offsets.to_spark(spots)

    def _until(self, heads: Spots, begun: Spots) -> Spots:
        """The ends of now, or under AvailableNow those of when the query began; never before a start."""
        if self._target is None:
            return heads
        found: Spots = {}
        for name, head in heads.items():
            target, spot = self._target.get(name), begun.get(name)
            if target is not None and target.epoch == head.epoch:
                found[name] = min(head, max(target, spot) if spot is not None and spot.epoch == head.epoch else target)
            elif spot is not None:
                found[name] = spot
        return found

    def _first(self, place: Place, sight: Sight, spot: Spot | None) -> int:
        """The first seq of a topic that a batch from here could have: what is lost takes up no room in it."""
        if spot is None:
            return max(sight.first, sight.floor)
        if spot.epoch != sight.epoch:
            plan.missed(self._options, _recreated(place, sight, spot))
            return max(sight.first, sight.floor)
        return max(spot.seq, sight.floor)

    def _limits(self, limit: Any) -> tuple[int | None, int | None]:
        """Rows and bytes at most. Spark names one limit; a second one of ours holds beside it, unless it wants all."""
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        if isinstance(limit, ReadAllAvailable):
            return None, None
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        return rows_max, bytes_max

    def _waits(self, place: Place, pending: Sequence[Pending]) -> bool:
        """Whether too few records are there and none of them has waited for long."""
        least = self._options.rows_min
        waiting = [each for each in pending if each.seqs]
        if least is None or self._target is not None or not waiting or sum(each.seqs for each in waiting) >= least:
            return False
        before_ms = self._clock.now_us() // 1000 - self._options.delay_ms
        # The first record that is young enough: where that is the first one, all are.
        return all(place.seek(each.topic, max(before_ms + 1, 0)) <= each.first for each in waiting)

    # ── a batch ───────────────────────────────────────────────────────────────────────────────

    def partitions(self, start: Any, end: Any) -> Sequence[Split]:
        place, begun = self._place, offsets.of_spark(start)
        ranges = [self._range(place, name, begun.get(name), spot) for name, spot in offsets.of_spark(end).items()]
        return plan.splits(place, self._options, [each for each in ranges if each is not None], self._options.where)

    def _range(self, place: Place, name: str, start: Spot | None, end: Spot) -> Range | None:
        if start == end:
            return None
        sight = place.look(name)
        if sight is None or sight.epoch != end.epoch or end.seq > sight.next:
            first = start.seq if start is not None and start.epoch == end.epoch else 1
            cause = "dropped" if sight is None else "recreated"
            gone = sight or Sight(name, end.epoch, 1, end.seq, end.seq, end.seq, (), 0)
            lost = Lost(name, first, end.seq - 1, cause, gone.earliest, gone.next - 1)
            return Range(gone, first, end.seq, lost, void=True)
        if start is None:
            return Range(sight, max(sight.first, min(sight.floor, end.seq)), end.seq)
        if start.epoch != end.epoch:
            begin = max(sight.first, min(sight.floor, end.seq))
            return Range(sight, begin, end.seq, _recreated(place, sight, start))
        return Range(sight, start.seq, end.seq)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor, perhaps twice: the same split gives the same rows."""
        assert isinstance(partition, Split), "planned by this reader"
        with closing(places.of(self._options)) as place:
            yield from Reading(place, self._options, self._schema, self._options.where, partition).batches()

    def commit(self, end: Any) -> None:
        if self._options.group is not None:
            self._asked = None
            self._tell(self._place, offsets.of_spark(end))

    def _tell(self, place: Place, passed: Spots) -> None:
        """Move the group to what Spark has processed. Where that fails, the next batch tries again: Spark asks for
        offsets many times a second."""
        group = self._options.group
        if group is None or not passed or passed in (self._initial, self._told, self._asked):
            return
        self._asked = passed
        if groups.of(place, "group", group).commit(group, passed):
            self._told = passed


def _ends(seen: Mapping[str, Sight]) -> Spots:
    return {name: Spot(sight.epoch, sight.next) for name, sight in seen.items()}


def _recreated(place: Place, sight: Sight, start: Spot) -> Lost | None:
    """What a reader lost that stood at `start` of a topic that was dropped and made again: the seqs from there to the
    last one that the old topic had, which the ledger knows. None: it had read all of them."""
    last = place.dropped_at(sight.topic, start.epoch)
    if last is not None and last < start.seq:
        return None
    end = start.seq if last is None else last
    return Lost(sight.topic, start.seq, end, "recreated", sight.earliest, sight.next - 1, is_open=last is None)
