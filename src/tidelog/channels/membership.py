"""[shell] Changes to a channel: members, lists, settings, its end.

    project the change → save it → apply it in memory → tell the members → answer

in this order and under the shard's lock. So a failed save changes nothing and is reported, and a crash
shows the state before the change or the one after it. A channel that does not persist has nothing to save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from tidelog.channels import rules
from tidelog.channels.channel_state import ChannelState
from tidelog.channels.manager import ChannelManager, ChannelShard, Operator
from tidelog.errors import Error, Forbidden, Refused, Throttled
from tidelog.formats.channel_meta import ChannelMeta

User: TypeAlias = str | Operator
_log = logging.getLogger("tidelog.channels")


def _check_owner(meta: ChannelMeta, user: User, action: str) -> None:
    if not isinstance(user, Operator):
        rules.check_owner(meta, user, action)


# ── members ───────────────────────────────────────────────────────────────────────────────────────


def join(
    manager: ChannelManager,
    channel: str,
    user: str,
    *,
    by: User | None = None,
    config: Mapping[str, object] | None = None,
    source: object = None,
) -> ChannelMeta:
    """Add a member; the first one makes the channel, with `config`, and owns it. `by`: the owner, for another."""
    rules.check_channel(channel)
    rules.check_user(user)
    if manager.limits.domain not in (None, rules.domain_of(channel)):
        raise Forbidden(f"{channel} belongs to another domain than {manager.limits.domain}; nothing was done")
    with manager.metrics.counted("channel_joins"), manager.exclusive(channel) as shard:
        room = shard.channels.get(channel)
        if room is None:
            if by is not None and not isinstance(by, Operator):
                manager.get_channel(channel)  # to invite somebody it must be there
            return _create_channel(manager, shard, channel, user, config or {})
        if by is not None:
            _check_owner(room.meta, by, "invite")
        meta = rules.add_member(room.meta, user)
        manager.memberships.reserve(user, channel, manager.limits.channels_per_client_max)
        try:
            if meta.config.persist:
                manager.store.save(meta, room.meta)
        except BaseException:
            manager.memberships.release(user, channel)
            raise
        room.apply(meta)
        room.publish_presence("joined", user, owner=False, source=source)
        return meta


def _create_channel(
    manager: ChannelManager, shard: ChannelShard, channel: str, user: str, config: Mapping[str, object]
) -> ChannelMeta:
    """The first join. Where it cannot be saved there is no channel."""
    limits, used = manager.limits, manager.channel_count()
    if rules.directory_name(channel) in manager.report.skipped:
        manager.get_channel(channel)
    if used >= limits.channels_max:
        raise Throttled("channels_max", max=limits.channels_max, used=used, asked=1)
    meta = rules.add_member(rules.change_config(rules.new_channel(channel, limits), config, limits), user)
    room = manager.new_channel_state(meta)
    manager.memberships.reserve(user, channel, limits.channels_per_client_max)
    try:
        if meta.config.persist:
            _save_new_channel(manager, room, meta)
    except BaseException:
        manager.memberships.release(user, channel)
        raise
    manager.add_channel(shard, room)
    return meta


def _save_new_channel(manager: ChannelManager, state: ChannelState, meta: ChannelMeta) -> None:
    """Save a channel that was not kept before. What must be there when its metadata is comes first."""

    def ready() -> None:
        if state.next_seq > 1:
            state.message_log()  # its first file carries the number in its name
        if meta.config.type == "fifo":
            manager.fifo_queue(state).reset_to(state.next_seq)

    try:
        manager.store.save(meta, None, before_commit=ready)
    except BaseException:
        manager.shard(state.handler).open_logs.pop(state.handler, None)
        _close_log(state)
        raise


def _close_log(state: ChannelState) -> None:
    try:
        state.close_log()
    except (Error, OSError) as error:
        _log.warning("%s: closing what was removed: %s", state.handler, error)


def leave(manager: ChannelManager, channel: str, user: str, *, by: User | None = None, source: object = None) -> None:
    """Remove a member. The owner's place goes to the next by name; with the last one the channel ends. `by`: the
    owner, who sends somebody away."""
    rules.check_channel(channel)
    rules.check_user(user)
    with manager.exclusive(channel):
        room = manager.get_idle_channel(channel)
        if by is not None:
            _check_owner(room.meta, by, "send somebody away")
        done, owned = rules.remove_member(room.meta, user), user == room.meta.owner
        if done.meta is None:
            _delete_channel(manager, room, user, source)
        else:
            if room.meta.config.persist:
                manager.store.save(done.meta, room.meta)
            room.apply(done.meta)
            manager.memberships.release(user, channel)
            room.publish_presence("left", user, owner=owned, source=source)
            if done.promoted is not None:
                room.publish_presence("joined", done.promoted, owner=True, source=source)
            room.remove_user_subscriptions(user, "left")
        manager.metrics.add("channel_leaves")


def leave_transient_channels(manager: ChannelManager, user: str) -> list[str]:
    """The last connection of a user is closed: it leaves the channels that do not persist. Return which."""
    done = []
    for channel in manager.memberships.channels_of(user):
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
    rules.check_channel(channel)
    with manager.exclusive(channel) as shard:
        if isinstance(user, Operator) and channel not in shard.channels:
            name = rules.directory_name(channel)
            there = name in manager.report.skipped
            if manager.limits.auth:  # otherwise what lies on disk is none of ours
                manager.store.delete(name, None)
                manager.report.skipped.pop(name, None)
            return there
        room = manager.get_idle_channel(channel)
        _check_owner(room.meta, user, "delete it")
        _delete_channel(manager, room, user if isinstance(user, str) else room.meta.owner or "", source)
        return True


def _delete_channel(manager: ChannelManager, state: ChannelState, user: str, source: object) -> None:
    """Remove a channel from disk, then from memory."""
    _remove_storage(manager, state)
    state.publish_presence("deleted", user, owner=user == state.meta.owner, source=source)
    state.shut_down("deleted")
    manager.shard(state.handler).channels.pop(state.handler, None)
    for member in state.meta.members:
        manager.memberships.release(member, state.handler)
    manager.metrics.add("channels_active", by=-1)
    manager.metrics.add("channels_deleted")


def _remove_storage(manager: ChannelManager, state: ChannelState) -> None:
    """Messages and metadata of a channel, gone for good; on an error they are as before."""
    if not state.meta.config.persist:
        return
    with manager.metrics.counted("message_log_deletes"):
        manager.store.delete(rules.directory_name(state.handler), state.meta)
    manager.shard(state.handler).open_logs.pop(state.handler, None)
    _close_log(state)


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
    rules.check_channel(channel)
    with manager.exclusive(channel):
        room = manager.get_channel(channel)
        _check_owner(room.meta, user, "change its lists")
        meta = rules.change_acl(room.meta, kind, add=add, remove=remove)
        if meta != room.meta:
            if meta.config.persist:
                manager.store.save(meta, room.meta)
            room.apply(meta)
        listed: tuple[str, ...] = getattr(meta.acl, kind)
        return listed


def configure(
    manager: ChannelManager, channel: str, user: User, changes: Mapping[str, object], *, source: object = None
) -> ChannelMeta:
    """Change settings; only the owner may. Those that are not named stay."""
    rules.check_channel(channel)
    with manager.exclusive(channel):
        room = manager.get_idle_channel(channel)
        _check_owner(room.meta, user, "configure it")
        meta = rules.change_config(room.meta, changes, manager.limits)
        if meta == room.meta:
            return meta
        _apply_persistence(manager, room, meta)
        room.apply(meta)
        actor = user if isinstance(user, str) else meta.owner or ""
        room.publish_presence("reconfigured", actor, owner=actor == meta.owner, source=source)
        return meta


def _apply_persistence(manager: ChannelManager, state: ChannelState, meta: ChannelMeta) -> None:
    """Bring the disk to what the settings will be."""
    before = state.meta
    if before.config.persist and not meta.config.persist:
        state.next_seq = state.message_log().last_seq + 1  # numbering goes on without a log
        _remove_storage(manager, state)
    elif meta.config.persist and not before.config.persist:
        _save_new_channel(manager, state, meta)
    elif meta.config.persist:
        ready: Callable[[], None] | None = None
        if meta.config.type != before.config.type:
            log = state.message_log()
            log.sync()
            ready = lambda: manager.fifo_queue(state).reset_to(log.last_seq + 1)  # noqa: E731
        manager.store.save(meta, before, before_commit=ready)
