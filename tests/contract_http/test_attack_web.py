"""What a web page can do to a server on this machine, and what a key can do outside its names.

Method: requests as a browser makes them for a page of another site, on every way into the server: HTTP/1.1 by the
parser and by a head that is known, HTTP/2, WebSocket, streams of events. Each is refused and has changed nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.contract_http.api import Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, RawConnection, Reply, dumps, loads
from tests.contract_http.http2 import H2Client
from tests.contract_http.server import Server

EVIL: Final = "http://evil.example"
OWN_HOSTS: Final = (
    *("localhost", "LOCALHOST:4000", "127.0.0.1", "127.9.9.9:1"),
    *("[::1]:4000", "localhost.", "tide.test:81"),
)
CHANGES: Final = [
    ("PUT", "/v0/topics/new", b""),
    ("POST", "/v0/topics/new", dumps({"records": [{"data": 1}]})),
    ("POST", "/v0/topics/jobs/claim", dumps({"node": "n"})),
    ("GET", "/v0/topics/jobs/work?node=n", None),
    ("POST", "/v0/topics/jobs/redrive", b""),
    ("POST", "/v0/topics/jobs/delete", dumps({"before_seq": 9})),
    ("DELETE", "/v0/topics/jobs", None),
    ("POST", "/v0/topics/jobs/groups/g/commit", dumps({"seq": 1})),
    ("PUT", "/v0/routers/r", dumps({"source": "jobs", "dest": "copy", "create_dest": True})),
    ("POST", "/v0/channels/%21room@localhost/join", b""),
    ("POST", "/v0/channels/%21room@localhost/leave", b""),
    ("POST", "/v0/channels/%21fifo@localhost/pop", b""),
    ("POST", "/v0/channels/%21fifo@localhost/clear", b""),
    ("POST", "/v0/watch", dumps({"topics": {"jobs": {}}})),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("web"), allowed_hosts="tide.test:81", allowed_origins="https://ui.test"
    ).start() as made:
        with made.client() as api:
            api.create_topic("jobs", type="queue")
            api.write("jobs", 1, 2)
            expect_success(api.put("/v0/channels/%21room@localhost", {}), 201)
        yield made


def ask(target: Server, method: str, where: str, body: bytes | None, host: str, *headers: str) -> Reply:
    """A request with this Host, on a connection of its own."""
    lines = [f"{method} {where} HTTP/1.1", f"Host: {host}", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    with RawConnection(target.address) as wire:
        wire.send("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        return wire.reply()


def own(target: Server) -> str:
    return f"{target.address.host}:{target.address.port}"


def state(target: Server) -> Any:
    with target.client() as api:
        topics = [(row["topic"], row["head_seq"], row["count"]) for row in api.topics()["topics"]]
        members = expect_success(api.get("/v0/channels/%21room@localhost/members"))["members"]
        return topics, members, expect_success(api.get("/v0/routers"))["routers"], api.state("jobs")["queue"]


@pytest.mark.parametrize(("method", "where", "body"), CHANGES, ids=[f"{way[0]} {way[1]}" for way in CHANGES])
@pytest.mark.parametrize(
    ("host", "headers"),
    [
        (None, [f"Origin: {EVIL}"]),
        (None, ["Origin: null"]),
        (None, ["Sec-Fetch-Site: cross-site"]),
        (None, ["Sec-Fetch-Site: same-site"]),
        ("evil.example", []),
        ("evil.example", [f"Origin: {EVIL}"]),
        ("localhost.evil.example:4000", []),
        ("127.0.0.1.evil.example", []),
        ("tide.test:82", []),
    ],
)
def test_a_page_of_another_site_changes_nothing(
    target: Server, method: str, where: str, body: bytes | None, host: str | None, headers: list[str]
) -> None:
    before = state(target)
    expect_error(ask(target, method, where, body, host or own(target), *headers), 403, "forbidden")
    assert state(target) == before


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4000", "10.0.0.7", ""])
@pytest.mark.parametrize(
    "where", ["/v0/topics", "/v0/topics/jobs/records", "/v0/metrics", "/v0/openapi.json", "/nothing"]
)
def test_a_name_that_is_not_the_servers_reads_nothing(target: Server, host: str, where: str) -> None:
    """A page whose name its DNS points at this machine is of the server's own origin, as far as a browser knows."""
    expect_error(ask(target, "GET", where, None, host), 403, "forbidden")


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_names_of_this_machine_and_of_the_settings_are_answered(target: Server, host: str) -> None:
    expect_success(ask(target, "GET", "/v0/topics", None, host))
    expect_success(ask(target, "POST", "/v0/topics/jobs/diff", dumps({"from_seq": 0}), host, f"Origin: http://{host}"))


