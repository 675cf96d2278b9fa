"""[hot] An Arrow IPC stream, as it comes → batches.

    ┌──────────┬──────┬──────────────────┬──────────┐
    │ FFFFFFFF │ size │ metadata (size)  │ body     │      a message; size 0 is the end of the stream
    └──────────┴──────┴──────────────────┴──────────┘
                       └ a flatbuffer: its kind, and how long the body is

pyarrow reads from files and has no way to be fed, so messages are told apart here and handed to it whole. Of a
flatbuffer four fields are read; everything else is pyarrow's to check, and the arrays are validated in full
before anything looks at them: the bytes come from outside.

Columns are text or bytes, not dictionaries, runs or views: those can stand for far more than they weigh.
"""

from __future__ import annotations

import struct
from collections import deque
from itertools import pairwise
from struct import Struct
from typing import Final

import numpy as np
import pyarrow as pa

from tidelog.engine import EngineConfig, encode
from tidelog.errors import BadInput
from tidelog.server.api.problem import Problem
from tidelog.server.api.records import BYTES_MAX, Cut
from tidelog.types import Ints

_HEAD: Final = Struct("<Ii")
_CONTINUES: Final = 0xFFFFFFFF
_METADATA_BYTES_MAX: Final = 16 << 20
_SCHEMA, _BATCH = 1, 3
_U16, _U32, _I32, _I64 = Struct("<H"), Struct("<I"), Struct("<i"), Struct("<q")
_TEXTS: Final = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
_TAKEN: Final = ("data", "tag", "node", "meta", "json")
_PASSED: Final = ("seq", "ts")  # what a read gives and a write assigns anew


class Messages:
    def __init__(self, limits: EngineConfig, message_bytes_max: int) -> None:
        self._limits, self._message_bytes_max = limits, message_bytes_max
        self._held = bytearray()
        self._need = _HEAD.size  # bytes until something more is known
        self._kind = 0  # of the message at the front, once its metadata is here
        self._over = False
        self._schema: pa.Schema | None = None
        self._cuts: deque[pa.RecordBatch] = deque()
        self._number = 0

    @property
    def where(self) -> dict[str, int]:
        return {"batch": max(self._number, 1)}

    @property
    def size(self) -> int:
        return len(self._held) + sum(int(batch.nbytes) for batch in self._cuts)

    @property
    def due(self) -> bool:
        return bool(self._cuts) or (self._kind > 0 and len(self._held) >= self._need)

    def add(self, piece: bytes) -> None:
        self._held += piece
        self._look()

    def end(self) -> None:
        if self._held or self._schema is None:
            raise BadInput("the Arrow stream is cut off; nothing was written of what is missing, send it whole")

    def _look(self) -> None:
        """Find out how long the message at the front is."""
        while not self._kind and len(self._held) >= self._need:
            if self._over:
                raise BadInput("there are bytes behind the end of the Arrow stream; nothing was written")
            mark, size = _HEAD.unpack_from(self._held)
            if mark != _CONTINUES or not 0 <= size <= _METADATA_BYTES_MAX:
                raise BadInput("the body is not an Arrow IPC stream; nothing was written")
            if not size:
                self._over, self._need = True, 1
                del self._held[: _HEAD.size]
            elif len(self._held) < _HEAD.size + size:
                self._need = _HEAD.size + size
            else:
                self._kind, body = _about(bytes(self._held[_HEAD.size : _HEAD.size + size]))
                self._need = _HEAD.size + size + body
                if self._need > self._message_bytes_max:
                    raise Problem(
                        "payload_too_large",
                        f"a batch of {self._need} bytes is over the limit of {self._message_bytes_max}; nothing was "
                        "written, send smaller batches",
                    )

    def take(self) -> Cut | None:
        if not self._cuts:
            message = bytes(memoryview(self._held)[: self._need])
            del self._held[: self._need]
            kind, self._kind, self._need = self._kind, 0, _HEAD.size
            self._look()
            try:
                self._read(kind, message)
            except (pa.ArrowException, ValueError, OSError, IndexError, struct.error) as error:
                raise BadInput(f"the Arrow stream does not read: {error}; nothing was written") from None
        if not self._cuts:
            return None
        return Cut(encode.from_table(self._limits, self._cuts.popleft()), self.where)

    def _read(self, kind: int, message: bytes) -> None:
        if (kind == _SCHEMA) != (self._schema is None) or kind not in (_SCHEMA, _BATCH):
            raise BadInput(
                "an Arrow stream is a schema and then batches; nothing was written, send columns without dictionaries"
            )
        if self._schema is None:
            self._schema = _checked(pa.ipc.read_schema(pa.py_buffer(message)))
            return
        self._number += 1
        if (size := _unpacked(message)) > self._message_bytes_max:
            raise Problem(
                "payload_too_large",
                f"a batch of {size} bytes is over the limit of {self._message_bytes_max}; nothing was written, send "
                "smaller batches",
            )
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), self._schema)
        batch.validate(full=True)
        batch = batch.select([name for name in batch.schema.names if name in _TAKEN])
        if batch.num_rows:
            self._cuts += _cuts(batch, self._limits.batch_records_max)


