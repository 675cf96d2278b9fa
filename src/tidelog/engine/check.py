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

[shell] The examination of a directory in parts that many can work at: `check` says what is looked at and why.

    here     snapshots, what nobody names, and at the end a start for reading
    parts    the WAL of each shard; the segments of all topics, by bytes

A part is plain data and can be examined in any process that sees the directory. What it finds comes back here, where it
is held against the directory as it is now: a writer may have removed in the meantime what looked damaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Fault, SegmentContent
from tidelog.commitlog.segment import MmapReader, map_file
from tidelog.disk.durability import read_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.engine import manifest
from tidelog.engine.config import OWN
from tidelog.engine.manifest import LoadedManifest, Manifest, SegmentRow, TopicRow
from tidelog.engine.recovery import replay_start
from tidelog.engine.results import FindingKind, Progress
from tidelog.engine.segment import CODEC
from tidelog.engine.startup import QUARANTINE_DIR, open_directory
from tidelog.engine.tag_search import TAG_INDEX_SUFFIX, encode_tag_index
from tidelog.engine.topic_state import TOPICS_DIR, WAL_DIR, topic_directory
from tidelog.errors import Corrupt, Damaged, NewerFormat, NotFound, Refused, Unavailable
from tidelog.formats import (
    deletion_vector,
    footer,
    frame,
    scan,
    segment_index,
    tag_index,
)
from tidelog.formats import (
    file_header as snapshot,
)
from tidelog.formats.footer import Footer
from tidelog.formats.rows import Rows, ScanResult
from tidelog.types import Buffer
from tidelog.wal import Position, Replay, paths, replay_shard

_FILE_SUFFIXES: Final = {
    "data": ".data",
    "counts": ".data",
    "index": ".idx",
    "footer": ".foot",
    "tags": ".tag",
    "deletions": ".del",
}
_SEGMENT_FILE_PATTERN = re.compile(r"seg-(\d{16,20})\.(?:data|idx|foot|tag|del)(\.tmp|\.rebuilding)?")
_CHUNK_BYTES: Final = 8 << 20
_UNFINISHED_CHECKPOINT: Final = "of a checkpoint that is under way or did not finish"
_NOTHING_LOST: Final = "no record is lost: it is made again from the data"


class Finding(NamedTuple):
    """One place that is not as it should be."""

    kind: FindingKind
    file: str  # as seen from the data directory
    pos: int | None  # the first bad byte, where it is known
    reason: str
    damage: bool = True  # False: a note, which the next start mends
    topic: str | None = None
    seqs: range = range(0)  # records that cannot be read because of it


def check_directory(path: str, *, disk: Disk | None = None, progress: Progress | None = None) -> DirectoryCheck:
    """Verify a data directory: iterate over the findings, oldest places of each part first."""
    return DirectoryCheck(str(path).rstrip("/") or "/", disk or PosixDisk(), progress or (lambda *_: None))


