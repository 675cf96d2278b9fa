"""[hot] Figures of queues: what they hold, asked when somebody scrapes, and what clients did with them, counted.

Figures of channels: what their manager counts, told as Prometheus wants it. The names are the manager's own.

[hot] Figures of a server, for Prometheus and as JSON.

Counting happens on the event loop's thread, in plain integers and without a lock: about half a microsecond a
request. Everything else is read from the engine when somebody asks, so a server that nobody watches pays nothing.
Whoever asks makes nothing expire: the figures are of what is held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tidelog.channels import ChannelManager
from tidelog.channels.metrics import DURATION_BOUNDS_S, SUCCESS, DurationHistogram
from tidelog.engine import Engine, HealthState, TopicInfo
from tidelog.errors import NotAQueue, TopicNotFound

if TYPE_CHECKING:
    from tidelog.server.service import Service


class QueueTotals(NamedTuple):
    """What one queue holds."""

    ready: int
    in_flight: int
    dead_lettered: int
    expired: int


class QueueCounters:
    """What clients did with one queue since the server started."""

    __slots__ = ("acked", "claimed", "extended", "nacked")

    def __init__(self) -> None:
        self.claimed = self.acked = self.nacked = self.extended = 0


class QueueMetrics:
    """Counted on the event loop's thread, told on any."""

    def __init__(self) -> None:
        self._counters: dict[str, QueueCounters] = {}

    def _counters_for(self, topic: str) -> QueueCounters:
        row = self._counters.get(topic)
        if row is None:
            row = self._counters[topic] = QueueCounters()
        return row

    def count_claimed(self, topic: str, jobs: int) -> None:
        self._counters_for(topic).claimed += jobs

    def count_acked(self, topic: str, jobs: int) -> None:
        self._counters_for(topic).acked += jobs

    def count_nacked(self, topic: str, jobs: int) -> None:
        self._counters_for(topic).nacked += jobs

    def count_extended(self, topic: str, jobs: int) -> None:
        self._counters_for(topic).extended += jobs

    def forget_dropped(self, known: Collection[str]) -> None:
        """Drop the figures of queues that are gone: one made again starts from nothing."""
        for name in list(self._counters):
            if name not in known:
                self._counters.pop(name, None)

    def totals(self, engine: Engine, topics: Sequence[TopicInfo]) -> dict[str, QueueTotals]:
        """What every queue holds now. A lease that has run out is none."""
        found: dict[str, QueueTotals] = {}
        for state in topics:
            topic = engine.find(state.topic) if state.config.type == "queue" else None
            if topic is None:
                continue  # a log, or dropped meanwhile
            try:
                queue = topic.queue()
                found[state.topic] = QueueTotals(*queue.counts(), queue.expired_leases)
            except (NotAQueue, TopicNotFound):
                continue  # dropped meanwhile, and perhaps made again as a log
        return found

    def collect(self, queues: Sequence[tuple[str, QueueTotals]]) -> Iterator[Metric]:
        """Series by queue."""
        nothing = QueueCounters()
        rows = [(name, held, self._counters.get(name, nothing)) for name, held in queues]
        for what, text, values in (
            ("ready", "Jobs that can be claimed.", [held.ready for _, held, _ in rows]),
            ("in_flight", "Jobs under a lease.", [held.in_flight for _, held, _ in rows]),
        ):
            gauge = GaugeMetricFamily(f"tidelog_topic_queue_{what}", text, labels=["topic"])
            for (name, _, _), value in zip(rows, values, strict=True):
                gauge.add_metric([name], value)
            yield gauge
        for what, text, values in (
            ("claimed", "Jobs that were handed out.", [done.claimed for _, _, done in rows]),
            ("acked", "Jobs that were done.", [done.acked for _, _, done in rows]),
            ("nacked", "Jobs that were given back.", [done.nacked for _, _, done in rows]),
            ("extended", "Leases that were made longer.", [done.extended for _, _, done in rows]),
            ("expired", "Leases that ran out.", [held.expired for _, held, _ in rows]),
            ("dead_lettered", "Jobs that were delivered too often, ever.", [held.dead_lettered for _, held, _ in rows]),
        ):
            counter = CounterMetricFamily(f"tidelog_topic_queue_{what}", text, labels=["topic"])
            for (name, _, _), value in zip(rows, values, strict=True):
                counter.add_metric([name], value)
            yield counter


