"""Commits of the write pipeline: where they run, when a turn runs, and in which order outcomes are delivered."""

from __future__ import annotations

import asyncio
import json
import os
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread, get_ident
from typing import Any

import pytest
from tests.implementations import BOTH, implementation
from tests.unit.spark.helpers import run_server
from tests.unit.wal.harness import FILE_BYTES, TIMEOUT_S, WalHarness

from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.engine.health import HealthMonitor
from tidelog.server.config import CommitMode
from tidelog.server.push.notifier import NotifyScheduler
from tidelog.server.push.scheduling import Governor
from tidelog.server.write_pipeline import PipelineState, WritePipeline
from tidelog.testing import SimDisk
from tidelog.wal import CommitFuture, Shard, Writer


def shard(file_bytes: int = FILE_BYTES) -> WalHarness:
    disk = SimDisk()
    disk.make_dir("data")
    return WalHarness(disk, file_bytes=file_bytes)


MODES: list[CommitMode] = ["beside", "loop"]


def open_pipeline(harness: WalHarness, mode: CommitMode = "beside") -> WritePipeline:
    loop, monotonic_us = asyncio.get_running_loop(), SystemClock().monotonic_us
    health = HealthMonitor("server", lambda: 0)
    scheduler = NotifyScheduler(loop, monotonic_us, Governor(workers=1, threads=1), lambda: (0, 0.0), health)
    return WritePipeline(loop, [harness.shard], mode, monotonic_us, scheduler, health)


@pytest.mark.parametrize("mode", MODES)
def test_every_outcome_is_delivered_once_on_the_loop(mode: CommitMode) -> None:
    async def scenario() -> None:
        harness = shard()
        if mode != "loop":
            harness.shard.start()
        pipeline = open_pipeline(harness, mode)
        delivered: list[int] = []
        tokens = [harness.submit([b"%d" % number]) for number in range(50)]
        for number, token in enumerate(tokens):
            pipeline.add_done_callback(token, lambda _, number=number: delivered.append(number))  # type: ignore[misc]
        assert await pipeline.wait(harness.submit([b"last"])) == 1
        assert delivered == list(range(50))
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


def test_immediate_outcome_is_delivered_after_earlier_outcomes() -> None:
    """Method: an outcome of another thread is scheduled on the loop when a completed future is added."""

    async def scenario() -> None:
        harness = shard()
        pipeline = open_pipeline(harness, "loop")
        delivered: list[str] = []
        slow: CommitFuture[int] = CommitFuture(harness.shard)
        pipeline.add_done_callback(slow, lambda _: delivered.append("slow"))
        other = Thread(target=lambda: slow.set_result(1))
        other.start()
        other.join()
        pipeline.add_done_callback(CommitFuture.completed(harness.shard, 1), lambda _: delivered.append("quick"))
        assert delivered == [], "the first is scheduled"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert delivered == ["slow", "quick"]
        pipeline.add_done_callback(CommitFuture.completed(harness.shard, 1), lambda _: delivered.append("now"))
        assert delivered[-1] == "now"

    asyncio.run(scenario())


def test_turn_waits_for_fsync_only_if_disk_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2. Method: the duration of the last fsyncs is faked, and so is a running fsync."""
    under_way = False
    monkeypatch.setattr(Shard, "has_inflight_batch", property(lambda _: under_way))

    async def scenario() -> None:
        nonlocal under_way
        harness = shard(1 << 20)
        harness.shard.start()
        pipeline = open_pipeline(harness)
        flushed = 0

        def submit_batches() -> int:
            nonlocal flushed
            flushed += 1
            return 1

        pipeline._submit_batches = submit_batches  # type: ignore[method-assign]
        seen = []
        for took_us in (100, 5_000, 100):
            for _ in range(200):
                harness.shard._stats.record_sync(took_us)
            for _ in range(300):
                await pipeline.wait(harness.submit([b"x"]))
            while pipeline.state is not PipelineState.IDLE:
                await asyncio.sleep(0)
            for now in (True, False):
                under_way, flushed = now, 0
                pipeline.schedule_turn()
                for _ in range(5):
                    await asyncio.sleep(0)
                seen.append(bool(flushed))
        assert seen == [False, True, True, True, False, True]
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


def test_turn_does_not_wait_for_stalled_fsync_of_fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a running fsync is faked, and its duration."""
    took_us = 0
    monkeypatch.setattr(Shard, "has_inflight_batch", property(lambda _: True))
    monkeypatch.setattr(Shard, "inflight_us", property(lambda _: took_us))

    async def scenario() -> None:
        nonlocal took_us
        harness = shard()
        harness.shard.start()
        pipeline = open_pipeline(harness)
        flushed = asyncio.Event()

        def submit_batches() -> int:
            flushed.set()
            return 1

        pipeline._submit_batches = submit_batches  # type: ignore[method-assign]
        pipeline.schedule_turn()
        await asyncio.sleep(0.02)  # longer than the alarm
        assert not flushed.is_set(), "it has only begun"
        took_us = 5_000
        await asyncio.wait_for(flushed.wait(), TIMEOUT_S)
        pipeline.close()
        monkeypatch.undo()
        harness.shard.close()

    asyncio.run(scenario())


