"""Backups in their target: layout, list, verify, prune.

    TARGET/
      tidelog-backup                  the label: which database
      backups/20261118T145959123Z-a1b2c3.manifest     a whole backup: every file with its length and checksum
      backups/20261118T150959123Z-d4e5f6.running      a backup that is being made, or was interrupted
      backups/prune.running                           a prune that runs, or was interrupted
      objects/topics/00000001/seg-0000000000000001.data.<checksum>   the bytes of one file, named by their content

`backup` writes its marker, then objects, then the manifest, then removes the marker. A backup without a manifest is not
whole and is never restored. An incremental backup stores only objects that the target does not have, and its manifest
lists all files nevertheless. So backups do not depend on each other, and `prune_backups` removes the objects that no
manifest lists, in this order: its marker, the manifests, the objects.

Creation and pruning exclude each other without a lock, which object stores do not have: each writes its own marker
before it looks for the other's. One that finds the other's marker gives up and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh3_128

from tidelog.addresses import path_text
from tidelog.disk.backup_store import BucketStore, DirectoryStore, open_backup_store
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.disk.segment_store import RangeFile
from tidelog.engine.context import topic_directory
from tidelog.engine.manifest import Manifest, decode_manifest
from tidelog.engine.results import Progress
from tidelog.engine.segment import format_file_name
from tidelog.errors import BackupIncomplete, BackupNotFound, BadInput, Busy, Corrupt, Damaged, NewerFormat
from tidelog.formats import backup_manifest, batch, control_frames, frame, segment_index
from tidelog.formats.backup_manifest import (
    LABEL_KEY,
    MANIFEST_BYTES_MAX,
    OBJECTS_PREFIX,
    BackupFile,
    BackupManifest,
    TopicPosition,
    object_key,
)
from tidelog.formats.frame import APPEND_BATCH, TOPIC_CREATE, TOPIC_DELETE
from tidelog.times import Time, time_ms
from tidelog.wal import FrameWindow, paths
from tidelog.wal.recovery import read_frames_of

BACKUPS_PREFIX: Final = "backups/"
MANIFEST_SUFFIX: Final = ".manifest"
RUNNING_SUFFIX: Final = ".running"
PRUNE_KEY: Final = f"{BACKUPS_PREFIX}prune{RUNNING_SUFFIX}"
_LABEL_BYTES_MAX: Final = 4096
PIECE_BYTES: Final = 1 << 20
VERIFYING: Final = "verifying objects"
PRUNING: Final = "removing objects"

Store: TypeAlias = BucketStore | DirectoryStore


class BackupInfo(NamedTuple):
    """One backup of a target."""

    id: str
    created_ms: int  # it has everything that was written before this time, and nothing written after it
    database_id: str
    parent: str | None  # the backup whose objects were used again
    topics: dict[str, int]  # the last seq of each topic
    channels: int
    files: int
    bytes: int  # of all files
    stored_bytes: int  # of the objects that this backup added to its target
    damaged: tuple[str, ...]
    external: tuple[str, ...]


class BackupListing(NamedTuple):
    """The backups of a target, oldest first, and what is not a whole backup."""

    backups: list[BackupInfo]
    unfinished: list[str]  # ids of backups that are being made or were interrupted
    unreadable: dict[str, str]  # id → why its manifest does not read


class VerifyResult(NamedTuple):
    id: str
    files: int
    bytes: int
    problems: list[str]  # each names an object


class PruneResult(NamedTuple):
    kept: list[str]
    removed: list[str]
    objects: int  # removed
    bytes: int


def describe_backup(manifest: BackupManifest) -> BackupInfo:
    """What users see of a backup."""
    return BackupInfo(
        manifest.id,
        manifest.created_ms,
        manifest.database_id,
        manifest.parent or None,
        {topic.name: topic.head for topic in manifest.topics},
        manifest.channels,
        len(manifest.files),
        sum(file.size for file in manifest.files),
        manifest.stored_bytes,
        manifest.damaged,
        manifest.external,
    )


def no_progress(what: str, done: int, total: int) -> None:
    pass


class BackupTarget:
    """The store of backups at an address."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def open(cls, address: str | PathLike[str], disk: Disk) -> BackupTarget:
        return cls(open_backup_store(path_text(address, "the target of a backup"), disk))

    def database_id(self) -> str | None:
        """The database whose backups these are; None: the target is empty. BadInput if it holds something else."""
        content = self._read(LABEL_KEY, _LABEL_BYTES_MAX)
        if content is not None:
            return backup_manifest.decode_label(content, f"{self.store.address}/{LABEL_KEY}")
        try:
            others = self.store.list("")
        except OSError as error:
            raise self.store.wrap_error(error, "listing it") from error
        if others:
            raise BadInput(
                f"{self.store.address} holds {min(others)!r} and no backups of tidelog; nothing was changed, choose an "
                "empty directory or prefix"
            )
        return None

    def _read(self, key: str, size_max: int) -> bytes | None:
        """A whole small object; None if it does not exist."""
        try:
            length = self.store.length(key)
            if length is None:
                return None
            if length > size_max:
                raise Corrupt(f"{self.store.address}/{key}", pos=0, reason=f"{length} bytes are too many")
            return self.store.read(key, 0, length)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.store.wrap_error(error, f"reading {key}") from error

    def list_keys(self) -> list[str]:
        try:
            return sorted(self.store.list(BACKUPS_PREFIX))
        except OSError as error:
            raise self.store.wrap_error(error, "listing backups") from error

    def ids(self) -> list[str]:
        """The ids of whole backups, oldest first."""
        return ids_of(self.list_keys(), MANIFEST_SUFFIX)

    def load(self, backup_id: str) -> BackupManifest:
        """Load the manifest of a backup."""
        key = manifest_key(backup_id)
        content = self._read(key, MANIFEST_BYTES_MAX) if backup_manifest.is_backup_id(backup_id) else None
        if content is None:
            if backup_manifest.is_backup_id(backup_id) and running_key(backup_id) in self.list_keys():
                raise BackupIncomplete(self.store.address, backup_id)
            raise BackupNotFound(self.store.address, backup_id)
        return backup_manifest.decode_backup(content, f"{self.store.address}/{key}")

    def newest(self) -> BackupManifest | None:
        """The newest backup whose manifest reads; None: there is none."""
        for backup_id in reversed(self.ids()):
            try:
                return self.load(backup_id)
            except NewerFormat:
                raise
            except Corrupt:
                continue
        return None

    def require(self, backup_id: str | None) -> BackupManifest:
        """The manifest of this backup, or of the newest one."""
        if self.database_id() is None:
            raise BackupNotFound(self.store.address, backup_id)
        if backup_id is not None:
            return self.load(backup_id)
        ids = self.ids()
        if not ids:
            unfinished = ids_of(self.list_keys(), RUNNING_SUFFIX)
            if unfinished:
                raise BackupIncomplete(self.store.address, unfinished[-1])
            raise BackupNotFound(self.store.address, None)
        return self.load(ids[-1])


