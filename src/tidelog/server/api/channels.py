"""Channels themselves: make and configure, look at, list, end; members and access lists.

Everything here may wait for a disk or for a lock that somebody else's save holds, so all of it runs off the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tidelog.channels import Acl, ChannelManager, Config, Meta, Operator, changes, rules, talk
from tidelog.channels import acl as lists
from tidelog.errors import ChannelNotFound, Forbidden, NotFound
from tidelog.server.api import who
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import paged
from tidelog.server.http.seam import Response
from tidelog.wire import channels, cursor, requests

_settings = requests.decoder(dict[str, Any])
_join = requests.decoder(channels.Join)
_leave = requests.decoder(channels.Leave)
_acl = requests.decoder(channels.ChangeAcl)


def number(call: Call, name: str) -> int | None:
    """A whole number of the query; None where it is not there. Nothing is guessed about what is none."""
    text = call.query.text(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise Problem("invalid_request", f"{name} is {text[:80]!r}, it must be a whole number; nothing was done")
    return int(text)


def config_fields(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def acl_fields(acl: Acl) -> dict[str, list[str]]:
    return {kind: list(getattr(acl, kind)) for kind in lists.KINDS}


def shown(meta: Meta) -> dict[str, Any]:
    return {
        "channel": meta.handler,
        "type": meta.config.type,
        "owner": meta.owner,
        "members": len(meta.members),
        "persist": meta.config.persist,
    }


def seen(manager: ChannelManager, channel: str, user: str | Operator) -> Meta:
    """What a channel is, for its members and the operator."""
    meta = manager.meta(channel)
    if not isinstance(user, Operator):
        rules.check_member(meta, user)
    return meta


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


async def list_all(call: Call) -> Response:
    """The channels that the user is in; all of them for the operator. With whom the server takes it for, and limits."""
    rooms, user = call.service.rooms, await who.asker(call)
    manager, owns = rooms.manager, call.principal.owns
    behind, size = paged(call.query)
    prefix = call.query.text("prefix") or ""

    def look() -> tuple[list[dict[str, Any]], bool]:
        names = manager.handlers() if isinstance(user, Operator) else manager.memberships.of(user)
        wanted = [name for name in names if name > behind and name.startswith(prefix) and owns(name)]
        rows = []
        for name in wanted[:size]:
            try:
                rows.append(shown(manager.meta(name)))
            except NotFound:
                continue  # it ended meanwhile
        return rows, len(wanted) > size and bool(rows)

    rows, more = await rooms.work(look)
    said: dict[str, Any] = {"channels": rows, "user": None if isinstance(user, Operator) else user}
    if more:
        said["next_cursor"] = cursor.page(rows[-1]["channel"])
    if isinstance(user, Operator):
        said["unreadable"] = dict(manager.report.skipped)
    return ok({**said, "limits": manager.limits.announce(), "performance": call.performance()})


async def put(call: Call) -> Response:
    """Make a channel, or change its settings. Those that are not named stay."""
    body = call.body(_settings, empty={})
    user = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]

    def work() -> tuple[bool, Meta]:
        try:
            return False, changes.configure(manager, channel, user, body)
        except ChannelNotFound:
            if isinstance(user, Operator):
                raise
        return True, changes.join(manager, channel, user, config=body)

    created, meta = await call.service.rooms.work(work)
    created = created and meta.members == (user,)  # another may have been first
    said = {**shown(meta), "created": created, "config": config_fields(meta.config)}
    return ok({**said, "performance": call.performance()}, status=201 if created else 200)


async def state(call: Call) -> Response:
    user = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]

    def look() -> dict[str, Any]:
        meta = seen(manager, channel, user)
        found = {**shown(meta), "config": config_fields(meta.config), "first_seq": None, "last_seq": None}
        if meta.config.type == "fifo":
            if isinstance(user, Operator) or user == meta.owner:
                found["waiting"] = talk.length(manager, channel, user)
        elif meta.config.persist:
            with suppress(Forbidden):  # what it holds is for those who may read
                found["first_seq"], found["last_seq"] = talk.bounds(manager, channel, user)
        with suppress(Forbidden):
            found["holes"] = talk.holes(manager, channel, user)
        return found

    return ok({**await call.service.rooms.work(look), "performance": call.performance()})


async def drop(call: Call) -> Response:
    user = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]
    deleted = await call.service.rooms.work(lambda: changes.delete(manager, channel, user))
    return ok({"channel": channel, "deleted": deleted, "performance": call.performance()})


# ── members ───────────────────────────────────────────────────────────────────────────────────────


async def join(call: Call) -> Response:
    """Become a member, which makes a channel that is not there; with `user`, as its owner make somebody else one."""
    body = call.body(_join, empty=channels.Join())
    by = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]
    meta = await call.service.rooms.work(joining(manager, channel, by, body, source=None))
    return ok({**joined(meta, by if isinstance(by, str) and body.user is None else body.user), **_timed(call)})


def joining(
    manager: ChannelManager, channel: str, by: str | Operator, body: channels.Join, *, source: object
) -> Callable[[], Meta]:
    """`source`: a connection, which is not told of what it does itself."""
    if body.user is not None:
        invited = body.user
        return lambda: _invite(manager, channel, invited, by, source)
    if isinstance(by, Operator):
        raise Problem("invalid_request", "the operator joins nothing; nothing was done, name a user")
    return lambda: changes.join(manager, channel, by, config=body.config, source=source)


def _invite(manager: ChannelManager, channel: str, user: str, by: str | Operator, source: object) -> Meta:
    manager.meta(channel)  # whoever invites makes nothing
    return changes.join(manager, channel, user, by=by, source=source)


def joined(meta: Meta, user: str | None) -> dict[str, Any]:
    alone = meta.members == (user,)
    return {"channel": meta.handler, "user": user, "owner": meta.owner, "members": len(meta.members), "created": alone}


async def leave(call: Call) -> Response:
    """End one's membership; with `user`, as the owner that of somebody else."""
    body = call.body(_leave, empty=channels.Leave())
    by = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]
    return ok({**await call.service.rooms.work(leaving(manager, channel, by, body, source=None)), **_timed(call)})


