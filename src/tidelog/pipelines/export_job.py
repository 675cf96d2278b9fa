"""A topic into a table, exactly once: `Export` is one table with its topic, and each `turn` at most one commit.

    1  where the table ends       from its newest commit, and nothing else: there is no state beside the table
    2  how much to take           `sizing`; a wait is an answer too
    3  plan                       one snapshot of the topic; what was lost since stops it, unless it may be skipped
    4  write                      executors, one file each, where no reader sees them
    5  commit                     the driver, all files at once with range, epoch, rows and hash

A process that dies anywhere leaves the table as it was before step 5, or as it is after it; the next turn begins at 1.

When to commit and how much: files of a good size where there is enough, and none that waits too long.

    pending bytes ≥ file_bytes               a commit, up to commit_bytes at once
    the oldest pending record ≥ age_ms old   a commit of whatever there is
    a single run (once)                      a commit of whatever there is
    else                                     wait

What would be left for a last commit that is smaller than a file goes with the one before it.

A commit's bytes are cut evenly into as few files as do not pass `file_bytes`, so none of them is a crumb. Bytes are
those of the log: Parquet makes fewer of them.

What an executor does for an export: one range of a topic into one Parquet file, staged.

Records go from the segment's file to the Parquet writer as Arrow, inside one Python process: Spark carries the task
there and the answer back, and never a row. A file that is not finished is removed where that can still be done; what a
killed executor leaves is removed when the table is next opened for writing.

Files of ours that follow a hole in a table and whose commits are gone.

The next export makes them again, so they are removed first, but only where the log still has every record whose row
they hold: a row of a record that was evicted, or that a power cut or damage took, is nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
from pyspark import TaskContext

from tidelog.clock import Clock
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Damaged, TopicNotFound
from tidelog.pipelines import compare, record_mapping
from tidelog.pipelines.compare import ComparisonTask
from tidelog.pipelines.record_mapping import RecordMapping, TableRows
from tidelog.pipelines.spark_tasks import TaskRunner
from tidelog.pipelines.table_formats import commits, interface
from tidelog.pipelines.table_formats.commits import Commit, DataFile
from tidelog.pipelines.table_formats.interface import Leftover, OnStep, StagedFileMissing, Table
from tidelog.pipelines.table_formats.parquet_files import FileFooter, ParquetFileWriter
from tidelog.spark import backends, plan
from tidelog.spark.backends.interface import Backend, ReadTask, TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.offsets import Pending, admit_batch
from tidelog.spark.options import Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader

CommitReason: TypeAlias = Literal["nothing", "bytes", "age", "once", "wait"]


@dataclass(frozen=True, slots=True)
class Sizes:
    file_bytes: int = 128 << 20
    age_ms: int = 60_000
    commit_bytes: int = 1 << 30  # so that a long history is many commits, each of which is progress

    def __post_init__(self) -> None:
        if self.file_bytes < 1 or self.commit_bytes < self.file_bytes:
            raise BadInput(
                f"files of {self.file_bytes} bytes in commits of {self.commit_bytes}: the first must be at least 1 and "
                "at most the second; nothing was written"
            )


def commit_reason(sizes: Sizes, *, seqs: int, pending_bytes: int, oldest_ms: int | None, once: bool) -> CommitReason:
    """Whether to commit now. `oldest_ms` is how old the first pending record is; None: unknown."""
    if seqs <= 0:
        return "nothing"
    if once:
        return "once"
    if pending_bytes >= sizes.file_bytes:
        return "bytes"
    return "age" if oldest_ms is not None and oldest_ms >= sizes.age_ms else "wait"


def commit_end(sizes: Sizes, first: int, head: int, bytes_before: Callable[[int], int]) -> int:
    """Where a commit ends that begins at `first`. At least one seq is taken."""
    pending = Pending("", first, head, bytes_before)
    stop = admit_batch([pending], None, sizes.commit_bytes)[""]
    return head if bytes_before(head) - bytes_before(stop) < sizes.file_bytes else stop


@dataclass(frozen=True)
class CommitTarget:
    """Where rows go and what is said of them: the same for all tasks of a commit."""

    path: str
    format: interface.Format
    mapping: RecordMapping
    footer: FileFooter  # of the commit; a task fills in its own part
    disk: Disk

    def staged_path(self, name: str) -> str:
        folder, _, base = name.rpartition("/")
        place = join(self.path, folder) if folder else self.path
        return join(place, f"_{base}" if self.format == "parquet" else base)


@dataclass(frozen=True)
class ExportTask:
    target: CommitTarget
    options: Options
    read_task: ReadTask
    first: int
    stop: int


def export_range(task: ExportTask) -> DataFile:
    """Runs on an executor, perhaps twice: every attempt has files of its own."""
    topic = task.target.footer.topic
    with closing(backends.open_backend(task.options)) as place:
        batches = TaskReader(
            place, task.options, record_mapping.RECORD_SCHEMA, RecordFilter(), task.read_task
        ).batches()
        return write_rows(
            task.target, record_mapping.map_batches(task.target.mapping, batches, topic), task.first, task.stop
        )


class FilePair:
    """The two files of one range of a topic: rows of the table, and rows in quarantine. Both are staged; an error in a
    `with` block removes both."""

    def __init__(self, target: CommitTarget, name: str) -> None:
        self._footer, self._name, self._bad_name = target.footer, name, f"{interface.QUARANTINE_DIR}/{name}"
        self.rows_file = ParquetFileWriter(target.disk, target.staged_path(name), target.mapping.arrow)
        self.quarantine_file = ParquetFileWriter(
            target.disk, target.staged_path(self._bad_name), record_mapping.QUARANTINE_SCHEMA
        )

    def __enter__(self) -> FilePair:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.rows_file.abandon()
            self.quarantine_file.abandon()

    def close(self, first: int, stop: int, *, rows: int | None = None, hash: int | None = None) -> DataFile:
        """Finish both files and return what a commit says of them. Without rows in quarantine there is no second file.

        Args:
            rows, hash: what the range stands for in the table, where that is not what the first file holds.
        """
        good, bad = self.rows_file, self.quarantine_file
        rows, hash = good.rows if rows is None else rows, good.hash if hash is None else hash
        footer = msgspec.json.encode(
            msgspec.structs.replace(self._footer, first=first, stop=stop, rows=rows, hash=hash, bad=bad.rows)
        )
        bad_size = bad.close(footer) if bad.rows else None
        size = good.close(footer)
        bad_name = self._bad_name if bad.rows else None
        held = good.rows if (good.rows, good.hash) != (rows, hash) else None
        return DataFile(self._name, first, stop, rows, size, hash, bad.rows, bad_name, bad_size, held)


def write_rows(target: CommitTarget, rows: Iterable[TableRows], first: int, stop: int) -> DataFile:
    """Write rows into files of their own: those of the table, and those that do not fit."""
    with FilePair(target, interface.data_file_name(first, stop, target.footer.run, attempt_id())) as pair:
        for found in rows:
            pair.rows_file.add(found.table)
            if found.quarantined is not None:
                pair.quarantine_file.add(found.quarantined)
        return pair.close(first, stop)


def attempt_id() -> int:
    """The id of this attempt of a Spark task, for names of files; 0 outside of Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.taskAttemptId()


