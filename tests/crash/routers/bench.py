"""Histories of an engine with routers, and what must be true of every crash state of them.

    main     s ──plain──▶ d ──tagged──▶ e      s keeps few records, so copies outlive their records
             s ──twice──▶ d                    a second router of the lane, made and dropped by letters
             s ──full───▶ f                    f keeps two records and refuses the next
    wires    s ─or─ t ──▶ d, s ──▶ l           sources, targets and routers are dropped, made again, exchanged
    jobs     s ──▶ q, s ──▶ d, t ──▶ x         q is a queue, d has a group that holds records, records of t expire
    cycle    a ⇄ b                             a keeps two records

Readers look at every topic after each letter, and between them where a letter says so. What a reader saw is
remembered here by topic and seq; nothing of this is asked of the code under test.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, NamedTuple

import tidelog
from tidelog.engine import Engine
from tidelog.engine.groups import Group
from tidelog.errors import Error
from tidelog.formats.frame import SEQ_MAX
from tidelog.testing import ManualClock, SimDisk

PATH = "data"
TINY: dict[str, Any] = {"wal_file_bytes": 4096, "segment_events_max": 4, "segment_bytes_max": 1024, "head_reserve": 4}
TAGS = ("x:1", "x:2", "y", None)
KEEPS = 6  # records of s
JOBS_CAP = 4  # records of d in jobs that no group holds
TTL_MS = 1000
HOPS = 8  # over so many routers a record is passed on

Row = tuple[Any, str | None, str | None]
Rows = dict[int, Row]
LAYOUTS: dict[str, str] = {"main": "sdef", "wires": "stdl", "jobs": "stdqx", "cycle": "ab"}
SOURCES = "st"
LASTING = {"main": "", "wires": "dl", "jobs": "x", "cycle": ""}  # topics that lose nothing by themselves
Gaps = list[tuple[int, int]]


class Wrong(Exception):
    """A rule does not hold."""


def hold(true: object, otherwise: str) -> None:
    if not true:
        raise Wrong(otherwise)


def open_engine(disk: SimDisk, clock: ManualClock, shards: int, **more: Any) -> Engine:
    return tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=shards, **TINY, **more)


class Seen(NamedTuple):
    """What a reader got, from the first record to the head."""

    rows: Rows
    head: int
    gaps: Gaps


def read_all(log: Engine, name: str) -> Seen:
    topic, found, gaps, at = log.find(name), dict[int, Row](), Gaps(), 0
    while topic is not None:
        page, began = topic.read(at), at
        if page.gap is not None:
            hold(page.gap.gap_from == at + 1, f"{name}: the gap {page.gap} was met at {at}")
            gaps.append((page.gap.gap_from, page.gap.gap_to))
            at = page.gap.gap_to
        for record in page.records:
            hold(record.seq > at, f"{name}: seq {record.seq} after {at}")
            at = record.seq
            found[at] = (record.data, record.tag, record.node)
        hold(page.next_from_seq >= at, f"{name}: a page ends at {page.next_from_seq}, it had {at}")
        at = max(at, page.next_from_seq)
        if page.caught_up:
            break
        hold(at > began, f"{name}: a reader is stuck at {at}")
    return Seen(found, at, gaps)


def covers(gaps: Gaps, told: Gaps) -> bool:
    """Whether a reader is told again of what it was told of before. A gap begins at the reader's cursor, so where it
    begins says nothing: a delete that a power cut took back puts a record there."""
    return all(any(lo <= last <= hi for lo, hi in gaps) for _, last in told)


def read(log: Engine, name: str) -> Rows:
    return read_all(log, name).rows


def consume(group: Group) -> set[int]:
    """Seqs that a consumer gets which fetches and commits up to the head. A page ends before a gap, so one is not
    enough."""
    found: set[int] = set()
    while True:
        began, page = group.position, group.fetch(10_000)
        found |= {record.seq for record in page.records}
        if page.next_from_seq > began:
            group.commit(page.next_from_seq)
        if page.caught_up:
            return found
        hold(page.next_from_seq > began, f"the group is stuck at {began}: {page}")


class Delete(NamedTuple):
    """A delete by tag. Class `disk` may lose it in a power cut."""

    match: str
    head: int  # records up to here; a delete that has not returned may be of any

    def took(self, seq: int, row: Row) -> bool:
        tag, prefix = row[1] or "", self.match.removesuffix("*")
        return seq <= self.head and (tag.startswith(prefix) if self.match.endswith("*") else tag == prefix)


class Promises(NamedTuple):
    """What was acked and shown at one instant."""

    seen: dict[str, Rows]
    heads: dict[str, int]  # up to here a reader had looked
    gaps: dict[str, Gaps]  # and what it was told of
    epochs: dict[str, set[int]]  # ids that a topic of this name may have; 0: there is none
    never: dict[str, set[str]]  # what must not be in a topic
    deletes: dict[str, list[Delete]]
    passed: Counter[str]
    least: set[str]  # routers that are there in any case
    most: set[str]  # and those that may be
    group: int  # what the group on d has committed
    now_us: int


class Told(NamedTuple):
    """A crash state, and what was promised by then."""

    label: str
    disk: SimDisk
    cut: bool  # power, not only the process
    promises: Promises
    version: int  # of the promises: another one whenever they change


class Bench:
    def __init__(
        self,
        classes: tuple[str, str],
        shards: int,
        random: Random,
        *,
        layout: str = "main",
        images: int = 4,
        every: int = 4,
        step: int = 1,
    ) -> None:
        self.classes, self.shards, self.random, self.images = classes, shards, random, images
        self.every = every  # one state in so many is also written to, and one in three of these cut in its recovery
        self.step = step  # one instant in so many is looked at, and the end of each letter
        self.layout, self.topics = layout, LAYOUTS[layout]
        self.clock, self.disk = ManualClock(), SimDisk(trace=True)
        self.seen: dict[str, Rows] = {name: {} for name in self.topics}
        self.gone: dict[str, set[int]] = {name: set() for name in self.topics}
        self.buried: dict[str, set[int]] = {name: set() for name in self.topics}  # `gone` of topics that were dropped
        self.forgotten: dict[str, set[str]] = {name: set() for name in self.topics}  # of topics that promise nothing
        self.gaps: dict[str, Gaps] = {name: [] for name in self.topics}
        self.heads = dict.fromkeys(self.topics, 0)
        self.epochs: dict[str, set[int]] = {}
        self.never: dict[str, set[str]] = {name: set() for name in self.topics}
        self.deletes: dict[str, list[Delete]] = {name: [] for name in self.topics}
        self.passed: Counter[str] = Counter()  # forwarded_total, as it was shown
        self.least: set[str] = set()
        self.most: set[str] = set()
        self.group = 0
        self.was_cut = False  # power failed in this history: what was not synced may be lost since
        self.number = 0
        self.states = self.judged = 0
        self._taken: list[Told] = []
        self._promises: Promises | None = None
        self._version = 0
        self._known: set[tuple[bytes, bool, int]] = set()  # bytes, whether power was cut, version of the promises
        self.log = open_engine(self.disk, self.clock, shards)
        _SETUPS[layout](self)
        self.epochs = {name: {self.log.topic(name).id} for name in self.topics}
        self.most = {state.router for state in self.log.routers()}
        self.least = set(self.most)

    def class_of(self, name: str) -> str:
        return self.classes[name not in "sta"]

    def keeps(self, name: str, *, cut: bool) -> bool:
        """Whether what a reader saw in a topic is there after this."""
        return self.class_of(name) == "fsync" or (not cut and self.class_of(name) in ("disk", "memory"))

    def numbers(self, name: str, *, cut: bool) -> bool:
        """Whether a seq that was shown is never given to another record."""
        return self.class_of(name) == "disk" or self.keeps(name, cut=cut)

    def may_return(self, name: str, seq: int, row: Row, deletes: Sequence[Delete], *, cut: bool) -> bool:
        """Whether a record that no reader saw may appear below the head: a power cut lost its delete or its ack."""
        if self.class_of(name) == "fsync" or not (cut or self.was_cut):
            return False
        return name == "q" or any(delete.took(seq, row) for delete in deletes)

    # What is done.

    def delete(self, name: str, match: str) -> None:
        topic, deletes = self.log.topic(name), self.deletes[name]
        deletes.append(Delete(match, SEQ_MAX))
        topic.delete(match=match)
        deletes[-1] = Delete(match, topic.state().head_seq)

    def write(self, name: str, count: int = 1) -> list[str]:
        records = []
        for _ in range(count):
            self.number += 1
            records.append(f"{name}{self.number}")
        tags = [self.random.choice(TAGS) for _ in records]
        self.log.topic(name).append(records, tag=tags, node="n")
        return records

    def peek(self, name: str) -> None:
        """A reader looks at one topic."""
        rows, head, gaps = read_all(self.log, name)
        for seq, row in rows.items():
            known = self.seen[name].get(seq)
            hold(known in (None, row), f"{name}: seq {seq} was {known} and is {row}")
            back = self.may_return(name, seq, row, self.deletes[name], cut=False)
            hold(known or back or seq > self.heads[name], f"{name}: seq {seq} {row} came below {self.heads[name]}")
            hold(seq not in self.gone[name], f"{name}: seq {seq} was gone and is back")
            hold(row[0] not in self.never[name], f"{name}: {row[0]} at seq {seq} must not be there")
            self.seen[name][seq] = row
        gone = self.seen[name].keys() - rows.keys()
        if name in LASTING[self.layout]:
            hold(
                gone <= self.gone[name], f"{name}: {sorted(gone - self.gone[name])} went away, nothing removes records"
            )
        self.gone[name] |= gone
        hold(covers(gaps, self.gaps[name]), f"{name}: the gaps were {self.gaps[name]} and are {gaps}")
        self.gaps[name] = gaps
        self.heads[name] = max(self.heads[name], head)

    def look(self) -> None:
        for name in self.topics:
            self.peek(name)
        for state in self.log.routers():
            self.passed[state.router] = state.forwarded_total
        routers = {state.router for state in self.log.routers()}
        hold(self.least <= routers <= self.most, f"routers are {routers}, not {self.least} to {self.most}")

    @contextmanager
    def wiring(self, *, more: Sequence[str] = (), less: Sequence[str] = ()) -> Iterator[None]:
        """While this lasts routers may be there or not; when it is over that is settled."""
        self.most |= set(more)
        self.least -= set(less)
        yield
        self.most -= set(less)
        self.least |= set(more)
        for name in (*more, *less):
            self.passed.pop(name, None)

    def make(self, router: str, source: str, target: str, **options: Any) -> None:
        fresh = router not in self.least
        with self.wiring(more=(router,) if fresh else ()):
            self.log.router(router, source, target, **options)

    def unmake(self, router: str) -> None:
        with self.wiring(less=(router,)):
            self.log.drop_router(router)

    def drop(self, name: str, **config: Any) -> None:
        """Drop a topic and make it again."""
        routers = [state.router for state in self.log.routers() if name in (state.source, state.dest)]
        self.peek(name)
        self.buried[name] |= self.gone[name]
        old = self.epochs[name]
        self.epochs[name] = {*old, 0}
        with self.wiring(less=routers):
            self.log.drop(name)
        self.seen[name], self.gone[name], self.heads[name], self.gaps[name] = {}, set(), 0, []
        self.deletes[name] = []
        self.epochs[name] = {0, -1}  # -1: any that was not there before
        if name == "d":
            self.group = 0
        made = self.log.topic(name, durability=self.class_of(name), **config)
        self.epochs[name] = {made.id}

    def restart(self, disk: SimDisk, *, cut: bool) -> None:
        self.disk = disk
        self.was_cut |= cut
        self.log = open_engine(disk, self.clock, self.shards)
        for name in self.topics:
            rows, head, gaps = read_all(self.log, name)
            if not self.numbers(name, cut=cut):
                self.forgotten[name] |= {row[0] for row in self.seen[name].values()} - {row[0] for row in rows.values()}
                self.seen[name], self.gone[name], self.heads[name] = dict(rows), set(), head
                self.gaps[name] = gaps
            elif not self.keeps(name, cut=cut):
                # What was lost is lost from here on, and what was deleted may be there again.
                self.gone[name] = self.seen[name].keys() - rows.keys()
            if cut and self.class_of("s") != "fsync":
                self.never = {name: set() for name in self.topics}  # deletes may have been lost
        for state in self.log.routers():
            if not self.keeps(state.dest, cut=cut):
                self.passed[state.router] = state.forwarded_total
        if "d" in self.topics and cut and self.class_of("d") != "fsync":
            self.group = 0
        disk.on_op = self._watch

    # Crash states.

    def spell(self, letters: Sequence[Letter]) -> None:
        """Run a history and judge its instants: those that `step` draws, and the end of each letter."""
        self.look()
        self.disk.on_op = self._watch
        for letter in letters:
            letter(self)
            self.disk.on_op = None
            if self.disk.trace is not None:
                self.take(self.disk.ops + 1)
            self.look()
            self._judge_taken()
            self.disk.on_op = self._watch
        self.disk.on_op = None
        self.take(self.disk.ops + 1)  # a reader has seen everything
        self._judge_taken()

    def _judge_taken(self) -> None:
        for told in self._taken:
            self.judge(told)
        self._taken.clear()

    def _watch(self, op: int) -> None:
        if self.step == 1 or self.random.randrange(self.step) == 0:
            self.take(op)

    def take(self, op: int) -> None:
        """Put aside what a power cut and what a kill could leave now."""
        promises = self._promised()
        if promises != self._promises:
            self._promises, self._version = promises, self._version + 1
        words = f"before op {op}"
        for image in self.disk.images(random=self.random, limit=self.images):
            self._take(Told(f"{words}, {image.label}", image.disk, True, promises, self._version))
        self._take(Told(f"{words}, a kill", self.disk.reboot(), False, promises, self._version))

    def _promised(self) -> Promises:
        return Promises(
            {name: dict(rows) for name, rows in self.seen.items()},
            dict(self.heads),
            dict(self.gaps),
            {name: set(ids) for name, ids in self.epochs.items()},
            {name: set(datas) for name, datas in self.never.items()},
            {name: list(deletes) for name, deletes in self.deletes.items()},
            self.passed.copy(),
            set(self.least),
            set(self.most),
            self.group,
            self.clock.now_us(),
        )

    def _take(self, told: Told) -> None:
        if self._is_new(told.disk, told):
            self._taken.append(told)

    def _is_new(self, disk: SimDisk, told: Told) -> bool:
        """Whether no state with these bytes was judged for the same kind of crash and by the same promises. After an
        ack the same bytes may be wrong, and a kill keeps what a power cut may lose."""
        key = disk.digest(), told.cut, told.version
        if key in self._known:
            return False
        self._known.add(key)
        return True

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
        told = told._replace(cut=True)
        for image in taken:
            if self._is_new(image, told):
                self._judged(image, told, going_on=False)

    def _judged(self, disk: SimDisk, told: Told, *, going_on: bool) -> dict[str, Rows]:
        self.states += 1
        log = open_engine(disk, self.clock, self.shards)
        hold(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        routers = {state.router for state in log.routers()}
        hold(
            told.promises.least <= routers <= told.promises.most,
            f"routers are {routers}, not {told.promises.least} to {told.promises.most}",
        )
        found = {name: read_all(log, name) for name in self.topics}
        for name in self.topics:
            topic = log.find(name)
            same = (0 if topic is None else topic.id) in told.promises.epochs[name]
            new = topic is None or topic.id not in told.promises.epochs[name]
            hold(
                same or -1 in told.promises.epochs[name],
                f"{name}: its id is {topic and topic.id}, not {told.promises.epochs[name]}",
            )
            if not new:
                self._seen(name, found[name], told)
            self._accounted(name, found[name])
        self._copies(log, {name: seen.rows for name, seen in found.items()}, told)
        self._extras(log, found, told)
        if going_on:
            self._go_on(log, told)
        return {name: seen.rows for name, seen in found.items()}

    def _seen(self, name: str, found: Seen, told: Told) -> None:
        """What a reader saw is there, where it was."""
        if self.numbers(name, cut=told.cut):
            for seq, row in found.rows.items():
                known = told.promises.seen[name].get(seq)
                hold(known in (None, row), f"{name}: seq {seq} was seen as {known} and is {row}")
                back = self.may_return(name, seq, row, told.promises.deletes[name], cut=told.cut)
                hold(
                    known or back or seq > told.promises.heads[name],
                    f"{name}: {row} came at {seq}, below {told.promises.heads[name]}",
                )
        if self.numbers(name, cut=told.cut):
            before = told.promises.gaps[name]
            hold(covers(found.gaps, before), f"{name}: the gaps were {before} and are {found.gaps}")
        if self.keeps(name, cut=told.cut):
            # What this letter took away may be there or not.
            gone = self.gone[name] if told.promises.epochs[name] == self.epochs[name] else self.buried[name]
            lost = told.promises.seen[name].keys() - gone - found.rows.keys()
            hold(not lost, f"{name}: seqs {sorted(lost)} are lost, there are {sorted(found.rows)}")
        for seq, row in found.rows.items():
            deletes_last = not told.cut or self.class_of("s") == "fsync"
            hold(
                row[0] not in told.promises.never[name] or not deletes_last,
                f"{name}: {row[0]} at {seq} must not be there",
            )

    def _accounted(self, name: str, found: Seen) -> None:
        """Nothing removes records of this topic and it reserves no seqs: each seq is a record, or in a gap."""
        if name in LASTING[self.layout] and self.class_of(name) == "fsync":
            lost = {seq for lo, hi in found.gaps for seq in range(lo, hi + 1)}
            missing = set(range(1, found.head + 1)) - found.rows.keys() - lost
            hold(not missing, f"{name}: seqs {sorted(missing)} are neither records nor in a gap of {found.gaps}")

    def _copies(self, log: Engine, rows: dict[str, Rows], told: Told) -> None:
        """Nothing is doubled, nothing is left out, and the order is the source's."""
        edges = {(state.source, state.dest) for state in log.routers()}
        hold(len(rows.get("f", ())) <= 2, f"f: it keeps two and refuses the next, there are {rows.get('f')}")
        for source, name in edges if self.layout != "cycle" else ():
            copies = [row[0] for row in rows[name].values() if not row[0].startswith(name)]
            for row in rows[name].values() if name in "eq" else ():
                mine = row[0].startswith(name) or (row[1] or "").startswith("x:")
                hold(mine, f"{name}: {row} was passed on, the filter is x:*")
            # A source that lost its end gets those records again from its own source: they are other records.
            cut = told.cut or self.was_cut
            if self.class_of(source) == "fsync" or source in SOURCES or not cut:
                for data, count in Counter(copies).items():
                    hold(count <= 2, f"{name}: {data} is there {count} times")
                for letter in SOURCES:
                    numbers = [int(data[1:]) for data in copies if data.startswith(letter)]
                    hold(numbers == sorted(numbers), f"{name}: copies are out of order: {copies}")
            if name == "f" or self.class_of(name) == "ephemeral" or self.layout == "wires":
                continue
            had = {self.seen[name][seq][0] for seq in self.gone[name]} | set(copies) | self.forgotten[name]
            for seq, row in rows[source].items():
                data, tag, _ = row
                due = name not in "eq" or (tag or "").startswith("x:")
                known = told.promises.seen[source].get(seq) == row and data not in self.never[name]
                if due and known and data not in had and not self._capped(log, name, data, copies, told):
                    raise Wrong(f"{name}: {data}, seq {seq} of {source}, was not passed on: {copies}")
        for state in log.routers():
            if self.keeps(state.dest, cut=told.cut) and state.router != "twice":
                total = told.promises.passed[state.router]
                hold(state.forwarded_total >= total, f"{state}: it had passed on {total}")

    def _capped(self, log: Engine, name: str, data: str, copies: list[str], told: Told) -> bool:
        """Whether a copy went by the cap of d: a power cut took the group of an unsynced class, so nothing holds it."""
        if self.layout != "jobs" or name != "d" or self.keeps(name, cut=told.cut or self.was_cut):
            return False
        later = [copy for copy in copies if int(copy[1:]) > int(data[1:])]
        return not log.topic("d").groups() and len(later) >= JOBS_CAP

    def _extras(self, log: Engine, found: dict[str, Seen], told: Told) -> None:
        if self.layout == "cycle":
            most = (self.number + 20) * 2 * 9 * 2
            for name, seen in found.items():
                hold(seen.head <= most, f"{name}: its head is {seen.head} after {self.number} writes")
            if self.class_of("a") == self.class_of("b") == "fsync" or not (told.cut or self.was_cut):
                self._rounds({name: seen.rows for name, seen in found.items()})
        if self.layout == "jobs":
            counts = log.queue("q").counts()
            jobs = len(found["q"].rows)
            hold(counts.ready + counts.in_flight == jobs, f"q: {counts} of {jobs} jobs")
        if self.layout == "jobs" and told.promises.group and self.keeps("d", cut=told.cut):
            group = log.topic("d").group("g")
            hold(
                group.position >= told.promises.group,
                f"d: the group stands at {group.position}, it was at {told.promises.group}",
            )
            fresh = consume(group)
            missed = found["d"].rows.keys() - told.promises.seen["d"].keys() - fresh
            hold(not missed, f"d: the group never gets {sorted(missed)}")

    def _rounds(self, rows: dict[str, Rows]) -> None:
        """A record is passed on HOPS times at most: half of its copies are in each topic of the cycle."""
        if "ephemeral" in (self.class_of("a"), self.class_of("b")):
            return  # a topic that begins again forgets where its records came from
        for name, each in rows.items():
            for data, count in Counter(row[0] for row in each.values()).items():
                most = HOPS // 2 + data.startswith(name)
                hold(count <= most or data.endswith("0"), f"{name}: {data} is there {count} times, at most {most}")

    def _go_on(self, log: Engine, told: Told) -> None:
        """The engine is of use again, and a third start finds the same."""
        for name in self.topics:
            topic = log.find(name)
            if topic is None or topic.config.discard == "reject":
                continue
            seq = topic.append(f"{name}0", tag="x:9").first_seq
            if topic.id in told.promises.epochs[name] and self.numbers(name, cut=told.cut):
                top = max(told.promises.heads[name], max([*told.promises.seen[name], 0]))
                hold(seq > top, f"{name}: the next seq is {seq}, {top} was seen")
        edges = {(state.source, state.dest) for state in log.routers()}
        after = {name: read(log, name) for name in self.topics}
        for source, name in edges:
            if name not in "ef":
                datas = [row[0] for row in after[name].values()]
                hold(f"{source}0" in datas or self.layout == "cycle", f"{source}0 was not passed on: {datas}")
        again = open_engine(disk_of(log).reboot(), self.clock, self.shards)
        lasting = [name for name in self.topics if self.class_of(name) != "ephemeral"]
        if self.layout == "cycle" and self.class_of("a") == "ephemeral":
            lasting = []  # a begins again, and b gets what it gets
        for name in lasting:
            hold(read(again, name) == after[name], f"{name}: a kill changed {after[name]} to {read(again, name)}")
        log.close()
        again = open_engine(disk_of(log), self.clock, self.shards, read_only=True)
        for name in lasting:
            hold(read(again, name) == after[name], f"{name}: a close changed {after[name]} to {read(again, name)}")
        again.close()


