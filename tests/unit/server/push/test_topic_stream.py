"""The loop that follows topics for a peer, over Server-Sent Events (contract 3.4, 3.7, 3.8): which frames are sent, in
which bytes and order, and the cost of a slow peer.

Method throughout: a peer that reads everything at once unless it is stuck, on a loop whose time jumps.
"""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from typing import Any

import pytest
from tests.unit.server.fakes import TIMEOUT_S, Event, FakeSink, ServerHarness, let_idle, run_scenario

from tidelog.engine import JsonPage, Topic
from tidelog.engine.topic import topic_operations
from tidelog.errors import Corrupt
from tidelog.http.interface import ClientDisconnected
from tidelog.server.auth import ANONYMOUS
from tidelog.server.push import page_cache
from tidelog.server.push.page_cache import EncodedPage, ReadOptions
from tidelog.server.push.peers import CLOSE_AFTER_S, HIGH_WATER_BYTES, WARN_AFTER_S, SlowConsumer
from tidelog.server.push.topic_stream import StreamSlot

KB = "x" * 1000


def at(text: str) -> bytes:
    """A cursor, from its JSON."""
    return urlsafe_b64encode(text.encode()).rstrip(b"=")


def brief(events: list[Event]) -> list[tuple[str, str, Any]]:
    """Each event as its name, its topic, and what it is about: seqs, or a reason, or a head."""
    summaries: list[tuple[str, str, Any]] = []
    for event in events:
        data = event.data
        about: Any = [record["$seq"] for record in data["records"]] if "records" in data else None
        summaries.append((event.event, data.get("topic", ""), data.get("reason") or about or data.get("head_seq")))
    return summaries


# Bytes ----------------------------------------------------------------------------------------------------


def test_every_frame_byte_for_byte() -> None:
    """Contract 3.8: field order, one space after colons, LF, compact JSON, one data line, an id on every event."""

    async def scenario(world: ServerHarness) -> None:
        a, b = world.topic("a", cap_records=2), world.topic("b")
        a.append([1, {"k": [1, 2]}, "drei ü"], tag=["t", None, "u"], node=["n", None, None])
        b.append([True], meta={"m": 1})
        wid = await world.watch({"b": {}, "a": {}}, include_tags=True)
        tap = FakeSink()
        async with await world.stream(wid, tap) as stream:
            await tap.until(5)
            await let_idle(15.5)
            world.engine.drop("b")
            await tap.until(6)
            world.service.stop()
            await stream.ended()
        ids = [at(f'{{"a":{a},"b":{b}}}') for a, b in [(1, 0), (3, 0), (3, 0), (3, 1), (3, 1), (3, 1), (3, 1)]]
        assert tap.frames == [
            b"retry: 2000\n\n",
            b'id: %b\nevent: tombstone\ndata: {"topic":"a","reason":"from_seq_too_old","gap_from":1,"gap_to":1,'
            b'"earliest_seq":2,"head_seq":3}\n\n' % ids[0],
            b'id: %b\nevent: record\ndata: {"topic":"a","from_seq":1,"to_seq":3,"head_seq":3,"records":['
            b'{"$seq":2,"$ts":1700000000000,"data":{"k":[1,2]}},'
            b'{"$seq":3,"$ts":1700000000000,"$tag":"u","data":"drei \xc3\xbc"}]}\n\n' % ids[1],
            b'id: %b\nevent: caught-up\ndata: {"topic":"a","head_seq":3}\n\n' % ids[2],
            b'id: %b\nevent: record\ndata: {"topic":"b","from_seq":0,"to_seq":1,"head_seq":1,"records":['
            b'{"$seq":1,"$ts":1700000000000,"data":true,"meta":{"m":1}}]}\n\n' % ids[3],
            b'id: %b\nevent: caught-up\ndata: {"topic":"b","head_seq":1}\n\n' % ids[4],
            b": hb 1700000000000\n\n",
            b'id: %b\nevent: topic-deleted\ndata: {"topic":"b","head_seq":0,"reason":"deleted"}\n\n' % ids[5],
            b'id: %b\nevent: error\ndata: {"code":"server_shutting_down","message":"the server is shutting down; '
            b'nothing more comes on this connection, connect again"}\n\n' % ids[6],
        ]

    run_scenario(scenario)


