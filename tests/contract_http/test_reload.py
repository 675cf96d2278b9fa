"""SIGHUP reads the settings again and never ends the server."""

from __future__ import annotations

import json
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.contract_http.api import ANY, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, ConnectionEnded, RawConnection, Reply, dumps, loads
from tests.contract_http.server import Server
from tests.contract_http.test_attack_web import ask
from tests.contract_http.test_batches import chunk_name
from tests.kit.waiting import eventually


class Reloading:
    """A server with a file of settings that can be changed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "settings.toml"
        self.write(api_keys="old,stays")
        data, port = str(folder / "server" / "data"), str(folder / "server" / "port.txt")
        args = ("--data", data, "--port", "0", "--port-file", port, "--config", str(self._file))
        self.server = Server(folder / "server", *args, segment_max_bytes=16 << 20)

    def write(self, **settings: str) -> None:
        self._file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))

    def reload(self, word: str = "SIGHUP: reloaded") -> None:
        """Send the signal and wait until the server says what came of it."""
        before = self.server.log.count("SIGHUP")
        self.server.signal(signal.SIGHUP)

        def reported() -> bool:
            assert self.server.is_running
            return self.server.log.count("SIGHUP") != before

        eventually(reported, why=lambda: self.server.log)
        assert word in self.server.log.splitlines()[-1]


@pytest.fixture
def reloading_server(tmp_path: Path) -> Iterator[Reloading]:
    made = Reloading(tmp_path)
    with made.server.start():
        yield made


def test_keys_are_reloaded_for_known_heads_and_sockets_too(reloading_server: Reloading) -> None:
    server = reloading_server.server
    body = dumps({"records": [{"data": 1}]})
    lines = ("Host: localhost", "Content-Type: application/json", "Authorization: Bearer old")
    head = "\r\n".join(["POST /v0/topics/t HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""])
    request = head.encode() + body
    with RawConnection(server.address) as wire:
        for _ in range(5):
            wire.send(request)
            assert wire.reply().status in (200, 201)
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        for _ in range(3):
            wire.send(request)
            expect_error(wire.reply(), 401, "unauthorized")
    with server.client("new") as api:
        assert api.state("t")["head_seq"] == 5
        expect_success(api.post(topic_path("t"), {"records": [{"data": 2}]}))


def test_streams_and_sockets_of_a_removed_key_end(reloading_server: Reloading) -> None:
    """They read on for as long as they liked; those of a key that stays go on."""
    server = reloading_server.server
    with ExitStack() as stack:
        ended: dict[str, RawConnection] = {}
        for key in ("old", "stays"):
            api = stack.enter_context(server.client(key))
            api.write("t", 1)
            assert api.put(topic_path("q"), {"type": "queue"}).status in (200, 201)
            wid = expect_success(api.post("/v0/watch", {"topics": {"t": {}}}))["wid"]
            lines = ("Host: localhost", f"Authorization: Bearer {key}")
            upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
            nonce = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
            for target, more in (
                (f"/v0/watch/{wid}", ()),
                (topic_path("q", "/" + "work?node=n"), ()),
                ("/v0/ws", (*upgrade, nonce)),
            ):
                wire = ended[f"{key} {target}"] = stack.enter_context(RawConnection(server.address))
                wire.send("\r\n".join([f"GET {target} HTTP/1.1", *lines, *more, "", ""]).encode())
                assert wire.receive_more()
                assert bytes(wire.held[9:12]) in (b"200", b"101"), wire.held
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        for name, wire in ended.items():
            if name.startswith("old"):
                deadline = time.monotonic() + wire.patience_s
                with suppress(ConnectionError):
                    while wire.receive_more():
                        assert time.monotonic() < deadline, f"{name} goes on"
        with server.client("new") as api:
            expect_success(api.post(topic_path("t"), {"records": [{"data": "after"}]}))
        for name, wire in ended.items():
            if "stays /v0/watch/" in name:
                while b"after" not in wire.held:
                    assert wire.receive_more()
            assert name.startswith("stays") or b"after" not in wire.held, name


def read_to_end(wire: RawConnection) -> None:
    """Up to the end of the answer, or to what was written after the reload. Heartbeats of a stream that goes on fail
    it after a while."""
    deadline = time.monotonic() + wire.patience_s
    while (chunk := wire.chunk()) and b"after" not in chunk:
        assert time.monotonic() < deadline, "the stream goes on"


CHANNEL = "/v0/channels/%21room@localhost"


def unfinished_read(reloading_server: Reloading, kind: str) -> str:
    """The target of a read that a peer can leave unfinished: more bytes than buffers take."""
    if kind == "channel":
        with reloading_server.server.client("old") as api:
            expect_success(api.put(CHANNEL, {}), 201)
        with reloading_server.server.client("stays") as api:
            expect_success(api.post(f"{CHANNEL}/join", {}))
        return f"{CHANNEL}/events"
    with reloading_server.server.client("old") as api:
        for _ in range(4):
            api.write("t", *["x" * 900_000 for _ in range(8)])
    if kind != "segment":
        return topic_path("t", f"/records?format={kind}")
    reloading_server.server.restart()  # with a checkpoint, which makes segments
    with reloading_server.server.client("old") as api:
        first = expect_success(api.get(topic_path("t", "/segments")))["segments"][0]
    assert first["bytes"] > 15 << 20
    return topic_path("t", f"/segments/{first['base']}/data")


@pytest.mark.parametrize("kind", ["ndjson", "arrow", "segment", "channel"])
def test_bulk_reads_segments_and_channel_events_of_a_removed_key_end(reloading_server: Reloading, kind: str) -> None:
    """Method: both peers read the head and then nothing until the key of one was removed."""
    server = reloading_server.server
    target = unfinished_read(reloading_server, kind)
    with RawConnection(server.address) as old, RawConnection(server.address) as stays:
        for key, wire in (("old", old), ("stays", stays)):
            wire.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            assert wire.head().status == 200
            assert wire.chunk()
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        if kind == "channel":
            with server.client("stays") as api:
                expect_success(api.post(f"{CHANNEL}/publish", {"payload": "after"}))
            while b"after" not in stays.chunk():
                pass
        else:
            read_to_end(stays)
        with pytest.raises((ConnectionEnded, ConnectionError)):
            read_to_end(old)
        assert b"after" not in old.held


def test_a_long_poll_and_a_streamed_write_of_a_removed_key_end(reloading_server: Reloading) -> None:
    """A poll was answered with records that were written later; a stream wrote for as long as it was sent."""
    server = reloading_server.server
    with server.client("old") as api, server.client("old") as poll, RawConnection(server.address) as stream:
        api.write("t", 1)
        api.write("s", 1)
        poll.begin("POST", topic_path("t", "/diff"), dumps({"from_seq": 1, "wait_ms": 30_000}), [JSON])
        lines = ("Host: localhost", "Authorization: Bearer old", "Content-Type: application/x-ndjson")
        stream.send(
            "\r\n".join([f"POST {topic_path('s')} HTTP/1.1", *lines, "Transfer-Encoding: chunked", "", ""]).encode()
        )
        page = b'{"data":1}\n' * 10_000
        stream.send(b"%x\r\n%b\r\n" % (len(page), page))
        eventually(lambda: api.state("s")["head_seq"] >= 10_001)
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        with server.client("new") as new:
            new.write("t", "after")
            expect_error(poll.end(), 401, "unauthorized")
            stream.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(page), page))
            error = expect_error(stream.reply(), 401, "unauthorized", ANY)
            assert error["detail"]["written"]["count"] == 10_000
            assert new.state("s")["head_seq"] == 10_001


@pytest.mark.parametrize(
    ("method", "target", "kind", "body"),
    [
        ("POST", topic_path("t"), "application/json", dumps({"records": [{"data": "late"}]})),
        ("POST", topic_path("t", "/diff"), "application/json", dumps({"from_seq": 0})),
        ("PUT", topic_path("late"), "application/json", b"{}"),
    ],
)
def test_a_request_whose_body_ends_after_its_key_was_removed_is_refused(
    reloading_server: Reloading, method: str, target: str, kind: str, body: bytes
) -> None:
    """The key was checked with the head alone: a peer that kept requests open wrote and read for as long as it sent a
    byte a minute."""
    server = reloading_server.server
    with server.client("stays") as api, RawConnection(server.address) as old, RawConnection(server.address) as stays:
        api.write("t", 1)
        for key, wire in (("old", old), ("stays", stays)):
            lines = ("Host: localhost", f"Authorization: Bearer {key}", f"Content-Type: {kind}")
            head = [f"{method} {target} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""]
            wire.send("\r\n".join(head).encode() + body[:1])
            assert api.get("/v0/health").status == 200  # a later request is answered: the head was read
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        old.send(body[1:])
        expect_error(old.reply(), 401, "unauthorized")
        assert api.state("t")["head_seq"] == 1
        assert api.get(topic_path("late")).status == 404
        stays.send(body[1:])
        assert stays.reply().status in (200, 201)


def test_a_chunk_that_a_removed_key_stages_is_refused(reloading_server: Reloading) -> None:
    server = reloading_server.server
    with server.client("stays") as api, RawConnection(server.address) as old:
        api.write("t", 1)
        lines = ("Host: localhost", "Authorization: Bearer old", "Content-Type: application/vnd.apache.arrow.stream")
        target = topic_path("t", f"/staging/{chunk_name(1)}")
        old.send("\r\n".join([f"PUT {target} HTTP/1.1", *lines, "Transfer-Encoding: chunked", "", ""]).encode())
        old.send(b"4\r\nabcd\r\n")
        eventually(lambda: list(server.folder.rglob("*.part*")))
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        old.send(b"4\r\nefgh\r\n0\r\n\r\n")
        expect_error(old.reply(), 401, "unauthorized")


def test_a_claim_of_a_removed_key_ends_and_takes_no_job(reloading_server: Reloading) -> None:
    """A claim that waited for the end of its window was handed jobs."""
    server = reloading_server.server
    with server.client("stays") as api, server.client("old") as old:
        expect_success(api.put(topic_path("q"), {"type": "queue", "claim_jitter_ms": 5_000}), 201)

        def claim_and_reload() -> Reply:
            api.write("q", "job")
            reloading_server.write(api_keys="new,stays")
            old.begin("POST", topic_path("q", "/claim"), dumps({"node": "old"}), [JSON])
            assert api.get("/v0/health").status == 200
            reloading_server.reload()
            return old.end()

        jobs, reply = 1, claim_and_reload()
        while reply.status == 200 and jobs < 5:  # the window, at most 5 s long, ended before the signal was handled
            reloading_server.write(api_keys="old,new,stays")
            reloading_server.reload()
            jobs, reply = jobs + 1, claim_and_reload()
        expect_error(reply, 401, "unauthorized")
        expect_success(api.put(topic_path("q"), {"type": "queue", "claim_jitter_ms": 0}))
        claimed = expect_success(api.post(topic_path("q", "/claim"), {"node": "stays"}))
        assert [job["$seq"] for job in claimed["claimed"]] == [jobs]


def test_a_worker_of_a_removed_key_gives_its_jobs_back(reloading_server: Reloading) -> None:
    server = reloading_server.server
    with server.client("stays") as api, RawConnection(server.address) as old:
        expect_success(api.put(topic_path("q"), {"type": "queue"}), 201)
        api.write("q", "job")
        target = topic_path("q", "/" + "work?node=old")
        old.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer old\r\n\r\n".encode())
        assert old.head().status == 200
        while b"event: job" not in old.chunk():
            pass
        assert expect_success(api.post(topic_path("q", "/claim"), {"node": "stays"}))["count"] == 0
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        with pytest.raises((ConnectionEnded, ConnectionError)):
            read_to_end(old)
        assert expect_success(api.post(topic_path("q", "/claim"), {"node": "stays"}))["count"] == 1


def hear_until(socket: ClientConnection, word: str) -> None:
    while word not in str(socket.recv(10)):
        pass


def test_a_socket_of_a_removed_key_hears_no_channel_and_no_topic_any_more(reloading_server: Reloading) -> None:
    """It is closed with 1008 before anything that is written after the signal."""
    server = reloading_server.server
    host, port = server.address
    with server.client("stays") as api, ExitStack() as stack:
        api.write("t", 1)
        expect_success(api.put(CHANNEL, {}), 201)
        sockets: dict[str, ClientConnection] = {}
        for key in ("old", "stays"):
            made = connect(f"ws://{host}:{port}/v0/ws", additional_headers={"Authorization": f"Bearer {key}"})
            sockets[key] = stack.enter_context(made)
            for command in (
                {"op": "channel_join", "channel": "!room@localhost", "request_id": 1},
                {"op": "channel_subscribe", "channel": "!room@localhost", "request_id": 2},
                {"op": "subscribe", "topic": "t", "from_seq": 1, "request_id": 3},
            ):
                made.send(dumps(command).decode())
                while (said := loads(str(made.recv(10)))).get("request_id") != command["request_id"]:
                    pass
                assert said["op"] != "error" or said["code"] == "user_in_channel", said
        reloading_server.write(api_keys="new,stays")
        reloading_server.reload()
        expect_success(api.post(f"{CHANNEL}/publish", {"payload": "after"}))
        api.write("t", "after")
        with pytest.raises(ConnectionClosed) as closed:
            hear_until(sockets["old"], "after")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
        for _ in ("the channel", "the topic"):
            hear_until(sockets["stays"], "after")


def test_a_session_ends_when_its_key_is_for_less(reloading_server: Reloading) -> None:
    server = reloading_server.server
    with server.client("old") as api:
        api.write("t", 1)
        wid = expect_success(api.post("/v0/watch", {"topics": {"t": {}}}))["wid"]
        reloading_server.write(api_keys="old:rw:other.,stays")
        reloading_server.reload()
        expect_error(api.get(f"/v0/watch/{wid}"), 401, "unauthorized")


def test_hosts_origins_and_the_log_level_are_reloaded(reloading_server: Reloading) -> None:
    server, key = reloading_server.server, "Authorization: Bearer stays"
    expect_success(ask(server, "GET", "/v0/topics", None, "a.test", key))
    reloading_server.write(
        api_keys="stays", allowed_hosts="b.test", allowed_origins="https://ui.test", log_level="warning"
    )
    reloading_server.reload()
    expect_error(ask(server, "GET", "/v0/topics", None, "a.test", key), 403, "forbidden")
    expect_success(ask(server, "GET", "/v0/topics", None, "b.test", key, "Origin: https://ui.test"))


@pytest.mark.parametrize("bad", [{"api_keys": "k:reed"}, {"api_keys": ""}, {"log_level": "loud"}, {"no_such": "1"}])
def test_settings_that_do_not_read_change_nothing(reloading_server: Reloading, bad: dict[str, str]) -> None:
    reloading_server.write(**{"api_keys": "other", **bad})
    reloading_server.reload("the old ones stay")
    with reloading_server.server.client("old") as api:
        expect_success(api.get("/v0/topics"))


def test_without_a_file_the_server_goes_on(tmp_path: Path) -> None:
    with Server(tmp_path, log_level="warning").start() as server:
        for _ in range(5):
            server.signal(signal.SIGHUP)
            with server.client() as api:
                api.write("t", 1)
        assert server.is_running


def test_keys_of_a_file_are_reloaded(tmp_path: Path) -> None:
    """Without a file of settings too. A file that is gone or does not parse changes nothing."""
    keys, data, port_file = tmp_path / "keys", tmp_path / "data", tmp_path / "port.txt"
    keys.write_text("# of the first shift\nold\nstays:r\n")
    args = ("--data", str(data), "--port", "0", "--port-file", str(port_file), "--keys-file", str(keys))
    with Server(tmp_path, *args, api_keys="environment").start() as server:
        reloads = 0

        def reload(word: str) -> None:
            nonlocal reloads
            server.signal(signal.SIGHUP)
            reloads += 1
            eventually(lambda: server.log.count("SIGHUP") == reloads, why=lambda: server.log)
            assert word in server.log.splitlines()[-1]

        def statuses() -> list[int]:
            with ExitStack() as stack:
                clients = [stack.enter_context(server.client(key)) for key in ("environment", "old", "new", "stays")]
                return [client.get("/v0/topics").status for client in clients]

        assert statuses() == [200, 200, 401, 200]
        keys.write_text("new\nstays:r\n")
        reload("SIGHUP: reloaded")
        assert statuses() == [200, 401, 200, 200]
        for bad in ("new:reed\n", "# none\n", "a,b\n"):
            keys.write_text(bad)
            reload("the old ones stay")
        keys.unlink()
        reload("there is no file of keys")
        assert statuses() == [200, 401, 200, 200]
        assert not any(word in server.log for word in ("stays:", "a,b"))


SLOW_HOOK = """
import pathlib, time
pathlib.Path("imports").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
def hook(*args): raise NotImplementedError
"""


def test_a_hangup_while_the_server_starts_is_applied_when_it_listens(tmp_path: Path) -> None:
    """Method: a hook holds the start while it is imported, after the settings were read."""
    (tmp_path / "slow.py").write_text(SLOW_HOOK)
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    server = Server(tmp_path, hook="slow:hook", keys_file=keys)
    with server:
        process = server.launch()
        eventually((tmp_path / "imports").exists, process=process, why=lambda: server.log)
        keys.write_text("new\n")
        server.signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        server.await_port()
        server.await_ready()
        eventually(lambda: "SIGHUP: reloaded" in server.log, why=lambda: server.log)
        with server.client("new") as api:
            expect_success(api.get("/v0/topics"))


def test_files_are_for_their_owner(tmp_path: Path) -> None:
    with Server(tmp_path / "own").start() as server, server.client() as api:
        api.write("t", 1)
    _modes(tmp_path / "own" / "data", 0o600, 0o700)
    with Server(tmp_path / "group", file_mode="640").start() as server, server.client() as api:
        api.write("t", 1)
    assert "no setting" not in server.log
    _modes(tmp_path / "group" / "data", 0o640, 0o750)


def _modes(root: Path, file_mode: int, directory_mode: int) -> None:
    found = [root, *root.rglob("*")]
    assert len(found) > 5
    for each in found:
        wanted = directory_mode if each.is_dir() else file_mode
        assert stat.S_IMODE(each.stat().st_mode) == wanted, each
