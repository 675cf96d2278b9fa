"""Decode records to the requested columns, as Arrow, without an object per record.

    rows of a file        contiguous columns are not copied; others are copied in C++
    batches of a stream   unchanged

Columns that are not requested are not decoded. `meta` is parsed once per distinct value.

JSON data becomes typed columns. A batch that fits its schema is parsed in C++, any other record by record.

    fits                 every field has its type                                     pyarrow's reader
    does not fit         the field is null and is in `_rescued`, as JSON,             record by record
                         with fields that the schema does not name
    not an object        all fields are null, `_rescued` is the text

Without `_rescued` in the schema a value that does not fit raises BadInput that names it; fields that the schema does
not name are dropped.

The columns of a reader and their Spark types.

    topic string, seq long, ts timestamp, node string, tag string, meta map<string,string>, data binary
    is_json boolean                                   if it is named: whether data was written as JSON or as bytes
    gap struct<first long, last long, cause string>   with onGap=emit; null, except in the row of a gap

With payload=json `data` is text. Columns with other names are fields of a record's JSON; `data_ts` is its field `ts`,
and so on for reserved names. `_rescued` has the values that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
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
from tidelog.formats import segment_index
from tidelog.formats.rows import Rows, Span, to_binary_array
from tidelog.spark.backends.interface import BoolArray, ColumnSet
from tidelog.spark.options import COLUMNS, GAP, IS_JSON, Options

RESCUED: Final = "_rescued"
_COLUMN_TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "seq": LongType(),
    "ts": TimestampType(),
    "node": StringType(),
    "tag": StringType(),
    "meta": MapType(StringType(), StringType()),
    "data": BinaryType(),
    IS_JSON: BooleanType(),
    GAP: StructType(
        [StructField("first", LongType()), StructField("last", LongType()), StructField("cause", StringType())]
    ),
}
RESERVED_COLUMNS: Final = (*_COLUMN_TYPES, RESCUED)

_SCALAR_TYPES: Final = (BooleanType, DateType, DecimalType, FractionalType, IntegralType, StringType, TimestampType)


def column_type(column: str, options: Options) -> DataType:
    return StringType() if column == "data" and options.payload != "bytes" else _COLUMN_TYPES[column]


def default_schema(options: Options, fields: StructType | None = None) -> StructType:
    """Return the columns of a reader without a given schema. `fields`: the inferred fields of JSON records."""
    own = [column for column in COLUMNS if column != "data" or fields is None]
    made = [StructField(column, column_type(column, options)) for column in own]
    if fields is not None:
        made += [*fields.fields, StructField(RESCUED, StringType())]
    if options.emits_gaps:
        made.append(StructField(GAP, _COLUMN_TYPES[GAP]))
    if options.columns is None:
        return StructType(made)
    known = {field.name: field for field in (*made, StructField(IS_JSON, _COLUMN_TYPES[IS_JSON]))}
    for column in options.columns:
        if column not in known:
            raise BadInput(f"option columns: there is no column {column!r}; nothing was read, there are {list(known)}")
    return StructType([known[column] for column in options.columns])


def validate_schema(schema: StructType, options: Options) -> StructType:
    """Return a given schema. Raises BadInput if a column or a type does not fit."""
    if not schema.fields:
        raise BadInput("the schema has no columns; nothing was read, leave it out to get all of them")
    names = [field.name for field in schema.fields]
    for column in schema.fields:
        if column.name in RESERVED_COLUMNS:
            wanted = StringType() if column.name == RESCUED else column_type(column.name, options)
            if column.dataType.simpleString() != wanted.simpleString():
                raise BadInput(
                    f"the schema has {column.name} as {column.dataType.simpleString()}, it is "
                    f"{wanted.simpleString()}; nothing was read, fix the schema or leave it out"
                )
        elif not _is_json_type(column.dataType):
            raise BadInput(
                f"the schema has {column.name} as {column.dataType.simpleString()}, which no JSON value can be; "
                "nothing was read, fix the schema"
            )
        elif options.payload == "bytes":
            raise BadInput(
                f"the schema has a column {column.name!r}, which no record has; nothing was read. Columns are "
                f"{', '.join((*COLUMNS, IS_JSON))}; fields of a record's JSON need payload=json"
            )
    if GAP in names and not options.emits_gaps:
        raise BadInput("the schema has a column gap; nothing was read, gaps are rows with onGap=emit only")
    if RESCUED in names and not json_fields(schema):
        raise BadInput("the schema has _rescued and no field that something could not fit; nothing was read")
    if len(set(names)) < len(names):
        raise BadInput(f"the schema names a column twice: {names}; nothing was read")
    return schema


def _is_json_type(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_is_json_type(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _is_json_type(kind.elementType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and _is_json_type(kind.valueType)
    return isinstance(kind, _SCALAR_TYPES)


def json_fields(schema: StructType) -> list[StructField]:
    """Return the columns that are fields of a record's JSON."""
    return [field for field in schema.fields if field.name not in RESERVED_COLUMNS]