_COUNTERS: Final = {
    "channel_leaves": "Memberships that ended.",
    "channels_deleted": "Channels that ended.",
    "message_log_entries_returned": "Messages that were read from history.",
    "message_log_segments_rolled": "Segments of message logs that were sealed.",
    "message_log_segments_evicted": "Segments of message logs that were dropped.",
    "message_log_evicted_bytes": "Bytes of them.",
    "message_log_crc_failures": "Messages whose checksum did not hold.",
    "message_log_sealed_segment_truncations": "Damaged places in sealed segments.",
    "message_log_hole_seqs": "Messages that power cuts took before their sync, in the logs opened since the start.",
    "fifo_seqs_passed_over": "Seqs without a message that pops and clears passed over.",
    "broadcast_payload_bytes": "Bytes that were published.",
    "deliveries": "Messages handed to receivers.",
}
_RESULT_COUNTERS: Final = {
    "channel_joins": "Joins.",
    "store_saves": "Saves of metadata.",
    "store_deletes": "Deletes of channels.",
    "store_loads": "Loads of metadata.",
    "store_sweeps": "Removals of what was left of channels.",
    "message_log_flushes": "Syncs of message logs.",
    "message_log_reads": "Reads of history.",
    "message_log_deletes": "Deletes of message logs.",
    "message_log_upkeep": "Sealing and dropping that failed.",
    "broadcasts": "Publishes.",
    "outbound_queue_full": "Receivers that were cut off.",
    "fifo_pushes": "Pushes.",
    "fifo_pops": "Pops.",
    "fifo_clears": "Clears.",
    "hook_payloads": "What the hook said of payloads.",
    "auth_attempts": "What the hook said of users.",
}
_DEFAULT_RESULTS: Final = {"outbound_queue_full": "slow", "hook_payloads": "valid", "message_log_upkeep": "disk_full"}
_DURATIONS: Final = {
    "store_save_duration": "Time of a save.",
    "store_load_duration": "Time of a load.",
    "message_log_append_duration": "Time of an append.",
    "message_log_flush_duration": "Time of a sync.",
    "message_log_read_duration": "Time of a read.",
    "message_log_recovery_duration": "Time to open a message log.",
    "fifo_cursor_duration": "Time to move a cursor.",
}


def collect_channel_metrics(manager: ChannelManager | None, receivers: int) -> Iterator[Metric]:
    """All of it; nothing but zeros where there are no channels yet."""
    counts = {} if manager is None else dict(manager.metrics.counts)
    durations = {} if manager is None else dict(manager.metrics.durations)
    for name, text, value in (
        ("channels_active", "Channels.", counts.get(("channels_active", ""), 0)),
        ("channels_skipped", "Channels that cannot be read.", 0 if manager is None else len(manager.report.skipped)),
        ("channel_receivers", "Connections that listen to a channel, for each channel.", receivers),
    ):
        yield GaugeMetricFamily(f"tidelog_{name}", text, value)
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"tidelog_{name}", text, counts.get((name, ""), 0))
    results: dict[str, dict[str, int]] = {name: {_DEFAULT_RESULTS.get(name, SUCCESS): 0} for name in _RESULT_COUNTERS}
    for (name, result), value in counts.items():
        if name in results:
            results[name][result] = value
    for name, text in _RESULT_COUNTERS.items():
        counter = CounterMetricFamily(f"tidelog_{name}", text, labels=["result"])
        for result, value in sorted(results[name].items()):
            counter.add_metric([result], value)
        yield counter
    for name, text in _DURATIONS.items():
        yield _duration_histogram(name, text, durations.get(name) or DurationHistogram())


def _duration_histogram(name: str, text: str, duration: DurationHistogram) -> Metric:
    made = HistogramMetricFamily(f"tidelog_{name}_seconds", text)
    counts = duration.buckets.copy()
    bounds = (*(f"{bound:g}" for bound in DURATION_BOUNDS_S), "+Inf")
    made.add_metric([], list(zip(bounds, accumulate(counts), strict=True)), duration.sum_s)
    return made


CONTENT_TYPE: Final = b"text/plain; version=0.0.4"
TOPICS_MAX: Final = 1_000
"""Topics that have series of their own; a scrape of all of a hundred thousand would help nobody."""

GROUPS_MAX: Final = 1_000
"""Groups of consumers that have series of their own, for the same reason."""

REQUEST_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
FSYNC_BUCKETS_US: Final = (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)  # as the WAL counts its syncs
DURABILITY_CLASSES: Final = ("ephemeral", "memory", "disk", "fsync")
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))


