"""The cap on what all topics hold together."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, RESTARTS, TINY, EngineHarness, Restart, datas

import tidelog
from tidelog.engine.context import Quota
from tidelog.errors import DiskFull, Throttled, TopicFull, Unavailable
from tidelog.testing import ManualClock, SimDisk


def test_exactly_the_cap_is_let_in_and_one_more_is_not() -> None:
    """Nothing of a refused take is counted: the next one that fits is let in."""
    quota = Quota(100)
    quota.acquire(60)
    with pytest.raises(Throttled):
        quota.acquire(41)
    assert quota.used == 60
    quota.acquire(40)
    with pytest.raises(Throttled):
        quota.acquire(1)
    assert quota.used == 100


def test_the_refusal_says_which_limit_and_how_far_it_is() -> None:
    quota = Quota(100, limit="topics")
    quota.acquire(70)
    with pytest.raises(Throttled, match="topics: 70 of 100 are in use and 31 more") as refused:
        quota.acquire(31)
    error = refused.value
    assert (error.code, error.limit, error.max, error.used, error.asked) == ("throttled", "topics", 100, 70, 31)
    assert isinstance(error, Unavailable)
    assert error.retryable
    assert error.written is False


def test_without_a_cap_everything_is_let_in_and_still_counted() -> None:
    quota = Quota(0)
    quota.acquire(1 << 60)
    quota.acquire(1 << 60)
    assert quota.used == 2 << 60


def test_what_is_given_back_can_be_taken_again() -> None:
    quota = Quota(10)
    quota.acquire(10)
    quota.release(4)
    quota.acquire(4)
    with pytest.raises(Throttled):
        quota.acquire(1)


def test_what_a_restart_finds_is_counted_and_blocks_until_enough_is_given_back() -> None:
    quota = Quota(100)
    quota.acquire_unchecked(150)
    assert quota.used == 150
    for amount in (0, 1):
        with pytest.raises(Throttled):
            quota.acquire(amount)
    quota.release(49)
    with pytest.raises(Throttled):
        quota.acquire(0)
    quota.release(2)
    quota.acquire(1)
    assert quota.used == 100


def test_more_is_never_given_back_than_was_taken() -> None:
    quota = Quota(0)
    quota.acquire(3)
    with pytest.raises(AssertionError, match="only 3"):
        quota.release(4)
    assert quota.used == 3


@pytest.mark.parametrize("step", ["acquire", "acquire_unchecked", "release"])
def test_amounts_are_not_negative(step: str) -> None:
    quota = Quota(0)
    quota.acquire(5)
    with pytest.raises(AssertionError):
        getattr(quota, step)(-1)
    assert quota.used == 5


class Watching(int):
    """An amount that notes, whenever it is added or taken off, whether another thread could come between."""

    guarded: list[bool]

    def watch(self, quota: Quota) -> Watching:
        self.quota, self.guarded = quota, []
        return self

    def __radd__(self, other: int) -> int:
        self.guarded.append(self.quota._guard.locked())
        return other + int(self)

    def __rsub__(self, other: int) -> int:
        self.guarded.append(self.quota._guard.locked())
        return other - int(self)


@pytest.mark.parametrize("step", ["acquire", "acquire_unchecked", "release"])
def test_asking_and_counting_are_one_step(step: str) -> None:
    """Method: the interpreter rarely switches threads inside so few lines, so a race alone would prove little."""
    quota = Quota(100)
    quota.acquire(50)
    amount = Watching(5).watch(quota)
    getattr(quota, step)(amount)
    assert len(amount.guarded) == (2 if step == "acquire" else 1)
    assert all(amount.guarded)
    assert not quota._guard.locked()


@pytest.mark.parametrize("seed", range(4))
def test_writers_that_race_never_pass_the_cap_and_lose_no_count(seed: int) -> None:
    """Method: four threads take and give at random; each says what it holds in the end."""
    quota = Quota(50)

    def write(number: int) -> tuple[int, int]:
        random, held, most = Random(seed * 10 + number), 0, 0
        for _ in range(2_000):
            if held and random.random() < 0.5:
                quota.release(held)
                held = 0
            else:
                amount = random.randrange(1, 20)
                try:
                    quota.acquire(amount)
                    held += amount
                except Throttled:
                    continue
            most = max(most, quota.used)
        return held, most

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(write, range(4)))
    assert quota.used == sum(held for held, _ in results)
    assert max(most for _, most in results) <= 50


# In an engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_all_topics_together_hold_exactly_the_quota(durability: str) -> None:
    """Contract 1.12: current + incoming ≤ cap, data and meta of every class; what is refused leaves nothing (G12)."""
    world = EngineHarness(total_bytes_max=100)
    one, other = world.log.topic("a", durability=durability), world.log.topic("b", durability=durability)
    one.append([b"x" * 30, b"y" * 21], meta=[None, {"k": "v"}])
    other.append(b"z" * 30)
    before = world.disk.digest()
    with pytest.raises(Throttled) as refused:
        one.append([b"1", b"234567890", b"1"])
    assert (refused.value.limit, refused.value.max, refused.value.used) == ("total_bytes", 100, 90)
    assert (refused.value.asked, refused.value.written, refused.value.retryable) == (11, False, True)
    assert world.disk.digest() == before
    assert one.head_seq == 2
    assert other.append(b"1234567890").first_seq == 2
    with pytest.raises(Throttled):
        other.append(b"1")
    assert other.append(b"").first_seq == 3


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("how", ["delete seqs", "delete before", "delete tag", "cap", "age", "drop"])
def test_whatever_goes_gives_its_bytes_back(how: str, durability: str) -> None:
    """Contract 1.12: freed by delete, evict, drop."""
    world = EngineHarness(**TINY, total_bytes_max=100)
    topic = world.log.topic("a", durability=durability)
    topic.append([b"x" * 50, b"y" * 50], tag="t")
    world.log.checkpoint()
    if how.startswith("delete"):
        words: dict[str, Any] = {"seqs": {"seqs": [1, 2]}, "before": {"before_seq": 3}, "tag": {"match": "t"}}
        topic.delete(**words[how.split()[1]])
    elif how == "cap":
        world.log.topic("a", cap_bytes=1)
    elif how == "age":
        world.clock.tick(1)
        world.log.topic("a", ttl_ms=1)
        world.clock.tick(1)
        assert topic.count == 0
    else:
        world.log.drop("a")
    other = world.log.topic("b", durability=durability)
    other.append(b"z" * 100)
    with pytest.raises(Throttled):
        other.append(b"1")


def test_a_write_that_does_not_happen_takes_nothing() -> None:
    """Failed, refused, sent again: the quota is where it was."""
    world = EngineHarness(total_bytes_max=100)
    topic = world.log.topic("a", cap_records=2, discard="reject")
    topic.append(b"x" * 40, key="k")
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        topic.append(b"y" * 60)
    with pytest.raises(TopicFull):
        topic.append([b"y", b"z"])
    assert topic.append(b"y" * 90, key="k").deduped
    topic.append(b"y" * 60)
    topic.delete(seqs=[1])
    topic.delete(seqs=[1])
    topic.append(b"z" * 40)


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_quota_counts_what_a_restart_finds(restart: Restart, checkpointed: bool) -> None:
    """Deleted, evicted and dropped records are not found."""
    world = EngineHarness(**TINY, total_bytes_max=1_000)
    topic = world.log.topic("a", durability="fsync", cap_records=3)
    topic.append([b"x" * 50] * 5, tag="t")
    topic.delete(seqs=[4])
    world.log.topic("b", durability="fsync").append(b"y" * 100)
    world.log.drop("b")
    world.log.topic("c", durability="ephemeral").append(b"z" * 100)
    if checkpointed:
        world.log.checkpoint()
    log = world.restart(restart, total_bytes_max=200)
    log.topic("d").append(b"w" * 100)
    with pytest.raises(Throttled) as refused:
        log.topic("d").append(b"w")
    assert refused.value.used == 200
    log.topic("a").delete(match="t")
    log.topic("d").append(b"w" * 100)


def test_a_smaller_quota_keeps_what_is_there() -> None:
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync").append([b"x" * 50] * 5)
    log = world.restart("reopen", total_bytes_max=100)
    assert len(datas(log.topic("a"))) == 5
    with pytest.raises(Throttled):
        log.topic("a").append(b"")
    log.topic("a").delete(seqs=[1, 2, 3])
    log.topic("a").append(b"")


def test_writers_of_many_topics_never_pass_the_quota_together() -> None:
    """Contract 1.12: cap checks leave no overshoot under races. Method: eight threads against space for a hundred."""
    with tidelog.open(
        "data", disk=SimDisk(), clock=ManualClock(), wal_shards=2, wal_file_bytes=4096, total_bytes_max=1_000
    ) as log:
        topics = [log.topic(f"t{number}") for number in range(8)]

        def write(number: int) -> int:
            written = 0
            for _ in range(40):
                try:
                    topics[number].append(b"0123456789")
                    written += 1
                except Throttled:
                    continue
            return written

        with ThreadPoolExecutor(8) as pool:
            written = sum(pool.map(write, range(8)))
        assert written == 100
        assert sum(state.bytes for state in log.topics()) == 1_000
