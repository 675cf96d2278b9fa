"""§2.9, §3.7, §3.8: watch sessions and their streams, byte by byte."""

from __future__ import annotations

import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.contract_http.api import Api, expect_error, expect_success
from tests.contract_http.client import RawConnection
from tests.contract_http.server import Server
from tests.contract_http.sse_client import RETRY, Event, SseStream, cursor, parse_event, parse_heartbeat
from tests.kit.waiting import eventually

Name = Callable[[str], str]
HEARTBEAT_MS = 60


@pytest.fixture(scope="module")
def fast_heartbeat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose heartbeats may be as quick as a test is patient."""
    with Server(tmp_path_factory.mktemp("beating"), test_min_heartbeat_ms=1).start() as running:
        yield running


def opened(server: Server, api: Api, topics: dict[str, dict[str, object]], **more: Any) -> SseStream:
    """A stream of a new session."""
    return server.events(api.watch(topics, **more)["stream_url"])


# ── POST /v0/watch ────────────────────────────────────────────────────────────────────────────


def test_the_answer_to_a_watch(api: Api, name: Name) -> None:
    """§2.9: 200, five keys, and the watermarks of every topic."""
    a, b = name("a"), name("b")
    api.create_topic(a, cap_records=2)
    api.write(a, 1, 2, 3)
    api.create_topic(b)
    made = api.watch({a: {"from_seq": 1}, b: {}})
    assert made.keys() == {"wid", "stream_url", "session_ttl_ms", "topics", "performance"}
    assert made["stream_url"] == f"/v0/watch/{made['wid']}"
    assert len(made["wid"]) == 26
    assert made["session_ttl_ms"] == 300_000
    assert made["topics"] == {
        a: {"from_seq": 1, "head_seq": 3, "earliest_seq": 2},
        b: {"from_seq": 0, "head_seq": 0, "earliest_seq": 1},
    }


def test_a_watch_may_begin_at_the_end(api: Api, server: Server, topic: str) -> None:
    """§2.9: `tail` is the current head and overrides `from_seq`."""
    api.write(topic, 1, 2, 3)
    made = api.watch({topic: {"from_seq": 1, "tail": True}})
    assert made["topics"][topic] == {"from_seq": 3, "head_seq": 3, "earliest_seq": 1}
    with server.events(made["stream_url"]) as stream:
        stream.expect("caught-up")
        api.write(topic, 4)
        assert stream.expect("record")[0].seqs == [4]
    assert api.watch({topic: {"from_seq": 1, "tail": False}})["topics"][topic]["from_seq"] == 1


def test_a_watch_has_1_to_256_topics(api: Api, topic: str) -> None:
    """§2.9, §1.12: 400, before any of them is looked for."""
    expect_error(api.post("/v0/watch", {"topics": {}}), 400, "invalid_request")
    expect_error(api.post("/v0/watch", {}), 400, "invalid_request")
    many: dict[str, dict[str, object]] = {f"{topic}-{number}": {} for number in range(257)}
    expect_error(api.post("/v0/watch", {"topics": many}), 400, "invalid_request")
    expect_error(api.post("/v0/watch?lenient=true", {"topics": many}), 400, "invalid_request")
    del many[f"{topic}-0"]
    assert expect_success(api.post("/v0/watch?lenient=1", {"topics": many}))["topics"] == {}


def test_an_unknown_topic_refuses_a_watch_unless_it_is_lenient(api: Api, server: Server, name: Name) -> None:
    """§2.9: 404 with its name; lenient leaves it out, and what is left out is not followed later."""
    known, unknown = name("known"), name("unknown")
    api.create_topic(known)
    sessions = api.metrics()["watch_sessions"]
    for query in ("", "?lenient=false", "?lenient=0", "?lenient=maybe"):
        reply = api.post(f"/v0/watch{query}", {"topics": {known: {}, unknown: {}}})
        expect_error(reply, 404, "topic_not_found", {"topic": unknown})
    assert api.metrics()["watch_sessions"] == sessions
    made = api.watch({known: {}, unknown: {}}, "?lenient=true")
    assert made["topics"].keys() == {known}
    with server.events(made["stream_url"]) as stream:
        assert stream.expect("caught-up")[0].id == {known: 0}
        api.write(unknown, 1)
        api.write(known, 1)
        assert stream.expect("record", "caught-up")[0].data["topic"] == known


def test_a_session_of_nothing_ends_at_once(api: Api, server: Server, topic: str) -> None:
    """§2.9: lenient, and all unknown: accepted, and its stream ends."""
    made = api.watch({topic: {}}, "?lenient=true")
    assert made["topics"] == {}
    with server.events(made["stream_url"]) as stream:
        assert stream.is_over()


def test_consistency_is_one_of_two(api: Api, topic: str) -> None:
    """§2.9: parsed; `strong` waits for the sync of what it tells (docs/guarantees.md)."""
    api.create_topic(topic)
    for value in ("eventual", "strong"):
        assert api.watch({topic: {}}, consistency=value)["wid"]
    expect_error(api.post("/v0/watch", {"topics": {topic: {}}, "consistency": "weak"}), 400, "invalid_request")


# ── the head of a stream ──────────────────────────────────────────────────────────────────────


def test_the_head_of_a_stream(api: Api, server: Server, topic: str) -> None:
    """§3.8: three headers, and `retry` as the first bytes."""
    api.create_topic(topic)
    target = api.watch({topic: {}})["stream_url"]
    with SseStream(server.address, target, hello=False) as stream:
        assert stream.head.status == 200
        assert (stream.head.header("content-type") or "").startswith("text/event-stream")
        assert stream.head.header("cache-control") == "no-store"
        assert stream.head.header("x-accel-buffering") == "no"
        assert stream.head.header("content-length") is None
        assert stream.head.header("content-encoding") is None
        assert stream.frame() == RETRY
        stream.expect("caught-up")
        assert stream.is_quiet(0.05), "`retry` comes once"


@pytest.mark.parametrize(
    "accept", [None, "", "text/event-stream", "*/*", "text/html, text/event-stream;q=0.5", "text/html,*/*;q=0.1"]
)
def test_a_client_that_takes_events_gets_them(api: Api, server: Server, topic: str, accept: str | None) -> None:
    """§2.9: Accept is absent, empty, or names the type or anything."""
    api.create_topic(topic)
    headers = {} if accept is None else {"Accept": accept}
    with server.events(api.watch({topic: {}})["stream_url"], headers=headers) as stream:
        stream.expect("caught-up")


@pytest.mark.parametrize("accept", ["application/json", "text/html", "text/*", "event-stream"])
def test_a_client_that_takes_no_events_gets_406(api: Api, server: Server, topic: str, accept: str) -> None:
    """§2.9: first of all checks, and no slot is spent."""
    api.create_topic(topic)
    for target in (api.watch({topic: {}})["stream_url"], "/v0/watch/wid_nope"):
        with server.events(target, headers={"Accept": accept}) as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 406, "not_acceptable")


def test_an_unknown_session_is_404(server: Server) -> None:
    """§2.9."""
    for wid in ("wid_AAAAAAAAAAAAAAAAAAAAAA", "x", "wid_", "%20"):
        with server.events(f"/v0/watch/{wid}") as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 404, "not_found")


def test_a_browser_that_offers_compression_still_gets_every_frame_at_once(api: Api, server: Server, topic: str) -> None:
    """§1.1, §3.8: flushed after each frame, whatever was offered."""
    api.create_topic(topic)
    headers = {"Accept-Encoding": "gzip, deflate, br", "Accept": "text/event-stream"}
    with server.events(api.watch({topic: {}})["stream_url"], headers=headers) as stream:
        assert stream.head.header("content-encoding") is None
        stream.expect("caught-up")
        api.write(topic, 1)
        stream.expect("record", "caught-up")


# ── frames ────────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_a_stream(fast_heartbeat_server: Server) -> None:
    """§3.8: records, level, a loss, the end of a topic and of the stream, exactly as drawn."""
    with fast_heartbeat_server.client() as api:
        api.create_topic("jobs", cap_records=2)
        api.records("jobs", {"data": {"é": "\n"}, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": [1, None]})
        stamp = api.diff("jobs")["records"][0]["$ts"]
        with opened(fast_heartbeat_server, api, {"jobs": {}}, include_tags=True, heartbeat_ms=60_000) as stream:
            first = f'{{"$seq":1,"$ts":{stamp},"$node":"n","$tag":"t","data":{{"é":"\\n"}},"meta":{{"m":1}}}}'
            second = f'{{"$seq":2,"$ts":{stamp},"data":[1,null]}}'
            span = '"topic":"jobs","from_seq":0,"to_seq":2,"head_seq":2'
            wanted = f'id: eyJqb2JzIjoyfQ\nevent: record\ndata: {{{span},"records":[{first},{second}]}}\n\n'
            assert stream.frame() == wanted.encode()
            assert stream.frame() == b'id: eyJqb2JzIjoyfQ\nevent: caught-up\ndata: {"topic":"jobs","head_seq":2}\n\n'
            api.write("jobs", 3, 4, 5)
            at = cursor({"jobs": 3}).encode()
            assert stream.frame() == (
                b'id: %b\nevent: tombstone\ndata: {"topic":"jobs","reason":"cap","gap_from":3,"gap_to":3,'
                b'"earliest_seq":4,"head_seq":5}\n\n' % at
            )
            assert [event.name for event in (stream.next(), stream.next())] == ["record", "caught-up"]
            api.drop("jobs")
            assert stream.frame() == (
                b'id: %b\nevent: topic-deleted\ndata: {"topic":"jobs","head_seq":0,"reason":"deleted"}\n\n'
                % cursor({"jobs": 5}).encode()
            )
            assert stream.is_over()


def test_a_stream_is_plain_lines_in_chunks(api: Api, server: Server, topic: str) -> None:
    """§3.8: LF only, one blank line behind each frame, one line of data."""
    api.write(topic, "line one\nline two\r\n\r\nend")
    target = api.watch({topic: {}})["stream_url"]
    with RawConnection(server.address) as wire:
        wire.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert wire.head().header("transfer-encoding") == "chunked"
        held = b""
        while held.count(b"\n\n") < 3:
            held += wire.chunk()
    assert b"\r" not in held
    assert held.startswith(RETRY)
    retry, record, level, rest = held.split(b"\n\n")
    assert (retry, rest) == (b"retry: 2000", b"")
    assert [line.split(b": ")[0] for line in record.split(b"\n")] == [b"id", b"event", b"data"]
    assert [line.split(b": ")[0] for line in level.split(b"\n")] == [b"id", b"event", b"data"]


def test_at_the_head_a_stream_says_so_at_once(api: Api, server: Server, topic: str) -> None:
    """§3.8: and so for one whose records are all left out."""
    api.write(topic, 1, 2, node="me")
    with opened(server, api, {topic: {"from_seq": 2}}) as stream:
        (level,) = stream.expect("caught-up")
        assert (level.data, level.id) == ({"topic": topic, "head_seq": 2}, {topic: 2})
    with opened(server, api, {topic: {}}, node="me") as stream:
        (level,) = stream.expect("caught-up")
        assert (level.data, level.id) == ({"topic": topic, "head_seq": 2}, {topic: 2}), "the cursor moved silently"
    api.create_topic(f"{topic}-empty")
    with opened(server, api, {f"{topic}-empty": {}}) as stream:
        assert stream.expect("caught-up")[0].data == {"topic": f"{topic}-empty", "head_seq": 0}


def test_each_burst_is_followed_by_its_level(api: Api, server: Server, topic: str) -> None:
    """§3.8: `record`, then a new `caught-up`."""
    api.write(topic, 1)
    with opened(server, api, {topic: {}}) as stream:
        stream.expect("record", "caught-up")
        for seq in range(2, 6):
            api.write(topic, seq)
            record, level = stream.expect("record", "caught-up")
            assert (record.data["from_seq"], record.data["to_seq"], record.data["head_seq"]) == (seq - 1, seq, seq)
            assert (record.seqs, record.id) == ([seq], {topic: seq})
            assert (level.data["head_seq"], level.id) == (seq, {topic: seq})
        assert stream.is_quiet(0.05)


def test_append_is_pushed_at_once(api: Api, server: Server, topic: str) -> None:
    """§1.1: flushed after each frame; not with the next heartbeat."""
    api.create_topic(topic)
    with opened(server, api, {topic: {}}) as stream:
        stream.expect("caught-up")
        began = time.monotonic()
        for _ in range(20):
            api.write(topic, 1)
            stream.expect("record", "caught-up")
        assert time.monotonic() - began < 15


def test_a_record_frame_has_five_keys(api: Api, server: Server, topic: str) -> None:
    """§3.8, §1.14."""
    api.records(topic, {"data": 1, "tag": "t", "meta": {"m": 1}, "node": "n"})
    with opened(server, api, {topic: {}}) as stream:
        (record,) = stream.expect("record")
        assert list(record.data) == ["topic", "from_seq", "to_seq", "head_seq", "records"]
        assert record.data["records"][0].keys() == {"$seq", "$ts", "$node", "data", "meta"}


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"$node", "data", "meta"}),
        ({"include_data": False}, {"$node", "meta"}),
        ({"include_data": False, "include_meta": False}, {"$node"}),
        ({"include_meta": False}, {"$node", "data"}),
        ({"include_tags": True}, {"$node", "data", "meta", "$tag"}),
        ({"include_data": False, "include_tags": True, "include_meta": False}, {"$node", "$tag"}),
    ],
)
def test_what_of_a_record_is_shown(
    api: Api, server: Server, topic: str, options: dict[str, object], keys: set[str]
) -> None:
    """§2.9, B20, C: metadata-only frames; `meta` follows `include_meta` alone."""
    api.records(topic, {"data": 1, "tag": "t", "meta": {"m": 1}, "node": "n"})
    with opened(server, api, {topic: {}}, **options) as stream:
        assert stream.expect("record")[0].data["records"][0].keys() == keys | {"$seq", "$ts"}


def test_topics_come_in_the_order_of_their_names_and_ids_hold_all(api: Api, server: Server, name: Name) -> None:
    """§3.8: composite ids, keys sorted, after each frame's own step."""
    a, b, c = name("a"), name("b"), name("c")
    api.write(b, 1, 2)
    api.write(a, 1)
    api.create_topic(c)
    with opened(server, api, {c: {}, b: {}, a: {}}) as stream:
        frames = stream.expect("record", "caught-up", "record", "caught-up", "caught-up")
        assert [frame.data["topic"] for frame in frames] == [a, a, b, b, c]
        assert [frame.id for frame in frames] == [
            {a: 1, b: 0, c: 0},
            {a: 1, b: 0, c: 0},
            {a: 1, b: 2, c: 0},
            {a: 1, b: 2, c: 0},
            {a: 1, b: 2, c: 0},
        ]
        api.write(c, 1)
        record, _ = stream.expect("record", "caught-up")
        assert (record.data["topic"], record.id) == (c, {a: 1, b: 2, c: 1})


