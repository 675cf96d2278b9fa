"""Typed tables that get more columns: each range has the schema that it was exported with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, iceberg_table
from tests.unit.pipelines.test_export import Killed, Killer

from tidelog.errors import BadInput
from tidelog.pipelines import latest_rows, optimize_job, record_mapping
from tidelog.pipelines.export_job import Exported, Sizes
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.interface import Format

ALL: tuple[Format, ...] = (*FORMATS, "iceberg")


def schema(**fields: object) -> RecordMapping:
    return record_mapping.new_mapping(StructType([StructField(name, kind) for name, kind in fields.items()]))  # type: ignore[arg-type]


N = schema(n=LongType())
N_TEXT = schema(n=LongType(), text=StringType())


def make(root: Path, format: Format, table: str = "table") -> PipelineHarness:
    place = iceberg_table(root, table) if format == "iceberg" else None
    harness = PipelineHarness(root, format, table=str(root / table), place=place)
    harness.mapping, harness.sizes = N, Sizes(file_bytes=600, age_ms=1_000, commit_bytes=2_000)
    return harness


def export_as(harness: PipelineHarness, wanted: RecordMapping) -> Exported:
    with harness.export() as job:
        job.use_schema(wanted)
        return job.run()


def texts(harness: PipelineHarness) -> list[str | None]:
    found = harness.read_table() if harness.format != "delta" else DeltaTable(harness.table).to_pyarrow_table()
    values: list[str | None] = found.sort_by("seq")["text"].to_pylist()
    return values


@pytest.mark.parametrize("format", ALL)
def test_new_columns_begin_where_the_export_goes_on(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format)
    harness.fill(40)
    harness.export_once()
    harness.fill(20, start=40)
    assert export_as(harness, N_TEXT).rows == 20
    if format != "parquet":
        assert texts(harness) == [None] * 40 + ["x" * (number % 50) for number in range(40, 60)]
    assert harness.reconcile().equal, "records before it are compared with the schema before it"
    with harness.open_table(write=False) as table:
        last = table.last_commit()
    assert last is not None
    assert [era.first for era in last.eras] == [0, 41]
    harness.fill(20, start=60)
    assert harness.export_once().rows == 20, "the schema stays without naming it again"
    assert harness.reconcile().table_rows == 80
    with harness.engine() as log:
        log.topic("orders").delete(seqs=[5, 50, 70])
    assert harness.reconcile(repair=True).whole
    assert harness.reconcile().equal


@pytest.mark.parametrize("format", FORMATS)
def test_files_are_joined_within_their_schema(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format)
    harness.fill(40)
    harness.export_once()
    harness.fill(40, start=40)
    export_as(harness, N_TEXT)
    with harness.open_table() as table:
        assert optimize_job.optimize_table(table, harness.context(), 100_000).added == 2
    assert harness.reconcile().equal
    if format == "delta":
        DeltaTable(harness.table).optimize.compact()
        assert harness.reconcile().equal
        return
    shutil.rmtree(Path(harness.table) / "_tidelog")
    harness.fill(5, start=80)
    assert harness.export_once().rows == 5, "footers have the schemas"
    assert harness.reconcile().equal


@pytest.mark.parametrize("each", [6, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("format", ALL)
def test_every_step_may_be_the_last(tmp_path: Path, format: Format, each: int) -> None:
    first = make(tmp_path, format, "first")
    first.fill(30)

    def run(harness: PipelineHarness, step: Killer) -> None:
        with harness.export() as job:
            job.run(until=16)
        harness.on_step = step
        export_as(harness, N_TEXT)

    counting = Killer()
    run(first, counting)
    for at in range(1, len(counting.steps) + 1, each):
        harness = make(tmp_path, format, f"table{at}")
        with pytest.raises(Killed):
            run(harness, Killer(at))
        harness.on_step = interface.no_step
        export_as(harness, N_TEXT)
        found = harness.reconcile()
        assert (found.equal, found.table_rows) == (True, 30), counting.steps[at - 1]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (schema(text=StringType()), "'n' is bigint there and is missing"),
        (schema(n=DoubleType(), text=StringType()), "'n' is bigint there and is double"),
    ],
)
def test_a_schema_that_narrows_is_refused(tmp_path: Path, wanted: RecordMapping, said: str) -> None:
    harness = make(tmp_path, "delta")
    harness.fill(20)
    harness.export_once()
    harness.fill(20, start=20)
    version = DeltaTable(harness.table).version()
    with pytest.raises(BadInput, match=said) as caught:
        export_as(harness, wanted)
    assert "nothing was written" in str(caught.value)
    assert "new" in str(caught.value)
    assert DeltaTable(harness.table).version() == version
    assert harness.export_once().rows == 20


def test_tables_whose_schema_does_not_change() -> None:
    plain = record_mapping.new_mapping(None)
    with pytest.raises(BadInput, match="no typed columns"):
        record_mapping.evolve(plain, N, "table")
    keyed = latest_rows.latest_mapping(N, "tag")
    assert record_mapping.evolve(keyed, N, "table") == keyed
    with pytest.raises(BadInput, match="newest row of each key"):
        record_mapping.evolve(keyed, N_TEXT, "table")
    assert record_mapping.evolve(N, N, "table") == N
    with pytest.raises(BadInput, match="another kind"):
        record_mapping.evolve(
            RecordMapping(
                StructType([*N.spark.fields, StructField("extra", LongType())]).json(), N.fields, partition_by="extra"
            ),
            schema(n=LongType(), extra=LongType()),
            "table",
        )


def test_earlier_versions_refuse_a_table_with_several_schemas(tmp_path: Path) -> None:
    harness = make(tmp_path, "parquet")
    harness.fill(20)
    harness.export_once()
    harness.fill(20, start=20)
    export_as(harness, N_TEXT)
    log = sorted((Path(harness.table) / "_tidelog/log").glob("*.json"))
    assert [json.loads(path.read_text())["format"] for path in (log[0], log[-1])] == [1, 3]
