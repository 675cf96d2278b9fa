"""§2.6, §3.4, §3.5: reading behind a cursor."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from tests.contract_http.api import Api, expect_success, topic_path
from tests.contract_http.client import JSON, dumps
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

READ = {
    "topic",
    "records",
    "next_from_seq",
    "head_seq",
    "earliest_seq",
    "caught_up",
    "tombstone",
    "lag",
    "performance",
}
GAP = {"gap_from", "gap_to", "reason", "missed_estimate", "earliest_seq", "head_seq"}


def gap(gap_from: int, gap_to: int, reason: str, missed: int, earliest: int, head: int) -> dict[str, Any]:
    return {
        "gap_from": gap_from,
        "gap_to": gap_to,
        "reason": reason,
        "missed_estimate": missed,
        "earliest_seq": earliest,
        "head_seq": head,
    }


def seqs(found: dict[str, Any]) -> list[int]:
    return [record["$seq"] for record in found["records"]]


# ── pages ─────────────────────────────────────────────────────────────────────────────────────


def test_the_answer_to_a_read(api: Api, topic: str) -> None:
    """§2.6: nine keys; `tombstone` is there and null."""
    api.write(topic, "a", "b", "c")
    found = api.diff(topic, from_seq=1)
    assert found.keys() == READ
    assert seqs(found) == [2, 3], "from_seq is exclusive"
    assert (found["topic"], found["next_from_seq"], found["head_seq"], found["earliest_seq"]) == (topic, 3, 3, 1)
    assert (found["caught_up"], found["tombstone"], found["lag"]) == (True, None, 0)
    scanned = found["performance"]["records_scanned"]
    assert isinstance(scanned, int)
    assert scanned >= 2


def test_an_empty_topic_and_the_head_read_as_caught_up(api: Api, topic: str) -> None:
    """§3.4: `from_seq == head`."""
    api.create_topic(topic)
    empty = api.diff(topic)
    assert (empty["records"], empty["next_from_seq"], empty["head_seq"], empty["earliest_seq"]) == ([], 0, 0, 1)
    assert (empty["caught_up"], empty["lag"], empty["tombstone"]) == (True, 0, None)
    api.write(topic, 1, 2)
    at_head = api.diff(topic, from_seq=2)
    assert (at_head["records"], at_head["next_from_seq"], at_head["caught_up"]) == ([], 2, True)
    assert (at_head["lag"], at_head["tombstone"]) == (0, None)


def test_read_continues_after_the_cursor(api: Api, topic: str) -> None:
    """§2.6: `lag` and `caught_up` by the cursor."""
    api.write(topic, *range(5))
    at, told = 0, []
    while True:
        found = api.diff(topic, from_seq=at, limit=2)
        told.append((seqs(found), found["next_from_seq"], found["lag"], found["caught_up"]))
        at = found["next_from_seq"]
        if found["caught_up"]:
            break
    assert told == [([1, 2], 2, 3, False), ([3, 4], 4, 1, False), ([5], 5, 0, True)]


@pytest.mark.parametrize(
    ("limit", "count"),
    [(None, 256), (0, 256), (1, 1), (256, 256), (999, 999), (1000, 1000), (1001, 1000), (5000, 1000)],
)
def test_the_limit_of_a_page(api: Api, topic: str, limit: int | None, count: int) -> None:
    """§1.12, C: default and 0 are 256; at most 1,000."""
    assert api.write_raw(topic, 1_100).status == 201
    found = api.diff(topic) if limit is None else api.diff(topic, limit=limit)
    assert seqs(found) == list(range(1, count + 1))
    assert found["next_from_seq"] == count


def test_the_bytes_of_a_page(api: Api, topic: str) -> None:
    """§1.12, §3.4: 1 MiB by default and for 0, at most 8 MiB, and always a first record."""
    size = 600_000
    for _ in range(15):
        api.write(topic, "x" * (size - 2))

    def read(**body: object) -> int:
        found = api.diff(topic, **body)
        assert found["next_from_seq"] == len(found["records"]), "the cursor stays before what did not fit"
        assert not found["caught_up"]
        return len(found["records"])

    assert read() == 1
    assert read(max_batch_bytes=0) == 1
    assert read(max_batch_bytes=1) == 1, "however large it is"
    assert read(max_batch_bytes=2 * size) == 2, "exactly as much as was asked for"
    assert read(max_batch_bytes=2 * size - 1) == 1
    assert read(max_batch_bytes=8 << 20) == (8 << 20) // size
    assert read(max_batch_bytes=1 << 40) == (8 << 20) // size


def test_meta_and_data_both_count_as_bytes_of_a_page(api: Api, topic: str) -> None:
    """§1.12: the same figure everywhere."""
    api.records(topic, *[{"data": "12345678", "meta": {"a": "b"}}] * 4)
    assert len(api.diff(topic, max_batch_bytes=38)["records"]) == 2
    assert len(api.diff(topic, max_batch_bytes=37)["records"]) == 1


def test_tags_are_shown_where_asked_for_and_meta_unless_not(api: Api, topic: str) -> None:
    """§2.6."""
    api.records(topic, {"data": 1, "tag": "t", "meta": {"m": 1}, "node": "n"})
    base = {"$seq", "$ts", "$node", "data"}
    for body, keys in (
        ({}, base | {"meta"}),
        ({"include_tags": False, "include_meta": True}, base | {"meta"}),
        ({"include_tags": True}, base | {"meta", "$tag"}),
        ({"include_meta": False}, base),
        ({"include_tags": True, "include_meta": False}, base | {"$tag"}),
    ):
        assert api.diff(topic, **body)["records"][0].keys() == keys


# ── nodes ─────────────────────────────────────────────────────────────────────────────────────


def test_records_of_a_node_are_left_out_silently(api: Api, topic: str) -> None:
    """§3.5: byte-exact; records without a node always pass."""
    api.records(topic, *({"data": 1, "node": node} for node in ("a", "b", "A", None, "ab", "é")))
    assert api.seqs(topic, node="a") == [2, 3, 4, 5, 6]
    assert api.seqs(topic, node=["a"]) == [2, 3, 4, 5, 6]
    assert api.seqs(topic, node=["a", "b", "é"]) == [3, 4, 5]
    assert api.seqs(topic, node=[]) == [1, 2, 3, 4, 5, 6]
    assert api.seqs(topic, node="nobody") == [1, 2, 3, 4, 5, 6]
    assert api.seqs(topic, node=None) == [1, 2, 3, 4, 5, 6]


def test_an_empty_node_is_no_node(api: Api, topic: str) -> None:
    """§3.5: a record without a node always passes. The contract sets no least length; ours is one (docs/http.md)."""
    api.records(topic, {"data": 1, "node": ""}, {"data": 2})
    assert [record.get("$node") for record in api.diff(topic)["records"]] == [None, None]
    assert api.seqs(topic, node="") == [1, 2]


def test_a_reader_of_its_own_records_alone_is_caught_up(api: Api, topic: str) -> None:
    """§3.4, C: `[]`, and the cursor is at the head."""
    api.write(topic, 1, 2, 3, node="me")
    found = api.diff(topic, node="me")
    assert (found["records"], found["next_from_seq"], found["caught_up"], found["lag"]) == ([], 3, True, 0)
    assert found["tombstone"] is None


def test_what_is_left_out_moves_the_cursor(api: Api, topic: str) -> None:
    """§3.4: between records and behind the last one; a limit is of records that are shown."""
    api.records(topic, *({"data": 1, "node": node} for node in "mxmxmm"))
    found = api.diff(topic, node="m")
    assert (seqs(found), found["next_from_seq"], found["caught_up"]) == ([2, 4], 6, True)
    first = api.diff(topic, node="m", limit=1)
    assert seqs(first) == [2]
    assert first["next_from_seq"] == 2, "what is left out behind the last of a full page is the next one's"
    full = api.diff(topic, node="m", limit=2)
    assert (seqs(full), full["next_from_seq"], full["caught_up"], full["lag"]) == ([2, 4], 4, False, 2)
    rest = api.diff(topic, node="m", from_seq=first["next_from_seq"])
    assert (seqs(rest), rest["next_from_seq"]) == ([4], 6)


def test_a_topic_may_turn_the_filter_off(api: Api, topic: str) -> None:
    """§3.5, §1.13: `dedupe_node: false`."""
    api.create_topic(topic, dedupe_node=False)
    api.write(topic, 1, 2, node="me")
    assert api.seqs(topic, node="me") == [1, 2]
    api.configure(topic, dedupe_node=True)
    assert api.seqs(topic, node="me") == []


# ── gaps ──────────────────────────────────────────────────────────────────────────────────────


def test_records_evicted_by_a_cap_are_a_gap(api: Api, topic: str) -> None:
    """§3.4: also to who reads from 0; the records resume at the earliest one."""
    api.create_topic(topic, cap_records=3)
    for number in range(6):
        api.write(topic, number)
    for from_seq, missed in ((0, 3), (1, 2), (2, 1)):
        found = api.diff(topic, from_seq=from_seq)
        assert found["tombstone"] == gap(from_seq + 1, 3, "cap", missed, 4, 6)
        assert found["tombstone"]["earliest_seq"] == found["earliest_seq"] == 4
        assert (seqs(found), found["next_from_seq"], found["caught_up"]) == ([4, 5, 6], 6, True)
    for from_seq in (3, 4, 6):
        assert api.diff(topic, from_seq=from_seq)["tombstone"] is None
    limited = api.diff(topic, limit=1)
    assert (seqs(limited), limited["next_from_seq"], limited["lag"]) == ([4], 4, 2)
    assert limited["tombstone"] is not None


def test_expired_records_are_a_gap(api: Api, topic: str) -> None:
    """§3.4, C: the values of a ttl tombstone."""
    api.create_topic(topic, ttl_ms=60)
    api.write(topic, 1, 2)
    eventually(lambda: api.state(topic)["count"] == 0)
    found = api.diff(topic)
    assert found["tombstone"] == gap(1, 2, "ttl", 2, 3, 2)
    assert (found["records"], found["next_from_seq"], found["earliest_seq"]) == ([], 2, 3)
    assert (found["caught_up"], found["lag"]) == (True, 0)
    assert api.diff(topic, from_seq=1)["tombstone"] == gap(2, 2, "ttl", 1, 3, 2)
    assert api.diff(topic, from_seq=2)["tombstone"] is None


def test_a_gap_of_both_kinds_is_mixed(api: Api, topic: str) -> None:
    """§3.4: by the highest loss of each kind at or behind `gap_from`."""
    api.create_topic(topic, ttl_ms=150, cap_records=3)
    api.write(topic, *range(5))
    assert api.diff(topic)["tombstone"]["reason"] == "cap"
    eventually(lambda: api.state(topic)["count"] == 0)
    assert api.diff(topic)["tombstone"] == gap(1, 5, "mixed", 5, 6, 5)
    assert api.diff(topic, from_seq=1)["tombstone"]["reason"] == "mixed"
    assert api.diff(topic, from_seq=2)["tombstone"] == gap(3, 5, "ttl", 3, 6, 5)


def test_what_was_deleted_is_no_gap(api: Api, topic: str) -> None:
    """§3.4, C: silent, in front and in between."""
    api.records(topic, *({"data": 1, "tag": tag} for tag in "abcab"))
    api.remove(topic, before_seq=2)
    found = api.diff(topic)
    assert (found["tombstone"], seqs(found), found["earliest_seq"]) == (None, [2, 3, 4, 5], 2)
    api.remove(topic, match="b")
    found = api.diff(topic)
    assert (found["tombstone"], seqs(found), found["next_from_seq"], found["earliest_seq"]) == (None, [3, 4], 5, 3)
    api.remove(topic, before_seq=9)
    found = api.diff(topic)
    assert (found["tombstone"], seqs(found), found["next_from_seq"], found["earliest_seq"]) == (None, [], 5, 6)
    assert found["caught_up"]


def test_loss_after_a_deletion_is_a_gap_with_its_own_reason(api: Api, topic: str) -> None:
    """C: delete, then cap; §3.2: the floor of losses may lie below the earliest record (B9)."""
    api.create_topic(topic, cap_records=3)
    api.write(topic, *range(1, 4))
    api.remove(topic, before_seq=2)
    api.write(topic, 4, 5)  # live: 2, 3 and these; the oldest goes
    assert api.diff(topic)["tombstone"] == gap(1, 2, "cap", 2, 3, 5)
    api.remove(topic, before_seq=5)
    found = api.diff(topic)
    assert found["tombstone"] == gap(1, 2, "cap", 2, 3, 5), "what was deleted above it is none of its business"
    assert (found["earliest_seq"], seqs(found)) == (5, [5])
    assert api.diff(topic, from_seq=2)["tombstone"] is None


def test_a_cursor_beyond_the_head_is_of_another_life(api: Api, topic: str) -> None:
    """§3.4, B10: strictly beyond; the records come from the beginning, with the news."""
    api.write(topic, "a", "b", "c")
    found = api.diff(topic, from_seq=4)
    assert found["tombstone"] == gap(1, 3, "recreated", 3, 1, 3)
    assert (seqs(found), found["next_from_seq"], found["caught_up"]) == ([1, 2, 3], 3, True)
    assert api.diff(topic, from_seq=3)["tombstone"] is None
    api.drop(topic)
    api.write(topic, "d")
    found = api.diff(topic, from_seq=3)
    assert (found["tombstone"], seqs(found)) == (gap(1, 1, "recreated", 1, 1, 1), [1])
    api.drop(topic)
    api.create_topic(topic)
    found = api.diff(topic, from_seq=3)
    assert found["tombstone"] == gap(1, 0, "recreated", 1, 1, 0), "an empty one misses at least 1"
    assert (found["records"], found["next_from_seq"], found["caught_up"]) == ([], 0, True)


def test_a_cursor_of_another_life_starts_at_the_earliest_record(api: Api, topic: str) -> None:
    """§3.4: at most one tombstone, and `earliest_seq` is the topic's."""
    api.create_topic(topic, cap_records=2)
    api.write(topic, *range(5))
    found = api.diff(topic, from_seq=99)
    assert found["tombstone"] == gap(1, 5, "recreated", 5, 4, 5)
    assert (seqs(found), found["next_from_seq"]) == ([4, 5], 5)


