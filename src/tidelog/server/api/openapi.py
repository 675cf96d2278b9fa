"""The contract as an OpenAPI document, for people who generate clients from it and for those who read.

Every route stands here once, with what it takes, what it answers and what it refuses; the document is put together
from that when somebody first asks for it. A test holds the routes and this table together.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any, Final

import msgspec

from tidelog.server.api import (
    openapi_batches,
    openapi_channels,
    openapi_groups,
    openapi_queues,
    openapi_routers,
)
from tidelog.server.api.auth import ADMIN, DELETE, READ, WRITE
from tidelog.server.api.call import Call
from tidelog.server.api.openapi_parts import ARROW, EVENTS, JSON, NDJSON, OCTETS, PAGED, Operation, Param, flag
from tidelog.server.api.openapi_schemas import COUNT, KEY, ROUTER, SCHEMAS, TEXT, TOPIC, Schema, number, ref
from tidelog.server.api.problem import _STATUS
from tidelog.server.http.seam import Response
from tidelog.version import __version__

_FROM = Param("from_seq", number("The last seq that the reader has; 0 before the first.", 0))
_KEY = Param("Idempotency-Key", KEY, "A second write with it writes nothing.", "header")
_CONSISTENCY = Param(
    "consistency", {"enum": ["eventual", "strong"]}, "strong: only records that survive a power cut. Waits for a sync."
)
_CREATE = flag("create", True, "Bulk writes: false refuses to make the topic.")
_RAW: Final[Schema] = {"type": "string", "contentEncoding": "binary"}
_LINES: Final[Schema] = {"type": "string", "description": "One RecordToWrite a line; with raw=1 its data alone."}
_COLUMNS: Final[Schema] = {
    **_RAW,
    "description": "An IPC stream with a column data (bytes or text) and perhaps tag, node, meta (JSON text), json.",
}
_READ_LINES: Final[Schema] = {"type": "string", "description": "One Record a line, and an End as the last one."}
_READ_COLUMNS: Final[Schema] = {
    **_RAW,
    "description": "Columns seq, ts, node, tag, meta, data, json. The schema's metadata tells topic, epoch, from_seq, "
    "head_seq, earliest_seq and gap; the custom metadata of a last batch without rows what End tells.",
}


def _probe(path: str, id: str, summary: str, schema: str, *refuses: str) -> Operation:
    return Operation("GET", path, id, summary, gives={200: {JSON: ref(schema)}}, refuses=refuses, security=())


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        "/v0/topics",
        "listTopics",
        "The topics that the key is for, by name",
        (READ,),
        (*PAGED, flag("touch", False, "Count as somebody who looked.")),
        gives={200: {JSON: ref("TopicList")}},
        refuses=("invalid_request",),
    ),
    Operation(
        "PUT",
        "/v0/topics/{topic}",
        "configureTopic",
        "Make a topic, or replace its config",
        (ADMIN,),
        takes={JSON: ref("TopicConfig")},
        body_required=False,
        gives={200: {JSON: ref("TopicCreated")}, 201: {JSON: ref("TopicCreated")}},
        refuses=("invalid_request", "topic_exists_incompatible", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}",
        "getTopic",
        "What a topic is and holds",
        (READ,),
        (flag("touch", True, "Count as somebody who looked."),),
        gives={200: {JSON: ref("Topic")}},
        refuses=("topic_not_found",),
    ),
    Operation(
        "DELETE",
        "/v0/topics/{topic}",
        "dropTopic",
        "Remove a topic with all its records",
        (DELETE,),
        (flag("if_empty", False, "Only where it holds no record."),),
        gives={200: {JSON: ref("TopicDropped")}},
        refuses=("topic_not_empty",),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}",
        "append",
        "Write records: one batch, or a stream of them",
        (WRITE,),
        (
            flag("return_seqs", True, "A plain write: say which seqs they got, one by one."),
            flag("raw", False, "Lines: each is data alone."),
            _CREATE,
            _KEY,
        ),
        {JSON: ref("Write"), NDJSON: _LINES, ARROW: _COLUMNS},
        gives={
            status: {JSON: {"anyOf": [ref("Written"), ref("BulkWritten")]}}
            for status in (HTTPStatus.OK, HTTPStatus.CREATED)
        },
        refuses=(
            *("invalid_request", "batch_too_large", "record_too_large", "topic_not_found", "payload_too_large"),
            *("unsupported_media_type", "topic_full"),
        ),
        text="JSON is one atomic batch. Lines and Arrow are streams without a limit, cut into atomic batches; an error "
        "in the middle of one tells in detail.written what was written before it.",
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/diff",
        "diff",
        "The records behind a seq",
        (READ,),
        takes={JSON: ref("Diff")},
        body_required=False,
        gives={200: {JSON: ref("Page")}},
        refuses=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/delete",
        "deleteRecords",
        "Delete records below a seq, by tag, or both",
        (DELETE,),
        takes={JSON: ref("Delete")},
        gives={200: {JSON: ref("Deleted")}},
        refuses=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/records",
        "readRecords",
        "All records behind a seq, as a stream",
        (READ,),
        (
            _FROM,
            Param("to_seq", COUNT, "The last seq to send; the head as it is at the start where this is absent."),
            Param("limit", number("Records at most; 0: all of them.", 0)),
            Param("node", {"type": "array", "items": TEXT}, "Whose records to leave out; repeated or with commas."),
            flag("include_tags", True, ""),
            flag("include_meta", True, ""),
            flag("include_data", True, ""),
            Param("format", {"enum": ["ndjson", "arrow"]}, "Instead of an Accept header."),
            _CONSISTENCY,
        ),
        gives={200: {NDJSON: _READ_LINES, ARROW: _READ_COLUMNS}},
        refuses=("invalid_request", "topic_not_found", "not_acceptable"),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/seek",
        "seek",
        "The first record of a time or later",
        (READ,),
        takes={JSON: ref("Seek")},
        gives={200: {JSON: ref("Sought")}},
        refuses=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/segments",
        "listSegments",
        "What of a topic lies in files",
        (READ,),
        (
            flag("sums", True, "false: leave out sums that would have to be worked out, which reads the files."),
            _CONSISTENCY,
        ),
        gives={200: {JSON: ref("Segments")}},
        refuses=("invalid_request", "topic_not_found", "not_found"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/segments/{base}/{file}",
        "readSegment",
        "Bytes of a file of a segment",
        (READ,),
        (
            Param("Range", TEXT, "One range of bytes; several are answered with the whole.", "header"),
            Param("If-Range", TEXT, "An ETag: the range counts only where the content is still that.", "header"),
        ),
        gives={200: {OCTETS: _RAW}, 206: {OCTETS: _RAW}},
        refuses=("topic_not_found", "not_found", "range_not_satisfiable"),
    ),
    *openapi_queues.OPERATIONS,
    *openapi_routers.OPERATIONS,
    Operation(
        "POST",
        "/v0/watch",
        "watch",
        "Say which topics to follow",
        (READ,),
        (flag("lenient", False, "Pass over topics that do not exist."),),
        {JSON: ref("Watch")},
        gives={200: {JSON: ref("WatchSession")}},
        refuses=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/watch/{wid}",
        "followWatch",
        "Records of a session's topics, as they come",
        params=(Param("Last-Event-ID", TEXT, "Where the client is, to go back to.", "header"),),
        gives={200: {EVENTS: {"type": "string", "description": "record, tombstone, caught-up, topic-deleted, error."}}},
        refuses=("not_found", "not_acceptable"),
        security=("bearer", "token"),
        text="Where there are keys, the one that made the session is needed.",
    ),
    Operation(
        "GET",
        "/v0/ws",
        "socket",
        "Follow topics and write to them over a WebSocket",
        gives={101: {}},
        refuses=("invalid_request", "upgrade_required"),
        text="Commands subscribe, unsubscribe, publish and ping, and those of channels (channel_join, channel_publish "
        "and so on), one JSON object a message; each needs its own scope.",
    ),
    Operation(
        "GET",
        "/v0/metrics",
        "metrics",
        "Figures of the server",
        (READ,),
        gives={200: {"text/plain; version=0.0.4": TEXT, JSON: ref("Metrics")}},
        text="Prometheus text, unless application/json is accepted.",
    ),
    Operation("GET", "/v0/openapi.json", "openapi", "This document", gives={200: {JSON: {"type": "object"}}}),
    *openapi_groups.OPERATIONS,
    *openapi_channels.OPERATIONS,
    *openapi_batches.OPERATIONS,
    _probe("/v0/health", "health", "Whether it is alive", "Health"),
    _probe("/healthz", "healthz", "Whether it is alive", "Health"),
    _probe("/v0/ready", "ready", "Whether it is ready", "Ready", "not_ready", "shutting_down"),
    _probe("/readyz", "readyz", "Whether it is ready", "Ready", "not_ready", "shutting_down"),
)

_PATH: Final[dict[str, Schema]] = {
    "topic": TOPIC,
    "router": ROUTER,
    "base": {**COUNT, "description": "Its first seq."},
    "file": {"enum": ["data", "idx", "foot", "del"]},
    "wid": TEXT,
    "channel": openapi_channels.CHANNEL,
    "group": TOPIC,
    "chunk": {**TEXT, "description": "Its owner, the time and chance: three hexadecimal numbers with - between them."},
}
_SCHEMAS: Final = {**SCHEMAS, **openapi_groups.SCHEMAS, **openapi_batches.SCHEMAS}
# Probes too: a server may ask for a key on them, and a page of another site gets none of it.
_ALWAYS: Final = ("unauthorized", "forbidden", "method_not_allowed")
_EVERY: Final = ("throttled", "internal", "not_ready", "shutting_down")
_SECURITY: Final[Schema] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key; its scopes are named beside it."},
    "token": {"type": "apiKey", "in": "query", "name": "token", "description": "For clients that cannot set headers."},
}


def document(_: Call) -> Response:
    return Response(200, _text())


@cache
def _text() -> bytes:
    return msgspec.json.encode(made())


def made() -> dict[str, Any]:
    """The document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _shown(operation)
    for path, item in paths.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": _PATH[name]} for name in names
            ]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidelog",
            "version": __version__,
            "summary": "A durable event log.",
            "description": "Clients ignore fields they do not know, and the server does so with what it is sent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {**_SCHEMAS, **openapi_queues.SCHEMAS, **openapi_channels.SCHEMAS},
            "securitySchemes": _SECURITY,
            "responses": _refusals(),
        },
    }


