"""The servers that are measured: ours and its peers, each a process of its own on loopback with its files on the disk
under test, and the settings that make it fastest under its promise.

    synced     when the answer comes it survives a power cut: fsync topics; Redis `always`; JetStream `sync always`
    buffered   it survives a kill, and a power cut may take the last of it. How much: 50 ms of disk topics, a second of
               Redis `everysec`, two minutes of JetStream as it comes

    none       memory and ephemeral topics; beside them stands a server that only reads and answers (`bare`)

Redis rewrites no log and writes no snapshot while it is measured. JetStream learnt to sync always in 2.10; with an
older one that row is left out. Kafka syncs nothing by itself and is in the benchmark of producers alone. What is not
installed is left out as well, and the run says so.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.server.load_generator import Caller, HttpReply, MarkedReply, callers, connect, post
from benchmarks.server.processes import TIMEOUT_S, Server, free_port, run_process

NAME = "bench"
BARE = "bare HTTP"
CLASSES = ("ephemeral", "memory", "disk", "fsync")
_SLOW = 2_000  # records that JetStream syncs one after the other in well under a second
_VARIANTS = 8  # different asks that callers take in turn


def texts(size: int, number: int = 1000) -> list[bytes]:
    """JSON strings of `size` bytes that nothing can take for each other; what every server is sent as a record."""
    random = Random(size)
    return [b'"%b"' % random.randbytes(size // 2).hex()[: size - 2].encode() for _ in range(number)]


# ── ours, and the peers ───────────────────────────────────────────────────────────────────────────


def _read_port(port_file: Path) -> int | None:
    """The port that a server has written, once it has."""
    said = port_file.read_text().rpartition(":")[2] if port_file.exists() else ""
    return int(said) if said else None


@contextmanager
def tidelog(path: Path, **environ: str) -> Iterator[Server]:
    """`tidelog serve`, ready for writes. TIDELOG_ settings of the environment hold, `environ` over them."""
    path.mkdir(exist_ok=True)
    port_file = path / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tidelog.cli.main", "serve"]
    command += ["--data", str(path / "data"), "--port", "0", "--port-file", str(port_file)]
    with run_process(command, path / "tidelog.log", partial(_read_port, port_file), **environ) as server:
        until = time.monotonic() + TIMEOUT_S
        while _status(server.port, "/readyz") != 200:
            if time.monotonic() > until:
                raise RuntimeError("tidelog is not ready")
            time.sleep(0.01)
        yield server


@contextmanager
def bare(path: Path) -> Iterator[Server]:
    """See `bare`: what no HTTP server in Python can be faster than."""
    path.mkdir()
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "benchmarks.server.bare_http", str(path / "port")]
    with run_process(command, path / "bare.log", partial(_read_port, path / "port"), PYTHONPATH=str(root)) as server:
        yield server


@contextmanager
def redis(path: Path, appendfsync: str) -> Iterator[Server]:
    path.mkdir()
    port = free_port()
    settings = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(path),
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",
        "auto-aof-rewrite-percentage": "0",
        "daemonize": "no",
    }
    command = ["redis-server", *(word for name, value in settings.items() for word in (f"--{name}", value))]
    with run_process(command, path / "redis.log", lambda: port) as server:
        yield server


_KAFKA_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{control}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{control}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={logs}
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


@contextmanager
def kafka(path: Path) -> Iterator[Server]:
    """One broker of one node. `KAFKA_HOME` has its jars in `libs`, as the distribution and
    `mvn dependency:copy-dependencies` of `org.apache.kafka:kafka_2.13` lay them out."""
    path.mkdir()
    port, control = free_port(), free_port()
    settings = path / "server.properties"
    settings.write_text(_KAFKA_SETTINGS.format(port=port, control=control, logs=path / "logs"))
    java = ["java", "-Xms1g", "-Xmx1g", "-cp", f"{kafka_jars()}/*"]
    cluster = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
    subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)],
        capture_output=True,
        check=True,
    )
    with run_process([*java, "kafka.Kafka", str(settings)], path / "kafka.log", lambda: port) as server:
        yield server


def kafka_jars() -> Path | None:
    """The directory of the broker's jars; None where it cannot be started."""
    jars = Path(os.environ.get("KAFKA_HOME", "")) / "libs"
    return jars if os.environ.get("KAFKA_HOME") and any(jars.glob("kafka_2*.jar")) and shutil.which("java") else None


