"""Table = log, proven range by range; the first difference shown row by row; ranges that differ made again.

    1  pieces     files of ours whose ranges overlap are one; so is the range between
    2  compare    on executors, by block (`compare`)
    3  look       at the first block that differs, on the driver: which seq, what the log has, what the table has
    4  repair     where that is asked for: one commit that adds the log's rows of the ranges that differ and replaces
                  the files which hold rows of them; every other row of those files is copied (`repairing`)
    5  again      1 to 3 once more after a repair: what is left is reported

A record that was deleted from the log since it was exported is a difference too, and repair takes it out of the table.
What the log lost is not, and stays in the table: rows below its floor (a cap, age), which are compared with the commits
of the table, and rows of seqs above it whose records a power cut or damage took. Nor does a repair remove rows that
others wrote with seqs that the log does not have.

What a repair does on executors: copy the rows that stay out of files that are replaced.

    rows of the table after a repair  =  rows before it whose seqs are not in `Cut`  +  the log's rows of the cut ranges

A cut is never outside of what the log can produce: seqs from its floor to its end, without those whose records it lost.
So a row that the log cannot give back is copied, whatever file it is in.
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
from tidelog.pipelines.export_job import CommitTarget, ExportJob, FilePair, JobContext, attempt_id
from tidelog.pipelines.table_formats import commits, delta, parquet_files
from tidelog.pipelines.table_formats.commits import Commit, DataFile, KeptFile
from tidelog.pipelines.table_formats.interface import StagedFileMissing, Table, TableChanged
from tidelog.pipelines.table_formats.parquet_files import ParquetFileWriter
from tidelog.spark import backends, plan
from tidelog.spark.backends.interface import ReadTask, TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import Options
from tidelog.spark.plan import TopicRange
from tidelog.types import Ints

SeqRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RowRemoval:
    """Which rows a repair takes out: seqs in `ranges`, without those in `lost`. Both rise and do not overlap."""

    ranges: SeqRanges
    lost_ranges: SeqRanges = ()

    def removed_mask(self, seqs: Ints) -> NDArray[np.bool_]:
        return in_ranges(seqs, self.ranges) & ~in_ranges(seqs, self.lost_ranges)

    def may_affect(self, low: int, high: int) -> bool:
        """Whether a file with seqs from low to high may hold rows that are taken out."""
        return any(first <= high and low < stop for first, stop in self.ranges)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> SeqRanges:
    """Ranges that rise and do not touch, of any that are not empty."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(each for each in ranges if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((first, stop))
    return tuple(found)


@dataclass(frozen=True)
class ForeignFileTask:
    """A file that another program wrote, or that holds rows of other ranges than its own."""

    target: CommitTarget
    name: str
    number: int
    removal: RowRemoval


class CopyResult(NamedTuple):
    name: str
    dropped: int
    kept: KeptFile | None  # None: nothing of it stays, or nothing goes and the file stays as it is


def copy_foreign_file(task: ForeignFileTask) -> CopyResult:
    """Copy the rows that stay, all columns as they are. Where none goes, the file can stay."""
    target = task.target
    name = f"kept-{target.footer.run}-{task.number:05d}-{attempt_id():05d}.parquet"
    writer: ParquetFileWriter | None = None
    dropped = rows = 0
    try:
        for batch in parquet_files.read_batches(target.disk, target.path, [task.name], None, None):
            goes = task.removal.removed_mask(parquet_files.row_seqs(batch))
            dropped += int(goes.sum())
            stays = batch.filter(pa.array(~goes))
            rows += len(stays)
            if writer is None:
                writer = ParquetFileWriter(
                    target.disk, target.staged_path(name), batch.schema.remove_metadata(), compute_hash=False
                )
            writer.add(stays.replace_schema_metadata(None))
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
    """Files of ours of one range, which are replaced."""

    target: CommitTarget
    first: int
    stop: int
    names: tuple[str, ...]
    quarantine_names: tuple[str, ...]
    removal: RowRemoval
    rows: int  # that the range has to have beside those of the log, in this file or in files of others
    hash: int


