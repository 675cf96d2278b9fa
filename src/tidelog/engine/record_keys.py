"""Keys of records: the tag, or the value at a JSON pointer in data; and which records are tombstones.

    compaction         key                                              tombstone
    latest_by_tag      the tag                                          data is JSON null or empty, or meta.tombstone
    /user/id           data["user"]["id"]: text, a number or a bool     meta.tombstone

`meta.tombstone` is the field `tombstone` of meta with the value true. A number or bool counts as its JSON text: 7 and
"7" are one key. A record has no key where it has no tag, data is not JSON or is large, or the pointer leads to nothing,
to null, to an empty text, to an object or to an array.

A key is identified by its BLAKE2b digest of 16 bytes: no two keys share one, also if a client tries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog import native
from tidelog.engine.config import LATEST_BY_TAG
from tidelog.formats import lazy_compute as pc
from tidelog.formats import segment_index
from tidelog.formats.key_index import DIGEST_BYTES, SegmentKeys, Words
from tidelog.formats.rows import Rows, Span, copy_values, to_binary_array
from tidelog.types import Buffer, Ints

BoolArray: TypeAlias = NDArray[np.bool_]
_NOT_PLAIN: Final = re.compile(r'[\x00-\x1f"\\]')
_CHUNK_BYTES: Final = 1 << 20  # of JSON text that is parsed at once
_Leaf: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None
_Other: TypeAlias = str | int | float | bool | list[Any] | None


class Digest(NamedTuple):
    """The identity of a key. Digests order as their 16 bytes do."""

    high: int
    low: int


def digest_of(key: bytes) -> Digest:
    value = blake2b(key, digest_size=DIGEST_BYTES).digest()
    return Digest(int.from_bytes(value[:8]), int.from_bytes(value[8:]))


def digests_of(keys: Sequence[bytes]) -> tuple[Words, Words]:
    """Return the high and low halves of the digests of these keys."""
    joined = b"".join([blake2b(key, digest_size=DIGEST_BYTES).digest() for key in keys])
    pairs = np.frombuffer(joined, ">u8").reshape(-1, 2)
    return pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)


class _TombstoneMeta(msgspec.Struct):
    tombstone: Any = False


_decode_meta = msgspec.json.Decoder(_TombstoneMeta).decode


class KeySelector:
    """The rule for keys of one topic. Immutable."""

    def __init__(self, compaction: str) -> None:
        self.rule = compaction
        self.id = xxh3_64_intdigest(compaction.encode())
        self.is_by_tag = compaction == LATEST_BY_TAG
        tokens = () if self.is_by_tag else tuple(_unescape(token) for token in compaction[1:].split("/"))
        self._tokens = tokens
        # A number may be the position in an array, and some names are always written with escapes: such a path is
        # followed in the parsed value.
        is_plain = not any(_NOT_PLAIN.search(token) or (token.isascii() and token.isdecimal()) for token in tokens)
        self._parse = _make_parser(tokens) if is_plain and not self.is_by_tag else None
        self._names = tuple(token.encode() for token in tokens) if self._parse is not None else None

    def keys(self, rows: Rows) -> pa.Array:
        """Return the key of each row as bytes; null: it has none."""
        if self.is_by_tag:
            if rows.tag is None:
                return pa.nulls(len(rows), pa.binary())
            tags = to_binary_array(rows.buf, rows.tag)
            tagged = rows.tag.size > 0
            return tags if tagged.all() else pc.if_else(pa.array(tagged), tags, pa.scalar(None, pa.binary()))
        which = np.flatnonzero(_holds_json(rows) & (rows.data.size > 0))
        found = self._keys_in_json(rows, which)
        if len(found) == len(rows):
            return found
        places = np.full(len(rows), -1, np.int64)
        places[which] = np.arange(len(which))
        return found.take(pa.array(places, mask=places < 0))

    def _keys_in_json(self, rows: Rows, which: Ints) -> pa.Array:
        keys = [pa.array([], pa.binary())]
        ends = np.cumsum(rows.data.size[which])
        lo = 0
        while lo < len(which):
            start = int(ends[lo - 1]) if lo else 0
            hi = max(int(np.searchsorted(ends, start + _CHUNK_BYTES)), lo + 1)
            keys.append(self._keys_of_values(rows.buf, rows.data.take(which[lo:hi])))
            lo = hi
        return pa.concat_arrays(keys)

    def keys_of_texts(self, texts: list[bytes]) -> pa.Array:
        """Return the key in each JSON text as bytes, of a rule that is a pointer; null: it has none."""
        sizes = np.array([len(text) for text in texts], np.int64)
        return self._keys_of_values(b",".join([*texts, b""]), Span(np.cumsum(sizes + 1) - sizes - 1, sizes))

    def _keys_of_values(self, buf: Buffer, values: Span) -> pa.Array:
        """Return the key in each of these JSON texts: found without an object for each, except in rare texts."""
        if self._names is None or not len(values.size):
            return self._parse_keys(buf, values)
        starts, sizes = np.empty_like(values.size), np.empty_like(values.size)
        unhandled = native.find_json_values(starts, sizes, buf, values.pos, values.size, self._names)
        if unhandled == len(sizes):
            return self._parse_keys(buf, values)
        keys = to_binary_array(buf, Span(starts, np.maximum(sizes, 0)))
        if (sizes <= 0).any():
            keys = pc.if_else(pa.array(sizes > 0), keys, pa.scalar(None, pa.binary()))
        if unhandled:
            others = sizes < 0
            keys = pc.replace_with_mask(
                keys, pa.array(others), self._parse_keys(buf, values.take(np.flatnonzero(others)))
            )
        return keys

    def _parse_keys(self, buf: Buffer, values: Span) -> pa.Array:
        if self._parse is not None:
            try:
                found = self._parse(_join_values(buf, values))
                if len(found) == len(values.size):
                    return _encode_keys(found)
            except (msgspec.MsgspecError, RecursionError, ValueError):
                pass  # one of them is not what the batch parser expects: look at each
        return _encode_keys([self._follow(text) for text in copy_values(buf, values)])

    def _follow(self, text: bytes) -> object:
        """Return the value at the pointer in one JSON text; UNSET if there is none."""
        try:
            value = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return UNSET
        for token in self._tokens:
            if isinstance(value, dict) and token in value:
                value = value[token]
            elif isinstance(value, list) and _is_position(token) and int(token) < len(value):
                value = value[int(token)]
            else:
                return UNSET
        return value

    def tombstones(self, rows: Rows) -> BoolArray:
        """Return which rows mark their key as deleted."""
        marks = np.zeros(len(rows), bool)
        if self.is_by_tag:
            size = rows.data.size
            marks |= size == 0
            short = np.flatnonzero(_holds_json(rows) & (size == 4))
            if len(short):
                marks[short] = [text == b"null" for text in copy_values(rows.buf, rows.data.take(short))]
        if rows.meta is not None:
            with_meta = np.flatnonzero(rows.meta.size > 0)
            metas = copy_values(rows.buf, rows.meta.take(with_meta))
            marks[with_meta] |= np.array([_is_tombstone_meta(meta) for meta in metas], bool)
        return marks

    def index(self, rows: Rows, base: int) -> SegmentKeys:
        """Index verified rows, whose first seq is `base` or later."""
        keys = self.keys(rows)
        keyed = np.flatnonzero(np.asarray(keys.is_valid()))
        encoded = keys.drop_null().dictionary_encode()
        high, low = digests_of(encoded.dictionary.to_pylist())
        order = np.lexsort((low, high))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        codes = rank[encoded.indices.to_numpy(zero_copy_only=False)]
        offsets = (rows.seq[keyed] - base).astype(np.uint32)
        newest = np.zeros(len(order), np.int64)
        newest[codes] = np.arange(len(codes))  # rows ascend, so the last one of each key stays
        is_older = np.ones(len(codes), bool)
        is_older[newest] = False
        return SegmentKeys(
            high[order],
            low[order],
            offsets[newest],
            self.tombstones(rows)[keyed[newest]],
            offsets[is_older],
            codes[is_older].astype(np.uint32),
        )


def _join_values(buf: Buffer, values: Span) -> bytearray:
    """Return the JSON array of these JSON texts. They are copied once, each with the byte after it, which becomes a
    comma. Raises ValueError where there is no such byte."""
    sizes = values.size + 1
    text = bytearray(int(sizes.sum()) + 1)
    native.copy_values(memoryview(text)[1:], bytearray(4 * (len(sizes) + 1)), buf, values.pos, sizes)
    text[0] = ord("[")
    np.frombuffer(text, np.uint8)[np.cumsum(sizes)] = ord(",")
    text[-1] = ord("]")
    return text


def _encode_keys(values: list[Any]) -> pa.Array:
    """Return the key of each of these values."""
    if "" not in values:
        try:
            return pa.array(values, pa.string()).cast(pa.binary())  # most often all of them are texts
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError):
            pass
    return pa.array([_key_text(value) for value in values], pa.binary())


def _holds_json(rows: Rows) -> BoolArray:
    """Return which rows have JSON data. That of a large record is in a file of its own and is not looked into."""
    is_json: BoolArray = (segment_index.record_flags(rows) & segment_index.JSON) != 0
    return is_json if rows.blob_bytes is None else is_json & (rows.blob_bytes == 0)


@lru_cache(256)
def selector_of(compaction: str) -> KeySelector:
    """Return the rule for keys of this config value."""
    return KeySelector(compaction)


def _unescape(token: str) -> str:
    return token.replace("~1", "/").replace("~0", "~")


def _is_position(token: str) -> bool:
    return token.isascii() and token.isdecimal() and len(token) < 10 and (token == "0" or token[0] != "0")


def _make_parser(tokens: tuple[str, ...]) -> Callable[[bytearray], list[Any]]:
    """Return a function that finds the value of each record in an array of them. It parses nothing else of a record."""
    kind: Any = _Leaf
    for number, token in enumerate(reversed(tokens)):
        level = msgspec.defstruct(
            f"Level{number}", [("value", kind, msgspec.field(default=UNSET, name=token))], gc=False
        )
        kind = level | _Other
    decode = msgspec.json.Decoder(list[kind]).decode

    def parse(text: bytearray) -> list[Any]:
        values = decode(text)
        for _ in tokens:
            values = [getattr(value, "value", UNSET) for value in values]
        return values

    return parse


def _key_text(value: object) -> bytes | None:
    if type(value) is str:
        return value.encode() or None
    if type(value) is bool or type(value) is float:
        return msgspec.json.encode(value)
    return str(value).encode() if type(value) is int else None


def _is_tombstone_meta(meta: bytes) -> bool:
    try:
        return b"tombstone" in meta and _decode_meta(meta).tombstone is True
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False
