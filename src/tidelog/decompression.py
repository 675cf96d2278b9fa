"""Limits on decompression: one rule for every body that a client sends compressed.

    gzip or zstd, a whole body       limit: the largest body, as for one that is not compressed
    gzip, a body in pieces           `free_bytes`, and `ratio` times the bytes received
    Arrow buffers (lz4, zstd)        each message: its own limit; the stream or chunk: as a body in pieces

Decoders work in steps of `DECODE_STEP_BYTES`, so a limit is enforced at most one step late, and the cost of a step is
bounded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DECODE_STEP_BYTES: Final = 256 << 10
"""Decoded bytes of one step."""

FREE_BYTES_DEFAULT: Final = 64 << 20
RATIO_DEFAULT: Final = 100
"""Text compresses by 5 to 30, and very regular text by some hundreds; zeros by a thousand (gzip) or more (zstd)."""


class DecodedTooLarge(Exception):
    """The decoded body exceeds its limit. Nothing beyond the limit was decoded."""

    def __init__(self, what: str, size: int, limit: int, unit: str = "bytes") -> None:
        super().__init__(f"{what} of {size} {unit} is over the limit of {limit}")
        self.what, self.size, self.limit, self.unit = what, size, limit, unit


class ExpansionLimit(NamedTuple):
    """The decoded size that one compressed body may have."""

    free_bytes: int = FREE_BYTES_DEFAULT  # decoded bytes that are always allowed
    ratio: int = RATIO_DEFAULT  # and so many times the compressed bytes; 0: no limit

    def start(self) -> ExpansionCounter:
        return ExpansionCounter(self)


class ExpansionCounter:
    """Counts the compressed and the decoded bytes of one body."""

    def __init__(self, limit: ExpansionLimit) -> None:
        self._limit = limit
        self._packed = self._unpacked = 0

    def add(self, packed: int, unpacked: int) -> None:
        """Add bytes that were decoded, or are about to be. Raises DecodedTooLarge where they exceed the limit."""
        self._packed += packed
        self._unpacked += unpacked
        free, ratio = self._limit
        limit = free + ratio * self._packed
        if ratio and self._unpacked > limit:
            raise DecodedTooLarge(f"a body of {self._packed} compressed bytes, decoded", self._unpacked, limit)


DEFAULT_EXPANSION_LIMIT: Final = ExpansionLimit()
"""Used where nothing else is set."""
