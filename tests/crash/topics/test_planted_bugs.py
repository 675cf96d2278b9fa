"""Bugs planted on purpose: each breaks one rule that the guarantees of topics hang on, and the sweep must find it.

A crash test that has never failed proves nothing. Every case patches the engine, or the disk under
one kind of its files, for one test, and names the letters of a history that have to catch it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.crash.topics.sweep import FAULTS, SweepDepth, SweepStats, fail_each, sweep
from tests.crash.topics.workloads import Arrangement, operations_named

from tidelog.disk.durability import WriteLatch
from tidelog.engine import (
    append,
    checkpoint,
    delete,
    engine,
    manifest,
    recovery,
    retention,
    segment,
    startup,
)
from tidelog.engine import (
    engine as control,
)
from tidelog.engine.topic_index import TopicIndex
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error
from tidelog.formats import control_frames, scan
from tidelog.formats.control_frames import Body, Delete, HeadWatermark, TopicDelete
from tidelog.testing import SimDisk
from tidelog.testing.simulated_disk import SimFile
from tidelog.wal import writer as file
from tidelog.wal.paths import remove_old_files

Patch = pytest.MonkeyPatch
SEEDS = 12


def nothing(*_: Any, **__: Any) -> None:
    return None


# The disk under one kind of files --------------------------------------------------------------------------


def no_sync_of(what: str) -> Callable[[Patch], None]:
    def bug(patch: Patch) -> None:
        real = SimFile.sync
        patch.setattr(SimFile, "sync", lambda self: None if what in self.path else real(self))

    return bug


def no_sync_of_names_in(what: str) -> Callable[[Patch], None]:
    def bug(patch: Patch) -> None:
        real = SimDisk.sync_dir
        patch.setattr(SimDisk, "sync_dir", lambda self, path: None if what in path else real(self, path))

    return bug


# Writing --------------------------------------------------------------------------------------------------


def sync_first_and_write_then(patch: Patch) -> None:
    real = file.Writer.write

    def write(self: file.Writer, *args: Any, **kwargs: Any) -> None:
        self.latch.sync_or_trip(self._file)
        real(self, *args, **kwargs)
        self._synced = self._pos

    patch.setattr(file.Writer, "write", write)


def readers_see_it_before_it_is_written(patch: Patch) -> None:
    early: set[int] = set()
    prepare, done = append.Append.before_write, append.Append.on_done

    def published(self: append.Append) -> None:
        prepare(self)
        done(self, None)
        early.add(id(self))

    patch.setattr(append.Append, "before_write", published)
    patch.setattr(append.Append, "on_done", lambda self, error: None if id(self) in early else done(self, error))


def seqs_are_not_reserved(patch: Patch) -> None:
    patch.setattr(append.Append, "before_write", nothing)


def reserved_seqs_are_given_again(patch: Patch) -> None:
    real = control_frames.decode

    def decode(kind: int, body: Any) -> Any:
        found = real(kind, body)
        return HeadWatermark(0) if isinstance(found, HeadWatermark) else found

    patch.setattr(control_frames, "decode", decode)


def a_failed_write_stays_and_its_seqs_are_given_again(patch: Patch) -> None:
    done = append.Append.on_done

    def failed(self: append.Append, error: Error | None) -> None:
        done(self, error)
        if error is not None:
            self.topic.last_assigned_seq = self.topic.index.head

    patch.setattr(append.Append, "on_done", failed)
    patch.setattr(file.Writer, "rollback", lambda self, error: self.latch.retryable_error(error, "writing"))


def writing_goes_on_after_a_failed_sync(patch: Patch) -> None:
    def sync(_: WriteLatch, file: SimFile) -> None:
        with suppress(OSError):
            file.sync()

    patch.setattr(WriteLatch, "check", nothing)
    patch.setattr(WriteLatch, "sync_or_trip", sync)


def settings_are_not_synced(patch: Patch) -> None:
    real = control.ControlCommit.__init__

    def init(self: control.ControlCommit, *args: Any) -> None:
        real(self, *args)
        self.durable = False

    patch.setattr(control.ControlCommit, "__init__", init)


# Removing -------------------------------------------------------------------------------------------------


def a_failed_delete_is_applied(patch: Patch) -> None:
    real = delete.DeleteCommit.on_done

    def done(self: delete.DeleteCommit, error: Error | None) -> None:
        if error is not None:
            with self.topic.lock:
                delete.apply_delete(self.topic, self.body)
        real(self, error)

    patch.setattr(delete.DeleteCommit, "on_done", done)


def deletes_are_not_synced(patch: Patch) -> None:
    real = delete.DeleteCommit.__init__

    def init(self: delete.DeleteCommit, *args: Any) -> None:
        real(self, *args)
        self.durable = False

    patch.setattr(delete.DeleteCommit, "__init__", init)


def deletes_are_not_kept_by_a_checkpoint(patch: Patch) -> None:
    real = segment.Segment.encode_deletions

    def vector(self: segment.Segment) -> bytes:
        self._deleted = None
        return real(self)

    patch.setattr(segment.Segment, "encode_deletions", vector)


def deletes_are_replayed_last_and_without_their_bound(patch: Patch) -> None:
    real, finish = delete.apply_delete, recovery._finish_topic
    late: list[tuple[TopicState, Delete]] = []

    def finished(core: TopicState, *args: Any, **kwargs: Any) -> None:
        for mine, body in late:
            if mine is core:
                real(core, Delete(before_seq=body.before_seq, match=body.match, seqs=body.seqs, bound_head=None))
        finish(core, *args, **kwargs)

    patch.setattr(delete, "replay_delete", lambda core, body, *_: late.append((core, body)))
    patch.setattr(recovery, "_finish_topic", finished)


def from_module(name: str) -> bool:
    """Whether whoever asks was called from this module."""
    return str(sys._getframe(2).f_code.co_filename).endswith(f"/{name}")


def a_drop_is_not_logged(patch: Patch) -> None:
    real = engine.Engine._submit_control

    def control(self: engine.Engine, core: TopicState, body: Body, apply: Callable[[], None]) -> None:
        if isinstance(body, TopicDelete):
            apply()
        else:
            real(self, core, body, apply)

    patch.setattr(engine.Engine, "_submit_control", control)


def a_topic_made_again_gets_the_old_id(patch: Patch) -> None:
    real = engine.Engine.drop

    def drop(self: engine.Engine, name: str, **kwargs: Any) -> bool:
        done = real(self, name, **kwargs)
        self._next_id -= 1
        return done

    patch.setattr(engine.Engine, "drop", drop)


def caps_are_counted_in_seqs(patch: Patch) -> None:
    real = TopicIndex.floor_for_caps

    def over(self: TopicIndex, cap_records: int, cap_bytes: int, head: int | None = None) -> int:
        if not cap_records:
            return real(self, cap_records, cap_bytes, head)
        return max((self.head if head is None else min(head, self.head)) - cap_records + 1, 0)

    patch.setattr(TopicIndex, "floor_for_caps", over)


def caps_are_kept_once_at_the_end_of_recovery(patch: Patch) -> None:
    real = TopicState.enforce_caps
    patch.setattr(TopicState, "enforce_caps", lambda self: None if from_module("recovery.py") else real(self))


def floors_are_not_hardened(patch: Patch) -> None:
    real = retention.WatermarkCommit.__init__

    def init(self: retention.WatermarkCommit, *args: Any) -> None:
        real(self, *args)
        self.durable = False

    patch.setattr(retention.WatermarkCommit, "__init__", init)


# Checkpoints ----------------------------------------------------------------------------------------------


def the_wal_is_let_go_of_before_the_snapshot(patch: Patch) -> None:
    real = manifest.ManifestStore.save

    def save(self: manifest.ManifestStore, changed: Any, dropped: Any, made: manifest.Positions, **how: Any) -> None:
        for row in made.groups:
            remove_old_files(self._disk, f"{self._root}/wal", row.key, row.first)
        real(self, changed, dropped, made, **how)

    patch.setattr(manifest.ManifestStore, "save", save)


def a_snapshot_says_more_than_the_segments_hold(patch: Patch) -> None:
    patch.setattr(checkpoint, "_write_topic", nothing)


def positions_are_taken_too_late(patch: Patch) -> None:
    real = manifest.ManifestStore.save

    def save(self: manifest.ManifestStore, changed: Any, dropped: Any, made: manifest.Positions, **how: Any) -> None:
        further = tuple(manifest.GroupRow(row.key, row.first, row.pos + 120) for row in made.groups)
        real(self, changed, dropped, manifest.Positions(further, made.next_topic_id), **how)

    patch.setattr(manifest.ManifestStore, "save", save)


def a_topic_that_was_written_is_not_dirty(patch: Patch) -> None:
    real = TopicState.mark_dirty

    def mark_dirty(self: TopicState) -> None:
        if not self.index.head:
            real(self)

    patch.setattr(TopicState, "mark_dirty", mark_dirty)


# Recovery -------------------------------------------------------------------------------------------------


def torn_tails_are_left_in_place(patch: Patch) -> None:
    patch.setattr(startup, "prepare_for_writing", lambda *_, **__: [])


def half_a_batch_counts(patch: Patch) -> None:
    patch.setattr(scan, "MORE", 0)


def a_jump_in_seqs_ends_the_replay_of_a_topic(patch: Patch) -> None:
    real = recovery.TopicReplayer._append_records

    def dense(self: recovery.TopicReplayer, core: TopicState, run: recovery._TopicFrames) -> None:
        if int(run.window.headers["seq"][run.which][0]) <= core.index.head + 1:
            real(self, core, run)

    patch.setattr(recovery.TopicReplayer, "_append_records", dense)


def ids_start_again_after_a_restart(patch: Patch) -> None:
    real = recovery.recover
    patch.setattr(startup, "recover", lambda *args, **kwargs: real(*args, **kwargs)._replace(next_topic_id=1))


PLANTED: list[tuple[Callable[[Patch], None], str, str]] = [
    (no_sync_of("/wal-"), "no sync of the WAL", "one"),
    (no_sync_of(".data"), "no sync of segments", "checkpoint"),
    (no_sync_of(".idx"), "no sync of indexes", "checkpoint"),
    (no_sync_of(".del"), "no sync of deletion vectors", "seqs checkpoint"),
    (no_sync_of(".bin"), "no sync of snapshots", "checkpoint"),
    (no_sync_of_names_in("/wal"), "no sync of the WAL's names", "batch batch"),
    (no_sync_of_names_in("/topics/"), "no sync of segments' names", "checkpoint"),
    (no_sync_of_names_in("/meta"), "no sync of snapshots' names", "batch checkpoint batch checkpoint batch checkpoint"),
    (sync_first_and_write_then, "", "one"),
    (readers_see_it_before_it_is_written, "", "one"),
    (seqs_are_not_reserved, "", "one"),
    (reserved_seqs_are_given_again, "", "one"),
    (settings_are_not_synced, "", "reclass"),
    (deletes_are_not_synced, "", "seqs"),
    (deletes_are_not_kept_by_a_checkpoint, "", "seqs checkpoint"),
    (deletes_are_replayed_last_and_without_their_bound, "", "prefix one kill"),
    (a_drop_is_not_logged, "", "drop"),
    (a_topic_made_again_gets_the_old_id, "", "drop"),
    (caps_are_counted_in_seqs, "", "seqs cap"),
    (caps_are_kept_once_at_the_end_of_recovery, "", "cap seqs one"),
    (floors_are_not_hardened, "", "expire"),
    (the_wal_is_let_go_of_before_the_snapshot, "", "batch batch checkpoint"),
    (a_snapshot_says_more_than_the_segments_hold, "", "one checkpoint"),
    (positions_are_taken_too_late, "", "checkpoint one"),
    (a_topic_that_was_written_is_not_dirty, "", "one checkpoint one checkpoint"),
    (torn_tails_are_left_in_place, "", "batch"),
    (half_a_batch_counts, "", "batch"),
    (a_jump_in_seqs_ends_the_replay_of_a_topic, "", "kill one kill"),
    (ids_start_again_after_a_restart, "", "reopen drop"),
]
FAILING: list[tuple[Callable[[Patch], None], str, str]] = [
    (a_failed_write_stays_and_its_seqs_are_given_again, "write ENOSPC late", "batch one"),
    (writing_goes_on_after_a_failed_sync, "sync dropped", "one one"),
    (a_failed_delete_is_applied, "write ENOSPC", "seqs"),
]


Run = Callable[[int, SweepStats], object]


def caught(bug: Callable[[Patch], None], run: Run) -> None:
    """The bug is found with one of a few seeds; and it is the bug that was found, because without it the same history
    of the same seed is fine."""
    tally = SweepStats()
    for seed in range(SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            try:
                run(seed, tally)
            except (Error, OSError, AssertionError) as refused:
                tally.failures.append(str(refused))  # the engine itself did not go on: found, and louder
        if tally.failures:
            healthy = SweepStats()
            run(seed, healthy)
            assert not healthy.failures, f"without the bug as well: {healthy.failures[0]}"
            return
    raise AssertionError(f"it went unnoticed in {tally.states} states")


@pytest.mark.sweep
@pytest.mark.parametrize(("bug", "name", "history"), PLANTED, ids=[name or bug.__name__ for bug, name, _ in PLANTED])
def test_the_sweep_catches(bug: Callable[[Patch], None], name: str, history: str) -> None:
    del name
    depth = SweepDepth(limit=12, thorough=4)
    caught(
        bug, lambda seed, tally: sweep(operations_named(history), depth, seed=seed, shards=1 + seed % 2, stats=tally)
    )


@pytest.mark.sweep
@pytest.mark.parametrize(("bug", "fault", "history"), FAILING, ids=[bug.__name__ for bug, _, _ in FAILING])
def test_the_sweep_catches_on_a_failing_disk(bug: Callable[[Patch], None], fault: str, history: str) -> None:
    [struck] = [known for known in FAULTS if known.name == fault]
    caught(
        bug,
        lambda seed, tally: fail_each(struck, operations_named(history), seed=seed, shards=1, limit=None, stats=tally),
    )


@pytest.mark.slow
def test_only_a_kill_shows_that_the_last_delete_of_class_disk_is_lost(monkeypatch: Patch) -> None:
    """A power cut may lose it, so the same bytes are right after one."""
    real = delete.replay_delete

    def replay_by_seq(core: Any, body: Any, number: int, ts_ms: int) -> None:
        if body.match is None:
            real(core, body, number, ts_ms)

    monkeypatch.setattr(delete, "replay_delete", replay_by_seq)
    how = Arrangement(("disk", "disk"), "fd", 1, False)
    power, both = (
        sweep(operations_named("one prefix"), SweepDepth(limit=4, kills=kills), seed=0, how=how).failures
        for kills in (False, True)
    )
    assert not power
    assert "a kill" in both[0]
