"""Reference implementations of the functions of `_native.pyx`, in Python. Imported through `tidelog.native` only.

They define the results: the tests compare the compiled functions with these, function by function. Five return "not
handled" for every input, because the general implementation is the caller's: `fill_indexed_records` (the caller is
`formats.scan`), `remove_records` (`formats.segment_rewrite`), `find_json_values` (`engine.record_keys`),
`parse_plain_body` and `parse_plain_bodies` (`server.handlers.write`). For arguments that
no caller passes, such as rows outside of their buffer, only the compiled functions are sure to raise ValueError.

A `Column` is the positions and the sizes of values in a buffer.
"""

from __future__ import annotations

import os
import re
from array import array
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import countOf
from struct import Struct, unpack_from
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog.types import Buffer, Ints

__all__ = (
    "all_bytes",
    "borrow_buffer",
    "copy_values",
    "copy_values_into",
    "count_valid_checksums",
    "encode_json_batch",
    "encode_json_rows",
    "encode_write_responses",
    "fill_indexed_records",
    "find_frames",
    "find_json_values",
    "fsync_loop",
    "have_equal_values",
    "json_depth",
    "parse_plain_bodies",
    "parse_plain_body",
    "remove_json_escapes",
    "remove_records",
    "split_by_size",
    "value_lengths",
)

Column: TypeAlias = tuple[Ints, Ints]

_U32 = Struct("<I")
_FD_OR_ERRNO = Struct("=i")
_SHORT_BYTES: Final = 1024  # a copy of a frame shorter than this costs less than a view of it
_FRAME_OVERHEAD_BYTES: Final = 46  # header and checksum of a frame
LAYOUT: dict[str, int] = {"OVERHEAD_BYTES": _FRAME_OVERHEAD_BYTES}
"""Constants of `formats`, which compares them at import: this module cannot import them."""
_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.|$)", re.DOTALL)
_BRACKET_OR_QUOTE: Final = re.compile(rb'[\[\]{}"]|\\.', re.DOTALL)
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode

# ── JSON text of records ──────────────────────────────────────────────────────────────────────────


