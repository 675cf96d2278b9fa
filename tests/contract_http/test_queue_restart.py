"""§4, §2.12: queues over restarts, their figures; and beside the contract their history and redrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.contract_http.api import expect_error, expect_success, topic_path
from tests.contract_http.client import loads
from tests.contract_http.queue_api import QueueApi, WorkStream
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

Name = Callable[[str], str]
LONG_MS = 60_000


@pytest.fixture
def api(server: Server) -> Iterator[QueueApi]:
    with QueueApi(server.address) as client:
        yield client


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One directory of this test, served."""
    with Server(tmp_path).start() as running:
        yield running


# ── restarts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_leases_that_are_not_kept_heal_by_a_restart(own_server: Server, how: str) -> None:
    """§4, C, G93: every job that was not acked is claimable, deliveries begin anew, and the queue is a queue. No lease
    id is given twice, so a holder from before the restart is fenced off."""
    with QueueApi(own_server.address) as api:
        api.make_queue("q", durability="fsync", lease_ms=LONG_MS)
        api.write("q", *range(5))
        held = api.claim("q", "old", max=4)
        api.nack("q", 3, node="old")
        api.nack("q", 4, node="old", delay_ms=LONG_MS)
        assert api.ack("q", 2, node="old")["acked"] == 1
    getattr(own_server, how)()
    own_server.start()
    with QueueApi(own_server.address) as api:
        assert api.state("q")["type"] == "queue"
        assert api.counts("q") == (4, 0, 0)
        assert api.ack("q", 1, node="old")["skipped"] == [1]
        found = api.claim("q", "old", max=9)
        assert [(job["$seq"], job["deliveries"]) for job in found] == [(1, 1), (3, 1), (4, 1), (5, 1)]
        assert not {job["lease_id"] for job in held} & {job["lease_id"] for job in found}
        assert api.ack("q", 1, node="old", lease_ids=[held[0]["lease_id"]])["skipped"] == [1]


@pytest.mark.parametrize("how", ["stop", "kill", "checkpoint"])
def test_durable_leases_survive(own_server: Server, how: str) -> None:
    """§4, D5: leases with their holders, ids and deadlines; deliveries; delays; the count of dead letters. Over a stop,
    over SIGKILL, and over a checkpoint and SIGKILL behind it."""
    with QueueApi(own_server.address) as api:
        api.make_queue(
            "q", durability="fsync", leases_durable=True, lease_ms=LONG_MS, max_deliveries=3, dead_letter="d"
        )
        api.write("q", *range(6))
        for _ in range(3):
            assert api.claim_seqs("q", "w") == [1]
            api.nack("q", 1, node="w")
        assert api.claim_seqs("q", "w", max=3) == [2, 3, 4], "the first went to the dead letters"
        held = {job["$seq"]: job for job in api.claim("q", "other")}
        assert list(held) == [5]
        api.nack("q", 3, node="w")
        api.nack("q", 4, node="w", delay_ms=LONG_MS)
        until = api.extend("q", 2, node="w", lease_ms=2 * LONG_MS)["deadlines"]["2"]
        assert api.counts("q") == (2, 2, 1)
    if how == "checkpoint":
        own_server.restart()
    getattr(own_server, "kill" if how == "checkpoint" else how)()
    own_server.start()
    with QueueApi(own_server.address) as api:
        assert api.counts("q") == (2, 2, 1)
        found = api.claim("q", "new", max=9)
        assert [(job["$seq"], job["deliveries"]) for job in found] == [(3, 2), (6, 1)]
        assert min(int(job["lease_id"][6:], 16) for job in found) > int(held[5]["lease_id"][6:], 16)
        assert api.ack("q", 5, node="other", lease_ids=[held[5]["lease_id"]])["acked"] == 1
        assert api.ack("q", 2, node="other")["skipped"] == [2], "it is the other node's"
        assert until > time.time() * 1000
        assert api.ack("q", 2, node="w")["acked"] == 1
        assert [record["data"] for record in api.diff("d")["records"]] == [0]


