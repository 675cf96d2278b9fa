"""The sweep: before every disk operation of a history, every image that a power cut could leave, judged.

An observer on the running disk looks at each instant, so the history runs once. Each image is a
disk of its own: the log is opened on it as after a reboot, held against the oracle, closed,
opened again, and must not have changed a byte. Images that are alike are judged once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from tests.crash.oracle import Oracle
from tests.crash.workloads import PATH, LogHarness, Workload, open_log, survivors

from tidelog.testing import ManualClock, SimDisk


@dataclass(slots=True)
class SweepStats:
    instants: int = 0
    states: int = 0
    failures: list[str] = field(default_factory=list)


def sweep(
    codec: str,
    workload: Workload,
    *,
    sync: str,
    limit: int | None,
    seed: int = 0,
    again: int = 0,
    step: int = 1,
    stats: SweepStats | None = None,
) -> SweepStats:
    """Run a history and judge its crash states up to the first failure. `again`: for how many images of each instant
    the power is also cut at every operation of the recovery itself. `step`: one instant in so many is judged, drawn by
    seed, and the last one."""
    disk, oracle, stats = SimDisk(trace=True), Oracle(), stats or SweepStats()
    seen: set[tuple[bytes, int]] = set()
    version = 0
    told: object = None

    def is_new(image: SimDisk) -> bool:
        """Count a state, unless the same one was judged before and by the same rules."""
        key = (image.digest(), version)
        if key in seen:
            return False
        seen.add(key)
        stats.states += 1
        return True

    draws = Random(f"{seed}/{codec}/{workload.__name__}/{sync}")

    def examine(op: int, *, last: bool = False) -> None:
        nonlocal version, told
        may = {seq: set(values) for seq, values in oracle.may.items()}
        now = (dict(oracle.must), may, oracle.next_min, list(oracle.whole))
        if now != told:
            told, version = now, version + 1
        if step > 1 and not last and draws.randrange(step):
            return
        stats.instants += 1
        nested = again
        for image in disk.images(random=Random(f"{seed}/{op}"), limit=limit):
            if not is_new(image.disk):
                continue
            wrong = None
            if nested:
                nested -= 1
                wrong = _crash_in_recovery(codec, image.disk.reboot(), oracle, sync, Random(f"{seed}/{op}"), is_new)
            if (wrong := wrong or judge(codec, image.disk, oracle, sync)) is not None:
                where = disk.trace[-1] if disk.trace else "the start"
                stats.failures.append(
                    f"{codec} {workload.__name__} after op {op - 1} ({where}), {image.label}: {wrong}"
                )
                raise StopHistory

    disk.on_op = examine
    try:
        workload(LogHarness(codec, disk, oracle, sync=sync))
        examine(disk.op_count + 1, last=True)
    except StopHistory:
        pass
    return stats


class StopHistory(BaseException):
    """Enough failures: leave the history at once, through every except clause of the library."""


def _crash_in_recovery(
    codec: str, disk: SimDisk, oracle: Oracle, sync: str, random: Random, is_new: Callable[[SimDisk], bool]
) -> str | None:
    wrongs: list[str] = []

    def examine(op: int) -> None:
        for image in disk.images(random=random, limit=3):
            if is_new(image.disk) and (wrong := judge(codec, image.disk, oracle, sync)) is not None:
                wrongs.append(f"and again in recovery before op {op}, {image.label}: {wrong}")
                raise StopHistory

    disk.on_op = examine
    with suppress(StopHistory):
        if disk.stat(PATH) is not None:
            open_log(codec, disk, ManualClock(), sync).close()
    return wrongs[0] if wrongs else None


def judge(codec: str, disk: SimDisk, oracle: Oracle, sync: str) -> str | None:
    """Open a crash image as a restarted process would; what is wrong with it, or None."""
    clock = ManualClock()
    if disk.stat(PATH) is None:
        return "the directory of an acked log is gone" if oracle.must else None
    log = open_log(codec, disk, clock, sync)
    # The laminar index may reach the disk before the store under `interval`: a record that was acked but not synced
    # is then known and damaged. That is detected loss of what was never promised; anything else is not.
    lenient = codec == "laminar" and sync == "interval"
    found = survivors(log, skip_damage=lenient)
    wrong = oracle.judge(found, log.highest)
    if log.report.damage and not lenient:
        wrong = wrong or f"a crash is reported as damage: {log.report.damage[0]}"
    log.close()
    if wrong is not None:
        return wrong
    before = disk.tree()
    log = open_log(codec, disk, clock, sync)
    again = survivors(log, skip_damage=lenient)
    if not log.report.clean and not lenient:
        wrong = f"the second opening had work to do: {log.report.lines()}"
    data = b"after the crash"
    seq = log.append(data)
    written = log.read(seq).data
    log.close()
    if wrong is not None:
        return wrong
    if again != found:
        return "the second opening reads other records"
    if written != data or seq in found:
        return f"an append after the crash got seq {seq} and reads {written!r}"
    changed = [name for name, content in before.items() if not disk.tree().get(name, b"").startswith(content)]
    changed = [name for name in changed if not _is_replaced_on_append(name)]
    return f"reopening changed {changed}" if changed else None


def _is_replaced_on_append(name: str) -> bool:
    """Files that the append after the reopening replaces rather than extends."""
    return name.endswith((".lock", ".foot", ".idx", ".manifest"))
