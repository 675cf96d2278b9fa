"""Queue history and the gap log as DataFrames: `option("history", "emails")`, `option("gaps", "orders")`.

Both are small beside the topics that they are about: a history keeps `queue_history_records` events, the gap log has a
row for each removed range. So one task a queue reads a history, and one task the gap log of all named topics, in pages.
They are batches; a stream of a history or of gaps is a stream of nothing else, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from tidelog import database
from tidelog.addresses import Location
from tidelog.api_types import HISTORY_LIMIT_MAX
from tidelog.database import Database
from tidelog.disk.object_store import open_object_store
from tidelog.disk.posix import PosixDisk
from tidelog.errors import TopicNotFound
from tidelog.spark.executors import reduce_object
from tidelog.spark.http_client import open_client, quote_name
from tidelog.spark.options import Options

ALL_TOPICS: Final = "*"
_GAPS_PAGE: Final = 1000
_LONG, _TEXT = LongType(), StringType()

HISTORY_SCHEMA: Final = StructType(
    [
        StructField("queue", _TEXT, False),
        StructField("at", _LONG, False),
        StructField("ts", TimestampType(), False),
        StructField("event", _TEXT, False),
        *(StructField(name, _LONG) for name in ("seq", "last_seq")),
        StructField("node", _TEXT),
        *(StructField(name, _LONG) for name in ("lease_id", "deliveries", "waited_ms", "deadline_ms")),
    ]
)
GAPS_SCHEMA: Final = StructType(
    [
        StructField("topic", _TEXT, False),
        StructField("topic_id", _LONG, False),
        StructField("cause", _TEXT, False),
        *(StructField(name, _LONG, False) for name in ("first", "last", "records", "bytes")),
        StructField("ts", TimestampType(), False),
        *(StructField(name, _TEXT) for name in ("actor", "about")),
        StructField("seq", _LONG, False),
    ]
)


def table_schema(options: Options) -> StructType:
    return HISTORY_SCHEMA if options.history else GAPS_SCHEMA


@dataclass(frozen=True)
class LogTableTask(InputPartition):
    """The history of one queue, or the gap log of these topics."""

    names: tuple[str, ...]


class LogTableReader(DataSourceReader):
    def __init__(self, options: Options) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    def partitions(self) -> Sequence[LogTableTask]:
        if self._options.history:
            return [LogTableTask((name,)) for name in self._options.history]
        return [LogTableTask(self._options.gaps)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogTableTask), "planned by this reader"
        schema = table_schema(self._options)
        arrow_schema = to_arrow_schema(schema, timezone="UTC")
        with closing(_open_source(self._options)) as source:
            rows = source.history(partition.names[0]) if self._options.history else source.gaps(partition.names)
            for page in rows:
                # Times arrive as milliseconds.
                columns = [
                    pc.cast(pa.array([row["ts_ms"] for row in page], pa.timestamp("ms", tz="UTC")), field.type)
                    if field.name == "ts"
                    else pa.array([row.get(field.name) for row in page], field.type)
                    for field in arrow_schema
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=arrow_schema)


_Page = list[dict[str, Any]]


def _open_source(options: Options) -> _DirectorySource | _ServerSource:
    location = options.location
    return _ServerSource(location, options.retry_ms) if location.is_server else _DirectorySource(location)


class _DirectorySource:
    def __init__(self, location: Location) -> None:
        disk, path = (
            open_object_store(location.address) if location.is_object_store else (PosixDisk(), location.address)
        )
        self._database: Database = database.open_for_planning(path, disk)

    def close(self) -> None:
        self._database.close()

    def history(self, queue: str) -> Iterator[_Page]:
        history, at = self._database.queue(queue, create=False).history(), 0
        while rows := history.read(at, HISTORY_LIMIT_MAX):
            yield [{**row, "queue": queue} for row in rows]
            at = rows[-1]["at"]

    def gaps(self, topics: Sequence[str]) -> Iterator[_Page]:
        for topic in topics:
            name, after = None if topic == ALL_TOPICS else topic, 0
            is_known = name is None or self._database.find(name) is not None
            while rows := self._database.gaps(name, after_seq=after, limit=_GAPS_PAGE):
                is_known = True
                yield [row._asdict() for row in rows]
                if rows[-1].seq <= after:  # those that are not written yet come last, and have no seqs
                    break
                after = rows[-1].seq
            if not is_known:
                raise TopicNotFound(topic)


class _ServerSource:
    def __init__(self, location: Location, retry_ms: int) -> None:
        self._http = open_client(location.address, location.key, retry_ms=retry_ms)

    def close(self) -> None:
        self._http.close()

    def history(self, queue: str) -> Iterator[_Page]:
        path, at = f"/v0/topics/{quote_name(queue)}/history", 0
        while True:
            page = self._http.get(path, from_seq=at, limit=HISTORY_LIMIT_MAX)
            rows = page["events"]
            if not rows:
                return
            yield [{**row, "queue": queue} for row in rows]
            at = rows[-1]["at"]

    def gaps(self, topics: Sequence[str]) -> Iterator[_Page]:
        for topic in topics:
            path = "/v0/gaps" if topic == ALL_TOPICS else f"/v0/topics/{quote_name(topic)}/gaps"
            query: dict[str, object] = {"limit": _GAPS_PAGE}
            while True:
                page = self._http.get(path, **query)
                if page["gaps"]:
                    yield page["gaps"]
                if not page.get("next_cursor"):
                    break
                query["cursor"] = page["next_cursor"]
