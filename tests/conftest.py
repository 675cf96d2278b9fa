"""Shared by the whole suite: figures that tests report, the order of tests, and the memory of a test process."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from tests.kit.s3 import _shared_s3_server, own_s3_server, s3_server

__all__ = ["_shared_s3_server", "own_s3_server", "s3_server"]  # fixtures of every folder

MEMORY_LIMIT_MIB: Final = 1_024
"""A test process that ever has more than this fails the run. Processes that tests start do not count."""

GROWTH_SHOWN_MIB: Final = 64
GROWTH_COLLECTED_MIB: Final = 64
"""A process that has so much more than after the last collection collects garbage after the test."""

ALLOCATORS: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Variables of the workers. Arrow's own pool kept 130 MiB after the bulk tests, and glibc has an arena for each of some
thousand threads that tests start."""

if "PYTEST_XDIST_WORKER" in os.environ and ALLOCATORS.keys() <= os.environ.keys():
    # Here, before a folder's conftest copies the environment: processes under test use memory as those of users do, and
    # with other variables than a worker's they would be new interpreters in place of forks.
    assert pa.default_memory_pool().backend_name == "system"
    for _name in ALLOCATORS:
        del os.environ[_name]

_MEMORY: Final = pytest.StashKey[list["Peak"]]()

Peak = tuple[str, int, list[tuple[str, int]]]
"""Process, its peak in MiB, and the tests that raised it most, each with its MiB."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MEMORY] = []
    # Tests start hundreds of processes. Each one would compile the whole package again: 0.3 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        _build_unicode_table()
    # A process that was started in the background ignores SIGINT, and its children inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if starts_workers:
        os.environ.update(ALLOCATORS)
    config.pluginmanager.register(MemoryOfWorkers(config) if starts_workers else MemoryOfTests(config), "memory")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove the reporter of a worker: it writes to nowhere, and keeps all reports and all tests that were left out."""
    if hasattr(session.config, "workerinput"):
        session.config.pluginmanager.unregister(name="terminalreporter")


def _build_unicode_table() -> None:
    """Let another process build Hypothesis's table of characters, which it keeps in a file. The first test that draws
    text would build it otherwise, and take 200 MiB."""
    if not Path(".hypothesis/unicode_data").exists():
        draw = "from hypothesis import strategies; strategies.characters(codec='utf-8').validate()"
        subprocess.run([sys.executable, "-c", draw], check=False, capture_output=True)


@pytest.fixture(scope="module", autouse=True)
def drop_cached_values(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what cached functions of a test module keep, such as images of disks, once its tests have run."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", "").startswith("tests.") and hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def record_count(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Report how much a test went through; crosses from worker processes to the summary."""

    def said(what: str, count: int) -> None:
        record_property(f"tell {what}", count)

    return said


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a Spark session come first. Workers that have nothing left take from the end of others, so all
    of these tests stay with the first worker, and only that one starts Java."""
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Exempt what the collection made from garbage collection. Python runs a full collection when a quarter of all
    objects is new. With 15,000 collected tests that never came: of every engine that a crash test abandoned 0.2 MB
    stayed, which added up to 2.5 GB."""
    gc.collect()
    gc.freeze()
    gc.collect()


def pytest_unconfigure() -> None:
    """Let the interpreter clear what was exempted: DuckDB prints pages about objects that are left at its end."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last one has what fixtures report at their end
                for name, value in report.user_properties:
                    if name.startswith("tell "):
                        totals[name.removeprefix("tell ")] += value
    for what, total in sorted(totals.items()):
        terminalreporter.write_line(f"{what}: {total:,}")
    peaks: list[Peak] = config.stash[_MEMORY]
    for process, peak, grown in sorted(peaks):
        terminalreporter.write_line(f"peak memory of {process}: {peak:,} MiB", red=peak > MEMORY_LIMIT_MIB)
        if peak > MEMORY_LIMIT_MIB:
            terminalreporter.write_line(f"  that is more than {MEMORY_LIMIT_MIB:,} MiB; raised most by", red=True)
        for test, growth in grown if peak > MEMORY_LIMIT_MIB else grown[:3]:
            terminalreporter.write_line(f"  {growth:,} MiB {test}", red=peak > MEMORY_LIMIT_MIB)


def _memory_kib() -> tuple[int, int]:
    """`VmHWM`, the most that this process ever had, and `VmRSS`, what it has; other systems tell the former alone.
    `ru_maxrss` also counts the parent before the exec."""
    try:
        with open("/proc/self/status") as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
            return peak, next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (10 if sys.platform == "darwin" else 0)
        return peak, peak


def _return_free_memory() -> None:
    """Let the allocator return what is free to the system, where it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryOfTests:
    """Measures the process that runs tests, which is a worker or the only one. Collects garbage after a test that let
    the process grow: a simulated disk is large and few objects, so what an abandoned engine and its disk hold together
    would stay until Python has counted enough objects for a full collection."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._grown: Counter[str] = Counter()
        self._peak_kib, self._resident_kib = _memory_kib()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        peak_kib, resident_kib = _memory_kib()
        if (growth := peak_kib - self._peak_kib >> 10) >= GROWTH_SHOWN_MIB:
            self._grown[item.nodeid] += growth
        self._peak_kib = peak_kib
        if resident_kib - self._resident_kib >> 10 >= GROWTH_COLLECTED_MIB:
            gc.collect()
            _return_free_memory()
            _, self._resident_kib = _memory_kib()
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        peak = _memory_kib()[0] >> 10, self._grown.most_common(10)
        if output is not None:
            output["memory"] = peak
        else:
            keep_peak(session, "the tests", *peak)


class MemoryOfWorkers:
    """Collects what the workers of pytest-xdist measured."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        memory = getattr(node, "workeroutput", {}).get("memory")
        if memory is not None and self._session is not None:
            keep_peak(self._session, f"worker {node.gateway.id}", *memory)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if any(peak > MEMORY_LIMIT_MIB for _, peak, _ in self._config.stash[_MEMORY]) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def keep_peak(session: pytest.Session, process: str, peak: int, grown: list[tuple[str, int]]) -> None:
    session.config.stash[_MEMORY].append((process, peak, grown))
    if peak > MEMORY_LIMIT_MIB and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
