"""Channels over HTTP: every endpoint, every refusal, and that a refusal changes nothing. docs/http.md, "Channels"."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract_http.api import ANY, good, refused
from tests.contract_http.client import JSON
from tests.contract_http.rooms import ANN, BOB, CAT, EVE, KEYS, Member, at, member, reply_of
from tests.contract_http.server import Server

Name = Callable[[str], str]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys that name users, and limits that can be reached."""
    caps = {"max_channels_per_user": 40, "max_channel_payload_bytes": 1000, "max_channel_members": 5}
    with Server(tmp_path_factory.mktemp("house"), api_keys=KEYS, **caps).start() as running:
        yield running


@pytest.fixture
def room(name: Name) -> str:
    return f"!{name('room')}@example.org"


@pytest.fixture
def ann(house: Server) -> Iterator[Member]:
    with member(house, "ann") as client:
        yield client
        for row in good(client.get("/v0/channels?page_size=1000"))["channels"]:
            client.delete(at(row["channel"]))


@pytest.fixture
def bob(house: Server) -> Iterator[Member]:
    with member(house, "bob") as client:
        yield client


@pytest.fixture
def root(house: Server) -> Iterator[Member]:
    with member(house, "root") as client:
        yield client


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


def test_put_makes_a_channel_and_then_changes_it(ann: Member, room: str) -> None:
    made = ann.make(room, persist=True, max_clients=3)
    assert made.keys() == {"channel", "type", "owner", "members", "persist", "created", "config", "performance"}
    assert (made["channel"], made["owner"], made["members"], made["created"]) == (room, ANN, 1, True)
    assert made["config"] == {
        "max_clients": 3,
        "max_payload_size": 1000,
        "max_persist_messages": 1000,
        "persist": True,
        "message_flush_interval": 0,
        "type": "pubsub",
    }
    changed = good(ann.put(at(room), {"message_flush_interval": 50}))
    assert (changed["created"], changed["config"]["message_flush_interval"]) == (False, 50)
    assert changed["config"]["max_clients"] == 3, "what is not named stays"
    assert ann.look(room)["config"] == changed["config"]


def test_a_handler_with_slashes_goes_percent_encoded(ann: Member, name: Name) -> None:
    deep = f"!{name('a')}/b/c@example.org"
    assert "%2F" in at(deep)
    ann.make(deep, persist=True)
    ann.say(deep, "hello")
    assert ann.texts(deep) == ["hello"]
    assert ann.look(deep)["channel"] == deep
    plain = deep.replace("/", "%2F")
    assert good(ann.get(f"/v0/channels/{plain}"))["channel"] == deep, "! and @ may stand as they are"


@pytest.mark.parametrize(
    "config",
    [
        {"max_clients": -1},
        {"max_clients": 6},
        {"max_payload_size": 1001},
        {"message_flush_interval": 60_001},
        {"persist": 1},
        {"type": "topic"},
        {"type": "fifo"},
        {"colour": "red"},
        {"max_clients": True},
        {"persist": True, "max_persist_messages": 0},
    ],
)
def test_bad_settings_make_and_change_nothing(ann: Member, room: str, config: dict[str, Any]) -> None:
    refused(ann.put(at(room), config), 400, "invalid_request")
    refused(ann.get(at(room)), 404, "channel_not_found", {"channel": room})
    before = ann.make(room)["config"]
    refused(ann.put(at(room), config), 400, "invalid_request")
    assert ann.look(room)["config"] == before


@pytest.mark.parametrize("bad", ["room@example.org", "!@example.org", "!room", "!ro om@example.org", "!room@", "!r@-x"])
def test_a_bad_name_is_400_everywhere(ann: Member, bad: str) -> None:
    refused(ann.put(at(bad), {}), 400, "invalid_request")
    refused(ann.get(at(bad)), 400, "invalid_request")
    for verb in ("join", "leave"):
        refused(ann.post(at(bad, f"/{verb}")), 400, "invalid_request")
    refused(ann.post(at(bad, "/publish"), {"payload": "x"}), 400, "invalid_request")
    refused(ann.get(at(bad, "/history")), 400, "invalid_request")
    refused(ann.get(at(bad, "/events")), 400, "invalid_request")
    refused(ann.delete(at(bad)), 400, "invalid_request")


