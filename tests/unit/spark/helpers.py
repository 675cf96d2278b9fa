"""What the tests of the Spark source stand on: an engine that writes, read by path beside it or through a server.

House ── engine          the writer, which a test drives
  └── options()          how a reader gets at it: path, or server over a real socket
table(…)                 the reader's whole life without a JVM, pickled wherever Spark would pickle it
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import CaseInsensitiveDict, Filter
from pyspark.sql.types import StructType

import tidelog
from tidelog.clock import Clock, SystemClock
from tidelog.database import Database
from tidelog.disk.posix import PosixDisk
from tidelog.engine.config import ColdCompression, EngineConfig
from tidelog.server.config import ServerConfig
from tidelog.server.lifecycle import RunningServer, shutdown, start_server
from tidelog.spark.backends.interface import ReadTask
from tidelog.spark.source import TidelogSource, TopicStreamReader

Mode = Literal["path", "server"]
MODES: tuple[Mode, ...] = ("path", "server")
TIMEOUT_S = 60
T = TypeVar("T")
_readers: list[TopicStreamReader] = []


class SourceEnv:
    def __init__(self, mode: Mode, path: str, engine: Database, address: str) -> None:
        self.mode, self.path, self.engine, self.address = mode, path, engine, address

    def options(self, **more: Any) -> dict[str, str]:
        where = {"path": self.path} if self.mode == "path" else {"server": self.address}
        return {**where, "subscribe": "orders", **{name: str(value) for name, value in more.items()}}


@contextmanager
def source_env(
    mode: Mode,
    directory: Path,
    *,
    clock: Clock | None = None,
    keys: str = "",
    segment_events: int = 1000,
    cold: str | None = None,
    compression: ColdCompression = "none",
) -> Iterator[SourceEnv]:
    clock, path = clock or SystemClock(), str(directory / "data")
    config = EngineConfig(segment_events_max=segment_events, cold=cold, cold_compression=compression)
    try:
        if mode == "path":
            with tidelog.open(path, clock=clock, threads=False, config=config) as engine:
                yield SourceEnv(mode, path, engine, "")
        else:
            served = run_server(
                path, clock=clock, keys=keys, segment_events=segment_events, cold=cold, compression=compression
            )
            with served as (engine, address):
                yield SourceEnv(mode, path, engine, address)
    finally:
        while _readers:
            _readers.pop().stop()


@contextmanager
def run_server(
    path: str,
    *,
    clock: Clock | None = None,
    keys: str = "",
    segment_events: int = 1000,
    cold: str | None = None,
    compression: ColdCompression = "none",
) -> Iterator[tuple[Database, str]]:
    """A server on a thread, with its engine at hand."""
    config = ServerConfig(
        data_dir=path,
        port=0,
        api_keys=keys,
        segment_max_events=segment_events,
        drain_ms=0,
        cold_dir=cold or "",
        cold_compression=compression,
    )
    there, over = Event(), Event()
    found: list[RunningServer] = []

    async def run() -> None:
        started = await start_server(config, clock=clock or SystemClock(), disk=PosixDisk(), log_line=lambda _: None)
        await started.recovery
        found.append(started)
        there.set()
        await asyncio.to_thread(over.wait)
        await shutdown(started)

    thread = Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert there.wait(TIMEOUT_S), "the server did not start"
    host, port = found[0].listener.address
    try:
        yield found[0].service.database, f"http://{host}:{port}"
    finally:
        over.set()
        thread.join(TIMEOUT_S)


def pickled(value: T) -> T:
    """As it arrives in another process."""
    made: T = pickle.loads(pickle.dumps(value))
    return made


def source(options: Mapping[str, str]) -> TidelogSource:
    return pickled(TidelogSource(CaseInsensitiveDict(dict(options))))


class BatchResult(NamedTuple):
    table: pa.Table
    tasks: list[ReadTask]
    unpushed_filters: list[Filter]  # filters that Spark would have to apply itself

    @property
    def seqs(self) -> list[int]:
        found: list[int] = self.table.column("seq").to_pylist()
        return found


def read(options: Mapping[str, str], schema: StructType | None = None, filters: Sequence[Filter] = ()) -> BatchResult:
    """A batch, as Spark would run it."""
    made = source(options)
    schema = made.schema() if schema is None else schema
    reader = pickled(made.reader(schema))
    left = list(reader.pushFilters(list(filters)))
    splits = pickled(list(reader.partitions()))
    tasks = [split for split in splits if isinstance(split, ReadTask)]
    return BatchResult(
        _table([batch for split in splits for batch in pickled(reader).read(split)], schema), tasks, left
    )


def stream(options: Mapping[str, str]) -> TopicStreamReader:
    """A streaming reader; it is stopped when its house closes."""
    made = source(options)
    reader = pickled(made.streamReader(made.schema()))
    _readers.append(reader)
    return reader


def read_micro_batch(reader: TopicStreamReader, start: Any, end: Any) -> pa.Table:
    """The rows of one micro-batch."""
    splits = pickled(list(reader.partitions(start, end)))
    return _table([batch for split in splits for batch in pickled(reader).read(split)], reader._schema)


def _table(batches: list[pa.RecordBatch], schema: StructType) -> pa.Table:
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.Table.from_batches(batches, schema=to_arrow_schema(schema, timezone="UTC"))
