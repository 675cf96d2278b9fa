"""The interface between the HTTP front end and an application. Neither knows more of the other.

    connection ──► Request (head) ──► Application.begin ──► Response                    refused before the body is read
                                                     └────► BodyPolicy(bytes_max)       collect it, then `handle`
                                                     └────► BodyPolicy(is_streamed)     `handle` now, stream the body

    Application.handle ──► exchange.respond(Response | Stream | Upgrade), once, now or later

A connection is HTTP/1.1, one stream of HTTP/2, or an ASGI call; handlers see no difference. Everything here runs on the
event loop's thread, and only `async` methods wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from tidelog.decompression import DEFAULT_EXPANSION_LIMIT, ExpansionLimit

FAST_REQUEST_BYTES_MAX: Final = 64 << 10  # of a request on the fast path; larger ones are worth the parser
_LIST_HEADERS: Final = frozenset((b"accept", b"accept-encoding", b"content-encoding"))  # that this project reads
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]  # names in lower case, in the order of arrival


class ClientDisconnected(Exception):
    """The client has disconnected."""


class BodyError(Exception):
    """The rest of a streamed body will not arrive, is invalid, or is too large. The handler responds with this status:
    it alone knows what was done by then."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(slots=True)
class Request:
    """One request. `path` and `query` are as received, with percent encoding."""

    method: str
    path: str
    query: str
    headers: Headers
    peer: str = ""
    body: bytes = b""  # unless it is streamed
    body_stream: AsyncIterator[bytes] | None = None  # of a streamed body; raises ClientDisconnected, BodyError
    content_length: int | None = None  # where the client sent it
    upgrade: bool = False  # a WebSocket handshake on a connection that can become one
    context: object = None  # belongs to the application, from `begin` to `handle`

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of this name (lower case); of a list header all lines, joined (RFC 9110, 5.3)."""
        for header_name, value in self.headers:
            if header_name == name:
                if name in _LIST_HEADERS:
                    return b", ".join(value for header_name, value in self.headers if header_name == name)
                return value
        return None


UNREADABLE_REQUEST: Final = Request("", "", "", ())
"""Stands for a request that could not be parsed."""


@dataclass(slots=True)
class Response:
    """A whole response. The front end sets Content-Length, and sends the head alone for HEAD."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: Headers = ()
    close: bool = False  # close the connection after it


class Sink(Protocol):
    """Where a stream writes. Bytes are passed to the socket in the next loop turn at the latest."""

    @property
    def pending_bytes(self) -> int:
        """Bytes that were written and that the client has not read."""
        ...

    def write(self, data: bytes) -> None:
        """Write without waiting. Does nothing after the client has disconnected."""
        ...

    def reserve(self, size: int) -> None:
        """Count bytes that were produced for this sink and not written yet: they count towards the bound on unread
        responses. 0 ends the reservation."""
        ...

    @property
    def is_under_pressure(self) -> bool:
        """Whether unread responses use much of their bound: a stream should not produce ahead."""
        ...

    async def wait_ready(self) -> None:
        """Return when the client reads and the process has memory for more: a stream produces nothing before. Raises
        ClientDisconnected."""
        ...

    async def drain(self) -> None:
        """Return when the client has read most of what was written. Raises ClientDisconnected."""
        ...


@dataclass(slots=True)
class Stream:
    """A streamed response: `run` writes it and returns at its end. It is cancelled when the client disconnects.

    A stream that raises is cut off without the protocol's end mark, so that the client notices.
    """

    status: int
    run: Callable[[Sink], Awaitable[None]]
    content_type: bytes
    headers: Headers = ()
    length: int | None = None  # bytes that `run` writes, where that is known: sent as Content-Length


class Socket(Protocol):
    """A WebSocket. The front end answers pings."""

    @property
    def pending_bytes(self) -> int: ...

    async def receive(self) -> str | bytes | None:
        """Return the next message, text or binary; None after the client closed."""
        ...

    def send(self, text: bytes) -> None:
        """Send one text message (UTF-8) without waiting. Does nothing after the client has disconnected."""
        ...

    async def drain(self) -> None: ...

    def close(self, code: int = 1000, reason: str = "") -> None: ...