class ResponseStats:
    """The answers of one route, method and status."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(REQUEST_BUCKETS_S) + 1)
        self.seconds = 0.0


class TopicTraffic:
    """What clients did with one topic since the server started."""

    __slots__ = ("gaps", "read", "written")

    def __init__(self) -> None:
        self.written = self.read = self.gaps = 0


class WalTotals(NamedTuple):
    """The figures of all shards together."""

    fsyncs: int
    frames: int
    copied_frames: int  # of routers' copies, which `frames` leaves out
    batches: int
    bytes_written: int
    rotations: int
    queue_depth: int
    queue_depth_peak: int
    submit_full_total: int
    read_only: bool
    fsync_micros_total: int
    fsync_counts: list[int]  # one for each bucket, not added up


class SchedulingTotals(NamedTuple):
    """How hard the server is pressed, and what it does about it."""

    pressure: float
    ready_topics: int
    deferred_topics: int
    sched_latency_ms: float
    throttled_total: int


class ServerTotals(NamedTuple):
    """What a server holds, at one moment."""

    topics: Sequence[TopicInfo]
    by_class: dict[str, int]
    routers: int
    records_live: int
    bytes_live: int
    queues: dict[str, QueueTotals]
    sse_connections: int
    watch_sessions: int
    channels: int
    ready: bool
    progress: float
    uptime_ms: int
    scheduling: SchedulingTotals
    wal: WalTotals | None
    health: HealthState | None


class ServerMetrics(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service
        self._responses: dict[tuple[str, str, int], ResponseStats] = {}
        self._traffic: dict[str, TopicTraffic] = {}
        self.queues = QueueMetrics()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # ── counting, on the loop's thread ────────────────────────────────────────────────────────

    def count_responses(self, path: str, method: str, status: int, *seconds: float) -> None:
        """Requests of the route `path` got their answers. An unknown one is "": clients cannot invent series."""
        key = (path, method if method in _METHODS else "other", status)
        row = self._responses.get(key)
        if row is None:
            row = self._responses[key] = ResponseStats()
        for took in seconds:
            row.seconds += took
            row.counts[bisect_left(REQUEST_BUCKETS_S, took)] += 1

    def count_response_batch(self, path: str, method: str, status: int, took_us: list[int]) -> None:
        """`answered` for many that came together: they took about as long as each other."""
        least, most = (
            bisect_left(REQUEST_BUCKETS_S, min(took_us) / 1e6),
            bisect_left(REQUEST_BUCKETS_S, max(took_us) / 1e6),
        )
        if least < most or len(took_us) == 1:
            self.count_responses(path, method, status, *[us / 1e6 for us in took_us])
            return
        self.count_responses(path, method, status)
        row = self._responses[path, method, status]
        row.seconds += sum(took_us) / 1e6
        row.counts[least] += len(took_us)

    def count_written(self, topic: str, records: int) -> None:
        """Records were acknowledged."""
        row = self._traffic.get(topic)
        if row is None:
            row = self._traffic[topic] = TopicTraffic()
        row.written += records

    def count_read(self, topic: str, records: int, *, gap: bool) -> None:
        """Records were sent, perhaps with word of a gap before them."""
        row = self._traffic.get(topic)
        if row is None:
            row = self._traffic[topic] = TopicTraffic()
        row.read += records
        row.gaps += gap

    # ── telling, on any thread ────────────────────────────────────────────────────────────────

    def prometheus_text(self) -> bytes:
        """All of it as Prometheus reads it."""
        # The contract's counter has no `_total`, which the library insists on, and whole numbers are to look like it.
        made = generate_latest(self._registry).replace(b"tidelog_uptime_ms_total", b"tidelog_uptime_ms")
        return made.replace(b".0\n", b"\n")

    def summary(self) -> dict[str, Any]:
        """The figures of the whole server, for whoever reads JSON."""
        now = self._totals()
        wal = now.wal or WalTotals(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, [])
        return {
            "topics": len(now.topics),
            **{f"topics_{name}": count for name, count in now.by_class.items()},
            "routers": now.routers,
            "records_live": now.records_live,
            "bytes_live": now.bytes_live,
            "queue_topics": len(now.queues),
            "queue_leases_in_flight": sum(held.in_flight for held in now.queues.values()),
            "sse_connections": now.sse_connections,
            "watch_sessions": now.watch_sessions,
            "channels": now.channels,
            "channel_receivers": len(self._service.channels.streams),
            "ready": now.ready,
            "replay_progress": now.progress,
            "uptime_ms": now.uptime_ms,
            "wal": {
                "fsyncs": wal.fsyncs,
                "frames": wal.frames,
                "copied_frames": wal.copied_frames,
                "batches": wal.batches,
                "bytes_written": wal.bytes_written,
                "rotations": wal.rotations,
                "queue_depth": wal.queue_depth,
                "queue_depth_peak": wal.queue_depth_peak,
                "submit_full_total": wal.submit_full_total,
                "read_only": wal.read_only,
                "fsync_count": sum(wal.fsync_counts),
                "fsync_micros_total": wal.fsync_micros_total,
            },
            **now.scheduling._asdict(),
            "health": None if now.health is None else health_json(now.health),
        }

    def _totals(self) -> ServerTotals:
        service = self._service
        topics = service.engine.topics_cached() if service.is_ready else []
        by_class = dict.fromkeys(DURABILITY_CLASSES, 0)
        for state in topics:
            by_class[state.config.durability] += 1
        return ServerTotals(
            topics,
            by_class,
            service.engine.router_count if service.is_ready else 0,
            sum(state.count for state in topics),
            sum(state.bytes for state in topics),
            self.queues.totals(service.engine, topics) if service.is_ready else {},
            service.stream_limit.count,
            len(service.watch_sessions),
            0 if service.channels.manager_or_none is None else service.channels.manager_or_none.channel_count(),
            service.is_ready,
            service.recovery_progress,
            service.clock.monotonic_ms() - service.started_ms,
            _scheduling_totals(service),
            _wal_totals(service.engine) if service.is_ready else None,
            server_health(service) if service.is_ready else None,
        )

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at every scrape."""
        now = self._totals()
        yield _gauge("topics", "Topics.", len(now.topics))
        by_class = GaugeMetricFamily("tidelog_topics_by_class", "Topics by durability class.", labels=["class"])
        for name, count in now.by_class.items():
            by_class.add_metric([name], count)
        yield by_class
        yield _gauge("routers", "Routers.", now.routers)
        yield _gauge("records_live", "Records that can be read.", now.records_live)
        yield _gauge("bytes_live", "Bytes of their data and meta.", now.bytes_live)
        yield _gauge("queue_topics", "Topics that are queues.", len(now.queues))
        leases = sum(held.in_flight for held in now.queues.values())
        yield _gauge("queue_leases_in_flight", "Leases that were neither acknowledged nor ran out.", leases)
        yield _gauge("sse_connections", "Open streams: watch, work, WebSocket and bulk reads.", now.sse_connections)
        yield _gauge("watch_sessions", "Watch sessions.", now.watch_sessions)
        yield _gauge("ready", "1 once the log is recovered.", now.ready)
        yield _gauge("recovery_progress", "How far recovery is, 0 to 1.", now.progress)
        yield CounterMetricFamily("tidelog_uptime_ms", "Milliseconds since the server started.", now.uptime_ms)
        yield from _scheduling_metrics(now.scheduling)
        yield self._limit_metrics()
        yield from self._topic_metrics(now.topics)
        shown = [state.topic for state in now.topics[:TOPICS_MAX] if state.topic in now.queues]
        yield from self.queues.collect([(name, now.queues[name]) for name in shown])
        yield from self._group_metrics()
        yield from self._request_metrics()
        yield from collect_channel_metrics(self._service.channels.manager_or_none, len(self._service.channels.streams))
        if now.wal is not None:
            yield from _wal_metrics(now.wal)
        if now.health is not None:
            yield from _health_metrics(now.health)

    def _topic_metrics(self, topics: Sequence[TopicInfo]) -> Iterator[Metric]:
        """Series by topic, of the first so many by name."""
        self._forget_dropped_topics(topics)
        shown = topics[:TOPICS_MAX]
        yield _gauge("topic_metrics_truncated", "1 where not every topic has series.", len(shown) < len(topics))
        held = (
            ("head_seq", "The last seq.", [state.head_seq for state in shown]),
            ("earliest_seq", "The first record that is there.", [state.earliest_seq for state in shown]),
            ("records_live", "Records that can be read.", [state.count for state in shown]),
            ("bytes_live", "Bytes of their data and meta.", [state.bytes for state in shown]),
        )
        for name, what, values in held:
            gauge = GaugeMetricFamily(f"tidelog_topic_{name}", what, labels=["topic"])
            for state, value in zip(shown, values, strict=True):
                gauge.add_metric([state.topic], value)
            yield gauge
        nobody = TopicTraffic()
        rows = [self._traffic.get(state.topic, nobody) for state in shown]
        passed = (
            ("appended", "Records that clients wrote.", [row.written for row in rows]),
            ("read", "Records that clients were sent.", [row.read for row in rows]),
            ("gaps", "Times that a reader was told of a gap.", [row.gaps for row in rows]),
            ("evicted", "Seqs lost to a cap or to age, ever.", [state.evict_floor - 1 for state in shown]),
        )
        for name, what, values in passed:
            counter = CounterMetricFamily(f"tidelog_topic_{name}", what, labels=["topic"])
            for state, value in zip(shown, values, strict=True):
                counter.add_metric([state.topic], value)
            yield counter

    def _group_metrics(self) -> Iterator[Metric]:
        """Series by group of consumers, of the first so many by topic and name."""
        service = self._service
        shown = service.engine.groups_cached(GROUPS_MAX) if service.is_ready else []
        for name, what, values in (
            ("records", "Records that a group has still to read.", [state.lag.records for _, state in shown]),
            ("bytes", "Bytes of their data and meta.", [state.lag.bytes for _, state in shown]),
            ("seconds", "Age of the first of them.", [state.lag.seconds for _, state in shown]),
        ):
            gauge = GaugeMetricFamily(f"tidelog_group_lag_{name}", what, labels=["topic", "group"])
            for (topic, state), value in zip(shown, values, strict=True):
                gauge.add_metric([topic, state.group], value)
            yield gauge
        broken = service.engine.holds_broken if service.is_ready else 0
        yield CounterMetricFamily("tidelog_group_hold_broken", "Holds of groups that were broken.", broken)
        raised = service.engine.listener_failures if service.is_ready else 0
        yield CounterMetricFamily("tidelog_listener_failures", "Listeners of topics and queues that raised.", raised)

    def _forget_dropped_topics(self, topics: Sequence[TopicInfo]) -> None:
        """Drop the traffic of topics that are gone. One made again starts from nothing, as its seqs do."""
        known = {state.topic for state in topics}
        for name in list(self._traffic):
            if name not in known and self._service.is_ready and self._service.engine.find(name) is None:
                self._traffic.pop(name, None)
        self.queues.forget_dropped(known)

    def _limit_metrics(self) -> Metric:
        what = "Connections, streams and requests that were ended or refused because a limit was met."
        counter = CounterMetricFamily("tidelog_limits_met", what, labels=["limit"])
        for name, count in sorted(self._service.limit_counters.counts.items()):
            counter.add_metric([name], count)
        return counter

    def _request_metrics(self) -> Iterator[Metric]:
        labels = ["route", "method", "status"]
        counter = CounterMetricFamily("tidelog_requests", "Requests that were answered.", labels=labels)
        times = HistogramMetricFamily("tidelog_request_seconds", "Time to the answer.", labels=labels)
        for (path, method, status), row in sorted(self._responses.items()):
            named = [path or "other", method, str(status)]
            counts = row.counts.copy()
            counter.add_metric(named, sum(counts))
            times.add_metric(named, _cumulative_buckets(REQUEST_BUCKETS_S, counts), row.seconds)
        yield counter
        yield times


