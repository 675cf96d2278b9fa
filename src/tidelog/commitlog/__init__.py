"""The segmented log library: a durable log on disk in three lines.

    from tidelog.commitlog import SegmentedLog
    with SegmentedLog.open("events") as log:
        seq = log.append(b"hello")

One log, four layouts (`codecs/`): `tide` (Tidelog's own), `rustlog`, `laminar` and `narwhal`. Read `log.py` first:
`SegmentedLog` opens a directory (`recovery`) and keeps its segments in a `LogState` (`log_state`). `append`, `read`
and `cleaner` are functions over that state. `segment` owns the files of one segment, `codec` is the
interface of a layout. `async_log` is the same log for asyncio, over a `writer_thread`; `metrics` what to watch.
`partitions` keeps many logs under one root, `offsets` the consumers' positions; `log_copy` and `verify` work on whole
logs.
"""

from tidelog.commitlog.async_log import AsyncConsumerOffsets, AsyncSegmentedLog
from tidelog.commitlog.cleaner import CompactionResult, RetentionResult
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.log_copy import RestoreResult, convert, restore
from tidelog.commitlog.metrics import LogMetrics
from tidelog.commitlog.offsets import ConsumerOffsets
from tidelog.commitlog.partitions import PartitionedLog, PartitionInfo
from tidelog.commitlog.read import Page
from tidelog.commitlog.recovery import Damage, RecoveryReport
from tidelog.commitlog.storage import Storage
from tidelog.commitlog.verify import SegmentInfo, VerifyResult, inspect, verify
from tidelog.config import LogConfig

__all__ = [
    "AsyncConsumerOffsets",
    "AsyncSegmentedLog",
    "CompactionResult",
    "ConsumerOffsets",
    "Damage",
    "LogConfig",
    "LogMetrics",
    "Page",
    "PartitionInfo",
    "PartitionedLog",
    "RecoveryReport",
    "RestoreResult",
    "RetentionResult",
    "SegmentInfo",
    "SegmentedLog",
    "Storage",
    "VerifyResult",
    "convert",
    "inspect",
    "restore",
    "verify",
]
