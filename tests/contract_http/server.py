"""A server process under test: started, stopped, killed and started again on one directory.

Only settings of the test reach it. When it is let go, its log may hold no traceback: a request that breaks the server
and is answered all the same is a bug too.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.contract_http.api import Api
from tests.contract_http.client import Address
from tests.contract_http.sse_client import SseStream
from tests.kit import processes
from tests.kit.waiting import eventually

_ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("TIDELOG_") and name not in ("PYTHONUNBUFFERED", "PYTHONPATH")
} | {"PYTHONPATH": processes.SOURCES}  # the package that the tests import, wherever that lies
COMMAND = [sys.executable, "-m", "tidelog.cli.main", "serve"]
START_S = STOP_S = 120.0  # only so that a mistake fails and does not hang; a loaded machine may take long


class Server:
    """One directory and the processes that serve it, one at a time."""

    def __init__(self, folder: Path, *args: str, **settings: Any) -> None:
        """`settings` are names of the environment without their prefix, in lower case."""
        self.environment = dict(_ENVIRONMENT)  # of the next process
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.data = folder, folder / "data"
        self._port_file, self._log = folder / "port.txt", folder / "log.txt"
        self._args: Sequence[str] = args or (
            "--data",
            str(self.data),
            "--port",
            "0",
            "--port-file",
            str(self._port_file),
        )
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.address = Address("127.0.0.1", 0)

    # Processes.

    def with_few_arenas(self) -> Self:
        """Start an interpreter of its own, not a fork, with few arenas of malloc: for tests that limit its address
        space, of which each arena reserves 64 MiB."""
        self.environment["MALLOC_ARENA_MAX"] = "4"
        return self

    def launch(self, **settings: Any) -> subprocess.Popen[bytes]:
        """A process, without waiting for anything."""
        assert self._process is None, "one at a time"
        named = {f"TIDELOG_{name.upper()}": str(value) for name, value in {**self._settings, **settings}.items()}
        self._port_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = processes.Popen(
                [*COMMAND, *self._args],
                cwd=self.folder,
                env={**self.environment, **named},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self._process

    def start(self, *, key: str | None = None, **settings: Any) -> Self:
        """Started, and ready. `key`: for a server that asks for one on its probes."""
        self.launch(**settings)
        self.await_port()
        self.await_ready(key)
        return self

    def await_port(self) -> None:
        assert self._process is not None
        eventually(self._port_file.exists, START_S, process=self._process, why=lambda: f"it listens: {self.log}")
        host, port = self._port_file.read_text().rsplit(":", 1)
        self.address = Address(host, int(port))

    def await_ready(self, key: str | None = None) -> None:
        assert self._process is not None
        with self.client(key) as client:
            eventually(
                lambda: client.get("/readyz").status == 200,
                START_S,
                process=self._process,
                why=lambda: f"it is ready: {self.log}",
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code. A server that does not end says what each of its threads does."""
        assert self._process is not None
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # Python's fault handler writes the stacks into the log
            self._process.wait(STOP_S)
            raise AssertionError(f"the server did not end within {STOP_S} s: {self.log}") from None
        finally:
            self._process = None
        return code

    def stop(self) -> None:
        """A clean stop."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.log

    def kill(self) -> None:
        """SIGKILL: nothing is written any more."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def restart(self, **settings: Any) -> Self:
        self.stop()
        return self.start(**settings)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def resident_bytes(self) -> int:
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))

    def limit_growth(self, size: int) -> None:
        """Let it take so many bytes of address space more than it has now, and no more: beyond, allocations fail."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        has = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize:"))
        resource.prlimit(self._process.pid, resource.RLIMIT_AS, (has + size, has + size))

    @property
    def peak_bytes(self) -> int:
        """The most that was resident at any time."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

    @property
    def open_files(self) -> int:
        assert self._process is not None
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    # Clients.

    def client(self, key: str | None = None) -> Api:
        return Api(self.address, key=key)

    def events(self, target: str, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> SseStream:
        named = dict(headers or {})
        if key is not None:
            named["Authorization"] = f"Bearer {key}"
        return SseStream(self.address, target, headers=named.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.signal(signal.SIGTERM)
            code = self.wait()
            if error is None:
                assert code == 0, self.log
        if error is None:
            assert "Traceback" not in self.log, self.log
