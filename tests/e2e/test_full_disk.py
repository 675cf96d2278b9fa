"""A server on a small file system that fills up: 507, room is made over HTTP and outside, writes go on, and a kill
loses nothing that was acked."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_serve import LIMIT_S, ready, until_there
from tests.kit import processes
from tests.kit.commands import COMMAND
from tests.kit.small_disk import mounted_small_disk, take_all
from tests.kit.waiting import eventually


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_small_disk(tmp_path) as place:
        yield place


class Server:
    def __init__(self, small_disk: Path, port_file: Path) -> None:
        port_file.unlink(missing_ok=True)
        data = ["--data", str(small_disk / "data"), "--port", "0", "--port-file", str(port_file)]
        with port_file.with_name("log").open("ab") as log:  # a pipe that nobody reads would stop the server
            self.process = processes.Popen([*COMMAND, "serve", *data], stderr=log)
        self.address = until_there(port_file)
        ready(self.address)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content else {}
        request = urllib.request.Request(f"http://{self.address}/v0{path}", content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def write(self, topic: str, size: int, count: int) -> tuple[int, dict[str, Any]]:
        records = [{"data": os.urandom(size // 2).hex()} for _ in range(count)]
        return self.ask("POST", f"/topics/{topic}", {"records": records})

    def seqs(self, topic: str) -> list[int]:
        found: list[int] = []
        cursor = 0
        while True:
            status, page = self.ask("POST", f"/topics/{topic}/diff", {"from_seq": cursor, "limit": 1000})
            assert status == 200, page
            found += [record["$seq"] for record in page["records"]]
            if page["caught_up"]:
                return found
            cursor = page["next_from_seq"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


def fill(server: Server, topic: str, acked: list[int]) -> None:
    """Write until the server says that there is no room; the answer is as docs/http.md has it."""
    for _ in range(2000):
        status, body = server.write(topic, 4000, 20)
        if status != 200:
            assert (status, body["error"]["code"]) == (507, "disk_full"), body
            assert body["error"]["detail"]["written"] is False
            return
        acked += range(body["first_seq"], body["last_seq"] + 1)
    raise AssertionError("the disk was never full")


def until_written(server: Server, topic: str, acked: list[int]) -> None:
    def is_written() -> bool:
        status, body = server.write(topic, 100, 1)
        if status == 200:
            acked.append(body["first_seq"])
        else:
            assert status in (429, 503, 507), body
        return status == 200

    eventually(is_written, LIMIT_S, every_s=0.05, why=lambda: "there is space, and writes are accepted")


@pytest.mark.slow
def test_server_on_a_full_disk_returns_507_and_resumes_when_there_is_space(small_disk: Path, tmp_path: Path) -> None:
    server = Server(small_disk, tmp_path / "port")
    acked: dict[str, list[int]] = {"t": [], "u": []}
    try:
        for name in acked:
            assert server.ask("PUT", f"/topics/{name}", {"durability": "fsync"})[0] in (200, 201)
        until_written(server, "u", acked["u"])
        fill(server, "t", acked["t"])
        take_all(small_disk)
        assert server.write("t", 4000, 20)[0] == 507
        assert server.seqs("t") == acked["t"], "reads go on"
        assert server.seqs("u") == acked["u"]
        status, body = server.ask("POST", "/topics/t/delete", {"before_seq": max(acked["t"]) + 1})
        assert status == 200, body
        acked["t"] = []
        until_written(server, "t", acked["t"])  # what was deleted comes free with the filler in place
        fill(server, "t", acked["t"])
        (small_disk / "filler").unlink()
        until_written(server, "t", acked["t"])
        until_written(server, "u", acked["u"])
    finally:
        server.end()
    again = Server(small_disk, tmp_path / "port")
    try:
        assert {name: again.seqs(name) for name in acked} == acked
        until_written(again, "t", acked["t"])
    finally:
        again.end()
