"""Exports of many topics in one process, and exports with a consumer group. No JVM: tasks run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event

import pytest
from deltalake import DeltaTable
from tests.unit.pipelines.helpers import InlineRunner
from tests.unit.pipelines.test_export import Killed, Killer
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog.addresses import Location
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, StoreUnavailable
from tidelog.pipelines import api, export_supervisor, record_mapping, table_formats
from tidelog.pipelines.export_job import ExportGroup, ExportJob, JobContext, Sizes
from tidelog.pipelines.export_supervisor import ExportSupervisor, TopicExport
from tidelog.pipelines.table_formats import interface
from tidelog.spark import options as reading
from tidelog.testing import ManualClock

SIZES = Sizes(file_bytes=100, age_ms=0, commit_bytes=300)
Step = Callable[[str, str], None]  # topic, step


def fill(data: Path, count: int, *topics: str) -> None:
    with tidelog.open(str(data), threads=False) as log:
        for topic in topics:
            log.topic(topic).append([{"n": number} for number in range(count)])


def options(where: str, topic: str) -> reading.Options:
    columns = ",".join(record_mapping.RECORD_COLUMNS)
    return reading.parse_options({**Location.parse(where).as_options(), "subscribe": topic, "columns": columns})


class Bench:
    """Topics of a directory, a table each, and steps at which a test makes one of them fail."""

    def __init__(self, root: Path) -> None:
        self.data, self.root = root / "data", root
        self.topics = ["a", "b", "c"]
        self.step: Step = lambda _topic, _step: None
        self.clock = ManualClock()
        fill(self.data, 40, *self.topics)

    @contextmanager
    def open_export(self, topic: str, table: str) -> Iterator[ExportJob]:
        self.step(topic, "open")
        context = JobContext(InlineRunner(), PosixDisk(), SystemClock(), lambda step: self.step(topic, step))
        opened = table_formats.open_table(PosixDisk(), table, None, write=True)
        with closing(opened) as into:
            job = ExportJob(
                options(str(self.data), topic), into, lambda _: record_mapping.new_mapping(None), context, SIZES
            )
            with closing(job):
                yield job

    def run(self, pause: Callable[[bool], bool] | None = None) -> dict[str, TopicExport]:
        def wait(is_idle: bool) -> bool:
            if is_idle:
                self.clock.tick(1_000)
            return False

        supervisor = ExportSupervisor(
            lambda: self.topics, lambda topic: str(self.root / topic), self.open_export, self.clock, parallel=2
        )
        return {each.topic: each for each in supervisor.run(pause or wait, once=pause is None)}

    def rows(self, topic: str) -> int:
        return int(DeltaTable(str(self.root / topic)).to_pyarrow_table().num_rows)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_topic_gets_its_table(bench: Bench) -> None:
    found = bench.run()
    assert {each.state for each in found.values()} == {"done"}
    assert all((each.rows, each.next_seq, each.failures) == (40, 41, 0) for each in found.values())
    assert all(each.commits > 1 for each in found.values())
    assert [bench.rows(topic) for topic in bench.topics] == [40, 40, 40]


def test_a_topic_that_fails_does_not_stop_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(topic: str, _: str) -> None:
        if topic == "b":
            raise BadInput("its table is of another topic; nothing was written")

    bench.step = fail
    found = bench.run()
    assert [found[topic].state for topic in bench.topics] == ["done", "failed", "done"]
    assert found["b"].failures == 1, "no retry helps"
    assert "another topic" in str(found["b"].error)
    assert found["b"].next_seq is None
    assert "the export of b" in caplog.text


def test_an_error_that_passes_is_tried_again_after_a_pause(bench: Bench) -> None:
    left = [2]

    def fail(topic: str, step: str) -> None:
        if topic == "c" and step == "commit" and left[0]:
            left[0] -= 1
            raise StoreUnavailable("s3://lake", "no answer")

    bench.step = fail
    found = bench.run()
    assert (found["c"].state, found["c"].failures, found["c"].error) == ("done", 2, None)
    assert bench.rows("c") == 40
    assert found["c"].rows == 40
    left[0] = 99
    fill(bench.data, 10, "c")
    found = bench.run()
    assert (found["c"].state, found["c"].failures) == ("failed", export_supervisor.ONCE_ATTEMPTS)
    assert bench.rows("c") == 40


def test_continuous_exports_find_new_topics_and_retry_every_error(bench: Bench) -> None:
    passes = [0]

    def fail(topic: str, _: str) -> None:
        if topic == "a" and passes[0] < 3:
            raise BadInput("a person will fix it")

    def pause(is_idle: bool) -> bool:
        if not is_idle:
            return False
        passes[0] += 1
        bench.clock.tick(10_000)
        if passes[0] == 2:
            fill(bench.data, 5, "d")
            bench.topics = ["a", "b", "c", "d"]
        return passes[0] == 12

    bench.step = fail
    found = bench.run(pause)
    assert {each.state for each in found.values()} == {"stopped"}
    assert found["a"].failures >= 1
    assert [bench.rows(topic) for topic in bench.topics] == [40, 40, 40, 5]


def test_a_topic_that_hangs_does_not_stop_the_others(bench: Bench) -> None:
    done, hung = Event(), Event()

    def hang(topic: str, step: str) -> None:
        if topic == "a" and step == "commit" and not hung.is_set():
            hung.set()
            assert done.wait(60)
        if topic == "c" and step == "committed":
            done.set()

    bench.step = hang
    assert {each.state for each in bench.run().values()} == {"done"}


def test_a_round_that_fails_after_its_commit_is_counted(bench: Bench) -> None:
    left = [1]

    def fail(topic: str, step: str) -> None:
        if topic == "b" and step == "committed" and left[0]:
            left[0] = 0
            raise StoreUnavailable("s3://lake", "no answer")

    bench.step = fail
    found = bench.run()
    assert (found["b"].state, found["b"].failures, found["b"].next_seq) == ("done", 1, 41)
    assert bench.rows("b") == 40
    assert found["b"].rows == 40


def test_what_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "data", 1, "a")
    data, lake = str(tmp_path / "data"), str(tmp_path / "lake")
    for given, said in (
        ({"topics": ["a"], "pattern": "a"}, "choose one"),
        ({"parallel": 0}, "at least 1"),
        ({"topics": ["nope"]}, "there is no topic"),
        ({"pattern": "x.*"}, "no topic in"),
    ):
        with pytest.raises(Exception, match=said) as caught:
            api.export_topics(data, lake, **given)
        assert re.search("nothing was (written|done)", str(caught.value))
    with pytest.raises(BadInput, match="has no groups"):
        ExportGroup(Location.parse("s3://bucket/data"), "a", "lake")


@pytest.mark.parametrize("place", ["directory", "server"])
def test_a_group_follows_the_table(tmp_path: Path, place: str) -> None:
    data, table = tmp_path / "data", str(tmp_path / "table")

    def export(where: str, step: interface.OnStep = interface.no_step) -> None:
        context = JobContext(InlineRunner(), PosixDisk(), SystemClock(), step)
        with closing(table_formats.open_table(PosixDisk(), table, None, write=True)) as into:
            job = ExportJob(options(where, "a"), into, lambda _: record_mapping.new_mapping(None), context, SIZES)
            job.use_group(ExportGroup(Location.parse(where), "a", "lake", 5_000))
            with closing(job):
                job.run()

    fill(data, 30, "a")
    if place == "server":
        with run_server(str(data)) as (engine, address):
            export(address)
            group = engine.topic("a").group("lake")
            assert (group.position, group.lag().records, group.hold_bytes) == (30, 0, 5_000)
        return
    kill = Killer()
    export(str(data), kill)
    fill(data, 10, "a")
    with tidelog.open(str(data), threads=False) as log:
        assert log.topic("a").group("lake").lag().records == 10
        log.topic("a", cap_records=4)
        log.topic("a").append([{"n": 0}])
        assert log.topic("a").earliest_seq <= 31, "retention holds what the table does not have"
    with pytest.raises(Killed):
        export(str(data), Killer(kill.steps.index("move the group") + 1))
    with tidelog.open(str(data), threads=False) as log:
        assert log.topic("a").group("lake").position == 30, "killed between the table and the group"
    export(str(data))
    with tidelog.open(str(data), threads=False) as log:
        assert log.topic("a").group("lake").lag().records == 0
        assert log.topic("a").group("lake").position == 41
    assert DeltaTable(table).to_pyarrow_table().num_rows == 41
