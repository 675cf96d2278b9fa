"""[hot] Where the frames of a sealed segment begin, for those whose records are JSON data and nothing else.

    seqs    1      1001     2001   …        first seq of each frame
    pos     0      104 062  208 124 …  end  and its first byte

The index has an entry for every record; a page needs two numbers of it. Found once, when all of the index is in memory
and was checked, kept for as long as the segment is, for segments of few frames: then a page is found without the index,
and nobody has to ask whether that is in memory still.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidelog.formats import idx

FRAMES_MAX: Final = 128  # 2 KB a segment
PAGE_FRAMES_MAX: Final = 16  # of a page that is told from its batches as they lie there


class Edges:
    __slots__ = ("_pos", "_seqs")

    def __init__(self, seqs: list[int], pos: list[int]) -> None:
        self._seqs, self._pos = seqs, pos

    def window(self, first: int, stop: int, bytes_max: int) -> tuple[int, int] | None:
        """The bytes that hold the frames of [first, stop); None where they are many."""
        at, end = bisect_right(self._seqs, first) - 1, bisect_left(self._seqs, stop)
        low, high = self._pos[at], self._pos[end]
        return None if end - at > PAGE_FRAMES_MAX or high - low > bytes_max else (low, high)


def edges(base: int, entries: NDArray[np.void], size: int) -> Edges | None:
    """Of a segment that begins with `base`, by its index and the bytes of its data. None where it has many frames, and
    where one of them is not a batch of such records."""
    at = np.ascontiguousarray(entries["frame_offset"])
    starts = np.flatnonzero(at[1:] > at[:-1]) + 1
    if len(starts) >= FRAMES_MAX or not len(at) or not (entries["flags"] == idx.BATCH | idx.JSON).all():
        return None
    return Edges([base, *(starts + base).tolist()], [int(at[0]), *at[starts].tolist(), size])