class DirectoryCheck:
    """Iterate for the findings; how much was looked at is known after the loop."""

    def __init__(self, root: str, disk: Disk, progress: Progress) -> None:
        self._root, self._disk, self._progress = root, disk, progress
        self._wal, self._done, self._total = join(root, WAL_DIR), 0, 0
        self._shard_counts, self._dropped_topics = (
            (0, 0),
            set[int](),
        )  # frames and bytes of a group by the last look; dropped topics
        self.frames = self.topics = self.segments = self.records = self.bytes = self.damage_count = 0

    def __iter__(self) -> Iterator[Finding]:
        if not set(self._list_dir(self._root)) & {manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR}:
            raise NotFound(f"there are no topics in {self._root}; nothing was changed, check the path")
        loaded, unread = self._check_manifests()
        keys = sorted({*paths.list_shard_keys(self._disk, self._wal), *(row.key for row in loaded.manifest.groups)})
        self._total = len(keys) + sum(len(row.segments) for row in loaded.manifest.topics)
        self.topics = len([row for row in loaded.manifest.topics if not row.name.startswith(OWN)])
        parts = (
            self._check_shards(keys),
            self._check_segments(loaded),
            self._find_leftovers(loaded),
            self._check_startup(),
        )
        for finding in chain(unread, *parts):
            self.damage_count += finding.damage
            yield finding

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────

    def _check_manifests(self) -> tuple[LoadedManifest, list[Finding]]:
        good: list[tuple[int, Manifest]] = []
        found = []
        for number in manifest.list_manifest_numbers(self._disk, self._root):
            path = manifest.manifest_path(self._root, number)
            try:
                content = read_file(self._disk, path)
                if content is not None:  # else it was pruned while we looked
                    good.append((number, snapshot.decode_snapshot(Manifest, content)))
            except (Corrupt, NewerFormat, OSError) as error:
                found.append(Finding("snapshot", self._relative(path), *_describe_error(error)))
        if not good:
            return LoadedManifest(0, Manifest(), None, []), found
        path = self._relative(manifest.manifest_path(self._root, good[0][0]))
        found += [Finding("snapshot", path, None, said) for said in _find_contradictions(good[0][1])]
        return LoadedManifest(*good[0], good[1][1] if len(good) > 1 else None, []), found

    # ── the WAL ───────────────────────────────────────────────────────────────────────────────

    def _check_shards(self, keys: Sequence[str]) -> Iterator[Finding]:
        for key in keys:
            yield from self._check_shard(key)
            self.frames, self.bytes = self.frames + self._shard_counts[0], self.bytes + self._shard_counts[1]
            self._report_progress(f"WAL {key}".strip())

    def _check_shard(self, key: str) -> list[Finding]:
        return self._repeat_until_stable(lambda: list(self._check_shard_once(key, self._check_manifests()[0])))

    def _repeat_until_stable(self, check: Callable[[], list[Finding]]) -> list[Finding]:
        """What is found twice alike, or is no damage. What another look does not find was a writer at work."""
        before: list[Finding] | None = None
        for _ in range(8):
            try:
                found = check()
            except (Unavailable, FileNotFoundError):  # something was removed while we looked
                continue
            if found == before or not _has_damage(found):
                return found
            before = found
        raise Unavailable(f"{self._root} changes faster than it can be read; nothing was changed, try again")

    def _check_shard_once(self, key: str, loaded: LoadedManifest) -> Iterator[Finding]:
        place = paths.shard_directory(self._wal, key)
        numbers, self._shard_counts = paths.list_file_numbers(self._disk, place), (0, 0)
        start = replay_start(loaded, key) or Position(2 if numbers[:1] == [2] else 1, 0)  # as recovery begins
        if start.file_number not in numbers and numbers and numbers[-1] > start.file_number:
            missing = self._relative(paths.file_path(place, start.file_number))
            yield Finding("wal", missing, None, "it is missing: what was written there after the snapshot is lost")
        try:
            # From the oldest byte that is there: what a snapshot covers is needed again should that one not read.
            oldest = Position(numbers[0], 0) if numbers else start
            replay = self._scan_shard(replay_shard(self._disk, place, oldest, durable=max(oldest, start)))
            yield from self._report_shard(replay, place, start)
        except Damaged as error:
            yield Finding("wal", self._relative(place), None, str(error))
            return
        if said := replay.current_file_fault():
            current = self._relative(join(place, paths.CURRENT))
            yield Finding("wal", current, 0, f"{said}; nothing hangs on it, the next start writes it anew", False)

    def _scan_shard(self, replay: Replay) -> Replay:
        for window in replay:
            self._shard_counts = self._shard_counts[0] + len(window.frame_pos), self._shard_counts[1]
            self._dropped_topics |= set(
                window.headers["topic_id"][window.headers["kind"] == frame.TOPIC_DELETE].tolist()
            )
        self._shard_counts = (
            self._shard_counts[0],
            self._shard_counts[1] + sum(extent.hi - extent.lo for extent in replay.extents),
        )
        return replay

    def _report_shard(self, replay: Replay, place: str, start: Position) -> Iterator[Finding]:
        for gap in (gap for gap in replay.missing_frames if gap.stop > start.file_number):
            said = f"frames {gap.start} to {gap.stop - 1}, which come before it, are in no file"
            yield Finding("wal", self._relative(paths.file_path(place, gap.stop)), 0, said)
        for lost in (lost for lost in replay.losses if lost.file):
            said = f"{lost.end - lost.pos} bytes that were synced do not read ({lost.reason})"
            if Position(lost.file_number, lost.end) <= start:
                said += "; no record is lost: a snapshot covers it"
            else:
                said += "; acknowledged records may be lost with them, what follows them is replayed"
            yield Finding("wal", self._relative(paths.file_path(place, lost.file_number)), lost.pos, said)
        if (absent := replay.missing_file) is not None:
            said = f"it is missing: what was written there after the snapshot is lost ({absent.reason})"
            yield Finding("wal", self._relative(paths.file_path(place, absent.file_number)), None, said)
        if (cut := replay.torn_tail) is not None:
            said = f"an unfinished write of {cut.size} bytes ({cut.reason}); the next start cuts it"
            if cut.frames:
                said += f" and keeps it: {cut.frames} frames that read follow, of which no sync is known"
            yield Finding("wal", self._relative(paths.file_path(place, cut.file_number)), cut.pos, said, False)

    # ── segments ──────────────────────────────────────────────────────────────────────────────

    def _check_segments(self, loaded: LoadedManifest) -> Iterator[Finding]:
        for row in loaded.manifest.topics:
            for segment in row.segments if row.id not in self._dropped_topics else ():
                found = SegmentCheck(self._disk, topic_directory(self._root, row.id), row, segment).findings()
                self.segments, self.bytes = self.segments + 1, self.bytes + segment.size
                self._report_progress(row.name)
                if not _has_damage(found) or not self._was_removed(row.id, segment.base):
                    yield from (finding._replace(file=self._relative(finding.file)) for finding in found)

    def _was_removed(self, topic_id: int, base: int) -> bool:
        """Whether a writer has removed a segment, or its topic, since the check began."""
        loaded, _ = self._check_manifests()
        rows = {row.id: row.segments for row in loaded.manifest.topics}
        if base not in {segment.base for segment in rows.get(topic_id, ())}:
            return True
        for key in paths.list_shard_keys(self._disk, self._wal):
            self._check_shard(key)
        return topic_id in self._dropped_topics

    # ── what nobody names, and the whole ──────────────────────────────────────────────────────

    def _find_leftovers(self, loaded: LoadedManifest) -> Iterator[Finding]:
        made = [loaded.manifest, *([loaded.before] if loaded.before is not None else [])]
        named = {(f"{topic.id:08X}", row.base) for each in made for topic in each.topics for row in topic.segments}
        # Without a snapshot nobody can say which files are too many.
        for topic in self._list_dir(join(self._root, TOPICS_DIR)) if loaded.number else ():
            for file in self._list_dir(join(join(self._root, TOPICS_DIR), topic)):
                segment = _SEGMENT_FILE_PATTERN.fullmatch(file)
                if segment is not None and (segment[2] or (topic, int(segment[1])) not in named):
                    said = f"no snapshot names it: {_UNFINISHED_CHECKPOINT}"
                    yield Finding("leftover", join(join(TOPICS_DIR, topic), file), None, said, False)
        for name in self._list_dir(join(self._root, QUARANTINE_DIR)):
            yield Finding(
                "leftover", join(QUARANTINE_DIR, name), None, "bytes that an earlier start cut and kept", False
            )

    def _check_startup(self) -> Iterator[Finding]:
        """What is whole file by file must also start; what is not has been told of."""
        yield from () if self.damage_count else self._repeat_until_stable(self._open_read_only)

    def _open_read_only(self) -> list[Finding]:
        plain: dict[str, Any] = {"clock": None, "config": None, "accept_loss": False, "progress": None, "settings": {}}
        try:
            found = open_directory(self._root, read_only=True, disk=self._disk, **plain)
        except (Refused, Damaged) as error:
            return [Finding("start", ".", None, str(error))]
        counts = [core.index.count for name, core in found.topics.items() if not name.startswith(OWN)]
        self.topics, self.records = len(counts), sum(counts)
        return [Finding("start", ".", None, said) for said in found.report.damage]

    def _list_dir(self, path: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._disk.list_dir(path)
        return []

    def _relative(self, path: str) -> str:
        return path.removeprefix(f"{self._root.rstrip('/')}/")

    def _report_progress(self, what: str) -> None:
        self._done += 1
        self._progress(what, self._done, self._total)


def _has_damage(found: Sequence[Finding]) -> bool:
    return any(finding.damage for finding in found)


def _describe_error(error: Corrupt | NewerFormat | OSError) -> tuple[int | None, str]:
    """Where a small file is bad and how."""
    if isinstance(error, Corrupt):
        return error.pos, error.reason
    if isinstance(error, NewerFormat):
        return 4, f"version {error.found} is later than {error.known}, the last one known: a newer tidelog's, or damage"
    return None, f"it cannot be read: {error}"


def _find_contradictions(made: Manifest) -> Iterator[str]:
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


class CheckpointSummary(NamedTuple):
    """How far checkpoints of a directory are, by its newest snapshot alone."""

    snapshot: int  # its number; 0: there is none
    saved_ms: int | None  # when it was written
    wal_bytes: int
    lagging: tuple[str, ...]  # topics that it could not write
    without_footer: tuple[str, ...]  # segments that were sealed without a footer, as topic and first seq
    skipped: tuple[str, ...]  # snapshots that do not read, and why


def checkpoint_summary(path: str, disk: Disk | None = None) -> CheckpointSummary | None:
    """A glance at a data directory, beside a writer or without one; None where it is none. Reads no record."""
    disk = disk or PosixDisk()
    wal = join(path, WAL_DIR)
    if disk.stat(wal) is None:
        return None
    loaded = manifest.load_newest(disk, path)
    found = disk.stat(manifest.manifest_path(path, loaded.number)) if loaded.number else None
    size = 0
    for key in paths.list_shard_keys(disk, wal):
        place = paths.shard_directory(wal, key)
        stats = (disk.stat(paths.file_path(place, number)) for number in paths.list_file_numbers(disk, place))
        size += sum(each.size for each in stats if each is not None)
    rows = loaded.manifest.topics
    return CheckpointSummary(
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
        self._disk, self._stem, self._topic, self._row = (
            disk,
            join(place, CODEC.name_format.format(row.base)),
            topic,
            row,
        )
        self._entries = (row.stop - row.base) * segment_index.ENTRY_BYTES
        self._found: list[Finding] = []

    def findings(self) -> list[Finding]:
        row = self._row
        try:
            data, index = (map_file(self._disk, self._stem + suffix) for suffix in (".data", ".idx"))
            dead, foot = self._read_deletions(), self._read_footer()
        except OSError as error:
            self._add_finding("data", *_describe_error(error))
            return self._found
        if data is None:
            self._add_finding("data", None, "the file is missing", range(row.base, row.stop))
            return self._found
        self._check_length("data", len(data), row.size)
        self._check_length("index", len(index or b""), self._entries)
        walk = scan.scan_records(data[: row.size], above=row.base - 1)
        faults = [] if self._is_complete(walk) else list(self._find_faults(data[: row.size], index, foot, walk))
        for fault in faults:
            self._add_finding("data", fault.pos, fault.reason, range(fault.seq, fault.resume))
        if foot is not None:
            self._check_footer(foot, data, index, faults)
        if not faults:
            self._check_index_and_counts(walk.rows, index, dead)
            self._check_tag_index(walk.rows, footed=foot is not None)
        return self._found

    def _add_finding(
        self, kind: FindingKind, pos: int | None, reason: str, seqs: range = range(0), *, damage: bool = True
    ) -> None:
        self._found.append(
            Finding(kind, self._stem + _FILE_SUFFIXES[kind], pos, reason, damage, self._topic.name, seqs)
        )

    def _check_length(self, kind: FindingKind, have: int, expected: int) -> None:
        if have > expected and not self._row.sealed:
            said = f"{have - expected} bytes behind what the snapshot names, {_UNFINISHED_CHECKPOINT}"
            self._add_finding(kind, expected, said, damage=False)
        elif have != expected:
            lost = f"; {_NOTHING_LOST}" if kind == "index" else ""
            self._add_finding(kind, min(have, expected), f"it has {have} bytes, the snapshot says {expected}{lost}")

    def _read_footer(self) -> Footer | None:
        content = read_file(self._disk, f"{self._stem}.foot")
        try:
            if content is not None and self._row.sealed:
                return footer.decode(content)
        except (Corrupt, NewerFormat) as error:
            self._add_finding("footer", *_describe_error(error))
            return None
        if self._row.unproven:
            return None
        if self._row.sealed:
            self._add_finding("footer", None, "the file is missing; no record is lost: frames vouch for themselves")
        elif content is not None:
            self._add_finding("footer", None, f"its segment still grows: {_UNFINISHED_CHECKPOINT}", damage=False)
        return None

    def _check_tag_index(self, rows: Rows, *, footed: bool) -> None:
        """The tag index against the data. One that is missing is made again by the first search, and so is one whose
        footer does not read."""
        content, foot = (read_file(self._disk, self._stem + suffix) for suffix in (TAG_INDEX_SUFFIX, ".foot"))
        if content is None or (self._row.sealed and not footed):
            return
        if foot is None or not self._row.sealed:
            self._add_finding("tags", None, f"its segment still grows: {_UNFINISHED_CHECKPOINT}", damage=False)
        elif content != encode_tag_index(self._row.base, foot, rows):
            pos, said = None, "it does not say what the data does"
            try:
                tag_index.decode(content)
            except (Corrupt, NewerFormat) as error:
                pos, said = _describe_error(error)
            self._add_finding("tags", pos, f"{said}; {_NOTHING_LOST}")

    def _read_deletions(self) -> NDArray[np.bool_] | None:
        """Which places are deleted; None where nobody can say."""
        base, dead = self._row.base, np.zeros(self._row.stop - self._row.base, np.bool_)
        try:
            content = read_file(self._disk, f"{self._stem}.del")
            vector = deletion_vector.DeletionVector(base, 0) if content is None else deletion_vector.decode(content)
        except (Corrupt, NewerFormat) as error:
            pos, said = _describe_error(error)
            self._add_finding("deletions", pos, f"{said}; which of its records are deleted is not known")
            return None
        if vector.base != base or (self._row.sealed and vector.size > len(dead)):
            self._add_finding("deletions", 20, f"it is about seqs [{vector.base}, {vector.base + vector.size})")
            return None
        where = vector.seqs() - base
        dead[where[where < len(dead)]] = True  # one of an unfinished checkpoint reaches further
        return dead

    def _is_complete(self, walk: ScanResult) -> bool:
        """Whether every frame holds and every seq is there, of this topic."""
        rows, row = walk.rows, self._row
        if walk.end != row.size or len(rows) != row.stop - row.base or int(rows.seq[-1]) != row.stop - 1:
            return False
        return bool((frame.read_headers(rows.buf, rows.frame_pos[:1])["topic_id"] == self._topic.id).all())

    def _find_faults(
        self, data: memoryview, index: Buffer | None, foot: Footer | None, walk: ScanResult
    ) -> Iterator[Fault]:
        """Every frame that does not hold, by an index that can be trusted; without one, the first."""
        row, found, index = self._row, False, memoryview(index or b"")[: self._entries]
        trusted = (
            len(index) == self._entries
            and segment_index.find_index_fault(segment_index.read_entries(index), row.size) is None
        )
        if trusted and (foot is None or footer.find_index_fault(foot, index) is None):
            shape, seq = SegmentContent(row.base, row.stop, MmapReader(data), index, [index]), row.base
            while seq < row.stop:
                _, seq, fault = CODEC.read(shape, seq, row.stop, _CHUNK_BYTES)
                if fault is not None:
                    found, seq = True, max(fault.resume, seq + 1)
                    yield fault
        if not found:
            reason = walk.reason or f"these are not the records of seqs {row.base} to {row.stop - 1}"
            yield Fault(row.base + len(walk.rows), row.stop, walk.end, reason)

    def _check_footer(self, foot: Footer, data: Buffer, index: Buffer | None, faults: Sequence[Fault]) -> None:
        """A footer that reads, against what it vouches for."""
        row = self._row
        if (foot.first_seq, foot.stop_seq, foot.data_bytes) != (row.base, row.stop, row.size):
            said = f"it vouches for seqs [{foot.first_seq}, {foot.stop_seq}) in {foot.data_bytes} bytes of data"
            self._add_finding("footer", 20, f"{said}, the snapshot for others")
            return
        for lo, hi in footer.find_bad_ranges(foot, data, end=foot.data_bytes):
            if not any(lo <= fault.pos < hi for fault in faults):
                self._add_finding("data", lo, f"bytes {lo} to {hi - 1} are not those that were sealed")
        if faults and index and len(index) == self._entries and (wrong := footer.find_index_fault(foot, index)):
            self._add_finding("index", None, wrong)

    def _check_index_and_counts(self, rows: Rows, index: Buffer | None, dead: NDArray[np.bool_] | None) -> None:
        """Index and counts against the data."""
        row = self._row
        entries = segment_index.build_entries(rows, row.base, row.stop, row.size)
        made, have = (np.frombuffer(buf, np.uint8) for buf in (entries.tobytes(), index or b""))
        common = min(len(made), len(have))
        if len(wrong := np.flatnonzero(have[:common] != made[:common])):
            pos = int(wrong[0])
            said = f"the entry of seq {row.base + pos // segment_index.ENTRY_BYTES} does not say what the data does"
            self._add_finding("index", pos, f"{said}; {_NOTHING_LOST}")
        times = int(entries["ts"][0]), int(entries["ts"][-1])
        if times != (row.first_ts, row.last_ts):
            self._add_finding("counts", None, f"times are {times}, the snapshot says {(row.first_ts, row.last_ts)}")
        if dead is None:
            return
        size = rows.data.size if rows.meta is None else rows.data.size + rows.meta.size
        live, live_bytes = int((~dead).sum()), int(size[~dead].sum())
        said = f"{live} records of {live_bytes} bytes are live, the snapshot counts {row.live} of {row.live_bytes}"
        if live < row.live:
            self._add_finding(
                "deletions", None, f"{said}, from before {_UNFINISHED_CHECKPOINT.removeprefix('of ')}", damage=False
            )
        elif live > row.live:
            self._add_finding("deletions", None, f"{said}: what was deleted would come back")
        elif live_bytes != row.live_bytes:
            self._add_finding("counts", None, said)


CHECK_TASK_BYTES: Final = 64 << 20


class CheckTask(NamedTuple):
    """A shard of the WAL, or some segments."""

    path: str
    shard: str | None
    segments: tuple[tuple[TopicRow, SegmentRow], ...] = ()


class CheckResult(NamedTuple):
    findings: tuple[tuple[Finding, tuple[int, int] | None], ...]  # with topic and base, where it is of a segment
    segments: int = 0
    frames: int = 0
    bytes: int = 0
    dropped: frozenset[int] = frozenset()


class ParallelCheck(DirectoryCheck):
    """Iterate for what is found here, hand out `parts`, and `gather` what was seen in them."""

    def __init__(self, path: str, *, disk: Disk | None = None) -> None:
        super().__init__(str(path).rstrip("/") or "/", disk or PosixDisk(), lambda *_: None)
        self.tasks: list[CheckTask] = []

    def _check_shards(self, keys: Sequence[str]) -> Iterator[Finding]:
        self.tasks += [CheckTask(self._root, key) for key in keys]
        return iter(())

    def _check_segments(self, loaded: LoadedManifest) -> Iterator[Finding]:
        found: list[tuple[TopicRow, SegmentRow]] = []
        size = 0
        for row in loaded.manifest.topics:
            slim = msgspec.structs.replace(row, segments=type(row.segments)())
            for segment in row.segments:
                found.append((slim, segment))
                size += segment.size
                if size >= CHECK_TASK_BYTES:
                    self.tasks.append(CheckTask(self._root, None, tuple(found)))
                    found, size = [], 0
        if found:
            self.tasks.append(CheckTask(self._root, None, tuple(found)))
        return iter(())

    def _check_startup(self) -> Iterator[Finding]:
        return iter(())

    def merge_results(self, seen: Iterable[CheckResult]) -> Iterator[Finding]:
        """What of it is still so."""
        for each in seen:
            self._dropped_topics |= each.dropped
            self.segments, self.frames = self.segments + each.segments, self.frames + each.frames
            self.bytes += each.bytes
            for finding, segment in each.findings:
                if finding.damage and segment is not None and self._was_removed(*segment):
                    continue
                self.damage_count += finding.damage
                yield finding
        for finding in super()._check_startup():
            self.damage_count += finding.damage
            yield finding


def run_check_task(part: CheckTask, *, disk: Disk | None = None) -> CheckResult:
    """Look at one part, wherever this runs."""
    disk = disk or PosixDisk()
    if part.shard is not None:
        check = ParallelCheck(part.path, disk=disk)
        found = check._check_shard(part.shard)
        frames, size = check._shard_counts
        return CheckResult(
            tuple((finding, None) for finding in found), 0, frames, size, frozenset(check._dropped_topics)
        )
    told: list[tuple[Finding, tuple[int, int] | None]] = []
    root = f"{part.path.rstrip('/')}/"
    for topic, row in part.segments:
        found = SegmentCheck(disk, topic_directory(part.path, topic.id), topic, row).findings()
        told += [(each._replace(file=each.file.removeprefix(root)), (topic.id, row.base)) for each in found]
    return CheckResult(tuple(told), len(part.segments), 0, sum(row.size for _, row in part.segments))
