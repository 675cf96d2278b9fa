"""Live reads, histories, gaps and the state of tables in a real Spark session."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.kit.sampling import one_in

import tidelog
from tidelog import pipelines
from tidelog.pipelines.table_formats.interface import Format

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("format", one_in(2, ["parquet", "delta"]))
def test_a_live_read_has_each_row_once_whatever_is_exported_meanwhile(
    spark: SparkSession, tmp_path: Path, format: Format
) -> None:
    data, table = str(tmp_path / "data"), str(tmp_path / "table")
    with tidelog.open(data) as log:
        log.topic("orders").append([{"n": number} for number in range(1_000)])
    pipelines.export(data, "orders", table, format=format, spark=spark)
    with tidelog.open(data) as log:
        log.topic("orders").append([{"n": number} for number in range(1_000, 1_500)])
    live = pipelines.read_live(spark, data, "orders", table)
    assert live.selectExpr("count(*)", "count(distinct seq)", "max(seq)").first() == (1_500, 1_500, 1_500)
    (before,) = pipelines.status(data, [table])
    assert (before.next_seq, before.head_seq, before.lag_records) == (1_001, 1_500, 500)
    pipelines.export(data, "orders", table, format=format, spark=spark)
    assert live.count() == 1_500, "the plan of a live read is fixed when it is made"
    assert pipelines.read_live(spark, data, "orders", table).count() == 1_500
    assert pipelines.status(data, [table])[0].lag_records == 0


def test_the_history_of_a_queue_and_the_gap_log_are_tables(spark: SparkSession, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with tidelog.open(data) as log:
        queue = log.queue("emails")
        queue.put([1, 2, 3])
        queue.ack("w", queue.claim("w", 2))
        log.topic("orders").append([1, 2, 3])
        log.topic("orders").delete(before_seq=3)
    reader = spark.read.format("tidelog").option("path", data)
    steps = reader.option("history", "emails").load()
    assert [row.event for row in steps.orderBy("at").collect()] == ["enqueued", "claimed", "claimed", "acked", "acked"]
    gaps = spark.read.format("tidelog").option("path", data).option("gaps", "orders").load()
    assert [(row.cause, row.first, row.last) for row in gaps.collect()] == [("delete", 1, 2)]