def test_cursor_is_unpadded_base64url_of_the_positions() -> None:
    """Contract 3.8, its example."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("jobs").append([1, 2])
        tap = FakeSink()
        async with await world.stream(await world.watch({"jobs": {}}), tap):
            await tap.until(2)
        assert tap.frames[1].startswith(b"id: eyJqb2JzIjoyfQ\nevent: record\n")

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("options", "record"),
    [
        ({}, {"$node": "n", "data": 1, "meta": {"m": 2}}),
        ({"include_tags": True}, {"$node": "n", "$tag": "t", "data": 1, "meta": {"m": 2}}),
        ({"include_meta": False}, {"$node": "n", "data": 1}),
        ({"include_data": False}, {"$node": "n", "meta": {"m": 2}}),
        ({"include_data": False, "include_meta": False, "include_tags": True}, {"$node": "n", "$tag": "t"}),
    ],
)
def test_record_has_the_requested_fields(options: dict[str, Any], record: dict[str, Any]) -> None:
    """Contract 3.8: include_data drops data alone."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1], tag="t", node="n", meta={"m": 2})
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, **options), tap):
            events = await tap.until(1)
        assert events[0].data["records"] == [{"$seq": 1, "$ts": 1_700_000_000_000, **record}]

    run_scenario(scenario)


# Order ----------------------------------------------------------------------------------------------------


def test_caught_up_is_sent_at_the_head_and_after_every_burst() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {"tail": True}}), tap):
            await tap.until(1)
            topic.append([1, 2])
            await tap.until(3)
            topic.append([3])
            topic.append([4])
            await tap.until(5)
            await let_idle()
        assert brief(tap.events) == [
            ("caught-up", "a", 0),
            ("record", "a", [1, 2]),
            ("caught-up", "a", 2),
            ("record", "a", [3, 4]),
            ("caught-up", "a", 4),
        ], "what was written in one turn of the loop is one burst"

    run_scenario(scenario)


def test_topics_are_sent_in_name_order_each_up_to_its_head() -> None:
    async def scenario(world: ServerHarness) -> None:
        for name in ("c", "a", "b"):
            world.topic(name).append([1, 2, 3])
        tap = FakeSink()
        async with await world.stream(await world.watch({"c": {}, "a": {}, "b": {}}, limit=2), tap):
            await tap.until(9)
        one = [("record", [1, 2]), ("record", [3]), ("caught-up", 3)]
        assert brief(tap.events) == [(event, name, what) for name in "abc" for event, what in one]

    run_scenario(scenario)