def batches(stream: SseStream) -> list[int]:
    """How many records came in each frame, up to the head."""
    found: list[Event] = []
    while True:
        event = stream.next()
        if event.name == "caught-up":
            assert [seq for record in found for seq in record.seqs] == list(range(1, event.data["head_seq"] + 1))
            spans = [(record.data["from_seq"], record.data["to_seq"]) for record in found]
            assert all(before[1] == after[0] for before, after in pairwise(spans))
            return [len(record.seqs) for record in found]
        assert event.name == "record"
        assert event.id == {event.data["topic"]: event.data["to_seq"]}
        found.append(event)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [256] * 4 + [176]),
        ({"limit": 0}, [256] * 4 + [176]),
        ({"limit": 5000}, [1000, 200]),
        ({"limit": 1000}, [1000, 200]),
        ({"limit": 700}, [700, 500]),
    ],
)
def test_the_records_of_a_frame(
    api: Api, server: Server, topic: str, options: dict[str, object], sizes: list[int]
) -> None:
    """§2.9, §1.12: 256 by default and for 0; at most 1,000."""
    assert api.write_raw(topic, 1_200).status == 201
    with opened(server, api, {topic: {}}, **options) as stream:
        assert batches(stream) == sizes


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [2, 2, 2, 2, 2]),
        ({"max_batch_bytes": 262_144}, [2, 2, 2, 2, 2]),
        ({"max_batch_bytes": 0}, [8, 2]),
        ({"max_batch_bytes": 1}, [1] * 10),
        ({"max_batch_bytes": 1 << 50}, [10]),
    ],
)
def test_the_bytes_of_a_frame(
    api: Api, server: Server, topic: str, options: dict[str, object], sizes: list[int]
) -> None:
    """§1.12: 262,144 by default; 0 is 1 MiB."""
    api.write(topic, *["x" * 131_070] * 10)  # 131,072 bytes each
    with opened(server, api, {topic: {}}, **options) as stream:
        assert batches(stream) == sizes


