"""Queues: jobs of a topic, handed out under leases.

door.py            the door: Queue
claims.py, settle.py, burial.py, redrive.py   one verb each, on …
state.py           … the state of a queue beside its topic, under the topic's lock
leases.py, alarms.py, cohort.py, projection.py   what is decided, without I/O
reading.py, schedule.py, jobs.py, steps.py    records by their seqs, as columns; what happened, as texts
gate.py, worker.py, history.py                waiting together; working; what happened
"""

from tidelog.engine.queues.cohort import Cohort, Want, divide
from tidelog.engine.queues.door import Queue
from tidelog.engine.queues.history import History
from tidelog.engine.queues.jobs import (
    Extended,
    Job,
    Leased,
    QueueCounts,
    Settled,
    lease_token,
    parse_lease_token,
)
from tidelog.engine.queues.redrive import Redriven
from tidelog.engine.queues.worker import Worker

__all__ = [
    "Cohort",
    "Extended",
    "History",
    "Job",
    "Leased",
    "Queue",
    "QueueCounts",
    "Redriven",
    "Settled",
    "Want",
    "Worker",
    "divide",
    "lease_token",
    "parse_lease_token",
]
