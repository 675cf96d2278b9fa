"""[hot] The values of a caller's batch, all at once: whether they are bytes, how long they are, one behind the other.

    many      [b"…", b"…", …]        in a list or a tuple
    lengths   │ u32 │ u32 │ …        of this machine's order, as an array
    gathered  │ …value…value…value…  in memory that is used again

Asked of the compiled kernel where it was built; `compiled` says that it may be. Each function has its twin below it,
which serves where there was no compiler and says what is right. Measured for 1000 values of 100 bytes: 5 µs against 60
for the first two; to cut a thousand into frames 2 µs against 10.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import countOf

import numpy as np
from numpy.typing import NDArray

from tidelog.formats.frame import U32_MAX

try:
    from tidelog import kernel
except ImportError:  # built where there was no compiler
    COMPILED = False
else:
    COMPILED = True


def are_bytes(many: Sequence[object], *, compiled: bool = True) -> bool:
    """Whether each of them is bytes, and of no class derived from it."""
    return kernel.are_bytes(many) if COMPILED and compiled else plain_are_bytes(many)


def plain_are_bytes(many: Sequence[object]) -> bool:
    return countOf(map(type, many), bytes) == len(many)


def lengths(datas: Sequence[bytes], *, compiled: bool = True) -> tuple[Sequence[int], int]:
    """How long each of them is, and all of them together. A list where one is longer than a u32 can say."""
    known = kernel.lengths(datas) if COMPILED and compiled else None
    if known is None:
        return plain_lengths(datas)
    found = array("I")
    found.frombytes(known[0])
    return found, known[1]


def plain_lengths(datas: Sequence[bytes]) -> tuple[Sequence[int], int]:
    found = list(map(len, datas))
    return (found if found and max(found) > U32_MAX else array("I", found)), sum(found)


def cuts(
    lengths: array[int] | NDArray[np.uint32], size_max: int, count_max: int, *, compiled: bool = True
) -> list[tuple[int, int, int]]:
    """Values [lo, hi) that go together, and how long they are: as many as have `size_max` bytes, at most `count_max`,
    and one in any case. Lengths are u32 of this machine."""
    find = kernel.cuts if COMPILED and compiled else plain_cuts
    return find(lengths, size_max, count_max)


def plain_cuts(lengths: array[int] | NDArray[np.uint32], size_max: int, count_max: int) -> list[tuple[int, int, int]]:
    ends = np.asarray(lengths, np.uint32).cumsum(dtype=np.int64)
    count, lo, before, found, count_max = len(ends), 0, 0, [], max(count_max, 1)
    while lo < count:
        # Bisection by hand: an array is searched in C at ten times the price of these few looks.
        hi = max(lo + 1, bisect_right(ends, before + size_max, lo, min(count, lo + count_max)))
        end = int(ends[hi - 1])
        found.append((lo, hi, end - before))
        lo, before = hi, end
    return found


def gather(into: bytearray, pos: int, datas: Sequence[bytes], lo: int, hi: int, *, compiled: bool = True) -> int:
    """Copy values [lo, hi) to `pos` and behind it; return where the last one ends. ValueError where they do not fit:
    the memory is as long as it is, and what lies in it then is of no use."""
    put = kernel.gather if COMPILED and compiled else plain_gather
    return put(into, pos, datas, lo, hi)


def plain_gather(into: bytearray, pos: int, datas: Sequence[bytes], lo: int, hi: int) -> int:
    if not (pos >= 0 and 0 <= lo <= hi <= len(datas)):
        raise ValueError(f"values {lo} to {hi} of {len(datas)} at {pos}")
    laid = b"".join(datas[lo:hi])
    end = pos + len(laid)
    if end > len(into):
        raise ValueError(f"the values end at {end}, the memory at {len(into)}")
    into[pos:end] = laid
    return end
