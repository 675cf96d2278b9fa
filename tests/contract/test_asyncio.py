"""What `tidelog.aio` adds to the contract: nothing blocks the event loop, and cancelled tasks end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.contract.conftest import KEY

import tidelog
from tidelog import aio, errors, protocols
from tidelog.aio.threads import Threads
from tidelog.engine import Appended
from tidelog.wal import CommitFuture

Name = Callable[..., str]
KINDS = ["open", "connect"]


@asynccontextmanager
async def opened(kind: str, path: Path, url: str) -> AsyncIterator[Any]:
    starting = aio.open(str(path / "data")) if kind == "open" else aio.connect(url, key=KEY)
    async with starting as database:
        yield database


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_task_ends_and_the_database_goes_on(
    kind: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic, queue = await database.topic(name()), await database.queue(name("q"))
            group = topic.group("g")
            calls: tuple[Callable[[], Awaitable[object]], ...] = (
                lambda: topic.read(timeout=60),
                lambda: anext(topic.follow()),
                lambda: anext(queue.jobs("w")),
                lambda: group.fetch(timeout=60),
                lambda: topic.to_arrow(),
                lambda: topic.append_stream(endless()),
            )
            for call in calls:
                task = asyncio.ensure_future(call())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await topic.append("after")).seqs == range(1, 2)
            await queue.put("job")
            assert [job.deliveries for job in await queue.claim("w2")] == [1]

    run(main())


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 1_000
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", KINDS)
def test_many_waiting_readers_hold_no_thread(kind: str, tmp_path: Path, contract_server: str, name: Name) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic = await database.topic(name())
            waiting = [asyncio.ensure_future(topic.read(timeout=60)) for _ in range(40)]
            following = [asyncio.ensure_future(anext(topic.follow(timeout=60))) for _ in range(20)]
            await asyncio.sleep(0)
            assert (await topic.append("news")).seqs == range(1, 2)
            assert {page.records[0].data for page in await asyncio.gather(*waiting)} == {"news"}
            assert {record.data for record in await asyncio.gather(*following)} == {"news"}

    run(main())


def test_appends_of_many_tasks_are_all_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(str(tmp_path / "data"), workers=2) as database:
            topic = await database.topic("orders", durability="fsync")
            done = await asyncio.gather(*(topic.append(number) for number in range(200)))
            assert sorted(each.first_seq for each in done) == list(range(1, 201))
        with tidelog.open(str(tmp_path / "data")) as reopened:
            assert reopened.topic("orders").count == 200

    run(main())


def test_a_read_only_database_follows_its_writer(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "data")
        async with aio.open(path) as writer:
            topic = await writer.topic("orders")
            await topic.append(1)
            async with aio.open(path, read_only=True) as reader:
                follower = (await reader.topic("orders", create=False)).follow(timeout=60)
                for number in (1, 2):
                    found = await anext(follower)
                    assert isinstance(found, tidelog.Record)
                    assert found.data == number
                    await topic.append(2)

    run(main())


def test_an_address_without_a_server_and_a_wrong_key(contract_server: str) -> None:
    async def main() -> None:
        with pytest.raises(errors.Unavailable, match="cannot be reached"):
            async with aio.connect("http://127.0.0.1:1"):
                pass
        with pytest.raises(errors.Unauthorized):
            await aio.connect(contract_server, key="wrong")
        with pytest.raises(errors.BadInput):
            aio.open("data", workers=0)

    run(main())


def test_both_kinds_are_of_the_protocol() -> None:
    """mypy holds the classes to the protocols here; the names are compared as well."""

    def as_protocol(here: aio.AsyncDatabase, there: aio.AsyncRemoteDatabase) -> list[protocols.AsyncDatabase]:
        return [here, there]

    assert as_protocol.__annotations__
    pairs = (
        (protocols.AsyncDatabase, aio.AsyncDatabase, aio.AsyncRemoteDatabase),
        (protocols.AsyncTopic, aio.AsyncTopic, aio.AsyncRemoteTopic),
        (protocols.AsyncQueue, aio.AsyncQueue, aio.AsyncRemoteQueue),
        (protocols.AsyncGroup, aio.AsyncGroup, aio.AsyncRemoteGroup),
        (protocols.AsyncProducer, aio.AsyncProducer),
        (protocols.AsyncChannel, aio.AsyncChannel, aio.AsyncRemoteChannel),
    )
    for protocol, *kinds in pairs:
        named = {name for name in vars(protocol) if not name.startswith("_")}
        for kind in kinds:
            attributes = {*dir(kind), *(("topic",) if kind.__name__.endswith("Queue") else ()), "name"}
            assert named <= attributes


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_that_waits_gets_records_that_arrive_and_those_of_a_consumer_that_leaves(
    kind: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic = await database.topic(name())
            group = topic.group("g")
            waiting = asyncio.create_task(group.claim("a", lease_ms=600_000, timeout=100))
            while not waiting.done():
                await topic.append(1)  # the claim may begin after the first one
                await asyncio.wait({waiting}, timeout=0.05)
            first = await waiting
            assert first.first_seq == 1
            async for batch in group.consume("a", timeout=0):
                assert batch.first_seq > first.last_seq
            waiting = asyncio.create_task(group.claim("b", timeout=None))
            await asyncio.wait({waiting}, timeout=0.05)
            assert not waiting.done()
            assert await group.leave("a") == 1
            second = await waiting
            assert (second.consumer, second.records) == ("b", first.records)
            assert not await first.ack()
            assert await second.ack()
            assert (await group.state()).lag.records == 0

    run(main())


def test_a_write_that_is_cancelled_while_it_is_submitted_has_its_result(tmp_path: Path) -> None:
    began, go = Event(), Event()

    async def main() -> None:
        threads = Threads("test")
        with tidelog.open(tmp_path / "data") as log:
            topic = log.topic("orders")

            def submit() -> CommitFuture[Appended]:
                began.set()
                assert go.wait(60)
                return topic.append_nowait([b"a", b"b"])

            task = asyncio.ensure_future(threads.commit(submit))
            await asyncio.to_thread(began.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            cause = caught.value.__cause__
            assert isinstance(cause, errors.WriteCancelled)
            assert isinstance(cause.result, Appended)
            assert (cause.result.count, topic.head_seq) == (2, 2)
        await threads.stop()

    run(main())
