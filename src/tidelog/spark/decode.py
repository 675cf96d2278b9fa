"""[hot] Records → the columns Spark asked for, as Arrow, without an object per record.

    rows of a file        columns that lie back to back are not copied; the rest is copied in C++
    batches of a stream   as they came

A column that nobody asked for is not touched. `meta` is the exception to the rule above: its JSON is taken apart once
for each distinct value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import BadInput
from tidelog.formats import idx
from tidelog.formats.rows import Rows, Span, binary
from tidelog.spark.options import IS_JSON
from tidelog.spark.place import Wanted
from tidelog.spark.stretches import Bools

_TIME = pa.timestamp("us", tz="UTC")
_TEXT = pa.string()
META = pa.map_(pa.string(), pa.string())
Cells = dict[str, pa.Array]


def cells(found: Rows | pa.RecordBatch, wanted: Wanted, *, timed: bool = True, kinded: bool = True) -> Cells:
    """The wanted columns of some records, `data` still as bytes."""
    made = _of_rows(found, wanted, kinded=kinded) if isinstance(found, Rows) else _of_batch(found, wanted)
    if "ts" in made and not timed:
        made["ts"] = pa.nulls(len(made["ts"]), _TIME)
    if "meta" in made:
        made["meta"] = metas(made["meta"])
    return made


def _of_rows(rows: Rows, wanted: Wanted, *, kinded: bool) -> Cells:
    columns: dict[str, Callable[[], pa.Array]] = {
        "seq": lambda: pa.array(rows.seq),
        "ts": lambda: pa.Array.from_buffers(_TIME, len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows.ts_us))]),
        "node": lambda: _optional(rows, rows.node).cast(_TEXT),
        "tag": lambda: _optional(rows, rows.tag).cast(_TEXT),
        "meta": lambda: _optional(rows, rows.meta),
        "data": lambda: binary(rows.buf, rows.data),
        IS_JSON: lambda: pa.array(_are_json(rows) if kinded else np.zeros(len(rows), bool)),
    }
    return {name: make() for name, make in columns.items() if name in wanted}


def _are_json(rows: Rows) -> Bools:
    """Which records are JSON. Their own frames are asked, so holes and deleted ones cannot shift it."""
    found: Bools = (idx.flags(rows) & idx.JSON) != 0
    return found


def _optional(rows: Rows, span: Span | None) -> pa.Array:
    """A column whose empty values are missing ones."""
    if span is None:
        return pa.nulls(len(rows), pa.binary())
    made, there = binary(rows.buf, span), span.size > 0
    return made if there.all() else pc.if_else(pa.array(there), made, pa.scalar(None, pa.binary()))


def _of_batch(batch: pa.RecordBatch, wanted: Wanted) -> Cells:
    made: Cells = {name: batch.column(name) for name in ("seq", "ts", "data") if name in wanted}
    if IS_JSON in wanted:
        made[IS_JSON] = batch.column("json")
    for name in ("node", "tag", "meta"):
        if name in wanted:
            column = batch.column(name)
            filled = pc.if_else(pc.equal(pc.binary_length(column), 0), pa.scalar(None, column.type), column)
            made[name] = filled if name == "meta" else filled.cast(_TEXT)
    return made


def metas(column: pa.Array) -> pa.Array:
    """JSON objects as maps of texts: a text as it is, anything else as its JSON."""
    if column.null_count == len(column):
        return pa.nulls(len(column), META)
    encoded = column.dictionary_encode()
    starts, keys, values = [0], list[str](), list[str | None]()
    for each in encoded.dictionary.to_pylist():
        for key, value in _pairs(each):
            keys.append(key)
            values.append(value)
        starts.append(len(keys))
    known = pa.MapArray.from_arrays(pa.array(starts, pa.int32()), pa.array(keys, _TEXT), pa.array(values, _TEXT))
    return known.take(encoded.indices)


def _pairs(text: bytes) -> list[tuple[str, str | None]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [("", text.decode("utf-8", "replace"))]  # headers of a log whose writer had other ideas
    return [(key, _shown(value)) for key, value in found.items()]


def _shown(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def text(data: pa.Array, seqs: pa.Array, topic: str) -> pa.Array:
    """`data` as text, or BadInput that names the record that is none."""
    try:
        return data.cast(_TEXT)
    except pa.ArrowInvalid:
        for seq, value in zip(seqs.to_pylist(), data.to_pylist(), strict=True):
            try:
                value.decode()
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{topic}: the data of seq {seq} is not text ({error.reason}); nothing was written, read it with "
                    "payload=bytes"
                ) from None
        raise


def gap_row(first: int, last: int | None, cause: str, topic: str, schema: pa.Schema) -> pa.RecordBatch:
    """A row that stands for records that were lost."""
    told: Mapping[str, object] = {
        "topic": topic,
        "seq": first,
        "gap": {"first": first, "last": last, "cause": cause},
    }
    return pa.RecordBatch.from_arrays([pa.array([told.get(field.name)], field.type) for field in schema], schema=schema)
