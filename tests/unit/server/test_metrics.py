"""The metrics of a server: contract section 2.12, and further ones."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.server.bulk_fixtures import get, post, run_with_engine
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.server.metrics import FSYNC_BUCKETS_US, ServerMetrics
from tidelog.server.service import Service
from tidelog.testing import ManualClock
from tidelog.wal import shard as wal_shard

BUCKETS = ["50", "100", "250", "500", "1000", "5000", "10000", "50000", "100000", "+Inf"]


def words(text: str) -> list[str]:
    return text.split()


GAUGES = words(
    """topics topics_by_class routers records_live bytes_live topic_head_seq topic_earliest_seq topic_records_live
    topic_bytes_live topic_queue_ready topic_queue_in_flight topic_metrics_truncated queue_topics
    queue_leases_in_flight sse_connections watch_sessions ready recovery_progress wal_queue_depth wal_queue_depth_peak
    wal_read_only healthy checkpoint_age_seconds checkpoint_lagging_topics wal_uncovered_bytes background_failing
    pressure ready_topics deferred_topics sched_latency_ms
    group_lag_records group_lag_bytes group_lag_seconds
    channels_active channels_skipped channel_receivers build_info disk_free_bytes"""
)
PROCESS = {  # the names that other programs have too
    **dict.fromkeys(words("virtual_memory_bytes resident_memory_bytes start_time_seconds open_fds max_fds"), "gauge"),
    "cpu_seconds_total": "counter",
}
COUNTERS = words(
    """uptime_ms wal_frames_total wal_copied_frames_total wal_batches_total wal_fsyncs_total wal_bytes_written_total
    wal_rotations_total
    wal_submit_full_total topic_appended_total topic_read_total topic_evicted_total topic_gaps_total requests_total
    topic_queue_claimed_total topic_queue_acked_total topic_queue_nacked_total topic_queue_extended_total
    topic_queue_expired_total topic_queue_dead_lettered_total throttled_total
    group_hold_broken_total listener_failures_total corruptions_total background_runs_total background_failures_total
    rewrite_segments_total rewrite_records_removed_total rewrite_bytes_reclaimed_total rewrite_failures_total
    rewrite_refused_total compaction_runs_total compaction_read_bytes_total compaction_removed_records_total
    compaction_removed_bytes_total compaction_removed_tombstones_total
    channel_joins_total channel_leaves_total channels_deleted_total store_saves_total store_deletes_total
    store_loads_total store_sweeps_total message_log_flushes_total message_log_reads_total message_log_deletes_total
    message_log_upkeep_total message_log_entries_returned_total message_log_segments_rolled_total
    message_log_segments_evicted_total message_log_evicted_bytes_total message_log_crc_failures_total
    message_log_sealed_segment_truncations_total broadcasts_total broadcast_payload_bytes_total deliveries_total
    outbound_queue_full_total fifo_pushes_total fifo_pops_total fifo_clears_total fifo_seqs_passed_over_total
    message_log_hole_seqs_total hook_payloads_total auth_attempts_total limits_met_total"""
)
HISTOGRAMS = words(
    """wal_fsync_latency_us request_seconds store_save_duration_seconds store_load_duration_seconds
    message_log_append_duration_seconds message_log_flush_duration_seconds message_log_read_duration_seconds
    message_log_recovery_duration_seconds fifo_cursor_duration_seconds"""
)
JSON_KEYS = words(
    """topics topics_ephemeral topics_memory topics_disk topics_fsync routers records_live bytes_live queue_topics
    queue_leases_in_flight sse_connections watch_sessions channels channel_receivers ready replay_progress
    uptime_ms wal
    pressure ready_topics deferred_topics sched_latency_ms throttled_total health"""
)
WAL_KEYS = words(
    """fsyncs frames copied_frames batches bytes_written rotations queue_depth queue_depth_peak submit_full_total
    read_only fsync_count fsync_micros_total"""
)


class Scrape:
    def __init__(self, text: str) -> None:
        self.text = text
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.values, f"{key} twice"
                self.values[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        named = {"class" if key == "class_" else key: value for key, value in labels.items()}
        return self.values[f"tidelog_{name}", frozenset(named.items())]

    def labels(self, name: str, label: str) -> list[str]:
        return [dict(labels)[label] for known, labels in self.values if known == f"tidelog_{name}"]


async def scrape(world: ServerHarness) -> Scrape:
    got = await get(world, "/v0/metrics")
    assert (got.status, got.content_type) == (200, "text/plain; version=0.0.4")
    return Scrape(got.body.decode())


def test_every_metric_of_the_contract_has_its_type() -> None:
    async def scenario(world: ServerHarness) -> None:
        queue = world.topic("q", type="queue")
        queue.append(b"job")
        queue.group("g").commit(0)
        sample = await scrape(world)
        wanted = {f"tidelog_{name}": "gauge" for name in GAUGES} | {f"tidelog_{name}": "counter" for name in COUNTERS}
        wanted |= {f"tidelog_{name}": "histogram" for name in HISTOGRAMS}
        wanted |= {f"process_{name}": kind for name, kind in PROCESS.items()}
        assert sample.types == wanted
        shown = {line.partition(" ")[0].partition("{")[0] for line in sample.text.splitlines() if line[0] != "#"}
        assert {f"tidelog_{name}" for name in (*GAUGES, *COUNTERS)} - shown == {"tidelog_requests_total"}

    run_scenario(scenario)


def test_totals_cover_all_topics() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a", durability="fsync").append([b"12345", b"67890"])
        world.topic("b", durability="ephemeral").append(b"xyz")
        world.topic("q", type="queue").append([b"1", b"2", b"3"])
        world.topic("a").delete(seqs=[1])
        sample = await scrape(world)
        assert [sample("topics_by_class", class_=name) for name in ("ephemeral", "memory", "disk", "fsync")] == [
            1,
            0,
            1,
            1,
        ]
        assert (sample("topics"), sample("records_live"), sample("bytes_live")) == (3, 5, 11)
        assert (sample("queue_topics"), sample("queue_leases_in_flight"), sample("routers")) == (1, 0, 0)
        assert (sample("ready"), sample("recovery_progress"), sample("wal_read_only")) == (1, 1, 0)
        assert [sample(f"topic_{name}", topic="a") for name in ("head_seq", "earliest_seq", "records_live")] == [
            2,
            2,
            1,
        ]
        assert sample("topic_bytes_live", topic="a") == 5
        assert (sample("topic_queue_ready", topic="q"), sample("topic_queue_in_flight", topic="q")) == (3, 0)
        assert sample.labels("topic_queue_ready", "topic") == ["q"], "of queues alone"

    run_scenario(scenario)


def test_json_has_the_keys_of_the_contract_and_the_values_of_the_text() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a", durability="fsync").append([b"12345"] * 3)
        world.clock.tick(1_234)
        got = await get(world, "/v0/metrics", accept="text/html, application/json;q=0.1")
        assert (got.status, got.content_type) == (200, "application/json")
        assert list(got.json) == JSON_KEYS
        assert list(got.json["wal"]) == WAL_KEYS
        sample, summary = await scrape(world), got.json
        assert (summary["ready"], summary["replay_progress"], summary["uptime_ms"]) == (True, 1.0, 1_234)
        assert (summary["topics_fsync"], summary["topics_disk"]) == (1, 0)
        for name in ("topics", "records_live", "bytes_live", "queue_topics", "sse_connections", "watch_sessions"):
            assert sample(name) == summary[name]
        for name in ("fsyncs", "frames", "batches", "bytes_written", "rotations"):
            assert sample(f"wal_{name}_total") == summary["wal"][name]
        assert summary["wal"]["fsync_count"] == summary["wal"]["fsyncs"] > 0
        assert summary["wal"]["read_only"] is False

    run_scenario(scenario)


def test_fsync_histogram_is_cumulative_and_counts_every_fsync(tmp_path: Path) -> None:
    """Its buckets are the WAL's own, so nothing is counted twice or between two of them."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="fsync")
        for _ in range(5):
            topic.append(b"x")
        sample = await scrape(world)
        counts = [sample("wal_fsync_latency_us_bucket", le=le) for le in BUCKETS]
        assert counts == sorted(counts)
        assert counts[-1] == sample("wal_fsync_latency_us_count") == sample("wal_fsyncs_total") >= 5
        shard_stats = [shard.stats for shard in world.engine.shards]
        assert sample("wal_fsync_latency_us_sum") == sum(each.sync_us for each in shard_stats)
        assert counts[0] == sum(each.sync_us_counts[0] for each in shard_stats)

    assert FSYNC_BUCKETS_US == wal_shard.SYNC_BUCKETS_US == tuple(int(bound) for bound in BUCKETS[:-1])
    run_with_engine(scenario, tmp_path)


