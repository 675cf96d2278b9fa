"""[shell] The messages of one channel: a segmented log with the `narwhal` codec, in the channel's own directory.

    append   seqs are taken and the operating system has the bytes; nobody is told
    sync     everything appended before survives a power cut
    keep     the log holds what the channel keeps: sealed in halves of it, dropped by whole segments

A failed sync, or an error of the device while writing, latches the log until the directory is opened
again: an entry behind a hole must never be acknowledged. So a latched log is never closed and opened anew.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.channels.metrics import ChannelMetrics
from tidelog.channels.rules import ChannelLimits
from tidelog.clock import Clock
from tidelog.commitlog import LogConfig, SegmentedLog
from tidelog.commitlog.segment import SealedSegment
from tidelog.disk.interface import Disk
from tidelog.errors import Corrupt

_SEAL_MESSAGES_MIN = 64  # messages: a seal is four syncs, so a channel that keeps three does not seal at each


class Message(NamedTuple):
    """One message, the same for all who receive it."""

    channel: str
    seq: int
    ts_ms: int
    sender: str
    payload: bytes


class ManualSyncClock:
    """A clock that the log does not take for the machine's own, so that it starts no thread: we say when to sync."""

    def __init__(self, clock: Clock) -> None:
        self.now_us, self.monotonic_ms, self.monotonic_us = clock.now_us, clock.monotonic_ms, clock.monotonic_us


class MessageLog:
    """Not thread-safe but for `sync` and `read`, which may run beside an `append`."""

    def __init__(
        self,
        channel: str,
        directory: str,
        *,
        disk: Disk,
        clock: Clock,
        limits: ChannelLimits,
        metrics: ChannelMetrics,
        first_seq: int = 1,
        read_only: bool = False,
        verify: bool = True,
    ) -> None:
        self._channel, self._metrics = channel, metrics
        config = LogConfig(
            sync="interval",
            sync_interval_ms=1 << 40,
            segment_bytes_max=limits.segment_bytes,
            segment_age_ms_max=None,
            first_seq=first_seq,
            maps_max=16,
            verify_on_open=verify,
        )
        with metrics.timed("message_log_recovery_duration"):
            self._log = SegmentedLog.open(
                directory, "narwhal", read_only=read_only, disk=disk, clock=ManualSyncClock(clock), config=config
            )
        # They appear only while a log is opened.
        self._holes = [hole for segment in self._log._log_state.sealed if (hole := _find_hole(segment)) is not None]
        for damage in self._log.report.damage:
            metrics.add("message_log_sealed_segment_truncations")
            metrics.add("message_log_crc_failures", by=damage.fault.resume > damage.fault.seq)

    @property
    def first_seq(self) -> int:
        """The oldest seq that is kept."""
        return self._log.lowest

    @property
    def last_seq(self) -> int:
        """The newest; one less than `first_seq` where there is none."""
        return self._log.highest - 1

    def skip_hole(self, seq: int) -> int:
        """This seq, or the first after it that is in no hole."""
        for start, stop in self._holes:
            if start <= seq < stop:
                seq = stop
        return seq

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Seqs that a power cut took before their sync and that are not given again: first and last of each range."""
        return [(start, stop - 1) for start, stop in self._holes if stop > self.first_seq]

    def count_hole_seqs(self, first: int, stop: int) -> int:
        """How many seqs of [first, stop) are in holes."""
        return sum(max(min(end, stop) - max(start, first), 0) for start, end in self._holes)

    def count_from(self, seq: int) -> int:
        """How many messages the log has from `seq` on; holes do not count."""
        stop = self.last_seq + 1
        return stop - seq - self.count_hole_seqs(seq, stop)

    def newest_start(self, stop: int, messages: int) -> int:
        """Where the newest `messages` below `stop` begin; holes do not count."""
        seq = stop - messages
        for start, end in reversed(self._holes):
            if seq < end <= stop:
                seq -= end - start
        return seq

    @property
    def is_synced(self) -> bool:
        """Whether everything appended survives a power cut."""
        return self._log.durable == self._log.highest

    @property
    def is_latched(self) -> bool:
        return self._log._log_state.latch.is_tripped

    @property
    def damage(self) -> list[str]:
        """What recovery found and could not mend."""
        return [line for line in self._log.report.lines() if line.startswith("damage")]

    def append(self, payloads: list[bytes], sender: bytes) -> tuple[int, int]:
        """Write messages; return the first seq and the time all of them have."""
        with self._metrics.timed("message_log_append_duration"):
            seqs = self._log.append_many(payloads, node=sender)
        return seqs.start, self._log._log_state.active.last_ts_us // 1000

    def sync(self) -> None:
        """Make everything appended survive a power cut, beside appends. Latched: what the caller appended is written,
        and whether it is on disk is not known (`written` is None)."""
        with self._metrics.timed("message_log_flush_duration", "message_log_flushes"):
            # not the check of an append, which says that nothing was written
            self._log._log_state.latch.check_before_sync()
            self._log.sync_concurrently()

    def keep_newest(self, messages: int) -> None:
        """Drop what lies before the newest `messages`, in whole segments. Counted from what is durable: what a power
        cut may take must not have pushed out what it leaves."""
        self._seal_if_large(messages)
        self.drop_below(self.newest_start(self._log.durable, messages))

    def keep_from_seq(self, seq: int, messages: int) -> None:
        """Drop what lies before `seq`, in whole segments, each of which holds half of `messages` at most."""
        self._seal_if_large(messages)
        self.drop_below(seq)

    def _seal_if_large(self, messages: int) -> None:
        if self._log.highest - self._log._log_state.active.base >= max(messages // 2, _SEAL_MESSAGES_MIN):
            self._log.seal()
            self._metrics.add("message_log_segments_rolled")

    def drop_below(self, seq: int) -> None:
        """Drop sealed segments that hold nothing from `seq` on."""
        sealed = self._log._log_state.sealed
        if not sealed or sealed[0].stop > seq:
            return
        done = self._log.drop_below(seq)
        self._metrics.add("message_log_segments_evicted", by=done.segments)
        self._metrics.add("message_log_evicted_bytes", by=done.bytes)

    def read(self, first: int, *, limit: int, bytes_max: int, skip_damage: bool = False) -> list[Message]:
        """Messages from `first` on, as many as fit. `first` lies inside what the log holds."""
        with self._metrics.timed("message_log_read_duration", "message_log_reads"):
            try:
                page = self._log.read_range(first, limit=limit, bytes_max=bytes_max, skip_damage=skip_damage)
            except Corrupt:
                self._metrics.add("message_log_crc_failures")
                raise
        self._metrics.add("message_log_entries_returned", by=len(page.records))
        channel = self._channel
        return [
            Message(channel, seq, ts_us // 1000, node.decode(), data) for seq, ts_us, data, node, _, _ in page.records
        ]

    def seek_time(self, ts_ms: int) -> int:
        """The first seq that is not older than this; one past the last where all are."""
        return self._log.seek_time(max(ts_ms, 0) * 1000)

    def close(self) -> None:
        self._log.close()


def _find_hole(segment: SealedSegment) -> tuple[int, int] | None:
    """Seqs at the end of a segment that a power cut took before their sync and that are not given again (decision
    0030). Records that are lost or damaged are no hole: a read of them raises Corrupt."""
    if segment.lost_reason or segment.salvage is not None:
        return None
    shape, stop = segment.content(), segment.stop
    reach = segment.files.codec.end_seq(shape)
    if reach >= stop or segment.read(shape, reach, stop, 1).fault is not None:
        return None
    return reach, stop
