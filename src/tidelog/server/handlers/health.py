"""Health probes, and metrics as Prometheus text or JSON."""

from __future__ import annotations

from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.metrics import CONTENT_TYPE, server_health
from tidelog.server.openapi import STRING, operation
from tidelog.server.request import JSON_TYPE, RequestContext, json_response
from tidelog.version import __version__


@operation("health", response=responses.Health)
def get_health(context: RequestContext) -> Response:
    """Check liveness."""
    service = context.service
    uptime_ms = service.clock.monotonic_ms() - service.started_ms
    return json_response(responses.Health("ok", __version__, uptime_ms))


@operation("healthz", response=responses.Health)
def get_healthz(context: RequestContext) -> Response:
    """Check liveness."""
    return get_health(context)


@operation("ready", response=responses.Ready, errors=("not_ready", "shutting_down"))
def get_ready(context: RequestContext) -> Response:
    """Check readiness."""
    service = context.service
    if service.stopping.is_set():
        raise ApiError("shutting_down", "the server is stopping; nothing was done, ask another one or retry")
    topics, health = len(service.engine.names()), server_health(service)
    # A degraded server is ready: it serves what is intact. Names and errors need a key and are in the metrics.
    failing = {task.name: task.failing for task in health.tasks if task.failing}
    summary = responses.ReadyHealth(
        health.ok, health.checkpoint_age_ms, len(health.lagging), health.corruptions, failing
    )
    return json_response(responses.Ready("ready", wal_replay_complete=True, topics=topics, health=summary))


@operation("readyz", response=responses.Ready, errors=("not_ready", "shutting_down"))
def get_readyz(context: RequestContext) -> Response:
    """Check readiness."""
    return get_ready(context)


@operation("metrics", response=responses.Metrics, response_content={"text/plain; version=0.0.4": STRING})
async def get_metrics(context: RequestContext) -> Response:
    """Read the metrics of the server.

    Prometheus text, unless application/json is accepted.
    """
    if context.principal.prefixes:
        raise ApiError(
            "forbidden",
            "the metrics are of all topics, and this key is for some names only; nothing was done, use a key without "
            "prefixes",
        )
    service = context.service
    if JSON_TYPE in (context.request.header(b"accept") or b""):
        return json_response(await service.run_blocking(service.metrics.summary))
    return Response(200, await service.run_blocking(service.metrics.prometheus_text), CONTENT_TYPE)
