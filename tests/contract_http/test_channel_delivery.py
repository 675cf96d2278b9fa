"""What members of a channel are told over SSE and WebSocket: messages, presence, gaps, ends. docs/http.md."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from websockets.exceptions import ConnectionClosed

from tests.contract_http.api import ANY, expect_error, expect_success
from tests.contract_http.channel_api import (
    ANN,
    BOB,
    CAT,
    EVE,
    KEYS,
    ChannelApi,
    ChannelEvents,
    ChannelSocket,
    channel_api,
    channel_path,
)
from tests.contract_http.client import JSON, RawConnection, dumps
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

Name = Callable[[str], str]


@pytest.fixture(scope="module")
def channel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Users without a connection stay members for longer than any test takes: a user whose last connection was of an
    earlier test would otherwise leave a channel that it has just created."""
    folder = tmp_path_factory.mktemp("house")
    with Server(folder, api_keys=KEYS, channel_grace_ms=3_600_000).start() as running:
        yield running


@pytest.fixture
def channel_name(name: Name) -> str:
    return f"!{name('room')}@example.org"


@pytest.fixture
def ann(channel_server: Server) -> Iterator[ChannelApi]:
    with channel_api(channel_server, "ann") as client:
        yield client


@pytest.fixture
def bob(channel_server: Server) -> Iterator[ChannelApi]:
    with channel_api(channel_server, "bob") as client:
        yield client


@pytest.fixture(autouse=True)
def no_channels_left(channel_server: Server) -> Iterator[None]:
    """Whatever a test does, no slot and no receiver is left."""
    yield
    with channel_api(channel_server, "root") as root:
        eventually(lambda: root.metric("sse_connections") == 0 and root.metric("channel_receivers") == 0, 10)


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("persist", [True, False])
def test_a_member_hears_what_is_said_and_who_comes_and_goes(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str, persist: bool
) -> None:
    ann.create(channel_name, persist=persist)
    bob.join(channel_name)
    with ChannelEvents(channel_server, channel_name, key="bob") as heard:
        assert heard.head.header("content-type") == "text/event-stream"
        assert heard.head.header("cache-control") == "no-store"
        stream = heard.hello.pop("stream")
        assert stream.startswith("st_")
        assert heard.hello == {"channel": channel_name, "user": BOB}
        ack = ann.publish(channel_name, "hello")
        assert ack["receivers"] == 1
        first = heard.next_event()
        assert (first.name, first.id) == ("message", 1)
        assert first.data == {"channel": channel_name, "seq": 1, "ts": ack["ts"], "sender": ANN, "payload": "hello"}
        ann.verb(channel_name, "publish", payload_base64=base64.b64encode(b"\xff").decode())
        assert heard.next_event().data["payload_base64"] == "/w=="
        ann.join(channel_name, user=CAT)
        joined = heard.expect_event("presence")
        assert joined.pop("ts") >= ack["ts"]
        assert joined == {"channel": channel_name, "kind": "joined", "user": CAT, "owner": False}
        expect_success(ann.put(channel_path(channel_name), {"max_clients": 7}))
        assert heard.expect_event("presence")["kind"] == "reconfigured"
        ann.leave(channel_name, user=CAT)
        assert heard.expect_event("presence")["kind"] == "left"
        ann.leave(channel_name)
        gone, promoted = heard.expect_event("presence"), heard.expect_event("presence")
        assert (gone["kind"], gone["user"], gone["owner"]) == ("left", ANN, True)
        assert (promoted["kind"], promoted["user"], promoted["owner"]) == ("joined", BOB, True)
        expect_success(bob.delete(channel_path(channel_name)))
        assert heard.expect_event("presence")["kind"] == "deleted"
        assert heard.expect_event("end") == {"channel": channel_name, "reason": "deleted", "last_seq": 2}
        assert heard.is_over()


