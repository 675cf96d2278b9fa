"""§1.11, §1.12, §1.14, §2.5: appending."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.contract_http.api import Api, expect_error, expect_success, record_bytes, topic_path
from tests.contract_http.client import JSON, Reply, dumps
from tests.contract_http.server import Server
from tests.kit.waiting import eventually, run_together

MIB = 1 << 20
Name = Callable[[str], str]
WROTE = {
    *("topic", "first_seq", "last_seq", "seqs", "head_seq", "count", "created", "deduped", "performance"),
    "durability",
}


def sized(total: int, meta: Any = None) -> dict[str, Any]:
    """A record of so many bytes, as the contract counts them."""
    record: dict[str, Any] = {"data": "x" * (total - 2 - (0 if meta is None else len(dumps(meta))))}
    if meta is not None:
        record["meta"] = meta
    assert record_bytes(record["data"], meta) == total
    return record


def meta_of(total: int) -> dict[str, str]:
    return {"k": "x" * (total - len('{"k":""}'))}


# ── the answer ────────────────────────────────────────────────────────────────────────────────


def test_the_answer_to_a_write(api: Api, topic: str) -> None:
    """§2.5: 201 for the write that creates, 200 after it; contiguous seqs in the order of the array."""
    first = expect_success(api.try_write(topic, {"data": "a"}, {"data": "b"}), 201)
    assert first.keys() == WROTE
    del first["performance"]
    assert first == {
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
        "durability": "disk",
    }
    second = expect_success(api.try_write(topic, {"data": "c"}, {"data": "d"}, {"data": "e"}), 200)
    assert (second["seqs"], second["head_seq"], second["count"]) == ([3, 4, 5], 5, 3), "count is of this write"
    assert (second["created"], second["deduped"]) == (False, False)
    assert [record["data"] for record in api.diff(topic)["records"]] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("query", "told"),
    [("", True), ("?return_seqs=true", True), ("?return_seqs=false", False), ("?return_seqs=0", False)],
)
def test_seqs_can_be_left_out(api: Api, topic: str, query: str, told: bool) -> None:
    """§2.5: `return_seqs`, in the query only."""
    wrote = expect_success(api.try_write(topic, {"data": 1}, query=query), 201)
    assert wrote.keys() == (WROTE if told else WROTE - {"seqs"})
    assert (wrote["first_seq"], wrote["last_seq"]) == (1, 1)
    assert expect_success(api.try_write(topic, {"data": 1}, query="?return_seqs=perhaps"))["seqs"] == [2]


def test_a_batch_has_one_time_and_time_never_goes_back(api: Api, topic: str) -> None:
    """§2.5, §3.1: `$ts` in epoch ms, one a batch, non-decreasing in seq."""
    before = time.time_ns() // 1_000_000
    for _ in range(5):
        api.write(topic, 1, 2, 3)
    stamps = [record["$ts"] for record in api.diff(topic)["records"]]
    assert all(isinstance(stamp, int) for stamp in stamps)
    assert stamps == sorted(stamps)
    assert before <= stamps[0] <= stamps[-1] <= time.time_ns() // 1_000_000
    assert all(len(set(stamps[at : at + 3])) == 1 for at in range(0, 15, 3))


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_performance_of_a_write_shows_its_class(api: Api, topic: str, durability: str) -> None:
    """§1.9, §4: `fsync_ms` is above 0 for fsync alone, and exactly 0.0 for the others."""
    api.create_topic(topic, durability=durability)
    for _ in range(3):
        took = api.write(topic, 1)["performance"]
        assert isinstance(took["wal_append_ms"], float | int)
        assert took["wal_append_ms"] >= 0
        assert took["fsync_ms"] > 0 if durability == "fsync" else took["fsync_ms"] == 0.0


def test_writes_of_many_clients_get_seqs_of_their_own(api: Api, server: Server, topic: str) -> None:
    """§3.1: contiguous within a write, no seq twice, none left out."""
    api.create_topic(topic, durability="fsync")

    def write(who: int) -> list[dict[str, Any]]:
        with server.client() as client:
            return [client.write(topic, *[[who, number]] * 3) for number in range(10)]

    wrote = [
        answer
        for answers in run_together([lambda who=who: write(who) for who in range(8)])  # type: ignore[misc]
        for answer in answers
    ]
    assert sorted(seq for answer in wrote for seq in answer["seqs"]) == list(range(1, 241))
    assert all(answer["seqs"] == list(range(answer["first_seq"], answer["last_seq"] + 1)) for answer in wrote)
    found = api.diff(topic, limit=1000)["records"]
    for who in range(8):
        assert [data[1] for data in (record["data"] for record in found) if data[0] == who] == [
            number for number in range(10) for _ in range(3)
        ], "in the order of each client"


# ── records ───────────────────────────────────────────────────────────────────────────────────


def test_a_record_in_full_comes_back_in_full(api: Api, topic: str) -> None:
    """§1.14: optional keys are omitted, never null."""
    full = {"data": {"a": 1}, "tag": "t1", "node": "n1", "meta": {"k": [1, "ü", None]}}
    api.records(topic, full, {"data": 2})
    first, second = api.diff(topic, include_tags=True)["records"]
    assert first.keys() == {"$seq", "$ts", "$node", "$tag", "data", "meta"}
    assert (first["$seq"], first["$node"], first["$tag"], first["data"], first["meta"]) == (
        1,
        "n1",
        "t1",
        {"a": 1},
        {"k": [1, "ü", None]},
    )
    assert second.keys() == {"$seq", "$ts", "data"}


def test_the_node_of_a_record_beats_that_of_its_batch(api: Api, topic: str) -> None:
    """§1.14."""
    api.records(topic, {"data": 1}, {"data": 2, "node": "mine"}, {"data": 3, "node": None}, node="all")
    assert [record["$node"] for record in api.diff(topic)["records"]] == ["all", "mine", "all"]


def test_data_is_required(api: Api, topic: str) -> None:
    """§1.6, §2.5: null is data, nothing is not; a batch is all or nothing."""
    bad: list[list[dict[str, Any]]] = [[{}], [{"tag": "x"}], [{"data": 1}, {"tag": "x"}]]
    for records in bad:
        expect_error(api.post(topic_path(topic), {"records": records}), 400, "invalid_request")
    assert not api.exists(topic)
    assert api.write(topic, None)["count"] == 1


def test_a_write_has_records(api: Api, topic: str) -> None:
    """§2.5: none and missing are 400."""
    api.create_topic(topic)
    expect_error(api.post(topic_path(topic), {"records": []}), 400, "invalid_request")
    expect_error(api.post(topic_path(topic), {}), 400, "invalid_request")
    expect_error(api.post(topic_path(topic), {"node": "n"}), 400, "invalid_request")
    assert api.state(topic)["head_seq"] == 0


def test_one_bad_record_refuses_its_batch(api: Api, topic: str) -> None:
    """§2.5: atomic."""
    api.write(topic, "before")
    bad = [{"data": 1, "tag": "x" * 257}, sized(MIB + 1), {"data": 1, "meta": meta_of(16_385)}]
    for record in bad:
        assert api.try_write(topic, {"data": 1}, record, {"data": 3}).status == 400
    assert api.state(topic)["head_seq"] == 1
    assert api.write(topic, "after")["first_seq"] == 2, "no seq was spent"


# ── limits ────────────────────────────────────────────────────────────────────────────────────


def test_a_write_has_up_to_10000_records(api: Api, topic: str) -> None:
    """§1.12: the last number that is taken, and the first that is not."""
    expect_error(api.write_raw(topic, 10_001), 400, "batch_too_large")
    assert not api.exists(topic)
    assert expect_success(api.write_raw(topic, 10_000), 201)["last_seq"] == 10_000
    expect_error(api.write_raw(topic, 10_001), 400, "batch_too_large")
    now = api.state(topic)
    assert (now["head_seq"], now["count"]) == (10_000, 10_000), "a refused write leaves both"


@pytest.mark.parametrize("meta", [None, {"k": "v"}])
def test_a_record_has_up_to_a_mebibyte(api: Api, topic: str, meta: Any) -> None:
    """§1.12: of data and meta together; exactly at the limit is taken."""
    expect_error(api.try_write(topic, sized(MIB + 1, meta)), 400, "record_too_large")
    assert not api.exists(topic)
    api.records(topic, sized(MIB, meta))
    expect_error(api.try_write(topic, sized(MIB + 1, meta)), 400, "record_too_large")
    now = api.state(topic)
    assert (now["head_seq"], now["bytes"]) == (1, MIB)


def test_bytes_are_those_of_compact_utf_8(api: Api, topic: str) -> None:
    """§1.12, E: blanks and escapes of the request do not count."""
    blanks = b'{"records":[{"data": [ 1 , "a b" , {"k" : null} ] , "meta" : { "m" : 1 } }]}'
    expect_success(api.request("POST", topic_path(topic), blanks, [JSON]), 201)
    assert api.state(topic)["bytes"] == record_bytes([1, "a b", {"k": None}], {"m": 1})
    api.remove(topic, before_seq=9)
    escapes = b'{"records":[{"data":"\\u00e9\\u20ac\\ud83c\\udf0a\\/","meta":{"m":"\\u00fc"}}]}'
    expect_success(api.request("POST", topic_path(topic), escapes, [JSON]))
    assert api.state(topic)["bytes"] == record_bytes("é€🌊/", {"m": "ü"})


@pytest.mark.parametrize(
    ("before", "repeated", "times", "after"),
    [(b'["x",', b" ", 1000, b'"y"]'), (b'"', b"\\u00e9", (MIB - 2) // 2, b'"'), (b'"', b"\\/", MIB - 2, b'"')],
    ids=["blanks", "escaped letters", "escaped slashes"],
)
def test_a_record_is_measured_in_compact_form(
    api: Api, topic: str, before: bytes, repeated: bytes, times: int, after: bytes
) -> None:
    """§1.12: a record that is small enough in compact form is taken, however it was spelt."""
    reply = api.request(
        "POST", topic_path(topic), b'{"records":[{"data":%b}]}' % (before + repeated * times + after), [JSON]
    )
    expect_success(reply, 201)


@pytest.mark.parametrize("letter", ["x", "é"])
@pytest.mark.parametrize(("field", "limit"), [("tag", 256), ("node", 128)])
def test_tags_and_nodes_are_limited_in_bytes(api: Api, topic: str, field: str, limit: int, letter: str) -> None:
    """§1.12: 256 and 128 bytes, of UTF-8."""
    longest = letter * (limit // len(letter.encode()))
    assert len(longest.encode()) == limit
    api.records(topic, {"data": 1, field: longest})
    assert api.diff(topic, include_tags=True)["records"][0][f"${field}"] == longest
    expect_error(api.try_write(topic, {"data": 1, field: longest + "x"}), 400, "invalid_request")
    if field == "node":
        api.write(topic, 1, node=longest)
        expect_error(api.try_write(topic, {"data": 1}, node=longest + "x"), 400, "invalid_request")


def test_meta_is_limited_in_bytes_and_keys(api: Api, topic: str) -> None:
    """§1.12: 16,384 bytes and 64 keys; 400 invalid_request."""
    api.records(topic, {"data": 1, "meta": meta_of(16_384)})
    expect_error(api.try_write(topic, {"data": 1, "meta": meta_of(16_385)}), 400, "invalid_request")
    keys = {f"k{number}": number for number in range(64)}
    api.records(topic, {"data": 1, "meta": keys})
    expect_error(api.try_write(topic, {"data": 1, "meta": {**keys, "one": "more"}}), 400, "invalid_request")
    assert api.diff(topic)["records"][1]["meta"] == keys


def test_the_checks_of_a_write_come_in_their_order(api: Api, topic: str) -> None:
    """§2.5: number of records, length of the key, then each record: tag, node, meta, and its total last."""
    long_key, large = "k" * 257, sized(MIB + 1)
    expect_error(api.write_raw(topic, 10_001, idempotency_key=long_key), 400, "batch_too_large")
    expect_error(api.try_write(topic, large, idempotency_key=long_key), 400, "invalid_request")
    for wrong in ({"tag": "x" * 257}, {"node": "x" * 129}, {"meta": {str(key): 1 for key in range(65)}}):
        expect_error(api.try_write(topic, {**large, **wrong}), 400, "invalid_request")
    expect_error(api.try_write(topic, {"data": 1, "meta": meta_of(MIB)}), 400, "invalid_request")
    expect_error(api.try_write(topic, large, create=False), 400, "record_too_large")
    expect_error(api.try_write("-bad", large), 400, "record_too_large")
    assert not api.exists(topic)


def test_what_a_config_names_is_looked_at_last(api: Api, topic: str) -> None:
    """§2.5: behind the number of records, the key, the records, whether the topic is to be made, and its name."""
    wrong = {"dead_letter": "-bad"}
    expect_error(api.write_raw(topic, 10_001, config=wrong), 400, "batch_too_large")
    expect_error(api.try_write(topic, {"data": 1}, idempotency_key="k" * 257, config=wrong), 400, "invalid_request")
    expect_error(api.try_write(topic, sized(MIB + 1), config=wrong), 400, "record_too_large")
    gone = {"topic": topic}
    for config in (wrong, {"type": "queue", "dead_letter": topic}):
        expect_error(api.try_write(topic, {"data": 1}, create=False, config=config), 404, "topic_not_found", gone)
    for more in ({"create": False}, {"config": {"auto_create": False}}):
        expect_error(api.try_write("-bad", {"data": 1}, **more), 404, "topic_not_found", {"topic": "-bad"})
    expect_error(api.try_write("-bad", {"data": 1}, config=wrong), 400, "invalid_request", None)
    expect_error(api.try_write(topic, {"data": 1}, config=wrong), 400, "invalid_request", wrong)


# ── creating ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("create", "config", "made"),
    [
        (None, None, True),
        (True, None, True),
        (False, None, False),
        (None, {}, True),
        (None, {"auto_create": True}, True),
        (None, {"auto_create": False}, False),
        (True, {"auto_create": False}, True),
        (False, {"auto_create": True}, False),
    ],
)
def test_whether_a_write_creates(
    api: Api, topic: str, create: bool | None, config: dict[str, Any] | None, made: bool
) -> None:
    """§2.5: `create` decides; unset, the inline config's `auto_create` does."""
    reply = api.try_write(topic, {"data": 1}, create=create, config=config)
    if made:
        assert expect_success(reply, 201)["created"]
    else:
        expect_error(reply, 404, "topic_not_found", {"topic": topic})
    assert api.exists(topic) == made


