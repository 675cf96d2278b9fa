"""[policy] Who and what can be named: channels, users, domains. Decides, touches nothing.

    !handler@domain     a channel; the handler has 1 to 256 of A-Z a-z 0-9 / . _ -
    user@domain         a user; 1 to 256 letters, digits, . _ -; the whole has at most 510 bytes
    domain              a dotted name, an address, [IPv6], each with or without a port; at most 253

Names are compared as they are written: no case is folded, no character is normalised, because the
directory of a channel is a hash of these bytes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import Final

from tidelog.errors import BadInput

USER_BYTES_MAX: Final = 510  # what the message log has room for
_NAMES_KEPT: Final = 1 << 14  # of those looked at last: each publish asks about the same few again

_HANDLER: Final = re.compile(r"[A-Za-z0-9/._-]{1,256}")
_USER: Final = re.compile(r"[\w.-]{1,256}")
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]{{2,45}}\])(?::[0-9]{{1,5}})?")


def is_domain(text: str) -> bool:
    return len(text) <= 253 and _DOMAIN.fullmatch(text) is not None


@lru_cache(_NAMES_KEPT)
def is_user(text: str) -> bool:
    if not _encodable(text):
        return False
    user, at, domain = text.partition("@")
    known = _USER.fullmatch(user) is not None and is_domain(domain)
    return bool(at) and known and len(text.encode()) <= USER_BYTES_MAX


def domain_of(name: str) -> str:
    """What stands behind the `@`; all of a bare domain."""
    return name.rpartition("@")[2]


@lru_cache(_NAMES_KEPT)
def is_channel(text: str) -> bool:
    handler, at, domain = text[1:].partition("@")
    return text[:1] == "!" and bool(at) and _HANDLER.fullmatch(handler) is not None and is_domain(domain)


def check_channel(name: object) -> str:
    """The name of a channel, or BadInput."""
    if not isinstance(name, str):
        raise BadInput(f"a channel's name is text, not {type(name).__name__}; nothing was done")
    if not is_channel(name):
        raise BadInput(
            f"{_shown(name)} is no channel: write !handler@domain, the handler of letters, digits and / . _ -, at most "
            "256; nothing was done"
        )
    return name


def check_user(name: object) -> str:
    """The name of a user, or BadInput."""
    if not isinstance(name, str):
        raise BadInput(f"a user's name is text, not {type(name).__name__}; nothing was done")
    if not is_user(name):
        raise BadInput(
            f"{_shown(name)} is no user: write user@domain, the user of letters, digits and . _ -, at most 256; "
            "nothing was done"
        )
    return name


def check_entry(name: object) -> str:
    """An entry of an ACL: a user, or a whole domain."""
    if isinstance(name, str) and (is_user(name) or is_domain(name)):
        return name
    shown = _shown(name) if isinstance(name, str) else type(name).__name__
    raise BadInput(f"{shown} is neither a user (user@domain) nor a domain; nothing was changed")


@lru_cache(_NAMES_KEPT)
def directory_name(channel: str) -> str:
    """The directory of a channel: lowercase hex SHA-256 of its name, the same for ever."""
    return sha256(channel.encode()).hexdigest()


def shard_of(channel: str, shards: int) -> int:
    """The shard a channel is pinned to: the same in every process, so never `hash`."""
    return int(directory_name(channel)[:16], 16) % shards


def _encodable(text: str) -> bool:
    return text.isprintable() and not any("\ud800" <= char <= "\udfff" for char in text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…").encode("ascii", "backslashreplace").decode()
