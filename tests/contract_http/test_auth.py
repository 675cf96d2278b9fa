"""§1.4, §1.5: who may do what, and in which order that is found out."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.contract_http.api import Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, Reply, dumps, loads
from tests.contract_http.server import Server

READER, WRITER, DELETER, ADMIN, BOTH = "key-reader", "key-writer", "key-deleter", "key-admin", "key-both"
FULL, TEAM, EVERY, SPACED, WRITE_ADMIN = "key-full", "key-team", "key-every", "key with+%blanks", "key-wa"
KEYS = (
    f" {FULL} ,, {READER}:read,{WRITER}:W, {DELETER}:Del ,{ADMIN}:ADMIN,{BOTH}:rw,{TEAM}:r+write:team-|shared:a,"
    f"{EVERY}::pre-,{SPACED}:r,{WRITE_ADMIN}:w+a,key-other:read+write+delete+admin,key-d:d"
)
BODY_MAX = 2_000
_numbers = count(1)


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys of every kind."""
    folder = tmp_path_factory.mktemp("locked")
    with Server(folder, api_keys=KEYS, max_body_bytes=BODY_MAX).start() as running:
        yield running
    for secret in (FULL, READER, WRITER, DELETER, ADMIN, BOTH, TEAM, EVERY, SPACED, "key-other"):
        assert secret not in running.log, "no key is ever logged"


@pytest.fixture
def full_access_api(keyed_server: Server) -> Iterator[Api]:
    with keyed_server.client(FULL) as client:
        yield client


@pytest.fixture
def existing_topic(full_access_api: Api) -> str:
    """A topic that is there."""
    name = f"t-{next(_numbers)}"
    full_access_api.create_topic(name)
    full_access_api.write(name, 1)
    return name


def fresh(what: str = "n") -> str:
    return f"{what}-{next(_numbers)}"


# ── keys ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"bearer {FULL}",
        f"BEARER {FULL}",
        f"Bearer{FULL}",
        f"Basic {FULL}",
        FULL,
        "Bearer nobody",
        f"Bearer {FULL}x",
        f"Bearer {FULL[:-1]}",
        f"Bearer {FULL} {FULL}",
        f"Bearer {READER}:read",
        "Bearer \xff\xfe",
    ],
)
def test_without_a_valid_key_everything_is_401(keyed_server: Server, existing_topic: str, header: str | None) -> None:
    """§1.5: the scheme is case-sensitive; no `WWW-Authenticate`. §1.3: unknown paths ask for a key first."""
    headers = [] if header is None else [("Authorization", header)]
    with keyed_server.client() as client:
        for method, target in (
            ("GET", "/v0/topics"),
            ("GET", topic_path(existing_topic)),
            ("HEAD", topic_path(existing_topic)),
            ("PUT", topic_path(existing_topic)),
            ("POST", topic_path(existing_topic)),
            ("DELETE", topic_path(existing_topic)),
            ("POST", topic_path(existing_topic, "/diff")),
            ("POST", topic_path(existing_topic, "/delete")),
            ("POST", "/v0/watch"),
            ("GET", "/v0/ws"),
            ("GET", "/v0/metrics"),
            ("GET", "/nowhere"),
            ("PATCH", "/v0/topics"),
            ("GET", "/v0/%ff"),
            ("GET", "/v0/topics/%ff"),
            ("POST", "/v0/topics/%ff/diff"),
            ("GET", "/v0/watch/%ff"),
        ):
            reply = client.request(method, target, b"" if method in ("PUT", "POST") else None, headers)
            if method == "HEAD":
                assert reply.status == 401
            else:
                expect_error(reply, 401, "unauthorized")


@pytest.mark.parametrize("header", [f"Bearer {FULL}", f"Bearer   {FULL}", f"Bearer {FULL}  "])
def test_a_key_is_trimmed(keyed_server: Server, header: str) -> None:
    """§1.5."""
    with keyed_server.client() as client:
        expect_success(client.get("/v0/topics", [("Authorization", header)]))


