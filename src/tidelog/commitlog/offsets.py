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
from tidelog.disk.atomic import read_all, replace
from tidelog.disk.interrupts import deferred
from tidelog.disk.latch import FULL
from tidelog.disk.seam import Disk, Lock, join
from tidelog.errors import BadInput, Corrupt, DiskFull, WriteFailed
from tidelog.formats import envelope

FILE = ".consumer_offsets"
_MAGIC, _VERSION = b"TLCO", 1
_PARTITION = re.compile(r"(?:(.*)/)?topics/([^/]+)/partitions/([0-9]+)")  # root, topic, number
Place = tuple[str, str, int]  # group, topic, partition


class ConsumerOffsets:
    """Committed seqs by (group, topic, partition)."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        *,
        may_write: Callable[[], None] = lambda: None,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`may_write` raises where a commit is not allowed: the log is closed, or open for reading only. `on_written`
        is called whenever the file was written."""
        self._disk, self._path, self._may_write, self._on_written = disk, path, may_write, on_written
        self._mutex = RLock()
        self._loaded: dict[Place, int] | None = None
        fork.guard(self)

    def forked(self, pid: int) -> None:
        """Give up in a forked child: what it commits would undo what the parent has committed since."""
        fork.poison(self._path, pid, self)

    @property
    def _committed(self) -> dict[Place, int]:
        """Read at first use: a damaged file stops whoever needs it, and nobody who only reads records."""
        with self._mutex:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> dict[Place, int]:
        content = read_all(self._disk, self._path)
        if content is None:
            return {}
        body = envelope.unwrap(_MAGIC, _VERSION, content, self._path)
        try:
            rows = msgspec.msgpack.decode(body, type=list[tuple[str, str, int, int]])
        except msgspec.DecodeError as error:
            raise Corrupt(self._path, pos=0, reason=f"the body does not decode: {error}") from error
        return {(group, topic, partition): seq for group, topic, partition, seq in rows}

    def commit(self, group: str, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Say that `group` is done with everything below `seq`; it survives a power cut on return."""
        self.commit_many(group, {(topic, partition): seq})

    @deferred
    def commit_many(self, group: str, seqs: Mapping[tuple[str, int], int]) -> None:
        """Commit several partitions in one step: after a crash all of them or none."""
        self._may_write()
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

    def _save(self, after: dict[Place, int], what: str) -> None:
        rows = sorted((*place, seq) for place, seq in after.items())
        try:
            replace(self._disk, self._path, envelope.wrap(_MAGIC, _VERSION, msgspec.msgpack.encode(rows)))
            self._on_written()
        except OSError as error:
            self._loaded = None  # where only the last directory sync failed, the new one may be there: look again
            said = f"{self._path}: {what} failed ({error}); whether it stands is read anew, "
            if error.errno in FULL:
                raise DiskFull(said + "free space and retry") from error
            raise WriteFailed(said + "repair the disk and retry") from error
        self._loaded = after

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

    def lower(self, seq: int, *, topic: str = "", partition: int = 0) -> None:
        """Bring every group that committed more than `seq` back to it, durably: the records after it go away, and
        others will have their seqs."""
        with self._mutex:
            past = [group for group, done in self.committed(topic=topic, partition=partition).items() if done > seq]
            if past:
                self._may_write()
                self._save(self._committed | {(group, topic, partition): seq for group in past}, "lowering offsets")

    def groups(self) -> list[str]:
        return sorted({group for group, _, _ in self._committed})


class PartitionOffsets(Protocol):
    """What the groups of a root of partitions have committed in one of them."""

    def committed(self) -> dict[str, int]: ...

    def lower(self, seq: int, /) -> None: ...


class OwnedOffsets:
    """Those of a root that is open here."""

    def __init__(self, offsets: ConsumerOffsets, topic: str, partition: int) -> None:
        self._offsets, self._topic, self._partition = offsets, topic, partition

    def committed(self) -> dict[str, int]:
        return self._offsets.committed(topic=self._topic, partition=self._partition)

    def lower(self, seq: int, /) -> None:
        self._offsets.lower(seq, topic=self._topic, partition=self._partition)


class RootOffsets:
    """Those of the root above a partition that was opened by itself. Read anew each time: another process may be
    committing."""

    def __init__(self, disk: Disk, path: str, *, lock: Callable[[str], Lock]) -> None:
        """`lock` takes the root for writing, or raises."""
        self._disk, self._path, self._lock = disk, path, lock

    def _found(self) -> tuple[str, OwnedOffsets] | None:
        match = _PARTITION.fullmatch(self._disk.absolute(self._path))
        if match is None:
            return None
        root = "." if match[1] is None else match[1] or "/"
        return root, OwnedOffsets(ConsumerOffsets(self._disk, join(root, FILE)), match[2], int(match[3]))

    def committed(self) -> dict[str, int]:
        found = self._found()
        return {} if found is None else found[1].committed()

    def lower(self, seq: int, /) -> None:
        found = self._found()
        if found is None or all(done <= seq for done in found[1].committed().values()):
            return
        held = self._lock(found[0])
        try:
            if (found := self._found()) is not None:  # as they are now that nothing else changes them
                found[1].lower(seq)
        finally:
            held.release()
