"""A listener that raises latches nothing, fails no acked write and stops no other listener (docs/bugs.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.engine.config import Durability
from tidelog.testing import ManualClock, SimDisk

CLASSES = ["fsync", "disk", "memory", "ephemeral"]
KINDS = [ValueError, KeyboardInterrupt, SystemExit]


class Heard:
    """Listeners of which every other one raises."""

    def __init__(self, listen: Callable[[Callable[[], None]], None], kind: type[BaseException]) -> None:
        self.calls = 0
        self._kind = kind
        for number in range(4):
            listen(self._raise if number == 0 else lambda number=number: self._hear(number))  # type: ignore[misc]

    def _raise(self) -> None:
        raise self._kind("a bug of the listener")

    def _hear(self, number: int) -> None:
        self.calls += 1
        if number == 2:
            raise self._kind("another one")


def opened(disk: SimDisk, shards: int = 1) -> tidelog.Database:
    return tidelog.open(
        "data", disk=disk, clock=ManualClock(), threads=False, wal_shards=shards, wal_file_bytes=1 << 14
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("shards", [1, 2])
def test_an_append_is_acked_and_goes_on_whatever_a_listener_raises(
    durability: Durability, kind: type[BaseException], shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    log = opened(disk, shards)
    topic, other = log.topic("t", durability=durability), log.topic("u", durability=durability)
    heard = Heard(topic.add_listener, kind)
    with caplog.at_level(logging.ERROR, "tidelog.engine"):
        for number in range(3):
            assert topic.append(b"%d" % number).first_seq == number + 1
            assert other.append(b"%d" % number).first_seq == number + 1
    assert heard.calls == 9
    assert engine_of(log).listener_failures == 6
    assert len(caplog.records) == 6
    assert "'t'" in caplog.records[0].message
    assert not any(shard.is_latched for shard in engine_of(log).shards)
    topic.delete(before_seq=2)
    log.checkpoint()
    log.close()
    with opened(disk, shards) as again:
        kept = [] if durability == "ephemeral" else [b"1", b"2"]
        assert [record.data for record in again.topic("t", create=False).read(0).records] == kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_drop_and_a_close_come_to_their_end_whatever_a_listener_raises(kind: type[BaseException]) -> None:
    disk = SimDisk()
    log = opened(disk)
    for name in ("t", "u"):
        Heard(log.topic(name).add_listener, kind)
        log.topic(name).append(b"x")
    assert log.drop("t")
    assert log.names() == ["u"]
    before = engine_of(log).listener_failures
    log.close()
    assert engine_of(log).listener_failures > before
    with opened(disk) as again:
        assert again.names() == ["u"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("durability", ["fsync", "memory"])
def test_a_queue_hands_out_and_takes_back_whatever_its_listeners_raise(
    durability: Durability, kind: type[BaseException]
) -> None:
    disk = SimDisk()
    log = opened(disk)
    queue = log.queue("q", durability=durability, leases_durable=True)
    heard = Heard(queue.add_listener, kind)
    queue.put([{"n": 1}, {"n": 2}, {"n": 3}])
    first, second = queue.claim("me", 2)
    assert queue.ack("me", first).count == 1
    assert queue.nack("me", second).count == 1
    assert heard.calls
    assert engine_of(log).listener_failures
    assert not engine_of(log).shards[0].is_latched
    assert queue.counts().ready == 2
    log.close()
    with opened(disk) as again:
        assert again.queue("q").counts().ready == 2


def test_copies_of_a_router_are_passed_on_whatever_a_listener_raises() -> None:
    log = opened(SimDisk(), 2)
    log.router("r", "t", "copy")
    Heard(log.topic("t").add_listener, ValueError)
    Heard(log.topic("copy").add_listener, ValueError)
    for number in range(3):
        log.topic("t").append(b"%d" % number)
    assert [record.data for record in log.topic("copy").read(0).records] == [b"0", b"1", b"2"]
    log.close()
