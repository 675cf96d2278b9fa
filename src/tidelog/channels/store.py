"""[shell] Where channels lie on disk: one directory each, and in it one file that says what the channel is.

    <data>/channels/<sha256 of the name, in lowercase hex>/
        metadata.bin            what it is; replaced as a whole
        <base>.log  <base>.idx  its messages (`channels/message_log.py`)
        cursor.bin              fifo: how far it was read (`channels/channel_state.py`)
        deleted                 it is no more, whatever else still lies here

When `save` returns, the new metadata survives a power cut, that of a new channel with its directory.
When it raises, the old is in place again; where even that failed the name is in `unsettled`, a crash
shows the whole old or the whole new, and the next save, or `settle`, decides it.

`delete` writes the marker first. From then on the channel is gone: messages are removed before the
metadata, the metadata before the marker, each durably before the next, so a crash anywhere in between
leaves something that the sweep of the next start removes and nobody takes for a channel.

[shell] Everything that lies under channels/, held against everything that vouches for it. Changes nothing.

    metadata.bin         its own checksum, the layout, and that it lies where its name says
    <base>.log .idx      every message against its checksum, the index against the messages
    cursor.bin           of a fifo channel: its checksum, and that it lies inside what the log holds
    deleted, no metadata a note: the next start removes it

A writer may go on: what looks damaged is looked at again, and what was removed since is not held against it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from tidelog.channels.metrics import SUCCESS, ChannelMetrics
from tidelog.channels.rules import directory_name
from tidelog.clock import SystemClock
from tidelog.commitlog import verify
from tidelog.commitlog.recovery import QUARANTINE_DIR
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.engine.check import Finding
from tidelog.errors import Corrupt, Damaged, DiskFull, Error, WriteFailed
from tidelog.formats import channel_meta as layout
from tidelog.formats import log_manifest
from tidelog.formats.channel_meta import ChannelMeta, decode_cursor

CHANNELS_DIR: Final = "channels"
METADATA_FILE: Final = "metadata.bin"
CURSOR_FILE: Final = "cursor.bin"
DELETED_MARKER_FILE: Final = "deleted"
_CHANNEL_DIR_PATTERN: Final = re.compile(r"[0-9a-f]{64}")
_MESSAGE_FILE_PATTERN: Final = re.compile(
    r"\d{20}(\.log|\.idx|\.tmp|\.idx\.rebuilding|\.log\.compacted)|\.(cleaner_checkpoint|consumer_offsets|next_seq|tidelog\.manifest)(\.tmp)?"
)
_OTHER_FILES: Final = frozenset(
    (
        METADATA_FILE,
        f"{METADATA_FILE}.tmp",
        CURSOR_FILE,
        f"{CURSOR_FILE}.tmp",
        f"{DELETED_MARKER_FILE}.tmp",
        ".tidelog.lock",
    )
)
_log = logging.getLogger("tidelog.channels")


class ChannelListing(NamedTuple):
    """What a look at the directory found."""

    live: list[str]
    swept: list[str]
    not_removed: list[str]  # stale, and not all of it could be removed


class ChannelStore:
    def __init__(self, disk: Disk, data: str, metrics: ChannelMetrics) -> None:
        self.disk, self.root, self._metrics = disk, join(data, CHANNELS_DIR), metrics
        self.undecided: dict[str, str] = {}  # directory → the channel whose change is undecided there

    def directory(self, name: str) -> str:
        return join(self.root, name)

    # ── save ──────────────────────────────────────────────────────────────────────────────────

    def save(
        self, meta: ChannelMeta, saved: ChannelMeta | None, *, before_commit: Callable[[], None] | None = None
    ) -> str:
        """Make this the channel's metadata; `before` is what is saved now, None for a new channel. `ready` is called
        in between: what it puts into the directory is there when the metadata is. Return the directory's name."""
        name = directory_name(meta.handler)
        with self._metrics.timed("store_save_duration", "store_saves"):
            content, prepared = layout.encode(meta), saved is not None
            try:
                if saved is None:
                    self._prepare(name)
                    prepared = True
                if before_commit is not None:
                    self._run_before_commit(name, meta.handler, saved, before_commit)
                replace_file(self.disk, join(self.directory(name), METADATA_FILE), content)
            except OSError as error:
                if prepared:  # else it is not ours to clear away
                    self.reconcile(name, meta.handler, saved)
                raise self._write_error(error, f"saving {meta.handler}") from error
            self.undecided.pop(name, None)
        return name

    def _prepare(self, name: str) -> None:
        directory = self.directory(name)
        if self.disk.stat(directory) is not None:
            if self._is_live_directory(directory):
                raise Damaged(
                    f"{directory} holds a channel that could not be read; nothing was changed, look at it first, or "
                    "delete it"
                )
            self._erase(directory)
        self.disk.make_dir(directory)

    def _run_before_commit(
        self, name: str, handler: str, saved: ChannelMeta | None, before_commit: Callable[[], None]
    ) -> None:
        try:
            before_commit()
        except Error:
            if saved is None:
                self.reconcile(name, handler, None)
            raise

    def reconcile(self, name: str, handler: str, meta: ChannelMeta | None) -> bool:
        """After a failed change: bring the disk back to what is true, None for no channel; say whether it is. The
        caller holds the lock of the channel's shard, and what it says is true while it does."""
        directory = self.directory(name)
        try:
            if meta is None:
                if self.disk.stat(directory) is not None:
                    self._erase(directory)
            else:
                if remove_if_exists(self.disk, join(directory, DELETED_MARKER_FILE)):
                    self.disk.sync_dir(directory)
                content, path = layout.encode(meta), join(directory, METADATA_FILE)
                if read_file(self.disk, path) != content:
                    replace_file(self.disk, path, content)
                elif name in self.undecided:
                    self.disk.sync_dir(directory)
        except OSError:
            self.undecided[name] = handler
            return False
        self.undecided.pop(name, None)
        return True

    # ── load ──────────────────────────────────────────────────────────────────────────────────

    def load(self, name: str) -> ChannelMeta:
        """The channel in a directory; Corrupt, NewerFormat or Damaged where it cannot be had."""
        path = join(self.directory(name), METADATA_FILE)
        with self._metrics.timed("store_load_duration", "store_loads"):
            try:
                stat = self.disk.stat(path)
                if stat is not None and stat.size > layout.METADATA_BYTES_MAX:
                    raise layout.oversized_error(path, stat.size)  # before it is read
                content = read_file(self.disk, path)
            except OSError as error:
                raise Damaged(
                    f"{path} cannot be read: {error}; nothing was changed, mend the disk and retry"
                ) from error
            if content is None:
                raise Damaged(f"{path} is gone; nothing was changed, restore it or delete the channel")
            meta = layout.decode(content, path)
            if directory_name(meta.handler) != name:
                raise Corrupt(path, pos=0, reason=f"it is about {meta.handler}, which lies elsewhere")
            return meta

    def list_channels(self, *, sweep: bool) -> ChannelListing:
        """Every channel there is. What is no channel any more is removed, if asked for; directories whose names are
        not ours are never touched."""
        found = ChannelListing([], [], [])
        if self.disk.stat(self.root) is None:
            return found
        for name in self.disk.list_dir(self.root):
            directory = self.directory(name)
            if not self.is_channel_directory(name):
                continue
            if self._is_live_directory(directory):
                found.live.append(name)
            elif sweep:
                _log.warning("removing what is left of a channel in %s", directory)
                (found.swept if self._try_erase(directory) else found.not_removed).append(name)
        return found

    def is_channel_directory(self, name: str) -> bool:
        """Whether a name under the root is that of a channel's directory, dead or alive."""
        stat = self.disk.stat(self.directory(name)) if _CHANNEL_DIR_PATTERN.fullmatch(name) else None
        return stat is not None and stat.is_dir

    def is_live(self, name: str) -> bool:
        return self._is_live_directory(self.directory(name))

    def _is_live_directory(self, directory: str) -> bool:
        has = self.disk.stat
        return has(join(directory, DELETED_MARKER_FILE)) is None and has(join(directory, METADATA_FILE)) is not None

    def _try_erase(self, directory: str) -> bool:
        try:
            whole = self._erase(directory)
        except OSError as error:
            _log.warning("%s could not be removed: %s", directory, error)
            self._metrics.add("store_sweeps", "os_error")
            return False
        self._metrics.add("store_sweeps", SUCCESS if whole else "foreign_files")
        return whole

    # ── delete ────────────────────────────────────────────────────────────────────────────────

    def delete(self, name: str, meta: ChannelMeta | None) -> None:
        """Remove a channel; one that is not there is fine. When it raises, the channel is as before. `meta`: what is
        saved, to go back to; None where it could not be read."""
        directory = self.directory(name)
        if self.disk.stat(directory) is None:
            self._metrics.add("store_deletes", SUCCESS)
            return
        try:
            replace_file(self.disk, join(directory, DELETED_MARKER_FILE), b"")
        except OSError as error:
            self._metrics.add("store_deletes", "os_error")
            if meta is not None:
                self.reconcile(name, meta.handler, meta)
            else:
                with suppress(OSError):
                    remove_if_exists(self.disk, join(directory, DELETED_MARKER_FILE))
            raise self._write_error(error, "deleting a channel") from error
        self.undecided.pop(name, None)
        self._metrics.add("store_deletes", SUCCESS)
        self._try_erase(directory)  # what it leaves, the next start removes

    def _erase(self, directory: str) -> bool:
        """Remove all that is ours in a directory, messages first, the marker last; False where something is left."""
        disk = self.disk
        there = disk.list_dir(directory)
        messages = [name for name in there if _MESSAGE_FILE_PATTERN.fullmatch(name)]
        rest = [name for name in there if name in _OTHER_FILES]
        for group in (messages, rest, [DELETED_MARKER_FILE]):
            if group == rest and QUARANTINE_DIR in there:
                self._remove_quarantine(join(directory, QUARANTINE_DIR))
            for name in group:
                remove_if_exists(disk, join(directory, name))
            if group:
                disk.sync_dir(directory)
        if disk.list_dir(directory):
            return False
        disk.remove_dir(directory)
        disk.sync_dir(self.root)
        return True

    def _remove_quarantine(self, directory: str) -> None:
        for name in self.disk.list_dir(directory):
            with suppress(IsADirectoryError):
                remove_if_exists(self.disk, join(directory, name))
        self.disk.sync_dir(directory)
        with suppress(OSError):  # something of somebody else's lies in it
            self.disk.remove_dir(directory)

    def _write_error(self, error: OSError, action: str) -> Error:
        if error.errno in DISK_FULL_ERRNOS:
            return DiskFull(
                f"{self.root}: no room on the device while {action}; nothing was changed, free space and retry"
            )
        return WriteFailed(f"{self.root}: {action} failed ({error}); nothing was changed, mend the disk and retry")


