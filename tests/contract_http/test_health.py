"""§2.12: health, readiness and metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract_http.api import Api
from tests.contract_http.server import Server

Name = Callable[[str], str]
Series = dict[tuple[str, str], float]
_LINE: Final = re.compile(r"(\w+)(?:\{(.*)\})? ([0-9.e+-]+|\+Inf|NaN)")
FIGURES: Final = {
    "topics",
    "topics_ephemeral",
    "topics_memory",
    "topics_disk",
    "topics_fsync",
    "routers",
    "records_live",
    "bytes_live",
    "queue_topics",
    "queue_leases_in_flight",
    "sse_connections",
    "watch_sessions",
    "ready",
    "replay_progress",
    "uptime_ms",
    "wal",
}
HEALTH: Final = {"ok", "checkpoint_age_ms", "wal_uncovered_bytes", "lagging_topics", "corruptions", "tasks"}  # ours
PACE: Final = {"pressure", "ready_topics", "deferred_topics", "sched_latency_ms", "throttled_total"}  # ours
WAL: Final = {
    "fsyncs",
    "frames",
    "copied_frames",  # ours
    "batches",
    "bytes_written",
    "rotations",
    "queue_depth",
    "queue_depth_peak",
    "submit_full_total",
    "read_only",
    "fsync_count",
    "fsync_micros_total",
}
TYPES: Final = {
    "tidelog_topics": "gauge",
    "tidelog_topics_by_class": "gauge",
    "tidelog_routers": "gauge",
    "tidelog_records_live": "gauge",
    "tidelog_bytes_live": "gauge",
    "tidelog_topic_head_seq": "gauge",
    "tidelog_topic_earliest_seq": "gauge",
    "tidelog_topic_records_live": "gauge",
    "tidelog_topic_bytes_live": "gauge",
    "tidelog_topic_metrics_truncated": "gauge",
    "tidelog_queue_topics": "gauge",
    "tidelog_queue_leases_in_flight": "gauge",
    "tidelog_sse_connections": "gauge",
    "tidelog_watch_sessions": "gauge",
    "tidelog_ready": "gauge",
    "tidelog_recovery_progress": "gauge",
    "tidelog_uptime_ms": "counter",
    "tidelog_wal_frames_total": "counter",
    "tidelog_wal_copied_frames_total": "counter",
    "tidelog_wal_batches_total": "counter",
    "tidelog_wal_fsyncs_total": "counter",
    "tidelog_wal_bytes_written_total": "counter",
    "tidelog_wal_rotations_total": "counter",
    "tidelog_wal_submit_full_total": "counter",
    "tidelog_wal_queue_depth": "gauge",
    "tidelog_wal_queue_depth_peak": "gauge",
    "tidelog_wal_read_only": "gauge",
    "tidelog_wal_fsync_latency_us": "histogram",
    "tidelog_pressure": "gauge",
    "tidelog_ready_topics": "gauge",
    "tidelog_deferred_topics": "gauge",
    "tidelog_sched_latency_ms": "gauge",
    "tidelog_throttled_total": "counter",
    "tidelog_healthy": "gauge",
    "tidelog_checkpoint_age_seconds": "gauge",
    "tidelog_checkpoint_lagging_topics": "gauge",
    "tidelog_wal_uncovered_bytes": "gauge",
    "tidelog_corruptions_total": "counter",
    "tidelog_background_runs_total": "counter",
    "tidelog_background_failures_total": "counter",
    "tidelog_background_failing": "gauge",
    "tidelog_rewrite_segments_total": "counter",
    "tidelog_rewrite_records_removed_total": "counter",
    "tidelog_rewrite_bytes_reclaimed_total": "counter",
    "tidelog_rewrite_failures_total": "counter",
    "tidelog_rewrite_refused_total": "counter",
}

PROCESS: Final = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
    "process_cpu_seconds_total",
}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose totals are those of this module."""
    with Server(tmp_path_factory.mktemp("alone")).start() as running:
        yield running


def text_of(api: Api) -> str:
    reply = api.get("/v0/metrics")
    assert reply.status == 200
    assert (reply.header("content-type") or "").startswith("text/plain; version=0.0.4")
    text = reply.body.decode()
    assert text.endswith("\n")
    return text


def series(api: Api) -> Series:
    """Every sample, by name and labels."""
    found: Series = {}
    for line in text_of(api).splitlines():
        if line and not line.startswith("#"):
            sample = _LINE.fullmatch(line)
            assert sample is not None, line
            name, labels, value = sample.groups()
            assert (name, labels or "") not in found, f"twice: {line}"
            found[name, labels or ""] = float(value)
    return found


