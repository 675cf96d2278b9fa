"""Run `tidelog` commands: through `main` in the test's own process, or as processes on real files."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from tests.kit import processes
from tidelog.cli.main import main

Run: TypeAlias = Callable[..., tuple[int, str, str]]
"""Runs a command; returns its exit code, standard output and standard error."""

COMMAND: Final = [sys.executable, "-m", "tidelog.cli.main"]
# Unbuffered output would hide a reply that is never flushed, and a flush that fails as the process ends.
ENVIRONMENT: Final = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
_LIMIT_S: Final = 120


def runner(
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    *first: str,
    directory: Path | None = None,
) -> Run:
    """Return a function that runs `tidelog <first> <words>` in this process, in `directory` where it is given."""
    if directory is not None:
        monkeypatch.chdir(directory)

    def run(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([*first, *map(str, words)])
        out, err = capsysbinary.readouterr()
        return code, out.decode("utf-8", "surrogateescape"), err.decode()

    return run


def json_result(result: tuple[int, str, str]) -> dict[str, Any]:
    """Return the one JSON object that a command printed; it succeeded, without a word on standard error."""
    code, out, err = result
    assert (code, err) == (0, ""), result
    fields = json.loads(out)
    assert isinstance(fields, dict)
    return fields


def run_process(cwd: Path, *words: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command as a process, to its end."""
    return processes.run([*COMMAND, *map(str, words)], cwd=cwd, input=stdin, capture_output=True, timeout=_LIMIT_S)


def start_process(cwd: Path, *words: object) -> subprocess.Popen[bytes]:
    """Start a command as a process with three pipes."""
    pipe = subprocess.PIPE
    return processes.Popen([*COMMAND, *map(str, words)], cwd=cwd, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe)


def accepts(port: int) -> bool:
    """Whether a server accepts connections on a port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
