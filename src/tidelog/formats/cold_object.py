"""The object of a segment in the cold tier, compressed block by block. The only module that knows its bytes.

    0        8                                  end - 32 - 16 n      end - 32     end
    ┌────────┬─────────┬─────────┬───┬─────────┬────────────────────┬────────────┐
    │ header │ block 0 │ block 1 │ … │ block n │ n × [stop, xxh3]   │ trailer    │
    └────────┴─────────┴─────────┴───┴─────────┴────────────────────┴────────────┘
    header    "TLCB", version u8, three zeros
    block     a zstd frame of `block_bytes` bytes of `.data`, the last one of fewer
    index     stop u64: where the block ends in the object; xxh3 u64: of its compressed bytes
    trailer   data_bytes u64, block_bytes u32, n u32, xxh3 u64, "TLCB", version u8, three zeros

Little-endian. The checksum of the trailer covers header, index, and the trailer without it and what follows it. A
reader fetches the end of the object once, and then one range for any run of blocks. Decompressed, the object is the
`.data` file, byte for byte. An object that is not compressed is the `.data` file itself and has no layout of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.types import Buffer, Ints

MAGIC: Final = b"TLCB"
VERSION: Final = 1
BLOCK_BYTES: Final = 1 << 20  # one chunk of a footer: what is fetched at once is verified at once
_BLOCK_BYTES_MAX: Final = 1 << 26
_HEADER: Final = MAGIC + bytes((VERSION, 0, 0, 0))
_ENTRY = np.dtype([("stop", "<u8"), ("xxh3", "<u8")])
_TRAILER = Struct("<QIIQ4sB3s")
_COUNTS_BYTES: Final = 16  # of the trailer, before its checksum
HEADER_BYTES: Final = 8
TRAILER_BYTES: Final = 32
assert len(_HEADER) == HEADER_BYTES, "drawn above, frozen by tests/golden; changing it is a new format"
assert _TRAILER.size == TRAILER_BYTES, "drawn above"
_LEVEL: Final = 3


def encode_blocks(blocks: Iterable[Buffer], block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield an object piece by piece from blocks of `block_bytes` bytes, of which only the last may be shorter. Memory
    holds one block at a time."""
    codec = pa.Codec("zstd", compression_level=_LEVEL)
    stops: list[int] = []
    sums: list[int] = []
    pos, size = HEADER_BYTES, 0
    yield _HEADER
    for block in blocks:
        assert size == len(stops) * block_bytes, "only the last block may be shorter"
        assert len(block), "a block has bytes"
        packed: bytes = codec.compress(pa.py_buffer(block), asbytes=True)
        pos, size = pos + len(packed), size + len(block)
        stops.append(pos)
        sums.append(xxh3_64_intdigest(packed))
        yield packed
    entries = np.empty(len(stops), _ENTRY)
    entries["stop"], entries["xxh3"] = stops, np.array(sums, np.uint64)
    index = entries.tobytes()
    trailer = bytearray(_TRAILER.pack(size, block_bytes, len(stops), 0, MAGIC, VERSION, bytes(3)))
    trailer[_COUNTS_BYTES:-HEADER_BYTES] = _checksum(_HEADER, index, trailer[:_COUNTS_BYTES]).to_bytes(8, "little")
    yield index + trailer


def _checksum(header: Buffer, index: Buffer, counts: Buffer) -> int:
    digest = xxh3_64(header)
    digest.update(index)
    digest.update(counts)
    return digest.intdigest()


