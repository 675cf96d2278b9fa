"""A batch by path and by server: what is read, what is told of what is not, and what happens when files go away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThan, Not, StringContains
from tests.unit.spark.helpers import MODES, Mode, SourceEnv, read, source, source_env

from tidelog import database as topics
from tidelog.disk.posix import PosixFile
from tidelog.engine import read as engine_read
from tidelog.errors import BadInput, Corrupt, Error, GapFound, NotFound, TopicNotFound, Unavailable
from tidelog.spark.backends import directory as by_path
from tidelog.spark.backends import interface
from tidelog.spark.backends.interface import ReadTask
from tidelog.testing import ManualClock


@pytest.fixture(params=MODES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SourceEnv]:
    with source_env(request.param, tmp_path) as made:
        yield made


def fill(env: SourceEnv) -> list[int]:
    """2500 records in three segments, and 60 in the WAL; some of either are deleted. Returns what is left."""
    topic = env.engine.topic("orders")
    for first in range(0, 2500, 100):
        topic.append([b"%d" % number for number in range(first, first + 100)], tag=f"t{first}", node="eu")
    env.engine.checkpoint()
    for number in range(60):
        topic.append({"n": number}, tag=f"tail-{number}", meta={"trace": number, "who": "me"})
    topic.delete(seqs=[1, 2, 700, 701, 2505])
    gone = {1, 2, 700, 701, 2505}
    return [seq for seq in range(1, 2561) if seq not in gone]


def test_every_record_arrives_once_with_all_its_columns(env: SourceEnv) -> None:
    left = fill(env)
    found = read(env.options())
    assert found.seqs == left
    rows = {row["seq"]: row for row in found.table.to_pylist()}
    assert {row["topic"] for row in rows.values()} == {"orders"}
    assert [rows[4][name] for name in ("node", "tag", "meta", "data")] == ["eu", "t0", None, b"3"]
    assert [rows[2510][name] for name in ("node", "tag", "data")] == [None, "tail-9", b'{"n":9}']
    assert dict(rows[2510]["meta"]) == {"trace": "9", "who": "me"}
    now = datetime.now(UTC)
    assert all(abs((now - row["ts"]).total_seconds()) < 600 for row in rows.values())


def test_seqs_are_accounted_for_task_by_task(env: SourceEnv) -> None:
    """E8: rows, deleted and the rest are all of the range."""
    left = fill(env)
    found = read(env.options(minPartitions=5, splitBytes="4k"))
    assert sum(split.seq_count for split in found.tasks) == 2560
    assert found.seqs == left


def test_task_logs_the_fate_of_its_seqs(env: SourceEnv, caplog: pytest.LogCaptureFixture) -> None:
    fill(env)
    read(env.options(minPartitions=2, where="seq < 2001 and tag != 't100'"))
    told = [json.loads(record.message) for record in caplog.records if record.name == "tidelog.spark"]
    assert len(told) > 1
    for each in told:
        parts = [each[name] for name in ("rows", "deleted", "expired", "evicted", "filtered", "holes")]
        assert sum(parts) == each["seqs"]
    assert sum(each["rows"] for each in told) == 2000 - 4 - 100
    assert sum(each["filtered"] for each in told) == 560 + 100


def test_a_task_that_loses_a_record_fails(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law can fail: a reader that drops rows is caught, whichever way they get lost."""
    fill(env)
    module, name = (by_path, "_read_segment_file") if env.mode == "path" else (interface, "read_segment_ranges")
    real = getattr(module, name)

    def lossy(*args: object, **kwargs: object) -> Iterator[object]:
        for found in real(*args, **kwargs):
            whole = found[0]
            yield whole._replace(rows=whole.rows and whole.rows.slice(0, len(whole.rows) - 1)), found[1]

    monkeypatch.setattr(module, name, lossy)
    with pytest.raises(Error, match="was to account for"):
        read(env.options())


