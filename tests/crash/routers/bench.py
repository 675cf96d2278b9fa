"""Histories of an engine with routers, and what must be true of every crash state of them.

    s ──plain──▶ d ──tagged──▶ e        s keeps few records, so copies outlive their records
    s ──twice──▶ d                      a second router of the lane, made and dropped by letters
    s ──full───▶ f                      f keeps two records and refuses the next

Readers look at every topic behind each letter, and between them where a letter says so. What a reader saw is
remembered here by topic and seq; nothing of this is asked of the code under test.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import tidelog
from tidelog.engine import Engine
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk

PATH = "data"
TINY: dict[str, Any] = {"wal_file_bytes": 4096, "segment_events_max": 4, "segment_bytes_max": 1024, "head_reserve": 4}
TOPICS = ("s", "d", "e", "f")
TAGS = ("x:1", "x:2", "y", None)
KEEPS = 6  # records of s

Row = tuple[Any, str | None, str | None]
Rows = dict[int, Row]


class Wrong(Exception):
    """A rule does not hold."""


def hold(true: object, otherwise: str) -> None:
    if not true:
        raise Wrong(otherwise)


def open_engine(disk: SimDisk, clock: ManualClock, shards: int, **more: Any) -> Engine:
    return tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=shards, **TINY, **more)


def read(log: Engine, name: str) -> Rows:
    """All that a reader gets, from the first record on."""
    topic, found, at = log.find(name), dict[int, Row](), 0
    while topic is not None:
        page = topic.read(at)
        for record in page.records:
            hold(record.seq > at, f"{name}: seq {record.seq} behind {at}")
            at = record.seq
            found[at] = (record.data, record.tag, record.node)
        at = max(at, page.next_from_seq)
        if page.caught_up:
            break
    return found


class Told(NamedTuple):
    """A crash state, and what readers had seen by then."""

    label: str
    disk: SimDisk
    cut: bool  # power, not only the process
    seen: dict[str, Rows]
    passed: Counter[str]


class Bench:
    def __init__(
        self, classes: tuple[str, str], shards: int, random: Random, *, images: int = 4, every: int = 4
    ) -> None:
        self.classes, self.shards, self.random, self.images = classes, shards, random, images
        self.every = every  # one state in so many is also written to, and one in three of these cut in its recovery
        self.clock, self.disk = ManualClock(), SimDisk(trace=True)
        self.seen: dict[str, Rows] = {name: {} for name in TOPICS}
        self.gone: dict[str, set[int]] = {name: set() for name in TOPICS}
        self.passed: Counter[str] = Counter()  # forwarded_total, as it was shown
        self.number = 0
        self.states = self.judged = 0
        self._taken: list[Told] = []
        self._known: set[bytes] = set()
        self.log = open_engine(self.disk, self.clock, shards)
        source, dest = classes
        self.log.topic("s", durability=source, cap_records=KEEPS)
        for name in "de":
            self.log.topic(name, durability=dest)
        self.log.topic("f", durability=dest, cap_records=2, discard="reject")
        self.log.router("plain", "s", "d")
        self.log.router("tagged", "d", "e", filter="x:*", preserve_node=False)
        self.log.router("full", "s", "f")

    @property
    def safe(self) -> bool:
        """Whether nothing that was acked may be lost to a power cut."""
        return self.classes == ("fsync", "fsync")

    # What is done.

    def write(self, name: str, count: int = 1) -> None:
        records = []
        for _ in range(count):
            self.number += 1
            records.append(f"{name}{self.number}")
        tags = [self.random.choice(TAGS) for _ in records]
        self.log.topic(name).append(records, tag=tags, node="n")

    def peek(self, name: str) -> None:
        """A reader looks at one topic."""
        rows = read(self.log, name)
        for seq, row in rows.items():
            known = self.seen[name].setdefault(seq, row)
            hold(known == row, f"{name}: seq {seq} was {known} and is {row}")
            hold(seq not in self.gone[name], f"{name}: seq {seq} was gone and is back")
        self.gone[name] |= self.seen[name].keys() - rows.keys()

    def look(self) -> None:
        for name in TOPICS:
            self.peek(name)
        for state in self.log.routers():
            self.passed[state.router] = state.forwarded_total

    def restart(self, disk: SimDisk, *, cut: bool) -> None:
        self.disk = disk
        self.log = open_engine(disk, self.clock, self.shards)
        for name in TOPICS:
            if cut and not self.safe:
                # What was lost is lost from here on, and what was deleted may be there again.
                rows = read(self.log, name)
                self.gone[name] = self.seen[name].keys() - rows.keys()
        disk.on_op = self.take

    # Crash states.

    def spell(self, letters: Sequence[Letter]) -> None:
        """Run a history and judge every instant of it."""
        self.look()
        self.disk.on_op = self.take
        for letter in letters:
            letter(self)
            self.disk.on_op = None
            if self.disk.trace is not None:
                self.take(self.disk.ops + 1)
            self.look()
            for told in self._taken:
                self.judge(told)
            self._taken.clear()
            self.disk.on_op = self.take
        self.disk.on_op = None

    def take(self, op: int) -> None:
        words = f"before op {op}"
        for image in self.disk.images(random=self.random, limit=self.images):
            self._take(f"{words}, {image.label}", image.disk, cut=True)
        self._take(f"{words}, a kill", self.disk.reboot(), cut=False)

    def _take(self, label: str, disk: SimDisk, *, cut: bool) -> None:
        digest = disk.digest()
        if digest not in self._known:
            self._known.add(digest)
            seen = {name: dict(rows) for name, rows in self.seen.items()}
            self._taken.append(Told(label, disk, cut, seen, self.passed.copy()))

    def judge(self, told: Told) -> None:
        self.judged += 1
        try:
            again = told.disk.reboot()
            if self.judged % (3 * self.every) == 0:
                self._cut_again(told)
            first = self._judged(told.disk, told, going_on=False)
            if self.judged % self.every == 0:
                second = self._judged(again, told, going_on=True)
                hold(first == second, f"two recoveries differ: {first} {second}")
        except Wrong as wrong:
            raise Wrong(f"{told.label}: {wrong}") from None
        except Error as error:
            where = [
                f"{at.filename.rpartition('/')[2]}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)
            ]
            raise Wrong(f"{told.label}: {type(error).__name__} in {' '.join(where[-5:])}: {error}") from error

    def _cut_again(self, told: Told) -> None:
        """The power fails once more inside the recovery."""
        taken: list[SimDisk] = []
        disk = told.disk.reboot()
        disk.on_op = lambda _: taken.extend(image.disk for image in disk.images(random=self.random, limit=2))
        open_engine(disk, self.clock, self.shards)
        disk.on_op = None
        for image in taken:
            if (digest := image.digest()) not in self._known:
                self._known.add(digest)
                self._judged(image, told._replace(cut=True), going_on=False)

    def _judged(self, disk: SimDisk, told: Told, *, going_on: bool) -> dict[str, Rows]:
        self.states += 1
        log = open_engine(disk, self.clock, self.shards)
        hold(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        rows = {name: read(log, name) for name in TOPICS}
        for name in TOPICS:
            for seq, row in rows[name].items():
                known = told.seen[name].get(seq, row)
                hold(known == row, f"{name}: seq {seq} was seen as {known} and is {row}")
            if self.safe or not told.cut:
                # What this letter took away may be there or not.
                lost = told.seen[name].keys() - self.gone[name] - rows[name].keys()
                hold(not lost, f"{name}: seqs {sorted(lost)} are lost, there are {sorted(rows[name])}")
        self._copies(log, rows, told)
        if going_on:
            self._go_on(log, told)
        return rows

    def _copies(self, log: Engine, rows: dict[str, Rows], told: Told) -> None:
        """Nothing is doubled, nothing is left out, and the order is the source's."""
        hold(len(rows["f"]) <= 2, f"f: it keeps two and refuses the next, there are {rows['f']}")
        for name, source in (("d", "s"), ("e", "d"), ("f", "s")):
            if log.find(name) is None:
                continue
            copies = [row[0] for row in rows[name].values() if not row[0].startswith(name)]
            for data, count in Counter(copies).items():
                hold(count <= 2, f"{name}: {data} is there {count} times")
            origin = [data for data in copies if data.startswith("s")]
            numbers = [int(data[1:]) for data in origin]
            hold(numbers == sorted(numbers), f"{name}: copies are out of order: {origin}")
            if name == "f" or not any(state.dest == name for state in log.routers()):
                continue
            had = {self.seen[name][seq][0] for seq in self.gone[name]} | set(copies)
            for seq, (data, tag, _) in rows[source].items():
                due = name == "d" or (tag or "").startswith("x:")
                known = seq in told.seen[source]
                if due and known and data not in had:
                    raise Wrong(f"{name}: {data}, seq {seq} of {source}, was not passed on: {copies}")
        for state in log.routers():
            if self.safe and state.router != "twice":
                total = told.passed[state.router]
                hold(state.forwarded_total >= total, f"{state}: it had passed on {total}")

    def _go_on(self, log: Engine, told: Told) -> None:
        """The engine is of use again, and a third start finds the same."""
        for name in TOPICS:
            topic = log.find(name)
            if topic is None or name == "f":
                continue
            seq = topic.append(f"{name}0", tag="x:9").first_seq
            top = max([*told.seen[name], 0])
            hold(seq > top, f"{name}: the next seq is {seq}, {top} was seen")
        after = {name: read(log, name) for name in TOPICS}
        if any(state.router == "plain" for state in log.routers()):
            hold(sum(row[0] == "s0" for row in after["d"].values()) >= 1, f"s0 was not passed on: {after['d']}")
        again = open_engine(disk_of(log).reboot(), self.clock, self.shards)
        for name in TOPICS:
            hold(read(again, name) == after[name], f"{name}: a kill changed {after[name]} to {read(again, name)}")
        log.close()
        again = open_engine(disk_of(log), self.clock, self.shards, read_only=True)
        for name in TOPICS:
            hold(read(again, name) == after[name], f"{name}: a close changed {after[name]} to {read(again, name)}")
        again.close()


