"""[shell] Rows of a DataFrame into files, by executors, as Arrow: a sink that runs a function of ours on them.

    df ──► partition ──► function(batches) ──► answer ─┐
       └─► partition ──► function(batches) ──► answer ─┴─► one small file, which the driver reads: `answers`

Spark ends a write in a process of its own, so the answers come back by way of the disk. `mapInArrow` would hand them
over directly, and needs pandas for it, which nothing else here does.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tidelog.disk.atomic import read_all, remove_if_there, replace
from tidelog.disk.posix import PosixDisk
from tidelog.errors import Damaged
from tidelog.pipelines.runner import Failed, guarded, unwrapped

Function: TypeAlias = Callable[[Iterator[pa.RecordBatch], int, int], bytes]  # batches, partition, attempt


@dataclass
class Answer(WriterCommitMessage):
    partition: int
    said: bytes
    failed: tuple[str, str] | None = None


class FilesSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "tidelog-files"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002
        return FilesWriter(self.options["function"], self.options["answers"])


class FilesWriter(DataSourceArrowWriter):
    def __init__(self, function: str, answers: str) -> None:
        self._function, self._answers = function, answers

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "this is a task"
        function: Function = pickle.loads(b64decode(self._function))
        partition, attempt = context.partitionId(), context.taskAttemptId()
        said = guarded(lambda batches: function(batches, partition, attempt), iterator)
        return (
            Answer(partition, b"", (said.name, said.message)) if isinstance(said, Failed) else Answer(partition, said)
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        answers = sorted((each for each in messages if isinstance(each, Answer)), key=lambda each: each.partition)
        told = [(each.said, each.failed) for each in answers]
        replace(PosixDisk(), self._answers, msgspec.msgpack.encode(told))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was written is swept by whoever writes there next."""


def answers(df: DataFrame, function: Function, path: str) -> list[bytes]:
    """What a function says to each partition, in order. `path` is a file to do it with, gone afterwards."""
    df.sparkSession.dataSource.register(FilesSink)
    disk = PosixDisk()
    remove_if_there(disk, path)
    sent = b64encode(pickle.dumps(function)).decode()
    df.write.format("tidelog-files").option("function", sent).option("answers", path).mode("append").save()
    content = read_all(disk, path)
    if content is None:
        raise Damaged(f"{path} was not written by the process that ends a write; nothing was committed, run it again")
    disk.remove(path)
    told = msgspec.msgpack.decode(content, type=list[tuple[bytes, tuple[str, str] | None]])
    return unwrapped([said if failed is None else Failed(*failed) for said, failed in told])
