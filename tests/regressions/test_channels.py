"""Bugs of channels, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest
from tests.kit import processes
from tests.unit.channels.conftest import ANN, BOB, CHANNEL, CID, ChannelEnv
from tests.unit.engine.harness import TIMEOUT_S, running

import tidelog
from tidelog.channels import OPERATOR, Channel, ChannelLimits, Message, store
from tidelog.channels.channel_state import ChannelState
from tidelog.channels.rules import directory_name
from tidelog.channels.store import ChannelStore
from tidelog.errors import Corrupt, Error, FifoEmpty, FifoFull, Latched, Refused, WriteFailed
from tidelog.formats.small_files import ChannelMeta
from tidelog.testing import ManualClock, SimDisk

Patch = pytest.MonkeyPatch

CHANGES: dict[str, Callable[[Channel, Channel], object]] = {
    "kick": lambda owner, _: owner.kick(BOB),
    "leave": lambda _, member: member.leave(),
    "configure": lambda owner, _: owner.configure(max_payload_size=100),
    "change persist": lambda owner, _: owner.configure(persist=not owner.state().config.persist),
    "delete": lambda owner, _: owner.delete(),
    "invite": lambda owner, _: owner.invite("eva@host"),
    "allow": lambda owner, _: owner.allow("publish", ANN, CID),
}


class Slow:
    """Syncs of message logs that a test lets go one by one: what is published meanwhile waits for the next one."""

    def __init__(self, patch: Patch) -> None:
        self.begun, self.go, self.free = Event(), Event(), False
        real = store.MessageLog.sync

        def sync(log: store.MessageLog) -> None:
            self.begun.set()
            if not self.free:
                assert self.go.wait(TIMEOUT_S), "nobody let it go"
                self.go.clear()
            real(log)

        patch.setattr(store.MessageLog, "sync", sync)

    def one(self) -> None:
        """Wait until a sync has begun and let it end."""
        assert self.begun.wait(TIMEOUT_S)
        self.begun.clear()
        self.go.set()


def noted(patch: Patch, room: ChannelState, note: Callable[[], object]) -> None:
    """Have `note` called when a change of the channel is put into force."""
    apply, end = room.apply, room.shut_down

    def applied(meta: ChannelMeta) -> None:
        note()
        apply(meta)

    def ended(reason: Any) -> None:
        note()
        end(reason)

    patch.setattr(room, "apply", applied)
    patch.setattr(room, "shut_down", ended)


class NotedLock:
    """A lock that calls `note` before it is taken with `with`, as a change takes it."""

    def __init__(self, lock: Lock, note: Callable[[], object]) -> None:
        self._note, self.acquire, self.release, self.locked = note, lock.acquire, lock.release, lock.locked

    def __enter__(self) -> None:
        self._note()
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread to get there."""
    pause = Event()
    for _ in range(TIMEOUT_S * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("another thread did not get there")


@pytest.fixture
def env() -> ChannelEnv:
    return ChannelEnv()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("persist", [True, False])
def test_a_change_has_its_turn_after_one_commit_at_most(
    env: ChannelEnv, monkeypatch: Patch, change: str, persist: bool
) -> None:
    """Method: publishers flood the channel; commits are counted from the moment at which the change waits for the
    commit lock to the one at which it is in force."""
    owner, member = env.channel(ANN), env.channel(BOB)
    owner.join(persist=persist)
    member.join()
    env.channel(CID).join()
    room = env.manager.shard(CHANNEL).channels[CHANNEL]
    over, asked_at, done_at = Event(), list[int](), list[int]()
    thread = Thread(target=lambda: CHANGES[change](owner, member))
    noted_lock = NotedLock(room.commits.commit_lock, lambda: asked_at.append(room.commit_count))
    monkeypatch.setattr(room.commits, "commit_lock", noted_lock)
    noted(monkeypatch, room, lambda: done_at.append(room.commit_count))

    def flood() -> None:
        with suppress(Refused):  # its channel ends
            while not over.is_set():
                env.channel(CID).publish(b"x")

    with running(*[flood] * 4):
        until(lambda: room.commit_count >= 3)
        thread.start()
        thread.join(TIMEOUT_S)
        over.set()
        assert not thread.is_alive(), "the change waits for ever"
    assert done_at[0] - asked_at[-1] <= 1, f"{done_at[0] - asked_at[-1]} commits came before it"


@pytest.mark.parametrize("change", CHANGES)
def test_no_commit_begins_while_a_change_is_asked_for(env: ChannelEnv, monkeypatch: Patch, change: str) -> None:
    """Method: one sync at a time. While the first one runs, a change is asked for and more is published: the change
    comes next, then what was published, in one commit."""
    owner, member, third = env.channel(ANN), env.channel(BOB), env.channel(CID)
    owner.join(persist=True)
    member.join()
    third.join()
    shard = env.manager.shard(CHANNEL)
    room, slow, order = shard.channels[CHANNEL], Slow(monkeypatch), list[str]()
    noted(monkeypatch, room, lambda: order.append(f"change after {room.commit_count}"))

    def publish(payload: bytes) -> Callable[[], None]:
        def run() -> None:
            try:
                third.publish(payload)
                order.append(payload.decode())
            except Error as error:
                order.append(type(error).__name__)

        return run

    threads = [Thread(target=publish(b"first"))]
    threads[0].start()
    assert slow.begun.wait(TIMEOUT_S)
    threads.append(Thread(target=lambda: CHANGES[change](owner, member)))
    threads[1].start()
    until(lambda: room.commits.has_waiting_change)
    for payload in (b"second", b"third"):
        threads.append(Thread(target=publish(payload)))
        threads[-1].start()
    until(lambda: len(room.commits.queue) == 2)  # the first one is being synced
    slow.free = True
    slow.go.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), f"somebody waits for ever: {order}"
    assert "change after 1" in order, order
    if change == "delete":
        assert order.count("ChannelNotFound") == 2
    else:
        assert {"first", "second", "third"} <= set(order)


