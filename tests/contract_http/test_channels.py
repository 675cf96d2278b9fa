"""Channels over HTTP: every endpoint, every refusal, and that a refusal changes nothing. docs/http.md, "Channels"."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract_http.api import ANY, expect_error, expect_success
from tests.contract_http.channel_api import (
    ANN,
    BOB,
    CAT,
    EVE,
    KEYS,
    ChannelApi,
    channel_api,
    channel_path,
    request_channel,
)
from tests.contract_http.client import JSON
from tests.contract_http.server import Server

Name = Callable[[str], str]


@pytest.fixture(scope="module")
def channel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys that name users, and limits that can be reached."""
    caps = {"max_channels_per_user": 40, "max_channel_payload_bytes": 1000, "max_channel_members": 5}
    with Server(tmp_path_factory.mktemp("house"), api_keys=KEYS, **caps).start() as running:
        yield running


@pytest.fixture
def channel_name(name: Name) -> str:
    return f"!{name('room')}@example.org"


@pytest.fixture
def ann(channel_server: Server) -> Iterator[ChannelApi]:
    with channel_api(channel_server, "ann") as client:
        yield client
        for row in expect_success(client.get("/v0/channels?page_size=1000"))["channels"]:
            client.delete(channel_path(row["channel"]))


@pytest.fixture
def bob(channel_server: Server) -> Iterator[ChannelApi]:
    with channel_api(channel_server, "bob") as client:
        yield client


@pytest.fixture
def root(channel_server: Server) -> Iterator[ChannelApi]:
    with channel_api(channel_server, "root") as client:
        yield client


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


def test_put_makes_a_channel_and_then_changes_it(ann: ChannelApi, channel_name: str) -> None:
    made = ann.create(channel_name, persist=True, max_clients=3)
    assert made.keys() == {"channel", "type", "owner", "members", "persist", "created", "config", "performance"}
    assert (made["channel"], made["owner"], made["members"], made["created"]) == (channel_name, ANN, 1, True)
    assert made["config"] == {
        "max_clients": 3,
        "max_payload_size": 1000,
        "max_persist_messages": 1000,
        "persist": True,
        "message_flush_interval": 0,
        "type": "pubsub",
    }
    changed = expect_success(ann.put(channel_path(channel_name), {"message_flush_interval": 50}))
    assert (changed["created"], changed["config"]["message_flush_interval"]) == (False, 50)
    assert changed["config"]["max_clients"] == 3, "what is not named stays"
    assert ann.state(channel_name)["config"] == changed["config"]


def test_a_handler_with_slashes_goes_percent_encoded(ann: ChannelApi, name: Name) -> None:
    deep = f"!{name('a')}/b/c@example.org"
    assert "%2F" in channel_path(deep)
    ann.create(deep, persist=True)
    ann.publish(deep, "hello")
    assert ann.texts(deep) == ["hello"]
    assert ann.state(deep)["channel"] == deep
    plain = deep.replace("/", "%2F")
    assert expect_success(ann.get(f"/v0/channels/{plain}"))["channel"] == deep, "! and @ may stand as they are"


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
def test_bad_settings_make_and_change_nothing(ann: ChannelApi, channel_name: str, config: dict[str, Any]) -> None:
    expect_error(ann.put(channel_path(channel_name), config), 400, "invalid_request")
    expect_error(ann.get(channel_path(channel_name)), 404, "channel_not_found", {"channel": channel_name})
    before = ann.create(channel_name)["config"]
    expect_error(ann.put(channel_path(channel_name), config), 400, "invalid_request")
    assert ann.state(channel_name)["config"] == before


@pytest.mark.parametrize("bad", ["room@example.org", "!@example.org", "!room", "!ro om@example.org", "!room@", "!r@-x"])
def test_a_bad_name_is_400_everywhere(ann: ChannelApi, bad: str) -> None:
    expect_error(ann.put(channel_path(bad), {}), 400, "invalid_request")
    expect_error(ann.get(channel_path(bad)), 400, "invalid_request")
    for verb in ("join", "leave"):
        expect_error(ann.post(channel_path(bad, f"/{verb}")), 400, "invalid_request")
    expect_error(ann.post(channel_path(bad, "/publish"), {"payload": "x"}), 400, "invalid_request")
    expect_error(ann.get(channel_path(bad, "/history")), 400, "invalid_request")
    expect_error(ann.get(channel_path(bad, "/events")), 400, "invalid_request")
    expect_error(ann.delete(channel_path(bad)), 400, "invalid_request")