def test_every_endpoint_says_when_there_is_no_channel(ann: Member, room: str) -> None:
    missing = (404, "channel_not_found", {"channel": room})
    for method, rest, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/leave", {}),
        ("POST", "/join", {"user": BOB}),
        ("GET", "/members", None),
        ("GET", "/acl", None),
        ("POST", "/acl", {"kind": "join", "add": [BOB]}),
        ("POST", "/publish", {"payload": "x"}),
        ("GET", "/history", None),
        ("GET", "/events", None),
        ("POST", "/push", {"payload": "x"}),
        ("POST", "/pop", None),
        ("POST", "/clear", None),
    ):
        refused(reply_of(ann, method, room, rest, body), *missing)
    assert good(ann.get("/v0/channels"))["channels"] == [], "nothing was made by asking"


def test_every_endpoint_is_for_members_or_for_the_owner(ann: Member, bob: Member, room: str) -> None:
    ann.make(room, persist=True)
    stranger = (403, "not_a_member", {"channel": room, "user": BOB})
    for method, rest, body in (
        ("GET", "", None),
        ("POST", "/leave", {}),
        ("GET", "/members", None),
        ("POST", "/publish", {"payload": "x"}),
        ("GET", "/history", None),
        ("GET", "/events", None),
    ):
        refused(reply_of(bob, method, room, rest, body), *stranger)
    bob.join(room)
    owners: list[tuple[str, str, object]] = [
        ("PUT", "", {"max_clients": 2}),
        ("DELETE", "", None),
        ("POST", "/join", {"user": CAT}),
        ("POST", "/leave", {"user": ANN}),
        ("GET", "/acl", None),
        ("POST", "/acl", {"kind": "join", "add": [BOB]}),
    ]
    for method, rest, body_ in owners:
        refused(reply_of(bob, method, room, rest, body_), 403, "forbidden")
    assert ann.look(room)["members"] == 2
    assert good(ann.get(at(room, "/acl")))["acl"] == {"join": [], "publish": [], "read": []}


def test_delete_ends_it_with_its_messages(ann: Member, room: str) -> None:
    ann.make(room, persist=True)
    ann.say(room, "one")
    said = good(ann.delete(at(room)))
    assert (said["channel"], said["deleted"]) == (room, True)
    refused(ann.get(at(room)), 404, "channel_not_found", {"channel": room})
    ann.make(room, persist=True)
    assert ann.texts(room) == [], "another channel of the same name"
    assert ann.say(room, "first")["first_seq"] == 1


def test_the_list_is_of_ones_own_channels_page_by_page(ann: Member, bob: Member, name: Name) -> None:
    rooms = [f"!{name(letter)}@example.org" for letter in "abcde"]
    for each in rooms:
        ann.make(each, persist=each == rooms[0])
    bob.join(rooms[1])
    found, cursor, page = [], "", dict[str, Any]()
    for size in (2, 2, 1):
        page = good(ann.get(f"/v0/channels?page_size=2{cursor}"))
        assert len(page["channels"]) == size
        found += page["channels"]
        cursor = f"&cursor={page.get('next_cursor')}"
    assert "next_cursor" not in page
    assert [row["channel"] for row in found] == rooms
    assert found[0] == {"channel": rooms[0], "type": "pubsub", "owner": ANN, "members": 1, "persist": True}
    assert page["user"] == ANN
    assert (page["limits"]["clients_max"], page["limits"]["payload_bytes_max"]) == (5, 1000)
    assert [row["channel"] for row in good(bob.get("/v0/channels"))["channels"]] == [rooms[1]]
    assert [
        row["channel"] for row in good(ann.get(f"/v0/channels?prefix={name('c')}".replace("=", "=!")))["channels"]
    ] == [rooms[2]]
    refused(ann.get("/v0/channels?cursor=%21%21"), 400, "invalid_request")