def json_key(column: str) -> str:
    """Return the JSON field of a column."""
    rest = column.removeprefix("data_")
    return rest if column.startswith("data_") and rest in RESERVED_COLUMNS else column


def column_name(key: str) -> str:
    return f"data_{key}" if key in RESERVED_COLUMNS else key


_TIMESTAMP = pa.timestamp("us", tz="UTC")
_TEXT = pa.string()
META_TYPE = pa.map_(pa.string(), pa.string())
ColumnArrays = dict[str, pa.Array]


def decode_columns(
    records: Rows | pa.RecordBatch, columns: ColumnSet, *, has_timestamps: bool = True, has_json_flag: bool = True
) -> ColumnArrays:
    """Return the requested columns of records, `data` as bytes."""
    made = (
        _columns_from_rows(records, columns, has_json_flag=has_json_flag)
        if isinstance(records, Rows)
        else _columns_from_batch(records, columns)
    )
    if "ts" in made and not has_timestamps:
        made["ts"] = pa.nulls(len(made["ts"]), _TIMESTAMP)
    if "meta" in made:
        made["meta"] = meta_to_map(made["meta"])
    return made


def _columns_from_rows(rows: Rows, wanted_columns: ColumnSet, *, has_json_flag: bool) -> ColumnArrays:
    columns: dict[str, Callable[[], pa.Array]] = {
        "seq": lambda: pa.array(rows.seq),
        "ts": lambda: pa.Array.from_buffers(
            _TIMESTAMP, len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows.ts_us))]
        ),
        "node": lambda: _nullable_column(rows, rows.node).cast(_TEXT),
        "tag": lambda: _nullable_column(rows, rows.tag).cast(_TEXT),
        "meta": lambda: _nullable_column(rows, rows.meta),
        "data": lambda: to_binary_array(rows.buf, rows.data),
        IS_JSON: lambda: pa.array(_json_flags(rows) if has_json_flag else np.zeros(len(rows), bool)),
    }
    return {name: make() for name, make in columns.items() if name in wanted_columns}


def _json_flags(rows: Rows) -> BoolArray:
    """Return which records are JSON, from their frames, so that holes and deletions cannot shift the flags."""
    found: BoolArray = (segment_index.record_flags(rows) & segment_index.JSON) != 0
    return found


def _nullable_column(rows: Rows, span: Span | None) -> pa.Array:
    """Return a column in which empty values are null."""
    if span is None:
        return pa.nulls(len(rows), pa.binary())
    made, there = to_binary_array(rows.buf, span), span.size > 0
    return made if there.all() else pc.if_else(pa.array(there), made, pa.scalar(None, pa.binary()))


def _columns_from_batch(batch: pa.RecordBatch, columns: ColumnSet) -> ColumnArrays:
    made: ColumnArrays = {name: batch.column(name) for name in ("seq", "ts", "data") if name in columns}
    if IS_JSON in columns:
        made[IS_JSON] = batch.column("json")
    for name in ("node", "tag", "meta"):
        if name in columns:
            column = batch.column(name)
            filled = pc.if_else(pc.equal(pc.binary_length(column), 0), pa.scalar(None, column.type), column)
            made[name] = filled if name == "meta" else filled.cast(_TEXT)
    return made


