"""Server-Sent Events of a server: parsed without I/O, and read by a thread for a blocking client.

`SseParser` takes bytes as they arrive and returns whole events. `EventStream` has one thread that reads the response
and a queue, so that a caller can wait for the next event with a timeout without losing a half-read one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Final, NamedTuple, Self

import msgspec

from tidelog.api_types import JOBS_FULL, JOBS_IDLE
from tidelog.client.core import ServerUnreachable
from tidelog.client.http import Client
from tidelog.engine.batch_encoder import from_json
from tidelog.errors import Error
from tidelog.times import Seconds, seconds

_READ_BYTES: Final = 64 << 10
_QUEUED_EVENTS_MAX: Final = 2_048
_CLOSE_CHECK_S: Final = 0.2  # how long a full queue delays `close`


class ServerEvent(NamedTuple):
    """One event; comments and retry hints of the stream are left out, except those of an idle job stream."""

    kind: str
    data: dict[str, Any]


class SseParser:
    """Turns pieces of a stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Return the events that this piece completes."""
        *frames, self._rest = (self._rest + piece).split(b"\n\n")
        return [event for frame in frames if (event := _parse_frame(frame)) is not None]


def _parse_frame(frame: bytes) -> ServerEvent | None:
    if frame in (b": " + JOBS_IDLE, b": " + JOBS_FULL):
        return ServerEvent(frame[2:].decode(), {})
    kind, data = "message", list[bytes]()
    for line in frame.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            kind = value.decode()
        elif name == b"data":
            data.append(value)
    if not data:
        return None
    try:
        fields = from_json(b"\n".join(data))
    except msgspec.DecodeError:
        return None
    return ServerEvent(kind, fields) if isinstance(fields, dict) else None


class EventStream:
    """Events of one response, read by a thread of its own until `close`."""

    def __init__(self, client: Client, path: str, query: Mapping[str, object] | None = None) -> None:
        self._client = client
        self._exchange = client.stream(path, query=query, headers={"Accept": "text/event-stream"})
        self._response: HTTPResponse = self._exchange.__enter__()
        # Bounded: a caller that takes nothing stops the reader, and then the server ends the stream as slow.
        self._events: Queue[ServerEvent | Error | None] = Queue(_QUEUED_EVENTS_MAX)
        self._is_closing = False
        self._thread = Thread(target=self._read_all, name=f"tidelog events {path}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_all(self) -> None:
        parser = SseParser()
        try:
            while piece := self._response.read1(_READ_BYTES):
                for event in parser.feed(piece):
                    self._put(event)
        except (OSError, HTTPException, ValueError, AttributeError) as error:
            if not self._is_closing:
                self._put(self._lost(str(error) or type(error).__name__))
        finally:
            self._put(None)

    def _put(self, event: ServerEvent | Error | None) -> None:
        while not self._is_closing:
            with suppress(Full):
                self._events.put(event, timeout=_CLOSE_CHECK_S)
                return

    def _lost(self, reason: str) -> ServerUnreachable:
        return self._client.core.errors.lost(reason)

    def next(self, timeout: Seconds | None) -> ServerEvent | None:
        """Return the next event; None where none came in time. Raises ServerUnreachable once the stream has ended."""
        timeout = seconds("timeout", timeout)
        try:
            found = self._events.get(timeout=timeout) if timeout is None or timeout > 0 else self._events.get_nowait()
        except Empty:
            return None
        if found is None:
            self._events.put_nowait(None)  # the reader has ended: it is empty
            raise self._lost("the server ended the stream")
        if isinstance(found, Error):
            raise found
        return found

    def close(self) -> None:
        """End the stream: the server releases what it leased to it."""
        if self._is_closing:
            return
        self._is_closing = True
        shut_down(self._response)
        self._thread.join()
        self._exchange.__exit__(None, None, None)


def shut_down(response: HTTPResponse) -> None:
    """End the connection of a response, also while another thread reads it. No other request gets it."""
    response.will_close = True
    raw = getattr(response.fp, "raw", None)
    sock = getattr(raw, "_sock", None)
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
