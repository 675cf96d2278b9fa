"""The process that gets killed during backups: one thread appends and deletes, another makes backups, and both say so.

A first last        a batch was acked
B id head           a backup is whole; it has the seqs up to head
"""

from __future__ import annotations

import sys
from threading import Thread
from typing import Any

from tests.crash.topics.kill_writer import LIMITS, batch_of, say

import tidelog


def write(topic: tidelog.Topic, spin: int) -> None:
    number = 0
    while True:
        number += 1
        done = topic.append(batch_of(spin, 0, number))
        say("A", done.first_seq, done.last_seq)
        if number % 7 == 0:
            topic.delete(seqs=[done.first_seq])


def main(path: str, target: str, spin: int) -> None:
    limits: dict[str, Any] = LIMITS
    with tidelog.open(path, **limits) as db:
        Thread(target=write, args=(db.topic("f", durability="fsync"), spin), daemon=True).start()
        incremental = False
        while True:
            info = db.backup(target, incremental=incremental)
            say("B", info.id, info.topics.get("f", 0))
            incremental = True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
