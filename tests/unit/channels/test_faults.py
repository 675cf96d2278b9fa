"""Rows N1 to N9 of the fault matrix, cell by cell, as a channel meets them (G130-G150).

    TW  torn write            SW  short write         NS  no space
    EW  error on write        EF  error on sync       C±  crash before and after each call
    BF  a bit flips           LU  unsynced bytes are lost, any subset
    RR  names reordered or not persisted              CJ  the clock jumps

Three cells differ from the published matrix. N1-BF: the metadata has a checksum here, so no flip goes unnoticed.
N5-NS: a full disk never latches. N7-EF: an index that cannot be made durable keeps its channel offline.

Method: an act is run once on a healthy disk to learn which calls it makes; then again for each of them with that call
failing, once and for ever. For crashes every image that the power could leave before every operation is opened, and
its state is compared with the states before and after the operation.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest

from tidelog.channels import Channel, ChannelLimits, ChannelManager, store
from tidelog.channels.rules import directory_name
from tidelog.errors import Corrupt, Damaged, DiskFull, Error, Latched, WriteFailed
from tidelog.testing import DiskCall, ManualClock, SimDisk, SyncMode
from tidelog.testing.crash_images import Policy

COLUMNS = ("TW", "SW", "NS", "EW", "EF", "C±", "BF", "LU", "RR", "CJ")
TABLE = """
| N1 | metadata save | OLD | OK | ERR | ERR | ERR | O/N | DET | O/N | O/N | – |
| N2 | channel delete | OLD | OK | ERR | ERR | ERR | O/N | – | O/N | O/N | – |
| N3 | log append | CUT | OK | ERR | RO | – | PFX | DET | PFX | – | OK |
| N4 | flush | – | – | RO | – | RO | PFX | – | PFX | – | OK |
| N5 | roll | CUT | OK | ERR | RO | RO | O/N | DET | O/N | O/N | OK |
| N6 | eviction | – | – | – | – | ERR | OK | – | OK | OK | – |
| N7 | index rebuild | RB | OK | ERR | ERR | ERR | O/N | RB | RB | RB | – |
| N8 | stale sweep | – | – | – | – | ERR | OK | – | OK | OK | – |
| N9 | restore | CUT | – | ERR | ERR | ERR | OK | DET | – | OK | OK |
"""
_ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()]
MATRIX = {row: dict(zip(COLUMNS, rest, strict=True)) for row, _, *rest in _ROWS}
A, B, GONE = "!a@host", "!b@host", "!gone@host"
ANN, BOB = "ann@host", "bob@host"
DIRECTORY = f"data/channels/{directory_name(A)}"
LIMITS = ChannelLimits(shards=1, segment_bytes=4_096, payload_bytes_max=2_000, persist_messages_max=8)
IMAGES: dict[str, tuple[Policy, ...]] = {
    "TW": ("torn_last",),
    "C±": ("none", "all", "prefixes"),
    "LU": ("only_one", "all_but_one", "random"),
    "RR": ("directories",),
}

State = tuple[dict[str, tuple[Any, ...]], dict[str, dict[int, bytes]]]


def cells(*columns: str) -> list[Any]:
    return [
        pytest.param(row, column, id=f"{row}-{column.replace('±', '')}")
        for row in MATRIX
        for column in columns
        if MATRIX[row][column] != "–"
    ]


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SEAL_MESSAGES_MIN", 2)


class World:
    def __init__(self, disk: SimDisk | None = None) -> None:
        self.clock = ManualClock()
        self.disk = disk or SimDisk(clock=self.clock)
        self.made: ChannelManager | None = None
        if disk is None:
            self.disk.make_dir("data")

    @property
    def manager(self) -> ChannelManager:
        if self.made is None:
            self.made = ChannelManager(self.disk, "data", self.clock, limits=LIMITS)
        return self.made

    def channel(self, user: str = ANN, name: str = A) -> Channel:
        return Channel(self.manager, name, user)

    def log(self, name: str = A) -> store.MessageLog:
        with self.manager.locked(name):
            return self.manager.get_channel(name).message_log()

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
        self.made = None

    def metas(self) -> dict[str, tuple[Any, ...]]:
        found = {}
        for name in self.manager.channel_names():
            meta = self.manager.meta(name)
            found[name] = (meta.owner, meta.members, meta.config, meta.acl)
        return found

    def state(self) -> State:
        """Everything there is, as a reader finds it."""
        metas, said = self.metas(), {}
        for name in metas:
            log = self.log(name)
            read = log.read(log.first_seq, limit=99, bytes_max=1 << 20) if log.last_seq >= log.first_seq else []
            said[name] = {message.seq: message.payload for message in read}
        return metas, said


def two_channels(world: World) -> None:
    world.channel().join(persist=True)
    world.channel().publish_many([b"one", b"two"])
    world.channel(BOB, B).join(persist=True)
    world.channel(BOB, B).publish(b"other")


def slow_channel(world: World) -> None:
    two_channels(world)
    world.channel().configure(message_flush_interval=200)


def waiting(world: World) -> None:
    slow_channel(world)
    world.channel().publish(b"three")


def sealed(world: World) -> None:
    two_channels(world)
    for number in range(3):
        world.channel().publish(b"%d" % number * 1_500)
    assert len(world.log()._log.segments) > 1


def with_a_bad_index(world: World) -> None:
    sealed(world)
    world.close()
    world.disk.write_file(f"{DIRECTORY}/{1:020d}.idx", b"\xff" * 24)


def with_leftovers(world: World) -> None:
    two_channels(world)
    world.channel(ANN, GONE).join(persist=True)
    world.channel(ANN, GONE).publish(b"gone")
    world.close()
    world.disk.write_file(f"data/channels/{directory_name(GONE)}/deleted", b"")
    world.disk.write_file("data/channels/foreign/keep.txt", b"mine")


def torn(world: World) -> None:
    two_channels(world)
    world.close()
    path = f"{DIRECTORY}/{1:020d}.log"
    world.disk.write_file(path, world.disk.read_file(path) + b"\x03\0\0\0\0\0\0\0torn")


def append(world: World) -> None:
    world.channel().publish(b"more", qos=0)


def tick(world: World) -> None:
    world.clock.tick(200)
    world.manager.tick()


def reopen(world: World) -> None:
    assert world.state()


@dataclass(frozen=True)
class Row:
    before: Callable[[World], None]
    act: Callable[[World], object]
    calls: tuple[DiskCall, ...] = ("write", "create", "reserve")  # what can run out of space or meet an error
    touched: str = DIRECTORY
    closed: bool = False  # the act begins with opening


ROWS = {
    "N1": Row(two_channels, lambda world: world.channel().invite(BOB)),
    "N2": Row(two_channels, lambda world: world.channel().delete()),
    "N3": Row(slow_channel, append, touched=".log"),
    "N4": Row(waiting, tick, calls=("sync",)),
    "N5": Row(two_channels, lambda world: world.log().keep_from_seq(0, 4)),
    "N6": Row(sealed, lambda world: world.log().drop_below(world.log().last_seq)),
    "N7": Row(with_a_bad_index, reopen, closed=True),
    "N8": Row(with_leftovers, reopen, closed=True, touched=directory_name(GONE)),
    "N9": Row(torn, reopen, calls=("cut",), closed=True),
}


def prepared(row: str) -> World:
    world = World()
    ROWS[row].before(world)
    if not ROWS[row].closed:
        world.log()
    return world


def states(row: str) -> tuple[State, State]:
    """What is there before the act, as a restart finds it, and after."""
    world = prepared(row)
    before = World(world.disk.reboot()).state() if ROWS[row].closed else world.state()
    ROWS[row].act(world)
    return before, world.state()


def fits(row: str, found: State, before: State, after: State) -> str | None:
    """What is wrong with a state that a crash in the act left."""
    if found[0] not in (before[0], after[0]):
        return f"channels {found[0]}"
    for name, said in found[1].items():
        may = before[1].get(name, {}) | after[1].get(name, {})
        # `waiting` has one message that no sync has reached yet; nothing else may be lost, but for what is evicted.
        must = {seq for seq in before[1].get(name, {}) if not (row in ("N3", "N4") and seq == 3)}
        if row == "N6":
            must &= set(after[1][name])
        if not must <= set(said) or any(may.get(seq) != data for seq, data in said.items()):
            return f"{name} holds {sorted(said)} of {sorted(must)}"
    return None


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("row", "column"), cells("TW", "C±", "LU", "RR"))
def test_after_a_crash_the_channel_has_the_old_or_the_new_state(row: str, column: str) -> None:
    before, after = states(row)
    world, seen, wrongs = prepared(row), set[tuple[bytes, bool]](), list[str]()
    acked = False

    def examine(op: int) -> None:
        for image in world.disk.images(IMAGES[column], Random(op), limit=60):
            if (key := (image.disk.digest(), acked)) in seen:
                continue
            seen.add(key)
            again = World(image.disk)
            found = again.state()
            wrong = fits(row, found, after if acked else before, after)
            again.close()
            if wrong is None and World(image.disk.reboot()).state() != found:
                wrong = "the second restart finds something else"
            if again.manager.report.skipped or wrong:
                wrongs.append(f"before operation {op}, {image.label}: {wrong}")

    world.disk.on_op = examine
    ROWS[row].act(world)
    acked = True
    examine(world.disk.op_count + 1)
    assert not wrongs, wrongs[0]
    assert len(seen) > 1 or column == "TW"


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


class Fault(NamedTuple):
    call: DiskCall
    at: int
    times: int | None
    path: str
    error: int
    mode: SyncMode | None

    def strike(self, disk: SimDisk) -> None:
        if self.mode is not None:
            disk.fail_sync(self.mode, self.at, self.times, self.path)
        else:
            disk.fail(self.call, self.at, self.error, self.times, self.path)


def faults(row: str, column: str) -> list[Fault]:
    """Every single call of the act, failing in the column's way, once and for ever."""
    watched = prepared(row)
    counts: Counter[tuple[DiskCall, str]] = Counter()
    strike = watched.disk._faults.next_fault

    def counting(call: DiskCall, path: str) -> Any:
        if ROWS[row].touched in path:
            counts[call, path] += 1
        return strike(call, path)

    watched.disk._faults.next_fault = counting  # type: ignore[method-assign]
    ROWS[row].act(watched)
    modes: tuple[SyncMode, ...] = ("dropped", "reverted", "kept")
    found = []
    for (call, path), count in counts.items():
        for at, times in product(range(1, count + 1), (1, None)):
            if column == "EF" and call == "sync":
                found += [Fault(call, at, times, path, errno.EIO, mode) for mode in modes]
            elif column == "EF" and call == "sync_dir":
                found.append(Fault(call, at, times, path, errno.EIO, None))
            elif column != "EF" and call in ROWS[row].calls:
                found.append(Fault(call, at, times, path, errno.ENOSPC if column == "NS" else errno.EIO, None))
    return found


