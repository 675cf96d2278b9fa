"""The sink in a real Spark session: every mode, and exactly once whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.contract_http.server import Server
from tests.kit.commands import free_port
from tests.spark import killed_sink, topic_copy
from tests.spark.helpers import costly, open_location, wait_for
from tests.spark.topic_copy import BATCHES, ROWS, TopicCopy, check_copy, fill_topic, run_with_random_kills
from tests.unit.spark.helpers import MODES, Mode

import tidelog
from tidelog.client import Client
from tidelog.errors import Error

pytestmark = pytest.mark.slow


@pytest.fixture
def killed_source_session(spark: SparkSession) -> SparkSession:
    topic_copy.register(spark)
    return spark


def frame(spark: SparkSession, rows: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, rows, 1, partitions).select(
        F.col("id").cast("string").cast("binary").alias("data"),
        F.concat(F.lit("part-"), (F.col("id") % 3).cast("string")).alias("tag"),
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_batch(spark: SparkSession, tmp_path: Path, mode: Mode) -> None:
    with open_location(mode, tmp_path) as here:
        frame(spark, 5000).write.format("tidelog").options(**here.options, topic="copy").mode("append").save()
        struct = spark.range(3).select(F.struct(F.col("id").alias("n")).alias("data"))
        struct.write.format("tidelog").options(**here.options, topic="json").mode("append").save()
        with here.open_engine() as log:
            table = log.topic("copy").to_arrow()
            assert sorted(map(int, table.column("data").to_pylist())) == list(range(5000))
            assert set(table.column("tag").to_pylist()) == {"part-0", "part-1", "part-2"}
            assert [record.data for record in log.topic("json").read(0).records] == [{"n": 0}, {"n": 1}, {"n": 2}]


@costly("server")
def test_a_stream_with_every_column_of_the_source(spark: SparkSession, tmp_path: Path, mode: Mode) -> None:
    fill_topic(tmp_path / "source")
    source = spark.readStream.format("tidelog").options(
        path=str(tmp_path / "source"), subscribe="source", startingOffsets="earliest", maxOffsetsPerTrigger="125"
    )
    with open_location(mode, tmp_path) as here:
        for _ in range(2):  # the second start finds nothing to do
            query = (
                source.load()
                .writeStream.format("tidelog")
                .options(**here.options, topic="copy", checkpointLocation=str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(120)
        with here.open_engine() as log:
            records = log.topic("copy").read(0, 10_000, bytes_max=1 << 24).records
            assert [record.data for record in records] == [b"row %d" % number for number in range(ROWS)]
            assert records[0].tag == "at-0"
            assert records[0].meta is not None
            assert set(records[0].meta) == {"ts"}


def test_in_foreach_batch_the_number_is_named(spark: SparkSession, tmp_path: Path) -> None:
    fill_topic(tmp_path / "source")

    def each(df: DataFrame, number: int) -> None:
        for _ in range(2):
            writing = df.select("data").write.format("tidelog").option("path", str(tmp_path / "sink"))
            writing.options(topic="copy", query="each", batch=str(number)).mode("append").save()

    options = {"path": str(tmp_path / "source"), "subscribe": "source", "startingOffsets": "earliest"}
    reading = spark.readStream.format("tidelog").options(**options, maxOffsetsPerTrigger="150").load()
    writing = reading.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writing.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    with tidelog.open(str(tmp_path / "sink")) as log:
        assert log.topic("copy").head_seq == ROWS
        assert {each.query_id for each in log.topic("copy").producer_batches("each").values()} == {query.id}


def test_what_is_refused_fails_before_a_row_is_written(spark: SparkSession, tmp_path: Path) -> None:
    def refused(words: str, df: DataFrame, mode: str = "append", **options: Any) -> None:
        with pytest.raises((AnalysisException, PySparkException), match=words):
            df.write.format("tidelog").options(**{"topic": "copy", **options}).mode(mode).save()

    path = str(tmp_path / "sink")
    refused("both are given", frame(spark, 1), path=path, server="http://127.0.0.1:1")
    refused("has a column 'id', which no record has", frame(spark, 1).withColumn("id", F.lit(1)), path=path)
    refused("only appended to", frame(spark, 1), "overwrite", path=path)
    refused("cannot be reached", frame(spark, 1), server="http://127.0.0.1:1")
    refused("data has nulls", frame(spark, 10).withColumn("data", F.lit(None).cast("binary")), path=path)
    with tidelog.open(path) as log:
        assert log.names() == []
        assert [each.name for each in (tmp_path / "sink" / "staging").iterdir()] == []


# ── exactly once ──────────────────────────────────────────────────────────────────────────────────


KILLED_ELSEWHERE = ("publish", "published")  # steps that other tests here kill at


@pytest.mark.parametrize(
    ("mode", "left_out"),
    [("path", KILLED_ELSEWHERE), *(pytest.param(mode, (), marks=pytest.mark.sweep) for mode in MODES)],
)
def test_killed_at_every_step_the_copy_is_the_source(
    killed_source_session: SparkSession, tmp_path: Path, mode: Mode, left_out: tuple[str, ...]
) -> None:
    """Twelve kills: seven by path and five by server, the newest of Spark's own commits deleted now and then."""
    fill_topic(tmp_path / "source")
    with open_location(mode, tmp_path) as here:
        every = killed_sink.DIRECTORY_STEPS if mode == "path" else killed_sink.SERVER_STEPS
        steps, random = [step for step in every if step not in left_out], Random(mode)
        random.shuffle(steps)
        topic_copy.run_with_kills_at(TopicCopy(killed_source_session, tmp_path, here.options), random, steps)
        with here.open_engine() as log:
            check_copy(log)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(10))
