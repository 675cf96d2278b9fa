"""What each outcome of the fault matrix means: for an operation that met an error, and for what a restart finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random

import pytest
from tests.unit.engine.fault_bench import Bench, Run, Seen, Strike, View, expect, view
from tests.unit.engine.fault_rows import PATH

from tidelog.engine import Engine, Report
from tidelog.errors import Damaged, DiskFull, Error, Latched, Unavailable
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.clock import START_US
from tidelog.wal import shard_of

# ── restarting ────────────────────────────────────────────────────────────────────────────────────


def restarts(disk: SimDisk) -> Iterator[tuple[str, SimDisk]]:
    """What a new process finds after a power cut, and after a kill."""
    yield "nothing unsynced survived", disk.crash_image("none")
    yield "after a kill", disk.reboot()
    yield "everything survived", disk.crash_image("all")
    yield "something survived", disk.crash_image(Random(0))


def write_everywhere(log: Engine, seen: Mapping[str, Seen], what: str, shards: set[int] | None = None) -> None:
    """Each topic takes a record, with a seq that nobody had, and shows it."""
    count = len(log._shared.shards)
    for name, before in seen.items():
        if shards is not None and shard_of(before.id, count) not in shards:
            continue
        topic = log.topic(name, create=False)
        seq = topic.append(b"goes on", tag="x").first_seq
        assert seq > before.head, f"{what}: {name} gave out seq {seq} again"
        assert [record.data for record in topic.read(seq - 1).records] == [b"goes on"], what


def judge(bench: Bench, image: SimDisk, states: Sequence[View], what: str, *, least: View | None = None) -> Report:
    """Open what a restart finds: it is one of these states, and no damage is told."""
    clock = ManualClock(START_US)
    log = bench.open(image, clock)
    assert log.report.damage == [], f"{what}: {log.report.damage}"
    expect(view(log, clock), states, what, least=least)
    return log.report


def judge_use(bench: Bench, image: SimDisk, what: str) -> None:
    """What was judged can be written to, closed, and opened again."""
    image, clock = image.reboot(), ManualClock(START_US)
    log = bench.open(image, clock)
    write_everywhere(log, view(log, clock), what)
    held = view(log, clock)
    log.close()
    again = bench.open(image, clock)
    assert again.report.clean, f"{what}, opened again: {again.report.lines()}"
    expect(view(again, clock), [held], f"{what}, closed and opened again")


def survives(
    bench: Bench, disk: SimDisk, states: Sequence[View], what: str, *, least: View | None = None, use: bool = False
) -> None:
    """Every restart finds one of these states; images that are alike are judged once. `use`: and can be used."""
    seen: set[bytes] = set()
    for words, image in restarts(disk):
        found = image.digest()
        if found not in seen:
            judge(bench, image, states, f"{what}, {words}", least=least)
            if use and not seen:
                judge_use(bench, image, f"{what}, {words}")
            seen.add(found)


# ── the outcomes of errors ────────────────────────────────────────────────────────────────────────


def goes_on(bench: Bench, run: Run, what: str) -> None:
    """The disk is healthy again: what was refused works now, so does everything else, and a restart agrees."""
    run.disk.heal()
    log = run.log
    if log is None:
        log = bench.open(run.disk, run.clock)
    elif run.error is not None:
        bench.scenario.act(log, run.clock)
    seen = view(log, run.clock)
    write_everywhere(log, seen, what)
    log.checkpoint()
    log.tick()
    judge(bench, run.disk.crash_image("none"), [view(log, run.clock)], f"{what}, gone on")
    log.close()


def expect_ok(bench: Bench, strike: Strike) -> None:
    what = strike.words
    run = bench.run(strike.arm)
    assert run.error is None, f"{what}: {run.error!r}"
    assert run.log is not None
    expect(view(run.log, run.clock), [bench.after], what)
    survives(bench, run.disk, [bench.after], what, least=bench.base, use=True)
    goes_on(bench, run, what)


def expect_refusal(bench: Bench, strike: Strike) -> None:
    """ERR: an error which says that nothing was written, nothing visible, not latched; it works again later."""
    what = strike.words
    run = bench.run(strike.arm)
    assert isinstance(run.error, Error), f"{what}: {run.error!r}"
    if run.log is None:
        assert isinstance(run.error, Damaged | DiskFull), f"{what}: {run.error!r}"
        survives(bench, run.disk, [bench.after], what, least=bench.base, use=True)
        goes_on(bench, run, what)
        return
    assert isinstance(run.error, Unavailable), f"{what}: {run.error!r}"
    assert (run.error.retryable, run.error.written) == (True, False), f"{what}: {run.error!r}"
    assert "nothing was written" in str(run.error) or "every record is safe" in str(run.error), run.error
    seen = view(run.log, run.clock)
    expect(seen, [bench.before], what)
    survives(bench, run.disk, [bench.before], what, least=bench.base, use=True)
    if bench.scenario.derived:
        write_everywhere(run.log, seen, f"{what}, still failing")  # G29
    goes_on(bench, run, what)


def expect_latch(bench: Bench, strike: Strike) -> None:
    """RO: the shard takes nothing until a restart; other shards and all readers go on; what was acked is safe."""
    what = strike.words
    run = bench.run(strike.arm)
    assert isinstance(run.error, Latched), f"{what}: {run.error!r}"
    assert run.log is not None
    expect(view(run.log, run.clock), [bench.before], what)
    survives(bench, run.disk, bench.between, what, least=bench.base, use=True)
    struck = int(strike.step.path.partition("/shard-")[2][:2])
    for words in ("still failing", "healthy again"):
        _expect_latched(run, struck, f"{what}, {words}")
        run.disk.heal()
    held = view(run.log, run.clock)
    mine = {name for name, seen in held.items() if shard_of(seen.id, len(run.log._shared.shards)) == struck}
    assert 0 < len(mine) < len(held), f"{what}: {sorted(held)}"
    states = [state | {name: seen for name, seen in held.items() if name not in mine} for state in bench.between]
    with suppress(Latched):  # where something of class disk was acked and the sync that failed was to make it durable
        run.log.close()
    # What the other shard took was closed with it and is durable; of this one, what was acked before.
    least = bench.base | {name: seen for name, seen in held.items() if name not in mine}
    survives(bench, run.disk, states, f"{what}, closed", least=least)


def _expect_latched(run: Run, struck: int, what: str) -> None:
    log, clock = run.log, run.clock
    assert log is not None
    count = len(log._shared.shards)
    assert [shard.latched for shard in log._shared.shards] == [number == struck for number in range(count)], what
    seen = view(log, clock)
    before = run.disk.digest()
    for name, state in seen.items():
        if shard_of(state.id, count) != struck:
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
    snapshots = run.disk.names(f"{PATH}/meta")
    with pytest.raises(Latched):
        log.checkpoint()
    assert run.disk.names(f"{PATH}/meta") == snapshots, f"{what}: a snapshot without its barrier (G43)"
    expect(view(log, clock), [seen], what)
    write_everywhere(log, seen, what, {number for number in range(count) if number != struck})


def expect_no_opening(bench: Bench, strike: Strike) -> None:
    """REF: refused, unlocked, and a healthy disk gives what an undisturbed opening would have given."""
    what = strike.words
    run = bench.run(strike.arm)
    assert run.log is None, f"{what}: it was opened"
    assert isinstance(run.error, Error), f"{what}: {run.error!r}"
    survives(bench, run.disk, [bench.after], what, least=bench.base)
    goes_on(bench, run, what)


EXPECT: dict[str, Callable[[Bench, Strike], None]] = {
    "OK": expect_ok,
    "ERR": expect_refusal,
    "RO": expect_latch,
    "REF": expect_no_opening,
}
