"""Tables as DataFrames, without a jar: a data source of Spark that reads a table through the library of its format.

    delta      at a version; a task a file, or one task where only deltalake reads it (deletion vectors, mapped names)
    iceberg    at a snapshot; a task a file, with its deletes
    parquet    the files that readers of the directory see; a task a file

Executors read the table, with its storage options. Those have names whose values Spark hides in plans and in
its web pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines import record_mapping, table_formats
from tidelog.pipelines.table_formats import delta, interface, parquet
from tidelog.spark.executors import reduce_object

SOURCE_NAME: Final = "tidelog-table"
_OPTION_PREFIX: Final = "storage.secret."  # Spark replaces values of options whose names have `secret` in them


def read_table(spark: SparkSession, place: table_formats.Place, version: int | None = None) -> DataFrame:
    """Load a version of a table as a DataFrame; by default the newest one, fixed now."""
    format = "iceberg" if place.catalog is not None else table_formats.detect_format(place.disk, place.path)
    if format is None:
        raise NotFound(f"there is no table at {place.path}; nothing was read, check the address")
    if format == "parquet" and version is not None:
        raise BadInput(f"{place.path} is a Parquet table and has no versions; nothing was read, leave the version out")
    if format == "delta" and version is None:
        version = delta.latest_version(place.disk, place.path).version
    if place.catalog is not None and version is None:
        from tidelog.pipelines.table_formats import iceberg  # pyiceberg is an extra of its own

        version = iceberg.latest_scan(place.catalog, None).snapshot_id
    spark.dataSource.register(TableSource)
    reader = spark.read.format(SOURCE_NAME).option("path", place.path).option("format", format)
    if version is not None:
        reader = reader.option("version", str(version))
    return _with_storage(reader, place).load()


def _with_storage(reader: DataFrameReader, place: table_formats.Place) -> DataFrameReader:
    if isinstance(place.disk, BucketDisk):
        for name, value in place.disk.options.to_delta().items():
            reader = reader.option(f"{_OPTION_PREFIX}{name}", value)
    for name, value in (place.catalog.properties if place.catalog is not None else {}).items():
        reader = reader.option(f"{_OPTION_PREFIX}{name}", value)
    return reader


def read_changes(spark: SparkSession, place: table_formats.Place, first: int, last: int | None) -> DataFrame:
    """Load the change feed of versions of a Delta table; by default up to the newest one, fixed now."""
    if place.catalog is not None or table_formats.detect_format(place.disk, place.path) != "delta":
        raise BadInput(f"{place.path} is no Delta table and has no change feed; nothing was read")
    reader = delta.ChangeReader(place.disk, place.path, first, last)
    spark.dataSource.register(TableSource)
    made = spark.read.format(SOURCE_NAME).option("path", place.path).option("format", "changes")
    made = made.option("first_version", str(reader.first)).option("version", str(reader.last))
    return _with_storage(made, place).load()


def read_dead_letters(spark: SparkSession, place: table_formats.Place) -> DataFrame:
    """Load the records in quarantine of a table."""
    spark.dataSource.register(TableSource)
    made = spark.read.format(SOURCE_NAME).option("path", place.path).option("format", "quarantine")
    return _with_storage(made, place).load()


class QuarantineReader:
    """Reads the committed files of a table's quarantine, a task a file."""

    def __init__(self, place: table_formats.Place) -> None:
        opened = table_formats.open_table(place.disk, place.path, catalog=place.catalog, write=False)
        try:
            files = interface.active_files(opened.commits())
            self._disk, self._path = opened.disk, opened.path
        finally:
            opened.close()
        self._names = [file.bad_name for file in files if file.bad_name is not None]
        self.schema = record_mapping.QUARANTINE_SCHEMA

    def parts(self) -> Sequence[str]:
        return self._names

    def read(self, part: str, /) -> Iterator[pa.RecordBatch]:
        for batch in parquet.read_batches(self._disk, self._path, [part], None, None):
            yield batch.cast(self.schema)


@dataclass
class TablePartition(InputPartition):
    part: Any  # a file, as the format names it; None: the whole table


class TableSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return SOURCE_NAME

    def schema(self) -> StructType:
        return from_arrow_schema(self._reader().schema)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return self._reader()

    def _reader(self) -> TableReader:
        options: dict[str, str] = dict(self.options)
        stored = {
            name[len(_OPTION_PREFIX) :]: value
            for name, value in options.items()
            if name.lower().startswith(_OPTION_PREFIX)
        }
        place = table_formats.find_place(options["path"], "the table", stored or None)
        version = int(options["version"]) if "version" in options else None
        if options["format"] == "quarantine":
            return TableReader(QuarantineReader(place))
        if options["format"] == "changes":
            return TableReader(delta.ChangeReader(place.disk, place.path, int(options["first_version"]), version))
        return TableReader(_open_reader(place, options["format"], version))


class FormatReader(Protocol):
    """Reads a version of a table of one format, part by part. Picklable."""

    schema: pa.Schema

    def parts(self) -> Sequence[Any]: ...

    def read(self, part: Any, /) -> Iterator[pa.RecordBatch]: ...


def _open_reader(place: table_formats.Place, format: str, version: int | None) -> FormatReader:
    if place.catalog is not None:
        from tidelog.pipelines.table_formats import iceberg  # pyiceberg is an extra of its own

        return iceberg.IcebergReader(iceberg.latest_scan(place.catalog, version))
    if format == "parquet":
        return parquet.DirectoryReader(place.disk, place.path)
    return delta.DeltaReader(place.disk, place.path, version)


class TableReader(DataSourceReader):
    def __init__(self, reader: FormatReader) -> None:
        self._reader = reader
        self.schema = reader.schema

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_object(self, self.__dict__)

    def partitions(self) -> Sequence[InputPartition]:
        return [TablePartition(part) for part in self._reader.parts()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, TablePartition):  # Spark has a partition of its own for a table without files
            yield from self._reader.read(partition.part)