def test_a_key_in_the_query_opens_no_ordinary_route(keyed_server: Server, existing_topic: str) -> None:
    """§1.5: `?token=` is for streams alone; not for WebSockets either."""
    with keyed_server.client() as client:
        for method, target in (
            ("GET", "/v0/topics"),
            ("GET", topic_path(existing_topic)),
            ("PUT", topic_path(existing_topic)),
            ("POST", topic_path(existing_topic)),
            ("POST", topic_path(existing_topic, "/diff")),
            ("POST", "/v0/watch"),
            ("GET", "/v0/ws"),
            ("GET", "/v0/metrics"),
            ("GET", "/nowhere"),
        ):
            reply = client.request(method, f"{target}?token={FULL}", b"" if method != "GET" else None)
            expect_error(reply, 401, "unauthorized")


def test_probes_are_open_and_metrics_are_not(keyed_server: Server) -> None:
    """§1.5, B15."""
    with keyed_server.client() as client:
        for target in ("/v0/health", "/healthz", "/v0/ready", "/readyz"):
            assert client.get(target).status == 200
            assert client.request("HEAD", target).status == 200
            assert client.get(target, [("Authorization", "Bearer wrong")]).status == 200
            expect_error(client.post(target, {}), 405, "method_not_allowed")
        expect_error(client.get("/v0/metrics"), 401, "unauthorized")
    with keyed_server.client(WRITER) as client:
        expect_error(client.get("/v0/metrics"), 403, "forbidden")
    with keyed_server.client(READER) as client:
        assert client.get("/v0/metrics").status == 200


def test_probes_can_be_closed(tmp_path: Path) -> None:
    """§1.2: `PROBE_AUTH`: any valid key, whatever its scopes."""
    targets = ("/v0/health", "/healthz", "/v0/ready", "/readyz")
    with Server(tmp_path, api_keys=f"{WRITER}:w", probe_auth="true").start(key=WRITER) as server:
        with server.client() as client:
            for target in targets:
                expect_error(client.get(target), 401, "unauthorized")
                expect_error(client.get(f"{target}?token={WRITER}"), 401, "unauthorized")
        with server.client(WRITER) as client:
            for target in targets:
                assert client.get(target).status == 200


@pytest.mark.parametrize(
    ("name", "value", "status", "code"),
    [("Sec-WebSocket-Version", "8", 426, "upgrade_required"), ("Sec-WebSocket-Key", "x", 400, "invalid_request")],
)
def test_a_handshake_that_is_wrong_needs_a_key_first(
    keyed_server: Server, name: str, value: str, status: int, code: str
) -> None:
    """§1.4: 401 before whatever else is wrong with a request."""
    shake = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    headers = [("Connection", "Upgrade"), ("Upgrade", "websocket"), *{**shake, name: value}.items()]
    with keyed_server.client() as client:
        expect_error(client.get("/v0/ws", headers), 401, "unauthorized")
        expect_error(client.get("/v0/ws", [*headers, ("Authorization", "Bearer nobody")]), 401, "unauthorized")
    with keyed_server.client(READER) as client:
        reply = client.get("/v0/ws", headers)
        expect_error(reply, status, code)
        assert reply.header("sec-websocket-version") == ("13" if status == 426 else None)
        assert reply.header("connection") == "close"
        described = client.get("/v0/openapi.json").json()["paths"]["/v0/ws"]["get"]["responses"]
        assert described.keys() >= {"401", str(status)}


# ── scopes ────────────────────────────────────────────────────────────────────────────────────

ACTIONS: dict[str, str] = {  # what is done → the scope it needs
    "list": "r",
    "state": "r",
    "head": "r",
    "diff": "r",
    "watch": "r",
    "metrics": "r",
    "write": "w",
    "patch": "w",
    "get diff": "w",
    "put": "a",
    "create": "a",
    "delete": "d",
    "drop": "d",
    "drop absent": "d",
}
SCOPES = {FULL: "rwda", READER: "r", WRITER: "w", DELETER: "d", ADMIN: "a", BOTH: "rw", WRITE_ADMIN: "wa", "key-d": "d"}


