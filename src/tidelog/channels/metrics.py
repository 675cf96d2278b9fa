"""Counters and histograms of channels. The exporter adds prefix and format; no decision depends on them.

    channels_active                            gauge
    channel_joins{result}, channel_leaves, channels_deleted
    store_saves{result}, store_deletes{result}, store_loads{result}, store_sweeps{result}
    message_log_flushes{result}, message_log_reads{result}, message_log_deletes{result}
    message_log_entries_returned, message_log_segments_rolled, message_log_segments_evicted,
    message_log_evicted_bytes, message_log_crc_failures, message_log_sealed_segment_truncations,
    message_log_hole_seqs                      lost to power cuts before their sync, in the logs opened since the start
    broadcasts{result}, broadcast_payload_bytes, deliveries, outbound_queue_full
    fifo_pushes{result}, fifo_pops{result}, fifo_clears{result}, fifo_seqs_passed_over
    hook_payloads{valid, valid_altered, invalid, error}, auth_attempts{result}
    store_save_duration, store_load_duration, message_log_append_duration, message_log_flush_duration,
    message_log_read_duration, message_log_recovery_duration, fifo_cursor_duration      histograms, in seconds

`result` is `success`, or the code of the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

from tidelog.clock import Clock
from tidelog.commitlog.metrics import DURATION_BOUNDS_S, DurationHistogram
from tidelog.errors import Error

__all__ = ["DURATION_BOUNDS_S", "SUCCESS", "ChannelMetrics", "DurationHistogram"]  # the server has both kinds

SUCCESS: Final = "success"


class ChannelMetrics:
    """Counters by name and result. Safe to use from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.durations: dict[str, DurationHistogram] = {}

    def add(self, name: str, result: str = "", by: int = 1) -> None:
        with self._lock:
            self.counts[name, result] += by

    def add_all(self, *more: tuple[str, str, int]) -> None:
        """Add to several counters at once: name, result, increment."""
        with self._lock:
            for name, result, by in more:
                self.counts[name, result] += by

    def get(self, name: str, result: str = "") -> int:
        """Return the value of one counter."""
        return self.counts[name, result]

    @contextmanager
    def timed(self, duration: str, counter: str | None = None) -> Iterator[None]:
        """Measure the duration of a block; with `counter`, count its result as well."""
        start_us, result = self._clock.monotonic_us(), SUCCESS
        try:
            yield
        except Error as error:
            result = error.code
            raise
        except OSError:
            result = "os_error"
            raise
        finally:
            elapsed_s = (self._clock.monotonic_us() - start_us) / 1e6
            with self._lock:
                self.durations.setdefault(duration, DurationHistogram()).add(elapsed_s)
                if counter is not None:
                    self.counts[counter, result] += 1

    @contextmanager
    def counted(self, counter: str) -> Iterator[None]:
        """Count the result of a block."""
        try:
            yield
        except Error as error:
            self.add(counter, error.code)
            raise
        self.add(counter, SUCCESS)
