"""Commands and replies of a WebSocket: one JSON object per message, distinguished by `op`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from tidelog import api_types
from tidelog.api_types import JSON_NULL, U32, U64, BadBody, Cursor, Nodes, RecordToWrite
from tidelog.server.response_types import TimedBody, Watermarks


class ChannelCommandBase(Struct, tag_field="op", kw_only=True):
    """A command about one channel."""

    channel: str
    request_id: Raw = JSON_NULL


class ChannelJoinCommand(ChannelCommandBase, tag="channel_join", kw_only=True):
    user: str | None = None
    config: dict[str, Any] = {}


class ChannelLeaveCommand(ChannelCommandBase, tag="channel_leave", kw_only=True):
    user: str | None = None


class ChannelSubscribeCommand(ChannelCommandBase, tag="channel_subscribe", kw_only=True):
    from_seq: int | None = None


class ChannelUnsubscribeCommand(ChannelCommandBase, tag="channel_unsubscribe", kw_only=True):
    pass


class ChannelPublishCommand(ChannelCommandBase, tag="channel_publish", kw_only=True):
    payload: str | None = None
    payload_base64: str | None = None
    messages: list[api_types.ChannelMessage] | None = None
    qos: int = 1


class ChannelHistoryCommand(ChannelCommandBase, tag="channel_history", kw_only=True):
    first: int | None = None
    last: int | None = None
    newest: int | None = None
    since: int | None = None
    until: int | None = None
    limit: int | None = None


class ChannelMembersCommand(ChannelCommandBase, tag="channel_members", kw_only=True):
    page: int = 1
    page_size: int = api_types.MEMBERS_PAGE_SIZE


class ChannelConfigureCommand(ChannelCommandBase, tag="channel_configure", kw_only=True):
    config: dict[str, Any] = {}


class ChannelSetAclCommand(ChannelCommandBase, tag="channel_acl", kw_only=True):
    kind: str
    add: list[str] = []
    remove: list[str] = []


class ChannelDeleteCommand(ChannelCommandBase, tag="channel_delete", kw_only=True):
    pass


class ChannelPushCommand(ChannelCommandBase, tag="channel_push", kw_only=True):
    payload: str | None = None
    payload_base64: str | None = None


class ChannelPopCommand(ChannelCommandBase, tag="channel_pop", kw_only=True):
    pass


class ChannelClearCommand(ChannelCommandBase, tag="channel_clear", kw_only=True):
    pass


ChannelCommand: TypeAlias = (
    ChannelJoinCommand
    | ChannelLeaveCommand
    | ChannelSubscribeCommand
    | ChannelUnsubscribeCommand
    | ChannelPublishCommand
    | ChannelHistoryCommand
    | ChannelMembersCommand
    | ChannelConfigureCommand
    | ChannelSetAclCommand
    | ChannelDeleteCommand
    | ChannelPushCommand
    | ChannelPopCommand
    | ChannelClearCommand
)


class ChannelConfigured(TimedBody):
    """The reply to `ChannelConfigureCommand`, which creates no channel as the HTTP request does."""

    channel: str
    config: dict[str, Any]


class SubscribeCommand(Struct, tag_field="op", tag="subscribe"):
    topic: str | None = None
    topics: dict[str, Cursor] = {}
    from_seq: U64 = 0
    tail: bool = False
    node: Nodes = None
    limit: U32 = 1_000
    max_batch_bytes: U64 = 1 << 20
    include_data: bool = True
    include_tags: bool = False
    include_meta: bool = True
    lenient: bool = False
    consistency: Literal["eventual", "strong"] = "eventual"
    request_id: Raw = JSON_NULL

    def __post_init__(self) -> None:
        api_types.check_u64(self.from_seq, self.max_batch_bytes)


class UnsubscribeCommand(Struct, tag_field="op", tag="unsubscribe"):
    topic: str | None = None
    topics: list[str] = []
    request_id: Raw = JSON_NULL


class PublishCommand(Struct, tag_field="op", tag="publish"):
    topic: str
    records: list[RecordToWrite]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: Raw = JSON_NULL
    disable_backpressure: bool = False
    return_seqs: bool = True
    request_id: Raw = JSON_NULL


class PingCommand(Struct, tag_field="op", tag="ping"):
    request_id: Raw = JSON_NULL


class SubscribedReply(Struct, tag_field="op", tag="subscribed"):
    request_id: Raw
    topics: dict[str, Watermarks]


class UnsubscribedReply(Struct, tag_field="op", tag="unsubscribed"):
    request_id: Raw
    topics: list[str]


class PublishAck(Struct, tag_field="op", tag="ack"):
    request_id: Raw
    topic: str
    first_seq: int
    last_seq: int
    seqs: list[int] | None
    head_seq: int
    count: int
    created: bool
    deduped: bool
    durability: str
    performance: dict[str, float]


class PongReply(Struct, tag_field="op", tag="pong"):
    request_id: Raw


class ErrorReply(Struct, tag_field="op", tag="error"):
    request_id: Raw
    code: str
    message: str


class _RequestIdOnly(Struct):
    request_id: Raw = JSON_NULL


Command: TypeAlias = SubscribeCommand | UnsubscribeCommand | PublishCommand | PingCommand | ChannelCommand
_command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_request_id_decoder = api_types.json_decoder(_RequestIdOnly)
encode_reply = msgspec.json.Encoder().encode


def decode_command(text: bytes) -> Command:
    """Decode a message. Raises BadBody."""
    return api_types.decode_body(_command_decoder, text)


def extract_request_id(text: bytes) -> Raw:
    """The request_id of a message that is no command, or null."""
    try:
        return api_types.decode_body(_request_id_decoder, text).request_id
    except BadBody:
        return JSON_NULL
