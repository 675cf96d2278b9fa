"""Encode rows of a DataFrame as records, in columns of bytes, by topic; and fingerprint the rows of a batch.

    data         binary: unchanged · string: UTF-8 · struct: JSON
    topic        the topic, if no option names one
    meta         map: as a JSON object
    ts           stored in meta under "ts", unless meta has one: a record's own time is that of its commit
    tag, node    text
    seq          ignored: records get new seqs
    is_json      which rows are JSON and which are bytes, if no option says it for all

Only a struct needs a Python object per row; `to_json` in the DataFrame does the same without.

The fingerprint of a batch is two words that do not depend on tasks or on the order of rows, because Spark may compute a
batch again with other tasks and another order:

    row     XXH3 of each of its columns, mixed into one word
    batch   the sum of the words of its rows, and of the same words mixed

Topics store fingerprints in batch numbers, so the function must not change. Commits of tables have another stored hash
(`pipelines.row_hash`). Each value is hashed by one call: measured four million short values per second; hashing all
values side by side in NumPy reached half of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog.engine.batch_encoder import to_json
from tidelog.engine.config import check_topic_name
from tidelog.errors import BadInput
from tidelog.spark.options import IS_JSON

HashWords: TypeAlias = NDArray[np.uint64]
Fingerprint: TypeAlias = tuple[int, int]

EMPTY_FINGERPRINT: Final[Fingerprint] = (0, 0)
_VIEW_FROM_BYTES: Final = 512  # average size of a value from which a view is cheaper than a copy
_MASK_64: Final = (1 << 64) - 1
_SUM_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT_32: Final = np.uint64(32)
_SHIFT_29: Final = np.uint64(29)
_EMPTY_HASH: Final = np.full(1, xxh3_64_intdigest(b""), np.uint64)


def add_fingerprints(left: Fingerprint, right: Fingerprint) -> Fingerprint:
    return (left[0] + right[0]) & _MASK_64, (left[1] + right[1]) & _MASK_64


def fingerprint_rows(columns: Sequence[pa.Array | None], seeds: HashWords) -> Fingerprint:
    """Return the fingerprint of rows. A column is bytes, or None if all its values are null. `seeds` has one word per
    row (`row_seeds`)."""
    for column in columns:
        seeds = _mix(seeds * _MIX_MULTIPLIER ^ (_EMPTY_HASH if column is None else hash_column(column)))
    return int(np.add.reduce(seeds)), int(np.add.reduce(_mix(seeds * _SUM_MULTIPLIER)))


def row_seeds(topic: str, json: NDArray[np.bool_]) -> HashWords:
    """Return seeds that distinguish rows by topic, and JSON from bytes."""
    as_bytes, as_json = (xxh3_64_intdigest(topic.encode() + kind) for kind in (b"\0", b"\1"))
    return np.where(json, np.uint64(as_json), np.uint64(as_bytes))


def hash_column(column: pa.Array) -> HashWords:
    """Return one word per value; null is hashed as no bytes."""
    if column.null_count == len(column):
        return np.broadcast_to(_EMPTY_HASH, len(column))
    if column.null_count:
        column = pc.fill_null(column, b"")
    count, values = len(column), column.buffers()[2]
    if values is None or values.size < _VIEW_FROM_BYTES * count:
        return np.fromiter(map(xxh3_64_intdigest, column.to_pylist()), np.uint64, count)
    view = memoryview(values)
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + count + 1].tolist()
    found = (xxh3_64_intdigest(view[lo:hi]) for lo, hi in pairwise(ends))
    return np.fromiter(found, np.uint64, count)


def _mix(words: HashWords) -> HashWords:
    words = (words ^ (words >> _SHIFT_32)) * _MIX_MULTIPLIER
    return words ^ (words >> _SHIFT_29)


STAGED_BATCH_BYTES_MAX: Final = 8 << 20  # of one batch that is staged
_BINARY, _TEXT = pa.binary(), pa.string()
_NEEDS_ESCAPE_RE: Final = r'["\\\x00-\x1f\x7f]'
_BYTE_COLUMNS: Final = ("data", "tag", "node", "meta")


class EncodedRows(NamedTuple):
    """Records of one topic and their fingerprint."""

    topic: str
    records: pa.RecordBatch
    fingerprint: Fingerprint


def encode_rows(batch: pa.RecordBatch, topic: str | None, *, json: bool) -> Iterator[EncodedRows]:
    """Encode the rows of a batch. `topic`: of all rows; None: the column topic has it. `json`: all rows are JSON; else
    the column is_json says which."""
    if not batch.num_rows:
        return
    names = set(batch.schema.names)
    data, json = _encode_data(batch.column("data"), json=json)
    columns = {"data": data, **{name: _to_binary(batch.column(name)) for name in ("tag", "node") if name in names}}
    if names & {"meta", "ts"}:
        columns["meta"] = _encode_meta(*(batch.column(name) if name in names else None for name in ("meta", "ts")))
    if IS_JSON in names:
        columns["json"] = pc.fill_null(batch.column(IS_JSON), False)
    elif json:
        columns["json"] = pa.array(np.ones(batch.num_rows, bool))
    for name, records in _group_by_topic(pa.RecordBatch.from_pydict(columns), topic, batch):
        check_topic_name(name)
        hashed = [records.column(column) if column in columns else None for column in _BYTE_COLUMNS]
        fingerprint = fingerprint_rows(hashed, row_seeds(name, _json_flags(records)))
        for part in _split_by_bytes(records):
            yield EncodedRows(name, part, fingerprint)
            fingerprint = EMPTY_FINGERPRINT  # returned once, with the first part


def _encode_data(column: pa.Array, *, json: bool) -> tuple[pa.Array, bool]:
    if column.null_count:
        raise BadInput("the column data has nulls, and a record is never nothing; nothing was written, filter them out")
    if pa.types.is_struct(column.type):
        return pa.array(to_json(column.to_pylist(maps_as_pydicts="strict")), _BINARY), True
    return _to_binary(column), json


def _json_flags(records: pa.RecordBatch) -> NDArray[np.bool_]:
    if "json" not in records.schema.names:
        return np.zeros(records.num_rows, bool)
    found: NDArray[np.bool_] = records.column("json").to_numpy(zero_copy_only=False)
    return found


def _to_binary(column: pa.Array) -> pa.Array:
    return column.cast(_BINARY)


def _group_by_topic(
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


def _split_by_bytes(records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split records into parts of a few megabytes."""
    if records.nbytes <= STAGED_BATCH_BYTES_MAX:
        yield records
        return
    texts = [records.column(name) for name in _BYTE_COLUMNS if name in records.schema.names]
    sizes = sum(pc.fill_null(pc.binary_length(column), 0).to_numpy() for column in texts)
    ends, at = np.cumsum(sizes), 0
    while at < records.num_rows:
        before = int(ends[at - 1]) if at else 0
        stop = max(int(np.searchsorted(ends, before + STAGED_BATCH_BYTES_MAX, "right")), at + 1)
        yield pa.RecordBatch.from_arrays(
            [pa.concat_arrays([c.slice(at, stop - at)]) for c in records.columns], schema=records.schema
        )
        at = stop


