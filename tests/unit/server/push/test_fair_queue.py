"""Whose turn it is, on a clock that is moved by hand: shares, order, age, membership, deferral, and the bound."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tidelog.server.push.scheduling import FairQueue

S = 1_000_000  # µs
TICK = 50_000


def serve(ready: FairQueue[str], now_us: int) -> str:
    turn = ready.pop(now_us)
    assert turn is not None
    ready.done(turn.key)
    return turn.key


def drain(ready: FairQueue[str], now_us: int) -> list[str]:
    found = []
    while len(ready):
        found.append(serve(ready, now_us))
    return found


# Shares -----------------------------------------------------------------------------------------------------


def test_full_bands_are_served_eight_four_two_one_one() -> None:
    """Method: every topic is added again as soon as it was served, at one moment, so that none ages."""
    ready: FairQueue[str] = FairQueue()
    priorities = {"a": 800, "b": 600, "c": 300, "d": 100, "e": -5}
    for band, priority in priorities.items():
        for number in range(20):
            ready.add(f"{band}{number}", priority, 0)
    served: Counter[str] = Counter()
    for _ in range(1600):
        key = serve(ready, 0)
        served[key[0]] += 1
        ready.add(key, priorities[key[0]], 0)
    assert served == {"a": 800, "b": 400, "c": 200, "d": 100, "e": 100}


def test_round_serves_bands_from_the_top_down() -> None:
    ready: FairQueue[str] = FairQueue()
    for band, priority in (("e", -1), ("d", 0), ("c", 250), ("b", 500), ("a", 750)):
        for number in range(20):
            ready.add(f"{band}{number:02}", priority, 0)
    first = "".join(serve(ready, 0)[0] for _ in range(32))
    assert first == "aaaaaaaabbbbccde" * 2


def test_unused_credit_of_a_band_goes_to_the_others() -> None:
    ready: FairQueue[str] = FairQueue()
    for number in range(30):
        ready.add(f"d{number:02}", 0, 0)
    assert drain(ready, 0) == [f"d{number:02}" for number in range(30)]


def test_credit_does_not_carry_over_to_the_next_round() -> None:
    """A band that was empty for long gets its weight and no more when it has work again."""
    ready: FairQueue[str] = FairQueue()
    for number in range(100):
        ready.add(f"d{number:02}", 0, 0)
    for _ in range(50):
        serve(ready, 0)
    for number in range(50):
        ready.add(f"a{number:02}", 1000, 0)
    # What is left of the round in which the last of `d` was served, and then whole ones.
    assert "".join(serve(ready, 0)[0] for _ in range(26)) == "aaaaaaaa" + "aaaaaaaad" * 2


def test_urgent_topic_waits_for_at_most_eight_turns_of_lower_bands() -> None:
    ready: FairQueue[str] = FairQueue()
    for band, priority in (("e", -1), ("d", 0), ("c", 250), ("b", 500), ("a", 750)):
        for number in range(20):
            ready.add(f"{band}{number:02}", priority, 0)
    for _ in range(8):
        serve(ready, 0)
    before = []
    while (key := serve(ready, 0))[0] != "a":
        before.append(key)
    assert len(before) == 8


# Order ------------------------------------------------------------------------------------------------------


def test_longest_wait_is_first_within_a_band() -> None:
    ready: FairQueue[str] = FairQueue()
    ready.add("late", 700, 30)
    ready.add("early", 500, 10)
    ready.add("middle", 600, 20)
    assert drain(ready, 40) == ["early", "middle", "late"]


def test_promoted_topic_is_before_later_ones() -> None:
    ready: FairQueue[str] = FairQueue()
    ready.add("risen", 490, 0)
    ready.add("later", 600, 60_000)
    ready.add("latest", 600, 150_000)
    assert serve(ready, 99_999) == "later", "not risen yet: the tick at 100 ms lifts it"
    assert drain(ready, 160_000) == ["risen", "latest"]


# Membership -------------------------------------------------------------------------------------------------


def test_topic_is_queued_once_however_often_it_is_added() -> None:
    ready: FairQueue[str] = FairQueue()
    assert ready.add("t", 0, 0)
    assert not ready.add("t", 900, 1)
    assert (len(ready), "t" in ready) == (1, True)
    assert drain(ready, 2) == ["t"]
    assert ready.pop(3) is None


def test_topic_added_while_it_is_served_is_queued_again_once() -> None:
    ready: FairQueue[str] = FairQueue()
    ready.add("t", 0, 0)
    assert ready.pop(1) is not None
    assert ready.add("t", 0, 2)
    assert not ready.add("t", 0, 3)
    assert (len(ready), ready.pop(4)) == (0, None), "it is in service and cannot be popped again"
    assert ready.done("t")
    turn = ready.pop(12)
    assert turn is not None
    assert turn.waited_us == 10, "since the first mark after it was taken"
    assert not ready.done("t")
    assert ready.pop(13) is None


def test_requeued_topic_is_in_the_band_of_its_wait() -> None:
    """Found by the model: a long service, with a mark at its beginning and a tick before its end."""
    ready: FairQueue[str] = FairQueue()
    ready.add("t", 0, 0)
    assert ready.pop(0) is not None
    ready.add("t", 245, 0)
    ready.add("older", 0, 0)
    ready.add("other", 900, 0)
    assert serve(ready, TICK) == "other"
    assert ready.done("t")
    assert serve(ready, TICK) == "t", "245 and 5 for the wait are B2"


def test_discarded_topic_is_not_served() -> None:
    ready: FairQueue[str] = FairQueue()
    for key in "abc":
        ready.add(key, 0, 0)
    ready.discard("b")
    ready.discard("unknown")
    assert (len(ready), "b" in ready) == (2, False)
    turn = ready.pop(1)
    assert turn is not None
    ready.add(turn.key, 0, 2)
    ready.discard(turn.key)
    assert not ready.done(turn.key), "nor what it was marked for meanwhile"
    assert drain(ready, 3) == ["c"]


# Age --------------------------------------------------------------------------------------------------------


def test_topic_with_constant_writes_ages() -> None:
    """Being marked again does not start its wait anew; being served does."""
    ready: FairQueue[str] = FairQueue()
    for ms in range(0, 3000, 10):
        ready.add("busy", 0, ms * 1000)
    turn = ready.pop(3 * S)
    assert turn is not None
    assert (turn.waited_us, turn.scheduler_delay_us) == (3 * S, 3 * S)
    ready.done("busy")
    ready.add("busy", 0, 3 * S)
    turn = ready.pop(3 * S + 7)
    assert turn is not None
    assert turn.waited_us == 7


@pytest.mark.parametrize(("waited_s", "before"), [(0.0, 14), (2.5, 12), (5.0, 8), (7.5, 0), (10.0, 0)])
def test_waiting_promotes_a_topic_band_by_band(waited_s: float, before: int) -> None:
    """Method: a full round of new topics beside it; the number of those before it is its band."""
    ready: FairQueue[str] = FairQueue()
    ready.add("old", 0, 0)
    now_us = int(waited_s * S)
    for band, (priority, number) in {"a": (900, 8), "b": (600, 4), "c": (300, 2), "d": (100, 1)}.items():
        for at in range(number):
            ready.add(f"{band}{at}", priority, now_us)
    served = drain(ready, now_us)
    assert served.index("old") == before, served


def test_bands_are_updated_on_a_grid_of_fifty_milliseconds() -> None:
    for now_us, first in ((7_549_999, "fresh"), (7_550_000, "old")):
        ready: FairQueue[str] = FairQueue()
        ready.add("old", 0, 10_000)  # in the top band at 7.51 s, seen at 7.55 s
        ready.add("fresh", 800, 7_500_000)
        assert serve(ready, now_us) == first


@pytest.mark.parametrize("priority", [-1000, -250, 0, 400, 740])
@pytest.mark.parametrize("rivals", [1, 8, 40])
def test_no_topic_waits_longer_than_the_bound(priority: int, rivals: int) -> None:
    """10 s and a tick to the top band, then 2k + 8 turns with k topics there that were ready no later.

    Method: rivals of the top band that are ready again in the moment they were served, ten turns a millisecond: more
    than the loop could ever do for them."""
    ready: FairQueue[str] = FairQueue()
    for number in range(rivals):
        ready.add(f"a{number}", 1000, 0)
    ready.add("low", priority, 0)
    turns_at_top, now_us = 0, 0
    while (key := serve(ready, now_us)) != "low":
        ready.add(key, 1000, now_us)
        now_us += 100
        turns_at_top += now_us > 10 * S + TICK
        assert turns_at_top <= 2 * (rivals + 1) + 8
    assert now_us <= 10 * S + TICK + 100 * (2 * (rivals + 1) + 8)


def test_bound_holds_when_every_band_is_full() -> None:
    """Method: random topics of all priorities, each ready again when served; everybody's wait is held to the bound."""
    random = Random(5)
    ready: FairQueue[str] = FairQueue()
    priorities = {f"t{number}": random.choice((-900, -10, 0, 200, 300, 600, 800, 1000)) for number in range(300)}
    for key, priority in priorities.items():
        ready.add(key, priority, 0)
    step_us, now_us, longest_us = 50_000, 0, 0
    for _ in range(6_000):
        turn = ready.pop(now_us)
        assert turn is not None
        longest_us = max(longest_us, turn.waited_us)
        ready.done(turn.key)
        ready.add(turn.key, priorities[turn.key], now_us)
        now_us += step_us
    assert longest_us <= 10 * S + TICK + step_us * (2 * len(priorities) + 8)


