"""The contract of followers: records, pages and Arrow batches as they arrive, gaps in their place, heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from tidelog import Gap, errors, protocols
from tidelog.engine import Page

Name = Callable[..., str]


def with_a_gap(database: protocols.Database, name: str) -> protocols.Topic:
    """A topic whose records 1 to 7 were lost to its cap."""
    topic = database.topic(name, cap_records=3)
    for number in range(1, 11):
        topic.append(number)
    return topic


def test_pages_have_at_most_the_records_asked_for(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append(list(range(1, 11)))
    pages = list(topic.follow(batch=4, timeout=0))
    assert [type(page) for page in pages] == [Page] * 3
    assert [[record.data for record in page.records] for page in pages] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [page.next_from_seq for page in pages] == [4, 8, 10]
    assert [[record.data for record in page.records] for page in topic.follow(8, batch=4, timeout=0)] == [[9, 10]]


def test_pages_have_the_gap_before_their_records(database: protocols.Database, name: Name) -> None:
    topic = with_a_gap(database, name())
    pages = list(topic.follow(batch=2, timeout=0, on_gap="emit"))
    assert [page.gap and (page.gap.gap_from, page.gap.gap_to) for page in pages] == [(1, 7), None]
    assert [[record.data for record in page.records] for page in pages] == [[8, 9], [10]]
    assert [page.gap for page in topic.follow(batch=2, timeout=0, on_gap="skip")] == [None, None]
    with pytest.raises(errors.GapFound):
        next(topic.follow(batch=2, timeout=0))


def test_a_page_without_records_is_a_heartbeat(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append(1)
    pages = topic.follow(batch=10, timeout=60, heartbeat=0.01)
    assert [record.data for record in next(pages).records] == [1]
    for _ in range(2):
        beat = next(pages)
        assert (beat.records, beat.gap, beat.next_from_seq, beat.head_seq) == ([], None, 1, 1)
    topic.append(2)
    found: list[Any] = []
    while not found:
        found = [record.data for record in next(pages).records]
    assert found == [2]
    assert list(topic.follow(2, batch=10, timeout=0.02, heartbeat=60)) == []
    assert len(list(topic.follow(2, batch=10, timeout=0.04, heartbeat=0.015))) == 2


def batches_of(items: Iterator[pa.RecordBatch | Gap]) -> list[Any]:
    return [item.column("seq").to_pylist() if isinstance(item, pa.RecordBatch) else item for item in items]


def test_arrow_batches_have_the_columns_of_a_table(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([{"a": 1}, b"raw"], tag="t", node="eu", meta={"m": 1})
    topic.append([1, 2, 3])
    batches = list(topic.follow_arrow(timeout=0))
    table = pa.Table.from_batches([batch for batch in batches if isinstance(batch, pa.RecordBatch)])
    assert table.to_pylist() == topic.to_arrow().to_pylist()
    assert table.schema.names == topic.to_arrow().schema.names
    parts = batches_of(topic.follow_arrow(timeout=0, batch=2))
    assert [seq for part in parts for seq in part] == [1, 2, 3, 4, 5]
    assert max(map(len, parts)) == 2
    assert batches_of(topic.follow_arrow(4, timeout=0)) == [[5]]


def test_arrow_batches_have_gaps_between_them(database: protocols.Database, name: Name) -> None:
    topic = with_a_gap(database, name())
    found = batches_of(topic.follow_arrow(timeout=0, on_gap="emit"))
    assert isinstance(found[0], Gap)
    assert (found[0].gap_from, found[0].gap_to) == (1, 7)
    assert [seq for item in found[1:] for seq in item] == [8, 9, 10]
    assert [seq for item in batches_of(topic.follow_arrow(timeout=0, on_gap="skip")) for seq in item] == [8, 9, 10]
    with pytest.raises(errors.GapFound) as raised:
        next(topic.follow_arrow(timeout=0))
    assert (raised.value.gap_from, raised.value.gap_to) == (1, 7)
    everything_lost = database.topic(name("lost"), cap_records=1)
    everything_lost.append([1, 2, 3])
    everything_lost.delete(before_seq=4)
    assert [type(item) for item in everything_lost.follow_arrow(timeout=0, on_gap="emit")] == [Gap]


def test_arrow_batches_arrive_as_records_do_and_heartbeats_are_empty(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    batches = topic.follow_arrow(timeout=60, heartbeat=0.01)
    beat = next(batches)
    assert isinstance(beat, pa.RecordBatch)
    assert len(beat) == 0
    writer = Thread(target=topic.append, args=([1, 2],))
    writer.start()
    found: list[int] = []
    while not found:
        item = next(batches)
        assert isinstance(item, pa.RecordBatch)
        assert item.schema.remove_metadata() == beat.schema.remove_metadata()
        found = item.column("seq").to_pylist()
    writer.join()
    assert found == [1, 2]


@pytest.mark.parametrize(
    "options",
    [{"heartbeat": 1.0}, {"batch": 0}, {"batch": True}, {"batch": 5, "heartbeat": 0}, {"on_gap": "never"}],
)
def test_options_that_cannot_be_are_refused(database: protocols.Database, name: Name, options: dict[str, Any]) -> None:
    topic = database.topic(name())
    with pytest.raises(errors.BadInput):
        list(topic.follow(timeout=0, **options))
