"""[policy] Which seqs something is due for, by time.

What was set and no longer holds is passed over by who asks, and gone through now and then (`rebuild`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf


class Alarms:
    def __init__(self) -> None:
        self._times: list[int] = []
        self._seqs: dict[int, list[int]] = {}
        self.size = 0

    def set(self, at_ms: int, seqs: Sequence[int]) -> None:
        held = self._seqs.get(at_ms)
        if held is None:
            self._seqs[at_ms] = list(seqs)
            heappush(self._times, at_ms)
        else:
            held += seqs
        self.size += len(seqs)

    @property
    def earliest(self) -> float:
        """Nothing is due before this time."""
        return self._times[0] if self._times else inf

    def before(self, stop_ms: int) -> Iterator[tuple[int, list[int]]]:
        """Take out what is due before this time, earliest first."""
        while self._times and self._times[0] < stop_ms:
            at_ms = heappop(self._times)
            seqs = self._seqs.pop(at_ms)
            self.size -= len(seqs)
            yield at_ms, seqs

    def first(self, holds: Callable[[int, int], bool]) -> int | None:
        """The earliest time for which some seq still `holds`."""
        while self._times:
            at_ms = self._times[0]
            if any(holds(seq, at_ms) for seq in self._seqs[at_ms]):
                return at_ms
            heappop(self._times)
            self.size -= len(self._seqs.pop(at_ms))
        return None

    def rebuild(self, entries: Iterable[tuple[int, int]]) -> None:
        self._seqs, self.size = {}, 0
        for at_ms, seq in entries:
            self._seqs.setdefault(at_ms, []).append(seq)
            self.size += 1
        self._times = list(self._seqs)
        heapify(self._times)