def test_own_pages_allowed_pages_and_programs_go_on(target: Server) -> None:
    body = dumps({"from_seq": 0})
    for headers in (
        [f"Origin: http://{own(target)}"],
        [f"Origin: https://{own(target)}"],
        ["Origin: https://ui.test"],
        [],
    ):
        expect_success(ask(target, "POST", "/v0/topics/jobs/diff", body, own(target), *headers))
    expect_success(ask(target, "POST", "/v0/topics/jobs/diff", body, own(target), "Sec-Fetch-Site: same-origin"))
    expect_success(
        ask(target, "GET", "/v0/topics", None, own(target), "Sec-Fetch-Site: cross-site")
    )  # somebody's link to it
    for where in ("/v0/health", "/readyz"):
        assert ask(target, "GET", where, None, "probe.example").status == 200


def test_a_known_head_is_no_way_around(target: Server) -> None:
    """The head of a write that comes again and again is taken without the parser."""
    body = dumps({"records": [{"data": 1}]})

    def head(host: str, *more: str) -> bytes:
        lines = ["POST /v0/topics/express HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *more]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    with RawConnection(target.address) as wire:
        for _ in range(4):
            wire.send(head(own(target)))
            assert wire.reply().status in (200, 201)
        for bad in (
            head("evil.example"),
            head(own(target), f"Origin: {EVIL}"),
            head(own(target), "Sec-Fetch-Site: cross-site"),
        ):
            for _ in range(4):
                wire.send(bad)
                expect_error(wire.reply(), 403, "forbidden")
    with target.client() as api:
        assert api.state("express")["head_seq"] == 4


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Any host is answered here, so `Origin` alone tells pages apart."""
    with Server(tmp_path_factory.mktemp("keyed"), api_keys="k").start() as made:
        yield made


@pytest.mark.parametrize("host", ["", ":4000"])
@pytest.mark.parametrize("origin", ["null", "http://", "http://:4000"])
def test_an_empty_host_is_nobodys_own(keyed: Server, host: str, origin: str) -> None:
    """A sandboxed page has the origin `null`, which counted as the server's own where `Host` was empty."""
    lines = ("Authorization: Bearer k", f"Origin: {origin}")
    body = dumps({"records": [{"data": 1}]})
    expect_error(ask(keyed, "POST", "/v0/topics/t", body, host, *lines), 403, "forbidden")
    shake = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    nonce = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    expect_error(ask(keyed, "GET", "/v0/ws", None, host, *lines, *shake, nonce), 403, "forbidden")
    with H2Client(keyed.address) as client:
        client.authority = host
        headers = [JSON, ("authorization", "Bearer k"), ("origin", origin)]
        assert client.request("POST", "/v0/topics/t", body, headers).status == 403
    with keyed.client("k") as api:
        assert api.topics()["topics"] == []


@pytest.mark.parametrize("host", ["localhost:1@evil.example", "[::1]evil.example", "localhost:80:90", "localhost,a"])
def test_what_only_begins_like_a_host_is_refused(target: Server, host: str) -> None:
    expect_error(ask(target, "GET", "/v0/topics", None, host), 403, "forbidden")


def test_http2_names_its_host_too(target: Server) -> None:
    with H2Client(target.address) as client:
        assert client.request("GET", "/v0/topics").status == 200
        assert client.request("GET", "/v0/topics", headers=[("origin", EVIL)]).status == 403
        assert (
            client.request("POST", "/v0/topics/h2", dumps({"records": [{"data": 1}]}), [JSON, ("origin", EVIL)]).status
            == 403
        )
        client.authority = "evil.example"
        assert client.request("GET", "/v0/topics").status == 403


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (None, Origin(EVIL), 403),
        (None, Origin("null"), 403),
        ("evil.example", None, 403),
        ("evil.example", Origin(EVIL), 403),
        (None, Origin("https://ui.test"), 101),
        (None, None, 101),
    ],
)
def test_a_socket_is_for_own_pages(target: Server, host: str | None, origin: Origin | None, status: int) -> None:
    uri = f"ws://{host or own(target)}/v0/ws"
    try:
        with connect(uri, origin=origin, sock=_dialled(target), open_timeout=10) as opened:
            opened.send('{"op":"ping"}')
            assert "pong" in str(opened.recv(10))
            got = 101
    except InvalidStatus as refusal:
        got = refusal.response.status_code
    assert got == status