def test_records_of_a_node_are_left_out_and_the_cursor_passes_them(api: Api, server: Server, topic: str) -> None:
    """§3.8, C: `to_seq` and the id include trailing ones."""
    api.records(topic, *({"data": 1, "node": node} for node in ("me", "you", "me", "me")))
    with opened(server, api, {topic: {}}, node=["me", "myself"]) as stream:
        record, level = stream.expect("record", "caught-up")
        assert (record.seqs, record.data["from_seq"], record.data["to_seq"]) == ([2], 0, 4)
        assert record.id == level.id == {topic: 4}
        api.write(topic, "x", node="me")
        assert stream.is_quiet(0.1), "nothing to tell; it was caught up and is"
        api.write(topic, "x", node="you")
        record, level = stream.expect("record", "caught-up")
        assert (record.seqs, record.data["to_seq"], level.id) == ([6], 6, {topic: 6})


# ── gaps ──────────────────────────────────────────────────────────────────────────────────────


def test_cursor_that_is_too_old_gets_a_tombstone_on_connect(api: Api, server: Server, topic: str) -> None:
    """§3.8: `from_seq_too_old` on the first read of a connection; the id is at `gap_to`."""
    api.create_topic(topic, cap_records=3)
    api.write(topic, *range(6))
    with opened(server, api, {topic: {"from_seq": 1}}) as stream:
        gap, record, level = stream.expect("tombstone", "record", "caught-up")
        assert list(gap.data) == ["topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq"]
        assert gap.data == {
            "topic": topic,
            "reason": "from_seq_too_old",
            "gap_from": 2,
            "gap_to": 3,
            "earliest_seq": 4,
            "head_seq": 6,
        }
        assert gap.id == {topic: 3}
        assert (record.seqs, record.data["from_seq"], record.data["to_seq"]) == ([4, 5, 6], 3, 6), "after the gap"
        assert level.id == {topic: 6}


