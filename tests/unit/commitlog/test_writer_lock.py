"""Readers do not wait for a writer that a caller makes slow. Method: the reader runs inside the slow part.

A stream, a callback or a copy is stopped in the middle until another thread has read. Where that thread waits for the
writer, neither goes on: the read is given up after a time that is no measure of anything, and the test fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tidelog.commitlog import SegmentedLog, restore
from tidelog.errors import Busy
from tidelog.testing import ManualClock, SimDisk

Opener = Callable[..., SegmentedLog]
FOREVER_S = 30


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call answers in another thread."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(timeout=FOREVER_S)
    finally:
        pool.shutdown(wait=False)


def three_segments(open_log: Opener, **settings: Any) -> SegmentedLog:
    log = open_log(**settings)
    for number in range(3):
        log.append_many([b"key%d:%d" % (key, number) for key in range(5)])
        if number < 2:
            log.seal()
    return log


def looked(log: SegmentedLog, first_seq: int) -> list[bytes]:
    """Every way to read sealed records, and what there is of the active one."""
    assert log.read(first_seq + 1).data == b"key1:0"
    assert log.read_range(first_seq + 5, limit=2).records[0].data == b"key0:1"
    assert len(log.segments) == 3
    assert log.size > 0
    return [record.data for record in log]


def test_reads_do_not_wait_for_a_stream(open_log: Opener, first_seq: int) -> None:
    log = three_segments(open_log)
    seen = []

    def chunks() -> Iterator[bytes]:
        yield b"begun "
        seen.append(elsewhere(lambda: looked(log, first_seq)))
        yield b"and ended"

    seq = log.append_stream(chunks())
    assert len(seen[0]) == 15, "the record in the making is not there yet"
    assert log.read(seq).data == b"begun and ended"
    assert elsewhere(lambda: looked(log, first_seq))[-1] == b"begun and ended"


def test_other_writers_wait_for_a_stream(open_log: Opener) -> None:
    log = three_segments(open_log)
    pool = ThreadPoolExecutor(1)

    def chunks() -> Iterator[bytes]:
        yield b"one "
        waiting.append(pool.submit(log.append, b"after"))
        yield b"record"
        assert not waiting[0].done()

    waiting: list[Any] = []
    seq = log.append_stream(chunks())
    assert waiting[0].result(timeout=FOREVER_S) == seq + 1
    assert [record.data for record in log.records(seq)] == [b"one record", b"after"]
    pool.shutdown()


def test_a_stream_does_not_keep_earlier_records_from_the_disk(
    open_log: Opener, disk: SimDisk, clock: ManualClock, first_seq: int
) -> None:
    """Under `interval` the promise of the records before it goes on while the stream is slow."""
    log = open_log(sync="interval", sync_interval_ms=50)
    log.append(b"acked")
    assert log.durable == first_seq

    def chunks() -> Iterator[bytes]:
        yield b"slow"
        clock.tick(60)
        elsewhere(log.tick)
        assert log.durable == first_seq + 1
        with open_log(disk=disk.crash_image("none")) as again:
            assert [record.data for record in again] == [b"acked"]
        yield b"er"

    log.append_stream(chunks())
    assert [record.data for record in log] == [b"acked", b"slower"]


@pytest.mark.parametrize("where", ["key", "tombstone", "progress"])
def test_reads_do_not_wait_for_the_callbacks_of_a_compaction(open_log: Opener, where: str) -> None:
    log = three_segments(open_log)
    seen: list[list[bytes]] = []

    def look(place: str) -> None:
        if place == where:
            seen.append(elsewhere(lambda: [record.data for record in log]))

    def key(record: Any) -> bytes:
        look("key")
        return bytes(record.data.partition(b":")[0])

    def is_tombstone(record: Any) -> bool:
        look("tombstone")
        return record is None

    log.compact(key, is_tombstone=is_tombstone, keep_tombstones_ms=-1, progress=lambda *_: look("progress"))
    everything = [b"key%d:%d" % (key, number) for number in range(3) for key in range(5)]
    assert seen
    assert all(found in (everything, everything[5:]) for found in seen), "each segment is the old one or the new one"
    assert [record.data for record in log] == everything[5:]


def test_reads_do_not_wait_for_a_restore(open_log: Opener, first_seq: int) -> None:
    log = three_segments(open_log)
    seen = []
    restore(
        log,
        "copy",
        to_seq=first_seq + 12,
        progress=lambda *_: seen.append(elsewhere(lambda: looked(log, first_seq))),
    )
    assert len(seen) >= 3
    assert all(len(found) == 15 for found in seen)


def test_an_async_stream_refuses_other_writers_and_no_reader(open_log: Opener, first_seq: int) -> None:
    log = three_segments(open_log)

    async def chunks() -> Any:
        yield b"half "
        with pytest.raises(Busy):
            log.append(b"other")
        assert len(elsewhere(lambda: looked(log, first_seq))) == 15
        yield b"a record"

    seq = asyncio.run(log.append_stream_async(chunks()))
    assert log.read(seq).data == b"half a record"
