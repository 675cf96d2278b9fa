"""[shell] What a repair does on executors: copy the rows that stay out of files that are replaced.

    rows of the table after a repair  =  rows before it whose seqs are not in `Cut`  +  the log's rows of the cut ranges

A cut is never outside of what the log can produce: seqs from its floor to its end, without those whose records it lost.
So a row that the log cannot give back is copied, whatever file it is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.pipelines import columns, files
from tidelog.pipelines.commits import DataFile, KeptFile
from tidelog.pipelines.compare import inside
from tidelog.pipelines.files import FileWriter
from tidelog.pipelines.writing import FilePair, Target, attempt_id
from tidelog.types import Ints

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """Which rows a repair takes out: seqs in `ranges`, without those in `lost`. Both rise and do not overlap."""

    ranges: Ranges
    lost: Ranges = ()

    def drops(self, seqs: Ints) -> NDArray[np.bool_]:
        return inside(seqs, self.ranges) & ~inside(seqs, self.lost)

    def touches(self, low: int, high: int) -> bool:
        """Whether a file with seqs from low to high may hold rows that are taken out."""
        return any(first <= high and low < stop for first, stop in self.ranges)


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges that rise and do not touch, of any that are not empty."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(each for each in ranges if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((first, stop))
    return tuple(found)


@dataclass(frozen=True)
class Foreign:
    """A file that another program wrote, or that holds rows of other ranges than its own."""

    target: Target
    name: str
    number: int
    cut: Cut


class Copied(NamedTuple):
    name: str
    dropped: int
    kept: KeptFile | None  # None: nothing of it stays, or nothing goes and the file stays as it is


def copied(task: Foreign) -> Copied:
    """Copy the rows that stay, all columns as they are. Where none goes, the file can stay."""
    target = task.target
    name = f"kept-{target.footer.run}-{task.number:05d}-{attempt_id():05d}.parquet"
    writer: FileWriter | None = None
    dropped = rows = 0
    try:
        for batch in files.batches(target.disk, target.path, [task.name], None, None):
            goes = task.cut.drops(files.seqs_of(batch))
            dropped += int(goes.sum())
            stays = batch.filter(pa.array(~goes))
            rows += len(stays)
            if writer is None:
                writer = FileWriter(target.disk, target.staged(name), batch.schema.remove_metadata(), hashed=False)
            writer.add(stays.replace_schema_metadata(None))
        if writer is None or not dropped or not rows:
            if writer is not None:
                writer.abandon()
            return Copied(task.name, dropped, None)
        size = writer.close(None)
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    return Copied(task.name, dropped, KeptFile(name, rows, size))


@dataclass(frozen=True)
class Own:
    """Files of ours of one range, which are replaced."""

    target: Target
    first: int
    stop: int
    names: tuple[str, ...]
    bad_names: tuple[str, ...]
    cut: Cut
    rows: int  # that the range has to have beside those of the log, in this file or in files of others
    hash: int


def kept(task: Own) -> DataFile | None:
    """Copy the rows that stay into one file of the same range; None where there are none. A file without rows carries
    what the commit says of the range."""
    target = task.target
    name = f"part-{task.first:020d}-{task.stop:020d}-{target.footer.run}-{attempt_id():05d}-kept.parquet"
    with FilePair(target, name) as pair:
        for batch in _staying(task, task.names):
            pair.good.add(files.conformed(batch, target.shape.arrow))
        for batch in _staying(task, task.bad_names):
            pair.bad.add(batch.cast(columns.QUARANTINED))
        if not pair.good.rows and not pair.bad.rows and not task.rows:
            return None
        return pair.close(task.first, task.stop, rows=task.rows, hash=task.hash)


def _staying(task: Own, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    target = task.target
    for batch in files.batches(target.disk, target.path, names, task.first, task.stop):
        goes = task.cut.drops(files.seqs_of(batch))
        if not goes.all():
            yield batch.filter(pa.array(~goes))