def test_a_stream_does_not_hear_what_its_own_client_says(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name)
    bob.join(channel_name)
    with (
        ChannelEvents(channel_server, channel_name, key="bob") as one,
        ChannelEvents(channel_server, channel_name, key="bob") as two,
        ChannelEvents(channel_server, channel_name, key="ann") as three,
    ):
        said = bob.publish(channel_name, "mine", stream=one.hello["stream"])
        assert said["receivers"] == 2
        assert (two.texts(1), three.texts(1)) == (["mine"], ["mine"])
        bob.request(
            "POST",
            channel_path(channel_name, "/publish"),
            b"bytes",
            [("Content-Type", "application/octet-stream"), ("X-Tidelog-Stream", one.hello["stream"])],
        )
        assert two.texts(1) == ["bytes"]
        ann.publish(channel_name, "not mine", stream=one.hello["stream"])
        assert one.texts(1) == ["not mine"], "another's stream cannot be made deaf"
        bob.publish(channel_name, "elsewhere", stream="st_nobody")
        assert one.texts(1) == ["elsewhere"]


def test_removed_member_gets_an_event_and_its_stream_ends(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name)
    bob.join(channel_name)
    with ChannelEvents(channel_server, channel_name, key="bob") as heard:
        ann.publish(channel_name, "last words")
        ann.leave(channel_name, user=BOB)
        assert heard.texts(1) == ["last words"]
        found = [heard.next_event() for _ in range(2)]
        assert [each.name for each in found] == ["presence", "end"]
        assert found[1].data == {"channel": channel_name, "reason": "left", "last_seq": 1}
        assert heard.is_over()
    ChannelEvents(channel_server, channel_name, key="bob").expect_refused(
        403, "not_a_member", {"channel": channel_name, "user": BOB}
    )


def test_the_read_list_decides_who_sees_messages_and_everybody_sees_presence(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name, persist=True)
    bob.join(channel_name)
    with ChannelEvents(channel_server, channel_name, key="bob") as heard:
        ann.verb(channel_name, "acl", kind="read", add=[ANN])
        assert ann.publish(channel_name, "secret")["receivers"] == 0
        ann.join(channel_name, user=CAT)
        assert heard.expect_event("presence")["user"] == CAT
        ann.verb(channel_name, "acl", kind="read", remove=[ANN])
        ann.publish(channel_name, "open")
        assert heard.texts(1) == ["open"]
    with ChannelEvents(channel_server, channel_name, "?from_seq=0", key="bob") as heard:
        assert heard.texts(2) == ["secret", "open"]
        ann.verb(channel_name, "acl", kind="read", add=[ANN])
    with ChannelEvents(channel_server, channel_name, "?from_seq=0", key="bob") as heard:
        ann.leave(channel_name, user=CAT)
        assert heard.expect_event("presence")["user"] == CAT, "there was nothing that it could have missed"


def test_a_client_that_comes_back_misses_nothing(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name, persist=True)
    bob.join(channel_name)
    with ChannelEvents(channel_server, channel_name, key="bob") as heard:
        ann.publish(channel_name, "1", "2", "3")
        assert heard.texts(3) == ["1", "2", "3"]
    ann.publish(channel_name, *(str(number) for number in range(4, 304)))
    with ChannelEvents(channel_server, channel_name, key="bob", Last_Event_ID="2") as heard:
        assert heard.texts(301) == [str(number) for number in range(3, 304)], "more than one page of history"
        ann.publish(channel_name, "live")
        assert heard.texts(1) == ["live"]
    with ChannelEvents(channel_server, channel_name, key="bob", Last_Event_ID="304") as heard:
        ann.publish(channel_name, "next")
        assert heard.texts(1) == ["next"]
    with ChannelEvents(channel_server, channel_name, key="bob", Last_Event_ID="not ours") as heard:
        ann.publish(channel_name, "from now on")
        assert heard.texts(1) == ["from now on"]


