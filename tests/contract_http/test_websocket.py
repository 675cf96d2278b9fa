"""§2.10, §3.9: WebSockets. The client's frames are the `websockets` library's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract_http.api import Api, expect_error
from tests.contract_http.client import RawConnection, loads
from tests.contract_http.server import Server
from tests.contract_http.websocket_client import Socket
from tests.kit.waiting import eventually

Name = Callable[[str], str]
ACK = {
    "op",
    "durability",
    "request_id",
    "topic",
    "first_seq",
    "last_seq",
    "seqs",
    "head_seq",
    "count",
    "created",
    "deduped",
    "performance",
}


@pytest.fixture
def ws(server: Server) -> Iterator[Socket]:
    socket = Socket(server)
    with socket.raw:
        yield socket


def follow(ws: Socket, topic: str, **more: object) -> dict[str, Any]:
    said = ws.request(op="subscribe", topic=topic, **more)
    assert said["op"] == "subscribed", said
    return said


# ── the connection ────────────────────────────────────────────────────────────────────────────


def test_the_handshake(server: Server) -> None:
    """§3.9: the accept key of RFC 6455's own example."""
    with RawConnection(server.address) as wire:
        wire.send(
            b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        head = wire.head()
        assert head.status == 101
        assert (head.header("upgrade") or "").lower() == "websocket"
        assert (head.header("connection") or "").lower() == "upgrade"
        assert head.header("sec-websocket-accept") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert head.header("sec-websocket-extensions") is None, "nothing that was not offered"


def test_a_request_that_is_no_upgrade_is_400_with_the_envelope(api: Api) -> None:
    """§2.10, D12."""
    expect_error(api.get("/v0/ws"), 400, "invalid_request")
    expect_error(api.get("/v0/ws", [("Connection", "Upgrade"), ("Upgrade", "h2c")]), 400, "invalid_request")
    headers = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
    expect_error(api.get("/v0/ws", headers), 400, "invalid_request")


def test_frames_may_come_with_the_handshake_in_one_piece(server: Server) -> None:
    """§3.9: what follows the request belongs to the socket."""
    command = b'{"op":"ping","request_id":7}'
    frame = bytes([0x81, 0x80 | len(command), 0, 0, 0, 0]) + command
    with RawConnection(server.address) as wire:
        wire.send(
            b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n" + frame
        )
        assert wire.head().status == 101
        first, length = wire.read_exactly(2)
        assert (first, length < 126) == (0x81, True), "one unmasked text frame"
        assert loads(wire.read_exactly(length)) == {"op": "pong", "request_id": 7}


def test_a_ping_of_the_protocol_is_answered(ws: Socket) -> None:
    """§3.9."""
    assert ws.raw.ping(b"hello").wait(10)


def test_a_message_may_come_in_fragments(ws: Socket) -> None:
    ws.raw.send(iter(['{"op":', '"pi', 'ng"}']))
    assert ws.receive() == {"op": "pong", "request_id": None}


def test_a_close_is_answered_with_a_close(server: Server) -> None:
    socket = Socket(server)
    with socket.raw:
        socket.raw.close(1000, "bye")
    assert (socket.raw.close_code, socket.raw.protocol.close_rcvd is not None) == (1000, True)


def test_a_socket_holds_a_slot(api: Api, server: Server) -> None:
    """§1.12, §2.12."""
    before = api.metrics()["sse_connections"]
    socket = Socket(server)
    with socket.raw:
        assert socket.request(op="ping")["op"] == "pong"
        assert api.metrics()["sse_connections"] == before + 1
    eventually(lambda: api.metrics()["sse_connections"] == before)


# ── request ids and errors ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("given", ["a", "", 1, -1.5, True, None, [1, {"a": None}], {"k": "é"}])
def test_a_request_id_is_any_json_and_comes_back(ws: Socket, topic: str, given: Any) -> None:
    """§3.9: echoed by every answer."""
    assert ws.request(op="ping", request_id=given) == {"op": "pong", "request_id": given}
    assert ws.publish(topic, 1, request_id=given)["request_id"] == given
    assert follow(ws, topic, tail=True, request_id=given)["request_id"] == given
    assert ws.expect("caught_up")
    assert ws.request(op="unsubscribe", topic=topic, request_id=given)["request_id"] == given
    assert ws.expect_error("topic_not_found", op="subscribe", topic="no", request_id=given)["request_id"] == given


def test_without_a_request_id_it_is_null(ws: Socket) -> None:
    """§3.9."""
    assert ws.request(op="ping") == {"op": "pong", "request_id": None}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        "[]",
        "null",
        "1",
        '"ping"',
        "{}",
        '{"op":1}',
        '{"op":null}',
        '{"op":"dance"}',
        '{"op":"Ping"}',
        '{"op":"publish"}',
        '{"op":"publish","topic":"t"}',
        '{"op":"publish","records":[{"data":1}]}',
        '{"op":"publish","topic":1,"records":[{"data":1}]}',
        '{"op":"publish","topic":"t","records":{}}',
        '{"op":"publish","topic":"t","records":[{}]}',
        '{"op":"publish","topic":"t","records":[{"data":1}],"create":1}',
        '{"op":"publish","topic":"t","records":[{"data":1}],"return_seqs":0}',
        '{"op":"publish","topic":"t","records":[{"data":NaN}]}',
        '{"op":"subscribe","topic":1}',
        '{"op":"subscribe","topics":["t"]}',
        '{"op":"subscribe","topics":{"t":{"from_seq":-1}}}',
        '{"op":"subscribe","topics":{"t":{"tail":1}}}',
        '{"op":"subscribe","topic":"t","from_seq":1.0}',
        '{"op":"subscribe","topic":"t","from_seq":18446744073709551616}',
        '{"op":"subscribe","topic":"t","limit":4294967296}',
        '{"op":"subscribe","topic":"t","limit":"5"}',
        '{"op":"subscribe","topic":"t","include_data":null}',
        '{"op":"subscribe","topic":"t","lenient":1}',
        '{"op":"subscribe","topic":"t","node":1}',
        '{"op":"unsubscribe","topics":"t"}',
        '{"op":"unsubscribe","topics":{"t":{}}}',
        '{"op":"ping"} x',
        '{"op":"ping","a":' + "[" * 5_000 + "]" * 5_000 + "x}",
    ],
)
def test_what_is_no_command_is_invalid_json_and_the_socket_stays_open(ws: Socket, text: str) -> None:
    """§3.9: bad JSON, an unknown op, a missing or ill-typed field."""
    ws.raw.send(text)
    said = ws.receive()
    assert (said["op"], said["code"]) == ("error", "invalid_json"), said
    assert said.keys() == {"op", "request_id", "code", "message"}
    assert said["message"]
    assert ws.request(op="ping", request_id=1) == {"op": "pong", "request_id": 1}


