"""HTTP to a server, from the standard library: one connection, JSON, ranges of files, Arrow streams.

A request that a kept connection was too old for is sent once more on a new one, at once. A server that cannot be
reached, goes away in an answer, or says 502, 503, 504 or 429 is asked again after a pause that doubles, up to
`retry_ms` after the first failure: it may be restarting. All requests read, or can be repeated: chunks are replaced,
batches are numbered. Everything else that goes wrong is one of our errors: the server's own words where it said any.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import (
    BadInput,
    BatchConflict,
    CursorConflict,
    Error,
    GroupNotFound,
    NotFound,
    TopicNotFound,
    Unavailable,
)
from tidelog.types import Buffer

REQUEST_TIMEOUT_S: Final = 60.0
RETRY_TIMEOUT_MS: Final = 120_000  # a server that restarts replays its WAL first
_FIRST_PAUSE_MS: Final = 100  # before the second attempt; then twice as long each time
_MAX_PAUSE_MS: Final = 5_000
_RETRIED_STATUSES: Final = frozenset((429, 502, 503, 504))
_decode = msgspec.json.decode
_log = logging.getLogger("tidelog.spark")
T = TypeVar("T")


class ServerUnreachable(Unavailable):
    """A server that may be back soon: the request can be sent again."""


class RetryBackoff:
    """Pauses between the attempts of one request. `again` raises when the time is up."""

    def __init__(
        self,
        limit_ms: int,
        clock: Clock,
        pause: Callable[[float], object],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._limit_ms, self._clock, self._pause, self._jitter = limit_ms, clock, pause, jitter
        self._since_ms: int | None = None
        self._next_ms = _FIRST_PAUSE_MS

    def wait_or_raise(self, error: ServerUnreachable) -> None:
        """Wait before the next attempt, or raise the error of the last one."""
        now_ms = self._clock.monotonic_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
            if self._limit_ms:
                _log.warning("%s; trying again for %d s", error, self._limit_ms // 1000)
        left_ms = self._since_ms + self._limit_ms - now_ms
        if left_ms <= 0:
            raise error
        # Spread over half of the pause: the tasks of a query all lose the server in the same moment.
        wait_ms = min(self._next_ms * (0.5 + self._jitter() / 2), left_ms)
        self._next_ms = min(self._next_ms * 2, _MAX_PAUSE_MS)
        self._pause(wait_ms / 1000)

    def reset(self) -> None:
        """Start anew: something was received since the last failure."""
        self._since_ms, self._next_ms = None, _FIRST_PAUSE_MS


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
        """`retry_ms`: for how long a server that is away is asked again; 0: it is an error at once."""
        self._server, self._key, self._timeout_s = server, key, timeout_s
        self._retry_ms, self._clock, self._pause = retry_ms, clock or SystemClock(), pause or Event().wait
        self._refused_verb = "written" if for_writes else "read"  # what was not done, when something is refused
        self._connection: HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str, **query: object) -> Any:
        return self._request_json("GET", path, query, None)

    def post(self, path: str, body: object) -> Any:
        return self._request_json("POST", path, {}, msgspec.json.encode(body))

    def put(self, path: str, content: Buffer, kind: str) -> Any:
        def sent() -> Any:
            with self.stream(path, method="PUT", body=content, headers={"Content-Type": kind}) as answer:
                return _decode(_read_body(answer, self._server))

        return self._with_retries(sent)

    def delete(self, path: str) -> Any:
        return self._request_json("DELETE", path, {}, None)

    def _request_json(self, method: str, path: str, query: dict[str, object], body: bytes | None) -> Any:
        def sent() -> Any:
            with self.stream(path, method=method, body=body, query=query) as answer:
                return _decode(_read_body(answer, self._server))

        return self._with_retries(sent)

    def new_backoff(self) -> RetryBackoff:
        """Pauses for a caller that repeats a request itself: one that has read a part of the answer."""
        return RetryBackoff(self._retry_ms, self._clock, self._pause)

    def _with_retries(self, send: Callable[[], T]) -> T:
        retry = self.new_backoff()
        while True:
            try:
                return send()
            except ServerUnreachable as error:
                retry.wait_or_raise(error)

    def get_bytes(self, path: str) -> bytes:
        """All bytes of a file."""

        def sent() -> bytes:
            with self.stream(path) as answer:
                return _read_body(answer, self._server)

        return self._with_retries(sent)

    def get_range(self, path: str, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a file."""
        if lo >= hi:
            return b""

        def sent() -> bytes:
            with self.stream(path, headers={"Range": f"bytes={lo}-{hi - 1}"}) as answer:
                return _read_body(answer, self._server)

        found = self._with_retries(sent)
        if len(found) != hi - lo:
            raise Unavailable(
                f"{self._server}{path} has {len(found)} of the {hi - lo} bytes from {lo} on; nothing was written, run "
                "the query again"
            )
        return found

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        method: str = "GET",
        body: Buffer | None = None,
        headers: dict[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Iterator[HTTPResponse]:
        """An answer that is read while it comes."""
        asked = f"{path}?{urlencode(query)}" if query else path
        sent = {**({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
        if self._key is not None:
            sent["Authorization"] = f"Bearer {self._key}"
        answer = self._send(method, asked, body, sent)
        try:
            if answer.status >= 300:
                raise _error_from_response(
                    self._server, path, answer.status, _read_body(answer, self._server), self._refused_verb
                )
            yield answer
        finally:
            if not answer.isclosed():  # the last response was not read to its end: what follows here is not a response
                self.close()

    def _send(self, method: str, target: str, body: Buffer | None, headers: dict[str, str]) -> HTTPResponse:
        kept = self._connection is not None
        try:
            connection = self._connection = self._connection or self._connect()
            connection.request(method, target, body, headers)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            self.close()
            if kept:
                return self._send(method, target, body, headers)
            raise _connection_error(self._server, error) from error

    def _connect(self) -> HTTPConnection:
        parts = urlsplit(self._server)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=self._timeout_s)


def quote_name(topic: str) -> str:
    """A topic's name as part of a path."""
    return quote(topic, safe="")


def _read_body(response: HTTPResponse, server: str) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise _connection_error(server, error) from error


def _connection_error(server: str, error: Exception) -> ServerUnreachable:
    reason = str(error) or type(error).__name__
    return ServerUnreachable(
        f"the server {server} cannot be reached or went away ({reason}); nothing was written, "
        "start it and run the query again: it goes on where it stopped"
    )


connection_error = _connection_error


def _error_from_response(server: str, path: str, status: int, content: bytes, refused_verb: str) -> Error:
    """The server's refusal as one of our errors."""
    try:
        said = _decode(content)["error"]
        code, message = str(said["code"]), str(said["message"])
        detail = said.get("detail") or {}
        topic = str(detail.get("topic") or "")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        code, message, detail, topic = "", content[:200].decode("utf-8", "replace"), {}, ""
    if code == "topic_not_found":
        return TopicNotFound(topic or path)
    if code == "group_not_found":
        return GroupNotFound(topic, str(detail.get("group")))
    if code == "cursor_conflict":
        fields = {name: int(detail[name]) for name in ("seq", "position", "head_seq")}
        return CursorConflict(topic, str(detail["group"]), **fields, reason=message)
    if code == "batch_conflict":
        conflict = BatchConflict(
            topic, str(detail["writer"]), number=detail["number"], newest=detail["newest"], reason=""
        )
        conflict.args = (message,)
        return conflict
    if status in (401, 403):
        return BadInput(
            f"option key: {server} says {status}, {message}; nothing was {refused_verb}, give a key that may"
        )
    if status in (404, 416):
        return NotFound(f"{server}{path}: {message}")
    if status == 429 or status >= 500:
        kind = ServerUnreachable if status in _RETRIED_STATUSES else Unavailable
        return kind(f"{server} says {status}, {message}; nothing was written, run the query again")
    return BadInput(f"{server}{path} says {status}, {message}; nothing was {refused_verb}")
