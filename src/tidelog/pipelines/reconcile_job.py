"""Compare a table with its topic, range by range; show the first difference; rewrite ranges that differ.

    1  tasks      one per group of exported files with overlapping ranges, and per range between them
    2  compare    on executors, by block (`compare`)
    3  show       the first difference, on the driver: its seq, the log's row and the table's row
    4  repair     optional: one commit that adds the log's rows of the ranges that differ and replaces the files with
                  rows of these ranges; every other row of those files is copied
    5  verify     1 to 3 again after a repair; what still differs is reported

A record that was deleted from the log after its export is a difference, and a repair removes its row. Records that the
log lost are none, and their rows stay: below the floor (cap, age) they are compared with the commits of the table,
above it a power cut or damage took them. A repair keeps rows of other programs with seqs that the log does not have.

    rows after a repair  =  rows before it that `RowRemoval` does not select  +  the log's rows of the removed ranges

A removal selects only seqs that the log can have: from its floor to its end, without lost ones. Other rows are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.disk.interface import join
from tidelog.errors import BadInput, TopicNotFound
from tidelog.pipelines import compare, export_job, record_mapping, row_hash
from tidelog.pipelines.compare import ComparisonResult, ComparisonTask, in_ranges
from tidelog.pipelines.export_job import CommitTarget, ExportJob, JobContext, RangeFiles, attempt_id
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface, parquet
from tidelog.pipelines.table_formats.interface import (
    Commit,
    DataFile,
    KeptFile,
    SeqRanges,
    StagedFileMissing,
    Table,
    TableChanged,
    foreign_files,
    group_overlapping,
    merge_ranges,
)
from tidelog.pipelines.table_formats.parquet import ParquetFileWriter
from tidelog.spark import backends, plan
from tidelog.spark.backends.interface import ReadTask, TopicSnapshot
from tidelog.spark.options import Options
from tidelog.types import Ints


@dataclass(frozen=True)
class RowRemoval:
    """The rows that a repair removes: seqs in `ranges` and not in `lost_ranges`."""

    ranges: SeqRanges
    lost_ranges: SeqRanges = ()

    def removed_mask(self, seqs: Ints) -> NDArray[np.bool_]:
        return in_ranges(seqs, self.ranges) & ~in_ranges(seqs, self.lost_ranges)

    def remaining_ranges(self) -> SeqRanges:
        """Return `ranges` without `lost_ranges`."""
        found = []
        for first, stop in self.ranges:
            at = first
            for low, high in self.lost_ranges:
                if at < high and low < stop:
                    found.append((at, low))
                    at = max(at, high)
            found.append((at, stop))
        return merge_ranges(found)

    def may_affect(self, low: int, high: int) -> bool:
        """Whether a file with seqs from low to high may have rows to remove."""
        return any(first <= high and low < stop for first, stop in self.ranges)


@dataclass(frozen=True)
class ForeignFileTask:
    """Copy a file of another program, or one with rows outside of its range."""

    target: CommitTarget
    name: str
    number: int
    removal: RowRemoval


class CopyResult(NamedTuple):
    name: str
    dropped: int
    kept: KeptFile | None  # None: all rows were dropped, or none


def copy_foreign_file(task: ForeignFileTask) -> CopyResult:
    """Copy the rows that stay, with all columns. If none is dropped, the file itself stays."""
    target = task.target
    folder, slash, _ = task.name.rpartition("/")
    name = f"{folder}{slash}kept-{target.footer.run}-{task.number:05d}-{attempt_id():05d}.parquet"
    writer: ParquetFileWriter | None = None
    dropped = rows = 0
    try:
        for batch in parquet.read_batches(target.disk, target.path, [task.name], None, None, with_partitions=False):
            removed = task.removal.removed_mask(parquet.row_seqs(batch))
            dropped += int(removed.sum())
            kept = batch.filter(pa.array(~removed))
            rows += len(kept)
            if writer is None:
                writer = ParquetFileWriter(
                    target.disk, target.staged_path(name), batch.schema.remove_metadata(), compute_hash=False
                )
            writer.add(kept.replace_schema_metadata(None))
        if writer is None or not dropped or not rows:
            if writer is not None:
                writer.abandon()
            return CopyResult(task.name, dropped, None)
        size = writer.close(None)
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    return CopyResult(task.name, dropped, KeptFile(name, rows, size))


@dataclass(frozen=True)
class OwnFilesTask:
    """Replace the exported files of one range."""

    target: CommitTarget
    first: int
    stop: int
    names: tuple[str, ...]
    quarantine_names: tuple[str, ...]
    removal: RowRemoval
    rows: int  # that the range must have besides those of the log, in this file or in files of other programs
    hash: int


def copy_own_files(task: OwnFilesTask) -> list[DataFile]:
    """Copy the rows that stay into files of the same range, one a partition; there may be none. A file without rows
    carries the sums of the range."""
    target = task.target
    name = f"part-{task.first:020d}-{task.stop:020d}-{target.footer.run}-{attempt_id():05d}-kept.parquet"
    with RangeFiles(target, name) as files:
        for batch in _kept_batches(task, task.names):
            files.add(parquet.conform(batch, target.mapping.arrow))
        for batch in _kept_batches(task, task.quarantine_names):
            files.quarantine_file.add(batch.cast(record_mapping.QUARANTINE_SCHEMA))
        if not files.rows and not files.quarantine_file.rows and not task.rows:
            return []
        return files.close(task.first, task.stop, rows=task.rows, hash=task.hash)


def _kept_batches(task: OwnFilesTask, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    target = task.target
    for batch in parquet.read_batches(target.disk, target.path, names, task.first, task.stop):
        removed = task.removal.removed_mask(parquet.row_seqs(batch))
        if not removed.all():
            yield batch.filter(pa.array(~removed))


_ROW_TEXT_CHARS: Final = 200
_SEQ_MAX: Final = (1 << 63) - 1
_GAP_TASK_SEQS: Final = 1 << 22  # seqs of a task without files
_REPAIR_ATTEMPTS: Final = 5  # while other programs write the table
Progress = Callable[[int, int], None]


class Difference(NamedTuple):
    """The first difference between table and log."""

    seq: int | None  # None: not of a single seq, as for a changed file whose records the log lost
    log: str  # the log's row
    table: str


class Reconciled(NamedTuple):
    topic: str
    first: int
    stop: int  # the end of the table
    log_rows: int
    table_rows: int
    quarantined: int
    alone: int  # rows whose records the log lost; see `compare`
    hash: int  # of the table's rows
    pieces: int
    differing: SeqRanges  # ranges of tasks that differ
    foreign: tuple[str, ...]  # files of the table that no export wrote; their rows are compared like all others
    beyond: int  # rows of these files with seqs outside of the table's range
    difference: Difference | None
    repaired: int = 0  # ranges that were rewritten
    left: SeqRanges = ()  # after a repair: ranges that differ and that the log does not have
    left_beyond: int = 0  # after a repair: rows after the end of the table with seqs that the log does not have

    @property
    def equal(self) -> bool:
        return not self.differing and not self.beyond

    @property
    def whole(self) -> bool:
        """Whether table and log are the same now."""
        return self.equal or bool(self.repaired and not self.left and not self.left_beyond)


@dataclass(frozen=True)
class _Comparison:
    """One comparison of the whole table."""

    result: Reconciled
    differing: tuple[tuple[ComparisonTask, ComparisonResult], ...]
    lost_ranges: SeqRanges
    foreign: dict[str, tuple[int, int]]  # name → lowest and highest seq


class ReconcileJob:
    def __init__(self, options: Options, table: Table, context: JobContext) -> None:
        self._topic = options.subscribe[0]
        self._options = compare.comparison_options(options)
        self._given_options, self._table, self._context = options, table, context
        self._backend = backends.open_backend(options)

    def close(self) -> None:
        self._backend.close()

    def run(self, *, repair: bool = False, progress: Progress | None = None) -> Reconciled:
        plan.resolve_topics(self._backend, self._options)
        snapshot = self._backend.snapshot(self._topic)
        if snapshot is None:
            raise TopicNotFound(self._topic)
        last = self._table.last_commit()
        if last is None:
            return Reconciled(self._topic, 0, 0, 0, 0, 0, 0, 0, 0, (), (), 0, None)
        interface.check_same_topic(last, self._topic, snapshot.epoch, self._table.path)
        if repair:
            runner = self._context.runner
            export_job.drop_leftovers(self._table, self._backend, self._options, snapshot, runner)
        compared = self._compare(snapshot, last, progress)
        if not repair or compared.result.equal:
            return compared.result
        for left in range(_REPAIR_ATTEMPTS - 1, -1, -1):
            try:
                return self._repair_and_verify(snapshot, last, compared)
            except (TableChanged, StagedFileMissing):
                if not left:
                    raise
            # Another program changed the table while files were written, so it is compared again.
            last = self._table.last_commit()
            assert last is not None, "commits are never removed"
            compared = self._compare(snapshot, last, progress)
            if compared.result.equal:
                return compared.result
        raise AssertionError("the last attempt returns or raises")

    def _repair_and_verify(self, snapshot: TopicSnapshot, last: Commit, comparison: _Comparison) -> Reconciled:
        repaired = self._repair(snapshot, last, comparison)
        now = self._compare(snapshot, last, None).result
        return comparison.result._replace(repaired=repaired, left=now.differing, left_beyond=now.beyond)

    def _compare(self, snapshot: TopicSnapshot, last: Commit, progress: Progress | None) -> _Comparison:
        """Compare the whole table. Exported files with rows outside of their range are treated as foreign files."""
        strays: set[str] = set()
        while True:
            foreign = self._foreign_bounds(strays, last)
            tasks = self._comparison_tasks(snapshot, last, foreign, strays)
            results = self._run_comparisons(tasks, progress)
            found = {name for result in results for name in result.stray_files}
            if found <= strays:
                return self._summarize(snapshot, last, foreign, tasks, results)
            strays |= found

    def _foreign_bounds(self, strays: set[str], last: Commit) -> dict[str, tuple[int, int]]:
        """Return the least and the greatest seq of each foreign file; nothing if rows are read through the table's
        library."""
        found: dict[str, tuple[int, int]] = {}
        if self._table.scan() is not None:
            return found
        for name in (*foreign_files(self._table), *sorted(strays)):
            if last.transform is not None:
                found[name] = (0, -1)
                continue
            bounds = parquet.seq_bounds(self._table.disk, join(self._table.path, name))
            if bounds is not None:
                found[name] = bounds[1:]
        return found

    def _summarize(
        self,
        snapshot: TopicSnapshot,
        last: Commit,
        foreign: dict[str, tuple[int, int]],
        tasks: Sequence[ComparisonTask],
        results: Sequence[ComparisonResult],
    ) -> _Comparison:
        differing = tuple(
            (task, result)
            for task, result in zip(tasks, results, strict=True)
            if result.differing_blocks or _only_commit_disagrees(task, result)
        )
        first = min((task.first for task in tasks), default=last.stop)
        beyond = 0 if last.transform is not None else self._count_beyond(foreign, first, last.stop)
        summary = Reconciled(
            self._topic,
            first,
            last.stop,
            sum(each.log_rows for each in results),
            sum(each.table_rows for each in results) + beyond,
            sum(file.bad for file in self._table.own_files()),
            sum(each.table_only for each in results),
            sum(each.table_hash for each in results) & row_hash.MASK_64,
            len(tasks),
            tuple((task.first, task.stop) for task, _ in differing),
            tuple(foreign),
            beyond,
            self._first_difference(snapshot, differing) or _beyond_difference(tuple(foreign), beyond),
        )
        lost_ranges = tuple(lost for result in results for lost in result.lost_ranges)
        return _Comparison(summary, differing, lost_ranges, foreign)

    def _count_beyond(self, foreign: dict[str, tuple[int, int]], first: int, stop: int) -> int:
        scan = self._table.scan()
        if scan is not None:
            return scan.count_outside(first, stop)
        names = [name for name, (low, high) in foreign.items() if low < first or high >= stop]
        found = 0
        for batch in parquet.read_batches(self._table.disk, self._table.path, names, None, None):
            seqs = parquet.row_seqs(batch)
            found += int(((seqs < first) | (seqs >= stop)).sum())
        return found

    def _run_comparisons(self, tasks: Sequence[ComparisonTask], progress: Progress | None) -> list[ComparisonResult]:
        """Run a few tasks at a time, for the progress bar."""
        found: list[ComparisonResult] = []
        step = max(len(tasks) // 20, 8)
        for at in range(0, len(tasks), step):
            found += self._context.runner.run(compare.compare_range, tasks[at : at + step])
            if progress is not None:
                progress(len(found), len(tasks))
        return found

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────

    def _comparison_tasks(
        self, snapshot: TopicSnapshot, last: Commit, foreign: dict[str, tuple[int, int]], strays: set[str]
    ) -> list[ComparisonTask]:
        made = self._table.commits()
        self._eras = interface.eras_of(last)
        first = (
            min((commit.first for commit in made), default=last.stop) if last.table_first is None else last.table_first
        )
        committed = interface.active_files(made)
        if last.transform is not None:
            return self._transformed_tasks(snapshot, first, last, committed, foreign)
        held = [] if self._table.scan() is not None else [x for x in self._table.own_files() if x.name not in strays]
        there = {file.name for file in held}
        # Quarantine outlives an exported file that another program replaced.
        bad = [file for file in committed if file.name not in there and file.bad_name is not None]
        found, at = [], first
        for group in group_overlapping(held, _range_key):
            found += self._tasks_between(snapshot, at, group[0].first, foreign, bad)
            stop = max(file.stop for file in group)
            found.append(self._comparison_task(snapshot, group[0].first, stop, group, foreign, bad))
            at = max(at, stop)
        return [*found, *self._tasks_between(snapshot, at, last.stop, foreign, bad)]

    def _transformed_tasks(
        self,
        snapshot: TopicSnapshot,
        first: int,
        last: Commit,
        committed: Sequence[DataFile],
        foreign: dict[str, tuple[int, int]],
    ) -> list[ComparisonTask]:
        """Return the tasks for rows that went through a function: their sums are known by commit, or for the whole
        table if another program wrote files of it."""
        scan, there = self._table.scan(), set(self._table.visible_files())
        if scan is not None or foreign or any(file.name not in there for file in committed):
            whole = self._comparison_task(snapshot, first, last.stop, committed, {}, (), is_transformed=True)
            return [replace(whole, other_names=tuple(self._table.visible_files()))] if committed else []
        return [
            replace(
                self._comparison_task(
                    snapshot, group[0].first, max(file.stop for file in group), group, {}, (), is_transformed=True
                ),
                other_names=tuple(file.name for file in group),
            )
            for group in group_overlapping(committed, _range_key)
        ]

    def _tasks_between(
        self,
        snapshot: TopicSnapshot,
        first: int,
        stop: int,
        foreign: dict[str, tuple[int, int]],
        bad: Sequence[DataFile],
    ) -> list[ComparisonTask]:
        """Return the tasks for seqs without an exported file."""
        changes = [era.first for era in self._eras if first < era.first < stop]
        parts = zip([first, *changes], [*changes, stop], strict=True)
        bounds = [
            (at, min(at + _GAP_TASK_SEQS, high)) for low, high in parts for at in range(low, high, _GAP_TASK_SEQS)
        ]
        return [self._comparison_task(snapshot, low, high, (), foreign, bad) for low, high in bounds]

    def _comparison_task(
        self,
        snapshot: TopicSnapshot,
        first: int,
        stop: int,
        data_files: Sequence[DataFile],
        foreign: dict[str, tuple[int, int]],
        bad: Sequence[DataFile],
        *,
        is_transformed: bool = False,
    ) -> ComparisonTask:
        near = [file for file in bad if file.first < stop and first < file.stop]
        return ComparisonTask(
            topic=self._topic,
            path=self._table.path,
            disk=self._table.disk,
            mapping=self._mapping_at(first),
            options=self._options,
            first=first,
            stop=stop,
            evict_floor=snapshot.evict_floor,
            next_seq=snapshot.next_seq,
            read_tasks=() if is_transformed else self._plan_range(snapshot, first, stop),
            other_names=tuple(name for name, (least, most) in foreign.items() if least < stop and first <= most),
            quarantine_names=tuple(file.bad_name for file in (*data_files, *near) if file.bad_name is not None),
            committed_files=tuple(data_files),
            is_transformed=is_transformed,
            scan=self._table.scan(),
        )

    def _mapping_at(self, seq: int) -> RecordMapping:
        era = interface.era_at(self._eras, seq)
        return record_mapping.mapping_from_commit(era.schema, era.shape)

    def _era_starts(self) -> list[int]:
        return [0, *(era.first for era in self._eras[1:])]

    def _era_start(self, seq: int) -> int:
        return max(start for start in self._era_starts() if start <= seq)

    def _split_by_era(self, ranges: SeqRanges) -> list[tuple[int, SeqRanges]]:
        """Return the parts of ranges in each era, with the first seq of the era."""
        found = []
        stops = [*(era.first for era in self._eras[1:]), _SEQ_MAX]
        for number, (era, end) in enumerate(zip(self._eras, stops, strict=True)):
            low = era.first if number else 0
            parts = merge_ranges((max(first, low), min(stop, end)) for first, stop in ranges)
            if parts:
                found.append((low, parts))
        return found

    def _plan_range(self, snapshot: TopicSnapshot, first: int, stop: int) -> tuple[ReadTask, ...]:
        return compare.plan_range(self._backend, self._options, snapshot, first, stop)

    # ── the first difference ──────────────────────────────────────────────────────────────────

    def _first_difference(
        self, snapshot: TopicSnapshot, differing: Sequence[tuple[ComparisonTask, ComparisonResult]]
    ) -> Difference | None:
        for task, result in differing:
            if result.differing_blocks:
                return self._row_difference(snapshot, task, *result.differing_blocks[0])
            if result.changed_files:
                rows = sum(file.rows for file in task.committed_files)
                return Difference(
                    None,
                    f"{rows:,} rows by the commit of seqs {task.first} to {task.stop - 1}, which it lost since",
                    f"{result.table_rows:,} rows or other ones in {', '.join(result.changed_files)}",
                )
        return None

    def _row_difference(self, snapshot: TopicSnapshot, task: ComparisonTask, first: int, stop: int) -> Difference:
        names = (*(file.name for file in task.committed_files), *task.other_names)
        read_tasks = self._plan_range(snapshot, first, stop)
        near = replace(task, first=first, stop=stop, committed_files=(), other_names=names, read_tasks=read_tasks)
        ours = _rows_by_seq([rows.table for rows, _ in compare.read_log_rows(near)])
        theirs = _rows_by_seq(list(compare.read_table_rows(near)))
        for seq in sorted({*ours, *theirs}):
            here, there = ours.get(seq, []), theirs.get(seq, [])
            if sorted(row.hash for row in here) != sorted(row.hash for row in there):
                return Difference(seq, _format_rows(here, "log"), _format_rows(there, "table"))
        return Difference(None, f"other records of seqs {first} to {stop - 1} that do not fit", "its quarantine")

    # ── repair ────────────────────────────────────────────────────────────────────────────────

    def _repair(self, snapshot: TopicSnapshot, last: Commit, comparison: _Comparison) -> int:
        """Rewrite the ranges that the log still has, in one commit, and return how many. Other rows stay."""
        if self._table.format == "delta" and self._table.scan() is not None:
            raise BadInput(
                f"{self._table.path} has deletion vectors, mapped column names or partition columns: it can be "
                "compared and not repaired; nothing was changed. Have its own engine rewrite it without them (REORG "
                "TABLE … APPLY (PURGE), OPTIMIZE), or export into another table"
            )
        again = [
            (task, result)
            for task, result in comparison.differing
            if result.differing_blocks and not task.is_transformed
        ]
        ranges = merge_ranges(part for task, result in again for part in _ranges_to_rewrite(snapshot, task, result))
        after = ((max(last.stop, snapshot.evict_floor), snapshot.next_seq),) if comparison.result.beyond else ()
        lost = [
            *comparison.lost_ranges,
            *(part for bounds in after for part in self._lost_after_end(snapshot, *bounds, comparison.foreign)),
        ]
        removal = RowRemoval(merge_ranges([*ranges, *after]), merge_ranges(lost))
        if not removal.ranges:
            return 0
        mapping = record_mapping.mapping_from_commit(last.schema, last.shape)
        options = replace(self._given_options, on_gap="fail")  # records lost from here on would be missing
        with closing(ExportJob(options, self._table, lambda _: mapping, self._context)) as export:
            target = export.commit_target(snapshot, mapping)
            targets = {low: export.commit_target(snapshot, self._mapping_at(low)) for low in self._era_starts()}
            written = tuple(
                file
                for low, parts in self._split_by_era(ranges)
                for file in export.write_files(snapshot, targets[low], parts)
            )
            own = [(task, result) for task, result in again if task.committed_files]
            kept = self._context.runner.run(
                copy_own_files,
                [_own_files_task(targets[self._era_start(task.first)], task, result, removal) for task, result in own],
            )
            near = [name for name, (low, high) in comparison.foreign.items() if removal.may_affect(low, high)]
            tasks = [ForeignFileTask(target, name, number, removal) for number, name in enumerate(near)]
            results: list[CopyResult] = self._context.runner.run(copy_foreign_file, tasks)
            copied = [result for result in results if result.dropped]
            replaced = removal.remaining_ranges() if self._table.format == "iceberg" else ()
            if not written and not own and not copied and not replaced:
                return 0
            commit = Commit(
                self._topic,
                snapshot.epoch,
                ranges[0][0] if ranges else last.stop,
                last.stop,
                (*written, *(file for files in kept for file in files)),
                mapping.schema,
                mapping.options_json,
                removed=tuple(file.name for task, _ in own for file in task.committed_files),
                repair=True,
                table_first=last.table_first,
                ts_ms=self._context.clock.now_us() // 1000,
                kept=tuple(each.kept for each in copied if each.kept is not None),
                retired=tuple(each.name for each in copied),
                replaced=replaced,
                eras=last.eras,
            )
            self._context.on_step("commit")
            self._table.commit(commit)
            self._context.on_step("committed")
        return len(again) or len(copied) or len(replaced)

    def _lost_after_end(
        self, snapshot: TopicSnapshot, first: int, stop: int, foreign: dict[str, tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield seqs after the end of the table that foreign files have and the log lost: no export restores them."""
        near = [task for task in self._tasks_between(snapshot, first, stop, foreign, ()) if task.other_names]
        for found in self._context.runner.run(compare.find_lost_ranges, near):
            yield from found