def disk_of(log: Engine) -> SimDisk:
    disk = log._shared.disk
    assert isinstance(disk, SimDisk), "opened on one"
    return disk


# What there is at the beginning.


def set_up_main(bench: Bench) -> None:
    source, target = bench.classes
    bench.log.topic("s", durability=source, cap_records=KEEPS)
    for name in "de":
        bench.log.topic(name, durability=target)
    bench.log.topic("f", durability=target, cap_records=2, discard="reject")
    bench.log.router("plain", "s", "d")
    bench.log.router("tagged", "d", "e", filter="x:*", preserve_node=False)
    bench.log.router("full", "s", "f")


def set_up_wires(bench: Bench) -> None:
    source, target = bench.classes
    for name in "st":
        bench.log.topic(name, durability=source, cap_records=KEEPS)
    for name in "dl":
        bench.log.topic(name, durability=target)
    bench.log.router("plain", "s", "d")


def set_up_jobs(bench: Bench) -> None:
    source, target = bench.classes
    bench.log.topic("s", durability=source, cap_records=KEEPS)
    bench.log.topic("t", durability=source, ttl_ms=TTL_MS)
    bench.log.topic("d", durability=target, cap_records=JOBS_CAP)
    bench.log.topic("x", durability=target)
    bench.log.queue("q", durability=target)
    bench.log.router("held", "s", "d")
    bench.log.router("queued", "s", "q", filter="x:*")
    bench.log.router("aged", "t", "x")
    bench.log.topic("d").group("g").begin("earliest", hold_bytes=1 << 20)


