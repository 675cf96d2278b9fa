"""Topics: the engine behind `tidelog.open`."""

from __future__ import annotations

from typing import Any

from tidelog.clock import Clock
from tidelog.disk.interface import Disk
from tidelog.engine.batch_encoder import Batch
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.engine import Engine
from tidelog.engine.gap_log import GapEntries, GapEntry
from tidelog.engine.groups import Group, GroupState, Lag, Preview, timestamp_ms
from tidelog.engine.health import Corruption, HealthState, TaskState
from tidelog.engine.json_pages import BulkScan, JsonPage
from tidelog.engine.queues import (
    AckResult,
    ClaimRequest,
    ClaimResult,
    ClaimWindow,
    ExtendResult,
    Job,
    Queue,
    QueueCounts,
    RedriveResult,
    Worker,
    divide_jobs,
    lease_token,
    parse_lease_token,
)
from tidelog.engine.results import Appended, Counts, Deleted, Page, Progress, Record, RecoveryReport, TopicInfo
from tidelog.engine.startup import open_directory
from tidelog.engine.topic import Topic
from tidelog.engine.watermarks import Gap
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.json_rows import FieldSelection
from tidelog.wal import CommitFuture, Shard, ShardStats

__all__ = [
    "SEQ_MAX",
    "AckResult",
    "Appended",
    "Batch",
    "BulkScan",
    "ClaimRequest",
    "ClaimResult",
    "ClaimWindow",
    "CommitFuture",
    "Corruption",
    "Counts",
    "Deleted",
    "Engine",
    "EngineConfig",
    "ExtendResult",
    "FieldSelection",
    "Gap",
    "GapEntries",
    "GapEntry",
    "Group",
    "GroupState",
    "HealthState",
    "Job",
    "JsonPage",
    "Lag",
    "Page",
    "Preview",
    "Queue",
    "QueueCounts",
    "Record",
    "RecoveryReport",
    "RedriveResult",
    "Shard",
    "ShardStats",
    "TaskState",
    "Topic",
    "TopicConfig",
    "TopicInfo",
    "Worker",
    "divide_jobs",
    "lease_token",
    "open",
    "parse_lease_token",
    "timestamp_ms",
]


def open(
    path: str,
    *,
    read_only: bool = False,
    disk: Disk | None = None,
    clock: Clock | None = None,
    config: EngineConfig | None = None,
    accept_loss: bool = False,
    threads: bool = True,
    progress: Progress | None = None,
    **settings: Any,
) -> Engine:
    """Open the topics in `path`, making the directory where there is none, and recover what a crash left behind.

    One process writes: a second one is refused (Locked) and changes nothing. Any number may open it with `read_only`
    beside the writer; they see what was there when they opened it, `refresh` looks again, and reads that wait
    (`follow`, `read` with a timeout) do so by themselves. Settings are those of `EngineConfig`. `accept_loss` goes on
    where acknowledged records were lost to damage, which is refused otherwise. Without `threads` nothing happens by
    itself: call `tick`. `progress(what, done, total)` is told of long work.
    """
    found = open_directory(
        path,
        read_only=read_only,
        disk=disk,
        clock=clock,
        config=config,
        accept_loss=accept_loss,
        progress=progress,
        settings=settings,
    )
    try:
        return Engine(found, threads=threads)
    except BaseException:
        found.abandon()
        raise
