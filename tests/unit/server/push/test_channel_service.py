"""Channels on an event loop, without sockets: publish queues, turns of streams, blocking calls."""

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

CHANNEL, ANN, BOB = "!general@example.org", "ann@example.org", "bob@example.org"


class Peer:
    """A peer that reads everything, or nothing."""

    def __init__(self, encode: Callable[..., bytes] = encode_sse_event) -> None:
        self.encode, self.pending_bytes, self.got = encode, 0, list[bytes]()

    def send_frames(self, frames: list[bytes]) -> None:
        self.got += frames

    def send_gap(self, channel: str, first: int, last: int) -> None:
        self.got.append(f"gap {channel} {first} {last}".encode())

    def send_error(self, channel: str, code: str, message: str) -> None:
        self.got.append(f"{channel} {code} {message}".encode())


def run_scenario(
    scenario: Callable[[ChannelService, ChannelManager], Awaitable[None]], hook: Hook | None = None, **limits: Any
) -> None:
    async def run() -> None:
        channels = ChannelService(asyncio.get_running_loop(), ServerConfig(), keys=True, hook=hook)
        manager = ChannelManager(SimDisk(), "data", SystemClock(), limits=ChannelLimits(**limits), hook=hook)
        channels.set_manager(manager)
        try:
            async with asyncio.timeout(60):
                await scenario(channels, manager)
        finally:
            channels.stop()
            manager.close()
            channels.close()

    asyncio.run(run())


async def open_stream(channels: ChannelService, user: str, peer: Peer) -> ChannelStream:
    stream = ChannelStream(channels, CHANNEL, user, lambda: None, peer)
    await stream.open()
    stream.start(peer)
    return stream


async def publish(channels: ChannelService, *payloads: bytes, qos: int = 1, source: object = None) -> Ack:
    return await channels.publish(CHANNEL, ANN, list(payloads), qos=qos, source=source)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_publish_before_channels_are_restored_is_not_ready() -> None:
    async def run() -> None:
        channels = ChannelService(asyncio.get_running_loop(), ServerConfig(), keys=False, hook=None)
        with pytest.raises(ApiError) as refused:
            channels.publish(CHANNEL, ANN, [b"x"], qos=1, source=None)
        assert refused.value.code == "not_ready"
        channels.close()

    asyncio.run(run())


def test_message_of_a_transient_channel_is_delivered_in_the_same_turn() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)
        assert channels.publish(CHANNEL, ANN, [b"x"], qos=1, source=None).done()
        with pytest.raises(NotMember):
            channels.publish(CHANNEL, BOB, [b"x"], qos=1, source=None)

    run_scenario(scenario)


def test_publish_does_not_block_the_loop_on_a_locked_shard() -> None:
    """A join that is being saved holds its shard; a publish to another channel of that shard goes to a thread."""

    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)
        held, release = Event(), Event()

        def save() -> None:
            with manager.locked(CHANNEL):
                held.set()
                release.wait(30)

        saving = asyncio.create_task(channels.run_blocking(save))
        await until(held.is_set)
        future = channels.publish(CHANNEL, ANN, [b"x"], qos=1, source=None)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not future.done()
        release.set()
        assert (await future).seq == 1
        await saving

    run_scenario(scenario)


def test_publishes_of_a_channel_keep_their_order_and_share_an_fsync() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN, config={"persist": True})
        futures = [channels.publish(CHANNEL, ANN, [b"%d" % n], qos=n % 2, source=None) for n in range(200)]
        acks = await asyncio.gather(*futures)
        assert [ack.seq for ack in acks] == list(range(1, 201))
        assert [ack.qos for ack in acks] == [n % 2 for n in range(200)]
        assert manager.metrics.get("message_log_flushes", "success") < 20

    run_scenario(scenario)


def test_error_of_a_publish_reaches_only_its_publisher() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN, config={"persist": True})
        publishes = [channels.publish(CHANNEL, user, [b"x"], qos=1, source=None) for user in (ANN, BOB, ANN)]
        done = await asyncio.gather(*publishes, return_exceptions=True)
        assert isinstance(done[1], NotMember)
        assert [ack.seq for ack in done if isinstance(ack, Ack)] == [1, 2]
        with pytest.raises(ChannelNotFound):
            await channels.publish("!none@example.org", ANN, [b"x"], qos=1, source=None)

    run_scenario(scenario)


def test_cancelled_publish_does_not_affect_the_next_one() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN, config={"persist": True})
        first, second = (channels.publish(CHANNEL, ANN, [b"x"], qos=1, source=None) for _ in range(2))
        first.cancel()
        assert (await second).seq == 2

    run_scenario(scenario)