def _range_key(file: DataFile) -> tuple[int, int, str]:
    return file.first, file.stop, file.name


def _ranges_to_rewrite(
    snapshot: TopicSnapshot, task: ComparisonTask, result: ComparisonResult
) -> list[tuple[int, int]]:
    """Return what a repair rewrites of a task: its range if there are exported files, else the blocks that differ."""
    ranges = [(task.first, task.stop)] if task.committed_files else list(result.differing_blocks)
    return [(max(first, snapshot.evict_floor), min(stop, snapshot.next_seq)) for first, stop in ranges]


def _own_files_task(
    target: CommitTarget, task: ComparisonTask, result: ComparisonResult, removal: RowRemoval
) -> OwnFilesTask:
    names = tuple(file.name for file in task.committed_files)
    return OwnFilesTask(
        target, task.first, task.stop, names, task.quarantine_names, removal, *_expected_rows(task, result)
    )


def _expected_rows(task: ComparisonTask, result: ComparisonResult) -> tuple[int, int]:
    """Return rows and hash that a range must have besides those of the log: the table's own, if its files are as
    committed. Else the commits decide: rows below the floor may be wrong, and the next comparison must report it."""
    if not result.changed_files or task.first >= task.evict_floor:
        return result.table_only, result.table_only_hash
    rows = sum(file.rows for file in task.committed_files) - result.log_rows
    return max(rows, 0), (sum(file.hash for file in task.committed_files) - result.log_hash) & row_hash.MASK_64


