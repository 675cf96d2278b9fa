"""JSON into typed columns: what fits, what is rescued, and what fails with its seq."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType
from tests.unit.spark.helpers import SourceEnv, read, source_env

from tidelog.errors import BadInput
from tidelog.spark import decode

ALL = "seq long, name string, n int, big long, price double, ok boolean, at timestamp, day date, cost decimal(8,2)"
NESTED = "who struct<first: string, age: long>, list array<long>, any map<string,double>"


def ddl(text: str) -> StructType:
    from pyspark.sql.types import (
        ArrayType,
        BooleanType,
        DataType,
        DateType,
        DecimalType,
        DoubleType,
        IntegerType,
        LongType,
        MapType,
        StringType,
        StructField,
        TimestampType,
    )

    plain: dict[str, DataType] = {
        "string": StringType(),
        "int": IntegerType(),
        "long": LongType(),
        "double": DoubleType(),
        "boolean": BooleanType(),
        "timestamp": TimestampType(),
        "date": DateType(),
        "decimal(8,2)": DecimalType(8, 2),
        "struct<first: string, age: long>": StructType(
            [StructField("first", StringType()), StructField("age", LongType())]
        ),
        "array<long>": ArrayType(LongType()),
        "map<string,double>": MapType(StringType(), DoubleType()),
    }
    fields, rest = [], text
    while rest:
        name, _, rest = rest.strip().partition(" ")
        kind = next(kind for kind in sorted(plain, key=len, reverse=True) if rest.startswith(kind))
        fields.append(StructField(name, plain[kind]))
        rest = rest.removeprefix(kind).lstrip(", ")
    return StructType(fields)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[SourceEnv]:
    with source_env("path", tmp_path) as made:
        yield made


GOOD: dict[str, Any] = {
    "name": "a",
    "n": 1,
    "big": 1 << 40,
    "price": 1.5,
    "ok": True,
    "at": "2026-01-02T03:04:05Z",
    "day": "2026-01-02",
    "cost": "12.50",
}
FITTED = {
    **GOOD,
    "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "day": date(2026, 1, 2),
    "cost": Decimal("12.50"),
}


@pytest.mark.parametrize("slow", [False, True])
def test_fields_have_their_types_either_way(env: SourceEnv, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """One record after the other gives what all at once gives."""
    if slow:
        monkeypatch.setattr(decode, "_parse_batch", lambda *_, **__: None)
    env.engine.topic("orders").append([GOOD, {}, {"name": None}])
    rows = read(env.options(payload="json"), ddl(ALL)).table.to_pylist()
    assert rows[0] == {"seq": 1, **FITTED}
    assert set(rows[1].values()) == {2, None}
    assert set(rows[2].values()) == {3, None}


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_inside_is_typed_too(env: SourceEnv, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    if slow:
        monkeypatch.setattr(decode, "_parse_batch", lambda *_, **__: None)
    env.engine.topic("orders").append([{"who": {"first": "b", "age": 7}, "list": [1, 2], "any": {"x": 1.5, "y": 2}}])
    row = read(env.options(payload="json"), ddl(NESTED)).table.to_pylist()[0]
    assert row == {"who": {"first": "b", "age": 7}, "list": [1, 2], "any": [("x", 1.5), ("y", 2.0)]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("n", "1"),
        ("n", 1.5),
        ("n", 1 << 40),
        ("n", True),
        ("big", 1 << 70),
        ("price", "much"),
        ("ok", 1),
        ("at", "soon"),
        ("at", 5),
        ("day", "2026-13-01"),
        ("cost", "1.234"),
        ("cost", "12345678.00"),
    ],
)
def test_what_does_not_fit_is_rescued_or_fails_with_its_seq(env: SourceEnv, field: str, value: object) -> None:
    env.engine.topic("orders").append([GOOD, {**GOOD, field: value, "extra": [1]}, GOOD])
    rows = read(env.options(payload="json"), ddl(f"{ALL}, _rescued string")).table.to_pylist()
    assert rows[0] == {"seq": 1, **FITTED, "_rescued": None}
    assert rows[1] == {"seq": 2, **FITTED, field: None, "_rescued": rows[1]["_rescued"]}
    assert json.loads(rows[1]["_rescued"]) == {field: value, "extra": [1]}
    assert rows[2]["_rescued"] is None
    with pytest.raises(BadInput, match=rf"orders: in seq 2 field '{field}' is .*the schema says.*_rescued"):
        read(env.options(payload="json"), ddl(ALL))


def test_unrequested_fields_are_omitted(env: SourceEnv) -> None:
    env.engine.topic("orders").append([{"a": 1, "b": 2}])
    assert read(env.options(payload="json"), ddl("a long")).table.to_pylist() == [{"a": 1}]


@pytest.mark.parametrize(
    "data", [b"", b" ", b"5", b"[1]", b"{", b'{"a":1}{"a":2}', b'{"a":1}\n{"a":2}', b"\xff", b"null"]
)
def test_what_is_no_object_is_kept_as_it_is(env: SourceEnv, data: bytes) -> None:
    env.engine.topic("orders").append([b'{"a":7}', data, b'{"a":8}'])
    rows = read(env.options(payload="json"), ddl("seq long, a long, _rescued string")).table.to_pylist()
    assert rows == [
        {"seq": 1, "a": 7, "_rescued": None},
        {"seq": 2, "a": None, "_rescued": data.decode("utf-8", "replace")},
        {"seq": 3, "a": 8, "_rescued": None},
    ]
    with pytest.raises(BadInput, match=r"in seq 2 data is .* which is not a JSON object"):
        read(env.options(payload="json"), ddl("a long"))


def test_names_that_are_taken_get_a_prefix(env: SourceEnv) -> None:
    env.engine.topic("orders").append([{"ts": 5, "topic": "x", "a": 1}])
    row = read(env.options(payload="infer")).table.to_pylist()[0]
    assert (row["data_ts"], row["data_topic"], row["a"], row["topic"], row["seq"]) == (5, "x", 1, "orders", 1)
    assert read(env.options(payload="json"), ddl("data_ts long")).table.to_pylist() == [{"data_ts": 5}]


def test_fields_are_found_at_both_ends_of_a_topic(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    topic.append([{"a": 1}, {"a": 2.5, "b": {"c": "x"}}])
    topic.append([{"z": 1}] * 5000)
    topic.append([{"d": [1, None], "b": {"e": True}, "A": "case"}, {"b": "text"}])
    found = read(env.options(payload="infer"))
    kinds = {field.name: str(field.type) for field in found.table.schema}
    assert kinds["a"] == "double"
    assert kinds["b"] == "string", "an object here and a text there"
    assert kinds["d"] == "list<element: int64>"
    assert "A" not in kinds
    last = found.table.to_pylist()[-2]
    assert json.loads(last["_rescued"]) == {"b": {"e": True}, "A": "case"}


def test_text_is_text_and_says_which_record_is_none(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    topic.append([{"ä": 1}])
    assert read(env.options(payload="json", columns="data")).table.to_pylist() == [{"data": '{"ä":1}'}]
    topic.append([b"ok", b"\xff\xfe"])
    with pytest.raises(BadInput, match="the data of seq 3 is not text"):
        read(env.options(payload="json"))


def test_nothing_to_infer_from_is_said(env: SourceEnv) -> None:
    env.engine.topic("orders").append([b"x", b"5"])
    with pytest.raises(BadInput, match="no record that was looked at is a JSON object"):
        read(env.options(payload="infer"))


@pytest.mark.parametrize(
    ("schema", "options", "why"),
    [
        ("seq string", {}, "seq as string, it is bigint"),
        ("data string", {}, "data as string, it is binary"),
        ("amount double", {}, "'amount', which no record has.*payload=json"),
        ("seq long, _rescued string", {"payload": "json"}, "no field that something could not fit"),
        ("seq long, seq long", {}, "twice"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(env: SourceEnv, schema: str, options: dict[str, str], why: str) -> None:
    env.engine.topic("orders").append([b"x"])
    with pytest.raises(BadInput, match=why):
        read(env.options(**options), ddl(schema))


def test_a_schema_prunes_columns(env: SourceEnv) -> None:
    env.engine.topic("orders").append([b"x"])
    assert read(env.options(), ddl("seq long")).table.to_pylist() == [{"seq": 1}]
