"""[shell] Bytes that lie in a WAL file, for those who do not want them twice."""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.disk.seam import File
from tidelog.errors import Damaged


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
        return self.file is other.file and self.pos + self.size == other.pos

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of it. Damaged where the disk does not give them back."""
        try:
            content = self.file.read(self.pos + lo, hi - lo)
        except OSError as error:
            raise Damaged(f"{self.file.path} cannot be read: {error}; mend the disk and open again") from error
        if len(content) != hi - lo:
            raise Damaged(f"{self.file.path} is shorter than what was written to it; run `tidelog check`")
        return content
