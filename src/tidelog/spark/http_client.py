"""The HTTP client with error messages for Spark users: they name the option to change and say to run the query again.

All requests of sources and sinks are safe to repeat: chunks are replaced, batches are numbered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from typing import Any, Final
from urllib.parse import quote

from tidelog.api_types import error_from_wire
from tidelog.client.core import REQUEST_TIMEOUT_S, RETRIED_STATUSES, RetryBackoff, ServerUnreachable, parse_error
from tidelog.client.http import Client
from tidelog.clock import Clock
from tidelog.errors import BadInput, Error, NotFound, TopicNotFound, Unavailable
from tidelog.types import Buffer

__all__ = ["RETRY_TIMEOUT_MS", "ServerHttpClient", "ServerUnreachable", "connection_error", "quote_name"]

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


class ServerHttpClient:
    def __init__(
        self,
        server: str,
        key: str | None,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        for_writes: bool = False,
        retry_ms: int = 0,
        clock: Clock | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """`retry_ms`: how long requests to an unreachable server are repeated; 0: not at all."""
        mapper = _SparkErrors(server, "written" if for_writes else "read")
        self._client = Client(
            server, key=key, timeout_s=timeout_s, retry_ms=retry_ms, clock=clock, pause=pause, error_mapper=mapper
        )

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: object) -> Any:
        return self._client.get(path, **query)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(path, body, retry_safe=True)

    def put(self, path: str, content: Buffer, content_type: str) -> Any:
        return self._client.put_bytes(path, content, content_type)

    def delete(self, path: str) -> Any:
        return self._client.delete(path)

    def get_bytes(self, path: str) -> bytes:
        return self._client.get_bytes(path)

    def get_range(self, path: str, lo: int, hi: int) -> bytes:
        return self._client.get_range(path, lo, hi)

    def stream(self, path: str, *, query: dict[str, object]) -> AbstractContextManager[HTTPResponse]:
        return self._client.stream(path, query=query)

    def new_backoff(self) -> RetryBackoff:
        return self._client.new_backoff()


def quote_name(topic: str) -> str:
    """Quote the name of a topic for a path."""
    return quote(topic, safe="")


def connection_error(server: str, error: Exception) -> ServerUnreachable:
    return _SparkErrors(server, "read").unreachable(str(error) or type(error).__name__)
