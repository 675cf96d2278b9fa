"""The rules of channels, without I/O: names, access lists, limits, and the result of each change.

    no members ──join──▶ owner only ──join──▶ owner and members ──leave──▶ …
                             │ leave                 │ the owner leaves
                             ▼                       ▼
                          deleted         pubsub: the next member by name becomes the owner
                                          fifo:   deleted

An owner is always a member. A fifo channel always persists and never becomes a pubsub channel.

    !handler@domain     a channel; the handler has 1 to 256 of A-Z a-z 0-9 / . _ -
    user@domain         a user; 1 to 256 letters, digits, . _ -; at most 510 bytes in total
    domain              a dotted name, an address, [IPv6], each with or without a port; at most 253

Names are compared byte for byte: no case folding and no normalisation, because the directory of a channel is a hash
of its name.

Access lists, first matching rule:
  1. An empty list allows every user.
  2. A listed user is allowed.
  3. If users of a domain are listed, an entry for that whole domain has no effect.
  4. A domain entry allows all its users.
The owner is not exempt.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple, TypeAlias, TypedDict

import msgspec

from tidelog.errors import AlreadyMember, BadInput, ChannelFull, Forbidden, NotMember, TooLarge, WrongType
from tidelog.formats.small_files import AclKind, ChannelAcl, ChannelConfig, ChannelMeta, ChannelType
from tidelog.times import Duration

USER_BYTES_MAX: Final = 510  # the limit of the message log's format
_NAME_CACHE_ENTRIES: Final = 1 << 14  # each publish checks the same few names again

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
    user, separator, domain = text.partition("@")
    is_valid = _USER_PATTERN.fullmatch(user) is not None and is_domain(domain)
    return bool(separator) and is_valid and len(text.encode()) <= USER_BYTES_MAX


def domain_of(name: str) -> str:
    """Return the part after the `@`; the whole text of a bare domain."""
    return name.rpartition("@")[2]


@lru_cache(_NAME_CACHE_ENTRIES)
def is_channel(text: str) -> bool:
    handler, separator, domain = text[1:].partition("@")
    return text[:1] == "!" and bool(separator) and bool(_HANDLER_PATTERN.fullmatch(handler)) and is_domain(domain)


def check_channel(name: object) -> str:
    """Return the name of a channel or raise BadInput."""
    if isinstance(name, str) and is_channel(name):
        return name
    raise BadInput(
        f"{_quote_short(name)} is not the name of a channel: write !handler@domain, the handler of letters, digits "
        "and / . _ -, at most 256; nothing was done"
    )


def check_user(name: object) -> str:
    """Return the name of a user or raise BadInput."""
    if isinstance(name, str) and is_user(name):
        return name
    raise BadInput(
        f"{_quote_short(name)} is not the name of a user: write user@domain, the user of letters, digits and . _ -, "
        "at most 256; nothing was done"
    )


def check_entry(name: object) -> str:
    """Return an entry of an access list, a user or a domain, or raise BadInput."""
    if isinstance(name, str) and (is_user(name) or is_domain(name)):
        return name
    raise BadInput(f"{_quote_short(name)} is neither a user (user@domain) nor a domain; nothing was changed")


def check_payloads(payloads: object) -> None:
    """Raise BadInput unless this is a list of payloads."""
    if not isinstance(payloads, Sequence) or isinstance(payloads, str | bytes):
        raise BadInput(f"payloads are a list of bytes, not {payloads!r:.80}; nothing was written")


@lru_cache(_NAME_CACHE_ENTRIES)
def directory_name(channel: str) -> str:
    """Return the directory of a channel: lowercase hex SHA-256 of its name."""
    return sha256(channel.encode()).hexdigest()


def shard_of(channel: str, shards: int) -> int:
    """Return the shard of a channel; the same in every process, so `hash` cannot be used."""
    return int(directory_name(channel)[:16], 16) % shards


def _is_encodable(text: str) -> bool:
    return text.isprintable() and not any("\ud800" <= char <= "\udfff" for char in text)


def _quote_short(name: object) -> str:
    if not isinstance(name, str):
        return f"a {type(name).__name__}"
    return repr(name if len(name) <= 60 else f"{name[:60]}…").encode("ascii", "backslashreplace").decode()


ACL_KINDS: tuple[AclKind, ...] = ("join", "publish", "read")


def is_allowed(entries: tuple[str, ...], user: str) -> bool:
    """Whether a sorted access list allows this user."""
    if not entries or _contains(entries, user):
        return True
    domain = domain_of(user)
    return _contains(entries, domain) and not any("@" in entry and domain_of(entry) == domain for entry in entries)


def entries_for(acl: ChannelAcl, kind: str) -> tuple[str, ...]:
    """Return one of the three access lists or raise BadInput."""
    if kind not in ACL_KINDS:
        raise BadInput(f"there is no access list {kind!r}, only {', '.join(ACL_KINDS)}; nothing was changed")
    entries: tuple[str, ...] = getattr(acl, kind)
    return entries


def update_entries(
    entries: tuple[str, ...], *, add: Iterable[object] = (), remove: Iterable[object] = ()
) -> tuple[str, ...]:
    """Return the changed list, sorted. Adding a present entry and removing a missing one have no effect."""
    removed = {check_entry(entry) for entry in remove}
    return tuple(sorted(({*entries} | {check_entry(entry) for entry in add}) - removed))


def count_users(entries: tuple[str, ...]) -> int:
    """Count the users on a list; domains do not count against its limit."""
    return sum("@" in entry for entry in entries)


def _contains(entries: tuple[str, ...], name: str) -> bool:
    index = bisect_left(entries, name)
    return index < len(entries) and entries[index] == name


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """Limits of all channels of one directory, and the settings of a new channel."""

    auth: bool = True
    """Whether users are authenticated. Without it a membership has no meaning across a restart, so no channel
    persists and none is restored."""

    domain: str | None = None
    """Channels of other domains are refused; None accepts all domains."""

    channels_max: int = 5_000
    """Number of channels above which a join that creates one is refused. Restored channels are never refused."""

    clients_max: int = 100
    """Default and maximum of a channel's `max_clients`."""

    channels_per_client_max: int = 100
    """Number of channels a user may join. Restored memberships are always kept."""

    payload_bytes_max: int = 64 << 10
    """Default and maximum of a channel's `max_payload_size`."""

    persist_messages_max: int = 1_000
    """Default and maximum of a channel's `max_persist_messages`; 0: no channel persists."""

    flush_interval_ms_max: int = 60_000
    """Maximum of a channel's `message_flush_interval`: the time whose messages a power cut may lose."""

    history_max: int = 100
    """Messages in one history page; the page holds the seq where the next one starts."""

    queue_max: int = 2_048
    """Events that may wait for a subscriber. With one more, the subscription ends with a `SubscriptionEnded` event."""

    shards: int = 16
    """Number of locks. A hash of its name assigns a channel to one of them."""

    logs_open_max: int = 128
    """Number of message logs that stay open, with three descriptors each. Others are opened on demand."""

    segment_bytes: int = 8 << 20
    """Size above which a message log is sealed. It is also sealed when it holds half of the kept messages. Old messages
    are dropped by whole segments."""

    def __post_init__(self) -> None:
        minimums = dict.fromkeys((field.name for field in fields(self) if field.type == "int"), 1)
        for name, minimum in (minimums | {"persist_messages_max": 0, "flush_interval_ms_max": 0}).items():
            if getattr(self, name) < minimum:
                raise BadInput(f"{name} is {getattr(self, name)}, it must be at least {minimum}")
        if self.payload_bytes_max > self.segment_bytes:
            raise BadInput(
                f"payload_bytes_max ({self.payload_bytes_max}) must not exceed segment_bytes ({self.segment_bytes}): "
                "such a message would not fit into a segment"
            )

    def default_config(self) -> ChannelConfig:
        """Return the settings of a new channel."""
        return ChannelConfig(self.clients_max, self.payload_bytes_max, self.persist_messages_max, False, 0, "pubsub")

    def to_dict(self) -> dict[str, object]:
        """Return the limits as they are shown to clients."""
        return asdict(self)


