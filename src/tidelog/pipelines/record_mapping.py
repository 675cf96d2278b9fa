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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from tidelog.errors import BadInput
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

    @property
    def options_json(self) -> str:
        """The part that a commit stores besides the schema."""
        return msgspec.json.encode({"fields": self.fields, "bad": self.bad}).decode()

    @cached_property
    def spark(self) -> StructType:
        made: StructType = StructType.fromJson(msgspec.json.decode(self.schema))
        return made

    @cached_property
    def arrow(self) -> pa.Schema:
        return to_arrow_schema(self.spark, timezone="UTC")

    def __getstate__(self) -> tuple[str, tuple[str, ...], BadRecordPolicy]:
        return self.schema, self.fields, self.bad

    def __setstate__(self, state: tuple[str, tuple[str, ...], BadRecordPolicy]) -> None:
        for name, value in zip(("schema", "fields", "bad"), state, strict=True):
            object.__setattr__(self, name, value)

    def to_rows(self, batch: pa.RecordBatch, topic: str) -> TableRows:
        """Map a batch of records, with the columns of RECORD_SCHEMA."""
        if not self.fields:
            return TableRows(batch.cast(self.arrow), None)
        wanted = [field for field in self.spark.fields if field.name in self.fields]
        data, seqs = batch.column("data"), batch.column("seq")
        cells = decode.parse_json_columns(data, seqs, topic, wanted, self.arrow, rescue=self.bad != "fail")
        own = {name: batch.column(name) for name in RECORD_COLUMNS}
        made = pa.RecordBatch.from_arrays(
            [cells[name] if name in cells else own[name] for name in self.arrow.names], schema=self.arrow
        )
        if self.bad != "quarantine" or made.column(RESCUED).null_count == len(made):
            return TableRows(made, None)
        unfit = pc.is_valid(made.column(RESCUED))
        reason = pc.binary_join_element_wise("does not fit: ", made.column(RESCUED).filter(unfit), "")
        kept = batch.filter(unfit)
        return TableRows(made.filter(pc.invert(unfit)), kept.append_column(REASON_COLUMN, reason))


def new_mapping(fields: StructType | None, bad: BadRecordPolicy = "rescue") -> RecordMapping:
    """Return the mapping for a new table."""
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


def mapping_from_commit(schema: str, options_json: str) -> RecordMapping:
    """Return the mapping of an existing table."""
    found = msgspec.json.decode(options_json, type=dict[str, object])
    return RecordMapping(schema, tuple(found["fields"]), found["bad"])  # type: ignore[arg-type]


QUARANTINE_SCHEMA: Final = to_arrow_schema(RECORD_SCHEMA, timezone="UTC").append(pa.field(REASON_COLUMN, pa.string()))


def map_batches(mapping: RecordMapping, batches: Iterator[pa.RecordBatch], topic: str) -> Iterator[TableRows]:
    for batch in batches:
        yield mapping.to_rows(batch, topic)
