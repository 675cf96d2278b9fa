"""Failing disks and jumping clocks: every cell of the fault matrix that a single process can see.

    SW  short writes          NS  no space           EW  error on write
    EF  error on sync         BF  a bit flips        CJ  the clock jumps

Rows R are RustLog's, L laminarmq's, N narwhal's, and T the same steps in the native layout. What
each cell must come to stands in MATRIX:

    OK   as if nothing happened                RB   rebuilt from its source, nothing lost
    ERR  refused, nothing visible, goes on     DET  told for what is damaged, never served
    RO   refused, latched until reopened       OLD  the new state is passed over
    REF  the log is not opened                 -    no such call is made
    GAP  DET for headers; data and times have no checksum in this layout unless the side-car is kept

Three cells differ from the published matrix. N5-NS: a full disk never latches, as with every other
write. R2-EW: an error on write latches, whichever file of a segment it strikes. N7-EF: an index that
cannot be made durable stops the opening, as in R4.

Method: an operation is run once on a healthy disk to learn which calls it makes; then it is run
again for each of these calls with that call failing, once and for ever.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.errors import (
    Corrupt,
    Damaged,
    DiskFull,
    Error,
    Latched,
    Refused,
    SeqMissing,
    Unavailable,
    WriteFailed,
)
from tidelog.testing import DiskCall, ManualClock, SimDisk, SyncMode
from tidelog.types import Record

Opener: TypeAlias = Callable[..., SegmentedLog]
Act: TypeAlias = Callable[[SegmentedLog], object]

COLUMNS = ("SW", "NS", "EW", "EF", "BF", "CJ")
MATRIX = {  #   SW     NS     EW     EF     BF     CJ
    "R1": ("OK", "ERR", "RO", "RO", "GAP", "OK"),
    "R2": ("OK", "ERR", "RO", "ERR", "RB", "-"),
    "R3": ("OK", "ERR", "RO", "RO", "GAP", "OK"),
    "R4": ("OK", "ERR", "ERR", "ERR", "RB", "-"),
    "R5": ("OK", "ERR", "ERR", "ERR", "OLD", "OK"),
    "R6": ("-", "-", "-", "ERR", "-", "OK"),
    "R7": ("OK", "ERR", "ERR", "ERR", "GAP", "OK"),
    "R8": ("-", "REF", "REF", "REF", "GAP", "OK"),
    "L1": ("OK", "ERR", "ERR", "RO", "DET", "-"),
    "L2": ("OK", "ERR", "ERR", "RO", "DET", "-"),
    "L3": ("OK", "ERR", "ERR", "RO", "DET", "OK"),
    "L4": ("-", "ERR", "ERR", "RO", "DET", "-"),
    "L5": ("-", "-", "-", "ERR", "-", "OK"),
    "N3": ("OK", "ERR", "RO", "-", "DET", "OK"),
    "N4": ("-", "RO", "-", "RO", "-", "OK"),
    "N5": ("OK", "ERR", "RO", "RO", "DET", "OK"),
    "N6": ("-", "-", "-", "ERR", "-", "-"),
    "N7": ("OK", "ERR", "ERR", "ERR", "RB", "-"),
    "T append": ("OK", "ERR", "RO", "RO", "DET", "OK"),
    "T seal": ("OK", "ERR", "RO", "RO", "DET", "OK"),
    "T rebuild": ("OK", "ERR", "ERR", "ERR", "RB", "-"),
    "T retention": ("-", "-", "-", "ERR", "-", "OK"),
    "T compaction": ("OK", "ERR", "ERR", "ERR", "DET", "OK"),
    "T recovery": ("-", "REF", "REF", "REF", "DET", "OK"),
}


def cells(column: str) -> list[Any]:
    number = COLUMNS.index(column)
    return [
        pytest.param(row, MATRIX[row][number], id=f"{row}-{column}") for row in MATRIX if MATRIX[row][number] != "-"
    ]


def key(record: Record) -> bytes | None:
    return record.data.partition(b"=")[0] if b"=" in record.data else None


# What is done, and to what.


def few_records(log: SegmentedLog) -> None:
    log.append_many([b"a=1", b"b=1"])
    log.append(b"plain record")


def three_segments(log: SegmentedLog) -> None:
    for number in range(3):
        log.append_many([b"a=%d" % number, b"b%d=0" % number, b"plain %d" % number])
        log.seal()
    log.append(b"the active one")


def large_records(log: SegmentedLog) -> None:
    """A sealed segment whose index has an entry for every record also where it is sparse by bytes."""
    for number in range(3):
        log.append(b"%d" % number * 4_200)
    log.seal()
    log.append(b"the active one")


def cleaned_before(log: SegmentedLog) -> None:
    three_segments(log)
    log.retain(keep_bytes=log.size * 3 // 4)
    assert len(log.segments) == 3


def written_lately(log: SegmentedLog) -> None:
    log.append_many([b"a=1", b"b=1"])
    log.sync()


@dataclass(frozen=True)
class Operation:
    """One row: a log is prepared and closed, spoilt, opened, and then something is done to it."""

    codec: str
    prepare: Callable[[SegmentedLog], None]
    act: Act | None  # None: opening it is what is done
    path: str = ""  # only calls on paths that contain this are of interest
    settings: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[SimDisk, Callable[[int], str], Callable[[int], str]], None] | None = None
    lead: Act | None = None  # done after the opening, before anything fails
    partly: bool = False  # several steps: when it fails, some of them may be done already
    then: Act | None = None  # another thing that must work afterwards; an append, if None


def lose_an_index(disk: SimDisk, _: Callable[[int], str], index_path: Callable[[int], str]) -> None:
    first_seq = min(base for base in (0, 1) if index_path(base) in disk.tree())
    disk.remove(index_path(first_seq))
    disk.sync_dir("log")


def tear_and_damage(disk: SimDisk, data_path: Callable[[int], str], index_path: Callable[[int], str]) -> None:
    """A sealed index is gone, the last record of the active segment is bad and another is unfinished."""
    lose_an_index(disk, data_path, index_path)
    path = max(path for path in disk.tree() if path.endswith((".log", ".data")))
    content = disk.read_file(path)
    disk.write_file(path, content + content[:-1] + b"?" + content[:5])


OPERATIONS = {
    "R1": Operation("rustlog", few_records, lambda log: log.append(b"new record"), ".log"),
    "R2": Operation("rustlog", few_records, lambda log: log.append(b"new record"), ".index", {"index_every": 1}),
    "R3": Operation("rustlog", few_records, lambda log: log.seal()),
    "R4": Operation("rustlog", three_segments, None, "", {"index_every": 1}, lose_an_index),
    "R5": Operation(
        "rustlog", cleaned_before, lambda log: log.retain(keep_bytes=0), ".cleaner_checkpoint", partly=True
    ),
    "R6": Operation("rustlog", three_segments, lambda log: log.retain(keep_bytes=0), partly=True),
    "R7": Operation("rustlog", three_segments, lambda log: log.compact(key), partly=True),
    "R8": Operation("rustlog", three_segments, None, spoil=tear_and_damage),
    "L1": Operation("laminar", few_records, lambda log: log.append_stream([b"new ", b"record"]), ".store"),
    "L2": Operation("laminar", few_records, lambda log: log.append(b"new record"), ".index"),
    "L3": Operation("laminar", few_records, lambda log: log.seal()),
    "L4": Operation("laminar", three_segments, lambda log: log.truncate(4), partly=True),
    "L5": Operation("laminar", three_segments, lambda log: log.remove_expired(0), partly=True),
    "N3": Operation("narwhal", few_records, lambda log: log.append(b"new record"), ".log"),
    "N4": Operation(
        "narwhal",
        written_lately,
        lambda log: log.sync(),
        ".log",
        {"sync": "interval"},
        lead=lambda log: log.append(b"not synced"),
    ),
    "N5": Operation("narwhal", few_records, lambda log: log.seal()),
    "N6": Operation("narwhal", three_segments, lambda log: log.retain(keep_bytes=0), partly=True),
    "N7": Operation("narwhal", large_records, None, spoil=lose_an_index),
    "T append": Operation("tide", few_records, lambda log: log.append_many([b"new", b"records"]), ".data"),
    "T seal": Operation("tide", few_records, lambda log: log.seal()),
    "T rebuild": Operation("tide", three_segments, None, spoil=lose_an_index),
    "T retention": Operation("tide", three_segments, lambda log: log.retain(keep_bytes=0), partly=True),
    "T compaction": Operation("tide", three_segments, lambda log: log.compact(key), partly=True),
    "T recovery": Operation("tide", three_segments, None, spoil=tear_and_damage),
}


class Bench:
    """One operation on one disk, as often as wanted from the same start."""

    def __init__(self, row: str, clock: ManualClock) -> None:
        self.operation, self._clock = OPERATIONS[row], clock
        codec = self.operation.codec
        data = {"tide": "seg-{:016d}.data", "laminar": "{}.store"}.get(codec, "{:020d}.log")
        index = {"tide": "seg-{:016d}.idx", "rustlog": "{:020d}.index", "laminar": "{}.index"}.get(codec, "{:020d}.idx")
        self.data_path: Callable[[int], str] = lambda base: f"log/{data.format(base)}"
        self.index_path: Callable[[int], str] = lambda base: f"log/{index.format(base)}"
        self.first = 1 if codec in ("tide", "narwhal") else 0
        disk = SimDisk(clock=clock, trace=True)
        log = self.open(disk)
        self.operation.prepare(log)
        clock.tick(1)
        self.held = list(log)
        log.close()
        if self.operation.spoil is not None:
            self.operation.spoil(disk, self.data_path, self.index_path)
        self._start = disk.reboot()
        log, traced = self.ready(disk)
        if self.operation.lead is not None:
            self.held = list(log)
        if self.operation.act is not None:
            self.operation.act(log)
        self.after = list(log)
        self.calls = disk.trace[traced:]
        log.close()

    def open(self, disk: SimDisk, **settings: Any) -> SegmentedLog:
        operation = self.operation
        return SegmentedLog.open("log", operation.codec, disk=disk, clock=self._clock, **operation.settings | settings)

    def ready(self, disk: SimDisk) -> tuple[SegmentedLog, int]:
        """The log, and where in the disk's trace the operation begins."""
        begin = len(disk.trace)
        log = self.open(disk)
        if self.operation.act is not None:
            begin = len(disk.trace)
        if self.operation.lead is not None:
            self.operation.lead(log)
            begin = len(disk.trace)
        return log, begin

    def machine(self) -> SimDisk:
        return self._start.reboot()

    def count(self, call: str) -> int:
        """How many calls of this kind the operation makes where it matters."""
        return sum(1 for words in self.calls if words.startswith(f"{call} ") and self.operation.path in words)

    def run(self, disk: SimDisk, arm: Callable[[SimDisk], object]) -> tuple[SegmentedLog | None, Error | None]:
        """The log after the operation, if it could be opened, and what the operation raised, if anything."""
        if self.operation.act is None:
            arm(disk)
            try:
                return self.open(disk), None
            except Error as error:
                return None, error
        log, _ = self.ready(disk)
        arm(disk)
        try:
            self.operation.act(log)
        except Error as error:
            return log, error
        return log, None

    def is_between(self, found: Sequence[Record]) -> bool:
        """Whether these records are the ones of before, the ones of after, or, in steps, something between."""
        if list(found) in (self.held, self.after):
            return True
        if not self.operation.partly:
            return False
        kept = [record for record in self.held if record in found]
        return kept == list(found) and all(record in found for record in self.after)


