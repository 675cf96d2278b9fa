"""[hot] The tag index of a segment: which rows carry a tag, or one that begins so.

    rows      0    1    2    3    4    5        tags, sorted, each once     starts   rows by tag
    tags      b    ∅    a    ab   b    a        a                           0        2 5
                                                ab                          2        3
                                                b                           3        0 4
                                                                            5
    exact "a"   →  rows[0:2]       →  2 5
    prefix "a"  →  rows[0:3]       →  2 5 3, sorted
    prefix ""   →  every tagged row; an untagged one is never found

Nothing is kept up to date: an index is made from a segment's tag column when a delete asks for it,
and lies in a cache of bounded size for the next one. Tags are bytes and compare as bytes.
Built by Arrow and NumPy, 10 000 rows in 0.5 to 2 ms by how many tags differ; a search halves, 7 to 27 µs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.formats import compute as pc
from tidelog.types import Ints

Key: TypeAlias = tuple[int, int, int]  # topic id, base of the segment, rows that were indexed

_OBJECT_BYTES: Final = 1_024  # what an index costs besides its values: four headers, a key, a place in the cache


class TagIndex:
    """Which rows carry which tag. Never changes, so threads share it freely."""

    __slots__ = ("_blob", "_bounds", "_first_row", "_rows", "_starts")

    def __init__(self, blob: bytes, bounds: Ints, starts: Ints, rows: NDArray[np.uint32], first_row: int) -> None:
        self._blob = blob  # the sorted tags, one behind the other
        self._bounds = bounds  # tag i is blob[bounds[i] : bounds[i + 1]]
        self._starts = starts  # its rows are rows[starts[i] : starts[i + 1]]
        self._rows = rows  # rising within a tag; half the size of Ints, and a segment never has 2³² of them
        self._first_row = first_row

    @classmethod
    def build(cls, tags: pa.Array, first_row: int = 0) -> TagIndex:
        """The index of this column, whose first value is row `first_row`. Null and empty mean untagged."""
        tags = tags if tags.type == pa.binary() else tags.cast(pa.binary())
        tagged = pc.fill_null(pc.greater(pc.binary_length(tags), 0), False)
        rows = np.flatnonzero(tagged.to_numpy(zero_copy_only=False)).astype(np.uint32)
        encoded = tags.filter(tagged).dictionary_encode()
        order = pc.array_sort_indices(encoded.dictionary)
        # 16 bits where they do: NumPy then sorts by digits, 10 000 rows in 0.05 ms instead of 0.3 to 0.65.
        rank = np.empty(len(order), np.uint16 if len(order) <= 1 << 16 else np.uint32)
        rank[order.to_numpy()] = np.arange(len(order))
        ranks = rank[encoded.indices.to_numpy()]
        # Stable: rows of one tag stay in their order, which is rising.
        by_tag = rows[np.argsort(ranks, kind="stable")]
        starts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.bincount(ranks, minlength=len(order)), out=starts[1:])
        return cls(*_laid_out(encoded.dictionary.take(order)), starts, by_tag, first_row)

    @property
    def nbytes(self) -> int:
        """The memory that it holds, about."""
        return len(self._blob) + self._bounds.nbytes + self._starts.nbytes + self._rows.nbytes + _OBJECT_BYTES

    def exact(self, tag: bytes) -> Ints:
        """The rows that carry this tag, rising."""
        at = self._find(tag)
        there = at < len(self._starts) - 1 and self._tag(at) == tag
        return self._found(at, at + there)

    def prefix(self, start: bytes) -> Ints:
        """The rows whose tag begins so, rising; every tagged row where it is empty."""
        behind = _behind(start)
        rows = self._found(self._find(start), len(self._starts) - 1 if behind is None else self._find(behind))
        rows.sort()
        return rows

    def _tag(self, at: int) -> bytes:
        return self._blob[self._bounds[at] : self._bounds[at + 1]]

    def _find(self, tag: bytes) -> int:
        """How many of the tags sort before this one."""
        return bisect_left(range(len(self._starts) - 1), tag, key=self._tag)

    def _found(self, lo: int, hi: int) -> Ints:
        return self._rows[self._starts[lo] : self._starts[hi]].astype(np.int64) + self._first_row


def _behind(start: bytes) -> bytes | None:
    """The least value that sorts behind everything that begins so; None where there is nothing behind."""
    head = start.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else None


def _laid_out(values: pa.Array) -> tuple[bytes, Ints]:
    """The values of a binary column one behind the other, and where each begins and the last one ends."""
    _, ends, data = values.buffers()
    at = np.frombuffer(ends, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    return bytes(memoryview(data)[at[0] : at[-1]]), at - at[0]


class CacheStats(NamedTuple):
    hits: int
    misses: int
    evictions: int  # left to make room
    entries: int
    nbytes: int


class TagCache:
    """Keeps the indexes used last, `bytes_max` of them together. Safe to call from any thread.

    A segment that grew is asked for with more rows; its index then takes the place of the shorter
    one, so that a topic which is written and deleted from in turn does not fill the cache with its
    own past. Ids and bases are never given to other records: what is late is useless, not wrong.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: OrderedDict[tuple[int, int], tuple[int, TagIndex]] = OrderedDict()
        self._nbytes = self._hits = self._misses = self._evictions = 0
        self._guard = Lock()

    def get(self, key: Key, build: Callable[[], TagIndex]) -> TagIndex:
        """The index of these rows. It is built outside the lock, so one slow segment holds up nobody else's."""
        topic_id, base, rows = key
        with self._guard:
            held = self._held.get((topic_id, base))
            if held is not None and held[0] == rows:
                self._hits += 1
                self._held.move_to_end((topic_id, base))
                return held[1]
            self._misses += 1
        index = build()
        with self._guard:
            self._keep((topic_id, base), rows, index)
        return index

    def drop(self, topic_id: int, base: int | None = None) -> None:
        """Forget one segment's index, or all of a topic's."""
        with self._guard:
            gone = [key for key in self._held if key[0] == topic_id and base in (None, key[1])]
            for key in gone:
                self._nbytes -= self._held.pop(key)[1].nbytes

    def stats(self) -> CacheStats:
        with self._guard:
            return CacheStats(self._hits, self._misses, self._evictions, len(self._held), self._nbytes)

    def _keep(self, segment: tuple[int, int], rows: int, index: TagIndex) -> None:
        held = self._held.get(segment)
        # Another thread may have built the same rows, or more of them, in the meantime.
        if index.nbytes > self._bytes_max or (held is not None and held[0] >= rows):
            return
        if held is not None:
            self._nbytes -= held[1].nbytes
        self._held[segment] = rows, index
        self._held.move_to_end(segment)
        self._nbytes += index.nbytes
        while self._nbytes > self._bytes_max:
            _, (_, oldest) = self._held.popitem(last=False)
            self._nbytes -= oldest.nbytes
            self._evictions += 1
