"""Partitions of tables: each file has rows of one value of a column.

    date(ts)       the day of `ts` in UTC. Delta and Parquet: a column `ts_date`; Iceberg: the transform day(ts), no
                   column
    tag, sku, …    a column of the table

    delta, parquet     ts_date=2026-11-18/part-….parquet     the column is in the path and not in the file
    iceberg            part-….parquet                        the column is in the file, the value in the manifest

A value in a path is percent-encoded and null is __HIVE_DEFAULT_PARTITION__, as Spark, DuckDB, Polars and pyarrow read
it.
An empty text is null in a partition column: a Delta table has no difference between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import BadInput
from tidelog.types import Ints

DATE_RULE: Final = "date(ts)"
DATE_COLUMN: Final = "ts_date"
PARTITIONS_MAX: Final = 1_000  # of one task: each is an open file
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_NULL_NAMES: Final = frozenset((_NULL, "__null__"))
_VALUE_BYTES_MAX: Final = 200  # of a name of a directory
_REFUSED: Final = frozenset(("seq", "ts", "meta", "data", "_rescued"))


class Part(NamedTuple):
    """The rows of one partition in a batch."""

    folder: str  # empty: the table is not partitioned by path
    key: str | None  # the value as text
    rows: pa.RecordBatch  # as they are written
    positions: Ints  # of the rows in the batch


def partition_column(rule: str) -> str:
    """Return the column that a rule partitions by."""
    return DATE_COLUMN if rule == DATE_RULE else rule


def parse_rule(text: str) -> str:
    """Return the canonical form of a rule: date(ts), or a column."""
    rule = "".join(text.split())
    if "(" in rule and rule != DATE_RULE:
        raise BadInput(f"{text!r:.200} is no partition; nothing was written, give {DATE_RULE} or a column, as tag")
    return rule


def check_column(rule: str, schema: pa.Schema) -> None:
    """Raise BadInput if a table with these columns cannot be partitioned by a rule."""
    name = partition_column(rule)
    usable = [field.name for field in schema if field.name not in _REFUSED and _is_supported(field.type)]
    if rule != DATE_RULE and name not in usable:
        raise BadInput(
            f"the table cannot be partitioned by {rule!r:.200}; nothing was written, give {DATE_RULE} or one of its "
            f"columns of text, integers, dates or bools ({', '.join(usable)})"
        )


def _is_supported(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date32(kind)
    )


def add_partition_column(batch: pa.RecordBatch, rule: str) -> pa.RecordBatch:
    """Return rows with the derived column of a rule, and with null for an empty text in a partition column."""
    if rule == DATE_RULE:
        return batch.append_column(DATE_COLUMN, batch.column("ts").cast(pa.date32()))
    at = batch.schema.get_field_index(rule)
    column = batch.column(at)
    if not pa.types.is_string(column.type):
        return batch
    return batch.set_column(at, batch.schema.field(at), pc.if_else(pc.equal(column, ""), None, column))


def split(batch: pa.RecordBatch, rule: str, *, by_path: bool) -> Iterator[Part]:
    """Split rows by partition.

    Args:
        by_path: the partition is in the path: rows are without its column.
    """
    if rule == DATE_RULE and not by_path:
        column, rows = batch.column("ts").cast(pa.date32()), batch
    else:
        column = batch.column(partition_column(rule))
        rows = batch.drop_columns([partition_column(rule)]) if by_path else batch
    encoded = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
    keys, indices = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    for number, key in enumerate(keys):
        positions = np.flatnonzero(indices == number)
        part = rows if len(keys) == 1 else rows.take(pa.array(positions))
        yield Part(folder_of(rule, key) if by_path else "", key, part, positions)


def folder_of(rule: str, key: str | None) -> str:
    """Return the directory of a partition."""
    value = _NULL if key is None else quote(key, safe="")
    if len(value) > _VALUE_BYTES_MAX:
        raise BadInput(
            f"a value of {partition_column(rule)!r} is too long for a partition ({key!r:.60} …); nothing was "
            "committed, partition by another column in a new table"
        )
    return f"{partition_column(rule)}={value}"


def partition_values(name: str) -> dict[str, str | None]:
    """Return the values of the partition columns in the path of a file."""
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        column, equals, value = folder.partition("=")
        if equals:
            found[unquote(column)] = None if value in _NULL_NAMES else unquote(value)
    return found


def restore_columns(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Return the rows of a file with the columns that are in its path, as text."""
    for column, value in partition_values(name).items():
        if column not in batch.schema.names:
            batch = batch.append_column(column, pa.array([value], pa.string()).take(pa.array([0] * batch.num_rows)))
    return batch
