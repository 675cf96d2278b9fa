"""[shell] Rows of a Delta table as its readers see them, through the library that knows its format.

    plain       one task a file, read where the task runs
    special     mapped column names, deletion vectors, other features of readers: one task, by the library's own engine

Partition columns are no columns of the files: both ways add them. Text and bytes are Arrow's plain types. A version
that the library cannot read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import deltalake
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tidelog.errors import BadInput, Damaged, NotFound
from tidelog.pipelines import files

MAPPING: Final = "delta.columnMapping.mode"
_FORMAT: Final = "tidelog-delta"
_BATCH_ROWS: Final = 8192


class Looked(NamedTuple):
    version: int
    content: str  # the table and its version, in a few words


def looked(path: str) -> Looked:
    """The newest version of a table."""
    table = _opened(path, None)
    return Looked(table.version(), f"{table.metadata().id} version {table.version()}")


def frame(spark: SparkSession, path: str, version: int) -> DataFrame:
    """A version of a table as a DataFrame."""
    spark.dataSource.register(DeltaSource)
    return spark.read.format(_FORMAT).option("path", path).option("version", str(version)).load()


def is_mapped(table: DeltaTable) -> bool:
    """Whether the names of columns in the files are not those of the table."""
    return (table.metadata().configuration.get(MAPPING) or "none").lower() != "none"


class DeltaSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return _FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(_schema(self._table()))

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        table = self._table()
        names = None if is_mapped(table) else _files(table)
        return DeltaReader(self.options["path"], table.version(), names)

    def _table(self) -> DeltaTable:
        return _opened(self.options["path"], int(self.options["version"]))


@dataclass
class Part(InputPartition):
    name: str | None  # None: the whole table


class DeltaReader(DataSourceReader):
    def __init__(self, path: str, version: int, names: Sequence[str] | None) -> None:
        self._path, self._version, self._names = path, version, names

    def partitions(self) -> Sequence[InputPartition]:
        return [Part(None)] if self._names is None else [Part(name) for name in self._names]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part), "it was planned here"
        table = _opened(self._path, self._version)
        schema = _schema(table)
        if partition.name is None:
            for batch in _scanned(self._path, self._version, None, None):
                yield files.conformed(batch, schema)
            return
        data = table.to_pyarrow_dataset(schema=schema)
        (mine,) = [each for each in data.get_fragments() if each.path == partition.name]
        yield from mine.scanner(schema=schema, batch_size=_BATCH_ROWS).to_batches()


def _schema(table: DeltaTable) -> pa.Schema:
    return files.plain_schema(pa.schema(table.schema().to_arrow()))


def _files(table: DeltaTable) -> list[str] | None:
    """The files of a table; None where they cannot be read one by one."""
    try:
        return [each.path for each in table.to_pyarrow_dataset(schema=_schema(table)).get_fragments()]
    except DeltaProtocolError:
        return None


def rows(path: str, version: int, first: int | None, stop: int | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a version with seqs in [first, stop), as columns of a schema; without bounds, all of them."""
    asked = None if first is None or stop is None else f"seq >= {first} AND seq < {stop}"
    for batch in _scanned(path, version, asked, None):
        yield files.conformed(batch, schema)


def rows_outside(path: str, version: int, first: int, stop: int) -> int:
    """How many rows of a version have other seqs, or none."""
    asked = f"seq < {first} OR seq >= {stop} OR seq IS NULL"
    return sum(batch.num_rows for batch in _scanned(path, version, asked, ["seq"]))


def _opened(path: str, version: int | None) -> DeltaTable:
    try:
        return DeltaTable(path, version=version)
    except TableNotFoundError:
        raise NotFound(f"there is no Delta table at {path}; nothing was done, check the path") from None
    except DeltaProtocolError as error:
        raise _unknown(path, error) from None
    except DeltaError as error:
        raise Damaged(f"{path} cannot be read as a Delta table ({error}); nothing was changed") from None


def _scanned(path: str, version: int, predicate: str | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    try:
        reader: Any = _opened(path, version).scan(columns=columns, predicate=predicate)
        yield from pa.RecordBatchReader.from_stream(reader)
    except DeltaProtocolError as error:
        raise _unknown(path, error) from None
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Damaged(f"{path} cannot be read as a Delta table ({error}); nothing was changed") from None


def _unknown(path: str, error: Exception) -> BadInput:
    return BadInput(
        f"{path} needs features that deltalake {deltalake.__version__} does not read ({error}); nothing was done. Have "
        "its own engine write it without them, or copy it into files that Spark reads"
    )
