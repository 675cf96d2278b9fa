"""Forwarding: order, filters, capacity of the dest, losses, cycles, frames in the WAL, restarts."""

from __future__ import annotations

from errno import ENOSPC
from threading import Thread
from typing import Any

import pytest
from tests.frames import FrameReader
from tests.unit.engine.harness import RESTARTS, TINY, EngineHarness, Restart

import tidelog
from tidelog.cli.main import main
from tidelog.engine import Engine
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, DiskFull, ReadOnly, RouterCycle, Throttled, TopicExists, TopicNotFound
from tidelog.formats.frame import FORWARD

restarts = pytest.mark.parametrize("how", RESTARTS)


def rows(log: Engine, name: str) -> list[tuple[int, Any]]:
    return [(record.seq, record.data) for record in log.topic(name).read().records]


def datas(log: Engine, name: str) -> list[Any]:
    return [data for _, data in rows(log, name)]


def frames(log: Engine) -> int:
    return sum(shard.stats.frames for shard in log.shards)


def total(log: Engine, router: str) -> int:
    state = log.find_router(router)
    assert state is not None
    return state.forwarded_total


# ── what it costs ─────────────────────────────────────────────────────────────────────────────


def test_one_append_is_one_frame_whatever_the_fan_out() -> None:
    """§3.6. What its copies cost is counted apart: a frame for each and one in front of each pass."""
    log = EngineHarness(wal_shards=3).log
    log.topic("a")
    for number in range(100):
        log.router(f"r{number}", "a", f"d{number}")
    log.topic("a").append(0)  # reserves seqs
    before = frames(log)
    log.topic("a").append([1, 2, 3])
    log.topic("a").append(4)
    assert all(datas(log, f"d{number}") == [0, 1, 2, 3, 4] for number in range(100))
    assert frames(log) == before + 2
    assert sum(shard.stats.copied_frames for shard in log.shards) == 100 * 2, "all of them came in one pass a target"


def test_direct_write_after_copies_is_one_frame() -> None:
    world = EngineHarness()
    log = world.log
    log.topic("a", durability="fsync")
    log.topic("b", durability="fsync")
    log.router("r", "a", "b")
    log.topic("a").append(1)
    assert datas(log, "b") == [1]
    before = frames(log)
    log.topic("b").append("x")
    assert frames(log) == before + 1


# ── what is passed on ─────────────────────────────────────────────────────────────────────────


def test_bytes_and_json_keep_what_they_are_and_mixed_batches_their_order() -> None:
    log = EngineHarness().log
    log.router("r", "a", "b")
    log.topic("a").append([b"raw", {"k": 1}, b"", None, "text"], tag=["t", None, "u", None, None], node="n")
    source, dest = (log.topic(name).read().records for name in "ab")
    assert [(r.seq, r.data, r.tag, r.node, r.meta) for r in dest] == [
        (r.seq, r.data, r.tag, r.node, r.meta) for r in source
    ]


def test_more_than_one_pass() -> None:
    log = EngineHarness(wal_file_bytes=1 << 20).log
    log.router("r", "a", "b", filter="even")
    log.topic("a").append(list(range(3000)), tag=["even" if number % 2 == 0 else None for number in range(3000)])
    assert log.topic("b").state().count == 1500
    assert total(log, "r") == 1500


def test_copies_have_the_time_of_the_dest() -> None:
    world = EngineHarness()
    world.log.router("r", "a", "b")
    world.log.topic("a").append(1)
    world.clock.tick(5_000)
    (copy,) = world.log.topic("b").read().records
    (record,) = world.log.topic("a").read().records
    assert copy.ts_ms == record.ts_ms + 5_000


def test_reads_of_the_dest_see_new_records_of_the_source() -> None:
    log = EngineHarness().log
    log.router("r", "a", "b")
    log.topic("a").append([1, 2])
    assert log.topic("b").to_arrow().num_rows == 2
    log.topic("a").append(3)
    assert log.topic("b").segments().head_seq == 3
    log.topic("a").append(4)
    assert log.topic("b").seek(0) == 1
    assert [state.head_seq for state in log.topics()] == [4, 4]


