"""Topics over a WebSocket (contract 3.9): commands and their answers, what is pushed and when, and who may do what."""

from __future__ import annotations

import asyncio
import json
from threading import Event
from typing import Any

import pytest
from tests.unit.server.fakes import (
    FakeSink,
    FakeWebSocket,
    ServerHarness,
    captured_log,
    let_idle,
    parse_log,
    run_scenario,
)

from tidelog.engine import FieldSelection, Topic
from tidelog.engine.topic import TopicOperations, topic_operations
from tidelog.errors import Corrupt, InDoubt, Latched
from tidelog.http.interface import Response, Upgrade
from tidelog.server.handlers import websocket
from tidelog.server.handlers.websocket import ChannelSession
from tidelog.server.push import page_cache
from tidelog.server.push.page_cache import EncodedPage, ReadOptions
from tidelog.server.push.peers import CLOSE_AFTER_S, HIGH_WATER_BYTES, WARN_AFTER_S
from tidelog.wal import Shard

KB = "x" * 1000


def records(*datas: Any) -> list[dict[str, Any]]:
    return [{"data": data} for data in datas]


def ops(line: FakeWebSocket) -> list[str]:
    return [said["op"] for said in line.sent_messages]


async def exchange(line: FakeWebSocket, message: Any) -> list[dict[str, Any]]:
    """What is said to a message, all of it."""
    before = len(line.sent)
    line.receive_from_peer(message)
    await let_idle()
    return line.sent_messages[before:]


# Connecting -----------------------------------------------------------------------------------------------


def test_a_request_that_is_no_upgrade_is_400_in_the_envelope() -> None:
    """Contract 2.10, D12."""

    async def scenario(world: ServerHarness) -> None:
        status, body = await world.ask("GET", "/v0/ws")
        assert (status, body["error"]["code"]) == (400, "invalid_request")

    run_scenario(scenario)


def test_a_key_is_needed_and_no_scope_and_not_in_the_query() -> None:
    async def scenario(world: ServerHarness) -> None:
        for target, key in (("/v0/ws", None), ("/v0/ws", "wrong"), ("/v0/ws?token=d", None)):
            answer = await world.begin("GET", target, upgrade=True, key=key).answer()
            assert isinstance(answer, Response)
            assert answer.status == 401
        line = FakeWebSocket()
        async with await world.connect(line, key="d"):
            assert await exchange(line, {"op": "ping"}) == [{"op": "pong", "request_id": None}]

    run_scenario(scenario, api_keys="d:delete")


def test_sockets_count_among_streams_and_messages_are_as_long_as_bodies() -> None:
    """Contract 1.12."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        wid = await world.watch({"a": {}})
        line = FakeWebSocket()
        async with await world.connect(line), await world.stream(wid, FakeSink()):
            answer = await world.begin("GET", "/v0/ws", upgrade=True).answer()
            assert isinstance(answer, Response)
            assert answer.status == 429
            assert b"detail" not in answer.body
        upgrade = await world.begin("GET", "/v0/ws", upgrade=True).answer()
        assert isinstance(upgrade, Upgrade)
        assert upgrade.message_bytes_max == 12_345
        assert world.service.auth.stream_limit.count == 1
        del upgrade
        assert world.service.auth.stream_limit.count == 0, "dropped unread"

    run_scenario(scenario, max_sse_connections=2, max_body_bytes=12_345)


def test_a_socket_gives_everything_back_however_it_ends() -> None:
    """Method: `play` looks that nobody holds a slot or a bell."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        for way in ("hangs up", "is cancelled", "is cancelled at once", "stops"):
            line = FakeWebSocket()
            async with await world.connect(line) as running:
                if way == "is cancelled at once":
                    continue
                line.receive_from_peer({"op": "subscribe", "topic": "a"})
                await line.until(3)
                if way == "hangs up":
                    line.disconnect()
                    await running.ended()
                elif way == "stops":
                    world.service.stop()
                    await running.ended()
            assert world.is_quiet(), way
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    run_scenario(scenario)


# Commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["null", "7", '"x"', '{"a":[1,2.50]}', "[]", "1e3"])
def test_a_request_id_is_any_json_and_comes_back_as_it_is(asked: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer(f'{{"op":"ping","request_id":{asked}}}')
            line.receive_from_peer(f'{{"op":"nonsense","request_id":{asked}}}')
            line.receive_from_peer(f'{{"op":"subscribe","topic":"none","request_id":{asked}}}')
            await line.until(3)
        assert line.sent[0] == b'{"op":"pong","request_id":%b}' % asked.encode()
        for text in line.sent[1:]:
            assert text.startswith(b'{"op":"error","request_id":%b,"code":"' % asked.encode())

    run_scenario(scenario)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        "[]",
        "7",
        "{}",
        '{"op":7}',
        '{"op":null}',
        '{"op":"fly"}',
        '{"op":"Ping"}',
        '{"op":"publish","topic":"a"}',
        '{"op":"publish","records":[]}',
        '{"op":"publish","topic":null,"records":[{"data":1}]}',
        '{"op":"publish","topic":"a","records":[{}]}',
        '{"op":"publish","topic":"a","records":[{"data":1}],"return_seqs":1}',
        '{"op":"publish","topic":"a","records":[{"data":1}],"create":"yes"}',
        '{"op":"subscribe","topic":7}',
        '{"op":"subscribe","topics":["a"]}',
        '{"op":"subscribe","topic":"a","from_seq":-1}',
        '{"op":"subscribe","topic":"a","limit":1.5}',
        '{"op":"subscribe","topic":"a","tail":null}',
        '{"op":"subscribe","topic":"a","topics":null}',
        '{"op":"unsubscribe","topics":"a"}',
        '{"op":"ping"}{"op":"ping"}',
        "[" * 3_000,
        '{"op":"ping","request_id":' + "[" * 3_000,
    ],
)
def test_what_is_no_command_is_invalid_json_and_the_socket_stays_open(text: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer(text)
            line.receive_from_peer({"op": "ping", "request_id": 1})
            said = await line.until(2)
        assert list(said[0]) == ["op", "request_id", "code", "message"]
        assert (said[0]["op"], said[0]["request_id"], said[0]["code"]) == ("error", None, "invalid_json")
        assert said[0]["message"]
        assert said[1] == {"op": "pong", "request_id": 1}
        assert world.topic("a").head_seq == 0

    run_scenario(scenario)


def test_the_id_of_what_is_no_command_comes_back_where_it_can_be_seen() -> None:
    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "publish", "request_id": "r1"})
            line.receive_from_peer({"request_id": "r2"})
            said = await line.until(2)
        assert [(it["code"], it["request_id"]) for it in said] == [("invalid_json", "r1"), ("invalid_json", "r2")]

    run_scenario(scenario)


def test_a_binary_message_is_unsupported() -> None:
    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer(b'{"op":"ping"}')
            line.receive_from_peer({"op": "ping"})
            said = await line.until(2)
        assert list(said[0]) == ["op", "code", "message"], "it has no request_id"
        assert said[0]["code"] == "unsupported_message"
        assert said[1]["op"] == "pong"

    run_scenario(scenario)


