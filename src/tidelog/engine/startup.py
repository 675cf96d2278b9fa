"""[shell] Opening an engine: settings, the directory, its lock, recovery, and making ready to write.

The lock comes before anything is looked at and is let go when opening fails, so that a second
writer is refused before it could change a byte. What recovery found is brought to disk in an order
in which each step may be the last one: doing all of it again comes to the same end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from typing import Any, NamedTuple

from tidelog.addresses import check_path
from tidelog.clock import Clock, SystemClock
from tidelog.commitlog.log import LOCK_FILE, take_lock
from tidelog.disk.durability import DISK_FULL_ERRNOS, WriteLatch, remove_if_exists, replace_file
from tidelog.disk.host import processor_count
from tidelog.disk.interface import Disk, Lock, join
from tidelog.disk.posix import PosixDisk
from tidelog.engine import gap_log, manifest, producer_batches
from tidelog.engine.checkpoint import SEGMENT_SUFFIXES, CheckpointState
from tidelog.engine.config import EngineConfig
from tidelog.engine.manifest import GroupRow, Manifest
from tidelog.engine.recovery import RecoveredTopics, first_file_number, recover
from tidelog.engine.results import Progress, RecoveryReport
from tidelog.engine.segment import MmapCache, Segment
from tidelog.engine.tag_search import TagCache
from tidelog.engine.topic_state import TOPICS_DIR, WAL_DIR, EngineContext, Quota, TopicState
from tidelog.errors import BadInput, Damaged, DiskFull, Error, NotFound, Unavailable, WriteFailed
from tidelog.formats import segment_index
from tidelog.wal import Shard, Writer, paths, prepare_for_writing

QUARANTINE_DIR = "quarantine"
_ENGINE_DIRS = frozenset((manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR))
_TOPIC_DIR_PATTERN = re.compile(r"([0-9A-F]{8,16})(\.deleted)?")
_SEGMENT_FILE_PATTERN = re.compile(r"seg-(\d{16,20})(\.data|\.idx|\.foot|\.tag|\.del)(\.tmp|\.rebuilding)?")
_READ_TRIES = 8


class OpenedEngine(NamedTuple):
    shared: EngineContext
    lock: Lock | None
    topics: dict[str, TopicState]
    next_topic_id: int
    checkpoint_state: CheckpointState
    report: RecoveryReport
    reopen: Callable[[], OpenedEngine] | None  # for a reader: look again

    def abandon(self) -> None:
        """Let go of everything, when the last steps to a working engine fail."""
        for shard in self.shared.shards:
            with suppress(Error, OSError):
                shard.close()
        if self.lock is not None:
            self.lock.release()


def open_directory(
    path: str,
    *,
    read_only: bool,
    disk: Disk | None,
    clock: Clock | None,
    config: EngineConfig | None,
    accept_loss: bool,
    progress: Progress | None,
    settings: dict[str, Any],
) -> OpenedEngine:
    """Everything an engine needs to be used; on an error the directory is unlocked and nothing acked was dropped."""
    limits = _make_config(config, settings)
    disk, clock = disk or PosixDisk(), clock or SystemClock()
    path = str(path).rstrip("/") or "/"
    check_directory(disk, path, read_only=read_only)

    def shared() -> EngineContext:
        return EngineContext(
            disk,
            clock,
            path,
            limits,
            Quota(limits.total_bytes_max),
            TagCache(limits.tags_cache_bytes),
            MmapCache(limits.maps_max),
            [],
        )

    if read_only:
        return _open_reader(shared, progress or _no_progress)
    lock = take_lock(disk, path)
    try:
        return _open_writer(shared, lock, accept_loss=accept_loss, progress=progress or _no_progress)
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            raise DiskFull(
                f"{path} cannot be opened for writing, the device has no room ({error}); nothing acked was dropped, "
                "free space and open again"
            ) from error
        if isinstance(error, OSError):
            raise Damaged(
                f"{path} cannot be opened: {error}; nothing acked was dropped, mend the disk and retry"
            ) from error
        raise


def _no_progress(what: str, done: int, total: int) -> None:
    pass


def _make_config(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    try:
        return replaced(config, **settings) if config is not None else EngineConfig(**settings)
    except TypeError as error:
        raise BadInput(f"unknown setting: {error}; see tidelog.engine.config.EngineConfig") from None


def check_directory(disk: Disk, path: str, *, read_only: bool) -> None:
    """Refuse what is no place for topics; for writing, make it where there is none."""
    check_path(path)
    found = disk.stat(path)
    if found is not None and not found.is_dir:
        raise BadInput(f"{path} is a file; an engine's data is a directory, nothing was changed")
    if found is None and read_only:
        raise NotFound(f"there is no data at {path}; nothing was changed, check the path")
    if found is not None:
        there = set(disk.list_dir(path)) - {LOCK_FILE, QUARANTINE_DIR, producer_batches.STAGING_DIR}
        if there and not there & _ENGINE_DIRS:
            raise BadInput(
                f"{path} holds {sorted(there)[0]!r} and no topics: it belongs to something else; nothing was changed, "
                "choose another directory"
            )
        if not there and read_only:
            raise NotFound(f"there are no topics in {path}; nothing was changed, check the path")
    if read_only:
        return
    try:
        disk.make_dir(path)  # also where it is there: its own name may not be durable yet
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BadInput(f"{path} cannot hold topics: {error}; nothing was changed, choose another place") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, mend the disk and retry") from error


def check_not_locked(disk: Disk, path: str) -> None:
    """Raise Locked where another process writes the directory. Nothing is made where there is none."""
    if disk.stat(join(path, LOCK_FILE)) is not None:
        take_lock(disk, path).release()


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def _open_reader(shared: Callable[[], EngineContext], progress: Progress) -> OpenedEngine:
    """Recovery without its last pass, beside a writer that may be at work: what it takes away while we look is
    looked for again."""
    trouble: Error | None = None
    for _ in range(_READ_TRIES):
        mine, report = shared(), RecoveryReport()
        before = manifest.list_manifest_numbers(mine.disk, mine.root)[:1]
        try:
            found = recover(mine, report, progress, writable=False)
        except (Unavailable, FileNotFoundError) as error:
            trouble = error if isinstance(error, Error) else Unavailable(str(error))
            continue
        if manifest.list_manifest_numbers(mine.disk, mine.root)[:1] == before:
            gap_log.drop_known_removals(mine, found.topics, found.loaded.manifest)
            mine.reload_topics = lambda: _open_reader(shared, progress).topics
            return OpenedEngine(
                mine,
                None,
                found.topics,
                found.next_topic_id,
                CheckpointState(),
                report,
                lambda: _open_reader(shared, progress),
            )
    raise trouble or Unavailable("the directory changes faster than it can be read; nothing was changed, try again")


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def _open_writer(
    shared: Callable[[], EngineContext], lock: Lock, *, accept_loss: bool, progress: Progress
) -> OpenedEngine:
    """`_writer`, which on a full disk gives up the reserve of the process before it."""
    mine = shared()
    try:
        return _try_open_writer(mine, lock, accept_loss=accept_loss, progress=progress)
    except (OSError, DiskFull) as error:
        if isinstance(error, OSError) and error.errno not in DISK_FULL_ERRNOS:
            raise
        for shard in mine.shards:
            with suppress(Error, OSError):
                shard.close()
        if not remove_if_exists(mine.disk, join(join(mine.root, WAL_DIR), paths.RESERVE)):
            raise
    return _try_open_writer(shared(), lock, accept_loss=accept_loss, progress=progress)


def _try_open_writer(context: EngineContext, lock: Lock, *, accept_loss: bool, progress: Progress) -> OpenedEngine:
    report = RecoveryReport()
    found = recover(context, report, progress, writable=True)
    if report.lost and not accept_loss:
        raise Damaged(
            f"{context.root}: " + "; ".join(report.damage) + "; acknowledged records may be lost. Nothing was changed: "
            "open read_only to look, restore a copy, or open with accept_loss to go on without them"
        )
    if report.lost:
        gap_log.add_wal_losses(context, report, found.topics)
    gap_log.drop_known_removals(context, found.topics, found.loaded.manifest)
    _apply_recovery(context, found, report)
    keys = paths.shard_keys(context.limits.shards(processor_count()))
    wal = join(context.root, WAL_DIR)
    first = {
        group.key: group.replay.next_file_number
        for group in found.groups
        if group.replay.file_numbers or group.replay.missing_file
    }
    context.disk_reserve.adopt()
    for key in keys:
        number = first.get(key) or first_file_number(found.loaded, found.groups, key)
        latch = WriteLatch(join(wal, key) if key else wal)
        writer = Writer(
            context.disk,
            paths.shard_directory(wal, key),
            file_number=number,
            file_bytes=context.limits.wal_file_bytes,
            latch=latch,
            reserve=context.disk_reserve,
        )
        context.shards.append(Shard(writer, clock=context.clock, queue_max=context.limits.queue_max))
    context.disk_reserve.restore()
    there = {group.key for group in found.groups}
    strange = [group for group in found.groups if group.key not in keys]
    strangers = tuple(GroupRow(group.key, group.replay.next_file_number, 0) for group in strange)
    history = CheckpointState(found.loaded.number, found.loaded.manifest.groups, old_layout_shards=strangers)
    # A loss that was accepted is behind the next manifest, or every start would find it again.
    history.needs_checkpoint = report.lost or found.has_truncated_source or (bool(there) and there != set(keys))
    return OpenedEngine(context, lock, found.topics, found.next_topic_id, history, report, None)


def _apply_recovery(context: EngineContext, found: RecoveredTopics, report: RecoveryReport) -> None:
    """6. Bring the disk to what was recovered."""
    disk, root = context.disk, context.root
    wal = join(root, WAL_DIR)
    for directory in (join(root, manifest.MANIFEST_DIR), wal, join(root, TOPICS_DIR)):
        disk.make_dir(directory)
    for group in found.groups:
        directory = paths.shard_directory(wal, group.key)
        report.quarantined += prepare_for_writing(disk, directory, group.replay, quarantine=join(root, QUARANTINE_DIR))
    live = {core.id: core for core in found.topics.values()}
    for core in live.values():
        for part in core.index.parts:
            if isinstance(part, Segment):
                _repair_segment(disk, part, report)
    _remove_unnamed_files(
        context, live, [found.loaded.manifest, *([found.loaded.before] if found.loaded.before else [])], report
    )


def _repair_segment(disk: Disk, part: Segment, report: RecoveryReport) -> None:
    """A segment as long as the manifest says, with an index that fits it."""
    if part.rebuilt_index is not None:
        path = part.files.path(part.base, ".idx")
        replace_file(disk, path, part.rebuilt_index, temporary=f"{path}.rebuilding")
        report.rebuilt.append(path)
        part.rebuilt_index = None
        part.files.unmap(part.base)
    if part.is_sealed:
        return
    # A checkpoint that was not finished may have added to it, or even completed it.
    sealed = [suffix for suffix in (".foot", ".tag") if remove_if_exists(disk, part.files.path(part.base, suffix))]
    if sealed:
        disk.sync_dir(part.files.directory)
    for suffix, size in ((".data", part.size), (".idx", (part.stop - part.base) * segment_index.ENTRY_BYTES)):
        stat = disk.stat(part.files.path(part.base, suffix))
        if stat is not None and stat.size > size:
            file = disk.open(part.files.path(part.base, suffix), "write")
            try:
                file.truncate(size)
                file.sync()
            finally:
                file.close()
    part.files.unmap(part.base)


def _remove_unnamed_files(
    context: EngineContext, live: dict[int, TopicState], manifests: Sequence[Manifest], report: RecoveryReport
) -> None:
    """Remove files of ours that neither manifest names. Names that are not ours stay."""
    disk, topics = context.disk, join(context.root, TOPICS_DIR)
    named = {(topic.id, segment.base) for made in manifests for topic in made.topics for segment in topic.segments}
    for name in disk.list_dir(topics):
        known = _TOPIC_DIR_PATTERN.fullmatch(name)
        if known is None:
            continue
        directory, topic_id = join(topics, name), int(known[1], 16)
        if topic_id not in live:
            remove_topic_files(disk, directory)
            report.swept.append(f"{TOPICS_DIR}/{name}")
            continue
        stale = []
        for file in disk.list_dir(directory):
            segment = _SEGMENT_FILE_PATTERN.fullmatch(file)
            if segment and (segment[3] or (topic_id, int(segment[1])) not in named):
                stale.append(file)
        for file in sorted(stale, key=lambda file: SEGMENT_SUFFIXES.index(_segment_suffix(file))):
            remove_if_exists(disk, join(directory, file))
            report.swept.append(f"{TOPICS_DIR}/{name}/{file}")
        if stale:
            disk.sync_dir(directory)
    manifest.prune(disk, context.root)


def _segment_suffix(file: str) -> str:
    found = _SEGMENT_FILE_PATTERN.fullmatch(file)
    assert found is not None, "asked of files that were matched"
    return found[2]


def remove_topic_files(disk: Disk, directory: str) -> None:
    """Remove the files of a topic that was dropped: renamed first, so that what is half gone is not taken for it."""
    if disk.stat(directory) is None:
        return
    gone = directory if directory.endswith(".deleted") else f"{directory}.deleted"
    if gone != directory:
        disk.rename(directory, gone)
        disk.sync_dir(directory.rpartition("/")[0])
    for name in disk.list_dir(gone):
        if _SEGMENT_FILE_PATTERN.fullmatch(name):
            remove_if_exists(disk, join(gone, name))
    disk.sync_dir(gone)
    if not disk.list_dir(gone):
        disk.remove_dir(gone)
        disk.sync_dir(gone.rpartition("/")[0])


def checkpoint_error(root: str, error: OSError) -> Error:
    """The error of a checkpoint that the disk did not take."""
    if error.errno in DISK_FULL_ERRNOS:
        return DiskFull(
            f"{root}: no room on the device for a checkpoint; every record is safe in the WAL, free space and retry"
        )
    return WriteFailed(
        f"{root}: a checkpoint failed ({error}); every record is safe in the WAL, mend the disk and retry"
    )
