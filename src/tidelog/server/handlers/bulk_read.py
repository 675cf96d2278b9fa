"""Bulk reads: all records after a seq, as one stream of JSON lines or Arrow batches.

    GET  …/records      application/x-ndjson                   one record per line, and a last line:
                                                               {"$end":{"next_from_seq","head_seq","earliest_seq",
                                                               "gap","gaps","counts"}}
                        application/vnd.apache.arrow.stream    the same fields: those known at the start in the schema's
                                                               metadata, the others in the custom metadata of a last
                                                               batch without rows

A stream without its last line, or without its last batch, is incomplete: the records are good, and the reader continues
after the last seq. A reader needs memory for two chunks of records, however long the stream is: one is encoded while
the other is sent. Chunks start small and grow while the reader takes them; nothing is encoded for a reader that stalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import unquote_plus

import msgspec
import pyarrow as pa

from tidelog.engine import SEQ_MAX, BulkScan, FieldSelection
from tidelog.engine.read import SCHEMA, ExcludedNodes
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import Sink, Stream
from tidelog.server.errors import ApiError
from tidelog.server.handlers.records import clamp_seq, wants_strong_read
from tidelog.server.openapi import (
    CONSISTENCY_PARAM,
    COUNT,
    STRING,
    Parameter,
    binary_schema,
    flag_param,
    integer_param,
    operation,
    text_schema,
)
from tidelog.server.push.topic_stream import StreamSlot
from tidelog.server.request import ARROW, BULK_CONTENT_TYPES, NDJSON, RequestContext
from tidelog.server.service import Service

_FORMATS: Final = {"arrow": ARROW, "ndjson": NDJSON}
_WRITE_STEP_BYTES: Final = 256 << 10  # handed to the peer at once; others get their turn between two of them
_CHUNK_BYTES_FIRST: Final = 256 << 10  # of frames, read at once: doubled whenever the peer takes them
_CHUNK_BYTES_MAX: Final = 2 << 20
_READ_AHEAD_BELOW_BYTES: Final = (
    64 << 10
)  # that wait, at most, where the peer takes what it is sent and the next chunk is made
_encode = msgspec.json.Encoder().encode


# ── out ───────────────────────────────────────────────────────────────────────────────────────────


@operation(
    "readRecords",
    params=(
        integer_param("from_seq", "The last seq that the reader has; 0 before the first.", 0),
        Parameter("to_seq", COUNT, "The last seq to send. Default: the head when the stream starts."),
        integer_param("limit", "The most records to send; 0: all.", 0),
        Parameter(
            "node",
            {"type": "array", "items": STRING},
            "Nodes whose records are not sent; repeated or separated by commas.",
        ),
        flag_param("include_tags", True),
        flag_param("include_meta", True),
        flag_param("include_data", True),
        Parameter("format", {"enum": ["ndjson", "arrow"]}, "Instead of an Accept header."),
        CONSISTENCY_PARAM,
    ),
    errors=("invalid_request", "topic_not_found", "not_acceptable"),
    response_content={
        NDJSON.decode(): text_schema("One Record per line, and an End as the last line."),
        ARROW.decode(): binary_schema(
            "Columns seq, ts, node, tag, meta, data, json. The schema's metadata has topic, epoch, "
            "from_seq, head_seq, earliest_seq and gap; the custom metadata of a last batch without "
            "rows has the fields of End."
        ),
    },
)
async def read_records(context: RequestContext) -> Stream:
    """Read all records after a seq, as a stream."""
    kind = _negotiate_format(context)
    service, query = context.service, context.query
    topic = context.get_topic()
    topic_operations(topic).record_access()
    from_seq = clamp_seq(query.number("from_seq", 0))
    to_seq = None if query.text("to_seq") is None else clamp_seq(query.number("to_seq", SEQ_MAX))
    limit = query.number("limit", 0) or SEQ_MAX
    nodes, show = _excluded_nodes(context.request.query), _shown_fields(context)
    start_scan = partial(topic.scan, from_seq, to_seq, nodes=nodes, limit=limit, strong=wants_strong_read(context))
    scan = await service.run_blocking(start_scan)
    if kind == ARROW:
        metadata = {"topic": topic.name, "epoch": topic.epoch, "from_seq": from_seq, "gap": _gap_json(scan)}
        chunks = _arrow_chunks(scan, show, metadata)
    else:
        chunks = _ndjson_chunks(scan, show)

    slot = StreamSlot(service, context.principal)

    async def run(sink: Sink) -> None:
        try:
            with slot.open():
                await _send_chunks(service, sink, scan, chunks)
        finally:
            service.metrics.count_read(topic.name, scan.counts.rows, gap=scan.gap is not None)

    return Stream(200, run, kind, ((b"cache-control", b"no-store"),))


class ResizableScan(Protocol):
    """A scan whose chunk size can be set."""

    def set_chunk_bytes(self, size: int) -> None: ...


async def _send_chunks(service: Service, sink: Sink, scan: ResizableScan, chunks: Iterator[list[bytes]]) -> None:
    """Write chunks that a thread encodes, the next one while the last one is sent. Encoded bytes that are not written
    yet count as memory of this client."""

    def encode_next(size: int) -> asyncio.Future[list[bytes] | None]:
        scan.set_chunk_bytes(size)
        return asyncio.ensure_future(service.run_blocking(lambda: next(chunks, None)))

    size = _CHUNK_BYTES_FIRST
    await sink.wait_ready()
    encoding = encode_next(size)
    try:
        while (pieces := await encoding) is not None:
            unwritten_bytes, is_ahead = sum(map(len, pieces)), False
            pieces.reverse()
            while pieces:
                unwritten_bytes -= len(pieces[-1])
                sink.write(pieces.pop())
                sink.reserve(unwritten_bytes + size if is_ahead else unwritten_bytes)
                await sink.drain()
                if not is_ahead and sink.pending_bytes <= _READ_AHEAD_BELOW_BYTES and not sink.is_under_pressure:
                    is_ahead, size = True, min(2 * size, _CHUNK_BYTES_MAX)
                    encoding = encode_next(size)
            if not is_ahead:
                await sink.wait_ready()
                encoding = encode_next(size)
    finally:
        sink.reserve(0)
        if not encoding.cancel() and not encoding.cancelled():
            encoding.exception()  # retrieved: the client has disconnected


def _negotiate_format(context: RequestContext) -> bytes:
    """The media type: that of the query, else the best of the Accept header, else NDJSON."""
    format = context.query.text("format")
    if format is not None:
        if format not in _FORMATS:
            raise ApiError("invalid_request", f"format is arrow or ndjson, not {format[:80]!r}; nothing was read")
        return _FORMATS[format]
    header = (context.request.header(b"accept") or b"").strip()
    if not header:
        return NDJSON
    best, chosen = 0.0, b""
    for item in header.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        kind = NDJSON if name in (b"*/*", b"application/*") else name
        weight = _quality(parameters)
        if kind in BULK_CONTENT_TYPES and weight > best:
            best, chosen = weight, kind
    if not chosen:
        known = " or ".join(sorted(kind.decode() for kind in BULK_CONTENT_TYPES))
        raise ApiError("not_acceptable", f"records are sent as {known}; nothing was read, accept one of them")
    return chosen


def _quality(parameters: list[bytes]) -> float:
    for parameter in parameters:
        if parameter.startswith(b"q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def _excluded_nodes(query: str) -> ExcludedNodes:
    """Nodes whose records are not sent. Split before decoding, so that a name may contain a comma."""
    pairs = (pair.partition("=") for pair in query.split("&"))
    values = [value for name, _, value in pairs if unquote_plus(name) == "node"]
    names = (unquote_plus(name) for value in values for name in value.split(","))
    return frozenset(name.encode("utf-8", "surrogatepass") for name in names if name)


def _shown_fields(context: RequestContext) -> FieldSelection:
    """All fields by default: this is how a topic is copied."""
    flag = context.query.flag
    return FieldSelection(
        data=flag("include_data", True), tags=flag("include_tags", True), meta=flag("include_meta", True)
    )


def _gap_json(scan: BulkScan) -> dict[str, Any] | None:
    return None if scan.gap is None else scan.gap._asdict()


def _end_json(scan: BulkScan) -> dict[str, Any]:
    """The fields of `$end`."""
    return {
        "next_from_seq": scan.next_from_seq,
        "head_seq": scan.head_seq,
        "earliest_seq": scan.earliest_seq,
        "gap": _gap_json(scan),
        "gaps": [gap._asdict() for gap in scan.gaps],
        "counts": scan.counts._asdict(),
    }


def _ndjson_chunks(scan: BulkScan, show: FieldSelection) -> Iterator[list[bytes]]:
    yield from map(_split_text, scan.iter_json_lines(show))  # a loop variable would keep each chunk until the next
    yield [_encode({"$end": _end_json(scan)}) + b"\n"]


def _split_text(text: bytes) -> list[bytes]:
    return [text] if len(text) <= _WRITE_STEP_BYTES else _split_parts([text])


def _arrow_chunks(scan: BulkScan, show: FieldSelection, metadata: dict[str, Any]) -> Iterator[list[bytes]]:
    hidden = {"tag": show.tags, "meta": show.meta, "data": show.data, "json": show.data}
    columns = [name for name in SCHEMA.names if hidden.get(name, True)]
    start = {**metadata, "head_seq": scan.head_seq, "earliest_seq": scan.earliest_seq}
    schema = pa.schema([SCHEMA.field(name) for name in columns], metadata=_arrow_metadata(start))
    sink = _ArrowSink()
    with pa.ipc.new_stream(sink, schema) as writer:

        def encode(batch: pa.RecordBatch) -> list[bytes]:
            writer.write_batch(batch.select(columns).replace_schema_metadata(schema.metadata))
            return sink.take_chunks()

        yield from map(encode, scan.iter_arrow_batches())
        empty = pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)
        writer.write_batch(empty, custom_metadata=_arrow_metadata(_end_json(scan)))
    yield sink.take_chunks()


def _split_parts(parts: Iterable[bytes | pa.Buffer]) -> list[bytes]:
    """Join the parts and split them into pieces of one write; copied once."""
    pieces: list[list[memoryview]] = [[]]
    space = _WRITE_STEP_BYTES
    for part in parts:
        view = memoryview(part)
        while len(view):
            if not space:
                pieces.append([])
                space = _WRITE_STEP_BYTES
            pieces[-1].append(view[:space])
            view, space = view[space:], max(space - len(view), 0)
    return [b"".join(piece) for piece in pieces]


class _ArrowSink:
    """A file that only remembers, for a writer that wants one. What it is given are the columns themselves."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes | pa.Buffer] = []

    def write(self, part: bytes | pa.Buffer) -> int:
        self._parts.append(part)
        return len(part)

    def flush(self) -> None:
        """Nothing is held back."""

    def take_chunks(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return _split_parts(parts)


def _arrow_metadata(values: dict[str, Any]) -> dict[bytes, bytes]:
    """As Arrow keeps it: text and numbers plain, the rest as JSON."""
    return {
        name.encode(): value.encode() if isinstance(value, str) else _encode(value) for name, value in values.items()
    }