def has_redis() -> bool:
    return shutil.which("redis-server") is not None


def missing_clients() -> list[str]:
    """What the benchmark of producers leaves out, and why."""
    said = []
    if kafka_jars() is None:
        said.append("KAFKA_HOME has no libs of a broker, or there is no java; the row against Kafka is left out")
    elif find_spec("confluent_kafka") is None:
        said.append("confluent-kafka is not installed; the row against Kafka is left out")
    if not has_redis() or find_spec("redis") is None:
        said.append("redis-server or redis-py is not installed; the row against Redis is left out")
    return said


@contextmanager
def nats(path: Path, *, always: bool) -> Iterator[Server]:
    path.mkdir()
    port = free_port()
    sync = "sync_interval: always" if always else ""
    config = path / "nats.conf"
    config.write_text(
        f'host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{path}", max_file_store: 8GB, {sync} }}\n'
    )
    with run_process(["nats-server", "-c", str(config)], path / "nats.log", lambda: port) as server:
        _jetstream(server.port, "STREAM.CREATE", {"name": NAME, "subjects": [NAME], "storage": "file"})
        yield server


# ── what they are asked ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Target:
    """A place to write to, under one promise."""

    name: str
    promise: str
    server: Server
    empty: Callable[[], object]  # have no records in it
    count: Callable[[], int] | None  # records in it, where any are kept
    writers: Callable[[Sequence[bytes], int, int], list[Caller]]  # of records, a batch, connections
    in_flight_max: int = 1 << 62  # records at once that it gets done within a round


def request(port: int, method: str, path: str, body: object = None) -> dict[str, Any]:
    """One request to our server, for what is not measured."""
    status, content = _request(port, method, path, body)
    if status >= 300:
        raise RuntimeError(f"{method} {path} was answered with {status}: {content[:600]!r}")
    answer: dict[str, Any] = json.loads(content)
    return answer


def _request(port: int, method: str, path: str, body: object) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _status(port: int, path: str) -> int:
    return _request(port, "GET", path, None)[0]


def write_asks(records: Sequence[bytes], batch: int, name: str = NAME) -> list[bytes]:
    """Requests that write a batch each, as a client without options sends them."""
    return [
        post(f"/v0/topics/{name}", b'{"records":[%b]}' % b",".join(b'{"data":%b}' % record for record in part))
        for part in parts(records, batch)
    ]


def parts(records: Sequence[bytes], batch: int) -> list[list[bytes]]:
    """Batches that differ, as far as there are records for it."""
    return [[records[(at + i) % len(records)] for i in range(batch)] for at in range(0, _VARIANTS * batch, batch)]


def topic(server: Server, durability: str) -> Target:
    path = f"/v0/topics/{NAME}-{durability}"

    def empty() -> None:
        request(server.port, "DELETE", path)
        request(server.port, "PUT", path, {"durability": durability})

    def writers(records: Sequence[bytes], batch: int, connections: int) -> list[Caller]:
        asks = write_asks(records, batch, f"{NAME}-{durability}")
        return callers(server.port, (cycle(_rotate(asks, at)) for at in range(connections)), HttpReply)

    def count() -> int:
        head: int = request(server.port, "GET", path)["head_seq"]
        return head

    promise = {"fsync": "synced", "disk": "buffered"}.get(durability, "none")
    return Target(durability, promise, server, empty, count, writers)


def discard_target(server: Server) -> Target:
    """Writes that are read and thrown away."""

    def writers(records: Sequence[bytes], batch: int, connections: int) -> list[Caller]:
        asks = write_asks(records, batch)
        return callers(server.port, (cycle(_rotate(asks, at)) for at in range(connections)), HttpReply)

    return Target(BARE, "none", server, lambda: None, None, writers)


def _rotate(asks: list[bytes], at: int) -> list[bytes]:
    at %= len(asks)
    return asks[at:] + asks[:at]


