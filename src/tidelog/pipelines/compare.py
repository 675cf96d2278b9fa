"""[hot] One range of a topic held against the same range of a table, on an executor: counts and hashes by block.

    seqs      first ├── block ──┼── block ──┼── block ──┤ stop
    log            rows, hash    rows, hash   rows, hash
    table          rows, hash    rows, hash   rows, hash         a block that differs is what a closer look is given

Both sides are read as Arrow, a few megabytes at a time, and neither is sorted: sums do not mind. Where the log has lost
what the table still has, the table is held against what its own commits say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.disk.seam import Disk
from tidelog.pipelines import columns, digest, files
from tidelog.pipelines.columns import Shape
from tidelog.pipelines.commits import DataFile
from tidelog.spark import places
from tidelog.spark.options import Options
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
    splits: tuple[Split, ...]  # of [max(first, floor), stop)
    names: tuple[str, ...]  # files that may hold rows of the range
    bad_names: tuple[str, ...]
    told: tuple[DataFile, ...] = ()  # files that lie inside the range, as their commits have them
    transformed: bool = False  # rows are not the log's any more: their commits alone vouch for them


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

    def differences(self, other: Sums) -> Iterator[tuple[int, int]]:
        for number in np.flatnonzero((self.rows != other.rows) | (self.hashes != other.hashes)).tolist():
            low = self.first + number * BLOCK
            yield low, min(low + BLOCK, self.stop)


def compared(piece: Piece) -> Compared:
    """Runs on an executor."""
    low = min(max(piece.first, piece.floor), piece.stop)
    ours, theirs, bad_ours, bad_theirs = (Sums(low, piece.stop) for _ in range(4))
    alone, table_rows, table_hash = 0, 0, 0
    if not piece.transformed:
        for rows in log_rows(piece):
            _sum(ours, rows.table)
            if rows.bad is not None:
                _sum(bad_ours, rows.bad)
    for batch in table_rows_of(piece):
        hashes = digest.rows(batch)
        table_rows, table_hash = table_rows + len(batch), (table_hash + digest.total(hashes)) & digest.MASK
        if piece.transformed:
            continue
        seqs = batch.column("seq").to_numpy()
        seen = seqs >= low
        alone += int((~seen).sum())
        theirs.add(seqs[seen], hashes[seen])
    for batch in files.batches(piece.disk, piece.path, piece.bad_names, low, piece.stop):
        _sum(bad_theirs, batch.cast(columns.QUARANTINED))
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
    )


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


def log_rows(piece: Piece) -> Iterator[columns.Rows]:
    """The log's side, as rows of the table."""
    with closing(places.of(piece.options)) as place:
        for split in piece.splits:
            batches = Reading(place, piece.options, columns.RECORD, Where(), split).batches()
            yield from columns.shaped(piece.shape, batches, piece.topic)


def table_rows_of(piece: Piece) -> Iterator[pa.RecordBatch]:
    """The table's side."""
    bounds = (None, None) if piece.transformed else (piece.first, piece.stop)
    for batch in files.batches(piece.disk, piece.path, piece.names, *bounds):
        yield batch.cast(piece.shape.arrow)
