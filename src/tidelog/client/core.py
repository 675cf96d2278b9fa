"""The HTTP client without I/O: what is sent, what a response means, and when a request is repeated.

    calls of topics, queues, …           `ClientCore`                            a shell
    ───────────────────────────          ───────────────────────────             ──────────────────────────────
    yield Request ─────────────────────► yield Request, again after a ─────────► sends it; waits; reads the response
                  ◄──── Response or the  failure: yield Pause       ◄──────────  Response, ConnectionLost, …
                        error to raise

A *call* is a generator that yields requests, receives responses and returns a typed result (`Call`). `ClientCore.run`
drives one call and yields the steps that need a socket or a clock; a shell performs these, blocking (`client.http`) or
on an event loop (`client.aio`). So each operation, the retry policy and the errors exist once.

**Retries.** A request that is safe to repeat is repeated after a pause that doubles, for `retry_ms` in total, while the
server cannot be reached, breaks off a response, or returns 429, 502, 503 or 504; never sooner than its Retry-After. A
429 that names a limit of the engine is not repeated: waiting does not raise a limit. Without `retry_ms` a request whose
connection broke is repeated once, at once. A request that is not safe to repeat and whose response was lost is InDoubt.

An error of the server is raised as the embedded engine would raise it: the same class, the same text, the same
attributes. The header `Tidelog-Error` names the class where the code of the contract is shared by several.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from tidelog import errors
from tidelog.api_types import ERROR_HEADER, NO_ROUTE, error_from_wire
from tidelog.clock import Clock
from tidelog.engine.batch_encoder import from_json
from tidelog.errors import BadInput, Error, InDoubt, Refused, Unauthorized, Unavailable, Unsupported
from tidelog.types import Buffer
from tidelog.version import __version__

REQUEST_TIMEOUT_S: Final = 60.0
RETRIED_STATUSES: Final = frozenset((429, 502, 503, 504))
JSON: Final = "application/json"
_FIRST_PAUSE_MS: Final = 100  # before the second attempt; then twice as long each time
_MAX_PAUSE_MS: Final = 5_000
_ERROR_STATUS_MIN: Final = 300
_NOT_MODIFIED: Final = 304
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_log = logging.getLogger("tidelog.client")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `path` begins with /v0 and is encoded."""

    method: str
    path: str
    body: Buffer | None = None
    query: Mapping[str, object] = field(default_factory=dict)  # None: the parameter is not sent
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_safe: bool = False  # a second request does no harm where the first one got no response
    accept: str = JSON
    chunks: Iterable[Buffer] | AsyncIterable[Buffer] | None = None  # a body that is sent in pieces; never repeated
    wait_s: float = 0.0  # how much longer than usual the response may take: a long poll
    reads: bool = False  # it changes nothing, although it is a POST

    @property
    def is_read(self) -> bool:
        return self.reads or self.method in ("GET", "HEAD")

    def target(self, base: str) -> str:
        given = {name: value for name, value in self.query.items() if value is not None}
        try:
            text = urlencode(
                {name: _flag(value) if isinstance(value, bool) else value for name, value in given.items()}, True
            )
        except (TypeError, UnicodeEncodeError) as error:
            raise BadInput(f"an argument has a type that cannot be sent ({error}); nothing was done") from None
        return f"{base}{self.path}{'&' if '?' in self.path else '?'}{text}" if text else base + self.path