def set_up_cycle(bench: Bench) -> None:
    bench.log.topic("a", durability=bench.classes[0], cap_records=2)
    bench.log.topic("b", durability=bench.classes[1])
    bench.log.router("ab", "a", "b")
    bench.log.router("ba", "b", "a", allow_cycle=True)


_SETUPS: dict[str, Callable[[Bench], None]] = {
    "main": set_up_main,
    "wires": set_up_wires,
    "jobs": set_up_jobs,
    "cycle": set_up_cycle,
}
Letter = Callable[[Bench], None]


# Letters of main.


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
    bench.delete("s", "x:*")
    bench.write("s")


def delete_dest(bench: Bench) -> None:
    topic = bench.log.topic("d")
    topic.delete(before_seq=max(topic.state().head_seq - 1, 0))
    bench.write("s")


def make_room(bench: Bench) -> None:
    """What does not fit waits; some of it is deleted meanwhile and must never be passed on."""
    written = bench.write("s", 5)
    bench.peek("f")
    kept = {row[0] for row in bench.seen["f"].values()}
    rows = read(bench.log, "s")
    late = {data for data, tag, _ in rows.values() if tag == "y" and data in written and data not in kept}
    bench.delete("s", "y")
    bench.never["f"] |= late
    topic = bench.log.topic("f")
    topic.delete(before_seq=topic.state().head_seq + 1)


