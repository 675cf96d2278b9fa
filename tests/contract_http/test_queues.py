"""§2.11, §3.11: claiming and settling jobs, over sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest

from tests.contract_http.api import ANY, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, dumps
from tests.contract_http.queue_api import QueueApi
from tests.contract_http.server import Server
from tests.kit.waiting import eventually, run_together

Name = Callable[[str], str]
LEASE_MS = 100  # the shortest there is
LONG_MS = 60_000


@pytest.fixture
def api(server: Server) -> Iterator[QueueApi]:
    with QueueApi(server.address) as client:
        yield client


@pytest.fixture
def queue(api: QueueApi, topic: str) -> str:
    """A queue of ten jobs, whose leases last."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, *range(10))
    return topic


# ── claim ─────────────────────────────────────────────────────────────────────────────────────


def test_the_answer_to_a_claim(api: QueueApi, topic: str) -> None:
    """§2.11: the fields of a job; `deadline` = now + lease; `ready` after the pass; no `$node`."""
    api.make_queue(topic, lease_ms=20_000)
    jobs: list[dict[str, Any]] = [
        {"data": {"é": [None, 1.5]}, "tag": "t", "node": "who", "meta": {"m": "v"}},
        {"data": None},
        {"data": 3},
    ]
    api.records(topic, *jobs)
    before = time.time() * 1000
    said = api.claim_all(topic, "w", max=2)
    after = time.time() * 1000
    first, second = said["claimed"]
    assert said["ready"] == 1
    assert list(first) == ["$seq", "lease_id", "deadline", "$ts", "$tag", "deliveries", "data", "meta"]
    assert list(second) == ["$seq", "lease_id", "deadline", "$ts", "deliveries", "data"], "absent, not null"
    assert (first["$seq"], first["$tag"], first["data"], first["meta"]) == (1, "t", {"é": [None, 1.5]}, {"m": "v"})
    assert (second["$seq"], second["data"], second["deliveries"]) == (2, None, 1)
    assert [job["lease_id"] for job in said["claimed"]] == ["lease_1", "lease_2"], "the first is lease_1"
    for job in said["claimed"]:
        assert before + 20_000 - 5 <= job["deadline"] <= after + 20_000 + 5
        assert isinstance(job["$ts"], int)
    assert api.claim_seqs(topic, "w", max=9) == [3]
    assert api.claim_all(topic, "w", max=9)["claimed"] == [], "nothing is normal"


def test_lease_ids_rise_and_are_hexadecimal(api: QueueApi, topic: str) -> None:
    """§3.11: monotonic, `lease_<lowercase hex>`."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, *range(32))
    found = [job["lease_id"] for job in api.claim(topic, max=32)]
    assert found == [f"lease_{number:x}" for number in range(1, 33)]
    api.nack(topic, 5)
    assert api.claim(topic)[0]["lease_id"] == "lease_21", "another lease of the same job"


@pytest.mark.parametrize(("most", "got"), [({}, 1), ({"max": 0}, 1), ({"max": 3}, 3), ({"max": 4294967295}, 1000)])
def test_how_many_a_claim_takes(api: QueueApi, topic: str, most: dict[str, Any], got: int) -> None:
    """§1.12: default and 0 are 1, more than 1000 is 1000."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write_raw(topic, 1_100)
    said = api.claim_all(topic, **most)
    assert said["count"] == got
    assert said["ready"] == 1_100 - got


@pytest.mark.parametrize(
    ("asked", "kept"), [(None, 45_000), (1, 100), (5_000, 5_000), (90_000_000, 86_400_000), ((1 << 64) - 1, 86_400_000)]
)
def test_how_long_a_lease_is(api: QueueApi, topic: str, asked: int | None, kept: int) -> None:
    """§1.12: the queue's own, or clamped to 100 ms … a day; null is absent."""
    api.make_queue(topic, lease_ms=45_000)
    api.write(topic, 1)
    before = time.time() * 1000
    (job,) = api.claim(topic, lease_ms=asked)
    assert before + kept - 5 <= job["deadline"] <= time.time() * 1000 + kept + 5


