"""Power cuts at every operation of writes of numbered batches: each is there once, whole, whatever is repeated (P4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.crash.topics.numbered_batches import HistoryStats, run_history
from tests.kit.sampling import one_in

from tidelog.engine import batch_encoder, checkpoint, idempotency, recovery
from tidelog.engine.append import Append
from tidelog.engine.producer_batches import ProducerAppend
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error
from tidelog.formats import frame

Tell = Callable[[str, int], None]
Patch = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.parametrize(("histories", "images"), [(1, 2), pytest.param(3, 5, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
def test_numbered_batches_survive_power_cuts(durability: str, histories: int, images: int, record_count: Tell) -> None:
    tally, first = HistoryStats(), ["fsync", "disk", "memory"].index(durability)
    for seed in range(first, first + histories):
        run_history((durability, seed), tally, steps=8, durability=durability, shards=1 + seed % 2, images=images)
    record_count("crash states of numbered batches", tally.states)
    assert tally.states >= 10 * histories * images, tally.states


@pytest.mark.sweep
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("seed", range(30))
def test_long_histories_of_numbered_batches_survive_power_cuts(durability: str, seed: int, record_count: Tell) -> None:
    tally = HistoryStats()
    run_history(seed, tally, steps=25, durability=durability, shards=1 + seed % 3, images=12)
    record_count("crash states of numbered batches", tally.states)


# Bugs planted on purpose ----------------------------------------------------------------------------


def the_number_follows_its_records(patch: Patch) -> None:
    def lead(self: ProducerAppend, made: bytes) -> None:
        self.pieces = [*self.pieces, made]
        self.frames, self.size, self.durable = self.frames + 1, self.size + len(made), True

    patch.setattr(ProducerAppend, "prepend_durable", lead)
    patch.setattr(recovery, "_records_follow", lambda *_: True)


def a_number_counts_without_records(patch: Patch) -> None:
    patch.setattr(recovery, "_records_follow", lambda *_: True)


def nothing_waits_for_the_sync(patch: Patch) -> None:
    real = Append.prepend_durable

    def lead(self: Append, made: bytes) -> None:
        durable = self.durable
        real(self, made)
        self.durable = durable or made[frame.KIND_OFFSET] != frame.NUMBERED_BATCH

    patch.setattr(Append, "prepend_durable", lead)


def a_checkpoint_forgets_numbers(patch: Patch) -> None:
    real = checkpoint._build_topic_row

    def stock(core: TopicState, *, final: bool) -> Any:
        row = real(core, final=final)
        return msgspec.structs.replace(row, writers=())

    patch.setattr(checkpoint, "_build_topic_row", stock)


def replay_knows_no_numbers(patch: Patch) -> None:
    patch.setattr(recovery, "_records_follow", lambda *_: False)


def tables_are_not_chained(patch: Patch) -> None:
    real = batch_encoder.encode_frames

    def frames(*given: Any, **more: Any) -> list[bytes]:
        return real(*given, **{**more, "chained": False})

    patch.setattr(batch_encoder, "encode_frames", frames)


def a_replay_is_written_again(patch: Patch) -> None:
    patch.setattr(idempotency, "find_written_batch", lambda *_: None)


BUGS = [
    (the_number_follows_its_records, "fsync"),
    (a_number_counts_without_records, "fsync"),
    (nothing_waits_for_the_sync, "disk"),
    (a_checkpoint_forgets_numbers, "fsync"),
    (replay_knows_no_numbers, "fsync"),
    (tables_are_not_chained, "fsync"),
    (a_replay_is_written_again, "fsync"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "durability"), one_in(2, BUGS), ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(bug: Callable[[Patch], None], durability: str, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, Error)):
        run_all(durability)


def run_all(durability: str) -> None:
    for seed in range(6):
        run_history(("planted", seed), HistoryStats(), steps=8, durability=durability, images=6)
