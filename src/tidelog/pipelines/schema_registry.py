"""Register schemas of topics by seq; `spark.topic_schemas` has how they are kept and read."""

from __future__ import annotations

import msgspec

from tidelog.addresses import Location
from tidelog.client.database import open_location
from tidelog.errors import BadInput
from tidelog.pipelines import record_mapping
from tidelog.spark.topic_schemas import SCHEMAS_TOPIC, StoredSchema, TopicSchema, parse_fields, read_history


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
        entry = StoredSchema(topic, state.epoch, first, schema)
        log.topic(SCHEMAS_TOPIC, durability="fsync").append(msgspec.to_builtins(entry), tag=topic)
    return TopicSchema(topic, first, schema)
