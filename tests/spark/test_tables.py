"""Tables in a bucket through a real Spark session: what executors write there, and the table as a DataFrame."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit.s3 import BUCKET, SECRET_KEY, S3Server
from tests.kit.sampling import one_in
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, s3_options, s3_table

import tidelog
from tidelog import pipelines
from tidelog.cli.main import main
from tidelog.errors import BadInput, StoreDenied
from tidelog.pipelines.table_formats.interface import Format

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("format", one_in(2, FORMATS))
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


def test_partitions_and_upserts_with_a_session(spark: SparkSession, tmp_path: Path, s3_server: S3Server) -> None:
    harness = PipelineHarness(tmp_path, "delta", place=s3_table(s3_server, "latest"))
    with harness.engine() as log:
        log.topic("orders").append([{"id": number % 5, "n": number} for number in range(40)], tag="t")
        log.topic("orders").append([{"id": 3}], meta={"tombstone": True})
    keys, table = s3_options(s3_server), harness.table
    given: dict[str, Any] = {"storage_options": keys, "spark": spark}
    done = pipelines.export(
        harness.data, "orders", table, mode="latest", latest_key="/id", change_feed=True, schema="n int", **given
    )
    assert (done.rows, done.stop) == (4, 42)
    found = {row.key: row.n for row in pipelines.read(spark, table, storage_options=keys).collect()}
    assert found == {"0": 35, "1": 36, "2": 37, "4": 39}
    assert pipelines.reconcile(harness.data, "orders", table, **given).equal
    changed = pipelines.changes(spark, table, storage_options=keys)
    assert {row._change_type for row in changed.collect()} == {"insert"}
    assert "_commit_version" in changed.columns
    with pytest.raises(BadInput, match="leave the option out"):
        pipelines.export(harness.data, "orders", table, mode="append", **given)
    with pytest.raises(BadInput, match="newest row of each key"):
        pipelines.read_live(spark, harness.data, "orders", table, storage_options=keys)
    days = f"{table}-days"
    pipelines.export(harness.data, "orders", days, partition_by="date(ts)", **given)
    frame = pipelines.read(spark, days, storage_options=keys)
    assert frame.groupBy("ts_date").count().selectExpr("sum(count)").first() == (41,)
    assert pipelines.reconcile(harness.data, "orders", days, **given).equal
    assert pipelines.read_live(spark, harness.data, "orders", days, storage_options=keys).count() == 41
    erased = pipelines.erase(harness.data, "orders", [days], seqs=[7], **given)
    assert erased.tables[0].rows == 1
    assert pipelines.reconcile(harness.data, "orders", days, **given).equal


def test_many_topics_and_maintenance_on_the_command_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        for topic in ("a", "b", "other"):
            for _ in range(3):
                log.topic(topic).append([{"n": number} for number in range(20)])
    for name in ("export_topics", "optimize", "reprocess"):
        monkeypatch.setattr(pipelines, name, partial(getattr(pipelines, name), spark=spark))

    def run(*words: str, code: int = 0) -> dict[str, Any]:
        assert main(["pipeline", *words, "--json"]) == code, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    data, lake = str(tmp_path / "data"), str(tmp_path / "lake")
    done = run("export-topics", data, lake, "--pattern", "[ab]", "--group", "lake")
    assert [(each["topic"], each["state"], each["rows"]) for each in done["topics"]] == [
        ("a", "done", 60),
        ("b", "done", 60),
    ]
    with tidelog.open(data, read_only=True) as log:
        assert log.topic("b", create=False).group("lake").lag().records == 0
    (tmp_path / "lake" / "other").write_text("in the way")
    done = run("export-topics", data, lake, code=1)
    assert [each["state"] for each in done["topics"]] == ["done", "done", "failed"]
    with tidelog.open(data, threads=False) as log:
        log.topic("a").append([{"n": 0}])
    assert run("export-topics", data, lake, "--topic", "a")["rows"] == 1
    typed = ("export-topics", data, f"{lake}/typed-{{topic}}", "--topic", "b", "--registered-schema")
    assert main(["schema", "set", data, "b", "n int", "--from-seq", "1"]) == 0
    assert main(["schema", "set", data, "b", "n int, m double"]) == 0
    capsys.readouterr()
    with tidelog.open(data, threads=False) as log:
        log.topic("b").append([{"n": 0, "m": 0.5}])
    assert run(*typed)["topics"][0]["commits"] == 2
    frame = pipelines.read(spark, f"{lake}/typed-b")
    assert frame.selectExpr("count(n)", "sum(m)").first() == (61, 0.5)
    assert pipelines.reconcile(data, "b", f"{lake}/typed-b", spark=spark).equal
    pipelines.export(data, "b", f"{lake}/dead", schema="x int", bad="quarantine", spark=spark)
    assert pipelines.dead_letters(spark, f"{lake}/dead").where("reason like 'does not fit%'").count() == 61
    done = run("reprocess", data, "b", f"{lake}/dead", "--schema", "x int, n int, m double")
    assert (done["fitted"], done["left"]) == (61, 0)
    assert pipelines.dead_letters(spark, f"{lake}/dead").count() == 0
    joined = run("optimize", f"{lake}/a")
    assert joined["removed"] > joined["added"] == 1
    assert len(run("vacuum", f"{lake}/a", "--retention", "0s", "--force")["removed"]) == joined["removed"]
    assert pipelines.reconcile(data, "a", f"{lake}/a", spark=spark).equal


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
