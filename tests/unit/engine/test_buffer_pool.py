"""Memory of large writes is used again, by one write at a time, and does not pile up."""

from __future__ import annotations

import errno

import pytest
from tests.implementations import implementation
from tests.unit.engine.harness import EngineHarness, Restart, datas

from tidelog.engine import Topic, append
from tidelog.engine.batch_encoder import Batch
from tidelog.engine.context import BufferPool
from tidelog.engine.topic import topic_operations
from tidelog.errors import DiskFull


def test_what_is_given_back_is_taken_again() -> None:
    scratch = BufferPool()
    first = scratch.acquire(100)
    assert len(first) >= 100
    second = scratch.acquire(100)
    assert second is not first, "the first is in use"
    scratch.release(first)
    assert scratch.acquire(len(first)) is first
    assert len(scratch.acquire(len(first) + 1)) > len(first)


def test_what_is_too_small_is_let_go_and_no_more_than_8_mib_is_kept() -> None:
    scratch = BufferPool()
    small = scratch.acquire(1)
    scratch.release(small)
    assert scratch.acquire(len(small) + 1) is not small
    assert scratch.acquire(1) is not small
    large_buffers = [scratch.acquire(3 << 20) for _ in range(3)]
    for memory in large_buffers:
        scratch.release(memory)
    again = [scratch.acquire(3 << 20) for _ in range(3)]
    assert sum(any(memory is known for known in large_buffers) for memory in again) == 2


@pytest.fixture
def large_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LARGE_WRITE_BYTES", 20)


def taken(topic: Topic) -> list[bytearray]:
    return topic._state.context.buffer_pool._free


@pytest.mark.usefixtures("large_buffers")
def test_writes_that_wait_at_the_same_time_have_memory_of_their_own() -> None:
    """G3: three batches are staged before the first is committed; each is read back as it was."""
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    many = [[bytes([letter]) * 30 for _ in range(3)] for letter in b"abc"]
    tokens = [topic_operations(topic).submit(Batch(each, False)) for each in many]
    assert not taken(topic)
    for token in tokens:
        token.wait()
    assert len(taken(topic)) == 3
    assert datas(topic) == [data for each in many for data in each]
    topic.append(many[0])
    assert len(taken(topic)) == 3, "used again"
    assert datas(topic)[-3:] == many[0]


@pytest.mark.usefixtures("large_buffers")
def test_a_write_that_failed_gives_its_memory_back() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    world.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        topic.append([b"x" * 30] * 3)
    assert len(taken(topic)) == 1
    topic.append([b"y" * 30] * 3)
    assert datas(topic) == [b"y" * 30] * 3


@pytest.mark.usefixtures("large_buffers")
@pytest.mark.parametrize("how", ["reopen", "kill"])
def test_a_program_that_does_without_the_kernel_writes_the_same(how: Restart) -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    with implementation(compiled=False):
        topic.append([b"x" * 30, b"", b"y" * 300])
        topic.append([b"z"])
    assert datas(world.restart(how).topic("t")) == [b"x" * 30, b"", b"y" * 300, b"z"]
