"""A consistent snapshot of a running engine, as files and lengths, for a backup.

    1  a checkpoint, so that little is left to the WAL
    2  with the checkpoint lock: load the newest manifest M, pin the files, and take the positions P of all WAL shards
       with all commit locks held at once
    3  without a lock: copy the WAL between M's replay positions and P, then the files that M names

A directory with these files is what `kill -9` would leave at the instant of P, so recovery opens it. Commits wait for
step 2 as long as one running commit of each shard takes; nothing waits for step 3.

Which bytes may change while they are copied, and what is done about it:

    WAL file             written in place, preallocated    copied up to P
    .data .idx unsealed  appended to in place              copied up to the lengths in M
    .del                 replaced by a rename              the content at P is kept in memory when it is replaced
    .data .idx .foot .tag of a sealed segment              never change: linked, unless the manifest before M does not
                                                           know the seal, because a start from that one truncates them
    blobs of large records                                 never change: linked

`FilePins` is asked by everything that removes or replaces files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.disk.durability import read_file
from tidelog.disk.interface import Disk, join
from tidelog.engine import manifest
from tidelog.engine.blobs import BLOB_FILE_PATTERN, blobs_directory
from tidelog.engine.manifest import ColdRow, Manifest, SegmentRow, TopicRow
from tidelog.formats import segment_index
from tidelog.wal import Position, paths

if TYPE_CHECKING:
    from tidelog.engine.context import EngineContext


class SnapshotPin:
    """The files of one snapshot that must stay."""

    def __init__(self, deletion_paths: set[str]) -> None:
        self.holds_wal = True
        self.pending = deletion_paths  # deletion vectors that were not copied yet, whether they exist or not
        self.kept: dict[str, bytes | None] = {}  # their contents, where they were replaced meanwhile


class FilePins:
    """Files that backups read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pins: list[SnapshotPin] = []

    def add(self, pin: SnapshotPin) -> None:
        with self._lock:
            self._pins.append(pin)

    def release(self, pin: SnapshotPin) -> None:
        with self._lock:
            if pin in self._pins:
                self._pins.remove(pin)

    def release_wal(self, pin: SnapshotPin) -> None:
        with self._lock:
            pin.holds_wal = False

    @property
    def hold_segments(self) -> bool:
        """Whether no segment file may be removed."""
        return bool(self._pins)

    @property
    def hold_wal(self) -> bool:
        """Whether no WAL file may be removed."""
        with self._lock:
            return any(pin.holds_wal for pin in self._pins)

    def before_replace(self, disk: Disk, path: str) -> None:
        """Keep the content of a deletion vector that is about to be replaced, for snapshots that still need it."""
        with self._lock:
            for pin in self._pins:
                if path in pin.pending:
                    pin.pending.discard(path)
                    pin.kept[path] = read_file(disk, path)

    def take_deletions(self, pin: SnapshotPin, disk: Disk, path: str) -> bytes | None:
        """The content of a deletion vector at the snapshot; None: there was none. Once for each path."""
        with self._lock:
            pin.pending.discard(path)
            return pin.kept.pop(path) if path in pin.kept else read_file(disk, path)


class WalExtent(NamedTuple):
    """Bytes [lo, hi) of one WAL file."""

    key: str
    file_number: int
    lo: int
    hi: int
    is_last: bool  # P is in this file; after the extent of another one only zeros follow

    @property
    def directory(self) -> str:
        return f"wal/{self.key}" if self.key else "wal"


class SegmentFile(NamedTuple):
    """One file of a segment: its first `size` bytes; None: the whole file, if it exists."""

    topic_id: int
    base: int
    path: str  # from the data directory on
    suffix: str
    size: int | None
    is_final: bool  # it never changes again
    is_required: bool
    cold: ColdRow | None = None  # its object in the cold tier, for data that may not be on the disk


