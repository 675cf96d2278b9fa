"""What is being done when the power goes: one small history per verb. Each tells the oracle before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random

from tests.crash.oracle import Oracle

from tidelog.commitlog import SegmentedLog
from tidelog.errors import StreamBroken
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

PATH = "log"
# Big enough to span sectors, so that a torn write can lose any part of it; small enough that a sweep stays quick.
BIG_RECORD_BYTES, SMALL_RECORD_BYTES = 700, 30


class LogHarness:
    """A log on a simulated disk, and the oracle that watches it."""

    def __init__(self, codec: str, disk: SimDisk, oracle: Oracle, *, sync: str) -> None:
        self.codec, self.disk, self.oracle, self.sync = codec, disk, oracle, sync
        self.clock = ManualClock()
        self._number = 0

    def open(self) -> SegmentedLog:
        return open_log(self.codec, self.disk, self.clock, self.sync)

    def data(self, size: int, key: int = 0) -> bytes:
        self._number += 1
        return b"%d:%d:" % (key, self._number) + bytes((self._number * 7 + i) % 251 for i in range(size))

    def append(self, log: SegmentedLog, size: int = SMALL_RECORD_BYTES, key: int = 0) -> int:
        data = self.data(size, key)
        self.oracle.on_write_started(log.highest, data)
        seq = log.append(data)
        if self.sync != "interval":
            self.oracle.on_acked([seq], [data])
        self.clock.tick(1)
        return seq

    def append_many(
        self, log: SegmentedLog, count: int, size: int = SMALL_RECORD_BYTES, keys: int = 1, *, whole: bool = False
    ) -> range:
        """`whole`: the batch fits its segment, so with the tide codec it is all there or not at all."""
        datas = [self.data(size, i % keys) for i in range(count)]
        for number, data in enumerate(datas):
            self.oracle.on_write_started(log.highest + number, data)
        if whole and self.codec == "tide" and self.sync != "each":
            self.oracle.whole.append(range(log.highest, log.highest + count))
        seqs = log.append_many(datas)
        if self.sync != "interval":
            self.oracle.on_acked(seqs, datas)
        self.clock.tick(1)
        return seqs


def open_log(codec: str, disk: SimDisk, clock: ManualClock, sync: str = "batch") -> SegmentedLog:
    return SegmentedLog.open(
        PATH, codec, disk=disk, clock=clock, sync=sync, segment_bytes_max=1200, index_every=3, segment_age_ms_max=None
    )


def survivors(log: SegmentedLog, *, skip_damage: bool = False) -> dict[int, bytes]:
    return {record.seq: record.data for record in log.records(skip_damage=skip_damage)}


def key_of(record: Record) -> bytes | None:
    key = record.data.split(b":", 1)[0]
    return None if key == b"9" else key


def append_one_by_one(harness: LogHarness) -> None:
    log = harness.open()
    for size in (SMALL_RECORD_BYTES, BIG_RECORD_BYTES, 0, SMALL_RECORD_BYTES):
        harness.append(log, size)
    log.close()


def append_batches(harness: LogHarness) -> None:
    log = harness.open()
    harness.append_many(log, 5, SMALL_RECORD_BYTES, whole=True)
    harness.append_many(log, 2, 250, whole=True)
    log.seal()
    harness.append_many(log, 7, 100, whole=True)
    log.close()


def stream_records(harness: LogHarness) -> None:
    log = harness.open()
    harness.append(log)
    for pieces in ((40, 600, 3), (0,), (5, 5)):
        chunks = [harness.data(size) for size in pieces]
        whole = b"".join(chunks)
        harness.oracle.on_write_started(log.highest, whole)
        seq = log.append_stream(chunks)
        if harness.sync != "interval":
            harness.oracle.on_acked([seq], [whole])

    def breaking() -> Iterator[bytes]:
        yield harness.data(BIG_RECORD_BYTES)
        raise RuntimeError("the sender went away")

    with suppress(StreamBroken):
        log.append_stream(breaking())
    harness.append(log)
    log.close()


def seal_and_go_on(harness: LogHarness) -> None:
    log = harness.open()
    harness.append_many(log, 2, BIG_RECORD_BYTES)
    log.seal()
    harness.append(log)
    log.seal()
    harness.append(log, BIG_RECORD_BYTES)
    log.close()


def truncate_inside_and_across(harness: LogHarness) -> None:
    log = harness.open()
    for _ in range(3):
        harness.append_many(log, 3, 300)
    first = log.lowest
    for mark in (first + 7, first + 4, first + 3, first):
        harness.oracle.on_truncate_started(mark)
        log.truncate(mark)
        harness.oracle.on_truncated(mark)
        harness.append(log)
    log.close()


def retain_by_size(harness: LogHarness) -> None:
    log = harness.open()
    for _ in range(4):
        harness.append_many(log, 2, BIG_RECORD_BYTES)
    for keep in (3000, 100):
        drop_old(harness, log, lambda: log.retain(keep_bytes=keep))  # noqa: B023 - called at once
    harness.append(log)
    log.close()


def expire_everything(harness: LogHarness) -> None:
    log = harness.open()
    harness.append_many(log, 2, BIG_RECORD_BYTES)
    harness.append(log)
    harness.clock.tick(10_000)
    drop_old(harness, log, lambda: log.remove_expired(5_000))
    harness.append(log)
    log.close()


def drop_old(harness: LogHarness, log: SegmentedLog, verb: Callable[[], object]) -> None:
    """Tell the oracle of a verb that drops leading segments: while it runs any of them may be gone."""
    held = dict(harness.oracle.must)
    harness.oracle.whole = []
    harness.oracle.on_removal_started(harness.oracle.may)
    verb()
    harness.oracle.on_removed(seq for seq in harness.oracle.may if seq < log.lowest)
    kept = {seq: data for seq, data in held.items() if seq >= log.lowest}
    harness.oracle.on_acked(kept, kept.values())


def compact_by_key(harness: LogHarness) -> None:
    log = harness.open()
    for _ in range(3):
        harness.append_many(log, 4, 200, keys=3)
        log.seal()
    harness.append(log, key=9)
    log.seal()
    for _ in range(2):  # the second run finds nothing to do
        compact(harness, log)
    harness.append(log)
    log.close()


def compact_between_kept_records(harness: LogHarness) -> None:
    """What goes lies before, between and after what stays, so that nothing but the index tells where that is."""
    log = harness.open()
    for _ in range(2):
        for key in (9, 0, 9, 0):
            harness.append(log, 200, key=key)
        log.seal()
    compact(harness, log)
    harness.append(log)
    log.close()


def compact(harness: LogHarness, log: SegmentedLog) -> None:
    newest: dict[bytes, int] = {}
    sealed = [record for record in log.records() if record.seq < log.segments[-1].start]
    for record in sealed:
        if (name := key_of(record)) is not None:
            newest[name] = record.seq
    goes = [record.seq for record in sealed if (name := key_of(record)) is not None and newest[name] != record.seq]
    harness.oracle.whole = []
    harness.oracle.on_removal_started(goes)
    log.compact(key_of)
    harness.oracle.on_removed(goes)


def truncate_onto_holes(harness: LogHarness) -> None:
    """What compaction left of a segment lies below the mark, and it is nothing: only the mark remembers the numbers."""
    log = harness.open()
    harness.append_many(log, 3, 60)
    log.seal()
    harness.append_many(log, 2, 60)
    log.seal()
    compact(harness, log)
    for mark in (log.highest - 1, log.lowest):
        if log.lowest <= mark < log.highest:
            harness.oracle.on_truncate_started(mark)
            log.truncate(mark)
            harness.oracle.on_truncated(mark)
    harness.append(log)
    log.close()


def commit_offsets(harness: LogHarness) -> None:
    log = harness.open()
    for _ in range(2):
        seq = harness.append(log)
        log.offsets.commit("group", seq)
    log.close()


def sync_by_interval(harness: LogHarness) -> None:
    log = harness.open()
    held: dict[int, bytes] = {}
    for _ in range(2):
        for size in (
            SMALL_RECORD_BYTES,
            BIG_RECORD_BYTES,
            BIG_RECORD_BYTES,
            SMALL_RECORD_BYTES,
        ):  # the roll comes while something is still unsynced
            data = harness.data(size)
            harness.oracle.on_write_started(log.highest, data)
            held[log.append(data)] = data
        log.sync()
        harness.oracle.on_acked(held.keys(), held.values())
    log.close()


def random_history(seed: int, steps: int) -> Workload:
    """A history of verbs drawn by chance, the same for the same seed."""

    def history(bench: LogHarness) -> None:
        random = Random(seed)
        log = bench.open()
        for _ in range(steps):
            log = run_operation(bench, log, random.choice(OPERATIONS), random)
        log.close()

    history.__name__ = f"history {seed}"
    return history


def history_of(operations: Sequence[str]) -> Workload:
    """The history that these letters of the alphabet spell, after two batches to work on."""

    def history(bench: LogHarness) -> None:
        log = bench.open()
        bench.append_many(log, 3, 150, keys=2)
        log.seal()
        bench.append_many(log, 2, 150, keys=2)
        for letter in operations:
            log = run_operation(bench, log, letter, Random(0))
        log.close()

    history.__name__ = "-".join(operations)
    return history


OPERATIONS = (
    "append",
    "batch",
    "big",
    "stream",
    "broken",
    "seal",
    "truncate",
    "retain",
    "expire",
    "compact",
    "reopen",
    "sync",
)


def run_operation(harness: LogHarness, log: SegmentedLog, operation: str, random: Random) -> SegmentedLog:
    """One letter of a history."""
    if operation == "append":
        harness.append(log, SMALL_RECORD_BYTES, key=random.randrange(3))
    elif operation == "batch":
        harness.append_many(log, 4, 60, keys=2)
    elif operation == "big":
        harness.append(log, BIG_RECORD_BYTES)
    elif operation == "stream":
        chunks = [harness.data(size) for size in (10, 300)]
        harness.oracle.on_write_started(log.highest, b"".join(chunks))
        seq = log.append_stream(chunks)
        if harness.sync != "interval":
            harness.oracle.on_acked([seq], [b"".join(chunks)])
    elif operation == "broken":
        with suppress(StreamBroken):
            log.append_stream([b"x" * 600, b"y" * 100_000])
    elif operation == "seal":
        log.seal()
    elif operation == "truncate" and len(log):
        mark = random.randrange(log.lowest, log.highest)
        harness.oracle.on_truncate_started(mark)
        log.truncate(mark)
        harness.oracle.on_truncated(mark)
    elif operation == "retain":
        drop_old(harness, log, lambda: log.retain(keep_bytes=400))
    elif operation == "expire":
        harness.clock.tick(10_000)
        drop_old(harness, log, lambda: log.remove_expired(5_000))
    elif operation == "compact":
        compact(harness, log)
    elif operation == "reopen":
        log.close()
        log = harness.open()
    elif operation == "sync":
        log.sync()
    return log


Workload = Callable[[LogHarness], None]
WORKLOADS: dict[str, Workload] = {
    workload.__name__: workload
    for workload in (
        append_one_by_one,
        append_batches,
        stream_records,
        seal_and_go_on,
        truncate_inside_and_across,
        retain_by_size,
        expire_everything,
        compact_by_key,
        compact_between_kept_records,
        truncate_onto_holes,
        commit_offsets,
        sync_by_interval,
    )
}