Arming: TypeAlias = tuple[str, Callable[[SimDisk], None]]


def failing(bench: Bench, calls: Sequence[DiskCall], error: int) -> Iterator[Arming]:
    """Every single call of these kinds that the operation makes, failing once and failing for ever."""
    for call in calls:
        for at in range(1, bench.count(call) + 1):
            for times in (1, None):

                def arm(disk: SimDisk, call: DiskCall = call, at: int = at, times: int | None = times) -> None:
                    disk.fail(call, at, error, times, bench.operation.path or None)

                yield f"{call} {at} {'once' if times else 'for ever'}", arm


def failing_syncs(bench: Bench) -> Iterator[Arming]:
    for mode in ("dropped", "reverted", "kept"):
        for at in range(1, bench.count("sync") + 1):
            for times in (1, None):

                def arm(disk: SimDisk, mode: SyncMode = mode, at: int = at, times: int | None = times) -> None:
                    disk.fail_sync(mode, at, times, bench.operation.path or None)

                yield f"sync {at} {mode} {'once' if times else 'for ever'}", arm
    yield from failing(bench, ["sync_dir"], errno.EIO)


# The outcomes.


def goes_on(bench: Bench, log: SegmentedLog, disk: SimDisk, what: str) -> None:
    """The log is writable, the operation can be done now, and a restart agrees."""
    disk.clear_faults()
    if bench.operation.act is not None:
        try:
            bench.operation.act(log)
        except Refused:
            assert bench.operation.partly, what  # it was done already but for its last step
    highest = log.highest
    assert log.append(b"goes on") == highest, what
    held = list(log)
    for image in (disk.reboot(), disk.crash_image("none")):
        again = bench.open(image)
        assert not again.report.damage, what
        found = list(again)
        if found != held:
            # A removal whose sync failed may be undone by a power cut: what was refused was not promised.
            assert bench.operation.partly, what
            assert bench.is_between(found[:-1]), what
            assert found[-1] == held[-1], what


