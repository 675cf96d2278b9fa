"""The engine with real threads: many writers, readers beside them, checkpoints under them, an end (E1–E4, G19–G21).

Nothing here waits for time to pass. Where an order matters, threads wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from threading import enumerate as all_threads
from typing import Any

import pytest
from tests.unit.engine.harness import TIMEOUT_S, running

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Record, Topic
from tidelog.engine.background import CheckpointScheduler
from tidelog.errors import Closed, Error, TopicNotFound
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import Writer

SMALL: dict[str, Any] = {"wal_file_bytes": 1 << 14, "segment_events_max": 50, "sync_interval_ms": 1}


@contextmanager
def threaded(disk: SimDisk | None = None, **settings: Any) -> Iterator[Engine]:
    with tidelog.open("data", disk=disk or SimDisk(), clock=ManualClock(), **SMALL | settings) as log:
        yield engine_of(log)


def reopened(disk: SimDisk) -> Engine:
    return engine_of(tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, **SMALL))


def all_of(topic: Topic) -> list[Record]:
    found = [record for record in topic.follow(timeout=0.0) if isinstance(record, Record)]
    assert [record.seq for record in found] == sorted({record.seq for record in found})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_sixty_four_writers_four_topics_and_their_readers(shards: int) -> None:
    """G5, G8, G14, E3. Method: each thread writes its own numbers in order, single and in batches, and reads each ack
    back at once; a follower of each topic collects everything. Seqs are dense, each writer's records are in its order,
    every batch is contiguous, and followers saw what is there."""
    classes = {"t0": "fsync", "t1": "disk", "t2": "memory", "t3": "ephemeral"}
    rounds, acks = 12, defaultdict[str, list[tuple[range, list[Any]]]](list)
    disk = SimDisk()
    with threaded(disk, wal_shards=shards) as log:
        topics = {name: log.topic(name, durability=durability) for name, durability in classes.items()}
        start = Barrier(64)
        total = 16 * (rounds // 3) * (1 + 2 + 3)
        followed: dict[str, list[Record]] = {name: [] for name in topics}

        def write(number: int) -> None:
            name = f"t{number % 4}"
            topic, mine = topics[name], 0
            start.wait(TIMEOUT_S)
            for turn in range(rounds):
                batch = [[number, mine + at] for at in range(turn % 3 + 1)]
                mine += len(batch)
                done = topic.append(batch)
                assert done.count == len(batch)
                assert done.head_seq >= done.last_seq
                assert topic.head_seq >= done.last_seq
                page = topic.read(done.first_seq - 1, len(batch))
                assert [record.data for record in page.records] == batch, "an ack can be read"
                acks[name].append((done.seqs, batch))

        def follow(name: str) -> None:
            for record in topics[name].follow(timeout=TIMEOUT_S):
                assert isinstance(record, Record)
                followed[name].append(record)
                if len(followed[name]) == total:
                    return

        with running(*(partial(write, number) for number in range(64)), *(partial(follow, name) for name in topics)):
            pass
        for name, topic in topics.items():
            records = all_of(topic)
            assert [record.seq for record in records] == list(range(1, total + 1)), "dense"
            assert followed[name] == records
            for seqs, batch in acks[name]:
                assert [record.data for record in records[seqs.start - 1 : seqs.stop - 1]] == batch
            for number in {record.data[0] for record in records}:
                mine = [record.data[1] for record in records if record.data[0] == number]
                assert mine == list(range(len(mine))), "in the order of its writer"
        expected = {name: [record.data for record in followed[name]] for name in ("t0", "t1", "t2")}
    log = reopened(disk.crash_image("none"))
    assert {name: [record.data for record in all_of(log.topic(name))] for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_writers_go_on_while_checkpoints_are_made(checkpoints: int) -> None:
    """G39, G40. Method: four writers append and delete until one thread has made its checkpoints; after each of
    them a power cut leaves everything that was acked before it, and nothing whose delete was."""
    disk = SimDisk()
    acked: list[list[int]] = [[] for _ in range(4)]
    going: list[set[int]] = [set() for _ in range(4)]
    deleted: list[set[int]] = [set() for _ in range(4)]
    with threaded(disk, wal_shards=2) as log:
        topics = [log.topic(f"t{number}", durability="fsync") for number in range(4)]
        enough = Event()

        def write(number: int) -> None:
            while not enough.is_set():
                for _ in range(9):
                    acked[number].append(topics[number].append("x").first_seq)
                seq = acked[number][-5]
                going[number].add(seq)
                topics[number].delete(seqs=[seq])
                deleted[number].add(seq)

        def check() -> None:
            try:
                for _ in range(checkpoints):
                    log.checkpoint()
                    before, gone = [list(seqs) for seqs in acked], [set(seqs) for seqs in deleted]
                    found = reopened(disk.crash_image("none"))
                    for number in range(4):
                        there = {record.seq for record in all_of(found.topic(f"t{number}"))}
                        assert set(before[number]) - going[number] <= there
                        assert not there & gone[number]
            finally:
                enough.set()

        with running(*(partial(write, number) for number in range(4)), check):
            pass
        left = [sorted(set(acked[number]) - deleted[number]) for number in range(4)]
        assert [[record.seq for record in all_of(topic)] for topic in topics] == left
    log = reopened(disk.crash_image("none"))
    assert [[record.seq for record in all_of(log.topic(f"t{number}"))] for number in range(4)] == left


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_an_append_that_races_with_close_is_committed_or_refused(durability: str) -> None:
    """G20, G21: never lost silently. Method: eight writers append until they are refused; the engine is closed as soon
    as each has had an ack; every ack is there afterwards."""
    disk = SimDisk()
    acked: list[int] = []
    with threaded(disk, wal_shards=1) as log:
        topic = log.topic("a", durability=durability)
        first = Barrier(9)

        def write(number: int) -> None:
            notified = False
            while True:
                try:
                    acked.append(topic.append(number).first_seq)
                except Closed:
                    return
                finally:
                    if not notified:
                        notified = True
                        first.wait(TIMEOUT_S)

        def close() -> None:
            first.wait(TIMEOUT_S)
            log.close()

        with running(*(partial(write, number) for number in range(8)), close):
            pass
    assert len(set(acked)) == len(acked)
    found = reopened(disk.crash_image("none")).topic("a")
    if durability != "ephemeral":
        assert [record.seq for record in all_of(found)] == sorted(acked)
    assert found.append("next").first_seq > max(acked)


def test_writers_of_a_dropped_topic_get_an_error() -> None:
    """G85: each append is acked or refused, and nothing of the old topic is in the new one."""
    disk = SimDisk()
    with threaded(disk, wal_shards=1) as log:
        topic = log.topic("a", durability="fsync")
        first = Barrier(5)

        def write() -> None:
            topic.append("old")
            first.wait(TIMEOUT_S)
            with suppress(TopicNotFound):
                while True:
                    topic.append("old")

        def drop() -> None:
            first.wait(TIMEOUT_S)
            log.drop("a")
            log.topic("a", durability="fsync").append("new")

        with running(*[write] * 4, drop):
            pass
        assert [record.data for record in all_of(log.topic("a"))] == ["new"]
    assert [record.data for record in all_of(reopened(disk.crash_image("none")).topic("a"))] == ["new"]


def test_many_threads_create_one_topic() -> None:
    """Contract, appendix C: one winner on concurrent same-name create, one topic after restart."""
    disk = SimDisk()
    with threaded(disk, wal_shards=2) as log:
        start, made = Barrier(8), []

        def create() -> None:
            start.wait(TIMEOUT_S)
            made.append(log.configure("a", {"durability": "fsync"}))

        with running(*[create] * 8):
            pass
        assert sorted(created for _, created in made) == [False] * 7 + [True]
        assert len({topic.id for topic, _ in made}) == 1
    assert len(reopened(disk).topics()) == 1


def test_readers_never_see_half_a_batch() -> None:
    """G4, G6: the head moves over a batch at once."""
    with threaded(wal_shards=1) as log:
        topic = log.topic("a", durability="disk")
        done = Event()

        def write() -> None:
            for number in range(200):
                topic.append([number] * 5)
            done.set()

        def read() -> None:
            while not done.is_set():
                assert topic.read(0, 2_000).head_seq % 5 == 0
                assert topic.head_seq % 5 == 0

        with running(write, read, read):
            pass


def test_configuring_beside_writers_loses_nothing() -> None:
    """Contract 1.13: classes change under load; what was acked as fsync is there."""
    disk = SimDisk()
    with threaded(disk, wal_shards=1) as log:
        topic = log.topic("a", durability="fsync")
        done = Event()

        def write() -> None:
            for number in range(150):
                topic.append(number)
            done.set()

        def change() -> None:
            while not done.is_set():
                for durability in ("disk", "memory", "fsync"):
                    log.topic("a", durability=durability)

        with running(write, change):
            pass
        assert [record.data for record in all_of(topic)] == list(range(150))
    assert [record.data for record in all_of(reopened(disk.crash_image("none")).topic("a"))] == list(range(150))


def test_the_thread_commits_writes_without_a_waiter() -> None:
    """G19: in order, and each gets its outcome."""
    with threaded(wal_shards=1) as log:
        topic = log.topic("a", durability="fsync")
        tokens = [topic.append_nowait(number) for number in range(200)]
        notified = Event()
        tokens[-1].add_done_callback(lambda _: notified.set())
        assert notified.wait(TIMEOUT_S), "nothing waited for the future itself"
        assert [token.wait(0.0).first_seq for token in tokens] == list(range(1, 201))


def test_disk_writes_are_synced_without_anybody_asking() -> None:
    """G18. Method: the background thread is seen to sync; the test waits for that, not for time."""
    disk = SimDisk(trace=True)
    synced, written = Event(), Event()

    def look(_: int) -> None:
        if written.is_set() and disk.trace and disk.trace[-1].startswith("sync data/wal/wal-"):
            synced.set()

    with threaded(disk, wal_shards=1) as log:
        topic = log.topic("a", durability="memory")
        topic.append("x")
        disk.on_op = look
        written.set()
        log.topic("b")  # any operation after the sync shows it
        while not synced.is_set():
            topic.append("y")
        disk.on_op = None
    assert synced.is_set()


def test_no_thread_is_left_when_an_engine_is_closed() -> None:
    before = set(all_threads())
    with threaded(wal_shards=3) as log:
        log.topic("a").append(1)
        assert len(set(all_threads()) - before) > 1
    assert set(all_threads()) <= before
    assert not [thread for thread in all_threads() if "tidelog" in thread.name and thread not in before]


@pytest.mark.slow
def test_on_a_real_disk(tmp_path: Path) -> None:
    """The same on files: eight writers, followers, checkpoints, and another process's view beside them."""
    path = str(tmp_path / "data")
    with tidelog.open(path, wal_shards=2, wal_file_bytes=1 << 16, segment_events_max=100) as log:
        topics = [log.topic(f"t{number}", durability=("fsync", "disk")[number % 2]) for number in range(2)]

        def write(number: int) -> None:
            for turn in range(100):
                topics[number % 2].append([number, turn], tag=f"w{number}")

        def check() -> None:
            for _ in range(5):
                log.checkpoint()
                reader = tidelog.open(path, read_only=True)
                for topic in topics:
                    seen = all_of(reader.topic(topic.name))
                    assert [record.seq for record in seen] == list(range(1, len(seen) + 1))

        with running(*(partial(write, number) for number in range(8)), check):
            pass
        expected = [[(record.seq, record.data) for record in all_of(topic)] for topic in topics]
        assert [len(rows) for rows in expected] == [800, 800], "a list is a batch of two"
    with tidelog.open(path) as log:
        found = [[(record.seq, record.data) for record in all_of(log.topic(topic.name))] for topic in topics]
        assert found == expected
        assert log.report.clean
    with pytest.raises(Error):
        tidelog.open(str(tmp_path / "nothing"), read_only=True)


def test_what_waits_for_a_sync_does_not_wait_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2: class disk is on the disk within `sync_interval_ms`, however long a checkpoint takes. Method: one is held up
    while a record is written, and only the background thread syncs it."""
    begun, ended, synced = Event(), Event(), Event()

    def checkpoint(self: CheckpointScheduler, *, final: bool = False, throttled: bool = False) -> None:  # noqa: ARG001
        begun.set()
        assert ended.wait(TIMEOUT_S)

    real = Writer.sync

    def sync(self: Writer) -> bool:
        done = real(self)
        if done and begun.is_set():
            synced.set()
        return done

    monkeypatch.setattr(CheckpointScheduler, "checkpoint", checkpoint)
    with threaded(checkpoint_bytes=1) as log:
        try:
            topic = log.topic("t", durability="disk")
            topic.append(b"the first one reserves, and is reason enough for a checkpoint")
            assert begun.wait(TIMEOUT_S)
            monkeypatch.setattr(Writer, "sync", sync)
            topic.append(b"another")
            assert synced.wait(TIMEOUT_S)
        finally:
            ended.set()