def test_nothing_is_sent_twice_or_left_out_while_catching_up(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    """Readers come while others write: history and live have to meet without a seam."""
    ann.create(channel_name, persist=True, message_flush_interval=1000)
    bob.join(channel_name)
    for turn in range(10):
        ann.publish(channel_name, *("x" for _ in range(50)))
        with ChannelEvents(channel_server, channel_name, "?from_seq=0", key="bob") as heard:
            for _ in range(5):
                ann.publish(channel_name, "y", "z")
            seqs = [heard.next_event().id for _ in range((turn + 1) * 60)]
            assert seqs == list(range(1, (turn + 1) * 60 + 1))


def test_messages_that_are_not_stored_any_more_are_a_gap(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name, persist=True, max_persist_messages=10)
    bob.join(channel_name)
    for _ in range(10):
        ann.publish(channel_name, *("x" for _ in range(40)))
    oldest = ann.history(channel_name, "?limit=1")["first_seq"]
    assert oldest > 1
    with ChannelEvents(channel_server, channel_name, "?from_seq=0", key="bob") as heard:
        assert heard.expect_event("gap") == {"channel": channel_name, "from_seq": 1, "to_seq": oldest - 1}
        assert heard.next_event().id == oldest


def test_channel_without_persistence_reports_missed_messages(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name)
    bob.join(channel_name)
    ann.publish(channel_name, "1", "2", "3")
    with ChannelEvents(channel_server, channel_name, key="bob", Last_Event_ID="1") as heard:
        assert heard.expect_event("gap") == {"channel": channel_name, "from_seq": 2, "to_seq": 3}
        ann.publish(channel_name, "4")
        assert heard.next_event().id == 4
    with ChannelEvents(channel_server, channel_name, key="bob", Last_Event_ID="4") as heard:
        ann.publish(channel_name, "5")
        assert heard.next_event().id == 5


def test_refusals_of_a_stream(channel_server: Server, ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name)
    assert ann.request("HEAD", channel_path(channel_name, "/events")).status == 200
    expect_error(
        ann.get(channel_path(channel_name, "/events"), [("Accept", "application/json")]), 406, "not_acceptable"
    )
    expect_error(
        ann.get(channel_path(channel_name, "/events?from_seq=x")),
        400,
        "invalid_request",
        {"parameter": "from_seq", "value": "x"},
    )
    ChannelEvents(channel_server, channel_name).expect_refused(401, "unauthorized", None)
    with ChannelEvents(channel_server, channel_name, "?token=ann") as heard:
        assert heard.hello["user"] == ANN, "for clients that cannot set headers"
    with ChannelEvents(channel_server, channel_name, f"?token=root&user={ANN}") as heard:
        assert heard.hello["user"] == ANN


def test_streams_are_counted_and_given_back(tmp_path: Path, channel_name: str) -> None:
    caps = {"max_sse_connections": 3, "max_sse_connections_per_key": 2}
    with Server(tmp_path / "s", api_keys=KEYS, **caps).start() as server, channel_api(server, "ann") as ann:
        ann.create(channel_name)
        for _ in range(3):
            with ChannelEvents(server, channel_name, key="ann"), ChannelSocket(server, key="ann"):
                assert ann.metric("sse_connections") == 2
                ChannelEvents(server, channel_name, key="ann").expect_refused(429, "throttled", None)
                assert ann.metric("channel_receivers") == 1
            eventually(lambda: ann.metric("sse_connections") == 0 and ann.metric("channel_receivers") == 0)
        for _ in range(5):
            ChannelEvents(server, "!nowhere@example.org", key="ann").expect_refused(404, "channel_not_found", ANY)
        assert (ann.metric("sse_connections"), ann.metric("channel_receivers")) == (0, 0)
        wires = [RawConnection(server.address) for _ in range(2)]
        for wire in wires:  # they leave while their answer is on its way
            wire.send(
                f"GET {channel_path(channel_name, '/events')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
                f"ann\r\n\r\n".encode()
            )
            wire.abort()
        eventually(lambda: ann.metric("sse_connections") == 0 and ann.metric("channel_receivers") == 0)


# ── who is here ───────────────────────────────────────────────────────────────────────────────────


def test_who_has_no_connection_any_more_leaves_what_does_not_persist(tmp_path: Path, name: Name) -> None:
    short, long = f"!{name('short')}@example.org", f"!{name('long')}@example.org"
    with (
        Server(tmp_path / "s", api_keys=KEYS, channel_grace_ms=100).start() as server,
        channel_api(server, "ann") as ann,
        channel_api(server, "bob") as bob,
    ):
        for each in (short, long):
            ann.create(each, persist=each == long)
            bob.join(each)
        with ChannelEvents(server, short, key="ann") as heard:
            with ChannelEvents(server, short, key="bob"), ChannelSocket(server, key="bob") as line:
                line.request("channel_members", "channel_members", channel=short)
            left = heard.expect_event("presence")
            assert (left["kind"], left["user"]) == ("left", BOB)
            assert BOB in expect_success(ann.get(channel_path(long, "/members")))["members"]
        eventually(lambda: ann.get(channel_path(short)).status == 404)


# ── the socket ────────────────────────────────────────────────────────────────────────────────────


def test_channel_commands_report_what_they_do_not_have(channel_server: Server, channel_name: str) -> None:
    with ChannelSocket(channel_server, key="ann") as one:
        for op, reply, fields in (
            ("channel_join", "channel_joined", {"usr": "x", "config": {"persist": True}}),
            ("channel_subscribe", "channel_subscribed", {"from": 1}),
            ("channel_publish", "channel_ack", {"payload": "x", "qso": 1}),
            ("channel_members", "channel_members", {"size": 1}),
            ("channel_history", "channel_history", {"newset": 1}),
        ):
            (said,) = one.request(op, reply, channel=channel_name, **fields)["warnings"]
            assert said.startswith("there is no field")
            assert said.endswith("it was ignored")
        with ChannelSocket(channel_server, key="bob") as two:  # with the last member the channel would end
            two.request("channel_join", "channel_joined", channel=channel_name)
            assert two.request("channel_leave", "channel_left", channel=channel_name, usr="x")["warnings"]


def test_a_socket_joins_hears_and_says(channel_server: Server, ann: ChannelApi, channel_name: str) -> None:
    with ChannelSocket(channel_server, key="ann") as one, ChannelSocket(channel_server, key="bob") as two:
        joined = one.request("channel_join", "channel_joined", channel=channel_name, config={"persist": True})
        assert joined == {
            "op": "channel_joined",
            "channel": channel_name,
            "user": ANN,
            "owner": ANN,
            "members": 1,
            "created": True,
        }
        one.request("channel_subscribe", "channel_subscribed", channel=channel_name)
        two.request("channel_join", "channel_joined", channel=channel_name)
        there = one.receive("presence")
        assert (there["kind"], there["user"], there["owner"]) == ("joined", BOB, False)
        subscribed = two.request("channel_subscribe", "channel_subscribed", channel=channel_name)
        assert subscribed == {"op": "channel_subscribed", "channel": channel_name, "user": BOB}
        ack = one.request("channel_publish", "channel_ack", channel=channel_name, payload="hello")
        ts = ack.pop("ts")
        assert ack == {
            "op": "channel_ack",
            "channel": channel_name,
            "first_seq": 1,
            "last_seq": 1,
            "count": 1,
            "qos": 1,
            "durable": True,
            "receivers": 1,
        }
        assert two.receive() == {
            "op": "message",
            "channel": channel_name,
            "seq": 1,
            "ts": ts,
            "sender": ANN,
            "payload": "hello",
        }
        quick = two.request(
            "channel_publish", "channel_ack", channel=channel_name, messages=[{"payload": "a"}, {"payload": "b"}], qos=0
        )
        assert (quick["first_seq"], quick["last_seq"], quick["qos"], quick["durable"]) == (2, 3, 0, False)
        assert [one.receive("message")["payload"] for _ in range(2)] == ["a", "b"], "and not what it said itself"
        found = two.request("channel_history", "channel_history", channel=channel_name, newest=2)
        assert [message["payload"] for message in found["messages"]] == ["a", "b"]
        assert (found["count"], found["next_seq"], found["first_seq"], found["last_seq"]) == (2, 4, 1, 3)
        members = two.request("channel_members", "channel_members", channel=channel_name)
        assert (members["members"], members["total"]) == ([ANN, BOB], 2)
        listed = one.request("channel_acl", "channel_acl", channel=channel_name, kind="read", add=[ANN, BOB])
        assert listed["listed"] == [ANN, BOB]
        one.request("channel_configure", "channel_configured", channel=channel_name, config={"max_clients": 9})
        assert two.receive("presence")["kind"] == "reconfigured"
        left = two.request("channel_unsubscribe", "channel_unsubscribed", channel=channel_name)
        assert left["was"] is True
        one.request("channel_publish", "channel_ack", channel=channel_name, payload="unheard")
        assert two.request("channel_subscribe", "channel_subscribed", channel=channel_name, from_seq=3)
        assert two.receive("message")["payload"] == "unheard"
        one.request("channel_leave", "channel_left", channel=channel_name, user=BOB)
        assert [two.receive("presence")["kind"], two.receive("channel_end")["reason"]] == ["left", "left"]
        one.send(op="channel_delete", request_id="r", channel=channel_name)
        found = {said["op"]: said for said in (one.receive(), one.receive())}
        assert found["channel_deleted"]["deleted"] is True
        assert found["channel_end"]["reason"] == "deleted"
    expect_error(ann.get(channel_path(channel_name)), 404, "channel_not_found", {"channel": channel_name})


def test_to_subscribe_again_goes_on_where_it_was(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    """Nothing twice and nothing left out, also while others write."""
    ann.create(channel_name, persist=True, message_flush_interval=1000)
    bob.join(channel_name)
    with ChannelSocket(channel_server, key="bob") as line:
        line.request("channel_subscribe", "channel_subscribed", channel=channel_name)
        seqs: list[int] = []
        for turn in range(1, 21):
            ann.publish(channel_name, *("x" for _ in range(10)))
            line.send(op="channel_subscribe", request_id="r", channel=channel_name)
            ann.publish(channel_name, "y")
            while len(seqs) < turn * 11:
                said = line.receive()
                if said["op"] == "message":
                    seqs.append(said["seq"])
        assert seqs == list(range(1, 221))
    transient = channel_name.replace("room", "plain")
    with ChannelSocket(channel_server, key="ann") as hers, ChannelSocket(channel_server, key="bob") as line:
        # Over sockets: whose last one was closed a moment ago is about to leave what does not persist.
        for each in (hers, line):
            each.request("channel_join", "channel_joined", channel=transient)
        line.request("channel_subscribe", "channel_subscribed", channel=transient)
        ann.publish(transient, "1")
        assert line.receive("message")["seq"] == 1
        line.request("channel_subscribe", "channel_subscribed", channel=transient)
        ann.publish(transient, "2")
        assert line.receive("message")["seq"] == 2


def test_a_fifo_channel_over_a_socket(channel_server: Server, channel_name: str) -> None:
    with ChannelSocket(channel_server, key="ann") as line:
        line.request("channel_join", "channel_joined", channel=channel_name, config={"persist": True, "type": "fifo"})
        assert line.request("channel_push", "channel_pushed", channel=channel_name, payload="job")["seq"] == 1
        popped = line.request("channel_pop", "channel_popped", channel=channel_name)
        assert (popped["payload"], popped["seq"], popped["sender"]) == ("job", 1, ANN)
        line.expect_error("queue_empty", "channel_pop", channel=channel_name)
        line.request("channel_push", "channel_pushed", channel=channel_name, payload_base64="/w==")
        assert line.request("channel_clear", "channel_cleared", channel=channel_name)["cleared"] == 1
        line.request("channel_leave", "channel_left", channel=channel_name)


def test_a_command_that_is_refused_leaves_the_socket_as_it_was(
    channel_server: Server, channel_name: str, name: Name
) -> None:
    with (
        ChannelSocket(channel_server, key="ann") as line,
        ChannelSocket(channel_server, key="cat") as cat,
        ChannelSocket(channel_server, key="eve") as eve,
    ):
        line.expect_error("channel_not_found", "channel_publish", channel=channel_name, payload="x")
        line.expect_error("invalid_request", "channel_join", channel="room")
        line.expect_error("channel_not_found", "channel_subscribe", channel=channel_name)
        line.request("channel_join", "channel_joined", channel=channel_name, config={"max_payload_size": 10})
        line.expect_error("user_in_channel", "channel_join", channel=channel_name)
        line.expect_error("invalid_request", "channel_publish", channel=channel_name, payload="x", qos=7)
        line.expect_error("invalid_json", "channel_publish", channel=channel_name, payload="x", qos="1")
        line.expect_error("invalid_request", "channel_publish", channel=channel_name)
        line.expect_error("record_too_large", "channel_publish", channel=channel_name, payload="x" * 11)
        line.expect_error("invalid_request", "channel_members", channel=channel_name, page=0)
        line.expect_error("invalid_request", "channel_history", channel=channel_name, first=0)
        line.expect_error("persistence_not_enabled", "channel_history", channel=channel_name)
        line.expect_error("wrong_type", "channel_pop", channel=channel_name)
        line.expect_error("invalid_request", "channel_acl", channel=channel_name, kind="write", add=[])
        line.expect_error("invalid_request", "channel_configure", channel=channel_name, config={"colour": 1})
        line.expect_error("invalid_request", "channel_subscribe", channel=channel_name, from_seq=-1)
        line.expect_error("invalid_json", "channel_jion", channel=channel_name)
        cat.expect_error("not_a_member", "channel_publish", channel=channel_name, payload="x")
        cat.expect_error("not_a_member", "channel_subscribe", channel=channel_name)
        cat.expect_error("forbidden", "channel_delete", channel=channel_name)
        eve.expect_error("forbidden", "channel_join", channel=channel_name)
        eve.expect_error("not_a_member", "channel_members", channel=channel_name)
        assert line.request("channel_publish", "channel_ack", channel=channel_name, payload="x")["first_seq"] == 1
        line.request("channel_leave", "channel_left", channel=channel_name)
    with ChannelSocket(channel_server, key="own") as own:
        own.expect_error("forbidden", "channel_join", channel=channel_name)
        own.request("channel_join", "channel_joined", channel=f"!own-{name('x')}@example.org")
    with ChannelSocket(channel_server, key="ann", headers={"X-Tidelog-User": BOB}) as line:
        line.expect_error("forbidden", "channel_join", channel=channel_name)
    with ChannelSocket(channel_server, key="root", headers={"X-Tidelog-User": EVE}) as line:
        assert line.request("channel_join", "channel_joined", channel=channel_name)["user"] == EVE


@pytest.mark.parametrize("persist", [True, False])
def test_many_publishes_under_way_are_acknowledged_in_order(
    channel_server: Server, ann: ChannelApi, channel_name: str, persist: bool
) -> None:
    with ChannelSocket(channel_server, key="bob") as line, ChannelSocket(channel_server, key="ann") as other:
        line.request("channel_join", "channel_joined", channel=channel_name, config={"persist": persist})
        other.request("channel_join", "channel_joined", channel=channel_name)
        other.request("channel_subscribe", "channel_subscribed", channel=channel_name)
        for number in range(300):
            line.send(op="channel_publish", request_id=number, channel=channel_name, payload=str(number))
        line.send(op="channel_leave", request_id="end", channel=channel_name)
        acks = [line.receive("channel_ack") for _ in range(300)]
        assert [ack["request_id"] for ack in acks] == list(range(300))
        assert [ack["first_seq"] for ack in acks] == list(range(1, 301))
        assert line.receive("channel_left")["request_id"] == "end", "what was said before it was said before it"
        heard = [other.receive("message") for _ in range(300)]
        assert [(message["seq"], message["payload"]) for message in heard] == [(n + 1, str(n)) for n in range(300)]
        if persist:
            flushes = ann.scraped_metric('tidelog_message_log_flushes_total{result="success"}')
            assert flushes > 0


def test_topics_and_channels_share_a_socket(channel_server: Server, channel_name: str, name: Name) -> None:
    with ChannelSocket(channel_server, key="root") as line:
        line.request("publish", "ack", topic=name("t"), records=[{"data": 1}])
        line.request("channel_join", "channel_joined", channel=channel_name)
        line.request("subscribe", "subscribed", topic=name("t"))
        assert line.receive("record")["topic"] == name("t")
        line.receive("caught_up")
        line.request("channel_publish", "channel_ack", channel=channel_name, payload="x")


# ── slow receivers, and the end ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["sse", "ws"])
def test_receiver_that_reads_nothing_is_disconnected_and_delays_no_other(
    tmp_path: Path, channel_name: str, kind: str
) -> None:
    """Its queue is full long before a minute is over: 2,048 messages of 8 KiB behind what its socket holds."""
    with Server(tmp_path / "s", api_keys=KEYS).start() as server, channel_api(server, "ann") as ann:
        ann.create(channel_name)
        ann.join(channel_name, user=BOB)
        slow: ChannelEvents | ChannelSocket = (
            ChannelEvents(server, channel_name, key="bob") if kind == "sse" else ChannelSocket(server, key="bob")
        )
        if isinstance(slow, ChannelSocket):
            slow.request("channel_subscribe", "channel_subscribed", channel=channel_name)
            slow.raw.socket.settimeout(30)
        with ChannelEvents(server, channel_name, key="ann", timeout_s=30) as fast:
            text = "x" * 8192
            for turn in range(40):
                ann.publish(channel_name, *([text] * 100))
                assert len(fast.texts(100)) == 100, turn
                if ann.scraped_metric('tidelog_outbound_queue_full_total{result="slow"}'):
                    break
            assert ann.scraped_metric('tidelog_outbound_queue_full_total{result="slow"}') == 1
            assert ann.publish(channel_name, "on and on")["receivers"] == 1
            assert fast.texts(1) == ["on and on"]
            assert ann.metric("channel_receivers") == 1
        last = 0
        if isinstance(slow, ChannelEvents):
            while (found := slow.next_event()).name == "message":
                last = found.data["seq"]
            assert (found.name, found.data["reason"], found.data["last_seq"]) == ("end", "slow", last)
            assert slow.is_over()
            slow.wire.close()
        else:
            while (message := slow.receive())["op"] == "message":
                last = message["seq"]
            assert (message["op"], message["reason"], message["last_seq"]) == ("channel_end", "slow", last)
            slow.request("channel_members", "channel_members", channel=channel_name)
            slow.raw.close()
        eventually(lambda: ann.metric("sse_connections") == 0)


@pytest.mark.parametrize("persist", [True, False])
def test_burst_larger_than_a_queue_disconnects_no_reader(
    channel_server: Server, ann: ChannelApi, bob: ChannelApi, channel_name: str, persist: bool
) -> None:
    """Publishers wait for the turn of the receivers, not the other way round."""
    ann.create(channel_name, persist=persist, message_flush_interval=1000)
    bob.join(channel_name)
    before = ann.scraped_metric('tidelog_outbound_queue_full_total{result="slow"}')
    batch = [{"payload": "x"}] * 1000
    with ExitStack() as open_, ChannelSocket(channel_server, key="ann") as line:
        lines = [
            open_.enter_context(ChannelEvents(channel_server, channel_name, key="bob", timeout_s=60)) for _ in range(3)
        ]
        for number in range(8):
            line.send(op="channel_publish", request_id=number, channel=channel_name, messages=batch)
        for heard in lines:
            assert [heard.next_event().id for _ in range(8000)] == list(range(1, 8001))
        assert [line.receive("channel_ack", 30)["request_id"] for _ in range(8)] == list(range(8))
    assert ann.scraped_metric('tidelog_outbound_queue_full_total{result="slow"}') == before


def test_shutdown_is_sent_to_every_stream(tmp_path: Path, channel_name: str) -> None:
    with Server(tmp_path / "s", api_keys=KEYS).start() as server:
        with channel_api(server, "ann") as ann:
            ann.create(channel_name, persist=True)
        with ChannelEvents(server, channel_name, key="ann") as heard, ChannelSocket(server, key="ann") as line:
            line.request("channel_subscribe", "channel_subscribed", channel=channel_name)
            server.stop()
            assert heard.expect_event("error")["code"] == "server_shutting_down"
            assert heard.is_over()
            assert line.receive("error")["code"] == "server_shutting_down"
            with pytest.raises(ConnectionClosed) as closed:
                line.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001


# ── nonsense ──────────────────────────────────────────────────────────────────────────────────────

_VALUES: list[object] = [
    *(None, True, 0, 1, -1, 7, 1 << 31, 1 << 63, -(1 << 63), 10**30, 1.5, "", "x", "ü\u2028", "\x00", [], [1], {}),
    *({"persist": True}, {"type": "fifo"}, {"max_clients": 10**30}, ["a@b.c", None], [{"payload": "x"}], "x" * 5000),
    *("!room@example.org", "!room", ANN, "example.org", "/w==", "publish", [{"payload": 1}], {"payload": "x"}),
]
_OPS = {
    "channel_join": ("user", "config"),
    "channel_leave": ("user",),
    "channel_subscribe": ("from_seq",),
    "channel_unsubscribe": (),
    "channel_publish": ("payload", "payload_base64", "messages", "qos"),
    "channel_history": ("first", "last", "newest", "since", "until", "limit"),
    "channel_members": ("page", "page_size"),
    "channel_configure": ("config",),
    "channel_acl": ("kind", "add", "remove"),
    "channel_delete": (),
    "channel_push": ("payload", "payload_base64"),
    "channel_pop": (),
    "channel_clear": (),
}


def test_nonsense_is_refused_command_by_command(
    channel_server: Server, ann: ChannelApi, channel_name: str, name: Name
) -> None:
    """Every field of every command with every kind of value, over one socket: no 500, and the server lives on."""
    chance, jobs = Random(7), f"!{name('jobs')}@example.org"
    codes: set[str] = set()
    with ChannelSocket(channel_server, key="ann") as line:
        for number in range(1500):
            if number % 100 == 0:
                for each, kind in ((channel_name, "pubsub"), (jobs, "fifo")):
                    ann.request("PUT", channel_path(each), dumps({"persist": True, "type": kind}), [JSON])
            op = chance.choice(list(_OPS))
            command = {field: chance.choice(_VALUES) for field in _OPS[op] if chance.random() < 0.7}
            channel = (
                chance.choice([channel_name, channel_name, jobs, *_VALUES])
                if chance.random() < 0.3
                else chance.choice([channel_name, jobs])
            )
            line.send(op=op, request_id=number, channel=channel, **command)
            while (said := line.receive()).get("request_id") != number:
                assert said["op"] in ("message", "presence", "channel_end", "gap"), said
            codes.add(said.get("code", ""))
    assert "internal" not in codes, codes
    assert {"invalid_json", "invalid_request", "wrong_type", ""} <= codes
    expect_success(ann.get("/v0/channels"))


@pytest.mark.parametrize(
    "rest",
    [
        *(f"/history?{field}={value}" for field in ("first", "last", "newest", "since", "until", "limit")
          for value in ("9223372036854775807", "9999999999999999999", "99999999999999999999", "-1", "1e3", "%00", "")),
        "/members?page=9999999999999999999",
        "/members?page=9999999999999999999&page_size=9999999999999999999",
        "/events?from_seq=9999999999999999999",
    ],
)  # fmt: skip
def test_numbers_that_are_too_large_break_nothing(channel_server: Server, channel_name: str, rest: str) -> None:
    with channel_api(channel_server, "ann") as ann:
        ann.request("PUT", channel_path(channel_name), dumps({"persist": True}), [JSON])
        ann.publish(channel_name, "x")
        if rest.startswith("/events"):
            with ChannelEvents(channel_server, channel_name, rest[7:], key="ann") as heard:
                ann.publish(channel_name, "y")
                assert heard.texts(1) == ["y"]
        else:
            assert ann.get(channel_path(channel_name, rest)).status in (200, 400)
        expect_success(ann.delete(channel_path(channel_name)))