def test_a_binary_frame_is_not_supported(ws: Socket) -> None:
    """§3.9: no request_id."""
    ws.raw.send(b'{"op":"ping"}')
    said = ws.receive()
    assert (said["op"], said["code"]) == ("error", "unsupported_message")
    assert said.get("request_id") is None
    assert ws.request(op="ping")["op"] == "pong"


def test_a_command_that_names_no_topic(ws: Socket) -> None:
    """§3.9: invalid_request."""
    for op in ("subscribe", "unsubscribe"):
        ws.expect_error("invalid_request", op=op)
    ws.expect_error("invalid_request", op="subscribe", topics={})
    ws.expect_error("invalid_request", op="subscribe", topics={}, topic=None)
    ws.expect_error("invalid_request", op="unsubscribe", topics=[])


def test_unknown_fields_of_a_command_are_ignored(ws: Socket, topic: str) -> None:
    """§1.1."""
    assert ws.request(op="ping", stray=[1])["op"] == "pong"
    assert ws.publish(topic, 1, stray={})["count"] == 1
    assert follow(ws, topic, stray=1, tail=True)["topics"].keys() == {topic}


# ── publish ───────────────────────────────────────────────────────────────────────────────────


def test_the_answer_to_a_publish(ws: Socket, api: Api, topic: str) -> None:
    """§3.9: eleven keys, and the class of the ack; `seqs` is null where they are not wanted."""
    said = ws.publish(topic, "a", "b", request_id="r")
    assert said.keys() == ACK
    assert isinstance(said.pop("performance")["server_total_ms"], float | int)
    assert said == {
        "op": "ack",
        "request_id": "r",
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
        "durability": "disk",
    }
    said = ws.publish(topic, "c", return_seqs=False)
    assert (said["seqs"], said["first_seq"], said["created"]) == (None, 3, False)
    assert said.keys() == ACK
    assert [record["data"] for record in api.diff(topic)["records"]] == ["a", "b", "c"]