def test_the_order_of_the_checks_of_a_claim(api: QueueApi, server: Server, name: Name) -> None:
    """§2.11: empty body, type, JSON → 404 → 409 → node."""
    log, absent, made = name("log"), name("absent"), name("queue")
    api.create_topic(log)
    api.make_queue(made)
    for target in (log, absent, made):
        expect_error(api.request("POST", topic_path(target, "/claim")), 400, "invalid_request")
        expect_error(api.request("POST", topic_path(target, "/claim"), b"", [JSON]), 400, "invalid_request")
        expect_error(api.request("POST", topic_path(target, "/claim"), b"{}", []), 415, "unsupported_media_type")
        for body in (b"{", b"{}", b"[]", b'{"node":null}', b'{"node":"n","max":-1}'):
            expect_error(api.request("POST", topic_path(target, "/claim"), body, [JSON]), 400, "invalid_request")
    for node in ("", "x" * 129, "n"):
        expect_error(api.try_verb(absent, "claim", node=node), 404, "topic_not_found", {"topic": absent})
        expect_error(api.try_verb(log, "claim", node=node), 409, "not_a_queue", {"topic": log})
    for node in ("", "x" * 129, "é" * 65):
        expect_error(api.try_verb(made, "claim", node=node), 400, "invalid_request")
    expect_success(api.try_verb(made, "claim", node="é" * 64))
    assert not api.exists(absent), "nothing here creates"
    with server.client() as plain:
        expect_error(plain.get(topic_path(made, "/claim")), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "body",
    [
        {"max": -1},
        {"max": 1.0},
        {"max": "1"},
        {"max": True},
        {"max": None},
        {"max": 1 << 32},
        {"lease_ms": -1},
        {"lease_ms": 1.5},
        {"lease_ms": "1"},
        {"lease_ms": False},
        {"lease_ms": 1 << 64},
        {"node": 1},
        {"node": ["n"]},
    ],
)
def test_types_of_a_claim_are_strict(api: QueueApi, queue: str, body: dict[str, Any]) -> None:
    """§1.6."""
    expect_error(api.try_verb(queue, "claim", **{"node": "n", **body}), 400, "invalid_request")
    assert api.counts(queue) == (10, 0, 0)


def test_unknown_fields_are_ignored(api: QueueApi, queue: str) -> None:
    """§1.1: clients send stray ones, `seqs` to claim among them."""
    assert expect_success(api.try_verb(queue, "claim", node="n", seqs=[1], whatever={}))["count"] == 1
    assert expect_success(api.try_verb(queue, "ack", node="n", seqs=[1], max=3))["acked"] == 1


