"""A topic as columns: to_arrow returns what read returns, append_arrow writes what append writes (design D1, E8)."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.implementations import implementation
from tests.unit.engine.harness import CLASSES, RESTARTS, TINY, EngineHarness, Restart, datas, read_topic, seqs

from tidelog.engine import Counts, Gap, Record, Topic, read
from tidelog.errors import BadInput, Error, TooLarge, TopicFull

NAMES = ["seq", "ts", "node", "tag", "meta", "data", "json"]


def rows(table: pa.Table) -> list[Record]:
    """A table as the records it stands for."""
    return [
        Record(
            row["seq"],
            int(row["ts"].timestamp() * 1000 + 0.5),
            json.loads(row["data"]) if row["json"] else row["data"],
            row["tag"] or None,
            row["node"] or None,
            json.loads(row["meta"]) if row["meta"] else None,
        )
        for row in table.to_pylist()
    ]


def gap_and_counts(table: pa.Table) -> tuple[Gap | None, Counts]:
    found = {name: json.loads(table.schema.metadata[name]) for name in (b"gap", b"counts")}
    return Gap(**found[b"gap"]) if found[b"gap"] else None, Counts(**found[b"counts"])


def mixed(world: EngineHarness, durability: str = "fsync") -> Topic:
    topic = world.log.topic("a", durability=durability)
    topic.append([b"1", 2, {"n": 3}, b""], tag=["x", None, "y", "x"], node=[None, "n", None, "n"])
    topic.append(b"5")
    world.log.checkpoint()
    topic.append([6, 7], meta=[{"m": 6}, None], tag="z")
    topic.append([b"8" * 50] * 6)
    world.clock.tick(5)
    world.log.checkpoint()
    topic.append(["ä", None, [1]], node="m")
    topic.delete(seqs=[2, 9])
    return topic


# Out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_table_holds_what_pages_hold(durability: str) -> None:
    """Sealed, growing and in memory; types as documented."""
    topic = mixed(EngineHarness(**TINY), durability)
    table = topic.to_arrow()
    assert table.schema.names == NAMES
    assert table.schema.field("seq").type == pa.int64()
    assert table.schema.field("ts").type == pa.timestamp("ms", tz="UTC")
    assert table.schema.field("json").type == pa.bool_()
    assert all(table.schema.field(name).type == pa.string() for name in ("node", "tag", "meta"))
    assert table.schema.field("data").type == pa.binary()
    assert rows(table) == read_topic(topic).records
    table.validate(full=True)


@pytest.mark.parametrize("durability", CLASSES)
def test_with_and_without_the_kernel_tables_are_the_same(durability: str) -> None:
    tables = []
    for compiled in (True, False):
        with implementation(compiled=compiled):
            tables.append(mixed(EngineHarness(**TINY), durability).to_arrow())
    assert tables[0].equals(tables[1], check_metadata=True)


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_table_is_the_same_after_a_restart(restart: Restart) -> None:
    world = EngineHarness(**TINY)
    before = mixed(world).to_arrow()
    assert world.restart(restart).topic("a").to_arrow().equals(before, check_metadata=True)
    assert world.reader().topic("a").to_arrow().equals(before, check_metadata=True)


@pytest.mark.parametrize(
    ("from_seq", "to_seq"), [(0, None), (0, 16), (3, None), (3, 9), (8, 9), (5, 5), (9, 3), (0, 0), (16, None), (0, 99)]
)
def test_a_range_is_exclusive_below_and_inclusive_above(from_seq: int, to_seq: int | None) -> None:
    """E8: and its counts are those of the range."""
    topic = mixed(EngineHarness(**TINY))
    table = topic.to_arrow(from_seq, to_seq)
    stop = 16 if to_seq is None else min(to_seq, 16)
    expected = [seq for seq in seqs(topic) if from_seq < seq <= stop]
    assert table["seq"].to_pylist() == expected
    gap, counts = gap_and_counts(table)
    assert gap is None
    assert counts.rows == len(expected)
    assert sum(counts) == max(stop - from_seq, 0)
    assert counts.deleted == len([seq for seq in (2, 9) if from_seq < seq <= stop])


@pytest.mark.parametrize("reason", ["cap", "ttl"])
def test_a_table_reports_a_gap(reason: str) -> None:
    """G70, E8."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2, 3])
    world.clock.tick(10)
    topic.append([4, 5, 6])
    limit: dict[str, Any] = {"cap_records": 3} if reason == "cap" else {"ttl_ms": 9}
    world.log.topic("a", **limit)
    gap, counts = gap_and_counts(topic.to_arrow(1))
    assert gap == Gap(2, 3, "cap" if reason == "cap" else "ttl", 2, 4, 6)
    assert counts == (Counts(rows=3, evicted=2) if reason == "cap" else Counts(rows=3, expired=2))
    gap, counts = gap_and_counts(topic.to_arrow(3))
    assert (gap, counts) == (None, Counts(rows=3))