# ── long polls ────────────────────────────────────────────────────────────────────────────────


def poll(api: Api, topic: str, **body: object) -> tuple[dict[str, Any], float]:
    """A read that may wait, and how long it took."""
    began = time.monotonic()
    found = api.diff(topic, **body)
    return found, time.monotonic() - began


def test_a_long_poll_waits_and_gives_its_first_result(api: Api, topic: str) -> None:
    """§2.6: not before about 150 ms of a 200 ms wait."""
    api.write(topic, 1)
    found, took_s = poll(api, topic, from_seq=1, wait_ms=200)
    assert 0.15 <= took_s < 15
    assert (found["records"], found["next_from_seq"], found["caught_up"], found["lag"]) == ([], 1, True, 0)
    assert found.keys() == READ


@pytest.mark.parametrize("wait_ms", [25_000, 30_000, (1 << 32) - 1])
def test_a_long_poll_ends_with_the_append(api: Api, server: Server, topic: str, wait_ms: int) -> None:
    """§2.6, §1.12: promptly; a wait over 30 s is clamped and not refused."""
    api.create_topic(topic)
    with server.client() as other:
        other.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": wait_ms}), [JSON])
        assert other.connection.is_quiet(0.1)
        began = time.monotonic()
        api.write(topic, "x")
        found = expect_success(other.end())
        assert time.monotonic() - began < 15
    assert (seqs(found), found["next_from_seq"], found["head_seq"], found["caught_up"]) == ([1], 1, 1, True)


