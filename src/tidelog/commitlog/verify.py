"""[shell] Looking at a log without changing it: what lies there, and whether every checksum and invariant holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tidelog.commitlog.codec import Fault
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.offsets import FILE as OFFSETS_FILE
from tidelog.commitlog.recovery import Damage, expected_sides, faults_of, look
from tidelog.commitlog.segment import Sealed
from tidelog.commitlog.state import State
from tidelog.disk.seam import Disk
from tidelog.errors import Corrupt, Unavailable
from tidelog.formats.rows import Rows

_TRIES = 16


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    base: int
    stop: int
    sealed: bool
    data_bytes: int
    side_bytes: int
    index: str  # "ok", or what is wrong with it
    first_us: int | None
    last_us: int | None


@dataclass(slots=True)
class Verdict:
    """Everything that verification found wrong; nothing when `ok`."""

    codec: str
    segments: int = 0
    first: int = 0  # seqs lie in [first, stop)
    stop: int = 0
    records: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what opening for writing would mend by itself

    @property
    def ok(self) -> bool:
        return not self.damage


def inspect(log: SegmentedLog) -> list[SegmentInfo]:
    """One line per segment, without reading the data."""
    state = log.state
    found = []
    for segment in state.sealed:
        fault, _ = state.codec.sealed_fault(segment.shape())
        times = segment.times()
        found.append(
            SegmentInfo(
                segment.base,
                segment.stop,
                True,
                segment.size,
                segment.side_bytes,
                "rebuilt" if segment.override else fault or "ok",
                times[0] if times else None,
                times[1] if times else None,
            )
        )
    active = state.active
    rebuilt = any(name.startswith(state.codec.side_name(active.base, "")) for name in state.report.rebuilt)
    has_times = state.codec.birth_suffix is None and active.next_seq > active.base
    found.append(
        SegmentInfo(
            active.base,
            active.next_seq,
            False,
            active.size,
            active.side_bytes,
            "rebuilt" if rebuilt else "ok",
            active.born_us if has_times else None,
            active.last_ts_us if has_times else None,
        )
    )
    return found


def verify(
    path: str,
    codec: str | None = None,
    *,
    disk: Disk | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Read every byte of a log and compare it with every checksum and rule. Changes nothing.

    What looks wrong beside a writer that changed the directory meanwhile is looked at again.
    """
    for _ in range(_TRIES):
        log = SegmentedLog.open(path, codec, read_only=True, disk=disk, verify_on_open=False)
        verdict = _verify(log, progress)
        if verdict is not None:
            return verdict
    raise Unavailable(f"{path} changes faster than it can be verified; nothing was changed, try again")


def _verify(log: SegmentedLog, progress: Callable[[int, int], None] | None) -> Verdict | None:
    """Verify an open log and close it; None where something looks wrong and the directory has changed since."""
    try:
        state = log.state
        verdict = Verdict(log.codec, len(state.sealed) + 1, log.lowest, log.highest, bytes=log.size)
        verdict.damage += state.report.damage
        _look_at_the_tail(state, verdict)
        times = _Times()
        try:
            log.offsets.groups()
        except Corrupt as error:
            verdict.damage.append(Damage(OFFSETS_FILE, Fault(0, 0, error.pos, error.reason)))
        verdict.notes += state.report.notes
        verdict.notes += [f"{name.removesuffix(' (in memory)')} must be rebuilt" for name in state.report.rebuilt]
        for number, segment in enumerate(state.sealed):
            if progress is not None:
                progress(number, verdict.segments)
            _verify_sealed(state, segment, verdict, times)
        for rows in log.batches(state.active.base, skip_damage=True):
            verdict.records += len(rows)
            times.look(rows)
        verdict.notes += times.notes()
        if progress is not None:
            progress(verdict.segments, verdict.segments)
        if not verdict.ok and look(state.files) != state.seen:
            return None
        return verdict
    finally:
        log.close()


class _Times:
    """Looks for times that step back. That is no damage: the clock of another program did."""

    def __init__(self) -> None:
        self._last_us = self._steps = 0
        self._seq: int | None = None

    def look(self, rows: Rows) -> None:
        if not len(rows):
            return
        back = np.flatnonzero(rows.ts_us < np.concatenate(([self._last_us], rows.ts_us[:-1])))
        if len(back):
            self._seq = int(rows.seq[back[0]]) if self._seq is None else self._seq
            self._steps += len(back)
        self._last_us = int(rows.ts_us[-1])

    def notes(self) -> list[str]:
        if self._seq is None:
            return []
        return [f"times step back, {self._steps} times, first at seq {self._seq}; records and seqs are in order"]


def _look_at_the_tail(state: State, verdict: Verdict) -> None:
    """What an opening for writing would cut. An unfinished last write is no damage; records behind a bad one may be."""
    report, active = state.report, state.active
    said = f"{report.cut_bytes} bytes ({report.cut_reason})"
    if report.cut_suspect:
        reason = f"{said} from here on are not readable; repair cuts them and keeps them in quarantine"
        fault = Fault(active.next_seq, active.next_seq + 1, active.size, reason)
        verdict.damage.append(Damage(state.codec.data_name(active.base), fault))
    elif report.cut_bytes:
        verdict.notes.append(f"an unfinished write of {said}")


def _verify_sealed(state: State, segment: Sealed, verdict: Verdict, times: _Times) -> None:
    codec, name = state.codec, state.codec.data_name(segment.base)
    known = {(damage.file, damage.fault.seq) for damage in verdict.damage}
    faults, records = faults_of(segment, times.look)
    verdict.records += records
    reported = {codec.side_name(segment.base, suffix) for suffix in codec.side_suffixes} | {name}
    verdict.damage += [
        Damage(name, fault) for fault in faults if not any((file, fault.seq) in known for file in reported)
    ]
    if faults or segment.lost:
        return
    if dead := codec.dead_bytes(segment.shape()):
        verdict.notes.append(f"{name}: {dead} bytes belong to no record; they are skipped and stay")
    if codec.index_serves(segment.shape()):
        return
    # One that is the truth was held against the data by reading; one made in memory is right by construction.
    expected = None if 0 in codec.truths or segment.override else expected_sides(segment)
    for suffix, content, have in zip(codec.side_suffixes, expected or (), segment.shape().sides, strict=False):
        if have is not None and bytes(have) != content:
            verdict.notes.append(
                f"{codec.side_name(segment.base, suffix)} is not what its data gives; repair rebuilds it"
            )
