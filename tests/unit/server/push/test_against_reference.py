"""The ready set against one that looks through a list: the same calls, the same answers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.server.push.reference_scheduler import ReferenceScheduler

from tidelog.server.push.scheduling import FairQueue

KEYS = st.sampled_from([f"t{number}" for number in range(12)])
PRIORITIES = st.one_of(
    st.integers(-1000, 1000), st.sampled_from([-1000, -250, -1, 0, 249, 250, 499, 500, 749, 750, 1000])
)
STEPS = st.one_of(
    st.tuples(st.just("mark"), KEYS, PRIORITIES, st.booleans()),
    st.tuples(st.just("mark"), KEYS, PRIORITIES, st.booleans()),
    st.tuples(st.just("pop")),
    st.tuples(st.just("done")),
    st.tuples(st.just("serve"), st.integers(1, 12)),
    st.tuples(st.just("forget"), KEYS),
    st.tuples(st.just("pass"), st.sampled_from([1, 999, 10_000, 49_999, 50_000, 730_000, 2_500_000, 9_950_000])),
    st.tuples(st.sampled_from(["defer", "release"])),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, max_size=80))
def test_results_equal_the_reference_scheduler(steps: list[tuple[object, ...]]) -> None:
    ready: FairQueue[str] = FairQueue()
    naive = ReferenceScheduler()
    now_us, serving = 0, list[str]()

    def pop() -> str | None:
        turn, expected = ready.pop(now_us), naive.pop(now_us)
        assert (None if turn is None else tuple(turn)) == expected
        return None if turn is None else turn.key

    for step in steps:
        match step:
            case ("mark", str(key), int(priority), bool(fan_out)):
                news = ready.add(key, priority, now_us, fan_out=fan_out)
                assert news == naive.mark(key, priority, now_us, fan_out)
            case ("pop",):
                serving += [key for key in [pop()] if key is not None]
            case ("done",) if serving:
                key = serving.pop(0)
                assert ready.done(key) == naive.done(key)
            case ("serve", int(times)):
                for _ in range(times):
                    if (served := pop()) is not None:
                        assert ready.done(served) == naive.done(served)
            case ("forget", str(key)):
                ready.discard(key)
                naive.forget(key)
            case ("pass", int(us)):
                now_us += us
            case ("defer",):
                ready.defer()
                naive.defer()
            case ("release",):
                ready.resume_deferred(now_us)
                naive.release(now_us)
        assert (len(ready), ready.deferred_count) == (len(naive.can()), naive.deferred)
    for key in serving:
        assert ready.done(key) == naive.done(key)
    while pop() is not None:
        pass
