"""Channels on an event loop, without sockets: lanes, turns, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from threading import Event, get_ident
from typing import Any

import pytest

from tidelog.channels import Ack, ChannelLimits, ChannelManager, Hook, Message, membership
from tidelog.clock import SystemClock
from tidelog.errors import ChannelNotFound, Latched, NotMember
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError
from tidelog.server.push import channel_stream as module
from tidelog.server.push.channel_stream import ChannelService, ChannelStream
from tidelog.server.push.peers import FrameCache, encode_sse_event, encode_ws_event
from tidelog.testing import SimDisk

ROOM, ANN, BOB = "!room@example.org", "ann@example.org", "bob@example.org"


class Peer:
    """Takes everything, or nothing."""

    def __init__(self, render: Callable[..., bytes] = encode_sse_event) -> None:
        self.encode, self.pending_bytes, self.got = render, 0, list[bytes]()

    def send_frames(self, made: list[bytes]) -> None:
        self.got += made

    def send_gap(self, channel: str, first: int, last: int) -> None:
        self.got.append(f"gap {channel} {first} {last}".encode())

    def send_error(self, channel: str, code: str, message: str) -> None:
        self.got.append(f"{channel} {code} {message}".encode())


def play(
    scenario: Callable[[ChannelService, ChannelManager], Awaitable[None]], hook: Hook | None = None, **limits: Any
) -> None:
    async def run() -> None:
        rooms = ChannelService(asyncio.get_running_loop(), ServerConfig(), keys=True, hook=hook)
        manager = ChannelManager(SimDisk(), "data", SystemClock(), limits=ChannelLimits(**limits), hook=hook)
        rooms.set_manager(manager)
        try:
            async with asyncio.timeout(60):
                await scenario(rooms, manager)
        finally:
            rooms.stop()
            manager.close()
            rooms.close()

    asyncio.run(run())


async def listening(rooms: ChannelService, user: str, peer: Peer) -> ChannelStream:
    receiver = ChannelStream(rooms, ROOM, user, lambda: None, peer)
    await receiver.open()
    receiver.start(peer)
    return receiver


async def spoken(rooms: ChannelService, *payloads: bytes, qos: int = 1, source: object = None) -> Ack:
    return await rooms.publish(ROOM, ANN, list(payloads), qos=qos, source=source)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0)


def test_before_channels_are_restored_everything_is_not_ready() -> None:
    async def run() -> None:
        rooms = ChannelService(asyncio.get_running_loop(), ServerConfig(), keys=False, hook=None)
        with pytest.raises(ApiError) as refused:
            rooms.publish(ROOM, ANN, [b"x"], qos=1, source=None)
        assert refused.value.code == "not_ready"
        rooms.close()

    asyncio.run(run())


def test_what_keeps_nothing_is_delivered_in_the_same_turn() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)
        assert rooms.publish(ROOM, ANN, [b"x"], qos=1, source=None).done()
        with pytest.raises(NotMember):
            rooms.publish(ROOM, BOB, [b"x"], qos=1, source=None)

    play(scenario)


def test_a_lock_that_a_save_holds_keeps_the_loop_going() -> None:
    """A join that is being saved holds its shard; a publish to another channel of that shard goes to a thread."""

    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)
        held, let_go = Event(), Event()

        def save() -> None:
            with manager.locked(ROOM):
                held.set()
                let_go.wait(30)

        saving = asyncio.create_task(rooms.run_blocking(save))
        await until(held.is_set)
        future = rooms.publish(ROOM, ANN, [b"x"], qos=1, source=None)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not future.done()
        let_go.set()
        assert (await future).seq == 1
        await saving

    play(scenario)


def test_publishes_of_a_lane_keep_their_order_and_share_a_sync() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN, config={"persist": True})
        futures = [rooms.publish(ROOM, ANN, [b"%d" % n], qos=n % 2, source=None) for n in range(200)]
        acks = await asyncio.gather(*futures)
        assert [ack.seq for ack in acks] == list(range(1, 201))
        assert [ack.qos for ack in acks] == [n % 2 for n in range(200)]
        assert manager.metrics.get("message_log_flushes", "success") < 20

    play(scenario)


def test_an_error_in_a_lane_is_its_own_publishers_and_nobody_elses() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN, config={"persist": True})
        asked = [rooms.publish(ROOM, user, [b"x"], qos=1, source=None) for user in (ANN, BOB, ANN)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(done[1], NotMember)
        assert [ack.seq for ack in done if isinstance(ack, Ack)] == [1, 2]
        with pytest.raises(ChannelNotFound):
            await rooms.publish("!none@example.org", ANN, [b"x"], qos=1, source=None)

    play(scenario)


def test_a_publisher_who_leaves_takes_nobody_along() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN, config={"persist": True})
        first, second = (rooms.publish(ROOM, ANN, [b"x"], qos=1, source=None) for _ in range(2))
        first.cancel()
        assert (await second).seq == 2

    play(scenario)


def test_publishers_wait_for_the_turns_of_all_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues of forty, batches of twenty: a third batch before everybody had a turn would cut somebody off."""
    monkeypatch.setattr(module, "BATCH_MESSAGES_MAX", 1)
    monkeypatch.setattr(module, "TURN_STREAMS_MAX", 8)

    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN, config={"persist": True, "message_flush_interval": 1000})
        peers = [Peer() for _ in range(400)]
        heard = [await listening(rooms, ANN, peer) for peer in peers]
        await asyncio.gather(*(rooms.publish(ROOM, ANN, [b"x"] * 20, qos=1, source=None) for _ in range(20)))
        await until(lambda: all(len(peer.got) == 400 for peer in peers))
        assert not any(receiver.is_ended for receiver in heard)

    play(scenario, queue_max=40)


