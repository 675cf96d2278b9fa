"""§1.7, §1.10, §1.13, §2.1–2.4, §3.10: topics themselves."""

from __future__ import annotations

import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import Reply
from tests.contract_http.server import Server
from tests.kit.waiting import run_together

Name = Callable[[str], str]

DEFAULTS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}
OTHERS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 3_600_000,
    "cap_records": 5,
    "cap_bytes": 6_000,
    "discard": "reject",
    "durable": True,
    "durability": "fsync",
    "priority": -7,
    "auto_priority": False,
    "auto_create": False,
    "idempotency_window_ms": 1_000,
    "dedupe_node": False,
    "lease_ms": 5_000,
    "claim_jitter_ms": 10,
    "max_deliveries": 3,
    "dead_letter": "graveyard",
    "leases_durable": True,
}
ROW = {"topic", "head_seq", "earliest_seq", "count", "bytes", "durable", "effective_priority"}
STATE = {
    "topic",
    "type",
    "head_seq",
    "earliest_seq",
    "next_seq",
    "count",
    "bytes",
    "config",
    "effective_priority",
    "last_write_ts",
    "last_read_ts",
    "performance",
}


# ── PUT: create and configure ─────────────────────────────────────────────────────────────────


def test_put_creates_once_and_echoes_the_whole_config(api: Api, topic: str) -> None:
    """§2.1, §1.13: 201 and then 200; exactly 17 keys with their defaults."""
    made = expect_success(api.put(topic_path(topic), {}), 201)
    assert made.keys() == {"topic", "created", "config", "performance"}
    assert (made["topic"], made["created"]) == (topic, True)
    assert made["config"] == DEFAULTS
    assert len(made["config"]) == 17
    again = expect_success(api.put(topic_path(topic), {}), 200)
    assert (again["topic"], again["created"], again["config"]) == (topic, False, DEFAULTS)


def test_every_field_of_a_config_is_kept(api: Api, topic: str) -> None:
    """§1.13: as the reply and as the state show it."""
    assert api.create_topic(topic, **OTHERS)["config"] == OTHERS
    assert api.state(topic)["config"] == OTHERS
    assert not api.configure(topic, **OTHERS)["created"], "the same again is no change"


def test_put_replaces_and_does_not_merge(api: Api, topic: str) -> None:
    """§2.1, B4: what the body does not name takes its default."""
    api.create_topic(topic, **OTHERS)
    assert api.configure(topic, cap_records=9)["config"] == {**DEFAULTS, "cap_records": 9}
    assert expect_success(api.put(topic_path(topic)))["config"] == DEFAULTS, "no body is an empty one"
    assert api.state(topic)["config"] == DEFAULTS


@pytest.mark.parametrize(
    ("given", "durability"),
    [
        ({"durable": True}, "fsync"),
        ({"durable": False}, "disk"),
        ({"durable": True, "durability": None}, "fsync"),
        ({"durable": False, "durability": None}, "disk"),
        ({"durable": True, "durability": "memory"}, "memory"),
        ({"durable": False, "durability": "fsync"}, "fsync"),
        ({"durability": "ephemeral"}, "ephemeral"),
        ({"durability": "memory"}, "memory"),
        ({"durability": "disk"}, "disk"),
        ({"durability": "fsync"}, "fsync"),
    ],
)
def test_durable_is_another_word_for_a_class(api: Api, topic: str, given: dict[str, Any], durability: str) -> None:
    """§1.13: the class wins; `durable` comes out as what the class means."""
    config = api.create_topic(topic, **given)["config"]
    assert (config["durability"], config["durable"]) == (durability, durability == "fsync")
    assert api.topics(f"?prefix={topic}")["topics"][0]["durable"] == (durability == "fsync")


