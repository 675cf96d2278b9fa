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
from tidelog.database import engine_of
from tidelog.engine import Engine
from tidelog.engine.groups import Group
from tidelog.errors import Error
from tidelog.formats.frame import SEQ_MAX
from tidelog.testing import ManualClock, SimDisk

PATH = "data"
TINY: dict[str, Any] = {"wal_file_bytes": 4096, "segment_events_max": 4, "segment_bytes_max": 1024, "head_reserve": 4}
TAGS = ("x:1", "x:2", "y", None)
CAP_RECORDS = 6  # records of s
JOBS_CAP = 4  # records of d in jobs that no group holds
TTL_MS = 1000
MAX_HOPS = 8  # over so many routers a record is passed on

Row = tuple[Any, str | None, str | None]
Rows = dict[int, Row]
LAYOUTS: dict[str, str] = {"main": "sdef", "wires": "stdl", "jobs": "stdqx", "cycle": "ab"}
SOURCE_TOPICS = "st"
LASTING_TOPICS = {"main": "", "wires": "dl", "jobs": "x", "cycle": ""}  # topics that lose nothing by themselves
Gaps = list[tuple[int, int]]


class RuleViolated(Exception):
    """A rule does not hold."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise RuleViolated(message)


def open_engine(disk: SimDisk, clock: ManualClock, shards: int, **more: Any) -> Engine:
    return engine_of(tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=shards, **TINY, **more))


class TopicView(NamedTuple):
    """What a reader got, from the first record to the head."""

    rows: Rows
    head: int
    gaps: Gaps


def read_all(log: Engine, name: str) -> TopicView:
    topic, found, gaps, at = log.find(name), dict[int, Row](), Gaps(), 0
    while topic is not None:
        page, began = topic.read(at), at
        if page.gap is not None:
            require(page.gap.gap_from == at + 1, f"{name}: the gap {page.gap} was met at {at}")
            gaps.append((page.gap.gap_from, page.gap.gap_to))
            at = page.gap.gap_to
        for record in page.records:
            require(record.seq > at, f"{name}: seq {record.seq} after {at}")
            at = record.seq
            found[at] = (record.data, record.tag, record.node)
        require(page.next_from_seq >= at, f"{name}: a page ends at {page.next_from_seq}, it had {at}")
        at = max(at, page.next_from_seq)
        if page.caught_up:
            break
        require(at > began, f"{name}: a reader is stuck at {at}")
    return TopicView(found, at, gaps)


def gaps_cover(gaps: Gaps, reported: Gaps) -> bool:
    """Whether a reader is told again of what it was told of before. A gap begins at the reader's cursor, so where it
    begins says nothing: a delete that a power cut took back puts a record there."""
    return all(any(lo <= last <= hi for lo, hi in gaps) for _, last in reported)


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
        require(page.next_from_seq > began, f"the group is stuck at {began}: {page}")


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


class CrashState(NamedTuple):
    """A crash state, and what was promised by then."""

    label: str
    disk: SimDisk
    cut: bool  # power, not only the process
    promises: Promises
    version: int  # of the promises: another one whenever they change


class RouterHarness:
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
        self._taken: list[CrashState] = []
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

    def read_topic(self, name: str) -> None:
        """A reader looks at one topic."""
        rows, head, gaps = read_all(self.log, name)
        for seq, row in rows.items():
            known = self.seen[name].get(seq)
            require(known in (None, row), f"{name}: seq {seq} was {known} and is {row}")
            back = self.may_return(name, seq, row, self.deletes[name], cut=False)
            require(known or back or seq > self.heads[name], f"{name}: seq {seq} {row} came below {self.heads[name]}")
            require(seq not in self.gone[name], f"{name}: seq {seq} was gone and is back")
            require(row[0] not in self.never[name], f"{name}: {row[0]} at seq {seq} must not be there")
            self.seen[name][seq] = row
        gone = self.seen[name].keys() - rows.keys()
        if name in LASTING_TOPICS[self.layout]:
            require(
                gone <= self.gone[name], f"{name}: {sorted(gone - self.gone[name])} went away, nothing removes records"
            )
        self.gone[name] |= gone
        require(gaps_cover(gaps, self.gaps[name]), f"{name}: the gaps were {self.gaps[name]} and are {gaps}")
        self.gaps[name] = gaps
        self.heads[name] = max(self.heads[name], head)

    def read_all_topics(self) -> None:
        for name in self.topics:
            self.read_topic(name)
        for state in self.log.routers():
            self.passed[state.router] = state.forwarded_total
        routers = {state.router for state in self.log.routers()}
        require(self.least <= routers <= self.most, f"routers are {routers}, not {self.least} to {self.most}")

    @contextmanager
    def changing_routers(self, *, more: Sequence[str] = (), less: Sequence[str] = ()) -> Iterator[None]:
        """While this lasts routers may be there or not; when it is over that is settled."""
        self.most |= set(more)
        self.least -= set(less)
        yield
        self.most -= set(less)
        self.least |= set(more)
        for name in (*more, *less):
            self.passed.pop(name, None)

    def create_router(self, router: str, source: str, target: str, **options: Any) -> None:
        fresh = router not in self.least
        with self.changing_routers(more=(router,) if fresh else ()):
            self.log.router(router, source, target, **options)

    def delete_router(self, router: str) -> None:
        with self.changing_routers(less=(router,)):
            self.log.drop_router(router)

    def drop(self, name: str, **config: Any) -> None:
        """Drop a topic and make it again."""
        routers = [state.router for state in self.log.routers() if name in (state.source, state.dest)]
        self.read_topic(name)
        self.buried[name] |= self.gone[name]
        old = self.epochs[name]
        self.epochs[name] = {*old, 0}
        with self.changing_routers(less=routers):
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

    def run_history(self, operations: Sequence[Operation]) -> None:
        """Run a history and judge its instants: those that `step` draws, and the end of each letter."""
        self.read_all_topics()
        self.disk.on_op = self._watch
        for letter in operations:
            letter(self)
            self.disk.on_op = None
            if self.disk.trace is not None:
                self.take(self.disk.op_count + 1)
            self.read_all_topics()
            self._judge_taken()
            self.disk.on_op = self._watch
        self.disk.on_op = None
        self.take(self.disk.op_count + 1)  # a reader has seen everything
        self._judge_taken()

    def _judge_taken(self) -> None:
        for told in self._taken:
            self.check(told)
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
            self._take(CrashState(f"{words}, {image.label}", image.disk, True, promises, self._version))
        self._take(CrashState(f"{words}, a kill", self.disk.reboot(), False, promises, self._version))

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

    def _take(self, told: CrashState) -> None:
        if self._is_new(told.disk, told):
            self._taken.append(told)

    def _is_new(self, disk: SimDisk, told: CrashState) -> bool:
        """Whether no state with these bytes was judged for the same kind of crash and by the same promises. After an
        ack the same bytes may be wrong, and a kill keeps what a power cut may lose."""
        key = disk.digest(), told.cut, told.version
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def check(self, expected: CrashState) -> None:
        self.judged += 1
        try:
            again = expected.disk.reboot()
            if self.judged % (3 * self.every) == 0:
                self._cut_again(expected)
            first = self._check_disk(expected.disk, expected, going_on=False)
            if self.judged % self.every == 0:
                second = self._check_disk(again, expected, going_on=True)
                require(first == second, f"two recoveries differ: {first} {second}")
        except RuleViolated as wrong:
            raise RuleViolated(f"{expected.label}: {wrong}") from None
        except Error as error:
            where = [
                f"{at.filename.rpartition('/')[2]}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)
            ]
            raise RuleViolated(
                f"{expected.label}: {type(error).__name__} in {' '.join(where[-5:])}: {error}"
            ) from error

    def _cut_again(self, expected: CrashState) -> None:
        """The power fails once more inside the recovery."""
        taken: list[SimDisk] = []
        disk = expected.disk.reboot()
        disk.on_op = lambda _: taken.extend(image.disk for image in disk.images(random=self.random, limit=2))
        open_engine(disk, self.clock, self.shards)
        disk.on_op = None
        expected = expected._replace(cut=True)
        for image in taken:
            if self._is_new(image, expected):
                self._check_disk(image, expected, going_on=False)

    def _check_disk(self, disk: SimDisk, expected: CrashState, *, going_on: bool) -> dict[str, Rows]:
        self.states += 1
        log = open_engine(disk, self.clock, self.shards)
        require(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        routers = {state.router for state in log.routers()}
        require(
            expected.promises.least <= routers <= expected.promises.most,
            f"routers are {routers}, not {expected.promises.least} to {expected.promises.most}",
        )
        found = {name: read_all(log, name) for name in self.topics}
        for name in self.topics:
            topic = log.find(name)
            same = (0 if topic is None else topic.id) in expected.promises.epochs[name]
            new = topic is None or topic.id not in expected.promises.epochs[name]
            require(
                same or -1 in expected.promises.epochs[name],
                f"{name}: its id is {topic and topic.id}, not {expected.promises.epochs[name]}",
            )
            if not new:
                self._check_seen_rows(name, found[name], expected)
            self._check_no_missing_seqs(name, found[name])
        self._check_copies(log, {name: seen.rows for name, seen in found.items()}, expected)
        self._check_extras(log, found, expected)
        if going_on:
            self._check_usable(log, expected)
        return {name: seen.rows for name, seen in found.items()}

    def _check_seen_rows(self, name: str, found: TopicView, expected: CrashState) -> None:
        """What a reader saw is there, where it was."""
        if self.numbers(name, cut=expected.cut):
            for seq, row in found.rows.items():
                known = expected.promises.seen[name].get(seq)
                require(known in (None, row), f"{name}: seq {seq} was seen as {known} and is {row}")
                back = self.may_return(name, seq, row, expected.promises.deletes[name], cut=expected.cut)
                require(
                    known or back or seq > expected.promises.heads[name],
                    f"{name}: {row} came at {seq}, below {expected.promises.heads[name]}",
                )
        if self.numbers(name, cut=expected.cut):
            before = expected.promises.gaps[name]
            require(gaps_cover(found.gaps, before), f"{name}: the gaps were {before} and are {found.gaps}")
        if self.keeps(name, cut=expected.cut):
            # What this letter took away may be there or not.
            gone = self.gone[name] if expected.promises.epochs[name] == self.epochs[name] else self.buried[name]
            lost = expected.promises.seen[name].keys() - gone - found.rows.keys()
            require(not lost, f"{name}: seqs {sorted(lost)} are lost, there are {sorted(found.rows)}")
        for seq, row in found.rows.items():
            deletes_last = not expected.cut or self.class_of("s") == "fsync"
            require(
                row[0] not in expected.promises.never[name] or not deletes_last,
                f"{name}: {row[0]} at {seq} must not be there",
            )

    def _check_no_missing_seqs(self, name: str, found: TopicView) -> None:
        """Nothing removes records of this topic and it reserves no seqs: each seq is a record, or in a gap."""
        if name in LASTING_TOPICS[self.layout] and self.class_of(name) == "fsync":
            lost = {seq for lo, hi in found.gaps for seq in range(lo, hi + 1)}
            missing = set(range(1, found.head + 1)) - found.rows.keys() - lost
            require(not missing, f"{name}: seqs {sorted(missing)} are neither records nor in a gap of {found.gaps}")

    def _check_copies(self, log: Engine, rows: dict[str, Rows], expected: CrashState) -> None:
        """Nothing is doubled, nothing is left out, and the order is the source's."""
        edges = {(state.source, state.dest) for state in log.routers()}
        require(len(rows.get("f", ())) <= 2, f"f: it keeps two and refuses the next, there are {rows.get('f')}")
        for source, name in edges if self.layout != "cycle" else ():
            copies = [row[0] for row in rows[name].values() if not row[0].startswith(name)]
            for row in rows[name].values() if name in "eq" else ():
                mine = row[0].startswith(name) or (row[1] or "").startswith("x:")
                require(mine, f"{name}: {row} was passed on, the filter is x:*")
            # A source that lost its end gets those records again from its own source: they are other records.
            cut = expected.cut or self.was_cut
            if self.class_of(source) == "fsync" or source in SOURCE_TOPICS or not cut:
                for data, count in Counter(copies).items():
                    require(count <= 2, f"{name}: {data} is there {count} times")
                for letter in SOURCE_TOPICS:
                    numbers = [int(data[1:]) for data in copies if data.startswith(letter)]
                    require(numbers == sorted(numbers), f"{name}: copies are out of order: {copies}")
            if name == "f" or self.class_of(name) == "ephemeral" or self.layout == "wires":
                continue
            had = {self.seen[name][seq][0] for seq in self.gone[name]} | set(copies) | self.forgotten[name]
            for seq, row in rows[source].items():
                data, tag, _ = row
                due = name not in "eq" or (tag or "").startswith("x:")
                known = expected.promises.seen[source].get(seq) == row and data not in self.never[name]
                if due and known and data not in had and not self._capped(log, name, data, copies, expected):
                    raise RuleViolated(f"{name}: {data}, seq {seq} of {source}, was not passed on: {copies}")
        for state in log.routers():
            if self.keeps(state.dest, cut=expected.cut) and state.router != "twice":
                total = expected.promises.passed[state.router]
                require(state.forwarded_total >= total, f"{state}: it had passed on {total}")

    def _capped(self, log: Engine, name: str, data: str, copies: list[str], told: CrashState) -> bool:
        """Whether a copy went by the cap of d: a power cut took the group of an unsynced class, so nothing holds it."""
        if self.layout != "jobs" or name != "d" or self.keeps(name, cut=told.cut or self.was_cut):
            return False
        later = [copy for copy in copies if int(copy[1:]) > int(data[1:])]
        return not log.topic("d").groups() and len(later) >= JOBS_CAP

    def _check_extras(self, log: Engine, found: dict[str, TopicView], expected: CrashState) -> None:
        if self.layout == "cycle":
            most = (self.number + 20) * 2 * 9 * 2
            for name, seen in found.items():
                require(seen.head <= most, f"{name}: its head is {seen.head} after {self.number} writes")
            if self.class_of("a") == self.class_of("b") == "fsync" or not (expected.cut or self.was_cut):
                self._check_hops({name: seen.rows for name, seen in found.items()})
        if self.layout == "jobs":
            counts = log.queue("q").counts()
            jobs = len(found["q"].rows)
            require(counts.ready + counts.in_flight == jobs, f"q: {counts} of {jobs} jobs")
        if self.layout == "jobs" and expected.promises.group and self.keeps("d", cut=expected.cut):
            group = log.topic("d").group("g")
            require(
                group.position >= expected.promises.group,
                f"d: the group stands at {group.position}, it was at {expected.promises.group}",
            )
            fresh = consume(group)
            missed = found["d"].rows.keys() - expected.promises.seen["d"].keys() - fresh
            require(not missed, f"d: the group never gets {sorted(missed)}")

    def _check_hops(self, rows: dict[str, Rows]) -> None:
        """A record is passed on HOPS times at most: half of its copies are in each topic of the cycle."""
        if "ephemeral" in (self.class_of("a"), self.class_of("b")):
            return  # a topic that begins again forgets where its records came from
        for name, each in rows.items():
            for data, count in Counter(row[0] for row in each.values()).items():
                most = MAX_HOPS // 2 + data.startswith(name)
                require(count <= most or data.endswith("0"), f"{name}: {data} is there {count} times, at most {most}")

    def _check_usable(self, log: Engine, expected: CrashState) -> None:
        """The engine is of use again, and a third start finds the same."""
        for name in self.topics:
            topic = log.find(name)
            if topic is None or topic.config.discard == "reject":
                continue
            seq = topic.append(f"{name}0", tag="x:9").first_seq
            if topic.id in expected.promises.epochs[name] and self.numbers(name, cut=expected.cut):
                top = max(expected.promises.heads[name], max([*expected.promises.seen[name], 0]))
                require(seq > top, f"{name}: the next seq is {seq}, {top} was seen")
        edges = {(state.source, state.dest) for state in log.routers()}
        after = {name: read(log, name) for name in self.topics}
        for source, name in edges:
            if name not in "ef":
                datas = [row[0] for row in after[name].values()]
                require(f"{source}0" in datas or self.layout == "cycle", f"{source}0 was not passed on: {datas}")
        again = open_engine(disk_of(log).reboot(), self.clock, self.shards)
        lasting = [name for name in self.topics if self.class_of(name) != "ephemeral"]
        if self.layout == "cycle" and self.class_of("a") == "ephemeral":
            lasting = []  # a begins again, and b gets what it gets
        for name in lasting:
            require(read(again, name) == after[name], f"{name}: a kill changed {after[name]} to {read(again, name)}")
        log.close()
        again = open_engine(disk_of(log), self.clock, self.shards, read_only=True)
        for name in lasting:
            require(read(again, name) == after[name], f"{name}: a close changed {after[name]} to {read(again, name)}")
        again.close()


