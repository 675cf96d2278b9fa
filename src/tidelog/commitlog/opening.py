"""[shell] Opening a log: settings, the directory, its lock, recovery, and whoever keeps the interval.

The lock comes before anything is looked at and is let go when opening fails, so that a second
writer is refused before it could change a byte.
"""

from __future__ import annotations

from dataclasses import replace as replaced
from functools import partial
from typing import Any, NamedTuple

from tidelog.addresses import check_path
from tidelog.clock import Clock, SystemClock
from tidelog.commitlog import manifest, numbering, roll
from tidelog.commitlog.append import roll_over
from tidelog.commitlog.cache import Lru
from tidelog.commitlog.codec import Codec
from tidelog.commitlog.codecs import codec_named, is_ours
from tidelog.commitlog.flusher import Flusher
from tidelog.commitlog.offsets import FILE as OFFSETS_FILE
from tidelog.commitlog.offsets import ConsumerOffsets, PartitionOffsets, RootOffsets
from tidelog.commitlog.recovery import Found, Seen, codec_of, recover, recover_beside
from tidelog.commitlog.segment import Files
from tidelog.commitlog.state import State
from tidelog.config import LogConfig
from tidelog.disk.latch import Latch
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, Lock, join
from tidelog.errors import BadInput, Damaged, Locked, NotFound

LOCK_FILE = ".tidelog.lock"


class Opened(NamedTuple):
    state: State
    lock: Lock | None
    offsets: ConsumerOffsets
    flusher: Flusher | None
    root: PartitionOffsets  # what the root above has committed, where this log is a partition


def opened(
    path: str,
    codec: str | None,
    *,
    read_only: bool,
    disk: Disk | None,
    clock: Clock | None,
    config: LogConfig | None,
    settings: dict[str, Any],
) -> Opened:
    """Everything a log needs to be used; on an error the directory is unlocked and nothing acked was dropped."""
    config = configured(config, settings)
    disk, clock = disk or PosixDisk(), clock or SystemClock()
    check_path(path)
    path = str(path).rstrip("/") or "/"
    names = _names(disk, path, read_only=read_only)
    the_codec = codec_named(_which(disk, path, names, codec), config)
    lock = None if read_only else take_lock(disk, path)
    try:
        state = _state(path, the_codec, disk, clock, config, writable=not read_only)
        offsets = ConsumerOffsets(
            disk, join(path, OFFSETS_FILE), may_write=state.check_owned, on_written=lambda: note_offsets(state)
        )
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, OSError):
            raise Damaged(
                f"{path} cannot be opened: {error}; nothing acked was dropped, mend the disk and retry"
            ) from error
        raise
    # With an injected clock nobody can say when an interval is over but its owner, who calls `tick`.
    timed = not read_only and config.sync == "interval" and isinstance(clock, SystemClock)
    root = RootOffsets(disk, path, lock=partial(take_lock, disk))
    return Opened(state, lock, offsets, Flusher(state) if timed else None, root)


def _state(path: str, codec: Codec, disk: Disk, clock: Clock, config: LogConfig, *, writable: bool) -> State:
    latch = Latch(path)
    files = Files(disk, path, codec, Lru(config.maps_max), Lru(config.index_cache))
    verify = codec.full_check_on_open if config.verify_on_open is None else config.verify_on_open
    seen: Seen | None = None
    if writable:
        found = recover(files, latch, writable=True, verify=verify, repair=config.repair)
    else:
        found, seen = recover_beside(files, latch, verify=verify)
    active = found.active
    fresh = active is None and found.next_base is None
    if active is None:
        first = codec.first_seq if config.first_seq is None else config.first_seq
        if found.next_base is not None:
            first = found.next_base
        elif not writable:
            raise NotFound(f"{path} holds no {codec.name} log; nothing was changed, check the path and the codec")
        active = (
            roll.birth(files, latch, first, now_us=clock.now_us(), last_ts_us=0)
            if writable
            else roll.absent(files, latch, first)
        )
    if found.sealed and not active.last_ts_us:
        times = found.sealed[-1].times()
        active.last_ts_us = times[1] if times else 0
    state = State(
        path,
        files,
        config,
        clock,
        latch,
        found.sealed,
        active,
        found.report,
        writable,
        durable=active.next_seq,
        synced_ms=clock.monotonic_ms(),
        manifest=found.manifest,
        has_offsets=disk.stat(join(path, OFFSETS_FILE)) is not None,
        seen=seen,
    )
    if found.manifest is not None:
        state.reserved = active.next_seq if found.manifest.clean else found.manifest.reserved
        state.has_offsets |= found.manifest.offsets
    if writable:
        _number_on(state, found)
        manifest.save_if_new(state, fresh=fresh)
    return state


def _number_on(state: State, found: Found) -> None:
    """Start another segment where seqs were given that the last one does not know of."""
    held = numbering.held(state.disk, state.path)
    promised = found.manifest.next_seq if found.manifest is not None else 0
    floor = max(held, promised, found.next_base or 0)
    if state.active.next_seq < floor:
        roll_over(state, next_base=floor)
    if held:
        numbering.let_go(state.disk, state.path)


def note_offsets(state: State) -> None:
    """Let the manifest know that consumers have committed offsets: a lost file is then seen."""
    with state.mutex:
        state.has_offsets = True
        if state.manifest is None or not state.manifest.offsets:
            manifest.save(state)


def _which(disk: Disk, path: str, names: list[str], asked: str | None) -> str:
    """The codec to open with. Another one than wrote the directory would take its files for torn ones of its own."""
    try:
        there = codec_of(disk, path, names)
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, repair the disk and retry") from error
    if there is not None and asked is not None and asked != there:
        raise BadInput(f"{path} holds a {there} log, not a {asked} one; nothing was changed, leave the codec out")
    if asked is None and there is None and is_ours(names):
        raise BadInput(f"{path} holds a log whose codec its files do not tell; nothing was changed, name the codec")
    return asked or there or "tide"


def configured(config: LogConfig | None, settings: dict[str, Any]) -> LogConfig:
    try:
        return replaced(config, **settings) if config is not None else LogConfig(**settings)
    except TypeError as error:
        raise BadInput(f"unknown setting: {error}; see tidelog.config.LogConfig") from None


def _names(disk: Disk, path: str, *, read_only: bool) -> list[str]:
    found = disk.stat(path)
    if found is not None and not found.is_dir:
        raise BadInput(f"{path} is a file; a log is a directory, nothing was changed")
    if read_only:
        if found is None:
            raise NotFound(f"there is no log at {path}; nothing was changed, check the path")
        return disk.names(path)
    try:
        disk.make_dir(path)  # also where it is there: its own name may not be durable yet
        return disk.names(path)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BadInput(f"{path} cannot be a log: {error}; nothing was changed, choose another place") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, mend the disk and retry") from error


def take_lock(disk: Disk, path: str) -> Lock:
    try:
        return disk.lock(join(path, LOCK_FILE))
    except BlockingIOError:
        raise Locked(
            f"{path} is being written by another process; nothing was changed, close it there or open read_only"
        ) from None
    except OSError as error:
        raise Damaged(f"{path} cannot be locked: {error}; nothing was changed, mend the disk and retry") from error
