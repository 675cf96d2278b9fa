"""[shell] Requests to a server over connections that are kept, from any thread.

    request ──► an idle connection, or a new one ──► answer ──► idle again
                └ broken where nothing was answered: once more on a new one, if asking twice does no harm

A forked child closes its copies of the connections and opens its own: two processes that shared one would read each
other's answers. The parent's connections are unaffected.

An error of the server is raised as the engine in this process would raise it: the same class, the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Lock
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

import msgspec

from tidelog import errors
from tidelog.client.refusals import refusal
from tidelog.disk import fork
from tidelog.errors import BadInput, Error, InDoubt, Refused, Unavailable
from tidelog.formats.json_text import from_json

_TIMEOUT_S: Final = 60.0
_IDLE_MAX: Final = 8
_OK: Final = 300
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _Unanswered(Exception):
    """A connection that ended before there was an answer."""


class Client:
    """A server at `url`, as `http://127.0.0.1:4000`. `key`: where it asks for one."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise BadInput(f"{url!r:.200} is no address of a server; nothing was done, write http://host:port")
        self.url = url
        self._make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._lock = Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._pid = fork.process_id()
        fork.guard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._check_process()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def forked(self, pid: int) -> None:  # noqa: ARG002
        """Close this child's copies of its parent's connections. Nothing is sent on them."""
        inherited = [*self._idle, *self._busy]
        self._lock, self._idle, self._busy = Lock(), [], set()
        self._pid = fork.process_id()
        for connection in inherited:
            connection.close()

    def _check_process(self) -> None:
        if self._pid != fork.process_id():  # a fork by C code runs no hooks
            self.forked(self._pid)

    def get(self, path: str) -> dict[str, Any]:
        return self._object(self.request("GET", path, again=True))

    def post(self, path: str, body: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
        """`again`: it may be sent twice where nothing was answered the first time."""
        return self._object(self.request("POST", path, _encode(body), again=again))

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object(self.request("PUT", path, _encode(body), again=True))

    def delete(self, path: str) -> dict[str, Any]:
        return self._object(self.request("DELETE", path, again=True))

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        again: bool,
        accept: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of a good answer. Raises what the server says, Unavailable, and InDoubt where it said nothing."""
        sent = {**self._headers, "Accept": accept}
        if body is not None:
            sent["Content-Type"] = "application/json"
        sent |= headers or {}
        try:
            status, answer = self._ask(method, path, body, sent)
        except _Unanswered as first:
            if not again:
                raise InDoubt(
                    f"{self.url} closed the connection without an answer ({first}); nobody knows whether it was "
                    "written, look before you retry"
                ) from None
            try:
                status, answer = self._ask(method, path, body, sent, fresh=True)
            except _Unanswered as second:
                raise Unavailable(
                    f"{self.url} does not answer ({second}); nothing is known to be done, retry"
                ) from None
        if status >= _OK:
            raise _error(status, answer)
        return answer

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], *, fresh: bool = False
    ) -> tuple[int, bytes]:
        connection = self._taken(fresh)
        try:
            return self._asked_over(connection, method, path, body, headers)
        finally:
            with self._lock:
                self._busy.discard(connection)

    def _asked_over(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        try:
            if connection.sock is None:
                connection.connect()
        except OSError as error:
            raise Unavailable(f"{self.url} cannot be reached ({error}); nothing was done, start it or retry") from None
        try:
            connection.request(method, self._base + path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            connection.close()
            raise _Unanswered(str(error) or type(error).__name__) from None
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return response.status, answer
        connection.close()
        return response.status, answer

    def _taken(self, fresh: bool) -> HTTPConnection:
        self._check_process()
        with self._lock:
            idle = bool(self._idle) and not fresh
            connection = self._idle.pop() if idle else self._make(self._host, self._port, timeout=self._timeout_s)
            self._busy.add(connection)
        return connection

    def _object(self, answer: bytes) -> dict[str, Any]:
        try:
            found = from_json(answer)
        except msgspec.DecodeError:
            found = None
        if not isinstance(found, dict):
            raise Unavailable(f"{self.url} answers, but is no Tidelog server; check the address")
        return found


def topic_path(topic: str, rest: str = "") -> str:
    return f"/v0/topics/{quote(topic, safe='')}{rest}"


def _error(status: int, answer: bytes) -> Error:
    """What the server refused, as the same error that the engine would raise."""
    try:
        told = _decode(answer)["error"]
        code, message, detail = str(told["code"]), str(told["message"]), told.get("detail") or {}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return Unavailable(f"the server answered {status} and nothing that can be read; check the address")
    match code:
        case "topic_not_found":
            return errors.TopicNotFound(str(detail.get("topic", "")))
        case "not_a_queue":
            return errors.NotAQueue(str(detail.get("topic", "")))
        case "invalid_request" | "batch_too_large" | "record_too_large":
            return BadInput(message)
        case "throttled" | "not_ready" | "shutting_down":
            return Unavailable(message)
        case "disk_full":
            return errors.DiskFull(message)
        case "internal" if detail.get("written") is False:  # its disk failed before, and it knows that
            damaged = errors.Damaged(message)
            damaged.written = False
            return damaged
        case "internal":
            return InDoubt(message)
        case _:
            return refusal(code, message, detail) or Refused(message)
