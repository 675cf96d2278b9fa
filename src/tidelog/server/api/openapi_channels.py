"""Channels, in the OpenAPI document."""

from __future__ import annotations

from typing import Final

from tidelog.channels import ChannelLimits
from tidelog.channels.acl import KINDS
from tidelog.server.api.auth import DELETE, READ, WRITE
from tidelog.server.api.openapi_parts import EVENTS, JSON, OCTETS, PAGED, Operation, Param, flag
from tidelog.server.api.openapi_schemas import COUNT, FLAG, TEXT, TS, Schema, each, nullable, number, obj, ref
from tidelog.wire import channels

CHANNEL: Final[Schema] = {
    "type": "string",
    "description": "!handler@domain",
    "pattern": "^![A-Za-z0-9/._-]{1,256}@[A-Za-z0-9.:\\[\\]-]+$",
    "maxLength": 511,
}
_ONE: Final = "/v0/channels/{channel}"
_USER: Final[Schema] = {"type": "string", "description": "user@domain", "minLength": 3, "maxLength": 510}
_AS: Final = (
    Param("X-Tidelog-User", _USER, "Who asks, where the key does not say it or may speak for others.", "header"),
    Param("X-Tidelog-User-Token", TEXT, "What the hook is shown of that user.", "header"),
)
_OPERATOR: Final = flag("operator", False, "As the operator, which takes the scope admin.")
_WHO: Final = (*_AS, _OPERATOR)
_BODY: Final = ("payload_too_large", "unsupported_media_type")
_KNOWN: Final = ("invalid_request", "not_a_member", "channel_not_found", "channel_offline", "hook_failed")
_OCTETS: Final[Schema] = {"type": "string", "contentEncoding": "binary"}
_SEQ: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}
_STREAM: Final = Param("X-Tidelog-Stream", TEXT, "Bytes: of whose events it is to be left out.", "header")