def manifest_key(backup_id: str) -> str:
    return f"{BACKUPS_PREFIX}{backup_id}{MANIFEST_SUFFIX}"


def running_key(backup_id: str) -> str:
    return f"{BACKUPS_PREFIX}{backup_id}{RUNNING_SUFFIX}"


def ids_of(keys: Sequence[str], suffix: str) -> list[str]:
    names = [key.removeprefix(BACKUPS_PREFIX).removesuffix(suffix) for key in keys if key.endswith(suffix)]
    return sorted(name for name in names if backup_manifest.is_backup_id(name))


# ── topics ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Head:
    name: str
    epoch: int
    seq: int
    ts_ms: int


class TopicHeads:
    """The last record of each topic, by the manifest and the frames after it."""

    def __init__(self, loaded: Manifest, live: set[int] | None = None) -> None:
        """`live`: the topics that were not dropped before the frames that follow; None: not known."""
        self._first_new_id = loaded.next_topic_id
        self._dropped: set[int] = set()
        self._heads = {
            row.id: _Head(row.name, row.epoch or row.id, row.head, row.last_ts)
            for row in loaded.topics
            if live is None or row.id in live
        }

    def add(self, window: FrameWindow) -> None:
        headers, kinds = window.headers, window.headers["kind"]
        for number in np.flatnonzero((kinds == TOPIC_CREATE) | (kinds == TOPIC_DELETE)).tolist():
            self._apply_control_frame(window, number)
        records = np.flatnonzero(frame.are_records(headers))[::-1]
        ids, places = np.unique(headers["topic_id"][records], return_index=True)
        for topic_id, number in zip(ids.tolist(), records[places].tolist(), strict=True):
            head = self._heads.get(topic_id)
            if head is not None:
                parsed = _read_frame(window, number)
                count = batch.record_count(window.buf, parsed) if parsed.kind == APPEND_BATCH else 1
                if parsed.seq + count - 1 > head.seq:
                    head.seq, head.ts_ms = parsed.seq + count - 1, parsed.ts_ms

    def _apply_control_frame(self, window: FrameWindow, number: int) -> None:
        parsed = _read_frame(window, number)
        body = control_frames.decode(parsed.kind, memoryview(window.buf)[parsed.data_pos : parsed.data_end])
        if isinstance(body, control_frames.TopicDelete):
            self._dropped.add(parsed.topic_id)  # its creation may be in a shard that is read later
            self._heads.pop(parsed.topic_id, None)
        elif isinstance(body, control_frames.TopicCreate) and parsed.topic_id >= self._first_new_id:
            self._heads[parsed.topic_id] = _Head(body.name, parsed.topic_id, 0, 0)

    def positions(self) -> tuple[TopicPosition, ...]:
        return tuple(
            TopicPosition(head.name, topic_id, head.epoch, head.seq, head.ts_ms)
            for topic_id, head in sorted(self._heads.items())
            if topic_id not in self._dropped
        )


