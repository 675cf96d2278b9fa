"""[hot] The bytes of an HTTP/1.1 answer. No other module knows what they look like.

    HTTP/1.1 200 OK␍␊                        made once
    date: Sun, 06 Nov 1994 08:49:37 GMT␍␊    made once a second
    content-type: application/json␍␊
    content-length: 2␍␊                      or transfer-encoding: chunked␍␊
    retry-after: 1␍␊                         what the application adds
    connection: close␍␊                      when it is the last, or when a 1.0 peer asked for more
    ␍␊
    {}

A chunk of a stream:    2␍␊ {} ␍␊            and 0␍␊␍␊ after the last one
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from tidelog.server.http.seam import Headers, Response

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP: Final = b"connection: keep-alive\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n"

# Above this a body is handed over as it is: copying it behind its head would cost more than a second buffer.
_COPY_BYTES_MAX: Final = 64 << 10
_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODYLESS: Final = frozenset((204, 304))


class Dates:
    """The time of day as answers carry it."""

    __slots__ = ("_now_us", "_second", "line", "value")

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us, self._second = now_us, -1
        self.value = self.line = b""

    def refresh(self) -> Dates:
        """Make `line` and `value` those of the present second."""
        second = self._now_us() // 1_000_000
        if second != self._second:
            self._second = second
            self.value = formatdate(second, usegmt=True).encode()
            self.line = b"date: %b\r\n" % self.value
        return self


def bodyless(status: int) -> bool:
    """Whether answers of this status have no body, and say nothing of its length."""
    return status in _BODYLESS


def lines(headers: Headers) -> bytes:
    """Header lines. Raises ValueError where one would be two: an answer must not be split by what it quotes."""
    for name, value in headers:
        if b"\r" in value or b"\n" in value or b"\r" in name or b"\n" in name:
            raise ValueError(f"header {name!r} has a line end in it: {value!r}")
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def whole(response: Response, date: bytes, connection: bytes, head_only: bool) -> tuple[bytes, ...]:
    """An answer, in as few buffers as is cheap."""
    status, body = response.status, response.body
    first = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
    if response.headers:
        connection += lines(response.headers)
    if status in _BODYLESS:
        return (b"%b%b%b\r\n" % (first, date, connection),)
    if head_only or len(body) > _COPY_BYTES_MAX:
        head = b"%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            *(first, date, response.content_type, len(body), connection),
        )
        return (head,) if head_only else (head, body)
    return (
        b"%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
        % (first, date, response.content_type, len(body), connection, body),
    )


def json(body: bytes, request_id: bytes, date: bytes, connection: bytes) -> bytes:
    """200 and a small JSON body, as `whole` would write it."""
    return (
        b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n%bx-request-id: %b\r\n\r\n%b"
        % (date, len(body), connection, request_id, body)
    )


def json_parts(date: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands in `json` before the length, between it and the name of the request, and before the body."""
    return (
        b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: " % date,
        b"\r\nx-request-id: ",
        b"\r\n\r\n",
    )


def json_head(length: int, request_id: bytes, date: bytes, connection: bytes) -> bytes:
    """What stands before the body in `json`."""
    return (
        b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n%bx-request-id: %b\r\n\r\n"
        % (*(date, length, connection, request_id),)
    )


def head(status: int, content_type: bytes, headers: Headers, date: bytes, framing: bytes) -> bytes:
    """The head of an answer whose length is not known."""
    first = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
    if status in _BODYLESS:
        return b"%b%b%b%b\r\n" % (first, date, framing, lines(headers))
    return b"%b%bcontent-type: %b\r\n%b%b\r\n" % (first, date, content_type, framing, lines(headers))


def chunk(data: bytes) -> tuple[bytes, ...]:
    """A chunk of a stream. Of nothing it would be the last one: callers leave that out."""
    if len(data) > _COPY_BYTES_MAX:
        return (b"%x\r\n" % len(data), data, b"\r\n")
    return (b"%x\r\n%b\r\n" % (len(data), data),)


def switching(accept: bytes) -> bytes:
    """The head after which the connection is a WebSocket."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % accept
    )
