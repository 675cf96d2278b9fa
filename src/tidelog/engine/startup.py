"""Open an engine: settings, directory, lock, recovery, and preparation for writes.

The lock is taken before anything is read and released if opening fails, so a second writer is refused before it
changes a byte. The result of recovery is applied to the disk in an order in which each step may be the last one:
repeating all of it leads to the same state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace as replaced
from difflib import get_close_matches
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any, NamedTuple

from tidelog.addresses import check_path, path_text, scheme_of
from tidelog.clock import Clock, SystemClock
from tidelog.commitlog.log import LOCK_FILE, take_lock
from tidelog.disk.bounded_store import BoundedStore
from tidelog.disk.durability import DISK_FULL_ERRNOS, WriteLatch, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, Lock, join, parent_dir
from tidelog.disk.posix import PosixDisk
from tidelog.disk.process import processor_count
from tidelog.disk.segment_store import SegmentStore, open_store
from tidelog.engine import blobs, gap_log, manifest, producer_batches
from tidelog.engine.checkpoint import CheckpointState
from tidelog.engine.cold_claim import StoreClaim, find_foreign_store, load_state
from tidelog.engine.cold_reader import ColdReader
from tidelog.engine.config import EngineConfig
from tidelog.engine.context import TOPICS_DIR, WAL_DIR, EngineContext, Quota
from tidelog.engine.manifest import GroupRow, LoadedManifest, Positions, TopicEntry, TopicRow
from tidelog.engine.recovery import RecoveredTopics, first_file_number, load_idle_topic, recover, report_missing
from tidelog.engine.results import Progress, RecoveryReport
from tidelog.engine.segment import SEGMENT_SUFFIXES, MmapCache, Segment, SegmentFileName, parse_file_name
from tidelog.engine.segment_table import StoredRows
from tidelog.engine.tag_search import TagCache
from tidelog.engine.topic_state import TopicState
from tidelog.engine.topic_table import TopicTable
from tidelog.errors import (
    BadInput,
    Corrupt,
    Damaged,
    DiskFull,
    Error,
    NewerFormat,
    NotFound,
    Unavailable,
    WriteFailed,
    WrongStore,
)
from tidelog.times import fields_in_ms
from tidelog.wal import Shard, Writer, paths, prepare_for_writing

QUARANTINE_DIR = "quarantine"
RESTORING_FILE = "RESTORING"  # until a restore into the directory is complete
_ENGINE_DIRS = frozenset((manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR))
_TOPIC_DIR_PATTERN = re.compile(r"([0-9A-F]{8,16})(\.deleted)?")
_READ_TRIES = 8


class OpenedEngine(NamedTuple):
    context: EngineContext
    lock: Lock | None
    topics: TopicTable
    next_topic_id: int
    checkpoint_state: CheckpointState
    report: RecoveryReport
    reopen: Callable[[], OpenedEngine] | None  # read-only: open again
    claim: StoreClaim | None = None  # on the cold store, if segments are moved there
    named_objects: frozenset[str] | None = None  # in the cold store, by the two manifests; None: unknown

    def abandon(self) -> None:
        """Release everything, if the last steps of opening fail."""
        for shard in self.context.shards:
            with suppress(Error, OSError):
                shard.close()
        if isinstance(self.context.cold.store, BoundedStore):
            self.context.cold.store.close()
        if self.lock is not None:
            self.lock.release()


def open_directory(
    path: str | PathLike[str],
    *,
    read_only: bool,
    disk: Disk | None,
    clock: Clock | None,
    config: EngineConfig | None,
    accept_loss: bool,
    progress: Progress | None,
    settings: dict[str, Any],
    cold_store: SegmentStore | None = None,
    for_planning: bool = False,
) -> OpenedEngine:
    """Return everything an engine needs. On an error the directory is unlocked and nothing acknowledged was dropped.
    `cold_store` is used instead of the one that the setting `cold` names. `for_planning`: read-only, and segments stay
    columns until they are used; their files are not checked."""
    limits = _make_config(config, settings)
    disk, clock = disk or PosixDisk(), clock or SystemClock()
    path = path_text(path, "the directory to open").rstrip("/") or "/"
    store = cold_store or open_cold_store(disk, path, limits)
    find_foreign = (lambda: None) if store is None else partial(find_foreign_store, disk, path, store)
    cold = ColdReader(store, limits.cold_cache_bytes, find_foreign)
    check_directory(disk, path, read_only=read_only)

    def make_context() -> EngineContext:
        return EngineContext(
            disk,
            clock,
            path,
            limits,
            Quota(limits.total_bytes_max),
            TagCache(limits.tags_cache_bytes),
            MmapCache(limits.maps_max),
            [],
            cold=cold,
        )

    if read_only:
        if cold.store is not None and cold_store is None and limits.cold is not None:
            _check_store_of_reader(disk, path, cold.store)
        return _open_reader(make_context, progress or _no_progress, StoredRows() if for_planning else None)
    lock = take_lock(disk, path)
    try:
        opened = _open_writer(make_context, lock, accept_loss=accept_loss, progress=progress or _no_progress)
        if cold.store is None or (cold_store is None and limits.cold is None):
            return opened
        try:
            return opened._replace(claim=_claim_store(opened, cold.store))
        except BaseException:
            opened.abandon()
            raise
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            raise DiskFull(
                f"{path} cannot be opened for writing, the device is full ({error}); nothing acked was dropped, "
                "free space and open again"
            ) from error
        if isinstance(error, OSError):
            raise Damaged(
                f"{path} cannot be opened: {error}; nothing acked was dropped, repair the disk and retry"
            ) from error
        raise


def open_cold_store(disk: Disk, path: str, limits: EngineConfig) -> BoundedStore | None:
    """Open the cold store that is configured or, to read what moved there before, the one that the directory names."""
    address = limits.cold
    if address is None:
        with suppress(Corrupt, NewerFormat, OSError):  # its segments cannot be read then, and say so
            state = load_state(disk, path)
            address = None if state is None else state.address or None
    if address is None:
        return None
    is_local = scheme_of(address) in (None, "file")
    own_disk = PosixDisk() if is_local and getattr(disk, "fetches", False) else disk
    timeout_s = limits.cold_timeout_ms / 1000
    try:
        store = open_store(address, disk=own_disk, timeout_s=timeout_s)
    except BadInput:
        if limits.cold is not None:
            raise
        return None  # a library for it may be missing here; what is on the disk is read all the same
    if is_local and limits.cold is not None:
        _check_cold_directory(own_disk, own_disk.resolve(path), address, store.address)
    return BoundedStore(store, threads=limits.cold_threads, timeout_s=timeout_s)


def _check_cold_directory(disk: Disk, root: str, address: str, directory: str) -> None:
    """Raise BadInput for a cold store in a data directory: its writer removes files that it does not know."""
    above, last = directory, ""
    while above != last:
        parts = (manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR)
        if above == root or all(disk.stat(join(above, name)) is not None for name in parts):
            where = "the data directory" if above == root else f"{above}, which is another data directory"
            raise BadInput(f"the cold store {address} is in {where}; nothing was done, choose another place")
        above, last = parent_dir(above), above


def _check_store_of_reader(disk: Disk, path: str, store: SegmentStore) -> None:
    """Raise WrongStore for an address that is not where the segments of this directory are. The store that it used last
    is not asked: it may be away, and what is on the disk is read all the same."""
    state = load_state(disk, path)
    if state is None or state.address in ("", store.address):
        return
    if (reason := find_foreign_store(disk, path, store)) is not None:
        step = f"give the address where they are, which was {state.address} last"
        raise WrongStore(store.address, f"does not have the segments of {path}: {reason}", step=step)


def _claim_store(opened: OpenedEngine, store: SegmentStore) -> StoreClaim:
    """Return the claim on the cold store. A store that the directory uses for the first time has to answer now, so that
    a wrong address is noticed; one that it has used may be away."""
    claim = StoreClaim(opened.context.disk, opened.context.root, store)
    if claim.recorded_address != store.address:
        parts = (part for topic in opened.topics.resident() for part in topic.index.parts)
        resident = sum(isinstance(part, Segment) and part.has_cold_copy for part in parts)
        claim.take(cold_segments=resident + opened.topics.idle_totals.cold_segments)
    return claim


def _no_progress(what: str, done: int, total: int) -> None:
    pass


def _make_config(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            nearest = get_close_matches(name[:80], known, n=1, cutoff=0.0)[0]
            raise BadInput(f"there is no setting {name!r:.80}, the nearest is {nearest}; nothing was opened")
    changes: dict[str, Any] = fields_in_ms(settings)
    return replaced(config, **changes) if config is not None else EngineConfig(**changes)


def check_directory(disk: Disk, path: str, *, read_only: bool) -> None:
    """Raise for a path that cannot hold topics; for writing, create the directory."""
    check_path(path)
    stat = disk.stat(path)
    if stat is not None and not stat.is_dir:
        raise BadInput(f"{path} is a file; an engine's data is a directory, nothing was changed")
    if stat is None and read_only:
        raise NotFound(f"there is no data at {path}; nothing was changed, check the path")
    if stat is not None:
        names = set(disk.list_dir(path)) - {LOCK_FILE, QUARANTINE_DIR, producer_batches.STAGING_DIR}
        if RESTORING_FILE in names:
            raise Damaged(
                f"{path} holds an unfinished restore ({RESTORING_FILE}); nothing was changed, run `tidelog restore` "
                "again, or remove the directory"
            )
        if names and not names & _ENGINE_DIRS:
            raise BadInput(
                f"{path} holds {sorted(names)[0]!r} and no topics: it belongs to another program; nothing was changed, "
                "choose another directory"
            )
        if not names and read_only:
            raise NotFound(f"there are no topics in {path}; nothing was changed, check the path")
    if read_only:
        return
    try:
        disk.make_dir(path)  # also if it exists: its directory entry may not be durable yet
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BadInput(f"{path} cannot hold topics: {error}; nothing was changed, choose another place") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, repair the disk and retry") from error


def check_not_locked(disk: Disk, path: str) -> None:
    """Raise Locked if another process writes the directory. Creates nothing."""
    if disk.stat(join(path, LOCK_FILE)) is not None:
        take_lock(disk, path).release()


# ── read-only ───────────────────────────────────────────────────────────────────────────────────────


def _open_reader(
    make_context: Callable[[], EngineContext], progress: Progress, stored: StoredRows | None
) -> OpenedEngine:
    """Recover without the last pass, beside an active writer: if it removes files meanwhile, try again."""
    last_error: Error | None = None
    for _ in range(_READ_TRIES):
        context, report = make_context(), RecoveryReport()
        newest = manifest.list_manifest_numbers(context.disk, context.root)[:1]
        try:
            recovered = recover(context, report, progress, writable=False, stored=stored)
        except (Unavailable, FileNotFoundError) as error:
            last_error = error if isinstance(error, Error) else Unavailable(str(error))
            continue
        except Corrupt as error:  # of a segment that replay needs, and that the writer may have replaced meanwhile
            if manifest.list_manifest_numbers(context.disk, context.root)[:1] == newest:
                raise
            last_error = error
            continue
        if manifest.list_manifest_numbers(context.disk, context.root)[:1] == newest:
            gap_log.drop_known_removals(context, recovered.topics, recovered.loaded)
            context.reload_topics = lambda: _open_reader(make_context, progress, stored).topics
            return OpenedEngine(
                context,
                None,
                TopicTable(
                    recovered.topics,
                    recovered.idle,
                    partial(_load_idle_in_reader, context, recovered.loaded.positions, report),
                    recovered.idle_totals,
                ),
                recovered.next_topic_id,
                CheckpointState(manifest.ManifestStore(context.disk, context.root, recovered.loaded)),
                report,
                lambda: _open_reader(make_context, progress, stored),
            )
    raise last_error or Unavailable("the directory changes faster than it can be read; nothing was changed, try again")


def _load_idle_in_reader(
    context: EngineContext, positions: Positions, report: RecoveryReport, entry: TopicEntry
) -> TopicState:
    """Load a topic on its first use, beside a writer that may have dropped it or replaced its files since the open."""
    topic, missing = load_idle_topic(context, entry, positions, report, writable=False)
    if missing and context.reload_topics is not None:
        topics = context.reload_topics()
        if not topics.has_idle(entry):
            current = topics.get(entry.name)
            topic.is_dropped = current is None
            return current or topic
    report_missing(topic, missing, report)
    return topic


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def _open_writer(
    make_context: Callable[[], EngineContext], lock: Lock, *, accept_loss: bool, progress: Progress
) -> OpenedEngine:
    """`_try_open_writer`, which on a full disk gives up the reserve that the previous process left."""
    context = make_context()
    try:
        return _try_open_writer(context, lock, accept_loss=accept_loss, progress=progress)
    except (OSError, DiskFull) as error:
        if isinstance(error, OSError) and error.errno not in DISK_FULL_ERRNOS:
            raise
        for shard in context.shards:
            with suppress(Error, OSError):
                shard.close()
        if not remove_if_exists(context.disk, join(join(context.root, WAL_DIR), paths.RESERVE)):
            raise
    return _try_open_writer(make_context(), lock, accept_loss=accept_loss, progress=progress)


def _try_open_writer(context: EngineContext, lock: Lock, *, accept_loss: bool, progress: Progress) -> OpenedEngine:
    report = RecoveryReport()
    recovered = recover(context, report, progress, writable=True)
    if report.lost and not accept_loss:
        raise Damaged(
            f"{context.root}: " + "; ".join(report.damage) + "; acknowledged records may be lost. Nothing was changed: "
            "open read_only to look, restore a copy, or open with accept_loss to go on without them"
        )
    if report.lost:
        gap_log.add_wal_losses(context, report, recovered.topics)
    gap_log.drop_known_removals(context, recovered.topics, recovered.loaded)
    _apply_recovery(context, recovered, report)
    keys = paths.shard_keys(context.limits.shards(processor_count()))
    wal = join(context.root, WAL_DIR)
    next_numbers = {
        group.key: group.replay.next_file_number
        for group in recovered.groups
        if group.replay.file_numbers or group.replay.missing_file
    }
    context.disk_reserve.adopt()
    for key in keys:
        number = next_numbers.get(key) or first_file_number(recovered.loaded, recovered.groups, key)
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
    shard_keys = {group.key for group in recovered.groups}
    old_shards = [group for group in recovered.groups if group.key not in keys]
    old_rows = tuple(GroupRow(group.key, group.replay.next_file_number, 0) for group in old_shards)
    live = {topic.id for topic in recovered.topics.values()} | {entry.id for entry in recovered.idle.values()}
    context.dropped_ids = {*recovered.loaded.topics} - live
    store = manifest.ManifestStore(context.disk, context.root, recovered.loaded)
    state = CheckpointState(
        store,
        files_to_remove_next=_files_of_older_manifest(context, recovered.loaded),
        old_layout_shards=old_rows,
    )
    # An accepted loss needs a new manifest, or every start would find it again.
    state.needs_checkpoint = (
        report.lost or recovered.has_truncated_source or (bool(shard_keys) and shard_keys != set(keys))
    )
    load = partial(_load_idle_topic, context, recovered.loaded.positions, report)
    topics = TopicTable(recovered.topics, recovered.idle, load, recovered.idle_totals)
    context.schedule.load_topic = topics.get
    named = _find_cold_objects(context, recovered, state)
    for topic in recovered.topics.values():
        _note_sealed_segments(topic)
    return OpenedEngine(context, lock, topics, recovered.next_topic_id, state, report, None, named_objects=named)


def _load_idle_topic(
    context: EngineContext, positions: Positions, report: RecoveryReport, entry: TopicEntry
) -> TopicState:
    """Load a topic on its first use, with pass 6 for its files."""
    topic, missing = load_idle_topic(context, entry, positions, report, writable=True)
    report_missing(topic, missing, report)
    segments = [part for part in topic.index.parts if isinstance(part, Segment)]
    for part in segments:
        _repair_segment(context.disk, part, report)
    if segments:
        named = {(part.base, part.generation) for part in segments}
        _sweep_directory(context.disk, context.root, f"{topic.id:08X}", named, report)
    # A topic with blobs is not idle: these are of streams that did not finish.
    report.swept += [f"{TOPICS_DIR}/{topic.id:08X}/{file}" for file in blobs.sweep(context.disk, topic.directory, ())]
    context.blob_ids.skip(0, topic.index.last_ts)
    if topic.config.type == "queue":
        context.queue_topics.add(topic)
    with topic.lock:
        topic.schedule_maintenance()
    _note_sealed_segments(topic)
    return topic


def _note_sealed_segments(topic: TopicState) -> None:
    """Let the relocator look at a topic, and the next checkpoints remove data files of segments in the cold tier."""
    context = topic.context
    for part in topic.index.parts:
        if not isinstance(part, Segment) or not part.is_sealed:
            continue
        context.sealed_topics.add(topic)
        if part.has_cold_copy and context.disk.stat(part.path(".data")) is not None:
            topic.relocated_segments.append(part)
            context.dirty_topics.add(topic)
            context.needs_checkpoint = True


def _find_cold_objects(
    context: EngineContext, recovered: RecoveredTopics, state: CheckpointState
) -> frozenset[str] | None:
    """Return the objects that the two manifests name of topics that exist; None: it is not known. Those that only the
    older one names are deleted after the next checkpoint. Idle topics that the relocator may have to look at are noted
    by name."""
    loaded = recovered.loaded
    if context.cold.store is None or not loaded.number:
        return None
    if manifest.list_manifest_numbers(context.disk, context.root)[0] != loaded.number:
        return None  # the newest one does not read, and may name objects that the others do not
    live = {topic.id for topic in recovered.topics.values()} | {entry.id for entry in recovered.idle.values()}
    rows = [row for row in loaded.manifest.topics if row.id in live]
    context.idle_sealed += [
        row.name for row in rows if row.name in recovered.idle and any(segment.sealed for segment in row.segments)
    ]
    newest = _object_keys(rows)
    before = _object_keys(row for row in loaded.rows_before() if row.id in live)
    state.objects_to_remove_next += sorted(before - newest)
    return frozenset(newest | before)


def _object_keys(rows: Iterable[TopicRow]) -> set[str]:
    return {
        segment.cold.key for row in rows for segment in row.segments if segment.cold is not None and segment.cold.key
    }


def _apply_recovery(context: EngineContext, recovered: RecoveredTopics, report: RecoveryReport) -> None:
    """Pass 6: apply the recovered state to the disk."""
    disk, root = context.disk, context.root
    wal = join(root, WAL_DIR)
    for directory in (join(root, manifest.MANIFEST_DIR), wal, join(root, TOPICS_DIR)):
        disk.make_dir(directory)
    for group in recovered.groups:
        directory = paths.shard_directory(wal, group.key)
        report.quarantined += prepare_for_writing(disk, directory, group.replay, quarantine=join(root, QUARANTINE_DIR))
    for topic in recovered.topics.values():
        for part in topic.index.parts:
            if isinstance(part, Segment):
                _repair_segment(disk, part, report)
    _remove_unnamed_files(context, recovered, report)


def _repair_segment(disk: Disk, part: Segment, report: RecoveryReport) -> None:
    """Truncate a segment to the length in the manifest and write its rebuilt index."""
    if part.rebuilt_index is not None:
        path = part.path(".idx")
        replace_file(disk, path, part.rebuilt_index, temporary=f"{path}.rebuilding")
        report.rebuilt.append(path)
        part.rebuilt_index = None
        part.unmap()
    if part.is_sealed:
        return
    # An unfinished checkpoint may have extended it, or even sealed it.
    removed = [suffix for suffix in (".foot", ".tag", ".key") if remove_if_exists(disk, part.path(suffix))]
    if removed:
        disk.sync_dir(part.files.directory)
    part.files.truncate(part.base, part.generation, part.size, part.stop - part.base, sync=True)
    part.unmap()


def _remove_unnamed_files(context: EngineContext, recovered: RecoveredTopics, report: RecoveryReport) -> None:
    """Remove segment files that neither of the two newest manifests names, blobs that the WAL does not name either, and
    directories of topics that are gone. Files with other names stay; those of an idle topic wait for its first use."""
    disk, topics = context.disk, join(context.root, TOPICS_DIR)
    loaded = recovered.loaded
    used = {topic.id: topic for topic in recovered.topics.values()}
    idle = {entry.id for entry in recovered.idle.values()}
    named: dict[int, set[tuple[int, int]]] = {}
    blobs_in_manifests: dict[int, set[int]] = {}
    for row in chain((row for topic_id in used if (row := loaded.row(topic_id)) is not None), loaded.rows_before()):
        named.setdefault(row.id, set()).update((segment.base, segment.generation) for segment in row.segments)
        if row.blobs:
            blobs_in_manifests.setdefault(row.id, set()).update(blobs.ids_of_row(row.blobs))
    for name in disk.list_dir(topics):
        match = _TOPIC_DIR_PATTERN.fullmatch(name)
        if match is None:
            continue
        topic_id = int(match[1], 16)
        if (topic := used.get(topic_id)) is not None:
            _sweep_directory(disk, context.root, name, named.get(topic_id, set()), report)
            named_blobs = {blob_id for _, blob_id in topic.blobs}
            needed_blobs = blobs_in_manifests.get(topic_id, set())
            if unneeded := sorted(needed_blobs - named_blobs):
                topic.dropped_blobs += unneeded  # the next checkpoints remove them
                context.dirty_topics.add(topic)
            swept = blobs.sweep(disk, join(topics, name), named_blobs | needed_blobs)
            report.swept += [f"{TOPICS_DIR}/{name}/{file}" for file in swept]
        elif topic_id not in idle:
            remove_topic_files(disk, join(topics, name))
            report.swept.append(f"{TOPICS_DIR}/{name}")
    manifest.remove_temporary_files(disk, context.root)


def _sweep_directory(disk: Disk, root: str, name: str, named: set[tuple[int, int]], report: RecoveryReport) -> None:
    """Remove the files of segments (base and generation) that are not named, and temporary ones."""
    directory = join(join(root, TOPICS_DIR), name)
    stale: list[tuple[SegmentFileName, str]] = []
    for file in disk.list_dir(directory):
        parsed = parse_file_name(file)
        if parsed and (parsed.is_temporary or (parsed.base, parsed.generation) not in named):
            stale.append((parsed, file))
    for _, file in sorted(stale, key=lambda each: SEGMENT_SUFFIXES.index(each[0].suffix)):
        remove_if_exists(disk, join(directory, file))
        report.swept.append(f"{TOPICS_DIR}/{name}/{file}")
    if stale:
        disk.sync_dir(directory)


def _files_of_older_manifest(context: EngineContext, loaded: LoadedManifest) -> list[str]:
    """Return the segment files that only the older manifest names: the next manifest replaces it."""
    unneeded: list[str] = []
    for older in loaded.rows_before():
        row = loaded.row(older.id)
        if row is None:
            continue  # the topic was dropped
        named = {(segment.base, segment.generation) for segment in row.segments}
        files = context.segment_files(row.id)
        unneeded += [
            files.path(segment.base, segment.generation, suffix)
            for segment in older.segments
            if (segment.base, segment.generation) not in named
            for suffix in SEGMENT_SUFFIXES
        ]
    return unneeded


def remove_topic_files(disk: Disk, directory: str) -> None:
    """Remove the files of a dropped topic; the directory is renamed first, so that a partly removed one is not mistaken
    for a topic."""
    if disk.stat(directory) is None:
        return
    renamed = directory if directory.endswith(".deleted") else f"{directory}.deleted"
    if renamed != directory:
        disk.rename(directory, renamed)
        disk.sync_dir(directory.rpartition("/")[0])
    blobs.remove_directory(disk, renamed)
    for name in disk.list_dir(renamed):
        if parse_file_name(name):
            remove_if_exists(disk, join(renamed, name))
    disk.sync_dir(renamed)
    if not disk.list_dir(renamed):
        disk.remove_dir(renamed)
        disk.sync_dir(renamed.rpartition("/")[0])


def checkpoint_error(root: str, error: OSError) -> Error:
    """Return the error for a checkpoint that failed with an OSError."""
    if error.errno in DISK_FULL_ERRNOS:
        return DiskFull(
            f"{root}: the device is too full for a checkpoint; every record is safe in the WAL, free space and retry"
        )
    return WriteFailed(
        f"{root}: a checkpoint failed ({error}); every record is safe in the WAL, repair the disk and retry"
    )
