"""A repair never removes a row that the log cannot give back, and leaves the rows that the log has as the log has them.

Method: a seeded history of exports, appends, deletes and retention of the log, and of what other programs do to a table
(compaction, delete, update, append, VACUUM, RESTORE; for a directory of Parquet files the same with files), repairs in
between. Around every repair the table is read by a reader that shares no code with the library:

    seqs that the log cannot give back     the same rows before and after, as often
    seqs that the table stands for         the log's rows, each once
    seqs after them that the log has       none: the next export brings them
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import LongType, StructField, StructType
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, Row, table_rows

from tidelog.errors import Damaged, GapFound
from tidelog.pipelines import export_job, reconcile_job
from tidelog.pipelines.compare import ComparisonResult, ComparisonTask
from tidelog.pipelines.export_job import Sizes
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats.interface import Commit, DataFile, Format
from tidelog.pipelines.table_formats.parquet import FileFooter
from tidelog.spark.backends.directory import DirectoryBackend
from tidelog.spark.backends.interface import TopicSnapshot

Op = Callable[[], str]


class History:
    """One table, its topic, and other programs that write the table."""

    def __init__(self, root: Path, format: Format, random: Random) -> None:
        self.bench, self.random = PipelineHarness(root, format), random
        self.bench.sizes = Sizes(file_bytes=1_500, age_ms=1_000, commit_bytes=4_500)
        self.written = self.files = self.repairs = self.copied = 0
        self.said: list[str] = []

    def sight(self) -> TopicSnapshot:
        with closing(DirectoryBackend(self.bench.data)) as place:
            found = place.snapshot("orders")
        assert found is not None
        return found

    def rows(self) -> list[Row]:
        if self.bench.format == "delta":
            return table_rows(DeltaTable(self.bench.table).to_pyarrow_table())
        return sorted(
            (row for path in self.visible() for row in table_rows(pq.read_table(path))),
            key=lambda row: (row[0], str(row)),
        )

    def visible(self) -> list[Path]:
        return sorted(path for path in Path(self.bench.table).glob("*.parquet") if path.name[0] not in "_.")

    # ── the log ───────────────────────────────────────────────────────────────────────────────

    def fill(self) -> str:
        count = self.random.randint(10, 60)
        self.bench.fill(count, start=self.written)
        self.written += count
        return f"append {count}"

    def export(self) -> str:
        self.bench.export_once(onGap="skip")
        return "export"

    def delete(self) -> str:
        seqs = sorted(self.random.sample(range(1, self.written + 1), min(3, self.written)))
        with self.bench.engine() as engine:
            if self.random.random() < 0.3:
                engine.topic("orders").delete(before_seq=seqs[0])
                return f"delete before {seqs[0]}"
            engine.topic("orders").delete(seqs=seqs)
        return f"delete {seqs}"

    def retain(self) -> str:
        cap = self.random.randint(5, max(self.written, 6))
        with self.bench.engine() as engine:
            engine.topic("orders", cap_records=cap)
            engine.checkpoint()
        return f"cap {cap}"

    # ── others ────────────────────────────────────────────────────────────────────────────────

    def compact(self) -> str:
        if self.bench.format == "delta":
            DeltaTable(self.bench.table).optimize.compact()
            return "OPTIMIZE"
        paths = self.random.sample(found := self.visible(), min(len(found), self.random.randint(2, 5)))
        if paths:
            self._replace(paths, pa.concat_tables([pq.read_table(path) for path in paths]))
        return f"compact {len(paths)} files"

    def others_delete(self) -> str:
        low = self.random.randint(1, self.written)
        high = low + self.random.randint(0, 8)
        if self.bench.format == "delta":
            DeltaTable(self.bench.table).delete(f"seq >= {low} AND seq <= {high}")
        else:
            self._change(lambda table: table.filter(pc.or_(pc.less(table["seq"], low), pc.greater(table["seq"], high))))
        return f"others delete {low} to {high}"

    def others_update(self) -> str:
        low = self.random.randint(1, self.written)
        if self.bench.format == "delta":
            DeltaTable(self.bench.table).update({"tag": "'changed'"}, predicate=f"seq >= {low} AND seq < {low + 5}")
            return f"others update {low}"

        def changed(table: pa.Table) -> pa.Table:
            mine = pc.and_(pc.greater_equal(table["seq"], low), pc.less(table["seq"], low + 5))
            tags = pc.if_else(mine, "changed", table["tag"])
            return table.set_column(table.schema.get_field_index("tag"), table.schema.field("tag"), tags)

        self._change(changed)
        return f"others update {low}"

    def others_append(self) -> str:
        paths = self.bench.files() if self.bench.format == "delta" else self.visible()
        if not paths:
            return "nothing to copy"
        rows = pq.read_table(self.random.choice(paths))
        rows = rows.slice(self.random.randrange(max(len(rows), 1)), self.random.randint(1, 4))
        kind = self.random.choice(["copies", "seqs that come", "seqs beyond"])
        if kind != "copies":
            start = self.written + 1 + (self.random.randint(0, 20) if kind == "seqs that come" else 1_000_000)
            seqs = pa.array(range(start, start + len(rows)), pa.int64())
            rows = rows.set_column(rows.schema.get_field_index("seq"), rows.schema.field("seq"), seqs)
        if self.bench.format == "delta":
            write_deltalake(self.bench.table, rows.replace_schema_metadata(None), mode="append")
        else:
            self._replace([], rows)
        return f"others append {len(rows)} {kind}"

    def vacuum(self) -> str:
        if self.bench.format == "delta":
            table = DeltaTable(self.bench.table)
            table.vacuum(0, dry_run=False, enforce_retention_duration=False)
            return "VACUUM"
        for path in self.random.sample(found := self.visible(), min(len(found), 1)):
            path.unlink()
        return "a file is removed"

    def restore(self) -> str:
        if self.bench.format == "parquet":
            return "nothing"
        table = DeltaTable(self.bench.table)
        if table.version() < 2:
            return "nothing"
        try:
            table.restore(table.version() - 1)
        except Exception as error:  # a file of that version may be gone
            return f"RESTORE fails: {type(error).__name__}"
        return "RESTORE"

    def _change(self, change: Callable[[pa.Table], pa.Table]) -> None:
        for path in self.visible():
            before = pq.read_table(path)
            after = change(before)
            if not after.equals(before):
                self._replace([path], after)

    def _replace(self, paths: list[Path], table: pa.Table) -> None:
        self.files += 1
        for path in paths:
            path.unlink()
        pq.write_table(table.replace_schema_metadata(None), Path(self.bench.table) / f"other-{self.files}.parquet")

    # ── judging ───────────────────────────────────────────────────────────────────────────────

    def repair(self) -> str:
        sight = self.sight()
        with self.bench.open_table(write=False) as table:
            last = table.last_commit()
        assert last is not None
        before = self.rows()
        looked = self.bench.reconcile()
        done = self.bench.reconcile(repair=True)
        assert looked == done._replace(repaired=0, left=(), left_beyond=0), "looking changes nothing"
        after, log, stop = self.rows(), self.bench.log_rows(), min(last.stop, sight.next_seq)
        said = " | ".join(self.said)

        def outside(rows: list[Row]) -> Counter[Row]:
            return Counter(row for row in rows if not sight.evict_floor <= row[0] < sight.next_seq)

        assert outside(after) == outside(before), f"a row that the log cannot give back: {said}"
        expected = Counter(row for row in log if row[0] < stop)
        assert Counter(row for row in after if sight.evict_floor <= row[0] < stop) == expected, f"not the log's: {said}"
        come = range(max(stop, sight.evict_floor), sight.next_seq)
        assert not [row for row in after if row[0] in come], f"rows that come again: {said}"
        was_equal = sight.evict_floor <= 1 and Counter(before) == expected
        assert looked.equal or not was_equal, f"a difference that is none: {said}"
        assert all(first < sight.evict_floor for first, _ in done.left), f"something is left that the log has: {said}"
        again = self.bench.reconcile()
        assert (again.differing, again.beyond) == (done.left if done.repaired else looked.differing, again.beyond), said
        self.repairs += done.repaired > 0
        self.copied += done.repaired > 0 and bool(outside(after))
        return f"repair {done.repaired}"

    def run(self, steps: int) -> None:
        self.said += [self.fill(), self.export()]
        ops: list[tuple[int, Op]] = [
            (3, self.fill),
            (4, self.export),
            (2, self.delete),
            (1, self.retain),
            (3, self.compact),
            (2, self.others_delete),
            (2, self.others_update),
            (2, self.others_append),
            (1, self.vacuum),
            (1, self.restore),
            (4, self.repair),
        ]
        for _ in range(steps):
            (op,) = self.random.choices([op for _, op in ops], [weight for weight, _ in ops])
            self.said.append(op())
        self.said.append(self.repair())


def judge(root: Path, format: Format, seed: str, *, steps: int) -> History:
    history = History(root, format, Random(seed))
    history.run(steps)
    return history


def _judge_some(root: Path, format: Format) -> list[History]:
    return [judge(root / str(number), format, f"suite {format} {number}", steps=14) for number in range(8)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_repair_keeps_what_the_log_cannot_give_back(format: Format, tmp_path: Path) -> None:
    done = _judge_some(tmp_path, format)
    assert sum(each.repairs for each in done) > 5, "repairs that had something to do"
    assert sum(each.copied for each in done) > 2, "beside rows that the log does not have"


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(60))
@pytest.mark.parametrize("format", FORMATS)
def test_a_repair_keeps_what_the_log_cannot_give_back_long(format: Format, part: int, tmp_path: Path) -> None:
    for number in range(3):
        judge(tmp_path / str(number), format, f"sweep {format} {part} {number}", steps=40)


@pytest.mark.parametrize("format", FORMATS)
def test_a_compacted_table_whose_log_was_cut_is_not_emptied(format: Format, tmp_path: Path) -> None:
    """Export 200 rows, OPTIMIZE, retention drops 1 to 150, delete one record: 199 rows are left, not none."""
    history = History(tmp_path, format, Random(1))
    harness = history.bench
    harness.fill(200)
    harness.export_once()
    if format == "delta":
        history.compact()
    else:
        history._replace(history.visible(), pa.concat_tables([pq.read_table(path) for path in history.visible()]))
    with harness.engine() as engine:
        engine.topic("orders", cap_records=50)
        engine.topic("orders").delete(seqs=[180])
        engine.checkpoint()
    found = harness.reconcile(repair=True)
    assert (found.repaired, found.left, found.whole) == (1, (), True)
    assert [row[0] for row in history.rows()] == [seq for seq in range(1, 201) if seq != 180]
    assert harness.reconcile().equal


def _dropped(task: reconcile_job.ForeignFileTask) -> reconcile_job.CopyResult:
    return reconcile_job.CopyResult(task.name, 1, None)


def _unclipped(_: TopicSnapshot, piece: ComparisonTask, seen: ComparisonResult) -> list[tuple[int, int]]:
    return [(piece.first, piece.stop)] if piece.committed_files else list(seen.differing_blocks)


@pytest.mark.parametrize(
    ("where", "name", "planted"),
    [(reconcile_job, "copy_foreign_file", _dropped), (reconcile_job, "_ranges_to_rewrite", _unclipped)],
    ids=["files_of_others_are_disowned", "ranges_below_the_floor_are_cut"],
)
def test_planted_bugs_are_found(
    where: ModuleType, name: str, planted: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, planted)
    with pytest.raises((AssertionError, GapFound)):
        _judge_some(tmp_path, "delta")


@pytest.mark.parametrize("format", FORMATS)
def test_records_that_a_power_cut_took_stay_in_the_table(format: Format, tmp_path: Path) -> None:
    """Seqs above the floor that were neither deleted nor evicted: the log pads them, and the table is the last copy."""
    harness = PipelineHarness(tmp_path, format)
    lose = _losing(harness, tmp_path)
    harness.export_once()
    before = harness.table_rows()
    lose()
    with harness.engine() as engine:
        engine.topic("orders").delete(seqs=[5, 66])
    log = harness.log_rows()
    assert len(log) < 70, "records were lost"
    found = harness.reconcile(repair=True)
    assert (found.repaired > 0, found.whole) == (True, True)
    assert harness.table_rows() == [row for row in before if row[0] not in (5, 66)]
    again = harness.reconcile()
    assert (again.equal, again.alone) == (True, 80 - 2 - len(log))
    harness.fill(20, start=80)
    harness.export_once()
    assert harness.reconcile().equal


def test_a_repair_of_a_file_across_the_floor_keeps_the_alarm_below_it(tmp_path: Path) -> None:
    """Rows below the floor that were changed cannot be made again, and a repair of the rest does not hide that."""
    for change, left in ((False, 0), (True, 1)):
        harness = PipelineHarness(tmp_path / str(change), "delta")
        harness.sizes = Sizes(file_bytes=1 << 20, age_ms=1_000, commit_bytes=1 << 20)
        harness.fill(60)
        harness.export_once()
        with harness.engine() as engine:
            engine.topic("orders", cap_records=30)
            engine.topic("orders").delete(seqs=[45])
            engine.checkpoint()
        if change:
            (file,) = harness.files()
            table = pq.read_table(file)
            pq.write_table(table.filter(pc.not_equal(table["seq"], 7)), file)
        before = harness.table_rows()
        found = harness.reconcile(repair=True)
        assert (found.repaired, len(found.left)) == (1, left)
        assert harness.table_rows() == [row for row in before if row[0] != 45]
        assert harness.reconcile().equal is not change


def test_what_is_lost_while_a_repair_runs_stops_it(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path, "delta")
    harness.fill(100)
    harness.export_once()
    with harness.engine() as engine:
        engine.topic("orders").delete(seqs=[20])

    def step(name: str) -> None:
        if name == "plan":
            with harness.engine() as engine:
                engine.topic("orders", cap_records=10)
                engine.checkpoint()

    harness.on_step = step
    before = harness.table_rows()
    with pytest.raises(GapFound):
        harness.reconcile(repair=True)
    assert harness.table_rows() == before


def test_a_table_that_others_change_while_it_is_repaired(tmp_path: Path) -> None:
    """OPTIMIZE takes the file away that a repair replaces: the repair is planned again."""
    harness = PipelineHarness(tmp_path, "delta")
    harness.fill(200)
    harness.export_once()
    with harness.engine() as engine:
        engine.topic("orders").delete(seqs=[20, 150])
    left = [2]

    def step(name: str) -> None:
        if name == "write the commit" and left[0]:
            left[0] -= 1
            DeltaTable(harness.table).optimize.compact()
            rows = pa.table({"seq": pa.array([5_000 + left[0]], pa.int64())})
            write_deltalake(harness.table, rows, mode="append", schema_mode="merge")

    harness.on_step = step
    found = harness.reconcile(repair=True)
    assert (left, found.left, found.left_beyond) == ([0], (), 2)
    assert [row for row in harness.table_rows() if row[0] < 5_000] == harness.log_rows()


def test_files_after_a_hole_are_not_removed_where_the_log_lost_their_records(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path)
    harness.fill(200)
    harness.export_once()
    shutil.rmtree(Path(harness.table) / "_tidelog")
    harness.files()[1].unlink()
    before = harness.files()
    with harness.engine() as engine:
        engine.topic("orders", cap_records=20)
        engine.checkpoint()
    for act in (lambda: harness.export_once(onGap="skip"), lambda: harness.reconcile(repair=True)):
        with pytest.raises(Damaged, match=r"a file before it is missing.*nothing was changed"):
            act()
        assert harness.files() == before


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_function_are_compared_with_their_commits_and_not_repaired(format: Format, tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path, format)
    harness.fill(60)
    shape = RecordMapping(StructType([StructField("n", LongType())]).json())
    with harness.open_table() as table:
        footer = FileFooter("orders", 1, 1, 61, "1", shape.schema, shape.options_json, transform="shop:by_day")
        target = export_job.CommitTarget(table.path, format, shape, footer, harness.disk)
        batches = [pa.RecordBatch.from_pydict({"n": list(range(at, at + 30))}) for at in (0, 30)]
        files = [
            file
            for number, batch in enumerate(batches)
            for file in msgspec.json.decode(
                export_job.write_frame_partition(replace_run(target, number), 1, 61, [batch], 0, 0), type=list[DataFile]
            )
        ]
        table.commit(
            Commit("orders", 1, 1, 61, tuple(files), shape.schema, shape.options_json, transform="shop:by_day")
        )
    assert harness.reconcile().equal
    visible = harness.files()
    if format == "delta":
        DeltaTable(harness.table).optimize.compact()
        assert harness.reconcile().equal, "the sums are those of the commits"
    first = visible[0]
    if format == "parquet":
        pq.write_table(pq.read_table(first).slice(1), first)
    else:
        DeltaTable(harness.table).delete("n = 3")
    found = harness.reconcile(repair=True)
    assert (found.equal, found.repaired, found.whole, len(found.left)) == (False, 0, False, 1)
    assert harness.read_table().num_rows == 59


def replace_run(target: export_job.CommitTarget, number: int) -> export_job.CommitTarget:
    return replace(target, footer=msgspec.structs.replace(target.footer, run=str(number)))


def test_rows_of_others_after_the_table_that_the_log_lost_stay(tmp_path: Path) -> None:
    """Seqs that the table does not stand for yet: the next export brings those that the log has, and no others."""
    harness = PipelineHarness(tmp_path)
    lose = _losing(harness, tmp_path)
    harness.export_once()
    lose()
    with harness.engine() as engine:
        made = engine.topic("orders").append([{"n": 80, "text": "x"}])
    rows = pq.read_table(harness.files()[0]).slice(0, 4)
    seqs = pa.array([100, 101, made.first_seq, made.first_seq + 50], pa.int64())
    rows = rows.set_column(rows.schema.get_field_index("seq"), rows.schema.field("seq"), seqs)
    pq.write_table(rows.replace_schema_metadata(None), Path(harness.table) / "other.parquet")
    found = harness.reconcile(repair=True)
    assert (found.beyond, found.repaired, found.left_beyond, found.whole) == (4, 1, 3, False)
    stay = [100, 101, made.first_seq + 50]
    assert [row[0] for row in harness.table_rows() if row[0] > 80] == stay
    harness.export_once()
    assert [row[0] for row in harness.table_rows() if row[0] > 80] == [100, 101, made.first_seq, made.first_seq + 50]


def test_files_after_a_hole_are_not_removed_where_a_power_cut_took_their_records(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path)
    harness.sizes = Sizes(file_bytes=1_500, age_ms=1_000, commit_bytes=4_500)
    lose = _losing(harness, tmp_path)
    harness.export_once()
    lose()
    shutil.rmtree(Path(harness.table) / "_tidelog")
    harness.files()[1].unlink()
    before = harness.files()
    for act in (harness.export_once, lambda: harness.reconcile(repair=True)):
        with pytest.raises(Damaged, match=r"a file before it is missing.*nothing was changed"):
            act()
        assert harness.files() == before


def _losing(harness: PipelineHarness, root: Path) -> Callable[[], None]:
    """Write 80 records; the function that this returns takes the last ten away, as a power cut does."""
    harness.fill(60)
    with harness.engine() as engine:
        topic = engine.topic("orders")
        for number in range(60, 80):
            topic.append([{"n": number, "text": "x"}])
        shutil.copytree(harness.data, root / "killed")

    def lose() -> None:
        shutil.rmtree(harness.data)
        (wal,) = [path for path in (root / "killed").glob("wal/*/wal-*.log") if b'"n":70' in path.read_bytes()]
        wal.write_bytes(wal.read_bytes().replace(b'{"n":70', b'{"n":7\xff'))
        shutil.move(root / "killed", harness.data)

    return lose
