"""§1.12: what clients may hold at once, and that they get it back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, Reply, dumps, loads
from tests.contract_http.server import Server
from tests.contract_http.sse_client import SseStream
from tests.kit.waiting import eventually, run_together

AGAIN_S = 30.0  # a slot is free within about 200 ms; more is granted to a machine that is busy
_numbers = count(1)


def over(reply: Reply, most: int) -> None:
    """A cap of the instance: which one, and how much it is."""
    error = expect_error(reply, 429, "throttled", ANY)
    assert error["detail"].keys() == {"limit", "max"}
    assert isinstance(error["detail"]["limit"], str)
    assert error["detail"]["max"] == most


# ── topics and bytes ──────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def few_topics_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("few"), max_topics=3).start() as running:
        yield running


@pytest.fixture
def few_topics_api(few_topics_server: Server) -> Iterator[Api]:
    """A client of a server that may have three topics and has none."""
    with few_topics_server.client() as client:
        for row in client.topics()["topics"]:
            client.drop(row["topic"])
        yield client


def test_topics_are_limited_however_they_are_made(few_topics_api: Api) -> None:
    """§1.12: PUT and auto-create; 429 with the limit; what is there can always be put again."""
    few_topics_api.create_topic("a")
    few_topics_api.create_topic("b")
    few_topics_api.write("c", 1)
    over(few_topics_api.put(topic_path("d"), {}), 3)
    over(few_topics_api.try_write("d", {"data": 1}), 3)
    assert not few_topics_api.exists("d")
    for topic in "abc":
        assert not few_topics_api.configure(topic, cap_records=9)["created"]
    assert few_topics_api.write("a", 1)["head_seq"] == 1
    few_topics_api.drop("b")
    assert few_topics_api.write("d", 1)["created"], "room again"
    over(few_topics_api.put(topic_path("b"), {}), 3)


def test_other_refusals_of_a_new_topic_come_first(few_topics_api: Api) -> None:
    """§2.1, §2.5: name and config before the cap."""
    for topic in "abc":
        few_topics_api.create_topic(topic)
    expect_error(few_topics_api.put(topic_path("-d"), {}), 400, "invalid_request")
    expect_error(
        few_topics_api.put(topic_path("d"), {"dead_letter": "-"}), 400, "invalid_request", {"dead_letter": "-"}
    )
    expect_error(few_topics_api.put(topic_path("a"), {"type": "queue"}), 409, "topic_exists_incompatible", ANY)
    expect_error(few_topics_api.try_write("-d", {"data": 1}), 400, "invalid_request")
    expect_error(few_topics_api.try_write("d", {"data": 1}, create=False), 404, "topic_not_found", {"topic": "d"})


def test_a_race_for_the_last_topics_does_not_overshoot(few_topics_api: Api, few_topics_server: Server) -> None:
    """§1.12: the check and the creation are one step."""

    def make(number: int) -> Reply:
        with few_topics_server.client() as client:
            if number % 2:
                return client.put(topic_path(f"race-{number}"), {})
            return client.try_write(f"race-{number}", {"data": 1})

    replies = run_together([lambda number=number: make(number) for number in range(12)])  # type: ignore[misc]
    assert sorted(reply.status for reply in replies) == [201] * 3 + [429] * 9
    assert len(few_topics_api.topics()["topics"]) == 3


@pytest.fixture(scope="module")
def few_bytes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("tight"), max_total_bytes=100).start() as running:
        yield running


@pytest.fixture
def few_bytes_api(few_bytes_server: Server) -> Iterator[Api]:
    """A client of a server that may hold 100 bytes and holds none."""
    with few_bytes_server.client() as client:
        for row in client.topics()["topics"]:
            client.drop(row["topic"])
        yield client


def of(size: int) -> str:
    return "x" * (size - 2)


def test_live_bytes_of_all_topics_are_limited(few_bytes_api: Api) -> None:
    """§1.12: `current + incoming ≤ cap`; exactly at it is taken; nothing of a refused write stays."""
    few_bytes_api.write("a", of(60))
    over(few_bytes_api.try_write("b", {"data": of(41)}), 100)
    assert not few_bytes_api.exists("b"), "D6: a refused write makes no topic"
    over(few_bytes_api.try_write("a", {"data": of(20)}, {"data": of(21)}), 100)
    assert few_bytes_api.state("a")["head_seq"] == 1
    few_bytes_api.write("b", of(40))
    over(few_bytes_api.try_write("b", {"data": 1}), 100)
    assert few_bytes_api.metrics()["bytes_live"] == 100


def test_bytes_come_back_with_every_way_out(few_bytes_api: Api) -> None:
    """§1.12: freed by delete, eviction and drop."""
    few_bytes_api.write("a", of(60))
    few_bytes_api.write("b", of(40))
    few_bytes_api.remove("a", before_seq=9)
    few_bytes_api.write("b", of(60))
    over(few_bytes_api.try_write("b", {"data": 1}), 100)
    few_bytes_api.configure("b", cap_records=1)
    few_bytes_api.write("a", of(40))
    over(few_bytes_api.try_write("a", {"data": 1}), 100)
    few_bytes_api.drop("b")
    few_bytes_api.write("a", of(60))


def test_a_retry_is_recognised_although_nothing_more_fits(few_bytes_api: Api) -> None:
    """§1.11: the key before the quota."""
    few_bytes_api.write("a", of(100), idempotency_key="k")
    assert few_bytes_api.write("a", of(100), idempotency_key="k")["deduped"]
    over(few_bytes_api.try_write("a", {"data": 1}, idempotency_key="other"), 100)


def test_a_topic_that_is_full_says_so_before_the_quota(few_bytes_api: Api) -> None:
    """§2.5: 400, 422, then 429."""
    few_bytes_api.create_topic("a", discard="reject", cap_records=1)
    few_bytes_api.write("a", of(100))
    assert few_bytes_api.try_write("a", {"data": 1}).status == 422
    assert few_bytes_api.try_write("a", {"data": 1}, {"data": 2}).status == 400


def test_a_race_for_the_last_bytes_does_not_overshoot(few_bytes_api: Api, few_bytes_server: Server) -> None:
    """§1.12: atomic."""

    def write(number: int) -> int:
        with few_bytes_server.client() as client:
            return client.try_write(f"t{number % 3}", {"data": of(30)}).status

    statuses = run_together([lambda number=number: write(number) for number in range(10)])  # type: ignore[misc]
    assert statuses.count(429) == 7
    assert few_bytes_api.metrics()["bytes_live"] == 90


# ── sessions and streams ──────────────────────────────────────────────────────────────────────


def socket(server: Server, key: str | None = None) -> ClientConnection:
    host, port = server.address
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return connect(f"ws://{host}:{port}/v0/ws", additional_headers=headers, open_timeout=10, close_timeout=5)


def socket_refused(server: Server, key: str | None = None) -> None:
    with pytest.raises(InvalidStatus) as stopped:
        socket(server, key)
    response = stopped.value.response
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"
    assert loads(bytes(response.body or b""))["error"].keys() == {"code", "message"}


def stream_refused(server: Server, target: str, key: str | None = None) -> None:
    """§1.8: 429 without a detail."""
    with server.events(target, key=key) as stream:
        assert stream.refusal is not None
        expect_error(stream.refusal, 429, "throttled")


def soon(server: Server, target: str, key: str | None = None) -> SseStream:
    """A stream that is accepted as soon as a slot is free."""
    found: list[SseStream] = []

    def accepted() -> bool:
        found.append(server.events(target, key=key))
        return found[-1].refusal is None

    eventually(accepted, AGAIN_S)
    return found[-1]


@pytest.fixture(scope="module")
def few_streams_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two streams at once; caps by key are set and mean nothing without keys."""
    folder = tmp_path_factory.mktemp("streams")
    caps = {"max_sse_connections": 2, "max_sse_connections_per_key": 1, "max_inflight_per_key": 1}
    with Server(folder, **caps).start() as running:
        yield running