def encode_json_rows(
    buf: Buffer,
    seq: Ints,
    ts_us: Ints,
    json: NDArray[np.bool_],
    data: Column | None,
    node: Column | None,
    tag: Column | None,
    meta: Column | None,
    between: bytes,
    last: bytes,
) -> bytes:
    """Encode rows as JSON objects, with `between` after each but the last and `last` after that. `json`: which rows
    hold JSON; the others are written as base64. A column that is None is left out."""
    if not len(seq):
        return b""
    times: list[int] = (ts_us // 1000).tolist()
    if node is None and tag is None and meta is None and data is not None and bool(json.all()):
        return _encode_data_only(seq, times, slice_values(buf, *data), between, last)
    parts = [[b'{"$seq":%d,"$ts":%d' % pair for pair in zip(seq.tolist(), times, strict=True)]]
    for key, names in ((b',"$node":', node), (b',"$tag":', tag)):
        if names is not None:
            parts.append(_quoted_names(slice_values(buf, *names), key))
    if data is not None:
        values = zip(slice_values(buf, *data), json.tolist(), strict=True)
        parts.append([_data_field(value, is_json) for value, is_json in values])
    if meta is not None:
        parts.append([b',"meta":' + text if text else b"" for text in slice_values(buf, *meta)])
    rows = [b"".join((*row, b"}")) for row in zip(*parts, strict=True)]
    rows[-1] += last
    return between.join(rows)


def _encode_data_only(seq: Ints, times: list[int], datas: list[bytes], between: bytes, last: bytes) -> bytes:
    """Join heads and datas once: half the time of a row at a time."""
    close = b"}" + between
    pieces: list[bytes] = [b""] * (2 * len(datas) + 1)
    if times[0] == times[-1]:  # times never fall, so all are the same
        head = b'%b{"$seq":%%d,"$ts":%d,"data":' % (close.replace(b"%", b"%%"), times[0])
        pieces[0:-1:2] = [head % number for number in seq.tolist()]
    else:
        pairs = zip(seq.tolist(), times, strict=True)
        pieces[0:-1:2] = [b'%b{"$seq":%d,"$ts":%d,"data":' % (close, number, ts_ms) for number, ts_ms in pairs]
    pieces[0] = pieces[0][len(close) :]
    pieces[1::2] = datas
    pieces[-1] = b"}" + last
    return b"".join(pieces)


def _quoted_names(names: list[bytes], key: bytes) -> list[bytes]:
    """A field for each name; each distinct name is quoted once."""
    quoted: dict[bytes, bytes] = {b"": b""}
    fields = []
    for name in names:
        field = quoted.get(name)
        if field is None:
            field = quoted[name] = key + _encode_json(name.decode())
        fields.append(field)
    return fields


def _data_field(data: bytes, is_json: bool) -> bytes:
    return b',"data":' + data if is_json else b',"data":"' + b64encode(data) + b'","$encoding":"base64"'


def encode_json_batch(
    buf: Buffer, lengths_at: int, count: int, data_end: int, lo: int, hi: int, seq: int, ts_ms: int
) -> bytes | None:
    """Encode records [lo, hi) of a batch as JSON objects with commas between them; `seq` is that of the first.

    `count` u32 lengths are stored at `lengths_at`, and the values after them, up to `data_end`. Returns None where the
    lengths do not add up. Raises ValueError where the batch is not inside the buffer."""
    if not (0 <= lengths_at <= data_end <= len(buf) and 0 <= lo < hi <= count <= (data_end - lengths_at) // 4):
        raise ValueError("a batch is outside of the buffer")
    sizes = unpack_from(f"<{count}I", buf, lengths_at)
    start = lengths_at + 4 * count
    if start + sum(sizes) != data_end:
        return None
    start += sum(sizes[:lo])
    datas = bytes(buf[start : start + sum(sizes[lo:hi])])
    values: list[Any] = [0] * (2 * (hi - lo))
    values[::2] = range(seq, seq + hi - lo)
    values[1::2] = [datas[first:end] for first, end in pairwise(accumulate(sizes[lo:hi], initial=0))]
    row = b'{"$seq":%%d,"$ts":%d,"data":%%b},' % ts_ms
    return (row * (hi - lo))[:-1] % tuple(values)  # one format for all: three quarters of the time of one each


# ── JSON text of clients ──────────────────────────────────────────────────────────────────────────


def parse_plain_body(body: bytes, records_max: int) -> list[bytes] | None:  # noqa: ARG001
    """Return the data of up to `records_max` records of a write body that has nothing else and no needless byte; None
    where the body is not such a one, or is too rare a case. The body is UTF-8."""
    return None


def parse_plain_bodies(
    bodies: list[bytes],  # noqa: ARG001
    records_max: int,  # noqa: ARG001
    size_max: int,  # noqa: ARG001
) -> tuple[list[bytes], list[int]] | None:
    """`parse_plain_body` of every body: all records in one list, and their number in each body. None where one body is
    not plain, is not ASCII, or is longer than `size_max`."""
    return None


def json_depth(text: bytes) -> int:
    """Return how deep JSON text is nested. It is not decoded: a list of empty lists would take 30 times its text."""
    depth = deepest = 0
    is_quoted = False
    for match in _BRACKET_OR_QUOTE.finditer(text):
        mark = match[0]
        if mark == b'"':
            is_quoted = not is_quoted
        elif is_quoted or mark[:1] == b"\\":
            continue
        elif mark in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def remove_json_escapes(text: bytes) -> bytes | None:
    """Return JSON text without the escapes that UTF-8 does not need; None where an escape is not valid."""
    try:
        return _ESCAPE.sub(_unescape, text)
    except msgspec.DecodeError:
        return None


def _unescape(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    if escape == b"\\/":
        return b"/"
    if len(escape) == 2 and escape != b"\\u":
        return escape
    return _encode_json(_decode_json(b'"%b"' % escape))[1:-1]


def find_json_values(
    starts: Ints,  # noqa: ARG001
    sizes: Ints,
    buf: Buffer,  # noqa: ARG001
    pos: Ints,
    size: Ints,  # noqa: ARG001
    names: tuple[bytes, ...],  # noqa: ARG001
) -> int:
    """Find the value at a JSON pointer, whose names are UTF-8, in each JSON text: where its text is, without quotes, in
    `starts`, and its size in `sizes`. 0: none, null, empty, an object or an array; -1: not handled. Returns how many
    are not handled."""
    sizes[:] = -1
    return len(pos)


# ── the values of a batch ─────────────────────────────────────────────────────────────────────────


def all_bytes(values: Sequence[object]) -> bool:
    """Return whether every value is bytes, and of no class derived from it."""
    return countOf(map(type, values), bytes) == len(values)


def value_lengths(datas: Sequence[object]) -> tuple[bytes, int] | None:
    """Return the length of each value, as u32 of this machine, and their sum; None where a value is not plain bytes or
    is longer than a u32 can say."""
    if not all_bytes(datas):
        return None
    try:
        lengths = array("I", map(len, datas))  # type: ignore[arg-type]
    except OverflowError:
        return None
    return lengths.tobytes(), sum(lengths)


def split_by_size(
    lengths: array[int] | NDArray[np.uint32], size_max: int, count_max: int
) -> list[tuple[int, int, int]]:
    """Split values into groups [lo, hi) and return each with its bytes: as many values as make `size_max` bytes, at
    most `count_max`, and at least one. Lengths are u32 of this machine."""
    ends = np.asarray(lengths, np.uint32).cumsum(dtype=np.int64)
    count, lo, before, groups, count_max = len(ends), 0, 0, [], max(count_max, 1)
    while lo < count:
        # `bisect` and not `searchsorted`: for an array this short a call of NumPy costs ten times as much.
        hi = max(lo + 1, bisect_right(ends, before + size_max, lo, min(count, lo + count_max)))
        end = int(ends[hi - 1])
        groups.append((lo, hi, end - before))
        lo, before = hi, end
    return groups


def copy_values_into(target: bytearray, pos: int, datas: Sequence[bytes], lo: int, hi: int) -> int:
    """Copy values [lo, hi) to `pos` and after it, and return where the last one ends. Raises ValueError where they do
    not fit: the target keeps its size, its content is undefined then."""
    if not (pos >= 0 and 0 <= lo <= hi <= len(datas)):
        raise ValueError(f"no such values, or no such position: values {lo} to {hi} of {len(datas)} at {pos}")
    joined = b"".join(datas[lo:hi])
    end = pos + len(joined)
    if end > len(target):
        raise ValueError(f"the values end at {end}, the memory at {len(target)}")
    target[pos:end] = joined
    return end


# ── frames, and columns of records ────────────────────────────────────────────────────────────────


def find_frames(buf: Buffer, pos: int, end: int, frames_max: int) -> tuple[bytes, int]:
    """Return where up to `frames_max` frames begin, as i64 of this machine, and where the last one ends. The first is
    at `pos`, each other where the length of the one before it says. Nothing is verified. A frame that ends fewer than
    four bytes before `end` is not reported: the length after it could not be read."""
    if not 0 <= pos <= end <= len(buf) or frames_max < 0:
        raise ValueError("no such range of bytes")
    starts: list[int] = []
    while len(starts) < frames_max and end - pos >= _FRAME_OVERHEAD_BYTES:
        (length,) = _U32.unpack_from(buf, pos)
        if not _FRAME_OVERHEAD_BYTES - 4 <= length <= end - pos - 8:
            break
        starts.append(pos)
        pos += 4 + length
    return array("q", starts).tobytes(), pos


def count_valid_checksums(buf: Buffer, starts: Ints, ends: Ints) -> int:
    """Count the frames before the first whose checksum does not hold: `starts` and `ends` are where each begins and
    where its checksum begins."""
    view = memoryview(buf)
    if not len(starts):
        return 0
    inside = int(starts.min()) >= 0 and int(ends.min()) >= 4 and int(ends.max()) <= len(view) - 8
    if not inside or (ends - 4 < starts).any():
        raise ValueError("a frame is outside of the buffer")
    is_short = isinstance(buf, bytes) and int((ends - starts).sum()) < len(starts) * _SHORT_BYTES
    source = buf if is_short else view
    ranges = zip((starts + 4).tolist(), ends.tolist(), strict=True)
    computed = np.array([xxh3_64_intdigest(source[lo:hi]) for lo, hi in ranges], "<u8")
    stored = np.ndarray((len(view) - 7,), "<u8", view, strides=(1,))[ends]
    wrong = np.flatnonzero(computed != stored)
    return int(wrong[0]) if len(wrong) else len(starts)


def remove_records(
    target: Buffer | pa.Buffer,  # noqa: ARG001
    buf: Buffer,  # noqa: ARG001
    frame_pos: Ints,  # noqa: ARG001
    removed: NDArray[np.bool_],  # noqa: ARG001
    end: int,  # noqa: ARG001
    time_step_ms: int,  # noqa: ARG001
    empty_max: int,  # noqa: ARG001
) -> int:
    """Write the frames of these records to `target` without the values of the removed ones, and return how many bytes
    they take; -1 where one of the frames needs the general implementation. `frame_pos` is where the frame of each
    record begins, and `end` where the last one ends. At most `empty_max` removed records in a row, of less than
    `time_step_ms`, become one batch of empty records."""
    return -1


def have_equal_values(buf: Buffer, pos: Ints, size: Ints, other: Buffer, other_pos: Ints) -> bool:
    """Return whether the values at these positions of two buffers, which have these sizes, are the same."""
    one, two = memoryview(buf), memoryview(other)
    for at, limit in ((pos, len(one)), (other_pos, len(two))):
        if not ((size >= 0) & (size <= limit) & (at >= 0) & (at <= limit - size)).all():
            raise ValueError("a value is outside of its buffer")
    ranges = zip(pos.tolist(), other_pos.tolist(), size.tolist(), strict=True)
    return all(bytes(one[at : at + n]) == bytes(two[other_at : other_at + n]) for at, other_at, n in ranges)


def fill_indexed_records(
    buf: Buffer,  # noqa: ARG001
    entries: NDArray[np.void],  # noqa: ARG001
    seq: int,  # noqa: ARG001
    origin: int,  # noqa: ARG001
    ts_us: Ints,  # noqa: ARG001
    at: Ints,  # noqa: ARG001
    flags: NDArray[np.uint8],  # noqa: ARG001
    data: Column,  # noqa: ARG001
    node: Column | None,  # noqa: ARG001
    tag: Column | None,  # noqa: ARG001
) -> int:
    """Fill these columns with the records that index entries name; `seq` is that of the first entry and `origin` the
    position of `buf` in the data that entries count from. Returns 1; 0 where a frame is not an ordinary one or does
    not match its entries; -1 where a record has a node or a tag and that column is None. The columns are undefined
    unless 1 is returned."""
    return 0


def slice_values(buf: Buffer, pos: Ints, size: Ints) -> list[bytes]:
    """Copy values out as bytes objects. There is no compiled function for this."""
    if not len(pos):
        return []
    lo, hi = int(pos[0]), int((pos + size).max())
    # One copy of the range, then slices of bytes: half the cost of slicing a memoryview per value.
    blob = bytes(memoryview(buf)[lo:hi])
    starts, ends = (pos - lo).tolist(), (pos + size - lo).tolist()
    return [blob[start:end] for start, end in zip(starts, ends, strict=True)]


def copy_values(target: Buffer | pa.Buffer, edges: Buffer | pa.Buffer, buf: Buffer, pos: Ints, size: Ints) -> None:
    """Copy values one after the other into `target`, which they fill, and write where each begins and where the last
    one ends to `edges`, as i32 of this machine. Raises ValueError where a value is outside of `buf` and where they do
    not fill the target; its content is undefined then."""
    into, offsets, view = memoryview(target).cast("B"), memoryview(edges).cast("B"), memoryview(buf)
    if len(offsets) != 4 * (len(pos) + 1) or len(into) >> 31:
        raise ValueError("there are as many edges as values, and one; and they count up to 2 GiB")
    inside = (size >= 0) & (size <= len(view)) & (pos >= 0) & (pos <= len(view) - size)
    if not inside.all() or int(size.sum()) != len(into):
        raise ValueError("a value is outside of the buffer, or they do not fill the memory")
    ends = size.cumsum()
    offsets[:] = np.append(0, ends).astype(np.int32).tobytes()
    # Neighbours are copied together: the values of a batch frame are one range.
    first = np.flatnonzero(np.append(True, pos[1:] != (pos + size)[:-1])) if len(pos) else pos
    starts = pos[first]
    sizes = np.diff(np.append(0, ends)[first], append=len(into))
    ranges = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    into[:] = b"".join([view[lo:hi] for lo, hi in ranges])


def borrow_buffer(size: int) -> Any:
    """Return writable memory of this size with any content; the compiled function uses memory again that was given
    back before."""
    if size < 0:
        raise ValueError("memory has no negative size")
    return pa.allocate_buffer(size)


# ── responses to small writes ─────────────────────────────────────────────────────────────────────


def encode_write_responses(
    first: int, counts: Sequence[int], took_us: Sequence[int], start: bytes, head: bytes, middle: bytes, took: bytes
) -> list[bytes]:
    """Encode the responses to writes that share one batch, whose seqs begin at `first`. `start`, `head`, `middle` and
    `took` are the texts around the numbers, which are the same for all of them."""
    responses = []
    for count, us in zip(counts, took_us, strict=True):
        last = first + count - 1
        ms, seqs = repr(us / 1000).encode(), msgspec.json.encode(list(range(first, last + 1)))
        responses.append(
            b'%b%d,"last_seq":%d%b%d%b%b%b,"seqs":%b}' % (start, first, last, head, count, middle, ms, took, seqs)
        )
        first = last + 1
    return responses


# ── syncs ─────────────────────────────────────────────────────────────────────────────────────────


def fsync_loop(request_fd: int, result_fd: int) -> None:
    """Sync each descriptor that is read from `request_fd`, and write its errno or 0 to `result_fd`. Returns at a
    descriptor below 0 and at the end of the pipe."""
    while word := os.read(request_fd, _FD_OR_ERRNO.size):
        (descriptor,) = _FD_OR_ERRNO.unpack(word)
        if descriptor < 0:
            return
        code = 0
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            code = error.errno or -1
        os.write(result_fd, _FD_OR_ERRNO.pack(code))
