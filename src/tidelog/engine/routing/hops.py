"""[policy] Over how many routers the records of a topic came: stretches of seqs, kept only where it matters.

A record that was written directly came over none and is in no stretch. What lies behind every cursor that
still needs it is let go of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tidelog.types import Ints

Stretch = tuple[int, int, int]  # seqs [lo, hi) came over so many


class Hops:
    """The owner's lock guards it."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        self._stretches: list[Stretch] = list(stretches)

    def __bool__(self) -> bool:
        return bool(self._stretches)

    def add_runs(self, lo: int, runs: Sequence[int]) -> None:
        """Seqs from `lo` on, in pairs of how many and how far they came."""
        for count, hops in zip(runs[::2], runs[1::2], strict=True):
            self.add(lo, lo + count, hops)
            lo += count

    def add(self, lo: int, hi: int, hops: int) -> None:
        """Seqs [lo, hi), behind all that were added before."""
        if self._stretches and self._stretches[-1][1:] == (lo, hops):
            lo = self._stretches.pop()[0]
        self._stretches.append((lo, hi, hops))

    def forget(self, below: int) -> None:
        """Nobody will ask about seqs below this one."""
        keep = next((at for at, (_, hi, _) in enumerate(self._stretches) if hi > below), len(self._stretches))
        del self._stretches[:keep]

    def rows(self, head: int) -> tuple[Stretch, ...]:
        """All that lies at or below `head`."""
        return tuple((lo, min(hi, head + 1), hops) for lo, hi, hops in self._stretches if lo <= head)

    def between(self, lo: int, hi: int) -> Ints:
        """One number a seq of [lo, hi)."""
        found: Ints = np.zeros(hi - lo, np.int64)
        for first, stop, hops in reversed(self._stretches):
            if stop <= lo:
                break
            found[max(first - lo, 0) : max(stop - lo, 0)] = hops
        return found