def second(bench: Bench) -> None:
    bench.make("twice", "s", "d", filter="x:*", preserve_tag=False)
    bench.write("s", 2)


def change(bench: Bench) -> None:
    bench.write("s")
    bench.make("plain", "s", "d", preserve_node=bench.number % 2 == 0)
    bench.write("s")


def end(bench: Bench) -> None:
    bench.write("s")
    bench.unmake("twice")
    bench.write("s")


def tighten(bench: Bench) -> None:
    bench.write("s")
    bench.peek("d")
    bench.log.topic("d", cap_records=4)
    bench.log.topic("d", cap_records=0)


def harden_source(bench: Bench) -> None:
    """The class of the source changes twice."""
    bench.write("s", 2)
    bench.peek("d")
    bench.log.topic("s", durability="fsync" if bench.classes[0] != "fsync" else "disk")
    bench.write("s")
    bench.peek("d")
    bench.log.topic("s", durability=bench.classes[0])
    bench.write("s")


# Letters of wires.


def feed(bench: Bench) -> None:
    bench.write("s", 2)
    bench.write("t", 2)
    bench.peek("d")
    bench.write("d")
    bench.write("l")


def _source_of_d(bench: Bench) -> str | None:
    return next((state.source for state in bench.log.routers() if state.dest == "d"), None)


