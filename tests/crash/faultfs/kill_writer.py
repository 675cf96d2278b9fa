"""The process whose power is cut: jobs of a queue, and messages of a channel. It prints what was acked, after it was.

P number     a job was put
a number     a job is about to be acked
A number     and now it is
M number     a message was published
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import tidelog

LIMITS: dict[str, Any] = {"wal_file_bytes": 1 << 15, "checkpoint_bytes": 1 << 16, "segment_events_max": 20}
CHANNEL, USER = "!c@x.org", "ann@x.org"
NEVER_ACKED = 7  # every so many jobs fail until they are dead letters


def say(what: str, number: int) -> None:
    os.write(1, b"%b %d\n" % (what.encode(), number))


def put(queue: tidelog.Queue, first: int) -> None:
    number = first
    while True:
        number += 1
        queue.put([number])
        say("P", number)


def settle(log: Any, queue: tidelog.Queue) -> None:
    done = 0
    while True:
        for job in queue.claim("worker", 3, lease_ms=600_000):
            number = job.data
            if number % NEVER_ACKED == 0:
                queue.nack("worker", [job])
                continue
            say("a", number)
            queue.ack("worker", [job])
            say("A", number)
            done += 1
            if done % 30 == 0:
                log.checkpoint()


def publish(log: Any, first: int) -> None:
    channel = log.channel(CHANNEL, user=USER)
    channel.join(persist=True)
    number = first
    while True:
        number += 1
        channel.publish(b"%d" % number)
        say("M", number)


def main(path: str, spin: int, shards: int, durability: str) -> None:
    log = tidelog.open(path, wal_shards=shards, **LIMITS)
    queue = log.queue("jobs", durability="fsync", max_deliveries=2, dead_letter="dead")
    if durability != "auto":
        log.topic("dead", durability=durability)  # type: ignore[arg-type]
    first = spin * 1_000_000
    work: list[tuple[Callable[..., None], tuple[object, ...]]] = [
        (put, (queue, first)),
        (settle, (log, queue)),
        (publish, (log, first)),
    ]
    threads = [Thread(target=target, args=args) for target, args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
