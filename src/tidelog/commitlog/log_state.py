"""What an open log knows. The verbs in the modules beside this one work on it; none of them owns it.

[shell] The manifest of a log: which segment files there must be, and which seqs may have been handed out.

    birth, roll       the new segment is durable → the manifest names it → the first record is acked
    drop, truncate    the manifest says what is being removed → it is removed → the manifest forgets it
    swap              the new files are prepared → the manifest has the smaller size → they are renamed
    close             the manifest has the exact end

So a file that the manifest names exists, unless it was lost; and a segment file that it does not name is one that
an interrupted roll left empty, one whose removal was interrupted, or the work of another program. An append never
writes it but for one in a million records: seqs are reserved that far ahead, so that the numbering goes on above
them when the active segment is lost.

[shell] A floor under the numbering, kept for the length of one step.

The next seq follows from the last record, or from the name of the last segment. A truncate that
leaves only holes below its mark has neither until the segment at the mark is born. For that
moment `.next_seq` holds the mark: an open that finds it goes on from there and takes it away.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock

from tidelog.clock import Clock
from tidelog.commitlog.codec import Codec
from tidelog.commitlog.recovery import DirectorySnapshot, RecoveryReport
from tidelog.commitlog.segment import ActiveSegment, LogFiles, SealedSegment
from tidelog.config import LogConfig
from tidelog.disk import fork
from tidelog.disk.durability import SyncFailed, WriteLatch, read_file, remove_if_exists, replace_file, write_temporary
from tidelog.disk.interface import Disk, join
from tidelog.errors import Busy, Closed, Forked, OutOfRange, ReadOnly
from tidelog.formats import log_manifest
from tidelog.formats.log_manifest import NAME, Entry, LogManifest


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
    """Held by a writer for all of its operation, however long a stream, a callback or a copy takes; taken before
    `mutex`. Readers never wait for it."""
    mutex: RLock = field(default_factory=RLock)
    """Held for the moment in which segments, their files or what this class holds change, and while readers take a
    look at them. Nothing that a caller can make slow runs under it."""
    synced_ms: int = 0  # when the active segment was last synced, on the monotonic clock
    active_stream: object | None = None  # who is writing a record piece by piece, if anybody is
    closed: bool = False
    opener_pid: int | None = None  # in a forked child: the process that opened it
    has_flusher: bool = False  # a thread keeps the sync interval
    directory_unsynced: bool = False  # a removal whose directory sync failed: done again before the next one
    manifest: LogManifest | None = None  # as it is on disk
    reserved_seq: int = 0  # seqs below this one may be handed out without a word to the manifest
    has_offsets: bool = False  # consumers have committed offsets
    directory_snapshot: DirectorySnapshot | None = (
        None  # of a reader: the directory as it was when it was looked at last
    )
    damage_skipped: int = 0  # damaged places that readers asked to pass over

    @property
    def codec(self) -> Codec:
        return self.files.codec

    @property
    def disk(self) -> Disk:
        return self.files.disk

    @property
    def lowest(self) -> int:
        return self.sealed[0].base if self.sealed else self.active.base

    @property
    def highest(self) -> int:
        return self.active.next_seq

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
            raise Closed(f"{self.path} was closed; nothing was done, open it again")

    def check_writer(self) -> None:
        """Raise unless this process is the writer of the directory."""
        self.check_open()
        if not self.writable:
            raise ReadOnly(f"{self.path} was opened read-only; nothing was written, open it without read_only")

    def check_writable(self) -> None:
        """Raise unless a write may be tried now."""
        self.check_writer()
        self.latch.check()
        if self.active_stream is not None:
            raise Busy(f"{self.path}: a streamed record is being written; nothing was written, retry when it is done")

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: it is closed there, using it raises Forked, and the files stay the parent's."""
        self.opener_pid, self.closed = pid, True
        self.files.mapped_data.clear()
        self.files.cached_sides.clear()
        fork.poison_locks(self.path, pid, self, self.active)

    def segment_at(self, seq: int) -> SealedSegment | ActiveSegment:
        """The segment whose range holds `seq`."""
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
    """Write down what there is now, or what there will be after the step that is about to be done. Durable on
    return. Raises OSError, and then the old manifest holds, or, after Replaced, either."""
    before = state.manifest
    active = active or state.active
    growing = active_entry(state, active)
    least = active.next_seq if next_seq is None else next_seq
    above = max(active.next_seq, reserve_to, least)
    if clean:
        reserved = above
    elif before is not None and not before.clean and before.reserved - above >= RESERVED_SEQS // 2:
        reserved = before.reserved
    else:
        reserved = above + RESERVED_SEQS
    write_manifest(
        state,
        LogManifest(
            codec=state.codec.name,
            generation=before.generation + 1 if before is not None else 1,
            segments=[segment.manifest_entry() for segment in (state.sealed if sealed is None else sealed)],
            active=growing,
            next_seq=least,
            reserved=reserved,
            clean=clean,
            removing=list(removing),
            offsets=state.has_offsets,
        ),
    )


