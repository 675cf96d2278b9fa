"""Compaction with the search on Spark: it leaves what `Topic.compact` leaves, by directory and by server."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit import processes
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog import pipelines
from tidelog.cli.main import main
from tidelog.errors import BadInput, TopicNotFound
from tidelog.spark import key_source

pytestmark = pytest.mark.slow
SEGMENT: dict[str, Any] = {"threads": False, "segment_events_max": 90}


def fill(path: Path, rule: str, **config: Any) -> None:
    """Records with and without keys, in segments and in the WAL, with deletes and tombstones that are due."""
    random = Random(rule)
    with tidelog.open(str(path), **SEGMENT) as log:
        topic = log.topic("users", compaction=rule, tombstone_delay_ms=0, **config)
        for number in range(25):
            rows: list[Any] = [
                {"user": {"id": random.choice((random.randrange(40), str(random.randrange(40)), None))}, "n": n}
                for n in range(20)
            ]
            rows[random.randrange(20)] = random.choice((None, b"bytes", 7))
            tags = [random.choice(("", *map(str, range(30)))) or None for _ in rows]
            meta = {"tombstone": True} if number % 6 == 0 else None
            topic.append(rows, tag=tags, meta=meta)
            if number % 7 == 0:
                topic.delete(seqs=random.sample(range(1, topic.head_seq + 1), 9))
        log.checkpoint()
        topic.append([{"user": {"id": 1}}, {"user": {"id": 2}}], tag="5")


def state(path: Path) -> tuple[object, ...]:
    with tidelog.open(str(path), read_only=True) as log:
        topic = log.topic("users", create=False)
        removed = sum(row.records for row in topic.gaps() if row.cause == "compaction")
        return (
            [record.seq for record in topic.read(0, 10_000).records],
            sorted((row.key, row.record.seq) for row in topic.latest()),
            removed,
        )


@pytest.fixture
def copies(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Two directories with the same topic; the first one was compacted by the engine."""
    done, todo = tmp_path / "done", tmp_path / "todo"
    fill(todo, request.param)
    shutil.copytree(todo, done)
    return done, todo


def compact_in_place(path: Path) -> Any:
    with tidelog.open(str(path), **SEGMENT) as log:
        return log.topic("users", create=False).compact()


@pytest.mark.parametrize("copies", ["/user/id"], indirect=True)
def test_a_directory_is_left_as_the_topic_itself_leaves_it(spark: SparkSession, copies: tuple[Path, Path]) -> None:
    done, todo = copies
    for path in copies:
        with tidelog.open(str(path), **SEGMENT) as log:
            group = log.topic("users", create=False).group("slow")
            group.commit(300)
            group.hold(1 << 30)
    expected = compact_in_place(done)
    found = pipelines.compact(str(todo), "users", spark=spark)
    assert found == expected
    assert found.records > 100
    assert found.compacted_to == 300, "records after it are held"
    assert state(todo) == state(done)
    for path in copies:
        with tidelog.open(str(path), **SEGMENT) as log:
            log.topic("users", create=False).group("slow").commit(502)
    found = pipelines.compact(str(todo), "users", spark=spark)
    assert found == compact_in_place(done)
    assert found.tombstones > 0
    assert state(todo) == state(done)


@pytest.mark.parametrize("copies", ["latest_by_tag"], indirect=True)
def test_a_server_goes_on_and_a_run_that_broke_off_is_repeated(
    spark: SparkSession, copies: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    done, todo = copies
    expected = compact_in_place(done)

    def stop(step: str) -> None:
        if step == "finish":
            raise KeyboardInterrupt

    with run_server(str(todo)) as (engine, address):
        with pytest.raises(KeyboardInterrupt):
            pipelines.compact(address, "users", spark=spark, step=stop)
        topic = engine.topic("users", create=False)
        assert sum(row.records for row in topic.gaps() if row.cause == "compaction") == expected.records
        topic.append({"n": "meanwhile"}, tag="5")
        assert main(["pipeline", "compact", address, "users", "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert (again["records"], again["compacted_to"]) == (1, 503), "the newest of tag 5 was replaced meanwhile"
        assert topic.compact().records == 0
    with tidelog.open(str(done), **SEGMENT) as log:
        log.topic("users", create=False).append({"n": "meanwhile"}, tag="5")
    compact_in_place(done)
    assert state(todo) == state(done)


def test_what_cannot_be_compacted_is_refused_before_spark_is_asked(spark: SparkSession, tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path), threads=False) as log:
        log.topic("plain").append([1, 2])
    with pytest.raises(BadInput, match="plain has no compaction"):
        pipelines.compact(str(tmp_path), "plain", spark=spark)
    with pytest.raises(TopicNotFound, match="nothing was done"):
        pipelines.compact(str(tmp_path), "users", spark=spark)
    with pytest.raises(BadInput, match="an object store, where nothing is removed"):
        pipelines.compact("s3://bucket/data", "users", spark=spark)
    with run_server(str(tmp_path)) as (_, address), pytest.raises(BadInput, match="plain has no compaction"):
        pipelines.compact(address, "plain", spark=spark)


def test_records_of_a_stream_have_the_keys_of_those_in_files(tmp_path: Path) -> None:
    """A task whose segment was replaced meanwhile reads Arrow batches in place of rows."""
    fill(tmp_path, "/user/id")
    with tidelog.open(str(tmp_path), read_only=True) as log:
        whole = log.topic("users", create=False).to_arrow().combine_chunks().to_batches()[0]
    for rule in ("/user/id", "latest_by_tag"):
        found = key_source.key_rows(key_source.rows_of_batch(whole.slice(13, 200)), rule).to_pylist()
        at = {row["seq"]: row["kind"] for row in found}
        kept = {seq for seq, kind in at.items() if kind != key_source.OLDER}
        newest: dict[str, int] = {}
        for row in whole.slice(13, 200).to_pylist():
            key = row["tag"] or ""
            if rule == "/user/id":
                value = json.loads(row["data"])["user"]["id"] if row["data"][:8] == b'{"user":' else None
                key = "" if value is None else str(value)
            if key:
                newest[key] = row["seq"]
        assert kept == set(newest.values())


@pytest.mark.sweep
@pytest.mark.parametrize("copies", ["latest_by_tag"], indirect=True)
@pytest.mark.parametrize("step", ["begin", "remove", "finish"])
def test_a_killed_compaction_is_repeated(spark: SparkSession, copies: tuple[Path, Path], step: str) -> None:
    done, todo = copies
    compact_in_place(done)
    script = Path(__file__).with_name("killed_compaction.py")
    killed = processes.run([sys.executable, str(script), str(todo), "users", step], capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    before = state(todo)
    assert before[1] == state(done)[1], "the newest records are there at any point"
    pipelines.compact(str(todo), "users", spark=spark)
    assert state(todo) == state(done)
