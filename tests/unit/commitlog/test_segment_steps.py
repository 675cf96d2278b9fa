"""Decisions of segments, recovery and the cleaner that no disk state shows: exact values, one by one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from tidelog.commitlog import RecoveryReport, SegmentedLog, cleaner, recovery
from tidelog.commitlog.codec import Fault, Salvage
from tidelog.commitlog.codecs.rustlog import CleanerCheckpoint
from tidelog.commitlog.recovery import Damage, _seq_above
from tidelog.commitlog.segment import AppendBuffer, SealedSegment, created_us
from tidelog.formats.rows import empty_rows
from tidelog.formats.small_files import LogManifest, ManifestEntry
from tidelog.testing import ManualClock, SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
DATAS = [b"a" * 10, b"b" * 20, b"c" * 30, b"d" * 40]


@pytest.fixture
def log(open_log: Opener) -> SegmentedLog:
    """A sealed segment of four records and an active one of one."""
    made = open_log()
    made.append_many(DATAS)
    made.seal()
    made.append(b"active")
    return made


def sealed(log: SegmentedLog) -> SealedSegment:
    return log._log_state.sealed[0]


# Segments -------------------------------------------------------------------------------------------------


def test_a_closed_segment_is_not_synced(log: SegmentedLog, disk: SimDisk) -> None:
    active = log._log_state.active
    assert active.sync_concurrently() is True
    active.close()
    disk.trace.clear()
    assert active.sync_concurrently() is False
    assert disk.trace == []
    assert disk.open_files() == []


def test_a_lost_segment_has_one_fault(log: SegmentedLog) -> None:
    segment = sealed(log)
    segment.lost_reason = "it is gone"
    content = segment.content()
    fault = Fault(segment.base, segment.stop, 0, "it is gone")
    found = segment.read_salvage(content)
    assert (len(found.rows), found.faults) == (0, [fault])
    chunk = segment.read(content, segment.base + 1, segment.stop, 1 << 20)
    assert (len(chunk.rows), chunk.fault) == (0, fault._replace(seq=segment.base + 1))


@pytest.mark.parametrize(("complete_bytes", "short"), [(-1, False), (0, False), (1, True)])
def test_a_segment_that_was_longer_has_a_fault_at_its_end(log: SegmentedLog, complete_bytes: int, short: bool) -> None:
    """`complete_bytes`: beyond the bytes that are there."""
    segment = sealed(log)
    segment.complete_bytes = segment.size + complete_bytes
    found = segment.read_salvage(segment.content())
    assert len(found.rows) == 4
    assert [(fault.seq, fault.resume, fault.pos) for fault in found.faults] == (
        [(segment.stop, segment.stop, segment.size)] if short else []
    )


@pytest.mark.parametrize(
    ("first", "bytes_max", "seqs", "next_seq"),
    [(0, 1, [0], 1), (0, 30, [0, 1], 2), (0, 59, [0, 1], 2), (0, 60, [0, 1, 2], 3), (0, 99, [0, 1, 2], 3),
     (0, 100, [0, 1, 2, 3], 4), (2, 30, [2], 3), (2, 1 << 20, [2, 3], 4)],
)  # fmt: skip
def test_salvaged_records_are_read_in_pages(
    log: SegmentedLog, first: int, bytes_max: int, seqs: list[int], next_seq: int
) -> None:
    segment = sealed(log)
    content, base = segment.content(), segment.base
    segment.salvage = segment.read_salvage(content)
    chunk = segment.read(content, base + first, segment.stop, bytes_max)
    assert chunk.rows.seq.tolist() == [base + seq for seq in seqs]
    assert (chunk.next_seq, chunk.fault) == (base + next_seq, None)


def test_salvaged_records_are_read_around_faults(log: SegmentedLog) -> None:
    segment = sealed(log)
    content, base = segment.content(), segment.base
    rows = segment.read_salvage(content).rows
    fault = Fault(base + 1, base + 2, 7, "damaged")
    end = Fault(segment.stop, segment.stop, 9, "rubbish")
    segment.salvage = Salvage(rows, [fault, end])

    def read(first: int) -> tuple[list[int], int, Fault | None]:
        chunk = segment.read(content, base + first, segment.stop, 1 << 20)
        return [seq - base for seq in chunk.rows.seq.tolist()], chunk.next_seq - base, chunk.fault

    assert read(0) == ([0], 1, None)
    assert read(1) == ([], 1, fault)
    assert read(2) == ([2, 3], 4, None)


def test_a_reset_segment_is_read_again(log: SegmentedLog) -> None:
    segment = sealed(log)
    before = segment.time_range()
    segment.salvage = Salvage(empty_rows(), [])
    segment.verified_chunks.add(7)
    segment.reset()
    assert [segment.salvage, segment.verified_chunks, segment._time_range] == [None, set(), None]
    assert segment.time_range() == before
    assert segment.manifest_entry() == ManifestEntry(segment.base, segment.size, segment.authoritative_side_bits)


def test_an_index_in_memory_keeps_earlier_views() -> None:
    buffer = AppendBuffer(b"start")
    first = buffer.view()
    assert bytes(first) == b"start"
    assert bytes(buffer.view()) == b"start"
    expected = b"start"
    for number in range(40):
        piece = bytes([number]) * 100
        buffer.append(piece)
        expected += piece
        if number % 3 == 0:
            assert bytes(buffer.view()) == expected
    assert bytes(buffer.view()) == expected
    assert bytes(first) == b"start"
    assert bytes(AppendBuffer(b"x" * 5_000).view()) == b"x" * 5_000


@pytest.mark.parametrize("codec", ["laminar"])
def test_the_creation_time_of_a_segment(log: SegmentedLog, disk: SimDisk, clock: ManualClock, codec: str) -> None:
    assert codec == "laminar"
    files, base = log._log_state.files, sealed(log).base
    suffix = files.codec.created_suffix
    assert suffix is not None
    path = files.side_path(base, suffix)
    disk.write_file(path, b"1234\n")
    assert created_us(files, base) == 1234
    for content in (b"", b"12x", b"-5"):
        disk.write_file(path, content)
        index = disk.stat(files.side_path(base, files.codec.side_suffixes[0]))
        assert index is not None
        assert created_us(files, base) == index.modified_ms * 1000
    disk.remove(path)
    disk.remove(files.side_path(base, files.codec.side_suffixes[0]))
    assert created_us(files, base) is None
    assert clock.now_us() > 0


# Recovery -------------------------------------------------------------------------------------------------


FAULT = Damage("f", Fault(3, 5, 7, "why"))


@pytest.mark.parametrize(
    ("changed", "clean", "lines"),
    [
        ({}, True, []),
        ({"segments": 3, "next_seq_floor": 4, "cut_suspect": True, "has_unexplained_tail": True}, True, []),
        ({"cut_bytes": 1, "cut_reason": "r"}, False, ["cut 1 bytes of an unfinished write (r)"]),
        ({"notes": ["note"]}, True, ["note"]),
        ({"rebuilt": ["a"]}, False, ["rebuilt a"]),
        ({"swept": ["a"]}, False, ["swept a"]),
        ({"quarantined": ["a"]}, False, ["kept the cut bytes in a"]),
        ({"damage": [FAULT]}, False, ["damage in f at byte 7, seqs 3 to 4: why"]),
    ],
)
@pytest.mark.parametrize("codec", ["tide"])
def test_a_report_in_words(changed: dict[str, Any], clean: bool, lines: list[str], codec: str) -> None:
    assert codec == "tide"
    report = RecoveryReport(**changed)
    assert (report.clean, report.lines()) == (clean, lines)


def test_a_new_report_has_found_nothing() -> None:
    report = RecoveryReport()
    assert {name: getattr(report, name) for name in report.__slots__} == {
        "segments": 0, "cut_bytes": 0, "cut_reason": "", "rebuilt": [], "swept": [], "quarantined": [], "damage": [],
        "next_seq_floor": 0, "cut_suspect": False, "has_unexplained_tail": False, "notes": [],
        "index_rebuilds": 0, "index_rebuild_us": 0,
    }  # fmt: skip


def test_a_seq_above_all_of_a_lost_segment(log: SegmentedLog, disk: SimDisk, codec: str) -> None:
    files, base = log._log_state.files, sealed(log).base
    manifest: Any = SimpleNamespace(reserved=5, next_seq=9)
    as_manifest: LogManifest = manifest
    assert _seq_above(files, 3, as_manifest) == 9
    assert _seq_above(files, 9, as_manifest) == 10
    manifest.reserved = 20
    assert _seq_above(files, 9, as_manifest) == 20
    sizes = [disk.stat(files.side_path(base, suffix)) for suffix in files.codec.side_suffixes]
    indexed = sum(stat.size for stat in sizes if stat) * (1 if codec == "laminar" else 16)
    data = disk.stat(files.data_path(base))
    assert data is not None
    assert _seq_above(files, base, None) == base + (1 << 20) + indexed + data.size
    disk.remove(files.data_path(base))
    assert _seq_above(files, base, None) == base + (1 << 20) + indexed


# The cleaner ----------------------------------------------------------------------------------------------


def test_the_checkpoint_of_the_cleaner_never_goes_back(log: SegmentedLog, clock: ManualClock, disk: SimDisk) -> None:
    state = log._log_state
    assert cleaner.load_checkpoint(state) is None
    now = clock.now_us()
    steps: list[tuple[dict[str, Any], tuple[int, int, Any]]] = [
        ({"cleaned": 5, "horizon_ms": 70}, (5, 70, None)),
        ({"cleaned": 3, "horizon_ms": 60}, (5, 70, None)),
        ({"running": (2, "copy")}, (5, 70, (2, "copy"))),
        ({"cleaned": 8}, (8, 70, None)),
        ({"horizon_ms": 90}, (8, 90, None)),
    ]
    for given, (cleaned, horizon_ms, running) in steps:
        cleaner.save_checkpoint(state, **given)
        assert cleaner.load_checkpoint(state) == CleanerCheckpoint(cleaned, horizon_ms, running, now)
    disk.write_file("log/.cleaner_checkpoint", b"rubbish")
    assert cleaner.load_checkpoint(state) is None
    cleaner.save_checkpoint(state)
    assert cleaner.load_checkpoint(state) == CleanerCheckpoint(0, 0, None, now)


def test_what_retention_knows_of_a_segment(log: SegmentedLog, clock: ManualClock, codec: str) -> None:
    state, segment = log._log_state, sealed(log)
    clock.tick(5_000)
    (found,) = cleaner.retention_candidates(state)
    times = segment.time_range()
    expected = times[1] if times is not None else created_us(state.files, state.active.base)
    assert found == cleaner.RetentionCandidate(
        segment.base, segment.stop, segment.size + segment.side_bytes, expected or 0
    )
    if codec == "laminar":
        return
    segment._time_range = None
    state.files.codec.time_range = lambda _: None  # type: ignore[method-assign]
    segment.lost_reason = "gone"
    assert cleaner.retention_candidates(state)[0].newest_us == clock.now_us()
    segment.lost_reason = ""
    stat = state.disk.stat(state.files.data_path(segment.base))
    assert stat is not None
    assert cleaner.retention_candidates(state)[0].newest_us == stat.modified_ms * 1000
    segment.size = 0
    assert cleaner.retention_candidates(state)[0].newest_us == 0


@pytest.mark.parametrize(("seq", "count"), [(0, 0), (4, 1), (5, 1), (8, 2), (100, 2)])
def test_segments_that_end_at_or_before_a_seq_are_dropped(open_log: Opener, seq: int, count: int) -> None:
    log = open_log()
    for _ in range(2):
        log.append_many([b"x"] * 4)
        log.seal()
    log.append(b"y")
    base, size = log.lowest, [segment.size + segment.side_bytes for segment in log._log_state.sealed]
    result = log.drop_below(base + seq)
    assert (result.segments, result.records, result.bytes) == (count, 4 * count, sum(size[:count]))
    assert (result.lowest, log.lowest) == (base + 4 * count,) * 2


@pytest.mark.parametrize(("ages_ms", "dropped"), [((9, 9, 0), 2), ((0, 9, 9), 0), ((9, 0, 9), 1), ((5, 5, 5), 0)])
def test_only_leading_segments_expire(
    open_log: Opener, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, ages_ms: tuple[int, ...], dropped: int
) -> None:
    """Times of a foreign log may fall: a younger segment protects the older ones after it."""
    log = open_log()
    for _ in ages_ms:
        log.append(b"x")
        log.seal()
    log.append(b"y")
    segments, now_us = log._log_state.sealed, clock.now_us()
    monkeypatch.setattr(
        cleaner,
        "retention_candidates",
        lambda _: [
            cleaner.RetentionCandidate(segment.base, segment.stop, 1, now_us - age_ms * 1000)
            for segment, age_ms in zip(segments, ages_ms, strict=True)
        ],
    )
    assert log.remove_expired(5) == dropped
    assert len(log.segments) == 4 - dropped


@pytest.mark.parametrize(
    ("removed", "damage", "suspect", "attempts"),
    [(False, False, False, 1), (True, False, False, 2), (False, True, False, 2), (False, False, True, 2)],
)
def test_a_reader_opens_again_what_changed_meanwhile(
    log: SegmentedLog, monkeypatch: pytest.MonkeyPatch, removed: bool, damage: bool, suspect: bool, attempts: int
) -> None:
    """The directory changes during the first attempt only; what was found counts unless it may be due to that."""
    files, latch = log._log_state.files, log._log_state.latch
    calls: list[int] = []
    names = tuple(files.disk.list_dir(files.directory))
    changed = names[1:] if removed else (*names, "foreign")
    states = [names, changed, names, names]

    def recover_once(*_: object, **__: object) -> Any:
        calls.append(1)
        report = RecoveryReport(damage=[FAULT] if damage else [], cut_suspect=suspect)
        return recovery.RecoveredLog([], None, report)

    monkeypatch.setattr(recovery, "_recover_once", recover_once)
    monkeypatch.setattr(recovery, "read_directory", lambda _: recovery.DirectorySnapshot(states.pop(0), None))
    monkeypatch.setattr(recovery, "_snapshot_bases", lambda _, snapshot: set(snapshot.names) - {"foreign"})
    recovery.recover_for_reading(files, latch, verify=False)
    assert len(calls) == attempts
