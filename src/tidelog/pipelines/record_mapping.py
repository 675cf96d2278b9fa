"""Map records to rows of a table.

    plain     seq, ts, node, tag, meta, data                       data as it was written
    typed     seq, ts, node, tag, meta, <fields>, _rescued         fields of its JSON, by a given or inferred schema

    bad       policy for a record of a typed table that does not fit the fields
    rescue      a row: fitting values in their columns, the others as JSON in `_rescued`
    quarantine  no row: the record is written to the files of `_quarantine/`, with the reason
    fail        the export stops and names the record

Every record is a row or in quarantine, and the commit counts both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DateType, StringType, StructField, StructType

from tidelog.errors import BadInput
from tidelog.pipelines import partitions
from tidelog.spark import decode
from tidelog.spark.decode import RESCUED
from tidelog.spark.options import COLUMNS, IS_JSON
from tidelog.spark.options import parse_options as read_options

BadRecordPolicy: TypeAlias = Literal["rescue", "quarantine", "fail"]
RECORD_COLUMNS: Final = tuple(column for column in COLUMNS if column != "topic")
_RECORD_OPTIONS: Final = read_options({"path": ".", "subscribe": "a", "columns": ",".join(RECORD_COLUMNS)})
RECORD_SCHEMA: Final[StructType] = decode.default_schema(_RECORD_OPTIONS)
REASON_COLUMN: Final = "reason"


class TableRows(NamedTuple):
    """The rows of a batch of records, and its records in quarantine."""

    table: pa.RecordBatch
    quarantined: pa.RecordBatch | None


@dataclass(frozen=True)
class RecordMapping:
    """How records become rows. Small and picklable; the Arrow schema is built where it is used."""

    schema: str  # of the table, as Spark writes it in JSON
    fields: tuple[str, ...] = ()  # columns that are fields of the data
    bad: BadRecordPolicy = "rescue"
    partition_by: str | None = None  # `partitions`
    latest_key: str | None = None  # of a table with the newest row of each key (`latest_rows`)

    @property
    def options_json(self) -> str:
        """The part that a commit stores besides the schema."""
        stored: dict[str, object] = {"fields": self.fields, "bad": self.bad}
        if self.partition_by is not None:
            stored["partition_by"] = self.partition_by
        if self.latest_key is not None:
            stored["latest_key"] = self.latest_key
        return msgspec.json.encode(stored).decode()

    @property
    def partition_column(self) -> str | None:
        """The column by which rows are partitioned, if it is a column of the table."""
        name = None if self.partition_by is None else partitions.partition_column(self.partition_by)
        return name if name in self.arrow.names else None

    @cached_property
    def spark(self) -> StructType:
        made: StructType = StructType.fromJson(msgspec.json.decode(self.schema))
        return made

    @cached_property
    def arrow(self) -> pa.Schema:
        return to_arrow_schema(self.spark, timezone="UTC")

    def without_key(self) -> RecordMapping:
        """Return the mapping of the other columns of an upsert table."""
        fields = [field for field in self.spark.fields if field.name != "key"]
        return RecordMapping(StructType(fields).json(), self.fields, self.bad)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def to_rows(self, batch: pa.RecordBatch, topic: str) -> TableRows:
        """Map a batch of records, with the columns of RECORD_SCHEMA."""
        if not self.fields:
            return TableRows(self._partitioned(batch).cast(self.arrow), None)
        wanted = [field for field in self.spark.fields if field.name in self.fields]
        data, seqs = batch.column("data"), batch.column("seq")
        cells = decode.parse_json_columns(data, seqs, topic, wanted, self.arrow, rescue=self.bad != "fail")
        own = {name: batch.column(name) for name in RECORD_COLUMNS}
        names = [name for name in self.arrow.names if name in cells or name in own]
        made = pa.RecordBatch.from_arrays(
            [cells[name] if name in cells else own[name] for name in names],
            schema=pa.schema([self.arrow.field(name) for name in names]),
        )
        made = self._partitioned(made).cast(self.arrow)
        if self.bad != "quarantine" or made.column(RESCUED).null_count == len(made):
            return TableRows(made, None)
        unfit = pc.is_valid(made.column(RESCUED))
        reason = pc.binary_join_element_wise("does not fit: ", made.column(RESCUED).filter(unfit), "")
        kept = batch.filter(unfit)
        return TableRows(made.filter(pc.invert(unfit)), kept.append_column(REASON_COLUMN, reason))

    def _partitioned(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.partition_by is None or self.partition_column is None:
            return batch
        return partitions.add_partition_column(batch, self.partition_by)


def new_mapping(
    fields: StructType | None,
    bad: BadRecordPolicy = "rescue",
    partition_by: str | None = None,
    *,
    hidden_partitions: bool = False,
) -> RecordMapping:
    """Return the mapping for a new table.

    Args:
        partition_by: date(ts) or a column of the table.
        hidden_partitions: the table derives date(ts) itself and needs no column for it.
    """
    made = _unpartitioned_mapping(fields, bad)
    if partition_by is None:
        return made
    rule = partitions.parse_rule(partition_by)
    partitions.check_column(rule, made.arrow)
    schema = made.spark
    if rule == partitions.DATE_RULE and not hidden_partitions:
        if partitions.DATE_COLUMN in schema.names:
            raise BadInput(
                f"the schema has a field {partitions.DATE_COLUMN!r}, which is the name of the column of date(ts); "
                f"nothing was written, call it 'data_{partitions.DATE_COLUMN}'"
            )
        schema = StructType([*schema.fields, StructField(partitions.DATE_COLUMN, DateType())])
    return RecordMapping(schema.json(), made.fields, made.bad, rule)


def evolve(known: RecordMapping, wanted: RecordMapping, where: str) -> RecordMapping:
    """Return the mapping of a table after a schema with more columns was given for it. Raises BadInput where the schema
    is no extension."""
    new = {field.name: field for field in wanted.spark.fields if field.name in wanted.fields}
    added = [field for name, field in new.items() if name not in known.fields]
    if not known.fields or known.latest_key is not None:
        if not added and known.fields:
            return known
        kind = "the newest row of each key" if known.fields else "no typed columns"
        raise BadInput(
            f"{where} has {kind}, and its schema does not change; nothing was written, export into a new table with "
            "this schema"
        )
    for field in known.spark.fields:
        if field.name not in known.fields:
            continue
        given = new.get(field.name)
        if given is None or given.dataType != field.dataType:
            now = "is missing" if given is None else f"is {given.dataType.simpleString()}"
            raise BadInput(
                f"the schema narrows {where}: column {field.name!r} is {field.dataType.simpleString()} there and {now} "
                "in the schema; nothing was written. Keep it as it is and add columns after it, or export into a new "
                "table"
            )
    if not added:
        return known
    for field in added:
        if field.name in known.spark.names:
            raise BadInput(
                f"{where} has a column {field.name!r} of another kind; nothing was written, rename the field"
            )
    schema = StructType([*known.spark.fields, *added])
    return dataclasses.replace(known, schema=schema.json(), fields=(*known.fields, *(field.name for field in added)))


def _unpartitioned_mapping(fields: StructType | None, bad: BadRecordPolicy) -> RecordMapping:
    if fields is None:
        if bad != "rescue":
            raise BadInput(
                f"bad records can be {bad} only where there are typed columns; nothing was written, give a schema or "
                "infer one"
            )
        return RecordMapping(RECORD_SCHEMA.json())
    own = [field for field in RECORD_SCHEMA.fields if field.name != "data"]
    taken = {*(field.name for field in RECORD_SCHEMA.fields), IS_JSON}
    wanted = [field for field in fields.fields if field.name != RESCUED]
    if not wanted:
        raise BadInput("the schema has no fields; nothing was written, name some or leave it out")
    for field in wanted:
        if field.name in taken:
            raise BadInput(
                f"the schema has a field {field.name!r}, which is the name of a column of ours; nothing was written, "
                f"call it 'data_{field.name}': it is then the field {field.name!r} of the JSON"
            )
    decode.validate_schema(StructType(wanted), read_options({"path": ".", "subscribe": "a", "payload": "json"}))
    spare = [] if bad == "fail" else [StructField(RESCUED, StringType())]
    made = StructType([*own, *wanted, *spare])
    return RecordMapping(made.json(), tuple(field.name for field in wanted), bad)


class _StoredShape(msgspec.Struct):
    fields: tuple[str, ...]
    bad: BadRecordPolicy
    partition_by: str | None = None
    latest_key: str | None = None


def mapping_from_commit(schema: str, options_json: str) -> RecordMapping:
    """Return the mapping of an existing table."""
    found = msgspec.json.decode(options_json, type=_StoredShape)
    return RecordMapping(schema, found.fields, found.bad, found.partition_by, found.latest_key)


QUARANTINE_SCHEMA: Final = to_arrow_schema(RECORD_SCHEMA, timezone="UTC").append(pa.field(REASON_COLUMN, pa.string()))


def map_batches(mapping: RecordMapping, batches: Iterator[pa.RecordBatch], topic: str) -> Iterator[TableRows]:
    for batch in batches:
        yield mapping.to_rows(batch, topic)
