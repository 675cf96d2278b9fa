"""Hashes of table rows, computed in NumPy; sums of them are hashes of ranges. Commits of tables store them, so the
function must not change. Batch numbers of a sink use another stored hash, XXH3 per value (`spark.row_encoder`).

    value      ─ 8-byte words ─▶ mix ─▶ × weight of its place ─▶ Σ ─▶ + length ─▶ mix        texts, bytes
               ─ one word     ─▶ mix                                                         numbers, times
    row        Σ over columns of mix(value ^ name of the column) ─▶ mix
    range      Σ over rows, modulo 2⁶⁴: independent of order and files, and a duplicate row counts twice

Sums and not exclusive ors, in which two equal rows cancel out. Words are mixed before they are weighted, because in a
product modulo 2⁶⁴ the high bits of a factor never reach the low bits of the result. It is a checksum, not a signature:
collisions can be constructed.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from tidelog.types import Ints

HashWords = NDArray[np.uint64]
MASK_64: Final = (1 << 64) - 1
_WORD_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER: Final = np.uint64(0xBF58476D1CE4E5B9)
_NULL_HASH: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_32: Final = np.uint64(32)
_BY_POSITION_MIN_ROWS: Final = 256  # rows per position from which hashing position by position is faster
_TAIL_MASKS: Final = np.array([MASK_64, *((1 << (8 * size)) - 1 for size in range(1, 8))], np.uint64)


def sum_hashes(hashes: HashWords) -> int:
    """Return the hash of a range from the hashes of its rows."""
    return int(hashes.sum(dtype=np.uint64))


def hash_rows(batch: pa.RecordBatch | pa.Table) -> HashWords:
    """Return the hash of every row. It depends on the names of the columns and not on their order."""
    made = np.zeros(batch.num_rows, np.uint64)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        made += _mix(hash_values(array) ^ _name_hash(name))
    return _mix(made)


def hash_values(array: pa.Array) -> HashWords:
    """Return the hash of every value of a column."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL_HASH)
    if pa.types.is_dictionary(kind):
        return hash_values(array.dictionary_decode())
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return hash_values(array.cast(pa.string()))
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return hash_values(array.cast(pa.binary()))
    made = _hash_array(array)
    if array.null_count:
        made[~array.is_valid().to_numpy(zero_copy_only=False)] = _NULL_HASH
    return made


def _hash_array(array: pa.Array) -> HashWords:
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _hash_bytes(array)
    if pa.types.is_struct(kind):
        made = np.zeros(len(array), np.uint64)
        for number in range(kind.num_fields):
            made += _mix(hash_values(pc.struct_field(array, [number])) ^ _name_hash(kind.field(number).name))
        return _mix(made)
    if pa.types.is_map(kind):
        return _hash_lists(array, _mix(hash_values(array.keys)) + hash_values(array.items) * _MIX_MULTIPLIER)
    if pa.types.is_list(kind):
        return _hash_lists(array, hash_values(array.values))
    if pa.types.is_decimal(kind):
        pairs = np.frombuffer(array.buffers()[1], np.uint64)[2 * array.offset : 2 * (array.offset + len(array))]
        return _mix(_mix(pairs[0::2]) + pairs[1::2])
    return _mix(_number_words(array))


def _number_words(array: pa.Array) -> HashWords:
    kind = array.type
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif pa.types.is_floating(kind):
        array = array.cast(pa.float64()).view(pa.int64())
    elif pa.types.is_date32(kind):
        array = array.view(pa.int32())
    elif not pa.types.is_integer(kind):
        array = array.view(pa.int64())
    filled = array.fill_null(0) if array.null_count else array
    made: HashWords = filled.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
    return made


def _value_offsets(array: pa.Array) -> Ints:
    found = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return found.astype(np.int64)


def _hash_lists(array: pa.Array, inner: HashWords) -> HashWords:
    offsets = _value_offsets(array)
    sizes = np.diff(offsets)
    window = inner[offsets[0] : offsets[-1]]
    place = np.arange(len(window)) - np.repeat(offsets[:-1] - offsets[0], sizes)
    return _weighted_sums(window.copy(), place, sizes, sizes)


