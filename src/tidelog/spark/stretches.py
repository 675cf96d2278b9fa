"""What travels from the driver to the executors: seqs and where their bytes lie. Plain data, small, picklable.

    Split       what one task reads: stretches one after the other, and what is known about seqs without a record
    Stretch     seqs [first, stop) of one topic: in a segment's file, in the plan itself, or to be asked for
    Lost        seqs that a reader asked for and that were lost

Deletions travel with the plan, so that a task that runs twice gives the same rows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pyspark.sql.datasource import InputPartition

from tidelog.engine import Counts
from tidelog.errors import GapFound

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lost:
    """A gap, by topic."""

    topic: str
    first: int
    last: int  # included
    cause: str  # cap, ttl, mixed, recreated, dropped or retention
    earliest: int
    head: int
    is_open: bool = False  # how far it went is not known: `last` is `first`, and a row says null

    def error(self) -> GapFound:
        missed = self.last - self.first + 1
        made = GapFound(self.topic, (self.first, self.last, self.cause, missed, self.earliest, self.head))
        step = 'set onGap to "skip" or "emit" if you can do without them'
        said = f"{self.topic}: it was dropped" if self.cause == "dropped" else str(made).rpartition(";")[0]
        made.args = (f"{said}; nothing was written, {step}, or start behind them with startingOffsets",)
        return made


@dataclass(frozen=True, slots=True)
class FilePart:
    """A segment's file, as the plan saw it. Its first `size` bytes never change."""

    base: int
    stop: int
    size: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    topic: str
    epoch: int
    first: int
    stop: int
    size: int  # bytes to read, about
    file: FilePart | None = None  # None: they lie in no file of their own yet
    deleted: bytes | None = field(default=None, repr=False)  # one bit a seq
    inline: bytes | None = field(default=None, repr=False)  # the records themselves, as an Arrow stream
    counts: Counts | None = None  # of those, where the seqs went that have none

    @property
    def seqs(self) -> int:
        return self.stop - self.first

    def dead(self) -> Bools | None:
        """For each seq whether it is deleted; None: none is."""
        if self.deleted is None:
            return None
        bits = np.frombuffer(zlib.decompress(self.deleted), np.uint8)
        return np.unpackbits(bits, count=self.seqs).astype(bool)


def packed(dead: Bools | None) -> bytes | None:
    if dead is None or not dead.any():
        return None
    return zlib.compress(np.packbits(dead).tobytes(), 1)


@dataclass(frozen=True)
class Split(InputPartition):
    """What one task reads. `seqs` is what rows and counts must come to."""

    stretches: tuple[Stretch, ...] = ()
    lost: tuple[Lost, ...] = ()
    counts: Counts = Counts()  # noqa: RUF009  # a tuple of numbers
    seqs: int = 0

    @property
    def size(self) -> int:
        return sum(stretch.size for stretch in self.stretches)