def disk_of(log: Engine) -> SimDisk:
    disk = log._context.disk
    assert isinstance(disk, SimDisk), "opened on one"
    return disk


# What there is at the beginning.


def set_up_main(harness: RouterHarness) -> None:
    source, target = harness.classes
    harness.log.topic("s", durability=source, cap_records=CAP_RECORDS)
    for name in "de":
        harness.log.topic(name, durability=target)
    harness.log.topic("f", durability=target, cap_records=2, discard="reject")
    harness.log.router("plain", "s", "d")
    harness.log.router("tagged", "d", "e", filter="x:*", preserve_node=False)
    harness.log.router("full", "s", "f")


def set_up_wires(harness: RouterHarness) -> None:
    source, target = harness.classes
    for name in "st":
        harness.log.topic(name, durability=source, cap_records=CAP_RECORDS)
    for name in "dl":
        harness.log.topic(name, durability=target)
    harness.log.router("plain", "s", "d")


def set_up_jobs(harness: RouterHarness) -> None:
    source, target = harness.classes
    harness.log.topic("s", durability=source, cap_records=CAP_RECORDS)
    harness.log.topic("t", durability=source, ttl_ms=TTL_MS)
    harness.log.topic("d", durability=target, cap_records=JOBS_CAP)
    harness.log.topic("x", durability=target)
    harness.log.queue("q", durability=target)
    harness.log.router("held", "s", "d")
    harness.log.router("queued", "s", "q", filter="x:*")
    harness.log.router("aged", "t", "x")
    harness.log.topic("d").group("g").begin("earliest", hold_bytes=1 << 20)