def test_a_long_poll_does_not_wait_where_there_is_something_to_say(api: Api, topic: str) -> None:
    """§2.6: records, a tombstone, or a page that is not the last."""
    api.create_topic(topic, ttl_ms=0, cap_records=2)
    api.write(topic, 1, 2, 3)
    for body in ({"from_seq": 1}, {"from_seq": 2}, {"from_seq": 2, "limit": 1}, {"from_seq": 99}):
        _, took_s = poll(api, topic, wait_ms=10_000, **body)
        assert took_s < 3, body
    api.configure(topic, ttl_ms=1)
    eventually(lambda: api.state(topic)["count"] == 0)
    found, took_s = poll(api, topic, wait_ms=10_000, from_seq=1)
    assert took_s < 3
    assert (found["records"], found["tombstone"]["gap_to"]) == ([], 3)


def test_a_long_poll_sees_past_records_that_are_left_out(api: Api, server: Server, topic: str) -> None:
    """§2.6: woken by its own record it may answer at once or wait on; either way the cursor moves."""
    api.create_topic(topic)
    with server.client() as other:
        other.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": 700, "node": "me"}), [JSON])
        assert other.connection.is_quiet(0.1)
        api.write(topic, "mine", node="me")
        found = expect_success(other.end())
    assert (found["records"], found["next_from_seq"], found["caught_up"]) == ([], 1, True)


