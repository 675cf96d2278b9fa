"""Metrics and health of a server, with their endpoints: metrics are counted by the handlers, read from the engine, and
published for Prometheus and as JSON.

Tables of `_Metric` are the registry: each row has a name, a kind, a help text, how its value is read, and its key in
the JSON document. `ServerMetrics.collect` and `ServerMetrics.summary` iterate over them.

Handlers count on the event loop's thread, in plain integers and without a lock: about half a microsecond a request.
All other values are read at a scrape, on any thread, so a server that is not scraped pays nothing. A scrape expires
no records: the values are of what is stored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import nan
from platform import python_version
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tidelog.channels import ChannelManager
from tidelog.channels.metrics import DURATION_BOUNDS_S, SUCCESS, DurationHistogram
from tidelog.disk.interface import free_bytes
from tidelog.engine import Appended, Engine, HealthState, ShardStats, TopicInfo
from tidelog.engine.groups import GroupState
from tidelog.engine.health import TaskState
from tidelog.engine.rewrite import RewriteStats
from tidelog.engine.tiers import TierStatus
from tidelog.engine.topic_table import IdleTotals
from tidelog.errors import NotAQueue, TopicNotFound
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.openapi import STRING, operation
from tidelog.server.push.notifier import NotifyScheduler
from tidelog.server.request import JSON_TYPE, RequestContext, json_response
from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.server.service import Service


CONTENT_TYPE: Final = b"text/plain; version=0.0.4"
TOPICS_MAX: Final = 1_000
"""Topics with series of their own: a scrape of a hundred thousand topics would be of no use."""

GROUPS_MAX: Final = 1_000
"""Consumer groups with series of their own, for the same reason."""

REQUEST_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
FSYNC_BUCKETS_US: Final = (50, 100, 250, 500, 1_000, 5_000, 10_000, 50_000, 100_000)  # as the WAL counts its fsyncs
DURABILITY_CLASSES: Final = ("ephemeral", "memory", "disk", "fsync")
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))

SourceT = TypeVar("SourceT")
_GAUGE: Final = "gauge"
_COUNTER: Final = "counter"
_JSON: Final = "json"


class _Metric(NamedTuple, Generic[SourceT]):
    """One row of a table: a value that is read from a source."""

    name: str  # in Prometheus after `tidelog_` and the prefix of the table; a counter gets `_total`
    kind: Literal["gauge", "counter", "json"]  # json: only in the JSON document
    help: str
    read: Callable[[SourceT], float]
    json_key: str = ""  # empty: the name


def _collect(
    table: Iterable[_Metric[SourceT]],
    sources: Sequence[tuple[Sequence[str], SourceT]],
    labels: Sequence[str] = (),
    prefix: str = "",
) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each source and its label values."""
    for row in table:
        if row.kind != _JSON:
            family = (GaugeMetricFamily if row.kind == _GAUGE else CounterMetricFamily)(
                f"tidelog_{prefix}{row.name}", row.help, labels=labels
            )
            for label_values, source in sources:
                family.add_metric(label_values, row.read(source))
            yield family


def _summarize(table: Iterable[_Metric[SourceT]], source: SourceT) -> dict[str, float]:
    return {row.json_key or row.name: row.read(source) for row in table}


# ── sources ───────────────────────────────────────────────────────────────────────────────────


