"""Topics and partitions on disk, as the RustLog design lays them out.

    <root>/topics/<topic>/partitions/<n>/     one segmented log each, one failure domain each
    <root>/topics/<topic>/.partitions         how many there are, and which of them hold a log
    <root>/tmp/                               swept at start; temporaries are siblings of their targets
    <root>/.consumer_offsets                  what every group has committed, for all partitions

A topic's partition count is fixed when it is created. Its names go into paths, so they are held to
letters, digits, `_` and `-`. A partition is a directory without files until it is first opened for
writing. From then on `.partitions` says that it holds a log, so that one whose files vanished is
damage and never a new log that begins at seq 0. Topics of another program have no such file; theirs
is written when one of their partitions is first opened for writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from tidelog.addresses import check_path
from tidelog.clock import Clock
from tidelog.commitlog.clean import Retained
from tidelog.commitlog.codecs import codec_named, is_ours
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.offsets import FILE as OFFSETS_FILE
from tidelog.commitlog.offsets import ConsumerOffsets
from tidelog.commitlog.opening import configured, take_lock
from tidelog.disk import fork
from tidelog.disk.atomic import read_all, replace
from tidelog.disk.interrupts import deferring
from tidelog.disk.latch import FULL
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, Lock, join
from tidelog.errors import (
    AlreadyExists,
    BadInput,
    Corrupt,
    Damaged,
    DiskFull,
    Forked,
    NotFound,
    ReadOnly,
    WriteFailed,
)
from tidelog.formats import envelope

_NAME = re.compile(r"[A-Za-z0-9_-]{1,255}")
PARTITIONS_MAX = 1000
FILE = ".partitions"
_MAGIC, _VERSION = b"TLPT", 1


class Partitions(NamedTuple):
    """What `.partitions` says of a topic."""

    total: int
    used: frozenset[int]  # those that hold a log


class PartitionInfo(NamedTuple):
    topic: str
    partition: int
    lowest: int
    highest: int
    high_watermark: int
    segments: int
    size: int


@deferring("create_topic", "partition", "retain", "close")
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
        check_path(root)
        disk, root = disk or PosixDisk(), str(root)
        codec_named(codec, configured(None, settings))  # a wrong word is refused here, not at the first partition
        lock = None
        if read_only:
            with _explained(root, "opening it"):
                found = disk.stat(root)
            if found is None:
                raise NotFound(f"there is nothing at {root}; nothing was changed, check the path")
        else:
            with _explained(root, "making its directories"):
                for directory in (join(root, "topics"), join(root, "tmp")):
                    disk.make_dir(directory)
            lock = take_lock(disk, root)
            try:
                with _explained(root, "sweeping tmp/"):
                    for name in disk.names(join(root, "tmp")):
                        disk.remove(join(root, f"tmp/{name}"))
            except BaseException:
                lock.release()
                raise
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
        with _explained(self._topic_directory(topic), "making the topic"):
            there = self._numbers(topic)
            if used := sorted(number for number in there if self._disk.names(self._directory(topic, number))):
                raise Damaged(
                    f"topic {topic}: partition 0 is missing, and partitions {used} hold files; nothing was made, "
                    "restore the directory of partition 0 or move the topic away"
                )
            for number in there:
                if number >= partitions:
                    self._disk.remove_dir(self._directory(topic, number))
            for number in reversed(range(partitions)):
                self._disk.make_dir(self._directory(topic, number))
            self._save(topic, Partitions(partitions, frozenset()))

    def create_partition(self, topic: str, number: int, *, first_seq: int) -> SegmentedLog:
        """Make a partition anew whose log vanished. Its first record gets `first_seq`: choose one above every seq that
        was given out, or consumers take new records for old ones."""
        self._check_owned()
        with self._mutex:
            self._check_number(topic, number)
            directory = self._directory(topic, number)
            with _explained(directory, "making the partition"):
                if self._holds_log(topic, number):
                    raise AlreadyExists(f"partition {topic}/{number} holds a log; nothing was changed")
                self._disk.make_dir(directory)
            return self._open_partition(topic, number, {"first_seq": first_seq})

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
        with _explained(directory, "listing topics"):
            for name in self._disk.names(directory) if self._disk.stat(directory) else []:
                if _NAME.fullmatch(name) and (count := self._count(name)):
                    found[name] = count
        return found

    def _count(self, topic: str) -> int:
        if (known := self._load(topic)) is not None:
            return known.total
        numbers = self._numbers(topic)
        return max(numbers) + 1 if 0 in numbers else 0

    def _load(self, topic: str) -> Partitions | None:
        """What is on record of a topic's partitions; None where nothing is."""
        path = join(self._topic_directory(topic), FILE)
        content = read_all(self._disk, path) if self._disk.stat(path) is not None else None
        if content is None:
            return None
        body = envelope.unwrap(_MAGIC, _VERSION, content, path)
        try:
            count, used = msgspec.msgpack.decode(body, type=tuple[int, list[int]])
        except msgspec.DecodeError as error:
            raise Corrupt(path, pos=0, reason=f"the body does not decode: {error}") from error
        return Partitions(count, frozenset(used))

    def _save(self, topic: str, partitions: Partitions) -> None:
        body = msgspec.msgpack.encode((partitions.total, sorted(partitions.used)))
        replace(self._disk, join(self._topic_directory(topic), FILE), envelope.wrap(_MAGIC, _VERSION, body))

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
            return self._open[key] if key in self._open else self._opened(topic, number)

    def _opened(self, topic: str, number: int) -> SegmentedLog:
        self.check(topic, number)
        return self._open_partition(topic, number, {})

    def _check_number(self, topic: str, number: int) -> None:
        count = self.topics().get(topic)
        if count is None:
            raise NotFound(f"there is no topic {topic}; nothing was changed, create it first")
        if not 0 <= number < count:
            raise NotFound(f"topic {topic} has partitions 0 to {count - 1}, not {number}; nothing was changed")

    def _check_there(self, topic: str, number: int) -> None:
        """Raise where the partition held a log whose files are gone: opening it would begin again at the first seq."""
        if self._holds_log(topic, number):
            return
        known, committed = self._load(topic), self.offsets.committed(topic=topic, partition=number)
        if self._disk.stat(self._directory(topic, number)) is None:
            evidence = "its directory is gone"
        elif known is not None and number in known.used:
            evidence = "it held a log and has no segment files"
        elif any(committed.values()):
            evidence = f"it has no segment files, and groups have committed up to seq {max(committed.values())}"
        else:
            return
        error = Damaged(
            f"partition {topic}/{number} has vanished: {evidence}; nothing was changed, restore "
            f"{self._directory(topic, number)} or make it anew with create_partition"
        )
        error.written = False
        raise error

    def _holds_log(self, topic: str, number: int) -> bool:
        directory = self._directory(topic, number)
        stat = self._disk.stat(directory)
        return stat is not None and stat.is_dir and is_ours(self._disk.names(directory))

    def _open_partition(self, topic: str, number: int, settings: dict[str, Any]) -> SegmentedLog:
        log = SegmentedLog.open(
            self._directory(topic, number),
            self._codec,
            read_only=self._read_only,
            disk=self._disk,
            clock=self._clock,
            **self._settings | settings,
        )
        try:
            log.belong_to(self.offsets, topic, number)
            if not self._read_only:
                with _explained(self._topic_directory(topic), "recording that the partition holds a log"):
                    self._record(topic, number)
        except BaseException:
            log.close()
            raise
        self._open[topic, number] = log
        return log

    def _record(self, topic: str, number: int) -> None:
        """Say durably that this partition holds a log, before any record in it is acknowledged."""
        known = self._load(topic)
        if known is None:
            numbers = self._numbers(topic)
            known = Partitions(max(numbers) + 1, frozenset(each for each in numbers if self._holds_log(topic, each)))
        elif number in known.used:
            return
        self._save(topic, Partitions(known.total, known.used | {number}))

    def check(self, topic: str, number: int) -> None:
        """Raise Damaged where a partition held a log and its files are gone."""
        self._check_number(topic, number)
        with _explained(self._directory(topic, number), "looking at the partition"):
            self._check_there(topic, number)

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
        return [
            self.partition(topic, number).retain(keep_ms=keep_ms, keep_bytes=keep_bytes)
            for number in range(self.topics().get(topic, 0))
        ]

    def _topic_directory(self, topic: str) -> str:
        return join(self._root, f"topics/{topic}")

    def _directory(self, topic: str, number: int) -> str:
        return join(self._topic_directory(topic), f"partitions/{number}")


@contextmanager
def _explained(path: str, what: str) -> Iterator[None]:
    """Turn an error of the operating system into one of Tidelog's that says what happened and what to do."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BadInput(
            f"{path}: {what} failed ({error}); no record was changed, check the path and its owner"
        ) from error
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"{path}: no room while {what}; no record was changed, free space and retry") from error
        raise WriteFailed(
            f"{path}: {what} failed ({error}); no record was changed, repair the disk and retry"
        ) from error
