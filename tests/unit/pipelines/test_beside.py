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
from tests.unit.pipelines.world import FORMATS, Bench, Row, rows_of

from tidelog.errors import BadInput, Locked, Unavailable
from tidelog.pipelines import delta_table
from tidelog.pipelines.exporting import Export, Work
from tidelog.pipelines.runner import guarded, unwrapped
from tidelog.pipelines.sizing import Sizes
from tidelog.pipelines.tables import Format

T = TypeVar("T")
R = TypeVar("R")
FOREIGN = 1_000_000
STEPS = ("plan", "write files", "commit", "sync the names of staged files", "write the commit", "committed")


def seen(bench: Bench) -> list[Row]:
    return rows_of(DeltaTable(bench.table).to_pyarrow_table())


class Others:
    """Commits of other programs, at steps of an export that chance names."""

    def __init__(self, bench: Bench, random: Random) -> None:
        self._bench, self._random, self.commits, self.appended, self.gone = bench, random, 0, 0, set[int]()

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
    bench = Bench(tmp_path, "delta")
    bench.sizes = Sizes(file_bytes=1_200, age_ms=1, commit_bytes=2_400)
    others = Others(bench, Random(seed))
    bench.step = others
    with bench.export() as job:
        for number in range(4):
            bench.fill(40, start=40 * number)
            job.once()
    found = seen(bench)
    ours = [row for row in found if row[0] < FOREIGN]
    assert others.commits > 10
    assert ours == [row for row in bench.log_rows() if row[0] not in others.gone], "each once"
    assert len(found) - len(ours) == others.appended, "and what others appended"


def test_commits_of_others_without_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, "delta")
    bench.fill(20)
    bench.once()
    bench.fill(20, start=20)
    pauses: list[float] = []
    made = 0

    def step(name: str) -> None:
        nonlocal made
        if name == "write the commit":
            made += 1
            DeltaTable(bench.table).vacuum(0, dry_run=False, enforce_retention_duration=False)
            write_deltalake(bench.table, DeltaTable(bench.table).to_pyarrow_table().slice(0, 0), mode="append")

    bench.step = step
    with bench.export() as job:
        monkeypatch.setattr(job._table, "_pause", pauses.append)
        with pytest.raises(Locked, match=r"20 times in a row; nothing was committed"):
            job.once()
    assert (made, len(pauses)) == (delta_table.TRIES, delta_table.TRIES - 1)
    assert pauses[:3] == sorted(pauses[:3]), "it waits longer each time"
    assert max(pauses) <= 2
    bench.step = lambda _: None
    bench.once()
    bench.check()


def test_a_table_whose_columns_others_changed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "delta")
    bench.fill(20)
    bench.once()
    more = DeltaTable(bench.table).to_pyarrow_table().slice(0, 0).append_column("more", pa.array([], pa.string()))
    write_deltalake(bench.table, more, mode="append", schema_mode="merge")
    bench.fill(20, start=20)
    bench.once()
    assert seen(bench) == bench.log_rows()
    assert bench.reconcile().equal
    write_deltalake(bench.table, DeltaTable(bench.table).to_pyarrow_table().drop(["tag"]), mode="overwrite",
                    schema_mode="overwrite")  # fmt: skip
    bench.fill(20, start=40)
    with pytest.raises(BadInput, match=r"has no column 'tag' any more.*nothing was committed"):
        bench.once()


class Elsewhere:
    """Executors with disks of their own: what a task wrote is moved out of the driver's sight, or cut."""

    def __init__(self, path: str, harm: Callable[[Path], object]) -> None:
        self._path, self._harm = Path(path), harm

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        before = set(self._path.rglob("*.parquet"))
        found = [guarded(function, pickle.loads(pickle.dumps(task))) for task in tasks]
        for path in sorted(set(self._path.rglob("*.parquet")) - before)[-1:]:
            self._harm(path)
        return unwrapped(found)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("harm", [Path.unlink, _cut])
@pytest.mark.parametrize("format", FORMATS)
def test_files_that_the_driver_does_not_see_are_not_committed(
    format: Format, harm: Callable[[Path], object], tmp_path: Path
) -> None:
    bench = Bench(tmp_path, format)
    bench.fill(60)
    bench.once()
    bench.fill(60, start=60)
    work = bench.work()
    with bench.opened() as table:
        before = table.last()
        harmed = Work(Elsewhere(bench.table, harm), work.disk, work.clock, work.step)
        with (
            closing(Export(bench.options(), table, lambda _: bench.shape, harmed, bench.sizes)) as job,
            pytest.raises(Unavailable, match=r"which a task has written, .*nothing was committed.*all executors"),
        ):
            job.once()
        assert table.last() == before, "the cursor stays"
    bench.once()
    bench.check()


def test_quarantine_that_the_driver_does_not_see(tmp_path: Path) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    from tidelog.pipelines import columns

    bench = Bench(tmp_path)
    bench.fill(20)
    bench.shape = columns.shape_of(StructType([StructField("n", LongType())]), "quarantine")

    def hide(name: str) -> None:
        if name == "commit":
            shutil.rmtree(Path(bench.table) / "_quarantine")

    bench.step = hide
    with pytest.raises(Unavailable, match=r"_quarantine/.* is not there"):
        bench.once()