def meta_to_map(column: pa.Array) -> pa.Array:
    """Convert JSON objects to maps of texts: a text unchanged, any other value as JSON."""
    if column.null_count == len(column):
        return pa.nulls(len(column), META_TYPE)
    encoded = column.dictionary_encode()
    starts, keys, values = [0], list[str](), list[str | None]()
    for each in encoded.dictionary.to_pylist():
        for key, value in _meta_pairs(each):
            keys.append(key)
            values.append(value)
        starts.append(len(keys))
    known = pa.MapArray.from_arrays(pa.array(starts, pa.int32()), pa.array(keys, _TEXT), pa.array(values, _TEXT))
    return known.take(encoded.indices)


def _meta_pairs(text: bytes) -> list[tuple[str, str | None]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [("", text.decode("utf-8", "replace"))]  # headers of a log that are not JSON
    return [(key, _meta_value(value)) for key, value in found.items()]


def _meta_value(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def data_as_text(data: pa.Array, seqs: pa.Array, topic: str) -> pa.Array:
    """Return `data` as text. Raises BadInput that names a record which is not text."""
    try:
        return data.cast(_TEXT)
    except pa.ArrowInvalid:
        for seq, value in zip(seqs.to_pylist(), data.to_pylist(), strict=True):
            try:
                value.decode()
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{topic}: the data of seq {seq} is not text ({error.reason}); nothing was written, read it with "
                    "payload=bytes"
                ) from None
        raise


def gap_row(first: int, last: int | None, cause: str, topic: str, schema: pa.Schema) -> pa.RecordBatch:
    """Return the row of a gap."""
    values: Mapping[str, object] = {
        "topic": topic,
        "seq": first,
        "gap": {"first": first, "last": last, "cause": cause},
    }
    return pa.RecordBatch.from_arrays(
        [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
    )


_INTEGER_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_MESSAGE_VALUE_CHARS: Final = 80


class TypeMismatch(Exception):
    """A value that does not have the type of its field."""


def parse_json_columns(
    data: pa.Array, seqs: pa.Array, topic: str, fields: Sequence[StructField], schema: pa.Schema, *, rescue: bool
) -> ColumnArrays:
    """Parse fields into columns with the types of `schema`, and with `rescue` the column `_rescued`."""
    found = _parse_batch(data, fields, schema, rescue=rescue)
    return found if found is not None else _parse_records(data, seqs, topic, fields, schema, rescue=rescue)


def _parse_batch(
    data: pa.Array, fields: Sequence[StructField], schema: pa.Schema, *, rescue: bool
) -> ColumnArrays | None:
    """Parse all records in one call; return None if one of them must be parsed by itself."""
    if not len(data) or data.null_count:
        return None
    # One object per line: only then are rows and records the same.
    lines = pc.and_(pc.starts_with(data, b"{"), pc.ends_with(data, b"}"))
    if not pc.all(lines).as_py() or pc.any(pc.match_substring(data, b"\n")).as_py():
        return None
    joined = pc.binary_join_element_wise(data, pa.scalar(b"", data.type), pa.scalar(b"\n", data.type))
    text = pa.concat_arrays([joined]).buffers()[2]
    wanted = pa.schema([pa.field(json_key(field.name), schema.field(field.name).type) for field in fields])
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
    made: ColumnArrays = {}
    for field in fields:
        column = table.column(json_key(field.name))
        made[field.name] = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if rescue:
        made[RESCUED] = pa.nulls(len(data), pa.string())
    return made


def _parse_records(
    data: pa.Array, seqs: pa.Array, topic: str, fields: Sequence[StructField], schema: pa.Schema, *, rescue: bool
) -> ColumnArrays:
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    rescued: list[str | None] = []
    for seq, value in zip(seqs.to_pylist(), data.to_pylist(), strict=True):
        found = _parse_object(value)
        left: dict[str, Any] = dict(found or {})
        misfits: dict[str, Any] = {}
        for field in fields:
            key = json_key(field.name)
            given = left.pop(key, None)
            try:
                columns[field.name].append(_convert(given, field.dataType))
            except TypeMismatch:
                if not rescue:
                    raise _mismatch_error(topic, seq, key, given, field.dataType) from None
                misfits[key] = given
                columns[field.name].append(None)
        if found is None:
            if not rescue:
                raise _mismatch_error(topic, seq, "", value, None)
            rescued.append(value.decode("utf-8", "replace"))
        else:
            left.update(misfits)
            rescued.append(msgspec.json.encode(left).decode() if left else None)
    made = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    return {**made, RESCUED: pa.array(rescued, pa.string())} if rescue else made


def _mismatch_error(topic: str, seq: int, key: str, value: object, kind: DataType | None) -> BadInput:
    shown = repr(value)[:_MESSAGE_VALUE_CHARS]
    what = (
        f"data is {shown}, which is not a JSON object"
        if kind is None
        else f"field {key!r} is {shown}, the schema says {kind.simpleString()}"
    )
    return BadInput(
        f"{topic}: in seq {seq} {what}; nothing was written, fix the schema, or add `_rescued string` to it to keep "
        "what does not fit"
    )


def _parse_object(value: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _convert(value: Any, kind: DataType) -> Any:
    """Convert a JSON value to a type. Raises TypeMismatch."""
    if value is None:
        return None
    match kind:
        case StringType() if isinstance(value, str):
            return value
        case BooleanType() if isinstance(value, bool):
            return value
        case DecimalType() if isinstance(value, int | float | str) and not isinstance(value, bool):
            return _to_decimal(value, kind)
        case IntegralType() if type(value) is int:
            limit = 1 << (_INTEGER_BITS[kind.simpleString()] - 1)
            if -limit <= value < limit:
                return value
        case FractionalType() if type(value) in (int, float):
            return float(value)
        case DateType() | TimestampType() if isinstance(value, str):
            return _to_datetime(value, kind)
        case StructType() if isinstance(value, dict):
            if set(value) <= set(kind.names):
                return {field.name: _convert(value.get(field.name), field.dataType) for field in kind.fields}
        case ArrayType() if isinstance(value, list):
            return [_convert(each, kind.elementType) for each in value]
        case MapType() if isinstance(value, dict):
            return [(key, _convert(each, kind.valueType)) for key, each in value.items()]
        case _:
            pass
    raise TypeMismatch


def _to_decimal(value: float | str, kind: DecimalType) -> Decimal:
    try:
        found = Decimal(str(value))
        whole = found.quantize(Decimal(1).scaleb(-kind.scale))
    except InvalidOperation:
        raise TypeMismatch from None
    if found != whole or len(whole.as_tuple().digits) > kind.precision:
        raise TypeMismatch
    return whole


def _to_datetime(value: str, kind: DataType) -> date | datetime:
    try:
        if isinstance(kind, DateType):
            return date.fromisoformat(value)
        found = datetime.fromisoformat(value)
    except ValueError:
        raise TypeMismatch from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


# ── inference of fields ───────────────────────────────────────────────────────────────────────────


def infer_fields(samples: Iterable[bytes]) -> StructType:
    """Infer the fields of records: the wider of two types, and text for null."""
    found: DataType | None = None
    for sample in samples:
        value = _parse_object(sample)
        if value is not None:
            found = _widen_types(found, _infer_type(value))
    if not isinstance(found, StructType) or not found.fields:
        raise BadInput(
            "option payload is 'infer' and no record that was looked at is a JSON object with fields; nothing was "
            "read, give a schema, or payload=json to get data as text"
        )
    taken: set[str] = set()
    made = []
    for field in found.fields:
        if field.name.lower() in taken or not field.name:
            continue  # Spark ignores case: the second of two such fields is in `_rescued`
        taken.add(field.name.lower())
        made.append(StructField(column_name(field.name), field.dataType))
    return StructType(made)


def _infer_type(value: object) -> DataType | None:
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
            return StructType([StructField(key, _infer_type(each) or StringType()) for key, each in value.items()])
        case list():
            inner: DataType | None = None
            for each in value:
                inner = _widen_types(inner, _infer_type(each))
            return ArrayType(inner or StringType())
        case _:
            return StringType()


def _widen_types(one: DataType | None, other: DataType | None) -> DataType | None:
    if one is None or other is None or one == other:
        return one if other is None else other
    if isinstance(one, StructType) and isinstance(other, StructType):
        fields = {field.name: field.dataType for field in one.fields}
        for field in other.fields:
            fields[field.name] = _widen_types(fields.get(field.name), field.dataType) or StringType()
        return StructType([StructField(key, kind) for key, kind in fields.items()])
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        return ArrayType(_widen_types(one.elementType, other.elementType) or StringType())
    if {type(one), type(other)} == {LongType, DoubleType}:
        return DoubleType()
    return StringType()