# Deferral ---------------------------------------------------------------------------------------------------


def test_topics_of_negative_priority_are_deferred() -> None:
    ready: FairQueue[str] = FairQueue()
    ready.add("low", -1, 0)
    ready.add("plain", 0, 0)
    ready.defer()
    ready.add("lower", -1, 1)
    assert (len(ready), ready.deferred_count) == (1, 2)
    assert drain(ready, 2) == ["plain"]
    assert ready.pop(60 * S) is None, "however old they get"
    assert not ready.add("low", -1, 3), "still there, once"
    ready.resume_deferred(60 * S)
    assert (len(ready), ready.deferred_count) == (2, 0)
    assert drain(ready, 60 * S) == ["low", "lower"]


def test_deferral_is_part_of_the_wait_and_not_of_the_delay() -> None:
    """Otherwise the release of a long deferral would look like a stall, and be the reason for the next one."""
    ready: FairQueue[str] = FairQueue()
    ready.add("low", -1, 0)
    ready.defer()
    ready.resume_deferred(30 * S)
    ready.add("top", 1000, 30 * S)
    turn = ready.pop(30 * S + 5)
    assert turn is not None
    assert turn == ("low", 30 * S + 5, 5), "in the top band, and first there"


def test_resumed_topic_is_in_the_band_of_its_wait_at_once() -> None:
    """Method: bands were looked at in the moment of the release, so that no tick comes to put it right."""
    ready: FairQueue[str] = FairQueue()
    ready.add("low", -10, 0)
    ready.defer()
    ready.add("plain", 0, 10 * S)
    assert serve(ready, 10 * S) == "plain"
    ready.resume_deferred(10 * S)
    ready.add("high", 700, 10 * S)
    assert drain(ready, 10 * S) == ["low", "high"]


