"""Bugs of checkpoints, retention and background work, by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Semaphore
from typing import Any, get_args

import pytest
from tests.kit.sampling import one_in

import tidelog
from tidelog.channels.manager import ChannelManager
from tidelog.database import engine_of
from tidelog.disk.interface import Mode
from tidelog.engine import Engine, append, checkpoint, manifest, retention
from tidelog.engine.check import check_directory, checkpoint_summary
from tidelog.engine.config import Durability
from tidelog.engine.engine import Engine as TopicEngine
from tidelog.engine.gap_log import GapLog
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, WriteFailed
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.simulated_disk import SimFile

DURABLE = [durability for durability in get_args(Durability) if durability != "ephemeral"]


def opened(disk: SimDisk, shards: int = 1, **settings: Any) -> Engine:
    plain: dict[str, Any] = {"clock": ManualClock(), "threads": False, "wal_file_bytes": 1 << 14}
    return engine_of(tidelog.open("data", disk=disk, wal_shards=shards, **plain | settings))


def seqs(log: Engine, name: str) -> list[int]:
    return [record.seq for record in log.topic(name, create=False).read(0, 1_000).records]


class Between:
    """Acts once inside a checkpoint: before the topic at this place is written, or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str, act: object) -> None:
        write = checkpoint._write_topic
        self.done = False

        def written(core: TopicState, *rest: object) -> None:
            when, name = place.split()
            if when == "before" and core.name == name and not self.done:
                self.done = True
                act()  # type: ignore[operator]
            write(core, *rest)  # type: ignore[arg-type]
            if when == "after" and core.name == name and not self.done:
                self.done = True
                act()  # type: ignore[operator]

        monkeypatch.setattr(checkpoint, "_write_topic", written)


PLACES = [f"{when} {name}" for name in ("a", "m", "z") for when in ("before", "after")]
LIMITS = [{"cap_records": 5}, {"cap_bytes": 5}, {"cap_records": 5, "discard": "reject"}]


