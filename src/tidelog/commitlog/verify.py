"""Inspect and verify a log without changing it.

`inspect` lists the segments without reading their data. `verify` reads every byte and checks every checksum and rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tidelog.commitlog.codec import Fault
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.log_state import LogState
from tidelog.commitlog.offsets import OFFSETS_FILE
from tidelog.commitlog.recovery import Damage, expected_sides, find_segment_faults, read_directory
from tidelog.commitlog.segment import SealedSegment
from tidelog.disk.interface import Disk
from tidelog.errors import Corrupt, Unavailable
from tidelog.formats.rows import Rows

_ATTEMPTS_MAX = 16


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
class VerifyResult:
    """The findings of a verification; `damage` is empty when `ok`."""

    codec: str
    segments: int = 0
    first: int = 0  # seqs are in [first, stop)
    stop: int = 0
    records: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # repaired by the next open for writing, or harmless

    @property
    def ok(self) -> bool:
        return not self.damage


def inspect(log: SegmentedLog) -> list[SegmentInfo]:
    """Describe every segment without reading its data."""
    state = log._log_state
    infos = []
    for segment in state.sealed:
        fault, _ = state.codec.check_sealed(segment.content())
        times = segment.time_range()
        infos.append(
            SegmentInfo(
                segment.base,
                segment.stop,
                True,
                segment.size,
                segment.side_bytes,
                "rebuilt" if segment.rebuilt_sides else fault or "ok",
                times[0] if times else None,
                times[1] if times else None,
            )
        )
    active = state.active
    rebuilt = any(name.startswith(state.codec.side_name(active.base, "")) for name in state.report.rebuilt)
    has_times = state.codec.created_suffix is None and active.next_seq > active.base
    infos.append(
        SegmentInfo(
            active.base,
            active.next_seq,
            False,
            active.size,
            active.side_bytes,
            "rebuilt" if rebuilt else "ok",
            active.created_us if has_times else None,
            active.last_ts_us if has_times else None,
        )
    )
    return infos


def verify(
    path: str,
    codec: str | None = None,
    *,
    disk: Disk | None = None,
    progress: Callable[[int, int], None] | None = None,
    unverified: bool = False,
) -> VerifyResult:
    """Read every byte of a log and check every checksum and rule. Changes nothing.

    `unverified`: of a laminar store with an unknown hash function, everything but the checksums; a note says so.

    Damage is checked again where a writer changed the directory during the verification.
    """
    for _ in range(_ATTEMPTS_MAX):
        log = SegmentedLog.open(path, codec, read_only=True, disk=disk, verify_on_open=False, unverified=unverified)
        result = _verify_once(log, progress)
        if result is not None:
            return result
    raise Unavailable(f"{path} changes faster than it can be verified; nothing was changed, try again")


def _verify_once(log: SegmentedLog, progress: Callable[[int, int], None] | None) -> VerifyResult | None:
    """Verify an open log and close it; return None where damage was found and the directory has changed since."""
    try:
        state = log._log_state
        result = VerifyResult(log.codec, len(state.sealed) + 1, log.lowest, log.highest, bytes=log.size)
        result.damage += state.report.damage
        _check_tail(state, result)
        times = _TimeOrderCheck()
        try:
            log.offsets.groups()
        except Corrupt as error:
            result.damage.append(Damage(OFFSETS_FILE, Fault(0, 0, error.pos, error.reason)))
        result.notes += [*state.codec.layout_notes(), *state.report.notes]
        result.notes += [f"{name.removesuffix(' (in memory)')} must be rebuilt" for name in state.report.rebuilt]
        for number, segment in enumerate(state.sealed):
            if progress is not None:
                progress(number, result.segments)
            _verify_sealed(state, segment, result, times)
        for rows in log.batches(state.active.base, skip_damage=True):
            result.records += len(rows)
            times.check(rows)
        result.notes += times.notes()
        if progress is not None:
            progress(result.segments, result.segments)
        if not result.ok and read_directory(state.files) != state.directory_snapshot:
            return None
        return result
    finally:
        log.close()


class _TimeOrderCheck:
    """Finds times that step back. Not damage: the clock of another program may have stepped."""

    def __init__(self) -> None:
        self._last_us = self._steps_back = 0
        self._first_seq: int | None = None

    def check(self, rows: Rows) -> None:
        if not len(rows):
            return
        back = np.flatnonzero(rows.ts_us < np.concatenate(([self._last_us], rows.ts_us[:-1])))
        if len(back):
            self._first_seq = int(rows.seq[back[0]]) if self._first_seq is None else self._first_seq
            self._steps_back += len(back)
        self._last_us = int(rows.ts_us[-1])

    def notes(self) -> list[str]:
        if self._first_seq is None:
            return []
        return [
            f"times step back, {self._steps_back} times, first at seq {self._first_seq}; records and seqs are in order"
        ]


def _check_tail(state: LogState, result: VerifyResult) -> None:
    """Report the bytes that an open for writing would cut. An unfinished last write is not damage; records after a bad
    one may be."""
    report, active = state.report, state.active
    cut = f"{report.cut_bytes} bytes ({report.cut_reason})"
    if report.cut_suspect:
        reason = f"{cut} from here on are not readable; repair cuts them and keeps them in quarantine"
        fault = Fault(active.next_seq, active.next_seq + 1, active.size, reason)
        result.damage.append(Damage(state.codec.data_name(active.base), fault))
    elif report.cut_bytes:
        result.notes.append(f"an unfinished write of {cut}")


def _verify_sealed(state: LogState, segment: SealedSegment, result: VerifyResult, times: _TimeOrderCheck) -> None:
    codec, name = state.codec, state.codec.data_name(segment.base)
    known = {(damage.file, damage.fault.seq) for damage in result.damage}
    faults, records = find_segment_faults(segment, times.check)
    result.records += records
    reported = {codec.side_name(segment.base, suffix) for suffix in codec.side_suffixes} | {name}
    result.damage += [
        Damage(name, fault) for fault in faults if not any((file, fault.seq) in known for file in reported)
    ]
    if faults or segment.lost_reason:
        return
    if dead := codec.count_dead_bytes(segment.content()):
        result.notes.append(f"{name}: {dead} bytes belong to no record; they are skipped and stay")
    if codec.is_index_usable(segment.content()):
        return
    # Reading checked an authoritative index against the data; one rebuilt in memory is valid by construction.
    expected = None if 0 in codec.authoritative_sides or segment.rebuilt_sides else expected_sides(segment)
    for suffix, content, side in zip(codec.side_suffixes, expected or (), segment.content().sides, strict=False):
        if side is not None and bytes(side) != content:
            result.notes.append(f"{codec.side_name(segment.base, suffix)} does not match its data; repair rebuilds it")
