"""Push over loopback: from the moment a write is sent to the moment its event was received by each watcher.

Sketch. There and back is 120 µs, of which a watcher sees the way there and one wake-up more. Between them lie 80 µs
of Python to take the write and 40 to render the page, once for all watchers; each watcher costs 6 µs of Python and a
`send`, 10 to 15 µs, and the first one 70 where it wakes a processor. Expected for a disk topic with a write each
millisecond: 0.35 ms with one watcher, 0.5 with ten, 1.5 with a hundred, half of which are served before the median; an
fsync topic adds its sync. After a rest of 10 ms neither the server's code nor its data is in a processor's cache, and
all of it takes two to three times as long.

One writer at a steady pace that leaves the server idle most of the time, all watchers in the generator's own loop,
which has a processor of its own where there are two. An event is received when the generator has learnt that it can
be read: what it takes to read the events that came along with it is the generator's own time. Each write is received
by all before the next one goes out.

Beside it stands a server that keeps nothing and passes the bytes on (`bare`): what this machine allows. A machine
whose processors rest, or serve others, between two writes takes several times as long for the first things that it
does then, whatever the server is. So there are rows for two paces, one with hardly any rest, and what was promised is
held against both.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from select import EPOLLIN, epoll
from typing import NamedTuple

from benchmarks.common import GB, Result, alternate, result, scratch_dir
from benchmarks.server.bare_http import EVENT
from benchmarks.server.load_generator import connect, percentile_ms, post
from benchmarks.server.peers import BARE, bare, request, texts, tidelog
from benchmarks.server.processes import Server, pin_processors

_PATIENCE_S = 10.0
_PAUSE_S = 0.01
_AWAKE_S = 0.001

# watchers → the most that p50 and p99 may be, in ms.
_MOST = {1: (0.5, 2.0), 10: (0.7, 3.0), 100: (2.5, 8.0)}


class Round(NamedTuple):
    p50: float
    p99: float


def run(quick: bool) -> list[Result]:
    writes, rounds = (20, 1) if quick else (150, 5)
    noted: dict[str, list[Round]] = {}
    classes = ("disk", "fsync")
    with (
        scratch_dir(GB // 4) as place,
        tidelog(place / "tidelog") as server,
        bare(place / "bare") as other,
        pin_processors(server, other),
    ):
        work: dict[str, Callable[[], float]] = {}
        for watchers in _MOST:
            for durability in classes:
                name = _named(durability, watchers)
                work[name] = partial(_round, server, durability, watchers, writes, _PAUSE_S, noted, name)
            name = _named("disk", watchers, awake=True)
            work[name] = partial(_round, server, "disk", watchers, writes, _AWAKE_S, noted, name)
            for awake, pause_s in ((False, _PAUSE_S), (True, _AWAKE_S)):
                name = _named(BARE, watchers, awake=awake)
                work[name] = partial(_bare_round, other, watchers, writes, pause_s, noted, name)
        alternate("push", rounds, work)
    rows = []
    for durability, awake in (("disk", False), ("fsync", False), ("disk", True)):
        gate = durability == "disk"  # what a topic is unless it is asked to be something else
        for watchers, most in _MOST.items():
            name, limit = _named(durability, watchers, awake=awake), _named(BARE, watchers, awake=awake)
            for told, bound in zip(Round._fields, most, strict=True):
                rows.append(
                    result(
                        f"{name}, {told}",
                        [getattr(each, told) for each in noted[name][1:]],
                        "ms",
                        limit=[getattr(each, told) for each in noted[limit][1:]],
                        limit_name=BARE,
                        max_value=bound,
                        kind="gate" if gate else "information",
                    )
                )
    return rows


def _named(what: str, watchers: int, *, awake: bool = False) -> str:
    many = f"{watchers} watcher{'s' if watchers > 1 else ''}"
    return f"write → receipt over SSE, {what}, {many}{', a write each ms' if awake else ''}"


# ── one round: the median of all receipts ─────────────────────────────────────────────────────────


def _round(
    server: Server,
    durability: str,
    watchers: int,
    writes: int,
    pause_s: float,
    noted: dict[str, list[Round]],
    row: str,
) -> float:
    name = f"push-{durability}-{watchers}"
    request(server.port, "DELETE", f"/v0/topics/{name}")
    request(server.port, "PUT", f"/v0/topics/{name}", {"durability": durability})
    ask = post(f"/v0/topics/{name}", b'{"records":[{"data":%b}]}' % texts(100)[0])
    open_ = [watch(server, name) for _ in range(watchers)]
    return _measured(
        connect(server.port), open_, ask, lambda number: b'"$seq":%d,' % number, writes, pause_s, noted, row
    )


def _bare_round(
    server: Server, watchers: int, writes: int, pause_s: float, noted: dict[str, list[Round]], row: str
) -> float:
    ask = post("/v0/topics/push", b'{"records":[{"data":%b}]}' % texts(100)[0])
    open_ = [_stream(server, "/") for _ in range(watchers)]
    return _measured(connect(server.port), open_, ask, lambda _: EVENT[-20:], writes, pause_s, noted, row)


def _measured(
    writer: socket.socket,
    watchers: list[socket.socket],
    ask: bytes,
    needle: Callable[[int], bytes],
    writes: int,
    pause_s: float,
    noted: dict[str, list[Round]],
    row: str,
) -> float:
    try:
        found = sorted(_receipts(writer, watchers, ask, needle, writes, pause_s))
    finally:
        for sock in (*watchers, writer):
            sock.close()
    made = Round(percentile_ms(found, 0.5), percentile_ms(found, 0.99))
    noted.setdefault(row, []).append(made)
    return made.p50


def watch(server: Server, name: str) -> socket.socket:
    """A stream of a topic's events that has told what was there before."""
    wid = request(server.port, "POST", "/v0/watch", {"topics": {name: {"tail": True}}})["wid"]
    return _stream(server, f"/v0/watch/{wid}")


def _stream(server: Server, path: str) -> socket.socket:
    sock = connect(server.port)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
    came = b""
    while b"event: caught-up" not in came:
        came += sock.recv(4096)
    return sock


def _receipts(
    writer: socket.socket,
    watchers: Sequence[socket.socket],
    ask: bytes,
    needle: Callable[[int], bytes],
    writes: int,
    pause_s: float,
) -> list[float]:
    """Seconds from the write to each receipt, which has the needle of its write."""
    found: list[float] = []
    clock = time.perf_counter
    by_fd = {sock.fileno(): sock for sock in (*watchers, writer)}
    with epoll() as poll:
        for fd, sock in by_fd.items():
            sock.setblocking(False)
            poll.register(fd, EPOLLIN)
        for number in range(1, writes + 1):
            wanted, missing, answered = needle(number), set(by_fd), False
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
                    elif wanted in data:
                        found.append(took)
                        missing.discard(fd)
            time.sleep(pause_s)
    return found
