"""Power cuts in writes under idempotency keys: a key is known if and only if its records survived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.crash.topics.idempotency_keys import run_history
from tests.kit.sampling import one_in

from tidelog.engine import idempotency, recovery
from tidelog.engine.append import Append
from tidelog.engine.recovery import TopicReplayer
from tidelog.formats import control_frames

Tell = Callable[[str, int], None]
Patch = pytest.MonkeyPatch
CLASSES = ["fsync", "disk", "memory"]
PLACES = [(durability, 1 + (number + turn) % 2) for number, durability in enumerate(CLASSES) for turn in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("durability", "shards"), one_in(2, PLACES))
def test_a_key_is_known_if_and_only_if_its_records_survived(durability: str, shards: int, record_count: Tell) -> None:
    done = run_history((durability, shards), steps=14, durability=durability, shards=shards, images=3)
    record_count("crash states of keyed writes", done.states)
    assert done.states >= 25
    assert done.known
    assert done.lost


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("durability", CLASSES)
def test_long_histories_of_keyed_writes_survive_power_cuts(durability: str, seed: int, record_count: Tell) -> None:
    done = run_history(seed, steps=40, durability=durability, shards=1 + seed % 3, images=8)
    record_count("crash states of keyed writes", done.states)


# Bugs planted on purpose ----------------------------------------------------------------------------


def a_key_is_not_written(patch: Patch) -> None:
    patch.setattr(Append, "prepend", lambda *_: None)


def a_key_counts_without_its_records(patch: Patch) -> None:
    def remember(_: Any, core: Any, window: Any, which: Any, keys: Any) -> None:
        found = [recovery._decode_control_frame(window, int(at)) for at in which[keys].tolist()]
        rows = [
            (body.key, body.first, body.last, 1 << 60) for body in found if isinstance(body, control_frames.WriteKey)
        ]
        idempotency.restore_keys(core.producers.keys, rows, core.context.clock)

    patch.setattr(TopicReplayer, "_restore_keys", remember)


def keys_are_not_replayed(patch: Patch) -> None:
    patch.setattr(TopicReplayer, "_restore_keys", lambda *_: None)


def a_checkpoint_forgets_keys(patch: Patch) -> None:
    patch.setattr(idempotency, "encode_keys", lambda *_: ())


def a_key_names_other_seqs(patch: Patch) -> None:
    real = idempotency.restore_keys

    def restore(window: Any, found: Any, clock: Any) -> None:
        real(window, [(key, first + 1, last + 1, ts_ms) for key, first, last, ts_ms in found], clock)

    patch.setattr(idempotency, "restore_keys", restore)


BUGS = [
    a_key_is_not_written,
    a_key_counts_without_its_records,
    keys_are_not_replayed,
    a_checkpoint_forgets_keys,
    a_key_names_other_seqs,
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_sweep_finds_a_planted_bug(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)

    def histories() -> None:
        for seed in range(8):
            for durability in ("disk", "fsync"):
                run_history(seed, steps=20, durability=durability, shards=1 + seed % 2, images=6)

    with pytest.raises(AssertionError):
        histories()
