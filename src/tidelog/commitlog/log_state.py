"""The state of an open log, its manifest, and the floor of its numbering.

The manifest lists the segment files that must exist and the seqs that may have been assigned:

    create, roll      the new segment is durable → the manifest names it → the first record is acked
    drop, truncate    the manifest lists the removals → they are removed → the manifest forgets them
    replace           the new files are prepared → the manifest has the smaller size → they are renamed
    close             the manifest has the exact end

A file that the manifest names exists, unless it was lost. A segment file that it does not name was left empty by an
interrupted roll, survived an interrupted removal, or belongs to another program. Seqs are reserved a million ahead, so
an append rarely writes the manifest, and numbering continues above them when the active segment is lost.

The next seq follows from the last record or from the name of the last segment. A truncate that leaves only holes below
its seq has neither until the segment at that seq exists. Until then `.next_seq` stores it; the next open continues from
there and removes the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock

from tidelog.clock import Clock
from tidelog.commitlog.codec import Codec
from tidelog.commitlog.recovery import DirectorySnapshot, RecoveryReport
from tidelog.commitlog.segment import ActiveSegment, LogFiles, SealedSegment
from tidelog.config import LogConfig
from tidelog.disk import process
from tidelog.disk.durability import SyncFailed, WriteLatch, read_file, remove_if_exists, replace_file, write_temporary
from tidelog.disk.interface import Disk, join
from tidelog.errors import Busy, Closed, Forked, OutOfRange, ReadOnly
from tidelog.formats import small_files
from tidelog.formats.small_files import MANIFEST_NAME, LogManifest, ManifestEntry


@dataclass(slots=True)
class LogState:
    path: str
    files: LogFiles
    config: LogConfig
    clock: Clock
    latch: WriteLatch
    sealed: list[SealedSegment]
    active: ActiveSegment
    report: RecoveryReport
    writable: bool
    durable: int  # every seq below this one survives a power cut; never above `highest`
    writer_lock: RLock = field(default_factory=RLock)
    """Held for a whole write operation, however long a stream, a callback or a copy takes. Readers never wait for it.
    Lock order: `writer_lock`, then `mutex`."""
    mutex: RLock = field(default_factory=RLock)
    """Held while segments, their files or the fields of this class change, and while readers take a snapshot of them.
    No caller's code runs under it."""
    synced_ms: int = 0  # when the active segment was last synced, on the monotonic clock
    active_stream: object | None = None  # the `StreamAppend` that writes a record piece by piece
    closed: bool = False
    opener_pid: int | None = None  # in a forked child: the process that opened it
    has_flusher: bool = False  # a thread syncs at the interval
    directory_unsynced: bool = False  # a directory sync failed after a removal: repeated before the next one
    manifest: LogManifest | None = None  # as it is on disk
    reserved_seq: int = 0  # seqs below this one are assigned without saving the manifest
    has_offsets: bool = False  # consumers have committed offsets
    directory_snapshot: DirectorySnapshot | None = None  # of a reader: the directory when it was read last
    damage_skipped: int = 0  # damaged places skipped by readers with `skip_damage`

    @property
    def codec(self) -> Codec:
        return self.files.codec

    @property
    def disk(self) -> Disk:
        return self.files.disk

    @property
    def lowest(self) -> int:
        for segment in self.sealed:  # not by number: another thread may drop the last one right now
            return segment.base
        return self.active.base

    @property
    def highest(self) -> int:
        return self.active.next_seq

    @property
    def is_empty(self) -> bool:
        return self.lowest >= self.highest

    def has_index(self, seq: int) -> bool:
        return self.lowest <= seq < self.highest

    def normalize_index(self, seq: int) -> int | None:
        lowest = self.lowest
        return seq - lowest if lowest <= seq < self.highest else None

    def can_sync(self) -> bool:
        """Whether the background thread may sync what was written."""
        return self.writable and not (self.closed or self.latch.is_tripped)

    def can_roll(self) -> bool:
        """Whether the background thread may change segments as well."""
        return self.can_sync() and self.active_stream is None

    def check_open(self) -> None:
        if self.opener_pid is not None:
            raise Forked(self.path, pid=self.opener_pid)
        if self.closed:
            raise Closed(f"{self.path} is closed; nothing was done, open it again")

    def check_writer(self) -> None:
        """Raise unless this process is the writer of the directory."""
        self.check_open()
        if not self.writable:
            raise ReadOnly(f"{self.path} was opened read-only; nothing was written, open it without read_only")

    def check_writable(self) -> None:
        """Raise unless a write is possible now."""
        self.check_writer()
        self.latch.check()
        if self.active_stream is not None:
            raise Busy(f"{self.path}: a streamed record is being written; nothing was written, retry after it ends")

    @contextmanager
    def step(self, action: str, *, latch_on: type[OSError] | None = None) -> Iterator[None]:
        """Raise an OSError of this step as a retryable error of Tidelog; one of class `latch_on` latches the log."""
        try:
            yield
        except OSError as error:
            if latch_on is not None and isinstance(error, latch_on):
                raise self.latch.trip(error, action) from error
            raise self.latch.retryable_error(error, action) from error

    def on_fork(self, pid: int) -> None:
        """Close the log in a forked child: calls raise Forked, and the files stay the parent's."""
        self.opener_pid, self.closed = pid, True
        self.files.mapped_data.clear()
        self.files.cached_sides.clear()
        process.poison_locks(self.path, pid, self, self.active)

    def count_rebuilds(self) -> None:
        """Add what recovery rebuilt to the metrics."""
        self.files.counters.index_rebuilds += self.report.index_rebuilds
        self.files.counters.index_rebuild_us += self.report.index_rebuild_us

    def segment_at(self, seq: int) -> SealedSegment | ActiveSegment:
        """Return the segment whose range contains `seq`."""
        if not self.lowest <= seq < self.highest:
            raise OutOfRange(self.path, asked=seq, lowest=self.lowest, highest=self.highest)
        if seq >= self.active.base:
            return self.active
        return self.sealed[bisect_right(self.sealed, seq, key=lambda segment: segment.base) - 1]


