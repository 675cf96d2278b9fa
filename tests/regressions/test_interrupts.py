"""An interrupt in the caller's thread latches nothing and cuts no commit in two (docs/bugs.md)."""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.sampling import one_in

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.database import engine_of
from tidelog.disk.process import DEFER_SIGNALS
from tidelog.engine.config import Durability
from tidelog.errors import AlreadyMember
from tidelog.testing import ManualClock, SimDisk

WRITER = Path(__file__).with_name("interrupted_process.py")
USER, ROOM = "ann@example.org", "!room@example.org"
CODECS = ["tide", "rustlog", "laminar", "narwhal"]
SYNCED = [  # each half has every codec, and both policies
    *(("tide", "batch"), ("tide", "interval"), ("rustlog", "interval"), ("rustlog", "batch")),
    *(("laminar", "batch"), ("laminar", "interval"), ("narwhal", "interval"), ("narwhal", "batch")),
]
CLASSES = ["fsync", "disk", "memory"]


# ── real processes, real signals ──────────────────────────────────────────────────────────────────


@pytest.fixture(params=[8, pytest.param(40, marks=pytest.mark.sweep)])
def rounds(request: pytest.FixtureRequest) -> int:
    """Interrupts of a process; each test has 40 in `make crash`."""
    found: int = request.param
    return found


def interrupted(what: str, path: Path, *settings: str, rounds: int) -> dict[int, int]:
    """What a process acked that was interrupted so often: seqs by the number of the write."""
    done = processes.run(
        [sys.executable, str(WRITER), what, str(path), str(rounds), *settings],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["interrupts"] == rounds
    return {int(number): seq for number, seq in said["acked"].items()}


def judge(acked: dict[int, int], found: list[tuple[int, bytes]]) -> None:
    """Every acked write is there, once, at its seq; what was not acked is there at most once."""
    numbers = [int(data) for _, data in found]
    assert len(numbers) == len(set(numbers)), "something is there twice"
    assert numbers == sorted(numbers)
    at = {int(data): seq for seq, data in found}
    assert {number: at.get(number) for number in acked} == acked


@pytest.mark.slow
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize(("threads", "shards"), [("threads", "1"), ("threads", "2"), ("none", "1")])
def test_interrupted_appends_leave_a_topic_writable(
    tmp_path: Path, durability: Durability, threads: str, shards: str, rounds: int
) -> None:
    acked = interrupted("topic", tmp_path / "data", durability, threads, shards, rounds=rounds)
    with tidelog.open(str(tmp_path / "data")) as log:
        assert not log.report.damage
        table = log.topic("t", create=False).to_arrow()
    judge(acked, list(zip(table["seq"].to_pylist(), table["data"].to_pylist(), strict=True)))


@pytest.mark.slow
def test_interrupted_queues_lose_and_double_no_job(tmp_path: Path, rounds: int) -> None:
    acked = interrupted("queue", tmp_path / "data", rounds=rounds)
    with tidelog.open(str(tmp_path / "data")) as log:
        table = log.topic("t", create=False).to_arrow()
    judge(acked, list(zip(table["seq"].to_pylist(), table["data"].to_pylist(), strict=True)))


@pytest.mark.slow
def test_interrupted_publishes_leave_a_channel_writable(tmp_path: Path, rounds: int) -> None:
    acked = interrupted("channel", tmp_path / "data", rounds=rounds)
    with tidelog.open(str(tmp_path / "data")) as log:
        room = log.channel(ROOM, user=USER)
        found = room.history(newest=1000).messages
    judge({number: seq for number, seq in acked.items() if seq >= found[0].seq}, [(m.seq, m.payload) for m in found])


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "sync"), one_in(2, SYNCED))
def test_interrupted_appends_leave_a_segmented_log_writable(tmp_path: Path, codec: str, sync: str, rounds: int) -> None:
    acked = interrupted("segmented", tmp_path / "log", codec, sync, rounds=rounds)
    with SegmentedLog.open(str(tmp_path / "log")) as log:
        judge(acked, [(record.seq, record.data) for record in log])


# ── at every step, in this process ────────────────────────────────────────────────────────────────


class Interrupts:
    """Sends SIGINT to this process at one of the places where Python would run its handler: a call, or the return of a
    C function.

    The profile function stays installed and referenced while it runs: CPython 3.11 uses it after it was removed inside
    itself, and crashes now and then."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0
        self._profile = self._event

    def _event(self, frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG002
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                signal.raise_signal(signal.SIGINT)

    def run(self, work: Callable[[], object]) -> bool:
        """Whether the work came to its end before the interrupt was raised."""
        try:
            sys.setprofile(self._profile)
            work()
            sys.setprofile(None)
        except KeyboardInterrupt:
            return False
        finally:
            sys.setprofile(None)
        return True


def sweep(work: Callable[[int], object]) -> tuple[set[int], int]:
    """Run `work` with an interrupt at its first place, at its second, …, until it has no more. Returns the numbers of
    those that came to their end, and how many were tried."""
    done, number = set(), 0
    while True:
        number += 1
        trial = Interrupts(number)
        if trial.run(lambda number=number: work(number)):  # type: ignore[misc]
            done.add(number)
        assert not DEFER_SIGNALS.depth
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if trial.seen < number:
            return done, number


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """The handler that raises; and no garbage collection: an interrupt in a finalizer would be lost."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def opened(disk: SimDisk, **settings: Any) -> tidelog.Database:
    return tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, **settings)


