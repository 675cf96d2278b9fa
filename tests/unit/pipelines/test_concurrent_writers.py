"""An export beside others: programs that commit to the same Delta table, executors whose files the driver cannot see.

Foreign commits never end an export and never cost or double a row; files that are not there are never committed.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TypeVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, Row, table_rows

from tidelog.errors import BadInput, Locked, Unavailable
from tidelog.pipelines.export_job import ExportJob, JobContext, Sizes
from tidelog.pipelines.spark_tasks import run_guarded, unwrap_results
from tidelog.pipelines.table_formats import delta
from tidelog.pipelines.table_formats.interface import Format

T = TypeVar("T")
R = TypeVar("R")
FOREIGN = 1_000_000
STEPS = ("plan", "write files", "commit", "sync the names of staged files", "write the commit", "committed")


def seen(harness: PipelineHarness) -> list[Row]:
    return table_rows(DeltaTable(harness.table).to_pyarrow_table())


class Others:
    """Commits of other programs, at steps of an export that chance names."""

    def __init__(self, harness: PipelineHarness, random: Random) -> None:
        self._bench, self._random, self.commits, self.appended, self.gone = harness, random, 0, 0, set[int]()

    def __call__(self, step: str) -> None:
        if step in STEPS and DeltaTable.is_deltatable(self._bench.table) and self._random.random() < 0.5:
            self._random.choice([self.append, self.optimize, self.delete, self.vacuum])()
            self.commits += 1

    def append(self) -> None:
        table = DeltaTable(self._bench.table).to_pyarrow_table().slice(0, 1)
        seq = pa.array([FOREIGN + self.appended] * len(table), pa.int64())
        self.appended += len(table)
        write_deltalake(self._bench.table, table.set_column(0, table.schema.field(0), seq), mode="append")

    def optimize(self) -> None:
        DeltaTable(self._bench.table).optimize.compact()

    def delete(self) -> None:
        seqs = [row[0] for row in seen(self._bench) if row[0] < FOREIGN]
        if seqs:
            self.gone.add(seq := self._random.choice(seqs))
            DeltaTable(self._bench.table).delete(f"seq = {seq}")

    def vacuum(self) -> None:
        DeltaTable(self._bench.table).vacuum(0, dry_run=False, enforce_retention_duration=False)


@pytest.mark.parametrize("seed", range(4))
def test_an_export_goes_on_beside_commits_of_others(tmp_path: Path, seed: int) -> None:
    harness = PipelineHarness(tmp_path, "delta")
    harness.sizes = Sizes(file_bytes=1_200, age_ms=1, commit_bytes=2_400)
    others = Others(harness, Random(seed))
    harness.on_step = others
    with harness.export() as job:
        for number in range(4):
            harness.fill(40, start=40 * number)
            job.run()
    found = seen(harness)
    ours = [row for row in found if row[0] < FOREIGN]
    assert others.commits > 10
    assert ours == [row for row in harness.log_rows() if row[0] not in others.gone], "each once"
    assert len(found) - len(ours) == others.appended, "and what others appended"


def test_commits_of_others_without_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PipelineHarness(tmp_path, "delta")
    harness.fill(20)
    harness.export_once()
    harness.fill(20, start=20)
    pauses: list[float] = []
    made = 0

    def step(name: str) -> None:
        nonlocal made
        if name == "write the commit":
            made += 1
            DeltaTable(harness.table).vacuum(0, dry_run=False, enforce_retention_duration=False)
            write_deltalake(harness.table, DeltaTable(harness.table).to_pyarrow_table().slice(0, 0), mode="append")

    harness.on_step = step
    with harness.export() as job:
        monkeypatch.setattr(job._table, "_pause", pauses.append)
        with pytest.raises(Locked, match=r"20 times in a row; nothing was committed"):
            job.run()
    assert (made, len(pauses)) == (delta.COMMIT_ATTEMPTS, delta.COMMIT_ATTEMPTS - 1)
    assert pauses[:3] == sorted(pauses[:3]), "it waits longer each time"
    assert max(pauses) <= 2
    harness.on_step = lambda _: None
    harness.export_once()
    harness.check()


def test_a_table_whose_columns_others_changed(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path, "delta")
    harness.fill(20)
    harness.export_once()
    more = DeltaTable(harness.table).to_pyarrow_table().slice(0, 0).append_column("more", pa.array([], pa.string()))
    write_deltalake(harness.table, more, mode="append", schema_mode="merge")
    harness.fill(20, start=20)
    harness.export_once()
    assert seen(harness) == harness.log_rows()
    assert harness.reconcile().equal
    write_deltalake(harness.table, DeltaTable(harness.table).to_pyarrow_table().drop(["tag"]), mode="overwrite",
                    schema_mode="overwrite")  # fmt: skip
    harness.fill(20, start=40)
    with pytest.raises(BadInput, match=r"has no column 'tag' any more.*nothing was committed"):
        harness.export_once()


class Elsewhere:
    """Executors with disks of their own: what a task wrote is moved out of the driver's sight, or cut."""

    def __init__(self, path: str, harm: Callable[[Path], object]) -> None:
        self._path, self._harm = Path(path), harm

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        before = set(self._path.rglob("*.parquet"))
        found = [run_guarded(function, pickle.loads(pickle.dumps(task))) for task in tasks]
        for path in sorted(set(self._path.rglob("*.parquet")) - before)[-1:]:
            self._harm(path)
        return unwrap_results(found)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("harm", [Path.unlink, _cut])
@pytest.mark.parametrize("format", FORMATS)
def test_files_that_the_driver_does_not_see_are_not_committed(
    format: Format, harm: Callable[[Path], object], tmp_path: Path
) -> None:
    harness = PipelineHarness(tmp_path, format)
    harness.fill(60)
    harness.export_once()
    harness.fill(60, start=60)
    work = harness.context()
    with harness.open_table() as table:
        before = table.last_commit()
        harmed = JobContext(Elsewhere(harness.table, harm), work.disk, work.clock, work.on_step)
        with (
            closing(ExportJob(harness.options(), table, lambda _: harness.mapping, harmed, harness.sizes)) as job,
            pytest.raises(Unavailable, match=r"which a task has written, .*nothing was committed.*all executors"),
        ):
            job.run()
        assert table.last_commit() == before, "the cursor stays"
    harness.export_once()
    harness.check()


def test_quarantine_that_the_driver_does_not_see(tmp_path: Path) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    from tidelog.pipelines import record_mapping

    harness = PipelineHarness(tmp_path)
    harness.fill(20)
    harness.mapping = record_mapping.new_mapping(StructType([StructField("n", LongType())]), "quarantine")

    def hide(name: str) -> None:
        if name == "commit":
            shutil.rmtree(Path(harness.table) / "_quarantine")

    harness.on_step = hide
    with pytest.raises(Unavailable, match=r"_quarantine/.* is not there"):
        harness.export_once()
