"""One topic passed on to many: what an append costs, in frames of the WAL and in time, by the number of routers.

Sketch. An append is one frame whatever follows from it, and its ack does not wait for any copy. Copies are logged in
their targets by the thread that passes records on: two frames a pass and target. What is left is that this thread wants
the interpreter as well: with 1,000 routers it has 1,000 copies to make for each append, some 30 µs each, so it is
always late, and an ack may wait for a switch of threads (5 ms at Python's default; the engine sets less).
"""

from __future__ import annotations

import time
from statistics import median

from benchmarks.common import GB, Result, result, scratch_dir, steps

import tidelog
from tidelog.database import engine_of

ROUTERS = (0, 1, 10, 100, 1000)


def run(quick: bool) -> list[Result]:
    appends, rounds = (50, 2) if quick else (300, 5)
    frames: dict[int, list[float]] = {}
    waits: dict[int, list[float]] = {}
    behind: dict[int, list[float]] = {}
    copies: dict[int, list[float]] = {}
    with scratch_dir(GB) as place, steps("fan-out", len(ROUTERS)) as done:
        for count in ROUTERS:
            with tidelog.open(str(place / str(count)), routers_max=0) as log:
                source = log.topic("source")
                for number in range(count):
                    log.router(f"r{number}", "source", f"dest-{number}")
                last = log.topic(f"dest-{count - 1}") if count else source
                for _ in range(rounds + 1):
                    before = sum(shard.stats.frames for shard in engine_of(log).shards)
                    copied = sum(shard.stats.copied_frames for shard in engine_of(log).shards)
                    took = []
                    for number in range(appends):
                        began = time.perf_counter()
                        source.append({"n": number})
                        took.append((time.perf_counter() - began) * 1e6)
                    after = sum(shard.stats.frames for shard in engine_of(log).shards)
                    began = time.perf_counter()
                    assert last.state().head_seq == source.head_seq, "a reader of a copy sees all that was written"
                    frames.setdefault(count, []).append((after - before) / appends)
                    waits.setdefault(count, []).append(median(took))
                    behind.setdefault(count, []).append((time.perf_counter() - began) * 1e3)
                    log.checkpoint()  # which passes on all that there is
                    copied = sum(shard.stats.copied_frames for shard in engine_of(log).shards) - copied
                    copies.setdefault(count, []).append(copied / appends / max(count, 1))
            done()
    rows: list[Result] = []
    for count in ROUTERS:
        name = f"an append passed on to {count}" if count else "an append that nobody passes on"
        rows.append(result(f"{name}: frames", frames[count][1:], "frames", max_value=1.5, kind="gate"))
        rows.append(
            result(f"{name}: ack", waits[count][1:], "µs", limit=waits[0][1:], limit_name="without routers")
            if count
            else result(f"{name}: ack", waits[count][1:], "µs")
        )
        if count:
            rows.append(result(f"{name}: the last copy caught up", behind[count][1:], "ms"))
            rows.append(result(f"{name}: frames of copies, a target", copies[count][1:], "frames"))
    return rows
