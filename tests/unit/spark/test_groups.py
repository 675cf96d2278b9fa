"""Groups of consumers from Spark: a query starts where one stands, and everybody sees how far it came (E7)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.unit.spark.helpers import MODES, Mode, read, run_server, stream

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.database import Database, engine_of
from tidelog.errors import BadInput, Locked
from tidelog.spark.groups import DirectoryGroups, ServerGroups


class GroupEnv:
    """A topic that nobody holds while a query runs by path; by server, the server does."""

    def __init__(self, path: Path, engine: Database | None, address: str) -> None:
        self._path, self._engine, self._address = path, engine, address
        with self.log() as log:
            log.topic("orders").append([b"x"] * 10)

    def options(self, **more: Any) -> dict[str, str]:
        where = {"path": str(self._path)} if self._engine is None else {"server": self._address}
        return {**where, "subscribe": "orders", **{name: str(value) for name, value in more.items()}}

    @contextmanager
    def log(self) -> Iterator[Database]:
        if self._engine is not None:
            yield self._engine
        else:
            with tidelog.open(str(self._path), threads=False) as log:
                yield log

    def position(self, group: str = "etl", topic: str = "orders") -> int | None:
        with self.log() as log:
            found = log.topic(topic).group(group)
            return found.position if found.exists else None

    def offsets_at(self, seq: int, topic: str = "orders") -> dict[str, Any]:
        with self.log() as log:
            return {topic: {"epoch": log.topic(topic).epoch, "seq": seq}}


@pytest.fixture(params=MODES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupEnv]:
    mode: Mode = request.param
    if mode == "path":
        yield GroupEnv(tmp_path / "data", None, "")
    else:
        with run_server(str(tmp_path / "data")) as (engine, address):
            yield GroupEnv(tmp_path / "data", engine, address)


def test_a_commit_moves_the_group_and_lag_is_seen(env: GroupEnv) -> None:
    reader = stream(env.options(group="etl", startingOffsets="group:etl"))
    assert reader.initialOffset() == env.offsets_at(1), "a group that is new starts with what is there"
    reader.commit(env.offsets_at(8))
    assert env.position() == 7
    with env.log() as log:
        assert log.topic("orders").group("etl").lag().records == 3
        assert [(topic, state.lag.records) for topic, state in engine_of(log).groups_cached(10)] == [("orders", 3)], (
            "for metrics"
        )
    reader.commit(env.offsets_at(11))
    assert env.position() == 10
    reader.stop()


def test_a_query_starts_and_a_batch_ends_where_a_group_stands(env: GroupEnv) -> None:
    with env.log() as log:
        log.topic("orders").group("etl").commit(4)
    started = stream(env.options(startingOffsets="group:etl"))
    assert started.initialOffset() == env.offsets_at(5)
    started.stop()
    assert read(env.options(startingOffsets="group:etl")).seqs == [5, 6, 7, 8, 9, 10]
    assert read(env.options(endingOffsets="group:etl")).seqs == [1, 2, 3, 4]


def test_a_topic_that_the_group_has_not_read_is_read_from_its_start(env: GroupEnv) -> None:
    with env.log() as log:
        log.topic("orders").group("etl").commit(9)
        log.topic("more").append([b"y"] * 2)
    found = read(env.options(subscribe="orders,more", startingOffsets="group:etl"))
    assert sorted(zip(found.table.column("topic").to_pylist(), found.seqs, strict=True)) == [
        ("more", 1),
        ("more", 2),
        ("orders", 10),
    ]


def test_unknown_group_is_refused(env: GroupEnv) -> None:
    for make in (read, lambda options: stream(options).initialOffset()):
        with pytest.raises(BadInput, match=r"orders of .* has no group 'eti'; nothing was read"):
            make(env.options(startingOffsets="group:eti"))
    with pytest.raises(BadInput, match=r"option endingOffsets: .* has no group 'eti'"):
        read(env.options(endingOffsets="group:eti"))


def test_a_group_that_is_ahead_or_of_another_topic_stays(env: GroupEnv) -> None:
    reader = stream(env.options(group="etl"))
    reader.commit(env.offsets_at(8))
    reader.commit(env.offsets_at(3))
    assert env.position() == 7
    old = env.offsets_at(5)
    with env.log() as log:
        log.drop("orders")
        log.topic("orders").append([b"z"] * 10)
    reader.commit(old)
    assert env.position() is None, "its offsets are of records that are gone"
    with env.log() as log:
        log.drop("orders")
    reader.commit(old)
    reader.stop()


def test_by_path_another_writer_is_an_error_at_the_start_and_a_warning_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = GroupEnv(tmp_path / "data", None, "")
    reader = stream(env.options(group="etl"))
    where = env.offsets_at(8)
    with tidelog.open(str(tmp_path / "data")):
        with pytest.raises(Locked, match="name the server that has it"):
            reader.initialOffset()
        with caplog.at_level(logging.WARNING, "tidelog.spark"):
            reader.commit(where)
        assert "stays where it is until the next batch" in caplog.text
    assert env.position() is None
    reader.commit(where)
    assert env.position() == 7
    reader.stop()


def test_by_path_a_group_that_is_there_already_needs_no_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The source and the listener of a query both move a group: the second one does not lock the directory."""
    env = GroupEnv(tmp_path / "data", None, "")
    reader, second = stream(env.options(group="etl")), stream(env.options(group="etl"))
    where, before, after = env.offsets_at(8), env.offsets_at(3), env.offsets_at(9)
    reader.commit(where)
    with tidelog.open(str(tmp_path / "data")), caplog.at_level(logging.WARNING, "tidelog.spark"):
        second.commit(where)
        second.commit(before)
        assert not caplog.records
        second.commit(after)
        assert "stays where it is until the next batch" in caplog.text
    assert env.position() == 7
    reader.stop()
    second.stop()


