"""Outcomes come back to the loop in the order in which they were known, from whichever thread."""

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

from tidelog.disk.posix import PosixDisk
from tidelog.server.config import CommitMode
from tidelog.server.write_pipeline import CommitDriver
from tidelog.testing import SimDisk
from tidelog.wal import CommitFuture, Shard, Writer


def shard(file_bytes: int = FILE_BYTES) -> WalHarness:
    disk = SimDisk()
    disk.make_dir("data")
    return WalHarness(disk, file_bytes=file_bytes)


MODES: list[CommitMode] = ["beside", "loop"]


@pytest.mark.parametrize("mode", MODES)
def test_every_outcome_is_told_once_on_the_loop(mode: CommitMode) -> None:
    async def scenario() -> None:
        bench = shard()
        if mode != "loop":
            bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], mode)
        told: list[int] = []
        tokens = [bench.submit([b"%d" % number]) for number in range(50)]
        for number, token in enumerate(tokens):
            commits.add_done_callback(token, lambda _, number=number: told.append(number))  # type: ignore[misc]
        assert await commits.wait(bench.submit([b"last"])) == 1
        assert told == list(range(50))
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


def test_what_is_known_at_once_is_told_behind_what_was_known_before() -> None:
    """Method: an outcome of another thread is on its way to the loop when one comes that needs no way."""

    async def scenario() -> None:
        bench = shard()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "loop")
        told: list[str] = []
        slow: CommitFuture[int] = CommitFuture(bench.shard)
        commits.add_done_callback(slow, lambda _: told.append("slow"))
        other = Thread(target=lambda: slow.set_result(1))
        other.start()
        other.join()
        commits.add_done_callback(CommitFuture.completed(bench.shard, 1), lambda _: told.append("quick"))
        assert told == [], "the first is on its way"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert told == ["slow", "quick"]
        commits.add_done_callback(CommitFuture.completed(bench.shard, 1), lambda _: told.append("now"))
        assert told[-1] == "now"

    asyncio.run(scenario())


def test_writes_wait_for_a_sync_only_where_the_disk_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2. Method: what the last syncs took is made up, and so is that one is under way."""
    under_way = False
    monkeypatch.setattr(Shard, "has_inflight_batch", property(lambda _: under_way))

    async def scenario() -> None:
        nonlocal under_way
        bench = shard(1 << 20)
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        flushed = 0

        def last_call() -> int:
            nonlocal flushed
            flushed += 1
            return 1

        commits.on_before_commit = last_call
        seen = []
        for took_us in (100, 5_000, 100):
            for _ in range(200):
                bench.shard._stats.record_sync(took_us)
            for _ in range(300):
                await commits.wait(bench.submit([b"x"]))
            while commits._commit_scheduled:
                await asyncio.sleep(0)
            for now in (True, False):
                under_way, flushed = now, 0
                commits.schedule_commit()
                for _ in range(5):
                    await asyncio.sleep(0)
                seen.append(bool(flushed))
        assert seen == [False, True, True, True, False, True]
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


def test_a_quick_disk_that_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: that a sync is under way is made up, and for how long."""
    took_us = 0
    monkeypatch.setattr(Shard, "has_inflight_batch", property(lambda _: True))
    monkeypatch.setattr(Shard, "inflight_us", property(lambda _: took_us))

    async def scenario() -> None:
        nonlocal took_us
        bench = shard()
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        flushed = asyncio.Event()

        def last_call() -> int:
            flushed.set()
            return 1

        commits.on_before_commit = last_call
        commits.schedule_commit()
        await asyncio.sleep(0.02)  # longer than anybody has patience
        assert not flushed.is_set(), "it began just now"
        took_us = 5_000
        await asyncio.wait_for(flushed.wait(), TIMEOUT_S)
        commits.close()
        monkeypatch.undo()
        bench.shard.close()

    asyncio.run(scenario())


def test_who_was_answered_with_others_has_a_turn_to_come_again() -> None:
    """Method: how many the last batch had is made up; turns of the loop are counted."""

    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        turns = []
        for writes in (1, 1, 64, 64, 1):
            turn = 0
            flushed = False

            def last_call(writes: int = writes) -> int:
                nonlocal flushed
                flushed = True
                return writes

            commits.on_before_commit = last_call
            commits.schedule_commit()
            while not flushed:
                await asyncio.sleep(0)
                turn += 1
            turns.append(turn)
        assert turns == [1, 1, 1, 2, 2]
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


