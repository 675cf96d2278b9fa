"""The figures of the server: for Prometheus, or as JSON to whoever accepts that."""

from __future__ import annotations

from tidelog.server.api.call import JSON, Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.http.seam import Response
from tidelog.server.metrics import CONTENT_TYPE


async def metrics(call: Call) -> Response:
    """Asked of every topic, so off the loop."""
    if call.principal.prefixes:
        raise Problem(
            "forbidden",
            "the figures are of all topics, and this key is for some names only; nothing was done, use a key without "
            "prefixes",
        )
    service = call.service
    if JSON in (call.request.header(b"accept") or b""):
        return ok(await service.work(service.metrics.summary))
    return Response(200, await service.work(service.metrics.text), CONTENT_TYPE)
