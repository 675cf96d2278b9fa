"""Reading a topic from its first record to its last: as records, as Arrow; from memory, from sealed segments.

Sketch. A page of 1000 is one Python object and one bytes copy a record: 1 µs, so a million a second, less for the work
around a page of some 100 µs. Arrow makes no object: positions are computed in bulk and the data is copied once, so
memory decides; 10 000 records in a stretch cost 300 µs, expected 20 M/s. Sealed segments are verified when they are
first read, at 10 GB/s and more, which is 10 ns a record. One frame a record, as single appends leave them, costs a
header each and a hash each: expected a third.

Every round reads from a fresh open, so that what is verified once is verified in every round. The page cache is warm.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import GB, Result, alternate, payloads, result, scratch_dir, time_call
from benchmarks.topics.peers import available, lmdb, sqlite
from xxhash import xxh3_64_intdigest

import tidelog
from tidelog import Topic

_PAGE = 1000
_NEVER = 1 << 40
Pages: TypeAlias = Callable[[], Iterator[list[Any]]]


def run(quick: bool) -> list[Result]:
    batches, rounds = (50, 1) if quick else (500, 5)
    rows = []
    with scratch_dir(2 * GB if not quick else GB // 2) as place:
        for size, named in ((100, "100 B"), (1024, "1 KB")):
            rows += _measure(place, payloads(size), batches if size == 100 else batches // 4, rounds, named)
        rows += _singles(place, payloads(100), batches // 5, rounds)
    return rows


def _measure(place: Path, datas: list[bytes], batches: int, rounds: int, size: str) -> list[Result]:
    total = batches * len(datas)
    memory, sealed = place / f"memory-{size}", place / f"sealed-{size}"
    peers = {store.package for store in available()[0]}
    with ExitStack() as open_:
        log = open_.enter_context(tidelog.open(str(memory), checkpoint_bytes=_NEVER, checkpoint_ms=_NEVER))
        tail = log.topic("bench", durability="memory")
        with tidelog.open(str(sealed)) as writer:
            topic = writer.topic("bench")
            for _ in range(batches):
                tail.append(datas)
                topic.append(datas)
            topic.seal()
        others = {"sqlite3": open_.enter_context(_sqlite(place / f"sqlite-{size}", datas, batches))}
        if "lmdb" in peers:
            others["lmdb"] = open_.enter_context(_lmdb(place / f"lmdb-{size}", datas, batches))
        figures = alternate(
            f"read {size}",
            rounds,
            {
                "records, memory": lambda: total / time_call(partial(_records, tail, total)),
                "records, sealed": partial(_fresh, sealed, _records, total),
                "arrow, memory": lambda: total / time_call(partial(_arrow, tail, total)),
                "arrow, sealed": partial(_fresh, sealed, _arrow, total),
                "hash": lambda: total / time_call(partial(_hash, sealed)),
                **{name: partial(_pages, read, total) for name, read in others.items()},
            },
        )
    rows = []
    for where in ("memory", "sealed"):
        name = f"read {size}, {where}"
        rows += [
            result(
                f"{name}, records ÷ {other}",
                figures[f"records, {where}"],
                "/s",
                limit=figures[other],
                limit_name=f"{other}, pages of {_PAGE}",
                min_value=500_000 if size == "100 B" and other == "sqlite3" else None,
                kind="gate" if size == "100 B" and other == "sqlite3" else "information",
            )
            for other in others
        ]
        rows.append(
            result(
                f"{name}, Arrow",
                figures[f"arrow, {where}"],
                "/s",
                limit=figures["hash"],
                limit_name="read and hash the files",
                min_value=10_000_000 if size == "100 B" else None,
                kind="gate" if size == "100 B" else "information",
            )
        )
    return rows


def _singles(place: Path, datas: list[bytes], batches: int, rounds: int) -> list[Result]:
    """The same, written one record a call."""
    total, path = batches * len(datas), place / "singles"
    with tidelog.open(str(path)) as log:
        topic = log.topic("bench", durability="memory")
        for _ in range(batches):
            tokens = [topic.append_nowait(data) for data in datas]
            for token in tokens:
                token.wait()
        topic.seal()
    figures = alternate(
        "read single frames",
        rounds,
        {
            "records": partial(_fresh, path, _records, total),
            "arrow": partial(_fresh, path, _arrow, total),
            "hash": lambda: total / time_call(partial(_hash, path)),
        },
    )
    return [
        result(
            f"read 100 B, sealed, one frame a record, {told}",
            figures[what],
            "/s",
            limit=figures["hash"],
            limit_name="read and hash the files",
        )
        for what, told in (("records", "records"), ("arrow", "Arrow"))
    ]


# ── one round of a candidate: records a second ────────────────────────────────────────────────────


def _fresh(path: Path, work: Callable[[Topic, int], None], total: int) -> float:
    with tidelog.open(str(path), read_only=True) as log:
        topic = log.topic("bench")
        return total / time_call(lambda: work(topic, total))


def _records(topic: Topic, total: int) -> None:
    seen = cursor = 0
    while seen < total:
        page = topic.read(cursor, _PAGE)
        seen, cursor = seen + len(page.records), page.next_from_seq
    assert seen == cursor == total, "every record was read, once"


def _arrow(topic: Topic, total: int) -> None:
    assert topic.to_arrow().num_rows == total, "every record was read, once"


def _hash(path: Path) -> None:
    for file in sorted(path.glob("topics/*/*.data")):
        xxh3_64_intdigest(file.read_bytes())


def _pages(read: Pages, total: int) -> float:
    def work() -> None:
        assert sum(map(len, read())) == total, "every record was read, once"

    return total / time_call(work)


@contextmanager
def _sqlite(path: Path, datas: list[bytes], batches: int) -> Iterator[Pages]:
    with sqlite(path, "OFF") as session:
        put = session.writer()
        for _ in range(batches):
            put(datas)
        with closing(sqlite3.connect(path / "log.db")) as base:

            def read() -> Iterator[list[Any]]:
                last = 0
                while found := base.execute(
                    "SELECT seq, data FROM log WHERE seq > ? ORDER BY seq LIMIT ?", (last, _PAGE)
                ).fetchall():
                    last = found[-1][0]
                    yield found

            yield read


@contextmanager
def _lmdb(path: Path, datas: list[bytes], batches: int) -> Iterator[Pages]:
    with lmdb(path, sync=False) as session:
        put = session.writer()
        for _ in range(batches):
            put(datas)
    with closing(import_module("lmdb").open(str(path), readonly=True)) as env:

        def read() -> Iterator[list[Any]]:
            with env.begin() as view:
                items = iter(view.cursor())
                while found := [item for _, item in zip(range(_PAGE), items, strict=False)]:
                    yield found

        yield read
