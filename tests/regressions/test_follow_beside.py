"""A reader beside a writer follows a topic: before, `follow` and `read` with a timeout never saw a new record.

Method: the reader's pauses are replaced by steps of the writer, so each test says what happens between two looks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from time import clock_gettime_ns
from typing import Any

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, read
from tidelog.engine.read import WalWatch
from tidelog.errors import TopicNotFound, Unavailable

FILE_TIMES = 5  # CLOCK_REALTIME_COARSE of Linux, which Python does not name


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with tidelog.open(str(tmp_path / "data"), threads=False, wal_file_bytes=1 << 16) as log:
        log.topic("t").append(b"1")
        yield engine_of(log)


@pytest.fixture
def reader(writer: Engine) -> Any:
    with tidelog.open(writer._context.root, read_only=True, threads=False) as log:
        yield engine_of(log)


def between(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> list[float | None]:
    """Let each pause of the reader be one of these steps; returns how long the reader meant to wait."""
    left, asked = list(steps), list[float | None]()

    class Pause(Event):
        def wait(self, timeout: float | None = None) -> bool:
            asked.append(timeout)
            before = clock_gettime_ns(FILE_TIMES)  # a real pause outlasts its step
            while left and clock_gettime_ns(FILE_TIMES) == before:
                pass
            if left:
                left.pop(0)()
            return self.is_set()

    monkeypatch.setattr(read, "Event", Pause)
    return asked


def test_follow_sees_what_the_writer_appends(writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    between(
        monkeypatch,
        lambda: writer.topic("t").append(b"2"),
        lambda: None,
        lambda: writer.topic("other").append(b"x"),
        writer.checkpoint,
        lambda: writer.topic("t").append([b"3", b"4"]),
    )
    found = reader.topic("t", create=False).follow(timeout=5.0)
    assert [next(found).data for _ in range(4)] == [b"1", b"2", b"3", b"4"]  # type: ignore[union-attr]


def test_read_with_a_timeout_sees_it_too_and_ends_after_it(
    writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = between(monkeypatch, lambda: None, lambda: writer.topic("t").append(b"2"))
    topic = reader.topic("t", create=False)
    assert [record.data for record in topic.read(1, timeout=60.0).records] == [b"2"]
    assert asked == [read.READER_POLL_S] * 2
    asked.clear()
    assert topic.read(2, timeout=0.5).records == []
    assert asked == pytest.approx([0.2, 0.2, 0.1])
    assert list(topic.follow(2, timeout=0.0)) == []


def test_two_topics_are_followed_each_by_its_own_look(
    writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.topic("u").append(b"1")
    reader.refresh()

    def both() -> None:
        writer.topic("t").append(b"2")
        writer.topic("u").append(b"2")

    between(monkeypatch, both)
    assert reader.topic("t", create=False).read(1, timeout=5.0).records
    assert reader.topic("u", create=False).read(1, timeout=5.0).records


def test_a_topic_that_is_dropped_or_made_again_ends_the_follower(
    writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> None:
        writer.drop("t")
        writer.topic("t").append([b"new"] * 3)

    between(monkeypatch, again)
    with pytest.raises(TopicNotFound):
        list(reader.topic("t", create=False).follow(1, timeout=5.0))


def test_records_that_a_cap_took_meanwhile_are_a_gap(
    writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def much() -> None:
        writer.topic("t", cap_records=2).append([b"%d" % number for number in range(2, 8)])

    between(monkeypatch, much)
    found = list(reader.topic("t", create=False).follow(1, timeout=0.2, on_gap="emit"))
    assert [getattr(each, "gap_to", None) or each.data for each in found] == [5, b"6", b"7"]  # type: ignore[union-attr]


def test_a_look_that_the_writer_was_faster_than_is_made_again(
    writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = reader.topic("t", create=False)
    real, failures = topic._state.context.reload_topics, [Unavailable("the directory changes")] * 3
    assert real is not None

    def look() -> Any:
        if failures:
            raise failures.pop()
        return real()

    topic._state.context.reload_topics = look
    between(monkeypatch, lambda: writer.topic("t").append(b"2"))
    assert [record.data for record in topic.read(1, timeout=60.0).records] == [b"2"]


def test_an_idle_writer_costs_no_look_at_the_directory(reader: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, looks = reader.topic("t", create=False), list[int]()
    real = topic._state.context.reload_topics
    assert real is not None

    def look() -> Any:
        looks.append(1)
        return real()

    topic._state.context.reload_topics = look
    asked = between(monkeypatch)
    assert topic.read(1, timeout=10.0).records == []
    assert (len(asked) >= 50, len(looks)) == (True, 1)


def test_a_strong_reader_is_shown_only_what_was_synced(
    writer: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.topic("t", consistency="strong")
    reader.refresh()
    topic = reader.topic("t", create=False)
    assert topic.read(0).records
    synced = list[bool]()
    real = read._sync_files

    def sync_files(shared: Any) -> bool:
        synced.append(shared.wal_files_synced)
        return real(shared)

    monkeypatch.setattr(read, "_sync_files", sync_files)
    between(monkeypatch, lambda: writer.topic("t").append(b"2"))
    assert [record.data for record in topic.read(1, timeout=5.0).records] == [b"2"]
    assert False in synced, "what was found since is synced before it is shown"


def test_watch_ignores_a_directory_that_rests(writer: Engine, tmp_path: Path) -> None:
    watch = WalWatch(writer._context.disk, str(tmp_path / "data"))
    assert [watch.changed() for _ in range(3)] == [True, False, False]
    watch.report_change_again()
    assert [watch.changed() for _ in range(2)] == [True, False]