def test_a_config_counts_only_for_the_write_that_creates(api: Api, topic: str) -> None:
    """§2.5, C."""
    config = {"cap_records": 2, "durability": "fsync", "priority": 5, "ttl_ms": 60_000}
    expect_success(api.try_write(topic, {"data": 1}, config=config), 201)
    held = api.state(topic)["config"]
    assert {key: held[key] for key in config} == config
    expect_success(api.try_write(topic, {"data": 2}, config={"cap_records": 9}), 200)
    expect_success(api.try_write(topic, {"data": 3}, config={"type": "queue"}), 200)
    expect_success(api.try_write(topic, {"data": 4}, config={"dead_letter": "-bad"}), 200)
    assert api.state(topic)["config"] == held
    assert api.state(topic)["count"] == 2, "and it holds from the first record on"


def test_a_config_that_cannot_be_makes_nothing(api: Api, topic: str) -> None:
    """§2.5: 400; an ill-typed one is an ill-typed body, whether the topic is there or not."""
    bad = {"dead_letter": "-bad"}
    expect_error(api.try_write(topic, {"data": 1}, config=bad), 400, "invalid_request", bad)
    assert not api.exists(topic)
    for present in (False, True):
        if present:
            api.create_topic(topic)
        for config in ({"ttl_ms": -1}, {"ttl_ms": "x"}, {"discard": "new"}, {"durable": 1}):
            reply = api.try_write(topic, {"data": 1}, config=config)
            assert reply.status == 400, (present, config)
            expect_error(reply, 400, "invalid_request")
    assert api.state(topic)["head_seq"] == 0