def exchange(bench: Bench) -> None:
    """The target gets another source. What the old one has from now on, and the new one had before, stays out."""
    before = _source_of_d(bench)
    new = "t" if before == "s" else "s"
    late = bench.write(new)
    if before is not None:
        bench.write(before)
        bench.unmake("plain")
        bench.never["d"] |= set(bench.write(before, 2))
    bench.make("plain", new, "d")
    bench.never["d"] |= set(late) - {row[0] for row in bench.seen["d"].values()}
    bench.write(new, 2)


def unwire(bench: Bench) -> None:
    before = _source_of_d(bench)
    if before is not None:
        bench.write(before)
        bench.unmake("plain")
        bench.never["d"] |= set(bench.write(before))


def new_source(bench: Bench) -> None:
    """A topic is dropped and made again: as a source it is another one."""
    name = _source_of_d(bench) or "s"
    bench.write(name, 2)
    bench.drop(name, cap_records=KEEPS)
    bench.never["d"] |= set(bench.write(name, 2))
    bench.make("plain", name, "d")
    bench.write(name)


def new_target(bench: Bench) -> None:
    name = _source_of_d(bench) or "s"
    bench.write(name, 2)
    bench.drop("d")
    bench.never["d"] |= set(bench.write(name))
    bench.make("plain", name, "d")
    bench.write(name)
    bench.write("d")


