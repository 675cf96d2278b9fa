"""Channels on disk: one directory each, with its metadata file and its messages, and the check of all of them.

    <data>/channels/<sha256 of the name, in lowercase hex>/
        metadata.bin            owner, members, lists, settings; replaced as a whole
        <base>.log  <base>.idx  messages: a segmented log with the `narwhal` codec
        cursor.bin              fifo: the next seq to pop (`channels/channel_state.py`)
        imported.bin            of a channel that narwhal wrote: what an export needs (`channels/narwhal_data.py`)
        deleted                 marker: the channel is deleted, whatever other files remain

When `save` returns, the new metadata survives a power cut, with its directory if the channel is new. When it raises,
the old metadata is in place again. If even that failed, the name is in `undecided`: a crash leaves the old or the new
metadata as a whole, and the next save or `reconcile` decides.

`delete` writes the marker first; from then on the channel does not exist. Messages are removed before the metadata,
the metadata before the marker, each durably before the next: after a crash in between the next start removes the rest.

Messages: `append` assigns seqs and writes, and acknowledges nothing. After `sync` everything appended before survives a
power cut. `keep_newest` seals the active segment at half of the kept messages and drops whole segments. A failed sync
or a device error while writing latches the log until the directory is opened again: an entry after a hole must never be
acknowledged. A latched log is therefore never closed and reopened.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from tidelog.channels.metrics import SUCCESS, ChannelMetrics
from tidelog.channels.rules import ChannelLimits, directory_name
from tidelog.clock import Clock, SystemClock
from tidelog.commitlog import LogConfig, SegmentedLog, verify
from tidelog.commitlog.recovery import QUARANTINE_DIR
from tidelog.commitlog.segment import SealedSegment
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.engine.backup import SourceFile
from tidelog.engine.check import Finding
from tidelog.errors import Corrupt, Damaged, DiskFull, Error, WriteFailed
from tidelog.formats import small_files
from tidelog.formats import small_files as layout
from tidelog.formats.narwhal_channel import decode_import_record
from tidelog.formats.small_files import ChannelMeta, decode_cursor

CHANNELS_DIR: Final = "channels"
METADATA_FILE: Final = "metadata.bin"
CURSOR_FILE: Final = "cursor.bin"
IMPORT_FILE: Final = "imported.bin"
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
        IMPORT_FILE,
        f"{IMPORT_FILE}.tmp",
        f"{DELETED_MARKER_FILE}.tmp",
        ".tidelog.lock",
    )
)
_BACKED_UP_FILES: Final = frozenset((METADATA_FILE, CURSOR_FILE, IMPORT_FILE, DELETED_MARKER_FILE))
_UNFINISHED_SUFFIXES: Final = (".tmp", ".rebuilding", ".compacted")
_SEAL_MESSAGES_MIN = 64  # a seal takes four syncs: a channel that keeps three messages must not seal at each one
_log = logging.getLogger("tidelog.channels")


class ChannelListing(NamedTuple):
    """The directories under channels/."""

    live: list[str]
    swept: list[str]
    not_removed: list[str]  # stale directories that could not be removed completely


class ChannelStore:
    """The metadata of all channels on disk."""

    def __init__(self, disk: Disk, data: str, metrics: ChannelMetrics) -> None:
        self.disk, self.root, self._metrics = disk, join(data, CHANNELS_DIR), metrics
        self.undecided: dict[str, str] = {}  # directory → its channel, after a change that may or may not be on disk

    def directory(self, name: str) -> str:
        return join(self.root, name)

    # ── save ──────────────────────────────────────────────────────────────────────────────────

    def save(
        self, meta: ChannelMeta, saved: ChannelMeta | None, *, before_commit: Callable[[], None] | None = None
    ) -> str:
        """Save the metadata of a channel and return the name of its directory. `saved` is the current metadata on disk,
        None for a new channel. `before_commit` runs before the metadata is replaced, to write files it implies."""
        name = directory_name(meta.handler)
        with self._metrics.timed("store_save_duration", "store_saves"):
            content, prepared = layout.encode_channel(meta), saved is not None
            try:
                if saved is None:
                    self._prepare(name)
                    prepared = True
                if before_commit is not None:
                    self._run_before_commit(name, meta.handler, saved, before_commit)
                replace_file(self.disk, join(self.directory(name), METADATA_FILE), content)
            except OSError as error:
                if prepared:  # otherwise the directory may belong to an unreadable channel
                    self.reconcile(name, meta.handler, saved)
                raise self._write_error(error, f"saving {meta.handler}") from error
            self.undecided.pop(name, None)
        return name

    def _prepare(self, name: str) -> None:
        directory = self.directory(name)
        if self.disk.stat(directory) is not None:
            if self._is_live_directory(directory):
                raise Damaged(
                    f"{directory} holds a channel that could not be read; nothing was changed, repair or delete it "
                    "first"
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
        """After a failed change, make the disk match `meta`, None for no channel; return whether that succeeded. The
        caller holds the lock of the channel's shard, so `meta` stays current."""
        directory = self.directory(name)
        try:
            if meta is None:
                if self.disk.stat(directory) is not None:
                    self._erase(directory)
            else:
                if remove_if_exists(self.disk, join(directory, DELETED_MARKER_FILE)):
                    self.disk.sync_dir(directory)
                content, path = layout.encode_channel(meta), join(directory, METADATA_FILE)
                if read_file(self.disk, path) != content:
                    replace_file(self.disk, path, content)
                elif name in self.undecided:
                    self.disk.sync_dir(directory)
        except OSError:
            self.undecided[name] = handler
            return False
        self.undecided.pop(name, None)
        return True

    # ── backup ────────────────────────────────────────────────────────────────────────────────

    def open_files(self, name: str) -> list[SourceFile]:
        """The files of a channel as they are now; message files are opened, others are read."""
        directory, files = self.directory(name), list[SourceFile]()
        for file_name in self.disk.list_dir(directory):
            is_message_file = _MESSAGE_FILE_PATTERN.fullmatch(file_name)
            if file_name.endswith(_UNFINISHED_SUFFIXES) or not (is_message_file or file_name in _BACKED_UP_FILES):
                continue
            path = join(directory, file_name)
            relative = f"{CHANNELS_DIR}/{name}/{file_name}"
            if file_name.endswith(".log"):
                file = self.disk.open(path)
                files.append(SourceFile(relative, file, file.size()))
            elif (content := read_file(self.disk, path)) is not None:
                files.append(SourceFile(relative, content, len(content)))
        return files

    # ── load ──────────────────────────────────────────────────────────────────────────────────

    def load(self, name: str) -> ChannelMeta:
        """Return the channel in a directory; raise Corrupt, NewerFormat or Damaged if it cannot be read."""
        path = join(self.directory(name), METADATA_FILE)
        with self._metrics.timed("store_load_duration", "store_loads"):
            try:
                stat = self.disk.stat(path)
                if stat is not None and stat.size > layout.METADATA_BYTES_MAX:
                    raise layout.oversized_channel_error(path, stat.size)
                content = read_file(self.disk, path)
            except OSError as error:
                raise Damaged(
                    f"{path} cannot be read: {error}; nothing was changed, repair the disk and retry"
                ) from error
            if content is None:
                raise Damaged(f"{path} is missing; nothing was changed, restore it or delete the channel")
            meta = layout.decode_channel(content, path)
            if directory_name(meta.handler) != name:
                raise Corrupt(path, pos=0, reason=f"it describes {meta.handler}, which has another directory")
            return meta

    def list_channels(self, *, sweep: bool) -> ChannelListing:
        """List every channel; with `sweep`, remove the remains of deleted ones. Directories with other names are never
        touched."""
        listing = ChannelListing([], [], [])
        if self.disk.stat(self.root) is None:
            return listing
        for name in self.disk.list_dir(self.root):
            directory = self.directory(name)
            if not self.is_channel_directory(name):
                continue
            if self._is_live_directory(directory):
                listing.live.append(name)
            elif sweep:
                _log.warning("removing the remains of a deleted channel in %s", directory)
                (listing.swept if self._try_erase(directory) else listing.not_removed).append(name)
        return listing

    def is_channel_directory(self, name: str) -> bool:
        """Whether a name under the root is the directory of a channel, live or deleted."""
        stat = self.disk.stat(self.directory(name)) if _CHANNEL_DIR_PATTERN.fullmatch(name) else None
        return stat is not None and stat.is_dir

    def is_live(self, name: str) -> bool:
        return self._is_live_directory(self.directory(name))

    def _is_live_directory(self, directory: str) -> bool:
        has = self.disk.stat
        return has(join(directory, DELETED_MARKER_FILE)) is None and has(join(directory, METADATA_FILE)) is not None

    def _try_erase(self, directory: str) -> bool:
        try:
            complete = self._erase(directory)
        except OSError as error:
            _log.warning("%s could not be removed: %s", directory, error)
            self._metrics.add("store_sweeps", "os_error")
            return False
        self._metrics.add("store_sweeps", SUCCESS if complete else "foreign_files")
        return complete

    # ── delete ────────────────────────────────────────────────────────────────────────────────

    def delete(self, name: str, meta: ChannelMeta | None) -> None:
        """Delete a channel; a missing one is no error. When this raises, the channel is as before. `meta`: the saved
        metadata, to restore it after a failure; None if it could not be read."""
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
        self._try_erase(directory)  # the next start removes the rest

    def _erase(self, directory: str) -> bool:
        """Remove Tidelog's files in a directory, messages first, the marker last; return False if files remain."""
        disk = self.disk
        names = disk.list_dir(directory)
        messages = [name for name in names if _MESSAGE_FILE_PATTERN.fullmatch(name)]
        rest = [name for name in names if name in _OTHER_FILES]
        for group in (messages, rest, [DELETED_MARKER_FILE]):
            if group == rest and QUARANTINE_DIR in names:
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
        with suppress(OSError):  # it may hold foreign files
            self.disk.remove_dir(directory)

    def _write_error(self, error: OSError, action: str) -> Error:
        if error.errno in DISK_FULL_ERRNOS:
            return DiskFull(
                f"{self.root}: no space on the device while {action}; nothing was changed, free space and retry"
            )
        return WriteFailed(f"{self.root}: {action} failed ({error}); nothing was changed, repair the disk and retry")


