"""Watch sessions and their streams over HTTP (contract 1.5, 1.12, 2.9, 3.7): checks in their order, caps, resuming."""

from __future__ import annotations

import asyncio
import re
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.server.fakes import FakeExchange, FakeSink, RunningStream, ServerHarness, let_idle, run_scenario

from tidelog.engine.topic import topic_operations
from tidelog.http.interface import Response, Stream
from tidelog.server.push.topic_stream import TTL_MS

KEYS = "full,reader:r,writer:w,mine:rw:my|our"


def seqs(tap: FakeSink) -> list[int]:
    return [record["$seq"] for event in tap.events if event.event == "record" for record in event.data["records"]]


def code(body: Any) -> str:
    found: str = body["error"]["code"]
    assert body["error"]["message"]
    return found


# POST /v0/watch -------------------------------------------------------------------------------------------


def test_session_has_its_id_and_the_positions_of_its_topics() -> None:
    """Contract 2.9 [T]."""

    async def scenario(world: ServerHarness) -> None:
        a = world.topic("a", cap_records=3)
        a.append(list(range(5)))
        world.topic("b")
        topics = {"a": {"from_seq": 1}, "b": {"from_seq": 7, "tail": True}}
        status, body = await world.ask("POST", "/v0/watch", {"topics": topics, "from": "tail", "seqs": []})
        assert status == 200
        assert re.fullmatch(r"wid_[A-Za-z0-9_-]{22}", body["wid"])
        assert list(body) == ["wid", "stream_url", "session_ttl_ms", "topics", "performance", "warnings"]
        assert body["stream_url"] == f"/v0/watch/{body['wid']}"
        assert body["session_ttl_ms"] == 300_000
        assert body["topics"] == {
            "a": {"from_seq": 1, "head_seq": 5, "earliest_seq": 3},
            "b": {"from_seq": 0, "head_seq": 0, "earliest_seq": 1},
        }
        assert isinstance(body["performance"]["server_total_ms"], float)

    run_scenario(scenario)


def test_tail_is_the_head_now_and_outranks_from_seq() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        wid = await world.watch({"a": {"tail": True, "from_seq": 1}})
        topic.append([4])
        tap = FakeSink()
        async with await world.stream(wid, tap):
            await tap.until(2)
        assert seqs(tap) == [4]

    run_scenario(scenario)