def _flag(value: bool) -> str:
    return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    elapsed_ms: int = 0  # from the request to the end of the response
    is_repetition: bool = False  # the request was sent twice: the kept connection was lost before a response

    def json(self) -> dict[str, Any]:
        try:
            value = from_json(self.content)
        except msgspec.DecodeError:
            value = None
        if not isinstance(value, dict):
            raise Unavailable("the server responds, but is no Tidelog server; check the address")
        return value


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait this long before the next step."""

    seconds: float


Call: TypeAlias = Generator[Request, Response, T]
Steps: TypeAlias = Generator[Request | Pause, Response, T]


class ServerUnreachable(Unavailable):
    """The server cannot be reached now and may be back soon: the request can be sent again."""


class NotConnected(Exception):
    """There is no connection; nothing was sent."""


class ConnectionLost(Exception):
    """The connection ended before the whole response arrived. `may_be_stale`: it was kept from an earlier request, and
    no byte of a response arrived."""

    def __init__(self, reason: str, *, may_be_stale: bool = False) -> None:
        super().__init__(reason)
        self.may_be_stale = may_be_stale


class RetryBackoff:
    """Pauses between the attempts of one request, for at most `limit_ms` after the first failure."""

    def __init__(self, limit_ms: int, clock: Clock, pause: Callable[[float], object] | None = None) -> None:
        self._limit_ms, self._clock, self._pause = limit_ms, clock, pause
        self._first_failure_ms: int | None = None
        self._next_ms = _FIRST_PAUSE_MS

    def next_pause(self, error: Error, at_least_s: float = 0.0) -> Pause:
        """Return how long to wait before the next attempt, or raise the error of the last one."""
        now_ms = self._clock.monotonic_ms()
        if self._first_failure_ms is None:
            self._first_failure_ms = now_ms
            if self._limit_ms:
                _log.warning("%s; trying again for %d s", error, self._limit_ms // 1000)
        left_ms = self._first_failure_ms + self._limit_ms - now_ms
        if left_ms <= 0 or at_least_s * 1000 > left_ms:
            raise error
        # Random over half of the pause: the tasks of a Spark query all lose the server at the same moment.
        wait_ms = min(max(self._next_ms * (0.5 + random.random() / 2), at_least_s * 1000), left_ms)
        self._next_ms = min(self._next_ms * 2, _MAX_PAUSE_MS)
        return Pause(wait_ms / 1000)

    def wait_or_raise(self, error: Error) -> None:
        """Wait before the next attempt, or raise the error of the last one."""
        assert self._pause is not None, "of a blocking client"
        self._pause(self.next_pause(error).seconds)

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

    def refused(self, path: str, status: int, headers: Mapping[str, str], content: bytes) -> Error:
        """A response with an error status."""
        ...


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is: `http://host:port`, with a path before /v0 if there is one."""

    url: str
    is_tls: bool
    host: str
    port: int
    base: str

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        refused = BadInput(f"{url!r:.200} is no address of a server; nothing was done, write http://host:port")
        try:
            parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            port = parts.port
        except ValueError:
            raise refused from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise refused
        is_tls = parts.scheme == "https"
        return cls(url, is_tls, parts.hostname, port or (443 if is_tls else 80), parts.path.rstrip("/"))


