"""The process that gets killed: threads append, delete and checkpoint, and say what was acked, after it was.

A topic first round thread number      a batch was acked
d topic round thread number            the records of this batch are about to be deleted
D topic round thread number            and now they are
"""

from __future__ import annotations

import os
import sys
from threading import Thread
from typing import Any

import tidelog

TOPICS = {"f": "fsync", "d": "disk"}
THREADS = 4
LIMITS: dict[str, Any] = {
    "wal_file_bytes": 1 << 15,
    "checkpoint_bytes": 1 << 16,
    "segment_events_max": 50,
    "segment_bytes_max": 1 << 14,
}


def batch_of(spin: int, thread: int, number: int) -> list[bytes]:
    """The records of one batch: the judge computes the same."""
    many = 1 + (number * 7 + thread) % 5
    name = b"%d %d %d " % (spin, thread, number)
    filling = [bytes((number * 31 + at + i) % 251 for i in range(number * 37 % 400)) for at in range(many)]
    return [name + b"%d %d " % (at, many) + filled for at, filled in enumerate(filling)]


def tag_of(spin: int, thread: int, number: int) -> str:
    return f"{spin}:{thread}:{number}"


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one short write to a pipe is whole or not there


def work(log: tidelog.Database, spin: int, thread: int, durability: str | None) -> None:
    name = sorted(TOPICS)[thread % len(TOPICS)]
    topic = log.topic(name, durability=durability or TOPICS[name])  # type: ignore[arg-type]
    number = 0
    while True:
        number += 1
        done = topic.append(batch_of(spin, thread, number), tag=tag_of(spin, thread, number))
        say("A", name, done.first_seq, spin, thread, number)
        if number % 5 == 0:
            old = number - number % 3
            say("d", name, spin, thread, old)
            topic.delete(match=tag_of(spin, thread, old))
            say("D", name, spin, thread, old)
        if number % 40 == 0 and thread == 0:
            log.checkpoint()
        if number % 25 == 0 and thread == 1:
            topic.seal()


def main(path: str, spin: int, shards: int, durability: str | None = None) -> None:
    log = tidelog.open(path, wal_shards=shards, **LIMITS)
    threads = [Thread(target=work, args=(log, spin, thread, durability)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
