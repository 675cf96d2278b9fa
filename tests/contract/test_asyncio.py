"""What `tidelog.aio` adds to the contract: nothing blocks the event loop, and a cancelled call is done or not done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from tests.contract.conftest import KEY

import tidelog
from tidelog import aio, errors, protocols
from tidelog.engine import Appended

Name = Callable[..., str]
KINDS = ["open", "connect"]
Run = Callable[[aio.AsyncTopic | aio.AsyncRemoteTopic], Awaitable[Any]]


@asynccontextmanager
async def opened(kind: str, path: Path, url: str) -> AsyncIterator[Any]:
    starting = aio.open(str(path / "data")) if kind == "open" else aio.connect(url, key=KEY)
    async with starting as database:
        yield database


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


class StepLimit:
    """Cancels a task when it waits for the n-th time."""

    def __init__(self, awaitable: Awaitable[Any], steps: int) -> None:
        self._iterator, self._steps = awaitable.__await__(), steps
        self.is_cancelled = False

    def __await__(self) -> Any:
        error: BaseException | None = None
        while True:
            try:
                waited = self._iterator.send(None) if error is None else self._iterator.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            if self._steps == 0 and not self.is_cancelled:
                self.is_cancelled = True
                error = asyncio.CancelledError()
                continue
            self._steps -= 1
            try:
                yield waited
            except BaseException as thrown:
                error = thrown


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_is_cancelled_at_any_await_is_known_to_be_done_or_not(
    kind: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic = await database.topic(name(), durability="fsync")
            outcomes = set()
            for steps in range(40):
                before = (await topic.state()).head_seq
                limited = StepLimit(topic.append(["a", "b"]), steps)
                try:
                    done = await limited
                    assert done.seqs == range(before + 1, before + 3)
                    outcomes.add("returned")
                except asyncio.CancelledError as error:
                    cause = error.__cause__
                    after = (await topic.state()).head_seq
                    if cause is None:
                        assert after == before, "nothing was done"
                        outcomes.add("nothing")
                    else:
                        assert isinstance(cause, errors.WriteCancelled)
                        assert isinstance(cause.result, Appended)
                        assert (cause.result.seqs, after) == (range(before + 1, before + 3), before + 2)
                        outcomes.add("finished")
                if not limited.is_cancelled:
                    break
            assert "returned" in outcomes
            assert len(outcomes) > 1
            page = await topic.read(limit=1_000)
            assert [record.data for record in page.records] == ["a", "b"] * (len(page.records) // 2)

    run(main())


class Subject(NamedTuple):
    """What a change is made to. `number` differs from call to call."""

    database: Any
    topic: Any
    queue: Any
    number: int


CHANGES: dict[str, Callable[[Subject], Awaitable[object]]] = {
    "append_arrow": lambda on: on.topic.append_arrow(pa.table({"data": [b"a"]})),
    "append_numbered": lambda on: on.topic.append_numbered(
        [pa.table({"data": [b"n"]})], writer="w", number=on.number, sum=(0, on.number)
    ),
    "append_stream": lambda on: on.topic.append_stream([b"s" * 300_000]),
    "delete": lambda on: on.topic.delete(before_seq=on.number + 2),
    "commit": lambda on: on.topic.group("g").commit(on.number + 1),
    "claim of a group": lambda on: on.topic.group("g").claim("c", 1),
    "configure": lambda on: on.database.configure(on.topic.name, {"ttl_ms": 10**9 + on.number}),
    "put": lambda on: on.queue.put("job"),
    "claim": lambda on: on.queue.claim("w"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_is_cancelled_at_any_await_is_known_to_be_done_or_not(
    kind: str, change: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic, queue = await database.topic(name(), durability="fsync"), await database.queue(name("q"))
            await topic.append(list(range(100)))
            await queue.put(list(range(100)))

            async def observe() -> object:
                state, group = await topic.state(), topic.group("g")
                consumers = await group.consumers() if await group.exists() else []
                position = (await group.state()).position
                return state.head_seq, state.count, state.config, position, consumers, await queue.counts()

            outcomes = set()
            for steps in range(60):
                before = await observe()
                limited = StepLimit(CHANGES[change](Subject(database, topic, queue, steps)), steps)
                try:
                    await limited
                    outcomes.add("returned")
                except asyncio.CancelledError as error:
                    cause = error.__cause__
                    is_done = isinstance(cause, errors.WriteCancelled)
                    assert is_done or cause is None
                    assert (await observe() != before) == is_done
                    outcomes.add("finished" if is_done else "nothing")
                if not limited.is_cancelled:
                    break
            assert "returned" in outcomes
            assert len(outcomes) > 1

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_that_is_cancelled_at_any_await_goes_on_where_it_was(
    kind: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic = await database.topic(name())
            await topic.append(list(range(20)))
            found: list[int] = []
            for steps in range(60):
                pages = topic.follow(len(found), batch=5, timeout=0)
                limited = StepLimit(anext(pages), steps)
                try:
                    page = await limited
                except asyncio.CancelledError as error:
                    cause = error.__cause__
                    assert cause is None
                    continue
                finally:
                    await pages.aclose()
                found += [record.data for record in page.records]
                if len(found) == 20:
                    break
            assert found == list(range(20))

    run(main())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["send", "flush", "result", "close"])
def test_a_producer_call_that_is_cancelled_at_any_await_leaves_every_record_with_a_known_outcome(
    kind: str, operation: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            topic = await database.topic(name(), durability="fsync")
            expected: list[str] = []
            outcomes = set()
            for steps in range(40):
                producer = topic.producer(linger_ms=0, max_bytes=2 * 80)
                given = [f"{steps}-{number}" for number in range(4)]
                first = await producer.send(given[0])
                calls: dict[str, Callable[[], Awaitable[object]]] = {
                    "send": partial(send_all, producer, given[1:]),
                    "flush": producer.flush,
                    "result": first.result,
                    "close": producer.close,
                }
                limited = StepLimit(calls[operation](), steps)
                unwritten: list[str] = []
                try:
                    await limited
                except asyncio.CancelledError as error:
                    failure = error.__cause__
                    if failure is not None:
                        assert operation == "close"
                        assert isinstance(failure, errors.NotAllWritten)
                        assert not failure.in_doubt
                        unwritten = [record.data for record in failure.records]
                    outcomes.add("unwritten" if unwritten else "cancelled")
                else:
                    outcomes.add("returned")
                await producer.close() if operation != "close" else None
                stats = await producer.stats()
                assert (stats.waiting, stats.in_doubt, stats.refused) == (0, 0, len(unwritten))
                expected += [data for data in given[: stats.accepted] if data not in unwritten]
                if not limited.is_cancelled:
                    break
            assert "returned" in outcomes
            assert len(outcomes) > 1
            assert [record.data async for record in topic] == expected

    run(main())


async def send_all(producer: aio.AsyncProducer, datas: list[str]) -> None:
    for data in datas:
        await producer.send(data)


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
