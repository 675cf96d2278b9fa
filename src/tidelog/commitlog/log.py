"""The segmented log: one directory of segments, one of which grows.

`SegmentedLog` is the public API; the work is done by functions over `LogState` (append, read, truncate, cleaner,
log_copy). Every method may be called from any thread: writes are serialised, reads wait neither for each other nor for
a stream, a compaction or a restore.

Opening locks the directory before it reads anything, and unlocks it when opening fails: a second writer is refused
before it could change a byte.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, Self

import pyarrow as pa

from tidelog import native
from tidelog.addresses import check_path, path_text
from tidelog.clock import Clock, SystemClock
from tidelog.commitlog import append, cleaner, log_state, read, segment
from tidelog.commitlog.append import Flusher, FlusherState, roll_segment
from tidelog.commitlog.cleaner import CompactionResult, KeyFunction, RetentionResult, truncate_log
from tidelog.commitlog.codec import Batch, Codec
from tidelog.commitlog.codecs import has_segment_files, make_codec
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.metrics import LogCounters, LogMetrics
from tidelog.commitlog.offsets import (
    OFFSETS_FILE,
    ConsumerOffsets,
    OpenRootOffsets,
    ParentRootOffsets,
    PartitionOffsets,
)
from tidelog.commitlog.read import READ_CHUNK_BYTES, Page
from tidelog.commitlog.recovery import (
    DirectorySnapshot,
    RecoveredLog,
    RecoveryReport,
    detect_codec,
    recover_for_reading,
    recover_log,
)
from tidelog.commitlog.segment import LogFiles, LruCache
from tidelog.config import LogConfig
from tidelog.disk import process
from tidelog.disk.durability import WriteLatch, remove_if_exists
from tidelog.disk.interface import Disk, Lock, join
from tidelog.disk.posix import PosixDisk
from tidelog.disk.process import defer_signals_in
from tidelog.errors import BadInput, Damaged, Locked, NotFound
from tidelog.formats import rows as columns
from tidelog.formats.rows import Rows
from tidelog.formats.small_files import MANIFEST_NAME as MANIFEST_FILE
from tidelog.types import Buffer, Record

LOCK_FILE = ".tidelog.lock"
_LOCK_HOLDER = re.compile(rb"(?:pid=(?P<pid>\d{1,10})\n)?(?:server=(?P<server>https?://[A-Za-z0-9.:\[\]_-]{1,300})\n)?")
_LOCK_HOLDER_BYTES_MAX = 512


class OpenedLog(NamedTuple):
    state: LogState
    lock: Lock | None
    offsets: ConsumerOffsets
    flusher: Flusher | None
    partition_offsets: PartitionOffsets  # offsets committed in the parent root, where this log is a partition


def open_log(
    path: str | PathLike[str],
    codec: str | None,
    *,
    read_only: bool,
    disk: Disk | None,
    clock: Clock | None,
    config: LogConfig | None,
    settings: dict[str, Any],
) -> OpenedLog:
    """Open a log. On an error the directory is unlocked and no acked record was dropped."""
    config = make_config(config, settings)
    if config.unverified and not read_only:
        raise BadInput("unverified is for reading: an append needs the hash function; nothing was changed")
    disk, clock = disk or PosixDisk(), clock or SystemClock()
    path = path_text(path, "the directory of a log")
    check_path(path)
    path = path.rstrip("/") or "/"
    names = _list_or_create(disk, path, read_only=read_only)
    the_codec = make_codec(_choose_codec(disk, path, names, codec), config)
    lock = None if read_only else take_lock(disk, path)
    try:
        state = _open_state(path, the_codec, disk, clock, config, writable=not read_only)
        offsets = ConsumerOffsets(
            disk,
            join(path, OFFSETS_FILE),
            check_writable=state.check_writer,
            on_written=lambda: record_offsets_exist(state),
        )
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, OSError):
            raise Damaged(
                f"{path} cannot be opened: {error}; no acked record was dropped, repair the disk and retry"
            ) from error
        raise
    # With an injected clock only its owner knows when an interval is over; the owner calls `tick`.
    needs_flusher = not read_only and config.sync == "interval" and isinstance(clock, SystemClock)
    root = ParentRootOffsets(disk, path, lock=partial(take_lock, disk))
    return OpenedLog(state, lock, offsets, Flusher(state) if needs_flusher else None, root)


def _open_state(path: str, codec: Codec, disk: Disk, clock: Clock, config: LogConfig, *, writable: bool) -> LogState:
    latch = WriteLatch(path)
    counters = LogCounters(clock)
    files = LogFiles(disk, path, codec, LruCache(config.maps_max), LruCache(config.index_cache), counters)
    start_us = clock.monotonic_us()
    verify = codec.verifies_on_open if config.verify_on_open is None else config.verify_on_open
    snapshot: DirectorySnapshot | None = None
    if writable:
        recovered = recover_log(files, latch, writable=True, verify=verify, repair=config.repair)
    else:
        recovered, snapshot = recover_for_reading(files, latch, verify=verify)
    counters.recovery_us = clock.monotonic_us() - start_us
    active = recovered.active
    is_new = active is None and recovered.next_base is None
    if active is None:
        first = codec.first_seq if config.first_seq is None else config.first_seq
        if recovered.next_base is not None:
            first = recovered.next_base
        elif not writable:
            raise NotFound(f"{path} holds no {codec.name} log; nothing was changed, check the path and the codec")
        active = (
            segment.create_segment(files, latch, first, now_us=clock.now_us(), last_ts_us=0)
            if writable
            else segment.missing_active_segment(files, latch, first)
        )
    if recovered.sealed and not active.last_ts_us:
        times = recovered.sealed[-1].time_range()
        active.last_ts_us = times[1] if times else 0
    state = LogState(
        path,
        files,
        config,
        clock,
        latch,
        recovered.sealed,
        active,
        recovered.report,
        writable,
        durable=active.next_seq,
        synced_ms=clock.monotonic_ms(),
        manifest=recovered.manifest,
        has_offsets=disk.stat(join(path, OFFSETS_FILE)) is not None,
        directory_snapshot=snapshot,
    )
    state.count_rebuilds()
    if recovered.manifest is not None:
        state.reserved_seq = active.next_seq if recovered.manifest.clean else recovered.manifest.reserved
        state.has_offsets |= recovered.manifest.offsets
    if writable:
        _advance_numbering(state, recovered)
        log_state.save_if_changed(state, is_new=is_new)
    return state


def _advance_numbering(state: LogState, recovered: RecoveredLog) -> None:
    """Start another segment where seqs above the last record may have been assigned."""
    stored = log_state.load_seq_floor(state.disk, state.path)
    promised = recovered.manifest.next_seq if recovered.manifest is not None else 0
    floor = max(stored, promised, recovered.next_base or 0)
    if state.active.next_seq < floor:
        roll_segment(state, next_base=floor)
    if stored:
        log_state.remove_seq_floor(state.disk, state.path)


def record_offsets_exist(state: LogState) -> None:
    """Record in the manifest that consumers have committed offsets, so that a lost file is noticed."""
    with state.mutex:
        state.has_offsets = True
        if state.manifest is None or not state.manifest.offsets:
            log_state.save_manifest(state)


def _choose_codec(disk: Disk, path: str, names: list[str], requested: str | None) -> str:
    """Choose the codec to open with. A codec that did not write the directory would take its files for torn ones."""
    try:
        detected = detect_codec(disk, path, names)
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, repair the disk and retry") from error
    if detected is not None and requested is not None and requested != detected:
        raise BadInput(
            f"{path} holds a {detected} log, not a {requested} one; nothing was changed, leave the codec out"
        )
    if requested is None and detected is None and has_segment_files(names):
        raise BadInput(
            f"{path} holds a log, and its files do not show which codec; nothing was changed, name the codec"
        )
    return requested or detected or "tide"


def make_config(config: LogConfig | None, settings: dict[str, Any]) -> LogConfig:
    try:
        return replaced(config, **settings) if config is not None else LogConfig(**settings)
    except TypeError as error:
        raise BadInput(f"unknown setting: {error}; see tidelog.config.LogConfig") from None


def _list_or_create(disk: Disk, path: str, *, read_only: bool) -> list[str]:
    stat = disk.stat(path)
    if stat is not None and not stat.is_dir:
        raise BadInput(f"{path} is a file; a log is a directory, nothing was changed")
    if read_only:
        if stat is None:
            raise NotFound(f"there is no log at {path}; nothing was changed, check the path")
        return disk.list_dir(path)
    try:
        disk.make_dir(path)  # also where it exists: its own name may not be durable yet
        return disk.list_dir(path)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BadInput(f"{path} cannot be a log: {error}; nothing was changed, choose another directory") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, repair the disk and retry") from error


def announce_server(lock: Lock, url: str) -> None:
    """Name the address of a server in the lock file of the directory that it serves."""
    lock.describe_holder(f"server={url}\n")


def _locked_error(disk: Disk, path: str) -> Locked:
    content = b""
    with suppress(OSError):  # the file belongs to another user, who can lock us out without saying who it is
        file = disk.open(join(path, LOCK_FILE))
        try:
            content = file.read(0, min(file.size(), _LOCK_HOLDER_BYTES_MAX))
        finally:
            file.close()
    match = _LOCK_HOLDER.fullmatch(content)
    pid = int(match["pid"]) if match and match["pid"] else None
    server = match["server"].decode() if match and match["server"] else None
    if server is not None:
        message = (
            f"{path} is served at {server}; nothing was changed, use it through the server: "
            f'tidelog.connect("{server}"), or open read_only'
        )
    else:
        holder = "" if pid is None else f" (pid {pid})"
        message = (
            f"{path} is being written by another process{holder}; nothing was changed, close it there or open read_only"
        )
    return Locked(message, pid=pid, server=server)


def take_lock(disk: Disk, path: str) -> Lock:
    """Take the lock of a directory. Raises Locked, which names the holder where the lock file does."""
    try:
        return disk.lock(join(path, LOCK_FILE))
    except BlockingIOError:
        raise _locked_error(disk, path) from None
    except OSError as error:
        raise Damaged(f"{path} cannot be locked: {error}; nothing was changed, repair the disk and retry") from error


@defer_signals_in(
    *("append", "append_many", "append_rows", "sync", "sync_concurrently", "tick", "seal", "truncate"),
    *("retain", "remove_expired", "drop_below", "close", "remove"),
)
class SegmentedLog:
    """An append-only log of records on disk, or in memory with a `MemoryDisk`."""

    def __init__(
        self,
        state: LogState,
        lock: Lock | None,
        offsets: ConsumerOffsets,
        flusher: Flusher | None,
        partition_offsets: PartitionOffsets,
    ) -> None:
        self._state, self._lock, self._offsets, self._flusher = state, lock, offsets, flusher
        self._partition_offsets = partition_offsets
        self.on_fork = state.on_fork
        process.register(self)

    # ── open and close ────────────────────────────────────────────────────────────────────────

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        codec: str | None = None,
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
        config: LogConfig | None = None,
        **settings: Any,
    ) -> Self:
        """Open the log in `path`, or create it, and recover from a crash.

        `codec` is tide, rustlog, laminar or narwhal; None takes the one the directory was written with, or tide.
        Settings are those of `LogConfig`. A directory has one writer: a second one is refused (Locked). Any number
        of readers may open it with `read_only`, which changes nothing on disk.
        """
        return cls(
            *open_log(path, codec, read_only=read_only, disk=disk, clock=clock, config=config, settings=settings)
        )

    def close(self) -> None:
        """Make every acked record durable and unlock the directory. Closing twice is harmless. Raises Latched where a
        background sync failed and records acked before it are not durable."""
        state = self._state
        if state.opener_pid is not None:
            return  # a forked child: the log belongs to its parent
        if self._flusher is not None:
            self._flusher.stop()
        with state.writer_lock, state.mutex:
            if state.closed:
                return
            try:
                if state.writable and not state.latch.is_tripped:
                    state.active.roll_back_interrupted()
                    with suppress(OSError):  # the next open rebuilds missing entries
                        state.active.write_index()
                    append.sync_active(state)
                    with suppress(OSError):  # the next open finds the end by scanning
                        log_state.save_clean(state)
                elif self.background.consecutive_failures and state.durable < state.highest:
                    raise state.latch.unsynced_error()
            finally:
                state.closed = True
                state.active.close()
                state.files.mapped_data.clear()
                state.files.cached_sides.clear()
                if self._lock is not None:
                    self._lock.release()

    def remove(self) -> None:
        """Close the log and erase its segments, checkpoint and offsets. Files of other programs stay."""
        state = self._state
        state.check_writable()
        if self._flusher is not None:
            self._flusher.stop()  # before the lock is taken: it may be waiting for it
        with state.writer_lock, state.mutex:
            state.check_writable()
            bases = [*(segment.base for segment in state.sealed), state.active.base]
            with state.step("erasing the log", latch_on=log_state.ManifestReplaced):
                log_state.write_manifest(state, removing=bases)
            state.active.close()
            state.closed = True
            try:
                with state.step("erasing the log"):
                    for base in reversed(bases):
                        state.files.remove_segment(base)
                    for name in (cleaner.CHECKPOINT_FILE, OFFSETS_FILE, log_state.SEQ_FLOOR_FILE, MANIFEST_FILE):
                        remove_if_exists(state.disk, join(state.path, name))
            finally:
                if self._lock is not None:
                    self._lock.release()
            with suppress(OSError):  # a directory with other files in it stays
                remove_if_exists(state.disk, join(state.path, LOCK_FILE))
                state.disk.remove_dir(state.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── write ─────────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        data: bytes,
        *,
        node: bytes = b"",
        tag: bytes = b"",
        meta: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """Write one record and return its seq. The sync policy says whether it is durable on return.

        With `expected`, write only if the record gets that seq (UnexpectedSeq otherwise).
        """
        check_bytes((data,))
        return append.append_batch(self._state, Batch((data,), node, tag, meta), expected)[0]

    def append_many(
        self,
        datas: Sequence[bytes],
        *,
        node: bytes | Sequence[bytes] = b"",
        tag: bytes | Sequence[bytes] = b"",
        meta: bytes | Sequence[bytes] = b"",
        expected: int | None = None,
    ) -> range:
        """Write many records and return their seqs. `node`, `tag`, `meta`: one value for all, or one each.

        A batch that fits one segment is one write. With the tide codec it is then atomic: after a crash all of its
        records exist or none. The other codecs keep a prefix.
        """
        check_bytes(datas)
        return append.append_batch(self._state, Batch(datas, node, tag, meta), expected)

    def append_stream(
        self,
        chunks: Iterable[Buffer],
        *,
        node: bytes = b"",
        tag: bytes = b"",
        meta: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """Write one record from chunks of bytes, without keeping it in memory, and return its seq.

        Its largest size is the rest of the active segment plus the overflow. A stream that is longer, breaks off or
        meets a disk error is rolled back and nothing is visible (StreamBroken).
        """
        return append.append_stream(self._state, chunks, Batch((b"",), node, tag, meta), expected)

    async def append_stream_async(
        self,
        chunks: AsyncIterable[Buffer],
        *,
        node: bytes = b"",
        tag: bytes = b"",
        meta: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """`append_stream` from an async iterable. While it runs, other appends to this log are refused as Busy."""
        return await append.append_stream_async(self._state, chunks, Batch((b"",), node, tag, meta), expected)

    def append_rows(self, rows: Rows) -> None:
        """Write records with their own seqs and times, for import and conversion. Seqs must rise above `highest`;
        seqs left out become holes."""
        append.append_rows(self._state, rows)

    def sync(self) -> None:
        """Make every acked record durable."""
        with self._state.writer_lock, self._state.mutex:
            self._state.check_writable()
            append.sync_active(self._state)

    def sync_concurrently(self) -> None:
        """`sync` beside appends: every record acked before the call is durable on return."""
        self._state.check_writable()
        append.sync_concurrently(self._state)

    def tick(self) -> None:
        """Run the timed tasks: sync when the interval is over, seal when the segment is old. The background thread of
        the `interval` policy calls this; with an injected clock, the owner of the clock does."""
        append.run_due_tasks(self._state)

    def seal(self) -> bool:
        """Seal the active segment and start another; return False where it was empty."""
        with self._state.writer_lock, self._state.mutex:
            self._state.check_writable()
            if self._state.active.size == 0:
                return False
            append.roll_segment(self._state)
            return True

    def truncate(self, seq: int) -> int:
        """Remove every record from `seq` on; the next append gets `seq`. Return the number of removed seqs.

        Groups that had committed more are first moved back to `seq`, or they would skip the records that get these
        seqs next. After a crash in between they process some records again.
        """
        state = self._state
        with state.writer_lock:
            with state.mutex:
                state.check_writable()
                inside = state.lowest <= seq < state.highest
            if inside:  # not under the mutex: a commit takes it after the lock of the offsets
                self._offsets.rewind_to(seq)
                self._partition_offsets.rewind_to(seq)
            return truncate_log(state, seq)

    # ── read ──────────────────────────────────────────────────────────────────────────────────

    def read(self, seq: int) -> Record:
        """Return the record at `seq`. OutOfRange carries the valid range; SeqMissing: compacted; Corrupt: damaged."""
        return read.read_one(self._state, seq)

    def read_range(
        self, first: int, *, limit: int | None = None, bytes_max: int | None = None, skip_damage: bool = False
    ) -> Page:
        """Return a page of records from `first` on, bounded by count and by bytes of data (one record always fits)."""
        return read.read_page(self._state, first, limit=limit, bytes_max=bytes_max, skip_damage=skip_damage)

    def records(
        self, first: int | None = None, stop: int | None = None, *, skip_damage: bool = False
    ) -> Iterator[Record]:
        """Iterate over the records of [first, stop) in order, a few megabytes per read."""
        for rows in self.batches(first, stop, skip_damage=skip_damage):
            yield from columns.iter_records(rows)

    def batches(
        self,
        first: int | None = None,
        stop: int | None = None,
        *,
        bytes_max: int = READ_CHUNK_BYTES,
        skip_damage: bool = False,
    ) -> Iterator[Rows]:
        """Iterate over the records of [first, stop) as columns, without a Python object per record."""
        return read.read_batches(self._state, first, stop, bytes_max=bytes_max, skip_damage=skip_damage)

    def to_arrow(self, first: int | None = None, stop: int | None = None, *, skip_damage: bool = False) -> pa.Table:
        """Return the records of [first, stop) as an Arrow table; contiguous data of a sealed segment is not copied."""
        batches = [columns.to_arrow(rows) for rows in self.batches(first, stop, skip_damage=skip_damage)]
        return pa.Table.from_batches(batches, schema=columns.SCHEMA)

    def seek_time(self, ts_us: int) -> int:
        """Return the first seq whose record is not older than `ts_us`; `highest` where all are older."""
        return read.seek_time(self._state, ts_us)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    # ── keep small ────────────────────────────────────────────────────────────────────────────

    def retain(
        self, *, keep_ms: int | None = None, keep_bytes: int | None = None, high_watermark: int | None = None
    ) -> RetentionResult:
        """Drop the oldest sealed segments past an age or a size. A segment stays if it reaches past the high watermark
        or past the committed offset of a consumer, in this log or in the root that it is a partition of. The active
        one always stays. A second call drops nothing more."""
        return cleaner.apply_retention(
            self._state,
            keep_ms=keep_ms,
            keep_bytes=keep_bytes,
            high_watermark=high_watermark,
            committed=[*self._offsets.committed().values(), *self._partition_offsets.committed().values()],
        )

    def remove_expired(self, age_ms: int) -> int:
        """Drop leading segments older than `age_ms`, the active one too; return the number of dropped seqs. Only age
        counts: committed offsets protect a segment from `retain`, not from this."""
        return cleaner.remove_expired(self._state, age_ms).records

    def drop_below(self, seq: int) -> RetentionResult:
        """Drop the sealed segments that end at or before `seq`. The active one stays."""
        return cleaner.drop_below(self._state, seq)

    def compact(
        self,
        key: KeyFunction,
        *,
        is_tombstone: Callable[[Record], bool] | None = None,
        keep_tombstones_ms: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> CompactionResult:
        """Keep the newest record of every key in the sealed segments, with its seq and time.

        `key` returns a record's key, or None to keep the record. A record for which `is_tombstone` is true is dropped
        too, if it is the newest of its key and older than `keep_tombstones_ms`.
        """
        return cleaner.compact_segments(
            self._state,
            key,
            is_tombstone=is_tombstone,
            keep_tombstones_ms=keep_tombstones_ms,
            progress=progress,
        )

    # ── facts ─────────────────────────────────────────────────────────────────────────────────

    @property
    def path(self) -> str:
        return self._state.path

    @property
    def codec(self) -> str:
        return self._state.codec.name

    @property
    def report(self) -> RecoveryReport:
        """The findings and repairs of the open."""
        return self._state.report

    @property
    def lowest(self) -> int:
        """The first seq of the log. It only rises, except by truncate."""
        return self._state.lowest

    @property
    def highest(self) -> int:
        """One past the last seq: the seq of the next append."""
        return self._state.highest

    @property
    def durable(self) -> int:
        """Every seq below this one survives a power cut."""
        return self._state.durable

    @property
    def high_watermark(self) -> int:
        """One past the last durable record: the same as `durable`."""
        return self._state.durable

    def __len__(self) -> int:
        """Seqs in [lowest, highest), holes included."""
        return self.highest - self.lowest

    @property
    def is_empty(self) -> bool:
        """Whether there is no seq in [lowest, highest). A log whose records were all compacted away is not empty."""
        return self._state.is_empty

    def has_index(self, seq: int) -> bool:
        """Whether `lowest <= seq < highest`. The record may still be missing: compacted away, or damaged."""
        return self._state.has_index(seq)

    def normalize_index(self, seq: int) -> int | None:
        """Return the position of `seq` counted from `lowest`, in [0, len); None where it is outside of the log."""
        return self._state.normalize_index(seq)

    @property
    def size(self) -> int:
        """Bytes on disk: data and side files."""
        with self._state.mutex:
            sealed = sum(segment.size + segment.side_bytes for segment in self._state.sealed)
            return sealed + self._state.active.size + self._state.active.side_bytes

    @property
    def segments(self) -> list[range]:
        """The seq range of every segment, oldest first; the last one is the active one."""
        with self._state.mutex:
            active = self._state.active
            return [*(range(s.base, s.stop) for s in self._state.sealed), range(active.base, active.next_seq)]

    @property
    def offsets(self) -> ConsumerOffsets:
        """The offsets that consumers of this log have committed."""
        return self._offsets

    def _attach_offsets(self, offsets: ConsumerOffsets, topic: str, partition: int) -> None:
        """Use the offsets of the `PartitionedLog` that opened this partition."""
        self._partition_offsets = OpenRootOffsets(offsets, topic, partition)

    @property
    def background(self) -> FlusherState:
        """Counts of the background syncs of the `interval` policy, and their last error."""
        return FlusherState() if self._flusher is None else self._flusher.state

    @property
    def metrics(self) -> LogMetrics:
        """Its metrics: `log.metrics.snapshot()`, `log.metrics.prometheus_text()`."""
        return LogMetrics(self._state)

    @property
    def damage_skipped(self) -> int:
        """How many damaged places readers have skipped with `skip_damage`."""
        return self._state.damage_skipped

    @property
    def _log_state(self) -> LogState:
        """Internal: for `log_copy`, `verify` and the Spark reader."""
        return self._state


def check_bytes(datas: Sequence[object]) -> None:
    """Refuse records that are not bytes before anything is written."""
    if native.all_bytes(datas):
        return
    for kind in set(map(type, datas)) - {bytes}:
        if not issubclass(kind, bytes):
            raise BadInput(f"a record is bytes, not {kind.__name__}; nothing was written, encode it first")