def _hash_bytes(array: pa.Array) -> HashWords:
    if not len(array):
        return np.zeros(0, np.uint64)
    offsets = _value_offsets(array)
    starts, sizes = offsets[:-1] - offsets[0], np.diff(offsets)
    counts = (sizes + 7) // 8
    data = array.buffers()[2]
    raw = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    padded = np.concatenate([raw, np.zeros(8, np.uint8)])
    # Words that begin at any byte: one index per eight bytes, where a gather of bytes needs one for each.
    anywhere = np.ndarray((len(raw) + 1,), np.dtype("<u8"), padded, strides=(1,))
    if len(array) >= _BY_POSITION_MIN_ROWS and int(sizes[0]) and int(sizes.min()) == int(sizes.max()):
        return _hash_equal_sized(padded, len(array), int(sizes[0]))
    if int(counts.sum()) >= _BY_POSITION_MIN_ROWS * int(counts.max()):
        return _hash_by_position(anywhere, starts, sizes, counts)
    ends = np.cumsum(counts)
    place = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    words = anywhere[np.repeat(starts, counts) + 8 * place]
    some = np.flatnonzero(counts)
    words[ends[some] - 1] &= _TAIL_MASKS[sizes[some] % 8]
    return _weighted_sums(words, place, counts, sizes)


def _hash_equal_sized(padded: NDArray[np.uint8], count: int, size: int) -> HashWords:
    """Compute the sums of values of equal size: their words have equal distances and need no index."""
    sums = np.full(count, size * int(_MIX_MULTIPLIER) & MASK_64, np.uint64)
    weights = _position_weights(1 << (-(-size // 8) - 1).bit_length())
    for place, at in enumerate(range(0, size, 8)):
        words: HashWords = np.array(np.ndarray((count,), np.dtype("<u8"), padded, at, (size,)), np.uint64)
        if size - at < 8:
            words &= _TAIL_MASKS[size - at]
        words *= _WORD_MULTIPLIER
        words ^= words >> _SHIFT_32
        words *= weights[place]
        sums += words
    return _mix(sums)


def _hash_by_position(anywhere: HashWords, starts: Ints, sizes: Ints, counts: Ints) -> HashWords:
    """Compute the sums position by position: arrays have one element per row and fit the cache (measured: more than
    twice as fast for rows of 100 bytes)."""
    order = np.argsort(-counts, kind="stable")
    at, sizes, counts = starts[order], sizes[order], counts[order]
    sums = sizes.astype(np.uint64) * _MIX_MULTIPLIER
    weights = _position_weights(1 << max(int(counts[0]) - 1, 0).bit_length()) if counts[0] else ()
    until = np.searchsorted(-counts, -np.arange(1, int(counts[0]) + 1), side="right").tolist()
    for place, live in enumerate(until):
        words = anywhere[at[:live]]
        after = until[place + 1] if place + 1 < len(until) else 0
        words[after:live] &= _TAIL_MASKS[sizes[after:live] % 8]
        words *= _WORD_MULTIPLIER
        words ^= words >> _SHIFT_32
        words *= weights[place]
        sums[:live] += words
        at[:live] += 8
    made = np.empty_like(sums)
    made[order] = _mix(sums)
    return made


def _weighted_sums(words: HashWords, positions: Ints, counts: Ints, sizes: Ints) -> HashWords:
    """Sum the words of each row, each multiplied by the weight of its position. Changes `words`."""
    made = sizes.astype(np.uint64) * _MIX_MULTIPLIER
    if len(words):
        words *= _WORD_MULTIPLIER
        words ^= words >> _SHIFT_32
        words *= _position_weights(1 << int(positions.max()).bit_length())[positions]
        some = np.flatnonzero(counts)
        made[some] += np.add.reduceat(words, (np.cumsum(counts) - counts)[some])
    return _mix(made)


@cache
def _name_hash(name: str) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(name.encode()))


@cache
def _position_weights(count: int) -> HashWords:
    """Return odd pseudo-random numbers, one per position."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _WORD_MULTIPLIER) | np.uint64(1)


def _mix(words: HashWords) -> HashWords:
    """Return new words in which every bit depends on every bit of the input."""
    made: HashWords = words ^ (words >> np.uint64(30))
    made *= _MIX_MULTIPLIER
    made ^= made >> np.uint64(27)
    made *= _NULL_HASH
    made ^= made >> np.uint64(31)
    return made
