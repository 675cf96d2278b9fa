"""A process that runs chosen tests of one tree again and again, each time in a child that it forks.

The parent has imported pytest and the libraries that the project needs, and nothing of the project: a child starts
without the second or two that these imports take, and imports the tree as it is at that moment. Requests and answers
are lines of JSON on standard input and output; what tests print goes to a file.

A request either judges (`tests` with a limit in seconds each, in order, until the first fails) or maps (`files`, all of
their tests, with the lines of `modules` that each test runs).
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import pytest

PRELOADED: Final = ("numpy", "pyarrow", "pyarrow.ipc", "pyarrow.compute", "msgspec", "xxhash", "rich.console")
MEMORY_BYTES_MAX: Final = 12 << 30  # of addresses: a mutant that allocates without end must not take the machine
FILE_BYTES_MAX: Final = 4 << 30
TRACED_CALLS: Final = 64  # of one function in one test; later calls add hardly any line
TRACED_S: Final = 4.0  # of one test; what a sweep runs after that it ran before
LEFT_OUT: Final = "not sweep and not cluster and not faultfs"  # they run for minutes, or in processes of their own


class Judge:
    """Runs the chosen tests in the order given and notes the first that fails. One that does not end in its time ends
    the process, and `current` says which."""

    def __init__(self, limits: dict[str, float], current: Path) -> None:
        self._limits, self._current = limits, current
        self._order = {test: number for number, test in enumerate(limits)}
        self.failed: str | None = None
        self.ran = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((each for each in items if each.nodeid in self._order), key=self._place)

    def _place(self, item: pytest.Item) -> int:
        return self._order[item.nodeid]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._current.write_text(item.nodeid)
        faulthandler.dump_traceback_later(self._limits[item.nodeid], exit=True)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Tracer:
    """Notes the lines of some files that each test runs. Threads that a test starts count; its processes do not."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules  # by path
        self._lines: dict[str, set[int]] = {}
        self._calls: Counter[CodeType] = Counter()
        self.rows: dict[str, dict[str, Any]] = {}
        self._outcome = "passed"
        self._until = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._lines, self._calls, self._outcome = {}, Counter(), "passed"
        began = time.monotonic()
        self._until = began + TRACED_S
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            lines = {self._modules[path]: sorted(found) for path, found in self._lines.items()}
            took = round(time.monotonic() - began, 4)
            self.rows[item.nodeid] = {"seconds": took, "outcome": self._outcome, "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG002
        code = frame.f_code
        if code.co_filename not in self._modules:
            return None
        lines = self._lines.get(code.co_filename)
        if lines is None:
            lines = self._lines.setdefault(code.co_filename, set())
        lines.add(code.co_firstlineno)
        self._calls[code] += 1
        if self._calls[code] > TRACED_CALLS:
            if self._calls[code] % 256 == 0 and time.monotonic() > self._until:
                sys.settrace(None)
            return None
        add = lines.add

        def on_line(frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG001
            if event == "line":
                add(frame.f_lineno)
            return on_line

        return on_line


def serve(folder: Path) -> None:
    """Answer requests until standard input ends."""
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    os.chdir(folder)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(json.dumps(_answer(folder, json.loads(line))) + "\n")
        answers.flush()


def _answer(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    scratch = folder.parent / f"{folder.name}t"
    for old in (scratch, folder / ".hypothesis"):  # a failing example of one mutant must not help to find the next
        shutil.rmtree(old, ignore_errors=True)
    scratch.mkdir()
    result, current, began = scratch / "result.json", scratch / "current", time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _run(scratch, request, result, current)
        finally:
            os._exit(code)
    status = _wait(child, request["timeout_s"])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # servers and workers that tests left running
    answer = json.loads(result.read_text()) if status is not None and result.exists() else {}
    if not answer and current.exists():
        answer = {"ended_in": current.read_text()}
    return {"status": status, "seconds": round(time.monotonic() - began, 3), **answer}


def _wait(child: int, timeout_s: float) -> int | None:
    """The exit status of a child; None where it was killed because time was up."""
    until = time.monotonic() + timeout_s
    pause = 0.01
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.2, pause * 1.3)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(scratch: Path, request: dict[str, Any], result: Path, current: Path) -> int:
    """The child: run pytest and write what came of it."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={scratch / 'b'}"]
    if "files" in request:
        tracer = Tracer(request["modules"])
        status = int(pytest.main([*options, "-m", LEFT_OUT, *request["files"]], plugins=[tracer]))
        result.write_text(json.dumps({"rows": tracer.rows}))
        return status
    judge = Judge(request["tests"], current)
    files = list(dict.fromkeys(test.partition("::")[0] for test in request["tests"]))
    status = int(pytest.main([*options, "-x", "-o", "faulthandler_timeout=0", "-m", LEFT_OUT, *files], plugins=[judge]))
    result.write_text(json.dumps({"failed": judge.failed, "ran": judge.ran}))
    return status


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    serve(Path(sys.argv[1]))
