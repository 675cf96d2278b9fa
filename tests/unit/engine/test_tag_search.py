"""The tag index against a plain list of tags, and the cache of them against a plain list of uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.engine.tag_search import SegmentKey, TagCache, TagIndex

quick = settings(max_examples=300, deadline=None, database=None)

# Few bytes, the extremes among them: tags share prefixes, and a prefix may have nothing that sorts after it.
words = st.lists(st.sampled_from([0, 1, 97, 98, 0xFE, 0xFF]), max_size=4).map(bytes)
columns = st.lists(st.none() | words, max_size=40)


def built(tags: list[bytes | None], first_row: int = 0) -> TagIndex:
    return TagIndex.build(pa.array(tags, pa.binary()), first_row)


def carrying(tags: list[bytes | None], wanted: Callable[[bytes], bool], first_row: int = 0) -> list[int]:
    return [row for row, tag in enumerate(tags, first_row) if tag and wanted(tag)]


@quick
@given(columns, st.data(), st.integers(0, 1 << 40))
def test_an_index_finds_what_a_look_at_every_tag_finds(
    tags: list[bytes | None], data: st.DataObject, first_row: int
) -> None:
    index = built(tags, first_row)
    known = [tag for tag in tags if tag]
    asked = data.draw(words | st.sampled_from(known) if known else words)
    for found, expected in (
        (index.find_exact(asked), carrying(tags, lambda tag: tag == asked, first_row)),
        (index.find_prefix(asked), carrying(tags, lambda tag: tag.startswith(asked), first_row)),
    ):
        assert found.tolist() == expected
        assert found.dtype == np.int64


@quick
@given(columns)
def test_every_tag_there_is_is_found_with_all_its_rows(tags: list[bytes | None]) -> None:
    index = built(tags)
    for tag in {tag for tag in tags if tag}:
        assert index.find_exact(tag).tolist() == carrying(tags, lambda other, tag=tag: other == tag)  # type: ignore[misc]
        for cut in range(len(tag) + 1):
            start = tag[:cut]
            assert index.find_prefix(start).tolist() == carrying(tags, lambda other, it=start: other.startswith(it))  # type: ignore[misc]


def test_a_prefix_is_taken_literally_and_an_untagged_row_is_never_found() -> None:
    """The wire contract: `chat-42:*` does not mean chat-420, `*` means every tagged record."""
    index = built([b"chat-42:a", b"chat-420:c", None, b"", b"chat-42:b", b"chat-42", b"chat-42:a"])
    assert index.find_prefix(b"chat-42:").tolist() == [0, 4, 6]
    assert index.find_prefix(b"chat-42").tolist() == [0, 1, 4, 5, 6]
    assert index.find_exact(b"chat-42:a").tolist() == [0, 6]
    assert index.find_exact(b"chat-42:*").tolist() == []
    assert index.find_prefix(b"").tolist() == [0, 1, 4, 5, 6]
    assert index.find_exact(b"").tolist() == []


@pytest.mark.parametrize("different", [65_535, 65_536, 65_537, 70_000])
def test_more_tags_than_sixteen_bits_can_count_are_all_found(different: int) -> None:
    tags: list[bytes | None] = [b"%05d" % (number * 7_919 % different) for number in range(different + 5)]
    index = built(tags)
    for row in (0, 1, 4, 5, different // 2, different - 1, different, different + 4):
        tag = tags[row]
        assert tag is not None
        assert index.find_exact(tag).tolist() == carrying(tags, lambda other, tag=tag: other == tag)  # type: ignore[misc]
    assert index.find_prefix(b"6553").tolist() == carrying(tags, lambda tag: tag.startswith(b"6553"))
    assert index.find_prefix(b"").tolist() == list(range(different + 5))


@pytest.mark.parametrize("tags", [[], [None], [b"", None, b""]], ids=["no rows", "null", "empty"])
def test_where_nothing_is_tagged_nothing_is_found(tags: list[bytes | None]) -> None:
    index = built(tags)
    for asked in (b"", b"a", b"\xff"):
        assert index.find_exact(asked).tolist() == index.find_prefix(asked).tolist() == []


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()], ids=str)
def test_part_of_a_column_is_indexed_like_a_column_of_its_own(kind: pa.DataType) -> None:
    tags = ["zz", "a", None, "ä", "", "a", "b", "yy"]
    whole = pa.array(tags).cast(kind)
    index = TagIndex.build(whole.slice(1, 6), first_row=100)
    assert index.find_exact(b"a").tolist() == [100, 104]
    assert index.find_exact("ä".encode()).tolist() == [102]
    assert index.find_prefix(b"").tolist() == [100, 102, 104, 105]
    assert index.find_exact(b"zz").tolist() == index.find_exact(b"yy").tolist() == []


def test_a_column_without_values_has_an_index_too() -> None:
    assert TagIndex.build(pa.nulls(3)).find_prefix(b"").tolist() == []


def test_what_is_found_belongs_to_the_caller() -> None:
    index = built([b"a", b"b", b"a"])
    for find in (index.find_exact, index.find_prefix):
        find(b"a")[:] = -1
        assert find(b"a").tolist() == [0, 2]


def test_the_memory_of_an_index_includes_all_its_arrays() -> None:
    """A bound that leaves out the empty ones would not hold for a million untagged segments."""
    empty = built([]).nbytes
    assert empty > 500
    tags: list[bytes | None] = [b"%0100d" % number for number in range(1_000)]
    assert built(tags).nbytes >= empty + 1_000 * (100 + 4)
    assert built(tags).nbytes <= empty + 1_000 * (100 + 4 + 8 + 8)
    assert built([b"x" * 100] * 1_000).nbytes <= empty + 100 + 1_000 * 4 + 64


# The cache -------------------------------------------------------------------------------------------

SIZE = built([]).nbytes


class Builder:
    """Makes small indexes of one size and remembers for whom."""

    def __init__(self) -> None:
        self.calls: list[SegmentKey] = []

    def __call__(self, key: SegmentKey) -> Callable[[], TagIndex]:
        def build() -> TagIndex:
            self.calls.append(key)
            return built([])

        return build


def test_an_index_is_built_once_while_it_stays() -> None:
    cache, builder = TagCache(10 * SIZE), Builder()
    first = cache.get((1, 1, 0), 5, builder((1, 1, 5)))
    assert cache.get((1, 1, 0), 5, builder((1, 1, 5))) is first
    assert builder.calls == [(1, 1, 5)]
    assert cache.stats() == (1, 1, 0, 1, SIZE)


def test_topics_and_segments_have_separate_entries() -> None:
    cache, builder = TagCache(10 * SIZE), Builder()
    keys = [(1, 1, 5), (2, 1, 5), (1, 6, 5)]
    found = [cache.get((*key[:2], 0), key[2], builder(key)) for key in keys]
    assert len({id(index) for index in found}) == 3
    assert [cache.get((*key[:2], 0), key[2], builder(key)) for key in keys] == found


def test_a_segment_that_grew_is_indexed_anew_and_its_past_is_let_go() -> None:
    cache, builder = TagCache(10 * SIZE), Builder()
    for rows in (5, 6, 6, 9):
        cache.get((1, 1, 0), rows, builder((1, 1, rows)))
    assert builder.calls == [(1, 1, 5), (1, 1, 6), (1, 1, 9)]
    assert cache.stats() == (1, 3, 0, 1, SIZE)


def test_a_segment_that_grew_counts_as_just_used() -> None:
    cache, builder = TagCache(2 * SIZE), Builder()
    for key in ((1, 1, 5), (2, 1, 5), (1, 1, 6), (3, 1, 5), (1, 1, 6)):
        cache.get((*key[:2], 0), key[2], builder(key))
    assert builder.calls == [(1, 1, 5), (2, 1, 5), (1, 1, 6), (3, 1, 5)], "topic 2 had to leave"


def test_a_reader_of_fewer_rows_gets_them_and_does_not_displace_more() -> None:
    cache, builder = TagCache(10 * SIZE), Builder()
    longer = cache.get((1, 1, 0), 9, builder((1, 1, 9)))
    assert cache.get((1, 1, 0), 5, builder((1, 1, 5))) is not longer
    assert cache.get((1, 1, 0), 9, builder((1, 1, 9))) is longer
    assert builder.calls == [(1, 1, 9), (1, 1, 5)]


def test_an_index_larger_than_the_cache_is_handed_out_and_not_kept() -> None:
    """And evicts no other entry."""
    cache, builder = TagCache(2 * SIZE), Builder()
    cache.get((1, 1, 0), 1, builder((1, 1, 1)))
    big = built([b"x" * 10_000])
    for _ in range(2):
        assert cache.get((2, 1, 0), 1, lambda: big) is big
    assert cache.stats() == (0, 3, 0, 1, SIZE)
    for _ in range(2):
        TagCache(0).get((1, 1, 0), 1, builder((1, 1, 1)))
    assert len(builder.calls) == 3


def test_a_dropped_segment_and_a_dropped_topic_are_forgotten() -> None:
    cache, builder = TagCache(10 * SIZE), Builder()
    for key in ((1, 1, 5), (1, 6, 5), (2, 1, 5), (2, 6, 5)):
        cache.get((*key[:2], 0), key[2], builder(key))
    cache.drop(1, 6)
    cache.drop(1, 7)
    assert cache.stats().entries == 3
    cache.drop(2)
    cache.drop(3)
    assert cache.stats()[2:] == (0, 1, SIZE)
    builder.calls.clear()
    for key in ((1, 1, 5), (1, 6, 5), (2, 1, 5)):
        cache.get((*key[:2], 0), key[2], builder(key))
    assert builder.calls == [(1, 6, 5), (2, 1, 5)]


@quick
@given(st.integers(0, 4), st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), max_size=40))
def test_the_least_recently_used_leaves_first(places: int, uses: list[tuple[int, int]]) -> None:
    """Method: the model is a list of keys, newest last."""
    cache, builder = TagCache(places * SIZE + SIZE // 2), Builder()
    model: list[SegmentKey] = []
    hits = misses = evictions = 0
    for topic_id, base in uses:
        key = topic_id, base, 1
        expected = key in model
        before = len(builder.calls)
        cache.get((*key[:2], 0), key[2], builder(key))
        assert (len(builder.calls) == before) == expected
        hits, misses = hits + expected, misses + (not expected)
        if expected:
            model.remove(key)
        if places:
            model.append(key)
        while len(model) > places:
            model.pop(0)
            evictions += 1
        assert cache.stats() == (hits, misses, evictions, len(model), len(model) * SIZE)


def test_what_cannot_be_built_is_not_kept() -> None:
    cache = TagCache(10 * SIZE)

    def fail() -> TagIndex:
        raise OSError

    with pytest.raises(OSError):
        cache.get((1, 1, 0), 1, fail)
    assert cache.stats() == (0, 1, 0, 0, 0)
    index = built([])
    assert cache.get((1, 1, 0), 1, lambda: index) is index


def test_a_slow_build_blocks_no_other_and_the_first_to_finish_is_kept() -> None:
    """Method: inside one build the same segment is asked for again, as another thread could at that moment."""
    cache = TagCache(10 * SIZE)
    inner, outer, longer = built([]), built([]), built([])

    def slowly() -> TagIndex:
        assert not cache._guard.locked()
        assert cache.get((1, 1, 0), 5, lambda: inner) is inner
        return outer

    assert cache.get((1, 1, 0), 5, slowly) is outer
    assert cache.get((1, 1, 0), 5, lambda: outer) is inner
    assert cache.stats() == (1, 2, 0, 1, SIZE)

    def overtaken() -> TagIndex:
        assert cache.get((1, 1, 0), 9, lambda: longer) is longer
        return outer

    assert cache.get((1, 1, 0), 7, overtaken) is outer
    assert cache.get((1, 1, 0), 9, overtaken) is longer
    assert cache.stats().nbytes == SIZE


class Guarded:
    """A lock that counts how often it is taken."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.taken = lock, 0

    def __enter__(self) -> None:
        self.lock.acquire()
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_every_call_takes_the_lock() -> None:
    cache = TagCache(10 * SIZE)
    guard = cache._guard = Guarded(cache._guard)  # type: ignore[assignment]
    for call, times in (
        (lambda: cache.get((1, 1, 0), 1, lambda: built([])), 2),
        (lambda: cache.get((1, 1, 0), 1, lambda: built([])), 1),
        (lambda: cache.drop(1), 1),
        (cache.stats, 1),
    ):
        before = guard.taken
        call()
        assert guard.taken - before == times


def test_threads_share_a_cache_without_losing_count() -> None:
    cache = TagCache(5 * SIZE)

    def use(number: int) -> int:
        random = Random(number)
        for _ in range(500):
            topic_id, base, rows = random.randrange(3), random.randrange(3), random.randrange(1, 3)
            if random.random() < 0.05:
                cache.drop(topic_id, random.choice((None, base)))
            found = cache.get((topic_id, base, 0), rows, partial(built, [b"%d" % topic_id, b"%d" % base, b"%d" % rows]))
            assert found.find_exact(b"%d" % rows)[-1] == 2
        return 500

    with ThreadPoolExecutor(4) as pool:
        calls = sum(pool.map(use, range(4)))
    stats = cache.stats()
    assert stats.hits + stats.misses == calls
    assert stats.nbytes == sum(index.nbytes for _, index in cache._entries.values()) <= 5 * SIZE
    assert stats.entries == len(cache._entries) > 0
    for topic_id in range(3):
        cache.drop(topic_id)
    assert cache.stats()[3:] == (0, 0)
