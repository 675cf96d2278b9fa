"""The jobs in a real Spark session: what reaches executors and comes back. What they decide is proven without a JVM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.kit.sampling import one_in
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness
from tests.unit.pipelines.test_reconcile import missing, plant
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog import pipelines
from tidelog.errors import BadInput, Error
from tidelog.pipelines import Sizes
from tidelog.pipelines.table_formats.interface import Format

pytestmark = pytest.mark.slow
SMALL = Sizes(file_bytes=20_000, age_ms=1_000, commit_bytes=80_000)


@pytest.mark.parametrize("format", one_in(2, FORMATS))
def test_export_reconcile_and_repair(spark: SparkSession, tmp_path: Path, format: Format) -> None:
    bench = PipelineHarness(tmp_path, format)
    bench.fill(3000)
    seen: list[tuple[int, int]] = []
    done = pipelines.export(
        bench.data, "orders", bench.table, format=format, sizes=SMALL, spark=spark, progress=lambda *at: seen.append(at)
    )
    assert done.rows == 3000
    assert done.files > 2
    assert seen[-1] == (3000, 3000)
    bench.check()
    if format == "parquet":
        df = spark.read.parquet(bench.table)
        assert df.agg(F.count("*"), F.sum("seq"), F.max("meta.at")).first() == (3000, 3000 * 3001 // 2, "980")
    assert pipelines.reconcile(bench.data, "orders", bench.table, spark=spark).equal
    seq = plant(bench.files()[1], missing)
    found = pipelines.reconcile(bench.data, "orders", bench.table, spark=spark, repair=True)
    assert found.difference is not None
    assert (found.difference.seq, found.repaired) == (seq, 1)
    bench.check()


def test_a_server_typed_columns_and_quarantine(spark: SparkSession, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    with run_server(str(tmp_path / "data")) as (engine, address):
        engine.topic("orders").append([{"sku": "A", "price": number / 2} for number in range(100)])
        engine.checkpoint()
        engine.topic("orders").append([b"nothing of the kind"])
        with pytest.raises(BadInput, match="does not read"):
            pipelines.export(address, "orders", table, schema="sku strin", spark=spark)
        done = pipelines.export(
            address, "orders", table, schema="sku string, price double", bad="quarantine", spark=spark
        )
        assert (done.rows, done.quarantined) == (100, 1)
        assert pipelines.reconcile(address, "orders", table, spark=spark).equal
    assert spark.read.parquet(table).agg(F.sum("price")).first() == (99 * 100 / 4,)
    assert spark.read.parquet(f"{table}/_quarantine").select("data").first() == (bytearray(b"nothing of the kind"),)


def test_an_error_of_a_task_is_one_of_ours(spark: SparkSession, tmp_path: Path) -> None:
    bench = PipelineHarness(tmp_path)
    bench.fill(10)
    with pytest.raises(BadInput, match=r"orders: in seq 1 field 'n' is 0, the schema says string; nothing was written"):
        pipelines.export(bench.data, "orders", bench.table, schema="n string", bad="fail", spark=spark)
    assert not bench.files()


def test_scrub(spark: SparkSession, tmp_path: Path) -> None:
    bench = PipelineHarness(tmp_path)
    bench.fill(500)
    assert pipelines.scrub(bench.data, spark=spark).damage == ()
    path = sorted(Path(bench.data).glob("topics/*/*.data"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert pipelines.scrub(bench.data, spark=spark).damage


def doubled_prices(df: DataFrame) -> DataFrame:
    return df.select("seq", (F.get_json_object(F.col("data").cast("string"), "$.n").cast("long") * 2).alias("n"))


def test_backfill_files_into_a_topic_and_a_topic_into_a_table(spark: SparkSession, tmp_path: Path) -> None:
    files, data, work = str(tmp_path / "old.parquet"), str(tmp_path / "data"), str(tmp_path / "work")
    spark.range(0, 12_000, 1, 3).select(F.col("id").alias("n"), F.lit("old").alias("tag")).write.parquet(files)
    for _ in range(2):  # the second run has nothing left to do
        done = pipelines.backfill(files, data, "orders", job="old", work_dir=work, spark=spark)
        assert (done.rows, done.first, done.last, done.join_seq) == (12_000, 1, 12_000, None)
    with tidelog.open(data) as engine:
        topic = engine.topic("orders", create=False)
        found: list[Any] = [record.data["n"] for at in (0, 10_000) for record in topic.read(at, 10_000).records]
        assert sorted(found) == list(range(12_000)), "each of them once, as JSON"
        assert topic.read(0, 1).records[0].tag == "old"
        topic.append([{"n": 1}])
    table = str(tmp_path / "table")
    args: dict[str, Any] = {"from_topic": "orders", "function": doubled_prices, "spark": spark}
    done = pipelines.backfill(data, table, until=12_000, **args)
    assert (done.rows, done.join_seq) == (12_000, 12_000)
    assert pipelines.backfill(data, table, **args).rows == 1, "from where the first one ended"
    assert spark.read.parquet(table).agg(F.count("*"), F.sum("n")).first() == (12_001, 11_999 * 12_000 + 2)
    assert pipelines.reconcile(data, "orders", table, spark=spark).equal
    with pytest.raises(BadInput, match=r"went through \S*doubled_prices, not through"):
        pipelines.backfill(data, table, **{**args, "function": lambda df: df})
    copied = pipelines.backfill(
        data, data, "copy", from_topic="orders", job="copy", work_dir=f"{work}2", first=11_990, spark=spark
    )
    assert (copied.rows, copied.join_seq) == (12, 12_001)


def kept(df: DataFrame) -> DataFrame:
    return df.where("seq > 100").withColumn("tag", F.lit("kept"))


def dropped(df: DataFrame) -> DataFrame:
    return df.select("data")


def spoilt(df: DataFrame) -> DataFrame:
    return df.withColumn("data", F.lit("{"))


def test_json_and_bytes_stay_what_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """One topic of both, copied by a DataFrame and by backfills, is read by the engine as what it was copied from."""
    data, into = str(tmp_path / "data"), str(tmp_path / "into")
    with tidelog.open(data, threads=False, segment_events_max=200) as engine:
        topic = engine.topic("orders")
        for first in range(0, 600, 20):
            topic.append([b'{"n":%d}' % n if n % 3 else {"n": n} for n in range(first, first + 20)])
            if first == 480:
                engine.checkpoint()
        topic.delete(seqs=[4, 5, 301, 599])
        given = [record.data for record in topic.read(0, 1000).records]
        late = [record.data for record in topic.read(100, 1000).records]
    assert {type(each) for each in given} == {bytes, dict}

    def backfill(topic: str, **more: Any) -> pipelines.Backfilled:
        work = str(tmp_path / topic)
        return pipelines.backfill(data, into, topic, from_topic="orders", job=topic, work_dir=work, spark=spark, **more)

    def found(topic: str) -> list[Any]:
        with tidelog.open(into, read_only=True) as engine:
            return [record.data for record in engine.topic(topic, create=False).read(0, 1000).records]

    df = spark.read.format("tidelog").options(path=data, subscribe="orders", columns="seq,data,is_json").load()
    assert df.schema["is_json"].dataType.simpleString() == "boolean"
    df.write.format("tidelog").options(path=into, topic="by-frame").mode("append").save()
    assert found("by-frame") == given
    assert backfill("by-job").rows == len(given)
    assert found("by-job") == given
    backfill("kept", function=kept)
    assert found("kept") == late
    backfill("dropped", function=dropped)
    assert {type(each) for each in found("dropped")} == {bytes}, "who drops the column says nothing"
    with pytest.raises(BadInput, match=r"a row says is_json and its data is b'\{' .*nothing was written"):
        backfill("spoilt", function=spoilt)
    assert found("spoilt") == []
    with pytest.raises(BadInput, match="is_json as int, it must be boolean"):
        backfill("numbers", function=lambda df: df.withColumn("is_json", F.lit(1)))


def test_backfill_other_files(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": 1, "at": {"x": 2}}\n{"n": 2, "at": null}\n')
    (tmp_path / "a.csv").write_text("n,name\n3,c\n4,d\n")
    bench = PipelineHarness(tmp_path, "delta")
    bench.fill(20)
    pipelines.export(bench.data, "orders", bench.table, format="delta", spark=spark)
    data = str(tmp_path / "into")
    for job, source in (("j", "a.json"), ("c", "a.csv"), ("d", "table")):
        pipelines.backfill(str(tmp_path / source), data, "all", job=job, work_dir=str(tmp_path / job), spark=spark)
    with tidelog.open(data, read_only=True) as engine:
        found = [record.data for record in engine.topic("all", create=False).read(0, 100).records]
    assert found[:4] == [{"n": 1, "at": {"x": 2}}, {"n": 2, "at": None}, {"n": 3, "name": "c"}, {"n": 4, "name": "d"}]
    assert [row[1] for row in bench.log_rows()] == found[4:]


def test_stats_of_a_topic_and_of_a_queue(spark: SparkSession, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with tidelog.open(data) as engine:
        engine.topic("orders").append([b"x" * size for size in range(100)])
        jobs = engine.queue("jobs")
        jobs.put([{"n": number} for number in range(10)])
        jobs.ack("me", jobs.claim("me", 10))
    found = pipelines.stats(data, "orders", every_ms=3_600_000, spark=spark)
    assert sum(row["records"] for row in found.rates) == 100
    assert sum(row["bytes"] for row in found.rates) == 4950
    assert max(row["size_max"] for row in found.rates) == 99
    assert found.waits == []
    waits = pipelines.stats(data, "jobs", every_ms=3_600_000, spark=spark).waits
    assert [sum(row[name] for row in waits) for name in ("claims", "acks", "nacks")] == [10, 10, 0]
    with run_server(data) as (_, address):
        assert pipelines.stats(address, "jobs", every_ms=3_600_000, spark=spark).waits == waits


@pytest.mark.sweep
def test_killed_spark_driver_leaves_no_files(tmp_path: Path) -> None:
    """Method: a command line with a session of its own is killed while executors write, and run again."""
    bench = PipelineHarness(tmp_path)
    bench.fill(2000)
    killed = (
        "import os, signal; from tidelog import pipelines\n"
        "def step(name):\n"
        "    if name == 'rename a file': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"pipelines.export({bench.data!r}, 'orders', {bench.table!r}, format='parquet', master='local[1]', step=step,\n"
        "                 sizes=pipelines.Sizes(20_000, 1_000, 80_000))\n"
    )
    done = subprocess.run([sys.executable, "-c", killed], capture_output=True, text=True, timeout=200)
    assert done.returncode == -9, done.stderr
    assert not bench.files(), "a commit, and none of its files where they belong"
    command = [sys.executable, "-m", "tidelog.cli.main", "pipeline", "export", bench.data, "orders", bench.table]
    done = subprocess.run(
        [*command, "--once", "--json", "--master", "local[1]"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stop"] == 2001
    bench.check()
    assert pq.read_table(bench.table).num_rows == 2000


def test_a_session_that_is_given_stays_open(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Error):
        pipelines.stats(str(tmp_path), "orders", spark=spark)
    assert spark.range(3).count() == 3