def test_watch_sessions_are_limited(tmp_path_factory: pytest.TempPathFactory) -> None:
    """§1.12: 429 with the limit, after the topics were looked for."""
    with Server(tmp_path_factory.mktemp("sessions"), max_watch_sessions=2).start() as server, server.client() as api:
        api.create_topic("t")
        urls = [api.watch({"t": {}})["stream_url"] for _ in range(2)]
        over(api.post("/v0/watch", {"topics": {"t": {}}}), 2)
        expect_error(api.post("/v0/watch", {"topics": {"no": {}}}), 404, "topic_not_found", {"topic": "no"})
        expect_error(api.post("/v0/watch", {"topics": {}}), 400, "invalid_request")
        for url in urls:
            with server.events(url) as stream:
                stream.expect("caught-up")
        assert api.metrics()["watch_sessions"] == 2


def test_streams_and_sockets_are_limited_together(few_streams_server: Server) -> None:
    """§1.12: 429 without a detail; a slot is free again as soon as its client left."""
    with few_streams_server.client() as api:
        topic = f"t{next(_numbers)}"
        api.create_topic(topic)
        urls = [api.watch({topic: {}})["stream_url"] for _ in range(4)]
        with few_streams_server.events(urls[0]) as first:
            first.expect("caught-up")
            with few_streams_server.events(urls[1]) as second:
                second.expect("caught-up")
                stream_refused(few_streams_server, urls[2])
                socket_refused(few_streams_server)
                assert api.metrics()["sse_connections"] == 2
                assert api.write(topic, 1)["head_seq"] == 1, "requests are no streams"
            with soon(few_streams_server, urls[2]) as third:
                third.expect("record", "caught-up")
                third.wire.abort()
            with soon(few_streams_server, urls[3]) as fourth:
                fourth.expect("record", "caught-up")
        eventually(lambda: api.metrics()["sse_connections"] == 0, AGAIN_S)
        with socket(few_streams_server), socket(few_streams_server):
            stream_refused(few_streams_server, urls[0])
            socket_refused(few_streams_server)
        with soon(few_streams_server, urls[0]) as again:
            again.expect("caught-up")
        eventually(lambda: api.metrics()["sse_connections"] == 0, AGAIN_S)


