"""What each outcome of the fault matrix means: for an operation that met an error, and for what a restart finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random

import pytest
from tests.unit.engine.fault_harness import FaultHarness, InjectedFailure, Run, TopicView, View, expect_state, view
from tests.unit.engine.fault_rows import PATH

from tidelog.engine import Engine, RecoveryReport
from tidelog.errors import Damaged, DiskFull, Error, Latched, Unavailable
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.machine import START_US
from tidelog.wal import shard_for_topic

# ── restarting ────────────────────────────────────────────────────────────────────────────────────


def restarts(disk: SimDisk) -> Iterator[tuple[str, SimDisk]]:
    """What a new process finds after a power cut, and after a kill."""
    yield "nothing unsynced survived", disk.crash_image("none")
    yield "after a kill", disk.reboot()
    yield "everything survived", disk.crash_image("all")
    yield "something survived", disk.crash_image(Random(0))


def write_everywhere(log: Engine, seen: Mapping[str, TopicView], what: str, shards: set[int] | None = None) -> None:
    """Each topic takes a record, with a new seq, and shows it."""
    count = len(log._context.shards)
    for name, before in seen.items():
        if shards is not None and shard_for_topic(before.id, count) not in shards:
            continue
        topic = log.topic(name, create=False)
        seq = topic.append(b"goes on", tag="x").first_seq
        assert seq > before.head, f"{what}: {name} gave out seq {seq} again"
        assert [record.data for record in topic.read(seq - 1).records] == [b"goes on"], what


def check_restart(
    harness: FaultHarness, image: SimDisk, states: Sequence[View], what: str, *, least: View | None = None
) -> RecoveryReport:
    """Open what a restart finds: it is one of these states, and no damage is reported."""
    clock = ManualClock(START_US)
    log = harness.open(image, clock)
    assert log.report.damage == [], f"{what}: {log.report.damage}"
    expect_state(view(log, clock), states, what, least=least)
    return log.report


def check_usable(harness: FaultHarness, image: SimDisk, what: str) -> None:
    """What was judged can be written to, closed, and opened again."""
    image, clock = image.reboot(), ManualClock(START_US)
    log = harness.open(image, clock)
    write_everywhere(log, view(log, clock), what)
    held = view(log, clock)
    log.close()
    again = harness.open(image, clock)
    assert again.report.clean, f"{what}, opened again: {again.report.lines()}"
    expect_state(view(again, clock), [held], f"{what}, closed and opened again")


def check_restarts(
    harness: FaultHarness,
    disk: SimDisk,
    states: Sequence[View],
    what: str,
    *,
    least: View | None = None,
    use: bool = False,
) -> None:
    """Every restart finds one of these states; images that are alike are judged once. `use`: and can be used."""
    seen: set[bytes] = set()
    for words, image in restarts(disk):
        found = image.digest()
        if found not in seen:
            check_restart(harness, image, states, f"{what}, {words}", least=least)
            if use and not seen:
                check_usable(harness, image, f"{what}, {words}")
            seen.add(found)


# ── the outcomes of errors ────────────────────────────────────────────────────────────────────────


def check_recovers(harness: FaultHarness, run: Run, what: str) -> None:
    """The disk is healthy again: what was refused works now, so does everything else, and a restart agrees."""
    run.disk.clear_faults()
    log = run.log
    if log is None:
        log = harness.open(run.disk, run.clock)
    elif run.error is not None:
        harness.scenario.act(log, run.clock)
    seen = view(log, run.clock)
    write_everywhere(log, seen, what)
    log.checkpoint()
    log.tick()
    check_restart(harness, run.disk.crash_image("none"), [view(log, run.clock)], f"{what}, gone on")
    log.close()


def expect_ok(harness: FaultHarness, failure: InjectedFailure) -> None:
    what = failure.words
    run = harness.run(failure.arm)
    assert run.error is None, f"{what}: {run.error!r}"
    assert run.log is not None
    expect_state(view(run.log, run.clock), [harness.after], what)
    check_restarts(harness, run.disk, [harness.after], what, least=harness.base, use=True)
    check_recovers(harness, run, what)


def expect_refusal(harness: FaultHarness, failure: InjectedFailure) -> None:
    """ERR: an error which says that nothing was written, nothing visible, not latched; it works again later."""
    what = failure.words
    run = harness.run(failure.arm)
    assert isinstance(run.error, Error), f"{what}: {run.error!r}"
    if run.log is None:
        assert isinstance(run.error, Damaged | DiskFull), f"{what}: {run.error!r}"
        check_restarts(harness, run.disk, [harness.after], what, least=harness.base, use=True)
        check_recovers(harness, run, what)
        return
    assert isinstance(run.error, Unavailable), f"{what}: {run.error!r}"
    assert (run.error.retryable, run.error.written) == (True, False), f"{what}: {run.error!r}"
    assert "nothing was written" in str(run.error) or "every record is safe" in str(run.error), run.error
    seen = view(run.log, run.clock)
    expect_state(seen, [harness.before], what)
    check_restarts(harness, run.disk, [harness.before], what, least=harness.base, use=True)
    if harness.scenario.derived:
        write_everywhere(run.log, seen, f"{what}, still failing")  # G29
    check_recovers(harness, run, what)


def expect_latch(harness: FaultHarness, failure: InjectedFailure) -> None:
    """RO: the shard takes nothing until a restart; other shards and all readers go on; what was acked is safe."""
    what = failure.words
    run = harness.run(failure.arm)
    assert isinstance(run.error, Latched), f"{what}: {run.error!r}"
    assert run.log is not None
    expect_state(view(run.log, run.clock), [harness.before], what)
    check_restarts(harness, run.disk, harness.between, what, least=harness.base, use=True)
    struck = int(failure.step.path.partition("/shard-")[2][:2])
    for words in ("still failing", "healthy again"):
        _expect_latched(run, struck, f"{what}, {words}")
        run.disk.clear_faults()
    held = view(run.log, run.clock)
    mine = {name for name, seen in held.items() if shard_for_topic(seen.id, len(run.log._context.shards)) == struck}
    assert 0 < len(mine) < len(held), f"{what}: {sorted(held)}"
    states = [state | {name: seen for name, seen in held.items() if name not in mine} for state in harness.between]
    with suppress(Latched):  # where something of class disk was acked and the sync that failed was to make it durable
        run.log.close()
    # What the other shard took was closed with it and is durable; of this one, what was acked before.
    least = harness.base | {name: seen for name, seen in held.items() if name not in mine}
    check_restarts(harness, run.disk, states, f"{what}, closed", least=least)


def _expect_latched(run: Run, struck: int, what: str) -> None:
    log, clock = run.log, run.clock
    assert log is not None
    count = len(log._context.shards)
    assert [shard.is_latched for shard in log._context.shards] == [number == struck for number in range(count)], what
    seen = view(log, clock)
    before = run.disk.digest()
    for name, state in seen.items():
        if shard_for_topic(state.id, count) != struck:
            continue
        topic = log.topic(name, create=False)
        writes: list[Callable[[], object]] = [
            lambda topic=topic: topic.append(b"x"),  # type: ignore[misc]
            lambda topic=topic: topic.append([b"x", b"y"], key="k"),  # type: ignore[misc]
            lambda topic=topic: topic.append_nowait(b"x"),  # type: ignore[misc]
            lambda topic=topic: topic.delete(before_seq=1 << 40),  # type: ignore[misc]
            lambda name=name: log.topic(name, cap_records=1),  # type: ignore[misc]
            lambda name=name: log.drop(name),  # type: ignore[misc]
        ]
        for write in writes:
            with pytest.raises(Latched, match="wrote nothing"):
                write()
    assert run.disk.digest() == before, f"{what}: a latched shard writes nothing"
    snapshots = run.disk.list_dir(f"{PATH}/meta")
    with pytest.raises(Latched):
        log.checkpoint()
    assert run.disk.list_dir(f"{PATH}/meta") == snapshots, f"{what}: a snapshot without its barrier (G43)"
    expect_state(view(log, clock), [seen], what)
    write_everywhere(log, seen, what, {number for number in range(count) if number != struck})


def expect_no_opening(harness: FaultHarness, failure: InjectedFailure) -> None:
    """REF: refused, unlocked, and a healthy disk gives what an undisturbed opening would have given."""
    what = failure.words
    run = harness.run(failure.arm)
    assert run.log is None, f"{what}: it was opened"
    assert isinstance(run.error, Error), f"{what}: {run.error!r}"
    check_restarts(harness, run.disk, [harness.after], what, least=harness.base)
    check_recovers(harness, run, what)


EXPECT: dict[str, Callable[[FaultHarness, InjectedFailure], None]] = {
    "OK": expect_ok,
    "ERR": expect_refusal,
    "RO": expect_latch,
    "REF": expect_no_opening,
}