def _scheduling_totals(service: Service) -> SchedulingTotals:
    governor, ready = service.governor, service.notify_scheduler.fair_queue
    return SchedulingTotals(
        round(governor.pressure, 4),
        service.notify_scheduler.ready_count + service.notify_scheduler.delayed_count,
        ready.deferred_count,
        round(governor.latency_us / 1000, 4),
        service.writes.admission.rejected_total if service.is_ready else 0,
    )


def _scheduling_metrics(totals: SchedulingTotals) -> Iterator[Metric]:
    yield _gauge("pressure", "How hard the server is pressed, 0 to 1.", totals.pressure)
    yield _gauge("ready_topics", "Topics whose readers are to be told and were not yet.", totals.ready_topics)
    yield _gauge(
        "deferred_topics",
        "Topics of negative priority that are not told of until pressure falls.",
        totals.deferred_topics,
    )
    yield _gauge("sched_latency_ms", "Milliseconds from ready to told, smoothed.", totals.sched_latency_ms)
    yield CounterMetricFamily(
        "tidelog_throttled", "Writes refused because the server is saturated.", totals.throttled_total
    )


def _wal_totals(engine: Engine) -> WalTotals | None:
    """None: opened for reading, so there is no WAL to have figures."""
    shards = engine.shards
    if not shards:
        return None
    every = [shard.stats for shard in shards]
    return WalTotals(
        sum(stats.fsyncs for stats in every),
        sum(stats.frames for stats in every),
        sum(stats.copied_frames for stats in every),
        sum(stats.batches for stats in every),
        sum(stats.bytes for stats in every),
        sum(stats.rotations for stats in every),
        sum(stats.queue_depth for stats in every),
        max(stats.queue_peak for stats in every),
        sum(stats.queue_full_count for stats in every),
        any(shard.is_latched for shard in shards),
        sum(stats.sync_us for stats in every),
        [sum(counts) for counts in zip(*(stats.sync_us_counts for stats in every), strict=True)],
    )


