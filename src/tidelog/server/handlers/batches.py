"""Numbered batches over HTTP: several writers stage chunks, and one request appends them as a batch.

    PUT    …/staging/{chunk}      an Arrow stream, stored beside the data until it is published or deleted
    DELETE …/staging/{owner}      all chunks of an owner
    POST   …/batches              {"writer","number","sum","query_id","chunks"} → one range of seqs, once; in parts
                                  where it is more than one commit takes
    GET    …/batches?writer=      the last batches of a writer

The file name of a chunk starts with a hash of its topic's name, so that topics share no chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from typing import Final

from tidelog import api_types
from tidelog.engine import producer_batches
from tidelog.engine.producer_batches import (
    BatchId,
    PublishResult,
    StagedChunk,
    StagedUpload,
    StagingArea,
    check_chunk_name,
)
from tidelog.errors import BadInput
from tidelog.http.interface import BodyError, ClientDisconnected, Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError, api_error_for_status
from tidelog.server.openapi import STRING, Parameter, operation
from tidelog.server.request import ARROW, RequestContext

_put_decoder = api_types.json_decoder(api_types.PutBatch)
_UPLOAD_STEP_BYTES: Final = 1 << 20
STAGING_CONTENT_TYPES: Final = frozenset({ARROW})


def _staging_area(context: RequestContext) -> StagingArea:
    return context.service.engine.staging


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
    staging, work = _staging_area(context), context.service.run_blocking

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
    removed = await context.service.run_blocking(lambda: _staging_area(context).remove_chunks(owner))
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
    service, staging = context.service, _staging_area(context)
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
