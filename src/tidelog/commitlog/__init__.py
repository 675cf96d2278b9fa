"""The segmented log library: a durable log on disk in three lines.

    from tidelog.commitlog import SegmentedLog
    with SegmentedLog.open("events") as log:
        seq = log.append(b"hello")

One log, four layouts: `tide` (Tidelog's own), `rustlog`, `laminar` and `narwhal`.
"""

from tidelog.commitlog.clean import Retained
from tidelog.commitlog.compaction import Compacted
from tidelog.commitlog.convert import convert
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.offsets import ConsumerOffsets
from tidelog.commitlog.partitions import PartitionedLog, PartitionInfo
from tidelog.commitlog.read import Page
from tidelog.commitlog.recovery import Damage, Report
from tidelog.commitlog.restore import Restored, restore
from tidelog.commitlog.storage import Storage
from tidelog.commitlog.verify import SegmentInfo, Verdict, inspect, verify
from tidelog.config import LogConfig

__all__ = [
    "Compacted",
    "ConsumerOffsets",
    "Damage",
    "LogConfig",
    "Page",
    "PartitionInfo",
    "PartitionedLog",
    "Report",
    "Restored",
    "Retained",
    "SegmentInfo",
    "SegmentedLog",
    "Storage",
    "Verdict",
    "convert",
    "inspect",
    "restore",
    "verify",
]
