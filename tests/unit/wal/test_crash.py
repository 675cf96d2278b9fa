"""Power cuts before every disk operation of writing, rotating, closing and recovering (G1, G3, G4, G23–G25, G31, G32,
G36, G47, G48, G52, G53): the columns TW, C±, LU and RR of the rows T1, T2, T3, T16 and T17.

A history runs once; an observer looks at every instant and takes all that a restart could find there.
Each image is recovered and compared with the outcomes that callers got:

    published of success, durable     there, whole
    DiskFull                     not there
    anything else                there as a whole or not at all, and with it all that follows in the file

Then it is recovered again, which must change nothing, and written to, and cut off once more.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from tests.unit.wal.harness import (
    FILE_BYTES,
    SubmittedWrite,
    WalContents,
    WalHarness,
    append,
    inspect_wal,
    recover,
)

from tidelog.disk.durability import WriteLatch
from tidelog.disk.interface import File
from tidelog.errors import DiskFull, Error, Latched
from tidelog.formats import scan
from tidelog.testing import SimDisk, SyncMode
from tidelog.wal import Position, Shard, Writer, recovery
from tidelog.wal import writer as file
from tidelog.wal.writer import PreallocatedFile

Patch = pytest.MonkeyPatch


class Wrong(BaseException):
    """Leaves a history through every except clause of the library."""


@dataclass
class History:
    """One WAL through several processes, and what its callers were published."""

    disk: SimDisk
    writes: list[SubmittedWrite] = field(default_factory=list)
    must: list[SubmittedWrite] = field(default_factory=list)
    gone: list[SubmittedWrite] = field(default_factory=list)

    def start(self, *, batch_frames: int = 4096) -> WalHarness:
        """A process: recovers what is there, begins a new file. What it found stays, what it did not is gone."""
        found = recover(self.disk)
        self._settled(found)
        return WalHarness(
            self.disk,
            first=found.next_first,
            history=self.writes,
            on_write_done=self._on_write_done,
            batch_frames=batch_frames,
        )

    def _settled(self, found: WalContents) -> None:
        there = present(self.writes, found.datas)
        self.must[:] = there
        self.gone[:] = [write for write in self.writes if write not in there]

    def _on_write_done(self, write: SubmittedWrite) -> None:
        if write.acked and write.durable:
            self.synced()
            self.must.append(write)
        elif isinstance(write.outcomes[0], DiskFull):
            self.gone.append(write)

    def synced(self) -> None:
        """All that was published of success so far is durable."""
        self.must += [write for write in self.writes if write.acked and write not in self.must + self.gone]

    def judge(self, found: WalContents) -> str | None:
        """What is wrong with this recovery, or None."""
        if found.losses or found.missing:
            return f"a crash is taken for damage: {found.losses}, missing {found.missing}"
        there = present(self.writes, found.datas)
        if [data for write in there for data in write.datas] != found.datas:
            return f"{found.datas} is not made of whole writes in their order"
        for write in self.must:
            if write not in there:
                return f"{write} was acked and is lost"
        for write in there:
            if write in self.gone:
                return f"{write} was refused, or was lost before, and is back"
        last = self.writes.index(there[-1]) if there else -1
        for write in self.writes[: last + 1]:
            if write not in there and write not in self.gone:
                return f"{write} is lost and a later write is not"
        if found.next_first != found.frames + 1:
            return f"the next file is {found.next_first}, there are {found.frames} frames"
        return None


def present(writes: list[SubmittedWrite], datas: list[bytes]) -> list[SubmittedWrite]:
    """The writes that these records belong to. No two writes of a history have a record in common."""
    return [write for write in writes if write.datas[0] in datas]


@dataclass
class CrashCounts:
    states: int = 0
    failures: list[str] = field(default_factory=list)


Workload = Callable[[History], None]


def sweep(
    workload: Workload,
    *,
    limit: int | None = None,
    again: int = 1,
    again_every: int = 1,
    counts: CrashCounts | None = None,
) -> CrashCounts:
    """Judge every crash state of a history up to the first failure; for `again` images of each instant also those of
    the recovery itself, at one instant in `again_every`."""
    disk, counts = SimDisk(trace=True), counts or CrashCounts()
    disk.make_dir("data")
    history = History(disk)
    seen: set[tuple[bytes, int, frozenset[int], frozenset[int]]] = set()

    def examine(op: int) -> None:
        nested = again if op % again_every == 0 else 0
        for image in disk.images(random=Random(op), limit=limit):
            must, gone = frozenset(map(id, history.must)), frozenset(map(id, history.gone))  # `writes` keeps them
            key = (image.disk.digest(), len(history.writes), must, gone)
            if key in seen:
                continue
            seen.add(key)
            counts.states += 1
            wrong = None
            if nested:
                nested -= 1
                wrong = _crash_in_recovery(image.disk.reboot(), history, counts)
            if (wrong := wrong or _judge(image.disk, history)) is not None:
                where = disk.trace[-1] if disk.trace else "the start"
                counts.failures.append(f"{workload.__name__} after {where}, {image.label}: {wrong}")
                raise Wrong

    disk.on_op = examine
    with suppress(Wrong):
        workload(history)
        examine(disk.op_count + 1)
    return counts


def _judge(disk: SimDisk, history: History) -> str | None:
    found = recover(disk)
    if (wrong := history.judge(found)) is not None:
        return wrong
    before = disk.digest()
    again = recover(disk)
    if again != found._replace(cut=None, quarantined=[]):
        return f"a second recovery finds {again}, the first found {found}"
    if disk.digest() != before:
        return "a second recovery changed something"
    WalHarness(disk, first=found.next_first).write(b"after the crash")
    after = inspect_wal(disk.crash_image("none"))
    if (after.datas, after.cut, after.missing) != ([*found.datas, b"after the crash"], None, []):
        return f"a write after the crash is not found: {after}"
    return None


def _crash_in_recovery(disk: SimDisk, history: History, counts: CrashCounts) -> str | None:
    wrongs: list[str] = []

    def examine(op: int) -> None:
        for image in disk.images(random=Random(op), limit=6):
            counts.states += 1
            if (wrong := _judge(image.disk, history)) is not None:
                wrongs.append(f"and again before op {op} of recovery, {image.label}: {wrong}")
                raise Wrong

    disk.on_op = examine
    with suppress(Wrong):
        found = recover(disk)
        WalHarness(disk, first=found.next_first)
    return wrongs[0] if wrongs else None


# The histories.

A, B, C, D, E, F = (letter * 400 for letter in (b"a", b"b", b"c", b"d", b"e", b"f"))


def one_by_one(history: History) -> None:
    bench = history.start()
    for data in (A, b"short", B, C, D, b"x" * 900, E):
        bench.write(data)


def with_a_spare(history: History) -> None:
    """Every file but the first was made ahead of time."""
    bench = history.start()
    for data in (A, b"short", B, C, D, b"x" * 900, E, F, b"g" * 700, b"h" * 800):
        bench.write(data)
        bench.shard.tick()


def with_and_without_promise(history: History) -> None:
    bench = history.start()
    for number, data in enumerate((A, B, C, D, E, F)):
        bench.write(data, durable=False)
        if number == 1:
            bench.write(b"durable")
        if number == 2:  # what comes next is not synced when the file is left
            bench.shard.tick()
            history.synced()


def disk_lags(history: History) -> None:
    """More waits for the disk than a rotation should wait for: files are made longer, and left when they are synced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "EXTEND_UNSYNCED_BYTES_MIN", FILE_BYTES // 2)
        patch.setattr(file, "LARGE_SYNC_BYTES", 1)
        bench = history.start()
        for data in (A, B, C, D, E, F):
            bench.write(data, durable=False)
        assert bench.writer.rotations == 0, "it was made longer for the fifth"
        bench.shard.tick()
        history.synced()
        bench.write(b"g" * 700, durable=False)
        bench.write(b"h" * 800)
        assert bench.writer.rotations == 1, "little waited"


