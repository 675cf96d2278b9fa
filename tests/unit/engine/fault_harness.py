"""One scenario on one simulated disk, as often as wanted from the same start; and what each outcome means.

A scenario is run once on a healthy disk to learn which calls it makes and what its topics are before
and after. Then it is run again for each call that its row is about, with that call failing, or with
the power gone before and after it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from tests.unit.engine.fault_rows import PATH, ROWS, SETTINGS, Scenario, Step, fill_engine

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Record, Topic, TopicConfig
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.machine import START_US


class TopicView(NamedTuple):
    """One topic as a reader sees it."""

    id: int
    config: TopicConfig
    head: int
    floor: int
    rows: dict[int, Record]


View: TypeAlias = dict[str, TopicView]
Arm: TypeAlias = Callable[[SimDisk], None]


class Run(NamedTuple):
    """What came of an act."""

    disk: SimDisk
    clock: ManualClock
    log: Engine | None  # None: it could not be opened
    error: BaseException | None


class InjectedFailure(NamedTuple):
    """One call of an act that is to fail."""

    words: str
    step: Step
    arm: Arm


def open_engine(disk: SimDisk, clock: ManualClock, **settings: Any) -> Engine:
    return engine_of(tidelog.open(PATH, disk=disk, clock=clock, threads=False, **SETTINGS | settings))


def view(log: Engine, clock: ManualClock) -> View:
    """Every topic as a reader sees it, at a time at which no more of it expires."""
    now_us = clock.now_us()
    clock.set_us(START_US)
    try:
        return {state.topic: read_topic(log.topic(state.topic, create=False)) for state in log.topics()}
    finally:
        clock.set_us(now_us)


def read_topic(topic: Topic) -> TopicView:
    """A topic read from the start; its pages and its counts agree with each other (E5, E8)."""
    rows: dict[int, Record] = {}
    state = topic.state()
    cursor = 0
    while True:
        page = topic.read(cursor)
        assert sum(page.counts) == page.next_from_seq - cursor, f"{topic.name} from {cursor}: {page.counts}"
        assert (page.gap is not None) == (cursor + 1 < state.evict_floor), f"{topic.name} from {cursor}: {page.gap}"
        rows |= {record.seq: record for record in page.records}
        if page.caught_up:
            break
        assert page.next_from_seq > cursor, f"{topic.name}: no step forward from {cursor}"
        cursor = page.next_from_seq
    earliest = min(rows, default=state.head_seq + 1)
    assert (state.count, state.earliest_seq) == (len(rows), earliest), f"{state}, {sorted(rows)} can be read"
    assert state.evict_floor <= earliest, state
    return TopicView(state.id, state.config, state.head_seq, state.evict_floor, rows)


class FaultHarness:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        disk, clock = SimDisk(), ManualClock()
        log = open_engine(disk, clock)
        fill_engine(log)
        scenario.prepare(log, clock)
        if scenario.spoil is None:
            log.close()
        self._start_us = clock.now_us()
        self._start = disk.reboot() if scenario.spoil is None else scenario.spoil(disk)
        run = self.ready(trace=True)
        if scenario.opening:
            log = open_engine(run.disk, run.clock, **scenario.settings)
            self.steps = [Step.parse(words) for words in run.disk.trace]
            self.before = self.after = view(log, run.clock)
        else:
            assert run.log is not None
            self.before = view(run.log, run.clock)
            began = len(run.disk.trace)
            scenario.act(run.log, run.clock)
            self.steps = [Step.parse(words) for words in run.disk.trace[began:]]
            self.after = view(run.log, run.clock)
        self.picks = list(scenario.picks(self.steps))
        self.base = self._base()
        self.between = [self.before, *self._halfway(), self.after]

    def _base(self) -> View:
        """What was durable before the lead."""
        disk, clock = self.new_machine()
        return view(self.open(disk, clock), clock)

    def _halfway(self) -> list[View]:
        if self.scenario.halfway is None:
            return []
        run = self.ready()
        assert run.log is not None
        self.scenario.halfway(run.log, run.clock)
        return [view(run.log, run.clock)]

    def new_machine(self, *, trace: bool = False) -> tuple[SimDisk, ManualClock]:
        disk = self._start.reboot()
        disk._tracing = trace
        return disk, ManualClock(self._start_us)

    def open(self, disk: SimDisk, clock: ManualClock, **settings: Any) -> Engine:
        return open_engine(disk, clock, **self.scenario.settings | settings)

    def ready(self, *, trace: bool = False) -> Run:
        """The moment before the act; not opened yet where the opening is the act."""
        disk, clock = self.new_machine(trace=trace)
        if self.scenario.opening:
            return Run(disk, clock, None, None)
        log = self.open(disk, clock)
        self.scenario.lead(log, clock)
        return Run(disk, clock, log, None)

    def run(self, arm: Arm) -> Run:
        disk, clock, log, _ = self.ready()
        arm(disk)
        try:
            if log is None:
                log = self.open(disk, clock)
            else:
                self.scenario.act(log, clock)
        except Exception as error:  # whatever it is, it is what a caller would have met
            return Run(disk, clock, log, error)
        return Run(disk, clock, log, None)

    # Which calls fail.

    def failures(self, calls: str, times: str, error: int = errno.EIO, mode: Any = None) -> Iterator[InjectedFailure]:
        """Each of the row's calls of these kinds in turn, failing once or for ever."""
        count = 1 if times == "once" else None
        for number in self.picks:
            step = self.steps[number]
            if step.call not in calls.split():
                continue
            target = _target(step)
            at = sum(1 for other in self.steps[: number + 1] if other.call == step.call and target in other.path)

            def arm(disk: SimDisk, step: Step = step, at: int = at, target: str = target) -> None:
                if mode is not None:
                    disk.fail_sync(mode, at, count, target)
                else:
                    disk.fail(step.call, at, error, count, target, partial=step.size * 3 // 5)  # type: ignore[arg-type]

            yield InjectedFailure(f"{step.call} {step.path}, {target} number {at} {times}", step, arm)


def _target(step: Step) -> str:
    """What fails together for ever: one shard, one kind of file, one directory."""
    if "/wal/shard-" in step.path:
        return step.path[step.path.index("wal/shard-") :][: len("wal/shard-00")]
    name = step.path.rpartition("/")[2].removesuffix(".tmp").removesuffix(".rebuilding")
    if name.startswith("seg-"):
        return name[name.index(".") :]
    return "/meta" if "/meta" in step.path else step.path


@cache
def harnesses(row: str) -> list[FaultHarness]:
    return [FaultHarness(scenario) for scenario in ROWS[row]]


def scenarios_for(row: str, column: str) -> list[FaultHarness]:
    """The scenarios of a row that a column is tried on."""
    found = [harness for harness in harnesses(row) if harness.scenario.serves(column)]
    assert found, f"nothing provokes {row}-{column}"
    return found


# ── comparing ─────────────────────────────────────────────────────────────────────────────────────


def differs(seen: View, states: Sequence[View], *, least: View | None = None) -> str | None:
    """Why no topic-by-topic choice of these states is what is seen; None where it is.

    With `least`, of a disk-class topic any prefix will do that is not shorter than it was there (G3).
    """
    names = {name for state in states for name in state}
    always = {name for name in names if all(name in state for state in states)}
    if not always <= seen.keys() <= names:
        return f"topics are {sorted(seen)}, expected {sorted(always)} and perhaps {sorted(names - always)}"
    for name, found in seen.items():
        wanted = [state[name] for state in states if name in state]
        if any(_same(found, expected) for expected in wanted):
            continue
        known = {} if least is None else least
        soft = least is not None and found.config.durability == "disk"
        if soft and any(_prefix(found, expected, known.get(name)) for expected in wanted):
            continue
        return f"topic {name} holds {_format_view(found)}, expected {' or '.join(map(_format_view, wanted))}"
    return None


def _same(seen: TopicView, expected: TopicView) -> bool:
    return seen._replace(head=0) == expected._replace(head=0) and seen.head >= expected.head


def _prefix(seen: TopicView, expected: TopicView, least: TopicView | None) -> bool:
    first = sorted(expected.rows)[: len(seen.rows)]
    whole = {seq: expected.rows[seq] for seq in first} == seen.rows
    held = set(least.rows) if least is not None else set()
    return whole and held <= set(first) and seen.head >= max(expected.rows, default=0)


def _format_view(seen: TopicView) -> str:
    rows = {seq: record.data for seq, record in seen.rows.items()}
    return f"{rows} with head {seen.head} and floor {seen.floor}"


def expect_state(seen: View, states: Sequence[View], what: str, *, least: View | None = None) -> None:
    wrong = differs(seen, states, least=least)
    assert wrong is None, f"{what}: {wrong}"