def test_a_durable_lease_runs_out_over_a_kill(own_server: Server) -> None:
    """§4: a deadline is a time, also one that passed while nobody served."""
    with QueueApi(own_server.address) as api:
        api.make_queue("q", durability="fsync", leases_durable=True)
        api.write("q", 1)
        job = api.claim("q", "w", lease_ms=300)[0]
        own_server.kill()
    own_server.start()
    with QueueApi(own_server.address) as api:
        eventually(lambda: api.counts("q") == (1, 0, 0))
        assert time.time() * 1000 > job["deadline"]
        assert api.claim("q", "other")[0]["deliveries"] == 2


def test_an_acknowledged_ack_of_an_fsync_queue_survives_a_kill(own_server: Server) -> None:
    """§4: the delete is durable before the 200."""
    with QueueApi(own_server.address) as api:
        api.make_queue("q", durability="fsync", lease_ms=LONG_MS)
        api.write("q", *range(200))
        acked: set[int] = set()
        while len(acked) < 150:
            seqs = api.claim_seqs("q", max=10)
            acked |= set(seqs) - set(api.ack("q", *seqs)["skipped"])
        own_server.kill()
    own_server.start()
    with QueueApi(own_server.address) as api:
        left = set(api.claim_seqs("q", max=1_000))
        assert left == set(range(1, 201)) - acked


# ── figures ───────────────────────────────────────────────────────────────────────────────────


def test_metrics_of_queues(api: QueueApi, server: Server, name: Name) -> None:
    """§2.12, C: ready and in flight by topic, for queues only; totals; and ours: what was done with jobs."""
    log, queue, dead = name("log"), name("queue"), name("dead")
    api.create_topic(log)
    before = api.metrics()
    api.make_queue(queue, lease_ms=LONG_MS, max_deliveries=1, dead_letter=dead)
    api.write(queue, *range(6))
    assert api.claim_seqs(queue, max=4) == [1, 2, 3, 4]
    api.ack(queue, 1, 99)
    api.nack(queue, 2)
    api.extend(queue, 3)
    api.extend(queue, 4, lease_ms=100)
    assert api.claim_seqs(queue, "other") == [5], "the second goes to the dead letters"
    eventually(lambda: api.counts(queue) == (2, 2, 1))
    assert api.metric("topic_queue_ready", queue) == 2
    assert api.metric("topic_queue_in_flight", queue) == 2
    figures = api.metrics()
    assert figures["queue_topics"] == before["queue_topics"] + 1
    assert api.metric("queue_topics") == figures["queue_topics"]
    # Leases of other tests on this server may end at any time: the sum is compared within one response.
    lines = [line.split() for line in api.get("/v0/metrics").body.decode().splitlines() if line[:1] not in ("#", "")]
    in_flight = [float(value) for series, value in lines if series.startswith("tidelog_topic_queue_in_flight{")]
    assert sum(in_flight) >= 2
    assert ["tidelog_queue_leases_in_flight", f"{sum(in_flight):.0f}"] in lines
    assert figures["queue_leases_in_flight"] >= 2
    assert f'tidelog_topic_queue_ready{{topic="{log}"}}' not in api.get("/v0/metrics").body.decode()
    done = ("claimed", "acked", "nacked", "extended", "expired", "dead_lettered")
    assert [api.metric(f"topic_queue_{what}_total", queue) for what in done] == [5, 1, 1, 2, 1, 1]
    with WorkStream(server.address, queue, node="w") as stream:
        assert stream.jobs(1) == [6], "the fourth goes to the dead letters"
        assert api.metric("topic_queue_claimed_total", queue) == 6
        assert api.metric("topic_queue_in_flight", queue) == 3


# ── history ───────────────────────────────────────────────────────────────────────────────────


def events(api: QueueApi, queue: str, query: str = "") -> list[dict[str, Any]]:
    said = expect_success(api.get(topic_path(queue, f"/history{query}")))
    assert said.keys() == {"topic", "events", "count", "next_from_seq", "performance"}
    assert said["count"] == len(said["events"])
    found: list[dict[str, Any]] = said["events"]
    assert said["next_from_seq"] == (found[-1]["at"] if found else said["next_from_seq"])
    return found


