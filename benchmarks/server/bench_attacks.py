"""What another client sees during an attack: the time of its small writes, one after the other, while one connection
floods the server.

Sketch. A flood gets one budget of the event loop's turn, 256 frames of 15 µs, which is 4 ms. A write needs three or
four turns: one to be read, one to be committed in a thread, one to be answered. Expected at most: 10 to 20 ms while the
flood goes on, and what a quiet server takes as soon as the connection was closed. Without a budget it is as long as
256 KiB of frames take: 0.2 to 1 s.

The clients are those of `tests/contract_http/attacks.py`. Each runs in a process of its own and sends as fast as the
server reads. A flood that the server closed begins again on a new connection until the writes are done. The
figures are of the slowest write, and of all.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from functools import partial
from itertools import count

from benchmarks.common import GB, Result, alternate, result, scratch_dir
from benchmarks.server.load_generator import connect, percentile_ms, post
from benchmarks.server.peers import tidelog
from benchmarks.server.processes import Server
from tests.contract_http.attacks import FLOODS, Flood, RawSocket
from tests.contract_http.client import Address

_QUIET = "no flood"
_numbers = count(1)


def run(quick: bool) -> list[Result]:
    writes, rounds = (50, 1) if quick else (300, 3)
    noted: dict[str, list[float]] = {}
    with scratch_dir(GB // 4) as place, tidelog(place / "tidelog") as server:
        work = {_QUIET: partial(_round, server, None, writes, noted)}
        work |= {flood.name: partial(_round, server, flood, writes, noted) for flood in FLOODS}
        found = alternate("attacks", rounds, work)
    rows = []
    for name, slowest in found.items():
        rows.append(result(f"{name}: slowest write", slowest, "ms"))
        rows.append(result(f"{name}: median write", noted[name][-len(slowest) :], "ms"))
    return rows


def _round(server: Server, flood: Flood | None, writes: int, noted: dict[str, list[float]]) -> float:
    """Milliseconds of the slowest write, in a topic of its own."""
    topic = f"attacked{next(_numbers)}"
    attacker = None
    if flood is not None:
        attacker = multiprocessing.get_context("fork").Process(target=_attack, args=(server.port, flood), daemon=True)
        attacker.start()
    took: list[float] = []
    try:
        with connect(server.port) as sock:
            for _ in range(writes):
                began = time.perf_counter()
                sock.sendall(post(f"/v0/topics/{topic}", b'{"records":[{"data":1}]}'))
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 20")
                took.append(time.perf_counter() - began)
    finally:
        if attacker is not None:
            attacker.terminate()
            attacker.join()
    noted.setdefault(flood.name if flood else _QUIET, []).append(percentile_ms(sorted(took), 0.5))
    return max(took) * 1000


def _attack(port: int, flood: Flood) -> None:
    while True:
        with suppress(OSError), RawSocket(Address("127.0.0.1", port)) as raw:
            raw.send(flood.opening("flooded"))
            for piece in flood.slices(flood.frames):
                if not raw.send(piece):
                    break
            if flood.ends:
                raw.read_rest()
