"""What clients say of channels over a WebSocket, and the answers: told apart by `op`, as all commands are."""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Raw, Struct

from tidelog.wire import channels
from tidelog.wire.requests import NULL


class OfChannel(Struct, tag_field="op", kw_only=True):
    """A command about one channel."""

    channel: str
    request_id: Raw = NULL


class Join(OfChannel, tag="channel_join", kw_only=True):
    user: str | None = None
    config: dict[str, Any] = {}


class Leave(OfChannel, tag="channel_leave", kw_only=True):
    user: str | None = None


class Subscribe(OfChannel, tag="channel_subscribe", kw_only=True):
    from_seq: int | None = None


class Unsubscribe(OfChannel, tag="channel_unsubscribe", kw_only=True):
    pass


class Publish(OfChannel, tag="channel_publish", kw_only=True):
    payload: str | None = None
    payload_base64: str | None = None
    messages: list[channels.Message] | None = None
    qos: int = 1


class History(OfChannel, tag="channel_history", kw_only=True):
    first: int | None = None
    last: int | None = None
    newest: int | None = None
    since: int | None = None
    until: int | None = None
    limit: int | None = None


class Members(OfChannel, tag="channel_members", kw_only=True):
    page: int = 1
    page_size: int = channels.PAGE


class Configure(OfChannel, tag="channel_configure", kw_only=True):
    config: dict[str, Any] = {}


class SetAcl(OfChannel, tag="channel_acl", kw_only=True):
    kind: str
    add: list[str] = []
    remove: list[str] = []


class Delete(OfChannel, tag="channel_delete", kw_only=True):
    pass


class Push(OfChannel, tag="channel_push", kw_only=True):
    payload: str | None = None
    payload_base64: str | None = None


class Pop(OfChannel, tag="channel_pop", kw_only=True):
    pass


class Clear(OfChannel, tag="channel_clear", kw_only=True):
    pass


ChannelCommand: TypeAlias = (
    Join
    | Leave
    | Subscribe
    | Unsubscribe
    | Publish
    | History
    | Members
    | Configure
    | SetAcl
    | Delete
    | Push
    | Pop
    | Clear
)