def test_looking_at_a_topic_whose_records_have_just_expired_waits_off_the_loop() -> None:
    """Contract 3.3: exact to whoever looks, also at watch."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", ttl_ms=1000)
        topic.append([1, 2])
        world.clock.tick(1001)
        assert not topic_operations(topic).is_floor_durable
        _, body = await world.ask("POST", "/v0/watch", {"topics": {"a": {}}})
        assert body["topics"]["a"] == {"from_seq": 0, "head_seq": 2, "earliest_seq": 3}

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("asked", "limit", "bytes_max"),
    [
        ({}, 256, 262_144),
        ({"limit": 0, "max_batch_bytes": 0}, 256, 1 << 20),
        ({"limit": 5_000, "max_batch_bytes": 1 << 40}, 1_000, 8 << 20),
        ({"limit": 7, "max_batch_bytes": 9}, 7, 9),
    ],
)
def test_limits_have_defaults_and_bounds(asked: dict[str, int], limit: int, bytes_max: int) -> None:
    """Contract 1.12."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        _, body = await world.ask("POST", "/v0/watch", {"topics": {"a": {}}, **asked})
        session = world.service.push.watch_sessions.find(body["wid"])
        assert session is not None
        assert (session.options.limit, session.options.bytes_max) == (limit, bytes_max)

    run_scenario(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        {},
        {"topics": None},
        {"topics": {}},
        {"topics": ["a"]},
        {"topics": {"a": None}},
        {"topics": {"a": 0}},
        {"topics": {"a": {"from_seq": -1}}},
        {"topics": {"a": {"from_seq": 1.0}}},
        {"topics": {"a": {"from_seq": True}}},
        {"topics": {"a": {"from_seq": None}}},
        {"topics": {"a": {"tail": 1}}},
        {"topics": {"a": {}}, "limit": -1},
        {"topics": {"a": {}}, "limit": 1 << 32},
        {"topics": {"a": {}}, "heartbeat_ms": "1s"},
        {"topics": {"a": {}}, "max_batch_bytes": 0.5},
        {"topics": {"a": {}}, "include_meta": None},
        {"topics": {"a": {}}, "node": 7},
        {"topics": {"a": {}}, "node": ["a", None]},
        {"topics": {"a": {}}, "consistency": "weak"},
        {"topics": {f"t{n}": {} for n in range(257)}},
    ],
)
def test_a_body_that_is_not_as_it_should_be_is_400(body: Any) -> None:
    """Contract 1.6: strict types, no nulls where none belong."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        status, said = await world.ask("POST", "/v0/watch", body)
        assert (status, code(said)) == (400, "invalid_request")
        assert len(world.service.push.watch_sessions) == 0

    run_scenario(scenario)


def test_a_body_that_is_not_json_by_its_type_is_415() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        for headers in ({"content-type": "text/plain"}, {"content-type": ""}):
            status, said = await world.ask("POST", "/v0/watch", b'{"topics":{"a":{}}}', headers=headers)
            assert (status, code(said)) == (415, "unsupported_media_type")

    run_scenario(scenario)


def test_256_topics_are_followed() -> None:
    async def scenario(world: ServerHarness) -> None:
        names = [f"t{n:03}" for n in range(256)]
        for name in names:
            world.topic(name, durability="ephemeral")
        tap = FakeSink()
        async with await world.stream(await world.watch({name: {} for name in names}), tap):
            events = await tap.until(256)
        assert [event.data["topic"] for event in events] == names

    run_scenario(scenario)


def test_checks_come_in_their_order() -> None:
    """Contract 2.9. Method: every request is wrong in all the ways that come later too."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("my.a")
        ask, sessions = world.ask, world.service.push.watch_sessions
        status, said = await ask("POST", "/v0/watch", {"topics": {}})
        assert (status, code(said)) == (401, "unauthorized")
        status, said = await ask("POST", "/v0/watch?token=mine", {"topics": {"my.a": {}}})
        assert (status, code(said)) == (401, "unauthorized"), "no key in the query here"
        status, said = await ask("POST", "/v0/watch", {"topics": {}}, key="writer")
        assert (status, code(said)) == (403, "forbidden")
        assert "detail" not in said["error"]
        many: dict[str, Any] = {f"strange{n}": {} for n in range(257)}
        for topics in (dict[str, Any](), many):
            status, said = await ask("POST", "/v0/watch", {"topics": topics}, key="mine")
            assert (status, code(said)) == (400, "invalid_request")
        first = await world.watch({"my.a": {}}, key="mine")
        world.clock.tick(TTL_MS + 1)
        status, said = await ask("POST", "/v0/watch", {"topics": {"my.gone": {}, "strange": {}}}, key="mine")
        assert (status, code(said)) == (403, "forbidden")
        assert said["error"]["detail"] == {"topic": "strange"}
        assert sessions.find(first) is not None, "a request that may not be made collects nothing"
        status, said = await ask("POST", "/v0/watch", {"topics": {"my.gone": {}}}, key="mine")
        assert (status, code(said)) == (404, "topic_not_found")
        assert said["error"]["detail"] == {"topic": "my.gone"}
        assert sessions.find(first) is None, "collected before names are looked up"
        await world.watch({"my.a": {}}, key="mine")
        status, said = await ask("POST", "/v0/watch", {"topics": {"my.gone": {}}}, key="mine")
        assert status == 404, "and only then the cap"
        answer = await world.begin("POST", "/v0/watch", {"topics": {"my.a": {}}}, key="mine").answer()
        assert isinstance(answer, Response)
        assert answer.status == 429
        assert (b"retry-after", b"1") in answer.headers
        assert b'"detail":{"limit":"watch_sessions","max":1}' in answer.body

    run_scenario(scenario, api_keys=KEYS, max_watch_sessions=1)


