"""What happened to the jobs of a queue: as a page of JSON, as lines, or as Arrow."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa

from tidelog.engine.queues import History
from tidelog.engine.queues.history import SCHEMA
from tidelog.server.api.bulk import ARROW, NDJSON
from tidelog.server.api.call import JSON, Call, ok
from tidelog.server.api.diff import seq
from tidelog.server.api.problem import Problem
from tidelog.server.api.queues import queue_of
from tidelog.server.http.seam import Response

LIMIT: Final = 256
LIMIT_MAX: Final = 10_000
COLUMNS: Final = ("at", *SCHEMA.names)
_SCHEMA: Final = pa.schema([pa.field("at", pa.int64(), nullable=False), *SCHEMA])
_NAMED: Final = {"json": JSON, "ndjson": NDJSON, "arrow": ARROW}
_encode = msgspec.json.Encoder().encode


async def history(call: Call) -> Response:
    """Steps behind `from_seq`, oldest first; `at` of the last one is where to go on."""
    kind = _kind(call)
    queue = queue_of(call)
    from_seq = seq(call.query.number("from_seq", 0))
    limit = min(call.query.number("limit", LIMIT) or LIMIT, LIMIT_MAX)
    told: History = queue.history()
    steps = await call.service.work(lambda: told.read(from_seq, limit))
    if kind == ARROW:
        return Response(200, _arrow(steps), ARROW)
    if kind == NDJSON:
        return Response(200, b"".join(_encode(step) + b"\n" for step in steps), NDJSON)
    next_from_seq = steps[-1]["at"] if steps else from_seq
    return ok(
        {
            "topic": call.topic,
            "events": steps,
            "count": len(steps),
            "next_from_seq": next_from_seq,
            "performance": call.performance(),
        }
    )


def _kind(call: Call) -> bytes:
    """What the reader takes: as the query says, or else as its Accept header does; a page where it says nothing."""
    named = call.query.text("format")
    if named is not None:
        if named not in _NAMED:
            raise Problem("invalid_request", f"format is json, ndjson or arrow, not {named[:80]!r}; nothing was read")
        return _NAMED[named]
    header = (call.request.header(b"accept") or b"*/*").lower()
    for item in header.split(b","):
        name = item.partition(b";")[0].strip()
        if name in (b"*/*", b"application/*", b""):
            return JSON
        if name in _NAMED.values():
            return name
    known = " or ".join(kind.decode() for kind in _NAMED.values())
    raise Problem("not_acceptable", f"a history goes out as {known}; nothing was read, accept one of them")


def _arrow(steps: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(steps, schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