def test_other_refusals_of_a_stream_hold_no_slot(few_streams_server: Server) -> None:
    """§2.9: 406 and 404 come before the cap, and neither spends one."""
    with few_streams_server.client() as api:
        topic = f"t{next(_numbers)}"
        api.create_topic(topic)
        url = api.watch({topic: {}})["stream_url"]
        with socket(few_streams_server), socket(few_streams_server):
            with few_streams_server.events(url, headers={"Accept": "text/html"}) as stream:
                assert stream.refusal is not None
                expect_error(stream.refusal, 406, "not_acceptable")
            with few_streams_server.events("/v0/watch/wid_no") as stream:
                assert stream.refusal is not None
                expect_error(stream.refusal, 404, "not_found")
            for _ in range(3):
                stream_refused(few_streams_server, url)
        eventually(lambda: api.metrics()["sse_connections"] == 0, AGAIN_S)


def test_a_stream_that_ends_by_itself_gives_its_slot_back(few_streams_server: Server) -> None:
    """§1.12: also where the server ends it."""
    with few_streams_server.client() as api:
        for _ in range(4):
            topic = f"t{next(_numbers)}"
            api.create_topic(topic)
            with soon(few_streams_server, api.watch({topic: {}})["stream_url"]) as stream:
                stream.expect("caught-up")
                api.drop(topic)
                stream.expect("topic-deleted")
                assert stream.is_over()
        eventually(lambda: api.metrics()["sse_connections"] == 0, AGAIN_S)


# ── by key ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keyed")
    caps = {"max_sse_connections_per_key": 1, "max_inflight_per_key": 2}
    with Server(folder, api_keys="one,two,writer:w", **caps).start() as running:
        yield running


def test_streams_of_one_key_are_limited(keyed_server: Server) -> None:
    """§1.12: by key; another key has its own."""
    topic = f"t{next(_numbers)}"
    with keyed_server.client("one") as one, keyed_server.client("two") as two:
        one.create_topic(topic)
        urls = [one.watch({topic: {}})["stream_url"] for _ in range(2)]
        other = two.watch({topic: {}})["stream_url"]
        with keyed_server.events(urls[0], key="one") as stream:
            stream.expect("caught-up")
            stream_refused(keyed_server, urls[1], "one")
            stream_refused(keyed_server, f"{urls[1]}?token=one")
            socket_refused(keyed_server, "one")
            with keyed_server.events(other, key="two") as theirs:
                theirs.expect("caught-up")
                socket_refused(keyed_server, "two")
        with soon(keyed_server, urls[1], "one") as stream:
            stream.expect("caught-up")
        eventually(lambda: one.metrics()["sse_connections"] == 0, AGAIN_S)
        with socket(keyed_server, "one"):
            stream_refused(keyed_server, urls[0], "one")
            with socket(keyed_server, "two"):
                pass


def test_requests_in_flight_of_one_key_are_limited(keyed_server: Server) -> None:
    """§1.12: long polls count for as long as they wait; 429 without a detail, before the scope is looked at."""
    topic = f"t{next(_numbers)}"
    with keyed_server.client("one") as first, keyed_server.client("one") as second, keyed_server.client("one") as third:
        first.create_topic(topic)
        wait = dumps({"wait_ms": 20_000})
        for client in (first, second):
            client.begin("POST", topic_path(topic, "/diff"), wait, [JSON])
        eventually(lambda: third.get(topic_path(topic)).status == 429)
        for method, target in (
            ("GET", "/v0/topics"),
            ("GET", "/nowhere"),
            ("PATCH", topic_path(topic)),
            ("PUT", topic_path(topic)),
        ):
            expect_error(third.request(method, target, b"" if method != "GET" else None), 429, "throttled")
        assert third.get("/v0/health").status == 200, "probes are free"
        with keyed_server.client() as nobody:
            expect_error(nobody.get("/v0/topics"), 401, "unauthorized")
        with keyed_server.client("two") as other:
            assert expect_success(other.try_write(topic, {"data": 1}))["head_seq"] == 1
        for client in (first, second):
            assert [record["$seq"] for record in expect_success(client.end())["records"]] == [1]
        expect_success(third.get(topic_path(topic)))