# ── config frames in replay ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(map(str, limit)))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", DURABLE)
def test_a_cap_that_was_lifted_takes_nothing_that_was_written_later(
    durability: str,
    shards: int,
    place: str,
    limit: dict[str, object],
    restarts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a checkpoint a topic gets a low cap, then a high one, then records: replay finds the records in the
    snapshot before it comes to the frame with the low cap."""
    disk = SimDisk()
    log = opened(disk, shards)
    for name in ("a", "m", "z"):
        log.topic(name, durability=durability).append([b"x"] * 8)

    def act() -> None:
        topic = log.topic("m", create=False, **limit)
        topic.append([b"y"] * 4) if limit.get("discard") != "reject" else None
        log.topic("m", create=False, cap_records=1000, cap_bytes=1000, discard="old")
        topic.append([b"z"] * 100)

    between = Between(monkeypatch, place, act)
    log.checkpoint()
    assert between.done
    log.tick()
    was, state = seqs(log, "m"), log.topic("m", create=False).state()
    assert len(was) >= 100
    for _ in range(restarts):
        log = opened(disk := disk.reboot(), shards)
        now = log.topic("m", create=False).state()
        assert seqs(log, "m") == was
        assert (now.evict_floor, now.count, now.bytes) == (state.evict_floor, state.count, state.bytes)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", DURABLE)
def test_the_cap_a_topic_was_made_with_takes_nothing_that_was_written_after_it_was_lifted(
    durability: str, shards: int
) -> None:
    """The frame that made the topic is replayed as well: it was made after the checkpoint took its WAL positions and
    before it listed the topics."""
    disk = SimDisk()
    log = opened(disk, shards)
    log.topic("a", durability=durability).append([b"x"] * 8)
    next_id = log._checkpoints._next_topic_id

    def act() -> int:
        log._checkpoints._next_topic_id = next_id
        log.topic("m", durability=durability, cap_records=3).append([b"x"] * 8)
        log.topic("m", cap_records=1000).append([b"z"] * 100)
        return next_id()

    log._checkpoints._next_topic_id = act
    log.checkpoint()
    log.tick()
    was = seqs(log, "m")
    assert len(was) == 103
    assert seqs(opened(disk.reboot(), shards), "m") == was


@pytest.mark.parametrize("durability", DURABLE)
@pytest.mark.parametrize("deleted", [False, True])
def test_what_a_configured_cap_took_stays_gone(durability: str, deleted: bool) -> None:
    """The floor that a configure raises is on record, whatever is deleted or configured after it."""
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("m", durability=durability)
    topic.append([b"x"] * 10)
    log.checkpoint()
    log.topic("m", cap_records=4)
    if deleted:
        topic.delete(seqs=[9, 10])
    log.topic("m", cap_records=100)
    topic.append(b"y")
    log.tick()
    was, floor = seqs(log, "m"), topic.evict_floor
    assert floor == 7
    again = opened(disk.reboot())
    assert seqs(again, "m") == was
    assert again.topic("m", create=False).evict_floor == floor


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("target", DURABLE)
@pytest.mark.parametrize("place", ["before s", "before d", "after s", "after d"])
def test_a_cap_that_was_lifted_takes_no_copies_of_a_router(
    place: str, target: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are in no WAL: the frame itself names the head that it was written at."""
    disk = SimDisk()
    log = opened(disk, shards)
    source = log.topic("s", durability="fsync")
    log.topic("d", durability=target)
    log.router("r", "s", "d")
    source.append([b"x"] * 8)
    log.tick()

    def act() -> None:
        log.topic("d", create=False, cap_records=5)
        log.topic("d", create=False, cap_records=1000)
        source.append([b"z"] * 100)
        log.tick()

    between = Between(monkeypatch, place, act)
    log.checkpoint()
    assert between.done
    log.tick()
    log.shards[0].sync()
    was = seqs(log, "d")
    assert len(was) == 105
    assert seqs(opened(disk.reboot(), shards), "d") == was


# ── sealing ───────────────────────────────────────────────────────────────────────────────────────

SMALL: dict[str, Any] = {"segment_events_max": 8}


def rotten(disk: SimDisk, suffix: str, pos: int, bit: int = 3) -> None:
    """Turn one bit of the one unsealed segment file over."""
    path = next(path for path in disk.tree() if path.startswith("data/topics/") and path.endswith(suffix))
    disk.flip_bit(path, pos, bit)


def readable(log: Engine, name: str) -> dict[int, bytes]:
    """Every record that can be read, one by one around those that cannot."""
    topic, found = log.topic(name, create=False), dict[int, bytes]()
    for seq in range(topic.head_seq):
        with suppress(Corrupt):
            found |= {record.seq: bytes(record.data) for record in topic.read(seq, 1).records}
    return found


def unsealed(disk: SimDisk, shards: int, name: str) -> tuple[Engine, int]:
    """An engine with an unsealed segment of four records in the files of a topic, and the length of its data."""
    log = opened(disk, shards, **SMALL)
    for other in ("a", "m", "z"):
        topic = log.topic(other, durability="fsync")
        if other == name:
            for number in range(1, 5):
                topic.append(b"record %d" % number, tag="t")
    log.checkpoint()
    return log, next(len(content) for path, content in disk.tree().items() if path.endswith(".data"))


@pytest.mark.parametrize("step", [21, pytest.param(7, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("suffix", [".data", ".idx"])
def test_sealing_never_makes_a_rotten_record_a_good_one(
    suffix: str, name: str, shards: int, restarted: bool, step: int
) -> None:
    """A flip in an unsealed segment, then appends until it is sealed: what could not be read is not read as something
    else, everything else is read, the loss is reported, and it stays so over restarts."""
    _, size = unsealed(SimDisk(), shards, name)
    first = 7 * (shards + (name == "z")) % step  # the byte of another case
    for pos in range(first, size if suffix == ".data" else 80, step):
        disk = SimDisk()
        log, _ = unsealed(disk, shards, name)
        if restarted:
            log = opened(disk := disk.reboot(), shards, **SMALL)
        rotten(disk, suffix, pos, pos % 8)
        for number in range(5, 11):
            log.topic(name, create=False).append(b"record %d" % number, tag="t")
        log.checkpoint()
        truth = {number: b"record %d" % number for number in range(1, 11)}
        lost = 1 if suffix == ".data" else 0
        for start in range(3):
            found = readable(log, name)
            assert found.items() <= truth.items(), f"byte {pos}, start {start}"
            assert len(found) == 10 - lost, f"byte {pos}, start {start}: {sorted(found)}"
            assert bool(log.corruption()) == bool(lost), f"byte {pos}, start {start}"
            assert log.health().ok == (not lost), f"byte {pos}, start {start}"
            assert any(finding.damage for finding in check_directory("data", disk=disk)) == bool(lost), f"byte {pos}"
            said = [line for line in log.report.damage if "without a footer" in line]
            assert bool(said) == bool(lost and start), f"byte {pos}, start {start}: {log.report.damage}"
            log = opened(disk := disk.reboot(), shards, **SMALL)
            log.checkpoint()


def test_a_segment_that_was_sealed_without_a_footer_keeps_its_files_as_they_are() -> None:
    """The damaged bytes and the index that leads around them are the only evidence."""
    disk = SimDisk()
    log, _ = unsealed(disk, 1, "m")
    rotten(disk, ".data", 70)
    before = {path: content for path, content in disk.tree().items() if path.endswith((".data", ".idx"))}
    log.topic("m", create=False).append([b"x"] * 5)
    log.checkpoint()
    for _ in range(2):
        log = opened(disk := disk.reboot(), **SMALL)
        log.checkpoint()
    after = disk.tree()
    for path, content in before.items():
        assert after[path][: len(content)] == content, path
    assert not any(path.endswith(".foot") for path in after if path.rpartition(".")[0] in next(iter(before)))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_frame_that_rots_in_the_wal_is_copied_as_it_is_and_reported(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch is read from the WAL by the checkpoint. It no longer ends every checkpoint; the record is not read
    as another one, and all others are."""
    monkeypatch.setattr(append, "LARGE_WRITE_BYTES", 24)
    disk = SimDisk()
    log = opened(disk, shards, **SMALL)
    for name in ("a", "m", "z"):
        log.topic(name, durability="fsync").append([b"%s first, and long enough" % name.encode(), b"2"])
        log.topic(name, durability="fsync").append([b"%s second, and long enough" % name.encode(), b"4"])
    for path, content in disk.tree().items():
        if (at := content.find(b"m first")) >= 0 and "/wal" in path:
            disk.flip_bit(path, at, 0)
    log.checkpoint()
    assert [entry.topic for entry in log.corruption()] == ["m"]
    for again in range(2):
        assert set(readable(log, "m")) == {3, 4}
        assert set(readable(log, "a")) == set(readable(log, "z")) == {1, 2, 3, 4}
        log = opened(disk := disk.reboot(), shards, **SMALL)
        log.topic("m", create=False).seal() if not again else None
        log.checkpoint()
    assert any(finding.damage for finding in check_directory("data", disk=disk))


# ── one bad topic ─────────────────────────────────────────────────────────────────────────────────


class Failing(SimDisk):
    """A disk on which files of one topic cannot be written."""

    topic_id: int | None = None
    error: Exception = OSError(errno.EIO, "the disk fails")

    def open(self, path: str, mode: Mode = "read", /) -> SimFile:
        if mode != "read" and self.topic_id is not None and f"topics/{self.topic_id:08X}/" in path:
            raise self.error
        return super().open(path, mode)


ERRORS = [OSError(errno.EIO, "the disk fails"), RuntimeError("a bug"), MemoryError(), Corrupt("x", pos=0, reason="bad")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(("shards", "name"), [(1, "a"), (1, "z"), (2, "m"), (2, "z"), (3, "m")])
def test_a_topic_that_cannot_be_written_does_not_stop_the_others(
    shards: int, name: str, known: bool, error: Exception
) -> None:
    """All others are in segments and their deletes durable; its own records stay in the WAL over restarts; health says
    so; when its files can be written again, the next checkpoint covers it."""
    disk = Failing()
    log = opened(disk, shards)
    topics = {each: log.topic(each, durability="fsync") for each in ("a", "m", "z")}
    if known:
        for topic in topics.values():
            topic.append([b"0"])
        log.checkpoint()
    disk.topic_id, disk.error = topics[name].id, error
    for round_ in range(4):
        for each, topic in topics.items():
            topic.append([b"%s %d" % (each.encode(), round_)] * 3)
            topic.delete(seqs=[topic.head_seq - 1])
        with pytest.raises(WriteFailed, match=f"left out {name} .*safe in the WAL"):
            log.checkpoint()
        health = log.health()
        assert health.lagging == (name,)
        assert not health.ok
        task = next(task for task in health.tasks if task.name == "checkpoint")
        assert (task.failures, task.failing) == (round_ + 1, round_ + 1)
        assert name in (task.last_error or "")
    truth = {each: seqs(log, each) for each in topics}
    for each, topic in topics.items():
        assert bool(topic.segments().segments) == (each != name or known)
    with opened(disk.reboot(), shards, read_only=True) as beside:
        assert {each: seqs(beside, each) for each in topics} == truth
    assert not [finding for finding in check_directory("data", disk=disk) if finding.damage]
    standing_now = checkpoint_summary("data", disk)
    assert standing_now is not None
    assert standing_now.lagging == (name,)
    disk.topic_id = None
    log.checkpoint()
    log.checkpoint()
    assert log.health().ok
    assert checkpoint_summary("data", disk)[3:] == ((), (), ())  # type: ignore[index]
    for image in (disk.reboot(), disk.crash_image("none")):
        again = opened(image, shards)
        assert {each: seqs(again, each) for each in topics} == truth
        assert again.report.clean, again.report.lines()


@pytest.mark.parametrize(("name", "shards"), one_in(2, [("a", 1), ("a", 2), ("z", 2), ("z", 1)]))
def test_the_wal_of_a_topic_that_cannot_be_written_is_kept_whenever_the_power_fails(name: str, shards: int) -> None:
    """Method: every image that a power cut could leave during checkpoints that leave a topic out."""
    disk = Failing()
    log = opened(disk, shards)
    topics = {each: log.topic(each, durability="fsync") for each in ("a", "z")}
    states = 0

    def look(op: int) -> None:
        nonlocal states
        for image in disk.images(random=Random(op), limit=6):
            states += 1
            again = opened(image.disk, shards)
            assert {each: seqs(again, each) for each in topics} == truth, f"before op {op}, {image.label}"

    for round_ in range(4):
        disk.topic_id = topics[name].id if round_ < 3 else None
        for topic in topics.values():
            topic.append([b"%d" % round_] * 3)
            topic.delete(seqs=[topic.head_seq])
        truth = {each: seqs(log, each) for each in topics}
        disk.on_op = look
        with suppress(WriteFailed):
            log.checkpoint()
        disk.on_op = None
    assert states > 100


@pytest.mark.parametrize("suffix", [".data", ".idx", ".del"])
@pytest.mark.parametrize("harm", ["gone", "short", "flipped"])
@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_topic_with_a_damaged_unsealed_segment_goes_on_in_another_one(
    shards: int, name: str, harm: str, suffix: str
) -> None:
    """Every checkpoint completes, the WAL is let go of, and nothing that could be read is lost or changed."""
    disk = SimDisk()
    log = opened(disk, shards)
    topics = {each: log.topic(each, durability="fsync") for each in ("a", "z")}
    for each, topic in topics.items():
        topic.append([b"%s %d" % (each.encode(), number) for number in range(6)])
        topic.append(b"x")
        topic.delete(seqs=[2])
    log.checkpoint()
    log = opened(disk := disk.reboot(), shards)
    topic = log.topic(name, create=False)
    path = f"data/topics/{topic.id:08X}/seg-{1:016d}{suffix}"
    content = disk.read_file(path)
    if harm == "gone":
        disk.remove(path)
    elif harm == "short":
        disk.write_file(path, content[: len(content) // 2])
    else:
        disk.flip_bit(path, len(content) - 3, 1)
    topic.append(b"y")
    truth = {7: b"x", 8: b"y"} | {number + 1: b"%s %d" % (name.encode(), number) for number in range(6) if number != 1}
    for start in range(3):
        log.checkpoint()
        assert log.health().lagging == ()
        found = readable(log, name)
        assert found.items() <= truth.items(), f"start {start}"
        assert found[8] == b"y"
        assert len(readable(log, "a" if name == "z" else "z")) == 6
        log = opened(disk := disk.reboot(), shards)
        if start == 1:
            assert log.topic(name, create=False).append(b"z").first_seq == 9
            truth[9] = b"z"


def test_background_threads_survive_every_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A task that raises something that is no error of ours is counted, shows in health, and runs again."""
    ran = {task: Semaphore(0) for task in ("ledger", "history", "expiry", "channels", "sync")}
    broken = True

    def task(name: str) -> Callable[..., None]:
        def run(*_: object) -> None:
            ran[name].release()
            if broken:
                raise ZeroDivisionError(f"a bug in {name}")

        return run

    monkeypatch.setattr(GapLog, "flush", task("ledger"))
    monkeypatch.setattr(TopicEngine, "_flush_histories", task("history"))
    monkeypatch.setattr(TopicEngine, "_expire", task("expiry"))
    monkeypatch.setattr(ChannelManager, "tick", task("channels"))
    monkeypatch.setattr(TopicEngine, "_sync", task("sync"))
    with tidelog.open(str(tmp_path / "data"), sync_interval_ms=1) as log:
        assert log.channels.channel_count() == 0
        for semaphore in ran.values():
            for _ in range(3):
                assert semaphore.acquire(timeout=60)
        states = {state.name: state for state in log.health().tasks}
        for name in ran:
            assert states[name].failing >= 2, name
            assert states[name].last_error == f"ZeroDivisionError: a bug in {name}"
        assert not log.health().ok
        broken = False
        for semaphore in ran.values():
            while semaphore.acquire(blocking=False):
                pass
            for _ in range(3):
                assert semaphore.acquire(timeout=60)
        assert all(state.failing == 0 for state in log.health().tasks)
        assert log.health().ok


def test_files_that_a_failed_checkpoint_forgot_are_removed_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    log = opened(disk, segment_events_max=2)
    topic = log.topic("m", durability="fsync")
    topic.append([b"x"] * 2)
    topic.append([b"x"] * 2)
    log.checkpoint()
    topic.delete(before_seq=3)
    with monkeypatch.context() as patch:
        broken = lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "it fails"))  # noqa: E731
        patch.setattr(manifest.ManifestStore, "save", broken)
        with pytest.raises(WriteFailed):
            log.checkpoint()
    first = f"data/topics/{topic.id:08X}/seg-{1:016d}.data"
    for _ in range(2):
        assert first in disk.tree()
        log.checkpoint()
    assert first not in disk.tree()


def test_a_file_that_cannot_be_removed_is_removed_by_a_later_checkpoint() -> None:
    disk = SimDisk()
    log = opened(disk, segment_events_max=2)
    topic = log.topic("m", durability="fsync")
    for _ in range(3):
        topic.append([b"x"] * 2)
    log.checkpoint()
    topic.delete(before_seq=5)
    log.checkpoint()
    disk.fail("remove", 2)
    with suppress(WriteFailed):
        log.checkpoint()
    disk.clear_faults()
    log.checkpoint()
    left = [path for path in disk.tree() if f"topics/{topic.id:08X}/" in path and path.endswith(".data")]
    assert left == [f"data/topics/{topic.id:08X}/seg-{5:016d}.data"]


# ── expiry ────────────────────────────────────────────────────────────────────────────────────────


class Idle:
    """An engine whose topics nothing reads or writes while time goes by."""

    def __init__(self, shards: int = 1, **settings: Any) -> None:
        self.clock, self.shards = ManualClock(), shards
        self.settings = {"checkpoint_ms": 500, "segment_events_max": 4, **settings}
        self.disk = SimDisk(clock=self.clock)
        self.log = self.open()

    def open(self) -> Engine:
        return opened(self.disk, self.shards, clock=self.clock, **self.settings)

    def restart(self) -> None:
        self.disk = self.disk.reboot()
        self.log = self.open()

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.tick(1_000)
            self.log.tick()

    def files(self, topic_id: int) -> list[str]:
        return [path for path in self.disk.tree() if f"/topics/{topic_id:08X}" in path]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("written", [3, 11])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", get_args(Durability))
def test_records_of_an_idle_topic_expire(durability: str, shards: int, written: int, restarted: bool) -> None:
    """Nothing reads or writes it: its bytes no longer count, its segments are removed, the gap is in the ledger once,
    whatever is restarted."""
    idle = Idle(shards, total_bytes_max=1_000)
    topic = idle.log.topic("m", durability=durability, ttl_ms=5_000)
    idle.log.topic("other", durability="fsync")
    for _ in range(written):
        topic.append(b"x" * 50)
    idle.log.checkpoint()
    lost = restarted and durability == "ephemeral"  # with the process, and not to age
    if restarted:
        idle.wait(3)
        idle.restart()
    elif durability != "ephemeral":
        assert idle.files(topic.id)
    idle.wait(8)
    state = next(state for state in idle.log.topics_cached() if state.topic == "m")
    assert (state.count, state.bytes) == (0, 0)
    idle.log.topic("other").append([b"y" * 900])
    idle.wait(3)
    assert idle.files(topic.id) == []
    for _ in range(2):
        rows = idle.log.gaps("m")
        assert sum(row.records for row in rows) == (0 if lost else written)
        assert {row.cause for row in rows} <= {"ttl"}
        if not lost:
            assert (rows[0].first, rows[-1].last) == (1, written)
            assert state.evict_floor == written + 1
        idle.restart()
    if durability != "ephemeral":
        page = idle.log.topic("m", create=False).read(0)
        assert page.gap is not None
        assert (page.gap.gap_from, page.gap.gap_to, page.gap.reason) == (1, written, "ttl")
        assert idle.log.topic("m", create=False).append(b"z").first_seq > written


def test_only_topics_that_are_due_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost follows what is due, not the number of topics."""
    idle = Idle()
    looked: list[str] = []
    expiry = retention._expiry_floor

    def counted(core: TopicState) -> int:
        looked.append(core.name)
        return expiry(core)

    for number in range(50):
        idle.log.topic(f"t{number:02}", ttl_ms=1_000 * (number + 2), durability="fsync").append(b"x")
    for number in range(50):
        idle.log.topic(f"u{number:02}", durability="fsync").append(b"x")
    monkeypatch.setattr(retention, "_expiry_floor", counted)
    idle.wait(2)
    assert looked == []
    idle.wait(3)
    assert set(looked) == {"t00", "t01", "t02"}
    looked.clear()
    idle.wait(1)
    assert set(looked) == {"t03"}


def test_a_ttl_that_is_set_later_expires_an_idle_topic() -> None:
    idle = Idle()
    idle.log.topic("m", durability="fsync").append([b"x"] * 3)
    idle.wait(10)
    idle.log.topic("m", ttl_ms=60_000)
    idle.wait(2)
    assert idle.log.topics_cached()[0].count == 3
    idle.log.topic("m", ttl_ms=5_000)
    idle.wait(2)
    assert idle.log.topics_cached()[0].count == 0


def test_a_group_that_goes_on_lets_an_idle_topic_expire() -> None:
    idle = Idle()
    topic = idle.log.topic("m", durability="fsync", ttl_ms=5_000)
    topic.append([b"x"] * 3)
    topic.group("g").hold(1_000_000)
    idle.wait(30)
    assert idle.log.topics_cached()[0].count == 3
    topic.group("g").commit(2)
    idle.wait(12)
    assert idle.log.topics_cached()[0].count == 1


def test_one_topic_that_cannot_expire_keeps_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle()
    for name in ("a", "m", "z"):
        idle.log.topic(name, durability="fsync", ttl_ms=1_000).append(b"x")
    expiry = retention._expiry_floor

    def failing(core: TopicState) -> int:
        if core.name == "m":
            raise RuntimeError("a bug")
        return expiry(core)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_expiry_floor", failing)
        with pytest.raises(RuntimeError):
            idle.wait(4)
        counts = {state.topic: state.count for state in idle.log.topics_cached()}
        assert counts == {"a": 0, "m": 1, "z": 0}
        assert [task.last_error for task in idle.log.health().tasks if task.failing] == ["RuntimeError: a bug"]
    idle.wait(12)
    assert {state.count for state in idle.log.topics_cached()} == {0}
    assert idle.log.health().ok


def test_expire_looks_again_after_it_waited_for_a_lower_floor() -> None:
    """A floor that was on its way when this one came is lower: what expired since is not shown once more."""
    idle = Idle()
    topic = idle.log.topic("m", durability="fsync", ttl_ms=5_000)
    core = topic._state
    topic.append(b"old")
    idle.clock.tick(3_000)
    topic.append(b"younger")
    idle.clock.tick(3_000)
    with core.lock:
        token = retention._submit_floor(core, retention._expiry_floor(core))  # on its way, and not committed yet
    idle.clock.tick(3_000)
    assert topic.read(0).records == []
    assert token.wait() == 2


@pytest.mark.parametrize("suffix", [".idx", ".data"])
def test_a_rotten_time_expires_nothing_that_is_young(suffix: str) -> None:
    """A bit of the time of a record turns over, in an unsealed index or in the frame: age is not taken from it."""
    stride, at = (20, 8) if suffix == ".idx" else (49, 0)
    for pos in range(stride * 3 + at, stride * 3 + at + (8 if suffix == ".idx" else 49), 3):
        for bit in (0, 3, 7):
            idle = Idle(segment_events_max=100)
            topic = idle.log.topic("m", durability="fsync", ttl_ms=60_000)
            for number in range(6):
                topic.append(b"%03d" % number)
                idle.clock.tick(20_000 if number < 2 else 1_000)
            idle.log.checkpoint()
            idle.restart()
            idle.disk.flip_bit(next(path for path in idle.files(topic.id) if path.endswith(suffix)), pos, bit)
            idle.clock.tick(30_000)
            idle.log.tick()
            idle.log.topic("m", create=False).append(b"new")
            assert idle.log.topic("m", create=False).evict_floor <= 3, f"byte {pos} bit {bit}"
            assert 7 in readable(idle.log, "m")


# ── dropping ──────────────────────────────────────────────────────────────────────────────────────


def test_a_drop_unlinks_nothing_while_others_wait_for_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle()
    topic = idle.log.topic("m", durability="fsync")
    for _ in range(40):
        topic.append(b"x")
    idle.log.checkpoint()
    before = idle.files(topic.id)
    changed: list[str] = []
    real_remove, real_rename = SimDisk.remove, SimDisk.rename

    def remove(disk: SimDisk, path: str) -> None:
        changed.append(path)
        real_remove(disk, path)

    def rename(disk: SimDisk, old: str, new: str) -> None:
        changed.append(old)
        real_rename(disk, old, new)

    monkeypatch.setattr(SimDisk, "remove", remove)
    monkeypatch.setattr(SimDisk, "rename", rename)
    idle.log.drop("m")
    assert changed == []
    assert idle.log.topic("m", durability="fsync").append(b"new").first_seq == 1
    idle.log.tick()
    assert len(changed) > len(before)
    assert idle.files(topic.id) == []
    assert [record.data for record in idle.log.topic("m").read(0).records] == [b"new"]


@pytest.mark.parametrize("keep", ["none", "all"])
def test_files_of_a_dropped_topic_are_swept_at_the_next_start(keep: Any) -> None:
    idle = Idle()
    topic = idle.log.topic("m", durability="fsync")
    topic.append([b"x"] * 9)
    idle.log.checkpoint()
    idle.log.drop("m")
    assert idle.files(topic.id)
    idle.disk = idle.disk.crash_image(keep)
    idle.log = idle.open()
    assert idle.files(topic.id) == []
    assert idle.log.names() == []


def test_files_that_cannot_be_unlinked_are_tried_again() -> None:
    idle = Idle()
    topic = idle.log.topic("m", durability="fsync")
    topic.append([b"x"] * 9)
    idle.log.checkpoint()
    idle.log.drop("m")
    idle.disk.fail("remove", 1)
    with pytest.raises(WriteFailed, match="the topic is gone"):
        idle.log.tick()
    assert [task.name for task in idle.log.health().tasks if task.failing] == ["erase"]
    idle.disk.clear_faults()
    idle.log.tick()
    assert idle.files(topic.id) == []
    assert idle.log.health().ok
