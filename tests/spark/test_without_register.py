"""Spark finds the source by the name of its package, without `register`: in a new session, and over Spark Connect. Its
client has no JVM and no SparkContext."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.spark.java import find_java
from tidelog.spark.spark_session import FILTER_PUSHDOWN_CONF

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def fill(path: Path, rows: int = 300) -> None:
    with tidelog.open(str(path), threads=False, segment_events_max=100) as log:
        log.topic("orders").append([{"n": number} for number in range(rows)])


def test_a_session_finds_the_source_by_itself(spark: SparkSession, tmp_path: Path) -> None:
    """With and without pushdown: Spark refuses a reader that supports filters where its setting is off."""
    fill(tmp_path / "data")
    fresh = spark.newSession()
    assert fresh.conf.get(FILTER_PUSHDOWN_CONF, "false") == "false"
    for setting in ("false", "true"):
        fresh.conf.set(FILTER_PUSHDOWN_CONF, setting)
        df = fresh.read.format("tidelog").options(path=str(tmp_path / "data"), subscribe="orders").load()
        assert df.where("seq > 290").count() == 10
        plan = df.where("seq > 290")._jdf.queryExecution().executedPlan().toString()
        assert ("Filter" in plan.split("BatchScan")[0]) == (setting == "false"), plan


# Every use of a session by this package, on a session of Spark Connect; each entry of the output is what one returned.
CONNECT_PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")  # this client warns of pandas, and of settings that its server does not change

import tidelog
import tidelog.spark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from tidelog import pipelines

root = sys.argv[1]
data, table, typed, users = (f"{root}/{name}" for name in ("data", "table", "typed", "users"))
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "1").getOrCreate()
assert not hasattr(spark, "_jvm"), "this is a client"
said = {}

def read(**options):
    return spark.read.format("tidelog").options(path=data, subscribe="orders", **options).load()

def copy():
    rows = spark.readStream.format("tidelog").options(path=data, subscribe="orders", group="etl",
                                                      startingOffsets="earliest").load()
    query = (rows.select("data").writeStream.format("tidelog").options(path=f"{root}/sink", topic="copy", query="copy")
             .option("checkpointLocation", f"{root}/checkpoint").trigger(availableNow=True).start())
    assert query.awaitTermination(100)

def append(topic, *rows):
    with tidelog.open(data, threads=False) as log:
        log.topic(topic).append(list(rows), tag="late")

said["found by itself"] = read().where("seq > 290").count()
tidelog.spark.register(spark)
said["pushed"] = read(minPartitions=3).where("seq > 290").count()
copy()
said["export"] = pipelines.export(data, "orders", table, spark=spark, sizes=pipelines.Sizes(2000, 60000, 4000)).rows
said["equal"] = pipelines.reconcile(data, "orders", table, spark=spark).equal
said["optimize"] = pipelines.optimize(table, spark=spark).commits > 0
said["read"] = pipelines.read(spark, table).where("seq > 290").count()
append("orders", {"n": "many"}, {"n": 301})
said["live"] = pipelines.read_live(spark, data, "orders", table).count()
again = pipelines.backfill(data, f"{root}/again", "again", from_topic="orders", spark=spark, work_dir=f"{root}/work")
said["backfill"] = again.rows
numbers = lambda rows: rows.select("seq", F.get_json_object(rows.data.cast("string"), "$.n").alias("n"))
said["backfill of a table"] = pipelines.backfill(data, f"{root}/numbers", from_topic="orders", function=numbers,
                                                 spark=spark).rows
pipelines.export(data, "orders", typed, schema="n int", bad="quarantine", format="parquet", spark=spark)
said["dead letters"] = [row.seq for row in pipelines.dead_letters(spark, typed).collect()]
found = pipelines.reprocess(data, "orders", typed, schema="n int, text string", spark=spark)
said["reprocess"] = [found.before, found.left]
append("users", {"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}, {"id": 1, "name": "Ada L."})
with tidelog.open(data, threads=False) as log:
    log.topic("users", compaction="/id")
done = pipelines.export(data, "users", users, mode="latest", latest_key="/id", change_feed=True, spark=spark)
said["latest"] = pipelines.read(spark, users).count()
said["equal by key"] = pipelines.reconcile(data, "users", users, spark=spark).equal
said["changes"] = pipelines.changes(spark, users).count()
said["compact"] = pipelines.compact(data, "users", spark=spark).records
said["topics"] = [each.rows for each in pipelines.export_topics(data, f"{root}/lake", topics=["orders"], spark=spark)]
said["erase"] = [each.rows for each in
                 pipelines.erase(data, "orders", [table, typed], seqs=[5], spark=spark).tables]
said["gaps"] = spark.read.format("tidelog").option("path", data).option("gaps", "*").load().count() > 0
said["history"] = spark.read.format("tidelog").option("path", data).option("history", "jobs").load().count()
said["damage"] = len(pipelines.scrub(data, spark=spark).damage)
said["stats"] = sum(row["records"] for row in pipelines.stats(data, "orders", spark=spark).rates)
with tidelog.open(data, threads=False) as log:
    log.backup(f"{root}/backups")
restored = pipelines.restore(f"{root}/backups", f"{root}/restored", "orders", work_dir=f"{root}/restore", spark=spark)
said["restore"] = restored.backfilled.rows
try:
    read(subscirbe="orders").count()
except Exception as error:
    said["error"] = str(error)
spark.stop()
print("said:" + json.dumps(said))
"""


@pytest.mark.sweep
def test_every_job_runs_over_spark_connect(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        log.queue("jobs").put([1, 2])
    java = find_java()
    assert java is not None
    home = {} if java.home is None else {"JAVA_HOME": java.home}
    settings = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, **home}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT_PROGRAM, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(lines[-1].removeprefix("said:"))
    assert "did you mean subscribe" in said.pop("error")
    assert said == {
        "found by itself": 10,
        "pushed": 10,
        "export": 300,
        "equal": True,
        "optimize": True,
        "read": 10,
        "live": 302,
        "backfill": 302,
        "backfill of a table": 302,
        "dead letters": [301],
        "reprocess": [1, 1],
        "latest": 2,
        "equal by key": True,
        "changes": 2,
        "compact": 1,
        "topics": [302],
        "erase": [1, 1],
        "gaps": True,
        "history": 1,  # the two jobs of one put
        "damage": 0,
        "stats": 301,
        "restore": 301,
    }
    with tidelog.open(str(tmp_path / "data"), read_only=True) as log:
        assert log.topic("orders", create=False).group("etl").position == 300, "AvailableNow moves the group"
    for place, topic, count in (("sink", "copy", 300), ("again", "again", 302)):
        with tidelog.open(str(tmp_path / place), read_only=True) as log:
            assert log.topic(topic, create=False).count == count