@pytest.mark.parametrize(("row", "column"), cells("NS", "EW", "EF"))
def test_a_disk_error_is_reported_and_changes_nothing(row: str, column: str) -> None:
    before, after = states(row)
    outcome, tried = MATRIX[row][column], 0
    for fault in faults(row, column):
        tried += 1
        world = prepared(row)
        fault.strike(world.disk)
        error: Error | None = None
        try:
            ROWS[row].act(world)
        except Error as raised:
            error = raised
        world.disk.clear_faults()
        if row == "N8":  # the sweep reports it, and other channels are served
            assert error is None
            assert world.state() == after
            assert world.manager.report.not_removed or world.manager.report.swept
        elif row in ("N7", "N9"):
            assert error is not None
            assert world.channel(BOB, B).history().messages, "one channel that is offline leaves the others alone"
        elif row == "N2" and error is None:  # the marker was durable: it is deleted, and the rest is swept later
            assert world.state()[0] == after[0]
        else:
            assert error is not None, "the error was not reported"
            if row != "N6":
                assert world.metas() == before[0], "the memory is as before"
        if outcome == "RO":
            assert isinstance(error, Latched)
            with pytest.raises(Latched):
                world.channel().publish(b"later")
            with pytest.raises(Latched):
                world.channel().publish(b"and again", qos=0)
        elif error is not None and row not in ("N7", "N9"):
            assert isinstance(error, DiskFull if column == "NS" else WriteFailed), error
            if row != "N2":
                world.channel().publish(b"it goes on")
            world.manager.tick()
            ROWS[row].act(world)  # nothing is in the way of trying again
            assert world.state()[0] == after[0]
        again = World(world.disk.reboot())
        wrong = fits(row, again.state(), before, after)
        assert wrong is None or "it goes on" in str(again.state()) or (row in ("N2",) and error is not None), wrong
    assert tried, "the act made no such call"


