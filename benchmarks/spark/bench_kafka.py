"""A scan of one topic: ours beside `spark-sql-kafka-0-10`, the same records in one partition of a broker here.

Sketch. Kafka's source runs in the JVM and gives rows at the pace of one consumer a task; ours is a Python worker that
hands over Arrow. Kafka rows have seven columns, of which none can be left out; ours have seven, or with `columns=data`
one. Both are cut into as many tasks as there are cores (`minPartitions`), both write into Spark's `noop`, and the page
cache is warm for both. The broker's records are those of the topic, written by Spark's Kafka sink.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.common import GB, NotEnoughSpace, Result, alternate, result, scratch_dir, time_call
from benchmarks.spark.bench_session import TASKS, session
from benchmarks.spark.kafka_broker import CONNECTOR, NoBroker, fetch_jars, open_broker
from benchmarks.spark.sample_records import events
from pyspark.sql import DataFrame, SparkSession

import tidelog

_BATCH = 1000


def run(quick: bool) -> list[Result]:
    size = GB // 10 if quick else GB // 2
    with scratch_dir(6 * size) as place:
        try:
            jars = ",".join(map(str, fetch_jars("connector", CONNECTOR)))
            with open_broker(place / "broker") as broker, session({"spark.jars": jars}) as spark:
                rows = _measure(spark, place, broker, 100, size // 100 // _BATCH, 1 if quick else 3)
                return rows + _measure(spark, place, broker, 1024, size // 1024 // _BATCH, 1 if quick else 3)
        except NoBroker as reason:
            raise NotEnoughSpace(f"needs a Kafka broker, and {reason}") from None


def _measure(spark: SparkSession, place: Path, broker: str, size: int, batches: int, rounds: int) -> list[Result]:
    path, name, total = str(place / f"topic-{size}"), f"bench-{size}", batches * _BATCH
    with tidelog.open(path) as engine:
        topic = engine.topic("bench", durability="memory")
        for number in range(batches):
            topic.append(events(size, number, _BATCH), tag=f"tag-{number % 100}")
        topic.seal()
        engine.checkpoint()

    def ours(**more: str) -> DataFrame:
        options = {"path": path, "subscribe": "bench", "minPartitions": str(TASKS), **more}
        return spark.read.format("tidelog").options(**options).load()

    kafka = {"kafka.bootstrap.servers": broker, "subscribe": name, "minPartitions": str(TASKS)}
    filled = ours(columns="tag,data").selectExpr("tag AS key", "data AS value").coalesce(1)
    filled.write.format("kafka").option("kafka.bootstrap.servers", broker).option("topic", name).save()

    def theirs() -> DataFrame:
        return spark.read.format("kafka").options(**kafka).load()

    assert theirs().count() == total, "the broker has the same records"
    figures = alternate(
        f"kafka {size} B",
        rounds,
        {
            "ours": _rate(total, ours),
            "ours, data": _rate(total, lambda: ours(columns="data")),
            "kafka": _rate(total, theirs),
        },
    )
    return [
        result(
            f"scan {size} B, {what} ÷ Kafka's source",
            figures[key],
            "/s",
            limit=figures["kafka"],
            limit_name="spark-sql-kafka-0-10",
            min_ratio=least,
        )
        for what, key, least in (("all columns", "ours", 2.0), ("columns=data", "ours, data", 3.0))
    ]


def _rate(total: int, load: Callable[[], DataFrame]) -> Callable[[], float]:
    return lambda: total / time_call(lambda: load().write.format("noop").mode("overwrite").save())
