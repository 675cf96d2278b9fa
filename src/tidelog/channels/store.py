"""[shell] Where channels lie on disk: one directory each, and in it one file that says what the channel is.

    <data>/channels/<sha256 of the name, in lowercase hex>/
        metadata.bin            what it is; replaced as a whole
        <base>.log  <base>.idx  its messages (`channels/messages.py`)
        cursor.bin              fifo: how far it was read (`channels/fifo.py`)
        deleted                 it is no more, whatever else still lies here

When `save` returns, the new metadata survives a power cut, that of a new channel with its directory.
When it raises, the old is in place again; where even that failed the name is in `unsettled`, a crash
shows the whole old or the whole new, and the next save, or `settle`, decides it.

`delete` writes the marker first. From then on the channel is gone: messages are removed before the
metadata, the metadata before the marker, each durably before the next, so a crash anywhere in between
leaves something that the sweep of the next start removes and nobody takes for a channel.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from tidelog.channels.metrics import SUCCESS, Metrics
from tidelog.channels.names import directory_name
from tidelog.commitlog.recovery import QUARANTINE
from tidelog.disk.atomic import read_all, remove_if_there, replace
from tidelog.disk.latch import FULL
from tidelog.disk.seam import Disk, join
from tidelog.errors import Corrupt, Damaged, DiskFull, Error, WriteFailed
from tidelog.formats import channel as layout
from tidelog.formats.channel import Meta

DIRECTORY: Final = "channels"
METADATA: Final = "metadata.bin"
CURSOR: Final = "cursor.bin"
DELETED: Final = "deleted"
_CHANNEL: Final = re.compile(r"[0-9a-f]{64}")
_MESSAGES: Final = re.compile(
    r"\d{20}(\.log|\.idx|\.tmp|\.idx\.rebuilding|\.log\.compacted)|\.(cleaner_checkpoint|consumer_offsets|next_seq|tidelog\.manifest)(\.tmp)?"
)
_REST: Final = frozenset((METADATA, f"{METADATA}.tmp", CURSOR, f"{CURSOR}.tmp", f"{DELETED}.tmp", ".tidelog.lock"))
_log = logging.getLogger("tidelog.channels")


class Listed(NamedTuple):
    """What a look at the directory found."""

    live: list[str]
    swept: list[str]
    left: list[str]  # stale, and not all of it could be removed


class ChannelStore:
    def __init__(self, disk: Disk, data: str, metrics: Metrics) -> None:
        self.disk, self.root, self._metrics = disk, join(data, DIRECTORY), metrics
        self.unsettled: dict[str, str] = {}  # directory → the channel whose change is undecided there

    def directory(self, name: str) -> str:
        return join(self.root, name)

    # ── save ──────────────────────────────────────────────────────────────────────────────────

    def save(self, meta: Meta, before: Meta | None, *, ready: Callable[[], None] | None = None) -> str:
        """Make this the channel's metadata; `before` is what is saved now, None for a new channel. `ready` is called
        in between: what it puts into the directory is there when the metadata is. Return the directory's name."""
        name = directory_name(meta.handler)
        with self._metrics.timed("store_save_duration", "store_saves"):
            content, prepared = layout.encode(meta), before is not None
            try:
                if before is None:
                    self._prepare(name)
                    prepared = True
                if ready is not None:
                    self._made_ready(name, meta.handler, before, ready)
                replace(self.disk, join(self.directory(name), METADATA), content)
            except OSError as error:
                if prepared:  # else it is not ours to clear away
                    self.settle(name, meta.handler, before)
                raise self._refused(error, f"saving {meta.handler}") from error
            self.unsettled.pop(name, None)
        return name

    def _prepare(self, name: str) -> None:
        directory = self.directory(name)
        if self.disk.stat(directory) is not None:
            if self._is_live(directory):
                raise Damaged(
                    f"{directory} holds a channel that could not be read; nothing was changed, look at it first, or "
                    "delete it"
                )
            self._erase(directory)
        self.disk.make_dir(directory)

    def _made_ready(self, name: str, handler: str, before: Meta | None, ready: Callable[[], None]) -> None:
        try:
            ready()
        except Error:
            if before is None:
                self.settle(name, handler, None)
            raise

    def settle(self, name: str, handler: str, meta: Meta | None) -> bool:
        """After a failed change: bring the disk back to what is true, None for no channel; say whether it is. The
        caller holds the lock of the channel's shard, and what it says is true while it does."""
        directory = self.directory(name)
        try:
            if meta is None:
                if self.disk.stat(directory) is not None:
                    self._erase(directory)
            else:
                if remove_if_there(self.disk, join(directory, DELETED)):
                    self.disk.sync_dir(directory)
                content, path = layout.encode(meta), join(directory, METADATA)
                if read_all(self.disk, path) != content:
                    replace(self.disk, path, content)
                elif name in self.unsettled:
                    self.disk.sync_dir(directory)
        except OSError:
            self.unsettled[name] = handler
            return False
        self.unsettled.pop(name, None)
        return True

    # ── load ──────────────────────────────────────────────────────────────────────────────────

    def load(self, name: str) -> Meta:
        """The channel in a directory; Corrupt, NewerFormat or Damaged where it cannot be had."""
        path = join(self.directory(name), METADATA)
        with self._metrics.timed("store_load_duration", "store_loads"):
            try:
                stat = self.disk.stat(path)
                if stat is not None and stat.size > layout.METADATA_BYTES_MAX:
                    raise layout.oversized(path, stat.size)  # before it is read
                content = read_all(self.disk, path)
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

    def listed(self, *, sweep: bool) -> Listed:
        """Every channel there is. What is no channel any more is removed, if asked for; directories whose names are
        not ours are never touched."""
        found = Listed([], [], [])
        if self.disk.stat(self.root) is None:
            return found
        for name in self.disk.names(self.root):
            directory = self.directory(name)
            if not self.is_ours(name):
                continue
            if self._is_live(directory):
                found.live.append(name)
            elif sweep:
                _log.warning("removing what is left of a channel in %s", directory)
                (found.swept if self._swept(directory) else found.left).append(name)
        return found

    def is_ours(self, name: str) -> bool:
        """Whether a name under the root is that of a channel's directory, dead or alive."""
        stat = self.disk.stat(self.directory(name)) if _CHANNEL.fullmatch(name) else None
        return stat is not None and stat.is_dir

    def is_live(self, name: str) -> bool:
        return self._is_live(self.directory(name))

    def _is_live(self, directory: str) -> bool:
        has = self.disk.stat
        return has(join(directory, DELETED)) is None and has(join(directory, METADATA)) is not None

    def _swept(self, directory: str) -> bool:
        try:
            whole = self._erase(directory)
        except OSError as error:
            _log.warning("%s could not be removed: %s", directory, error)
            self._metrics.add("store_sweeps", "os_error")
            return False
        self._metrics.add("store_sweeps", SUCCESS if whole else "foreign_files")
        return whole

    # ── delete ────────────────────────────────────────────────────────────────────────────────

    def delete(self, name: str, meta: Meta | None) -> None:
        """Remove a channel; one that is not there is fine. When it raises, the channel is as before. `meta`: what is
        saved, to go back to; None where it could not be read."""
        directory = self.directory(name)
        if self.disk.stat(directory) is None:
            self._metrics.add("store_deletes", SUCCESS)
            return
        try:
            replace(self.disk, join(directory, DELETED), b"")
        except OSError as error:
            self._metrics.add("store_deletes", "os_error")
            if meta is not None:
                self.settle(name, meta.handler, meta)
            else:
                with suppress(OSError):
                    remove_if_there(self.disk, join(directory, DELETED))
            raise self._refused(error, "deleting a channel") from error
        self.unsettled.pop(name, None)
        self._metrics.add("store_deletes", SUCCESS)
        self._swept(directory)  # what it leaves, the next start removes

    def _erase(self, directory: str) -> bool:
        """Remove all that is ours in a directory, messages first, the marker last; False where something is left."""
        disk = self.disk
        there = disk.names(directory)
        messages = [name for name in there if _MESSAGES.fullmatch(name)]
        rest = [name for name in there if name in _REST]
        for group in (messages, rest, [DELETED]):
            if group == rest and QUARANTINE in there:
                self._empty(join(directory, QUARANTINE))
            for name in group:
                remove_if_there(disk, join(directory, name))
            if group:
                disk.sync_dir(directory)
        if disk.names(directory):
            return False
        disk.remove_dir(directory)
        disk.sync_dir(self.root)
        return True

    def _empty(self, directory: str) -> None:
        for name in self.disk.names(directory):
            with suppress(IsADirectoryError):
                remove_if_there(self.disk, join(directory, name))
        self.disk.sync_dir(directory)
        with suppress(OSError):  # something of somebody else's lies in it
            self.disk.remove_dir(directory)

    def _refused(self, error: OSError, what: str) -> Error:
        if error.errno in FULL:
            return DiskFull(
                f"{self.root}: no room on the device while {what}; nothing was changed, free space and retry"
            )
        return WriteFailed(f"{self.root}: {what} failed ({error}); nothing was changed, mend the disk and retry")
