"""Types of the functions of `_native.pyx`."""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_Buffer: TypeAlias = bytes | bytearray | memoryview
_Ints: TypeAlias = NDArray[np.int64]
_Span: TypeAlias = tuple[_Ints, _Ints]

LAYOUT: dict[str, int]

def encode_json_rows(
    buf: _Buffer,
    seq: _Ints,
    ts_us: _Ints,
    json: NDArray[np.bool_],
    data: _Span | None,
    node: _Span | None,
    tag: _Span | None,
    meta: _Span | None,
    between: bytes,
    last: bytes,
) -> bytes: ...
def encode_json_batch(
    buf: _Buffer, lengths_at: int, count: int, data_end: int, lo: int, hi: int, seq: int, ts_ms: int
) -> bytes | None: ...
def fill_indexed_records(
    buf: _Buffer,
    entries: NDArray[np.void],
    seq: int,
    origin: int,
    ts_us: _Ints,
    at: _Ints,
    flags: NDArray[np.uint8],
    data: _Span,
    node: _Span | None,
    tag: _Span | None,
) -> int: ...
def borrow_buffer(size: int) -> Any: ...
def copy_values(
    target: _Buffer | pa.Buffer, edges: _Buffer | pa.Buffer, buf: _Buffer, pos: _Ints, size: _Ints
) -> None: ...
def parse_plain_body(body: bytes, records_max: int) -> list[bytes] | None: ...
def parse_plain_bodies(
    bodies: list[bytes], records_max: int, size_max: int
) -> tuple[list[bytes], list[int]] | None: ...
def json_depth(text: bytes) -> int: ...
def remove_json_escapes(text: bytes) -> bytes | None: ...
def find_json_values(
    starts: _Ints, sizes: _Ints, buf: _Buffer, pos: _Ints, size: _Ints, names: tuple[bytes, ...]
) -> int: ...
def find_frames(buf: _Buffer, pos: int, end: int, frames_max: int) -> tuple[bytes, int]: ...
def count_valid_checksums(buf: _Buffer, starts: _Ints, ends: _Ints) -> int: ...
def remove_records(
    target: _Buffer | pa.Buffer,
    buf: _Buffer,
    frame_pos: _Ints,
    removed: NDArray[np.bool_],
    end: int,
    time_step_ms: int,
    empty_max: int,
) -> int: ...
def have_equal_values(buf: _Buffer, pos: _Ints, size: _Ints, other: _Buffer, other_pos: _Ints) -> bool: ...
def fsync_loop(request_fd: int, result_fd: int) -> None: ...
def all_bytes(values: Sequence[object]) -> bool: ...
def value_lengths(datas: Sequence[object]) -> tuple[bytes, int] | None: ...
def split_by_size(
    lengths: array[int] | NDArray[np.uint32], size_max: int, count_max: int
) -> list[tuple[int, int, int]]: ...
def copy_values_into(target: bytearray, pos: int, datas: Sequence[bytes], lo: int, hi: int) -> int: ...
def encode_write_responses(
    first: int, counts: Sequence[int], took_us: Sequence[int], start: bytes, head: bytes, middle: bytes, took: bytes
) -> list[bytes]: ...
