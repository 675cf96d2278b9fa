"""How hard the server is pressed, and what is done about it, sample by sample."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tidelog.server.push import scheduling as ladder
from tidelog.server.push.scheduling import Governor, commit_delay_ms, notify_delay_us

MS = 1_000


class Samples:
    """A governor with one loop and two threads, and the time."""

    def __init__(self) -> None:
        self.governor = Governor(workers=1, threads=2)
        self.now_us = 0

    def __call__(
        self, times: int = 1, *, ready: int = 0, busy: int = 0, ingest: float = 0.0, delay_us: int | None = None
    ) -> float:
        for _ in range(times):
            self.now_us += 100 * MS
            if delay_us is not None:
                self.governor.record_delay(delay_us)
            self.governor.sample(self.now_us, ready=ready, busy=busy, ingest=ingest)
        return self.governor.pressure

    def press(self, pressure: float) -> None:
        """Have the pressure be just this, from one sample to the next."""
        ingest = self.governor._ingest_signal
        assert self(ingest=min(max(2 * pressure - ingest, 0.0), 1.0)) == pytest.approx(pressure, abs=0.011)


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ({"ready": 256}, 1.0),
        ({"ready": 128, "delay_us": 0}, 0.5),
        ({"ready": 100_000}, 1.0),
        ({"delay_us": 5_000}, 1.0),
        ({"delay_us": 1_000}, 0.2),
        ({"delay_us": 9_000_000}, 1.0),
        ({"ingest": 1.0}, 1.0),
        ({"ingest": 0.3}, 0.3),
        ({"busy": 1}, 0.25),
        ({"busy": 2}, 0.5),
        ({"busy": 90}, 0.5),
        ({"ready": 64, "delay_us": 3_000, "busy": 1}, 0.6),
        ({}, 0.0),
    ],
)
def test_pressure_is_the_highest_signal(signal: dict[str, int], expected: float) -> None:
    sample = Samples()
    assert sample(20, **signal) == pytest.approx(expected, abs=0.001)
    assert 0.0 <= sample.governor.pressure <= 1.0


def test_latency_is_the_mean_of_delays_since_the_last_sample() -> None:
    governor = Governor(workers=1, threads=2)
    for _ in range(30):
        for delay_us in (0, 1_000, 2_000):
            governor.record_delay(delay_us)
        governor.sample(0, ready=0, busy=0, ingest=0.0)
    assert governor.latency_us == pytest.approx(1_000, abs=1)
    assert governor.pressure == pytest.approx(0.2, abs=0.001)


def test_unserved_topics_count_as_late() -> None:
    sample = Samples()
    assert sample(8, ready=1) > 0.9


def test_one_stall_is_one_high_sample() -> None:
    """A checkpoint or a collection of garbage that stops everything for a second defers and refuses nothing."""
    sample = Samples()
    assert sample(delay_us=1_000_000) == 0.5
    assert sample(delay_us=100) < 0.3
    assert not sample.governor.is_deferring


def test_pressure_falls_to_zero_when_idle() -> None:
    sample = Samples()
    sample(10, ready=999, busy=2, ingest=1.0, delay_us=10_000)
    assert sample.governor.is_saturated
    assert not sample.governor.is_calm
    falls = [sample() for _ in range(10)]
    assert falls == sorted(falls, reverse=True)
    assert falls[-1] == 0.0
    assert bool(sample.governor.is_calm)
    sample.governor.record_delay(1)
    assert not sample.governor.is_calm, "there is something to sample"


# Windows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pressure", "expected_us"), [(0.0, 0), (0.2, 0), (0.201, 25), (0.6, 10_000), (1.0, 20_000), (1.5, 20_000)]
)
def test_topics_are_notified_less_often_above_a_fifth(pressure: float, expected_us: int) -> None:
    assert notify_delay_us(pressure) == expected_us


@pytest.mark.parametrize(
    ("pressure", "expected_ms"),
    [(0.0, 0.0), (0.4, 0.0), (0.41, 4.395), (0.5, 5.25), (0.8, 8.1), (1.0, 10.0), (2.0, 10.0)],
)
def test_commits_are_delayed_above_two_fifths(pressure: float, expected_ms: float) -> None:
    """G16, G17."""
    assert commit_delay_ms(pressure) == pytest.approx(expected_ms)


def test_reactions_start_in_order_of_pressure() -> None:
    sample = Samples()
    steps = []
    for _ in range(12):
        sample(ingest=1.0)
        it = sample.governor
        steps.append((it.notify_delay_us > 0, it.commit_delay_ms > 0, it.is_deferring, it.is_saturated))
    assert steps[0] == (True, True, False, False), "0.5 after one sample"
    assert steps[-1] == (True, True, True, True)
    for calmer, harder in pairwise(steps):
        assert all(now >= before for before, now in zip(calmer, harder, strict=True))
    first = {rung: next(at for at, step in enumerate(steps) if step[rung]) for rung in range(4)}
    assert first[0] <= first[1] < first[3] < first[2], "deferral is for what lasts"


# Deferral ---------------------------------------------------------------------------------------------------


def test_deferral_needs_half_a_second_above_its_threshold() -> None:
    sample = Samples()
    sample.press(0.5)
    sample.press(0.75)
    for _ in range(5):
        sample.press(0.85)
        assert not sample.governor.is_deferring
    sample.press(0.85)
    assert sample.governor.is_deferring, "0.5 s after the first of them"


def test_sample_below_the_threshold_restarts_the_half_second() -> None:
    sample = Samples()
    sample.press(0.5)
    sample.press(0.75)
    for pressure in (0.85, 0.85, 0.85, 0.85, 0.85, 0.79, 0.85, 0.85, 0.85, 0.85, 0.85):
        sample.press(pressure)
        assert not sample.governor.is_deferring
    sample.press(0.85)
    assert sample.governor.is_deferring


def test_deferral_does_not_change_between_the_thresholds() -> None:
    """Hysteresis: pressure that swings between 0.61 and 0.79 neither defers nor releases."""
    sample = Samples()
    sample.press(0.5)
    for _ in range(20):
        sample.press(0.61)
        sample.press(0.79)
        assert not sample.governor.is_deferring
    for _ in range(7):
        sample.press(0.88)
    assert sample.governor.is_deferring
    for _ in range(20):
        sample.press(0.61)
        sample.press(0.79)
        assert bool(sample.governor.is_deferring)
    sample.press(0.55)
    assert not bool(sample.governor.is_deferring)
    for _ in range(20):
        sample.press(0.61)
        sample.press(0.79)
        assert not sample.governor.is_deferring


def test_saturation_begins_near_one() -> None:
    sample = Samples()
    sample(30, ingest=0.94)
    before = sample.governor.is_saturated
    sample(30, ingest=0.96)
    assert (before, sample.governor.is_saturated) == (False, True)
    assert ladder.SATURATED_PRESSURE == 0.95
