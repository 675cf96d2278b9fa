"""Verify every file in a data directory against its checksums and the snapshot. Changes nothing.

    meta/*               its checksum, and its consistency
    wal/                 every frame of every file; torn tails and damage as recovery distinguishes them
    topics/  .data       every frame, the footer's checksums, the length and the seqs in the snapshot
             .idx        byte for byte what the data gives
             .foot       its checksum, and its totals of the data
             .tag        byte for byte what the data gives, if there is one
             .del        its checksum, and the live records that the snapshot counts
             blobs/      every chunk of every blob that a live record names
    cold store           the length of every object; with `full`, every byte of it
    all of it            without damage, opening the directory read-only must report none either

Damage is what no crash leaves; notes are what the next start repairs. A writer may be active: damage is verified
again, and files that it removed since are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Fault, SegmentContent
from tidelog.commitlog.segment import MmapReader, map_file
from tidelog.disk.bounded_store import BoundedStore
from tidelog.disk.durability import read_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.disk.segment_store import SegmentStore
from tidelog.engine import blobs, manifest
from tidelog.engine.cold_claim import find_foreign_store
from tidelog.engine.config import OWN, EngineConfig, TopicConfig
from tidelog.engine.context import TOPICS_DIR, WAL_DIR, topic_directory
from tidelog.engine.key_index import KEY_INDEX_SUFFIX, encode_key_index
from tidelog.engine.large_read import BlobReader
from tidelog.engine.manifest import ColdRow, LoadedManifest, Manifest, SegmentRow, TopicRow
from tidelog.engine.memtable import MemTable
from tidelog.engine.record_keys import selector_of
from tidelog.engine.recovery import replay_start
from tidelog.engine.results import FindingKind, Progress
from tidelog.engine.segment import CODEC, format_file_name, parse_file_name
from tidelog.engine.startup import QUARANTINE_DIR, open_cold_store, open_directory
from tidelog.engine.tag_search import TAG_INDEX_SUFFIX, SegmentKey, encode_tag_index
from tidelog.engine.tiers import verify_object
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Corrupt, Damaged, NewerFormat, NotFound, Refused, StoreUnavailable, Unavailable
from tidelog.formats import frame, key_index, large_record, scan, sealed_segment, segment_index, tag_index
from tidelog.formats.large_record import BlobRef
from tidelog.formats.rows import Rows, ScanResult
from tidelog.formats.sealed_segment import Footer
from tidelog.types import Buffer
from tidelog.wal import LostRange, Position, Replay, paths, replay_shard

_FILE_SUFFIXES: Final = {
    "data": ".data",
    "counts": ".data",
    "index": ".idx",
    "footer": ".foot",
    "tags": ".tag",
    "keys": ".key",
    "deletions": ".del",
    "cold": ".data",
}
_CHUNK_BYTES: Final = 8 << 20
CHECK_TASK_BYTES: Final = 64 << 20
_UNFINISHED_CHECKPOINT: Final = "of a checkpoint that is under way or did not finish"
_NOTHING_LOST: Final = "no record is lost: it is rebuilt from the data"


class Finding(NamedTuple):
    """One place that is not as it should be."""

    kind: FindingKind
    file: str  # relative to the data directory
    pos: int | None  # the first bad byte, if known
    reason: str
    damage: bool = True  # False: a note, repaired by the next start
    topic: str | None = None
    seqs: range = range(0)  # records that cannot be read because of it


def check_directory(
    path: str,
    *,
    disk: Disk | None = None,
    progress: Progress | None = None,
    full: bool = False,
    cold: str | None = None,
    cold_store: SegmentStore | None = None,
) -> DirectoryCheck:
    """Verify a data directory: iterate over the findings, oldest places of each part first.

    Args:
        full: read every object of the cold store, instead of asking for its length.
        cold: the address of the cold store, with credentials; None: the one that the directory names.
        cold_store: an open store, instead of `cold`.
    """
    root = str(path).rstrip("/") or "/"
    return DirectoryCheck(
        root, disk or PosixDisk(), progress or (lambda *_: None), full=full, cold=cold, cold_store=cold_store
    )


class CheckTask(NamedTuple):
    """A shard of the WAL, or some segments. Plain data: any process that sees the directory can run it."""

    path: str
    shard: str | None
    segments: tuple[tuple[TopicRow, SegmentRow], ...] = ()
    full: bool = False  # read objects of the cold store
    cold: str | None = None  # its address; None: as the directory says


class CheckResult(NamedTuple):
    findings: tuple[tuple[Finding, SegmentKey | None], ...]  # with its segment, for a finding of one
    segments: int = 0
    frames: int = 0
    bytes: int = 0
    dropped: frozenset[int] = frozenset()  # topics whose drop is in the WAL


def run_check_task(task: CheckTask, *, disk: Disk | None = None, cold_store: SegmentStore | None = None) -> CheckResult:
    """Check one shard or some segments."""
    disk = disk or PosixDisk()
    if task.shard is not None:
        return ShardCheck(disk, task.path, task.shard).run()
    results: list[tuple[Finding, SegmentKey | None]] = []
    opened: BoundedStore | None = None
    unverified = "its data is in a cold store that is not known here"
    if any(row.cold is not None and row.cold.key for _, row in task.segments):
        if cold_store is None:
            cold_store = opened = open_cold_store(disk, task.path, EngineConfig(cold=task.cold))
        with suppress(StoreUnavailable, Corrupt, NewerFormat):  # of the marker: each object says what is wrong
            foreign = None if cold_store is None else find_foreign_store(disk, task.path, cold_store)
            if foreign is not None and cold_store is not None:
                unverified, cold_store = f"the cold store {cold_store.address}: {foreign}", None
    for topic, row in task.segments:
        directory = topic_directory(task.path, topic.id)
        findings = SegmentCheck(disk, directory, topic, row, cold_store or unverified, full=task.full).findings()
        findings = [each for each in findings if each.kind != "blob" or not _was_record_removed(disk, task.path, each)]
        results += [
            (finding._replace(file=_relative(task.path, finding.file)), (topic.id, row.base, row.generation))
            for finding in findings
        ]
    if opened is not None:
        opened.close()
    return CheckResult(tuple(results), len(task.segments), 0, sum(row.size for _, row in task.segments))


class DirectoryCheck:
    """Iterate for the findings; the totals are complete after the loop.

    To run in parallel, iterate `begin()`, run its `tasks` anywhere, and iterate `merge_results`.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        progress: Progress,
        *,
        full: bool = False,
        cold: str | None = None,
        cold_store: SegmentStore | None = None,
    ) -> None:
        self._root, self._disk, self._progress = root, disk, progress
        self._full, self._cold, self._cold_store = full, cold, cold_store
        self._wal = join(root, WAL_DIR)
        self._dropped_topics: set[int] = set()
        self.tasks: list[CheckTask] = []
        self.frames = self.topics = self.segments = self.records = self.bytes = self.damage_count = 0

    def __iter__(self) -> Iterator[Finding]:
        loaded, unreadable = self._load()
        parts = (unreadable, self._run_tasks(loaded), self._find_leftovers(loaded), self._check_startup())
        return self._counted(chain(*parts))

    def begin(self) -> Iterator[Finding]:
        """Check snapshots and leftovers, and list the rest in `tasks`."""
        loaded, unreadable = self._load()
        self.tasks += self._iter_tasks(loaded, CHECK_TASK_BYTES)
        return self._counted(chain(unreadable, self._find_leftovers(loaded)))

    def merge_results(self, results: Iterable[CheckResult]) -> Iterator[Finding]:
        """Yield the findings that are still valid, then those of a start."""
        merged = (finding for result in results for finding in self._merge(result))
        return self._counted(chain(merged, self._check_startup()))

    def _counted(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        for finding in findings:
            self.damage_count += finding.damage
            yield finding

    def _load(self) -> tuple[LoadedManifest, list[Finding]]:
        if not set(self._list_dir(self._root)) & {manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR}:
            raise NotFound(f"there are no topics in {self._root}; nothing was changed, check the path")
        loaded, unreadable = _load_manifests(self._disk, self._root)
        self.topics = len([row for row in loaded.manifest.topics if not row.name.startswith(OWN)])
        return loaded, unreadable

    def _run_tasks(self, loaded: LoadedManifest) -> Iterator[Finding]:
        total = len(self._shard_keys(loaded)) + sum(len(row.segments) for row in loaded.manifest.topics)
        for done, task in enumerate(self._iter_tasks(loaded, 1), 1):
            result = run_check_task(task, disk=self._disk, cold_store=self._cold_store)
            self._progress(task.segments[0][0].name if task.segments else f"WAL {task.shard}".strip(), done, total)
            yield from self._merge(result)

    def _iter_tasks(self, loaded: LoadedManifest, task_bytes: int) -> Iterator[CheckTask]:
        """Yield the shards, then segments of at least `task_bytes` together; not those of topics known as dropped."""
        for key in self._shard_keys(loaded):
            yield CheckTask(self._root, key)
        segments: list[tuple[TopicRow, SegmentRow]] = []
        for row in loaded.manifest.topics:
            slim = msgspec.structs.replace(row, segments=())
            for segment in row.segments if row.id not in self._dropped_topics else ():
                segments.append((slim, segment))
                if sum(each.size for _, each in segments) >= task_bytes:
                    yield CheckTask(self._root, None, tuple(segments), self._full, self._cold)
                    segments = []
        if segments:
            yield CheckTask(self._root, None, tuple(segments), self._full, self._cold)

    def _merge(self, result: CheckResult) -> Iterator[Finding]:
        """Yield findings, except damage of a segment that a writer removed meanwhile."""
        self._dropped_topics |= result.dropped
        self.segments, self.frames = self.segments + result.segments, self.frames + result.frames
        self.bytes += result.bytes
        removed: dict[SegmentKey, bool] = {}
        for finding, segment in result.findings:
            if segment is not None and segment not in removed:
                damaged = any(each.damage for each, of in result.findings if of == segment)
                removed[segment] = damaged and self._was_removed(*segment)
            if segment is None or not removed[segment]:
                yield finding

    def _was_removed(self, topic_id: int, base: int, generation: int) -> bool:
        """Whether a writer has removed or rewritten a segment, or removed its topic, since the check began."""
        loaded, _ = _load_manifests(self._disk, self._root)
        rows = {row.id: row.segments for row in loaded.manifest.topics}
        if (base, generation) not in {(segment.base, segment.generation) for segment in rows.get(topic_id, ())}:
            return True
        for key in paths.list_shard_keys(self._disk, self._wal):
            self._dropped_topics |= ShardCheck(self._disk, self._root, key).run().dropped
        return topic_id in self._dropped_topics

    def _shard_keys(self, loaded: LoadedManifest) -> list[str]:
        return sorted({*paths.list_shard_keys(self._disk, self._wal), *(row.key for row in loaded.manifest.groups)})

    def _find_leftovers(self, loaded: LoadedManifest) -> Iterator[Finding]:
        rows = chain(loaded.manifest.topics, loaded.rows_before())
        named = {(f"{topic.id:08X}", row.base, row.generation) for topic in rows for row in topic.segments}
        # Without a snapshot it is unknown which files are left over.
        for topic in self._list_dir(join(self._root, TOPICS_DIR)) if loaded.number else ():
            for file in self._list_dir(join(join(self._root, TOPICS_DIR), topic)):
                parsed = parse_file_name(file)
                if parsed and (parsed.is_temporary or (topic, parsed.base, parsed.generation) not in named):
                    reason = f"no snapshot names it: {_UNFINISHED_CHECKPOINT}"
                    yield Finding("leftover", join(join(TOPICS_DIR, topic), file), None, reason, False)
        for name in self._list_dir(join(self._root, QUARANTINE_DIR)):
            yield Finding(
                "leftover", join(QUARANTINE_DIR, name), None, "bytes that an earlier start cut and kept", False
            )

    def _check_startup(self) -> Iterator[Finding]:
        """A directory without damaged files must also open."""
        yield from () if self.damage_count else _repeat_until_stable(self._root, self._open_read_only)

    def _open_read_only(self) -> list[Finding]:
        defaults: dict[str, Any] = {
            "clock": None,
            "config": None,
            "accept_loss": False,
            "progress": None,
            "settings": {},
        }
        try:
            opened = open_directory(
                self._root, read_only=True, disk=self._disk, cold_store=self._cold_store, **defaults
            )
        except (Refused, Damaged) as error:
            return [Finding("start", ".", None, str(error))]
        topics = [topic for name in opened.topics.names() if (topic := opened.topics.get(name)) is not None]
        counts = [topic.index.count for topic in topics if not topic.name.startswith(OWN)]
        self.topics, self.records = len(counts), sum(counts)
        findings = [Finding("start", ".", None, reason) for reason in opened.report.damage]
        for topic in topics:
            findings += [each._replace(file=_relative(self._root, each.file)) for each in _check_wal_blobs(topic)]
            findings += self._find_blob_leftovers(topic)
        return findings

    def _find_blob_leftovers(self, topic: TopicState) -> Iterator[Finding]:
        directory = blobs.blobs_directory(topic.directory)
        for name in blobs.find_unnamed(self._list_dir(directory), {blob_id for _, blob_id in topic.blobs}):
            reason = "no live record names it: of a write that is under way or did not finish, or of a removed record"
            yield Finding("leftover", _relative(self._root, join(directory, name)), None, reason, False)

    def _list_dir(self, path: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._disk.list_dir(path)
        return []


def find_blob_fault(disk: Disk, path: str, ref: BlobRef) -> tuple[int | None, str] | None:
    """Read a blob and return where it is not what was written, and why; None: every chunk verifies."""
    try:
        reader = BlobReader(disk, path, ref)
        try:
            for _ in reader.chunks():
                pass
        finally:
            reader.close()
        if (stat := disk.stat(path)) is not None and stat.size != ref.file_bytes:
            return min(stat.size, ref.file_bytes), f"it has {stat.size} bytes, {ref.file_bytes} were written"
    except FileNotFoundError:
        return None, "the file is missing"
    except (Corrupt, NewerFormat, OSError) as error:
        return _describe_error(error)
    return None


def _check_blobs(disk: Disk, directory: str, topic: str, rows: Rows) -> Iterator[Finding]:
    """Check the blobs of these live records."""
    for place in () if rows.blob_bytes is None else np.flatnonzero(rows.blob_bytes).tolist():
        ref, seq = large_record.read_ref(rows.buf, int(rows.frame_pos[place])), int(rows.seq[place])
        path = blobs.blob_path(directory, ref.blob_id)
        if (fault := find_blob_fault(disk, path, ref)) is not None:
            yield Finding("blob", path, fault[0], fault[1], True, topic, range(seq, seq + 1))


def _check_wal_blobs(topic: TopicState) -> Iterator[Finding]:
    """Check the blobs of live records that no segment has yet."""
    index = topic.index
    for part, first, stop in index.slices(index.earliest, index.head + 1) if len(topic.blobs) else ():
        if isinstance(part, MemTable) and (part.entries()["flags"] & segment_index.LARGE).any():
            rows, deleted = part.reader(first, stop, 1 << 62)().rows, part.deleted_mask()
            if deleted is not None:
                rows = rows.take(np.flatnonzero(~deleted[rows.seq - part.base]))
            yield from _check_blobs(topic.context.disk, topic.directory, topic.name, rows)


def _was_record_removed(disk: Disk, root: str, finding: Finding) -> bool:
    """Whether a writer has removed the record of a damaged blob since the check began."""
    loaded, _ = _load_manifests(disk, root)
    match = blobs.BLOB_FILE_PATTERN.fullmatch(finding.file.rpartition("/")[2])
    assert match is not None, "the file of a blob"
    named = (blobs.ids_of_row(row.blobs) for row in loaded.manifest.topics if row.name == finding.topic)
    return not any(int(match[1], 16) in ids for ids in named)


def _relative(root: str, path: str) -> str:
    return path.removeprefix(f"{root.rstrip('/')}/")


def _load_manifests(disk: Disk, root: str) -> tuple[LoadedManifest, list[Finding]]:
    """Load the newest manifest that reads, with findings about all files of manifests."""
    loaded = manifest.inspect(disk, root)
    findings = [Finding("snapshot", name, *_describe_error(fault)) for name, fault in loaded.faults]
    if loaded.number:
        files = (_relative(root, manifest.manifest_path(root, loaded.number, kind)) for kind in manifest.FILE_KINDS)
        path = next((path for path in files if disk.stat(join(root, path)) is not None), manifest.MANIFEST_DIR)
        findings += [Finding("snapshot", path, None, reason) for reason in _find_contradictions(loaded.manifest)]
    return loaded, findings


def _repeat_until_stable(root: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Repeat a check until it finds no damage, or the same twice: damage that disappears was a writer at work."""
    before: list[Finding] | None = None
    for _ in range(8):
        try:
            findings = check()
        except (Unavailable, FileNotFoundError):  # a file was removed meanwhile
            continue
        if findings == before or not any(finding.damage for finding in findings):
            return findings
        before = findings
    raise Unavailable(f"{root} changes faster than it can be read; nothing was changed, try again")


class ShardCheck:
    """Every file of one WAL shard."""

    def __init__(self, disk: Disk, root: str, key: str) -> None:
        self._disk, self._root, self._key = disk, root, key
        self._directory = paths.shard_directory(join(root, WAL_DIR), key)
        self._frames = self._bytes = 0
        self._dropped_topics: set[int] = set()

    def run(self) -> CheckResult:
        findings = _repeat_until_stable(self._root, lambda: list(self._check_once()))
        dropped = frozenset(self._dropped_topics)
        return CheckResult(tuple((finding, None) for finding in findings), 0, self._frames, self._bytes, dropped)

    def _check_once(self) -> Iterator[Finding]:
        loaded, _ = _load_manifests(self._disk, self._root)
        numbers = paths.list_file_numbers(self._disk, self._directory)
        self._frames = self._bytes = 0
        start = replay_start(loaded, self._key) or Position(2 if numbers[:1] == [2] else 1, 0)  # as in recovery
        if start.file_number not in numbers and numbers and numbers[-1] > start.file_number:
            reason = "it is missing: what was written there after the snapshot is lost"
            yield Finding("wal", self._file(start.file_number), None, reason)
        try:
            # From the oldest byte: frames that a snapshot covers are needed again if that snapshot does not read.
            oldest = Position(numbers[0], 0) if numbers else start
            replay = self._scan(replay_shard(self._disk, self._directory, oldest, durable=max(oldest, start)))
            yield from self._describe_losses(replay, start, is_restored=_is_restored(loaded.manifest))
        except Damaged as error:
            yield Finding("wal", _relative(self._root, self._directory), None, str(error))
            return
        if fault := replay.current_file_fault():
            current = _relative(self._root, join(self._directory, paths.CURRENT))
            yield Finding("wal", current, 0, f"{fault}; nothing depends on it, the next start rewrites it", False)

    def _scan(self, replay: Replay) -> Replay:
        for window in replay:
            self._frames += len(window.frame_pos)
            self._dropped_topics |= set(
                window.headers["topic_id"][window.headers["kind"] == frame.TOPIC_DELETE].tolist()
            )
        self._bytes += sum(extent.hi - extent.lo for extent in replay.extents)
        return replay

    def _describe_losses(self, replay: Replay, start: Position, *, is_restored: bool) -> Iterator[Finding]:
        for gap in (gap for gap in replay.missing_frames if gap.stop > start.file_number):
            reason = f"frames {gap.start} to {gap.stop - 1}, which come before it, are in no file"
            yield Finding("wal", self._file(gap.stop), 0, reason)
        for lost in (lost for lost in replay.losses if lost.file):
            if is_restored and Position(lost.file_number, lost.end) <= start and self._is_hole(lost):
                continue
            reason = f"{lost.end - lost.pos} bytes that were synced do not read ({lost.reason})"
            if Position(lost.file_number, lost.end) <= start:
                reason += "; no record is lost: a snapshot covers it"
            else:
                reason += "; acknowledged records may be lost with them, what follows them is replayed"
            yield Finding("wal", self._file(lost.file_number), lost.pos, reason)
        if (missing := replay.missing_file) is not None:
            reason = f"it is missing: what was written there after the snapshot is lost ({missing.reason})"
            yield Finding("wal", self._file(missing.file_number), None, reason)
        if (torn := replay.torn_tail) is not None:
            reason = f"an unfinished write of {torn.size} bytes ({torn.reason}); the next start cuts it"
            if torn.frames:
                reason += f" and keeps it: {torn.frames} frames that read follow, of which no sync is known"
            yield Finding("wal", self._file(torn.file_number), torn.pos, reason, False)

    def _is_hole(self, lost: LostRange) -> bool:
        """Whether a restore left these bytes out: a backup has the WAL from its snapshot on, in place, and the file
        begins with zeros."""
        if lost.pos:
            return False
        with closing(self._disk.open(paths.file_path(self._directory, lost.file_number))) as file:
            steps = range(0, lost.end, _CHUNK_BYTES)
            return not any(file.read(pos, min(_CHUNK_BYTES, lost.end - pos)).strip(b"\0") for pos in steps)

    def _file(self, number: int) -> str:
        return _relative(self._root, paths.file_path(self._directory, number))


def _describe_error(error: Corrupt | NewerFormat | OSError) -> tuple[int | None, str]:
    """Return where a small file is bad, and the reason."""
    if isinstance(error, Corrupt):
        return error.pos, error.reason
    if isinstance(error, NewerFormat):
        return 4, f"version {error.found} is later than {error.known}, the last one known: a newer tidelog's, or damage"
    return None, f"it cannot be read: {error}"


def _is_restored(made: Manifest) -> bool:
    return any(row.epoch >> manifest.EPOCH_ID_BITS for row in made.topics)


def _find_contradictions(made: Manifest) -> Iterator[str]:
    """Yield contradictions inside a snapshot."""
    for row in made.topics:
        floor, stop = max(row.cap_mark, row.ttl_mark, row.source_mark) + 1, 1
        # Not its id: a topic that was created during the checkpoint, or that only the WAL of a backup knew, has a row
        # and an id above `next_topic_id`.
        if not (floor <= row.earliest <= row.head + 1 and row.head <= row.reserved):
            yield f"{row.name}: floor {floor}, earliest {row.earliest}, head {row.head}, reserved {row.reserved}"
        for segment in row.segments:
            follows = stop <= segment.base < segment.stop <= row.head + 1
            if not follows or not (segment.sealed or segment is row.segments[-1]):
                yield f"{row.name}: a segment of [{segment.base}, {segment.stop}) cannot be where it is"
            stop = segment.stop


class CheckpointSummary(NamedTuple):
    """The state of checkpoints in a directory, from its newest snapshot alone."""

    snapshot: int  # its number; 0: none
    saved_ms: int | None  # when it was written
    wal_bytes: int
    lagging: tuple[str, ...]  # topics that it could not write
    without_footer: tuple[str, ...]  # segments that were sealed without a footer, as topic and first seq
    skipped: tuple[str, ...]  # snapshots that do not read, and why


def checkpoint_summary(path: str, disk: Disk | None = None) -> CheckpointSummary | None:
    """Summarize the newest snapshot and the WAL of a data directory; None if it is none. Reads no record."""
    disk = disk or PosixDisk()
    wal = join(path, WAL_DIR)
    if disk.stat(wal) is None:
        return None
    loaded = manifest.load_newest(disk, path)
    stats = [disk.stat(manifest.manifest_path(path, loaded.number, kind)) for kind in manifest.FILE_KINDS]
    saved_ms = max((stat.modified_ms for stat in stats if stat is not None and loaded.number), default=None)
    size = 0
    for key in paths.list_shard_keys(disk, wal):
        directory = paths.shard_directory(wal, key)
        files = (disk.stat(paths.file_path(directory, number)) for number in paths.list_file_numbers(disk, directory))
        size += sum(stat.size for stat in files if stat is not None)
    rows = loaded.manifest.topics
    return CheckpointSummary(
        loaded.number,
        saved_ms,
        size,
        tuple(row.name for row in rows if row.id in loaded.manifest.lagging),
        tuple(f"{row.name} {segment.base}" for row in rows for segment in row.segments if segment.unproven),
        tuple(loaded.skipped),
    )


class SegmentCheck:
    """One segment's files against each other and against its row of the snapshot."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        topic: TopicRow,
        row: SegmentRow,
        cold_store: SegmentStore | str = "its data is in a cold store",
        *,
        full: bool = False,
    ) -> None:
        """`cold_store`: or why objects cannot be looked at."""
        self._cold_store, self._is_full = cold_store, full
        self._disk, self._stem, self._topic, self._row = (
            disk,
            join(directory, format_file_name(row.base, row.generation, "")),
            topic,
            row,
        )
        self._directory = directory
        self._entries = (row.stop - row.base) * segment_index.ENTRY_BYTES
        self._found: list[Finding] = []

    def findings(self) -> list[Finding]:
        row = self._row
        try:
            data, index = (map_file(self._disk, self._stem + suffix) for suffix in (".data", ".idx"))
            deleted, foot = self._read_deletions(), self._read_footer()
        except OSError as error:
            self._add_finding("data", *_describe_error(error))
            return self._found
        if row.cold is not None and row.cold.key:
            self._check_object(row.cold, foot)
            if data is None or len(data) < row.size:
                self._check_cold_files(index, foot)
                return self._found
        if data is None:
            self._add_finding("data", None, "the file is missing", range(row.base, row.stop))
            return self._found
        self._check_length("data", len(data), row.size)
        self._check_length("index", len(index or b""), self._entries)
        scanned = scan.scan_records(data[: row.size], above=row.base - 1)
        faults = [] if self._is_complete(scanned) else list(self._find_faults(data[: row.size], index, foot, scanned))
        for fault in faults:
            self._add_finding("data", fault.pos, fault.reason, range(fault.seq, fault.resume))
        if foot is not None:
            self._check_footer(foot, data, index, faults)
        if not faults:
            self._check_index_and_counts(scanned.rows, index, deleted)
            self._check_tag_index(scanned.rows, has_footer=foot is not None)
            self._check_blobs(scanned.rows, deleted)
            self._check_key_index(scanned.rows, has_footer=foot is not None)
        return self._found

    def _check_object(self, row: ColdRow, foot: Footer | None) -> None:
        """Check the object of a segment in the cold store: its length, or all of it."""
        store, seqs = self._cold_store, range(self._row.base, self._row.stop)
        if isinstance(store, str):
            self._add_finding("cold", None, f"{store}: not verified", damage=False)
            return
        where = f"{store.address}/{row.key}"
        try:
            if self._is_full:
                verify_object(store, row, self._row.size, foot, where)
                return
            length = store.length(row.key)
        except StoreUnavailable as error:
            self._add_finding("cold", None, f"its object was not verified: {error}", damage=False)
        except (Corrupt, NewerFormat) as error:
            pos, reason = _describe_error(error)
            self._add_finding("cold", pos, f"{where}: {reason}", seqs)
        else:
            if length != row.length:
                actual = "is missing" if length is None else f"has {length} bytes"
                self._add_finding("cold", None, f"the object {where} {actual}, {row.length} were stored", seqs)

    def _check_cold_files(self, index: Buffer | None, foot: Footer | None) -> None:
        """Check the files that stay on the disk, as far as that needs no data."""
        self._check_length("index", len(index or b""), self._entries)
        if foot is not None and index is not None and (fault := sealed_segment.find_index_fault(foot, index)):
            self._add_finding("index", None, fault)
        sizes = read_file(self._disk, f"{self._stem}.siz")
        try:
            if sizes is not None:
                sealed_segment.decode_record_sizes(sizes, self._row.base, self._row.stop - self._row.base)
        except (Corrupt, NewerFormat) as error:
            self._add_finding("counts", *_describe_error(error))

    def _add_finding(
        self, kind: FindingKind, pos: int | None, reason: str, seqs: range = range(0), *, damage: bool = True
    ) -> None:
        self._found.append(
            Finding(kind, self._stem + _FILE_SUFFIXES[kind], pos, reason, damage, self._topic.name, seqs)
        )

    def _check_length(self, kind: FindingKind, actual: int, expected: int) -> None:
        if actual > expected and not self._row.sealed:
            reason = f"{actual - expected} bytes beyond the length in the snapshot, {_UNFINISHED_CHECKPOINT}"
            self._add_finding(kind, expected, reason, damage=False)
        elif actual != expected:
            note = f"; {_NOTHING_LOST}" if kind == "index" else ""
            self._add_finding(kind, min(actual, expected), f"it has {actual} bytes, the snapshot says {expected}{note}")

    def _read_footer(self) -> Footer | None:
        content = read_file(self._disk, f"{self._stem}.foot")
        try:
            if content is not None and self._row.sealed:
                return sealed_segment.decode_footer(content)
        except (Corrupt, NewerFormat) as error:
            self._add_finding("footer", *_describe_error(error))
            return None
        if self._row.unproven:
            return None
        if self._row.sealed:
            self._add_finding("footer", None, "the file is missing; no record is lost: frames have their own checksums")
        elif content is not None:
            self._add_finding("footer", None, f"its segment still grows: {_UNFINISHED_CHECKPOINT}", damage=False)
        return None

    def _check_tag_index(self, rows: Rows, *, has_footer: bool) -> None:
        """Check the tag index against the data. The first search rebuilds one that is missing or whose footer does not
        read."""
        content, foot = (read_file(self._disk, self._stem + suffix) for suffix in (TAG_INDEX_SUFFIX, ".foot"))
        if content is None or (self._row.sealed and not has_footer):
            return
        if foot is None or not self._row.sealed:
            self._add_finding("tags", None, f"its segment still grows: {_UNFINISHED_CHECKPOINT}", damage=False)
        elif content != encode_tag_index(self._row.base, foot, rows):
            pos, reason = None, "it contradicts the data"
            try:
                tag_index.decode(content)
            except (Corrupt, NewerFormat) as error:
                pos, reason = _describe_error(error)
            self._add_finding("tags", pos, f"{reason}; {_NOTHING_LOST}")

    def _check_blobs(self, rows: Rows, deleted: NDArray[np.bool_] | None) -> None:
        """Check the blobs of its live records."""
        if rows.blob_bytes is None:
            return
        live = rows.seq >= self._topic.earliest
        if deleted is not None:
            live &= ~deleted[rows.seq - self._row.base]
        live_rows = rows.take(np.flatnonzero(live))
        self._found += _check_blobs(self._disk, self._directory, self._topic.name, live_rows)

    def _check_key_index(self, rows: Rows, *, has_footer: bool) -> None:
        """Check the key index against the data. One that is missing, or of an earlier rule for keys, is built again
        where it is needed."""
        content, foot = (read_file(self._disk, self._stem + suffix) for suffix in (KEY_INDEX_SUFFIX, ".foot"))
        if content is None or (self._row.sealed and not has_footer):
            return
        if foot is None or not self._row.sealed:
            self._add_finding("keys", None, f"its segment still grows: {_UNFINISHED_CHECKPOINT}", damage=False)
            return
        rule, selector = TopicConfig.from_json(self._topic.config).compaction, key_index.stored_selector(content)
        if selector is not None and (rule is None or selector_of(rule).id != selector):
            return
        if rule is None or content != encode_key_index(rule, self._row.base, self._row.stop, foot, rows):
            reason = "checksum mismatch" if selector is None else "it contradicts the data"
            self._add_finding("keys", None, f"{reason}; {_NOTHING_LOST}")

    def _read_deletions(self) -> NDArray[np.bool_] | None:
        """Return the deleted positions; None if they are unknown."""
        base, deleted = self._row.base, np.zeros(self._row.stop - self._row.base, np.bool_)
        try:
            content = read_file(self._disk, f"{self._stem}.del")
            vector = (
                sealed_segment.DeletionVector(base, 0)
                if content is None
                else sealed_segment.decode_deletion_vector(content)
            )
        except (Corrupt, NewerFormat) as error:
            pos, reason = _describe_error(error)
            self._add_finding("deletions", pos, f"{reason}; which of its records are deleted is not known")
            return None
        if vector.base != base or (self._row.sealed and vector.size > len(deleted)):
            self._add_finding("deletions", 20, f"it is about seqs [{vector.base}, {vector.base + vector.size})")
            return None
        positions = vector.seqs() - base
        deleted[positions[positions < len(deleted)]] = True  # that of an unfinished checkpoint may be longer
        return deleted

    def _is_complete(self, scanned: ScanResult) -> bool:
        """Whether every frame verifies and every seq is there, of this topic."""
        rows, row = scanned.rows, self._row
        if scanned.end != row.size or len(rows) != row.stop - row.base or int(rows.seq[-1]) != row.stop - 1:
            return False
        return bool((frame.read_headers(rows.buf, rows.frame_pos[:1])["topic_id"] == self._topic.id).all())

    def _find_faults(
        self, data: memoryview, index: Buffer | None, foot: Footer | None, scanned: ScanResult
    ) -> Iterator[Fault]:
        """Yield every frame that does not verify, by a trusted index; without one, the first."""
        row, has_fault, index = self._row, False, memoryview(index or b"")[: self._entries]
        is_trusted = (
            len(index) == self._entries
            and segment_index.find_index_fault(segment_index.read_entries(index), row.size) is None
        )
        if is_trusted and (foot is None or sealed_segment.find_index_fault(foot, index) is None):
            shape, seq = SegmentContent(row.base, row.stop, MmapReader(data), index, [index]), row.base
            while seq < row.stop:
                _, seq, fault = CODEC.read(shape, seq, row.stop, _CHUNK_BYTES)
                if fault is not None:
                    has_fault, seq = True, max(fault.resume, seq + 1)
                    yield fault
        if not has_fault:
            reason = scanned.reason or f"these are not the records of seqs {row.base} to {row.stop - 1}"
            yield Fault(row.base + len(scanned.rows), row.stop, scanned.end, reason)

    def _check_footer(self, foot: Footer, data: Buffer, index: Buffer | None, faults: Sequence[Fault]) -> None:
        """Check a readable footer against the data, the index and the snapshot."""
        row = self._row
        if (foot.first_seq, foot.stop_seq, foot.data_bytes) != (row.base, row.stop, row.size):
            reason = f"it covers seqs [{foot.first_seq}, {foot.stop_seq}) in {foot.data_bytes} bytes of data"
            self._add_finding("footer", 20, f"{reason}, the snapshot for others")
            return
        for lo, hi in sealed_segment.find_bad_ranges(foot, data, end=foot.data_bytes):
            if not any(lo <= fault.pos < hi for fault in faults):
                self._add_finding("data", lo, f"bytes {lo} to {hi - 1} are not those that were sealed")
        if (
            faults
            and index
            and len(index) == self._entries
            and (index_fault := sealed_segment.find_index_fault(foot, index))
        ):
            self._add_finding("index", None, index_fault)

    def _check_index_and_counts(self, rows: Rows, index: Buffer | None, deleted: NDArray[np.bool_] | None) -> None:
        """Check index and counts against the data."""
        row = self._row
        entries = segment_index.build_entries(rows, row.base, row.stop, row.size)
        expected, actual = (np.frombuffer(buf, np.uint8) for buf in (entries.tobytes(), index or b""))
        common = min(len(expected), len(actual))
        if len(mismatches := np.flatnonzero(actual[:common] != expected[:common])):
            pos = int(mismatches[0])
            reason = f"the entry of seq {row.base + pos // segment_index.ENTRY_BYTES} contradicts the data"
            self._add_finding("index", pos, f"{reason}; {_NOTHING_LOST}")
        times = int(entries["ts"][0]), int(entries["ts"][-1])
        if times != (row.first_ts, row.last_ts):
            self._add_finding("counts", None, f"times are {times}, the snapshot says {(row.first_ts, row.last_ts)}")
        if deleted is None:
            return
        sizes = rows.total_bytes()
        live, live_bytes = int((~deleted).sum()), int(sizes[~deleted].sum())
        reason = f"{live} records of {live_bytes} bytes are live, the snapshot counts {row.live} of {row.live_bytes}"
        if live < row.live:
            self._add_finding(
                "deletions", None, f"{reason}, from before {_UNFINISHED_CHECKPOINT.removeprefix('of ')}", damage=False
            )
        elif live > row.live:
            self._add_finding("deletions", None, f"{reason}: what was deleted would come back")
        elif live_bytes != row.live_bytes:
            self._add_finding("counts", None, reason)
