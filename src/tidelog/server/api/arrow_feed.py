"""[hot] An Arrow IPC stream, as it comes → batches.

pyarrow reads from files and has no way to be fed, so messages are told apart here and handed to it whole. The bytes
come from outside: `engine/ipc.py` checks what a message claims to be before anything of it is decoded.

Columns are text or bytes, not dictionaries, runs or views: those can stand for far more than they weigh.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final, NoReturn

import numpy as np
import pyarrow as pa

from tidelog.engine import EngineConfig, encode, ipc
from tidelog.engine.expansion import Expansion, Oversized
from tidelog.errors import BadInput
from tidelog.server.api.problem import Problem
from tidelog.server.api.records import BYTES_MAX, Cut
from tidelog.types import Ints

_TEXTS: Final = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
_NUMBERS: Final = (
    pa.uint64(),
    pa.int64(),
    *(pa.timestamp(unit, zone) for unit in ("ms", "us") for zone in (None, "UTC")),
)
_TAKEN: Final = ("data", "tag", "node", "meta", "json")
_KINDS: Final = {
    "data": _TEXTS,
    **dict.fromkeys(("tag", "node", "meta"), (*_TEXTS, pa.null())),
    "json": (pa.bool_(),),
    **dict.fromkeys(("seq", "ts"), _NUMBERS),  # what a read gives and a write assigns anew
}


class Messages:
    def __init__(self, limits: EngineConfig, message_bytes_max: int, expansion: Expansion) -> None:
        self._limits, self._message_bytes_max, self._expansion = limits, message_bytes_max, expansion
        self._held = bytearray()
        self._need = ipc.HEAD.size  # bytes until something more is known
        self._kind = 0  # of the message at the front, once its metadata is here
        self._claimed = 0  # bytes that it will take when it is decoded, once all of it is here
        self._over = False
        self._refusal: Exception | None = None  # of the message at the front, for the next `take`
        self._schema: pa.Schema | None = None
        self._cuts: deque[pa.RecordBatch] = deque()
        self._number = 0

    @property
    def where(self) -> dict[str, int]:
        return {"batch": max(self._number, 1)}

    @property
    def size(self) -> int:
        """Bytes that the next `take` works on: decoded ones."""
        if self._cuts:
            return int(self._cuts[0].nbytes)
        return max(min(self._need, len(self._held)), self._claimed)

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    @property
    def claimed(self) -> int:
        return 0 if self._cuts else self._claimed

    @property
    def is_decoded(self) -> bool:
        return bool(self._cuts)

    @property
    def due(self) -> bool:
        return bool(self._cuts) or self._refusal is not None or (self._kind > 0 and len(self._held) >= self._need)

    def add(self, piece: bytes) -> None:
        self._held += piece
        if self._refusal is None:
            self._look()

    def end(self) -> None:
        if self._held or self._schema is None:
            raise BadInput("the Arrow stream is cut off; nothing was written of what is missing, send it whole")

    def _look(self) -> None:
        """Look at the message at the front. What is wrong with it is raised when it is taken: the batch before it is
        written, however much of the stream has come."""
        try:
            self._look_at_front()
        except (BadInput, Problem) as error:
            # Without its traceback: that refers to the frames of the callers, and so to the batch decoded last.
            # Together with this reference it would be a cycle, which keeps 64 MiB until the garbage collector runs.
            self._refusal = error.with_traceback(None)

    def _look_at_front(self) -> None:
        """Find out how long the message at the front is, and once it is here what it claims to be."""
        while not self._kind and len(self._held) >= self._need:
            if self._over:
                raise BadInput("there are bytes behind the end of the Arrow stream; nothing was written")
            size = ipc.metadata_bytes(self._held)
            if not size:
                self._over, self._need = True, 1
                del self._held[: ipc.HEAD.size]
            elif len(self._held) < ipc.HEAD.size + size:
                self._need = ipc.HEAD.size + size
            else:
                self._kind, body = ipc.about(bytes(self._held[ipc.HEAD.size : ipc.HEAD.size + size]))
                ipc.check_order(self._kind, self._schema)
                self._need = ipc.HEAD.size + size + body
                if self._need > self._message_bytes_max:
                    raise _too_large(Oversized("a batch", self._need, self._message_bytes_max))
        if self._kind == ipc.BATCH and not self._claimed and self.due and not self._cuts:
            self._claimed = self._measured()

    def _measured(self) -> int:
        """Bytes of the batch at the front when it is decoded, and of what is then made of its rows."""
        assert self._schema is not None, "batches come after it"
        self._number += 1
        with memoryview(self._held) as held, held[: self._need] as message:
            try:
                size = ipc.measure(message, len(self._schema))
                if size.bytes > self._message_bytes_max:
                    raise Oversized("a batch", size.bytes, self._message_bytes_max)
                self._expansion.add(self._need, size.bytes)
            except Oversized as error:
                raise _too_large(error) from None
        return max(size.bytes, 1)

    def take(self) -> Cut | None:
        if not self._cuts:
            if self._refusal is not None:
                self._refuse()
            message = bytes(memoryview(self._held)[: self._need])
            del self._held[: self._need]
            kind, self._kind, self._need, self._claimed = self._kind, 0, ipc.HEAD.size, 0
            self._read(kind, message)
        cut = Cut(encode.from_table(self._limits, self._cuts.popleft()), self.where) if self._cuts else None
        if not self._cuts:
            self._look()
        return cut

    def _refuse(self) -> NoReturn:
        refusal, self._refusal = self._refusal, None
        assert refusal is not None, "asked for before"
        try:
            raise refusal
        finally:
            del refusal  # its traceback refers to this frame: no cycle, as above

    def _read(self, kind: int, message: bytes) -> None:
        if kind == ipc.SCHEMA:
            self._schema = ipc.read_schema(message, _KINDS)
            return
        batch = ipc.read_batch(message, self._schema)
        batch = batch.select([name for name in batch.schema.names if name in _TAKEN])
        if batch.num_rows:
            self._cuts += _cuts(batch, self._limits.batch_records_max)


def _too_large(error: Oversized) -> Problem:
    return Problem("payload_too_large", f"{error}; nothing was written, send smaller batches")


def _cuts(batch: pa.RecordBatch, count_max: int) -> list[pa.RecordBatch]:
    """A batch in parts that are small enough to be written at once."""
    columns = [batch.column(name) for name in ("data", "meta") if name in batch.schema.names]
    ends = np.cumsum(sum(_lengths(column) for column in columns))
    marks = [0]
    while marks[-1] < len(ends):
        at = marks[-1]
        fits = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + BYTES_MAX, "right"))
        marks.append(min(max(fits, at + 1), at + count_max, len(ends)))
    return [batch.slice(lo, hi - lo) for lo, hi in pairwise(marks)]


def _lengths(column: pa.Array) -> Ints:
    import pyarrow.compute as pc  # late: it takes long, and few servers are asked for this

    made: Ints = pc.fill_null(pc.binary_length(column.cast(pa.large_binary())), 0).to_numpy(zero_copy_only=False)
    return made