def test_loss_during_a_stream_is_sent_with_its_reason(api: Api, server: Server, topic: str) -> None:
    """§3.8: on later reads of a connection."""
    api.create_topic(topic, cap_records=2)
    api.write(topic, 1)
    with opened(server, api, {topic: {}}) as stream:
        stream.expect("record", "caught-up")
        api.write(topic, *range(5))
        gap, record, level = stream.expect("tombstone", "record", "caught-up")
        assert (gap.data["reason"], gap.data["gap_from"], gap.data["gap_to"]) == ("cap", 2, 4)
        assert (gap.id, record.seqs, record.data["from_seq"]) == ({topic: 4}, [5, 6], 4)
        assert level.data["head_seq"] == 6


def test_a_loss_of_everything_is_a_tombstone_and_a_level(api: Api, server: Server, topic: str) -> None:
    """§3.8: no records; the cursor is behind the gap, and `caught-up` follows."""
    api.create_topic(topic, cap_bytes=3)
    api.write(topic, "too large")
    with opened(server, api, {topic: {}}) as stream:
        gap, level = stream.expect("tombstone", "caught-up")
        assert (gap.data["gap_from"], gap.data["gap_to"], gap.id) == (1, 1, {topic: 1})
        assert level.data == {"topic": topic, "head_seq": 1}


