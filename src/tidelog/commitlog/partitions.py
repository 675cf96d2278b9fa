"""Topics and partitions on disk, as the RustLog design lays them out.

    <root>/topics/<topic>/partitions/<n>/     one segmented log each, one failure domain each
    <root>/tmp/                               swept at start; temporaries are siblings of their targets
    <root>/.consumer_offsets                  what every group has committed, for all partitions

A topic's partition count is fixed when it is created. Its names go into paths, so they are held to
letters, digits, `_` and `-`.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple, Self

from tidelog.clock import Clock
from tidelog.commitlog import clean
from tidelog.commitlog.clean import Retained
from tidelog.commitlog.codecs import codec_named
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.offsets import FILE as OFFSETS_FILE
from tidelog.commitlog.offsets import ConsumerOffsets
from tidelog.commitlog.opening import configured, take_lock
from tidelog.disk import fork
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, Lock, join
from tidelog.errors import AlreadyExists, BadInput, Forked, NotFound, ReadOnly

_NAME = re.compile(r"[A-Za-z0-9_-]{1,255}")
PARTITIONS_MAX = 1000


class PartitionInfo(NamedTuple):
    topic: str
    partition: int
    lowest: int
    highest: int
    high_watermark: int
    segments: int
    size: int


class PartitionedLog:
    """Many logs under one directory, with one set of consumer offsets."""

    def __init__(
        self,
        root: str,
        codec: str,
        disk: Disk,
        clock: Clock | None,
        lock: Lock | None,
        settings: dict[str, Any],
    ) -> None:
        self._root, self._codec, self._disk, self._clock = root, codec, disk, clock
        self._lock, self._settings = lock, settings
        self._read_only = lock is None
        self._open: dict[tuple[str, int], SegmentedLog] = {}
        self._mutex = RLock()
        self._opener: int | None = None  # in a forked child: the process that opened it
        self.offsets = ConsumerOffsets(disk, join(root, OFFSETS_FILE), may_write=self._check_owned)
        fork.guard(self)

    def forked(self, pid: int) -> None:
        """Give up in a forked child: using it raises Forked, and the files stay the parent's."""
        self._opener = pid
        self._open.clear()
        fork.poison(self._root, pid, self)

    @classmethod
    def open(
        cls,
        root: str,
        codec: str = "rustlog",
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> Self:
        """Open the directory, making it where there is none. One writer; any number of readers."""
        disk, root = disk or PosixDisk(), str(root)
        codec_named(codec, configured(None, settings))  # a wrong word is refused here, not at the first partition
        lock = None
        if read_only:
            if disk.stat(root) is None:
                raise NotFound(f"there is nothing at {root}; nothing was changed, check the path")
        else:
            for directory in (join(root, "topics"), join(root, "tmp")):
                disk.make_dir(directory)
            lock = take_lock(disk, root)
            for name in disk.names(join(root, "tmp")):
                disk.remove(join(root, f"tmp/{name}"))
        return cls(root, codec, disk, clock, lock, settings)

    def close(self) -> None:
        """Close every partition that was used, each made durable first."""
        if self._opener is not None:
            return
        with ExitStack() as ending:  # one that fails to close does not keep the others open
            if self._lock is not None:
                ending.callback(self._lock.release)
            for log in self._open.values():
                ending.callback(log.close)
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_topic(self, topic: str, partitions: int) -> None:
        """Make a topic. Its partition count is fixed for good; a name that exists is refused."""
        self._check_owned()
        if not _NAME.fullmatch(topic):
            raise BadInput(f"topic {topic!r}: a name has 1 to 255 letters, digits, _ or -; nothing was made")
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise BadInput(f"{partitions} partitions: a topic has 1 to {PARTITIONS_MAX}; nothing was made")
        if topic in self.topics():
            raise AlreadyExists(f"topic {topic} exists; its partition count cannot change, nothing was made")
        # From the highest down: a topic counts as made once partition 0 is there, so a crash in between leaves
        # nothing that is listed, and making it again goes on.
        for number in self._numbers(topic):
            if number >= partitions:
                self._disk.remove_dir(self._directory(topic, number))
        for number in reversed(range(partitions)):
            self._disk.make_dir(self._directory(topic, number))

    def _check(self) -> None:
        if self._opener is not None:
            raise Forked(self._root, pid=self._opener)

    def _check_owned(self) -> None:
        self._check()
        if self._read_only:
            raise ReadOnly(f"{self._root} was opened read-only; nothing was written, open it without read_only")

    def topics(self) -> dict[str, int]:
        """Every topic and its partition count, by name."""
        self._check()
        found = {}
        directory = join(self._root, "topics")
        for name in self._disk.names(directory) if self._disk.stat(directory) else []:
            if _NAME.fullmatch(name) and (count := self._count(name)):
                found[name] = count
        return found

    def _count(self, topic: str) -> int:
        numbers = self._numbers(topic)
        return max(numbers) + 1 if 0 in numbers else 0

    def _numbers(self, topic: str) -> set[int]:
        directory = join(self._topic_directory(topic), "partitions")
        stat = self._disk.stat(directory)
        if stat is None or not stat.is_dir:
            return set()
        return {int(name) for name in self._disk.names(directory) if name.isdecimal()}

    def partition(self, topic: str, number: int) -> SegmentedLog:
        """The log of one partition, opened at first use."""
        key = (topic, number)
        with self._mutex:
            return self._open.get(key) or self._opened(topic, number)

    def _opened(self, topic: str, number: int) -> SegmentedLog:
        key = (topic, number)
        if key not in self._open:
            count = self.topics().get(topic)
            if count is None:
                raise NotFound(f"there is no topic {topic}; nothing was changed, create it first")
            if not 0 <= number < count:
                raise NotFound(f"topic {topic} has partitions 0 to {count - 1}, not {number}; nothing was changed")
            self._open[key] = SegmentedLog.open(
                self._directory(topic, number),
                self._codec,
                read_only=self._read_only,
                disk=self._disk,
                clock=self._clock,
                **self._settings,
            )
        return self._open[key]

    def append(self, topic: str, number: int, data: bytes) -> int:
        """Write one record to a partition; return its seq."""
        return self.partition(topic, number).append(data)

    def describe(self, topic: str) -> list[PartitionInfo]:
        """Range, watermark, segment count and size of every partition."""
        found = []
        for number in range(self.topics().get(topic, 0)):
            log = self.partition(topic, number)
            found.append(
                PartitionInfo(topic, number, log.lowest, log.highest, log.high_watermark, len(log.segments), log.size)
            )
        if not found:
            raise NotFound(f"there is no topic {topic}; nothing was changed, create it first")
        return found

    def lag(self, group: str, topic: str, number: int) -> int:
        """How many seqs of a partition a group has still to process."""
        log = self.partition(topic, number)
        return self.offsets.lag(group, log.highest, topic=topic, partition=number, lowest=log.lowest)

    def retain(self, topic: str, *, keep_ms: int | None = None, keep_bytes: int | None = None) -> list[Retained]:
        """Retention over every partition of a topic; what a group has not committed yet is kept."""
        done = []
        for number in range(self.topics().get(topic, 0)):
            log = self.partition(topic, number)
            committed = self.offsets.committed(topic=topic, partition=number).values()
            done.append(
                clean.retain(
                    log.state,
                    keep_ms=keep_ms,
                    keep_bytes=keep_bytes,
                    high_watermark=None,
                    committed=committed,
                )
            )
        return done

    def _topic_directory(self, topic: str) -> str:
        return join(self._root, f"topics/{topic}")

    def _directory(self, topic: str, number: int) -> str:
        return join(self._topic_directory(topic), f"partitions/{number}")
