"""Restoring, shards, limits, what a failed save leaves (G132, G135, G137, G140-G142, G150)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.channels.conftest import ANN, BOB, CID, ROOM, Place

from tidelog.channels import OPERATOR, Channel, ChannelManager, changes
from tidelog.channels.names import directory_name
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
from tidelog.formats.channel import encode_cursor
from tidelog.testing import Call

CALLS: tuple[Call, ...] = ("create", "sync", "rename", "sync_dir")
DIRECTORY = f"data/channels/{directory_name(ROOM)}"


def test_everything_of_a_persistent_channel_survives_and_the_rest_does_not(place: Place) -> None:
    ann = place.channel(ANN)
    ann.join(persist=True, max_clients=7, message_flush_interval=5)
    place.channel(BOB).join()
    ann.allow("publish", ANN, "else.org")
    place.channel(ANN, "!passing@host").join()
    before = place.manager.meta(ROOM)
    place.crash()
    assert place.manager.handlers() == [ROOM]
    assert place.manager.meta(ROOM) == before
    assert place.manager.memberships.users() == {ANN: [ROOM], BOB: [ROOM]}
    assert place.manager.report.restored == 1


def test_without_authentication_nothing_is_restored_and_nothing_touched(place: Place) -> None:
    place.channel().join(persist=True)
    place.disk.write_file(f"data/channels/{'a' * 64}/{1:020d}.log", b"left over")
    tree = place.disk.tree()
    place.limits = replace(place.limits, auth=False)
    place.restart()
    assert place.manager.handlers() == []
    with pytest.raises(Forbidden):
        place.channel().join(persist=True)
    place.channel().join()
    place.channel().publish(b"x")
    place.channel().delete()
    assert changes.delete(place.manager, ROOM, OPERATOR) is False
    place.manager.close()
    now = {name: data for name, data in place.disk.tree().items() if not name.endswith(".lock")}
    assert now == tree


def test_restored_members_stay_whatever_the_limit_is_now(place: Place) -> None:
    for number in range(3):
        place.channel(ANN, f"!{number}@host").join(persist=True)
    place.limits = replace(place.limits, channels_per_client_max=1, channels_max=1)
    place.restart()
    assert len(place.manager.memberships.of(ANN)) == 3
    with pytest.raises(Throttled):
        place.channel(BOB, "!new@host").join()
    place.limits = replace(place.limits, channels_max=10)
    place.restart()
    with pytest.raises(Throttled):
        place.channel(ANN, "!new@host").join()
    place.channel(BOB, "!new@host").join()


def test_one_corrupt_channel_is_passed_over_and_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.channel().join(persist=True)
    place.channel(BOB, "!other@host").join(persist=True)
    place.manager.close()
    place.disk.write_file(f"{DIRECTORY}/metadata.bin", b"nonsense, but long enough for a head")
    place.restart()
    assert place.manager.handlers() == ["!other@host"]
    assert list(place.manager.report.skipped) == [directory_name(ROOM)]
    assert place.manager.metrics.get("store_loads", "corrupt") == 1
    assert "passed over" in caplog.text
    for act in (lambda: place.channel().join(persist=True), lambda: place.channel().publish(b"x")):
        with pytest.raises(Damaged, match="offline"):
            act()
    assert changes.delete(place.manager, ROOM, OPERATOR) is True
    place.channel().join(persist=True)
    assert place.channel().publish(b"anew").seq == 1


def test_a_log_that_cannot_be_opened_keeps_only_its_channel_offline(place: Place) -> None:
    place.channel().join(persist=True)
    place.channel().publish(b"x")
    place.channel(BOB, "!other@host").join(persist=True)
    place.restart()
    place.disk.fail("open", path=f"{DIRECTORY}/{1:020d}.log", times=None)
    with pytest.raises(Damaged):
        place.channel().publish(b"y")
    place.channel(BOB, "!other@host").publish(b"fine")
    place.disk.heal()
    assert place.channel().publish(b"y").seq == 2


CHANGES: dict[str, Any] = {
    "join": lambda place: place.channel(CID).join(),
    "leave": lambda place: place.channel(BOB).leave(),
    "the owner leaves": lambda place: place.channel(ANN).leave(),
    "kick": lambda place: place.channel(ANN).kick(BOB),
    "allow": lambda place: place.channel(ANN).allow("read", BOB),
    "configure": lambda place: place.channel(ANN).configure(max_clients=3),
    "persist off": lambda place: place.channel(ANN).configure(persist=False),
    "delete": lambda place: place.channel(ANN).delete(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["create", "sync", "rename", "sync_dir"])
def test_a_failed_save_changes_nothing_and_tells_nobody(place: Place, change: str, call: Any) -> None:
    place.channel(ANN).join(persist=True)
    place.channel(BOB).join()
    place.channel(ANN).publish(b"kept")
    heard = place.channel(BOB).subscribe()
    before, users = place.manager.meta(ROOM), place.manager.memberships.users()
    place.disk.fail(call, path=DIRECTORY)
    with pytest.raises(WriteFailed):
        CHANGES[change](place)
    assert place.manager.meta(ROOM) == before
    assert place.manager.memberships.users() == users
    assert heard.take() == []
    assert place.channel(ANN).publish(b"more").seq == 2
    place.crash()
    assert place.manager.meta(ROOM) == before
    assert [message.payload for message in place.channel(ANN).history().messages] == [b"kept", b"more"]
    CHANGES[change](place)


def test_a_first_join_that_cannot_be_saved_makes_no_channel(place: Place) -> None:
    place.manager  # noqa: B018
    calls: tuple[Call, ...] = ("mkdir", "create", "sync", "rename")
    for call in calls:
        place.disk.fail(call, path="channels")
        with pytest.raises(WriteFailed):
            place.channel().join(persist=True)
        assert place.manager.handlers() == []
        assert place.manager.memberships.users() == {}
        place.crash()
        assert place.manager.handlers() == []
    place.channel().join(persist=True)


def test_a_change_that_a_failing_disk_left_undecided_is_put_right_by_the_tick(place: Place) -> None:
    place.channel(ANN).join(persist=True)
    before = place.manager.meta(ROOM)
    place.disk.fail("sync_dir", path=DIRECTORY, times=None)
    with pytest.raises(WriteFailed):
        place.channel(BOB).join()
    place.disk.heal()
    place.manager.tick()
    place.crash()
    assert place.manager.meta(ROOM) == before


def test_logs_are_opened_when_needed_and_only_so_many_stay_open(place: Place) -> None:
    place.limits = replace(place.limits, logs_open_max=2, shards=1)
    rooms = [place.channel(ANN, f"!{number}@host") for number in range(6)]
    for room in rooms:
        room.join(persist=True)
        room.publish(b"1")
    shard = place.manager.shard("!0@host")
    assert len(shard.open) == 2
    assert [room.publish(b"2").seq for room in rooms] == [2] * 6
    assert [len(room.history().messages) for room in rooms] == [2] * 6
    place.restart()
    assert not place.manager.shard("!0@host").open


def test_only_the_owner_changes_a_channel(place: Place) -> None:
    place.channel(ANN).join()
    bob = place.channel(BOB)
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
        place.channel(CID).state()
    with pytest.raises(ChannelNotFound):
        place.channel(CID, "!none@host").invite(BOB)
    operator = Channel(place.manager, ROOM, OPERATOR)
    assert operator.members() == (ANN, BOB)
    operator.kick(BOB)
    assert operator.allow("join", "host") == ("host",)
    with pytest.raises(BadInput):
        operator.publish(b"x")
    assert operator.delete() is True
    assert operator.delete() is False


def test_members_come_in_pages(place: Place) -> None:
    for number in range(5):
        place.channel(f"u{number}@host").join()
    room = place.channel("u0@host")
    assert room.members(2, 2) == ("u2@host", "u3@host")
    with pytest.raises(BadInput):
        room.members(0)


def test_a_user_who_is_gone_leaves_what_does_not_persist(place: Place) -> None:
    place.channel(ANN).join(persist=True)
    place.channel(ANN, "!passing@host").join()
    assert changes.gone(place.manager, ANN) == ["!passing@host"]
    assert place.manager.memberships.of(ANN) == [ROOM]


def test_channels_of_another_domain_are_refused(place: Place) -> None:
    place.limits = replace(place.limits, domain="host")
    place.channel().join()
    with pytest.raises(Forbidden):
        place.channel(ANN, "!room@else").join()


def test_a_closed_or_read_only_directory_takes_nothing(place: Place) -> None:
    place.channel().join(persist=True)
    place.channel().publish(b"x")
    place.manager.close()
    place.manager.close()
    with pytest.raises(Closed):
        place.channel().publish(b"y")
    tree = place.disk.tree()
    reader = ChannelManager(place.disk, "data", place.clock, limits=place.limits, read_only=True)
    room = Channel(reader, ROOM, ANN)
    assert [message.payload for message in room.history().messages] == [b"x"]
    for act in (lambda: room.publish(b"y"), lambda: room.leave(), lambda: room.delete(), lambda: room.subscribe()):
        with pytest.raises(ReadOnly):
            act()
    reader.close()
    assert place.disk.tree() == tree


def test_a_reader_of_a_channel_without_messages(place: Place) -> None:
    place.channel().join(persist=True)
    reader = ChannelManager(place.disk, "data", place.clock, limits=place.limits, read_only=True)
    assert Channel(reader, ROOM, OPERATOR).history() == ([], 1, 1, 0)
    assert Channel(reader, ROOM, OPERATOR).bounds() == (1, 0)


def test_a_closing_manager_delivers_what_was_accepted(place: Place) -> None:
    ann, bob = place.channel(ANN), place.channel(BOB)
    ann.join(persist=True)
    bob.join()
    heard, pending = bob.subscribe(), ann.submit([b"last"])
    place.manager.close()
    assert pending.result().durable
    assert len(heard.take()) == 2


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


def queue(place: Place, **config: object) -> Channel:
    ann = place.channel(ANN)
    ann.join(persist=True, type="fifo", **config)
    place.channel(BOB).join()
    return ann


def test_a_queue_is_popped_in_order_once_and_over_restarts(place: Place) -> None:
    ann, bob = queue(place), place.channel(BOB)
    for number in range(4):
        ann.push(b"%d" % number)
    assert [bob.pop().payload, ann.pop().payload] == [b"0", b"1"]
    place.crash()
    assert len(place.channel(ANN)) == 2
    assert [place.channel(BOB).pop().payload for _ in range(2)] == [b"2", b"3"]
    with pytest.raises(FifoEmpty):
        place.channel(BOB).pop()
    place.crash()
    with pytest.raises(FifoEmpty):
        place.channel(BOB).pop()
    assert place.channel(ANN).push(b"4").seq == 5


def test_a_full_queue_refuses_and_the_owner_clears(place: Place) -> None:
    ann, bob = queue(place, max_persist_messages=2), place.channel(BOB)
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


def test_a_pop_makes_durable_what_it_hands_out(place: Place) -> None:
    ann = queue(place, message_flush_interval=1_000)
    ann.push(b"1")
    ann.push(b"2")
    assert place.channel(BOB).pop().payload == b"1"
    place.crash()
    assert place.channel(BOB).pop().payload == b"2"


@pytest.mark.parametrize("content", [b"", b"\0" * 16, None, b"beyond"])
def test_a_lost_cursor_is_not_guessed(place: Place, content: bytes | None) -> None:
    ann = queue(place)
    ann.push(b"1")
    place.manager.close()
    if content is None:
        place.disk.remove(f"{DIRECTORY}/cursor.bin")
    else:
        place.disk.write_file(f"{DIRECTORY}/cursor.bin", encode_cursor(9) if content == b"beyond" else content)
    place.restart()
    ann = place.channel(ANN)
    for act in (ann.pop, lambda: ann.push(b"2"), lambda: len(ann)):
        with pytest.raises(CursorLost):
            act()
    assert ann.clear() == 0
    ann.push(b"3")
    assert ann.pop().payload == b"3"


def test_a_pop_whose_cursor_cannot_be_written_hands_nothing_out(place: Place) -> None:
    ann = queue(place)
    ann.push(b"1")
    for call in CALLS:
        place.disk.fail(call, path=DIRECTORY)
        with pytest.raises(WriteFailed):
            ann.pop()
        assert len(ann) == 1
    place.crash()
    assert place.channel(ANN).pop().payload == b"1"


def test_a_channel_becomes_a_queue_and_its_past_is_out_of_reach(place: Place) -> None:
    ann = place.channel(ANN)
    ann.join(persist=True)
    ann.publish(b"said")
    ann.configure(type="fifo")
    assert len(ann) == 0
    assert ann.push(b"job").seq == 2
    place.crash()
    assert place.channel(ANN).pop().payload == b"job"
    place.channel(BOB).join()
    place.channel(ANN).leave()
    assert place.manager.handlers() == [], "a fifo channel ends with its owner"


def test_a_damaged_message_is_told_and_the_queue_can_be_cleared(place: Place) -> None:
    ann = queue(place)
    ann.push(b"a long enough message")
    ann.push(b"two")
    with place.manager.locked(ROOM):
        place.manager.room(ROOM).messages()._log.seal()
    ann.push(b"three")
    place.manager.close()
    place.disk.flip(f"{DIRECTORY}/{1:020d}.log", 40, 3)
    place.restart()
    with pytest.raises(Corrupt):
        place.channel(ANN).pop()
    assert len(place.channel(ANN)) == 3, "nothing was popped"
    assert place.channel(ANN).clear() == 3
