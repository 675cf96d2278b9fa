"""[shell] Who asks something of a channel.

    keys    hook      the user is
    no      no        whoever it says it is (X-Tidelog-User, or ?user= on streams), else anonymous@localhost
    yes     no        the one that the key names (user@domain=secret), else key-<digest>@localhost; a key with the scope
                      admin may speak for anybody
    –       yes       whom the hook makes of that name and of X-Tidelog-User-Token (?user_token=)

A key with the scope admin may be the operator (?operator=true): it may look at everything, change what an owner may,
and say nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import unquote

from tidelog.channels import OPERATOR, Operator
from tidelog.channels.hook import authenticated
from tidelog.channels.names import check_user
from tidelog.server.api.auth import ADMIN, Principal
from tidelog.server.api.call import Call
from tidelog.server.api.problem import Problem
from tidelog.server.rooms import Rooms

_ADMIN: Final = frozenset((ADMIN,))


class Claimed(NamedTuple):
    """Who somebody says it is, before anybody has looked at that."""

    principal: Principal
    user: str | None
    token: str | None


def claimed(call: Call) -> Claimed:
    user = _told(call, b"x-tidelog-user", "user")
    return Claimed(call.principal, user, _told(call, b"x-tidelog-user-token", "user_token"))


def _told(call: Call, header: bytes, parameter: str) -> str | None:
    """A header, which may be percent-encoded as parameters are; streams may come without."""
    value = call.request.header(header)
    if value is None:
        return call.query.text(parameter)
    try:
        return unquote(value.decode(), errors="strict")
    except UnicodeDecodeError:
        raise Problem("invalid_request", f"{header.decode()} is not UTF-8; nothing was done") from None


def own_name(rooms: Rooms, principal: Principal) -> str:
    """Who a key is, where nobody says anything."""
    if principal.user is not None:
        return principal.user
    return f"key-{principal.name}@{rooms.domain}" if principal.name else f"anonymous@{rooms.domain}"


async def user_of(rooms: Rooms, who: Claimed) -> str:
    """The user, or a refusal."""
    name, hook = own_name(rooms, who.principal), rooms.hook
    if hook is not None:
        asked, metrics = check_user(who.user or name), rooms.manager.metrics
        return await rooms.work(lambda: authenticated(hook, metrics, asked, who.token))
    if who.user is None or who.user == name:
        return name
    if not who.principal.may(_ADMIN):
        raise Problem(
            "forbidden",
            f"this key is {name} and speaks for nobody else; nothing was done, use the other's key or one with the "
            "scope admin",
        )
    return check_user(who.user)


async def asker(call: Call) -> str | Operator:
    """The user, or the operator where that is asked for."""
    if not call.query.flag("operator", False):
        return await user(call)
    if not call.principal.may(_ADMIN):
        raise Problem("forbidden", "to be the operator takes a key with the scope admin; nothing was done")
    return OPERATOR


async def user(call: Call) -> str:
    return await user_of(call.service.rooms, claimed(call))
