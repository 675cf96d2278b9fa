"""Encode a caller's values into the frames of a batch; JSON text in its stored form, and back.

Bytes are stored unchanged. Anything else is JSON: encoded once, stored as text, and returned as that text decodes. So
a date, a UUID or a Decimal comes back as text, a tuple or a set as a list, bytes inside a value as base64, and a
dataclass, a `msgspec.Struct` or a pydantic model as a dict (`typed.py` returns objects). A batch is atomic: its frames
are chained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from json import loads
from math import isfinite
from operator import add
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidelog import native
from tidelog.engine.config import EngineConfig
from tidelog.errors import BadInput, BatchTooLarge, TooLarge
from tidelog.formats import batch as batches
from tidelog.formats import batch as values
from tidelog.formats import frame, large_record
from tidelog.formats import lazy_compute as pc
from tidelog.formats.batch import FrameBuffers, write_frames
from tidelog.formats.frame import DURABLE, JSON, MORE
from tidelog.formats.large_record import BlobRef

# ── JSON text ─────────────────────────────────────────────────────────────────────────────────

_decode_string = msgspec.json.Decoder().decode


def from_json(text: bytes) -> object:
    """Decode JSON that a server accepted. Raises msgspec.DecodeError.

    JSON does not bound numbers, the decoders do: a number above the range of a float is an infinity, and so is an
    integer of more digits than Python converts (4,300 by default).
    """
    try:
        return _decode_string(text)
    except msgspec.DecodeError as error:
        try:
            return loads(text.decode(), parse_int=_integer)
        except ValueError:
            raise error from None


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # the conversion is quadratic in the number of digits
        return float(digits)


def _encode_object(value: Any) -> object:
    """What msgspec does not encode: a model of pydantic."""
    dump = getattr(type(value), "model_dump", None)
    if dump is None:
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return dump(value, mode="json")


_encoder = msgspec.json.Encoder(enc_hook=_encode_object)
_decode_meta = msgspec.json.Decoder(dict[str, Any] | None).decode
_JSON_BLANKS: Final = (b" ", b"\n", b"\t", b"\r")
_JSON_DEPTH_MAX: Final = 128
_META_TEXT_BYTES_MAX: Final = 1 << 20  # with blanks and escapes; far above the limit of a meta


def to_json(values: Sequence[object]) -> list[bytes]:
    """Encode each value as compact JSON. Raises BadInput for NaN, infinities, unpaired surrogates and unknown types."""
    try:
        # One call for all values: newlines inside a string are escaped, so each line is a value.
        lines = _encoder.encode_lines(values).split(b"\n")[:-1]
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise BadInput(f"a record is not JSON and not bytes: {error}; nothing was written") from None
    for value, line in zip(values, lines, strict=True):
        _check_finite(value, line)
    return lines


def value_to_json(value: object) -> bytes:
    """`to_json` of one value, in half the time."""
    try:
        text = _encoder.encode(value)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise BadInput(f"a record is not JSON and not bytes: {error}; nothing was written") from None
    _check_finite(value, text)
    return text


def _check_finite(value: object, text: bytes) -> None:
    # The encoder writes null for NaN and infinities.
    deep = text.count(b"[") + text.count(b"{") > _JSON_DEPTH_MAX
    if (deep or b"null" in text) and not _is_finite(value):
        raise BadInput("a record holds NaN or an infinity, which JSON cannot represent; nothing was written")


def _is_finite(value: object, depth: int = 0) -> bool:
    if depth > _JSON_DEPTH_MAX:
        raise BadInput(f"a record is nested deeper than {_JSON_DEPTH_MAX} levels; nothing was written")
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_finite(item, depth + 1) for item in value)
    if value is None or isinstance(value, str | int | bytes | bytearray | memoryview | msgspec.Raw):
        return True
    plain = msgspec.to_builtins(value, enc_hook=_encode_object)  # a dataclass, a model
    return isinstance(plain, str | int) or _is_finite(plain, depth + 1)


def decode_meta(text: bytes) -> dict[str, Any] | None:
    """Decode one meta. One at a time, because all metas of a request together can take 30 times its bytes."""
    if len(text) > _META_TEXT_BYTES_MAX:
        raise BadInput(f"a meta of {len(text)} bytes is over the limit; nothing was written")
    check_depth(text)
    try:
        meta: dict[str, Any] | None = _decode_meta(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"a meta is not what it must be: {error}; nothing was written") from None
    return meta


def may_compact(text: bytes) -> bool:
    """Whether JSON may have a shorter form."""
    return b" " in text or b"\n" in text or b"\\" in text or b"\t" in text or b"\r" in text


def compact_json(text: bytes) -> bytes:
    """Return JSON in its stored form: no blanks between tokens, no escapes that UTF-8 does not need, numbers unchanged.

    A newline between tokens would end a line for readers of lines.
    """
    if any(blank in text for blank in _JSON_BLANKS):
        text = msgspec.json.format(text, indent=-1)
    if b"\\u" not in text and b"\\/" not in text:
        return text
    compact = native.remove_json_escapes(text)
    if compact is None:
        raise msgspec.DecodeError("JSON has an escape that is not a character")
    return compact


def check_depths(text: bytes, datas: Sequence[bytes]) -> None:
    """Raise BadInput for JSON nested too deep for a reader's stack. `text` contains all of `datas`."""
    if text.count(b"[") + text.count(b"{") > _JSON_DEPTH_MAX + len(datas):
        for data in datas:
            check_depth(data)


