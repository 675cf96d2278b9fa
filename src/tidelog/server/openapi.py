"""The contract as an OpenAPI document, for people who generate clients from it and for those who read.

Every route stands here once, with what it takes, what it answers and what it refuses; the document is put together
from that when somebody first asks for it. A test holds the routes and this table together.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any, Final

import msgspec

from tidelog.http.interface import Response
from tidelog.server import openapi_operations
from tidelog.server.auth import ADMIN, DELETE, READ, WRITE
from tidelog.server.errors import STATUS_BY_CODE
from tidelog.server.openapi_schemas import (
    ARROW_MEDIA_TYPE,
    COUNT,
    EVENT_STREAM_MEDIA_TYPE,
    IDEMPOTENCY_KEY,
    JSON_MEDIA_TYPE,
    NDJSON_MEDIA_TYPE,
    OCTET_STREAM_MEDIA_TYPE,
    PAGING_PARAMS,
    ROUTER_NAME,
    SCHEMAS,
    STRING,
    TOPIC_NAME,
    Operation,
    Parameter,
    Schema,
    flag_param,
    integer_schema,
    schema_ref,
)
from tidelog.server.request import RequestContext
from tidelog.version import __version__

_FROM_PARAM = Parameter("from_seq", integer_schema("The last seq that the reader has; 0 before the first.", 0))
_KEY_PARAM = Parameter("Idempotency-Key", IDEMPOTENCY_KEY, "A second write with it writes nothing.", "header")
_CONSISTENCY_PARAM = Parameter(
    "consistency", {"enum": ["eventual", "strong"]}, "strong: only records that survive a power cut. Waits for a sync."
)
_CREATE_PARAM = flag_param("create", True, "Bulk writes: false refuses to make the topic.")
_BINARY: Final[Schema] = {"type": "string", "contentEncoding": "binary"}
_WRITE_LINES: Final[Schema] = {"type": "string", "description": "One RecordToWrite a line; with raw=1 its data alone."}
_WRITE_COLUMNS: Final[Schema] = {
    **_BINARY,
    "description": "An IPC stream with a column data (bytes or text) and perhaps tag, node, meta (JSON text), json.",
}
_READ_LINES: Final[Schema] = {"type": "string", "description": "One Record a line, and an End as the last one."}
_READ_COLUMNS: Final[Schema] = {
    **_BINARY,
    "description": "Columns seq, ts, node, tag, meta, data, json. The schema's metadata tells topic, epoch, from_seq, "
    "head_seq, earliest_seq and gap; the custom metadata of a last batch without rows what End tells.",
}


def _probe(path: str, id: str, summary: str, schema: str, *refuses: str) -> Operation:
    return Operation(
        "GET",
        path,
        id,
        summary,
        responses={200: {JSON_MEDIA_TYPE: schema_ref(schema)}},
        error_codes=refuses,
        security=(),
    )


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        "/v0/topics",
        "listTopics",
        "The topics that the key is for, by name",
        (READ,),
        (*PAGING_PARAMS, flag_param("touch", False, "Count as somebody who looked.")),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("TopicList")}},
        error_codes=("invalid_request",),
    ),
    Operation(
        "PUT",
        "/v0/topics/{topic}",
        "configureTopic",
        "Make a topic, or replace its config",
        (ADMIN,),
        request_body={JSON_MEDIA_TYPE: schema_ref("TopicConfig")},
        body_required=False,
        responses={
            200: {JSON_MEDIA_TYPE: schema_ref("TopicCreated")},
            201: {JSON_MEDIA_TYPE: schema_ref("TopicCreated")},
        },
        error_codes=("invalid_request", "topic_exists_incompatible", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}",
        "getTopic",
        "What a topic is and holds",
        (READ,),
        (flag_param("touch", True, "Count as somebody who looked."),),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Topic")}},
        error_codes=("topic_not_found",),
    ),
    Operation(
        "DELETE",
        "/v0/topics/{topic}",
        "dropTopic",
        "Remove a topic with all its records",
        (DELETE,),
        (flag_param("if_empty", False, "Only where it holds no record."),),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("TopicDropped")}},
        error_codes=("topic_not_empty",),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}",
        "append",
        "Write records: one batch, or a stream of them",
        (WRITE,),
        (
            flag_param("return_seqs", True, "A plain write: say which seqs they got, one by one."),
            flag_param("raw", False, "Lines: each is data alone."),
            _CREATE_PARAM,
            _KEY_PARAM,
        ),
        {JSON_MEDIA_TYPE: schema_ref("Write"), NDJSON_MEDIA_TYPE: _WRITE_LINES, ARROW_MEDIA_TYPE: _WRITE_COLUMNS},
        responses={
            status: {JSON_MEDIA_TYPE: {"anyOf": [schema_ref("Written"), schema_ref("BulkWritten")]}}
            for status in (HTTPStatus.OK, HTTPStatus.CREATED)
        },
        error_codes=(
            *("invalid_request", "batch_too_large", "record_too_large", "topic_not_found", "payload_too_large"),
            *("unsupported_media_type", "topic_full"),
        ),
        description="JSON is one atomic batch. Lines and Arrow are streams without a limit, cut into atomic batches; "
        "an error "
        "in the middle of one tells in detail.written what was written before it.",
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/diff",
        "diff",
        "The records behind a seq",
        (READ,),
        request_body={JSON_MEDIA_TYPE: schema_ref("Diff")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Page")}},
        error_codes=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/delete",
        "deleteRecords",
        "Delete records below a seq, by tag, or both",
        (DELETE,),
        request_body={JSON_MEDIA_TYPE: schema_ref("Delete")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Deleted")}},
        error_codes=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/records",
        "readRecords",
        "All records behind a seq, as a stream",
        (READ,),
        (
            _FROM_PARAM,
            Parameter("to_seq", COUNT, "The last seq to send; the head as it is at the start where this is absent."),
            Parameter("limit", integer_schema("Records at most; 0: all of them.", 0)),
            Parameter(
                "node", {"type": "array", "items": STRING}, "Whose records to leave out; repeated or with commas."
            ),
            flag_param("include_tags", True, ""),
            flag_param("include_meta", True, ""),
            flag_param("include_data", True, ""),
            Parameter("format", {"enum": ["ndjson", "arrow"]}, "Instead of an Accept header."),
            _CONSISTENCY_PARAM,
        ),
        responses={200: {NDJSON_MEDIA_TYPE: _READ_LINES, ARROW_MEDIA_TYPE: _READ_COLUMNS}},
        error_codes=("invalid_request", "topic_not_found", "not_acceptable"),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/seek",
        "seek",
        "The first record of a time or later",
        (READ,),
        request_body={JSON_MEDIA_TYPE: schema_ref("Seek")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Sought")}},
        error_codes=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/segments",
        "listSegments",
        "What of a topic lies in files",
        (READ,),
        (
            flag_param("sums", True, "false: leave out sums that would have to be worked out, which reads the files."),
            _CONSISTENCY_PARAM,
        ),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Segments")}},
        error_codes=("invalid_request", "topic_not_found", "not_found"),
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/segments/{base}/{file}",
        "readSegment",
        "Bytes of a file of a segment",
        (READ,),
        (
            Parameter("Range", STRING, "One range of bytes; several are answered with the whole.", "header"),
            Parameter("If-Range", STRING, "An ETag: the range counts only where the content is still that.", "header"),
        ),
        responses={200: {OCTET_STREAM_MEDIA_TYPE: _BINARY}, 206: {OCTET_STREAM_MEDIA_TYPE: _BINARY}},
        error_codes=("topic_not_found", "not_found", "range_not_satisfiable"),
    ),
    *openapi_operations.QUEUE_OPERATIONS,
    *openapi_operations.ROUTER_OPERATIONS,
    Operation(
        "POST",
        "/v0/watch",
        "watch",
        "Say which topics to follow",
        (READ,),
        (flag_param("lenient", False, "Pass over topics that do not exist."),),
        {JSON_MEDIA_TYPE: schema_ref("Watch")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("WatchSession")}},
        error_codes=("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type"),
    ),
    Operation(
        "GET",
        "/v0/watch/{wid}",
        "followWatch",
        "Records of a session's topics, as they come",
        params=(Parameter("Last-Event-ID", STRING, "Where the client is, to go back to.", "header"),),
        responses={
            200: {
                EVENT_STREAM_MEDIA_TYPE: {
                    "type": "string",
                    "description": "record, tombstone, caught-up, topic-deleted, error.",
                }
            }
        },
        error_codes=("not_found", "not_acceptable"),
        security=("bearer", "token"),
        description="Where there are keys, the one that made the session is needed.",
    ),
    Operation(
        "GET",
        "/v0/ws",
        "socket",
        "Follow topics and write to them over a WebSocket",
        responses={101: {}},
        error_codes=("invalid_request", "upgrade_required"),
        description="Commands subscribe, unsubscribe, publish and ping, and those of channels (channel_join, "
        "channel_publish "
        "and so on), one JSON object a message; each needs its own scope.",
    ),
    Operation(
        "GET",
        "/v0/metrics",
        "metrics",
        "Figures of the server",
        (READ,),
        responses={200: {"text/plain; version=0.0.4": STRING, JSON_MEDIA_TYPE: schema_ref("Metrics")}},
        description="Prometheus text, unless application/json is accepted.",
    ),
    Operation(
        "GET", "/v0/openapi.json", "openapi", "This document", responses={200: {JSON_MEDIA_TYPE: {"type": "object"}}}
    ),
    *openapi_operations.GROUP_OPERATIONS,
    *openapi_operations.CHANNEL_OPERATIONS,
    *openapi_operations.BATCH_OPERATIONS,
    _probe("/v0/health", "health", "Whether it is alive", "Health"),
    _probe("/healthz", "healthz", "Whether it is alive", "Health"),
    _probe("/v0/ready", "ready", "Whether it is ready", "Ready", "not_ready", "shutting_down"),
    _probe("/readyz", "readyz", "Whether it is ready", "Ready", "not_ready", "shutting_down"),
)

_PATH_PARAMETERS: Final[dict[str, Schema]] = {
    "topic": TOPIC_NAME,
    "router": ROUTER_NAME,
    "base": {**COUNT, "description": "Its first seq."},
    "file": {"enum": ["data", "idx", "foot", "del"]},
    "wid": STRING,
    "channel": openapi_operations.CHANNEL,
    "group": TOPIC_NAME,
    "chunk": {
        **STRING,
        "description": "Its owner, the time and chance: three hexadecimal numbers with - between them.",
    },
}
_ALL_SCHEMAS: Final = {**SCHEMAS, **openapi_operations.GROUP_SCHEMAS, **openapi_operations.BATCH_SCHEMAS}
# Probes too: a server may ask for a key on them, and a page of another site gets none of it.
_ERRORS_OF_EVERY_ROUTE: Final = ("unauthorized", "forbidden", "method_not_allowed")
_ERRORS_OF_SECURED_ROUTES: Final = ("throttled", "internal", "not_ready", "shutting_down")
_SECURITY_SCHEMES: Final[Schema] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key; its scopes are named beside it."},
    "token": {"type": "apiKey", "in": "query", "name": "token", "description": "For clients that cannot set headers."},
}


def get_openapi(_: RequestContext) -> Response:
    return Response(200, _document_bytes())


@cache
def _document_bytes() -> bytes:
    return msgspec.json.encode(build_document())


def build_document() -> dict[str, Any]:
    """The document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation_json(operation)
    for path, item in paths.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS[name]} for name in names
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
            "schemas": {**_ALL_SCHEMAS, **openapi_operations.QUEUE_SCHEMAS, **openapi_operations.CHANNEL_SCHEMAS},
            "securitySchemes": _SECURITY_SCHEMES,
            "responses": _error_responses(),
        },
    }