@dataclass(slots=True)
class Upgrade:
    """Become a WebSocket, which is closed when `run` returns. `run` is cancelled when the client disconnects."""

    run: Callable[[Socket], Awaitable[None]]
    message_bytes_max: int


AnyResponse: TypeAlias = Response | Stream | Upgrade


@dataclass(frozen=True, slots=True)
class BodyPolicy:
    """How the application reads a request's body."""

    bytes_max: int  # a larger body is answered with 413 and discarded
    is_streamed: bool = False  # pass it on as it arrives, with back-pressure
    allowance: ExpansionLimit = DEFAULT_EXPANSION_LIMIT  # what a streamed, compressed body may decode to


class Exchange(Protocol):
    """One request that waits for its response."""

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        ...

    def respond(self, answer: AnyResponse) -> None:
        """Respond, once."""
        ...

    def add_disconnect_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` if the client disconnects before the response."""
        ...

    def keep_body(self, size: int) -> None:
        """Set how many bytes of a streamed body its handler keeps in memory. Above the bound over all connections
        `Request.body_stream` raises BodyError."""
        ...


class FastResponder(Protocol):
    """One request on the fast path. It is answered once, by one of these methods."""

    def respond_json(self, body: bytes, request_id: bytes) -> None:
        """Respond with status 200 and a JSON body."""
        ...

    def respond_json_parts(self, parts: Sequence[bytes], request_id: bytes) -> None:
        """Respond with status 200 and a long JSON body, without joining its parts."""
        ...

    def respond(self, response: Response) -> None:
        """Respond with any other response."""
        ...


class RequestIds(NamedTuple):
    """Ids of several requests: `prefix` and a number in base 16, counted up from `first_number`."""

    prefix: bytes
    first_number: int


class RequestBatch(Protocol):
    """Requests with one head that arrived in one loop turn. Each is answered once, or dropped."""

    @property
    def bodies(self) -> list[bytes]: ...

    @property
    def received_us(self) -> list[int]:
        """When each arrived, by the handler's `now_us`."""
        ...

    def __len__(self) -> int: ...

    def reparse_and_drop(self, positions: Collection[int]) -> RequestBatch:
        """Pass the requests at `positions` to the HTTP parser and return the batch of the others."""
        ...

    def respond_json(self, bodies: list[bytes], ids: RequestIds) -> None:
        """Respond to each with status 200 and its JSON body."""
        ...

    def respond(self, responses: list[Response]) -> None:
        """Respond to each with its response."""
        ...


@dataclass(frozen=True, slots=True)
class BatchHandler:
    """Handles the requests with one head that arrived in one loop turn."""

    handle: Callable[[RequestBatch], None]
    call_at_turn_end: Callable[[Callable[[], None]], None]
    now_us: Callable[[], int]


SingleHandler: TypeAlias = Callable[[bytes, FastResponder], bool]
"""Handles one request on the fast path. Returns False to have the HTTP parser serve it."""
FastHandler: TypeAlias = SingleHandler | BatchHandler


class Application(Protocol):
    def begin(self, request: Request) -> Response | BodyPolicy:
        """Decide by the head alone, before the body is read. Called once per request."""
        ...

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Respond through `exchange`, now or later. Does not raise and does not block."""
        ...

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        """Return the response to a request that reached no handler: 400, 408, 413, 414, 431, 501 … `request` has what
        could be parsed of it."""
        ...

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """Return the fast-path handler for requests with this head and any Content-Length up to FAST_REQUEST_BYTES_MAX,
        whose JSON responses have at most `answer_bytes_max` bytes; None if there is none."""
        ...

    def on_abandoned(self, request: Request) -> None:
        """Release what `begin` acquired: the client disconnected, and the request will not reach `handle`."""
        ...
