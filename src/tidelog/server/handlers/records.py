"""Records over HTTP: read after a cursor with an optional long poll, find a time, delete below a seq or by tag,
and read all records after a seq as one stream of JSON lines or Arrow batches.

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
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote_plus

import msgspec
import pyarrow as pa

from tidelog import api_types
from tidelog.api_types import READ_BYTES, READ_BYTES_MAX, READ_LIMIT, READ_LIMIT_MAX, WAIT_MS_MAX
from tidelog.engine import SEQ_MAX, BulkScan, FieldSelection, JsonPage, Topic
from tidelog.engine.delete import parse_tag_match
from tidelog.engine.read import SCHEMA, ExcludedNodes, parse_nodes
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import AnyResponse, Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
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

diff_decoder = api_types.body_decoder(api_types.Diff)
_encode = msgspec.json.Encoder().encode


def page_budget(limit: int, bytes_max: int) -> tuple[int, int]:
    """The most records and bytes of a page; 0 is the default."""
    return min(limit or READ_LIMIT, READ_LIMIT_MAX), min(bytes_max or READ_BYTES, READ_BYTES_MAX)


def clamp_seq(given: int) -> int:
    """Reduce a cursor to the largest seq of the engine."""
    return min(given, SEQ_MAX)


def wants_strong_read(context: RequestContext) -> bool:
    """Whether the query asks only for records that survive a power cut."""
    named = context.query.text("consistency") or "eventual"
    if named not in ("eventual", "strong"):
        raise ApiError("invalid_request", f"consistency is eventual or strong, not {named[:80]!r}; nothing was read")
    return named == "strong"


@operation("diff", request=api_types.Diff, response=responses.Page, errors=("topic_not_found",), body_required=False)
def diff(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """Read records after a seq."""
    body = context.decode_body(diff_decoder, default=api_types.Diff())
    return read_after(context, context.get_topic(), clamp_seq(body.from_seq), body)


class ReadPlan(NamedTuple):
    """The parameters of one page."""

    topic: Topic
    from_seq: int
    limit: int
    bytes_max: int
    nodes: ExcludedNodes
    show: FieldSelection
    strong: bool
    with_counts: bool

    @property
    def is_cached(self) -> bool:
        """Whether the read does not block."""
        return topic_operations(self.topic).can_read_without_blocking(
            self.from_seq, 0 if self.nodes else self.limit, self.bytes_max, strong=self.strong
        )

    def read_cached(self) -> JsonPage | None:
        """The page, or None where the read would block."""
        page = topic_operations(self.topic).read_cached_json(
            self.from_seq, self.limit, self.bytes_max, strong=self.strong
        )
        return page if page is not None or not self.is_cached else self.read()

    def read(self) -> JsonPage:
        return topic_operations(self.topic).read_json(
            self.from_seq, self.limit, self.bytes_max, nodes=self.nodes, show=self.show, strong=self.strong
        )


def plan_read(topic: Topic, from_seq: int, body: api_types.Diff | api_types.Fetch) -> ReadPlan:
    limit, bytes_max = page_budget(body.limit, body.max_batch_bytes)
    show = FieldSelection(tags=body.include_tags, meta=body.include_meta)
    strong = body.consistency == "strong"
    if strong:
        topic_operations(topic).check_strong_supported()
    return ReadPlan(topic, from_seq, limit, bytes_max, parse_nodes(body.node), show, strong, body.include_counts)


def read_after(
    context: RequestContext, topic: Topic, from_seq: int, body: api_types.Diff | api_types.Fetch
) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """Respond with the records after a cursor."""
    topic_operations(topic).record_access()
    plan = plan_read(topic, from_seq, body)
    wait_ms = min(body.wait_ms, WAIT_MS_MAX)
    if wait_ms:
        return _long_poll(context, plan, wait_ms)
    page = plan.read_cached()
    return _read_blocking(context, plan) if page is None else _page_response(context, plan, page)


async def _read_blocking(context: RequestContext, plan: ReadPlan) -> Response:
    return _page_response(context, plan, await context.service.run_read(plan.topic, plan.from_seq, plan.read))


async def _long_poll(context: RequestContext, plan: ReadPlan, wait_ms: int) -> Response:
    """Read; while there is no record, wait for a write and read again until the time is over."""
    service, topic = context.service, plan.topic
    woken = asyncio.Event()
    until_ms = service.clock.monotonic_ms() + wait_ms
    service.push.notifiers.add(topic, woken.set)  # before the first read
    try:
        while True:
            woken.clear()
            context.check_key()
            page = (
                plan.read()
                if topic_operations(topic).can_read_without_blocking(plan.from_seq, strong=plan.strong)
                else await service.run_read(topic, plan.from_seq, plan.read)
            )
            left_ms = until_ms - service.clock.monotonic_ms()
            if page.text or page.gap or not page.caught_up or left_ms <= 0 or service.stopping.is_set():
                return _page_response(context, plan, page)
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await woken.wait()
            except TimeoutError:
                until_ms = service.clock.monotonic_ms()  # one last read: a deferred topic sends no notification
    finally:
        service.push.notifiers.remove(topic, woken.set)


def _page_response(context: RequestContext, plan: ReadPlan, page: JsonPage) -> Response:
    context.service.metrics.count_read(context.topic, page.counts.rows, gap=page.gap is not None)
    parts = encode_page_parts(context.topic, page, context.elapsed_ms(), with_counts=plan.with_counts)
    return Response(200, b"".join(parts))


def encode_page_parts(
    name: str, page: JsonPage, elapsed_ms: float, *, with_counts: bool = False
) -> tuple[bytes, bytes, bytes]:
    """Encode the body of a page in three pieces: the records are stored as JSON text."""
    counts = b'"counts":%b,' % _encode(page.counts._asdict()) if with_counts else b""
    head = b'{"topic":%b,"records":[' % _encode(name)
    tail = (
        b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
        b'%b"performance":{"server_total_ms":%b,"records_scanned":%d}}'
    ) % (
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        b"true" if page.caught_up else b"false",
        b"null" if page.gap is None else _encode(page.gap._asdict()),
        page.head_seq - page.next_from_seq,
        counts,
        _encode(elapsed_ms),
        sum(page.counts),
    )
    return head, page.text, tail


_seek_decoder = api_types.body_decoder(api_types.Seek)


@operation("seek", request=api_types.Seek, response=responses.Sought, errors=("topic_not_found",))
async def seek_by_time(context: RequestContext) -> Response:
    """Find the first record of a time or later."""
    body = context.decode_body(_seek_decoder)
    topic = context.get_topic()
    seq, head_seq, earliest_seq = await context.service.run_blocking(lambda: _find_seq(topic, body.ts))
    return context.json(responses.Sought(context.topic, body.ts, seq, seq - 1, head_seq, earliest_seq))


def _find_seq(topic: Topic, ts_ms: int) -> tuple[int, int, int]:
    state = topic.state()
    seq = topic.seek(ts_ms)
    # A record may be appended between the two calls: the returned head is never below the found seq.
    return seq, max(state.head_seq, seq - 1), state.earliest_seq


_delete_decoder = api_types.body_decoder(api_types.Delete)


@operation("deleteRecords", request=api_types.Delete, response=responses.Deleted, errors=("topic_not_found",))
async def delete_records(context: RequestContext) -> Response:
    """Delete records below a seq, by tag, or both."""
    body = context.decode_body(_delete_decoder)
    if body.before_seq is None and body.match is None and body.seqs is None:
        raise ApiError("invalid_request", "a delete needs before_seq, match or both, or seqs; nothing was deleted")
    match, before = body.match, None if body.before_seq is None else clamp_seq(body.before_seq)
    parse_tag_match(match)  # an invalid match is refused also where the topic does not exist
    service, actor = context.service, context.principal.name
    topic = context.get_topic()
    # A search by tag reads the records of a segment whose tag index is lost; a search for what the newest records of
    # keys replaced, those of segments that moved to the cold store before compaction was set.
    from_seq = 0 if match is not None or topic.config.compaction is not None else topic.head_seq
    seqs = None if body.seqs is None else list(map(clamp_seq, body.seqs))
    done = await service.run_read(
        topic, from_seq, lambda: topic.delete(match=match, before_seq=before, seqs=seqs, actor=actor)
    )
    return context.json(
        responses.Deleted(context.topic, done.deleted, done.earliest_seq, done.head_seq, done.count, done.bytes)
    )


@operation("sealTopic", response=responses.Sealed, errors=("topic_not_found",), body_required=False)
async def seal_topic(context: RequestContext) -> Response:
    """Close the active segment of a topic: the next record begins another one."""
    topic = context.get_topic()
    await context.service.run_blocking(topic.seal)
    return context.json(responses.Sealed(topic.name))


_rewrite_decoder = api_types.body_decoder(api_types.Rewrite)
_erase_decoder = api_types.body_decoder(api_types.Erase)


@operation("rewriteTopic", request=api_types.Rewrite, response=responses.Rewritten, errors=("topic_not_found",))
async def rewrite_topic(context: RequestContext) -> Response:
    """Give segments new files without the bytes of deleted records."""
    force = context.decode_body(_rewrite_decoder, default=api_types.Rewrite()).force
    topic = context.get_topic()
    done = await context.service.run_long(lambda: topic.rewrite(force=force))
    files = [responses.RewrittenSegment(**file._asdict()) for file in done.files]
    skipped = [responses.SkippedSegment(*each) for each in done.skipped]
    return context.json(responses.Rewritten(topic.name, files, skipped, done.bytes_reclaimed))


@operation("eraseRecords", request=api_types.Erase, response=responses.Erased, errors=("topic_not_found",))
async def erase_records(context: RequestContext) -> Response:
    """Delete records by tag or seq and remove their bytes from every file. The response is a receipt."""
    body = context.decode_body(_erase_decoder)
    match, seqs = body.match, body.seqs
    parse_tag_match(match, "nothing was erased")
    topic, actor = context.get_topic(), context.principal.name
    receipt = await context.service.run_long(lambda: topic.erase(match=match, seqs=seqs, actor=actor))
    files = [responses.ErasedFile(*msgspec.structs.astuple(file)) for file in receipt.files]
    fields = msgspec.structs.asdict(receipt) | {"files": files, "not_reached": list(receipt.not_reached)}
    return context.json(responses.Erased(**fields))


# ── bulk reads ────────────────────────────────────────────────────────────────────────────────────

_FORMATS: Final = {"arrow": ARROW, "ndjson": NDJSON}
_WRITE_STEP_BYTES: Final = 256 << 10  # handed to the peer at once; others get their turn between two of them
_CHUNK_BYTES_FIRST: Final = 256 << 10  # of frames, read at once: doubled whenever the peer takes them
_CHUNK_BYTES_MAX: Final = 2 << 20
# Unsent bytes, at most, of a peer that keeps up: the next chunk is encoded for it.
_READ_AHEAD_BELOW_BYTES: Final = 64 << 10


@operation(
    "readRecords",
    params=(
        integer_param("from_seq", "The last seq that the reader has; 0 before the first.", 0),
        Parameter("to_seq", COUNT, "The last seq to send. Default: the head when the stream starts."),
        integer_param("limit", "The most records to send; 0: all.", 0),
        integer_param("bytes_max", "About how many bytes of records to send; 0: all.", 0),
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
    bytes_max = query.number("bytes_max", 0) or SEQ_MAX
    strong = wants_strong_read(context)
    start_scan = partial(
        topic_operations(topic).scan,
        from_seq,
        to_seq,
        nodes=nodes,
        limit=limit,
        bytes_max=bytes_max,
        strong=strong,
        columns=_shown_columns(show) if kind == ARROW else None,
    )
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
                await _send_chunks(service, topic, sink, scan, chunks)
        finally:
            service.metrics.count_read(topic.name, scan.counts.rows, gap=scan.gap is not None)

    return Stream(200, run, kind, ((b"cache-control", b"no-store"),))


class ResizableScan(Protocol):
    """A scan whose chunk size can be set."""

    @property
    def next_from_seq(self) -> int: ...

    def set_chunk_bytes(self, size: int) -> None: ...


async def _send_chunks(
    service: Service, topic: Topic, sink: Sink, scan: ResizableScan, chunks: Iterator[list[bytes]]
) -> None:
    """Write chunks that a thread encodes, the next one while the last one is sent. Encoded bytes that are not written
    yet count as memory of this client."""

    def encode_next(size: int) -> asyncio.Future[list[bytes] | None]:
        scan.set_chunk_bytes(size)
        return asyncio.ensure_future(service.run_read(topic, scan.next_from_seq, lambda: next(chunks, None)))

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


def _shown_columns(show: FieldSelection) -> list[str]:
    hidden = {"tag": show.tags, "meta": show.meta, "data": show.data, "json": show.data}
    return [name for name in SCHEMA.names if hidden.get(name, True)]


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
    columns = _shown_columns(show)
    start = {**metadata, "head_seq": scan.head_seq, "earliest_seq": scan.earliest_seq}
    schema = pa.schema([SCHEMA.field(name) for name in columns], metadata=_arrow_metadata(start))
    sink = _ArrowSink()
    with pa.ipc.new_stream(sink, schema) as writer:

        def encode(batch: pa.RecordBatch) -> list[bytes]:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
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
