"""Cutting and admission are arithmetic: nothing is left out, nothing is taken twice, and shares are even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tidelog.engine import Counts
from tidelog.errors import BadInput
from tidelog.spark import groups
from tidelog.spark.backends.interface import TopicGap, clip_counts
from tidelog.spark.groups import Pending, Position, admit_batch
from tidelog.spark.plan import MIN_TASK_BYTES, SizedRange, count_tasks, split_ranges


def sized(pieces: list[tuple[int, int]], first: int = 1) -> SizedRange:
    """A range of pieces, each of so many records and bytes."""
    counts, sizes = [count for count, _ in pieces], [size for _, size in pieces]
    return SizedRange(first + np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(sizes)))


pieces = some.lists(some.tuples(some.integers(1, 5), some.integers(0, 100)), min_size=1, max_size=12)


@settings(deadline=None)
@given(some.lists(pieces, min_size=1, max_size=4), some.integers(1, 9))
def test_a_cut_leaves_nothing_out_and_takes_nothing_twice(
    given_ranges: list[list[tuple[int, int]]], count: int
) -> None:
    ranges = [sized(each) for each in given_ranges]
    parts = split_ranges(ranges, count)
    assert 1 <= len(parts) <= count
    assert all(parts)
    seqs = [(piece.range_index, seq) for part in parts for piece in part for seq in range(piece.first, piece.stop)]
    assert seqs == [(number, seq) for number, each in enumerate(ranges) for seq in range(each.first, each.stop)]
    assert sum(piece.size for part in parts for piece in part) == sum(each.size for each in ranges)


@settings(deadline=None)
@given(pieces)
def test_offsets_rise_from_the_first_seq_to_the_end(given_pieces: list[tuple[int, int]]) -> None:
    made = sized(given_pieces)
    offsets = [made.offset_of(seq) for seq in range(made.first, made.stop + 1)]
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[-1]) == (0, made.size)
    for at, bound in enumerate(made.bounds.tolist()):
        assert made.offset_of(bound) == made.offsets[at]


def test_equal_pieces_make_equal_parts() -> None:
    parts = split_ranges([sized([(10, 1000)] * 60), sized([(1, 10)] * 100), sized([(10, 1000)] * 39)], 10)
    sizes = [sum(piece.size for piece in part) for part in parts]
    assert len(sizes) == 10
    assert max(sizes) <= 1.25 * min(sizes)


def test_a_large_piece_is_divided_and_small_ones_are_not() -> None:
    (large,) = ([piece.stop for part in split_ranges([sized([(1000, 1 << 30)])], 4) for piece in part],)
    assert large == [251, 501, 751, 1001]
    parts = split_ranges([sized([(10, 100)] * 100)], 7)
    assert all((piece.first - 1) % 10 == 0 for part in parts for piece in part)


@pytest.mark.parametrize(
    ("total", "least", "count"),
    [
        (0, None, 1),
        (10, None, 1),
        (MIN_TASK_BYTES + 1, None, 2),
        (100 * MIN_TASK_BYTES, None, 4),
        (1000 * MIN_TASK_BYTES, None, 16),
        (10, 7, 7),
        (1000 * MIN_TASK_BYTES, 7, 16),
    ],
)
def test_how_many_tasks(total: int, least: int | None, count: int) -> None:
    assert count_tasks(total, split_bytes=64 * MIN_TASK_BYTES, min_tasks=least, processors=4) == count


# ── admission ─────────────────────────────────────────────────────────────────────────────────────


def pending(topic: str, first: int, stop: int, size: int = 10) -> Pending:
    return Pending(topic, first, stop, lambda seq: seq * size)


def test_no_limit_takes_everything() -> None:
    assert admit_batch([pending("a", 1, 101), pending("b", 5, 5)], None, None) == {"a": 101, "b": 5}


def test_a_limit_is_shared_in_proportion() -> None:
    assert admit_batch([pending("a", 1, 901), pending("b", 1, 101)], 100, None) == {"a": 91, "b": 11}
    assert admit_batch([pending("a", 1, 901), pending("b", 1, 101)], None, 1000) == {"a": 91, "b": 11}
    assert admit_batch([pending("a", 1, 901)], 100, 500) == {"a": 51}, "the stricter one holds"


def test_a_limit_smaller_than_a_record_still_goes_on() -> None:
    assert admit_batch([pending("a", 7, 9, size=1000), pending("b", 1, 9, size=1000)], None, 1) == {"a": 8, "b": 1}


@given(
    some.lists(some.tuples(some.integers(1, 50), some.integers(0, 50), some.integers(1, 20)), min_size=1, max_size=5),
    some.integers(1, 200),
    some.integers(1, 2000),
)
def test_a_batch_is_never_larger_than_its_limits_and_never_empty(
    topics: list[tuple[int, int, int]], rows_max: int, bytes_max: int
) -> None:
    each = [pending(str(number), first, first + count, size) for number, (first, count, size) in enumerate(topics)]
    ends = admit_batch(each, rows_max, bytes_max)
    taken = [ends[one.topic] - one.first for one in each]
    assert all(0 <= count <= one.seq_count for count, one in zip(taken, each, strict=True))
    assert sum(taken) <= max(rows_max, 1)
    sizes = [count * size for count, (_, _, size) in zip(taken, topics, strict=True)]
    assert sum(sizes) <= bytes_max or sum(taken) == 1
    assert sum(taken) > 0 or not any(one.seq_count for one in each)


# ── counts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("counts", "cause", "wanted"),
    [
        (Counts(expired=10, deleted=5), "ttl", Counts(expired=10)),
        (Counts(evicted=10, holes=5), "cap", Counts(evicted=10)),
        (Counts(evicted=4, expired=6, deleted=5), "mixed", Counts(evicted=4, expired=6)),
        (Counts(expired=10), "ttl", Counts(expired=10)),
    ],
)
def test_counts_that_reach_further_are_cut_to_the_range(counts: Counts, cause: str, wanted: Counts) -> None:
    assert clip_counts(counts, [TopicGap("a", 1, 10, cause, 16, 20)], 1, 11) == wanted


def test_seqs_after_a_loss_were_deleted_or_never_there() -> None:
    found = clip_counts(Counts(evicted=10, deleted=2, holes=9), [TopicGap("a", 1, 10, "cap", 30, 40)], 1, 16)
    assert found == Counts(evicted=10, deleted=2, holes=3)


# ── offsets ───────────────────────────────────────────────────────────────────────────────────────


def test_offsets_come_back_and_are_sorted() -> None:
    spots = {"b": Position(1, 5), "a": Position(2, 7)}
    said = groups.encode_offsets(spots)
    assert list(said) == ["a", "b"]
    assert said == {"a": {"epoch": 2, "seq": 7}, "b": {"epoch": 1, "seq": 5}}
    assert groups.decode_offsets(said) == spots
    assert groups.decode_offsets(None) == groups.decode_offsets({}) == {}


@pytest.mark.parametrize("given", [{"a": 5}, {"a": {"seq": 5}}, [1], {"a": {"epoch": "x", "seq": 1}}])
def test_what_is_no_offset_of_ours_is_refused(given: object) -> None:
    with pytest.raises(BadInput, match="is the checkpoint another query's"):
        groups.decode_offsets(given)
