"""[shell] Everything that lies in a data directory, held against everything that vouches for it. Changes nothing.

    meta/snapshot.*      its own checksum, and what it says of the rest
    wal/                 every frame of every file; a torn tail is told from damage as recovery tells it
    topics/  .data       every frame, the footer's checksums, the length and the seqs that the snapshot names
             .idx        byte for byte what the data gives
             .foot       its own checksum, and the figures of the data
             .tag        byte for byte what the data gives, where there is one
             .del        its own checksum, and the live records that the snapshot counts
    all of it            when nothing is damaged, a start for reading must find nothing either

Damage is what no crash leaves behind, notes are what the next start mends. A writer may go on: what looks damaged is
looked at again, and what was removed since is not held against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Fault, Shape
from tidelog.commitlog.segment import Mapped, map_file
from tidelog.disk.atomic import read_all
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, join
from tidelog.engine import manifest
from tidelog.engine.config import OWN
from tidelog.engine.core import TOPICS, WAL, directory
from tidelog.engine.home import CODEC
from tidelog.engine.manifest import Loaded, Manifest, SegmentRow, TopicRow
from tidelog.engine.opening import QUARANTINE, opened
from tidelog.engine.recovery import start_of
from tidelog.engine.report import Kind, Progress
from tidelog.engine.tags import SUFFIX, content_of
from tidelog.errors import Corrupt, Damaged, NewerFormat, NotFound, Refused, Unavailable
from tidelog.formats import deletions, footer, frame, idx, scan, snapshot, tag_index
from tidelog.formats.footer import Footer
from tidelog.formats.rows import Rows, Walk
from tidelog.types import Buffer
from tidelog.wal import Position, Replay, names, read

_SUFFIXES: Final = {
    "data": ".data",
    "counts": ".data",
    "index": ".idx",
    "footer": ".foot",
    "tags": ".tag",
    "deletions": ".del",
}
_SEGMENT = re.compile(r"seg-(\d{16,20})\.(?:data|idx|foot|tag|del)(\.tmp|\.rebuilding)?")
_CHUNK_BYTES: Final = 8 << 20
_UNFINISHED: Final = "of a checkpoint that is under way or did not finish"
_NOTHING_LOST: Final = "no record is lost: it is made again from the data"


class Finding(NamedTuple):
    """One place that is not as it should be."""

    kind: Kind
    file: str  # as seen from the data directory
    pos: int | None  # the first bad byte, where it is known
    reason: str
    damage: bool = True  # False: a note, which the next start mends
    topic: str | None = None
    seqs: range = range(0)  # records that cannot be read because of it


def check(path: str, *, disk: Disk | None = None, progress: Progress | None = None) -> Check:
    """Verify a data directory: iterate over the findings, oldest places of each part first."""
    return Check(str(path).rstrip("/") or "/", disk or PosixDisk(), progress or (lambda *_: None))


class Check:
    """Iterate for the findings; how much was looked at is known after the loop."""

    def __init__(self, root: str, disk: Disk, progress: Progress) -> None:
        self._root, self._disk, self._progress = root, disk, progress
        self._wal, self._done, self._total = join(root, WAL), 0, 0
        self._seen, self._dropped = (0, 0), set[int]()  # frames and bytes of a group by the last look; dropped topics
        self.frames = self.topics = self.segments = self.records = self.bytes = self.damaged = 0

    def __iter__(self) -> Iterator[Finding]:
        if not set(self._names(self._root)) & {manifest.DIRECTORY, WAL, TOPICS}:
            raise NotFound(f"there are no topics in {self._root}; nothing was changed, check the path")
        loaded, unread = self._snapshots()
        keys = sorted({*names.groups(self._disk, self._wal), *(row.key for row in loaded.manifest.groups)})
        self._total = len(keys) + sum(len(row.segments) for row in loaded.manifest.topics)
        self.topics = len([row for row in loaded.manifest.topics if not row.name.startswith(OWN)])
        parts = (self._groups(keys), self._segments(loaded), self._leftovers(loaded), self._start())
        for finding in chain(unread, *parts):
            self.damaged += finding.damage
            yield finding

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────

    def _snapshots(self) -> tuple[Loaded, list[Finding]]:
        good: list[tuple[int, Manifest]] = []
        found = []
        for number in manifest.numbers(self._disk, self._root):
            path = manifest.path_of(self._root, number)
            try:
                content = read_all(self._disk, path)
                if content is not None:  # else it was pruned while we looked
                    good.append((number, snapshot.decode(Manifest, content)))
            except (Corrupt, NewerFormat, OSError) as error:
                found.append(Finding("snapshot", self._inside(path), *_told(error)))
        if not good:
            return Loaded(0, Manifest(), None, []), found
        path = self._inside(manifest.path_of(self._root, good[0][0]))
        found += [Finding("snapshot", path, None, said) for said in _contradictions(good[0][1])]
        return Loaded(*good[0], good[1][1] if len(good) > 1 else None, []), found

    # ── the WAL ───────────────────────────────────────────────────────────────────────────────

    def _groups(self, keys: Sequence[str]) -> Iterator[Finding]:
        for key in keys:
            yield from self._group(key)
            self.frames, self.bytes = self.frames + self._seen[0], self.bytes + self._seen[1]
            self._tell(f"WAL {key}".strip())

    def _group(self, key: str) -> list[Finding]:
        return self._settled(lambda: list(self._looked(key, self._snapshots()[0])))

    def _settled(self, look: Callable[[], list[Finding]]) -> list[Finding]:
        """What is found twice alike, or is no damage. What another look does not find was a writer at work."""
        before: list[Finding] | None = None
        for _ in range(8):
            try:
                found = look()
            except (Unavailable, FileNotFoundError):  # something was removed while we looked
                continue
            if found == before or not _hurt(found):
                return found
            before = found
        raise Unavailable(f"{self._root} changes faster than it can be read; nothing was changed, try again")

    def _looked(self, key: str, loaded: Loaded) -> Iterator[Finding]:
        place = names.directory(self._wal, key)
        numbers, self._seen = names.files(self._disk, place), (0, 0)
        start = start_of(loaded, key) or Position(2 if numbers[:1] == [2] else 1, 0)  # as recovery begins
        if start.first not in numbers and numbers and numbers[-1] > start.first:
            missing = self._inside(names.path_of(place, start.first))
            yield Finding("wal", missing, None, "it is missing: what was written there after the snapshot is lost")
        try:
            # From the oldest byte that is there: what a snapshot covers is needed again should that one not read.
            oldest = Position(numbers[0], 0) if numbers else start
            replay = self._walked(read(self._disk, place, oldest, durable=max(oldest, start)))
            yield from self._ended(replay, place, start)
        except Damaged as error:
            yield Finding("wal", self._inside(place), None, str(error))
            return
        if said := replay.current_fault():
            current = self._inside(join(place, names.CURRENT))
            yield Finding("wal", current, 0, f"{said}; nothing hangs on it, the next start writes it anew", False)

    def _walked(self, replay: Replay) -> Replay:
        for window in replay:
            self._seen = self._seen[0] + len(window.at), self._seen[1]
            self._dropped |= set(window.heads["topic_id"][window.heads["kind"] == frame.TOPIC_DELETE].tolist())
        self._seen = self._seen[0], self._seen[1] + sum(extent.hi - extent.lo for extent in replay.extents)
        return replay

    def _ended(self, replay: Replay, place: str, start: Position) -> Iterator[Finding]:
        for gap in (gap for gap in replay.missing if gap.stop > start.first):
            said = f"frames {gap.start} to {gap.stop - 1}, which come before it, are in no file"
            yield Finding("wal", self._inside(names.path_of(place, gap.stop)), 0, said)
        for lost in (lost for lost in replay.losses if lost.file):
            said = f"{lost.end - lost.pos} bytes that were synced do not read ({lost.reason})"
            if Position(lost.first, lost.end) <= start:
                said += "; no record is lost: a snapshot covers it"
            else:
                said += "; acknowledged records may be lost with them, what follows them is replayed"
            yield Finding("wal", self._inside(names.path_of(place, lost.first)), lost.pos, said)
        if (absent := replay.absent) is not None:
            said = f"it is missing: what was written there after the snapshot is lost ({absent.reason})"
            yield Finding("wal", self._inside(names.path_of(place, absent.first)), None, said)
        if (cut := replay.cut) is not None:
            said = f"an unfinished write of {cut.size} bytes ({cut.reason}); the next start cuts it"
            if cut.frames:
                said += f" and keeps it: {cut.frames} frames that read follow, of which no sync is known"
            yield Finding("wal", self._inside(names.path_of(place, cut.first)), cut.pos, said, False)

    # ── segments ──────────────────────────────────────────────────────────────────────────────

    def _segments(self, loaded: Loaded) -> Iterator[Finding]:
        for row in loaded.manifest.topics:
            for segment in row.segments if row.id not in self._dropped else ():
                found = SegmentCheck(self._disk, directory(self._root, row.id), row, segment).findings()
                self.segments, self.bytes = self.segments + 1, self.bytes + segment.size
                self._tell(row.name)
                if not _hurt(found) or not self._gone(row.id, segment.base):
                    yield from (finding._replace(file=self._inside(finding.file)) for finding in found)

    def _gone(self, topic_id: int, base: int) -> bool:
        """Whether a writer has removed a segment, or its topic, since the check began."""
        loaded, _ = self._snapshots()
        rows = {row.id: row.segments for row in loaded.manifest.topics}
        if base not in {segment.base for segment in rows.get(topic_id, ())}:
            return True
        for key in names.groups(self._disk, self._wal):
            self._group(key)
        return topic_id in self._dropped

    # ── what nobody names, and the whole ──────────────────────────────────────────────────────

    def _leftovers(self, loaded: Loaded) -> Iterator[Finding]:
        made = [loaded.manifest, *([loaded.before] if loaded.before is not None else [])]
        named = {(f"{topic.id:08X}", row.base) for each in made for topic in each.topics for row in topic.segments}
        # Without a snapshot nobody can say which files are too many.
        for topic in self._names(join(self._root, TOPICS)) if loaded.number else ():
            for file in self._names(join(join(self._root, TOPICS), topic)):
                segment = _SEGMENT.fullmatch(file)
                if segment is not None and (segment[2] or (topic, int(segment[1])) not in named):
                    said = f"no snapshot names it: {_UNFINISHED}"
                    yield Finding("leftover", join(join(TOPICS, topic), file), None, said, False)
        for name in self._names(join(self._root, QUARANTINE)):
            yield Finding("leftover", join(QUARANTINE, name), None, "bytes that an earlier start cut and kept", False)

    def _start(self) -> Iterator[Finding]:
        """What is whole file by file must also start; what is not has been told of."""
        yield from () if self.damaged else self._settled(self._opened)

    def _opened(self) -> list[Finding]:
        plain: dict[str, Any] = {"clock": None, "config": None, "accept_loss": False, "progress": None, "settings": {}}
        try:
            found = opened(self._root, read_only=True, disk=self._disk, **plain)
        except (Refused, Damaged) as error:
            return [Finding("start", ".", None, str(error))]
        counts = [core.index.count for name, core in found.topics.items() if not name.startswith(OWN)]
        self.topics, self.records = len(counts), sum(counts)
        return [Finding("start", ".", None, said) for said in found.report.damage]

    def _names(self, path: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._disk.names(path)
        return []

    def _inside(self, path: str) -> str:
        return path.removeprefix(f"{self._root.rstrip('/')}/")

    def _tell(self, what: str) -> None:
        self._done += 1
        self._progress(what, self._done, self._total)


def _hurt(found: Sequence[Finding]) -> bool:
    return any(finding.damage for finding in found)


def _told(error: Corrupt | NewerFormat | OSError) -> tuple[int | None, str]:
    """Where a small file is bad and how."""
    if isinstance(error, Corrupt):
        return error.pos, error.reason
    if isinstance(error, NewerFormat):
        return 4, f"version {error.found} is later than {error.known}, the last one known: a newer tidelog's, or damage"
    return None, f"it cannot be read: {error}"


def _contradictions(made: Manifest) -> Iterator[str]:
    """What a snapshot says that cannot be."""
    for row in made.topics:
        floor, stop = max(row.cap_mark, row.ttl_mark, row.source_mark) + 1, 1
        if not (floor <= row.earliest <= row.head + 1 and row.head <= row.reserved and row.id < made.next_topic_id):
            yield f"{row.name}: floor {floor}, earliest {row.earliest}, head {row.head}, reserved {row.reserved}"
        for segment in row.segments:
            follows = stop <= segment.base < segment.stop <= row.head + 1
            if not follows or not (segment.sealed or segment is row.segments[-1]):
                yield f"{row.name}: a segment of [{segment.base}, {segment.stop}) cannot be where it is"
            stop = segment.stop


class Standing(NamedTuple):
    """How far checkpoints of a directory are, by its newest snapshot alone."""

    snapshot: int  # its number; 0: there is none
    saved_ms: int | None  # when it was written
    wal_bytes: int
    lagging: tuple[str, ...]  # topics that it could not write
    unproven: tuple[str, ...]  # segments that were sealed without a footer, as topic and first seq
    skipped: tuple[str, ...]  # snapshots that do not read, and why


def standing(path: str, disk: Disk | None = None) -> Standing | None:
    """A glance at a data directory, beside a writer or without one; None where it is none. Reads no record."""
    disk = disk or PosixDisk()
    wal = join(path, WAL)
    if disk.stat(wal) is None:
        return None
    loaded = manifest.load(disk, path)
    found = disk.stat(manifest.path_of(path, loaded.number)) if loaded.number else None
    size = 0
    for key in names.groups(disk, wal):
        place = names.directory(wal, key)
        stats = (disk.stat(names.path_of(place, number)) for number in names.files(disk, place))
        size += sum(each.size for each in stats if each is not None)
    rows = loaded.manifest.topics
    return Standing(
        loaded.number,
        found.modified_ms if found else None,
        size,
        tuple(row.name for row in rows if row.id in loaded.manifest.lagging),
        tuple(f"{row.name} {segment.base}" for row in rows for segment in row.segments if segment.unproven),
        tuple(loaded.skipped),
    )


class SegmentCheck:
    """One segment's files against each other and against its row of the snapshot."""

    def __init__(self, disk: Disk, place: str, topic: TopicRow, row: SegmentRow) -> None:
        self._disk, self._stem, self._topic, self._row = disk, join(place, CODEC.stem.format(row.base)), topic, row
        self._entries = (row.stop - row.base) * idx.ENTRY_BYTES
        self._found: list[Finding] = []

    def findings(self) -> list[Finding]:
        row = self._row
        try:
            data, index = (map_file(self._disk, self._stem + suffix) for suffix in (".data", ".idx"))
            dead, foot = self._deletions(), self._footer()
        except OSError as error:
            self._say("data", *_told(error))
            return self._found
        if data is None:
            self._say("data", None, "the file is missing", range(row.base, row.stop))
            return self._found
        self._length("data", len(data), row.size)
        self._length("index", len(index or b""), self._entries)
        walk = scan.walk(data[: row.size], above=row.base - 1)
        faults = [] if self._is_whole(walk) else list(self._faults(data[: row.size], index, foot, walk))
        for fault in faults:
            self._say("data", fault.pos, fault.reason, range(fault.seq, fault.resume))
        if foot is not None:
            self._sealed(foot, data, index, faults)
        if not faults:
            self._whole(walk.rows, index, dead)
            self._tags(walk.rows, footed=foot is not None)
        return self._found

    def _say(self, kind: Kind, pos: int | None, reason: str, seqs: range = range(0), *, damage: bool = True) -> None:
        self._found.append(Finding(kind, self._stem + _SUFFIXES[kind], pos, reason, damage, self._topic.name, seqs))

    def _length(self, kind: Kind, have: int, expected: int) -> None:
        if have > expected and not self._row.sealed:
            said = f"{have - expected} bytes behind what the snapshot names, {_UNFINISHED}"
            self._say(kind, expected, said, damage=False)
        elif have != expected:
            lost = f"; {_NOTHING_LOST}" if kind == "index" else ""
            self._say(kind, min(have, expected), f"it has {have} bytes, the snapshot says {expected}{lost}")

    def _footer(self) -> Footer | None:
        content = read_all(self._disk, f"{self._stem}.foot")
        try:
            if content is not None and self._row.sealed:
                return footer.decode(content)
        except (Corrupt, NewerFormat) as error:
            self._say("footer", *_told(error))
            return None
        if self._row.unproven:
            return None
        if self._row.sealed:
            self._say("footer", None, "the file is missing; no record is lost: frames vouch for themselves")
        elif content is not None:
            self._say("footer", None, f"its segment still grows: {_UNFINISHED}", damage=False)
        return None

    def _tags(self, rows: Rows, *, footed: bool) -> None:
        """The tag index against the data. One that is missing is made again by the first search, and so is one whose
        footer does not read."""
        content, foot = (read_all(self._disk, self._stem + suffix) for suffix in (SUFFIX, ".foot"))
        if content is None or (self._row.sealed and not footed):
            return
        if foot is None or not self._row.sealed:
            self._say("tags", None, f"its segment still grows: {_UNFINISHED}", damage=False)
        elif content != content_of(self._row.base, foot, rows):
            pos, said = None, "it does not say what the data does"
            try:
                tag_index.decode(content)
            except (Corrupt, NewerFormat) as error:
                pos, said = _told(error)
            self._say("tags", pos, f"{said}; {_NOTHING_LOST}")

    def _deletions(self) -> NDArray[np.bool_] | None:
        """Which places are deleted; None where nobody can say."""
        base, dead = self._row.base, np.zeros(self._row.stop - self._row.base, np.bool_)
        try:
            content = read_all(self._disk, f"{self._stem}.del")
            vector = deletions.DeletionVector(base, 0) if content is None else deletions.decode(content)
        except (Corrupt, NewerFormat) as error:
            pos, said = _told(error)
            self._say("deletions", pos, f"{said}; which of its records are deleted is not known")
            return None
        if vector.base != base or (self._row.sealed and vector.size > len(dead)):
            self._say("deletions", 20, f"it is about seqs [{vector.base}, {vector.base + vector.size})")
            return None
        where = vector.seqs() - base
        dead[where[where < len(dead)]] = True  # one of an unfinished checkpoint reaches further
        return dead

    def _is_whole(self, walk: Walk) -> bool:
        """Whether every frame holds and every seq is there, of this topic."""
        rows, row = walk.rows, self._row
        if walk.end != row.size or len(rows) != row.stop - row.base or int(rows.seq[-1]) != row.stop - 1:
            return False
        return bool((frame.headers(rows.buf, rows.at[:1])["topic_id"] == self._topic.id).all())

    def _faults(self, data: memoryview, index: Buffer | None, foot: Footer | None, walk: Walk) -> Iterator[Fault]:
        """Every frame that does not hold, by an index that can be trusted; without one, the first."""
        row, found, index = self._row, False, memoryview(index or b"")[: self._entries]
        trusted = len(index) == self._entries and idx.fault(idx.read(index), row.size) is None
        if trusted and (foot is None or footer.check_index(foot, index) is None):
            shape, seq = Shape(row.base, row.stop, Mapped(data), index, [index]), row.base
            while seq < row.stop:
                _, seq, fault = CODEC.read(shape, seq, row.stop, _CHUNK_BYTES)
                if fault is not None:
                    found, seq = True, max(fault.resume, seq + 1)
                    yield fault
        if not found:
            reason = walk.reason or f"these are not the records of seqs {row.base} to {row.stop - 1}"
            yield Fault(row.base + len(walk.rows), row.stop, walk.end, reason)

    def _sealed(self, foot: Footer, data: Buffer, index: Buffer | None, faults: Sequence[Fault]) -> None:
        """A footer that reads, against what it vouches for."""
        row = self._row
        if (foot.first_seq, foot.stop_seq, foot.data_bytes) != (row.base, row.stop, row.size):
            said = f"it vouches for seqs [{foot.first_seq}, {foot.stop_seq}) in {foot.data_bytes} bytes of data"
            self._say("footer", 20, f"{said}, the snapshot for others")
            return
        for lo, hi in footer.check(foot, data, end=foot.data_bytes):
            if not any(lo <= fault.pos < hi for fault in faults):
                self._say("data", lo, f"bytes {lo} to {hi - 1} are not those that were sealed")
        if faults and index and len(index) == self._entries and (wrong := footer.check_index(foot, index)):
            self._say("index", None, wrong)

    def _whole(self, rows: Rows, index: Buffer | None, dead: NDArray[np.bool_] | None) -> None:
        """Index and counts against the data."""
        row = self._row
        entries = idx.entries(rows, row.base, row.stop, row.size)
        made, have = (np.frombuffer(buf, np.uint8) for buf in (idx.to_bytes(entries), index or b""))
        common = min(len(made), len(have))
        if len(wrong := np.flatnonzero(have[:common] != made[:common])):
            pos = int(wrong[0])
            said = f"the entry of seq {row.base + pos // idx.ENTRY_BYTES} does not say what the data does"
            self._say("index", pos, f"{said}; {_NOTHING_LOST}")
        times = int(entries["ts"][0]), int(entries["ts"][-1])
        if times != (row.first_ts, row.last_ts):
            self._say("counts", None, f"times are {times}, the snapshot says {(row.first_ts, row.last_ts)}")
        if dead is None:
            return
        size = rows.data.size if rows.meta is None else rows.data.size + rows.meta.size
        live, live_bytes = int((~dead).sum()), int(size[~dead].sum())
        said = f"{live} records of {live_bytes} bytes are live, the snapshot counts {row.live} of {row.live_bytes}"
        if live < row.live:
            self._say("deletions", None, f"{said}, from before {_UNFINISHED.removeprefix('of ')}", damage=False)
        elif live > row.live:
            self._say("deletions", None, f"{said}: what was deleted would come back")
        elif live_bytes != row.live_bytes:
            self._say("counts", None, said)
