"""Every step of a WAL writer on the disk, and what each damage does to a replay, compared with recorded results.

    tests/unit/wal/steps/walk-<number>.txt   random calls: the outcome of each, the whole state of the writer after
                                               it, and the operations on the disk, in order
    tests/unit/wal/steps/damage.txt          one line for each damage: a checksum of everything that a replay and the
                                               preparation for writing found and did, and the findings in short
    tests/unit/wal/steps/failing.txt         one line for each operation that fails

A change of these files is a change of behaviour: it needs a reason, and a reader who compares both versions. To record
them again, run this module with `python -m tests.unit.wal.test_disk_steps`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import unified_diff
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, TypeVar

import pytest
from tests.unit.wal.harness import QUARANTINE, WAL, WalHarness, append, chain, checkpoint_mark
from xxhash import xxh3_64_hexdigest

from tidelog.disk.durability import WriteLatch
from tidelog.errors import Error
from tidelog.testing import SimDisk
from tidelog.wal import Position, Writer, prepare_for_writing, replay_shard
from tidelog.wal import recovery as recovery_module
from tidelog.wal import writer as writer_module
from tidelog.wal.writer import DiskReserve

T = TypeVar("T")
STEPS = Path(__file__).parent / "steps"
SMALL: dict[str, Any] = {
    "PREALLOCATE_STEP_BYTES": 1_024,
    "FIRST_FILE_BYTES": 1_024,
    "LARGE_SYNC_BYTES": 700,
    "UNSYNCED_BYTES_MAX": 4_000,
    "EXTEND_UNSYNCED_BYTES_MIN": 1_500,
    "FILE_BYTES_MIN": 512,
    "RESERVE_FILE_BYTES": 20_000,
    "DISK_RESERVE_BYTES": 40_000,
}


@contextmanager
def small_limits() -> Iterator[None]:
    """Limits that a walk reaches within a few steps."""
    with replaced(writer_module, **SMALL):
        yield


@contextmanager
def replaced(module: ModuleType, **values: object) -> Iterator[None]:
    """Give constants of a module other values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(module, name, value)
        yield


def short(step: str) -> str:
    return re.sub(r"wal-0*(\d+)\.log", r"w\1", step.replace(f"{WAL}/", "").replace("0000000000", ""))


# Walks ----------------------------------------------------------------------------------------------------