def _shown(operation: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "security": [{name: list(operation.scopes) if name == "bearer" else []} for name in operation.security],
        "parameters": [_parameter(param) for param in operation.params],
        "responses": _answers(operation),
    }
    if operation.text:
        made["description"] = operation.text
    if operation.takes:
        content = {kind: {"schema": schema} for kind, schema in operation.takes.items()}
        made["requestBody"] = {"required": operation.body_required, "content": content}
    return made


def _parameter(param: Param) -> dict[str, Any]:
    made: dict[str, Any] = {"name": param.name, "in": param.where, "schema": param.schema}
    if param.required:
        made["required"] = True
    return {**made, "description": param.text} if param.text else made


def _answers(operation: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, content in operation.gives.items():
        shown = {kind: {"schema": schema} for kind, schema in content.items()}
        answers[str(int(status))] = {"description": HTTPStatus(status).phrase, **({"content": shown} if shown else {})}
    codes = {*_ALWAYS, *operation.refuses, *(_EVERY if operation.security else ())}
    codes |= {"invalid_request"} if "{" in operation.path else set()  # a name that is no text, or nobody's to change
    for status in sorted({_STATUS[code] for code in codes}):
        answers[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return answers


def _refusals() -> dict[str, Any]:
    """Errors by status: one envelope, and the codes that it may carry."""
    by_status: dict[int, list[str]] = {}
    for code, status in _STATUS.items():
        by_status.setdefault(status, []).append(code)
    found: dict[str, Any] = {}
    for status, codes in by_status.items():
        answer: dict[str, Any] = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
            "content": {JSON: {"schema": ref("Error")}},
        }
        if status in (429, 503):
            answer["headers"] = {"Retry-After": {"schema": COUNT, "description": "Seconds."}}
        found[str(status)] = answer
    return found
