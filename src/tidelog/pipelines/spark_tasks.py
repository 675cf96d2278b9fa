"""Tasks on executors: one function, many small arguments, answers in order.

A task that fails for a reason that a retry cannot fix (a full disk, a record that does not fit, damage) hands the
error back as its answer. Everything else is raised, and Spark retries as configured.

Rows of a DataFrame into files, by executors, as Arrow: a sink that runs a function of ours on them.

    df ──► partition ──► function(batches) ──► answer ─┐
       └─► partition ──► function(batches) ──► answer ─┴─► one small file, which the driver reads: `answers`

Spark ends a write in a process of its own, so the answers come back by way of the disk. `mapInArrow` would hand them
over directly, and needs pandas for it, which nothing else here does.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tidelog import errors
from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.posix import PosixDisk
from tidelog.errors import Damaged, DiskFull, Error, Refused

T = TypeVar("T")
R = TypeVar("R")


class TaskRunner(Protocol):
    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        """What the function says to each task, in their order. Raises the first error."""
        ...


class TaskError(NamedTuple):
    """An error on its way to the driver: by name, because ours are made from more than a message."""

    name: str
    message: str

    def to_error(self) -> Error:
        kind = getattr(errors, self.name)
        made: Error = kind.__new__(kind)
        made.args = (self.message,)
        return made


def run_guarded(function: Callable[[T], R], task: T) -> R | TaskError:
    try:
        return function(task)
    except (DiskFull, Refused, Damaged) as error:
        return TaskError(type(error).__name__, str(error))


class SparkTaskRunner:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        if not tasks:
            return []
        context = self._spark.sparkContext
        answers = context.parallelize(list(tasks), len(tasks)).map(partial(run_guarded, function)).collect()
        return unwrap_results(answers)


def unwrap_results(results: Sequence[R | TaskError]) -> list[R]:
    for answer in results:
        if isinstance(answer, TaskError):
            raise answer.to_error()
    return [answer for answer in results if not isinstance(answer, TaskError)]


PartitionFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch], int, int], bytes]  # batches, partition, attempt


@dataclass
class PartitionResult(WriterCommitMessage):
    partition: int
    result: bytes
    failure: tuple[str, str] | None = None


class FunctionSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "tidelog-files"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002
        return FunctionWriter(self.options["function"], self.options["answers"])


class FunctionWriter(DataSourceArrowWriter):
    def __init__(self, function: str, results_path: str) -> None:
        self._function, self._results_path = function, results_path

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "this is a task"
        function: PartitionFunction = pickle.loads(b64decode(self._function))
        partition, attempt = context.partitionId(), context.taskAttemptId()
        said = run_guarded(lambda batches: function(batches, partition, attempt), iterator)
        return (
            PartitionResult(partition, b"", (said.name, said.message))
            if isinstance(said, TaskError)
            else PartitionResult(partition, said)
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        answers = sorted(
            (each for each in messages if isinstance(each, PartitionResult)), key=lambda each: each.partition
        )
        results = [(each.result, each.failure) for each in answers]
        replace_file(PosixDisk(), self._results_path, msgspec.msgpack.encode(results))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The next writer removes what was written."""


def run_on_partitions(df: DataFrame, function: PartitionFunction, path: str) -> list[bytes]:
    """What a function says to each partition, in order. `path` is a file to do it with, gone afterwards."""
    df.sparkSession.dataSource.register(FunctionSink)
    disk = PosixDisk()
    remove_if_exists(disk, path)
    sent = b64encode(pickle.dumps(function)).decode()
    df.write.format("tidelog-files").option("function", sent).option("answers", path).mode("append").save()
    content = read_file(disk, path)
    if content is None:
        raise Damaged(f"{path} was not written by the process that ends a write; nothing was committed, run it again")
    disk.remove(path)
    results = msgspec.msgpack.decode(content, type=list[tuple[bytes, tuple[str, str] | None]])
    return unwrap_results([said if failed is None else TaskError(*failed) for said, failed in results])
