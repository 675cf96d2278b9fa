"""Changes to a channel: members, access lists, settings, delete.

    compute the new metadata (`rules`) → save it → apply it in memory → send presence events → return

in this order, with the shard's lock. A failed save changes nothing and raises; after a crash the channel is as before
or as after the change. A channel that does not persist has nothing to save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from tidelog.channels import rules
from tidelog.channels.channel_state import ChannelState
from tidelog.channels.manager import ChannelManager, ChannelShard
from tidelog.channels.rules import Operator, User
from tidelog.errors import Error, Forbidden, Refused, Throttled
from tidelog.formats.small_files import ChannelMeta

_log = logging.getLogger("tidelog.channels")


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
    """Add a member; the first one creates the channel with `config` and owns it. `by`: the owner, for an invitation."""
    rules.check_channel(channel)
    rules.check_user(user)
    if manager.limits.domain not in (None, rules.domain_of(channel)):
        raise Forbidden(f"{channel} is not in the domain {manager.limits.domain}; nothing was done")
    with manager.metrics.counted("channel_joins"), manager.exclusive(channel) as shard:
        state = shard.channels.get(channel)
        if state is None:
            if by is not None and not isinstance(by, Operator):
                manager.get_channel(channel)  # raises: an invitation does not create a channel
            return _create_channel(manager, shard, channel, user, config or {})
        if by is not None:
            rules.check_owner(state.meta, by, "invite")
        meta = rules.add_member(state.meta, user)
        manager.memberships.reserve(user, channel, manager.limits.channels_per_client_max)
        try:
            if meta.config.persist:
                manager.store.save(meta, state.meta)
        except BaseException:
            manager.memberships.release(user, channel)
            raise
        state.apply(meta)
        state.publish_presence("joined", user, owner=False, source=source)
        return meta


def _create_channel(
    manager: ChannelManager, shard: ChannelShard, channel: str, user: str, config: Mapping[str, object]
) -> ChannelMeta:
    """Create a channel for its first member. If it cannot be saved, there is no channel."""
    limits, used = manager.limits, manager.channel_count()
    if rules.directory_name(channel) in manager.report.skipped:
        manager.get_channel(channel)
    if used >= limits.channels_max:
        raise Throttled("channels_max", max=limits.channels_max, used=used, asked=1)
    meta = rules.add_member(rules.change_config(rules.new_channel(channel, limits), config, limits), user)
    state = manager.new_channel_state(meta)
    manager.memberships.reserve(user, channel, limits.channels_per_client_max)
    try:
        if meta.config.persist:
            _save_new_channel(manager, state, meta)
    except BaseException:
        manager.memberships.release(user, channel)
        raise
    manager.add_channel(shard, state)
    return meta


def _save_new_channel(manager: ChannelManager, state: ChannelState, meta: ChannelMeta) -> None:
    """Save a channel that was not on disk. Files that its metadata implies are written first."""

    def prepare_files() -> None:
        if state.next_seq > 1:
            state.message_log()  # the name of its first file holds the seq
        if meta.config.type == "fifo":
            manager.fifo_queue(state).reset_to(state.next_seq)

    try:
        manager.store.save(meta, None, before_commit=prepare_files)
    except BaseException:
        manager.shard(state.handler).open_logs.pop(state.handler, None)
        _close_log(state)
        raise


def _close_log(state: ChannelState) -> None:
    try:
        state.close_log()
    except (Error, OSError) as error:
        _log.warning("%s: closing a removed log failed: %s", state.handler, error)


def leave(manager: ChannelManager, channel: str, user: str, *, by: User | None = None, source: object = None) -> None:
    """Remove a member. The next member by name becomes the owner; without members the channel is deleted. `by`: the
    owner, who removes another member."""
    rules.check_channel(channel)
    rules.check_user(user)
    with manager.exclusive(channel):
        state = manager.get_idle_channel(channel)
        if by is not None:
            rules.check_owner(state.meta, by, "remove a member")
        result, was_owner = rules.remove_member(state.meta, user), user == state.meta.owner
        if result.meta is None:
            _delete_channel(manager, state, user, source)
        else:
            if state.meta.config.persist:
                manager.store.save(result.meta, state.meta)
            state.apply(result.meta)
            manager.memberships.release(user, channel)
            state.publish_presence("left", user, owner=was_owner, source=source)
            if result.promoted is not None:
                state.publish_presence("joined", result.promoted, owner=True, source=source)
            state.remove_user_subscriptions(user, "left")
        manager.metrics.add("channel_leaves")


def leave_transient_channels(manager: ChannelManager, user: str) -> list[str]:
    """Remove a user without connections from every channel that does not persist; return these channels."""
    left = []
    for channel in manager.memberships.channels_of(user):
        try:
            if not manager.meta(channel).config.persist:
                leave(manager, channel, user)
                left.append(channel)
        except Refused:
            continue  # the user left or the channel was deleted meanwhile
    return left


# ── delete ────────────────────────────────────────────────────────────────────────────────────────


def delete(manager: ChannelManager, channel: str, user: User, *, source: object = None) -> bool:
    """Delete a channel with all its messages; only the owner may. The operator may also delete a channel that cannot be
    read. Return False if there was none."""
    rules.check_channel(channel)
    with manager.exclusive(channel) as shard:
        if isinstance(user, Operator) and channel not in shard.channels:
            name = rules.directory_name(channel)
            existed = name in manager.report.skipped
            if manager.limits.auth:  # without it channels on disk are not managed
                manager.store.delete(name, None)
                manager.report.skipped.pop(name, None)
            return existed
        state = manager.get_idle_channel(channel)
        rules.check_owner(state.meta, user, "delete it")
        _delete_channel(manager, state, user if isinstance(user, str) else state.meta.owner or "", source)
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
    """Delete messages and metadata of a channel; on an error they are as before."""
    if not state.meta.config.persist:
        return
    with manager.metrics.counted("message_log_deletes"):
        manager.store.delete(rules.directory_name(state.handler), state.meta)
    manager.shard(state.handler).open_logs.pop(state.handler, None)
    _close_log(state)


# ── access lists and settings ─────────────────────────────────────────────────────────────────────


def set_acl(
    manager: ChannelManager,
    channel: str,
    user: User,
    kind: str,
    *,
    add: Iterable[object] = (),
    remove: Iterable[object] = (),
) -> tuple[str, ...]:
    """Change one of the access lists and return it; only the owner may."""
    rules.check_channel(channel)
    with manager.exclusive(channel):
        state = manager.get_channel(channel)
        rules.check_owner(state.meta, user, "change its lists")
        meta = rules.change_acl(state.meta, kind, add=add, remove=remove)
        if meta != state.meta:
            if meta.config.persist:
                manager.store.save(meta, state.meta)
            state.apply(meta)
        return rules.entries_for(meta.acl, kind)


def configure(
    manager: ChannelManager, channel: str, user: User, changes: Mapping[str, object], *, source: object = None
) -> ChannelMeta:
    """Change settings; only the owner may. Settings that are not named keep their values."""
    rules.check_channel(channel)
    with manager.exclusive(channel):
        state = manager.get_idle_channel(channel)
        rules.check_owner(state.meta, user, "configure it")
        meta = rules.change_config(state.meta, changes, manager.limits)
        if meta == state.meta:
            return meta
        _apply_persistence(manager, state, meta)
        state.apply(meta)
        actor = user if isinstance(user, str) else meta.owner or ""
        state.publish_presence("reconfigured", actor, owner=actor == meta.owner, source=source)
        return meta


def _apply_persistence(manager: ChannelManager, state: ChannelState, meta: ChannelMeta) -> None:
    """Make the disk match the new settings."""
    before = state.meta
    if before.config.persist and not meta.config.persist:
        state.next_seq = state.message_log().last_seq + 1  # seqs continue without a log
        _remove_storage(manager, state)
    elif meta.config.persist and not before.config.persist:
        _save_new_channel(manager, state, meta)
    elif meta.config.persist:
        reset_cursor: Callable[[], None] | None = None
        if meta.config.type != before.config.type:
            log = state.message_log()
            log.sync()
            reset_cursor = lambda: manager.fifo_queue(state).reset_to(log.last_seq + 1)  # noqa: E731
        manager.store.save(meta, before, before_commit=reset_cursor)