def test_lenient_leaves_out_what_is_not_there_and_nothing_else() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("my.a").append([1])
        body: dict[str, Any] = {"topics": {"my.gone": {}, "my.a": {}}}
        status, said = await world.ask("POST", "/v0/watch?lenient=1", body, key="mine")
        assert (status, list(said["topics"])) == (200, ["my.a"])
        tap = FakeSink()
        async with await world.stream(said["wid"], tap, key="mine"):
            events = await tap.until(2)
        assert [event.id for event in events] == [{"my.a": 1}] * 2
        status, said = await world.ask("POST", "/v0/watch?lenient=1", {"topics": {"strange": {}}}, key="mine")
        assert status == 403

    run_scenario(scenario, api_keys=KEYS)


# GET /v0/watch/{wid} --------------------------------------------------------------------------------------


def test_the_head_of_a_stream() -> None:
    """Contract 3.8."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        wid = await world.watch({"a": {}})
        answer = await world.begin("GET", f"/v0/watch/{wid}").answer()
        assert isinstance(answer, Stream)
        assert (answer.status, answer.content_type) == (200, b"text/event-stream")
        assert answer.headers[:2] == ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
        head = await world.begin("HEAD", f"/v0/watch/{wid}").answer()
        assert isinstance(head, Response)
        assert (head.status, head.content_type, head.headers[:2]) == (200, answer.content_type, answer.headers[:2])
        assert world.service.auth.stream_limit.count == 1, "the first answer may still be run; the head is no stream"

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("accept", "ok"),
    [
        (None, True),
        ("", True),
        ("text/event-stream", True),
        ("application/json, text/event-stream;q=0.5", True),
        ("text/html, */*;q=0.1", True),
        ("application/json", False),
        ("text/*", False),
    ],
)
def test_client_that_does_not_accept_events_is_refused_first(accept: str | None, ok: bool) -> None:
    async def scenario(world: ServerHarness) -> None:
        headers = {} if accept is None else {"accept": accept}
        status, said = await world.ask("GET", "/v0/watch/wid_none", headers=headers)
        assert (status, code(said)) == ((404, "not_found") if ok else (406, "not_acceptable"))

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("key", "token", "ok"),
    [
        ("mine", None, True),
        (None, "mine", True),
        ("mine", "wrong", True),
        (None, None, False),
        ("wrong", None, False),
        ("full", None, False),
        (None, "full", False),
        (None, "wrong", False),
        ("full", "mine", False),
    ],
)
def test_only_the_key_that_made_a_session_opens_it(key: str | None, token: str | None, ok: bool) -> None:
    """Contract 1.5 [T]: by header or in the query; another valid key is as good as none."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("my.a")
        wid = await world.watch({"my.a": {}}, key="mine")
        query = "" if token is None else f"?token={token}"
        answer = await world.begin("GET", f"/v0/watch/{wid}{query}", key=key).answer()
        if ok:
            assert isinstance(answer, Stream)
        else:
            assert isinstance(answer, Response)
            assert (answer.status, answer.headers[0][0]) == (401, b"x-request-id"), "and no WWW-Authenticate"
            assert b'"code":"unauthorized"' in answer.body
            assert world.service.auth.stream_limit.count == 0
        for query in ("", "?token=mine", "?token=wrong"):
            status, said = await world.ask("GET", f"/v0/watch/wid_0000000000000000000000{query}", key=key)
            valid = (key or query.partition("=")[2]) in ("mine", "full")
            assert (status, code(said)) == ((404, "not_found") if valid else (401, "unauthorized"))

    run_scenario(scenario, api_keys=KEYS)


def test_without_keys_the_id_alone_opens_a_session() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap, key="whatever"):
            await tap.until(1)

    run_scenario(scenario)


