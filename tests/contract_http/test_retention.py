"""§3.2, §3.3: what goes by itself, and the two floors."""

from __future__ import annotations

import time

import pytest

from tests.contract_http.api import Api, expect_error, expect_success, topic_path
from tests.kit.waiting import eventually


def topic_counts(api: Api, topic: str) -> tuple[int, int, int, int]:
    now = api.state(topic)
    assert now["next_seq"] == now["head_seq"] + 1
    row = api.topics(f"?prefix={topic}")["topics"][0]
    assert {key: row[key] for key in ("head_seq", "earliest_seq", "count", "bytes")} == {
        key: now[key] for key in ("head_seq", "earliest_seq", "count", "bytes")
    }, "the list is as exact as the state"
    return now["head_seq"], now["earliest_seq"], now["count"], now["bytes"]


def test_a_cap_of_records_drops_the_oldest(api: Api, topic: str) -> None:
    """§3.3: cap 3 after 6 writes: head 6, count 3, earliest 4."""
    api.create_topic(topic, cap_records=3)
    for number in range(6):
        api.write(topic, number)
    assert topic_counts(api, topic) == (6, 4, 3, 3)


def test_a_cap_of_records_holds_for_a_batch_that_is_larger(api: Api, topic: str) -> None:
    """§3.3: commit, then drop."""
    api.create_topic(topic, cap_records=3)
    wrote = api.write(topic, *range(10))
    assert (wrote["count"], wrote["seqs"]) == (10, list(range(1, 11)))
    assert topic_counts(api, topic) == (10, 8, 3, 3)


def test_a_cap_of_bytes_drops_the_oldest(api: Api, topic: str) -> None:
    """§3.3: until within it; exactly at it is within."""
    api.create_topic(topic, cap_bytes=10)
    for _ in range(3):
        api.write(topic, "123")  # 5 bytes each
    assert topic_counts(api, topic) == (3, 2, 2, 10)
    api.write(topic, 1)
    assert topic_counts(api, topic) == (4, 3, 2, 6)
    api.records(topic, {"data": "12", "meta": {"a": 1}})  # 4 and 7: meta counts
    assert topic_counts(api, topic) == (5, 6, 0, 0)


def test_a_record_over_the_cap_of_bytes_is_taken_and_goes_at_once(api: Api, topic: str) -> None:
    """§3.3: under `old`."""
    api.create_topic(topic, cap_bytes=10)
    api.write(topic, "1234")
    wrote = api.write(topic, "x" * 50)
    assert (wrote["first_seq"], wrote["head_seq"]) == (2, 2)
    assert topic_counts(api, topic) == (2, 3, 0, 0)
    found = api.diff(topic)
    assert (found["records"], found["tombstone"]["gap_to"], found["tombstone"]["reason"]) == ([], 2, "cap")


def test_the_tighter_of_two_caps_binds(api: Api, topic: str) -> None:
    """§1.13: whichever binds first."""
    api.create_topic(topic, cap_bytes=10, cap_records=3)
    for _ in range(4):
        api.write(topic, 1)
    assert topic_counts(api, topic) == (4, 2, 3, 3)
    api.write(topic, "1234567")
    assert topic_counts(api, topic) == (5, 4, 2, 10)


def test_a_topic_that_rejects_says_that_it_is_full(api: Api, topic: str) -> None:
    """§3.3, §1.8: 422 with five fields; nothing appended, head unchanged; exactly full is taken."""
    api.create_topic(topic, discard="reject", cap_records=3)
    api.write(topic, 1, 2)
    detail = {"topic": topic, "cap_records": 3, "cap_bytes": 0, "head_seq": 2, "earliest_seq": 1}
    expect_error(api.try_write(topic, {"data": 3}, {"data": 4}), 422, "topic_full", detail)
    assert topic_counts(api, topic) == (2, 1, 2, 2)
    api.write(topic, 3)
    expect_error(api.try_write(topic, {"data": 4}), 422, "topic_full", {**detail, "head_seq": 3})
    api.remove(topic, before_seq=2)
    assert api.write(topic, 4)["seqs"] == [4], "deleting makes room"
    expect_error(api.try_write(topic, {"data": 5}), 422, "topic_full", {**detail, "head_seq": 4, "earliest_seq": 2})
    assert api.diff(topic)["tombstone"] is None