def test_topic_with_constant_writes_does_not_delay_other_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: every read of `a` writes another record to it, until `b` is read."""
    read_names: list[str] = []
    real = page_cache.read_page

    def render(topic: Topic, from_seq: int, view: ReadOptions) -> EncodedPage:
        read_names.append(topic.name)
        assert read_names.count("a") < 100, "b starves"
        if topic.name == "a" and "b" not in read_names:
            topic.append([0])
        return real(topic, from_seq, view)

    monkeypatch.setattr(page_cache, "read_page", render)

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1, 2])
        world.topic("b").append([1])
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}, "b": {}}, limit=1), tap):
            await tap.until(4)
            await let_idle()
        assert read_names.index("b") <= 3
        seqs = [what for event, name, what in brief(tap.events) if (event, name) == ("record", "a")]
        assert seqs == [[n + 1] for n in range(len(seqs))], "and nothing of a was lost or sent twice"

    run_scenario(scenario)


def test_record_between_the_read_and_the_wait_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """E4, contract D3. Method: the record is written when the page that lacks it was just made."""
    real = page_cache.read_page

    def render(topic: Topic, from_seq: int, view: ReadOptions) -> EncodedPage:
        page = real(topic, from_seq, view)
        if not page.count and topic.head_seq == 0:
            topic.append(["between"])
        return page

    monkeypatch.setattr(page_cache, "read_page", render)

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap):
            events = await tap.until(3)
        assert brief(events) == [("caught-up", "a", 0), ("record", "a", [1]), ("caught-up", "a", 1)]

    run_scenario(scenario)


def test_pages_respect_the_record_and_byte_limits() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([KB] * 5)
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, max_batch_bytes=2500), tap):
            await tap.until(4)
        assert brief(tap.events)[:3] == [("record", "a", [1, 2]), ("record", "a", [3, 4]), ("record", "a", [5])]
        assert [(event.data["from_seq"], event.data["to_seq"]) for event in tap.events[:3]] == [(0, 2), (2, 4), (4, 5)]

    run_scenario(scenario)


# Filters --------------------------------------------------------------------------------------------------


def test_to_seq_and_cursor_pass_filtered_records() -> None:
    """Contract 3.8 [T]: trailing records that were filtered count as passed."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3], node=["you", "me", "me"])
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, node="me"), tap):
            await tap.until(2)
            topic.append([4], node="me")
            await let_idle()
            assert len(tap.events) == 2, "what is filtered makes no noise, not even that it is over"
            topic.append([5], node="you")
            await tap.until(4)
        assert brief(tap.events)[:3] == [("record", "a", [1]), ("caught-up", "a", 3), ("record", "a", [5])]
        assert [(event.data["from_seq"], event.data["to_seq"]) for event in tap.events[::2]] == [(0, 3), (4, 5)]
        assert [event.id for event in tap.events[::2]] == [{"a": 3}, {"a": 5}]

    run_scenario(scenario)


def test_burst_that_ends_in_filtered_records_is_caught_up() -> None:
    """Contract 3.8: after every burst. Method: its last page has nothing to show."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, node="me", limit=1), tap):
            await tap.until(1)
            topic.append([0] * 500, node=["you", *["me"] * 499])
            await tap.until(3)
        assert brief(tap.events) == [("caught-up", "a", 0), ("record", "a", [1]), ("caught-up", "a", 500)]
        assert tap.events[1].data["to_seq"] < 500, "or this shows nothing"

    run_scenario(scenario)


def test_stream_with_all_records_filtered_is_caught_up_at_once() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1, 2], node="me")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, node=["other", "me"]), tap):
            events = await tap.until(1)
        assert brief(events) == [("caught-up", "a", 2)]
        assert events[0].id == {"a": 2}

    run_scenario(scenario)


def test_deleted_prefix_is_skipped_without_a_tombstone() -> None:
    """Contract 3.4 [T]: only what was lost is alarming."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        topic.delete(before_seq=3)
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap):
            await tap.until(2)
        assert brief(tap.events) == [("record", "a", [3]), ("caught-up", "a", 3)]

    run_scenario(scenario)


# Losses ---------------------------------------------------------------------------------------------------


def test_first_gap_blames_the_cursor_and_later_gaps_have_their_reason() -> None:
    """Contract 3.8. Method: the peer is stuck while more is written than the topic keeps."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", cap_records=300)
        topic.append([KB] * 301)
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, limit=1000, max_batch_bytes=1 << 20), tap):
            tap.stuck = True
            await tap.until(3)
            assert tap.pending_bytes > HIGH_WATER_BYTES
            topic.append([KB] * 300)
            topic.append([KB] * 10)
            await let_idle()
            assert len(tap.events) == 3
            tap.take()
            events = await tap.until(6)
        assert [event.event for event in events] == ["tombstone", "record", "caught-up"] * 2
        assert [event.data["reason"] for event in events[::3]] == ["from_seq_too_old", "cap"]
        first, second = events[0], events[3]
        assert first.id == {"a": 1}, "at gap_to"
        assert second.id == {"a": 311}
        assert (second.data["gap_from"], second.data["gap_to"]) == (302, 311)
        assert (events[1].data["from_seq"], events[4].data["from_seq"]) == (1, 311), "after the gap"
        assert brief(events)[4] == ("record", "a", list(range(312, 612)))

    run_scenario(scenario)


def test_expired_records_are_a_gap() -> None:
    """Contract 3.3. The floor is made durable off the loop before the gap is sent."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", ttl_ms=1000)
        topic.append([1, 2])
        wid = await world.watch({"a": {}})
        world.clock.tick(1001)
        tap = FakeSink()
        async with await world.stream(wid, tap):
            events = await tap.until(2)
        assert brief(events) == [("tombstone", "a", "from_seq_too_old"), ("caught-up", "a", 2)]
        assert [event.id for event in events] == [{"a": 2}, {"a": 2}]

    run_scenario(scenario)


