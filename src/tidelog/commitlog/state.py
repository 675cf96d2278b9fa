"""What an open log knows. The verbs in the modules beside this one work on it; none of them owns it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from threading import RLock

from tidelog.clock import Clock
from tidelog.commitlog.codec import Codec
from tidelog.commitlog.recovery import Report, Seen
from tidelog.commitlog.segment import Active, Files, Sealed
from tidelog.config import LogConfig
from tidelog.disk import fork
from tidelog.disk.latch import Latch
from tidelog.disk.seam import Disk
from tidelog.errors import Busy, Closed, Forked, OutOfRange, ReadOnly
from tidelog.formats.log_manifest import LogManifest


@dataclass(slots=True)
class State:
    path: str
    files: Files
    config: LogConfig
    clock: Clock
    latch: Latch
    sealed: list[Sealed]
    active: Active
    report: Report
    writable: bool
    durable: int  # every seq below this one survives a power cut; never above `highest`
    turn: RLock = field(default_factory=RLock)
    """Held by a writer for all of its operation, however long a stream, a callback or a copy takes; taken before
    `mutex`. Readers never wait for it."""
    mutex: RLock = field(default_factory=RLock)
    """Held for the moment in which segments, their files or what this class holds change, and while readers take a
    look at them. Nothing that a caller can make slow runs under it."""
    synced_ms: int = 0  # when the active segment was last synced, on the monotonic clock
    stream: object | None = None  # who is writing a record piece by piece, if anybody is
    closed: bool = False
    opener: int | None = None  # in a forked child: the process that opened it
    background: bool = False  # a thread keeps the sync interval
    names_unsynced: bool = False  # a removal whose directory sync failed: done again before the next one
    manifest: LogManifest | None = None  # as it is on disk
    reserved: int = 0  # seqs below this one may be handed out without a word to the manifest
    has_offsets: bool = False  # consumers have committed offsets
    seen: Seen | None = None  # of a reader: the directory as it was when it was looked at last
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

    def may_sync(self) -> bool:
        """Whether the background thread may sync what was written."""
        return self.writable and not (self.closed or self.latch.closed)

    def idle(self) -> bool:
        """Whether the background thread may change segments as well."""
        return self.may_sync() and self.stream is None

    def check_open(self) -> None:
        if self.opener is not None:
            raise Forked(self.path, pid=self.opener)
        if self.closed:
            raise Closed(f"{self.path} was closed; nothing was done, open it again")

    def check_owned(self) -> None:
        """Raise unless this process is the writer of the directory."""
        self.check_open()
        if not self.writable:
            raise ReadOnly(f"{self.path} was opened read-only; nothing was written, open it without read_only")

    def check_writable(self) -> None:
        """Raise unless a write may be tried now."""
        self.check_owned()
        self.latch.check()
        if self.stream is not None:
            raise Busy(f"{self.path}: a streamed record is being written; nothing was written, retry when it is done")

    def forked(self, pid: int) -> None:
        """Give up in a forked child: it is closed there, using it raises Forked, and the files stay the parent's."""
        self.opener, self.closed = pid, True
        self.files.maps.clear()
        self.files.indexes.clear()
        fork.poison(self.path, pid, self, self.active)

    def segment_at(self, seq: int) -> Sealed | Active:
        """The segment whose range holds `seq`."""
        if not self.lowest <= seq < self.highest:
            raise OutOfRange(self.path, asked=seq, lowest=self.lowest, highest=self.highest)
        if seq >= self.active.base:
            return self.active
        return self.sealed[bisect_right(self.sealed, seq, key=lambda segment: segment.base) - 1]