_ATTEMPTS_MAX: Final = 3


class ChannelCheckResult(NamedTuple):
    """What was found in some channels, and how much of them there is."""

    findings: tuple[Finding, ...]
    channels: int
    messages: int
    bytes: int


class ChannelCheck:
    """Iterate for the findings; how much was looked at is known after the loop. `only`: in these channels."""

    def __init__(self, root: str, *, disk: Disk | None = None, only: Collection[str] | None = None) -> None:
        self._only = only
        self._disk = disk or PosixDisk()
        self._store = ChannelStore(self._disk, root.rstrip("/") or "/", ChannelMetrics(SystemClock()))
        self.channels = self.messages = self.bytes = 0
        self._last_counts = (0, 0)  # messages and bytes of the last look at one channel

    def __iter__(self) -> Iterator[Finding]:
        live = self.live_directories()
        if self._only is None:
            yield from self.find_leftovers(live)
        for name in live if self._only is None else self._only:
            yield from self._check_until_stable(name)
            self.channels += 1
            self.messages, self.bytes = self.messages + self._last_counts[0], self.bytes + self._last_counts[1]

    def live_directories(self) -> list[str]:
        """The names of the directories that hold channels."""
        return list(self._store.list_channels(sweep=False).live)

    def find_leftovers(self, live: Collection[str]) -> Iterator[Finding]:
        for name in self._list_directories():
            if name not in live:
                yield Finding(
                    "leftover", _relative_path(name), None, "of a channel that ended, or was never made", False
                )

    def _list_directories(self) -> list[str]:
        """Directories that could be channels'."""
        if self._disk.stat(self._store.root) is None:
            return []
        return [name for name in self._disk.list_dir(self._store.root) if self._store.is_channel_directory(name)]

    def _check_until_stable(self, name: str) -> list[Finding]:
        """What is found twice alike, or is no damage."""
        before: list[Finding] | None = None
        for _ in range(_ATTEMPTS_MAX):
            found = list(self._check_channel(name))
            if found == before or not any(finding.damage for finding in found):
                return found
            if not self._store.is_live(name):
                return []  # it ended meanwhile
            before = found
        return before or []

    def _check_channel(self, name: str) -> Iterator[Finding]:
        self._last_counts = (0, 0)
        try:
            meta = self._store.load(name)
        except Error as error:
            pos, said = (error.pos, error.reason) if isinstance(error, Corrupt) else (None, str(error))
            yield Finding("channel", _relative_path(name, METADATA_FILE), pos, said)
            return
        bounds = (1, 1)
        directory = self._store.directory(name)
        if any(file.endswith((".log", log_manifest.NAME)) for file in self._disk.list_dir(directory)):
            try:
                verdict = verify(directory, "narwhal", disk=self._disk)
            except Error as error:
                yield Finding("messages", _relative_path(name), None, str(error), topic=meta.handler)
                return
            self._last_counts = (verdict.records, verdict.bytes)
            bounds = (verdict.first, verdict.stop)
            for file, fault in verdict.damage:
                lost = range(fault.seq, max(fault.resume, fault.seq))
                yield Finding("messages", _relative_path(name, file), fault.pos, fault.reason, True, meta.handler, lost)
            for note in verdict.notes:
                yield Finding("messages", _relative_path(name), None, note, False, meta.handler)
        if meta.config.type == "fifo":
            yield from self._check_cursor(name, meta, *bounds)

    def _check_cursor(self, name: str, meta: ChannelMeta, first: int, stop: int) -> Iterator[Finding]:
        content = read_file(self._disk, join(self._store.directory(name), CURSOR_FILE))
        found = None if content is None else decode_cursor(content)
        if content is None:
            said = "it is missing"
        elif found is None:
            said = "it is damaged"
        elif not first <= found <= stop:
            said = f"it says {found}, and the log holds [{first}, {stop})"
        else:
            return
        said += "; its owner clears the channel, or restore it"
        yield Finding("cursor", _relative_path(name, CURSOR_FILE), None, said, topic=meta.handler)


def check_channels(root: str, names: Collection[str]) -> ChannelCheckResult:
    """Examine these channels, for who shares the work out. What ended since it was listed is not held against it."""
    check = ChannelCheck(root, only=names)
    findings = tuple(check)
    return ChannelCheckResult(findings, check.channels, check.messages, check.bytes)


def _relative_path(name: str, file: str = "") -> str:
    return f"{CHANNELS_DIR}/{name}" + (f"/{file}" if file else "")