@pytest.mark.parametrize("target", ["/v0/health", "/healthz"])
def test_health(api: Api, target: str) -> None:
    """§2.12: three keys, and a clock that runs."""
    first, second = (api.get(target) for _ in range(2))
    assert first.status == second.status == 200
    body = first.json()
    assert body.keys() == {"status", "version", "uptime_ms"}
    assert body["status"] == "ok"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", body["version"])
    assert isinstance(body["uptime_ms"], int)
    assert 0 <= body["uptime_ms"] <= second.json()["uptime_ms"]


@pytest.mark.parametrize("target", ["/v0/ready", "/readyz"])
def test_readiness(api: Api, topic: str, target: str) -> None:
    """§2.12: the number of topics is that of now."""
    before = api.get(target).json()
    health = before.pop("health")  # ours
    assert before == {"status": "ready", "wal_replay_complete": True, "topics": before["topics"]}
    assert health.keys() == {"ok", "checkpoint_age_ms", "lagging_topics", "corruptions", "failing"}
    assert health["ok"] is True
    assert health["checkpoint_age_ms"] >= 0
    assert (health["lagging_topics"], health["corruptions"], health["failing"]) == (0, 0, {})
    api.create_topic(topic)
    assert api.get(target).json()["topics"] == before["topics"] + 1
    api.drop(topic)
    assert api.get(target).json()["topics"] == before["topics"]


def test_metrics_are_json_for_who_accepts_that(api: Api) -> None:
    """§2.12: Accept contains application/json; else the text of Prometheus."""
    for accept in ("application/json", "text/html, application/json;q=0.9"):
        reply = api.get("/v0/metrics", [("Accept", accept)])
        assert (reply.status, reply.header("content-type")) == (200, "application/json")
        found = reply.json()
        assert found.keys() >= FIGURES | PACE
        assert found["wal"].keys() >= WAL
        assert found["health"].keys() == HEALTH
        assert {"sync", "ledger", "expiry"} <= found["health"]["tasks"].keys()
    for accept in ("text/plain", "*/*", "application/openmetrics-text"):
        reply = api.get("/v0/metrics", [("Accept", accept)])
        assert reply.status == 200
        assert (reply.header("content-type") or "").startswith("text/plain; version=0.0.4")


def test_the_types_of_metrics(api: Api, topic: str) -> None:
    """§2.12: names with our prefix, and a TYPE line each. Those of the process have the names that dashboards know."""
    api.create_topic(topic)
    text = text_of(api)
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
    told = {name: types.get(name) or types.get(name.removesuffix("_total")) for name in TYPES}
    assert told == TYPES
    names = {name for name, _ in series(api)}
    assert TYPES.keys() - {"tidelog_wal_fsync_latency_us"} <= names
    assert {name for name in names if not name.startswith("tidelog_")} == PROCESS


def test_totals(own_server: Server) -> None:
    """§2.12, C: values, in both forms, by class and by topic."""
    with own_server.client() as api:
        zero = {(f'class="{name}"', 0.0) for name in ("ephemeral", "memory", "disk", "fsync")}
        found = series(api)
        assert {
            (labels, value) for (name, labels), value in found.items() if name == "tidelog_topics_by_class"
        } == zero, "all four series, always"
        api.create_topic("a", durability="ephemeral")
        api.create_topic("b", durability="fsync")
        api.create_topic("c")
        api.create_topic("d", durability="memory", cap_records=2)
        api.create_topic("e")
        api.write("a", "xyz")
        api.write("b", 1, 2)
        api.write("d", 1, 2, 3)
        api.records("e", {"data": 1, "meta": {"m": 1}})
        api.remove("b", before_seq=2)
        found, figures = series(api), api.metrics()
        for key, value in {
            "topics": 5,
            "topics_ephemeral": 1,
            "topics_memory": 1,
            "topics_disk": 2,
            "topics_fsync": 1,
            "routers": 0,
            "records_live": 5,
            "bytes_live": 5 + 1 + 2 + 8,
            "queue_topics": 0,
            "queue_leases_in_flight": 0,
            "sse_connections": 0,
            "watch_sessions": 0,
            "ready": True,
            "replay_progress": 1,
        }.items():
            assert figures[key] == value, key
        for name, value in {
            "topics": 5,
            "routers": 0,
            "records_live": 5,
            "bytes_live": 16,
            "queue_topics": 0,
            "queue_leases_in_flight": 0,
            "sse_connections": 0,
            "watch_sessions": 0,
            "ready": 1,
            "recovery_progress": 1,
            "topic_metrics_truncated": 0,
            "wal_read_only": 0,
            "wal_submit_full_total": 0,
        }.items():
            assert found[f"tidelog_{name}", ""] == value, name
        by_class = {labels: value for (name, labels), value in found.items() if name == "tidelog_topics_by_class"}
        assert by_class == {'class="ephemeral"': 1, 'class="memory"': 1, 'class="disk"': 2, 'class="fsync"': 1}
        for topic, head, earliest, records, size in (("a", 1, 1, 1, 5), ("b", 2, 2, 1, 1), ("d", 3, 2, 2, 2)):
            label = f'topic="{topic}"'
            assert found["tidelog_topic_head_seq", label] == head
            assert found["tidelog_topic_earliest_seq", label] == earliest
            assert found["tidelog_topic_records_live", label] == records
            assert found["tidelog_topic_bytes_live", label] == size
        assert not [key for key in found if key[0].startswith("tidelog_topic_queue_")], "queues only"