# ── members ───────────────────────────────────────────────────────────────────────────────────────


def test_join_and_leave(ann: Member, bob: Member, room: str) -> None:
    made = ann.join(room)
    assert made.keys() == {"channel", "user", "owner", "members", "created", "performance"}
    assert (made["user"], made["owner"], made["members"], made["created"]) == (ANN, ANN, 1, True)
    came = bob.join(room, config={"persist": True})
    assert (came["user"], came["owner"], came["members"], came["created"]) == (BOB, ANN, 2, False)
    assert ann.look(room)["persist"] is False, "settings are for whoever makes it"
    refused(bob.post(at(room, "/join")), 409, "user_in_channel", {"channel": room, "user": BOB})
    left = ann.leave(room)
    assert (left["ended"], left["owner"], left["user"]) == (False, BOB, ANN)
    refused(ann.post(at(room, "/leave")), 403, "not_a_member", {"channel": room, "user": ANN})
    assert bob.leave(room)["ended"] is True
    refused(bob.get(at(room)), 404, "channel_not_found", {"channel": room})


def test_the_owner_invites_and_sends_away(ann: Member, bob: Member, room: str) -> None:
    ann.make(room, max_clients=2)
    assert ann.join(room, user=BOB)["members"] == 2
    assert bob.look(room)["owner"] == ANN
    refused(ann.post(at(room, "/join"), {"user": CAT}), 409, "channel_full", {"channel": room, "limit": 2})
    refused(ann.post(at(room, "/join"), {"user": "nobody"}), 400, "invalid_request")
    assert ann.leave(room, user=BOB) | {"performance": None} == {
        "channel": room,
        "user": BOB,
        "ended": False,
        "owner": ANN,
        "performance": None,
    }
    refused(bob.get(at(room)), 403, "not_a_member", {"channel": room, "user": BOB})
    refused(ann.post(at(room, "/leave"), {"user": BOB}), 403, "not_a_member", {"channel": room, "user": BOB})


def test_members_come_by_pages_counted_from_one(ann: Member, room: str) -> None:
    ann.make(room)
    users = sorted([ANN, *(f"u{number}@example.org" for number in range(4))])
    for user in users:
        if user != ANN:
            ann.join(room, user=user)
    page = good(ann.get(at(room, "/members?page_size=3")))
    assert (page["members"], page["page"], page["total"]) == (users[:3], 1, 5)
    assert good(ann.get(at(room, "/members?page=2&page_size=3")))["members"] == users[3:]
    assert good(ann.get(at(room, "/members?page=3&page_size=3")))["members"] == []
    for query in ("?page=0", "?page_size=0", "?page=-1", "?page=x", "?page=1.5"):
        refused(ann.get(at(room, f"/members{query}")), 400, "invalid_request")


def test_a_user_joins_so_many_and_no_more(house: Server, name: Name) -> None:
    with member(house, "cat") as cat:
        rooms = [f"!{name(f'n{number}')}@example.org" for number in range(41)]
        for each in rooms[:40]:
            cat.join(each)
        refused(cat.post(at(rooms[40], "/join")), 429, "throttled", {"limit": "channels_per_client_max", "max": 40})
        for each in rooms[:40]:
            cat.leave(each)
        cat.join(rooms[40])
        cat.leave(rooms[40])


# ── access lists ──────────────────────────────────────────────────────────────────────────────────