def test_a_topic_that_rejects_counts_bytes_too(api: Api, topic: str) -> None:
    """§3.3: live topic_counts."""
    api.create_topic(topic, discard="reject", cap_bytes=10)
    api.write(topic, "123", "123")
    detail = {"topic": topic, "cap_records": 0, "cap_bytes": 10, "head_seq": 2, "earliest_seq": 1}
    expect_error(api.try_write(topic, {"data": 1}), 422, "topic_full", detail)
    api.remove(topic, before_seq=2)
    api.write(topic, 12345)
    expect_error(api.try_write(topic, {"data": 1}), 422, "topic_full", {**detail, "head_seq": 3, "earliest_seq": 2})


def test_a_write_over_the_whole_cap_can_never_fit(api: Api, topic: str) -> None:
    """§2.5, §3.3: 400 record_too_large, which no waiting would change; before 422."""
    api.create_topic(topic, discard="reject", cap_records=2, cap_bytes=10)
    api.write(topic, 1)
    expect_error(api.try_write(topic, *[{"data": 1}] * 3), 400, "record_too_large")
    expect_error(api.try_write(topic, {"data": "x" * 9}), 400, "record_too_large")
    expect_error(api.try_write(topic, {"data": "123456"}, {"data": "123456"}), 400, "record_too_large")
    assert topic_counts(api, topic) == (1, 1, 1, 1)
    assert api.try_write(topic, {"data": "x" * 8}).status == 422, "as large as the cap could fit some day"


@pytest.mark.parametrize("discard", ["old", "reject"])
def test_a_cap_counts_what_is_live(api: Api, topic: str, discard: str) -> None:
    """D1, B11: a hole in the middle is room; nothing live is dropped by arithmetic of seqs."""
    api.create_topic(topic, discard=discard, cap_records=3)
    api.records(topic, *({"data": 1, "tag": tag} for tag in "abc"))
    api.remove(topic, match="b")
    assert api.write(topic, 4)["seqs"] == [4]
    assert api.seqs(topic) == [1, 3, 4]
    assert topic_counts(api, topic) == (4, 1, 3, 3)
    if discard == "old":
        api.write(topic, 5)
        assert api.diff(topic)["tombstone"]["gap_to"] == 1
        assert api.seqs(topic, from_seq=1) == [3, 4, 5]
        assert topic_counts(api, topic) == (5, 3, 3, 3)


@pytest.mark.parametrize("discard", ["old", "reject"])
def test_a_tighter_cap_applies_at_once(api: Api, topic: str, discard: str) -> None:
    """§2.1: PUT evicts immediately, and tells; also where the topic rejects."""
    api.create_topic(topic, discard=discard)
    api.write(topic, *range(6))
    api.configure(topic, discard=discard, cap_records=2)
    assert topic_counts(api, topic) == (6, 5, 2, 2)
    found = api.diff(topic)
    assert (found["tombstone"]["gap_to"], found["tombstone"]["reason"]) == (4, "cap")
    api.configure(topic, discard=discard, cap_bytes=1)
    assert topic_counts(api, topic) == (6, 6, 1, 1)


def test_a_wider_cap_brings_nothing_back(api: Api, topic: str) -> None:
    """§3.2: floors only rise."""
    api.create_topic(topic, cap_records=2)
    api.write(topic, *range(5))
    api.configure(topic)
    assert topic_counts(api, topic) == (5, 4, 2, 2)
    assert api.diff(topic)["tombstone"]["gap_to"] == 3
    api.write(topic, 6)
    assert topic_counts(api, topic) == (6, 4, 3, 3)


def test_records_expire(api: Api, topic: str) -> None:
    """§3.3: they vanish from reads, count and bytes, from the list, and for `if_empty`."""
    api.create_topic(topic, ttl_ms=120)
    api.write(topic, "a", "b")
    assert topic_counts(api, topic)[2] == 2
    eventually(lambda: api.state(topic)["count"] == 0)
    assert topic_counts(api, topic) == (2, 3, 0, 0)
    api.write(topic, "c")
    head, earliest, count, _ = topic_counts(api, topic)
    assert (head, earliest, count) == (3, 3, 1)
    eventually(lambda: api.topics(f"?prefix={topic}")["topics"][0]["count"] == 0)
    assert api.drop(topic, "?if_empty=true")["deleted"]


