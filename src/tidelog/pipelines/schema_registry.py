"""Schemas of topics by seq: which fields the JSON of a topic has from which record on.

They are records of the topic `tidelog.schemas`, with the name of their topic as tag, so they are as durable as records
and in every backup. The entries of one topic and epoch, in their order, have ascending first seqs; each adds fields to
the one before it. Records before the first entry have its schema.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

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
from tidelog.pipelines import record_mapping

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


class _StoredSchema(msgspec.Struct):
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
    stored = [msgspec.convert(data, _StoredSchema) for data in found]
    return [
        TopicSchema(each.topic, each.first_seq, each.schema)
        for each in stored
        if (each.topic, each.epoch) == (topic, epoch)
    ]


def set_schema(location: Location, topic: str, schema: str, first_seq: int | None = None) -> TopicSchema:
    """Register a schema from a seq on, by default from the next record. Raises BadInput where it narrows."""
    fields = parse_fields(schema)
    known = read_history(location, topic)
    with open_location(location) as log:
        state = log.topic(topic, create=False).state()
        first = state.head_seq + 1 if first_seq is None else first_seq
        if known:
            before = known[-1]
            if first < before.first_seq:
                raise BadInput(
                    f"{topic} has a schema from seq {before.first_seq} on, and this one would begin at {first}; "
                    "nothing was written, give a later seq"
                )
            old, new = (record_mapping.new_mapping(each) for each in (parse_fields(before.schema), fields))
            record_mapping.evolve(old, new, f"that of topic {topic}")
        else:
            record_mapping.new_mapping(fields)  # names that are taken
        entry = _StoredSchema(topic, state.epoch, first, schema)
        log.topic(SCHEMAS_TOPIC, durability="fsync").append(msgspec.to_builtins(entry), tag=topic)
    return TopicSchema(topic, first, schema)


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


def _check_place(location: Location) -> None:
    if location.is_object_store:
        raise BadInput(
            f"{location.address} is an object store; nothing was done, name the server or the directory of the topic"
        )
