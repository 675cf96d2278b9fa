"""[shell] HTTP to a server, from the standard library: one connection, JSON, ranges of files, Arrow streams.

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

TIMEOUT_S: Final = 60.0
RETRY_MS: Final = 120_000  # a server that restarts replays its WAL first
_PAUSE_MS: Final = 100  # before the second attempt; then twice as long each time
_PAUSE_MS_MAX: Final = 5_000
_RETRIED: Final = frozenset((429, 502, 503, 504))
_decode = msgspec.json.decode
_log = logging.getLogger("tidelog.spark")
T = TypeVar("T")


class Away(Unavailable):
    """A server that may be back soon: the request can be sent again."""


class Retry:
    """Pauses between the attempts of one request. `again` raises when the time is up."""

    def __init__(
        self,
        limit_ms: int,
        clock: Clock,
        pause: Callable[[float], object],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._limit_ms, self._clock, self._pause, self._chance = limit_ms, clock, pause, chance
        self._since_ms: int | None = None
        self._next_ms = _PAUSE_MS

    def again(self, error: Away) -> None:
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
        wait_ms = min(self._next_ms * (0.5 + self._chance() / 2), left_ms)
        self._next_ms = min(self._next_ms * 2, _PAUSE_MS_MAX)
        self._pause(wait_ms / 1000)

    def progress(self) -> None:
        """Start anew: something was received since the last failure."""
        self._since_ms, self._next_ms = None, _PAUSE_MS


class Wire:
    def __init__(
        self,
        server: str,
        key: str | None,
        *,
        timeout_s: float = TIMEOUT_S,
        writes: bool = False,
        retry_ms: int = 0,
        clock: Clock | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """`retry_ms`: for how long a server that is away is asked again; 0: it is an error at once."""
        self._server, self._key, self._timeout_s = server, key, timeout_s
        self._retry_ms, self._clock, self._pause = retry_ms, clock or SystemClock(), pause or Event().wait
        self._done = "written" if writes else "read"  # what was not done, when something is refused
        self._connection: HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str, **query: object) -> Any:
        return self._json("GET", path, query, None)

    def post(self, path: str, body: object) -> Any:
        return self._json("POST", path, {}, msgspec.json.encode(body))

    def put(self, path: str, content: Buffer, kind: str) -> Any:
        def sent() -> Any:
            with self.stream(path, method="PUT", body=content, headers={"Content-Type": kind}) as answer:
                return _decode(_whole(answer, self._server))

        return self._tried(sent)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path, {}, None)

    def _json(self, method: str, path: str, query: dict[str, object], body: bytes | None) -> Any:
        def sent() -> Any:
            with self.stream(path, method=method, body=body, query=query) as answer:
                return _decode(_whole(answer, self._server))

        return self._tried(sent)

    def retry(self) -> Retry:
        """Pauses for a caller that repeats a request itself: one that has read a part of the answer."""
        return Retry(self._retry_ms, self._clock, self._pause)

    def _tried(self, sent: Callable[[], T]) -> T:
        retry = self.retry()
        while True:
            try:
                return sent()
            except Away as error:
                retry.again(error)

    def content(self, path: str) -> bytes:
        """All bytes of a file."""

        def sent() -> bytes:
            with self.stream(path) as answer:
                return _whole(answer, self._server)

        return self._tried(sent)

    def part(self, path: str, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a file."""
        if lo >= hi:
            return b""

        def sent() -> bytes:
            with self.stream(path, headers={"Range": f"bytes={lo}-{hi - 1}"}) as answer:
                return _whole(answer, self._server)

        found = self._tried(sent)
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
        answer = self._answer(method, asked, body, sent)
        try:
            if answer.status >= 300:
                raise _told(self._server, path, answer.status, _whole(answer, self._server), self._done)
            yield answer
        finally:
            if not answer.isclosed():  # somebody stopped in the middle: what follows here is not an answer
                self.close()

    def _answer(self, method: str, asked: str, body: Buffer | None, headers: dict[str, str]) -> HTTPResponse:
        kept = self._connection is not None
        try:
            connection = self._connection = self._connection or self._connect()
            connection.request(method, asked, body, headers)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            self.close()
            if kept:
                return self._answer(method, asked, body, headers)
            raise _gone(self._server, error) from error

    def _connect(self) -> HTTPConnection:
        parts = urlsplit(self._server)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=self._timeout_s)


def name(topic: str) -> str:
    """A topic's name as part of a path."""
    return quote(topic, safe="")


def _whole(answer: HTTPResponse, server: str) -> bytes:
    try:
        return answer.read()
    except (OSError, HTTPException) as error:
        raise _gone(server, error) from error


def _gone(server: str, error: Exception) -> Away:
    reason = str(error) or type(error).__name__
    return Away(
        f"the server {server} cannot be reached or went away ({reason}); nothing was written, "
        "start it and run the query again: it goes on where it stopped"
    )


broken = _gone


def _told(server: str, path: str, status: int, content: bytes, done: str) -> Error:
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
        return BadInput(f"option key: {server} says {status}, {message}; nothing was {done}, give a key that may")
    if status in (404, 416):
        return NotFound(f"{server}{path}: {message}")
    if status == 429 or status >= 500:
        kind = Away if status in _RETRIED else Unavailable
        return kind(f"{server} says {status}, {message}; nothing was written, run the query again")
    return BadInput(f"{server}{path} says {status}, {message}; nothing was {done}")