def test_publishers_take_turns_at_committing(env: ChannelEnv, monkeypatch: Patch) -> None:
    """Method: one sync at a time; the thread that did the first one is back although others wait."""
    ann = env.channel(ANN)
    ann.join(persist=True)
    slow, done = Slow(monkeypatch), list[bytes]()
    room = env.manager.shard(CHANNEL).channels[CHANNEL]

    def publish(payload: bytes) -> Thread:
        def run() -> None:
            ann.publish(payload)
            done.append(payload)

        thread = Thread(target=run)
        thread.start()
        return thread

    first = publish(b"first")
    assert slow.begun.wait(TIMEOUT_S)
    second = publish(b"second")
    until(lambda: room.commits.queue and room.commits.queue[0]._waiting_threads)
    slow.one()
    first.join(TIMEOUT_S)
    assert not first.is_alive(), "it commits for the others, and is never done itself"
    assert done == [b"first"]
    slow.one()
    second.join(TIMEOUT_S)
    assert done == [b"first", b"second"]


def test_readers_do_not_keep_a_change_waiting(env: ChannelEnv) -> None:
    """Method: a change that is asked for while somebody reads comes before the next read."""
    owner = env.channel(ANN)
    owner.join(persist=True)
    owner.publish(b"x")
    shard = env.manager.shard(CHANNEL)
    room, order = shard.channels[CHANNEL], list[str]()
    room.readers += 1  # somebody reads

    def configure() -> None:
        owner.configure(max_payload_size=100)
        order.append("change")

    def look() -> None:
        owner.history()
        order.append("read")

    change = Thread(target=configure)
    change.start()
    until(lambda: room.commits.has_waiting_change)
    read = Thread(target=look)
    read.start()
    with shard.lock:
        room.readers -= 1
        shard.lock.notify_all()
    change.join(TIMEOUT_S)
    read.join(TIMEOUT_S)
    assert sorted(order) == ["change", "read"]
    assert owner.state().config.max_payload_size == 100


def test_a_queued_message_of_a_log_that_is_removed_is_delivered_and_not_called_durable(env: ChannelEnv) -> None:
    owner, member = env.channel(ANN), env.channel(BOB)
    owner.join(persist=True)
    member.join()
    heard = member.subscribe()
    pending = owner.submit([b"x"])
    owner.configure(persist=False)
    assert not pending.wait().durable
    assert [event.payload for event in heard.take() if isinstance(event, Message)] == [b"x"]


def test_the_tick_does_not_erase_a_channel_that_is_made_meanwhile(env: ChannelEnv, monkeypatch: Patch) -> None:
    """Method: the first save fails and cannot be undone; a join succeeds between the tick's look and its clean-up."""
    env.disk.fail("sync_dir", path=directory_name(CHANNEL), times=None)
    with pytest.raises(WriteFailed):
        env.channel(ANN).join(persist=True)
    assert env.manager.store.undecided
    env.disk.clear_faults()
    settle, joins = ChannelStore.reconcile, list[Thread]()

    def late(self: ChannelStore, *args: Any) -> bool:
        if not joins:
            joins.append(Thread(target=lambda: env.channel(ANN).join(persist=True)))
            joins[0].start()
            joins[0].join(0.1)  # it is done by now, or waits for the tick
        return settle(self, *args)

    monkeypatch.setattr(ChannelStore, "reconcile", late)
    env.manager.tick()
    joins[0].join(TIMEOUT_S)
    env.crash()
    assert env.manager.channel_names() == [CHANNEL], "it was acked"
    assert env.channel(ANN).state().members == (ANN,)