def test_expired_session_is_not_found_after_collection() -> None:
    """Contract 3.7, B26."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        old, kept = await world.watch({"a": {}}), await world.watch({"a": {}})
        tap = FakeSink()
        async with await world.stream(kept, tap):
            world.clock.tick(TTL_MS + 1)
            await world.watch({"a": {}})
            status, said = await world.ask("GET", f"/v0/watch/{old}")
            assert (status, code(said)) == (404, "not_found")
        world.clock.tick(TTL_MS)
        async with await world.stream(kept, tap):
            pass

    run_scenario(scenario)


# Resuming -------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_where_the_last_one_of_its_session_ended() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2])
        wid = await world.watch({"a": {}})
        first, second = FakeSink(), FakeSink()
        async with await world.stream(wid, first):
            await first.until(2)
        topic.append([3])
        async with await world.stream(wid, second):
            await second.until(2)
        assert (seqs(first), seqs(second)) == ([1, 2], [3])

    run_scenario(scenario)


def id_of(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("last", "again"),
    [
        (id_of('{"a":1}'), [2, 3]),
        (id_of('{"a":0}'), [1, 2, 3]),
        (id_of('{"a":0}') + "=", [1, 2, 3]),
        (id_of('{"a":3}'), []),
        (id_of('{"a":99}'), []),
        (id_of('{"b":0}'), []),
        (id_of('{"a":1,"b":0,"c":7}'), [2, 3]),
        (id_of('{"a":-1}'), []),
        (id_of('{"a":1.5}'), []),
        (id_of('{"a":"1"}'), []),
        (id_of("[1]"), []),
        (id_of("{"), []),
        ("", []),
        ("!!!", []),
        ("ü", []),
        ("eyJhIjoxf", []),
    ],
)
def test_an_id_can_only_lower_a_cursor_and_what_is_none_is_ignored(last: str, again: list[int]) -> None:
    """Contract 3.7 [T]: min, unknown topics and garbage in silence. Here three were sent; then a fourth is written."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        wid = await world.watch({"a": {}})
        tap = FakeSink()
        async with await world.stream(wid, tap):
            await tap.until(2)
        topic.append([4])
        tap = FakeSink()
        async with await world.stream(wid, tap, headers={"last-event-id": last}):
            await tap.until(2)
        assert seqs(tap) == [*again, 4]

    run_scenario(scenario)


def test_ids_of_a_stream_lead_back_to_where_they_were_given() -> None:
    """Method: come back with every id that was ever sent; what follows is what followed."""

    async def scenario(world: ServerHarness) -> None:
        for name in ("a", "b"):
            world.topic(name).append(list(range(7)))
        wid = await world.watch({"a": {}, "b": {}}, limit=3)
        tap = FakeSink()
        async with await world.stream(wid, tap):
            await tap.until(8)
        told = [
            (event.data["topic"], record["$seq"]) for event in tap.events for record in event.data.get("records", [])
        ]
        passed = 0
        for frame, event in zip(tap.frames[1:], tap.events, strict=True):
            passed += len(event.data.get("records", []))
            again = FakeSink()
            last = frame.split(b"\n")[0].removeprefix(b"id: ").decode()
            async with await world.stream(wid, again, headers={"last-event-id": last}):
                await again.until(2)
                await let_idle()
            rest = [
                (event.data["topic"], record["$seq"])
                for event in again.events
                for record in event.data.get("records", [])
            ]
            assert rest == told[passed:]

    run_scenario(scenario)


# Slots ----------------------------------------------------------------------------------------------------


async def refused(world: ServerHarness, wid: str, **more: Any) -> None:
    answer = await world.begin("GET", f"/v0/watch/{wid}", **more).answer()
    assert isinstance(answer, Response)
    assert answer.status == 429
    assert b'"code":"throttled"' in answer.body
    assert b"detail" not in answer.body, "caps of connections have none"
    assert (b"retry-after", b"1") in answer.headers


