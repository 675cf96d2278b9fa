"""Jobs that move between a queue and its dead-letter topic when the power goes, for every pair of classes and shards.

One history, arranged in many ways: which class each side has, whether they share a WAL shard, what the dead-letter
topic is (a log, a queue, made by the first dead letter, capped, full), and what comes between the steps (a seal, a
checkpoint, a restart). Before every disk operation each image that a power cut could leave is opened. The oracle knows
jobs by their data and shares no code with the engine: a job that was durable is in the queue, in the dead-letter topic
or in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from random import Random
from typing import Any, NamedTuple

from tests.crash.topics.reader import RuleViolated, require
from tests.crash.topics.workloads import PATH, TINY

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import shard_for_topic

CLASSES = ("fsync", "disk", "memory")
TARGETS = ("log", "queue", "auto", "reject", "full", "dropped")
BETWEEN_ACTIONS = ("nothing", "seal", "checkpoint", "restart")
JOBS = 3


class Arrangement(NamedTuple):
    queue: str  # its class
    dead: str  # its class; one that is made by the first dead letter has the default class
    shards: int = 1
    apart: bool = False  # whether they are in different shards
    target: str = "log"
    between: str = "nothing"
    strikes: str = ""  # which sync fails: of the "target" or of the "source" of a move

    def __str__(self) -> str:
        return "-".join(str(part) for part in self if part != "")


def arrangements(
    targets: tuple[str, ...] = TARGETS, between: tuple[str, ...] = BETWEEN_ACTIONS
) -> Iterator[Arrangement]:
    """All pairs of classes, in one shard, in the same one of two, and in different ones, with these variations."""
    for queue, dead, (shards, apart), target, moment in product(
        CLASSES, CLASSES, ((1, False), (2, False), (2, True)), targets, between
    ):
        if target != "auto" or dead == "disk":
            yield Arrangement(queue, dead, shards, apart, target, moment)


class StopHistory(BaseException):
    """Enough: leave the history at once."""


class DeadLetterHarness:
    """One history of an arrangement, judged at every instant up to the first that is wrong."""

    def __init__(self, how: Arrangement, *, limit: int, seed: int = 0) -> None:
        self.how, self.limit, self.random = how, limit, Random(f"letters/{how}/{seed}")
        self.clock = ManualClock()
        self.disk = SimDisk(clock=self.clock)
        self.states, self.wrong = 0, ""
        self.safe: set[str] = set()  # durable somewhere: never in neither
        self.left: set[str] = set()  # gone from the queue for good
        self.returned: set[str] = set()  # gone from the dead-letter topic for good
        self.errors: list[Error] = []
        self._judged: set[object] = set()  # states with what was promised by then
        self.log = self.open(self.disk)
        self._make()

    def open(self, disk: SimDisk) -> Engine:
        more: dict[str, Any] = {"queue_history_records": 0, "wal_shards": self.how.shards}
        return engine_of(tidelog.open(PATH, disk=disk, clock=self.clock, threads=False, **TINY, **more))

    def _make(self) -> None:
        """The two topics, each in the shard that the arrangement asks for."""
        how = self.how
        fields: dict[str, Any] = {
            "lease_ms": 60_000,
            "max_deliveries": 1,
            "dead_letter": "dead",
            "durability": how.queue,
        }
        home = shard_for_topic(self.log.queue("jobs", **fields).topic.id, how.shards)
        fillers = 0
        while (shard_for_topic(self.log._next_id, how.shards) != home) != how.apart:
            self.log.topic(f"filler-{fillers}")
            fillers += 1
        if how.target != "auto":
            self._make_dead()

    def _make_dead(self) -> None:
        how = self.how
        fields: dict[str, Any] = {"durability": how.dead}
        if how.target in ("reject", "full"):
            fields |= {"cap_records": 2 if how.target == "reject" else 1, "discard": "reject"}
        if how.target == "queue":
            self.log.queue("dead", **fields)
            return
        topic = self.log.topic("dead", **fields)
        if how.target == "full" and not topic.head_seq:
            topic.append("filler")

    # The history.

    def run(self) -> None:
        with suppress(StopHistory):
            self.log.queue("jobs").put([f"job {number}" for number in range(JOBS)])
            self.log.tick()  # durable from here on, whatever the class is
            self.safe = {f"job {number}" for number in range(JOBS)}
            self.disk.on_op = self.examine
            for _ in range(2):
                self._run_between_action()
                self._fail_jobs()
                self._move_to_dead_letter()
                self._run_between_action()
                self._redrive()
            self._run_between_action()
            self.examine(0)

    def _run_between_action(self) -> None:
        """What is done before the next step."""
        match self.how.between:
            case "seal":
                for name in ("jobs", "dead"):
                    if self.log.find(name) is not None:
                        self.log.topic(name, create=False).seal()
                self.log.checkpoint()
            case "checkpoint":
                self.log.checkpoint()
            case "restart":
                self.disk = self.disk.reboot()
                self.disk.on_op = self.examine
                self.log = self.open(self.disk)

    def _fail_jobs(self) -> None:
        self.returned = set()  # what a full topic did not take before may go there now
        jobs = self.log.queue("jobs", create=False)
        jobs.nack("w", jobs.claim("w", 10))

    def _move_to_dead_letter(self) -> None:
        """A claim that moves what was delivered too often."""
        if self.how.target == "dropped":
            self._drop_and_move()
            return
        self._fail_next_sync("target" if self.how.strikes == "target" else "source")
        with self._record_errors():
            self.log.queue("jobs", create=False).claim("w", 10)
        in_queue, in_dead = self.datas(self.log)
        self._check(self.safe <= in_queue | in_dead, f"{self.safe - in_queue - in_dead} are in neither now")
        if not self.errors and not self.how.strikes:  # a copy whose sync failed may be there after a restart
            self.left = self.safe - in_queue if self.how.queue == "fsync" else set()
            self._check(not self.safe & in_queue & in_dead, f"{in_queue & in_dead} are in both, nothing failed")

    def _drop_and_move(self) -> None:
        """The dead-letter topic is dropped while a copy is on its way: what is not in it stays in the queue."""
        self.log.drop("dead")
        self._make_dead()
        self.log.queue("jobs", create=False).claim("w", 10)
        in_queue, _ = self.datas(self.log)
        if self.how.queue == "fsync":
            self.left = self.safe - in_queue

    def _redrive(self) -> None:
        """Back to the queue."""
        self.left = set()
        dead = self.log.find("dead")
        if dead is None:
            return
        with self._record_errors():
            dead.redrive(match=None)
        in_queue, in_dead = self.datas(self.log)
        self._check(self.safe <= in_queue | in_dead, f"{self.safe - in_queue - in_dead} are in neither now")
        if not self.errors and not self.how.strikes and self.how.dead == "fsync":
            self.returned = self.safe - in_dead

    def _fail_next_sync(self, side: str) -> None:
        """Let the next sync of one side's shard fail."""
        if self.how.strikes != side:
            return
        name = "dead" if side == "target" else "jobs"
        topic = self.log.find(name)
        number = shard_for_topic(topic.id if topic else self.log._next_id, self.how.shards)
        path = f"shard-{number:02d}" if self.how.shards > 1 else "wal"
        self.disk.fail_sync(self.random.choice(("dropped", "reverted", "kept")), path=path)

    def _record_errors(self) -> Any:
        return _RecordedErrors(self.errors)

    # What a restart would find.

    @staticmethod
    def datas(log: Engine) -> tuple[set[str], set[str]]:
        """What the queue and the dead-letter topic hold."""
        found: list[set[str]] = []
        for name in ("jobs", "dead"):
            topic = log.find(name)
            records = [] if topic is None else topic.read(0, 1000).records
            found.append({record.data for record in records if record.data != "filler"})
        return found[0], found[1]

    def examine(self, op: int) -> None:
        promises = (frozenset(self.safe), frozenset(self.left), frozenset(self.returned))
        for image in self.disk.images(random=self.random, limit=self.limit):
            if (key := (image.disk.digest(), promises)) in self._judged:
                continue
            self._judged.add(key)
            self.states += 1
            try:
                self.check_crash_state(image.disk)
            except RuleViolated as wrong:
                self._fail(f"{self.how}: before op {op}, {image.label}: {wrong}")

    def check_crash_state(self, disk: SimDisk) -> None:
        log = self.open(disk)
        require(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        in_queue, in_dead = self.datas(log)
        lost = self.safe - in_queue - in_dead
        require(not lost, f"{sorted(lost)} are in neither topic")
        require(not self.left & in_queue, f"{sorted(self.left & in_queue)} left the queue for good and are back in it")
        require(not self.returned & in_dead, f"{sorted(self.returned & in_dead)} were given back and are dead letters")
        for letter in [] if (topic := log.find("dead")) is None else topic.read(0, 1000).records:
            if letter.data != "filler":
                meta = letter.meta or {}
                require(meta.get("$dead_letter_from") == "jobs", f"{letter.data} does not say where it came from")
                require(str(meta.get("$dead_letter_src_seq", "")).isdigit(), f"{letter.data} does not name its job")
        self._check_recovers(log)

    def _check_recovers(self, log: Engine) -> None:
        """After a restart moves go on, and lose nothing either."""
        jobs = log.queue("jobs", create=False)
        for _ in range(2):
            jobs.nack("z", jobs.claim("z", 10))
        in_queue, in_dead = self.datas(log)
        lost = self.safe - in_queue - in_dead
        require(not lost, f"{sorted(lost)} were lost by the next move after a restart")

    def _check(self, condition: bool, words: str) -> None:
        if not condition:
            self._fail(f"{self.how}: {words}")

    def _fail(self, words: str) -> None:
        self.wrong = words
        self.disk.on_op = None
        raise StopHistory


class _RecordedErrors:
    """Errors of the engine are part of a history in which the disk fails."""

    def __init__(self, errors: list[Error]) -> None:
        self._errors = errors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Error):
            self._errors.append(error)
            return True
        return False


def sweep(cases: Iterator[Arrangement] | list[Arrangement], *, limit: int) -> tuple[int, list[str]]:
    """The histories of these arrangements; how many states were judged, and what was wrong with each."""
    states, wrong = 0, []
    for how in cases:
        bench = DeadLetterHarness(how, limit=limit)
        bench.run()
        states += bench.states
        if bench.wrong:
            wrong.append(bench.wrong)
    return states, wrong