def do(client: Api, action: str, topic: str) -> Reply:
    match action:
        case "list":
            return client.get("/v0/topics")
        case "state":
            return client.get(topic_path(topic))
        case "head":
            return client.request("HEAD", topic_path(topic))
        case "diff":
            return client.post(topic_path(topic, "/diff"))
        case "watch":
            return client.post("/v0/watch", {"topics": {topic: {}}})
        case "metrics":
            return client.get("/v0/metrics")
        case "write":
            return client.post(topic_path(topic), {"records": [{"data": 1}]})
        case "patch":
            return client.request("PATCH", topic_path(topic), b"")
        case "get diff":
            return client.get(topic_path(topic, "/diff"))
        case "put":
            return client.put(topic_path(topic), {})
        case "create":
            return client.put(topic_path(fresh()), {})
        case "delete":
            return client.post(topic_path(topic, "/delete"), {"before_seq": 1})
        case "drop":
            return client.delete(topic_path(topic))
        case _:
            return client.delete(topic_path(fresh()))


@pytest.mark.parametrize("action", ACTIONS)
def test_each_route_needs_its_scope(keyed_server: Server, full_access_api: Api, action: str) -> None:
    """§1.3, §1.5, C: the matrix. Methods that a topic's path does not have need `write`: 403 before 405."""
    allowed = {"patch": 405, "get diff": 405, "create": 201}.get(action, 200)
    for key, scopes in SCOPES.items():
        topic = fresh()
        full_access_api.create_topic(topic)
        with keyed_server.client(key) as client:
            reply = do(client, action, topic)
        if ACTIONS[action] in scopes:
            assert reply.status == allowed, (action, key, reply.body)
        elif action == "head":
            assert reply.status == 403
        else:
            expect_error(reply, 403, "forbidden")
            assert full_access_api.exists(topic), "and nothing was done"


def test_an_unknown_path_needs_a_key_and_no_scope(keyed_server: Server) -> None:
    """§1.3. One that is no text as well: what is wrong with it is told behind the key."""
    for key in (READER, DELETER, TEAM):
        with keyed_server.client(key) as client:
            expect_error(client.get("/nowhere"), 404, "not_found")
            expect_error(client.get("/v0/topics/%ff"), 400, "invalid_request")
            expect_error(client.request("PATCH", "/v0/watch", b""), 405, "method_not_allowed")


def test_creating_by_writing_needs_write_alone(keyed_server: Server) -> None:
    """§1.5: and `admin` with a config, 403 with the topic."""
    topic = fresh()
    with keyed_server.client(WRITER) as client:
        expect_success(client.try_write(topic, {"data": 1}), 201)
        other = fresh()
        reply = client.try_write(other, {"data": 1}, config={"cap_records": 5})
        expect_error(reply, 403, "forbidden", {"topic": other})
        reply = client.try_write(other, {"data": 1}, config={})
        expect_error(reply, 403, "forbidden", {"topic": other})
        expect_success(client.try_write(topic, {"data": 1}, config={"cap_records": 5}), 200)
        expect_success(client.try_write(other, {"data": 1}, config=None), 201)
    with keyed_server.client(WRITE_ADMIN) as client:
        expect_success(client.try_write(fresh(), {"data": 1}, config={"cap_records": 5}), 201)


def test_the_scope_for_a_config_is_asked_before_the_records_are_looked_at(keyed_server: Server) -> None:
    """§2.5: admin-for-config 403, then count, key and records."""
    topic = fresh()
    with keyed_server.client(WRITER) as client:
        reply = client.try_write(topic, config={"cap_records": 5}, idempotency_key="k" * 300)
        expect_error(reply, 403, "forbidden", {"topic": topic})
        reply = client.try_write(topic, {"data": 1}, config={"dead_letter": "-bad"})
        expect_error(reply, 403, "forbidden", {"topic": topic})