def test_next_batch_waits_for_the_turns_of_all_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues of forty, batches of twenty: a third batch before every stream had a turn would end a stream."""
    monkeypatch.setattr(module, "BATCH_MESSAGES_MAX", 1)
    monkeypatch.setattr(module, "TURN_STREAMS_MAX", 8)

    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN, config={"persist": True, "message_flush_interval": 1000})
        peers = [Peer() for _ in range(400)]
        streams = [await open_stream(channels, ANN, peer) for peer in peers]
        await asyncio.gather(*(channels.publish(CHANNEL, ANN, [b"x"] * 20, qos=1, source=None) for _ in range(20)))
        await until(lambda: all(len(peer.got) == 400 for peer in peers))
        assert not any(stream.is_ended for stream in streams)

    run_scenario(scenario, queue_max=40)


def test_frame_is_encoded_once_for_all_receivers_of_a_transport() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)
        frames = 0

        def counted(event: object) -> bytes:
            nonlocal frames
            frames += 1
            return encode_sse_event(event)  # type: ignore[arg-type]

        peers = [Peer(counted) for _ in range(300)] + [Peer(encode_ws_event) for _ in range(10)]
        for peer in peers:
            await open_stream(channels, ANN, peer)
        await publish(channels, b"hello")
        await until(lambda: all(peer.got for peer in peers))
        assert frames == 1
        assert len({id(peer.got[0]) for peer in peers[:300]}) == 1
        assert peers[-1].got[0].startswith(b'{"op":"message"')

    run_scenario(scenario)


def test_error_of_one_receiver_ends_only_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)

        def breaks(_: object) -> bytes:
            raise RuntimeError("no frame for this one")

        peers = [Peer(), Peer(breaks), *(Peer() for _ in range(200))]
        streams = [await open_stream(channels, ANN, peer) for peer in peers]
        for _ in range(2):
            await publish(channels, b"hello")
        await until(lambda: all(len(peer.got) == 2 for number, peer in enumerate(peers) if number != 1))
        assert [stream.is_ended for stream in streams[:3]] == [False, True, False]

    run_scenario(scenario)
    assert [record.message for record in caplog.records] == [f"a stream of channel {CHANNEL} failed"]


def test_frame_cache_is_bounded_and_never_returns_another_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.server.push.peers._CACHED_FRAMES_MAX", 4)
    cache = FrameCache()
    for seq in range(1, 100):
        assert b'"seq":%d,' % seq in cache.get(Message(CHANNEL, seq, 0, ANN, b"x"), encode_ws_event)


@pytest.mark.parametrize("reason", ["slow", "deleted"])
def test_peer_that_reads_nothing_gets_only_its_last_event(reason: str) -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)
        peer = Peer(encode_ws_event)
        stream = await open_stream(channels, ANN, peer)
        await publish(channels, b"taken")
        await until(lambda: len(peer.got) == 1)
        peer.pending_bytes = 1 << 30
        await publish(channels, *([b"x"] * 5))
        await until(lambda: stream.is_paused)
        assert len(peer.got) == 1
        if reason == "slow":
            await publish(channels, *([b"x"] * 6))
        else:
            await channels.run_blocking(lambda: membership.delete(manager, CHANNEL, ANN))
        await until(lambda: stream.is_ended)
        assert b'"reason":"%b"' % reason.encode() in peer.got[-1]
        assert len(peer.got) == (2 if reason == "slow" else 8), "messages, presence and the end"
        if reason == "slow":
            assert b'"last_seq":1}' in peer.got[-1], "the last seq that was sent, not the last one queued"

    run_scenario(scenario, queue_max=10)


def test_stream_closed_during_its_subscription_leaves_no_receiver() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)
        held, release = Event(), Event()

        def busy() -> None:
            with manager.locked(CHANNEL):
                held.set()
                release.wait(30)

        working = asyncio.create_task(channels.run_blocking(busy))
        await until(held.is_set)
        stream = ChannelStream(channels, CHANNEL, ANN, lambda: None, None)
        opening = asyncio.create_task(stream.open())
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        release.set()
        await working
        await until(lambda: not manager.get_channel(CHANNEL).subscriptions and stream._subscription is not None)
        assert not channels.streams

    run_scenario(scenario)


def test_the_hook_runs_off_the_loop() -> None:
    threads: set[int] = set()

    def hook(_: object) -> bool:
        threads.add(get_ident())
        return True

    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN)
        await publish(channels, b"x")
        assert threads
        assert get_ident() not in threads

    run_scenario(scenario, hook)


def test_failed_fsync_reaches_all_publishers_and_delivers_nothing() -> None:
    async def scenario(channels: ChannelService, manager: ChannelManager) -> None:
        membership.join(manager, CHANNEL, ANN, config={"persist": True})
        await publish(channels, b"one")
        peer = Peer()
        await open_stream(channels, ANN, peer)
        log = manager.get_channel(CHANNEL).message_log()

        def broken() -> None:
            raise Latched("the disk is gone")

        log.sync = broken  # type: ignore[method-assign]
        futures = [channels.publish(CHANNEL, ANN, [b"x"], qos=1, source=None) for _ in range(3)]
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(error).__name__ for error in done] == ["Latched"] * 3
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.got == []
        del log.sync

    run_scenario(scenario)
