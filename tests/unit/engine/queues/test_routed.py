"""Queues that routers feed, and queues that they pass on: claims see every job, an ack takes none from a copy."""

from __future__ import annotations

import tidelog
from tidelog.engine.topic import topic_operations
from tidelog.testing import ManualClock, SimDisk


def opened() -> tidelog.Database:
    return tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)


def test_a_claim_sees_forwarded_jobs() -> None:
    with opened() as log:
        jobs = log.queue("jobs")
        log.router("r", "events", "jobs")
        log.topic("events").append(["a", "b"])
        assert [job.data for job in jobs.claim("n", 5)] == ["a", "b"]
        assert jobs.counts()[:2] == (0, 2)


def test_jobs_are_forwarded_before_an_ack_deletes_them() -> None:
    with opened() as log:
        jobs, copies = log.queue("jobs"), log.topic("copies")
        log.router("r", "jobs", "copies")
        jobs.put(["a", "b", "c"])
        held = jobs.claim("n", 2)
        assert topic_operations(jobs.topic).has_routers
        assert jobs.ack("n", held).count == 2
        assert [record.data for record in copies.read().records] == ["a", "b", "c"]
        assert log.topic("jobs").count == 1