@pytest.mark.parametrize("op", ["subscribe", "unsubscribe"])
def test_a_command_that_names_no_topic_is_an_invalid_request(op: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            said = await exchange(line, {"op": op, "request_id": 5})
        assert [(it["op"], it["request_id"], it["code"]) for it in said] == [("error", 5, "invalid_request")]

    run_scenario(scenario)


FORBIDDEN: list[tuple[str, dict[str, Any]]] = [
    ("w", {"op": "subscribe", "topic": "my.a"}),
    ("mine", {"op": "subscribe", "topic": "strange"}),
    ("mine", {"op": "subscribe", "topics": {"my.a": {}, "strange": {}}}),
    ("mine", {"op": "subscribe", "topics": {"my.a": {}, "strange": {}}, "lenient": True}),
    ("r", {"op": "publish", "topic": "my.a", "records": records(1)}),
    ("mine", {"op": "publish", "topic": "strange", "records": records(1)}),
    ("mine", {"op": "publish", "topic": "my.a", "records": records(1), "config": {}}),
    ("mine", {"op": "publish", "topic": "my.new", "records": records(1), "config": {"ttl_ms": 5}}),
]
ALLOWED: list[tuple[str, dict[str, Any], str]] = [
    ("r", {"op": "subscribe", "topic": "my.a"}, "subscribed"),
    ("mine", {"op": "subscribe", "topic": "my.a"}, "subscribed"),
    ("r", {"op": "unsubscribe", "topic": "strange"}, "unsubscribed"),
    ("w", {"op": "publish", "topic": "my.a", "records": records(1)}, "ack"),
    ("mine", {"op": "publish", "topic": "my.new", "records": records(1)}, "ack"),
    ("full", {"op": "publish", "topic": "new", "records": records(1), "config": {"ttl_ms": 5}}, "ack"),
]
KEYS = "full,r:read,w:write,mine:rw:my"


@pytest.mark.parametrize(("key", "command"), FORBIDDEN)
def test_each_command_asks_for_its_scope_and_its_names(key: str, command: dict[str, Any]) -> None:
    """Contract 3.9 [T]: read to subscribe, write to publish, admin for a config, and the key's prefixes."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("my.a").append([1])
        world.topic("strange").append([1])
        line = FakeWebSocket()
        async with await world.connect(line, key=key):
            said = await exchange(line, {**command, "request_id": 1})
        assert [(it["op"], it["request_id"], it["code"]) for it in said] == [("error", 1, "forbidden")]
        assert [world.topic(name).head_seq for name in ("my.a", "strange")] == [1, 1]
        assert world.engine.names() == ["my.a", "strange"], "and nothing was made"

    run_scenario(scenario, api_keys=KEYS)


@pytest.mark.parametrize(("key", "command", "op"), ALLOWED)
def test_who_has_the_scope_is_let_pass(key: str, command: dict[str, Any], op: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("my.a")
        line = FakeWebSocket()
        async with await world.connect(line, key=key):
            said = await exchange(line, command)
        assert said[0]["op"] == op

    run_scenario(scenario, api_keys=KEYS)


def test_a_mistake_of_ours_is_one_commands_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(websocket.WebSocketSession, "_subscribe", broken)

    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a", "request_id": 1})
            line.receive_from_peer({"op": "ping"})
            said = await line.until(2)
        assert (said[0]["code"], said[0]["request_id"]) == ("internal", 1)
        assert "planted" not in said[0]["message"]
        assert said[1]["op"] == "pong"

    run_scenario(scenario)


# Following ------------------------------------------------------------------------------------------------


def test_every_push_byte_for_byte() -> None:
    """Contract 3.9. The reason of a loss is the real one, also at first."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", cap_records=2)
        topic.append([1, 2, 3], tag="t", node="n", meta={"m": 1})
        line = FakeWebSocket()
        async with await world.connect(line) as running:
            line.receive_from_peer({"op": "subscribe", "topic": "a", "request_id": "s", "include_tags": True})
            await line.until(4)
            world.engine.drop("a")
            await line.until(5)
            line.receive_from_peer({"op": "unsubscribe", "topics": ["b"], "topic": "a", "request_id": "u"})
            await line.until(6)
            world.service.stop()
            await running.ended()
        row = '"$ts":1700000000000,"$node":"n","$tag":"t","data":%d,"meta":{"m":1}}'
        assert [text.decode() for text in line.sent] == [
            '{"op":"subscribed","request_id":"s","topics":{"a":{"from_seq":0,"head_seq":3,"earliest_seq":2}}}',
            '{"op":"tombstone","topic":"a","reason":"cap","gap_from":1,"gap_to":1,"earliest_seq":2,"head_seq":3}',
            '{"op":"record","topic":"a","from_seq":1,"to_seq":3,"head_seq":3,"records":[{"$seq":2,'
            + row % 2
            + ',{"$seq":3,'
            + row % 3
            + "]}",
            '{"op":"caught_up","topic":"a","head_seq":3}',
            '{"op":"topic_deleted","topic":"a","head_seq":0,"reason":"deleted"}',
            '{"op":"unsubscribed","request_id":"u","topics":["a","b"]}',
            '{"op":"error","code":"server_shutting_down","message":"the server is shutting down; nothing more comes '
            'on this connection, connect again"}',
        ]
        assert line.closed is not None
        assert line.closed[0] == 1001

    run_scenario(scenario)


def test_subscribed_comes_before_anything_of_its_topics() -> None:
    async def scenario(world: ServerHarness) -> None:
        names = [f"t{n}" for n in range(20)]
        for name in names:
            world.topic(name).append([1, 2])
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topics": {name: {} for name in names}})
            await line.until(41)
        assert ops(line) == ["subscribed", *["record", "caught_up"] * 20]
        assert list(line.sent_messages[0]["topics"]) == names

    run_scenario(scenario)


def test_topic_and_topics_go_together_and_the_map_outranks() -> None:
    async def scenario(world: ServerHarness) -> None:
        for name in ("a", "b", "c"):
            world.topic(name).append([1, 2, 3])
        line = FakeWebSocket()
        async with await world.connect(line):
            command = {"op": "subscribe", "topics": {"a": {"from_seq": 1}, "b": {"tail": True}}, "from_seq": 2}
            line.receive_from_peer({**command, "topic": "a"})
            await line.until(4)
            line.receive_from_peer({**command, "topic": "c", "tail": True})
            await line.until(5)
        assert line.sent_messages[0]["topics"] == {
            "a": {"from_seq": 1, "head_seq": 3, "earliest_seq": 1},
            "b": {"from_seq": 3, "head_seq": 3, "earliest_seq": 1},
        }
        second = next(said for said in line.sent_messages[1:] if said["op"] == "subscribed")
        assert second["topics"]["c"]["from_seq"] == 3
        assert second["topics"]["a"]["from_seq"] == 1

    run_scenario(scenario)