def test_recreated_topic_of_a_session_is_reported_and_read_from_its_beginning() -> None:
    """Contract 3.4, D10. A client that comes back with the id of the tombstone misses nothing of the new topic."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1, 2, 3])
        wid = await world.watch({"a": {"tail": True}})
        world.engine.drop("a")
        world.topic("a").append(["new"])
        tap = FakeSink()
        async with await world.stream(wid, tap):
            events = await tap.until(3)
        assert brief(events) == [("tombstone", "a", "recreated"), ("record", "a", [1]), ("caught-up", "a", 1)]
        assert [event.id and event.id["a"] for event in events] == [0, 1, 1]

    run_scenario(scenario)


# Topics that go -------------------------------------------------------------------------------------------


def test_topic_deleted_is_sent_at_once_and_other_topics_continue() -> None:
    """Contract 3.8 [T], D4: the deletion itself wakes."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        other = world.topic("b")
        tap = FakeSink()
        loop = asyncio.get_running_loop()
        async with await world.stream(await world.watch({"a": {"tail": True}, "b": {}}), tap):
            await tap.until(2)
            before = loop.time()
            world.engine.drop("a")
            await tap.until(3)
            assert loop.time() - before < 1, "not only with the next heartbeat"
            other.append([1])
            await tap.until(5)
            await let_idle(60)
        assert brief(tap.events) == [
            ("caught-up", "a", 1),
            ("caught-up", "b", 0),
            ("topic-deleted", "a", "deleted"),
            ("record", "b", [1]),
            ("caught-up", "b", 1),
        ]
        assert all(event.id is not None and "a" in event.id for event in tap.events), "an id has every topic"

    run_scenario(scenario)


def test_topic_deleted_is_sent_for_a_delete_during_a_disk_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = page_cache.read_page

    async def scenario(world: ServerHarness) -> None:
        def render(topic: Topic, from_seq: int, view: ReadOptions) -> EncodedPage:
            world.engine.drop("a")
            return real(topic, from_seq, view)

        monkeypatch.setattr(page_cache, "read_page", render)
        topic = world.topic("a")
        topic.append([1, 2])
        topic.seal()
        world.engine.checkpoint()
        assert not topic_operations(topic).can_read_without_blocking(0)
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap) as stream:
            await stream.ended()
        assert brief(tap.events) == [("topic-deleted", "a", "deleted")]

    run_scenario(scenario)