@pytest.mark.parametrize("durability", [*CLASSES, "ephemeral"])
@pytest.mark.parametrize(("shards", "waits"), [(1, True), (2, True), (1, False)])
def test_an_interrupt_at_any_step_of_an_append_leaves_it_whole(
    durability: Durability, shards: int, waits: bool
) -> None:
    disk = SimDisk()
    log = opened(disk, wal_shards=shards, wal_file_bytes=1 << 14)
    topic = log.topic("t", durability=durability, cap_records=1 << 20, cap_bytes=1 << 30)

    def write(number: int) -> None:
        if waits:
            topic.append(b"%d" % number)
        else:
            topic.append_nowait(b"%d" % number).wait()

    done, tried = sweep(write)
    assert tried > 100
    topic.append(b"0")
    live = [(record.seq, int(record.data)) for record in topic.read(0, 1 << 20).records]
    numbers = [number for _, number in live]
    assert len(set(numbers)) == len(numbers)
    assert done <= set(numbers)
    if durability != "ephemeral":
        again = opened(disk.reboot(), wal_shards=shards)
        assert not again.report.damage
        found = again.topic("t", create=False).read(0, 1 << 20).records
        assert [(record.seq, int(record.data)) for record in found] == live
    log.close()


def test_an_interrupt_at_any_step_leaves_topics_made_configured_and_dropped_or_not() -> None:
    disk = SimDisk()
    log = opened(disk, wal_shards=2)

    def work(number: int) -> None:
        log.topic("t", cap_records=number)
        log.topic("t").append(b"x")
        log.drop("t")

    _, tried = sweep(work)
    assert tried > 300
    log.topic("t").append(b"y")
    names = log.names()
    log.close()
    again = opened(disk)
    assert not again.report.damage
    assert again.names() == names


def test_an_interrupt_at_any_step_of_deletes_claims_and_acks_leaves_them_whole() -> None:
    disk = SimDisk()
    log = opened(disk)
    topic, queue = log.topic("t", durability="fsync"), log.queue("q", durability="fsync")
    topic.append([b"x"] * 4000)
    queue.put([b"x"] * 4000)
    log.router("r", "t", "copies")

    def work(number: int) -> None:
        topic.delete(seqs=[number])
        topic.append(b"y", tag="y")
        queue.ack("me", queue.claim("me", 1))

    _, tried = sweep(work)
    assert tried > 300
    log.checkpoint()
    names = ("t", "q", "copies")
    live = {name: [r.seq for r in log.topic(name).read(0, 1 << 20).records] for name in names}
    counts = queue.counts()
    assert counts.ready + counts.in_flight == len(live["q"])
    log.close()
    again = opened(disk)
    assert not again.report.damage
    assert {name: [r.seq for r in again.topic(name).read(0, 1 << 20).records] for name in names} == live


def test_an_interrupt_at_any_step_of_a_publish_or_a_join_leaves_channels_usable() -> None:
    disk = SimDisk()
    log = opened(disk)
    room = log.channel(ROOM, user=USER).join(persist=True, message_flush_interval=0, max_persist_messages=1000)
    other = log.channel(ROOM, user="bob@example.org")

    def work(number: int) -> None:
        with suppress(AlreadyMember):  # its last leave was interrupted before it began
            other.join()
        room.publish(b"%d" % number)
        other.leave()

    _, tried = sweep(work)
    assert tried > 300
    last = room.publish(b"0").seq
    live = [(m.seq, m.payload) for m in room.history(newest=500).messages]
    members = room.members(page_size=1000)
    log.close()
    with opened(disk) as again:
        same = again.channel(ROOM, user=USER)
        assert [(m.seq, m.payload) for m in same.history(newest=500).messages] == live
        assert same.members(page_size=1000) == members
        assert live[-1] == (last, b"0")


@pytest.mark.parametrize("codec", CODECS)
def test_an_interrupt_at_any_step_of_an_append_leaves_a_segmented_log_whole(codec: str) -> None:
    disk = SimDisk()
    log = SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), sync="batch", segment_bytes_max=1 << 12)
    done, tried = sweep(lambda number: log.append(b"%d" % number))
    assert tried > 50
    log.append(b"0")
    live = [(record.seq, int(record.data)) for record in log]
    assert done <= {number for _, number in live}
    assert len({number for _, number in live}) == len(live)
    log.close()
    with SegmentedLog.open("log", disk=disk, clock=ManualClock()) as again:
        assert [(record.seq, int(record.data)) for record in again] == live


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("durability", CLASSES)
def test_what_breaks_off_a_write_or_a_sync_is_raised_when_the_commit_is_done(
    durability: Durability, kind: type[BaseException]
) -> None:
    """Raised inside each call to the disk, as an exception that a program sends to a thread would be."""
    disk = SimDisk()
    log = opened(disk, wal_file_bytes=1 << 12)
    topic = log.topic("t", durability=durability)
    wanted: list[bytes] = []
    for number in range(1, 200):
        armed = [disk.op_count + 1 + number % 4]

        def strike(op: int, armed: list[int] = armed) -> None:
            if op in armed:
                armed.clear()
                raise kind

        disk.on_op = strike
        with suppress(kind):
            topic.append(b"%d" % number * 20)
        disk.on_op = None
        wanted.append(b"%d" % number * 20)
        assert not engine_of(log).shards[0].is_latched
    assert [record.data for record in topic.read(0, 1000).records] == wanted
    again = opened(disk.reboot())
    assert [record.data for record in again.topic("t").read(0, 1000).records] == wanted