def test_a_deleted_beginning_is_silent(api: Api, server: Server, topic: str) -> None:
    """§3.8, B8, C."""
    api.write(topic, 1, 2, 3)
    api.remove(topic, before_seq=3)
    with opened(server, api, {topic: {}}) as stream:
        record, _ = stream.expect("record", "caught-up")
        assert (record.seqs, record.data["from_seq"]) == ([3], 0)
    api.remove(topic, before_seq=9)
    with opened(server, api, {topic: {}}) as stream:
        assert stream.expect("caught-up")[0].id == {topic: 3}


def test_cursor_of_an_earlier_epoch_is_reported(api: Api, server: Server, topic: str) -> None:
    """§3.4, D10: `recreated` is not masked; the records come from the beginning."""
    api.write(topic, 1, 2)
    with opened(server, api, {topic: {"from_seq": 50}}) as stream:
        gap, record, level = stream.expect("tombstone", "record", "caught-up")
        assert gap.data["reason"] == "recreated"
        assert (gap.data["gap_from"], gap.data["gap_to"], gap.data["head_seq"]) == (1, 2, 2)
        assert (record.seqs, level.id) == ([1, 2], {topic: 2})


# ── the end of a topic ────────────────────────────────────────────────────────────────────────


def test_dropped_topic_is_reported_at_once_and_the_others_continue(api: Api, server: Server, name: Name) -> None:
    """§3.8, D4: promptly, once; a topic of the same name is another one."""
    a, b = name("a"), name("b")
    api.write(a, 1)
    api.create_topic(b)
    with opened(server, api, {a: {}, b: {}}) as stream:
        stream.expect("record", "caught-up", "caught-up")
        began = time.monotonic()
        api.drop(a)
        (gone,) = stream.expect("topic-deleted")
        assert time.monotonic() - began < 10
        assert gone.data == {"topic": a, "head_seq": 0, "reason": "deleted"}
        assert b'"reason":"deleted"' in gone.raw
        api.write(b, 1)
        record, level = stream.expect("record", "caught-up")
        assert record.data["topic"] == level.data["topic"] == b
        api.write(a, "of the new one")
        assert stream.is_quiet(0.1), "what was deleted stays deleted for this stream"
        api.drop(b)
        assert stream.expect("topic-deleted")[0].data["topic"] == b
        assert stream.is_over(), "nothing is left to follow"