def tail_bytes(data_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return how many bytes at the end of an object hold index and trailer."""
    return TRAILER_BYTES + _ENTRY.itemsize * -(-data_bytes // block_bytes)


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Where the blocks of an object are."""

    data_bytes: int
    block_bytes: int
    stops: Ints
    sums: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sums)

    def byte_range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the bytes [lo, hi) of the object that hold the blocks [first, stop)."""
        return int(self.stops[first - 1]) if first else HEADER_BYTES, int(self.stops[stop - 1])

    def decode_block(self, number: int, packed: Buffer, what: str) -> bytes:
        """Verify and decompress a block. Raises Corrupt."""
        if xxh3_64_intdigest(packed) != self.sums[number]:
            raise Corrupt(what, pos=self.byte_range(number, number + 1)[0], reason="checksum mismatch of a block")
        size = min(self.block_bytes, self.data_bytes - number * self.block_bytes)
        try:
            # Of the size that the index gives: a block that would become longer is refused by the codec.
            return bytes(pa.Codec("zstd").decompress(pa.py_buffer(packed), decompressed_size=size, asbytes=True))
        except (pa.ArrowException, OSError) as error:
            pos = self.byte_range(number, number + 1)[0]
            raise Corrupt(what, pos=pos, reason=f"a block does not decompress: {error}") from error


def decode_index(tail: Buffer, length: int, what: str) -> BlockIndex:
    """Decode the index of an object of `length` bytes from its last bytes, at least `tail_bytes` of them.

    Raises:
        Corrupt: the bytes are no such object, or not a whole one.
        NewerFormat: the object was written by a newer version.
    """
    view = memoryview(tail)
    if len(view) < TRAILER_BYTES or length < HEADER_BYTES + TRAILER_BYTES:
        raise Corrupt(what, pos=max(length - len(view), 0), reason=f"{length} bytes are too few for its trailer")
    trailer, pos = view[len(view) - TRAILER_BYTES :], length - TRAILER_BYTES
    data_bytes, block_bytes, count, checksum, magic, version, zeros = _TRAILER.unpack(trailer)
    if magic != MAGIC or zeros != bytes(3):
        raise Corrupt(what, pos=length - HEADER_BYTES, reason=f"it ends with {bytes(trailer[-HEADER_BYTES:])!r}")
    size = count * _ENTRY.itemsize
    if not 0 < block_bytes <= _BLOCK_BYTES_MAX or count != -(-data_bytes // block_bytes):
        raise Corrupt(what, pos=pos, reason=f"{count} blocks of {block_bytes} for {data_bytes} bytes of data")
    if size > len(view) - TRAILER_BYTES or size > length - HEADER_BYTES - TRAILER_BYTES:
        raise Corrupt(what, pos=pos, reason=f"an index of {count} blocks is longer than what is there")
    index = view[len(view) - TRAILER_BYTES - size : len(view) - TRAILER_BYTES]
    if checksum != _checksum(trailer[-HEADER_BYTES:], index, trailer[:_COUNTS_BYTES]):
        raise Corrupt(what, pos=pos - size, reason="checksum mismatch of its index")
    if version > VERSION:
        raise NewerFormat(what, found=version, known=VERSION)
    if version != VERSION:
        raise Corrupt(what, pos=length - 4, reason=f"version {version} was never written")
    entries = np.frombuffer(index, _ENTRY)
    stops = entries["stop"].astype(np.int64)
    if (np.diff(stops, prepend=HEADER_BYTES) <= 0).any() or (int(stops[-1]) if count else HEADER_BYTES) != pos - size:
        raise Corrupt(what, pos=pos - size, reason="its blocks do not follow each other")
    return BlockIndex(data_bytes, block_bytes, stops, tuple(entries["xxh3"].tolist()))


def decode_object(content: Buffer, what: str) -> Iterator[bytes]:
    """Verify a whole object and yield its blocks, decompressed."""
    view = memoryview(content)
    if bytes(view[:HEADER_BYTES]) != _HEADER and bytes(view[:4]) != MAGIC:
        raise Corrupt(what, pos=0, reason=f"it begins with {bytes(view[:4])!r} and not with {MAGIC!r}")
    index = decode_index(view, len(view), what)
    if bytes(view[:HEADER_BYTES]) != _HEADER:
        raise Corrupt(what, pos=4, reason="the version in its header is not the one in its trailer")
    for number in range(len(index)):
        lo, hi = index.byte_range(number, number + 1)
        yield index.decode_block(number, view[lo:hi], what)
