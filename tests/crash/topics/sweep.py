"""The sweep: before every disk operation of a history, every image that a power cut could leave, judged.

An observer on the running disk looks at each instant, so a history runs once. Each image is a disk
of its own: the engine is opened on it as after a reboot and held against the oracle; then, for a
share of them, killed, opened again, written to, closed and opened a third time. Images that are
alike are judged once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import ENOSPC
from random import Random
from typing import NamedTuple, NoReturn

from tests.crash.topics.looking import Wrong, hold, look
from tests.crash.topics.oracle import Oracle, Seen
from tests.crash.topics.workloads import (
    HOUR_MS,
    PATH,
    Arrangement,
    Bench,
    Letter,
    Struck,
    open_engine,
    prologue,
    spell,
)

from tidelog.engine import Engine
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk, SyncMode

RESTS_MAX = 6  # restarts until all that other shards held has been moved and tidied up


@dataclass(slots=True)
class Tally:
    instants: int = 0
    states: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Depth:
    """How much of what could be looked at is looked at."""

    limit: int | None = None  # images of an instant
    again: int = 0  # of them, how many are cut again at every operation of their recovery
    again_limit: int = 3  # and images of each of those instants
    thorough: int = 1  # one image in so many is also reopened, written to and closed
    kills: bool = False  # whether a kill is judged at each instant too: it keeps what a power cut may lose
    step: int = 1  # one instant in so many is looked at, and the last one
    steady: int = 6  # times the same number of shards is drawn for once 1, 2 or 3


class Found(BaseException):
    """Enough: leave the history at once, through every except clause of the engine."""


class Sweep:
    def __init__(self, bench: Bench, depth: Depth, random: Random, tally: Tally) -> None:
        self.bench, self.depth, self.random, self.tally = bench, depth, random, tally
        self._seen: set[tuple[bytes, int, bool]] = set()
        self._known: set[object] = set()
        self.forbidden = b""  # what no file may hold, where something is said

    def over(self, history: Callable[[], None]) -> None:
        """Judge every instant of a history, up to the first failure."""
        self.bench.watch = self.bench.disk.on_op = self.examine
        with suppress(Found):
            history()
            self.examine(self.bench.disk.ops + 1, last=True)

    def examine(self, op: int, *, last: bool = False) -> None:
        """Judge what a power cut could leave now, if this instant is one of those that `step` draws."""
        bench, depth, tally = self.bench, self.depth, self.tally
        if (early := bench.early()) is not None:
            self._found(early)
        if depth.step > 1 and not last and self.random.randrange(depth.step):
            return
        tally.instants += 1
        again = depth.again
        for image in bench.disk.images(random=self.random, limit=depth.limit):
            if not self._is_new(image.disk):
                continue
            if self.forbidden and any(self.forbidden in content for content in image.disk.tree().values()):
                self._found(f"{self.forbidden!r} is in a file")
            now_ms = bench.now_ms - self.random.choice((0, 0, 0, HOUR_MS))  # a clock may be set while the power is off
            shards = self.random.choice((*[bench.shards] * depth.steady, 1, 2, 3))
            wrong = None
            if again:
                again -= 1
                wrong = self._cut_in_recovery(image.disk.reboot(), now_ms, shards)
            thorough = tally.states % depth.thorough == 0
            wrong = wrong or judge(image.disk, bench.oracle, now_ms, shards, thorough=thorough, known=self._known)
            if wrong is not None:
                trace = bench.disk.trace
                where = f"after op {op - 1} ({trace[-1] if trace else 'the start'}), {image.label}"
                self._found(f"{where}, opened with {shards} shards: {wrong}")
        if depth.kills:
            self._examine_kill(op)

    def _examine_kill(self, op: int) -> None:
        bench, killed = self.bench, self.bench.disk.reboot()
        if self._is_new(killed, cut=False):
            wrong = judge(
                killed, bench.oracle, bench.now_ms, bench.shards, thorough=False, cut=False, known=self._known
            )
            if wrong is not None:
                self._found(f"after op {op - 1}, a kill: {wrong}")

    def _is_new(self, disk: SimDisk, *, cut: bool = True) -> bool:
        """Count a state, unless the same one was judged before and by the same rules."""
        key = (disk.digest(), self.bench.oracle.version, cut)
        if key in self._seen:
            return False
        self._seen.add(key)
        self.tally.states += 1
        return True

    def _found(self, words: str) -> NoReturn:
        self.tally.failures.append(words)
        self.bench.disk.on_op = None
        raise Found

    def _cut_in_recovery(self, disk: SimDisk, now_ms: int, shards: int) -> str | None:
        wrongs: list[str] = []

        def examine(op: int) -> None:
            for image in disk.images(random=self.random, limit=self.depth.again_limit):
                if not self._is_new(image.disk):
                    continue
                wrong = judge(image.disk, self.bench.oracle, now_ms, shards, thorough=False, known=self._known)
                if wrong is not None:
                    wrongs.append(f"and again in recovery before op {op}, {image.label}: {wrong}")
                    raise Found

        disk.on_op = examine
        with suppress(Found):
            open_engine(disk, ManualClock(now_ms * 1_000), shards)
        return wrongs[0] if wrongs else None


def sweep(
    letters: Sequence[Letter],
    depth: Depth,
    *,
    seed: object,
    shards: int = 1,
    tally: Tally | None = None,
    how: Arrangement | None = None,
) -> Tally:
    """Run the history that these letters spell and judge its crash states, up to the first failure. Without an
    arrangement it runs on topics drawn by chance."""
    tally = tally or Tally()
    shards = shards if how is None else how.shards
    random = Random(f"{seed}/{'-'.join(letter.__name__ for letter in letters)}")
    bench = Bench(SimDisk(trace=True), shards=shards)

    def history() -> None:
        spell(bench, letters, random, "" if how is None else how.topics)
        bench.close()

    try:
        prologue(bench, random, how)
        Sweep(bench, depth, Random(random.random()), tally).over(history)
    except Wrong as wrong:
        tally.failures.append(str(wrong))
    if tally.failures:
        words = " ".join(letter.__name__ for letter in letters)
        where = f"{shards} shards" if how is None else str(how)
        tally.failures[-1] = f"seed {seed!r}, {where}, {words}: {tally.failures[-1]}"
    return tally


def judge(
    disk: SimDisk,
    oracle: Oracle,
    now_ms: int,
    shards: int,
    *,
    thorough: bool = True,
    cut: bool = True,
    known: set[object] | None = None,
) -> str | None:
    """Open a crash image as a restarted process would; what is wrong with it, or None.

    `known`: images that differ in what recovery sweeps away come to the same files and the same figures. Where these
    were read before, and not `thorough`, they are not read again.
    """
    try:
        again = disk.reboot() if thorough else None
        log = open_engine(disk, ManualClock(now_ms * 1_000), shards)
        hold(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        hold(not log.report.snapshots_skipped, f"a snapshot does not read: {log.report.snapshots_skipped}")
        hold(log.health().ok, f"a crash is shown as ill health: {log.health()}")
        if again is None and known is not None:
            key = (disk.digest(), tuple(log.topics()), oracle.version, now_ms, cut)
            if key in known:
                return None
            known.add(key)
        found = look(log, only=None if thorough else oracle.touched)
        wrong = oracle.judge(found, now_ms, cut=cut)
        hold(wrong is None, str(wrong))
        if again is not None:
            _rest(again, now_ms, shards)
            _go_on(disk.reboot(), oracle, found, now_ms, shards)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:  # whatever it is, it is what a user would have met
        where = [f"{at.filename.rpartition('/')[2]}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__} in {' '.join(where[-6:])}: {error}"
    return None


def _rest(disk: SimDisk, now_ms: int, shards: int) -> None:
    """A second recovery leaves every byte as the first did (G47). Where the number of shards is another, a start moves
    what the old ones hold with a checkpoint, and the next ones tidy up: then it comes to rest a little later."""
    clock = ManualClock(now_ms * 1_000)
    snapshots = _snapshots(disk)
    left: dict[str, bytes] = {}
    changed: set[str] = set()
    for number in range(RESTS_MAX):
        disk = disk.reboot()
        open_engine(disk, clock, shards)
        files = {name: content for name, content in disk.tree().items() if not name.endswith(".lock")}
        changed = {name for name, _ in files.items() ^ left.items()}
        left = files
        if number and not changed:
            return
        if number and snapshots == _snapshots(disk):
            break
    raise Wrong(f"recovery does not come to rest: another one changed {sorted(changed)}")


def _snapshots(disk: SimDisk) -> list[str]:
    return [name for name in disk.tree() if name.startswith(f"{PATH}/meta/")]


def _go_on(disk: SimDisk, oracle: Oracle, found: dict[str, Seen], now_ms: int, shards: int) -> None:
    """A second recovery finds what the first did (G47); then the engine is of use again."""
    clock = ManualClock(now_ms * 1_000)
    log = open_engine(disk, clock, shards)
    hold(look(log) == found, "the second recovery reads something else")
    written = _write(log, oracle, found)
    log.close()
    log = open_engine(disk, clock, shards, read_only=True)
    for name, seen in look(log).items():
        kept = {} if seen.config["durability"] == "ephemeral" else written[name].rows
        hold(seen.rows == kept, f"{name}: another state after an append and a close")
        hold(seen.head == written[name].head, f"{name}: the head is {seen.head} after an append and a close")
    log.close()


def _write(log: Engine, oracle: Oracle, found: dict[str, Seen]) -> dict[str, Seen]:
    """One more record in every topic: it gets a seq that nobody had, and can be read."""
    for name, seen in found.items():
        topic = log.topic(name, create=False)
        seq = topic.append(b"after the crash", tag="x:1").first_seq
        life = oracle.lives[name]
        hold(seq > max(life.top, seen.head), f"{name}: the next seq is {seq}, {max(life.top, seen.head)} was given out")
        read = topic.read(seq - 1).records
        hold([record.data for record in read] == [b"after the crash"], f"{name}: {read} was read at {seq}")
    return look(log)


class Fault(NamedTuple):
    """One way in which a disk can refuse a call; `words` is how a trace names the calls that can meet it."""

    name: str
    words: str
    plant: Callable[[SimDisk, int], None]  # let the n-th such call fail
    forgets: bool = False  # the page cache loses what was pending, so that even a kill does


def _failing_sync(mode: SyncMode) -> Fault:
    return Fault(f"sync {mode}", "sync ", lambda disk, at: disk.fail_sync(mode, at=at), forgets=mode == "reverted")


SYNCS = tuple(_failing_sync(mode) for mode in ("dropped", "reverted", "kept"))
FAULTS = (
    *SYNCS,
    Fault("sync_dir", "sync_dir ", lambda disk, at: disk.fail("sync_dir", at=at)),
    Fault("write EIO", "write ", lambda disk, at: disk.fail("write", at=at, partial=40)),
    Fault("write ENOSPC", "write ", lambda disk, at: disk.fail("write", at=at, error=ENOSPC, partial=60)),
    Fault("write ENOSPC late", "write ", lambda disk, at: disk.fail("write", at=at, error=ENOSPC, partial=1 << 20)),
    Fault("create ENOSPC", "create ", lambda disk, at: disk.fail("create", at=at, error=ENOSPC)),
    Fault("rename", "rename ", lambda disk, at: disk.fail("rename", at=at)),
)


def fail_each(
    fault: Fault,
    letters: Sequence[Letter],
    *,
    seed: object,
    shards: int = 1,
    limit: int | None,
    tally: Tally,
    how: Arrangement | None = None,
) -> Tally:
    """Run a history once for every call that this fault can strike: go on as far as the engine lets, then judge what
    a kill and what a power cut leave."""
    words = " ".join(letter.__name__ for letter in letters)
    shards = shards if how is None else how.shards
    where = f"{shards} shards" if how is None else str(how)

    def run(at: int | None) -> int:
        random = Random(f"{seed}/{words}")
        bench = Bench(SimDisk(trace=True), shards=shards, faulty=at is not None)
        prologue(bench, random, how)
        before = len(bench.disk.trace)
        if at is not None:
            fault.plant(bench.disk, at)
            if fault in SYNCS:
                bench.struck = Struck(before, at, fault.forgets)
        with suppress(Error):  # an engine that does not open again ends the history
            spell(bench, letters, random, "" if how is None else how.topics)
        calls = sum(op.startswith(fault.words) for op in bench.disk.trace[before:])
        if at is not None:
            tally.instants += 1
            _judge_all(bench, fault, Random(f"{seed}/{words}/{at}"), limit, tally)
        return calls

    for at in range(1, run(None) + 1):
        try:
            run(at)
        except Wrong as wrong:
            tally.failures.append(f"seed {seed!r}, {where}, {words}, call {at} with {fault.name}: {wrong}")
            break
    return tally


def _judge_all(bench: Bench, fault: Fault, random: Random, limit: int | None, tally: Tally) -> None:
    for image in bench.disk.images(random=random, limit=limit):
        tally.states += 1
        wrong = judge(image.disk, bench.oracle, bench.now_ms, bench.shards, thorough=tally.states % 3 == 0)
        hold(wrong is None, f"{image.label}: {wrong}")
    tally.states += 1
    wrong = judge(bench.disk.reboot(), bench.oracle, bench.now_ms, bench.shards, thorough=True, cut=fault.forgets)
    hold(wrong is None, f"after a kill: {wrong}")
