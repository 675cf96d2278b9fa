"""Large records over HTTP: one record from the body of a request, and ranges of the data of one record.

    POST …/stream                 the body is the data of one record, of any length up to the topic's max_record_bytes
    GET  …/records/{seq}/data     the data of one record, whole or a range

A body is passed to the disk piece by piece, in a thread; meanwhile nothing is read from its socket. If it breaks off,
or is longer than it may be, the record is rolled back. Data is read from the blob in pieces of 1 MiB, each verified,
also in a thread, and only as fast as the client reads.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from tidelog.engine import Topic, batch_encoder
from tidelog.engine.large_append import StreamedAppend
from tidelog.engine.large_read import RecordReader
from tidelog.engine.topic import topic_operations
from tidelog.errors import TopicNotFound
from tidelog.http.interface import BodyError, ClientDisconnected, Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError, api_error_for_status
from tidelog.server.handlers import write as writing
from tidelog.server.handlers.records import wants_strong_read
from tidelog.server.openapi import BINARY, CONSISTENCY_PARAM, STRING, Parameter, binary_schema, flag_param, operation
from tidelog.server.push.topic_stream import StreamSlot
from tidelog.server.request import OCTET_STREAM, RequestContext

_PIECE_BYTES: Final = 1 << 20
_RANGE_HEADER: Final = re.compile(rb"bytes=(\d{0,19})-(\d{0,19})")


@operation(
    "appendStream",
    response=responses.Written,
    params=(
        Parameter("tag", STRING, "The tag of the record."),
        Parameter("node", STRING, "The node of the record."),
        Parameter("meta", STRING, "The meta of the record, a JSON object."),
        flag_param("durable", False, "Respond when the record survives a power cut, whatever the topic's class is."),
        flag_param("create", True, "false refuses to create the topic."),
        Parameter(
            "Idempotency-Key",
            {"type": "string", "minLength": 1, "maxLength": 256},
            "A second write with this key writes nothing.",
            "header",
        ),
    ),
    errors=("invalid_request", "record_too_large", "topic_not_found", "topic_full", "disk_full"),
    statuses=(200, 201),
    request_content={OCTET_STREAM.decode(): binary_schema("The data of one record; any content type is taken.")},
)
async def append_stream(context: RequestContext) -> Response:
    """Append one record from the body.

    The body is chunked or has a Content-Length and may be as long as max_record_bytes of the topic. A body that is
    longer, breaks off or is refused by the disk is not written.
    """
    work = context.service.run_blocking
    meta = context.query.text("meta")
    fields: dict[str, Any] = {
        "tag": context.query.text("tag"),
        "node": context.query.text("node"),
        "meta": None if meta is None else batch_encoder.decode_meta(meta.encode("utf-8", "surrogatepass")),
        "key": writing.idempotency_key(context, None),
        "durable": context.query.flag("durable", False),
    }
    if context.request.header(b"content-encoding") is None:
        fields["length"] = context.request.content_length
    topic, created = await work(partial(_open_topic, context))
    context.durability = topic.config.durability
    stream = await work(partial(topic_operations(topic).begin_stream, **fields))
    try:
        assert context.request.body_stream is not None, "bodies of this endpoint are streamed"
        await _copy_body(context, stream, context.request.body_stream)
        context.check_key()
        future = await work(stream.submit)
    except (ClientDisconnected, BodyError) as error:
        body_error = error if isinstance(error, BodyError) else BodyError(400, "the body is incomplete")
        raise api_error_for_status(
            body_error.status, f"{body_error.reason}; it was rolled back and nothing was written, send it again"
        ) from error
    finally:
        await work(stream.roll_back)
    done = await work(future.wait)
    return writing.write_response(context, done, created=created)


def _open_topic(context: RequestContext) -> tuple[Topic, bool]:
    engine, name = context.service.engine, context.topic
    topic = engine.find(name)
    if topic is not None:
        return topic, False
    if not context.query.flag("create", True):
        raise TopicNotFound(name)
    return engine.topic(name), True


async def _copy_body(context: RequestContext, stream: StreamedAppend, body: AsyncIterator[bytes]) -> None:
    pieces: list[bytes] = []
    size = 0
    assert context.exchange is not None, "a request in its handler has an exchange"
    async for piece in body:
        pieces.append(piece)
        size += len(piece)
        context.exchange.keep_body(size)
        if size >= _PIECE_BYTES:
            context.check_key()
            await context.service.run_blocking(partial(_write_pieces, stream, pieces))
            pieces, size = [], 0
    await context.service.run_blocking(partial(_write_pieces, stream, pieces))


def _write_pieces(stream: StreamedAppend, pieces: list[bytes]) -> None:
    for piece in pieces:
        stream.write(piece)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@operation(
    "readRecordData",
    params=(
        Parameter("Range", STRING, "One range of bytes; several return all of the data.", "header"),
        Parameter("If-Range", STRING, "An ETag: the range applies only to this data.", "header"),
        Parameter("If-None-Match", STRING, "An ETag: 304 where the data is this.", "header"),
        CONSISTENCY_PARAM,
    ),
    errors=("invalid_request", "topic_not_found", "record_not_found", "range_not_satisfiable"),
    statuses=(200, 206, 304),
    response_content={OCTET_STREAM.decode(): BINARY},
)
async def read_data(context: RequestContext) -> Response | Stream:
    """Read the data of one record.

    Bytes as they were written, or JSON text; whole or a range. The ETag is the XXH3-64 of all of the data, as in the
    reference of a large record.
    """
    topic, seq = context.get_topic(), _parse_seq(context.path_names[1])
    work = context.service.run_blocking
    reader = await context.service.run_read(
        topic, max(seq - 1, 0), partial(topic.open_record, seq, strong=wants_strong_read(context))
    )
    try:
        size, etag = len(reader), b'"%b"' % reader.xxh3.encode()
        headers = [(b"etag", etag), (b"accept-ranges", b"bytes"), (b"cache-control", b"no-cache")]
        known = context.request.header(b"if-none-match")
        if known is not None and etag in [each.strip() for each in known.split(b",")]:
            await work(reader.close)
            return Response(304, headers=headers)
        first, stop = _parse_range(context, etag, size) or (0, size)
        status = 200
        if (first, stop) != (0, size) or _has_range(context, etag):
            status = 206
            headers.append((b"content-range", b"bytes %d-%d/%d" % (first, stop - 1, size)))
        if stop - first <= _PIECE_BYTES:
            content = await work(partial(_read_range, reader, first, stop))
            await work(reader.close)
            return Response(status, content, OCTET_STREAM, headers)
    except BaseException:
        await work(reader.close)
        raise
    return _stream_range(context, reader, status, first, stop, headers)


def _stream_range(
    context: RequestContext,
    reader: RecordReader,
    status: int,
    first: int,
    stop: int,
    headers: list[tuple[bytes, bytes]],
) -> Stream:
    work = context.service.run_blocking
    try:
        slot = StreamSlot(context.service, context.principal)
    except ApiError:
        reader.close()
        raise
    if context.request.method == "HEAD":  # nothing runs the stream
        reader.close()
        slot.release()

    async def run(sink: Sink) -> None:
        try:
            with slot.open():
                for start in range(first, stop, _PIECE_BYTES):
                    await sink.wait_ready()
                    sink.write(await work(partial(_read_range, reader, start, min(start + _PIECE_BYTES, stop))))
                    await sink.drain()
        finally:
            reader.close()

    return Stream(status, run, OCTET_STREAM, headers, length=stop - first)


def _read_range(reader: RecordReader, first: int, stop: int) -> bytes:
    reader.seek(first)
    return reader.read(stop - first) or b""


def _parse_seq(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < len(text) <= 19):
        raise ApiError("invalid_request", f"{text[:40]!r} is not a seq; nothing was read, give a whole number")
    return int(text)


def _has_range(context: RequestContext, etag: bytes) -> bool:
    """Whether a valid Range header applies to data with this ETag."""
    header, condition = context.request.header(b"range"), context.request.header(b"if-range")
    match = None if header is None else _RANGE_HEADER.fullmatch(header.strip())
    if match is None or match[1] == match[2] == b"" or (condition is not None and condition.strip() != etag):
        return False
    return not (match[1] and match[2] and int(match[2]) < int(match[1]))


def _parse_range(context: RequestContext, etag: bytes, size: int) -> tuple[int, int] | None:
    """The bytes [first, stop) of the Range header; None: all, as HTTP allows for a header that does not apply."""
    if not _has_range(context, etag):
        return None
    match = _RANGE_HEADER.fullmatch((context.request.header(b"range") or b"").strip())
    assert match is not None, "checked above"
    if match[1]:
        first, stop = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
    else:
        first, stop = max(size - int(match[2]), 0), size
    if first >= stop:
        raise ApiError(
            "range_not_satisfiable",
            f"the data has {size} bytes; nothing was read, ask for a range inside",
            {"bytes": size},
            headers=((b"content-range", b"bytes */%d" % size),),
        )
    return first, stop
