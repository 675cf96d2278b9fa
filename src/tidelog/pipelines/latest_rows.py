"""The newest record of each key, as rows: what an upsert table has.

    tag             the key is the tag; a tombstone has data that is JSON null or empty, or `meta.tombstone`
    /user/id        the value there in JSON data; a tombstone has `meta.tombstone`

Keys and tombstones are those of compaction (`engine.record_keys`). A column `key` is the first of the table. Records
without a key are no rows; they are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.types import StringType, StructField, StructType

from tidelog.engine.record_keys import selector_of
from tidelog.errors import BadInput
from tidelog.pipelines import record_mapping
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats.delta import DELETED_COLUMN, KEY_COLUMN
from tidelog.spark.options import IS_JSON
from tidelog.types import Ints

KEY_BY_TAG: Final = "tag"


def latest_mapping(made: RecordMapping, rule: str | None) -> RecordMapping:
    """Return the mapping of an upsert table. Raises BadInput for a rule that names no key."""
    check_key(rule)
    if made.partition_by is not None:
        raise BadInput("an upsert table has no partitions; nothing was written, leave them out")
    if made.bad == "quarantine":
        raise BadInput("an upsert table has no quarantine; nothing was written, choose rescue or fail for bad records")
    if KEY_COLUMN in made.spark.names:
        raise BadInput(
            "the schema has a field 'key', which is the name of a column of ours; nothing was written, call it "
            "'data_key': it is then the field 'key' of the JSON"
        )
    schema = StructType([StructField(KEY_COLUMN, StringType()), *made.spark.fields])
    return RecordMapping(schema.json(), made.fields, made.bad, latest_key=rule)


def check_key(rule: str | None) -> None:
    if rule is None or (rule != KEY_BY_TAG and not rule.startswith("/")):
        raise BadInput(
            f"{'no key is given' if rule is None else f'{rule!r:.200} is no key'}; nothing was written, give the key "
            "of a row: tag, or a JSON pointer as /user/id"
        )


def record_keys(batch: pa.RecordBatch, rule: str) -> pa.Array:
    """Return the key of each record as text; null: it has none."""
    if rule == KEY_BY_TAG:
        tags = batch.column("tag")
        return pc.if_else(pc.equal(tags, ""), None, tags)
    which = np.flatnonzero(batch.column(IS_JSON).to_numpy(zero_copy_only=False))
    found = selector_of(rule).keys_of_texts(batch.column("data").take(pa.array(which)).to_pylist())
    places = np.full(batch.num_rows, -1, np.int64)
    places[which] = np.arange(len(which))
    return found.take(pa.array(places, mask=places < 0)).cast(pa.string())


def tombstones(batch: pa.RecordBatch, rule: str) -> NDArray[np.bool_]:
    """Return which records mark their key as deleted."""
    marked = np.zeros(batch.num_rows, np.bool_)
    meta = batch.column("meta")
    rows = np.flatnonzero(meta.is_valid().to_numpy(zero_copy_only=False))
    for row in rows.tolist():
        marked[row] = ("tombstone", "true") in meta[row].as_py()
    if rule == KEY_BY_TAG:
        data, is_json = batch.column("data"), batch.column(IS_JSON)
        is_null = pc.and_(is_json, pc.equal(data, pa.scalar(b"null", data.type)))
        is_empty = pc.equal(pc.binary_length(data), 0)
        marked |= pc.or_(is_null, is_empty).fill_null(True).to_numpy(zero_copy_only=False)
    return marked


@dataclass
class LatestRows:
    """Collects the newest row of each key of a range, whose records come in the order of their seqs."""

    mapping: RecordMapping
    topic: str
    keyless: int = 0
    records: int = 0
    _batches: list[pa.RecordBatch] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add records, with the columns of RECORD_SCHEMA and `is_json`."""
        rule = self.mapping.latest_key
        assert rule is not None, "the mapping is of an upsert table"
        keys = record_keys(batch, rule)
        keyed = np.flatnonzero(keys.is_valid().to_numpy(zero_copy_only=False))
        self.records += batch.num_rows
        self.keyless += batch.num_rows - len(keyed)
        if not len(keyed):
            return
        newest = keyed[newest_positions(keys.take(pa.array(keyed)))]
        kept, chosen = batch.take(pa.array(newest)), keys.take(pa.array(newest))
        deleted = tombstones(kept, rule)
        rows = self._rows_of(kept, deleted)
        self._batches.append(
            pa.RecordBatch.from_arrays(
                [chosen, *rows.columns, pa.array(deleted)],
                schema=staged_schema(self.mapping),
            )
        )

    def _rows_of(self, batch: pa.RecordBatch, deleted: NDArray[np.bool_]) -> pa.RecordBatch:
        """Map records; those of tombstones, which need not fit the schema, have seq and ts alone."""
        if not deleted.any():
            return self.mapping.without_key().to_rows(record_columns(batch), self.topic).table
        plain = self.mapping.without_key()
        live, dead = np.flatnonzero(~deleted), np.flatnonzero(deleted)
        made = plain.to_rows(record_columns(batch.take(pa.array(live))), self.topic).table
        removed = batch.take(pa.array(dead))
        nulls = pa.RecordBatch.from_arrays(
            [
                removed.column(name).cast(kind) if name in ("seq", "ts") else pa.nulls(len(dead), kind)
                for name, kind in zip(plain.arrow.names, plain.arrow.types, strict=True)
            ],
            schema=plain.arrow,
        )
        order = np.empty(batch.num_rows, np.int64)
        order[np.concatenate([live, dead])] = np.arange(batch.num_rows)
        both = pa.Table.from_batches([made, nulls]).take(pa.array(order)).combine_chunks()
        (joined,) = both.to_batches() or [made]
        return joined

    def result(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, with their keys and `_deleted`, in the order of their seqs."""
        yield from filter_newest(self._batches, [batch.column(KEY_COLUMN) for batch in self._batches])


def record_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(record_mapping.RECORD_COLUMNS)


def staged_schema(mapping: RecordMapping) -> pa.Schema:
    return mapping.arrow.append(pa.field(DELETED_COLUMN, pa.bool_()))


def newest_positions(keys: pa.Array) -> Ints:
    """Return the position of the last value of each key, ascending."""
    encoded = keys.dictionary_encode()
    newest = np.zeros(len(encoded.dictionary), np.int64)
    newest[encoded.indices.to_numpy(zero_copy_only=False)] = np.arange(len(keys))  # the last one of each stays
    return np.sort(newest)


def filter_newest(batches: Iterable[pa.RecordBatch], keys: list[pa.Array]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of batches whose keys do not come again. `keys`: those of all batches, in their order."""
    if not keys:
        return
    joined = pa.concat_arrays(keys)
    newest = np.zeros(len(joined), np.bool_)
    newest[newest_positions(joined)] = True
    at = 0
    for batch in batches:
        chosen = newest[at : at + batch.num_rows]
        at += batch.num_rows
        if chosen.any():
            yield batch if chosen.all() else batch.filter(pa.array(chosen))