@pytest.mark.parametrize(("row", "column"), cells("SW"))
def test_short_writes_are_continued(row: str, column: str) -> None:
    assert MATRIX[row][column] == "OK"
    _, after = states(row)
    for seed in range(8):
        world = prepared(row)
        world.disk.short_writes(Random(seed))
        ROWS[row].act(world)
        assert world.state() == after
        assert World(world.disk.reboot()).state() == after


@pytest.mark.parametrize(("row", "column"), cells("CJ"))
@pytest.mark.parametrize("jump_s", [3_600, -3_600, 315_360_000, -315_360_000, None])
def test_a_jump_of_the_clock_moves_no_message(row: str, column: str, jump_s: int | None) -> None:
    assert MATRIX[row][column] == "OK"
    _, after = states(row)
    world = prepared(row)
    world.clock.set_us(0 if jump_s is None else world.clock.now_us() + jump_s * 1_000_000)
    ROWS[row].act(world)
    assert world.state() == after
    times = [message.ts_ms for message in Channel(world.manager, A, ANN).history().messages]
    assert times == sorted(times), "times of one channel never go back"


# ── flips ─────────────────────────────────────────────────────────────────────────────────────────


def files(world: World, *endings: str) -> list[str]:
    return [path for path in world.disk.tree() if path.startswith(f"/{DIRECTORY}"[1:]) and path.endswith(endings)]


