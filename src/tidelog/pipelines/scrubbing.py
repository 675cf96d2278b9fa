"""[shell] Every checksum of a directory of topics, held against its bytes by as many processes as there are.

What is looked at is what `tidelog check` looks at: snapshots, WAL, segments, indexes, footers and deletions. The parts
that are long go to executors. Changes nothing, and works beside a writer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidelog.disk.posix import PosixDisk
from tidelog.engine.apart import Apart, examined
from tidelog.engine.check import Finding
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.runner import Runner

Progress = Callable[[int, int], None]


class Scrubbed(NamedTuple):
    findings: tuple[Finding, ...]
    topics: int
    segments: int
    frames: int
    bytes: int
    parts: int

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.damage)


def scrubbed(path: str, runner: Runner, progress: Progress | None = None) -> Scrubbed:
    """Examine a directory. What is found is in the order of `tidelog check`, parts after the rest."""
    stat = PosixDisk().stat(path)
    if stat is None:
        raise NotFound(f"there is nothing at {path}; nothing was done, check the path")
    if not stat.is_dir:
        raise BadInput(f"{path} is a file, topics lie in a directory; nothing was done, check the path")
    apart = Apart(path)
    found = list(apart)
    seen = []
    step = max(len(apart.parts) // 20, 8)
    for at in range(0, len(apart.parts), step):
        seen += runner.run(examined, apart.parts[at : at + step])
        if progress is not None:
            progress(len(seen), len(apart.parts))
    found += apart.gather(seen)
    return Scrubbed(tuple(found), apart.topics, apart.segments, apart.frames, apart.bytes, len(apart.parts))
