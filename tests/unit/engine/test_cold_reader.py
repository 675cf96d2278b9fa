"""Ranges of objects of the cold tier: the right bytes, in few reads, and which blocks are cached."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from tidelog.disk.segment_store import DirectoryStore
from tidelog.engine.cold_reader import ZSTD, ColdReader
from tidelog.engine.manifest import ColdRow
from tidelog.formats import cold_object
from tidelog.formats.cold_object import BLOCK_BYTES
from tidelog.testing import SimDisk

SIZE = 9 * BLOCK_BYTES + 500


@cache
def data() -> bytes:
    return Random(1).randbytes(SIZE)


def reader_of(compression: int, cache_blocks: int) -> tuple[ColdReader, ColdRow]:
    disk = SimDisk()
    disk.make_dir("store")
    store = DirectoryStore(disk, "store")
    blocks = [data()[at : at + BLOCK_BYTES] for at in range(0, SIZE, BLOCK_BYTES)]
    content = b"".join(map(bytes, cold_object.encode_blocks(iter(blocks)))) if compression else data()
    store.put("topics/0000000A/x", [content])
    row = ColdRow("topics/0000000A/x", len(content), xxh3_64_intdigest(content), xxh3_64_intdigest(data()), compression)
    return ColdReader(store, cache_blocks * BLOCK_BYTES), row


@pytest.mark.parametrize("compression", [0, ZSTD])
@pytest.mark.parametrize("cache_blocks", [0, 3, 100])
def test_any_range_has_its_bytes(compression: int, cache_blocks: int) -> None:
    reader, row = reader_of(compression, cache_blocks)
    random = Random(cache_blocks)
    for _ in range(30):
        lo = random.randrange(SIZE)
        hi = lo + random.choice([1, 1000, BLOCK_BYTES, 3 * BLOCK_BYTES, SIZE])
        assert reader.read(row, SIZE, lo, hi) == data()[lo:hi]


@pytest.mark.parametrize("compression", [0, ZSTD])
def test_a_scan_leaves_the_cached_pages_of_others(compression: int) -> None:
    reader, row = reader_of(compression, cache_blocks=5)
    reader.read(row, SIZE, 100, 2 * BLOCK_BYTES)  # a page: blocks 0 and 1
    for lo in (2 * BLOCK_BYTES, 8 * BLOCK_BYTES):
        reader.read(row, SIZE, lo, lo + 6 * BLOCK_BYTES)
    reads = reader.reads
    assert reader.read(row, SIZE, 100, 2 * BLOCK_BYTES) == data()[100 : 2 * BLOCK_BYTES]
    assert reader.reads == reads, "still cached"
    reader.read(row, SIZE, 7 * BLOCK_BYTES, 7 * BLOCK_BYTES + 10)
    assert reader.reads == reads, "the last block of a scan is where the next read begins"
    reader.read(row, SIZE, 4 * BLOCK_BYTES, 4 * BLOCK_BYTES + 10)
    assert reader.reads == reads + 1