def test_two_hundred_kills(killed_source_session: SparkSession, tmp_path: Path, mode: Mode, seed: int) -> None:
    fill_topic(tmp_path / "source")
    with open_location(mode, tmp_path) as here:
        copy = TopicCopy(killed_source_session, tmp_path, here.options)
        steps = killed_sink.DIRECTORY_STEPS if mode == "path" else killed_sink.SERVER_STEPS
        assert run_with_random_kills(copy, Random(seed), steps, 10) == 10
        with here.open_engine() as log:
            check_copy(log)


@costly("server")
def test_replay_of_a_batch_whose_source_changed_keeps_what_is_there(
    killed_source_session: SparkSession, tmp_path: Path, mode: Mode
) -> None:
    """A record of the newest batch is deleted at the source before Spark repeats it."""
    fill_topic(tmp_path / "source")
    with open_location(mode, tmp_path) as here:
        copy = TopicCopy(killed_source_session, tmp_path, here.options)
        killed_sink.schedule_kill(copy.doom, "published", BATCHES - 1)
        assert copy.run() is not None
        assert not copy.doom.exists()
        with tidelog.open(str(tmp_path / "source"), threads=False) as log:
            assert log.topic("source").delete(seqs=[ROWS]).deleted == 1
        assert copy.run() is None, "the batch that was written is kept, and the query goes on"
        with here.open_engine() as log:
            check_copy(log)
        copy.forget_commit()
        with tidelog.open(str(tmp_path / "source"), threads=False) as log:
            log.topic("source").delete(before_seq=ROWS)
        fill_topic(tmp_path / "source", 50, first=ROWS)
        assert copy.run() is None, "all records of it are gone, and there are new ones"
        with here.open_engine() as log:
            assert log.topic("copy").head_seq >= ROWS + 50
            assert log.topic("copy").count == ROWS + 50


@costly("path")
def test_a_deleted_checkpoint_is_loud_and_every_way_out_helps(
    killed_source_session: SparkSession, tmp_path: Path, mode: Mode
) -> None:
    fill_topic(tmp_path / "source")
    kept = tmp_path / "kept"
    with open_location(mode, tmp_path) as here:
        copy = TopicCopy(killed_source_session, tmp_path, here.options)
        assert copy.run() is None
        copy.checkpoint.rename(kept)
        for _ in range(2):
            said = copy.run()
            assert said is not None
            for words in ("BatchConflict", "restore the checkpoint", "another name", "drop the topic"):
                assert words in said, said
            with here.open_engine() as log:
                check_copy(log)

        shutil.rmtree(copy.checkpoint)  # 1. the checkpoint is brought back
        shutil.copytree(kept, copy.checkpoint)
        fill_topic(tmp_path / "source", 100, first=ROWS)
        assert copy.run() is None
        with here.open_engine() as log:
            check_copy(log, ROWS + 100)

        shutil.rmtree(copy.checkpoint)  # 2. another name: what it reads is added
        copy.name = "other"
        assert copy.run() is None
        with here.open_engine() as log:
            assert log.topic("copy").count == 2 * (ROWS + 100)

        shutil.rmtree(copy.checkpoint)  # 3. the topic is dropped and written anew
        copy.name = "copy"
        assert copy.run() is not None
        with here.open_engine() as log:
            log.drop("copy")
        assert copy.run() is None
        with here.open_engine() as log:
            check_copy(log, ROWS + 100)