def expect_ok(bench: Bench, arm: Callable[[SimDisk], None], what: str) -> None:
    disk = bench.machine()
    log, error = bench.run(disk, arm)
    assert error is None, f"{what}: {error}"
    assert log is not None
    assert list(log) == bench.after, what
    goes_on(bench, log, disk, what)


def expect_refusal(bench: Bench, arm: Callable[[SimDisk], None], what: str) -> None:
    """ERR: not latched, nothing visible, works again."""
    disk = bench.machine()
    log, error = bench.run(disk, arm)
    assert error is not None, f"{what}: nothing was raised"
    if log is None:
        assert isinstance(error, Damaged), what
        disk.clear_faults()
        log = bench.open(disk)
        assert list(log) == bench.after, what
    else:
        assert not isinstance(error, Latched), f"{what}: latched, {error}"
        assert isinstance(error, Unavailable), f"{what}: {error!r}"
        assert bench.is_between(list(log)), what
        if not bench.operation.partly:
            assert list(log) == bench.held, what
    goes_on(bench, log, disk, what)


def expect_latch(bench: Bench, arm: Callable[[SimDisk], None], what: str) -> None:
    """RO: latched until reopened; reads go on, and so does everything that was acked."""
    disk = bench.machine()
    log, error = bench.run(disk, arm)
    assert isinstance(error, Latched), f"{what}: {error!r}"
    assert log is not None
    readable = list(log.records(skip_damage=True))
    assert bench.is_between(readable) or readable == [r for r in bench.held if r.seq < log.durable], what
    disk.clear_faults()
    before = disk.digest()
    for write in (lambda: log.append(b"x"), lambda: log.append_stream([b"x"]), log.seal, log.sync):
        with pytest.raises(Latched):
            write()
    assert disk.digest() == before, f"{what}: a latched log writes nothing"
    log.close()
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        again = bench.open(image)
        found = list(again)
        durable = [record for record in bench.held if record.seq < log.durable]
        assert bench.is_between(found) or found == durable, what
        assert not again.report.damage, what
        assert again.append(b"goes on") == again.highest - 1, what


