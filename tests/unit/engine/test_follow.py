"""Following a topic: woken and never polling (E4), gaps as the caller wants them (contract 3.4), an end to waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Event
from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, TIMEOUT_S, TINY, EngineHarness, running

import tidelog
from tidelog.database import Database
from tidelog.engine import Gap, Page, Record, Topic, read
from tidelog.engine.config import Durability
from tidelog.errors import BadInput, Closed, Error, GapFound, TopicNotFound
from tidelog.testing import ManualClock, SimDisk


def data_of(found: Record | Gap) -> Any:
    assert isinstance(found, Record)
    return found.data


@contextmanager
def threaded() -> Iterator[Database]:
    with tidelog.open("data", disk=SimDisk(), clock=ManualClock(), wal_shards=1, wal_file_bytes=4096) as log:
        yield log


class Looks:
    """Counts reads for new records, and lets tests wait for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[int], object] = lambda _: None) -> None:
        self.count, self.happened = 0, Event()
        real = read.read_page

        def page(*args: Any, **options: Any) -> Page:
            found = real(*args, **options)
            self.count += 1
            self.happened.set()
            then(self.count)
            return found

        monkeypatch.setattr(read, "read_page", page)


class Waits(Event):
    """An event whose waits are over at once and remembered."""

    asked: list[float | None]

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        return self.is_set()


# Waking -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_follower_is_woken_by_an_append(durability: Durability, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4, contract 2.6. Method: each record is written only after the follower has looked and found nothing, so each
    needs its own wake; one look a wake is all that is done."""
    looks = Looks(monkeypatch)
    with threaded() as log:
        topic = log.topic("a", durability=durability)
        got: Queue[Any] = Queue()

        def follow() -> None:
            for found in topic.follow(timeout=TIMEOUT_S):
                got.put(data_of(found))
                if data_of(found) == "last":
                    return

        with running(follow):
            for data in ("first", "second", "last"):
                assert looks.happened.wait(TIMEOUT_S)
                looks.happened.clear()
                topic.append(data)
                assert got.get(timeout=TIMEOUT_S) == data
        assert looks.count <= 7, "one read for each record, one after it, and one in the beginning"


def test_all_followers_are_woken() -> None:
    """E4."""
    with threaded() as log:
        topic = log.topic("a")
        heard: Queue[int] = Queue()

        def follow(number: int) -> None:
            follower = topic.follow(timeout=TIMEOUT_S)
            heard.put(number)
            assert [data_of(next(follower)) for _ in range(50)] == list(range(50))

        with running(*(lambda number=number: follow(number) for number in range(4))):
            for _ in range(4):
                heard.get(timeout=TIMEOUT_S)
            for number in range(50):
                topic.append(number)


def test_nothing_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """E4. Method: the event that a reader waits on is asked once, for the whole timeout of the reader."""
    Waits.asked = []
    monkeypatch.setattr(read, "Event", Waits)
    topic = EngineHarness().log.topic("a")
    assert topic.read(timeout=12.5).records == []
    assert Waits.asked == [12.5]
    assert list(topic.follow(timeout=7.5)) == []
    assert Waits.asked == [12.5, 7.5]


def test_a_record_between_the_look_and_the_wait_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """E4: register first, then read, then wait; contract, appendix D3."""
    Waits.asked = []
    monkeypatch.setattr(read, "Event", Waits)
    topic = EngineHarness().log.topic("a")

    def write(number: int) -> None:
        if number == 1:
            topic.append("just then")

    Looks(monkeypatch, write)
    page = topic.read(timeout=1.0)
    assert [record.data for record in page.records] == ["just then"]
    assert Waits.asked == [1.0]


def test_a_reader_that_was_served_is_not_woken_any_more() -> None:
    """A waiter that stays registered would be called for ever."""
    topic = EngineHarness().log.topic("a")
    topic.append(1)
    before = len(topic._state._listeners)
    assert topic.read(timeout=TIMEOUT_S).records
    assert topic.read(1, timeout=0.001).records == []
    follower = topic.follow(timeout=TIMEOUT_S)
    next(follower)
    follower.close()  # type: ignore[attr-defined]
    assert len(topic._state._listeners) == before


@pytest.mark.parametrize("timeout", [0.0, 0.001])
def test_a_long_read_that_gets_nothing_answers_as_a_short_one(timeout: float) -> None:
    """Contract 2.6."""
    topic = EngineHarness().log.topic("a")
    topic.append([1, 2])
    page = topic.read(2, timeout=timeout)
    assert (page.records, page.gap, page.next_from_seq, page.caught_up) == ([], None, 2, True)


def test_a_long_read_does_not_wait_where_there_is_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 2.6: only if the first read yields no record, no gap and is caught up."""
    Waits.asked = []
    monkeypatch.setattr(read, "Event", Waits)
    topic = EngineHarness().log.topic("a", cap_records=2)
    topic.append([1, 2, 3])
    assert topic.read(1, timeout=TIMEOUT_S).records
    assert topic.read(0, timeout=TIMEOUT_S).gap
    topic.delete(before_seq=9)
    assert topic.read(0, timeout=TIMEOUT_S).gap
    assert topic.read(7, timeout=TIMEOUT_S).gap
    assert topic.read(2, timeout=TIMEOUT_S).next_from_seq == 3, "a deleted record moves the cursor"
    assert Waits.asked == []