def test_topic_deleted_is_sent_when_a_topic_is_recreated_at_once() -> None:
    """Contract 2.4: watchers get topic-deleted, however fast the topic is created again."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {"tail": True}}), tap) as stream:
            await tap.until(1)
            world.engine.drop("a")
            world.topic("a").append([1, 2, 3])
            await stream.ended()
        assert brief(tap.events) == [("caught-up", "a", 1), ("topic-deleted", "a", "deleted")]

    run_scenario(scenario)


def test_stream_ends_when_its_last_topic_is_deleted() -> None:
    async def scenario(world: ServerHarness) -> None:
        for name in ("a", "b", "c"):
            world.topic(name)
        wid = await world.watch({"a": {}, "b": {}, "c": {}})
        world.engine.drop("b")
        tap = FakeSink()
        async with await world.stream(wid, tap) as stream:
            await tap.until(3)
            assert brief(tap.events) == [
                ("caught-up", "a", 0),
                ("topic-deleted", "b", "deleted"),
                ("caught-up", "c", 0),
            ], "one that was gone before has its place in the order"
            world.engine.drop("c")
            world.engine.drop("a")
            await stream.ended()
        assert brief(tap.events)[3:] == [("topic-deleted", "a", "deleted"), ("topic-deleted", "c", "deleted")]

    run_scenario(scenario)


def test_stream_of_a_session_without_topics_ends_at_once() -> None:
    """Contract 2.9: all unknown, lenient."""

    async def scenario(world: ServerHarness) -> None:
        status, body = await world.ask("POST", "/v0/watch?lenient=true", {"topics": {"x": {}, "y": {}}})
        assert (status, body["topics"]) == (200, {})
        tap = FakeSink()
        async with await world.stream(body["wid"], tap) as stream:
            await stream.ended()
        assert tap.writes == [b"retry: 2000\n\n"]

    run_scenario(scenario)


def test_unreadable_records_end_a_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object) -> EncodedPage:
        raise Corrupt("a segment", pos=7, reason="planted")

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        world.topic("b").append([1])
        monkeypatch.setattr(page_cache, "read_page", render)
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}, "b": {}}), tap) as stream:
            await stream.ended()
        assert [event.event for event in tap.events][-1] == "error"
        assert tap.events[0].data["code"] == "internal"
        assert tap.events[0].data["topic"] == "a"
        assert "planted" in tap.events[0].data["message"]

    run_scenario(scenario)


# At once --------------------------------------------------------------------------------------------------


async def settled() -> None:
    """Everybody who has something to do has done it."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_waiting_peer_is_sent_records_during_the_notification() -> None:
    """Method: notifiers are called directly, and no other task runs before the check."""

    async def scenario(world: ServerHarness) -> None:
        topic, taps = world.topic("a"), [FakeSink() for _ in range(3)]
        streams = [await world.stream(await world.watch({"a": {}}), tap) for tap in taps]
        await settled()
        for number in range(1, 4):
            topic.append([number])
            world.service.push.notifiers.notify_all()
            for tap in taps:
                assert brief(tap.events)[-2:] == [("record", "a", [number]), ("caught-up", "a", number)]
                assert [event.id for event in tap.events[-2:]] == [{"a": number}] * 2
        await settled()
        assert [len(tap.events) for tap in taps] == [7, 7, 7], "sent once"
        for stream in streams:
            async with stream:
                pass

    run_scenario(scenario)


def test_unusual_cases_are_left_to_the_loop() -> None:
    """More than a page, a peer that lags, a dropped topic: nothing is lost, nothing is sent twice."""

    async def scenario(world: ServerHarness) -> None:
        topic, other, tap = world.topic("a"), world.topic("b"), FakeSink()
        async with await world.stream(await world.watch({"a": {}, "b": {}}, limit=2), tap) as stream:
            await settled()
            topic.append([1, 2, 3])
            world.service.push.notifiers.notify_all()
            assert len(tap.events) == 2, "only half of it is in a page"
            other.append([1])
            world.service.push.notifiers.notify_all()
            assert len(tap.events) == 2, "the loop has something to do already"
            await settled()
            tap.stuck, tap.pending_bytes = True, HIGH_WATER_BYTES + 1
            topic.append([4])
            await settled()
            assert len(tap.events) == 7
            tap.stuck = False
            tap.take()
            await settled()
            world.engine.drop("a")
            world.engine.drop("b")
            await stream.ended()
        assert brief(tap.events)[2:] == [
            ("record", "a", [1, 2]),
            ("record", "a", [3]),
            ("caught-up", "a", 3),
            ("record", "b", [1]),
            ("caught-up", "b", 1),
            ("record", "a", [4]),
            ("caught-up", "a", 4),
            ("topic-deleted", "a", "deleted"),
            ("topic-deleted", "b", "deleted"),
        ]

    run_scenario(scenario)


def test_error_while_sending_ends_only_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic, broken, sound = world.topic("a"), FakeSink(), FakeSink()
        first = await world.stream(await world.watch({"a": {}}), broken)
        async with await world.stream(await world.watch({"a": {}}), sound):
            await settled()

            def write(data: bytes) -> None:
                raise ZeroDivisionError(data)

            monkeypatch.setattr(broken, "write", write)
            topic.append([1])
            with pytest.raises(ZeroDivisionError):
                await first.ended()
            assert brief(sound.events)[-2:] == [("record", "a", [1]), ("caught-up", "a", 1)]

    run_scenario(scenario)


