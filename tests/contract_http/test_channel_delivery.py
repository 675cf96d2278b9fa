"""What members of a channel are told over SSE and WebSocket: messages, presence, gaps, ends. docs/http.md."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from websockets.exceptions import ConnectionClosed

from tests.contract_http.api import ANY, good, refused
from tests.contract_http.client import JSON, Wire, dumps
from tests.contract_http.rooms import ANN, BOB, CAT, EVE, KEYS, Heard, Line, Member, at, member
from tests.contract_http.server import Server
from tests.contract_http.waits import eventually

Name = Callable[[str], str]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("house")
    with Server(folder, api_keys=KEYS, channel_grace_ms=100).start() as running:
        yield running


@pytest.fixture
def room(name: Name) -> str:
    return f"!{name('room')}@example.org"


@pytest.fixture
def ann(house: Server) -> Iterator[Member]:
    with member(house, "ann") as client:
        yield client


@pytest.fixture
def bob(house: Server) -> Iterator[Member]:
    with member(house, "bob") as client:
        yield client


@pytest.fixture(autouse=True)
def empty(house: Server) -> Iterator[None]:
    """Whatever a test does, no slot and no receiver is left."""
    yield
    with member(house, "root") as root:
        eventually(lambda: root.figure("sse_connections") == 0 and root.figure("channel_receivers") == 0, 10)


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("persist", [True, False])
def test_a_member_hears_what_is_said_and_who_comes_and_goes(
    house: Server, ann: Member, bob: Member, room: str, persist: bool
) -> None:
    ann.make(room, persist=persist)
    bob.join(room)
    with Heard(house, room, key="bob") as heard:
        assert heard.head.header("content-type") == "text/event-stream"
        assert heard.head.header("cache-control") == "no-store"
        stream = heard.hello.pop("stream")
        assert stream.startswith("st_")
        assert heard.hello == {"channel": room, "user": BOB}
        ack = ann.say(room, "hello")
        assert ack["receivers"] == 1
        first = heard.one()
        assert (first.name, first.id) == ("message", 1)
        assert first.data == {"channel": room, "seq": 1, "ts": ack["ts"], "sender": ANN, "payload": "hello"}
        ann.verb(room, "publish", payload_base64=base64.b64encode(b"\xff").decode())
        assert heard.one().data["payload_base64"] == "/w=="
        ann.join(room, user=CAT)
        joined = heard.said("presence")
        assert joined.pop("ts") >= ack["ts"]
        assert joined == {"channel": room, "kind": "joined", "user": CAT, "owner": False}
        good(ann.put(at(room), {"max_clients": 7}))
        assert heard.said("presence")["kind"] == "reconfigured"
        ann.leave(room, user=CAT)
        assert heard.said("presence")["kind"] == "left"
        ann.leave(room)
        gone, promoted = heard.said("presence"), heard.said("presence")
        assert (gone["kind"], gone["user"], gone["owner"]) == ("left", ANN, True)
        assert (promoted["kind"], promoted["user"], promoted["owner"]) == ("joined", BOB, True)
        good(bob.delete(at(room)))
        assert heard.said("presence")["kind"] == "deleted"
        assert heard.said("end") == {"channel": room, "reason": "deleted", "last_seq": 2}
        assert heard.is_over()


def test_a_stream_does_not_hear_what_its_own_client_says(house: Server, ann: Member, bob: Member, room: str) -> None:
    ann.make(room)
    bob.join(room)
    with (
        Heard(house, room, key="bob") as one,
        Heard(house, room, key="bob") as two,
        Heard(house, room, key="ann") as three,
    ):
        said = bob.say(room, "mine", stream=one.hello["stream"])
        assert said["receivers"] == 2
        assert (two.texts(1), three.texts(1)) == (["mine"], ["mine"])
        bob.request(
            "POST",
            at(room, "/publish"),
            b"bytes",
            [("Content-Type", "application/octet-stream"), ("X-Tidelog-Stream", one.hello["stream"])],
        )
        assert two.texts(1) == ["bytes"]
        ann.say(room, "not mine", stream=one.hello["stream"])
        assert one.texts(1) == ["not mine"], "another's stream cannot be made deaf"
        bob.say(room, "elsewhere", stream="st_nobody")
        assert one.texts(1) == ["elsewhere"]


def test_who_is_sent_away_is_told_and_the_stream_ends(house: Server, ann: Member, bob: Member, room: str) -> None:
    ann.make(room)
    bob.join(room)
    with Heard(house, room, key="bob") as heard:
        ann.say(room, "last words")
        ann.leave(room, user=BOB)
        assert heard.texts(1) == ["last words"]
        found = [heard.one() for _ in range(2)]
        assert [each.name for each in found] == ["presence", "end"]
        assert found[1].data == {"channel": room, "reason": "left", "last_seq": 1}
        assert heard.is_over()
    Heard(house, room, key="bob").refuses(403, "not_a_member", {"channel": room, "user": BOB})


def test_the_read_list_decides_who_sees_messages_and_everybody_sees_presence(
    house: Server, ann: Member, bob: Member, room: str
) -> None:
    ann.make(room, persist=True)
    bob.join(room)
    with Heard(house, room, key="bob") as heard:
        ann.verb(room, "acl", kind="read", add=[ANN])
        assert ann.say(room, "secret")["receivers"] == 0
        ann.join(room, user=CAT)
        assert heard.said("presence")["user"] == CAT
        ann.verb(room, "acl", kind="read", remove=[ANN])
        ann.say(room, "open")
        assert heard.texts(1) == ["open"]
    with Heard(house, room, "?from_seq=0", key="bob") as heard:
        assert heard.texts(2) == ["secret", "open"]
        ann.verb(room, "acl", kind="read", add=[ANN])
    with Heard(house, room, "?from_seq=0", key="bob") as heard:
        ann.leave(room, user=CAT)
        assert heard.said("presence")["user"] == CAT, "there was nothing that it could have missed"


def test_a_client_that_comes_back_misses_nothing(house: Server, ann: Member, bob: Member, room: str) -> None:
    ann.make(room, persist=True)
    bob.join(room)
    with Heard(house, room, key="bob") as heard:
        ann.say(room, "1", "2", "3")
        assert heard.texts(3) == ["1", "2", "3"]
    ann.say(room, *(str(number) for number in range(4, 304)))
    with Heard(house, room, key="bob", Last_Event_ID="2") as heard:
        assert heard.texts(301) == [str(number) for number in range(3, 304)], "more than one page of history"
        ann.say(room, "live")
        assert heard.texts(1) == ["live"]
    with Heard(house, room, key="bob", Last_Event_ID="304") as heard:
        ann.say(room, "next")
        assert heard.texts(1) == ["next"]
    with Heard(house, room, key="bob", Last_Event_ID="not ours") as heard:
        ann.say(room, "from now on")
        assert heard.texts(1) == ["from now on"]


def test_nothing_is_sent_twice_or_left_out_while_catching_up(
    house: Server, ann: Member, bob: Member, room: str
) -> None:
    """Readers come while others write: history and live have to meet without a seam."""
    ann.make(room, persist=True, message_flush_interval=1000)
    bob.join(room)
    for turn in range(10):
        ann.say(room, *("x" for _ in range(50)))
        with Heard(house, room, "?from_seq=0", key="bob") as heard:
            for _ in range(5):
                ann.say(room, "y", "z")
            seqs = [heard.one().id for _ in range((turn + 1) * 60)]
            assert seqs == list(range(1, (turn + 1) * 60 + 1))


def test_what_is_not_kept_any_more_is_told_as_a_gap(house: Server, ann: Member, bob: Member, room: str) -> None:
    ann.make(room, persist=True, max_persist_messages=10)
    bob.join(room)
    for _ in range(10):
        ann.say(room, *("x" for _ in range(40)))
    oldest = ann.history(room, "?limit=1")["first_seq"]
    assert oldest > 1
    with Heard(house, room, "?from_seq=0", key="bob") as heard:
        assert heard.said("gap") == {"channel": room, "from_seq": 1, "to_seq": oldest - 1}
        assert heard.one().id == oldest


def test_a_channel_that_keeps_nothing_tells_what_was_missed(house: Server, ann: Member, bob: Member, room: str) -> None:
    ann.make(room)
    bob.join(room)
    ann.say(room, "1", "2", "3")
    with Heard(house, room, key="bob", Last_Event_ID="1") as heard:
        assert heard.said("gap") == {"channel": room, "from_seq": 2, "to_seq": 3}
        ann.say(room, "4")
        assert heard.one().id == 4
    with Heard(house, room, key="bob", Last_Event_ID="4") as heard:
        ann.say(room, "5")
        assert heard.one().id == 5


def test_refusals_of_a_stream(house: Server, ann: Member, room: str) -> None:
    ann.make(room)
    assert ann.request("HEAD", at(room, "/events")).status == 200
    refused(ann.get(at(room, "/events"), [("Accept", "application/json")]), 406, "not_acceptable")
    refused(ann.get(at(room, "/events?from_seq=x")), 400, "invalid_request")
    Heard(house, room).refuses(401, "unauthorized", None)
    with Heard(house, room, "?token=ann") as heard:
        assert heard.hello["user"] == ANN, "for clients that cannot set headers"
    with Heard(house, room, f"?token=root&user={ANN}") as heard:
        assert heard.hello["user"] == ANN


def test_streams_are_counted_and_given_back(tmp_path: Path, room: str) -> None:
    caps = {"max_sse_connections": 3, "max_sse_connections_per_key": 2}
    with Server(tmp_path / "s", api_keys=KEYS, **caps).start() as server, member(server, "ann") as ann:
        ann.make(room)
        for _ in range(3):
            with Heard(server, room, key="ann"), Line(server, key="ann"):
                assert ann.figure("sse_connections") == 2
                Heard(server, room, key="ann").refuses(429, "throttled", None)
                assert ann.figure("channel_receivers") == 1
            eventually(lambda: ann.figure("sse_connections") == 0 and ann.figure("channel_receivers") == 0)
        for _ in range(5):
            Heard(server, "!nowhere@example.org", key="ann").refuses(404, "channel_not_found", ANY)
        assert (ann.figure("sse_connections"), ann.figure("channel_receivers")) == (0, 0)
        wires = [Wire(server.address) for _ in range(2)]
        for wire in wires:  # they leave while their answer is on its way
            wire.send(
                f"GET {at(room, '/events')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ann\r\n\r\n".encode()
            )
            wire.abort()
        eventually(lambda: ann.figure("sse_connections") == 0 and ann.figure("channel_receivers") == 0)


# ── who is here ───────────────────────────────────────────────────────────────────────────────────


def test_who_has_no_connection_any_more_leaves_what_does_not_persist(
    house: Server, ann: Member, bob: Member, name: Name
) -> None:
    short, long = f"!{name('short')}@example.org", f"!{name('long')}@example.org"
    for each in (short, long):
        ann.make(each, persist=each == long)
        bob.join(each)
    with Heard(house, short, key="ann") as heard:
        with Heard(house, short, key="bob"), Line(house, key="bob") as line:
            line.ask("channel_members", "channel_members", channel=short)
        left = heard.said("presence")
        assert (left["kind"], left["user"]) == ("left", BOB)
        assert BOB in good(ann.get(at(long, "/members")))["members"]
    eventually(lambda: ann.get(at(short)).status == 404)


# ── the socket ────────────────────────────────────────────────────────────────────────────────────


def test_a_socket_joins_hears_and_says(house: Server, ann: Member, room: str) -> None:
    with Line(house, key="ann") as one, Line(house, key="bob") as two:
        joined = one.ask("channel_join", "channel_joined", channel=room, config={"persist": True})
        assert joined == {
            "op": "channel_joined",
            "channel": room,
            "user": ANN,
            "owner": ANN,
            "members": 1,
            "created": True,
        }
        one.ask("channel_subscribe", "channel_subscribed", channel=room)
        two.ask("channel_join", "channel_joined", channel=room)
        there = one.hear("presence")
        assert (there["kind"], there["user"], there["owner"]) == ("joined", BOB, False)
        subscribed = two.ask("channel_subscribe", "channel_subscribed", channel=room)
        assert subscribed == {"op": "channel_subscribed", "channel": room, "user": BOB}
        ack = one.ask("channel_publish", "channel_ack", channel=room, payload="hello")
        ts = ack.pop("ts")
        assert ack == {
            "op": "channel_ack",
            "channel": room,
            "first_seq": 1,
            "last_seq": 1,
            "count": 1,
            "qos": 1,
            "durable": True,
            "receivers": 1,
        }
        assert two.hear() == {
            "op": "message",
            "channel": room,
            "seq": 1,
            "ts": ts,
            "sender": ANN,
            "payload": "hello",
        }
        quick = two.ask(
            "channel_publish", "channel_ack", channel=room, messages=[{"payload": "a"}, {"payload": "b"}], qos=0
        )
        assert (quick["first_seq"], quick["last_seq"], quick["qos"], quick["durable"]) == (2, 3, 0, False)
        assert [one.hear("message")["payload"] for _ in range(2)] == ["a", "b"], "and not what it said itself"
        found = two.ask("channel_history", "channel_history", channel=room, newest=2)
        assert [message["payload"] for message in found["messages"]] == ["a", "b"]
        assert (found["count"], found["next_seq"], found["first_seq"], found["last_seq"]) == (2, 4, 1, 3)
        members = two.ask("channel_members", "channel_members", channel=room)
        assert (members["members"], members["total"]) == ([ANN, BOB], 2)
        listed = one.ask("channel_acl", "channel_acl", channel=room, kind="read", add=[ANN, BOB])
        assert listed["listed"] == [ANN, BOB]
        one.ask("channel_configure", "channel_configured", channel=room, config={"max_clients": 9})
        assert two.hear("presence")["kind"] == "reconfigured"
        left = two.ask("channel_unsubscribe", "channel_unsubscribed", channel=room)
        assert left["was"] is True
        one.ask("channel_publish", "channel_ack", channel=room, payload="unheard")
        assert two.ask("channel_subscribe", "channel_subscribed", channel=room, from_seq=3)
        assert two.hear("message")["payload"] == "unheard"
        one.ask("channel_leave", "channel_left", channel=room, user=BOB)
        assert [two.hear("presence")["kind"], two.hear("channel_end")["reason"]] == ["left", "left"]
        one.send(op="channel_delete", request_id="r", channel=room)
        found = {said["op"]: said for said in (one.hear(), one.hear())}
        assert found["channel_deleted"]["deleted"] is True
        assert found["channel_end"]["reason"] == "deleted"
    refused(ann.get(at(room)), 404, "channel_not_found", {"channel": room})


def test_to_subscribe_again_goes_on_where_it_was(house: Server, ann: Member, bob: Member, room: str) -> None:
    """Nothing twice and nothing left out, also while others write."""
    ann.make(room, persist=True, message_flush_interval=1000)
    bob.join(room)
    with Line(house, key="bob") as line:
        line.ask("channel_subscribe", "channel_subscribed", channel=room)
        seqs: list[int] = []
        for turn in range(1, 21):
            ann.say(room, *("x" for _ in range(10)))
            line.send(op="channel_subscribe", request_id="r", channel=room)
            ann.say(room, "y")
            while len(seqs) < turn * 11:
                said = line.hear()
                if said["op"] == "message":
                    seqs.append(said["seq"])
        assert seqs == list(range(1, 221))
    transient = room.replace("room", "plain")
    with Line(house, key="ann") as hers, Line(house, key="bob") as line:
        # Over sockets: whose last one was closed a moment ago is about to leave what does not persist.
        for each in (hers, line):
            each.ask("channel_join", "channel_joined", channel=transient)
        line.ask("channel_subscribe", "channel_subscribed", channel=transient)
        ann.say(transient, "1")
        assert line.hear("message")["seq"] == 1
        line.ask("channel_subscribe", "channel_subscribed", channel=transient)
        ann.say(transient, "2")
        assert line.hear("message")["seq"] == 2


def test_a_fifo_channel_over_a_socket(house: Server, room: str) -> None:
    with Line(house, key="ann") as line:
        line.ask("channel_join", "channel_joined", channel=room, config={"persist": True, "type": "fifo"})
        assert line.ask("channel_push", "channel_pushed", channel=room, payload="job")["seq"] == 1
        popped = line.ask("channel_pop", "channel_popped", channel=room)
        assert (popped["payload"], popped["seq"], popped["sender"]) == ("job", 1, ANN)
        line.fails("queue_empty", "channel_pop", channel=room)
        line.ask("channel_push", "channel_pushed", channel=room, payload_base64="/w==")
        assert line.ask("channel_clear", "channel_cleared", channel=room)["cleared"] == 1
        line.ask("channel_leave", "channel_left", channel=room)


def test_a_command_that_is_refused_leaves_the_socket_as_it_was(house: Server, room: str, name: Name) -> None:
    with Line(house, key="ann") as line, Line(house, key="cat") as cat, Line(house, key="eve") as eve:
        line.fails("channel_not_found", "channel_publish", channel=room, payload="x")
        line.fails("invalid_request", "channel_join", channel="room")
        line.fails("channel_not_found", "channel_subscribe", channel=room)
        line.ask("channel_join", "channel_joined", channel=room, config={"max_payload_size": 10})
        line.fails("user_in_channel", "channel_join", channel=room)
        line.fails("invalid_request", "channel_publish", channel=room, payload="x", qos=7)
        line.fails("invalid_json", "channel_publish", channel=room, payload="x", qos="1")
        line.fails("invalid_request", "channel_publish", channel=room)
        line.fails("record_too_large", "channel_publish", channel=room, payload="x" * 11)
        line.fails("invalid_request", "channel_members", channel=room, page=0)
        line.fails("invalid_request", "channel_history", channel=room, first=0)
        line.fails("persistence_not_enabled", "channel_history", channel=room)
        line.fails("wrong_type", "channel_pop", channel=room)
        line.fails("invalid_request", "channel_acl", channel=room, kind="write", add=[])
        line.fails("invalid_request", "channel_configure", channel=room, config={"colour": 1})
        line.fails("invalid_request", "channel_subscribe", channel=room, from_seq=-1)
        line.fails("invalid_json", "channel_jion", channel=room)
        cat.fails("not_a_member", "channel_publish", channel=room, payload="x")
        cat.fails("not_a_member", "channel_subscribe", channel=room)
        cat.fails("forbidden", "channel_delete", channel=room)
        eve.fails("forbidden", "channel_join", channel=room)
        eve.fails("not_a_member", "channel_members", channel=room)
        assert line.ask("channel_publish", "channel_ack", channel=room, payload="x")["first_seq"] == 1
        line.ask("channel_leave", "channel_left", channel=room)
    with Line(house, key="own") as own:
        own.fails("forbidden", "channel_join", channel=room)
        own.ask("channel_join", "channel_joined", channel=f"!own-{name('x')}@example.org")
    with Line(house, key="ann", headers={"X-Tidelog-User": BOB}) as line:
        line.fails("forbidden", "channel_join", channel=room)
    with Line(house, key="root", headers={"X-Tidelog-User": EVE}) as line:
        assert line.ask("channel_join", "channel_joined", channel=room)["user"] == EVE


@pytest.mark.parametrize("persist", [True, False])
def test_many_publishes_under_way_are_acknowledged_in_order(
    house: Server, ann: Member, room: str, persist: bool
) -> None:
    with Line(house, key="bob") as line, Line(house, key="ann") as other:
        line.ask("channel_join", "channel_joined", channel=room, config={"persist": persist})
        other.ask("channel_join", "channel_joined", channel=room)
        other.ask("channel_subscribe", "channel_subscribed", channel=room)
        for number in range(300):
            line.send(op="channel_publish", request_id=number, channel=room, payload=str(number))
        line.send(op="channel_leave", request_id="end", channel=room)
        acks = [line.hear("channel_ack") for _ in range(300)]
        assert [ack["request_id"] for ack in acks] == list(range(300))
        assert [ack["first_seq"] for ack in acks] == list(range(1, 301))
        assert line.hear("channel_left")["request_id"] == "end", "what was said before it was said before it"
        heard = [other.hear("message") for _ in range(300)]
        assert [(message["seq"], message["payload"]) for message in heard] == [(n + 1, str(n)) for n in range(300)]
        if persist:
            flushes = ann.scraped('tidelog_message_log_flushes_total{result="success"}')
            assert flushes > 0


def test_topics_and_channels_share_a_socket(house: Server, room: str, name: Name) -> None:
    with Line(house, key="root") as line:
        line.ask("publish", "ack", topic=name("t"), records=[{"data": 1}])
        line.ask("channel_join", "channel_joined", channel=room)
        line.ask("subscribe", "subscribed", topic=name("t"))
        assert line.hear("record")["topic"] == name("t")
        line.hear("caught_up")
        line.ask("channel_publish", "channel_ack", channel=room, payload="x")


# ── slow receivers, and the end ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["sse", "ws"])
def test_a_receiver_that_takes_nothing_is_told_and_let_go_and_nobody_waits_for_it(
    tmp_path: Path, room: str, kind: str
) -> None:
    """Its queue is full long before a minute is over: 2,048 messages of 8 KiB behind what its socket holds."""
    with Server(tmp_path / "s", api_keys=KEYS).start() as server, member(server, "ann") as ann:
        ann.make(room)
        ann.join(room, user=BOB)
        slow: Heard | Line = Heard(server, room, key="bob") if kind == "sse" else Line(server, key="bob")
        if isinstance(slow, Line):
            slow.ask("channel_subscribe", "channel_subscribed", channel=room)
            slow.raw.socket.settimeout(30)
        with Heard(server, room, key="ann", patience_s=30) as fast:
            text = "x" * 8192
            for turn in range(40):
                ann.say(room, *([text] * 100))
                assert len(fast.texts(100)) == 100, turn
                if ann.scraped('tidelog_outbound_queue_full_total{result="slow"}'):
                    break
            assert ann.scraped('tidelog_outbound_queue_full_total{result="slow"}') == 1
            assert ann.say(room, "on and on")["receivers"] == 1
            assert fast.texts(1) == ["on and on"]
            assert ann.figure("channel_receivers") == 1
        last = 0
        if isinstance(slow, Heard):
            while (found := slow.one()).name == "message":
                last = found.data["seq"]
            assert (found.name, found.data["reason"], found.data["last_seq"]) == ("end", "slow", last)
            assert slow.is_over()
            slow.wire.close()
        else:
            while (message := slow.hear())["op"] == "message":
                last = message["seq"]
            assert (message["op"], message["reason"], message["last_seq"]) == ("channel_end", "slow", last)
            slow.ask("channel_members", "channel_members", channel=room)
            slow.raw.close()
        eventually(lambda: ann.figure("sse_connections") == 0)


@pytest.mark.parametrize("persist", [True, False])
def test_a_burst_that_is_larger_than_a_queue_cuts_nobody_off_who_reads(
    house: Server, ann: Member, bob: Member, room: str, persist: bool
) -> None:
    """Publishers wait for the turn of the receivers, not the other way round."""
    ann.make(room, persist=persist, message_flush_interval=1000)
    bob.join(room)
    before = ann.scraped('tidelog_outbound_queue_full_total{result="slow"}')
    batch = [{"payload": "x"}] * 1000
    with ExitStack() as open_, Line(house, key="ann") as line:
        lines = [open_.enter_context(Heard(house, room, key="bob", patience_s=60)) for _ in range(3)]
        for number in range(8):
            line.send(op="channel_publish", request_id=number, channel=room, messages=batch)
        for heard in lines:
            assert [heard.one().id for _ in range(8000)] == list(range(1, 8001))
        assert [line.hear("channel_ack", 30)["request_id"] for _ in range(8)] == list(range(8))
    assert ann.scraped('tidelog_outbound_queue_full_total{result="slow"}') == before


def test_a_stop_is_told_to_everybody(tmp_path: Path, room: str) -> None:
    with Server(tmp_path / "s", api_keys=KEYS).start() as server:
        with member(server, "ann") as ann:
            ann.make(room, persist=True)
        with Heard(server, room, key="ann") as heard, Line(server, key="ann") as line:
            line.ask("channel_subscribe", "channel_subscribed", channel=room)
            server.stop()
            assert heard.said("error")["code"] == "server_shutting_down"
            assert heard.is_over()
            assert line.hear("error")["code"] == "server_shutting_down"
            with pytest.raises(ConnectionClosed) as closed:
                line.hear()
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


def test_nonsense_is_refused_command_by_command(house: Server, ann: Member, room: str, name: Name) -> None:
    """Every field of every command with every kind of value, over one socket: no 500, and the server lives on."""
    chance, jobs = Random(7), f"!{name('jobs')}@example.org"
    codes: set[str] = set()
    with Line(house, key="ann") as line:
        for number in range(1500):
            if number % 100 == 0:
                for each, kind in ((room, "pubsub"), (jobs, "fifo")):
                    ann.request("PUT", at(each), dumps({"persist": True, "type": kind}), [JSON])
            op = chance.choice(list(_OPS))
            command = {field: chance.choice(_VALUES) for field in _OPS[op] if chance.random() < 0.7}
            channel = (
                chance.choice([room, room, jobs, *_VALUES]) if chance.random() < 0.3 else chance.choice([room, jobs])
            )
            line.send(op=op, request_id=number, channel=channel, **command)
            while (said := line.hear()).get("request_id") != number:
                assert said["op"] in ("message", "presence", "channel_end", "gap"), said
            codes.add(said.get("code", ""))
    assert "internal" not in codes, codes
    assert {"invalid_json", "invalid_request", "wrong_type", ""} <= codes
    good(ann.get("/v0/channels"))


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
def test_numbers_that_are_too_large_break_nothing(house: Server, room: str, rest: str) -> None:
    with member(house, "ann") as ann:
        ann.request("PUT", at(room), dumps({"persist": True}), [JSON])
        ann.say(room, "x")
        if rest.startswith("/events"):
            with Heard(house, room, rest[7:], key="ann") as heard:
                ann.say(room, "y")
                assert heard.texts(1) == ["y"]
        else:
            assert ann.get(at(room, rest)).status in (200, 400)
        good(ann.delete(at(room)))