def test_subscribe_is_all_or_nothing_unless_lenient() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            said = await exchange(line, {"op": "subscribe", "topics": {"a": {}, "gone": {}}, "request_id": 1})
            assert [(it["op"], it.get("code")) for it in said] == [("error", "topic_not_found")]
            topic.append([1])
            await let_idle()
            assert len(line.sent) == 1, "a is not followed either"
            said = await exchange(line, {"op": "subscribe", "topics": {"a": {}, "gone": {}}, "lenient": True})
            assert [it["op"] for it in said] == ["subscribed", "record", "caught_up"]
            assert list(said[0]["topics"]) == ["a"]
            said = await exchange(line, {"op": "subscribe", "topic": "gone", "lenient": True})
            assert said == [{"op": "subscribed", "request_id": None, "topics": {}}]

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({}, [1000, 200]),
        ({"limit": 0}, [256] * 4 + [176]),
        ({"limit": 9999}, [1000, 200]),
        ({"limit": 700}, [700, 500]),
    ],
)
def test_pages_have_a_limit(asked: dict[str, Any], sizes: list[int]) -> None:
    """Contract 3.9: 1000 unless it is said, clamped there."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append(list(range(1200)))
        line = FakeWebSocket()
        async with await world.connect(line):
            said = await exchange(line, {"op": "subscribe", "topic": "a", **asked})
        assert [len(it["records"]) for it in said if it["op"] == "record"] == sizes

    run_scenario(scenario)


def test_subscribing_again_replaces_cursor_and_options() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2], node=["me", "you"])
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a"})
            await line.until(3)
            said = await exchange(line, {"op": "subscribe", "topic": "a", "node": "me", "include_data": False})
            assert [it["op"] for it in said] == ["subscribed", "record", "caught_up"]
            assert said[1]["records"] == [{"$seq": 2, "$ts": 1_700_000_000_000, "$node": "you"}]
            before = len(line.sent)
            topic.append([3], node="me")
            topic.append([4], node="other")
            await let_idle()
            assert [it["op"] for it in line.sent_messages[before:]] == ["record", "caught_up"], "once, not twice"
            assert [row["$seq"] for row in line.sent_messages[before]["records"]] == [4]

    run_scenario(scenario)


def test_nothing_comes_after_an_unsubscribe_and_the_others_go_on() -> None:
    """Contract 3.9 [T]."""

    async def scenario(world: ServerHarness) -> None:
        a, b = world.topic("a"), world.topic("b")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topics": {"a": {}, "b": {}}})
            await line.until(3)
            said = await exchange(line, {"op": "unsubscribe", "topic": "a", "request_id": 9})
            assert said == [{"op": "unsubscribed", "request_id": 9, "topics": ["a"]}]
            assert len(world.service.push.notifiers) == 1
            a.append([1])
            b.append([1])
            await line.until(6)
            await let_idle()
            assert [it.get("topic") for it in line.sent_messages[4:]] == ["b", "b"]
            said = await exchange(line, {"op": "subscribe", "topic": "a", "from_seq": 1})
            assert [it["op"] for it in said] == ["subscribed", "caught_up"]

    run_scenario(scenario)


class Held:
    """Reads from disk that begin and do not end before they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = Event(), Event()
        real = page_cache.read_page

        def render(*args: Any) -> EncodedPage:
            self.begun.set()
            assert self.go.wait(30)
            return real(*args)

        monkeypatch.setattr(page_cache, "read_page", render)


def cold(world: ServerHarness, name: str) -> Topic:
    topic = world.topic(name)
    topic.append([1, 2, 3])
    topic.seal()
    world.engine.checkpoint()
    assert not topic_operations(topic).can_read_without_blocking(0)
    return topic


