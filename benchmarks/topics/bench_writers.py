"""Many writers at once: how many records share a sync, and what that is worth.

Sketch. A sync takes 180 µs. Alone, a writer gets 5000 a second out of that. Of 64 threads one syncs while the others
queue up, so each sync carries up to 63 records; but each of these is a thread that Python has to wake, 40 µs a piece
with the append itself: expected 20 000 records/s, four times the bare loop, with 30 to 60 records a sync. One thread
that keeps 64 tokens in the air needs nobody woken: expected twice that. Over 64 topics there are two WAL shards,
which halves what shares a sync.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.common import GB, Result, alternate, payloads, result, scratch_dir
from benchmarks.topics.bench_append import together
from benchmarks.topics.peers import LIMITS, Put, Session, Store, available

import tidelog
from tidelog.database import engine_of

_WRITERS = 64
_BARE = "bare write + fdatasync"


class _Syncs:
    """Records and syncs over the rounds of one candidate."""

    def __init__(self) -> None:
        self.per_sync: list[float] = []

    def note(self, log: tidelog.Database, before: int, records: int) -> None:
        self.per_sync.append(records / max(_syncs(log) - before, 1))


def _syncs(log: tidelog.Database) -> int:
    return sum(shard.stats.fsyncs for shard in engine_of(log).shards)


def run(quick: bool) -> list[Result]:
    lasting_s, rounds = (0.1, 1) if quick else (0.5, 5)
    datas = payloads(100)[:1]
    noted = {name: _Syncs() for name in ("one topic", "64 topics", "tokens")}
    peers = [store for store in available()[0] if store.promise == "synced" and store.name != "persist-queue"]
    with scratch_dir(GB // 2) as place:
        path = place / "store"
        figures = alternate(
            "64 writers",
            rounds,
            {
                "one topic": partial(_ours, path, 1, datas, lasting_s, noted["one topic"]),
                "64 topics": partial(_ours, path, _WRITERS, datas, lasting_s, noted["64 topics"]),
                "tokens": partial(_tokens, path, datas[0], lasting_s, noted["tokens"]),
                _BARE: partial(_rate, LIMITS[1], path, datas, 1, lasting_s),
                **{store.name: partial(_rate, store, path, datas, _WRITERS, lasting_s) for store in peers},
            },
        )
    rows = []
    for name, told in (
        ("one topic", "64 threads, one topic"),
        ("64 topics", "64 threads, a topic each"),
        ("tokens", "one thread, 64 tokens in the air"),
    ):
        full = f"append 100 B × 1, fsync, {told}"
        rows.append(result(full, figures[name], "/s", limit=figures[_BARE], limit_name=f"{_BARE}, one thread"))
        rows.append(result(f"{full}, records per sync", noted[name].per_sync[1:], "records"))
        if name == "one topic":
            rows += [
                result(f"{full} ÷ {peer.name}", figures[name], "/s", limit=figures[peer.name], limit_name=peer.name)
                for peer in peers
            ]
    return rows


# ── one round of a candidate: records a second ────────────────────────────────────────────────────


def _rate(store: Store, path: Path, datas: list[bytes], threads: int, lasting_s: float) -> float:
    try:
        with store.open(path) as session:
            return together(session.writer, datas, threads, lasting_s)
    finally:
        shutil.rmtree(path)


def _ours(path: Path, topics: int, datas: list[bytes], lasting_s: float, noted: _Syncs) -> float:
    store = Store("topics", "synced", partial(_opened, topics=topics, noted=noted))
    return _rate(store, path, datas, _WRITERS, lasting_s)


@contextmanager
def _opened(path: Path, topics: int, noted: _Syncs) -> Iterator[Session]:
    with tidelog.open(str(path)) as log:
        made = [log.topic(f"bench-{number}", durability="fsync") for number in range(topics)]
        turn = count()
        before = _syncs(log)

        def writer() -> Put:
            append: Callable[[object], object] = made[next(turn) % topics].append
            return lambda datas: append(datas[0])

        yield Session(writer, log.checkpoint)
        noted.note(log, before, sum(topic.head_seq for topic in made))


def _tokens(path: Path, data: bytes, lasting_s: float, noted: _Syncs) -> float:
    """One thread that never waits for less than the oldest of its writes."""
    try:
        with tidelog.open(str(path)) as log:
            topic = log.topic("bench", durability="fsync")
            before = _syncs(log)
            waiting = deque(topic.append_nowait(data) for _ in range(_WRITERS))
            start = time.perf_counter()
            done = 0
            while (now := time.perf_counter()) < start + lasting_s:
                waiting.popleft().wait()
                waiting.append(topic.append_nowait(data))
                done += 1
            for token in waiting:
                token.wait()
            noted.note(log, before, topic.head_seq)
            return done / (now - start)
    finally:
        shutil.rmtree(path)
