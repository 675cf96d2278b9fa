"""[shell] Changes to a channel: members, lists, settings, its end.

    project the change → save it → apply it in memory → tell the members → answer

in this order and under the shard's lock. So a failed save changes nothing and is reported, and a crash
shows the state before the change or the one after it. A channel that does not persist has nothing to save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from tidelog.channels import names, rules
from tidelog.channels.manager import ChannelManager, Operator, Shard
from tidelog.channels.room import Room
from tidelog.errors import Error, Forbidden, Refused, Throttled
from tidelog.formats.channel import Meta

User: TypeAlias = str | Operator
_log = logging.getLogger("tidelog.channels")


def _owner(meta: Meta, user: User, what: str) -> None:
    if not isinstance(user, Operator):
        rules.check_owner(meta, user, what)


# ── members ───────────────────────────────────────────────────────────────────────────────────────


def join(
    manager: ChannelManager,
    channel: str,
    user: str,
    *,
    by: User | None = None,
    config: Mapping[str, object] | None = None,
    source: object = None,
) -> Meta:
    """Add a member; the first one makes the channel, with `config`, and owns it. `by`: the owner, for another."""
    names.check_channel(channel)
    names.check_user(user)
    if manager.limits.domain not in (None, names.domain_of(channel)):
        raise Forbidden(f"{channel} belongs to another domain than {manager.limits.domain}; nothing was done")
    with manager.metrics.counted("channel_joins"), manager.turn(channel) as shard:
        room = shard.rooms.get(channel)
        if room is None:
            if by is not None and not isinstance(by, Operator):
                manager.room(channel)  # to invite somebody it must be there
            return _make(manager, shard, channel, user, config or {})
        if by is not None:
            _owner(room.meta, by, "invite")
        meta = rules.joined(room.meta, user)
        manager.memberships.reserve(user, channel, manager.limits.channels_per_client_max)
        try:
            if meta.config.persist:
                manager.store.save(meta, room.meta)
        except BaseException:
            manager.memberships.release(user, channel)
            raise
        room.apply(meta)
        room.tell("joined", user, owner=False, source=source)
        return meta


def _make(manager: ChannelManager, shard: Shard, channel: str, user: str, config: Mapping[str, object]) -> Meta:
    """The first join. Where it cannot be saved there is no channel."""
    limits, used = manager.limits, manager.count()
    if names.directory_name(channel) in manager.report.skipped:
        manager.room(channel)
    if used >= limits.channels_max:
        raise Throttled("channels_max", max=limits.channels_max, used=used, asked=1)
    meta = rules.joined(rules.configured(rules.new(channel, limits), config, limits), user)
    room = manager.made(meta)
    manager.memberships.reserve(user, channel, limits.channels_per_client_max)
    try:
        if meta.config.persist:
            _save_new(manager, room, meta)
    except BaseException:
        manager.memberships.release(user, channel)
        raise
    manager.enter(shard, room)
    return meta


def _save_new(manager: ChannelManager, room: Room, meta: Meta) -> None:
    """Save a channel that was not kept before. What must be there when its metadata is comes first."""

    def ready() -> None:
        if room.next_seq > 1:
            room.messages()  # its first file carries the number in its name
        if meta.config.type == "fifo":
            manager.queue(room).begin(room.next_seq)

    try:
        manager.store.save(meta, None, ready=ready)
    except BaseException:
        manager.shard(room.handler).open.pop(room.handler, None)
        _let_go(room)
        raise


def _let_go(room: Room) -> None:
    try:
        room.close_log()
    except (Error, OSError) as error:
        _log.warning("%s: closing what was removed: %s", room.handler, error)


def leave(manager: ChannelManager, channel: str, user: str, *, by: User | None = None, source: object = None) -> None:
    """Remove a member. The owner's place goes to the next by name; with the last one the channel ends. `by`: the
    owner, who sends somebody away."""
    names.check_channel(channel)
    names.check_user(user)
    with manager.turn(channel):
        room = manager.settled_room(channel)
        if by is not None:
            _owner(room.meta, by, "send somebody away")
        done, owned = rules.left(room.meta, user), user == room.meta.owner
        if done.meta is None:
            _end(manager, room, user, source)
        else:
            if room.meta.config.persist:
                manager.store.save(done.meta, room.meta)
            room.apply(done.meta)
            manager.memberships.release(user, channel)
            room.tell("left", user, owner=owned, source=source)
            if done.promoted is not None:
                room.tell("joined", done.promoted, owner=True, source=source)
            room.forget_user(user, "left")
        manager.metrics.add("channel_leaves")


def gone(manager: ChannelManager, user: str) -> list[str]:
    """The last connection of a user is closed: it leaves the channels that do not persist. Return which."""
    done = []
    for channel in manager.memberships.of(user):
        try:
            if not manager.meta(channel).config.persist:
                leave(manager, channel, user)
                done.append(channel)
        except Refused:
            continue  # it left, or the channel ended, in the meantime
    return done


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


def delete(manager: ChannelManager, channel: str, user: User, *, source: object = None) -> bool:
    """End a channel with all its messages; only the owner may. An operator may also delete one that cannot be read;
    False where there was nothing."""
    names.check_channel(channel)
    with manager.turn(channel) as shard:
        if isinstance(user, Operator) and channel not in shard.rooms:
            name = names.directory_name(channel)
            there = name in manager.report.skipped
            if manager.limits.auth:  # otherwise what lies on disk is none of ours
                manager.store.delete(name, None)
                manager.report.skipped.pop(name, None)
            return there
        room = manager.settled_room(channel)
        _owner(room.meta, user, "delete it")
        _end(manager, room, user if isinstance(user, str) else room.meta.owner or "", source)
        return True


def _end(manager: ChannelManager, room: Room, user: str, source: object) -> None:
    """Remove a channel from disk, then from memory."""
    _forget_storage(manager, room)
    room.tell("deleted", user, owner=user == room.meta.owner, source=source)
    room.end("deleted")
    manager.shard(room.handler).rooms.pop(room.handler, None)
    for member in room.meta.members:
        manager.memberships.release(member, room.handler)
    manager.metrics.add("channels_active", by=-1)
    manager.metrics.add("channels_deleted")


def _forget_storage(manager: ChannelManager, room: Room) -> None:
    """Messages and metadata of a channel, gone for good; on an error they are as before."""
    if not room.meta.config.persist:
        return
    with manager.metrics.counted("message_log_deletes"):
        manager.store.delete(names.directory_name(room.handler), room.meta)
    manager.shard(room.handler).open.pop(room.handler, None)
    _let_go(room)


# ── lists and settings ────────────────────────────────────────────────────────────────────────────


def set_acl(
    manager: ChannelManager,
    channel: str,
    user: User,
    kind: str,
    *,
    add: Iterable[object] = (),
    remove: Iterable[object] = (),
) -> tuple[str, ...]:
    """Change one of the access lists; only the owner may. Return the list."""
    names.check_channel(channel)
    with manager.turn(channel):
        room = manager.room(channel)
        _owner(room.meta, user, "change its lists")
        meta = rules.relisted(room.meta, kind, add=add, remove=remove)
        if meta != room.meta:
            if meta.config.persist:
                manager.store.save(meta, room.meta)
            room.apply(meta)
        listed: tuple[str, ...] = getattr(meta.acl, kind)
        return listed


def configure(
    manager: ChannelManager, channel: str, user: User, changes: Mapping[str, object], *, source: object = None
) -> Meta:
    """Change settings; only the owner may. Those that are not named stay."""
    names.check_channel(channel)
    with manager.turn(channel):
        room = manager.settled_room(channel)
        _owner(room.meta, user, "configure it")
        meta = rules.configured(room.meta, changes, manager.limits)
        if meta == room.meta:
            return meta
        _persist(manager, room, meta)
        room.apply(meta)
        actor = user if isinstance(user, str) else meta.owner or ""
        room.tell("reconfigured", actor, owner=actor == meta.owner, source=source)
        return meta


def _persist(manager: ChannelManager, room: Room, meta: Meta) -> None:
    """Bring the disk to what the settings will be."""
    before = room.meta
    if before.config.persist and not meta.config.persist:
        room.next_seq = room.messages().last_seq + 1  # numbering goes on without a log
        _forget_storage(manager, room)
    elif meta.config.persist and not before.config.persist:
        _save_new(manager, room, meta)
    elif meta.config.persist:
        ready: Callable[[], None] | None = None
        if meta.config.type != before.config.type:
            log = room.messages()
            log.sync()
            ready = lambda: manager.queue(room).begin(log.last_seq + 1)  # noqa: E731
        manager.store.save(meta, before, ready=ready)
