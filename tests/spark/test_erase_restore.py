"""Erasure in a topic and its tables, and restores of a point in time, with a real session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server
from tests.kit.sampling import one_in
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog import pipelines
from tidelog.errors import BadInput, NotFound, TopicNotFound

pytestmark = pytest.mark.slow
ROWS = 300
SECRET = b"walrus-7"


def fill(path: Path) -> None:
    with tidelog.open(str(path), threads=False, segment_events_max=100) as log:
        for first in range(0, ROWS, 10):
            tag = "customer-7a" if first % 30 == 0 else f"it's {first}"
            word = "walrus-7" if first % 30 == 0 else "other"
            log.topic("orders").append([{"n": n, "word": word} for n in range(first, first + 10)], tag=tag)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    fill(tmp_path / "data")
    return tmp_path / "data"


def bytes_below(path: Path) -> Iterator[bytes]:
    for file in path.rglob("*"):
        if file.is_file():
            yield file.read_bytes()


def has_secret(path: Path) -> bool:
    """Whether a data file of a table has a record with the word."""
    files = [file for file in path.rglob("*.parquet") if "_delta_log" not in file.parts]
    return any(SECRET in value for file in files for value in pq.read_table(file).column("data").to_pylist())


@pytest.mark.parametrize("format", one_in(2, ["delta", "parquet"]))
def test_erasure_reaches_every_version_of_a_table(spark: SparkSession, data: Path, tmp_path: Path, format: str) -> None:
    table = tmp_path / "table"
    pipelines.export(str(data), "orders", str(table), format=format, spark=spark)  # type: ignore[arg-type]
    assert has_secret(table)
    before = set(table.glob("*.parquet"))
    done = pipelines.erase(str(data), "orders", [str(table)], match="customer-7*", actor="desk", spark=spark)
    (erased,) = done.tables
    assert (erased.rows, done.log["records"], done.log["actor"]) == (100, 100, "desk")
    assert not has_secret(table)
    assert not any(SECRET in content for content in bytes_below(data))
    assert {table / name for name in erased.removed} == before - set(table.glob("*.parquet"))
    assert erased.removed
    if format == "delta":
        assert erased.version == DeltaTable(str(table)).version()
        assert any("_delta_log" in text for text in erased.not_reached)
    assert pipelines.reconcile(str(data), "orders", str(table), spark=spark).equal
    assert pipelines.read(spark, str(table)).count() == 200
    again = pipelines.erase(str(data), "orders", [str(table)], match="customer-7*", spark=spark)
    assert (again.tables[0].rows, again.log["records"]) == (0, 0), "nothing is left to find"
    with tidelog.open(str(data), threads=False) as log:
        log.topic("orders").append([{"n": -1}])
    assert pipelines.export(str(data), "orders", str(table), spark=spark).rows == 1, "exports go on"


def test_erasure_by_seq_of_a_server_and_a_table_in_a_bucket(
    spark: SparkSession, data: Path, s3_server: S3Server
) -> None:
    table = f"s3://{BUCKET}/erased"
    options = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://{s3_server.endpoint}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    with run_server(str(data)) as (_, address):
        pipelines.export(address, "orders", table, spark=spark, storage_options=options)
        done = pipelines.erase(address, "orders", [table], seqs=[1, 2, 3, 7], storage_options=options)
        assert done.tables[0].rows == done.log["records"] == 4
        rows = pipelines.read(spark, table, storage_options=options).where("seq < 9").select("seq").collect()
        assert sorted(row.seq for row in rows) == [4, 5, 6, 8]


@pytest.mark.parametrize("step", one_in(2, ["erase the log", "erase a table"]))
def test_erasure_that_broke_off_is_repeated(spark: SparkSession, data: Path, tmp_path: Path, step: str) -> None:
    table = tmp_path / "table"
    pipelines.export(str(data), "orders", str(table), spark=spark)

    def stop(named: str) -> None:
        if named == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipelines.erase(str(data), "orders", [str(table)], match="customer-7*", step=stop)
    assert has_secret(table), "not yet"
    pipelines.erase(str(data), "orders", [str(table)], match="customer-7*")
    assert not has_secret(table)


def test_erasure_is_refused_before_anything_is_erased(spark: SparkSession, data: Path, tmp_path: Path) -> None:
    table = tmp_path / "table"
    pipelines.export(str(data), "orders", str(table), spark=spark)
    with tidelog.open(str(data), threads=False) as log:
        log.topic("others").append([b"x"])
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (BadInput, "is a table of 'orders', not of 'others'", {"topic": "others", "match": "x"}),
        (BadInput, "no records are selected, or twice", {"topic": "orders"}),
        (BadInput, "no records are selected, or twice", {"topic": "orders", "match": "x", "seqs": [1]}),
        (NotFound, "there is no table at", {"topic": "orders", "match": "x", "table": tmp_path / "nowhere"}),
        (BadInput, "whose snapshots keep", {"topic": "orders", "match": "x", "table": "iceberg://prod/shop.orders"}),
    ]
    for kind, words, given in refused:
        named = given.pop("table", table)
        with pytest.raises(kind, match=words):
            pipelines.erase(str(data), tables=[str(named)], spark=spark, **given)
    DeltaTable(str(table)).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    with pytest.raises(BadInput, match="has a change data feed, which keeps removed rows; nothing was erased"):
        pipelines.erase(str(data), "orders", [str(table)], match="customer-7*", spark=spark)
    with tidelog.open(str(data), read_only=True) as log:
        assert log.topic("orders", create=False).count == ROWS
        assert log.erasures() == []


# ── restore ───────────────────────────────────────────────────────────────────────────────────────


def numbers(directory: str, topic: str) -> list[int]:
    with tidelog.open(directory, read_only=True) as log:
        return [json.loads(data)["n"] for data in log.topic(topic, create=False).to_arrow().column("data").to_pylist()]


def test_restore_of_a_point_into_a_directory_and_into_a_topic(spark: SparkSession, data: Path, tmp_path: Path) -> None:
    target, into = str(tmp_path / "backups"), str(tmp_path / "into")
    with tidelog.open(str(data), threads=False) as log:
        log.backup(target)
    done = pipelines.restore(target, into, to_seq={"orders": 120})
    assert (done.directory, done.topics["orders"], done.backfilled) == (into, 120, None)
    assert numbers(into, "orders") == list(range(120))
    due = ["stage"]  # the step at which the first run breaks off

    def stop(step: str) -> None:
        if step in due:
            due.remove(step)
            raise KeyboardInterrupt

    def restore() -> pipelines.Restored:
        return pipelines.restore(
            target,
            str(data),
            "orders",
            to_topic="before",
            to_seq={"orders": 120},
            work_dir=str(tmp_path / "work"),
            spark=spark,
            step=stop,
        )

    with pytest.raises(KeyboardInterrupt):
        restore()
    found = restore().backfilled
    assert found is not None
    assert found.rows == 120
    assert sorted(numbers(str(data), "before")) == list(range(120))
    again = restore().backfilled
    assert again is not None
    assert again.written == 0, "each record once"
    with pytest.raises(BadInput, match="has another restore under the name of this job"):
        pipelines.restore(target, str(data), "orders", work_dir=str(tmp_path / "work"), spark=spark)
    with pytest.raises(TopicNotFound, match="has no topic 'order' at that time; nothing was written"):
        pipelines.restore(target, str(data), "order", work_dir=str(tmp_path / "other"), spark=spark)
