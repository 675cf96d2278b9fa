"""What a page promises: the contract's sections 2.2, 2.6, 3.4, 3.5, and E8, G5, G67, G70, G72."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.harness import (
    CLASSES,
    RESTARTS,
    TINY,
    EngineHarness,
    Restart,
    check_page,
    read_topic,
    size_of,
)

from tidelog.engine import Counts, Gap, Record, Topic
from tidelog.errors import DiskFull


def topic_with_parts(world: EngineHarness, many: int = 60, **config: Any) -> Topic:
    """A topic whose records lie in sealed segments, in one that grows, and in memory only."""
    topic = world.log.topic("a", **{"durability": "fsync", **config})
    random = Random(many)
    written = 0
    while written < many:
        count = min(random.choice([1, 1, 2, 3, 5, 9]), many - written)
        numbers = range(written + 1, written + count + 1)
        topic.append(
            [b"%d" % number * random.randint(1, 9) if number % 3 else {"n": number} for number in numbers],
            node=[("n1", "n2", None)[number % 3] for number in numbers],
            tag=[f"t{number % 4}" for number in numbers],
            meta=[{"m": number} if number % 5 == 0 else None for number in numbers],
        )
        written += count
        world.clock.tick(1)
        if written - count < many // 2 <= written or written - count < many * 3 // 4 <= written:
            world.log.checkpoint()
    return topic


def paged(topic: Topic, from_seq: int = 0, limit: int = 256, **said: Any) -> list[Record]:
    """All records after a cursor, page by page."""
    records: list[Record] = []
    while True:
        page = topic.read(from_seq, limit, **said)
        check_page(page, from_seq)
        assert len(page.records) <= limit
        records += page.records
        assert page.next_from_seq > from_seq or page.caught_up
        from_seq = page.next_from_seq
        if page.caught_up:
            return records


# Cursors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_new_topic_is_empty_and_says_so(durability: str) -> None:
    """Contract 2.2, 2.6."""
    topic = EngineHarness().log.topic("a", durability=durability)
    state = topic.state()
    assert (state.head_seq, state.earliest_seq, state.next_seq, state.count, state.bytes) == (0, 1, 1, 0, 0)
    assert state.last_write_ms is None
    page = topic.read()
    assert (page.records, page.gap, page.next_from_seq, page.head_seq, page.earliest_seq) == ([], None, 0, 0, 1)
    assert (page.caught_up, page.lag, page.counts) == (True, 0, Counts())


@pytest.mark.parametrize("durability", CLASSES)
def test_a_cursor_is_the_last_seq_that_was_read(durability: str) -> None:
    """Contract 2.6: `from_seq` is exclusive."""
    topic = EngineHarness(**TINY).log.topic("a", durability=durability)
    topic.append(list(range(1, 11)))
    for cursor in range(11):
        page = topic.read(cursor)
        assert [record.seq for record in page.records] == list(range(cursor + 1, 11))
        assert (page.next_from_seq, page.caught_up, page.lag, page.gap) == (10, True, 0, None)


def test_a_page_ends_at_its_limit_and_reports_its_lag() -> None:
    """Contract 2.6: the limit is 256 where none is given."""
    topic = EngineHarness().log.topic("a")
    topic.append(list(range(600)))
    page = topic.read()
    assert (len(page.records), page.next_from_seq, page.caught_up, page.lag) == (256, 256, False, 344)
    page = topic.read(256, 344)
    assert (len(page.records), page.caught_up, page.lag) == (344, True, 0)
    page = topic.read(599, 1)
    assert ([record.seq for record in page.records], page.caught_up) == ([600], True)


def test_a_cursor_ahead_of_the_head_belongs_to_an_earlier_topic() -> None:
    """Contract 3.4: the gap is all of this one, and records resume at the earliest."""
    log = EngineHarness().log
    topic = log.topic("a")
    assert topic.read(5).gap == Gap(1, 0, "recreated", 1, 1, 0)
    topic.append([1, 2, 3])
    topic.delete(seqs=[1])
    page = topic.read(5)
    check_page(page, 5)
    assert page.gap == Gap(1, 3, "recreated", 3, 2, 3)
    assert [record.seq for record in page.records] == [2, 3]
    assert topic.read(3).gap is None, "at the head is not ahead of it"


# Paging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 63, 64, 65, 1000])
def test_pages_of_any_size_make_the_same_whole(limit: int) -> None:
    """Contract 2.6: sealed, growing and in memory; the borders between them do not matter."""
    world = EngineHarness(**TINY)
    topic = topic_with_parts(world)
    at_once = topic.read(0, 1000).records
    assert [record.seq for record in at_once] == list(range(1, 61))
    assert paged(topic, 0, limit) == at_once
    for cursor in range(61):
        assert topic.read(cursor, limit).records == at_once[cursor : cursor + limit]


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_page_is_the_same_wherever_its_records_lie(restart: Restart) -> None:
    """G5: in memory, in segments, and after a restart."""
    world = EngineHarness(**TINY)
    topic = topic_with_parts(world)
    before = read_topic(topic)
    world.log.checkpoint()
    assert read_topic(topic) == before
    again = world.restart(restart).topic("a")
    assert read_topic(again, 7) == before


@pytest.mark.parametrize("budget", [1, 10, 11, 29, 30, 31, 100, 1 << 20])
def test_a_budget_of_bytes_is_kept_and_the_first_record_comes_in_any_case(budget: int) -> None:
    """Contract 3.4: a record that does not fit any more is left for the next page."""
    topic = EngineHarness().log.topic("a")
    topic.append([b"x" * 10, b"y" * 20, b"z" * 30, b"w" * 10])
    for cursor, sizes in ((0, [10, 20, 30, 10]), (1, [20, 30, 10]), (2, [30, 10])):
        page = topic.read(cursor, bytes_max=budget)
        check_page(page, cursor)
        fits = [count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) <= budget]
        assert len(page.records) == max(fits, default=1)
        assert page.next_from_seq == cursor + len(page.records)


@pytest.mark.parametrize("budget", [1, 10, 25, 60, 150, 151, 1000])
def test_a_budget_is_kept_across_segments_and_blocks(budget: int) -> None:
    """Contract 3.4: `if out non-empty and bytes+rec.bytes > budget: break`, wherever the next record is."""
    world = EngineHarness(**TINY)
    topic = topic_with_parts(world)
    at_once = topic.read(0, 1000).records
    records: list[Record] = []
    while len(records) < 60:
        page = topic.read(len(records), 1000, bytes_max=budget)
        check_page(page, len(records))
        rest = at_once[len(records) :]
        fits = [count for count in range(1, len(rest) + 1) if sum(map(size_of, rest[:count])) <= budget]
        assert page.records == rest[: max(fits, default=1)]
        records += page.records
    assert records == at_once


def test_meta_counts_in_a_budget() -> None:
    """Contract 1.12: bytes are those of data and meta."""
    topic = EngineHarness().log.topic("a")
    topic.append([b"x" * 10, b"y" * 10], meta=[None, {"k": "v"}])
    assert len(topic.read(bytes_max=28).records) == 1
    assert len(topic.read(bytes_max=29).records) == 2


def test_ten_thousand_records_in_many_segments_are_found_one_by_one() -> None:
    """G67: entry i of an index locates seq first + i."""
    world = EngineHarness(segment_events_max=97, segment_bytes_max=1 << 20, wal_file_bytes=1 << 20)
    topic = world.log.topic("a", durability="disk")
    random = Random(7)
    expected: list[Any] = []
    while len(expected) < 10_000:
        many = min(random.choice([1, 2, 96, 97, 98, 400]), 10_000 - len(expected))
        batch = [b"%d" % number for number in range(len(expected), len(expected) + many)]
        if random.random() < 0.3:
            batch = [int(data) for data in batch]  # type: ignore[misc]
        topic.append(batch)
        expected += batch
        if random.random() < 0.05:
            world.log.checkpoint()
    for log in (world.log, world.reader(), world.restart("kill")):
        found = log.topic("a")
        assert [record.data for record in paged(found, 0, 1000)] == expected
        for cursor in [*random.sample(range(10_000), 200), *range(0, 9_999, 97), *range(96, 9_999, 97)]:
            page = found.read(cursor, 2)
            assert [(record.seq, record.data) for record in page.records] == [
                (seq, expected[seq - 1]) for seq in range(cursor + 1, min(cursor + 3, 10_001))
            ]


def test_a_page_shows_one_moment() -> None:
    """What is written while a page is made is in the next one."""
    topic = EngineHarness().log.topic("a")
    topic.append([1, 2])
    page = topic.read()
    topic.append(3)
    assert (page.head_seq, page.caught_up, len(page.records)) == (2, True, 2)
    assert [record.data for record in topic.read(page.next_from_seq).records] == [3]


# Nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "hidden"),
    [(None, ()), ("n1", ("n1",)), (["n1"], ("n1",)), (("n1", "n2"), ("n1", "n2")), ("n", ()), ("N1", ()), ([], ())],
)
def test_a_reader_does_not_get_back_what_its_own_node_wrote(node: Any, hidden: tuple[str, ...]) -> None:
    """Contract 3.5: exact, silent, and records without a node always pass."""
    world = EngineHarness(**TINY)
    topic = topic_with_parts(world)
    everything = topic.read(0, 1000).records
    expected = [record for record in everything if record.node not in hidden]
    page = topic.read(0, 1000, node=node)
    check_page(page, 0)
    assert page.records == expected
    assert (page.counts.filtered, page.gap) == (60 - len(expected), None)
    assert paged(topic, 0, 3, node=node) == expected


def test_a_page_of_nothing_but_own_records_is_empty_and_moves_on() -> None:
    """Contract 3.4: skipped records advance the cursor."""
    topic = EngineHarness().log.topic("a")
    topic.append([1, 2, 3], node="me")
    page = topic.read(node="me")
    assert (page.records, page.caught_up, page.next_from_seq, page.counts) == ([], True, 3, Counts(filtered=3))


def test_filtered_records_count_for_neither_limit_nor_budget() -> None:
    """Contract 3.4."""
    topic = EngineHarness().log.topic("a")
    topic.append([b"x" * 50] * 100, node="me")
    topic.append([b"y", b"z"], node="you")
    page = topic.read(0, 2, node="me", bytes_max=2)
    check_page(page, 0)
    assert [record.data for record in page.records] == [b"y", b"z"]
    assert (page.counts.filtered, page.counts.rows) == (100, 2)


def test_a_topic_may_ask_for_no_filter() -> None:
    """Contract 1.13: `dedupe_node:false` leaves the filter out."""
    world = EngineHarness()
    topic = world.log.topic("a", dedupe_node=False)
    topic.append([1, 2], node="me")
    assert [record.data for record in topic.read(node="me").records] == [1, 2]
    world.log.topic("a", dedupe_node=True)
    assert topic.read(node="me").records == []


# What is not there --------------------------------------------------------------------------------------


def test_a_hole_is_passed_in_silence_and_counted() -> None:
    """E8: a batch that failed leaves seqs that no record ever had."""
    world = EngineHarness()
    topic = world.log.topic("a")
    topic.append([1, 2])
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        topic.append([3, 4, 5])
    first = topic.append(6).first_seq
    assert first == 6, "the seqs of the failed batch are not given again"
    for cursor, holes in ((0, 3), (2, 3), (3, 2), (5, 0)):
        page = topic.read(cursor)
        check_page(page, cursor)
        assert (page.counts.holes, page.counts.deleted, page.gap) == (holes, 0, None)
        assert page.records[-1].seq == 6
    assert [record.seq for record in topic.read(0, 2).records] == [1, 2]
    page = topic.read(2, 1)
    assert (page.next_from_seq, [record.seq for record in page.records]) == (6, [6])


@pytest.mark.parametrize("left", ["one record", "nothing"])
def test_what_a_power_cut_took_is_a_hole_and_never_called_deleted(left: str) -> None:
    """E8, decision 0008: readers pass over reserved seqs in silence, and the counts say how many. Only seq 1 was ever
    deleted here, if at all."""
    world = EngineHarness(head_reserve=10)
    topic = world.log.topic("a", durability="disk")
    topic.append(1)
    if left == "nothing":
        topic.delete(seqs=[1])
    world.log.tick()
    topic.append([2, 3])
    found = world.crash("none").topic("a")
    assert found.head_seq == 11, "ten were reserved after the first"
    page = found.read(1)
    check_page(page, 1)
    assert (page.records, page.gap, page.counts) == ([], None, Counts(holes=10))


def test_deletes_are_counted_where_they_lie() -> None:
    """E8, G72."""
    world = EngineHarness(**TINY)
    topic = topic_with_parts(world)
    topic.delete(seqs=[1, 2, 10, 11, 12, 40, 59])
    page = topic.read(0, 1000)
    check_page(page, 0)
    assert (page.counts, page.gap) == (Counts(rows=53, deleted=7), None)
    page = topic.read(9, 1)
    assert ([record.seq for record in page.records], page.counts) == ([13], Counts(rows=1, deleted=3))
    page = topic.read(58)
    assert ([record.seq for record in page.records], page.counts) == ([60], Counts(rows=1, deleted=1))


@pytest.mark.parametrize("later", ["checkpoint", *RESTARTS])
def test_where_the_seqs_of_a_range_went_does_not_change_with_time(later: Any) -> None:
    """E8: what was deleted stays counted as deleted when its segment is gone."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(1, 17):
        topic.append(number)
    topic.delete(seqs=[6, *range(9, 13), 15])  # 9 to 12 are a whole segment
    before = topic.read().counts
    assert before == Counts(rows=10, deleted=6)
    world.log.checkpoint()
    if later != "checkpoint":
        world.restart(later)
    assert world.log.topic("a").read().counts == before