def gone_target(bench: Bench) -> None:
    """Dropped for good: its source is free."""
    name = _source_of_d(bench) or "s"
    bench.write(name, 2)
    bench.drop("d")
    bench.never["d"] |= set(bench.write(name))


def late(bench: Bench) -> None:
    """A router that is made after other records, and maybe after reserved holes; or goes."""
    bench.write("l")
    if "late" in bench.least:
        bench.write("s")
        bench.unmake("late")
        bench.never["l"] |= set(bench.write("s"))
        return
    before = set(bench.write("s"))
    bench.make("late", "s", "l")
    bench.never["l"] |= before
    bench.write("s", 2)
    bench.peek("l")


def trim_wired(bench: Bench) -> None:
    """Lost at the source between direct writes of its targets."""
    bench.write("d", 2)
    bench.peek("d")
    for name in "st":
        bench.write(name, KEEPS + 2)
    bench.peek("d")
    bench.write("d")


# Letters of jobs.


def work(bench: Bench) -> None:
    """Jobs are put, brought, claimed, acked."""
    queue = bench.log.queue("q")
    bench.number += 1
    queue.put(f"q{bench.number}")
    bench.write("s", 2)
    jobs = queue.claim("n", 2)
    if jobs:
        queue.ack("n", jobs[:1])
        queue.nack("n", jobs[1:])