def test_the_class_of_a_topic_may_change(api: Api, topic: str) -> None:
    """§1.13, §2.1: mutable, and 200."""
    api.create_topic(topic)
    for durability in ("fsync", "memory", "ephemeral", "disk"):
        assert api.configure(topic, durability=durability)["config"]["durability"] == durability
        api.write(topic, durability)
    assert [record["data"] for record in api.diff(topic)["records"]] == ["fsync", "memory", "ephemeral", "disk"]


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("lease_ms", 0, 100),
        ("lease_ms", 99, 100),
        ("lease_ms", 100, 100),
        ("lease_ms", 86_400_000, 86_400_000),
        ("lease_ms", 86_400_001, 86_400_000),
        ("claim_jitter_ms", 5_000, 5_000),
        ("claim_jitter_ms", 5_001, 5_000),
        ("max_deliveries", 1_000_000, 1_000_000),
    ],
)
def test_what_is_out_of_range_is_clamped_when_it_is_stored(
    api: Api, topic: str, field: str, given: int, kept: int
) -> None:
    """§1.13."""
    assert api.create_topic(topic, **{field: given})["config"][field] == kept
    assert api.state(topic)["config"][field] == kept


@pytest.mark.parametrize("bad", ["", "-x", "a b", "ü", "a/b", "x" * 256])
def test_a_dead_letter_must_be_a_name(api: Api, topic: str, bad: str) -> None:
    """§1.13: 400 with the name in the detail, for logs too, and nothing is made."""
    for kind in ("log", "queue"):
        expect_error(
            api.put(topic_path(topic), {"type": kind, "dead_letter": bad}), 400, "invalid_request", {"dead_letter": bad}
        )
    assert not api.exists(topic)


def test_a_queue_is_not_its_own_dead_letter_and_a_log_may_be(api: Api, topic: str) -> None:
    """§1.13: checked for queues only; on a log the field is inert."""
    expect_error(api.put(topic_path(topic), {"type": "queue", "dead_letter": topic}), 400, "invalid_request", ANY)
    assert not api.exists(topic)
    assert api.create_topic(topic, dead_letter=topic)["config"]["dead_letter"] == topic


def test_the_type_of_a_topic_never_changes(api: Api, name: Name) -> None:
    """§2.1: 409 with both types; PUT {} on a queue asks for a log."""
    log, queue = name("log"), name("queue")
    api.create_topic(log, cap_records=4)
    api.create_topic(queue, type="queue", max_deliveries=2)
    detail = {"topic": log, "existing_type": "log", "requested_type": "queue"}
    expect_error(api.put(topic_path(log), {"type": "queue"}), 409, "topic_exists_incompatible", detail)
    detail = {"topic": queue, "existing_type": "queue", "requested_type": "log"}
    expect_error(api.put(topic_path(queue), {}), 409, "topic_exists_incompatible", detail)
    expect_error(api.put(topic_path(queue)), 409, "topic_exists_incompatible", detail)
    assert api.state(log)["config"]["cap_records"] == 4, "and nothing of the refused config was applied"
    assert api.state(queue)["config"]["max_deliveries"] == 2
    assert api.configure(queue, type="queue")["config"]["max_deliveries"] == 0


def test_the_checks_of_put_come_in_their_order(api: Api, topic: str) -> None:
    """§2.1: name, then dead_letter, then itself, then the type."""
    api.create_topic(topic)
    expect_error(api.put("/v0/topics/-x", {"dead_letter": "-y"}), 400, "invalid_request")
    expect_error(
        api.put(topic_path(topic), {"type": "queue", "dead_letter": "-y"}),
        400,
        "invalid_request",
        {"dead_letter": "-y"},
    )
    expect_error(api.put(topic_path(topic), {"type": "queue", "dead_letter": topic}), 400, "invalid_request", ANY)


def test_one_of_many_that_create_at_once_wins(api: Api, server: Server, topic: str) -> None:
    """C: one `created:true`; everybody else finds it there."""

    def put() -> Reply:
        with server.client() as client:
            return client.put(topic_path(topic), {"cap_records": 7})

    replies = run_together([put] * 12)
    assert sorted(reply.status for reply in replies) == [200] * 11 + [201]
    assert [expect_success(reply, reply.status)["created"] for reply in replies].count(True) == 1
    assert len(api.topics(f"?prefix={topic}")["topics"]) == 1


