"""Compare a range of a topic with the same range of a table, on an executor: counts and hashes by block.

    seqs      first ├── block ──┼── block ──┼── block ──┤ stop
    log            rows, hash    rows, hash   rows, hash
    table          rows, hash    rows, hash   rows, hash         a block that differs is what a closer look is given

Both sides are read as Arrow, a few megabytes at a time, and neither is sorted: sums do not mind. A row whose record was
deleted from the log is a difference. One whose record the log lost is not, because the log cannot say what it was:
below the floor (a cap, age) the table is compared with what its own commits say; above it (a power cut, damage) the
seqs are returned as `lost`, and their rows count as `alone`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.disk.interface import Disk, join
from tidelog.engine import Counts
from tidelog.pipelines import record_mapping, row_hash
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import delta, parquet_files
from tidelog.pipelines.table_formats.commits import DataFile
from tidelog.spark import backends
from tidelog.spark.backends.interface import Backend, ReadTask
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import Options
from tidelog.spark.task_reader import TaskReader
from tidelog.types import Ints

BLOCK_SEQS: Final = 4096


@dataclass(frozen=True)
class ComparisonTask:
    """What one task compares."""

    topic: str
    path: str  # of the table
    disk: Disk
    mapping: RecordMapping
    options: Options
    first: int
    stop: int
    evict_floor: int  # below it the log has nothing to say
    next_seq: int  # nor from this seq on
    read_tasks: tuple[ReadTask, ...]  # of [max(first, floor), min(stop, next))
    other_names: tuple[str, ...]  # files of others that may hold rows of the range; of a transformed one, all files
    quarantine_names: tuple[str, ...]
    committed_files: tuple[DataFile, ...] = ()  # files of ours inside the range, as their commits have them
    is_transformed: bool = False  # rows are not the log's any more: only their commits say what they were
    version: int | None = None  # of a Delta table whose rows are read through its library, and not file by file

    @property
    def compared_from(self) -> int:
        return min(max(self.first, self.evict_floor), self.stop)


class ComparisonResult(NamedTuple):
    first: int
    stop: int
    log_rows: int
    table_rows: int
    log_hash: int
    table_hash: int
    table_only: int  # rows that only the table has left to show, because the log lost them to a cap or to age
    differing_blocks: tuple[tuple[int, int], ...]  # ranges that differ
    changed_files: tuple[str, ...]  # files that are not what their commit says
    lost_ranges: tuple[tuple[int, int], ...] = ()  # seqs above the floor that the table has rows of and the log lost
    stray_files: tuple[str, ...] = ()  # files of ours that also hold rows outside of their range
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
    ours, theirs, bad_ours, bad_theirs = (BlockSums(low, task.stop) for _ in range(4))
    alone, alone_hash, table_rows, table_hash = 0, 0, 0, 0
    counts = Counts()
    if not task.is_transformed:
        for rows, found in read_log_rows(task):
            _add_batch(ours, rows.table)
            if rows.quarantined is not None:
                _add_batch(bad_ours, rows.quarantined)
            counts = found
    for batch in read_table_rows(task):
        hashes = row_hash.hash_rows(batch)
        table_rows, table_hash = table_rows + len(batch), (table_hash + row_hash.sum_hashes(hashes)) & row_hash.MASK_64
        if task.is_transformed:
            continue
        seqs = parquet_files.row_seqs(batch)
        seen = seqs >= low
        alone, alone_hash = alone + int((~seen).sum()), alone_hash + row_hash.sum_hashes(hashes[~seen])
        theirs.add(seqs[seen], hashes[seen])
    for batch in parquet_files.read_batches(task.disk, task.path, task.quarantine_names, low, task.stop):
        _add_batch(bad_theirs, batch.cast(record_mapping.QUARANTINE_SCHEMA))
    blocks = sorted({*ours.differences(theirs), *bad_ours.differences(bad_theirs)})
    lost: list[tuple[int, int]] = []
    if blocks and not task.is_transformed and (_has_missing_records(counts) or task.stop > task.next_seq):
        lost = _lost_in_blocks(task, blocks)
        for batch in read_table_rows(task):
            seqs = parquet_files.row_seqs(batch)
            mine = in_ranges(seqs, lost)
            hashes = row_hash.hash_rows(batch)[mine]
            alone, alone_hash = alone + len(hashes), alone_hash + row_hash.sum_hashes(hashes)
            theirs.remove(seqs[mine], hashes)
        for batch in parquet_files.read_batches(task.disk, task.path, task.quarantine_names, low, task.stop):
            seqs = parquet_files.row_seqs(batch)
            mine = in_ranges(seqs, lost)
            bad_theirs.remove(seqs[mine], row_hash.hash_rows(batch.cast(record_mapping.QUARANTINE_SCHEMA))[mine])
        blocks = sorted({*ours.differences(theirs), *bad_ours.differences(bad_theirs)})
    changed = (
        tuple(file.name for file in task.committed_files) if _differs_from_commit(task, table_rows, table_hash) else ()
    )
    log_hash = row_hash.sum_hashes(ours.hashes)
    return ComparisonResult(
        task.first,
        task.stop,
        int(ours.rows.sum()),
        table_rows,
        log_hash,
        table_hash,
        alone,
        tuple(blocks) if not task.is_transformed else (),
        changed,
        tuple(lost),
        () if task.is_transformed else tuple(_stray_files(task)),
        alone_hash & row_hash.MASK_64,
    )


def find_lost_ranges(task: ComparisonTask) -> tuple[tuple[int, int], ...]:
    """Runs on an executor: the seqs of a range that only the table has and that were not deleted from the log."""
    return tuple(_lost_in_blocks(task, [(task.compared_from, task.stop)]))


def _has_missing_records(counts: Counts) -> bool:
    """Whether seqs of a range have no record although none was deleted."""
    return bool(counts.holes or counts.evicted or counts.expired)


def in_ranges(seqs: Ints, ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """For each seq whether it is in one of some ranges [first, stop), which rise and do not overlap."""
    if not ranges:
        return np.zeros(len(seqs), np.bool_)
    firsts, stops = (np.array([each[side] for each in ranges], np.int64) for side in (0, 1))
    at = np.searchsorted(firsts, seqs, side="right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (seqs < stops[np.maximum(at, 0)])
    return found


def _lost_in_blocks(task: ComparisonTask, blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the seqs of some blocks that only the table has, those that were not deleted from the log."""
    there, here = (
        np.unique(np.concatenate([np.zeros(0, np.int64), *found])) for found in _seqs_in_blocks(task, blocks)
    )
    alone = np.setdiff1d(there, here)
    found: list[tuple[int, int]] = []
    with closing(backends.open_backend(task.options)) as place:
        for run in np.split(alone, np.flatnonzero(np.diff(alone) > 1) + 1):
            if not len(run):
                continue
            first, stop = int(run[0]), int(run[-1]) + 1
            for part in _ranges_not_deleted(place, task.topic, first, min(stop, task.next_seq)):
                found = _append_range(found, part)
            if stop > task.next_seq:
                found = _append_range(found, (max(first, task.next_seq), stop))
    return found