def _only_commit_disagrees(task: ComparisonTask, result: ComparisonResult) -> bool:
    """Whether only the commit shows a difference: the log has lost a part of the range."""
    return bool(result.changed_files) and (task.is_transformed or task.first < task.evict_floor)


def _beyond_difference(foreign: Sequence[str], rows: int) -> Difference | None:
    if not rows:
        return None
    return Difference(None, "no such seqs", f"{rows:,} rows beyond the last commit, in {', '.join(foreign[:3])}")


class _Row(NamedTuple):
    hash: int
    fields: dict[str, Any]


def _rows_by_seq(batches: list[pa.RecordBatch]) -> dict[int, list[_Row]]:
    found: dict[int, list[_Row]] = {}
    for batch in batches:
        for hashed, fields in zip(row_hash.hash_rows(batch).tolist(), batch.to_pylist(), strict=True):
            found.setdefault(fields["seq"], []).append(_Row(hashed, fields))
    return found


def _format_rows(rows: Sequence[_Row], where: str) -> str:
    if not rows:
        return "nothing: it was deleted, or never there" if where == "log" else "nothing"
    fields = {name: value for name, value in rows[0].fields.items() if name != "seq" and value is not None}
    text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    text = text if len(text) <= _ROW_TEXT_CHARS else f"{text[:_ROW_TEXT_CHARS]} …"
    return text if len(rows) == 1 else f"{len(rows)} rows, the first of them {text}"