def test_one_of_many_that_create_by_writing_wins(server: Server, topic: str) -> None:
    """§2.5: 201 exactly once, and every record is there."""

    def write() -> Reply:
        with server.client() as client:
            return client.try_write(topic, {"data": 1})

    replies = run_together([write] * 12)
    assert sorted(reply.status for reply in replies) == [200] * 11 + [201]
    assert sorted(expect_success(reply, reply.status)["first_seq"] for reply in replies) == list(range(1, 13))


# ── names ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tail", ["", "._:-", "A0z", "x" * 240, "..", ":::"])
def test_a_name_has_letters_digits_and_four_marks(api: Api, topic: str, tail: str) -> None:
    """§1.7."""
    api.create_topic(topic + tail)
    assert api.write(topic + tail, 1)["head_seq"] == 1


def test_a_name_has_1_to_255_bytes(api: Api, topic: str) -> None:
    """§1.7: the last length that is taken, and the first that is not."""
    longest = topic.ljust(255, "x")
    api.create_topic(longest)
    expect_error(api.put(topic_path(longest + "x"), {}), 400, "invalid_request")
    assert expect_success(api.put(topic_path("Q"), {}), 201)["topic"] == "Q"
    assert api.drop("Q")["deleted"]


BAD_NAMES = ["-a", ".a", ":a", "_a", "a b", " a", "a\n", "ü", "aé", "a/b", "a>b", "a*", "a%b", "a\0", "x" * 256, "%"]


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_a_bad_name_is_refused_where_something_is_made_and_absent_elsewhere(api: Api, bad: str) -> None:
    """§1.7: PUT and auto-create 400; reads and deletes behave as for any absent topic."""
    expect_error(api.put(topic_path(bad), {}), 400, "invalid_request")
    expect_error(api.try_write(bad, {"data": 1}), 400, "invalid_request")
    absent = {"topic": bad}
    expect_error(api.try_write(bad, {"data": 1}, create=False), 404, "topic_not_found", absent)
    expect_error(api.get(topic_path(bad)), 404, "topic_not_found", absent)
    expect_error(api.post(topic_path(bad, "/diff"), {}), 404, "topic_not_found", absent)
    expect_error(api.post(topic_path(bad, "/delete"), {"before_seq": 1}), 404, "topic_not_found", absent)
    assert api.drop(bad)["deleted"] is False
    expect_error(api.post("/v0/watch", {"topics": {bad: {}}}), 404, "topic_not_found", absent)


def test_names_are_case_sensitive(api: Api, topic: str) -> None:
    """§1.7: bytes."""
    api.create_topic(f"{topic}-a")
    api.write(f"{topic}-a", 1)
    assert not api.exists(f"{topic}-A")
    assert api.create_topic(f"{topic}-A")["created"]
    assert api.state(f"{topic}-A")["count"] == 0


# ── GET: state ────────────────────────────────────────────────────────────────────────────────


def test_a_fresh_topic(api: Api, topic: str) -> None:
    """§2.2: every field, and no `queue` for a log."""
    api.create_topic(topic)
    now = api.state(topic)
    assert now.keys() == STATE
    assert now == {
        "topic": topic,
        "type": "log",
        "head_seq": 0,
        "earliest_seq": 1,
        "next_seq": 1,
        "count": 0,
        "bytes": 0,
        "config": DEFAULTS,
        "effective_priority": 0,
        "last_write_ts": None,
        "last_read_ts": None,
        "performance": now["performance"],
    }


def test_the_state_of_a_topic_that_was_written(api: Api, topic: str) -> None:
    """§2.2, §1.12: bytes are those of compact JSON, data and meta."""
    before = time.time_ns() // 1_000_000
    api.records(topic, {"data": {"a": "ü"}}, {"data": 1, "meta": {"k": "v"}, "tag": "not counted", "node": "nor this"})
    after = time.time_ns() // 1_000_000
    now = api.state(topic)
    assert (now["head_seq"], now["next_seq"], now["earliest_seq"], now["count"]) == (2, 3, 1, 2)
    assert now["bytes"] == len('{"a":"ü"}'.encode()) + len("1") + len('{"k":"v"}')
    assert before <= api.diff(topic)["records"][-1]["$ts"] <= now["last_write_ts"] <= after