def test_a_publish_is_a_write_in_everything_else(ws: Socket, api: Api, name: Name) -> None:
    """§3.9, §2.5: node, key, create, config; keys are shared with HTTP."""
    topic, other = name("a"), name("b")
    ws.publish(topic, 1, node="n", config={"cap_records": 2}, disable_backpressure=True)
    assert api.state(topic)["config"]["cap_records"] == 2
    assert api.diff(topic)["records"][0]["$node"] == "n"
    first = ws.publish(topic, 2, idempotency_key="k")
    again = ws.publish(topic, "other", idempotency_key="k")
    assert (again["deduped"], again["seqs"], again["created"]) == (True, first["seqs"], False)
    assert api.write(topic, 1, idempotency_key="k")["deduped"]
    ws.expect_error("topic_not_found", op="publish", topic=other, records=[{"data": 1}], create=False)
    ws.expect_error("topic_not_found", op="publish", topic=other, records=[{"data": 1}], config={"auto_create": False})
    assert not api.exists(other)
    full = {"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}
    assert ws.request(op="publish", topic=other, records=[full])["created"]
    found = api.diff(other, include_tags=True)["records"][0]
    assert (found["data"], found["$tag"], found["$node"], found["meta"]) == ({"a": 1}, "t", "n", {"m": 1})


def test_a_publish_is_refused_with_the_code_of_a_write(ws: Socket, api: Api, topic: str) -> None:
    """§3.9: HTTP error codes."""
    one = [{"data": 1}]
    ws.expect_error("invalid_request", op="publish", topic="-bad", records=one)
    ws.expect_error("invalid_request", op="publish", topic=topic, records=[])
    ws.expect_error("invalid_request", op="publish", topic=topic, records=[{"data": 1, "tag": "x" * 257}])
    ws.expect_error("invalid_request", op="publish", topic=topic, records=one, idempotency_key="k" * 257)
    ws.expect_error("batch_too_large", op="publish", topic=topic, records=one * 10_001)
    ws.expect_error("record_too_large", op="publish", topic=topic, records=[{"data": "x" * (1 << 20)}])
    assert not api.exists(topic)
    api.create_topic(topic, discard="reject", cap_records=1)
    ws.publish(topic, 1)
    ws.expect_error("topic_full", op="publish", topic=topic, records=one)
    ws.expect_error("record_too_large", op="publish", topic=topic, records=one * 2)
    assert api.state(topic)["head_seq"] == 1


def test_writes_of_one_socket_keep_their_order(ws: Socket, api: Api, topic: str) -> None:
    """§3.9: sent one behind the other without waiting."""
    for number in range(200):
        ws.send(op="publish", topic=topic, records=[{"data": number}], request_id=number)
    acks = [ws.receive() for _ in range(200)]
    assert [(ack["request_id"], ack["first_seq"]) for ack in acks] == [(number, number + 1) for number in range(200)]
    assert [record["data"] for record in api.diff(topic, limit=1000)["records"]] == list(range(200))


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_ack_has_the_durability_class(ws: Socket, api: Api, topic: str, durability: str) -> None:
    """§1.9, §4."""
    api.create_topic(topic, durability=durability)
    took = ws.publish(topic, 1)["performance"]
    assert took["fsync_ms"] > 0 if durability == "fsync" else took["fsync_ms"] == 0.0


# ── subscribe ─────────────────────────────────────────────────────────────────────────────────


def test_subscribed_comes_before_the_records(ws: Socket, api: Api, topic: str) -> None:
    """§3.9: and the records before their level."""
    api.records(topic, {"data": "a", "tag": "t", "meta": {"m": 1}, "node": "n"}, {"data": 2})
    ws.send(op="subscribe", topic=topic, request_id=5)
    subscribed, record, level = ws.expect("subscribed", "record", "caught_up")
    assert subscribed == {
        "op": "subscribed",
        "request_id": 5,
        "topics": {topic: {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}},
    }
    assert list(record) == ["op", "topic", "from_seq", "to_seq", "head_seq", "records"]
    assert (record["topic"], record["from_seq"], record["to_seq"], record["head_seq"]) == (topic, 0, 2, 2)
    assert record["records"][0].keys() == {"$seq", "$ts", "$node", "data", "meta"}
    assert level == {"op": "caught_up", "topic": topic, "head_seq": 2}
    api.write(topic, 3)
    record, level = ws.expect("record", "caught_up")
    assert ([row["$seq"] for row in record["records"]], record["from_seq"], record["to_seq"]) == ([3], 2, 3)
    assert level["head_seq"] == 3
    assert ws.is_quiet(0.05), "one level a burst"


def test_where_a_subscription_begins(ws: Socket, api: Api, name: Name) -> None:
    """§3.9: `from_seq` and `tail` are for `topic`, unless the map has it."""
    a, b, c = name("a"), name("b"), name("c")
    for topic in (a, b, c):
        api.write(topic, 1, 2, 3)
    said = ws.request(
        op="subscribe", topic=a, from_seq=2, topics={b: {"tail": True, "from_seq": 1}, c: {"from_seq": 1}}
    )
    assert {topic: spot["from_seq"] for topic, spot in said["topics"].items()} == {a: 2, b: 3, c: 1}
    found = ws.expect("record", "caught_up", "caught_up", "record", "caught_up")
    assert [(push["op"], push["topic"]) for push in found] == [
        ("record", a),
        ("caught_up", a),
        ("caught_up", b),
        ("record", c),
        ("caught_up", c),
    ]
    assert [len(push["records"]) for push in found if push["op"] == "record"] == [1, 2]
    said = ws.request(op="subscribe", topic=a, tail=True, from_seq=1)
    assert said["topics"][a]["from_seq"] == 3
    ws.expect("caught_up")
    said = ws.request(op="subscribe", topic=a, tail=True, topics={a: {"from_seq": 1}})
    assert said["topics"][a]["from_seq"] == 1, "the map has it"


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"$node", "data", "meta"}),
        ({"include_data": False}, {"$node", "meta"}),
        ({"include_meta": False}, {"$node", "data"}),
        ({"include_tags": True}, {"$node", "data", "meta", "$tag"}),
    ],
)
def test_what_of_a_record_is_pushed(
    ws: Socket, api: Api, topic: str, options: dict[str, object], keys: set[str]
) -> None:
    """§3.9."""
    api.records(topic, {"data": 1, "tag": "t", "meta": {"m": 1}, "node": "n"})
    follow(ws, topic, **options)
    assert ws.receive()["records"][0].keys() == keys | {"$seq", "$ts"}


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1000, 200]),
        ({"limit": 0}, [256] * 4 + [176]),
        ({"limit": 5000}, [1000, 200]),
        ({"limit": 600}, [600, 600]),
    ],
)
def test_the_records_of_a_push(ws: Socket, api: Api, topic: str, options: dict[str, object], sizes: list[int]) -> None:
    """§3.9, §1.12: 1,000 by default, which is also the most."""
    assert api.write_raw(topic, 1_200).status == 201
    follow(ws, topic, **options)
    pushes = ws.expect(*["record"] * len(sizes), "caught_up")
    assert [len(push["records"]) for push in pushes[:-1]] == sizes


