"""A fork loses and doubles nothing: a handle belongs to the process that opened it (docs/bugs.md)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from tests.kit import processes

import tidelog
from tidelog.client import Client
from tidelog.commitlog import verify


@contextmanager
def echoing(ports: set[int], asked: Event | None = None, go: Event | None = None) -> Iterator[str]:
    """A server that answers with the path that it was asked for; the ports of its clients."""

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes: the second one waited 40 ms for an ACK

        def do_GET(self) -> None:
            ports.add(self.client_address[1])
            if asked is not None and go is not None:
                asked.set()
                go.wait(60)
            body = json.dumps({"path": self.path}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody asked."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


PARENT = Path(__file__).with_name("forked_process.py")
CODECS = ["tide", "rustlog", "laminar", "narwhal"]


def said(scenario: str, path: Path, *more: str) -> dict[str, list[list[Any]]]:
    """What the processes of a scenario printed, by its first word."""
    done = processes.run(
        [sys.executable, str(PARENT), scenario, str(path), *more], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    found: dict[str, list[list[Any]]] = {}
    for word, *rest in json.loads(done.stdout):
        found.setdefault(word, []).append(rest)
    return found


def refused(found: dict[str, list[list[Any]]]) -> None:
    """Every door raised Forked and says what to do; closing did nothing and raised nothing."""
    wrong = [door for door in found["door"] if door[1] != "Forked"]
    assert not wrong, wrong
    assert all("nothing was" in text and "open" in text for _, kind, text in found["door"] if kind == "Forked")
    assert found["close"] == [["returned", "None"]]


def rows(path: Path, topic: str) -> list[Any]:
    with tidelog.open(str(path)) as log:
        assert not log.report.damage
        return [record.data for record in log.topic(topic, create=False).read(0).records]


def test_children_of_a_pool_write_nothing_and_the_parent_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data"
    found = said("multiprocessing_children", path)
    assert [kind for kind, _ in found["children"][0][0]] == ["Forked"] * 3
    assert found["parent"] == [[[1, 2, 3, 4, 5]]]
    assert rows(path, "jobs") == [{"parent": number} for number in range(5)]


@pytest.mark.parametrize("shards", ["1", "2"])
def test_every_door_of_an_engine_raises_in_a_child(tmp_path: Path, shards: str) -> None:
    path = tmp_path / "data"
    found = said("engine", path, shards)
    refused(found)
    assert found["parent"] == [[3, 3, 2]]
    assert found["published"] == [[2]]
    assert found["acked"] == found["staged"] == [[1]]
    assert rows(path, "events") == [b"1", b"2", b"3"]
    assert rows(path, "copy") == [b"3"]
    assert rows(path, "plain") == [b"1", b"2", b"3"]
    assert rows(path, "work") == [{"n": 2}]


def test_leaving_a_block_and_exiting_in_a_child_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data"
    found = said("leaving", path)
    assert found["child"] == [[0]] * 3
    assert [kind for kind, _ in found["locked"][0]] == ["Locked"] * 2
    assert found["parent"] == [[2, 2]] or found["parent"] == [[2, 1]]
    assert rows(path, "events") == [b"1", b"2"]
    assert verify(f"{path}-log").ok


def test_a_child_reads_with_a_handle_of_its_own_and_not_with_its_parents(tmp_path: Path) -> None:
    found = said("read_only", tmp_path / "data")
    assert found["own"] == [["returned", "[1, 2]"]]
    assert [found[door][0][0] for door in ("inherited", "refresh", "writer")] == ["Forked", "Forked", "Locked"]
    assert found["parent"] == [[3, 2]]


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    found = said("released", tmp_path / "data")
    assert found["again"][0][0] == 1
    assert found["child"] == [[0]]


@pytest.mark.parametrize("codec", CODECS)
def test_every_door_of_a_segmented_log_raises_in_a_child(tmp_path: Path, codec: str) -> None:
    found = said("segmented", tmp_path / "log", codec)
    refused(found)
    assert found["parent"] == [[["1", "2", "3"], 2]]
    assert found["again"] == [[["1", "2", "3"], 1]]


def test_every_door_of_a_partitioned_log_raises_in_a_child(tmp_path: Path) -> None:
    found = said("partitioned", tmp_path / "log")
    refused(found)
    assert found["parent"][0][2] == 1


def test_a_fork_that_python_does_not_see_changes_no_file(tmp_path: Path) -> None:
    found = said("unseen", tmp_path / "data")
    assert [door[:2] for door in found["door"] if door[1] != "Forked"] == []
    assert found["parent"] == [[2, [1]]]
    assert rows(tmp_path / "data", "events") == [b"1", b"2"]


def test_a_child_neither_ends_nor_hears_the_thread_that_syncs(tmp_path: Path) -> None:
    found = said("beside", tmp_path / "file")
    assert found["child"] == [["returned", "None"]] * 3
    assert found["synced"] == [[True]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("forks", [8, pytest.param(40, marks=pytest.mark.sweep)])
def test_forks_beside_busy_threads_hang_no_process_and_lose_nothing(tmp_path: Path, forks: int) -> None:
    found = said("crowded", tmp_path / "data", str(forks))
    assert found["heard"] == [[{"Forked": forks}]]
    assert all(good and count for _, count, good in found["rows"]), found["rows"]
    assert found["damage"] == [[[], []]]


@pytest.mark.parametrize("hooks", [True, False], ids=["fork", "fork of C code"])
def test_a_child_uses_a_connection_of_its_own(hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: parent and child ask at the same time over one client; each answer must be to its own question."""
    ports: set[int] = set()
    with echoing(ports) as url, Client(url) as client:
        assert client.get("/first/0")["path"] == "/first/0"  # a connection is kept from now on
        if not hooks:
            monkeypatch.setattr(Client, "on_fork", lambda *_: None)
        before = client._idle[0].sock.getsockname()[1]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            monkeypatch.undo()
            code = 1
            try:
                good = all(client.get(f"/child/{number}")["path"] == f"/child/{number}" for number in range(200))
                os.write(writer, json.dumps([good, client._idle[0].sock.getsockname()[1]]).encode())
                client.close()
                code = 0
            finally:
                os._exit(code)
        good = all(client.get(f"/parent/{number}")["path"] == f"/parent/{number}" for number in range(200))
        _, status = os.waitpid(child, 0)
        os.close(writer)
        told = os.read(reader, 1000)
        os.close(reader)
        assert (good, status) == (True, 0)
        found, port = json.loads(told)
        assert found, "the child read an answer of its parent"
        assert port != before
        assert client.get("/parent/last")["path"] == "/parent/last"
        assert client._idle[0].sock.getsockname()[1] == before, "the parent's connection was not closed by its child"
        assert ports == {before, port}


def test_a_child_lets_go_of_connections_that_threads_of_its_parent_use() -> None:
    ports: set[int] = set()
    asked, go = Event(), Event()
    with echoing(ports, asked, go) as url, Client(url) as client:
        thread = Thread(target=client.get, args=("/slow",))
        thread.start()
        assert asked.wait(60)
        child = os.fork()
        if not child:
            os._exit(bool(client._busy or client._idle or client._lock.locked()))
        assert os.waitpid(child, 0)[1] == 0
        assert len(client._busy) == 1, "the parent's are as before"
        go.set()
        thread.join()
        assert not client._busy