def test_the_hop_limit_ends_a_chain_of_ten() -> None:
    """§3.6: stop at 8."""
    log = EngineHarness().log
    for number in range(10):
        log.router(f"r{number}", f"t{number}", f"t{number + 1}")
    log.topic("t0").append("x")
    assert datas(log, "t8") == ["x"]
    assert datas(log, "t9") == []
    log.topic("t3").append("y")
    assert datas(log, "t10") == ["y"]


@restarts
def test_a_cycle_ends_at_the_hop_limit(how: Restart) -> None:
    """§3.6: direct write 0, each forward +1, stop at 8."""
    world = EngineHarness(**TINY)
    for name in "ab":
        world.log.topic(name, durability="fsync")
    world.log.router("r1", "a", "b")
    with pytest.raises(RouterCycle):
        world.log.router("r2", "b", "a")
    world.log.router("r2", "b", "a", allow_cycle=True)
    world.log.topic("a").append("x")
    assert (len(datas(world.log, "a")), len(datas(world.log, "b"))) == (5, 4)
    world.log.topic("b").append("y")
    before = [rows(world.log, name) for name in "ab"]
    assert (len(before[0]), len(before[1])) == (9, 9)
    log = world.restart(how)
    assert [rows(log, name) for name in "ab"] == before
    log.tick()
    assert [rows(log, name) for name in "ab"] == before


# ── losses ────────────────────────────────────────────────────────────────────────────────────


@restarts
def test_records_lost_at_the_source_are_a_durable_gap(how: Restart) -> None:
    """§3.2: the source-trim mark survives, with its reason."""
    world = EngineHarness()
    world.log.topic("a", durability="fsync", cap_records=2)
    world.log.topic("b", durability="fsync")
    world.log.router("r", "a", "b")
    world.log.topic("a").append([1, 2, 3, 4])
    page = world.log.topic("b").read()
    assert page.gap is not None
    assert (page.gap.reason, page.gap.gap_to, page.counts.evicted) == ("source_trim", 2, 2)
    log = world.restart(how)
    again = log.topic("b").read()
    assert (again.gap, again.records[0].data, again.records[0].seq) == (page.gap, 3, 3)
    assert total(log, "r") == 4


def test_records_deleted_while_the_dest_was_full_are_skipped() -> None:
    """§3.6: deleted → skip."""
    world = EngineHarness()
    world.log.topic("a", durability="fsync")
    world.log.topic("b", durability="fsync", cap_records=1, discard="reject")
    world.log.router("r", "a", "b")
    world.log.topic("a").append([1, 2, 3, 4], tag=["x", "y", "x", "y"])
    assert datas(world.log, "b") == [1]
    world.log.topic("a").delete(match="y")
    world.log.topic("b", cap_records=9)
    assert rows(world.log, "b") == [(1, 1), (2, 3)]
    world.log.topic("a").append(5)
    log = world.restart("crash")
    assert rows(log, "b") == [(1, 1), (2, 3), (3, 5)]


def test_seqs_without_a_record_take_no_seq_of_the_dest() -> None:
    """A kill leaves reserved seqs unused: no gap, no hole and no count for them."""
    world = EngineHarness(head_reserve=50)
    world.log.topic("b", durability="fsync")
    world.log.router("r", "a", "b")
    world.log.topic("a").append(1)
    assert rows(world.log, "b") == [(1, 1)]
    log = world.restart("kill")
    assert log.topic("a").append(2).first_seq > 50
    page = log.topic("b").read()
    assert ([(record.seq, record.data) for record in page.records], page.gap) == ([(1, 1), (2, 2)], None)
    assert total(log, "r") == 2