def test_error_while_encoding_a_page_does_not_stop_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = page_cache.build_page

    def page_of(name: str, from_seq: int, page: JsonPage) -> EncodedPage:
        if name == "a" and page.head_seq:
            raise ZeroDivisionError
        return real(name, from_seq, page)

    async def scenario(world: ServerHarness) -> None:
        monkeypatch.setattr(page_cache, "build_page", page_of)
        broken, sound, tap = world.topic("a"), world.topic("b"), FakeSink()
        first = await world.stream(await world.watch({"a": {}}), FakeSink())
        async with await world.stream(await world.watch({"b": {}}), tap):
            await settled()
            for number in (1, 2):
                broken.append([number])
                sound.append([number])
                await settled()
            with pytest.raises(ZeroDivisionError):
                await first.ended()
            assert brief(tap.events)[-2:] == [("record", "b", [2]), ("caught-up", "b", 2)]
        broken.append([3])
        assert not world.service.push.scheduler.fair_queue._serving, "no topic stays in service"

    run_scenario(scenario)


# Heartbeats -----------------------------------------------------------------------------------------------


def times(tap: FakeSink) -> list[int]:
    return [index for index, frame in enumerate(tap.frames) if frame.startswith(b": hb ")]


def test_heartbeat_is_sent_when_nothing_was_sent_for_an_interval() -> None:
    """Contract 3.8. Method: any event starts the count anew; the loop's time is read, none passes for real."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, heartbeat_ms=2000), tap):
            await tap.until(1)
            await let_idle(1.5)
            topic.append([1])
            await let_idle(1.9)
            assert not times(tap), "3.4 s since the start, 1.9 since the last word"
            await let_idle(0.2)
            assert len(times(tap)) == 1
            await let_idle(6.1)
            assert len(times(tap)) == 4
            world.clock.tick(5)
            await let_idle(2)
            assert tap.frames[-1] == b": hb 1700000000005\n\n"

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("requested_ms", "floor", "every_s"),
    [(None, None, 15.0), (1, None, 1.0), (90_000, None, 60.0), (1, 20, 0.02), (500, 20, 0.5), (0, 5_000, 1.0)],
)
def test_heartbeat_interval_is_between_its_minimum_and_a_minute(
    requested_ms: int | None, floor: int | None, every_s: float
) -> None:
    """Contract 1.12, and the floor of tests in 1.2."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        options: dict[str, Any] = {} if requested_ms is None else {"heartbeat_ms": requested_ms}
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, **options), tap):
            await tap.until(1)
            await let_idle(every_s * 0.9)
            assert not times(tap)
            await let_idle(every_s * 0.2)
            assert len(times(tap)) == 1

    run_scenario(scenario, test_min_heartbeat_ms=floor)


def test_heartbeats_do_not_accumulate_for_a_peer_that_reads_nothing() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}, heartbeat_ms=1000), tap):
            await tap.until(1)
            tap.stuck = True
            topic.append([1])
            await tap.until(3)
            before = tap.pending_bytes
            await let_idle(100)
            assert tap.pending_bytes == before > 0
            tap.take()
            await let_idle(2.5)
            assert len(times(tap)) == 1

    run_scenario(scenario)


# The end of the server ------------------------------------------------------------------------------------