def leaving(
    manager: ChannelManager, channel: str, by: str | Operator, body: channels.Leave, *, source: object
) -> Callable[[], dict[str, Any]]:
    user = by if body.user is None else body.user
    if isinstance(user, Operator):
        raise Problem("invalid_request", "the operator is in no channel; nothing was done, name a user")

    def work() -> dict[str, Any]:
        changes.leave(manager, channel, user, by=None if body.user is None else by, source=source)
        try:
            owner = manager.meta(channel).owner
        except ChannelNotFound:
            return {"channel": channel, "user": user, "ended": True, "owner": None}
        return {"channel": channel, "user": user, "ended": False, "owner": owner}

    return work


async def members(call: Call) -> Response:
    user = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]
    page, size = number(call, "page"), number(call, "page_size")
    look = members_page(manager, channel, user, 1 if page is None else page, channels.PAGE if size is None else size)
    return ok({**await call.service.rooms.work(look), **_timed(call)})


def members_page(
    manager: ChannelManager, channel: str, user: str | Operator, page: int, size: int
) -> Callable[[], dict[str, Any]]:
    def look() -> dict[str, Any]:
        listed = seen(manager, channel, user).members
        found = rules.page(listed, page, size)
        return {"channel": channel, "members": found, "page": page, "total": len(listed)}

    return look


# ── access lists ──────────────────────────────────────────────────────────────────────────────────


async def get_acl(call: Call) -> Response:
    user = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]
    acl = await call.service.rooms.work(lambda: all_lists(manager, channel, user))
    return ok({"channel": channel, "acl": acl, **_timed(call)})


def all_lists(manager: ChannelManager, channel: str, user: str | Operator) -> dict[str, list[str]]:
    meta = manager.meta(channel)
    if not isinstance(user, Operator):
        rules.check_owner(meta, user, "see its lists")
    return acl_fields(meta.acl)


async def set_acl(call: Call) -> Response:
    body = call.body(_acl)
    user = await who.asker(call)
    manager, channel = call.service.rooms.manager, call.names[0]
    listed = await call.service.rooms.work(
        lambda: changes.set_acl(manager, channel, user, body.kind, add=body.add, remove=body.remove)
    )
    return ok({"channel": channel, "kind": body.kind, "listed": listed, **_timed(call)})


def _timed(call: Call) -> dict[str, Any]:
    return {"performance": call.performance()}