def expect_no_opening(bench: Bench, arm: Callable[[SimDisk], None], what: str) -> None:
    """REF: refused, and a healthy disk gives what an undisturbed opening would have given."""
    disk = bench.machine()
    log, error = bench.run(disk, arm)
    assert log is None, f"{what}: it was opened"
    assert isinstance(error, Damaged), f"{what}: {error!r}"
    for image in (disk.reboot(), disk.crash_image("none")):
        again = bench.open(image)
        assert list(again) == bench.after, what
    disk.clear_faults()
    goes_on(bench, bench.open(disk), disk, what)


EXPECT: dict[str, Callable[[Bench, Callable[[SimDisk], None], str], None]] = {
    "OK": expect_ok,
    "ERR": expect_refusal,
    "RO": expect_latch,
    "REF": expect_no_opening,
}


# The columns.


@pytest.mark.parametrize(("row", "outcome"), cells("SW"))
def test_short_writes(row: str, outcome: str, clock: ManualClock) -> None:
    """G26."""
    bench = Bench(row, clock)
    assert bench.count("write") > 0 or row in ("R3", "N5"), "these two only sync and create"
    for seed in range(5):
        EXPECT[outcome](bench, lambda disk, seed=seed: disk.short_writes(Random(seed)), f"seed {seed}")  # type: ignore[misc]


@pytest.mark.parametrize(("row", "outcome"), cells("NS"))
def test_no_space(row: str, outcome: str, clock: ManualClock) -> None:
    """G25, G100."""
    bench = Bench(row, clock)
    calls: list[DiskCall] = ["sync"] if row == "N4" else ["write", "create", "reserve", "mkdir"]
    tried = 0
    for what, arm in failing(bench, calls, errno.ENOSPC):
        EXPECT[outcome](bench, arm, what)
        tried += 1
    assert tried


@pytest.mark.parametrize(("row", "outcome"), cells("EW"))
def test_error_on_write(row: str, outcome: str, clock: ManualClock) -> None:
    """G100, G116."""
    bench = Bench(row, clock)
    tried = 0
    for what, arm in failing(bench, ["write", "create"], errno.EIO):
        EXPECT[outcome](bench, arm, what)
        tried += 1
    assert tried


@pytest.mark.parametrize(("row", "outcome"), cells("EF"))
def test_error_on_sync(row: str, outcome: str, clock: ManualClock) -> None:
    """G22, G23, G100. An append never syncs what can be made again, so there is nothing to fail in R2."""
    bench = Bench(row, clock)
    tried = 0
    for what, arm in failing_syncs(bench):
        EXPECT[outcome](bench, arm, what)
        tried += 1
    assert bool(tried) == (row != "R2")


HOUR_US = 3_600_000_000
JUMPS_US = {
    "an hour on": HOUR_US,
    "an hour back": -HOUR_US,
    "ten years on": 87_600 * HOUR_US,
    "ten years back": -87_600 * HOUR_US,
    "to the epoch": -1_700_000_000_001_000,
}