class ResponseStats:
    """The responses of one route, method and status."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(REQUEST_BUCKETS_S) + 1)
        self.seconds = 0.0


class TopicCounters:
    """Operations of clients on one topic since the server started."""

    __slots__ = ("acked", "claimed", "extended", "gaps", "nacked", "read", "written")

    def __init__(self) -> None:
        self.written = self.read = self.gaps = self.claimed = self.acked = self.nacked = self.extended = 0


class QueueTotals(NamedTuple):
    """Jobs of one queue."""

    ready: int
    in_flight: int
    dead_lettered: int
    expired: int


class _WalTotals(NamedTuple):
    """The statistics of all shards; empty where the engine is not open or has no WAL."""

    shards: Sequence[ShardStats] = ()
    is_latched: bool = False

    @property
    def fsync_counts(self) -> list[int]:
        """Fsyncs by bucket, not cumulative."""
        return [sum(counts) for counts in zip(*(stats.sync_us_counts for stats in self.shards), strict=True)]


class _Snapshot(NamedTuple):
    """State of a server at one moment."""

    engine: Engine | None  # None: the log is not recovered yet
    topics: Sequence[TopicInfo]  # that something has used
    idle: IdleTotals  # the others
    shown: Sequence[TopicInfo]  # the first by name
    queues: dict[str, QueueTotals]
    wal: _WalTotals
    health: HealthState | None
    scheduler: NotifyScheduler
    rejected_writes: int
    streams: int
    watch_sessions: int
    channels: ChannelManager | None
    receivers: int
    recovery_progress: float
    uptime_ms: int


# ── tables ────────────────────────────────────────────────────────────────────────────────────


def _count_of_class(durability: str) -> Callable[[_Snapshot], int]:
    return lambda now: now.idle.by_class[durability] + sum(info.config.durability == durability for info in now.topics)


def _wal_sum(name: str) -> Callable[[_WalTotals], int]:
    return lambda wal: sum(getattr(stats, name) for stats in wal.shards)


_BYTES_HELP: Final = "Bytes of data and meta of the readable records."
_STREAMS_HELP: Final = "Open streams: watch, work, WebSocket and bulk reads."
_DEFERRED_HELP: Final = "Topics of negative priority whose readers are not notified until the pressure falls."

_SERVER: Final[tuple[_Metric[_Snapshot], ...]] = (
    _Metric("topics", _GAUGE, "Topics.", lambda now: len(now.topics) + now.idle.topics),
    *(_Metric(f"topics_{name}", _JSON, "", _count_of_class(name)) for name in DURABILITY_CLASSES),
    _Metric("routers", _GAUGE, "Routers.", lambda now: now.engine.router_count if now.engine else 0),
    _Metric(
        "records_live",
        _GAUGE,
        "Readable records.",
        lambda now: now.idle.records + sum(info.count for info in now.topics),
    ),
    _Metric("bytes_live", _GAUGE, _BYTES_HELP, lambda now: now.idle.bytes + sum(info.bytes for info in now.topics)),
    _Metric("queue_topics", _GAUGE, "Topics that are queues.", lambda now: now.idle.queues + len(now.queues)),
    _Metric(
        "queue_leases_in_flight",
        _GAUGE,
        "Leases that were neither acknowledged nor expired.",
        lambda now: sum(totals.in_flight for totals in now.queues.values()),
    ),
    _Metric("sse_connections", _GAUGE, _STREAMS_HELP, lambda now: now.streams),
    _Metric("watch_sessions", _GAUGE, "Watch sessions.", lambda now: now.watch_sessions),
    _Metric("channels", _JSON, "", lambda now: 0 if now.channels is None else now.channels.channel_count()),
    _Metric("channel_receivers", _JSON, "", lambda now: now.receivers),
    _Metric("ready", _GAUGE, "1 when the log is recovered.", lambda now: now.engine is not None),
    _Metric(
        "recovery_progress",
        _GAUGE,
        "Progress of recovery, 0 to 1.",
        lambda now: now.recovery_progress,
        json_key="replay_progress",
    ),
    _Metric("uptime_ms", _COUNTER, "Milliseconds since the server started.", lambda now: now.uptime_ms),
)

_SCHEDULING: Final[tuple[_Metric[_Snapshot], ...]] = (
    _Metric("pressure", _GAUGE, "Load of the server, 0 to 1.", lambda now: round(now.scheduler.governor.pressure, 4)),
    _Metric(
        "ready_topics",
        _GAUGE,
        "Topics whose readers are not notified yet.",
        lambda now: now.scheduler.ready_count + now.scheduler.delayed_count,
    ),
    _Metric("deferred_topics", _GAUGE, _DEFERRED_HELP, lambda now: now.scheduler.fair_queue.deferred_count),
    _Metric(
        "sched_latency_ms",
        _GAUGE,
        "Milliseconds from ready to notified, smoothed.",
        lambda now: round(now.scheduler.governor.latency_us / 1000, 4),
    ),
    _Metric(
        "throttled",
        _COUNTER,
        "Writes rejected because the server is saturated.",
        lambda now: now.rejected_writes,
        json_key="throttled_total",
    ),
)

_WAL: Final[tuple[_Metric[_WalTotals], ...]] = (
    _Metric("fsyncs", _COUNTER, "Fsyncs of commits.", _wal_sum("fsyncs")),
    _Metric("frames", _COUNTER, "Frames written, without the copies of routers.", _wal_sum("frames")),
    _Metric(
        "copied_frames",
        _COUNTER,
        "Frames of copies by routers, including one for each pass.",
        _wal_sum("copied_frames"),
    ),
    _Metric("batches", _COUNTER, "Commit batches written.", _wal_sum("batches")),
    _Metric("bytes_written", _COUNTER, "Bytes written.", _wal_sum("bytes")),
    _Metric("rotations", _COUNTER, "Files that became full.", _wal_sum("rotations")),
    _Metric("queue_depth", _GAUGE, "Writes that wait for the disk.", _wal_sum("queue_depth")),
    _Metric(
        "queue_depth_peak",
        _GAUGE,
        "Highest number of writes that waited for the disk.",
        lambda wal: max((stats.queue_peak for stats in wal.shards), default=0),
    ),
    _Metric(
        "submit_full",
        _COUNTER,
        "Writes rejected because the queue was full.",
        _wal_sum("queue_full_count"),
        json_key="submit_full_total",
    ),
    _Metric("read_only", _GAUGE, "1 when a shard rejects writes because an fsync failed.", lambda wal: wal.is_latched),
    _Metric("fsync_count", _JSON, "", lambda wal: sum(wal.fsync_counts)),
    _Metric("fsync_micros_total", _JSON, "", _wal_sum("sync_us")),
)

_HEALTHY_HELP: Final = "1 when no background task fails and no stored byte is known to be corrupt."
_CHECKPOINT_AGE_HELP: Final = "Seconds since the last checkpoint of all topics, or the start."
_LAGGING_HELP: Final = "Topics that the last checkpoint could not write."

_TIERS: Final[tuple[_Metric[TierStatus], ...]] = (
    _Metric("hot_segments", _GAUGE, "Sealed segments on the disk.", lambda tiers: tiers.hot_segments),
    _Metric("hot_bytes", _GAUGE, "Bytes of their data.", lambda tiers: tiers.hot_bytes),
    _Metric("cold_segments", _GAUGE, "Segments in the cold store.", lambda tiers: tiers.cold_segments),
    _Metric("cold_bytes", _GAUGE, "Bytes of their data.", lambda tiers: tiers.cold_bytes),
    _Metric("cold_object_bytes", _GAUGE, "Bytes that they take in the store.", lambda tiers: tiers.object_bytes),
    _Metric("cold_relocated", _COUNTER, "Segments moved to the cold store.", lambda tiers: tiers.relocated),
    _Metric("cold_recalled", _COUNTER, "Segments brought back from it.", lambda tiers: tiers.recalled),
    _Metric("cold_deleted_objects", _COUNTER, "Objects deleted from it.", lambda tiers: tiers.deleted_objects),
    _Metric("cold_failures", _COUNTER, "Failures to move a segment.", lambda tiers: tiers.failures),
    _Metric("cold_reads", _COUNTER, "Ranges read from the cold store.", lambda tiers: tiers.reads),
    _Metric("cold_read_bytes", _COUNTER, "Bytes of these ranges.", lambda tiers: tiers.read_bytes),
    _Metric("cold_read_failures", _COUNTER, "Ranges that could not be read.", lambda tiers: tiers.read_failures),
    _Metric("cold_cache_bytes", _GAUGE, "Bytes in the cache of blocks.", lambda tiers: tiers.cache_bytes),
)

_HEALTH: Final[tuple[_Metric[HealthState], ...]] = (
    _Metric("healthy", _GAUGE, _HEALTHY_HELP, lambda health: health.ok),
    _Metric("checkpoint_age_seconds", _GAUGE, _CHECKPOINT_AGE_HELP, lambda health: health.checkpoint_age_ms / 1000),
    _Metric("checkpoint_lagging_topics", _GAUGE, _LAGGING_HELP, lambda health: len(health.lagging)),
    _Metric(
        "wal_uncovered_bytes",
        _GAUGE,
        "Bytes of the WAL that no checkpoint covers.",
        lambda health: health.uncovered_bytes,
    ),
    _Metric("corruptions", _COUNTER, "Places whose checksum did not match.", lambda health: health.corruptions),
)

_REWRITE: Final[tuple[_Metric[RewriteStats], ...]] = (
    _Metric("segments", _COUNTER, "Segments rewritten without deleted records.", lambda stats: stats.segments),
    _Metric("records_removed", _COUNTER, "Deleted records whose bytes are gone.", lambda stats: stats.records_removed),
    _Metric(
        "bytes_reclaimed", _COUNTER, "Bytes by which segments became smaller.", lambda stats: stats.bytes_reclaimed
    ),
    _Metric("failures", _COUNTER, "Rewrites that failed and are tried again.", lambda stats: stats.failures),
    _Metric("refused", _COUNTER, "Segments left because they do not verify.", lambda stats: stats.refused),
)

_BACKGROUND_TASK: Final[tuple[_Metric[TaskState], ...]] = (
    _Metric("runs", _COUNTER, "Runs of background tasks.", lambda task: task.runs),
    _Metric("failures", _COUNTER, "Runs that failed.", lambda task: task.failures),
    _Metric("failing", _GAUGE, "Failures since the last success.", lambda task: task.failing),
)

_TOPIC: Final[tuple[_Metric[tuple[TopicInfo, TopicCounters]], ...]] = (
    _Metric("head_seq", _GAUGE, "The last seq.", lambda row: row[0].head_seq),
    _Metric("earliest_seq", _GAUGE, "The seq of the first readable record.", lambda row: row[0].earliest_seq),
    _Metric("records_live", _GAUGE, "Readable records.", lambda row: row[0].count),
    _Metric("bytes_live", _GAUGE, _BYTES_HELP, lambda row: row[0].bytes),
    _Metric("appended", _COUNTER, "Records written by clients.", lambda row: row[1].written),
    _Metric("read", _COUNTER, "Records sent to clients.", lambda row: row[1].read),
    _Metric("gaps", _COUNTER, "Gaps reported to readers.", lambda row: row[1].gaps),
    _Metric("evicted", _COUNTER, "Seqs evicted since creation.", lambda row: row[0].evict_floor - 1),
)

_QUEUE: Final[tuple[_Metric[tuple[QueueTotals, TopicCounters]], ...]] = (
    _Metric("ready", _GAUGE, "Jobs that can be claimed.", lambda row: row[0].ready),
    _Metric("in_flight", _GAUGE, "Jobs under a lease.", lambda row: row[0].in_flight),
    _Metric("claimed", _COUNTER, "Jobs that were claimed.", lambda row: row[1].claimed),
    _Metric("acked", _COUNTER, "Jobs that were acknowledged.", lambda row: row[1].acked),
    _Metric("nacked", _COUNTER, "Jobs that were returned by nack.", lambda row: row[1].nacked),
    _Metric("extended", _COUNTER, "Leases that were extended.", lambda row: row[1].extended),
    _Metric("expired", _COUNTER, "Leases that expired.", lambda row: row[0].expired),
    _Metric("dead_lettered", _COUNTER, "Jobs dead-lettered since creation.", lambda row: row[0].dead_lettered),
)

_GROUP: Final[tuple[_Metric[GroupState], ...]] = (
    _Metric("records", _GAUGE, "Records that a consumer group has not read yet.", lambda group: group.lag.records),
    _Metric("bytes", _GAUGE, "Bytes of data and meta of these records.", lambda group: group.lag.bytes),
    _Metric("seconds", _GAUGE, "Age of the first of these records.", lambda group: group.lag.seconds),
)

_ENGINE: Final[tuple[_Metric[Engine | None], ...]] = (
    _Metric(
        "disk_free_bytes",
        _GAUGE,
        "Bytes that can still be written to the device of the data directory; NaN where that is unknown.",
        lambda engine: _disk_free_bytes(engine) if engine else nan,
    ),
    _Metric(
        "group_hold_broken",
        _COUNTER,
        "Holds of consumer groups that were broken.",
        lambda engine: engine.holds_broken if engine else 0,
    ),
    _Metric(
        "compaction_runs",
        _COUNTER,
        "Compactions of topics.",
        lambda engine: engine.compaction_stats.runs if engine else 0,
    ),
    _Metric(
        "compaction_removed_records",
        _COUNTER,
        "Records that compaction removed, tombstones included.",
        lambda engine: engine.compaction_stats.records if engine else 0,
    ),
    _Metric(
        "compaction_removed_bytes",
        _COUNTER,
        "Bytes of the records that compaction removed.",
        lambda engine: engine.compaction_stats.bytes if engine else 0,
    ),
    _Metric(
        "compaction_removed_tombstones",
        _COUNTER,
        "Tombstones that compaction removed after their delay.",
        lambda engine: engine.compaction_stats.tombstones if engine else 0,
    ),
    _Metric(
        "compaction_read_bytes",
        _COUNTER,
        "Bytes of records and key files that key indexes were built from.",
        lambda engine: engine.compaction_stats.read_bytes if engine else 0,
    ),
    _Metric(
        "listener_failures",
        _COUNTER,
        "Listeners of topics and queues that raised.",
        lambda engine: engine.listener_failures if engine else 0,
    ),
)

# Channel metrics are counted by the channel manager, under these names.
_CHANNEL_COUNTERS: Final = {
    "channel_leaves": "Memberships that ended.",
    "channels_deleted": "Channels that were deleted.",
    "message_log_entries_returned": "Messages read from history.",
    "message_log_segments_rolled": "Segments of message logs that were sealed.",
    "message_log_segments_evicted": "Segments of message logs that were evicted.",
    "message_log_evicted_bytes": "Bytes of the evicted segments.",
    "message_log_crc_failures": "Messages whose checksum did not match.",
    "message_log_sealed_segment_truncations": "Damaged places in sealed segments.",
    "message_log_hole_seqs": "Messages lost in a power cut before their fsync, in the logs opened since the start.",
    "fifo_seqs_passed_over": "Seqs without a message that pops and clears skipped.",
    "broadcast_payload_bytes": "Bytes published.",
    "deliveries": "Messages delivered to receivers.",
}
_CHANNEL_RESULT_COUNTERS: Final = {
    "channel_joins": "Joins.",
    "store_saves": "Saves of metadata.",
    "store_deletes": "Deletes of channels.",
    "store_loads": "Loads of metadata.",
    "store_sweeps": "Removals of leftovers of channels.",
    "message_log_flushes": "Fsyncs of message logs.",
    "message_log_reads": "Reads of history.",
    "message_log_deletes": "Deletes of message logs.",
    "message_log_upkeep": "Failures to seal or evict segments.",
    "broadcasts": "Publishes.",
    "outbound_queue_full": "Receivers that were disconnected because their queue was full.",
    "fifo_pushes": "Pushes.",
    "fifo_pops": "Pops.",
    "fifo_clears": "Clears.",
    "hook_payloads": "Decisions of the hook about payloads.",
    "auth_attempts": "Decisions of the hook about users.",
}
_DEFAULT_RESULTS: Final = {"outbound_queue_full": "slow", "hook_payloads": "valid", "message_log_upkeep": "disk_full"}
_CHANNEL_DURATIONS: Final = {
    "store_save_duration": "Time of a save.",
    "store_load_duration": "Time of a load.",
    "message_log_append_duration": "Time of an append.",
    "message_log_flush_duration": "Time of an fsync.",
    "message_log_read_duration": "Time of a read.",
    "message_log_recovery_duration": "Time to open a message log.",
    "fifo_cursor_duration": "Time to move a cursor.",
}


class ServerMetrics(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service
        self._responses: dict[tuple[str, str, int], ResponseStats] = {}
        self._topics: dict[str, TopicCounters] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # `process_…`: memory, processor time, descriptors, start

    # ── counting, on the loop's thread ────────────────────────────────────────────────────────

    def count_responses(self, path: str, method: str, status: int, *seconds: float) -> None:
        """Count responses of the route `path`. An unknown one is "", so that clients cannot create series."""
        key = (path, method if method in _METHODS else "other", status)
        row = self._responses.get(key)
        if row is None:
            row = self._responses[key] = ResponseStats()
        for took in seconds:
            row.seconds += took
            row.counts[bisect_left(REQUEST_BUCKETS_S, took)] += 1

    def count_response_batch(self, path: str, method: str, status: int, took_us: list[int]) -> None:
        """`count_responses` for many at once: most of them fall into one bucket."""
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

    def counters(self, topic: str) -> TopicCounters:
        """The counters of a topic, for a handler to add to."""
        counters = self._topics.get(topic)
        if counters is None:
            counters = self._topics[topic] = TopicCounters()
        return counters

    def count_appended(self, topic: str, done: Appended) -> None:
        self.counters(topic).written += 0 if done.deduped else done.count

    def count_read(self, topic: str, records: int, *, gap: bool) -> None:
        counters = self.counters(topic)
        counters.read += records
        counters.gaps += gap

    # ── publishing, on any thread ─────────────────────────────────────────────────────────────

    def prometheus_text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        # The contract's counter has no `_total`, which the library adds, and integers have no fraction.
        text = generate_latest(self._registry).replace(b"tidelog_uptime_ms_total", b"tidelog_uptime_ms")
        return text.replace(b".0\n", b"\n")

    def summary(self) -> dict[str, Any]:
        """Return the metrics of the whole server as JSON."""
        now = self._snapshot()
        return {
            **_summarize(_SERVER, now),
            "wal": _summarize(_WAL, now.wal),
            **_summarize(_SCHEDULING, now),
            "health": None if now.health is None else health_json(now.health),
        }

    def _snapshot(self) -> _Snapshot:
        service = self._service
        engine = service.engine if service.is_ready else None
        shown = engine.topics_cached(TOPICS_MAX) if engine else []
        # An idle queue has no leases. One with series of its own is loaded for its counts.
        queues = _queue_totals(engine, shown) if engine else {}
        topics = engine.loaded_topics_cached() if engine else []
        if engine is not None:
            queues |= _queue_totals(engine, [info for info in topics if info.topic not in queues])
        shards = engine.shards if engine else ()
        return _Snapshot(
            engine=engine,
            topics=topics,
            idle=engine.idle_totals if engine else IdleTotals(),
            shown=shown,
            queues=queues,
            wal=_WalTotals([shard.stats for shard in shards], any(shard.is_latched for shard in shards)),
            health=server_health(service) if engine else None,
            scheduler=service.push.scheduler,
            rejected_writes=service.writes.admission.rejected_total if engine else 0,
            streams=service.auth.stream_limit.count,
            watch_sessions=len(service.push.watch_sessions),
            channels=service.channels.manager_or_none,
            receivers=len(service.channels.streams),
            recovery_progress=service.recovery_progress,
            uptime_ms=service.clock.monotonic_ms() - service.started_ms,
        )

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        now = self._snapshot()
        yield from _collect(_SERVER, [((), now)])
        build = GaugeMetricFamily("tidelog_build_info", "1; its labels are the build.", labels=["version", "python"])
        build.add_metric([__version__, python_version()], 1)
        yield build
        by_class = GaugeMetricFamily("tidelog_topics_by_class", "Topics by durability class.", labels=["class"])
        for name in DURABILITY_CLASSES:
            by_class.add_metric([name], _count_of_class(name)(now))
        yield by_class
        yield from _collect(_SCHEDULING, [((), now)])
        yield self._limit_metrics()
        yield from self._topic_metrics(now)
        groups = now.engine.groups_cached(GROUPS_MAX) if now.engine else []
        rows = [((topic, group.group), group) for topic, group in groups]
        yield from _collect(_GROUP, rows, ["topic", "group"], "group_lag_")
        yield from _collect(_ENGINE, [((), now.engine)])
        yield from self._request_metrics()
        yield from _collect_channel_metrics(now.channels, now.receivers)
        if now.wal.shards:
            yield from _collect(_WAL, [((), now.wal)], prefix="wal_")
            fsync_us = sum(stats.sync_us for stats in now.wal.shards)
            fsyncs = HistogramMetricFamily("tidelog_wal_fsync_latency_us", "Microseconds of an fsync.")
            fsyncs.add_metric([], _cumulative_buckets(FSYNC_BUCKETS_US, now.wal.fsync_counts), fsync_us)
            yield fsyncs
        if now.health is not None:
            yield from _collect(_HEALTH, [((), now.health)])
            tasks = [((task.name,), task) for task in now.health.tasks]
            yield from _collect(_BACKGROUND_TASK, tasks, ["task"], "background_")
        if now.engine is not None:
            yield from _collect(_REWRITE, [((), now.engine.rewrites)], prefix="rewrite_")
        if now.engine is not None and (tiers := now.engine.tier_status()).store is not None:
            yield from _collect(_TIERS, [((), tiers)])

    def _topic_metrics(self, now: _Snapshot) -> Iterator[Metric]:
        """Series of the first `TOPICS_MAX` topics by name."""
        self._forget_dropped_topics(now)
        truncated = len(now.shown) < len(now.topics) + now.idle.topics
        yield GaugeMetricFamily("tidelog_topic_metrics_truncated", "1 when not every topic has series.", truncated)
        zeros = TopicCounters()
        rows = [((info.topic,), (info, self._topics.get(info.topic, zeros))) for info in now.shown]
        yield from _collect(_TOPIC, rows, ["topic"], "topic_")
        queues = [
            (labels, (now.queues[info.topic], counters))
            for labels, (info, counters) in rows
            if info.topic in now.queues
        ]
        yield from _collect(_QUEUE, queues, ["topic"], "topic_queue_")

    def _forget_dropped_topics(self, now: _Snapshot) -> None:
        """Drop the counters of dropped topics. A topic that is created again starts from zero, as its seqs do."""
        known = {info.topic for info in (*now.topics, *now.shown)}
        for name in list(self._topics):
            if name not in known and now.engine is not None and now.engine.find(name) is None:
                self._topics.pop(name, None)

    def _limit_metrics(self) -> Metric:
        text = "Connections, streams and requests that were ended or rejected because a limit was reached."
        counter = CounterMetricFamily("tidelog_limits_met", text, labels=["limit"])
        for name, count in sorted(self._service.limit_counters.counts.items()):
            counter.add_metric([name], count)
        return counter

    def _request_metrics(self) -> Iterator[Metric]:
        labels = ["route", "method", "status"]
        counter = CounterMetricFamily("tidelog_requests", "Requests that were answered.", labels=labels)
        times = HistogramMetricFamily("tidelog_request_seconds", "Time to the response.", labels=labels)
        for (path, method, status), row in sorted(self._responses.items()):
            label_values = [path or "other", method, str(status)]
            counts = row.counts.copy()
            counter.add_metric(label_values, sum(counts))
            times.add_metric(label_values, _cumulative_buckets(REQUEST_BUCKETS_S, counts), row.seconds)
        yield counter
        yield times


def _queue_totals(engine: Engine, topics: Sequence[TopicInfo]) -> dict[str, QueueTotals]:
    """Return the jobs of every queue. An expired lease does not count."""
    totals: dict[str, QueueTotals] = {}
    for info in topics:
        topic = engine.find(info.topic) if info.config.type == "queue" else None
        if topic is None:
            continue  # a log, or dropped meanwhile
        try:
            queue = topic.queue()
            totals[info.topic] = QueueTotals(*queue.counts(), queue.expired_leases)
        except (NotAQueue, TopicNotFound):
            continue  # dropped meanwhile, and perhaps created again as a log
    return totals


def _collect_channel_metrics(manager: ChannelManager | None, receivers: int) -> Iterator[Metric]:
    """Yield the metrics of channels; zeros before they are restored."""
    counts = {} if manager is None else dict(manager.metrics.counts)
    durations = {} if manager is None else dict(manager.metrics.durations)
    for name, text, value in (
        ("channels_active", "Channels.", counts.get(("channels_active", ""), 0)),
        ("channels_skipped", "Channels that cannot be read.", 0 if manager is None else len(manager.report.skipped)),
        ("channel_receivers", "Subscriptions of connections to channels.", receivers),
    ):
        yield GaugeMetricFamily(f"tidelog_{name}", text, value)
    for name, text in _CHANNEL_COUNTERS.items():
        yield CounterMetricFamily(f"tidelog_{name}", text, counts.get((name, ""), 0))
    for name, text in _CHANNEL_RESULT_COUNTERS.items():
        counter = CounterMetricFamily(f"tidelog_{name}", text, labels=["result"])
        results = {_DEFAULT_RESULTS.get(name, SUCCESS): 0}
        results |= {result: value for (counted, result), value in counts.items() if counted == name}
        for result, value in sorted(results.items()):
            counter.add_metric([result], value)
        yield counter
    for name, text in _CHANNEL_DURATIONS.items():
        duration = durations.get(name) or DurationHistogram()
        histogram = HistogramMetricFamily(f"tidelog_{name}_seconds", text)
        histogram.add_metric([], _cumulative_buckets(DURATION_BOUNDS_S, duration.buckets.copy()), duration.sum_s)
        yield histogram


def server_health(service: Service) -> HealthState:
    """Return the engine's health with the tasks of the server's loop."""
    health, tasks = service.engine.health(), service.health.tasks()
    return health._replace(ok=health.ok and not any(task.failing for task in tasks), tasks=(*health.tasks, *tasks))


def health_json(health: HealthState) -> dict[str, Any]:
    """Return health as JSON. The corrupt places are in the log, and `tidelog check` finds them."""
    return {
        "ok": health.ok,
        "checkpoint_age_ms": health.checkpoint_age_ms,
        "wal_uncovered_bytes": health.uncovered_bytes,
        "lagging_topics": list(health.lagging[:TOPICS_MAX]),
        "corruptions": health.corruptions,
        "tasks": {
            task.name: {name: value for name, value in task._asdict().items() if name != "name"}
            for task in health.tasks
        },
    }


def _disk_free_bytes(engine: Engine) -> float:
    free = free_bytes(engine.context.disk, engine.context.root)
    return nan if free is None else free


def _cumulative_buckets(bounds: Iterable[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return bucket bounds with cumulative counts, as Prometheus needs them."""
    return list(zip((*(f"{bound:g}" for bound in bounds), "+Inf"), accumulate(counts), strict=True))