@pytest.mark.parametrize(
    ("config", "records"),
    [
        ({"discard": "reject", "cap_records": 1}, 2),
        ({"discard": "reject", "cap_bytes": 3}, 4),
    ],
)
def test_a_creating_write_that_is_refused_leaves_no_topic(
    api: Api, topic: str, config: dict[str, Any], records: int
) -> None:
    """§2.5 and D6: the whole write is over the cap; nothing is left behind."""
    said = expect_error(api.try_write(topic, *[{"data": 1}] * records, config=config), 400, "record_too_large")[
        "message"
    ]
    assert ("2 records" if "cap_records" in config else "4 bytes") in said
    assert not api.exists(topic)


def test_disabling_backpressure_is_taken_and_changes_nothing(api: Api, topic: str) -> None:
    """§2.5."""
    for value in (True, False):
        assert api.write(topic, 1, disable_backpressure=value)["count"] == 1


# ── idempotency ───────────────────────────────────────────────────────────────────────────────


def key_header(key: str) -> list[tuple[str, str]]:
    return [("Idempotency-Key", key)]


def test_a_key_that_was_used_gives_the_first_answer_again(api: Api, topic: str) -> None:
    """§1.11: everything of the original, `deduped`, not `created`; nothing is appended."""
    first = expect_success(api.try_write(topic, {"data": 1}, {"data": 2}, idempotency_key="k"), 201)
    assert (first["deduped"], first["created"]) == (False, True)
    api.write(topic, "between")
    again = expect_success(api.try_write(topic, {"data": "other"}, idempotency_key="k"), 200)
    assert again["deduped"] is True
    assert again["created"] is False
    assert (again["seqs"], again["first_seq"], again["last_seq"]) == ([1, 2], 1, 2)
    assert again["count"] == 2, "of the original"
    assert again["head_seq"] == 2, "as it was then"
    assert again.keys() == WROTE
    now = api.state(topic)
    assert (now["head_seq"], now["count"]) == (3, 3)
    short = expect_success(api.try_write(topic, {"data": 1}, idempotency_key="k", query="?return_seqs=false"))
    assert short.keys() == WROTE - {"seqs"}