@pytest.mark.parametrize("jump", JUMPS_US)
@pytest.mark.parametrize(("row", "outcome"), cells("CJ"))
def test_the_clock_jumps(row: str, outcome: str, jump: str, clock: ManualClock) -> None:
    """G60, G99. Method: before the log is opened, and again while it is open."""
    assert outcome == "OK"
    bench = Bench(row, clock)
    start_us = clock.now_us()
    for jumped_first in (True, False):
        clock.set_us(start_us)
        disk = bench.machine()
        if jumped_first:
            clock.set_us(start_us + JUMPS_US[jump])
        log, _ = bench.ready(disk)
        clock.set_us(start_us + JUMPS_US[jump])
        if bench.operation.act is not None:
            bench.operation.act(log)
        if row == "L5":  # what is expired is the clock's word; a whole prefix leaves and numbers stay
            assert [record for record in bench.held if record.seq >= log.lowest] == list(log)
            assert log.highest == bench.held[-1].seq + 1
        else:
            assert [(record.seq, record.data) for record in log] == [(r.seq, r.data) for r in bench.after]
        log.append(b"goes on")
        times = [record.ts_us for record in log]
        assert times == sorted(times)
        held = list(log)
        log.close()
        again = bench.open(disk)
        assert (list(again), again.report.damage, again.report.cut_bytes) == (held, [], 0)
        again.close()


# Bits that flip. Where a layout can tell, it tells; where it cannot, that is written down here.


def is_refused_as_damage(log: SegmentedLog, seq: int) -> bool:
    """Whether reading this record is refused as damage."""
    try:
        log.read(seq)
    except Corrupt:
        return True
    return False


def flips(disk: SimDisk, path: str) -> Iterator[int]:
    """Each byte of a file in turn, with one of its bits flipped."""
    for pos in range(len(disk.read_file(path))):
        disk.flip_bit(path, pos, pos % 8)
        yield pos
        disk.flip_bit(path, pos, pos % 8)


def check_detected(bench: Bench, disk: SimDisk, path: str) -> None:
    """DET: no flip of this file makes any record read as something else, and each one is told of."""
    truth = {record.seq: record for record in bench.held}
    for pos in flips(disk, path):
        log = bench.open(disk.reboot())
        silent = not (log.report.damage or log.report.cut_bytes or log.report.rebuilt)
        damaged = []
        for seq in range(log.lowest, min(log.highest, max(truth) + 1)):
            try:
                found = log.read(seq)
            except Corrupt:
                damaged.append(seq)
            except SeqMissing:
                assert seq not in truth, f"byte {pos}: seq {seq} is said never to have been there"
            else:
                assert found == truth[seq], f"byte {pos}: seq {seq} reads as something else"
        assert damaged or not silent, f"byte {pos}: nobody noticed"
        if log.codec in ("tide", "laminar"):  # the others go on at the next entry of a sparse index
            assert truth.keys() - set(damaged), f"byte {pos}: everything is lost"


def check_rebuilt(bench: Bench, path: str) -> None:
    """RB: after any flip of an index every record is still there."""
    disk = bench.machine()
    bench.open(disk).close()
    lost = []
    for pos in range(len(disk.read_file(path))):
        for bit in (0, 5):
            disk.flip_bit(path, pos, bit)
            log = bench.open(disk.reboot())
            try:
                right = [log.read(record.seq) for record in bench.held] == bench.held == list(log)
            except Error:
                right = False
            if not right or log.report.damage:
                lost.append((pos, bit))
            disk.flip_bit(path, pos, bit)
    assert lost == [], f"bits of the index {path} whose flip hides records that are there"


def check_gap(bench: Bench, disk: SimDisk, path: str) -> None:
    """GAP: without the side-car, exactly a change of data or time passes unseen, and it is seen with it.

    Method: a flip of a length or of a number is seen by bounds and order, in the record or in the one behind it. The
    last number of a file has none behind it to be out of order with, so it may show as a record that is not there.
    """
    check_detected(bench, disk, path)
    plain = disk.reboot()
    for name in plain.list_dir("log"):
        if name.endswith(".crc"):
            plain.remove(f"log/{name}")
    content = plain.read_file(path)
    where: dict[int, tuple[str, int]] = {}
    at = 0
    while at < len(content):
        length, seq = int.from_bytes(content[at : at + 4], "big"), int.from_bytes(content[at + 4 : at + 12], "big")
        for pos in range(at, at + 20 + length):
            where[pos] = ("header" if pos < at + 12 else "time" if pos < at + 20 else "data", seq)
        at += 20 + length
    truth = {record.seq: record for record in bench.held}
    for pos in flips(plain, path):
        log = bench.open(plain.reboot(), checksums=False)
        found = {record.seq: record for record in log.records(skip_damage=True)}
        wrong = {seq for seq in found if seq in truth and found[seq].data != truth[seq].data}
        seen = bool(log.report.damage or log.report.cut_bytes or log.damage_skipped)
        missing = any(seq not in found for seq in truth if seq >= log.lowest)
        kind, hurt = where[pos]
        if kind == "header":
            assert seen or missing, f"byte {pos}: a changed header was not seen"
            assert wrong <= {hurt}, f"byte {pos}: a changed header made another record"
        elif kind == "data":
            assert wrong == {hurt}, f"byte {pos}: the hole of the layout has closed; say so in the matrix"
            assert not seen


