"""Shared nouns. No behaviour."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview
Ints: TypeAlias = NDArray[np.int64]


class Record(NamedTuple):
    """One record as a caller sees it. Immutable; `data` is a copy that outlives the log."""

    seq: int
    ts_us: int  # microseconds since the epoch; 0 where the codec keeps no time
    data: bytes
    node: bytes = b""  # where it came from
    tag: bytes = b""  # its delete key
    meta: bytes = b""  # its headers, opaque here
