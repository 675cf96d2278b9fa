"""The hook of a server: a callable that says who users are, and what may be published. docs/channels.md, "The hook"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract_http.api import ANY, expect_error, expect_success
from tests.contract_http.channel_api import (
    ANN,
    BOB,
    ChannelApi,
    ChannelEvents,
    ChannelSocket,
    channel_api,
    channel_path,
)
from tests.contract_http.server import Server

HOOK = """
import threading
from tidelog.channels import Authenticate
from tidelog.errors import Rejected

gate = threading.Event()

def hook(asked):
    if isinstance(asked, Authenticate):
        if asked.token == "crash":
            raise RuntimeError("the directory is down")
        if asked.token == "alias":
            return "alias@example.org"
        return asked.token == "secret of " + asked.user
    if asked.payload == b"hang":
        gate.wait(30)
        return True
    if asked.payload == b"go on":
        gate.set()
    if asked.payload.startswith(b"bad"):
        return False
    if asked.payload == b"why":
        raise Rejected("because")
    if asked.payload == b"crash":
        raise RuntimeError("oops")
    if asked.payload == b"odd":
        return 7
    if asked.payload == b"grow":
        return b"x" * 100000
    return asked.payload.upper()

class Hooks:
    @staticmethod
    def mild(asked):
        return True

number = 7
"""
ROOM = "!room@example.org"


def headers(user: str, token: str | None = None) -> list[tuple[str, str]]:
    return [("X-Tidelog-User", user), ("X-Tidelog-User-Token", token or f"secret of {user}")]


def put(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "doorman.py").write_text(HOOK)


@pytest.fixture(scope="module")
def channel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without keys: who somebody is, is the hook's word, so that memberships can be kept."""
    folder = tmp_path_factory.mktemp("hooked")
    put(folder)
    with Server(folder, hook="doorman:hook").start() as running:
        with channel_api(running) as api:
            expect_success(
                api.request(
                    "PUT",
                    channel_path(ROOM),
                    b'{"persist":true}',
                    [("Content-Type", "application/json"), *headers(ANN)],
                ),
                201,
            )
        yield running


@pytest.fixture
def api(channel_server: Server) -> Iterator[ChannelApi]:
    with channel_api(channel_server) as client:
        yield client


def test_the_hook_says_who_a_user_is(api: ChannelApi) -> None:
    assert expect_success(api.get("/v0/channels", headers(ANN)))["user"] == ANN
    assert expect_success(api.get("/v0/channels", headers(ANN)))["limits"]["auth"] is True
    assert expect_success(api.get("/v0/channels", headers(BOB, "alias")))["user"] == "alias@example.org"
    expect_error(api.get("/v0/channels", headers(ANN, "wrong")), 403, "forbidden")
    expect_error(api.get("/v0/channels"), 403, "forbidden")
    expect_error(api.get("/v0/channels", headers(ANN, "crash")), 503, "hook_failed")
    assert expect_success(api.get(f"/v0/channels?user={ANN}&user_token=secret+of+{ANN}"))["user"] == ANN
    assert api.scraped_metric('tidelog_auth_attempts_total{result="success"}') >= 3
    assert api.scraped_metric('tidelog_auth_attempts_total{result="forbidden"}') >= 2
    assert api.scraped_metric('tidelog_auth_attempts_total{result="hook_failed"}') >= 1


def test_the_hook_takes_replaces_and_refuses_payloads(api: ChannelApi) -> None:
    before = expect_success(api.get(channel_path(ROOM), headers(ANN)))["last_seq"]
    said = expect_success(api.post(channel_path(ROOM, "/publish"), {"payload": "hello"}, headers(ANN)))
    assert said["first_seq"] == before + 1
    page = expect_success(api.get(channel_path(ROOM, "/history?newest=1"), headers(ANN)))
    assert page["messages"][0]["payload"] == "HELLO"
    for payload, status, code in (
        ("bad words", 422, "rejected"),
        ("why", 422, "rejected"),
        ("crash", 503, "hook_failed"),
        ("odd", 503, "hook_failed"),
        ("grow", 400, "record_too_large"),
    ):
        expect_error(api.post(channel_path(ROOM, "/publish"), {"payload": payload}, headers(ANN)), status, code)
    many = {"messages": [{"payload": "fine"}, {"payload": "bad"}]}
    expect_error(api.post(channel_path(ROOM, "/publish"), many, headers(ANN)), 422, "rejected")
    assert expect_success(api.get(channel_path(ROOM), headers(ANN)))["last_seq"] == before + 1, (
        "all of a call or nothing"
    )


