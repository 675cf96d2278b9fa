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

from tests.crash.topics.oracle import Oracle, TopicView
from tests.crash.topics.reader import RuleViolated, read_engine, require
from tests.crash.topics.workloads import (
    HOUR_MS,
    PATH,
    Arrangement,
    EngineHarness,
    InjectedFailure,
    Operation,
    open_engine,
    prologue,
    run_history,
)

from tidelog.engine import Engine
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk, SyncMode

IDEMPOTENCE_CHECKS_MAX = 6  # restarts until all that other shards held has been moved and tidied up


@dataclass(slots=True)
class SweepStats:
    instants: int = 0
    states: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SweepDepth:
    """How much of what could be looked at is looked at."""

    limit: int | None = None  # images of an instant
    again: int = 0  # of them, how many are cut again at every operation of their recovery
    again_limit: int = 3  # and images of each of those instants
    thorough: int = 1  # one image in so many is also reopened, written to and closed
    kills: bool = False  # whether a kill is judged at each instant too: it keeps what a power cut may lose
    step: int = 1  # one instant in so many is looked at, and the last one
    steady: int = 6  # times the same number of shards is drawn for once 1, 2 or 3


class StopHistory(BaseException):
    """Enough: leave the history at once, through every except clause of the engine."""


class Sweep:
    def __init__(self, harness: EngineHarness, depth: SweepDepth, random: Random, stats: SweepStats) -> None:
        self.bench, self.depth, self.random, self.tally = harness, depth, random, stats
        self._seen: set[tuple[bytes, int, bool]] = set()
        self._known: set[object] = set()
        self.forbidden = b""  # what no file may hold, where something is said

    def run(self, history: Callable[[], None]) -> None:
        """Judge every instant of a history, up to the first failure."""
        self.bench.watch = self.bench.disk.on_op = self.examine
        with suppress(StopHistory):
            history()
            self.examine(self.bench.disk.op_count + 1, last=True)

    def examine(self, op: int, *, last: bool = False) -> None:
        """Judge what a power cut could leave now, if this instant is one of those that `step` draws."""
        bench, depth, tally = self.bench, self.depth, self.tally
        if (early := bench.unacked_write_visible()) is not None:
            self._fail(early)
        if depth.step > 1 and not last and self.random.randrange(depth.step):
            return
        tally.instants += 1
        again = depth.again
        for image in bench.disk.images(random=self.random, limit=depth.limit):
            if not self._is_new(image.disk):
                continue
            if self.forbidden and any(self.forbidden in content for content in image.disk.tree().values()):
                self._fail(f"{self.forbidden!r} is in a file")
            now_ms = bench.now_ms - self.random.choice((0, 0, 0, HOUR_MS))  # a clock may be set while the power is off
            shards = self.random.choice((*[bench.shards] * depth.steady, 1, 2, 3))
            wrong = None
            if again:
                again -= 1
                wrong = self._cut_in_recovery(image.disk.reboot(), now_ms, shards)
            thorough = tally.states % depth.thorough == 0
            wrong = wrong or check_crash_state(
                image.disk, bench.oracle, now_ms, shards, thorough=thorough, known=self._known
            )
            if wrong is not None:
                trace = bench.disk.trace
                where = f"after op {op - 1} ({trace[-1] if trace else 'the start'}), {image.label}"
                self._fail(f"{where}, opened with {shards} shards: {wrong}")
        if depth.kills:
            self._examine_kill(op)

    def _examine_kill(self, op: int) -> None:
        bench, killed = self.bench, self.bench.disk.reboot()
        if self._is_new(killed, cut=False):
            wrong = check_crash_state(
                killed, bench.oracle, bench.now_ms, bench.shards, thorough=False, cut=False, known=self._known
            )
            if wrong is not None:
                self._fail(f"after op {op - 1}, a kill: {wrong}")

    def _is_new(self, disk: SimDisk, *, cut: bool = True) -> bool:
        """Count a state, unless the same one was judged before and by the same rules."""
        key = (disk.digest(), self.bench.oracle.version, cut)
        if key in self._seen:
            return False
        self._seen.add(key)
        self.tally.states += 1
        return True

    def _fail(self, words: str) -> NoReturn:
        self.tally.failures.append(words)
        self.bench.disk.on_op = None
        raise StopHistory

    def _cut_in_recovery(self, disk: SimDisk, now_ms: int, shards: int) -> str | None:
        wrongs: list[str] = []

        def examine(op: int) -> None:
            for image in disk.images(random=self.random, limit=self.depth.again_limit):
                if not self._is_new(image.disk):
                    continue
                wrong = check_crash_state(
                    image.disk, self.bench.oracle, now_ms, shards, thorough=False, known=self._known
                )
                if wrong is not None:
                    wrongs.append(f"and again in recovery before op {op}, {image.label}: {wrong}")
                    raise StopHistory

        disk.on_op = examine
        with suppress(StopHistory):
            open_engine(disk, ManualClock(now_ms * 1_000), shards)
        return wrongs[0] if wrongs else None