def test_cursor_without_its_copies_does_not_count() -> None:
    """The end of a pass was torn off: its Forward frame is in the WAL and its records are not."""
    world = EngineHarness()
    world.log.topic("a", durability="fsync")
    world.log.topic("b")
    world.log.router("r", "a", "b")
    world.log.topic("a").append(["one", "two"])
    assert datas(world.log, "b") == ["one", "two"]
    disk = world.disk.reboot()
    (path,) = (path for path in disk.tree() if path.startswith("data/wal/wal-"))
    file = disk.open(path, "write")
    content = bytes(file.read(0, file.size()))
    ends = [found.end for found in FrameReader(content) if found.kind == FORWARD]
    file.write(ends[-1], bytes(len(content) - ends[-1]))
    file.sync()
    file.close()
    log = world.open(disk)
    assert log.report.damage == []
    assert datas(log, "b") == ["one", "two"]
    assert total(log, "r") == 2


def test_a_full_quota_blocks_a_forwarder_until_it_has_capacity() -> None:
    world = EngineHarness(total_bytes_max=10)
    world.log.router("r", "a", "b")
    world.log.topic("a").append([b"123", b"456"])
    assert datas(world.log, "b") == [b"123"]
    assert total(world.log, "r") == 1
    world.log.topic("a").delete(before_seq=2)
    assert datas(world.log, "b") == [b"123", b"456"]


def test_copies_survive_the_loss_of_their_source_records() -> None:
    """The source is of class disk: a power cut takes its end. What the target has is the target's, under its class."""
    world = EngineHarness(head_reserve=4, wal_shards=2)
    for name in "bca":
        world.log.topic(name, durability="disk" if name == "a" else "fsync")
    assert topic_operations(world.log.topic("a")).shard is not topic_operations(world.log.topic("b")).shard
    world.log.router("r", "a", "b")
    world.log.topic("a").append([1, 2])
    world.log.tick()
    world.log.topic("a").append([3, 4])
    assert datas(world.log, "b") == [1, 2, 3, 4]
    log = world.restart("crash")
    assert datas(log, "a") == [1, 2]
    assert datas(log, "b") == [1, 2, 3, 4]
    assert log.topic("b").append("next").first_seq == 5
    log.topic("a").append(5)
    assert datas(log, "b") == [1, 2, 3, 4, "next", 5]


def test_a_lost_direct_write_of_class_disk_leaves_its_seq_unused() -> None:
    world = EngineHarness(head_reserve=4)
    world.log.topic("a", durability="fsync")
    world.log.router("r", "a", "b")
    world.log.topic("a").append(1)
    assert world.log.topic("b").append("d1").first_seq == 1
    assert rows(world.log, "b") == [(1, "d1"), (2, 1)]
    assert world.log.topic("b").append("d2").first_seq == 3
    assert world.log.topic("b").append("d3").first_seq == 4
    log = world.restart("crash")
    assert rows(log, "b")[0] == (1, "d1")
    assert [data for _, data in rows(log, "b")[1:]] == [1]  # the copy is made again; direct writes were not synced
    assert rows(log, "b")[1][0] > 4
    log.topic("a").append(2)
    assert datas(log, "b") == ["d1", 1, 2]


def test_a_failed_write_before_copies_is_reported() -> None:
    """A hole in the dest that no frame shows would shift every later copy."""
    world = EngineHarness()
    for name in "ab":
        world.log.topic(name, durability="fsync")
    world.log.router("r", "a", "b")
    world.log.topic("a").append(1)
    assert datas(world.log, "b") == [1]
    world.disk.fail("write", error=ENOSPC, partial=10)
    with pytest.raises(DiskFull):
        world.log.topic("b").append("lost")
    world.log.topic("a").append(2)
    before = rows(world.log, "b")
    assert before == [(1, 1), (3, 2)]
    assert rows(world.restart("crash"), "b") == before


# ── routers themselves ────────────────────────────────────────────────────────────────────────


