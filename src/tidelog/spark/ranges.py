"""[shell] A stretch of a segment by ranges of its files, wherever they are: behind a server, or in an object store.

Of the index only the entries of the stretch are fetched, and those behind them up to the next frame; of the data a few
megabytes at a time. Frames are checked one by one, because the sums of whole chunks need whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidelog.engine import Counts
from tidelog.errors import Corrupt, NotFound
from tidelog.formats import frame, idx, scan
from tidelog.formats.rows import Rows
from tidelog.spark.place import Found
from tidelog.spark.stretches import FilePart, Stretch

CHUNK_BYTES: Final = 4 << 20
BLOCK: Final = 4096  # index entries that are asked for at once
Part: TypeAlias = Callable[[str, int, int], bytes]  # of "idx" or "data", bytes [lo, hi); NotFound where they are gone


def of_file(part: Part, where: str, stretch: Stretch, file: FilePart, *, verify: bool) -> Iterator[tuple[Found, int]]:
    """Records of a stretch, each time with the seq behind them. NotFound: the file is another topic's, or gone."""
    entries, ends = _entries(part, stretch, file)
    positions = entries["frame_offset"].astype(np.int64)
    dead, at = stretch.dead(), 0
    while at < stretch.seqs:
        low = int(positions[at])
        until = max(int(np.searchsorted(positions, low + CHUNK_BYTES)), at + 1)
        until = int(np.searchsorted(positions, positions[until - 1], "right"))  # a frame is read once
        buf = part("data", low, ends if until == stretch.seqs else int(positions[until]))
        some = entries[at:until]
        rows = scan.walk_indexed(buf, some, 0, until - at, stretch.first + at, check=verify, origin=low)
        if not _is_of(rows, stretch.epoch):
            raise NotFound(f"segment {file.base} of {stretch.topic} is another topic's now")
        holes = until - at - len(rows)
        if holes != int((some["flags"] & idx.HOLE > 0).sum()):
            reason = f"seqs {stretch.first + at} and behind are not all where their index says"
            raise Corrupt(f"{where}/data", pos=low, reason=reason)
        deleted = 0
        if dead is not None:
            gone = dead[rows.seq - stretch.first]
            deleted = int(gone.sum())
            rows = rows.pick(np.flatnonzero(~gone)) if deleted else rows
        yield Found(rows if len(rows) else None, Counts(deleted=deleted, holes=holes)), stretch.first + until
        at = until


def _entries(part: Part, stretch: Stretch, file: FilePart) -> tuple[NDArray[np.void], int]:
    """The index of a stretch, and where its last frame ends: where the index names another one."""
    lo, hi = stretch.first - file.base, stretch.stop - file.base
    found = idx.read(part("idx", lo * idx.ENTRY_BYTES, hi * idx.ENTRY_BYTES))
    last = int(found["frame_offset"][-1])
    while hi < file.stop - file.base:
        more = min(hi + BLOCK, file.stop - file.base)
        some = idx.read(part("idx", hi * idx.ENTRY_BYTES, more * idx.ENTRY_BYTES))
        later = some["frame_offset"][some["frame_offset"] != last]
        if len(later):
            return found, int(later[0])
        hi = more
    return found, file.size


def _is_of(rows: Rows, epoch: int) -> bool:
    """Whether the frames of these rows are of the topic that was planned for."""
    return not len(rows) or bool((frame.headers(rows.buf, np.unique(rows.at))["topic_id"] == epoch).all())
