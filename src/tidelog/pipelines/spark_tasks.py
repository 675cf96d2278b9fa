"""Run a function on executors: over small arguments, or over the partitions of a DataFrame. Results keep the order.

A task that fails for a reason that a retry cannot fix (a full disk, a record that does not fit, damage) returns the
error as its result. Other errors are raised, and Spark retries as configured.

    df ──► partition ──► function(batches) ──► result ─┐
       └─► partition ──► function(batches) ──► result ─┴─► one small file, which the driver reads

Partitions are processed by a Spark sink. Spark commits a write in another process, so the results are returned in a
file. `mapInArrow` returns them directly, but needs pandas, which only clients of Spark Connect have.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tidelog import errors
from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk
from tidelog.errors import Damaged, DiskFull, Error, Refused, StoreUnavailable
from tidelog.spark.executors import ExecutorFunction, reduce_object
from tidelog.spark.spark_session import is_connect

T = TypeVar("T")
R = TypeVar("R")


class TaskRunner(Protocol):
    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        """Return the result of each task, in order. Raises the first error."""
        ...


class TaskError(NamedTuple):
    """An error as a result: its class by name, because the constructors take more than a message."""

    name: str
    message: str

    def to_error(self) -> Error:
        kind = getattr(errors, self.name)
        error: Error = kind.__new__(kind)
        error.args = (self.message,)
        return error


def run_guarded(function: Callable[[T], R], task: T) -> R | TaskError:
    try:
        return function(task)
    except (DiskFull, Refused, Damaged, StoreUnavailable) as error:
        return TaskError(type(error).__name__, str(error))


class LocalTaskRunner:
    """Runs tasks in this process, one after the other, without Spark."""

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        return [function(task) for task in tasks]


class SparkTaskRunner:
    """Runs each task in a partition of its own.

    Spark Connect has no RDDs. Its client needs pandas, so there `mapInArrow` returns the results.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        if not tasks:
            return []
        guarded = ExecutorFunction(partial(run_guarded, function))
        if is_connect(self._spark):
            numbers = self._spark.range(0, len(tasks), 1, len(tasks))
            return unwrap_results(_map_partitions(numbers, _TaskOfPartition(guarded, list(tasks))))
        context = self._spark.sparkContext
        return unwrap_results(context.parallelize(list(tasks), len(tasks)).map(guarded).collect())


class _TaskOfPartition:
    """Runs the task whose number is the only row of a partition."""

    def __init__(self, function: Callable[[T], R | TaskError], tasks: list[T]) -> None:
        self._function, self._tasks = function, tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> object:
        (number,) = [number for batch in batches for number in batch.column(0).to_pylist()]
        return self._function(self._tasks[number])


def _map_partitions(df: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], object]) -> list[Any]:
    """Call a function with each partition and return the results in the order of partitions."""
    sent = ExecutorFunction(function)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None, "this is a task"
        result = pickle.dumps(sent(batches))
        yield pa.RecordBatch.from_pydict({"partition": [context.partitionId()], "result": [result]})

    table = df.mapInArrow(run, "partition long, result binary").toArrow()
    return [pickle.loads(row["result"]) for row in sorted(table.to_pylist(), key=lambda row: row["partition"])]


def unwrap_results(results: Sequence[R | TaskError]) -> list[R]:
    for result in results:
        if isinstance(result, TaskError):
            raise result.to_error()
    return [result for result in results if not isinstance(result, TaskError)]


PartitionFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch], int, int], bytes]  # batches, partition, attempt


def _run_on_partition(function: PartitionFunction, batches: Iterator[pa.RecordBatch]) -> bytes | TaskError:
    context = TaskContext.get()
    assert context is not None, "this is a task"
    partition, attempt = context.partitionId(), context.taskAttemptId()
    return run_guarded(lambda batches: function(batches, partition, attempt), batches)


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
        disk, path = pickle.loads(b64decode(self.options["results.secret"]))
        return FunctionWriter(self.options["function.secret"], disk, path)


class FunctionWriter(DataSourceArrowWriter):
    def __init__(self, function: str, disk: Disk, results_path: str) -> None:
        self._function, self._disk, self._results_path = function, disk, results_path

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        function: PartitionFunction = pickle.loads(b64decode(self._function))
        result = _run_on_partition(function, iterator)
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        if isinstance(result, TaskError):
            return PartitionResult(partition, b"", (result.name, result.message))
        return PartitionResult(partition, result)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        sent = [message for message in messages if isinstance(message, PartitionResult)]
        results = [(each.result, each.failure) for each in sorted(sent, key=lambda each: each.partition)]
        replace_file(self._disk, self._results_path, msgspec.msgpack.encode(results))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """No effect: the next writer removes the files."""


def run_on_partitions(df: DataFrame, function: PartitionFunction, disk: Disk, path: str) -> list[bytes]:
    """Run a function on each partition and return the results in order. `path`: a temporary file for them."""
    if is_connect(df.sparkSession):
        return unwrap_results(_map_partitions(df, partial(_run_on_partition, function)))
    df.sparkSession.dataSource.register(FunctionSink)
    remove_if_exists(disk, path)
    # Spark hides values of options with `secret` in their names: both have the options of the store.
    function_sent, results_sent = (b64encode(pickle.dumps(each)).decode() for each in (function, (disk, path)))
    writer = df.write.format("tidelog-files").option("function.secret", function_sent)
    writer.option("results.secret", results_sent).mode("append").save()
    content = read_file(disk, path)
    if content is None:
        raise Damaged(f"{path} was not written by the process that ends a write; nothing was committed, run it again")
    disk.remove(path)
    results = msgspec.msgpack.decode(content, type=list[tuple[bytes, tuple[str, str] | None]])
    return unwrap_results([result if failure is None else TaskError(*failure) for result, failure in results])
