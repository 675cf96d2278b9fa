"""The source in a real Spark session, one test a mode. What it reads in detail is proven without a JVM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.unit.spark.helpers import run_server, source_env

import tidelog
import tidelog.spark
from tidelog.commitlog import SegmentedLog
from tidelog.database import Database
from tidelog.spark.spark_session import FILTER_PUSHDOWN_CONF

pytestmark = pytest.mark.slow
EVENTS = 20_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Database]:
    with tidelog.open(str(tmp_path / "data"), threads=False, segment_events_max=2000) as made:
        yield made


def fill(engine: Database, count: int = EVENTS, topic: str = "orders") -> None:
    """Records in segments, the last tenth in the WAL."""
    made = engine.topic(topic)
    step = count // 10
    for part in range(10):
        if part == 9:
            engine.checkpoint()
        rows = [{"n": number, "half": number / 2} for number in range(part * step, (part + 1) * step)]
        made.append(rows, tag=f"part-{part}", meta={"part": part})


def load(spark: SparkSession, **options: Any) -> DataFrame:
    return spark.read.format("tidelog").options(**options).load()


def test_a_strong_query_is_planned_up_to_what_was_synced(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    """A reader of its own process syncs the files of the writer before it plans; a class that promises nothing is
    refused."""
    topic = engine.topic("orders", durability="disk")
    topic.append([{"n": number} for number in range(10)])
    df = load(spark, path=str(tmp_path / "data"), subscribe="orders", consistency="strong")
    assert sorted(row.seq for row in df.collect()) == list(range(1, 11))
    topic.append({"n": 10})
    assert load(spark, path=str(tmp_path / "data"), subscribe="orders", consistency="strong").count() == 11
    engine.topic("plain", durability="memory").append({"n": 1})
    engine.checkpoint()
    with pytest.raises(PySparkException, match="strong readers cannot be served"):
        load(spark, path=str(tmp_path / "data"), subscribe="plain", consistency="strong").count()


def test_a_directory_without_a_server(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    fill(engine)
    engine.topic("orders").delete(seqs=[1, 5, EVENTS])
    df = load(spark, path=str(tmp_path / "data"), subscribe="orders", minPartitions=4)
    assert df.schema.simpleString() == (
        "struct<topic:string,seq:bigint,ts:timestamp,node:string,tag:string,meta:map<string,string>,data:binary>"
    )
    assert df.rdd.getNumPartitions() == 4
    row = df.agg(F.count("*"), F.sum("seq"), F.countDistinct("tag"), F.max(F.col("meta")["part"])).first()
    total = EVENTS * (EVENTS + 1) // 2
    assert row is not None
    assert tuple(row) == (EVENTS - 3, total - 1 - 5 - EVENTS, 10, "9")


def test_filters_reach_the_source(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    fill(engine)
    df = load(spark, path=str(tmp_path / "data"), subscribe="orders").where(
        "seq between 101 and 200 and tag = 'part-0' and ts > timestamp'2020-01-01 00:00:00' and topic = 'orders'"
    )
    plan = df._jdf.queryExecution().executedPlan().toString()
    assert "Filter" not in plan.split("BatchScan")[0], plan
    assert df.count() == 100


def test_typed_columns_from_json(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    fill(engine, 1000)
    engine.topic("orders").append([{"n": "many", "half": 1.0}])
    path = str(tmp_path / "data")
    given = spark.read.format("tidelog").schema("seq long, n long, half double, _rescued string")
    df = given.options(path=path, subscribe="orders", payload="json").load()
    assert df.agg(F.sum("n"), F.count("_rescued")).first() == (499_500, 1)
    inferred = load(spark, path=path, subscribe="orders", payload="infer", endingOffsets='{"orders": 1001}')
    assert dict(inferred.dtypes) | {"half": "double", "n": "string"} == dict(inferred.dtypes), "n was a text once"
    assert inferred.where("half = 4.5").select("seq").first() == (10,)


def test_a_server_without_a_shared_disk(spark: SparkSession, tmp_path: Path) -> None:
    with source_env("server", tmp_path, keys="s3cret:read") as here:
        fill(here.engine)
        here.engine.topic("orders").delete(seqs=[7, EVENTS - 1])
        df = load(spark, **here.options(key="s3cret", minPartitions=3))
        assert df.agg(F.count("*"), F.sum("seq")).first() == (
            EVENTS - 2,
            EVENTS * (EVENTS + 1) // 2 - 7 - (EVENTS - 1),
        )


@pytest.mark.parametrize("codec", ["rustlog", "laminar", "narwhal"])
def test_logs_of_other_codecs(spark: SparkSession, tmp_path: Path, codec: str) -> None:
    with SegmentedLog.open(str(tmp_path / "events"), codec, segment_bytes_max=1 << 15) as log:
        log.append_many([b"%d" % number for number in range(5000)])
    df = load(spark, path=str(tmp_path / "events"), codec=codec, minPartitions=2)
    row = df.agg(F.count("*"), F.sum(F.col("data").cast("string").cast("long"))).first()
    assert row == (5000, 4999 * 5000 // 2)


def test_errors_say_what_to_do(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    fill(engine, 100)
    path = str(tmp_path / "data")
    with pytest.raises(AnalysisException, match="did you mean subscribe"):
        load(spark, path=path, subscirbe="orders")
    with pytest.raises(PySparkException, match=r"there is no topic 'order'.*did you mean 'orders'"):
        load(spark, path=path, subscribe="order").count()
    engine.topic("orders", cap_records=10)
    with pytest.raises(PySparkException, match=r"seqs 1 to 90 are lost \(cap\)"):
        load(spark, path=path, subscribe="orders", startingOffsets='{"orders": 1}').count()


# ── streams ───────────────────────────────────────────────────────────────────────────────────────


class Pipe:
    """A stream into Parquet files with a checkpoint, run until there is nothing left (AvailableNow)."""

    def __init__(self, spark: SparkSession, place: Path, **options: Any) -> None:
        self._spark, self._options = spark, {"startingOffsets": "earliest", **options}
        self._out, self._checkpoint = place / "out", place / "checkpoint"

    def run(self) -> list[dict[str, Any]]:
        """The progress of every batch that had rows."""
        df = self._spark.readStream.format("tidelog").options(**self._options).load()
        query = (
            df.select("topic", "seq", "data")
            .writeStream.format("parquet")
            .option("path", str(self._out))
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(100), "it did not end"
        finally:
            query.stop()
        return [json.loads(each.json) for each in query.recentProgress if each.numInputRows]

    def seqs(self) -> list[int]:
        """What arrived, by the sink's own ledger."""
        names = {
            json.loads(line)["path"].rpartition("/")[2]
            for log in (self._out / "_spark_metadata").iterdir()
            if not log.name.startswith(".")
            for line in log.read_text().splitlines()[1:]
        }
        found: list[int] = []
        for name in names:
            found += pq.read_table(self._out / name).column("seq").to_pylist()
        return sorted(found)

    def forget_last_commit(self) -> None:
        commits = sorted((self._checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        for path in (commits[-1], commits[-1].with_name(f".{commits[-1].name}.crc")):
            path.unlink(missing_ok=True)


def test_a_stream_goes_on_from_its_checkpoint(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    fill(engine, 1000)
    pipe = Pipe(spark, tmp_path, path=str(tmp_path / "data"), subscribe="orders", maxOffsetsPerTrigger=400)
    progress = pipe.run()
    assert [each["numInputRows"] for each in progress] == [400, 400, 200]
    source = progress[-1]["sources"][0]
    assert source["endOffset"] == {"orders": {"epoch": 1, "seq": 1001}}
    assert pipe.seqs() == list(range(1, 1001))
    context: Any = spark.sparkContext._jsc
    context.sc().listenerBus().waitUntilEmpty()
    (counts,) = [each for each in tidelog.spark.query_counts(spark) if each.run_id == progress[-1]["runId"]]
    assert counts[3:] == (False, 3, 1000, 1000, 0, 0, 0, 0, 0, 0, 0, 0, counts.freshness_ms)
    assert counts.freshness_ms is not None
    engine.topic("orders").append([b"x"] * 50)
    engine.checkpoint()
    pipe.forget_last_commit()  # the batch is planned and read again, and its rows come once
    pipe.run()
    assert pipe.seqs() == list(range(1, 1051))


def test_a_stream_from_a_server_that_restarts(spark: SparkSession, tmp_path: Path) -> None:
    data, pipes = str(tmp_path / "data"), tmp_path
    with run_server(data) as (engine, address):
        fill(engine, 500)
        pipe = Pipe(spark, pipes, server=address, subscribe="orders", retryTimeout="1s")
        pipe.run()
    assert pipe.seqs() == list(range(1, 501))
    with pytest.raises((StreamingQueryException, PySparkException), match="cannot be reached or went away"):
        pipe.run()
    with run_server(data) as (engine, address):
        engine.topic("orders").append([b"x"] * 20)
        again = Pipe(spark, pipes, server=address, subscribe="orders")
        again.run()
    assert again.seqs() == list(range(1, 521))


def test_a_stream_whose_topic_was_made_again(spark: SparkSession, tmp_path: Path, engine: Database) -> None:
    fill(engine, 100)
    path = str(tmp_path / "data")
    Pipe(spark, tmp_path, path=path, subscribe="orders").run()
    engine.drop("orders")
    fill(engine, 50)
    pipe = Pipe(spark, tmp_path, path=path, subscribe="orders", onGap="skip")
    pipe.run()
    assert pipe.seqs() == sorted([*range(1, 101), *range(1, 51)])


# ── beside a writer ───────────────────────────────────────────────────────────────────────────────


class Writer:
    """Writes, deletes, evicts and checkpoints until it is told to stop."""

    def __init__(self, engine: Database) -> None:
        self._engine, self._stop = engine, Event()
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            topic, turn = self._engine.topic("orders"), 0
            while not self._stop.is_set():
                turn += 1
                head = topic.append([b"%d" % turn] * 10).last_seq
                topic.delete(seqs=[head - 5, head - 6])
                if turn % 25 == 0:
                    self._engine.checkpoint()
                self._stop.wait(0.01)  # a pace, so that it is not the disk's queue that is tested
        except BaseException as error:
            self.error = error


def test_queries_beside_a_writer_that_deletes_evicts_and_checkpoints(
    spark: SparkSession, tmp_path: Path, engine: Database
) -> None:
    """G-list of readers: no torn read, no missing file, every seq once, and the law holds in every task."""
    engine.topic("orders", cap_records=20_000)
    fill(engine)
    path = str(tmp_path / "data")
    pipe = Pipe(spark, tmp_path, path=path, subscribe="orders", onGap="skip", maxOffsetsPerTrigger=10_000)
    with Writer(engine) as writer:
        for _ in range(3):
            df = load(spark, path=path, subscribe="orders", onGap="skip", minPartitions=3)
            row = df.agg(F.count("*"), F.countDistinct("seq"), F.min("seq"), F.max("seq")).first()
            assert row is not None
            count, distinct, low, high = row
            assert count == distinct
            assert 0 < count <= high - low + 1, "what is missing was deleted or evicted: tasks have counted it"
        pipe.run()
    assert writer.error is None
    pipe.run()
    found = pipe.seqs()
    assert len(found) == len(set(found)), "nothing twice"
    assert found[-1] == engine.topic("orders").head_seq


def test_a_session_whose_settings_are_fixed_filters_by_itself(
    spark: SparkSession, tmp_path: Path, engine: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the definitions of Declarative Pipelines, where `spark.conf.set` raises."""
    fill(engine, 100)
    spark.conf.unset(FILTER_PUSHDOWN_CONF)

    def refuse(*_: object) -> None:
        raise PySparkException("SESSION_MUTATION_IN_DECLARATIVE_PIPELINE.SET_RUNTIME_CONF")

    try:
        with monkeypatch.context() as patched:
            patched.setattr(type(spark.conf), "set", refuse)
            tidelog.spark.register(spark)
            df = load(spark, path=str(tmp_path / "data"), subscribe="orders")
            assert df.where("seq > 90 and tag = 'part-9'").count() == 10
    finally:
        tidelog.spark.register(spark)
    assert load(spark, path=str(tmp_path / "data"), subscribe="orders").where("seq > 90").count() == 10