@pytest.mark.parametrize(("row", "column"), cells("BF"))
def test_a_flipped_bit_is_detected_and_other_channels_are_unaffected(row: str, column: str) -> None:
    """Every byte of the file that the row writes, one bit each."""
    assert MATRIX[row][column] in ("DET", "RB")
    world = prepared(row)
    if ROWS[row].closed:
        ROWS[row].act(world)
    whole = world.state()
    world.close()
    kinds = {
        "N1": ("metadata.bin",),
        "N3": (f"{1:020d}.log",),
        "N7": (f"{1:020d}.idx",),
        "N9": ("metadata.bin", ".log"),
    }
    if row == "N5":
        world = prepared("N6")
        whole = world.state()
        world.close()
    for path in files(world, *kinds.get(row, (f"{1:020d}.log",))):
        for pos in range(0, len(world.disk.read_file(path)), 1 if row == "N1" else 7):
            disk = world.disk.reboot()
            disk.flip_bit(path, pos, pos % 8)
            again = World(disk)
            assert again.channel(BOB, B).history().messages, "the other channel is served"
            if path.endswith("metadata.bin"):
                assert list(again.manager.report.skipped) == [directory_name(A)]
                assert again.manager.metrics.get("store_loads", "corrupt") == 1
                with pytest.raises(Damaged):
                    again.channel().join(persist=True)
                continue
            if row == "N7":
                assert again.state() == whole, "made again from its source"
                continue
            log = again.log()
            try:
                found = {message.seq: message.payload for message in again.channel().history().messages}
            except Corrupt:
                rest = again.channel().history(skip_damage=True).messages
                found = {message.seq: message.payload for message in rest}
            assert all(whole[1][A][seq] == data for seq, data in found.items()), "never served"
            assert len(found) == len(whole[1][A]) or log.damage or not log._log.report.clean, "reported"


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def test_every_cell_has_a_test() -> None:
    there = set()
    for name, function in globals().items():
        for mark in getattr(function, "pytestmark", []) if name.startswith("test_") else []:
            if mark.name == "parametrize" and mark.args[0] == ("row", "column"):
                there |= {param.id for param in mark.args[1]}
    wanted = {f"{row}-{column.replace('±', '')}" for row in MATRIX for column in COLUMNS if MATRIX[row][column] != "–"}
    assert there == wanted
    assert len(wanted) == 65
