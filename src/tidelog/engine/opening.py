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
from tidelog.commitlog.opening import LOCK_FILE, take_lock
from tidelog.disk.atomic import remove_if_there, replace
from tidelog.disk.latch import FULL, Latch
from tidelog.disk.posix import PosixDisk, processors
from tidelog.disk.seam import Disk, Lock, join
from tidelog.engine import ledger, manifest, staging
from tidelog.engine.checkpoint import SUFFIXES, History
from tidelog.engine.config import EngineConfig
from tidelog.engine.core import TOPICS, WAL, Core, Shared
from tidelog.engine.home import Maps
from tidelog.engine.manifest import GroupRow, Manifest
from tidelog.engine.parts import Segment
from tidelog.engine.quota import Quota
from tidelog.engine.recovery import Recovered, first_number, recover
from tidelog.engine.report import Progress, Report
from tidelog.engine.tags import TagCache
from tidelog.errors import BadInput, Damaged, DiskFull, Error, NotFound, Unavailable, WriteFailed
from tidelog.formats import idx
from tidelog.wal import Shard, Writer, cut, names

QUARANTINE = "quarantine"
_OURS = frozenset((manifest.DIRECTORY, WAL, TOPICS))
_TOPIC = re.compile(r"([0-9A-F]{8,16})(\.deleted)?")
_SEGMENT = re.compile(r"seg-(\d{16,20})(\.data|\.idx|\.foot|\.tag|\.del)(\.tmp|\.rebuilding)?")
_READ_TRIES = 8


class Opened(NamedTuple):
    shared: Shared
    lock: Lock | None
    topics: dict[str, Core]
    next_topic_id: int
    history: History
    report: Report
    again: Callable[[], Opened] | None  # for a reader: look again

    def abandon(self) -> None:
        """Let go of everything, when the last steps to a working engine fail."""
        for shard in self.shared.shards:
            with suppress(Error, OSError):
                shard.close()
        if self.lock is not None:
            self.lock.release()


def opened(
    path: str,
    *,
    read_only: bool,
    disk: Disk | None,
    clock: Clock | None,
    config: EngineConfig | None,
    accept_loss: bool,
    progress: Progress | None,
    settings: dict[str, Any],
) -> Opened:
    """Everything an engine needs to be used; on an error the directory is unlocked and nothing acked was dropped."""
    limits = _configured(config, settings)
    disk, clock = disk or PosixDisk(), clock or SystemClock()
    path = str(path).rstrip("/") or "/"
    check_directory(disk, path, read_only=read_only)

    def shared() -> Shared:
        return Shared(
            disk,
            clock,
            path,
            limits,
            Quota(limits.total_bytes_max),
            TagCache(limits.tags_cache_bytes),
            Maps(limits.maps_max),
            [],
        )

    if read_only:
        return _reader(shared, progress or _quiet)
    lock = take_lock(disk, path)
    try:
        return _written(shared, lock, accept_loss=accept_loss, progress=progress or _quiet)
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError) and error.errno in FULL:
            raise DiskFull(
                f"{path} cannot be opened for writing, the device has no room ({error}); nothing acked was dropped, "
                "free space and open again"
            ) from error
        if isinstance(error, OSError):
            raise Damaged(
                f"{path} cannot be opened: {error}; nothing acked was dropped, mend the disk and retry"
            ) from error
        raise


def _quiet(what: str, done: int, total: int) -> None:
    pass


