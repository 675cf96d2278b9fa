"""Topics: the engine behind `tidelog.open`."""

from __future__ import annotations

from typing import Any

from tidelog.clock import Clock
from tidelog.disk.seam import Disk
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.encode import Batch
from tidelog.engine.engine import Engine
from tidelog.engine.floors import Gap
from tidelog.engine.groups import Group, GroupState, Lag, Preview, timestamp_ms
from tidelog.engine.health import Corruption, HealthState, TaskState
from tidelog.engine.ledger import Gaps, LedgerRow
from tidelog.engine.opening import opened
from tidelog.engine.pages import Pass, TextPage
from tidelog.engine.queues import (
    Cohort,
    Extended,
    Job,
    Leased,
    Queue,
    QueueCounts,
    Redriven,
    Settled,
    Want,
    Worker,
    divide,
    lease_token,
    parse_lease_token,
)
from tidelog.engine.report import Progress, Report
from tidelog.engine.results import Appended, Counts, Deleted, Page, Record, TopicState
from tidelog.engine.topic import Topic
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.json_rows import Show
from tidelog.wal import Shard, Token

__all__ = [
    "SEQ_MAX",
    "Appended",
    "Batch",
    "Cohort",
    "Corruption",
    "Counts",
    "Deleted",
    "Engine",
    "EngineConfig",
    "Extended",
    "Gap",
    "Gaps",
    "Group",
    "GroupState",
    "HealthState",
    "Job",
    "Lag",
    "Leased",
    "LedgerRow",
    "Page",
    "Pass",
    "Preview",
    "Queue",
    "QueueCounts",
    "Record",
    "Redriven",
    "Report",
    "Settled",
    "Shard",
    "Show",
    "TaskState",
    "TextPage",
    "Token",
    "Topic",
    "TopicConfig",
    "TopicState",
    "Want",
    "Worker",
    "divide",
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
    found = opened(
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
