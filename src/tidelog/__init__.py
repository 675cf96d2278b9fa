"""Tidelog: a durable event log for Python and Spark.

`tidelog.open` gives a program durable topics. The segmented log library is `tidelog.commitlog`; every
error a caller can see is in `tidelog.errors`.
"""

from tidelog.engine import Engine, Gap, Group, Job, LedgerRow, Queue, Record, Topic, Worker, open, timestamp_ms
from tidelog.errors import Error
from tidelog.version import __version__

__all__ = [
    "Engine",
    "Error",
    "Gap",
    "Group",
    "Job",
    "LedgerRow",
    "Queue",
    "Record",
    "Topic",
    "Worker",
    "__version__",
    "open",
    "timestamp_ms",
]