def test_copies_of_routers_are_counted_separately() -> None:
    async def scenario(world: ServerHarness) -> None:
        source = world.topic("a", durability="fsync")
        world.topic("b", durability="fsync")
        world.engine.router("r", "a", "b")
        before = await scrape(world)
        source.append([b"x", b"y", b"z"])
        assert world.engine.topic("b").state().head_seq == 3
        sample = await scrape(world)
        copied = sample("wal_copied_frames_total") - before("wal_copied_frames_total")
        assert copied == sum(shard.stats.copied_frames for shard in world.engine.shards) >= 2, "records and the pass"
        assert sample("wal_frames_total") - before("wal_frames_total") < copied + 3
        assert (await get(world, "/v0/metrics", accept="application/json")).json["wal"]["copied_frames"] == copied

    run_scenario(scenario)


def test_fsyncs_are_counted_in_the_buckets_of_their_durations() -> None:
    stats = wal_shard.ShardStats()
    for us in (50, 51, 100, 100_000, 100_001):
        stats.record_sync(us)
    assert stats.sync_us_counts == [1, 2, 0, 0, 0, 0, 0, 0, 1, 1], "a bound belongs to its own bucket"


def test_idle_wal_has_no_queue_and_a_failed_disk_is_read_only() -> None:
    async def scenario(world: ServerHarness) -> None:
        await post(world, "/v0/topics/a", [b'{"data":1}\n'] * 3)
        sample = await scrape(world)
        assert sample("wal_queue_depth") == 0
        assert sample("wal_queue_depth_peak") >= 1
        world.engine.shards[0]._latch.trip(OSError(5, "gone"), "a test")
        assert (await scrape(world))("wal_read_only") == 1

    run_scenario(scenario)