def test_a_frame_is_made_once_for_all_receivers_of_a_kind() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)
        made = 0

        def counted(event: object) -> bytes:
            nonlocal made
            made += 1
            return encode_sse_event(event)  # type: ignore[arg-type]

        peers = [Peer(counted) for _ in range(300)] + [Peer(encode_ws_event) for _ in range(10)]
        for peer in peers:
            await listening(rooms, ANN, peer)
        await spoken(rooms, b"hello")
        await until(lambda: all(peer.got for peer in peers))
        assert made == 1
        assert len({id(peer.got[0]) for peer in peers[:300]}) == 1
        assert peers[-1].got[0].startswith(b'{"op":"message"')

    play(scenario)


def test_a_receiver_that_breaks_is_its_own_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)

        def breaks(_: object) -> bytes:
            raise RuntimeError("no frame for this one")

        peers = [Peer(), Peer(breaks), *(Peer() for _ in range(200))]
        heard = [await listening(rooms, ANN, peer) for peer in peers]
        for _ in range(2):
            await spoken(rooms, b"hello")
        await until(lambda: all(len(peer.got) == 2 for number, peer in enumerate(peers) if number != 1))
        assert [receiver.is_ended for receiver in heard[:3]] == [False, True, False]

    play(scenario)
    assert [record.message for record in caplog.records] == [f"a stream of channel {ROOM} failed"]


def test_kept_frames_are_bounded_and_never_of_another_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.server.push.peers._CACHED_FRAMES_MAX", 4)
    kept = FrameCache()
    for seq in range(1, 100):
        assert b'"seq":%d,' % seq in kept.get(Message(ROOM, seq, 0, ANN, b"x"), encode_ws_event)


@pytest.mark.parametrize("reason", ["slow", "deleted"])
def test_a_peer_that_takes_nothing_gets_no_more_than_its_end(reason: str) -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)
        peer = Peer(encode_ws_event)
        receiver = await listening(rooms, ANN, peer)
        await spoken(rooms, b"taken")
        await until(lambda: len(peer.got) == 1)
        peer.pending_bytes = 1 << 30
        await spoken(rooms, *([b"x"] * 5))
        await until(lambda: receiver.is_paused)
        assert len(peer.got) == 1
        if reason == "slow":
            await spoken(rooms, *([b"x"] * 6))
        else:
            await rooms.run_blocking(lambda: membership.delete(manager, ROOM, ANN))
        await until(lambda: receiver.is_ended)
        assert b'"reason":"%b"' % reason.encode() in peer.got[-1]
        assert len(peer.got) == (2 if reason == "slow" else 8), "messages, presence and the end"
        if reason == "slow":
            assert b'"last_seq":1}' in peer.got[-1], "what it has, not what waited for it"

    play(scenario, queue_max=10)


def test_a_stream_that_is_closed_while_it_subscribes_leaves_no_receiver() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)
        held, let_go = Event(), Event()

        def busy() -> None:
            with manager.locked(ROOM):
                held.set()
                let_go.wait(30)

        working = asyncio.create_task(rooms.run_blocking(busy))
        await until(held.is_set)
        receiver = ChannelStream(rooms, ROOM, ANN, lambda: None, None)
        opening = asyncio.create_task(receiver.open())
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        let_go.set()
        await working
        await until(lambda: not manager.get_channel(ROOM).subscriptions and receiver._subscription is not None)
        assert not rooms.streams

    play(scenario)


def test_the_hook_runs_off_the_loop() -> None:
    threads: set[int] = set()

    def hook(_: object) -> bool:
        threads.add(get_ident())
        return True

    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN)
        await spoken(rooms, b"x")
        assert threads
        assert get_ident() not in threads

    play(scenario, hook)


def test_a_failed_sync_is_told_to_all_who_waited_and_nobody_hears_of_it() -> None:
    async def scenario(rooms: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, ROOM, ANN, config={"persist": True})
        await spoken(rooms, b"one")
        peer = Peer()
        await listening(rooms, ANN, peer)
        room = manager.get_channel(ROOM)
        log = room.message_log()

        def broken() -> None:
            raise Latched("the disk is gone")

        log.sync = broken  # type: ignore[method-assign]
        futures = [rooms.publish(ROOM, ANN, [b"x"], qos=1, source=None) for _ in range(3)]
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(error).__name__ for error in done] == ["Latched"] * 3
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.got == []
        del log.sync

    play(scenario)