def _read_frame(window: FrameWindow, number: int) -> frame.Frame:
    parsed = frame.read_frame(window.buf, int(window.frame_pos[number]), len(window.buf), check=False)
    assert isinstance(parsed, frame.Frame), "a walk yields valid frames only"
    return parsed


# ── list, verify, prune ───────────────────────────────────────────────────────────────────────────


def list_backups(address: str | PathLike[str], *, disk: Disk | None = None) -> BackupListing:
    """Return the backups of a target, oldest first. A target without any is empty."""
    target = BackupTarget.open(address, disk or PosixDisk())
    if target.database_id() is None:
        return BackupListing([], [], {})
    keys = target.list_keys()
    found: list[BackupInfo] = []
    unreadable: dict[str, str] = {}
    whole = ids_of(keys, MANIFEST_SUFFIX)
    for backup_id in whole:
        try:
            found.append(describe_backup(target.load(backup_id)))
        except BackupNotFound:
            continue  # pruned meanwhile
        except (Damaged, NewerFormat) as error:
            unreadable[backup_id] = str(error)
    unfinished = [backup_id for backup_id in ids_of(keys, RUNNING_SUFFIX) if backup_id not in whole]
    return BackupListing(found, unfinished, unreadable)


def verify_backup(
    address: str | PathLike[str],
    backup_id: str | None = None,
    *,
    disk: Disk | None = None,
    progress: Progress = no_progress,
) -> VerifyResult:
    """Read every object of a backup, of the newest by default, and compare lengths and checksums; check that the files
    are all that the metadata in the manifest needs, and its list of topics that of the metadata and the WAL. Problems
    are returned, not raised."""
    target = BackupTarget.open(address, disk or PosixDisk())
    manifest = target.require(backup_id)
    problems = check_files(manifest)
    total, done = sum(file.size for file in manifest.files), 0
    for file in manifest.files:
        digest, pos = xxh3_128(), 0
        try:
            length = target.store.length(object_key(file))
            while pos < file.size and length == file.size:
                piece = target.store.read(object_key(file), pos, min(pos + PIECE_BYTES, file.size))
                if not piece:
                    break
                digest.update(piece)
                pos += len(piece)
                done += len(piece)
                progress(VERIFYING, done, total)
        except FileNotFoundError:
            length = None
        except OSError as error:
            raise target.store.wrap_error(error, f"reading {object_key(file)}") from error
        if (problem := object_problem(file, length, digest.hexdigest())) is not None:
            problems.append(f"{object_key(file)}: {problem}")
    if not problems:  # a listed topic that is missing has no files: they were not looked for
        problems = check_topics(manifest, _wal_windows(target, manifest))
    return VerifyResult(manifest.id, len(manifest.files), total, problems)


