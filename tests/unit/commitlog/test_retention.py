"""The retention policy, as tables of cases: which of the oldest segments may go, and why no more."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest

from tidelog.commitlog.cleaner import RetentionCandidate, decide_retention

NOW_MS = 1_000_000


def segments(*sizes_and_ages: tuple[int, int]) -> list[RetentionCandidate]:
    """Candidates of ten seqs each from 0 on; size in bytes, and the age of the newest record in ms."""
    return [
        RetentionCandidate(10 * number, 10 * number + 10, size, (NOW_MS - age_ms) * 1000)
        for number, (size, age_ms) in enumerate(sizes_and_ages)
    ]


FOUR = segments((100, 4_000), (100, 3_000), (100, 2_000), (100, 1_000))
UNEVEN = segments((500, 4_000), (1, 3_000), (300, 2_000), (200, 1_000))
RESTLESS = segments((100, 1_000), (100, 9_000), (100, 9_000))  # a young one in front of old ones


class Case(NamedTuple):
    name: str
    candidates: list[RetentionCandidate]
    drop: int
    because: str
    keep_ms: int | None = None
    keep_bytes: int | None = None
    high_watermark: int = 40
    committed: int | None = None
    active_bytes: int = 0


CASES = [
    Case("nothing to keep small", [], 0, "", keep_ms=0, keep_bytes=0),
    Case("no limit", FOUR, 0, "within limits"),
    Case("age: all younger", FOUR, 0, "within limits", keep_ms=4_000),
    Case("age: exactly the horizon stays", FOUR, 1, "within limits", keep_ms=3_000),
    Case("age: some older", FOUR, 2, "within limits", keep_ms=2_500),
    Case("age: all older", FOUR, 4, "every", keep_ms=999),
    Case("age: nothing is kept at all", FOUR, 4, "every", keep_ms=0),
    Case("age: a young one protects what lies behind it", RESTLESS, 0, "within limits", keep_ms=5_000),
    Case("size: exactly the limit stays", FOUR, 0, "within limits", keep_bytes=400),
    Case("size: one byte less", FOUR, 1, "within limits", keep_bytes=399),
    Case("size: half", FOUR, 2, "within limits", keep_bytes=200),
    Case("size: nothing", FOUR, 4, "every", keep_bytes=0),
    Case("size: oldest first, however small", UNEVEN, 2, "within limits", keep_bytes=500),
    Case("size: a tiny one goes when it must", UNEVEN, 1, "within limits", keep_bytes=501),
    Case("size: the active segment counts", FOUR, 1, "within limits", keep_bytes=400, active_bytes=1),
    Case("size: the active segment alone is too much", FOUR, 4, "every", keep_bytes=400, active_bytes=999),
    Case("both: age is stricter", FOUR, 3, "within limits", keep_ms=1_500, keep_bytes=200),
    Case("both: size is stricter", FOUR, 3, "within limits", keep_ms=3_500, keep_bytes=100),
    Case("watermark: inside a segment", FOUR, 1, "high watermark 15", keep_bytes=0, high_watermark=15),
    Case("watermark: at a segment's end", FOUR, 2, "high watermark 20", keep_bytes=0, high_watermark=20),
    Case("watermark: before everything", FOUR, 0, "high watermark 0", keep_bytes=0, high_watermark=0),
    Case("watermark: behind everything", FOUR, 4, "every", keep_bytes=0, high_watermark=999),
    Case("watermark: protects from age too", FOUR, 1, "watermark", keep_ms=0, high_watermark=19),
    Case("committed: nothing yet", FOUR, 0, "committed only 0", keep_bytes=0, committed=0),
    Case("committed: inside a segment", FOUR, 1, "committed only 19", keep_bytes=0, committed=19),
    Case("committed: a segment's end", FOUR, 2, "committed only 20", keep_bytes=0, committed=20),
    Case("committed: everything", FOUR, 4, "every", keep_bytes=0, committed=40),
    Case("committed: protects from age too", FOUR, 3, "committed only 39", keep_ms=0, committed=39),
    Case("committed and watermark: the lower one", FOUR, 1, "committed", keep_bytes=0, high_watermark=25, committed=10),
    Case("watermark and committed: the lower one", FOUR, 1, "watermark", keep_bytes=0, high_watermark=10, committed=25),
    Case("within limits needs no protection", FOUR, 0, "within limits", keep_bytes=999, high_watermark=0, committed=0),
]


def run(case: Case) -> tuple[int, str]:
    decision = decide_retention(
        case.candidates,
        now_us=NOW_MS * 1000,
        keep_ms=case.keep_ms,
        keep_bytes=case.keep_bytes,
        high_watermark=case.high_watermark,
        committed=case.committed,
        active_bytes=case.active_bytes,
    )
    return decision.drop_count, decision.reason


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_oldest_segments_go_until_a_limit_or_a_protection_says_stop(case: Case) -> None:
    """G106."""
    drop, because = run(case)
    assert drop == case.drop
    assert case.because in because


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_is_left_needs_no_second_pass(case: Case) -> None:
    """Deciding again about what was kept drops nothing more."""
    drop, _ = run(case)
    assert run(case._replace(candidates=case.candidates[drop:]))[0] == 0


def test_a_stricter_limit_never_drops_less() -> None:
    for keep in (range(700, -1, -50), range(5_000, -1, -250)):
        by_size = [run(Case("", UNEVEN, 0, "", keep_bytes=limit))[0] for limit in keep]
        by_age = [run(Case("", UNEVEN, 0, "", keep_ms=limit))[0] for limit in keep]
        assert all(less <= more for found in (by_size, by_age) for less, more in pairwise(found))
