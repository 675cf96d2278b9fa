"""Outcomes come back to the loop in the order in which they were known, from whichever thread."""

from __future__ import annotations

import asyncio
from threading import Thread, get_ident

import pytest
from tests.unit.wal.bench import Bench

from tidelog.server.commits import Commits
from tidelog.server.config import CommitMode
from tidelog.testing import SimDisk
from tidelog.wal import Token, Writer


def shard() -> Bench:
    disk = SimDisk()
    disk.make_dir("data")
    return Bench(disk)


@pytest.mark.parametrize("mode", ["loop", "thread", "auto"])
def test_every_outcome_is_told_once_on_the_loop(mode: CommitMode) -> None:
    async def scenario() -> None:
        bench = shard()
        if mode != "loop":
            bench.shard.start()
        commits = Commits(asyncio.get_running_loop(), [bench.shard], mode)
        told: list[int] = []
        tokens = [bench.submit([b"%d" % number]) for number in range(50)]
        for number, token in enumerate(tokens):
            commits.when_done(token, lambda _, number=number: told.append(number))  # type: ignore[misc]
        assert await commits.outcome(bench.submit([b"last"])) == 1
        assert told == list(range(50))
        bench.shard.close()

    asyncio.run(scenario())


def test_what_is_known_at_once_is_told_behind_what_was_known_before() -> None:
    """Method: an outcome of another thread is on its way to the loop when one comes that needs no way."""

    async def scenario() -> None:
        bench = shard()
        commits = Commits(asyncio.get_running_loop(), [bench.shard], "thread")
        told: list[str] = []
        slow: Token[int] = Token(bench.shard)
        commits.when_done(slow, lambda _: told.append("slow"))
        other = Thread(target=lambda: slow.set(1))
        other.start()
        other.join()
        commits.when_done(Token.ready(bench.shard, 1), lambda _: told.append("quick"))
        assert told == [], "the first is on its way"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert told == ["slow", "quick"]
        commits.when_done(Token.ready(bench.shard, 1), lambda _: told.append("now"))
        assert told[-1] == "now"

    asyncio.run(scenario())


def test_syncs_move_to_where_they_cost_least() -> None:
    """E2: on the loop once they are quick, and back when they are not."""

    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = Commits(asyncio.get_running_loop(), [bench.shard], "auto")
        seen = [commits.on_loop]
        for took_us in (100, 5_000):
            for _ in range(200):
                bench.shard._stats.synced(took_us)
            for _ in range(300):
                await commits.outcome(bench.submit([b"x"]))
            seen.append(commits.on_loop)
        assert seen == [False, True, False]
        bench.shard.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("mode", "durable"), [("loop", True), ("loop", False), ("thread", False)])
def test_a_new_file_is_not_made_on_the_loop(mode: CommitMode, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of it are syncs, and waiting for all that was written before."""
    rotated_by: list[int] = []
    rotate = Writer._rotate

    def spied(self: Writer) -> None:
        rotated_by.append(get_ident())
        rotate(self)

    monkeypatch.setattr(Writer, "_rotate", spied)

    async def scenario() -> None:
        bench = shard()
        bench.shard.start()
        commits = Commits(asyncio.get_running_loop(), [bench.shard], mode)
        for number in range(100):  # a file has room for some forty
            assert await commits.outcome(bench.submit([b"%d" % number], durable=durable)) == 1
        assert len(rotated_by) > 1
        assert get_ident() not in rotated_by
        bench.shard.close()

    asyncio.run(scenario())


def test_what_needs_no_sync_is_written_on_the_loop_and_what_does_is_not() -> None:
    """Method: there is no thread, so what is handed over stays where it is."""

    async def scenario() -> None:
        bench = shard()
        commits = Commits(asyncio.get_running_loop(), [bench.shard], "thread")
        assert await commits.outcome(bench.submit([b"quick"], durable=False)) == 1
        told: list[int] = []
        commits.when_done(bench.submit([b"durable"]), lambda _: told.append(1))
        commits.when_done(bench.submit([b"behind it"], durable=False), lambda _: told.append(2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (told, bench.shard.waiting) == ([], 2)
        bench.shard.pump()
        assert told == [1, 2]

    asyncio.run(scenario())
