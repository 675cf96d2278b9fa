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


class FilePair:
    """The two files of one range of a topic: rows of the table, and rows in quarantine. Both are staged; an error in a
    `with` block removes both."""

    def __init__(self, target: Target, name: str) -> None:
        self._footer, self._name, self._bad_name = target.footer, name, f"{tables.QUARANTINE}/{name}"
        self.good = FileWriter(target.disk, target.staged(name), target.shape.arrow)
        self.bad = FileWriter(target.disk, target.staged(self._bad_name), columns.QUARANTINED)

    def __enter__(self) -> FilePair:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.good.abandon()
            self.bad.abandon()

    def close(self, first: int, stop: int, *, rows: int | None = None, hash: int | None = None) -> DataFile:
        """Finish both files and return what a commit says of them. Without rows in quarantine there is no second file.

        Args:
            rows, hash: what the range stands for in the table, where that is not what the first file holds.
        """
        good, bad = self.good, self.bad
        rows, hash = good.rows if rows is None else rows, good.hash if hash is None else hash
        footer = msgspec.json.encode(
            msgspec.structs.replace(self._footer, first=first, stop=stop, rows=rows, hash=hash, bad=bad.rows)
        )
        bad_size = bad.close(footer) if bad.rows else None
        size = good.close(footer)
        bad_name = self._bad_name if bad.rows else None
        held = good.rows if (good.rows, good.hash) != (rows, hash) else None
        return DataFile(self._name, first, stop, rows, size, hash, bad.rows, bad_name, bad_size, held)


def staged(target: Target, rows: Iterable[Rows], first: int, stop: int) -> DataFile:
    """Write rows into files of their own: those of the table, and those that do not fit."""
    with FilePair(target, tables.file_name(first, stop, target.footer.run, attempt_id())) as pair:
        for found in rows:
            pair.good.add(found.table)
            if found.bad is not None:
                pair.bad.add(found.bad)
        return pair.close(first, stop)


def attempt_id() -> int:
    """The id of this attempt of a Spark task, for names of files; 0 outside of Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.taskAttemptId()


def of_frame(
    target: Target, first: int, stop: int, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> bytes:
    """Rows of a DataFrame, which need not be the log's any more, into a file; for `frames`."""
    del partition, attempt  # a file's name has the attempt, and rows stand for the whole range
    rows = (Rows(batch.cast(target.shape.arrow), None) for batch in batches)
    return msgspec.json.encode(staged(target, rows, first, stop))