_CONFIG_FIELDS = ChannelConfig.__struct_fields__
_LIMIT_BY_SETTING = {
    "max_clients": "clients_max",
    "max_payload_size": "payload_bytes_max",
    "max_persist_messages": "persist_messages_max",
    "message_flush_interval": "flush_interval_ms_max",
}


class Operator:
    """The operator of the directory: reads everything, may change what an owner may, and is a member of no channel."""

    def __repr__(self) -> str:
        return "OPERATOR"


OPERATOR: Final = Operator()


class ChannelSettings(TypedDict, total=False):
    """The settings of a channel by name, as callers give them: a misspelt one fails type checks."""

    max_clients: int
    max_payload_size: int
    max_persist_messages: int
    persist: bool
    message_flush_interval: Duration
    type: ChannelType


User: TypeAlias = str | Operator


class LeaveResult(NamedTuple):
    """The channel after a leave, None if it ends, and the new owner if that changed."""

    meta: ChannelMeta | None
    promoted: str | None


def new_channel(handler: str, limits: ChannelLimits) -> ChannelMeta:
    """Return a channel without members."""
    return ChannelMeta(handler, None, limits.default_config(), ChannelAcl(), ())


def is_member(meta: ChannelMeta, user: str) -> bool:
    return _contains(meta.members, user)


def check_owner(meta: ChannelMeta, user: User, action: str) -> None:
    """Raise unless this user owns the channel or is the operator."""
    if not isinstance(user, Operator) and user != meta.owner:
        raise Forbidden(f"{meta.handler}: only its owner may {action}, and {user} is not; nothing was changed")


def check_member(meta: ChannelMeta, user: User) -> None:
    """Raise unless this user is a member or the operator."""
    if not isinstance(user, Operator) and not is_member(meta, user):
        raise NotMember(meta.handler, user)


