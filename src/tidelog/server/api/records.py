"""What a feed hands on: records that are one batch, and where in the body they came from."""

from __future__ import annotations

from typing import Final, NamedTuple

from tidelog.engine import Batch
from tidelog.engine.encode import Columns

BYTES_MAX: Final = 4 << 20
"""A batch of a stream is about this large: enough that a sync costs little, not so much that anybody waits for it."""


class Cut(NamedTuple):
    batch: Batch | Columns
    where: dict[str, int]  # {"line": n} or {"batch": n}, from 1: where it begins
    scheduled: bool = False  # says when some of them may run: only a queue can do that
