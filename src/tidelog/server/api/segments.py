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
from typing import Any, Final

from tidelog.engine import Topic
from tidelog.engine.segments import FILES, FileKind, Held, Listing
from tidelog.errors import NotFound
from tidelog.server.api.call import Call, ok
from tidelog.server.api.diff import is_strong
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.delivery import Slot
from tidelog.server.http.seam import Response, Sink, Stream
from tidelog.types import Buffer

OCTETS: Final = b"application/octet-stream"
_PIECE_BYTES: Final = 1 << 20
_RANGE = re.compile(rb"bytes=(\d{0,19})-(\d{0,19})")
_TRIES: Final = 3
_AT_ONCE: Final = 64  # segments whose rows are made before others get their turn


async def manifest(call: Call) -> Response:
    """What lies in files. Sums that nobody has asked for yet are worked out now, which reads the files; without
    `sums` they are left out."""
    service, sums = call.service, call.query.flag("sums", True)
    engine = service.engine
    topic = found(engine, call.topic)
    generation = engine.generation
    listing, rows = await _listed(call, topic, sums=sums, strong=is_strong(call))
    return ok(
        {
            "topic": topic.name,
            "epoch": topic.epoch,
            "generation": generation,
            "head_seq": listing.head_seq,
            "earliest_seq": listing.earliest_seq,
            "evict_floor": listing.evict_floor,
            "segments": rows,
            "tail": {"from_seq": listing.tail_from_seq, "to_seq": listing.head_seq},
            "performance": call.performance(),
        }
    )


async def _listed(call: Call, topic: Topic, *, sums: bool, strong: bool) -> tuple[Listing, list[dict[str, Any]]]:
    """A listing and its rows. Where a segment went away before its sum was known, everything is listed again."""
    step = 1 if sums else _AT_ONCE
    for again in range(_TRIES, 0, -1):
        listing = await call.service.work(partial(topic.segments, strong=strong))
        rows: list[dict[str, Any]] = []
        try:
            for at in range(0, len(listing.segments), step):
                rows += await call.service.work(partial(_rows, listing.segments[at : at + step], sums))
            return listing, rows
        except NotFound:
            if topic.dropped or again == 1:
                raise
    raise AssertionError("the last try returns or raises")


def _rows(held: list[Held], sums: bool) -> list[dict[str, Any]]:
    return [_row(each, sums=sums) for each in held]


def _row(held: Held, *, sums: bool) -> dict[str, Any]:
    return {
        "base": held.base,
        "stop": held.stop,
        "sealed": held.sealed,
        "records": held.records,
        "live": held.live,
        "bytes": held.live_bytes,
        "first_ts": held.first_ts,
        "last_ts": held.last_ts,
        "files": {kind: shown for kind in FILES if (shown := _file(held, kind, sums=sums)) is not None},
    }


def _file(held: Held, kind: FileKind, *, sums: bool) -> dict[str, Any] | None:
    """How long a file is and its sum; None where there is none."""
    length = held.length(kind)
    if length is None:
        content = held.content(kind)  # small, and made or read whole in any case
        if content is None:
            return None
        length = len(content)
    digest = held.known(kind) if not sums else held.digest(kind)
    return {"bytes": length} if digest is None else {"bytes": length, "xxh3": f"{digest:016x}"}


async def file(call: Call) -> Response | Stream:
    """Bytes of one file, as they are on disk; deletions as they are now."""
    service = call.service
    engine = service.engine
    topic = found(engine, call.topic)
    _, base, kind = call.names
    if kind not in FILES:
        raise Problem("not_found", f"a segment has the files {', '.join(FILES)}; nothing was read")
    generation = engine.generation
    named: FileKind = kind
    content, digest = await service.work(lambda: _held_file(topic, base, named))
    tag = f"{digest:016x}-{generation}"
    headers = [(b"etag", b'"%b"' % tag.encode()), (b"accept-ranges", b"bytes"), (b"cache-control", b"no-cache")]
    size = len(content)
    wanted = _range(call, digest, size)
    if wanted is None:
        return await _sent(call, 200, memoryview(content), headers)
    first, stop = wanted
    headers.append((b"content-range", b"bytes %d-%d/%d" % (first, stop - 1, size)))
    return await _sent(call, 206, memoryview(content)[first:stop], headers)


def _held_file(topic: Topic, base: str, kind: FileKind) -> tuple[Buffer, int]:
    held = topic.segment(int(base)) if base.isascii() and base.isdecimal() and len(base) <= 20 else None
    content = None if held is None else held.content(kind)
    if held is None or content is None:
        raise Problem(
            "not_found",
            f"{topic.name} has no file {kind} of a segment {base[:20]}, or has it no longer; nothing was read, "
            "read the manifest again",
        )
    digest = held.digest(kind)
    assert digest is not None, "a file that is there has a sum"
    return content, digest


def _range(call: Call, digest: int, size: int) -> tuple[int, int] | None:
    """The bytes [first, stop) that were asked for; None: all of them. More than one range at a time is answered with
    the whole, as HTTP allows; so is a range of what has changed since (If-Range)."""
    header = call.request.header(b"range")
    asked = None if header is None else _RANGE.fullmatch(header.strip())
    if asked is None or asked[1] == asked[2] == b"":
        return None
    condition = call.request.header(b"if-range")
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
        problem = Problem("range_not_satisfiable", f"the file has {size} bytes; nothing was read, ask for some of them")
        raise _Unsatisfiable(problem, size)
    return first, stop


class _Unsatisfiable(Problem):
    """416, with how long the file is."""

    def __init__(self, problem: Problem, size: int) -> None:
        super().__init__(problem.code, problem.message, {"bytes": size})
        self._size = size

    def response(self) -> Response:
        made = super().response()
        made.headers = (*made.headers, (b"content-range", b"bytes */%d" % self._size))
        return made


async def _sent(call: Call, status: int, view: memoryview, headers: list[tuple[bytes, bytes]]) -> Response | Stream:
    """Small ones at once, large ones in pieces, read off the loop: a page that is not in memory waits for the disk.
    The mapping is held until the last byte is on its way."""
    work = call.service.work
    if len(view) <= _PIECE_BYTES:
        return Response(status, await work(partial(bytes, view)), OCTETS, headers)

    slot = Slot(call.service, call.principal)

    async def run(sink: Sink) -> None:
        try:
            slot.begin()
            for at in range(0, len(view), _PIECE_BYTES):
                await sink.ready()
                sink.write(await work(partial(bytes, view[at : at + _PIECE_BYTES])))
                await sink.drained()
        finally:
            slot.give()

    return Stream(status, run, OCTETS, headers)
