"""Fresh reads: a table up to its cursor and the log after it, as one DataFrame.

    topic    1 ············ cursor ──────────── head
    table    ├── files ─────┤
    log                     ├── records, mapped ─┤        as the next export would write them

Both parts are fixed when the DataFrame is made: the files of one state of the table, the cursor of the same state, and
the records from there to the present end of the topic. So no row is there twice and none is missing, whatever exports
commit before Spark reads, and two actions on the DataFrame see the same rows. What the table has stays as it has it:
records that were deleted from the log after their export are still rows.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, NotFound, Unavailable
from tidelog.pipelines import record_mapping, table_formats
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import Place, interface, parquet
from tidelog.pipelines.table_formats.interface import Table, TableScan
from tidelog.spark import backends, plan
from tidelog.spark.backends.interface import Backend, ReadTask
from tidelog.spark.executors import reduce_object
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import EARLIEST, Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader

SOURCE_NAME: Final = "tidelog-live"
_OPTION: Final = "plan.secret"  # keys of stores are in it: Spark hides values of options with `secret` in their names


@dataclass(frozen=True)
class LivePart(InputPartition):
    """What one task reads: a file of the table, the whole table through its library, or a part of the log."""

    name: str | None = None
    task: ReadTask | None = None


@dataclass(frozen=True)
class LivePlan:
    disk: Disk
    path: str  # of the table
    scan: TableScan | None  # of a table that only its library reads
    mapping: RecordMapping
    options: Options
    parts: tuple[LivePart, ...]


def plan_place(options: Options, place: Place) -> LivePlan:
    """Plan a read of the table at a place and of the log after it; of the log alone if there is no table yet."""
    with closing(backends.open_backend(options)) as backend:
        try:
            opened = table_formats.open_table(place.disk, place.path, catalog=place.catalog, write=False)
        except NotFound:
            return _plan(backend, options, place.disk, None, place.path)
        with closing(opened) as table:
            return _plan(backend, options, place.disk, table, place.path)


def _plan(backend: Backend, options: Options, disk: Disk, table: Table | None, path: str) -> LivePlan:
    (topic,) = options.subscribe
    last = None if table is None else table.last_commit()
    snapshot = backend.snapshot(topic)
    assert snapshot is not None, "the caller has looked for the topic"
    scan: TableScan | None = None
    names: list[str] = []
    if table is None or last is None:
        if table is not None:
            interface.check_empty(table)
        mapping, first = record_mapping.new_mapping(None), plan.start_seq(backend, options, snapshot, default=EARLIEST)
    else:
        interface.check_same_topic(last, topic, snapshot.epoch, path)
        if last.transform is not None:
            raise BadInput(
                f"the rows of {path} went through {last.transform}, which the records of the log did not; nothing was "
                "read, read the table and the topic on their own"
            )
        mapping, first = record_mapping.mapping_from_commit(last.schema, last.shape), last.stop
        if mapping.latest_key is not None:
            raise BadInput(
                f"{path} has the newest row of each key, which records after it replace; nothing was read, export it "
                "and read the table"
            )
        scan = table.scan()
        if scan is None:
            own = {file.name for file in table.own_files()}
            # A file with a range that no commit of this state names is of a later export: the log has its records.
            names = sorted(own | {name for name in table.visible_files() if interface.parse_file_range(name) is None})
    tasks = plan.plan_tasks(
        backend, options, [TopicRange(snapshot, first, max(snapshot.next_seq, first))], RecordFilter()
    )
    parts = [LivePart()] if scan is not None else [LivePart(name) for name in names]
    parts += [LivePart(task=task) for task in tasks]
    return LivePlan(disk, path, scan, mapping, options, tuple(parts))


def load(spark: SparkSession, planned: LivePlan) -> DataFrame:
    spark.dataSource.register(LiveSource)
    return spark.read.format(SOURCE_NAME).option(_OPTION, b64encode(pickle.dumps(planned)).decode()).load()


class LiveSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return SOURCE_NAME

    def _plan(self) -> LivePlan:
        found: LivePlan = pickle.loads(b64decode(self.options[_OPTION]))
        return found

    def schema(self) -> StructType:
        return self._plan().mapping.spark

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return LiveReader(self._plan())


class LiveReader(DataSourceReader):
    def __init__(self, planned: LivePlan) -> None:
        self._plan = planned

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, {"_plan": self._plan})

    def partitions(self) -> Sequence[LivePart]:
        return list(self._plan.parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, LivePart):
            return  # Spark has a partition of its own where there is nothing to read
        schema = self._plan.mapping.arrow
        batches = self._read_log(partition.task) if partition.task is not None else self._read_table(partition.name)
        for batch in batches:
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    def _read_table(self, name: str | None) -> Iterator[pa.RecordBatch]:
        planned, schema = self._plan, self._plan.mapping.arrow
        if name is None:
            assert planned.scan is not None, "a table that is read file by file has files"
            yield from planned.scan.rows(None, None, schema)
            return
        if planned.disk.stat(join(planned.path, name)) is None:
            raise Unavailable(
                f"{name} is no longer in {planned.path}: a repair, a VACUUM or another program has removed it since "
                "read_live was called; nothing was written, call it again"
            )
        for batch in parquet.read_batches(planned.disk, planned.path, [name], None, None):
            yield parquet.conform(batch, schema)

    def _read_log(self, task: ReadTask) -> Iterator[pa.RecordBatch]:
        planned = self._plan
        with closing(backends.open_backend(planned.options)) as backend:
            reader = TaskReader(backend, planned.options, record_mapping.RECORD_SCHEMA, RecordFilter(), task)
            for rows in record_mapping.map_batches(planned.mapping, reader.batches(), planned.options.subscribe[0]):
                yield rows.table
