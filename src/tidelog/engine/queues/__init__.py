"""Queues: jobs of a topic, claimed under leases.

queue         the API: Queue. Read this first
claim         one claim round for several claimers, the claim window; ack, nack, extend, release
dead_letter   jobs delivered too often move to another topic; redrive moves them back
queue_state   the state of one queue, guarded by the lock of its topic
leases        the lease state machine, without I/O, and its durable form
jobs          reading job records by seq; schedules in their meta; claim results
history       the log of job events
worker        runs a function for every job; worker_options: retries and errors; schedule: every, cron
"""

from tidelog.engine.queues.claim import ClaimRequest, ClaimWindow, divide_jobs
from tidelog.engine.queues.dead_letter import RedriveResult
from tidelog.engine.queues.history import History
from tidelog.engine.queues.jobs import (
    AckResult,
    ClaimResult,
    ExtendResult,
    Job,
    QueueCounts,
    lease_token,
    parse_lease_token,
)
from tidelog.engine.queues.queue import Queue
from tidelog.engine.queues.schedule import cron, every
from tidelog.engine.queues.worker import Worker
from tidelog.engine.queues.worker_options import Backoff, RejectJob, RetryJob, backoff

__all__ = [
    "AckResult",
    "Backoff",
    "ClaimRequest",
    "ClaimResult",
    "ClaimWindow",
    "ExtendResult",
    "History",
    "Job",
    "Queue",
    "QueueCounts",
    "RedriveResult",
    "RejectJob",
    "RetryJob",
    "Worker",
    "backoff",
    "cron",
    "divide_jobs",
    "every",
    "lease_token",
    "parse_lease_token",
]
