"""Export a topic into a table, exactly once. `ExportJob` has one table and its topic; a round makes at most one commit.

    1  position                   from the newest commit of the table: there is no other state
    2  size                       how much to commit now, or to wait
    3  plan                       from one snapshot of the topic; lost records raise GapFound, unless they are skipped
    4  write                      executors stage one Parquet file each
    5  commit                     the driver adds all files at once, with range, epoch, rows and hash

A process that dies leaves the table as it was before step 5 or as it is after it; the next round begins at 1.

    pending bytes ≥ file_bytes               commit, at most commit_bytes
    the oldest pending record ≥ age_ms old   commit all pending records
    a single run (once)                      commit all pending records
    else                                     wait

A rest smaller than a file is added to the commit before it. The bytes of a commit, as in the log, are split evenly into
as few files as stay below `file_bytes`.

Records pass from the segment to the Parquet writer as Arrow, in one Python process; Spark carries only tasks and their
results. Unfinished files are removed on an error, and those of a killed executor when the table is next opened for
writing.

Leftovers are files after a missing range whose commits are gone. The next export writes their range again, so
`drop_leftovers` removes them first, if the log still has every record of their rows.

The position of an export is in its table. `ExportGroup`, a consumer group, follows it: retention holds what the table
does not have, and `tidelog group` shows the lag. It is set when an export begins and after each commit. A process that
dies in between leaves it where it was before the commit, so more than needed is held until the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
from pyspark import TaskContext

from tidelog.addresses import Location
from tidelog.client.database import open_location
from tidelog.clock import Clock
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Damaged, TopicNotFound
from tidelog.pipelines import compare, partitions, record_mapping, row_hash
from tidelog.pipelines.compare import ComparisonTask
from tidelog.pipelines.record_mapping import RecordMapping, TableRows
from tidelog.pipelines.spark_tasks import TaskRunner
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.interface import Commit, DataFile, Leftover, OnStep, StagedFileMissing, Table
from tidelog.pipelines.table_formats.parquet import FileFooter, ParquetFileWriter
from tidelog.spark import backends, plan
from tidelog.spark.backends.interface import Backend, ReadTask, TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.groups import Pending, admit_batch
from tidelog.spark.options import Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader

_BUFFERED_BYTES_MAX: Final = 64 << 20  # of all partitions of a task
CommitReason: TypeAlias = Literal["nothing", "bytes", "age", "once", "wait"]


@dataclass(frozen=True, slots=True)
class Sizes:
    file_bytes: int = 128 << 20
    age_ms: int = 60_000
    commit_bytes: int = 1 << 30  # a long history becomes many commits, each of which is progress

    def __post_init__(self) -> None:
        if self.file_bytes < 1 or self.commit_bytes < self.file_bytes:
            raise BadInput(
                f"files of {self.file_bytes} bytes in commits of {self.commit_bytes}: the first must be at least 1 and "
                "at most the second; nothing was written"
            )


def commit_reason(sizes: Sizes, *, seqs: int, pending_bytes: int, oldest_ms: int | None, once: bool) -> CommitReason:
    """Decide whether to commit now. `oldest_ms`: the age of the first pending record; None if unknown."""
    if seqs <= 0:
        return "nothing"
    if once:
        return "once"
    if pending_bytes >= sizes.file_bytes:
        return "bytes"
    return "age" if oldest_ms is not None and oldest_ms >= sizes.age_ms else "wait"


def commit_end(sizes: Sizes, first: int, head: int, bytes_before: Callable[[int], int]) -> int:
    """Return where a commit that begins at `first` ends. It has at least one seq."""
    pending = Pending("", first, head, bytes_before)
    stop = admit_batch([pending], None, sizes.commit_bytes)[""]
    return head if bytes_before(head) - bytes_before(stop) < sizes.file_bytes else stop


@dataclass(frozen=True)
class CommitTarget:
    """The table, mapping and footer of one commit, the same for all its tasks."""

    path: str
    format: interface.Format
    mapping: RecordMapping
    footer: FileFooter  # a task fills in its range and sums
    disk: Disk

    def staged_path(self, name: str) -> str:
        return interface.staged_path(self.path, self.format, name)

    @property
    def file_schema(self) -> pa.Schema:
        """The columns of the files: a partition column is in their paths."""
        name = self.mapping.partition_column if self.is_partitioned_by_path else None
        return pa.schema([field for field in self.mapping.arrow if field.name != name])

    @property
    def is_partitioned_by_path(self) -> bool:
        return self.format != "iceberg"


@dataclass(frozen=True)
class ExportTask:
    target: CommitTarget
    options: Options
    read_task: ReadTask
    first: int
    stop: int


def export_range(task: ExportTask) -> list[DataFile]:
    """Runs on an executor, perhaps twice: every attempt has its own files."""
    topic = task.target.footer.topic
    with closing(backends.open_backend(task.options)) as backend:
        batches = TaskReader(
            backend, task.options, record_mapping.RECORD_SCHEMA, RecordFilter(), task.read_task
        ).batches()
        return write_rows(
            task.target, record_mapping.map_batches(task.target.mapping, batches, topic), task.first, task.stop
        )


class _PartitionFile:
    """The file of one partition, and the sums of its rows with all columns."""

    def __init__(self, name: str, writer: ParquetFileWriter) -> None:
        self.name, self.writer, self.rows, self.hash = name, writer, 0, 0

    def add(self, rows: pa.RecordBatch, hashed: int) -> None:
        self.rows, self.hash = self.rows + rows.num_rows, (self.hash + hashed) & row_hash.MASK_64
        self.writer.add(rows)


class RangeFiles:
    """The staged files of one range: rows of the table, a file a partition, and rows in quarantine. An error in a
    `with` block removes all."""

    def __init__(self, target: CommitTarget, name: str) -> None:
        self._target, self._name = target, name
        self._files: dict[tuple[str, str | None], _PartitionFile] = {}
        self._bad_name = interface.quarantine_name(name)
        self.quarantine_file = ParquetFileWriter(
            target.disk, target.staged_path(self._bad_name), record_mapping.QUARANTINE_SCHEMA
        )

    def __enter__(self) -> RangeFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for file in self._files.values():
                file.writer.abandon()
            self.quarantine_file.abandon()

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self._files.values())

    def add(self, batch: pa.RecordBatch) -> None:
        rule = self._target.mapping.partition_by
        if not batch.num_rows:
            return
        if rule is None:
            self._file("", None).add(batch, row_hash.sum_hashes(row_hash.hash_rows(batch)))
            return
        # Positions instead of rows: the hash of a row has its partition column, the file has not.
        hashes = row_hash.hash_rows(batch)
        for part in partitions.split(batch, rule, by_path=self._target.is_partitioned_by_path):
            file = self._file(part.folder, part.key)
            file.add(part.rows, row_hash.sum_hashes(hashes[part.positions]))
        self._limit_memory()

    def _file(self, folder: str, key: str | None) -> _PartitionFile:
        found = self._files.get((folder, key))
        if found is not None:
            return found
        target, number = self._target, len(self._files)
        if number >= partitions.PARTITIONS_MAX:
            raise BadInput(
                f"a range of the topic has more than {partitions.PARTITIONS_MAX} partitions by "
                f"{target.mapping.partition_by}; nothing was committed, export into a new table that is partitioned by "
                "a column with fewer values, or with smaller files (--file-bytes)"
            )
        name = self._name if not number else f"{self._name.removesuffix('.parquet')}-p{number}.parquet"
        if folder:
            target.disk.make_dir(join(target.path, folder))
            name = f"{folder}/{name}"
        writer = ParquetFileWriter(target.disk, target.staged_path(name), target.file_schema, compute_hash=False)
        self._files[folder, key] = made = _PartitionFile(name, writer)
        return made

    def _limit_memory(self) -> None:
        if sum(file.writer.buffered_bytes for file in self._files.values()) >= _BUFFERED_BYTES_MAX:
            for file in self._files.values():
                file.writer.end_group()

    def close(self, first: int, stop: int, *, rows: int | None = None, hash: int | None = None) -> list[DataFile]:
        """Complete the files and return their entries in the commit; there is always at least one. The first one has
        what is in quarantine.

        Args:
            rows, hash: the sums of the range, if they are not those of the files. The first file gets them.
        """
        if not self._files:
            mapping = self._target.mapping
            by_path = mapping.partition_by is not None and self._target.is_partitioned_by_path
            self._file(partitions.folder_of(mapping.partition_by or "", None) if by_path else "", None)
        bad = self.quarantine_file
        base = msgspec.structs.replace(self._target.footer, first=first, stop=stop, files=len(self._files))
        made: list[DataFile] = []
        for file in self._files.values():
            file_rows, file_hash = file.rows, file.hash
            if rows is not None and hash is not None:
                file_rows, file_hash = (0, 0) if made else (rows, hash)
            bad_rows = 0 if made else bad.rows
            footer = msgspec.json.encode(msgspec.structs.replace(base, rows=file_rows, hash=file_hash, bad=bad_rows))
            bad_size = bad.close(footer) if bad_rows else None
            size = file.writer.close(footer)
            bad_name = self._bad_name if bad_rows else None
            held = file.rows if (file.rows, file.hash) != (file_rows, file_hash) else None
            made.append(
                DataFile(
                    file.name,
                    first,
                    stop,
                    file_rows,
                    size,
                    file_hash,
                    bad_rows,
                    bad_name,
                    bad_size,
                    held,
                    file.writer.stats() if self._target.format == "delta" else None,
                )
            )
        return made


def write_rows(target: CommitTarget, rows: Iterable[TableRows], first: int, stop: int) -> list[DataFile]:
    """Write rows into the files of a range: those of the table, and those in quarantine."""
    with RangeFiles(target, interface.data_file_name(first, stop, target.footer.run, attempt_id())) as files:
        for found in rows:
            files.add(found.table)
            if found.quarantined is not None:
                files.quarantine_file.add(found.quarantined)
        return files.close(first, stop)


def attempt_id() -> int:
    """Return the id of this attempt of a Spark task, for file names; 0 outside of Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.taskAttemptId()