@pytest.mark.parametrize("again", [False, True])
def test_a_page_that_is_read_while_its_topic_is_given_up_is_not_sent(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: the read has begun and is held up until the command was answered."""
    held = Held(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        cold(world, "a")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a"})
            await line.until(1)
            assert await world.service.run_blocking(lambda: held.begun.wait(30))
            if again:
                line.receive_from_peer({"op": "subscribe", "topic": "a", "from_seq": 2})
            else:
                line.receive_from_peer({"op": "unsubscribe", "topic": "a"})
            await line.until(2)
            held.go.set()
            await let_idle()
        if again:
            assert ops(line) == ["subscribed", "subscribed", "record", "caught_up"]
            assert [row["$seq"] for row in line.sent_messages[2]["records"]] == [3]
        else:
            assert ops(line) == ["subscribed", "unsubscribed"]

    run_scenario(scenario)


def test_commands_are_answered_while_a_page_is_read_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the read is held up until the answers to what was sent after it are there."""
    held = Held(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        cold(world, "a")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a"})
            await line.until(1)
            assert await world.service.run_blocking(lambda: held.begun.wait(30))
            line.receive_from_peer({"op": "ping"})
            line.receive_from_peer({"op": "publish", "topic": "b", "records": records(1)})
            await line.until(3)
            held.go.set()
            await line.until(5)
        assert ops(line) == ["subscribed", "pong", "ack", "record", "caught_up"]

    run_scenario(scenario)


def test_deleted_topic_is_reported_and_can_be_followed_again() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a", "tail": True})
            await line.until(2)
            world.engine.drop("a")
            await line.until(3)
            assert ops(line)[2] == "topic_deleted"
            assert len(world.service.push.notifiers) == 0, "its subscription is gone"
            world.topic("a").append(["new"])
            await let_idle()
            assert len(line.sent) == 3
            said = await exchange(line, {"op": "subscribe", "topic": "a"})
            assert [it["op"] for it in said] == ["subscribed", "record", "caught_up"]

    run_scenario(scenario)


def test_records_that_cannot_be_read_end_a_subscription_and_not_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object) -> EncodedPage:
        raise Corrupt("a segment", pos=7, reason="planted")

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            with monkeypatch.context() as patch:
                patch.setattr(page_cache, "read_page", render)
                said = await exchange(line, {"op": "subscribe", "topic": "a"})
                assert [it["op"] for it in said] == ["subscribed", "error"]
                assert (said[1]["code"], said[1]["topic"]) == ("internal", "a")
            topic.append([1])
            await let_idle()
            assert len(line.sent) == 2
            said = await exchange(line, {"op": "subscribe", "topic": "a"})
            assert [it["op"] for it in said] == ["subscribed", "record", "caught_up"]

    run_scenario(scenario)


def test_socket_without_subscriptions_is_closed_at_shutdown_too() -> None:
    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line) as running:
            await let_idle()
            world.service.stop()
            await running.ended()
        assert [it["code"] for it in line.sent_messages] == ["server_shutting_down"]
        assert line.closed is not None

    run_scenario(scenario)


# Writing --------------------------------------------------------------------------------------------------