# ── meta ──────────────────────────────────────────────────────────────────────────────────────────


def _encode_meta(column: pa.Array | None, ts: pa.Array | None) -> pa.Array:
    """Encode meta as JSON objects; null where they would be empty."""
    inner = None if column is None else _meta_members(column)
    if ts is not None:
        inner = _add_timestamp(inner, column, ts)
    return pc.binary_join_element_wise("{", inner, "}", "").cast(_BINARY)


def _meta_members(column: pa.MapArray) -> pa.Array:
    """Return the members of the objects without braces; null for an empty or missing map."""
    pairs = pc.binary_join_element_wise(
        _quote_json(column.keys), pc.coalesce(_quote_json(column.items), pa.scalar("null")), ":"
    )
    joined = pc.binary_join(pa.ListArray.from_arrays(column.offsets, pairs), ",")
    return pc.if_else(pc.equal(pc.binary_length(joined), 0), pa.scalar(None, _TEXT), joined)


def _quote_json(column: pa.Array) -> pa.Array:
    """Quote texts as JSON. Only texts with characters to escape are encoded one by one."""
    plain = pc.binary_join_element_wise('"', column, '"', "")
    odd = pc.match_substring_regex(column, _NEEDS_ESCAPE_RE)
    if not pc.any(odd).as_py():
        return plain
    written = [msgspec.json.encode(text).decode() for text in column.filter(odd).to_pylist()]
    return pc.replace_with_mask(plain, pc.fill_null(odd, False), pa.array(written, _TEXT))


def _add_timestamp(members: pa.Array | None, column: pa.MapArray | None, ts: pa.Array) -> pa.Array:
    text = pc.strftime(ts.cast(pa.timestamp("us", "UTC")), format="%Y-%m-%dT%H:%M:%SZ")
    stamped = pc.binary_join_element_wise('"ts":"', text, '"', "")
    if members is None or column is None:
        return stamped
    has = pc.is_valid(_meta_ts(column))
    both = pc.coalesce(pc.binary_join_element_wise(stamped, members, ","), members, stamped)
    return pc.if_else(has, members, both)


def _meta_ts(column: pa.MapArray) -> pa.Array:
    found: pa.Array = pc.map_lookup(column, query_key=pa.scalar("ts"), occurrence="first")
    return found