def write_frame_partition(
    target: CommitTarget, first: int, stop: int, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> bytes:
    """Rows of a DataFrame, which need not be the log's any more, into a file; for `frames`."""
    del partition, attempt  # a file's name has the attempt, and rows stand for the whole range
    rows = (TableRows(batch.cast(target.mapping.arrow), None) for batch in batches)
    return msgspec.json.encode(write_rows(target, rows, first, stop))


_ONE_TASK_BYTES: Final = 1 << 62


def drop_leftovers(
    table: Table,
    last: Commit,
    backend: Backend,
    options: Options,
    snapshot: TopicSnapshot,
    disk: Disk,
    runner: TaskRunner,
) -> None:
    """Remove them, or raise Damaged where the log cannot give all of their rows back."""
    found = table.leftovers()
    if not found:
        return
    options = replace(options, partitions_min=1, split_bytes=_ONE_TASK_BYTES, on_gap="skip")
    pieces = []
    for each in found:
        if each.epoch != snapshot.epoch:
            raise _not_reproducible(table, each, f"the topic {snapshot.topic} was dropped and made again since")
        if each.first < snapshot.evict_floor:
            raise _not_reproducible(table, each, f"the topic has nothing below seq {snapshot.evict_floor} any more")
        pieces.append(_leftover_comparison(table, last, backend, options, snapshot, disk, each))
    for each, lost in zip(found, runner.run(compare.find_lost_ranges, pieces), strict=True):
        if lost:
            first, stop = lost[0]
            raise _not_reproducible(table, each, f"the topic lost records of it (seqs {first} to {stop - 1})")
    table.drop_leftovers()


def _leftover_comparison(
    table: Table,
    last: Commit,
    backend: Backend,
    options: Options,
    snapshot: TopicSnapshot,
    disk: Disk,
    leftover: Leftover,
) -> ComparisonTask:
    end = min(leftover.stop, snapshot.next_seq)
    ranges = [TopicRange(snapshot, leftover.first, end)] if leftover.first < end else []
    return ComparisonTask(
        snapshot.topic,
        table.path,
        disk,
        record_mapping.mapping_from_commit(last.schema, last.shape),
        options,
        leftover.first,
        leftover.stop,
        snapshot.evict_floor,
        snapshot.next_seq,
        tuple(plan.plan_tasks(backend, options, ranges, RecordFilter())) if ranges else (),
        (leftover.name,),
        (leftover.bad_name,) if leftover.bad_name is not None else (),
    )


def _not_reproducible(table: Table, leftover: Leftover, reason: str) -> Damaged:
    return Damaged(
        f"{table.path}: the commits of {leftover.name} (seqs {leftover.first} to {leftover.stop - 1}) are gone, a "
        f"file before it "
        f"is missing, and {reason}, so its rows cannot be exported again; nothing was changed. Put the table's commits "
        "(_tidelog/log) or the missing file back, or move this table away and export into another one"
    )


Progress = Callable[[int, int], None]  # seqs that are in the table, of how many
ShouldStop = Callable[[bool], bool]  # whether there was nothing to do → whether it is enough
MakeMapping = Callable[[Backend], RecordMapping]
_SEQ_MAX: Final = (1 << 63) - 1


class Exported(NamedTuple):
    """What a run did, and where the table is now."""

    topic: str
    epoch: int
    first: int  # of this run
    stop: int  # where the next one begins
    rows: int
    quarantined: int
    bytes: int
    commits: int
    files: int
    smallest: int  # bytes of files of this run
    largest: int
    hash: int


class ExportRound(NamedTuple):
    reason: CommitReason
    commit: Commit | None
    head: int  # of the topic, when it was looked at


@dataclass(frozen=True)
class JobContext:
    """What a turn stands on."""

    runner: TaskRunner
    disk: Disk
    clock: Clock
    on_step: OnStep = interface.no_step


class ExportJob:
    def __init__(
        self, options: Options, table: Table, make_mapping: MakeMapping, context: JobContext, sizes: Sizes | None = None
    ) -> None:
        if len(options.subscribe) != 1:
            raise BadInput("an export is of one topic; nothing was written, name it")
        self._topic, self._sizes = options.subscribe[0], sizes or Sizes()
        self._options = replace(options, partitions_min=1, split_bytes=self._sizes.file_bytes)
        self._table, self._make_mapping, self._context = table, make_mapping, context
        self._backend = backends.open_backend(options)
        self._new_commits: list[Commit] = []

    def close(self) -> None:
        self._backend.close()

    # ── one turn ──────────────────────────────────────────────────────────────────────────────

    def run_round(self, *, once: bool, until: int = _SEQ_MAX) -> ExportRound:
        """At most one commit. `until`: nothing from this seq on."""
        try:
            return self._run_round(once=once, until=until)
        except StagedFileMissing:
            # VACUUM by another process may remove files between their writing and their commit. Once, that is.
            if self._table.format != "delta":
                raise
            return self._run_round(once=once, until=until)

    def _run_round(self, *, once: bool, until: int) -> ExportRound:
        self._backend.refresh()
        plan.resolve_topics(self._backend, self._options)
        sight = self._backend.snapshot(self._topic)
        if sight is None:
            raise TopicNotFound(self._topic)
        last = self._table.last_commit()
        first, shape = self._start_position(sight, last)
        head = min(sight.next_seq, until)
        if first > sight.next_seq:
            raise BadInput(
                f"{self._table.path} ends at seq {first - 1} and {self._topic} at {sight.next_seq - 1}: these are not "
                f"the "
                "records it was made from; nothing was written, look which topic and which directory are meant"
            )
        pending = sight.bytes_before(head) - sight.bytes_before(first)
        reason = commit_reason(
            self._sizes,
            seqs=head - first,
            pending_bytes=pending,
            oldest_ms=self._oldest_pending_ms(first, head),
            once=once,
        )
        if reason in ("nothing", "wait"):
            return ExportRound(reason, None, head)
        stop = commit_end(self._sizes, first, head, sight.bytes_before)
        made = self._export_range(sight, shape, first, stop)
        self._new_commits.append(made)
        return ExportRound(reason, made, head)

    def _start_position(self, snapshot: TopicSnapshot, last: Commit | None) -> tuple[int, RecordMapping]:
        if last is not None:
            commits.check_same_topic(last, self._topic, snapshot.epoch, self._table.path)
            work = self._context
            drop_leftovers(self._table, last, self._backend, self._options, snapshot, work.disk, work.runner)
            return last.stop, record_mapping.mapping_from_commit(last.schema, last.shape)
        stands = self._table.next_export_seq(self._topic, snapshot.epoch)
        if stands is None:
            interface.check_empty(self._table)
        return stands if stands is not None else max(snapshot.evict_floor, snapshot.first_seq), self._make_mapping(
            self._backend
        )

    def _oldest_pending_ms(self, first: int, head: int) -> int | None:
        """How old the first pending record is, as far as it matters."""
        if first >= head or not self._backend.has_timestamps:
            return None
        before_ms = self._context.clock.now_us() // 1000 - self._sizes.age_ms
        return self._sizes.age_ms if self._backend.seek(self._topic, max(before_ms + 1, 0)) > first else 0

    def commit_target(self, snapshot: TopicSnapshot, mapping: RecordMapping) -> CommitTarget:
        """Where the files of one commit are staged."""
        work = self._context
        footer = FileFooter(
            self._topic, snapshot.epoch, 0, 0, f"{work.clock.now_us():016x}", mapping.schema, mapping.options_json
        )
        if mapping.bad == "quarantine":
            work.disk.make_dir(join(self._table.path, interface.QUARANTINE_DIR))
        return CommitTarget(self._table.path, self._table.format, mapping, footer, work.disk)

    def write_files(
        self, snapshot: TopicSnapshot, target: CommitTarget, ranges: Sequence[tuple[int, int]]
    ) -> list[DataFile]:
        """Steps 3 and 4 for some ranges of the topic."""
        work = self._context
        work.on_step("plan")
        tasks = []
        for first, stop in ranges:
            splits, at = (
                plan.plan_tasks(self._backend, self._options, [TopicRange(snapshot, first, stop)], RecordFilter()),
                first,
            )
            for split in splits:
                end = stop if split is splits[-1] else split.ranges[-1].stop
                tasks.append(ExportTask(target, self._options, split, at, end))
                at = end
        work.on_step("write files")
        return work.runner.run(export_range, tasks)

    def _export_range(self, snapshot: TopicSnapshot, mapping: RecordMapping, first: int, stop: int) -> Commit:
        """Steps 3 to 5."""
        work = self._context
        ts_ms = work.clock.now_us() // 1000
        files = tuple(self.write_files(snapshot, self.commit_target(snapshot, mapping), [(first, stop)]))
        made = Commit(
            self._topic, snapshot.epoch, first, stop, files, mapping.schema, mapping.options_json, ts_ms=ts_ms
        )
        work.on_step("commit")
        self._table.commit(made)
        work.on_step("committed")
        return made

    # ── runs ──────────────────────────────────────────────────────────────────────────────────

    def run_once(self, progress: Progress | None = None, *, until: int | None = None) -> Exported:
        """Until the table holds what the topic held when this began."""
        head = until
        while True:
            turn = self.run_round(once=True, until=_SEQ_MAX if head is None else head)
            head = turn.head if head is None else head
            if progress is not None and self._new_commits:
                progress(
                    self._new_commits[-1].stop - self._new_commits[0].first, max(head - self._new_commits[0].first, 1)
                )
            if turn.commit is None or turn.commit.stop >= head:
                return self.result()

    def run_until_stopped(self, should_stop: ShouldStop, progress: Progress | None = None) -> Exported:
        """Until `pause` says that it is enough. It is asked after every turn, and waits where nothing was done."""
        while True:
            turn = self.run_round(once=False)
            if progress is not None and self._new_commits:
                progress(
                    self._new_commits[-1].stop - self._new_commits[0].first,
                    max(turn.head - self._new_commits[0].first, 1),
                )
            if should_stop(turn.commit is None):
                return self.result()

    def result(self) -> Exported:
        made, last = self._new_commits, self._table.last_commit()
        sizes = [file.bytes for commit in made for file in commit.files]
        stop = last.stop if last is not None else 0
        return Exported(
            self._topic,
            last.epoch if last is not None else 0,
            made[0].first if made else stop,
            stop,
            sum(commit.rows for commit in made),
            sum(commit.bad for commit in made),
            sum(sizes),
            len(made),
            len(sizes),
            min(sizes, default=0),
            max(sizes, default=0),
            sum(commit.hash for commit in made) & ((1 << 64) - 1),
        )


def open_export(
    options: Options, table: Table, make_mapping: MakeMapping, context: JobContext, sizes: Sizes | None = None
) -> closing[ExportJob]:
    return closing(ExportJob(options, table, make_mapping, context, sizes))