def test_an_ack_byte_for_byte() -> None:
    """Contract 3.9: the order of its fields, and seqs that are null where nobody wants them."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "publish", "topic": "a", "records": records(1, 2), "request_id": 1})
            line.receive_from_peer(
                {"op": "publish", "topic": "a", "records": records(3), "request_id": 2, "return_seqs": False}
            )
            line.receive_from_peer({"op": "publish", "topic": "new", "records": records(1), "idempotency_key": "k"})
            await line.until(3)
            line.receive_from_peer({"op": "publish", "topic": "new", "records": records(5, 6), "idempotency_key": "k"})
            await line.until(4)
        took = b'"performance":{"server_total_ms":0.0,"wal_append_ms":0.0,"fsync_ms":0.0}}'
        assert line.sent == [
            b'{"op":"ack","request_id":1,"topic":"a","first_seq":1,"last_seq":2,"seqs":[1,2],"head_seq":2,"count":2,'
            b'"created":false,"deduped":false,"durability":"disk",' + took,
            b'{"op":"ack","request_id":2,"topic":"a","first_seq":3,"last_seq":3,"seqs":null,"head_seq":3,"count":1,'
            b'"created":false,"deduped":false,"durability":"disk",' + took,
            b'{"op":"ack","request_id":null,"topic":"new","first_seq":1,"last_seq":1,"seqs":[1],"head_seq":1,"count":1,'
            b'"created":true,"deduped":false,"durability":"disk",' + took,
            b'{"op":"ack","request_id":null,"topic":"new","first_seq":1,"last_seq":1,"seqs":[1],"head_seq":1,"count":1,'
            b'"created":false,"deduped":true,"durability":"disk","performance":{"server_total_ms":0.0}}',
        ]

    run_scenario(scenario)


def test_records_are_written_as_they_came() -> None:
    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            sent = [
                {"data": {"b": 1, "a": [1, 2]}, "tag": "t", "meta": {"m": "x"}},
                {"data": None, "node": "other"},
            ]
            line.receive_from_peer(
                {"op": "publish", "topic": "a", "records": sent, "node": "n", "config": {"ttl_ms": 9_000}}
            )
            await line.until(1)
        topic = world.topic("a")
        assert topic.config.ttl_ms == 9_000
        assert [(it.data, it.tag, it.node, it.meta) for it in topic.read().records] == [
            ({"b": 1, "a": [1, 2]}, "t", "n", {"m": "x"}),
            (None, None, "other", None),
        ]
        assert (
            b'"data":{"b":1,"a":[1,2]}'
            in page_cache.read_page(topic, 0, ReadOptions(9, 9_999, frozenset(), FieldSelection())).body
        )

    run_scenario(scenario)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"topic": "a", "records": []}, "invalid_request"),
    ({"topic": "a", "records": records(*range(10_001))}, "batch_too_large"),
    ({"topic": "a", "records": records("x" * (1 << 20))}, "record_too_large"),
    ({"topic": "a", "records": [{"data": 1, "tag": "t" * 257}]}, "invalid_request"),
    ({"topic": "a", "records": records(1), "idempotency_key": "k" * 257}, "invalid_request"),
    ({"topic": "none", "records": records(1), "create": False}, "topic_not_found"),
    ({"topic": "none", "records": records(1), "config": {"auto_create": False}}, "topic_not_found"),
    ({"topic": "bad name", "records": records(1)}, "invalid_request"),
    ({"topic": "none", "records": records(1), "config": {"type": "stack"}}, "invalid_request"),
    ({"topic": "full", "records": records(1, 2)}, "topic_full"),
    ({"topic": "full", "records": records(1, 2, 3, 4)}, "record_too_large"),
    ({"topic": "third", "records": records(1)}, "throttled"),
]


@pytest.mark.parametrize(("command", "expected"), REFUSED)
def test_a_write_that_is_refused_writes_nothing_and_makes_nothing(command: dict[str, Any], expected: str) -> None:
    """Contract 2.5, through the same functions; D6."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        world.topic("full", cap_records=3, discard="reject").append([1, 2])
        line = FakeWebSocket()
        async with await world.connect(line):
            said = await exchange(line, {"op": "publish", "request_id": 1, **command})
        assert [(it["op"], it["request_id"], it["code"]) for it in said] == [("error", 1, expected)]
        assert world.engine.names() == ["a", "full"]
        assert world.topic("a").head_seq == 0
        assert world.topic("full").head_seq == 2

    run_scenario(scenario, max_topics=2)


def test_a_socket_gets_its_own_writes_unless_it_filters_them() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "subscribe", "topic": "a", "node": "me"})
            await line.until(2)
            line.receive_from_peer({"op": "publish", "topic": "a", "records": records("mine"), "node": "me"})
            line.receive_from_peer({"op": "publish", "topic": "a", "records": records("also mine")})
            await line.until(6)
            await let_idle()
        pushed = [said for said in line.sent_messages if said["op"] == "record"]
        assert [row["data"] for said in pushed for row in said["records"]] == ["also mine"]

    run_scenario(scenario)


def test_writes_of_one_socket_to_one_topic_keep_their_order_also_while_it_is_made() -> None:
    """Method: the first one makes the topic, off the loop; the others are there before that is done."""

    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line):
            for n in range(20):
                line.receive_from_peer({"op": "publish", "topic": "new", "records": records(n), "request_id": n})
            line.receive_from_peer({"op": "subscribe", "topic": "new", "request_id": "s"})
            await line.until(23)
        acks = [said for said in line.sent_messages if said["op"] == "ack"]
        assert [(said["request_id"], said["first_seq"], said["created"]) for said in acks] == [
            (n, n + 1, n == 0) for n in range(20)
        ]
        assert [row.data for row in world.topic("new").read().records] == list(range(20))
        assert "subscribed" in ops(line), "it was there by then"

    run_scenario(scenario)


def staged(world: ServerHarness) -> list[Shard]:
    return [shard for shard in world.engine.shards if shard.queue_length]


def test_several_writes_are_under_way_at_once_and_commands_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: nobody commits until the test does; by then all of them wait together."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        world.topic("b")
        line = FakeWebSocket()
        monkeypatch.setattr(world.service.writes, "_run_turn", lambda: None)
        async with await world.connect(line):
            for n in range(10):
                line.receive_from_peer({"op": "publish", "topic": "ab"[n % 2], "records": records(n), "request_id": n})
            line.receive_from_peer({"op": "ping"})
            await line.until(1)
            assert ops(line) == ["pong"], "a write that waits for the disk holds up nothing"
            (shard,) = staged(world)
            assert shard.queue_length == 10
            shard.commit_pending()
            await line.until(11)
        assert sorted(said["request_id"] for said in line.sent_messages[1:]) == list(range(10))

    run_scenario(scenario)


