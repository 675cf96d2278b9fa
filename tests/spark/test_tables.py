"""Tables in a bucket through a real Spark session: what executors write there, and the table as a DataFrame."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.kit.s3 import BUCKET, SECRET_KEY, S3Server
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, s3_options, s3_table

from tidelog import pipelines
from tidelog.errors import BadInput, StoreDenied
from tidelog.pipelines.table_formats.interface import Format

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_in_a_bucket(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server, format: Format, capfd: pytest.CaptureFixture[str]
) -> None:
    harness = PipelineHarness(tmp_path, format, place=s3_table(s3_server, f"spark-{format}"))
    keys = s3_options(s3_server)
    harness.fill(300)
    done = pipelines.export(harness.data, "orders", harness.table, format=format, storage_options=keys, spark=spark)
    assert done.rows == 300
    harness.check()
    assert pipelines.reconcile(harness.data, "orders", harness.table, storage_options=keys, spark=spark).equal
    frame = pipelines.read(spark, harness.table, storage_options=keys)
    assert frame.selectExpr("count(*)", "sum(seq)").first() == (300, 45150)
    frame.explain(mode="extended")
    assert SECRET_KEY not in capfd.readouterr().out
    copied = pipelines.backfill(
        harness.table,
        harness.data,
        "copy",
        job="copy",
        work_dir=f"{harness.table}-work",
        storage_options=keys,
        spark=spark,
    )
    assert copied.rows == 300


def test_a_backfill_into_a_table_in_a_bucket(spark: SparkSession, tmp_path: Path, s3_server: S3Server) -> None:
    harness = PipelineHarness(tmp_path, "delta", place=s3_table(s3_server, "backfill"))
    harness.fill(50)
    keys = s3_options(s3_server)
    pipelines.backfill(
        harness.data,
        harness.table,
        from_topic="orders",
        function=lambda df: df.select("seq", "tag"),
        function_name="jobs:two",
        storage_options=keys,
        spark=spark,
    )
    assert pipelines.read(spark, harness.table, storage_options=keys).columns == ["seq", "tag"]


def test_a_bucket_that_refuses_and_a_format_that_is_not_read(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server
) -> None:
    harness = PipelineHarness(tmp_path)
    harness.fill(10)
    keys = s3_options(s3_server)
    with pytest.raises(StoreDenied, match="nothing was changed"):
        pipelines.export(harness.data, "orders", "s3://no-such-bucket/t", storage_options=keys, spark=spark)
    (Path(s3_server.directory) / BUCKET / "in.csv").write_text("a\n1\n")
    with pytest.raises(BadInput, match="nothing was written"):
        pipelines.backfill(f"s3://{BUCKET}/in.csv", harness.data, "copy", storage_options=keys, spark=spark)
