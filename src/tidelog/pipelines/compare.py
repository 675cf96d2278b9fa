"""[hot] One range of a topic held against the same range of a table, on an executor: counts and hashes by block.

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

from tidelog.disk.seam import Disk, join
from tidelog.engine import Counts
from tidelog.pipelines import columns, delta_read, digest, files
from tidelog.pipelines.columns import Shape
from tidelog.pipelines.commits import DataFile
from tidelog.spark import places
from tidelog.spark.options import Options
from tidelog.spark.place import Place
from tidelog.spark.read import Reading
from tidelog.spark.stretches import Split
from tidelog.spark.where import Where
from tidelog.types import Ints

BLOCK: Final = 4096


@dataclass(frozen=True)
class Piece:
    """What one task compares."""

    topic: str
    path: str  # of the table
    disk: Disk
    shape: Shape
    options: Options
    first: int
    stop: int
    floor: int  # below it the log has nothing to say
    next: int  # nor from this seq on
    splits: tuple[Split, ...]  # of [max(first, floor), min(stop, next))
    names: tuple[str, ...]  # files of others that may hold rows of the range; of a transformed one, all files
    bad_names: tuple[str, ...]
    told: tuple[DataFile, ...] = ()  # files of ours inside the range, as their commits have them
    transformed: bool = False  # rows are not the log's any more: only their commits say what they were
    version: int | None = None  # of a Delta table whose rows are read through its library, and not file by file

    @property
    def low(self) -> int:
        return min(max(self.first, self.floor), self.stop)


class Compared(NamedTuple):
    first: int
    stop: int
    log_rows: int
    table_rows: int
    log_hash: int
    table_hash: int
    alone: int  # rows that only the table has left to show, because the log lost them to a cap or to age
    blocks: tuple[tuple[int, int], ...]  # ranges that differ
    changed: tuple[str, ...]  # files that are not what their commit says
    lost: tuple[tuple[int, int], ...] = ()  # seqs above the floor that the table has rows of and the log lost
    strays: tuple[str, ...] = ()  # files of ours that also hold rows outside of their range
    alone_hash: int = 0


@dataclass
class Sums:
    """Rows and hashes of a range, by block."""

    first: int
    stop: int
    rows: Ints = field(init=False)
    hashes: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        count = -(-max(self.stop - self.first, 1) // BLOCK)
        self.rows, self.hashes = np.zeros(count, np.int64), np.zeros(count, np.uint64)

    def add(self, seqs: Ints, hashes: NDArray[np.uint64]) -> None:
        block = (seqs - self.first) // BLOCK
        self.rows += np.bincount(block, minlength=len(self.rows))
        np.add.at(self.hashes, block, hashes)

    def remove(self, seqs: Ints, hashes: NDArray[np.uint64]) -> None:
        block = (seqs - self.first) // BLOCK
        self.rows -= np.bincount(block, minlength=len(self.rows))
        np.subtract.at(self.hashes, block, hashes)

    def differences(self, other: Sums) -> Iterator[tuple[int, int]]:
        for number in np.flatnonzero((self.rows != other.rows) | (self.hashes != other.hashes)).tolist():
            low = self.first + number * BLOCK
            yield low, min(low + BLOCK, self.stop)


def compared(piece: Piece) -> Compared:
    """Runs on an executor."""
    low = piece.low
    ours, theirs, bad_ours, bad_theirs = (Sums(low, piece.stop) for _ in range(4))
    alone, alone_hash, table_rows, table_hash = 0, 0, 0, 0
    counts = Counts()
    if not piece.transformed:
        for rows, found in log_rows(piece):
            _sum(ours, rows.table)
            if rows.bad is not None:
                _sum(bad_ours, rows.bad)
            counts = found
    for batch in table_rows_of(piece):
        hashes = digest.rows(batch)
        table_rows, table_hash = table_rows + len(batch), (table_hash + digest.total(hashes)) & digest.MASK
        if piece.transformed:
            continue
        seqs = files.seqs_of(batch)
        seen = seqs >= low
        alone, alone_hash = alone + int((~seen).sum()), alone_hash + digest.total(hashes[~seen])
        theirs.add(seqs[seen], hashes[seen])
    for batch in files.batches(piece.disk, piece.path, piece.bad_names, low, piece.stop):
        _sum(bad_theirs, batch.cast(columns.QUARANTINED))
    blocks = sorted({*ours.differences(theirs), *bad_ours.differences(bad_theirs)})
    lost: list[tuple[int, int]] = []
    if blocks and not piece.transformed and (_is_short(counts) or piece.stop > piece.next):
        lost = _lost(piece, blocks)
        for batch in table_rows_of(piece):
            seqs = files.seqs_of(batch)
            mine = inside(seqs, lost)
            hashes = digest.rows(batch)[mine]
            alone, alone_hash = alone + len(hashes), alone_hash + digest.total(hashes)
            theirs.remove(seqs[mine], hashes)
        for batch in files.batches(piece.disk, piece.path, piece.bad_names, low, piece.stop):
            seqs = files.seqs_of(batch)
            mine = inside(seqs, lost)
            bad_theirs.remove(seqs[mine], digest.rows(batch.cast(columns.QUARANTINED))[mine])
        blocks = sorted({*ours.differences(theirs), *bad_ours.differences(bad_theirs)})
    changed = tuple(file.name for file in piece.told) if _changed(piece, table_rows, table_hash) else ()
    log_hash = digest.total(ours.hashes)
    return Compared(
        piece.first,
        piece.stop,
        int(ours.rows.sum()),
        table_rows,
        log_hash,
        table_hash,
        alone,
        tuple(blocks) if not piece.transformed else (),
        changed,
        tuple(lost),
        () if piece.transformed else tuple(_strays(piece)),
        alone_hash & digest.MASK,
    )


def lost(piece: Piece) -> tuple[tuple[int, int], ...]:
    """Runs on an executor: the seqs of a range that only the table has and that were not deleted from the log."""
    return tuple(_lost(piece, [(piece.low, piece.stop)]))


def _is_short(counts: Counts) -> bool:
    """Whether seqs of a range have no record although none was deleted."""
    return bool(counts.holes or counts.evicted or counts.expired)


def inside(seqs: Ints, ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """For each seq whether it is in one of some ranges [first, stop), which rise and do not overlap."""
    if not ranges:
        return np.zeros(len(seqs), np.bool_)
    firsts, stops = (np.array([each[side] for each in ranges], np.int64) for side in (0, 1))
    at = np.searchsorted(firsts, seqs, side="right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (seqs < stops[np.maximum(at, 0)])
    return found


def _lost(piece: Piece, blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the seqs of some blocks that only the table has, those that were not deleted from the log."""
    there, here = (np.unique(np.concatenate([np.zeros(0, np.int64), *found])) for found in _seqs(piece, blocks))
    alone = np.setdiff1d(there, here)
    found: list[tuple[int, int]] = []
    with closing(places.of(piece.options)) as place:
        for run in np.split(alone, np.flatnonzero(np.diff(alone) > 1) + 1):
            if not len(run):
                continue
            first, stop = int(run[0]), int(run[-1]) + 1
            for part in _not_deleted(place, piece.topic, first, min(stop, piece.next)):
                found = _joined(found, part)
            if stop > piece.next:
                found = _joined(found, (max(first, piece.next), stop))
    return found


