"""What the front end and the application say to each other. Neither knows more of the other than this.

    connection ──► Request (head) ──► Application.begin ──► Response            refused before the body was read
                                                     └────► Body(limit)         collect it, then Application.handle
                                                     └────► Body(streamed)      handle now, the body comes in pieces

    Application.handle ──► exchange.respond(Response | Stream | Upgrade), once, now or later, on the loop's thread

A connection is HTTP/1.1, one stream of HTTP/2, or an ASGI call; handlers cannot tell. Everything here happens
on the event loop's thread, and nothing here waits except what is `async`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from tidelog.decompression import DEFAULT_EXPANSION_LIMIT, ExpansionLimit

FAST_REQUEST_BYTES_MAX: Final = 64 << 10  # of a request whose head is known; larger ones are worth the parser
_LIST_HEADERS: Final = frozenset(
    (b"accept", b"accept-encoding", b"content-encoding")
)  # of the headers that are asked for
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]  # names in lower case, in the order they came


class ClientDisconnected(Exception):
    """The peer is not there any more."""


class BodyError(Exception):
    """The rest of a streamed body will never come, or cannot be understood, or is too much. The handler answers, with
    this status: it alone knows what was done by then."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(slots=True)
class Request:
    """One request. `path` and `query` are as they came, percent signs and all."""

    method: str
    path: str
    query: str
    headers: Headers
    peer: str = ""
    body: bytes = b""  # whole, when it was collected
    body_stream: AsyncIterator[bytes] | None = None  # the body, when it is streamed; raises Gone, Broken
    content_length: int | None = None  # of the body, where the peer said so
    upgrade: bool = False  # asks for a WebSocket, and this connection can become one
    context: object = None  # the application's own, from `begin` to `handle`

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name (lower case). One that is a list may come in several lines: all of them, as
        one (RFC 9110, 5.3)."""
        for known, value in self.headers:
            if known == name:
                return (
                    value
                    if name not in _LIST_HEADERS
                    else b", ".join(more for each, more in self.headers if each == name)
                )
        return None


UNREADABLE_REQUEST: Final = Request("", "", "", ())
"""In the place of a request that could not be read."""


@dataclass(slots=True)
class Response:
    """A whole answer. Content-Length is the front end's to set; HEAD sends the head alone."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: Headers = ()
    close: bool = False  # the connection ends with this answer


class Sink(Protocol):
    """Where a stream writes. What was written is on its way to the peer at the next turn of the loop at the latest."""

    @property
    def pending_bytes(self) -> int:
        """Bytes that were written and that the peer has not taken yet."""
        ...

    def write(self, data: bytes) -> None:
        """Never waits; after the peer is gone it does nothing."""
        ...

    def reserve(self, size: int) -> None:
        """Count bytes that were made for this sink and not written yet: they are part of what a peer that does not
        read may cost. 0: none any more."""
        ...

    @property
    def is_under_pressure(self) -> bool:
        """Peers that do not read cost the process much already: nothing should be made ahead."""
        ...

    async def wait_ready(self) -> None:
        """Return when the peer takes bytes and the process has room for them: nothing has to be made before. Raises
        Gone when it never will."""
        ...

    async def drain(self) -> None:
        """Return when the peer has taken most of what was written. Raises Gone when it never will."""
        ...


@dataclass(slots=True)
class Stream:
    """An answer in pieces: `run` writes them and returns when there are no more. It is cancelled when the peer goes.

    A stream that raises is cut off, not ended: the peer can tell that the answer is not whole.
    """

    status: int
    run: Callable[[Sink], Awaitable[None]]
    content_type: bytes
    headers: Headers = ()


class Socket(Protocol):
    """A WebSocket. Pings are answered by the front end."""

    @property
    def pending_bytes(self) -> int: ...

    async def receive(self) -> str | bytes | None:
        """The next message: text or binary; None when the peer closed."""
        ...

    def send(self, text: bytes) -> None:
        """Send one text message (UTF-8). Never waits; after the peer is gone it does nothing."""
        ...

    async def drain(self) -> None: ...

    def close(self, code: int = 1000, reason: str = "") -> None: ...


