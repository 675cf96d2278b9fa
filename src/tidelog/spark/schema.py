"""The columns of a reader and their Spark types.

    topic string, seq long, ts timestamp, node string, tag string, meta map<string,string>, data binary
    is_json boolean                                   if it is named: whether data was written as JSON or as bytes
    gap struct<first long, last long, cause string>   with onGap=emit; null, except in the row of a gap

With payload=json `data` is text. Columns with other names are fields of a record's JSON; `data_ts` is its field `ts`,
and so on for reserved names. `_rescued` has the values that do not fit.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
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