def batches(history: History) -> None:
    bench = history.start(batch_frames=5)
    for datas, durable in (([A], False), ([b"1", B, b"2"], False), ([C], True), ([b"3", b"4"], False), ([D, E], False)):
        bench.submit(datas, durable=durable)
    while bench.shard.commit_pending():
        pass
    bench.submit([F], durable=False)
    bench.submit([b"5", b"6", b"7"], durable=True)
    bench.shard.commit_pending()


def begun_and_ended(history: History) -> None:
    """As an event loop does it: written by one call, synced by another, with more queued between them."""
    bench = history.start()
    shard = bench.shard

    def end() -> None:
        if shard.has_inflight_batch:
            assert shard._take_over_batch()

    for number, data in enumerate((A, B, C, D, E, F)):
        bench.submit([data], durable=number % 3 != 1)
        if not shard.begin_commit():
            end()
            shard.commit_pending()  # a new file, which is the writer thread's
        bench.submit([b"meanwhile %d" % number], durable=number % 2 == 0)
        end()
    if bench.writer.is_full(600):
        bench.write(b"in a new file" * 40)
    # A mark and two whole frames: the next write is as long as the mark and the first of them.
    history.disk.fail("write", error=errno.ENOSPC, partial=70 + 55 + 166 + 10)
    for data in (b"no frame.", b"space" * 30, b"more" * 30):
        bench.submit([data])
    assert shard.begin_commit()
    bench.submit([b"later"])
    end()
    while shard.begin_commit():
        end()


