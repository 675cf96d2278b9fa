"""The messages of one channel: a segmented log with the `narwhal` codec in the channel's directory.

    append   assigns seqs and writes; acknowledges nothing
    sync     everything appended before survives a power cut
    keep     seals the active segment at half of the kept messages and drops whole segments

A failed sync or a device error while writing latches the log until the directory is opened again: an entry after a
hole must never be acknowledged. A latched log is therefore never closed and reopened.
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

_SEAL_MESSAGES_MIN = 64  # a seal takes four syncs: a channel that keeps three messages must not seal at each one


class Message(NamedTuple):
    """One message, the same for every subscriber."""

    channel: str
    seq: int
    ts_ms: int
    sender: str
    payload: bytes


class ManualSyncClock:
    """A clock that is no SystemClock, so that the log starts no sync thread: the channel decides when to sync."""

    def __init__(self, clock: Clock) -> None:
        self.now_us, self.monotonic_ms, self.monotonic_us = clock.now_us, clock.monotonic_ms, clock.monotonic_us


class MessageLog:
    """Not thread-safe, except that `sync` and `read` may run concurrently with `append`."""

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
        # Holes arise only during recovery.
        self._holes = [hole for segment in self._log._log_state.sealed if (hole := _find_hole(segment)) is not None]
        for damage in self._log.report.damage:
            metrics.add("message_log_sealed_segment_truncations")
            metrics.add("message_log_crc_failures", by=damage.fault.resume > damage.fault.seq)

    @property
    def first_seq(self) -> int:
        """The oldest kept seq."""
        return self._log.lowest

    @property
    def last_seq(self) -> int:
        """The newest seq; one less than `first_seq` if the log is empty."""
        return self._log.highest - 1

    def skip_hole(self, seq: int) -> int:
        """Return this seq, or the first one after it that is in no hole."""
        for start, stop in self._holes:
            if start <= seq < stop:
                seq = stop
        return seq

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Ranges of seqs that a power cut lost before their sync and that are not assigned again: first and last."""
        return [(start, stop - 1) for start, stop in self._holes if stop > self.first_seq]

    def count_hole_seqs(self, first: int, stop: int) -> int:
        """Count the seqs of [first, stop) that are in holes."""
        return sum(max(min(end, stop) - max(start, first), 0) for start, end in self._holes)

    def count_from(self, seq: int) -> int:
        """Count the messages from `seq` on, without holes."""
        stop = self.last_seq + 1
        return stop - seq - self.count_hole_seqs(seq, stop)

    def newest_start(self, stop: int, messages: int) -> int:
        """Return the first seq of the newest `messages` below `stop`, without holes."""
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
        """Damage that recovery found and could not repair."""
        return [line for line in self._log.report.lines() if line.startswith("damage")]

    def append(self, payloads: list[bytes], sender: bytes) -> tuple[int, int]:
        """Append messages; return the first seq and their common timestamp."""
        with self._metrics.timed("message_log_append_duration"):
            seqs = self._log.append_many(payloads, node=sender)
        return seqs.start, self._log._log_state.active.last_ts_us // 1000

    def sync(self) -> None:
        """Make everything appended survive a power cut, concurrently with appends. Raises Latched with `written` None:
        the caller's messages are written, but it is unknown whether they are on disk."""
        with self._metrics.timed("message_log_flush_duration", "message_log_flushes"):
            # Not the check of an append, whose error states that nothing was written.
            self._log._log_state.latch.check_before_sync()
            self._log.sync_concurrently()

    def keep_newest(self, messages: int) -> None:
        """Drop messages before the newest `messages`, in whole segments. Only durable messages count: those that a
        power cut can lose must not displace those that survive it."""
        self._seal_if_large(messages)
        self.drop_below(self.newest_start(self._log.durable, messages))

    def keep_from_seq(self, seq: int, messages: int) -> None:
        """Drop messages before `seq`, in whole segments, each of which holds at most half of `messages`."""
        self._seal_if_large(messages)
        self.drop_below(seq)

    def _seal_if_large(self, messages: int) -> None:
        if self._log.highest - self._log._log_state.active.base >= max(messages // 2, _SEAL_MESSAGES_MIN):
            self._log.seal()
            self._metrics.add("message_log_segments_rolled")

    def drop_below(self, seq: int) -> None:
        """Drop sealed segments that end at or before `seq`."""
        sealed = self._log._log_state.sealed
        if not sealed or sealed[0].stop > seq:
            return
        dropped = self._log.drop_below(seq)
        self._metrics.add("message_log_segments_evicted", by=dropped.segments)
        self._metrics.add("message_log_evicted_bytes", by=dropped.bytes)

    def read(self, first: int, *, limit: int, bytes_max: int, skip_damage: bool = False) -> list[Message]:
        """Return messages from `first` on, within both limits. `first` must be in the log."""
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
        """Return the first seq that is not older than this; one past the last if all are older."""
        return self._log.seek_time(max(ts_ms, 0) * 1000)

    def close(self) -> None:
        self._log.close()


def _find_hole(segment: SealedSegment) -> tuple[int, int] | None:
    """Return the seqs at the end of a segment that a power cut lost before their sync and that are not assigned again
    (docs/decisions/0030). Lost or damaged records are no hole: reading them raises Corrupt."""
    if segment.lost_reason or segment.salvage is not None:
        return None
    content, stop = segment.content(), segment.stop
    end = segment.files.codec.end_seq(content)
    if end >= stop or segment.read(content, end, stop, 1).fault is not None:
        return None
    return end, stop
