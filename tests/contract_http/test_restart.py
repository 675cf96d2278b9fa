"""§1.2, §2.12, §4: what a stop keeps, what a kill keeps, and how a server goes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.contract_http.api import Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, Client, ConnectionEnded, dumps, loads
from tests.contract_http.server import Server
from tests.contract_http.test_topics import DEFAULTS, OTHERS
from tests.kit.waiting import eventually, run_together


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One directory of this test, served."""
    with Server(tmp_path).start() as running:
        yield running


def seqs_of(api: Api, topic: str, from_seq: int = 0) -> list[int]:
    """Every seq behind a cursor, page by page."""
    found: list[int] = []
    while True:
        page = api.diff(topic, from_seq=from_seq, limit=1000)
        found += [record["$seq"] for record in page["records"]]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


# ── a clean stop ──────────────────────────────────────────────────────────────────────────────


def test_what_a_clean_restart_keeps(server: Server) -> None:
    """§4: records by class, configs, floors with their reasons, deletes, keys; not sessions and recency."""
    with server.client() as api:
        for durability in ("ephemeral", "memory", "disk", "fsync"):
            api.create_topic(f"class-{durability}", durability=durability)
            api.records(f"class-{durability}", *({"data": [durability, number], "tag": "t"} for number in range(5)))
            api.remove(f"class-{durability}", before_seq=2)
            api.write(f"class-{durability}", "keyed", idempotency_key="k")
        api.create_topic("others", **OTHERS)
        api.create_topic("queue", type="queue", max_deliveries=4)
        api.create_topic("capped", cap_records=2)
        api.write("capped", *range(5))
        api.create_topic("expired", ttl_ms=30)
        api.write("expired", 1, 2)
        eventually(lambda: api.state("expired")["count"] == 0)
        api.create_topic("holed")
        api.records("holed", *({"data": number, "tag": str(number % 2)} for number in range(6)))
        api.remove("holed", match="1")
        api.create_topic("dropped")
        api.drop("dropped")
        api.write("again", *range(9))
        api.drop("again")
        api.write("again", "second life")
        full = {"data": {"é": [None, 1.5]}, "tag": "t", "node": "n", "meta": {"m": "v"}}
        api.records("whole", full)
        before = api.diff("whole", include_tags=True)["records"]
        wid = api.watch({"class-disk": {}})["stream_url"]
        api.state("class-disk", "")
        bytes_before = {name: api.state(name)["bytes"] for name in ("class-disk", "class-fsync", "holed", "capped")}
    server.restart()
    with server.client() as api:
        for durability in ("disk", "fsync"):
            topic = f"class-{durability}"
            now = api.state(topic)
            assert (now["head_seq"], now["earliest_seq"], now["count"]) == (6, 2, 5)
            assert now["config"] == {**DEFAULTS, "durability": durability, "durable": durability == "fsync"}
            assert [record["data"] for record in api.diff(topic)["records"]] == [
                *([durability, number] for number in range(1, 5)),
                "keyed",
            ]
        now = api.state("class-ephemeral")
        assert (now["head_seq"], now["count"], now["bytes"]) == (6, 0, 0), "seqs continue, records are gone"
        assert now["config"]["durability"] == "ephemeral"
        assert api.write("class-ephemeral", 1)["first_seq"] == 7
        now = api.state("class-memory")
        assert now["head_seq"] <= 6
        known = [*(["memory", number] for number in range(5)), "keyed"]
        for record in api.diff("class-memory")["records"]:
            assert record["data"] == known[record["$seq"] - 1], "nothing is invented"
        assert api.state("others")["config"] == OTHERS
        assert api.state("queue")["type"] == "queue"
        assert api.state("queue")["config"]["max_deliveries"] == 4
        tomb = api.diff("capped")["tombstone"]
        assert (tomb["reason"], tomb["gap_from"], tomb["gap_to"]) == ("cap", 1, 3)
        assert api.seqs("capped", from_seq=3) == [4, 5]
        tomb = api.diff("expired")["tombstone"]
        assert (tomb["reason"], tomb["gap_from"], tomb["gap_to"]) == ("ttl", 1, 2)
        assert api.seqs("holed") == [1, 3, 5], "a deleted gap is still silent"
        assert not api.exists("dropped")
        assert api.diff("again")["records"][0]["data"] == "second life"
        assert api.state("again")["head_seq"] == 1
        assert api.diff("whole", include_tags=True)["records"] == before, "every field, and its time"
        assert {name: api.state(name)["bytes"] for name in bytes_before} == bytes_before
        for durability in ("memory", "disk", "fsync"):
            wrote = api.write(f"class-{durability}", "keyed", idempotency_key="k")
            assert (wrote["deduped"], wrote["first_seq"]) == (True, 6), "a key is kept with its record"
        assert not api.write("class-ephemeral", "keyed", idempotency_key="k")["deduped"], "and is gone with it"
        expect_error(api.get(wid), 404, "not_found")
        assert api.state("others")["last_read_ts"] is None
        assert api.state("others")["effective_priority"] == -7