def test_logs_of_the_library_have_no_groups(tmp_path: Path) -> None:
    with SegmentedLog.open(str(tmp_path / "log"), "rustlog") as log:
        log.append(b"a")
    with pytest.raises(BadInput, match="keep no groups of consumers, so there is no 'etl'"):
        read({"path": str(tmp_path / "log"), "codec": "rustlog", "startingOffsets": "group:etl"})


def test_a_key_that_may_only_read_cannot_move_a_group(tmp_path: Path) -> None:
    with run_server(str(tmp_path / "data"), keys="r:read") as (engine, address):
        engine.topic("orders").append([b"x"])
        reader = stream({"server": address, "key": "r", "subscribe": "orders", "group": "etl"})
        with pytest.raises(BadInput, match=r"option key: .* 403"):
            reader.commit({"orders": {"epoch": engine.topic("orders").epoch, "seq": 2}})
        reader.stop()


def test_planning_from_an_offset_says_that_everything_before_it_is_done(env: GroupEnv) -> None:
    """Spark never commits the last batch of a run: the group stayed one batch behind for good."""
    reader = stream(env.options(group="etl", startingOffsets="earliest"))
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(start, ReadMaxRows(6))
    assert env.position() is None, "nothing was processed yet"
    last = reader.latestOffset(end, ReadMaxRows(6))
    assert (env.position(), last) == (6, env.offsets_at(11))
    reader.commit(end)
    assert reader.latestOffset(last, ReadMaxRows(6)) == last
    assert env.position() == 10
    reader.stop()


def test_a_start_at_the_latest_moves_no_group(env: GroupEnv) -> None:
    reader = stream(env.options(group="etl", startingOffsets="latest"))
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    assert env.position() is None
    reader.stop()


def test_group_is_moved_once_for_each_offset(env: GroupEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def commit(_: object, group: str, spots: Any) -> bool:
        told.append((group, spots["orders"].seq))
        return True

    for kind in (DirectoryGroups, ServerGroups):
        monkeypatch.setattr(kind, "commit", commit)
    reader = stream(env.options(group="etl"))
    for seq in (5, 5, 5, 8, 8):
        reader.latestOffset(env.offsets_at(seq), ReadAllAvailable())
    reader.commit(env.offsets_at(8))
    assert told == [("etl", 5), ("etl", 8)]
    reader.stop()


def test_unreachable_server_during_a_group_move_does_not_stop_the_query(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_server(str(tmp_path / "data")) as (engine, address):
        engine.topic("orders").append([b"x"] * 10)
        reader = stream({"server": address, "subscribe": "orders", "group": "etl", "retryTimeout": "0s"})
    reader.commit({"orders": {"epoch": 1, "seq": 5}})
    assert "the group etl stays where it is" in caplog.text
