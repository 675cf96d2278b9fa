"""The source with the registered schemas of its topics: each record is read with the schema that applied at its seq."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog import pipelines
from tidelog.errors import BadInput, NotFound
from tidelog.spark.source import TidelogSource


def fill(data: Path, topic: str, rows: list[dict[str, Any]]) -> None:
    with tidelog.open(str(data), threads=False, segment_events_max=4) as log:
        log.topic(topic).append(rows)


def read(**options: str) -> list[dict[str, Any]]:
    source = TidelogSource({"subscribe": "orders", "payload": "registered", **options})
    reader: Any = pickle.loads(pickle.dumps(source.reader(source.schema())))
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    found: list[dict[str, Any]] = pa.Table.from_batches(batches).sort_by("seq").to_pylist()
    return found


def register(where: str, *schemas: str, topic: str = "orders") -> None:
    for number, schema in enumerate(schemas):
        pipelines.set_schema(where, topic, schema, first_seq=1 + 3 * number)


@pytest.fixture
def data(tmp_path: Path) -> str:
    fill(tmp_path / "data", "orders", [{"n": n, "note": n if n < 3 else f"x{n}", "ts": n} for n in range(9)])
    register(str(tmp_path / "data"), "n bigint", "n bigint, note string", "n bigint, note string, data_ts int")
    return str(tmp_path / "data")


def test_each_record_has_the_schema_of_its_seq(data: str) -> None:
    """`note` was a number before it was registered as text, which would not fit."""
    rows = read(path=data)
    assert [row["n"] for row in rows] == list(range(9))
    assert [row["note"] for row in rows] == [None] * 3 + [f"x{n}" for n in range(3, 9)]
    assert [row["data_ts"] for row in rows] == [None] * 6 + [6, 7, 8]
    assert [row["_rescued"] for row in rows[2:7:2]] == ['{"note":2,"ts":2}', '{"ts":4}', None]


def test_it_is_the_same_by_server_with_filters_and_columns(data: str) -> None:
    with run_server(data) as (_, address):
        rows = read(server=address, where="seq > 5", columns="seq,note,data_ts")
    assert rows == [
        {"seq": seq, "note": f"x{seq - 1}", "data_ts": seq - 1 if seq > 6 else None} for seq in range(6, 10)
    ]


def test_topics_have_schemas_of_their_own(data: str) -> None:
    fill(Path(data), "bills", [{"n": 1, "due": 2}])
    with pytest.raises(NotFound, match="topic bills has no registered schema"):
        read(path=data, subscribe="orders,bills")
    register(data, "n bigint, due int", topic="bills")
    rows = read(path=data, subscribe="orders,bills", columns="topic,seq,n,note,due")
    assert {"topic": "bills", "seq": 1, "n": 1, "note": None, "due": 2} in rows
    assert [row["note"] for row in rows if row["topic"] == "orders"][:4] == [None, None, None, "x3"]
    fill(Path(data), "notes", [{"n": "text"}])
    register(data, "n string", topic="notes")
    with pytest.raises(BadInput, match=r"'n' with two types, string and bigint; nothing was read"):
        read(path=data, subscribe="orders,notes")


def test_a_stream_has_them_too(data: str) -> None:
    source = TidelogSource({"path": data, "subscribe": "orders", "payload": "registered"})
    stream: Any = source.streamReader(source.schema())
    tasks = stream.partitions({"orders": {"epoch": 1, "seq": 1}}, {"orders": {"epoch": 1, "seq": 10}})
    sent: Any = pickle.loads(pickle.dumps(stream))
    rows = pa.Table.from_batches([batch for task in tasks for batch in sent.read(task)]).sort_by("seq").to_pylist()
    assert [row["note"] for row in rows] == [None] * 3 + [f"x{n}" for n in range(3, 9)]


def test_logs_have_no_registered_schemas(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="option payload is 'registered'"):
        TidelogSource({"path": str(tmp_path), "codec": "log", "payload": "registered"}).schema()