def test_a_topic_that_went_before_the_stream_began(api: Api, server: Server, name: Name) -> None:
    """§3.8: missing → `topic-deleted`."""
    a, b = name("a"), name("b")
    api.create_topic(a)
    api.create_topic(b)
    target = api.watch({a: {}, b: {}})["stream_url"]
    api.drop(a)
    with server.events(target) as stream:
        gone, level = stream.expect("topic-deleted", "caught-up")
        assert (gone.data["topic"], level.data["topic"]) == (a, b)


def test_connection_is_reusable_after_a_stream(api: Api, server: Server, topic: str) -> None:
    """§1.1: the last chunk, and then the next request."""
    target = api.watch({topic: {}}, "?lenient=true")["stream_url"]
    with server.client() as client:
        reply = client.get(target)
        assert (reply.status, reply.body) == (200, RETRY)
        assert client.get("/v0/health").status == 200


# ── coming back ───────────────────────────────────────────────────────────────────────────────


def test_a_session_goes_on_where_its_stream_broke(api: Api, server: Server, name: Name) -> None:
    """§3.7: the server's cursors, without any id from the client."""
    a, b = name("a"), name("b")
    api.write(a, 1, 2)
    api.create_topic(b)
    target = api.watch({a: {}, b: {}})["stream_url"]
    with server.events(target) as stream:
        stream.expect("record", "caught-up", "caught-up")
    # Until then the record would be handed to the stream that nobody reads, and the cursor moves with that.
    eventually(lambda: api.metrics()["sse_connections"] == 0)
    api.write(a, 3)
    with server.events(target) as stream:
        record, *_ = stream.expect("record", "caught-up", "caught-up")
        assert (record.seqs, record.data["from_seq"], record.id) == ([3], 2, {a: 3, b: 0})
    with server.events(target) as stream:
        stream.expect("caught-up", "caught-up")


def test_an_id_may_turn_a_session_back_and_never_forward(api: Api, server: Server, name: Name) -> None:
    """§3.7, C: forged `{"jobs":1}` rewinds; ahead is ignored; so is a topic nobody follows."""
    a, b, other = name("a"), name("b"), name("other")
    api.write(a, 1, 2, 3)
    api.write(b, 1)
    api.write(other, 1)
    target = api.watch({a: {}, b: {}})["stream_url"]

    def come_back(positions: object) -> list[tuple[str, list[int]]]:
        with server.events(target, headers={"Last-Event-ID": cursor(positions)}) as stream:
            found, levels = [], 0
            while levels < 2:
                event = stream.next()
                levels += event.name == "caught-up"
                assert event.id.keys() == {a, b}
                if event.name == "record":
                    found.append((event.data["topic"], event.seqs))
            return found

    assert come_back({a: 1}) == [(a, [1, 2, 3]), (b, [1])], "it was at 0, and stays there"
    assert come_back({a: 1}) == [(a, [2, 3])], "back, and b stays"
    assert come_back({a: 1, b: 0}) == [(a, [2, 3]), (b, [1])]
    assert come_back({a: 2, other: 0}) == [(a, [3])]
    assert come_back({a: 99, b: 99}) == [], "never ahead"
    assert come_back({a: 3}) == []
    assert come_back({}) == []
    assert come_back({a: 0}) == [(a, [1, 2, 3])]


def test_a_fresh_session_is_not_advanced_by_an_id(api: Api, server: Server, topic: str) -> None:
    """§3.7, C: never raise it."""
    api.write(topic, 1, 2, 3)
    target = api.watch({topic: {}})["stream_url"]
    with server.events(target, headers={"Last-Event-ID": cursor({topic: 2})}) as stream:
        assert stream.expect("record")[0].seqs == [1, 2, 3]


@pytest.mark.parametrize(
    "made",
    [
        "!!!",
        "x",
        "12345",
        "null",
        urlsafe_b64encode(b"[]").decode(),
        urlsafe_b64encode(b"{").decode(),
        urlsafe_b64encode(b'{"a":').decode().rstrip("="),
        cursor([1]),
        cursor("x"),
        ("1",),
        (-1,),
        (1.5,),
        (None,),
        (True,),
        (1 << 70,),
        "\xff\xfe",
    ],
)
def test_an_id_that_is_not_ours_is_ignored(api: Api, server: Server, topic: str, made: str | tuple[object]) -> None:
    """§3.7: silently; also one that names the topic with something that is no seq."""
    api.write(topic, 1, 2)
    target = api.watch({topic: {"from_seq": 1}})["stream_url"]
    text = made if isinstance(made, str) else cursor({topic: made[0]})
    with server.events(target, headers={"Last-Event-ID": text}) as stream:
        record, _ = stream.expect("record", "caught-up")
        assert record.seqs == [2]


