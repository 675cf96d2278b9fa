"""Memory of large writes is used again, by one write at a time, and does not pile up."""

from __future__ import annotations

import errno

import pytest
from tests.unit.engine.world import Restart, World, datas

from tidelog.engine import Topic, append
from tidelog.engine.encode import Batch
from tidelog.engine.scratch import Scratch
from tidelog.errors import DiskFull
from tidelog.formats import values


def test_what_is_given_back_is_taken_again() -> None:
    scratch = Scratch()
    first = scratch.take(100)
    assert len(first) >= 100
    second = scratch.take(100)
    assert second is not first, "the first is in use"
    scratch.give(first)
    assert scratch.take(len(first)) is first
    assert len(scratch.take(len(first) + 1)) > len(first)


def test_what_is_too_small_is_let_go_and_no_more_than_8_mib_is_kept() -> None:
    scratch = Scratch()
    small = scratch.take(1)
    scratch.give(small)
    assert scratch.take(len(small) + 1) is not small
    assert scratch.take(1) is not small
    large = [scratch.take(3 << 20) for _ in range(3)]
    for memory in large:
        scratch.give(memory)
    again = [scratch.take(3 << 20) for _ in range(3)]
    assert sum(any(memory is known for known in large) for memory in again) == 2


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LARGE_BYTES", 20)


def taken(topic: Topic) -> list[bytearray]:
    return topic._core.shared.scratch._free


@pytest.mark.usefixtures("large")
def test_writes_that_wait_at_the_same_time_have_memory_of_their_own() -> None:
    """G3: three batches are staged before the first is committed; each is read back as it was."""
    world = World()
    topic = world.log.topic("t", durability="fsync")
    many = [[bytes([letter]) * 30 for _ in range(3)] for letter in b"abc"]
    tokens = [topic.stage(Batch(each, False)) for each in many]
    assert not taken(topic)
    for token in tokens:
        token.wait()
    assert len(taken(topic)) == 3
    assert datas(topic) == [data for each in many for data in each]
    topic.append(many[0])
    assert len(taken(topic)) == 3, "used again"
    assert datas(topic)[-3:] == many[0]


@pytest.mark.usefixtures("large")
def test_a_write_that_failed_gives_its_memory_back() -> None:
    world = World()
    topic = world.log.topic("t", durability="fsync")
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        topic.append([b"x" * 30] * 3)
    assert len(taken(topic)) == 1
    topic.append([b"y" * 30] * 3)
    assert datas(topic) == [b"y" * 30] * 3


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("how", ["reopen", "kill"])
def test_a_program_that_does_without_the_kernel_writes_the_same(how: Restart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "kernel", None)
    world = World(kernel=False)
    topic = world.log.topic("t", durability="fsync")
    topic.append([b"x" * 30, b"", b"y" * 300])
    topic.append([b"z"])
    assert datas(world.restart(how).topic("t")) == [b"x" * 30, b"", b"y" * 300, b"z"]
