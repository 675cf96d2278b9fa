"""The figures of the server: for Prometheus, or as JSON to whoever accepts that."""

from __future__ import annotations

from tidelog.server.api.call import JSON, Call, ok
from tidelog.server.http.seam import Response
from tidelog.server.metrics import CONTENT_TYPE


async def metrics(call: Call) -> Response:
    """Asked of every topic, so off the loop."""
    service = call.service
    if JSON in (call.request.header(b"accept") or b""):
        return ok(await service.work(service.metrics.summary))
    return Response(200, await service.work(service.metrics.text), CONTENT_TYPE)