def test_the_history_of_a_queue(api: QueueApi, queue_with_history: str) -> None:
    """Ours: every step, oldest first; page by page."""
    found = events(api, queue_with_history)
    assert [(step["event"], step.get("seq")) for step in found] == [
        ("enqueued", 1),
        ("claimed", 1),
        ("claimed", 2),
        ("extended", 1),
        ("nacked", 2),
        ("acked", 1),
    ]
    assert (found[0]["last_seq"], found[1]["node"], found[1]["deliveries"], found[1]["lease_id"]) == (3, "n", 1, 1)
    assert [step["at"] for step in found] == [1, 2, 3, 4, 5, 6]
    assert events(api, queue_with_history, "?limit=2") == found[:2]
    assert events(api, queue_with_history, "?from_seq=2&limit=3") == found[2:5]
    assert events(api, queue_with_history, "?from_seq=6") == []
    assert events(api, queue_with_history, f"?from_seq={(1 << 64) - 1}") == found, "of a queue that was made again"


@pytest.fixture
def queue_with_history(api: QueueApi, topic: str) -> str:
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, *range(3))
    assert api.claim_seqs(topic, max=2) == [1, 2]
    api.extend(topic, 1)
    api.nack(topic, 2)
    api.ack(topic, 1)
    return topic


def test_a_history_as_lines_and_as_arrow(api: QueueApi, queue_with_history: str) -> None:
    """Ours: by Accept or by name; the same steps."""
    target = topic_path(queue_with_history, "/history")
    pages = events(api, queue_with_history)
    for kind, named in (("application/x-ndjson", "ndjson"), ("application/vnd.apache.arrow.stream", "arrow")):
        by_header = api.get(target, [("Accept", f"{kind}, */*;q=0.1")])
        by_name = api.get(f"{target}?format={named}")
        for reply in (by_header, by_name):
            assert (reply.status, reply.header("content-type")) == (200, kind)
            if named == "ndjson":
                assert [loads(line) for line in reply.body.splitlines()] == pages
            else:
                table = pa.ipc.open_stream(BytesIO(reply.body)).read_all()
                assert table["event"].to_pylist() == [step["event"] for step in pages]
                assert table["at"].to_pylist() == [step["at"] for step in pages]
                assert table["seq"].to_pylist() == [step["seq"] for step in pages]
                assert table["ts_ms"].cast(pa.int64()).to_pylist() == [step["ts_ms"] for step in pages]
    expect_error(api.get(f"{target}?format=xml"), 400, "invalid_request")
    expect_error(api.get(target, [("Accept", "text/html")]), 406, "not_acceptable")


def test_what_has_no_history(api: QueueApi, name: Name) -> None:
    log, queue = name("log"), name("queue")
    api.create_topic(log)
    api.make_queue(queue)
    expect_error(api.get(topic_path(log, "/history")), 409, "not_a_queue", {"topic": log})
    expect_error(api.get(topic_path(name("absent"), "/history")), 404, "topic_not_found", {"topic": name("absent")})
    assert events(api, queue) == []


# ── redrive ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def dead_lettered(api: QueueApi, name: Name) -> tuple[str, str]:
    """A queue all of whose ten jobs are dead letters."""
    queue, dead = name("queue"), name("dead")
    api.make_queue(queue, max_deliveries=1, dead_letter=dead, lease_ms=LONG_MS)
    api.records(queue, *({"data": number, "tag": "ab"[number % 2], "meta": {"own": number}} for number in range(10)))
    api.nack(queue, *api.claim_seqs(queue, max=10))
    assert api.claim_seqs(queue, max=10) == []
    assert api.counts(queue) == (0, 0, 10)
    return queue, dead


def redrive(api: QueueApi, dead: str, **body: Any) -> dict[str, Any]:
    said = expect_success(api.try_verb(dead, "redrive", **body))
    assert said.keys() == {"topic", "redriven", "queues", "skipped", "performance"}
    assert said["topic"] == dead
    return said


