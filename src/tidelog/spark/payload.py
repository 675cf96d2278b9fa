"""[hot] JSON data → typed columns. A batch that fits its schema is parsed in C++; one that does not, record by record.

    fits                 every field has its type                                     pyarrow's reader
    does not fit         the field is null and goes into `_rescued`, as JSON,         one record after the other
                         with fields that the schema does not name
    not an object        all fields are null, `_rescued` is the text as it is

Without `_rescued` in the schema a value that does not fit fails the query and says which one it was; fields that the
schema does not name are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidelog.errors import BadInput
from tidelog.spark.decode import Cells
from tidelog.spark.schema import RESCUED, column_of, key_of

_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_SHOWN_MAX: Final = 80


class Misfit(Exception):
    """A value that is not of its type."""


def typed(
    data: pa.Array, seqs: pa.Array, topic: str, fields: Sequence[StructField], schema: pa.Schema, *, rescue: bool
) -> Cells:
    """The fields as columns of the types that `schema` gives them, and `_rescued` where it is asked for."""
    found = _at_once(data, fields, schema, rescue=rescue)
    return found if found is not None else _one_by_one(data, seqs, topic, fields, schema, rescue=rescue)


def _at_once(data: pa.Array, fields: Sequence[StructField], schema: pa.Schema, *, rescue: bool) -> Cells | None:
    """All records by one call; None where one of them needs a closer look."""
    if not len(data) or data.null_count:
        return None
    # One line, one object: only then are rows and records the same.
    lines = pc.and_(pc.starts_with(data, b"{"), pc.ends_with(data, b"}"))
    if not pc.all(lines).as_py() or pc.any(pc.match_substring(data, b"\n")).as_py():
        return None
    joined = pc.binary_join_element_wise(data, pa.scalar(b"", data.type), pa.scalar(b"\n", data.type))
    text = pa.concat_arrays([joined]).buffers()[2]
    wanted = pa.schema([pa.field(key_of(field.name), schema.field(field.name).type) for field in fields])
    try:
        table = pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(len(text) + 1, 1 << 20)),
            parse_options=pj.ParseOptions(
                explicit_schema=wanted, unexpected_field_behavior="error" if rescue else "ignore"
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError):
        return None
    if table.num_rows != len(data):
        return None
    made: Cells = {}
    for field in fields:
        column = table.column(key_of(field.name))
        made[field.name] = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if rescue:
        made[RESCUED] = pa.nulls(len(data), pa.string())
    return made


def _one_by_one(
    data: pa.Array, seqs: pa.Array, topic: str, fields: Sequence[StructField], schema: pa.Schema, *, rescue: bool
) -> Cells:
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    rescued: list[str | None] = []
    for seq, value in zip(seqs.to_pylist(), data.to_pylist(), strict=True):
        found = _object(value)
        left: dict[str, Any] = dict(found or {})
        misfits: dict[str, Any] = {}
        for field in fields:
            key = key_of(field.name)
            given = left.pop(key, None)
            try:
                columns[field.name].append(_fit(given, field.dataType))
            except Misfit:
                if not rescue:
                    raise _unfit(topic, seq, key, given, field.dataType) from None
                misfits[key] = given
                columns[field.name].append(None)
        if found is None:
            if not rescue:
                raise _unfit(topic, seq, "", value, None)
            rescued.append(value.decode("utf-8", "replace"))
        else:
            left.update(misfits)
            rescued.append(msgspec.json.encode(left).decode() if left else None)
    made = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    return {**made, RESCUED: pa.array(rescued, pa.string())} if rescue else made


def _unfit(topic: str, seq: int, key: str, value: object, kind: DataType | None) -> BadInput:
    shown = repr(value)[:_SHOWN_MAX]
    what = (
        f"data is {shown}, which is not a JSON object"
        if kind is None
        else f"field {key!r} is {shown}, the schema says {kind.simpleString()}"
    )
    return BadInput(
        f"{topic}: in seq {seq} {what}; nothing was written, mend the schema, or add `_rescued string` to it to keep "
        "what does not fit"
    )


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _fit(value: Any, kind: DataType) -> Any:
    """A JSON value as its type has it, or Misfit."""
    if value is None:
        return None
    match kind:
        case StringType() if isinstance(value, str):
            return value
        case BooleanType() if isinstance(value, bool):
            return value
        case DecimalType() if isinstance(value, int | float | str) and not isinstance(value, bool):
            return _decimal(value, kind)
        case IntegralType() if type(value) is int:
            limit = 1 << (_BITS[kind.simpleString()] - 1)
            if -limit <= value < limit:
                return value
        case FractionalType() if type(value) in (int, float):
            return float(value)
        case DateType() | TimestampType() if isinstance(value, str):
            return _moment(value, kind)
        case StructType() if isinstance(value, dict):
            if set(value) <= set(kind.names):
                return {field.name: _fit(value.get(field.name), field.dataType) for field in kind.fields}
        case ArrayType() if isinstance(value, list):
            return [_fit(each, kind.elementType) for each in value]
        case MapType() if isinstance(value, dict):
            return [(key, _fit(each, kind.valueType)) for key, each in value.items()]
        case _:
            pass
    raise Misfit


def _decimal(value: float | str, kind: DecimalType) -> Decimal:
    try:
        found = Decimal(str(value))
        whole = found.quantize(Decimal(1).scaleb(-kind.scale))
    except InvalidOperation:
        raise Misfit from None
    if found != whole or len(whole.as_tuple().digits) > kind.precision:
        raise Misfit
    return whole


def _moment(value: str, kind: DataType) -> date | datetime:
    try:
        if isinstance(kind, DateType):
            return date.fromisoformat(value)
        found = datetime.fromisoformat(value)
    except ValueError:
        raise Misfit from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


# ── which fields there are ────────────────────────────────────────────────────────────────────────


def inferred(samples: Iterable[bytes]) -> StructType:
    """The fields of some records: of those with two types the wider one, and text where nothing is."""
    found: DataType | None = None
    for sample in samples:
        value = _object(sample)
        if value is not None:
            found = _wider(found, _type(value))
    if not isinstance(found, StructType) or not found.fields:
        raise BadInput(
            "option payload is 'infer' and no record that was looked at is a JSON object with fields; nothing was "
            "read, give a schema, or payload=json to get data as text"
        )
    taken: set[str] = set()
    made = []
    for field in found.fields:
        if field.name.lower() in taken or not field.name:
            continue  # Spark does not tell A from a: the second goes into `_rescued`
        taken.add(field.name.lower())
        made.append(StructField(column_of(field.name), field.dataType))
    return StructType(made)


def _type(value: object) -> DataType | None:
    match value:
        case None:
            return None
        case bool():
            return BooleanType()
        case int():
            return LongType() if -(1 << 63) <= value < 1 << 63 else DoubleType()
        case float():
            return DoubleType()
        case dict():
            return StructType([StructField(key, _type(each) or StringType()) for key, each in value.items()])
        case list():
            inner: DataType | None = None
            for each in value:
                inner = _wider(inner, _type(each))
            return ArrayType(inner or StringType())
        case _:
            return StringType()


def _wider(one: DataType | None, other: DataType | None) -> DataType | None:
    if one is None or other is None or one == other:
        return one if other is None else other
    if isinstance(one, StructType) and isinstance(other, StructType):
        fields = {field.name: field.dataType for field in one.fields}
        for field in other.fields:
            fields[field.name] = _wider(fields.get(field.name), field.dataType) or StringType()
        return StructType([StructField(key, kind) for key, kind in fields.items()])
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        return ArrayType(_wider(one.elementType, other.elementType) or StringType())
    if {type(one), type(other)} == {LongType, DoubleType}:
        return DoubleType()
    return StringType()