def sealed_bench(row: str, clock: ManualClock) -> tuple[Bench, SimDisk]:
    """The disk after the operation, closed."""
    bench = Bench(row, clock)
    disk = bench.machine()
    log, _ = bench.run(disk, lambda _: None)
    assert log is not None
    bench.held = list(log)
    log.close()
    return bench, disk


@pytest.mark.parametrize("row", ["R1", "R3", "R7", "R8"], ids=[f"{row}-BF" for row in ("R1", "R3", "R7", "R8")])
def test_a_flipped_bit_of_a_rustlog_segment(row: str, clock: ManualClock) -> None:
    """G105, G121 and note 1 of the matrix."""
    bench, disk = sealed_bench(row, clock)
    base = bench.open(disk.reboot(), read_only=True).segments[0].start
    check_gap(bench, disk, bench.data_path(base))


@pytest.mark.parametrize(
    ("row", "sides"),
    [
        pytest.param("L1", False, id="L1-BF"),
        pytest.param("L2", True, id="L2-BF"),
        pytest.param("L3", False, id="L3-BF"),
        pytest.param("L3", True, id="L3-BF index"),
        pytest.param("L4", False, id="L4-BF"),
        pytest.param("L4", True, id="L4-BF index"),
        pytest.param("N3", False, id="N3-BF"),
        pytest.param("N5", False, id="N5-BF"),
        pytest.param("T append", False, id="T append-BF"),
        pytest.param("T seal", False, id="T seal-BF"),
        pytest.param("T compaction", False, id="T compaction-BF"),
        pytest.param("T recovery", False, id="T recovery-BF"),
    ],
)
def test_a_flipped_bit_at_rest_is_detected(row: str, sides: bool, clock: ManualClock) -> None:
    """G65, G105, G120, G121."""
    bench, disk = sealed_bench(row, clock)
    base = bench.open(disk.reboot(), read_only=True).segments[0].start
    check_detected(bench, disk, bench.index_path(base) if sides else bench.data_path(base))


@pytest.mark.parametrize(
    ("row", "sealed"),
    [
        pytest.param("R2", False, id="R2-BF"),
        pytest.param("R4", True, id="R4-BF"),
        pytest.param("N7", True, id="N7-BF"),
        pytest.param("T rebuild", True, id="T rebuild-BF"),
    ],
)
def test_a_flipped_bit_of_an_index_that_can_be_made_again_hides_nothing(
    row: str, sealed: bool, clock: ManualClock
) -> None:
    """G101, G149."""
    bench = Bench(row, clock)
    log = bench.open(bench.machine())
    segments = log.segments
    assert (len(segments) > 1) == sealed
    check_rebuilt(bench, bench.index_path(segments[0].start))


@pytest.mark.parametrize("row", ["R5"], ids=["R5-BF"])
def test_flipped_bit_of_the_checkpoint_is_harmless(row: str, clock: ManualClock) -> None:
    """G109. Text has no checksum: a changed digit reads as another number, anything else as no checkpoint."""
    bench = Bench(row, clock)
    disk = bench.machine()
    path = "log/.cleaner_checkpoint"
    for pos in flips(disk, path):
        image = disk.reboot()
        log = bench.open(image)
        assert list(log) == bench.held, pos
        assert log.retain(keep_bytes=0).segments == 2, pos
        assert json.loads(image.read_file(path))["last_cleaned_offset"] >= log.lowest, pos
        log.append(b"a=9")
        log.seal()
        log.compact(key)
        assert log.read(log.highest - 1).data == b"a=9", pos


def test_every_cell_has_a_test() -> None:
    """Method: the ids of the tests above, held against the matrix."""
    flipped = {"R1", "R3", "R7", "R8", "L1", "L2", "L3", "L4", "N3", "N5", "R2", "R4", "N7", "R5"}
    flipped |= {"T append", "T seal", "T compaction", "T recovery", "T rebuild"}
    assert flipped == {row for row, outcomes in MATRIX.items() if outcomes[COLUMNS.index("BF")] != "-"}
    assert MATRIX.keys() == OPERATIONS.keys()


# Faults that are no cell of the matrix: the same for every codec.


