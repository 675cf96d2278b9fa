"""The ledger of gaps (E6): one row for every removal, and none is missing, whatever happens."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.unit.engine.harness import CLASSES, PATH, RESTARTS, TINY, EngineHarness, Restart

from tidelog import GapEntry
from tidelog.engine import Engine, TopicConfig
from tidelog.engine.check import check_directory
from tidelog.engine.context import PendingRemovals, Removal
from tidelog.engine.gap_log import GAP_LOG_TOPIC
from tidelog.errors import BadInput, Damaged, Latched
from tidelog.testing import ManualClock, SimDisk


def summary(rows: list[GapEntry]) -> list[tuple[str, int, int, int, int]]:
    return [(row.cause, row.first, row.last, row.records, row.bytes) for row in rows]


@pytest.mark.parametrize("durability", CLASSES)
def test_every_way_to_lose_records_has_its_row(durability: str) -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability=durability, cap_records=4)
    topic.append([b"123"] * 6, tag="x")
    topic.delete(seqs=[4, 6], actor="ada")
    world.clock.tick(10)
    topic.append([b"1"] * 1, tag="y")
    topic.delete(match="y")
    topic.delete(match="absent")
    world.log.topic("t", ttl_ms=5)
    world.clock.tick(10)
    assert topic.count == 0
    topic.append(b"12345")
    world.log.drop("t", actor="bob")
    rows = world.log.gaps()
    assert summary(rows) == [
        ("cap", 1, 2, 2, 6),
        ("delete", 4, 6, 2, 6),
        ("delete", 7, 7, 1, 1),
        ("ttl", 3, 5, 2, 6),
        ("drop", 8, 8, 1, 5),
    ]
    assert [row.actor for row in rows] == ["retention", "ada", None, "retention", "bob"]
    assert {(row.topic, row.topic_id) for row in rows} == {("t", 1)}
    assert [row.seq for row in rows] == sorted({row.seq for row in rows})
    assert [row.ts_ms - rows[0].ts_ms for row in rows] == [0, 0, 10, 20, 20]


def test_a_delete_below_a_seq_and_a_cap_that_passes_over_it() -> None:
    topic = EngineHarness().log.topic("t", cap_records=3)
    topic.append([b"1"] * 3)
    topic.delete(before_seq=3)
    topic.append([b"1"] * 3)
    assert summary(topic.gaps()) == [("delete", 1, 2, 2, 2), ("cap", 1, 3, 1, 1)]


def test_a_range_is_of_what_went_and_not_of_what_was_asked_for() -> None:
    topic = EngineHarness().log.topic("t")
    topic.append([b"1"] * 6, tag="x")
    topic.delete(seqs=[1, 3, 6])
    topic.delete(seqs=[1, 2, 3, 9])
    topic.delete(match="x")
    topic.delete(match="x")
    assert summary(topic.gaps()) == [("delete", 1, 6, 3, 3), ("delete", 2, 2, 1, 1), ("delete", 4, 5, 2, 2)]


def test_ranges_that_lie_back_to_back_are_one_row() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", cap_records=2)
    for _ in range(10):
        topic.append(b"1")
    world.log.tick()
    for _ in range(3):
        topic.append(b"1")
    assert summary(topic.gaps()) == [("cap", 1, 8, 8, 8), ("cap", 9, 11, 3, 3)]


def test_the_gap_log_is_not_listed_and_outside_of_limits() -> None:
    world = EngineHarness(total_bytes_max=10, topics_max=1)
    topic = world.log.topic("t", cap_records=2)
    assert world.log.find(GAP_LOG_TOPIC) is None, "made for the first row"
    for _ in range(20):
        topic.append(b"12")
    world.log.tick()
    assert world.log.names() == ["t"]
    assert [state.topic for state in world.log.topics()] == ["t"]
    found = world.log.find(GAP_LOG_TOPIC)
    assert found is not None
    assert (found.config, found.count) == (TopicConfig(cap_records=1_000_000), 1)
    world.restart("reopen").topic("t").append(b"12")
    assert world.log.names() == ["t"]


def test_internal_topics_have_no_rows() -> None:
    world = EngineHarness(ledger_records=2)
    topic = world.log.topic("t")
    for number in range(1, 6):
        topic.append(b"1")
        topic.delete(seqs=[number])
        world.log.tick()
    assert summary(world.log.gaps()) == [("delete", 4, 4, 1, 1), ("delete", 5, 5, 1, 1)], "the newest rows"


def test_without_a_gap_log_nothing_is_recorded() -> None:
    world = EngineHarness(ledger_records=0)
    topic = world.log.topic("t", cap_records=1)
    topic.append([b"1"] * 3)
    world.log.tick()
    assert (world.log.gaps(), world.log.find(GAP_LOG_TOPIC)) == ([], None)
    assert world.restart("reopen", ledger_records=5).gaps() == [], "what went before it was wanted is not looked for"
    world.log.topic("t").append(b"1")
    assert summary(world.log.gaps()) == [("cap", 3, 3, 1, 1)]


def test_how_many_rows_are_kept_may_change() -> None:
    world = EngineHarness(ledger_records=5)
    topic = world.log.topic("t")
    for number in range(1, 6):
        topic.append(b"1")
        topic.delete(seqs=[number])
    assert len(world.log.gaps()) == 5
    again = world.restart("reopen", ledger_records=2).topic("t")
    again.append(b"1")
    again.delete(seqs=[6])
    assert [row.first for row in world.log.gaps()] == [5, 6]


# Asking ---------------------------------------------------------------------------------------------


def asked() -> EngineHarness:
    world = EngineHarness(**TINY)
    for name in ("a", "b", "ab"):
        topic = world.log.topic(name)
        for number in range(1, 5):
            world.clock.tick(1_000)
            topic.append(b"1")
            topic.delete(seqs=[number])
            world.log.tick()
        if name == "b":
            world.log.checkpoint()
    world.log.drop("b")
    return world


def test_rows_are_found_by_topic_by_time_and_page_by_page() -> None:
    world = asked()
    every = world.log.gaps()
    assert len(every) == 13
    assert [row for row in every if row.topic == "a"] == world.log.gaps("a") == world.log.topic("a").gaps()
    assert [row.cause for row in world.log.gaps("b")] == ["delete"] * 4 + ["drop"], "also of a topic that is gone"
    assert world.log.gaps("absent") == world.log.gaps("_tidelog.gaps") == []
    noon = every[5].ts_ms
    assert world.log.gaps(from_ms=noon) == [row for row in every if row.ts_ms >= noon]
    assert world.log.gaps("ab", noon + 1, 2) == [row for row in every if row.topic == "ab"][:2]
    pages: list[GapEntry] = []
    while page := world.log.gaps(limit=3, after_seq=pages[-1].seq if pages else 0):
        pages += page
    assert pages == every
    mine = world.log.gaps("b")
    assert world.log.gaps("b", limit=2, after_seq=mine[1].seq) == mine[2:4]
    assert world.log.gaps(after_seq=1 << 40) == world.log.gaps("a", after_seq=1 << 40) == []


def test_a_topic_that_is_made_again_has_rows_of_its_own() -> None:
    world = asked()
    again = world.log.topic("b")
    assert again.gaps() == []
    again.append(b"1")
    again.delete(seqs=[1])
    assert summary(again.gaps()) == [("delete", 1, 1, 1, 1)]
    assert len(world.log.gaps("b")) == 6


@pytest.mark.parametrize("words", [{"limit": 0}, {"limit": True}, {"from_ms": -1}, {"topic": 7}, {"topic": "\ud800"}])
def test_what_cannot_be_asked(words: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        EngineHarness().log.gaps(**words)


def test_rows_as_a_table() -> None:
    world = asked()
    table = world.log.gaps().to_arrow()
    assert table.column_names == list(GapEntry._fields)
    assert table.schema.field("ts_ms").type == pa.timestamp("ms", tz="UTC")
    assert table.set_column(7, "ts_ms", table["ts_ms"].cast("int64")).to_pylist() == [
        row._asdict() for row in world.log.gaps()
    ]
    assert EngineHarness().log.gaps().to_arrow().num_rows == 0


def test_a_directory_with_a_ledger_is_sound() -> None:
    world = asked()
    world.log.close()
    looked = check_directory(PATH, disk=world.disk)
    assert list(looked) == []
    assert looked.topics == 2


# Restarts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_no_row_is_missing_and_none_is_there_twice(checkpoint: bool, flushed: bool, restart: Restart) -> None:
    world = EngineHarness(**TINY)
    topic = world.log.topic("t", durability="fsync", cap_records=5)
    gone = world.log.topic("gone", durability="fsync")
    gone.append([b"12"] * 3)
    topic.append([b"1"] * 8)
    topic.delete(seqs=[5, 7])
    if checkpoint:
        world.log.checkpoint()
    topic.append([b"1"] * 3)
    topic.delete(before_seq=8)
    topic.delete(seqs=[9])
    gone.append(b"123")
    world.log.drop("gone")
    if flushed:
        world.log.gaps()
        world.log.tick()
    topic.append([b"1"] * 4)
    removed = [row[:3] for row in summary(topic.gaps())] if restart == "reopen" else None
    found = world.restart(restart)
    rows = found.topic("t").gaps()
    assert sum(row.records for row in rows) == 15 - found.topic("t").count
    assert [row.first for row in rows if row.cause == "delete"] == [5, 6, 9]
    assert sum(row.records for row in rows if row.cause == "delete") == 2 + 1 + 1
    assert summary(found.gaps("gone")) == [("drop", 1, 4, 4, 9)]
    if removed is not None:
        assert [row[:3] for row in summary(rows)] == removed
    again = world.restart("kill")
    assert summary(again.topic("t").gaps()) == summary(rows), "and once more"


def test_a_reader_beside_the_writer_sees_what_is_not_written_yet() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync", cap_records=2)
    topic.append([b"1"] * 5)
    (row,) = world.reader().gaps()
    assert (row.cause, row.first, row.last, row.seq) == ("cap", 1, 3, 0)
    world.log.tick()
    (row,) = world.reader().gaps()
    assert row.seq > 0


def test_a_disk_that_is_full_keeps_the_rows_for_later() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync", cap_records=2)
    topic.append([b"1"] * 5)
    world.disk.fail("write", at=2, error=28)  # the first one is a mark, which can wait
    world.log.tick()
    assert "no space left" in world.log.report.background_errors[-1]
    assert summary(world.log.gaps()) == [("cap", 1, 3, 3, 3)]


def lossy() -> tuple[SimDisk, ManualClock]:
    """A directory whose WAL is damaged below what was synced."""
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    topic.append([b"1"] * 3)
    world.log.checkpoint()
    topic.append([b"2" * 50] * 3)
    topic.append(b"3")
    world.log.checkpoint()
    disk = world.disk.reboot()
    disk.remove(f"{PATH}/meta/delta.0002.bin")
    (name,) = [path for path in disk.tree() if path.endswith(".log")]
    at = disk.read_file(name).index(b"2" * 50)
    disk.flip_bit(name, at, 3)
    return disk, world.clock


def opened(disk: SimDisk, clock: ManualClock, **more: Any) -> Engine:
    world = EngineHarness(**TINY)
    world.clock = clock
    return world.open(disk, **more)


def test_a_loss_that_is_accepted_has_a_row() -> None:
    disk, clock = lossy()
    with pytest.raises(Damaged):
        opened(disk, clock)
    log = opened(disk, clock, accept_loss=True)
    row, lost = log.gaps()
    assert (row.topic, row.cause, row.actor) == ("", "lost", "recovery")
    assert "byte" in row.about
    assert (lost.topic, lost.cause, lost.first, lost.last) == ("t", "lost", 4, 6)
    log.close()
    assert opened(disk, clock).gaps() == [row._replace(seq=1), lost._replace(seq=2)], "once"


# Notes ----------------------------------------------------------------------------------------------


def note(topic_id: int, first: int, last: int, **more: Any) -> Removal:
    return Removal(None, "t", topic_id, more.pop("cause", "cap"), first, last, 1, 1, first, **more)


def test_removals_pending_for_long_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.engine.context._PENDING_MAX", 6)
    notes = PendingRemovals(enabled=True)
    for number in range(40):
        notes.add_removal(note(number % 2, 10 * number, 10 * number + 1))
    found = notes.take_all()
    assert len(found) <= 7
    assert sum(each.records for each in found) == 40
    assert (min(each.first for each in found), max(each.last for each in found)) == (0, 391)


def test_notes_that_are_put_back_come_first() -> None:
    notes = PendingRemovals(enabled=True)
    notes.add_removal(note(1, 1, 2))
    taken = notes.take_all()
    notes.add_removal(note(1, 3, 4))
    notes.put_back(taken)
    assert [each.first for each in notes.take_all()] == [1, 3]


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [
        ({}, {}, True),
        ({"cause": "delete"}, {"cause": "delete"}, False),
        ({}, {"cause": "ttl"}, False),
        ({}, {"about": "g"}, False),
    ],
)
def test_which_notes_are_one(one: dict[str, Any], other: dict[str, Any], merged: bool) -> None:
    notes = PendingRemovals(enabled=True)
    notes.add_removal(note(1, 1, 2, **one))
    notes.add_removal(note(1, 3, 4, **other))
    found = notes.take_all()
    assert [(each.first, each.last, each.records) for each in found] == (
        [(1, 4, 2)] if merged else [(1, 2, 1), (3, 4, 1)]
    )


def test_a_tick_whose_sync_fails_says_so_although_it_was_for_the_ledger() -> None:
    """G22. What the disk dropped would be lost without a word: a record of class `disk` was acked."""
    world = EngineHarness()
    topic = world.log.topic("a")
    topic.append([1, 2, 3])
    world.log.tick()
    topic.delete(seqs=[2])
    topic.append(4)
    world.disk.fail("sync")
    with pytest.raises(Latched):
        world.log.tick()
    with pytest.raises(Latched):
        topic.append(5)
    world.log.tick()  # and is done with it