RESERVED_SEQS = 1 << 20


class ManifestReplaced(SyncFailed):
    """The new manifest is in place and may not survive a power cut."""


def save_manifest(
    state: LogState,
    *,
    sealed: Sequence[SealedSegment] | None = None,
    active: ActiveSegment | None = None,
    removing: Sequence[int] = (),
    next_seq: int | None = None,
    reserve_to: int = 0,
    clean: bool = False,
) -> None:
    """Save the current state, or the state after the step that follows. Durable on return.

    Raises OSError. The old manifest is then valid, or, after ManifestReplaced, either of the two."""
    before = state.manifest
    active = active or state.active
    next_seq = active.next_seq if next_seq is None else next_seq
    used = max(active.next_seq, reserve_to, next_seq)
    if clean:
        reserved = used
    elif before is not None and not before.clean and before.reserved - used >= RESERVED_SEQS // 2:
        reserved = before.reserved
    else:
        reserved = used + RESERVED_SEQS
    write_manifest(
        state,
        sealed=state.sealed if sealed is None else sealed,
        active=active_entry(state, active),
        next_seq=next_seq,
        reserved=reserved,
        clean=clean,
        removing=removing,
        has_offsets=state.has_offsets,
    )


def write_manifest(
    state: LogState,
    *,
    removing: Sequence[int],
    sealed: Sequence[SealedSegment] = (),
    active: ManifestEntry | None = None,
    next_seq: int = 0,
    reserved: int = 0,
    clean: bool = False,
    has_offsets: bool = False,
) -> None:
    """Replace the manifest by one of the next generation; without `active` the whole log is being removed. On an error
    the old one is valid; after ManifestReplaced either may be."""
    content = LogManifest(
        codec=state.codec.name,
        generation=state.manifest.generation + 1 if state.manifest is not None else 1,
        segments=[segment.manifest_entry() for segment in sealed],
        active=active,
        next_seq=next_seq,
        reserved=reserved,
        clean=clean,
        removing=list(removing),
        offsets=has_offsets,
    )
    path = join(state.path, MANIFEST_NAME)
    write_temporary(state.disk, f"{path}.tmp", small_files.encode_manifest(content))
    state.disk.rename(f"{path}.tmp", path)
    try:
        state.disk.sync_dir(state.path)
    except OSError as error:
        raise ManifestReplaced(error.errno, f"syncing failed: {error.strerror or error}", state.path) from error
    state.manifest = content
    state.reserved_seq = content.reserved


def active_entry(state: LogState, active: ActiveSegment) -> ManifestEntry:
    """Describe the growing segment for the manifest: no more bytes than are durable."""
    if active is not state.active or state.durable >= active.next_seq:
        return ManifestEntry(active.base, active.size, active.authoritative_side_bits)
    before = state.manifest.active if state.manifest is not None else None
    return (
        before
        if before is not None and before.base == active.base
        else ManifestEntry(active.base, 0, active.authoritative_side_bits)
    )


def save_if_changed(state: LogState, *, is_new: bool) -> None:
    """Save the manifest after recovery where it differs from the files. `is_new`: the log was created just now."""
    before = state.manifest
    if (
        before is not None
        and before.active is not None
        and before.active.base == state.active.base
        and before.segments == [segment.manifest_entry() for segment in state.sealed]
        and before.offsets == state.has_offsets
        and not before.removing
        and before.next_seq <= state.highest
        and not (before.clean and before.active.data_bytes != state.active.size)  # another program continued it
    ):
        return
    save_manifest(state, clean=not is_new)


def save_clean(state: LogState) -> None:
    """Save the exact end before closing, unless the manifest has it already."""
    before = state.manifest
    if before is None or not before.clean or before.reserved != state.highest:
        save_manifest(state, clean=True)


def reserve_seqs(state: LogState, upto: int) -> None:
    """Record in the manifest that seqs below `upto` may be assigned, before the first of them is."""
    if upto > state.reserved_seq:
        with state.step("reserving seqs in the manifest"):
            save_manifest(state, reserve_to=upto)


SEQ_FLOOR_FILE = ".next_seq"


def save_seq_floor(disk: Disk, directory: str, seq: int) -> None:
    """Record durably that no seq below this one may be assigned again."""
    replace_file(disk, join(directory, SEQ_FLOOR_FILE), b"%d\n" % seq)


def load_seq_floor(disk: Disk, directory: str) -> int:
    """Return the floor that an interrupted step left; 0 where there is none. The file is replaced atomically."""
    text = read_file(disk, join(directory, SEQ_FLOOR_FILE))
    return int(text) if text is not None and text.strip().isdigit() else 0


def remove_seq_floor(disk: Disk, directory: str) -> None:
    """Remove the floor once segments carry the numbering again."""
    if remove_if_exists(disk, join(directory, SEQ_FLOOR_FILE)):
        disk.sync_dir(directory)
