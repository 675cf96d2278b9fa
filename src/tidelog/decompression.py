"""[policy] How many bytes may come out of compressed ones. One rule for every body that a peer sends compressed.

    gzip or zstd, a whole body       limit: the largest body, as for one that is not compressed
    gzip, a body in pieces           `free` bytes and then `ratio` times what came
    Arrow buffers (lz4, zstd)        each message: its own limit; the stream or chunk: as a body in pieces

Decoders work in steps of `STEP_BYTES`, so a limit is noticed at most one step late, and what a step costs is bounded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DECODE_STEP_BYTES: Final = 256 << 10
"""Bytes that a decoder makes at once."""

FREE_BYTES_DEFAULT: Final = 64 << 20
RATIO_DEFAULT: Final = 100
"""Text compresses by 5 to 30, and very regular text by some hundreds; zeros by a thousand (gzip) or more (zstd)."""


class DecodedTooLarge(Exception):
    """Decoded, this is more than its reader takes. Nothing beyond the limit was decoded."""

    def __init__(self, what: str, size: int, limit: int, unit: str = "bytes") -> None:
        super().__init__(f"{what} of {size} {unit} is over the limit of {limit}")
        self.what, self.size, self.limit, self.unit = what, size, limit, unit


class ExpansionLimit(NamedTuple):
    """What one compressed body may become."""

    free_bytes: int = FREE_BYTES_DEFAULT  # bytes that may come out whatever went in
    ratio: int = RATIO_DEFAULT  # and so many times what went in; 0: no limit

    def start(self) -> ExpansionCounter:
        return ExpansionCounter(self)


class ExpansionCounter:
    """Count what goes into a decoder and what comes out."""

    def __init__(self, allowance: ExpansionLimit) -> None:
        self._limit = allowance
        self._packed = self._unpacked = 0

    def add(self, packed: int, unpacked: int) -> None:
        """So many bytes became, or are about to become, so many. Raises Oversized where that is too many."""
        self._packed += packed
        self._unpacked += unpacked
        free, ratio = self._limit
        limit = free + ratio * self._packed
        if ratio and self._unpacked > limit:
            raise DecodedTooLarge(f"what {self._packed} compressed bytes decode to, a body", self._unpacked, limit)


DEFAULT_EXPANSION_LIMIT: Final = ExpansionLimit()
"""What a compressed body may become where nothing else was set."""