# ── names ─────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_for_names_that_begin_so(keyed_server: Server, full_access_api: Api) -> None:
    """§1.5: prefixes, which may hold a colon; 403 without detail where the name is in the path."""
    mine, shared, other = fresh("team-"), fresh("shared:a"), fresh("shared:b")
    for topic in (mine, shared, other):
        full_access_api.create_topic(topic)
    with keyed_server.client(TEAM) as client:
        for topic in (mine, shared):
            expect_success(client.try_write(topic, {"data": 1}))
            assert client.seqs(topic) == [1]
            expect_error(client.delete(topic_path(topic)), 403, "forbidden")
        for topic in (other, "shared:", "team", "TEAM-x", "x-team-1", fresh("absent")):
            expect_error(client.try_write(topic, {"data": 1}), 403, "forbidden")
            expect_error(client.get(topic_path(topic)), 403, "forbidden")
            expect_error(client.post(topic_path(topic, "/diff")), 403, "forbidden")
        expect_error(client.get(topic_path("team-not-there")), 404, "topic_not_found", {"topic": "team-not-there"})
    assert full_access_api.state(other)["head_seq"] == 0
    with keyed_server.client(EVERY) as client:
        made = fresh("pre-")
        expect_success(client.put(topic_path(made), {}), 201)
        assert client.drop(made)["deleted"], "no scopes named: all of them"
        expect_error(client.put(topic_path(fresh("post-")), {}), 403, "forbidden")


def test_a_name_is_decoded_before_it_is_compared(keyed_server: Server) -> None:
    """§1.1, D8."""
    with keyed_server.client(TEAM) as client:
        name = fresh("x")
        assert (
            expect_success(client.post(f"/v0/topics/%74eam%2D{name}", {"records": [{"data": 1}]}), 201)["topic"]
            == f"team-{name}"
        )
        expect_error(client.get("/v0/topics/%74eem-x"), 403, "forbidden")
        expect_error(client.get("/v0/topics/team%252Dx"), 403, "forbidden")


def test_a_watch_with_one_foreign_name_is_refused_whole(keyed_server: Server, full_access_api: Api) -> None:
    """§1.5, C: 403 with that name; before it is looked for; and no session is made."""
    mine, other = fresh("team-"), fresh("other")
    full_access_api.create_topic(mine)
    full_access_api.create_topic(other)
    sessions = full_access_api.metrics()["watch_sessions"]
    with keyed_server.client(TEAM) as client:
        for foreign in (other, fresh("absent")):
            reply = client.post("/v0/watch", {"topics": {mine: {}, foreign: {}}})
            expect_error(reply, 403, "forbidden", {"topic": foreign})
            reply = client.post("/v0/watch?lenient=true", {"topics": {foreign: {}}})
            expect_error(reply, 403, "forbidden", {"topic": foreign})
        assert full_access_api.metrics()["watch_sessions"] == sessions
        expect_error(client.post("/v0/watch", {"topics": {}}), 400, "invalid_request")
        expect_success(client.post("/v0/watch", {"topics": {mine: {}}}))


def test_a_list_shows_only_names_of_the_key(keyed_server: Server, full_access_api: Api) -> None:
    """§1.5, C: others are dropped silently, and pages count what is shown."""
    number = next(_numbers)
    for topic in (f"l{number}-a", f"pre-{number}-a", f"pre-{number}-b", f"pre-{number}-c", f"zz{number}"):
        full_access_api.create_topic(topic)
    with keyed_server.client(EVERY) as client:
        names = [row["topic"] for row in client.topics("?page_size=1000")["topics"]]
        assert {f"pre-{number}-a", f"pre-{number}-b", f"pre-{number}-c"} <= set(names)
        assert all(name.startswith("pre-") for name in names)
        first = client.topics(f"?prefix=pre-{number}&page_size=2")
        assert [row["topic"] for row in first["topics"]] == [f"pre-{number}-a", f"pre-{number}-b"]
        rest = client.topics(f"?prefix=pre-{number}&page_size=2&cursor={first['next_cursor']}")
        assert [row["topic"] for row in rest["topics"]] == [f"pre-{number}-c"]
        assert "next_cursor" not in rest
        assert client.topics(f"?prefix=l{number}")["topics"] == []


