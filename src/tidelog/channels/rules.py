"""[policy] What a change makes of a channel. Each function takes the channel as it is and gives it as it will be,
or says why not; nobody's memory and no disk is touched until that has been saved.

    nobody ──join──▶ owner alone ──join──▶ owner and members ──leave──▶ …
                         │ leave                 │ the owner leaves
                         ▼                       ▼
                       gone           pubsub: the next member by name is the owner
                                      fifo:   gone

An owner is always a member. A fifo channel persists, and never becomes a pubsub one again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tidelog.channels import acl as lists
from tidelog.channels.limits import ChannelLimits
from tidelog.errors import AlreadyMember, BadInput, ChannelFull, Forbidden, NotMember, TooLarge, WrongType
from tidelog.formats.channel import Acl, Config, Meta

_FIELDS = Config.__struct_fields__
_BOUNDS = {
    "max_clients": "clients_max",
    "max_payload_size": "payload_bytes_max",
    "max_persist_messages": "persist_messages_max",
    "message_flush_interval": "flush_interval_ms_max",
}


class Left(NamedTuple):
    """What a leave comes to: the channel afterwards, None where it ends; and who owns it now, if that is news."""

    meta: Meta | None
    promoted: str | None


def new(handler: str, limits: ChannelLimits) -> Meta:
    """A channel that nobody has joined."""
    return Meta(handler, None, limits.fresh(), Acl(), ())


def is_member(meta: Meta, user: str) -> bool:
    at = bisect_left(meta.members, user)
    return at < len(meta.members) and meta.members[at] == user


def check_owner(meta: Meta, user: str, what: str) -> None:
    if user != meta.owner:
        raise Forbidden(f"{meta.handler}: only its owner may {what}, and that is not {user}; nothing was changed")


def check_member(meta: Meta, user: str) -> None:
    if not is_member(meta, user):
        raise NotMember(meta.handler, user)


def check_allowed(meta: Meta, kind: str, user: str) -> None:
    if not lists.allows(lists.listed_for(meta.acl, kind), user):
        raise Forbidden(
            f"{meta.handler}: {user} is not on its list of those who may {kind}; nothing was done, ask the owner"
        )


def check_type(meta: Meta, wanted: str) -> None:
    if meta.config.type != wanted:
        raise WrongType(meta.handler, type=meta.config.type, wanted=wanted)


def check_payload(meta: Meta, size: int) -> None:
    if size > meta.config.max_payload_size:
        raise TooLarge(f"the payload for {meta.handler}", size=size, limit=meta.config.max_payload_size)


def may_publish(meta: Meta, user: str) -> None:
    """Raise unless this user may publish here now."""
    check_type(meta, "pubsub")
    check_member(meta, user)
    check_allowed(meta, "publish", user)


def may_read(meta: Meta, user: str) -> None:
    """Raise unless this user may see messages here now."""
    check_member(meta, user)
    check_allowed(meta, "read", user)


def joined(meta: Meta, user: str) -> Meta:
    """With one more member; the first one owns it."""
    check_allowed(meta, "join", user)
    if is_member(meta, user):
        raise AlreadyMember(meta.handler, user)
    if len(meta.members) >= meta.config.max_clients:
        raise ChannelFull(meta.handler, limit=meta.config.max_clients)
    at = bisect_left(meta.members, user)
    members = (*meta.members[:at], user, *meta.members[at:])
    return msgspec.structs.replace(meta, members=members, owner=meta.owner or user)


def left(meta: Meta, user: str) -> Left:
    """Without a member."""
    check_member(meta, user)
    members = tuple(member for member in meta.members if member != user)
    if not members or (user == meta.owner and meta.config.type == "fifo"):
        return Left(None, None)
    promoted = members[0] if user == meta.owner else None
    return Left(msgspec.structs.replace(meta, members=members, owner=promoted or meta.owner), promoted)


def relisted(meta: Meta, kind: str, *, add: Iterable[object] = (), remove: Iterable[object] = ()) -> Meta:
    """With another access list."""
    listed = lists.changed(lists.listed_for(meta.acl, kind), add=add, remove=remove)
    if lists.users_in(listed) > meta.config.max_clients:
        raise Forbidden(
            f"{meta.handler}: {lists.users_in(listed)} users on its {kind} list would be more than the "
            f"{meta.config.max_clients} it can have; nothing was changed"
        )
    return msgspec.structs.replace(meta, acl=msgspec.structs.replace(meta.acl, **{kind: listed}))


def configured(meta: Meta, changes: Mapping[str, object], limits: ChannelLimits) -> Meta:
    """With other settings; those that are not named stay."""
    if unknown := sorted(set(changes) - set(_FIELDS)):
        raise BadInput(f"a channel has no setting {unknown[0]!r}, it has {', '.join(_FIELDS)}; nothing was changed")
    for name, value in changes.items():
        _check_value(name, value, limits)
    config: Config = msgspec.structs.replace(meta.config, **changes)
    if (config.persist or config.type == "fifo") and not limits.auth:
        raise Forbidden(f"{meta.handler}: nothing persists while users are not authenticated; nothing was changed")
    if meta.config.type == "fifo" and config.type != "fifo":
        raise BadInput(f"{meta.handler}: a fifo channel stays one; nothing was changed")
    if config.type == "fifo" and not config.persist:
        raise BadInput(f"{meta.handler}: a fifo channel persists; nothing was changed, set persist as well")
    if config.persist and config.max_persist_messages < 1:
        raise BadInput(f"{meta.handler}: to persist it must keep at least one message; nothing was changed")
    return msgspec.structs.replace(meta, config=config)


def _check_value(name: str, value: object, limits: ChannelLimits) -> None:
    if name == "persist":
        if not isinstance(value, bool):
            raise BadInput(f"persist is true or false, not {value!r}; nothing was changed")
    elif name == "type":
        if value not in ("pubsub", "fifo"):
            raise BadInput(f"a channel is of type pubsub or fifo, not {value!r}; nothing was changed")
    else:
        ceiling: int = getattr(limits, _BOUNDS[name])
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= ceiling:
            raise BadInput(f"{name} is {value!r}, it must lie between 0 and {ceiling}; nothing was changed")


def page(listed: tuple[str, ...], number: object, size: object, *, size_max: int = 100) -> tuple[str, ...]:
    """One page of a list, counted from 1."""
    for name, value in (("page", number), ("page_size", size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{name} is {value!r}, the least is 1; nothing was done")
    assert isinstance(number, int)
    assert isinstance(size, int)
    size = min(size, size_max)
    return listed[(number - 1) * size : number * size]