def test_every_endpoint_says_when_there_is_no_channel(ann: ChannelApi, channel_name: str) -> None:
    missing = (404, "channel_not_found", {"channel": channel_name})
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
        expect_error(request_channel(ann, method, channel_name, rest, body), *missing)
    assert expect_success(ann.get("/v0/channels"))["channels"] == [], "nothing was made by asking"


def test_every_endpoint_is_for_members_or_for_the_owner(ann: ChannelApi, bob: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    stranger = (403, "not_a_member", {"channel": channel_name, "user": BOB})
    for method, rest, body in (
        ("GET", "", None),
        ("POST", "/leave", {}),
        ("GET", "/members", None),
        ("POST", "/publish", {"payload": "x"}),
        ("GET", "/history", None),
        ("GET", "/events", None),
    ):
        expect_error(request_channel(bob, method, channel_name, rest, body), *stranger)
    bob.join(channel_name)
    owners: list[tuple[str, str, object]] = [
        ("PUT", "", {"max_clients": 2}),
        ("DELETE", "", None),
        ("POST", "/join", {"user": CAT}),
        ("POST", "/leave", {"user": ANN}),
        ("GET", "/acl", None),
        ("POST", "/acl", {"kind": "join", "add": [BOB]}),
    ]
    for method, rest, body_ in owners:
        expect_error(request_channel(bob, method, channel_name, rest, body_), 403, "forbidden")
    assert ann.state(channel_name)["members"] == 2
    assert expect_success(ann.get(channel_path(channel_name, "/acl")))["acl"] == {"join": [], "publish": [], "read": []}


def test_delete_ends_it_with_its_messages(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    ann.publish(channel_name, "one")
    said = expect_success(ann.delete(channel_path(channel_name)))
    assert (said["channel"], said["deleted"]) == (channel_name, True)
    expect_error(ann.get(channel_path(channel_name)), 404, "channel_not_found", {"channel": channel_name})
    ann.create(channel_name, persist=True)
    assert ann.texts(channel_name) == [], "another channel of the same name"
    assert ann.publish(channel_name, "first")["first_seq"] == 1


def test_the_list_is_of_ones_own_channels_page_by_page(ann: ChannelApi, bob: ChannelApi, name: Name) -> None:
    rooms = [f"!{name(letter)}@example.org" for letter in "abcde"]
    for each in rooms:
        ann.create(each, persist=each == rooms[0])
    bob.join(rooms[1])
    found, cursor, page = [], "", dict[str, Any]()
    for size in (2, 2, 1):
        page = expect_success(ann.get(f"/v0/channels?page_size=2{cursor}"))
        assert len(page["channels"]) == size
        found += page["channels"]
        cursor = f"&cursor={page.get('next_cursor')}"
    assert "next_cursor" not in page
    assert [row["channel"] for row in found] == rooms
    assert found[0] == {"channel": rooms[0], "type": "pubsub", "owner": ANN, "members": 1, "persist": True}
    assert page["user"] == ANN
    assert (page["limits"]["clients_max"], page["limits"]["payload_bytes_max"]) == (5, 1000)
    assert [row["channel"] for row in expect_success(bob.get("/v0/channels"))["channels"]] == [rooms[1]]
    assert [
        row["channel"]
        for row in expect_success(ann.get(f"/v0/channels?prefix={name('c')}".replace("=", "=!")))["channels"]
    ] == [rooms[2]]
    expect_error(ann.get("/v0/channels?cursor=%21%21"), 400, "invalid_request")


# ── members ───────────────────────────────────────────────────────────────────────────────────────


def test_join_and_leave(ann: ChannelApi, bob: ChannelApi, channel_name: str) -> None:
    made = ann.join(channel_name)
    assert made.keys() == {"channel", "user", "owner", "members", "created", "performance"}
    assert (made["user"], made["owner"], made["members"], made["created"]) == (ANN, ANN, 1, True)
    came = bob.join(channel_name, config={"persist": True})
    assert (came["user"], came["owner"], came["members"], came["created"]) == (BOB, ANN, 2, False)
    assert ann.state(channel_name)["persist"] is False, "settings are for whoever makes it"
    expect_error(
        bob.post(channel_path(channel_name, "/join")), 409, "user_in_channel", {"channel": channel_name, "user": BOB}
    )
    left = ann.leave(channel_name)
    assert (left["ended"], left["owner"], left["user"]) == (False, BOB, ANN)
    expect_error(
        ann.post(channel_path(channel_name, "/leave")), 403, "not_a_member", {"channel": channel_name, "user": ANN}
    )
    assert bob.leave(channel_name)["ended"] is True
    expect_error(bob.get(channel_path(channel_name)), 404, "channel_not_found", {"channel": channel_name})


def test_the_owner_invites_and_sends_away(ann: ChannelApi, bob: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name, max_clients=2)
    assert ann.join(channel_name, user=BOB)["members"] == 2
    assert bob.state(channel_name)["owner"] == ANN
    expect_error(
        ann.post(channel_path(channel_name, "/join"), {"user": CAT}),
        409,
        "channel_full",
        {"channel": channel_name, "limit": 2},
    )
    expect_error(ann.post(channel_path(channel_name, "/join"), {"user": "nobody"}), 400, "invalid_request")
    assert ann.leave(channel_name, user=BOB) | {"performance": None} == {
        "channel": channel_name,
        "user": BOB,
        "ended": False,
        "owner": ANN,
        "performance": None,
    }
    expect_error(bob.get(channel_path(channel_name)), 403, "not_a_member", {"channel": channel_name, "user": BOB})
    expect_error(
        ann.post(channel_path(channel_name, "/leave"), {"user": BOB}),
        403,
        "not_a_member",
        {"channel": channel_name, "user": BOB},
    )


def test_members_come_by_pages_counted_from_one(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name)
    users = sorted([ANN, *(f"u{number}@example.org" for number in range(4))])
    for user in users:
        if user != ANN:
            ann.join(channel_name, user=user)
    page = expect_success(ann.get(channel_path(channel_name, "/members?page_size=3")))
    assert (page["members"], page["page"], page["total"]) == (users[:3], 1, 5)
    assert expect_success(ann.get(channel_path(channel_name, "/members?page=2&page_size=3")))["members"] == users[3:]
    assert expect_success(ann.get(channel_path(channel_name, "/members?page=3&page_size=3")))["members"] == []
    for query in ("?page=0", "?page_size=0", "?page=-1", "?page=x", "?page=1.5"):
        expect_error(ann.get(channel_path(channel_name, f"/members{query}")), 400, "invalid_request", ANY)


def test_a_user_joins_so_many_and_no_more(channel_server: Server, name: Name) -> None:
    with channel_api(channel_server, "cat") as cat:
        rooms = [f"!{name(f'n{number}')}@example.org" for number in range(41)]
        for each in rooms[:40]:
            cat.join(each)
        expect_error(
            cat.post(channel_path(rooms[40], "/join")),
            429,
            "throttled",
            {"limit": "channels_per_client_max", "max": 40},
        )
        for each in rooms[:40]:
            cat.leave(each)
        cat.join(rooms[40])
        cat.leave(rooms[40])


# ── access lists ──────────────────────────────────────────────────────────────────────────────────


def test_lists_say_who_may(ann: ChannelApi, bob: ChannelApi, channel_server: Server, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    bob.join(channel_name)
    said = ann.verb(channel_name, "acl", kind="publish", add=[ANN, "example.net"])
    assert (said["kind"], said["listed"]) == ("publish", [ANN, "example.net"])
    expect_error(bob.post(channel_path(channel_name, "/publish"), {"payload": "x"}), 403, "forbidden")
    ann.verb(channel_name, "acl", kind="read", add=[ANN])
    expect_error(bob.get(channel_path(channel_name, "/history")), 403, "forbidden")
    assert (bob.state(channel_name)["first_seq"], bob.state(channel_name)["last_seq"]) == (None, None)
    ann.verb(channel_name, "acl", kind="join", add=["example.org"])
    with channel_api(channel_server, "cat") as cat:
        expect_error(cat.post(channel_path(channel_name, "/join")), 403, "forbidden")
    assert expect_success(ann.get(channel_path(channel_name, "/acl")))["acl"] == {
        "join": ["example.org"],
        "publish": [ANN, "example.net"],
        "read": [ANN],
    }
    assert ann.verb(channel_name, "acl", kind="read", remove=[ANN])["listed"] == []
    assert bob.history(channel_name)["count"] == 0
    ann.publish(channel_name, "the owner is on it")
    ann.verb(channel_name, "acl", kind="publish", remove=[ANN])
    expect_error(
        ann.post(channel_path(channel_name, "/publish"), {"payload": "the owner is not exempt"}), 403, "forbidden"
    )


def test_bad_lists_change_nothing(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name)
    for body in (
        {"kind": "write", "add": [BOB]},
        {"kind": "join", "add": ["not a name"]},
        {"kind": "join", "add": [7]},
        {"add": [BOB]},
        {"kind": "join", "add": BOB},
    ):
        expect_error(ann.post(channel_path(channel_name, "/acl"), body), 400, "invalid_request")
    many = [f"u{number}@example.org" for number in range(6)]
    expect_error(ann.post(channel_path(channel_name, "/acl"), {"kind": "join", "add": many}), 403, "forbidden")
    assert expect_success(ann.get(channel_path(channel_name, "/acl")))["acl"] == {"join": [], "publish": [], "read": []}


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def test_an_ack_says_what_it_promises(ann: ChannelApi, channel_name: str, name: Name) -> None:
    ann.create(channel_name, persist=True)
    kept = ann.publish(channel_name, "one", "two")
    assert kept.keys() == {
        *("channel", "first_seq", "last_seq", "count", "ts", "qos", "durable", "receivers", "performance"),
    }
    assert (kept["first_seq"], kept["last_seq"], kept["count"]) == (1, 2, 2)
    assert (kept["qos"], kept["durable"], kept["receivers"]) == (1, True, 0)
    quick = ann.publish(channel_name, "three", qos=0)
    assert (quick["first_seq"], quick["qos"], quick["durable"], quick["receivers"]) == (3, 0, False, None)
    expect_success(ann.put(channel_path(channel_name), {"message_flush_interval": 1000}))
    later = ann.publish(channel_name, "four")
    assert (later["qos"], later["durable"]) == (1, False)
    transient = f"!{name('t')}@example.org"
    ann.create(transient)
    spoken = ann.publish(transient, "x")
    assert (spoken["qos"], spoken["durable"], spoken["receivers"]) == (1, False, 0)


def test_bytes_go_as_they_are(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    raw = bytes(range(256))
    octets = ("Content-Type", "application/octet-stream")
    assert expect_success(ann.request("POST", channel_path(channel_name, "/publish"), raw, [octets]))["qos"] == 1
    assert expect_success(ann.request("POST", channel_path(channel_name, "/publish?qos=0"), b"", [octets]))["qos"] == 0
    ann.verb(channel_name, "publish", payload_base64=base64.b64encode(raw).decode())
    ann.publish(channel_name, 'text "ü" \n\r\u2028')
    first, empty, second, text = ann.history(channel_name)["messages"]
    assert base64.b64decode(first["payload_base64"]) == base64.b64decode(second["payload_base64"]) == raw
    assert (empty["payload"], text["payload"]) == ("", 'text "ü" \n\r\u2028')
    assert "payload" not in first
    assert first.keys() == {"channel", "seq", "ts", "sender", "payload_base64"}
    assert first["sender"] == ANN
    expect_error(
        ann.request("POST", channel_path(channel_name, "/publish?qos=2"), raw, [octets]), 400, "invalid_request"
    )


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
def test_what_is_refused_uses_no_seq(
    ann: ChannelApi, channel_name: str, body: dict[str, Any], code: str, persist: bool
) -> None:
    ann.create(channel_name, persist=persist)
    expect_error(ann.post(channel_path(channel_name, "/publish"), body), 400, code)
    assert ann.publish(channel_name, "next")["first_seq"] == 1
    if persist:
        assert ann.texts(channel_name) == ["next"]


def test_a_publish_is_json_or_bytes(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name)
    expect_error(ann.request("POST", channel_path(channel_name, "/publish"), b"{", [JSON]), 400, "invalid_request")
    expect_error(
        ann.request("POST", channel_path(channel_name, "/publish"), b"x", [("Content-Type", "text/plain")]),
        415,
        "unsupported_media_type",
    )


def test_history_by_seq_by_number_and_by_time(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    acks = [ann.publish(channel_name, f"m{number}") for number in range(1, 11)]
    page = ann.history(channel_name, "?first=3&last=5")
    assert page.keys() == {"channel", "messages", "count", "next_seq", "first_seq", "last_seq", "performance"}
    assert ([each["seq"] for each in page["messages"]], page["next_seq"]) == ([3, 4, 5], 6)
    assert (page["count"], page["first_seq"], page["last_seq"]) == (3, 1, 10)
    assert ann.texts(channel_name, "?newest=2") == ["m9", "m10"]
    assert ann.texts(channel_name, "?first=9&limit=1") == ["m9"]
    assert ann.texts(channel_name, "?first=99") == []
    at_6, at_10 = acks[5]["ts"], acks[9]["ts"]
    since = ann.history(channel_name, f"?since={at_6}")["messages"]
    assert [each["seq"] for each in since] == [ack["first_seq"] for ack in acks if ack["ts"] >= at_6]
    until = ann.history(channel_name, f"?until={at_6}")["messages"]
    assert [each["seq"] for each in until] == [ack["first_seq"] for ack in acks if ack["ts"] <= at_6]
    assert ann.texts(channel_name, f"?since={at_10 + 1}") == []
    for query in ("?first=0", "?newest=0", "?limit=0", "?first=1&newest=1", "?first=x", "?since=-1", "?last=0"):
        expect_error(ann.get(channel_path(channel_name, f"/history{query}")), 400, "invalid_request", ANY)


def test_a_channel_that_keeps_nothing_has_no_history(ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name)
    expect_error(
        ann.get(channel_path(channel_name, "/history")), 409, "persistence_not_enabled", {"channel": channel_name}
    )
    for verb in ("push", "pop", "clear"):
        body = {"payload": "x"} if verb == "push" else None
        wanted = {"channel": channel_name, "type": "pubsub", "wanted": "fifo"}
        expect_error(request_channel(ann, "POST", channel_name, f"/{verb}", body), 409, "wrong_type", wanted)


# ── queues ────────────────────────────────────────────────────────────────────────────────────────


def test_a_fifo_channel_is_pushed_to_popped_from_and_cleared(
    ann: ChannelApi, bob: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name, persist=True, type="fifo", max_persist_messages=3)
    bob.join(channel_name)
    expect_error(bob.post(channel_path(channel_name, "/pop")), 409, "queue_empty", {"channel": channel_name})
    expect_error(bob.post(channel_path(channel_name, "/push"), {"payload": "x"}), 403, "forbidden")
    for number in (1, 2, 3):
        assert ann.verb(channel_name, "push", payload=f"job {number}")["seq"] == number
    expect_error(
        ann.post(channel_path(channel_name, "/push"), {"payload": "x"}),
        422,
        "queue_full",
        {"channel": channel_name, "limit": 3},
    )
    assert (ann.state(channel_name)["waiting"], "waiting" in bob.state(channel_name)) == (3, False)
    assert ann.state(channel_name)["holes"] == bob.state(channel_name)["holes"] == []
    job = expect_success(bob.post(channel_path(channel_name, "/pop")))
    assert job.keys() == {"channel", "seq", "ts", "sender", "payload", "performance"}
    assert (job["seq"], job["payload"], job["sender"]) == (1, "job 1", ANN)
    expect_error(bob.post(channel_path(channel_name, "/clear")), 403, "forbidden")
    assert expect_success(ann.post(channel_path(channel_name, "/clear")))["cleared"] == 2
    expect_error(ann.post(channel_path(channel_name, "/pop")), 409, "queue_empty", {"channel": channel_name})
    wanted = {"channel": channel_name, "type": "fifo", "wanted": "pubsub"}
    expect_error(ann.post(channel_path(channel_name, "/publish"), {"payload": "x"}), 409, "wrong_type", wanted)
    expect_error(ann.get(channel_path(channel_name, "/history")), 409, "wrong_type", wanted)
    expect_error(ann.post(channel_path(channel_name, "/push"), {"payload": "x" * 1001}), 400, "record_too_large")
    expect_error(ann.put(channel_path(channel_name), {"type": "pubsub"}), 400, "invalid_request")


# ── who asks ──────────────────────────────────────────────────────────────────────────────────────


def test_key_acts_only_for_its_own_user(ann: ChannelApi, channel_server: Server, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    assert expect_success(ann.get("/v0/channels", [("X-Tidelog-User", ANN)]))["user"] == ANN, "to say so is no lie"
    for headers, query in (([("X-Tidelog-User", BOB)], ""), ([], f"?user={BOB}")):
        expect_error(ann.get(f"/v0/channels{query}", headers), 403, "forbidden")
    expect_error(ann.get("/v0/channels?operator=true"), 403, "forbidden")
    with channel_api(channel_server, "nameless") as nameless:
        user = expect_success(nameless.get("/v0/channels"))["user"]
        assert user.startswith("key-")
        assert user.endswith("@localhost")
        nameless.join(channel_name)
        assert user in expect_success(ann.get(channel_path(channel_name, "/members")))["members"]
        nameless.leave(channel_name)


def test_a_key_with_the_scope_admin_speaks_for_anybody(root: ChannelApi, ann: ChannelApi, channel_name: str) -> None:
    ann.create(channel_name, persist=True)
    as_bob = [("X-Tidelog-User", "b%C3%B6b@example.org")]
    expect_success(root.post(channel_path(channel_name, "/join"), {}, as_bob))
    said = expect_success(root.post(channel_path(channel_name, "/publish"), {"payload": "hi"}, as_bob))
    assert said["first_seq"] == 1
    assert ann.history(channel_name)["messages"][0]["sender"] == "böb@example.org"
    expect_error(root.get("/v0/channels", [("X-Tidelog-User", "nobody")]), 400, "invalid_request")
    expect_error(root.get("/v0/channels", [("X-Tidelog-User", "%FF@x.org")]), 400, "invalid_request")


def test_the_operator_sees_and_changes_everything_and_says_nothing(
    root: ChannelApi, ann: ChannelApi, channel_name: str
) -> None:
    ann.create(channel_name, persist=True)
    ann.publish(channel_name, "private")
    listed = expect_success(root.get("/v0/channels?operator=true&page_size=1000"))
    assert channel_name in [row["channel"] for row in listed["channels"]]
    assert (listed["user"], listed["unreadable"]) == (None, {})
    assert root.state(channel_name, "?operator=true")["last_seq"] == 1
    assert root.texts(channel_name, "?operator=true") == ["private"]
    assert (
        expect_success(root.put(channel_path(channel_name, "?operator=true"), {"max_clients": 2}))["config"][
            "max_clients"
        ]
        == 2
    )
    assert expect_success(root.post(channel_path(channel_name, "/join?operator=true"), {"user": BOB}))["members"] == 2
    assert expect_success(root.post(channel_path(channel_name, "/leave?operator=true"), {"user": BOB}))["owner"] == ANN
    assert expect_success(root.post(channel_path(channel_name, "/acl?operator=true"), {"kind": "read", "add": [ANN]}))[
        "listed"
    ] == [ANN]
    expect_error(root.post(channel_path(channel_name, "/join?operator=true"), {}), 400, "invalid_request")
    expect_error(root.post(channel_path(channel_name, "/leave?operator=true"), {}), 400, "invalid_request")
    expect_error(
        root.post(channel_path(channel_name, "/publish?operator=true"), {"payload": "x"}), 403, "not_a_member", ANY
    )
    assert expect_success(root.delete(channel_path(channel_name, "?operator=true")))["deleted"] is True
    assert expect_success(root.delete(channel_path(channel_name, "?operator=true")))["deleted"] is False
    expect_error(
        root.put(channel_path(channel_name, "?operator=true"), {}), 404, "channel_not_found", {"channel": channel_name}
    )


def test_scopes_and_prefixes_hold(ann: ChannelApi, channel_server: Server, channel_name: str, name: Name) -> None:
    ann.create(channel_name, persist=True)
    ann.join(channel_name, user=EVE)
    with (
        channel_api(channel_server, "eve") as eve,
        channel_api(channel_server, "cat") as cat,
        channel_api(channel_server, "own") as own,
        channel_api(channel_server) as none,
    ):
        assert eve.history(channel_name)["count"] == 0
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
            expect_error(request_channel(eve, method, channel_name, rest, body), 403, "forbidden")
        expect_error(cat.delete(channel_path(channel_name)), 403, "forbidden")
        expect_error(own.get(channel_path(channel_name)), 403, "forbidden")
        mine = f"!own-{name('x')}@example.org"
        own.create(mine)
        assert [row["channel"] for row in expect_success(own.get("/v0/channels"))["channels"]] == [mine]
        own.leave(mine)
        expect_error(none.get(channel_path(channel_name)), 401, "unauthorized")
        expect_error(none.get("/v0/channels"), 401, "unauthorized")


def test_without_keys_everybody_is_who_they_say_and_nothing_persists(server: Server, channel_name: str) -> None:
    with channel_api(server) as api:
        assert expect_success(api.get("/v0/channels"))["user"] == "anonymous@localhost"
        assert expect_success(api.get("/v0/channels"))["limits"]["auth"] is False
        expect_error(api.put(channel_path(channel_name), {"persist": True}), 403, "forbidden")
        expect_error(api.get(channel_path(channel_name)), 404, "channel_not_found", {"channel": channel_name})
        api.create(channel_name)
        expect_success(api.post(channel_path(channel_name, "/join"), {}, [("X-Tidelog-User", BOB)]))
        assert expect_success(api.get(channel_path(channel_name, "/members")))["members"] == [
            "anonymous@localhost",
            BOB,
        ]
        expect_success(api.delete(channel_path(channel_name)))


def test_without_keys_stored_channels_are_unchanged(tmp_path: Path, channel_name: str) -> None:
    with Server(tmp_path / "s", api_keys=KEYS) as server:
        server.start()
        with channel_api(server, "ann") as ann:
            ann.create(channel_name, persist=True)
            ann.publish(channel_name, "kept")
        server.stop()
        server.start(api_keys="")
        with channel_api(server) as api:
            expect_error(api.get(channel_path(channel_name)), 404, "channel_not_found", {"channel": channel_name})
            api.create(channel_name)
            assert expect_success(api.delete(channel_path(channel_name)))["deleted"] is True
        server.stop()
        server.start()
        with channel_api(server, "ann") as ann:
            assert ann.texts(channel_name) == ["kept"]


def test_another_domain_than_the_servers_is_refused(tmp_path: Path) -> None:
    with Server(tmp_path / "s", channel_domain="example.org").start() as server, channel_api(server) as api:
        assert expect_success(api.get("/v0/channels"))["user"] == "anonymous@example.org"
        expect_error(api.put(channel_path("!room@example.net"), {}), 403, "forbidden")
        api.create("!room@example.org")


def test_caps_of_channels_hold_and_zero_is_none(tmp_path: Path) -> None:
    caps = {"max_channels": 2, "max_channel_members": "", "channel_messages_max": 0}
    with Server(tmp_path / "few", api_keys=KEYS, **caps).start() as server, channel_api(server, "ann") as ann:
        for name in "ab":
            assert ann.create(f"!{name}@example.org")["config"]["max_clients"] == 100, "no number is the default"
        expect_error(ann.put(channel_path("!c@example.org"), {}), 429, "throttled", {"limit": "channels_max", "max": 2})
        expect_error(ann.put(channel_path("!a@example.org"), {"persist": True}), 400, "invalid_request")
    names = ("max_channels", "max_channel_members", "max_channels_per_user", "max_channel_payload_bytes")
    none = dict.fromkeys(names, 0)
    with Server(tmp_path / "all", api_keys=KEYS, **none).start() as server, channel_api(server, "ann") as ann:
        ann.create("!a@example.org", persist=True, max_clients=100_000)
        for number in range(120):
            ann.join("!a@example.org", user=f"u{number}@example.org")
        ann.publish("!a@example.org", "x" * 100_000)
        assert len(ann.texts("!a@example.org")[0]) == 100_000


def test_unreadable_channel_is_skipped_and_reported(tmp_path: Path) -> None:
    good_one, bad_one = "!good@example.org", "!bad@example.org"
    with Server(tmp_path / "s", api_keys=KEYS).start() as server:
        with channel_api(server, "ann") as ann:
            for each in (good_one, bad_one):
                ann.create(each, persist=True)
                ann.publish(each, "kept")
        server.stop()
        for path in (tmp_path / "s" / "data" / "channels").iterdir():
            content = (path / "metadata.bin").read_bytes()
            if b"!bad@" in content:
                (path / "metadata.bin").write_bytes(content[:-3] + b"xyz")
        server.start()
        with channel_api(server, "ann") as ann, channel_api(server, "root") as root:
            assert ann.texts(good_one) == ["kept"]
            error = expect_error(ann.get(channel_path(bad_one)), 500, "channel_offline", ANY)
            assert error["detail"]["channel"] == bad_one
            expect_error(ann.post(channel_path(bad_one, "/join")), 500, "channel_offline", ANY)
            assert len(expect_success(root.get("/v0/channels?operator=true"))["unreadable"]) == 1
            assert ann.scraped_metric("tidelog_channels_skipped") == 1
            assert ann.scraped_metric('tidelog_store_loads_total{result="corrupt"}') == 1
            assert expect_success(root.delete(channel_path(bad_one, "?operator=true")))["deleted"] is True
            ann.create(bad_one, persist=True)
            assert ann.texts(bad_one) == []


def test_lost_cursor_is_reported_and_cleared_by_the_owner(tmp_path: Path) -> None:
    channel_name = "!jobs@example.org"
    with Server(tmp_path / "s", api_keys=KEYS).start() as server:
        with channel_api(server, "ann") as ann:
            ann.create(channel_name, persist=True, type="fifo")
            ann.verb(channel_name, "push", payload="job")
        server.stop()
        next((tmp_path / "s" / "data" / "channels").glob("*/cursor.bin")).write_bytes(bytes(16))
        server.start()
        with channel_api(server, "ann") as ann:
            lost = expect_error(ann.post(channel_path(channel_name, "/pop")), 409, "cursor_recovery_required", ANY)
            assert lost["detail"]["channel"] == channel_name
            expect_error(
                ann.post(channel_path(channel_name, "/push"), {"payload": "x"}), 409, "cursor_recovery_required", ANY
            )
            expect_error(ann.get(channel_path(channel_name)), 409, "cursor_recovery_required", ANY)
            assert expect_success(ann.post(channel_path(channel_name, "/clear")))["cleared"] == 0
            ann.verb(channel_name, "push", payload="next")
            assert expect_success(ann.post(channel_path(channel_name, "/pop")))["payload"] == "next"


def test_metrics_count_channel_operations(ann: ChannelApi, bob: ChannelApi, channel_name: str) -> None:
    saves = ann.scraped_metric('tidelog_store_saves_total{result="success"}')
    took = ann.scraped_metric("tidelog_store_save_duration_seconds_count")
    refusals = ann.scraped_metric("tidelog_channels_active")
    ann.create(channel_name, persist=True)
    bob.join(channel_name)
    assert ann.scraped_metric('tidelog_store_saves_total{result="success"}') == saves + 2
    assert ann.scraped_metric("tidelog_store_save_duration_seconds_count") == took + 2
    assert ann.scraped_metric("tidelog_channels_active") == refusals + 1
    bob.post(channel_path(channel_name, "/join"))
    assert ann.scraped_metric('tidelog_channel_joins_total{result="user_in_channel"}') >= 1
    assert ann.metric("channels") >= 1