# ── order (§1.4) ──────────────────────────────────────────────────────────────────────────────


def test_the_checks_come_in_their_order(keyed_server: Server) -> None:
    """§1.4: key, scope, name, size, media type, JSON, and only then the endpoint."""
    large, broken = b"x" * (BODY_MAX + 1), b"{"
    target = topic_path(fresh("absent"), "/diff")
    with keyed_server.client() as client:
        expect_error(client.request("POST", target, large), 401, "unauthorized")
    with keyed_server.client(WRITER) as client:
        expect_error(client.request("POST", target, large), 403, "forbidden")
    with keyed_server.client(TEAM) as client:
        expect_error(client.request("POST", target, large), 403, "forbidden")
    with keyed_server.client(READER) as client:
        expect_error(client.request("POST", target, large), 413, "payload_too_large")
        expect_error(client.request("POST", target, broken), 415, "unsupported_media_type")
        expect_error(client.request("POST", target, broken, [JSON]), 400, "invalid_request")
        assert client.request("POST", target, b"{}", [JSON]).status == 404


# ── sessions ──────────────────────────────────────────────────────────────────────────────────


def test_a_session_has_a_name_that_cannot_be_guessed(keyed_server: Server, existing_topic: str) -> None:
    """§1.5: `wid_` and 16 bytes in base64url without padding."""
    with keyed_server.client(READER) as client:
        wids = [client.watch({existing_topic: {}})["wid"] for _ in range(20)]
    assert len(set(wids)) == 20
    for wid in wids:
        assert re.fullmatch(r"wid_[A-Za-z0-9_-]{22}", wid)
        assert len(urlsafe_b64decode(wid[4:] + "==")) == 16


def test_only_the_key_that_made_a_session_opens_it(keyed_server: Server, existing_topic: str) -> None:
    """§1.5, B23: by header or by `?token=`; none, a wrong and another valid key are 401."""
    with keyed_server.client(READER) as client:
        url = client.watch({existing_topic: {}})["stream_url"]
    for key in (None, "wrong", FULL, "key-other", f"{READER}x"):
        with keyed_server.events(url, key=key) as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 401, "unauthorized")
        if key is not None:
            with keyed_server.events(f"{url}?token={key}") as stream:
                assert stream.refusal is not None
                expect_error(stream.refusal, 401, "unauthorized")
    with keyed_server.events(url, key=READER) as stream:
        stream.expect("record", "caught-up")
    with keyed_server.events(f"{url}?token={READER}") as stream:
        stream.expect("caught-up")
    with keyed_server.events(f"{url}?a=b&token={READER}&token=wrong") as stream:
        stream.expect("caught-up")
    with keyed_server.events(f"{url}?token=wrong&token={READER}") as stream:
        assert stream.refusal is not None, "the first occurrence counts"
        expect_error(stream.refusal, 401, "unauthorized")


def test_a_token_is_decoded_as_a_form_is(keyed_server: Server, existing_topic: str) -> None:
    """§1.5: `+` is a blank, and percent escapes."""
    with keyed_server.client(SPACED) as client:
        url = client.watch({existing_topic: {}})["stream_url"]
    with keyed_server.events(f"{url}?token=key+with%2B%25blanks") as stream:
        stream.expect("record", "caught-up")
    with keyed_server.events(f"{url}?token=key%20with%2b%25blanks") as stream:
        stream.expect("caught-up")
    with keyed_server.events(f"{url}?token=key+with+%25blanks") as stream:
        assert stream.refusal is not None
        expect_error(stream.refusal, 401, "unauthorized")


def test_an_unknown_session_is_404_with_a_key_and_401_without(keyed_server: Server) -> None:
    """§1.5; without a valid key nothing is told of sessions (docs/decisions/0041)."""
    for key in (None, "wrong", FULL):
        for wid in ("wid_AAAAAAAAAAAAAAAAAAAAAA", "nope"):
            with keyed_server.events(f"/v0/watch/{wid}", key=key) as stream:
                assert stream.refusal is not None
                expect_error(stream.refusal, *((404, "not_found") if key == FULL else (401, "unauthorized")))