def test_two_claimers_never_hold_the_same_job(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11: a job has one lease."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, *range(200))

    def claim(number: int) -> list[int]:
        found: list[int] = []
        with QueueApi(server.address) as client:
            while got := client.claim_seqs(topic, f"n{number}", max=7):
                found += got
        return found

    shares = run_together([lambda number=number: claim(number) for number in range(6)])  # type: ignore[misc]
    assert sorted(seq for share in shares for seq in share) == list(range(1, 201))
    assert api.counts(topic) == (0, 200, 0)


def test_what_comes_back_goes_before_what_is_fresh(api: QueueApi, queue: str) -> None:
    """§3.11: reclaimed first, ascending, then fresh."""
    assert api.claim_seqs(queue, max=5) == [1, 2, 3, 4, 5]
    api.nack(queue, 4, 2)
    found = api.claim(queue, max=3)
    assert [(job["$seq"], job["deliveries"]) for job in found] == [(2, 2), (4, 2), (6, 1)]


# ── ack, nack, extend ─────────────────────────────────────────────────────────────────────────


def test_an_ack_removes_jobs_for_good(api: QueueApi, queue: str) -> None:
    """§3.11: they are deleted, in silence."""
    assert api.claim_seqs(queue, max=3) == [1, 2, 3]
    said = api.ack(queue, 1, 3)
    assert (said["acked"], said["skipped"], said["ready"], said["in_flight"]) == (2, [], 7, 1)
    assert api.seqs(queue) == [2, 4, 5, 6, 7, 8, 9, 10]
    now = api.state(queue)
    assert (now["count"], now["earliest_seq"], now["head_seq"]) == (8, 2, 10)
    assert api.ack(queue, 1, 3)["skipped"] == [1, 3]
    assert api.claim_seqs(queue, max=99) == [4, 5, 6, 7, 8, 9, 10]


def test_what_is_not_held_is_skipped_in_the_order_of_the_request(api: QueueApi, queue: str) -> None:
    """§2.11, C: `skipped:[1,99]`; the second of two is skipped."""
    assert api.claim_seqs(queue, "other") == [1]
    assert api.claim_seqs(queue, "n", max=3) == [2, 3, 4]
    said = api.ack(queue, 1, 2, 99)
    assert (said["acked"], said["skipped"]) == (1, [1, 99])
    assert api.ack(queue, 99, 3, 1, 3, 0)["skipped"] == [99, 1, 3, 0]
    assert api.nack(queue, 10, 4, 4)["skipped"] == [10, 4]
    assert api.extend(queue, 4, (1 << 64) - 1)["skipped"] == [4, (1 << 64) - 1]
    assert api.ack(queue)["acked"] == 0, "none is fine"
    assert api.ack(queue, 1, node="other")["acked"] == 1


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_the_order_of_the_checks_of_settling(api: QueueApi, name: Name, verb: str) -> None:
    """§2.11: JSON → token syntax → node → seqs → length of lease_ids → 404 → 409."""
    log, absent, made = name("log"), name("absent"), name("queue")
    api.create_topic(log)
    api.make_queue(made)
    more = {"lease_ms": 1_000} if verb == "extend" else {}
    many = list(range(1, 1_002))
    for target in (log, absent, made):
        expect_error(api.request("POST", topic_path(target, f"/{verb}")), 415, "unsupported_media_type")
        expect_error(api.request("POST", topic_path(target, f"/{verb}"), b"", [JSON]), 400, "invalid_request")
        for body in ({}, {"node": "n", **more}, {"seqs": [1], **more}, {"node": "n", "seqs": 1, **more}):
            expect_error(api.try_verb(target, verb, **body), 400, "invalid_request")
        expect_error(
            api.try_verb(target, verb, node="", seqs=many, lease_ids=["lease_x"], **more), 400, "invalid_request"
        )
        expect_error(api.try_verb(target, verb, node="", seqs=many, **more), 400, "invalid_request")
        expect_error(
            api.try_verb(target, verb, node="n", seqs=many, lease_ids=["lease_1"], **more),
            400,
            "batch_too_large",
            {"seqs": 1_001, "max": 1_000},
        )
        expect_error(
            api.try_verb(target, verb, node="n", seqs=[1, 2], lease_ids=["lease_1"], **more), 400, "invalid_request"
        )
    fine = {"node": "n", "seqs": [1], **more}
    expect_error(api.try_verb(absent, verb, **fine), 404, "topic_not_found", {"topic": absent})
    expect_error(api.try_verb(log, verb, **fine), 409, "not_a_queue", {"topic": log})
    assert expect_success(api.try_verb(made, verb, **{**fine, "seqs": many[:1_000]}))["skipped"] == many[:1_000]
    assert not api.exists(absent)


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
@pytest.mark.parametrize(
    "body",
    [
        {"seqs": [-1]},
        {"seqs": [1.0]},
        {"seqs": ["1"]},
        {"seqs": [True]},
        {"seqs": None},
        {"seqs": [1 << 64]},
        {"lease_ids": None},
        {"lease_ids": [1]},
        {"lease_ids": [None]},
        {"node": None},
    ],
)
def test_types_of_settling_are_strict(api: QueueApi, queue: str, verb: str, body: dict[str, Any]) -> None:
    """§1.6."""
    assert api.claim_seqs(queue) == [1]
    more = {"lease_ms": 1_000} if verb == "extend" else {}
    expect_error(api.try_verb(queue, verb, **{"node": "n", "seqs": [1], **more, **body}), 400, "invalid_request")
    assert api.counts(queue) == (9, 1, 0)


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("nack", {"delay_ms": -1}),
        ("nack", {"delay_ms": None}),
        ("nack", {"delay_ms": 1.5}),
        ("nack", {"delay_ms": 1 << 64}),
        ("extend", {}),
        ("extend", {"lease_ms": None}),
        ("extend", {"lease_ms": "1"}),
        ("extend", {"lease_ms": 1 << 64}),
    ],
)
def test_times_of_settling_are_strict(api: QueueApi, queue: str, verb: str, body: dict[str, Any]) -> None:
    """§2.11: extend says how long, and neither takes null."""
    assert api.claim_seqs(queue) == [1]
    expect_error(api.try_verb(queue, verb, node="n", seqs=[1], **body), 400, "invalid_request")
    assert api.ack(queue, 1)["acked"] == 1