def test_traffic_is_counted_by_topic() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a", cap_records=3)
        write = {"records": [{"data": number} for number in range(5)], "idempotency_key": "k"}
        await world.ask("POST", "/v0/topics/a", write)
        await world.ask("POST", "/v0/topics/a", write)
        await post(world, "/v0/topics/a", [b'{"data":1}\n'])
        await world.ask("POST", "/v0/topics/a/diff", {})
        await world.ask("POST", "/v0/topics/a/diff", {"from_seq": 5})
        await get(world, "/v0/topics/a/records")
        sample = await scrape(world)
        assert sample("topic_appended_total", topic="a") == 6, "what was deduplicated was not written"
        assert sample("topic_read_total", topic="a") == 3 + 1 + 3
        assert sample("topic_gaps_total", topic="a") == 2
        assert sample("topic_evicted_total", topic="a") == 3

    run_scenario(scenario)


def test_dropped_topic_has_no_series_and_starts_from_zero() -> None:
    async def scenario(world: ServerHarness) -> None:
        for _ in range(2):
            await world.ask("POST", "/v0/topics/a", {"records": [{"data": 1}]})
            assert (await scrape(world))("topic_appended_total", topic="a") == 1
            await world.ask("DELETE", "/v0/topics/a")
            assert (await scrape(world)).labels("topic_head_seq", "topic") == []

    run_scenario(scenario)


def test_requests_are_counted_by_route_and_not_by_path() -> None:
    async def scenario(world: ServerHarness) -> None:
        for name in ("a", "b"):
            await world.ask("PUT", f"/v0/topics/{name}", {})
        world.clock.tick(3)
        await world.ask("GET", "/v0/topics/a")
        await world.ask("GET", "/nowhere/1")
        await world.ask("GET", "/nowhere/2")
        await world.ask("BREW1", "/v0/topics/a")
        await world.ask("BREW2", "/v0/topics/a")
        sample = await scrape(world)

        def count(route: str, method: str, status: str) -> float:
            labels = {"route": route, "method": method, "status": status}
            times = sample("request_seconds_count", **labels)
            assert times == sample("request_seconds_bucket", le="+Inf", **labels)
            assert times == sample("requests_total", **labels)
            return times

        assert count("/v0/topics/{topic}", "PUT", "201") == 2
        assert count("/v0/topics/{topic}", "GET", "200") == 1
        assert count("other", "GET", "404") == 2, "unknown paths create no series"
        assert count("/v0/topics/{topic}", "other", "405") == 2

    run_scenario(scenario)