def larger_than_a_file(history: History) -> None:
    bench = history.start()
    bench.write(A)
    bench.write(b"x" * 3000, durable=False)
    bench.write(B)
    bench.write(b"y" * 2500)


def disk_full(history: History) -> None:
    bench = history.start()
    bench.write(A, durable=False)
    for number, landed in enumerate((0, 100, 600, 1200)):
        history.disk.fail("write", error=errno.ENOSPC, partial=landed)
        with suppress(DiskFull):
            bench.write(*[b"%d/%d" % (number, part) * 30 for part in range(8)], durable=number % 2 == 0)
        bench.write(b"between %d" % number, durable=number == 2)
    bench.write(b"x" * 900, durable=False)
    history.disk.fail("write", 2, error=errno.ENOSPC, partial=100)  # the first is CURRENT's: this one is in a new file
    with suppress(DiskFull):
        bench.write(B, C, durable=False)
    bench.write(D)


def killed_and_started_again(history: History) -> None:
    bench = history.start()
    bench.write(A)
    bench.write(B, durable=False)
    bench = history.start()
    bench.write(C, durable=False)
    history.start()
    bench = history.start()
    bench.write(D)


def closed_and_started_again(history: History) -> None:
    for datas in ((A, B), (C, D, E, b"x" * 900), (), (F,)):
        bench = history.start()
        for data in datas:
            bench.write(data, durable=False)
        bench.shard.close()
        history.synced()


def failed_sync(mode: SyncMode) -> Workload:
    def history_(history: History) -> None:
        bench = history.start()
        bench.write(A)
        bench.write(b"loose", durable=False)
        history.disk.fail_sync(mode)
        with suppress(Latched):
            bench.write(B)
        for _ in range(2):
            with suppress(Latched):
                bench.write(C)
        bench = history.start()
        bench.write(D)
        bench.write(E)

    history_.__name__ = f"failed_sync_{mode}"
    return history_