def resp(*words: bytes) -> bytes:
    """A command to Redis."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def redis_call(port: int, *words: bytes) -> bytes:
    """One command whose answer is one line, for what is not measured."""
    with connect(port) as sock, sock.makefile("rb") as answer:
        sock.sendall(resp(*words))
        line = answer.readline()
        if line[:1] == b"-":
            raise RuntimeError(f"Redis answered {line!r}")
        return line[1:].strip()


def redis_stream(server: Server, name: str, promise: str) -> Target:
    def writers(records: Sequence[bytes], batch: int, connections: int) -> list[Caller]:
        asks = [
            b"".join(resp(b"XADD", NAME.encode(), b"*", b"d", record) for record in part)
            for part in parts(records, batch)
        ]
        reply = partial(MarkedReply, b"\n", 2 * batch)  # each answer is a length and an id
        return callers(server.port, (cycle(_rotate(asks, at)) for at in range(connections)), reply)

    return Target(
        name,
        promise,
        server,
        partial(redis_call, server.port, b"FLUSHALL"),
        lambda: int(redis_call(server.port, b"XLEN", NAME.encode())),
        writers,
    )


def _jetstream(port: int, verb: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    asked = b"" if body is None else json.dumps(body).encode()
    with connect(port) as sock, sock.makefile("rb") as lines:
        lines.readline()
        hello = b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB _INBOX.api 1\r\n'
        subject = f"$JS.API.{verb}.{NAME}".encode()
        sock.sendall(hello + b"PUB %b _INBOX.api %d\r\n%b\r\n" % (subject, len(asked), asked))
        while line := lines.readline():
            if line.startswith(b"MSG"):
                answer: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
                if "error" in answer:
                    raise RuntimeError(f"JetStream answered {answer['error']}")
                return answer
    raise ConnectionError("JetStream closed the connection")


def jetstream(server: Server, name: str, promise: str, in_the_air_max: int = 1 << 62) -> Target:
    def writers(records: Sequence[bytes], batch: int, connections: int) -> list[Caller]:
        made = []
        for at in range(connections):
            inbox = b"_INBOX.%d" % at
            asks = [
                b"".join(b"PUB %b %b %d\r\n%b\r\n" % (NAME.encode(), inbox, len(record), record) for record in part)
                for part in parts(records, batch)
            ]
            reply = partial(MarkedReply, b"}", batch)  # an answer is an object; pings come between them
            made += callers(server.port, [cycle(asks)], reply, partial(_greet, inbox))
        return made

    return Target(
        name,
        promise,
        server,
        partial(_jetstream, server.port, "STREAM.PURGE"),
        lambda: int(_jetstream(server.port, "STREAM.INFO")["state"]["messages"]),
        writers,
        in_the_air_max,
    )


def _greet(inbox: bytes, sock: socket.socket) -> None:
    with sock.makefile("rb") as lines:
        lines.readline()
        sock.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %b 1\r\nPING\r\n' % inbox)
        while lines.readline() != b"PONG\r\n":
            pass


# ── all of them ───────────────────────────────────────────────────────────────────────────────────


def missing() -> list[str]:
    """What is left out, and why."""
    said = [
        f"{program} is not installed; the rows against it are left out"
        for program in ("redis-server", "nats-server")
        if shutil.which(program) is None
    ]
    if shutil.which("nats-server") and not _syncs_always():
        said.append("this nats-server is older than 2.10 and cannot sync always; that row is left out")
    return said


def _syncs_always() -> bool:
    said = subprocess.run(["nats-server", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= (2, 10)


def versions() -> str:
    """Of the peers."""
    said = []
    for program in ("redis-server", "nats-server"):
        if shutil.which(program):
            line = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
            found = re.search(r"\d+\.\d+\.\d+", line)
            said.append(f"{program} {found[0] if found else line.strip()}")
    return ", ".join(said)


@contextmanager
def targets(place: Path) -> Iterator[list[Target]]:
    """Topics of every class, the limit, and every peer that is installed."""
    with ExitStack() as open_:
        start = open_.enter_context
        ours = start(tidelog(place / "tidelog"))
        found = [topic(ours, durability) for durability in CLASSES]
        found.append(discard_target(start(bare(place / "bare"))))
        if shutil.which("redis-server"):
            found.append(redis_stream(start(redis(place / "always", "always")), "Redis always", "synced"))
            found.append(redis_stream(start(redis(place / "everysec", "everysec")), "Redis everysec", "buffered"))
        if shutil.which("nats-server"):
            if _syncs_always():
                slow = start(nats(place / "nats-a", always=True))
                found.append(jetstream(slow, "JetStream sync always", "synced", _SLOW))
            found.append(jetstream(start(nats(place / "nats", always=False)), "JetStream", "buffered"))
        yield found
    for child in place.iterdir():
        shutil.rmtree(child)
