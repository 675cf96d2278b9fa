"""A power cut at any operation of relocation and recall loses nothing, and the work is completed afterwards.

Rows T12 to T14 of the fault matrix, G87 to G90 of the guarantees. The short form samples instants; the long one judges
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from tests.crash.topics.tier_histories import Arrangement, TierHarness, Violation, sweep

from tidelog.database import engine_of
from tidelog.disk.durability import remove_if_exists
from tidelog.engine import checkpoint
from tidelog.engine.segment import Segment
from tidelog.engine.tiers import RECALLED, Tiers
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error

ARRANGEMENTS = [
    Arrangement("directory", "none", 1, restarts=False),
    Arrangement("directory", "zstd", 2, restarts=True),
    Arrangement("objects", "none", 1, restarts=True),
    Arrangement("objects", "zstd", 2, restarts=False),
]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_a_power_cut_loses_nothing(arrangement: Arrangement, record_count: Callable[[str, int], None]) -> None:
    record_count("images of interrupted relocations", sweep(arrangement, step=29, images=1))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("store", "compression"), [*product(("directory", "objects"), ("none", "zstd"))])
def test_a_power_cut_at_every_operation_loses_nothing(
    store: str, compression: str, restarts: bool, shards: int, seed: int, record_count: Callable[[str, int], None]
) -> None:
    arrangement = Arrangement(store, compression, shards, restarts)  # type: ignore[arg-type]
    record_count("images of interrupted relocations", sweep(arrangement, step=1, images=4, seed=seed))


# Planted bugs: each must be found ---------------------------------------------------------------------------


def flip_before_verify(patch: pytest.MonkeyPatch) -> None:
    """The object is named without being read back, and the store loses half of it."""
    patch.setattr(Tiers, "_verify", lambda *_: None)
    copy = Tiers._copy

    def copy_half(self: Tiers, store: object, key: str, *rest: object) -> object:
        row = copy(self, store, key, *rest)  # type: ignore[arg-type]
        content = store.read(key, 0, row.length)  # type: ignore[attr-defined]
        store.put(key, [content[: len(content) // 2]])  # type: ignore[attr-defined]
        return row

    patch.setattr(Tiers, "_copy", copy_half)


def remove_file_before_flip_is_durable(patch: pytest.MonkeyPatch) -> None:
    """The data file goes as soon as the object is verified: the manifest still needs it."""
    relocate = Tiers._relocate

    def relocate_and_remove(self: Tiers, topic: TopicState, segment: Segment, pause: Callable[[int], None]) -> bool:
        done = relocate(self, topic, segment, pause)
        remove_if_exists(segment.files.disk, segment.path(".data"))
        segment.files.disk.sync_dir(segment.files.directory)
        segment.unmap()
        return done

    patch.setattr(Tiers, "_relocate", relocate_and_remove)


def remove_file_with_the_first_manifest(patch: pytest.MonkeyPatch) -> None:
    """The data file goes when the newest manifest names the object; the one before it needs the file."""
    run = checkpoint._remove_hot_copies

    def remove_early(context: object, state: checkpoint.CheckpointState) -> set[str]:
        state.hot_to_remove, state.hot_to_remove_next = state.hot_to_remove + state.hot_to_remove_next, []
        return run(context, state)  # type: ignore[arg-type]

    patch.setattr(checkpoint, "_remove_hot_copies", remove_early)


def delete_object_before_recall_is_durable(patch: pytest.MonkeyPatch) -> None:
    recall = Tiers._recall

    def recall_and_delete(self: Tiers, topic: TopicState, segment: Segment, pause: Callable[[int], None]) -> bool:
        key = segment.cold.key if segment.cold else ""
        done = recall(self, topic, segment, pause)
        assert self.store is not None
        self.store.delete(key)
        return done

    patch.setattr(Tiers, "_recall", recall_and_delete)


def recall_without_a_new_mapping(patch: pytest.MonkeyPatch) -> None:
    """What was mapped before stays in use: the object, which is deleted."""
    recall = Tiers._recall

    def recall_and_keep(self: Tiers, topic: TopicState, segment: Segment, pause: Callable[[int], None]) -> bool:
        with patch.context() as inner:
            inner.setattr(Segment, "unmap", lambda _: None)
            return recall(self, topic, segment, pause)

    patch.setattr(Tiers, "_recall", recall_and_keep)


def recall_without_sync(patch: pytest.MonkeyPatch) -> None:
    from tidelog.engine import tiers

    patch.setattr(tiers, "sync_file", lambda _: None)


def leave_the_objects_of_a_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiers, "_sweep", lambda _: None)


@pytest.mark.parametrize(
    ("plant", "store", "step"),
    [
        (flip_before_verify, "objects", 5),
        (remove_file_before_flip_is_durable, "objects", 5),
        (delete_object_before_recall_is_durable, "objects", 11),
        (recall_without_a_new_mapping, "objects", 23),
        (recall_without_sync, "directory", 7),
        (leave_the_objects_of_a_crash, "objects", 5),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], store: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, Error)):
        sweep(Arrangement(store), step=step, images=2)  # type: ignore[arg-type]


def test_a_file_that_only_the_older_manifest_needs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest manifest is damaged: the one before it, and the files that it names, serve all records."""

    def run() -> None:
        harness = TierHarness(Arrangement("objects"))
        harness.log = harness.open()
        for _ in range(3):
            harness.append("a")
        harness.checkpoint()
        harness.relocate()
        harness.checkpoint()
        newest = max(path for path in harness.disk.tree() if "/delta." in path)
        disk = harness.disk.reboot()
        disk.write_file(newest, b"damaged")
        harness.check_content(harness.open(disk), harness.model, "the older manifest")
        harness.objects.objects.clear()
        harness.check_content(harness.open(disk.reboot()), harness.model, "without the store")

    run()
    remove_file_with_the_first_manifest(monkeypatch)
    with pytest.raises((Violation, Error)):
        run()


def test_a_recalled_segment_is_marked() -> None:
    harness = TierHarness(Arrangement("objects"))
    harness.log = harness.open()
    for _ in range(3):
        harness.append("a")
    harness.checkpoint()
    harness.relocate()
    harness.recall()
    parts = engine_of(harness.log)._list_topics()
    assert any(part.cold is RECALLED for topic in parts for part in topic.index.parts if isinstance(part, Segment))
