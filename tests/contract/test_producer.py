"""The contract of producers: records of many callers in batches, on every kind of database."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from tidelog import errors, protocols
from tidelog.engine import FailedRecords, ProducerStats, UnwrittenRecord

Name = Callable[..., str]


def datas_of(topic: protocols.Topic) -> list[Any]:
    found: list[Any] = topic.to_arrow()["data"].to_pylist()
    return found


def test_records_of_every_kind_arrive_in_order_and_deliveries_have_their_seqs(
    database: protocols.Database, name: Name
) -> None:
    topic = database.topic(name())
    with topic.producer(linger_ms=0) as producer:
        sent = [
            producer.send(b"\x00bytes"),
            producer.send(bytearray(b"more"), tag="t"),
            producer.send({"a": 1}, node="eu", meta={"m": [1]}),
            producer.send([1, 2]),
            producer.send(None, tag="t", node="us"),
            producer.send("text"),
        ]
        assert [delivery.result() for delivery in sent] == list(range(1, 7))
        assert all(delivery.done for delivery in sent)
        assert producer.flush()
        assert producer.stats()[:5] == (6, 6, 0, 0, 0)
    records = topic.read().records
    assert [record.data for record in records] == [b"\x00bytes", b"more", {"a": 1}, [1, 2], None, "text"]
    assert [record.tag for record in records] == [None, "t", None, None, "t", None]
    assert [record.node for record in records] == [None, None, "eu", None, "us", None]
    assert [record.meta for record in records] == [None, None, {"m": [1]}, None, None, None]


def test_records_of_many_threads_are_written_once_and_in_the_order_of_each(
    database: protocols.Database, name: Name
) -> None:
    topic = database.topic(name())
    with topic.producer(linger_ms=1, max_bytes=20_000) as producer:

        def send(thread: int) -> None:
            for number in range(300):
                producer.send(b"%d:%d" % (thread, number))

        threads = [Thread(target=send, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [data.split(b":") for data in datas_of(topic)]
    for place in range(4):
        assert [int(number) for owner, number in found if int(owner) == place] == list(range(300))
    assert len(found) == 1_200


def test_more_than_a_batch(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    with topic.producer(linger_ms=10_000) as producer:
        sent = [producer.send(b"%d" % number) for number in range(10_001)]
        assert producer.flush()
        assert sent[-1].result() == 10_001
        stats = producer.stats()
    assert (stats.written, stats.batches, stats.waiting_bytes) == (10_001, 2, 0)
    assert datas_of(topic) == [b"%d" % number for number in range(10_001)]


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (object(), {}),
        (float("nan"), {}),
        (b"x", {"tag": 5}),
        (b"x", {"tag": "t" * 300}),
        (b"x", {"node": ["eu"]}),
        (b"x", {"meta": 5}),
    ],
)
def test_a_bad_record_is_refused_by_send(
    database: protocols.Database, name: Name, data: object, fields: dict[str, Any]
) -> None:
    topic = database.topic(name())
    with topic.producer() as producer:
        with pytest.raises(errors.Refused) as refused:
            producer.send(data, **fields)
        assert refused.value.written is False
        producer.send("good")
    assert [record.data for record in topic.read().records] == ["good"]


def test_a_record_above_the_limit_is_refused_alone(database: protocols.Database, name: Name) -> None:
    """A directory knows its limit and `send` raises; a server refuses the batch, and the halves of it are written."""
    topic = database.topic(name())
    reports: list[FailedRecords] = []
    large = b"x" * ((1 << 20) + 1)
    with topic.producer(linger_ms=10_000, on_error=reports.append) as producer:
        before = [producer.send(number) for number in range(5)]
        try:
            delivery = producer.send(large, tag="large")
        except errors.TooLarge:
            delivery = None
        after = [producer.send(number) for number in range(5, 8)]
        assert producer.flush()
        assert [each.result() for each in (*before, *after)] == list(range(1, 9))
        if delivery is not None:
            with pytest.raises(errors.BadInput, match="1048577 bytes"):
                delivery.result()
            assert [report.records for report in reports] == [[UnwrittenRecord(large, "large")]]
            assert producer.stats()[:5] == (9, 8, 1, 0, 0)
    assert [record.data for record in topic.read().records] == list(range(8))


def test_a_refused_batch_stops_the_producer_and_the_error_has_what_was_not_written(
    database: protocols.Database, name: Name
) -> None:
    topic = database.topic(name(), cap_records=2, discard="reject")
    producer = topic.producer(linger_ms=10_000)
    producer.send("a")
    assert producer.flush()
    refused = [producer.send(data, tag="t") for data in ("b", "c")]
    for call in (producer.flush, lambda: producer.send("d"), producer.close, producer.close):
        with pytest.raises(errors.NotAllWritten) as found:
            call()
        assert (found.value.written, found.value.count_written, found.value.in_doubt) == (False, 1, [])
        assert found.value.records == [UnwrittenRecord("b", "t"), UnwrittenRecord("c", "t")]
        assert isinstance(found.value.__cause__, errors.TopicFull)
    for delivery in refused:
        with pytest.raises(errors.TopicFull):
            delivery.result()
    assert producer.stats() == ProducerStats(3, 1, 2, 0, 0, 0, 1, 0)
    assert [record.data for record in topic.read().records] == ["a"]


def test_on_error_gets_a_refused_batch_and_the_producer_goes_on(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), cap_records=2, discard="reject")
    reports: list[FailedRecords] = []
    with topic.producer(linger_ms=10_000, on_error=reports.append) as producer:
        for batch in (["a"], ["b", "c"], ["d"]):
            for data in batch:
                producer.send(data)
            assert producer.flush()
    assert [[record.data for record in report.records] for report in reports] == [["b", "c"]]
    assert isinstance(reports[0].error, errors.TopicFull)
    assert [record.data for record in topic.read().records] == ["a", "d"]


def test_a_closed_producer_and_a_missing_topic(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    producer = topic.producer()
    producer.send(1)
    producer.close()
    producer.close()
    with pytest.raises(errors.Closed):
        producer.send(2)
    assert producer.flush()
    database.drop(name())
    with pytest.raises(errors.NotFound):
        topic.producer().send(3).result()
    for options in ({"linger_ms": -1}, {"linger_ms": "5"}, {"max_bytes": 5}, {"max_bytes": True}):
        with pytest.raises(errors.BadInput):
            database.topic(name()).producer(**options)
