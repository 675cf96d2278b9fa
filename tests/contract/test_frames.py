"""Records, gaps, histories and groups as tables, data frames and rows, and data frames as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from tidelog import datasets, errors, frames, protocols
from tidelog.engine import Counts
from tidelog.frames import RECORD_SCHEMA

Name = Callable[..., str]
BLOCKING = pytest.mark.parametrize("database", ["embedded", "remote"], indirect=True)  # `to_dataset` blocks


def orders(database: protocols.Database, name: Name) -> protocols.Topic:
    """Three segments of four records, and a tail of two."""
    topic = database.topic(name())
    for number in range(3):
        start = number * 4
        topic.append(
            [{"n": n} for n in range(start, start + 4)], tag=["a", "b", None, "a"], node="eu", meta={"batch": number}
        )
        topic.seal()
        database.checkpoint()
    topic.append([b"raw", {"n": 13}])
    return topic


def seqs(table: pa.Table) -> list[int]:
    found: list[int] = table["seq"].to_pylist()
    return found


# ── out ───────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_text_and_times_are_times(database: protocols.Database, name: Name) -> None:
    topic = orders(database, name)
    table = topic.to_arrow()
    assert table.schema.equals(RECORD_SCHEMA)
    assert table.schema.field("ts").type == pa.timestamp("ms", tz="UTC")
    assert table["tag"].to_pylist()[:4] == ["a", "b", None, "a"]
    assert table["meta"].to_pylist()[0] == '{"batch":0}'
    assert table["ts"].cast("int64").to_pylist() == [record.ts_ms for record in topic.read().records]


def test_columns_and_ranges(database: protocols.Database, name: Name) -> None:
    topic = orders(database, name)
    table = topic.to_arrow(2, 5, columns=["tag", "seq"])
    assert table.to_pylist() == [
        {"tag": None, "seq": 3},
        {"tag": "a", "seq": 4},
        {"tag": "a", "seq": 5},
    ]
    assert topic.to_arrow(5, 2).num_rows == 0
    times = topic.to_arrow(columns=["ts"])["ts"].to_pylist()
    assert topic.to_arrow(since=times[0]).num_rows == 14
    assert topic.to_arrow(since=times[0] + timedelta(minutes=1)).num_rows == 0
    assert topic.to_arrow(until=times[0]).num_rows == 0
    assert topic.to_arrow(since=times[0], until=times[-1] + timedelta(seconds=1)).num_rows == 14
    middle = int(times[6].timestamp() * 1000 + 0.5)
    expected = [seq for seq, ts in enumerate(times, 1) if ts >= times[6]]
    assert seqs(topic.to_arrow(since=middle)) == expected
    for bad in (["none"], "seq", [], 5):
        with pytest.raises(errors.BadInput, match="columns are a list of"):
            topic.to_arrow(columns=bad)  # type: ignore[arg-type]
    with pytest.raises(errors.BadInput, match="without a time zone"):
        topic.to_arrow(since=datetime(2026, 1, 1))


def test_filters(database: protocols.Database, name: Name) -> None:
    topic = orders(database, name)
    tag, seq = pc.field("tag"), pc.field("seq")
    assert seqs(topic.to_arrow(filter=tag == "b")) == [2, 6, 10]
    assert seqs(topic.to_arrow(filter=(seq > 5) & (tag == "a"))) == [8, 9, 12]
    assert topic.to_arrow(columns=["data"], filter=tag == "b").to_pylist()[0] == {"data": b'{"n":1}'}
    assert seqs(topic.to_arrow(4, 9, filter=seq.isin([1, 5, 9, 14]))) == [5, 9]
    assert seqs(topic.to_arrow(filter=seq == 99)) == []
    assert Counts(**_counts(topic.to_arrow(filter=tag == "b"))) == Counts(rows=3, filtered=11)
    later = topic.to_arrow(columns=["ts"])["ts"].to_pylist()[-1] + timedelta(seconds=5)
    assert topic.to_arrow(filter=pc.field("ts") > later).num_rows == 0
    for bad in ("tag = 'a'", pc.field("none") == 1, tag == 5):
        with pytest.raises(errors.BadInput, match="filter"):
            topic.to_arrow(filter=bad)


def _counts(table: pa.Table) -> dict[str, int]:
    found: dict[str, int] = frames._decode(table.schema.metadata[b"counts"])
    return found


def test_lost_records_are_in_the_metadata(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), cap_records=3)
    topic.append(list(range(5)))
    metadata = topic.to_arrow(filter=pc.field("seq") > 0).schema.metadata
    assert frames._decode(metadata[b"gap"])["gap_to"] == 2
    assert frames._decode(topic.to_arrow(2).schema.metadata[b"gap"]) is None


def test_data_frames(database: protocols.Database, name: Name) -> None:
    topic = orders(database, name)
    pandas = topic.to_pandas(0, 4, columns=["seq", "tag", "ts"])
    assert pandas["seq"].tolist() == [1, 2, 3, 4]
    assert pandas["tag"].tolist() == ["a", "b", None, "a"]
    assert str(pandas["ts"].dtype).startswith("datetime64[ms, UTC")
    polars = topic.to_polars(filter=pc.field("tag") == "b")
    assert polars["seq"].to_list() == [2, 6, 10]
    assert str(polars.schema["tag"]) == "String"
    assert topic.to_dicts(1, 2) == [
        {
            "seq": 2,
            "ts": topic.to_arrow(1, 2)["ts"][0].as_py(),
            "node": "eu",
            "tag": "b",
            "meta": {"batch": 0},
            "data": {"n": 1},
        }
    ]
    assert topic.to_dicts(12, columns=["data"]) == [{"data": b"raw"}, {"data": {"n": 13}}]


def test_gaps_histories_groups_and_latest_records(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), cap_records=3, compaction="latest_by_tag")
    topic.append([1, 2, 3, 4], tag=["a", "b", "a", "c"])
    group = topic.group("readers")
    group.commit(3)
    (gap,) = topic.gaps().to_dicts()
    assert (gap["cause"], gap["first"], gap["ts_ms"].tzinfo is not None) == ("cap", 1, True)
    assert database.gaps(name()).to_polars()["records"].to_list() == [1]
    assert topic.gaps().to_pandas()["last"].tolist() == [1]
    found = topic.groups().to_dicts()
    assert [(row["group"], row["position"], row["lag_records"]) for row in found] == [("readers", 3, 1)]
    assert found[0]["last_commit_ms"].tzinfo is not None
    assert topic.groups().to_pandas()["hold_broken"].tolist() == [False]
    assert database.topic(name("b")).groups().to_arrow().num_rows == 0
    assert [(row["key"], row["data"]) for row in topic.latest().to_dicts()] == [("b", 2), ("a", 3), ("c", 4)]
    assert topic.latest().to_polars()["key"].to_list() == ["b", "a", "c"]
    queue = database.queue(name("q"))
    queue.put([1, 2])
    queue.ack("w", queue.claim("w", 1))
    rows = queue.history().to_dicts()
    assert [row["event"] for row in rows] == ["enqueued", "claimed", "acked"]
    assert rows[1]["deadline_ms"] > rows[1]["ts_ms"]
    history = queue.history().to_pandas()
    assert str(history["lease_id"].dtype) == "Int64"  # a missing value does not make it a float
    assert queue.history().to_polars()["seq"].to_list() == [1, 1, 1]


@pytest.mark.parametrize("module", ["pandas", "polars"])
def test_a_library_that_is_not_installed(
    database: protocols.Database, name: Name, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    topic = database.topic(name())
    topic.append(1)

    def missing(wanted: str) -> None:
        raise ImportError(wanted)

    monkeypatch.setattr(frames, "import_module", missing)
    message = rf"needs {module}.*pip install 'tidelog\[frames\]'"
    with pytest.raises(errors.Unsupported, match=message):
        getattr(topic, f"to_{module}")()
    with pytest.raises(errors.Unsupported, match=message):
        getattr(topic, f"append_{module}")(None)
    assert topic.count == 1


# ── queries ───────────────────────────────────────────────────────────────────────────────────────


@BLOCKING
def test_duckdb_queries_a_topic(database: protocols.Database, name: Name) -> None:
    import duckdb

    topic = orders(database, name)
    with duckdb.connect() as connection:
        connection.register("records", topic.to_dataset())
        query = "select tag, count(*) from records where tag is not null group by tag order by tag"
        assert connection.sql(query).fetchall() == [("a", 6), ("b", 3)]
        assert connection.sql("select seq from records where seq between 4 and 6 and tag = 'a'").fetchall() == [
            (4,),
            (5,),
        ]
        assert connection.sql("select count(*) from records").fetchall() == [(14,)]
        topic.append({"n": 99}, tag="new")
        text = "select (decode(data)::json->>'n')::int from records where tag = 'new'"
        assert connection.sql(text).fetchall() == [(99,)]
        connection.register("gaps", topic.gaps().to_arrow())
        assert connection.sql("select count(*) from gaps").fetchall() == [(0,)]
        records = topic.to_dataset(12)  # DuckDB finds it by the name of the variable
        found = duckdb.sql("select max(seq) from records")
        assert found is not None
        assert found.fetchall() == [(15,)]
        assert repr(records) == f"<dataset of topic {name()!r}>"


@BLOCKING
def test_polars_and_arrow_query_a_topic(database: protocols.Database, name: Name) -> None:
    import polars as pl

    topic = orders(database, name)
    found = pl.scan_pyarrow_dataset(topic.to_dataset()).filter(pl.col("seq") > 12).select("seq").collect()
    assert found["seq"].to_list() == [13, 14]
    dataset = topic.to_dataset(until=datetime.now(UTC) + timedelta(hours=1))
    assert dataset.to_table(columns=["seq"], filter=pc.field("tag") == "b")["seq"].to_pylist() == [2, 6, 10]
    assert dataset.count_rows() == 14
    assert dataset.head(3, columns=["seq"]).num_rows == 3
    with pytest.raises(errors.TopicNotFound):
        database.topic(name("none"), create=False).to_dataset().to_table()


@BLOCKING
def test_a_query_reads_its_columns_and_the_segments_that_can_match(database: protocols.Database, name: Name) -> None:
    topic = orders(database, name)
    scanned: list[tuple[int, int | None, object]] = []

    class Watched:
        """The topic, with a note of each scan."""

        name = topic.name
        segments, seek = topic.segments, topic.seek

        def scan(self, from_seq: int = 0, to_seq: int | None = None, **options: Any) -> protocols.Scan:
            scanned.append((from_seq, to_seq, options["columns"]))
            return topic.scan(from_seq, to_seq, **options)

    dataset = datasets.TopicDataset(Watched(), 0, None, since=None, until=None, nodes=frozenset(), strong=False)
    seq = pc.field("seq")
    assert dataset.to_table(columns=["seq"], filter=(seq > 5) & (seq < 8)).num_rows == 2
    assert dataset.to_table(columns=["data"], filter=(seq == 1) | (seq == 14)).num_rows == 2
    assert dataset.to_table(filter=pc.field("tag") == "b").num_rows == 3
    assert scanned == [
        (4, 8, ("seq",)),
        (0, 4, ("seq", "data")),
        (12, None, ("seq", "data")),
        (0, None, None),
    ]


def _ranges(filter: ds.Expression, from_seq: int = 0, to_seq: int | None = None) -> list[tuple[int, int | None]]:
    class Segment:
        def __init__(self, base: int) -> None:
            self.base, self.stop, self.first_ts, self.last_ts = base, base + 10, base * 1000, base * 1000 + 9999

    segments = [Segment(base) for base in (11, 21, 41)]  # 31 to 40 were deleted, and are in no segment
    return datasets.matching_ranges(filter, segments, from_seq, to_seq)


def test_ranges_that_can_match() -> None:
    seq, ts = pc.field("seq"), pc.field("ts")

    def at(seconds: int) -> datetime:
        return datetime.fromtimestamp(seconds, UTC)

    assert _ranges(seq < 5) == [(0, 10)]
    assert _ranges(seq >= 25) == [(20, None)]
    assert _ranges(seq > 60) == [(50, None)]
    assert _ranges(seq == 15) == [(10, 20)]
    assert _ranges((seq == 15) | (seq == 45)) == [(10, 20), (40, 50)]
    assert _ranges(seq == 45, 0, 30) == []
    assert _ranges(seq > 0, 14, 23) == [(14, 23)]
    assert _ranges(ts > at(35)) == [(0, 10), (30, None)]  # seqs without a segment have no known times
    assert _ranges(ts < at(12), 10) == [(10, 20), (30, 40)]
    assert _ranges(pc.field("tag") == "x") == [(0, None)]
    assert _ranges(seq > 99, 10, 10) == []


# ── in ────────────────────────────────────────────────────────────────────────────────────────────


def test_frames_are_appended(database: protocols.Database, name: Name) -> None:
    import pandas as pd
    import polars as pl

    topic = database.topic(name())
    when = pd.Timestamp("2026-01-02T03:04:05Z")
    frame = pd.DataFrame({"sku": ["A", None], "qty": [1, 2], "price": [1.5, float("nan")], "at": [when, None]})
    assert topic.append_pandas(frame).seqs == range(1, 3)
    assert [record.data for record in topic.read().records] == [
        {"sku": "A", "qty": 1, "price": 1.5, "at": "2026-01-02T03:04:05Z"},
        {"sku": None, "qty": 2, "price": None, "at": None},
    ]
    topic.append_polars(pl.DataFrame({"sku": ["C"], "tags": [["x", "y"]]}), key="k")
    assert topic.append_polars(pl.DataFrame({"sku": ["C"], "tags": [["x", "y"]]}), key="k").deduped
    assert topic.read(2).records[0].data == {"sku": "C", "tags": ["x", "y"]}
    copy = database.topic(name("copy"))
    copy.append_pandas(topic.to_pandas())
    copy.append_polars(topic.to_polars(columns=["data", "json", "tag"]))
    expected = [record.data for record in topic.read().records]
    assert [record.data for record in copy.read().records] == expected * 2


def _bad_frames() -> Iterator[tuple[str, Any]]:
    import pandas as pd
    import polars as pl

    yield "append_pandas", 5
    yield "append_pandas", pd.DataFrame()
    yield "append_pandas", pd.DataFrame({"a": []})
    yield "append_pandas", pd.DataFrame({"a": [1, "x"]})
    yield "append_pandas", pd.DataFrame({"data": [5]})
    yield "append_polars", pd.DataFrame({"a": [1]})
    yield "append_polars", pl.DataFrame({"a": [float("nan")]})
    yield "append_polars", pl.DataFrame({"a": [[{"x": float("inf")}]]})


def test_frames_that_are_no_records_are_refused(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    for method, frame in _bad_frames():
        with pytest.raises(errors.BadInput, match="nothing was written") as refused:
            getattr(topic, method)(frame)
        assert refused.value.written is False
    assert topic.count == 0


def test_a_wrong_time_is_named(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    for option in ("since", "until"):
        wrong: dict[str, Any] = {option: "yesterday"}
        with pytest.raises(errors.BadInput, match=f"{option} is a datetime or milliseconds"):
            topic.to_arrow(**wrong)
