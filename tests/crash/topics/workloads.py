"""What is being done when the power goes: histories of an engine, told to the oracle before and after.

Everything is tiny, so that a few records fill a WAL file, seal a segment and pass a reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from random import Random
from typing import Any, NamedTuple

from tests.crash.topics.oracle import Oracle, Row, State, TopicLife, row
from tests.crash.topics.reader import RuleViolated, read_engine, read_topic, require

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Topic
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import shard_for_topic

PATH = "data"
TINY: dict[str, Any] = {"wal_file_bytes": 2048, "segment_events_max": 4, "segment_bytes_max": 1024, "head_reserve": 4}
CLASSES = ("fsync", "disk", "memory")
TAGS = ("x:1", "x:2", "y", None)
HOUR_MS = 3_600_000
TTL_MS = 5_000


def open_engine(disk: SimDisk, clock: ManualClock, shards: int, **more: Any) -> Engine:
    return engine_of(tidelog.open(PATH, disk=disk, clock=clock, threads=False, wal_shards=shards, **TINY, **more))


class InjectedFailure(NamedTuple):
    """A sync that the disk was asked to fail: the `at`-th from this entry of its trace on."""

    since: int
    at: int
    forgets: bool  # the page cache shows what is durable again, so that even a restart loses the rest


class EngineHarness:
    """An engine on a simulated disk, and the oracle that is told what is done to it.

    `faulty`: the disk has been asked to fail, so errors are part of the history.
    """

    def __init__(self, disk: SimDisk, *, shards: int = 1, faulty: bool = False) -> None:
        self.disk, self.oracle, self.clock = disk, Oracle(), ManualClock()
        self.shards, self.faulty = shards, faulty
        self.watch: Callable[[int], None] | None = None  # looks at the disk before each of its operations
        self.errors: list[Error] = []
        self.struck: InjectedFailure | None = None
        self._number = self._opened = 0
        self.topics: dict[str, Topic] = {}
        self.log: Engine

    @property
    def now_ms(self) -> int:
        return self.clock.now_us() // 1_000

    # What the process does.

    def open(self, shards: int | None = None) -> None:
        self.shards = shards or self.shards
        self.topics.clear()
        self._opened = len(self.disk.trace)
        self.log = open_engine(self.disk, self.clock, self.shards)

    def close(self) -> None:
        stuck = self._unsyncable_topics()  # before: a sync that fails in the close itself is the close's to tell
        if not self._call_succeeds(self.log.close):
            raise self.errors[-1]  # the history ends here: what is left is what a crash leaves
        self.oracle.mark_synced(checkpoint=True, but=stuck)
        if self.struck is not None and self.struck.forgets:
            for name in stuck:
                self.oracle.lives[name].forgotten = True

    def kill(self, shards: int | None = None) -> None:
        """The process is gone, what it handed to the system is not."""
        self._restart(self.disk.reboot(), shards, cut=False)

    def crash(self, random: Random, shards: int | None = None) -> None:
        """The machine is gone, and what was not synced with it, by chance."""
        self._restart(self.disk.crash_image(random), shards, cut=True)

    def _restart(self, disk: SimDisk, shards: int | None, *, cut: bool) -> None:
        self.disk = disk
        disk.on_op = self.watch
        self.open(shards)
        self.continue_from_restart(cut=cut)

    def continue_from_restart(self, *, cut: bool) -> None:
        """Go on from what a restart found: a write whose fate nobody knew has one now."""
        found = read_engine(self.log)
        wrong = self.oracle.check(found, self.now_ms, cut=cut)
        require(wrong is None, f"after a {'power cut' if cut else 'kill'}: {wrong}")
        self.oracle.continue_from(found, self.now_ms, cut=cut)

    def topic(self, name: str) -> Topic:
        if name not in self.topics:
            self.topics[name] = self.log.topic(name, create=False)
        return self.topics[name]

    def topic_life(self, name: str) -> TopicLife:
        """The topic of this name, to do something to it."""
        self.oracle.touched.add(name)
        return self.oracle.lives[name]

    def unacked_write_visible(self) -> str | None:
        """Asked at any instant: whether a reader sees a write that was not acked yet (G6)."""
        for name, topic in self.topics.items():
            life = self.oracle.lives.get(name)
            if life is not None and life.id == topic.id and topic.head_seq > life.now.head:
                return f"{name}: a reader sees {topic.head_seq} before its write returned, {life.now.head} is acked"
        return None

    # What its callers do. Each tells the oracle what may be there before, and what must be there after.

    def create(self, name: str, **config: Any) -> None:
        self.oracle.create(name, config)
        topic = self._try_call(None, None, lambda: self.log.topic(name, **config))
        if topic is not None:
            self.topics[name] = topic
            self.oracle.created(name, topic.id)

    def drop(self, name: str) -> None:
        life = self.topic_life(name)
        life.dropping = True
        self.oracle.report_removals()
        if self._try_call(None, None, lambda: self.log.drop(name)):
            del self.topics[name]
            self.oracle.dropped(name)

    def configure(self, name: str, **fields: Any) -> None:
        life = self.topic_life(name)
        after = life.now.configured(fields)
        if after.config == life.now.config:
            return  # nothing is written
        if self._try_call(life, after, lambda: self.log.topic(name, create=False, **fields)):
            life.ack(after, hard=True)
            self.oracle.report_removals()

    def append(
        self,
        name: str,
        records: Sequence[object],
        tags: Sequence[str | None] | None = None,
        nodes: Sequence[str | None] | None = None,
        metas: Sequence[dict[str, Any] | None] | None = None,
    ) -> None:
        life, many = self.topic_life(name), len(records)
        life.stamp = max(self.now_ms, life.stamp)
        none = [None] * many
        columns = zip(records, tags or none, nodes or none, metas or none, strict=True)
        batch = [row(life.stamp, *values) for values in columns]
        topic = self.topic(name)
        done = self._try_call(life, batch, lambda: topic.append(list(records), tag=tags, node=nodes, meta=metas))
        if done is None:
            return
        require(done.first_seq > max(life.now.head, life.top), f"{name}: seq {done.first_seq} was handed out before")
        require(done.last_seq - done.first_seq + 1 == many, f"{name}: {many} records were acked as {done}")
        after = life.now.appended(done.first_seq, batch, self.now_ms)
        life.ack(after, hard=after.durability == "fsync")
        self.oracle.report_removals()

    def delete(
        self, name: str, *, before_seq: int | None = None, match: str | None = None, seqs: Sequence[int] | None = None
    ) -> None:
        life = self.topic_life(name)
        held = life.now.retained(self.now_ms)
        goes = held.selected(before_seq, match, seqs)
        after = held.without(goes)
        topic = self.topic(name)
        done = self._try_call(life, after, lambda: topic.delete(before_seq=before_seq, match=match, seqs=seqs))
        if done is None:
            return
        require(done.deleted == len(goes), f"{name}: {goes} should go, {done.deleted} went")
        life.ack(after, hard=after.durability == "fsync")
        self.oracle.report_removals()

    def checkpoint(self) -> None:
        if self._call_succeeds(self.log.checkpoint):
            self.oracle.mark_synced(checkpoint=True)

    def rewrite(self, name: str) -> None:
        """Rewrite every segment with a deleted record; where there is one, two checkpoints follow."""
        topic = self.topic(name)
        result = self._try_call(None, None, lambda: topic.rewrite(force=True))
        if result is not None and result.files:
            self.oracle.mark_synced(checkpoint=True)

    def tick(self) -> None:
        stuck = self._unsyncable_topics()
        if self._call_succeeds(self.log.tick):
            self.oracle.mark_synced(checkpoint=False, but=stuck)

    def seal(self, name: str) -> None:
        self._call_succeeds(self.topic(name).seal)

    def check_all(self) -> None:
        """Read everything: it is exactly what the oracle says. Age shows itself to readers, so floors may move."""
        for name, life in self.oracle.lives.items():
            if life.id is None or life.dropping:
                continue
            before, after = life.now, life.now.retained(self.now_ms)
            if after is not before and life.in_flight is None:
                life.in_flight = after
                self.oracle.report_removals()
            seen = read_topic(self.topic(name), limit=3)
            if self.faulty and after is not before and seen.rows == before.rows:
                life.in_flight = None if life.in_flight is after else life.in_flight
                continue  # the floor could not be made durable, so nothing went
            _, wrong = life.differs(after, seen)
            require(wrong is None, f"{name}, in the running engine: {wrong}")
            require(seen.head == after.head, f"{name}: the head is {seen.head}, {after.head} was acked last")
            if after is not before or seen.floor != before.floor:
                life.ack(replace(after, floor=seen.floor), hard=after.durability == "fsync")
            if after is not before or name not in self._unsyncable_topics():
                life.on_floor_shown(seen.floor)
            self.oracle.report_removals()

    def _unsyncable_topics(self) -> set[str]:
        """Topics that nothing can be made durable for: a sync of their shard's WAL was made to fail since the engine
        was opened, and the shard is latched. Reading goes on (D6): a floor that their last records caused is told and
        may go with them. None of class `fsync`: it shows nothing that a power cut takes back."""
        if self.struck is None:
            return set()
        since, at, _ = self.struck
        syncs = [number for number, op in enumerate(self.disk.trace) if number >= since and op.startswith("sync ")]
        if len(syncs) < at or syncs[at - 1] < self._opened:
            return set()
        failed = self.disk.trace[syncs[at - 1]].removeprefix("sync ").rpartition("/")[0]
        found = set()
        for name, life in self.oracle.lives.items():
            if life.id is not None and not life.dropping and life.now.durability != "fsync":
                shard = self.topic(name)._state.shard
                if shard.is_latched and shard.directory == failed:
                    found.add(name)
        return found

    def _call_succeeds(self, call: Callable[[], None]) -> bool:
        """Make a call that changes no record; whether it returned."""

        def called() -> bool:
            call()
            return True

        return self._try_call(None, None, called) is not None

    def _try_call(self, life: TopicLife | None, flight: State | list[Row] | None, call: Callable[[], Any]) -> Any:
        """Make a call that may fail where the disk was asked to; None when it did."""
        stuck = life is not None and life.in_flight is not None
        if life is not None and not stuck:
            life.in_flight = flight
        self.oracle.report_removals()
        try:
            done = call()
        except Error as error:
            if not self.faulty:
                raise
            self.errors.append(error)
            if life is not None and not stuck and error.written is False:
                life.in_flight = None
                self.oracle.report_removals()
            return None
        if stuck:
            assert life is not None
            raise RuleViolated(f"{life.name}: a write went through behind one whose fate nobody knows")
        return done

    def data(self, random: Random, size: int) -> object:
        """A record that nobody else wrote: bytes or JSON."""
        self._number += 1
        if random.random() < 0.5:
            return b"%d:" % self._number + random.randbytes(size)
        return {"n": self._number, "text": "ä" * (size // 4), "list": [None, True, 1.5]}


# Letters ------------------------------------------------------------------------------------------------


def one(harness: EngineHarness, name: str, random: Random) -> None:
    harness.append(name, [harness.data(random, 40)], [random.choice(TAGS)], metas=[random.choice([None, {"k": "v"}])])


def batch(harness: EngineHarness, name: str, random: Random) -> None:
    many = random.randint(2, 5)
    datas = [harness.data(random, random.choice([0, 30, 250])) for _ in range(many)]
    if random.random() < 0.5:
        # Alike but for their data: what is large of these is read from the WAL.
        harness.append(name, [data for data in datas if isinstance(data, bytes)] or datas)
        return
    harness.append(
        name,
        datas,
        [random.choice(TAGS) for _ in range(many)],
        [random.choice([None, "n1", "n2"]) for _ in range(many)],
        [random.choice([None, {"k": number}]) for number in range(many)],
    )


def before(harness: EngineHarness, name: str, random: Random) -> None:
    now = harness.oracle.lives[name].now
    harness.delete(name, before_seq=random.randint(now.floor, now.head + 2))


def tag(harness: EngineHarness, name: str, random: Random) -> None:
    harness.delete(name, match=random.choice(["x:1", "y"]))


def prefix(harness: EngineHarness, name: str, random: Random) -> None:
    harness.delete(name, match=random.choice(["x:*", "*"]))


def seqs(harness: EngineHarness, name: str, random: Random) -> None:
    now = harness.oracle.lives[name].now
    harness.delete(name, seqs=sorted({random.randint(1, now.head + 3) for _ in range(3)}))


def cap(harness: EngineHarness, name: str, random: Random) -> None:
    harness.configure(name, **random.choice([{"cap_records": 3}, {"cap_bytes": 400}]))
    batch(harness, name, random)


def expire(harness: EngineHarness, name: str, random: Random) -> None:
    harness.configure(name, ttl_ms=TTL_MS)
    harness.clock.tick(random.choice([TTL_MS, TTL_MS + 1]))
    harness.check_all()
    one(harness, name, random)


def checkpoint(harness: EngineHarness, name: str, random: Random) -> None:
    del name, random
    harness.checkpoint()


def seal(harness: EngineHarness, name: str, random: Random) -> None:
    del random
    harness.seal(name)


def rewrite(harness: EngineHarness, name: str, random: Random) -> None:
    """Seal what there is, so that there is something to rewrite, and delete a record of it."""
    if random.random() < 0.7:
        now = harness.oracle.lives[name].now
        harness.delete(name, seqs=[random.randint(1, now.head + 1)])
        harness.seal(name)
        harness.checkpoint()
    harness.rewrite(name)


def drop(harness: EngineHarness, name: str, random: Random) -> None:
    config = harness.oracle.lives[name].now.config
    harness.drop(name)
    if name not in harness.oracle.lives:
        harness.create(name, **config)
    if random.random() < 0.5 and harness.oracle.lives[name].id is not None:
        one(harness, name, random)


def reclass(harness: EngineHarness, name: str, random: Random) -> None:
    now = harness.oracle.lives[name].now.durability
    harness.configure(name, durability=random.choice([other for other in CLASSES if other != now]))


def reopen(harness: EngineHarness, name: str, random: Random) -> None:
    del name
    harness.close()
    harness.open(random.randint(1, 4))
    if harness.faulty or any(life.now.durability == "ephemeral" for life in harness.oracle.lives.values()):
        harness.continue_from_restart(cut=False)


def idle(harness: EngineHarness, name: str, random: Random) -> None:
    del name
    harness.clock.tick(1)
    harness.clock.set_us(harness.clock.now_us() + random.choice([-1, 1]) * HOUR_MS * 1_000)
    harness.tick()


def kill(harness: EngineHarness, name: str, random: Random) -> None:
    del name
    harness.kill(random.randint(1, 4))


def crash(harness: EngineHarness, name: str, random: Random) -> None:
    del name
    harness.crash(random, random.randint(1, 4))


Operation = Callable[[EngineHarness, str, Random], None]
OPERATIONS: tuple[Operation, ...] = (
    *(one, batch, before, tag, prefix, seqs, cap, expire, checkpoint, seal, drop, reclass, reopen, idle),
    rewrite,
)
RESTARTS: tuple[Operation, ...] = (kill, crash)


def operations_named(words: str) -> list[Operation]:
    """The letters of these names."""
    known = {letter.__name__: letter for letter in (*OPERATIONS, *RESTARTS)}
    return [known[word] for word in words.split()]


class Arrangement(NamedTuple):
    """Where a history of two letters runs: on two topics, `f` and `d`, of which `f` is created first."""

    classes: tuple[str, str]  # of f and of d
    topics: str  # the topic of each letter; letters past its end draw theirs by chance
    shards: int
    apart: bool  # whether f and d are in different shards

    def __str__(self) -> str:
        return f"{'-'.join(self.classes)} {self.topics} {self.shards}{' apart' if self.apart else ''}"


def arrangements() -> list[Arrangement]:
    """All pairs of classes, all pairs of topics, in one shard, in the same one of two and in different ones."""
    pairs, places = tuple(product(CLASSES, CLASSES)), ((1, False), (2, False), (2, True))
    found = product(pairs, ("ff", "fd", "df", "dd"), places)
    return [Arrangement(classes, topics, *place) for classes, topics, place in found]


def sampled(seed: object) -> Iterator[Arrangement]:
    """Arrangements without end, in an order drawn by chance: each once before any comes again."""
    every = arrangements()
    Random(f"arrangements {seed}").shuffle(every)
    return cycle(every)


def prologue(harness: EngineHarness, random: Random, how: Arrangement | None = None) -> None:
    """Something to work on: records in segments, records in the WAL only, something deleted."""
    harness.open()
    first, second = ("fsync", "disk") if how is None else how.classes
    harness.create("f", durability=first)
    if how is not None:
        home = shard_for_topic(harness.topic("f").id, harness.shards)
        while (shard_for_topic(harness.log._next_id, harness.shards) != home) != how.apart:
            harness.create(f"filler-{len(harness.topics)}", durability="disk")
    harness.create("d", durability=second)
    for name in ("f", "d"):
        harness.append(name, [b"first", {"n": 0}, b"third"], ["x:1", "y", "x:2"])
    if random.random() < 0.5:
        harness.checkpoint()
    harness.delete("f", seqs=[2])
    for name in ("d", "f"):
        one(harness, name, random)
    harness.check_all()
    harness.oracle.touched.clear()


def run_history(harness: EngineHarness, operations: Sequence[Operation], random: Random, topics: str = "") -> None:
    """Do what these letters say, each to its topic of these, or to one drawn by chance."""
    for number, letter in enumerate(operations):
        lives = harness.oracle.lives
        names = [name for name in "fd" if name in lives and lives[name].id is not None and not lives[name].dropping]
        if not names:
            return  # every drop and every creation failed
        wanted = topics[number : number + 1]
        letter(harness, wanted if wanted in names else random.choice(names), random)
        harness.check_all()