def test_token_rejects_a_late_holder(api: QueueApi, queue: str) -> None:
    """§3.11: another lease's token is skipped; `""` is no token; an empty array matches by node alone."""
    old = api.claim(queue)[0]["lease_id"]
    api.nack(queue, 1)
    new = api.claim(queue)[0]["lease_id"]
    assert old != new
    assert api.ack(queue, 1, lease_ids=[old])["skipped"] == [1]
    assert api.extend(queue, 1, lease_ids=[old])["skipped"] == [1]
    assert api.nack(queue, 1, lease_ids=[old])["skipped"] == [1]
    assert api.extend(queue, 1, lease_ids=[""])["extended"] == 1
    assert api.extend(queue, 1, lease_ids=[])["extended"] == 1
    assert api.ack(queue, 1, lease_ids=[new], node="other")["skipped"] == [1], "the node too has to fit"
    assert api.claim_seqs(queue, max=2) == [2, 3]
    said = api.ack(queue, 2, 1, 3, lease_ids=["", new, old])
    assert (said["acked"], said["skipped"]) == (2, [3])


@pytest.mark.parametrize("token", ["1", "lease_", "lease_xyz", "LEASE_1", "lease_1 ", "lease_-1", "lease_" + "f" * 40])
@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_what_is_no_token_is_refused(api: QueueApi, queue: str, verb: str, token: str) -> None:
    """§3.11: 400, and nothing of the request was done."""
    assert api.claim_seqs(queue, max=2) == [1, 2]
    more = {"lease_ms": 1_000} if verb == "extend" else {}
    expect_error(
        api.try_verb(queue, verb, node="n", seqs=[1, 2], lease_ids=["", token], **more), 400, "invalid_request"
    )
    assert api.counts(queue) == (8, 2, 0)


def test_a_nack_gives_back_at_once_or_later(api: QueueApi, queue: str) -> None:
    """§3.11: a delayed job is in neither counter, and comes when its time has."""
    assert api.claim_seqs(queue, max=3) == [1, 2, 3]
    said = api.nack(queue, 1)
    assert (said["nacked"], said["ready"], said["in_flight"]) == (1, 8, 2)
    said = api.nack(queue, 2, delay_ms=300)
    assert (said["nacked"], said["ready"], said["in_flight"]) == (1, 8, 1)
    began = time.monotonic()
    assert api.claim_seqs(queue, max=99) == [1, 4, 5, 6, 7, 8, 9, 10]
    found: list[dict[str, Any]] = []
    while not found:
        found = api.claim(queue)
    assert [(job["$seq"], job["deliveries"]) for job in found] == [(2, 2)]
    assert time.monotonic() - began >= 0.25
    assert api.nack(queue, 3, delay_ms=1 << 60)["nacked"] == 1, "clamped to a day"


def test_a_lease_that_runs_out_is_delivered_again(api: QueueApi, topic: str) -> None:
    """§3.11, C: deliveries = 2; the holder's ack is skipped as soon as it has run out."""
    api.make_queue(topic, lease_ms=LEASE_MS)
    api.write(topic, "job")
    first = api.claim(topic, "slow")[0]
    assert (first["deliveries"], api.counts(topic)) == (1, (0, 1, 0))
    eventually(lambda: api.counts(topic) == (1, 0, 0))
    assert time.time() * 1000 > first["deadline"]
    assert api.ack(topic, 1, node="slow")["skipped"] == [1], "B22: although nobody has it"
    second = api.claim(topic, "quick")[0]
    assert (second["$seq"], second["deliveries"]) == (1, 2)
    assert second["lease_id"] != first["lease_id"]
    assert api.ack(topic, 1, node="slow", lease_ids=[first["lease_id"]])["skipped"] == [1]