def test_stop_ends_every_stream_with_a_shutdown_event() -> None:
    """Contract 1.2 [T], 3.8. Method: one waits, one waits for its peer, one only begins. All in no time."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        wids = [await world.watch({"a": {}}) for _ in range(3)]
        taps = [FakeSink() for _ in wids]
        loop = asyncio.get_running_loop()
        async with await world.stream(wids[0], taps[0]) as idle, await world.stream(wids[1], taps[1]) as stuck:
            await taps[0].until(1)
            await taps[1].until(1)
            taps[1].stuck = True
            topic.append([KB] * 300)
            await taps[0].until(4)
            topic.append([1])
            await taps[0].until(6)
            before, count = loop.time(), len(taps[1].events)
            world.service.stop()
            await idle.ended()
            await stuck.ended()
            async with await world.stream(wids[2], taps[2]) as late:
                await late.ended()
            assert loop.time() - before < 1
        assert len(taps[1].events) == count + 1
        for tap in taps:
            assert tap.events[-1].event == "error"
            assert tap.events[-1].data["code"] == "server_shutting_down"
        assert len(taps[2].events) == 1

    run_scenario(scenario)


# Slow peers -----------------------------------------------------------------------------------------------


def test_slow_peer_delays_no_other_and_uses_bounded_memory() -> None:
    """S3. Method: one peer is stuck, one is not; a hundred times the mark is written."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", cap_records=50)
        slow, fast = FakeSink(), FakeSink()
        async with (
            await world.stream(await world.watch({"a": {}}), slow),
            await world.stream(await world.watch({"a": {}}), fast),
        ):
            await slow.until(1)
            await fast.until(1)
            slow.stuck = True
            for n in range(1, 41):
                topic.append([KB] * 250)
                await fast.until(1 + 3 * n)
            assert slow.most < HIGH_WATER_BYTES + 262_144
            assert len(slow.events) < 20
            got = len(slow.events)
            slow.stuck = False
            slow.take()
            await slow.until(got + 3)
            assert brief(slow.events)[got:] == [
                ("tombstone", "a", "cap"),
                ("record", "a", list(range(9_951, 10_001))),
                ("caught-up", "a", 10_000),
            ]

    run_scenario(scenario)


def test_slow_peer_catches_up_in_larger_pages() -> None:
    """S3: coalescing. Method: one record is written at a time while the peer is stuck."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap):
            await tap.until(1)
            tap.stuck = True
            topic.append([KB] * 261)
            await tap.until(2)
            for n in range(200):
                topic.append([n])
                await let_idle(0.001)
            tap.stuck = False
            tap.take()
            await tap.until(4)
            await let_idle()
        assert [len(what) for event, _, what in brief(tap.events) if event == "record"] == [256, 205]

    run_scenario(scenario)


def test_peer_that_reads_nothing_is_warned_and_later_disconnected() -> None:
    """Contract 3.8, documented: grace 5 s, close 30 s. It is cut off, not ended: an end would not reach it."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        loop = asyncio.get_running_loop()
        async with await world.stream(await world.watch({"a": {}}), tap) as stream:
            await tap.until(1)
            tap.stuck = True
            topic.append([KB] * 300)
            await tap.until(2)
            began = loop.time()
            await let_idle(WARN_AFTER_S - 0.1)
            assert len(tap.events) == 2
            await let_idle(0.2)
            assert tap.events[-1].event == "error"
            assert tap.events[-1].data["code"] == 429
            assert tap.events[-1].id == {"a": 256}
            with pytest.raises(SlowConsumer):
                await stream.ended()
            assert CLOSE_AFTER_S - 0.01 <= loop.time() - began < CLOSE_AFTER_S + 1
            assert issubclass(SlowConsumer, ClientDisconnected), "the front end knows what to make of it"
            assert world.service.limit_counters.counts["slow_consumer"] == 1
        assert len(tap.events) == 3, "warned once"
        assert len(world.service.push.watch_sessions) == 1

    run_scenario(scenario)