def _checked(schema: pa.Schema) -> pa.Schema:
    """Refuse columns that cannot be appended before any of their rows are looked at."""
    names = schema.names
    if "data" not in names or len(set(names)) < len(names):
        raise BadInput("an Arrow stream to append has one column `data`, and none twice; nothing was written")
    for field in schema:
        if field.name not in (*_TAKEN, *_PASSED):
            raise BadInput(f"no column {field.name[:80]!r} can be appended; nothing was written")
        known = (pa.bool_(),) if field.name == "json" else (*_TEXTS, pa.null())
        if field.name in _TAKEN and field.type not in known:
            raise BadInput(f"the column {field.name!r} is {field.type}, not {known[0]}; nothing was written")
    return schema


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


# ── the four fields ───────────────────────────────────────────────────────────────────────────────


def _field(buf: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer's table lies; None where it has its default."""
    vtable = table - _I32.unpack_from(buf, table)[0]
    at = 4 + 2 * number
    if vtable < 0 or at >= _U16.unpack_from(buf, vtable)[0]:
        return None
    inside: int = _U16.unpack_from(buf, vtable + at)[0]
    return table + inside if inside else None


def _about(metadata: bytes) -> tuple[int, int]:
    """The kind of a message and the bytes of its body."""
    try:
        root = _U32.unpack_from(metadata)[0]
        kind, length = _field(metadata, root, 1), _field(metadata, root, 3)
        body = 0 if length is None else _I64.unpack_from(metadata, length)[0]
        if kind is None or body < 0:
            raise IndexError
        return metadata[kind], body
    except (struct.error, IndexError):
        raise BadInput("the body is not an Arrow IPC stream; nothing was written") from None


def _unpacked(message: bytes) -> int:
    """Bytes of a batch's buffers once they are decompressed. A few bytes of them can stand for gigabytes."""
    size = _I32.unpack_from(message, 4)[0]
    start, body = _HEAD.size, _HEAD.size + size
    root = start + _U32.unpack_from(message, start)[0]
    header = _field(message, root, 2)
    if header is None:
        return 0
    batch = header + _U32.unpack_from(message, header)[0]
    buffers, compression = _field(message, batch, 2), _field(message, batch, 3)
    if buffers is None or compression is None:
        return len(message)
    vector = buffers + _U32.unpack_from(message, buffers)[0]
    total = 0
    for number in range(_U32.unpack_from(message, vector)[0]):
        at, length = (_I64.unpack_from(message, vector + 4 + 16 * number + part)[0] for part in (0, 8))
        if length >= _I64.size:
            total += max(_I64.unpack_from(message, body + at)[0], length)
    return total
