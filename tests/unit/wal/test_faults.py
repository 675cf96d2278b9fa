"""Failing disks: the rows T1, T2 and T3 of the fault matrix, and what T16 and T17 ask of the WAL.

    TW  torn write        SW  short write          NS  no space
    EW  error on write    EF  error on sync        C±  crash before and after each call
    BF  a bit flips       LU  lost, not synced     RR  names reordered or lost      CJ  the clock jumps

    OK   as if nothing happened                    RO   latched until a restart, what was acked is safe
    ERR  refused, nothing written, goes on         PFX  acked is there, the rest is a prefix
    CUT  cut at the first bad frame                O/N  the old or the new state
    DET  reported, never replayed                  REF  does not start
    -    no such call is made

The columns TW, C±, LU and RR are one sweep, in test_crash.py; the rest is here. Method: an operation
is run once on a healthy disk to learn which calls it makes; then once for each of these calls with
that call failing, once and for ever.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from random import Random
from typing import Any

import pytest
from tests.unit.wal.harness import (
    FILE_BYTES,
    QUARANTINE,
    WAL,
    WalHarness,
    append,
    inspect_wal,
    recover,
    reopened,
    wal_path,
)

from tidelog.errors import Damaged, DiskFull, Error, Latched
from tidelog.testing import DiskCall, ManualClock, SimDisk, SyncMode
from tidelog.wal import Position

COLUMNS = ("TW", "SW", "NS", "EW", "EF", "C±", "BF", "LU", "RR", "CJ")
MATRIX = {
    "T1": ("CUT", "OK", "ERR", "RO", "-", "PFX", "DET", "PFX", "-", "OK"),
    "T2": ("-", "-", "RO", "-", "RO", "PFX", "-", "PFX", "-", "OK"),
    "T3": ("CUT", "OK", "RO", "RO", "RO", "O/N", "OK", "O/N", "O/N", "OK"),
    "T16": ("CUT", "-", "-", "-", "-", "OK", "DET", "-", "OK", "OK"),
    "T17": ("-", "-", "REF", "REF", "REF", "OK", "-", "OK", "OK", "-"),
}
ELSEWHERE = {"TW", "C±", "LU", "RR"}  # test_crash.py


def cells(column: str, *rows: str) -> list[Any]:
    number = COLUMNS.index(column)
    return [pytest.param(row, id=f"{row}-{column}") for row in rows if MATRIX[row][number] != "-"]


class Operation:
    """A WAL with acked writes, and one more that is a batch write, a sync or a rotation."""

    def __init__(self, row: str) -> None:
        self.row = row
        self.data = {"T1": b"batch", "T2": b"batch", "T3": b"r" * 1990}[row]
        self.must = [b"first", b"second"]
        self.before = [*self.must, b"not synced"] if row == "T3" else self.must  # the file that is left has such bytes
        disk = SimDisk(trace=True)
        bench = self.bench(disk)
        began = len(disk.trace)
        self.act(bench)
        self.calls = disk.trace[began:]
        self.after = [*self.before, self.data]

    def bench(self, disk: SimDisk) -> WalHarness:
        bench = WalHarness(disk, marks=False)
        for data in self.before:
            bench.write(data, durable=data in self.must)
        if self.row == "T2":
            bench.submit([self.data], durable=False)
            bench.shard.commit_pending()
        return bench

    def act(self, bench: WalHarness) -> None:
        if self.row == "T2":
            bench.shard.tick()
        else:
            bench.write(self.data, durable=False)

    def count(self, call: str) -> int:
        return sum(1 for words in self.calls if words.startswith(f"{call} "))

    def run(self, arm: Callable[[SimDisk], object]) -> tuple[SimDisk, WalHarness, Error | None]:
        disk = SimDisk()
        bench = self.bench(disk)
        arm(disk)
        try:
            self.act(bench)
        except Error as error:
            return disk, bench, error
        return disk, bench, None


Arming = tuple[str, Callable[[SimDisk], object]]


def partial_fault(call: DiskCall, at: int, error: int, times: int | None, partial: int) -> Callable[[SimDisk], None]:
    return lambda disk: disk.fail(call, at, error, times, partial=partial)


def failing(operation: Operation, calls: Sequence[DiskCall], error: int) -> Iterator[Arming]:
    for call in calls:
        for at in range(1, operation.count(call) + 1):
            for times in (1, None):
                for partial in (0, 7, 60) if call == "write" else (0,):

                    def arm(
                        disk: SimDisk,
                        call: DiskCall = call,
                        at: int = at,
                        times: int | None = times,
                        partial: int = partial,
                    ) -> None:
                        disk.fail(call, at, error, times, partial=partial)

                    yield f"{call} {at} {'once' if times else 'for ever'}, {partial} bytes land", arm


def failing_syncs(operation: Operation) -> Iterator[Arming]:
    for mode in ("dropped", "reverted", "kept"):
        for at in range(1, operation.count("sync") + 1):
            for times in (1, None):

                def arm(disk: SimDisk, mode: SyncMode = mode, at: int = at, times: int | None = times) -> None:
                    disk.fail_sync(mode, at, times)

                yield f"sync {at} {mode} {'once' if times else 'for ever'}", arm
    yield from failing(operation, ["sync_dir"], errno.EIO)


# The outcomes.


def expect_ok(operation: Operation, arm: Callable[[SimDisk], object], what: str) -> None:
    disk, bench, error = operation.run(arm)
    assert error is None, f"{what}: {error}"
    bench.write(b"goes on")
    for image in (disk.reboot(), disk.crash_image("none")):
        found = inspect_wal(image)
        assert (found.datas, found.cut) == ([*operation.after, b"goes on"], None), what


def expect_refusal(operation: Operation, arm: Callable[[SimDisk], object], what: str) -> None:
    """ERR: nothing of it is written, and it goes on when the disk does."""
    disk, bench, error = operation.run(arm)
    assert isinstance(error, DiskFull), f"{what}: {error!r}"
    assert not bench.shard.is_latched, what
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        found = inspect_wal(image)
        assert (found.datas, found.cut) == (operation.before, None), what
    disk.clear_faults()
    bench.write(b"x")  # shorter: a frame of the failed batch would follow it
    operation.act(bench)
    bench.shard.close()
    for image in (disk.reboot(), disk.crash_image("none")):
        found = inspect_wal(image)
        assert (found.datas, found.cut) == ([*operation.before, b"x", operation.data], None), what
        assert found.missing == [], what


def expect_latch(operation: Operation, arm: Callable[[SimDisk], object], what: str) -> None:
    """RO: nothing is written any more; after a restart every ack is there, and it goes on under a new number."""
    disk, bench, error = operation.run(arm)
    assert isinstance(error, Latched), f"{what}: {error!r}"
    disk.clear_faults()
    before = disk.op_count
    for durable in (True, False):
        with pytest.raises(Latched):
            bench.write(b"x", durable=durable)
    bench.shard.tick()
    acked = [data for write in bench.history if write.acked for data in write.datas]
    try:
        bench.shard.close()
    except Latched:
        pass
    else:
        assert inspect_wal(disk.crash_image("none")).datas[: len(acked)] == acked, f"{what}: closed in silence"
    assert disk.op_count == before, f"{what}: a latched shard touches nothing"
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        again, found = reopened(image)
        assert found.datas in (operation.must, operation.before, operation.after), what
        assert found.verdict != "damaged", what
        assert found.missing == [], what
        again.write(b"goes on")
        after = inspect_wal(image.crash_image("none"))
        assert (after.datas, after.cut, after.missing) == ([*found.datas, b"goes on"], None, []), what
        assert again.writer.next_frame == len(after.datas) + 1, what


EXPECT = {"OK": expect_ok, "ERR": expect_refusal, "RO": expect_latch}


def expect(row: str, column: str, arms: Iterator[Arming]) -> None:
    outcome = EXPECT[MATRIX[row][COLUMNS.index(column)]]
    operation = Operation(row)
    tried = 0
    for what, arm in arms:
        outcome(operation, arm, what)
        tried += 1
    assert tried


# The columns.


def test_the_operations_make_the_calls_they_should() -> None:
    """Method: a dash in the matrix is a call that is not made."""
    assert Operation("T1").calls == [f"write {wal_path(1)}@103+51"]
    assert Operation("T2").calls == [f"sync {wal_path(1)}"]
    assert [words.split()[0] for words in Operation("T3").calls] == [
        *("sync", "create", "reserve", "sync", "sync_dir"),
        *("rename", "create", "write", "sync", "rename", "sync_dir", "write"),
    ]


@pytest.mark.parametrize("row", cells("SW", "T1", "T3"))
def test_short_writes(row: str) -> None:
    """G26."""

    def arms() -> Iterator[Arming]:
        for seed in range(10):

            def arm(disk: SimDisk, seed: int = seed) -> None:
                disk.short_writes(Random(seed))

            yield f"seed {seed}", arm

    expect(row, "SW", arms())


@pytest.mark.parametrize("row", cells("NS", "T1", "T2", "T3"))
def test_no_space(row: str) -> None:
    """G25, G27: a write on a full disk is refused and the next succeeds, also if it needs a new file; a failed sync
    ends writing. CURRENT is a hint: a rotation does without it."""
    operation = Operation(row)
    calls: list[DiskCall] = ["sync"] if row == "T2" else ["write", "create", "reserve", "rename"]
    for error in (errno.ENOSPC, errno.EDQUOT):
        tried = 0
        for what, arm in failing(operation, calls, error):
            expected = EXPECT[MATRIX[row][2]]
            if row == "T3":
                # The first create and reserve are the new file's, the first rename is NEWEST's; those after it are
                # CURRENT's and the batch's.
                if what.startswith("create 2 for ever"):
                    continue  # it succeeds without CURRENT, and the next one finds the disk full
                hint = what.startswith(("write 1 once", "rename", "create 2"))
                expected = expect_ok if hint else expect_refusal
            expected(operation, arm, what)
            tried += 1
        assert tried


@pytest.mark.parametrize("row", cells("EW", "T1", "T3"))
def test_error_on_write(row: str) -> None:
    """G22, G27."""
    expect(row, "EW", failing(Operation(row), ["write", "create", "reserve", "rename"], errno.EIO))


@pytest.mark.parametrize("row", cells("EF", "T2", "T3"))
def test_error_on_sync(row: str) -> None:
    """G22–G24, G27. Method: in all three ways in which a sync fails."""
    expect(row, "EF", failing_syncs(Operation(row)))


HOUR_US = 3_600_000_000


@pytest.mark.parametrize("jump_us", [HOUR_US, -HOUR_US, 87_600 * HOUR_US, -87_600 * HOUR_US, -1_700_000_000_000_000])
@pytest.mark.parametrize("row", cells("CJ", "T1", "T2", "T3"))
def test_the_clock_jumps(row: str, jump_us: int) -> None:
    """G60: nothing in a WAL file comes from the clock."""
    operation = Operation(row)
    clock = ManualClock()
    disk, plain = SimDisk(clock=clock), SimDisk()
    bench = operation.bench(disk)
    clock.set_us(clock.now_us() + jump_us)
    operation.act(bench)
    operation.act(operation.bench(plain))
    assert disk.tree() == plain.tree()
    assert inspect_wal(disk).datas == operation.after


@pytest.mark.parametrize("row", cells("CJ", "T16"))
def test_a_replay_asks_no_clock(row: str) -> None:
    """G60."""
    assert MATRIX[row][-1] == "OK"
    clock = ManualClock()
    disk = SimDisk(clock=clock)
    Operation("T3").act(Operation("T3").bench(disk))
    before = inspect_wal(disk)
    clock.set_us(0)
    assert inspect_wal(disk) == before


@pytest.mark.parametrize("row", cells("BF", "T1", "T16"))
def test_flipped_bit_is_reported_and_never_replayed(row: str) -> None:
    """G56. Method: every byte that frames lie in, of a file that is the newest and one that is not; what each position
    must come to stands in test_replay.py."""
    operation = Operation("T3" if row == "T16" else "T1")
    disk = SimDisk()
    bench = operation.bench(disk)
    operation.act(bench)
    truth = operation.after
    for pos in range(103 if row == "T16" else 154):
        disk.flip_bit(wal_path(1), pos, pos % 8)
        found = inspect_wal(disk)
        disk.flip_bit(wal_path(1), pos, pos % 8)
        assert found.verdict == ("damaged" if row == "T16" else "torn"), pos
        assert found.datas == [data for data in truth if data in found.datas], pos
        assert len(found.datas) < len(truth), pos


@pytest.mark.parametrize("row", cells("BF", "T3"))
def test_flipped_bit_of_current_is_harmless(row: str) -> None:
    """G33."""
    operation = Operation(row)
    disk = SimDisk()
    operation.act(operation.bench(disk))
    for pos in range(25):
        for bit in range(8):
            image = disk.reboot()
            image.flip_bit(f"{WAL}/CURRENT", pos, bit)
            again, found = reopened(image)
            assert (found.datas, found.cut) == (operation.after, None)
            again.write(b"goes on")
            assert inspect_wal(image).datas == [*operation.after, b"goes on"]


# Recovery that cuts: T17.


def spoilt(what: str) -> tuple[SimDisk, Position | None, list[bytes]]:
    """A WAL that wants work before it is written again, what is known of it, and what it still holds."""
    disk = SimDisk(trace=True)
    bench = WalHarness(disk, marks=False)
    datas = [b"%d" % number * 900 for number in range(5)]
    for data in datas:
        bench.write(data)
    if what == "torn":
        disk.flip_bit(wal_path(5), 100, 0)
        return disk, None, datas[:4]
    if what == "empty":
        disk.write_file(wal_path(6), bytes(FILE_BYTES))
        return disk, None, datas
    if what == "clean":
        return disk, None, datas
    if what == "damaged at the end":
        disk.flip_bit(wal_path(5), 100, 0)
        return disk, Position(5, 946), datas[:4]
    disk.flip_bit(wal_path(1), 1000, 0)
    return disk, None, datas[:1] + datas[2:]


SPOILT = ("torn", "empty", "clean", "damaged at the end", "damaged")


@pytest.mark.parametrize("column", ["NS", "EW", "EF"])
@pytest.mark.parametrize("what", SPOILT)
def test_a_recovery_that_cannot_finish_refuses_to_start(what: str, column: str) -> None:
    """G48, G56. Method: T17; each call of the truncation and of the new file fails, once or always; after a repair
    the result is the undisturbed one, and so it is after a power cut."""
    disk, durable, datas = spoilt(what)
    healthy = disk.reboot()
    plain = recover(healthy, durable=durable)
    WalHarness(healthy, first=plain.next_first)
    disk, _, _ = spoilt(what)
    began = len(disk.trace)
    recover(disk, durable=durable)
    WalHarness(disk, first=plain.next_first)
    calls = [words.split()[0] for words in disk.trace[began:]]
    wanted: tuple[DiskCall, ...] = (
        ("sync", "sync_dir") if column == "EF" else ("write", "create", "cut", "reserve", "rename")
    )
    tried = 0
    for call in wanted:
        modes: tuple[SyncMode, ...] = ("dropped", "reverted", "kept") if call == "sync" else ("kept",)
        for at, times, mode in product(range(1, calls.count(call) + 1), (1, None), modes):
            disk, _, _ = spoilt(what)
            if call == "sync":
                disk.fail_sync(mode, at, times)
            else:
                disk.fail(call, at, errno.ENOSPC if column == "NS" else errno.EIO, times)
            if column == "NS":  # a smaller file may do, and CURRENT is a hint
                with suppress(Damaged, DiskFull):
                    WalHarness(disk, first=recover(disk, durable=durable).next_first)
            else:
                with pytest.raises(Damaged):
                    WalHarness(disk, first=recover(disk, durable=durable).next_first)
            tried += 1
            for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
                check_ready(image, durable, datas, healthy, f"{call} {at} {mode}")
    assert tried


def check_ready(image: SimDisk, durable: Position | None, datas: list[bytes], healthy: SimDisk, what: str) -> None:
    """Another recovery comes to the same end, and what is written then is found after a power cut."""
    found = recover(image, durable=durable)
    assert found.datas == datas, what
    WalHarness(image, first=found.next_first).write(b"goes on")
    after = inspect_wal(image.crash_image("none"))
    assert (after.datas, after.cut) == ([*datas, b"goes on"], None), what
    kept = {name for name in image.tree() if name.startswith(QUARANTINE) and not name.endswith(".tmp")}
    assert kept == {name for name in healthy.tree() if name.startswith(QUARANTINE)}, what


def test_every_cell_has_a_test() -> None:
    """Method: the ids above, compared with the matrix."""
    here = {
        "SW": {"T1", "T3"},
        "NS": {"T1", "T2", "T3", "T17"},
        "EW": {"T1", "T3", "T17"},
        "EF": {"T2", "T3", "T17"},
        "BF": {"T1", "T3", "T16"},
        "CJ": {"T1", "T2", "T3", "T16"},
    }
    for number, column in enumerate(COLUMNS):
        rows = {row for row, outcomes in MATRIX.items() if outcomes[number] != "-"}
        assert column in ELSEWHERE or rows == here[column], column


def test_a_directory_that_cannot_be_made_is_no_wal() -> None:
    """G32: its name is durable before a file is made in it."""
    for call in ("mkdir", "sync_dir"):
        disk = SimDisk()
        disk.make_dir("data")
        disk.fail(call)
        with pytest.raises(Damaged):
            WalHarness(disk)
        disk.clear_faults()
        WalHarness(disk).write(b"a")
        assert inspect_wal(disk.crash_image("none")).datas == [b"a"]


def test_disk_that_loses_synced_bytes_invents_no_frames() -> None:
    """G52, G58: if syncs do nothing, records are lost; replayed frames were written in order, holes are reported."""
    for seed in range(50):
        disk = SimDisk()
        bench = WalHarness(disk)
        disk.ignores_syncs = True
        datas = [b"%d" % number * 500 for number in range(6)]
        with suppress(Latched):
            for data in datas:
                bench.write(data)
        found = inspect_wal(disk.crash_image(Random(seed)))
        assert found.datas == [data for data in datas if data in found.datas]
        assert found.verdict == "damaged" or found.datas == datas[: len(found.datas)]


def test_the_append_helper_is_a_frame_of_the_layout() -> None:
    assert len(append(b"x")) == 47
