"""The examples of docs/cluster.md and docs/from-kafka.md that need no cluster and no broker."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit.s3 import BUCKET, S3Server
from tests.unit.pipelines.helpers import s3_options

import tidelog
import tidelog.spark
from tidelog import pipelines
from tidelog.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.slow


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_query_that_came_from_kafka_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tidelog.spark, "session", lambda: spark)
    places = r'(open\(|"path", |path=|checkpointLocation=)"(data|checkpoint)"'
    example = blocks("from-kafka.md", "python")[0]
    code = re.sub(places, lambda found: f"{found[1]}{str(tmp_path / found[2])!r}", example)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/from-kafka.md", "exec", dont_inherit=True), names)
    with tidelog.open(str(tmp_path / "data"), read_only=True) as log:
        assert log.topic("orders", create=False).group("copier").lag().records == 0


def test_the_nightly_job_runs_twice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("export", "reconcile", "scrub"):
        monkeypatch.setattr(pipelines, name, partial(getattr(pipelines, name), spark=spark))
    (block,) = blocks("cluster.md", "console")
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        log.topic("orders").append([b"one", b"two"])
    for _ in range(2):
        for line in block.splitlines():
            words = re.sub(r"\b(data|table)\b", lambda found: str(tmp_path / found[1]), line).split()[2:]
            assert main(words) == 0, capsys.readouterr().err


def test_other_programs_read_a_table_as_the_page_says(spark: SparkSession, tmp_path: Path, s3_server: S3Server) -> None:
    table, keys = f"s3://{BUCKET}/of-the-page", {**s3_options(s3_server), "AWS_ALLOW_HTTP": "true"}
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        log.topic("orders").append([b"one", b"two"], tag="a")
    pipelines.export(str(tmp_path / "data"), "orders", table, storage_options=keys, spark=spark)
    (block,) = (block for block in blocks("tables.md", "python") if "duckdb" in block)
    names: dict[str, Any] = {"spark": spark, "keys": keys, "pipelines": pipelines}
    results: list[Any] = []
    for line in block.replace("s3://lake/orders", table).splitlines():
        if line.startswith(("pipelines.", "pl.", "duckdb.")):
            results.append(eval(compile(line, "docs/tables.md", "eval", dont_inherit=True), names))
        else:
            exec(compile(line, "docs/tables.md", "exec", dont_inherit=True), names)
    loaded, collected, counted = results
    assert sorted(row.seq for row in loaded.collect()) == collected["seq"].to_list() == [1, 2]
    assert counted == [("a", 2)]


def test_the_commands_on_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "script"]) == 0
    script = Path(capsys.readouterr().out.strip())
    assert script.read_text().startswith('"""The script that spark-submit runs')
    page = (DOCS / "cluster.md").read_text()
    assert script.parent.name in page
    assert "--conf spark.executor.memory=4g" in page
