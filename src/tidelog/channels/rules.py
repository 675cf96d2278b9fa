"""[policy] What a change makes of a channel. Each function takes the channel as it is and gives it as it will be,
or says why not; nobody's memory and no disk is touched until that has been saved.

    nobody ──join──▶ owner alone ──join──▶ owner and members ──leave──▶ …
                         │ leave                 │ the owner leaves
                         ▼                       ▼
                       gone           pubsub: the next member by name is the owner
                                      fifo:   gone

An owner is always a member. A fifo channel persists, and never becomes a pubsub one again.

[policy] Who and what can be named: channels, users, domains. Decides, touches nothing.

    !handler@domain     a channel; the handler has 1 to 256 of A-Z a-z 0-9 / . _ -
    user@domain         a user; 1 to 256 letters, digits, . _ -; the whole has at most 510 bytes
    domain              a dotted name, an address, [IPv6], each with or without a port; at most 253

Names are compared as they are written: no case is folded, no character is normalised, because the
directory of a channel is a hash of these bytes.

[policy] Access lists: whether a name is on one, and what a change makes of it. Decides, touches nothing.

Rules, in order of authority:
  1. An empty list lets everybody.
  2. A user who is listed may.
  3. Where users of a domain are listed, a listing of that whole domain counts for nothing: users win.
  4. A bare domain lets all its users.

The owner is not exempt: one who is missing from a list that is not empty may not either.

Limits of all channels of one directory. Built once at the edge and announced to whoever connects.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from tidelog.errors import AlreadyMember, BadInput, ChannelFull, Forbidden, NotMember, TooLarge, WrongType
from tidelog.formats.channel_meta import AclKind, ChannelAcl, ChannelConfig, ChannelMeta

USER_BYTES_MAX: Final = 510  # what the message log has room for
_NAME_CACHE_ENTRIES: Final = 1 << 14  # of those looked at last: each publish asks about the same few again

_HANDLER_PATTERN: Final = re.compile(r"[A-Za-z0-9/._-]{1,256}")
_USER_PATTERN: Final = re.compile(r"[\w.-]{1,256}")
_DOMAIN_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN_PATTERN: Final = re.compile(
    rf"(?:{_DOMAIN_LABEL}(?:\.{_DOMAIN_LABEL})*|\[[0-9A-Fa-f:.]{{2,45}}\])(?::[0-9]{{1,5}})?"
)


def is_domain(text: str) -> bool:
    return len(text) <= 253 and _DOMAIN_PATTERN.fullmatch(text) is not None


@lru_cache(_NAME_CACHE_ENTRIES)
def is_user(text: str) -> bool:
    if not _is_encodable(text):
        return False
    user, at, domain = text.partition("@")
    known = _USER_PATTERN.fullmatch(user) is not None and is_domain(domain)
    return bool(at) and known and len(text.encode()) <= USER_BYTES_MAX


def domain_of(name: str) -> str:
    """What stands behind the `@`; all of a bare domain."""
    return name.rpartition("@")[2]


@lru_cache(_NAME_CACHE_ENTRIES)
def is_channel(text: str) -> bool:
    handler, at, domain = text[1:].partition("@")
    return text[:1] == "!" and bool(at) and _HANDLER_PATTERN.fullmatch(handler) is not None and is_domain(domain)


def check_channel(name: object) -> str:
    """The name of a channel, or BadInput."""
    if not isinstance(name, str):
        raise BadInput(f"a channel's name is text, not {type(name).__name__}; nothing was done")
    if not is_channel(name):
        raise BadInput(
            f"{_quote_short(name)} is no channel: write !handler@domain, the handler of letters, digits and / . _ -, "
            f"at most "
            "256; nothing was done"
        )
    return name


def check_user(name: object) -> str:
    """The name of a user, or BadInput."""
    if not isinstance(name, str):
        raise BadInput(f"a user's name is text, not {type(name).__name__}; nothing was done")
    if not is_user(name):
        raise BadInput(
            f"{_quote_short(name)} is no user: write user@domain, the user of letters, digits and . _ -, at most 256; "
            "nothing was done"
        )
    return name


def check_entry(name: object) -> str:
    """An entry of an ACL: a user, or a whole domain."""
    if isinstance(name, str) and (is_user(name) or is_domain(name)):
        return name
    shown = _quote_short(name) if isinstance(name, str) else type(name).__name__
    raise BadInput(f"{shown} is neither a user (user@domain) nor a domain; nothing was changed")


@lru_cache(_NAME_CACHE_ENTRIES)
def directory_name(channel: str) -> str:
    """The directory of a channel: lowercase hex SHA-256 of its name, the same for ever."""
    return sha256(channel.encode()).hexdigest()


def shard_of(channel: str, shards: int) -> int:
    """The shard a channel is pinned to: the same in every process, so never `hash`."""
    return int(directory_name(channel)[:16], 16) % shards


def _is_encodable(text: str) -> bool:
    return text.isprintable() and not any("\ud800" <= char <= "\udfff" for char in text)


def _quote_short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…").encode("ascii", "backslashreplace").decode()


ACL_KINDS: tuple[AclKind, ...] = ("join", "publish", "read")


def is_allowed(entries: tuple[str, ...], user: str) -> bool:
    """Whether a sorted list lets this user."""
    if not entries or _contains(entries, user):
        return True
    domain = domain_of(user)
    return _contains(entries, domain) and not any("@" in entry and domain_of(entry) == domain for entry in entries)


def entries_for(acl: ChannelAcl, kind: str) -> tuple[str, ...]:
    """One of the three lists, or BadInput."""
    if kind not in ACL_KINDS:
        raise BadInput(f"there is no access list {kind!r}, there are {', '.join(ACL_KINDS)}; nothing was changed")
    found: tuple[str, ...] = getattr(acl, kind)
    return found


def update_entries(
    entries: tuple[str, ...], *, add: Iterable[object] = (), remove: Iterable[object] = ()
) -> tuple[str, ...]:
    """The list after a change, sorted. Adding what is there and removing what is not change nothing."""
    gone = {check_entry(entry) for entry in remove}
    return tuple(sorted(({*entries} | {check_entry(entry) for entry in add}) - gone))


def count_users(entries: tuple[str, ...]) -> int:
    """How many users stand on a list; domains do not count against its limit."""
    return sum("@" in entry for entry in entries)


def _contains(entries: tuple[str, ...], name: str) -> bool:
    at = bisect_left(entries, name)
    return at < len(entries) and entries[at] == name


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """Ceilings, and what a new channel starts with."""

    auth: bool = True
    """Users are who they say they are. Without it membership means nothing across a restart, so nothing is kept
    and nothing is restored."""

    domain: str | None = None
    """Channels of other domains are refused; None takes them all."""

    channels_max: int = 5_000
    """A join that would make one more channel is refused. What is restored is never refused."""

    clients_max: int = 100
    """Default and ceiling of a channel's `max_clients`."""

    channels_per_client_max: int = 100
    """How many channels a user may join; restored memberships are kept whatever it says."""

    payload_bytes_max: int = 64 << 10
    """Default and ceiling of a channel's `max_payload_size`."""

    persist_messages_max: int = 1_000
    """Default and ceiling of a channel's `max_persist_messages`; 0: no channel persists."""

    flush_interval_ms_max: int = 60_000
    """Ceiling of a channel's `message_flush_interval`: how far back a power cut may reach."""

    history_max: int = 100
    """Messages in one answer; a page says where the next one begins."""

    queue_max: int = 2_048
    """What a subscriber may have waiting. One more, and it is cut off with an event that says so."""

    shards: int = 16
    """Channels are pinned to one of these by a hash of their name; those of one shard take turns."""

    logs_open_max: int = 128
    """How many message logs stay open; each holds three descriptors. Others are opened when they are needed."""

    segment_bytes: int = 8 << 20
    """A message log is sealed past this, or when it holds half of what is kept, and dropped segment by segment."""

    def __post_init__(self) -> None:
        for name in ("channels_max", "clients_max", "payload_bytes_max", "history_max", "queue_max"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("channels_per_client_max", "shards", "logs_open_max", "segment_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("persist_messages_max", "flush_interval_ms_max"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} is {getattr(self, name)}, it must not be negative")
        if self.payload_bytes_max > self.segment_bytes:
            raise BadInput(
                f"payload_bytes_max ({self.payload_bytes_max}) must not exceed segment_bytes ({self.segment_bytes}): "
                "such a message would fit no segment"
            )

    def default_config(self) -> ChannelConfig:
        """The settings of a channel that nobody has configured."""
        return ChannelConfig(self.clients_max, self.payload_bytes_max, self.persist_messages_max, False, 0, "pubsub")

    def to_dict(self) -> dict[str, object]:
        """What a client should know before it asks for more."""
        return asdict(self)


_CONFIG_FIELDS = ChannelConfig.__struct_fields__
_LIMIT_BY_SETTING = {
    "max_clients": "clients_max",
    "max_payload_size": "payload_bytes_max",
    "max_persist_messages": "persist_messages_max",
    "message_flush_interval": "flush_interval_ms_max",
}


class LeaveResult(NamedTuple):
    """What a leave comes to: the channel afterwards, None where it ends; and who owns it now, if that is news."""

    meta: ChannelMeta | None
    promoted: str | None


def new_channel(handler: str, limits: ChannelLimits) -> ChannelMeta:
    """A channel that nobody has joined."""
    return ChannelMeta(handler, None, limits.default_config(), ChannelAcl(), ())


def is_member(meta: ChannelMeta, user: str) -> bool:
    at = bisect_left(meta.members, user)
    return at < len(meta.members) and meta.members[at] == user


def check_owner(meta: ChannelMeta, user: str, action: str) -> None:
    if user != meta.owner:
        raise Forbidden(f"{meta.handler}: only its owner may {action}, and that is not {user}; nothing was changed")


def check_member(meta: ChannelMeta, user: str) -> None:
    if not is_member(meta, user):
        raise NotMember(meta.handler, user)


def check_allowed(meta: ChannelMeta, kind: str, user: str) -> None:
    if not is_allowed(entries_for(meta.acl, kind), user):
        raise Forbidden(
            f"{meta.handler}: {user} is not on its list of those who may {kind}; nothing was done, ask the owner"
        )


def check_type(meta: ChannelMeta, required: str) -> None:
    if meta.config.type != required:
        raise WrongType(meta.handler, type=meta.config.type, wanted=required)


def check_payload(meta: ChannelMeta, size: int) -> None:
    if size > meta.config.max_payload_size:
        raise TooLarge(f"the payload for {meta.handler}", size=size, limit=meta.config.max_payload_size)


def check_may_publish(meta: ChannelMeta, user: str) -> None:
    """Raise unless this user may publish here now."""
    check_type(meta, "pubsub")
    check_member(meta, user)
    check_allowed(meta, "publish", user)


def check_may_read(meta: ChannelMeta, user: str) -> None:
    """Raise unless this user may see messages here now."""
    check_member(meta, user)
    check_allowed(meta, "read", user)


def add_member(meta: ChannelMeta, user: str) -> ChannelMeta:
    """With one more member; the first one owns it."""
    check_allowed(meta, "join", user)
    if is_member(meta, user):
        raise AlreadyMember(meta.handler, user)
    if len(meta.members) >= meta.config.max_clients:
        raise ChannelFull(meta.handler, limit=meta.config.max_clients)
    at = bisect_left(meta.members, user)
    members = (*meta.members[:at], user, *meta.members[at:])
    return msgspec.structs.replace(meta, members=members, owner=meta.owner or user)


def remove_member(meta: ChannelMeta, user: str) -> LeaveResult:
    """Without a member."""
    check_member(meta, user)
    members = tuple(member for member in meta.members if member != user)
    if not members or (user == meta.owner and meta.config.type == "fifo"):
        return LeaveResult(None, None)
    promoted = members[0] if user == meta.owner else None
    return LeaveResult(msgspec.structs.replace(meta, members=members, owner=promoted or meta.owner), promoted)


def change_acl(
    meta: ChannelMeta, kind: str, *, add: Iterable[object] = (), remove: Iterable[object] = ()
) -> ChannelMeta:
    """With another access list."""
    listed = update_entries(entries_for(meta.acl, kind), add=add, remove=remove)
    if count_users(listed) > meta.config.max_clients:
        raise Forbidden(
            f"{meta.handler}: {count_users(listed)} users on its {kind} list would be more than the "
            f"{meta.config.max_clients} it can have; nothing was changed"
        )
    return msgspec.structs.replace(meta, acl=msgspec.structs.replace(meta.acl, **{kind: listed}))


def change_config(meta: ChannelMeta, changes: Mapping[str, object], limits: ChannelLimits) -> ChannelMeta:
    """With other settings; those that are not named stay."""
    if unknown := sorted(set(changes) - set(_CONFIG_FIELDS)):
        raise BadInput(
            f"a channel has no setting {unknown[0]!r}, it has {', '.join(_CONFIG_FIELDS)}; nothing was changed"
        )
    for name, value in changes.items():
        _check_setting(name, value, limits)
    config: ChannelConfig = msgspec.structs.replace(meta.config, **changes)
    if (config.persist or config.type == "fifo") and not limits.auth:
        raise Forbidden(f"{meta.handler}: nothing persists while users are not authenticated; nothing was changed")
    if meta.config.type == "fifo" and config.type != "fifo":
        raise BadInput(f"{meta.handler}: a fifo channel stays one; nothing was changed")
    if config.type == "fifo" and not config.persist:
        raise BadInput(f"{meta.handler}: a fifo channel persists; nothing was changed, set persist as well")
    if config.persist and config.max_persist_messages < 1:
        raise BadInput(f"{meta.handler}: to persist it must keep at least one message; nothing was changed")
    return msgspec.structs.replace(meta, config=config)


def _check_setting(name: str, value: object, limits: ChannelLimits) -> None:
    if name == "persist":
        if not isinstance(value, bool):
            raise BadInput(f"persist is true or false, not {value!r}; nothing was changed")
    elif name == "type":
        if value not in ("pubsub", "fifo"):
            raise BadInput(f"a channel is of type pubsub or fifo, not {value!r}; nothing was changed")
    else:
        ceiling: int = getattr(limits, _LIMIT_BY_SETTING[name])
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= ceiling:
            raise BadInput(f"{name} is {value!r}, it must lie between 0 and {ceiling}; nothing was changed")


def page_of(entries: tuple[str, ...], number: object, size: object, *, size_max: int = 100) -> tuple[str, ...]:
    """One page of a list, counted from 1."""
    for name, value in (("page", number), ("page_size", size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{name} is {value!r}, the least is 1; nothing was done")
    assert isinstance(number, int)
    assert isinstance(size, int)
    size = min(size, size_max)
    return entries[(number - 1) * size : number * size]
