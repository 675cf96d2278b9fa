"""Reserved seqs of a topic of class `disk`: a crash may lose a record, never free its seq.

    head      reserving_seq        pending.ceiling
    ├──────────────┼────────────────────────┤
    │ may be used  │ usable once the disk has the HeadWatermark frame that went along with a write; written when a
                     quarter of a large reservation was used quickly; no write waits for its sync

A write with seqs above `reserving_seq` carries a HeadWatermark of its own and waits until it is synced: the first write
does, and one that arrives before the pending reservation is synced. Sizes of reservations: docs/decisions/0008.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Final

from tidelog.clock import Clock
from tidelog.disk.interface import File
from tidelog.formats import control_frames, frame
from tidelog.wal import Commit, Shard

_SMALL_RESERVATION: Final = 256
RESERVATION_MAX: Final = 1 << 20  # seqs at a time, unless a batch is larger
_FAST_USE_MS: Final = 1000
_RESERVATION_GROWTH: Final = 8


@dataclass(slots=True)
class PendingReservation:
    """A HeadWatermark frame that is not synced yet."""

    ceiling: int
    file: File | None = None  # the WAL file that has it; None: not written yet
    end: int = 0


class SeqReservation:
    """The reserved seqs of one topic. `prepare` and `on_done` are called by the committer."""

    def __init__(self, topic_id: int, lock: Lock, clock: Clock, size_min: int) -> None:
        self._topic_id, self._lock, self._clock, self._size_min = topic_id, lock, clock, size_min
        self.reserved_seq = 0  # seqs up to here are durably reserved
        self.reserving_seq = 0  # plus what the commit that is being written reserves
        self.pending: PendingReservation | None = None  # the next one, valid once its frame is synced
        self._size, self._reserved_ms = 0, 0  # of the last reservation

    @property
    def ceiling(self) -> int:
        """Replay of what is written so far treats seqs up to here as assigned."""
        return max(self.reserved_seq, self.reserving_seq, 0 if self.pending is None else self.pending.ceiling)

    def raise_to(self, seq: int) -> None:
        """Record a reservation found by recovery."""
        self.reserved_seq = max(self.reserved_seq, seq)

    def is_needed(self, last: int) -> bool:
        """Whether a write up to `last` must carry its own reservation and wait for its sync."""
        return last > self.reserving_seq

    def prepare(
        self, commit: Commit, shard: Shard, first: int, last: int, ts_ms: int
    ) -> tuple[int, PendingReservation | None]:
        """Prepend the reservation frame that a write of seqs first to last needs.

        Returns the ceiling that the ack makes durable, and the reservation that a later sync completes.
        """
        self._apply_synced(shard)
        if last > self.reserving_seq:
            self.reserving_seq = last + self._next_size(last - first + 1)
            commit.prepend_durable(self._encode(self.reserving_seq, ts_ms))
            return self.reserving_seq, None
        if self._should_reserve_ahead(last):
            self.pending = PendingReservation(last + self._next_size(last - first + 1))
            commit.prepend(self._encode(self.pending.ceiling, ts_ms))
            shard.on_tick_needed()
            return 0, self.pending
        return 0, None

    def on_done(self, commit: Commit, ceiling: int, pending: PendingReservation | None, *, ok: bool) -> None:
        """Finish what `prepare` began, after the write succeeded or failed. With the topic's lock held."""
        if ok:
            self.reserved_seq = max(self.reserved_seq, ceiling)
            if pending is not None:
                pending.file, pending.end = commit.file, commit.offset + commit.size
            return
        self.reserving_seq = self.reserved_seq
        if pending is not None:
            self.pending = None

    def _encode(self, ceiling: int, ts_ms: int) -> bytes:
        body = control_frames.encode(control_frames.HeadWatermark(ceiling))
        return frame.encode(frame.HEAD_WATERMARK, topic_id=self._topic_id, ts_ms=ts_ms, data=body)

    def _apply_synced(self, shard: Shard) -> None:
        """Make the pending reservation usable if its frame is synced by now."""
        pending = self.pending
        if pending is None or pending.file is None or not shard.is_synced(pending.file, pending.end):
            return
        with self._lock:
            self.reserved_seq = max(self.reserved_seq, pending.ceiling)
            self.reserving_seq, self.pending = max(self.reserving_seq, self.reserved_seq), None

    def _should_reserve_ahead(self, last: int) -> bool:
        """Whether a write up to `last` should carry a reservation for later writes: a quarter was used quickly.

        Small reservations are never renewed ahead: the head of a topic with few writes must not jump by more (contract
        §4).
        """
        if self.pending is not None or self._size <= _SMALL_RESERVATION:
            return False
        return 4 * (self.reserving_seq - last) < 3 * self._size and self._was_used_within(_FAST_USE_MS // 4)

    def _next_size(self, count: int) -> int:
        """Return how many seqs to reserve: more if the last one was used up quickly, since each costs a sync."""
        size_min = max(self._size_min, 4 * count)
        grown = _RESERVATION_GROWTH * self._size if self._size and self._was_used_within(_FAST_USE_MS) else 0
        self._size = min(max(size_min, grown), max(RESERVATION_MAX, size_min))
        self._reserved_ms = self._clock.monotonic_ms()
        return self._size

    def _was_used_within(self, duration_ms: int) -> bool:
        return self._clock.monotonic_ms() - self._reserved_ms < duration_ms
