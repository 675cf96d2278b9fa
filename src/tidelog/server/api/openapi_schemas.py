"""The shapes of bodies and answers, as JSON Schema.

What clients send is taken from the very types that decode it, so that it cannot drift; what they are sent is written
down here. `"name?"` is a field that may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, get_args

import msgspec

from tidelog.engine import EngineConfig, TopicConfig
from tidelog.engine.config import ADDED, CLAIM_JITTER_MS_MAX, KEYS, LEASE_MS_MAX, LEASE_MS_MIN, Durability
from tidelog.engine.floors import Gap
from tidelog.engine.queues.schedule import PRIORITY_MAX
from tidelog.engine.results import Counts
from tidelog.server.api import diff
from tidelog.server.api.problem import _STATUS
from tidelog.server.api.watch import HEARTBEAT_MS_MAX, TOPICS_MAX
from tidelog.server.sessions import TTL_MS
from tidelog.wire import requests

Schema: TypeAlias = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
NUMBER: Final[Schema] = {"type": "number"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
TS: Final[Schema] = {"type": "integer", "description": "Milliseconds since the epoch."}
TOPIC: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"}
ROUTER: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"}
KEY: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 256}
_LIMITS: Final = EngineConfig()
_TIME: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 1 << 47}


def obj(fields: Mapping[str, Schema], text: str = "") -> Schema:
    """An object; clients ignore fields that they do not know."""
    made: Schema = {
        "type": "object",
        "properties": {name.removesuffix("?"): schema for name, schema in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
    }
    return {"description": text, **made} if text else made


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def each(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def number(text: str, default: int, least: int = 0, most: int | None = None) -> Schema:
    """A whole number; what is over `most` counts as that."""
    made: Schema = {"type": "integer", "minimum": least, "default": default, "description": text}
    return made if most is None else {**made, "maximum": most}


def _sent() -> dict[str, Schema]:
    """What clients send, from the types that decode it."""
    types = (
        requests.Write,
        requests.Diff,
        requests.Delete,
        requests.Watch,
        requests.Seek,
        requests.Router,
        TopicConfig,
    )
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    record = made.pop("Record")["properties"]
    made["RecordToWrite"] = {
        "type": "object",
        "properties": {
            "data": {"description": f"Any JSON, at most {_LIMITS.record_bytes_max} bytes together with meta."},
            "tag": {**record["tag"], "description": f"To delete by; at most {_LIMITS.tag_bytes_max} bytes."},
            "node": {**record["node"], "description": f"Where it comes from; at most {_LIMITS.node_bytes_max} bytes."},
            "meta": {
                **nullable({"type": "object"}),
                "default": None,
                "description": f"At most {_LIMITS.meta_keys_max} keys and {_LIMITS.meta_bytes_max} bytes.",
            },
            "$encoding": {**nullable({"enum": ["base64"]}), "description": "`base64`: data is bytes, written as text."},
            "run_at_ms": {**nullable(_TIME), "description": "A job: not to be claimed before."},
            "delay_ms": {**nullable(_TIME), "description": "A job: not to be claimed for so long; not with run_at_ms."},
            "priority": {
                **nullable({"type": "integer", "minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX}),
                "description": "A job: higher goes first.",
            },
        },
        "required": ["data"],
    }
    write = made["Write"]["properties"]
    write["records"] = each(ref("RecordToWrite"), minItems=1, maxItems=_LIMITS.batch_records_max)
    write["idempotency_key"] = {**nullable(KEY), "description": "A second write with it writes nothing."}
    write["config"] = {**nullable(ref("TopicConfig")), "description": "For a write that makes its topic; needs admin."}
    asked = made["Diff"]["properties"]
    asked["limit"] = number(f"0 is {diff.LIMIT}.", diff.LIMIT, most=diff.LIMIT_MAX)
    asked["max_batch_bytes"] = number(f"0 is {diff.BYTES}.", diff.BYTES, most=diff.BYTES_MAX)
    asked["wait_ms"] = number("Wait so long where there is nothing yet.", 0, most=diff.WAIT_MS_MAX)
    made["Delete"]["properties"]["match"] = ref("Match")
    made["Delete"]["description"] = "before_seq, match or both."
    made["Delete"]["anyOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("before_seq", "match")
    ]
    watch = made["Watch"]["properties"]
    watch["topics"] |= {"propertyNames": TOPIC, "minProperties": 1, "maxProperties": TOPICS_MAX}
    watch["limit"] = number(f"0 is {diff.LIMIT}.", diff.LIMIT, most=diff.LIMIT_MAX)
    watch["max_batch_bytes"] = number(f"0 is {diff.BYTES}.", 262_144, most=diff.BYTES_MAX)
    watch["heartbeat_ms"] = number("Said when nothing else was.", 15_000, least=1_000, most=HEARTBEAT_MS_MAX)
    watch["consistency"] |= {"enum": ["eventual", "strong"]}
    made["Seek"]["properties"]["ts"] = TS
    router = made["RouterToMake"] = made.pop("Router")
    router["properties"] |= {"source": TOPIC, "dest": TOPIC, "filter": nullable(ref("Match"))}
    router["properties"]["guarantee"] |= {"enum": ["at_least_once", "exactly_once"]}
    made["TopicConfig"] = _config(made["TopicConfig"]["properties"])
    for schema in made.values():
        schema.pop("title", None)
    return made


def _config(fields: dict[str, Schema]) -> Schema:
    for name, least, most in (
        ("lease_ms", LEASE_MS_MIN, LEASE_MS_MAX),
        ("claim_jitter_ms", 0, CLAIM_JITTER_MS_MAX),
        ("priority", -(1 << 31), (1 << 31) - 1),
    ):
        fields[name] |= {"minimum": least, "maximum": most}
    for name in ("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "max_deliveries"):
        fields[name] |= {"minimum": 0}
    fields["durability"] = {**nullable({"enum": ["ephemeral", "memory", "disk", "fsync"]}), "default": "disk"}
    fields["dead_letter"] = {**nullable(TOPIC), "default": None}
    fields["durable"] = {"type": "boolean", "default": False, "description": "Without durability: true is fsync."}
    fields["consistency"] |= {"description": "strong: readers are shown what survives a power cut. Told where it is."}
    text = "A PUT replaces all of it: what is not given takes its default. Answers have every field."
    return {"type": "object", "description": text, "properties": {name: fields[name] for name in (*KEYS, *ADDED)}}


_MARKS: Final[dict[str, Schema]] = {"from_seq": COUNT, "head_seq": COUNT, "earliest_seq": COUNT}
_FILE: Final = obj(
    {"bytes": COUNT, "xxh3?": {"type": "string", "pattern": "^[0-9a-f]{16}$"}}, "Of a file; XXH3-64, in hexadecimal."
)
_PERFORMANCE: Final = {"performance": ref("Performance")}
_ROUTER: Final[dict[str, Schema]] = {
    "router": TEXT,
    "source": TEXT,
    "dest": TEXT,
    "preserve_node": FLAG,
    "preserve_tag": FLAG,
    "filter": nullable(each(TEXT, minItems=3, maxItems=3)),
    "allow_cycle": FLAG,
    "guarantee": TEXT,
}
ACKED: Final[dict[str, Schema]] = {
    "durability": {
        "enum": list(get_args(Durability)),
        "description": "What this ack means: the class of the topic, whatever a config in the write asked for.",
    },
}

_WRITTEN: Final[dict[str, Schema]] = {
    "topic": TEXT,
    "first_seq": COUNT,
    "last_seq": COUNT,
    "head_seq": COUNT,
    "count": COUNT,
    "created": FLAG,
}

_TASK: Final = obj(
    {
        **dict.fromkeys(("runs", "failures", "failing"), COUNT),
        **dict.fromkeys(("last_ok_ms", "last_error_ms"), nullable(TS)),
        "last_error": nullable(TEXT),
    },
    "One kind of background work; `failing` counts failures since its last success.",
)
_HEALTH: Final = obj(
    {
        "ok": FLAG,
        **dict.fromkeys(("checkpoint_age_ms", "wal_uncovered_bytes", "corruptions"), COUNT),
        "lagging_topics": each(TEXT),
        "tasks": {"type": "object", "additionalProperties": _TASK},
    },
    "Background work and stored bytes. Topics in `lagging_topics` could not be written by the last checkpoint; the WAL "
    "has their records.",
)
_PROBED: Final = obj(
    {
        "ok": FLAG,
        **dict.fromkeys(("checkpoint_age_ms", "lagging_topics", "corruptions"), COUNT),
        "failing": {"type": "object", "additionalProperties": COUNT},
    },
    "The same in short: how many topics lag, and failures in a row by task. Errors are in the metrics.",
)
_ANSWERED: Final[dict[str, Schema]] = {
    "Error": obj(
        {"error": obj({"code": {"enum": sorted(_STATUS)}, "message": TEXT, "detail?": {"type": "object"}})},
        "The message says what happened, whether it was written and what to do next.",
    ),
    "Performance": obj(
        {
            "server_total_ms": NUMBER,
            "wal_append_ms?": NUMBER,
            "fsync_ms?": NUMBER,
            "throttle_wait_ms?": NUMBER,
            "records_scanned?": COUNT,
        },
        "What it took; all but server_total_ms only where it says something.",
    ),
    "Record": obj(
        {
            "$seq": {"type": "integer", "minimum": 1},
            "$ts": TS,
            "$node?": TEXT,
            "$tag?": TEXT,
            "data?": {"description": "Absent only where it was asked not to be there."},
            "meta?": {"type": "object"},
            "$encoding?": {"enum": ["base64"]},
        }
    ),
    "Tombstone": obj(
        {
            name: {"enum": ["cap", "ttl", "mixed", "recreated", "source_trim"]} if name == "reason" else COUNT
            for name in Gap._fields
        },
        "Records that were lost before they could be read: all seqs from gap_from to gap_to.",
    ),
    "Counts": obj(dict.fromkeys(Counts._fields, COUNT), "Where every seq of a range went; they add up to it."),
    "Match": {
        "description": 'A tag, `"p*"` for all that begin so, or `["tag","Eq","v"]`, `["tag","Glob","p*"]`.',
        "anyOf": [
            TEXT,
            {
                "type": "array",
                "prefixItems": [{"const": "tag"}, {"enum": ["Eq", "Glob"]}, TEXT],
                "minItems": 3,
                "maxItems": 3,
            },
            {"type": "null"},
        ],
    },
    "Topic": obj(
        {
            "topic": TEXT,
            "type": {"enum": ["log", "queue"]},
            "head_seq": COUNT,
            "earliest_seq": COUNT,
            "next_seq": COUNT,
            "count": COUNT,
            "bytes": COUNT,
            "config": ref("TopicConfig"),
            "effective_priority": {"type": "integer"},
            "last_write_ts": nullable(TS),
            "last_read_ts": nullable(TS),
            "queue?": obj({"ready": COUNT, "in_flight": COUNT, "dead_lettered": COUNT}),
            **_PERFORMANCE,
        }
    ),
    "TopicCreated": obj({"topic": TEXT, "created": FLAG, "config": ref("TopicConfig"), **_PERFORMANCE}),
    "TopicDropped": obj({"topic": TEXT, "deleted": FLAG, "routers_removed": each(TEXT), **_PERFORMANCE}),
    "TopicList": obj(
        {
            "topics": each(
                obj(
                    {
                        "topic": TEXT,
                        "head_seq": COUNT,
                        "earliest_seq": COUNT,
                        "count": COUNT,
                        "bytes": COUNT,
                        "durable": FLAG,
                        "effective_priority": {"type": "integer"},
                    }
                )
            ),
            "next_cursor?": TEXT,
            **_PERFORMANCE,
        }
    ),
    "Router": obj({**_ROUTER, "forwarded_total": COUNT, **_PERFORMANCE}),
    "RouterMade": obj({**_ROUTER, "created": FLAG, **_PERFORMANCE}),
    "RouterDropped": obj({"router": TEXT, "deleted": FLAG, **_PERFORMANCE}),
    "RouterList": obj(
        {
            "routers": each(
                obj({"router": TEXT, "source": TEXT, "dest": TEXT, "guarantee": TEXT, "forwarded_total": COUNT})
            ),
            "next_cursor?": TEXT,
            **_PERFORMANCE,
        }
    ),
    "Written": obj({**_WRITTEN, "deduped": FLAG, **ACKED, "seqs?": each(COUNT), **_PERFORMANCE}),
    "BulkWritten": obj(
        {
            **_WRITTEN,
            "batches": {**COUNT, "description": "Each was written whole or not at all."},
            "deduped": {**COUNT, "description": "How many of them had been written before, with the same key."},
            **ACKED,
            **_PERFORMANCE,
        }
    ),
    "Page": obj(
        {
            "topic": TEXT,
            "records": each(ref("Record")),
            "next_from_seq": COUNT,
            "head_seq": COUNT,
            "earliest_seq": COUNT,
            "caught_up": FLAG,
            "tombstone": nullable(ref("Tombstone")),
            "lag": COUNT,
            **_PERFORMANCE,
        }
    ),
    "End": obj(
        {
            "$end": obj(
                {
                    "next_from_seq": COUNT,
                    "head_seq": COUNT,
                    "earliest_seq": COUNT,
                    "gap": nullable(ref("Tombstone")),
                    "gaps": each(ref("Tombstone")),
                    "counts": ref("Counts"),
                }
            )
        },
        "The last line. A stream without it was cut off.",
    ),
    "Deleted": obj(
        {
            "topic": TEXT,
            "deleted": COUNT,
            "earliest_seq": COUNT,
            "head_seq": COUNT,
            "count": COUNT,
            "bytes": COUNT,
            **_PERFORMANCE,
        }
    ),
    "Sought": obj(
        {
            "topic": TEXT,
            "ts": TS,
            "seq": {
                **COUNT,
                "description": "The first record of this time or later; head_seq + 1 where there is none.",
            },
            **_MARKS,
            **_PERFORMANCE,
        }
    ),
    "Segments": obj(
        {
            "topic": TEXT,
            "epoch": {**COUNT, "description": "Another one after the topic was dropped and made again."},
            "generation": {**COUNT, "description": "Of the newest checkpoint."},
            "head_seq": COUNT,
            "earliest_seq": COUNT,
            "evict_floor": COUNT,
            "segments": each(ref("Segment")),
            "tail": obj({"from_seq": COUNT, "to_seq": COUNT}, "What lies in no file: read it as records."),
            **_PERFORMANCE,
        }
    ),
    "Segment": obj(
        {
            "base": {**COUNT, "description": "Its first seq, which names it."},
            "stop": {**COUNT, "description": "One past its last seq."},
            "sealed": FLAG,
            "records": COUNT,
            "live": COUNT,
            "bytes": {**COUNT, "description": "Of data and meta of live records."},
            "first_ts": TS,
            "last_ts": TS,
            "files": obj({"data": _FILE, "idx": _FILE, "foot?": _FILE, "del?": _FILE}),
        }
    ),
    "WatchSession": obj(
        {
            "wid": {"type": "string", "pattern": "^wid_[A-Za-z0-9_-]{22}$"},
            "stream_url": TEXT,
            "session_ttl_ms": {"const": TTL_MS},
            "topics": {"type": "object", "additionalProperties": obj(_MARKS)},
            **_PERFORMANCE,
        }
    ),
    "Health": obj({"status": {"const": "ok"}, "version": TEXT, "uptime_ms": COUNT}),
    "Ready": obj({"status": {"const": "ready"}, "wal_replay_complete": FLAG, "topics": COUNT, "health": _PROBED}),
    "Metrics": obj(
        {
            **dict.fromkeys(
                (
                    *("topics", "topics_ephemeral", "topics_memory", "topics_disk", "topics_fsync", "routers"),
                    *("records_live", "bytes_live", "queue_topics", "queue_leases_in_flight", "sse_connections"),
                    *("watch_sessions", "channels", "channel_receivers"),
                ),
                COUNT,
            ),
            "ready": FLAG,
            "replay_progress": {"type": "number", "minimum": 0, "maximum": 1},
            "uptime_ms": COUNT,
            "pressure": {"type": "number", "minimum": 0, "maximum": 1},
            "sched_latency_ms": {"type": "number", "minimum": 0},
            **dict.fromkeys(("ready_topics", "deferred_topics", "throttled_total"), COUNT),
            "health": nullable(_HEALTH),
            "wal": obj(
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
                    "read_only": FLAG,
                }
            ),
        }
    ),
}

SCHEMAS: Final[dict[str, Schema]] = {**_sent(), **_ANSWERED}