def set_up_cycle(harness: RouterHarness) -> None:
    harness.log.topic("a", durability=harness.classes[0], cap_records=2)
    harness.log.topic("b", durability=harness.classes[1])
    harness.log.router("ab", "a", "b")
    harness.log.router("ba", "b", "a", allow_cycle=True)


_SETUPS: dict[str, Callable[[RouterHarness], None]] = {
    "main": set_up_main,
    "wires": set_up_wires,
    "jobs": set_up_jobs,
    "cycle": set_up_cycle,
}
Operation = Callable[[RouterHarness], None]


# Letters of main.


def one(harness: RouterHarness) -> None:
    harness.write("s")


def batch(harness: RouterHarness) -> None:
    harness.write("s", 3)


def slow(harness: RouterHarness) -> None:
    """Records that nobody looks for, and some that are looked for one by one."""
    harness.write("s", 2)
    harness.write("s")
    harness.read_topic("e")
    harness.write("s")


def burst(harness: RouterHarness) -> None:
    """More than the source keeps: some are lost before they could be passed on."""
    harness.write("s", CAP_RECORDS + 2)


def direct(harness: RouterHarness) -> None:
    """Between copies, and behind some that nobody has seen."""
    harness.write("s")
    harness.read_topic("d")
    harness.write("d")
    harness.write("d", 2)
    harness.write("s")