@dataclass(slots=True)
class EngineSnapshot:
    """Release it when all files are copied."""

    context: EngineContext
    manifest: Manifest
    now_ms: int
    positions: dict[str, Position]  # of each WAL shard in use
    wal: list[WalExtent]
    live: set[int]  # topics that were not dropped before
    pin: SnapshotPin
    sealed_before: set[tuple[int, int, int]] = field(default_factory=set)  # sealed in the manifest before, too
    cold: dict[tuple[int, int, int], ColdRow] = field(default_factory=dict)  # segments with objects in the cold tier

    def release_wal(self) -> None:
        """The WAL was copied."""
        self.context.pins.release_wal(self.pin)

    def release(self) -> None:
        self.context.pins.release(self.pin)

    def rows(self) -> list[TopicRow]:
        """The rows of the topics that existed."""
        return [row for row in self.manifest.topics if row.id in self.live]

    def deletions(self, row: TopicRow, segment: SegmentRow) -> tuple[str, bytes | None]:
        """The path of a segment's deletion vector and its content at the snapshot."""
        files = self.context.segment_files(row.id)
        path = files.path(segment.base, segment.generation, ".del")
        return self._relative(path), self.context.pins.take_deletions(self.pin, self.context.disk, path)

    def blob_paths(self, topic_id: int) -> list[str]:
        """The blobs of a topic. A blob has its name before the frame that names it is written, so all blobs of the
        snapshot are among those that exist now; a start removes the others."""
        directory = blobs_directory(self.context.segment_files(topic_id).directory)
        if self.context.disk.stat(directory) is None:
            return []
        names = [name for name in self.context.disk.list_dir(directory) if BLOB_FILE_PATTERN.fullmatch(name)]
        return [self._relative(join(directory, name)) for name in names]

    def segment_files(self, row: TopicRow, segment: SegmentRow) -> list[SegmentFile]:
        """The files of a segment except its deletion vector, the footer first."""
        files, is_final = self.context.segment_files(row.id), _segment_key(row, segment) in self.sealed_before
        sizes: dict[str, int | None] = {
            ".data": segment.size,
            ".idx": (segment.stop - segment.base) * segment_index.ENTRY_BYTES,
        }
        if segment.sealed:
            sizes = {".foot": None, **sizes, ".tag": None}
        return [
            SegmentFile(
                row.id,
                segment.base,
                self._relative(files.path(segment.base, segment.generation, suffix)),
                suffix,
                size,
                is_final and segment.sealed,
                suffix in (".data", ".idx") or (suffix == ".foot" and not segment.unproven),
                self.cold.get(_segment_key(row, segment)) if suffix == ".data" else None,
            )
            for suffix, size in sizes.items()
        ]

    def _relative(self, path: str) -> str:
        return path.removeprefix(self.context.root.rstrip("/") + "/")


def take_snapshot(context: EngineContext, list_ids: Callable[[], set[int]]) -> EngineSnapshot:
    """Take a snapshot. The caller holds the checkpoint lock, and releases the snapshot. `list_ids` returns the ids of
    all topics, also of idle ones."""
    disk, root = context.disk, context.root
    pin = SnapshotPin(set())
    context.pins.add(pin)  # first: files and objects of a topic that is dropped after it was listed stay
    try:
        loaded = manifest.load_newest(disk, root)
        # Before the positions: the frame of a topic that is dropped from here on may be after them.
        live = list_ids()
        rows = [row for row in loaded.manifest.topics if row.id in live]
        pin.pending |= {  # only checkpoints replace deletion vectors
            context.segment_files(row.id).path(segment.base, segment.generation, ".del")
            for row in rows
            for segment in row.segments
        }
        with ExitStack() as locks:
            for shard in context.shards:
                locks.enter_context(shard.hold_commits())
            positions = [shard.writer.position for shard in context.shards]
            now_ms = context.now_ms()
        by_key = dict(zip(paths.shard_keys(len(context.shards)), positions, strict=True))
        wal = _list_wal(context, loaded.manifest, by_key)
    except BaseException:
        context.pins.release(pin)
        raise
    before = [*loaded.rows_before(), *(row for row in rows if row.id not in loaded.replaced)]
    sealed = {_segment_key(row, segment) for row in before for segment in row.segments if segment.sealed}
    cold = {
        _segment_key(row, segment): segment.cold
        for row in rows
        for segment in row.segments
        if segment.cold is not None and segment.cold.key
    }
    saved = _without_objects(loaded.manifest) if cold else loaded.manifest
    return EngineSnapshot(context, saved, now_ms, by_key, wal, live, pin, sealed, cold)


def _without_objects(loaded: Manifest) -> Manifest:
    """Return the manifest without the cold tier: a backup has the data of every segment."""
    replace = msgspec.structs.replace
    return replace(
        loaded,
        topics=tuple(
            replace(row, segments=tuple(replace(segment, cold=None) for segment in row.segments))
            for row in loaded.topics
        ),
    )


def _segment_key(row: TopicRow, segment: SegmentRow) -> tuple[int, int, int]:
    return row.id, segment.base, segment.generation


def _list_wal(context: EngineContext, loaded: Manifest, positions: dict[str, Position]) -> list[WalExtent]:
    """The part of the WAL that replay from a manifest needs."""
    disk, wal = context.disk, join(context.root, "wal")
    starts = {row.key: Position(row.first, row.pos) for row in loaded.groups}
    extents: list[WalExtent] = []
    for key in paths.list_shard_keys(disk, wal):
        directory, start, end = paths.shard_directory(wal, key), starts.get(key), positions.get(key)
        for number in paths.list_file_numbers(disk, directory):
            if (start is not None and number < start.file_number) or (end is not None and number > end.file_number):
                continue
            stat = disk.stat(paths.file_path(directory, number))
            lo = start.pos if start is not None and number == start.file_number else 0
            is_last = end is not None and number == end.file_number
            hi = end.pos if end is not None and is_last else stat.size if stat is not None else 0
            extents.append(WalExtent(key, number, min(lo, hi), hi, is_last))
    return extents
