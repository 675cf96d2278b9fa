"""Topics and partitions on disk, in RustLog's directory layout.

    <root>/topics/<topic>/partitions/<n>/     one segmented log each, one failure domain each
    <root>/topics/<topic>/.partitions         the partition count, and which partitions contain a log
    <root>/tmp/                               swept at start; temporaries are siblings of their targets
    <root>/.consumer_offsets                  the committed offsets of every group, for all partitions

A topic's partition count is fixed when it is created. Topic names become paths, so they have only letters, digits, `_`
and `-`. A partition is an empty directory until it is first opened for writing. From then on `.partitions` lists it,
so a partition without files is damage and not a new log that begins at seq 0. Topics of another program have no such
file; it is written when one of their partitions is first opened for writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from threading import RLock
from typing import Any, NamedTuple, Self

import msgspec

from tidelog.addresses import check_path, path_text
from tidelog.clock import Clock
from tidelog.commitlog.cleaner import RetentionResult
from tidelog.commitlog.codecs import has_segment_files, make_codec
from tidelog.commitlog.log import SegmentedLog, make_config, take_lock
from tidelog.commitlog.offsets import OFFSETS_FILE, ConsumerOffsets
from tidelog.commitlog.recovery import detect_codec
from tidelog.disk import process
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, replace_file
from tidelog.disk.interface import Disk, Lock, join
from tidelog.disk.posix import PosixDisk
from tidelog.disk.process import defer_signals_in
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
from tidelog.formats import small_files

_TOPIC_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,255}")
PARTITIONS_MAX = 1000
PARTITIONS_FILE = ".partitions"
_MAGIC, _VERSION = b"TLPT", 1


def is_root(disk: Disk, path: str) -> bool:
    """Whether a directory holds topics with partitions, and is no log itself."""
    check_path(path)
    stat, topics = disk.stat(path), disk.stat(join(path, "topics"))
    if stat is None or not stat.is_dir or topics is None or not topics.is_dir or has_segment_files(disk.list_dir(path)):
        return False
    return any(disk.stat(join(path, f"topics/{name}/partitions")) for name in disk.list_dir(join(path, "topics")))


def root_codec(disk: Disk, path: str) -> str:
    """Return the codec of the first partition that shows it; rustlog where all are empty."""
    for topic in disk.list_dir(join(path, "topics")):
        directory = join(path, f"topics/{topic}/partitions")
        stat = disk.stat(directory)
        for name in disk.list_dir(directory) if stat is not None and stat.is_dir else []:
            partition = join(directory, name)
            stat = disk.stat(partition)
            names = disk.list_dir(partition) if stat is not None and stat.is_dir else []
            if has_segment_files(names) and (codec := detect_codec(disk, partition, names)) is not None:
                return codec
    return "rustlog"


class PartitionUse(NamedTuple):
    """The content of a topic's `.partitions` file."""

    total: int
    used: frozenset[int]  # partitions that contain a log


class PartitionInfo(NamedTuple):
    topic: str
    partition: int
    lowest: int
    highest: int
    high_watermark: int
    segments: int
    size: int


