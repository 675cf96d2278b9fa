"""The routes of queues in the OpenAPI document, and the shapes of what they take and answer.

What the OpenAPI document says of routers.

Groups of consumers and the ledger of gaps, in the OpenAPI document.

Channels, in the OpenAPI document.

Numbered batches and what is staged for them, in the OpenAPI document.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from tidelog import api_types
from tidelog.channels import ChannelLimits
from tidelog.channels.rules import ACL_KINDS
from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.engine.pending_removals import RemovalCause
from tidelog.server.auth import ADMIN, DELETE, READ, WRITE
from tidelog.server.handlers import topics
from tidelog.server.handlers.queues import HISTORY_COLUMNS, HISTORY_LIMIT, HISTORY_LIMIT_MAX
from tidelog.server.openapi_schemas import (
    ARROW_MEDIA_TYPE,
    BOOLEAN,
    COUNT,
    DURABILITY_FIELD,
    EVENT_STREAM_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    NDJSON_MEDIA_TYPE,
    NUMBER,
    OCTET_STREAM_MEDIA_TYPE,
    PAGING_PARAMS,
    STRING,
    TIMESTAMP,
    TOPIC_NAME,
    Operation,
    Parameter,
    Schema,
    array_of,
    flag_param,
    integer_schema,
    nullable,
    object_schema,
    schema_ref,
)
from tidelog.server.openapi_schemas import SCHEMAS as KNOWN
from tidelog.server.request import ARROW

JOB_EVENTS: Final = (
    *("enqueued", "claimed", "extended", "nacked", "expired", "released", "acked", "dead_lettered", "redriven"),
    "restarted",
)
_QUEUE_BODY_ERRORS: Final = ("invalid_request", "payload_too_large", "unsupported_media_type")
_QUEUE_ERRORS: Final = ("topic_not_found", "not_a_queue")
_NODE_SCHEMA: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": api_types.NODE_BYTES_MAX}
_LEASE_SCHEMA: Final[Schema] = {"type": "integer", "minimum": LEASE_MS_MIN, "maximum": LEASE_MS_MAX}
_LEASE_TOKEN_SCHEMA: Final[Schema] = {"type": "string", "pattern": "^(lease_[0-9a-f]{1,16})?$"}
_QUEUE_PERFORMANCE: Final = {"performance": schema_ref("Performance")}
_SETTLED_FIELDS: Final[dict[str, Schema]] = {"ready": COUNT, "in_flight": COUNT, **_QUEUE_PERFORMANCE}


def _settle_operation(verb: str, body: str, answer: str, summary: str) -> Operation:
    return Operation(
        "POST",
        f"/v0/topics/{{topic}}/{verb}",
        verb,
        summary,
        (WRITE,),
        request_body={JSON_MEDIA_TYPE: schema_ref(body)},
        responses={200: {JSON_MEDIA_TYPE: schema_ref(answer)}},
        error_codes=(*_QUEUE_BODY_ERRORS, *_QUEUE_ERRORS, "batch_too_large"),
        description="What the node does not hold, or not under that lease, is skipped and no error.",
    )


QUEUE_OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "POST",
        "/v0/topics/{topic}/claim",
        "claim",
        "Lease jobs of a queue",
        (READ, WRITE),
        request_body={JSON_MEDIA_TYPE: schema_ref("Claim")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Claimed")}},
        error_codes=(*_QUEUE_BODY_ERRORS, *_QUEUE_ERRORS),
    ),
    _settle_operation("ack", "Ack", "Acked", "Jobs are done: remove them"),
    _settle_operation("nack", "Nack", "Nacked", "Give jobs back, at once or after a while"),
    _settle_operation("extend", "Extend", "Extended", "Hold jobs longer, from now on"),
    Operation(
        "GET",
        "/v0/topics/{topic}/work",
        "work",
        "Jobs as they come, leased to this connection",
        (READ, WRITE),
        (
            Parameter("node", _NODE_SCHEMA, "Who holds the leases.", required=True),
            Parameter(
                "max",
                integer_schema("Jobs held at once and not settled.", 1, minimum=1, maximum=api_types.CLAIM_JOBS_MAX),
            ),
            Parameter("lease_ms", _LEASE_SCHEMA, "The queue's own where it is absent."),
        ),
        responses={
            200: {EVENT_STREAM_MEDIA_TYPE: {"type": "string", "description": "job, error. The id of a job is its seq."}}
        },
        error_codes=("invalid_request", *_QUEUE_ERRORS, "not_acceptable"),
        security=("bearer", "token"),
        description="Jobs are settled by ack and nack. What is still held when the connection ends is free at once.",
    ),
    Operation(
        "GET",
        "/v0/topics/{topic}/history",
        "history",
        "What happened to the jobs of a queue, oldest first",
        (READ,),
        (
            Parameter("from_seq", integer_schema("The last seq of the history that the reader has.", 0)),
            Parameter("limit", integer_schema("Events at most.", HISTORY_LIMIT, minimum=1, maximum=HISTORY_LIMIT_MAX)),
            Parameter("format", {"enum": ["json", "ndjson", "arrow"]}, "Instead of an Accept header."),
        ),
        responses={
            200: {
                JSON_MEDIA_TYPE: schema_ref("History"),
                NDJSON_MEDIA_TYPE: {"type": "string", "description": "One HistoryEvent a line."},
                ARROW_MEDIA_TYPE: {
                    "type": "string",
                    "contentEncoding": "binary",
                    "description": f"An IPC stream with the columns {', '.join(HISTORY_COLUMNS)}.",
                },
            }
        },
        error_codes=("invalid_request", *_QUEUE_ERRORS, "not_acceptable"),
    ),
    Operation(
        "POST",
        "/v0/topics/{topic}/redrive",
        "redrive",
        "Put records of a dead-letter topic back into their queues",
        (WRITE,),
        request_body={JSON_MEDIA_TYPE: schema_ref("Redrive")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Redriven")}},
        error_codes=(*_QUEUE_BODY_ERRORS, *_QUEUE_ERRORS),
        description="A crash in the middle may put one batch back twice and loses none. A key that is for certain "
        "names only "
        "moves records to these and leaves the others where they are.",
    ),
)

_JOB_SCHEMA: Final = object_schema(
    {
        "$seq": COUNT,
        "lease_id": {
            **_LEASE_TOKEN_SCHEMA,
            "description": "Given with ack, nack or extend it fences off a holder that is late.",
        },
        "deadline": {**TIMESTAMP, "description": "When the lease runs out, milliseconds since the epoch."},
        "$ts": TIMESTAMP,
        "$tag?": STRING,
        "deliveries": {**COUNT, "description": "How often it was handed out, with this time."},
        "data": {},
        "$encoding?": {"const": "base64"},
        "meta?": {"type": "object"},
    }
)


def _queue_request_schemas() -> dict[str, Schema]:
    """What clients send, from the types that decode it."""
    types = (api_types.Claim, api_types.Ack, api_types.Nack, api_types.Extend, api_types.Redrive)
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for name, schema in made.items():
        schema.pop("title", None)
        fields: dict[str, Any] = schema["properties"]
        if name != "Redrive":
            fields["node"] = _NODE_SCHEMA
        if "seqs" in fields:
            fields["seqs"] = array_of(COUNT, maxItems=api_types.SETTLE_SEQS_MAX)
            fields["lease_ids"] = {
                **array_of(_LEASE_TOKEN_SCHEMA, maxItems=api_types.SETTLE_SEQS_MAX),
                "description": 'One for each seq, or none at all; "" is no token.',
            }
    claim = made["Claim"]["properties"]
    claim["max"] = integer_schema("0 is 1.", 1, maximum=api_types.CLAIM_JOBS_MAX)
    claim["lease_ms"] = {**nullable(_LEASE_SCHEMA), "description": "The queue's own where it is absent."}
    made["Nack"]["properties"]["delay_ms"] = integer_schema(
        "Not before so long from now.", 0, maximum=api_types.DELAY_MS_MAX
    )
    made["Extend"]["properties"]["lease_ms"] = {**_LEASE_SCHEMA, "description": "From now on."}
    asked = made["Redrive"]["properties"]
    asked["to"] = {**nullable(TOPIC_NAME), "description": "The queue; where absent, that which each of them came from."}
    asked["match"] = schema_ref("Match")
    asked["limit"] = integer_schema("Records at most.", 1_000, maximum=api_types.REDRIVE_RECORDS_MAX)
    asked["rate"] = {
        **nullable({"type": "integer", "minimum": 1}),
        "description": f"Records a second at most; the request ends after {api_types.REDRIVE_S_MAX} seconds of them.",
    }
    return made


QUEUE_SCHEMAS: Final[dict[str, Schema]] = {
    **_queue_request_schemas(),
    "Claimed": object_schema(
        {"topic": STRING, "claimed": array_of(_JOB_SCHEMA), "count": COUNT, "ready": COUNT, **_QUEUE_PERFORMANCE}
    ),
    "Acked": object_schema({"topic": STRING, "acked": COUNT, "skipped": array_of(COUNT), **_SETTLED_FIELDS}),
    "Nacked": object_schema({"topic": STRING, "nacked": COUNT, "skipped": array_of(COUNT), **_SETTLED_FIELDS}),
    "Extended": object_schema(
        {
            "topic": STRING,
            "extended": COUNT,
            "skipped": array_of(COUNT),
            "deadlines": {"type": "object", "additionalProperties": TIMESTAMP, "description": "By seq."},
            **_QUEUE_PERFORMANCE,
        }
    ),
    "History": object_schema(
        {
            "topic": STRING,
            "events": array_of(schema_ref("HistoryEvent")),
            "count": COUNT,
            "next_from_seq": {**COUNT, "description": "from_seq of the next request."},
            **_QUEUE_PERFORMANCE,
        }
    ),
    "HistoryEvent": object_schema(
        {
            "at": {**COUNT, "description": "Its seq in the history."},
            "ts_ms": TIMESTAMP,
            "event": {"enum": list(JOB_EVENTS)},
            "seq?": {**COUNT, "description": "Of the job; of the first one, where they were enqueued together."},
            "last_seq?": COUNT,
            "node?": STRING,
            "lease_id?": COUNT,
            "deliveries?": COUNT,
            "waited_ms?": {"type": "integer", "description": "claimed: since it was enqueued."},
            "deadline_ms?": {**TIMESTAMP, "description": "Of the lease; of a nack, when it can be had again."},
        }
    ),
    "Redriven": object_schema(
        {
            "topic": STRING,
            "redriven": COUNT,
            "queues": {"type": "object", "additionalProperties": COUNT, "description": "How many went where."},
            "skipped": {**COUNT, "description": "Nobody knows where they came from, or somebody holds them."},
            **_QUEUE_PERFORMANCE,
        }
    ),
}


ROUTER_OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        "/v0/routers",
        "listRouters",
        "The routers that the key is for, by name",
        (READ,),
        (
            *PAGING_PARAMS,
            Parameter("source", TOPIC_NAME, "Only those from this topic."),
            Parameter("dest", TOPIC_NAME, "Only those to it."),
        ),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("RouterList")}},
        error_codes=("invalid_request",),
    ),
    Operation(
        "PUT",
        "/v0/routers/{router}",
        "putRouter",
        "Make a router, or replace its options",
        (ADMIN,),
        request_body={JSON_MEDIA_TYPE: schema_ref("RouterToMake")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("RouterMade")}, 201: {JSON_MEDIA_TYPE: schema_ref("RouterMade")}},
        error_codes=(
            *("invalid_request", "topic_not_found", "topic_exists_incompatible", "router_cycle"),
            *("payload_too_large", "unsupported_media_type"),
        ),
        description="Records that the source gets from now on are passed on to the dest; topics that are not there "
        "are made.",
    ),
    Operation(
        "GET",
        "/v0/routers/{router}",
        "getRouter",
        "A router, and how much it has passed on of all that its source holds",
        (READ,),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Router")}},
        error_codes=("router_not_found",),
    ),
    Operation(
        "DELETE",
        "/v0/routers/{router}",
        "dropRouter",
        "Stop passing on; copies stay",
        (DELETE,),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("RouterDropped")}},
    ),
)


_GROUP_TOPIC_PATH: Final = "/v0/topics/{topic}"
_GROUP_PATH: Final = f"{_GROUP_TOPIC_PATH}/groups/{{group}}"
_GROUP_BODY_ERRORS: Final = ("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type")
_GAP_PARAMS: Final = (
    Parameter("from", COUNT, "Rows of this time or later, in milliseconds since the epoch."),
    Parameter("limit", integer_schema("", topics.GAPS_LIMIT, minimum=1, maximum=topics.GAPS_LIMIT_MAX)),
    Parameter("cursor", STRING, "next_cursor of the page before."),
)

GROUP_OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        f"{_GROUP_TOPIC_PATH}/groups",
        "listGroups",
        "The groups of consumers of a topic, by name",
        (READ,),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GroupList")}},
        error_codes=("topic_not_found",),
    ),
    Operation(
        "GET",
        _GROUP_PATH,
        "getGroup",
        "Where a group stands, and how far it is behind",
        (READ,),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GroupShown")}},
        error_codes=("topic_not_found", "group_not_found"),
    ),
    Operation(
        "PUT",
        _GROUP_PATH,
        "putGroup",
        "Make a group, or set its hold",
        (WRITE,),
        request_body={JSON_MEDIA_TYPE: schema_ref("PutGroup")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GroupPut")}, 201: {JSON_MEDIA_TYPE: schema_ref("GroupPut")}},
        error_codes=(*_GROUP_BODY_ERRORS, "cursor_conflict"),
        description="Without hold_bytes there is no hold. `from` is for a group that is made; one that is there stays.",
    ),
    Operation(
        "DELETE",
        _GROUP_PATH,
        "dropGroup",
        "Forget a group",
        (DELETE,),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GroupDropped")}},
        error_codes=("invalid_request", "topic_not_found", "group_not_found"),
    ),
    Operation(
        "POST",
        f"{_GROUP_PATH}/commit",
        "commitGroup",
        "Everything up to a seq was dealt with",
        (WRITE,),
        request_body={JSON_MEDIA_TYPE: schema_ref("CommitGroup")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GroupCommitted")}},
        error_codes=(*_GROUP_BODY_ERRORS, "cursor_conflict"),
        description="Makes the group where there is none. A seq beyond the head, one before the last, and a group "
        "that is not "
        "at `expect` are a cursor_conflict.",
    ),
    Operation(
        "POST",
        f"{_GROUP_PATH}/fetch",
        "fetchGroup",
        "The records behind a group, which stays where it is",
        (READ,),
        request_body={JSON_MEDIA_TYPE: schema_ref("Fetch")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Page")}},
        error_codes=(*_GROUP_BODY_ERRORS, "group_not_found"),
    ),
    Operation(
        "POST",
        f"{_GROUP_PATH}/reset",
        "resetGroup",
        "Let a group go anywhere, or say what that would do",
        (WRITE,),
        request_body={JSON_MEDIA_TYPE: schema_ref("ResetGroup")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GroupReset")}},
        error_codes=(*_GROUP_BODY_ERRORS, "group_not_found", "cursor_conflict"),
    ),
    Operation(
        "GET",
        f"{_GROUP_TOPIC_PATH}/gaps",
        "listTopicGaps",
        "What was removed of a topic, and why",
        (READ,),
        _GAP_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("TopicGaps")}},
        error_codes=("invalid_request", "topic_not_found"),
        description="Also of a topic that was dropped.",
    ),
    Operation(
        "GET",
        "/v0/gaps",
        "listGaps",
        "What was removed of all topics that the key is for, and why",
        (READ,),
        _GAP_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("GapList")}},
        error_codes=("invalid_request",),
    ),
)

_GROUP_PERFORMANCE: Final = {"performance": schema_ref("Performance")}
_GROUP_FIELDS: Final[dict[str, Schema]] = {
    "group": STRING,
    "position": {**COUNT, "description": "The last seq that was committed."},
    "head_seq": COUNT,
    "lag": object_schema(
        {"records": COUNT, "bytes": COUNT, "seconds": NUMBER}, "What it has still to read; seconds: its age."
    ),
    "hold_bytes": {**COUNT, "description": "How much retention may be held up for it; 0: not at all."},
    "hold_broken": {**BOOLEAN, "description": "Records that it had still to read were lost."},
    "last_commit_ts": nullable(TIMESTAMP),
}
_GAP_ROW: Final = object_schema(
    {
        "topic": STRING,
        "topic_id": {**COUNT, "description": "Another one after the topic was dropped and made again."},
        "cause": {"enum": list(get_args(RemovalCause))},
        "first": COUNT,
        "last": {**COUNT, "description": "Included."},
        "records": {**COUNT, "description": "How many of the range went now."},
        "bytes": COUNT,
        "ts_ms": TIMESTAMP,
        "actor": nullable(STRING),
        "about": STRING,
        "seq": {**COUNT, "description": "Of the row; 0 while it is not written yet."},
    }
)


def _group_request_schemas() -> dict[str, Schema]:
    types = (api_types.PutGroup, api_types.CommitGroup, api_types.ResetGroup, api_types.Fetch)
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for schema in made.values():
        schema.pop("title", None)
    for schema, name in ((made["PutGroup"], "from"), (made["ResetGroup"], "to")):
        schema["properties"][name] = {
            **({"default": "earliest"} if name == "from" else {}),
            "description": "A seq counts as passed; of a time, the records from then on are still to be read.",
            "anyOf": [{"enum": ["earliest", "latest"]}, COUNT, schema_ref("Moment")],
        }
    made["Moment"]["properties"]["ts"] = TIMESTAMP
    for name in ("limit", "max_batch_bytes", "wait_ms"):
        made["Fetch"]["properties"][name] = KNOWN["Diff"]["properties"][name]
    return made


GROUP_SCHEMAS: Final[dict[str, Schema]] = {
    **_group_request_schemas(),
    "GroupList": object_schema(
        {"topic": STRING, "groups": array_of(object_schema(_GROUP_FIELDS)), **_GROUP_PERFORMANCE}
    ),
    "GroupShown": object_schema({"topic": STRING, **_GROUP_FIELDS, **_GROUP_PERFORMANCE}),
    "GroupPut": object_schema({"topic": STRING, "created": BOOLEAN, **_GROUP_FIELDS, **_GROUP_PERFORMANCE}),
    "GroupDropped": object_schema({"topic": STRING, "group": STRING, "deleted": BOOLEAN, **_GROUP_PERFORMANCE}),
    "GroupCommitted": object_schema({"topic": STRING, "group": STRING, "position": COUNT, **_GROUP_PERFORMANCE}),
    "GroupReset": object_schema(
        {
            "topic": STRING,
            "group": STRING,
            "from": COUNT,
            "to": COUNT,
            "records": {**COUNT, "description": "To be read again, or passed over."},
            "bytes": COUNT,
            "gap": nullable(schema_ref("Tombstone")),
            "preview": BOOLEAN,
            **_GROUP_PERFORMANCE,
        }
    ),
    "TopicGaps": object_schema(
        {"topic": STRING, "gaps": array_of(_GAP_ROW), "next_cursor?": STRING, **_GROUP_PERFORMANCE}
    ),
    "GapList": object_schema({"gaps": array_of(_GAP_ROW), "next_cursor?": STRING, **_GROUP_PERFORMANCE}),
}


CHANNEL: Final[Schema] = {
    "type": "string",
    "description": "!handler@domain",
    "pattern": "^![A-Za-z0-9/._-]{1,256}@[A-Za-z0-9.:\\[\\]-]+$",
    "maxLength": 511,
}
_CHANNEL_PATH: Final = "/v0/channels/{channel}"
_USER: Final[Schema] = {"type": "string", "description": "user@domain", "minLength": 3, "maxLength": 510}
_IDENTITY_PARAMS: Final = (
    Parameter("X-Tidelog-User", _USER, "Who asks, where the key does not say it or may speak for others.", "header"),
    Parameter("X-Tidelog-User-Token", STRING, "What the hook is shown of that user.", "header"),
)
_OPERATOR_PARAM: Final = flag_param("operator", False, "As the operator, which takes the scope admin.")
_CALLER_PARAMS: Final = (*_IDENTITY_PARAMS, _OPERATOR_PARAM)
_CHANNEL_BODY_ERRORS: Final = ("payload_too_large", "unsupported_media_type")
_CHANNEL_ERRORS: Final = ("invalid_request", "not_a_member", "channel_not_found", "channel_offline", "hook_failed")
_OCTETS: Final[Schema] = {"type": "string", "contentEncoding": "binary"}
_SEQ: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}
_STREAM_PARAM: Final = Parameter("X-Tidelog-Stream", STRING, "Bytes: of whose events it is to be left out.", "header")


def _query_param(name: str, schema: Schema, text: str) -> Parameter:
    return Parameter(name, schema, text)


CHANNEL_OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        "/v0/channels",
        "listChannels",
        "The channels that the user is in, by name",
        (READ,),
        (*PAGING_PARAMS, *_CALLER_PARAMS),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelList")}},
        error_codes=("invalid_request", "hook_failed"),
        description="For the operator all of them. With whom the server takes the caller for, and limits.",
    ),
    Operation(
        "PUT",
        _CHANNEL_PATH,
        "putChannel",
        "Make a channel, or change its settings",
        (WRITE,),
        _CALLER_PARAMS,
        {JSON_MEDIA_TYPE: schema_ref("ChannelSettings")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelPut")}, 201: {JSON_MEDIA_TYPE: schema_ref("ChannelPut")}},
        error_codes=(*_CHANNEL_ERRORS, *_CHANNEL_BODY_ERRORS),
        description="Whoever makes it owns it. Settings that are not named stay; only the owner changes them.",
    ),
    Operation(
        "GET",
        _CHANNEL_PATH,
        "getChannel",
        "What a channel is and holds",
        (READ,),
        _CALLER_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("Channel")}},
        error_codes=(*_CHANNEL_ERRORS, "cursor_recovery_required"),
    ),
    Operation(
        "DELETE",
        _CHANNEL_PATH,
        "deleteChannel",
        "End a channel, with all its messages",
        (DELETE,),
        _CALLER_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelDeleted")}},
        error_codes=_CHANNEL_ERRORS,
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/join",
        "joinChannel",
        "Become a member, or make somebody else one",
        (WRITE,),
        _CALLER_PARAMS,
        {JSON_MEDIA_TYPE: schema_ref("JoinChannel")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelJoined")}},
        error_codes=(*_CHANNEL_ERRORS, *_CHANNEL_BODY_ERRORS, "user_in_channel", "channel_full"),
        description="A channel that is not there is made. To invite, with `user`, is the owner's.",
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/leave",
        "leaveChannel",
        "End one's membership, or that of somebody else",
        (WRITE,),
        _CALLER_PARAMS,
        {JSON_MEDIA_TYPE: schema_ref("LeaveChannel")},
        body_required=False,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelLeft")}},
        error_codes=(*_CHANNEL_ERRORS, *_CHANNEL_BODY_ERRORS),
        description="To send somebody away, with `user`, is the owner's. The owner's place goes to the next by name; "
        "with the "
        "last member, or the owner of a fifo channel, the channel ends.",
    ),
    Operation(
        "GET",
        f"{_CHANNEL_PATH}/members",
        "listMembers",
        "Members by name, a page at a time",
        (READ,),
        (
            _query_param("page", {**_SEQ, "default": 1}, "Counted from 1."),
            _query_param(
                "page_size", {**_SEQ, "default": api_types.MEMBERS_PAGE_SIZE}, f"At most {api_types.MEMBERS_PAGE_SIZE}."
            ),
            *_CALLER_PARAMS,
        ),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelMembers")}},
        error_codes=_CHANNEL_ERRORS,
    ),
    Operation(
        "GET",
        f"{_CHANNEL_PATH}/acl",
        "getChannelAcl",
        "The access lists",
        (READ,),
        _CALLER_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelAcl")}},
        error_codes=_CHANNEL_ERRORS,
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/acl",
        "setChannelAcl",
        "Change one of the access lists",
        (WRITE,),
        _CALLER_PARAMS,
        {JSON_MEDIA_TYPE: schema_ref("ChangeAcl")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("AclChanged")}},
        error_codes=(*_CHANNEL_ERRORS, *_CHANNEL_BODY_ERRORS),
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/publish",
        "publishToChannel",
        "Say something to all members",
        (WRITE,),
        (_query_param("qos", {"enum": [0, 1], "default": 1}, "Of a body of bytes."), _STREAM_PARAM, *_IDENTITY_PARAMS),
        {JSON_MEDIA_TYPE: schema_ref("PublishToChannel"), OCTET_STREAM_MEDIA_TYPE: _OCTETS},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelAck")}},
        error_codes=(
            *_CHANNEL_ERRORS,
            *_CHANNEL_BODY_ERRORS,
            "record_too_large",
            "batch_too_large",
            "wrong_type",
            "rejected",
        ),
    ),
    Operation(
        "GET",
        f"{_CHANNEL_PATH}/history",
        "channelHistory",
        "What was said",
        (READ,),
        (
            _query_param("first", _SEQ, "Begin with this seq."),
            _query_param("newest", _SEQ, "Only so many, from the end."),
            _query_param("since", COUNT, "Begin at this time, in milliseconds since the epoch."),
            _query_param("last", _SEQ, "End with this seq."),
            _query_param("until", COUNT, "End at this time."),
            _query_param("limit", _SEQ, "This many at most; never more than limits.history_max."),
            flag_param("skip_damage", False, "Pass over messages that cannot be read."),
            *_CALLER_PARAMS,
        ),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelHistory")}},
        error_codes=(*_CHANNEL_ERRORS, "wrong_type", "persistence_not_enabled"),
    ),
    Operation(
        "GET",
        f"{_CHANNEL_PATH}/events",
        "followChannel",
        "What is said and who comes and goes, as it happens",
        (READ,),
        (
            Parameter("Last-Event-ID", STRING, "The last seq that the client has.", "header"),
            _query_param("from_seq", COUNT, "The same, for the first time; absent: from now on."),
            *_IDENTITY_PARAMS,
        ),
        responses={
            200: {
                EVENT_STREAM_MEDIA_TYPE: {
                    "type": "string",
                    "description": "subscribed, message, presence, gap, end, error.",
                }
            },
        },
        error_codes=(*_CHANNEL_ERRORS, "not_acceptable"),
        security=("bearer", "token"),
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/push",
        "pushToChannel",
        "Put one message at the end of a fifo channel",
        (WRITE,),
        _IDENTITY_PARAMS,
        {JSON_MEDIA_TYPE: schema_ref("ChannelMessage"), OCTET_STREAM_MEDIA_TYPE: _OCTETS},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelPushed")}},
        error_codes=(
            *_CHANNEL_ERRORS,
            *_CHANNEL_BODY_ERRORS,
            "record_too_large",
            "wrong_type",
            "queue_full",
            "cursor_recovery_required",
        ),
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/pop",
        "popFromChannel",
        "Take the oldest message of a fifo channel",
        (READ, WRITE),
        _IDENTITY_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelPopped")}},
        error_codes=(*_CHANNEL_ERRORS, "wrong_type", "queue_empty", "cursor_recovery_required"),
        description="At most once: a message whose answer is lost is gone.",
    ),
    Operation(
        "POST",
        f"{_CHANNEL_PATH}/clear",
        "clearChannel",
        "Pass over all that waits in a fifo channel",
        (DELETE,),
        _CALLER_PARAMS,
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChannelCleared")}},
        error_codes=(*_CHANNEL_ERRORS, "wrong_type"),
    ),
)

_CHANNEL_PERFORMANCE: Final = {"performance": schema_ref("Performance")}
_CHANNEL_FIELDS: Final[dict[str, Schema]] = {
    "channel": STRING,
    "type": {"enum": ["pubsub", "fifo"]},
    "owner": nullable(STRING),
    "members": {**COUNT, "description": "How many."},
    "persist": BOOLEAN,
}
_PAYLOAD_FIELDS: Final[dict[str, Schema]] = {
    "payload?": {**STRING, "description": "Where its bytes are UTF-8."},
    "payload_base64?": {**STRING, "description": "Where they are not."},
}
_MESSAGE_FIELDS: Final[dict[str, Schema]] = {
    "channel": STRING,
    "seq": COUNT,
    "ts": TIMESTAMP,
    "sender": STRING,
    **_PAYLOAD_FIELDS,
}
_MESSAGE_BODY_FIELDS: Final[dict[str, Schema]] = {"payload?": nullable(STRING), "payload_base64?": nullable(STRING)}
_ACL_ENTRIES: Final = array_of({"type": "string", "description": "user@domain, or a whole domain."})
_CHANNEL_LIMITS: Final = ChannelLimits()
_CHANNEL_SETTINGS: Final[dict[str, Schema]] = {
    "max_clients": integer_schema("", _CHANNEL_LIMITS.clients_max),
    "max_payload_size": integer_schema("Bytes.", _CHANNEL_LIMITS.payload_bytes_max),
    "max_persist_messages": integer_schema("", _CHANNEL_LIMITS.persist_messages_max),
    "persist": {**BOOLEAN, "default": False},
    "message_flush_interval": integer_schema("Milliseconds; 0: every message is synced.", 0),
    "type": {"enum": ["pubsub", "fifo"], "default": "pubsub"},
}

CHANNEL_SCHEMAS: Final[dict[str, Schema]] = {
    "ChannelSettings": object_schema({f"{name}?": schema for name, schema in _CHANNEL_SETTINGS.items()}),
    "ChannelList": object_schema(
        {
            "channels": array_of(object_schema(_CHANNEL_FIELDS)),
            "user": nullable(STRING),
            "unreadable?": {"type": "object", "description": "By directory: why.", "additionalProperties": STRING},
            "next_cursor?": STRING,
            "limits": {"type": "object"},
            **_CHANNEL_PERFORMANCE,
        }
    ),
    "ChannelPut": object_schema(
        {**_CHANNEL_FIELDS, "created": BOOLEAN, "config": object_schema(_CHANNEL_SETTINGS), **_CHANNEL_PERFORMANCE}
    ),
    "Channel": object_schema(
        {
            **_CHANNEL_FIELDS,
            "config": object_schema(_CHANNEL_SETTINGS),
            "first_seq": nullable(COUNT),
            "last_seq": nullable(COUNT),
            "waiting?": {**COUNT, "description": "Of a fifo channel, for its owner."},
            "holes?": {
                **array_of(array_of(COUNT)),
                "description": "Seqs that power cuts took before their sync: first and last of each range.",
            },
            **_CHANNEL_PERFORMANCE,
        }
    ),
    "ChannelDeleted": object_schema({"channel": STRING, "deleted": BOOLEAN, **_CHANNEL_PERFORMANCE}),
    "JoinChannel": object_schema({"user?": nullable(_USER), "config?": schema_ref("ChannelSettings")}),
    "LeaveChannel": object_schema({"user?": nullable(_USER)}),
    "ChannelJoined": object_schema(
        {
            "channel": STRING,
            "user": STRING,
            "owner": STRING,
            "members": COUNT,
            "created": BOOLEAN,
            **_CHANNEL_PERFORMANCE,
        }
    ),
    "ChannelLeft": object_schema(
        {"channel": STRING, "user": STRING, "ended": BOOLEAN, "owner": nullable(STRING), **_CHANNEL_PERFORMANCE}
    ),
    "ChannelMembers": object_schema(
        {"channel": STRING, "members": array_of(STRING), "page": COUNT, "total": COUNT, **_CHANNEL_PERFORMANCE}
    ),
    "ChannelAcl": object_schema(
        {
            "channel": STRING,
            "acl": object_schema({kind: array_of(STRING) for kind in ACL_KINDS}),
            **_CHANNEL_PERFORMANCE,
        }
    ),
    "ChangeAcl": object_schema({"kind": {"enum": list(ACL_KINDS)}, "add?": _ACL_ENTRIES, "remove?": _ACL_ENTRIES}),
    "AclChanged": object_schema(
        {"channel": STRING, "kind": STRING, "listed": array_of(STRING), **_CHANNEL_PERFORMANCE}
    ),
    "ChannelMessage": object_schema(_MESSAGE_BODY_FIELDS, "One of the two."),
    "PublishToChannel": object_schema(
        {
            **_MESSAGE_BODY_FIELDS,
            "messages?": nullable(array_of(schema_ref("ChannelMessage"), maxItems=api_types.PUBLISH_MESSAGES_MAX)),
            "qos?": {"enum": [0, 1], "default": 1},
            "stream?": nullable(STRING),
        }
    ),
    "ChannelAck": object_schema(
        {
            "channel": STRING,
            "first_seq": COUNT,
            "last_seq": COUNT,
            "count": COUNT,
            "ts": TIMESTAMP,
            "qos": {"enum": [0, 1], "description": "0: accepted. 1: kept as the channel says, and handed out."},
            "durable": {**BOOLEAN, "description": "Whether a power cut now would leave it."},
            "receivers": nullable({**COUNT, "description": "Whom it was handed to."}),
            **_CHANNEL_PERFORMANCE,
        }
    ),
    "ChannelHistory": object_schema(
        {
            "channel": STRING,
            "messages": array_of(object_schema(_MESSAGE_FIELDS)),
            "count": COUNT,
            "next_seq": COUNT,
            "first_seq": COUNT,
            "last_seq": COUNT,
            **_CHANNEL_PERFORMANCE,
        }
    ),
    "ChannelPushed": object_schema({"channel": STRING, "seq": COUNT, "ts": TIMESTAMP, **_CHANNEL_PERFORMANCE}),
    "ChannelPopped": object_schema({**_MESSAGE_FIELDS, **_CHANNEL_PERFORMANCE}),
    "ChannelCleared": object_schema({"channel": STRING, "cleared": COUNT, **_CHANNEL_PERFORMANCE}),
}


_BATCH_TOPIC_PATH: Final = "/v0/topics/{topic}"
_STAGING_PATH: Final = f"{_BATCH_TOPIC_PATH}/staging/{{chunk}}"
_CHECKSUM: Final = {**STRING, "pattern": "^[0-9a-f]{32}$"}
_BATCH_PERFORMANCE: Final = {"performance": schema_ref("Performance")}

BATCH_OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "PUT",
        _STAGING_PATH,
        "stageChunk",
        "Stage records for a numbered batch",
        (WRITE,),
        request_body={ARROW.decode(): {"type": "string", "format": "binary"}},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("ChunkStaged")}},
        error_codes=("invalid_request", "record_too_large", "unsupported_media_type"),
        description="An Arrow stream with data, and where there are such tag, node, meta and json. Nobody reads it "
        "before a "
        "batch is made of it; one that nobody makes is swept after a week.",
    ),
    Operation(
        "DELETE",
        _STAGING_PATH,
        "clearStaging",
        "Forget everything that an owner has staged",
        (WRITE,),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("StagingCleared")}},
        error_codes=("invalid_request",),
        description="Here the name is the owner's: the first part of the names of its chunks.",
    ),
    Operation(
        "POST",
        f"{_BATCH_TOPIC_PATH}/batches",
        "putBatch",
        "Make one batch of chunks, once",
        (WRITE,),
        request_body={JSON_MEDIA_TYPE: schema_ref("PutBatch")},
        responses={200: {JSON_MEDIA_TYPE: schema_ref("BatchPut")}, 201: {JSON_MEDIA_TYPE: schema_ref("BatchPut")}},
        error_codes=(
            "invalid_request",
            "not_found",
            "record_too_large",
            "topic_full",
            "batch_conflict",
            "payload_too_large",
            "unsupported_media_type",
        ),
        description="All chunks become one range of seqs, or nothing does. Repeated, also after a restart, it answers "
        "with "
        "the range of the first time. query_id tells two queries of one writer apart: the newest number under the same "
        "query_id is a repetition whatever its sum, another query_id is a batch_conflict. So are a known number with "
        "another sum, and a number below one that is known.",
    ),
    Operation(
        "GET",
        f"{_BATCH_TOPIC_PATH}/batches",
        "listBatches",
        "The last batches of a writer",
        (READ,),
        (Parameter("writer", {**STRING, "minLength": 1}, "Whose.", required=True),),
        responses={200: {JSON_MEDIA_TYPE: schema_ref("BatchList")}},
        error_codes=("invalid_request", "topic_not_found"),
    ),
)


def _batch_request_schemas() -> dict[str, Schema]:
    _, made = msgspec.json.schema_components((api_types.PutBatch,), ref_template="#/components/schemas/{name}")
    for schema in made.values():
        schema.pop("title", None)
    return made


BATCH_SCHEMAS: Final[dict[str, Schema]] = {
    **_batch_request_schemas(),
    "ChunkStaged": object_schema({"topic": STRING, "chunk": STRING, "bytes": COUNT, **_BATCH_PERFORMANCE}),
    "StagingCleared": object_schema({"topic": STRING, "removed": COUNT, **_BATCH_PERFORMANCE}),
    "BatchPut": object_schema(
        {
            "topic": STRING,
            "first_seq": COUNT,
            "last_seq": COUNT,
            "head_seq": COUNT,
            "count": COUNT,
            "deduped": {**BOOLEAN, "description": "It was written before."},
            **DURABILITY_FIELD,
            "created": BOOLEAN,
            **_BATCH_PERFORMANCE,
        }
    ),
    "BatchList": object_schema(
        {
            "topic": STRING,
            "writer": STRING,
            "batches": array_of(
                object_schema(
                    {"number": COUNT, "first_seq": COUNT, "last_seq": COUNT, "sum": _CHECKSUM, "query_id": STRING}
                )
            ),
            **_BATCH_PERFORMANCE,
        }
    ),
}