def test_lists_say_who_may(ann: Member, bob: Member, house: Server, room: str) -> None:
    ann.make(room, persist=True)
    bob.join(room)
    said = ann.verb(room, "acl", kind="publish", add=[ANN, "example.net"])
    assert (said["kind"], said["listed"]) == ("publish", [ANN, "example.net"])
    refused(bob.post(at(room, "/publish"), {"payload": "x"}), 403, "forbidden")
    ann.verb(room, "acl", kind="read", add=[ANN])
    refused(bob.get(at(room, "/history")), 403, "forbidden")
    assert (bob.look(room)["first_seq"], bob.look(room)["last_seq"]) == (None, None)
    ann.verb(room, "acl", kind="join", add=["example.org"])
    with member(house, "cat") as cat:
        refused(cat.post(at(room, "/join")), 403, "forbidden")
    assert good(ann.get(at(room, "/acl")))["acl"] == {
        "join": ["example.org"],
        "publish": [ANN, "example.net"],
        "read": [ANN],
    }
    assert ann.verb(room, "acl", kind="read", remove=[ANN])["listed"] == []
    assert bob.history(room)["count"] == 0
    ann.say(room, "the owner is on it")
    ann.verb(room, "acl", kind="publish", remove=[ANN])
    refused(ann.post(at(room, "/publish"), {"payload": "the owner is not exempt"}), 403, "forbidden")


def test_bad_lists_change_nothing(ann: Member, room: str) -> None:
    ann.make(room)
    for body in (
        {"kind": "write", "add": [BOB]},
        {"kind": "join", "add": ["not a name"]},
        {"kind": "join", "add": [7]},
        {"add": [BOB]},
        {"kind": "join", "add": BOB},
    ):
        refused(ann.post(at(room, "/acl"), body), 400, "invalid_request")
    many = [f"u{number}@example.org" for number in range(6)]
    refused(ann.post(at(room, "/acl"), {"kind": "join", "add": many}), 403, "forbidden")
    assert good(ann.get(at(room, "/acl")))["acl"] == {"join": [], "publish": [], "read": []}


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def test_an_ack_says_what_it_promises(ann: Member, room: str, name: Name) -> None:
    ann.make(room, persist=True)
    kept = ann.say(room, "one", "two")
    assert kept.keys() == {
        *("channel", "first_seq", "last_seq", "count", "ts", "qos", "durable", "receivers", "performance"),
    }
    assert (kept["first_seq"], kept["last_seq"], kept["count"]) == (1, 2, 2)
    assert (kept["qos"], kept["durable"], kept["receivers"]) == (1, True, 0)
    quick = ann.say(room, "three", qos=0)
    assert (quick["first_seq"], quick["qos"], quick["durable"], quick["receivers"]) == (3, 0, False, None)
    good(ann.put(at(room), {"message_flush_interval": 1000}))
    later = ann.say(room, "four")
    assert (later["qos"], later["durable"]) == (1, False)
    transient = f"!{name('t')}@example.org"
    ann.make(transient)
    spoken = ann.say(transient, "x")
    assert (spoken["qos"], spoken["durable"], spoken["receivers"]) == (1, False, 0)


def test_bytes_go_as_they_are(ann: Member, room: str) -> None:
    ann.make(room, persist=True)
    raw = bytes(range(256))
    octets = ("Content-Type", "application/octet-stream")
    assert good(ann.request("POST", at(room, "/publish"), raw, [octets]))["qos"] == 1
    assert good(ann.request("POST", at(room, "/publish?qos=0"), b"", [octets]))["qos"] == 0
    ann.verb(room, "publish", payload_base64=base64.b64encode(raw).decode())
    ann.say(room, 'text "ü" \n\r\u2028')
    first, empty, second, text = ann.history(room)["messages"]
    assert base64.b64decode(first["payload_base64"]) == base64.b64decode(second["payload_base64"]) == raw
    assert (empty["payload"], text["payload"]) == ("", 'text "ü" \n\r\u2028')
    assert "payload" not in first
    assert first.keys() == {"channel", "seq", "ts", "sender", "payload_base64"}
    assert first["sender"] == ANN
    refused(ann.request("POST", at(room, "/publish?qos=2"), raw, [octets]), 400, "invalid_request")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_request"),
        ({"payload": 7}, "invalid_request"),
        ({"payload": "x", "payload_base64": "eA=="}, "invalid_request"),
        ({"payload_base64": "?"}, "invalid_request"),
        ({"payload": "x", "messages": [{"payload": "y"}]}, "invalid_request"),
        ({"messages": []}, "invalid_request"),
        ({"messages": [{"payload": "x"}, {}]}, "invalid_request"),
        ({"payload": "x", "qos": 2}, "invalid_request"),
        ({"payload": "x", "qos": -1}, "invalid_request"),
        ({"payload": "x", "qos": "1"}, "invalid_request"),
        ({"payload": "x", "qos": True}, "invalid_request"),
        ({"messages": [{"payload": "x"}] * 1001}, "batch_too_large"),
        ({"payload": "x" * 1001}, "record_too_large"),
        ({"messages": [{"payload": "x"}, {"payload": "ü" * 501}]}, "record_too_large"),
    ],
)
@pytest.mark.parametrize("persist", [True, False])
def test_what_is_refused_uses_no_seq(ann: Member, room: str, body: dict[str, Any], code: str, persist: bool) -> None:
    ann.make(room, persist=persist)
    refused(ann.post(at(room, "/publish"), body), 400, code)
    assert ann.say(room, "next")["first_seq"] == 1
    if persist:
        assert ann.texts(room) == ["next"]


