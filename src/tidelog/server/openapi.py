"""The OpenAPI document, generated from the routes and from the types of requests and responses.

A handler's decorator `@operation` names its types, parameters and error codes; its docstring is the text. `api_types`
and `response_types` give the schemas. Schemas that are no type, and limits that only the engine knows, are added here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from tidelog import api_types
from tidelog.api_types import DOCUMENTED, schema_ref
from tidelog.channels import ChannelLimits
from tidelog.channels.rules import ACL_KINDS
from tidelog.engine import EngineConfig, TopicConfig
from tidelog.engine.config import (
    ADDED,
    CLAIM_JITTER_MS_MAX,
    KEYS,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    MAX_RECORD_BYTES_MAX,
)
from tidelog.engine.queues.jobs import PRIORITY_MAX
from tidelog.http.h1_encoder import REASON_PHRASES
from tidelog.server import response_types
from tidelog.server.errors import STATUS_BY_CODE
from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.server.app import Route
    from tidelog.server.request import Endpoint

Schema: TypeAlias = dict[str, Any]

JSON_MEDIA_TYPE: Final = "application/json"
_EMPTY: Final[Mapping[str, Schema]] = MappingProxyType({})
_REF_TEMPLATE: Final = "#/components/schemas/{name}"
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
BINARY: Final[Schema] = {"type": "string", "contentEncoding": "binary"}


# ── what a route says about itself ────────────────────────────────────────────────────────────────


class Parameter(NamedTuple):
    name: str
    schema: Schema
    description: str = ""
    location: str = "query"
    required: bool = False


class Operation(NamedTuple):
    """One endpoint. Its path, scopes and security are in the table of routes."""

    id: str
    request: type | str | None = None  # the JSON body: a type, or the name of a component
    response: type | tuple[type, ...] | None = None  # the JSON body of a success
    params: tuple[Parameter, ...] = ()
    errors: tuple[str, ...] = ()  # codes beside those of every route, and of every JSON body
    body_required: bool = True
    statuses: tuple[int, ...] = (200,)
    request_content: Mapping[str, Schema] = _EMPTY  # bodies of other media types
    response_content: Mapping[str, Schema] = _EMPTY
    summary: str = ""
    description: str = ""


_OPERATIONS: Final[dict[Callable[..., Any], Operation]] = {}
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


def operation(id: str, **fields: Any) -> Callable[[HandlerT], HandlerT]:
    """Describe a handler by the fields of `Operation`. The first line of its docstring is the summary, the rest is the
    description."""

    def register(handler: HandlerT) -> HandlerT:
        summary, _, description = (handler.__doc__ or "").partition("\n")
        described = Operation(id, **fields)
        _OPERATIONS[handler] = described._replace(
            summary=summary.rstrip("."), description=" ".join(description.split())
        )
        return handler

    return register


@cache
def query_schemas(handler: Callable[..., Any]) -> Mapping[str, Schema]:
    """Return the parameters that a handler takes in the query."""
    return {param.name: param.schema for param in _OPERATIONS[handler].params if param.location == "query"}


def flag_param(name: str, default: bool, text: str = "") -> Parameter:
    return Parameter(name, {**BOOLEAN, "default": default}, text)


def integer_param(name: str, text: str, default: int, minimum: int = 0, maximum: int | None = None) -> Parameter:
    schema: Schema = {"type": "integer", "minimum": minimum, "default": default, "description": text}
    return Parameter(name, schema if maximum is None else {**schema, "maximum": maximum})


def text_schema(description: str) -> Schema:
    return {**STRING, "description": description}


def binary_schema(description: str) -> Schema:
    return {**BINARY, "description": description}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


CURSOR_PARAM: Final = Parameter("cursor", STRING, "next_cursor of the page before.")
PAGING_PARAMS: Final = (
    Parameter("prefix", STRING, "Only names with this prefix."),
    integer_param("page_size", "", api_types.PAGE_SIZE, minimum=1, maximum=api_types.PAGE_SIZE_MAX),
    CURSOR_PARAM,
)
CONSISTENCY_PARAM: Final = Parameter(
    "consistency",
    {"enum": ["eventual", "strong"]},
    "strong: only records that survive a power cut. Waits for an fsync.",
)


def _inlined(value: Any, parts: Mapping[str, Schema] = _EMPTY) -> Any:
    """Replace references to parts by their schemas, and apply what `described` says about a field."""
    if isinstance(value, list):
        return [_inlined(item, parts) for item in value]
    if not isinstance(value, dict):
        return value
    if DOCUMENTED in value:
        value = {key: item for key, item in value.items() if key != DOCUMENTED} | value[DOCUMENTED]
    reference = value.get("$ref")
    if isinstance(reference, str) and reference in parts:
        return _inlined(parts[reference], parts)
    if reference is not None:
        value = {key: item for key, item in value.items() if key != "type"}  # the reference says more
    return {key: _inlined(item, parts) for key, item in value.items()}


# ── schemas that are no type of ours ──────────────────────────────────────────────────────────────

TOPIC_NAME: Final[Schema] = _inlined(msgspec.json.schema(api_types.TopicName))
USER_NAME: Final[Schema] = _inlined(msgspec.json.schema(api_types.UserName))
NODE_NAME: Final[Schema] = _inlined(msgspec.json.schema(api_types.NodeName))
LEASE_MS: Final[Schema] = {"type": "integer", "minimum": LEASE_MS_MIN, "maximum": LEASE_MS_MAX}
_PATH_PARAMETERS: Final[dict[str, Schema]] = {
    "topic": TOPIC_NAME,
    "router": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"},
    "base": {**COUNT, "description": "The first seq of the segment."},
    "seq": {**COUNT, "description": "The seq of the record."},
    "file": {"enum": ["data", "idx", "foot", "del"]},
    "wid": STRING,
    "channel": {
        "type": "string",
        "description": "!handler@domain",
        "pattern": "^![A-Za-z0-9/._-]{1,256}@[A-Za-z0-9.:\\[\\]-]+$",
        "maxLength": 511,
    },
    "group": TOPIC_NAME,
    "chunk": {
        **STRING,
        "description": "Owner, time and a random number: three hexadecimal numbers with - between them.",
    },
}
_MATCH: Final[Schema] = {
    "description": 'A tag, `"p*"` for a prefix, or `["tag","Eq","v"]`, `["tag","Glob","p*"]`.',
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
}


def _channel_settings() -> dict[str, Schema]:
    limits = ChannelLimits()
    defaults = {
        "max_clients": limits.clients_max,
        "max_payload_size": limits.payload_bytes_max,
        "max_persist_messages": limits.persist_messages_max,
        "message_flush_interval": 0,
    }
    texts = {
        "max_payload_size": "Bytes.",
        "message_flush_interval": "Milliseconds; 0: every message is synced.",
    }
    return {
        **{name: {**COUNT, "default": value, "description": texts.get(name, "")} for name, value in defaults.items()},
        "persist": {**BOOLEAN, "default": False},
        "type": {"enum": ["pubsub", "fifo"], "default": "pubsub"},
    }


_WARNINGS: Final[Schema] = {
    "type": "array",
    "items": STRING,
    "description": "Parts of the request that had no effect, as in the header Tidelog-Warning.",
}


# ── components ────────────────────────────────────────────────────────────────────────────────────


def _types_in(module: Any) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    ]


_DECODER_VARIANTS: Final = (
    api_types.LargeRecord,
    api_types.LargeWrite,
    api_types.PlainRecord,
    api_types.PlainWrite,
)
_ABSTRACT: Final = (
    response_types.Body,
    response_types.TimedBody,
    response_types.TopicBody,
    response_types.AppendedBody,
    response_types.ChannelBody,
    response_types.Part,
    response_types.RouterOptions,
)


def _components() -> dict[str, Schema]:
    """Every request and response type. Parts of a response are described in place."""
    requests = [each for each in _types_in(api_types) if each not in _DECODER_VARIANTS]
    responses = [each for each in _types_in(response_types) if each not in _ABSTRACT]
    types = [*requests, TopicConfig, *responses]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    for schema in schemas.values():
        schema.pop("title", None)
        if "description" in schema:  # Python 3.13 removes the indentation of docstrings, older versions keep it
            schema["description"] = " ".join(schema["description"].split())
    for each in responses:
        if issubclass(each, response_types.TimedBody):
            schemas[each.__name__]["properties"]["performance"] = schema_ref("Performance")
            schemas[each.__name__]["required"].append("performance")
            schemas[each.__name__]["properties"]["warnings"] = _WARNINGS
    settings = _channel_settings()
    schemas["ChannelSettings"] = {"type": "object", "properties": settings, "required": []}
    schemas["Match"] = _MATCH
    _add_engine_limits(schemas)
    every_setting: Schema = {"type": "object", "properties": settings, "required": list(settings)}
    for name in ("ChannelPut", "Channel"):
        schemas[name]["properties"]["config"] = every_setting
    parts = {
        f"#/components/schemas/{each.__name__}": schemas.pop(each.__name__)
        for each in responses
        if issubclass(each, response_types.Part) and not issubclass(each, response_types.Body)
    }
    return {name: _inlined(schema, parts) for name, schema in schemas.items()}


def _add_engine_limits(schemas: dict[str, Schema]) -> None:
    """Limits that the engine checks, not the decoder: they are configuration, or rules between fields."""
    limits = EngineConfig()
    delay_ms = nullable({**COUNT, "maximum": 1 << 47})
    record = schemas["RecordToWrite"]["properties"]
    record["data"] = {"description": f"Any JSON, at most {limits.record_bytes_max} bytes together with meta."}
    record["tag"]["description"] = f"For deletion by tag; at most {limits.tag_bytes_max} bytes."
    record["node"]["description"] = f"The origin of the record; at most {limits.node_bytes_max} bytes."
    record["meta"] = {
        **nullable({"type": "object"}),
        "default": None,
        "description": f"At most {limits.meta_keys_max} keys and {limits.meta_bytes_max} bytes.",
    }
    record["$encoding"] = {**nullable({"enum": ["base64"]}), "description": "`base64`: data is bytes, encoded as text."}
    record["run_at_ms"] = {**delay_ms, "description": "A job: the time before which it cannot be claimed."}
    record["delay_ms"] = {
        **delay_ms,
        "description": "A job: how long it cannot be claimed; not together with run_at_ms.",
    }
    record["priority"] = {
        **nullable({"type": "integer", "minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX}),
        "description": "A job: a higher priority is claimed first.",
    }
    write = schemas["Write"]["properties"]
    write["records"] |= {"minItems": 1, "maxItems": limits.batch_records_max}
    write["config"] = {
        **nullable(schema_ref("TopicConfig")),
        "description": "For a write that creates its topic; needs the scope admin.",
    }
    schemas["Delete"]["anyOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("before_seq", "match")
    ]
    schemas["Claim"]["properties"]["lease_ms"]["anyOf"] = nullable(LEASE_MS)["anyOf"]
    schemas["Extend"]["properties"]["lease_ms"] |= LEASE_MS
    schemas["ChangeAcl"]["properties"]["kind"] = {"enum": list(ACL_KINDS)}
    schemas["ErrorInfo"]["properties"]["code"] = {"enum": sorted(STATUS_BY_CODE)}
    schemas["TopicConfig"] = _topic_config_schema(schemas["TopicConfig"]["properties"])


def _topic_config_schema(fields: dict[str, Schema]) -> Schema:
    for name, minimum, maximum in (
        ("lease_ms", LEASE_MS_MIN, LEASE_MS_MAX),
        ("claim_jitter_ms", 0, CLAIM_JITTER_MS_MAX),
        ("priority", -(1 << 31), (1 << 31) - 1),
    ):
        fields[name] |= {"minimum": minimum, "maximum": maximum}
    for name in ("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "max_deliveries"):
        fields[name] |= {"minimum": 0}
    for name in ("hot_retain_segments", "hot_retain_bytes"):
        text = "Of the newest sealed segments that stay on the disk where there is a cold store. null: as the server's."
        fields[name] = {**nullable({"type": "integer", "minimum": 0}), "default": None, "description": text}
    fields["durability"] = {**nullable({"enum": ["ephemeral", "memory", "disk", "fsync"]}), "default": "disk"}
    fields["dead_letter"] = {**nullable(TOPIC_NAME), "default": None}
    fields["durable"] = {"type": "boolean", "default": False, "description": "Without durability: true is fsync."}
    fields["consistency"] |= {"description": "strong: readers get only records that survive a power cut."}
    fields["max_record_bytes"] |= {
        "minimum": 1,
        "maximum": MAX_RECORD_BYTES_MAX,
        "description": "Data of one streamed record.",
    }
    text = "A PUT replaces the whole config: a field that is not given takes its default. Responses have every field."
    return {"type": "object", "description": text, "properties": {name: fields[name] for name in (*KEYS, *ADDED)}}


# ── the document ──────────────────────────────────────────────────────────────────────────────────

_ERRORS_OF_JSON_BODIES: Final = ("payload_too_large", "unsupported_media_type")
# Probes too: a server may ask for a key on them, and it refuses a page of another site. An unknown parameter
# in the query and a name that is reserved are invalid requests.
_ERRORS_OF_EVERY_ROUTE: Final = ("invalid_request", "unauthorized", "forbidden", "method_not_allowed")
_ERRORS_OF_SECURED_ROUTES: Final = ("throttled", "internal", "not_ready", "shutting_down")
_SECURITY_SCHEMES: Final[Schema] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key with the scopes of the operation."},
    "token": {"type": "apiKey", "in": "query", "name": "token", "description": "For clients that cannot set headers."},
    "readToken": {"type": "apiKey", "in": "query", "name": "token", "description": "A token of POST /v0/tokens."},
}


def build_document(routes: Iterable[Route]) -> Schema:
    paths: dict[str, Schema] = {}
    for route in routes:
        item: Schema = {method.lower(): _operation_json(endpoint) for method, endpoint in route.methods.items()}
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS[name]} for name in names
            ]
        paths[route.path] = item
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidelog",
            "version": __version__,
            "summary": "A durable event log.",
            "description": "Clients ignore fields that they do not know. Where the server does, it reports them in "
            "`warnings`; a strict server refuses them.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": _SECURITY_SCHEMES,
            "responses": _error_responses(),
        },
    }


_SCOPE_ORDER: Final = ("read", "write", "delete", "admin")


def _security_names(endpoint: Endpoint) -> tuple[str, ...]:
    if endpoint.is_probe:
        return ()
    if endpoint.read_token_in_query:
        return ("bearer", "readToken")
    return ("bearer", "token") if endpoint.token_in_query or endpoint.handler_authenticates else ("bearer",)


def _operation_json(endpoint: Endpoint) -> Schema:
    operation = _OPERATIONS[endpoint.handler]
    scopes = sorted(endpoint.scopes, key=_SCOPE_ORDER.index)
    security = _security_names(endpoint)
    described: Schema = {
        "operationId": operation.id,
        "summary": operation.summary,
        "security": [{name: scopes if name == "bearer" else []} for name in security],
        "parameters": [_parameter_json(param) for param in operation.params],
        "responses": _responses_json(operation, is_secured=bool(security)),
    }
    if operation.description:
        described["description"] = operation.description
    content = _content_json(operation.request, operation.request_content)
    if content:
        described["requestBody"] = {"required": operation.body_required, "content": content}
    return described


def _parameter_json(param: Parameter) -> Schema:
    described: Schema = {"name": param.name, "in": param.location, "schema": param.schema}
    if param.required:
        described["required"] = True
    return {**described, "description": param.description} if param.description else described


def _content_json(body: type | str | tuple[type, ...] | None, others: Mapping[str, Schema]) -> Schema:
    content = dict(others)
    if isinstance(body, tuple):
        content = {JSON_MEDIA_TYPE: {"anyOf": [schema_ref(each.__name__) for each in body]}, **content}
    elif body is not None:
        content = {JSON_MEDIA_TYPE: _body_schema(body), **content}
    return {media_type: {"schema": schema} for media_type, schema in content.items()}


def _body_schema(body: type | str) -> Schema:
    if isinstance(body, str):
        return schema_ref(body)
    return {"type": "object"} if body is dict else schema_ref(body.__name__)


def _responses_json(operation: Operation, *, is_secured: bool) -> Schema:
    content = _content_json(operation.response, operation.response_content)
    responses: Schema = {
        str(status): {"description": REASON_PHRASES[status], **({"content": content} if content else {})}
        for status in operation.statuses
    }
    codes = {*_ERRORS_OF_EVERY_ROUTE, *operation.errors, *(_ERRORS_OF_SECURED_ROUTES if is_secured else ())}
    if operation.request is not None:
        codes |= {*_ERRORS_OF_JSON_BODIES}
    for status in sorted({STATUS_BY_CODE[code] for code in codes}):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


def _error_responses() -> Schema:
    """Errors by status: one envelope, and the codes that it may have."""
    codes_by_status: dict[int, list[str]] = {}
    for code, status in STATUS_BY_CODE.items():
        codes_by_status.setdefault(status, []).append(code)
    responses: Schema = {}
    for status, codes in codes_by_status.items():
        response: Schema = {
            "description": f"{REASON_PHRASES[status]}: {', '.join(codes)}",
            "content": {JSON_MEDIA_TYPE: {"schema": schema_ref("Error")}},
        }
        if status in (429, 503):
            response["headers"] = {"Retry-After": {"schema": COUNT, "description": "Seconds."}}
        responses[str(status)] = response
    return responses
