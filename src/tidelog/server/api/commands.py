"""What clients say over a WebSocket, and the answers: one JSON object a message, told apart by `op`."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from tidelog.server.api.channel_commands import ChannelCommand
from tidelog.wire import requests
from tidelog.wire.requests import NULL, U32, U64, BadBody, Cursor, Nodes, Record


class Subscribe(Struct, tag_field="op", tag="subscribe"):
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
    request_id: Raw = NULL

    def __post_init__(self) -> None:
        requests.within(self.from_seq, self.max_batch_bytes)


class Unsubscribe(Struct, tag_field="op", tag="unsubscribe"):
    topic: str | None = None
    topics: list[str] = []
    request_id: Raw = NULL


class Publish(Struct, tag_field="op", tag="publish"):
    topic: str
    records: list[Record]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: Raw = NULL
    disable_backpressure: bool = False
    return_seqs: bool = True
    request_id: Raw = NULL


class Ping(Struct, tag_field="op", tag="ping"):
    request_id: Raw = NULL


class Subscribed(Struct, tag_field="op", tag="subscribed"):
    request_id: Raw
    topics: dict[str, dict[str, int]]


class Unsubscribed(Struct, tag_field="op", tag="unsubscribed"):
    request_id: Raw
    topics: list[str]


class Ack(Struct, tag_field="op", tag="ack"):
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


class Pong(Struct, tag_field="op", tag="pong"):
    request_id: Raw


class Failed(Struct, tag_field="op", tag="error"):
    request_id: Raw
    code: str
    message: str


class _Id(Struct):
    request_id: Raw = NULL


Command: TypeAlias = Subscribe | Unsubscribe | Publish | Ping | ChannelCommand
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_ids = requests.decoder(_Id)
encode = msgspec.json.Encoder().encode


def decode(text: bytes) -> Command:
    """A message as a command. Raises BadBody."""
    return requests.decode(_commands, text)


def request_id(text: bytes) -> Raw:
    """The request_id of a message that is no command, as far as there is one."""
    try:
        return requests.decode(_ids, text).request_id
    except BadBody:
        return NULL
