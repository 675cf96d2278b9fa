"""Compact a topic whose history is larger than one machine wants to search: Spark finds, the log removes.

    log         closes the active segment and says what is to be searched (`engine.compaction.begin_search`)
    executors   read the records of a task and their keys, by the engine's own rule; of each piece of a task
                all but the newest record of a key is replaced
    Spark       shuffles the newest of each piece by key: all but the last of them are replaced, too
    driver      takes bitmaps of 32,768 seqs, oldest first, and has the log remove them (`remove_found`)

    (digest of the key, seq, newest | tombstone | older)  ──►  (32,768 seqs: replaced, tombstones)  ──►  log

A row of the shuffle has 25 bytes, and the driver gets two bits a record at most. What is removed, and what holds and
routers keep, is decided by the log, as in `Topic.compact`. A directory is held for the whole job. A run that breaks off
has removed the oldest replaced records, which is right at any point; the next run finds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec
import numpy as np
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from tidelog import database
from tidelog.addresses import Location
from tidelog.client.http import Client, topic_path
from tidelog.clock import SystemClock
from tidelog.engine.compaction import Compacted, FoundRecords, FoundRemoved, SearchRange
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput
from tidelog.spark.http_client import RETRY_TIMEOUT_MS
from tidelog.spark.key_source import OLDER, TOMBSTONE, KeySource
from tidelog.spark.sink_backends import open_when_unlocked
from tidelog.types import Ints

Progress = Callable[[int, int], None]
OnStep = Callable[[str], object]
_BITMAP_SEQS: Final = 32_768  # of Spark's bitmap functions
_PART_SEQS: Final = 65_536  # of each kind in one request
_REMOVE_TIMEOUT_S: Final = 600.0  # a part is checked against holds, logged and synced
_NO_SEQS: Final = np.zeros(0, np.int64)


class CompactedLog(Protocol):
    """The log that removes what was found."""

    def begin(self) -> SearchRange: ...

    def remove(self, found: FoundRecords) -> FoundRemoved: ...


class _DirectoryLog:
    def __init__(self, engine: database.Database, topic: str) -> None:
        self._engine, self._topic = engine, topic_operations(engine.topic(topic, create=False))

    def begin(self) -> SearchRange:
        found = self._topic.begin_compaction_search()
        self._engine.checkpoint()  # executors then read files, and not the WAL
        return found

    def remove(self, found: FoundRecords) -> FoundRemoved:
        return self._topic.remove_found(found, actor="compact")


class _ServerLog:
    def __init__(self, client: Client, topic: str) -> None:
        self._client, self._path = client, topic_path(topic)

    def begin(self) -> SearchRange:
        found = self._client.post(f"{self._path}/compact/search", {})["range"]
        return SearchRange(**found)

    def remove(self, found: FoundRecords) -> FoundRemoved:
        fields = {**found._asdict(), "range": found.range._asdict()}
        body = {**fields, "replaced": found.replaced.tolist(), "tombstones": found.tombstones.tolist()}
        done = self._client.post(f"{self._path}/compact/found", body)
        names = ("removed", *FoundRemoved._fields[1:])
        return FoundRemoved(*msgspec.convert([done[name] for name in names], list[int]))


def check_location(location: Location) -> None:
    """Raise BadInput where nothing can be removed."""
    if location.is_object_store:
        raise BadInput(
            f"{location.address} is an object store, where nothing is removed; nothing was done, name a server or a "
            "directory"
        )


@contextmanager
def open_log(location: Location, topic: str) -> Iterator[CompactedLog]:
    """Open the log for the whole job: a directory is held, so nothing is lost between search and removal."""
    if location.is_server:
        key, address = location.key, location.address
        with Client(address, key=key, timeout_s=_REMOVE_TIMEOUT_S, retry_ms=RETRY_TIMEOUT_MS) as client:
            yield _ServerLog(client, topic)
        return
    with open_when_unlocked(
        lambda: database.open(location.address, threads=False), location.address, SystemClock()
    ) as engine:
        yield _DirectoryLog(engine, topic)


def run_compact(
    spark: SparkSession,
    location: Location,
    topic: str,
    log: CompactedLog,
    on_step: OnStep,
    progress: Progress | None = None,
) -> Compacted:
    """Search and remove. `on_step` is called before each change of the log, with what comes."""
    on_step("begin")
    sought = log.begin()
    spark.dataSource.register(KeySource)
    records, size, tombstones = 0, 0, 0
    oldest_ms, horizon = 0, sought.horizon
    parts = _collect_parts(find_replaced(spark, location, topic, sought)) if sought.first < sought.stop else iter(())

    def remove(replaced: Ints, marked: Ints, *, is_last: bool = False) -> None:
        nonlocal records, size, tombstones, oldest_ms, horizon
        on_step("finish" if is_last else "remove")
        part = FoundRecords(sought._replace(horizon=horizon), replaced, marked, is_last, oldest_ms)
        done = log.remove(part)
        records, size, tombstones = records + done.records, size + done.bytes, tombstones + done.tombstones
        oldest_ms, horizon = done.oldest_tombstone_ms, done.horizon

    for replaced, marked in parts:
        remove(replaced, marked)
        if progress is not None:
            last = max(replaced[-1] if len(replaced) else 0, marked[-1] if len(marked) else 0)
            progress(int(last) - sought.first + 1, sought.stop - sought.first)
    remove(_NO_SEQS, _NO_SEQS, is_last=True)
    if progress is not None and sought.stop > sought.first:
        progress(sought.stop - sought.first, sought.stop - sought.first)
    return Compacted(records, size, tombstones, min(horizon, sought.stop - 1))


def find_replaced(spark: SparkSession, location: Location, topic: str, sought: SearchRange) -> DataFrame:
    """Return bitmaps of replaced records and of tombstones, by `bucket` of 32,768 seqs, in order."""
    offsets = {name: msgspec.json.encode({topic: seq}).decode() for name, seq in zip(_ENDS, sought[3:5], strict=True)}
    options = {**location.as_options(), **offsets, "subscribe": topic, "onGap": "skip", "rule": sought.rule}
    keys = spark.read.format("tidelog-keys").options(**options).load()
    is_older = F.col("kind") == OLDER
    of_one_key = Window.partitionBy("high", "low", F.when(is_older, F.col("seq"))).orderBy("seq")
    marked = keys.select(
        "seq", "kind", (is_older | F.lead("seq").over(of_one_key).isNotNull()).alias("is_replaced")
    ).where(F.col("is_replaced") | (F.col("kind") == TOMBSTONE))
    place = F.bitmap_bit_position("seq")
    return (
        marked.groupBy(F.bitmap_bucket_number("seq").alias("bucket"))
        .agg(
            F.bitmap_construct_agg(F.when(F.col("is_replaced"), place)).alias("replaced"),
            F.bitmap_construct_agg(F.when(~F.col("is_replaced"), place)).alias("tombstones"),
        )
        .orderBy("bucket")
    )


_ENDS: Final = ("startingOffsets", "endingOffsets")


def _collect_parts(found: DataFrame) -> Iterator[tuple[Ints, Ints]]:
    """Yield replaced records and tombstones, ascending, about `_PART_SEQS` at a time."""
    replaced, tombstones = [_NO_SEQS], [_NO_SEQS]
    for row in found.toLocalIterator():
        first = (row.bucket - 1) * _BITMAP_SEQS + 1
        replaced.append(_seqs_of_bitmap(row.replaced, first))
        tombstones.append(_seqs_of_bitmap(row.tombstones, first))
        if max(sum(map(len, replaced)), sum(map(len, tombstones))) >= _PART_SEQS:
            yield np.concatenate(replaced), np.concatenate(tombstones)
            replaced, tombstones = [_NO_SEQS], [_NO_SEQS]
    if len(replaced) > 1:
        yield np.concatenate(replaced), np.concatenate(tombstones)


def _seqs_of_bitmap(bitmap: bytearray, first: int) -> Ints:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int64) + first