def check_depth(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") > _JSON_DEPTH_MAX and native.json_depth(data) > _JSON_DEPTH_MAX:
        raise BadInput(f"a record is nested deeper than {_JSON_DEPTH_MAX} levels; nothing was written")


# ── batches ───────────────────────────────────────────────────────────────────────────────────

Column = bytes | list[bytes]  # one value for all records, or one per record

_values_decoder = msgspec.json.Decoder()
_metas_decoder = msgspec.json.Decoder(dict[str, Any])
_encode = _encoder.encode
_TABLE_BYTES_MAX: Final = 64 << 20


def is_utf8_text(value: object) -> bool:
    """Whether this is text without unpaired surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def check_int(what: str, value: object, minimum: int, maximum: int) -> None:
    """Raise BadInput unless `value` is an integer in the range; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise BadInput(f"{what} is a whole number from {minimum} to {maximum}, not {value!r}; nothing was done")


def check_text(what: str, value: object) -> None:
    """Raise BadInput unless `value` is text without unpaired surrogates."""
    if not is_utf8_text(value):
        raise BadInput(f"{what} is text, not {value!r:.80}; nothing was done")


@dataclass(slots=True)
class Batch:
    """Checked and encoded records, ready for frames."""

    datas: list[bytes]
    json: bool | list[bool]  # for all records, or per record
    tag: Column = b""
    node: Column = b""
    metas: list[bytes] | None = None
    lengths: Sequence[int] = field(init=False)  # of each data
    weight: int = field(init=False)  # bytes of data and meta

    def __post_init__(self) -> None:
        self.lengths, self.weight = values.value_lengths(self.datas)
        if self.metas:
            self.weight += sum(map(len, self.metas))

    def __len__(self) -> int:
        return len(self.datas)


def prepare_batch(limits: EngineConfig, records: object, tag: object, node: object, meta: object) -> Batch:
    """Check and encode records to append. A list or a tuple is many records, anything else is one."""
    items = records if isinstance(records, list | tuple) else (records,)
    check_count(limits, len(items))
    return batch_from_texts(limits, *_encode_datas(items), tag, node, meta)


def check_count(limits: EngineConfig, count: int) -> None:
    """Raise for a write without records or with too many, before any is encoded."""
    if not count:
        raise BadInput("a write has at least one record; nothing was written")
    if count > limits.batch_records_max:
        raise BatchTooLarge("records", count=count, limit=limits.batch_records_max)


def batch_from_texts(
    limits: EngineConfig,
    datas: list[bytes],
    json: bool | list[bool],
    tags: object,
    nodes: object,
    metas: object,
) -> Batch:
    """Build a batch of JSON texts, or of bytes where `json` is false. Checked in the order of the wire contract: tag,
    node, meta, then the whole record."""
    count = len(datas)
    check_count(limits, count)
    batch = Batch(
        datas,
        json,
        _encode_names(tags, "tag", count, limits.tag_bytes_max),
        _encode_names(nodes, "node", count, limits.node_bytes_max),
        _encode_metas(metas, count, limits),
    )
    _check_sizes(batch, limits)
    return batch


def _check_sizes(batch: Batch, limits: EngineConfig) -> None:
    if batch.weight <= limits.record_bytes_max:
        return  # all records together are within the limit of one
    largest = max(batch.lengths if batch.metas is None else map(add, batch.lengths, map(len, batch.metas)))
    if largest > limits.record_bytes_max:
        raise TooLarge("a record", size=largest, limit=limits.record_bytes_max)


def _encode_datas(items: Sequence[object]) -> tuple[list[bytes], bool | list[bool]]:
    if native.all_bytes(items):
        return list(items), False  # type: ignore[arg-type]  # a tenth of the cost of the checks below
    raw = [isinstance(item, bytes | bytearray | memoryview) for item in items]
    if all(raw):
        return [item if type(item) is bytes else bytes(item) for item in items], False  # type: ignore[call-overload]
    if not any(raw):
        return to_json(items), True
    texts = iter(to_json([item for item, is_raw in zip(items, raw, strict=True) if not is_raw]))
    mixed = [bytes(item) if is_raw else next(texts) for item, is_raw in zip(items, raw, strict=True)]  # type: ignore[call-overload]
    return mixed, [not is_raw for is_raw in raw]


def _encode_names(value: object, what: str, count: int, limit: int) -> Column:
    if value is None:
        return b""
    if isinstance(value, str):
        return encode_name(value, what, limit)
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise BadInput(f"{count} records came with {len(value)} values of {what}; nothing was written")
        return [b"" if item is None else encode_name(item, what, limit) for item in value]
    raise BadInput(
        f"a {what} is text, or a list with one for each record, not {type(value).__name__}; nothing was written"
    )


def encode_name(value: object, what: str, limit: int) -> bytes:
    """Check and encode one tag or node."""
    if not isinstance(value, str):
        raise BadInput(f"a {what} is text, not {type(value).__name__}; nothing was written")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise BadInput(f"the {what} {value!r} cannot be written as UTF-8; nothing was written") from None
    if len(encoded) > limit:
        raise BadInput(f"a {what} of {len(encoded)} bytes is over the limit of {limit}; nothing was written")
    return encoded


def _encode_metas(value: object, count: int, limits: EngineConfig) -> list[bytes] | None:
    if value is None:
        return None
    given = value if isinstance(value, list | tuple) else [value] * count
    if len(given) != count:
        raise BadInput(f"{count} records came with {len(given)} values of meta; nothing was written")
    if any(type(meta) is msgspec.Raw for meta in given):
        return _reencode_metas(given, limits)
    for meta in given:
        if meta is not None and not isinstance(meta, dict):
            raise BadInput(f"a meta is a dict, not {type(meta).__name__}; nothing was written")
        _check_meta_keys(meta, limits)
    encoded = iter(to_json([meta for meta in given if meta is not None]) if any(m is not None for m in given) else [])
    metas = [b"" if meta is None else next(encoded) for meta in given]
    return _check_meta_sizes(metas, limits)


def encode_meta(value: object, limits: EngineConfig) -> bytes:
    """Check and encode the meta of one record."""
    if not isinstance(value, dict):
        raise BadInput(f"a meta is a dict, not {type(value).__name__}; nothing was written")
    _check_meta_keys(value, limits)
    text = value_to_json(value)
    _check_meta_sizes([text], limits)
    return text


def _reencode_metas(texts: Sequence[Any], limits: EngineConfig) -> list[bytes] | None:
    """Decode and encode metas that arrived as text, one by one."""
    metas = []
    for text in texts:
        meta = None if text is None else decode_meta(bytes(text))
        _check_meta_keys(meta, limits)
        metas.append(b"" if meta is None else _encode(meta))
    return _check_meta_sizes(metas, limits)


def _check_meta_keys(meta: dict[str, Any] | None, limits: EngineConfig) -> None:
    if meta is not None and len(meta) > limits.meta_keys_max:
        raise BadInput(f"a meta of {len(meta)} keys is over the limit of {limits.meta_keys_max}; nothing was written")


def _check_meta_sizes(metas: list[bytes], limits: EngineConfig) -> list[bytes] | None:
    largest = max(map(len, metas))
    if largest > limits.meta_bytes_max:
        raise BadInput(f"a meta of {largest} bytes is over the limit of {limits.meta_bytes_max}; nothing was written")
    return metas if largest else None


@dataclass(slots=True)
class ArrowBatch:
    """A batch of Arrow columns."""

    data: pa.Array
    json: bool
    tags: pa.Array | None
    nodes: pa.Array | None
    metas: pa.Array | None
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight = sum(_sum_bytes(array) for array in (self.data, self.metas) if array is not None)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(slots=True)
class MultiBatch:
    """Tables of one caller that are written as one batch, in order."""

    parts: list[Batch | ArrowBatch]
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight = sum(part.weight for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


@dataclass(slots=True)
class LargeBatch:
    """One record whose data is in a blob, which is durable."""

    ref: BlobRef
    tag: bytes = b""
    node: bytes = b""
    meta: bytes = b""
    is_staged: bool = False  # a frame that names the blob was handed to the WAL
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight = self.ref.length + len(self.meta)

    def __len__(self) -> int:
        return 1


def _sum_bytes(array: pa.Array) -> int:
    return pc.sum(pc.binary_length(array)).as_py() or 0


def batch_from_table(limits: EngineConfig, table: pa.Table | pa.RecordBatch) -> Batch | ArrowBatch:
    """Build a batch from Arrow columns: `data`, and optionally `tag`, `node`, `meta` (JSON text) and `json` (bool)."""
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise BadInput(f"append_arrow takes a table or a record batch, not {type(table).__name__}; nothing was written")
    names = set(table.schema.names)
    if "data" not in names:
        raise BadInput("a table to append has a column `data`; nothing was written")
    if unknown := names - {"data", "tag", "node", "meta", "json", "seq", "ts"}:
        raise BadInput(f"no column {sorted(unknown)[0]!r} can be appended; nothing was written")
    if not table.num_rows:
        raise BadInput("a write has at least one record; nothing was written")
    data = _binary_column(table, "data", limits.record_bytes_max)
    if data.null_count:
        raise BadInput("the column `data` has nulls; nothing was written")
    tags = _binary_column(table, "tag", limits.tag_bytes_max) if "tag" in names else None
    nodes = _binary_column(table, "node", limits.node_bytes_max) if "node" in names else None
    metas = _binary_column(table, "meta", limits.meta_bytes_max) if "meta" in names else None
    if (size := _sum_bytes(data)) > _TABLE_BYTES_MAX:
        raise TooLarge("a table", size=size, limit=_TABLE_BYTES_MAX)
    is_json = _json_column(table) if "json" in names else None
    if metas is not None:
        sizes = pc.add(pc.binary_length(data), pc.fill_null(pc.binary_length(metas), 0))
        if (largest := pc.max(sizes).as_py()) > limits.record_bytes_max:
            raise TooLarge("a record", size=largest, limit=limits.record_bytes_max)
        _check_decodable([meta for meta in metas.to_pylist() if meta], _metas_decoder, "a meta is not a JSON object")
    if is_json is None:
        return ArrowBatch(data, False, tags, nodes, metas)
    _check_decodable(data.filter(is_json).to_pylist(), _values_decoder, "a record is not JSON")
    flags = is_json.to_pylist()
    data = _compact_json(data, flags)
    if len(set(flags)) == 1:
        return ArrowBatch(data, flags[0], tags, nodes, metas)
    lists = [None if array is None else [value or b"" for value in array.to_pylist()] for array in (tags, nodes, metas)]
    return Batch(data.to_pylist(), flags, lists[0] or b"", lists[1] or b"", lists[2])


def _json_column(table: pa.Table | pa.RecordBatch) -> pa.Array:
    """Whether each record is JSON; null means no."""
    column = table.column("json")
    if not pa.types.is_boolean(column.type):
        raise BadInput(f"the column 'json' is {column.type}, not bool; nothing was written")
    filled = pc.fill_null(column, False)
    return filled.combine_chunks() if isinstance(filled, pa.ChunkedArray) else filled


def _compact_json(data: pa.Array, flags: list[bool]) -> pa.Array:
    values = data.buffers()[-1]
    if values is None or not may_compact(values.to_pybytes()):
        return data
    pairs = zip(data.to_pylist(), flags, strict=True)
    return pa.array([compact_json(text) if is_json else text for text, is_json in pairs], pa.binary())


def _check_decodable(texts: list[bytes], decoder: msgspec.json.Decoder[Any], complaint: str) -> None:
    try:
        for text in texts:
            decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{complaint}: {error}; nothing was written") from None


def _binary_column(table: pa.Table | pa.RecordBatch, name: str, limit: int) -> pa.Array:
    array = table.column(name)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    try:
        if name in ("tag", "node"):
            array.cast(pa.binary()).cast(pa.string())
        array = array.cast(pa.binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise BadInput(f"the column {name!r} is {array.type} and not what it must be; nothing was written") from None
    longest = pc.max(pc.binary_length(array)).as_py() or 0
    if longest > limit:
        raise TooLarge(f"a {name}", size=longest, limit=limit)
    return array


def encode_into_buffer(
    allocate: Callable[[int], bytearray], topic_id: int, first_seq: int, ts_ms: int, batch: Batch, *, durable: bool
) -> FrameBuffers:
    """`encode_frames` into reused memory, for a batch whose records differ only in their data."""
    assert isinstance(batch.tag, bytes), "the same for all records"
    assert isinstance(batch.node, bytes), "the same for all records"
    return write_frames(
        allocate,
        topic_id,
        first_seq,
        ts_ms,
        batch.datas,
        batch.lengths,
        tag=batch.tag,
        node=batch.node,
        flags=(DURABLE if durable else 0) | (JSON if batch.json else 0),
    )


def encode_frames(
    topic_id: int,
    first_seq: int,
    ts_ms: int,
    batch: Batch | ArrowBatch | MultiBatch | LargeBatch,
    *,
    durable: bool,
    chained: bool = False,
) -> list[bytes]:
    """Encode a batch as frames chained into one; `chained`: also to the frames that follow."""
    out: list[bytes] = []
    if isinstance(batch, MultiBatch):
        for number, each in enumerate(batch.parts, 1):
            out += encode_frames(topic_id, first_seq, ts_ms, each, durable=durable, chained=number < len(batch.parts))
            first_seq += len(each)
        return out
    base_flags = (DURABLE if durable else 0) | (MORE if chained else 0)
    if isinstance(batch, LargeBatch):
        ref, tag, node, meta = batch.ref, batch.tag, batch.node, batch.meta
        return [
            large_record.encode_frame(topic_id, first_seq, ts_ms, ref, tag=tag, node=node, meta=meta, flags=base_flags)
        ]
    if isinstance(batch, ArrowBatch):
        flags = base_flags | (JSON if batch.json else 0)
        return batches.encode_arrow(
            topic_id,
            first_seq,
            ts_ms,
            batch.data,
            tags=batch.tags,
            nodes=batch.nodes,
            metas=batch.metas,
            flags=flags,
        )
    if isinstance(batch.json, bool):
        return _encode_run(topic_id, first_seq, ts_ms, batch, base_flags | (JSON if batch.json else 0))
    pos = 0
    runs = [(is_json, len(list(run))) for is_json, run in groupby(batch.json)]
    for number, (is_json, count) in enumerate(runs):
        part = _slice_batch(batch, pos, pos + count)
        more = MORE if number < len(runs) - 1 else 0
        out += _encode_run(topic_id, first_seq + pos, ts_ms, part, base_flags | more | (JSON if is_json else 0))
        pos += count
    return out


def _slice_batch(batch: Batch, lo: int, hi: int) -> Batch:
    tag, node = (c if isinstance(c, bytes) else c[lo:hi] for c in (batch.tag, batch.node))
    return Batch(batch.datas[lo:hi], True, tag, node, batch.metas[lo:hi] if batch.metas else None)


def _encode_run(topic_id: int, first_seq: int, ts_ms: int, batch: Batch, flags: int) -> list[bytes]:
    tag, node = batch.tag, batch.node
    if len(batch) == 1 and not batch.metas:
        one_tag = tag if isinstance(tag, bytes) else tag[0]
        one_node = node if isinstance(node, bytes) else node[0]
        return [frame.encode_append(topic_id, first_seq, ts_ms, batch.datas[0], one_node, one_tag, flags)]
    return batches.encode_many(
        topic_id,
        first_seq,
        ts_ms,
        batch.datas,
        lengths=batch.lengths,
        tags=None if isinstance(tag, bytes) else tag,
        nodes=None if isinstance(node, bytes) else node,
        metas=batch.metas,
        tag=tag if isinstance(tag, bytes) else b"",
        node=node if isinstance(node, bytes) else b"",
        flags=flags,
    )