def test_a_publish_is_json_or_bytes(ann: Member, room: str) -> None:
    ann.make(room)
    refused(ann.request("POST", at(room, "/publish"), b"{", [JSON]), 400, "invalid_request")
    refused(
        ann.request("POST", at(room, "/publish"), b"x", [("Content-Type", "text/plain")]), 415, "unsupported_media_type"
    )


def test_history_by_seq_by_number_and_by_time(ann: Member, room: str) -> None:
    ann.make(room, persist=True)
    acks = [ann.say(room, f"m{number}") for number in range(1, 11)]
    page = ann.history(room, "?first=3&last=5")
    assert page.keys() == {"channel", "messages", "count", "next_seq", "first_seq", "last_seq", "performance"}
    assert ([each["seq"] for each in page["messages"]], page["next_seq"]) == ([3, 4, 5], 6)
    assert (page["count"], page["first_seq"], page["last_seq"]) == (3, 1, 10)
    assert ann.texts(room, "?newest=2") == ["m9", "m10"]
    assert ann.texts(room, "?first=9&limit=1") == ["m9"]
    assert ann.texts(room, "?first=99") == []
    at_6, at_10 = acks[5]["ts"], acks[9]["ts"]
    since = ann.history(room, f"?since={at_6}")["messages"]
    assert [each["seq"] for each in since] == [ack["first_seq"] for ack in acks if ack["ts"] >= at_6]
    until = ann.history(room, f"?until={at_6}")["messages"]
    assert [each["seq"] for each in until] == [ack["first_seq"] for ack in acks if ack["ts"] <= at_6]
    assert ann.texts(room, f"?since={at_10 + 1}") == []
    for query in ("?first=0", "?newest=0", "?limit=0", "?first=1&newest=1", "?first=x", "?since=-1", "?last=0"):
        refused(ann.get(at(room, f"/history{query}")), 400, "invalid_request")


def test_a_channel_that_keeps_nothing_has_no_history(ann: Member, room: str) -> None:
    ann.make(room)
    refused(ann.get(at(room, "/history")), 409, "persistence_not_enabled", {"channel": room})
    for verb in ("push", "pop", "clear"):
        body = {"payload": "x"} if verb == "push" else None
        wanted = {"channel": room, "type": "pubsub", "wanted": "fifo"}
        refused(reply_of(ann, "POST", room, f"/{verb}", body), 409, "wrong_type", wanted)


# ── queues ────────────────────────────────────────────────────────────────────────────────────────


