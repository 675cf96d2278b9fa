"""Bugs planted on purpose: each breaks one rule that the guarantees hang on, and the sweep must find it.

A crash test that has never failed proves nothing. Every case patches the library for one test
and names the history and the codec that have to catch it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.crash.oracle import Oracle
from tests.crash.sweep import judge, sweep
from tests.crash.workloads import WORKLOADS, LogHarness

from tidelog.commitlog import cleaner, log_state, recovery, segment
from tidelog.commitlog.codecs.rustlog import RustlogCodec
from tidelog.commitlog.segment import ActiveSegment, LogFiles
from tidelog.commitlog.storage import Storage
from tidelog.disk import durability
from tidelog.disk.durability import WriteLatch
from tidelog.disk.interface import Disk
from tidelog.errors import Error
from tidelog.formats import scan
from tidelog.testing import SimDisk
from tidelog.types import Buffer

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None:
    return None


def ack_before_the_sync(patch: Patch) -> None:
    patch.setattr(ActiveSegment, "sync", nothing)


def seal_without_a_sync(patch: Patch) -> None:
    patch.setattr(ActiveSegment, "sync_all", nothing)


def no_directory_sync(patch: Patch) -> None:
    patch.setattr(SimDisk, "sync_dir", nothing)


def rename_before_the_bytes_are_synced(patch: Patch) -> None:
    def write_temporary(disk: Disk, temporary: str, data: Buffer) -> None:
        file = disk.open(temporary, "create")
        file.write(0, data)
        file.close()

    patch.setattr(segment, "write_temporary", write_temporary)
    patch.setattr(durability, "write_temporary", write_temporary)


def a_committed_swap_is_not_finished(patch: Patch) -> None:
    patch.setattr(recovery, "finish_replacements", lambda *_: [])
    patch.setattr(segment, "finish_replacements", lambda *_: [])


def index_swapped_in_before_its_store(patch: Patch) -> None:
    def wrong(files: LogFiles, base: int) -> None:
        index = files.side_path(base, files.codec.side_suffixes[0])
        files.drop_cached(base)
        files.disk.rename(f"{index}.compacted", index)
        files.disk.sync_dir(files.directory)
        files.disk.rename(f"{files.data_path(base)}.compacted", files.data_path(base))
        files.disk.sync_dir(files.directory)

    patch.setattr("tidelog.commitlog.cleaner.commit_replacement", wrong)


def a_removal_is_not_announced(patch: Patch) -> None:
    patch.setattr("tidelog.commitlog.cleaner.log_state.save_manifest", nothing)


def torn_tail_left_in_place(patch: Patch) -> None:
    real = recovery._repair_active

    def repair_without_cutting(files: LogFiles, base: int, data: Any, content: bytes, *rest: Any) -> None:
        class Uncut:
            def truncate(self, size: int) -> None: ...
            def sync(self) -> None: ...

        real(files, base, Uncut(), content, *rest)  # type: ignore[arg-type]

    patch.setattr(recovery, "_repair_active", repair_without_cutting)


def broken_stream_not_rolled_back(patch: Patch) -> None:
    def roll_back(self: Storage) -> None:
        self._size += self._staged_bytes
        self._staged_bytes, self._has_uncommitted_bytes = 0, False

    patch.setattr(Storage, "roll_back", roll_back)


def checksums_not_synced(patch: Patch) -> None:
    real = RustlogCodec.__init__

    def init(self: RustlogCodec, config: Any) -> None:
        real(self, config)
        self.authoritative_sides = frozenset()

    patch.setattr(RustlogCodec, "__init__", init)


def half_a_batch_counts(patch: Patch) -> None:
    patch.setattr(scan, "MORE", 0)


def a_manifest_that_is_not_synced(patch: Patch) -> None:
    def write_temporary(disk: Disk, temporary: str, data: Buffer) -> None:
        durability.remove_if_exists(disk, temporary)
        file = disk.open(temporary, "create")
        file.write(0, data)
        file.close()

    patch.setattr(log_state, "write_temporary", write_temporary)


def a_truncation_is_not_announced(patch: Patch) -> None:
    patch.setattr(cleaner, "_save_intent", nothing)


def numbering_starts_again_after_expiry(patch: Patch) -> None:
    real = LogFiles.remove_segment

    def remove(self: LogFiles, base: int) -> None:
        real(self, base)
        for name in self.disk.list_dir(self.directory):
            known = self.codec.parse_file_name(name)
            if known is not None and known[0] > base and self.disk.stat(self.data_path(known[0])) is not None:
                size = self.disk.stat(self.data_path(known[0]))
                if size is not None and size.size == 0:
                    self.disk.remove(f"{self.directory}/{name}")

    patch.setattr(LogFiles, "remove_segment", remove)


PLANTED: list[tuple[Callable[[Patch], None], str, str, str]] = [
    (ack_before_the_sync, "append_one_by_one", "tide", "batch"),
    (ack_before_the_sync, "append_one_by_one", "rustlog", "each"),
    (seal_without_a_sync, "sync_by_interval", "narwhal", "interval"),
    (no_directory_sync, "append_one_by_one", "tide", "batch"),
    (rename_before_the_bytes_are_synced, "compact_by_key", "rustlog", "batch"),
    (a_committed_swap_is_not_finished, "compact_by_key", "rustlog", "batch"),
    (index_swapped_in_before_its_store, "compact_between_kept_records", "laminar", "batch"),
    (a_removal_is_not_announced, "retain_by_size", "laminar", "batch"),
    (a_removal_is_not_announced, "retain_by_size", "tide", "batch"),
    (torn_tail_left_in_place, "append_one_by_one", "narwhal", "batch"),
    (broken_stream_not_rolled_back, "stream_records", "tide", "batch"),
    (checksums_not_synced, "append_one_by_one", "rustlog", "batch"),
    (half_a_batch_counts, "append_batches", "tide", "batch"),
    (a_manifest_that_is_not_synced, "seal_and_go_on", "narwhal", "batch"),
    (a_truncation_is_not_announced, "truncate_inside_and_across", "rustlog", "batch"),
    (numbering_starts_again_after_expiry, "expire_everything", "narwhal", "batch"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "history", "codec", "sync"), PLANTED, ids=[f"{bug.__name__}-{codec}" for bug, _, codec, _ in PLANTED]
)
def test_the_sweep_catches(
    bug: Callable[[Patch], None], history: str, codec: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    try:
        tally = sweep(codec, WORKLOADS[history], sync=sync, limit=None)
    except (Error, OSError, AssertionError):
        return  # the library itself refused to go on: caught, and louder
    assert tally.failures, f"{bug.__name__} went unnoticed in {tally.states} states"


def test_writing_on_after_a_failed_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the disk drops the pages of one sync and says so; a log that does not latch acks the next record
    on top of a hole."""

    def lost_after_a_failed_sync() -> bool:
        disk, oracle = SimDisk(), Oracle()
        bench = LogHarness("tide", disk, oracle, sync="batch")
        log = bench.open()
        bench.append(log)
        disk.fail_sync("dropped", path=".data")
        for _ in range(3):
            with suppress(Error):
                bench.append(log)
        return judge("tide", disk.crash_image("none"), oracle, "batch") is not None

    assert not lost_after_a_failed_sync()
    monkeypatch.setattr(WriteLatch, "check", nothing)
    monkeypatch.setattr(WriteLatch, "sync_or_trip", lambda self, file: suppress_error(file.sync))
    assert lost_after_a_failed_sync()


def suppress_error(call: Callable[[], None]) -> None:
    with suppress(OSError):
        call()
