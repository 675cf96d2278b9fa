"""A minute of everything at once: how long acks take when nothing rests, and whether memory stays where it was.

    16 connections   one record a request, fsync, the next as soon as the last is acknowledged
     4 connections   a hundred records a request, disk, twenty times a second each
     2 connections   diff pages of 1000, ten times a second each
     4 watchers      of the first topic, over SSE

Sketch. The sixteen share a sync among ten or so and the server is busy all the time, so an ack takes a turn of the
loop, a sync and a turn again: 1 ms. A page of 1000 holds the loop up for 1.5 ms, a batch for 0.2, a checkpoint works
beside it in a thread that has to be given the interpreter: p99 of 5 ms, p99.9 of 20. The topics keep 200 000 records
each and evict what is older, so memory rises until they are full and stays there.
"""

from __future__ import annotations

from itertools import chain, cycle
from typing import Any

from benchmarks.common import GB, Result, result, scratch_dir, steps
from benchmarks.server.bench_push import watch
from benchmarks.server.load_generator import Caller, EndlessReply, HttpReply, callers, drive, percentile_ms, post
from benchmarks.server.peers import request, texts, tidelog, write_asks
from benchmarks.server.processes import Server

_KEPT = 200_000
_PAGE = 1000
_SINGLES, _BATCHES, _READERS, _WATCHERS = 16, 4, 2, 4
_BATCH = 100
_WARM_SHARE = 0.1  # of the time, before memory is looked at for the first time


def run(quick: bool) -> list[Result]:
    lasting_s = 3.0 if quick else 60.0
    with scratch_dir(2 * GB) as place, tidelog(place / "tidelog") as server, steps("sustained", 2) as done:
        for name, durability in (("singles", "fsync"), ("batches", "disk")):
            request(server.port, "PUT", f"/v0/topics/{name}", {"durability": durability, "cap_records": _KEPT})
        _fill(server)
        _drive(server, lasting_s * _WARM_SHARE)
        done()
        before, held = _figures(server), server.memory_mb()
        acks = _drive(server, lasting_s)
        after, held_after = _figures(server), server.memory_mb()
        done()
    synced = after["fsyncs"] - before["fsyncs"]
    singles, batches, pages = (sorted(waits) for waits in acks)
    written = len(singles) + _BATCH * len(batches)
    name = f"sustained {lasting_s:g} s"
    rows = [
        result(f"{name}, {told}", [value], unit)
        for told, value, unit in (
            ("records written", written / lasting_s, "/s"),
            ("pages of 1000 read", len(pages) / lasting_s, "/s"),
            ("records per sync", written / max(synced, 1), "records"),
        )
    ]
    rows += [
        result(f"{name}, {whose}, {told}", [percentile_ms(waits, share)], "ms")
        for whose, waits in (("acks of one record, fsync", singles), ("acks of 100, disk", batches), ("pages", pages))
        for told, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
    ]
    for told, start, end in zip(("resident memory", "of it not of files"), held, held_after, strict=True):
        rows.append(result(f"{name}, {told} at the start", [start], "MB"))
        rows.append(result(f"{name}, {told} at the end", [end], "MB", limit=[start], limit_name="MB at the start"))
    return rows


def _figures(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = request(server.port, "GET", "/v0/metrics")["wal"]
    return found


def _fill(server: Server) -> None:
    """What is read while others write, and what has to be evicted from the first write on."""
    for name in ("singles", "batches"):
        asks = cycle(write_asks(texts(100), _PAGE, name))
        drive(callers(server.port, [iter([next(asks) for _ in range(_KEPT // _PAGE)])], HttpReply), 1e6)


def _drive(server: Server, lasting_s: float) -> tuple[list[float], list[float], list[float]]:
    """Everybody at once; how long acks of one, acks of a hundred, and pages took."""
    head = request(server.port, "GET", "/v0/topics/batches")["head_seq"]
    records = texts(100)
    singles = callers(server.port, (cycle(write_asks(records, 1, "singles")) for _ in range(_SINGLES)), HttpReply)
    batches = callers(server.port, (cycle(write_asks(records, _BATCH, "batches")) for _ in range(_BATCHES)), HttpReply)
    for number, caller in enumerate(batches):
        caller.pause_s = 0.05 + number / 1000  # not all at the same moment, again and again
    # Pages of what is there now; towards the end of a run they are evicted, and the answer has a tombstone too.
    diffs = [
        post("/v0/topics/batches/diff", b'{"from_seq":%d,"limit":%d}' % (head - _PAGE * back, _PAGE))
        for back in range(20, 0, -1)
    ]
    pages = callers(server.port, (cycle(diffs) for _ in range(_READERS)), HttpReply)
    for caller in pages:
        caller.pause_s = 0.1
    watchers = [Caller(watch(server, "singles"), iter(()), EndlessReply()) for _ in range(_WATCHERS)]
    drive([*singles, *batches, *pages, *watchers], lasting_s)
    return _waits(singles), _waits(batches), _waits(pages)


def _waits(found: list[Caller]) -> list[float]:
    return list(chain.from_iterable(caller.waits for caller in found))
