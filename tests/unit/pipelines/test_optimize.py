"""Table maintenance: after joining files and removing old ones a table is still its topic, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StructField, StructType
from tests.kit.s3 import S3Server
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, iceberg_table, s3_table
from tests.unit.pipelines.test_export import Killed, Killer
from tests.unit.pipelines.test_upsert import UpsertHarness

from tidelog.errors import BadInput, Damaged
from tidelog.pipelines import api, optimize_job, record_mapping
from tidelog.pipelines.export_job import Sizes
from tidelog.pipelines.optimize_job import Optimized
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.interface import Format

SMALL = Sizes(file_bytes=600, age_ms=1_000, commit_bytes=1_200)
NOW_MS = 1 << 45  # far behind every file


def optimize(harness: PipelineHarness, file_bytes: int = 40_000) -> Optimized:
    with harness.open_table() as table:
        return optimize_job.optimize_table(table, harness.context(), file_bytes)


def make(root: Path, format: Format, *, partition_by: str | None = None) -> PipelineHarness:
    harness = PipelineHarness(root, format)
    harness.mapping, harness.sizes = record_mapping.new_mapping(None, partition_by=partition_by), SMALL
    harness.fill(80)
    harness.export_once()
    return harness


@pytest.mark.parametrize("format", FORMATS)
def test_joined_files_are_the_topic(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format)
    before = harness.files()
    done = optimize(harness)
    assert len(harness.files()) < len(before) // 2
    assert (done.removed > done.added > 0, done.commits) == (True, 1)
    harness.check()
    assert harness.reconcile().equal
    assert optimize(harness).commits == 0, "there is nothing left to join"
    harness.fill(20, start=80)
    assert harness.export_once().rows == 20
    with harness.engine() as log:
        log.topic("orders").delete(seqs=[5])
    assert harness.reconcile(repair=True).whole
    optimize(harness)
    harness.check()
    if format == "delta":
        text = (Path(harness.table) / f"_delta_log/{1:020d}.json").read_text()
        versions = sorted((Path(harness.table) / "_delta_log").glob("*.json"))
        joined = [path.read_text() for path in versions if '"dataChange":false' in path.read_text()]
        assert joined
        assert '"dataChange":false' not in text
        commit = json.loads(joined[0].splitlines()[0])
        assert "commitInfo" in commit


@pytest.mark.parametrize("each", [5, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("format", FORMATS)
def test_every_step_may_be_the_last(tmp_path: Path, format: Format, each: int) -> None:
    first = make(tmp_path, format)
    first.on_step = counting = Killer()
    optimize(first)
    for at in range(1, len(counting.steps) + 1, each):
        harness = PipelineHarness(tmp_path, format, table=str(tmp_path / f"table{at}"))
        harness.sizes = SMALL
        harness.export_once()
        harness.on_step = Killer(at)
        with pytest.raises(Killed):
            optimize(harness)
        harness.on_step = interface.no_step
        assert harness.export_once().rows == 0
        harness.check()
        assert harness.reconcile().equal, counting.steps[at - 1]


@pytest.mark.parametrize("format", FORMATS)
def test_files_are_joined_in_their_partitions(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format, partition_by="tag")
    folders = {file.parent.name for file in Path(harness.table).glob("*=*/part-*.parquet")}
    optimize(harness)
    assert sorted(harness.table_rows()) == sorted(harness.log_rows())
    assert harness.reconcile().equal
    if format == "parquet":
        assert {file.parent.name for file in Path(harness.table).glob("*=*/part-*.parquet")} == folders


@pytest.mark.parametrize("format", FORMATS)
def test_quarantine_is_joined_too(tmp_path: Path, format: Format) -> None:
    harness = PipelineHarness(tmp_path, format)
    harness.mapping = record_mapping.new_mapping(StructType([StructField("n", LongType())]), "quarantine")
    harness.sizes = SMALL
    with harness.engine() as log:
        for number in range(40):
            log.topic("orders").append([{"n": "no number" if number % 9 == 0 else number}], meta={"text": "x" * 40})
    harness.export_once()
    optimize(harness)
    found = harness.reconcile()
    assert (found.equal, found.quarantined) == (True, 5)


def test_a_changed_file_is_not_joined(tmp_path: Path) -> None:
    harness = make(tmp_path, "parquet")
    file = harness.files()[2]
    pq.write_table(pq.ParquetFile(file).read().slice(1), file)
    with pytest.raises(Damaged, match="run reconcile"):
        optimize(harness)
    assert harness.reconcile(repair=True).whole
    optimize(harness)
    harness.check()


def test_optimize_of_others_and_vacuum_keep_a_partitioned_table(tmp_path: Path) -> None:
    harness = make(tmp_path, "delta", partition_by="tag")
    DeltaTable(harness.table).optimize.compact()
    assert harness.reconcile().equal
    DeltaTable(harness.table).delete("seq = 7")
    assert harness.reconcile().difference is not None
    assert harness.reconcile(repair=True).whole
    done = api.vacuum(harness.table, retention_hours=0, force=True)
    assert done.removed
    assert harness.reconcile().equal
    assert sorted(harness.table_rows()) == sorted(harness.log_rows())
    harness.fill(20, start=80)
    assert harness.export_once().rows == 20
    assert harness.reconcile().equal


def test_an_upsert_table_is_optimized_and_vacuumed(tmp_path: Path) -> None:
    harness, random = UpsertHarness(tmp_path), Random(8)
    for _ in range(3):
        harness.write(random, 30)
        harness.upsert()
    assert optimize(harness).removed >= 0
    assert api.vacuum(harness.table, retention_hours=0, force=True).removed
    harness.check()
    assert harness.compare().equal
    harness.write(random, 20)
    harness.upsert()
    harness.check()


def test_what_a_vacuum_removes(tmp_path: Path) -> None:
    harness = make(tmp_path, "delta")
    optimize(harness)
    with pytest.raises(BadInput, match="force"):
        api.vacuum(harness.table, retention_hours=1)
    there = set(Path(harness.table).glob("*.parquet"))
    shown = api.vacuum(harness.table, retention_hours=0, force=True, dry_run=True)
    assert set(Path(harness.table).glob("*.parquet")) == there
    done = api.vacuum(harness.table, retention_hours=0, force=True)
    assert done.removed == shown.removed
    assert {Path(harness.table) / name for name in done.removed} == there - set(Path(harness.table).glob("*.parquet"))
    harness.check()


def test_a_parquet_table_in_a_bucket(tmp_path: Path, s3_server: S3Server) -> None:
    harness = PipelineHarness(tmp_path, "parquet", place=s3_table(s3_server, "vacuum"))
    harness.sizes = SMALL
    harness.fill(30)
    harness.on_step = Killer(4)
    with pytest.raises(Killed):
        harness.export_once()
    harness.on_step = interface.no_step
    harness.export_once()
    assert optimize(harness).commits == 1
    with harness.open_table() as table:
        kept = optimize_job.vacuum_table(harness.place, table, 0, 168, force=False, dry_run=False)
        done = optimize_job.vacuum_table(harness.place, table, NOW_MS, 168, force=False, dry_run=False)
    assert (kept.removed, bool(done.removed)) == ((), True)
    harness.check()
    assert harness.reconcile().equal


def test_what_is_refused(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path))
    harness.fill(20)
    harness.export_once()
    with pytest.raises(BadInput, match="rewrite_data_files"):
        optimize(harness)
    with harness.open_table() as table, pytest.raises(BadInput, match="expire_snapshots"):
        optimize_job.vacuum_table(harness.place, table, 0, 168, force=False, dry_run=False)
