"""The blocking HTTP client: kept connections, used from any thread.

    request ──► an idle connection, or a new one ──► response ──► idle again

`ClientCore` decides what is sent and repeated; this module has the sockets. A request on a kept connection that fails
before a response is sent once more on a new one, if it is safe to repeat.

A forked child closes its copies of the connections and opens its own: two processes that shared one would read each
other's responses. The parent's connections are unaffected.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event, Lock
from typing import Any, Final, Self, TypeVar

import msgspec

from tidelog.client.core import (
    JSON,
    REQUEST_TIMEOUT_S,
    Call,
    ClientCore,
    ConnectionLost,
    ErrorMapper,
    NotConnected,
    Pause,
    Request,
    Response,
    RetryBackoff,
    Steps,
)
from tidelog.client.wire import quote_name
from tidelog.clock import Clock, SystemClock
from tidelog.disk import process
from tidelog.errors import Closed, Unavailable
from tidelog.types import Buffer

_IDLE_CONNECTIONS_MAX: Final = 8
_ERROR_STATUS_MIN: Final = 300
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


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
        self._clock, self._pause = clock or SystemClock(), pause or Event().wait
        self.core = ClientCore(url, key=key, retry_ms=retry_ms, clock=self._clock, error_mapper=error_mapper)
        self.url = url
        self._connection_class = HTTPSConnection if self.core.address.is_tls else HTTPConnection
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._is_closed = False
        self._pid = process.process_id()
        process.register(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Calls of other threads that are under way end; later ones raise Closed."""
        self._check_process()
        with self._lock:
            self._is_closed = True
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

    @property
    def repeats_for_ms(self) -> int:
        """The longest time from the first attempt of a request to the last one."""
        return self.core.retry_ms + int(self._timeout_s * 1000)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────

    def call(self, call: Call[T]) -> T:
        """Run a call to its end and return its result."""
        return self._perform(self.core.run(call))

    def _perform(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self._pause(step.seconds)
                    step = next(steps)
                    continue
                try:
                    response = self._exchange_whole(step)
                except (ConnectionLost, NotConnected) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return self._send_for_json(Request("GET", path, query=query, retry_safe=True))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """For a request that does no harm when it is sent again, because its response was lost."""
        return self._send_for_json(Request("POST", path, _encode(body), retry_safe=True))

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._send_for_json(Request("PUT", path, _encode(body), retry_safe=True))

    def put_bytes(self, path: str, content: Buffer, content_type: str) -> dict[str, Any]:
        headers = {"Content-Type": content_type}
        return self._send_for_json(Request("PUT", path, content, headers=headers, retry_safe=True))

    def delete(self, path: str) -> dict[str, Any]:
        return self._send_for_json(Request("DELETE", path, retry_safe=True))

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
        accept: str = JSON,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> bytes:
        """Return the body of a successful response. Raises as `ClientCore.attempts`."""
        request = Request(method, path, body, query or {}, headers or {}, retry_safe, accept)
        return self._perform(self.core.attempts(request)).content

    def _send_for_json(self, request: Request) -> dict[str, Any]:
        return self._perform(self.core.attempts(request)).json()

    @contextmanager
    def stream(
        self, path: str, *, query: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a GET request and yield the response, to be read while it arrives. It is not repeated after that."""
        request = Request("GET", path, query=query or {}, headers=headers or {}, retry_safe=True, accept="*/*")
        try:
            connection, response, _ = self._send(request)
        except ConnectionLost as error:
            raise self.core.errors.lost(str(error)) from error
        except NotConnected as error:
            raise self.core.errors.unreachable(str(error)) from None
        try:
            if response.status >= _ERROR_STATUS_MIN:
                content = _read(response)
                raise self.core.errors.refused(path, response.status, _headers_of(response), content)
            yield response
        except ConnectionLost as error:
            raise self.core.errors.lost(str(error)) from error
        finally:
            # The end of a stream that was shut down looks like that of a whole response.
            self._release(connection, is_reusable=response.isclosed() and not response.will_close)

    def new_backoff(self) -> RetryBackoff:
        """Pauses for a caller that repeats a stream itself, from the point where it ended."""
        return RetryBackoff(self.core.retry_ms, self._clock, self._pause)

    # ── connections ───────────────────────────────────────────────────────────────────────────

    def _exchange_whole(self, request: Request) -> Response:
        """Send a request and read its response. Raises ConnectionLost or NotConnected."""
        started_ms = self._clock.monotonic_ms()
        connection, response, is_repetition = self._send(request)
        try:
            content = _read(response)
        finally:
            self._release(connection, is_reusable=response.isclosed())
        elapsed_ms = self._clock.monotonic_ms() - started_ms
        return Response(response.status, _headers_of(response), content, elapsed_ms, is_repetition)

    def _send(self, request: Request) -> tuple[HTTPConnection, HTTPResponse, bool]:
        """Send a request and read the head of its response; once more where a kept connection was lost, which the last
        value says."""
        try:
            return *self._send_once(request), False
        except ConnectionLost as error:
            if not (error.may_be_stale and request.retry_safe and request.chunks is None):
                raise
        try:
            return *self._send_once(request, new_connection=True), True
        except NotConnected as error:
            raise ConnectionLost(str(error)) from None  # the first attempt may have been executed

    def _send_once(self, request: Request, *, new_connection: bool = False) -> tuple[HTTPConnection, HTTPResponse]:
        target, headers = self.core.head(request)
        connection = self._take_connection(new_connection)
        is_kept = connection.sock is not None
        timeout_s = self._timeout_s + request.wait_s
        try:
            connection.timeout = timeout_s
            if not is_kept:
                connection.connect()
            elif connection.sock.gettimeout() != timeout_s:
                connection.sock.settimeout(timeout_s)
        except OSError as error:
            self._release(connection, is_reusable=False)
            raise NotConnected(str(error) or type(error).__name__) from None
        try:
            if request.chunks is None:
                connection.request(request.method, target, request.body, headers)
            else:
                assert not isinstance(request.chunks, AsyncIterable), "a blocking client takes blocking iterables"
                headers["Transfer-Encoding"] = "chunked"
                connection.request(request.method, target, iter(request.chunks), headers, encode_chunked=True)
            return connection, connection.getresponse()
        except (OSError, HTTPException) as error:
            early = _early_response(connection, request)
            if early is not None:
                return connection, early
            self._release(connection, is_reusable=False)
            raise ConnectionLost(str(error) or type(error).__name__, may_be_stale=is_kept) from None
        except BaseException:
            self._release(connection, is_reusable=False)
            raise

    def _take_connection(self, new_connection: bool) -> HTTPConnection:
        self._check_process()
        if self._is_closed:
            raise Closed(f"the client of {self.url} is closed; nothing was done, connect again")
        address = self.core.address
        with self._lock:
            has_idle = bool(self._idle) and not new_connection
            connection = (
                self._idle.pop()
                if has_idle
                else self._connection_class(address.host, address.port, timeout=self._timeout_s)
            )
            self._busy.add(connection)
        return connection

    def _release(self, connection: HTTPConnection, *, is_reusable: bool) -> None:
        """Keep the connection, or close it: unread bytes of a response would be read as the next one."""
        with self._lock:
            self._busy.discard(connection)
            if is_reusable and not self._is_closed and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()


def _early_response(connection: HTTPConnection, request: Request) -> HTTPResponse | None:
    """The response that a server sent before it had read a streamed body, such as that it is too long."""
    if request.chunks is None or connection.sock is None:
        return None
    try:
        response = HTTPResponse(connection.sock, method=request.method)
        response.begin()
        response.will_close = True
        return response
    except (OSError, HTTPException):
        return None


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise ConnectionLost(str(error) or type(error).__name__) from None


def _headers_of(response: HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def topic_path(topic: str, rest: str = "") -> str:
    return f"/v0/topics/{quote_name('the name of a topic', topic)}{rest}"
