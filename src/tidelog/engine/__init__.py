"""Topics: a durable, numbered log of records per topic, in one data directory.

`engine.py` owns the directory, `topic.py` is the public handle of a topic. Each operation is a module of functions over
a `TopicState` (`topic_state.py`): read that first.
    write   batch_encoder -> append -> WAL group commit -> topic_index (memtable) -> listeners; large_append: blobs
    read    read or json_pages -> topic_index -> memtable and segment; large_read; latest -> key_index
    keep    background -> checkpoint: memtables become segments, manifest saved, WAL files removed
    remove  delete, retention; compaction -> key_index: only the newest record of each key stays
    free    rewrite: segments without deleted records; erase: records gone from every file, with a receipt
    tiers   tiers -> cold_claim, disk/segment_store: old segments move to a cold store; cold_reader reads them there
    open    startup -> recovery: manifest, then WAL replay; check verifies a directory; topic_table loads idle topics
    copy    segment_listing, segment_table: files for Spark; snapshot -> backup -> backup_target; restore, restore_cut
    beside  groups, group_leases: cursors of consumers, and consumers that share one; producer, producer_queue;
            tables, typed: other forms of records
            queues/: jobs and leases; routing/: copies of records between topics
"""

from __future__ import annotations

from tidelog.engine.batch_encoder import Batch
from tidelog.engine.compaction import Compacted
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.engine import Engine
from tidelog.engine.gap_log import GapEntries, GapEntry
from tidelog.engine.group_leases import ConsumerState
from tidelog.engine.groups import Group, GroupBatch, GroupState, Lag, Preview, timestamp_ms
from tidelog.engine.health import Corruption, HealthState, TaskState
from tidelog.engine.json_pages import BulkScan, JsonPage
from tidelog.engine.large_read import LargeData, RecordReader
from tidelog.engine.latest import LatestPage, LatestRecord, LatestTable
from tidelog.engine.producer import Delivery, Producer
from tidelog.engine.producer_queue import FailedRecords, ProducerStats, UnwrittenRecord
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
from tidelog.engine.results import Appended, Counts, Deleted, Page, Record, RecoveryReport, TopicInfo
from tidelog.engine.retention_preview import EvictedRange, RetentionPreview, UnreadLoss
from tidelog.engine.topic import Topic
from tidelog.engine.topic_index import Gap
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
    "Compacted",
    "ConsumerState",
    "Corruption",
    "Counts",
    "Deleted",
    "Delivery",
    "Engine",
    "EngineConfig",
    "EvictedRange",
    "ExtendResult",
    "FailedRecords",
    "FieldSelection",
    "Gap",
    "GapEntries",
    "GapEntry",
    "Group",
    "GroupBatch",
    "GroupState",
    "HealthState",
    "Job",
    "JsonPage",
    "Lag",
    "LargeData",
    "LatestPage",
    "LatestRecord",
    "LatestTable",
    "Page",
    "Preview",
    "Producer",
    "ProducerStats",
    "Queue",
    "QueueCounts",
    "Record",
    "RecordReader",
    "RecoveryReport",
    "RedriveResult",
    "RetentionPreview",
    "Shard",
    "ShardStats",
    "TaskState",
    "Topic",
    "TopicConfig",
    "TopicInfo",
    "UnreadLoss",
    "UnwrittenRecord",
    "Worker",
    "divide_jobs",
    "lease_token",
    "parse_lease_token",
    "timestamp_ms",
]
