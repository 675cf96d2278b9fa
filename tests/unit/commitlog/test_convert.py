"""Conversion: the same records in another layout; what does not fit is refused, never dropped in silence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog, convert, verify
from tidelog.errors import AlreadyExists, BadInput
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

Opener: TypeAlias = Callable[..., SegmentedLog]
NAMES = ("tide", "rustlog", "laminar", "narwhal")
FIRST = {"tide": 1, "rustlog": 0, "laminar": 0, "narwhal": 1}
DATAS = [b"", b"x", b"record " * 30, bytes(range(256)), b"last"]


def filled(log: SegmentedLog, clock: ManualClock) -> list[Record]:
    for number in range(30):
        log.append(DATAS[number % 5])
        clock.tick_us(1_500)
    log.append_many(DATAS)
    return list(log)


def time_in(codec: str, source: str, ts_us: int) -> int:
    """What a time of the source is in the target: milliseconds in two layouts, none in one."""
    if codec == "laminar" or source == "laminar":
        return 0
    return ts_us if codec == "rustlog" else ts_us // 1000 * 1000


@pytest.mark.parametrize(("codec", "to"), list(permutations(NAMES, 2)), ids=lambda name: name)
def test_every_layout_turns_into_every_other(
    open_log: Opener, clock: ManualClock, disk: SimDisk, codec: str, to: str
) -> None:
    log = open_log(first_seq=5, segment_bytes_max=2_000)
    held = filled(log, clock)
    before = {path: data for path, data in disk.tree().items() if path.startswith("log/")}
    with convert(log, "copy", to, segment_bytes_max=1_500) as copy:
        assert copy.codec == to
        assert [(record.seq, record.data) for record in copy] == [(record.seq, record.data) for record in held]
        assert [record.ts_us for record in copy] == [time_in(to, codec, record.ts_us) for record in held]
        assert copy.append(b"next") == held[-1].seq + 1
    assert {path: data for path, data in disk.tree().items() if path.startswith("log/")} == before
    assert verify("copy", disk=disk).ok
    assert len(open_log("copy", codec=None, disk=disk.crash_image("none"))) == 36


@pytest.mark.parametrize("codec", ["tide"])
def test_the_segments_of_the_copy_keep_to_the_limits_of_the_copy(open_log: Opener, disk: SimDisk) -> None:
    """G127."""
    log = open_log()
    log.append_many([b"x" * 100] * 50)
    copy = convert(log, "copy", "laminar", segment_bytes_max=1_000, segment_overflow_bytes=100)
    stores = [len(data) for path, data in disk.tree().items() if path.endswith(".store")]
    assert max(stores) <= 1_100
    assert [record.data for record in copy] == [b"x" * 100] * 50


@pytest.mark.parametrize("codec", NAMES)
def test_a_log_is_copied_into_its_own_layout(open_log: Opener, clock: ManualClock, codec: str) -> None:
    log = open_log()
    held = filled(log, clock)
    assert list(convert(log, "copy", codec)) == held


@pytest.mark.parametrize(("codec", "to"), [("rustlog", "narwhal"), ("laminar", "tide")])
def test_a_seq_that_the_target_cannot_hold_is_refused_unless_all_are_shifted(
    open_log: Opener, clock: ManualClock, disk: SimDisk, to: str
) -> None:
    log = open_log()
    held = filled(log, clock)
    before = disk.digest()
    with pytest.raises(BadInput, match="renumber"):
        convert(log, "copy", to)
    assert disk.digest() == before
    copy = convert(log, "copy", to, renumber=True)
    assert [(record.seq, record.data) for record in copy] == [(record.seq + 1, record.data) for record in held]


@pytest.mark.parametrize(("codec", "to"), [("tide", "laminar"), ("narwhal", "rustlog")])
def test_renumbering_brings_a_log_to_the_start_of_its_layout(open_log: Opener, clock: ManualClock, to: str) -> None:
    log = open_log(first_seq=1_000)
    filled(log, clock)
    assert convert(log, "copy", to, renumber=True).lowest == FIRST[to]


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize(
    ("to", "lost"), [("rustlog", {"node", "tag", "meta"}), ("laminar", {"node", "tag"}), ("narwhal", {"tag", "meta"})]
)
def test_column_that_the_target_cannot_store_is_refused_unless_dropped(
    open_log: Opener, to: str, lost: set[str]
) -> None:
    log = open_log()
    log.append(b"plain")
    log.append(b"a", node=b"n", tag=b"t", meta=b"m")
    for number, name in enumerate(sorted(lost)):
        with pytest.raises(BadInput, match=name):
            convert(log, f"copy {number}", to, drop=frozenset(lost - {name}))
    copy = convert(log, "copy", to, drop=frozenset(lost))
    assert [record.data for record in copy] == [b"plain", b"a"]
    kept = {name: getattr(copy.read(2), name) for name in ("node", "tag", "meta")}
    assert kept == {
        "node": b"" if "node" in lost else b"n",
        "tag": b"",
        "meta": b"" if "meta" in lost else b"m",
    }


@pytest.mark.parametrize("codec", ["tide"])
def test_unused_column_does_not_prevent_a_conversion(open_log: Opener) -> None:
    log = open_log()
    log.append_many([b"a", b"b"], tag=[b"", b""])
    assert [record.data for record in convert(log, "copy", "rustlog")] == [b"a", b"b"]


@pytest.mark.parametrize(("codec", "to"), list(permutations(NAMES, 2)), ids=lambda name: name)
def test_holes_stay_holes(open_log: Opener, to: str) -> None:
    log = open_log(first_seq=1)
    log.append_many([b"a=1", b"b=1", b"a=2", b"c=1"])
    log.seal()
    log.append_many([b"b=2", b"d=1", b"b=3"])
    log.seal()
    log.compact(lambda record: record.data[:1])
    held = [(record.seq, record.data) for record in log]
    copy = convert(log, "copy", to)
    assert [(record.seq, record.data) for record in copy] == held
    assert copy.highest == log.highest
    copy.close()
    again = open_log("copy", codec=to)
    assert (again.report.damage, [(record.seq, record.data) for record in again]) == ([], held)


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize("taken", ["copy/notes.txt", "copy"], ids=["directory", "file"])
def test_a_place_that_is_taken_is_refused_and_left_alone(open_log: Opener, disk: SimDisk, taken: str) -> None:
    log = open_log()
    log.append(b"a")
    disk.write_file(taken, b"mine")
    before = disk.digest()
    with pytest.raises(AlreadyExists, match="copy"):
        convert(log, "copy", "rustlog")
    assert disk.digest() == before


@pytest.mark.parametrize("codec", ["tide"])
def test_an_unknown_layout_is_refused_before_anything_is_made(open_log: Opener, disk: SimDisk) -> None:
    log = open_log()
    before = disk.digest()
    with pytest.raises(BadInput, match="parquet"):
        convert(log, "copy", "parquet")
    assert disk.digest() == before


@pytest.mark.parametrize("codec", ["narwhal"])
def test_progress_reaches_the_end_and_an_empty_log_stays_empty(open_log: Opener, clock: ManualClock) -> None:
    log = open_log()
    assert len(convert(log, "empty", "tide")) == 0
    filled(log, clock)
    seen: list[tuple[int, int]] = []
    convert(log, "copy", "tide", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (35, 35)