def test_a_client_that_leaves_gives_its_request_back(keyed_server: Server) -> None:
    """§1.12: also where it was still sending its body, or was waiting for an answer."""
    topic = f"t{next(_numbers)}"
    with keyed_server.client("two") as api:
        api.create_topic(topic)
        full = 0
        for _ in range(20):
            with keyed_server.client("two") as waiting, keyed_server.client("two") as sending:
                waiting.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": 20_000}), [JSON])
                expects = [JSON, ("Content-Length", "500"), ("Expect", "100-continue")]
                sending.connection.send(sending.encode_request("POST", topic_path(topic), headers=expects))
                assert sending.connection.head().status == 100, "it is counted, and the one that was sent before it"
                sending.connection.send(b'{"rec')
                full += any(api.get(topic_path(topic)).status == 429 for _ in range(20))
                waiting.connection.abort()
                sending.connection.abort()
            eventually(lambda: api.get(topic_path(topic)).status == 200, AGAIN_S)
            if full == 4:
                break
        assert full == 4


def test_requests_in_flight_are_counted_before_scopes_are_looked_at(keyed_server: Server) -> None:
    """§1.4: 429, then 403; an upload that has not ended is a request in flight."""
    topic = f"t{next(_numbers)}"
    with (
        keyed_server.client("writer") as first,
        keyed_server.client("writer") as second,
        keyed_server.client("writer") as third,
    ):
        expect_error(third.get(topic_path(topic)), 403, "forbidden")
        body = dumps({"records": [{"data": 1}]})
        for client in (first, second):
            client.connection.send(client.encode_request("POST", topic_path(topic), body, [JSON])[:-5])
        eventually(lambda: third.get(topic_path(topic)).status == 429)
        expect_error(third.get(topic_path(topic)), 429, "throttled")
        for client in (first, second):
            client.connection.send(body[-5:])
        assert sorted(client.end().status for client in (first, second)) == [200, 201]
        expect_error(third.get(topic_path(topic)), 403, "forbidden")


def test_a_stream_is_no_request_in_flight(keyed_server: Server) -> None:
    """§1.12: streams and sockets release it at once."""
    topic = f"t{next(_numbers)}"
    with keyed_server.client("one") as api, keyed_server.client("one") as waiting:
        api.create_topic(topic)
        url = api.watch({topic: {}})["stream_url"]
        eventually(lambda: api.metrics()["sse_connections"] == 0, AGAIN_S)
        with keyed_server.events(url, key="one") as stream:
            stream.expect("caught-up")
            waiting.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": 20_000}), [JSON])
            for _ in range(5):
                expect_success(api.get(topic_path(topic)))
            api.write(topic, 1)
            expect_success(waiting.end())


def test_refused_requests_give_their_place_back(keyed_server: Server) -> None:
    """§1.12: every way to fail, more often than there are places."""
    topic = f"t{next(_numbers)}"
    with keyed_server.client("writer") as api:
        for _ in range(5):
            assert api.get(topic_path(topic)).status == 403
            assert api.post(topic_path(topic), {}).status == 400
            assert api.request("POST", topic_path(topic), b"x").status == 415
            assert api.request("POST", topic_path("-"), dumps({"records": [{"data": 1}]}), [JSON]).status == 400
            assert api.get("/nowhere").status == 404
            assert api.request("PATCH", topic_path(topic)).status == 405
        assert expect_success(api.try_write(topic, {"data": 1}), 201)["count"] == 1


def test_without_keys_no_request_is_counted_by_key(few_streams_server: Server) -> None:
    """§1.12: caps by key are inert in dev mode."""
    topic = f"t{next(_numbers)}"
    with few_streams_server.client() as api:
        api.create_topic(topic)
        eventually(lambda: api.metrics()["sse_connections"] == 0, AGAIN_S)
        with socket(few_streams_server), socket(few_streams_server):
            pass
        done = threading.Event()

        def wait() -> int:
            with few_streams_server.client() as client:
                found = len(client.diff(topic, wait_ms=20_000)["records"])
                done.set()
                return found

        def write() -> int:
            with few_streams_server.client() as client:
                while not done.wait(0.05):
                    client.write(topic, 1)
            return 1

        assert run_together([wait, wait, wait, write]) == [1, 1, 1, 1]
