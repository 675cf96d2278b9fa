"""Reads of segments in the cold tier: ranges of their objects, through a bounded cache of blocks.

    Segment.reader ──► ColdFile.fetch(lo, hi) ──► ColdReader: cached blocks, else one ranged read of the store

`.idx`, `.foot`, `.tag`, `.del` and `.siz` of such a segment stay on the disk, so a read of a range needs the store for
the frames alone. Opening a segment needs no store at all: it may be opened under the topic's lock. `fetch` waits for
the store and is called without it.

Blocks are those of a footer's chunks. A reader verifies them against the footer every time, as bytes that came over a
network; a block of a compressed object has a checksum of its own as well. Keys of objects are never reused, so a cached
block is never stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final

from tidelog.commitlog.segment import MmapReader
from tidelog.disk.segment_store import RangeFile, SegmentStore
from tidelog.engine.manifest import ColdRow
from tidelog.errors import Corrupt, StoreUnavailable
from tidelog.formats import cold_object
from tidelog.formats.cold_object import BLOCK_BYTES, BlockIndex
from tidelog.types import Buffer

_READ_BYTES_MAX: Final = 8 << 20  # of one ranged read
_INDEXES_MAX: Final = 1024
_CACHED_BLOCKS_MAX: Final = 4  # of one ranged read
ZSTD: Final = 1  # ColdRow.compression; 0: the object is the data file itself


class BlockCache:
    """The blocks that were read last, bounded by their bytes. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = Lock()
        self.hits = self.misses = 0

    def get(self, key: str, number: int) -> bytes | None:
        with self._lock:
            block = self._blocks.get((key, number))
            if block is None:
                self.misses += 1
                return None
            self.hits += 1
            self._blocks.move_to_end((key, number))
            return block

    def put(self, key: str, number: int, block: bytes) -> None:
        with self._lock:
            before = self._blocks.pop((key, number), b"")
            self._blocks[key, number] = block
            self._bytes += len(block) - len(before)
            while self._bytes > self._bytes_max and self._blocks:
                self._bytes -= len(self._blocks.popitem(last=False)[1])

    def drop(self, key: str) -> None:
        """Forget the blocks of an object."""
        with self._lock:
            for each in [each for each in self._blocks if each[0] == key]:
                self._bytes -= len(self._blocks.pop(each))

    @property
    def nbytes(self) -> int:
        return self._bytes