def group(bench: Bench) -> None:
    bench.write("s", 2)
    bench.write("d")
    bench.peek("d")
    seq = bench.heads["d"]
    bench.log.topic("d").group("g").commit(seq)
    bench.group = seq
    bench.write("s")


def trim_jobs(bench: Bench) -> None:
    """Records are lost at the source: direct writes, jobs and what the group holds stay."""
    bench.write("d", 2)
    bench.number += 1
    bench.log.queue("q").put(f"q{bench.number}")
    bench.peek("d")
    bench.write("s", KEEPS + 3)


def expire(bench: Bench) -> None:
    """Records that are too old before anything looks at them, and some that are not."""
    late = bench.write("t", 2)
    bench.clock.tick(2 * TTL_MS)
    bench.never["x"] |= set(late)
    bench.peek("x")  # before anything looks at the source
    bench.write("t")
    bench.peek("x")
    bench.write("x")


# Letters of cycle.


def around(bench: Bench) -> None:
    bench.write("a")
    bench.write("b")
    bench.peek("a")


def flood(bench: Bench) -> None:
    bench.write("a", 4)
    bench.write("b", 2)
    bench.peek("b")


def drop_around(bench: Bench) -> None:
    bench.write("a")
    bench.delete("b", "x:*")
    bench.write("b", 2)