def write_frame_partition(
    target: CommitTarget, first: int, stop: int, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> bytes:
    """Write the rows of one partition of a DataFrame; for `spark_tasks.run_on_partitions`."""
    del partition, attempt  # a file's name has the attempt, and the rows belong to the whole range
    rows = (TableRows(batch.cast(target.mapping.arrow), None) for batch in batches)
    return msgspec.json.encode(write_rows(target, rows, first, stop))


def drop_leftovers(
    table: Table,
    backend: Backend,
    options: Options,
    snapshot: TopicSnapshot,
    runner: TaskRunner,
) -> None:
    """Remove leftovers. Raises Damaged if the log no longer has the records of all their rows."""
    leftovers = table.leftovers()
    if not leftovers:
        return
    options = compare.comparison_options(options)
    tasks = []
    for leftover in leftovers:
        if (leftover.topic, leftover.epoch) != (snapshot.topic, snapshot.epoch):
            raise _not_reproducible(table, leftover, f"the topic {snapshot.topic} was dropped and made again since")
        if leftover.first < snapshot.evict_floor:
            raise _not_reproducible(table, leftover, f"the topic has nothing below seq {snapshot.evict_floor} any more")
        tasks.append(
            ComparisonTask(
                topic=snapshot.topic,
                path=table.path,
                disk=table.disk,
                mapping=record_mapping.mapping_from_commit(leftover.schema, leftover.shape),
                options=options,
                first=leftover.first,
                stop=leftover.stop,
                evict_floor=snapshot.evict_floor,
                next_seq=snapshot.next_seq,
                read_tasks=compare.plan_range(backend, options, snapshot, leftover.first, leftover.stop),
                other_names=(leftover.name,),
                quarantine_names=(leftover.bad_name,) if leftover.bad_name is not None else (),
            )
        )
    for leftover, lost in zip(leftovers, runner.run(compare.find_lost_ranges, tasks), strict=True):
        if lost:
            first, stop = lost[0]
            raise _not_reproducible(table, leftover, f"the topic lost records of it (seqs {first} to {stop - 1})")
    table.drop_leftovers()


def _not_reproducible(table: Table, leftover: Leftover, reason: str) -> Damaged:
    return Damaged(
        f"{table.path}: the commits of {leftover.name} (seqs {leftover.first} to {leftover.stop - 1}) are gone, a "
        f"file before it is missing, and {reason}, so its rows cannot be exported again; nothing was changed. Put the "
        "table's commits (_tidelog/log) or the missing file back, or move this table away and export into another one"
    )


Progress = Callable[[int, int], None]  # exported seqs, of how many
ShouldStop = Callable[[bool], bool]  # argument: whether the round had nothing to do
MakeMapping = Callable[[Backend], RecordMapping]
SchemaOf = Callable[[int], tuple[RecordMapping, int | None]]  # of a seq; the first seq of the next schema
_SEQ_MAX: Final = (1 << 63) - 1


class Exported(NamedTuple):
    """The result of a run and the position of the table."""

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
    head: int  # of the topic, in the snapshot
    next_seq: int  # of the table, after the round


@dataclass(frozen=True)
class JobContext:
    """What a job needs of its environment."""

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
        self._group: ExportGroup | None = None
        self._has_begun = False
        self._wanted: RecordMapping | None = None
        self._schema_of: SchemaOf | None = None

    def close(self) -> None:
        self._backend.close()

    def use_group(self, group: ExportGroup) -> None:
        """Set a consumer group to the position of the table, now and after each commit."""
        self._group = group

    def use_schema(self, wanted: RecordMapping) -> None:
        """Add columns of a schema to a table that exists, from its position on."""
        self._wanted = wanted

    def use_schemas(self, schema_of: SchemaOf) -> None:
        """Use the schemas of the topic by seq: columns are added where one begins, and a commit ends there."""
        self._schema_of = schema_of

    def count_exported(self) -> tuple[int, int]:
        """Return rows and commits of this object."""
        return sum(commit.rows for commit in self._new_commits), len(self._new_commits)

    def _begin(self, next_seq: int) -> None:
        if self._group is not None and not self._has_begun:
            self._group.begin(next_seq)
        self._has_begun = True

    def _follow(self, next_seq: int) -> None:
        if self._group is not None:
            self._context.on_step("move the group")
            self._group.move(next_seq)

    # ── one round ─────────────────────────────────────────────────────────────────────────────

    def run_round(self, *, once: bool, until: int = _SEQ_MAX) -> ExportRound:
        """Make at most one commit, of seqs below `until`."""
        try:
            return self._run_round(once=once, until=until)
        except StagedFileMissing:
            # VACUUM of another program may remove files before their commit. One repetition is enough.
            if self._table.format == "parquet":
                raise
            return self._run_round(once=once, until=until)

    def _run_round(self, *, once: bool, until: int) -> ExportRound:
        self._backend.refresh()
        plan.resolve_topics(self._backend, self._options)
        snapshot = self._backend.snapshot(self._topic)
        if snapshot is None:
            raise TopicNotFound(self._topic)
        last = self._table.last_commit()
        first, mapping = self._start_position(snapshot, last)
        self._begin(first)
        head = limit = min(snapshot.next_seq, until)
        if self._schema_of is not None:
            wanted, next_change = self._schema_of(first)
            if last is not None:
                mapping = record_mapping.evolve(mapping, wanted, self._table.path)
            limit = head if next_change is None else min(head, next_change)
        if first > snapshot.next_seq:
            raise BadInput(
                f"{self._table.path} ends at seq {first - 1} and {self._topic} at {snapshot.next_seq - 1}: these are "
                "not the records it was made from; nothing was written, look which topic and which directory are meant"
            )
        bytes_before = snapshot.bytes_before(first)
        pending = bytes_before(limit)
        reason = commit_reason(
            self._sizes,
            seqs=limit - first,
            pending_bytes=pending,
            oldest_ms=self._oldest_pending_ms(first, head),
            once=once or limit < head,
        )
        if reason in ("nothing", "wait"):
            return ExportRound(reason, None, head, first)
        stop = commit_end(self._sizes, first, limit, bytes_before)
        commit = self._export_range(snapshot, mapping, last, first, stop)
        self._new_commits.append(commit)
        self._context.on_step("committed")
        self._follow(commit.stop)
        return ExportRound(reason, commit, head, commit.stop)

    def _start_position(self, snapshot: TopicSnapshot, last: Commit | None) -> tuple[int, RecordMapping]:
        if last is not None:
            interface.check_same_topic(last, self._topic, snapshot.epoch, self._table.path)
        if last is not None or self._is_all_left_over():
            drop_leftovers(self._table, self._backend, self._options, snapshot, self._context.runner)
        if last is not None:
            known = record_mapping.mapping_from_commit(last.schema, last.shape)
            if self._wanted is None:
                return last.stop, known
            return last.stop, record_mapping.evolve(known, self._wanted, self._table.path)
        first = self._table.next_export_seq(self._topic, snapshot.epoch)
        if first is None:
            interface.check_empty(self._table)
            first = max(snapshot.evict_floor, snapshot.first_seq)
        return first, self._make_mapping(self._backend)

    def _is_all_left_over(self) -> bool:
        """Whether a table without commits has leftovers of this topic and nothing else."""
        left = [leftover for leftover in self._table.leftovers() if leftover.topic == self._topic]
        return bool(left) and {leftover.name for leftover in left} == set(self._table.visible_files())

    def _oldest_pending_ms(self, first: int, head: int) -> int | None:
        """Return `age_ms` if the first pending record is at least that old, else 0; None if unknown."""
        if first >= head or not self._backend.has_timestamps:
            return None
        before_ms = self._context.clock.now_us() // 1000 - self._sizes.age_ms
        return self._sizes.age_ms if self._backend.seek(self._topic, max(before_ms + 1, 0)) > first else 0

    def commit_target(self, snapshot: TopicSnapshot, mapping: RecordMapping) -> CommitTarget:
        """Return the target of the tasks of one commit."""
        self._table.prepare(mapping)
        run = f"{self._context.clock.now_us():016x}"
        footer = FileFooter(self._topic, snapshot.epoch, 0, 0, run, mapping.schema, mapping.options_json)
        if mapping.bad == "quarantine":
            self._table.disk.make_dir(join(self._table.path, interface.QUARANTINE_DIR))
        return CommitTarget(self._table.path, self._table.format, mapping, footer, self._table.disk)

    def write_files(
        self, snapshot: TopicSnapshot, target: CommitTarget, ranges: Sequence[tuple[int, int]]
    ) -> list[DataFile]:
        """Run steps 3 and 4 for ranges of the topic."""
        self._context.on_step("plan")
        tasks = []
        for at, stop in ranges:
            topic_range = TopicRange(snapshot, at, stop)
            read_tasks = plan.plan_tasks(self._backend, self._options, [topic_range], RecordFilter())
            for read_task in read_tasks:
                end = stop if read_task is read_tasks[-1] else read_task.parts[-1].stop
                tasks.append(ExportTask(target, self._options, read_task, at, end))
                at = end
        self._context.on_step("write files")
        return [file for files in self._context.runner.run(export_range, tasks) for file in files]

    def _export_range(
        self, snapshot: TopicSnapshot, mapping: RecordMapping, last: Commit | None, first: int, stop: int
    ) -> Commit:
        """Run steps 3 to 5."""
        ts_ms = self._context.clock.now_us() // 1000
        files = tuple(self.write_files(snapshot, self.commit_target(snapshot, mapping), [(first, stop)]))
        commit = Commit(
            self._topic,
            snapshot.epoch,
            first,
            stop,
            files,
            mapping.schema,
            mapping.options_json,
            ts_ms=ts_ms,
            table_first=first if last is None else last.table_first,
            eras=interface.extend_eras(last, first, mapping.schema, mapping.options_json),
        )
        self._context.on_step("commit")
        self._table.commit(commit)
        return commit

    # ── runs ──────────────────────────────────────────────────────────────────────────────────

    def run(
        self, progress: Progress | None = None, *, until: int | None = None, should_stop: ShouldStop | None = None
    ) -> Exported:
        """Export until the table has what the topic had at the start, or `until`; with `should_stop`, until that
        returns true. It is called after every round and waits where nothing was exported."""
        end = until
        while True:
            done = self.run_round(once=should_stop is None, until=_SEQ_MAX if end is None else end)
            if should_stop is None and end is None:
                end = done.head
            if progress is not None and self._new_commits:
                first = self._new_commits[0].first
                progress(self._new_commits[-1].stop - first, max((done.head if end is None else end) - first, 1))
            if should_stop is not None:
                is_done = should_stop(done.commit is None)
            else:
                is_done = done.commit is None or (end is not None and done.commit.stop >= end)
            if is_done:
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


HOLD_BYTES: Final = 1 << 30
_one_opens_a_directory = Lock()  # exports of several topics run in threads, and a directory has one writer


@dataclass(frozen=True)
class ExportGroup:
    location: Location
    topic: str
    name: str
    hold_bytes: int = HOLD_BYTES

    def __post_init__(self) -> None:
        if self.location.is_object_store:
            raise BadInput(
                f"{self.location.address} is an object store, which has no groups to move; nothing was written, name "
                "the server or the directory of the topic"
            )

    def begin(self, next_seq: int) -> None:
        """Create the group with its hold, or set both, at the position of the table."""
        with _one_opens_a_directory, open_location(self.location) as log:
            group = log.topic(self.topic, create=False).group(self.name)
            group.hold(self.hold_bytes)
            group.reset(max(next_seq - 1, 0))

    def move(self, next_seq: int) -> None:
        """Set the group to the position of the table."""
        with _one_opens_a_directory, open_location(self.location) as log:
            log.topic(self.topic, create=False).group(self.name).reset(max(next_seq - 1, 0))