def disk_of(log: Engine) -> SimDisk:
    disk = log._shared.disk
    assert isinstance(disk, SimDisk), "opened on one"
    return disk


Letter = Callable[[Bench], None]


def one(bench: Bench) -> None:
    bench.write("s")


def batch(bench: Bench) -> None:
    bench.write("s", 3)


def slow(bench: Bench) -> None:
    """Records that nobody looks for, and some that are looked for one by one."""
    bench.write("s", 2)
    bench.write("s")
    bench.peek("e")
    bench.write("s")


def burst(bench: Bench) -> None:
    """More than the source keeps: some are lost before they could be passed on."""
    bench.write("s", KEEPS + 2)


def direct(bench: Bench) -> None:
    """Between copies, and behind some that nobody has seen."""
    bench.write("s")
    bench.peek("d")
    bench.write("d")
    bench.write("d", 2)
    bench.write("s")


def private(bench: Bench) -> None:
    """Direct writes that are seen at once, while there is nothing to pass on."""
    for _ in range(3):
        bench.write("d")
        bench.peek("d")
    bench.write("s")


def onward(bench: Bench) -> None:
    bench.write("e")
    bench.write("s", 2)
    bench.peek("e")
    bench.write("e")


def delete_source(bench: Bench) -> None:
    bench.log.topic("s").delete(match="x:*")
    bench.write("s")