def test_a_table_may_leave_out_nodes() -> None:
    """Contract 3.5."""
    topic = mixed(EngineHarness(**TINY))
    everything = read_topic(topic).records
    table = topic.to_arrow(node=["n", "m"])
    assert rows(table) == [record for record in everything if record.node not in ("n", "m")]
    assert gap_and_counts(table)[1].filtered == len(everything) - table.num_rows


def test_an_empty_topic_is_an_empty_table() -> None:
    topic = EngineHarness().log.topic("a")
    table = topic.to_arrow()
    assert (table.num_rows, table.schema.names) == (0, NAMES)
    assert gap_and_counts(table) == (None, Counts())


def test_a_table_outlives_its_topic() -> None:
    """What was taken stays readable when files and engine are gone."""
    world = EngineHarness(**TINY)
    topic = mixed(world)
    expected = read_topic(topic).records
    table = topic.to_arrow()
    world.log.drop("a")
    world.log.close()
    assert rows(table) == expected


def test_a_table_of_many_segments_is_one_table() -> None:
    world = EngineHarness(segment_events_max=100)
    topic = world.log.topic("a")
    for number in range(50):
        topic.append([b"%d" % (number * 100 + at) for at in range(100)])
        if number % 20 == 19:
            world.log.checkpoint()
    table = topic.to_arrow()
    assert table["seq"].to_pylist() == list(range(1, 5_001))
    assert table["data"].to_pylist() == [b"%d" % number for number in range(5_000)]


