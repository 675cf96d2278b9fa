"""[shell] Logs of the commitlog library: rustlog, laminar, narwhal, and tide outside of topics.

A log has no topics; the name of its directory stands for one. A root of partitions has `orders/0`, `orders/1`; naming
`orders` means all of them. Its epoch is 0: a log is never made again under the same name without its directory going.
What retention dropped is a gap; what compaction took is a hole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidelog.commitlog import LogConfig, PartitionedLog, SegmentedLog
from tidelog.commitlog.codecs import codec_named
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, join
from tidelog.engine import Counts
from tidelog.errors import BadInput, NotFound, OutOfRange, Unavailable
from tidelog.spark.place import Found, Inlined, Segment, Sight, Wanted
from tidelog.spark.stretches import Lost, Stretch

CHUNK_BYTES: Final = 4 << 20


class LogPlace:
    kinded = False

    def __init__(self, path: str, codec: str, *, disk: Disk | None = None) -> None:
        self._path = path.rstrip("/") or "/"
        self._codec, self._disk = codec, disk or PosixDisk()
        self._open: dict[str, SegmentedLog] = {}
        self.timed = codec_named(codec, LogConfig()).birth_suffix is None

    def refresh(self) -> None:
        self.close()

    def close(self) -> None:
        for log in self._open.values():
            log.close()
        self._open.clear()

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        found = self._disk.stat(self._path)
        if found is None or not found.is_dir:
            raise NotFound(f"there is no log at {self._path}; nothing was changed, check the path")
        if self._disk.stat(join(self._path, "topics")) is None:
            return [self._path.rpartition("/")[2]]
        with PartitionedLog.open(self._path, self._codec, read_only=True, disk=self._disk) as root:
            return [f"{topic}/{number}" for topic, count in root.topics().items() for number in range(count)]

    def _log(self, name: str) -> SegmentedLog:
        if name not in self._open:
            topic, slash, number = name.rpartition("/")
            path = join(self._path, f"topics/{topic}/partitions/{number}") if slash else self._path
            self._open[name] = SegmentedLog.open(path, self._codec, read_only=True, disk=self._disk)
        return self._open[name]

    def look(self, topic: str) -> Sight | None:
        if topic not in self.names():
            return None
        try:
            log = self._log(topic)
        except NotFound:
            if "/" not in topic:
                raise
            name, _, number = topic.rpartition("/")
            with PartitionedLog.open(self._path, self._codec, read_only=True, disk=self._disk) as root:
                root.check(name, int(number))  # raises where it held a log that has vanished
            return Sight(topic, 0, 0, 0, 0, 0, (), 0)  # a partition that nobody has written to
        state = log.state
        sizes = [*(segment.size for segment in state.sealed), state.active.size]
        segments = [_segment(held, size) for held, size in zip(log.segments, sizes, strict=True) if len(held)]
        first = state.codec.first_seq
        return Sight(topic, 0, first, log.highest, log.lowest, log.lowest, segments, 0)

    def seek(self, topic: str, ts_ms: int) -> int:
        return self._log(topic).seek_time(ts_ms * 1000)

    def lost(self, topic: str, first: int) -> Lost | None:
        log = self._log(topic)
        if first >= log.lowest:
            return None
        return Lost(topic, first, log.lowest - 1, "retention", log.lowest, log.highest - 1)

    def settle(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[Lost, ...]]:
        evicted = max(min(stop, self._log(topic).lowest) - first, 0)
        lost = self.lost(topic, first)
        return Counts(evicted=evicted, holes=stop - first - evicted), () if lost is None else (lost,)

    def dropped_at(self, topic: str, epoch: int) -> int | None:  # noqa: ARG002
        return None  # a log has no epochs

    def inline(self, topic: str, first: int, stop: int) -> Inlined | None:  # noqa: ARG002
        return None

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, stretch: Stretch, wanted: Wanted, *, verify: bool) -> Iterator[Found]:  # noqa: ARG002
        """Records of a stretch. These layouts check what they read; there is no reading without."""
        try:
            log = self._log(stretch.topic)
        except (NotFound, BadInput) as error:
            raise Unavailable(
                f"{error}. This is an executor: every one of them has to see the path that the driver sees; mount it "
                "there"
            ) from error
        if log.highest < stretch.stop:
            raise Unavailable(
                f"{stretch.topic} ends before seq {stretch.stop} here, and reached it where the query was planned; "
                "nothing was written, run it again when this executor sees the same directory"
            )
        at = max(stretch.first, log.lowest)
        if at > stretch.first:
            at = min(at, stretch.stop)
            lost = Lost(stretch.topic, stretch.first, at - 1, "retention", log.lowest, log.highest - 1)
            yield Found(None, Counts(evicted=at - stretch.first), (lost,))
        if at == stretch.stop:
            return
        try:
            for rows in log.batches(at, stretch.stop, bytes_max=CHUNK_BYTES):
                until = int(rows.seq[-1]) + 1
                yield Found(rows, Counts(holes=until - at - len(rows)))
                at = until
        except OutOfRange as error:
            raise Unavailable(f"{error}; retention passed this reader, run the query again") from error
        if at < stretch.stop:
            yield Found(None, Counts(holes=stretch.stop - at))


def _segment(held: range, size: int) -> Segment:
    def at(seq: int) -> int:
        return size * (min(seq, held.stop) - held.start) // len(held)

    return Segment(held.start, held.stop, size, True, at, lambda: None)