def test_a_key_may_come_in_a_header_and_the_body_wins(api: Api, topic: str) -> None:
    """§1.11, C: the header counts only where the body has none."""
    assert not expect_success(api.try_write(topic, {"data": 1}, headers=key_header("h")), 201)["deduped"]
    assert expect_success(api.try_write(topic, {"data": 1}, headers=key_header("h")))["deduped"]
    assert expect_success(api.try_write(topic, {"data": 1}, headers=key_header("h"), idempotency_key=None))["deduped"]
    assert expect_success(api.try_write(topic, {"data": 1}, idempotency_key="h"))["deduped"], "the same key, either way"
    other = expect_success(api.try_write(topic, {"data": 1}, headers=key_header("h"), idempotency_key="b"))
    assert (other["deduped"], other["first_seq"]) == (False, 2)
    assert expect_success(api.try_write(topic, {"data": 1}, headers=key_header("x"), idempotency_key="b"))["deduped"]
    assert not expect_success(api.try_write(topic, {"data": 1}, headers=key_header("x")))["deduped"], "was not recorded"


@pytest.mark.parametrize("letter", ["k", "é"])
def test_a_key_has_up_to_256_bytes(api: Api, topic: str, letter: str) -> None:
    """§1.11: bytes, not letters."""
    longest = letter * (256 // len(letter.encode()))
    expect_error(api.try_write(topic, {"data": 1}, idempotency_key=longest + "k"), 400, "invalid_request")
    assert not api.exists(topic), "D6: a refused write makes no topic"
    assert not expect_success(api.try_write(topic, {"data": 1}, idempotency_key=longest), 201)["deduped"]
    assert expect_success(api.try_write(topic, {"data": 1}, idempotency_key=longest))["deduped"]
    expect_error(api.try_write(topic, {"data": 1}, idempotency_key=longest + "k"), 400, "invalid_request")
    if letter == "k":
        expect_error(api.try_write(topic, {"data": 1}, headers=key_header(longest + "k")), 400, "invalid_request")
    assert api.state(topic)["head_seq"] == 1


def test_a_key_belongs_to_its_topic(api: Api, topic: str) -> None:
    """§1.11: (topic, key)."""
    for tail in ("a", "b"):
        assert not api.write(f"{topic}-{tail}", 1, idempotency_key="k")["deduped"]


def test_a_key_is_forgotten_after_its_window(api: Api, topic: str) -> None:
    """§1.11: valid while `now − t ≤ window`."""
    api.create_topic(topic, idempotency_window_ms=150)
    api.write(topic, 1, idempotency_key="k")
    began = time.monotonic()
    eventually(lambda: not api.write(topic, 1, idempotency_key="k")["deduped"])
    assert time.monotonic() - began >= 0.1
    assert api.state(topic)["head_seq"] == 2
    assert api.write(topic, 1, idempotency_key="k")["seqs"] == [2], "and counts from the new write on"


def test_many_writes_with_one_key_are_one(api: Api, server: Server, topic: str) -> None:
    """§1.11: they serialise; the losers get the winner's seqs."""
    api.create_topic(topic, durability="fsync")

    def write(who: int) -> Reply:
        with server.client() as client:
            return client.try_write(topic, {"data": who}, {"data": who}, idempotency_key="k")

    wrote = [expect_success(reply) for reply in run_together([lambda who=who: write(who) for who in range(8)])]  # type: ignore[misc]
    assert [answer["deduped"] for answer in wrote].count(False) == 1
    assert all(answer["seqs"] == [1, 2] for answer in wrote)
    assert api.state(topic)["count"] == 2


def test_write_that_finds_its_key_used_has_not_created_the_topic(server: Server, name: Name) -> None:
    """§1.11: a hit is 200 and `created: false`. Method: one key for a topic that is not there, until somebody must have
    overtaken the one who made it."""

    def write(topic: str) -> Reply:
        with server.client() as client:
            return client.try_write(topic, {"data": 1}, idempotency_key="k")

    for topic in map(name, map(str, range(40))):
        wrote = [expect_success(reply, reply.status) for reply in run_together([partial(write, topic)] * 4)]
        assert [answer["deduped"] for answer in wrote].count(False) == 1
        assert not any(answer["created"] and answer["deduped"] for answer in wrote)


def test_a_write_that_failed_records_no_key(api: Api, topic: str) -> None:
    """§1.11."""
    api.create_topic(topic, discard="reject", cap_records=1)
    api.write(topic, "full")
    assert api.try_write(topic, {"data": 1}, idempotency_key="k").status == 422
    assert api.try_write(topic, {"data": 1, "tag": "x" * 257}, idempotency_key="k").status == 400
    api.remove(topic, before_seq=9)
    wrote = api.write(topic, 1, idempotency_key="k")
    assert (wrote["deduped"], wrote["first_seq"]) == (False, 2)


def test_key_is_looked_up_after_validation_and_before_the_caps(api: Api, topic: str) -> None:
    """§1.11, §2.5: a retry of what was written is told so although the topic is full now."""
    api.create_topic(topic, discard="reject", cap_records=2, cap_bytes=10)
    api.write(topic, 1, 2, idempotency_key="k")
    expect_error(api.try_write(topic, {"data": 1, "tag": "x" * 257}, idempotency_key="k"), 400, "invalid_request")
    assert expect_success(api.try_write(topic, {"data": 1}, idempotency_key="k"))["deduped"], "else 422"
    assert expect_success(api.try_write(topic, *[{"data": 1}] * 3, idempotency_key="k"))["deduped"], "else 400"
    assert expect_success(api.try_write(topic, {"data": "x" * 99}, idempotency_key="k"))["deduped"], "else 400"


def test_a_retry_that_may_not_create_finds_the_first_write(api: Api, topic: str) -> None:
    """§1.11: the topic is resolved first."""
    expect_error(
        api.try_write(topic, {"data": 1}, idempotency_key="k", create=False), 404, "topic_not_found", {"topic": topic}
    )
    api.write(topic, 1, idempotency_key="k")
    assert expect_success(api.try_write(topic, {"data": 1}, idempotency_key="k", create=False))["deduped"]
