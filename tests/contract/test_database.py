"""The contract of `tidelog.protocols`: a directory and a server have the same methods, results and errors.

Each test runs on every kind of database. The functions take the protocols, so mypy holds the classes to them as well.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

import tidelog
from tidelog import Gap, Job, Record, errors, protocols, timestamp_ms
from tidelog.channels import Message, Presence, SubscriptionEnded
from tidelog.engine import Appended, Counts, Deleted, LargeData, Page, QueueCounts, RecordReader, TopicInfo
from tidelog.engine.erase import ErasureReceipt
from tidelog.engine.queues import AckResult
from tidelog.engine.rewrite import RewriteResult

Name = Callable[..., str]


def records_of(items: Iterator[Record | Gap]) -> list[Record]:
    return [item for item in items if isinstance(item, Record)]


# ── topics ────────────────────────────────────────────────────────────────────────────────────────


def test_topics_are_created_found_configured_and_dropped(database: protocols.Database, name: Name) -> None:
    assert database.find(name()) is None
    topic = database.topic(name(), ttl_ms=1_000_000)
    assert (topic.name, topic.config.ttl_ms, topic.count, topic.head_seq) == (name(), 1_000_000, 0, 0)
    assert database.topic(name(), cap_records=5).config.ttl_ms == 1_000_000
    assert name() in database.names()
    _, created = database.configure(name(), {"cap_records": 7})
    assert (created, topic.config.ttl_ms, topic.config.cap_records) == (False, 0, 7)
    _, created = database.configure(name("b"), {})
    assert created
    states = database.topics(name(""))
    assert [type(state) for state in states] == [TopicInfo, TopicInfo]
    assert [state.topic for state in states] == sorted([name(), name("b")])
    assert [state.topic for state in database.topics(name(""), limit=1)] == [min(name(), name("b"))]
    topic.append(1)
    with pytest.raises(errors.NotEmpty):
        database.drop(name(), if_empty=True)
    assert database.drop(name())
    assert not database.drop(name())
    with pytest.raises(errors.TopicNotFound) as found:
        database.topic(name(), create=False).read()
    assert found.value.topic == name()


def test_a_wrong_config_is_refused_with_the_same_words(
    embedded: protocols.Database, database: protocols.Database, name: Name
) -> None:
    for fields in ({"ttl": 5}, {"cap_records": -1}, {"durability": "often"}):
        with pytest.raises(errors.BadInput) as here:
            embedded.topic(name(), **fields)
        with pytest.raises(errors.BadInput) as there:
            database.topic(name(), **fields)
        assert str(here.value).partition(";")[0] == str(there.value).partition(";")[0]
    with pytest.raises(errors.BadInput):
        database.topic("no/such name")


def test_records_come_back_as_they_were_written(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    datas: list[Any] = [{"a": 1}, b"\x00\xff", "text", None, 2**70, [1, {"b": [None]}], 1.5, b"", ""]
    done = topic.append(datas, tag=["t", *[None] * 8], node="eu", meta={"m": [1]})
    assert isinstance(done, Appended)
    assert (done.first_seq, done.last_seq, done.head_seq, done.deduped) == (1, 9, 9, False)
    page = topic.read()
    assert isinstance(page, Page)
    assert [record.data for record in page.records] == datas
    assert [record.tag for record in page.records] == ["t", *[None] * 8]
    assert {record.node for record in page.records} == {"eu"}
    assert page.records[3].meta == {"m": [1]}
    assert (page.gap, page.next_from_seq, page.counts, page.caught_up) == (None, 9, Counts(rows=9), True)
    assert [record.seq for record in topic.read(4, 2).records] == [5, 6]
    assert topic.read(node="eu").counts == Counts(filtered=9)
    assert [record.data for record in records_of(iter(topic))] == datas
    state = topic.state()
    assert (state.count, state.head_seq, state.next_seq, state.id) == (9, 9, 10, topic.id)
    assert state.epoch == topic.epoch


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        ([], {}),
        (object(), {}),
        (float("nan"), {}),
        ("x", {"tag": 5}),
        (["x", "y"], {"tag": ["a"]}),
        ("x", {"tag": "t" * 300}),
        ("x", {"meta": 5}),
        ("x", {"key": ""}),
    ],
)
def test_bad_records_are_refused_and_nothing_is_written(
    database: protocols.Database, name: Name, records: object, fields: dict[str, Any]
) -> None:
    topic = database.topic(name())
    with pytest.raises(errors.Refused) as refused:
        topic.append(records, **fields)
    assert refused.value.written is False
    assert topic.head_seq == 0


def test_limits_of_a_write_raise_the_same_classes(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    with pytest.raises(errors.TooLarge):
        topic.append("x" * (1 << 20))
    with pytest.raises(errors.BatchTooLarge):
        topic.append([1] * 10_001)
    full = database.topic(name("full"), cap_records=2, discard="reject")
    full.append([1, 2])
    with pytest.raises(errors.TopicFull) as found:
        full.append(3)
    assert (found.value.topic, found.value.cap_records, found.value.head_seq) == (name("full"), 2, 2)


def test_a_key_writes_once(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    first, second = topic.append([1, 2], key="k"), topic.append([1, 2], key="k")
    assert (first.seqs, first.deduped, second.seqs, second.deduped) == (range(1, 3), False, range(1, 3), True)
    assert topic.count == 2


def test_long_reads_return_all_that_was_asked_for(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    for start in range(0, 2500, 500):
        topic.append(list(range(start, start + 500)))
    page = topic.read(limit=2400)
    assert (len(page.records), page.next_from_seq, page.counts.rows) == (2400, 2400, 2400)
    assert [record.data for record in records_of(topic.follow(timeout=0))] == list(range(2500))
    assert topic.to_arrow()["seq"].to_pylist() == list(range(1, 2501))


def test_reads_wait_for_the_next_record(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    writer = Thread(target=topic.append, args=("late",))
    writer.start()
    page = topic.read(timeout=30)
    writer.join()
    assert [record.data for record in page.records] == ["late"]
    assert topic.read(page.next_from_seq, timeout=0.05).records == []


def test_follow_yields_records_in_order_until_none_arrive(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    follower = topic.follow(timeout=30)
    for number in range(3):
        topic.append(number)
        record = next(follower)
        assert isinstance(record, Record)
        assert (record.seq, record.data) == (number + 1, number)
    assert list(topic.follow(3, timeout=0.05)) == []
    with pytest.raises(errors.BadInput):
        next(topic.follow(on_gap="never"))  # type: ignore[call-overload]
    with pytest.raises(errors.TopicNotFound):
        next(database.topic(name("none"), create=False).follow(timeout=0))


def test_losses_are_gaps_and_deletes_are_not(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), cap_records=3)
    topic.append(list(range(5)))
    done = topic.delete(seqs=[4])
    assert isinstance(done, Deleted)
    assert (done.deleted, done.count, done.head_seq, done.earliest_seq) == (1, 2, 5, 3)
    gap = topic.read().gap
    assert gap == Gap(1, 2, "cap", 2, 3, 5)
    items = list(topic.follow(timeout=0, on_gap="emit"))
    assert items[0] == gap
    assert [item.seq for item in items[1:] if isinstance(item, Record)] == [3, 5]
    with pytest.raises(errors.GapFound) as found:
        next(topic.follow(timeout=0))
    assert (found.value.gap_from, found.value.gap_to, found.value.reason) == (1, 2, "cap")
    assert topic.read(2).counts == Counts(rows=2, deleted=1)
    entries = topic.gaps()
    assert [(row.cause, row.first, row.last, row.records) for row in entries] == [("cap", 1, 2, 2), ("delete", 4, 4, 1)]
    assert database.gaps(name())[0].topic == name()
    assert topic.gaps(limit=1) == entries[:1]
    assert database.gaps(name("none")) == []
    assert entries.to_arrow().num_rows == 2


def test_deletes_by_tag_and_below_a_seq(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([1, 2, 3, 4], tag=["order-1", "order-2", "x", None])
    assert topic.delete(match="order-*").deleted == 2
    assert topic.delete(before_seq=4).deleted == 1
    assert [record.seq for record in topic.read().records] == [4]
    with pytest.raises(errors.BadInput):
        topic.delete()
    with pytest.raises(errors.BadInput):
        topic.delete(match="order-*", seqs=[4])


def test_times_are_found(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([1, 2])
    first_ms = topic.read().records[0].ts_ms
    assert topic.seek(first_ms) == 1
    assert topic.seek(first_ms + 60_000) == 3
    assert topic.seek(0) == 1


# ── bulk ──────────────────────────────────────────────────────────────────────────────────────────


def test_tables_are_the_same(embedded: protocols.Database, database: protocols.Database, name: Name) -> None:
    tables = []
    for each in (embedded, database):
        topic = each.topic(name("bulk"))
        if not topic.count:
            topic.append([{"n": 1}, b"raw", {"n": 3}], tag=["a", None, "c"], meta=[None, {"m": 1}, None], node="n")
            topic.delete(seqs=[1])
        tables.append(topic.to_arrow().drop_columns(["ts"]))
        assert topic.to_arrow(1, 2)["seq"].to_pylist() == [2]
        assert topic.to_arrow(node="n").num_rows == 0
    assert tables[0] == tables[1]
    assert tables[0].schema.equals(tables[1].schema, check_metadata=True)


def test_scans_account_for_every_seq(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), cap_records=4)
    topic.append(list(range(6)))
    topic.delete(seqs=[5])
    scan = topic.scan()
    assert sum(len(batch) for batch in scan.iter_arrow_batches()) == 3
    assert scan.counts == Counts(rows=3, deleted=1, evicted=2)
    assert (scan.next_from_seq, scan.head_seq, scan.earliest_seq) == (6, 6, 3)
    assert scan.gaps == [scan.gap]
    assert sum(len(batch) for batch in topic.scan(limit=2).iter_arrow_batches()) == 2


def test_tables_are_appended(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    table = pa.table({"data": [b'{"n":1}', b"raw"], "json": [True, False], "tag": ["a", None]})
    done = topic.append_arrow(table)
    assert done.seqs == range(1, 3)
    assert [(record.data, record.tag) for record in topic.read().records] == [({"n": 1}, "a"), (b"raw", None)]
    assert topic.append_arrow(table, key="k").deduped is False
    assert topic.append_arrow(table, key="k").deduped is True
    with pytest.raises(errors.BadInput):
        topic.append_arrow(pa.table({"other": [1]}))
    assert topic.count == 4


def test_numbered_batches_are_written_once(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    table = pa.table({"data": [b"a", b"b"]})
    first = topic.append_numbered([table, table], writer="etl", number=1, sum=(1, 2))
    again = topic.append_numbered([table, table], writer="etl", number=1, sum=(1, 2))
    assert (first.seqs, first.deduped, again.seqs, again.deduped) == (range(1, 5), False, range(1, 5), True)
    with pytest.raises(errors.BatchConflict) as found:
        topic.append_numbered([table], writer="etl", number=1, sum=(9, 9))
    assert (found.value.writer, found.value.number, found.value.newest) == ("etl", 1, 1)
    batches = topic.producer_batches("etl")
    assert [(number, batch.first, batch.last, batch.sum) for number, batch in batches.items()] == [(1, 1, 4, (1, 2))]


# ── large records ─────────────────────────────────────────────────────────────────────────────────


def test_large_records_are_streamed_in_and_read_in_ranges(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), max_record_bytes=8 << 20)
    content = bytes(range(256)) * 12_000  # 3 MB
    chunks = (content[start : start + 100_000] for start in range(0, len(content), 100_000))
    done = topic.append_stream(chunks, tag="big", meta={"name": "file"})
    assert done.seqs == range(1, 2)
    record = topic.read().records[0]
    assert isinstance(record.data, LargeData)
    assert (record.data.size, record.tag, record.meta) == (len(content), "big", {"name": "file"})
    with topic.open_record(1) as reader:
        assert (len(reader), reader.xxh3) == (len(content), record.data.xxh3)
        reader.seek(1_500_000)
        assert reader.read(10) == content[1_500_000:1_500_010]
        reader.seek(-5, io.SEEK_END)
        assert reader.read() == content[-5:]
    with topic.open_record(1) as reader:
        assert reader.read() == content
    topic.append([{"a": 1}, b""])
    assert topic.open_record(2).read() == b'{"a":1}'
    assert topic.open_record(3).read() == b""
    with pytest.raises(errors.RecordNotFound) as found:
        topic.open_record(9)
    assert (found.value.seq, found.value.head_seq) == (9, 3)


@pytest.mark.parametrize("kind", ["embedded", "remote"])
def test_large_data_is_opened_from_its_record(request: pytest.FixtureRequest, kind: str, name: Name) -> None:
    database: protocols.Database = request.getfixturevalue(kind)
    topic = database.topic(name())
    topic.append_stream([b"x" * 400_000])
    data = topic.read().records[0].data
    with data.open() as reader:
        assert isinstance(reader, RecordReader)
    assert data.read() == b"x" * 400_000


def test_a_stream_that_breaks_off_or_is_too_long_writes_nothing(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), max_record_bytes=1 << 20)

    def broken() -> Iterator[bytes]:
        yield b"x" * 500_000
        raise ValueError("the source failed")

    with pytest.raises((ValueError, errors.StreamBroken)):
        topic.append_stream(broken())
    with pytest.raises(errors.TooLarge):
        topic.append_stream([b"x" * 600_000] * 2)
    with pytest.raises(errors.BadInput):
        topic.append_stream(b"not chunks")  # type: ignore[arg-type]
    assert topic.head_seq == 0
    assert topic.append_stream([b"x"]).first_seq == 1


# ── retention, compaction, maintenance ────────────────────────────────────────────────────────────


def test_the_newest_record_of_each_key(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), compaction="/id")
    topic.append([{"id": f"k{number % 3}", "n": number} for number in range(7)])
    assert {row.key: row.record.seq for row in topic.latest()} == {"k0": 7, "k1": 5, "k2": 6}
    page = topic.latest().page(2)
    assert (len(page.records), page.next_after is None) == (2, False)
    assert len(topic.latest().page(2, page.next_after).records) == 1
    record = topic.latest("k1")
    assert record is not None
    assert record.data == {"id": "k1", "n": 4}
    assert topic.latest("none") is None
    table = topic.latest().to_arrow()
    assert (table["key"].to_pylist(), table["seq"].to_pylist()) == (["k1", "k2", "k0"], [5, 6, 7])
    assert topic.compact().records == 4
    with pytest.raises(errors.BadInput):
        topic.latest().page(after="x")
    with pytest.raises(errors.BadInput):
        database.topic(name("plain")).compact()


def test_retention_is_simulated(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append(list(range(10)))
    topic.group("slow").begin()
    found = topic.simulate_retention(cap_records=4)
    assert (found.records, found.cap.first_seq, found.cap.last_seq, found.evict_floor) == (6, 1, 6, 7)
    assert [(loss.group, loss.records) for loss in found.groups] == [("slow", 6)]
    assert topic.count == 10


def test_segments_rewrites_and_erasures(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([{"n": number, "pad": "x" * 100} for number in range(50)], tag="old")
    topic.seal()
    database.checkpoint()
    topic.append("new")
    listing = topic.segments()
    assert [(each.base, each.stop, each.sealed, each.records) for each in listing.segments][:1] == [(1, 51, True, 50)]
    segment = topic.segment(1)
    assert segment is not None
    assert (segment.live_records, segment.tier) == (50, "hot")
    assert topic.segment(7) is None
    topic.delete(before_seq=41)
    rewritten = topic.rewrite(force=True)
    assert isinstance(rewritten, RewriteResult)
    assert (rewritten.segments, rewritten.records_removed) == (1, 40)
    assert rewritten.files[0].xxh3_before != rewritten.files[0].xxh3_after
    receipt = topic.erase(seqs=[45])
    assert isinstance(receipt, ErasureReceipt)
    assert (receipt.topic, receipt.records, receipt.hash) == (name(), 1, receipt.computed_hash())
    assert receipt in database.erasures()
    assert database.verify_erasures(receipt).ok
    assert [place.topic for place in database.segment_places(name())][:1] == [name()]
    assert database.tier_status().store is None
    with pytest.raises(errors.BadInput, match="no cold store"):
        database.relocate(name())
    health = database.health()
    assert (health.ok, "checkpoint" in {task.name for task in health.tasks}) == (True, True)
    assert database.corruption() == ()


# ── groups ────────────────────────────────────────────────────────────────────────────────────────


def test_groups_share_a_durable_position(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append(list(range(10)))
    group = topic.group("readers")
    assert (group.name, group.topic, group.exists, group.position) == ("readers", name(), False, 0)
    assert group.state().last_commit_ms is None
    assert [record.seq for record in group.fetch(3).records] == [1, 2, 3]
    assert group.preview("latest").records == 10
    assert group.commit(3) == 3
    assert (group.exists, group.position, group.lag().records) == (True, 3, 7)
    assert [record.seq for record in group.fetch(2).records] == [4, 5]
    assert group.would_commit(5).records == 2
    assert group.position == 3
    for seq, expect in ((2, None), (11, None), (5, 4)):
        with pytest.raises(errors.CursorConflict) as found:
            group.commit(seq, expect=expect)
        assert (found.value.group, found.value.position, found.value.head_seq) == ("readers", 3, 10)
    assert group.commit(5, expect=3) == 5
    assert group.reset("earliest") == 0
    assert group.reset(timestamp_ms(0)) == 0
    assert group.reset("latest") == 10
    group.hold(1_000)
    assert (group.hold_bytes, group.hold_broken) == (1_000, False)
    assert [each.name for each in topic.groups()] == ["readers"]
    other = topic.group("other")
    assert (other.begin("latest"), other.begin("earliest"), other.position) == (True, False, 10)
    assert (group.delete(), group.delete(), group.exists) == (True, False, False)
    assert group.reset(4) == 4
    with pytest.raises(errors.BadInput):
        topic.group("no/name")
    with pytest.raises(errors.BadInput):
        group.reset("middle")  # type: ignore[arg-type]


# ── queues ────────────────────────────────────────────────────────────────────────────────────────


def test_consumers_of_a_group_share_its_records(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), cap_records=10)
    topic.append(list(range(12)))
    group = topic.group("shared")
    first = group.claim("a", 3)
    assert first is not None
    assert first.gap is not None
    assert ([record.seq for record in first], first.gap.gap_to) == ([3, 4, 5], 2)
    second = group.claim("b", 3)
    assert second is not None
    assert [state.consumer for state in group.consumers()] == ["a", "b"]
    assert second.extend(60_000)
    assert (second.ack(), group.position) == (True, 0)
    assert (first.ack(), group.position) == (True, 8)
    assert not first.ack()
    third = group.claim("a", 2)
    assert third is not None
    assert third.release()
    assert group.leave("a") == 0
    batches = [[record.seq for record in batch] for batch in group.consume("b", 3, timeout=0)]
    assert (batches, group.position) == ([[9, 10], [11, 12]], 12)
    assert group.claim("a", timeout=0.01) is None


def test_one_reader_follows_a_group(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([1, 2, 3])
    group = topic.group("reader")
    loop = group.follow(commit="each", timeout=0)
    assert [next(loop), next(loop)] == topic.read(0, 2).records
    assert group.position == 1
    assert records_of(loop) == topic.read(2).records
    assert group.position == 3
    with pytest.raises(errors.BadInput, match="commit is each or batch"):
        next(group.follow(commit="all"))  # type: ignore[arg-type]


def test_jobs_are_claimed_settled_and_counted(database: protocols.Database, name: Name) -> None:
    queue = database.queue(name(), lease_ms=60_000)
    queue.put([{"n": 1}, b"two", "three"], tag="t", meta={"m": 1})
    jobs = queue.claim("w1", 2)
    assert [(job.seq, job.data, job.tag, job.meta, job.deliveries) for job in jobs] == [
        (1, {"n": 1}, "t", {"m": 1}, 1),
        (2, b"two", "t", {"m": 1}, 1),
    ]
    assert queue.counts() == QueueCounts(ready=1, in_flight=2, dead_lettered=0)
    extended = queue.extend("w1", jobs, lease_ms=90_000)
    assert (extended.count, sorted(extended.deadlines)) == (2, [1, 2])
    assert queue.ack("w1", jobs[0]) == AckResult(1, [], 1, 1)
    assert queue.ack("w1", [1]) == AckResult(0, [1], 1, 1)
    assert queue.nack("w1", jobs[1:]) == AckResult(1, [], 2, 0)
    assert [job.deliveries for job in queue.claim("w2", 10)] == [2, 1]
    steps = queue.history().read()
    assert {"enqueued", "claimed", "acked", "nacked", "extended"} <= {step["event"] for step in steps}
    table = queue.history().to_arrow()
    assert table["event"].to_pylist() == [step["event"] for step in queue.history().read()]
    assert queue.topic.name == name()
    with pytest.raises(errors.BadInput):
        queue.claim("")
    with pytest.raises(errors.BadInput):
        queue.put(1, run_at_ms=5, delay_ms=5)


def test_jobs_have_priorities_and_delays(database: protocols.Database, name: Name) -> None:
    queue = database.queue(name())
    queue.put("low")
    queue.put("high", priority=5)
    queue.put("later", delay_ms=60_000)
    assert [job.data for job in (*queue.claim("w", 1), *queue.claim("w", 5))] == ["high", "low"]
    assert queue.counts().ready == 0


def test_jobs_are_yielded_until_none_arrive_and_unsettled_ones_are_returned(
    database: protocols.Database, name: Name
) -> None:
    queue = database.queue(name())
    queue.put([1, 2, 3])
    seen = []
    for job in queue.jobs("w", timeout=0):
        seen.append(job.data)
        queue.ack("w", job)
    assert seen == [1, 2, 3]
    queue.put("left")
    jobs = queue.jobs("w", timeout=30)
    assert next(jobs).data == "left"
    assert queue.counts().in_flight == 1
    del jobs  # its leases end with it
    job = next(queue.jobs("w2", timeout=30))
    assert (job.data, job.deliveries) == ("left", 2)


def test_a_log_is_no_queue(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    for call in (topic.queue, lambda: database.queue(name())):
        with pytest.raises(errors.NotAQueue) as found:
            call()
        assert found.value.topic == name()
    with pytest.raises(errors.TopicExists) as other:
        database.topic(name(), type="queue")
    assert other.value.detail == {"existing_type": "log", "requested_type": "queue"}


def test_dead_letters_are_redriven(database: protocols.Database, name: Name) -> None:
    database.topic(name("dead"))
    queue = database.queue(name(), max_deliveries=1, dead_letter=name("dead"))
    queue.put([1, 2])
    queue.nack("w", queue.claim("w", 2))
    assert queue.claim("w", 2) == []
    dead = database.topic(name("dead"))
    assert dead.count == 2
    done = dead.redrive()
    assert (done.count, done.queues) == (2, {name(): 2})
    assert queue.counts().ready == 2


# ── routers ───────────────────────────────────────────────────────────────────────────────────────


def test_rejected_jobs_go_to_the_dead_letter_topic_at_once(database: protocols.Database, name: Name) -> None:
    dead = database.topic(name("dead"))
    queue = database.queue(name(), dead_letter=name("dead"), lease_ms=20_000)
    assert queue.lease_ms == 20_000
    queue.put([1, 2])
    (job,) = queue.claim("w")
    assert queue.reject("w", job, error=KeyError("x")).count == 1
    assert queue.counts().ready == 1
    assert [(record.data, (record.meta or {}).get("$error")) for record in dead.read().records] == [(1, "'x'")]
    plain = database.queue(name("plain"))
    plain.put(1)
    with pytest.raises(errors.BadInput, match="has no dead_letter"):
        plain.reject("w", plain.claim("w"))


def test_a_worker_says_why_a_job_failed(database: protocols.Database, name: Name) -> None:
    dead = database.topic(name("dead"))
    queue = database.queue(name(), dead_letter=name("dead"))
    queue.put(2)

    @queue.worker(retries=tidelog.backoff(0, attempts=1))
    def fail(job: Job) -> None:
        raise ValueError(f"bad {job.data}")

    with fail:
        assert fail.wait(1, 30)
    reasons = [(record.meta or {}).get("$error") for record in dead.read().records]
    assert reasons == ["bad 2"]


def test_routers_copy_records(database: protocols.Database, name: Name) -> None:
    made = database.router(name("r"), name("a"), name("b"), filter="x*")
    assert (made.router, made.created, made.filter, made.guarantee) == (
        name("r"),
        True,
        ("tag", "Glob", "x*"),
        "at_least_once",
    )
    database.topic(name("a")).append([1, 2], tag=["xy", None])
    found = database.find_router(name("r"))
    assert found is not None
    assert found.forwarded_total == 1
    assert [record.data for record in database.topic(name("b")).read(timeout=30).records] == [1]
    assert [router.router for router in database.routers(name("r"))] == [name("r")]
    assert database.routers(source=name("a"))[0]._replace(forwarded_total=0) == found._replace(forwarded_total=0)
    with pytest.raises(errors.RouterCycle) as cycle:
        database.router(name("s"), name("b"), name("a"))
    assert cycle.value.cycle == [name("b"), name("a"), name("b")]
    with pytest.raises(errors.TopicExists):
        database.router(name("t"), name("c"), name("b"))
    assert (database.drop_router(name("r")), database.drop_router(name("r"))) == (True, False)
    assert database.find_router(name("r")) is None


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


def channel_name(name: Name) -> str:
    return f"!{name()}@localhost"


def test_channels_have_members_settings_and_lists(database: protocols.Database, name: Name) -> None:
    room = channel_name(name)
    ann, bob = (database.channel(room, user=f"{user}@localhost") for user in ("ann", "bob"))
    with pytest.raises(errors.ChannelNotFound):
        ann.configure(persist=True)
    ann.join(persist=True)
    bob.join()
    with pytest.raises(errors.AlreadyMember) as found:
        bob.join()
    assert (found.value.channel, found.value.user) == (room, "bob@localhost")
    state = ann.state()
    assert (state.owner, state.members, state.config.persist) == (
        "ann@localhost",
        ("ann@localhost", "bob@localhost"),
        True,
    )
    assert ann.configure(max_clients=3).max_clients == 3
    with pytest.raises(errors.Forbidden):
        bob.configure(max_clients=5)
    assert ann.allow("publish", "ann@localhost") == ("ann@localhost",)
    assert ann.acl("publish") == ("ann@localhost",)
    with pytest.raises(errors.BadInput):
        ann.acl("other")
    with pytest.raises(errors.Forbidden):
        bob.publish(b"not allowed")
    assert ann.disallow("publish", "ann@localhost") == ()
    ann.invite("cat@localhost")
    assert ann.members() == ("ann@localhost", "bob@localhost", "cat@localhost")
    assert ann.members(2, 2) == ("cat@localhost",)
    assert ann.kick("cat@localhost") == "ann@localhost"
    assert room in database.channels.channel_names()
    assert bob.leave() == "ann@localhost"
    with pytest.raises(errors.NotMember):
        bob.state()
    assert (ann.delete(), room in database.channels.channel_names()) == (True, False)


def test_messages_are_published_received_and_kept(database: protocols.Database, name: Name) -> None:
    room = channel_name(name)
    ann, bob = (database.channel(room, user=f"{user}@localhost") for user in ("ann", "bob"))
    ann.join(persist=True)
    bob.join()
    events = bob.subscribe()
    ack = ann.publish_many([b"one", b"\xfftwo"])
    assert (ack.channel, ack.seq, ack.messages, ack.qos) == (room, 2, 2, 1)
    received: list[object] = []
    while len(received) < 2:
        received += events.wait(30)
    assert [event.payload for event in received if isinstance(event, Message)] == [b"one", b"\xfftwo"]
    page = bob.history()
    assert [(message.seq, message.payload, message.sender) for message in page.messages] == [
        (1, b"one", "ann@localhost"),
        (2, b"\xfftwo", "ann@localhost"),
    ]
    assert (page.next_seq, page.first_seq, page.last_seq) == (3, 1, 2)
    assert [message.seq for message in bob.history(newest=1).messages] == [2]
    assert (bob.bounds(), bob.holes()) == ((1, 2), [])
    ann.configure(max_clients=5)
    ann.delete()
    ended = list(events)
    assert isinstance(ended[-1], SubscriptionEnded)
    assert any(isinstance(event, Presence) for event in ended)
    events.close()
    with pytest.raises(errors.BadInput):
        ann.publish(b"x", qos=2)


def test_fifo_channels_are_pushed_and_popped(database: protocols.Database, name: Name) -> None:
    room = channel_name(name)
    ann = database.channel(room, user="ann@localhost")
    ann.join(persist=True, type="fifo")
    pushed = ann.push(b"job")
    assert isinstance(pushed, Message)
    assert (pushed.seq, pushed.payload, pushed.sender) == (1, b"job", "ann@localhost")
    assert ann.push(b"second").seq == 2
    assert len(ann) == 2
    assert ann.pop().payload == b"job"
    assert ann.clear() == 1
    with pytest.raises(errors.FifoEmpty):
        ann.pop()
    with pytest.raises(errors.WrongType):
        ann.history()