def test_full_device_refuses_writes_until_space_is_free(open_log: Opener, disk: SimDisk, first_seq: int) -> None:
    """G25, G100. Method: real capacity, not a planned failure; the device fills up at every possible byte."""
    log = open_log()
    log.append(b"before")
    used = sum(map(len, disk.tree().values()))
    refused = 0
    for room in range(0, 120, 2):
        machine = disk.reboot()
        log = open_log(disk=machine)
        size = log.size
        machine.capacity_bytes = used + room
        try:
            log.append(b"some new record")
        except DiskFull:
            refused += 1
            assert (log.highest, log.size, [record.data for record in log]) == (first_seq + 1, size, [b"before"])
            assert list(open_log(disk=machine.reboot())) == list(log)
            machine.capacity_bytes = None
            assert log.append(b"some new record") == first_seq + 1
        assert [record.data for record in log] == [b"before", b"some new record"]
        for image in (machine.reboot(), machine.crash_image("none")):
            again = open_log(disk=image)
            assert list(again) == list(log)
            assert not again.report.damage
    assert 5 < refused < 60


@pytest.mark.parametrize("codec", ["rustlog", "laminar", "narwhal"])  # tide's index is late, see below
def test_full_disk_at_a_side_file_rolls_the_record_back(
    open_log: Opener, disk: SimDisk, index_path: Callable[[int], str], first_seq: int
) -> None:
    """G100, G118."""
    log = open_log(index_every=1)
    log.append(b"x" * 5_000)  # the next record has an index entry in every layout
    size = log.size
    disk.fail("write", error=errno.ENOSPC, path=index_path(first_seq), times=None)
    for _ in range(3):
        with pytest.raises(DiskFull):
            log.append(b"y")
    assert (log.highest, log.size) == (first_seq + 1, size)
    disk.clear_faults()
    assert log.append(b"z") == first_seq + 1
    again = open_log(disk=disk.crash_image("none"), index_every=1)
    assert [record.data[:1] for record in again] == [b"x", b"z"]


def test_full_disk_at_a_deferred_index_stops_only_the_seal(disk: SimDisk) -> None:
    """G29, G66: the index of tide's active segment is written when it is sealed, and derived again where it is not."""
    log = SegmentedLog.open("log", "tide", disk=disk, sync="batch")
    log.append_many([b"a", b"b"])
    disk.fail("write", error=errno.ENOSPC, path="log/seg-0000000000000001.idx", times=None)
    for _ in range(2):
        with pytest.raises(DiskFull):
            log.seal()
        assert log.append(b"c") > 2  # data has room
    assert [record.data for record in log] == [b"a", b"b", b"c", b"c"]
    disk.clear_faults()
    log.seal()
    assert log.append(b"d") == 5
    for image in (disk.reboot(), disk.crash_image("none")):
        again = SegmentedLog.open("log", "tide", disk=image)
        assert [record.data for record in again] == [b"a", b"b", b"c", b"c", b"d"]
        assert not again.report.damage


def test_short_index_is_completed_without_a_report(disk: SimDisk) -> None:
    """G66: what a killed process leaves of a late index is nothing to report."""
    log = SegmentedLog.open("log", "tide", disk=disk, sync="batch")
    log.append_many([b"a", b"b"])
    again = SegmentedLog.open("log", "tide", disk=disk.reboot())
    assert again.report.clean
    again.append(b"c")
    again.close()
    with SegmentedLog.open("log", "tide", disk=disk.reboot(), read_only=True) as third:
        assert [record.data for record in third] == [b"a", b"b"]


def test_a_write_error_latches_unless_the_design_goes_on(
    open_log: Opener, disk: SimDisk, codec: str, data_path: Callable[[int], str], first_seq: int
) -> None:
    """G100."""
    log = open_log()
    log.append(b"before")
    disk.fail("write", path=data_path(first_seq), partial=3)
    if codec == "laminar":
        with pytest.raises(WriteFailed):
            log.append(b"lost")
        assert log.append(b"after") == first_seq + 1
        assert [record.data for record in open_log(disk=disk.crash_image("none"))] == [b"before", b"after"]
        return
    with pytest.raises(Latched):
        log.append(b"lost")
    with pytest.raises(Latched, match="reopen"):
        log.append(b"after")
    assert [record.data for record in log] == [b"before"]
    log.close()
    again = open_log()
    assert [record.data for record in again] == [b"before"]
    assert again.append(b"after") == first_seq + 1


def test_a_rollback_that_fails_latches_whatever_the_design(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], first_seq: int
) -> None:
    """G100. Method: the write fails and so does the cut that should undo it."""
    log = open_log()
    log.append(b"before")
    disk.fail("write", error=errno.ENOSPC, path=data_path(first_seq), partial=5)
    disk.fail("cut", path=data_path(first_seq), times=None)
    with pytest.raises(Latched):
        log.append(b"half written")
    assert [record.data for record in log] == [b"before"]
    with pytest.raises(Latched):
        log.append(b"after")
    disk.clear_faults()
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        assert [record.data for record in open_log(disk=image)] == [b"before"]


