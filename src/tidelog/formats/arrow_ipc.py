"""Messages of a client's Arrow IPC stream, checked before pyarrow decodes them.

    ┌──────────┬──────┬──────────────────┬──────────┐
    │ FFFFFFFF │ size │ metadata (size)  │ body     │      a message; size 0 is the end of the stream
    └──────────┴──────┴──────────────────┴──────────┘
                       └ a flatbuffer: kind, length of the body, and the fields of the kind

A few bytes can claim anything: a column of type `null` has no buffers and any number of rows, a compressed buffer
declares its decoded length, a schema can name a million columns. So these are read from the metadata first:

  1. A schema has at most `COLUMNS_MAX` columns, of flat types: no dictionaries, runs, lists, structs or views.
  2. A batch has at most `ROWS_MAX` rows; every column has as many, and no more nulls than rows.
  3. Every buffer is inside the body. The decoded bytes of all of them are within the caller's limit.

pyarrow checks the rest, and a batch is validated in full before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple

import pyarrow as pa

from tidelog.decompression import DecodedTooLarge, ExpansionCounter
from tidelog.errors import BadInput

HEAD: Final = Struct("<Ii")
SCHEMA, BATCH = 1, 3
COLUMNS_MAX: Final = 16
ROWS_MAX: Final = 1 << 20
"""Of one message. An offset has four bytes, so a message within the limit of bytes could have sixteen times as many
rows, and would be tiny when it is compressed."""

METADATA_BYTES_MAX: Final = 1 << 20
_CONTINUES: Final = 0xFFFFFFFF
_BUFFERS_MAX: Final = 3 * COLUMNS_MAX
_U16, _U32, _I32, _I64 = Struct("<H"), Struct("<I"), Struct("<i"), Struct("<q")
_UNCOMPRESSED: Final = -1  # the declared length of a buffer that is stored as it is, in a batch that is compressed
Bytes = bytes | bytearray | memoryview


def _not_arrow_error(reason: str) -> BadInput:
    return BadInput(f"the body is not an Arrow IPC stream: {reason}; nothing was written")


def metadata_bytes(head: Bytes) -> int:
    """Return the size of the metadata of the message with this head; 0 is the end of the stream."""
    mark, size = HEAD.unpack_from(head)
    if mark != _CONTINUES or not 0 <= size <= METADATA_BYTES_MAX:
        raise _not_arrow_error("a message does not begin where one should")
    return int(size)


def read_kind_and_size(metadata: Bytes) -> tuple[int, int]:
    """Return the kind of a message and the size of its body."""
    try:
        root = _U32.unpack_from(metadata)[0]
        kind, length = _field(metadata, root, 1), _field(metadata, root, 3)
        body = 0 if length is None else _I64.unpack_from(metadata, length)[0]
        if kind is None or body < 0:
            raise IndexError
        return metadata[kind], body
    except (struct.error, IndexError):
        raise _not_arrow_error("the metadata of a message does not read") from None


def read_schema(message: Bytes, kinds: Mapping[str, tuple[pa.DataType, ...]]) -> pa.Schema:
    """Return the schema of a message. Raises where a column is none of `kinds`, has another type, or occurs twice."""
    try:
        table = _header(message)
        count = 0 if (fields := _field(message, table, 1)) is None else _vector_length(message, fields)
    except (struct.error, IndexError):
        raise _not_arrow_error("the schema does not read") from None
    if count > COLUMNS_MAX:
        raise BadInput(f"an Arrow stream of {count} columns has more than a record has fields; nothing was written")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        names = schema.names  # raises where a name is not UTF-8
    except (pa.ArrowException, ValueError, OSError) as error:
        raise _not_arrow_error(str(error)) from None
    if "data" not in names or len(set(names)) < len(names):
        raise BadInput("an Arrow stream to append has one column `data`, and none twice; nothing was written")
    for field in schema:
        known = kinds.get(field.name)
        if known is None:
            raise BadInput(f"no column {field.name[:80]!r} can be appended; nothing was written")
        if field.type not in known:
            raise BadInput(f"the column {field.name!r} is {field.type!s:.80}, not {known[0]}; nothing was written")
    return schema


class BatchSize(NamedTuple):
    """The size that the metadata of a batch declares."""

    rows: int
    bytes: int  # of its buffers once they are decoded


def measure(message: Bytes, columns: int) -> BatchSize:
    """Return the decoded size of a batch of so many flat columns. Raises where its metadata contradicts itself."""
    try:
        return _measure(message, columns)
    except (struct.error, IndexError):
        raise _not_arrow_error("the metadata of a batch does not read") from None


def _measure(message: Bytes, columns: int) -> BatchSize:
    body = HEAD.size + _I32.unpack_from(message, 4)[0]
    body_bytes = len(message) - body
    table = _header(message)
    rows_pos = _field(message, table, 0)
    rows = 0 if rows_pos is None else _I64.unpack_from(message, rows_pos)[0]
    if rows < 0:
        raise _not_arrow_error(f"a batch declares {rows} rows")
    if rows > ROWS_MAX:
        raise DecodedTooLarge("an Arrow batch", rows, ROWS_MAX, "rows")
    nodes, buffers = (_read_pairs(message, table, number) for number in (1, 2))
    if len(nodes) != columns or any(length != rows or not 0 <= nulls <= rows for length, nulls in nodes):
        raise _not_arrow_error("the columns of a batch have not as many rows as the batch")
    if _field(message, table, 4) is not None and _vector_length(message, _required_field(message, table, 4)):
        raise _not_arrow_error("a batch has columns of views")
    is_packed = _field(message, table, 3) is not None
    total = rows * columns
    for offset, length in buffers:
        if offset < 0 or length < 0 or offset + length > body_bytes:
            raise _not_arrow_error("a buffer is outside its message")
        size = length
        if is_packed and length:
            if length < _I64.size:
                raise _not_arrow_error("a compressed buffer is too short to be one")
            declared = _I64.unpack_from(message, body + offset)[0]
            if declared < _UNCOMPRESSED:
                raise _not_arrow_error(f"a compressed buffer declares {declared} bytes")
            size = length if declared == _UNCOMPRESSED else declared
        total += size
    return BatchSize(rows, total)


def read_batch(message: Bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Decode a batch that was measured, and validate it in full."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, OSError, IndexError) as error:
        raise BadInput(f"the Arrow stream does not read: {error}; nothing was written") from None
    return batch


def read_batches(
    content: memoryview, kinds: Mapping[str, tuple[pa.DataType, ...]], batch_bytes_max: int, expansion: ExpansionCounter
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a whole stream; each is measured before it is decoded."""
    schema, pos = None, 0
    while pos < len(content):
        if len(content) - pos < HEAD.size:
            raise _not_arrow_error("it breaks off")
        size = metadata_bytes(content[pos : pos + HEAD.size])
        if not size:
            break
        kind, body = read_kind_and_size(content[pos + HEAD.size : pos + HEAD.size + size])
        end = pos + HEAD.size + size + body
        if end > len(content):
            raise _not_arrow_error("it breaks off")
        message, pos = content[pos:end], end
        check_order(kind, schema)
        if schema is None:
            schema = read_schema(message, kinds)
            continue
        claimed = measure(message, len(schema))
        if claimed.bytes > batch_bytes_max:
            raise DecodedTooLarge("an Arrow batch", claimed.bytes, batch_bytes_max)
        expansion.add(len(message), claimed.bytes)
        yield read_batch(message, schema)
    if schema is None:
        raise _not_arrow_error("it has no schema")


