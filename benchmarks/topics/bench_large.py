"""Large records: a streamed append and a read of 1 GiB against the same bytes written and read without Tidelog.

Sketch. A streamed append writes every byte once, to a file of its own, and hashes it twice, for its chunk and
for the whole: XXH3 runs at 10 GB/s and more, a disk at 1 GB/s, so the append should take what write and fsync of the
same bytes take, and a few percent. Reading hashes once; the limit is a read of the file from the page cache.

Chunks have 1 MiB. The memory figures are the growth of the peak resident memory of this process, or of the server,
while a gigabyte goes through it: a few chunks, whatever the size of the record.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.common import GB, Result, alternate, result, scratch_dir

import tidelog
from tidelog import Topic

_CHUNK = 1 << 20
_MIB = 1 << 20


def run(quick: bool) -> list[Result]:
    rounds, size = (1, 64 << 20) if quick else (3, 1 << 30)
    rows: list[Result] = []
    with scratch_dir(4 * GB) as place:
        log = tidelog.open(str(place / "data"))
        topic = log.topic("large", durability="fsync", max_record_bytes=1 << 31)
        topic.append_stream(_chunks(8 << 20))
        before = _peak_mib(os.getpid())
        seq = topic.append_stream(_chunks(size)).first_seq
        _write(place / "plain.bin", size)
        found = alternate(
            "large records",
            rounds,
            {
                "append": partial(_append, log, topic, size),
                "write": partial(_write, place / "plain.bin", size),
                "read": partial(_read, topic, seq, size),
                "plain read": partial(_read_plain, place / "plain.bin", size),
            },
        )
        grown = _peak_mib(os.getpid()) - before
        log.close()
        what = f"{size >> 20} MiB"
        rows.append(
            result(
                f"append a stream of {what}", found["append"], "MB/s", limit=found["write"], limit_name="write, fsync"
            )
        )
        rows.append(
            result(
                f"read a record of {what}", found["read"], "MB/s", limit=found["plain read"], limit_name="plain read"
            )
        )
        rows.append(result(f"memory for {what}, embedded", [grown], "MiB", max_value=64))
        rows.append(result(f"memory for {what}, server", [_server_growth(place / "served", size)], "MiB", max_value=64))
    return rows


def _chunks(size: int) -> Iterator[bytes]:
    chunk = os.urandom(_CHUNK)
    for _ in range(size // _CHUNK):
        yield chunk


def _append(log: tidelog.Database, topic: Topic, size: int) -> float:
    began = time.perf_counter()
    seq = topic.append_stream(_chunks(size)).first_seq
    took = time.perf_counter() - began
    topic.delete(seqs=[seq])
    for _ in range(2):  # frees the blob
        topic.append(b"x")
        log.checkpoint()
    return size / took / 1e6


def _write(path: Path, size: int) -> float:
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for chunk in _chunks(size):
            file.write(chunk)
        os.fsync(file.fileno())
    return size / (time.perf_counter() - began) / 1e6


def _read(topic: Topic, seq: int, size: int) -> float:
    began = time.perf_counter()
    with topic.open_record(seq) as reader:
        while reader.read(_CHUNK):
            pass
    return size / (time.perf_counter() - began) / 1e6


def _read_plain(path: Path, size: int) -> float:
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass
    return size / (time.perf_counter() - began) / 1e6


def _server_growth(place: Path, size: int) -> float:
    """The growth of a server's peak memory in MiB while a record goes in and out."""
    place.mkdir()
    port_file = place / "port"
    command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--data", str(place / "data"), "--port", "0"]
    server = subprocess.Popen([*command, "--port-file", str(port_file)], stderr=subprocess.DEVNULL)
    try:
        while not port_file.exists():
            time.sleep(0.05)
        host, port = port_file.read_text().rsplit(":", 1)
        wire = HTTPConnection(host, int(port), timeout=600)
        _request(wire, "PUT", "/v0/topics/large", b'{"max_record_bytes":2147483648}', 0)
        _request(wire, "POST", "/v0/topics/large/stream", _chunks(8 << 20), 0)
        _request(wire, "GET", "/v0/topics/large/records/1/data", None, 8 << 20)
        before = _peak_mib(server.pid)
        _request(wire, "POST", "/v0/topics/large/stream", _chunks(size), 0)
        _request(wire, "GET", "/v0/topics/large/records/2/data", None, size)
        return _peak_mib(server.pid) - before
    finally:
        server.terminate()
        server.wait()


def _request(wire: HTTPConnection, method: str, path: str, body: bytes | Iterator[bytes] | None, size: int) -> None:
    headers = {"Content-Type": "application/json"} if isinstance(body, bytes) else {}
    wire.request(method, path, body, headers)
    response = wire.getresponse()
    received = 0
    while chunk := response.read(_CHUNK):
        received += len(chunk)
    if response.status >= 300 or (size and received != size):
        raise RuntimeError(f"{method} {path}: {response.status}, {received} bytes")


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / _MIB