def test_streams_are_capped_for_all_and_a_slot_is_free_when_its_stream_is_over() -> None:
    """Contract 1.12 [T]."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        wid = await world.watch({"a": {}})
        tap = FakeSink()
        async with await world.stream(wid, tap), await world.stream(wid, tap):
            await refused(world, wid)
        async with await world.stream(wid, tap), await world.stream(wid, tap):
            assert world.service.auth.stream_limit.count == 2

    run_scenario(scenario, max_sse_connections=2)


def test_streams_of_a_key_count_as_those_of_who_made_the_session() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("my.a")
        mine, other = await world.watch({"my.a": {}}, key="mine"), await world.watch({"my.a": {}}, key="full")
        tap = FakeSink()
        async with await world.stream(mine, tap, key="mine"):
            await refused(world, mine, key="mine")
            async with await world.stream(other, tap, key="full"):
                pass
        async with await world.stream(mine, tap, key="mine"):
            pass

    run_scenario(scenario, api_keys=KEYS, max_sse_connections_per_key=1)


async def _unread(world: ServerHarness, wid: str) -> None:
    """The answer is dropped by whoever was to run it."""
    answer = await world.begin("GET", f"/v0/watch/{wid}").answer()
    assert isinstance(answer, Stream)


async def _gone_before(world: ServerHarness, wid: str) -> None:
    """The peer had left when the answer came."""
    asked = FakeExchange()
    asked.leave()
    world.begin("GET", f"/v0/watch/{wid}", asked=asked)
    assert asked.answered


async def _cancelled_unstarted(world: ServerHarness, wid: str) -> None:
    answer = await world.begin("GET", f"/v0/watch/{wid}").answer()
    assert isinstance(answer, Stream)
    running = RunningStream(answer.run(FakeSink()))
    running.task.cancel()
    await asyncio.wait([running.task])


async def _cancelled_at_once(world: ServerHarness, wid: str) -> None:
    running = await world.stream(wid, FakeSink())
    await asyncio.sleep(0)
    async with running:
        pass


async def _cancelled_parked(world: ServerHarness, wid: str) -> None:
    tap = FakeSink()
    async with await world.stream(wid, tap):
        await tap.until(2)
        await let_idle()
    written = len(tap.writes)
    world.topic("a").append([2])
    await let_idle(120)
    assert len(tap.writes) == written, "nothing is written behind its end, not even a heartbeat"


async def _cancelled_reading(world: ServerHarness, wid: str) -> None:
    """In the middle of a read from disk."""
    topic = world.topic("a")
    topic.seal()
    world.engine.checkpoint()
    assert not topic_operations(topic).can_read_without_blocking(0)
    tap = FakeSink()
    async with await world.stream(wid, tap):
        await asyncio.sleep(0)
        assert not tap.events


async def _broken(world: ServerHarness, wid: str) -> None:
    """The sink itself fails."""

    class Bad(FakeSink):
        def write(self, data: bytes) -> None:
            raise RuntimeError(f"{len(data)} bytes and nowhere to put them")

    running = await world.stream(wid, Bad())
    with pytest.raises(RuntimeError):
        await running.ended()


async def _stopped(world: ServerHarness, wid: str) -> None:
    world.service.stop()
    await (await world.stream(wid, FakeSink())).ended()


async def _dropped(world: ServerHarness, wid: str) -> None:
    world.engine.drop("a")
    await (await world.stream(wid, FakeSink())).ended()


@pytest.mark.parametrize(
    "way",
    [
        _unread,
        _gone_before,
        _cancelled_unstarted,
        _cancelled_at_once,
        _cancelled_parked,
        _cancelled_reading,
        _broken,
        _stopped,
        _dropped,
    ],
)
def test_a_stream_gives_everything_back_however_it_ends(way: Callable[[ServerHarness, str], Awaitable[None]]) -> None:
    """Contract 1.12. Method: after each way to end nobody holds a slot or a bell, and the session is idle again."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        wid = await world.watch({"a": {}})
        await way(world, wid)
        await let_idle()
        assert world.is_quiet()
        session = world.service.push.watch_sessions.find(wid)
        assert session is not None
        assert session.stream_count == 0
        world.clock.tick(TTL_MS + 1)
        world.service.push.watch_sessions.remove_expired()
        assert world.service.push.watch_sessions.find(wid) is None, "an open stream that was not counted down keeps it"

    run_scenario(scenario)
