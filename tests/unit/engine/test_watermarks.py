"""The read rules of a topic's two floors: tables of cases, and the contract's own algorithm as the oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.engine.topic_index import (
    Gap,
    ReadStart,
    Watermarks,
    find_gap,
    find_read_start,
    next_trimmed_range,
)

quick = settings(max_examples=300, deadline=None, database=None)


class Case(NamedTuple):
    name: str
    from_seq: int
    head: int
    earliest: int
    marks: Watermarks
    gap: Gap | None
    cursor: int


NONE = Watermarks()
CASES = [
    Case("a new topic", 0, 0, 1, NONE, None, 0),
    Case("nothing was lost", 0, 9, 1, NONE, None, 0),
    Case("at the head", 9, 9, 1, NONE, None, 9),
    Case("at the head of a topic that lost everything", 9, 9, 10, Watermarks(ttl=9), None, 9),
    Case("cap, from the start", 0, 6, 4, Watermarks(cap=3), Gap(1, 3, "cap", 3, 4, 6), 3),
    Case("cap, from the middle", 2, 6, 4, Watermarks(cap=3), Gap(3, 3, "cap", 1, 4, 6), 3),
    Case("cap, just passed", 3, 6, 4, Watermarks(cap=3), None, 3),
    Case("ttl", 1, 6, 5, Watermarks(ttl=4), Gap(2, 4, "ttl", 3, 5, 6), 4),
    Case("ttl, everything", 0, 6, 7, Watermarks(ttl=6), Gap(1, 6, "ttl", 6, 7, 6), 6),
    Case("both reach into what was missed", 0, 9, 6, Watermarks(cap=2, ttl=5), Gap(1, 5, "mixed", 5, 6, 9), 5),
    Case("the lower mark was passed: ttl is left", 2, 9, 6, Watermarks(cap=2, ttl=5), Gap(3, 5, "ttl", 3, 6, 9), 5),
    Case("the lower mark was passed: cap is left", 2, 9, 6, Watermarks(cap=5, ttl=2), Gap(3, 5, "cap", 3, 6, 9), 5),
    Case("the lower mark is the next seq", 1, 9, 6, Watermarks(cap=2, ttl=5), Gap(2, 5, "mixed", 4, 6, 9), 5),
    Case("at the source", 0, 6, 4, Watermarks(source=3), Gap(1, 3, "source_trim", 3, 4, 6), 3),
    Case("at the source and by cap", 0, 9, 6, Watermarks(cap=2, source=5), Gap(1, 5, "cap", 5, 6, 9), 5),
    Case(
        "the cap was passed: the source is left",
        2,
        9,
        6,
        Watermarks(ttl=2, source=5),
        Gap(3, 5, "source_trim", 3, 6, 9),
        5,
    ),
    Case("in every way", 0, 9, 6, Watermarks(cap=2, ttl=1, source=5), Gap(1, 5, "mixed", 5, 6, 9), 5),
    Case("a deleted front is silent", 0, 9, 6, NONE, None, 0),
    Case("a deleted front after the cursor", 3, 9, 6, NONE, None, 3),
    Case(
        "lost, then deleted: the gap ends where the loss did", 0, 9, 8, Watermarks(cap=4), Gap(1, 4, "cap", 4, 5, 9), 7
    ),
    Case("deleted after the loss: silent", 4, 9, 8, Watermarks(cap=4), None, 4),
    Case("made again and shorter", 8, 5, 1, NONE, Gap(1, 5, "recreated", 5, 1, 5), 0),
    Case("made again, one below", 6, 5, 3, Watermarks(cap=2), Gap(1, 5, "recreated", 5, 3, 5), 2),
    Case("made again and empty", 1, 0, 1, NONE, Gap(1, 0, "recreated", 1, 1, 0), 0),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_reader_below_the_floor_gets_one_gap_and_deletes_are_silent(case: Case) -> None:
    """G70, G72."""
    where = (case.from_seq, case.head, case.earliest, case.marks)
    assert find_gap(*where) == case.gap
    assert find_read_start(*where) == ReadStart(case.cursor, case.gap)


def test_a_gap_has_the_keys_of_the_wire_contract_in_their_order() -> None:
    assert Gap._fields == ("gap_from", "gap_to", "reason", "missed_estimate", "earliest_seq", "head_seq")


def as_the_contract_says(
    from_seq: int, head: int, earliest: int, cap: int, ttl: int, source: int
) -> tuple[dict[str, Any] | None, int]:
    """The algorithm of the contract's section 3.4, line by line."""
    evict = max(cap, ttl, source) + 1
    cursor, tomb = from_seq, None
    if from_seq > head:
        tomb = {"gap_from": 1, "gap_to": head, "reason": "recreated", "missed_estimate": max(head, 1)}
        tomb |= {"earliest_seq": earliest, "head_seq": head}
        cursor = earliest - 1
    elif from_seq + 1 < evict:
        by_cap, by_ttl = cap >= from_seq + 1, ttl >= from_seq + 1
        reason = "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl" if by_ttl else "source_trim"
        tomb = {
            "gap_from": from_seq + 1,
            "gap_to": evict - 1,
            "reason": reason,
            "missed_estimate": evict - 1 - from_seq,
        }
        tomb |= {"earliest_seq": evict, "head_seq": head}
        cursor = max(earliest - 1, from_seq)
    return tomb, cursor


