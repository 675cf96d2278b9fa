"""[hot] Rows of a DataFrame → records as columns of bytes, by topic.

    data    binary: as it is · string: its UTF-8 · struct: its JSON        topic   where no option names one
    meta    map: as a JSON object                                          ts      kept in meta, under "ts", where that
    tag, node    text                                                              has none: a record's own time is that
    seq     not taken over: records are numbered anew                              of its commit
    is_json      which rows are JSON and which are bytes, where no option says it of all of them

Only a struct costs a Python object a row; `to_json` in the DataFrame does the same without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidelog.engine.config import check_topic_name
from tidelog.engine.texts import to_json
from tidelog.errors import BadInput
from tidelog.spark import fingerprint
from tidelog.spark.fingerprint import Sum
from tidelog.spark.options import IS_JSON

BYTES_MAX: Final = 8 << 20  # of one batch that is staged
_BINARY, _TEXT = pa.binary(), pa.string()
_ESCAPED: Final = r'["\\\x00-\x1f\x7f]'
_COLUMNS: Final = ("data", "tag", "node", "meta")


class Made(NamedTuple):
    """Records of one topic, and what is in them."""

    topic: str
    records: pa.RecordBatch
    sum: Sum


def made(batch: pa.RecordBatch, topic: str | None, *, json: bool) -> Iterator[Made]:
    """The rows of a batch as records. `topic`: of all of them; else their column says so. `json`: all are JSON;
    else their column says which."""
    if not batch.num_rows:
        return
    names = set(batch.schema.names)
    data, json = _data(batch.column("data"), json=json)
    columns = {"data": data, **{name: _bytes(batch.column(name)) for name in ("tag", "node") if name in names}}
    if names & {"meta", "ts"}:
        columns["meta"] = _metas(*(batch.column(name) if name in names else None for name in ("meta", "ts")))
    if IS_JSON in names:
        columns["json"] = pc.fill_null(batch.column(IS_JSON), False)
    elif json:
        columns["json"] = pa.array(np.ones(batch.num_rows, bool))
    for name, records in _by_topic(pa.RecordBatch.from_pydict(columns), topic, batch):
        check_topic_name(name)
        said = [records.column(each) if each in columns else None for each in _COLUMNS]
        about = fingerprint.of(said, fingerprint.apart(name, _kinds(records)))
        for part in _parts(records):
            yield Made(name, part, about)
            about = fingerprint.NOTHING  # told once, with the first part


def _data(column: pa.Array, *, json: bool) -> tuple[pa.Array, bool]:
    if column.null_count:
        raise BadInput("the column data has nulls, and a record is never nothing; nothing was written, filter them out")
    if pa.types.is_struct(column.type):
        return pa.array(to_json(column.to_pylist(maps_as_pydicts="strict")), _BINARY), True
    return _bytes(column), json


def _kinds(records: pa.RecordBatch) -> NDArray[np.bool_]:
    if "json" not in records.schema.names:
        return np.zeros(records.num_rows, bool)
    found: NDArray[np.bool_] = records.column("json").to_numpy(zero_copy_only=False)
    return found


def _bytes(column: pa.Array) -> pa.Array:
    return column.cast(_BINARY)


def _by_topic(
    records: pa.RecordBatch, topic: str | None, batch: pa.RecordBatch
) -> Iterator[tuple[str, pa.RecordBatch]]:
    if topic is not None:
        yield topic, records
        return
    column = batch.column("topic")
    if column.null_count:
        raise BadInput("the column topic has nulls; nothing was written, name a topic in every row or in an option")
    encoded = column.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], records
        return
    indices = encoded.indices.to_numpy()
    order = np.argsort(indices, kind="stable")
    edges = np.searchsorted(indices[order], np.arange(len(names) + 1))
    for number, name in enumerate(names):
        yield name, records.take(pa.array(order[edges[number] : edges[number + 1]]))


def _parts(records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The same rows in pieces of a few megabytes."""
    if records.nbytes <= BYTES_MAX:
        yield records
        return
    texts = [records.column(name) for name in _COLUMNS if name in records.schema.names]
    sizes = sum(pc.fill_null(pc.binary_length(column), 0).to_numpy() for column in texts)
    ends, at = np.cumsum(sizes), 0
    while at < records.num_rows:
        before = int(ends[at - 1]) if at else 0
        stop = max(int(np.searchsorted(ends, before + BYTES_MAX, "right")), at + 1)
        yield pa.RecordBatch.from_arrays(
            [pa.concat_arrays([c.slice(at, stop - at)]) for c in records.columns], schema=records.schema
        )
        at = stop


# ── meta ──────────────────────────────────────────────────────────────────────────────────────────


def _metas(column: pa.Array | None, ts: pa.Array | None) -> pa.Array:
    """JSON objects, nothing where there would be nothing in them."""
    inner = None if column is None else _inner(column)
    if ts is not None:
        inner = _with_time(inner, column, ts)
    return pc.binary_join_element_wise("{", inner, "}", "").cast(_BINARY)


def _inner(column: pa.MapArray) -> pa.Array:
    """What stands between the braces; null where the map is empty or not there."""
    pairs = pc.binary_join_element_wise(
        _quoted(column.keys), pc.coalesce(_quoted(column.items), pa.scalar("null")), ":"
    )
    joined = pc.binary_join(pa.ListArray.from_arrays(column.offsets, pairs), ",")
    return pc.if_else(pc.equal(pc.binary_length(joined), 0), pa.scalar(None, _TEXT), joined)


def _quoted(column: pa.Array) -> pa.Array:
    """Texts as JSON has them. Those with something to escape are looked at one by one."""
    plain = pc.binary_join_element_wise('"', column, '"', "")
    odd = pc.match_substring_regex(column, _ESCAPED)
    if not pc.any(odd).as_py():
        return plain
    written = [msgspec.json.encode(text).decode() for text in column.filter(odd).to_pylist()]
    return pc.replace_with_mask(plain, pc.fill_null(odd, False), pa.array(written, _TEXT))


def _with_time(inner: pa.Array | None, column: pa.MapArray | None, ts: pa.Array) -> pa.Array:
    text = pc.strftime(ts.cast(pa.timestamp("us", "UTC")), format="%Y-%m-%dT%H:%M:%SZ")
    stamped = pc.binary_join_element_wise('"ts":"', text, '"', "")
    if inner is None or column is None:
        return stamped
    has = pc.is_valid(_ts_of(column))
    both = pc.coalesce(pc.binary_join_element_wise(stamped, inner, ","), inner, stamped)
    return pc.if_else(has, inner, both)


def _ts_of(column: pa.MapArray) -> pa.Array:
    found: pa.Array = pc.map_lookup(column, query_key=pa.scalar("ts"), occurrence="first")
    return found