def test_an_extended_lease_does_not_run_out(api: QueueApi, topic: str) -> None:
    """§3.11, C: same lease, same count; `deadline` = now + lease."""
    api.make_queue(topic, lease_ms=150)
    api.write(topic, "job")
    job = api.claim(topic)[0]
    before = time.time() * 1000
    said = api.extend(topic, 1, lease_ms=LONG_MS)
    assert (said["extended"], said["skipped"]) == (1, [])
    assert said["deadlines"].keys() == {"1"}
    assert before + LONG_MS - 5 <= said["deadlines"]["1"] <= time.time() * 1000 + LONG_MS + 5
    eventually(lambda: time.time() * 1000 > job["deadline"] + 100)
    assert api.counts(topic) == (0, 1, 0)
    assert api.claim(topic, "other") == []
    assert api.ack(topic, 1, lease_ids=[job["lease_id"]])["acked"] == 1, "under the lease that it always had"


def test_an_extension_may_be_shorter_too(api: QueueApi, topic: str) -> None:
    """§3.11: it sets the deadline, clamped to 100 ms at least."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, "job")
    api.claim(topic)
    at = api.extend(topic, 1, lease_ms=0)["deadlines"]["1"]
    assert at <= time.time() * 1000 + 100
    eventually(lambda: api.counts(topic) == (1, 0, 0))
    assert api.claim(topic, "other")[0]["deliveries"] == 2


# ── the queue as a topic ──────────────────────────────────────────────────────────────────────


def test_the_state_of_a_queue(api: QueueApi, name: Name) -> None:
    """§2.2: `queue` only for queues, absent and not null."""
    log, made = name("log"), name("queue")
    api.create_topic(log)
    api.make_queue(made)
    assert "queue" not in api.state(log)
    assert api.state(made)["type"] == "queue"
    assert api.counts(made) == (0, 0, 0)
    api.write(made, 1, 2, 3)
    api.claim(made, lease_ms=LONG_MS)
    assert api.counts(made) == (2, 1, 0)
    for row in api.topics(f"?prefix={made}")["topics"]:
        assert row.keys() == {
            *("topic", "head_seq", "earliest_seq", "count", "bytes", "durable", "effective_priority"),
        }


def test_a_write_may_make_a_queue(api: QueueApi, topic: str) -> None:
    """§2.5: with its config."""
    reply = api.try_write(topic, {"data": 1}, config={"type": "queue", "lease_ms": LONG_MS})
    assert expect_success(reply, 201)["created"]
    assert api.claim_seqs(topic) == [1]


def test_reads_and_deletes_touch_no_lease(api: QueueApi, queue: str) -> None:
    """§3.11: diff and delete work as on a log; a job that was deleted is skipped by its holder."""
    assert api.claim_seqs(queue, max=3) == [1, 2, 3]
    assert api.seqs(queue) == list(range(1, 11)), "a leased job is still there to be read"
    assert api.counts(queue) == (7, 3, 0)
    assert api.remove(queue, before_seq=3)["deleted"] == 2
    assert api.counts(queue) == (7, 1, 0)
    assert api.ack(queue, 1, 2, 3)["skipped"] == [1, 2]
    assert api.claim_seqs(queue, max=99) == [4, 5, 6, 7, 8, 9, 10]


def test_a_dropped_queue_starts_anew(api: QueueApi, queue: str) -> None:
    """§2.4: leases go with it."""
    assert api.claim_seqs(queue, max=3) == [1, 2, 3]
    assert api.drop(queue)["deleted"]
    expect_error(api.try_verb(queue, "ack", node="n", seqs=[1]), 404, "topic_not_found", {"topic": queue})
    api.make_queue(queue)
    api.write(queue, "new")
    assert api.counts(queue) == (1, 0, 0)
    (job,) = api.claim(queue, max=9)
    assert (job["$seq"], job["deliveries"], job["data"]) == (1, 1, "new")


def test_a_full_queue_that_rejects_keeps_its_jobs(api: QueueApi, topic: str) -> None:
    """D1: acks out of order make room, and no job that nobody acked is evicted."""
    api.make_queue(topic, discard="reject", cap_records=4, lease_ms=LONG_MS)
    api.write(topic, 1, 2, 3, 4)
    expect_error(api.try_write(topic, {"data": 5}), 422, "topic_full", ANY)
    assert api.claim_seqs(topic, max=4) == [1, 2, 3, 4]
    api.ack(topic, 2, 3, 4)
    api.write(topic, 5, 6, 7)
    assert api.seqs(topic) == [1, 5, 6, 7], "the first is still there"
    assert api.ack(topic, 1)["acked"] == 1


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_queue_of_every_class(api: QueueApi, topic: str, durability: str) -> None:
    """§4."""
    api.make_queue(topic, durability=durability, lease_ms=LONG_MS, leases_durable=True)
    api.write(topic, 1, 2, 3)
    assert api.claim_seqs(topic, max=2) == [1, 2]
    assert api.extend(topic, 1)["extended"] == 1
    assert api.nack(topic, 2)["nacked"] == 1
    assert api.ack(topic, 1)["acked"] == 1
    assert api.counts(topic) == (2, 0, 0)


# ── dead letters ──────────────────────────────────────────────────────────────────────────────


def test_a_job_that_failed_too_often_is_put_away(api: QueueApi, name: Name) -> None:
    """§3.11, C: all of its meta are strings, beside the job's own; the pass goes on with the next job."""
    queue, dead = name("queue"), name("dead")
    api.make_queue(queue, max_deliveries=2, dead_letter=dead, lease_ms=LONG_MS)
    api.records(queue, {"data": {"n": 1}, "tag": "t", "node": "origin", "meta": {"own": 1}}, {"data": 2})
    for deliveries in (1, 2):
        assert api.claim(queue)[0]["deliveries"] == deliveries
        api.nack(queue, 1)
    assert not api.exists(dead), "not before"
    assert api.claim_seqs(queue, max=9) == [2], "it is put away, and the pass goes on"
    assert api.counts(queue) == (0, 1, 1)
    (record,) = api.diff(dead, include_tags=True)["records"]
    assert record == {
        "$seq": 1,
        "$ts": record["$ts"],
        "$node": "origin",
        "$tag": "t",
        "data": {"n": 1},
        "meta": {
            "own": 1,
            "$dead_letter_from": queue,
            "$dead_letter_deliveries": "2",
            "$dead_letter_src_seq": "1",
        },
    }
    assert api.state(dead)["type"] == "log"
    assert api.seqs(queue) == [2], "it is gone from the queue"


