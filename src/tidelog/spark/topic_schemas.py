"""Schemas of topics by seq: which fields the JSON of a topic has from which record on.

They are records of the topic `tidelog.schemas`, with the name of their topic as tag, so they are as durable as records
and in every backup. The entries of one topic and epoch, in their order, have ascending first seqs; each adds fields to
the one before it. Records before the first entry have its schema. `pipelines.schema_registry` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidelog.addresses import Location
from tidelog.client.database import open_location
from tidelog.engine import Gap
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.spark.decode import column_name

FieldStarts: TypeAlias = Mapping[str, Mapping[str, int]]
"""By topic: the first seq of the columns that its first schema does not have."""

SCHEMAS_TOPIC: Final = "tidelog.schemas"
_FIELDS_MAX: Final = 1_000
_TEXT_MAX: Final = 100_000
_TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
}
_FIELD: Final = re.compile(r"\s*(`[^`]+`|[^\s,`]+)\s+(\w+)\s*(?:\(\s*(\d+)\s*,\s*(\d+)\s*\))?\s*(,|$)")


class TopicSchema(NamedTuple):
    """The schema of a topic from a seq on."""

    topic: str
    first_seq: int
    schema: str  # as in 'sku string, price double'


class StoredSchema(msgspec.Struct):
    topic: str
    epoch: int
    first_seq: int
    schema: str


def parse_fields(text: str) -> StructType:
    """Parse fields as in 'sku string, price double', without Spark. Raises BadInput for nested types."""
    found: list[StructField] = []
    at = 0
    while at < len(text) <= _TEXT_MAX and len(found) <= _FIELDS_MAX:
        match = _FIELD.match(text, at)
        if match is None:
            break
        name, kind, precision, scale, _ = match.groups()
        is_decimal = kind.lower() == "decimal" and precision is not None and int(precision) <= 38 >= int(scale)
        if not is_decimal and (kind.lower() not in _TYPES or precision is not None):
            break
        made = DecimalType(int(precision), int(scale)) if is_decimal else _TYPES[kind.lower()]
        found.append(StructField(name.strip("`"), made))
        at = match.end()
    names = [field.name for field in found]
    if at < len(text) or not found or text.rstrip().endswith(",") or len(set(names)) < len(names):
        raise BadInput(
            f"the schema {text[:80]!r} does not read from {text[at : at + 40]!r} on; nothing was written, write it as "
            f"in 'sku string, price double', with different names and the types {', '.join(_TYPES)} or decimal(p,s)"
        )
    return StructType(found)


def read_history(location: Location, topic: str) -> list[TopicSchema]:
    """Return the schemas of a topic, oldest first."""
    _check_place(location)
    with open_location(location, read_only=True) as log:
        epoch = log.topic(topic, create=False).state().epoch
        try:
            records = log.topic(SCHEMAS_TOPIC, create=False)
            found = [record.data for record in records if not isinstance(record, Gap)]
        except TopicNotFound:
            return []
    stored = [msgspec.convert(data, StoredSchema) for data in found]
    return [
        TopicSchema(each.topic, each.first_seq, each.schema)
        for each in stored
        if (each.topic, each.epoch) == (topic, epoch)
    ]


def schema_at(history: Sequence[TopicSchema], seq: int, topic: str) -> tuple[StructType, int | None]:
    """Return the fields of a record, and the first seq of the next schema, if there is one."""
    if not history:
        raise NotFound(
            f"topic {topic} has no registered schema; nothing was written, register one (tidelog schema set) or give "
            "the schema"
        )
    at = max((number for number, each in enumerate(history) if each.first_seq <= seq), default=0)
    later = [each.first_seq for each in history[at + 1 :] if each.first_seq > seq]
    return parse_fields(history[at].schema), min(later, default=None)


def registered_fields(location: Location, topics: Sequence[str]) -> tuple[StructType, FieldStarts]:
    """Return the columns of all fields that topics have registered, and from which seq on they apply."""
    made: dict[str, StructField] = {}
    starts: dict[str, dict[str, int]] = {}
    for topic in topics:
        history = read_history(location, topic)
        schema_at(history, 0, topic)  # there is one
        of_topic = starts.setdefault(topic, {})
        for number, entry in enumerate(history):
            for field in parse_fields(entry.schema).fields:
                name = column_name(field.name)
                known = made.setdefault(name, StructField(name, field.dataType))
                if known.dataType != field.dataType:
                    raise BadInput(
                        f"the registered schemas of {', '.join(topics)} have {field.name!r} with two types, "
                        f"{known.dataType.simpleString()} and {field.dataType.simpleString()}; nothing was read, read "
                        "these topics on their own"
                    )
                of_topic.setdefault(name, entry.first_seq if number else 0)
    later = {topic: {name: seq for name, seq in each.items() if seq} for topic, each in starts.items()}
    return StructType(list(made.values())), {topic: each for topic, each in later.items() if each}


def _check_place(location: Location) -> None:
    if location.is_object_store:
        raise BadInput(
            f"{location.address} is an object store; nothing was done, name the server or the directory of the topic"
        )
