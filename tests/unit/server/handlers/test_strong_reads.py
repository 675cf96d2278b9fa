"""Strong consistency over HTTP: a peer is sent no record that a power cut could take back, whatever carries it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.server import fakes
from tests.unit.server.bulk_fixtures import get
from tests.unit.server.fakes import FakeSink, FakeWebSocket, ServerHarness, run_scenario

import tidelog
from tidelog.testing import ManualClock, SimDisk

Scenario = Callable[[ServerHarness], Awaitable[None]]


class Lost:
    """A server on a disk that loses power, and what is left of its topic then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.disk = SimDisk(clock=self.clock)
        patch.setattr(fakes, "MemoryDisk", lambda _: self.disk)

    def left(self, name: str = "a") -> set[int]:
        image = self.disk.crash_image("none")
        log = tidelog.open("data", disk=image, clock=self.clock, threads=False, wal_file_bytes=1 << 16)
        return {record.seq for record in log.topic(name, create=False).read(0, 1000).records}


@pytest.fixture
def lost_sync(monkeypatch: pytest.MonkeyPatch) -> Lost:
    return Lost(monkeypatch)


def sent(tap: FakeSink) -> set[int]:
    return {record["$seq"] for event in tap.events if event.event == "record" for record in event.data["records"]}


@pytest.mark.parametrize("by", ["session", "topic"])
def test_strong_events_have_durable_records_only(by: str, lost_sync: Lost) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="disk", **({"consistency": "strong"} if by == "topic" else {}))
        topic.append("reserves")
        options = {"consistency": "strong"} if by == "session" else {}
        tap, plain = FakeSink(), FakeSink()
        async with (
            await world.stream(await world.watch({"a": {}}, **options), tap),
            await world.stream(await world.watch({"a": {}}), plain),
        ):
            for number in range(2, 8):
                topic.append(number)
                for each in (tap, plain):
                    while max(sent(each), default=0) < number:
                        await each.until(len(each.events) + 1)
                assert sent(tap) <= lost_sync.left()

    run_scenario(scenario, clock=lost_sync.clock)


def test_eventual_events_are_sent_before_the_sync(lost_sync: Lost) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="disk")
        topic.append("reserves")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, consistency="eventual"), tap):
            topic.append("x")
            while max(sent(tap), default=0) < 2:
                await tap.until(len(tap.events) + 1)
            assert lost_sync.left() == {1}

    run_scenario(scenario, clock=lost_sync.clock)


@pytest.mark.parametrize("by", ["command", "topic"])
def test_strong_websocket_messages_have_durable_records_only(by: str, lost_sync: Lost) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="disk", **({"consistency": "strong"} if by == "topic" else {}))
        topic.append("reserves")
        line = FakeWebSocket()
        async with await world.connect(line):
            option = {"consistency": "strong"} if by == "command" else {}
            line.receive_from_peer({"op": "subscribe", "topic": "a", **option})
            for number in range(2, 6):
                topic.append(number)
                while not (seen := _records(line)) or max(seen) < number:
                    await line.until(len(line.sent) + 1)
                assert seen <= lost_sync.left()

    run_scenario(scenario, clock=lost_sync.clock)


def _records(line: FakeWebSocket) -> set[int]:
    return {record["$seq"] for said in line.sent_messages for record in said.get("records", ())}


def test_reads_and_claims_of_a_strong_topic_are_of_durable_records_alone(lost_sync: Lost) -> None:
    async def scenario(world: ServerHarness) -> None:
        status, body = await world.ask(
            "PUT", "/v0/topics/a", {"type": "queue", "durability": "disk", "consistency": "strong"}
        )
        assert (status, body["config"]["consistency"]) == (201, "strong")
        topic = world.engine.topic("a")
        topic.append("reserves")
        status, body = await world.ask("GET", "/v0/topics/a")
        assert body["config"]["consistency"] == "strong"
        for number in range(2, 6):
            topic.append(number)
            status, body = await world.ask("POST", "/v0/topics/a/diff", {"from_seq": 0})
            assert status == 200
            assert [record["$seq"] for record in body["records"]] == list(range(1, number + 1))
            assert set(range(1, number + 1)) <= lost_sync.left()
        topic.append("job")
        status, body = await world.ask("POST", "/v0/topics/a/claim", {"node": "w", "max": 10})
        assert status == 200, body
        claimed = {job["$seq"] for job in body["claimed"]}
        assert len(claimed) == 6
        assert claimed <= lost_sync.left()

    run_scenario(scenario, clock=lost_sync.clock)


def test_long_poll_of_a_strong_topic_is_answered_with_durable_records(lost_sync: Lost) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="disk", consistency="strong")
        topic.append("reserves")
        asked = world.begin("POST", "/v0/topics/a/diff", {"from_seq": 1, "wait_ms": 20_000})
        topic.append("x")
        answer: Any = await asked.answer()
        assert b'"$seq":2' in answer.body
        assert lost_sync.left() == {1, 2}

    run_scenario(scenario, clock=lost_sync.clock)


@pytest.mark.parametrize("durability", ["memory", "ephemeral"])
def test_strong_readers_of_a_class_without_promises_are_refused(durability: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a", durability=durability)
        status, body = await world.ask("POST", "/v0/watch", {"topics": {"a": {}}, "consistency": "strong"})
        assert (status, body["error"]["code"]) == (400, "invalid_request")
        assert len(world.service.push.watch_sessions) == 0
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a", "consistency": "strong"})
            (said,) = await line.until(1)
            assert said["code"] == "invalid_request"
        status, body = await world.ask("PUT", "/v0/topics/b", {"durability": durability, "consistency": "strong"})
        assert (status, body["error"]["code"]) == (400, "invalid_request")

    run_scenario(scenario)


@pytest.mark.parametrize("path", ["records", "records?format=arrow", "segments"])
def test_a_bulk_reader_can_ask_for_strong(path: str, lost_sync: Lost) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="disk")
        topic.append("reserves")
        topic.append("x")
        assert lost_sync.left() == {1}
        mark = "&" if "?" in path else "?"
        got = await get(world, f"/v0/topics/a/{path}{mark}consistency=eventual")
        assert (got.status, lost_sync.left()) == (200, {1})
        got = await get(world, f"/v0/topics/a/{path}{mark}consistency=strong")
        assert (got.status, lost_sync.left()) == (200, {1, 2})
        got = await get(world, f"/v0/topics/a/{path}{mark}consistency=sometimes")
        assert got.status == 400
        assert "consistency is eventual or strong" in got.body.decode()
        world.topic("m", durability="memory").append("x")
        got = await get(world, f"/v0/topics/m/{path}{mark}consistency=strong")
        assert got.status == 400

    run_scenario(scenario, clock=lost_sync.clock)
