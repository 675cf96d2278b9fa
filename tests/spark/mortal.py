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

from tidelog.engine import Appended, Engine
from tidelog.engine.staging import Chunk
from tidelog.spark import sink_options
from tidelog.spark.sink import Sink, TopicStreamWriter, target_of
from tidelog.spark.sink_options import WriteOptions
from tidelog.spark.source import TidelogSource
from tidelog.spark.target import Batch, PathTarget, Target
from tidelog.types import Buffer

EVERY = ("stage", "staged", "publish", "published", "cleared")
BY_PATH = (*EVERY[:3], "opened", "appended", *EVERY[3:])


def doom(file: Path, step: str, passes: int = 0, *, driver: bool = False) -> None:
    file.write_text(f"{step} {passes} {int(driver)}")


def reached(file: str, step: str) -> None:
    """Die here, if it is here."""
    try:
        named, passes, driver = Path(file).read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if named != step:
        return
    if int(passes):
        doom(Path(file), step, int(passes) - 1, driver=driver == "1")
        return
    os.unlink(file)
    me = os.getpid()
    if driver == "1":
        jvm = _parent(os.getppid())  # a worker's parent is its daemon, and the daemon's the JVM
        program = _parent(jvm)
        if os.fork() == 0:  # somebody has to live long enough to kill the others, this one first: it holds the lock
            os.closerange(0, 4096)
            for pid in (me, jvm, program):
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        signal.pause()
    os.kill(me, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class MortalPath(PathTarget):
    file = ""

    @contextmanager
    def _opened(self) -> Iterator[Engine]:
        with super()._opened() as log:
            reached(self.file, "opened")
            yield log
            reached(self.file, "appended")


class MortalTarget:
    def __init__(self, inner: Target, file: str) -> None:
        self._inner, self._file = inner, file

    def prepare(self) -> None:
        self._inner.prepare()

    def close(self) -> None:
        self._inner.close()

    def stage(self, topic: str, chunk: str, rows: int, content: Buffer) -> Chunk:
        reached(self._file, "stage")
        made = self._inner.stage(topic, chunk, rows, content)
        reached(self._file, "staged")
        return made

    def publish(self, batch: Batch, chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, Appended]:
        reached(self._file, "publish")
        done = self._inner.publish(batch, chunks)
        reached(self._file, "published")
        return done

    def clear(self, owner: str, topics: Sequence[str]) -> None:
        self._inner.clear(owner, topics)
        reached(self._file, "cleared")


class MortalSink(Sink):
    def __init__(self, options: WriteOptions, schema: StructType, writer: str, file: str) -> None:
        self._file = file
        super().__init__(options, schema, writer)

    def target(self) -> Target:
        inner = target_of(self._options)
        if isinstance(inner, PathTarget):
            assert self._options.path is not None
            inner = MortalPath(self._options.path)
            inner.file = self._file
        return MortalTarget(inner, self._file)


class MortalWriter(TopicStreamWriter):
    def __init__(self, options: WriteOptions, schema: StructType, file: str) -> None:
        assert options.writer is not None
        self._sink = MortalSink(options, schema, options.writer, file)


class MortalSource(TidelogSource):
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
        return MortalWriter(sink_options.read(self.options).for_stream(), schema, self._file)
