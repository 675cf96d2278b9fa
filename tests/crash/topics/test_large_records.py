"""Large records under power cuts and kills at every disk operation, and bugs planted to prove the judge. That a blob
stays while the older manifest names it is in tests/unit/engine/test_large_records.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.crash.topics.large_records import (
    HISTORIES,
    Harness,
    drop_and_restart,
    route,
    small_limits,
    write_and_delete,
)

from tidelog.engine import blobs, large_append
from tidelog.engine.blobs import BlobTable
from tidelog.engine.large_append import BlobWriter
from tidelog.testing.simulated_disk import SimFile

History = Callable[[Harness], None]
CLASSES = ("memory", "disk", "fsync")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)


@pytest.mark.parametrize(
    ("history", "durability", "shards"),
    [
        (write_and_delete, "fsync", 1),
        (drop_and_restart, "disk", 2),
        (route, "fsync", 2),
        (write_and_delete, "memory", 3),
    ],
)
def test_a_crash_at_any_step_leaves_whole_records(history: History, durability: str, shards: int) -> None:
    harness = Harness(durability, shards, limit=2, step=20, seed=f"{history.__name__}/{durability}")
    harness.run(history)
    assert not harness.failures
    assert harness.states > 5


@pytest.mark.sweep
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("durability", CLASSES)
def test_a_crash_at_every_step_leaves_whole_records(history: History, durability: str, shards: int) -> None:
    harness = Harness(durability, shards, limit=12, seed=f"{history.__name__}/{durability}/{shards}")
    harness.run(history)
    assert not harness.failures


# ── planted bugs ──────────────────────────────────────────────────────────────────────────────────


def frame_before_blob(patch: pytest.MonkeyPatch) -> None:
    """The frame is synced although the blob is not."""
    real = SimFile.sync
    patch.setattr(SimFile, "sync", lambda self: None if "/spill-" in self.path else real(self))


def name_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The frame is synced although the name of the blob is not."""
    patch.setattr(large_append, "sync_directory", lambda *_: None)


def sweep_takes_named(patch: pytest.MonkeyPatch) -> None:
    """The sweep of a start knows only the blobs of the manifest, not those of the WAL."""
    real = blobs.sweep

    patch.setattr(blobs, "sweep", lambda disk, directory, _: real(disk, directory, set()))


def spill_stays(patch: pytest.MonkeyPatch) -> None:
    """Spill files are never removed."""
    patch.setattr(blobs, "sweep", lambda *_: [])


def removed_with_later_records(patch: pytest.MonkeyPatch) -> None:
    """A blob of a record that only the WAL has is removed with the others."""
    real = BlobTable.take_removed
    patch.setattr(BlobTable, "take_removed", lambda self, index, _: real(self, index, 1 << 60))
    patch.setattr(BlobTable, "to_row", lambda *_: b"")


def broken_stream_is_written(patch: pytest.MonkeyPatch) -> None:
    """What a broken stream has sent becomes a record."""
    real = large_append.append_stream

    def write(stream: Any, chunks: Any, name: str) -> Any:
        try:
            return real(stream, chunks, name)
        except Exception:
            stream._is_done = False
            stream._blob = BlobWriter(stream._topic)
            stream._blob.write(b"x" * 100)
            stream.submit().wait()
            raise

    patch.setattr(large_append, "append_stream", write)


@pytest.mark.parametrize(
    "plant",
    [
        frame_before_blob,
        name_not_synced,
        sweep_takes_named,
        spill_stays,
        removed_with_later_records,
        broken_stream_is_written,
    ],
)
def test_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(8):
        harness = Harness("fsync", 1, limit=3, step=4, seed=seed)
        harness.run(write_and_delete)
        if harness.failures:
            return
    pytest.fail(f"{plant.__name__} was not found")
