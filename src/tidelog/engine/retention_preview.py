"""What other caps or another TTL would evict, and which consumer groups have not read it. Nothing changes.

    configure(cap_records=…, cap_bytes=…)  ──► caps evict, as far as holds allow
    the next read, write or tick (ttl_ms)  ──► expiry evicts, as far as the holds that are left allow

The preview computes both floors in this order with the functions that retention itself uses, over the live index.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tidelog.engine.config import TopicConfig
from tidelog.engine.segment import SizeCount
from tidelog.engine.topic_index import find_broken_holds, limit_eviction
from tidelog.engine.topic_state import TopicState


class EvictedRange(NamedTuple):
    """Records that would be lost. Without records, `first_seq` is one past `last_seq` and there are no times."""

    records: int
    bytes: int
    first_seq: int
    last_seq: int  # included
    first_ms: int | None
    last_ms: int | None


class UnreadLoss(NamedTuple):
    """What a consumer group would lose unread."""

    group: str
    position: int
    records: int
    bytes: int
    hold_bytes: int
    hold_breaks: bool  # its hold is too small to keep them


class RetentionPreview(NamedTuple):
    """What a change of retention would do now."""

    topic: str
    config: TopicConfig  # as it would be
    cap: EvictedRange  # lost to the caps
    ttl: EvictedRange  # lost to age, of what the caps leave
    evict_floor: int  # afterwards
    remaining: SizeCount
    groups: tuple[UnreadLoss, ...]  # those that would lose something, by name
    held_by: tuple[str, ...]  # groups whose holds keep records that caps or age would evict

    @property
    def records(self) -> int:
        return self.cap.records + self.ttl.records

    @property
    def bytes(self) -> int:
        return self.cap.bytes + self.ttl.bytes


def preview_retention(
    topic: TopicState, *, cap_records: int | None = None, cap_bytes: int | None = None, ttl_ms: int | None = None
) -> RetentionPreview:
    """Return what `configure` with these limits would evict; None: as configured. Raises BadInput for limits that a
    config refuses, and Corrupt where records cannot be measured."""
    given = {"cap_records": cap_records, "cap_bytes": cap_bytes, "ttl_ms": ttl_ms}
    fields = {name: value for name, value in given.items() if value is not None}
    with topic.lock:
        topic.check_open()
        config = replace(topic.config, **fields)  # type: ignore[arg-type]
        index, start = topic.index, topic.index.evict_floor
        wanted = index.floor_for_caps(config.cap_records, config.cap_bytes)
        cap_floor = max(_limit(topic, wanted, start), start)
        by_age = index.floor_for_age(topic.context.now_ms() - config.ttl_ms) if config.ttl_ms else 0
        floor = max(_limit(topic, by_age, cap_floor) if by_age > cap_floor else by_age, cap_floor)
        cap, ttl = _evicted(topic, start, cap_floor), _evicted(topic, cap_floor, floor)
        broken = {*find_broken_holds(topic.groups, start, floor)} if topic.had_retention_hold else set()
        losses = []
        for name, cursor in sorted(topic.groups.items()):
            unread = index.measure(max(cursor.seq + 1, index.earliest), floor)
            if unread.records or name in broken:
                losses.append(UnreadLoss(name, cursor.seq, *unread, cursor.hold_bytes, name in broken))
        held_by = tuple(
            name
            for name, cursor in sorted(topic.groups.items())
            if cursor.hold_bytes and floor <= cursor.seq + 1 < max(wanted, by_age) and name not in broken
        )
        left = SizeCount(index.count - cap.records - ttl.records, index.bytes - cap.bytes - ttl.bytes)
        return RetentionPreview(topic.name, config, cap, ttl, floor, left, (*losses,), held_by)


def _limit(topic: TopicState, floor: int, evict_floor: int) -> int:
    """Return how far holds let the floor rise. With the topic's lock held."""
    if not floor or not topic.had_retention_hold or not topic.evicts_oldest:
        return floor
    return limit_eviction(topic.index, topic.groups.values(), floor, evict_floor)


def _evicted(topic: TopicState, start: int, floor: int) -> EvictedRange:
    """Describe the records of [start, floor). With the topic's lock held."""
    index = topic.index
    first = max(start, index.earliest)
    size = index.measure(first, floor)
    if not size.records:
        return EvictedRange(0, 0, first, first - 1, None, None)
    times = [
        (int(part.entries()["ts"][lo - part.base]), int(part.entries()["ts"][hi - 1 - part.base]))
        for part, lo, hi in index.slices(first, floor)
    ]
    return EvictedRange(*size, first, floor - 1, times[0][0], times[-1][1])