def private(harness: RouterHarness) -> None:
    """Direct writes that are seen at once, while there is nothing to pass on."""
    for _ in range(3):
        harness.write("d")
        harness.read_topic("d")
    harness.write("s")


def onward(harness: RouterHarness) -> None:
    harness.write("e")
    harness.write("s", 2)
    harness.read_topic("e")
    harness.write("e")


def delete_source(harness: RouterHarness) -> None:
    harness.delete("s", "x:*")
    harness.write("s")


def delete_dest(harness: RouterHarness) -> None:
    topic = harness.log.topic("d")
    topic.delete(before_seq=max(topic.state().head_seq - 1, 0))
    harness.write("s")


def free_space(harness: RouterHarness) -> None:
    """What does not fit waits; some of it is deleted meanwhile and must never be passed on."""
    written = harness.write("s", 5)
    harness.read_topic("f")
    kept = {row[0] for row in harness.seen["f"].values()}
    rows = read(harness.log, "s")
    late = {data for data, tag, _ in rows.values() if tag == "y" and data in written and data not in kept}
    harness.delete("s", "y")
    harness.never["f"] |= late
    topic = harness.log.topic("f")
    topic.delete(before_seq=topic.state().head_seq + 1)


def second(harness: RouterHarness) -> None:
    harness.create_router("twice", "s", "d", filter="x:*", preserve_tag=False)
    harness.write("s", 2)


