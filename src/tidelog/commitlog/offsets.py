"""Consumer offsets: the durable position of each group in each partition.

A committed value is the next seq to process: after a commit of 105 every seq below 105 is processed. The last commit
wins, also when it goes back. All offsets are in one small file that is replaced atomically, so after a crash a commit
is applied completely or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Protocol

import msgspec

from tidelog.disk import process
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, replace_file
from tidelog.disk.interface import Disk, Lock, join
from tidelog.disk.process import defer_signals
from tidelog.errors import BadInput, Corrupt, DiskFull, WriteFailed
from tidelog.formats import small_files

OFFSETS_FILE = ".consumer_offsets"
_MAGIC, _VERSION = b"TLCO", 1
_PARTITION_PATH = re.compile(r"(?:(.*)/)?topics/([^/]+)/partitions/([0-9]+)")  # root, topic, number
OffsetKey = tuple[str, str, int]  # group, topic, partition


class ConsumerOffsets:
    """Committed seqs by (group, topic, partition)."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        *,
        check_writable: Callable[[], None] = lambda: None,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_writable` raises where a commit is not allowed: the log is closed, or open for reading only.
        `on_written` is called after every write of the file."""
        self._disk, self._path, self._check_writable, self._on_written = disk, path, check_writable, on_written
        self._mutex = RLock()
        self._cached: dict[OffsetKey, int] | None = None
        process.register(self)

    def on_fork(self, pid: int) -> None:
        """Refuse every call in a forked child: its commit would undo later commits of the parent."""
        process.poison_locks(self._path, pid, self)

    @property
    def _committed(self) -> dict[OffsetKey, int]:
        """Loaded at first use: a damaged file raises for callers that need offsets, not for readers of records."""
        with self._mutex:
            if self._cached is None:
                self._cached = self._load()
            return self._cached

    def _load(self) -> dict[OffsetKey, int]:
        content = read_file(self._disk, self._path)
        if content is None:
            return {}
        body = small_files.unwrap_file(_MAGIC, _VERSION, content, self._path)
        try:
            rows = msgspec.msgpack.decode(body, type=list[tuple[str, str, int, int]])
        except msgspec.DecodeError as error:
            raise Corrupt(self._path, pos=0, reason=f"the body does not decode: {error}") from error
        return {(group, topic, partition): seq for group, topic, partition, seq in rows}

    def commit(self, group: str, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Record that `group` has processed every seq below `seq`; durable on return."""
        self.commit_many(group, {(topic, partition): seq})

    @defer_signals
    def commit_many(self, group: str, seqs: Mapping[tuple[str, int], int]) -> None:
        """Commit several partitions atomically."""
        self._check_writable()
        if not group:
            raise BadInput("a group has a name; nothing was committed")
        for (topic, partition), seq in seqs.items():
            if seq < 0 or partition < 0:
                raise BadInput(
                    f"{topic}/{partition}: seq {seq} cannot be committed, seqs start at 0; nothing was committed"
                )
        with self._mutex:
            offsets = self._committed | {(group, topic, part): seq for (topic, part), seq in seqs.items()}
            self._save(offsets, f"the commit of {group}")

    def _save(self, offsets: dict[OffsetKey, int], action: str) -> None:
        rows = sorted((*key, seq) for key, seq in offsets.items())
        try:
            replace_file(self._disk, self._path, small_files.wrap_file(_MAGIC, _VERSION, msgspec.msgpack.encode(rows)))
            self._on_written()
        except OSError as error:
            self._cached = None  # where only the last directory sync failed, the new file may be in place: load again
            failure = f"{self._path}: {action} failed ({error}); the next call reads whether it was written, "
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFull(failure + "free space and retry") from error
            raise WriteFailed(failure + "repair the disk and retry") from error
        self._cached = offsets

    def fetch(self, group: str, *, topic: str = "", partition: int = 0) -> int | None:
        """Return the next seq that `group` has to process; None when it never committed."""
        return self._committed.get((group, topic, partition))

    def lag(self, group: str, highest: int, *, topic: str = "", partition: int = 0, lowest: int = 0) -> int:
        """Return how many seqs `group` has still to process; all of them when it never committed."""
        committed = self.fetch(group, topic=topic, partition=partition)
        return max(highest - max(lowest, lowest if committed is None else committed), 0)

    def committed(self, *, topic: str = "", partition: int = 0) -> dict[str, int]:
        """Return the offset of every group in this partition: the positions that retention must not pass."""
        return {group: seq for (group, t, p), seq in self._committed.items() if (t, p) == (topic, partition)}

    def rewind_to(self, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Move every group that committed more than `seq` back to it, durably: the records from `seq` on are removed,
        and new ones get their seqs."""
        with self._mutex:
            past = [group for group, done in self.committed(topic=topic, partition=partition).items() if done > seq]
            if past:
                self._check_writable()
                self._save(self._committed | {(group, topic, partition): seq for group in past}, "lowering offsets")

    def groups(self) -> list[str]:
        return sorted({group for group, _, _ in self._committed})


class PartitionOffsets(Protocol):
    """The offsets of one partition in the `PartitionedLog` above it."""

    def committed(self) -> dict[str, int]: ...

    def rewind_to(self, seq: int, /) -> None: ...


class OpenRootOffsets:
    """Partition offsets of a root that this process has open."""

    def __init__(self, offsets: ConsumerOffsets, topic: str, partition: int) -> None:
        self._offsets, self._topic, self._partition = offsets, topic, partition

    def committed(self) -> dict[str, int]:
        return self._offsets.committed(topic=self._topic, partition=self._partition)

    def rewind_to(self, seq: int, /) -> None:
        self._offsets.rewind_to(seq, topic=self._topic, partition=self._partition)


class ParentRootOffsets:
    """Partition offsets of the root above a partition that was opened on its own. Read from the file each time:
    another process may commit."""

    def __init__(self, disk: Disk, path: str, *, lock: Callable[[str], Lock]) -> None:
        """`lock` locks the root for writing, or raises."""
        self._disk, self._path, self._lock = disk, path, lock

    def _find_root(self) -> tuple[str, OpenRootOffsets] | None:
        match = _PARTITION_PATH.fullmatch(self._disk.resolve(self._path))
        if match is None:
            return None
        root = "." if match[1] is None else match[1] or "/"
        return root, OpenRootOffsets(ConsumerOffsets(self._disk, join(root, OFFSETS_FILE)), match[2], int(match[3]))

    def committed(self) -> dict[str, int]:
        root = self._find_root()
        return {} if root is None else root[1].committed()

    def rewind_to(self, seq: int, /) -> None:
        root = self._find_root()
        if root is None or all(committed <= seq for committed in root[1].committed().values()):
            return
        lock = self._lock(root[0])
        try:
            if (root := self._find_root()) is not None:  # again, now that no other process can change them
                root[1].rewind_to(seq)
        finally:
            lock.release()