# Any history --------------------------------------------------------------------------------------------

NODES = ("n1", "n2", None)


class Held(NamedTuple):
    ts_ms: int
    size: int
    node: str | None
    tag: str


class Model:
    """A topic as a dict."""

    def __init__(self) -> None:
        self.rows: dict[int, Held] = {}
        self.head, self.floor, self.cap, self.ttl = 0, 1, 0, 0

    def retain(self, now_ms: int) -> None:
        for seq in sorted(self.rows):
            expired = self.ttl and now_ms - self.rows[seq].ts_ms > self.ttl
            if not expired and not (self.cap and len(self.rows) > self.cap):
                return
            del self.rows[seq]
            self.floor = seq + 1


verbs = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6), st.integers(0, 2)),
    st.tuples(st.just("append"), st.integers(1, 6), st.integers(0, 2)),
    st.tuples(st.just("fail"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("seqs"), st.integers(1, 40), st.integers(1, 5)),
    st.tuples(st.just("before"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("tag"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("cap"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("ttl"), st.sampled_from([0, 5, 20]), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("checkpoint"), st.just(0), st.just(0)),
    st.tuples(st.just("seal"), st.just(0), st.just(0)),
    st.tuples(st.just("restart"), st.integers(0, 2), st.just(0)),
)


def erase(topic: Topic, model: Model, meant: Callable[[int, Held], bool], **said: Any) -> None:
    gone = [seq for seq, held in model.rows.items() if meant(seq, held)]
    assert topic.delete(**said).deleted == len(gone)
    for seq in gone:
        del model.rows[seq]


def play(world: EngineHarness, model: Model, verb: str, a: int, b: int) -> None:
    """Do one thing to the topic and to its model."""
    topic = world.log.topic("a")
    now_ms = world.clock.now_us() // 1000
    model.retain(now_ms)
    if verb in ("append", "fail"):
        tags = [f"t{(model.head + number) % 4}" for number in range(a)]
        if verb == "fail":  # the first write fails: this one, or that of a floor, which is written again in the reserve
            world.disk.fail("write", error=errno.ENOSPC)
        try:
            done = topic.append([b"x" * (number + 1) for number in range(a)], node=NODES[b], tag=tags)
        except DiskFull:
            assert verb == "fail"
            return
        assert done.first_seq > model.head
        for number, seq in enumerate(done.seqs):
            model.rows[seq] = Held(now_ms, number + 1, NODES[b], tags[number])
        model.head = done.last_seq
    elif verb == "seqs":
        erase(topic, model, lambda seq, _: a <= seq < a + b, seqs=list(range(a, a + b)))
    elif verb == "before":
        erase(topic, model, lambda seq, _: seq < a, before_seq=a)
    elif verb == "tag":
        erase(topic, model, lambda _, held: held.tag == f"t{a}", match=f"t{a}")
    elif verb == "cap":
        model.cap = a
        world.log.topic("a", cap_records=a)
    elif verb == "ttl":
        model.ttl = a
        world.log.topic("a", ttl_ms=a)
    elif verb == "wait":
        world.clock.tick(a)
    elif verb == "checkpoint":
        world.log.checkpoint()
    elif verb == "seal":
        topic.seal()
    else:
        world.restart(RESTARTS[a])
    model.retain(world.clock.now_us() // 1000)


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(
    st.lists(verbs, min_size=1, max_size=18),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 9), st.integers(1, 30), st.sampled_from([None, "n1", ["n1", "n2"]])),
        min_size=1,
        max_size=4,
    ),
)
def test_every_page_of_every_history_accounts_for_every_seq(
    history: list[tuple[str, int, int]], looks: list[tuple[float, int, int, Any]]
) -> None:
    """E8, G70, G72. Method: any history on a topic of class `fsync`; after each step pages from anywhere, of any size
    and for any node: rows and filtered are what the model has there, one gap up to the model's floor or none, and
    going on page by page makes the same as one large page."""
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync")
    model = Model()
    for verb, a, b in history:
        play(world, model, verb, a, b)
        topic = world.log.topic("a")
        for at, limit, budget, node in looks:
            cursor = int(at * topic.head_seq)
            page = topic.read(cursor, limit, bytes_max=budget, node=node)
            check_page(page, cursor)
            inside = [seq for seq in sorted(model.rows) if cursor < seq <= page.next_from_seq]
            hidden = {node} if isinstance(node, str) else set(node or ())
            shown = [seq for seq in inside if model.rows[seq].node not in hidden]
            assert [record.seq for record in page.records] == shown
            assert page.counts.filtered == len(inside) - len(shown)
            assert (page.gap is not None) == (cursor + 1 < model.floor)
            assert page.gap is None or page.gap.gap_to == model.floor - 1
            assert len(shown) <= limit
            everything = [seq for seq in sorted(model.rows) if seq > cursor and model.rows[seq].node not in hidden]
            assert [record.seq for record in paged(topic, cursor, limit, node=node)] == everything
        assert read_topic(topic).seqs == sorted(model.rows)