def test_nothing_expires_early(api: Api, topic: str) -> None:
    """§1.13: expired ⇔ `now − $ts > ttl_ms`. Method: look until it is gone; what was seen was due to be seen."""
    ttl_ms = 150
    api.create_topic(topic, ttl_ms=ttl_ms)
    api.write(topic, 1)
    stamp = api.diff(topic)["records"][0]["$ts"]
    while True:
        asked = time.time_ns() // 1_000_000
        found = api.diff(topic)
        answered = time.time_ns() // 1_000_000
        if not found["records"]:
            assert answered - stamp > ttl_ms
            break
        assert asked - stamp <= ttl_ms, "it was over"


def test_expiry_takes_only_what_is_old(api: Api, topic: str) -> None:
    """§3.3: the expired prefix."""
    api.create_topic(topic, ttl_ms=400)
    api.write(topic, "old")
    stamp = api.diff(topic)["records"][0]["$ts"]
    eventually(lambda: time.time_ns() // 1_000_000 > stamp + 250)
    api.write(topic, "new")
    eventually(lambda: api.state(topic)["earliest_seq"] == 2)
    found = api.diff(topic)
    assert [record["data"] for record in found["records"]] == ["new"]
    assert (found["tombstone"]["gap_from"], found["tombstone"]["gap_to"], found["tombstone"]["reason"]) == (1, 1, "ttl")


def test_a_shorter_life_applies_at_once(api: Api, topic: str) -> None:
    """§2.1: a tightened TTL evicts immediately; a longer one brings nothing back."""
    api.create_topic(topic)
    api.write(topic, 1, 2)
    stamp = api.diff(topic)["records"][0]["$ts"]
    eventually(lambda: time.time_ns() // 1_000_000 > stamp + 20)
    api.configure(topic, ttl_ms=10)
    assert topic_counts(api, topic) == (2, 3, 0, 0)
    api.configure(topic)
    assert topic_counts(api, topic) == (2, 3, 0, 0)
    assert api.diff(topic)["tombstone"]["reason"] == "ttl"


def test_expired_records_free_space_in_a_topic_that_rejects(api: Api, topic: str) -> None:
    """§3.3: lazy, but exact to observers: evaluated on every write."""
    api.create_topic(topic, discard="reject", cap_records=1, ttl_ms=60)
    api.write(topic, 1)
    eventually(lambda: api.try_write(topic, {"data": 2}).status == 200)
    assert api.state(topic)["head_seq"] == 2


def test_a_delete_and_a_watch_see_what_expired(api: Api, topic: str) -> None:
    """§3.3: evaluated on delete and watch-create, and in their answers."""
    api.create_topic(topic)
    api.write(topic, 1, 2)
    stamp = api.diff(topic)["records"][0]["$ts"]
    eventually(lambda: time.time_ns() // 1_000_000 > stamp + 20)
    api.configure(topic, ttl_ms=5)
    assert api.watch({topic: {}})["topics"][topic] == {"from_seq": 0, "head_seq": 2, "earliest_seq": 3}
    gone = api.remove(topic, before_seq=9)
    assert (gone["deleted"], gone["earliest_seq"], gone["count"], gone["bytes"]) == (0, 3, 0, 0)


def test_deleting_the_front_moves_the_earliest_seq_and_no_tombstone(api: Api, topic: str) -> None:
    """§3.2: a run of deleted records at the front counts; one behind a live record does not."""
    api.records(topic, *({"data": 1, "tag": tag} for tag in "abcd"))
    api.remove(topic, match="b")
    assert topic_counts(api, topic)[1] == 1
    api.remove(topic, match="a")
    assert topic_counts(api, topic)[1] == 3, "past the hole behind it"
    assert api.diff(topic)["tombstone"] is None
    api.remove(topic, match="*")
    assert topic_counts(api, topic) == (4, 5, 0, 0)
    assert api.write(topic, 1)["seqs"] == [5]
    assert topic_counts(api, topic)[1] == 5


def test_ephemeral_topics_have_caps_and_gaps_as_well(api: Api, topic: str) -> None:
    """§3.3 holds for every class."""
    api.create_topic(topic, durability="ephemeral", cap_records=2)
    api.write(topic, 1, 2, 3)
    found = expect_success(api.post(topic_path(topic, "/diff"), {}))
    assert (found["tombstone"]["gap_to"], found["tombstone"]["reason"], len(found["records"])) == (1, "cap", 2)