def test_no_append_slips_between_the_look_and_the_wait(server: Server, topic: str) -> None:
    """D3: whoever waits registers first. Method: append at moments spread over the beginning of a poll."""
    random = Random(7)
    with server.client() as reader, server.client() as writer, ThreadPoolExecutor(1) as pool:
        writer.create_topic(topic, durability="memory")
        for head in range(60):
            reader.begin("POST", topic_path(topic, "/diff"), dumps({"from_seq": head, "wait_ms": 20_000}), [JSON])
            pause_s = random.random() * 0.002

            def write(pause_s: float = pause_s) -> None:
                time.sleep(pause_s)  # where in the poll the append falls; nothing depends on it
                writer.write(topic, "x")

            wrote = pool.submit(write)
            began = time.monotonic()
            found = expect_success(reader.end())
            assert time.monotonic() - began < 15, f"append {head} was missed (seed 7)"
            assert seqs(found) == [head + 1]
            wrote.result()


def test_a_long_poll_of_a_topic_that_goes_is_answered(api: Api, server: Server, topic: str) -> None:
    """D4: the end of a topic wakes who waits for it; 404, or the empty page it had."""
    api.create_topic(topic)
    with server.client() as other:
        other.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": 20_000}), [JSON])
        assert other.connection.is_quiet(0.1)
        began = time.monotonic()
        api.drop(topic)
        assert other.end().status in (200, 404)
        assert time.monotonic() - began < 15


def test_client_that_leaves_its_long_poll_disturbs_no_other(api: Api, server: Server, topic: str) -> None:
    api.create_topic(topic)
    for _ in range(5):
        with server.client() as other:
            other.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": 20_000}), [JSON])
            other.connection.abort()
    assert api.write(topic, 1)["head_seq"] == 1
    assert api.seqs(topic) == [1]
