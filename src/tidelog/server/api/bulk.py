"""[shell] Many records at once, in and out, as Arrow or as lines of JSON.

    GET  …/records      application/x-ndjson                   one record a line, and a last line:
                                                               {"$end":{"next_from_seq","head_seq","earliest_seq",
                                                               "gap","gaps","counts"}}
                        application/vnd.apache.arrow.stream    what is known at the start in the schema's metadata,
                                                               the rest in the custom metadata of a last batch
                                                               without rows
    POST …              the same two, cut into atomic batches: see `intake`

A stream that ends without its last line, or without its last batch, was cut off: what came is good, and the seq of
the last record is where to go on. Memory holds two chunks of records a reader, however long the stream is: one is
made while the other is on its way. Chunks start small and grow while the reader takes them, and nothing is made for one
that reads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import unquote_plus

import msgspec
import pyarrow as pa

from tidelog.engine import SEQ_MAX, Pass, Show
from tidelog.engine.read import SCHEMA, Nodes
from tidelog.server.api import intake
from tidelog.server.api.call import Call
from tidelog.server.api.diff import is_strong, seq
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.delivery import Slot
from tidelog.server.http.seam import Response, Sink, Stream
from tidelog.server.service import Service

ARROW: Final = b"application/vnd.apache.arrow.stream"
NDJSON: Final = b"application/x-ndjson"
CONTENT_TYPES: Final = frozenset({ARROW, NDJSON})
_NAMED: Final = {"arrow": ARROW, "ndjson": NDJSON}
_PIECE_BYTES: Final = 256 << 10  # handed to the peer at once; others get their turn between two of them
_CHUNK_BYTES_FIRST: Final = 256 << 10  # of frames, read at once: doubled whenever the peer takes them
_CHUNK_BYTES_MAX: Final = 2 << 20
_TAKEN_BYTES: Final = 64 << 10  # that wait, at most, where the peer takes what it is sent and the next chunk is made
_encode = msgspec.json.Encoder().encode


# ── out ───────────────────────────────────────────────────────────────────────────────────────────


async def read(call: Call) -> Stream:
    """All records behind a seq, or a range of them."""
    kind = _kind(call)
    service, query = call.service, call.query
    topic = found(service.engine, call.topic)
    topic.touch()
    from_seq = seq(query.number("from_seq", 0))
    to_seq = None if query.text("to_seq") is None else seq(query.number("to_seq", SEQ_MAX))
    limit = query.number("limit", 0) or SEQ_MAX
    nodes, show = _nodes(call.request.query), _show(call)
    look = partial(topic.scan, from_seq, to_seq, nodes=nodes, limit=limit, strong=is_strong(call))
    scan = await service.work(look)
    if kind == ARROW:
        about = {"topic": topic.name, "epoch": topic.epoch, "from_seq": from_seq, "gap": _gap(scan)}
        made = _arrow(scan, show, about)
    else:
        made = _lines(scan, show)

    slot = Slot(service, call.principal)

    async def run(sink: Sink) -> None:
        try:
            slot.begin()
            await _send(service, sink, scan, made)
        finally:
            slot.give()
            service.metrics.read(topic.name, scan.counts.rows, gap=scan.gap is not None)

    return Stream(200, run, kind, ((b"cache-control", b"no-store"),))


class Chunked(Protocol):
    """A pass whose chunk size can be set."""

    def limit_chunk(self, size: int) -> None: ...


async def _send(service: Service, sink: Sink, scan: Chunked, made: Iterator[list[bytes]]) -> None:
    """Write chunks that are made in a thread, the next one while the last one is on its way. What is ready and not
    written counts as held for the peer."""

    def make(size: int) -> asyncio.Future[list[bytes] | None]:
        scan.limit_chunk(size)
        return asyncio.ensure_future(service.work(lambda: next(made, None)))

    size = _CHUNK_BYTES_FIRST
    await sink.ready()
    making = make(size)
    try:
        while (pieces := await making) is not None:
            held, is_ahead = sum(map(len, pieces)), False
            pieces.reverse()
            while pieces:
                held -= len(pieces[-1])
                sink.write(pieces.pop())
                sink.hold(held + size if is_ahead else held)
                await sink.drained()
                if not is_ahead and sink.waiting <= _TAKEN_BYTES and not sink.is_pressed:
                    is_ahead, size = True, min(2 * size, _CHUNK_BYTES_MAX)
                    making = make(size)
            if not is_ahead:
                await sink.ready()
                making = make(size)
    finally:
        sink.hold(0)
        if not making.cancel() and not making.cancelled():
            making.exception()  # retrieved: its reader has left


def _kind(call: Call) -> bytes:
    """What the reader takes: as the query says, or else as its Accept header does; lines where it says nothing."""
    named = call.query.text("format")
    if named is not None:
        if named not in _NAMED:
            raise Problem("invalid_request", f"format is arrow or ndjson, not {named[:80]!r}; nothing was read")
        return _NAMED[named]
    header = (call.request.header(b"accept") or b"").strip()
    if not header:
        return NDJSON
    best, chosen = 0.0, b""
    for item in header.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        kind = NDJSON if name in (b"*/*", b"application/*") else name
        weight = _weight(parameters)
        if kind in CONTENT_TYPES and weight > best:
            best, chosen = weight, kind
    if not chosen:
        known = " or ".join(sorted(kind.decode() for kind in CONTENT_TYPES))
        raise Problem("not_acceptable", f"records go out as {known}; nothing was read, accept one of them")
    return chosen


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        if parameter.startswith(b"q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def _nodes(query: str) -> Nodes:
    """Whose records are left out. Split before it is decoded, so that a name may have a comma in it."""
    given = (pair.partition("=") for pair in query.split("&"))
    values = [value for name, _, value in given if unquote_plus(name) == "node"]
    names = (unquote_plus(name) for value in values for name in value.split(","))
    return frozenset(name.encode("utf-8", "surrogatepass") for name in names if name)


def _show(call: Call) -> Show:
    """Everything, unless it is asked not to be: this is how a topic is copied."""
    flag = call.query.flag
    return Show(data=flag("include_data", True), tags=flag("include_tags", True), meta=flag("include_meta", True))


def _gap(scan: Pass) -> dict[str, Any] | None:
    return None if scan.gap is None else scan.gap._asdict()


def _end(scan: Pass) -> dict[str, Any]:
    """What is known once the last record was sent."""
    return {
        "next_from_seq": scan.next_from_seq,
        "head_seq": scan.head_seq,
        "earliest_seq": scan.earliest_seq,
        "gap": _gap(scan),
        "gaps": [gap._asdict() for gap in scan.gaps],
        "counts": scan.counts._asdict(),
    }


def _lines(scan: Pass, show: Show) -> Iterator[list[bytes]]:
    yield from map(_cut_text, scan.lines(show))  # a loop would hold each of them until the next
    yield [_encode({"$end": _end(scan)}) + b"\n"]


def _cut_text(text: bytes) -> list[bytes]:
    return [text] if len(text) <= _PIECE_BYTES else _cut([text])


def _arrow(scan: Pass, show: Show, about: dict[str, Any]) -> Iterator[list[bytes]]:
    hidden = {"tag": show.tags, "meta": show.meta, "data": show.data, "json": show.data}
    columns = [name for name in SCHEMA.names if hidden.get(name, True)]
    start = {**about, "head_seq": scan.head_seq, "earliest_seq": scan.earliest_seq}
    schema = pa.schema([SCHEMA.field(name) for name in columns], metadata=_metadata(start))
    spout = _Spout()
    with pa.ipc.new_stream(spout, schema) as writer:

        def written(batch: pa.RecordBatch) -> list[bytes]:
            writer.write_batch(batch.select(columns).replace_schema_metadata(schema.metadata))
            return spout.taken()

        yield from map(written, scan.batches())
        nothing = pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)
        writer.write_batch(nothing, custom_metadata=_metadata(_end(scan)))
    yield spout.taken()


def _cut(parts: Iterable[bytes | pa.Buffer]) -> list[bytes]:
    """The parts back to back, in pieces that are handed to the peer one at a time; copied once."""
    pieces: list[list[memoryview]] = [[]]
    room = _PIECE_BYTES
    for part in parts:
        view = memoryview(part)
        while len(view):
            if not room:
                pieces.append([])
                room = _PIECE_BYTES
            pieces[-1].append(view[:room])
            view, room = view[room:], max(room - len(view), 0)
    return [b"".join(piece) for piece in pieces]


class _Spout:
    """A file that only remembers, for a writer that wants one. What it is given are the columns themselves."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes | pa.Buffer] = []

    def write(self, part: bytes | pa.Buffer) -> int:
        self._parts.append(part)
        return len(part)

    def flush(self) -> None:
        """Nothing is held back."""

    def taken(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return _cut(parts)


def _metadata(values: dict[str, Any]) -> dict[bytes, bytes]:
    """As Arrow keeps it: text and numbers plain, the rest as JSON."""
    return {
        name.encode(): value.encode() if isinstance(value, str) else _encode(value) for name, value in values.items()
    }


# ── in ────────────────────────────────────────────────────────────────────────────────────────────


async def write(call: Call) -> Response:
    """Records as they come; answered when the last of them is acknowledged."""
    kind = (call.request.header(b"content-type") or b"").partition(b";")[0].strip()
    return await intake.write(call, arrow=kind == ARROW)
