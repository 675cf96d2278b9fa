"""The HTTP client with error messages for Spark users: they name the option to change and say to run the query again.

All requests of sources and sinks are safe to repeat: chunks are replaced, batches are numbered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote

from tidelog.api_types import error_from_wire
from tidelog.client.core import REQUEST_TIMEOUT_S, RETRIED_STATUSES, ServerUnreachable, parse_error
from tidelog.client.http import Client
from tidelog.clock import Clock
from tidelog.errors import BadInput, Error, NotFound, TopicNotFound, Unavailable

__all__ = ["RETRY_TIMEOUT_MS", "Client", "ServerUnreachable", "connection_error", "open_client", "quote_name"]

RETRY_TIMEOUT_MS: Final = 120_000  # a server that restarts replays its WAL first


class _SparkErrors:
    def __init__(self, server: str, refused_verb: str) -> None:
        self._server, self._refused_verb = server, refused_verb

    def unreachable(self, reason: str) -> ServerUnreachable:
        return ServerUnreachable(
            f"the server {self._server} cannot be reached or went away ({reason}); nothing was written, "
            "start it and run the query again: it continues where it stopped"
        )

    lost = unreachable

    def refused(self, path: str, status: int, headers: Mapping[str, str], content: bytes) -> Error:  # noqa: ARG002
        fields = parse_error(content)
        code, message, detail = fields or ("", content[:200].decode("utf-8", "replace"), {})
        if code == "topic_not_found":
            return TopicNotFound(str(detail.get("topic") or path))
        if status in (401, 403):
            return BadInput(
                f"option key: {self._server} says {status}, {message}; nothing was {self._refused_verb}, give a key "
                "that may"
            )
        is_about_topics = status in (404, 409, 422)
        if is_about_topics and (error := error_from_wire(code, message, detail)) is not None:
            return error
        if status in (404, 416):
            return NotFound(f"{self._server}{path}: {message}")
        if status == 429 or status >= 500:
            kind = ServerUnreachable if status in RETRIED_STATUSES else Unavailable
            return kind(f"{self._server} says {status}, {message}; nothing was written, run the query again")
        return BadInput(f"{self._server}{path} says {status}, {message}; nothing was {self._refused_verb}")


def open_client(
    server: str,
    key: str | None,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    for_writes: bool = False,
    retry_ms: int = 0,
    clock: Clock | None = None,
    pause: Callable[[float], object] | None = None,
) -> Client:
    """Return a client with these messages. `retry_ms`: how long requests to an unreachable server are repeated; 0: not
    at all."""
    mapper = _SparkErrors(server, "written" if for_writes else "read")
    return Client(
        server, key=key, timeout_s=timeout_s, retry_ms=retry_ms, clock=clock, pause=pause, error_mapper=mapper
    )


def quote_name(topic: str) -> str:
    """Quote the name of a topic for a path."""
    return quote(topic, safe="")


def connection_error(server: str, error: Exception) -> ServerUnreachable:
    return _SparkErrors(server, "read").unreachable(str(error) or type(error).__name__)