def test_peer_that_makes_progress_is_not_disconnected() -> None:
    """Method: a byte every four seconds for a quarter of an hour; the mark is never reached."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap) as stream:
            await tap.until(1)
            tap.stuck = True
            topic.append([KB] * 600)
            await tap.until(2)
            for _ in range(225):
                await let_idle(4)
                tap.take(1)
            assert not stream.task.done()
            assert len(tap.events) == 2, "not even warned"
            tap.stuck = False
            tap.take()
            await tap.until(5)
        assert sum(len(what) for event, _, what in brief(tap.events) if event == "record") == 600

    run_scenario(scenario)


def test_peer_that_leaves_during_a_wait_releases_everything() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap) as stream:
            await tap.until(1)
            tap.stuck = True
            topic.append([KB] * 600)
            await tap.until(2)
            tap.leave()
            with pytest.raises(ClientDisconnected):
                await stream.ended()
        assert world.is_quiet()

    run_scenario(scenario)


# Sharing --------------------------------------------------------------------------------------------------


def test_record_is_encoded_once_for_all_followers_with_equal_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3. Method: count the renderings; all get the very same object."""
    count = 0
    real = page_cache.build_page

    def page_of(name: str, from_seq: int, page: JsonPage) -> EncodedPage:
        nonlocal count
        count += 1
        return real(name, from_seq, page)

    monkeypatch.setattr(page_cache, "build_page", page_of)

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        taps = [FakeSink() for _ in range(20)]
        streams = [await world.stream(await world.watch({"a": {}}), tap) for tap in taps]
        odd = FakeSink()
        streams.append(await world.stream(await world.watch({"a": {}}, include_meta=False), odd))
        for tap in [*taps, odd]:
            await tap.until(1)
        assert count == 2, "an empty page for each of the two ways of asking"
        topic.append([1])
        for tap in [*taps, odd]:
            await tap.until(3)
        assert count == 4
        assert all(tap.writes[-1] is taps[0].writes[-1] for tap in taps)
        for stream in streams:
            async with stream:
                pass

    run_scenario(scenario)


def test_record_deleted_between_two_watchers_is_not_sent_to_the_second() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        first, second = FakeSink(), FakeSink()
        async with await world.stream(await world.watch({"a": {}}), first):
            await first.until(2)
            topic.delete(seqs=[2])
            async with await world.stream(await world.watch({"a": {}}), second):
                await second.until(2)
        assert brief(first.events)[0] == ("record", "a", [1, 2, 3])
        assert brief(second.events)[0] == ("record", "a", [1, 3])

    run_scenario(scenario)


def test_records_on_disk_are_read_off_the_loop() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        topic.seal()
        world.engine.checkpoint()
        topic.append([4])
        assert not topic_operations(topic).can_read_without_blocking(0)
        assert topic_operations(topic).can_read_without_blocking(3)
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap):
            await tap.until(2)
        seqs = [seq for event, _, what in brief(tap.events) if event == "record" for seq in what]
        assert seqs == [1, 2, 3, 4]

    run_scenario(scenario)


def test_following_a_topic_counts_as_reading_it() -> None:
    """Contract 3.10, and the metrics of reads."""
    counted: list[tuple[str, int, bool]] = []

    async def scenario(world: ServerHarness) -> None:
        class Metrics(type(world.service.metrics)):  # type: ignore[misc]  # only this method is replaced
            def count_read(self, topic: str, records: int, *, gap: bool) -> None:
                counted.append((topic, records, gap))

        world.service.metrics = Metrics(world.service)
        topic = world.topic("a", cap_records=2)
        topic.append([1, 2, 3])
        assert topic.state().last_read_ms is None
        tap = FakeSink()
        async with await world.stream(await world.watch({"a": {}}), tap):
            await tap.until(3)
        state = topic.state()
        assert state.last_read_ms == 1_700_000_000_000
        assert state.effective_priority == 500
        assert counted == [("a", 2, True)]

    run_scenario(scenario)


def test_slot_is_released_exactly_once() -> None:
    async def scenario(world: ServerHarness) -> None:
        closed: list[int] = []
        slot = StreamSlot(world.service, ANONYMOUS, lambda: closed.append(1))
        assert world.service.auth.stream_limit.count == 1
        slot.release()
        slot.release()
        del slot
        assert (world.service.auth.stream_limit.count, closed) == (0, [1])
        unused = StreamSlot(world.service, ANONYMOUS)
        assert world.service.auth.stream_limit.count == 1
        del unused
        assert world.service.auth.stream_limit.count == 0

    run_scenario(scenario)


def test_time_limits_are_those_of_the_contract() -> None:
    assert (WARN_AFTER_S, CLOSE_AFTER_S) == (5.0, 30.0)
    assert (CLOSE_AFTER_S / WARN_AFTER_S).is_integer()
    assert TIMEOUT_S > 10 * CLOSE_AFTER_S