def wait_around(bench: Bench) -> None:
    """A record that has gone around once waits for room over checkpoints and a kill: how far it came must be known."""
    before = bench.log.topic("b").config.discard
    count = len(read(bench.log, "b"))
    bench.log.topic("b", cap_records=count + 1, discard="reject")
    bench.write("a")
    bench.peek("a")
    for _ in range(2):  # the second one lets go of what the first has covered
        bench.log.checkpoint()
    bench.restart(bench.disk.reboot(), cut=False)
    bench.peek("b")
    bench.log.topic("b", cap_records=0, discard=before)
    bench.peek("b")


def open_cycle(bench: Bench) -> None:
    bench.write("b")
    if "ba" in bench.least:
        bench.unmake("ba")
    else:
        bench.make("ba", "b", "a", allow_cycle=True)
    bench.write("a", 3)


# Letters of all.


def checkpoint(bench: Bench) -> None:
    bench.write(bench.topics[0])
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


ALPHABETS: dict[str, tuple[Letter, ...]] = {
    "main": (
        *(one, batch, slow, burst, direct, private, onward, delete_source, delete_dest, make_room),
        *(second, change, end, tighten, harden_source, checkpoint, tick),
    ),
    "wires": (feed, exchange, unwire, new_source, new_target, gone_target, late, trim_wired, checkpoint, tick),
    "jobs": (work, group, trim_jobs, expire, checkpoint, tick),
    "cycle": (around, flood, drop_around, wait_around, open_cycle, checkpoint, tick),
}
RESTARTS: tuple[Letter, ...] = (kill, power, reopen)
