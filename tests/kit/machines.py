"""Machines that share nothing, made of Linux namespaces: each with its own address, processes and writable files.

    Machine      a network, mount, process and host name namespace. All directories are read-only, but for a private
                 file system in memory at /tmp, /run and /dev/shm
    Network      a switch in a namespace of its own, and the machines that are plugged into it

Nothing of the machine that runs the tests is changed: the switch and all cables are in namespaces of these processes,
and go with them. A machine is cut off by the end of its first process, which the kernel follows by ending all others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kit.s3 import build_server, cache_directory

ROOT: Final = Path(__file__).parents[2]
_NEEDED: Final = ("unshare", "nsenter", "ip", "mount")
_PRIVATE: Final = ("/tmp", "/run", "/dev/shm")
_START_S: Final = 60


def missing() -> str | None:
    """Return what this machine lacks for namespaces; None if nothing."""
    if os.geteuid() != 0:
        return "root"
    for program in _NEEDED:
        if shutil.which(program) is None:
            return program
    tried = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        return "the right to make namespaces"
    return None


def _setup_script(name: str) -> str:
    """Return what the first process of a machine runs. Directories of the tests' own programs that are below a private
    one stay visible, read-only."""
    kept = sorted({str(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), cache_directory())})
    below = [path for path in kept if path.startswith(tuple(f"{private}/" for private in _PRIVATE))]
    lines = [
        "set -e",
        f"hostname {name}",
        "mount -t proc proc /proc",
        "mount -o remount,bind,ro /",
        "mount -t tmpfs tmpfs /mnt",
        *(f"mkdir -p /mnt/{number}; mount --bind '{path}' /mnt/{number}" for number, path in enumerate(below)),
        *(f"mount -t tmpfs tmpfs {private}" for private in _PRIVATE),
        *(
            f"mkdir -p '{path}'; mount --bind /mnt/{number} '{path}'; mount -o remount,bind,ro '{path}'"
            for number, path in enumerate(below)
        ),
        "mkdir -p /tmp/home",
        "ip link set lo up",
        "echo ready",
        "exec cat",  # until its standard input ends
    ]
    return "\n".join(lines)


class Machine:
    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[bytes]] = []
        unshared = [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--uts",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        self._holder = subprocess.Popen(
            [*unshared, "sh", "-c", _setup_script(name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        said = self._holder.stdout.readline()
        assert said == b"ready\n", self._holder.stderr.read().decode()
        holder = self._holder.pid
        self.pid = int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])

    def command(self, *words: object) -> list[str]:
        """Return the command that runs another one on this machine."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts", *map(str, words)]

    def run(self, *words: object, environ: Mapping[str, str] | None = None, timeout_s: float = _START_S) -> str:
        """Run a command to its end and return what it printed. It has to succeed."""
        done = subprocess.run(
            self.command(*words),
            env=_environment(environ or {}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    def start(self, log: Path, *words: object, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command whose output goes to a file of the tests' own machine."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(*words), env=_environment(environ or {}), cwd=ROOT, stdout=output, stderr=output
            )
        self._started.append(process)
        return process

    def cut_off(self) -> None:
        """End all processes of the machine at once, as when its power fails. Its files are gone."""
        if self._holder.poll() is None:
            os.kill(self.pid, 9)
        for process in (self._holder, *self._started):
            process.wait(_START_S)
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """What a user's shell on another machine would have; nothing of the tests' own directories."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "JAVA_HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "HOME": "/tmp/home", "PYTHONDONTWRITEBYTECODE": "1", **more}


class Network:
    """A switch with machines, 10.77.0.1, 10.77.0.2, … in the order in which they are added."""

    def __init__(self) -> None:
        self._switch = Machine("switch", "")
        self._machines: list[Machine] = []
        self._switch.run("ip", "link", "add", "switch", "type", "bridge")
        self._switch.run("ip", "link", "set", "switch", "up")

    def add(self, name: str) -> Machine:
        """Start a machine and plug it in."""
        number = len(self._machines) + 1
        machine = Machine(name, f"10.77.0.{number}")
        self._machines.append(machine)
        port = f"port{number}"
        # The far end is named by a process id of the tests' own machine, so only the network is the switch's.
        in_switch = ["nsenter", "--target", str(self._switch.pid), "--net"]
        cable = [
            *in_switch,
            "ip",
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(machine.pid),
        ]
        done: Any = subprocess.run(cable, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._switch.run("ip", "link", "set", port, "master", "switch", "up")
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")
        return machine

    def close(self) -> None:
        for machine in (*self._machines, self._switch):
            machine.cut_off()


@contextmanager
def open_network() -> Iterator[Network]:
    """A network without machines; skips the test where there are no namespaces, or no S3 server for one of them."""
    if (lacking := missing()) is not None:
        pytest.skip(f"machines that share nothing need namespaces: there is no {lacking}")
    if build_server() is None:
        pytest.skip("machines that share nothing need versitygw, whose objects are files, and Go to build it")
    network = Network()
    try:
        yield network
    finally:
        network.close()
