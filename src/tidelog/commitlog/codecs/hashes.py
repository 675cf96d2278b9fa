"""The hash functions that the index of a laminarmq store may have been written with.

laminarmq takes any type that Rust's standard library calls a hasher and does not record which one it was. Those here
are the ones that a program gets without keys or seeds of its own; `detect` tries them against the records. The compiled
ones hash gigabytes a second, the others some megabytes: only stores of another program use these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh32, xxh64

from tidelog.types import Buffer, Ints

_WORD = Struct("<Q")
_MASK: Final = (1 << 64) - 1
Digest: TypeAlias = Callable[[Iterable[Buffer]], int]
"""The hash of pieces of bytes back to back, as a number of at most 64 bits."""


class Hash(NamedTuple):
    name: str
    digest: Digest
    is_compiled: bool

    def checksums(self, buf: Buffer, starts: Ints, ends: Ints) -> NDArray[np.uint64]:
        """Return the hash of each byte range [start, end)."""
        whole, digest = memoryview(buf), self.digest
        sums = [digest((whole[lo:hi],)) for lo, hi in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.array(sums, np.uint64)


def crc32_digest(pieces: Iterable[Buffer]) -> int:
    total = 0
    for piece in pieces:
        total = crc32(piece, total)
    return total


def _xxhash_digest(make: Callable[[], xxh64]) -> Digest:
    def digest(pieces: Iterable[Buffer]) -> int:
        state = make()
        for piece in pieces:
            state.update(piece)
        return state.intdigest()

    return digest


def _siphash_digest(rounds: int, last_rounds: int) -> Digest:
    """SipHash with zero keys; `rounds` for each word of eight bytes, `last_rounds` at the end."""

    def digest(pieces: Iterable[Buffer]) -> int:
        data = b"".join(pieces)
        v0, v1, v2, v3 = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
        whole = len(data) // 8 * 8
        words = [word for (word,) in _WORD.iter_unpack(data[:whole])]
        words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
        for number, word in enumerate((*words, 0)):
            is_last = number == len(words)
            if is_last:
                v2 ^= 0xFF
            v3 ^= word
            for _ in range(last_rounds if is_last else rounds):
                v0 = (v0 + v1) & _MASK
                v1 = (v1 << 13 & _MASK | v1 >> 51) ^ v0
                v0 = v0 << 32 & _MASK | v0 >> 32
                v2 = (v2 + v3) & _MASK
                v3 = (v3 << 16 & _MASK | v3 >> 48) ^ v2
                v0 = (v0 + v3) & _MASK
                v3 = (v3 << 21 & _MASK | v3 >> 43) ^ v0
                v2 = (v2 + v1) & _MASK
                v1 = (v1 << 17 & _MASK | v1 >> 47) ^ v2
                v2 = v2 << 32 & _MASK | v2 >> 32
            v0 ^= word
        return v0 ^ v1 ^ v2 ^ v3

    return digest


def _crc32c_table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_CRC32C_TABLE: Final = _crc32c_table()


def _crc32c_digest(pieces: Iterable[Buffer]) -> int:
    total, table = 0xFFFFFFFF, _CRC32C_TABLE
    for piece in pieces:
        for byte in bytes(piece):
            total = table[(total ^ byte) & 0xFF] ^ total >> 8
    return total ^ 0xFFFFFFFF


def _fnv1a_digest(pieces: Iterable[Buffer]) -> int:
    total = 0xCBF29CE484222325
    for piece in pieces:
        for byte in bytes(piece):
            total = (total ^ byte) * 0x100000001B3 & _MASK
    return total


CRC32: Final = Hash("CRC-32", crc32_digest, True)
HASHES: Final = (
    CRC32,
    Hash("SipHash-1-3", _siphash_digest(1, 3), False),  # Rust's DefaultHasher
    Hash("XXH64", _xxhash_digest(xxh64), True),
    Hash("XXH3-64", _xxhash_digest(xxh3_64), True),  # type: ignore[arg-type]  # the classes share no base
    Hash("XXH32", _xxhash_digest(xxh32), True),  # type: ignore[arg-type]
    Hash("CRC-32C", _crc32c_digest, False),
    Hash("SipHash-2-4", _siphash_digest(2, 4), False),
    Hash("FNV-1a", _fnv1a_digest, False),
)
HASH_NAMES: Final = tuple(each.name for each in HASHES)
_DETECT_BYTES_MAX: Final = 1 << 20  # hashed with each function that is not compiled; at least one record


def detect(buf: Buffer, starts: Ints, ends: Ints, checksums: NDArray[np.uint64]) -> tuple[Hash | None, Ints]:
    """Return the function that gives some of these checksums, and for which records; None where none does."""
    order = np.argsort(ends - starts, kind="stable")
    few = order[: max(int(np.searchsorted(np.cumsum((ends - starts)[order]), _DETECT_BYTES_MAX, "right")), 1)]
    for each in HASHES:
        tried = np.arange(len(starts)) if each.is_compiled else np.sort(few)
        matching = tried[each.checksums(buf, starts[tried], ends[tried]) == checksums[tried]]
        if len(matching):
            return each, matching
    return None, np.zeros(0, np.int64)