def test_dead_letters_go_back_to_where_they_came_from(api: QueueApi, dead_lettered: tuple[str, str]) -> None:
    """Ours: without what was added to their meta; and they are gone from the dead letters."""
    queue, dead = dead_lettered
    said = redrive(api, dead, match="a", limit=3)
    assert (said["redriven"], said["queues"], said["skipped"]) == (3, {queue: 3}, 0)
    found = api.claim(queue, max=10)
    assert [(job["data"], job["meta"], job["deliveries"]) for job in found] == [
        (number, {"own": number}, 1) for number in (0, 2, 4)
    ]
    assert [record["data"] for record in api.diff(dead)["records"]] == [1, 3, 5, 6, 7, 8, 9]
    assert expect_success(api.request("POST", topic_path(dead, "/redrive")))["redriven"] == 7, "no body: all of them"
    assert api.state(dead)["count"] == 0
    assert redrive(api, dead)["redriven"] == 0


def test_dead_letters_may_go_elsewhere(api: QueueApi, dead_lettered: tuple[str, str], name: Name) -> None:
    queue, dead = dead_lettered
    other, log, absent = name("other"), name("log"), name("absent")
    api.make_queue(other)
    api.create_topic(log)
    expect_error(api.try_verb(dead, "redrive", to=absent), 404, "topic_not_found", {"topic": absent})
    expect_error(api.try_verb(dead, "redrive", to=log), 409, "not_a_queue", {"topic": log})
    expect_error(api.try_verb(absent, "redrive"), 404, "topic_not_found", {"topic": absent})
    for body in ({"rate": 0}, {"limit": -1}, {"limit": 1.5}, {"to": 1}, {"match": ["tag"]}, {"rate": "fast"}):
        expect_error(api.try_verb(dead, "redrive", **body), 400, "invalid_request")
    assert api.state(dead)["count"] == 10
    assert redrive(api, dead, to=other)["queues"] == {other: 10}
    assert (api.counts(other)[0], api.counts(queue)[0]) == (10, 0)


def test_a_redrive_keeps_to_its_rate(api: QueueApi, dead_lettered: tuple[str, str]) -> None:
    """Ours: so many a second, and the request ends."""
    _, dead = dead_lettered
    began = time.monotonic()
    assert redrive(api, dead, rate=4, limit=9)["redriven"] == 9
    assert 1.9 < time.monotonic() - began < 30
    assert api.state(dead)["count"] == 1


def test_records_without_a_home_are_left_where_they_are(
    api: QueueApi, dead_lettered: tuple[str, str], name: Name
) -> None:
    queue, dead = dead_lettered
    gone = name("gone")
    api.remove(dead, before_seq=99)
    api.records(
        dead,
        {"data": "nobody's"},
        {"data": "of a queue that is gone", "meta": {"$dead_letter_from": gone}},
        {"data": "home", "meta": {"$dead_letter_from": queue}},
    )
    said = redrive(api, dead, rate=1, limit=3)
    assert (said["redriven"], said["skipped"]) == (1, 2)
    assert [record["data"] for record in api.diff(dead)["records"]] == ["nobody's", "of a queue that is gone"]


def test_a_key_moves_dead_letters_to_its_own_queues_only(tmp_path: Path) -> None:
    """Ours: §1.5 for `to`; where there is none, what is not the key's stays where it is."""
    with Server(tmp_path, api_keys="all,mine:rw:mine-").start() as server, QueueApi(server.address, key="all") as api:
        for queue in ("mine-q", "theirs-q"):
            api.make_queue(queue, max_deliveries=1, dead_letter="mine-dead", lease_ms=LONG_MS)
            api.write(queue, queue)
            api.claim(queue)
            api.nack(queue, 1)
            assert api.claim(queue) == []
        with QueueApi(server.address, key="mine") as mine:
            expect_error(mine.try_verb("mine-dead", "redrive", to="theirs-q"), 403, "forbidden", {"topic": "theirs-q"})
            assert redrive(mine, "mine-dead")["queues"] == {"mine-q": 1}
        assert [record["data"] for record in api.diff("mine-dead")["records"]] == ["theirs-q"]