def change(harness: RouterHarness) -> None:
    harness.write("s")
    harness.create_router("plain", "s", "d", preserve_node=harness.number % 2 == 0)
    harness.write("s")


def end(harness: RouterHarness) -> None:
    harness.write("s")
    harness.delete_router("twice")
    harness.write("s")


def tighten(harness: RouterHarness) -> None:
    harness.write("s")
    harness.read_topic("d")
    harness.log.topic("d", cap_records=4)
    harness.log.topic("d", cap_records=0)


def harden_source(harness: RouterHarness) -> None:
    """The class of the source changes twice."""
    harness.write("s", 2)
    harness.read_topic("d")
    harness.log.topic("s", durability="fsync" if harness.classes[0] != "fsync" else "disk")
    harness.write("s")
    harness.read_topic("d")
    harness.log.topic("s", durability=harness.classes[0])
    harness.write("s")


# Letters of wires.


def feed(harness: RouterHarness) -> None:
    harness.write("s", 2)
    harness.write("t", 2)
    harness.read_topic("d")
    harness.write("d")
    harness.write("l")


def _source_of_d(harness: RouterHarness) -> str | None:
    return next((state.source for state in harness.log.routers() if state.dest == "d"), None)


def exchange(harness: RouterHarness) -> None:
    """The target gets another source. What the old one has from now on, and the new one had before, stays out."""
    before = _source_of_d(harness)
    new = "t" if before == "s" else "s"
    late = harness.write(new)
    if before is not None:
        harness.write(before)
        harness.delete_router("plain")
        harness.never["d"] |= set(harness.write(before, 2))
    harness.create_router("plain", new, "d")
    harness.never["d"] |= set(late) - {row[0] for row in harness.seen["d"].values()}
    harness.write(new, 2)