@pytest.mark.parametrize(
    ("options", "first"), [({}, 1), ({"max_batch_bytes": 0}, 1), ({"max_batch_bytes": 1 << 40}, 3)]
)
def test_the_bytes_of_a_push(ws: Socket, api: Api, topic: str, options: dict[str, object], first: int) -> None:
    """§1.12: 1 MiB by default and for 0."""
    api.write(topic, *["x" * 600_000] * 3)
    follow(ws, topic, **options)
    assert len(ws.receive()["records"]) == first


def test_an_unknown_topic_refuses_a_subscription_unless_it_is_lenient(ws: Socket, api: Api, name: Name) -> None:
    """§3.9: all or nothing."""
    known, unknown = name("known"), name("unknown")
    api.create_topic(known)
    ws.expect_error("topic_not_found", op="subscribe", topics={known: {}, unknown: {}})
    api.write(known, 1)
    assert ws.is_quiet(0.1), "nothing was subscribed"
    said = ws.request(op="subscribe", topics={known: {"tail": True}, unknown: {}}, lenient=True)
    assert said["topics"].keys() == {known}
    ws.expect("caught_up")
    assert ws.request(op="subscribe", topic=unknown, lenient=True)["topics"] == {}


def test_unsubscribing_stops_the_records(ws: Socket, api: Api, name: Name) -> None:
    """§3.9, C: nothing within 200 ms after a later publish; the names asked for come back."""
    a, b = name("a"), name("b")
    api.create_topic(a)
    api.create_topic(b)
    ws.request(op="subscribe", topics={a: {}, b: {}})
    ws.expect("caught_up", "caught_up")
    said = ws.request(op="unsubscribe", topic=a, request_id=3)
    assert said == {"op": "unsubscribed", "request_id": 3, "topics": [a]}
    assert ws.publish(a, "x")["count"] == 1
    assert ws.is_quiet(0.2)
    api.write(b, 1)
    assert [push["topic"] for push in ws.expect("record", "caught_up")] == [b, b]
    said = ws.request(op="unsubscribe", topics=[b, a, "never"])
    assert (said["op"], sorted(said["topics"])) == ("unsubscribed", sorted([a, b, "never"]))