def test_event_id_resumes_after_its_frame(api: Api, server: Server, topic: str) -> None:
    """§3.8: a client that comes back with what it has seen misses nothing and sees nothing twice."""
    assert api.write_raw(topic, 50).status == 201
    target = api.watch({topic: {}}, limit=10)["stream_url"]
    seen: list[int] = []
    headers: dict[str, str] = {}
    for _ in range(5):
        with server.events(target, headers=headers) as stream:
            event = stream.next()
            seen += event.seqs
            headers = {"Last-Event-ID": event.raw.split(b"\n")[0].removeprefix(b"id: ").decode()}
    assert seen == list(range(1, 51))


def test_a_stream_that_was_left_open_takes_nothing_from_the_one_after_it(api: Api, server: Server, topic: str) -> None:
    """A half-open connection: the server still sends to the first stream while the client reads the second."""
    api.write(topic, 1)
    target = api.watch({topic: {}})["stream_url"]
    with server.events(target) as first:
        record, _ = first.expect("record", "caught-up")
        headers = {"Last-Event-ID": cursor(record.id)}
        with server.events(target, headers=headers) as second:
            second.expect("caught-up")
            api.write(topic, *range(2, 12))
            record, _ = second.expect("record", "caught-up")
            assert record.seqs == list(range(2, 12))
            first.wire.close()
            eventually(lambda: api.metrics()["sse_connections"] == 1)
            api.write(topic, 12)
            record, _ = second.expect("record", "caught-up")
            assert (record.seqs, record.data["from_seq"], record.id) == ([12], 11, {topic: 12})


def test_a_client_that_returns_with_an_old_id_gets_what_an_open_stream_was_sent(
    api: Api, server: Server, topic: str
) -> None:
    """The first stream is sent more while the second one reads from its own cursor."""
    api.write(topic, 1)
    target = api.watch({topic: {}}, limit=2)["stream_url"]
    with server.events(target) as first:
        first.expect("record", "caught-up")
        api.write(topic, *range(2, 8))
        first.expect("record", "record", "record", "caught-up")
        with server.events(target, headers={"Last-Event-ID": cursor({topic: 1})}) as second:
            found = second.expect("record", "record", "record", "caught-up")
            assert [event.seqs for event in found[:3]] == [[2, 3], [4, 5], [6, 7]]
        api.write(topic, 8)
        assert first.expect("record", "caught-up")[0].seqs == [8]


def test_a_topic_that_was_made_again_is_read_from_its_beginning(api: Api, server: Server, topic: str) -> None:
    """The cursor of a session says nothing about a later topic of the same name: going on would skip records."""
    api.write(topic, 1, 2)
    target = api.watch({topic: {}})["stream_url"]
    with server.events(target) as stream:
        last, _ = stream.expect("record", "caught-up")
    api.drop(topic)
    api.write(topic, *range(5))
    newest: dict[str, int] = {}
    for _ in range(2):  # the client may not have received what the first stream sent
        with server.events(target, headers={"Last-Event-ID": cursor(last.id)}) as stream:
            gap, record, level = stream.expect("tombstone", "record", "caught-up")
            assert (gap.data["reason"], record.seqs) == ("recreated", [1, 2, 3, 4, 5])
            newest = level.id
    api.write(topic, 6)
    with server.events(target, headers={"Last-Event-ID": cursor(newest)}) as stream:
        assert stream.expect("record", "caught-up")[0].seqs == [6]


def test_many_streams_of_one_topic_see_the_same(api: Api, server: Server, topic: str) -> None:
    """§2.9: each session has cursors and options of its own."""
    api.write(topic, 1, 2, 3)
    wanted: list[tuple[dict[str, object], list[int]]] = [
        ({}, [1, 2, 3]),
        ({"from_seq": 1}, [2, 3]),
        ({"from_seq": 2}, [3]),
    ]
    streams = [(opened(server, api, {topic: spot}), seqs) for spot, seqs in wanted]
    try:
        for stream, seqs in streams:
            assert stream.expect("record", "caught-up")[0].seqs == seqs
        api.write(topic, 4)
        for stream, _ in streams:
            assert stream.expect("record", "caught-up")[0].seqs == [4]
    finally:
        for stream, _ in streams:
            stream.wire.close()


