"""The stores that topics are measured beside: each opened with the settings that make it fastest under its promise.

Three promises, and only stores that make the same one stand in the same row:
  synced     on return it survives a power cut
  buffered   on return it survives a kill; a power cut may take the last of it
  memory     gone with the process

What is not installed is left out, and the run says so. A peer keeps its records under a number that
rises, which is the least that makes a log of it: a rowid, or eight bytes of a key.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Literal, NamedTuple, TypeAlias

import tidelog
from tidelog.engine.config import Durability

Promise: TypeAlias = Literal["synced", "buffered", "memory"]
Put: TypeAlias = Callable[[list[bytes]], object]  # write a batch; returns when the promise holds

_KEY = Struct(">Q").pack
_MAP_BYTES = 16 << 30  # address space, not memory
_PATIENCE_S = 60.0


class Session(NamedTuple):
    writer: Callable[[], Put]  # asked once by every thread that writes
    settle: Callable[[], object]  # bring everything to where it stays: synced, and out of the journal


class Store(NamedTuple):
    name: str
    promise: Promise
    open: Callable[[Path], AbstractContextManager[Session]]
    package: str = ""  # what has to be installed for it


def available() -> tuple[list[Store], list[str]]:
    """The peers that can be measured here, and the packages that are not installed."""
    missing = sorted({store.package for store in PEERS if store.package and not _is_installed(store.package)})
    return [store for store in PEERS if store.package not in missing], missing


def _is_installed(package: str) -> bool:
    try:
        import_module(package)
    except ImportError:
        return False
    return True


# ── ours ──────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def topic(path: Path, durability: Durability) -> Iterator[Session]:
    """All threads write to one topic."""
    with tidelog.open(str(path)) as log:
        append = log.topic("bench", durability=durability).append
        yield Session(lambda: _one_or_many(append, append), log.checkpoint)


def _one_or_many(one: Callable[[bytes], object], many: Put) -> Put:
    """A batch of one is written the way a caller writes one record."""
    return lambda datas: one(datas[0]) if len(datas) == 1 else many(datas)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def raw(path: Path, *, sync: bool) -> Iterator[Session]:
    """The bytes at the end of a growing file and nothing else: no numbers, no checksums, one thread at a time."""
    path.mkdir()
    fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT)
    lock, pos = Lock(), 0

    def put(datas: list[bytes]) -> None:
        nonlocal pos
        data = datas[0] if len(datas) == 1 else b"".join(datas)
        with lock:
            if os.pwrite(fd, data, pos) != len(data):
                raise RuntimeError("the disk took less than it was given")
            pos += len(data)
            if sync:
                os.fdatasync(fd)

    try:
        yield Session(lambda: put, partial(os.fdatasync, fd))
    finally:
        os.close(fd)


# ── peers ─────────────────────────────────────────────────────────────────────────────────────────

_TABLE = "CREATE TABLE log (seq INTEGER PRIMARY KEY, data BLOB)"
_INSERT = "INSERT INTO log (data) VALUES (?)"


@contextmanager
def sqlite(path: Path, synchronous: str) -> Iterator[Session]:
    """A connection a thread; in WAL mode they queue up for the write lock."""
    path.mkdir()
    opened: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        base = sqlite3.connect(path / "log.db", isolation_level=None, timeout=_PATIENCE_S, check_same_thread=False)
        opened.append(base)
        base.execute("PRAGMA journal_mode=WAL")
        base.execute(f"PRAGMA synchronous={synchronous}")
        return base

    first = connect()
    first.execute(_TABLE)
    try:
        yield Session(lambda: _into(connect()), lambda: first.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
    finally:
        for base in opened:
            base.close()


@contextmanager
def sqlite_memory(path: Path) -> Iterator[Session]:
    """One connection for all threads: a database in memory has no other."""
    path.mkdir()
    lock = Lock()
    with closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as base:
        base.execute(_TABLE)
        put = _into(base)

        def alone(datas: list[bytes]) -> None:
            with lock:
                put(datas)

        yield Session(lambda: alone, lambda: None)


def _into(base: sqlite3.Connection) -> Put:
    def put(datas: list[bytes]) -> None:
        if len(datas) == 1:
            base.execute(_INSERT, (datas[0],))
            return
        base.execute("BEGIN IMMEDIATE")
        base.executemany(_INSERT, zip(datas))
        base.execute("COMMIT")

    return put


@contextmanager
def lmdb(path: Path, *, sync: bool) -> Iterator[Session]:
    """Written at the end of the tree, which is its quickest way: `append=True`, one call a batch. A number is lost
    behind each batch, because zip asks for one more key than there are records; nobody minds."""
    env = import_module("lmdb").open(str(path), map_size=_MAP_BYTES, sync=sync, metasync=sync)
    numbers = count(1)

    def put(datas: list[bytes]) -> None:
        with env.begin(write=True) as change:  # one at a time, so numbers rise in the order of the tree
            if len(datas) == 1:
                change.put(_KEY(next(numbers)), datas[0], append=True)
            else:
                change.cursor().putmulti(zip(map(_KEY, numbers), datas, strict=False), append=True)

    with closing(env):
        yield Session(lambda: put, partial(env.sync, True))


@contextmanager
def rocksdict(path: Path, *, sync: bool) -> Iterator[Session]:
    """Bytes as they are (`raw_mode`), a WriteBatch a batch."""
    module = import_module("rocksdict")
    how = module.WriteOptions()
    how.sync = sync
    numbers = count(1)
    base = module.Rdict(str(path), module.Options(raw_mode=True))

    def one(data: bytes) -> None:
        base.put(_KEY(next(numbers)), data, how)

    def many(datas: list[bytes]) -> None:
        batch = module.WriteBatch(raw_mode=True)
        add = batch.put
        for key, data in zip(map(_KEY, numbers), datas, strict=False):
            add(key, data)
        base.write(batch, how)

    with closing(base):
        yield Session(lambda: _one_or_many(one, many), base.flush)


class _Plain:
    """Bytes go into the queue as they are, not pickled."""

    @staticmethod
    def dumps(value: bytes) -> bytes:
        return value

    @staticmethod
    def loads(value: bytes) -> bytes:
        return value


@contextmanager
def persistqueue(path: Path) -> Iterator[Session]:
    """Its SQLite queue. Every put is a transaction; there are no batches."""
    queue = import_module("persistqueue").SQLiteQueue(str(path), multithreading=True, serializer=_Plain)

    def put(datas: list[bytes]) -> None:
        for data in datas:
            queue.put(data)

    yield Session(lambda: put, lambda: None)
    queue.close()


@contextmanager
def litequeue(path: Path) -> Iterator[Session]:
    """Always `synchronous=NORMAL`. A batch is a transaction around puts; the lock keeps threads out of it."""
    path.mkdir()
    lock = Lock()
    queue = import_module("litequeue").LiteQueue(str(path / "queue.db"))

    def put(datas: list[bytes]) -> None:
        with lock:
            if len(datas) == 1:
                queue.put(datas[0])
                return
            with queue.transaction(mode="IMMEDIATE"):
                for data in datas:
                    queue.put(data)

    with closing(queue):
        yield Session(lambda: put, lambda: queue.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)"))


OURS = [
    Store("ephemeral", "memory", partial(topic, durability="ephemeral")),
    Store("memory", "buffered", partial(topic, durability="memory")),
    Store("disk", "buffered", partial(topic, durability="disk")),
    Store("fsync", "synced", partial(topic, durability="fsync")),
]
LIMITS = [
    Store("bare write", "buffered", partial(raw, sync=False)),
    Store("bare write + fdatasync", "synced", partial(raw, sync=True)),
]
PEERS = [
    Store("sqlite3 in memory", "memory", sqlite_memory),
    Store("sqlite3 NORMAL", "buffered", partial(sqlite, synchronous="NORMAL")),
    Store("sqlite3 FULL", "synced", partial(sqlite, synchronous="FULL")),
    Store("lmdb", "buffered", partial(lmdb, sync=False), "lmdb"),
    Store("lmdb sync", "synced", partial(lmdb, sync=True), "lmdb"),
    Store("rocksdict", "buffered", partial(rocksdict, sync=False), "rocksdict"),
    Store("rocksdict sync", "synced", partial(rocksdict, sync=True), "rocksdict"),
    Store("litequeue", "buffered", litequeue, "litequeue"),
    Store("persist-queue", "synced", persistqueue, "persistqueue"),
]