def test_a_table_of_a_segment_larger_than_a_chunk_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: a chunk that is full is no budget that is spent. Every seq is accounted for, also with huge records."""
    monkeypatch.setattr(read, "_CHUNK_BYTES", 100)
    world = EngineHarness()
    topic = world.log.topic("t")
    sizes = [10, 90, 300, 1, 1, 99, 500, 0, 40] * 3
    for size in sizes:
        topic.append(b"x" * size)
    topic.seal()
    for _ in range(2):
        table = topic.to_arrow()
        assert [len(data) for data in table.column("data").to_pylist()] == sizes
        counts = json.loads(table.schema.metadata[b"counts"])
        assert sum(counts.values()) == counts["rows"] == len(sizes)
        assert [len(data) for data in datas(topic)] == sizes
        assert len(topic.read(0, 1000, bytes_max=400).records) == 3
        assert len(topic.read(0, 1000, bytes_max=399).records) == 2
        world.log.checkpoint()


# In -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_table_that_came_out_goes_in_again(durability: str) -> None:
    """Round trip: the same records under new seqs and the time of the write; `seq` and `ts` are not taken over."""
    world = EngineHarness(**TINY)
    table = mixed(world).to_arrow()
    world.clock.tick(1_000)
    copy = world.log.topic("copy", durability=durability)
    done = copy.append_arrow(table)
    assert (done.first_seq, done.count) == (1, table.num_rows)
    expected = [record._replace(seq=0, ts_ms=0) for record in rows(table)]
    assert [record._replace(seq=0, ts_ms=0) for record in read_topic(copy).records] == expected
    assert {record.ts_ms for record in read_topic(copy).records} == {world.clock.now_us() // 1000}
    if durability != "ephemeral":
        again = world.restart("kill").topic("copy")
        assert [record._replace(seq=0, ts_ms=0) for record in read_topic(again).records] == expected


names = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
metas = st.none() | st.dictionaries(names.filter(bool), st.integers(0, 9), max_size=2)
values = st.binary(max_size=20) | st.integers(-9, 9) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(values, names, names, metas), min_size=1, max_size=9))
def test_any_records_go_out_and_in_as_columns(records: list[tuple[Any, Any, Any, Any]]) -> None:
    """Round trip of anything: what append and read say of it, to_arrow and append_arrow say too."""
    world = EngineHarness(**TINY)
    topic, copy = world.log.topic("a"), world.log.topic("copy")
    data, tags, nodes, headers = (list(column) for column in zip(*records, strict=True))
    topic.append(data, tag=tags, node=nodes, meta=headers)
    table = topic.to_arrow()
    assert rows(table) == read_topic(topic).records
    copy.append_arrow(table)
    assert read_topic(copy).records == read_topic(topic).records
    copy.append_arrow(table.to_batches()[0].slice(0, 1))
    assert len(seqs(copy)) == len(records) + 1


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"data": [b"1", b"2", b"3"]}),
        pa.table({"data": ["1", "2", "3"]}),
        pa.table({"data": pa.array(["1", "2", "3"], pa.large_string())}),
        pa.table({"data": pa.array([b"1", b"2", b"3"], pa.large_binary())}),
        pa.table({"data": pa.chunked_array([["1"], [], ["2", "3"]])}),
        pa.table({"data": ["0", "1", "2", "3", "4"]}).slice(1, 3),
        pa.table({"data": pa.array(["1", "2", "3"]).dictionary_encode()}),
        pa.record_batch({"data": ["1", "2", "3"]}),
        pa.record_batch({"data": ["0", "1", "2", "3"]}).slice(1),
        pa.table({"data": ["1", "2", "3"], "json": [False, None, False]}),
        pa.table({"data": ["1", "2", "3"], "tag": [None, None, None], "meta": pa.nulls(3, pa.string())}),
        pa.table({"seq": [7, 7, 7], "ts": [0, 0, 0], "data": ["1", "2", "3"]}),
    ],
    ids=range(12),
)
def test_data_may_be_bytes_or_text_in_any_layout(table: Any) -> None:
    topic = EngineHarness().log.topic("a")
    assert topic.append_arrow(table).seqs == range(1, 4)
    assert [(record.data, record.tag, record.meta) for record in read_topic(topic).records] == [
        (b"1", None, None),
        (b"2", None, None),
        (b"3", None, None),
    ]


def test_a_column_says_which_data_is_json() -> None:
    topic = EngineHarness().log.topic("a")
    topic.append_arrow(pa.table({"data": ["1", '{"a":null}', '"ä"'], "json": [True, True, True]}))
    topic.append_arrow(pa.table({"data": ["1", "2", "[3]"], "json": [True, False, True], "tag": ["t", None, ""]}))
    assert datas(topic) == [1, {"a": None}, "ä", 1, b"2", [3]]
    assert [record.tag for record in read_topic(topic).records] == [None, None, None, "t", None, None]


def test_json_of_a_table_is_stored_without_blanks_and_bytes_as_they_are() -> None:
    """A line end inside a record would end a line for those who read lines."""
    topic = EngineHarness().log.topic("t")
    topic.append_arrow(pa.table({"data": [b'{\n "a" : "b c" }', b"x \n y"], "json": [True, False]}))
    assert topic.to_arrow().column("data").to_pylist() == [b'{"a":"b c"}', b"x \n y"]
    assert datas(topic) == [{"a": "b c"}, b"x \n y"]


def test_a_table_is_one_batch_with_one_key_and_one_fate() -> None:
    """Contract 1.11, 2.5; G12."""
    log = EngineHarness().log
    topic = log.topic("a", cap_records=5, discard="reject")
    table = pa.table({"data": [b"x"] * 3})
    assert topic.append_arrow(table, key="k").seqs == range(1, 4)
    again = topic.append_arrow(table, key="k")
    assert (again.deduped, again.seqs) == (True, range(1, 4))
    with pytest.raises(TopicFull):
        topic.append_arrow(table)
    assert len(seqs(topic)) == 3


@pytest.mark.parametrize(
    ("error", "table"),
    [
        (BadInput, pa.table({"other": [b"1"]})),
        (BadInput, pa.table({"data": [b"1"], "value": [1]})),
        (BadInput, pa.table({"data": pa.array([], pa.binary())})),
        (BadInput, pa.table({"data": [b"1", None]})),
        (BadInput, pa.table({"data": [1, 2]})),
        (BadInput, pa.table({"data": [b"1"], "tag": [5]})),
        (BadInput, pa.table({"data": [b"1"], "tag": [b"\xff"]})),
        (BadInput, pa.table({"data": [b"1"], "node": [b"\xff"]})),
        (BadInput, pa.table({"data": [b"1"], "json": ["yes"]})),
        (BadInput, pa.table({"data": [b"1", b"2"], "json": [1, 0]})),
        (BadInput, pa.table({"data": ["{"], "json": [True]})),
        (BadInput, pa.table({"data": ["1", "no", "3"], "json": [True, True, False]})),
        (BadInput, pa.table({"data": ["NaN"], "json": [True]})),
        (BadInput, pa.table({"data": ["1 2"], "json": [True]})),
        (BadInput, pa.table({"data": [b"1"], "meta": ["no"]})),
        (BadInput, pa.table({"data": [b"1"], "meta": ["[1]"]})),
        (TooLarge, pa.table({"data": [b"x", b"x" * ((1 << 20) + 1)]})),
        (TooLarge, pa.table({"data": [b"x" * (1 << 20)], "meta": ['{"a":1}']})),
        (BadInput, [b"1"]),
        (BadInput, None),
    ],
    ids=range(20),
)
def test_a_table_that_could_not_be_read_again_is_refused(error: type[Error], table: Any) -> None:
    """Contract 1.6, 1.12: one bad row would make the topic unreadable for everybody."""
    world = EngineHarness()
    topic = world.log.topic("a")
    topic.append(b"0")
    before = world.disk.digest()
    with pytest.raises(error, match="nothing was written"):
        topic.append_arrow(table)
    assert world.disk.digest() == before
    assert datas(topic) == [b"0"]
    assert topic.append_arrow(pa.table({"data": [b"1"]})).first_seq == 2
