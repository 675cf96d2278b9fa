"""The last part of the guided tour: a shop. A server, producers, workers, and a table on Spark that is reconciled with
the log.

    producers ──HTTP──► orders ──► export, as it grows ──► table ──► reconcile: table = log
                        mails  ──► workers, one of which dies with its jobs
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Event, Lock
from typing import Literal, NamedTuple

from examples.demo.harness import check, print_table, require, section
from tidelog.cli.render import Screen, format_bytes, plural
from tidelog.client import Client, RemoteQueue
from tidelog.client.http import topic_path
from tidelog.clock import Clock, SystemClock
from tidelog.disk.durability import read_file
from tidelog.disk.interface import join
from tidelog.disk.posix import PosixDisk

PRODUCERS, BATCH = 4, 1000
JOBS, WORKERS, CLAIM = 2_000, 3, 50
LEASE_MS = 1_000  # the shortest lease: the tour waits for the lease of the worker that died
SCHEMA = "order long, user string, sku string, qty int, cents long, country string, at string"
_SKUS = ("kettle", "lamp", "chair", "stool", "teapot", "shelf", "mug", "plate")
_COUNTRIES = ("de", "fr", "at", "nl", "it", "es", "pl")


class Throughput(NamedTuple):
    label: str
    count_text: str
    took_ms: int
    per_second: str


def throughput(label: str, count: int, took_ms: int) -> Throughput:
    took_ms = max(took_ms, 1)
    return Throughput(label, f"{count:,}", took_ms, f"{count * 1000 // took_ms:,}")


def missing_packages() -> list[str]:
    """What is not installed and is needed here."""
    return [name for name in ("uvloop", "httptools", "pyspark") if find_spec(name) is None]


def order(number: int) -> dict[str, int | str]:
    return {
        "order": number,
        "user": f"u{number * 7919 % 50_000:05d}",
        "sku": _SKUS[number * 31 % len(_SKUS)],
        "qty": 1 + number * 17 % 4,
        "cents": 199 + number * 613 % 20_000,
        "country": _COUNTRIES[number * 13 % len(_COUNTRIES)],
        "at": f"2026-11-{1 + number // 40_000 % 30:02d}T{number // 1_700 % 24:02d}:{number // 30 % 60:02d}:00Z",
    }


def produce(url: str, first: int, count: int) -> None:
    """One of the producers: says how many orders were acked. Each batch has a key, so it may be sent again."""
    with Client(url) as client:
        path = topic_path("orders") + "?return_seqs=false"
        for start in range(first, first + count, BATCH):
            stop = min(start + BATCH, first + count)
            records = [{"data": order(number)} for number in range(start, stop)]
            client.post(path, {"records": records, "idempotency_key": f"orders-{start}"})
            print(stop - start, flush=True)


def tour(path: str, events: int) -> None:
    """The whole part, with a server on `path`."""
    section(
        "11. The whole thing: a shop",
        f"A server, {PRODUCERS} producers with {events:,} orders, {WORKERS} workers with {JOBS:,} mails, and a table",
        "made by Spark that follows the orders as they come. At the end it is reconciled with the log.",
    )
    if lacking := missing_packages():
        print(f"  left out: {', '.join(lacking)} not installed (pip install 'tidelog[all]')")
        return
    with _run_server(path) as url:
        rows, table = _run_on_spark(url, join(path, "table"), events)
    print_table(
        ("", ">how many", ">took", ">a second"), [(*row[:2], f"{row.took_ms:,} ms", row.per_second) for row in rows]
    )
    for line in table:
        print(f"  {line}")


def _run_on_spark(url: str, table: str, events: int) -> tuple[list[Throughput], list[str]]:
    from tidelog import pipelines
    from tidelog.pipelines.api import job_session

    clock, screen, begun, produced = SystemClock(), Screen(json=False), Event(), Event()
    form: Literal["delta", "parquet"] = "delta" if find_spec("deltalake") else "parquet"
    sizes = pipelines.Sizes(8 << 20, 2_000, 64 << 20)
    with Client(url) as client, job_session(None, "local[*]") as spark, ThreadPoolExecutor(1) as aside:
        client.put(topic_path("orders"), {"durability": "fsync"})
        client.put(topic_path("mails"), {"type": "queue", "durability": "fsync", "lease_ms": LEASE_MS})

        def enough(idle: bool) -> bool:
            begun.set()
            return idle and produced.wait(0.5)

        def follow() -> pipelines.Exported:
            return pipelines.export(
                url, "orders", table, format=form, schema=SCHEMA, sizes=sizes, pause=enough, spark=spark
            )

        following = aside.submit(follow)
        following.add_done_callback(lambda _: begun.set())
        begun.wait()  # until it looks for orders, or broke
        began_ms = clock.monotonic_ms()
        try:
            rows = [_produce_orders(url, events, clock, screen), _process_mails(client, clock)]
        finally:
            produced.set()
        followed = following.result()
        with screen.progress_bar("the rest of the orders", total=1) as bar:
            rest = pipelines.export(url, "orders", table, schema=SCHEMA, sizes=sizes, spark=spark, progress=bar)
        exported, files = followed.rows + rest.rows, followed.files + rest.files
        rows.append(throughput("rows that came into the table meanwhile", exported, clock.monotonic_ms() - began_ms))
        began_ms = clock.monotonic_ms()
        found = pipelines.reconcile(url, "orders", table, spark=spark)
        rows.append(throughput("rows reconciled with the log", found.table_rows, clock.monotonic_ms() - began_ms))
        bought = spark.read.parquet(f"{table}/*.parquet").groupBy("country").count().orderBy("country").collect()
    check(exported == events, "every order is in the table once")
    check(found.equal and found.log_rows == events, f"table = log: {found.log_rows:,} rows, hash {found.hash:016x}")
    return rows, [
        f"the table followed in {plural(followed.commits + rest.commits, 'commit')}, {plural(files, 'file')} of "
        f"{format_bytes(followed.bytes + rest.bytes)}, in {table}",
        f"orders by country: {', '.join(f'{country} {count:,}' for country, count in bought)}",
    ]


@contextmanager
def _run_server(path: str) -> Iterator[str]:
    """A server of its own process on a free port; where it answers."""
    disk, port_file = PosixDisk(), join(path, "port")
    disk.make_dir(path)
    command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--data", join(path, "data")]
    child = subprocess.Popen([*command, "--port", "0", "--port-file", port_file], stderr=subprocess.DEVNULL)
    with child:
        try:
            pause = Event()
            while not (where := read_file(disk, port_file)):
                check_alive(child)
                pause.wait(0.02)
            yield f"http://{where.decode().strip()}"
        finally:
            child.terminate()
    check(child.returncode == 0, "the server stopped on SIGTERM, with everything on disk")


def check_alive(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        raise SystemExit(f"\nthe tour ends here: the server ended with exit code {child.returncode}")


def _produce_orders(url: str, events: int, clock: Clock, screen: Screen) -> Throughput:
    share, began_ms, done, lock = events // PRODUCERS, clock.monotonic_ms(), [0], Lock()

    def follow(number: int) -> int:
        first, count = number * share, share if number < PRODUCERS - 1 else events - number * share
        command = [sys.executable, "-m", "examples.demo.logs", "--producer", url, str(first), str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in require(child.stdout, "producer"):
                with lock:
                    done[0] += int(line)
                bar(done[0], events)
        return child.returncode

    with screen.progress_bar("orders", total=events) as bar, ThreadPoolExecutor(PRODUCERS) as producers:
        codes = list(producers.map(follow, range(PRODUCERS)))
    took_ms = clock.monotonic_ms() - began_ms
    check(codes == [0] * PRODUCERS and done[0] == events, f"{events:,} orders were acked, each on disk before its ack")
    return throughput(f"orders of {PRODUCERS} producers", events, took_ms)


def _process_mails(client: Client, clock: Clock) -> Throughput:
    """Jobs for workers, one of which claims some and is never heard of again: they come back when its lease ends."""
    queue, began_ms = RemoteQueue(client, "mails"), clock.monotonic_ms()
    for first in range(0, JOBS, BATCH):
        queue.put([{"mail": number} for number in range(first, first + BATCH)])
    lost = queue.claim("the one that dies", CLAIM)
    sent: list[int] = []
    lock = Lock()

    def work(number: int) -> None:
        while len(sent) < JOBS:
            jobs = queue.claim(f"worker-{number}", CLAIM)
            if not jobs:
                idle.wait(0.05)
                continue
            queue.ack(f"worker-{number}", jobs)
            with lock:
                sent.extend(job.data["mail"] for job in jobs)

    idle = Event()
    with ThreadPoolExecutor(WORKERS) as workers:
        list(workers.map(work, range(WORKERS)))
    took_ms = clock.monotonic_ms() - began_ms
    check(
        sorted(sent) == list(range(JOBS)),
        f"{JOBS:,} mails were sent, each once, also the {len(lost)} of a worker that died",
    )
    return throughput(f"mails of {WORKERS} workers", JOBS, took_ms)