# ── messages ──────────────────────────────────────────────────────────────────────────────────


class Message(NamedTuple):
    """One message, the same for every subscriber."""

    channel: str
    seq: int
    ts_ms: int
    sender: str
    payload: bytes


class ManualSyncClock:
    """A clock that is no SystemClock, so that the log starts no sync thread: the channel decides when to sync."""

    def __init__(self, clock: Clock) -> None:
        self.now_us, self.monotonic_ms, self.monotonic_us = clock.now_us, clock.monotonic_ms, clock.monotonic_us


class MessageLog:
    """Not thread-safe, except that `sync` and `read` may run concurrently with `append`."""

    def __init__(
        self,
        channel: str,
        directory: str,
        *,
        disk: Disk,
        clock: Clock,
        limits: ChannelLimits,
        metrics: ChannelMetrics,
        first_seq: int = 1,
        read_only: bool = False,
        verify: bool = True,
    ) -> None:
        self._channel, self._metrics = channel, metrics
        config = LogConfig(
            sync="interval",
            sync_interval_ms=1 << 40,
            segment_bytes_max=limits.segment_bytes,
            segment_age_ms_max=None,
            first_seq=first_seq,
            maps_max=16,
            verify_on_open=verify,
        )
        with metrics.timed("message_log_recovery_duration"):
            self._log = SegmentedLog.open(
                directory, "narwhal", read_only=read_only, disk=disk, clock=ManualSyncClock(clock), config=config
            )
        # Holes arise only during recovery.
        self._holes = [hole for segment in self._log._log_state.sealed if (hole := _find_hole(segment)) is not None]
        for damage in self._log.report.damage:
            metrics.add("message_log_sealed_segment_truncations")
            metrics.add("message_log_crc_failures", by=damage.fault.resume > damage.fault.seq)

    @property
    def first_seq(self) -> int:
        """The oldest kept seq."""
        return self._log.lowest

    @property
    def last_seq(self) -> int:
        """The newest seq; one less than `first_seq` if the log is empty."""
        return self._log.highest - 1

    def skip_hole(self, seq: int) -> int:
        """Return this seq, or the first one after it that is in no hole."""
        for start, stop in self._holes:
            if start <= seq < stop:
                seq = stop
        return seq

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Ranges of seqs that a power cut lost before their sync and that are not assigned again: first and last."""
        return [(start, stop - 1) for start, stop in self._holes if stop > self.first_seq]

    def count_hole_seqs(self, first: int, stop: int) -> int:
        """Count the seqs of [first, stop) that are in holes."""
        return sum(max(min(end, stop) - max(start, first), 0) for start, end in self._holes)

    def count_from(self, seq: int) -> int:
        """Count the messages from `seq` on, without holes."""
        stop = self.last_seq + 1
        return stop - seq - self.count_hole_seqs(seq, stop)

    def newest_start(self, stop: int, messages: int) -> int:
        """Return the first seq of the newest `messages` below `stop`, without holes."""
        seq = stop - messages
        for start, end in reversed(self._holes):
            if seq < end <= stop:
                seq -= end - start
        return seq

    @property
    def is_synced(self) -> bool:
        """Whether everything appended survives a power cut."""
        return self._log.durable == self._log.highest

    @property
    def is_latched(self) -> bool:
        return self._log._log_state.latch.is_tripped

    @property
    def damage(self) -> list[str]:
        """Damage that recovery found and could not repair."""
        return [line for line in self._log.report.lines() if line.startswith("damage")]

    def append(self, payloads: list[bytes], sender: bytes) -> tuple[int, int]:
        """Append messages; return the first seq and their common timestamp."""
        with self._metrics.timed("message_log_append_duration"):
            seqs = self._log.append_many(payloads, node=sender)
        return seqs.start, self._log._log_state.active.last_ts_us // 1000

    def sync(self) -> None:
        """Make everything appended survive a power cut, concurrently with appends. Raises Latched with `written` None:
        the caller's messages are written, but it is unknown whether they are on disk."""
        with self._metrics.timed("message_log_flush_duration", "message_log_flushes"):
            # Not the check of an append, whose error states that nothing was written.
            self._log._log_state.latch.check_before_sync()
            self._log.sync_concurrently()

    def keep_newest(self, messages: int) -> None:
        """Drop messages before the newest `messages`, in whole segments. Only durable messages count: those that a
        power cut can lose must not displace those that survive it."""
        self._seal_if_large(messages)
        self.drop_below(self.newest_start(self._log.durable, messages))

    def keep_from_seq(self, seq: int, messages: int) -> None:
        """Drop messages before `seq`, in whole segments, each of which holds at most half of `messages`."""
        self._seal_if_large(messages)
        self.drop_below(seq)

    def _seal_if_large(self, messages: int) -> None:
        if self._log.highest - self._log._log_state.active.base >= max(messages // 2, _SEAL_MESSAGES_MIN):
            self._log.seal()
            self._metrics.add("message_log_segments_rolled")

    def drop_below(self, seq: int) -> None:
        """Drop sealed segments that end at or before `seq`."""
        sealed = self._log._log_state.sealed
        if not sealed or sealed[0].stop > seq:
            return
        dropped = self._log.drop_below(seq)
        self._metrics.add("message_log_segments_evicted", by=dropped.segments)
        self._metrics.add("message_log_evicted_bytes", by=dropped.bytes)

    def read(self, first: int, *, limit: int, bytes_max: int, skip_damage: bool = False) -> list[Message]:
        """Return messages from `first` on, within both limits. `first` must be in the log."""
        with self._metrics.timed("message_log_read_duration", "message_log_reads"):
            try:
                page = self._log.read_range(first, limit=limit, bytes_max=bytes_max, skip_damage=skip_damage)
            except Corrupt:
                self._metrics.add("message_log_crc_failures")
                raise
        self._metrics.add("message_log_entries_returned", by=len(page.records))
        channel = self._channel
        return [
            Message(channel, seq, ts_us // 1000, node.decode(), data) for seq, ts_us, data, node, _, _ in page.records
        ]

    def seek_time(self, ts_ms: int) -> int:
        """Return the first seq that is not older than this; one past the last if all are older."""
        return self._log.seek_time(max(ts_ms, 0) * 1000)

    def close(self) -> None:
        self._log.close()


def _find_hole(segment: SealedSegment) -> tuple[int, int] | None:
    """Return the seqs at the end of a segment that a power cut lost before their sync and that are not assigned again
    (docs/decisions/0030). Lost or damaged records are no hole: reading them raises Corrupt."""
    if segment.lost_reason or segment.salvage is not None:
        return None
    content, stop = segment.content(), segment.stop
    end = segment.files.codec.end_seq(content)
    if end >= stop or segment.read(content, end, stop, 1).fault is not None:
        return None
    return end, stop


# ── the check ─────────────────────────────────────────────────────────────────────────────────

_ATTEMPTS_MAX: Final = 3


class ChannelCheckResult(NamedTuple):
    """The findings in some channels, and the amount of data checked."""

    findings: tuple[Finding, ...]
    channels: int
    messages: int
    bytes: int


class ChannelCheck:
    """Verify every file under channels/ without changing anything. Iterate for the findings; the counts are complete
    after the loop. `only`: in these channels.

        metadata.bin         its checksum and layout, and that its name matches its directory
        <base>.log .idx      every message against its checksum, the index against the messages
        imported.bin         its checksum
        cursor.bin           of a fifo channel: its checksum, and that it is within the bounds of the log
        deleted, no metadata a note: the next start removes it

    A writer may run meanwhile: damage counts only if a second look finds the same, and a channel that was deleted
    meanwhile has no findings.
    """

    def __init__(self, root: str, *, only: Collection[str] | None = None) -> None:
        self._only = only
        self._disk = PosixDisk()
        self._store = ChannelStore(self._disk, root.rstrip("/") or "/", ChannelMetrics(SystemClock()))
        self.channels = self.messages = self.bytes = 0
        self._last_counts = (0, 0)  # messages and bytes of the channel checked last

    def __iter__(self) -> Iterator[Finding]:
        live = self.live_directories()
        if self._only is None:
            yield from self.find_leftovers(live)
        for name in live if self._only is None else self._only:
            yield from self._check_until_stable(name)
            self.channels += 1
            self.messages, self.bytes = self.messages + self._last_counts[0], self.bytes + self._last_counts[1]

    def live_directories(self) -> list[str]:
        """Return the names of the directories of channels."""
        return list(self._store.list_channels(sweep=False).live)

    def find_leftovers(self, live: Collection[str]) -> Iterator[Finding]:
        for name in self._list_directories():
            if name not in live:
                yield Finding(
                    "leftover", _relative_path(name), None, "of a channel that was deleted or never created", False
                )

    def _list_directories(self) -> list[str]:
        """Return the names of all directories of channels, live or deleted."""
        if self._disk.stat(self._store.root) is None:
            return []
        return [name for name in self._disk.list_dir(self._store.root) if self._store.is_channel_directory(name)]

    def _check_until_stable(self, name: str) -> list[Finding]:
        """Return the findings of a channel; damage must be found twice alike."""
        before: list[Finding] | None = None
        for _ in range(_ATTEMPTS_MAX):
            findings = list(self._check_channel(name))
            if findings == before or not any(finding.damage for finding in findings):
                return findings
            if not self._store.is_live(name):
                return []  # it was deleted meanwhile
            before = findings
        return before or []

    def _check_channel(self, name: str) -> Iterator[Finding]:
        self._last_counts = (0, 0)
        try:
            meta = self._store.load(name)
        except Error as error:
            pos, reason = (error.pos, error.reason) if isinstance(error, Corrupt) else (None, str(error))
            yield Finding("channel", _relative_path(name, METADATA_FILE), pos, reason)
            return
        bounds = (1, 1)
        directory = self._store.directory(name)
        yield from self._check_import_record(name, meta)
        if any(file.endswith((".log", small_files.MANIFEST_NAME)) for file in self._disk.list_dir(directory)):
            try:
                result = verify(directory, "narwhal", disk=self._disk)
            except Error as error:
                yield Finding("messages", _relative_path(name), None, str(error), topic=meta.handler)
                return
            self._last_counts = (result.records, result.bytes)
            bounds = (result.first, result.stop)
            for file, fault in result.damage:
                lost = range(fault.seq, max(fault.resume, fault.seq))
                yield Finding("messages", _relative_path(name, file), fault.pos, fault.reason, True, meta.handler, lost)
            for note in result.notes:
                yield Finding("messages", _relative_path(name), None, note, False, meta.handler)
        if meta.config.type == "fifo":
            yield from self._check_cursor(name, meta, *bounds)

    def _check_import_record(self, name: str, meta: ChannelMeta) -> Iterator[Finding]:
        content = read_file(self._disk, join(self._store.directory(name), IMPORT_FILE))
        try:
            if content is not None:
                decode_import_record(content, IMPORT_FILE)
        except Error as error:
            reason = error.reason if isinstance(error, Corrupt) else str(error)
            problem = f"{reason}; only an export to narwhal needs it, remove it to export without it"
            yield Finding("channel", _relative_path(name, IMPORT_FILE), None, problem, topic=meta.handler)

    def _check_cursor(self, name: str, meta: ChannelMeta, first: int, stop: int) -> Iterator[Finding]:
        content = read_file(self._disk, join(self._store.directory(name), CURSOR_FILE))
        cursor = None if content is None else decode_cursor(content)
        if content is None:
            problem = "it is missing"
        elif cursor is None:
            problem = "it is damaged"
        elif not first <= cursor <= stop:
            problem = f"its cursor is {cursor}, but the log holds [{first}, {stop})"
        else:
            return
        problem += "; restore it, or its owner can clear the channel"
        yield Finding("cursor", _relative_path(name, CURSOR_FILE), None, problem, topic=meta.handler)


def check_channels(root: str, names: Collection[str]) -> ChannelCheckResult:
    """Check these channels. One that was deleted since it was listed has no findings."""
    check = ChannelCheck(root, only=names)
    findings = tuple(check)
    return ChannelCheckResult(findings, check.channels, check.messages, check.bytes)


def _relative_path(name: str, file: str = "") -> str:
    return f"{CHANNELS_DIR}/{name}" + (f"/{file}" if file else "")
