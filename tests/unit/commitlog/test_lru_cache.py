"""The cache that bounds what a log keeps open, and that a log keeps to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.segment import LruCache

Opener: TypeAlias = Callable[..., SegmentedLog]


def loader(loaded: list[int], key: int) -> Callable[[], str]:
    def load() -> str:
        loaded.append(key)
        return f"value {key}"

    return load


@pytest.mark.parametrize(
    ("capacity", "asked", "expected"),
    [
        (None, [1, 2, 3, 1, 2, 3], [1, 2, 3]),
        (0, [1, 1, 2, 2], [1, 1, 2, 2]),
        (1, [1, 1, 2, 1, 1], [1, 2, 1]),
        (2, [1, 2, 1, 3, 1, 2], [1, 2, 3, 2]),
    ],
    ids=["all", "none", "one", "two"],
)
def test_the_least_recently_used_value_leaves_first(
    capacity: int | None, asked: list[int], expected: list[int]
) -> None:
    cache: LruCache[str] = LruCache(capacity)
    loaded: list[int] = []
    for key in asked:
        assert cache.get(key, loader(loaded, key)) == f"value {key}"
        assert capacity is None or len(cache) <= capacity
    assert loaded == expected


def test_a_dropped_value_is_loaded_again() -> None:
    cache: LruCache[str] = LruCache(None)
    loaded: list[int] = []
    for _ in range(2):
        cache.get(1, loader(loaded, 1))
        cache.drop(1)
        cache.drop(1)
    cache.get(2, loader(loaded, 2))
    cache.clear()
    assert len(cache) == 0
    cache.get(2, loader(loaded, 2))
    assert loaded == [1, 1, 2, 2]


def test_a_value_that_cannot_be_loaded_is_not_kept() -> None:
    cache: LruCache[str] = LruCache(None)

    def fail() -> str:
        raise OSError

    with pytest.raises(OSError):
        cache.get(1, fail)
    assert cache.get(1, lambda: "there") == "there"


@pytest.mark.parametrize(("index_cache", "maps_max"), [(0, 1), (1, 2), (3, 4), (None, 256)])
def test_a_log_holds_no_more_maps_and_indexes_than_it_may(
    open_log: Opener, index_cache: int | None, maps_max: int
) -> None:
    log = open_log(index_cache=index_cache, maps_max=maps_max)
    for number in range(6):
        log.append(b"%d" % number)
        log.seal()
    assert [record.data for record in log] == [b"%d" % number for number in range(6)]
    files = log._log_state.files
    assert len(files.mapped_data) == min(maps_max, 6)
    assert len(files.cached_sides) == min(6 if index_cache is None else index_cache, 6)


def test_a_dropped_segment_is_no_longer_held(open_log: Opener) -> None:
    log = open_log()
    for number in range(4):
        log.append(b"%d" % number)
        log.seal()
    list(log)
    log.retain(keep_bytes=0)
    assert (len(log._log_state.files.mapped_data), len(log._log_state.files.cached_sides)) == (0, 0)
    log.append(b"a")
    log.seal()
    list(log)
    log.close()
    assert (len(log._log_state.files.mapped_data), len(log._log_state.files.cached_sides)) == (0, 0)
