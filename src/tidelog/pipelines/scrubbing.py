"""[shell] Every checksum of a data directory, held against its bytes by as many processes as there are.

What is looked at is what `tidelog check` looks at: snapshots, WAL, segments, indexes, footers and deletions of topics,
metadata, messages and cursors of channels. The parts that are long go to executors, channels by the dozen. Changes
nothing, and works beside a writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from tidelog.channels.check import ChannelCheck, Looked, looked
from tidelog.disk.posix import PosixDisk
from tidelog.engine.apart import Apart, examined
from tidelog.engine.check import Finding
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.runner import Runner

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]
_ROOMS: Final = 12  # channels of one part


class Scrubbed(NamedTuple):
    findings: tuple[Finding, ...]
    topics: int
    segments: int
    frames: int
    bytes: int
    parts: int
    channels: int = 0
    messages: int = 0

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
    apart, rooms = Apart(path), ChannelCheck(path)
    found, live = list(apart), rooms.live()
    found += rooms.leftovers(live)
    few = [(path, live[at : at + _ROOMS]) for at in range(0, len(live), _ROOMS)]
    total, step = len(apart.parts) + len(few), max((len(apart.parts) + len(few)) // 20, 8)

    def share(function: Callable[[T], R], parts: Sequence[T], before: int) -> list[R]:
        seen: list[R] = []
        for at in range(0, len(parts), step):
            seen += runner.run(function, parts[at : at + step])
            if progress is not None:
                progress(before + len(seen), total)
        return seen

    found += apart.gather(share(examined, apart.parts, 0))
    heard = share(_looked, few, len(apart.parts))
    found += [finding for each in heard for finding in each.findings]
    return Scrubbed(
        tuple(found),
        apart.topics,
        apart.segments,
        apart.frames,
        apart.bytes + sum(each.bytes for each in heard),
        total,
        channels=sum(each.channels for each in heard),
        messages=sum(each.messages for each in heard),
    )


def _looked(part: tuple[str, list[str]]) -> Looked:
    return looked(*part)
