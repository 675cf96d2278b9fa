"""Where the tests of a real session read and write: a directory, or a server that has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from tests.unit.spark.world import Mode, serving

import tidelog
from tidelog.engine import Engine


class Place:
    def __init__(self, options: dict[str, str], path: Path, engine: Engine | None) -> None:
        self.options, self._path, self._engine = options, path, engine

    @contextmanager
    def log(self) -> Iterator[Engine]:
        if self._engine is not None:
            yield self._engine
        else:
            with tidelog.open(str(self._path), threads=False) as log:
                yield log


@contextmanager
def place(mode: Mode, directory: Path) -> Iterator[Place]:
    path = directory / "sink"
    if mode == "path":
        yield Place({"path": str(path)}, path, None)
    else:
        with serving(str(path)) as (engine, address):
            yield Place({"server": address}, path, engine)


def wait_for(condition: Callable[[], bool]) -> None:
    until, pause = time.monotonic() + 300, Event()
    while not condition():
        assert time.monotonic() < until, "it never came true"
        pause.wait(0.05)