def test_turn_after_a_batch_of_several_records_is_postponed_once() -> None:
    """Method: the size of the last batch is faked; iterations of the loop are counted."""

    async def scenario() -> None:
        harness = shard()
        harness.shard.start()
        pipeline = open_pipeline(harness)
        turns = []
        for writes in (1, 1, 64, 64, 1):
            turn = 0
            flushed = False

            def submit_batches(writes: int = writes) -> int:
                nonlocal flushed
                flushed = True
                return writes

            pipeline._submit_batches = submit_batches  # type: ignore[method-assign]
            pipeline.schedule_turn()
            while not flushed:
                await asyncio.sleep(0)
                turn += 1
            turns.append(turn)
        assert turns == [1, 1, 1, 2, 2]
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


@BOTH
def test_no_fsync_runs_on_the_loop(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a real disk; every fsync of Python records its thread. Files are small, so that many are created."""
    synced_by = record_fsync_threads(monkeypatch)
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        disk = PosixDisk()
        disk.make_dir("data")
        harness = WalHarness(disk)
        harness.shard.start()
        with implementation(compiled=compiled):
            pipeline = open_pipeline(harness)
        synced_by.clear()
        for number in range(200):
            token = harness.submit([b"%d" % number], durable=number % 3 != 0)
            assert await pipeline.wait(token) == 1
        assert harness.writer.rotations > 1
        assert len(synced_by) > 1
        assert get_ident() not in synced_by
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


def test_no_fsync_of_a_whole_server_runs_on_its_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced_by = record_fsync_threads(monkeypatch)
    loops: list[int] = []
    ready = WritePipeline.__init__

    def recorded(self: WritePipeline, *args: Any, **kwargs: Any) -> None:
        loops.append(get_ident())
        ready(self, *args, **kwargs)

    monkeypatch.setattr(WritePipeline, "__init__", recorded)
    with run_server(str(tmp_path / "data"), segment_events=10) as (engine, address):
        connection = HTTPConnection(address.removeprefix("http://"))

        def call(method: str, path: str, body: object = None) -> None:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status in (200, 201, 204), answer.read()
            answer.read()

        for name, durability in (("a", "fsync"), ("b", "disk"), ("c", "fsync")):
            call("PUT", f"/v0/topics/{name}", {"durability": durability})
        for number in range(60):
            for name in "abc":
                call("POST", f"/v0/topics/{name}", {"records": [{"data": number}]})
        call("POST", "/v0/topics/a/delete", {"before_seq": 5})
        call("DELETE", "/v0/topics/c")
        engine.checkpoint()
        connection.close()
    assert len(synced_by) > 10
    assert len(set(loops)) == 1
    assert loops[0] not in synced_by


def record_fsync_threads(patch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of threads that call fdatasync from now on."""
    threads: list[int] = []
    sync = os.fdatasync

    def recorded(fd: int) -> None:
        threads.append(get_ident())
        sync(fd)

    patch.setattr(os, "fdatasync", recorded)
    return threads


@pytest.mark.parametrize(("mode", "durable"), [("loop", True), ("loop", False), ("beside", True), ("beside", False)])
def test_new_wal_file_is_not_created_on_the_loop(
    mode: CommitMode, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating one takes fsyncs and waits for everything written before."""
    rotated_by: list[int] = []
    rotate = Writer._rotate

    def recorded(self: Writer, *, may_use_reserve: bool) -> None:
        rotated_by.append(get_ident())
        rotate(self, may_use_reserve=may_use_reserve)

    monkeypatch.setattr(Writer, "_rotate", recorded)

    async def scenario() -> None:
        harness = shard()
        harness.shard.start()
        pipeline = open_pipeline(harness, mode)
        for number in range(100):  # a file holds about forty
            assert await pipeline.wait(harness.submit([b"%d" % number], durable=durable)) == 1
        assert len(rotated_by) > 1
        assert get_ident() not in rotated_by
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


def test_write_without_fsync_is_committed_and_reported_on_the_loop() -> None:
    async def scenario() -> None:
        harness = shard()
        harness.shard.start()
        pipeline = open_pipeline(harness)
        reported_by: list[int] = []
        token = harness.submit([b"x"], durable=False)
        token.add_done_callback(lambda _: reported_by.append(get_ident()), wake_writer=False)
        pipeline.add_done_callback(token, lambda _: None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert reported_by == [get_ident()]
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_readers_are_notified_before_writers(mode: CommitMode, durable: bool) -> None:
    """Method: the callback of the second write raises."""

    async def scenario() -> None:
        harness = shard()
        harness.shard.start()
        pipeline = open_pipeline(harness, mode)
        log: list[str] = []
        pipeline._notify_scheduler.notify_now = lambda: log.append("readers")  # type: ignore[method-assign]
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

        def on_done(token: CommitFuture[int]) -> None:
            log.append(f"writer {tokens.index(token)}")
            if token is tokens[1]:
                raise ZeroDivisionError

        tokens = [harness.submit([b"%d" % number], durable=durable) for number in range(3)]
        for token in tokens:
            pipeline.add_done_callback(token, on_done)
        async with asyncio.timeout(TIMEOUT_S):
            while len(log) < 4 or not errors:
                await asyncio.sleep(0.001)
        writers = [entry for entry in log if entry != "readers"]
        assert (log[0], writers) == ("readers", ["writer 0", "writer 1", "writer 2"])
        if mode == "loop" or not durable:  # else the writer thread's outcomes come in a turn of their own
            assert log[:2] == ["readers", "writer 0"]
        assert [type(error) for error in errors] == [ZeroDivisionError]
        assert not harness.shard.is_latched, "the write is in the WAL"
        pipeline.close()
        harness.shard.close()

    asyncio.run(scenario())


def test_error_of_a_commit_does_not_stop_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: finishing a commit raises; a turn must follow."""

    def broken(_: Shard) -> bool:
        raise ZeroDivisionError

    async def scenario() -> None:
        harness = shard()
        harness.shard.start()
        pipeline = open_pipeline(harness)
        flushed = asyncio.Event()

        def submit_batches() -> int:
            flushed.set()
            return 0

        pipeline._submit_batches = submit_batches  # type: ignore[method-assign]
        monkeypatch.setattr(Shard, "finish_commit", broken)
        with pytest.raises(ZeroDivisionError):
            pipeline._on_fsync_done(harness.shard)
        await asyncio.wait_for(flushed.wait(), TIMEOUT_S)
        pipeline.close()
        monkeypatch.undo()
        harness.shard.close()

    asyncio.run(scenario())


def test_closed_pipeline_begins_no_commit_and_wal_threads_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: a batch is begun when it closes, another is staged then, and a third one is submitted directly."""
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        disk = PosixDisk()
        disk.make_dir("data")
        harness = WalHarness(disk)
        harness.shard.start()
        pipeline = open_pipeline(harness)
        delivered: list[int] = []
        for number in range(2):
            token = harness.submit([b"%d" % number])
            pipeline.add_done_callback(token, lambda _, number=number: delivered.append(number))  # type: ignore[misc]
            if number == 0:
                while not harness.shard.has_inflight_batch:
                    await asyncio.sleep(0)
                pipeline.close()
        last = harness.submit([b"last"])
        assert await asyncio.to_thread(last.wait, TIMEOUT_S) == 1
        while len(delivered) < 2:
            await asyncio.sleep(0.001)
        assert delivered == [0, 1]
        harness.shard.close()

    asyncio.run(scenario())