def _dialled(target: Server) -> socket.socket:
    return socket.create_connection(target.address, timeout=10)


def test_streams_of_events_are_for_own_pages(target: Server) -> None:
    with target.client() as api:
        url = api.watch({"jobs": {}})["stream_url"]
    expect_error(ask(target, "GET", url, None, own(target), f"Origin: {EVIL}"), 403, "forbidden")
    expect_error(ask(target, "GET", url, None, "evil.example"), 403, "forbidden")


def test_with_keys_any_host_is_served_and_pages_are_checked(tmp_path: Path) -> None:
    """A page cannot know the key; behind a proxy the host is whatever that says."""
    with Server(tmp_path / "keys", api_keys="k").start() as keyed:
        key = "Authorization: Bearer k"
        expect_success(ask(keyed, "GET", "/v0/topics", None, "anything.example", key))
        expect_error(ask(keyed, "GET", "/v0/topics", None, "anything.example"), 401, "unauthorized")
        expect_error(
            ask(keyed, "POST", "/v0/topics/t", dumps({"records": [{"data": 1}]}), "a", key, f"Origin: {EVIL}"),
            403,
            "forbidden",
        )
        expect_error(ask(keyed, "POST", "/v0/topics/t", b"", "a", f"Origin: {EVIL}"), 401, "unauthorized")
    with Server(tmp_path / "named", api_keys="k", allowed_hosts="only.example").start() as named:
        expect_success(ask(named, "GET", "/v0/topics", None, "only.example:99", key))
        expect_error(ask(named, "GET", "/v0/topics", None, "other.example", key), 403, "forbidden")


def test_an_open_address_without_keys_answers_for_addresses(tmp_path: Path) -> None:
    with Server(tmp_path, allow_insecure_no_auth=1, host="0.0.0.0").start() as public:
        expect_success(ask(public, "GET", "/v0/topics", None, "192.0.2.7:4000"))
        expect_error(ask(public, "GET", "/v0/topics", None, "evil.example"), 403, "forbidden")


# ── keys and the names that they are for ──────────────────────────────────────────────────────────

ROOT, TEAM = "root-key", "team-key"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = f"{ROOT},{TEAM}::a."
    with Server(tmp_path_factory.mktemp("shared"), api_keys=keys, max_watch_sessions_per_key=3).start() as made:
        with made.client(ROOT) as api:
            api.create_topic("a.mine")
            api.create_topic("b.secret")
            api.write("b.secret", 1)
        yield made


@pytest.fixture
def team_api(shared_server: Server) -> Iterator[Api]:
    with shared_server.client(TEAM) as api:
        yield api


def test_dead_letters_stay_within_the_names_of_a_key(shared_server: Server, team_api: Api) -> None:
    """Records of `a.` ended in `b.stolen`, by three ways."""
    config = {"type": "queue", "dead_letter": "b.stolen", "max_deliveries": 1}
    expect_error(team_api.put(topic_path("a.q1"), config), 403, "forbidden", {"dead_letter": "b.stolen"})
    write = {"records": [{"data": 1}], "config": config}
    expect_error(team_api.post(topic_path("a.q2"), write), 403, "forbidden", {"dead_letter": "b.stolen"})
    headers = {"Authorization": f"Bearer {TEAM}"}
    with connect(f"ws://{own(shared_server)}/v0/ws", additional_headers=headers, open_timeout=10) as opened:
        opened.send(dumps({"op": "publish", "topic": "a.q3", **write}).decode())
        assert loads(str(opened.recv(10)))["code"] == "forbidden"
    assert not any(team_api.exists(name) for name in ("a.q1", "a.q2", "a.q3"))
    expect_success(team_api.put(topic_path("a.q4"), {**config, "dead_letter": "a.dead"}), 201)
    with shared_server.client(ROOT) as root:
        expect_success(root.put(topic_path("a.q5"), config), 201)
    expect_success(
        team_api.put(topic_path("a.q5"), {**config, "lease_ms": 1000}), 200
    )  # what another key has set may stay