def test_a_history_begins_where_retention_has_left_it(env: ChannelEnv, monkeypatch: Patch) -> None:
    """Method: segments are dropped between the look at the oldest seq and the read."""
    env.limits = ChannelLimits(shards=2, segment_bytes=1 << 17)
    ann = env.channel(ANN)
    ann.join(persist=True)
    log = env.manager.shard(CHANNEL).channels[CHANNEL].message_log()
    for _ in range(2):
        ann.publish_many([b"x"] * 200)
        log._log.seal()
    read, dropped = store.MessageLog.read, list[int]()

    def late(self: store.MessageLog, first: int, **more: Any) -> Any:
        if not dropped:
            self.keep_newest(100)
            dropped.append(self.first_seq)
        return read(self, first, **more)

    monkeypatch.setattr(store.MessageLog, "read", late)
    page = ann.history(1, limit=10)
    assert dropped
    assert dropped[0] > 1
    assert [message.seq for message in page.messages] == list(range(dropped[0], dropped[0] + 10))
    assert page.first_seq == dropped[0]


@pytest.mark.parametrize("persist", [True, False])
def test_what_was_submitted_with_qos_0_is_delivered_by_the_next_tick(env: ChannelEnv, persist: bool) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join(persist=persist)
    bob.join()
    heard = bob.subscribe()
    assert ann.submit([b"x"], qos=0).done
    assert heard.take() == []
    env.manager.tick()
    assert [event.payload for event in heard.take() if isinstance(event, Message)] == [b"x"]
    if persist:
        assert [message.payload for message in ann.history().messages] == [b"x"]


def test_channels_are_ticked_in_the_background() -> None:
    """Method: an interval of 1 ms; nobody calls `tick`. The engine's own thread syncs."""
    synced = Event()
    log = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), wal_file_bytes=1 << 14)
    try:
        room = log.channel("!room@host", user=ANN)
        room.join(persist=True, message_flush_interval=1)
        room.subscribe(wake=synced.set)
        pending = log.channel("!room@host", user=ANN).submit([b"x"], qos=0)
        assert pending.done
        assert synced.wait(TIMEOUT_S), "what was accepted is delivered"
    finally:
        log.close()


def test_a_push_whose_sync_fails_does_not_say_that_nothing_was_pushed(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True, type="fifo")
    ann.push(b"first")
    env.disk.fail_sync("kept", path=".log")
    with pytest.raises(Latched, match="was written") as raised:
        ann.push(b"second")
    assert raised.value.written is None
    with pytest.raises(Latched) as later:
        ann.push(b"third")
    assert later.value.written is False
    env.disk = env.disk.reboot()
    env._manager = None
    assert [env.channel(ANN).pop().payload for _ in range(2)] == [b"first", b"second"]


def test_a_publish_that_was_appended_before_the_log_latched_is_in_doubt(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True)
    first, second = ann.submit([b"first"]), env.channel(ANN).submit([b"second"])
    env.disk.fail_sync("kept", path=".log")
    with pytest.raises(Latched):
        env.manager.shard(CHANNEL).channels[CHANNEL].message_log().sync()
    for pending in (first, second):
        with pytest.raises(Latched) as raised:
            pending.wait()
        assert raised.value.written is None, "it is in the file"


@pytest.mark.parametrize("kind", ["fifo", "pubsub"])
@pytest.mark.parametrize("broken", [0, 1])
def test_seqs_that_a_power_cut_took_before_their_sync_do_not_block_a_channel(
    env: ChannelEnv, kind: str, broken: int
) -> None:
    """The power cut takes one message that was not synced and leaves the one after it: the log serves neither and does
    not give their seqs again, so there is a hole that a pop, a length and a history must not count."""
    ann = env.channel(ANN)
    ann.join(persist=True, type=kind, message_flush_interval=500, max_persist_messages=3)  # type: ignore[arg-type]
    said, last = [b"a" * 20, b"b" * 20, b"c" * 20], 2 + broken
    for payload in said[:last]:
        if kind == "fifo":
            ann.push(payload)
        else:
            ann.publish(payload)
    env.disk = env.disk.crash_image("all")
    env._manager = None
    file = env.disk.open(f"data/channels/{directory_name(CHANNEL)}/{1:020}.log", "write")
    at = bytes(file.read(0, file.size())).index(said[broken])
    file.write(at, b"\0" * 20)
    file.close()
    ann = env.channel(ANN)
    for _ in range(2):  # also when the log is opened once more, with the hole in its middle
        if kind == "fifo":
            assert len(ann) == broken
        else:
            assert [each.payload for each in ann.history(newest=1).messages] == said[:broken]
        env.restart()
        ann = env.channel(ANN)
    if kind == "fifo":
        assert [ann.push(payload).seq for payload in said[broken:]] == list(range(last + 1, last + 4 - broken))
        with pytest.raises(FifoFull):
            ann.push(b"one more than three")
        env.restart()
        ann = env.channel(ANN)
        assert [ann.pop().payload for _ in said] == said
        with pytest.raises(FifoEmpty):
            ann.pop()
    else:
        assert ann.publish(b"d").seq == last + 1
        assert [each.payload for each in ann.history(newest=2).messages] == [*said[:broken], b"d"]


