"""The jitter window and the fair share: pure, and through threads that claim together."""

from __future__ import annotations

from random import Random
from threading import Event, Thread

import pytest
from tests.unit.engine.harness import TIMEOUT_S, EngineHarness, running

from tidelog.engine import ClaimRequest, ClaimResult, ClaimWindow, divide_jobs
from tidelog.engine.queues.claim import BlockingClaimWindow
from tidelog.errors import Closed
from tidelog.testing import ManualClock


@pytest.mark.parametrize(
    ("available", "wants", "shares"),
    [
        (20, [10, 10, 10, 10], [5, 5, 5, 5]),
        (9, [2, 100], [2, 7]),
        (3, [2, 2], [2, 1]),
        (0, [1, 1], [0, 0]),
        (5, [1], [1]),
        (5, [0, 3], [0, 3]),
        (5, [], []),
        (2, [1, 1, 1], [1, 1, 0]),
    ],
)
def test_divide_jobs_shares_evenly_up_to_each_maximum(available: int, wants: list[int], shares: list[int]) -> None:
    assert [len(share) for share in divide_jobs(available, wants)] == shares


def test_divide_jobs_deals_one_job_at_a_time() -> None:
    random = Random(7)
    for _ in range(300):
        available, wants = random.randrange(40), [random.randrange(9) for _ in range(random.randrange(1, 7))]
        dealt: list[list[int]] = [[] for _ in wants]
        left = list(range(available))
        while left and any(len(share) < want for share, want in zip(dealt, wants, strict=True)):
            for share, want in zip(dealt, wants, strict=True):
                if left and len(share) < want:
                    share.append(left.pop(0))
        assert divide_jobs(available, wants) == dealt, (available, wants)


def test_the_first_claimer_opens_the_window_and_the_last_to_leave_closes_it() -> None:
    cohort: ClaimWindow[str] = ClaimWindow(100)
    assert [cohort.due_ms] == [None]
    cohort.join(1_000, "first", ClaimRequest("a", 1))
    cohort.join(1_050, "second", ClaimRequest("b", 2))
    assert cohort.due_ms == 1_100
    cohort.leave("first")
    assert cohort.due_ms == 1_100, "a claimer that leaves does not block the others"
    assert cohort.close() == [("second", ClaimRequest("b", 2))]
    assert [cohort.due_ms] == [None]
    cohort.join(2_000, "third", ClaimRequest("c", 1))
    assert [cohort.due_ms] == [2_100]
    cohort.leave("second")  # served long ago
    cohort.leave("third")
    assert [cohort.due_ms] == [None]
    assert cohort.close() == []


def test_threads_that_claim_within_the_window_share_fairly() -> None:
    world = EngineHarness()
    jobs = world.log.queue("jobs", claim_jitter_ms=20)
    jobs.put(list(range(20)))
    got: dict[str, int] = {}

    def claim(node: str) -> None:
        got[node] = len(jobs.claim(node, 10))

    threads = [Thread(target=claim, args=(node,), daemon=True) for node in "abcd"]
    for thread in threads:
        thread.start()
    window = jobs._state.claim_window
    assert window is not None
    _until(lambda: len(window._window) == 4)
    assert got == {}, "the window is open by the clock, which stands still"
    world.clock.tick(20)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert got == dict.fromkeys("abcd", 5)


def _until(condition: object) -> None:
    pause = Event()
    for _ in range(TIMEOUT_S * 1000):
        if condition():  # type: ignore[operator]
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")


class _Refuses(Exception):
    pass


def _refuse(_: object) -> float | None:
    raise _Refuses


def test_jobs_of_a_claimer_that_left_are_returned() -> None:
    clock = ManualClock()
    served: list[list[str]] = []
    returned: list[str] = []
    leased = ClaimResult([1], [1], [0], [1], [])

    def serve(wants: object) -> list[ClaimResult]:
        served.append([want.node for want in wants])  # type: ignore[attr-defined]
        return [leased] * len(served[-1])

    window = BlockingClaimWindow(clock, serve, lambda want, _: returned.append(want.node))
    answers: list[ClaimResult] = []
    with running(lambda: answers.append(window.claim(ClaimRequest("stays", 1), 10))):
        _until(lambda: len(window._window) == 1)
        real = window._left_s
        window._left_s = _refuse  # type: ignore[method-assign,assignment]
        with pytest.raises(_Refuses):
            window.claim(ClaimRequest("leaves", 1), 10)
        window._left_s = real  # type: ignore[method-assign]
        clock.tick(10)
    assert served == [["stays"]]
    assert answers == [leased]
    assert returned == []


def test_an_error_of_a_round_is_raised_in_all_its_claimers() -> None:
    clock = ManualClock()

    def serve(_: object) -> list[ClaimResult]:
        raise Closed("gone")

    window = BlockingClaimWindow(clock, serve, lambda *_: None)
    failed: list[str] = []

    def claim() -> None:
        try:
            window.claim(ClaimRequest("a", 1), 10)
        except Closed as error:
            failed.append(str(error))

    with running(claim, claim):
        _until(lambda: len(window._window) == 2)
        clock.tick(10)
    assert failed == ["gone"] * 2