def _joined(found: list[tuple[int, int]], part: tuple[int, int]) -> list[tuple[int, int]]:
    if found and found[-1][1] == part[0]:
        return [*found[:-1], (found[-1][0], part[1])]
    return [*found, part]


def _seqs(piece: Piece, blocks: Sequence[tuple[int, int]]) -> tuple[list[Ints], list[Ints]]:
    """The seqs of the table's rows and of the log's records, in some blocks. Rows in quarantine count."""
    there: list[Ints] = []
    here: list[Ints] = []
    for rows, _ in log_rows(piece):
        here += [files.seqs_of(batch) for batch in (rows.table, rows.bad) if batch is not None]
    bad = files.batches(piece.disk, piece.path, piece.bad_names, piece.low, piece.stop)
    for batch in chain(table_rows_of(piece), bad):
        seqs = files.seqs_of(batch)
        there.append(seqs[inside(seqs, blocks)])
    return there, [seqs[inside(seqs, blocks)] for seqs in here]


def _not_deleted(place: Place, topic: str, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of a range without records that were not deleted: halved until each is one or the other."""
    if first >= stop:
        return
    counts, _ = place.settle(topic, first, stop)
    if counts.deleted == stop - first:
        return
    if not counts.deleted:
        yield first, stop
        return
    middle = (first + stop) // 2
    yield from _not_deleted(place, topic, first, middle)
    yield from _not_deleted(place, topic, middle, stop)


def _strays(piece: Piece) -> Iterator[str]:
    for file in piece.told:
        found = files.bounds(piece.disk, join(piece.path, file.name))
        if found is not None and found[0] and (found[1] < piece.first or found[2] >= piece.stop):
            yield file.name


def _changed(piece: Piece, rows: int, hashed: int) -> bool:
    """Whether a range whose files are known holds other rows than were committed."""
    if not piece.told:
        return False
    return (rows, hashed) != (
        sum(file.rows for file in piece.told),
        sum(file.hash for file in piece.told) & digest.MASK,
    )


def _sum(sums: Sums, batch: pa.RecordBatch) -> None:
    sums.add(batch.column("seq").to_numpy(), digest.rows(batch))


def log_rows(piece: Piece) -> Iterator[tuple[columns.Rows, Counts]]:
    """The log's side, as rows of the table, with the counts of all that was read so far: whole with the last one."""
    counts = Counts()
    with closing(places.of(piece.options)) as place:
        for split in piece.splits:
            reading = Reading(place, piece.options, columns.RECORD, Where(), split)
            for rows in columns.shaped(piece.shape, reading.batches(), piece.topic):
                yield rows, counts
            counts += reading.counts
    yield columns.Rows(pa.RecordBatch.from_pylist([], schema=piece.shape.arrow), None), counts


def table_rows_of(piece: Piece) -> Iterator[pa.RecordBatch]:
    """The table's side."""
    first, stop = (None, None) if piece.transformed else (piece.first, piece.stop)
    if piece.version is not None:
        yield from delta_read.rows(piece.path, piece.version, first, stop, piece.shape.arrow)
        return
    own = () if piece.transformed else tuple(file.name for file in piece.told)
    names = (*own, *piece.names)
    for batch in files.batches(piece.disk, piece.path, names, first, stop):
        yield files.conformed(batch, piece.shape.arrow)
