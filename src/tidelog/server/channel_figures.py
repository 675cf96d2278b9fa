"""Figures of channels: what their manager counts, told as Prometheus wants it. The names are the manager's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tidelog.channels import ChannelManager
from tidelog.channels.metrics import BOUNDS_S, SUCCESS, Duration

_PLAIN: Final = {
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
_BY_RESULT: Final = {
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
_USUAL: Final = {"outbound_queue_full": "slow", "hook_payloads": "valid", "message_log_upkeep": "disk_full"}
_TIMES: Final = {
    "store_save_duration": "Time of a save.",
    "store_load_duration": "Time of a load.",
    "message_log_append_duration": "Time of an append.",
    "message_log_flush_duration": "Time of a sync.",
    "message_log_read_duration": "Time of a read.",
    "message_log_recovery_duration": "Time to open a message log.",
    "fifo_cursor_duration": "Time to move a cursor.",
}


def collect(manager: ChannelManager | None, receivers: int) -> Iterator[Metric]:
    """All of it; nothing but zeros where there are no channels yet."""
    counts = {} if manager is None else dict(manager.metrics.counts)
    durations = {} if manager is None else dict(manager.metrics.durations)
    for name, text, value in (
        ("channels_active", "Channels.", counts.get(("channels_active", ""), 0)),
        ("channels_skipped", "Channels that cannot be read.", 0 if manager is None else len(manager.report.skipped)),
        ("channel_receivers", "Connections that listen to a channel, for each channel.", receivers),
    ):
        yield GaugeMetricFamily(f"tidelog_{name}", text, value)
    for name, text in _PLAIN.items():
        yield CounterMetricFamily(f"tidelog_{name}", text, counts.get((name, ""), 0))
    results: dict[str, dict[str, int]] = {name: {_USUAL.get(name, SUCCESS): 0} for name in _BY_RESULT}
    for (name, result), value in counts.items():
        if name in results:
            results[name][result] = value
    for name, text in _BY_RESULT.items():
        counter = CounterMetricFamily(f"tidelog_{name}", text, labels=["result"])
        for result, value in sorted(results[name].items()):
            counter.add_metric([result], value)
        yield counter
    for name, text in _TIMES.items():
        yield _histogram(name, text, durations.get(name) or Duration())


def _histogram(name: str, text: str, found: Duration) -> Metric:
    made = HistogramMetricFamily(f"tidelog_{name}_seconds", text)
    counts = found.buckets.copy()
    bounds = (*(f"{bound:g}" for bound in BOUNDS_S), "+Inf")
    made.add_metric([], list(zip(bounds, accumulate(counts), strict=True)), found.sum_s)
    return made