@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
def test_one_topic_fills_every_task_evenly(env: SourceEnv, tasks: int) -> None:
    topic = env.engine.topic("orders")
    for _ in range(40):
        topic.append([b"x" * 100] * 250)
    env.engine.checkpoint()
    found = read(env.options(minPartitions=tasks, splitBytes="1g"))
    sizes = [split.size for split in found.tasks]
    assert len(sizes) == tasks
    assert max(sizes) < 1.5 * min(sizes), sizes
    assert found.seqs == list(range(1, 10_001))


def test_a_cut_inside_a_frame_reads_each_record_once(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    for size in (300, 500, 200, 700):
        topic.append([b"x" * 20] * size)
    env.engine.checkpoint()
    found = read(env.options(minPartitions=7))
    firsts = {stretch.first for split in found.tasks for stretch in split.ranges}
    assert not firsts <= {1, 301, 801, 1001, 1701}
    assert len(found.tasks) == 7
    assert found.seqs == list(range(1, 1701))


def test_small_topics_share_a_task(env: SourceEnv) -> None:
    for number in range(6):
        env.engine.topic(f"small-{number}").append([b"a", b"b"])
    env.engine.checkpoint()
    options = env.options(subscribePattern="small-[0-4]")
    del options["subscribe"]
    found = read(options)
    assert len(found.tasks) == 1
    assert found.table.group_by("topic").aggregate([("seq", "count")]).num_rows == 5


def test_a_range_is_included_at_its_start_and_not_at_its_end(env: SourceEnv) -> None:
    fill(env)
    found = read(env.options(startingOffsets='{"orders": 690}', endingOffsets='{"orders": 703}'))
    assert found.seqs == [*range(690, 700), 702]
    assert read(env.options(startingOffsets="latest")).seqs == []
    assert read(env.options(endingOffsets='{"orders": {"epoch": 1, "seq": 6}}')).seqs == [3, 4, 5]
    assert read(env.options(startingOffsets='{"orders": 2561}')).seqs == []


def test_columns_and_conditions_are_applied_where_the_bytes_are(env: SourceEnv) -> None:
    fill(env)
    found = read(env.options(columns="seq,tag", where="seq >= 600 and seq < 2503 and tag in ('t600', 'tail-1')"))
    assert found.table.schema.names == ["seq", "tag"]
    assert found.seqs == [*range(601, 700), 2502]
    assert sum(len(split.ranges) for split in found.tasks) == 4, "600 to 2502 lie in three segments and the WAL"
    assert read(env.options(where="tag like 'tail-5%'")).seqs == [2506, *range(2551, 2561)]
    assert read(env.options(where="node is null and tag != 'tail-3'")).table.num_rows == 58
    assert read(env.options(where="topic = 'other'")).table.num_rows == 0
    assert read(env.options(where="seq = 9")).seqs == [9]


def test_filters_of_spark_narrow_the_plan(env: SourceEnv) -> None:
    fill(env)
    pushed = [
        GreaterThan(("seq",), 10),
        LessThan(("seq",), 20),
        Not(In(("tag",), ("x", "y"))),
        IsNotNull(("seq",)),
        EqualTo(("topic",), "orders"),
    ]
    kept = [StringContains(("data",), "x"), EqualTo(("meta", "a"), "b"), EqualTo(("ts",), datetime(2026, 1, 1))]
    found = read(env.options(), filters=[*pushed, *kept])
    assert found.unpushed_filters == kept
    assert found.seqs == list(range(11, 20))
    assert sum(stretch.seq_count for split in found.tasks for stretch in split.ranges) == 9


def test_a_time_finds_its_record(tmp_path: Path) -> None:
    clock = ManualClock()
    with source_env("path", tmp_path, clock=clock) as env:
        topic = env.engine.topic("orders")
        times = []
        for number in range(10):
            times.append(clock.now_us() // 1000)
            topic.append(b"%d" % number)
            clock.tick(1000)
        at = {"startingTimestamp": times[3], "endingTimestamp": times[7]}
        assert read(env.options(**at)).seqs == [4, 5, 6, 7]
        iso = datetime.fromtimestamp(times[8] / 1000, UTC).isoformat()
        assert read(env.options(startingTimestamp=iso)).seqs == [9, 10]
        assert read(env.options(where=f"ts >= '{iso}'")).seqs == [9, 10]
        assert read(env.options(where=f"ts < '{iso}'")).seqs == list(range(1, 9))
        late = times[9] + 5000
        with pytest.raises(BadInput, match="no record that late"):
            read(env.options(startingTimestamp=late))
        assert read(env.options(startingTimestamp=late, onTimestampMiss="latest")).seqs == []


# ── loss ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_cap_took_fails_the_query_with_range_and_cause(env: SourceEnv) -> None:
    topic = env.engine.topic("orders", cap_records=100)
    for _ in range(30):
        topic.append([b"x"] * 10)
    env.engine.checkpoint()
    first = topic.evict_floor
    assert first == 201
    with pytest.raises(GapFound, match=r"orders: seqs 50 to 200 are lost \(cap\).*onGap"):
        read(env.options(startingOffsets='{"orders": 50}'))
    skipped = read(env.options(startingOffsets='{"orders": 50}', onGap="skip"))
    assert skipped.seqs == list(range(201, 301))
    assert sum(split.counts.evicted for split in skipped.tasks) == 151
    assert read(env.options(startingOffsets='{"orders": 50}', failOnDataLoss="false")).seqs == skipped.seqs
    told = read(env.options(startingOffsets='{"orders": 50}', onGap="emit", includeGaps="true"))
    assert told.table.schema.names[-1] == "gap"
    gap, *rows = told.table.to_pylist()
    assert gap["gap"] == {"first": 50, "last": 200, "cause": "cap"}
    assert (gap["topic"], gap["seq"], gap["data"]) == ("orders", 50, None)
    assert [row["seq"] for row in rows] == skipped.seqs
    assert {row["gap"] for row in rows} == {None}
    assert read(env.options()).seqs == skipped.seqs, "whoever asks for the earliest has missed nothing"


def test_expired_records_are_reported_as_ttl(tmp_path: Path) -> None:
    clock = ManualClock()  # stands long ago: to a reader of today everything is old
    with source_env("path", tmp_path, clock=clock) as env:
        env.engine.topic("orders", ttl_ms=60_000).append([b"x"] * 10)
        with pytest.raises(GapFound, match=r"seqs 1 to 10 are lost \(ttl\)"):
            read(env.options(startingOffsets='{"orders": 1}'))
        found = read(env.options(startingOffsets='{"orders": 1}', onGap="skip"))
        assert (found.seqs, found.tasks[0].counts.expired) == ([], 10)


def test_deletes_never_alarm(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    for _ in range(30):
        topic.append([b"x"] * 100)
    env.engine.checkpoint()
    topic.delete(before_seq=1500)
    topic.delete(seqs=list(range(2001, 2101)))
    env.engine.checkpoint()
    env.engine.checkpoint()  # segments of which nothing is left are gone now
    found = read(env.options(startingOffsets='{"orders": 1}'))
    assert found.seqs == [*range(1500, 2001), *range(2101, 3001)]
    assert found.tasks[0].counts.deleted == 1499


def test_holes_are_counted_and_not_alarming(tmp_path: Path) -> None:
    with source_env("path", tmp_path) as env:
        env.engine.topic("orders", durability="disk").append([b"x"] * 10)
        image = tmp_path / "copy"
        shutil.copytree(env.path, image / "data")
    with source_env("path", image) as killed:  # what was reserved and not written are holes now
        topic = killed.engine.topic("orders")
        assert topic.head_seq > 10
        after = topic.append(b"y").first_seq
        found = read(killed.options())
        assert found.seqs == [*range(1, 11), after]


# ── files that go away under a reader ─────────────────────────────────────────────────────────────


def planned(env: SourceEnv, **more: object) -> tuple[object, list[ReadTask]]:
    made = source(env.options(**more))
    reader = made.reader(made.schema())
    return reader, [split for split in reader.partitions() if isinstance(split, ReadTask)]


def rows_of(reader: object, splits: list[ReadTask]) -> list[int]:
    found: list[int] = []
    for split in splits:
        for batch in reader.read(split):  # type: ignore[attr-defined]
            found += batch.column("seq").to_pylist()
    return found


@pytest.mark.parametrize("filed", [False, True])
def test_what_a_router_lost_at_its_source_is_a_gap_between_records(env: SourceEnv, filed: bool) -> None:
    engine = env.engine
    engine.topic("events", cap_records=2)
    engine.topic("orders").append([b"one", b"two"])
    engine.router("r", "events", "orders")
    engine.topic("events").append([b"%d" % number for number in range(5)])
    assert engine.topic("orders").state().head_seq == 7
    if filed:
        engine.checkpoint()
    with pytest.raises(GapFound, match=r"orders: seqs 3 to 5 are lost \(source_trim\)"):
        read(env.options())
    skipped = read(env.options(onGap="skip"))
    assert skipped.table.column("seq").to_pylist() == [1, 2, 6, 7]
    told = read(env.options(onGap="emit", includeGaps="true"))
    assert [row["gap"] for row in told.table.to_pylist() if row["gap"]] == [
        {"first": 3, "last": 5, "cause": "source_trim"}
    ]


@pytest.mark.parametrize("filed", [(), (1,), (0, 1, 2, 3)], ids=["none", "one", "all"])
def test_every_gap_that_a_router_left_is_emitted(env: SourceEnv, filed: tuple[int, ...]) -> None:
    engine = env.engine
    engine.topic("events", cap_records=2)
    engine.topic("orders").append(b"first")
    engine.router("r", "events", "orders")
    for turn in range(3):
        engine.topic("events").append([b"%d" % number for number in range(5)])
        assert engine.topic("orders").state().head_seq == 6 * turn + 6
        engine.topic("orders").append(b"direct")
        if turn in filed:
            engine.checkpoint()
    engine.topic("orders").delete(seqs=[11, 12, 13])  # what is between two gaps
    if 3 in filed:
        engine.checkpoint()
    gaps = [(2, 4), (8, 10), (14, 16)]
    found = engine.topic("orders").to_arrow()
    assert found.column("seq").to_pylist() == [1, 5, 6, 7, 17, 18, 19]
    told = json.loads(found.schema.metadata[b"gaps"])
    assert [(gap["gap_from"], gap["gap_to"]) for gap in told] == gaps
    assert json.loads(found.schema.metadata[b"gap"]) == told[0]
    part = engine.topic("orders").to_arrow(8, 17)  # begins inside one and ends behind the next
    assert [gap["gap_from"] for gap in json.loads(part.schema.metadata[b"gaps"])] == [9, 14]
    assert json.loads(engine.topic("orders").to_arrow(4, 7).schema.metadata[b"gaps"]) == []
    read_ = read(env.options(onGap="emit", includeGaps="true"))
    rows = [row["gap"] for row in read_.table.to_pylist() if row["gap"]]
    assert sorted((gap["first"], gap["last"]) for gap in rows) == gaps
    assert [row["seq"] for row in read_.table.to_pylist() if not row["gap"]] == [1, 5, 6, 7, 17, 18, 19]


def test_records_evicted_after_the_plan_are_a_gap_and_not_silence(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    for _ in range(30):
        topic.append([b"x"] * 100)
    env.engine.checkpoint()
    reader, splits = planned(env)
    lenient, again = planned(env, onGap="skip")
    env.engine.topic("orders", cap_records=500)
    for _ in range(3):
        topic.append(b"y")
        env.engine.checkpoint()
    with pytest.raises(GapFound, match=r"\(cap\)"):
        rows_of(reader, splits)
    left = rows_of(lenient, again)
    assert left[-1] == 3000
    assert left == list(range(left[0], 3001))
    assert left[0] >= 2001, "two whole segments went"


def test_records_deleted_after_the_plan_are_gone_in_silence(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    for _ in range(30):
        topic.append([b"x"] * 100)
    env.engine.checkpoint()
    reader, splits = planned(env)
    topic.delete(before_seq=2500)
    for _ in range(3):
        topic.append(b"y")
        env.engine.checkpoint()
    found = rows_of(reader, splits)
    assert found == list(range(found[0], 3001)), "a file that is still there is read as planned"
    assert 2001 <= found[0] <= 2500


def test_topic_dropped_or_recreated_after_planning_is_reported(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    for _ in range(20):
        topic.append([b"x"] * 100)
    env.engine.checkpoint()
    reader, splits = planned(env)
    env.engine.drop("orders")
    if env.mode == "path":
        assert rows_of(reader, splits) == list(range(1, 2001)), "files that are still there are read as planned"
        env.engine.tick()  # removes them
    with pytest.raises(GapFound, match="dropped"):
        rows_of(reader, splits)
    other = env.engine.topic("orders")
    for _ in range(20):
        other.append([b"y"] * 100)
    env.engine.checkpoint()
    with pytest.raises(GapFound, match="made again"):
        rows_of(reader, splits)


def test_a_tail_that_became_a_segment_is_found_there(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.spark.plan.INLINE_TAIL_BYTES_MAX", 0)
    topic = env.engine.topic("orders")
    topic.append([b"x"] * 300)
    reader, splits = planned(env)
    assert splits[0].ranges[0].file is None
    env.engine.checkpoint()
    topic.append(b"later")
    topic.delete(seqs=[7])
    assert rows_of(reader, splits) == [seq for seq in range(1, 301) if seq != 7]


def test_a_plan_can_be_read_again_whatever_is_deleted_meanwhile(tmp_path: Path) -> None:
    """A task that is tried again gives the same rows."""
    with source_env("path", tmp_path) as env:
        fill(env)
        reader, splits = planned(env)
        once = rows_of(reader, splits)
        env.engine.topic("orders").delete(seqs=[10, 11, 2550])
        assert rows_of(reader, splits) == once


def test_an_executor_that_cannot_see_the_path_says_so(tmp_path: Path) -> None:
    with source_env("path", tmp_path) as env:
        fill(env)
        reader, splits = planned(env)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="every one of them has to see the path"):
        rows_of(reader, splits)


def test_a_writer_that_is_faster_than_a_look_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source_env("path", tmp_path) as env:
        left = fill(env)
        real, refused = topics.open_for_planning, 0

        def busy(*args: Any, **kwargs: Any) -> Any:
            nonlocal refused
            refused += 1
            if refused % 3:
                raise Unavailable("the directory changes faster than it can be read")
            return real(*args, **kwargs)

        monkeypatch.setattr(topics, "open_for_planning", busy)
        assert read(env.options()).seqs == left
        monkeypatch.setattr(by_path, "_OPEN_ATTEMPTS", 2)
        with pytest.raises(Unavailable, match="changes faster"):
            read(env.options())


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", ["true", "false"])
def test_flipped_bit_is_found_unless_verification_is_off(tmp_path: Path, verify: str, mode: Mode) -> None:
    with source_env(mode, tmp_path) as env:
        fill(env)
        path = next((tmp_path / "data").rglob("seg-*0001.data"))
        content = bytearray(path.read_bytes())
        at = content.rindex(b"999")
        content[at] ^= 1
        path.write_bytes(content)
        if verify == "true":
            with pytest.raises(Corrupt, match="checksum"):
                read(env.options())
        else:
            found = read(env.options(verify="false"))
            assert found.table.filter(found.table.column("seq").to_numpy() == 1000).column("data")[0].as_py() == b"899"


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────


def test_a_topic_that_is_not_there_is_named_with_the_nearest(env: SourceEnv) -> None:
    fill(env)
    with pytest.raises(TopicNotFound, match=r"no topic 'order'.*did you mean 'orders'"):
        read(env.options(subscribe="order"))
    with pytest.raises(BadInput, match=r"startingOffsets names 'x', which is not subscribed to"):
        read(env.options(startingOffsets='{"x": 1}'))


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_an_offset_ahead_of_the_head_is_refused(env: SourceEnv, option: str) -> None:
    fill(env)
    with pytest.raises(BadInput, match=f"{option} is 9999 for orders, whose last record is 2560"):
        read(env.options(**{option: '{"orders": 9999}'}))


def test_a_range_that_ends_before_it_starts_is_refused(env: SourceEnv) -> None:
    fill(env)
    with pytest.raises(BadInput, match="ends at 5, before it starts at 9"):
        read(env.options(startingOffsets='{"orders": 9}', endingOffsets='{"orders": 5}'))


def test_places_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no data at"):
        read({"path": str(tmp_path / "none"), "subscribe": "orders"})
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="is a file"):
        read({"path": str(tmp_path / "file"), "subscribe": "orders"})
    with pytest.raises(Unavailable, match=r"cannot be reached or went away.*start it"):
        read({"server": "http://127.0.0.1:9", "subscribe": "orders"})


def test_a_key_is_sent_and_a_wrong_one_refused(tmp_path: Path) -> None:
    with source_env("server", tmp_path, keys="s3cret:read") as env:
        env.engine.topic("orders").append([b"x"] * 5)
        assert read(env.options(key="s3cret")).seqs == [1, 2, 3, 4, 5]
        for wrong in ({}, {"key": "other"}):
            with pytest.raises(BadInput, match=r"option key: .* 401"):
                read(env.options(**wrong))


def test_an_empty_topic_is_an_empty_table(env: SourceEnv) -> None:
    env.engine.topic("orders")
    found = read(env.options())
    assert (found.seqs, len(found.tasks)) == ([], 1), "Spark wants one partition at least"


def test_a_million_records_are_read_without_an_object_for_each(tmp_path: Path) -> None:
    """Only so that nobody puts a loop over records back in: a second is fifty times what it takes."""
    with source_env("path", tmp_path, segment_events=100_000) as env:
        topic = env.engine.topic("orders", durability="memory")
        for _ in range(20):
            topic.append([b"x" * 20] * 10_000)
        env.engine.checkpoint()
        found = read(env.options())
        assert np.array_equal(found.table.column("seq").to_numpy(), np.arange(1, 200_001))


def test_a_strong_query_reads_what_survives_a_power_cut(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = PosixFile.sync

    def noted(file: PosixFile) -> None:
        synced.append(file.path)
        real(file)

    topic = env.engine.topic("orders", durability="disk")
    topic.append([b"1", b"2"])
    topic.append(b"3")
    monkeypatch.setattr(PosixFile, "sync", noted)
    topic.append(b"4")
    found = read(env.options(consistency="strong"))
    assert found.table.column("seq").to_pylist() == [1, 2, 3, 4]
    assert any("wal" in path for path in synced), "what the plan names was synced first"
    env.engine.topic("orders", durability="memory")
    with pytest.raises(BadInput, match="strong readers cannot be served"):
        read(env.options(consistency="strong"))
    assert read(env.options(consistency="eventual")).table.num_rows == 4


def test_a_strong_query_ends_where_the_disk_refuses_to_sync(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = env.engine.topic("orders", durability="disk")
    topic.append([b"1", b"2"])
    assert topic.read(0, strong=True).next_from_seq == 2
    topic.append(b"3")
    monkeypatch.setattr(engine_read, "_sync", lambda _: False)
    monkeypatch.setattr(engine_read, "_sync_files", lambda _: False)
    assert set(read(env.options(consistency="strong")).table.column("seq").to_pylist()) <= {1, 2}
    assert read(env.options()).table.column("seq").to_pylist() == [1, 2, 3]