def unwire(harness: RouterHarness) -> None:
    before = _source_of_d(harness)
    if before is not None:
        harness.write(before)
        harness.delete_router("plain")
        harness.never["d"] |= set(harness.write(before))


def new_source(harness: RouterHarness) -> None:
    """A topic is dropped and made again: as a source it is another one."""
    name = _source_of_d(harness) or "s"
    harness.write(name, 2)
    harness.drop(name, cap_records=CAP_RECORDS)
    harness.never["d"] |= set(harness.write(name, 2))
    harness.create_router("plain", name, "d")
    harness.write(name)


def new_target(harness: RouterHarness) -> None:
    name = _source_of_d(harness) or "s"
    harness.write(name, 2)
    harness.drop("d")
    harness.never["d"] |= set(harness.write(name))
    harness.create_router("plain", name, "d")
    harness.write(name)
    harness.write("d")


def gone_target(harness: RouterHarness) -> None:
    """Dropped for good: its source is free."""
    name = _source_of_d(harness) or "s"
    harness.write(name, 2)
    harness.drop("d")
    harness.never["d"] |= set(harness.write(name))


def late(harness: RouterHarness) -> None:
    """A router that is made after other records, and maybe after reserved holes; or goes."""
    harness.write("l")
    if "late" in harness.least:
        harness.write("s")
        harness.delete_router("late")
        harness.never["l"] |= set(harness.write("s"))
        return
    before = set(harness.write("s"))
    harness.create_router("late", "s", "l")
    harness.never["l"] |= before
    harness.write("s", 2)
    harness.read_topic("l")