def test_a_drop_takes_no_router_of_others_along(shared_server: Server, team_api: Api) -> None:
    with shared_server.client(ROOT) as root:
        expect_success(root.put("/v0/routers/b.router", {"source": "a.mine", "dest": "b.secret"}), 201)
        said = expect_error(team_api.delete(topic_path("a.mine")), 403, "forbidden")
        assert "b." not in said["message"]
        assert [row["router"] for row in expect_success(root.get("/v0/routers"))["routers"]] == ["b.router"]
        expect_success(root.delete("/v0/routers/b.router"))
    expect_success(
        team_api.put("/v0/routers/a.router", {"source": "a.mine", "dest": "a.copy", "create_dest": True}), 201
    )
    assert team_api.drop("a.mine")["routers_removed"] == ["a.router"]


def test_list_hides_routers_of_other_keys(shared_server: Server, team_api: Api) -> None:
    with shared_server.client(ROOT) as root:
        expect_success(
            root.put("/v0/routers/a.odd", {"source": "b.secret", "dest": "b.copy", "create_dest": True}), 201
        )
    expect_error(
        team_api.put("/v0/routers/a.odd", {"source": "a.x", "dest": "a.y"}), 403, "forbidden", {"topic": "b.secret"}
    )


def test_metrics_are_refused_to_a_key_with_prefixes(shared_server: Server, team_api: Api) -> None:
    for accept in ("text/plain", "application/json"):
        reply = team_api.get("/v0/metrics", [("Accept", accept)])
        expect_error(reply, 403, "forbidden")
        assert b"b.secret" not in reply.body
    with shared_server.client(ROOT) as root:
        assert b"b.secret" in root.get("/v0/metrics").body


def test_sessions_have_a_cap_by_key(shared_server: Server, team_api: Api) -> None:
    expect_success(team_api.put(topic_path("a.watched"), {}), 201)
    for _ in range(3):
        team_api.watch({"a.watched": {}})
    reply = team_api.post("/v0/watch", {"topics": {"a.watched": {}}})
    expect_error(reply, 429, "throttled", {"limit": "watch_sessions_per_key", "max": 3})
    with shared_server.client(ROOT) as root:
        root.watch({"a.watched": {}})


def test_request_without_a_key_learns_nothing_about_sessions(shared_server: Server, team_api: Api) -> None:
    with shared_server.client() as nobody:
        expect_error(nobody.get("/v0/watch/nope"), 401, "unauthorized")
        expect_error(nobody.get("/v0/watch/nope?token=wrong"), 401, "unauthorized")
    expect_error(team_api.get("/v0/watch/nope"), 404, "not_found")


# ── what a write asks for ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"durability": "fsynk"}, "ephemeral, memory, disk, fsync"),
        ({"durabilty": "fsync"}, "durability"),
        ({"Durability": "fsync"}, "durability"),
        ({"discard": "new"}, "old, reject"),
        ({"type": "qeue"}, "log, queue"),
        ({"consistency": "stronk"}, "eventual, strong"),
        ({"cap_record": 5}, "cap_records"),
        ({"deadletter": "x"}, "dead_letter"),
        ({"durable": "yes"}, "true or false"),
    ],
)
def test_a_misspelt_config_is_refused(target: Server, config: dict[str, Any], words: str) -> None:
    """A field `durabilty` made a topic of class `disk`, with 201."""
    with target.client() as api:
        for reply in (
            api.put(topic_path("misspelt"), config),
            api.post(topic_path("misspelt"), {"records": [{"data": 1}], "config": config}),
        ):
            said = expect_error(reply, 400, "invalid_request")
            assert words in said["message"]
        assert not api.exists("misspelt")
        assert api.put(topic_path("stray"), {"colour": "red"}).status in (200, 201)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_an_ack_says_what_it_means(target: Server, durability: str) -> None:
    """A write that asks for `fsync` of a topic of another class got its ack without a word."""
    topic = f"class-{durability}"
    with target.client() as api:
        asked = {"records": [{"data": 1}], "config": {"durability": "fsync"}}
        api.create_topic(topic, durability=durability)
        assert expect_success(api.post(topic_path(topic), asked))["durability"] == durability
        for _ in range(4):  # the head is known from the second on
            assert expect_success(api.post(topic_path(topic), {"records": [{"data": 1}]}))["durability"] == durability
        lines = api.request("POST", topic_path(topic), b'{"data":1}\n', [("Content-Type", "application/x-ndjson")])
        assert expect_success(lines)["durability"] == durability
        assert expect_success(api.post(topic_path(f"new-{topic}"), asked), 201)["durability"] == "fsync"
    with connect(f"ws://{own(target)}/v0/ws", open_timeout=10) as opened:
        opened.send(dumps({"op": "publish", "topic": topic, **asked}).decode())
        assert loads(str(opened.recv(10)))["durability"] == durability
