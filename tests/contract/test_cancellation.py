"""A call of `tidelog.aio` that is cancelled at any await is done or not done, and its caller knows which.

`StepLimit` cancels a call when it waits for the n-th time, for every n. Each coroutine method of the protocols is in
`CHANGES`, `READS` or `ELSEWHERE`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.contract.test_asyncio import KINDS, Name, opened, run
from tests.kit.waiting import until

from tidelog import aio, errors, protocols
from tidelog.engine import Appended


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


@dataclass(frozen=True)
class Subject:
    """What a call is made to. `number` differs from call to call; `prepared` is what `Change.prepare` returned."""

    database: Any
    topic: Any
    queue: Any
    dead: Any
    channel: Any
    fifo: Any
    other: Any  # the channel as a second user sees it
    keyed: Any  # a topic with compaction
    number: int = 0
    prepared: Any = None
    other_user: str = "bob@localhost"

    @property
    def group(self) -> Any:
        return self.topic.group("g")

    def name(self, what: str) -> str:
        return f"{self.topic.name}-{what}{self.number}"

    async def observe(self) -> object:
        """Everything that a change can change."""
        state, group = await self.topic.state(), await self.group.state()
        segments = (await self.topic.segments()).segments
        room = await self.channel.state() if "channel" in await self.kept_channels() else None
        return (
            (state.head_seq, state.count, state.config, len(await self.topic.gaps())),
            [(each.base, each.generation, each.sealed) for each in segments],
            (group.position, group.hold_bytes, await self.group.exists(), await self.consumers()),
            (await self.queue.counts(), len(await self.queue.history().read(limit=10_000))),
            ((await self.dead.state()).head_seq, await self.database.names()),
            [router.router for router in await self.database.routers()],
            [receipt.hash for receipt in await self.database.erasures()],
            room and (room.members, room.config, await self.channel.acl("publish"), await self.channel.bounds()),
            (await self.fifo.length(), await self.kept_channels()),
        )

    async def consumers(self) -> list[Any]:
        return list(await self.group.consumers()) if await self.group.exists() else []

    async def kept_channels(self) -> list[str]:
        """Which of the two channels there are."""
        names = await self.database.channels.channel_names()
        return [what for what in ("channel", "fifo") if getattr(self, what).name in names]


class Change(NamedTuple):
    """A call that changes something."""

    call: Callable[[Subject], Awaitable[object]]
    prepare: Callable[[Subject], Awaitable[object]] | None = None
    is_visible: bool = True  # in `observe`


def of_job(method: str, **options: Any) -> Change:
    """A call that settles a job."""
    return Change(lambda on: getattr(on.queue, method)("w", on.prepared, **options), lambda on: on.queue.claim("w"))


def of_batch(method: str, *, is_visible: bool = True) -> Change:
    """A call about a batch of records that a consumer has leased."""
    return Change(
        lambda on: getattr(on.group, method)("c", on.prepared.lease_id),
        lambda on: on.group.claim("c", 1),
        is_visible=is_visible,
    )


async def sealed(on: Subject) -> None:
    """Delete half of a sealed segment, so that there is something to rewrite."""
    done = await on.topic.append(["x" * 100] * 4)
    await on.topic.seal()
    await on.database.checkpoint()
    await on.topic.delete(seqs=list(done.seqs)[:2])


def user(on: Subject) -> str:
    return f"u{on.number}@localhost"


async def invite(on: Subject) -> None:
    await on.channel.invite(user(on))


CHANGES: dict[str, Change] = {
    "Topic.append": Change(lambda on: on.topic.append(["a", "b"])),
    "Topic.append_arrow": Change(lambda on: on.topic.append_arrow(pa.table({"data": [b"a"]}))),
    "Topic.append_pandas": Change(lambda on: on.topic.append_pandas(pd.DataFrame({"data": ["a"]}))),
    "Topic.append_polars": Change(lambda on: on.topic.append_polars(pl.DataFrame({"data": ["a"]}))),
    "Topic.append_numbered": Change(
        lambda on: on.topic.append_numbered(
            [pa.table({"data": [b"n"]})], writer="w", number=on.number, sum=(0, on.number)
        )
    ),
    "Topic.append_stream": Change(lambda on: on.topic.append_stream([b"s" * 300_000])),
    "Topic.delete": Change(lambda on: on.topic.delete(before_seq=on.number + 2)),
    "Topic.compact": Change(lambda on: on.keyed.compact(), is_visible=False),
    "Topic.seal": Change(lambda on: on.topic.seal(), lambda on: on.topic.append("x")),
    "Topic.rewrite": Change(lambda on: on.topic.rewrite(force=True), sealed),
    "Topic.erase": Change(lambda on: on.topic.erase(seqs=[on.number + 1])),
    "Topic.redrive": Change(lambda on: on.dead.redrive(limit=1), lambda on: reject_one(on)),
    "Group.commit": Change(lambda on: on.group.commit(on.number + 1)),
    "Group.reset": Change(lambda on: on.group.reset(on.number + 1)),
    "Group.hold": Change(lambda on: on.group.hold(on.number + 1), lambda on: on.group.begin()),
    "Group.begin": Change(lambda on: on.group.begin(), lambda on: on.group.delete()),
    "Group.delete": Change(lambda on: on.group.delete(), lambda on: on.group.begin()),
    "Group.claim": Change(lambda on: on.group.claim("c", 1)),
    "Group.ack": of_batch("ack"),
    "Group.release": of_batch("release"),
    "Group.extend": of_batch("extend", is_visible=False),
    "Group.leave": Change(lambda on: on.group.leave("c"), lambda on: on.group.claim("c", 1)),
    "Queue.put": Change(lambda on: on.queue.put("job")),
    "Queue.claim": Change(lambda on: on.queue.claim("w")),
    "Queue.ack": of_job("ack"),
    "Queue.nack": of_job("nack"),
    "Queue.reject": of_job("reject"),
    "Queue.extend": of_job("extend", lease_ms=60_000),
    "Queue.redrive": Change(lambda on: on.queue.redrive(limit=1), is_visible=False),
    "Channel.join": Change(lambda on: on.other.join(), lambda on: leave(on)),
    "Channel.leave": Change(lambda on: on.other.leave(), lambda on: join(on)),
    "Channel.invite": Change(lambda on: on.channel.invite(user(on))),
    "Channel.kick": Change(lambda on: on.channel.kick(user(on)), invite),
    "Channel.configure": Change(lambda on: on.channel.configure(max_clients=10 + on.number)),
    "Channel.allow": Change(lambda on: on.channel.allow("publish", user(on))),
    "Channel.disallow": Change(
        lambda on: on.channel.disallow("publish", user(on)), lambda on: on.channel.allow("publish", user(on))
    ),
    "Channel.change_acl": Change(lambda on: on.channel.change_acl("publish", add=[user(on)])),
    "Channel.delete": Change(lambda on: on.channel.delete(), lambda on: create(on)),
    "Channel.publish": Change(lambda on: on.channel.publish(b"x")),
    "Channel.publish_many": Change(lambda on: on.channel.publish_many([b"x", b"y"])),
    "Channel.push": Change(lambda on: on.fifo.push(b"x")),
    "Channel.pop": Change(lambda on: on.fifo.pop(), lambda on: on.fifo.push(b"x")),
    "Channel.clear": Change(lambda on: on.fifo.clear(), lambda on: on.fifo.push(b"x")),
    "Channel.subscribe": Change(lambda on: on.channel.subscribe(), is_visible=False),
    "Database.topic": Change(lambda on: on.database.topic(on.name("t"))),
    "Database.queue": Change(lambda on: on.database.queue(on.name("q"))),
    "Database.configure": Change(lambda on: on.database.configure(on.topic.name, {"ttl_ms": 10**9 + on.number})),
    "Database.drop": Change(lambda on: on.database.drop(on.name("t")), lambda on: on.database.topic(on.name("t"))),
    "Database.router": Change(lambda on: on.database.router(on.name("r"), on.topic.name, on.dead.name)),
    "Database.drop_router": Change(
        lambda on: on.database.drop_router(on.name("r")),
        lambda on: on.database.router(on.name("r"), on.topic.name, on.dead.name, filter="none"),
    ),
    "Database.checkpoint": Change(lambda on: on.database.checkpoint(), is_visible=False),
    "Database.rewrite": Change(lambda on: on.database.rewrite(on.topic.name, force=True), sealed),
    "Database.erase": Change(lambda on: on.database.erase(on.topic.name, seqs=[on.number + 1])),
}


async def reject_one(on: Subject) -> None:
    await on.queue.reject("w", await on.queue.claim("w"))


async def join(on: Subject) -> None:
    if on.other_user not in await on.channel.members():
        await on.other.join()


async def leave(on: Subject) -> None:
    if on.other_user in await on.channel.members():
        await on.other.leave()


async def create(on: Subject) -> None:
    if "channel" not in await on.kept_channels():
        await on.channel.join(persist=True)


EACH_RUN = ("Topic.append_arrow", "Topic.append_stream", "Topic.delete", "Group.claim", "Queue.ack", "Channel.publish")
"""One for each way in which a call is finished; the others run in sweeps."""

READS: dict[str, Callable[[Subject], Awaitable[object]]] = {
    "Topic.state": lambda on: on.topic.state(),
    "Topic.producer_batches": lambda on: on.topic.producer_batches("w"),
    "Topic.simulate_retention": lambda on: on.topic.simulate_retention(cap_records=1),
    "Topic.read": lambda on: on.topic.read(),
    "Topic.to_arrow": lambda on: on.topic.to_arrow(),
    "Topic.to_pandas": lambda on: on.topic.to_pandas(),
    "Topic.to_polars": lambda on: on.topic.to_polars(),
    "Topic.to_dicts": lambda on: on.topic.to_dicts(),
    "Topic.open_record": lambda on: read_record(on),
    "Topic.seek": lambda on: on.topic.seek(1),
    "Topic.gaps": lambda on: on.topic.gaps(),
    "Topic.queue": lambda on: on.queue.topic.queue(),
    "Topic.groups": lambda on: on.topic.groups(),
    "Topic.segments": lambda on: on.topic.segments(),
    "Topic.segment": lambda on: on.topic.segment(1),
    "Topic.latest": lambda on: on.keyed.latest().to_arrow(),
    "Topic.scan": lambda on: anext(on.topic.scan().iter_arrow_batches()),
    "Topic.follow_arrow": lambda on: anext(on.topic.follow_arrow(timeout=0)),
    "Group.exists": lambda on: on.group.exists(),
    "Group.state": lambda on: on.group.state(),
    "Group.lag": lambda on: on.group.lag(),
    "Group.fetch": lambda on: on.group.fetch(),
    "Group.would_commit": lambda on: on.group.would_commit(1),
    "Group.preview": lambda on: on.group.preview("latest"),
    "Group.consumers": lambda on: on.topic.group("existing").consumers(),
    "Queue.lease_ms": lambda on: on.queue.lease_ms(),
    "Queue.counts": lambda on: on.queue.counts(),
    "Queue.history": lambda on: on.queue.history().to_arrow(),
    "Channel.members": lambda on: on.channel.members(),
    "Channel.state": lambda on: on.channel.state(),
    "Channel.acl": lambda on: on.channel.acl("publish"),
    "Channel.history": lambda on: on.channel.history(),
    "Channel.bounds": lambda on: on.channel.bounds(),
    "Channel.holes": lambda on: on.channel.holes(),
    "Channel.length": lambda on: on.fifo.length(),
    "Database.find": lambda on: on.database.find(on.topic.name),
    "Database.names": lambda on: on.database.names(),
    "Database.topics": lambda on: on.database.topics(),
    "Database.gaps": lambda on: on.database.gaps(),
    "Database.find_router": lambda on: on.database.find_router("none"),
    "Database.routers": lambda on: on.database.routers(),
    "Database.health": lambda on: on.database.health(),
    "Database.corruption": lambda on: on.database.corruption(),
    "Database.erasures": lambda on: on.database.erasures(),
    "Database.verify_erasures": lambda on: on.database.verify_erasures(),
    "Database.tier_status": lambda on: on.database.tier_status(),
    "Database.segment_places": lambda on: on.database.segment_places(),
}

ELSEWHERE: dict[str, str] = {
    "Topic.producer": "below",
    "Topic.follow": "below",
    "Topic.typed": "its calls are append, read and follow",
    "Topic.group": "sends nothing",
    "Group.follow": "fetch and commit",
    "Group.consume": "claim and ack",
    "Queue.jobs": "below",
    "Queue.worker": "tests/unit/client/test_async_worker.py",
    "Channel.name": "",
    "Database.close": "its own end",
    "Database.relocate": "as rewrite; needs a cold store",
    "Database.recall": "as rewrite; needs a cold store",
    "Database.claim_cold_store": "needs a cold store",
    "Database.backup": "changes nothing here",
    "Database.channel": "sends nothing",
    "Database.channels": "channel_names is in observe",
}


async def read_record(on: Subject) -> bytes:
    async with await on.topic.open_record(1) as record:
        found: bytes = await record.read()
        return found


def test_every_call_of_the_protocols_is_cancelled_somewhere() -> None:
    kinds = ("Topic", "Group", "Queue", "Channel", "Database")
    calls = {
        f"{kind}.{name}"
        for kind in kinds
        for name, value in vars(getattr(protocols, f"Async{kind}")).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    tested = {*CHANGES, *READS, *ELSEWHERE}
    assert calls <= tested, calls - tested
    assert len(tested) == len(CHANGES) + len(READS) + len(ELSEWHERE), "one test for each"


async def make_subject(database: Any, name: Name) -> Subject:
    topic = await database.topic(name(), durability="fsync")
    keyed = await database.topic(name("keyed"), compaction="/id")
    dead = await database.topic(name("dead"))
    queue = await database.queue(name("q"), dead_letter=name("dead"))
    room, fifo = (f"!{name(what)}@localhost" for what in ("room", "fifo"))
    ann = "ann@localhost"
    subject = Subject(
        database,
        topic,
        queue,
        dead,
        channel=database.channel(room, user=ann),
        fifo=database.channel(fifo, user=ann),
        other=database.channel(room, user=Subject.other_user),
        keyed=keyed,
    )
    await topic.append(list(range(100)))
    await keyed.append([{"id": number % 5} for number in range(20)])
    await queue.put(list(range(100)))
    await topic.group("existing").begin()
    await subject.channel.join(persist=True)
    await subject.fifo.join(persist=True, type="fifo")
    return subject


async def leave_channels(on: Subject) -> None:
    """A user may have only so many."""
    for what in await on.kept_channels():
        await getattr(on, what).delete()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name_of_call", [pytest.param(name, marks=() if name in EACH_RUN else pytest.mark.sweep) for name in CHANGES]
)
def test_a_change_that_is_cancelled_at_any_await_is_known_to_be_done_or_not(
    kind: str, name_of_call: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    change = CHANGES[name_of_call]

    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            subject, outcomes = await make_subject(database, name), set()
            for steps in range(60):
                on = replace(subject, number=steps)
                if change.prepare is not None:
                    on = replace(on, prepared=await change.prepare(on))
                before = await on.observe() if change.is_visible else None
                limited = StepLimit(change.call(on), steps)
                try:
                    await limited
                    outcomes.add("returned")
                except asyncio.CancelledError as error:
                    cause = error.__cause__
                    is_done = isinstance(cause, errors.WriteCancelled)
                    assert is_done or cause is None, repr(cause)
                    if change.is_visible:
                        assert (await on.observe() != before) == is_done
                    outcomes.add("finished" if is_done else "nothing")
                if not limited.is_cancelled:
                    break
            assert "returned" in outcomes
            assert len(outcomes) > 1
            await leave_channels(subject)

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_is_cancelled_at_any_await_changes_nothing(
    kind: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            on = await make_subject(database, name)
            before = await on.observe()
            for name_of_call, read in READS.items():
                for steps in count():
                    limited = StepLimit(read(on), steps)
                    try:
                        await limited
                    except asyncio.CancelledError as error:
                        cause = error.__cause__
                        assert cause is None, name_of_call
                    if not limited.is_cancelled:
                        break
                assert steps, f"{name_of_call} never waits"
            assert await on.observe() == before
            await leave_channels(on)

    run(main())


async def is_free(queue: Any, jobs: int) -> bool:
    return bool((await queue.counts()).ready == jobs)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_that_are_cancelled_at_any_await_are_claimable_again(
    kind: str, tmp_path: Path, contract_server: str, name: Name
) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path, contract_server) as database:
            queue = await database.queue(name())
            await queue.put(list(range(5)))
            for steps in count():
                jobs = queue.jobs("w", 2, timeout=0)
                limited = StepLimit(anext(jobs), steps)
                try:
                    await limited
                except asyncio.CancelledError as error:
                    cause = error.__cause__
                    assert cause is None
                finally:
                    await jobs.aclose()
                await until(lambda: is_free(queue, 5))  # a server releases them when it sees the end
                if not limited.is_cancelled:
                    break

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
