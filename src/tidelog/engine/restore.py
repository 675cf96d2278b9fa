"""Restore a backup into a new directory, as a whole or up to a seq or a time.

    1  everything is checked that can be checked without a write: the manifest, its files, the lengths of all objects
    2  RESTORING, a marker: until it is removed, `open` refuses the directory
    3  every file, its checksum compared on the way; records after the cut are left out (`restore_cut`)
    4  the metadata snapshot, with a new epoch for every topic
    5  the marker is removed

A crash leaves a directory with the marker, or a complete one. The same call again starts over. An error removes what
was written.

With the epoch readers notice that seqs after the end of the backup stand for other records than before: offsets of
Spark, tables and watch sessions of the old database do not silently continue in the restored one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from secrets import token_bytes
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_128

from tidelog.addresses import check_path, path_text
from tidelog.commitlog.log import LOCK_FILE, take_lock
from tidelog.disk.backup_store import DirectoryStore
from tidelog.disk.durability import DISK_FULL_ERRNOS, remove_if_exists, remove_tree, replace_file
from tidelog.disk.interface import Disk, free_bytes, join, parent_dir
from tidelog.disk.posix import PosixDisk
from tidelog.engine import manifest
from tidelog.engine.backup_target import (
    PIECE_BYTES,
    BackupTarget,
    check_files,
    load_engine_manifest,
    no_progress,
    object_problem,
)
from tidelog.engine.context import TOPICS_DIR, WAL_DIR
from tidelog.engine.manifest import (
    RESTORES_MAX,
    Manifest,
    ManifestStore,
    TopicRow,
    restored_epoch,
    split_manifest,
)
from tidelog.engine.restore_cut import Cut, CutResult, apply_cut, find_created_topics
from tidelog.engine.results import Progress
from tidelog.engine.startup import RESTORING_FILE
from tidelog.errors import AlreadyExists, BadInput, Corrupt, DiskFull, Error, WriteFailed
from tidelog.formats.backup_manifest import OBJECTS_PREFIX, BackupFile, BackupManifest, object_key
from tidelog.times import Time, time_ms
from tidelog.wal import Position, paths

CHANNELS_DIR: Final = "channels"
RESTORING: Final = "restoring files"
_OWN_NAMES: Final = frozenset((manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR, CHANNELS_DIR))
_IGNORED_NAMES: Final = frozenset((LOCK_FILE, f"{RESTORING_FILE}.tmp"))


class RestoreResult(NamedTuple):
    path: str
    id: str  # of the backup
    topics: dict[str, int]  # the last seq of each topic
    cut: dict[str, int]  # topics that are shorter than in the backup, and how many seqs they lost
    dropped: list[str]  # topics that were created after the time
    channels: int
    files: int
    bytes: int
    notes: list[str]  # what could not be taken back


def restore_backup(
    address: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    backup_id: str | None = None,
    to_seq: Mapping[str, int] | None = None,
    to_time_ms: Time | None = None,
    disk: Disk | None = None,
    progress: Progress = no_progress,
    random_bytes: Callable[[int], bytes] = token_bytes,
) -> RestoreResult:
    """Restore a backup into a directory that does not exist or is empty.

    Args:
        backup_id: the backup; by default the newest, and with `to_time_ms` the oldest that reaches that time.
        to_seq: the last seq of a topic that is restored, by topic.
        to_time_ms: records that were written later, in milliseconds since 1970, are not restored.
    """
    disk = disk or PosixDisk()
    path = path_text(directory, "the directory to restore into")
    check_path(path)
    path = path.rstrip("/") or "/"
    until_ms = None if to_time_ms is None else time_ms("to_time_ms", to_time_ms)
    target = BackupTarget.open(address, disk)
    backup = _choose_backup(target, backup_id, until_ms)
    loaded = load_engine_manifest(backup, f"{target.store.address}, backup {backup.id}")
    cut = Cut(_check_cut(backup, to_seq or {}), until_ms)
    if problems := check_files(backup):
        raise Corrupt(target.store.address, pos=0, reason=problems[0], next_step="nothing was restored")
    _check_objects(target, backup)
    _check_directory(disk, path, target, sum(file.size for file in backup.files))
    return _Restore(target, backup, loaded, disk, path, cut, progress, random_bytes).run()


def _choose_backup(target: BackupTarget, backup_id: str | None, to_time_ms: int | None) -> BackupManifest:
    if backup_id is not None or to_time_ms is None:
        return target.require(backup_id)
    newest = target.require(None)
    for candidate in target.ids():
        found = target.load(candidate)
        if found.created_ms >= to_time_ms:
            return found
    raise BadInput(
        f"the newest backup in {target.store.address} ends at {newest.created_ms} ms, before {to_time_ms}; nothing was "
        f"restored, name an earlier time, or backup {newest.id} to restore all of it"
    )


def _check_cut(backup: BackupManifest, to_seq: Mapping[str, int]) -> dict[int, int]:
    """The seqs to cut at, by topic id."""
    topics = {topic.name: topic for topic in backup.topics}
    cut: dict[int, int] = {}
    for name, seq in to_seq.items():
        topic = topics.get(name)
        if topic is None:
            raise BadInput(f"backup {backup.id} has no topic {name!r}; nothing was restored")
        if not 0 <= seq <= topic.head:
            raise BadInput(
                f"{name} ends at seq {topic.head} in backup {backup.id}, it cannot be restored up to {seq}; nothing "
                "was restored"
            )
        cut[topic.id] = seq
    return cut


def _check_objects(target: BackupTarget, backup: BackupManifest) -> None:
    """Raise unless every object exists with its length."""
    try:
        lengths = target.store.list(OBJECTS_PREFIX)
    except OSError as error:
        raise target.store.wrap_error(error, "listing objects") from error
    for file in backup.files:
        problem = object_problem(file, lengths.get(object_key(file)), file.checksum)
        if problem is not None:
            raise _object_error(target, file, problem)


def _object_error(target: BackupTarget, file: BackupFile, problem: str) -> Corrupt:
    step = "nothing was restored; choose another backup, `tidelog backup verify` lists all damage"
    return Corrupt(f"{target.store.address}/{object_key(file)}", pos=0, reason=problem, next_step=step)


def _check_directory(disk: Disk, directory: str, target: BackupTarget, size: int) -> None:
    """Raise unless a restore can be made there. Changes nothing."""
    stat = disk.stat(directory)
    if stat is not None and not stat.is_dir:
        raise AlreadyExists(f"{directory} is a file; nothing was restored, name a new directory")
    names = set(disk.list_dir(directory)) if stat is not None else set()
    left = names - _IGNORED_NAMES
    if left and not (RESTORING_FILE in left and left <= _OWN_NAMES | {RESTORING_FILE}):
        raise AlreadyExists(
            f"{directory} exists already and holds {min(left)!r}; nothing was restored, name a new or empty directory"
        )
    if isinstance(target.store, DirectoryStore):
        place, root = disk.resolve(directory), target.store.address
        if f"{place}/".startswith(f"{root.rstrip('/')}/"):
            raise BadInput(f"{directory} is inside the backups in {root}; nothing was restored, name another directory")
    free = free_bytes(disk, directory if stat is not None else parent_dir(directory))
    if free is not None and free < size:
        raise DiskFull(f"{directory}: the backup has {size} bytes, {free} are free; nothing was restored, free space")


class _Restore:
    """One restore."""

    def __init__(
        self,
        target: BackupTarget,
        backup: BackupManifest,
        loaded: Manifest,
        disk: Disk,
        directory: str,
        cut: Cut,
        progress: Progress,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._target, self._backup, self._loaded, self._disk = target, backup, loaded, disk
        self._directory, self._cut, self._progress, self._random_bytes = directory, cut, progress, random_bytes
        self._total, self._done = sum(file.size for file in backup.files), 0

    def run(self) -> RestoreResult:
        try:
            self._disk.make_dir(self._directory)
            lock = take_lock(self._disk, self._directory)
        except OSError as error:
            raise self._write_error(error) from error
        try:
            try:
                return self._run()
            except (Error, OSError) as error:
                with suppress(OSError):
                    self._remove_files()
                    remove_if_exists(self._disk, join(self._directory, RESTORING_FILE))
                if isinstance(error, OSError):
                    raise self._write_error(error) from error
                raise
        finally:
            lock.release()

    def _run(self) -> RestoreResult:
        disk, directory, backup = self._disk, self._directory, self._backup
        marker = join(directory, RESTORING_FILE)
        replace_file(disk, marker, f"{backup.id}\n".encode())
        self._remove_files()
        for name in (manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR):
            disk.make_dir(join(directory, name))
        directories = set[str]()
        for file in backup.files:
            directories.add(self._copy(file))
        loaded, created = self._loaded, find_created_topics(disk, directory, self._loaded, backup)
        result = CutResult(msgspec.structs.replace(loaded, topics=(*loaded.topics, *created)), {}, [], [])
        if self._cut.is_needed:
            result = apply_cut(disk, directory, result.manifest, backup, self._cut)
        else:
            self._write_positions(directories)
        for path in sorted(directories):
            if disk.stat(path) is not None:
                disk.sync_dir(path)
        saved = self._with_epochs(result.manifest)
        positions, entries = split_manifest(saved)
        ManifestStore(disk, directory).save(entries, (), positions)
        remove_if_exists(disk, marker)
        disk.sync_dir(directory)
        kept = [topic for topic in backup.topics if topic.name not in result.dropped]
        return RestoreResult(
            directory,
            backup.id,
            {topic.name: topic.head - result.cut.get(topic.name, 0) for topic in kept},
            result.cut,
            result.dropped,
            backup.channels,
            len(backup.files),
            self._total,
            [*result.notes, *(f"damaged when it was backed up: {name}" for name in backup.damaged)],
        )

    def _copy(self, file: BackupFile) -> str:
        """Copy the object of a file and return the directory. Raises Corrupt if its checksum differs."""
        path = join(self._directory, file.path)
        self._disk.make_dir(parent_dir(path))
        digest, pos, store = xxh3_128(), 0, self._target.store
        copy = self._disk.open(path, "create")
        try:
            if file.offset:
                copy.truncate(file.offset)
            while pos < file.size:
                try:
                    piece = store.read(object_key(file), pos, min(pos + PIECE_BYTES, file.size))
                except OSError as error:
                    raise _object_error(self._target, file, f"it cannot be read: {error}") from error
                if not piece:
                    break
                digest.update(piece)
                copy.write(file.offset + pos, piece)
                pos += len(piece)
                self._done += len(piece)
                self._progress(RESTORING, self._done, self._total)
            if (problem := object_problem(file, pos, digest.hexdigest())) is not None:
                raise _object_error(self._target, file, problem)
            copy.sync()
        finally:
            copy.close()
        return parent_dir(path)

    def _write_positions(self, directories: set[str]) -> None:
        """Write what proves the end of each WAL shard, so that later damage is not taken for an unfinished write."""
        wal = join(self._directory, WAL_DIR)
        for shard in self._backup.shards:
            directory = paths.shard_directory(wal, shard.key)
            if shard.file_number not in paths.list_file_numbers(self._disk, directory):
                continue
            position = Position(shard.file_number, shard.pos)
            replace_file(self._disk, join(directory, paths.CURRENT), paths.encode_current(*position))
            replace_file(self._disk, join(directory, paths.SYNCED), paths.encode_synced(position))
            directories.add(directory)

    def _with_epochs(self, loaded: Manifest) -> Manifest:
        used = {row.epoch >> manifest.EPOCH_ID_BITS for row in loaded.topics}
        number = 0
        while number in used or not number:
            number = int.from_bytes(self._random_bytes(4), "little") % RESTORES_MAX + 1

        def renew(row: TopicRow) -> TopicRow:
            return msgspec.structs.replace(row, epoch=restored_epoch(row.id, number))

        return msgspec.structs.replace(loaded, topics=tuple(renew(row) for row in loaded.topics))

    def _remove_files(self) -> None:
        """Remove what an earlier attempt left."""
        for name in sorted(_OWN_NAMES):
            remove_tree(self._disk, join(self._directory, name))
        self._disk.sync_dir(self._directory)

    def _write_error(self, error: OSError) -> Error:
        if error.errno in DISK_FULL_ERRNOS:
            return DiskFull(f"{self._directory}: no space left while restoring; nothing was restored, free space")
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            return BadInput(f"{self._directory} cannot be restored to: {error}; name another directory")
        return WriteFailed(f"{self._directory}: restoring failed ({error}); repair the disk and run it again")
