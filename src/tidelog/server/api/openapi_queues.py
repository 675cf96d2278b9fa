"""The routes of queues in the OpenAPI document, and the shapes of what they take and answer."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.server.api.auth import READ, WRITE
from tidelog.server.api.history import COLUMNS, LIMIT, LIMIT_MAX
from tidelog.server.api.openapi_parts import ARROW, EVENTS, JSON, NDJSON, Operation, Param
from tidelog.server.api.openapi_schemas import COUNT, TEXT, TOPIC, TS, Schema, each, nullable, number, obj, ref
from tidelog.wire import jobs

EVENTS_OF_JOBS: Final = (
    *("enqueued", "claimed", "extended", "nacked", "expired", "released", "acked", "dead_lettered", "redriven"),
    "restarted",
)
_BODY: Final = ("invalid_request", "payload_too_large", "unsupported_media_type")
_QUEUE: Final = ("topic_not_found", "not_a_queue")
_NODE: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": jobs.NODE_BYTES_MAX}
_LEASE: Final[Schema] = {"type": "integer", "minimum": LEASE_MS_MIN, "maximum": LEASE_MS_MAX}
_TOKEN: Final[Schema] = {"type": "string", "pattern": "^(lease_[0-9a-f]{1,16})?$"}
_PERFORMANCE: Final = {"performance": ref("Performance")}
_SETTLED: Final[dict[str, Schema]] = {"ready": COUNT, "in_flight": COUNT, **_PERFORMANCE}


def _settle(verb: str, body: str, answer: str, summary: str) -> Operation:
    return Operation(
        "POST",
        f"/v0/topics/{{topic}}/{verb}",
        verb,
        summary,
        (WRITE,),
        takes={JSON: ref(body)},
        gives={200: {JSON: ref(answer)}},
        refuses=(*_BODY, *_QUEUE, "batch_too_large"),
        text="What the node does not hold, or not under that lease, is skipped and no error.",
    )


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "POST",
        "/v0/topics/{topic}/claim",
        "claim",
        "Lease jobs of a queue",
        (READ, WRITE),
        takes={JSON: ref("Claim")},
        gives={200: {JSON: ref("Claimed")}},
        refuses=(*_BODY, *_QUEUE),
    ),
    _settle("ack", "Ack", "Acked", "Jobs are done: remove them"),
    _settle("nack", "Nack", "Nacked", "Give jobs back, at once or after a while"),
    _settle("extend", "Extend", "Extended", "Hold jobs longer, from now on"),
    Operation(
        "GET",
        "/v0/topics/{topic}/work",
        "work",
        "Jobs as they come, leased to this connection",
        (READ, WRITE),
        (
            Param("node", _NODE, "Who holds the leases.", required=True),
            Param("max", number("Jobs held at once and not settled.", 1, least=1, most=jobs.CLAIM_MAX)),
            Param("lease_ms", _LEASE, "The queue's own where it is absent."),
        ),
        gives={200: {EVENTS: {"type": "string", "description": "job, error. The id of a job is its seq."}}},
        refuses=("invalid_request", *_QUEUE, "not_acceptable"),
        security=("bearer", "token"),
        text="Jobs are settled by ack and nack. What is still held when the connection ends is free at once.",
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/history",
        "history",
        "What happened to the jobs of a queue, oldest first",
        (READ,),
        (
            Param("from_seq", number("The last seq of the history that the reader has.", 0)),
            Param("limit", number("Events at most.", LIMIT, least=1, most=LIMIT_MAX)),
            Param("format", {"enum": ["json", "ndjson", "arrow"]}, "Instead of an Accept header."),
        ),
        gives={
            200: {
                JSON: ref("History"),
                NDJSON: {"type": "string", "description": "One HistoryEvent a line."},
                ARROW: {
                    "type": "string",
                    "contentEncoding": "binary",
                    "description": f"An IPC stream with the columns {', '.join(COLUMNS)}.",
                },
            }
        },
        refuses=("invalid_request", *_QUEUE, "not_acceptable"),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/redrive",
        "redrive",
        "Put records of a dead-letter topic back into their queues",
        (WRITE,),
        takes={JSON: ref("Redrive")},
        body_required=False,
        gives={200: {JSON: ref("Redriven")}},
        refuses=(*_BODY, *_QUEUE),
        text="A crash in the middle may put one batch back twice and loses none. A key that is for certain names only "
        "moves records to these and leaves the others where they are.",
    ),
)

_JOB: Final = obj(
    {
        "$seq": COUNT,
        "lease_id": {**_TOKEN, "description": "Given with ack, nack or extend it fences off a holder that is late."},
        "deadline": {**TS, "description": "When the lease runs out, milliseconds since the epoch."},
        "$ts": TS,
        "$tag?": TEXT,
        "deliveries": {**COUNT, "description": "How often it was handed out, with this time."},
        "data": {},
        "$encoding?": {"const": "base64"},
        "meta?": {"type": "object"},
    }
)


def _sent() -> dict[str, Schema]:
    """What clients send, from the types that decode it."""
    types = (jobs.Claim, jobs.Ack, jobs.Nack, jobs.Extend, jobs.Redrive)
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for name, schema in made.items():
        schema.pop("title", None)
        fields: dict[str, Any] = schema["properties"]
        if name != "Redrive":
            fields["node"] = _NODE
        if "seqs" in fields:
            fields["seqs"] = each(COUNT, maxItems=jobs.SEQS_MAX)
            fields["lease_ids"] = {
                **each(_TOKEN, maxItems=jobs.SEQS_MAX),
                "description": 'One for each seq, or none at all; "" is no token.',
            }
    claim = made["Claim"]["properties"]
    claim["max"] = number("0 is 1.", 1, most=jobs.CLAIM_MAX)
    claim["lease_ms"] = {**nullable(_LEASE), "description": "The queue's own where it is absent."}
    made["Nack"]["properties"]["delay_ms"] = number("Not before so long from now.", 0, most=jobs.DELAY_MS_MAX)
    made["Extend"]["properties"]["lease_ms"] = {**_LEASE, "description": "From now on."}
    asked = made["Redrive"]["properties"]
    asked["to"] = {**nullable(TOPIC), "description": "The queue; where absent, that which each of them came from."}
    asked["match"] = ref("Match")
    asked["limit"] = number("Records at most.", 1_000, most=jobs.REDRIVE_MAX)
    asked["rate"] = {
        **nullable({"type": "integer", "minimum": 1}),
        "description": f"Records a second at most; the request ends after {jobs.REDRIVE_S_MAX} seconds of them.",
    }
    return made


SCHEMAS: Final[dict[str, Schema]] = {
    **_sent(),
    "Claimed": obj({"topic": TEXT, "claimed": each(_JOB), "count": COUNT, "ready": COUNT, **_PERFORMANCE}),
    "Acked": obj({"topic": TEXT, "acked": COUNT, "skipped": each(COUNT), **_SETTLED}),
    "Nacked": obj({"topic": TEXT, "nacked": COUNT, "skipped": each(COUNT), **_SETTLED}),
    "Extended": obj(
        {
            "topic": TEXT,
            "extended": COUNT,
            "skipped": each(COUNT),
            "deadlines": {"type": "object", "additionalProperties": TS, "description": "By seq."},
            **_PERFORMANCE,
        }
    ),
    "History": obj(
        {
            "topic": TEXT,
            "events": each(ref("HistoryEvent")),
            "count": COUNT,
            "next_from_seq": {**COUNT, "description": "from_seq of the next request."},
            **_PERFORMANCE,
        }
    ),
    "HistoryEvent": obj(
        {
            "at": {**COUNT, "description": "Its seq in the history."},
            "ts_ms": TS,
            "event": {"enum": list(EVENTS_OF_JOBS)},
            "seq?": {**COUNT, "description": "Of the job; of the first one, where they were enqueued together."},
            "last_seq?": COUNT,
            "node?": TEXT,
            "lease_id?": COUNT,
            "deliveries?": COUNT,
            "waited_ms?": {"type": "integer", "description": "claimed: since it was enqueued."},
            "deadline_ms?": {**TS, "description": "Of the lease; of a nack, when it can be had again."},
        }
    ),
    "Redriven": obj(
        {
            "topic": TEXT,
            "redriven": COUNT,
            "queues": {"type": "object", "additionalProperties": COUNT, "description": "How many went where."},
            "skipped": {**COUNT, "description": "Nobody knows where they came from, or somebody holds them."},
            **_PERFORMANCE,
        }
    ),
}
