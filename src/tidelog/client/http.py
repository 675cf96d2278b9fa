"""The HTTP client of the CLI, Spark jobs and users: kept connections, used from any thread.

    request ──► an idle connection, or a new one ──► response ──► idle again

A request on a kept connection that fails before a response is sent once more on a new one, if it is safe to repeat.
With `retry_ms`, safe requests are also repeated after a pause that doubles while the server cannot be reached, breaks
off a response, or returns 429, 502, 503 or 504: it may be restarting. Without it, a safe request is repeated once.

A forked child closes its copies of the connections and opens its own: two processes that shared one would read each
other's responses. The parent's connections are unaffected.

An error of the server is raised as the embedded engine would raise it: the same class, the same text.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event, Lock
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from tidelog import errors
from tidelog.api_types import error_from_wire
from tidelog.clock import Clock, SystemClock
from tidelog.disk import process
from tidelog.engine.batch_encoder import from_json
from tidelog.errors import BadInput, Error, InDoubt, Refused, Unavailable
from tidelog.types import Buffer

REQUEST_TIMEOUT_S: Final = 60.0
RETRIED_STATUSES: Final = frozenset((429, 502, 503, 504))
_FIRST_PAUSE_MS: Final = 100  # before the second attempt; then twice as long each time
_MAX_PAUSE_MS: Final = 5_000
_IDLE_CONNECTIONS_MAX: Final = 8
_ERROR_STATUS_MIN: Final = 300
_JSON: Final = "application/json"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_log = logging.getLogger("tidelog.client")
T = TypeVar("T")


class ServerUnreachable(Unavailable):
    """The server cannot be reached now and may be back soon: the request can be sent again."""


class _ConnectionLost(Exception):
    """The connection ended before the whole response arrived."""


class _ErrorResponse(Exception):
    """A response with an error status, and the error to raise for it."""

    def __init__(self, status: int, error: Error) -> None:
        self.status, self.error = status, error


class RetryBackoff:
    """Pauses between the attempts of one request, for at most `limit_ms` after the first failure."""

    def __init__(
        self,
        limit_ms: int,
        clock: Clock,
        pause: Callable[[float], object],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._limit_ms, self._clock, self._pause, self._jitter = limit_ms, clock, pause, jitter
        self._first_failure_ms: int | None = None
        self._next_ms = _FIRST_PAUSE_MS

    def wait_or_raise(self, error: Error) -> None:
        """Wait before the next attempt, or raise the error of the last one."""
        now_ms = self._clock.monotonic_ms()
        if self._first_failure_ms is None:
            self._first_failure_ms = now_ms
            if self._limit_ms:
                _log.warning("%s; trying again for %d s", error, self._limit_ms // 1000)
        left_ms = self._first_failure_ms + self._limit_ms - now_ms
        if left_ms <= 0:
            raise error
        # Random over half of the pause: the tasks of a Spark query all lose the server at the same moment.
        wait_ms = min(self._next_ms * (0.5 + self._jitter() / 2), left_ms)
        self._next_ms = min(self._next_ms * 2, _MAX_PAUSE_MS)
        self._pause(wait_ms / 1000)

    def reset(self) -> None:
        """Start again: data was received since the last failure."""
        self._first_failure_ms, self._next_ms = None, _FIRST_PAUSE_MS


class ErrorMapper(Protocol):
    """Builds the errors of a client; a caller with a vocabulary of its own brings one."""

    def unreachable(self, reason: str) -> ServerUnreachable:
        """No connection; nothing was sent."""
        ...

    def lost(self, reason: str) -> ServerUnreachable:
        """The connection ended before the whole response, of a request that is safe to repeat."""
        ...

    def refused(self, path: str, status: int, content: bytes) -> Error:
        """A response with an error status."""
        ...


class Client:
    """A server at `url`, such as `http://127.0.0.1:4000`.

    Args:
        key: the API key, where the server needs one.
        retry_ms: how long safe requests are repeated while the server is away; 0: not at all.
        error_mapper: builds the errors; by default those of the embedded engine.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        retry_ms: int = 0,
        clock: Clock | None = None,
        pause: Callable[[float], object] | None = None,
        error_mapper: ErrorMapper | None = None,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise BadInput(f"{url!r:.200} is no address of a server; nothing was done, write http://host:port")
        self.url = url
        self._connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._retry_ms, self._clock, self._pause = retry_ms, clock or SystemClock(), pause or Event().wait
        self._errors = error_mapper or _EngineErrors(url)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._lock = Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._pid = process.process_id()
        process.register(self)

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

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        """Close this child's copies of its parent's connections. Nothing is sent on them."""
        inherited = [*self._idle, *self._busy]
        self._lock, self._idle, self._busy = Lock(), [], set()
        self._pid = process.process_id()
        for connection in inherited:
            connection.close()

    def _check_process(self) -> None:
        if self._pid != process.process_id():  # a fork by C code runs no hooks
            self.on_fork(self._pid)

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return self._parse_object(self.request("GET", path, retry_safe=True, query=query))

    def post(self, path: str, body: Mapping[str, Any], *, retry_safe: bool = False) -> dict[str, Any]:
        """`retry_safe`: a second request does no harm where the first one got no response."""
        return self._parse_object(self.request("POST", path, _encode(body), retry_safe=retry_safe))

    def post_bytes(self, path: str, content: Buffer, headers: Mapping[str, str], *, retry_safe: bool) -> dict[str, Any]:
        return self._parse_object(self.request("POST", path, content, retry_safe=retry_safe, headers=headers))

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._parse_object(self.request("PUT", path, _encode(body), retry_safe=True))

    def put_bytes(self, path: str, content: Buffer, content_type: str) -> dict[str, Any]:
        headers = {"Content-Type": content_type}
        return self._parse_object(self.request("PUT", path, content, retry_safe=True, headers=headers))

    def delete(self, path: str) -> dict[str, Any]:
        return self._parse_object(self.request("DELETE", path, retry_safe=True))

    def get_bytes(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        return self.request("GET", path, retry_safe=True, accept="*/*", headers=headers)

    def get_range(self, path: str, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a file."""
        if lo >= hi:
            return b""
        content = self.get_bytes(path, {"Range": f"bytes={lo}-{hi - 1}"})
        if len(content) != hi - lo:
            raise Unavailable(
                f"{self.url}{path} has {len(content)} of the {hi - lo} bytes from {lo} on; nothing was written, run "
                "the query again"
            )
        return content

    def request(
        self,
        method: str,
        path: str,
        body: Buffer | None = None,
        *,
        retry_safe: bool,
        accept: str = _JSON,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> bytes:
        """Return the body of a successful response.

        Raises:
            InDoubt: there was no response, and the request is not safe to repeat.
            Unavailable: the server cannot be reached.
            Error: any other error that the server returned.
        """
        sent_headers = {"Accept": accept, **(headers or {})}
        backoff = self.new_backoff()
        may_repeat = not self._retry_ms  # once, at once; otherwise the backoff repeats it
        while True:
            try:
                with self._exchange(method, path, body, sent_headers, query, retry_safe) as response:
                    return _read(response)
            except _ConnectionLost as error:
                if not retry_safe:
                    raise InDoubt(
                        f"{self.url} closed the connection without a response ({error}); it is unknown whether "
                        "anything was written, check before you retry"
                    ) from None
                if not may_repeat:
                    backoff.wait_or_raise(self._errors.lost(str(error)))
                may_repeat = False
            except ServerUnreachable as error:
                if not retry_safe:
                    raise
                backoff.wait_or_raise(error)
            except _ErrorResponse as response_error:
                if not retry_safe or response_error.status not in RETRIED_STATUSES:
                    raise response_error.error from None
                backoff.wait_or_raise(response_error.error)

    @contextmanager
    def stream(self, path: str, *, query: Mapping[str, object] | None = None) -> Iterator[HTTPResponse]:
        """Send a GET request and yield the response, to be read while it arrives. It is not repeated after that."""
        try:
            with self._exchange("GET", path, None, {}, query, retry_safe=True) as response:
                yield response
        except _ConnectionLost as error:
            raise self._errors.lost(str(error)) from error
        except _ErrorResponse as response_error:
            raise response_error.error from None

    def new_backoff(self) -> RetryBackoff:
        """Pauses for a caller that repeats a stream itself, from the point where it ended."""
        return RetryBackoff(self._retry_ms, self._clock, self._pause)

    # ── connections ───────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: Buffer | None,
        headers: Mapping[str, str],
        query: Mapping[str, object] | None,
        retry_safe: bool,
    ) -> Iterator[HTTPResponse]:
        """Send a request and yield its response. Raises _ConnectionLost, ServerUnreachable or _ErrorResponse."""
        target = f"{path}?{urlencode(query)}" if query else path
        sent_headers = {**self._headers, **({} if body is None else {"Content-Type": _JSON}), **headers}
        connection, response = self._send(method, target, body, sent_headers, retry_safe=retry_safe)
        try:
            if response.status >= _ERROR_STATUS_MIN:
                raise _ErrorResponse(response.status, self._errors.refused(path, response.status, _read(response)))
            yield response
        finally:
            self._release(connection, is_reusable=response.isclosed())

    def _send(
        self,
        method: str,
        target: str,
        body: Buffer | None,
        headers: dict[str, str],
        *,
        retry_safe: bool,
        new_connection: bool = False,
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self._take_connection(new_connection)
        is_kept = connection.sock is not None
        try:
            if not is_kept:
                connection.connect()
        except OSError as error:
            self._release(connection, is_reusable=False)
            raise self._errors.unreachable(str(error) or type(error).__name__) from None
        try:
            connection.request(method, self._base + target, body, headers)
            return connection, connection.getresponse()
        except (OSError, HTTPException) as error:
            self._release(connection, is_reusable=False)
            if is_kept and retry_safe:
                return self._send(method, target, body, headers, retry_safe=True, new_connection=True)
            raise _ConnectionLost(str(error) or type(error).__name__) from None
        except BaseException:
            self._release(connection, is_reusable=False)
            raise

    def _take_connection(self, new_connection: bool) -> HTTPConnection:
        self._check_process()
        with self._lock:
            has_idle = bool(self._idle) and not new_connection
            connection = (
                self._idle.pop()
                if has_idle
                else self._connection_class(self._host, self._port, timeout=self._timeout_s)
            )
            self._busy.add(connection)
        return connection

    def _release(self, connection: HTTPConnection, *, is_reusable: bool) -> None:
        """Keep the connection, or close it: unread bytes of a response would be read as the next one."""
        with self._lock:
            self._busy.discard(connection)
            if is_reusable and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _parse_object(self, content: bytes) -> dict[str, Any]:
        try:
            value = from_json(content)
        except msgspec.DecodeError:
            value = None
        if not isinstance(value, dict):
            raise Unavailable(f"{self.url} responds, but is no Tidelog server; check the address")
        return value


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise _ConnectionLost(str(error) or type(error).__name__) from None


def topic_path(topic: str, rest: str = "") -> str:
    return f"/v0/topics/{quote(topic, safe='')}{rest}"


def parse_error(content: bytes) -> tuple[str, str, dict[str, Any]] | None:
    """The code, message and detail of an error response; None where the body is none of a Tidelog server."""
    try:
        fields = _decode(content)["error"]
        return str(fields["code"]), str(fields["message"]), fields.get("detail") or {}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None


class _EngineErrors:
    """Errors of the server as the embedded engine raises them."""

    def __init__(self, url: str) -> None:
        self._url = url

    def unreachable(self, reason: str) -> ServerUnreachable:
        return ServerUnreachable(f"{self._url} cannot be reached ({reason}); nothing was done, start it or retry")

    def lost(self, reason: str) -> ServerUnreachable:
        return ServerUnreachable(f"{self._url} does not respond ({reason}); it is unknown what was done, retry")

    def refused(self, path: str, status: int, content: bytes) -> Error:  # noqa: ARG002
        fields = parse_error(content)
        if fields is None:
            return Unavailable(f"the server returned {status} and no readable error; check the address")
        code, message, detail = fields
        match code:
            case "invalid_request" | "batch_too_large" | "record_too_large":
                return BadInput(message)
            case "throttled" | "not_ready" | "shutting_down" | "store_unavailable":
                return Unavailable(message)
            case "disk_full":
                return errors.DiskFull(message)
            case "internal" if detail.get("written") is False:  # its disk failed before, and the server knows it
                damaged = errors.Damaged(message)
                damaged.written = False
                return damaged
            case "internal":
                return InDoubt(message)
            case _:
                return error_from_wire(code, message, detail) or Refused(message)