@BOTH
def test_no_sync_runs_on_the_loop(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a real disk; every sync that Python runs says in which thread. Files are small, new ones are many."""
    synced_by = spied_syncs(monkeypatch)
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        disk = PosixDisk()
        disk.make_dir("data")
        bench = WalHarness(disk)
        bench.shard.start()
        with implementation(compiled=compiled):
            commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        synced_by.clear()
        for number in range(200):
            token = bench.submit([b"%d" % number], durable=number % 3 != 0)
            assert await commits.wait(token) == 1
        assert bench.writer.rotations > 1
        assert len(synced_by) > 1
        assert get_ident() not in synced_by
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


def test_no_sync_of_a_whole_server_runs_on_its_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced_by = spied_syncs(monkeypatch)
    loops: list[int] = []
    ready = CommitDriver.__init__

    def spied(self: CommitDriver, *args: Any, **kwargs: Any) -> None:
        loops.append(get_ident())
        ready(self, *args, **kwargs)

    monkeypatch.setattr(CommitDriver, "__init__", spied)
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


def spied_syncs(patch: pytest.MonkeyPatch) -> list[int]:
    """Which threads called for a sync of data."""
    found: list[int] = []
    sync = os.fdatasync

    def spied(fd: int) -> None:
        found.append(get_ident())
        sync(fd)

    patch.setattr(os, "fdatasync", spied)
    return found


@pytest.mark.parametrize(("mode", "durable"), [("loop", True), ("loop", False), ("beside", True), ("beside", False)])
def test_a_new_file_is_not_made_on_the_loop(mode: CommitMode, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of it are syncs, and waiting for all that was written before."""
    rotated_by: list[int] = []
    rotate = Writer._rotate

    def spied(self: Writer, *, vital: bool) -> None:
        rotated_by.append(get_ident())
        rotate(self, vital=vital)

    monkeypatch.setattr(Writer, "_rotate", spied)

    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], mode)
        for number in range(100):  # a file has room for some forty
            assert await commits.wait(bench.submit([b"%d" % number], durable=durable)) == 1
        assert len(rotated_by) > 1
        assert get_ident() not in rotated_by
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


def test_what_needs_no_sync_is_written_on_the_loop_and_told_there() -> None:
    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        told_by: list[int] = []
        token = bench.submit([b"quick"], durable=False)
        token.add_done_callback(lambda _: told_by.append(get_ident()), wake_writer=False)
        commits.add_done_callback(token, lambda _: None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert told_by == [get_ident()]
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_whoever_waits_for_what_was_written_is_told_before_whoever_wrote_it(mode: CommitMode, durable: bool) -> None:
    """Method: telling the second one breaks."""

    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], mode)
        log: list[str] = []
        commits.on_committed = lambda: log.append("first")
        mistakes: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: mistakes.append(said["exception"]))

        def record_count(token: CommitFuture[int]) -> None:
            log.append(f"writer {tokens.index(token)}")
            if token is tokens[1]:
                raise ZeroDivisionError

        tokens = [bench.submit([b"%d" % number], durable=durable) for number in range(3)]
        for token in tokens:
            commits.add_done_callback(token, record_count)
        async with asyncio.timeout(TIMEOUT_S):
            while len(log) < 4 or not mistakes:
                await asyncio.sleep(0.001)
        told = [said for said in log if said != "first"]
        assert (log[0], told) == ("first", ["writer 0", "writer 1", "writer 2"])
        if mode == "loop" or not durable:  # else the writer thread's are told of in a turn of their own
            assert log[:2] == ["first", "writer 0"]
        assert [type(mistake) for mistake in mistakes] == [ZeroDivisionError]
        assert not bench.shard.is_latched, "it is in the WAL whoever heard of it"
        commits.close()
        bench.shard.close()

    asyncio.run(scenario())


def test_what_breaks_in_a_batch_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: telling a batch raises; somebody waits in the lobby."""

    def broken(_: Shard) -> bool:
        raise ZeroDivisionError

    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        flushed = asyncio.Event()

        def last_call() -> int:
            flushed.set()
            return 0

        commits.on_before_commit = last_call
        monkeypatch.setattr(Shard, "finish_commit", broken)
        with pytest.raises(ZeroDivisionError):
            commits._on_fsync_done(bench.shard)
        await asyncio.wait_for(flushed.wait(), TIMEOUT_S)
        commits.close()
        monkeypatch.undo()
        bench.shard.close()

    asyncio.run(scenario())


def test_a_loop_that_closed_begins_nothing_and_the_rest_is_committed_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: a batch is begun when it closes, another is staged then, and a third behind it by somebody else."""
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        disk = PosixDisk()
        disk.make_dir("data")
        bench = WalHarness(disk)
        bench.shard.start()
        commits = CommitDriver(asyncio.get_running_loop(), [bench.shard], "beside")
        told: list[int] = []
        for number in range(2):
            commits.add_done_callback(bench.submit([b"%d" % number]), lambda _, number=number: told.append(number))  # type: ignore[misc]
            if number == 0:
                while not bench.shard.has_inflight_batch:
                    await asyncio.sleep(0)
                commits.close()
        last = bench.submit([b"last"])
        assert await asyncio.to_thread(last.wait, TIMEOUT_S) == 1
        while len(told) < 2:
            await asyncio.sleep(0.001)
        assert told == [0, 1]
        bench.shard.close()

    asyncio.run(scenario())
