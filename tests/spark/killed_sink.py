"""A sink that dies: at a step that a file names, its process is killed with signal 9, and nothing of it runs on.

    stage      before a task has staged                   opened      the directory is held, nothing is written (path)
    staged     after it has                               appended    it is written, the directory still held (path)
    publish    before the driver publishes                published   after it has
    cleared    after what was staged is gone: the last thing before Spark writes its own commit

The file holds the step, how many times to pass it first, and whether the driver dies too: the JVM and the program that
started it. Whoever dies removes the file first, so that the next one lives.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from tidelog.database import Database
from tidelog.engine import Appended
from tidelog.engine.producer_batches import StagedChunk
from tidelog.spark import sink
from tidelog.spark.sink import SinkWriter, TopicStreamWriter, WriteOptions, open_sink_backend
from tidelog.spark.sink_backends import DirectorySinkBackend, SinkBackend, SinkBatch
from tidelog.spark.source import TidelogSource
from tidelog.types import Buffer

SERVER_STEPS = ("stage", "staged", "publish", "published", "cleared")
DIRECTORY_STEPS = (*SERVER_STEPS[:3], "opened", "appended", *SERVER_STEPS[3:])


def schedule_kill(file: Path, step: str, passes: int = 0, *, driver: bool = False) -> None:
    file.write_text(f"{step} {passes} {int(driver)}")


def die_if_due(file: str, step: str) -> None:
    """Die here, if it is here."""
    try:
        named, passes, driver = Path(file).read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if named != step:
        return
    if int(passes):
        schedule_kill(Path(file), step, int(passes) - 1, driver=driver == "1")
        return
    os.unlink(file)
    me = os.getpid()
    if driver == "1":
        jvm = _parent_pid(os.getppid())  # a worker's parent is its daemon, and the daemon's the JVM
        program = _parent_pid(jvm)
        if os.fork() == 0:  # somebody has to live long enough to kill the others, this one first: it holds the lock
            os.closerange(0, 4096)
            for pid in (me, jvm, program):
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        signal.pause()
    os.kill(me, signal.SIGKILL)


def _parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class KilledDirectoryBackend(DirectorySinkBackend):
    file = ""

    @contextmanager
    def _open_for_write(self) -> Iterator[Database]:
        with super()._open_for_write() as log:
            die_if_due(self.file, "opened")
            yield log
            die_if_due(self.file, "appended")


class KilledSinkBackend:
    def __init__(self, inner: SinkBackend, file: str) -> None:
        self._inner, self._file = inner, file

    def prepare(self) -> None:
        self._inner.prepare()

    def close(self) -> None:
        self._inner.close()

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> StagedChunk:
        die_if_due(self._file, "stage")
        made = self._inner.stage(topic, chunk, rows, content)
        die_if_due(self._file, "staged")
        return made

    def publish(self, batch: SinkBatch, chunks: Mapping[str, Sequence[StagedChunk]]) -> dict[str, Appended]:
        die_if_due(self._file, "publish")
        done = self._inner.publish(batch, chunks)
        die_if_due(self._file, "published")
        return done

    def clear_staging(self, owner: str, topics: Sequence[str]) -> None:
        self._inner.clear_staging(owner, topics)
        die_if_due(self._file, "cleared")


class KilledSinkWriter(SinkWriter):
    def __init__(self, options: WriteOptions, schema: StructType, writer: str, file: str) -> None:
        self._file = file
        super().__init__(options, schema, writer)

    def open_backend(self) -> SinkBackend:
        inner = open_sink_backend(self._options)
        if isinstance(inner, DirectorySinkBackend):
            inner = KilledDirectoryBackend(self._options.location.address)
            inner.file = self._file
        return KilledSinkBackend(inner, self._file)


class KilledStreamWriter(TopicStreamWriter):
    def __init__(self, options: WriteOptions, schema: StructType, file: str) -> None:
        assert options.writer is not None
        self._sink = KilledSinkWriter(options, schema, options.writer, file)


class KilledSource(TidelogSource):
    """`tidelog` with one more option: the file."""

    def __init__(self, options: dict[str, str]) -> None:
        given = CaseInsensitiveDict(dict(options))
        self._file = str(given.pop("doom", ""))
        super().__init__(given)

    @classmethod
    def name(cls) -> str:
        return "mortal"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        assert not overwrite
        return KilledStreamWriter(sink.parse_sink_options(self.options).for_stream(), schema, self._file)