def test_reading_a_stream_is_consumption(api: Api, server: Server, topic: str) -> None:
    """§3.10."""
    api.write(topic, 1)
    with opened(server, api, {topic: {}}) as stream:
        stream.expect("record", "caught-up")
    assert api.state(topic)["effective_priority"] > 300
    assert api.state(topic)["last_read_ts"] is not None


# ── heartbeats ────────────────────────────────────────────────────────────────────────────────


def test_a_quiet_stream_beats(fast_heartbeat_server: Server) -> None:
    """§3.8: `: hb <epoch ms>`, no id, at its cadence."""
    with fast_heartbeat_server.client() as api:
        api.create_topic("quiet")
        with opened(fast_heartbeat_server, api, {"quiet": {}}, heartbeat_ms=HEARTBEAT_MS) as stream:
            stream.expect("caught-up")
            began = time.monotonic()
            beats = [parse_heartbeat(stream.frame()) for _ in range(5)]
            took_ms = (time.monotonic() - began) * 1000
            assert took_ms >= 4 * HEARTBEAT_MS
            assert beats == sorted(beats)
            assert abs(beats[-1] - time.time_ns() // 1_000_000) < 5_000
            assert all(later - before >= HEARTBEAT_MS - 15 for before, later in pairwise(beats))


def test_any_event_puts_off_the_heartbeat(fast_heartbeat_server: Server) -> None:
    """§3.8: only when nothing was sent for so long."""
    every_ms = 500
    with fast_heartbeat_server.client() as api:
        api.create_topic("busy")
        with opened(fast_heartbeat_server, api, {"busy": {}}, heartbeat_ms=every_ms) as stream:
            stream.expect("caught-up")
            began = time.monotonic()
            sent_ms = 0  # by the server's clock, as a heartbeat is: a slow machine may send one between two writes
            while time.monotonic() - began < 2.5 * every_ms / 1000:
                api.write("busy", 1)
                events: list[Event] = []
                while len(events) < 2:
                    frame = stream.frame()
                    if frame.startswith(b":"):
                        assert parse_heartbeat(frame) - sent_ms >= every_ms - 50
                    else:
                        events.append(parse_event(frame))
                sent_ms = max(
                    record["$ts"] for event in events if event.name == "record" for record in event.data["records"]
                )
                stream.is_quiet(0.05)  # a pause
            assert parse_heartbeat(stream.frame()) - sent_ms >= every_ms - 50


def test_a_heartbeat_is_never_quicker_than_a_second(api: Api, server: Server, topic: str) -> None:
    """§1.12: clamped to 1,000 ms without the hook for tests."""
    api.create_topic(topic)
    with opened(server, api, {topic: {}}, heartbeat_ms=1) as stream:
        stream.expect("caught-up")
        began = time.monotonic()
        parse_heartbeat(stream.frame(within_s=30))
        assert 0.9 <= time.monotonic() - began < 15, "the default"


def test_a_client_of_http_1_0_gets_its_events_until_the_end(api: Api, server: Server, topic: str) -> None:
    """§1.1: no chunks for whom they are unknown."""
    api.write(topic, 1)
    target = api.watch({topic: {}})["stream_url"]
    with RawConnection(server.address) as wire:
        wire.send(f"GET {target} HTTP/1.0\r\n\r\n".encode())
        head = wire.head()
        assert (head.status, head.header("transfer-encoding")) == (200, None)
        assert wire.read_until(b"\n\n") == RETRY
        assert wire.read_until(b"\n\n").startswith(b"id: ")
        wire.read_until(b"\n\n")
        api.drop(topic)
        assert wire.read_until(b"\n\n").split(b"\n")[1] == b"event: topic-deleted"
        assert wire.read_rest() == b""


def test_a_session_counts_as_one_and_its_stream_as_one(api: Api, server: Server, topic: str) -> None:
    """§2.12."""
    api.create_topic(topic)
    before = api.metrics()
    target = api.watch({topic: {}})["stream_url"]
    assert api.metrics()["watch_sessions"] == before["watch_sessions"] + 1
    with server.events(target) as stream:
        stream.expect("caught-up")
        assert api.metrics()["sse_connections"] == before["sse_connections"] + 1
    eventually(lambda: api.metrics()["sse_connections"] == before["sse_connections"])
    assert api.metrics()["watch_sessions"] == before["watch_sessions"] + 1, "it can be opened again"