def check_order(kind: int, schema: pa.Schema | None) -> None:
    if (kind == SCHEMA) != (schema is None) or kind not in (SCHEMA, BATCH):
        raise BadInput(
            "an Arrow stream is a schema and then batches; nothing was written, send columns without dictionaries"
        )


# ── flatbuffers ───────────────────────────────────────────────────────────────────────────────────


def _field(buf: Bytes, table: int, number: int) -> int | None:
    """The position of a field of a flatbuffer's table; None where it has its default."""
    vtable = table - _I32.unpack_from(buf, table)[0]
    slot = 4 + 2 * number
    if vtable < 0 or slot >= _U16.unpack_from(buf, vtable)[0]:
        return None
    offset: int = _U16.unpack_from(buf, vtable + slot)[0]
    return table + offset if offset else None


def _required_field(buf: Bytes, table: int, number: int) -> int:
    field = _field(buf, table, number)
    if field is None:
        raise IndexError(number)
    return field


def _header(message: Bytes) -> int:
    """The position of the table that describes a message of this kind."""
    root = HEAD.size + _U32.unpack_from(message, HEAD.size)[0]
    header = _required_field(message, root, 2)
    return int(header + _U32.unpack_from(message, header)[0])


def _vector_length(buf: Bytes, field: int) -> int:
    """The elements of the vector that a field refers to."""
    return int(_U32.unpack_from(buf, field + _U32.unpack_from(buf, field)[0])[0])


def _read_pairs(buf: Bytes, table: int, number: int) -> list[tuple[int, int]]:
    """A vector of structs of two 64-bit numbers."""
    field = _field(buf, table, number)
    if field is None:
        return []
    count = _vector_length(buf, field)
    if count > _BUFFERS_MAX:
        raise _not_arrow_error("a batch has more buffers than its columns")
    first = field + _U32.unpack_from(buf, field)[0] + 4
    return [
        (_I64.unpack_from(buf, first + 16 * each)[0], _I64.unpack_from(buf, first + 16 * each + 8)[0])
        for each in range(count)
    ]
