"""A server that is killed and started again under producers and followers: no record lost, none twice, order kept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest
from tests.contract_http.server import Server
from tests.kit.threads import running
from tests.kit.waiting import eventually

import tidelog
from tidelog import Gap, aio
from tidelog.engine import Page, Record

SENDERS = 2
RETRY_S = 60.0
TIMEOUT_S = 30.0


@contextmanager
def server_on_a_fixed_port(folder: Path) -> Iterator[Server]:
    """A server that has the same address after a restart."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    arguments = ("--data", str(folder / "data"), "--port", port, "--port-file", str(folder / "port.txt"))
    with Server(folder, *arguments).start() as server:
        yield server


def kill_again_and_again(server: Server, kills: int, random: Random, count: Callable[[], int], total: int) -> None:
    """Kill the server and start it again, each time after another number of written records."""
    for number in range(kills):
        due = total * (number + random.random()) / (kills + 1)
        eventually(lambda due=due: count() >= due, RETRY_S)  # type: ignore[misc]
        server.kill()
        server.start()


def sent_by(sender: int, number: int) -> bytes:
    return b"%d:%d:%s" % (sender, number, b"x" * (number % 100))


Seen = tuple[int, bytes]  # the seq and the data of a record


def seen_in(item: Record | Gap | Page | pa.RecordBatch) -> list[Seen]:
    """What a follower yielded. There are no gaps here."""
    if isinstance(item, pa.RecordBatch):
        return list(zip(item["seq"].to_pylist(), item["data"].to_pylist(), strict=True))
    if isinstance(item, Page):
        return [(record.seq, record.data) for record in item.records]
    assert isinstance(item, Record)
    return [(item.seq, item.data)]


def check(found: list[Seen], total: int) -> None:
    """Every record once, those of a sender in their order, seqs ascending."""
    assert [seq for seq, _ in found] == sorted({seq for seq, _ in found})
    for sender in range(SENDERS):
        own = [data for _, data in found if data.startswith(b"%d:" % sender)]
        assert own == [sent_by(sender, number) for number in range(total // SENDERS)]
    assert len(found) == total


def run_threads(server: Server, url: str, kills: int, total: int, random: Random) -> None:
    seen: dict[str, list[Seen]] = {}
    with tidelog.connect(url, timeout_s=TIMEOUT_S, retry_s=RETRY_S) as database:
        topic = database.topic("orders")

        def follow(name: str, items: Iterator[Any]) -> None:
            found = seen.setdefault(name, [])
            while len(found) < total:
                found += seen_in(next(items))

        shared: dict[int, bytes] = {}  # what the consumers of one group had, at least once each

        def consume(consumer: str) -> None:
            while len(shared) < total:
                for batch in topic.group("shared").consume(consumer, 50, lease_ms=2_000, timeout=0.2):
                    shared.update(seen for record in batch for seen in seen_in(record))

        with topic.producer(linger_ms=1, max_bytes=20_000) as producer:

            def send(sender: int) -> None:
                for number in range(total // SENDERS):
                    producer.send(sent_by(sender, number))

            with running(
                *(lambda sender=sender: send(sender) for sender in range(SENDERS)),
                lambda: follow("cursor", topic.follow(timeout=RETRY_S)),
                lambda: follow("pages", topic.follow(batch=100, heartbeat=0.1, timeout=RETRY_S)),
                lambda: follow("arrow", topic.follow_arrow(timeout=RETRY_S)),
                lambda: follow("group", topic.group("g").follow(timeout=RETRY_S)),
                lambda: consume("a"),
                lambda: consume("b"),
                lambda: kill_again_and_again(server, kills, random, lambda: producer.stats().written, total),
            ):
                pass
            producer.close()
            stats = producer.stats()
        assert (stats.accepted, stats.written) == (total, total)
        check([each for item in topic for each in seen_in(item)], total)
        check(sorted(shared.items()), total)

        def is_drained() -> bool:
            for _ in topic.group("shared").consume("last", timeout=0):  # whose acks a kill took
                pass
            return topic.group("shared").lag().records == 0

        eventually(is_drained, RETRY_S)
    for found in seen.values():
        check(found, total)
    assert set(seen) == {"cursor", "pages", "arrow", "group"}


def run_tasks(server: Server, url: str, kills: int, total: int, random: Random) -> None:
    seen: dict[str, list[Seen]] = {}

    async def follow(name: str, items: Any) -> None:
        found = seen.setdefault(name, [])
        async for item in items:
            found += seen_in(item)
            if len(found) == total:
                return

    async def main() -> None:
        async with aio.connect(url, timeout_s=TIMEOUT_S, retry_s=RETRY_S) as database:
            topic = await database.topic("orders")
            async with topic.producer(linger_ms=1, max_bytes=20_000) as producer:
                loop, is_done = asyncio.get_running_loop(), Event()

                def count() -> int:
                    return asyncio.run_coroutine_threadsafe(producer.stats(), loop).result(RETRY_S).written

                async def send(sender: int) -> None:
                    for number in range(total // SENDERS):
                        await producer.send(sent_by(sender, number))

                work: list[Coroutine[Any, Any, None]] = [send(sender) for sender in range(SENDERS)]
                work.append(follow("cursor", topic.follow(timeout=RETRY_S)))
                work.append(follow("pages", topic.follow(batch=100, heartbeat=0.1, timeout=RETRY_S)))
                work.append(follow("arrow", topic.follow_arrow(timeout=RETRY_S)))
                work.append(follow("group", topic.group("g").follow(timeout=RETRY_S)))

                def kill() -> None:
                    kill_again_and_again(server, kills, random, count, total)
                    is_done.set()

                killer = Thread(target=kill)
                killer.start()
                await asyncio.gather(*work)
                await producer.close()
                await asyncio.to_thread(killer.join)
                assert is_done.is_set()
                assert (await producer.stats()).written == total
            check([each async for item in topic for each in seen_in(item)], total)

    asyncio.run(asyncio.wait_for(main(), 600))
    for found in seen.values():
        check(found, total)
    assert set(seen) == {"cursor", "pages", "arrow", "group"}


def run(kind: str, folder: Path, kills: int, total: int, seed: int) -> None:
    with server_on_a_fixed_port(folder) as server:
        url = f"http://127.0.0.1:{server.address.port}"
        run_one = run_threads if kind == "threads" else run_tasks
        run_one(server, url, kills, total, Random(seed))


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_kills_under_a_producer_and_followers(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path, kills=2, total=3_000, seed=1)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_under_a_producer_and_followers(kind: str, seed: int, tmp_path: Path) -> None:
    run(kind, tmp_path, kills=10, total=40_000, seed=seed)
