"""The ready set said plainly: a list that is looked through at every call, and a formula for the band.

It shares no code with the one it is compared with, not even the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARES = {4: 8, 3: 4, 2: 2, 1: 1, 0: 1}


@dataclass
class Waiting:
    key: str
    priority: int
    at_us: int
    free_us: int
    order: int


def band(priority: int, waited_us: int) -> int:
    if waited_us >= 10_000_000:
        return 4
    effective = 1_000_000 * priority + 100 * max(waited_us, 0)  # in millionths: a float would round at the bounds
    return sum(effective >= 1_000_000 * bound for bound in (0, 250, 500, 750))


class ReferenceScheduler:
    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.serving: dict[str, tuple[int, int, bool] | None] = {}
        self.deferring = False
        self.left = dict(SHARES)
        self.orders = 0

    def can(self) -> list[Waiting]:
        return [each for each in self.waiting if not (self.deferring and each.priority < 0)]

    @property
    def deferred(self) -> int:
        return len(self.waiting) - len(self.can())

    def mark(self, key: str, priority: int, now_us: int, fan_out: bool = False) -> bool:
        if any(each.key == key for each in self.waiting):
            return False
        if key in self.serving:
            if self.serving[key] is not None:
                return False
            self.serving[key] = (priority, now_us, fan_out)
            return True
        if fan_out and self.deferring:
            lower = {4: 749, 3: 499, 2: 249}
            own = band(priority, 0)
            priority = min(priority - 250, lower[own]) if own >= 2 else min(priority, 0)
        self.orders += 1
        self.waiting.append(Waiting(key, priority, now_us, now_us, self.orders))
        return True

    def pop(self, now_us: int) -> tuple[str, int, int] | None:
        can = self.can()
        if not can:
            return None
        looked_us = now_us // 50_000 * 50_000
        bands = {each.key: band(each.priority, looked_us - each.at_us) for each in can}
        if not any(self.left[bands[each.key]] for each in can):
            self.left = dict(SHARES)
        chosen = max(of for of in bands.values() if self.left[of])
        self.left[chosen] -= 1
        first = min((each for each in can if bands[each.key] == chosen), key=lambda each: (each.at_us, each.order))
        self.waiting.remove(first)
        self.serving[first.key] = None
        return first.key, now_us - first.at_us, now_us - first.free_us

    def done(self, key: str) -> bool:
        again = self.serving.pop(key)
        return again is not None and self.mark(key, *again)

    def forget(self, key: str) -> None:
        if key in self.serving:
            self.serving[key] = None
        self.waiting = [each for each in self.waiting if each.key != key]

    def defer(self) -> None:
        self.deferring = True

    def release(self, now_us: int) -> None:
        for each in self.waiting:
            if self.deferring and each.priority < 0:
                each.free_us = now_us
        self.deferring = False