@pytest.mark.parametrize("sync", ["each", "batch", "interval"])
@pytest.mark.parametrize("mode", ["dropped", "reverted", "kept"])
def test_after_a_failed_sync_no_write_succeeds_and_every_ack_survives(
    open_log: Opener, disk: SimDisk, mode: SyncMode, sync: str, first_seq: int
) -> None:
    """G22, G23, G24, G143. Method: under `interval` an ack is not a promise against power cuts; a sync is."""
    log = open_log(sync=sync)
    log.append_many([b"a", b"b"])
    log.sync()
    if sync == "interval":
        log.append(b"c")
    disk.fail_sync(mode, times=None)
    with pytest.raises(Latched):
        log.sync() if sync == "interval" else log.append(b"c")
    disk.clear_faults()
    calls: list[Callable[[], object]] = [
        lambda: log.append(b"d"),
        lambda: log.append_many([b"d"]),
        lambda: log.append_stream([b"d"]),
        lambda: log.sync(),
        lambda: log.seal(),
        lambda: log.truncate(first_seq),
        lambda: log.retain(keep_bytes=0),
        lambda: log.remove_expired(0),
        lambda: log.compact(key),
    ]
    before = disk.digest()
    for call in calls:
        with pytest.raises(Latched):
            call()
    log.tick()
    log.close()
    assert disk.digest() == before
    for image in (disk.crash_image("none"), disk.crash_image("all")):
        again = open_log(disk=image, sync=sync)
        assert [record.data for record in again] in ([b"a", b"b"], [b"a", b"b", b"c"])
        assert again.append(b"e") == again.highest - 1


@pytest.mark.parametrize("mode", ["dropped", "reverted", "kept"])
def test_a_record_that_a_failed_sync_took_away_is_not_passed_over_in_silence(
    open_log: Opener, disk: SimDisk, mode: SyncMode, first_seq: int
) -> None:
    """Method: some file systems show the old bytes again after a failed sync; the record was acked by then."""
    log = open_log(sync="interval")
    log.append_many([b"a", b"b"])
    log.sync()
    log.append(b"c")
    disk.fail_sync(mode)
    with pytest.raises(Latched):
        log.sync()
    if mode == "reverted":
        with pytest.raises(Corrupt):
            log.read(first_seq + 2)
        with pytest.raises(Corrupt):
            list(log)
        assert [record.data for record in log.records(first_seq, first_seq + 2)] == [b"a", b"b"]
    else:
        assert [record.data for record in log] == [b"a", b"b", b"c"]


def test_a_latched_log_still_reads(open_log: Opener, disk: SimDisk, first_seq: int) -> None:
    log = open_log()
    log.append_many([b"a", b"b"])
    log.seal()
    log.append(b"c")
    disk.fail_sync("dropped")
    with pytest.raises(Latched):
        log.append(b"d")
    assert [record.data for record in log] == [b"a", b"b", b"c"]
    assert log.read(first_seq + 2).data == b"c"
    assert log.to_arrow().num_rows == 3
    assert [record.data for record in open_log(read_only=True).records(first_seq, first_seq + 3)] == [b"a", b"b", b"c"]


def test_a_directory_that_cannot_be_synced_makes_no_log(open_log: Opener, disk: SimDisk) -> None:
    """Method: an ack in a file whose name may vanish would be worth nothing."""
    disk.make_dir("log")
    disk.fail("sync_dir")
    with pytest.raises(Error):
        open_log()
    disk.clear_faults()
    log = open_log()
    log.append(b"a")
    assert [record.data for record in open_log(disk=disk.crash_image("none"))] == [b"a"]


def test_a_file_that_cannot_be_removed_stops_the_removal_and_the_log_is_still_one(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], index_path: Callable[[int], str], first_seq: int
) -> None:
    """G108. Method: the second segment to be dropped cannot be removed."""
    log = open_log()
    for number in range(3):
        log.append(b"%d" % number)
        log.seal()
    disk.fail("remove", path=data_path(first_seq + 1), times=None)
    disk.fail("remove", path=index_path(first_seq + 1), times=None)
    with pytest.raises(Error):
        log.retain(keep_bytes=0)
    assert (log.lowest, [record.data for record in log]) == (first_seq + 1, [b"1", b"2"])
    disk.clear_faults()
    log.close()
    again = open_log()
    assert [record.data for record in again] == [b"1", b"2"]
    assert again.retain(keep_bytes=0).segments == 2