def _wal_metrics(wal: WalTotals) -> Iterator[Metric]:
    for name, what, value in (
        ("frames", "Frames written, without those of routers' copies.", wal.frames),
        (
            "copied_frames",
            "Frames of copies that routers made, one for each pass included.",
            wal.copied_frames,
        ),
        ("batches", "Commit batches written.", wal.batches),
        ("fsyncs", "Syncs of commits.", wal.fsyncs),
        ("bytes_written", "Bytes written.", wal.bytes_written),
        ("rotations", "Files that were full.", wal.rotations),
        ("submit_full", "Writes refused because too many waited.", wal.submit_full_total),
    ):
        yield CounterMetricFamily(f"tidelog_wal_{name}", what, value)
    yield _gauge("wal_queue_depth", "Writes that wait for the disk.", wal.queue_depth)
    yield _gauge("wal_queue_depth_peak", "The most that ever waited.", wal.queue_depth_peak)
    yield _gauge("wal_read_only", "1 once a shard refuses writes because a sync failed.", wal.read_only)
    times = HistogramMetricFamily("tidelog_wal_fsync_latency_us", "Microseconds of a sync.")
    times.add_metric([], _cumulative_buckets(FSYNC_BUCKETS_US, wal.fsync_counts), wal.fsync_micros_total)
    yield times