def object_problem(file: BackupFile, length: int | None, checksum: str) -> str | None:
    """What is wrong with the object of a file, by what was read of it."""
    if length is None:
        return "it is missing"
    if length != file.size:
        return f"it has {length} bytes, the manifest says {file.size}"
    return None if checksum == file.checksum else "its checksum is not the one in the manifest"


def load_engine_manifest(manifest: BackupManifest, what: str) -> Manifest:
    """The metadata snapshot of the engine in a backup."""
    return decode_manifest(manifest.engine_manifest, what)


def check_files(manifest: BackupManifest) -> list[str]:
    """Compare the files of a backup with what its metadata needs; return what is missing."""
    files = {file.path: file for file in manifest.files}
    loaded = load_engine_manifest(manifest, f"backup {manifest.id}")
    live = {topic.id for topic in manifest.topics}
    if manifest.damaged:
        return []
    problems: list[str] = []
    for row in loaded.topics:
        if row.id not in live:
            continue
        for segment in row.segments:
            directory = topic_directory("", row.id).lstrip("/")
            name = f"{directory}/{format_file_name(segment.base, segment.generation, '')}"
            index_bytes = (segment.stop - segment.base) * segment_index.ENTRY_BYTES
            for suffix, size in ((".data", segment.size), (".idx", index_bytes)):
                file = files.get(name + suffix)
                if file is None or file.size < size:
                    problems.append(f"{name}{suffix}: the backup lists {file.size if file else 'no'} bytes of {size}")
    for shard in manifest.shards:
        start = next((row for row in loaded.groups if row.key == shard.key), None)
        if start is None or (start.first, start.pos) == (shard.file_number, shard.pos):
            continue
        path = f"wal/{shard.key}/" if shard.key else "wal/"
        file = files.get(path + paths.file_name(shard.file_number))
        if shard.pos and (file is None or file.offset + file.size != shard.pos):
            problems.append(f"{path}{paths.file_name(shard.file_number)}: it does not reach byte {shard.pos}")
    return problems


def check_topics(manifest: BackupManifest, wal: Iterable[FrameWindow]) -> list[str]:
    """Compare the list of topics in a backup with its metadata and the frames of its WAL; return the differences."""
    if manifest.damaged:
        return []
    heads = TopicHeads(load_engine_manifest(manifest, f"backup {manifest.id}"))
    for window in wal:
        heads.add(window)
    listed = {topic.id: topic for topic in manifest.topics}
    found = {topic.id: topic for topic in heads.positions()}
    return [
        f"topic {(found.get(topic_id) or listed[topic_id]).name}: the backup lists {_describe(listed.get(topic_id))}, "
        f"its metadata and WAL have {_describe(found.get(topic_id))}"
        for topic_id in sorted({*listed, *found})
        if listed.get(topic_id) != found.get(topic_id)
    ]


def _describe(topic: TopicPosition | None) -> str:
    return "no topic" if topic is None else f"{topic.name}, epoch {topic.epoch}, up to seq {topic.head}"


