"""Jobs a second from produce to claim to ack, beside Redis lists and PostgreSQL with SKIP LOCKED.

Sketch. A job takes three calls: put, claim, ack, each for as many jobs as a claim takes. Our server needs some 60 µs of
Python for each call beside the sockets, so claims of one are bound by that, at about 4,000 jobs/s, where Redis needs a
tenth; with claims of 64 what is left of it is a microsecond a job. PostgreSQL writes a row, updates it and deletes it.

Every worker is a thread of this process with a connection of its own that does all three for its share; all targets are
driven by the same loop. `durable`: each step that is acknowledged survives a power cut: an fsync queue; Redis with
appendfsync always; synchronous_commit. Otherwise it survives a kill. Redis moves jobs to a second list while they are
held; nothing there ever gives them back by itself, so that is less than a lease.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Barrier, Thread
from typing import Any

from benchmarks.common import GB, PROGRESS, Result, alternate, result, scratch_dir
from benchmarks.queues.postgres import missing, postgres, session
from benchmarks.server import peers
from benchmarks.server.load_generator import connect
from benchmarks.server.peers import resp
from benchmarks.server.processes import Server, run_alone

WORKERS = (1, 10, 50)
SIZES = (1, 8, 64)
_DATA = "x" * 98
Turn = Callable[[], int]  # puts, claims and acks its share; how many jobs that were


def run(quick: bool) -> list[Result]:
    lasting_s, rounds = (0.2, 1) if quick else (0.6, 3)
    rows: list[Result] = []
    if why := missing():
        PROGRESS.console.print(f"without PostgreSQL: {why}")
    with scratch_dir(2 * GB) as place, ExitStack() as running:
        ours = running.enter_context(peers.tidelog(place / "ours"))
        redis = {name: running.enter_context(peers.redis(place / name, name)) for name in ("always", "everysec")}
        database = None if missing() else running.enter_context(postgres(place / "postgres"))
        servers = [ours, *redis.values(), *([database] if database else [])]
        for durable in (True, False):
            for workers in WORKERS:
                for size in SIZES:
                    kept = redis["always" if durable else "everysec"]
                    made = {"tidelog": partial(_ours, ours, durable, size), "Redis lists": partial(_redis, kept, size)}
                    if database is not None:
                        made["PostgreSQL"] = partial(_postgres, database, durable, size)
                    where = {"tidelog": ours, "Redis lists": kept, "PostgreSQL": database}
                    work = {
                        name: partial(_rate, where[name], servers, turns, workers, lasting_s)
                        for name, turns in made.items()
                    }
                    title = f"jobs {'durable' if durable else 'buffered'}, {workers} workers, {size} a claim"
                    found = alternate(title, rounds, work)
                    rows += [
                        result(f"{title} ÷ {name}", found["tidelog"], "/s", limit=found[name], limit_name=name)
                        for name in made
                        if name != "tidelog"
                    ]
    return rows


def _rate(
    chosen: Server | None,
    servers: list[Server],
    turns: Callable[[int], Iterator[Turn]],
    workers: int,
    lasting_s: float,
) -> float:
    """Jobs a second of so many workers, each with a turn of its own."""
    assert chosen is not None, "what is measured runs"
    done = [0] * workers
    with run_alone(chosen, servers), ExitStack() as open_turns:
        mine = [open_turns.enter_context(contextmanager(turns)(number)) for number in range(workers)]
        start = Barrier(workers + 1)
        until = [0.0]

        def work(number: int) -> None:
            start.wait()
            while time.perf_counter() < until[0]:
                done[number] += mine[number]()

        threads = [Thread(target=work, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        until[0] = began + lasting_s
        start.wait()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - began)


# ── ours ──────────────────────────────────────────────────────────────────────────────────────────


def _ours(server: Server, durable: bool, size: int, number: int) -> Iterator[Turn]:
    queue = f"jobs-{'durable' if durable else 'buffered'}"
    peers.request(server.port, "PUT", f"/v0/topics/{queue}", {"type": "queue", "durable": durable})
    node = f"w{number}"
    with connect(server.port) as sock:
        put = _post(queue, "", {"records": [{"data": _DATA}] * size})
        claim = _post(queue, "/claim", {"node": node, "max": size})

        def turn() -> int:
            _ask(sock, put)
            jobs = _ask(sock, claim)["claimed"]
            seqs, leases = [job["$seq"] for job in jobs], [job["lease_id"] for job in jobs]
            acked: int = _ask(sock, _post(queue, "/ack", {"node": node, "seqs": seqs, "lease_ids": leases}))["acked"]
            return acked

        yield turn


def _post(queue: str, path: str, body: object) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST /v0/topics/{queue}{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def _ask(sock: socket.socket, request: bytes) -> dict[str, Any]:
    sock.sendall(request)
    data = sock.recv(1 << 18)
    while b"\r\n\r\n" not in data:
        data += sock.recv(1 << 18)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
    while len(body) < length:
        body += sock.recv(1 << 18)
    if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")):
        raise RuntimeError(body.decode())
    answer: dict[str, Any] = json.loads(body)
    return answer


# ── Redis: a list, and a second one for what somebody holds ───────────────────────────────────────


def _redis(server: Server, size: int, number: int) -> Iterator[Turn]:
    held = b"held-%d" % number
    with connect(server.port) as sock:
        put = resp(b"LPUSH", b"jobs", *[_DATA.encode()] * size)
        claim = resp(b"LMOVE", b"jobs", held, b"RIGHT", b"LEFT") * size
        ack = resp(b"LREM", held, b"1", _DATA.encode()) * size

        def turn() -> int:
            _replies(sock, put, 1)
            got = sum(reply != b"-1" for reply in _replies(sock, claim, size))
            _replies(sock, ack, size)
            return got

        yield turn


def _replies(sock: socket.socket, asks: bytes, count: int) -> list[bytes]:
    """What so many commands were answered: the first line of each."""
    sock.sendall(asks)
    data, at, found = b"", 0, list[bytes]()
    while len(found) < count:
        end = data.find(b"\r\n", at)
        if end >= 0 and data[at : at + 1] == b"$" and data[at + 1 : end] != b"-1":
            stop = end + 2 + int(data[at + 1 : end]) + 2
            if len(data) >= stop:
                found.append(data[at + 1 : end])
                at = stop
                continue
        elif end >= 0:
            found.append(data[at + 1 : end])
            at = end + 2
            continue
        data += sock.recv(1 << 18)
    return found


# ── PostgreSQL: a table, and rows that others hold are passed over ────────────────────────────────

_CLAIM = """UPDATE jobs SET holder = %s, held_until = now() + interval '30 s' WHERE id IN (
    SELECT id FROM jobs WHERE held_until < now() ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, data"""


def _postgres(server: Server, durable: bool, size: int, number: int) -> Iterator[Turn]:
    with session(server, durable=durable) as database:

        def turn() -> int:
            database.execute("INSERT INTO jobs (data) SELECT %s FROM generate_series(1, %s)", (_DATA, size))
            rows = database.execute(_CLAIM, (f"w{number}", size)).fetchall()
            database.execute("DELETE FROM jobs WHERE id = ANY(%s)", ([row[0] for row in rows],))
            return len(rows)

        yield turn
