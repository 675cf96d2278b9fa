"""Appending to topics, class by class, beside the stores that a Python program would otherwise embed.

Sketch. A batch of 1000 × 100 B is one frame: a join, a hash and one write of 104 KB, 60 µs of copying with
100 µs of Python around it, where SQLite runs 1000 inserts (2 ms) and lmdb and rocksdict take 1000 items one by
one (0.5 ms). Expected without a sync: 3 M records/s. With a sync of 350 µs a batch: 1.5 M, twice theirs. A single
record is all Python: 25 µs, where rocksdict takes 3 and a bare write 2; beside a sync of 180 µs that is a tenth. At
1 KB memory and the disk level the field.

Every store makes the promise of its row and no weaker one. A round lasts a fixed time, not a fixed number of
records: they differ by a factor of a thousand. Files are removed after each round, so that the page cache does
not grow into memory that the machine has never touched.

Appending is not the whole of it: a WAL has to be emptied, an LSM tree merged. So the last rows write more than a
WAL holds, and the clock stops when every record is synced in its final place.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from threading import Barrier, Thread

from benchmarks.common import GB, PROGRESS, Measurements, Result, alternate, payloads, result, scratch_dir
from benchmarks.topics.peers import LIMITS, OURS, Put, Store, available

SIZES = {100: "100 B", 1024: "1 KB"}
BATCHES = (1, 100, 1000)
THREADS = (1, 8)
_NEEDS_BYTES = 2 * GB
_LIMITS = {"memory": "sqlite3 in memory", "buffered": "bare write", "synced": "bare write + fdatasync"}


def run(quick: bool) -> list[Result]:
    lasting_s, rounds = (0.05, 1) if quick else (0.25, 5)
    peers, missing = available()
    for package in missing:
        PROGRESS.console.print(f"{package} is not installed; the rows against it are left out")
    stores = [*OURS, *LIMITS, *peers]
    found = []
    with scratch_dir(_NEEDS_BYTES if not quick else GB // 2) as place:
        for threads in THREADS:
            for size in SIZES:
                for batch in BATCHES:
                    datas = payloads(size)[:batch]
                    work = {
                        store.name: partial(_rate, store, place / "store", datas, threads, lasting_s)
                        for store in stores
                    }
                    figures = alternate(f"append {_named(size, batch, threads)}", rounds, work)
                    found += _rows(figures, stores, size, batch, threads)
        found += _sustained(place, [store for store in stores if store.promise == "buffered"], rounds, quick=quick)
    return found


def _named(size: int, batch: int, threads: int) -> str:
    return f"{SIZES[size]} × {batch}, {threads} thread{'s' if threads > 1 else ''}"


def _rows(figures: Measurements, stores: list[Store], size: int, batch: int, threads: int) -> list[Result]:
    """Each class against its limit and against each peer of the same promise, and the targets."""
    rows = []
    for ours in OURS:
        name = f"append {_named(size, batch, threads)}, {ours.name}"
        limit = _LIMITS[ours.promise]
        # A lone durable write is one sync: what the code adds must not show.
        single = ours.name == "fsync" and batch == threads == 1
        rows.append(_against(name, figures, ours.name, limit, 1 / 1.5 if single else None))
        if ours.name == "memory":
            continue  # it promises nothing: nobody is its peer
        for peer in stores:
            if peer in OURS or peer.name == limit or peer.promise != ours.promise:
                continue
            least = 5.0 if "sqlite3" in peer.name and batch == 1000 and threads == 1 else None
            rows.append(_against(f"{name} ÷ {peer.name}", figures, ours.name, peer.name, least))
        if batch == 1000 and threads == 1 and ours.name in ("disk", "fsync"):
            rows += _best(name, figures, ours)
    return rows


def _best(name: str, figures: Measurements, ours: Store) -> list[Result]:
    tail = " sync" if ours.promise == "synced" else ""
    rivals = [f"{peer}{tail}" for peer in ("lmdb", "rocksdict") if f"{peer}{tail}" in figures]
    if not rivals:
        return []
    best = max(rivals, key=lambda rival: median(figures[rival]))
    least = 1.5 if ours.promise == "synced" else 1.2
    return [_against(f"{name} ÷ the better of lmdb and rocksdict", figures, ours.name, best, least)]


def _against(name: str, figures: Measurements, ours: str, other: str, least_ratio: float | None) -> Result:
    return result(
        name,
        figures[ours],
        "/s",
        limit=figures[other],
        limit_name=other,
        min_ratio=least_ratio,
        kind="information" if least_ratio is None else "gate",
    )


def _sustained(place: Path, stores: list[Store], rounds: int, *, quick: bool) -> list[Result]:
    rows = []
    for size, total in ((100, 3_000_000), (1024, 400_000)):
        datas, batches = payloads(size), total // (20 if quick else 1) // 1000
        chosen = [store for store in stores if store.name not in ("memory", "litequeue")]
        figures = alternate(
            f"append {SIZES[size]} × 1000 and settle",
            rounds,
            {store.name: partial(_settled, store, place / "store", datas, batches) for store in chosen},
        )
        name = f"append {SIZES[size]} × 1000 and settle, {total / 1e6:g} M records, disk"
        rows += [
            _against(f"{name} ÷ {other.name}", figures, "disk", other.name, None)
            for other in chosen
            if other.name != "disk"
        ]
    return rows


# ── one round of a store: records a second ────────────────────────────────────────────────────────


def _rate(store: Store, path: Path, datas: list[bytes], threads: int, lasting_s: float) -> float:
    try:
        with store.open(path) as session:
            if threads == 1:
                return _until(session.writer(), datas, lasting_s)
            return together(session.writer, datas, threads, lasting_s)
    finally:
        shutil.rmtree(path)


def _settled(store: Store, path: Path, datas: list[bytes], batches: int) -> float:
    try:
        with store.open(path) as session:
            put = session.writer()
            start = time.perf_counter()
            for _ in range(batches):
                put(datas)
            session.settle()
            return batches * len(datas) / (time.perf_counter() - start)
    finally:
        shutil.rmtree(path)


def _until(put: Put, datas: list[bytes], lasting_s: float) -> float:
    done = 0
    start = time.perf_counter()
    end = start + lasting_s
    while (now := time.perf_counter()) < end:
        put(datas)
        done += 1
    return done * len(datas) / (now - start)


def together(writer: Callable[[], Put], datas: list[bytes], threads: int, lasting_s: float) -> float:
    """Records a second of this many threads that write at the same time."""
    ready = Barrier(threads + 1)
    rates: list[float] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            put = writer()
            ready.wait()
            rates.append(_until(put, datas, lasting_s))
        except BaseException as error:
            failed.append(error)
            ready.abort()
            raise

    workers = [Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return sum(rates)
