"""Restoring, shards, limits, what a failed save leaves (G132, G135, G137, G140-G142, G150)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.channels.conftest import ANN, BOB, CHANNEL, CID, ChannelEnv

from tidelog.channels import OPERATOR, Channel, ChannelManager, membership
from tidelog.channels.rules import directory_name
from tidelog.errors import (
    BadInput,
    ChannelNotFound,
    Closed,
    Corrupt,
    CursorLost,
    Damaged,
    FifoEmpty,
    FifoFull,
    Forbidden,
    NotMember,
    ReadOnly,
    Throttled,
    WriteFailed,
    WrongType,
)
from tidelog.formats.small_files import encode_cursor
from tidelog.testing import DiskCall

CALLS: tuple[DiskCall, ...] = ("create", "sync", "rename", "sync_dir")
DIRECTORY = f"data/channels/{directory_name(CHANNEL)}"


def channels_by_user(env: ChannelEnv) -> dict[str, list[str]]:
    return {user: env.manager.memberships.channels_of(user) for user in (ANN, BOB)}


def test_only_persistent_channels_survive_a_restart(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True, max_clients=7, message_flush_interval=5)
    env.channel(BOB).join()
    ann.allow("publish", ANN, "else.org")
    env.channel(ANN, "!passing@host").join()
    before = env.manager.meta(CHANNEL)
    env.crash()
    assert env.manager.channel_names() == [CHANNEL]
    assert env.manager.meta(CHANNEL) == before
    assert channels_by_user(env) == {ANN: [CHANNEL], BOB: [CHANNEL]}
    assert env.manager.report.restored == 1


def test_without_auth_no_channel_is_restored_or_changed(env: ChannelEnv) -> None:
    env.channel().join(persist=True)
    env.disk.write_file(f"data/channels/{'a' * 64}/{1:020d}.log", b"left over")
    tree = env.disk.tree()
    env.limits = replace(env.limits, auth=False)
    env.restart()
    assert env.manager.channel_names() == []
    with pytest.raises(Forbidden):
        env.channel().join(persist=True)
    env.channel().join()
    env.channel().publish(b"x")
    env.channel().delete()
    assert membership.delete(env.manager, CHANNEL, OPERATOR) is False
    env.manager.close()
    now = {name: data for name, data in env.disk.tree().items() if not name.endswith(".lock")}
    assert now == tree


def test_restored_members_stay_above_a_lower_limit(env: ChannelEnv) -> None:
    for number in range(3):
        env.channel(ANN, f"!{number}@host").join(persist=True)
    env.limits = replace(env.limits, channels_per_client_max=1, channels_max=1)
    env.restart()
    assert len(env.manager.memberships.channels_of(ANN)) == 3
    with pytest.raises(Throttled):
        env.channel(BOB, "!new@host").join()
    env.limits = replace(env.limits, channels_max=10)
    env.restart()
    with pytest.raises(Throttled):
        env.channel(ANN, "!new@host").join()
    env.channel(BOB, "!new@host").join()


def test_a_corrupt_channel_is_skipped_and_reported(env: ChannelEnv, caplog: pytest.LogCaptureFixture) -> None:
    env.channel().join(persist=True)
    env.channel(BOB, "!other@host").join(persist=True)
    env.manager.close()
    env.disk.write_file(f"{DIRECTORY}/metadata.bin", b"nonsense, but long enough for a head")
    env.restart()
    assert env.manager.channel_names() == ["!other@host"]
    assert list(env.manager.report.skipped) == [directory_name(CHANNEL)]
    assert env.manager.metrics.get("store_loads", "corrupt") == 1
    assert "was skipped" in caplog.text
    for act in (lambda: env.channel().join(persist=True), lambda: env.channel().publish(b"x")):
        with pytest.raises(Damaged, match="offline"):
            act()
    assert membership.delete(env.manager, CHANNEL, OPERATOR) is True
    env.channel().join(persist=True)
    assert env.channel().publish(b"anew").seq == 1


def test_a_log_that_cannot_be_opened_makes_only_its_channel_offline(env: ChannelEnv) -> None:
    env.channel().join(persist=True)
    env.channel().publish(b"x")
    env.channel(BOB, "!other@host").join(persist=True)
    env.restart()
    env.disk.fail("open", path=f"{DIRECTORY}/{1:020d}.log", times=None)
    with pytest.raises(Damaged):
        env.channel().publish(b"y")
    env.channel(BOB, "!other@host").publish(b"fine")
    env.disk.clear_faults()
    assert env.channel().publish(b"y").seq == 2


CHANGES: dict[str, Any] = {
    "join": lambda env: env.channel(CID).join(),
    "leave": lambda env: env.channel(BOB).leave(),
    "the owner leaves": lambda env: env.channel(ANN).leave(),
    "kick": lambda env: env.channel(ANN).kick(BOB),
    "allow": lambda env: env.channel(ANN).allow("read", BOB),
    "configure": lambda env: env.channel(ANN).configure(max_clients=3),
    "persist off": lambda env: env.channel(ANN).configure(persist=False),
    "delete": lambda env: env.channel(ANN).delete(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["create", "sync", "rename", "sync_dir"])
def test_a_failed_save_changes_nothing_and_sends_no_event(env: ChannelEnv, change: str, call: Any) -> None:
    env.channel(ANN).join(persist=True)
    env.channel(BOB).join()
    env.channel(ANN).publish(b"kept")
    heard = env.channel(BOB).subscribe()
    before, users = env.manager.meta(CHANNEL), channels_by_user(env)
    env.disk.fail(call, path=DIRECTORY)
    with pytest.raises(WriteFailed):
        CHANGES[change](env)
    assert env.manager.meta(CHANNEL) == before
    assert channels_by_user(env) == users
    assert heard.take() == []
    assert env.channel(ANN).publish(b"more").seq == 2
    env.crash()
    assert env.manager.meta(CHANNEL) == before
    assert [message.payload for message in env.channel(ANN).history().messages] == [b"kept", b"more"]
    CHANGES[change](env)


def test_a_first_join_that_cannot_be_saved_creates_no_channel(env: ChannelEnv) -> None:
    env.manager  # noqa: B018
    calls: tuple[DiskCall, ...] = ("mkdir", "create", "sync", "rename")
    for call in calls:
        env.disk.fail(call, path="channels")
        with pytest.raises(WriteFailed):
            env.channel().join(persist=True)
        assert env.manager.channel_names() == []
        assert channels_by_user(env) == {ANN: [], BOB: []}
        env.crash()
        assert env.manager.channel_names() == []
    env.channel().join(persist=True)


def test_tick_reconciles_a_change_that_a_disk_error_left_undecided(env: ChannelEnv) -> None:
    env.channel(ANN).join(persist=True)
    before = env.manager.meta(CHANNEL)
    env.disk.fail("sync_dir", path=DIRECTORY, times=None)
    with pytest.raises(WriteFailed):
        env.channel(BOB).join()
    env.disk.clear_faults()
    env.manager.tick()
    env.crash()
    assert env.manager.meta(CHANNEL) == before


def test_logs_are_opened_on_demand_up_to_logs_open_max(env: ChannelEnv) -> None:
    env.limits = replace(env.limits, logs_open_max=2, shards=1)
    channels = [env.channel(ANN, f"!{number}@host") for number in range(6)]
    for channel in channels:
        channel.join(persist=True)
        channel.publish(b"1")
    shard = env.manager.shard("!0@host")
    assert len(shard.open_logs) == 2
    assert [channel.publish(b"2").seq for channel in channels] == [2] * 6
    assert [len(channel.history().messages) for channel in channels] == [2] * 6
    env.restart()
    assert not env.manager.shard("!0@host").open_logs


def test_only_the_owner_changes_a_channel(env: ChannelEnv) -> None:
    env.channel(ANN).join()
    bob = env.channel(BOB)
    bob.join()
    for act in (
        lambda: bob.configure(max_clients=1),
        lambda: bob.allow("join", BOB),
        lambda: bob.acl("join"),
        lambda: bob.kick(ANN),
        lambda: bob.invite(CID),
        lambda: bob.delete(),
    ):
        with pytest.raises(Forbidden):
            act()
    with pytest.raises(NotMember):
        env.channel(CID).state()
    with pytest.raises(ChannelNotFound):
        env.channel(CID, "!none@host").invite(BOB)
    operator = Channel(env.manager, CHANNEL, OPERATOR)
    assert operator.members() == (ANN, BOB)
    operator.kick(BOB)
    assert operator.allow("join", "host") == ("host",)
    with pytest.raises(BadInput):
        operator.publish(b"x")
    assert operator.delete() is True
    assert operator.delete() is False


def test_members_are_paged(env: ChannelEnv) -> None:
    for number in range(5):
        env.channel(f"u{number}@host").join()
    channel = env.channel("u0@host")
    assert channel.members(2, 2) == ("u2@host", "u3@host")
    with pytest.raises(BadInput):
        channel.members(0)


def test_a_disconnected_user_leaves_transient_channels(env: ChannelEnv) -> None:
    env.channel(ANN).join(persist=True)
    env.channel(ANN, "!passing@host").join()
    assert membership.leave_transient_channels(env.manager, ANN) == ["!passing@host"]
    assert env.manager.memberships.channels_of(ANN) == [CHANNEL]


def test_channels_of_another_domain_are_refused(env: ChannelEnv) -> None:
    env.limits = replace(env.limits, domain="host")
    env.channel().join()
    with pytest.raises(Forbidden):
        env.channel(ANN, "!room@else").join()


def test_a_closed_or_read_only_manager_refuses_changes(env: ChannelEnv) -> None:
    env.channel().join(persist=True)
    env.channel().publish(b"x")
    env.manager.close()
    env.manager.close()
    with pytest.raises(Closed):
        env.channel().publish(b"y")
    tree = env.disk.tree()
    reader = ChannelManager(env.disk, "data", env.clock, limits=env.limits, read_only=True)
    channel = Channel(reader, CHANNEL, ANN)
    assert [message.payload for message in channel.history().messages] == [b"x"]
    for act in (lambda: channel.publish(b"y"), channel.leave, channel.delete, channel.subscribe):
        with pytest.raises(ReadOnly):
            act()
    reader.close()
    assert env.disk.tree() == tree


def test_a_reader_of_a_channel_without_messages(env: ChannelEnv) -> None:
    env.channel().join(persist=True)
    reader = ChannelManager(env.disk, "data", env.clock, limits=env.limits, read_only=True)
    assert Channel(reader, CHANNEL, OPERATOR).history() == ([], 1, 1, 0)
    assert Channel(reader, CHANNEL, OPERATOR).bounds() == (1, 0)


def test_close_delivers_accepted_messages(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join(persist=True)
    bob.join()
    heard, pending = bob.subscribe(), ann.submit([b"last"])
    env.manager.close()
    assert pending.result().durable
    assert len(heard.take()) == 2


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


def queue(env: ChannelEnv, **config: Any) -> Channel:
    ann = env.channel(ANN)
    ann.join(persist=True, type="fifo", **config)
    env.channel(BOB).join()
    return ann


def test_fifo_messages_are_popped_once_in_order_across_restarts(env: ChannelEnv) -> None:
    ann, bob = queue(env), env.channel(BOB)
    for number in range(4):
        ann.push(b"%d" % number)
    assert [bob.pop().payload, ann.pop().payload] == [b"0", b"1"]
    env.crash()
    assert len(env.channel(ANN)) == 2
    assert [env.channel(BOB).pop().payload for _ in range(2)] == [b"2", b"3"]
    with pytest.raises(FifoEmpty):
        env.channel(BOB).pop()
    env.crash()
    with pytest.raises(FifoEmpty):
        env.channel(BOB).pop()
    assert env.channel(ANN).push(b"4").seq == 5


def test_a_full_fifo_refuses_pushes_until_the_owner_clears_it(env: ChannelEnv) -> None:
    ann, bob = queue(env, max_persist_messages=2), env.channel(BOB)
    ann.push(b"1")
    ann.push(b"2")
    with pytest.raises(FifoFull):
        ann.push(b"3")
    for act in (lambda: bob.push(b"x"), lambda: bob.clear(), lambda: len(bob)):
        with pytest.raises(Forbidden):
            act()
    assert ann.clear() == 2
    assert len(ann) == 0
    ann.push(b"4")
    assert bob.pop().payload == b"4"
    with pytest.raises(WrongType):
        ann.publish(b"x")
    with pytest.raises(WrongType):
        ann.history()


def test_a_popped_message_is_durable(env: ChannelEnv) -> None:
    ann = queue(env, message_flush_interval=1_000)
    ann.push(b"1")
    ann.push(b"2")
    assert env.channel(BOB).pop().payload == b"1"
    env.crash()
    assert env.channel(BOB).pop().payload == b"2"


@pytest.mark.parametrize("content", [b"", b"\0" * 16, None, b"beyond"])
def test_a_lost_cursor_raises_until_the_channel_is_cleared(env: ChannelEnv, content: bytes | None) -> None:
    ann = queue(env)
    ann.push(b"1")
    env.manager.close()
    if content is None:
        env.disk.remove(f"{DIRECTORY}/cursor.bin")
    else:
        env.disk.write_file(f"{DIRECTORY}/cursor.bin", encode_cursor(9) if content == b"beyond" else content)
    env.restart()
    ann = env.channel(ANN)
    for act in (ann.pop, lambda: ann.push(b"2"), lambda: len(ann)):
        with pytest.raises(CursorLost):
            act()
    assert ann.clear() == 0
    ann.push(b"3")
    assert ann.pop().payload == b"3"


def test_a_pop_whose_cursor_cannot_be_written_returns_nothing(env: ChannelEnv) -> None:
    ann = queue(env)
    ann.push(b"1")
    for call in CALLS:
        env.disk.fail(call, path=DIRECTORY)
        with pytest.raises(WriteFailed):
            ann.pop()
        assert len(ann) == 1
    env.crash()
    assert env.channel(ANN).pop().payload == b"1"


def test_a_channel_that_becomes_fifo_hides_earlier_messages(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True)
    ann.publish(b"said")
    ann.configure(type="fifo")
    assert len(ann) == 0
    assert ann.push(b"job").seq == 2
    env.crash()
    assert env.channel(ANN).pop().payload == b"job"
    env.channel(BOB).join()
    env.channel(ANN).leave()
    assert env.manager.channel_names() == [], "a fifo channel ends with its owner"


def test_a_damaged_fifo_message_raises_and_clear_skips_it(env: ChannelEnv) -> None:
    ann = queue(env)
    ann.push(b"a long enough message")
    ann.push(b"two")
    with env.manager.locked(CHANNEL):
        env.manager.get_channel(CHANNEL).message_log()._log.seal()
    ann.push(b"three")
    env.manager.close()
    env.disk.flip_bit(f"{DIRECTORY}/{1:020d}.log", 40, 3)
    env.restart()
    with pytest.raises(Corrupt):
        env.channel(ANN).pop()
    assert len(env.channel(ANN)) == 3, "nothing was popped"
    assert env.channel(ANN).clear() == 3