def failed_rotation(call: Any, at: int, error: int) -> Workload:
    def history_(history: History) -> None:
        bench = history.start()
        bench.write(b"x" * 1500)
        bench.write(b"loose", durable=False)
        history.disk.fail(call, at, error)
        with suppress(Error):
            bench.write(b"y" * 1500)
        with suppress(Error):
            bench.write(A)
        bench = history.start()
        bench.write(B)

    history_.__name__ = f"failed_rotation_{call}_{at}"
    return history_


WORKLOADS: list[Workload] = [
    one_by_one,
    with_a_spare,
    with_and_without_promise,
    disk_lags,
    batches,
    larger_than_a_file,
    disk_full,
    killed_and_started_again,
    closed_and_started_again,
    begun_and_ended,
    *(failed_sync(mode) for mode in ("dropped", "reverted", "kept")),
    failed_rotation("create", 1, errno.EIO),
    failed_rotation("reserve", 1, errno.ENOSPC),
    failed_rotation("sync", 2, errno.EIO),
    failed_rotation("sync_dir", 1, errno.EIO),
    failed_rotation("rename", 1, errno.EIO),
    failed_rotation("sync_dir", 2, errno.EIO),
]


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_crash_at_any_operation_keeps_the_promises(
    workload: Workload, record_count: Callable[[str, int], None]
) -> None:
    counts = sweep(workload, limit=3, again_every=3)
    assert not counts.failures, counts.failures[0]
    assert counts.states > 20
    record_count("crash states", counts.states)


@pytest.mark.sweep
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_every_state_of_every_history(workload: Workload, record_count: Callable[[str, int], None]) -> None:
    counts = sweep(workload, limit=None, again=8)
    assert not counts.failures, counts.failures[0]
    record_count("crash states", counts.states)


def test_histories_rotate_and_end() -> None:
    """Method: what they are for is done at all."""
    for workload in WORKLOADS:
        disk = SimDisk()
        disk.make_dir("data")
        history = History(disk)
        workload(history)
        found = inspect_wal(disk)
        assert history.judge(found) is None, workload.__name__
        assert len([name for name in disk.tree() if name.endswith(".log")]) > 1, workload.__name__


# Bugs planted on purpose: each breaks one rule, and the sweep must find it.


def nothing(*_: Any, **__: Any) -> None:
    return None


def ack_before_the_sync(patch: Patch) -> None:
    patch.setattr(Shard, "_sync", nothing)


def ack_what_was_only_begun(patch: Patch) -> None:
    begin = Shard.begin_commit

    def published(self: Shard, *, gathered_us: int = 0) -> bool:
        done = begin(self, gathered_us=gathered_us)
        if self._inflight is not None:
            self._notify_batch(self._inflight.batch, None)
            self._inflight = self._inflight._replace(batch=[])
        return done

    patch.setattr(Shard, "begin_commit", published)


def no_directory_sync(patch: Patch) -> None:
    patch.setattr(SimDisk, "sync_dir", nothing)


def rotate_without_a_sync(patch: Patch) -> None:
    real = Writer._rotate

    def rotate(self: Writer, *, may_use_reserve: bool) -> None:
        self._sync = lambda **_: False  # type: ignore[method-assign]
        real(self, may_use_reserve=may_use_reserve)
        del self._sync

    patch.setattr(Writer, "_rotate", rotate)


def a_failed_write_stays_where_it_is(patch: Patch) -> None:
    patch.setattr(Writer, "rollback", lambda self, error: self.latch.retryable_error(error, "writing"))


def a_failed_write_is_taken_back_but_not_durably(patch: Patch) -> None:
    def undo(self: Writer, error: OSError) -> Error:
        self._file.truncate(self._pos)
        self._file.allocate(FILE_BYTES)
        return self.latch.retryable_error(error, "writing")

    patch.setattr(Writer, "rollback", undo)


def write_on_after_a_failed_sync(patch: Patch) -> None:
    def sync(self: WriteLatch, file: File) -> None:
        try:
            file.sync()
        except OSError as error:
            raise Latched(f"{self} is not really") from error

    patch.setattr(WriteLatch, "sync_or_trip", sync)


