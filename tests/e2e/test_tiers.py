"""A server with a cold tier beside a real S3 server that hangs, goes away and comes back, and kills of both."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.contract_http.api import Api, expect_success
from tests.contract_http.client import ConnectionEnded, Reply
from tests.contract_http.server import Server
from tests.contract_http.sse_client import Event, SseStream
from tests.kit.s3 import S3Server
from tests.kit.waiting import eventually

from tidelog.engine.check import check_directory

SETTINGS = {
    "segment_max_events": 50,
    "hot_retain_segments": 1,
    "cold_timeout_ms": 1_000,
    "cold_cache_bytes": 0,
    "cold_rate_bytes": 0,
}


@pytest.fixture
def server(tmp_path: Path, own_s3_server: S3Server) -> Iterator[Server]:
    with Server(tmp_path / "server", cold_dir=own_s3_server.url("tier"), **SETTINGS) as server:
        yield server


def fill(api: Api, topic: str, segments: int) -> None:
    for number in range(segments):
        api.write(topic, *({"n": number * 50 + i, "text": "x" * 100} for i in range(50)))


def relocate(api: Api, topic: str, **body: object) -> dict[str, Any]:
    return expect_success(api.post(f"/v0/topics/{topic}/relocate", dict(body)))


def tiers_of(api: Api, topic: str) -> list[str]:
    return [row["tier"] for row in expect_success(api.get(f"/v0/topics/{topic}/segments"))["segments"]]


def test_a_store_that_hangs_delays_only_reads_of_history(server: Server, own_s3_server: S3Server) -> None:
    server.start()
    with server.client() as api:
        check_hanging_store(server, own_s3_server, api)
    assert "tidelog/secret" not in server.log


def check_hanging_store(server: Server, own_s3_server: S3Server, api: Api) -> None:
    api.create_topic("orders", durability="fsync")
    fill(api, "orders", 6)
    # A store of a busy machine may take longer than the second that it has here; the next pass moves what is left.
    eventually(lambda: relocate(api, "orders") and tiers_of(api, "orders") == ["cold"] * 5 + ["hot"])
    assert len(api.seqs("orders", limit=1000)) == 300
    data = api.get("/v0/topics/orders/segments/1/data", headers=[("Range", "bytes=10-29")])
    assert (data.status, len(data.body)) == (206, 20)
    status = expect_success(api.get("/v0/tiers"))
    assert status["store"] == "s3://tidelog-tests/tier"
    assert status["cold_segments"] == 5
    assert status["reads"] > 0
    watch = api.watch({"orders": {"from_seq": 300}})
    own_s3_server.signal(signal.SIGSTOP)
    try:
        with server.events(watch["stream_url"]) as stream, ThreadPoolExecutor(16) as pool:
            history = [pool.submit(post, server, "/v0/topics/orders/diff", {"from_seq": 0}) for _ in range(12)]
            for n in range(30):  # while they wait
                done = api.write("orders", {"n": 300 + n})
                assert done["head_seq"] == 301 + n
                assert next_record(stream).seqs == [301 + n]
                assert api.seqs("orders", from_seq=295) == list(range(296, 302 + n))
            for answer in [each.result() for each in history]:
                assert answer is not None
                assert answer.status == 503
                error = answer.json()["error"]
                assert error["code"] == "store_unavailable"
                assert "retry" in error["message"]
                assert "tidelog/secret" not in error["message"]
        fill(api, "orders", 2)
    finally:
        own_s3_server.signal(signal.SIGCONT)
    eventually(lambda: _reads(api))
    assert len(api.seqs("orders", limit=1000)) == 430


def _reads(api: Api) -> bool:
    return api.post("/v0/topics/orders/diff", {"from_seq": 0}).status == 200


@pytest.mark.slow
def test_kills_lose_nothing_and_leave_nothing(server: Server, own_s3_server: S3Server) -> None:
    written = 0
    for turn in range(3):
        server.start()
        with server.client() as api:
            if turn == 0:
                api.create_topic("orders", durability="fsync")
            fill(api, "orders", 3)
        written += 150
        if turn == 1:
            own_s3_server.stop()  # in the middle of what is being moved
        with ThreadPoolExecutor(1) as pool:
            before = len(list(_objects(own_s3_server)))
            moving = pool.submit(post, server, "/v0/topics/orders/relocate", {})
            eventually(partial(_has_more_objects, own_s3_server, before, moving), 20)
            server.kill()
            moving.result()
        if turn == 1:
            own_s3_server.start()
    server.start()
    with server.client() as api:
        assert len(api.seqs("orders", limit=1000)) == written
        if own_s3_server.kind == "moto":
            return
        relocate(api, "orders")
        assert api.seqs("orders", limit=1000) == list(range(1, written + 1))
        cold = [row for row in tiers_of(api, "orders") if row != "hot"]
        eventually(lambda: len(list(_objects(own_s3_server))) == len(cold))
    server.stop()
    found = check_directory(str(server.data), full=True, cold=own_s3_server.url("tier"))
    assert [finding for finding in found if finding.damage] == []


def _objects(server: S3Server) -> Iterator[Path]:
    return (path for path in (server.directory / "tidelog-tests").rglob("seg-*") if path.is_file())


def _has_more_objects(server: S3Server, before: int, moving: Future[Any]) -> bool:
    return moving.done() or len(list(_objects(server))) > before


def post(server: Server, path: str, body: dict[str, Any]) -> Reply | None:
    """A request on a connection of its own; None if the server was killed."""
    client = server.client()
    try:
        return client.post(path, body)
    except (OSError, ConnectionEnded):
        return None
    finally:
        client.close()


def next_record(stream: SseStream) -> Event:
    """The next event with records."""
    while (event := stream.next()).name != "record":
        pass
    return event
