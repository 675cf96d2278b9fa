"""What the tests of pipelines stand on: a topic, tables beside it, and readers of both that share no code with them.

Inline      tasks in this process, pickled there and back as Spark would
Bench       a topic in a directory, a table of either format, an export that a test drives
log_rows    the topic as the engine reads it;  table_rows: the table as pyarrow or delta-rs reads it
s3_table    the place of a table in the S3 server of tests
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import finalize

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow.fs import AzureFileSystem, FileSystem, GcsFileSystem, S3FileSystem
from pyiceberg.catalog import load_catalog
from tests.kit.emulators import Emulator
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

import tidelog
from tidelog.clock import Clock, SystemClock
from tidelog.database import Database
from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.pipelines import record_mapping, table_formats
from tidelog.pipelines.export_job import Exported, ExportJob, JobContext, Sizes
from tidelog.pipelines.reconcile_job import Reconciled, ReconcileJob
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.spark_tasks import run_guarded, unwrap_results
from tidelog.pipelines.table_formats import Place, interface
from tidelog.pipelines.table_formats.interface import Format, OnStep, Table
from tidelog.spark import options as reading

T = TypeVar("T")
R = TypeVar("R")
FORMATS: tuple[Format, ...] = ("parquet", "delta")
SMALL_SIZES = Sizes(file_bytes=3_000, age_ms=1_000, commit_bytes=9_000)
_numbers = count()
Row = tuple[int, bytes, str | None, str | None]


def s3_table(server: S3Server, name: str) -> Place:
    """Return a place in the bucket of a server; the name is made unique."""
    address = f"s3://{BUCKET}/{name}-{next(_numbers)}"
    return table_formats.find_place(address, "the table", s3_options(server))


def s3_options(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://{server.endpoint}",
    }


def bucket_files(disk: Disk) -> FileSystem:
    """Return the store of a table in a bucket, as another program opens it."""
    assert isinstance(disk, BucketDisk), "it is in a bucket"
    kinds = {"s3": S3FileSystem, "gs": GcsFileSystem, "abfs": AzureFileSystem}
    return kinds[disk.options.family](**disk.options.to_arrow())


def iceberg_table(
    root: Path,
    name: str = "orders",
    *,
    server: S3Server | None = None,
    emulator: Emulator | None = None,
    rest: str | None = None,
) -> Place:
    """Return a table of a SQL catalog in `root`, with its files beside it or in the bucket of a server or an
    emulator; or of the REST catalog at an address, in a namespace of its own."""
    if rest is not None:
        address = f"iceberg://tests/shop{root.parent.name}{root.name}.{name}".replace("-", "_")
        return table_formats.find_place(address, "the table", {"type": "rest", "uri": rest})
    warehouse = f"file://{root}/warehouse" if server is None else f"s3://{BUCKET}/warehouse-{next(_numbers)}"
    if emulator is not None:
        warehouse = emulator.address(f"warehouse-{next(_numbers)}")
    store = s3_options(server) if server is not None else emulator.options if emulator is not None else {}
    options = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": warehouse, **store}
    return table_formats.find_place(f"iceberg://tests/shop.{name}", "the table", options)


class InlineRunner:
    def __init__(self, *, pickled: bool = True) -> None:
        self._pickled, self.tasks = pickled, 0

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        self.tasks += len(tasks)
        sent = [pickle.loads(pickle.dumps(task)) if self._pickled else task for task in tasks]
        return unwrap_results([run_guarded(function, task) for task in sent])


class PipelineHarness:
    def __init__(
        self, root: Path, format: Format = "parquet", *, table: str | None = None, place: Place | None = None
    ) -> None:
        self.data, self.format = str(root / "data"), format
        self.table = table or str(root / "table")
        self.mapping: RecordMapping = record_mapping.new_mapping(None)
        self.sizes = SMALL_SIZES
        self.clock: Clock = SystemClock()
        self.on_step: OnStep = interface.no_step
        self.disk: Disk = PosixDisk()
        self.pickled = True
        self.place = place or Place(self.disk, self.table)
        if place is not None:
            self.disk, self.table = place.disk, place.path

    @contextmanager
    def engine(self) -> Iterator[Database]:
        with tidelog.open(self.data, threads=False, segment_events_max=40) as made:
            yield made

    def fill(self, count: int, *, start: int = 0) -> None:
        """Records of several batches, most of them in segments and some in the WAL."""
        with self.engine() as engine:
            topic = engine.topic("orders")
            for at in range(start, start + count, 20):
                rows = [{"n": number, "text": "x" * (number % 50)} for number in range(at, min(at + 20, start + count))]
                topic.append(rows, tag=f"t{at}", node="a", meta={"at": at})
                if at == start + count // 2 // 20 * 20:
                    engine.checkpoint()

    def options(self, **more: str) -> Any:
        asked = {"path": self.data, "subscribe": "orders", "columns": ",".join(record_mapping.RECORD_COLUMNS), **more}
        return reading.parse_options(asked)

    def context(self) -> JobContext:
        return JobContext(InlineRunner(pickled=self.pickled), self.disk, self.clock, self.on_step)

    def open_table(self, *, write: bool = True) -> closing[Table]:
        return closing(
            table_formats.open_table(
                self.disk, self.table, self.format, catalog=self.place.catalog, write=write, step=self.on_step
            )
        )

    @contextmanager
    def export(self, **more: str) -> Iterator[ExportJob]:
        with (
            self.open_table() as table,
            closing(ExportJob(self.options(**more), table, lambda _: self.mapping, self.context(), self.sizes)) as job,
        ):
            yield job

    def export_once(self, **more: str) -> Exported:
        with self.export(**more) as job:
            return job.run()

    def reconcile(self, *, repair: bool = False) -> Reconciled:
        with (
            self.open_table(write=repair) as table,
            closing(ReconcileJob(self.options(), table, self.context())) as job,
        ):
            return job.run(repair=repair)

    def log_rows(self) -> list[Row]:
        with tidelog.open(self.data, read_only=True) as engine:
            table = engine.topic("orders", create=False).to_arrow()
        return list(zip(*(table[name].to_pylist() for name in ("seq", "data", "tag", "node")), strict=True))

    def table_rows(self) -> list[Row]:
        """Every row that a reader of the table sees, by seq, doubles and all."""
        return table_rows(self.read_table())

    def read_table(self) -> pa.Table:
        if self.place.catalog is not None:
            return self.iceberg().scan().to_arrow()
        if isinstance(self.disk, BucketDisk):
            return self._read_bucket_table(self.disk)
        if self.format == "delta":
            # File by file: as a whole it is read by sizes that a planted difference does not have.
            whole = pa.schema(DeltaTable(self.table).schema().to_arrow())
            if DeltaTable(self.table).metadata().partition_columns:
                return DeltaTable(self.table).to_pyarrow_table()
            return pa.concat_tables([pq.read_table(file).cast(whole) for file in self.files()] or [whole.empty_table()])
        return pq.read_table(self.table)

    def _read_bucket_table(self, disk: BucketDisk) -> pa.Table:
        """Read a table in a bucket as other programs would, with options of theirs."""
        if self.format == "delta":
            return DeltaTable(self.table, storage_options=disk.options.to_delta()).to_pyarrow_table()
        return pq.read_table(self.table.partition("://")[2], filesystem=bucket_files(disk))

    def iceberg(self) -> Any:
        """The table as pyiceberg loads it, with a catalog of its own."""
        assert self.place.catalog is not None, "it is an Iceberg table"
        files = {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}  # for Azure, the default is another package
        catalog = load_catalog(self.place.catalog.catalog, **files, **self.place.catalog.properties)
        table = catalog.load_table(self.place.catalog.identifier)
        finalize(table, catalog.close)
        return table

    def files(self) -> list[Path]:
        if self.format == "delta":
            return sorted(Path(uri.removeprefix("file://")) for uri in DeltaTable(self.table).file_uris())
        return sorted(Path(self.table).glob("part-*.parquet"))

    def check(self) -> None:
        """Table = log, by readers that know nothing of either's making."""
        assert self.table_rows() == self.log_rows()


def table_rows(table: pa.Table) -> list[Row]:
    kept = table.select(["seq", "data", "tag", "node"])
    kept = kept.set_column(2, "tag", kept["tag"].cast(pa.string())).sort_by("seq")  # a partition may be a dictionary
    return list(zip(*(kept[name].to_pylist() for name in kept.schema.names), strict=True))
