"""The figures of one shard."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Final

SYNC_US: Final = (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)
"""Upper bounds of the buckets in which durations of syncs are counted; one more bucket takes the rest."""


@dataclass(slots=True)
class Stats:
    """Counted since the shard was made; the shard hands out copies."""

    frames: int = 0  # without copies and those that put seqs on record: one write of one record is one frame
    copied: int = 0  # of copies that routers made: the records, and the frame in front of them
    batches: int = 0  # commit batches that were written
    bytes: int = 0
    fsyncs: int = 0  # for commit batches, ticks and the close; a rotation's own sync is part of the rotation
    rotations: int = 0
    depth: int = 0  # commits that wait in the queue now
    peak: int = 0  # the most that ever waited there
    refused: int = 0  # submits that found the queue full
    sync_us: int = 0  # spent in the fsyncs above
    sync_us_counts: list[int] = field(default_factory=lambda: [0] * (len(SYNC_US) + 1))

    def synced(self, us: int) -> None:
        self.fsyncs += 1
        self.sync_us += us
        self.sync_us_counts[bisect_left(SYNC_US, us)] += 1

    def copy(self) -> Stats:
        return replace(self, sync_us_counts=self.sync_us_counts.copy())
