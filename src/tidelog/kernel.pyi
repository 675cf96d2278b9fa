"""What `kernel.pyx` offers once it is compiled; see there."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_Buffer: TypeAlias = bytes | bytearray | memoryview
_Ints: TypeAlias = NDArray[np.int64]
_Span: TypeAlias = tuple[_Ints, _Ints]

def joined(
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
def batched(
    buf: _Buffer, lengths_at: int, count: int, data_end: int, lo: int, hi: int, seq: int, ts_ms: int
) -> bytes | None: ...
def indexed(
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
def lent(size: int) -> _Buffer: ...
def copied(into: pa.Buffer, edges: pa.Buffer, buf: _Buffer, pos: _Ints, size: _Ints) -> None: ...
def datas(body: bytes, most: int) -> list[bytes] | None: ...
def datas_of(bodies: list[bytes], most: int, size_max: int) -> tuple[list[bytes], list[int]] | None: ...
def depth(text: bytes) -> int: ...
def unescaped(text: bytes) -> bytes | None: ...
def hops(buf: _Buffer, pos: int, end: int, most: int) -> tuple[bytes, int]: ...
def synced(asks: int, tells: int) -> None: ...
def are_bytes(many: Sequence[object]) -> bool: ...
def lengths(datas: Sequence[object]) -> tuple[bytes, int] | None: ...
def cuts(lengths: Sequence[int] | NDArray[np.uint32], size_max: int, count_max: int) -> list[tuple[int, int, int]]: ...
def gather(into: bytearray, pos: int, datas: Sequence[object], lo: int, hi: int) -> int: ...

class Gate:
    owner: Any
    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    armed: bool
    clean: bool
    away: bool
    passed: bool
    def __init__(self, owner: Any, buffer: memoryview, slow: Callable[[int], None]) -> None: ...
    def get_buffer(self, sizehint: int) -> memoryview: ...
    def enter(self, before: bytes, after: bytes, lobby: Any, transport: Any, body: bytes) -> None: ...
    def buffer_updated(self, nbytes: int) -> None: ...

def written(
    first: int, counts: Sequence[int], took_us: Sequence[int], start: bytes, head: bytes, middle: bytes, took: bytes
) -> list[bytes]: ...
def answer(
    passes: list[Any], bodies: list[bytes], first: bytes, second: bytes, third: bytes, prefix: bytes, number: int
) -> None: ...
