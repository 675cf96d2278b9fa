"""Seqs of class `disk` are reserved in the WAL before they are assigned, in time for most writes.

Decision 0008, G8, G9: whatever a power cut takes, no seq that was acknowledged is given to another record.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random

import pytest
from tests.unit.engine.harness import EngineHarness

from tidelog.engine import Topic, topic_state
from tidelog.engine.topic import topic_operations
from tidelog.engine.topic_state import SeqReservation
from tidelog.errors import DiskFull
from tidelog.wal import Shard


@pytest.fixture(autouse=True)
def _small_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count to ten, not to thousands."""
    monkeypatch.setattr(topic_state, "_SMALL_RESERVATION", 0)


def made(head_reserve: int = 10) -> tuple[EngineHarness, Topic]:
    world = EngineHarness(head_reserve=head_reserve)
    return world, world.log.topic("a", durability="disk")


def syncs(topic: Topic, writes: int) -> int:
    before = topic_operations(topic).shard.stats.fsyncs
    for _ in range(writes):
        topic.append(b"x")
    return topic_operations(topic).shard.stats.fsyncs - before


def lost(world: EngineHarness, topic: Topic) -> list[int]:
    """Seqs that were acknowledged and that a restart after a power cut which kept nothing would give out again."""
    log = world.crash()
    return list(range(log.topic("a").append(b"next").first_seq, topic.head_seq + 1))


def test_no_write_waits_for_seqs_reserved_in_time() -> None:
    """Method: the fourth write takes a mark for 80 more along; it is synced with everything else."""
    world, topic = made()
    assert syncs(topic, 4) == 1, "the first one's"
    world.log.tick()
    assert syncs(topic, 84 - 4) == 0
    assert syncs(topic, 1) == 1, "the mark that was booked meanwhile is not synced"


def test_a_write_that_needs_them_earlier_waits() -> None:
    world, topic = made()
    syncs(topic, 11)
    assert syncs(topic, 1) == 1
    assert lost(world, topic) == []


def test_a_slow_topic_books_nothing() -> None:
    """Its holes after a crash stay as small as they can be."""
    world, topic = made()
    topic.append(b"x")
    world.clock.tick(250)
    syncs(topic, 10)
    world.log.tick()
    assert world.crash().topic("a").head_seq == 11


def test_a_topic_with_few_seqs_on_record_books_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """§4 of the contract: its head jumps by no more than 256, however fast it writes."""
    monkeypatch.undo()
    world, topic = made(256)
    syncs(topic, 200)
    world.log.tick()
    assert world.crash().topic("a").head_seq == 257


def test_the_sync_thread_is_woken_for_the_mark() -> None:
    _, topic = made()
    syncs(topic, 3)
    sent = []
    topic_operations(topic).shard.on_tick_needed = lambda: sent.append(topic.head_seq)
    syncs(topic, 3)
    assert sent == [3], "while the fourth is written, and once"


def is_booked(topic: Topic) -> bool:
    return topic._state.reservation.pending is not None


def test_a_booking_that_was_not_written_is_none() -> None:
    """Method: the disk is full for the write that carries the mark. It is rolled back, and the next one reserves."""
    world, topic = made()
    syncs(topic, 3)
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        topic.append(b"x")
    world.log.tick()
    assert not is_booked(topic)
    syncs(topic, 1)
    assert is_booked(topic)
    world.log.tick()
    assert syncs(topic, 20) == 0
    assert lost(world, topic) == []


def test_a_file_that_was_left_is_synced() -> None:
    """The mark is in the file before: a rotation has synced it."""
    world, topic = made(100)
    syncs(topic, 26)
    rotations = topic_operations(topic).shard.stats.rotations
    while topic_operations(topic).shard.stats.rotations == rotations:
        topic.append(b"x" * 4000)
    assert syncs(topic, 200) == 0
    assert topic.head_seq > 101
    assert lost(world, topic) == []


def histories(seeds: range) -> None:
    for seed in seeds:
        history(seed)


def history(seed: int) -> None:
    """Writes, ticks and checkpoints as they come, and a power cut after each."""
    random = Random(seed)
    world, topic = made(random.choice([2, 5, 10]))
    for _ in range(60):
        what = random.random()
        if what < 0.1:
            world.log.tick()
        elif what < 0.2:
            world.log.checkpoint()
        elif what < 0.25:
            world.clock.tick(random.choice([100, 400, 2000]))
        else:
            topic.append([b"x"] * random.randint(1, 3))
        assert lost(world, topic) == []


@pytest.mark.parametrize("seed", range(6))
def test_no_seq_is_given_out_twice(seed: int) -> None:
    history(seed)


def used_before_the_disk_has_the_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "is_synced", lambda *_: True)


def a_checkpoint_forgets_what_was_booked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeqReservation, "ceiling", property(lambda reservation: reservation.reserved_seq))


@pytest.mark.parametrize("bug", [used_before_the_disk_has_the_mark, a_checkpoint_forgets_what_was_booked])
def test_that_can_fail(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs planted on purpose."""
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=r"== \[\]"):
        histories(range(6))
