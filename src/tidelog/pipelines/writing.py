"""[shell] What an executor does for an export: one range of a topic into one Parquet file, staged.

Records go from the segment's file to the Parquet writer as Arrow, inside one Python process: Spark carries the task
there and the answer back, and never a row. A file that is not finished is removed where that can still be done; what a
killed executor leaves behind is swept when the table is next opened for writing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from pyspark import TaskContext

from tidelog.disk.seam import Disk, join
from tidelog.pipelines import columns, tables
from tidelog.pipelines.columns import Rows, Shape
from tidelog.pipelines.commits import DataFile
from tidelog.pipelines.files import FileWriter
from tidelog.pipelines.footers import Footer
from tidelog.spark import places
from tidelog.spark.options import Options
from tidelog.spark.read import Reading
from tidelog.spark.stretches import Split
from tidelog.spark.where import Where


@dataclass(frozen=True)
class Target:
    """Where rows go and what is said of them: the same for all tasks of a commit."""

    path: str
    format: tables.Format
    shape: Shape
    footer: Footer  # of the commit; a task fills in its own part
    disk: Disk

    def staged(self, name: str) -> str:
        folder, _, base = name.rpartition("/")
        place = join(self.path, folder) if folder else self.path
        return join(place, f"_{base}" if self.format == "parquet" else base)


@dataclass(frozen=True)
class Task:
    target: Target
    options: Options
    split: Split
    first: int
    stop: int


def written(task: Task) -> DataFile:
    """Runs on an executor, perhaps twice: every attempt has files of its own."""
    topic = task.target.footer.topic
    with closing(places.of(task.options)) as place:
        batches = Reading(place, task.options, columns.RECORD, Where(), task.split).batches()
        return staged(task.target, columns.shaped(task.target.shape, batches, topic), task.first, task.stop)


def staged(target: Target, rows: Iterable[Rows], first: int, stop: int) -> DataFile:
    """Write rows into files of their own: those of the table, and those that do not fit."""
    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    name = tables.file_name(first, stop, target.footer.run, attempt)
    bad_name = f"{tables.QUARANTINE}/{name}"
    good = FileWriter(target.disk, target.staged(name), target.shape.arrow)
    bad = FileWriter(target.disk, target.staged(bad_name), columns.QUARANTINED)
    try:
        for found in rows:
            good.add(found.table)
            if found.bad is not None:
                bad.add(found.bad)
        said = msgspec.structs.replace(
            target.footer, first=first, stop=stop, rows=good.rows, hash=good.hash, bad=bad.rows
        )
        told = msgspec.json.encode(said)
        bad_size = bad.close(told) if bad.rows else None
        size = good.close(told)
    except BaseException:
        good.abandon()
        bad.abandon()
        raise
    named = bad_name if bad.rows else None
    return DataFile(name, first, stop, good.rows, size, good.hash, bad.rows, named, bad_size)


def of_frame(
    target: Target, first: int, stop: int, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> bytes:
    """Rows of a DataFrame, which need not be the log's any more, into a file; for `frames`."""
    del partition, attempt  # a file's name has the attempt, and rows stand for the whole range
    rows = (Rows(batch.cast(target.shape.arrow), None) for batch in batches)
    return msgspec.json.encode(staged(target, rows, first, stop))
