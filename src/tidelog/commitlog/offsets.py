"""[shell] Consumer offsets: how far each group has come in each partition, durably.

A committed value is the next seq to process: committing 105 says that everything below 105 is
done. The last commit wins, also when it goes back. All of them live in one small file that is
replaced atomically, so a crash shows the commit before or the commit after, never a mixture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Protocol

import msgspec

from tidelog.disk import fork
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, replace_file
from tidelog.disk.interface import Disk, Lock, join
from tidelog.disk.interrupts import defer_signals
from tidelog.errors import BadInput, Corrupt, DiskFull, WriteFailed
from tidelog.formats import file_header

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
        """`may_write` raises where a commit is not allowed: the log is closed, or open for reading only. `on_written`
        is called whenever the file was written."""
        self._disk, self._path, self._check_writable, self._on_written = disk, path, check_writable, on_written
        self._mutex = RLock()
        self._cached: dict[OffsetKey, int] | None = None
        fork.register(self)

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: what it commits would undo what the parent has committed since."""
        fork.poison_locks(self._path, pid, self)

    @property
    def _committed(self) -> dict[OffsetKey, int]:
        """Read at first use: a damaged file stops whoever needs it, and nobody who only reads records."""
        with self._mutex:
            if self._cached is None:
                self._cached = self._load()
            return self._cached

    def _load(self) -> dict[OffsetKey, int]:
        content = read_file(self._disk, self._path)
        if content is None:
            return {}
        body = file_header.unwrap_file(_MAGIC, _VERSION, content, self._path)
        try:
            rows = msgspec.msgpack.decode(body, type=list[tuple[str, str, int, int]])
        except msgspec.DecodeError as error:
            raise Corrupt(self._path, pos=0, reason=f"the body does not decode: {error}") from error
        return {(group, topic, partition): seq for group, topic, partition, seq in rows}

    def commit(self, group: str, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Say that `group` is done with everything below `seq`; it survives a power cut on return."""
        self.commit_many(group, {(topic, partition): seq})

    @defer_signals
    def commit_many(self, group: str, seqs: Mapping[tuple[str, int], int]) -> None:
        """Commit several partitions in one step: after a crash all of them or none."""
        self._check_writable()
        if not group:
            raise BadInput("a group has a name; nothing was committed")
        for (topic, partition), seq in seqs.items():
            if seq < 0 or partition < 0:
                raise BadInput(
                    f"{topic}/{partition}: seq {seq} cannot be committed, seqs start at 0; nothing was committed"
                )
        with self._mutex:
            after = self._committed | {(group, topic, part): seq for (topic, part), seq in seqs.items()}
            self._save(after, f"the commit of {group}")

    def _save(self, after: dict[OffsetKey, int], action: str) -> None:
        rows = sorted((*place, seq) for place, seq in after.items())
        try:
            replace_file(self._disk, self._path, file_header.wrap_file(_MAGIC, _VERSION, msgspec.msgpack.encode(rows)))
            self._on_written()
        except OSError as error:
            self._cached = None  # where only the last directory sync failed, the new one may be there: look again
            said = f"{self._path}: {action} failed ({error}); whether it stands is read anew, "
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFull(said + "free space and retry") from error
            raise WriteFailed(said + "repair the disk and retry") from error
        self._cached = after

    def fetch(self, group: str, *, topic: str = "", partition: int = 0) -> int | None:
        """The next seq `group` has to process; None when it never committed."""
        return self._committed.get((group, topic, partition))

    def lag(self, group: str, highest: int, *, topic: str = "", partition: int = 0, lowest: int = 0) -> int:
        """How many seqs `group` has still to process; all that there are when it never committed."""
        done = self.fetch(group, topic=topic, partition=partition)
        return max(highest - max(lowest, lowest if done is None else done), 0)

    def committed(self, *, topic: str = "", partition: int = 0) -> dict[str, int]:
        """Every group that committed in this partition: what retention must not overtake."""
        return {group: seq for (group, t, p), seq in self._committed.items() if (t, p) == (topic, partition)}

    def rewind_to(self, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Bring every group that committed more than `seq` back to it, durably: the records after it go away, and
        others will have their seqs."""
        with self._mutex:
            past = [group for group, done in self.committed(topic=topic, partition=partition).items() if done > seq]
            if past:
                self._check_writable()
                self._save(self._committed | {(group, topic, partition): seq for group in past}, "lowering offsets")

    def groups(self) -> list[str]:
        return sorted({group for group, _, _ in self._committed})


class PartitionOffsets(Protocol):
    """What the groups of a root of partitions have committed in one of them."""

    def committed(self) -> dict[str, int]: ...

    def rewind_to(self, seq: int, /) -> None: ...


class OpenRootOffsets:
    """Those of a root that is open here."""

    def __init__(self, offsets: ConsumerOffsets, topic: str, partition: int) -> None:
        self._offsets, self._topic, self._partition = offsets, topic, partition

    def committed(self) -> dict[str, int]:
        return self._offsets.committed(topic=self._topic, partition=self._partition)

    def rewind_to(self, seq: int, /) -> None:
        self._offsets.rewind_to(seq, topic=self._topic, partition=self._partition)


class ParentRootOffsets:
    """Those of the root above a partition that was opened by itself. Read anew each time: another process may be
    committing."""

    def __init__(self, disk: Disk, path: str, *, lock: Callable[[str], Lock]) -> None:
        """`lock` takes the root for writing, or raises."""
        self._disk, self._path, self._lock = disk, path, lock

    def _find_root(self) -> tuple[str, OpenRootOffsets] | None:
        match = _PARTITION_PATH.fullmatch(self._disk.resolve(self._path))
        if match is None:
            return None
        root = "." if match[1] is None else match[1] or "/"
        return root, OpenRootOffsets(ConsumerOffsets(self._disk, join(root, OFFSETS_FILE)), match[2], int(match[3]))

    def committed(self) -> dict[str, int]:
        found = self._find_root()
        return {} if found is None else found[1].committed()

    def rewind_to(self, seq: int, /) -> None:
        found = self._find_root()
        if found is None or all(done <= seq for done in found[1].committed().values()):
            return
        held = self._lock(found[0])
        try:
            if (found := self._find_root()) is not None:  # as they are now that nothing else changes them
                found[1].rewind_to(seq)
        finally:
            held.release()
