"""Consumers that share a group: who gets which records, what moves the cursor, and what happens to unfinished ones."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.harness import CLASSES, TIMEOUT_S, EngineHarness, running

from tidelog import Gap, Group, GroupBatch, Topic
from tidelog.errors import BadInput, Closed, CursorConflict, DiskFull, GapFound, ReadOnly


def filled(world: EngineHarness, count: int = 10, **config: Any) -> tuple[Topic, Group]:
    topic = world.log.topic("t", **config)
    if count:
        topic.append([b"%02d" % number for number in range(count)])
    return topic, topic.group("g")


def take(group: Group, consumer: str, limit: int, **options: Any) -> GroupBatch:
    batch = group.claim(consumer, limit, **options)
    assert batch is not None
    return batch


def seqs(batch: GroupBatch) -> list[int]:
    return [record.seq for record in batch]


def test_consumers_get_different_records_and_the_cursor_follows_the_acks() -> None:
    _, group = filled(EngineHarness())
    a, b = take(group, "a", 3), take(group, "b", 3)
    assert (seqs(a), seqs(b)) == ([1, 2, 3], [4, 5, 6])
    assert [tuple(state) for state in group.consumers()] == [("a", 1, 1, 3), ("b", 1, 4, 6)]
    assert b.ack()
    assert group.position == 0, "records 1 to 3 are not processed"
    assert a.ack()
    assert group.position == 6
    assert group.consumers() == []


@pytest.mark.parametrize("durability", CLASSES)
def test_the_cursor_survives_a_restart_and_leases_do_not(durability: str) -> None:
    world = EngineHarness()
    _, group = filled(world, durability=durability)
    assert take(group, "a", 4).ack()
    old = take(group, "a", 2)
    group = world.restart("reopen").topic("t").group("g")
    if durability == "ephemeral":
        return  # its records are gone
    assert not group.ack("a", old.lease_id)
    assert seqs(take(group, "b", 10)) == [5, 6, 7, 8, 9, 10]


def test_a_lease_that_ended_goes_to_the_next_consumer() -> None:
    world = EngineHarness()
    _, group = filled(world)
    late = take(group, "a", 3, lease_ms=1_000)
    world.clock.tick(999)
    assert seqs(take(group, "b", 2)) == [4, 5]
    world.clock.tick(1)
    again = take(group, "b", 2)
    assert seqs(again) == [1, 2], "the range is given out in parts, the first first"
    assert seqs(take(group, "b", 9)) == [3]
    assert not late.ack()
    assert not late.extend()
    assert not late.release()
    assert again.ack()
    assert group.position == 2


def test_a_lease_that_ended_and_was_not_claimed_again_can_be_acked() -> None:
    world = EngineHarness()
    _, group = filled(world)
    late = take(group, "a", 3, lease_ms=1_000)
    world.clock.tick(5_000)
    assert late.ack()
    assert group.position == 3


def test_an_extended_lease_ends_later() -> None:
    world = EngineHarness()
    _, group = filled(world)
    batch = take(group, "a", 10, lease_ms=1_000)
    world.clock.tick(900)
    assert batch.extend(1_000)
    world.clock.tick(900)
    assert group.claim("b") is None
    assert batch.ack()


def test_released_ranges_and_those_of_a_consumer_that_leaves_go_to_others() -> None:
    _, group = filled(EngineHarness())
    one, two, other = take(group, "a", 2), take(group, "a", 2), take(group, "b", 2)
    assert one.release()
    assert seqs(take(group, "b", 9)) == [1, 2]
    assert group.leave("a") == 1
    assert group.leave("a") == 0
    assert seqs(take(group, "b", 9)) == [3, 4]
    assert not two.ack()
    assert other.ack()


def test_another_consumer_cannot_settle_a_lease() -> None:
    _, group = filled(EngineHarness())
    batch = take(group, "a", 2)
    assert not group.ack("b", batch.lease_id)
    assert not group.release("b", batch.lease_id)
    assert not group.extend("b", batch.lease_id)
    assert batch.ack()


def test_a_commit_or_reset_by_another_caller_ends_all_leases() -> None:
    _, group = filled(EngineHarness())
    a, b = take(group, "a", 2), take(group, "b", 2)
    group.commit(3)
    assert not a.ack()
    assert not b.release()
    assert seqs(take(group, "a", 2)) == [4, 5]
    group.reset("earliest")
    assert seqs(take(group, "a", 2)) == [1, 2]


def test_deleted_records_are_passed_and_acked_with_their_neighbours() -> None:
    topic, group = filled(EngineHarness())
    first = take(group, "a", 2)
    topic.delete(seqs=[3, 4, 5])
    second = take(group, "a", 2)
    assert seqs(second) == [6, 7]
    assert first.ack()
    assert second.ack()
    assert group.position == 7
    topic.delete(before_seq=11)
    assert group.claim("a") is None
    assert group.lag().records == 0


def test_one_consumer_gets_a_gap() -> None:
    topic, group = filled(EngineHarness(), cap_records=4)
    first = take(group, "a", 2)
    assert first.gap is not None
    assert (first.gap.gap_from, first.gap.gap_to, seqs(first)) == (1, 6, [7, 8])
    assert take(group, "b", 2).gap is None
    topic.append([b"x"] * 20)
    lost = take(group, "b", 2)
    assert lost.gap is not None
    assert lost.gap.gap_from == 11
    assert first.release()
    again = take(group, "b", 9)
    assert again.gap is not None, "its records were evicted meanwhile"
    assert seqs(again) == []
    assert again.ack()


def test_a_failed_commit_is_repeated_by_the_next_ack() -> None:
    world = EngineHarness()
    _, group = filled(world, durability="fsync")
    one, two = take(group, "a", 2), take(group, "a", 2)
    world.disk.fail("write", at=1, error=28)
    with pytest.raises(DiskFull):
        one.ack()
    assert group.position == 0
    assert two.ack()
    assert group.position == 4


def test_an_idle_claim_waits_for_a_record_and_for_a_returned_range() -> None:
    topic, group = filled(EngineHarness(), 2)
    batch = take(group, "a", 9)
    got: list[GroupBatch | None] = []
    with running(lambda: got.append(group.claim("b", timeout=TIMEOUT_S))):
        assert batch.release()
    assert got[0] is not None
    assert seqs(got[0]) == [1, 2]
    with running(lambda: got.append(group.claim("b", timeout=TIMEOUT_S))):
        topic.append(b"new")
    assert got[1] is not None
    assert seqs(got[1]) == [3]


def test_consume_acks_a_batch_when_the_next_is_asked_for() -> None:
    _, group = filled(EngineHarness())
    positions = [(group.position, seqs(batch)) for batch in group.consume("a", 4, timeout=0.0)]
    assert positions == [(0, [1, 2, 3, 4]), (4, [5, 6, 7, 8]), (8, [9, 10])]
    assert group.position == 10


def test_a_loop_that_ends_early_returns_its_last_batch() -> None:
    _, group = filled(EngineHarness())
    for batch in group.consume("a", 4, timeout=0.0):
        if batch.first_seq == 5:
            break
    assert group.position == 4
    assert group.consumers() == []
    assert seqs(take(group, "b", 4)) == [5, 6, 7, 8]


def test_consume_says_that_a_batch_took_longer_than_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    world = EngineHarness()
    _, group = filled(world, 2)
    loop = group.consume("a", lease_ms=1_000, timeout=0.0)
    next(loop)
    world.clock.tick(1_000)
    assert take(group, "b", 9).ack()
    assert list(loop) == []
    assert "1 to 2 ended before they were processed" in caplog.text


@pytest.mark.parametrize(("commit", "at"), [("each", 2), ("batch", 0)])
def test_follow_commits_each_record_or_each_batch(commit: Any, at: int) -> None:
    _, group = filled(EngineHarness())
    loop = group.follow(commit=commit, limit=5, timeout=0.0)
    assert [record.seq for record in (next(loop), next(loop), next(loop)) if not isinstance(record, Gap)] == [1, 2, 3]
    assert group.position == at
    assert len(list(loop)) == 7
    assert group.position == 10


def test_a_second_follower_of_a_group_is_refused() -> None:
    _, group = filled(EngineHarness())
    first, second = group.follow(commit="each", timeout=0.0), group.follow(commit="each", timeout=0.0)
    next(first), next(second), next(first)
    with pytest.raises(CursorConflict):
        next(second)


def test_follow_reports_a_gap_as_topics_do() -> None:
    _, group = filled(EngineHarness(), cap_records=2)
    with pytest.raises(GapFound):
        next(group.follow(timeout=0.0))
    assert isinstance(next(group.follow(timeout=0.0, on_gap="emit")), Gap)
    assert len(list(group.follow(timeout=0.0, on_gap="skip"))) == 2
    assert group.position == 10


def test_bad_input_is_refused_and_leases_nothing() -> None:
    world = EngineHarness()
    _, group = filled(world)
    with pytest.raises(BadInput, match="a consumer has a name"):
        group.claim("")
    with pytest.raises(BadInput, match="lease_ms"):
        group.claim("a", lease_ms=0)
    with pytest.raises(BadInput, match="limit"):
        group.claim("a", 0)
    with pytest.raises(BadInput, match="commit is each or batch"):
        next(group.follow(commit="all"))  # type: ignore[arg-type]
    assert group.consumers() == []
    with pytest.raises(ReadOnly):
        world.reader().topic("t", create=False).group("g").claim("a")
    world.log.close()
    with pytest.raises(Closed):
        group.claim("a")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_record_is_acked_and_never_leased_twice_at_once(seed: int) -> None:
    chance, world = Random(seed), EngineHarness()
    topic, group = filled(world, 5)
    leased: dict[int, tuple[GroupBatch, int]] = {}  # by lease id: and when it ends
    acked, deleted, now = set[int](), set[int](), 0
    for _ in range(60):
        match chance.choice(("append", "claim", "claim", "ack", "ack", "release", "leave", "tick", "extend", "delete")):
            case "append":
                topic.append([b"x"] * chance.randint(1, 6))
            case "claim":
                lease_ms = chance.choice((100, 1_000))
                batch = group.claim(chance.choice("abc"), chance.randint(1, 5), lease_ms=lease_ms)
                leased = {key: each for key, each in leased.items() if each[1] > now}
                if batch is not None:
                    held = {seq for each, _ in leased.values() for seq in seqs(each)}
                    assert not held & set(seqs(batch)), "leased to two at once"
                    assert not acked & set(seqs(batch)), "acked, and delivered again"
                    leased[batch.lease_id] = (batch, now + lease_ms)
            case "ack" | "release" as verb if leased:
                batch, ends = leased.pop(chance.choice(list(leased)))
                if getattr(batch, verb)() and verb == "ack":
                    acked |= set(seqs(batch))
                else:
                    assert verb == "release" or ends <= now
            case "leave":
                name = chance.choice("abc")
                group.leave(name)
                leased = {key: each for key, each in leased.items() if each[0].consumer != name}
            case "tick":
                now += 70
                world.clock.tick(70)
            case "extend" if leased:
                batch, ends = leased[chance.choice(list(leased))]
                if batch.extend(500):
                    leased[batch.lease_id] = (batch, now + 500)
            case "delete":
                below = chance.randint(1, topic.head_seq + 1)
                topic.delete(before_seq=below)
                deleted |= set(range(1, below))
        assert set(range(1, group.position + 1)) <= acked | deleted
    for name in "abc":
        group.leave(name)
    for batch in group.consume("z", 4, timeout=0.0):
        acked |= set(seqs(batch))
    assert set(range(1, topic.head_seq + 1)) <= acked | deleted
