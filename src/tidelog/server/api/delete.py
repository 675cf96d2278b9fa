"""Deleting records: below a seq, by tag, or both."""

from __future__ import annotations

from tidelog.engine.delete import parse
from tidelog.server.api.call import Call, ok
from tidelog.server.api.diff import seq
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Response
from tidelog.wire import requests

_decoder = requests.decoder(requests.Delete)


async def delete(call: Call) -> Response:
    body = call.body(_decoder)
    if body.before_seq is None and body.match is None:
        raise Problem("invalid_request", "a delete names before_seq, match or both; nothing was deleted")
    match, before = body.match, None if body.before_seq is None else seq(body.before_seq)
    parse(match)  # what is no match is none, whether there is such a topic or not
    service, actor = call.service, call.principal.name
    topic = found(service.engine, call.topic)
    done = await service.work(lambda: topic.delete(match=match, before_seq=before, actor=actor))
    return ok(
        {
            "topic": call.topic,
            "deleted": done.deleted,
            "earliest_seq": done.earliest_seq,
            "head_seq": done.head_seq,
            "count": done.count,
            "bytes": done.bytes,
            "performance": call.performance(),
        }
    )
