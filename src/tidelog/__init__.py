"""Tidelog: a durable event log for Python and Spark.

`tidelog.open` returns a `Database` with the topics, queues, routers and channels of one directory. The segmented log
library is `tidelog.commitlog`; every error that a caller can see is in `tidelog.errors`.

`tidelog.connect` returns the same for a server; `tidelog.aio` has both for asyncio, `tidelog.protocols` the interface.
`tidelog.backup` lists, verifies and restores backups.

Start with `database`: it composes the `engine` (topics, queues, routers) and the `channels`. `server` serves a
`Database` over HTTP, `client` talks to it, `spark` and `pipelines` read and write topics as DataFrames, `cli` is the
command line.
"""

from tidelog import aio
from tidelog.channels import Channel, ChannelLimits
from tidelog.client import connect
from tidelog.database import Database, open
from tidelog.engine import Gap, GapEntry, Group, GroupBatch, Job, LargeData, Queue, Record, Topic, Worker, timestamp_ms
from tidelog.engine.queues import RejectJob, RetryJob, backoff, cron, every
from tidelog.engine.typed import TypedRecord, TypedTopic
from tidelog.errors import Error
from tidelog.version import __version__

__all__ = [
    "Channel",
    "ChannelLimits",
    "Database",
    "Error",
    "Gap",
    "GapEntry",
    "Group",
    "GroupBatch",
    "Job",
    "LargeData",
    "Queue",
    "Record",
    "RejectJob",
    "RetryJob",
    "Topic",
    "TypedRecord",
    "TypedTopic",
    "Worker",
    "__version__",
    "aio",
    "backoff",
    "connect",
    "cron",
    "every",
    "open",
    "timestamp_ms",
]
