"""What one caller wants in the WAL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidelog.disk.seam import File
from tidelog.errors import Error
from tidelog.types import Buffer


class Commit:
    """What one caller wants in the WAL: frames, back to back in `pieces`, of which all are written or none.

    Subclasses say what follows. Both calls come from the committer, in submit order, with the commit
    lock held, and must neither raise nor wait for a commit.
    """

    __slots__ = ("_done", "at", "copied", "durable", "file", "frames", "held_us", "pieces", "since_us", "size", "vital")

    def __init__(
        self,
        pieces: Sequence[Buffer],
        *,
        frames: int,
        durable: bool,
        done: Callable[[Error | None], None] | None = None,
    ) -> None:
        self.pieces, self.frames, self.durable = pieces, frames, durable
        self.size = sum(map(len, pieces))
        self.file: File | None = None  # where it was written, from then on, for reading
        self.at = 0  # and its first byte there
        self.since_us = 0  # when it was queued
        self.held_us = 0  # what gathering for its batch cost it
        self.copied = 0  # how many of its frames are copies that routers made: they are counted apart
        # Whether it may use the reserve of a full disk: what makes room, or says what happened. Not new records.
        self.vital = True
        self._done = done

    @property
    def waits(self) -> bool:
        """Whether committing it waits for the disk, as far as can be told before."""
        return self.durable

    def prepare(self) -> None:
        """The last look before it is written: here `lead` may still put a frame in front."""

    def done(self, error: Error | None) -> None:
        """The outcome, told exactly once. None: written, and durable where that was asked for."""
        if self._done is not None:
            self._done(error)

    def lead(self, frame: bytes) -> None:
        """Put a frame in front that must be durable before the commit is acknowledged."""
        self.precede(frame)
        self.durable = True

    def precede(self, frame: bytes) -> None:
        """Put a frame in front that shares its fate."""
        self.pieces = [frame, *self.pieces]
        self.frames, self.size = self.frames + 1, self.size + len(frame)