@st.composite
def topics(draw: st.DrawFn) -> tuple[int, int, Watermarks]:
    """Head, earliest and marks of some topic that can be."""
    head = draw(st.integers(0, 12))
    marks = Watermarks(*(draw(st.integers(0, head)) for _ in Watermarks._fields))
    return head, draw(st.integers(marks.evict_floor, head + 1)), marks


@quick
@given(topics(), st.integers(0, 15))
def test_every_read_starts_where_the_contract_says(topic: tuple[int, int, Watermarks], from_seq: int) -> None:
    """G70."""
    head, earliest, marks = topic
    found = find_read_start(from_seq, head, earliest, marks)
    tomb, cursor = as_the_contract_says(from_seq, head, earliest, *marks)
    assert found.cursor == cursor
    assert (found.gap and found.gap._asdict()) == tomb


@quick
@given(topics(), st.integers(0, 15))
def test_a_gap_is_reported_once_and_covers_all_losses(topic: tuple[int, int, Watermarks], from_seq: int) -> None:
    """G70: from the cursor it leaves, and from the end of the gap, there is no second one."""
    head, earliest, marks = topic
    found = find_read_start(from_seq, head, earliest, marks)
    assert found.cursor <= head
    assert find_gap(found.cursor, head, earliest, marks) is None
    lost = {seq for seq in range(1, head + 1) if seq <= max(marks) and seq > from_seq}
    if found.gap is None:
        assert not lost
    elif found.gap.reason != "recreated":
        assert lost == set(range(found.gap.gap_from, found.gap.gap_to + 1))
        assert found.gap.missed_estimate == len(lost)
        assert find_gap(found.gap.gap_to, head, earliest, marks) is None
        assert found.cursor >= found.gap.gap_to


@quick
@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "cap", "ttl", "delete"]), st.integers(-2, 30)),
        max_size=20,
    )
)
def test_floors_only_rise_and_keep_their_order(steps: list[tuple[str, int]]) -> None:
    """G71, G72. Method: any steps, also ones that ask for seqs below the floor or ahead of the head."""
    head, earliest, marks = 0, 1, Watermarks()
    for step, value in steps:
        before = head, earliest, marks
        if step == "append":
            head += max(value, 0)
        elif step == "delete":
            earliest = min(max(earliest, value, marks.evict_floor), head + 1)
        else:
            marks = marks.raise_to(step, value).clamp_to(head)
            earliest = max(earliest, marks.evict_floor)
        assert 1 <= marks.evict_floor <= earliest <= head + 1
        assert earliest >= before[1]
        assert marks.cap >= before[2].cap
        assert marks.ttl >= before[2].ttl
        if step in ("append", "delete"):
            assert marks == before[2], "only a loss moves the evict floor"
        elif value <= head:
            assert getattr(marks, step) >= value, "what was lost is marked"


@quick
@given(st.integers(0, 20), st.integers(0, 30), st.integers(0, 30))
def test_floors_from_another_time_are_brought_into_order(head: int, cap: int, ttl: int) -> None:
    """G71: a restart may find a shorter log than the floors were made for."""
    marks = Watermarks(cap, ttl).clamp_to(head)
    assert marks.evict_floor <= head + 1
    assert marks == Watermarks(min(cap, head), min(ttl, head))


def test_an_unknown_cause_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="deleted"):
        Watermarks().raise_to("deleted", 3)


@pytest.mark.parametrize(
    ("cursor", "earliest", "found"),
    [
        (0, 1, None),
        (1, 1, None),
        (2, 1, Gap(3, 4, "source_trim", 2, 5, 10)),
        (3, 1, Gap(4, 4, "source_trim", 1, 5, 10)),
        (4, 1, None),
        (6, 1, Gap(7, 8, "source_trim", 2, 9, 10)),
        (8, 1, None),
        (0, 3, Gap(1, 4, "source_trim", 4, 5, 10)),  # what comes before was deleted
        (5, 7, Gap(6, 8, "source_trim", 3, 9, 10)),
    ],
)
def test_what_a_routers_source_lost_is_a_gap_for_a_reader_that_comes_to_it(
    cursor: int, earliest: int, found: Gap | None
) -> None:
    trims = [(3, 5), (7, 9)]
    assert find_gap(cursor, 10, earliest, Watermarks(), trims) == found
    begin = find_read_start(cursor, 10, earliest, Watermarks(), trims)
    assert begin == (cursor if found is None else max(found.gap_to, earliest - 1), found)


def test_the_next_trim_is_the_first_of_which_something_is_ahead() -> None:
    trims = [(3, 5), (7, 9)]
    assert [next_trimmed_range(cursor, trims) for cursor in (0, 3, 4, 7, 8)] == [(3, 5), (3, 5), (7, 9), (7, 9), None]
    assert next_trimmed_range(0, []) is None
