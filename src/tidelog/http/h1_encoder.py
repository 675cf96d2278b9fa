"""The bytes of HTTP/1.1 responses.

    HTTP/1.1 200 OK␍␊
    date: Sun, 06 Nov 1994 08:49:37 GMT␍␊    encoded once a second
    content-type: application/json␍␊
    content-length: 2␍␊                      or transfer-encoding: chunked␍␊
    connection: close␍␊                      of the last response; keep-alive for HTTP/1.0
    retry-after: 1␍␊                         headers of the application
    ␍␊
    {}

A chunk of a stream:    2␍␊ {} ␍␊            and 0␍␊␍␊ after the last one
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from tidelog.http.interface import Headers, Response

CONTINUE_RESPONSE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CONNECTION_CLOSE: Final = b"connection: close\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
CHUNKED_ENCODING: Final = b"transfer-encoding: chunked\r\n"

# A larger body is passed on as its own buffer: copying it would cost more.
_JOIN_BODY_BYTES_MAX: Final = 64 << 10
# Python 3.13 has other phrases for four of these; responses and the OpenAPI document are the same in every version.
REASON_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Request Entity Too Large",
    414: "Request-URI Too Long",
    416: "Requested Range Not Satisfiable",
    422: "Unprocessable Entity",
}
_STATUS_LINES: Final = {code: f"HTTP/1.1 {code} {phrase}\r\n".encode() for code, phrase in REASON_PHRASES.items()}
_BODYLESS_STATUSES: Final = frozenset((204, 304))


class DateHeader:
    """The Date header, encoded once a second."""

    __slots__ = ("_now_us", "_second", "line", "value")

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us, self._second = now_us, -1
        self.value = self.line = b""

    def refresh(self) -> DateHeader:
        """Set `line` and `value` to the current second."""
        second = self._now_us() // 1_000_000
        if second != self._second:
            self._second = second
            self.value = formatdate(second, usegmt=True).encode()
            self.line = b"date: %b\r\n" % self.value
        return self


def is_bodyless(status: int) -> bool:
    """Return whether responses of this status have neither a body nor a Content-Length."""
    return status in _BODYLESS_STATUSES


def encode_headers(headers: Headers) -> bytes:
    """Encode header lines. Raises ValueError for a line break in a header, which would split the response."""
    for name, value in headers:
        if b"\r" in value or b"\n" in value or b"\r" in name or b"\n" in name:
            raise ValueError(f"header {name!r} has a line break: {value!r}")
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def encode_head(status: int, content_type: bytes, headers: Headers, date: bytes, framing: bytes) -> bytes:
    """Encode the head of a response. `framing`: the header lines about the connection and the body's length."""
    if headers:
        framing += encode_headers(headers)
    status_line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    if status in _BODYLESS_STATUSES:
        return b"%b%b%b\r\n" % (status_line, date, framing)
    return b"%b%bcontent-type: %b\r\n%b\r\n" % (status_line, date, content_type, framing)


def encode_response(response: Response, date: bytes, connection: bytes, head_only: bool) -> tuple[bytes, ...]:
    """Encode a whole response in as few buffers as is cheap."""
    status, body = response.status, response.body
    has_body = status not in _BODYLESS_STATUSES
    framing = b"content-length: %d\r\n%b" % (len(body), connection) if has_body else connection
    head = encode_head(status, response.content_type, response.headers, date, framing)
    if head_only or not has_body:
        return (head,)
    return (head, body) if len(body) > _JOIN_BODY_BYTES_MAX else (head + body,)


def json_head_parts(date: bytes, connection: bytes = b"") -> tuple[bytes, bytes, bytes]:
    """Return the head of a JSON response with status 200 in three parts: the body's length goes between the first
    two, the request's id between the last two."""
    return (
        b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: " % date,
        b"\r\n%bx-request-id: " % connection,
        b"\r\n\r\n",
    )


def encode_json_head(length: int, request_id: bytes, date: bytes, connection: bytes) -> bytes:
    before_length, after_length, before_body = json_head_parts(date, connection)
    return b"%b%d%b%b%b" % (before_length, length, after_length, request_id, before_body)


def encode_chunk(data: bytes) -> tuple[bytes, ...]:
    """Encode a chunk of a stream. `data` is not empty: an empty chunk would be the last one."""
    if len(data) > _JOIN_BODY_BYTES_MAX:
        return (b"%x\r\n" % len(data), data, b"\r\n")
    return (b"%x\r\n%b\r\n" % (len(data), data),)


def encode_switching_protocols(accept: bytes) -> bytes:
    """Encode the response after which the connection is a WebSocket."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % accept
    )