def copy_own_files(task: OwnFilesTask) -> DataFile | None:
    """Copy the rows that stay into one file of the same range; None where there are none. A file without rows carries
    what the commit says of the range."""
    target = task.target
    name = f"part-{task.first:020d}-{task.stop:020d}-{target.footer.run}-{attempt_id():05d}-kept.parquet"
    with FilePair(target, name) as pair:
        for batch in _kept_batches(task, task.names):
            pair.rows_file.add(parquet_files.conform(batch, target.mapping.arrow))
        for batch in _kept_batches(task, task.quarantine_names):
            pair.quarantine_file.add(batch.cast(record_mapping.QUARANTINE_SCHEMA))
        if not pair.rows_file.rows and not pair.quarantine_file.rows and not task.rows:
            return None
        return pair.close(task.first, task.stop, rows=task.rows, hash=task.hash)


def _kept_batches(task: OwnFilesTask, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    target = task.target
    for batch in parquet_files.read_batches(target.disk, target.path, names, task.first, task.stop):
        goes = task.removal.removed_mask(parquet_files.row_seqs(batch))
        if not goes.all():
            yield batch.filter(pa.array(~goes))


_ROW_TEXT_CHARS: Final = 200
_ONE_TASK_BYTES: Final = 1 << 62
_GAP_TASK_SEQS: Final = 1 << 22  # seqs of a piece that has no file
_REPAIR_ATTEMPTS: Final = 5  # repairs that other writers of the table made void
Progress = Callable[[int, int], None]


class Difference(NamedTuple):
    """The first place where table and log are not the same."""

    seq: int | None  # None: not of a single seq, as with a changed file that can no longer be compared with the log
    log: str  # what the log has
    table: str


class Reconciled(NamedTuple):
    topic: str
    first: int
    stop: int  # one past what the table stands for
    log_rows: int
    table_rows: int
    quarantined: int
    alone: int  # rows that only the table still has, because the log lost their records; see `compare`
    hash: int  # of the table's rows
    pieces: int
    differing: tuple[tuple[int, int], ...]  # ranges of pieces that differ
    foreign: tuple[str, ...]  # files of the table that no export wrote; their rows are compared like all others
    beyond: int  # rows of theirs with seqs that the table does not stand for
    difference: Difference | None
    repaired: int = 0  # ranges that were made again
    left: tuple[tuple[int, int], ...] = ()  # after a repair: ranges that differ and that the log cannot make again
    left_beyond: int = 0  # after a repair: rows after the table's end with seqs that the log does not have

    @property
    def equal(self) -> bool:
        return not self.differing and not self.beyond

    @property
    def whole(self) -> bool:
        """Whether table and log are the same now."""
        return self.equal or bool(self.repaired and not self.left and not self.left_beyond)


@dataclass(frozen=True)
class _Comparison:
    """One comparison of everything."""

    result: Reconciled
    differing: tuple[tuple[ComparisonTask, ComparisonResult], ...]
    lost_ranges: tuple[tuple[int, int], ...]
    foreign: dict[str, tuple[int, int]]  # name → lowest and highest seq


class ReconcileJob:
    def __init__(self, options: Options, table: Table, context: JobContext) -> None:
        self._topic = options.subscribe[0]
        self._options = replace(options, partitions_min=1, split_bytes=_ONE_TASK_BYTES, on_gap="skip")
        self._given_options, self._table, self._context = options, table, context
        self._backend = backends.open_backend(options)

    def close(self) -> None:
        self._backend.close()

    def run(self, *, repair: bool = False, progress: Progress | None = None) -> Reconciled:
        plan.resolve_topics(self._backend, self._options)
        sight = self._backend.snapshot(self._topic)
        if sight is None:
            raise TopicNotFound(self._topic)
        last = self._table.last_commit()
        if last is None:
            return Reconciled(self._topic, 0, 0, 0, 0, 0, 0, 0, 0, (), (), 0, None)
        commits.check_same_topic(last, self._topic, sight.epoch, self._table.path)
        if repair:
            work = self._context
            export_job.drop_leftovers(self._table, last, self._backend, self._options, sight, work.disk, work.runner)
        seen = self._compare(sight, last, progress)
        if not repair or seen.result.equal:
            return seen.result
        for left in range(_REPAIR_ATTEMPTS - 1, -1, -1):
            try:
                return self._repair_and_verify(sight, last, seen)
            except (TableChanged, StagedFileMissing):
                if not left:
                    raise
            # Another process changed the table while files were written: what was seen of it is no longer true.
            last = self._table.last_commit()
            assert last is not None, "commits do not go away"
            seen = self._compare(sight, last, progress)
            if seen.result.equal:
                return seen.result
        raise AssertionError("the last try returns or raises")

    def _repair_and_verify(self, snapshot: TopicSnapshot, last: Commit, comparison: _Comparison) -> Reconciled:
        repaired = self._repair(snapshot, last, comparison)
        now = self._compare(snapshot, last, None).result
        return comparison.result._replace(repaired=repaired, left=now.differing, left_beyond=now.beyond)

    def _compare(self, snapshot: TopicSnapshot, last: Commit, progress: Progress | None) -> _Comparison:
        """Compare everything. Files of ours that also hold rows of other ranges are then taken as files of others."""
        strays: set[str] = set()
        while True:
            foreign = self._foreign_bounds(strays, last)
            pieces = self._comparison_tasks(snapshot, last, foreign, strays)
            compared = self._run_comparisons(pieces, progress)
            found = {name for each in compared for name in each.stray_files}
            if found <= strays:
                return self._summarize(snapshot, last, foreign, pieces, compared)
            strays |= found

    def _foreign_bounds(self, strays: set[str], last: Commit) -> dict[str, tuple[int, int]]:
        """Files of others by their seqs; nothing where rows are read through the library, or are not the log's."""
        made: dict[str, tuple[int, int]] = {}
        if self._table.scan_version() is not None:
            return made
        for name in (*self._table.foreign_files(), *sorted(strays)):
            if last.transform is not None:
                made[name] = (0, -1)
                continue
            bounds = parquet_files.seq_bounds(self._context.disk, join(self._table.path, name))
            if bounds is not None:
                made[name] = bounds[1:]
        return made

    def _summarize(
        self,
        snapshot: TopicSnapshot,
        last: Commit,
        foreign: dict[str, tuple[int, int]],
        tasks: Sequence[ComparisonTask],
        results: Sequence[ComparisonResult],
    ) -> _Comparison:
        hurt = tuple(
            (piece, seen)
            for piece, seen in zip(tasks, results, strict=True)
            if seen.differing_blocks or _only_commit_disagrees(piece, seen)
        )
        first = min((piece.first for piece in tasks), default=last.stop)
        beyond = 0 if last.transform is not None else self._count_beyond(foreign, first, last.stop)
        made = Reconciled(
            self._topic,
            first,
            last.stop,
            sum(each.log_rows for each in results),
            sum(each.table_rows for each in results) + beyond,
            sum(file.bad for file in self._table.own_files()),
            sum(each.table_only for each in results),
            sum(each.table_hash for each in results) & row_hash.MASK_64,
            len(tasks),
            tuple((piece.first, piece.stop) for piece, _ in hurt),
            tuple(foreign),
            beyond,
            self._first_difference(snapshot, hurt) or _beyond_difference(tuple(foreign), beyond),
        )
        return _Comparison(made, hurt, tuple(each for seen in results for each in seen.lost_ranges), foreign)

    def _count_beyond(self, foreign: dict[str, tuple[int, int]], first: int, stop: int) -> int:
        version = self._table.scan_version()
        if version is not None:
            return delta.count_rows_outside(self._table.path, version, first, stop)
        names = [name for name, (low, high) in foreign.items() if low < first or high >= stop]
        found = 0
        for batch in parquet_files.read_batches(self._context.disk, self._table.path, names, None, None):
            seqs = parquet_files.row_seqs(batch)
            found += int(((seqs < first) | (seqs >= stop)).sum())
        return found

    def _run_comparisons(self, tasks: Sequence[ComparisonTask], progress: Progress | None) -> list[ComparisonResult]:
        """A handful at a time, so that the progress bar moves."""
        found: list[ComparisonResult] = []
        step = max(len(tasks) // 20, 8)
        for at in range(0, len(tasks), step):
            found += self._context.runner.run(compare.compare_range, tasks[at : at + step])
            if progress is not None:
                progress(len(found), len(tasks))
        return found

    # ── pieces ────────────────────────────────────────────────────────────────────────────────

    def _comparison_tasks(
        self, snapshot: TopicSnapshot, last: Commit, foreign: dict[str, tuple[int, int]], strays: set[str]
    ) -> list[ComparisonTask]:
        made = self._table.commits()
        self._mapping = record_mapping.mapping_from_commit(last.schema, last.shape)
        first = min((commit.first for commit in made), default=last.stop)
        committed = commits.active_files(made)
        if last.transform is not None:
            return self._transformed_tasks(snapshot, first, last, committed, foreign)
        held = (
            []
            if self._table.scan_version() is not None
            else [x for x in self._table.own_files() if x.name not in strays]
        )
        there = {file.name for file in held}
        # Quarantine outlives a file of ours that another program replaced.
        bad = [file for file in committed if file.name not in there and file.bad_name is not None]
        found, at = [], first
        for group in _group_overlapping(held):
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
        """Rows that went through a function: only their sums are known, by commit, or of the whole table where another
        program has written files of it."""
        version, there = self._table.scan_version(), set(self._table.visible_files())
        if version is not None or foreign or any(file.name not in there for file in committed):
            whole = self._comparison_task(snapshot, first, last.stop, committed, {}, (), is_transformed=True)
            return [replace(whole, other_names=tuple(self._table.visible_files()))] if committed else []
        return [
            replace(
                self._comparison_task(
                    snapshot, group[0].first, max(file.stop for file in group), group, {}, (), is_transformed=True
                ),
                other_names=tuple(file.name for file in group),
            )
            for group in _group_overlapping(committed)
        ]

    def _tasks_between(
        self,
        snapshot: TopicSnapshot,
        first: int,
        stop: int,
        foreign: dict[str, tuple[int, int]],
        bad: Sequence[DataFile],
    ) -> list[ComparisonTask]:
        """Seqs that no file of ours stands for."""
        bounds = [(at, min(at + _GAP_TASK_SEQS, stop)) for at in range(first, stop, _GAP_TASK_SEQS)]
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
        low = min(max(first, snapshot.evict_floor), stop)
        near = [file for file in bad if file.first < stop and first < file.stop]
        return ComparisonTask(
            self._topic,
            self._table.path,
            self._context.disk,
            self._mapping,
            self._options,
            first,
            stop,
            snapshot.evict_floor,
            snapshot.next_seq,
            () if is_transformed else self._plan_read_tasks(snapshot, low, min(stop, snapshot.next_seq)),
            tuple(name for name, (least, most) in foreign.items() if least < stop and first <= most),
            tuple(file.bad_name for file in (*data_files, *near) if file.bad_name is not None),
            tuple(data_files),
            is_transformed,
            self._table.scan_version(),
        )

    def _plan_read_tasks(self, snapshot: TopicSnapshot, first: int, stop: int) -> tuple[ReadTask, ...]:
        if first >= stop:
            return ()
        return tuple(plan.plan_tasks(self._backend, self._options, [TopicRange(snapshot, first, stop)], RecordFilter()))

    # ── the first difference ──────────────────────────────────────────────────────────────────

    def _first_difference(
        self, snapshot: TopicSnapshot, differing: Sequence[tuple[ComparisonTask, ComparisonResult]]
    ) -> Difference | None:
        for piece, seen in differing:
            if seen.differing_blocks:
                return self._row_difference(snapshot, piece, *seen.differing_blocks[0])
            if seen.changed_files:
                said = sum(file.rows for file in piece.committed_files)
                return Difference(
                    None,
                    f"{said:,} rows by the commit of seqs {piece.first} to {piece.stop - 1}, which it lost since",
                    f"{seen.table_rows:,} rows or other ones in {', '.join(seen.changed_files)}",
                )
        return None

    def _row_difference(self, snapshot: TopicSnapshot, task: ComparisonTask, first: int, stop: int) -> Difference:
        names = (*(file.name for file in task.committed_files), *task.other_names)
        splits = self._plan_read_tasks(snapshot, first, min(stop, snapshot.next_seq))
        near = replace(task, first=first, stop=stop, committed_files=(), other_names=names, read_tasks=splits)
        ours = _rows_by_seq([rows.table for rows, _ in compare.read_log_rows(near)])
        theirs = _rows_by_seq(list(compare.read_table_rows(near)))
        for seq in sorted({*ours, *theirs}):
            here, there = ours.get(seq, []), theirs.get(seq, [])
            if sorted(row.hash for row in here) != sorted(row.hash for row in there):
                return Difference(seq, _format_rows(here, "log"), _format_rows(there, "table"))
        return Difference(None, f"other records of seqs {first} to {stop - 1} that do not fit", "its quarantine")

    # ── repair ────────────────────────────────────────────────────────────────────────────────

    def _repair(self, snapshot: TopicSnapshot, last: Commit, comparison: _Comparison) -> int:
        """Make ranges again that the log still has, in one commit. Everything else stays as it is: the log does not
        say what should be there."""
        if self._table.scan_version() is not None:
            raise BadInput(
                f"{self._table.path} has deletion vectors, mapped column names or partition columns: it can be "
                "compared and not repaired; nothing was changed. Have its own engine rewrite it without them (REORG "
                "TABLE … APPLY (PURGE), OPTIMIZE), or export into another table"
            )
        again = [
            (piece, found)
            for piece, found in comparison.differing
            if found.differing_blocks and not piece.is_transformed
        ]
        ranges = merge_ranges([each for piece, found in again for each in _ranges_to_rewrite(snapshot, piece, found)])
        after = ((max(last.stop, snapshot.evict_floor), snapshot.next_seq),) if comparison.result.beyond else ()
        lost = [
            *comparison.lost_ranges,
            *(each for bounds in after for each in self._lost_after_end(snapshot, *bounds, comparison.foreign)),
        ]
        cut = RowRemoval(merge_ranges([*ranges, *after]), merge_ranges(lost))
        if not cut.ranges:
            return 0
        shape = record_mapping.mapping_from_commit(last.schema, last.shape)
        options = replace(
            self._given_options, on_gap="fail"
        )  # what is lost from here on is not in the plan of the repair
        with closing(ExportJob(options, self._table, lambda _: shape, self._context)) as export:
            target = export.commit_target(snapshot, shape)
            made = tuple(export.write_files(snapshot, target, ranges))
            own = [(piece, found) for piece, found in again if piece.committed_files]
            stay = self._context.runner.run(
                copy_own_files, [_own_files_task(target, piece, found, cut) for piece, found in own]
            )
            near = [name for name, (low, high) in comparison.foreign.items() if cut.may_affect(low, high)]
            tasks = [ForeignFileTask(target, name, number, cut) for number, name in enumerate(near)]
            copied: list[CopyResult] = [
                each for each in self._context.runner.run(copy_foreign_file, tasks) if each.dropped
            ]
            if not made and not own and not copied:
                return 0
            commit = Commit(
                self._topic,
                snapshot.epoch,
                ranges[0][0] if ranges else last.stop,
                last.stop,
                (*made, *(file for file in stay if file is not None)),
                shape.schema,
                shape.options_json,
                removed=tuple(file.name for piece, _ in own for file in piece.committed_files),
                repair=True,
                ts_ms=self._context.clock.now_us() // 1000,
                kept=tuple(each.kept for each in copied if each.kept is not None),
                retired=tuple(each.name for each in copied),
            )
            self._context.on_step("commit")
            self._table.commit(commit)
            self._context.on_step("committed")
        return len(again) or len(copied)

    def _lost_after_end(
        self, snapshot: TopicSnapshot, first: int, stop: int, foreign: dict[str, tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Seqs after the end of the table that files of others hold rows of and that the log lost: no export brings
        them."""
        near = [piece for piece in self._tasks_between(snapshot, first, stop, foreign, ()) if piece.other_names]
        for found in self._context.runner.run(compare.find_lost_ranges, near):
            yield from found


def _group_overlapping(data_files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Files by range, those whose ranges overlap together."""
    found: list[list[DataFile]] = []
    stop = 0
    for file in sorted(data_files, key=lambda file: (file.first, file.stop, file.name)):
        if found and file.first < stop:
            found[-1].append(file)
        else:
            found.append([file])
        stop = max(stop, file.stop)
    return found


def _ranges_to_rewrite(
    snapshot: TopicSnapshot, task: ComparisonTask, result: ComparisonResult
) -> list[tuple[int, int]]:
    """What the log makes again of a piece: all of it where files of ours stand for it, else the blocks that differ."""
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
    """Rows and hash that a piece has to have beside those that the log makes again: what the table has, if it was what
    its commits say. Else the commits are believed: the rows below the floor may be what is wrong, and the next
    comparison has to report it."""
    if not result.changed_files or task.first >= task.evict_floor:
        return result.table_only, result.table_only_hash
    rows = sum(file.rows for file in task.committed_files) - result.log_rows
    return max(rows, 0), (sum(file.hash for file in task.committed_files) - result.log_hash) & row_hash.MASK_64


def _only_commit_disagrees(task: ComparisonTask, result: ComparisonResult) -> bool:
    """Whether only the commit can say that something is wrong: the log has lost a part of the range."""
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
