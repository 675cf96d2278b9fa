"""A small least-recently-used cache. What the log keeps open or in memory is bounded here and nowhere else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class Lru(Generic[V]):
    """Keeps `capacity` values: None all of them, 0 none."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, V] = OrderedDict()

    def get(self, key: int, load: Callable[[], V]) -> V:
        """The value of `key`, loaded at most once while it stays in the cache."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        value = load()
        if self._capacity != 0:
            self._held[key] = value
            if self._capacity is not None and len(self._held) > self._capacity:
                self._held.popitem(last=False)
        return value

    def find(self, key: int) -> V | None:
        """The value of `key` if it is there; it counts as used."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def drop(self, key: int) -> None:
        self._held.pop(key, None)

    def clear(self) -> None:
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)