def announce_removal(state: LogState, bases: Sequence[int]) -> None:
    """Say that the whole log is about to go."""
    before = state.manifest
    gone = LogManifest(
        codec=state.codec.name,
        generation=before.generation + 1 if before is not None else 1,
        segments=[],
        active=None,
        next_seq=0,
        reserved=0,
        clean=False,
        removing=list(bases),
        offsets=False,
    )
    write_manifest(state, gone)


def write_manifest(state: LogState, content: LogManifest) -> None:
    """Make this the manifest. On an error the old one holds; after Replaced, which is one, either may."""
    path = join(state.path, NAME)
    write_temporary(state.disk, f"{path}.tmp", log_manifest.encode(content))
    state.disk.rename(f"{path}.tmp", path)
    try:
        state.disk.sync_dir(state.path)
    except OSError as error:
        raise ManifestReplaced(error.errno, f"syncing failed: {error.strerror or error}", state.path) from error
    state.manifest = content
    state.reserved_seq = content.reserved


def active_entry(state: LogState, active: ActiveSegment) -> Entry:
    """What the manifest may say of the segment that grows: no more than what is durable."""
    if active is not state.active or state.durable >= active.next_seq:
        return Entry(active.base, active.size, active.authoritative_side_bits)
    before = state.manifest.active if state.manifest is not None else None
    return (
        before
        if before is not None and before.base == active.base
        else Entry(active.base, 0, active.authoritative_side_bits)
    )


def save_if_changed(state: LogState, *, is_new: bool) -> None:
    """After recovery: write the manifest where it does not say what was found. `fresh`: the log was made just now."""
    before = state.manifest
    if (
        before is not None
        and before.active is not None
        and before.active.base == state.active.base
        and before.segments == [segment.manifest_entry() for segment in state.sealed]
        and before.offsets == state.has_offsets
        and not before.removing
        and before.next_seq <= state.highest
    ):
        return
    save_manifest(state, clean=not is_new)


def save_clean(state: LogState) -> None:
    """Before closing: the exact end, unless the manifest has it already."""
    before = state.manifest
    if before is None or not before.clean or before.reserved != state.highest:
        save_manifest(state, clean=True)


def reserve_seqs(state: LogState, upto: int) -> None:
    """Make sure that the manifest has every seq below `upto` as possibly handed out, before one of them is."""
    if upto <= state.reserved_seq:
        return
    try:
        save_manifest(state, reserve_to=upto)
    except OSError as error:
        raise state.latch.retryable_error(error, "reserving seqs in the manifest") from error


SEQ_FLOOR_FILE = ".next_seq"


def save_seq_floor(disk: Disk, directory: str, seq: int) -> None:
    """Say durably that no seq below this one may be handed out again."""
    replace_file(disk, join(directory, SEQ_FLOOR_FILE), b"%d\n" % seq)


def load_seq_floor(disk: Disk, directory: str) -> int:
    """The floor an interrupted step left behind; 0 where there is none. A torn file cannot be: it is replaced whole."""
    text = read_file(disk, join(directory, SEQ_FLOOR_FILE))
    return int(text) if text is not None and text.strip().isdigit() else 0


def remove_seq_floor(disk: Disk, directory: str) -> None:
    """The numbering stands on its own again."""
    if remove_if_exists(disk, join(directory, SEQ_FLOOR_FILE)):
        disk.sync_dir(directory)
