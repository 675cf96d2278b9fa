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


# Every use of a session by this package, on a session of Spark Connect; each line of output is what one returned.
CONNECT_PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")  # this client warns of pandas, and of settings that its server does not change

import tidelog.spark
from pyspark.sql import SparkSession
from tidelog import pipelines

root = sys.argv[1]
data = f"{root}/data"
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

said["found by itself"] = read().where("seq > 290").count()
tidelog.spark.register(spark)
said["pushed"] = read(minPartitions=3).where("seq > 290").count()
copy()
table = f"{root}/table"
said["export"] = pipelines.export(data, "orders", table, spark=spark).rows
said["equal"] = pipelines.reconcile(data, "orders", table, spark=spark).equal
again = pipelines.backfill(data, f"{root}/again", "again", from_topic="orders", spark=spark, work_dir=f"{root}/work")
said["backfill"] = again.rows
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
        "backfill": 300,
    }
    with tidelog.open(str(tmp_path / "data"), read_only=True) as log:
        assert log.topic("orders", create=False).group("etl").lag().records == 0, "AvailableNow moves the group"
    for place, topic in (("sink", "copy"), ("again", "again")):
        with tidelog.open(str(tmp_path / place), read_only=True) as log:
            assert log.topic(topic, create=False).count == 300
