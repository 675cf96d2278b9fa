"""Is it alive, is it ready.

The figures of the server: for Prometheus, or as JSON to whoever accepts that.
"""

from __future__ import annotations

from tidelog.http.interface import Response
from tidelog.server.errors import ApiError
from tidelog.server.metrics import CONTENT_TYPE, server_health
from tidelog.server.request import JSON_TYPE, RequestContext, json_response
from tidelog.version import __version__


def get_health(context: RequestContext) -> Response:
    service = context.service
    uptime_ms = service.clock.monotonic_ms() - service.started_ms
    return json_response({"status": "ok", "version": __version__, "uptime_ms": uptime_ms})


def get_ready(context: RequestContext) -> Response:
    service = context.service
    if service.stopping.is_set():
        raise ApiError("shutting_down", "the server is stopping; nothing was done, ask another one or retry")
    topics, health = len(service.engine.names()), server_health(service)
    # Degraded is still ready: what is intact is served. Names and errors are for those with a key, in the metrics.
    detail = {
        "ok": health.ok,
        "checkpoint_age_ms": health.checkpoint_age_ms,
        "lagging_topics": len(health.lagging),
        "corruptions": health.corruptions,
        "failing": {task.name: task.failing for task in health.tasks if task.failing},
    }
    return json_response({"status": "ready", "wal_replay_complete": True, "topics": topics, "health": detail})


async def get_metrics(context: RequestContext) -> Response:
    """Asked of every topic, so off the loop."""
    if context.principal.prefixes:
        raise ApiError(
            "forbidden",
            "the figures are of all topics, and this key is for some names only; nothing was done, use a key without "
            "prefixes",
        )
    service = context.service
    if JSON_TYPE in (context.request.header(b"accept") or b""):
        return json_response(await service.run_blocking(service.metrics.summary))
    return Response(200, await service.run_blocking(service.metrics.prometheus_text), CONTENT_TYPE)
