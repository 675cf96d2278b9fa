"""Is it alive, is it ready."""

from __future__ import annotations

from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.http.seam import Response
from tidelog.version import __version__


def health(call: Call) -> Response:
    service = call.service
    uptime_ms = service.clock.monotonic_ms() - service.started_ms
    return ok({"status": "ok", "version": __version__, "uptime_ms": uptime_ms})


def ready(call: Call) -> Response:
    service = call.service
    if service.stopping.is_set():
        raise Problem("shutting_down", "the server is stopping; nothing was done, ask another one or retry")
    return ok({"status": "ready", "wal_replay_complete": True, "topics": len(service.engine.names())})