def test_what_waits_for_the_disk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PENDING_BYTES_MAX", 10_000)

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        monkeypatch.setattr(world.service.writes, "_run_turn", lambda: None)
        async with await world.connect(line):
            for _ in range(100):
                line.receive_from_peer({"op": "publish", "topic": "a", "records": records(KB)})
            await let_idle()
            (shard,) = staged(world)
            assert 9 <= shard.queue_length <= 10, "no more commands are heard"
            while len(line.sent) < 100:
                while shard.queue_length:
                    shard.commit_pending()
                await let_idle()
        assert [said["first_seq"] for said in line.sent_messages] == list(range(1, 101))

    run_scenario(scenario)


def test_a_commit_that_fails_is_an_error_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        done = True

        def wait(self) -> None:
            raise Latched("planted")

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            with monkeypatch.context() as patch:
                patch.setattr(TopicOperations, "submit", lambda *_: Failing())
                said = await exchange(line, {"op": "publish", "topic": "a", "records": records(1), "request_id": 3})
            assert [(it["op"], it["request_id"], it["code"]) for it in said] == [("error", 3, "internal")]
            said = await exchange(line, {"op": "publish", "topic": "a", "records": records(1)})
            assert said[0]["op"] == "ack"

    run_scenario(scenario)


def test_write_after_an_expiry_waits_in_a_thread() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", ttl_ms=1000)
        topic.append([1])
        world.clock.tick(1001)
        assert topic_operations(topic).needs_expiry
        line = FakeWebSocket()
        async with await world.connect(line):
            said = await exchange(line, {"op": "publish", "topic": "a", "records": records(2)})
        assert (said[0]["op"], said[0]["first_seq"]) == ("ack", 2)

    run_scenario(scenario)


def test_who_left_before_its_ack_has_written_all_the_same() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "publish", "topic": "a", "records": records(1)})
            line.disconnect()
            await asyncio.sleep(0)
        await let_idle()
        assert world.topic("a").head_seq == 1

    run_scenario(scenario)


# Slow peers -----------------------------------------------------------------------------------------------


def test_peer_that_reads_nothing_is_warned_and_then_closed() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        line, other = FakeWebSocket(), FakeWebSocket()
        loop = asyncio.get_running_loop()
        async with await world.connect(line) as running, await world.connect(other):
            for peer in (line, other):
                peer.receive_from_peer({"op": "subscribe", "topic": "a"})
                await peer.until(2)
            line.stuck = True
            for n in range(1, 41):
                topic.append([KB] * 100)
                await other.until(2 + 2 * n)
            assert line.most < HIGH_WATER_BYTES + (1 << 20)
            began = loop.time()
            await let_idle(WARN_AFTER_S + 0.1)
            assert line.sent_messages[-1]["code"] == "slow_consumer"
            assert list(line.sent_messages[-1]) == ["op", "code", "message"]
            await running.ended()
            assert loop.time() - began < CLOSE_AFTER_S + 1
        assert line.closed is not None
        assert line.closed[0] == 1008

    run_scenario(scenario)


def test_a_peer_that_asks_and_takes_no_answers_is_not_heard_any_more() -> None:
    """Outbound is bounded for answers as well. Method: a flood of pings, each with a long id."""

    async def scenario(world: ServerHarness) -> None:
        line = FakeWebSocket()
        async with await world.connect(line) as running:
            line.stuck = True
            for _ in range(1_000):
                line.receive_from_peer({"op": "ping", "request_id": KB})
            await let_idle()
            assert line.most < HIGH_WATER_BYTES + 2_000
            line.take()
            await let_idle()
            assert 500 < len(line.sent) < 700
            await running.ended()
        assert line.closed == (1008, "too slow")
        assert line.sent_messages[-1]["code"] == "slow_consumer"

    run_scenario(scenario)


def test_a_server_that_stops_does_not_wait_for_a_slow_socket() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        line = FakeWebSocket()
        loop = asyncio.get_running_loop()
        async with await world.connect(line) as running:
            line.receive_from_peer({"op": "subscribe", "topic": "a"})
            await line.until(2)
            line.stuck = True
            topic.append([KB] * 300)
            await line.until(4)
            topic.append([KB])
            await let_idle()
            assert len(line.sent) == 4, "it is waited for"
            before = loop.time()
            world.service.stop()
            await running.ended()
            assert loop.time() - before < 1
        assert json.loads(line.sent[-1])["code"] == "server_shutting_down"

    run_scenario(scenario)


