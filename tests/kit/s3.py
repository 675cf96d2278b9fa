"""A real S3-compatible server for tests: versitygw over a directory, or moto where there is no Go.

    binary    ~/.cache/tidelog-tests/bin/versitygw, built once by `go install`; TIDELOG_TESTS_CACHE names another place
    server    one for the process that runs tests, on a free port of 127.0.0.1, stopped at its end

`python -m tests.kit.s3` builds the binary. The summary of a run says which server it was. `FaultyProxy` stands between
a client and the server and refuses, cuts or delays connections.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Final

import pytest

from tests.kit.commands import accepts, free_port
from tests.kit.waiting import eventually

PACKAGE: Final = "github.com/versity/versitygw/cmd/versitygw@latest"
ACCESS_KEY, SECRET_KEY = "tidelogtests", "tidelog/secret+key"
BUCKET: Final = "tidelog-tests"
_BUILD_S: Final = 900


def cache_directory() -> Path:
    named = os.environ.get("TIDELOG_TESTS_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "tidelog-tests"


def build_go_program(package: str, name: str) -> Path | None:
    """Return the binary of a Go package, built if it is not there; None without Go, or if it does not build."""
    target = cache_directory() / "bin" / name
    if target.exists():
        return target
    if (go := shutil.which("go")) is None:
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(cache_directory() / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run wait for the first
        if not target.exists():
            building = target.parent.parent / "building"
            with suppress(subprocess.SubprocessError, OSError):
                subprocess.run(
                    [go, "install", package],
                    env={**os.environ, "GOBIN": str(building), "GOFLAGS": ""},
                    check=True,
                    capture_output=True,
                    timeout=_BUILD_S,
                )
                (building / name).rename(target)
    return target if target.exists() else None


def build_server() -> Path | None:
    """Return the binary of versitygw."""
    return build_go_program(PACKAGE, "versitygw")


def server_command(directory: Path, host: str, port: int) -> tuple[str, list[str]]:
    """Return what the server is, and the command that starts it. The keys are in its environment."""
    if (binary := build_server()) is not None:
        return "versitygw", [str(binary), "--port", f"{host}:{port}", "posix", str(directory)]
    if find_spec("moto") is not None:
        return "moto", [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    pytest.fail("the tests of S3 need Go, to build versitygw, or moto: pip install 'tidelog[dev]'")


class S3Server:
    """One server process. It can be stopped and started again on the same port, with the same objects."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.kind, self._command = server_command(directory, "127.0.0.1", self.port)
        if self.kind == "versitygw":
            (directory / BUCKET).mkdir(exist_ok=True)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
        with open(self.directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        said = self.directory / "server.log"
        eventually(lambda: accepts(self.port), 60, process=self._process, why=said.read_text)
        if self.kind == "moto":
            self._make_bucket()

    def _make_bucket(self) -> None:
        from pyarrow.fs import S3FileSystem

        store = S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            endpoint_override=self.endpoint,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )
        store.create_dir(BUCKET)

    def signal(self, number: signal.Signals) -> None:
        """Stop the process for a while, or let it go on: a server that hangs."""
        assert self._process is not None, "it runs"
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill the server, as a machine that is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def url(self, prefix: str, *, secret: str = SECRET_KEY, key: str = ACCESS_KEY, endpoint: str | None = None) -> str:
        """Return the address of a prefix of the bucket, with credentials."""
        secret = secret.replace("/", "%2F").replace("+", "%2B")
        where = f"endpoint_override={endpoint or self.endpoint}&scheme=http&region=us-east-1"
        return f"s3://{key}:{secret}@{BUCKET}/{prefix}?{where}"


@pytest.fixture(scope="session")
def _shared_s3_server() -> Iterator[S3Server]:
    with TemporaryDirectory(prefix="tidelog-s3-") as directory:
        server = S3Server(Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def s3_server(_shared_s3_server: S3Server, record_property: object) -> S3Server:
    """The S3 server of this process. Tests use different prefixes and do not stop it."""
    assert callable(record_property)
    record_property(f"tell tests of S3 against {_shared_s3_server.kind}", 1)
    return _shared_s3_server


@pytest.fixture
def own_s3_server(tmp_path: Path) -> Iterator[S3Server]:
    """A server that a test may stop and start again."""
    directory = tmp_path / "s3"
    directory.mkdir()
    server = S3Server(directory)
    server.start()
    yield server
    server.stop()


class FaultyProxy:
    """Passes TCP connections on to a server, except the next ones that it was asked to spoil."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._answers: list[bytes] = []
        self.spoiled = 0
        self._closed = Event()
        Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spoil(self, times: int, status: str | None = None) -> None:
        """Close the next connections without an answer, or answer them with this status."""
        answer = (
            b"" if status is None else f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        self._answers += [answer] * times

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), closing(client):
            if self._answers:
                answer = self._answers.pop()
                self.spoiled += 1
                client.recv(1 << 16)
                client.sendall(answer)
                return
            with closing(socket.create_connection(("127.0.0.1", self._target))) as server:
                back = Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.stdout.write(f"{build_server() or 'there is no Go, or versitygw does not build: the tests use moto'}\n")
