"""[shell] The examination of a directory in parts that many can work at: `check` says what is looked at and why.

    here     snapshots, what nobody names, and at the end a start for reading
    parts    the WAL of each shard; the segments of all topics, by bytes

A part is plain data and can be examined in any process that sees the directory. What it finds comes back here, where it
is held against the directory as it is now: a writer may have removed in the meantime what looked damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk
from tidelog.engine.check import Check, Finding, SegmentCheck
from tidelog.engine.core import directory
from tidelog.engine.manifest import Loaded, SegmentRow, TopicRow

PART_BYTES: Final = 64 << 20


class Part(NamedTuple):
    """A shard of the WAL, or some segments."""

    path: str
    shard: str | None
    segments: tuple[tuple[TopicRow, SegmentRow], ...] = ()


class Seen(NamedTuple):
    findings: tuple[tuple[Finding, tuple[int, int] | None], ...]  # with topic and base, where it is of a segment
    segments: int = 0
    frames: int = 0
    bytes: int = 0
    dropped: frozenset[int] = frozenset()


class Apart(Check):
    """Iterate for what is found here, hand out `parts`, and `gather` what was seen in them."""

    def __init__(self, path: str, *, disk: Disk | None = None) -> None:
        super().__init__(str(path).rstrip("/") or "/", disk or PosixDisk(), lambda *_: None)
        self.parts: list[Part] = []

    def _groups(self, keys: Sequence[str]) -> Iterator[Finding]:
        self.parts += [Part(self._root, key) for key in keys]
        return iter(())

    def _segments(self, loaded: Loaded) -> Iterator[Finding]:
        found: list[tuple[TopicRow, SegmentRow]] = []
        size = 0
        for row in loaded.manifest.topics:
            slim = msgspec.structs.replace(row, segments=type(row.segments)())
            for segment in row.segments:
                found.append((slim, segment))
                size += segment.size
                if size >= PART_BYTES:
                    self.parts.append(Part(self._root, None, tuple(found)))
                    found, size = [], 0
        if found:
            self.parts.append(Part(self._root, None, tuple(found)))
        return iter(())

    def _start(self) -> Iterator[Finding]:
        return iter(())

    def gather(self, seen: Iterable[Seen]) -> Iterator[Finding]:
        """What of it is still so."""
        for each in seen:
            self._dropped |= each.dropped
            self.segments, self.frames = self.segments + each.segments, self.frames + each.frames
            self.bytes += each.bytes
            for finding, segment in each.findings:
                if finding.damage and segment is not None and self._gone(*segment):
                    continue
                self.damaged += finding.damage
                yield finding
        for finding in super()._start():
            self.damaged += finding.damage
            yield finding


def examined(part: Part, *, disk: Disk | None = None) -> Seen:
    """Look at one part, wherever this runs."""
    disk = disk or PosixDisk()
    if part.shard is not None:
        check = Apart(part.path, disk=disk)
        found = check._group(part.shard)
        frames, size = check._seen
        return Seen(tuple((finding, None) for finding in found), 0, frames, size, frozenset(check._dropped))
    told: list[tuple[Finding, tuple[int, int] | None]] = []
    root = f"{part.path.rstrip('/')}/"
    for topic, row in part.segments:
        found = SegmentCheck(disk, directory(part.path, topic.id), topic, row).findings()
        told += [(each._replace(file=each.file.removeprefix(root)), (topic.id, row.base)) for each in found]
    return Seen(tuple(told), len(part.segments), 0, sum(row.size for _, row in part.segments))