@dataclass(slots=True)
class Upgrade:
    """Become a WebSocket; `run` has it until it returns, then it is closed. Cancelled when the peer goes."""

    run: Callable[[Socket], Awaitable[None]]
    message_bytes_max: int


AnyResponse: TypeAlias = Response | Stream | Upgrade


@dataclass(frozen=True, slots=True)
class BodyPolicy:
    """How the application wants a request's body."""

    bytes_max: int  # bytes; one more and the answer is 413, with the rest read and thrown away
    is_streamed: bool = False  # hand it over in pieces as it comes, with back-pressure
    allowance: ExpansionLimit = DEFAULT_EXPANSION_LIMIT  # what it may decode to, where it is streamed and compressed


class Exchange(Protocol):
    """One request that waits for its answer."""

    @property
    def is_disconnected(self) -> bool:
        """Whether the peer has left: nobody will read the answer."""
        ...

    def respond(self, answer: AnyResponse) -> None:
        """Answer, once. On the loop's thread."""
        ...

    def add_disconnect_callback(self, callback: Callable[[], None]) -> None:
        """Have `call()` called when the peer leaves before its answer was sent."""
        ...

    def keep_body(self, size: int) -> None:
        """Count bytes that the handler of a streamed body keeps of it, in place of those counted before. Where all
        connections keep too many, `Request.pieces` raises Broken."""
        ...


class FastResponder(Protocol):
    """One request whose head is known, from its body to its answer. On the loop's thread."""

    def respond_json(self, body: bytes, request_id: bytes) -> None:
        """200 and a JSON body. Answered once, this way or by `respond`."""
        ...

    def respond_json_parts(self, parts: Sequence[bytes], request_id: bytes) -> None:
        """`answer`, for a body that is long and lies in pieces: nothing is copied together."""
        ...

    def respond(self, response: Response) -> None:
        """Anything else."""
        ...


class RequestIds(NamedTuple):
    """Names for requests: `prefix` and a number in base 16, from `first` on."""

    prefix: bytes
    first_number: int


class RequestBatch(Protocol):
    """Requests with one known head that came in one turn of the loop. Each is answered once, or left out."""

    @property
    def bodies(self) -> list[bytes]: ...

    @property
    def received_us(self) -> list[int]:
        """When each came, by the clock of who takes them."""
        ...

    def __len__(self) -> int: ...

    def reparse_and_drop(self, positions: Collection[int]) -> RequestBatch:
        """All but those in these places, which come as any other."""
        ...

    def respond_json(self, bodies: list[bytes], ids: RequestIds) -> None:
        """200 and a JSON body for each."""
        ...

    def respond(self, responses: list[Response]) -> None:
        """Anything else, for each."""
        ...


@dataclass(frozen=True, slots=True)
class BatchHandler:
    """Takes requests whose head is known a turn at a time."""

    handle: Callable[[RequestBatch], None]
    call_at_turn_end: Callable[[Callable[[], None]], None]  # has it called at the end of this turn of the loop
    now_us: Callable[[], int]


SingleHandler: TypeAlias = Callable[[bytes, FastResponder], bool]
"""Takes the body of a request whose head is known and answers through the ticket. False: it comes as any other."""
FastHandler: TypeAlias = SingleHandler | BatchHandler


class Application(Protocol):
    def begin(self, request: Request) -> Response | BodyPolicy:
        """Decide by the head alone. Called once per request, before its body is read."""
        ...

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer through `exchange`, now or later. Does not raise and does not wait."""
        ...

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        """The answer to what did not get as far as a handler: 400, 408, 413, 414, 431, 501 … `request` is as much of
        it as could be read."""
        ...

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """How requests with this head may be answered without another look at it, whatever its Content-Length up to
        EXPRESS_BYTES_MAX, with answers of no more bytes; None where they may not."""
        ...

    def on_abandoned(self, request: Request) -> None:
        """A request that passed `begin` will never reach `handle`: its peer left. Gives back what `begin` took."""
        ...
