"""The shapes of bodies and answers, as JSON Schema.

What clients send is taken from the very types that decode it, so that it cannot drift; what they are sent is written
down here. `"name?"` is a field that may be absent.

What the OpenAPI document is put together from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import msgspec

from tidelog import api_types
from tidelog.engine import EngineConfig, TopicConfig
from tidelog.engine.config import ADDED, CLAIM_JITTER_MS_MAX, KEYS, LEASE_MS_MAX, LEASE_MS_MIN, Durability
from tidelog.engine.queues.jobs import PRIORITY_MAX
from tidelog.engine.results import Counts
from tidelog.engine.watermarks import Gap
from tidelog.server.errors import STATUS_BY_CODE
from tidelog.server.handlers import records, topics
from tidelog.server.handlers.sse import HEARTBEAT_MS_MAX, WATCH_TOPICS_MAX
from tidelog.server.push.watch_sessions import TTL_MS

Schema: TypeAlias = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
NUMBER: Final[Schema] = {"type": "number"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
TIMESTAMP: Final[Schema] = {"type": "integer", "description": "Milliseconds since the epoch."}
TOPIC_NAME: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"}
ROUTER_NAME: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"}
IDEMPOTENCY_KEY: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 256}
_ENGINE_LIMITS: Final = EngineConfig()
_DELAY_MS: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 1 << 47}


def object_schema(fields: Mapping[str, Schema], text: str = "") -> Schema:
    """An object; clients ignore fields that they do not know."""
    made: Schema = {
        "type": "object",
        "properties": {name.removesuffix("?"): schema for name, schema in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
    }
    return {"description": text, **made} if text else made


def schema_ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array_of(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def integer_schema(description: str, default: int, minimum: int = 0, maximum: int | None = None) -> Schema:
    """A whole number; what is over `most` counts as that."""
    made: Schema = {"type": "integer", "minimum": minimum, "default": default, "description": description}
    return made if maximum is None else {**made, "maximum": maximum}


def _request_schemas() -> dict[str, Schema]:
    """What clients send, from the types that decode it."""
    types = (
        api_types.Write,
        api_types.Diff,
        api_types.Delete,
        api_types.Watch,
        api_types.Seek,
        api_types.Router,
        TopicConfig,
    )
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    record = made.pop("Record")["properties"]
    made["RecordToWrite"] = {
        "type": "object",
        "properties": {
            "data": {"description": f"Any JSON, at most {_ENGINE_LIMITS.record_bytes_max} bytes together with meta."},
            "tag": {**record["tag"], "description": f"To delete by; at most {_ENGINE_LIMITS.tag_bytes_max} bytes."},
            "node": {
                **record["node"],
                "description": f"Where it comes from; at most {_ENGINE_LIMITS.node_bytes_max} bytes.",
            },
            "meta": {
                **nullable({"type": "object"}),
                "default": None,
                "description": f"At most {_ENGINE_LIMITS.meta_keys_max} keys and {_ENGINE_LIMITS.meta_bytes_max} "
                "bytes.",
            },
            "$encoding": {**nullable({"enum": ["base64"]}), "description": "`base64`: data is bytes, written as text."},
            "run_at_ms": {**nullable(_DELAY_MS), "description": "A job: not to be claimed before."},
            "delay_ms": {
                **nullable(_DELAY_MS),
                "description": "A job: not to be claimed for so long; not with run_at_ms.",
            },
            "priority": {
                **nullable({"type": "integer", "minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX}),
                "description": "A job: higher goes first.",
            },
        },
        "required": ["data"],
    }
    write = made["Write"]["properties"]
    write["records"] = array_of(schema_ref("RecordToWrite"), minItems=1, maxItems=_ENGINE_LIMITS.batch_records_max)
    write["idempotency_key"] = {**nullable(IDEMPOTENCY_KEY), "description": "A second write with it writes nothing."}
    write["config"] = {
        **nullable(schema_ref("TopicConfig")),
        "description": "For a write that makes its topic; needs admin.",
    }
    asked = made["Diff"]["properties"]
    asked["limit"] = integer_schema(f"0 is {records.READ_LIMIT}.", records.READ_LIMIT, maximum=records.READ_LIMIT_MAX)
    asked["max_batch_bytes"] = integer_schema(
        f"0 is {records.READ_BYTES}.", records.READ_BYTES, maximum=records.READ_BYTES_MAX
    )
    asked["wait_ms"] = integer_schema("Wait so long where there is nothing yet.", 0, maximum=records.WAIT_MS_MAX)
    made["Delete"]["properties"]["match"] = schema_ref("Match")
    made["Delete"]["description"] = "before_seq, match or both."
    made["Delete"]["anyOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("before_seq", "match")
    ]
    watch = made["Watch"]["properties"]
    watch["topics"] |= {"propertyNames": TOPIC_NAME, "minProperties": 1, "maxProperties": WATCH_TOPICS_MAX}
    watch["limit"] = integer_schema(f"0 is {records.READ_LIMIT}.", records.READ_LIMIT, maximum=records.READ_LIMIT_MAX)
    watch["max_batch_bytes"] = integer_schema(f"0 is {records.READ_BYTES}.", 262_144, maximum=records.READ_BYTES_MAX)
    watch["heartbeat_ms"] = integer_schema(
        "Said when nothing else was.", 15_000, minimum=1_000, maximum=HEARTBEAT_MS_MAX
    )
    watch["consistency"] |= {"enum": ["eventual", "strong"]}
    made["Seek"]["properties"]["ts"] = TIMESTAMP
    router = made["RouterToMake"] = made.pop("Router")
    router["properties"] |= {"source": TOPIC_NAME, "dest": TOPIC_NAME, "filter": nullable(schema_ref("Match"))}
    router["properties"]["guarantee"] |= {"enum": ["at_least_once", "exactly_once"]}
    made["TopicConfig"] = _topic_config_schema(made["TopicConfig"]["properties"])
    for schema in made.values():
        schema.pop("title", None)
    return made


def _topic_config_schema(fields: dict[str, Schema]) -> Schema:
    for name, least, most in (
        ("lease_ms", LEASE_MS_MIN, LEASE_MS_MAX),
        ("claim_jitter_ms", 0, CLAIM_JITTER_MS_MAX),
        ("priority", -(1 << 31), (1 << 31) - 1),
    ):
        fields[name] |= {"minimum": least, "maximum": most}
    for name in ("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "max_deliveries"):
        fields[name] |= {"minimum": 0}
    fields["durability"] = {**nullable({"enum": ["ephemeral", "memory", "disk", "fsync"]}), "default": "disk"}
    fields["dead_letter"] = {**nullable(TOPIC_NAME), "default": None}
    fields["durable"] = {"type": "boolean", "default": False, "description": "Without durability: true is fsync."}
    fields["consistency"] |= {"description": "strong: readers are shown what survives a power cut. Told where it is."}
    text = "A PUT replaces all of it: what is not given takes its default. Answers have every field."
    return {"type": "object", "description": text, "properties": {name: fields[name] for name in (*KEYS, *ADDED)}}


_SEQ_FIELDS: Final[dict[str, Schema]] = {"from_seq": COUNT, "head_seq": COUNT, "earliest_seq": COUNT}
_FILE_SCHEMA: Final = object_schema(
    {"bytes": COUNT, "xxh3?": {"type": "string", "pattern": "^[0-9a-f]{16}$"}}, "Of a file; XXH3-64, in hexadecimal."
)
_PERFORMANCE: Final = {"performance": schema_ref("Performance")}
_ROUTER_FIELDS: Final[dict[str, Schema]] = {
    "router": STRING,
    "source": STRING,
    "dest": STRING,
    "preserve_node": BOOLEAN,
    "preserve_tag": BOOLEAN,
    "filter": nullable(array_of(STRING, minItems=3, maxItems=3)),
    "allow_cycle": BOOLEAN,
    "guarantee": STRING,
}
DURABILITY_FIELD: Final[dict[str, Schema]] = {
    "durability": {
        "enum": list(get_args(Durability)),
        "description": "What this ack means: the class of the topic, whatever a config in the write asked for.",
    },
}

_WRITTEN_FIELDS: Final[dict[str, Schema]] = {
    "topic": STRING,
    "first_seq": COUNT,
    "last_seq": COUNT,
    "head_seq": COUNT,
    "count": COUNT,
    "created": BOOLEAN,
}

_TASK_SCHEMA: Final = object_schema(
    {
        **dict.fromkeys(("runs", "failures", "failing"), COUNT),
        **dict.fromkeys(("last_ok_ms", "last_error_ms"), nullable(TIMESTAMP)),
        "last_error": nullable(STRING),
    },
    "One kind of background work; `failing` counts failures since its last success.",
)
_HEALTH_SCHEMA: Final = object_schema(
    {
        "ok": BOOLEAN,
        **dict.fromkeys(("checkpoint_age_ms", "wal_uncovered_bytes", "corruptions"), COUNT),
        "lagging_topics": array_of(STRING),
        "tasks": {"type": "object", "additionalProperties": _TASK_SCHEMA},
    },
    "Background work and stored bytes. Topics in `lagging_topics` could not be written by the last checkpoint; the WAL "
    "has their records.",
)
_READY_HEALTH_SCHEMA: Final = object_schema(
    {
        "ok": BOOLEAN,
        **dict.fromkeys(("checkpoint_age_ms", "lagging_topics", "corruptions"), COUNT),
        "failing": {"type": "object", "additionalProperties": COUNT},
    },
    "The same in short: how many topics lag, and failures in a row by task. Errors are in the metrics.",
)
_RESPONSE_SCHEMAS: Final[dict[str, Schema]] = {
    "Error": object_schema(
        {
            "error": object_schema(
                {"code": {"enum": sorted(STATUS_BY_CODE)}, "message": STRING, "detail?": {"type": "object"}}
            )
        },
        "The message says what happened, whether it was written and what to do next.",
    ),
    "Performance": object_schema(
        {
            "server_total_ms": NUMBER,
            "wal_append_ms?": NUMBER,
            "fsync_ms?": NUMBER,
            "throttle_wait_ms?": NUMBER,
            "records_scanned?": COUNT,
        },
        "What it took; all but server_total_ms only where it says something.",
    ),
    "Record": object_schema(
        {
            "$seq": {"type": "integer", "minimum": 1},
            "$ts": TIMESTAMP,
            "$node?": STRING,
            "$tag?": STRING,
            "data?": {"description": "Absent only where it was asked not to be there."},
            "meta?": {"type": "object"},
            "$encoding?": {"enum": ["base64"]},
        }
    ),
    "Tombstone": object_schema(
        {
            name: {"enum": ["cap", "ttl", "mixed", "recreated", "source_trim"]} if name == "reason" else COUNT
            for name in Gap._fields
        },
        "Records that were lost before they could be read: all seqs from gap_from to gap_to.",
    ),
    "Counts": object_schema(
        dict.fromkeys(Counts._fields, COUNT), "Where every seq of a range went; they add up to it."
    ),
    "Match": {
        "description": 'A tag, `"p*"` for all that begin so, or `["tag","Eq","v"]`, `["tag","Glob","p*"]`.',
        "anyOf": [
            STRING,
            {
                "type": "array",
                "prefixItems": [{"const": "tag"}, {"enum": ["Eq", "Glob"]}, STRING],
                "minItems": 3,
                "maxItems": 3,
            },
            {"type": "null"},
        ],
    },
    "Topic": object_schema(
        {
            "topic": STRING,
            "type": {"enum": ["log", "queue"]},
            "head_seq": COUNT,
            "earliest_seq": COUNT,
            "next_seq": COUNT,
            "count": COUNT,
            "bytes": COUNT,
            "config": schema_ref("TopicConfig"),
            "effective_priority": {"type": "integer"},
            "last_write_ts": nullable(TIMESTAMP),
            "last_read_ts": nullable(TIMESTAMP),
            "queue?": object_schema({"ready": COUNT, "in_flight": COUNT, "dead_lettered": COUNT}),
            **_PERFORMANCE,
        }
    ),
    "TopicCreated": object_schema(
        {"topic": STRING, "created": BOOLEAN, "config": schema_ref("TopicConfig"), **_PERFORMANCE}
    ),
    "TopicDropped": object_schema(
        {"topic": STRING, "deleted": BOOLEAN, "routers_removed": array_of(STRING), **_PERFORMANCE}
    ),
    "TopicList": object_schema(
        {
            "topics": array_of(
                object_schema(
                    {
                        "topic": STRING,
                        "head_seq": COUNT,
                        "earliest_seq": COUNT,
                        "count": COUNT,
                        "bytes": COUNT,
                        "durable": BOOLEAN,
                        "effective_priority": {"type": "integer"},
                    }
                )
            ),
            "next_cursor?": STRING,
            **_PERFORMANCE,
        }
    ),
    "Router": object_schema({**_ROUTER_FIELDS, "forwarded_total": COUNT, **_PERFORMANCE}),
    "RouterMade": object_schema({**_ROUTER_FIELDS, "created": BOOLEAN, **_PERFORMANCE}),
    "RouterDropped": object_schema({"router": STRING, "deleted": BOOLEAN, **_PERFORMANCE}),
    "RouterList": object_schema(
        {
            "routers": array_of(
                object_schema(
                    {"router": STRING, "source": STRING, "dest": STRING, "guarantee": STRING, "forwarded_total": COUNT}
                )
            ),
            "next_cursor?": STRING,
            **_PERFORMANCE,
        }
    ),
    "Written": object_schema(
        {**_WRITTEN_FIELDS, "deduped": BOOLEAN, **DURABILITY_FIELD, "seqs?": array_of(COUNT), **_PERFORMANCE}
    ),
    "BulkWritten": object_schema(
        {
            **_WRITTEN_FIELDS,
            "batches": {**COUNT, "description": "Each was written whole or not at all."},
            "deduped": {**COUNT, "description": "How many of them had been written before, with the same key."},
            **DURABILITY_FIELD,
            **_PERFORMANCE,
        }
    ),
    "Page": object_schema(
        {
            "topic": STRING,
            "records": array_of(schema_ref("Record")),
            "next_from_seq": COUNT,
            "head_seq": COUNT,
            "earliest_seq": COUNT,
            "caught_up": BOOLEAN,
            "tombstone": nullable(schema_ref("Tombstone")),
            "lag": COUNT,
            **_PERFORMANCE,
        }
    ),
    "End": object_schema(
        {
            "$end": object_schema(
                {
                    "next_from_seq": COUNT,
                    "head_seq": COUNT,
                    "earliest_seq": COUNT,
                    "gap": nullable(schema_ref("Tombstone")),
                    "gaps": array_of(schema_ref("Tombstone")),
                    "counts": schema_ref("Counts"),
                }
            )
        },
        "The last line. A stream without it was cut off.",
    ),
    "Deleted": object_schema(
        {
            "topic": STRING,
            "deleted": COUNT,
            "earliest_seq": COUNT,
            "head_seq": COUNT,
            "count": COUNT,
            "bytes": COUNT,
            **_PERFORMANCE,
        }
    ),
    "Sought": object_schema(
        {
            "topic": STRING,
            "ts": TIMESTAMP,
            "seq": {
                **COUNT,
                "description": "The first record of this time or later; head_seq + 1 where there is none.",
            },
            **_SEQ_FIELDS,
            **_PERFORMANCE,
        }
    ),
    "Segments": object_schema(
        {
            "topic": STRING,
            "epoch": {**COUNT, "description": "Another one after the topic was dropped and made again."},
            "generation": {**COUNT, "description": "Of the newest checkpoint."},
            "head_seq": COUNT,
            "earliest_seq": COUNT,
            "evict_floor": COUNT,
            "segments": array_of(schema_ref("Segment")),
            "tail": object_schema({"from_seq": COUNT, "to_seq": COUNT}, "What lies in no file: read it as records."),
            **_PERFORMANCE,
        }
    ),
    "Segment": object_schema(
        {
            "base": {**COUNT, "description": "Its first seq, which names it."},
            "stop": {**COUNT, "description": "One past its last seq."},
            "sealed": BOOLEAN,
            "records": COUNT,
            "live": COUNT,
            "bytes": {**COUNT, "description": "Of data and meta of live records."},
            "first_ts": TIMESTAMP,
            "last_ts": TIMESTAMP,
            "files": object_schema(
                {"data": _FILE_SCHEMA, "idx": _FILE_SCHEMA, "foot?": _FILE_SCHEMA, "del?": _FILE_SCHEMA}
            ),
        }
    ),
    "WatchSession": object_schema(
        {
            "wid": {"type": "string", "pattern": "^wid_[A-Za-z0-9_-]{22}$"},
            "stream_url": STRING,
            "session_ttl_ms": {"const": TTL_MS},
            "topics": {"type": "object", "additionalProperties": object_schema(_SEQ_FIELDS)},
            **_PERFORMANCE,
        }
    ),
    "Health": object_schema({"status": {"const": "ok"}, "version": STRING, "uptime_ms": COUNT}),
    "Ready": object_schema(
        {"status": {"const": "ready"}, "wal_replay_complete": BOOLEAN, "topics": COUNT, "health": _READY_HEALTH_SCHEMA}
    ),
    "Metrics": object_schema(
        {
            **dict.fromkeys(
                (
                    *("topics", "topics_ephemeral", "topics_memory", "topics_disk", "topics_fsync", "routers"),
                    *("records_live", "bytes_live", "queue_topics", "queue_leases_in_flight", "sse_connections"),
                    *("watch_sessions", "channels", "channel_receivers"),
                ),
                COUNT,
            ),
            "ready": BOOLEAN,
            "replay_progress": {"type": "number", "minimum": 0, "maximum": 1},
            "uptime_ms": COUNT,
            "pressure": {"type": "number", "minimum": 0, "maximum": 1},
            "sched_latency_ms": {"type": "number", "minimum": 0},
            **dict.fromkeys(("ready_topics", "deferred_topics", "throttled_total"), COUNT),
            "health": nullable(_HEALTH_SCHEMA),
            "wal": object_schema(
                {
                    **dict.fromkeys(
                        (
                            *(
                                "fsyncs",
                                "frames",
                                "copied_frames",
                                "batches",
                                "bytes_written",
                                "rotations",
                                "queue_depth",
                            ),
                            *("queue_depth_peak", "submit_full_total", "fsync_count", "fsync_micros_total"),
                        ),
                        COUNT,
                    ),
                    "read_only": BOOLEAN,
                }
            ),
        }
    ),
}

SCHEMAS: Final[dict[str, Schema]] = {**_request_schemas(), **_RESPONSE_SCHEMAS}


JSON_MEDIA_TYPE: Final = "application/json"
NDJSON_MEDIA_TYPE: Final = "application/x-ndjson"
ARROW_MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
EVENT_STREAM_MEDIA_TYPE: Final = "text/event-stream"
OCTET_STREAM_MEDIA_TYPE: Final = "application/octet-stream"


_EMPTY: Final[Mapping[Any, Any]] = MappingProxyType({})


class Parameter(NamedTuple):
    name: str
    schema: Schema
    description: str = ""
    location: str = "query"
    required: bool = False


class Operation(NamedTuple):
    method: str
    path: str
    id: str
    summary: str
    scopes: tuple[str, ...] = ()
    params: tuple[Parameter, ...] = ()
    request_body: Mapping[str, Schema] = _EMPTY  # media type → body
    body_required: bool = True
    responses: Mapping[int, Mapping[str, Schema]] = _EMPTY  # status → media type → body
    error_codes: tuple[str, ...] = ()  # codes beside those of every route
    security: tuple[str, ...] = ("bearer",)
    description: str = ""


def flag_param(name: str, default: bool, text: str) -> Parameter:
    return Parameter(name, {**BOOLEAN, "default": default}, text)


PAGING_PARAMS: Final = (
    Parameter("prefix", STRING, "Names that begin so."),
    Parameter("page_size", integer_schema("", topics.PAGE_SIZE, minimum=1, maximum=topics.PAGE_SIZE_MAX)),
    Parameter("cursor", STRING, "next_cursor of the page before."),
)
