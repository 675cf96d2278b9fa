"""The tag index of a sealed segment, `seg-<first>.tag`. The only module that knows its bytes.

    0       4         5      8      16     24        28     32       36     40
    ┌───────┬─────────┬──────┬──────┬──────┬─────────┬──────┬────────┬──────┬──────┬───────────┬───────┬───────┬─
    │ magic │ version │ zero │ base │ foot │ records │ tags │ blocks │ lead │ xxh3 │ directory │ block │ block │ …
    │ TLTI  │   u8    │ 3 B  │ u64  │ u64  │   u32   │ u32  │  u32   │ u32  │ u64  │ lead B    │       │       │
    └───────┴─────────┴──────┴──────┴──────┴─────────┴──────┴────────┴──────┴──────┴───────────┴───────┴───────┴─
    └──────────────────────────────── covered ──────────────────────────────┘      └ covered ──┘

    directory   size u32 × blocks │ xxh3 u64 × blocks │ len u16 × blocks │ the first tag of each block
    block       n u32 │ len u16 × n │ count u32 × n │ the n tags │ rows u32, all of the first tag, of the second, …

Tags are sorted as bytes, each once; the rows of a tag rise, and row i is the record with seq base + i. `foot` is the
XXH3-64 of the segment's `.foot`: an index beside another footer belongs to another segment. A search reads the head,
the directory and the blocks that it needs, each with its own checksum, so its cost does not grow with the number of
tags in the file. The file is derived from `.data`: without it the segment is scanned.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.types import Buffer, Ints

MAGIC: Final = b"TLTI"
VERSION: Final = 1
BLOCK_BYTES: Final = 4096  # a block is closed when it has this many
_HEAD = Struct("<4sB3sQQIIII")
_SUM = Struct("<Q")
HEAD_BYTES: Final = 48
_ENTRY_BYTES: Final = 4 + 8 + 2  # of the directory, without the tag itself
_TAG_BYTES: Final = 2 + 4  # of a block, without the tag and its rows
assert _HEAD.size + _SUM.size == HEAD_BYTES, "drawn above, frozen by tests/golden; changing it is a new format"


class TagDirectory(NamedTuple):
    """The head of an index and the positions of its blocks."""

    base: int
    footer_xxh3: int
    records: int
    tags: int
    block_pos: Ints  # block i is bytes [block_pos[i], block_pos[i + 1]) of the file
    sums: NDArray[np.uint64]
    first_tags: bytes
    bounds: Ints  # the first tag of block i is first_tags[bounds[i] : bounds[i + 1]]

    @property
    def blocks(self) -> int:
        return len(self.sums)

    @property
    def nbytes(self) -> int:
        """The approximate memory of the directory."""
        return len(self.first_tags) + self.block_pos.nbytes + self.sums.nbytes + self.bounds.nbytes

    def first_tag(self, number: int) -> bytes:
        """Return the first tag of a block."""
        return self.first_tags[self.bounds[number] : self.bounds[number + 1]]


class TagBlock(NamedTuple):
    """Sorted tags and their rows."""

    blob: bytes
    bounds: Ints  # tag i is blob[bounds[i] : bounds[i + 1]]
    rows: NDArray[np.uint32]
    starts: Ints  # its rows are rows[starts[i] : starts[i + 1]]

    def tag(self, number: int) -> bytes:
        return self.blob[self.bounds[number] : self.bounds[number + 1]]


def encode(base: int, foot: int, records: int, index: TagBlock) -> bytes:
    """Encode the file of an index that is given as one block of all tags."""
    blob, bounds, rows, starts = index
    count = len(bounds) - 1
    weights = np.diff(bounds) + 4 * np.diff(starts) + _TAG_BYTES
    ends = np.cumsum(weights)
    cuts = [0]
    while cuts[-1] < count:
        spent = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(min(int(np.searchsorted(ends, spent + BLOCK_BYTES)) + 1, count))
    blocks = [_encode_block(blob, bounds, rows, starts, lo, hi) for lo, hi in pairwise(cuts)]
    firsts = [blob[bounds[lo] : bounds[lo + 1]] for lo in cuts[:-1]]
    directory = b"".join(
        (
            np.array([len(block) for block in blocks], "<u4").tobytes(),
            np.array([xxh3_64_intdigest(block) for block in blocks], "<u8").tobytes(),
            np.array([len(first) for first in firsts], "<u2").tobytes(),
            *firsts,
        )
    )
    head = _HEAD.pack(MAGIC, VERSION, bytes(3), base, foot, records, count, len(blocks), len(directory))
    return b"".join((head, _SUM.pack(_checksum(head, directory)), directory, *blocks))


def _encode_block(blob: bytes, bounds: Ints, rows: NDArray[np.uint32], starts: Ints, lo: int, hi: int) -> bytes:
    return b"".join(
        (
            np.array([hi - lo], "<u4").tobytes(),
            np.diff(bounds[lo : hi + 1]).astype("<u2").tobytes(),
            np.diff(starts[lo : hi + 1]).astype("<u4").tobytes(),
            blob[bounds[lo] : bounds[hi]],
            rows[starts[lo] : starts[hi]].astype("<u4").tobytes(),
        )
    )


def directory_end(buf: Buffer, what: str = "tag index") -> int:
    """Return the size of head and directory; `buf` is the beginning of the file. The checksum is not verified."""
    if len(buf) < HEAD_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    magic, *_, directory_bytes = _HEAD.unpack_from(buf, 0)
    if magic != MAGIC:
        raise Corrupt(what, pos=0, reason=f"it starts with {magic!r} and not with {MAGIC!r}")
    return HEAD_BYTES + int(directory_bytes)


def decode_directory(buf: Buffer, size: int, what: str = "tag index") -> TagDirectory:
    """Decode head and directory of a file of `size` bytes, of which `buf` is the beginning. NewerFormat for a later
    version whose checksum holds, Corrupt for anything else."""
    end = directory_end(buf, what)
    if end > len(buf):
        raise Corrupt(what, pos=36, reason=f"its directory ends at byte {end}, there are {len(buf)}")
    _, version, pad, base, foot, records, tags, blocks, _ = _HEAD.unpack_from(buf, 0)
    body = bytes(memoryview(buf)[HEAD_BYTES:end])
    is_valid = _SUM.unpack_from(buf, _HEAD.size)[0] == _checksum(bytes(memoryview(buf)[: _HEAD.size]), body)
    if version > VERSION and is_valid:
        raise NewerFormat(what, found=version, known=VERSION)
    if not is_valid:
        raise Corrupt(what, pos=_HEAD.size, reason="checksum mismatch")
    if version != VERSION or pad != bytes(3):
        raise Corrupt(what, pos=4, reason=f"version {version} was never written")
    if len(body) < blocks * _ENTRY_BYTES:
        raise Corrupt(what, pos=HEAD_BYTES, reason=f"a directory of {len(body)} bytes is too short for {blocks} blocks")
    sizes = np.frombuffer(body, "<u4", blocks)
    sums = np.frombuffer(body, "<u8", blocks, 4 * blocks).astype(np.uint64)
    bounds = _offsets(np.frombuffer(body, "<u2", blocks, 12 * blocks))
    firsts = body[blocks * _ENTRY_BYTES :]
    block_pos = _offsets(sizes) + end
    if int(bounds[-1]) != len(firsts) or int(block_pos[-1]) != size:
        raise Corrupt(what, pos=HEAD_BYTES, reason=f"its blocks end at byte {int(block_pos[-1])}, the file at {size}")
    return TagDirectory(base, foot, records, tags, block_pos, sums, firsts, bounds)


def decode_block(directory: TagDirectory, number: int, buf: Buffer, what: str = "tag index") -> TagBlock:
    """Decode the block with this number from its bytes."""
    pos = int(directory.block_pos[number])
    size = int(directory.block_pos[number + 1]) - pos
    if len(buf) != size or xxh3_64_intdigest(buf) != int(directory.sums[number]):
        raise Corrupt(what, pos=pos, reason=f"block {number} does not match its checksum")
    count = int(np.frombuffer(buf, "<u4", 1)[0]) if size >= 4 else 0
    if 4 + _TAG_BYTES * count > size:
        raise Corrupt(what, pos=pos, reason=f"{count} tags do not fit block {number}")
    bounds = _offsets(np.frombuffer(buf, "<u2", count, 4))
    starts = _offsets(np.frombuffer(buf, "<u4", count, 4 + 2 * count))
    tags_at = 4 + _TAG_BYTES * count
    rows_at = tags_at + int(bounds[-1])
    if rows_at + 4 * int(starts[-1]) != size:
        raise Corrupt(what, pos=pos, reason=f"the tags and rows of block {number} do not add up to its size")
    rows = np.frombuffer(buf, "<u4", int(starts[-1]), rows_at).astype(np.uint32)
    if len(rows) and int(rows.max()) >= directory.records:
        raise Corrupt(what, pos=pos, reason=f"block {number} names a row that the segment does not have")
    return TagBlock(bytes(memoryview(buf)[tags_at:rows_at]), bounds, rows, starts)


def decode(buf: Buffer, what: str = "tag index") -> dict[bytes, list[int]]:
    """Decode the rows of each tag of a whole file. For checks and tests."""
    directory = decode_directory(buf, len(buf), what)
    tags: dict[bytes, list[int]] = {}
    for number, (lo, hi) in enumerate(pairwise(directory.block_pos.tolist())):
        block = decode_block(directory, number, memoryview(buf)[lo:hi], what)
        for i in range(len(block.bounds) - 1):
            tags[block.tag(i)] = block.rows[block.starts[i] : block.starts[i + 1]].tolist()
    if len(tags) != directory.tags or list(tags) != sorted(tags):
        reason = f"its head has {directory.tags} tags, its blocks {len(tags)}, or they are not in order"
        raise Corrupt(what, pos=HEAD_BYTES, reason=reason)
    return tags


def _offsets(lengths: NDArray[np.uint16] | NDArray[np.uint32]) -> Ints:
    """Return where adjacent values of these lengths begin, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def _checksum(head: bytes, body: bytes) -> int:
    digest = xxh3_64(head)
    digest.update(body)
    return digest.intdigest()
