"""Partitioned tables: rows in the files of their partitions, table = log, and readers that skip files."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.kit.s3 import S3Server
from tests.unit.pipelines.helpers import PipelineHarness, iceberg_table, s3_table
from tests.unit.pipelines.test_export import Killed, Killer

import tidelog
from tidelog.errors import BadInput
from tidelog.pipelines import partitions, record_mapping
from tidelog.pipelines.export_job import Sizes
from tidelog.pipelines.table_formats import Place
from tidelog.pipelines.table_formats.interface import Format
from tidelog.testing import ManualClock

DAY_MS = 86_400_000
TAGS = ["plain", "with space", "a/b=c%d", "Öl", None, "x'y"]
FORMATS: tuple[Format, ...] = ("parquet", "delta", "iceberg")


def make(
    root: Path, format: Format, rule: str, *, server: S3Server | None = None, table: str = "table"
) -> PipelineHarness:
    if format == "iceberg":
        place: Place | None = iceberg_table(root, table, server=server)
    else:
        place = None if server is None else s3_table(server, f"partitions-{format}")
    harness = PipelineHarness(root, format, table=str(root / table), place=place)
    harness.mapping = record_mapping.new_mapping(None, partition_by=rule, hidden_partitions=format == "iceberg")
    return harness


def fill(harness: PipelineHarness, count: int, *, days: int = 3, start: int = 0) -> None:
    """Records of several days and tags."""
    clock = ManualClock(1_790_000_000_000_000 + start * 1_000_000)
    with tidelog.open(harness.data, threads=False, clock=clock) as log:
        for number in range(start, start + count):
            clock.tick(days * DAY_MS // count)
            log.topic("orders").append([{"n": number}], tag=TAGS[number % len(TAGS)])


def file_values(harness: PipelineHarness) -> list[set[object]]:
    """The days of each file."""
    if harness.format == "iceberg":
        paths = harness.iceberg().inspect.data_files()["file_path"].to_pylist()
        files = [Path(path.removeprefix("file://")) for path in paths]
    elif harness.format == "delta":
        files = harness.files()
    else:
        files = sorted(Path(harness.table).glob("*=*/part-*.parquet"))
    return [{ts.date() for ts in pq.ParquetFile(file).read(["ts"])["ts"].to_pylist()} for file in files]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rule", ["date(ts)", "tag"])
def test_a_partitioned_table_is_its_topic(tmp_path: Path, format: Format, rule: str) -> None:
    harness = make(tmp_path, format, rule)
    fill(harness, 60)
    assert harness.export_once().rows == 60
    assert sorted(harness.table_rows()) == sorted(harness.log_rows())
    if rule == "date(ts)":
        assert all(len(days) == 1 for days in file_values(harness)), "a file has rows of one day"
    assert harness.reconcile().equal
    fill(harness, 20, start=60)
    assert harness.export_once().rows == 20
    assert harness.reconcile().table_rows == 80


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_difference_is_found_and_repaired_in_its_partition(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format, "date(ts)")
    fill(harness, 40)
    harness.export_once()
    names = sorted(Path(harness.table).glob("*=*/part-*.parquet"))
    whole = pq.ParquetFile(names[1])
    pq.write_table(whole.read().slice(1), names[1])
    found = harness.reconcile(repair=True)
    assert (found.equal, found.whole) == (False, True)
    assert sorted(harness.table_rows()) == sorted(harness.log_rows())
    assert all(len(days) == 1 for days in file_values(harness))
    with harness.engine() as log:
        log.topic("orders").delete(seqs=[3])
    assert harness.reconcile(repair=True).whole
    assert 3 not in {row[0] for row in harness.table_rows()}
    assert harness.reconcile().equal


@pytest.mark.parametrize("format", ["parquet", "delta"])
@pytest.mark.parametrize("rule", ["date(ts)", "tag"])
def test_other_readers_see_the_partition_column(tmp_path: Path, format: Format, rule: str) -> None:
    harness = make(tmp_path, format, rule)
    fill(harness, 36)
    harness.export_once()
    column = partitions.partition_column(rule)
    if format == "delta":
        seen = DeltaTable(harness.table).to_pyarrow_table().select(["seq", column])
        also = pl.read_delta(harness.table).select("seq", column).to_arrow()
    else:
        address = f"{harness.table}/*/*.parquet"
        found = duckdb.sql(f"SELECT seq, {column} FROM read_parquet('{address}', hive_partitioning=true)")
        seen = found.to_arrow_table() if found is not None else pa.table({})
        also = pl.read_parquet(address, hive_partitioning=True).select("seq", column).to_arrow()
    with tidelog.open(harness.data, read_only=True) as log:
        records = [record for record in log.topic("orders", create=False) if not isinstance(record, tidelog.Gap)]
    days = {record.seq: datetime.fromtimestamp(record.ts_ms / 1000, UTC).date().isoformat() for record in records}
    expected = days if rule == "date(ts)" else {record.seq: record.tag for record in records}
    for table in (seen, also):
        values = table[column].cast(pa.string()).to_pylist()
        assert dict(zip(table["seq"].to_pylist(), values, strict=True)) == expected


@pytest.mark.parametrize("each", [9, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("format", FORMATS)
def test_every_step_may_be_the_last(tmp_path: Path, format: Format, each: int) -> None:
    """Method: as for tables without partitions; for Parquet also with the log of the table gone after the kill. The
    short form ends at some of the steps."""
    first = make(tmp_path, format, "date(ts)")
    fill(first, 12, days=2)
    first.sizes = Sizes(file_bytes=200, age_ms=1_000, commit_bytes=400)
    first.on_step = counting = Killer()
    assert first.export_once().commits > 1
    for at in range(1 + each // 2, len(counting.steps) + 1, each):
        harness = make(tmp_path, format, "date(ts)", table=f"table{at}")
        harness.sizes, harness.on_step = first.sizes, Killer(at)
        with pytest.raises(Killed):
            harness.export_once()
        harness.on_step = lambda _: None
        if format == "parquet":
            shutil.rmtree(Path(harness.table) / "_tidelog")
        harness.export_once()
        assert sorted(harness.table_rows()) == sorted(harness.log_rows()), counting.steps[at - 1]
        assert harness.reconcile().equal


@pytest.mark.parametrize("format", FORMATS)
def test_a_filtered_read_skips_files(tmp_path: Path, format: Format) -> None:
    """Method: what each library plans to read for a filter on ts, tag and a typed column, without partitions."""
    harness = make(tmp_path, format, "date(ts)")
    fields = StructType([StructField("n", LongType()), StructField("text", StringType())])
    harness.mapping = record_mapping.new_mapping(fields)
    harness.sizes = Sizes(file_bytes=600, age_ms=1_000, commit_bytes=1_200)
    clock = ManualClock()
    with tidelog.open(harness.data, threads=False, clock=clock) as log:
        for number in range(20):
            clock.tick(10)  # each file has times of its own
            log.topic("orders").append([{"n": number, "text": "x" * 60 + f"{number:02}"}] * 5, tag=f"t{number:02}")
    harness.export_once()
    middle = harness.read_table().sort_by("seq")["ts"][50].as_py()
    for column, value in (("n", 7), ("tag", "t07"), ("seq", 38), ("ts", middle)):
        planned, files = plan(harness, column, value)
        assert 0 < planned < files, column


def plan(harness: PipelineHarness, column: str, value: object) -> tuple[int, int]:
    """Return how many files a reader of `column == value` opens, and how many there are."""
    if harness.format == "iceberg":
        table = harness.iceberg()
        literal = value.isoformat() if isinstance(value, datetime) else value
        scan = table.scan(row_filter=f"{column} == {literal!r}")
        return len(list(scan.plan_files())), len(list(table.scan().plan_files()))
    if harness.format == "delta":
        whole = DeltaTable(harness.table).to_pyarrow_dataset()
        return len(list(whole.get_fragments(filter=ds.field(column) == pa.scalar(value)))), len(harness.files())
    stats = []
    for file in harness.files():
        group = pq.ParquetFile(file).metadata.row_group(0)
        stats += [
            group.column(at).statistics for at in range(group.num_columns) if group.column(at).path_in_schema == column
        ]
    return sum(each.min <= value <= each.max for each in stats), len(stats)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_partitioned_table_in_a_bucket(tmp_path: Path, s3_server: S3Server, format: Format) -> None:
    harness = make(tmp_path, format, "tag", server=s3_server)
    fill(harness, 24)
    assert harness.export_once().rows == 24
    assert harness.reconcile().equal
    with harness.engine() as log:
        log.topic("orders").delete(seqs=[5])
    assert harness.reconcile(repair=True).whole
    assert harness.export_once().rows == 0


def test_partitions_that_are_refused(tmp_path: Path) -> None:
    for rule, said in (("hour(ts)", "is no partition"), ("data", "cannot be partitioned"), ("nope", "one of its")):
        with pytest.raises(BadInput, match=said) as caught:
            record_mapping.new_mapping(None, partition_by=rule)
        assert "nothing was written" in str(caught.value)
    harness = make(tmp_path, "delta", "tag")
    with harness.engine() as log:
        log.topic("orders").append([{}], tag="x" * 200)
        log.topic("orders").append([{}], tag="y" * 201)
    with pytest.raises(BadInput, match="too long for a partition"):
        harness.export_once()
    assert not DeltaTable.is_deltatable(harness.table)


def test_too_many_partitions_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "PARTITIONS_MAX", 4)
    harness = make(tmp_path, "parquet", "tag")
    fill(harness, 12)
    with pytest.raises(BadInput, match="more than 4 partitions"):
        harness.export_once()
    assert not list(Path(harness.table).glob("*=*/*.parquet")), "unfinished files are removed"


def test_an_empty_text_is_null_in_its_partition(tmp_path: Path) -> None:
    harness = make(tmp_path, "delta", "tag")
    harness.mapping = record_mapping.new_mapping(StructType([StructField("sku", StringType())]), partition_by="sku")
    with harness.engine() as log:
        log.topic("orders").append([{"sku": ""}, {"sku": "A"}, {}])
    harness.export_once()
    assert DeltaTable(harness.table).to_pyarrow_table().sort_by("seq")["sku"].to_pylist() == [None, "A", None]
    assert harness.reconcile().equal
