"""Opaque cursors: base64url without padding, so that they can be pasted into a URL as they are.

list page    {"after":"orders"}       SSE id    {"jobs":2,"orders":17}    every topic of the session, keys sorted
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from functools import lru_cache

import msgspec

_encode = msgspec.json.Encoder(order="deterministic").encode
_after = msgspec.json.Decoder(dict[str, str])
_positions = msgspec.json.Decoder(dict[str, int])


class BadCursor(Exception):
    """Text that no server of ours has handed out."""


def _pack(value: Mapping[str, object]) -> bytes:
    return urlsafe_b64encode(_encode(value)).rstrip(b"=")


def _unpack(text: str) -> bytes:
    try:
        # Both alphabets, with padding and without: a cursor may have been through a proxy or an older client.
        plain = text.encode("ascii").rstrip(b"=").replace(b"+", b"-").replace(b"/", b"_")
        made = urlsafe_b64decode(plain + b"=" * (-len(plain) % 4))
        if urlsafe_b64encode(made).rstrip(b"=") != plain:
            raise BadCursor(text)
        return made
    except ValueError:
        raise BadCursor(text) from None


def page(after: str) -> str:
    return _pack({"after": after}).decode()


def unpage(text: str) -> str:
    """The name to go on behind."""
    try:
        return _after.decode(_unpack(text))["after"]
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
        raise BadCursor(text) from None


def positions(cursors: Mapping[str, int]) -> bytes:
    return _position(*cursors.items()) if len(cursors) == 1 else _pack(cursors)


@lru_cache(256)
def _position(where: tuple[str, int]) -> bytes:
    """One topic: what its watchers are told of a write is the same for all of them."""
    return _pack(dict((where,)))


def unpositions(text: str) -> dict[str, int]:
    try:
        return _positions.decode(_unpack(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadCursor(text) from None