def test_a_fifo_channel_is_pushed_to_popped_from_and_cleared(ann: Member, bob: Member, room: str) -> None:
    ann.make(room, persist=True, type="fifo", max_persist_messages=3)
    bob.join(room)
    refused(bob.post(at(room, "/pop")), 409, "queue_empty", {"channel": room})
    refused(bob.post(at(room, "/push"), {"payload": "x"}), 403, "forbidden")
    for number in (1, 2, 3):
        assert ann.verb(room, "push", payload=f"job {number}")["seq"] == number
    refused(ann.post(at(room, "/push"), {"payload": "x"}), 422, "queue_full", {"channel": room, "limit": 3})
    assert (ann.look(room)["waiting"], "waiting" in bob.look(room)) == (3, False)
    assert ann.look(room)["holes"] == bob.look(room)["holes"] == []
    job = good(bob.post(at(room, "/pop")))
    assert job.keys() == {"channel", "seq", "ts", "sender", "payload", "performance"}
    assert (job["seq"], job["payload"], job["sender"]) == (1, "job 1", ANN)
    refused(bob.post(at(room, "/clear")), 403, "forbidden")
    assert good(ann.post(at(room, "/clear")))["cleared"] == 2
    refused(ann.post(at(room, "/pop")), 409, "queue_empty", {"channel": room})
    wanted = {"channel": room, "type": "fifo", "wanted": "pubsub"}
    refused(ann.post(at(room, "/publish"), {"payload": "x"}), 409, "wrong_type", wanted)
    refused(ann.get(at(room, "/history")), 409, "wrong_type", wanted)
    refused(ann.post(at(room, "/push"), {"payload": "x" * 1001}), 400, "record_too_large")
    refused(ann.put(at(room), {"type": "pubsub"}), 400, "invalid_request")


# ── who asks ──────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_its_user_and_speaks_for_nobody_else(ann: Member, house: Server, room: str) -> None:
    ann.make(room, persist=True)
    assert good(ann.get("/v0/channels", [("X-Tidelog-User", ANN)]))["user"] == ANN, "to say so is no lie"
    for headers, query in (([("X-Tidelog-User", BOB)], ""), ([], f"?user={BOB}")):
        refused(ann.get(f"/v0/channels{query}", headers), 403, "forbidden")
    refused(ann.get("/v0/channels?operator=true"), 403, "forbidden")
    with member(house, "nameless") as nameless:
        user = good(nameless.get("/v0/channels"))["user"]
        assert user.startswith("key-")
        assert user.endswith("@localhost")
        nameless.join(room)
        assert user in good(ann.get(at(room, "/members")))["members"]
        nameless.leave(room)


def test_a_key_with_the_scope_admin_speaks_for_anybody(root: Member, ann: Member, room: str) -> None:
    ann.make(room, persist=True)
    as_bob = [("X-Tidelog-User", "b%C3%B6b@example.org")]
    good(root.post(at(room, "/join"), {}, as_bob))
    said = good(root.post(at(room, "/publish"), {"payload": "hi"}, as_bob))
    assert said["first_seq"] == 1
    assert ann.history(room)["messages"][0]["sender"] == "böb@example.org"
    refused(root.get("/v0/channels", [("X-Tidelog-User", "nobody")]), 400, "invalid_request")
    refused(root.get("/v0/channels", [("X-Tidelog-User", "%FF@x.org")]), 400, "invalid_request")


def test_the_operator_sees_and_changes_everything_and_says_nothing(root: Member, ann: Member, room: str) -> None:
    ann.make(room, persist=True)
    ann.say(room, "private")
    listed = good(root.get("/v0/channels?operator=true&page_size=1000"))
    assert room in [row["channel"] for row in listed["channels"]]
    assert (listed["user"], listed["unreadable"]) == (None, {})
    assert root.look(room, "?operator=true")["last_seq"] == 1
    assert root.texts(room, "?operator=true") == ["private"]
    assert good(root.put(at(room, "?operator=true"), {"max_clients": 2}))["config"]["max_clients"] == 2
    assert good(root.post(at(room, "/join?operator=true"), {"user": BOB}))["members"] == 2
    assert good(root.post(at(room, "/leave?operator=true"), {"user": BOB}))["owner"] == ANN
    assert good(root.post(at(room, "/acl?operator=true"), {"kind": "read", "add": [ANN]}))["listed"] == [ANN]
    refused(root.post(at(room, "/join?operator=true"), {}), 400, "invalid_request")
    refused(root.post(at(room, "/leave?operator=true"), {}), 400, "invalid_request")
    refused(root.post(at(room, "/publish?operator=true"), {"payload": "x"}), 403, "not_a_member", ANY)
    assert good(root.delete(at(room, "?operator=true")))["deleted"] is True
    assert good(root.delete(at(room, "?operator=true")))["deleted"] is False
    refused(root.put(at(room, "?operator=true"), {}), 404, "channel_not_found", {"channel": room})