class ClientCore:
    """What a blocking and an asyncio client of one server have in common: no sockets, no waiting."""

    def __init__(
        self, url: str, *, key: str | None, retry_ms: int, clock: Clock, error_mapper: ErrorMapper | None = None
    ) -> None:
        self.address = ServerAddress.parse(url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise BadInput("a key is printable ASCII text; nothing was done, copy it again")
        self.retry_ms, self.clock = retry_ms, clock
        self.errors = error_mapper or EngineErrors(url, has_key=key is not None, port=self.address.port)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def head(self, request: Request) -> tuple[str, dict[str, str]]:
        """Return the target of a request and the headers to send, without those of the body's length."""
        has_body = request.body is not None or request.chunks is not None
        kind = {"Content-Type": JSON} if has_body else {}
        return request.target(self.address.base), {"Accept": request.accept, **self._headers, **kind, **request.headers}

    def run(self, call: Call[T]) -> Steps[T]:
        """Drive a call: yield its requests as often as they have to be sent, and the pauses between."""
        try:
            request = next(call)
            while True:
                try:
                    response = yield from self.attempts(request)
                except Error as error:
                    request = call.throw(error)
                else:
                    request = call.send(response)
        except StopIteration as end:
            result: T = end.value
            return result

    def attempts(self, request: Request) -> Steps[Response]:
        """Yield a request until it has a response that is no error, or raise its error.

        Raises:
            InDoubt: there was no response, and the request is not safe to repeat.
            Unavailable: the server cannot be reached.
            Error: any other error that the server returned.
        """
        backoff = RetryBackoff(self.retry_ms, self.clock)
        may_repeat = not self.retry_ms  # once, at once; otherwise the backoff repeats it
        can_repeat = request.chunks is None
        is_repetition = False
        while True:
            try:
                response = yield request
            except ConnectionLost as error:
                is_repetition = True
                if not (request.retry_safe and can_repeat):
                    raise self.in_doubt(str(error)) from None
                if not may_repeat:
                    yield backoff.next_pause(self.errors.lost(str(error)))
                may_repeat = False
            except NotConnected as error:
                unreachable = self.errors.unreachable(str(error))
                if not can_repeat:
                    raise unreachable from None
                yield backoff.next_pause(unreachable)
            else:
                if response.status < _ERROR_STATUS_MIN or response.status == _NOT_MODIFIED:
                    return response
                is_repetition = is_repetition or response.is_repetition
                refused = self.errors.refused(request.path, response.status, response.headers, response.content)
                refused.is_of_repetition = is_repetition
                if not can_repeat or not _may_be_repeated(request, response):
                    raise refused
                yield backoff.next_pause(refused, _retry_after_s(response))

    def in_doubt(self, reason: str) -> InDoubt:
        return InDoubt(
            f"{self.address.url} closed the connection without a response ({reason}); it is unknown whether "
            "anything was written, check before you retry"
        )


def _may_be_repeated(request: Request, response: Response) -> bool:
    if response.status not in RETRIED_STATUSES:
        return False
    code, _, detail = parse_error(response.content) or ("", "", {})
    if code == "throttled":
        return "limit" not in detail or "max" not in detail  # nothing was written; a limit does not go away
    return request.retry_safe or code in ("not_ready", "shutting_down")  # these two reach no handler


def _retry_after_s(response: Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) <= 6 else 0.0


def parse_error(content: bytes) -> tuple[str, str, dict[str, Any]] | None:
    """The code, message and detail of an error response; None where the body is none of a Tidelog server."""
    try:
        fields = _decode(content)["error"]
        return str(fields["code"]), str(fields["message"]), fields.get("detail") or {}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None


class EngineErrors:
    """Errors of the server as the embedded engine raises them."""

    def __init__(self, url: str, *, has_key: bool = False, port: int) -> None:
        self._url, self._has_key, self._port = url, has_key, port

    def unreachable(self, reason: str) -> ServerUnreachable:
        if f":{self._port}" not in self._url:
            reason = f"port {self._port}, as the address names none: {reason}"
        return ServerUnreachable(f"{self._url} cannot be reached ({reason}); nothing was done, start it or retry")

    def lost(self, reason: str) -> ServerUnreachable:
        return ServerUnreachable(f"{self._url} does not respond ({reason}); it is unknown what was done, retry")

    def refused(self, path: str, status: int, headers: Mapping[str, str], content: bytes) -> Error:
        fields = parse_error(content)
        if fields is None:
            return Unavailable(
                f"{self._url} returned {status} and no readable error: it may be no Tidelog server; nothing is known "
                "to be done, check the address"
            )
        code, message, detail = fields
        is_missing_route = code == "not_found" and ERROR_HEADER not in headers and message.startswith(NO_ROUTE)
        has_own_text = is_missing_route or code == "unauthorized"
        error = None if has_own_text else error_from_wire(headers.get(ERROR_HEADER, code), message, detail)
        if error is not None:
            return error
        match code:
            case "unauthorized" if self._has_key:
                return Unauthorized(
                    f"{self._url} does not know this key ({message}); look at the key, or at TIDELOG_API_KEYS of the "
                    "server"
                )
            case "unauthorized":
                return Unauthorized(f"{self._url} needs a key and none was given; nothing was done, pass key=…")
            case "method_not_allowed" | "not_found":
                return Unsupported(
                    f"{self._url} has no {path.partition('?')[0]} ({message}): it is of another version than this "
                    f"client ({__version__}); upgrade the older of the two"
                )
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
                return Refused(message)