def test_the_log_counts_its_work(api: Api, topic: str) -> None:
    """§2.12, C: counters rise, the queue is empty at rest, and the histogram is of the syncs."""
    api.create_topic(topic, durability="fsync")
    before = series(api)
    for _ in range(5):
        api.write(topic, "x" * 100)
    after, figures = series(api), api.metrics()
    for name in ("frames", "batches", "fsyncs", "bytes_written"):
        key = (f"tidelog_wal_{name}_total", "")
        assert after[key] > before[key], name
    assert after["tidelog_wal_fsyncs_total", ""] >= before["tidelog_wal_fsyncs_total", ""] + 5
    assert after["tidelog_wal_bytes_written_total", ""] >= before["tidelog_wal_bytes_written_total", ""] + 500
    assert after["tidelog_wal_queue_depth", ""] == figures["wal"]["queue_depth"] == 0
    assert after["tidelog_wal_queue_depth_peak", ""] >= 1
    assert figures["wal"]["fsync_count"] == figures["wal"]["fsyncs"]
    assert figures["wal"]["read_only"] is False


def test_a_write_is_a_frame_from_the_first_on(tmp_path: Path) -> None:
    """§3.6: one append, one frame. What a topic of class disk puts on record before its first write is no append."""
    with Server(tmp_path).start() as server, server.client() as api:
        for durability in ("disk", "fsync", "memory"):
            api.create_topic(durability, durability=durability)
            for _ in range(2):
                before = api.metrics()["wal"]["frames"]
                api.write(durability, 1)
                assert api.metrics()["wal"]["frames"] == before + 1, durability


def test_the_histogram_of_syncs(api: Api, topic: str) -> None:
    """§2.12, C: ten bounds, cumulative, and `_count == fsyncs_total`."""
    api.create_topic(topic, durability="fsync")
    api.write(topic, 1)
    text = text_of(api)
    buckets = re.findall(r'^tidelog_wal_fsync_latency_us_bucket\{le="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    bounds = [float(bound) for bound, _ in buckets]
    assert bounds == [50, 100, 250, 500, 1000, 5000, 10000, 50000, 100000, float("inf")]
    counts = [float(value) for _, value in buckets]
    assert counts == sorted(counts)
    found = series(api)
    assert counts[-1] == found["tidelog_wal_fsync_latency_us_count", ""] == found["tidelog_wal_fsyncs_total", ""]
    assert found["tidelog_wal_fsync_latency_us_sum", ""] > 0


def test_streams_and_sessions_are_counted_in_both_forms(own_server: Server) -> None:
    """§2.12: `sse_connections` are watch streams and sockets."""
    with own_server.client() as api:
        api.write("watched", 1)
        sessions = api.metrics()["watch_sessions"]
        target = api.watch({"watched": {}})["stream_url"]
        with own_server.events(target) as stream:
            stream.expect("record", "caught-up")
            found, figures = series(api), api.metrics()
            assert found["tidelog_sse_connections", ""] == figures["sse_connections"] == 1
            assert found["tidelog_watch_sessions", ""] == figures["watch_sessions"] == sessions + 1
        api.drop("watched")
        assert not [key for key in series(api) if 'topic="watched"' in key[1]], "a topic takes its series with it"


def test_queue_series_are_of_queues(api: Api, name: Name) -> None:
    """§2.12, C."""
    queue = name("queue")
    before = api.metrics()["queue_topics"]
    api.create_topic(queue, type="queue")
    found = series(api)
    assert api.metrics()["queue_topics"] == before + 1
    of_queues = {labels for metric, labels in found if metric == "tidelog_topic_queue_ready"}
    assert f'topic="{queue}"' in of_queues
    assert found["tidelog_topic_queue_in_flight", f'topic="{queue}"'] == 0
    api.drop(queue)
