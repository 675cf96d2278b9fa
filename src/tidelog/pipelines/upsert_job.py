"""Export the newest record of each key into a Delta table (`--mode latest`), exactly once; compare and repair it.

    1  position     from the newest commit of the table, as for every export
    2  plan         a range of the topic, from one snapshot
    3  reduce       executors write the newest row of each key of their part to _tidelog/upsert/, with tombstones
    4  choose       the driver reads the keys of these files: the row of the newest part counts
    5  merge        one MERGE of the table deletes keys of tombstones, updates and inserts the others; the same commit
                    has the position

A process that dies leaves the table as it was before step 5 or as it is after it. A later range has later seqs, so a
row is replaced only by a newer one.

Comparison: the whole log that is there is reduced to its newest rows in the same way, and every row of the table is
compared with them by key, seq and hash. A row whose record the log lost (cap, age, power cut) stays, unless the log has
a newer record of its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Corrupt, TopicNotFound
from tidelog.pipelines import compare, export_job, latest_rows, record_mapping, row_hash
from tidelog.pipelines.export_job import ExportJob, JobContext, Progress
from tidelog.pipelines.latest_rows import LatestRows
from tidelog.pipelines.reconcile_job import Difference, Reconciled
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface, parquet
from tidelog.pipelines.table_formats.delta import DELETED_COLUMN, KEY_COLUMN, DeltaLakeTable, DeltaReader
from tidelog.pipelines.table_formats.interface import Commit, Merged, Table
from tidelog.pipelines.table_formats.parquet import ParquetFileWriter
from tidelog.spark import backends, decode, plan
from tidelog.spark.backends.interface import ReadTask, TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import IS_JSON, Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader
from tidelog.types import Ints

_STAGED_DIR: Final = "upsert"  # in interface.OWN_DIR
CHANGE_FEED: Final = {"delta.enableChangeDataFeed": "true"}
_ROW_TEXT_CHARS: Final = 200


def with_json_flag(options: Options) -> Options:
    """Return options that read what the key of a record needs."""
    return replace(options, columns=(*record_mapping.RECORD_COLUMNS, IS_JSON))


@dataclass(frozen=True)
class ReduceTask:
    """Reduce a range of a topic to the newest row of each key."""

    disk: Disk
    path: str  # of the file that `reduce_range` writes
    topic: str
    mapping: RecordMapping
    options: Options
    read_task: ReadTask
    seqs: tuple[int, ...] | None = None  # rows of these records only


class StagedRows(NamedTuple):
    path: str
    rows: int
    records: int
    keyless: int


class RowSummary(NamedTuple):
    """Keys, seqs and hashes of rows."""

    keys: pa.Array
    seqs: Ints
    hashes: row_hash.HashWords
    deleted: pa.Array


def reduce_range(task: ReduceTask) -> StagedRows:
    """Runs on an executor."""
    found = _read_latest(task)
    writer = ParquetFileWriter(task.disk, task.path, latest_rows.staged_schema(task.mapping), compute_hash=False)
    try:
        for batch in found.result():
            wanted = batch
            if task.seqs is not None:
                wanted = batch.filter(pa.array(np.isin(batch.column("seq").to_numpy(), task.seqs)))
            writer.add(wanted)
        writer.close(None)
    except BaseException:
        writer.abandon()
        raise
    return StagedRows(task.path, writer.rows, found.records, found.keyless)


def summarize_range(task: ReduceTask) -> RowSummary:
    """Runs on an executor."""
    return _summarize(task.mapping, _read_latest(task).result())


def _read_latest(task: ReduceTask) -> LatestRows:
    found = LatestRows(task.mapping, task.topic)
    schema = decode.default_schema(task.options)
    with closing(backends.open_backend(task.options)) as backend:
        for batch in TaskReader(backend, task.options, schema, RecordFilter(), task.read_task).batches():
            found.add(batch)
    return found


@dataclass(frozen=True)
class TableTask:
    """Read one part of a table."""

    reader: DeltaReader
    part: str | None
    mapping: RecordMapping


def summarize_table(task: TableTask) -> RowSummary:
    """Runs on an executor."""
    batches = (parquet.conform(batch, task.mapping.arrow) for batch in task.reader.read(task.part))
    return _summarize(task.mapping, (_with_flag(batch) for batch in batches))


def _with_flag(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column(DELETED_COLUMN, pa.array(np.zeros(batch.num_rows, np.bool_)))


def _summarize(mapping: RecordMapping, batches: Iterator[pa.RecordBatch]) -> RowSummary:
    keys, seqs, hashes, deleted = [pa.array([], pa.string())], [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)], []
    for batch in batches:
        keys.append(batch.column(KEY_COLUMN))
        seqs.append(parquet.row_seqs(batch))
        hashes.append(row_hash.hash_rows(batch.select(mapping.arrow.names)))
        deleted.append(batch.column(DELETED_COLUMN))
    return RowSummary(
        pa.concat_arrays(keys),
        np.concatenate(seqs),
        np.concatenate(hashes),
        pa.concat_arrays([pa.array([], pa.bool_()), *deleted]),
    )


def require_delta(table: Table) -> DeltaLakeTable:
    """Return the table as one that rows can be merged into. Raises BadInput for other formats."""
    if not isinstance(table, DeltaLakeTable):
        raise BadInput(
            f"{table.path} is a {table.format} table: the newest row of each key needs a MERGE, which only Delta "
            "tables have here; nothing was written, name a new table with the format delta"
        )
    return table


def staged_dir(path: str) -> str:
    return join(join(path, interface.OWN_DIR), _STAGED_DIR)


def remove_staged(disk: Disk, path: str) -> int:
    """Remove the staged rows of all exports of a table; return how many files."""
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = disk.list_dir(staged_dir(path))
    for name in names:
        disk.remove(join(staged_dir(path), name))
    return len(names)


class _Stage:
    """Staged rows of one commit."""

    def __init__(self, table: DeltaLakeTable, context: JobContext, mapping: RecordMapping) -> None:
        self._table, self._context, self._mapping = table, context, mapping
        self._run = f"{context.clock.now_us():016x}"
        self.files: list[StagedRows] = []
        table.disk.make_dir(staged_dir(table.path))

    def write(
        self, topic: str, options: Options, read_tasks: Sequence[ReadTask], seqs: tuple[int, ...] | None = None
    ) -> None:
        """Reduce ranges on executors."""
        tasks = [
            ReduceTask(self._table.disk, self._path(number), topic, self._mapping, options, read_task, seqs)
            for number, read_task in enumerate(read_tasks, len(self.files))
        ]
        self.files += self._context.runner.run(reduce_range, tasks)

    def write_deletes(self, keys: pa.Array) -> None:
        """Add tombstones."""
        schema = latest_rows.staged_schema(self._mapping)
        known = {KEY_COLUMN: keys, DELETED_COLUMN: pa.array([True] * len(keys))}
        columns = [known.get(field.name, pa.nulls(len(keys), field.type)) for field in schema]
        path = self._path(len(self.files))
        writer = ParquetFileWriter(self._table.disk, path, schema, compute_hash=False)
        writer.add(pa.RecordBatch.from_arrays(columns, schema=schema))
        writer.close(None)
        self.files.append(StagedRows(path, len(keys), 0, 0))

    def _path(self, number: int) -> str:
        return join(staged_dir(self._table.path), f"{self._run}-{number:05d}.parquet")

    def counts(self) -> tuple[int, int]:
        """Return how many keys the stage has, and how many of them are tombstones."""
        keys, flags = [], []
        for batch in self._read([KEY_COLUMN, DELETED_COLUMN]):
            keys.append(batch.column(0))
            flags.append(batch.column(1))
        if not keys:
            return 0, 0
        newest = latest_rows.newest_positions(pa.concat_arrays(keys))
        return len(newest), int(pa.concat_arrays(flags).to_numpy(zero_copy_only=False)[newest].sum())

    def open(self) -> pa.RecordBatchReader:
        """Open the newest row of each key; of equal keys the last file has it."""
        keys = [batch.column(0) for batch in self._read([KEY_COLUMN])]
        rows = latest_rows.filter_newest(self._read(None), keys)
        return pa.RecordBatchReader.from_batches(latest_rows.staged_schema(self._mapping), rows)

    def _read(self, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            yield from parquet.read_row_groups(self._table.disk, file.path, columns)

    def remove(self) -> None:
        for file in self.files:
            with suppress(FileNotFoundError):
                self._table.disk.remove(file.path)


class UpsertJob(ExportJob):
    """An export of which each commit merges the newest rows of its range."""

    def __init__(
        self,
        options: Options,
        table: Table,
        make_mapping: export_job.MakeMapping,
        context: JobContext,
        sizes: export_job.Sizes | None = None,
        *,
        change_feed: bool = False,
    ) -> None:
        self._merged, self._configuration = require_delta(table), CHANGE_FEED if change_feed else {}
        super().__init__(with_json_flag(options), table, make_mapping, context, sizes)
        if not isinstance(table.disk, BucketDisk):  # there they may be those of an export that is at work
            remove_staged(table.disk, table.path)

    def _export_range(
        self, snapshot: TopicSnapshot, mapping: RecordMapping, last: Commit | None, first: int, stop: int
    ) -> Commit:
        ts_ms = self._context.clock.now_us() // 1000
        self._context.on_step("plan")
        tasks = plan.plan_tasks(self._backend, self._options, [TopicRange(snapshot, first, stop)], RecordFilter())
        stage = _Stage(self._merged, self._context, mapping)
        self._context.on_step("write files")
        try:
            stage.write(self._topic, self._options, tasks)
            rows, deleted = stage.counts()
            commit = Commit(
                self._topic,
                snapshot.epoch,
                first,
                stop,
                (),
                mapping.schema,
                mapping.options_json,
                ts_ms=ts_ms,
                table_first=first if last is None else last.table_first,
                merged=Merged(
                    rows - deleted,
                    deleted,
                    sum(file.keyless for file in stage.files),
                    sum(file.records for file in stage.files),
                ),
            )
            self._context.on_step("commit")
            self._merged.merge(commit, stage.open, self._configuration)
        finally:
            stage.remove()
        return commit


# ── compare and repair ────────────────────────────────────────────────────────────────────────────


class _Rows:
    """Rows by key."""

    def __init__(self, parts: Sequence[RowSummary]) -> None:
        self.keys: list[str | None] = [key for part in parts for key in part.keys.to_pylist()]
        self.seqs = np.concatenate([np.zeros(0, np.int64), *(part.seqs for part in parts)])
        self.hashes = np.concatenate([np.zeros(0, np.uint64), *(part.hashes for part in parts)])
        self.deleted = [flag for part in parts for flag in part.deleted.to_pylist()]


@dataclass(frozen=True)
class _Found:
    result: Reconciled
    wrong_keys: tuple[str, ...]  # keys whose rows in the table are not those of the log
    doubled_keys: tuple[str, ...]  # of them those with several rows
    seqs: tuple[int, ...]  # the log's newest records of wrong keys


class LatestReconcileJob:
    """Compares an upsert table with the newest records of its topic."""

    def __init__(self, options: Options, table: Table, context: JobContext) -> None:
        self._topic = options.subscribe[0]
        self._options = with_json_flag(compare.comparison_options(options))
        self._table, self._context = require_delta(table), context
        self._backend = backends.open_backend(self._options)

    def close(self) -> None:
        self._backend.close()

    def run(self, *, repair: bool = False, progress: Progress | None = None) -> Reconciled:
        plan.resolve_topics(self._backend, self._options)
        snapshot, last = self._backend.snapshot(self._topic), self._table.last_commit()
        if snapshot is None:
            raise TopicNotFound(self._topic)
        assert last is not None, "the caller has seen a commit"
        interface.check_same_topic(last, self._topic, snapshot.epoch, self._table.path)
        mapping = record_mapping.mapping_from_commit(last.schema, last.shape)
        found = self._compare(snapshot, last, mapping)
        if progress is not None:
            progress(1, 1)
        if not repair or found.result.equal or not found.wrong_keys:
            return found.result
        self._repair(snapshot, last, mapping, found)
        now = self._compare(snapshot, last, mapping).result
        return found.result._replace(repaired=len(found.wrong_keys), left=now.differing, left_beyond=now.beyond)

    def _read_tasks(self, snapshot: TopicSnapshot, stop: int) -> list[ReadTask]:
        first = max(snapshot.evict_floor, snapshot.first_seq)
        if first >= stop:
            return []
        options = replace(self._options, split_bytes=export_job.Sizes().file_bytes)
        return plan.plan_tasks(self._backend, options, [TopicRange(snapshot, first, stop)], RecordFilter())

    def _compare(self, snapshot: TopicSnapshot, last: Commit, mapping: RecordMapping) -> _Found:
        runner, stop = self._context.runner, min(last.stop, snapshot.next_seq)
        tasks = [
            ReduceTask(self._table.disk, "", self._topic, mapping, self._options, task)
            for task in self._read_tasks(snapshot, stop)
        ]
        log = _Rows(runner.run(summarize_range, tasks))
        reader = DeltaReader(self._table.disk, self._table.path, None)
        parts = [TableTask(reader, part, mapping) for part in reader.parts()]
        table = _Rows(runner.run(summarize_table, parts))
        expected = {
            key: (int(log.seqs[at]), int(log.hashes[at]), bool(log.deleted[at]))
            for at, key in enumerate(log.keys)
            if key is not None
        }  # later ranges come later
        rows: dict[str, list[tuple[int, int]]] = {}
        for at, key in enumerate(table.keys):
            if key is not None:
                rows.setdefault(key, []).append((int(table.seqs[at]), int(table.hashes[at])))
        keyless = sum(key is None for key in table.keys)
        wrong, alone = [], 0
        for key in expected.keys() | rows.keys():
            there, newest = rows.get(key, []), expected.get(key)
            wanted = [] if newest is None or newest[2] else [newest[:2]]
            if there == wanted:
                continue
            if len(there) == 1 and (newest is None or newest[0] < there[0][0]) and self._is_lost(snapshot, there[0][0]):
                alone += 1
                continue
            wrong.append(key)
        wrong.sort(key=lambda key: min([seq for seq, _ in rows.get(key, [])] + [expected.get(key, (1 << 62,))[0]]))
        first = last.table_first if last.table_first is not None else 0
        result = Reconciled(
            self._topic,
            first,
            last.stop,
            sum(not deleted for _, _, deleted in expected.values()),
            len(table.keys),
            0,
            alone,
            row_hash.sum_hashes(table.hashes),
            len(tasks) + len(parts),
            tuple((seq, seq + 1) for seq in sorted({_seq_of(key, expected, rows) for key in wrong})),
            (),
            keyless,
            _first_difference(wrong[0], expected, rows) if wrong else _keyless_difference(keyless),
        )
        doubled = tuple(key for key in wrong if len(rows.get(key, [])) > 1)
        seqs = tuple(expected[key][0] for key in wrong if key in expected and not expected[key][2])
        return _Found(result, tuple(wrong), doubled, seqs)

    def _is_lost(self, snapshot: TopicSnapshot, seq: int) -> bool:
        """Whether the log lost a record, instead of deleting it."""
        if seq < snapshot.evict_floor or seq >= snapshot.next_seq:
            return True
        try:
            counts, _ = self._backend.account_missing(self._topic, seq, seq + 1)
        except Corrupt:
            return False  # there is a record, of another key: another program wrote the row
        return bool(counts.holes or counts.evicted or counts.expired)

    def _repair(self, snapshot: TopicSnapshot, last: Commit, mapping: RecordMapping, found: _Found) -> None:
        """Merge the log's rows of wrong keys, and delete keys that the log does not have. Keys with several rows are
        deleted by a commit before: a MERGE would change all of them."""
        commit = Commit(
            self._topic,
            snapshot.epoch,
            last.stop,
            last.stop,
            (),
            mapping.schema,
            mapping.options_json,
            repair=True,
            ts_ms=self._context.clock.now_us() // 1000,
            table_first=last.table_first,
        )
        if found.doubled_keys:
            stage = _Stage(self._table, self._context, mapping)
            try:
                stage.write_deletes(pa.array(found.doubled_keys, pa.string()))
                removed = Merged(0, len(found.doubled_keys), 0, 0)
                self._table.merge(msgspec.structs.replace(commit, merged=removed), stage.open, {})
            finally:
                stage.remove()
        stage = _Stage(self._table, self._context, mapping)
        try:
            stage.write_deletes(pa.array(found.wrong_keys, pa.string()))
            if found.seqs:  # after the tombstones: of equal keys the last file counts
                stage.write(self._topic, self._options, self._read_tasks(snapshot, last.stop), found.seqs)
            self._context.on_step("commit")
            merged = Merged(len(found.seqs), len(found.wrong_keys) - len(found.seqs), 0, 0)
            self._table.merge(msgspec.structs.replace(commit, merged=merged), stage.open, {})
            self._context.on_step("committed")
        finally:
            stage.remove()


def _seq_of(key: str, expected: Mapping[str, tuple[int, int, bool]], rows: Mapping[str, list[tuple[int, int]]]) -> int:
    return expected[key][0] if key in expected else rows[key][0][0]


def _first_difference(
    key: str, expected: Mapping[str, tuple[int, int, bool]], rows: Mapping[str, list[tuple[int, int]]]
) -> Difference:
    newest, there = expected.get(key), rows.get(key, [])
    name = repr(key)[:_ROW_TEXT_CHARS]
    if newest is None:
        log = f"no record of key {name}: it was deleted, or never there"
    else:
        log = f"key {name}: {'a tombstone' if newest[2] else 'the newest record'} of seq {newest[0]}"
    if not there:
        table = "no row"
    elif len(there) > 1:
        table = f"{len(there)} rows, of seqs {', '.join(str(seq) for seq, _ in sorted(there)[:5])}"
    else:
        is_same_seq = newest is not None and newest[0] == there[0][0]
        table = f"a row of seq {there[0][0]}{', with other values' if is_same_seq else ''}"
    return Difference(_seq_of(key, expected, rows), log, table)


def _keyless_difference(count: int) -> Difference | None:
    return Difference(None, "rows have keys", f"{count:,} rows without a key, of another program") if count else None
