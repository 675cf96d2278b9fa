"""Queues: jobs of a topic, handed out under leases.

door.py            the door: Queue
claims.py, settle.py, burial.py, redrive.py   one verb each, on …
state.py           … the state of a queue beside its topic, under the topic's lock
leases.py, alarms.py, cohort.py, projection.py   what is decided, without I/O
reading.py, schedule.py, jobs.py, steps.py    records by their seqs, as columns; what happened, as texts
gate.py, worker.py, history.py                waiting together; working; what happened
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
from tidelog.engine.queues.worker import Worker

__all__ = [
    "AckResult",
    "ClaimRequest",
    "ClaimResult",
    "ClaimWindow",
    "ExtendResult",
    "History",
    "Job",
    "Queue",
    "QueueCounts",
    "RedriveResult",
    "Worker",
    "divide_jobs",
    "lease_token",
    "parse_lease_token",
]