def sweep(
    letters: Sequence[Operation],
    depth: SweepDepth,
    *,
    seed: object,
    shards: int = 1,
    stats: SweepStats | None = None,
    how: Arrangement | None = None,
) -> SweepStats:
    """Run the history that these letters spell and judge its crash states, up to the first failure. Without an
    arrangement it runs on topics drawn by chance."""
    stats = stats or SweepStats()
    shards = shards if how is None else how.shards
    random = Random(f"{seed}/{'-'.join(letter.__name__ for letter in letters)}")
    bench = EngineHarness(SimDisk(trace=True), shards=shards)

    def history() -> None:
        run_history(bench, letters, random, "" if how is None else how.topics)
        bench.close()

    try:
        prologue(bench, random, how)
        Sweep(bench, depth, Random(random.random()), stats).run(history)
    except RuleViolated as wrong:
        stats.failures.append(str(wrong))
    if stats.failures:
        words = " ".join(letter.__name__ for letter in letters)
        where = f"{shards} shards" if how is None else str(how)
        stats.failures[-1] = f"seed {seed!r}, {where}, {words}: {stats.failures[-1]}"
    return stats


def check_crash_state(
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
        require(not log.report.damage, f"a crash is reported as damage: {log.report.damage}")
        require(not log.report.snapshots_skipped, f"a snapshot does not read: {log.report.snapshots_skipped}")
        require(log.health().ok, f"a crash is shown as ill health: {log.health()}")
        if again is None and known is not None:
            key = (disk.digest(), tuple(log.topics()), oracle.version, now_ms, cut)
            if key in known:
                return None
            known.add(key)
        found = read_engine(log, only=None if thorough else oracle.touched)
        wrong = oracle.check(found, now_ms, cut=cut)
        require(wrong is None, str(wrong))
        if again is not None:
            _check_recovery_is_idempotent(again, now_ms, shards)
            _check_usable(disk.reboot(), oracle, found, now_ms, shards)
    except RuleViolated as wrong:
        return str(wrong)
    except Exception as error:  # whatever it is, it is what a user would have met
        where = [f"{at.filename.rpartition('/')[2]}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__} in {' '.join(where[-6:])}: {error}"
    return None


def _check_recovery_is_idempotent(disk: SimDisk, now_ms: int, shards: int) -> None:
    """A second recovery leaves every byte as the first did (G47). Where the number of shards is another, a start moves
    what the old ones hold with a checkpoint, and the next ones tidy up: then it comes to rest a little later."""
    clock = ManualClock(now_ms * 1_000)
    snapshots = _snapshots(disk)
    left: dict[str, bytes] = {}
    changed: set[str] = set()
    for number in range(IDEMPOTENCE_CHECKS_MAX):
        disk = disk.reboot()
        open_engine(disk, clock, shards)
        files = {name: content for name, content in disk.tree().items() if not name.endswith(".lock")}
        changed = {name for name, _ in files.items() ^ left.items()}
        left = files
        if number and not changed:
            return
        if number and snapshots == _snapshots(disk):
            break
    raise RuleViolated(f"recovery does not come to rest: another one changed {sorted(changed)}")


def _snapshots(disk: SimDisk) -> list[str]:
    return [name for name in disk.tree() if name.startswith(f"{PATH}/meta/")]


def _check_usable(disk: SimDisk, oracle: Oracle, found: dict[str, TopicView], now_ms: int, shards: int) -> None:
    """A second recovery finds what the first did (G47); then the engine is of use again."""
    clock = ManualClock(now_ms * 1_000)
    log = open_engine(disk, clock, shards)
    require(read_engine(log) == found, "the second recovery reads something else")
    written = _write_everywhere(log, oracle, found)
    log.close()
    log = open_engine(disk, clock, shards, read_only=True)
    for name, seen in read_engine(log).items():
        kept = {} if seen.config["durability"] == "ephemeral" else written[name].rows
        require(seen.rows == kept, f"{name}: another state after an append and a close")
        require(seen.head == written[name].head, f"{name}: the head is {seen.head} after an append and a close")
    log.close()


def _write_everywhere(log: Engine, oracle: Oracle, found: dict[str, TopicView]) -> dict[str, TopicView]:
    """One more record in every topic: it gets a seq that nobody had, and can be read."""
    for name, seen in found.items():
        topic = log.topic(name, create=False)
        seq = topic.append(b"after the crash", tag="x:1").first_seq
        life = oracle.lives[name]
        require(
            seq > max(life.top, seen.head), f"{name}: the next seq is {seq}, {max(life.top, seen.head)} was given out"
        )
        read = topic.read(seq - 1).records
        require([record.data for record in read] == [b"after the crash"], f"{name}: {read} was read at {seq}")
    return read_engine(log)


class DiskFault(NamedTuple):
    """One way in which a disk can refuse a call; `words` is how a trace names the calls that can meet it."""

    name: str
    words: str
    plant: Callable[[SimDisk, int], None]  # let the n-th such call fail
    forgets: bool = False  # the page cache loses what was pending, so that even a kill does


def _failing_sync(mode: SyncMode) -> DiskFault:
    return DiskFault(f"sync {mode}", "sync ", lambda disk, at: disk.fail_sync(mode, at=at), forgets=mode == "reverted")


SYNCS = tuple(_failing_sync(mode) for mode in ("dropped", "reverted", "kept"))
FAULTS = (
    *SYNCS,
    DiskFault("sync_dir", "sync_dir ", lambda disk, at: disk.fail("sync_dir", at=at)),
    DiskFault("write EIO", "write ", lambda disk, at: disk.fail("write", at=at, partial=40)),
    DiskFault("write ENOSPC", "write ", lambda disk, at: disk.fail("write", at=at, error=ENOSPC, partial=60)),
    DiskFault("write ENOSPC late", "write ", lambda disk, at: disk.fail("write", at=at, error=ENOSPC, partial=1 << 20)),
    DiskFault("create ENOSPC", "create ", lambda disk, at: disk.fail("create", at=at, error=ENOSPC)),
    DiskFault("rename", "rename ", lambda disk, at: disk.fail("rename", at=at)),
)


def fail_each(
    fault: DiskFault,
    letters: Sequence[Operation],
    *,
    seed: object,
    shards: int = 1,
    limit: int | None,
    stats: SweepStats,
    how: Arrangement | None = None,
) -> SweepStats:
    """Run a history once for every call that this fault can strike: go on as far as the engine lets, then judge what
    a kill and what a power cut leave."""
    words = " ".join(letter.__name__ for letter in letters)
    shards = shards if how is None else how.shards
    where = f"{shards} shards" if how is None else str(how)

    def run(at: int | None) -> int:
        random = Random(f"{seed}/{words}")
        bench = EngineHarness(SimDisk(trace=True), shards=shards, faulty=at is not None)
        prologue(bench, random, how)
        before = len(bench.disk.trace)
        if at is not None:
            fault.plant(bench.disk, at)
            if fault in SYNCS:
                bench.struck = InjectedFailure(before, at, fault.forgets)
        with suppress(Error):  # an engine that does not open again ends the history
            run_history(bench, letters, random, "" if how is None else how.topics)
        calls = sum(op.startswith(fault.words) for op in bench.disk.trace[before:])
        if at is not None:
            stats.instants += 1
            _check_crash_states(bench, fault, Random(f"{seed}/{words}/{at}"), limit, stats)
        return calls

    for at in range(1, run(None) + 1):
        try:
            run(at)
        except RuleViolated as wrong:
            stats.failures.append(f"seed {seed!r}, {where}, {words}, call {at} with {fault.name}: {wrong}")
            break
    return stats


def _check_crash_states(
    harness: EngineHarness, fault: DiskFault, random: Random, limit: int | None, stats: SweepStats
) -> None:
    for image in harness.disk.images(random=random, limit=limit):
        stats.states += 1
        wrong = check_crash_state(
            image.disk, harness.oracle, harness.now_ms, harness.shards, thorough=stats.states % 3 == 0
        )
        require(wrong is None, f"{image.label}: {wrong}")
    stats.states += 1
    wrong = check_crash_state(
        harness.disk.reboot(), harness.oracle, harness.now_ms, harness.shards, thorough=True, cut=fault.forgets
    )
    require(wrong is None, f"after a kill: {wrong}")
