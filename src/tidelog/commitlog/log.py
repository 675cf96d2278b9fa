"""The segmented log: one directory of segments, one of which grows.

This class is the door; what happens behind it is one verb a module (append, stream, read,
truncate, clean, compaction, restore). Every method may be called from any thread: writes take
turns, reads do not wait for each other's disk, nor for a stream, a compaction or a restore at work.

[shell] Opening a log: settings, the directory, its lock, recovery, and whoever keeps the interval.

The lock comes before anything is looked at and is let go when opening fails, so that a second
writer is refused before it could change a byte.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa

from tidelog import native
from tidelog.addresses import check_path
from tidelog.clock import Clock, SystemClock
from tidelog.commitlog import append, cleaner, log_state, read, segment
from tidelog.commitlog import append as stream
from tidelog.commitlog import truncate as truncating
from tidelog.commitlog.append import Flusher, FlusherState, roll_segment
from tidelog.commitlog.cleaner import CompactionResult, KeyFunction, RetentionResult
from tidelog.commitlog.codec import Batch, Codec
from tidelog.commitlog.codecs import has_segment_files, make_codec
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.offsets import OFFSETS_FILE as OFFSETS_FILE
from tidelog.commitlog.offsets import ConsumerOffsets, OpenRootOffsets, ParentRootOffsets, PartitionOffsets
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
from tidelog.disk import fork
from tidelog.disk.durability import WriteLatch, remove_if_exists
from tidelog.disk.interface import Disk, Lock, join
from tidelog.disk.interrupts import defer_signals_in
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, Damaged, Locked, NotFound
from tidelog.formats import rows as columns
from tidelog.formats.log_manifest import NAME as MANIFEST_FILE
from tidelog.formats.rows import Rows
from tidelog.types import Buffer, Record

LOCK_FILE = ".tidelog.lock"


class OpenedLog(NamedTuple):
    state: LogState
    lock: Lock | None
    offsets: ConsumerOffsets
    flusher: Flusher | None
    partition_offsets: PartitionOffsets  # what the root above has committed, where this log is a partition


def open_log(
    path: str,
    codec: str | None,
    *,
    read_only: bool,
    disk: Disk | None,
    clock: Clock | None,
    config: LogConfig | None,
    settings: dict[str, Any],
) -> OpenedLog:
    """Everything a log needs to be used; on an error the directory is unlocked and nothing acked was dropped."""
    config = make_config(config, settings)
    disk, clock = disk or PosixDisk(), clock or SystemClock()
    check_path(path)
    path = str(path).rstrip("/") or "/"
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
                f"{path} cannot be opened: {error}; nothing acked was dropped, mend the disk and retry"
            ) from error
        raise
    # With an injected clock nobody can say when an interval is over but its owner, who calls `tick`.
    timed = not read_only and config.sync == "interval" and isinstance(clock, SystemClock)
    root = ParentRootOffsets(disk, path, lock=partial(take_lock, disk))
    return OpenedLog(state, lock, offsets, Flusher(state) if timed else None, root)


def _open_state(path: str, codec: Codec, disk: Disk, clock: Clock, config: LogConfig, *, writable: bool) -> LogState:
    latch = WriteLatch(path)
    files = LogFiles(disk, path, codec, LruCache(config.maps_max), LruCache(config.index_cache))
    verify = codec.verifies_on_open if config.verify_on_open is None else config.verify_on_open
    seen: DirectorySnapshot | None = None
    if writable:
        found = recover_log(files, latch, writable=True, verify=verify, repair=config.repair)
    else:
        found, seen = recover_for_reading(files, latch, verify=verify)
    active = found.active
    fresh = active is None and found.next_base is None
    if active is None:
        first = codec.first_seq if config.first_seq is None else config.first_seq
        if found.next_base is not None:
            first = found.next_base
        elif not writable:
            raise NotFound(f"{path} holds no {codec.name} log; nothing was changed, check the path and the codec")
        active = (
            segment.create_segment(files, latch, first, now_us=clock.now_us(), last_ts_us=0)
            if writable
            else segment.missing_active_segment(files, latch, first)
        )
    if found.sealed and not active.last_ts_us:
        times = found.sealed[-1].time_range()
        active.last_ts_us = times[1] if times else 0
    state = LogState(
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
        directory_snapshot=seen,
    )
    if found.manifest is not None:
        state.reserved_seq = active.next_seq if found.manifest.clean else found.manifest.reserved
        state.has_offsets |= found.manifest.offsets
    if writable:
        _advance_numbering(state, found)
        log_state.save_if_changed(state, is_new=fresh)
    return state


def _advance_numbering(state: LogState, recovered: RecoveredLog) -> None:
    """Start another segment where seqs were given that the last one does not know of."""
    held = log_state.load_seq_floor(state.disk, state.path)
    promised = recovered.manifest.next_seq if recovered.manifest is not None else 0
    floor = max(held, promised, recovered.next_base or 0)
    if state.active.next_seq < floor:
        roll_segment(state, next_base=floor)
    if held:
        log_state.remove_seq_floor(state.disk, state.path)


def record_offsets_exist(state: LogState) -> None:
    """Let the manifest know that consumers have committed offsets: a lost file is then seen."""
    with state.mutex:
        state.has_offsets = True
        if state.manifest is None or not state.manifest.offsets:
            log_state.save_manifest(state)


def _choose_codec(disk: Disk, path: str, names: list[str], requested: str | None) -> str:
    """The codec to open with. Another one than wrote the directory would take its files for torn ones of its own."""
    try:
        there = detect_codec(disk, path, names)
    except OSError as error:
        raise Damaged(f"{path} cannot be opened: {error}; nothing was changed, repair the disk and retry") from error
    if there is not None and requested is not None and requested != there:
        raise BadInput(f"{path} holds a {there} log, not a {requested} one; nothing was changed, leave the codec out")
    if requested is None and there is None and has_segment_files(names):
        raise BadInput(f"{path} holds a log whose codec its files do not tell; nothing was changed, name the codec")
    return requested or there or "tide"


def make_config(config: LogConfig | None, settings: dict[str, Any]) -> LogConfig:
    try:
        return replaced(config, **settings) if config is not None else LogConfig(**settings)
    except TypeError as error:
        raise BadInput(f"unknown setting: {error}; see tidelog.config.LogConfig") from None


def _list_or_create(disk: Disk, path: str, *, read_only: bool) -> list[str]:
    found = disk.stat(path)
    if found is not None and not found.is_dir:
        raise BadInput(f"{path} is a file; a log is a directory, nothing was changed")
    if read_only:
        if found is None:
            raise NotFound(f"there is no log at {path}; nothing was changed, check the path")
        return disk.list_dir(path)
    try:
        disk.make_dir(path)  # also where it is there: its own name may not be durable yet
        return disk.list_dir(path)
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
        fork.register(self)

    # ── open and close ────────────────────────────────────────────────────────────────────────

    @classmethod
    def open(
        cls,
        path: str,
        codec: str | None = None,
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
        config: LogConfig | None = None,
        **settings: Any,
    ) -> Self:
        """Open the log in `path`, making it where there is none, and recover what a crash left behind.

        `codec` is tide, rustlog, laminar or narwhal; None takes the one the directory was written with, or tide.
        Settings are those of `LogConfig`. One writer per directory: a second one is refused (Locked). Any number
        of readers may open it with `read_only`, which changes nothing on disk.
        """
        return cls(
            *open_log(path, codec, read_only=read_only, disk=disk, clock=clock, config=config, settings=settings)
        )

    def close(self) -> None:
        """Make everything acked durable and let go of the directory. Closing twice is harmless. Raises Latched where a
        sync of the background thread failed and records that were acked before it still wait for one."""
        state = self._state
        if state.opener_pid is not None:
            return  # a forked child: the log is its parent's
        if self._flusher is not None:
            self._flusher.stop()
        with state.writer_lock, state.mutex:
            if state.closed:
                return
            try:
                if state.writable and not state.latch.is_tripped:
                    state.active.roll_back_interrupted()
                    with suppress(OSError):  # the next one to open it makes what is missing
                        state.active.write_index()
                    append.sync_active(state)
                    with suppress(OSError):  # nothing is lost: the next open finds the end by reading
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
        """Close the log and erase it: its segments, its checkpoint, its offsets. Foreign files stay."""
        state = self._state
        state.check_writable()
        if self._flusher is not None:
            self._flusher.stop()  # before the lock is taken: it may be waiting for it
        with state.writer_lock, state.mutex:
            state.check_writable()
            bases = [*(segment.base for segment in state.sealed), state.active.base]
            try:
                log_state.announce_removal(state, bases)
            except OSError as error:
                step = (
                    state.latch.trip if isinstance(error, log_state.ManifestReplaced) else state.latch.retryable_error
                )
                raise step(error, "erasing the log") from error
            state.active.close()
            state.closed = True
            try:
                for base in reversed(bases):
                    state.files.remove_segment(base)
                for name in (cleaner.CHECKPOINT_FILE, OFFSETS_FILE, log_state.SEQ_FLOOR_FILE, MANIFEST_FILE):
                    remove_if_exists(state.disk, join(state.path, name))
            except OSError as error:
                raise state.latch.retryable_error(error, "erasing the log") from error
            finally:
                if self._lock is not None:
                    self._lock.release()
            with suppress(OSError):  # the directory stays when something else lies in it
                remove_if_exists(state.disk, join(state.path, LOCK_FILE))
                state.disk.remove_dir(state.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Write one record; return its seq. What the return promises is the sync policy's word.

        With `expected`, write only if that is the seq it will get (UnexpectedSeq otherwise).
        """
        _check_bytes((data,))
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
        """Write many records; return their seqs. `node`, `tag`, `meta`: one value for all, or one each.

        A batch that fits one segment is written with one write. With the tide codec it is then atomic: after a
        crash all of it is there or nothing. The others keep a prefix.
        """
        _check_bytes(datas)
        return append.append_batch(self._state, Batch(datas, node, tag, meta), expected)

    def append_stream(
        self,
        chunks: Iterable[Buffer],
        *,
        node: bytes = b"",
        tag: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """Write one record from chunks of bytes, without holding it in memory; return its seq.

        The ceiling is what is left of the active segment plus the overflow. Over-long, broken off, or refused
        by the disk: it is rolled back to the byte and nothing is visible (StreamBroken).
        """
        return stream.append_stream(self._state, chunks, Batch((b"",), node, tag), expected)

    async def append_stream_async(
        self,
        chunks: AsyncIterable[Buffer],
        *,
        node: bytes = b"",
        tag: bytes = b"",
        expected: int | None = None,
    ) -> int:
        """`append_stream` from an async iterable. While it runs, other appends to this log are refused as Busy."""
        return await stream.append_stream_async(self._state, chunks, Batch((b"",), node, tag), expected)

    def append_rows(self, rows: Rows) -> None:
        """Write records that already have seqs and times, as they are: for import and conversion. Seqs must
        rise above what the log holds; what they leave out is a hole."""
        append.append_rows(self._state, rows)

    def sync(self) -> None:
        """Make everything acked so far survive a power cut."""
        with self._state.writer_lock, self._state.mutex:
            self._state.check_writable()
            append.sync_active(self._state)

    def sync_concurrently(self) -> None:
        """`sync` while others go on appending: what was acked before the call survives a power cut on return."""
        self._state.check_writable()
        append.sync_concurrently(self._state)

    def tick(self) -> None:
        """Do what is due by time: sync when the interval is over, seal when the segment is old. The background
        thread of the `interval` policy calls this; with an injected clock, the owner of the clock does."""
        append.run_due_tasks(self._state)

    def seal(self) -> bool:
        """Seal the active segment and start another; say whether there was anything to seal."""
        with self._state.writer_lock, self._state.mutex:
            self._state.check_writable()
            if self._state.active.size == 0:
                return False
            append.roll_segment(self._state)
            return True

    def truncate(self, seq: int) -> int:
        """Forget every record from `mark` on; the next append gets `mark`. Return how many seqs that were.

        Groups that had committed more are brought back to `mark` first, or they would pass over the records that
        get these seqs next. A crash in between leaves them to process some records again.
        """
        state = self._state
        with state.writer_lock:
            with state.mutex:
                state.check_writable()
                inside = state.lowest <= seq < state.highest
            if inside:  # not under the mutex: a commit takes it after the lock of the offsets
                self._offsets.rewind_to(seq)
                self._partition_offsets.rewind_to(seq)
            return truncating.truncate_log(state, seq)

    # ── read ──────────────────────────────────────────────────────────────────────────────────

    def read(self, seq: int) -> Record:
        """The record at `seq`. OutOfRange carries the valid range; SeqMissing: compacted away; Corrupt: damaged."""
        return read.read_one(self._state, seq)

    def read_range(
        self, first: int, *, limit: int | None = None, bytes_max: int | None = None, skip_damage: bool = False
    ) -> Page:
        """A page of records from `first` on, bounded by count and by bytes of data (one record always fits)."""
        return read.read_page(self._state, first, limit=limit, bytes_max=bytes_max, skip_damage=skip_damage)

    def records(
        self, first: int | None = None, stop: int | None = None, *, skip_damage: bool = False
    ) -> Iterator[Record]:
        """Records of [first, stop) in order, read a few megabytes at a time."""
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
        """Records of [first, stop) as columns, without a Python object per record."""
        return read.read_batches(self._state, first, stop, bytes_max=bytes_max, skip_damage=skip_damage)

    def to_arrow(self, first: int | None = None, stop: int | None = None, *, skip_damage: bool = False) -> pa.Table:
        """Records of [first, stop) as an Arrow table; data that lies back to back in a sealed segment is not copied."""
        found = [columns.to_arrow(rows) for rows in self.batches(first, stop, skip_damage=skip_damage)]
        return pa.Table.from_batches(found, schema=columns.SCHEMA)

    def seek_time(self, ts_us: int) -> int:
        """The first seq whose record is not older than this; `highest` where all are older."""
        return read.seek_time(self._state, ts_us)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    # ── keep small ────────────────────────────────────────────────────────────────────────────

    def retain(
        self, *, keep_ms: int | None = None, keep_bytes: int | None = None, high_watermark: int | None = None
    ) -> RetentionResult:
        """Drop the oldest sealed segments past an age or a size. Never one that reaches past the high watermark or
        past what a consumer has committed, in this log or in the root that it is a partition of; never the active one.
        Doing it twice drops nothing more."""
        return cleaner.apply_retention(
            self._state,
            keep_ms=keep_ms,
            keep_bytes=keep_bytes,
            high_watermark=high_watermark,
            committed=[*self._offsets.committed().values(), *self._partition_offsets.committed().values()],
        )

    def remove_expired(self, age_ms: int) -> int:
        """Drop whole leading segments older than this, the active one too; return how many seqs left. Looks at age
        alone: what consumers have committed holds `retain` back, not this."""
        return cleaner.remove_expired(self._state, age_ms).records

    def drop_below(self, seq: int) -> RetentionResult:
        """Drop the oldest sealed segments that hold nothing from `seq` on. Never the active one."""
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

        `key` gives a record's key, or None to keep the record whatever comes. A record that `is_tombstone` says
        is one goes too, once it is the newest word on its key and older than `keep_tombstones_ms`.
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
        """What opening found and did."""
        return self._state.report

    @property
    def lowest(self) -> int:
        """The first seq the log holds. Only ever rises, except by truncate."""
        return self._state.lowest

    @property
    def highest(self) -> int:
        """One past the last seq: what the next append will get."""
        return self._state.highest

    @property
    def durable(self) -> int:
        """Every seq below this one survives a power cut."""
        return self._state.durable

    @property
    def high_watermark(self) -> int:
        """The seed's word for the same: one past the last durable record."""
        return self._state.durable

    def __len__(self) -> int:
        """Seqs in [lowest, highest), holes included."""
        return self.highest - self.lowest

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
        """What consumers of this log have committed."""
        return self._offsets

    def _attach_offsets(self, offsets: ConsumerOffsets, topic: str, partition: int) -> None:
        """For `PartitionedLog`: what groups commit for this partition is kept there."""
        self._partition_offsets = OpenRootOffsets(offsets, topic, partition)

    @property
    def background(self) -> FlusherState:
        """The background syncs of the `interval` policy: how many ran and failed, and why the last one did."""
        return FlusherState() if self._flusher is None else self._flusher.state

    @property
    def damage_skipped(self) -> int:
        """How many damaged places readers of this log have passed over on request."""
        return self._state.damage_skipped

    @property
    def _log_state(self) -> LogState:
        """For the modules beside this one (restore, verify); not a promise to callers."""
        return self._state


def _check_bytes(datas: Sequence[object]) -> None:
    if native.all_bytes(datas):
        return
    for kind in set(map(type, datas)) - {bytes}:
        if not issubclass(kind, bytes):
            raise BadInput(f"a record is bytes, not {kind.__name__}; nothing was written, encode it first")