class ColdReader:
    """Reads objects of one store. Without a store every read raises. Thread-safe."""

    def __init__(
        self, store: SegmentStore | None, cache_bytes: int, find_foreign: Callable[[], str | None] = lambda: None
    ) -> None:
        """`find_foreign` returns why the store is not that of this database: asked where an object is missing."""
        self.store, self.cache, self._find_foreign = store, BlockCache(cache_bytes), find_foreign
        self._indexes: OrderedDict[str, BlockIndex] = OrderedDict()
        self._lock = Lock()
        self.reads = self.failures = self.bytes = 0  # of the store

    def where(self, row: ColdRow) -> str:
        """Return the address of an object, for messages."""
        return f"{'the cold store' if self.store is None else self.store.address}/{row.key}"

    def read(self, row: ColdRow, data_bytes: int, lo: int, hi: int) -> memoryview:
        """Return bytes [lo, hi) of the data of a segment.

        Raises:
            StoreUnavailable: the store does not answer, or there is none.
            Corrupt: the object is missing, too short, or a block of it does not match its checksum.
        """
        hi = min(hi, data_bytes)
        if lo >= hi:
            return memoryview(b"")
        first, stop = lo // BLOCK_BYTES, -(-hi // BLOCK_BYTES)
        cached = [self.cache.get(row.key, number) for number in range(first, stop)]
        begin, end = lo - first * BLOCK_BYTES, hi - first * BLOCK_BYTES
        if row.compression != ZSTD and not any(cached) and end <= _READ_BYTES_MAX:
            return self._fetch_plain(row, data_bytes, first, stop)[begin:end]
        blocks: list[Buffer] = []
        while len(blocks) < len(cached):
            block = cached[len(blocks)]
            if block is not None:
                blocks.append(block)
                continue
            missing = 1
            most = min(len(cached) - len(blocks), _READ_BYTES_MAX // BLOCK_BYTES)
            while missing < most and cached[len(blocks) + missing] is None:
                missing += 1
            number = first + len(blocks)
            blocks += self._fetch(row, data_bytes, number, number + missing)
        return memoryview(blocks[0] if len(blocks) == 1 else b"".join(blocks))[begin:end]

    def _fetch(self, row: ColdRow, data_bytes: int, first: int, stop: int) -> list[Buffer]:
        """Fetch blocks [first, stop) with one ranged read."""
        if row.compression != ZSTD:
            content = self._fetch_plain(row, data_bytes, first, stop)
            return [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
        index = self._load_index(row, data_bytes)
        lo, hi = index.byte_range(first, stop)
        content, blocks = memoryview(self._read_object(row, lo, hi)), list[Buffer]()
        for number in range(first, stop):
            begin, end = index.byte_range(number, number + 1)
            blocks.append(index.decode_block(number, content[begin - lo : end - lo], self.where(row)))
        for number in _cached_numbers(first, stop):
            self.cache.put(row.key, number, bytes(blocks[number - first]))
        return blocks

    def _fetch_plain(self, row: ColdRow, data_bytes: int, first: int, stop: int) -> memoryview:
        """Fetch blocks [first, stop) of an object that is not compressed, without a copy."""
        lo, hi = first * BLOCK_BYTES, min(stop * BLOCK_BYTES, data_bytes)
        content = memoryview(self._read_object(row, lo, hi))
        for number in _cached_numbers(first, stop):
            at = (number - first) * BLOCK_BYTES
            self.cache.put(row.key, number, bytes(content[at : at + BLOCK_BYTES]))
        return content

    def _load_index(self, row: ColdRow, data_bytes: int) -> BlockIndex:
        with self._lock:
            found = self._indexes.get(row.key)
        if found is not None:
            return found
        lo = max(row.length - cold_object.tail_bytes(data_bytes), 0)
        index = cold_object.decode_index(self._read_object(row, lo, row.length), row.length, self.where(row))
        if (index.data_bytes, index.block_bytes) != (data_bytes, BLOCK_BYTES):
            reason = f"it holds {index.data_bytes} bytes of data in blocks of {index.block_bytes}, not {data_bytes}"
            raise Corrupt(self.where(row), pos=lo, reason=reason)
        with self._lock:
            self._indexes[row.key] = index
            if len(self._indexes) > _INDEXES_MAX:
                self._indexes.popitem(last=False)
        return index

    def _read_object(self, row: ColdRow, lo: int, hi: int) -> bytes:
        if self.store is None:
            raise StoreUnavailable(
                "of this database",
                "these records are in the cold tier, and no store is known here",
                undone="nothing was read",
                step="open the database with cold=ADDRESS, or set TIDELOG_COLD_DIR",
            )
        self.reads += 1
        try:
            content = self.store.read(row.key, lo, hi)
        except FileNotFoundError:
            self.failures += 1
            if (reason := self._find_foreign()) is not None:
                step = "mount it, or give the address where the segments are"
                raise StoreUnavailable(self.store.address, reason, undone="nothing was read", step=step) from None
            raise Corrupt(
                self.where(row), pos=0, reason="the object is missing", next_step="restore it to the store"
            ) from None
        except StoreUnavailable:
            self.failures += 1
            raise
        self.bytes += len(content)
        if len(content) != hi - lo:
            self.failures += 1
            reason = f"it ends at byte {lo + len(content)}, it had {row.length}"
            raise Corrupt(self.where(row), pos=lo + len(content), reason=reason, next_step="restore it to the store")
        return content


def open_data_file(reader: ColdReader, row: ColdRow, size: int) -> RangeFile:
    """Open the data of a segment in the cold tier as a file that is only read, for copies of it."""
    return RangeFile(reader.where(row), size, lambda lo, hi: bytes(reader.read(row, size, lo, hi)))


def _cached_numbers(first: int, stop: int) -> range:
    """Return which of the blocks of one ranged read are cached. A scan of history reads many blocks once: it caches the
    last one, where its next read begins, and leaves the others' place to pages that are read again."""
    return range(first if stop - first <= _CACHED_BLOCKS_MAX else stop - 1, stop)


class ColdFile(MmapReader):
    """The data of a segment in the cold tier: each access reads its blocks. Created without I/O."""

    is_remote = True

    def __init__(self, reader: ColdReader, row: ColdRow, size: int) -> None:
        super().__init__(memoryview(b""))
        self._reader, self._row, self.size = reader, row, size

    def fetch(self, lo: int, hi: int) -> memoryview:
        return self._reader.read(self._row, self.size, max(lo, 0), min(hi, self.size))
