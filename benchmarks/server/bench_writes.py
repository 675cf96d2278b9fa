"""Writes over loopback: 100 B records in batches, every class of topic beside Redis Streams and NATS JetStream.

Sketch. A request that came before costs our server 10 µs, of which the socket takes half, so a lone connection waits
for the way there and back (120 µs) and the sync (200 µs), and 64 of them share a sync among thirty or more: 50 000 a
second, which is what Redis does. A batch of 100 is 11 KB of JSON: 50 µs to decode, 60 to make a frame of, then one
write and one sync with the other fifteen: 500 000 records/s, where Redis runs 1600 commands in that time and
reaches 200 000. JetStream that syncs always does it record by record: 3000.

One generator drives all of them (see `load`): one ask in the air a connection, a pipeline of N commands against one
request of N records, each its natural batch. It has a processor of its own, where there are two (see `processes`).
Each target is emptied before a round, all servers but the one that is
measured stand still, and what a server has in the end is compared with what it acknowledged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.common import GB, PROGRESS, Measurements, Result, alternate, result, scratch_dir
from benchmarks.server.load_generator import Outcome, drive
from benchmarks.server.peers import Target, missing, targets, texts, versions
from benchmarks.server.processes import pin_processors, run_alone

BATCHES = (1, 100, 1000)
CONNECTIONS = (1, 16, 64)
_DEVICE = "the device"
_BUSY = 0.97

# (class, batch, connections, peer) → the least that we promised ourselves.
_GATES = {
    ("fsync", 1, 64, "Redis always"): 0.9,
    ("fsync", 100, 16, "Redis always"): 2.0,
    ("disk", 100, 16, "Redis everysec"): 1.5,
    ("fsync", 1, 64, "JetStream sync always"): 5.0,
    ("fsync", 100, 16, "JetStream sync always"): 20.0,
}
_WAITS = ((1, 1), (1, 64), (100, 16))  # batches and connections whose waits are told


class Outcomes:
    """The outcomes of each target, round by round."""

    def __init__(self) -> None:
        self._found: dict[str, list[Outcome]] = {}

    def add(self, name: str, outcome: Outcome) -> None:
        self._found.setdefault(name, []).append(outcome)

    def ms(self, name: str, share: float) -> list[float]:
        return [outcome.ms(share) for outcome in self._found[name][1:]]

    def busy(self, name: str) -> float:
        return median(outcome.busy for outcome in self._found[name][1:])


def run(quick: bool) -> list[Result]:
    lasting_s, rounds = (0.05, 1) if quick else (0.3, 4)
    for line in missing():
        PROGRESS.console.print(line)
    PROGRESS.console.print(f"beside {versions() or 'no peer'}, all driven by the same generator", style="dim")
    records = texts(100)
    rows: list[Result] = []
    syncs: list[float] = []
    with scratch_dir(3 * GB if not quick else GB) as place:
        for batch in BATCHES:
            with targets(place) as everybody, pin_processors(*(target.server for target in everybody)):
                for connections in CONNECTIONS:
                    noted = Outcomes()
                    found = [target for target in everybody if batch * connections <= target.in_flight_max]
                    measure = partial(rate, everybody, records, batch, connections, lasting_s, noted)
                    work = {target.name: partial(measure, target) for target in found}
                    work[_DEVICE] = partial(sync_us, place)
                    figures = alternate(f"write {_label(batch, connections)}", rounds, work)
                    syncs += figures[_DEVICE]
                    rows += _rows(figures, found, batch, connections, noted)
    return [result("device: write of 4 KiB and fdatasync, median", syncs, "µs"), *rows]


def _label(batch: int, connections: int) -> str:
    return f"100 B × {batch}, {connections} connection{'s' if connections > 1 else ''}"


def _rows(
    figures: Measurements, found: Sequence[Target], batch: int, connections: int, noted: Outcomes
) -> list[Result]:
    rows = []
    for ours in found[:4]:
        name = f"write {_label(batch, connections)}, {ours.name}"
        peers = [target for target in found[4:] if target.promise == ours.promise]
        if not peers:
            rows.append(result(name, figures[ours.name], "/s"))
        for peer in peers:
            least = _GATES.get((ours.name, batch, connections, peer.name))
            rows.append(
                result(
                    f"{name} ÷ {peer.name}",
                    figures[ours.name],
                    "/s",
                    limit=figures[peer.name],
                    limit_name=peer.name + _is_cpu_bound(noted, peer.name),
                    min_ratio=least,
                    kind="information" if least is None else "gate",
                )
            )
        if ours.promise == "synced" and (batch, connections) in _WAITS:
            rows += _waits(name, ours, [peer for peer in peers if peer.name.startswith("Redis")], noted)
    return rows


def _is_cpu_bound(noted: Outcomes, name: str) -> str:
    return " (the generator is at its limit)" if noted.busy(name) > _BUSY else ""


def _waits(name: str, ours: Target, peers: Sequence[Target], noted: Outcomes) -> list[Result]:
    return [
        result(
            f"{name}, {told} of acks",
            noted.ms(ours.name, share),
            "ms",
            limit=noted.ms(peers[0].name, share) if peers else None,
            limit_name=peers[0].name if peers else "",
        )
        for share, told in ((0.5, "p50"), (0.99, "p99"))
    ]


# ── one round of a target: records a second ───────────────────────────────────────────────────────


def rate(
    everybody: Sequence[Target],
    records: Sequence[bytes],
    batch: int,
    connections: int,
    lasting_s: float,
    noted: Outcomes,
    target: Target,
) -> float:
    with run_alone(target.server, list({id(each.server): each.server for each in everybody}.values())):
        target.empty()
        outcome = drive(target.writers(records, batch, connections), lasting_s)
        acked = len(outcome.waits) * batch
        if target.count is not None and (kept := target.count()) != acked:
            raise RuntimeError(f"{target.name} acknowledged {acked} records and has {kept}")
    noted.add(target.name, outcome)
    return outcome.per_s * batch


def sync_us(place: Path, times: int = 60) -> float:
    """What a sync of one block at the end of a file takes: the least that a durable write waits for."""
    path = place / "sync"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    took = []
    try:
        for number in range(times):
            os.pwrite(fd, b"x" * 4096, number * 4096)
            began = time.perf_counter()
            os.fdatasync(fd)
            took.append(time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()
    return median(took) * 1e6
