"""What `kernel.pyx` offers once it is compiled; see there."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
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
def datas(body: bytes, most: int) -> list[bytes] | None: ...
def are_bytes(many: Sequence[object]) -> bool: ...
def lengths(datas: Sequence[object]) -> tuple[bytes, int] | None: ...
def gather(into: bytearray, pos: int, datas: Sequence[object], lo: int, hi: int) -> int: ...
