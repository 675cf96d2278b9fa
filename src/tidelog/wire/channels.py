"""What clients say to channels: bodies of requests, and what a WebSocket command has in common with them."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

MESSAGES_MAX: Final = 1_000  # of one publish; more is refused
PAGE: Final = 100  # members in one answer


class Message(Struct):
    """What is said: as text, or as bytes in base64. One of the two."""

    payload: str | None = None
    payload_base64: str | None = None


class Publish(Message):
    """One message, or several with consecutive seqs. `stream`: of whose events it is to be left out."""

    messages: list[Message] | None = None
    qos: int = 1
    stream: str | None = None


class Join(Struct):
    """`user`: somebody else, whom the owner invites. `config`: of a channel that this makes."""

    user: str | None = None
    config: dict[str, Any] = {}


class Leave(Struct):
    """`user`: somebody else, whom the owner sends away."""

    user: str | None = None


class ChangeAcl(Struct):
    kind: str
    add: list[str] = []
    remove: list[str] = []