def half_a_batch_counts(patch: Patch) -> None:
    patch.setattr(scan, "MORE", 0)


def a_torn_tail_stays(patch: Patch) -> None:
    patch.setattr(recovery, "_rewrite_and_sync", nothing)


def recovered_bytes_are_synced_but_not_written_again(patch: Patch) -> None:
    real = recovery._rewrite_and_sync
    patch.setattr(recovery, "_rewrite_and_sync", lambda disk, path, _, hi: real(disk, path, hi, hi))


def recovery_syncs_nothing(patch: Patch) -> None:
    real = recovery._rewrite_and_sync

    def settle(disk: Any, path: str, lo: int | None, hi: int | None) -> None:
        with patch.context() as inner:
            inner.setattr("tidelog.testing.simulated_disk.SimFile.sync", nothing)
            real(disk, path, lo, hi)

    patch.setattr(recovery, "_rewrite_and_sync", settle)


def the_number_of_the_newest_file_is_used_again(patch: Patch) -> None:
    real = recovery.Replay.__iter__

    def found(self: recovery.Replay) -> Iterator[recovery.FrameWindow]:
        yield from real(self)
        self.next_file_number = max(self.file_numbers, default=1)

    patch.setattr(recovery.Replay, "__iter__", found)


def marks_are_written_before_the_sync(patch: Patch) -> None:
    """A mark names what was written, and not what was synced."""
    real = Writer._next_mark

    def mark(self: Writer) -> tuple[Position, bytes]:
        synced, self._synced = self._synced, self._pos
        try:
            return real(self)
        finally:
            self._synced = synced

    patch.setattr(Writer, "_next_mark", mark)


def a_spare_is_named_before_it_is_whole(patch: Patch) -> None:
    """Stale bytes in a file that is thought to be zeros."""

    def make(self: PreallocatedFile, size: int) -> bool:
        if self._ready_bytes:
            return True
        file = self._disk.open(self._path, "create")
        file.write(0, append(b"from an earlier life") * 20)
        file.allocate(FILE_BYTES)
        file.close()
        self._ready_bytes = size
        return True

    patch.setattr(PreallocatedFile, "fill_step", make)


PLANTED: list[tuple[Callable[[Patch], None], Workload]] = [
    (ack_before_the_sync, one_by_one),
    (ack_before_the_sync, begun_and_ended),
    (ack_what_was_only_begun, begun_and_ended),
    (no_directory_sync, one_by_one),
    (rotate_without_a_sync, with_and_without_promise),
    (rotate_without_a_sync, disk_lags),
    (a_spare_is_named_before_it_is_whole, with_a_spare),
    (a_failed_write_stays_where_it_is, disk_full),
    (a_failed_write_stays_where_it_is, begun_and_ended),
    (a_failed_write_is_taken_back_but_not_durably, disk_full),
    (write_on_after_a_failed_sync, failed_sync("dropped")),
    (half_a_batch_counts, batches),
    (a_torn_tail_stays, one_by_one),
    (recovered_bytes_are_synced_but_not_written_again, failed_sync("dropped")),
    (recovery_syncs_nothing, killed_and_started_again),
    (the_number_of_the_newest_file_is_used_again, killed_and_started_again),
    (marks_are_written_before_the_sync, with_and_without_promise),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("bug", "workload"), PLANTED, ids=[f"{bug.__name__} {work.__name__}" for bug, work in PLANTED])
def test_the_sweep_catches(bug: Callable[[Patch], None], workload: Workload, monkeypatch: Patch) -> None:
    assert not sweep(workload, limit=40).failures
    bug(monkeypatch)
    try:
        counts = sweep(workload, limit=40)
    except (Error, OSError, AssertionError):
        return  # the library itself refused to go on: caught, and louder
    assert counts.failures, f"{bug.__name__} went unnoticed in {counts.states} states"