@pytest.mark.parametrize("clears", [False, True], ids=["pop", "clear"])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_hole_that_a_power_cut_left_is_counted_logged_and_shown(
    env: ChannelEnv, caplog: pytest.LogCaptureFixture, broken: int, clears: bool
) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True, type="fifo", message_flush_interval=500)
    said = [b"a" * 20, b"b" * 20, b"c" * 20]
    for payload in said:
        ann.push(payload)
    env.disk = env.disk.crash_image("all")
    env._manager = None
    file = env.disk.open(f"data/channels/{directory_name(CHANNEL)}/{1:020}.log", "write")
    file.write(bytes(file.read(0, file.size())).index(said[broken]), b"\0" * 20)
    file.close()
    lost = 3 - broken
    for _ in range(2):  # each start reports it again, until retention takes the segment
        ann, metrics = env.channel(ANN), env.manager.metrics
        caplog.clear()
        assert ann.holes() == Channel(env.manager, CHANNEL, OPERATOR).holes() == [(broken + 1, 3)]
        assert metrics.get("message_log_hole_seqs") == lost
        assert f"{CHANNEL}: a power cut lost {lost} messages before their sync (seqs {broken + 1} to 3)" in caplog.text
        env.restart()
    ann, metrics = env.channel(ANN), env.manager.metrics
    ann.push(b"d")
    caplog.clear()
    if clears:
        ann.clear()
    else:
        assert [ann.pop().payload for _ in range(broken + 1)] == [*said[:broken], b"d"]
    assert metrics.get("fifo_seqs_passed_over") == lost
    skipped = [line for line in caplog.messages if "the cursor skipped" in line]
    assert len(skipped) == 1
    assert f"skipped {lost} of the seqs" in skipped[0]
    env.crash()
    ann = env.channel(ANN)
    with pytest.raises(FifoEmpty):
        ann.pop()
    assert env.manager.metrics.get("fifo_seqs_passed_over") == 0, "it was skipped once"


def test_a_damaged_message_of_a_sealed_segment_is_no_hole_that_a_pop_passes_over(
    env: ChannelEnv, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(store, "_SEAL_MESSAGES_MIN", 2)
    ann = env.channel(ANN)
    ann.join(persist=True, type="fifo", max_persist_messages=5)
    said = [b"a" * 20, b"b" * 20, b"c" * 20, b"d" * 20]
    for payload in said:
        ann.push(payload)
    assert ann.pop().payload == said[0]  # and seals what was pushed
    env.manager.close()
    file = env.disk.open(f"data/channels/{directory_name(CHANNEL)}/{1:020}.log", "write")
    file.write(bytes(file.read(0, file.size())).index(said[3]), b"x")
    file.close()
    env._manager = None
    ann = env.channel(ANN)
    assert len(ann) == 3
    assert [ann.pop().payload for _ in range(2)] == said[1:3]
    with pytest.raises(Corrupt):
        ann.pop()
    assert len(ann) == 1


EXIT_WITHOUT_CLOSE = """
import sys, tidelog
def open_handles(path):
    database = tidelog.open(path, sync_interval_ms=3_600_000)
    return database.topic("t"), database.channel("!c@h", user="u@h").join(persist=True, message_flush_interval=60_000)
topic, channel = open_handles(sys.argv[1])
topic.append(b"1")
channel.submit([b"accepted"], qos=0)
"""


def test_a_database_without_a_reference_is_closed_at_exit(tmp_path: Path) -> None:
    """`Database` wraps the engine: its handles, and not the wrapper, keep the directory open until the exit."""
    path = str(tmp_path / "data")
    processes.run([sys.executable, "-c", EXIT_WITHOUT_CLOSE, path], check=True, timeout=60)
    with tidelog.open(path) as database:
        assert database.report.frames == 0, "the last checkpoint has everything"
        assert [message.payload for message in database.channel("!c@h").history().messages] == [b"accepted"]