def test_an_absent_topic_is_404_and_looking_does_not_make_it(api: Api, topic: str) -> None:
    """§2.2, §2.6, §2.7: never creates."""
    absent = {"topic": topic}
    expect_error(api.get(topic_path(topic)), 404, "topic_not_found", absent)
    expect_error(api.post(topic_path(topic, "/diff"), {}), 404, "topic_not_found", absent)
    expect_error(api.post(topic_path(topic, "/delete"), {"before_seq": 1}), 404, "topic_not_found", absent)
    expect_error(api.post("/v0/watch", {"topics": {topic: {}}}), 404, "topic_not_found", absent)
    assert api.topics(f"?prefix={topic}")["topics"] == []


def test_looking_at_a_topic_shows_in_the_answer_itself(api: Api, topic: str) -> None:
    """§2.2, §3.10: `touch` is true by default, sets both recencies before it answers, and gives 500."""
    api.create_topic(topic)
    untouched = api.state(topic, "?touch=false")
    assert (untouched["last_read_ts"], untouched["effective_priority"]) == (None, 0)
    before = time.time_ns() // 1_000_000
    touched = api.state(topic, "")
    assert touched["effective_priority"] == 500
    assert before <= touched["last_read_ts"] <= time.time_ns() // 1_000_000
    later = api.state(topic, "?touch=0")
    assert later["last_read_ts"] == touched["last_read_ts"], "left as it was"
    assert 300 <= later["effective_priority"] <= 500


def test_reading_counts_as_consumption_and_writing_does_not(api: Api, topic: str) -> None:
    """§3.10, §2.6."""
    api.write(topic, 1)
    now = api.state(topic)
    assert (now["last_read_ts"], now["effective_priority"]) == (None, 0)
    api.diff(topic)
    now = api.state(topic)
    assert now["last_read_ts"] is not None
    assert 300 <= now["effective_priority"] <= 500


@pytest.mark.parametrize(
    ("config", "effective"),
    [
        ({"priority": 0}, 0),
        ({"priority": 42}, 42),
        ({"priority": -42}, -42),
        ({"priority": 1000}, 1000),
        ({"priority": 5000}, 1000),
        ({"priority": -5000}, -1000),
        ({"auto_priority": False}, 0),
        ({"auto_priority": False, "priority": 3}, 3),
        ({}, 500),
    ],
)
def test_effective_priority(api: Api, topic: str, config: dict[str, Any], effective: int) -> None:
    """§3.10: what is set, clamped; else recency, if that is wanted; also in the list."""
    api.create_topic(topic, **config)
    shown = api.state(topic, "")["effective_priority"]
    assert shown == effective
    assert isinstance(shown, int)
    assert abs(api.topics(f"?prefix={topic}")["topics"][0]["effective_priority"] - effective) <= 20


# ── GET: list ─────────────────────────────────────────────────────────────────────────────────


def test_rows_of_the_list(api: Api, topic: str) -> None:
    """§2.3: seven keys, as the state has them."""
    api.create_topic(topic, durability="fsync", priority=9)
    api.records(topic, {"data": "abc", "meta": {"a": 1}}, {"data": 2})
    api.remove(topic, before_seq=2)
    listed = api.topics(f"?prefix={topic}")
    assert listed.keys() == {"topics", "performance"}
    (row,) = listed["topics"]
    assert row.keys() == ROW
    now = api.state(topic)
    assert row == {
        "topic": topic,
        "head_seq": 2,
        "earliest_seq": 2,
        "count": 1,
        "bytes": 1,
        "durable": True,
        "effective_priority": 9,
    }
    assert {key: now[key] for key in ("head_seq", "earliest_seq", "count", "bytes")} == {
        key: row[key] for key in ("head_seq", "earliest_seq", "count", "bytes")
    }