@restarts
def test_what_a_restart_keeps(how: Restart) -> None:
    """§3.6: options, totals, cursors, seqs; a change of options holds from where it was made."""
    world = EngineHarness(**TINY)
    for name in "ab":
        world.log.topic(name, durability="fsync")
    world.log.topic("a").append("before")
    world.log.router("r", "a", "b", preserve_tag=False)
    world.log.topic("a").append([1, 2], tag="x")
    world.log.router("r", "a", "b", filter="x*", guarantee="exactly_once")
    world.log.router("s", "a", "b", filter="y")
    world.log.topic("a").append([3, 4, 5], tag=["x", "y", None])
    found = [(r.seq, r.data, r.tag, r.meta) for r in world.log.topic("b").read().records]
    assert [(seq, data, tag) for seq, data, tag, _ in found] == [(1, 1, None), (2, 2, None), (3, 3, "x"), (4, 4, "y")]
    states = world.log.routers()
    for _ in range(2):
        log = world.restart(how)
        assert [(r.seq, r.data, r.tag, r.meta) for r in log.topic("b").read().records] == found
        assert log.routers() == states
    world.log.drop_router("s")
    log = world.restart(how)
    assert [state.router for state in log.routers()] == ["r"]
    log.topic("a").append([6, 7], tag=["x", "y"])
    assert datas(log, "b") == [1, 2, 3, 4, 6]


@restarts
def test_a_dropped_source_leaves_its_copies(how: Restart) -> None:
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync")
    world.log.router("r", "a", "b")
    world.log.router("s", "b", "c")
    world.log.topic("a").append([1, 2, 3])
    assert world.log.drop_with_routers("a") == ["r"]
    log = world.restart(how)
    assert (datas(log, "b"), datas(log, "c")) == ([1, 2, 3], [1, 2, 3])
    assert [state.router for state in log.routers()] == ["s"]
    assert log.drop_with_routers("c") == ["s"]
    assert log.drop_with_routers("c") is None
    assert log.routers() == []


@restarts
def test_records_that_the_source_removed_stay_in_the_dest(how: Restart) -> None:
    world = EngineHarness(**TINY)
    world.log.topic("a", durability="fsync", cap_records=3)
    world.log.topic("b", durability="fsync")
    world.log.router("r", "a", "b")
    for number in range(30):
        world.log.topic("a").append(number)
        if number % 3 == 0:
            assert datas(world.log, "b")[-1] == number
        if number % 7 == 0:
            world.log.checkpoint()
    before = rows(world.log, "b")
    assert [data for _, data in before] == list(range(30))
    assert rows(world.restart(how), "b") == before


def test_a_reader_beside_the_writer_sees_copies() -> None:
    world = EngineHarness()
    world.log.topic("a", durability="fsync")
    world.log.router("r", "a", "b")
    world.log.topic("a").append([1, 2])
    assert datas(world.reader(), "b") == [], "only the writer gives seqs to copies"
    assert datas(world.log, "b") == [1, 2]
    reader = world.reader()
    assert datas(reader, "b") == [1, 2]
    assert total(reader, "r") == 2
    with pytest.raises(ReadOnly):
        reader.router("s", "a", "c")
    with pytest.raises(ReadOnly):
        reader.drop_router("r")
    world.log.topic("a").append(3)
    assert total(world.log, "r") == 3
    reader.refresh()
    assert datas(reader, "b") == [1, 2, 3]


def test_a_refused_router_creates_nothing() -> None:
    log = EngineHarness(routers_max=1, topics_max=3).log
    with pytest.raises(BadInput):
        log.router("-", "a", "b")
    with pytest.raises(BadInput):
        log.router("r", "a", "a")
    with pytest.raises(BadInput):
        log.router("r", "a", "b", filter=["tag", "Glob", "x"])
    with pytest.raises(BadInput):
        log.router("r", "a", "b", guarantee="often")  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        log.router("r", "a", "b", preserve_tag=1)  # type: ignore[arg-type]
    with pytest.raises(TopicNotFound):
        log.router("r", "a", "b", create_dest=False)
    assert log.names() == []
    assert log.router("r", "a", "b").created
    assert not log.router("r", "a", "b").created
    with pytest.raises(TopicExists):
        log.router("s", "x", "b")
    with pytest.raises(Throttled) as full:
        log.router("s", "a", "c")
    assert (full.value.limit, full.value.max) == ("routers", 1)
    assert log.names() == ["a", "b"]
    log.drop_router("r")
    log.topic("c")
    with pytest.raises(Throttled):
        log.router("s", "c", "d")
    with pytest.raises(Throttled):
        log.router("s", "d", "e")
    assert log.names() == ["a", "b", "c"]