@operation("health", response=responses.Health)
def get_health(context: RequestContext) -> Response:
    """Check liveness."""
    service = context.service
    uptime_ms = service.clock.monotonic_ms() - service.started_ms
    return json_response(responses.Health("ok", __version__, uptime_ms))


@operation("healthz", response=responses.Health)
def get_healthz(context: RequestContext) -> Response:
    """Check liveness."""
    return get_health(context)


@operation("ready", response=responses.Ready, errors=("not_ready", "shutting_down"))
def get_ready(context: RequestContext) -> Response:
    """Check readiness."""
    service = context.service
    if service.stopping.is_set():
        raise ApiError("shutting_down", "the server is stopping; nothing was done, ask another one or retry")
    topics, health = len(service.engine.names()), server_health(service)
    # A degraded server is ready: it serves what is intact. Names and errors need a key and are in the metrics.
    failing = {task.name: task.failing for task in health.tasks if task.failing}
    summary = responses.ReadyHealth(
        health.ok, health.checkpoint_age_ms, len(health.lagging), health.corruptions, failing
    )
    return json_response(responses.Ready("ready", wal_replay_complete=True, topics=topics, health=summary))


@operation("readyz", response=responses.Ready, errors=("not_ready", "shutting_down"))
def get_readyz(context: RequestContext) -> Response:
    """Check readiness."""
    return get_ready(context)


@operation("metrics", response=responses.Metrics, response_content={"text/plain; version=0.0.4": STRING})
async def get_metrics(context: RequestContext) -> Response:
    """Read the metrics of the server.

    Prometheus text, unless application/json is accepted.
    """
    context.check_all_names_allowed()
    service = context.service
    if JSON_TYPE in (context.request.header(b"accept") or b""):
        return json_response(await service.run_blocking(service.metrics.summary))
    return Response(200, await service.run_blocking(service.metrics.prometheus_text), CONTENT_TYPE)


@operation("metricsAlias", response=responses.Metrics, response_content={"text/plain; version=0.0.4": STRING})
async def get_metrics_alias(context: RequestContext) -> Response:
    """Read the metrics of the server, at the path where Prometheus looks by default."""
    return await get_metrics(context)