def delete_dest(bench: Bench) -> None:
    topic = bench.log.topic("d")
    topic.delete(before_seq=max(topic.state().head_seq - 1, 0))
    bench.write("s")


def make_room(bench: Bench) -> None:
    """What does not fit waits; some of it is deleted meanwhile."""
    bench.write("s", 5)
    bench.peek("f")
    bench.log.topic("s").delete(match="y")
    topic = bench.log.topic("f")
    topic.delete(before_seq=topic.state().head_seq + 1)


def second(bench: Bench) -> None:
    bench.log.router("twice", "s", "d", filter="x:*", preserve_tag=False)
    bench.write("s", 2)


def change(bench: Bench) -> None:
    bench.write("s")
    bench.log.router("plain", "s", "d", preserve_node=bench.number % 2 == 0)
    bench.write("s")


def end(bench: Bench) -> None:
    bench.write("s")
    bench.log.drop_router("twice")
    bench.write("s")


def tighten(bench: Bench) -> None:
    bench.write("s")
    bench.peek("d")
    bench.log.topic("d", cap_records=4)
    bench.log.topic("d", cap_records=0)


def checkpoint(bench: Bench) -> None:
    bench.write("s")
    bench.log.checkpoint()


def tick(bench: Bench) -> None:
    bench.log.tick()


def kill(bench: Bench) -> None:
    bench.restart(bench.disk.reboot(), cut=False)


def power(bench: Bench) -> None:
    bench.restart(bench.disk.crash_image(bench.random), cut=True)


def reopen(bench: Bench) -> None:
    with suppress(Error):
        bench.log.close()
    bench.restart(bench.disk, cut=False)


ALPHABET: tuple[Letter, ...] = (
    *(one, batch, slow, burst, direct, private, onward, delete_source, delete_dest, make_room),
    *(second, change, end, tighten, checkpoint, tick),
)
RESTARTS: tuple[Letter, ...] = (kill, power, reopen)
