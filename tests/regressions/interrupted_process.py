"""A process that is interrupted again and again while it writes, by real signals, and says what was acked as JSON.

    python interrupting.py <what> <path> <rounds> [settings …]

In every other round a thread sends SIGINT to the process, in the others a timer sends SIGALRM, whose handler raises as
well. Every write has a number of its own; a round is over when the interrupt was raised. At the end the process goes on
writing, undisturbed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from queue import SimpleQueue
from random import Random
from threading import Event, Thread
from types import FrameType
from typing import Any

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.engine.config import Durability

USER, CHANNEL = "ann@example.org", "!room@example.org"


class Alarm(Exception):
    """Raised by a signal handler, as a timeout would be."""


def on_alarm(number: int, frame: FrameType | None) -> None:
    raise Alarm(f"signal {number} in {frame}")


def topic(
    path: str, durability: Durability, threads: str, shards: str
) -> tuple[Callable[[int], int], Callable[[], None]]:
    log = tidelog.open(path, threads=threads == "threads", wal_shards=int(shards), wal_file_bytes=1 << 15)
    made = log.topic("t", durability=durability)
    return lambda number: made.append(b"%d" % number).first_seq, log.close


def queue(path: str) -> tuple[Callable[[int], int], Callable[[], None]]:
    """Each job is put, and another one is claimed and acked; of class fsync."""
    log = tidelog.open(path, wal_file_bytes=1 << 15)
    made = log.queue("t", durability="fsync")
    beside = log.queue("beside", durability="fsync")
    beside.put([{"n": number} for number in range(5000)])

    def write(number: int) -> int:
        for job in beside.claim("me", 2):
            beside.ack("me", job)
        return made.put(b"%d" % number).first_seq

    return write, log.close


def channel(path: str) -> tuple[Callable[[int], int], Callable[[], None]]:
    log = tidelog.open(path)
    room = log.channel(CHANNEL, user=USER).join(persist=True, message_flush_interval=0, max_persist_messages=1000)
    return lambda number: room.publish(b"%d" % number).seq, log.close


def segmented(path: str, codec: str, sync: str) -> tuple[Callable[[int], int], Callable[[], None]]:
    log = SegmentedLog.open(path, codec, sync=sync, segment_bytes_max=1 << 13)
    return lambda number: log.append(b"%d" % number), log.close


def main(what: str, path: str, rounds: str, *settings: str) -> None:
    makers: dict[str, Any] = {"topic": topic, "queue": queue, "channel": channel, "segmented": segmented}
    write, close = makers[what](path, *settings)
    acked: dict[int, int] = {}
    interrupts = number = 0
    random, asked = Random(what), SimpleQueue[float]()
    signal.signal(signal.SIGALRM, on_alarm)

    def interrupt() -> None:
        while (delay_s := asked.get()) >= 0:
            Event().wait(delay_s)
            os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()
    while interrupts < int(rounds):
        delay_s = random.random() / 100
        try:
            if interrupts % 2:
                signal.setitimer(signal.ITIMER_REAL, delay_s + 1e-6)
            else:
                asked.put(delay_s)
            while True:
                number += 1
                seq = write(number)
                acked[number] = seq
        except (KeyboardInterrupt, Alarm):
            interrupts += 1
    for _ in range(20):
        number += 1
        acked[number] = write(number)
    close()
    sys.stdout.write(json.dumps({"acked": acked, "last": number, "interrupts": interrupts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
