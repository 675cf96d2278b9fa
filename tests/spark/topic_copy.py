"""A streaming copy of one topic into another, started again and again: what the tests of exactly once stand on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from tests.spark import killed_sink
from tests.spark.killed_sink import KilledSource

import tidelog
from tidelog.database import Database
from tidelog.engine import Engine

ROWS, BATCHES = 300, 3
TIMEOUT_S = 120


def register(spark: SparkSession) -> None:
    """Workers need not have this package: they get the classes themselves."""
    cloudpickle.register_pickle_by_value(killed_sink)  # type: ignore[no-untyped-call]
    spark.dataSource.register(KilledSource)


def fill_topic(path: Path, rows: int = ROWS, *, first: int = 0) -> None:
    with tidelog.open(str(path), threads=False, segment_events_max=100) as log:
        topic = log.topic("source")
        for at in range(first, first + rows, 50):
            topic.append([b"row %d" % number for number in range(at, at + 50)], tag=f"at-{at}")


class TopicCopy:
    def __init__(
        self, spark: SparkSession, directory: Path, sink: dict[str, str], *, tasks: int = 0, **source: Any
    ) -> None:
        self.spark, self.directory, self.sink, self.tasks = spark, directory, sink, tasks
        self.name = "copy"
        self.checkpoint, self.doom = directory / "checkpoint", directory / "doom"
        self.source = {
            "path": str(directory / "source"),
            "subscribe": "source",
            "startingOffsets": "earliest",
            "columns": "tag,data",
            "maxOffsetsPerTrigger": str(ROWS // BATCHES),
            "minPartitions": "2",
            **source,
        }

    def run(self) -> str | None:
        """Everything that is there, in batches; why it broke off, if it did."""
        rows = self.spark.readStream.format("tidelog").options(**self.source).load()
        writing = (
            (rows.repartition(self.tasks) if self.tasks else rows)
            .writeStream.format("mortal")
            .options(**self.sink, topic="copy", query=self.name, doom=str(self.doom))
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
        )
        query = writing.start()
        try:
            assert query.awaitTermination(TIMEOUT_S), "the query hangs"
        except StreamingQueryException as error:
            return str(error)
        finally:
            query.stop()
        return None

    def forget_commit(self) -> None:
        """Delete the newest file of Spark's own list of batches that are done."""
        done = [path for path in (self.checkpoint / "commits").glob("*") if path.name.isdigit()]
        if done:
            newest = max(done, key=lambda path: int(path.name))
            newest.unlink()
            (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)


def check_copy(log: Database | Engine, rows: int = ROWS) -> None:
    """Row for row what the source has, each batch in one piece. Between two of them a killed writer may leave holes."""
    topic = log.topic("copy")
    table = topic.to_arrow()
    held = dict(zip(table.column("seq").to_pylist(), table.column("data").to_pylist(), strict=True))
    assert sorted(held.values()) == sorted(b"row %d" % number for number in range(rows)), (len(held), rows)
    size = ROWS // BATCHES
    for number, each in topic.producer_batches("copy").items():
        mine = {int(held[seq].split()[1]) for seq in range(each.first, each.last + 1)}
        assert mine == set(range(number * size, (number + 1) * size)), number


def run_with_kills_at(copy: TopicCopy, random: Random, steps: Iterable[str]) -> None:
    """Let each of these be the last step of somebody; then run to the end."""
    for step in steps:
        killed_sink.schedule_kill(copy.doom, step)
        said = copy.run()
        assert said is not None, step
        assert not copy.doom.exists(), (step, said)
        if random.random() < 0.3:
            copy.forget_commit()
    assert copy.run() is None


def run_with_random_kills(copy: TopicCopy, random: Random, steps: tuple[str, ...], kills: int) -> int:
    """Run until so many were killed, each at a step by chance; then to the end. Returns how many died."""
    died = 0
    for _ in range(kills * 3):
        if died == kills:
            break
        killed_sink.schedule_kill(copy.doom, random.choice(steps), random.randrange(3))
        said = copy.run()
        if said is None:  # there was nothing left to do before it came to that
            copy.doom.unlink(missing_ok=True)
        else:
            assert "BatchConflict" not in said, said
            died += not copy.doom.exists()
            copy.doom.unlink(missing_ok=True)
        if said is None or random.random() < 0.3:
            copy.forget_commit()
    assert copy.run() is None
    return died


def main() -> None:
    """As a program of its own, which may be killed: directory, sink as key=value …"""
    import tidelog.spark

    directory, sink = Path(sys.argv[1]), dict(each.split("=", 1) for each in sys.argv[2:])
    master, tasks = sink.pop("master", "local[2]"), int(sink.pop("tasks", "0"))
    spark = tidelog.spark.session(
        master,
        spark_ui_enabled="false",
        spark_sql_shuffle_partitions="2",
        spark_driver_memory="512m",
        spark_driver_host="127.0.0.1",
        spark_driver_bindAddress="127.0.0.1",
        spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        spark_executor_memory="512m",
        spark_cores_max="2",
        spark_executor_cores="1",
        spark_locality_wait="0s",
        spark_scheduler_minRegisteredResourcesRatio="1.0",
        spark_scheduler_maxRegisteredResourcesWaitingTime="200s",
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    said = TopicCopy(spark, directory, sink, tasks=tasks).run()
    spark.stop()
    if said is not None:
        sys.exit(said)


if __name__ == "__main__":
    main()
