"""The segmented log: one directory of segments, one of which grows.

This class is the door; what happens behind it is one verb a module (append, stream, read,
truncate, clean, compaction, restore). Every method may be called from any thread: writes take
turns, reads do not wait for each other's disk, nor for a stream, a compaction or a restore at work.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from tidelog.clock import Clock
from tidelog.commitlog import append, clean, compaction, manifest, numbering, read, stream
from tidelog.commitlog import truncate as truncating
from tidelog.commitlog.clean import Retained
from tidelog.commitlog.codec import Batch
from tidelog.commitlog.compaction import Compacted, Key
from tidelog.commitlog.flusher import BackgroundState, Flusher
from tidelog.commitlog.offsets import FILE as OFFSETS_FILE
from tidelog.commitlog.offsets import ConsumerOffsets, OwnedOffsets, PartitionOffsets
from tidelog.commitlog.opening import LOCK_FILE, opened
from tidelog.commitlog.read import CHUNK_BYTES, Page
from tidelog.commitlog.recovery import Report
from tidelog.commitlog.state import State
from tidelog.config import LogConfig
from tidelog.disk import fork
from tidelog.disk.atomic import remove_if_there
from tidelog.disk.interrupts import deferring
from tidelog.disk.seam import Disk, Lock, join
from tidelog.errors import BadInput
from tidelog.formats import rows as columns
from tidelog.formats.log_manifest import NAME as MANIFEST_FILE
from tidelog.formats.rows import Rows
from tidelog.formats.values import are_bytes
from tidelog.types import Buffer, Record


@deferring(
    *("append", "append_many", "append_rows", "sync", "sync_beside", "tick", "seal", "truncate"),
    *("retain", "remove_expired", "drop_below", "close", "remove"),
)
class SegmentedLog:
    """An append-only log of records on disk, or in memory with a `MemoryDisk`."""

    def __init__(
        self,
        state: State,
        lock: Lock | None,
        offsets: ConsumerOffsets,
        flusher: Flusher | None,
        root: PartitionOffsets,
    ) -> None:
        self._state, self._lock, self._offsets, self._flusher = state, lock, offsets, flusher
        self._root = root
        self.forked = state.forked
        fork.guard(self)

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
        return cls(*opened(path, codec, read_only=read_only, disk=disk, clock=clock, config=config, settings=settings))

    def close(self) -> None:
        """Make everything acked durable and let go of the directory. Closing twice is harmless. Raises Latched where a
        sync of the background thread failed and records that were acked before it still wait for one."""
        state = self._state
        if state.opener is not None:
            return  # a forked child: the log is its parent's
        if self._flusher is not None:
            self._flusher.stop()
        with state.turn, state.mutex:
            if state.closed:
                return
            try:
                if state.writable and not state.latch.closed:
                    state.active.settle()
                    with suppress(OSError):  # the next one to open it makes what is missing
                        state.active.spill()
                    append.sync(state)
                    with suppress(OSError):  # nothing is lost: the next open finds the end by reading
                        manifest.save_closed(state)
                elif self.background.failing and state.durable < state.highest:
                    raise state.latch.owing()
            finally:
                state.closed = True
                state.active.close()
                state.files.maps.clear()
                state.files.indexes.clear()
                if self._lock is not None:
                    self._lock.release()

    def remove(self) -> None:
        """Close the log and erase it: its segments, its checkpoint, its offsets. Foreign files stay."""
        state = self._state
        state.check_writable()
        if self._flusher is not None:
            self._flusher.stop()  # before the lock is taken: it may be waiting for it
        with state.turn, state.mutex:
            state.check_writable()
            bases = [*(segment.base for segment in state.sealed), state.active.base]
            try:
                manifest.announce_erasure(state, bases)
            except OSError as error:
                step = state.latch.trip if isinstance(error, manifest.Replaced) else state.latch.refused
                raise step(error, "erasing the log") from error
            state.active.close()
            state.closed = True
            try:
                for base in reversed(bases):
                    state.files.remove(base)
                for name in (clean.CHECKPOINT, OFFSETS_FILE, numbering.FILE, MANIFEST_FILE):
                    remove_if_there(state.disk, join(state.path, name))
            except OSError as error:
                raise state.latch.refused(error, "erasing the log") from error
            finally:
                if self._lock is not None:
                    self._lock.release()
            with suppress(OSError):  # the directory stays when something else lies in it
                remove_if_there(state.disk, join(state.path, LOCK_FILE))
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
        return append.append(self._state, Batch((data,), node, tag, meta), expected)[0]

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
        return append.append(self._state, Batch(datas, node, tag, meta), expected)

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
        with self._state.turn, self._state.mutex:
            self._state.check_writable()
            append.sync(self._state)

    def sync_beside(self) -> None:
        """`sync` while others go on appending: what was acked before the call survives a power cut on return."""
        self._state.check_writable()
        append.sync_beside(self._state)

    def tick(self) -> None:
        """Do what is due by time: sync when the interval is over, seal when the segment is old. The background
        thread of the `interval` policy calls this; with an injected clock, the owner of the clock does."""
        append.tick(self._state)

    def seal(self) -> bool:
        """Seal the active segment and start another; say whether there was anything to seal."""
        with self._state.turn, self._state.mutex:
            self._state.check_writable()
            if self._state.active.size == 0:
                return False
            append.roll_over(self._state)
            return True

    def truncate(self, mark: int) -> int:
        """Forget every record from `mark` on; the next append gets `mark`. Return how many seqs that were.

        Groups that had committed more are brought back to `mark` first, or they would pass over the records that
        get these seqs next. A crash in between leaves them to process some records again.
        """
        state = self._state
        with state.turn:
            with state.mutex:
                state.check_writable()
                inside = state.lowest <= mark < state.highest
            if inside:  # not under the mutex: a commit takes it after the lock of the offsets
                self._offsets.lower(mark)
                self._root.lower(mark)
            return truncating.truncate(state, mark)

    # ── read ──────────────────────────────────────────────────────────────────────────────────

    def read(self, seq: int) -> Record:
        """The record at `seq`. OutOfRange carries the valid range; SeqMissing: compacted away; Corrupt: damaged."""
        return read.read_one(self._state, seq)

    def read_range(
        self, first: int, *, limit: int | None = None, bytes_max: int | None = None, skip_damage: bool = False
    ) -> Page:
        """A page of records from `first` on, bounded by count and by bytes of data (one record always fits)."""
        return read.page(self._state, first, limit=limit, bytes_max=bytes_max, skip_damage=skip_damage)

    def records(
        self, first: int | None = None, stop: int | None = None, *, skip_damage: bool = False
    ) -> Iterator[Record]:
        """Records of [first, stop) in order, read a few megabytes at a time."""
        for rows in self.batches(first, stop, skip_damage=skip_damage):
            yield from columns.records(rows)

    def batches(
        self,
        first: int | None = None,
        stop: int | None = None,
        *,
        bytes_max: int = CHUNK_BYTES,
        skip_damage: bool = False,
    ) -> Iterator[Rows]:
        """Records of [first, stop) as columns, without a Python object per record."""
        return read.batches(self._state, first, stop, bytes_max=bytes_max, skip_damage=skip_damage)

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
    ) -> Retained:
        """Drop the oldest sealed segments past an age or a size. Never one that reaches past the high watermark or
        past what a consumer has committed, in this log or in the root that it is a partition of; never the active one.
        Doing it twice drops nothing more."""
        return clean.retain(
            self._state,
            keep_ms=keep_ms,
            keep_bytes=keep_bytes,
            high_watermark=high_watermark,
            committed=[*self._offsets.committed().values(), *self._root.committed().values()],
        )

    def remove_expired(self, age_ms: int) -> int:
        """Drop whole leading segments older than this, the active one too; return how many seqs left. Looks at age
        alone: what consumers have committed holds `retain` back, not this."""
        return clean.remove_expired(self._state, age_ms).records

    def drop_below(self, seq: int) -> Retained:
        """Drop the oldest sealed segments that hold nothing from `seq` on. Never the active one."""
        return clean.drop_below(self._state, seq)

    def compact(
        self,
        key: Key,
        *,
        is_tombstone: Callable[[Record], bool] | None = None,
        keep_tombstones_ms: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Compacted:
        """Keep the newest record of every key in the sealed segments, with its seq and time.

        `key` gives a record's key, or None to keep the record whatever comes. A record that `is_tombstone` says
        is one goes too, once it is the newest word on its key and older than `keep_tombstones_ms`.
        """
        return compaction.compact(
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
    def report(self) -> Report:
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

    def belong_to(self, offsets: ConsumerOffsets, topic: str, partition: int) -> None:
        """For `PartitionedLog`: what groups commit for this partition is kept there."""
        self._root = OwnedOffsets(offsets, topic, partition)

    @property
    def background(self) -> BackgroundState:
        """The background syncs of the `interval` policy: how many ran and failed, and why the last one did."""
        return BackgroundState() if self._flusher is None else self._flusher.state

    @property
    def damage_skipped(self) -> int:
        """How many damaged places readers of this log have passed over on request."""
        return self._state.damage_skipped

    @property
    def state(self) -> State:
        """For the modules beside this one (restore, verify); not a promise to callers."""
        return self._state


def _check_bytes(datas: Sequence[object]) -> None:
    if are_bytes(datas):
        return
    for kind in set(map(type, datas)) - {bytes}:
        if not issubclass(kind, bytes):
            raise BadInput(f"a record is bytes, not {kind.__name__}; nothing was written, encode it first")
