"""The process that gets killed: an export that ends itself with SIGKILL at its nth step, which it tells.

python exporter.py DATA TABLE FORMAT NUMBER      NUMBER 0: it is let live
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.pipelines import columns, opening, tables
from tidelog.pipelines.exporting import Export, Work
from tidelog.pipelines.runner import guarded, unwrapped
from tidelog.pipelines.sizing import Sizes
from tidelog.spark import options as reading

T = TypeVar("T")
R = TypeVar("R")
SIZES = Sizes(file_bytes=2_000, age_ms=1_000, commit_bytes=6_000)


class Steps:
    def __init__(self, last: int) -> None:
        self._last, self._done = last, 0

    def __call__(self, step: str) -> None:
        self._done += 1
        os.write(1, f"{step}\n".encode())
        if self._done == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


class Here:
    """Tasks in this process: what is killed is the driver, and with it whatever its executors had not finished."""

    def __init__(self, step: Steps) -> None:
        self._step = step

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        found = []
        for task in tasks:
            found.append(guarded(function, task))
            self._step("a file is written")
        return unwrapped(found)


def main(data: str, table: str, format: str, last: str) -> None:
    step = Steps(int(last))
    options = reading.read({"path": data, "subscribe": "orders", "columns": ",".join(columns.OWN)})
    work = Work(Here(step), PosixDisk(), SystemClock(), step)
    kind: tables.Format = "delta" if format == "delta" else "parquet"
    with (
        closing(opening.opened(PosixDisk(), table, kind, write=True, step=step)) as into,
        closing(Export(options, into, lambda _: columns.shape_of(None), work, SIZES)) as job,
    ):
        job.once()


if __name__ == "__main__":
    main(*sys.argv[1:])
