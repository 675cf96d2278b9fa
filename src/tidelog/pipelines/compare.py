"""Compare a range of a topic with the same range of a table, on an executor: counts and hashes by block.

    seqs      first ├── block ──┼── block ──┼── block ──┤ stop
    log            rows, hash    rows, hash   rows, hash
    table          rows, hash    rows, hash   rows, hash         a block that differs is compared row by row

Both sides are read as Arrow, a few megabytes at a time, and not sorted: sums do not depend on order. A row whose record
was deleted from the log is a difference. A row whose record the log lost is not: below the floor (cap, age) the table
is compared with its own commits; above it (power cut, damage) the seqs are returned as `lost_ranges` and their rows
count as `table_only`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.disk.interface import Disk, join
from tidelog.engine import Counts
from tidelog.pipelines import record_mapping, row_hash
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import parquet
from tidelog.pipelines.table_formats.interface import DataFile, SeqRanges, TableScan, merge_ranges
from tidelog.spark import backends, plan
from tidelog.spark.backends.interface import Backend, ReadTask, TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader
from tidelog.types import Ints

BLOCK_SEQS: Final = 4096


@dataclass(frozen=True)
class ComparisonTask:
    """The input of one comparison task."""

    topic: str
    path: str  # of the table
    disk: Disk
    mapping: RecordMapping
    options: Options
    first: int
    stop: int
    evict_floor: int  # the log has no records below it
    next_seq: int  # nor from this seq on
    read_tasks: tuple[ReadTask, ...]  # of [max(first, evict_floor), min(stop, next_seq))
    other_names: tuple[str, ...]  # files of other programs with rows of the range; all files if rows are transformed
    quarantine_names: tuple[str, ...]
    committed_files: tuple[DataFile, ...] = ()  # exported files of the range, as their commits have them
    is_transformed: bool = False  # rows went through a function: they are compared with their commits only
    scan: TableScan | None = None  # of a table that is read through its library instead of file by file

    @property
    def compared_from(self) -> int:
        return min(max(self.first, self.evict_floor), self.stop)


def comparison_options(options: Options) -> Options:
    """Return options with which a range is read by one task and gaps are skipped."""
    return replace(options, partitions_min=1, split_bytes=1 << 62, on_gap="skip")


def plan_range(
    backend: Backend, options: Options, snapshot: TopicSnapshot, first: int, stop: int
) -> tuple[ReadTask, ...]:
    """Plan the part of a range that the log can have."""
    first, stop = max(first, snapshot.evict_floor), min(stop, snapshot.next_seq)
    if first >= stop:
        return ()
    return tuple(plan.plan_tasks(backend, options, [TopicRange(snapshot, first, stop)], RecordFilter()))


class ComparisonResult(NamedTuple):
    first: int
    stop: int
    log_rows: int
    table_rows: int
    log_hash: int
    table_hash: int
    table_only: int  # rows whose records the log lost
    differing_blocks: SeqRanges
    changed_files: tuple[str, ...]  # files that differ from their commit
    lost_ranges: SeqRanges = ()  # seqs above the floor that the table has and the log lost
    stray_files: tuple[str, ...] = ()  # exported files that also have rows outside of their range
    table_only_hash: int = 0


@dataclass
class BlockSums:
    """Rows and hashes of a range, by block."""

    first: int
    stop: int
    rows: Ints = field(init=False)
    hashes: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        count = -(-max(self.stop - self.first, 1) // BLOCK_SEQS)
        self.rows, self.hashes = np.zeros(count, np.int64), np.zeros(count, np.uint64)

    def add(self, seqs: Ints, hashes: NDArray[np.uint64]) -> None:
        block = (seqs - self.first) // BLOCK_SEQS
        self.rows += np.bincount(block, minlength=len(self.rows))
        np.add.at(self.hashes, block, hashes)

    def remove(self, seqs: Ints, hashes: NDArray[np.uint64]) -> None:
        block = (seqs - self.first) // BLOCK_SEQS
        self.rows -= np.bincount(block, minlength=len(self.rows))
        np.subtract.at(self.hashes, block, hashes)

    def differences(self, other: BlockSums) -> Iterator[tuple[int, int]]:
        for number in np.flatnonzero((self.rows != other.rows) | (self.hashes != other.hashes)).tolist():
            low = self.first + number * BLOCK_SEQS
            yield low, min(low + BLOCK_SEQS, self.stop)


def compare_range(task: ComparisonTask) -> ComparisonResult:
    """Runs on an executor."""
    low = task.compared_from
    log_sums, table_sums, log_quarantine, table_quarantine = (BlockSums(low, task.stop) for _ in range(4))
    alone, alone_hash, table_rows, table_hash = 0, 0, 0, 0
    counts = Counts()
    if not task.is_transformed:
        for rows, found in read_log_rows(task):
            _add_batch(log_sums, rows.table)
            if rows.quarantined is not None:
                _add_batch(log_quarantine, rows.quarantined)
            counts = found
    for batch in read_table_rows(task):
        hashes = row_hash.hash_rows(batch)
        table_rows, table_hash = table_rows + len(batch), (table_hash + row_hash.sum_hashes(hashes)) & row_hash.MASK_64
        if task.is_transformed:
            continue
        seqs = parquet.row_seqs(batch)
        seen = seqs >= low
        alone, alone_hash = alone + int((~seen).sum()), alone_hash + row_hash.sum_hashes(hashes[~seen])
        table_sums.add(seqs[seen], hashes[seen])
    for batch in parquet.read_batches(task.disk, task.path, task.quarantine_names, low, task.stop):
        _add_batch(table_quarantine, batch.cast(record_mapping.QUARANTINE_SCHEMA))
    blocks = sorted({*log_sums.differences(table_sums), *log_quarantine.differences(table_quarantine)})
    lost: SeqRanges = ()
    if blocks and not task.is_transformed and (_has_missing_records(counts) or task.stop > task.next_seq):
        lost = _lost_in_blocks(task, blocks)
        for batch in read_table_rows(task):
            seqs = parquet.row_seqs(batch)
            is_lost = in_ranges(seqs, lost)
            hashes = row_hash.hash_rows(batch)[is_lost]
            alone, alone_hash = alone + len(hashes), alone_hash + row_hash.sum_hashes(hashes)
            table_sums.remove(seqs[is_lost], hashes)
        for batch in parquet.read_batches(task.disk, task.path, task.quarantine_names, low, task.stop):
            seqs = parquet.row_seqs(batch)
            is_lost = in_ranges(seqs, lost)
            table_quarantine.remove(
                seqs[is_lost], row_hash.hash_rows(batch.cast(record_mapping.QUARANTINE_SCHEMA))[is_lost]
            )
        blocks = sorted({*log_sums.differences(table_sums), *log_quarantine.differences(table_quarantine)})
    changed = (
        tuple(file.name for file in task.committed_files) if _differs_from_commit(task, table_rows, table_hash) else ()
    )
    log_hash = row_hash.sum_hashes(log_sums.hashes)
    return ComparisonResult(
        task.first,
        task.stop,
        int(log_sums.rows.sum()),
        table_rows,
        log_hash,
        table_hash,
        alone,
        tuple(blocks) if not task.is_transformed else (),
        changed,
        lost,
        () if task.is_transformed else tuple(_stray_files(task)),
        alone_hash & row_hash.MASK_64,
    )


def find_lost_ranges(task: ComparisonTask) -> SeqRanges:
    """Runs on an executor: find the seqs of a range that only the table has and that were not deleted from the log."""
    return _lost_in_blocks(task, [(task.compared_from, task.stop)])


def _has_missing_records(counts: Counts) -> bool:
    """Whether seqs of a range have no record for another reason than a delete."""
    return bool(counts.holes or counts.evicted or counts.expired)


def in_ranges(seqs: Ints, ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return for each seq whether it is in one of the ranges [first, stop), which ascend and do not overlap."""
    if not ranges:
        return np.zeros(len(seqs), np.bool_)
    firsts, stops = np.array(ranges, np.int64).T
    at = np.searchsorted(firsts, seqs, side="right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (seqs < stops[np.maximum(at, 0)])
    return found


def _lost_in_blocks(task: ComparisonTask, blocks: Sequence[tuple[int, int]]) -> SeqRanges:
    """Find the seqs of some blocks that only the table has and that were not deleted from the log."""
    there, here = (
        np.unique(np.concatenate([np.zeros(0, np.int64), *found])) for found in _seqs_in_blocks(task, blocks)
    )
    alone = np.setdiff1d(there, here)
    lost: list[tuple[int, int]] = []
    with closing(backends.open_backend(task.options)) as backend:
        for run in np.split(alone, np.flatnonzero(np.diff(alone) > 1) + 1):
            if len(run):
                first, stop = int(run[0]), int(run[-1]) + 1
                lost += _ranges_not_deleted(backend, task.topic, first, min(stop, task.next_seq))
                lost.append((max(first, task.next_seq), stop))
    return merge_ranges(lost)


def _seqs_in_blocks(task: ComparisonTask, blocks: Sequence[tuple[int, int]]) -> tuple[list[Ints], list[Ints]]:
    """Return the seqs of the table's rows, also in quarantine, and of the log's records, in some blocks."""
    there: list[Ints] = []
    here: list[Ints] = []
    for rows, _ in read_log_rows(task):
        here += [parquet.row_seqs(batch) for batch in (rows.table, rows.quarantined) if batch is not None]
    bad = parquet.read_batches(task.disk, task.path, task.quarantine_names, task.compared_from, task.stop)
    for batch in chain(read_table_rows(task), bad):
        seqs = parquet.row_seqs(batch)
        there.append(seqs[in_ranges(seqs, blocks)])
    return there, [seqs[in_ranges(seqs, blocks)] for seqs in here]


def _ranges_not_deleted(backend: Backend, topic: str, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range without records that were not deleted, by bisection."""
    if first >= stop:
        return
    counts, _ = backend.account_missing(topic, first, stop)
    if counts.deleted == stop - first:
        return
    if not counts.deleted:
        yield first, stop
        return
    middle = (first + stop) // 2
    yield from _ranges_not_deleted(backend, topic, first, middle)
    yield from _ranges_not_deleted(backend, topic, middle, stop)


def _stray_files(task: ComparisonTask) -> Iterator[str]:
    for file in task.committed_files:
        found = parquet.seq_bounds(task.disk, join(task.path, file.name))
        if found is not None and found[0] and (found[1] < task.first or found[2] >= task.stop):
            yield file.name


def _differs_from_commit(task: ComparisonTask, rows: int, hashed: int) -> bool:
    """Whether the files of a range have other rows than were committed."""
    if not task.committed_files:
        return False
    return (rows, hashed) != (
        sum(file.rows for file in task.committed_files),
        sum(file.hash for file in task.committed_files) & row_hash.MASK_64,
    )


def _add_batch(sums: BlockSums, batch: pa.RecordBatch) -> None:
    sums.add(batch.column("seq").to_numpy(), row_hash.hash_rows(batch))


def read_log_rows(task: ComparisonTask) -> Iterator[tuple[record_mapping.TableRows, Counts]]:
    """Read the log as rows of the table, with the counts so far: complete with the last batch."""
    counts = Counts()
    with closing(backends.open_backend(task.options)) as backend:
        for read_task in task.read_tasks:
            reader = TaskReader(backend, task.options, record_mapping.RECORD_SCHEMA, RecordFilter(), read_task)
            for rows in record_mapping.map_batches(task.mapping, reader.batches(), task.topic):
                yield rows, counts
            counts += reader.counts
    yield record_mapping.TableRows(pa.RecordBatch.from_pylist([], schema=task.mapping.arrow), None), counts


def read_table_rows(task: ComparisonTask) -> Iterator[pa.RecordBatch]:
    """Read the rows of the table."""
    first, stop = (None, None) if task.is_transformed else (task.first, task.stop)
    if task.scan is not None:
        yield from task.scan.rows(first, stop, task.mapping.arrow)
        return
    own = () if task.is_transformed else tuple(file.name for file in task.committed_files)
    names = (*own, *task.other_names)
    for batch in parquet.read_batches(task.disk, task.path, names, first, stop):
        yield parquet.conform(batch, task.mapping.arrow)