def test_without_a_dead_letter_topic_jobs_come_back_for_ever(api: QueueApi, topic: str) -> None:
    """§3.11."""
    api.make_queue(topic, max_deliveries=1, lease_ms=LONG_MS)
    api.write(topic, 1)
    for deliveries in range(1, 5):
        assert api.claim(topic)[0]["deliveries"] == deliveries
        api.nack(topic, 1)
    assert api.counts(topic) == (1, 0, 0)


def test_a_lease_that_ran_out_counts_as_a_delivery(api: QueueApi, name: Name) -> None:
    """§3.11: as a nack does."""
    queue, dead = name("queue"), name("dead")
    api.make_queue(queue, max_deliveries=1, dead_letter=dead, lease_ms=LEASE_MS)
    api.write(queue, "job")
    assert api.claim_seqs(queue) == [1]
    eventually(lambda: api.counts(queue)[0] == 1)
    assert api.claim_seqs(queue) == []
    assert api.counts(queue) == (0, 0, 1)
    assert api.diff(dead)["records"][0]["meta"]["$dead_letter_deliveries"] == "1"


def test_a_dead_letter_topic_that_is_full_keeps_the_job_in_its_queue(api: QueueApi, name: Name) -> None:
    """§3.11: the job is put back and nothing is counted."""
    queue, dead = name("queue"), name("dead")
    api.create_topic(dead, discard="reject", cap_records=1)
    api.write(dead, "full")
    api.make_queue(queue, max_deliveries=1, dead_letter=dead, lease_ms=LONG_MS)
    api.write(queue, 1)
    api.claim(queue)
    api.nack(queue, 1)
    assert api.claim_seqs(queue) == []
    assert api.counts(queue) == (1, 0, 0)
    api.remove(dead, before_seq=9)
    assert api.claim_seqs(queue) == []
    assert api.counts(queue) == (0, 0, 1)


# ── the jitter window ─────────────────────────────────────────────────────────────────────────