def test_subscribing_again_replaces_cursor_and_options(ws: Socket, api: Api, topic: str) -> None:
    """§3.9."""
    api.records(topic, {"data": 1, "tag": "t"}, {"data": 2, "tag": "t"})
    follow(ws, topic)
    ws.expect("record", "caught_up")
    follow(ws, topic, from_seq=1, include_tags=True, include_data=False)
    record, _ = ws.expect("record", "caught_up")
    assert [row["$seq"] for row in record["records"]] == [2]
    assert record["records"][0].keys() == {"$seq", "$ts", "$tag"}
    api.write(topic, 3)
    record, _ = ws.expect("record", "caught_up")
    assert record["records"][0].keys() == {"$seq", "$ts"}, "once, with the options of the last"
    assert ws.is_quiet(0.05)


def test_a_socket_hears_its_own_records_unless_it_leaves_its_node_out(ws: Socket, api: Api, topic: str) -> None:
    """§3.9."""
    api.create_topic(topic)
    follow(ws, topic)
    ws.expect("caught_up")
    ws.send(op="publish", topic=topic, records=[{"data": 1}], node="me")
    heard = [ws.receive() for _ in range(3)]
    assert sorted(said["op"] for said in heard) == ["ack", "caught_up", "record"]
    follow(ws, topic, tail=True, node=["me"])
    ws.expect("caught_up")
    ws.publish(topic, 2, node="me")
    assert ws.is_quiet(0.1)
    api.write(topic, 3)
    record, _ = ws.expect("record", "caught_up")
    assert ([row["$seq"] for row in record["records"]], record["to_seq"]) == ([3], 3)


def test_a_loss_is_pushed_with_its_real_reason(ws: Socket, api: Api, topic: str) -> None:
    """§3.9: no `from_seq_too_old`."""
    api.create_topic(topic, cap_records=2)
    api.write(topic, *range(5))
    follow(ws, topic, from_seq=1)
    gap, record, _ = ws.expect("tombstone", "record", "caught_up")
    assert gap == {
        "op": "tombstone",
        "topic": topic,
        "reason": "cap",
        "gap_from": 2,
        "gap_to": 3,
        "earliest_seq": 4,
        "head_seq": 5,
    }
    assert [row["$seq"] for row in record["records"]] == [4, 5]
    follow(ws, topic, from_seq=99)
    gap, record, _ = ws.expect("tombstone", "record", "caught_up")
    assert (gap["reason"], gap["gap_to"], len(record["records"])) == ("recreated", 5, 2)


def test_the_end_of_a_topic_ends_its_subscription(ws: Socket, api: Api, topic: str) -> None:
    """§3.9, D4: promptly; the socket stays, and a topic of the same name is another one."""
    api.create_topic(topic)
    follow(ws, topic)
    ws.expect("caught_up")
    began = time.monotonic()
    api.drop(topic)
    (gone,) = ws.expect("topic_deleted")
    assert time.monotonic() - began < 10
    assert gone == {"op": "topic_deleted", "topic": topic, "head_seq": 0, "reason": "deleted"}
    api.write(topic, "new")
    assert ws.is_quiet(0.1)
    follow(ws, topic)
    ws.expect("record", "caught_up")


def test_many_topics_on_one_socket(ws: Socket, api: Api, topic: str) -> None:
    """§3.9: no limit on their number."""
    names = [f"{topic}-{number:03d}" for number in range(300)]
    for name in names:
        ws.send(op="publish", topic=name, records=[{"data": name}], config={"durability": "ephemeral"})
    assert all(ws.receive()["op"] == "ack" for _ in names)
    said = ws.request(op="subscribe", topics={name: {} for name in names})
    assert len(said["topics"]) == 300
    seen = set()
    for _ in range(600):
        push = ws.receive()
        if push["op"] == "record":
            seen.add(push["records"][0]["data"])
    assert seen == set(names)
    assert api.metrics()["ready"] is True


def test_a_socket_that_leaves_without_a_word_gives_its_slot_back(api: Api, server: Server, topic: str) -> None:
    """§1.12."""
    api.create_topic(topic)
    before = api.metrics()["sse_connections"]
    with RawConnection(server.address) as wire:
        wire.send(
            b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert wire.head().status == 101
        assert api.metrics()["sse_connections"] == before + 1
        wire.abort()
    eventually(lambda: api.metrics()["sse_connections"] == before)