def test_a_socket_and_a_stream_are_authenticated_once(channel_server: Server) -> None:
    with (
        ChannelSocket(channel_server, headers=dict(headers(ANN))) as line,
        ChannelSocket(channel_server, headers=dict(headers(ANN, "wrong"))) as wrong,
    ):
        with channel_api(channel_server) as api:
            before = api.scraped_metric('tidelog_auth_attempts_total{result="success"}')
            for _ in range(3):
                assert line.request("channel_publish", "channel_ack", channel=ROOM, payload="x")["durable"] is True
            assert api.scraped_metric('tidelog_auth_attempts_total{result="success"}') == before + 1
        wrong.expect_error("forbidden", "channel_publish", channel=ROOM, payload="x")
        line.expect_error("rejected", "channel_publish", channel=ROOM, payload="bad")
    with ChannelEvents(channel_server, ROOM, f"?user={ANN}&user_token=secret+of+{ANN}") as heard:
        assert heard.hello["user"] == ANN
    ChannelEvents(channel_server, ROOM, f"?user={ANN}&user_token=wrong").expect_refused(403, "forbidden", None)


def test_a_hook_that_hangs_keeps_topics_and_other_channels_going(channel_server: Server) -> None:
    """Also where nothing else would keep the publish from being delivered at once."""
    other, stuck = "!other@example.org", "!stuck@example.org"
    with channel_api(channel_server) as one, channel_api(channel_server) as two:
        for each in (other, stuck):
            expect_success(two.request("PUT", channel_path(each), None, headers(ANN)), 201)
        one.begin(
            "POST",
            channel_path(stuck, "/publish?qos=1"),
            b"hang",
            [("Content-Type", "application/octet-stream"), *headers(ANN)],
        )
        expect_success(two.post("/v0/topics/t", {"records": [{"data": 1}]}), 201)
        expect_success(two.post(channel_path(other, "/publish"), {"payload": "x"}, headers(ANN)))
        expect_success(two.post(channel_path(other, "/publish"), {"payload": "go on"}, headers(ANN)))
        expect_success(one.end())


def test_restart_keeps_users_that_the_hook_accepted(tmp_path: Path) -> None:
    put(tmp_path / "s")
    with Server(tmp_path / "s", hook="doorman:hook").start() as server:
        with channel_api(server) as api:
            expect_success(
                api.request(
                    "PUT",
                    channel_path(ROOM),
                    b'{"persist":true}',
                    [("Content-Type", "application/json"), *headers(ANN)],
                ),
                201,
            )
        server.restart()
        with channel_api(server) as api:
            assert expect_success(api.get(channel_path(ROOM), headers(ANN)))["owner"] == ANN


def test_beside_keys_the_key_opens_the_door_and_the_hook_says_who_it_is(tmp_path: Path) -> None:
    put(tmp_path / "s")
    keys = "ann@example.org=ann:rw,app:rw"
    with (
        Server(tmp_path / "s", hook="doorman:Hooks.mild", api_keys=keys).start() as server,
        channel_api(server, "ann") as ann,
        channel_api(server, "app") as app,
        channel_api(server) as nobody,
    ):
        assert expect_success(ann.get("/v0/channels"))["user"] == ANN, (
            "the key's own name is what the hook is asked about"
        )
        assert expect_success(app.get("/v0/channels", [("X-Tidelog-User", BOB)]))["user"] == BOB, "the hook vouches"
        expect_error(nobody.get("/v0/channels", [("X-Tidelog-User", BOB)]), 401, "unauthorized")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("doorman", "module:function"),
        ("doorman:", "module:function"),
        ("nowhere:hook", "cannot be imported"),
        ("doorman:missing", "no callable"),
        ("doorman:number", "no callable"),
    ],
)
def test_a_hook_that_is_not_there_keeps_the_server_from_starting(tmp_path: Path, named: str, said: str) -> None:
    put(tmp_path / "s")
    server = Server(tmp_path / "s", hook=named)
    process = server.launch()
    assert process.wait(60) == 2
    server.wait()
    assert said in server.log
    assert "Traceback" not in server.log
    assert not (tmp_path / "s" / "port.txt").exists()


def test_the_hook_may_be_named_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    for how in ("line", "file"):
        folder = tmp_path / how
        put(folder)
        (folder / "settings.toml").write_text('hook = "doorman:hook"\n')
        more = ["--hook", "doorman:hook"] if how == "line" else ["--config", "settings.toml"]
        args = ["--data", "data", "--port", "0", "--port-file", "port.txt", *more]
        with Server(folder, *args).start() as server, channel_api(server) as api:
            expect_error(api.get("/v0/channels"), 403, "forbidden", ANY)
            assert expect_success(api.get("/v0/channels", headers(ANN)))["user"] == ANN
