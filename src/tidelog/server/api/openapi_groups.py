"""Groups of consumers and the ledger of gaps, in the OpenAPI document."""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from tidelog.engine.notes import Cause
from tidelog.server.api import gaps
from tidelog.server.api.auth import DELETE, READ, WRITE
from tidelog.server.api.openapi_parts import JSON, Operation, Param
from tidelog.server.api.openapi_schemas import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    TS,
    Schema,
    each,
    nullable,
    number,
    obj,
    ref,
)
from tidelog.server.api.openapi_schemas import SCHEMAS as KNOWN
from tidelog.wire import requests

_TOPIC: Final = "/v0/topics/{topic}"
_GROUP: Final = f"{_TOPIC}/groups/{{group}}"
_BODY: Final = ("invalid_request", "topic_not_found", "payload_too_large", "unsupported_media_type")
_ROWS: Final = (
    Param("from", COUNT, "Rows of this time or later, in milliseconds since the epoch."),
    Param("limit", number("", gaps.LIMIT, least=1, most=gaps.LIMIT_MAX)),
    Param("cursor", TEXT, "next_cursor of the page before."),
)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        f"{_TOPIC}/groups",
        "listGroups",
        "The groups of consumers of a topic, by name",
        (READ,),
        gives={200: {JSON: ref("GroupList")}},
        refuses=("topic_not_found",),
    ),
    Operation(
        "GET",
        _GROUP,
        "getGroup",
        "Where a group stands, and how far it is behind",
        (READ,),
        gives={200: {JSON: ref("GroupShown")}},
        refuses=("topic_not_found", "group_not_found"),
    ),
    Operation(
        "PUT",
        _GROUP,
        "putGroup",
        "Make a group, or set its hold",
        (WRITE,),
        takes={JSON: ref("PutGroup")},
        body_required=False,
        gives={200: {JSON: ref("GroupPut")}, 201: {JSON: ref("GroupPut")}},
        refuses=(*_BODY, "cursor_conflict"),
        text="Without hold_bytes there is no hold. `from` is for a group that is made; one that is there stays.",
    ),
    Operation(
        "DELETE",
        _GROUP,
        "dropGroup",
        "Forget a group",
        (DELETE,),
        gives={200: {JSON: ref("GroupDropped")}},
        refuses=("invalid_request", "topic_not_found", "group_not_found"),
    ),
    Operation(
        "POST",
        f"{_GROUP}/commit",
        "commitGroup",
        "Everything up to a seq was dealt with",
        (WRITE,),
        takes={JSON: ref("CommitGroup")},
        gives={200: {JSON: ref("GroupCommitted")}},
        refuses=(*_BODY, "cursor_conflict"),
        text="Makes the group where there is none. A seq beyond the head, one before the last, and a group that is not "
        "at `expect` are a cursor_conflict.",
    ),
    Operation(
        "POST",
        f"{_GROUP}/fetch",
        "fetchGroup",
        "The records behind a group, which stays where it is",
        (READ,),
        takes={JSON: ref("Fetch")},
        body_required=False,
        gives={200: {JSON: ref("Page")}},
        refuses=(*_BODY, "group_not_found"),
    ),
    Operation(
        "POST",
        f"{_GROUP}/reset",
        "resetGroup",
        "Let a group go anywhere, or say what that would do",
        (WRITE,),
        takes={JSON: ref("ResetGroup")},
        gives={200: {JSON: ref("GroupReset")}},
        refuses=(*_BODY, "group_not_found", "cursor_conflict"),
    ),
    Operation(
        "GET",
        f"{_TOPIC}/gaps",
        "listTopicGaps",
        "What was removed of a topic, and why",
        (READ,),
        _ROWS,
        gives={200: {JSON: ref("TopicGaps")}},
        refuses=("invalid_request", "topic_not_found"),
        text="Also of a topic that was dropped.",
    ),
    Operation(
        "GET",
        "/v0/gaps",
        "listGaps",
        "What was removed of all topics that the key is for, and why",
        (READ,),
        _ROWS,
        gives={200: {JSON: ref("GapList")}},
        refuses=("invalid_request",),
    ),
)

_PERFORMANCE: Final = {"performance": ref("Performance")}
_STATE: Final[dict[str, Schema]] = {
    "group": TEXT,
    "position": {**COUNT, "description": "The last seq that was committed."},
    "head_seq": COUNT,
    "lag": obj({"records": COUNT, "bytes": COUNT, "seconds": NUMBER}, "What it has still to read; seconds: its age."),
    "hold_bytes": {**COUNT, "description": "How much retention may be held up for it; 0: not at all."},
    "hold_broken": {**FLAG, "description": "Records that it had still to read were lost."},
    "last_commit_ts": nullable(TS),
}
_ROW: Final = obj(
    {
        "topic": TEXT,
        "topic_id": {**COUNT, "description": "Another one after the topic was dropped and made again."},
        "cause": {"enum": list(get_args(Cause))},
        "first": COUNT,
        "last": {**COUNT, "description": "Included."},
        "records": {**COUNT, "description": "How many of the range went now."},
        "bytes": COUNT,
        "ts_ms": TS,
        "actor": nullable(TEXT),
        "about": TEXT,
        "seq": {**COUNT, "description": "Of the row; 0 while it is not written yet."},
    }
)


def _sent() -> dict[str, Schema]:
    types = (requests.PutGroup, requests.CommitGroup, requests.ResetGroup, requests.Fetch)
    _, made = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for schema in made.values():
        schema.pop("title", None)
    for schema, name in ((made["PutGroup"], "from"), (made["ResetGroup"], "to")):
        schema["properties"][name] = {
            **({"default": "earliest"} if name == "from" else {}),
            "description": "A seq counts as passed; of a time, the records from then on are still to be read.",
            "anyOf": [{"enum": ["earliest", "latest"]}, COUNT, ref("Moment")],
        }
    made["Moment"]["properties"]["ts"] = TS
    for name in ("limit", "max_batch_bytes", "wait_ms"):
        made["Fetch"]["properties"][name] = KNOWN["Diff"]["properties"][name]
    return made


SCHEMAS: Final[dict[str, Schema]] = {
    **_sent(),
    "GroupList": obj({"topic": TEXT, "groups": each(obj(_STATE)), **_PERFORMANCE}),
    "GroupShown": obj({"topic": TEXT, **_STATE, **_PERFORMANCE}),
    "GroupPut": obj({"topic": TEXT, "created": FLAG, **_STATE, **_PERFORMANCE}),
    "GroupDropped": obj({"topic": TEXT, "group": TEXT, "deleted": FLAG, **_PERFORMANCE}),
    "GroupCommitted": obj({"topic": TEXT, "group": TEXT, "position": COUNT, **_PERFORMANCE}),
    "GroupReset": obj(
        {
            "topic": TEXT,
            "group": TEXT,
            "from": COUNT,
            "to": COUNT,
            "records": {**COUNT, "description": "To be read again, or passed over."},
            "bytes": COUNT,
            "gap": nullable(ref("Tombstone")),
            "preview": FLAG,
            **_PERFORMANCE,
        }
    ),
    "TopicGaps": obj({"topic": TEXT, "gaps": each(_ROW), "next_cursor?": TEXT, **_PERFORMANCE}),
    "GapList": obj({"gaps": each(_ROW), "next_cursor?": TEXT, **_PERFORMANCE}),
}
