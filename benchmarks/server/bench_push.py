"""Push over loopback: from the moment a write is sent to the moment its event was received by each watcher.

Sketch. There and back is 120 µs, of which a watcher sees the way there and one wake-up more. Between them lie 80 µs
of Python to take the write and 40 to render the page, once for all watchers; each watcher costs 6 µs of Python and a
`send`, 10 to 15 µs. That is when the server does nothing else; after the 10 ms of rest between two writes neither its
code nor its data is in a processor's cache, and all of it takes about three times as long. Expected for a disk
topic: 0.45 ms with one watcher, 0.6 with ten, 1.8 with a hundred, half of which are served before the median; an
fsync topic adds its sync.

One writer at a steady pace that leaves the server idle most of the time, all watchers in the generator's own loop. An
event is received when the generator has learnt that it can be read: what it takes to read the events that came along
with it is the generator's own time. Each write is received by all before the next one goes out.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from select import EPOLLIN, epoll
from typing import NamedTuple

from benchmarks.common import GB, Result, alternate, result, room
from benchmarks.server.load import connect, percentile_ms, post
from benchmarks.server.peers import Server, call, texts, tidelog

_PATIENCE_S = 10.0
_PAUSE_S = 0.01

# watchers → the most that p50 and p99 may be, in ms.
_MOST = {1: (0.5, 2.0), 10: (0.7, 3.0), 100: (2.5, 8.0)}


class Round(NamedTuple):
    p50: float
    p99: float


def run(quick: bool) -> list[Result]:
    writes, rounds = (20, 1) if quick else (150, 5)
    noted: dict[str, list[Round]] = {}
    classes = ("disk", "fsync")
    with room(GB // 4) as place, tidelog(place / "tidelog") as server:
        work = {
            _named(durability, watchers): partial(_round, server, durability, watchers, writes, noted)
            for durability in classes
            for watchers in _MOST
        }
        alternate("push", rounds, work)
    rows = []
    for durability in classes:
        gate = durability == "disk"  # what a topic is unless it is asked to be something else
        for watchers, most in _MOST.items():
            name = _named(durability, watchers)
            for told, limit in zip(Round._fields, most, strict=True):
                values = [getattr(each, told) for each in noted[name][1:]]
                rows.append(
                    result(
                        f"{name}, {told}",
                        values,
                        "ms",
                        most=limit,
                        kind="gate" if gate else "information",
                    )
                )
    return rows


def _named(durability: str, watchers: int) -> str:
    return f"write → receipt over SSE, {durability}, {watchers} watcher{'s' if watchers > 1 else ''}"


# ── one round: the median of all receipts ─────────────────────────────────────────────────────────


def _round(server: Server, durability: str, watchers: int, writes: int, noted: dict[str, list[Round]]) -> float:
    name = f"push-{durability}-{watchers}"
    call(server.port, "DELETE", f"/v0/topics/{name}")
    call(server.port, "PUT", f"/v0/topics/{name}", {"durability": durability})
    open_ = [watch(server, name) for _ in range(watchers)]
    writer = connect(server.port)
    try:
        found = sorted(_receipts(writer, open_, name, writes))
    finally:
        for sock in (*open_, writer):
            sock.close()
    made = Round(percentile_ms(found, 0.5), percentile_ms(found, 0.99))
    noted.setdefault(_named(durability, watchers), []).append(made)
    return made.p50


def watch(server: Server, name: str) -> socket.socket:
    """A stream of a topic's events that has told what was there before."""
    wid = call(server.port, "POST", "/v0/watch", {"topics": {name: {"tail": True}}})["wid"]
    sock = connect(server.port)
    sock.sendall(f"GET /v0/watch/{wid} HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n".encode())
    came = b""
    while b"event: caught-up" not in came:
        came += sock.recv(4096)
    return sock


def _receipts(writer: socket.socket, watchers: Sequence[socket.socket], name: str, writes: int) -> list[float]:
    """Seconds from the write to each receipt."""
    ask = post(f"/v0/topics/{name}", b'{"records":[{"data":%b}]}' % texts(100)[0])
    found: list[float] = []
    clock = time.perf_counter
    by_fd = {sock.fileno(): sock for sock in (*watchers, writer)}
    with epoll() as poll:
        for fd, sock in by_fd.items():
            sock.setblocking(False)
            poll.register(fd, EPOLLIN)
        for number in range(1, writes + 1):
            needle, missing, answered = b'"$seq":%d,' % number, set(by_fd), False
            missing.discard(writer.fileno())
            began = clock()
            writer.send(ask)
            while missing or not answered:
                events = poll.poll(_PATIENCE_S)
                took = clock() - began  # all of them could be read by now
                if not events:
                    raise TimeoutError(f"write {number} was not received by {len(missing)} of {len(watchers)}")
                for fd, _ in events:
                    data = by_fd[fd].recv(65_536)
                    if not data:
                        raise ConnectionError("the server closed a stream")
                    if by_fd[fd] is writer:
                        answered = True
                    elif needle in data:
                        found.append(took)
                        missing.discard(fd)
            time.sleep(_PAUSE_S)
    return found