def _append_range(found: list[tuple[int, int]], part: tuple[int, int]) -> list[tuple[int, int]]:
    if found and found[-1][1] == part[0]:
        return [*found[:-1], (found[-1][0], part[1])]
    return [*found, part]


def _seqs_in_blocks(task: ComparisonTask, blocks: Sequence[tuple[int, int]]) -> tuple[list[Ints], list[Ints]]:
    """The seqs of the table's rows and of the log's records, in some blocks. Rows in quarantine count."""
    there: list[Ints] = []
    here: list[Ints] = []
    for rows, _ in read_log_rows(task):
        here += [parquet_files.row_seqs(batch) for batch in (rows.table, rows.quarantined) if batch is not None]
    bad = parquet_files.read_batches(task.disk, task.path, task.quarantine_names, task.compared_from, task.stop)
    for batch in chain(read_table_rows(task), bad):
        seqs = parquet_files.row_seqs(batch)
        there.append(seqs[in_ranges(seqs, blocks)])
    return there, [seqs[in_ranges(seqs, blocks)] for seqs in here]


def _ranges_not_deleted(backend: Backend, topic: str, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of a range without records that were not deleted: halved until each is one or the other."""
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
        found = parquet_files.seq_bounds(task.disk, join(task.path, file.name))
        if found is not None and found[0] and (found[1] < task.first or found[2] >= task.stop):
            yield file.name


def _differs_from_commit(task: ComparisonTask, rows: int, hashed: int) -> bool:
    """Whether a range whose files are known holds other rows than were committed."""
    if not task.committed_files:
        return False
    return (rows, hashed) != (
        sum(file.rows for file in task.committed_files),
        sum(file.hash for file in task.committed_files) & row_hash.MASK_64,
    )


def _add_batch(sums: BlockSums, batch: pa.RecordBatch) -> None:
    sums.add(batch.column("seq").to_numpy(), row_hash.hash_rows(batch))


def read_log_rows(task: ComparisonTask) -> Iterator[tuple[record_mapping.TableRows, Counts]]:
    """The log's side, as rows of the table, with the counts of all that was read so far: whole with the last one."""
    counts = Counts()
    with closing(backends.open_backend(task.options)) as place:
        for split in task.read_tasks:
            reading = TaskReader(place, task.options, record_mapping.RECORD_SCHEMA, RecordFilter(), split)
            for rows in record_mapping.map_batches(task.mapping, reading.batches(), task.topic):
                yield rows, counts
            counts += reading.counts
    yield record_mapping.TableRows(pa.RecordBatch.from_pylist([], schema=task.mapping.arrow), None), counts


def read_table_rows(task: ComparisonTask) -> Iterator[pa.RecordBatch]:
    """The table's side."""
    first, stop = (None, None) if task.is_transformed else (task.first, task.stop)
    if task.version is not None:
        yield from delta.read_rows(task.path, task.version, first, stop, task.mapping.arrow)
        return
    own = () if task.is_transformed else tuple(file.name for file in task.committed_files)
    names = (*own, *task.other_names)
    for batch in parquet_files.read_batches(task.disk, task.path, names, first, stop):
        yield parquet_files.conform(batch, task.mapping.arrow)
