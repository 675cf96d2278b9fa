"""An engine as its readers see it, page by page, and what no page may ever do (E5, E8, G5, G67, G70–G72)."""

from __future__ import annotations

from collections.abc import Collection

from tests.crash.topics.oracle import Row, TopicView, row

from tidelog.database import Database
from tidelog.engine import Engine, Page, Topic, TopicInfo

FIELDS = ("durability", "ttl_ms", "cap_records", "cap_bytes", "discard")


class RuleViolated(Exception):
    """The engine contradicts itself."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuleViolated(message)


def read_engine(
    log: Database | Engine, *, limit: int = 256, only: Collection[str] | None = None
) -> dict[str, TopicView]:
    """Every topic, read from the start in pages of `limit`. Of topics that are not among `only`, where that is given,
    only the figures: reading is what a sweep spends its time with."""
    found = {}
    for state in log.topics():
        name = state.topic
        read = only is None or name in only
        found[name] = read_topic(log.topic(name, create=False), limit=limit) if read else _topic_view(state, None)
    return found


def read_topic(topic: Topic, *, limit: int = 256) -> TopicView:
    rows: dict[int, Row] = {}
    cursor, pages, told = 0, 0, 0
    while True:
        floor = topic.evict_floor
        page = topic.read(cursor, limit)
        _check_page(topic, cursor, limit, page)
        _check_gap(topic.name, cursor, page, (floor, topic.evict_floor))
        if page.gap is not None:
            told += 1
            require(pages == 0, f"{topic.name}: a gap is told to a cursor that has read past it: {page.gap}")
        for record in page.records:
            rows[record.seq] = row(record.ts_ms, record.data, record.tag, record.node, record.meta)
        pages += 1
        cursor = page.next_from_seq
        if page.caught_up:
            break
        require(pages < 10_000, f"{topic.name}: reading never catches up, the cursor is {cursor}")
    state = topic.state()
    require(told == (state.evict_floor > 1), f"{topic.name}: {told} gaps were told, the floor is {state.evict_floor}")
    earliest = min(rows, default=state.head_seq + 1)
    require(state.earliest_seq == earliest, f"{topic.name}: earliest is {state.earliest_seq}, {earliest} can be read")
    require(state.count == len(rows), f"{topic.name}: count is {state.count}, {len(rows)} records can be read")
    size = sum(kept.size for kept in rows.values())
    require(state.bytes == size, f"{topic.name}: bytes is {state.bytes}, the records have {size}")
    return _topic_view(state, rows)


def _topic_view(state: TopicInfo, rows: dict[int, Row] | None) -> TopicView:
    require(
        1 <= state.evict_floor <= state.earliest_seq <= state.head_seq + 1,
        f"{state.topic}: the floors cross: {state}",
    )
    config = {name: getattr(state.config, name) for name in FIELDS}
    head, earliest, floor = state.head_seq, state.earliest_seq, state.evict_floor
    return TopicView(state.id, config, head, earliest, floor, state.count, state.bytes, rows)


def _check_page(topic: Topic, cursor: int, limit: int, page: Page) -> None:
    where = f"{topic.name} from {cursor}"
    seqs = [record.seq for record in page.records]
    require(seqs == sorted(set(seqs)), f"{where}: out of order: {seqs}")
    require(len(seqs) <= limit, f"{where}: {len(seqs)} records where {limit} were asked for")
    require(
        not seqs or (cursor < seqs[0] and seqs[-1] <= page.next_from_seq),
        f"{where}: {seqs} outside of ({cursor}, {page.next_from_seq}]",
    )
    require(
        cursor <= page.next_from_seq <= page.head_seq,
        f"{where}: the cursor goes to {page.next_from_seq}, the head is {page.head_seq}",
    )
    require(page.next_from_seq > cursor or page.caught_up, f"{where}: no step forward and not caught up")
    require(page.counts.rows == len(seqs), f"{where}: {page.counts.rows} rows are counted, {len(seqs)} are there")
    require(min(page.counts) >= 0, f"{where}: {page.counts}")
    require(
        sum(page.counts) == page.next_from_seq - cursor,
        f"{where}: {page.counts} do not add up to the {page.next_from_seq - cursor} seqs passed",
    )


def _check_gap(name: str, cursor: int, page: Page, floors: tuple[int, int]) -> None:
    """A gap is told exactly to a cursor below the floor. Reading may raise the floor, hence the one before and the one
    behind: where the disk fails, age shows itself a call later."""
    where = f"{name} from {cursor}, floor {floors}"
    require(any((page.gap is not None) == (cursor + 1 < floor) for floor in floors), f"{where}: gap {page.gap}")
    if page.gap is not None:
        told = (page.gap.gap_from, page.gap.gap_to, page.gap.head_seq)
        require(told in [(cursor + 1, floor - 1, page.head_seq) for floor in floors], f"{where}: gap {page.gap}")
        lost = page.counts.expired + page.counts.evicted
        require(lost <= max(floors) - 1 - cursor, f"{where}: {page.counts} has more lost than the gap {page.gap}")