def test_aged_topic_is_deferred_by_its_own_priority() -> None:
    ready: FairQueue[str] = FairQueue()
    ready.add("low", -10, 0)
    ready.add("plain", 0, 0)
    assert serve(ready, 4 * S) == "low", "same age, marked first, same band by now"
    ready.add("low", -10, 4 * S)
    assert serve(ready, 8 * S) == "plain"
    ready.defer()
    assert ready.pop(8 * S) is None


def test_topic_deferred_and_resumed_twice_is_served_once() -> None:
    ready: FairQueue[str] = FairQueue()
    ready.add("low", -10, 0)
    for second in range(1, 9):
        ready.defer()
        ready.resume_deferred(second * S)
    assert drain(ready, 9 * S) == ["low"]
    ready.defer()
    ready.add("gone", -10, 10 * S)
    ready.discard("gone")
    assert ready.deferred_count == 0


@pytest.mark.parametrize(
    ("priority", "before"), [(1000, 8), (750, 8), (600, 12), (300, 14), (100, 14), (0, 14)], ids=str
)
def test_fan_out_copies_are_one_band_lower_while_work_is_deferred(priority: int, before: int) -> None:
    """Method: after a full round of earlier topics. B1 stays B1, after the one that was there."""
    ready: FairQueue[str] = FairQueue()
    ready.defer()
    for band, (of, number) in {"a": (900, 9), "b": (600, 5), "c": (300, 3), "d": (100, 1)}.items():
        for at in range(number):
            ready.add(f"{band}{at}", of, 0)
    plain = FairQueue[str]()
    plain.add("copy", priority, 1, fan_out=True)
    plain.add("other", priority, 2)
    assert drain(plain, 3) == ["copy", "other"], "as any other while nothing is deferred"
    ready.add("copy", priority, 1, fan_out=True)
    assert drain(ready, 2).index("copy") >= before


# Cost -------------------------------------------------------------------------------------------------------


def test_tick_costs_what_it_promotes_and_served_entries_are_dropped() -> None:
    """Method: heaps are looked at from inside, while topics wait for a tick, are served and are marked again."""
    ready: FairQueue[str] = FairQueue()
    keys = [f"t{number}" for number in range(1_000)]
    for now_us in range(0, 4 * S, 60_000):
        for key in keys:
            ready.add(key, 0, now_us)
        for _ in range(900):
            serve(ready, now_us + 50_000)
    kept = sum(map(len, ready._queues)) + sum(map(len, ready._promotions)) + len(ready._unaged)
    assert kept <= 3 * (2 * len(keys) + 5 * 64)