def test_scopes_and_prefixes_hold(ann: Member, house: Server, room: str, name: Name) -> None:
    ann.make(room, persist=True)
    ann.join(room, user=EVE)
    with member(house, "eve") as eve, member(house, "cat") as cat, member(house, "own") as own, member(house) as none:
        assert eve.history(room)["count"] == 0
        for method, rest, body in (
            ("PUT", "", {}),
            ("POST", "/join", {}),
            ("POST", "/publish", {"payload": "x"}),
            ("POST", "/pop", None),
            ("POST", "/acl", {"kind": "join"}),
            ("DELETE", "", None),
            ("POST", "/clear", None),
            ("PATCH", "", None),
        ):
            refused(reply_of(eve, method, room, rest, body), 403, "forbidden")
        refused(cat.delete(at(room)), 403, "forbidden")
        refused(own.get(at(room)), 403, "forbidden")
        mine = f"!own-{name('x')}@example.org"
        own.make(mine)
        assert [row["channel"] for row in good(own.get("/v0/channels"))["channels"]] == [mine]
        own.leave(mine)
        refused(none.get(at(room)), 401, "unauthorized")
        refused(none.get("/v0/channels"), 401, "unauthorized")


def test_without_keys_everybody_is_who_they_say_and_nothing_persists(server: Server, room: str) -> None:
    with member(server) as api:
        assert good(api.get("/v0/channels"))["user"] == "anonymous@localhost"
        assert good(api.get("/v0/channels"))["limits"]["auth"] is False
        refused(api.put(at(room), {"persist": True}), 403, "forbidden")
        refused(api.get(at(room)), 404, "channel_not_found", {"channel": room})
        api.make(room)
        good(api.post(at(room, "/join"), {}, [("X-Tidelog-User", BOB)]))
        assert good(api.get(at(room, "/members")))["members"] == ["anonymous@localhost", BOB]
        good(api.delete(at(room)))


def test_without_keys_what_lies_on_disk_is_left_alone(tmp_path: Path, room: str) -> None:
    with Server(tmp_path / "s", api_keys=KEYS) as server:
        server.start()
        with member(server, "ann") as ann:
            ann.make(room, persist=True)
            ann.say(room, "kept")
        server.stop()
        server.start(api_keys="")
        with member(server) as api:
            refused(api.get(at(room)), 404, "channel_not_found", {"channel": room})
            api.make(room)
            assert good(api.delete(at(room)))["deleted"] is True
        server.stop()
        server.start()
        with member(server, "ann") as ann:
            assert ann.texts(room) == ["kept"]


def test_another_domain_than_the_servers_is_refused(tmp_path: Path) -> None:
    with Server(tmp_path / "s", channel_domain="example.org").start() as server, member(server) as api:
        assert good(api.get("/v0/channels"))["user"] == "anonymous@example.org"
        refused(api.put(at("!room@example.net"), {}), 403, "forbidden")
        api.make("!room@example.org")


