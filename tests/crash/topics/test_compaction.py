"""Power cuts at every operation of histories with compaction; and the bugs that these histories must find."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.crash.topics.compaction_histories import (
    DELAY_MS,
    CompactionHistory,
    CompactionStats,
    append,
    append_batch,
    append_tombstone,
    checkpoint,
    compact,
    hold,
    run_history,
)

from tidelog.engine import compaction, key_index
from tidelog.engine.key_index import KeyTable, Run
from tidelog.formats import key_index as key_file
from tidelog.formats.key_index import SegmentKeys

Tell = Callable[[str, int], None]
RULES = ("latest_by_tag", "/k")
CLASSES = ("fsync", "disk", "memory")


def scripted(rule: str, durability: str, *, images: int, shards: int = 1, step: int = 1) -> CompactionHistory:
    """One compaction before and one after a seal and a checkpoint, with a tombstone that waits and then is due."""
    stats = CompactionStats()
    history = CompactionHistory(
        Random(f"{rule}{durability}"), stats, shards=shards, images=0, durability=durability, compaction=rule
    )
    history.step = step
    for key in "abacbd":
        history.append(key)
    history.append("b", tombstone=True)
    history.images = images
    compact(history)  # in memtables
    checkpoint(history)
    history.append("a")
    history.append("c")
    compact(history)  # a segment on disk
    history.clock.tick(DELAY_MS + 1)
    compact(history)  # the tombstone is due
    checkpoint(history)
    history.kill()
    return history


@pytest.mark.parametrize("rule", RULES)
def test_a_compaction_survives_power_cuts_before_and_after_its_operations(rule: str, record_count: Tell) -> None:
    history = scripted(rule, "fsync", images=1, step=3)
    record_count("crash states of compaction", history.tally.states)
    assert history.tally.states > 20
    assert history.tally.removed == 6
    assert {key for key, _ in history.now.table} == {"a", "c", "d"}


@pytest.mark.sweep
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_compaction_survives_every_power_cut(rule: str, durability: str, shards: int, record_count: Tell) -> None:
    history = scripted(rule, durability, images=12, shards=shards)
    record_count("crash states of compaction", history.tally.states)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_a_history_with_compaction_survives_power_cuts(durability: str, record_count: Tell) -> None:
    stats = CompactionStats()
    rule = RULES[durability == "disk"]
    run_history((durability, 3), stats, steps=22, images=1, step=5, durability=durability, compaction=rule)
    record_count("crash states of compaction", stats.states)
    assert stats.states > 10


@pytest.mark.sweep
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("seed", range(6))
def test_long_histories_with_compaction_survive_power_cuts(
    rule: str, durability: str, seed: int, record_count: Tell
) -> None:
    stats = CompactionStats()
    more = ({}, {"cap_records": 9}, {"ttl_ms": 2_500})[seed % 3]
    run_history(seed, stats, steps=40, shards=1 + seed % 3, images=4, durability=durability, compaction=rule, **more)
    record_count("crash states of compaction", stats.states)


# ── planted bugs ──────────────────────────────────────────────────────────────────────────────────


def _small_history(rule: str = "latest_by_tag") -> CompactionHistory:
    return CompactionHistory(Random(7), CompactionStats(), shards=1, images=0, durability="fsync", compaction=rule)


def test_a_compaction_that_removes_the_newest_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    good = KeyTable.replaced

    def bad(table: KeyTable, live: Callable[[object], object]) -> Run:
        run = good(table, live)  # type: ignore[arg-type]
        newest = table.runs[-1].take(slice(0, 1))
        return Run(*(np.concatenate(pair) for pair in zip(run, newest, strict=True)))

    monkeypatch.setattr(KeyTable, "replaced", bad)
    history = _small_history()
    for _ in range(3):
        append(history)
    with pytest.raises(AssertionError):
        compact(history)


def test_a_compaction_that_forgets_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "horizon", lambda _, stop: stop - 1)
    history = _small_history()
    history.run_call(lambda: history.topic.group("g").hold(10_000))
    history.append("a")
    history.append("a")
    with pytest.raises(AssertionError, match="were not read by a group with a hold"):
        compact(history)


def test_a_tombstone_that_is_removed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "record_times", lambda _, seqs: np.zeros(len(seqs), np.int64))
    history = _small_history("/k")
    history.append("a", tombstone=True)
    with pytest.raises(AssertionError, match="are gone"):
        compact(history)


def test_a_key_file_that_is_stale_after_a_crash_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a segment is taken for what it says, although the segment was sealed with more records."""
    history = _small_history("/k")
    for key in "abca":
        history.append(key)
    history.run_call(history.topic.seal)
    checkpoint(history)
    good = key_file.decode

    def bad(content: bytes, **options: Any) -> SegmentKeys:
        keys = good(content, **options)
        return keys._replace(rows=keys.rows[::-1].copy())

    monkeypatch.setattr(key_file, "decode", bad)
    with pytest.raises(AssertionError):
        history.kill()


def test_a_delete_that_leaves_what_the_newest_record_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "find_replaced", lambda _, seqs: seqs[:0])
    history = _small_history("/k")
    for key in "aba":
        history.append(key)
    history.model.delete([3], history.now.live)
    with pytest.raises(AssertionError):
        history.run_call(lambda: history.topic.delete(seqs=[3]))


def test_an_unbroken_history_of_the_same_letters_passes() -> None:
    for rule in RULES:
        history = _small_history(rule)
        for letter in (append, append, hold, append_batch, append_tombstone, compact, checkpoint, compact):
            letter(history)
        history.kill()
