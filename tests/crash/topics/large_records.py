"""Histories of large records, and what holds of every state that a crash may leave.

    a visible record has all of its data; an acked one is there as its class promises; a deleted one is not
    no spill file and no blob that nothing names survives a start; no blob that something names is removed
    a crash is never reported as damage, and a second start finds what the first did

Records are small here: the limits of streams are patched to a few hundred bytes (`small_limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Topic, large_append, manifest
from tidelog.engine.blobs import ids_of_row, list_blob_files
from tidelog.engine.check import check_directory
from tidelog.engine.large_read import LargeData
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk

PATH: Final = "data"
NAMES: Final = ("t", "u")
SETTINGS: Final[dict[str, Any]] = {
    "threads": False,
    "wal_file_bytes": 1 << 13,
    "segment_events_max": 3,
    "head_reserve": 4,
    "ledger_records": 0,
}


def small_limits(patch: pytest.MonkeyPatch) -> None:
    """Let a record be large from 65 bytes on, in chunks of 1 KiB."""
    patch.setattr(large_append, "LARGE_RECORD_BYTES", 64)
    patch.setattr(large_append, "CHUNK_BYTES", 1 << 10)
    patch.setattr(large_append, "_WRITE_BYTES", 256)


class Violated(AssertionError):
    pass


class StopHistory(BaseException):
    pass


def content(seed: object, size: int) -> bytes:
    return Random(str(seed)).randbytes(size)


def chunks(data: bytes, size: int = 300) -> Iterator[bytes]:
    return (data[pos : pos + size] for pos in range(0, len(data), size))


@dataclass
class Expected:
    """What a topic must have, and what it may have: operations in flight are neither."""

    records: dict[int, bytes] = field(default_factory=dict)  # acked
    deleted: set[int] = field(default_factory=set)  # acked
    deleting: set[int] = field(default_factory=set)
    written: set[bytes] = field(default_factory=set)  # whatever was ever sent completely
    dropping: bool = False
    version: int = 0


class Harness:
    def __init__(self, durability: str, shards: int, *, limit: int, step: int = 1, seed: object = 0) -> None:
        self.durability, self.shards, self.limit, self.step = durability, shards, limit, step
        self.clock, self.random = ManualClock(), Random(str(seed))
        self.disk = SimDisk(clock=self.clock, trace=True)
        self.expected = {name: Expected() for name in NAMES}
        self.seen: set[object] = set()
        self.failures: list[str] = []
        self.states = 0
        self.number = 0
        self.log = self.open(self.disk)
        for name in NAMES:
            self.topic(name)

    def open(self, disk: SimDisk, **settings: Any) -> Engine:
        config = {**SETTINGS, "wal_shards": self.shards, **settings}
        return engine_of(tidelog.open(PATH, disk=disk, clock=self.clock, **config))

    def topic(self, name: str) -> Topic:
        return self.log.topic(name, durability=self.durability, max_record_bytes=1 << 20)

    # ── the history ──────────────────────────────────────────────────────────────────────────

    def stream(self, name: str = "t", size: int = 2500) -> int:
        self.number += 1
        expected, data = self.expected[name], content(self.number, size)
        expected.written.add(data)
        appended = self.topic(name).append_stream(chunks(data), tag=f"n:{self.number}", meta={"n": self.number})
        expected.records[appended.first_seq] = data
        expected.version += 1
        return appended.first_seq

    def break_off(self, name: str = "t") -> None:
        def broken() -> Iterator[bytes]:
            yield content("broken", 1500)
            raise ConnectionResetError("the client is gone")

        with pytest.raises(tidelog.errors.StreamBroken):
            self.topic(name).append_stream(broken())

    def append(self, name: str = "t") -> int:
        self.number += 1
        expected, data = self.expected[name], content(self.number, 20)
        expected.written.add(data)
        seq = self.topic(name).append(data).first_seq
        expected.records[seq] = data
        expected.version += 1
        return seq

    def delete(self, *seqs: int, name: str = "t") -> None:
        expected = self.expected[name]
        expected.deleting |= set(seqs)
        expected.version += 1
        self.topic(name).delete(seqs=list(seqs))
        expected.deleted |= set(seqs)
        expected.version += 1

    def drop(self, name: str) -> None:
        expected = self.expected[name]
        expected.dropping = True
        expected.version += 1
        self.log.drop(name)
        self.log.tick()

    def checkpoint(self) -> None:
        self.clock.tick(5)
        self.log.checkpoint()

    def reopen(self) -> None:
        self.log.close()
        self.log = self.open(self.disk)

    # ── the judgement ────────────────────────────────────────────────────────────────────────

    def run(self, history: Callable[[Harness], None]) -> None:
        self.disk.on_op = self.examine
        with suppress(StopHistory):
            history(self)
            self.log.close()
            self.examine(self.disk.op_count, last=True)
        self.disk.on_op = None

    def examine(self, op: int, *, last: bool = False) -> None:
        if not last and self.step > 1 and self.random.randrange(self.step):
            return
        images = [(image.label, image.disk, True) for image in self.disk.images(random=self.random, limit=self.limit)]
        for label, disk, cut in [*images, ("a kill", self.disk.reboot(), False)]:
            key = disk.digest(), tuple(expected.version for expected in self.expected.values()), cut
            if key in self.seen:
                continue
            self.seen.add(key)
            self.states += 1
            try:
                self.judge(disk, cut=cut)
            except (Violated, Error, AssertionError) as error:
                where = self.disk.trace[-1] if self.disk.trace else "the start"
                self.failures.append(f"op {op} after {where}, {label}: {type(error).__name__}: {error}")
                self.disk.on_op = None
                raise StopHistory from None

    def judge(self, disk: SimDisk, *, cut: bool) -> None:
        second = disk.reboot()
        cut_again, ops = None, list[int]()
        if self.states % 7 == 0:  # cut again in the middle of the recovery
            disk.on_op = ops.append
            cut_again = disk.reboot()
        log = self.open(disk)
        found = self.check_engine(log, disk, cut=cut)
        again = self.open(second)
        if self.check_engine(again, second, cut=cut) != found:
            raise Violated("a second start finds something else")
        if cut_again is not None:
            at = self.random.randrange(max(len(ops), 1)) + 1
            cut_again.on_op = None
            cut_again.cut_power_at(at)
            with suppress(BaseException):
                self.open(cut_again)
            for image in cut_again.images(random=self.random, limit=2):
                self.check_engine(self.open(image.disk), image.disk, cut=True)  # now the power was cut in any case
        if self.states % 3 == 0:
            self.check_checkpoints(again, second)

    def check_engine(self, log: Engine, disk: SimDisk, *, cut: bool) -> dict[str, dict[int, bytes]]:
        if log.report.damage or not log.health().ok:
            raise Violated(f"a crash is reported as damage: {log.report.damage}, {log.corruption()}")
        found = {}
        for name, expected in self.expected.items():
            topic = log.find(name)
            if topic is None:
                if expected.records and not expected.dropping:
                    raise Violated(f"{name} is gone")
                continue
            found[name] = self.read_topic(topic, expected, cut=cut)
            self.check_files(topic, disk)
        return found

    def read_topic(self, topic: Topic, expected: Expected, *, cut: bool) -> dict[int, bytes]:
        page = topic.read(limit=10_000, bytes_max=1 << 30)
        if sum(page.counts) != page.next_from_seq:
            raise Violated(f"{page.counts} do not add up to {page.next_from_seq}")
        seen = {}
        for record in page.records:
            data = record.data.read() if isinstance(record.data, LargeData) else record.data
            with topic.open_record(record.seq) as reader:
                if reader.read() != data:
                    raise Violated(f"record {record.seq} reads in two ways")
            if data not in expected.written:
                raise Violated(f"record {record.seq} has data that was never sent: {len(data)} bytes")
            seen[record.seq] = data
        weights = {record.seq: len(seen[record.seq]) + _meta_bytes(record.meta) for record in page.records}
        if topic.bytes != sum(weights.values()):
            raise Violated(f"{topic.bytes} bytes are counted, {sum(weights.values())} are there")
        promised = self.durability == "fsync" or (not cut and self.durability == "disk")
        for seq, data in expected.records.items() if promised and not expected.dropping else ():
            if seq in expected.deleting:
                if seq in expected.deleted and seq in seen:
                    raise Violated(f"record {seq} was deleted and is back")
            elif seen.get(seq) != data:
                raise Violated(f"record {seq} was acked and is missing")
        return seen

    def check_files(self, topic: Topic, disk: SimDisk) -> None:
        """Files after a start: everything that is named, and nothing that is not."""
        state = topic._state
        named = {blob_id for _, blob_id in state.blobs} | _named_by_manifests(disk, state.id)
        there = {path.rpartition("/")[2] for path in disk.tree() if path.startswith(f"{state.directory}/blobs/")}
        if extra := there - {f"blob-{blob:016x}.blob" for blob in named}:
            raise Violated(f"{topic.name}: nothing names {sorted(extra)}")
        if missing := {blob.path.rpartition("/")[2] for blob in list_blob_files(state)} - there:
            raise Violated(f"{topic.name}: {sorted(missing)} are missing")

    def check_checkpoints(self, log: Engine, disk: SimDisk) -> None:
        """After three checkpoints only the blobs of live records are left, and a check finds no damage."""
        for _ in range(3):
            for name in NAMES:
                if (topic := log.find(name)) is not None and topic.config.durability != "ephemeral":
                    topic.append(b"x")
            log.checkpoint()
        for name in NAMES:
            if (topic := log.find(name)) is not None:
                state = topic._state
                live = {blob.path for blob in list_blob_files(state)}
                there = {path for path in disk.tree() if path.startswith(f"{state.directory}/blobs/")}
                named = {
                    f"{state.directory}/blobs/blob-{blob:016x}.blob" for blob in _named_by_manifests(disk, state.id)
                }
                if not live <= there or there - live - named:
                    raise Violated(f"{name}: {sorted(there ^ live)} after checkpoints")
        damage = [finding for finding in check_directory(PATH, disk=disk) if finding.damage]
        if damage:
            raise Violated(f"a check finds {damage}")


def _named_by_manifests(disk: SimDisk, topic_id: int) -> set[int]:
    """The blobs that the newest manifest or the one before it names."""
    loaded = manifest.load_newest(disk, PATH)
    rows = [*loaded.manifest.topics, *loaded.rows_before()]
    return {blob for row in rows if row.id == topic_id for blob in ids_of_row(row.blobs)}


def _meta_bytes(meta: dict[str, Any] | None) -> int:
    return 0 if meta is None else len(f'{{"n":{meta["n"]}}}')


# ── histories ─────────────────────────────────────────────────────────────────────────────────────


def write_and_delete(it: Harness) -> None:
    """Streams beside ordinary records, a broken one, a delete, checkpoints, and a restart."""
    it.append()
    first = it.stream()
    it.break_off()
    it.append()
    it.delete(first)
    it.checkpoint()
    second = it.stream(size=1024)
    it.stream(size=1025)
    it.checkpoint()
    it.delete(second)
    it.checkpoint()
    it.checkpoint()
    it.reopen()
    it.stream()
    it.reopen()


def drop_and_restart(it: Harness) -> None:
    """Two topics, one of which is dropped; a restart between a stream and its delete."""
    it.stream("u")
    kept = it.stream("t")
    it.checkpoint()
    it.stream("u", size=70)
    it.drop("u")
    it.reopen()
    it.delete(kept)
    it.stream("t", size=3000)
    it.checkpoint()
    it.append()
    it.checkpoint()


def route(it: Harness) -> None:
    """Copies by a router, and the removal of originals and copies."""
    it.expected["u"].written = it.expected["t"].written
    it.log.router("r", "t", "u")
    it.append()
    first = it.stream()
    it.log.tick()
    it.checkpoint()
    it.stream(size=1500)
    it.topic("u").read()
    it.delete(first)
    it.checkpoint()
    it.reopen()
    it.stream(size=200)
    it.topic("u").read()
    it.checkpoint()
    it.append()
    it.checkpoint()


HISTORIES: Final = (write_and_delete, drop_and_restart, route)
