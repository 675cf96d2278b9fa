"""Is it alive, is it ready."""

from __future__ import annotations

from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.http.seam import Response
from tidelog.server.metrics import health_of
from tidelog.version import __version__


def health(call: Call) -> Response:
    service = call.service
    uptime_ms = service.clock.monotonic_ms() - service.started_ms
    return ok({"status": "ok", "version": __version__, "uptime_ms": uptime_ms})


def ready(call: Call) -> Response:
    service = call.service
    if service.stopping.is_set():
        raise Problem("shutting_down", "the server is stopping; nothing was done, ask another one or retry")
    topics, health = len(service.engine.names()), health_of(service)
    # Degraded is still ready: what is intact is served. Names and errors are for those with a key, in the metrics.
    detail = {
        "ok": health.ok,
        "checkpoint_age_ms": health.checkpoint_age_ms,
        "lagging_topics": len(health.lagging),
        "corruptions": health.corruptions,
        "failing": {task.name: task.failing for task in health.tasks if task.failing},
    }
    return ok({"status": "ready", "wal_replay_complete": True, "topics": topics, "health": detail})
