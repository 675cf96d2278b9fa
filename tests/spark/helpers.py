"""Where the tests of a real session read and write: a directory, or a server that has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from tests.unit.spark.helpers import MODES, Mode, run_server

import tidelog
from tidelog.database import Database


def costly(first: Mode) -> pytest.MarkDecorator:
    """Both modes for a test that takes Spark seconds; the second one runs in `make crash` only."""
    return pytest.mark.parametrize(
        "mode", [first, *(pytest.param(mode, marks=pytest.mark.sweep) for mode in MODES if mode != first)]
    )


class TopicLocation:
    def __init__(self, options: dict[str, str], path: Path, engine: Database | None) -> None:
        self.options, self._path, self._engine = options, path, engine

    @contextmanager
    def open_engine(self) -> Iterator[Database]:
        if self._engine is not None:
            yield self._engine
        else:
            with tidelog.open(str(self._path), threads=False) as log:
                yield log


@contextmanager
def open_location(mode: Mode, directory: Path) -> Iterator[TopicLocation]:
    path = directory / "sink"
    if mode == "path":
        yield TopicLocation({"path": str(path)}, path, None)
    else:
        with run_server(str(path)) as (engine, address):
            yield TopicLocation({"server": address}, path, engine)


def wait_for(condition: Callable[[], bool]) -> None:
    until, pause = time.monotonic() + 300, Event()
    while not condition():
        assert time.monotonic() < until, "it never came true"
        pause.wait(0.05)