def test_a_cursor_goes_on_after_a_restart(server: Server) -> None:
    """§4: behind it comes exactly what it had not seen."""
    with server.client() as api:
        api.write("t", *range(10))
        first = api.diff("t", limit=4)
        assert first["next_from_seq"] == 4
    server.restart()
    with server.client() as api:
        api.write("t", "new")
        assert seqs_of(api, "t", 4) == list(range(5, 12))
        url = api.watch({"t": {"from_seq": 4}})["stream_url"]
        with server.events(url) as stream:
            record, _ = stream.expect("record", "caught-up")
            assert record.seqs == list(range(5, 12))


def test_one_of_many_creates_and_one_topic_is_there_after_a_restart(server: Server) -> None:
    """C."""

    def put() -> int:
        with server.client() as client:
            return client.put(topic_path("one"), {"priority": 3}).status

    assert sorted(run_together([put] * 8)) == [200] * 7 + [201]
    server.restart()
    with server.client() as api:
        (row,) = api.topics()["topics"]
        assert (row["topic"], row["effective_priority"]) == ("one", 3)


def test_a_stop_keeps_what_was_acknowledged_under_load(server: Server) -> None:
    """§1.2: requests under way are answered, and every acknowledged record of disk and fsync is there."""
    acked: dict[str, list[int]] = {}
    stopped = Event()

    def load(who: int) -> None:
        topic = f"t{who}"
        mine = acked.setdefault(topic, [])
        with server.client() as client, suppress(OSError, ConnectionEnded, AssertionError):
            client.create_topic(topic, durability="fsync" if who % 2 else "disk")
            while not stopped.is_set():
                mine += client.write(topic, who, who)["seqs"]

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(load, who) for who in range(4)]
        eventually(lambda: len(acked) == 4 and all(len(mine) > 40 for mine in acked.values()), 30)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        stopped.set()
        for task in tasks:
            task.result(30)
    server.start()
    with server.client() as api:
        for topic, mine in acked.items():
            found = seqs_of(api, topic)
            assert found == list(range(1, len(found) + 1))
            assert set(mine) <= set(found)


# ── how it goes ───────────────────────────────────────────────────────────────────────────────


def test_shutdown_notifies_streams_and_sockets_and_exits_with_0(server: Server) -> None:
    """§1.2, §3.8, §3.9, C: the shutdown frame, the clean end, in well under 5 s; idle connections hold up nothing."""
    host, port = server.address
    with server.client() as api, server.client() as idle:
        api.write("t", 1)
        assert idle.get("/v0/health").status == 200
        streams = [server.events(api.watch({"t": {}})["stream_url"]) for _ in range(3)]
        with connect(f"ws://{host}:{port}/v0/ws", open_timeout=10) as ws, connect(f"ws://{host}:{port}/v0/ws") as bare:
            ws.send(dumps({"op": "subscribe", "topic": "t", "tail": True}).decode())
            assert [loads(ws.recv(10))["op"] for _ in range(2)] == ["subscribed", "caught_up"]
            for stream in streams:
                stream.expect("record", "caught-up")
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            for stream in streams:
                event = stream.next()
                assert event.name == "error"
                assert list(event.data) == ["code", "message"]
                assert event.data["code"] == "server_shutting_down"
                assert event.data["message"]
                assert event.id == {"t": 1}
                assert stream.is_over()
                stream.wire.close()
            for socket in (ws, bare):
                said = loads(socket.recv(10))
                assert (said["op"], said["code"]) == ("error", "server_shutting_down")
                assert said.get("request_id") is None
                assert said["message"]
                with pytest.raises(ConnectionClosed):
                    socket.recv(10)
        assert server.wait() == 0
        assert time.monotonic() - began < 10, "as long as what is under way may take: these were told to end"


