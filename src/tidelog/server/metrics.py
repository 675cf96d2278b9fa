"""[hot] Figures of a server, for Prometheus and as JSON.

Counting happens on the event loop's thread, in plain integers and without a lock: about half a microsecond a
request. Everything else is read from the engine when somebody asks, so a server that nobody watches pays nothing.
Whoever asks makes nothing expire: the figures are of what is held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tidelog.engine import Engine, HealthState, TopicState
from tidelog.server import channel_figures
from tidelog.server.queue_figures import Held, QueueFigures

if TYPE_CHECKING:
    from tidelog.server.service import Service

CONTENT_TYPE: Final = b"text/plain; version=0.0.4"
TOPICS_MAX: Final = 1_000
"""Topics that have series of their own; a scrape of all of a hundred thousand would help nobody."""

GROUPS_MAX: Final = 1_000
"""Groups of consumers that have series of their own, for the same reason."""

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SYNC_US: Final = (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)  # as the WAL counts its syncs
CLASSES: Final = ("ephemeral", "memory", "disk", "fsync")
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))


class Answers:
    """The answers of one route, method and status."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.seconds = 0.0


class Traffic:
    """What clients did with one topic since the server started."""

    __slots__ = ("gaps", "read", "written")

    def __init__(self) -> None:
        self.written = self.read = self.gaps = 0


class Wal(NamedTuple):
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


class Pace(NamedTuple):
    """How hard the server is pressed, and what it does about it."""

    pressure: float
    ready_topics: int
    deferred_topics: int
    sched_latency_ms: float
    throttled_total: int


class Totals(NamedTuple):
    """What a server holds, at one moment."""

    topics: Sequence[TopicState]
    by_class: dict[str, int]
    routers: int
    records_live: int
    bytes_live: int
    queues: dict[str, Held]
    sse_connections: int
    watch_sessions: int
    channels: int
    ready: bool
    progress: float
    uptime_ms: int
    pace: Pace
    wal: Wal | None
    health: HealthState | None


