"""Upsert tables: the newest row of each key, exactly once, and what comparisons and repairs find."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import LongType, StructField, StructType
from tests.kit.s3 import S3Server
from tests.unit.pipelines.helpers import PipelineHarness, s3_table
from tests.unit.pipelines.test_export import Killed, Killer

import tidelog
from tidelog.disk.bucket_disk import BucketDisk
from tidelog.errors import BadInput
from tidelog.pipelines import api, latest_rows, record_mapping
from tidelog.pipelines.export_job import Exported, Sizes
from tidelog.pipelines.reconcile_job import Reconciled
from tidelog.pipelines.reprocess_job import reprocess_table
from tidelog.pipelines.table_formats import Place, delta, interface
from tidelog.pipelines.upsert_job import LatestReconcileJob, UpsertJob, staged_dir

SIZES = Sizes(file_bytes=400, age_ms=1_000, commit_bytes=1_200)


class UpsertHarness(PipelineHarness):
    """A topic of keys, an upsert table, and the newest rows of the topic, folded by a few lines of Python."""

    def __init__(self, root: Path, rule: str = "/id", *, table: str = "table", place: Place | None = None) -> None:
        super().__init__(root, "delta", table=str(root / table), place=place)
        self.rule, self.sizes, self.change_feed = rule, SIZES, False
        self.mapping = latest_rows.latest_mapping(record_mapping.new_mapping(None), rule)

    def write(self, random: Random, count: int) -> None:
        with self.engine() as log:
            topic = log.topic("orders")
            for number in range(count):
                key, kind = random.randrange(12), random.random()
                if kind < 0.15:
                    topic.append([{"id": key}], tag=f"k{key}", meta={"tombstone": True})
                elif kind < 0.25:
                    topic.append([{"other": number}])
                else:
                    topic.append([{"id": key, "n": number}], tag=f"k{key}")

    def upsert(self) -> Exported:
        with (
            self.open_table() as table,
            closing(
                UpsertJob(
                    self.options(),
                    table,
                    lambda _: self.mapping,
                    self.context(),
                    self.sizes,
                    change_feed=self.change_feed,
                )
            ) as job,
        ):
            return job.run()

    def compare(self, *, repair: bool = False) -> Reconciled:
        with (
            self.open_table(write=repair) as table,
            closing(LatestReconcileJob(self.options(), table, self.context())) as job,
        ):
            return job.run(repair=repair)

    def expected(self) -> dict[str, int]:
        """Key → seq of its newest record, without tombstones."""
        found: dict[str, int] = {}
        with tidelog.open(self.data, read_only=True) as log:
            for record in log.topic("orders", create=False):
                if isinstance(record, tidelog.Gap):
                    continue
                key = record.tag if self.rule == "tag" else record.data.get("id")
                if key is None or key == "":
                    continue
                found.pop(str(key), None)
                if not (record.meta or {}).get("tombstone"):
                    found[str(key)] = record.seq
        return found

    def rows(self) -> list[tuple[str, int]]:
        options = self.disk.options.to_delta() if isinstance(self.disk, BucketDisk) else None
        if not DeltaTable.is_deltatable(self.table, options):
            return []
        table = DeltaTable(self.table, storage_options=options).to_pyarrow_table()
        return sorted(zip(table["key"].to_pylist(), table["seq"].to_pylist(), strict=True))

    def check(self) -> None:
        assert self.rows() == sorted(self.expected().items())


@pytest.mark.parametrize("rule", ["/id", "tag"])
def test_a_table_has_the_newest_row_of_each_key(tmp_path: Path, rule: str) -> None:
    harness, random = UpsertHarness(tmp_path, rule), Random(rule)
    for _ in range(3):
        harness.write(random, 40)
        assert harness.upsert().commits >= 1
        harness.check()
        assert harness.compare().equal
    done = harness.upsert()
    assert (done.commits, done.stop) == (0, 121)
    assert not list(Path(staged_dir(harness.table)).iterdir()), "staged rows are removed"


def test_the_table_is_that_of_topic_latest(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    with harness.engine() as log:
        topic = log.topic("orders", compaction="/id")
        rows: list[Any] = [{"id": 1}, {"id": "1"}, {"id": True}, {"id": None}, {"id": {}}, {"id": ""}, b'{"id":9}', 7]
        topic.append(rows)
        topic.append({"id": 2}, meta={"tombstone": True})
        latest = sorted((row.key, row.record.seq) for row in topic.latest())
    harness.upsert()
    assert harness.rows() == latest


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.sweep)])
def test_every_step_may_be_the_last(tmp_path: Path, each: int) -> None:
    first = UpsertHarness(tmp_path)
    first.write(Random(1), 40)
    first.on_step = counting = Killer()
    assert first.upsert().commits >= 2
    for at in range(1, len(counting.steps) + 1, each):
        harness = UpsertHarness(tmp_path, table=f"table{at}")
        harness.on_step = Killer(at)
        with pytest.raises(Killed):
            harness.upsert()
        harness.on_step = interface.no_step
        keys = [key for key, _ in harness.rows()]
        assert len(keys) == len(set(keys))
        harness.upsert()
        harness.check()
        assert harness.compare().equal, counting.steps[at - 1]


def test_the_position_and_the_rows_are_one_commit(tmp_path: Path) -> None:
    """Method: a version after another; each has the newest rows of the topic below its own position."""
    harness = UpsertHarness(tmp_path)
    harness.write(Random(2), 60)
    harness.upsert()
    table = DeltaTable(harness.table)
    whole = list(range(1, table.version() + 1))
    stops = []
    assert len(whole) > 2
    for version in whole:
        at = DeltaTable(harness.table, version=version)
        stop = at.transaction_version(delta.transaction_app_id("orders", 1))
        seqs = at.to_pyarrow_table()["seq"].to_pylist()
        assert stop is not None
        assert all(seq < stop for seq in seqs)
        stops.append(stop)
    assert stops[-1] == 61


def test_tombstones_without_a_row_still_move_the_position(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    with harness.engine() as log:
        log.topic("orders").append([{"id": 1}], meta={"tombstone": True})
    done = harness.upsert()
    assert (done.rows, done.stop, harness.rows()) == (0, 2, [])
    assert harness.upsert().commits == 0
    assert harness.compare().equal


def test_another_program_between_two_attempts(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    harness.write(Random(3), 30)
    harness.upsert()
    harness.write(Random(4), 30)
    seen: list[str] = []

    def step(name: str) -> None:
        seen.append(name)
        if name == "write the commit" and seen.count(name) == 1:
            DeltaTable(harness.table).optimize.compact()
            DeltaTable(harness.table).create_write_transaction([], "append", DeltaTable(harness.table).schema())

    harness.on_step = step
    harness.upsert()
    harness.check()
    assert harness.compare().equal


def test_differences_are_found_and_repaired(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    with harness.engine() as log:
        log.topic("orders").append([{"id": number, "n": 0} for number in range(8)])
    harness.upsert()
    table = DeltaTable(harness.table)
    row = table.to_pyarrow_table().filter(pa.compute.equal(table.to_pyarrow_table()["key"], "5"))
    write_deltalake(harness.table, row, mode="append")
    table = DeltaTable(harness.table)
    table.delete("key = '2'")
    table.update(updates={"data": "X'00'"}, predicate="key = '3'")
    write_deltalake(harness.table, row.set_column(0, "key", pa.array(["foreign"])), mode="append")
    with harness.engine() as log:
        log.topic("orders").delete(seqs=[7])
    found = harness.compare()
    assert not found.equal
    assert found.difference is not None
    assert found.difference.seq == 3
    assert "key '2'" in found.difference.log
    assert "no row" in found.difference.table
    assert len(found.differing) == 4, "two of them of one seq"
    repaired = harness.compare(repair=True)
    assert repaired.whole
    harness.check()
    assert harness.compare().equal
    assert "6" not in dict(harness.rows())


def test_rows_that_the_log_lost_stay(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    with harness.engine() as log:
        log.topic("orders").append([{"id": number} for number in range(6)])
    harness.upsert()
    with harness.engine() as log:
        log.topic("orders", cap_records=2)
        log.topic("orders").append([{"id": 0}])
    harness.upsert()
    found = harness.compare(repair=True)
    assert found.equal
    assert found.alone == 4
    assert [key for key, _ in harness.rows()] == ["0", "1", "2", "3", "4", "5"]


def test_typed_rows_and_tombstones_that_do_not_fit(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    typed = record_mapping.new_mapping(StructType([StructField("n", LongType())]), "fail")
    harness.mapping = latest_rows.latest_mapping(typed, "/id")
    with harness.engine() as log:
        topic = log.topic("orders")
        topic.append([{"id": 1, "n": 1}, {"id": 2, "n": 2}])
        topic.append([{"id": 1, "n": "no number"}], meta={"tombstone": True})
    harness.upsert()
    assert harness.rows() == [("2", 2)]
    assert harness.compare().equal
    with harness.open_table() as table, pytest.raises(BadInput, match="no quarantine; nothing was done"):
        reprocess_table(harness.options(), table, harness.context())


def test_the_change_feed_has_what_each_commit_changed(tmp_path: Path) -> None:
    harness = UpsertHarness(tmp_path)
    harness.change_feed = True
    with harness.engine() as log:
        log.topic("orders").append([{"id": 1, "n": 1}, {"id": 2}])
    harness.upsert()
    with harness.engine() as log:
        log.topic("orders").append([{"id": 1, "n": 2}])
        log.topic("orders").append([{"id": 2}], meta={"tombstone": True})
    harness.upsert()
    reader = delta.ChangeReader(harness.disk, harness.table, 0, None)
    rows = pa.Table.from_batches(reader.read(None), schema=reader.schema).sort_by(
        [("_commit_version", "ascending"), ("key", "ascending"), ("_change_type", "descending")]
    )
    assert list(
        zip(rows["key"].to_pylist(), rows["seq"].to_pylist(), rows["_change_type"].to_pylist(), strict=True)
    ) == [
        ("1", 1, "insert"),
        ("2", 2, "insert"),
        ("1", 1, "update_preimage"),
        ("1", 3, "update_postimage"),
        ("2", 2, "delete"),
    ]
    with pytest.raises(BadInput, match="has changes of versions"):
        delta.ChangeReader(harness.disk, harness.table, 9, None)
    plain = UpsertHarness(tmp_path, table="plain")
    plain.upsert()
    with pytest.raises(BadInput, match="no change feed"):
        delta.ChangeReader(plain.disk, plain.table, 0, None)


def test_a_table_in_a_bucket(tmp_path: Path, s3_server: S3Server) -> None:
    harness, random = UpsertHarness(tmp_path, place=s3_table(s3_server, "upsert")), Random(7)
    harness.write(random, 30)
    harness.upsert()
    harness.write(random, 30)
    harness.upsert()
    harness.check()
    assert harness.compare().equal


def test_what_is_refused(tmp_path: Path) -> None:
    plain = record_mapping.new_mapping(None)
    for rule in (None, "id", "tags"):
        with pytest.raises(BadInput, match="nothing was written"):
            latest_rows.latest_mapping(plain, rule)
    with pytest.raises(BadInput, match="no partitions"):
        latest_rows.latest_mapping(record_mapping.new_mapping(None, partition_by="tag"), "tag")
    keyed = record_mapping.new_mapping(StructType([StructField("key", LongType())]))
    with pytest.raises(BadInput, match="data_key"):
        latest_rows.latest_mapping(keyed, "tag")
    harness = UpsertHarness(tmp_path)
    harness.write(Random(5), 10)
    for format in ("parquet", "iceberg"):
        address = str(tmp_path / "other") if format == "parquet" else "iceberg://c/a.b"
        options = {} if format == "parquet" else {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db"}
        with pytest.raises(BadInput, match="needs a MERGE"):
            api.export(
                harness.data,
                "orders",
                address,
                format=format,
                storage_options=options,
                mode="latest",
                latest_key="tag",
                spark=object(),  # type: ignore[arg-type]
            )
