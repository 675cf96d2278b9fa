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
BIG, SMALL = 700, 30


class Bench:
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

    def append(self, log: SegmentedLog, size: int = SMALL, key: int = 0) -> int:
        data = self.data(size, key)
        self.oracle.offer(log.highest, data)
        seq = log.append(data)
        if self.sync != "interval":
            self.oracle.ack([seq], [data])
        self.clock.tick(1)
        return seq

    def append_many(
        self, log: SegmentedLog, count: int, size: int = SMALL, keys: int = 1, *, whole: bool = False
    ) -> range:
        """`whole`: the batch fits its segment, so with the tide codec it is all there or not at all."""
        datas = [self.data(size, i % keys) for i in range(count)]
        for number, data in enumerate(datas):
            self.oracle.offer(log.highest + number, data)
        if whole and self.codec == "tide" and self.sync != "each":
            self.oracle.whole.append(range(log.highest, log.highest + count))
        seqs = log.append_many(datas)
        if self.sync != "interval":
            self.oracle.ack(seqs, datas)
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


def append_one_by_one(bench: Bench) -> None:
    log = bench.open()
    for size in (SMALL, BIG, 0, SMALL):
        bench.append(log, size)
    log.close()


def append_batches(bench: Bench) -> None:
    log = bench.open()
    bench.append_many(log, 5, SMALL, whole=True)
    bench.append_many(log, 2, 250, whole=True)
    log.seal()
    bench.append_many(log, 7, 100, whole=True)
    log.close()


def stream_records(bench: Bench) -> None:
    log = bench.open()
    bench.append(log)
    for pieces in ((40, 600, 3), (0,), (5, 5)):
        chunks = [bench.data(size) for size in pieces]
        whole = b"".join(chunks)
        bench.oracle.offer(log.highest, whole)
        seq = log.append_stream(chunks)
        if bench.sync != "interval":
            bench.oracle.ack([seq], [whole])

    def breaking() -> Iterator[bytes]:
        yield bench.data(BIG)
        raise RuntimeError("the sender went away")

    with suppress(StreamBroken):
        log.append_stream(breaking())
    bench.append(log)
    log.close()


def seal_and_go_on(bench: Bench) -> None:
    log = bench.open()
    bench.append_many(log, 2, BIG)
    log.seal()
    bench.append(log)
    log.seal()
    bench.append(log, BIG)
    log.close()


def truncate_inside_and_across(bench: Bench) -> None:
    log = bench.open()
    for _ in range(3):
        bench.append_many(log, 3, 300)
    first = log.lowest
    for mark in (first + 7, first + 4, first + 3, first):
        bench.oracle.truncating(mark)
        log.truncate(mark)
        bench.oracle.truncated(mark)
        bench.append(log)
    log.close()


def retain_by_size(bench: Bench) -> None:
    log = bench.open()
    for _ in range(4):
        bench.append_many(log, 2, BIG)
    for keep in (3000, 100):
        drop_old(bench, log, lambda: log.retain(keep_bytes=keep))  # noqa: B023 - called at once
    bench.append(log)
    log.close()


def expire_everything(bench: Bench) -> None:
    log = bench.open()
    bench.append_many(log, 2, BIG)
    bench.append(log)
    bench.clock.tick(10_000)
    drop_old(bench, log, lambda: log.remove_expired(5_000))
    bench.append(log)
    log.close()


def drop_old(bench: Bench, log: SegmentedLog, verb: Callable[[], object]) -> None:
    """Tell the oracle of a verb that drops leading segments: while it runs any of them may be gone."""
    held = dict(bench.oracle.must)
    bench.oracle.whole = []
    bench.oracle.doubt(bench.oracle.may)
    verb()
    bench.oracle.forget(seq for seq in bench.oracle.may if seq < log.lowest)
    kept = {seq: data for seq, data in held.items() if seq >= log.lowest}
    bench.oracle.ack(kept, kept.values())


def compact_by_key(bench: Bench) -> None:
    log = bench.open()
    for _ in range(3):
        bench.append_many(log, 4, 200, keys=3)
        log.seal()
    bench.append(log, key=9)
    log.seal()
    for _ in range(2):  # the second run finds nothing to do
        compact(bench, log)
    bench.append(log)
    log.close()


