"""§2.11, §3.11: jobs pushed to workers, byte by byte."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.contract_http.api import expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, dumps
from tests.contract_http.queue_api import QueueApi, WorkStream
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

Name = Callable[[str], str]
LONG_MS = 60_000
SOON_S = 30.0  # the contract's bound for a release is 5 s, on a machine that does nothing else
QUIET_S = 0.3


@pytest.fixture
def api(server: Server) -> Iterator[QueueApi]:
    with QueueApi(server.address) as client:
        yield client


@pytest.fixture
def queue(api: QueueApi, topic: str) -> str:
    api.make_queue(topic, lease_ms=LONG_MS)
    return topic


def worker(server: Server, topic: str, node: str = "w", **query: Any) -> WorkStream:
    return WorkStream(server.address, topic, node=node, **query)


# ── the stream ────────────────────────────────────────────────────────────────────────────────


def test_the_bytes_of_a_stream(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11: headers as those of a watch; `retry`; a frame a job, whose id is its seq."""
    api.records(queue, {"data": {"n": 1}, "tag": "t", "node": "who", "meta": {"m": 1}}, {"data": "two"})
    before = time.time() * 1000
    with worker(server, queue, max=2) as stream:
        assert stream.head.status == 200
        assert (stream.head.header("content-type") or "").startswith("text/event-stream")
        assert stream.head.header("cache-control") == "no-store"
        assert stream.head.header("x-accel-buffering") == "no"
        first, second = stream.job(), stream.job()
    assert list(first.data) == ["topic", "$seq", "lease_id", "deadline", "$ts", "$tag", "deliveries", "data", "meta"]
    assert list(second.data) == ["topic", "$seq", "lease_id", "deadline", "$ts", "deliveries", "data"]
    assert (first.data["topic"], first.data["data"], first.data["meta"]) == (queue, {"n": 1}, {"m": 1})
    assert (second.seq, second.data["data"], second.data["deliveries"]) == (2, "two", 1)
    assert before + LONG_MS - 5 <= first.data["deadline"] <= time.time() * 1000 + LONG_MS + 5
    start = b'id: 2\nevent: job\ndata: {"topic":"%b","$seq":2,"lease_id":"lease_2","deadline":' % queue.encode()
    assert second.raw.startswith(start)