def _param(name: str, schema: Schema, text: str) -> Param:
    return Param(name, schema, text)


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        "/v0/channels",
        "listChannels",
        "The channels that the user is in, by name",
        (READ,),
        (*PAGED, *_WHO),
        gives={200: {JSON: ref("ChannelList")}},
        refuses=("invalid_request", "hook_failed"),
        text="For the operator all of them. With whom the server takes the caller for, and limits.",
    ),
    Operation(
        "PUT",
        _ONE,
        "putChannel",
        "Make a channel, or change its settings",
        (WRITE,),
        _WHO,
        {JSON: ref("ChannelSettings")},
        body_required=False,
        gives={200: {JSON: ref("ChannelPut")}, 201: {JSON: ref("ChannelPut")}},
        refuses=(*_KNOWN, *_BODY),
        text="Whoever makes it owns it. Settings that are not named stay; only the owner changes them.",
    ),
    Operation(
        "GET",
        _ONE,
        "getChannel",
        "What a channel is and holds",
        (READ,),
        _WHO,
        gives={200: {JSON: ref("Channel")}},
        refuses=(*_KNOWN, "cursor_recovery_required"),
    ),
    Operation(
        "DELETE",
        _ONE,
        "deleteChannel",
        "End a channel, with all its messages",
        (DELETE,),
        _WHO,
        gives={200: {JSON: ref("ChannelDeleted")}},
        refuses=_KNOWN,
    ),
    Operation(
        "POST",
        f"{_ONE}/join",
        "joinChannel",
        "Become a member, or make somebody else one",
        (WRITE,),
        _WHO,
        {JSON: ref("JoinChannel")},
        body_required=False,
        gives={200: {JSON: ref("ChannelJoined")}},
        refuses=(*_KNOWN, *_BODY, "user_in_channel", "channel_full"),
        text="A channel that is not there is made. To invite, with `user`, is the owner's.",
    ),
    Operation(
        "POST",
        f"{_ONE}/leave",
        "leaveChannel",
        "End one's membership, or that of somebody else",
        (WRITE,),
        _WHO,
        {JSON: ref("LeaveChannel")},
        body_required=False,
        gives={200: {JSON: ref("ChannelLeft")}},
        refuses=(*_KNOWN, *_BODY),
        text="To send somebody away, with `user`, is the owner's. The owner's place goes to the next by name; with the "
        "last member, or the owner of a fifo channel, the channel ends.",
    ),
    Operation(
        "GET",
        f"{_ONE}/members",
        "listMembers",
        "Members by name, a page at a time",
        (READ,),
        (
            _param("page", {**_SEQ, "default": 1}, "Counted from 1."),
            _param("page_size", {**_SEQ, "default": channels.PAGE}, f"At most {channels.PAGE}."),
            *_WHO,
        ),
        gives={200: {JSON: ref("ChannelMembers")}},
        refuses=_KNOWN,
    ),
    Operation(
        "GET",
        f"{_ONE}/acl",
        "getChannelAcl",
        "The access lists",
        (READ,),
        _WHO,
        gives={200: {JSON: ref("ChannelAcl")}},
        refuses=_KNOWN,
    ),
    Operation(
        "POST",
        f"{_ONE}/acl",
        "setChannelAcl",
        "Change one of the access lists",
        (WRITE,),
        _WHO,
        {JSON: ref("ChangeAcl")},
        gives={200: {JSON: ref("AclChanged")}},
        refuses=(*_KNOWN, *_BODY),
    ),
    Operation(
        "POST",
        f"{_ONE}/publish",
        "publishToChannel",
        "Say something to all members",
        (WRITE,),
        (_param("qos", {"enum": [0, 1], "default": 1}, "Of a body of bytes."), _STREAM, *_AS),
        {JSON: ref("PublishToChannel"), OCTETS: _OCTETS},
        gives={200: {JSON: ref("ChannelAck")}},
        refuses=(*_KNOWN, *_BODY, "record_too_large", "batch_too_large", "wrong_type", "rejected"),
    ),
    Operation(
        "GET",
        f"{_ONE}/history",
        "channelHistory",
        "What was said",
        (READ,),
        (
            _param("first", _SEQ, "Begin with this seq."),
            _param("newest", _SEQ, "Only so many, from the end."),
            _param("since", COUNT, "Begin at this time, in milliseconds since the epoch."),
            _param("last", _SEQ, "End with this seq."),
            _param("until", COUNT, "End at this time."),
            _param("limit", _SEQ, "This many at most; never more than limits.history_max."),
            flag("skip_damage", False, "Pass over messages that cannot be read."),
            *_WHO,
        ),
        gives={200: {JSON: ref("ChannelHistory")}},
        refuses=(*_KNOWN, "wrong_type", "persistence_not_enabled"),
    ),
    Operation(
        "GET",
        f"{_ONE}/events",
        "followChannel",
        "What is said and who comes and goes, as it happens",
        (READ,),
        (
            Param("Last-Event-ID", TEXT, "The last seq that the client has.", "header"),
            _param("from_seq", COUNT, "The same, for the first time; absent: from now on."),
            *_AS,
        ),
        gives={
            200: {EVENTS: {"type": "string", "description": "subscribed, message, presence, gap, end, error."}},
        },
        refuses=(*_KNOWN, "not_acceptable"),
        security=("bearer", "token"),
    ),
    Operation(
        "POST",
        f"{_ONE}/push",
        "pushToChannel",
        "Put one message at the end of a fifo channel",
        (WRITE,),
        _AS,
        {JSON: ref("ChannelMessage"), OCTETS: _OCTETS},
        gives={200: {JSON: ref("ChannelPushed")}},
        refuses=(*_KNOWN, *_BODY, "record_too_large", "wrong_type", "queue_full", "cursor_recovery_required"),
    ),
    Operation(
        "POST",
        f"{_ONE}/pop",
        "popFromChannel",
        "Take the oldest message of a fifo channel",
        (READ, WRITE),
        _AS,
        gives={200: {JSON: ref("ChannelPopped")}},
        refuses=(*_KNOWN, "wrong_type", "queue_empty", "cursor_recovery_required"),
        text="At most once: a message whose answer is lost is gone.",
    ),
    Operation(
        "POST",
        f"{_ONE}/clear",
        "clearChannel",
        "Pass over all that waits in a fifo channel",
        (DELETE,),
        _WHO,
        gives={200: {JSON: ref("ChannelCleared")}},
        refuses=(*_KNOWN, "wrong_type"),
    ),
)

