"""Publishing: from the call to the queue of every receiver, in one process, persistent and transient.

Sketch. A transient message is a tuple, a lock and a queue a receiver: some 5 µs and 0.2 µs a receiver, so 100,000 a
second to one and 30,000 to a hundred. A persistent one with qos 1 waits for one sync, which decides everything; eight
publishers share theirs. The limit of the transient rows is the same tuple appended to as many plain queues; of the
persistent ones, a write and an fdatasync of the same bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from threading import Thread

from benchmarks.common import GB, Result, alternate, payloads, result, scratch_dir

from tidelog.channels import Channel, ChannelLimits, ChannelManager, Subscription
from tidelog.channels.store import Message
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk

CHANNEL, SENDER = "!room@example.org", "sender@example.org"
_THREADS = 8


def run(quick: bool) -> list[Result]:
    transient, durable, rounds = (2_000, 100, 1) if quick else (20_000, 1_000, 5)
    rows: list[Result] = []
    with scratch_dir(GB // 2) as place:
        for members in (1, 10, 100):
            rows += _rows(place / f"t{members}", members, transient, rounds, persist=False)
        for members in (1, 10, 100):
            rows += _rows(place / f"p{members}", members, durable, rounds, persist=True)
        rows += _shared(place / "shared", durable, rounds)
    return rows


def _manager(path: Path, members: int, *, persist: bool) -> tuple[ChannelManager, Channel, list[Subscription]]:
    limits = ChannelLimits(clients_max=1_000)
    path.mkdir(parents=True, exist_ok=True)
    manager = ChannelManager(PosixDisk(), str(path), SystemClock(), limits=limits)
    sender = Channel(manager, CHANNEL, SENDER)
    if CHANNEL not in manager.channel_names():
        sender.join(persist=persist, max_clients=1_000)
        for number in range(members):
            Channel(manager, CHANNEL, f"user{number}@example.org").join()
    heard = [Channel(manager, CHANNEL, f"user{number}@example.org").subscribe() for number in range(members)]
    return manager, sender, heard


def _rows(path: Path, members: int, count: int, rounds: int, *, persist: bool) -> list[Result]:
    manager, sender, heard = _manager(path, members, persist=persist)
    data = payloads(256)
    waits: list[float] = []

    def publish() -> float:
        waits.clear()
        start = time.perf_counter()
        for number in range(count):
            began = time.perf_counter()
            sender.publish(data[number % 1000])
            waits.append(time.perf_counter() - began)
            if number % 500 == 499:
                _drain(heard)
        spent = time.perf_counter() - start
        _drain(heard)
        return count / spent

    limit = _sync_limit(path, data, count) if persist else _queue_limit(members, data, count)
    found = alternate(f"publish to {members}", rounds, {"ours": publish, "limit": limit})
    cuts = quantiles(waits, n=100)
    manager.close()
    how = "persistent, qos 1" if persist else "transient"
    name = f"publish 256 B to {members}, {how}"
    limit_name = "write and fdatasync" if persist else "plain queues"
    kept = result(
        name,
        found["ours"],
        "msg/s",
        limit=found["limit"],
        limit_name=limit_name,
        kind="information" if persist else "gate",
    )
    return [
        kept,
        result(f"{name}: p50", [median(waits) * 1e6], "µs"),
        result(f"{name}: p99", [cuts[98] * 1e6], "µs"),
    ]


def _drain(heard: list[Subscription]) -> None:
    for subscription in heard:
        subscription.take()


def _queue_limit(members: int, data: list[bytes], count: int) -> Callable[[], float]:
    def work() -> float:
        queues: list[deque[Message]] = [deque() for _ in range(members)]
        start = time.perf_counter()
        for number in range(count):
            message = Message(CHANNEL, number, 0, SENDER, data[number % 1000])
            for queue in queues:
                queue.append(message)
            if number % 500 == 499:
                for queue in queues:
                    queue.clear()
        return count / (time.perf_counter() - start)

    return work


def _sync_limit(path: Path, data: list[bytes], count: int) -> Callable[[], float]:
    def work() -> float:
        file = os.open(path / "limit", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        start = time.perf_counter()
        for number in range(count):
            os.write(file, data[number % 1000])
            os.fdatasync(file)
        spent = time.perf_counter() - start
        os.close(file)
        return count / spent

    return work


def _shared(path: Path, count: int, rounds: int) -> list[Result]:
    """Eight publishers of one channel: how much they gain by sharing syncs."""
    manager, _, heard = _manager(path, _THREADS, persist=True)
    data = payloads(256)

    def publish() -> float:
        def one(number: int) -> None:
            sender = Channel(manager, CHANNEL, f"user{number}@example.org")
            for turn in range(count // _THREADS):
                sender.publish(data[turn % 1000])

        threads = [Thread(target=one, args=(number,)) for number in range(_THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - start
        _drain(heard)
        return count // _THREADS * _THREADS / spent

    found = alternate("shared syncs", rounds, {"ours": publish, "limit": _sync_limit(path, data, count)})
    manager.close()
    name = f"publish 256 B, persistent, {_THREADS} publishers of one channel"
    return [result(name, found["ours"], "msg/s", limit=found["limit"], limit_name="write and fdatasync")]
