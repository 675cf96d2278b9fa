"""[hot] Which places of a part are deleted: flags that are set in place, in room that doubles.

    room   │ 1 1 0 1 0 0 0 … │ 0 0 0 0 0 0 0 0 │       a view of the first `size` of them is what others see
           └ places of the part ┘└ those to come ┘

A queue deletes a job at a time, and to copy the flags of its whole segment for each would cost more than everything
else of an ack. So a view is good under the topic's lock; whoever keeps it for longer takes a copy.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidelog.types import Ints

Bools = NDArray[np.bool_]
_ROOM_MIN: Final = 1024


class Mask:
    __slots__ = ("_room",)

    def __init__(self, flags: Bools | None = None) -> None:
        self._room: Bools = np.zeros(_ROOM_MIN, bool) if flags is None else flags

    def view(self, size: int) -> Bools:
        """The flags of so many places; those that nobody has set are not deleted."""
        if size > len(self._room):
            self._grow(size)
        return self._room[:size]

    def set(self, at: int) -> bool:
        """Delete one place; False where it was deleted before."""
        if at >= len(self._room):
            self._grow(at + 1)
        if self._room[at]:
            return False
        self._room[at] = True
        return True

    def has(self, at: int) -> bool:
        return at < len(self._room) and bool(self._room[at])

    def set_all(self, which: Ints) -> None:
        last = int(which.max()) if len(which) else -1
        if last >= len(self._room):
            self._grow(last + 1)
        self._room[which] = True

    def _grow(self, size: int) -> None:
        room = np.zeros(max(2 * size, _ROOM_MIN), bool)
        room[: len(self._room)] = self._room
        self._room = room
