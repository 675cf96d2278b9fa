"""What `kernel.pyx` offers once it is compiled; see there."""

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
def datas(body: bytes, most: int) -> list[bytes] | None: ...
