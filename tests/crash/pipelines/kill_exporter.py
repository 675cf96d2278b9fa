"""The process that gets killed: an export that ends itself with SIGKILL at its nth step, which it tells.

python exporter.py DATA TABLE FORMAT NUMBER [OPTIONS]      NUMBER 0: it is let live
                              latest: an upsert table

OPTIONS are those of the table's store or catalog, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

from tidelog.clock import SystemClock
from tidelog.pipelines import latest_rows, record_mapping, table_formats
from tidelog.pipelines.export_job import ExportJob, JobContext, Sizes
from tidelog.pipelines.spark_tasks import run_guarded, unwrap_results
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.upsert_job import UpsertJob
from tidelog.spark import options as reading

T = TypeVar("T")
R = TypeVar("R")
SIZES = Sizes(file_bytes=2_000, age_ms=1_000, commit_bytes=6_000)


class KillAtStep:
    def __init__(self, last: int) -> None:
        self._last, self._done = last, 0

    def __call__(self, step: str) -> None:
        self._done += 1
        os.write(1, f"{step}\n".encode())
        if self._done == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


class InlineRunner:
    """Tasks in this process: what is killed is the driver, and with it whatever its executors had not finished."""

    def __init__(self, step: KillAtStep) -> None:
        self._step = step

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        found = []
        for task in tasks:
            found.append(run_guarded(function, task))
            self._step("a file is written")
        return unwrap_results(found)


def main(data: str, table: str, format: str, last: str, storage_options: str = "{}") -> None:
    step = KillAtStep(int(last))
    place = table_formats.find_place(table, "the table", json.loads(storage_options) or None)
    options = reading.parse_options(
        {"path": data, "subscribe": "orders", "columns": ",".join(record_mapping.RECORD_COLUMNS)}
    )
    work = JobContext(InlineRunner(step), place.disk, SystemClock(), step)
    kinds: dict[str, interface.Format] = {
        "delta": "delta",
        "iceberg": "iceberg",
        "parquet": "parquet",
        "latest": "delta",
    }
    opened = table_formats.open_table(
        place.disk, place.path, kinds[format], catalog=place.catalog, write=True, step=step
    )
    with closing(opened) as into:
        plain = record_mapping.new_mapping(None)
        if format == "latest":
            keyed = latest_rows.latest_mapping(plain, "/id")
            made: ExportJob = UpsertJob(options, into, lambda _: keyed, work, SIZES)
        else:
            made = ExportJob(options, into, lambda _: plain, work, SIZES)
        with closing(made) as job:
            job.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