def test_the_thread_forwards_copies_to_a_waiting_reader(tmp_path: Any) -> None:
    with tidelog.open(str(tmp_path), wal_shards=2) as log:
        log.router("r", "a", "b")
        log.router("s", "b", "c")
        reader = log.topic("c").follow(timeout=30)
        log.topic("a").append("x")
        record = next(reader)
        assert isinstance(record, tidelog.engine.Record)
        assert record.data == "x"


@pytest.mark.parametrize("source", ["memory", "ephemeral"])
def test_a_source_that_lost_its_newest_records_continues(source: str) -> None:
    world = EngineHarness()
    world.log.topic("a", durability=source)
    world.log.topic("b", durability="fsync")
    world.log.router("r", "a", "b")
    world.log.topic("a").append([1, 2, 3])
    assert datas(world.log, "b") == [1, 2, 3]
    assert world.log.topic("b").append("direct").first_seq == 4
    world.disk = world.disk.crash_image("none")
    log = world.log = world.open(world.disk)
    found = dict(rows(log, "b"))
    assert found[4] == "direct"
    assert set(found.values()) <= {1, 2, 3, "direct"}
    log.topic("a").append("again")
    assert rows(log, "b")[-1] == (5, "again")
    before = rows(log, "b")
    log.checkpoint()
    assert rows(world.crash(), "b") == before


def test_check_finds_no_damage_in_copies(tmp_path: Any) -> None:
    with tidelog.open(str(tmp_path), threads=False, wal_shards=2) as log:
        log.topic("a", cap_records=3, durability="fsync")
        log.router("r", "a", "b")
        log.topic("a").append([1, 2, 3, 4, 5])
        log.topic("b").append("direct")
        log.topic("a").append(6)
        log.checkpoint()
        log.topic("a").append(7)
    assert main(["check", str(tmp_path), "--json"]) == 0


def test_concurrent_writers_readers_and_checkpoints(tmp_path: Any) -> None:
    """Every record is forwarded once, in order, by any thread; a restart has the same state."""
    count = 300
    with tidelog.open(str(tmp_path), wal_shards=2, segment_events_max=50) as log:
        log.router("r", "a", "b")
        log.router("s", "b", "c", filter="x")
        log.router("t", "a", "d")

        def write(name: str) -> None:
            for number in range(count):
                log.topic(name).append(f"{name}{number}", tag="x" if number % 2 else None)

        def look() -> None:
            for _ in range(count):
                log.topic("b").state()
                log.topic("c").read()

        def keep() -> None:
            for number in range(8):
                log.checkpoint()
                log.router("u", "a", f"e{number}")
                log.drop(f"e{number}")

        threads = [Thread(target=write, args=(name,)) for name in "aab"] + [Thread(target=look), Thread(target=keep)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        found = {name: log.topic(name).to_arrow().column("data").to_pylist() for name in "abcd"}
    assert [data for data in found["b"] if data[:2] == b'"a'] == found["a"] == found["d"]
    assert len(found["b"]) == 3 * count
    assert len(found["c"]) == 3 * count // 2
    with tidelog.open(str(tmp_path), threads=False) as log:
        assert {name: log.topic(name).to_arrow().column("data").to_pylist() for name in "abcd"} == found
        assert [state.forwarded_total for state in log.routers()] == [2 * count, 3 * count // 2, 2 * count]