def test_the_checks_of_a_stream_come_in_their_order(keyed_server: Server, existing_topic: str) -> None:
    """§2.9: 406, 404, 401; and 401 before them for a request without a valid key."""
    with keyed_server.client(READER) as client:
        url = client.watch({existing_topic: {}})["stream_url"]
    for target in (url, "/v0/watch/wid_nope"):
        for key, status, code in ((FULL, 406, "not_acceptable"), (None, 401, "unauthorized")):
            with keyed_server.events(target, key=key, headers={"Accept": "application/json"}) as stream:
                assert stream.refusal is not None
                expect_error(stream.refusal, status, code)


# ── WebSockets ────────────────────────────────────────────────────────────────────────────────


def socket(server: Server, key: str | None, query: str = "") -> ClientConnection:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    host, port = server.address
    return connect(f"ws://{host}:{port}/v0/ws{query}", additional_headers=headers, open_timeout=10, close_timeout=5)


def ask(ws: ClientConnection, **command: object) -> dict[str, Any]:
    ws.send(dumps(command).decode())
    answer = loads(ws.recv(10))
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(("key", "query"), [(None, ""), ("wrong", ""), (None, f"?token={FULL}")])
def test_a_websocket_needs_a_key_in_its_header(keyed_server: Server, key: str | None, query: str) -> None:
    """§1.5, §3.9."""
    with pytest.raises(InvalidStatus) as stopped:
        socket(keyed_server, key, query)
    response = stopped.value.response
    assert response.status_code == 401
    assert loads(bytes(response.body or b""))["error"]["code"] == "unauthorized"


def test_a_websocket_asks_for_scopes_by_command(keyed_server: Server, existing_topic: str) -> None:
    """§3.9, C: any valid key connects; subscribe needs read, publish write, with a config admin."""
    publish = {"op": "publish", "topic": existing_topic, "records": [{"data": 1}]}
    subscribe = {"op": "subscribe", "topic": existing_topic}
    for key, scopes in SCOPES.items():
        with socket(keyed_server, key) as ws:
            for config in ({}, {"dead_letter": "-bad"}):  # of a topic that is there it is not looked at further
                answer = ask(ws, **publish, config=config)
                if not {"w", "a"} <= set(scopes):
                    assert (answer["op"], answer["code"]) == ("error", "forbidden"), (key, answer)
                else:
                    assert answer["op"] == "ack", (key, answer)
            answer = ask(ws, **publish)
            assert answer.get("code") == (None if "w" in scopes else "forbidden"), (key, answer)
            answer = ask(ws, **subscribe, tail=True)
            assert answer.get("code") == (None if "r" in scopes else "forbidden"), (key, answer)
            assert ask(ws, op="unsubscribe", topic=existing_topic)["op"] in ("unsubscribed", "caught_up")


def test_a_websocket_asks_for_names_by_command(keyed_server: Server, full_access_api: Api) -> None:
    """§3.9: prefixes, and the socket stays open."""
    mine, other = fresh("team-"), fresh("other")
    full_access_api.create_topic(mine)
    full_access_api.create_topic(other)
    with socket(keyed_server, TEAM) as ws:
        assert ask(ws, op="publish", topic=other, records=[{"data": 1}], request_id=1)["code"] == "forbidden"
        assert ask(ws, op="subscribe", topic=other)["code"] == "forbidden"
        assert ask(ws, op="subscribe", topics={mine: {}, other: {}})["code"] == "forbidden", "all or nothing"
        assert ask(ws, op="subscribe", topics={mine: {}, other: {}}, lenient=True)["code"] == "forbidden"
        assert ask(ws, op="publish", topic=mine, records=[{"data": 1}])["op"] == "ack"
        assert ask(ws, op="subscribe", topic=mine)["op"] == "subscribed"
    assert full_access_api.state(other)["head_seq"] == 0
