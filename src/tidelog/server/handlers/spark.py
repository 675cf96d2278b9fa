"""Endpoints for copies of whole topics, which Spark uses: segment files to read, numbered batches to write.

    GET    …/segments             the segment files at this moment, with lengths and checksums
    GET    …/segments/{base}/data bytes of one file: data, idx, foot or del; whole or a range

A reader lists, copies the files that it lacks, and reads the tail as records. A segment that was dropped in between is
a 404: the reader lists again. Topic names never reach the file system: a segment is found in memory, by its topic's
name and its first seq.

    PUT    …/staging/{chunk}      an Arrow stream, stored beside the data until it is published or deleted
    DELETE …/staging/{owner}      all chunks of an owner
    POST   …/batches              {"writer","number","sum","query_id","chunks"} → one range of seqs, once; in parts
                                  where it is more than one commit takes
    GET    …/batches?writer=      the last batches of a writer

Several writers stage chunks, and one request appends them as a batch. The file name of a chunk starts with a hash of
its topic's name, so that topics share no chunk.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec
import pyarrow as pa
from msgspec import UNSET

from tidelog import api_types
from tidelog.engine import Topic, producer_batches
from tidelog.engine.producer_batches import (
    BatchId,
    PublishResult,
    StagedChunk,
    StagedUpload,
    check_chunk_name,
)
from tidelog.engine.segment_listing import FILES, FileKind, SegmentFile, SegmentList, SegmentTableList
from tidelog.engine.segment_table import SegmentTable
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, NotFound
from tidelog.http.interface import BodyError, ClientDisconnected, Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError, api_error_for_status
from tidelog.server.handlers.records import wants_strong_read
from tidelog.server.openapi import (
    BINARY,
    CONSISTENCY_PARAM,
    STRING,
    Parameter,
    binary_schema,
    flag_param,
    operation,
)
from tidelog.server.push.topic_stream import StreamSlot
from tidelog.server.request import ARROW, OCTET_STREAM, RequestContext

_PIECE_BYTES: Final = 1 << 20
_COLD_PIECE_BYTES: Final = 4 << 20  # of one read of the cold store: a peer that reads nothing costs no more memory
_RANGE_HEADER = re.compile(rb"bytes=(\d{0,19})-(\d{0,19})")
_FILE_FIELDS: Final = {"data": "data", "idx": "idx", "foot": "foot", "del": "deletions"}
_LISTING_TRIES: Final = 3
_SEGMENTS_PER_STEP: Final = 64  # per call of the thread pool, so that other requests get their turn
_TABLE_ROWS_MAX: Final = 32_768  # 1.6 MB
_TABLE_SCHEMA: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("base", "stop", "size", "live", "generation")),
        ("sealed", pa.bool_()),
    ]
)


@operation(
    "listSegments",
    response=responses.Segments,
    params=(
        flag_param("sums", True, "false: omit checksums that are not known yet; to compute them reads the files."),
        Parameter("from_seq", {"type": "integer", "minimum": 0}, "Only segments with records from this seq on."),
        Parameter("limit", {"type": "integer", "minimum": 0}, "At most so many; next_from_seq is where to go on."),
        Parameter("format", {"enum": ["json", "arrow"]}, "arrow: columns without files and checksums."),
        CONSISTENCY_PARAM,
    ),
    errors=("invalid_request", "topic_not_found", "not_found"),
    response_content={
        ARROW.decode(): binary_schema(
            f"With format=arrow: an IPC stream with the columns {', '.join(_TABLE_SCHEMA.names)}, at most "
            f"{_TABLE_ROWS_MAX} rows; its metadata has the other fields of the JSON form."
        )
    },
)
async def list_segments(context: RequestContext) -> Response:
    """List the segment files of a topic."""
    service, sums = context.service, context.query.flag("sums", True)
    engine = service.engine
    topic = context.get_topic()
    from_seq, limit = context.query.number("from_seq", 0), context.query.number("limit", -1)
    generation, strong = engine.generation, wants_strong_read(context)
    kind = context.query.text("format") or "json"
    if kind not in ("json", "arrow"):
        raise ApiError("invalid_request", f"format is {kind[:40]!r}; nothing was read, pass json or arrow")
    if kind == "arrow":
        limit = min(limit, _TABLE_ROWS_MAX) if limit >= 0 else _TABLE_ROWS_MAX
        table = partial(topic_operations(topic).segment_table, strong=strong, from_seq=from_seq, limit=limit)
        listed = await service.run_blocking(table)
        fields = _listing_fields(topic, generation, listed, [])
        return Response(200, await service.run_blocking(partial(_encode_table, fields, listed.table)), ARROW)
    listing, rows = await _list_with_rows(
        context, topic, sums=sums, strong=strong, from_seq=from_seq, limit=limit if limit >= 0 else None
    )
    return context.json(_listing_fields(topic, generation, listing, rows))


def _listing_fields(
    topic: Topic, generation: int, listing: SegmentList | SegmentTableList, rows: list[responses.Segment]
) -> responses.Segments:
    state = topic_operations(topic).size()
    return responses.Segments(
        topic.name,
        topic.epoch,
        generation,
        listing.head_seq,
        listing.earliest_seq,
        listing.evict_floor,
        rows,
        responses.SegmentTail(listing.tail_from_seq, listing.head_seq),
        listing.next_from_seq,
        state.records,
        state.bytes,
        state.removals,
    )


def _encode_table(fields: responses.Segments, table: SegmentTable) -> bytes:
    columns = (table.base, table.stop, table.size, table.live, table.generation, table.sealed)
    about = {b"listing": msgspec.json.encode(fields)}
    batch = pa.RecordBatch.from_arrays(list(map(pa.array, columns)), schema=_TABLE_SCHEMA.with_metadata(about))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


async def _list_with_rows(
    context: RequestContext, topic: Topic, *, sums: bool, strong: bool, from_seq: int, limit: int | None
) -> tuple[SegmentList, list[responses.Segment]]:
    """A listing and its rows. Lists again where a segment was dropped before its checksum was computed."""
    step = 1 if sums else _SEGMENTS_PER_STEP
    for attempts_left in range(_LISTING_TRIES, 0, -1):
        listing = await context.service.run_blocking(
            partial(topic.segments, strong=strong, from_seq=from_seq, limit=limit)
        )
        rows: list[responses.Segment] = []
        try:
            for start in range(0, len(listing.segments), step):
                rows += await context.service.run_blocking(
                    partial(_segment_rows, listing.segments[start : start + step], sums)
                )
            return listing, rows
        except NotFound:
            if topic_operations(topic).is_dropped or attempts_left == 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _segment_rows(segments: list[SegmentFile], sums: bool) -> list[responses.Segment]:
    return [
        responses.Segment(
            segment.base,
            segment.generation,
            segment.stop,
            segment.sealed,
            segment.records,
            segment.live_records,
            segment.live_bytes,
            segment.first_ts,
            segment.last_ts,
            segment.tier,
            responses.SegmentFiles(
                **{
                    _FILE_FIELDS[kind]: info
                    for kind in FILES
                    if (info := _file_info(segment, kind, sums=sums)) is not None
                }
            ),
        )
        for segment in segments
    ]


def _file_info(segment: SegmentFile, kind: FileKind, *, sums: bool) -> responses.SegmentFileInfo | None:
    """The length and checksum of a file; None where the segment has no such file."""
    length = segment.length(kind)
    if length is None:
        content = segment.content(kind)  # small
        if content is None:
            return None
        length = len(content)
    digest = segment.cached_digest(kind) if not sums else segment.digest(kind)
    return responses.SegmentFileInfo(length, UNSET if digest is None else f"{digest:016x}")


@operation(
    "readSegment",
    params=(
        Parameter("Range", STRING, "One range of bytes; several return the whole file.", "header"),
        Parameter("If-Range", STRING, "An ETag: the range applies only to unchanged content.", "header"),
        Parameter("generation", {"type": "integer", "minimum": 0}, "Of the listed segment; another one is not_found."),
    ),
    errors=("topic_not_found", "not_found", "range_not_satisfiable"),
    statuses=(200, 206),
    response_content={OCTET_STREAM.decode(): BINARY},
)
async def read_segment_file(context: RequestContext) -> Response | Stream:
    """Read bytes of a segment file."""
    service = context.service
    engine = service.engine
    topic = context.get_topic()
    _, base, kind = context.path_names
    if kind not in FILES:
        raise ApiError("not_found", f"a segment has the files {', '.join(FILES)}; nothing was read")
    generation = engine.generation
    file_kind: FileKind = kind
    wanted = context.query.number("generation", -1)
    segment, size, digest = await service.run_blocking(
        lambda: _find_segment_file(topic, base, None if wanted < 0 else wanted, file_kind)
    )
    tag = f"{digest:016x}-{generation}"
    headers = [(b"etag", b'"%b"' % tag.encode()), (b"accept-ranges", b"bytes"), (b"cache-control", b"no-cache")]
    byte_range = _parse_range(context, digest, size)
    first, stop = byte_range or (0, size)
    status = 200 if byte_range is None else 206
    if byte_range is not None:
        headers.append((b"content-range", b"bytes %d-%d/%d" % (first, stop - 1, size)))
    if kind == "data" and segment.tier != "hot":
        return await _send_cold_data(context, status, segment, first, stop, headers)
    content = await service.run_blocking(lambda: segment.read_range(file_kind, first, stop))
    assert content is not None, "found above"
    return await _send_bytes(context, status, memoryview(content), headers)


def _find_segment_file(topic: Topic, base: str, generation: int | None, kind: FileKind) -> tuple[SegmentFile, int, int]:
    """Return the segment, and the length and checksum of its file."""
    is_number = base.isascii() and base.isdecimal() and len(base) <= 20
    segment = topic.segment(int(base), generation) if is_number else None
    size = None if segment is None else segment.length(kind)
    if segment is not None and size is None:
        content = segment.content(kind)  # small
        size = None if content is None else len(content)
    if segment is None or size is None:
        raise ApiError(
            "not_found",
            f"{topic.name} has no file {kind} of a segment {base[:20]}, or has it no longer; nothing was read, "
            "list the segments again",
        )
    digest = segment.digest(kind)
    assert digest is not None, "a file with content has a checksum"
    return segment, size, digest


def _parse_range(context: RequestContext, digest: int, size: int) -> tuple[int, int] | None:
    """The bytes [first, stop) of the Range header; None: all. Several ranges, and a range of content that has changed
    (If-Range), return the whole file, as HTTP allows."""
    header = context.request.header(b"range")
    match = None if header is None else _RANGE_HEADER.fullmatch(header.strip())
    if match is None or match[1] == match[2] == b"":
        return None
    condition = context.request.header(b"if-range")
    # The part before the dash is the content's checksum: a checkpoint alone does not change the file.
    if condition is not None and not condition.startswith(b'"%016x-' % digest):
        return None
    if match[1]:
        first, stop = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < first:
            return None  # invalid, so it is ignored
    else:
        first, stop = max(size - int(match[2]), 0), size
    if first >= stop:
        raise ApiError(
            "range_not_satisfiable",
            f"the file has {size} bytes; nothing was read, ask for a range inside",
            {"bytes": size},
            headers=((b"content-range", b"bytes */%d" % size),),
        )
    return first, stop


async def _send_bytes(
    context: RequestContext, status: int, view: memoryview, headers: list[tuple[bytes, bytes]]
) -> Response | Stream:
    """Send small files at once and large ones in pieces, read in a thread: a page that is not in memory waits for the
    disk. The mapping stays open until the last byte is written."""
    work = context.service.run_blocking
    if len(view) <= _PIECE_BYTES:
        return Response(status, await work(partial(bytes, view)), OCTET_STREAM, headers)

    slot = StreamSlot(context.service, context.principal)

    async def run(sink: Sink) -> None:
        with slot.open():
            for start in range(0, len(view), _PIECE_BYTES):
                await sink.wait_ready()
                sink.write(await work(partial(bytes, view[start : start + _PIECE_BYTES])))
                await sink.drain()

    return Stream(status, run, OCTET_STREAM, headers)


async def _send_cold_data(
    context: RequestContext,
    status: int,
    segment: SegmentFile,
    first: int,
    stop: int,
    headers: list[tuple[bytes, bytes]],
) -> Response | Stream:
    """Send bytes [first, stop) of data that may be in the cold store, fetched piece by piece as the client reads them.
    An error of the store at the first piece is a response; later it ends the connection."""

    async def fetch(start: int) -> bytes:
        end = min(start + _COLD_PIECE_BYTES, stop)
        return await context.service.run_cold(lambda: bytes(segment.read_range("data", start, end) or b""))

    content = await fetch(first)
    if stop - first <= _PIECE_BYTES:
        return Response(status, content, OCTET_STREAM, headers)
    slot = StreamSlot(context.service, context.principal)

    async def run(sink: Sink) -> None:
        nonlocal content
        with slot.open():
            for start in range(first, stop, _COLD_PIECE_BYTES):
                await sink.wait_ready()
                sink.write(content if start == first else await fetch(start))
                content = b""
                await sink.drain()

    return Stream(status, run, OCTET_STREAM, headers, length=stop - first)


# ── numbered batches ──────────────────────────────────────────────────────────────────────────────

_put_decoder = api_types.body_decoder(api_types.PutBatch)
_UPLOAD_STEP_BYTES: Final = 1 << 20
STAGING_CONTENT_TYPES: Final = frozenset({ARROW})


def _topic_chunk_name(context: RequestContext, name: str) -> str:
    return f"{sha256(context.topic.encode()).hexdigest()[:16]}{name}"


@operation(
    "stageChunk",
    response=responses.ChunkStaged,
    errors=("invalid_request", "record_too_large", "unsupported_media_type"),
    request_content={ARROW.decode(): {"type": "string", "format": "binary"}},
)
async def stage_chunk(context: RequestContext) -> Response:
    """Stage records for a numbered batch.

    An Arrow stream with data and optionally tag, node, meta and json. Readers see the records after a batch is made
    of the chunk. An unused chunk is deleted after a week.
    """
    name, body_stream = _topic_chunk_name(context, check_chunk_name(context.path_names[1])), context.request.body_stream
    if body_stream is None:
        raise ApiError("unsupported_media_type", f"a chunk is {ARROW.decode()}; nothing was written, set Content-Type")
    staging, work = context.service.engine.staging, context.service.run_blocking

    def begin() -> StagedUpload:
        staging.create()
        return staging.begin(name)

    upload = await work(begin)
    try:
        await _copy_upload(context, upload, body_stream)
        chunk = await work(upload.finish)
    except (ClientDisconnected, BodyError) as error:
        await work(upload.abandon)
        body_error = error if isinstance(error, BodyError) else BodyError(400, "the body is incomplete")
        raise api_error_for_status(
            body_error.status, f"{body_error.reason}; nothing of the chunk was stored, send it again"
        ) from error
    except BaseException:
        await work(upload.abandon)
        raise
    return context.json(responses.ChunkStaged(context.topic, context.path_names[1], chunk.size))


async def _copy_upload(context: RequestContext, upload: StagedUpload, body_stream: AsyncIterator[bytes]) -> None:
    pieces: list[bytes] = []
    size = 0
    async for piece in body_stream:
        context.check_key()
        pieces.append(piece)
        size += len(piece)
        assert context.exchange is not None, "a request in its handler has an exchange"
        context.exchange.keep_body(size)
        if size >= _UPLOAD_STEP_BYTES:
            await context.service.run_blocking(partial(upload.write, pieces))
            pieces, size = [], 0
    if pieces:
        await context.service.run_blocking(partial(upload.write, pieces))


@operation("clearStaging", response=responses.StagingCleared, errors=("invalid_request",))
async def clear_staging(context: RequestContext) -> Response:
    """Delete all chunks of an owner.

    Here the name is the owner: the first part of the names of its chunks.
    """
    owner = _topic_chunk_name(context, context.path_names[1])
    removed = await context.service.run_blocking(lambda: context.service.engine.staging.remove_chunks(owner))
    return context.json(responses.StagingCleared(context.topic, removed))


@operation(
    "putBatch",
    request=api_types.PutBatch,
    response=responses.BatchPut,
    errors=("not_found", "record_too_large", "topic_full", "batch_conflict"),
    statuses=(200, 201),
)
async def publish_batch(context: RequestContext) -> Response:
    """Append chunks as one batch, once.

    All chunks become one range of seqs, or none does. A repeated request, also after a restart, returns the range
    of the first one. query_id distinguishes two queries of one writer: the newest number under the same query_id is
    a repetition whatever its sum, another query_id is a batch_conflict. So are a known number with another sum, and
    a number below a known one.
    """
    body = context.decode_body(_put_decoder)
    if not body.chunks:
        raise BadInput("a numbered batch has at least one chunk; nothing was written")
    if len({chunk.chunk for chunk in body.chunks}) < len(body.chunks):
        raise BadInput("a chunk is listed twice; nothing was written, list each chunk of the batch once")
    service, staging = context.service, context.service.engine.staging
    chunks = [
        StagedChunk(
            _topic_chunk_name(context, check_chunk_name(chunk.chunk)), chunk.rows, chunk.bytes, int(chunk.sum, 16)
        )
        for chunk in body.chunks
    ]

    def work() -> PublishResult:
        staging.sweep(service.now_ms())
        batch = BatchId(body.writer, body.number, body.checksum_words, body.query_id)
        return producer_batches.publish_batch(service.engine, staging, context.topic, batch, chunks)

    await service.wait_caught_up()  # a batch of up to 1 GiB stays in memory until a checkpoint
    context.check_key()
    published = await service.run_blocking(work)
    done, created = published.appended, published.created
    service.metrics.counters(context.topic).written += published.written
    topic = service.engine.find(context.topic)
    # A numbered batch is synced in every durability class that has files.
    is_synced = topic is None or topic.config.durability != "ephemeral"
    response = responses.BatchPut(
        context.topic,
        done.first_seq,
        done.last_seq,
        done.head_seq,
        published.rows,
        done.deduped,
        "fsync" if is_synced else "ephemeral",
        created,
    )
    return context.json(response, status=201 if created else 200)


@operation(
    "listBatches",
    response=responses.BatchList,
    params=(Parameter("writer", {**STRING, "minLength": 1}, "The writer.", required=True),),
    errors=("invalid_request", "topic_not_found"),
)
async def list_batches(context: RequestContext) -> Response:
    """List the last batches of a writer."""
    writer = context.query.text("writer")
    if not writer:
        raise ApiError("invalid_request", "writer is missing; nothing was read, name the writer")
    topic = context.get_topic()
    rows = [
        responses.BatchRow(number, batch.first, batch.last, api_types.PutBatch.checksum_hex(batch.sum), batch.query_id)
        for number, batch in topic.producer_batches(writer).items()
    ]
    return context.json(responses.BatchList(context.topic, writer, rows))