def test_caps_of_channels_hold_and_zero_is_none(tmp_path: Path) -> None:
    caps = {"max_channels": 2, "max_channel_members": "many", "channel_messages_max": 0}
    with Server(tmp_path / "few", api_keys=KEYS, **caps).start() as server, member(server, "ann") as ann:
        for name in "ab":
            assert ann.make(f"!{name}@example.org")["config"]["max_clients"] == 100, "no number is the default"
        refused(ann.put(at("!c@example.org"), {}), 429, "throttled", {"limit": "channels_max", "max": 2})
        refused(ann.put(at("!a@example.org"), {"persist": True}), 400, "invalid_request")
    names = ("max_channels", "max_channel_members", "max_channels_per_user", "max_channel_payload_bytes")
    none = dict.fromkeys(names, 0)
    with Server(tmp_path / "all", api_keys=KEYS, **none).start() as server, member(server, "ann") as ann:
        ann.make("!a@example.org", persist=True, max_clients=100_000)
        for number in range(120):
            ann.join("!a@example.org", user=f"u{number}@example.org")
        ann.say("!a@example.org", "x" * 100_000)
        assert len(ann.texts("!a@example.org")[0]) == 100_000


def test_a_channel_that_cannot_be_read_is_passed_over_and_told_of(tmp_path: Path) -> None:
    good_one, bad_one = "!good@example.org", "!bad@example.org"
    with Server(tmp_path / "s", api_keys=KEYS).start() as server:
        with member(server, "ann") as ann:
            for each in (good_one, bad_one):
                ann.make(each, persist=True)
                ann.say(each, "kept")
        server.stop()
        for path in (tmp_path / "s" / "data" / "channels").iterdir():
            content = (path / "metadata.bin").read_bytes()
            if b"!bad@" in content:
                (path / "metadata.bin").write_bytes(content[:-3] + b"xyz")
        server.start()
        with member(server, "ann") as ann, member(server, "root") as root:
            assert ann.texts(good_one) == ["kept"]
            error = refused(ann.get(at(bad_one)), 500, "channel_offline", ANY)
            assert error["detail"]["channel"] == bad_one
            refused(ann.post(at(bad_one, "/join")), 500, "channel_offline", ANY)
            assert len(good(root.get("/v0/channels?operator=true"))["unreadable"]) == 1
            assert ann.scraped("tidelog_channels_skipped") == 1
            assert ann.scraped('tidelog_store_loads_total{result="corrupt"}') == 1
            assert good(root.delete(at(bad_one, "?operator=true")))["deleted"] is True
            ann.make(bad_one, persist=True)
            assert ann.texts(bad_one) == []


def test_a_lost_cursor_is_told_and_cleared_by_the_owner(tmp_path: Path) -> None:
    room = "!jobs@example.org"
    with Server(tmp_path / "s", api_keys=KEYS).start() as server:
        with member(server, "ann") as ann:
            ann.make(room, persist=True, type="fifo")
            ann.verb(room, "push", payload="job")
        server.stop()
        next((tmp_path / "s" / "data" / "channels").glob("*/cursor.bin")).write_bytes(bytes(16))
        server.start()
        with member(server, "ann") as ann:
            lost = refused(ann.post(at(room, "/pop")), 409, "cursor_recovery_required", ANY)
            assert lost["detail"]["channel"] == room
            refused(ann.post(at(room, "/push"), {"payload": "x"}), 409, "cursor_recovery_required", ANY)
            refused(ann.get(at(room)), 409, "cursor_recovery_required", ANY)
            assert good(ann.post(at(room, "/clear")))["cleared"] == 0
            ann.verb(room, "push", payload="next")
            assert good(ann.post(at(room, "/pop")))["payload"] == "next"


def test_figures_tell_what_was_done(ann: Member, bob: Member, room: str) -> None:
    saves = ann.scraped('tidelog_store_saves_total{result="success"}')
    took = ann.scraped("tidelog_store_save_duration_seconds_count")
    refusals = ann.scraped("tidelog_channels_active")
    ann.make(room, persist=True)
    bob.join(room)
    assert ann.scraped('tidelog_store_saves_total{result="success"}') == saves + 2
    assert ann.scraped("tidelog_store_save_duration_seconds_count") == took + 2
    assert ann.scraped("tidelog_channels_active") == refusals + 1
    bob.post(at(room, "/join"))
    assert ann.scraped('tidelog_channel_joins_total{result="user_in_channel"}') >= 1
    assert ann.figure("channels") >= 1
