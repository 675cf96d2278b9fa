"""The governor: how loaded the server is, and its reactions.

    signal     full at                                     counts
    ready      256 ready topics for each worker            whole     writes outrun notifications
    latency    5 ms from ready to served, on average       whole     the loop is late
    ingest     a WAL queue at its limit                    whole     writes outrun commits, with or without readers
    pool       every thread at work                        half      long reads alone are no reason to reject a write

    pressure    0     0.2                  0.4               0.6       0.8              0.95
                │ calm │ notify less often ─┼─ commit less often ────────┼───────────────────┼─► reject writes that
                │      │ 0 to 20 ms a topic │ 0.5 to 10 ms a batch       │ 0.5 s of it:      │   would wait
                                                                         │ defer low work
                                                               released ◄┘
                                                               below 0.6

Each signal is cut off at full and then smoothed, so that one long stall is one bad sample and no more; the highest of
them is the pressure. It is sampled every 100 ms. Between 0.6 and 0.8 deferral does not change, so that it does not
toggle with every sample. A write is rejected at once; no accepted write is dropped.
"""

from __future__ import annotations

from typing import Final

SAMPLE_US: Final = 100_000
COALESCE_ABOVE_PRESSURE: Final = 0.2
COALESCE_US_MAX: Final = 20_000
COMMIT_DELAY_ABOVE_PRESSURE: Final = 0.4
COMMIT_DELAY_RANGE_MS: Final = (0.5, 10.0)
DEFER_ABOVE_PRESSURE: Final = 0.8
DEFER_AFTER_US: Final = 500_000
RELEASE_BELOW_PRESSURE: Final = 0.6
SATURATED_PRESSURE: Final = 0.95
LATENCY_US_MAX: Final = 5_000
READY_TOPICS_MAX: Final = 256  # for each worker
_POOL_WEIGHT: Final = 0.5
_SMOOTHING_FACTOR: Final = 0.5  # the weight of a sample against all before it
_NEGLIGIBLE_PRESSURE: Final = 0.01  # less counts as 0


def notify_delay_us(pressure: float) -> int:
    """Return how long a topic is not notified again after a notification, at this pressure."""
    if pressure <= COALESCE_ABOVE_PRESSURE:
        return 0
    return round(COALESCE_US_MAX * (min(pressure, 1.0) - COALESCE_ABOVE_PRESSURE) / (1.0 - COALESCE_ABOVE_PRESSURE))


def commit_delay_ms(pressure: float) -> float:
    """Return how long commits may be collected before they are written, at this pressure."""
    shortest_ms, longest_ms = COMMIT_DELAY_RANGE_MS
    return (
        shortest_ms + (longest_ms - shortest_ms) * min(pressure, 1.0) if pressure > COMMIT_DELAY_ABOVE_PRESSURE else 0.0
    )


class Governor:
    """Decides by the last `sample`. Not thread-safe, but `pressure` may be read from any thread."""

    def __init__(self, *, workers: int, threads: int) -> None:
        self._ready_max, self._threads = READY_TOPICS_MAX * workers, threads
        self.pressure = 0.0
        self.notify_delay_us = 0
        self.is_deferring = False
        self.latency_us = 0.0  # smoothed
        self._latency_signal = self._ready_signal = self._ingest_signal = self._pool_signal = (
            0.0  # the signals, smoothed
        )
        self._served_count = self._delay_sum_us = 0  # since the last sample
        self._above_since_us: int | None = None  # since when the pressure is above DEFER_ABOVE_PRESSURE
        self._sampled_us: int | None = None

    @property
    def is_saturated(self) -> bool:
        return self.pressure >= SATURATED_PRESSURE

    @property
    def is_calm(self) -> bool:
        """Whether further samples would change nothing."""
        return not self.pressure and not self.is_deferring and not self._served_count

    @property
    def commit_delay_ms(self) -> float:
        return commit_delay_ms(self.pressure)

    def record_delay(self, delay_us: int) -> None:
        """Record how long a topic waited after it could have been served."""
        self._served_count += 1
        self._delay_sum_us += delay_us

    def sample(self, now_us: int, *, ready: int, busy: int, ingest: float) -> None:
        """Take a sample, every 100 ms: ready topics, calls in the pool, and the fill level of the fullest WAL queue."""
        delay_us = self._delay_us(now_us, ready)
        self.latency_us = _smooth(self.latency_us, delay_us)
        self._latency_signal = _smooth(self._latency_signal, min(delay_us / LATENCY_US_MAX, 1.0))
        self._ready_signal = _smooth(self._ready_signal, min(ready / self._ready_max, 1.0))
        self._ingest_signal = _smooth(self._ingest_signal, min(ingest, 1.0))
        self._pool_signal = _smooth(self._pool_signal, _POOL_WEIGHT * min(busy / self._threads, 1.0))
        self.pressure = max(self._ready_signal, self._latency_signal, self._ingest_signal, self._pool_signal)
        self.notify_delay_us = notify_delay_us(self.pressure)
        self._sampled_us = now_us
        self._update_deferring(now_us)

    def _delay_us(self, now_us: int, ready: int) -> float:
        served_count, delay_sum_us = self._served_count, self._delay_sum_us
        self._served_count = self._delay_sum_us = 0
        if served_count:
            return delay_sum_us / served_count
        # Topics are ready and none was served: they have waited since the last sample.
        return now_us - self._sampled_us if ready and self._sampled_us is not None else 0.0

    def _update_deferring(self, now_us: int) -> None:
        if self.pressure <= DEFER_ABOVE_PRESSURE:
            self._above_since_us = None
            self.is_deferring = self.is_deferring and self.pressure >= RELEASE_BELOW_PRESSURE
            return
        if self._above_since_us is None:
            self._above_since_us = now_us
        self.is_deferring = self.is_deferring or now_us - self._above_since_us >= DEFER_AFTER_US


def _smooth(previous: float, sample: float) -> float:
    value = previous + _SMOOTHING_FACTOR * (sample - previous)
    return value if value >= _NEGLIGIBLE_PRESSURE else 0.0