def test_the_list_is_sorted_by_bytes_and_filtered_by_prefix(api: Api, topic: str) -> None:
    """§1.10: `-` before `.` before digits before `:` before capitals before `_` before small letters."""
    tails = ["z", "a", "B", "_", "0", ":", ".", "-", "aa", ""]
    for tail in tails:
        api.create_topic(f"{topic}~".replace("~", ".") + tail)
    wanted = sorted((f"{topic}.{tail}" for tail in tails), key=str.encode)
    assert [row["topic"] for row in api.topics(f"?prefix={topic}.")["topics"]] == wanted
    assert [row["topic"] for row in api.topics(f"?prefix={topic}%2Ea")["topics"]] == [f"{topic}.a", f"{topic}.aa"]
    assert api.topics(f"?prefix={topic}.nothing")["topics"] == []


def pages(api: Api, prefix: str, size: int) -> list[list[str]]:
    found, cursor = [], ""
    while True:
        listed = api.topics(f"?prefix={prefix}&page_size={size}&cursor={cursor}")
        found.append([row["topic"] for row in listed["topics"]])
        if "next_cursor" not in listed:
            return found
        cursor = listed["next_cursor"]
        assert cursor
        assert cursor.replace("-", "").replace("_", "").isalnum(), "can be pasted into a URL as it is"


def test_the_list_comes_in_pages(api: Api, topic: str) -> None:
    """§1.10, C: box0..4 by 2; a cursor only where there is more."""
    boxes = [f"{topic}.box{number}" for number in range(5)]
    for box in boxes:
        api.create_topic(box)
    assert pages(api, f"{topic}.box", 2) == [boxes[:2], boxes[2:4], boxes[4:]]
    assert pages(api, f"{topic}.box", 5) == [boxes], "nothing follows: no cursor"
    assert pages(api, f"{topic}.box", 4) == [boxes[:4], boxes[4:]]
    assert pages(api, f"{topic}.box", 0) == [[box] for box in boxes], "0 is 1"
    first = api.topics(f"?prefix={topic}.box&page_size=2")
    api.drop(boxes[1])
    api.create_topic(f"{topic}.box1a")
    rest = api.topics(f"?prefix={topic}.box&page_size=9&cursor={first['next_cursor']}")["topics"]
    assert [row["topic"] for row in rest] == [f"{topic}.box1a", *boxes[2:]], "behind the last name, there or not"


BAD_CURSORS = [
    "%%%not-base64%%%",
    "!!!",
    "abc",
    "e",
    b64encode(b"not json").decode().rstrip("="),
    b64encode(b"[]").decode().rstrip("="),
    b64encode(b'{"behind":"a"}').decode().rstrip("="),
    b64encode(b'{"after":1}').decode().rstrip("="),
    b64encode(b'{"after":null}').decode().rstrip("="),
    urlsafe_b64encode(b'{"after":"\xff\xfe"}').decode().rstrip("="),
]


@pytest.mark.parametrize("cursor", BAD_CURSORS)
def test_a_cursor_that_is_not_ours_is_400(api: Api, cursor: str) -> None:
    """§1.10, C, E: also the raw query that no decoder likes."""
    expect_error(api.get(f"/v0/topics?cursor={cursor}"), 400, "invalid_request")


def test_an_empty_cursor_is_none(api: Api, topic: str) -> None:
    """§1.10."""
    api.create_topic(topic)
    assert len(api.topics(f"?cursor=&prefix={topic}")["topics"]) == 1


def test_listing_bumps_priority_only_where_asked_to_and_never_reads(api: Api, topic: str) -> None:
    """§2.3: `touch` is false by default; true is priority recency alone."""
    api.create_topic(topic)
    for query in ("", "&touch=false", "&touch=maybe"):
        api.topics(f"?prefix={topic}{query}")
        assert api.state(topic)["effective_priority"] == 0
    api.topics(f"?prefix={topic}&touch=true")
    now = api.state(topic)
    assert 300 <= now["effective_priority"] <= 500
    assert now["last_read_ts"] is None