def trim_wired(harness: RouterHarness) -> None:
    """Lost at the source between direct writes of its targets."""
    harness.write("d", 2)
    harness.read_topic("d")
    for name in "st":
        harness.write(name, CAP_RECORDS + 2)
    harness.read_topic("d")
    harness.write("d")


# Letters of jobs.


def work(harness: RouterHarness) -> None:
    """Jobs are put, brought, claimed, acked."""
    queue = harness.log.queue("q")
    harness.number += 1
    queue.put(f"q{harness.number}")
    harness.write("s", 2)
    jobs = queue.claim("n", 2)
    if jobs:
        queue.ack("n", jobs[:1])
        queue.nack("n", jobs[1:])


def group(harness: RouterHarness) -> None:
    harness.write("s", 2)
    harness.write("d")
    harness.read_topic("d")
    seq = harness.heads["d"]
    harness.log.topic("d").group("g").commit(seq)
    harness.group = seq
    harness.write("s")


def trim_jobs(harness: RouterHarness) -> None:
    """Records are lost at the source: direct writes, jobs and what the group holds stay."""
    harness.write("d", 2)
    harness.number += 1
    harness.log.queue("q").put(f"q{harness.number}")
    harness.read_topic("d")
    harness.write("s", CAP_RECORDS + 3)


def expire(harness: RouterHarness) -> None:
    """Records that are too old before anything looks at them, and some that are not."""
    late = harness.write("t", 2)
    harness.clock.tick(2 * TTL_MS)
    harness.never["x"] |= set(late)
    harness.read_topic("x")  # before anything looks at the source
    harness.write("t")
    harness.read_topic("x")
    harness.write("x")


# Letters of cycle.


def around(harness: RouterHarness) -> None:
    harness.write("a")
    harness.write("b")
    harness.read_topic("a")


def flood(harness: RouterHarness) -> None:
    harness.write("a", 4)
    harness.write("b", 2)
    harness.read_topic("b")


def drop_around(harness: RouterHarness) -> None:
    harness.write("a")
    harness.delete("b", "x:*")
    harness.write("b", 2)


def wait_around(harness: RouterHarness) -> None:
    """A record that has gone around once waits for room over checkpoints and a kill: how far it came must be known."""
    before = harness.log.topic("b").config.discard
    count = len(read(harness.log, "b"))
    harness.log.topic("b", cap_records=count + 1, discard="reject")
    harness.write("a")
    harness.read_topic("a")
    for _ in range(2):  # the second one lets go of what the first has covered
        harness.log.checkpoint()
    harness.restart(harness.disk.reboot(), cut=False)
    harness.read_topic("b")
    harness.log.topic("b", cap_records=0, discard=before)
    harness.read_topic("b")


def open_cycle(harness: RouterHarness) -> None:
    harness.write("b")
    if "ba" in harness.least:
        harness.delete_router("ba")
    else:
        harness.create_router("ba", "b", "a", allow_cycle=True)
    harness.write("a", 3)


# Letters of all.


def checkpoint(harness: RouterHarness) -> None:
    harness.write(harness.topics[0])
    harness.log.checkpoint()


def tick(harness: RouterHarness) -> None:
    harness.log.tick()


def kill(harness: RouterHarness) -> None:
    harness.restart(harness.disk.reboot(), cut=False)


def power(harness: RouterHarness) -> None:
    harness.restart(harness.disk.crash_image(harness.random), cut=True)


def reopen(harness: RouterHarness) -> None:
    with suppress(Error):
        harness.log.close()
    harness.restart(harness.disk, cut=False)


OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "main": (
        *(one, batch, slow, burst, direct, private, onward, delete_source, delete_dest, free_space),
        *(second, change, end, tighten, harden_source, checkpoint, tick),
    ),
    "wires": (feed, exchange, unwire, new_source, new_target, gone_target, late, trim_wired, checkpoint, tick),
    "jobs": (work, group, trim_jobs, expire, checkpoint, tick),
    "cycle": (around, flood, drop_around, wait_around, open_cycle, checkpoint, tick),
}
RESTARTS: tuple[Operation, ...] = (kill, power, reopen)