def _configured(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
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
        there = set(disk.names(path)) - {LOCK_FILE, QUARANTINE, staging.DIRECTORY}
        if there and not there & _OURS:
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


def check_free(disk: Disk, path: str) -> None:
    """Raise Locked where another process writes the directory. Nothing is made where there is none."""
    if disk.stat(join(path, LOCK_FILE)) is not None:
        take_lock(disk, path).release()


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def _reader(shared: Callable[[], Shared], progress: Progress) -> Opened:
    """Recovery without its last pass, beside a writer that may be at work: what it takes away while we look is
    looked for again."""
    trouble: Error | None = None
    for _ in range(_READ_TRIES):
        mine, report = shared(), Report()
        before = manifest.numbers(mine.disk, mine.root)[:1]
        try:
            found = recover(mine, report, progress, writable=False)
        except (Unavailable, FileNotFoundError) as error:
            trouble = error if isinstance(error, Error) else Unavailable(str(error))
            continue
        if manifest.numbers(mine.disk, mine.root)[:1] == before:
            ledger.rebuild(mine, found.topics, found.loaded.manifest)
            mine.look_again = lambda: _reader(shared, progress).topics
            return Opened(
                mine, None, found.topics, found.next_topic_id, History(), report, lambda: _reader(shared, progress)
            )
    raise trouble or Unavailable("the directory changes faster than it can be read; nothing was changed, try again")


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def _written(shared: Callable[[], Shared], lock: Lock, *, accept_loss: bool, progress: Progress) -> Opened:
    """`_writer`, which on a full disk gives up the reserve of the process before it."""
    mine = shared()
    try:
        return _writer(mine, lock, accept_loss=accept_loss, progress=progress)
    except (OSError, DiskFull) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        for shard in mine.shards:
            with suppress(Error, OSError):
                shard.close()
        if not remove_if_there(mine.disk, join(join(mine.root, WAL), names.RESERVE)):
            raise
    return _writer(shared(), lock, accept_loss=accept_loss, progress=progress)


def _writer(shared: Shared, lock: Lock, *, accept_loss: bool, progress: Progress) -> Opened:
    report = Report()
    found = recover(shared, report, progress, writable=True)
    if report.lost and not accept_loss:
        raise Damaged(
            f"{shared.root}: " + "; ".join(report.damage) + "; acknowledged records may be lost. Nothing was changed: "
            "open read_only to look, restore a copy, or open with accept_loss to go on without them"
        )
    if report.lost:
        ledger.lost(shared, report, found.topics)
    ledger.rebuild(shared, found.topics, found.loaded.manifest)
    _settle(shared, found, report)
    keys = names.keys(shared.limits.shards(processors()))
    wal = join(shared.root, WAL)
    first = {
        group.key: group.replay.next_first for group in found.groups if group.replay.numbers or group.replay.absent
    }
    shared.reserve.adopt()
    for key in keys:
        number = first.get(key) or first_number(found.loaded, found.groups, key)
        latch = Latch(join(wal, key) if key else wal)
        writer = Writer(
            shared.disk,
            names.directory(wal, key),
            first=number,
            file_bytes=shared.limits.wal_file_bytes,
            latch=latch,
            reserve=shared.reserve,
        )
        shared.shards.append(Shard(writer, clock=shared.clock, queue_max=shared.limits.queue_max))
    shared.reserve.restore()
    there = {group.key for group in found.groups}
    strange = [group for group in found.groups if group.key not in keys]
    strangers = tuple(GroupRow(group.key, group.replay.next_first, 0) for group in strange)
    history = History(found.loaded.number, found.loaded.manifest.groups, strangers=strangers)
    # A loss that was accepted is behind the next manifest, or every start would find it again.
    history.moved = report.lost or found.shorter or (bool(there) and there != set(keys))
    return Opened(shared, lock, found.topics, found.next_topic_id, history, report, None)


def _settle(shared: Shared, found: Recovered, report: Report) -> None:
    """6. Bring the disk to what was recovered."""
    disk, root = shared.disk, shared.root
    wal = join(root, WAL)
    for directory in (join(root, manifest.DIRECTORY), wal, join(root, TOPICS)):
        disk.make_dir(directory)
    for group in found.groups:
        directory = names.directory(wal, group.key)
        report.quarantined += cut(disk, directory, group.replay, quarantine=join(root, QUARANTINE))
    live = {core.id: core for core in found.topics.values()}
    for core in live.values():
        for part in core.index.parts:
            if isinstance(part, Segment):
                _mend(disk, part, report)
    _sweep(shared, live, [found.loaded.manifest, *([found.loaded.before] if found.loaded.before else [])], report)


def _mend(disk: Disk, part: Segment, report: Report) -> None:
    """A segment as long as the manifest says, with an index that fits it."""
    if part.rebuilt is not None:
        path = part.home.path(part.base, ".idx")
        replace(disk, path, part.rebuilt, temporary=f"{path}.rebuilding")
        report.rebuilt.append(path)
        part.rebuilt = None
        part.home.forget(part.base)
    if part.sealed:
        return
    # A checkpoint that was not finished may have added to it, or even completed it.
    sealed = [suffix for suffix in (".foot", ".tag") if remove_if_there(disk, part.home.path(part.base, suffix))]
    if sealed:
        disk.sync_dir(part.home.directory)
    for suffix, size in ((".data", part.size), (".idx", (part.stop - part.base) * idx.ENTRY_BYTES)):
        stat = disk.stat(part.home.path(part.base, suffix))
        if stat is not None and stat.size > size:
            file = disk.open(part.home.path(part.base, suffix), "write")
            try:
                file.cut(size)
                file.sync()
            finally:
                file.close()
    part.home.forget(part.base)


def _sweep(shared: Shared, live: dict[int, Core], manifests: Sequence[Manifest], report: Report) -> None:
    """Remove files of ours that neither manifest names. Names that are not ours stay."""
    disk, topics = shared.disk, join(shared.root, TOPICS)
    named = {(topic.id, segment.base) for made in manifests for topic in made.topics for segment in topic.segments}
    for name in disk.names(topics):
        known = _TOPIC.fullmatch(name)
        if known is None:
            continue
        directory, topic_id = join(topics, name), int(known[1], 16)
        if topic_id not in live:
            erase(disk, directory)
            report.swept.append(f"{TOPICS}/{name}")
            continue
        stale = []
        for file in disk.names(directory):
            segment = _SEGMENT.fullmatch(file)
            if segment and (segment[3] or (topic_id, int(segment[1])) not in named):
                stale.append(file)
        for file in sorted(stale, key=lambda file: SUFFIXES.index(_suffix(file))):
            remove_if_there(disk, join(directory, file))
            report.swept.append(f"{TOPICS}/{name}/{file}")
        if stale:
            disk.sync_dir(directory)
    manifest.prune(disk, shared.root)


def _suffix(file: str) -> str:
    found = _SEGMENT.fullmatch(file)
    assert found is not None, "asked of files that were matched"
    return found[2]


def erase(disk: Disk, directory: str) -> None:
    """Remove the files of a topic that was dropped: renamed first, so that what is half gone is not taken for it."""
    if disk.stat(directory) is None:
        return
    gone = directory if directory.endswith(".deleted") else f"{directory}.deleted"
    if gone != directory:
        disk.rename(directory, gone)
        disk.sync_dir(directory.rpartition("/")[0])
    for name in disk.names(gone):
        if _SEGMENT.fullmatch(name):
            remove_if_there(disk, join(gone, name))
    disk.sync_dir(gone)
    if not disk.names(gone):
        disk.remove_dir(gone)
        disk.sync_dir(gone.rpartition("/")[0])


def refused(root: str, error: OSError) -> Error:
    """The error of a checkpoint that the disk did not take."""
    if error.errno in FULL:
        return DiskFull(
            f"{root}: no room on the device for a checkpoint; every record is safe in the WAL, free space and retry"
        )
    return WriteFailed(
        f"{root}: a checkpoint failed ({error}); every record is safe in the WAL, mend the disk and retry"
    )