def _operation_json(operation: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "security": [{name: list(operation.scopes) if name == "bearer" else []} for name in operation.security],
        "parameters": [_parameter_json(param) for param in operation.params],
        "responses": _responses_json(operation),
    }
    if operation.description:
        made["description"] = operation.description
    if operation.request_body:
        content = {kind: {"schema": schema} for kind, schema in operation.request_body.items()}
        made["requestBody"] = {"required": operation.body_required, "content": content}
    return made


def _parameter_json(param: Parameter) -> dict[str, Any]:
    made: dict[str, Any] = {"name": param.name, "in": param.location, "schema": param.schema}
    if param.required:
        made["required"] = True
    return {**made, "description": param.description} if param.description else made


def _responses_json(operation: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, content in operation.responses.items():
        shown = {kind: {"schema": schema} for kind, schema in content.items()}
        answers[str(int(status))] = {"description": HTTPStatus(status).phrase, **({"content": shown} if shown else {})}
    codes = {
        *_ERRORS_OF_EVERY_ROUTE,
        *operation.error_codes,
        *(_ERRORS_OF_SECURED_ROUTES if operation.security else ()),
    }
    codes |= {"invalid_request"} if "{" in operation.path else set()  # a name that is no text, or nobody's to change
    for status in sorted({STATUS_BY_CODE[code] for code in codes}):
        answers[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return answers


def _error_responses() -> dict[str, Any]:
    """Errors by status: one envelope, and the codes that it may carry."""
    by_status: dict[int, list[str]] = {}
    for code, status in STATUS_BY_CODE.items():
        by_status.setdefault(status, []).append(code)
    found: dict[str, Any] = {}
    for status, codes in by_status.items():
        answer: dict[str, Any] = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
            "content": {JSON_MEDIA_TYPE: {"schema": schema_ref("Error")}},
        }
        if status in (429, 503):
            answer["headers"] = {"Retry-After": {"schema": COUNT, "description": "Seconds."}}
        found[str(status)] = answer
    return found