def test_an_older_checkpoint_that_was_put_back_is_loud_where_it_brings_other_batches(
    killed_source_session: SparkSession, tmp_path: Path
) -> None:
    """The id is the same, but the batches were planned anew: to keep what is there would lose records."""
    fill_topic(tmp_path / "source", 100)
    with open_location("path", tmp_path) as here:
        copy = TopicCopy(killed_source_session, tmp_path, here.options)
        assert copy.run() is None
        shutil.copytree(copy.checkpoint, tmp_path / "kept")
        fill_topic(tmp_path / "source", 200, first=100)
        assert copy.run() is None
        shutil.rmtree(copy.checkpoint)
        shutil.copytree(tmp_path / "kept", copy.checkpoint)
        copy.source["maxOffsetsPerTrigger"] = "150"
        said = copy.run()
        assert said is not None
        assert "was written before, at seqs 101 to 200, with other records" in said
        with here.open_engine() as log:
            check_copy(log)


def test_a_query_without_a_name_goes_by_its_query_id(spark: SparkSession, tmp_path: Path) -> None:
    """Two jobs with the same relative checkpointLocation, from two directories, were one writer."""
    fill_topic(tmp_path / "source", 100)
    source = {"path": str(tmp_path / "source"), "subscribe": "source", "startingOffsets": "earliest"}
    rows = spark.readStream.format("tidelog").options(**source, columns="data").load()
    base = Path(spark.sparkContext._jvm.java.lang.System.getProperty("user.dir"))  # type: ignore[union-attr]
    jobs = [os.path.relpath(tmp_path / name, base) for name in ("one", "two")]
    for job in (*jobs, jobs[0]):
        query = rows.writeStream.format("tidelog").options(path=str(tmp_path / "sink"), topic="copy")
        query = query.option("checkpointLocation", job).trigger(availableNow=True)
        assert query.start().awaitTermination(120)
        shutil.rmtree(tmp_path / Path(job).name / "commits")  # the next start repeats its batch
    with tidelog.open(str(tmp_path / "sink")) as log:
        assert log.topic("copy").count == 200, "each job once, however often it is repeated"


def test_full_topic_stops_the_query_until_there_is_space(killed_source_session: SparkSession, tmp_path: Path) -> None:
    fill_topic(tmp_path / "source")
    with open_location("path", tmp_path) as here:
        with here.open_engine() as log:
            log.topic("copy", cap_records=150, discard="reject")
        copy = TopicCopy(killed_source_session, tmp_path, here.options)
        said = copy.run()
        assert said is not None
        assert "copy is full" in said
        with here.open_engine() as log:
            assert log.topic("copy").head_seq == 100
            log.topic("copy", cap_records=0)
        assert copy.run() is None
        with here.open_engine() as log:
            check_copy(log)


@costly("path")
def test_a_query_moves_its_group_to_its_end_and_another_starts_there(
    spark: SparkSession, tmp_path: Path, mode: Mode
) -> None:
    """Two queries of one session under AvailableNow, each with a group: neither has any lag when it has ended."""
    with open_location(mode, tmp_path) as here:
        with here.open_engine() as log:
            for topic in ("orders", "visits"):
                log.topic(topic).append([b"x"] * 40)
        queries = []
        for topic in ("orders", "visits"):
            reading = spark.readStream.format("tidelog").options(**here.options, subscribe=topic, group="etl")
            rows = reading.option("startingOffsets", "group:etl").option("maxOffsetsPerTrigger", "15").load()
            query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / f"checkpoint-{topic}"))
            queries.append(query.trigger(availableNow=True).start())
            wait_for(lambda: bool(queries[-1].recentProgress) or not queries[-1].isActive)
        assert all(query.awaitTermination(120) for query in queries)
        with here.open_engine() as log:
            for topic in ("orders", "visits"):
                assert log.topic(topic).group("etl").lag().records == 0, topic
            log.topic("orders").append([b"y"] * 5)
        batch = spark.read.format("tidelog").options(**here.options, subscribe="orders", startingOffsets="group:etl")
        assert batch.load().count() == 5


