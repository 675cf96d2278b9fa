"""Servers as processes: started, measured one at a time, and kept out of the generator's way.

Servers stand still (SIGSTOP) while another one is measured: what each does in the background, it does in its own time.
Where there is more than one processor, the generator has the first and the servers have the others: a scheduler that
moves both of them about costs one server more than another, by what its threads are woken for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.server.load_generator import connect

TIMEOUT_S = 60.0


class Memory(NamedTuple):
    resident: float
    own: float  # of it, without pages of mapped files: those belong to the page cache as well


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def memory_mb(self) -> Memory:
        found = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        resident, own = (int(found[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))
        return Memory(resident, own)

    def busy_s(self) -> float:
        """Processor time it has used, in all threads."""
        after = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after[11]) + int(after[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def run_alone(chosen: Server, others: Sequence[Server]) -> Iterator[None]:
    """Only the chosen one runs."""
    stopped = [server for server in others if server is not chosen]
    for server in stopped:
        server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for server in stopped:
            server.process.send_signal(signal.SIGCONT)


@contextmanager
def pin_processors(*servers: Server) -> Iterator[None]:
    """The generator and the servers on processors of their own, where there are enough."""
    usual = os.sched_getaffinity(0)
    first, *others = sorted(usual)
    try:
        if others:
            os.sched_setaffinity(0, {first})
            for server in servers:
                for thread in os.listdir(f"/proc/{server.pid}/task"):
                    os.sched_setaffinity(int(thread), set(others))
        yield
    finally:
        os.sched_setaffinity(0, usual)


@contextmanager
def run_process(command: Sequence[str], log: Path, port: Callable[[], int | None], **environ: str) -> Iterator[Server]:
    """A process from when it answers on its port until its end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environ})
    try:
        yield Server(process, _wait_answering(process, log, port))
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_answering(process: subprocess.Popen[bytes], log: Path, port: Callable[[], int | None]) -> int:
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        number = port()
        if number is not None:
            try:
                connect(number).close()
                return number
            except ConnectionRefusedError:
                pass
        time.sleep(0.01)
    raise RuntimeError(f"{log.stem} did not start: {log.read_text()[-2000:]}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