@defer_signals_in("create_topic", "partition", "retain", "close")
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
        self._open_logs: dict[tuple[str, int], SegmentedLog] = {}
        self._mutex = RLock()
        self._opener_pid: int | None = None  # in a forked child: the process that opened it
        self.offsets = ConsumerOffsets(disk, join(root, OFFSETS_FILE), check_writable=self._check_writer)
        process.register(self)

    def on_fork(self, pid: int) -> None:
        """Refuse every call in a forked child with Forked; the files stay the parent's."""
        self._opener_pid = pid
        self._open_logs.clear()
        process.poison_locks(self._root, pid, self)

    @classmethod
    def open(
        cls,
        root: str | PathLike[str],
        codec: str = "rustlog",
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> Self:
        """Open the directory, or create it. One writer, any number of readers."""
        disk, root = disk or PosixDisk(), path_text(root, "the directory of a log")
        check_path(root)
        make_codec(codec, make_config(None, settings))  # a wrong setting is refused here, not at the first partition
        lock = None
        if read_only:
            with _translate_os_errors(root, "opening it"):
                stat = disk.stat(root)
            if stat is None:
                raise NotFound(f"there is no directory {root}; nothing was changed, check the path")
        else:
            with _translate_os_errors(root, "creating its directories"):
                for directory in (join(root, "topics"), join(root, "tmp")):
                    disk.make_dir(directory)
            lock = take_lock(disk, root)
            try:
                with _translate_os_errors(root, "sweeping tmp/"):
                    for name in disk.list_dir(join(root, "tmp")):
                        disk.remove(join(root, f"tmp/{name}"))
            except BaseException:
                lock.release()
                raise
        return cls(root, codec, disk, clock, lock, settings)

    def close(self) -> None:
        """Make every open partition durable and close it."""
        if self._opener_pid is not None:
            return
        with ExitStack() as stack:  # a failure to close one partition does not keep the others open
            if self._lock is not None:
                stack.callback(self._lock.release)
            for log in self._open_logs.values():
                stack.callback(log.close)
            self._open_logs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_topic(self, topic: str, partitions: int) -> None:
        """Create a topic with a fixed number of partitions. Raises AlreadyExists for a name in use."""
        self._check_writer()
        if not _TOPIC_NAME_PATTERN.fullmatch(topic):
            raise BadInput(f"topic {topic!r}: a name has 1 to 255 letters, digits, _ or -; nothing was created")
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise BadInput(f"{partitions} partitions: a topic has 1 to {PARTITIONS_MAX}; nothing was created")
        if topic in self.topics():
            raise AlreadyExists(f"topic {topic} exists; its partition count cannot change, nothing was created")
        # From the highest down: a topic exists once partition 0 does. A crash in between leaves an unlisted topic, and
        # creating it again finishes it.
        with _translate_os_errors(self._topic_directory(topic), "creating the topic"):
            existing = self._partition_numbers(topic)
            if used := sorted(number for number in existing if self._disk.list_dir(self._directory(topic, number))):
                raise Damaged(
                    f"topic {topic}: partition 0 is missing, and partitions {used} have files; nothing was created, "
                    "restore the directory of partition 0 or move the topic away"
                )
            for number in existing:
                if number >= partitions:
                    self._disk.remove_dir(self._directory(topic, number))
            for number in reversed(range(partitions)):
                self._disk.make_dir(self._directory(topic, number))
            self._save_use(topic, PartitionUse(partitions, frozenset()))

    def create_partition(self, topic: str, number: int, *, first_seq: int) -> SegmentedLog:
        """Create a partition again whose log was lost. Its first record gets `first_seq`: choose one above every
        assigned seq, or consumers take new records for old ones."""
        self._check_writer()
        with self._mutex:
            self._check_number(topic, number)
            directory = self._directory(topic, number)
            with _translate_os_errors(directory, "creating the partition"):
                if self._holds_log(topic, number):
                    raise AlreadyExists(f"partition {topic}/{number} contains a log; nothing was changed")
                self._disk.make_dir(directory)
            return self._open_partition(topic, number, {"first_seq": first_seq})

    def _check_process(self) -> None:
        if self._opener_pid is not None:
            raise Forked(self._root, pid=self._opener_pid)

    def _check_writer(self) -> None:
        self._check_process()
        if self._read_only:
            raise ReadOnly(f"{self._root} was opened read-only; nothing was written, open it without read_only")

    def topics(self) -> dict[str, int]:
        """Return the partition count of every topic, by name."""
        self._check_process()
        counts = {}
        directory = join(self._root, "topics")
        with _translate_os_errors(directory, "listing topics"):
            for name in self._disk.list_dir(directory) if self._disk.stat(directory) else []:
                if _TOPIC_NAME_PATTERN.fullmatch(name) and (count := self._partition_count(name)):
                    counts[name] = count
        return counts

    def _partition_count(self, topic: str) -> int:
        if (known := self._load_use(topic)) is not None:
            return known.total
        numbers = self._partition_numbers(topic)
        return max(numbers) + 1 if 0 in numbers else 0

    def _load_use(self, topic: str) -> PartitionUse | None:
        """Load the `.partitions` file of a topic; None where there is none."""
        path = join(self._topic_directory(topic), PARTITIONS_FILE)
        content = read_file(self._disk, path) if self._disk.stat(path) is not None else None
        if content is None:
            return None
        body = small_files.unwrap_file(_MAGIC, _VERSION, content, path)
        try:
            count, used = msgspec.msgpack.decode(body, type=tuple[int, list[int]])
        except msgspec.DecodeError as error:
            raise Corrupt(path, pos=0, reason=f"the body does not decode: {error}") from error
        return PartitionUse(count, frozenset(used))

    def _save_use(self, topic: str, partitions: PartitionUse) -> None:
        body = msgspec.msgpack.encode((partitions.total, sorted(partitions.used)))
        replace_file(
            self._disk,
            join(self._topic_directory(topic), PARTITIONS_FILE),
            small_files.wrap_file(_MAGIC, _VERSION, body),
        )

    def _partition_numbers(self, topic: str) -> set[int]:
        directory = join(self._topic_directory(topic), "partitions")
        stat = self._disk.stat(directory)
        if stat is None or not stat.is_dir:
            return set()
        return {int(name) for name in self._disk.list_dir(directory) if name.isdecimal()}

    def partition(self, topic: str, number: int) -> SegmentedLog:
        """Return the log of one partition, opened at first use."""
        key = (topic, number)
        with self._mutex:
            return self._open_logs[key] if key in self._open_logs else self._open_existing(topic, number)

    def _open_existing(self, topic: str, number: int) -> SegmentedLog:
        self.check_partition(topic, number)
        return self._open_partition(topic, number, {})

    def _check_number(self, topic: str, number: int) -> None:
        count = self.topics().get(topic)
        if count is None:
            raise NotFound(f"there is no topic {topic}; nothing was changed, create it first")
        if not 0 <= number < count:
            raise NotFound(f"topic {topic} has partitions 0 to {count - 1}, not {number}; nothing was changed")

    def _check_not_vanished(self, topic: str, number: int) -> None:
        """Raise where the files of the partition's log are lost: opening it would begin again at the first seq."""
        if self._holds_log(topic, number):
            return
        known, committed = self._load_use(topic), self.offsets.committed(topic=topic, partition=number)
        if self._disk.stat(self._directory(topic, number)) is None:
            evidence = "its directory is missing"
        elif known is not None and number in known.used:
            evidence = "it contained a log and has no segment files"
        elif any(committed.values()):
            evidence = f"it has no segment files, and groups have committed up to seq {max(committed.values())}"
        else:
            return
        error = Damaged(
            f"the log of partition {topic}/{number} is lost: {evidence}; nothing was changed, restore "
            f"{self._directory(topic, number)} or create it again with create_partition"
        )
        error.written = False
        raise error

    def _holds_log(self, topic: str, number: int) -> bool:
        directory = self._directory(topic, number)
        stat = self._disk.stat(directory)
        return stat is not None and stat.is_dir and has_segment_files(self._disk.list_dir(directory))

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
            log._attach_offsets(self.offsets, topic, number)
            if not self._read_only:
                with _translate_os_errors(self._topic_directory(topic), "recording that the partition contains a log"):
                    self._record_use(topic, number)
        except BaseException:
            log.close()
            raise
        self._open_logs[topic, number] = log
        return log

    def _record_use(self, topic: str, number: int) -> None:
        """Record durably that this partition contains a log, before a record in it is acked."""
        known = self._load_use(topic)
        if known is None:
            numbers = self._partition_numbers(topic)
            known = PartitionUse(max(numbers) + 1, frozenset(each for each in numbers if self._holds_log(topic, each)))
        elif number in known.used:
            return
        self._save_use(topic, PartitionUse(known.total, known.used | {number}))

    def check_partition(self, topic: str, number: int) -> None:
        """Raise Damaged where the files of a partition's log are lost."""
        self._check_number(topic, number)
        with _translate_os_errors(self._directory(topic, number), "reading the partition"):
            self._check_not_vanished(topic, number)

    def append(self, topic: str, number: int, data: bytes) -> int:
        """Write one record to a partition; return its seq."""
        return self.partition(topic, number).append(data)

    def describe(self, topic: str) -> list[PartitionInfo]:
        """Return range, watermark, segment count and size of every partition."""
        infos = []
        for number in range(self.topics().get(topic, 0)):
            if self._read_only and not self._holds_log(topic, number):
                self.check_partition(topic, number)
                infos.append(PartitionInfo(topic, number, 0, 0, 0, 0, 0))  # never written to
                continue
            log = self.partition(topic, number)
            infos.append(
                PartitionInfo(topic, number, log.lowest, log.highest, log.high_watermark, len(log.segments), log.size)
            )
        if not infos:
            raise NotFound(f"there is no topic {topic}; nothing was changed, create it first")
        return infos

    def lag(self, group: str, topic: str, number: int) -> int:
        """Return how many seqs of a partition a group has still to process."""
        log = self.partition(topic, number)
        return self.offsets.lag(group, log.highest, topic=topic, partition=number, lowest=log.lowest)

    def retain(self, topic: str, *, keep_ms: int | None = None, keep_bytes: int | None = None) -> list[RetentionResult]:
        """Apply retention to every partition of a topic; segments with uncommitted records stay."""
        return [
            self.partition(topic, number).retain(keep_ms=keep_ms, keep_bytes=keep_bytes)
            for number in range(self.topics().get(topic, 0))
        ]

    def _topic_directory(self, topic: str) -> str:
        return join(self._root, f"topics/{topic}")

    def _directory(self, topic: str, number: int) -> str:
        return join(self._topic_directory(topic), f"partitions/{number}")


@contextmanager
def _translate_os_errors(path: str, action: str) -> Iterator[None]:
    """Raise an OSError as an error of Tidelog that says what happened and what to do."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BadInput(
            f"{path}: {action} failed ({error}); no record was changed, check the path and its owner"
        ) from error
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise DiskFull(
                f"{path}: the device is full while {action}; no record was changed, free space and retry"
            ) from error
        raise WriteFailed(
            f"{path}: {action} failed ({error}); no record was changed, repair the disk and retry"
        ) from error