def compact_between_kept_records(bench: Bench) -> None:
    """What goes lies before, between and after what stays, so that nothing but the index tells where that is."""
    log = bench.open()
    for _ in range(2):
        for key in (9, 0, 9, 0):
            bench.append(log, 200, key=key)
        log.seal()
    compact(bench, log)
    bench.append(log)
    log.close()


def compact(bench: Bench, log: SegmentedLog) -> None:
    newest: dict[bytes, int] = {}
    sealed = [record for record in log.records() if record.seq < log.segments[-1].start]
    for record in sealed:
        if (name := key_of(record)) is not None:
            newest[name] = record.seq
    goes = [record.seq for record in sealed if (name := key_of(record)) is not None and newest[name] != record.seq]
    bench.oracle.whole = []
    bench.oracle.doubt(goes)
    log.compact(key_of)
    bench.oracle.forget(goes)


def truncate_onto_holes(bench: Bench) -> None:
    """What compaction left of a segment lies below the mark, and it is nothing: only the mark remembers the numbers."""
    log = bench.open()
    bench.append_many(log, 3, 60)
    log.seal()
    bench.append_many(log, 2, 60)
    log.seal()
    compact(bench, log)
    for mark in (log.highest - 1, log.lowest):
        if log.lowest <= mark < log.highest:
            bench.oracle.truncating(mark)
            log.truncate(mark)
            bench.oracle.truncated(mark)
    bench.append(log)
    log.close()


def commit_offsets(bench: Bench) -> None:
    log = bench.open()
    for _ in range(2):
        seq = bench.append(log)
        log.offsets.commit("group", seq)
    log.close()


def sync_by_interval(bench: Bench) -> None:
    log = bench.open()
    held: dict[int, bytes] = {}
    for _ in range(2):
        for size in (SMALL, BIG, BIG, SMALL):  # the roll comes while something is still unsynced
            data = bench.data(size)
            bench.oracle.offer(log.highest, data)
            held[log.append(data)] = data
        log.sync()
        bench.oracle.ack(held.keys(), held.values())
    log.close()


def random_history(seed: int, steps: int) -> Workload:
    """A history of verbs drawn by chance, the same for the same seed."""

    def history(bench: Bench) -> None:
        random = Random(seed)
        log = bench.open()
        for _ in range(steps):
            log = step(bench, log, random.choice(ALPHABET), random)
        log.close()

    history.__name__ = f"history {seed}"
    return history


def spelled(letters: Sequence[str]) -> Workload:
    """The history that these letters of the alphabet spell, after two batches to work on."""

    def history(bench: Bench) -> None:
        log = bench.open()
        bench.append_many(log, 3, 150, keys=2)
        log.seal()
        bench.append_many(log, 2, 150, keys=2)
        for letter in letters:
            log = step(bench, log, letter, Random(0))
        log.close()

    history.__name__ = "-".join(letters)
    return history


ALPHABET = (
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


def step(bench: Bench, log: SegmentedLog, letter: str, random: Random) -> SegmentedLog:
    """One letter of a history."""
    if letter == "append":
        bench.append(log, SMALL, key=random.randrange(3))
    elif letter == "batch":
        bench.append_many(log, 4, 60, keys=2)
    elif letter == "big":
        bench.append(log, BIG)
    elif letter == "stream":
        chunks = [bench.data(size) for size in (10, 300)]
        bench.oracle.offer(log.highest, b"".join(chunks))
        seq = log.append_stream(chunks)
        if bench.sync != "interval":
            bench.oracle.ack([seq], [b"".join(chunks)])
    elif letter == "broken":
        with suppress(StreamBroken):
            log.append_stream([b"x" * 600, b"y" * 100_000])
    elif letter == "seal":
        log.seal()
    elif letter == "truncate" and len(log):
        mark = random.randrange(log.lowest, log.highest)
        bench.oracle.truncating(mark)
        log.truncate(mark)
        bench.oracle.truncated(mark)
    elif letter == "retain":
        drop_old(bench, log, lambda: log.retain(keep_bytes=400))
    elif letter == "expire":
        bench.clock.tick(10_000)
        drop_old(bench, log, lambda: log.remove_expired(5_000))
    elif letter == "compact":
        compact(bench, log)
    elif letter == "reopen":
        log.close()
        log = bench.open()
    elif letter == "sync":
        log.sync()
    return log


Workload = Callable[[Bench], None]
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
