"""Groups follow what queries have committed, however a query ends. What is expected is read from the files of Spark's
own checkpoint: the end of the last batch in its commit log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from tests.spark.helpers import TopicLocation, costly, open_location, wait_for
from tests.unit.spark.helpers import Mode

import tidelog
import tidelog.spark
from tidelog.spark import backends

pytestmark = pytest.mark.slow
RECORDS = 10
BATCH = 6


class Reading:
    """A stream of a topic of ten records with a group, six records a batch."""

    def __init__(self, spark: SparkSession, here: TopicLocation, root: Path) -> None:
        self.spark, self.here, self.checkpoint = spark, here, root / "checkpoint"
        with here.open_engine() as log:
            log.topic("orders").append([b"x"] * RECORDS)

    def rows(self, **options: str) -> DataFrame:
        given = {**self.here.options, "subscribe": "orders", "group": "etl", "startingOffsets": "earliest", **options}
        return self.spark.readStream.format("tidelog").options(**given).load()

    def into(self, write: Callable[[DataFrame, int], None] | None = None, **options: str) -> DataStreamWriter:
        rows = self.rows(**{"maxOffsetsPerTrigger": str(BATCH), **options})
        writer = rows.writeStream.format("noop") if write is None else rows.writeStream.foreachBatch(write)
        return writer.option("checkpointLocation", str(self.checkpoint))

    def committed(self) -> int:
        """The last seq of the last batch in Spark's commit log."""
        batches = [int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*")]
        if not batches:
            return 0
        lines = (self.checkpoint / "offsets" / str(max(batches))).read_text().splitlines()
        found: int = json.loads(lines[-1])["orders"]["seq"]
        return found - 1

    def position(self) -> int:
        with self.here.open_engine() as log:
            found = log.topic("orders").group("etl")
            return found.position if found.exists else 0


def deliver(spark: SparkSession) -> None:
    """Return when the listeners have handled every event that Spark has posted."""
    context: Any = spark.sparkContext._jsc
    context.sc().listenerBus().waitUntilEmpty()


def after_batch(query: StreamingQuery, number: int) -> None:
    """Return when Spark has reported a batch. A query that has failed raises."""

    def is_reported() -> bool:
        done = any(each.batchId == number and each.sources[0].endOffset for each in query.recentProgress)
        assert done or query.isActive, query.exception()
        return done

    wait_for(is_reported)


@costly("path")
def test_a_long_trigger_interval_leaves_no_lag_while_a_query_waits(
    spark: SparkSession, tmp_path: Path, mode: Mode
) -> None:
    with open_location(mode, tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        query = reading.into().trigger(processingTime="1 hour").start()
        try:
            after_batch(query, 0)
            deliver(spark)
            assert reading.position() == reading.committed() == BATCH
            assert query.isActive
        finally:
            query.stop()
        deliver(spark)
        assert reading.position() == reading.committed() == BATCH


@costly("server")
def test_trigger_once_leaves_no_lag(spark: SparkSession, tmp_path: Path, mode: Mode) -> None:
    """Spark plans nothing after that batch, so only the end of the query says that it was written."""
    with open_location(mode, tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated by Spark, and used
            query = reading.into().trigger(once=True).start()
        assert query.awaitTermination(120)
        deliver(spark)
        assert reading.position() == reading.committed() == RECORDS


@costly("path")
def test_a_query_that_is_stopped_while_it_waits_leaves_no_lag(spark: SparkSession, tmp_path: Path, mode: Mode) -> None:
    with open_location(mode, tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        query = reading.into().start()
        after_batch(query, 1)
        query.stop()
        deliver(spark)
        assert reading.position() == reading.committed() == RECORDS


@pytest.mark.parametrize(
    ("mode", "fails"),
    [
        *(("path", False), ("server", True)),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in (("path", True), ("server", False))),
    ],
)
def test_a_query_that_is_stopped_in_a_batch_leaves_the_group_before_it(
    spark: SparkSession, tmp_path: Path, mode: Mode, fails: bool
) -> None:
    """Whether Spark still commits a batch whose sink returns after `stop()` is Spark's to say; the group follows."""
    begun, stopped = Event(), Event()

    def write(frame: DataFrame, number: int) -> None:
        frame.count()
        if number == 1:
            begun.set()
            assert stopped.wait(120)
            if fails:
                raise ValueError("the sink fails")

    with open_location(mode, tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        query = reading.into(write).start()
        assert begun.wait(120)
        stop = Thread(target=query.stop)
        stop.start()
        wait_for(lambda: not query.isActive)
        deliver(spark)
        assert reading.position() == reading.committed() == BATCH, "the sink is in its second batch"
        stopped.set()
        stop.join()
        deliver(spark)
        assert reading.position() == reading.committed()
        assert reading.committed() == BATCH or not fails


AT_ONCE, HOURLY = {"availableNow": True}, {"processingTime": "1 hour"}


@pytest.mark.parametrize(
    ("failing", "trigger"),
    [
        *((0, AT_ONCE), (1, HOURLY), (1, {})),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in ((1, AT_ONCE), (0, HOURLY), (0, {}))),
    ],
)
def test_a_failing_sink_keeps_the_group_before_its_batch(
    spark: SparkSession, tmp_path: Path, failing: int, trigger: dict[str, Any]
) -> None:
    def write(frame: DataFrame, number: int) -> None:
        frame.count()
        if number >= failing:
            raise ValueError("the sink fails")

    with open_location("path", tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        writer = reading.into(write)
        query = (writer.trigger(**trigger) if trigger else writer).start()
        if failing and "processingTime" in trigger:
            after_batch(query, 0)
            query.stop()
            query = reading.into(write).trigger(**trigger).start()  # begins with its second batch at once
        with pytest.raises(PySparkException, match="the sink fails"):
            query.awaitTermination(120)
        deliver(spark)
        assert reading.position() == reading.committed() == failing * BATCH


def test_a_directory_is_not_locked_after_the_end_of_available_now(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The source has moved the group when such a query ends. Events that arrive later write nothing: they would be in
    the way of the next writer."""
    with open_location("path", tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        query = reading.into().trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        with tidelog.open(here.options["path"], threads=False), caplog.at_level(logging.WARNING, "tidelog.spark"):
            deliver(spark)
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert reading.position() == RECORDS


def test_each_source_of_a_query_moves_its_own_group(spark: SparkSession, tmp_path: Path) -> None:
    with open_location("path", tmp_path / "a") as one, open_location("server", tmp_path / "b") as two:
        first, second = Reading(spark, one, tmp_path), Reading(spark, two, tmp_path)
        with two.open_engine() as log:
            log.topic("orders").append([b"y"] * 5)
        rows = first.rows().union(second.rows(group="other")).union(second.rows(group="third", where="seq = 3"))
        rows = rows.union(second.rows())
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        running = query.trigger(processingTime="1 hour").start()
        try:
            after_batch(running, 0)
            deliver(spark)
            assert first.position() == RECORDS
            with two.open_engine() as log:
                found = {name: log.topic("orders").group(name).position for name in ("other", "third", "etl")}
            assert found == {"other": 15, "third": 15, "etl": 15}
        finally:
            running.stop()


def test_a_relative_path_is_the_one_of_the_source(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of Python start in the directory of the JVM. The driver may have gone to another one since."""
    with open_location("path", tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        (tmp_path / "elsewhere").mkdir()
        path = os.path.relpath(here.options["path"])
        monkeypatch.chdir(tmp_path / "elsewhere")
        query = reading.into(path=path).trigger(processingTime="1 hour").start()
        try:
            after_batch(query, 0)
            deliver(spark)
            assert reading.position() == BATCH
        finally:
            query.stop()


def test_a_group_that_cannot_be_moved_is_logged_and_moved_later(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk is away")

    with open_location("path", tmp_path) as here:
        reading = Reading(spark, here, tmp_path)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "tidelog.spark"):
            patched.setattr(backends, "open_backend", broken)
            query = reading.into().trigger(processingTime="1 hour").start()
            after_batch(query, 0)
            deliver(spark)
        assert "the groups of a query stay where they are" in caplog.text
        assert "the disk is away" in caplog.text
        assert (query.isActive, reading.position()) == (True, 0)
        query.stop()
        deliver(spark)
        assert reading.position() == BATCH


def test_a_session_gets_one_listener(spark: SparkSession) -> None:
    streams: Any = spark.streams._jsqm
    before = len(streams.listListeners())
    tidelog.spark.register(spark)
    assert len(streams.listListeners()) == before > 0


PROGRAM = """
import os, sys
from threading import Event

import tidelog
import tidelog.spark
from tidelog.spark.listener import GroupListener

GroupListener.onQueryProgress = lambda self, event: None
for path, end in zip(sys.argv[1::2], sys.argv[2::2]):
    if end == "exit":
        GroupListener.onQueryTerminated = lambda self, event: None
    spark = tidelog.spark.session(
        "local[1]",
        spark_ui_enabled="false",
        spark_driver_host="127.0.0.1",
        spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        spark_sql_codegen_wholeStage="false",
    )
    options = {"path": path, "subscribe": "orders", "group": "etl", "startingOffsets": "earliest"}
    writer = spark.readStream.format("tidelog").options(**options).load().writeStream.format("noop")
    query = writer.option("checkpointLocation", path + "-checkpoint").trigger(processingTime="1 hour").start()
    while not query.recentProgress:
        assert query.isActive, query.exception()
        Event().wait(0.05)
    query.stop()
    if end == "stop":
        spark.stop()
        with tidelog.open(path, read_only=True) as log:
            print(log.topic("orders", create=False).group("etl").position)
if end == "stop":
    os._exit(0)
"""


@pytest.mark.parametrize(
    "ends",
    [["exit"], *(pytest.param(each, marks=pytest.mark.sweep) for each in (["stop"], ["stop", "exit"]))],
    ids="-then-".join,
)
def test_a_program_that_ends_at_once_leaves_no_lag(tmp_path: Path, ends: list[str]) -> None:
    """`spark.stop()` delivers the events that wait. Without it the exit of Python does what they would have done:
    that is in `make test`. `make crash` has the first too, and both in one program, whose sessions share its Java."""
    paths = [str(tmp_path / end) for end in ends]
    for path in paths:
        with tidelog.open(path, threads=False) as log:
            log.topic("orders").append([b"x"] * RECORDS)
    command = [sys.executable, "-c", PROGRAM, *(word for pair in zip(paths, ends, strict=True) for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(RECORDS)] * ends.count("stop"), "when spark.stop() has returned"
    for path in paths:
        with tidelog.open(path, threads=False) as log:
            assert log.topic("orders").group("etl").position == RECORDS
