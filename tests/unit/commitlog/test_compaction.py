"""Compaction: the newest record of every key, where it always was; everything else a hole."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import pytest

from tidelog.commitlog import CompactionResult, SegmentedLog, verify
from tidelog.errors import Corrupt, Latched, SeqMissing, WriteFailed
from tidelog.testing import ManualClock, PowerOff, SimDisk
from tidelog.types import Record

Opener: TypeAlias = Callable[..., SegmentedLog]
Names: TypeAlias = Callable[[int], str]
CHECKPOINT = "log/.cleaner_checkpoint"


def key(record: Record) -> bytes | None:
    """`key=value` has a key, anything else has none; `key=` is a tombstone."""
    name, equals, _ = record.data.partition(b"=")
    return name if equals else None


def is_tombstone(record: Record) -> bool:
    return record.data.endswith(b"=")


def newest(records: list[Record]) -> list[Record]:
    """What compaction must leave of these records."""
    last = {key(record): record.seq for record in records}
    return [record for record in records if key(record) is None or last[key(record)] == record.seq]


SEGMENTS = [
    [b"a=1", b"b=1", b"plain", b"c=1"],
    [b"a=2", b"a=3"],
    [b"b=2", b"plain", b"d=1", b"a=4", b"d=2"],
]
ACTIVE = [b"a=5", b"c=2", b"c=3"]


def grown(log: SegmentedLog, clock: ManualClock) -> tuple[list[Record], list[Record]]:
    """Three sealed segments and an active one; the records of the first, and those of the second."""
    for datas in SEGMENTS:
        log.append_many(datas[:2])
        clock.tick(10)
        for data in datas[2:]:
            log.append(data)
            clock.tick(10)
        log.seal()
    sealed = list(log)
    log.append_many(ACTIVE)
    return sealed, list(log.records(sealed[-1].seq + 1))


def test_the_newest_record_of_every_key_stays_with_its_seq_and_time(open_log: Opener, clock: ManualClock) -> None:
    """G111."""
    log = open_log()
    sealed, active = grown(log, clock)
    expected = newest(sealed)
    done = log.compact(key)
    assert list(log) == [*expected, *active]
    assert (done.dropped, done.kept, done.segments) == (len(sealed) - len(expected), len(expected), 3)
    assert 0 < done.bytes_after < done.bytes_before
    assert done.resumed_at is None


def test_a_compaction_reports_what_it_did_to_the_files(
    open_log: Opener, clock: ManualClock, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """Bytes are those of the data files of the sealed segments; a second run finds the same files and drops nothing."""
    log = open_log()
    sealed, _ = grown(log, clock)
    kept = len(newest(sealed))

    def stored() -> int:
        return sum(len(disk.read_file(data_path(first_seq + number))) for number in (0, 4, 6))

    before = stored()
    done = log.compact(key)
    after = stored()
    assert done == CompactionResult(
        segments=3, dropped=len(sealed) - kept, kept=kept, bytes_before=before, bytes_after=after, resumed_at=None
    )
    assert log.compact(key) == CompactionResult(kept=kept, bytes_before=after, bytes_after=after)


def test_records_without_a_key_all_survive(open_log: Opener, clock: ManualClock) -> None:
    """G111."""
    log = open_log()
    sealed, active = grown(log, clock)
    done = log.compact(lambda _: None)
    assert list(log) == [*sealed, *active]
    assert (done.dropped, done.segments) == (0, 0)


def test_the_active_segment_is_neither_changed_nor_asked(
    open_log: Opener, clock: ManualClock, disk: SimDisk, data_path: Names
) -> None:
    """Method: the active segment holds newer words on a and c; the sealed ones stay until it is sealed too."""
    log = open_log()
    _, active = grown(log, clock)
    before = disk.read_file(data_path(active[0].seq))
    log.compact(key)
    assert disk.read_file(data_path(active[0].seq)) == before
    assert {b"a=4", b"a=5", b"c=1", b"c=2", b"c=3"} <= {record.data for record in log}
    log.seal()
    log.compact(key)
    assert sorted(record.data for record in log) == [b"a=5", b"b=2", b"c=3", b"d=2", b"plain", b"plain"]


@pytest.mark.parametrize("codec", ["tide"])
def test_all_columns_of_a_survivor_are_kept(open_log: Opener) -> None:
    log = open_log()
    log.append(b"a=1", node=b"n", tag=b"t", meta=b"m")
    log.append_many([b"a=2", b"b=1", b"c=1"], node=[b"n1", b"n2", b""], tag=b"t", meta=[b"", b"m2", b"m3"])
    log.append(b"c=2", tag=b"last")
    log.seal()
    expected = newest(list(log))
    log.compact(key)
    assert list(log) == expected
    log.close()
    assert list(open_log()) == expected


def test_a_dropped_seq_is_missing_and_ranges_pass_over_it(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    log = open_log()
    sealed, active = grown(log, clock)
    kept = {record.seq: record for record in [*newest(sealed), *active]}
    log.compact(key)
    assert (log.highest, len(log.segments)) == (active[-1].seq + 1, 4)
    for seq in range(log.lowest, log.highest):
        if seq in kept:
            assert log.read(seq) == kept[seq]
            continue
        with pytest.raises(SeqMissing) as missing:
            log.read(seq)
        assert missing.value.asked == seq
        assert seq < missing.value.next_seq <= min(later for later in kept if later > seq)
    for start in range(log.lowest, log.highest):
        expected = [record for seq, record in kept.items() if seq >= start]
        assert list(log.records(start)) == expected
        page = log.read_range(start, limit=2)
        assert page.records == expected[:2]
        assert start < page.next_seq <= log.highest
    assert log.to_arrow(first_seq).column("seq").to_pylist() == sorted(kept)


def test_a_reopened_log_gives_the_same_answers(open_log: Opener, clock: ManualClock, disk: SimDisk) -> None:
    log = open_log()
    sealed, active = grown(log, clock)
    log.compact(key)
    facts = (log.lowest, log.highest, log.segments, log.size)
    log.close()
    before = disk.digest()
    again = open_log()
    assert again.report.clean, again.report.lines()
    assert facts == (again.lowest, again.highest, again.segments, again.size)
    assert list(again) == [*newest(sealed), *active]
    again.close()
    assert disk.digest() == before
    assert verify("log", disk=disk).ok
    assert verify("log", disk=disk).notes == []


def test_a_second_run_drops_nothing_and_rewrites_nothing(open_log: Opener, clock: ManualClock, disk: SimDisk) -> None:
    log = open_log()
    grown(log, clock)
    log.compact(key)
    before, held = disk.tree(), list(log)
    done = log.compact(key)
    assert (done.dropped, done.segments, done.bytes_before) == (0, 0, done.bytes_after)
    assert (list(log), disk.tree()) == (held, before)


def test_segments_that_lost_everything_are_dropped_from_the_front_and_kept_as_holes_elsewhere(
    open_log: Opener, first_seq: int
) -> None:
    log = open_log()
    for data in (b"a=1", b"b=1", b"a=2", b"a=3"):
        log.append(data)
        log.seal()
    log.compact(key)
    assert [(record.seq - first_seq, record.data) for record in log] == [(1, b"b=1"), (3, b"a=3")]
    assert (log.lowest, log.segments) == (
        first_seq + 1,
        [range(first_seq + n, first_seq + min(n + 1, 4)) for n in (1, 2, 3, 4)],
    )
    log.close()
    again = open_log()
    assert (again.report.clean, again.lowest, again.highest) == (True, first_seq + 1, first_seq + 4)
    with pytest.raises(SeqMissing):
        again.read(first_seq + 2)
    assert again.append(b"next") == first_seq + 4


def test_numbers_go_on_when_nothing_is_left(open_log: Opener, clock: ManualClock, first_seq: int) -> None:
    """G98. Method: every sealed record is a tombstone past its time."""
    log = open_log()
    log.append_many([b"a=", b"b="])
    log.seal()
    clock.tick(1)
    assert log.compact(key, is_tombstone=is_tombstone).dropped == 2
    assert (list(log), log.highest) == ([], first_seq + 2)
    log.close()
    again = open_log()
    assert again.append(b"next") == first_seq + 2
    assert [record.data for record in again] == [b"next"]


def test_sealing_and_compacting_again_and_again_keeps_the_newest(open_log: Opener, clock: ManualClock) -> None:
    """G111. Method: many keys, many rounds, an index with an entry every third record; the truth is a dict."""
    log = open_log(segment_bytes_max=600, index_every=3)
    truth: dict[bytes, tuple[int, bytes]] = {}
    plain = []
    for number in range(240):
        if number % 11 == 0:
            plain.append((log.append(b"plain %d" % number), b"plain %d" % number))
        else:
            data = b"%d=%d" % (number * 7 % 19, number)
            truth[data.partition(b"=")[0]] = (log.append(data), data)
        clock.tick_us(777)
        if number % 50 == 49:
            log.seal()
            log.compact(key)
            assert sorted([*truth.values(), *plain]) == [(record.seq, record.data) for record in log]
    log.close()
    again = open_log(segment_bytes_max=600, index_every=3)
    assert not again.report.damage
    times = [record.ts_us for record in again]
    assert times == sorted(times)
    assert [again.read(seq).data for seq, _ in sorted(truth.values())] == [data for _, data in sorted(truth.values())]


# Tombstones.


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
@pytest.mark.parametrize(("age_ms", "stays"), [(4_999, True), (5_000, True), (5_001, False), (90_000, False)])
def test_a_tombstone_goes_once_it_is_older_than_it_must_be_kept(
    open_log: Opener, clock: ManualClock, age_ms: int, stays: bool
) -> None:
    log = open_log(segment_age_ms_max=None)
    log.append_many([b"a=1", b"b=1"])
    log.append(b"a=")
    log.seal()
    clock.tick(age_ms)
    log.compact(key, is_tombstone=is_tombstone, keep_tombstones_ms=5_000)
    assert [record.data for record in log] == [b"b=1", b"a="] if stays else [b"b=1"]


@pytest.mark.parametrize("codec", ["laminar"])
def test_a_young_tombstone_stays_though_the_layout_keeps_no_times(open_log: Opener, clock: ManualClock) -> None:
    """Method: a record cannot be older than its segment, whose birth is kept beside it."""
    log = open_log()
    log.append_many([b"a=1", b"b=1"])
    log.append(b"a=")
    log.seal()
    clock.tick(1_000)
    log.compact(key, is_tombstone=is_tombstone, keep_tombstones_ms=3_600_000)
    assert [record.data for record in log] == [b"b=1", b"a="]


def test_only_the_newest_word_on_a_key_can_be_its_tombstone(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    log.append_many([b"a=1", b"a=", b"a=2", b"b=1", b"b=", b"c="])
    log.seal()
    clock.tick(1)
    done = log.compact(key, is_tombstone=is_tombstone)
    assert [record.data for record in log] == [b"a=2"]
    assert done.dropped == 5


def test_without_a_rule_for_tombstones_an_empty_value_is_a_value(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    log.append_many([b"a=1", b"a=", b"b=1"])
    log.seal()
    clock.tick(10**6)
    log.compact(key)
    assert [record.data for record in log] == [b"a=", b"b=1"]


# The checkpoint, and a run that was interrupted.


def checkpoint(disk: SimDisk) -> dict[str, Any]:
    found = json.loads(disk.read_file(CHECKPOINT))
    assert isinstance(found, dict)
    return found


def test_the_checkpoint_names_the_end_of_the_run(open_log: Opener, clock: ManualClock, disk: SimDisk) -> None:
    """G110."""
    log = open_log()
    sealed, _ = grown(log, clock)
    log.compact(key)
    found = checkpoint(disk)
    assert (found["last_cleaned_offset"], found["compaction_state"]) == (sealed[-1].seq + 1, "Idle")
    log.retain(keep_ms=10**6)
    assert checkpoint(disk)["last_cleaned_offset"] == sealed[-1].seq + 1


def test_a_run_that_was_cut_off_by_a_power_cut_is_taken_up_again(
    open_log: Opener, clock: ManualClock, disk: SimDisk
) -> None:
    """G112. Method: the power fails at every operation in turn; a restart of what was durable compacts again."""
    log = open_log()
    sealed, active = grown(log, clock)
    log.close()
    expected, bases = [*newest(sealed), *active], [segment.start for segment in log.segments]
    resumed: set[int | None] = set()
    for ops in range(1, 200):
        machine = disk.reboot()
        log = open_log(disk=machine)
        machine.cut_power_at(machine.op_count + ops)
        try:
            log.compact(key)
        except PowerOff:
            pass
        else:
            break
        found = machine.crash_image("none")
        running: Any = checkpoint(found)["compaction_state"] if CHECKPOINT in found.tree() else "Idle"
        again = open_log(disk=found)
        assert not again.report.damage, ops
        done = again.compact(key)
        assert done.resumed_at == (None if running == "Idle" else running["Running"]["segment"]), ops
        resumed.add(done.resumed_at)
        assert list(again) == expected, ops
        assert checkpoint(found)["compaction_state"] == "Idle"
    else:
        pytest.fail("the run never came to its end")
    assert resumed == {None, *bases[:3]}


def test_a_crash_at_any_step_leaves_the_old_segment_or_the_new_one(
    open_log: Opener, clock: ManualClock, disk: SimDisk, first_seq: int
) -> None:
    """G112. Method: many restarts from before every operation; each segment holds all its records or the survivors."""
    log = open_log()
    sealed, active = grown(log, clock)
    kept = newest(sealed)
    edges = [first_seq, first_seq + 4, first_seq + 6, first_seq + 11]
    stretches = list(pairwise(edges))

    def of(records: list[Record], lo: int, hi: int) -> list[Record]:
        return [record for record in records if lo <= record.seq < hi]

    mixed: set[tuple[bool, ...]] = set()

    def examine(_: int) -> None:
        for image in disk.images(("none", "all", "prefixes", "directories"), limit=6):
            again = open_log(disk=image.disk)
            assert not again.report.damage, image.label
            found = list(again)
            states = []
            for lo, hi in stretches:
                part = of(found, lo, hi)
                assert part in (of(sealed, lo, hi), of(kept, lo, hi)), image.label
                states.append(part == of(kept, lo, hi))
            mixed.add(tuple(states))
            assert found[-3:] == active, image.label
            assert not [path for path in image.disk.tree() if path.endswith((".compacted", ".rebuilding", ".tmp"))]

    disk.on_op = examine
    log.compact(key)
    disk.on_op = None
    examine(0)
    assert mixed == {(False, False, False), (True, False, False), (True, True, False), (True, True, True)}


# What stops it.


def test_a_swap_that_fails_before_it_counts_changes_nothing(
    open_log: Opener, clock: ManualClock, codec: str, data_path: Names, first_seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the index is derived the log goes on and compaction may be tried again. A layout whose index cannot be
    derived accepts no writes until it is opened again, which decides what the swap came to."""
    log = open_log()
    sealed, active = grown(log, clock)
    rename = SimDisk.rename

    def failing(disk: SimDisk, old: str, new: str, /) -> None:
        if new == data_path(first_seq):
            raise OSError(errno.EIO, "no")
        rename(disk, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(SimDisk, "rename", failing)
        with pytest.raises(Latched if codec == "laminar" else WriteFailed):
            log.compact(key)
    assert list(log) == [*sealed, *active]
    if codec == "laminar":
        with pytest.raises(Latched):
            log.append(b"next")
        log.close()
        log = open_log()
        assert list(log) == [*sealed, *active]
    assert log.compact(key).dropped == len(sealed) - len(newest(sealed))
    seq = log.append(b"next")
    assert list(log.records(stop=seq)) == [*newest(sealed), *active]


def test_damage_stops_it_before_anything_is_dropped(
    open_log: Opener, clock: ManualClock, disk: SimDisk, data_path: Names, first_seq: int
) -> None:
    """Nothing is dropped on a guess: the newest word on a key may be the one that cannot be read."""
    log = open_log()
    grown(log, clock)
    log.close()
    where = disk.read_file(data_path(first_seq + 4)).index(b"a=3")
    disk.flip_bit(data_path(first_seq + 4), where, 3)
    log = open_log()
    before = disk.digest()
    with pytest.raises(Corrupt) as stopped:
        log.compact(key)
    assert stopped.value.seq is not None
    assert disk.digest() == before
    assert log.append(b"still works") == log.highest - 1


def test_key_error_stops_compaction_before_anything_is_dropped(
    open_log: Opener, clock: ManualClock, disk: SimDisk
) -> None:
    log = open_log()
    sealed, active = grown(log, clock)
    before = disk.digest()

    def picky(record: Record) -> bytes | None:
        if record.seq == sealed[-1].seq:
            raise LookupError("no key")
        return key(record)

    with pytest.raises(LookupError):
        log.compact(picky)
    assert disk.digest() == before
    assert list(log) == [*sealed, *active]


def test_progress_counts_the_sealed_segments(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    grown(log, clock)
    seen: list[tuple[int, int]] = []
    log.compact(key, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_compacting_a_log_without_sealed_segments_is_nothing(open_log: Opener, disk: SimDisk) -> None:
    log = open_log()
    log.append_many([b"a=1", b"a=2"])
    before = disk.digest()
    done = log.compact(key)
    assert (done.dropped, done.kept, disk.digest()) == (0, 0, before)