def test_a_worker_holds_as_many_as_it_may(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11, C: exactly `max` in flight; every ack makes room for one, and wakes it (D4)."""
    api.write(queue, *range(10))
    with worker(server, queue, max=3) as stream:
        assert stream.jobs(3) == [1, 2, 3]
        assert stream.is_quiet(QUIET_S)
        assert api.counts(queue) == (7, 3, 0)
        api.ack(queue, 2, node="w")
        assert stream.jobs(1) == [4]
        api.ack(queue, 1, 3, node="w")
        assert stream.jobs(2) == [5, 6]
        assert stream.is_quiet(QUIET_S)
        assert api.counts(queue) == (4, 3, 0)


def test_one_job_at_a_time_is_the_default(api: QueueApi, server: Server, name: Name) -> None:
    """§2.11: absent and garbage are 1; 0 too; more than 1000 is 1000."""
    asks: list[tuple[dict[str, Any], int]] = [({}, 1), ({"max": "many"}, 1), ({"max": "-3"}, 1), ({"max": 0}, 1)]
    for number, (query, held) in enumerate([*asks, ({"max": 2}, 2), ({"max": 99_999}, 1_000)]):
        topic = name(f"q{number}")
        api.make_queue(topic, lease_ms=LONG_MS)
        api.write_raw(topic, 1_050)
        with worker(server, topic, **query) as stream:
            stream.jobs(held)
            assert stream.is_quiet(0.05)
            assert api.counts(topic)[1] == held


@pytest.mark.parametrize(
    ("given", "kept"), [({}, 45_000), ({"lease_ms": 5_000}, 5_000), ({"lease_ms": 1}, 100), ({"lease_ms": "x"}, 45_000)]
)
def test_how_long_a_worker_holds_a_job(
    api: QueueApi, server: Server, topic: str, given: dict[str, Any], kept: int
) -> None:
    """§2.11, §1.6: the queue's own where it is absent or garbage; clamped."""
    api.make_queue(topic, lease_ms=45_000)
    api.write(topic, 1)
    before = time.time() * 1000
    with worker(server, topic, **given) as stream:
        assert before + kept - 5 <= stream.job().data["deadline"] <= time.time() * 1000 + kept + 5


def test_what_wakes_a_worker(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11: a write, a nack by somebody else, and another worker that goes; none of them is polled for."""
    with worker(server, queue) as stream:
        assert stream.is_quiet(0.05)
        began = time.monotonic()
        api.write(queue, "first")
        assert stream.job().data["data"] == "first"
        api.ack(queue, 1, node="w")
        assert time.monotonic() - began < SOON_S
        api.write(queue, "second")
        assert stream.jobs(1) == [2]
        api.nack(queue, 2, node="w")
        again = stream.job()
        assert (again.seq, again.data["deliveries"]) == (2, 2), "its own nack as well"
        with worker(server, queue, "other") as other:
            api.write(queue, "third")
            assert other.jobs(1) == [3]
            api.ack(queue, 2, node="w")
            assert stream.is_quiet(0.05)
        assert stream.jobs(1) == [3], "what the other held is free when it goes"


def test_a_worker_is_woken_by_time(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11: a lease that ran out, a delayed nack, a job whose time has come; at their time, without a poll."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, 1)
    assert api.claim_seqs(topic, "slow", lease_ms=300) == [1]
    with worker(server, topic) as stream:
        job = stream.job()
        late = time.time() * 1000
        assert (job.seq, job.data["deliveries"]) == (1, 2)
        at = late
        api.nack(topic, 1, node="w", delay_ms=250)
        assert stream.job().data["deliveries"] == 3
        assert time.time() * 1000 >= at + 240
        api.ack(topic, 1, node="w")
        api.records(topic, {"data": "later", "delay_ms": 250})
        assert stream.is_quiet(0.1)
        assert stream.job().data["data"] == "later"


def test_a_workers_own_lease_runs_out_as_any_other(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11: what it holds are unexpired leases; an expired one makes room, and the job comes again."""
    api.make_queue(topic, lease_ms=LONG_MS)
    api.write(topic, 1)
    with worker(server, topic, lease_ms=100) as stream:
        deliveries = [stream.job().data["deliveries"] for _ in range(3)]
        assert deliveries == [1, 2, 3]


def test_what_a_worker_held_is_free_when_it_goes(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11, C: at once, closed or reset; the count stays; claims of the same node by request are untouched."""
    api.write(queue, *range(6))
    assert api.claim_seqs(queue, "w") == [1]
    for leave in ("close", "abort"):
        stream = worker(server, queue, max=3)
        assert stream.jobs(3) == [2, 3, 4]
        assert api.counts(queue) == (2, 4, 0)
        getattr(stream.wire, leave)()
        eventually(lambda: api.counts(queue) == (5, 1, 0), SOON_S)
    assert [job["deliveries"] for job in api.claim(queue, "other", max=9)] == [3, 3, 3, 1, 1]
    assert api.ack(queue, 1, node="w")["acked"] == 1


def test_jobs_settled_before_a_worker_goes_stay_settled(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11: only what it still holds comes back."""
    api.write(queue, *range(3))
    with worker(server, queue, max=3) as stream:
        assert stream.jobs(3) == [1, 2, 3]
        api.ack(queue, 2, node="w")
    eventually(lambda: api.counts(queue) == (2, 0, 0), SOON_S)
    assert api.claim_seqs(queue, max=9) == [1, 3]


def test_workers_share_what_comes(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11: one at a time in turn; nobody gets what another holds."""
    with ExitStack() as stack:
        streams = [stack.enter_context(worker(server, queue, f"w{number}", max=5)) for number in range(4)]
        eventually(lambda: api.metrics()["sse_connections"] >= 4)
        api.write(queue, *range(20))
        shares = [stream.jobs(5) for stream in streams]
        assert sorted(seq for share in shares for seq in share) == list(range(1, 21))
        assert api.counts(queue) == (0, 20, 0)


def test_workers_and_claimers_share_a_window(api: QueueApi, server: Server, topic: str) -> None:
    """§3.11: both join it; ten jobs for a worker of five and a claimer of five."""
    api.make_queue(topic, claim_jitter_ms=400, lease_ms=LONG_MS)
    with worker(server, topic, max=5) as stream, QueueApi(server.address) as other:
        eventually(lambda: api.metrics()["sse_connections"] >= 1)
        api.write(topic, *range(10))
        other.begin("POST", topic_path(topic, "/claim"), dumps({"node": "c", "max": 5}), [JSON])
        mine = stream.jobs(5)
        theirs = [job["$seq"] for job in expect_success(other.end())["claimed"]]
        assert mine == [1, 3, 5, 7, 9]
        assert theirs == [2, 4, 6, 8, 10]


def test_a_queue_that_goes_ends_its_streams(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11: an error frame with 409, then the end."""
    with worker(server, queue) as idle, worker(server, queue, "busy") as busy:
        api.write(queue, 1)
        (idle if idle.wire.held or not idle.is_quiet(0.1) else busy).job()
        api.drop(queue)
        for stream in (idle, busy):
            assert stream.error() | {"error": ""} == {"code": 409, "error": "", "topic": queue}
    eventually(lambda: api.metrics()["sse_connections"] == 0, SOON_S)


def test_a_large_job_does_not_hold_up_a_stream(api: QueueApi, server: Server, queue: str) -> None:
    """§3.11: as many as it may hold, however large they are."""
    big = "x" * 700_000
    api.write(queue, *[big] * 8)
    with worker(server, queue, max=8) as stream:
        for seq in range(1, 9):
            job = stream.job()
            assert (job.seq, len(job.data["data"])) == (seq, len(big))


# ── who may, and in which order that is checked ───────────────────────────────────────────────


def test_the_order_of_the_checks_of_a_stream(api: QueueApi, server: Server, name: Name) -> None:
    """§2.11: 406 → node → 404 → 409."""
    log, absent, made = name("log"), name("absent"), name("queue")
    api.create_topic(log)
    api.make_queue(made)
    html = [("Accept", "text/html")]

    def refusal(topic: str, status: int, code: str, detail: object = None, headers: Any = (), **query: Any) -> None:
        with WorkStream(server.address, topic, headers=headers, **query) as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, status, code, detail)

    for topic in (log, absent, made):
        refusal(topic, 406, "not_acceptable", None, html)
        refusal(topic, 400, "invalid_request")
        refusal(topic, 400, "invalid_request", node="")
        refusal(topic, 400, "invalid_request", node="x" * 129)
    refusal(absent, 404, "topic_not_found", {"topic": absent}, node="n")
    refusal(log, 409, "not_a_queue", {"topic": log}, node="n")
    for accept in ("*/*", "text/event-stream", "text/html, text/event-stream;q=0.5", ""):
        with WorkStream(server.address, made, headers=[("Accept", accept)], node="x" * 128) as stream:
            assert stream.refusal is None
    expect_error(api.post(f"{topic_path(made)}/work?node=n", {}), 405, "method_not_allowed")
    head = api.request("HEAD", f"{topic_path(made)}/work?node=n")
    assert (head.status, head.header("cache-control")) == (200, "no-store")
    eventually(lambda: api.metrics()["sse_connections"] == 0, SOON_S)


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = "all,reader:r,writer:w,both:rw,deleter:d,admin:a,mine:rw:mine-"
    with Server(tmp_path_factory.mktemp("keyed"), api_keys=keys, max_sse_connections=3).start() as running:
        with QueueApi(running.address, key="all") as client:
            for topic in ("mine-q", "theirs-q"):
                client.make_queue(topic, lease_ms=LONG_MS)
                client.write(topic, *range(20))
        yield running


@pytest.mark.parametrize(
    ("verb", "body", "may"),
    [
        ("claim", {"node": "n"}, {"all", "both", "mine"}),
        ("ack", {"node": "n", "seqs": []}, {"all", "both", "writer", "mine"}),
        ("nack", {"node": "n", "seqs": []}, {"all", "both", "writer", "mine"}),
        ("extend", {"node": "n", "seqs": [], "lease_ms": 1}, {"all", "both", "writer", "mine"}),
        ("redrive", {"limit": 1}, {"all", "both", "writer", "mine"}),
    ],
)
def test_which_key_may(keyed_server: Server, verb: str, body: dict[str, Any], may: set[str]) -> None:
    """§1.3: claim needs read and write; the others write; and the name has to be the key's."""
    for key in ("all", "reader", "writer", "both", "deleter", "admin", "mine"):
        with QueueApi(keyed_server.address, key=key) as client:
            reply = client.try_verb("mine-q", verb, **body)
            if key in may:
                expect_success(reply)
            else:
                expect_error(reply, 403, "forbidden")
            if key == "mine":
                expect_error(client.try_verb("theirs-q", verb, **body), 403, "forbidden")
    with QueueApi(keyed_server.address) as nobody:
        expect_error(nobody.try_verb("mine-q", verb, **body), 401, "unauthorized")
        expect_error(nobody.post(topic_path("mine-q", f"/{verb}?token=all"), body), 401, "unauthorized")


def test_which_key_may_work(keyed_server: Server) -> None:
    """§1.3, §1.5: read and write; `?token=` is taken here."""
    for key in ("all", "both", "mine"):
        with WorkStream(keyed_server.address, "mine-q", key=key, node=key) as stream:
            assert stream.refusal is None
            stream.job()
        with WorkStream(keyed_server.address, "mine-q", token=key, node=key) as stream:
            assert stream.refusal is None
    for key in ("reader", "writer", "deleter", "admin"):
        with WorkStream(keyed_server.address, "mine-q", key=key, node=key) as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 403, "forbidden")
    wrong: list[dict[str, Any]] = [{}, {"token": "wrong"}]
    for query in wrong:
        with WorkStream(keyed_server.address, "mine-q", node="n", **query) as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 401, "unauthorized")
    with WorkStream(keyed_server.address, "theirs-q", key="mine", node="n") as stream:
        assert stream.refusal is not None
        expect_error(stream.refusal, 403, "forbidden")
    with QueueApi(keyed_server.address, key="all") as api:
        eventually(lambda: api.metrics()["sse_connections"] == 0, SOON_S)


def test_streams_of_workers_are_counted_with_all_others(keyed_server: Server) -> None:
    """§1.12: 429 behind all other checks, without a detail; the slot is free again when one goes."""
    with QueueApi(keyed_server.address, key="all") as api, ExitStack() as stack:
        eventually(lambda: api.metrics()["sse_connections"] == 0, SOON_S)
        streams = [
            stack.enter_context(WorkStream(keyed_server.address, "mine-q", key="all", node="n")) for _ in range(3)
        ]
        assert api.metrics()["sse_connections"] == 3
        with WorkStream(keyed_server.address, "mine-q", key="all", node="n") as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 429, "throttled")
        with WorkStream(keyed_server.address, "nowhere", key="all", node="n") as stream:
            assert stream.refusal is not None
            expect_error(stream.refusal, 404, "topic_not_found", {"topic": "nowhere"})
        streams[0].wire.abort()

        def accepted() -> bool:
            found = stack.enter_context(WorkStream(keyed_server.address, "mine-q", key="all", node="n"))
            return found.refusal is None

        eventually(accepted)


def test_a_server_that_stops_says_so(tmp_path: Path) -> None:
    """§1.2, §3.11: `server_shutting_down`, then the end; well under five seconds; also in the middle of a window."""
    with Server(tmp_path).start() as server:
        with QueueApi(server.address) as api:
            api.make_queue("q", lease_ms=LONG_MS)
            api.make_queue("slow", claim_jitter_ms=5_000)
            api.write("q", 1, 2)
            with (
                worker(server, "q") as busy,
                worker(server, "q", "idle", max=2) as idle,
                QueueApi(server.address) as late,
            ):
                assert busy.jobs(1) + idle.jobs(1) == [1, 2]
                late.begin("POST", topic_path("slow", "/claim"), dumps({"node": "n"}), [JSON])
                eventually(lambda: api.metrics()["sse_connections"] == 2)
                began = time.monotonic()
                server.signal(signal.SIGTERM)
                for stream in (busy, idle):
                    said = stream.error()
                    assert (said["code"], said["topic"]) == ("server_shutting_down", "q")
                    assert said["error"]
                assert expect_success(late.end())["count"] == 0
                assert time.monotonic() - began < SOON_S
        assert server.wait() == 0