_PERFORMANCE: Final = {"performance": ref("Performance")}
_SHOWN: Final[dict[str, Schema]] = {
    "channel": TEXT,
    "type": {"enum": ["pubsub", "fifo"]},
    "owner": nullable(TEXT),
    "members": {**COUNT, "description": "How many."},
    "persist": FLAG,
}
_PAYLOAD: Final[dict[str, Schema]] = {
    "payload?": {**TEXT, "description": "Where its bytes are UTF-8."},
    "payload_base64?": {**TEXT, "description": "Where they are not."},
}
_MESSAGE: Final[dict[str, Schema]] = {"channel": TEXT, "seq": COUNT, "ts": TS, "sender": TEXT, **_PAYLOAD}
_SENT: Final[dict[str, Schema]] = {"payload?": nullable(TEXT), "payload_base64?": nullable(TEXT)}
_ENTRIES: Final = each({"type": "string", "description": "user@domain, or a whole domain."})
_LIMITS: Final = ChannelLimits()
_SETTINGS: Final[dict[str, Schema]] = {
    "max_clients": number("", _LIMITS.clients_max),
    "max_payload_size": number("Bytes.", _LIMITS.payload_bytes_max),
    "max_persist_messages": number("", _LIMITS.persist_messages_max),
    "persist": {**FLAG, "default": False},
    "message_flush_interval": number("Milliseconds; 0: every message is synced.", 0),
    "type": {"enum": ["pubsub", "fifo"], "default": "pubsub"},
}

SCHEMAS: Final[dict[str, Schema]] = {
    "ChannelSettings": obj({f"{name}?": schema for name, schema in _SETTINGS.items()}),
    "ChannelList": obj(
        {
            "channels": each(obj(_SHOWN)),
            "user": nullable(TEXT),
            "unreadable?": {"type": "object", "description": "By directory: why.", "additionalProperties": TEXT},
            "next_cursor?": TEXT,
            "limits": {"type": "object"},
            **_PERFORMANCE,
        }
    ),
    "ChannelPut": obj({**_SHOWN, "created": FLAG, "config": obj(_SETTINGS), **_PERFORMANCE}),
    "Channel": obj(
        {
            **_SHOWN,
            "config": obj(_SETTINGS),
            "first_seq": nullable(COUNT),
            "last_seq": nullable(COUNT),
            "waiting?": {**COUNT, "description": "Of a fifo channel, for its owner."},
            "holes?": {
                **each(each(COUNT)),
                "description": "Seqs that power cuts took before their sync: first and last of each range.",
            },
            **_PERFORMANCE,
        }
    ),
    "ChannelDeleted": obj({"channel": TEXT, "deleted": FLAG, **_PERFORMANCE}),
    "JoinChannel": obj({"user?": nullable(_USER), "config?": ref("ChannelSettings")}),
    "LeaveChannel": obj({"user?": nullable(_USER)}),
    "ChannelJoined": obj(
        {"channel": TEXT, "user": TEXT, "owner": TEXT, "members": COUNT, "created": FLAG, **_PERFORMANCE}
    ),
    "ChannelLeft": obj({"channel": TEXT, "user": TEXT, "ended": FLAG, "owner": nullable(TEXT), **_PERFORMANCE}),
    "ChannelMembers": obj({"channel": TEXT, "members": each(TEXT), "page": COUNT, "total": COUNT, **_PERFORMANCE}),
    "ChannelAcl": obj({"channel": TEXT, "acl": obj({kind: each(TEXT) for kind in KINDS}), **_PERFORMANCE}),
    "ChangeAcl": obj({"kind": {"enum": list(KINDS)}, "add?": _ENTRIES, "remove?": _ENTRIES}),
    "AclChanged": obj({"channel": TEXT, "kind": TEXT, "listed": each(TEXT), **_PERFORMANCE}),
    "ChannelMessage": obj(_SENT, "One of the two."),
    "PublishToChannel": obj(
        {
            **_SENT,
            "messages?": nullable(each(ref("ChannelMessage"), maxItems=channels.MESSAGES_MAX)),
            "qos?": {"enum": [0, 1], "default": 1},
            "stream?": nullable(TEXT),
        }
    ),
    "ChannelAck": obj(
        {
            "channel": TEXT,
            "first_seq": COUNT,
            "last_seq": COUNT,
            "count": COUNT,
            "ts": TS,
            "qos": {"enum": [0, 1], "description": "0: accepted. 1: kept as the channel says, and handed out."},
            "durable": {**FLAG, "description": "Whether a power cut now would leave it."},
            "receivers": nullable({**COUNT, "description": "Whom it was handed to."}),
            **_PERFORMANCE,
        }
    ),
    "ChannelHistory": obj(
        {
            "channel": TEXT,
            "messages": each(obj(_MESSAGE)),
            "count": COUNT,
            "next_seq": COUNT,
            "first_seq": COUNT,
            "last_seq": COUNT,
            **_PERFORMANCE,
        }
    ),
    "ChannelPushed": obj({"channel": TEXT, "seq": COUNT, "ts": TS, **_PERFORMANCE}),
    "ChannelPopped": obj({**_MESSAGE, **_PERFORMANCE}),
    "ChannelCleared": obj({"channel": TEXT, "cleared": COUNT, **_PERFORMANCE}),
}