def server_health(service: Service) -> HealthState:
    """The engine's health, with the tasks of the server's loop."""
    found, mine = service.engine.health(), service.health.tasks()
    return found._replace(ok=found.ok and not any(task.failing for task in mine), tasks=(*found.tasks, *mine))


def health_json(health: HealthState) -> dict[str, Any]:
    """Background work and stored bytes as JSON. The corrupt places are in the log, and `tidelog check` finds them."""
    return {
        "ok": health.ok,
        "checkpoint_age_ms": health.checkpoint_age_ms,
        "wal_uncovered_bytes": health.uncovered_bytes,
        "lagging_topics": list(health.lagging[:TOPICS_MAX]),
        "corruptions": health.corruptions,
        "tasks": {
            task.name: {
                "runs": task.runs,
                "failures": task.failures,
                "failing": task.failing,
                "last_ok_ms": task.last_ok_ms,
                "last_error": task.last_error,
                "last_error_ms": task.last_error_ms,
            }
            for task in health.tasks
        },
    }


def _health_metrics(health: HealthState) -> Iterator[Metric]:
    yield _gauge("healthy", "1 where no background task fails and no stored byte is known to be corrupt.", health.ok)
    age_s = health.checkpoint_age_ms / 1000
    yield _gauge("checkpoint_age_seconds", "Since the last checkpoint of all topics, or the start.", age_s)
    yield _gauge("checkpoint_lagging_topics", "Topics that the last checkpoint could not write.", len(health.lagging))
    yield _gauge("wal_uncovered_bytes", "Bytes of the WAL that no checkpoint covers.", health.uncovered_bytes)
    yield CounterMetricFamily("tidelog_corruptions", "Places whose bytes did not verify.", health.corruptions)
    runs = CounterMetricFamily("tidelog_background_runs", "Runs of background tasks.", labels=["task"])
    failures = CounterMetricFamily("tidelog_background_failures", "Runs that failed.", labels=["task"])
    failing = GaugeMetricFamily("tidelog_background_failing", "Failures since the last success.", labels=["task"])
    for task in health.tasks:
        runs.add_metric([task.name], task.runs)
        failures.add_metric([task.name], task.failures)
        failing.add_metric([task.name], task.failing)
    yield from (runs, failures, failing)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tidelog_{name}", help_text, value)


def _cumulative_buckets(bounds: Iterable[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Each bucket with everything below it, as Prometheus wants them."""
    return list(zip((*(f"{bound:g}" for bound in bounds), "+Inf"), accumulate(counts), strict=True))
