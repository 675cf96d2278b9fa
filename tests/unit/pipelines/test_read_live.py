"""`read_live` against a model: what the table has and, after its cursor, what the log has; each row once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from pyarrow.fs import copy_files
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.kit.s3 import BUCKET, S3Server
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, bucket_files, iceberg_table, s3_table

from tidelog.errors import BadInput, GapFound, Unavailable
from tidelog.pipelines import live_table, record_mapping
from tidelog.pipelines.live_table import LivePlan, LiveReader
from tidelog.pipelines.table_formats.interface import Format

Rows = dict[int, bytes]


def plan_live(world: PipelineHarness, **more: str) -> LivePlan:
    return live_table.plan_place(world.options(**more), world.place)


def read_plan(planned: LivePlan) -> pa.Table:
    reader: LiveReader = pickle.loads(pickle.dumps(LiveReader(pickle.loads(pickle.dumps(planned)))))
    batches: Iterator[pa.RecordBatch] = (batch for part in reader.partitions() for batch in reader.read(part))
    return pa.Table.from_batches(batches, schema=planned.mapping.arrow)


def rows_of(table: pa.Table) -> list[tuple[int, bytes]]:
    return sorted(zip(table["seq"].to_pylist(), table["data"].to_pylist(), strict=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 40))])
def test_each_row_is_read_once_whatever_is_committed_meanwhile(tmp_path: Path, format: Format, seed: int) -> None:
    random, world = Random(seed), PipelineHarness(tmp_path, format)
    live: Rows = {}  # records of the log
    table: Rows = {}
    head, cursor, cap = 0, 1, 1 << 30

    def evict() -> None:
        for seq in sorted(live)[: max(len(live) - cap, 0)]:
            del live[seq]

    def write() -> None:
        nonlocal head
        with world.engine() as engine:
            topic = engine.topic("orders", durability="memory", cap_records=0 if cap == 1 << 30 else cap)
            evict()
            for _ in range(random.randint(1, 4)):
                datas = [b"%d " % number * random.randint(1, 9) for number in range(head, head + random.randint(1, 60))]
                topic.append(datas)
                live.update(enumerate(datas, head + 1))
                head += len(datas)
                evict()
                if random.random() < 0.5:
                    engine.checkpoint()
            gone = random.sample(sorted(live), min(len(live), random.randint(0, 20)))
            if gone:
                topic.delete(seqs=gone)
            for seq in gone:
                del live[seq]

    def export() -> None:
        nonlocal cursor
        done = world.export_once(onGap="skip")
        table.update((seq, data) for seq, data in live.items() if cursor <= seq < done.stop)
        cursor = done.stop

    def shrink() -> None:
        nonlocal cap
        cap = random.randint(50, 300)

    steps = (write, write, write, export, export, shrink)
    write()
    for _ in range(5):
        for _ in range(random.randint(0, 4)):
            random.choice(steps)()
        planned = plan_live(world, onGap="skip")
        expected = {**table, **{seq: data for seq, data in live.items() if seq >= cursor}}
        assert rows_of(read_plan(planned)) == sorted(expected.items())
        tail = {seq for seq in expected if seq >= cursor}
        for _ in range(random.randint(0, 4)):
            random.choice(steps)()
        found = rows_of(read_plan(planned))
        assert len({seq for seq, _ in found}) == len(found), "no row twice"
        assert set(found) <= set(expected.items())
        missing = set(expected) - {seq for seq, _ in found}
        assert missing <= tail - live.keys(), "only what the log lost since"


def new_world(root: Path, format: Format, server: S3Server | None) -> PipelineHarness:
    if format == "iceberg":
        return PipelineHarness(root, format, place=iceberg_table(root, server=server))
    return PipelineHarness(root, format, place=None if server is None else s3_table(server, "live"))


@pytest.mark.parametrize("store", ["directory", "bucket"])
@pytest.mark.parametrize("format", [*FORMATS, "iceberg"])
def test_records_of_the_log_get_the_columns_of_the_table(
    tmp_path: Path, format: Format, store: str, s3_server: S3Server
) -> None:
    """Where retention has taken what the table has, the table alone has it."""
    world = new_world(tmp_path, format, s3_server if store == "bucket" else None)
    fields = StructType([StructField("n", LongType()), StructField("text", StringType())])
    world.mapping = record_mapping.new_mapping(fields)
    world.fill(100)
    world.export_once()
    world.fill(50, start=100)
    with world.engine() as engine:
        engine.topic("orders", cap_records=50)
    found = read_plan(plan_live(world))
    assert found.schema.names == world.mapping.arrow.names
    assert sorted(found["n"].to_pylist()) == list(range(150))


def test_a_topic_without_a_table_is_read_from_the_log(tmp_path: Path) -> None:
    world = PipelineHarness(tmp_path)
    world.fill(60)
    assert [seq for seq, _ in rows_of(read_plan(plan_live(world)))] == list(range(1, 61))


def test_records_that_were_lost_before_their_export_are_a_gap(tmp_path: Path) -> None:
    world = PipelineHarness(tmp_path)
    world.fill(60)
    world.export_once()
    world.fill(100, start=60)
    with world.engine() as engine:
        engine.topic("orders", cap_records=20)
    with pytest.raises(GapFound):
        plan_live(world)
    assert len(read_plan(plan_live(world, onGap="skip"))) == 80


def test_a_file_that_was_removed_since_is_named(tmp_path: Path) -> None:
    world = PipelineHarness(tmp_path)
    world.fill(60)
    world.export_once()
    planned = plan_live(world)
    world.files()[0].unlink()
    with pytest.raises(Unavailable, match="call it again"):
        read_plan(planned)


def test_tables_of_other_topics_are_refused(tmp_path: Path) -> None:
    world = PipelineHarness(tmp_path)
    world.fill(60)
    world.export_once()
    with world.engine() as engine:
        engine.topic("other").append(b"x")
    with pytest.raises(BadInput, match="table of topic 'orders'"):
        plan_live(world, subscribe="other")
    with world.engine() as engine:
        engine.drop("orders")
        engine.topic("orders").append(b"x")
    with pytest.raises(GapFound, match="dropped and made again"):
        plan_live(world)


def test_a_topic_and_its_table_in_a_bucket(tmp_path: Path, s3_server: S3Server) -> None:
    """The topic is a copy of a directory, as a backup program makes it."""
    world = PipelineHarness(tmp_path, "delta", place=s3_table(s3_server, "live"))
    world.fill(60)
    world.export_once()
    world.fill(40, start=60)
    prefix = f"copies/{world.table.rpartition('/')[2]}"
    copy_files(world.data, f"{BUCKET}/{prefix}", destination_filesystem=bucket_files(world.disk))
    found = read_plan(plan_live(world, path=s3_server.url(prefix)))
    assert [(seq, data) for seq, data, *_ in world.log_rows()] == rows_of(found)