class Walk:
    """Random calls of a writer. Without `disk_bytes` the disk has no end."""

    def __init__(self, seed: int) -> None:
        self.random, self.lines = Random(seed), list[str]()
        self.disk = SimDisk(trace=True)
        self.file_bytes, self.marks = self.random.choice([2_048, 8_192]), bool(seed % 4)
        self.limited = seed % 2 == 1
        if self.limited:
            self.disk.capacity_bytes = 150_000
        self.frame = 0
        self.writer = self._open(1)

    def _open(self, first: int) -> Writer:
        latch, reserve = WriteLatch(WAL), DiskReserve(self.disk, WAL)
        reserve.adopt()
        made = Writer(
            self.disk,
            WAL,
            file_number=first,
            file_bytes=self.file_bytes,
            latch=latch,
            write_marks=self.marks,
            reserve=reserve,
        )
        if self.limited:
            reserve.restore()
        self.lines.append(f"# file_bytes {self.file_bytes}, marks {self.marks}, limited {self.limited}")
        return made

    def state(self) -> str:
        writer = self.writer
        reserve, ahead = writer._reserve, writer._next_file
        flags = {
            "full": writer.is_full(100),
            "prepare": writer.should_prepare_next,
            "sync": writer.should_sync,
            "large": writer._has_large_syncs,
            "reserve file": writer.is_reserve_file,
            "current": writer._current_is_written,
            "latched": writer.latch.is_tripped,
            "short": reserve.is_short,
            "complete": reserve.is_complete,
        }
        numbers = {
            "at": f"{writer.position.file_number}:{writer.position.pos}",
            "synced": writer.synced.pos,
            "next": writer.next_frame,
            "capacity": writer._capacity_bytes,
            "announced": writer._announced_bytes,
            "recorded": writer._recorded.pos,
            "syncs": writer._syncs,
            "marked": f"{writer._last_marked.file_number}:{writer._last_marked.pos}",
            "rotations": writer.rotations,
            "refused": writer.disk_full_count,
            "ahead": f"{ahead.filled_bytes}/{ahead._ready_bytes}",
            "reserve": f"{reserve._held_bytes}/{reserve.size}",
        }
        counted = " ".join(f"{name} {value}" for name, value in numbers.items())
        return f"{counted}; {' '.join(name for name, is_set in flags.items() if is_set)}"

    def run(self, name: str, call: Callable[[], object]) -> None:
        self.disk.trace.clear()
        try:
            outcome = repr(call())
        except Error as error:
            outcome = type(error).__name__
        self.lines.append(f"{name}: {outcome}, {self.state()}")
        self.lines += [f"  {short(step)}" for step in self.disk.trace]

    def write(self, size: int, *, may_use_reserve: bool) -> None:
        self.frame += 1
        pieces = chain([b"%d" % self.frame * (size // len(b"%d" % self.frame)), b"end"])
        total = sum(map(len, pieces))
        name = f"write {total}{', may use the reserve' if may_use_reserve else ''}"
        self.run(name, lambda: self.writer.write(pieces, size=total, frames=2, may_use_reserve=may_use_reserve))

    def step(self) -> None:
        random, writer = self.random, self.writer
        others = ["sync", "sync", "idle", "prepare", "prepare", "disk", "allowance"]
        kind = random.choice(["write"] * 5 + others)
        if kind == "write":
            self.write(random.choice([1, 50, 300, 900, 2_500]), may_use_reserve=random.random() < 0.3)
        elif kind == "sync":
            self.run("sync", writer.sync)
        elif kind == "idle":
            self.run("idle", writer.record_synced_position)
        elif kind == "prepare":
            self.run("prepare", writer.prepare_next_file)
        elif kind == "disk" and self.limited:
            used = sum(map(len, self.disk.tree().values()))
            self.disk.capacity_bytes = used + random.choice([0, 300, 3_000, 30_000, 90_000])
            self.run(f"disk with {self.disk.capacity_bytes - used} free", writer._reserve.restore)
        elif kind == "allowance":
            allowed = random.choice([None, None, 100, 700, 5_000])
            writer.allowance = lambda: allowed
            self.run(f"allowance {allowed}", lambda: None)

    def restart(self) -> None:
        if self.random.random() < 0.5:
            self.run("close", self.writer.close)
        self.disk.trace.clear()
        found = replay_shard(self.disk, WAL)
        for _ in found:
            pass
        kept = prepare_for_writing(self.disk, WAL, found, quarantine=QUARANTINE)
        self.lines.append(f"recovered: {kept} {found.torn_tail} {found.losses} next {found.next_file_number}")
        self.writer = self._open(found.next_file_number)
        self.lines += [f"  {short(step)}" for step in self.disk.trace]


def walk_lines(seed: int) -> list[str]:
    with small_limits():
        walk = Walk(seed)
        for _ in range(3):
            for _ in range(45):
                walk.step()
            try:
                walk.restart()
            except Error as error:
                walk.lines.append(f"{type(error).__name__}: {short(str(error))}")
                break
        return walk.lines


WALKS = range(6)


# Damage ---------------------------------------------------------------------------------------------------


@cache
def prepare(how: str) -> dict[str, bytes]:
    """The files of a WAL of three files: closed, killed with synced and unsynced bytes, or without marks."""
    disk = SimDisk()
    harness = WalHarness(disk, file_bytes=900, marks=how != "no marks")
    for number in range(3):
        harness.write(b"a%d" % number * 20)
        harness.write(b"b%d" % number, b"c%d" % number * 30, b"d%d" % number)
        harness.shard.tick()
        harness.write(b"e%d" % number * 60, durable=False)
        harness.write(b"f%d" % number * 90)
    harness.write(b"last", durable=False)
    if how == "closed":
        harness.shard.close()
    return disk.tree()


def damages(files: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    yield "undamaged", files
    for path, content in sorted(files.items()):
        name, others = short(path), {other: found for other, found in files.items() if other != path}
        yield f"{name} missing", others
        yield f"{name} empty", {**files, path: b""}
        yield f"{name} followed by bytes", {**files, path: content.rstrip(b"\0") + b"\xab" * 50}
        yield f"{name} followed by a frame", {**files, path: content.rstrip(b"\0") + append(b"late")}
        used = len(content.rstrip(b"\0"))
        for pos in range(0, used, 11 if used > 100 else 20):
            changed = bytearray(content)
            changed[pos] ^= 1 << pos % 8
            yield f"{name} flipped at {pos}", {**files, path: bytes(changed)}
        for pos in range(0, used, 31):
            yield f"{name} cut at {pos}", {**files, path: content[:pos]}
            yield f"{name} zeros from {pos}", {**files, path: content[:pos] + bytes(len(content) - pos)}
            yield f"{name} zeros at {pos}", {**files, path: content[:pos] + bytes(40) + content[pos + 40 :]}
        if name.startswith("w"):
            for lost in (1, 2, 3):
                first, second = 97 * lost % used, 331 * lost % used
                changed = bytearray(content)
                changed[first] ^= 255
                changed[second] ^= 255
                yield f"{name} flipped at {first} and {second}", {**files, path: bytes(changed)}
            inner = content[: used // 2] + content + content[used // 2 :]
            yield f"{name} with a copy of itself", {**files, path: inner}
            yield f"{name} with a false mark", {**files, path: content[:used] + checkpoint_mark(1, 900, at=used)}
    proofs = [path for path in files if "CURRENT" in path or "NEWEST" in path]
    newest = max(path for path in files if "/wal-" in path)
    for missing in (proofs, [*proofs, newest], [newest]):
        yield f"without {short(' '.join(missing))}", {p: c for p, c in files.items() if p not in missing}


def replayed(files: dict[str, bytes], start: Position | None, durable: Position | None) -> tuple[list[Any], str]:
    disk = SimDisk(trace=True)
    disk.make_dir(WAL)
    for path, content in files.items():
        disk.write_file(path, content)
    disk.trace.clear()
    try:
        replay = replay_shard(disk, WAL, start, durable=durable)
        windows = [_window(window) for window in replay]
        again = [_window(window) for window in replay.windows()]
        replay.drop_cached_windows()
        reread = [_window(window) for window in replay.windows()]
    except Error as error:
        return [str(error)], type(error).__name__
    state: list[Any] = [
        windows,
        again,
        reread,
        replay.extents,
        replay.torn_tail,
        [(*lost[:5], lost.kinds and sorted(lost.kinds), *lost[6:]) for lost in replay.losses],
        replay.missing_frames,
        replay.missing_file,
        replay.next_file_number,
        replay.file_numbers,
        replay.current_file_fault(),
    ]
    state += [prepare_for_writing(disk, WAL, replay, quarantine=QUARANTINE), disk.trace, sorted(disk.tree().items())]
    tail = replay.torn_tail
    words = [
        f"{sum(len(window[2]) for window in windows)} frames",
        *([] if tail is None else [f"torn {tail.file_number}:{tail.pos}+{tail.size} ({tail.frames})"]),
        *(f"lost {lost.file_number}:{lost.pos}-{lost.end} ({lost.records})" for lost in replay.losses),
        f"next {replay.next_file_number}",
    ]
    return state, ", ".join(words)


def _window(window: Any) -> tuple[Any, ...]:
    at = window.frame_pos.tolist()
    return window.file_number, window.file_offset, at, window.losses_before, window.doubtful, len(window.buf)


PARTS = 16


def slice_of(items: list[T], part: int | None) -> list[T]:
    """One of `PARTS` slices: a test that runs few cases says more about the lines that it runs."""
    return items if part is None else items[len(items) * part // PARTS : len(items) * (part + 1) // PARTS]


def damage_lines(how: str, part: int | None = None) -> list[str]:
    files = prepare(how)
    numbers = sorted(int(path[-20:-4]) for path in files if "/wal-" in path)
    starts: dict[str, tuple[Position | None, Position | None]] = {
        "all": (None, None),
        "from a checkpoint": (Position(numbers[1], 0), Position(numbers[1], 200)),
        "from the middle of the newest file": (Position(numbers[-1], 140), Position(numbers[-1], 300)),
    }
    cases = [
        (begin, name, damaged)
        for begin in starts
        for name, damaged in damages(files)
        if begin == "all" or " at " not in name or int(name.rpartition(" ")[2]) % 5 == 0
    ]
    lines = list[str]()
    for begin, name, damaged in slice_of(cases, part):
        state, words = replayed(damaged, *starts[begin])
        lines.append(f"{how}, {begin}, {name}: {xxh3_64_hexdigest(repr(state).encode())} {words}")
    return lines


# Small windows --------------------------------------------------------------------------------------------


def window_lines(part: int | None = None) -> list[str]:
    """The same with windows and chunks of a few bytes, so that frames and marks lie across their bounds."""
    lines = list[str]()
    damaged_files = list(damages(prepare("killed")))
    cases = [case for case in damaged_files if " at " not in case[0] or int(case[0].rpartition(" ")[2]) % 3 == 0]
    with replaced(recovery_module, WINDOW_BYTES=150, _CHUNK_BYTES=64, CACHED_WINDOWS_BYTES_MAX=400):
        for name, damaged in slice_of(cases, part):
            state, words = replayed(damaged, None, None)
            lines.append(f"small windows, {name}: {xxh3_64_hexdigest(repr(state).encode())} {words}")
    return lines


# Failing operations ---------------------------------------------------------------------------------------


def failing_life(number: int, error: int) -> list[str]:
    """The outcomes, states and operations of a shard of which operation `number` fails; empty where there is none."""
    disk = SimDisk(trace=True)
    harness = WalHarness(disk, file_bytes=1_200)
    count = 0

    def fail(_: int) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise OSError(error, "injected")

    disk.on_op = fail
    found: list[str] = []
    for step in range(12):
        calls: list[Callable[[], object]] = [
            lambda: harness.write(b"x" * 200, b"y" * 100),
            lambda: harness.write(b"z" * 150, durable=False),
            harness.shard.tick,
        ]
        try:
            found.append(repr(calls[step % 3]()))
        except Error as failure:
            found.append(f"{type(failure).__name__} {failure}")
        found.append(f"{harness.writer.position} {harness.writer.synced} {harness.shard.stats}")
    try:
        harness.shard.close()
    except Error as failure:
        found.append(f"{type(failure).__name__} {failure}")
    disk.on_op = None
    found.append(repr(sorted(disk.open_files())))
    stats = re.sub(r"sync_us\w*=(\d+|\[[^]]*\])", "", repr(found))
    state, words = replayed(disk.reboot().tree(), None, None)
    return [stats, repr(disk.trace), repr(state), words] if count >= number else []


def failing_lines(error: int, numbers: range = range(1, 500)) -> list[str]:
    with small_limits():
        lines = list[str]()
        for number in numbers:
            found = failing_life(number, error)
            if not found:
                return lines
            failed = sorted(set(re.findall(r"'([A-Z]\w+) ", found[0])) - {"Position", "ShardStats"})
            lines.append(f"failing {error}, {number}: {xxh3_64_hexdigest(repr(found).encode())} {failed} {found[3]}")
        return lines


# Comparison -----------------------------------------------------------------------------------------------


@cache
def recorded(name: str) -> list[str]:
    return (STEPS / f"{name}.txt").read_text().splitlines()


def compare(expected: list[str], found: list[str]) -> None:
    if expected != found:
        raise AssertionError("\n".join(list(unified_diff(expected, found, "recorded", "now", lineterm="", n=2))[:60]))


@pytest.mark.parametrize("seed", WALKS)
def test_the_steps_of_a_writer_on_the_disk(seed: int) -> None:
    compare(recorded(f"walk-{seed}"), walk_lines(seed))


HOW = ("closed", "killed", "no marks")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("how", HOW)
def test_a_replay_of_damaged_files(how: str, part: int) -> None:
    expected = [line for line in recorded("damage") if line.startswith(how)]
    compare(slice_of(expected, part), damage_lines(how, part))


@pytest.mark.parametrize("part", range(PARTS))
def test_a_replay_in_small_windows(part: int) -> None:
    expected = [line for line in recorded("damage") if line.startswith("small windows")]
    compare(slice_of(expected, part), window_lines(part))


@pytest.mark.parametrize("first", range(1, 64, 8))
@pytest.mark.parametrize("error", [5, 28])
def test_operations_that_fail(error: int, first: int) -> None:
    expected = [line for line in recorded("failing") if line.startswith(f"failing {error}, ")]
    compare(expected[first - 1 : first + 7], failing_lines(error, range(first, first + 8)))


def record() -> None:
    STEPS.mkdir(exist_ok=True)
    for seed in WALKS:
        (STEPS / f"walk-{seed}.txt").write_text("\n".join(walk_lines(seed)) + "\n")
    damage = [line for how in HOW for line in damage_lines(how)] + window_lines()
    (STEPS / "damage.txt").write_text("\n".join(damage) + "\n")
    failing = [line for error in (5, 28) for line in failing_lines(error)]
    (STEPS / "failing.txt").write_text("\n".join(failing) + "\n")


if __name__ == "__main__":
    record()
