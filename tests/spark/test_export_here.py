"""Tables of `tidelog export`, which needs no Java, and of Spark's export: each continues what the other wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.unit.pipelines.helpers import PipelineHarness

from tidelog import pipelines
from tidelog.pipelines.table_formats.interface import Format

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("format", "here_first"), [("parquet", True), ("delta", False)], ids=["parquet-here-first", "delta-spark-first"]
)
def test_each_export_continues_the_other(spark: SparkSession, tmp_path: Path, format: Format, here_first: bool) -> None:
    harness = PipelineHarness(tmp_path, format)

    rule = "tag" if format == "delta" else "date(ts)"

    def export_here() -> pipelines.Exported:
        return pipelines.export_here(
            harness.data,
            "orders",
            harness.table,
            format=format,
            since_last=True,
            infer=True,
            partition_by=rule,
        )

    def export_on_spark() -> pipelines.Exported:
        return pipelines.export(
            harness.data, "orders", harness.table, format=format, infer=True, partition_by=rule, spark=spark
        )

    exports = [export_here, export_on_spark] if here_first else [export_on_spark, export_here]
    for number, export in enumerate([*exports, exports[0]]):
        harness.fill(60, start=number * 60)
        done = export()
        assert (done.first, done.stop, done.rows) == (number * 60 + 1, number * 60 + 61, 60)
    compared = pipelines.reconcile(harness.data, "orders", harness.table, spark=spark)
    assert (compared.equal, compared.table_rows) == (True, 180)
    frame = pipelines.read(spark, harness.table)
    assert frame.selectExpr("count(*)", "sum(n)", "sum(length(text))").first() == (
        180,
        sum(range(180)),
        sum(number % 50 for number in range(180)),
    )