class Metrics(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service
        self._answers: dict[tuple[str, str, int], Answers] = {}
        self._traffic: dict[str, Traffic] = {}
        self.queues = QueueFigures()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # ── counting, on the loop's thread ────────────────────────────────────────────────────────

    def answered(self, path: str, method: str, status: int, *seconds: float) -> None:
        """Requests of the route `path` got their answers. An unknown one is "": clients cannot invent series."""
        key = (path, method if method in _METHODS else "other", status)
        row = self._answers.get(key)
        if row is None:
            row = self._answers[key] = Answers()
        for took in seconds:
            row.seconds += took
            row.counts[bisect_left(SECONDS, took)] += 1

    def answered_all(self, path: str, method: str, status: int, took_us: list[int]) -> None:
        """`answered` for many that came together: they took about as long as each other."""
        least, most = bisect_left(SECONDS, min(took_us) / 1e6), bisect_left(SECONDS, max(took_us) / 1e6)
        if least < most or len(took_us) == 1:
            self.answered(path, method, status, *[us / 1e6 for us in took_us])
            return
        self.answered(path, method, status)
        row = self._answers[path, method, status]
        row.seconds += sum(took_us) / 1e6
        row.counts[least] += len(took_us)

    def wrote(self, topic: str, records: int) -> None:
        """Records were acknowledged."""
        row = self._traffic.get(topic)
        if row is None:
            row = self._traffic[topic] = Traffic()
        row.written += records

    def read(self, topic: str, records: int, *, gap: bool) -> None:
        """Records were sent, perhaps with word of a gap before them."""
        row = self._traffic.get(topic)
        if row is None:
            row = self._traffic[topic] = Traffic()
        row.read += records
        row.gaps += gap

    # ── telling, on any thread ────────────────────────────────────────────────────────────────

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        # The contract's counter has no `_total`, which the library insists on, and whole numbers are to look like it.
        made = generate_latest(self._registry).replace(b"tidelog_uptime_ms_total", b"tidelog_uptime_ms")
        return made.replace(b".0\n", b"\n")

    def summary(self) -> dict[str, Any]:
        """The figures of the whole server, for whoever reads JSON."""
        now = self._totals()
        wal = now.wal or Wal(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, [])
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
            "channel_receivers": len(self._service.rooms.receivers),
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
            **now.pace._asdict(),
            "health": None if now.health is None else health_detail(now.health),
        }

    def _totals(self) -> Totals:
        service = self._service
        topics = service.engine.glance() if service.is_ready else []
        by_class = dict.fromkeys(CLASSES, 0)
        for state in topics:
            by_class[state.config.durability] += 1
        return Totals(
            topics,
            by_class,
            service.engine.router_count if service.is_ready else 0,
            sum(state.count for state in topics),
            sum(state.bytes for state in topics),
            self.queues.held(service.engine, topics) if service.is_ready else {},
            service.streams.held,
            len(service.sessions),
            0 if service.rooms.found is None else service.rooms.found.count(),
            service.is_ready,
            service.progress,
            service.clock.monotonic_ms() - service.started_ms,
            _pace(service),
            _wal(service.engine) if service.is_ready else None,
            health_of(service) if service.is_ready else None,
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
        yield from _of_pace(now.pace)
        yield self._of_refusals()
        yield from self._of_topics(now.topics)
        shown = [state.topic for state in now.topics[:TOPICS_MAX] if state.topic in now.queues]
        yield from self.queues.collect([(name, now.queues[name]) for name in shown])
        yield from self._of_groups()
        yield from self._of_requests()
        yield from channel_figures.collect(self._service.rooms.found, len(self._service.rooms.receivers))
        if now.wal is not None:
            yield from _of_wal(now.wal)
        if now.health is not None:
            yield from _of_health(now.health)

    def _of_topics(self, topics: Sequence[TopicState]) -> Iterator[Metric]:
        """Series by topic, of the first so many by name."""
        self._forget(topics)
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
        nobody = Traffic()
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

    def _of_groups(self) -> Iterator[Metric]:
        """Series by group of consumers, of the first so many by topic and name."""
        service = self._service
        shown = service.engine.glance_groups(GROUPS_MAX) if service.is_ready else []
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

    def _forget(self, topics: Sequence[TopicState]) -> None:
        """Drop the traffic of topics that are gone. One made again starts from nothing, as its seqs do."""
        known = {state.topic for state in topics}
        for name in list(self._traffic):
            if name not in known and self._service.is_ready and self._service.engine.find(name) is None:
                self._traffic.pop(name, None)
        self.queues.forget(known)

    def _of_refusals(self) -> Metric:
        what = "Connections, streams and requests that were ended or refused because a limit was met."
        counter = CounterMetricFamily("tidelog_limits_met", what, labels=["limit"])
        for name, count in sorted(self._service.refusals.counts.items()):
            counter.add_metric([name], count)
        return counter

    def _of_requests(self) -> Iterator[Metric]:
        labels = ["route", "method", "status"]
        counter = CounterMetricFamily("tidelog_requests", "Requests that were answered.", labels=labels)
        times = HistogramMetricFamily("tidelog_request_seconds", "Time to the answer.", labels=labels)
        for (path, method, status), row in sorted(self._answers.items()):
            named = [path or "other", method, str(status)]
            counts = row.counts.copy()
            counter.add_metric(named, sum(counts))
            times.add_metric(named, _buckets(SECONDS, counts), row.seconds)
        yield counter
        yield times


def _pace(service: Service) -> Pace:
    governor, ready = service.governor, service.pump.ready
    return Pace(
        round(governor.pressure, 4),
        service.pump.waiting + service.pump.held,
        ready.deferred,
        round(governor.latency_us / 1000, 4),
        service.admission.throttled if service.is_ready else 0,
    )


def _of_pace(pace: Pace) -> Iterator[Metric]:
    yield _gauge("pressure", "How hard the server is pressed, 0 to 1.", pace.pressure)
    yield _gauge("ready_topics", "Topics whose readers are to be told and were not yet.", pace.ready_topics)
    yield _gauge(
        "deferred_topics",
        "Topics of negative priority that are not told of until pressure falls.",
        pace.deferred_topics,
    )
    yield _gauge("sched_latency_ms", "Milliseconds from ready to told, smoothed.", pace.sched_latency_ms)
    yield CounterMetricFamily(
        "tidelog_throttled", "Writes refused because the server is saturated.", pace.throttled_total
    )


def _wal(engine: Engine) -> Wal | None:
    """None: opened for reading, so there is no WAL to have figures."""
    shards = engine.shards
    if not shards:
        return None
    every = [shard.stats for shard in shards]
    return Wal(
        sum(stats.fsyncs for stats in every),
        sum(stats.frames for stats in every),
        sum(stats.copied for stats in every),
        sum(stats.batches for stats in every),
        sum(stats.bytes for stats in every),
        sum(stats.rotations for stats in every),
        sum(stats.depth for stats in every),
        max(stats.peak for stats in every),
        sum(stats.refused for stats in every),
        any(shard.latched for shard in shards),
        sum(stats.sync_us for stats in every),
        [sum(counts) for counts in zip(*(stats.sync_us_counts for stats in every), strict=True)],
    )


def _of_wal(wal: Wal) -> Iterator[Metric]:
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
    times.add_metric([], _buckets(SYNC_US, wal.fsync_counts), wal.fsync_micros_total)
    yield times


def health_of(service: Service) -> HealthState:
    """The engine's health, with the tasks of the server's loop."""
    found, mine = service.engine.health(), service.health.tasks()
    return found._replace(ok=found.ok and not any(task.failing for task in mine), tasks=(*found.tasks, *mine))


def health_detail(health: HealthState) -> dict[str, Any]:
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


def _of_health(health: HealthState) -> Iterator[Metric]:
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


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tidelog_{name}", what, value)


def _buckets(bounds: Iterable[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Each bucket with everything below it, as Prometheus wants them."""
    return list(zip((*(f"{bound:g}" for bound in bounds), "+Inf"), accumulate(counts), strict=True))
