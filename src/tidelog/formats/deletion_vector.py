"""The deletion vector of a sealed segment, `seg-<first>.del`. The only module that knows its bytes.

    file header "TLDV" 1
    ┌──────┬──────┬─────────┬─────────────────────┐
    │ base │ size │ deleted │ bitmap              │      u64, u32, u32, ⌈size / 8⌉ bytes
    └──────┴──────┴─────────┴─────────────────────┘
                              bit i % 8 of byte i / 8 is set: seq base + i is deleted

Data files never change, so that a segment can be kept in an object store; its deletions are stored here, and this file
is replaced as a whole. `deleted` is the number of set bits, and bits after `size` are zero: the same deletions always
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidelog.errors import BadInput, Corrupt
from tidelog.formats import file_header
from tidelog.formats.frame import SEQ_MAX, U32_MAX
from tidelog.types import Buffer, Ints

MAGIC: Final = b"TLDV"
VERSION: Final = 1
_HEAD = Struct("<QII")


class DeletionVector:
    """The deleted seqs among [base, base + size). A mark is never removed."""

    __slots__ = ("_bits", "base", "size")

    def __init__(self, base: int, size: int) -> None:
        if not (base >= 0 and 0 <= size <= U32_MAX and base + size - 1 <= SEQ_MAX):
            raise BadInput(f"a deletion vector of {size} seqs from {base} does not fit its file")
        self.base, self.size = base, size
        self._bits: NDArray[np.uint8] = np.zeros((size + 7) // 8, np.uint8)

    @property
    def count(self) -> int:
        """How many seqs are deleted."""
        return int(np.unpackbits(self._bits).sum())

    def mark(self, seqs: Ints | Iterable[int]) -> int:
        """Mark these seqs, all inside the vector, as deleted; return how many are new."""
        which = np.asarray(seqs if isinstance(seqs, np.ndarray) else list(seqs), np.int64) - self.base
        if len(which) and (int(which.min()) < 0 or int(which.max()) >= self.size):
            raise BadInput(f"a seq to delete is outside the segment's [{self.base}, {self.base + self.size})")
        before = self.count
        np.bitwise_or.at(self._bits, which >> 3, np.uint8(1) << (which & 7).astype(np.uint8))
        return self.count - before

    def seqs(self) -> Ints:
        """The deleted seqs, rising."""
        return np.flatnonzero(np.unpackbits(self._bits, bitorder="little")) + self.base


def encode(vector: DeletionVector) -> bytes:
    head = _HEAD.pack(vector.base, vector.size, vector.count)
    return file_header.wrap_file(MAGIC, VERSION, head + vector._bits.tobytes())


def decode(buf: Buffer, what: str = "deletion vector") -> DeletionVector:
    """Decode the file of a vector; Corrupt or NewerFormat when it is not one."""
    body = file_header.unwrap_file(MAGIC, VERSION, buf, what)
    if len(body) < _HEAD.size:
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason=f"a body of {len(body)} bytes is too short")
    base, size, deleted = _HEAD.unpack_from(body)
    if (size + 7) // 8 != len(body) - _HEAD.size or base + size - 1 > SEQ_MAX:
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason=f"{size} seqs from {base} do not fit its bitmap")
    vector = DeletionVector(base, size)
    vector._bits = np.frombuffer(body, np.uint8, offset=_HEAD.size).copy()
    spare = len(vector._bits) * 8 - size
    if spare and int(vector._bits[-1]) >> (8 - spare):
        raise Corrupt(what, pos=len(buf) - 1, reason="bits after the last seq are set")
    if vector.count != deleted:
        reason = f"its head has {deleted} deletions, its bitmap {vector.count}"
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason=reason)
    return vector
