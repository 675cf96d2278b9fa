"""[shell] HTTP to a server, from the standard library: one connection, JSON, ranges of files, Arrow streams.

A request that a kept connection was too old for is sent once more on a new one: all of them read, or can be
repeated. Whatever else
goes wrong is one of our errors: the server's own words where it said any, else what to do about a server that is not
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

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
_decode = msgspec.json.decode


class Wire:
    def __init__(self, server: str, key: str | None, *, timeout_s: float = TIMEOUT_S, writes: bool = False) -> None:
        self._server, self._key, self._timeout_s = server, key, timeout_s
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
        with self.stream(path, method="PUT", body=content, headers={"Content-Type": kind}) as answer:
            return _decode(_whole(answer, self._server))

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path, {}, None)

    def _json(self, method: str, path: str, query: dict[str, object], body: bytes | None) -> Any:
        with self.stream(path, method=method, body=body, query=query) as answer:
            return _decode(_whole(answer, self._server))

    def part(self, path: str, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a file."""
        if lo >= hi:
            return b""
        with self.stream(path, headers={"Range": f"bytes={lo}-{hi - 1}"}) as answer:
            found = _whole(answer, self._server)
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


def _gone(server: str, error: Exception) -> Unavailable:
    reason = str(error) or type(error).__name__
    return Unavailable(
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
        return Unavailable(f"{server} says {status}, {message}; nothing was written, run the query again")
    return BadInput(f"{server}{path} says {status}, {message}; nothing was {done}")