def test_a_slow_peer_that_hangs_up_is_not_waited_for() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        line = FakeWebSocket()
        loop = asyncio.get_running_loop()
        async with await world.connect(line) as running:
            line.receive_from_peer({"op": "subscribe", "topic": "a"})
            await line.until(2)
            line.stuck = True
            topic.append([KB] * 300)
            await line.until(4)
            topic.append([KB])
            await let_idle()
            assert len(line.sent) == 4, "it is waited for"
            before = loop.time()
            line.disconnect()
            await running.ended()
            assert loop.time() - before < 1
        assert line.closed is None, "there is nobody to close it for"

    run_scenario(scenario)


# The log --------------------------------------------------------------------------------------------------


def test_a_command_that_fails_is_in_the_log_by_its_id_and_what_it_was_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own id, where it has one; else that of the request that became the socket."""

    async def obey(self: ChannelSession, command: Any, size: int) -> None:  # noqa: ARG001
        future = asyncio.get_running_loop().create_future()
        future.set_exception(ZeroDivisionError())
        self._send_ack(command, future)

    def fail(*_: object) -> Any:
        raise InDoubt("planted")

    monkeypatch.setattr(ChannelSession, "execute", obey)
    monkeypatch.setattr(TopicOperations, "submit", fail)

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        headers = {"x-request-id": "mine"}
        with captured_log() as text:
            async with await world.connect(line, key="sesame", headers=headers):
                line.receive_from_peer({"op": "publish", "topic": "a", "records": records(1), "request_id": "p1"})
                line.receive_from_peer({"op": "publish", "topic": "a", "records": records(1)})
                line.receive_from_peer({"op": "channel_publish", "channel": "c", "payload": "x", "request_id": [1, 2]})
                assert [each["op"] for each in await line.until(3)] == ["error"] * 3
        first, second, third = parse_log(text)
        assert (first["request_id"], first["topic"]) == ("p1", "a")
        assert first["message"] == "a WebSocket command failed: planted"
        assert (second["request_id"], second["topic"]) == ("mine", "a")
        assert (third["request_id"], third["channel"]) == ("[1, 2]", "c")
        assert "ZeroDivisionError" in third["trace"]
        assert "sesame" not in text.getvalue()

    run_scenario(scenario, api_keys="sesame")


# What has no effect ---------------------------------------------------------------------------------------

COMMANDS_WITH_MISTAKES = [
    ({"op": "ping", "requestid": 1}, "pong", "there is no field 'requestid', the nearest is request_id"),
    ({"op": "subscribe", "topic": "a", "form_seq": 1}, "subscribed", "there is no field 'form_seq', the nearest is"),
    ({"op": "unsubscribe", "topic": "a", "x": 1}, "unsubscribed", "there is no field 'x'"),
    (
        {"op": "publish", "topic": "a", "records": [{"data": 1, "tga": "t"}]},
        "ack",
        "there is no field 'tga' in $.records[0], the nearest is tag",
    ),
    (
        {"op": "publish", "topic": "a", "records": [{"data": 1}], "config": {"retention": 5}},
        "ack",
        "a config has no field 'retention', the nearest is",
    ),
    (
        {"op": "publish", "topic": "a", "records": [{"data": 1}], "config": {"cap_records": 5}},
        "ack",
        "a exists with another config: cap_records is 0",
    ),
    ({"op": "subscribe", "topic": "none", "tial": True}, "error", "there is no field 'tial', the nearest is tail"),
]


@pytest.mark.parametrize(("command", "op", "warning"), COMMANDS_WITH_MISTAKES)
def test_what_a_command_does_not_have_is_ignored_and_reported(command: dict[str, Any], op: str, warning: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            (reply,) = [said for said in await exchange(line, command | {"request_id": 7}) if said["op"] == op]
            assert reply["request_id"] == 7
            (said,) = reply["warnings"]
            assert said.startswith(warning)
            assert "warnings" not in (await exchange(line, {"op": "ping"}))[0]

    run_scenario(scenario)


@pytest.mark.parametrize(("command", "op", "warning"), COMMANDS_WITH_MISTAKES)
def test_a_strict_server_refuses_such_a_command(command: dict[str, Any], op: str, warning: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        line = FakeWebSocket()
        async with await world.connect(line):
            (reply,) = await exchange(line, command | {"request_id": 7})
            assert (reply["op"], reply["request_id"], reply["code"]) == ("error", 7, "invalid_request"), op
            assert reply["message"].startswith(warning)
            assert reply["message"].endswith("nothing was done")
            assert topic.head_seq == 0
            assert await exchange(line, {"op": "ping"}) == [{"op": "pong", "request_id": None}]

    run_scenario(scenario, strict=True)
