"""Power cuts at every operation of writes of numbered batches: each is there once, whole, whatever is repeated (P4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.crash.topics.numbered import Tally, run

from tidelog.engine import checkpoint, encode, numbers, replay
from tidelog.engine.append import Append
from tidelog.engine.core import Core
from tidelog.engine.numbered import Numbered
from tidelog.errors import Error
from tidelog.formats import frame

Tell = Callable[[str, int], None]
Patch = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.parametrize("histories", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
def test_numbered_batches_survive_power_cuts(durability: str, histories: int, tell: Tell) -> None:
    tally = Tally()
    for seed in range(histories):
        run((durability, seed), tally, steps=8, durability=durability, shards=1 + seed % 2, images=5)
    tell("crash states of numbered batches", tally.states)
    assert tally.states >= 30 * histories, tally.states


@pytest.mark.sweep
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("seed", range(30))
def test_long_histories_of_numbered_batches_survive_power_cuts(durability: str, seed: int, tell: Tell) -> None:
    tally = Tally()
    run(seed, tally, steps=25, durability=durability, shards=1 + seed % 3, images=12)
    tell("crash states of numbered batches", tally.states)


# Bugs planted on purpose ----------------------------------------------------------------------------


def the_number_lies_behind_its_records(patch: Patch) -> None:
    def lead(self: Numbered, made: bytes) -> None:
        self.pieces = [*self.pieces, made]
        self.frames, self.size, self.durable = self.frames + 1, self.size + len(made), True

    patch.setattr(Numbered, "lead", lead)
    patch.setattr(replay, "_follows", lambda *_: True)


def a_number_counts_without_records(patch: Patch) -> None:
    patch.setattr(replay, "_follows", lambda *_: True)


def nothing_waits_for_the_sync(patch: Patch) -> None:
    real = Append.lead

    def lead(self: Append, made: bytes) -> None:
        durable = self.durable
        real(self, made)
        self.durable = durable or made[frame.KIND_AT] != frame.NUMBERED_BATCH

    patch.setattr(Append, "lead", lead)


def a_checkpoint_forgets_numbers(patch: Patch) -> None:
    real = checkpoint._stock

    def stock(core: Core, *, final: bool) -> Any:
        row = real(core, final=final)
        return msgspec.structs.replace(row, writers=())

    patch.setattr(checkpoint, "_stock", stock)


def replay_knows_no_numbers(patch: Patch) -> None:
    patch.setattr(replay, "_follows", lambda *_: False)


def tables_are_not_chained(patch: Patch) -> None:
    real = encode.frames

    def frames(*given: Any, **more: Any) -> list[bytes]:
        return real(*given, **{**more, "chained": False})

    patch.setattr(encode, "frames", frames)


def a_replay_is_written_again(patch: Patch) -> None:
    patch.setattr(numbers, "known", lambda *_: None)


BUGS = [
    (the_number_lies_behind_its_records, "fsync"),
    (a_number_counts_without_records, "fsync"),
    (nothing_waits_for_the_sync, "disk"),
    (a_checkpoint_forgets_numbers, "fsync"),
    (replay_knows_no_numbers, "fsync"),
    (tables_are_not_chained, "fsync"),
    (a_replay_is_written_again, "fsync"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "durability"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(bug: Callable[[Patch], None], durability: str, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, Error)):
        run_all(durability)


def run_all(durability: str) -> None:
    for seed in range(6):
        run(("planted", seed), Tally(), steps=8, durability=durability, images=6)
