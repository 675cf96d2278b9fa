"""Publishing, following and looking back (G140-G145)."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import pytest
from tests.unit.channels.conftest import ANN, BOB, CID, ChannelEnv

from tidelog.channels import Message, Presence, SubscriptionEnded, store
from tidelog.channels.channel_state import ChannelState
from tidelog.errors import (
    BadInput,
    ChannelNotFound,
    Forbidden,
    HookFailed,
    InDoubt,
    Latched,
    NotMember,
    NotPersistent,
    Rejected,
    TooLarge,
    WrongType,
)


def payloads(events: list[Any]) -> list[bytes]:
    return [event.payload for event in events if isinstance(event, Message)]


def test_every_other_subscriber_receives_the_same_message(env: ChannelEnv) -> None:
    ann, bob, cid = env.channel(ANN), env.channel(BOB), env.channel(CID)
    for each in (ann, bob, cid):
        each.join()
    mine, other_device = ann.subscribe(), env.channel(ANN).subscribe()
    theirs = [bob.subscribe(), cid.subscribe()]
    ack = ann.publish(b"hello")
    assert (ack.seq, ack.qos, ack.durable, ack.receivers) == (1, 1, False, 3)
    found = [subscription.take() for subscription in (*theirs, other_device)]
    assert found == [[Message("!room@host", 1, ack.ts_ms, ANN, b"hello")]] * 3
    assert found[0][0] is found[1][0], "made once for all"
    assert mine.take() == []


def test_qos_1_is_durable_before_delivery_and_qos_0_is_not(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join(persist=True)
    bob.join()
    subscription = bob.subscribe()
    assert ann.publish(b"safe").durable
    ack = ann.publish(b"quick", qos=0)
    assert (ack.qos, ack.durable, ack.receivers) == (0, False, None)
    assert payloads(subscription.take()) == [b"safe", b"quick"]
    env.crash()
    assert payloads(list(env.channel(ANN).history().messages)) == [b"safe"]
    assert env.channel(ANN).publish(b"next").seq == 2


def test_a_message_is_not_delivered_when_its_sync_fails(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join(persist=True)
    bob.join()
    ann.publish(b"first")
    subscription = bob.subscribe()
    env.disk.fail_sync("dropped", path=".log")
    with pytest.raises(Latched):
        ann.publish(b"lost")
    assert payloads(subscription.take()) == []
    assert payloads(list(bob.history().messages)) == [b"first"], "the history shows nothing that was not delivered"
    with pytest.raises(Latched):
        ann.publish(b"later", qos=0)
    env.manager.tick()
    assert env.manager.metrics.get("broadcasts", "latched") == 1


def test_an_unexpected_failure_of_a_commit_leaves_its_messages_in_doubt(
    env: ChannelEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: fan-out raises. The publisher gets the exception; another one that waits gets an outcome."""
    ann = env.channel(ANN)
    ann.join(persist=True)
    other = ann.submit([b"other"])

    def broken(*_: Any, **__: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ChannelState, "_fan_out", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        ann.publish(b"x")
    monkeypatch.undo()
    with pytest.raises(InDoubt, match="check the history"):
        other.wait()
    assert ann.publish(b"y").durable


def test_tick_syncs_after_the_flush_interval(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True, message_flush_interval=200)
    assert not ann.publish(b"one").durable
    env.clock.tick(199)
    env.manager.tick()
    assert env.disk.crash_image().stat("data") is not None
    before = env.manager.metrics.get("message_log_flushes", "success")
    assert before == 0
    env.clock.tick(1)
    env.manager.tick()
    assert env.manager.metrics.get("message_log_flushes", "success") == 1
    env.crash()
    assert payloads(list(env.channel(ANN).history().messages)) == [b"one"]


def test_submitted_messages_share_one_sync_and_keep_their_order(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join(persist=True)
    bob.join()
    subscription = bob.subscribe()
    seqs: list[int] = []
    pending = [ann.submit([b"%d" % number]) for number in range(5)]
    for each in pending:
        each.add_done_callback(lambda done: seqs.append(done.result().seq))
    assert subscription.take() == [], "accepted is not delivered"
    assert ann.history().messages == []
    pending[3].wait()
    assert seqs == [1, 2, 3, 4, 5]
    assert payloads(subscription.take()) == [b"0", b"1", b"2", b"3", b"4"]
    assert env.manager.metrics.get("message_log_flushes", "success") == 1


def test_concurrent_publishers_get_consecutive_seqs_in_one_order(env: ChannelEnv) -> None:
    """Method: eight threads on one channel; every subscriber sees the same order, seqs without a gap."""
    users = [f"u{number}@host" for number in range(8)]
    for user in users:
        env.channel(user).join(persist=True)
    subscription = [env.channel(user).subscribe() for user in users[:2]]
    start, seqs = Barrier(8), list[int]()

    def publish(user: str) -> None:
        channel = env.channel(user)
        start.wait()
        for number in range(25):
            seqs.append(channel.publish(b"%s %d" % (user.encode(), number)).seq)

    threads = [Thread(target=publish, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seqs) == list(range(1, 201))
    first, second = (subscription.take() for subscription in subscription)
    assert first == second
    assert [event.seq for event in first if isinstance(event, Message)] == list(range(1, 201))


def test_a_slow_subscription_ends_with_an_event_and_others_are_unaffected(env: ChannelEnv) -> None:
    ann, bob, cid = env.channel(ANN), env.channel(BOB), env.channel(CID)
    for each in (ann, bob, cid):
        each.join()
    slow, quick = bob.subscribe(queue_max=2), cid.subscribe()
    for number in range(4):
        ann.publish(b"%d" % number)
    assert slow.closed
    assert payloads(quick.take()) == [b"0", b"1", b"2", b"3"]
    found = slow.take()
    assert payloads(found) == [b"0", b"1"]
    assert found[-1] == SubscriptionEnded("!room@host", "slow", 2)
    assert env.manager.metrics.get("outbound_queue_full", "slow") == 1
    assert ann.publish(b"4").receivers == 1


def test_an_idle_subscriber_is_woken_once_and_ends_if_wake_raises(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join()
    bob.join()
    woken: list[int] = []
    good = bob.subscribe(wake=lambda: woken.append(1))

    def gone() -> None:
        raise RuntimeError("the loop is closed")

    bad = bob.subscribe(wake=gone)
    ann.publish(b"1")
    ann.publish(b"2")
    assert woken == [1]
    assert bad.closed
    assert len(good.take()) == 2
    assert good.take() == []
    ann.publish(b"3")
    assert woken == [1, 1]


def test_wait_blocks_until_an_event(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join()
    bob.join()
    subscription = bob.subscribe()
    assert subscription.wait(timeout=0.001) == []
    thread = Thread(target=lambda: ann.publish(b"hello"))
    thread.start()
    assert payloads(subscription.wait(timeout=30)) == [b"hello"]
    thread.join()
    bob.leave()
    assert [type(event) for event in subscription] == [SubscriptionEnded]
    assert subscription.wait(timeout=30) == []


def test_members_receive_presence_events(env: ChannelEnv) -> None:
    ann, bob, cid = env.channel(ANN), env.channel(BOB), env.channel(CID)
    ann.join()
    subscription = ann.subscribe()
    bob.join()
    cid.join()
    theirs = cid.subscribe()
    ann.configure(max_clients=5)
    ann.configure(max_clients=5)
    ann.kick(BOB)
    ann.leave()
    kinds = [(event.kind, event.user, event.owner) for event in theirs.take() if isinstance(event, Presence)]
    assert kinds == [
        ("reconfigured", ANN, True),
        ("left", BOB, False),
        ("left", ANN, True),
        ("joined", CID, True),
    ]
    mine = subscription.take()
    assert [event.user for event in mine if isinstance(event, Presence)] == [BOB, CID], "not what it did itself"
    assert mine[-1] == SubscriptionEnded("!room@host", "left", 0)
    other = env.channel(CID)
    other.delete()
    events = theirs.take()
    assert isinstance(events[0], Presence)
    assert events[0].kind == "deleted"
    assert events[-1] == SubscriptionEnded("!room@host", "deleted", 0)
    with pytest.raises(ChannelNotFound):
        other.publish(b"?")


def test_the_read_list_filters_messages_but_not_presence_events(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    ann.join(persist=True)
    bob.join()
    subscription = bob.subscribe()
    ann.allow("read", ANN)
    assert ann.publish(b"secret").receivers == 0
    env.channel(CID).join()
    assert [type(event) for event in subscription.take()] == [Presence]
    with pytest.raises(Forbidden):
        bob.history()
    ann.disallow("read", ANN)
    ann.publish(b"open")
    assert payloads(subscription.take()) == [b"open"]


def test_history_by_seq_newest_and_time(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True)
    start_ms = env.clock.now_us() // 1000
    for number in range(1, 11):
        ann.publish(b"%d" % number)
        env.clock.tick(1_000)

    def seqs(**asked: Any) -> list[int]:
        return [message.seq for message in ann.history(**asked).messages]

    assert seqs() == list(range(1, 11))
    assert seqs(first=4, last=6) == [4, 5, 6]
    assert seqs(first=8, limit=2) == [8, 9]
    assert seqs(newest=3) == [8, 9, 10]
    assert seqs(since_ms=start_ms + 6_500) == [8, 9, 10]
    assert seqs(since_ms=start_ms, until_ms=start_ms + 2_000) == [1, 2, 3]
    assert seqs(first=99) == []
    page = ann.history(first=1, limit=4)
    assert (page.next_seq, page.first_seq, page.last_seq) == (5, 1, 10)
    assert ann.bounds() == (1, 10)


def test_a_history_page_is_bounded(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join(persist=True)
    ann.publish_many([b"x"] * 150)
    page = ann.history(limit=10_000)
    assert len(page.messages) == env.limits.history_max == 100
    assert [message.seq for message in ann.history(page.next_seq).messages] == list(range(101, 151))
    assert len(ann.history(newest=500).messages) == 100


def test_max_persist_messages_limits_the_history(env: ChannelEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """G147: whole sealed segments outside the window go, and the first seq is the oldest file's name."""
    monkeypatch.setattr(store, "_SEAL_MESSAGES_MIN", 2)
    ann = env.channel(ANN)
    ann.join(persist=True, max_persist_messages=10)
    for number in range(1, 41):
        ann.publish(b"%d" % number)
    first, last = ann.bounds()
    assert last == 40
    assert 26 <= first <= 31, "the window, and less than a segment more"
    assert ann.history(1).messages[0].seq == first, "asked below, moved to the first"
    logs = [name for name in env.disk.list_dir(next(iter(_directories(env)))) if name.endswith(".log")]
    assert int(logs[0][:20]) == first
    env.restart()
    assert env.channel(ANN).bounds() == (first, 40)


def test_messages_lost_to_a_power_cut_have_not_evicted_others(env: ChannelEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SEAL_MESSAGES_MIN", 2)
    ann = env.channel(ANN)
    ann.join(persist=True, max_persist_messages=4)
    for number in range(1, 7):
        ann.publish(b"%d" % number)
    ann.publish(b"7", qos=0)
    ann.publish(b"8", qos=0)
    env.crash()
    found = [message.seq for message in env.channel(ANN).history().messages]
    assert len(found) >= 4, "it keeps four, whatever the crash took"


def _directories(env: ChannelEnv) -> list[str]:
    return [f"data/channels/{name}" for name in env.disk.list_dir("data/channels")]


def test_seqs_continue_across_restarts_and_changes_of_persist(env: ChannelEnv) -> None:
    ann = env.channel(ANN)
    ann.join()
    assert ann.publish(b"1").seq == 1
    ann.configure(persist=True)
    assert [ann.publish(b"x").seq for _ in range(2)] == [2, 3]
    assert env.channel(ANN).bounds() == (2, 3)
    env.restart()
    ann = env.channel(ANN)
    assert ann.publish(b"4").seq == 4
    ann.configure(persist=False)
    assert ann.publish(b"5").seq == 5
    assert env.disk.list_dir("data/channels") == []
    ann.configure(persist=True)
    env.crash()
    assert env.channel(ANN).publish(b"6").seq == 6
    assert env.channel(ANN).bounds() == (6, 6)


def test_message_times_do_not_go_back_with_the_clock(env: ChannelEnv) -> None:
    for persist in (True, False):
        ann = env.channel(ANN, f"!p{persist}@host")
        ann.join(persist=persist)
        first = ann.publish(b"now").ts_ms
        env.clock.set_us(1_000_000)
        assert ann.publish(b"then").ts_ms == first


def test_a_hook_validates_and_replaces_payloads(env: ChannelEnv) -> None:
    def hook(asked: Any) -> object:
        if asked.payload == b"bad":
            return False
        if asked.payload == b"broken":
            raise ZeroDivisionError
        if asked.payload == b"odd":
            return 7
        return asked.payload.upper() if asked.payload == b"quiet" else None

    env.hook = hook
    ann = env.channel(ANN)
    ann.join(persist=True)
    ann.publish(b"quiet")
    ann.publish(b"fine")
    for payload, error in ((b"bad", Rejected), (b"broken", HookFailed), (b"odd", HookFailed)):
        with pytest.raises(error):
            ann.publish(payload)
    assert payloads(list(ann.history().messages)) == [b"QUIET", b"fine"]
    counts = {name: env.manager.metrics.get("hook_payloads", name) for name in ("valid", "valid_altered", "invalid")}
    assert counts == {"valid": 1, "valid_altered": 1, "invalid": 1}
    with pytest.raises(NotMember):
        env.channel(BOB).publish(b"broken")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"first": 0}, BadInput),
        ({"newest": 0}, BadInput),
        ({"limit": 0}, BadInput),
        ({"limit": "5"}, BadInput),
        ({"since_ms": -1}, BadInput),
        ({"first": 1, "newest": 2}, BadInput),
    ],
)
def test_invalid_history_ranges_are_refused(env: ChannelEnv, asked: dict[str, Any], error: type[Exception]) -> None:
    env.channel().join(persist=True)
    with pytest.raises(error):
        env.channel().history(**asked)


def test_bad_publishes_are_refused_and_use_no_seq(env: ChannelEnv) -> None:
    ann, bob = env.channel(ANN), env.channel(BOB)
    with pytest.raises(ChannelNotFound):
        ann.publish(b"x")
    ann.join(persist=True, max_payload_size=4)
    for qos in (2, -1, True, "1"):
        with pytest.raises(BadInput, match="qos"):
            ann.publish(b"x", qos=qos)  # type: ignore[arg-type]
    for payload in ("text", None, bytearray(b"x")):
        with pytest.raises(BadInput):
            ann.publish(payload)  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        ann.publish_many([])
    with pytest.raises(TooLarge):
        ann.publish_many([b"x", b"12345"])
    with pytest.raises(NotMember):
        bob.publish(b"x")
    with pytest.raises(NotMember):
        bob.subscribe()
    with pytest.raises(NotMember):
        bob.history()
    with pytest.raises(WrongType):
        ann.pop()
    with pytest.raises(BadInput):
        ann.subscribe(queue_max=0)
    assert ann.publish(b"1234").seq == 1


def test_a_channel_without_persist_has_no_history(env: ChannelEnv) -> None:
    env.channel().join()
    with pytest.raises(NotPersistent):
        env.channel().history()