@pytest.fixture(scope="module")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with 1,001 topics."""
    with Server(tmp_path_factory.mktemp("crowded")).start() as running:

        def make(numbers: range) -> None:
            with running.client() as client:
                client.connection.send(
                    b"".join(client.encode_request("PUT", f"/v0/topics/t{number:04d}") for number in numbers)
                )
                for _ in numbers:
                    expect_success(client.end(), 201)

        run_together([lambda part=part: make(range(part, 1_001, 20)) for part in range(20)])  # type: ignore[misc]
        yield running


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (None, 100),
        ("", 100),
        ("many", 100),
        ("-5", 100),
        ("1.5", 100),
        ("0", 1),
        ("1", 1),
        ("1000", 1000),
        ("1001", 1000),
        ("99999", 1000),
    ],
)
def test_the_size_of_a_page(limited_server: Server, text: str | None, size: int) -> None:
    """§1.10: 100 by default and for what is no number; 1 to 1,000."""
    with limited_server.client() as client:
        listed = client.topics("" if text is None else f"?page_size={text}")
        assert [row["topic"] for row in listed["topics"]] == [f"t{number:04d}" for number in range(size)]
        assert "next_cursor" in listed


def test_metrics_by_topic_stop_at_a_thousand_and_say_so(limited_server: Server) -> None:
    """§2.12."""
    with limited_server.client() as client:
        text = client.get("/v0/metrics").body.decode()
        assert client.metrics()["topics"] == 1_001
    assert "\ntidelog_topic_metrics_truncated 1" in text
    assert text.count("\ntidelog_topic_head_seq{") == 1_000
    assert "\ntidelog_topics 1001" in text


# ── DELETE ────────────────────────────────────────────────────────────────────────────────────


def test_dropping_a_topic(api: Api, topic: str) -> None:
    """§2.4: everything goes; absent is 200 and false."""
    api.create_topic(topic, cap_records=3, priority=4)
    api.write(topic, *range(5), idempotency_key="k")
    gone = api.drop(topic)
    assert gone.keys() == {"topic", "deleted", "routers_removed", "performance"}
    assert (gone["topic"], gone["deleted"], gone["routers_removed"]) == (topic, True, [])
    assert not api.exists(topic)
    again = api.drop(topic)
    assert (again["topic"], again["deleted"], again["routers_removed"]) == (topic, False, [])
    assert api.create_topic(topic)["config"] == DEFAULTS
    now = api.state(topic)
    assert (now["head_seq"], now["earliest_seq"], now["count"], now["last_write_ts"]) == (0, 1, 0, None)
    wrote = api.write(topic, "new", idempotency_key="k")
    assert (wrote["first_seq"], wrote["deduped"]) == (1, False), "seqs and idempotency keys begin anew"
    assert api.diff(topic)["tombstone"] is None, "and so do the floors"


@pytest.mark.parametrize("query", ["?if_empty=true", "?if_empty=1"])
def test_a_topic_with_records_is_kept_where_it_must_be_empty(api: Api, topic: str, query: str) -> None:
    """§2.4: 409 with the live count; nothing removed."""
    api.write(topic, 1, 2, 3)
    api.remove(topic, before_seq=2)
    expect_error(api.delete(topic_path(topic, query)), 409, "topic_not_empty", {"topic": topic, "count": 2})
    assert api.seqs(topic) == [2, 3]
    api.remove(topic, before_seq=9)
    assert api.drop(topic, query)["deleted"], "nothing live is left"
    assert not api.drop(topic, query)["deleted"]


@pytest.mark.parametrize("query", ["?if_empty=false", "?if_empty=0", "?if_empty=yes", "?if_empty="])
def test_a_topic_with_records_goes_otherwise(api: Api, topic: str, query: str) -> None:
    """§2.4, §1.6: the default is false."""
    api.write(topic, 1)
    assert api.drop(topic, query)["deleted"]


def test_performance_is_on_every_data_answer(api: Api, topic: str) -> None:
    """§1.9: `server_total_ms` is a number everywhere; errors and probes have none."""
    api.create_topic(topic)
    api.write(topic, 1)
    api.diff(topic)
    api.state(topic)
    api.topics()
    api.watch({topic: {}})
    api.remove(topic, before_seq=1)
    api.drop(topic)  # `good` looks at all of them
    for target in ("/v0/health", "/v0/ready", topic_path(topic)):
        assert "performance" not in api.get(target).json()
    assert "performance" not in api.metrics()