# The end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "error"), [("drop", TopicNotFound), ("close", Closed)])
def test_a_drop_and_a_close_end_all_waiting(ending: str, error: type[Error], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract, appendix D4: deleting a topic wakes its streams."""
    looks = Looks(monkeypatch)
    with threaded() as log:
        topic = log.topic("a")

        def follow() -> None:
            with pytest.raises(error):
                list(topic.follow(timeout=None))

        with running(follow):
            assert looks.happened.wait(TIMEOUT_S)
            if ending == "drop":
                log.drop("a")
            else:
                log.close()


def test_a_follower_ends_when_nothing_came_for_its_timeout() -> None:
    topic = EngineHarness().log.topic("a")
    topic.append([1, 2, 3])
    assert [data_of(found) for found in topic.follow(timeout=0.0)] == [1, 2, 3]
    assert [data_of(found) for found in topic.follow(2, timeout=0.0)] == [3]
    assert list(topic.follow(3, timeout=0.0)) == []


def test_a_topic_can_be_iterated_over() -> None:
    """All that is there, many pages of it, over what was lost and deleted."""
    topic = EngineHarness().log.topic("a", cap_records=2_500)
    topic.append([b"%d" % number for number in range(3_000)])
    topic.delete(seqs=[1_000])
    assert [data_of(found) for found in topic] == [b"%d" % number for number in range(500, 3_000) if number != 999]


def test_a_follower_goes_on_over_records_of_its_own_node() -> None:
    """Contract 3.5: skipped records advance the cursor and end nothing."""
    topic = EngineHarness(**TINY).log.topic("a")
    for number in range(30):
        topic.append(number, node="me" if number % 10 else "you")
    assert [data_of(found) for found in topic.follow(timeout=0.0, node="me")] == [0, 10, 20]
    assert list(topic.follow(21, timeout=0.0, node="me")) == []


# Gaps ---------------------------------------------------------------------------------------------------


def gapped() -> Topic:
    topic = EngineHarness().log.topic("a", cap_records=2)
    topic.append([1, 2, 3, 4, 5])
    return topic


def test_a_gap_fails_a_follower_that_did_not_ask_for_less() -> None:
    """G70, contract 3.4."""
    topic = gapped()
    with pytest.raises(GapFound) as found:
        list(topic.follow(timeout=0.0))
    error = found.value
    assert (error.gap_from, error.gap_to, error.reason, error.missed_estimate) == (1, 3, "cap", 3)
    assert (error.earliest_seq, error.head_seq, error.topic) == (4, 5, "a")
    with pytest.raises(GapFound):
        list(topic.follow(2, timeout=0.0, on_gap="fail"))
    assert [data_of(record) for record in topic.follow(3, timeout=0.0)] == [4, 5]


def test_a_gap_is_emitted_once_in_the_place_of_what_was_lost() -> None:
    """G70."""
    found = list(gapped().follow(1, timeout=0.0, on_gap="emit"))
    assert found[0] == Gap(2, 3, "cap", 2, 4, 5)
    assert [data_of(record) for record in found[1:]] == [4, 5]


def test_a_gap_is_skipped_where_that_was_asked_for() -> None:
    assert [data_of(record) for record in gapped().follow(timeout=0.0, on_gap="skip")] == [4, 5]


@pytest.mark.parametrize("on_gap", ["emit", "skip"])
def test_a_follower_overtaken_by_eviction_gets_a_gap(on_gap: Any) -> None:
    """G70: what was lost while it was busy elsewhere, and only that."""
    topic = EngineHarness().log.topic("a", cap_records=3)
    topic.append([1, 2])
    follower = topic.follow(timeout=0.0, on_gap=on_gap)
    assert [data_of(next(follower)), data_of(next(follower))] == [1, 2]
    topic.append([3, 4, 5, 6, 7])
    rest = list(follower)
    gaps = [found for found in rest if isinstance(found, Gap)]
    assert gaps == ([Gap(3, 4, "cap", 2, 5, 7)] if on_gap == "emit" else [])
    assert [data_of(found) for found in rest if isinstance(found, Record)] == [5, 6, 7]


def test_a_follower_of_a_recreated_topic_gets_a_gap() -> None:
    """Contract 3.4: `recreated`."""
    log = EngineHarness().log
    log.topic("a").append([1, 2, 3])
    log.drop("a")
    topic = log.topic("a")
    topic.append("new")
    with pytest.raises(GapFound, match="made again"):
        list(topic.follow(3, timeout=0.0))
    assert [type(found) for found in topic.follow(3, timeout=0.0, on_gap="emit")] == [Gap, Record]
    assert [data_of(found) for found in topic.follow(3, timeout=0.0, on_gap="skip")] == ["new"]


def test_deletes_make_no_gap_for_a_follower() -> None:
    """G72."""
    topic = EngineHarness().log.topic("a")
    topic.append([1, 2, 3, 4])
    topic.delete(before_seq=3)
    topic.delete(seqs=[4])
    assert [data_of(found) for found in topic.follow(timeout=0.0)] == [3]


def test_another_word_for_a_gap_is_refused() -> None:
    with pytest.raises(BadInput, match="fail, emit or skip"):
        list(EngineHarness().log.topic("a").follow(timeout=0.0, on_gap="ignore"))  # type: ignore[call-overload]
