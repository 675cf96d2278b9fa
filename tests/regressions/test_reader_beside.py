"""A read-only engine whose segments a writer removes meanwhile looks again: a gap or a dropped topic, never `Corrupt`.

Method: the disk of the reader calls a hook before every operation; at each of them in turn the writer evicts, deletes
or drops what the reader is about to read, and checkpoints until the files are gone (issue 17, 3.9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.crash.topics.workloads import TINY
from tests.regressions.test_beside import Hooked

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, read
from tidelog.errors import Corrupt, TopicNotFound
from tidelog.testing import ManualClock, SimDisk


def opened(disk: Any, clock: ManualClock, **more: Any) -> Engine:
    return engine_of(tidelog.open("data", disk=disk, clock=clock, threads=False, **TINY, **more))


def evict(writer: Engine) -> None:
    for number in range(40):
        writer.topic("t").append(b"new %d" % number)
    settle(writer)


def expire(writer: Engine) -> None:
    writer.configure("t", {"durability": "fsync", "ttl_ms": 1})
    writer._context.clock.tick(1000)  # type: ignore[attr-defined]
    writer.topic("t").append(b"new")
    writer.tick()
    settle(writer)


def delete(writer: Engine) -> None:
    writer.topic("t").delete(before_seq=15)
    settle(writer)


def drop(writer: Engine) -> None:
    writer.drop("t")
    settle(writer)


def settle(writer: Engine) -> None:
    """Until the two newest manifests do not name what is gone."""
    for _ in range(3):
        writer.topic("other").append(b"x")
        writer.checkpoint()


@pytest.mark.parametrize("step", [evict, expire, delete, drop])
def test_a_reader_whose_segments_are_removed_looks_again(step: Callable[[Engine], None]) -> None:
    removed = False
    for operation in range(300):
        disk, clock, left = SimDisk(), ManualClock(), -1
        writer = opened(disk, clock)
        topic = writer.topic("t", durability="fsync", cap_records=20)
        held = {topic.append(b"record %d" % number).first_seq: b"record %d" % number for number in range(20)}
        writer.checkpoint()
        before = {path for path in disk.tree() if "/topics/" in f"/{path}"}

        def hook(writer: Engine = writer) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                step(writer)

        reader = opened(Hooked(disk, hook), clock, read_only=True)
        left = operation + 1
        seen, cursor = set(), 0
        try:
            while cursor < 20:
                page = reader.topic("t", create=False).read(cursor, 4)
                assert page.gap is not None or page.records or page.next_from_seq > cursor or left <= 0
                for record in page.records:
                    assert record.data == held.get(record.seq, record.data)
                    seen.add(record.seq)
                cursor = max(page.next_from_seq, cursor)
        except TopicNotFound:
            assert step is drop
        except Corrupt as error:
            raise AssertionError(f"operation {operation}: {error}") from error
        removed |= left <= 0 and not before <= set(disk.tree())
        if left > 0:
            assert removed or step is drop, "the files of a dropped topic go later"
            assert operation > 1
            return
    pytest.fail("the reader never came to its end")


def test_a_reader_that_does_not_look_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_reload_if_removed", lambda *_: False)
    with pytest.raises(AssertionError, match="operation"):
        test_a_reader_whose_segments_are_removed_looks_again(evict)
