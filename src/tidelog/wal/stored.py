"""[shell] Bytes of a WAL file that are read where they are, instead of being kept in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidelog.disk.seam import File
from tidelog.errors import Damaged
from tidelog.types import Ints


@dataclass(frozen=True, slots=True)
class Stored:
    """A stretch of a WAL file. Holding it keeps the file open, so it can be read after the file's name is gone."""

    file: File
    pos: int
    size: int

    def __len__(self) -> int:
        return self.size

    def is_before(self, other: Stored) -> bool:
        """Whether the other one begins where this one ends."""
        is_plain = type(self) is Stored is type(other)
        return is_plain and self.file is other.file and self.pos + self.size == other.pos

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of it. Damaged where the disk does not give them back."""
        return self._bytes(self.pos + lo, self.pos + hi)

    def _bytes(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of the file."""
        try:
            content = self.file.read(lo, hi - lo)
        except OSError as error:
            raise Damaged(f"{self.file.path} cannot be read: {error}; mend the disk and open again") from error
        if len(content) != hi - lo:
            raise Damaged(f"{self.file.path} is shorter than what was written to it; run `tidelog check`")
        return content


@dataclass(frozen=True, slots=True)
class Gathered(Stored):
    """Frames of one topic with frames of others between them, as if they were back to back."""

    starts: Ints  # of each frame, in the file
    ends: Ints  # of each frame, in what this reads as

    @classmethod
    def of(cls, file: File, starts: Ints, sizes: Ints) -> Gathered:
        ends = sizes.cumsum()
        return cls(file, int(starts[0]), int(ends[-1]), starts, ends)

    def read(self, lo: int, hi: int) -> bytes:
        if lo >= hi:
            return b""
        first, last = int(np.searchsorted(self.ends, lo, "right")), int(np.searchsorted(self.ends, hi, "left"))
        starts, ends = self.starts[first : last + 1], self.ends[first : last + 1]
        before = int(self.ends[first - 1]) if first else 0
        sizes = np.diff(ends, prepend=before)
        base = int(starts[0])
        raw = memoryview(self._bytes(base, int(starts[-1] + sizes[-1])))
        places = zip((starts - base).tolist(), (starts - base + sizes).tolist(), strict=True)
        return b"".join([raw[at:end] for at, end in places])[lo - before : hi - before]
