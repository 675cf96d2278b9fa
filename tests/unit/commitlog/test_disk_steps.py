"""Every step of a log on the disk, and what each damaged file does to an open, compared with recorded results.

`tests/unit/commitlog/steps/<layout>.txt` has three parts:

  the life of a log    each call with its result, and the operations on the disk that it makes, in order
  damage               one line for each damaged file: a checksum of the whole state after the open (report, segments,
                       operations, files), and the report in words
  failing operations   one line for each operation of a short life that fails: how its call ended, and a checksum of
                       the state and the operations after it

A change of these files is a change of behaviour: it needs a reason, and a reader who compares both versions. To record
them again, run this module with `python -m tests.unit.commitlog.test_disk_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.unit.commitlog.conftest import CODECS
from xxhash import xxh3_64_hexdigest

from tidelog.commitlog import SegmentedLog
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

STEPS = Path(__file__).parent / "steps"
MANIFEST = "log/.tidelog.manifest"
T = TypeVar("T")


def open_log(codec: str, disk: SimDisk, clock: ManualClock, **settings: Any) -> SegmentedLog:
    return SegmentedLog.open("log", codec, disk=disk, clock=clock, **settings)


def key_of(record: Record) -> bytes | None:
    return record.data[:1] if record.data[:1] != b"-" else None


def is_tombstone(record: Record) -> bool:
    return record.data.endswith(b"!")


# The life of a log ----------------------------------------------------------------------------------------


class Life:
    """Runs steps and notes results and operations."""

    def __init__(self, codec: str) -> None:
        self.codec, self.clock, self.lines = codec, ManualClock(), list[str]()
        self.disk = SimDisk(clock=self.clock, trace=True)
        self.log = open_log(codec, self.disk, self.clock)
        self.note("open", None)

    def note(self, name: str, result: object) -> None:
        segments = " ".join(f"{part.start}-{part.stop}" for part in self.log.segments)
        self.lines.append(f"{name}: {result!r}, segments {segments}, durable {self.log.durable}")
        self.lines += [f"  {step.replace('log/', '')}" for step in self.disk.trace]
        self.disk.trace.clear()

    def run(self, name: str, call: Callable[[SegmentedLog], object]) -> None:
        try:
            result = call(self.log)
        except Error as error:
            result = type(error).__name__
        self.note(name, result)

    def reopen(self, name: str, **settings: Any) -> None:
        self.log = open_log(self.codec, self.disk, self.clock, **settings)
        self.note(name, self.log.report.lines())

    def put(self, *datas: bytes) -> None:
        self.run(f"append {b' '.join(datas).decode()}", lambda log: log.append_many(datas))
        self.clock.tick(10)


def live(codec: str) -> list[str]:
    life = Life(codec)
    life.put(b"a1", b"b1", b"-x")
    life.run("append one", lambda log: log.append(b"a2"))
    life.run("sync", lambda log: log.sync())
    life.run("seal", lambda log: log.seal())
    life.run("seal an empty segment", lambda log: log.seal())
    life.put(b"a3", b"c1!", b"d1")
    life.run("seal", lambda log: log.seal())
    life.put(b"b2", b"c2")
    life.run("commit an offset", lambda log: log.offsets.commit("g", log.lowest + 4))
    life.run("seal", lambda log: log.seal())
    life.put(b"e1")
    life.run("compact", lambda log: log.compact(key_of))
    life.run("compact again", lambda log: log.compact(key_of))
    life.put(b"c3!")
    life.run("seal", lambda log: log.seal())
    life.put(b"f1")
    life.run(
        "compact, keep tombstones", lambda log: log.compact(key_of, is_tombstone=is_tombstone, keep_tombstones_ms=10**9)
    )
    life.clock.tick(100)
    life.run("compact, drop tombstones", lambda log: log.compact(key_of, is_tombstone=is_tombstone))
    life.run("retain all", lambda log: log.retain(keep_ms=10**6, keep_bytes=10**9))
    life.run("retain by bytes", lambda log: log.retain(keep_bytes=10))
    life.run("retain by age", lambda log: log.retain(keep_ms=1))
    life.run("close", lambda log: log.close())
    life.reopen("reopen")
    for number in range(4):
        life.put(b"%d" % number * 3)
        life.run("seal", lambda log: log.seal())
    life.run("drop below", lambda log: log.drop_below(log.segments[-3].stop))
    life.run("truncate", lambda log: log.truncate(log.highest - 1))
    life.put(b"after")
    life.clock.tick(1_000)
    life.run("remove young", lambda log: log.remove_expired(5_000))
    life.run("remove expired", lambda log: log.remove_expired(500))
    life.put(b"g1", b"g2")
    life.disk = life.disk.reboot()
    life.disk._tracing = True
    life.reopen("reopen after a kill")
    life.put(b"h1")
    life.run("seal", lambda log: log.seal())
    life.disk = life.disk.reboot()
    life.disk._tracing = True
    life.reopen("read only after a kill", read_only=True)
    life.reopen("reopen")
    life.run("close", lambda log: log.close())
    return life.lines


# Damage ---------------------------------------------------------------------------------------------------


@cache
def prepare(codec: str, how: str) -> tuple[dict[str, bytes], dict[str, int]]:
    """The files of a log with two sealed segments and an active one: closed, also with an empty active segment, killed,
    or without its manifest; and where the last record begins in each file that has it."""
    clock = ManualClock()
    disk = SimDisk(clock=clock)
    log = open_log(codec, disk, clock)
    log.append_many([b"a1", b"b1", b"c1", b"c2" * 20])
    log.seal()
    log.append_many([b"a2", b"b2", b"d1"])
    log.seal()
    log.compact(key_of)
    log.append_many([b"e1", b"f1" * 9])
    before = disk.tree()
    log.append(b"g1")
    last = {path: len(content.rstrip(b"\0")) for path, content in before.items() if disk.tree()[path] != content}
    log.offsets.commit("g", log.lowest + 2)
    if how == "closed after a seal":
        log.seal()
    if how.startswith("closed"):
        log.close()
    found = disk.tree()
    if how == "no manifest":
        del found[MANIFEST]
    return {path: content for path, content in found.items() if not path.endswith("lock")}, last


def flip(content: bytes, fifths: int) -> bytes:
    changed = bytearray(content)
    changed[len(content) * fifths // 5] ^= 4
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "one byte short": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "flipped at its start": lambda content: flip(content, 0),
    "flipped": lambda content: flip(content, 2),
    "flipped near its end": lambda content: flip(content, 4),
    "followed by bytes": lambda content: content + b"\xab" * 7,
    "followed by zeros": lambda content: content + bytes(40),
}
MODES: list[tuple[str, str, dict[str, Any]]] = [
    ("closed", "writer", {}),
    ("closed", "reader", {"read_only": True}),
    ("closed after a seal", "writer", {}),
    ("closed after a seal", "verifying reader", {"read_only": True, "verify_on_open": True}),
    ("killed", "writer", {}),
    ("killed", "verifying reader", {"read_only": True, "verify_on_open": True}),
    ("no manifest", "writer", {}),
    ("no manifest", "verifying writer", {"verify_on_open": True}),
    ("no manifest", "repairing writer", {"repair": True}),
]


def damaged_trees(files: dict[str, bytes], last: dict[str, int]) -> Iterator[tuple[str, dict[str, bytes]]]:
    yield "undamaged", files
    for path, pos in last.items():
        inserted = files[path][:pos] + b"\xab" * 7 + files[path][pos:]
        yield f"{path.removeprefix('log/')} with bytes before its last record", {**files, path: inserted}
    yield "temporaries", {**files, "log/.next_seq.tmp": b"x", "log/.cleaner_checkpoint.tmp": b"x", "log/foreign": b"x"}
    for path, content in sorted(files.items()):
        name = path.removeprefix("log/")
        others = {other: found for other, found in files.items() if other != path}
        for damage, change in DAMAGES.items():
            changed = change(content) if content else None
            yield f"{name} {damage}", others if changed is None else {**others, path: changed}
        for suffix in (".compacted", ".rebuilding"):
            yield f"{name}{suffix} beside it", {**files, f"{path}{suffix}": content}
            yield f"{name}{suffix} in its place", {**others, f"{path}{suffix}": content}


def state_of(log: SegmentedLog) -> list[object]:
    report, state = log.report, log._log_state
    # Without the counts of the metrics, which test_metrics.py compares: the lines name each rebuilt file already.
    fields = [getattr(report, name) for name in report.__slots__ if not name.startswith("index_rebuild")]
    sealed = [
        (
            segment.base,
            segment.stop,
            segment.size,
            segment.side_bytes,
            segment.footer,
            segment.rebuilt_sides,
            segment.complete_bytes,
            segment.authoritative_side_bits,
            segment.lost_reason,
            None if segment.salvage is None else (segment.salvage.faults, segment.salvage.rows.seq.tolist()),
        )
        for segment in state.sealed
    ]
    active = state.active
    own = (active.base, active.next_seq, active.size, active.side_bytes, active.created_us, active.last_write_us)
    try:
        records: object = [(record.seq, record.ts_us, record.data) for record in log.records(skip_damage=True)]
    except Error as error:
        records = str(error)
    return [fields, report.clean, report.lines(), sealed, own, active.last_ts_us, log.durable, records]


def open_damaged(codec: str, files: dict[str, bytes], settings: dict[str, Any]) -> tuple[list[object], list[str]]:
    """The whole state after an open, and a short text."""
    clock = ManualClock()
    clock.tick(5_000)
    disk = SimDisk(clock=clock, trace=True)
    disk.make_dir("log")
    for path, content in files.items():
        disk.write_file(path, content)
    disk.trace.clear()
    try:
        log = open_log(codec, disk, clock, **settings)
    except Error as error:
        return [type(error).__name__, str(error), disk.trace, disk.tree()], [f"{type(error).__name__}: {error}"]
    state = [*state_of(log), disk.trace.copy()]
    lines = [" ".join(f"{part.start}-{part.stop}" for part in log.segments), *log.report.lines()]
    if not settings.get("read_only"):
        try:
            state.append(log.append(b"next"))
            log.close()
        except Error as error:
            state.append(str(error))
    return [*state, disk.trace, sorted(disk.tree().items())], lines


PARTS = 12


def damage_lines(codec: str, mode: tuple[str, str, dict[str, Any]], part: int | None = None) -> list[str]:
    how, opener, settings = mode
    lines = []
    cases = list(damaged_trees(*prepare(codec, how)))
    for name, files in cases if part is None else slice_of(cases, part):
        state, words = open_damaged(codec, files, settings)
        lines.append(f"{how}, {opener}, {name}: {xxh3_64_hexdigest(repr(state).encode())} {'; '.join(words)}")
    return lines


# Failing operations ---------------------------------------------------------------------------------------


def short_life(codec: str, number: int, error: int) -> Iterator[str]:
    """A log of which operation `number` fails; yields how each call ended, and the state and operations after it."""
    clock = ManualClock()
    disk = SimDisk(clock=clock, trace=True)
    log = open_log(codec, disk, clock)
    log.append_many([b"a1", b"b1", b"c1"])
    log.seal()
    log.append_many([b"a2", b"d1"])
    disk.trace.clear()
    count = 0

    def fail(_: int) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise OSError(error, "injected")

    disk.on_op = fail
    calls: list[Callable[[SegmentedLog], object]] = [
        lambda log: log.append(b"e1"),
        lambda log: log.seal(),
        lambda log: log.append(b"f1"),
        lambda log: log.compact(key_of),
        lambda log: log.append(b"g1"),
        lambda log: log.retain(keep_bytes=100),
        lambda log: log.close(),
    ]
    for call in calls:
        try:
            yield repr(call(log))
        except Error as failure:
            yield f"{type(failure).__name__} {failure}"
        except OSError as failure:
            yield f"OSError {failure.errno}"
        yield repr([log.segments, log.durable, log.report.lines()])
    disk.on_op = None
    again = open_log(codec, disk.reboot(), clock)
    yield repr(state_of(again))
    yield repr(disk.trace)
    yield "" if count >= number else "done"


def fault_lines(codec: str, error: int, numbers: range = range(1, 200)) -> list[str]:
    lines: list[str] = []
    for number in numbers:
        *steps, end = short_life(codec, number, error)
        if end:
            return lines
        failed = [f"{call} {step.partition(' ')[0]}" for call, step in enumerate(steps[:14:2]) if step[:1].isupper()]
        words = [each for each in failed if not each.endswith(("Result(segments=0,", "True", "None"))]
        lines.append(f"failing {error}, {number}: {xxh3_64_hexdigest(repr(steps).encode())} {', '.join(words)}")
    return lines


def slice_of(items: list[T], part: int) -> list[T]:
    """One of `PARTS` slices: a test that runs few cases says more about the lines that it runs."""
    return items[len(items) * part // PARTS : len(items) * (part + 1) // PARTS]


@cache
def recorded(codec: str) -> tuple[list[str], list[str]]:
    life, _, rest = (STEPS / f"{codec}.txt").read_text().partition("\n\n")
    return life.splitlines(), rest.splitlines()


def compare(expected: list[str], found: list[str]) -> None:
    if expected != found:
        raise AssertionError("\n".join(list(unified_diff(expected, found, "recorded", "now", lineterm="", n=2))[:60]))


@pytest.mark.parametrize("codec", CODECS)
def test_the_steps_of_a_log_on_the_disk(codec: str) -> None:
    compare(recorded(codec)[0], live(codec))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode[0]}, {mode[1]}")
@pytest.mark.parametrize("codec", CODECS)
def test_an_open_of_damaged_files(codec: str, mode: tuple[str, str, dict[str, Any]], part: int) -> None:
    prefix = f"{mode[0]}, {mode[1]}, "
    expected = [line for line in recorded(codec)[1] if line.startswith(prefix)]
    compare(slice_of(expected, part), damage_lines(codec, mode, part))


@pytest.mark.parametrize("first", range(1, 100, 8))
@pytest.mark.parametrize("error", [5, 28])
@pytest.mark.parametrize("codec", CODECS)
def test_operations_that_fail(codec: str, error: int, first: int) -> None:
    expected = [line for line in recorded(codec)[1] if line.startswith(f"failing {error}, ")]
    compare(expected[first - 1 : first + 7], fault_lines(codec, error, range(first, first + 8)))


def record() -> None:
    STEPS.mkdir(exist_ok=True)
    for codec in CODECS:
        damage = [line for mode in MODES for line in damage_lines(codec, mode)]
        failing = [line for error in (5, 28) for line in fault_lines(codec, error)]
        (STEPS / f"{codec}.txt").write_text("\n".join([*live(codec), "", *damage, *failing]) + "\n")


if __name__ == "__main__":
    record()