def shares_of(server: Server, topic: str, *wants: int) -> list[list[dict[str, Any]]]:
    """What claimers get that come one behind the other within one window."""
    clients = [QueueApi(server.address) for _ in wants]
    try:
        for number, (client, most) in enumerate(zip(clients, wants, strict=True)):
            client.begin("POST", topic_path(topic, "/claim"), dumps({"node": f"n{number}", "max": most}), [JSON])
            time.sleep(0.01)  # so that they arrive in this order
        return [expect_success(client.end())["claimed"] for client in clients]
    finally:
        for client in clients:
            client.close()


def test_claimers_of_one_window_share_evenly(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11, C: 20 jobs, four of ten: five each, one at a time in the order they came."""
    api.make_queue(topic, claim_jitter_ms=300, lease_ms=LONG_MS)
    api.write(topic, *range(20))
    shares = shares_of(server, topic, 10, 10, 10, 10)
    assert [[job["$seq"] for job in share] for share in shares] == [list(range(first, 21, 4)) for first in (1, 2, 3, 4)]


def test_a_claimer_that_has_enough_is_passed_over(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11: nine jobs for two and for a hundred: two and seven."""
    api.make_queue(topic, claim_jitter_ms=200, lease_ms=LONG_MS)
    api.write(topic, *range(9))
    assert [len(share) for share in shares_of(server, topic, 2, 100)] == [2, 7]


def test_a_window_takes_its_time_and_no_more(api: QueueApi, topic: str) -> None:
    """§3.11: the first claimer waits for the window, also where there is nothing."""
    api.make_queue(topic, claim_jitter_ms=200, lease_ms=LONG_MS)
    for jobs in (0, 1):
        if jobs:
            api.write(topic, 1)
        began = time.monotonic()
        assert len(api.claim(topic)) == jobs
        assert 0.19 <= time.monotonic() - began < 15


def test_each_of_a_window_keeps_its_own_lease(api: QueueApi, server: Server, topic: str) -> None:
    """D2: not the first one's."""
    api.make_queue(topic, claim_jitter_ms=200, lease_ms=LONG_MS)
    api.write(topic, 1, 2)

    def claim(lease_ms: int) -> int:
        with QueueApi(server.address) as client:
            began = time.time() * 1000
            (job,) = client.claim(topic, f"n{lease_ms}", lease_ms=lease_ms)
            return round(int(job["deadline"] - began) / 10_000)

    assert sorted(run_together([lambda: claim(10_000), lambda: claim(50_000)])) == [1, 5]


def test_claimer_that_leaves_its_window_strands_no_other(api: QueueApi, server: Server, topic: str) -> None:
    """D2: the others get their share, and all of it."""
    api.make_queue(topic, claim_jitter_ms=300, lease_ms=LONG_MS)
    api.write(topic, *range(6))
    with QueueApi(server.address) as first, QueueApi(server.address) as second:
        first.begin("POST", topic_path(topic, "/claim"), dumps({"node": "first", "max": 5}), [JSON])
        time.sleep(0.05)
        began = time.monotonic()
        second.begin("POST", topic_path(topic, "/claim"), dumps({"node": "second", "max": 5}), [JSON])
        time.sleep(0.05)
        first.connection.abort()
        assert [job["$seq"] for job in expect_success(second.end())["claimed"]] == [1, 2, 3, 4, 5]
        assert time.monotonic() - began < 15
    assert api.counts(topic) == (1, 5, 0)


# ── what jobs say of themselves ───────────────────────────────────────────────────────────────


def test_a_job_may_say_when_and_how_urgent(api: QueueApi, topic: str) -> None:
    """Ours: run_at_ms, delay_ms and priority become meta; higher goes first, and not before its time."""
    api.make_queue(topic, lease_ms=LONG_MS)
    now = round(time.time() * 1000)
    api.records(
        topic,
        {"data": "plain"},
        {"data": "urgent", "priority": 5, "meta": {"own": 1}},
        {"data": "later", "delay_ms": 60_000},
        {"data": "at", "run_at_ms": now + 60_000},
        {"data": "now", "run_at_ms": now - 1, "priority": -1},
        {"data": "nulls", "run_at_ms": None, "delay_ms": None, "priority": None},
    )
    assert api.counts(topic) == (4, 0, 0)
    found = [job for _ in range(5) for job in api.claim(topic)]
    assert [job["data"] for job in found] == ["urgent", "plain", "nulls", "now"]
    assert found[0]["meta"] == {"own": 1, "$priority": 5}
    assert found[3]["meta"] == {"$run_at_ms": now - 1, "$priority": -1}
    assert "meta" not in found[1]
    assert "meta" not in found[2]
    metas = [record.get("meta") for record in api.diff(topic, from_seq=2)["records"]]
    assert metas[1] == {"$run_at_ms": now + 60_000}
    assert metas[0]["$run_at_ms"] == pytest.approx(now + 60_000, abs=5_000)


def test_a_delayed_job_comes_by_itself(api: QueueApi, topic: str) -> None:
    """Ours."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.records(topic, {"data": 1, "delay_ms": 150})
    assert (api.claim(topic), api.counts(topic)) == ([], (0, 0, 0))
    eventually(lambda: api.counts(topic) == (1, 0, 0))
    assert api.claim_seqs(topic) == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"run_at_ms": "soon"},
        {"run_at_ms": 1.5},
        {"run_at_ms": True},
        {"run_at_ms": -1},
        {"run_at_ms": 1 << 60},
        {"delay_ms": -1},
        {"delay_ms": 1 << 63},
        {"priority": 1_001},
        {"priority": -1_001},
        {"priority": "high"},
        {"run_at_ms": 1, "delay_ms": 1},
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(api: QueueApi, queue: str, fields: dict[str, Any]) -> None:
    """Ours: 400, and nothing of the batch is written."""
    expect_error(api.try_write(queue, {"data": 1}, {"data": 2, **fields}), 400, "invalid_request")
    lines = b'{"data":1}\n' + dumps({"data": 2, **fields}) + b"\n"
    reply = api.request("POST", topic_path(queue), lines, [("Content-Type", "application/x-ndjson")])
    assert expect_error(reply, 400, "invalid_request", ANY)["detail"]["line"] == 2
    assert api.state(queue)["head_seq"] == 10


def test_a_log_has_no_schedule(api: QueueApi, name: Name) -> None:
    """Ours: 400 with the reason, also where the write would make the log."""
    log, absent, queue = name("log"), name("absent"), name("queue")
    api.create_topic(log)
    for topic in (log, absent):
        error = expect_error(api.try_write(topic, {"data": 1, "priority": 1}), 400, "invalid_request")
        assert "is a log" in error["message"]
        lines = dumps({"data": 1, "delay_ms": 1}) + b"\n"
        reply = api.request("POST", topic_path(topic), lines, [("Content-Type", "application/x-ndjson")])
        assert "is a log" in expect_error(reply, 400, "invalid_request", ANY)["message"]
    assert not api.exists(absent)
    assert expect_success(api.try_write(queue, {"data": 1, "priority": 1}, config={"type": "queue"}), 201)["count"] == 1
    lines = dumps({"data": 1, "delay_ms": 60_000}) + b"\n"
    expect_success(api.request("POST", topic_path(queue), lines, [("Content-Type", "application/x-ndjson")]))
    assert api.counts(queue) == (1, 0, 0)


# ── many at once ──────────────────────────────────────────────────────────────────────────────


def test_every_job_is_done_once_by_claimers_that_race(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11: at least once, and once where nobody is late; claims and acks from many clients at once."""
    api.make_queue(topic, lease_ms=LONG_MS)
    done: list[int] = []

    def write() -> None:
        with server.client() as client:
            for number in range(30):
                client.write(topic, *range(number * 10, number * 10 + 10))

    def work(node: str) -> None:
        with QueueApi(server.address) as client:
            while len(done) < 300:
                jobs = client.claim(topic, node, max=8)
                if jobs:
                    said = client.ack(
                        topic,
                        *(job["$seq"] for job in jobs),
                        node=node,
                        lease_ids=[job["lease_id"] for job in jobs],
                    )
                    assert said["skipped"] == []
                    done.extend(job["data"] for job in jobs)

    threads = [Thread(target=write), *(Thread(target=work, args=(f"n{number}",)) for number in range(4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(300))
    assert api.counts(topic) == (0, 0, 0)
    assert api.state(topic)["count"] == 0