@costly("server")
def test_a_group_over_failed_last_batches_and_an_older_checkpoint(
    spark: SparkSession, tmp_path: Path, mode: Mode
) -> None:
    """The last batch of AvailableNow fails, the query is restarted, and then again from a checkpoint that is older than
    the group: it goes neither back nor past what was written."""
    with open_location(mode, tmp_path) as here:

        def run(failing: int | None) -> int:
            def write(frame: DataFrame, number: int) -> None:
                frame.count()
                if number == failing:
                    raise ValueError("the sink fails")

            reading = spark.readStream.format("tidelog").options(**here.options, subscribe="orders", group="etl")
            rows = reading.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "6").load()
            query = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
            started = query.trigger(availableNow=True).start()
            if failing is None:
                assert started.awaitTermination(120)
            else:
                with pytest.raises(PySparkException, match="the sink fails"):
                    started.awaitTermination(120)
            with here.open_engine() as log:
                found = log.topic("orders").group("etl")
                return found.position if found.exists else 0

        with here.open_engine() as log:
            log.topic("orders").append([b"x"] * 10)
        assert run(failing=1) == 6, "one batch"
        shutil.copytree(tmp_path / "checkpoint", tmp_path / "older")
        assert run(failing=None) == 10
        with here.open_engine() as log:
            log.topic("orders").append([b"y"] * 5)
        shutil.rmtree(tmp_path / "checkpoint")
        shutil.move(tmp_path / "older", tmp_path / "checkpoint")
        assert run(failing=2) == 10, "the checkpoint is older than the group: seqs 7 to 10 again, 11 to 15 fail"
        assert run(failing=None) == 15


def test_a_group_is_never_ahead_of_the_sink(killed_source_session: SparkSession, tmp_path: Path) -> None:
    """The driver's worker dies before the third batch is published: the group has passed two of them and no more."""
    fill_topic(tmp_path / "source")
    with open_location("path", tmp_path) as here:
        copy = TopicCopy(killed_source_session, tmp_path, here.options, group="etl")
        killed_sink.schedule_kill(copy.doom, "publish", 2)
        assert copy.run() is not None
        with here.open_engine() as log:
            assert log.topic("copy").count == 200
        with tidelog.open(str(tmp_path / "source"), threads=False) as log:
            assert log.topic("source").group("etl").position <= 200
        assert copy.run() is None
        with tidelog.open(str(tmp_path / "source"), threads=False) as log:
            assert log.topic("source").group("etl").position == ROWS
        with here.open_engine() as log:
            check_copy(log)


def test_a_query_outlives_restarts_of_its_server(spark: SparkSession, tmp_path: Path) -> None:
    """From a server into the same server, which is killed and started again three times while the query runs."""
    rows, size = 1200, 60
    port = free_port()
    folder = tmp_path / "server"
    args = ("--data", str(folder / "data"), "--port", str(port), "--port-file", str(folder / "port.txt"))
    with Server(folder, *args) as server:
        server.start()
        address = f"http://127.0.0.1:{port}"
        with Client(address) as client:
            for first in range(0, rows, 100):
                records = [{"data": f"row {number}"} for number in range(first, first + 100)]
                client.post("/v0/topics/source", {"records": records})
        source = {"server": address, "subscribe": "source", "startingOffsets": "earliest", "group": "etl"}
        reading = spark.readStream.format("tidelog").options(**source, maxOffsetsPerTrigger=str(size), columns="data")
        writing = reading.load().writeStream.format("tidelog").options(server=address, topic="copy", query="copy")
        query = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        try:
            for reached in (120, 480, 840):
                wait_for(lambda: not query.isActive or head(address, "copy") >= reached)  # noqa: B023
                server.kill()
                server.start()
            assert query.awaitTermination(300), "the query hangs"
        finally:
            query.stop()
        server.stop()
    with tidelog.open(str(folder / "data"), threads=False) as log:
        found = [json.loads(data) for data in log.topic("copy").to_arrow().column("data").to_pylist()]
        assert sorted(found) == sorted(f"row {number}" for number in range(rows)), "each once"
        assert len(log.topic("copy").producer_batches("copy")) == rows // size
        assert log.topic("source").group("etl").lag().records == 0


def head(address: str, topic: str) -> int:
    try:
        with Client(address) as client:
            return int(client.get(f"/v0/topics/{topic}?touch=false")["head_seq"])
    except Error:
        return 0