def test_a_long_poll_under_way_gets_an_answer(server: Server) -> None:
    """§1.2: what was begun is drained, within 10 s; a poll ends early rather than being cut off."""
    with server.client() as api, server.client() as other:
        api.create_topic("t")
        other.begin("POST", topic_path("t", "/diff"), dumps({"wait_ms": 30_000}), [JSON])
        assert other.connection.is_quiet(0.2)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        reply = other.end()
        if reply.status == 200:
            assert expect_success(reply)["records"] == []
        else:
            expect_error(reply, 503, "shutting_down")
        assert server.wait() == 0
        assert time.monotonic() - began < 30, "as long as the poll would have waited"


def test_no_new_connection_is_taken_while_it_goes(server: Server) -> None:
    """§1.2: stop accepting comes first."""
    with server.client() as api:
        api.write("t", 1)
    server.signal(signal.SIGTERM)

    def refuses() -> bool:
        try:
            with Client(server.address, timeout_s=2) as client:
                client.get("/v0/health")
        except (OSError, ConnectionEnded):
            return True
        return False

    eventually(refuses)
    assert server.wait() == 0


# ── SIGKILL ───────────────────────────────────────────────────────────────────────────────────


def test_a_kill_under_load_loses_no_acknowledged_fsync_write_and_reuses_no_seq(server: Server) -> None:
    """§4, §3.1, C: three kills. fsync: every acked record, no gap, head exact. disk: a dense prefix, and no seq that
    was acknowledged is ever given again. Method: every acknowledged seq is remembered with its data over all lives."""
    kept: dict[str, dict[int, Any]] = {"fsync-0": {}, "fsync-1": {}, "disk-0": {}, "disk-1": {}}
    issued: dict[str, set[int]] = {topic: set() for topic in kept}
    cursors = dict.fromkeys(kept, 0)
    seen: dict[str, list[int]] = {topic: [] for topic in kept}
    with server.client() as api:
        for topic in kept:
            api.create_topic(topic, durability=topic.partition("-")[0])
    for life in range(3):
        alive = Event()
        alive.set()

        def load(topic: str, life: int = life, alive: Event = alive) -> None:
            number = 0
            with server.client() as client, suppress(OSError, ConnectionEnded):
                while alive.is_set():
                    datas = [[life, number, row] for row in range(3)]
                    wrote = client.write(topic, *datas)
                    assert not issued[topic] & set(wrote["seqs"]), "a seq was given twice"
                    issued[topic].update(wrote["seqs"])
                    kept[topic].update(zip(wrote["seqs"], datas, strict=True))
                    number += 1

        with ThreadPoolExecutor(4) as pool:
            before = {topic: len(held) for topic, held in kept.items()}
            tasks = [pool.submit(load, topic) for topic in kept]
            eventually(lambda before=before: all(len(kept[topic]) > before[topic] + 60 for topic in kept), 60)  # type: ignore[misc]
            server.kill()
            alive.clear()
            for task in tasks:
                task.result(30)
        server.start()
        with server.client() as api:
            for topic, acked in kept.items():
                found: dict[int, Any] = {}
                at = 0
                while True:
                    page = api.diff(topic, from_seq=at, limit=1000)
                    assert page["tombstone"] is None
                    found |= {record["$seq"]: record["data"] for record in page["records"]}
                    at = page["next_from_seq"]
                    if page["caught_up"]:
                        break
                if topic.startswith("fsync"):
                    assert acked.items() <= found.items(), "acknowledged, then lost"
                    assert list(found) == list(range(1, len(found) + 1)), "no gap"
                    assert api.state(topic)["head_seq"] == len(found), "the head is exact"
                    seen[topic] += seqs_of(api, topic, cursors[topic])
                    cursors[topic] = at
                else:
                    for seq, data in found.items():
                        assert acked.get(seq, data) == data, "another record under a seq that was acknowledged"
                    lost = sorted(set(acked) - set(found))
                    for seq in lost:
                        del acked[seq]  # allowed once; it must not come back as something else
                    assert api.state(topic)["head_seq"] >= max(issued[topic]), (
                        "an acknowledged seq is never given again"
                    )
                    assert api.state(topic)["head_seq"] <= max(issued[topic]) + 256 + 9, "it may jump by 256"
    for topic in ("fsync-0", "fsync-1"):
        assert seen[topic] == list(range(1, len(seen[topic]) + 1)), "a cursor misses nothing and repeats nothing"


