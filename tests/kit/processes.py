"""Start Python programs as processes without a new interpreter: `Popen` and `run` of `subprocess`, by a fork of a
process that has imported the package already.

Importing the package and its libraries takes a new interpreter 0.4 s of processor time, and the suite starts hundreds.
A fork has its own memory, files and signals like any process, is a child of the test's process, and can be killed. What
an interpreter decides when it starts cannot be changed by a fork: a command with other variables of that kind
(`_AT_START`), or with options that a fork does not know, gets a new interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import tidelog

SOURCES: Final = str(Path(tidelog.__file__).parents[1])
"""The directory of the package that the tests import, for PYTHONPATH."""

_ROOT: Final = Path(__file__).parents[2]
_AT_START: Final = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "OMP_", "OPENBLAS_", "ARROW_", "TIDELOG_KERNEL")
"""Variables that are read once, when an interpreter starts or a module is imported."""
_LATER: Final = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
_PLAIN_OPTIONS: Final = {
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "gid": None,
    "gids": None, "uid": None, "umask": -1, "start_new_session": False, "process_group": -1,
}  # fmt: skip
_PR_SET_CHILD_SUBREAPER: Final = 36
_MESSAGE_MAX_BYTES: Final = 1 << 20


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks where it can."""

    def _execute_child(self, *args: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        options = inspect.signature(start).bind(*args).arguments
        command, env = options["args"], options["env"]
        env = dict(os.environ) if env is None else env
        starter = None
        if isinstance(command, list) and all(
            options.get(name, plain) == plain for name, plain in _PLAIN_OPTIONS.items()
        ):
            starter = _starter_for([os.fspath(word) for word in command], env)
        if starter is None:
            start(*args)
            return
        # In this order: what the child reads and writes, and the ends that stay here.
        pipes = [options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        ends = [
            own if given == -1 else given for own, given in zip((0, 1, 2), (pipes[0], pipes[3], pipes[5]), strict=True)
        ]
        cwd = os.getcwd() if options["cwd"] is None else os.fspath(options["cwd"])
        if not os.path.isdir(cwd):
            raise FileNotFoundError(f"no directory {cwd}")
        self.pid = starter.start([os.fspath(word) for word in command[1:]], cwd, env, ends)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` by a fork where that is possible."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(list(command), **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# ── in the test's process ─────────────────────────────────────────────────────────────────────────


def run_until_killed(command: Sequence[str], is_enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """Run a writer, kill -9 it once the lines that it has printed are enough, and return all of its lines."""
    lines: list[bytes] = []
    child = Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    for line in child.stdout:
        lines.append(line)
        if is_enough(lines):
            child.kill()
            break
    rest, _ = child.communicate()  # lines that were on their way count as well
    assert child.returncode == -signal.SIGKILL, f"the writer ended by itself with {child.returncode}"
    lines += rest.splitlines()
    return lines


class _Starter:
    """The process that forks, and a socket to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        command = [sys.executable, "-m", __spec__.name, str(other.fileno())]
        # A fork takes only the thread that calls it along, so libraries should have no threads of their own.
        path = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL
        )
        other.close()
        atexit.register(self._end, os.getpid())

    def start(self, words: list[str], cwd: str, env: Mapping[str, str], ends: list[int]) -> int:
        """Start a process with these standard files and return its id. It is a child of this process."""
        wanted = json.dumps({"words": words, "cwd": cwd, "env": dict(env)}).encode()
        assert len(wanted) < _MESSAGE_MAX_BYTES
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [len(wanted).to_bytes(4)], ends)
                self._socket.sendall(wanted)
                reply = self._socket.recv(8, socket.MSG_WAITALL)
            finally:
                _adopt_orphans(False)
        assert len(reply) == 8, "the process that starts others has ended"
        return int.from_bytes(reply)

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:
            self._socket.close()
            self._process.wait(60)


_starters: Final[dict[int, _Starter]] = {}
"""By process: one that a test forked needs its own."""
_lock: Final = threading.Lock()


def _starter_for(command: list[str], env: Mapping[str, str]) -> _Starter | None:
    if sys.platform != "linux" or command[0] != sys.executable or len(command) < 2:
        return None
    if command[1].startswith("-") and command[1] not in ("-m", "-c"):
        return None
    if env.get("PYTHONPATH", SOURCES).split(os.pathsep)[0] not in (SOURCES, str(_ROOT)):
        return None
    if _read_at_start(env) != _read_at_start(os.environ):
        return None
    with _lock:
        if os.getpid() not in _starters:
            _starters[os.getpid()] = _Starter()
        return _starters[os.getpid()]


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START) and name not in _LATER}


def _adopt_orphans(yes: bool) -> None:
    """Become the parent of processes below this one whose own parent ends, or not any more."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


# ── in the process that forks ─────────────────────────────────────────────────────────────────────


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns in each fork, with the request, and at the end, with None.

    The process is a fork of a fork that ends at once, so the test's process, which takes in orphans for that long,
    becomes its parent.
    """
    while True:
        head, ends, _, _ = socket.recv_fds(requests, 4, 3)
        if not head:
            return None
        wanted = requests.recv(int.from_bytes(head), socket.MSG_WAITALL)
        told, tell = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(tell, child.to_bytes(8))
                os._exit(0)
            for own, end in enumerate(ends):
                os.dup2(end, own)
            for end in (*ends, told, tell):
                os.close(end)
            requests.close()
            request: dict[str, Any] = json.loads(wanted)
            return request
        os.waitpid(between, 0)
        requests.sendall(os.read(told, 8))
        for end in (*ends, told, tell):
            os.close(end)


def _run_program(request: dict[str, Any]) -> None:
    """Do what a new interpreter does with these arguments: `-m module`, `-c code` or a file."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        texts = {"encoding": old.encoding, "errors": old.errors, "closefd": False}
        if name == "stdin":
            new = open(number, **texts)  # noqa: SIM115 - as long as the process
        else:
            new = open(number, "w", newline="\n", **texts)  # noqa: SIM115
            lines = not unbuffered and (name == "stderr" or os.isatty(number))
            new.reconfigure(line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    faulthandler.enable(2)  # a test that waits in vain sends SIGABRT, and the process writes its stacks
    kind, *rest = request["words"]
    path = os.environ.get("PYTHONPATH")
    sys.path[0] = "" if kind == "-c" else os.getcwd() if kind == "-m" else os.path.dirname(os.path.abspath(kind))
    sys.path[1:1] = path.split(os.pathsep) if path else []
    if kind == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # runpy warns of a module that is imported already
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    import tidelog.cli.main
    import tidelog.server.app

    with socket.socket(fileno=int(sys.argv[1])) as requests_:
        gc.collect()
        gc.freeze()
        request_ = _serve(requests_)
    if request_ is not None:
        _run_program(request_)
