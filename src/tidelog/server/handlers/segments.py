"""[shell] Segments as files: what there is, and ranges of it.

    GET …/segments                   what lies in files at this moment, with lengths and sums
    GET …/segments/{base}/data       bytes of one file: data, idx, foot or del; whole or a range

A reader lists, copies what it lacks, and reads the tail as records. A segment may be dropped in between: its files
are then answered with 404, and the listing is to be read again. Names of topics never reach the file system: a
segment is found in memory, by its topic's name and its first seq.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from msgspec import UNSET

from tidelog.engine import Topic
from tidelog.engine.segment_listing import FILES, FileKind, SegmentFile, SegmentList
from tidelog.errors import NotFound
from tidelog.http.interface import Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.handlers.records import wants_strong_read
from tidelog.server.openapi import BINARY, CONSISTENCY_PARAM, STRING, Parameter, flag_param, operation
from tidelog.server.push.topic_stream import StreamSlot
from tidelog.server.request import RequestContext
from tidelog.types import Buffer

OCTET_STREAM: Final = b"application/octet-stream"
_PIECE_BYTES: Final = 1 << 20
_RANGE_HEADER = re.compile(rb"bytes=(\d{0,19})-(\d{0,19})")
_FILE_FIELDS: Final = {"data": "data", "idx": "idx", "foot": "foot", "del": "deletions"}
_LISTING_TRIES: Final = 3
_SEGMENTS_PER_STEP: Final = 64  # segments whose rows are made before others get their turn


@operation(
    "listSegments",
    response=responses.Segments,
    params=(
        flag_param("sums", True, "false: omit checksums that are not known yet; to compute them reads the files."),
        CONSISTENCY_PARAM,
    ),
    errors=("invalid_request", "topic_not_found", "not_found"),
)
async def list_segments(context: RequestContext) -> Response:
    """List the segment files of a topic."""
    service, sums = context.service, context.query.flag("sums", True)
    engine = service.engine
    topic = context.get_topic()
    generation = engine.generation
    listing, rows = await _list_with_rows(context, topic, sums=sums, strong=wants_strong_read(context))
    return context.json(
        responses.Segments(
            topic.name,
            topic.epoch,
            generation,
            listing.head_seq,
            listing.earliest_seq,
            listing.evict_floor,
            rows,
            responses.SegmentTail(listing.tail_from_seq, listing.head_seq),
        )
    )


async def _list_with_rows(
    context: RequestContext, topic: Topic, *, sums: bool, strong: bool
) -> tuple[SegmentList, list[responses.Segment]]:
    """A listing and its rows. Where a segment went away before its sum was known, everything is listed again."""
    step = 1 if sums else _SEGMENTS_PER_STEP
    for again in range(_LISTING_TRIES, 0, -1):
        listing = await context.service.run_blocking(partial(topic.segments, strong=strong))
        rows: list[responses.Segment] = []
        try:
            for at in range(0, len(listing.segments), step):
                rows += await context.service.run_blocking(
                    partial(_segment_rows, listing.segments[at : at + step], sums)
                )
            return listing, rows
        except NotFound:
            if topic.is_dropped or again == 1:
                raise
    raise AssertionError("the last try returns or raises")


def _segment_rows(segments: list[SegmentFile], sums: bool) -> list[responses.Segment]:
    return [
        responses.Segment(
            segment.base,
            segment.stop,
            segment.sealed,
            segment.records,
            segment.live_records,
            segment.live_bytes,
            segment.first_ts,
            segment.last_ts,
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
        content = segment.content(kind)  # small, and made or read whole in any case
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
    named: FileKind = kind
    content, digest = await service.run_blocking(lambda: _open_segment_file(topic, base, named))
    tag = f"{digest:016x}-{generation}"
    headers = [(b"etag", b'"%b"' % tag.encode()), (b"accept-ranges", b"bytes"), (b"cache-control", b"no-cache")]
    size = len(content)
    wanted = _parse_range(context, digest, size)
    if wanted is None:
        return await _send_bytes(context, 200, memoryview(content), headers)
    first, stop = wanted
    headers.append((b"content-range", b"bytes %d-%d/%d" % (first, stop - 1, size)))
    return await _send_bytes(context, 206, memoryview(content)[first:stop], headers)


def _open_segment_file(topic: Topic, base: str, kind: FileKind) -> tuple[Buffer, int]:
    held = topic.segment(int(base)) if base.isascii() and base.isdecimal() and len(base) <= 20 else None
    content = None if held is None else held.content(kind)
    if held is None or content is None:
        raise ApiError(
            "not_found",
            f"{topic.name} has no file {kind} of a segment {base[:20]}, or has it no longer; nothing was read, "
            "read the manifest again",
        )
    digest = held.digest(kind)
    assert digest is not None, "a file that is there has a sum"
    return content, digest


def _parse_range(context: RequestContext, digest: int, size: int) -> tuple[int, int] | None:
    """The bytes [first, stop) that were asked for; None: all of them. More than one range at a time is answered with
    the whole, as HTTP allows; so is a range of what has changed since (If-Range)."""
    header = context.request.header(b"range")
    asked = None if header is None else _RANGE_HEADER.fullmatch(header.strip())
    if asked is None or asked[1] == asked[2] == b"":
        return None
    condition = context.request.header(b"if-range")
    # What stands before the dash is the content: another checkpoint alone does not make it another file.
    if condition is not None and not condition.startswith(b'"%016x-' % digest):
        return None
    if asked[1]:
        first, stop = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
        if asked[2] and int(asked[2]) < first:
            return None  # not a range at all
    else:
        first, stop = max(size - int(asked[2]), 0), size
    if first >= stop:
        problem = ApiError(
            "range_not_satisfiable", f"the file has {size} bytes; nothing was read, ask for some of them"
        )
        raise _Unsatisfiable(problem, size)
    return first, stop


class _Unsatisfiable(ApiError):
    """416, with how long the file is."""

    def __init__(self, problem: ApiError, size: int) -> None:
        super().__init__(problem.code, problem.message, {"bytes": size})
        self._size = size

    def response(self) -> Response:
        made = super().response()
        made.headers = (*made.headers, (b"content-range", b"bytes */%d" % self._size))
        return made


async def _send_bytes(
    context: RequestContext, status: int, view: memoryview, headers: list[tuple[bytes, bytes]]
) -> Response | Stream:
    """Small ones at once, large ones in pieces, read off the loop: a page that is not in memory waits for the disk.
    The mapping is held until the last byte is on its way."""
    work = context.service.run_blocking
    if len(view) <= _PIECE_BYTES:
        return Response(status, await work(partial(bytes, view)), OCTET_STREAM, headers)

    slot = StreamSlot(context.service, context.principal)

    async def run(sink: Sink) -> None:
        with slot.open():
            for at in range(0, len(view), _PIECE_BYTES):
                await sink.wait_ready()
                sink.write(await work(partial(bytes, view[at : at + _PIECE_BYTES])))
                await sink.drain()

    return Stream(status, run, OCTET_STREAM, headers)