def check_allowed(meta: ChannelMeta, kind: str, user: str) -> None:
    if not is_allowed(entries_for(meta.acl, kind), user):
        raise Forbidden(f"{meta.handler}: {user} is not on its {kind} access list; nothing was done, ask the owner")


def check_type(meta: ChannelMeta, required: str) -> None:
    if meta.config.type != required:
        raise WrongType(meta.handler, type=meta.config.type, wanted=required)


def check_payload(meta: ChannelMeta, size: int) -> None:
    if size > meta.config.max_payload_size:
        raise TooLarge(f"the payload for {meta.handler}", size=size, limit=meta.config.max_payload_size)


def check_may_publish(meta: ChannelMeta, user: str) -> None:
    """Raise unless this user may publish now."""
    check_type(meta, "pubsub")
    check_member(meta, user)
    check_allowed(meta, "publish", user)


def check_may_read(meta: ChannelMeta, user: User) -> None:
    """Raise unless this user may read messages now; the operator may."""
    if not isinstance(user, Operator):
        check_member(meta, user)
        check_allowed(meta, "read", user)


def add_member(meta: ChannelMeta, user: str) -> ChannelMeta:
    """Return the channel with one more member; the first one becomes its owner."""
    check_allowed(meta, "join", user)
    if is_member(meta, user):
        raise AlreadyMember(meta.handler, user)
    if len(meta.members) >= meta.config.max_clients:
        raise ChannelFull(meta.handler, limit=meta.config.max_clients)
    members = tuple(sorted((*meta.members, user)))
    return msgspec.structs.replace(meta, members=members, owner=meta.owner or user)


def remove_member(meta: ChannelMeta, user: str) -> LeaveResult:
    """Return the channel without a member."""
    check_member(meta, user)
    members = tuple(member for member in meta.members if member != user)
    if not members or (user == meta.owner and meta.config.type == "fifo"):
        return LeaveResult(None, None)
    promoted = members[0] if user == meta.owner else None
    return LeaveResult(msgspec.structs.replace(meta, members=members, owner=promoted or meta.owner), promoted)


def change_acl(
    meta: ChannelMeta, kind: str, *, add: Iterable[object] = (), remove: Iterable[object] = ()
) -> ChannelMeta:
    """Return the channel with a changed access list."""
    entries = update_entries(entries_for(meta.acl, kind), add=add, remove=remove)
    if count_users(entries) > meta.config.max_clients:
        raise Forbidden(
            f"{meta.handler}: {count_users(entries)} users on its {kind} list would exceed its max_clients "
            f"({meta.config.max_clients}); nothing was changed"
        )
    return msgspec.structs.replace(meta, acl=msgspec.structs.replace(meta.acl, **{kind: entries}))


def change_config(meta: ChannelMeta, changes: Mapping[str, object], limits: ChannelLimits) -> ChannelMeta:
    """Return the channel with changed settings; settings that are not named keep their values."""
    if unknown := sorted(set(changes) - set(_CONFIG_FIELDS)):
        raise BadInput(
            f"a channel has no setting {unknown[0]!r}, only {', '.join(_CONFIG_FIELDS)}; nothing was changed"
        )
    for name, value in changes.items():
        _check_setting(name, value, limits)
    config: ChannelConfig = msgspec.structs.replace(meta.config, **changes)
    if (config.persist or config.type == "fifo") and not limits.auth:
        raise Forbidden(f"{meta.handler}: persist needs authenticated users (auth); nothing was changed")
    if meta.config.type == "fifo" and config.type != "fifo":
        raise BadInput(f"{meta.handler}: a fifo channel cannot change its type; nothing was changed")
    if config.type == "fifo" and not config.persist:
        raise BadInput(f"{meta.handler}: a fifo channel needs persist; nothing was changed, set persist as well")
    if config.persist and config.max_persist_messages < 1:
        raise BadInput(f"{meta.handler}: persist needs max_persist_messages of at least 1; nothing was changed")
    return msgspec.structs.replace(meta, config=config)


def _check_setting(name: str, value: object, limits: ChannelLimits) -> None:
    if name == "persist":
        if not isinstance(value, bool):
            raise BadInput(f"persist is true or false, not {value!r}; nothing was changed")
    elif name == "type":
        if value not in ("pubsub", "fifo"):
            raise BadInput(f"the type of a channel is pubsub or fifo, not {value!r}; nothing was changed")
    else:
        maximum: int = getattr(limits, _LIMIT_BY_SETTING[name])
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
            raise BadInput(f"{name} is {value!r}, it must be between 0 and {maximum}; nothing was changed")


def page_of(entries: tuple[str, ...], number: object, size: object) -> tuple[str, ...]:
    """Return one page of a list; pages count from 1 and have at most 100 entries."""
    for name, value in (("page", number), ("page_size", size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{name} is {value!r}, it must be at least 1; nothing was done")
    assert isinstance(number, int)
    assert isinstance(size, int)
    size = min(size, 100)
    return entries[(number - 1) * size : number * size]