def test_response_times_are_counted_in_their_buckets() -> None:
    async def scenario(world: ServerHarness) -> None:
        metrics = world.service.metrics
        for seconds in (0.0005, 0.0006, 2.0, 99.0):
            metrics.count_responses("/x", "GET", 200, seconds)
        sample = await scrape(world)
        labels = {"route": "/x", "method": "GET", "status": "200"}
        shown = [
            sample("request_seconds_bucket", le=le, **labels) for le in ("0.0005", "0.001", "1", "2.5", "30", "+Inf")
        ]
        assert shown == [1, 2, 2, 3, 3, 4]
        assert sample("request_seconds_sum", **labels) == pytest.approx(101.0011)

    run_scenario(scenario)


def test_only_the_first_thousand_topics_have_series() -> None:
    async def scenario(world: ServerHarness) -> None:
        for number in range(1_001):
            world.topic(f"t{number:04d}", durability="ephemeral")
            if number == 999:
                assert (await scrape(world))("topic_metrics_truncated") == 0
        sample = await scrape(world)
        assert (sample("topic_metrics_truncated"), sample("topics")) == (1, 1_001)
        assert sample.labels("topic_head_seq", "topic") == [f"t{number:04d}" for number in range(1_000)]
        assert sample.labels("topic_appended_total", "topic") == [f"t{number:04d}" for number in range(1_000)]

    run_scenario(scenario)


def test_open_streams_and_sessions_are_counted() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        await world.watch({"a": {}})
        world.service.auth.stream_limit.acquire(world.app.service.auth.keys.find("x") or _anybody())
        sample = await scrape(world)
        assert (sample("watch_sessions"), sample("sse_connections")) == (1, 1)
        world.service.auth.stream_limit.release(_anybody())
        assert (await scrape(world))("sse_connections") == 0

    run_scenario(scenario)


def _anybody() -> Any:
    from tidelog.server.auth import ANONYMOUS

    return ANONYMOUS


def test_metrics_are_available_before_recovery() -> None:
    """2.12: 200 always."""

    async def run() -> None:
        from tidelog.server.config import ServerConfig

        service = Service(ServerConfig(), ManualClock(), asyncio.get_running_loop())
        try:
            service.recovery_progress = 0.25
            sample = Scrape(ServerMetrics(service).prometheus_text().decode())
            assert (sample("ready"), sample("recovery_progress"), sample("topics")) == (0, 0.25, 0)
            assert ("tidelog_wal_fsyncs_total", frozenset()) not in sample.values, "there is no WAL yet"
            summary = ServerMetrics(service).summary()
            assert (list(summary), summary["ready"], list(summary["wal"])) == (JSON_KEYS, False, WAL_KEYS)
        finally:
            service.close()

    asyncio.run(run())


def test_labels_are_escaped_and_integers_have_no_fraction() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.service.metrics.count_responses('a"b\\c\nd', "GET", 200, 0.5)
        sample = await scrape(world)
        assert 'route="a\\"b\\\\c\\nd"' in sample.text
        assert sample("requests_total", route='a"b\\c\nd', method="GET", status="200") == 1
        assert re.search(r"^tidelog_topics 0$", sample.text, re.MULTILINE)
        assert re.search(r"^tidelog_uptime_ms 0$", sample.text, re.MULTILINE)

    run_scenario(scenario)


def test_scrape_expires_nothing_and_counts_as_no_read() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", ttl_ms=10)
        topic.append(b"x")
        world.clock.tick(50)
        fsyncs = (await scrape(world))("wal_fsyncs_total")
        assert (await scrape(world))("records_live") == 1
        assert (await scrape(world))("wal_fsyncs_total") == fsyncs, "and syncs nothing"
        assert topic.count == 0
        assert (await scrape(world))("topic_evicted_total", topic="a") == 1
        assert topic.state().last_read_ms is None

    run_scenario(scenario)
