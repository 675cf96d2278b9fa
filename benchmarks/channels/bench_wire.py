"""From a publish over the network to every receiver: latency one by one, and messages a second, beside Redis and NATS.

Sketch. A transient publish over a WebSocket is one frame in, one turn of the loop and a frame out for each receiver:
some 60 µs of Python for the publish and 15 for each receiver, so 10,000 a second to one, 4,000 to ten and 600 to a
hundred, where Redis, in C and without JSON, has ten times that. A persistent one waits for its sync: with one at a time
that decides everything; pipelined, a batch shares it. JetStream before 2.10 does not sync before it answers: it is
beside the persistent rows as it comes, and keeps less of a promise.

All are driven by one loop over raw sockets in this process, which also reads what a hundred receivers get: that is
part of every figure, for everybody alike. Latency: one message, received by all, then the next. Rate: 64 messages in
the air, until all receivers have all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from select import EPOLLIN, epoll
from shutil import which

from benchmarks.channels import raw_sockets
from benchmarks.channels.raw_sockets import MarkCounter, PubSubSession
from benchmarks.common import GB, PROGRESS, Result, alternate, result, scratch_dir
from benchmarks.server import peers
from benchmarks.server.load_generator import percentile_ms
from benchmarks.server.processes import Server, run_alone

MEMBERS = (1, 10, 100)
_WINDOW = 64
_PATIENCE_S = 30.0


def run(quick: bool) -> list[Result]:
    ones, many, rounds = (30, 300, 1) if quick else (300, 4_000, 3)
    rows: list[Result] = []
    for said in peers.missing():
        PROGRESS.console.print(said)
    with scratch_dir(GB) as place, ExitStack() as running:
        start = running.enter_context
        ours = start(peers.tidelog(place / "tidelog", TIDELOG_API_KEYS="root", TIDELOG_MAX_CHANNEL_MEMBERS="1000"))
        transient: dict[str, tuple[Server, raw_sockets.OpenSession]] = {
            "tidelog": (ours, partial(raw_sockets.tidelog_channel, ours, False))
        }
        persistent: dict[str, tuple[Server, raw_sockets.OpenSession]] = {
            "tidelog": (ours, partial(raw_sockets.tidelog_channel, ours, True))
        }
        if which("redis-server"):
            redis = start(peers.redis(place / "redis", "always"))
            transient["Redis pub/sub"] = (redis, partial(raw_sockets.redis_pubsub, redis))
            persistent["Redis Streams, synced"] = (redis, partial(raw_sockets.redis_streams, redis))
        if which("nats-server"):
            nats = start(peers.nats(place / "nats", always=False))
            persistent["JetStream, not synced"] = (nats, partial(raw_sockets.jetstream, nats))
        servers = [server for server, _ in {**transient, **persistent}.values()]
        for how, targets in (("transient", transient), ("persistent", persistent)):
            for members in MEMBERS:
                rows += _rows(f"channel → {members}, {how}", targets, servers, members, ones, many, rounds)
    return rows


def _rows(
    title: str,
    targets: dict[str, tuple[Server, raw_sockets.OpenSession]],
    servers: list[Server],
    members: int,
    ones: int,
    many: int,
    rounds: int,
) -> list[Result]:
    noted: dict[str, list[tuple[float, float]]] = {name: [] for name in targets}

    def measure(name: str) -> float:
        server, opened = targets[name]
        with run_alone(server, servers), raw_sockets.open_session(opened, members) as found:
            waits = sorted(_one_by_one(found, ones))
            noted[name].append((percentile_ms(waits, 0.5), percentile_ms(waits, 0.99)))
            return _rate(found, max(many // members, 2 * _WINDOW))

    found = alternate(title, rounds, {name: partial(measure, name) for name in targets})
    rows = []
    for name in targets:
        beside = {} if name == "tidelog" else {"limit": found[name], "limit_name": name}
        if name == "tidelog":
            rows.append(result(f"{title}: rate", found[name], "msg/s"))
        else:
            rows.append(result(f"{title}: rate ÷ {name}", found["tidelog"], "msg/s", **beside))  # type: ignore[arg-type]
        for at, share in enumerate(("p50", "p99")):
            mine = [each[at] for each in noted["tidelog"][1:]]
            theirs = [each[at] for each in noted[name][1:]]
            if name == "tidelog":
                rows.append(result(f"{title}: {share}", mine, "ms"))
            else:
                rows.append(result(f"{title}: {share} ÷ {name}", mine, "ms", limit=theirs, limit_name=name))
    return rows


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _polled(party: PubSubSession) -> Iterator[Callable[[], list[int]]]:
    with epoll() as poll:
        for sock in (party.publisher, *(line.sock for line in party.lines)):
            poll.register(sock.fileno(), EPOLLIN)

        def ready() -> list[int]:
            found = [fd for fd, _ in poll.poll(_PATIENCE_S)]
            if not found:
                raise TimeoutError("somebody says nothing any more")
            return found

        yield ready


def _one_by_one(party: PubSubSession, count: int) -> list[float]:
    """Seconds from a publish to each receipt of it."""
    clock, waits = time.perf_counter, []
    by_fd = {line.sock.fileno(): line for line in party.lines}
    acks = MarkCounter(party.ack)
    with _polled(party) as ready:
        for _ in range(count):
            left, acked = len(by_fd), 0
            began = clock()
            party.publisher.sendall(party.encode_message(1))
            while left or not acked:
                for fd in ready():
                    line = by_fd.get(fd)
                    if line is None:
                        acked += acks.take(party.publisher.recv(1 << 16))
                    elif line.read():
                        waits.append(clock() - began)
                        left -= 1
    return waits


def _rate(party: PubSubSession, count: int) -> float:
    """Messages a second that all receivers got."""
    by_fd = {line.sock.fileno(): line for line in party.lines}
    acks = MarkCounter(party.ack)
    sent = acked = heard = 0
    began = time.perf_counter()
    with _polled(party) as ready:
        while heard < count * len(by_fd) or acked < count:
            more = min(acked + _WINDOW - sent, count - sent)
            if more >= _WINDOW // 2 or (more and sent + more == count):
                party.publisher.sendall(party.encode_message(more))
                sent += more
            for fd in ready():
                line = by_fd.get(fd)
                if line is None:
                    acked += acks.take(party.publisher.recv(1 << 18))
                else:
                    heard += line.read()
    return count / (time.perf_counter() - began)