def _wal_windows(target: BackupTarget, manifest: BackupManifest) -> Iterator[FrameWindow]:
    """The frames of the WAL in a backup."""
    for file in manifest.files:
        number = paths.parse_file_name(file.path.rpartition("/")[2]) if file.path.startswith("wal/") else None
        if number is None:
            continue
        end = file.offset + file.size
        yield from read_frames_of(file.path, partial(_open_wal_file, target, file), number, file.offset, end)


def _open_wal_file(target: BackupTarget, file: BackupFile) -> RangeFile:
    key, offset = object_key(file), file.offset
    path = f"{target.store.address}/{key}"
    return RangeFile(path, offset + file.size, lambda lo, hi: target.store.read(key, lo - offset, hi - offset))


def prune_backups(
    address: str | PathLike[str],
    *,
    keep: int | None = None,
    older_than_ms: Time | None = None,
    disk: Disk | None = None,
    progress: Progress = no_progress,
) -> PruneResult:
    """Remove old backups, and every object that no other backup lists.

    Args:
        keep: the number of newest backups that stay.
        older_than_ms: remove backups from before this time, in milliseconds since 1970. With `keep`, both must agree.

    The newest backup always stays. Objects of interrupted backups are removed, too.
    """
    if keep is None and older_than_ms is None:
        raise BadInput("a prune takes `keep` or `older_than_ms`; nothing was removed")
    before_ms = None if older_than_ms is None else time_ms("older_than_ms", older_than_ms)
    if keep is not None and keep < 1:
        raise BadInput(f"at least one backup is kept, not {keep}; nothing was removed")
    target = BackupTarget.open(address, disk or PosixDisk())
    if target.database_id() is None:
        raise BackupNotFound(target.store.address, None)
    store = target.store
    _load_all(target)  # before the marker, which keeps backups out: what does not read now does not read later either
    try:
        store.put(PRUNE_KEY, [b""])
        store.flush()
        keys = target.list_keys()
        running = [each for each in ids_of(keys, RUNNING_SUFFIX) if manifest_key(each) not in keys]
        if running:
            store.delete(PRUNE_KEY)
            store.flush()
            raise Busy(
                f"{store.address}: backup {running[-1]} is being made or was interrupted; nothing was removed, retry "
                "when it is done, or make another backup first: that removes the marker of an interrupted one"
            )
        result = _prune(target, keep, before_ms, progress)
        store.delete(PRUNE_KEY)
        store.flush()
    except OSError as error:
        raise store.wrap_error(error, "removing backups") from error
    return result


def _load_all(target: BackupTarget) -> dict[str, BackupManifest]:
    """The manifests of all backups. One that does not read may list any object: nothing can be removed then."""
    found: dict[str, BackupManifest] = {}
    for backup_id in target.ids():
        try:
            found[backup_id] = target.load(backup_id)
        except Corrupt as error:
            step = "nothing was removed; restore it, or remove this file to give the backup up, then prune again"
            raise Corrupt(error.where, pos=error.pos, reason=error.reason, next_step=step) from error
    return found


def _prune(target: BackupTarget, keep: int | None, older_than_ms: int | None, progress: Progress) -> PruneResult:
    store, manifests = target.store, _load_all(target)
    ids = list(manifests)
    removed = [
        backup_id
        for place, backup_id in enumerate(ids[:-1])
        if (keep is None or place < len(ids) - keep)
        and (older_than_ms is None or manifests[backup_id].created_ms < older_than_ms)
    ]
    for backup_id in removed:
        store.delete(manifest_key(backup_id))
    store.flush()  # before their objects: a backup is whole or gone
    kept = [backup_id for backup_id in ids if backup_id not in removed]
    needed = {object_key(file) for backup_id in kept for file in manifests[backup_id].files}
    unneeded = {key: size for key, size in store.list(OBJECTS_PREFIX).items() if key not in needed}
    for number, key in enumerate(unneeded, 1):
        store.delete(key)
        progress(PRUNING, number, len(unneeded))
    store.remove_leftovers()
    store.flush()
    return PruneResult(kept, removed, len(unneeded), sum(unneeded.values()))
