"""Records in quarantine get a second try with a newer schema: each is a row or in quarantine, also after a kill."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, iceberg_table
from tests.unit.pipelines.test_export import Killed, Killer

from tidelog.pipelines import record_mapping
from tidelog.pipelines.export_job import Sizes
from tidelog.pipelines.reprocess_job import Reprocessed, replace_eras, reprocess_table
from tidelog.pipelines.table_formats import Place, interface
from tidelog.pipelines.table_formats.interface import Era, Format
from tidelog.pipelines.table_source import QuarantineReader

ALL: tuple[Format, ...] = (*FORMATS, "iceberg")
N = StructType([StructField("n", LongType())])
N_TEXT = StructType([StructField("n", LongType()), StructField("text", StringType())])


def make(root: Path, format: Format, table: str = "table") -> PipelineHarness:
    place = iceberg_table(root, table) if format == "iceberg" else None
    harness = PipelineHarness(root, format, table=str(root / table), place=place)
    harness.mapping = record_mapping.new_mapping(N, "quarantine")
    harness.sizes = Sizes(file_bytes=200, age_ms=1_000, commit_bytes=100_000)
    return harness


def fill(harness: PipelineHarness, start: int = 0) -> None:
    """30 records; every fifth has a field that the first schema has not, and every tenth is no object."""
    with harness.engine() as log:
        for number in range(start, start + 30):
            data: object = {"n": number} if number % 5 else {"n": number, "text": "t"}
            log.topic("orders").append(["not an object" if number % 10 == 3 else data])


def export(harness: PipelineHarness, *, with_text: bool = False) -> None:
    with harness.export() as job:
        if with_text:
            job.use_schema(record_mapping.new_mapping(N_TEXT))
        job.run()


def reprocess(harness: PipelineHarness) -> Reprocessed:
    with harness.open_table() as table:
        return reprocess_table(harness.options(), table, harness.context())


def quarantined(harness: PipelineHarness) -> list[int]:
    reader = QuarantineReader(
        harness.place if harness.place.catalog is not None else Place(harness.disk, harness.table)
    )
    batches = [batch for part in reader.parts() for batch in reader.read(part)]
    return sorted(pa.Table.from_batches(batches, schema=reader.schema)["seq"].to_pylist())


@pytest.mark.parametrize("format", ALL)
def test_records_that_fit_now_become_rows(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format)
    fill(harness)
    export(harness)
    assert len(quarantined(harness)) == 9
    assert reprocess(harness).ranges == 0, "the schema is the same"
    fill(harness, 30)
    export(harness, with_text=True)
    done = reprocess(harness)
    assert (done.before, done.fitted, done.left, done.skipped) == (12, 6, 6, 0)
    assert quarantined(harness) == [4, 14, 24, 34, 44, 54]
    found = harness.reconcile()
    assert (found.equal, found.table_rows, found.quarantined) == (True, 54, 6)
    assert reprocess(harness).ranges == 0
    fill(harness, 60)
    export(harness)
    assert harness.reconcile().table_rows == 81


@pytest.mark.parametrize("format", ALL)
def test_a_schema_of_the_second_try_adds_columns(tmp_path: Path, format: Format) -> None:
    harness = make(tmp_path, format)
    fill(harness)
    export(harness)
    with harness.open_table() as table:
        wanted = record_mapping.new_mapping(N_TEXT)
        assert reprocess_table(harness.options(), table, harness.context(), wanted).fitted == 6
    assert quarantined(harness) == [4, 14, 24]
    assert harness.reconcile().equal
    fill(harness, 30)
    export(harness)
    assert quarantined(harness) == [4, 14, 24, 34, 44, 54], "the schema goes on"
    assert harness.reconcile().equal


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("format", FORMATS)
def test_every_step_may_be_the_last(tmp_path: Path, format: Format, each: int) -> None:
    def prepare(harness: PipelineHarness) -> None:
        with harness.export() as job:
            job.run(until=16)
        export(harness, with_text=True)

    first = make(tmp_path, format, "first")
    fill(first)
    prepare(first)
    first.on_step = counting = Killer()
    assert reprocess(first).fitted > 0
    for at in range(1, len(counting.steps) + 1, each):
        harness = make(tmp_path, format, f"table{at}")
        prepare(harness)
        harness.on_step = Killer(at)
        with pytest.raises(Killed):
            reprocess(harness)
        harness.on_step = interface.no_step
        with harness.open_table():
            pass  # completes a commit that was written
        assert harness.reconcile().equal, counting.steps[at - 1]
        reprocess(harness)
        assert quarantined(harness) == [4, 14, 24]
        assert harness.reconcile().equal


def test_a_range_that_the_log_does_not_have_whole_stays(tmp_path: Path) -> None:
    harness = make(tmp_path, "delta")
    fill(harness)
    export(harness)
    fill(harness, 30)
    export(harness, with_text=True)
    with harness.engine() as log:
        log.topic("orders").delete(seqs=[2])
        log.topic("orders", cap_records=50)
        log.topic("orders").append([{"n": 0}])
    export(harness)
    before = set(harness.files())
    done = reprocess(harness)
    assert done.skipped > 0
    assert done.before == done.fitted + done.left
    assert before & set(harness.files())
    assert not [path for path in Path(harness.table).glob("*.parquet") if path not in set(harness.files()) | before]


def test_schemas_by_seq_after_ranges_got_the_newest() -> None:
    a, b = Era(0, "a", "s"), Era(50, "b", "s")
    assert replace_eras((a, b), [(10, 20)]) == (a, Era(10, "b", "s"), Era(20, "a", "s"), b)
    assert replace_eras((a, b), [(10, 50)]) == (a, Era(10, "b", "s"))
    assert replace_eras((a, b), [(0, 20), (20, 50)]) == (Era(0, "b", "s"),)
    assert interface.era_at(replace_eras((a, b), [(10, 20)]), 25).schema == "a"