def test_a_kill_undoes_no_change_of_a_topic(server: Server) -> None:
    """§4: create, configure and drop are durable before they are acknowledged; deletes of fsync topics too."""
    with server.client() as api:
        api.write("dropped", 1)
        api.create_topic("kept", durability="fsync", cap_records=50)
        api.records("kept", *({"data": number, "tag": "ab"[number % 2]} for number in range(6)))
        api.configure("kept", durability="fsync", cap_records=5, priority=8)
        api.remove("kept", match="a")
        api.remove("kept", before_seq=3)
        api.drop("dropped")
        api.create_topic("made", ttl_ms=77_000)
        for durability in ("ephemeral", "memory"):
            api.create_topic(durability, durability=durability)
            api.write(durability, *range(5))
        server.kill()
    server.start()
    with server.client() as api:
        assert not api.exists("dropped")
        assert api.state("made")["config"]["ttl_ms"] == 77_000
        assert api.state("made")["head_seq"] == 0
        now = api.state("kept")
        assert (now["config"]["cap_records"], now["config"]["priority"]) == (5, 8)
        found = api.diff("kept")
        assert [record["$seq"] for record in found["records"]] == [4, 6]
        assert found["tombstone"]["gap_to"] == 1, "the cap took one; what was deleted stays silent"
        assert (now["head_seq"], now["count"]) == (6, 2)
        assert api.write("kept", 1)["first_seq"] == 7
        assert api.diff("ephemeral")["records"] == []
        for durability in ("ephemeral", "memory"):
            assert api.state(durability)["config"]["durability"] == durability
            found = api.diff(durability)["records"]
            assert [record["data"] for record in found] == list(range(len(found))), "any prefix, nothing invented"


def test_losses_keep_their_reasons_over_a_kill(server: Server) -> None:
    """§3.3: a floor that cannot be computed again is durable before it is seen."""
    with server.client() as api:
        api.create_topic("ttl", ttl_ms=30, durability="fsync")
        api.write("ttl", 1, 2)
        eventually(lambda: api.state("ttl")["count"] == 0)
        api.create_topic("bytes", cap_bytes=10, durability="fsync")
        api.write("bytes", *["123"] * 4)
        shown = {topic: api.diff(topic) for topic in ("ttl", "bytes")}
        server.kill()
    server.start()
    with server.client() as api:
        api.configure("ttl", durability="fsync")  # nothing expires any more; what had expired stays gone
        for topic, before in shown.items():
            after = api.diff(topic)
            assert after["tombstone"] == before["tombstone"]
            assert after["records"] == before["records"]
            assert after["earliest_seq"] == before["earliest_seq"]


# ── readiness ─────────────────────────────────────────────────────────────────────────────────


def test_client_is_served_as_soon_as_the_port_is_open(tmp_path: Path) -> None:
    """§2.12: data routes are not gated on readiness: a start that takes a moment is waited for."""
    server = Server(tmp_path)
    for number in range(1, 4):
        server.launch()
        server.await_port()
        with server.client() as api:
            assert api.write("t", number)["head_seq"] >= number
        server.stop()


def test_readiness_reports_replay_progress(tmp_path: Path) -> None:
    """§2.12: 503 `not_ready` with `replay_progress` until the log is read, then 200; health is 200 all the time."""
    with Server(tmp_path).start() as server:
        with server.client() as api:
            for number in range(20):
                assert api.write_raw(f"t{number}", 10_000).status == 201
        server.kill()
        server.launch()
        server.await_port()
        progress: list[float] = []
        with server.client() as api:
            while (reply := api.get("/v0/ready")).status != 200:
                error = reply.json()["error"]
                expect_error(reply, 503, "not_ready", {"replay_progress": error["detail"]["replay_progress"]})
                progress.append(error["detail"]["replay_progress"])
                assert api.get("/v0/health").json()["status"] == "ok"
                if (early := api.get(topic_path("t0"))).status != 200:
                    expect_error(early, 503, "not_ready", early.json()["error"]["detail"])
                figures = api.get("/v0/metrics", [("Accept", "application/json")])
                assert figures.status == 200, "metrics are 200 always"
            ready = reply.json()
            health = ready.pop("health")
            assert ready == {"status": "ready", "wal_replay_complete": True, "topics": 20}
            assert health.keys() == {"ok", "checkpoint_age_ms", "lagging_topics", "corruptions", "failing"}
            assert (health["ok"], health["corruptions"], health["failing"]) == (True, 0, {})
            assert progress, "200,000 records are not read in no time"
            assert all(0 <= at <= 1 for at in progress)
            assert progress == sorted(progress), "what was reached is not taken back"
            assert api.state("t19")["head_seq"] >= 10_000
