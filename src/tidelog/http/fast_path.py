"""The fast path for small HTTP/1.1 requests: repeated heads skip the parser, and requests of one loop turn are
handled and answered together.

Clients repeat one head for every small request. `HeadCache` recognises a head by all its bytes but the digits of its
Content-Length, because bodies differ in size. It learns a head only after the parser and the application accepted it.

    reader ─┐                                                            ┌─ respond_json ──► one response each
    reader ─┼─► RequestBatcher ──(turn ends, or full)──► FastRequestBatch ┼─ respond ──► other responses
    reader ─┘                                                            └─ reparse_and_drop ──► the HTTP parser

    armed ──request with the known head──► in the batcher ──turn ends──► handled ──response written──► armed
      └──any other input: the batcher is flushed, then the parser reads it; armed again by a later request

The reader and the writer of responses are compiled (`_fast_path.pyx`). Without a compiler there is no fast path
(`IS_AVAILABLE` is false): no head is cached, and the parser serves every request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog import native
from tidelog.http import h1_encoder
from tidelog.http.interface import UNREADABLE_REQUEST, BatchHandler, FastHandler, RequestIds, Response, SingleHandler

try:
    from tidelog.http._fast_path import FastPathReader, match_body, send_responses
except ImportError:  # the package was built without a compiler
    IS_AVAILABLE = False
    FastPathReader = object  # type: ignore[assignment, misc]
else:
    IS_AVAILABLE = native.COMPILED  # false if compiled code is switched off

if TYPE_CHECKING:
    from tidelog.http.connection import ServerState
    from tidelog.http.h1 import Http1Connection

_BATCH_BYTES_MAX: Final = 1 << 20  # a larger batch does not wait for the end of the turn
_BATCH_REQUESTS_MAX: Final = 1024
_CACHED_HEADS_MAX: Final = 4096
_HEAD_END: Final = b"\r\n\r\n"
_CONTENT_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(0|[1-9]\d{0,4})[ \t]*\r\n")


class FastRequest(FastPathReader):
    """The request of one connection that is on the fast path. One object per connection serves all its requests,
    because one is in progress at a time."""

    body_complete = True
    unread_body_bytes = 0
    owner: Http1Connection

    def respond_json(self, body: bytes, request_id: bytes) -> None:
        self.respond_json_parts((body,), request_id)

    def respond_json_parts(self, parts: Sequence[bytes], request_id: bytes) -> None:
        date, connection = self._date_and_connection_lines()
        head = h1_encoder.encode_json_head(sum(map(len, parts)), request_id, date, connection)
        self.send(head + parts[0], *parts[1:])

    def respond(self, response: Response) -> None:
        self.send(*h1_encoder.encode_response(response, *self._date_and_connection_lines(), False))

    def _date_and_connection_lines(self) -> tuple[bytes, bytes]:
        state = self.owner.server_state
        return state.date_header.refresh().line, h1_encoder.CONNECTION_CLOSE if state.draining else b""

    def send(self, *data: bytes) -> None:
        owner = self.owner
        if self.disconnected or owner.current is not self:
            return
        owner.write(*data)
        if owner.server_state.draining:
            owner.finish_connection()
        else:
            owner.next_request(self)

    def reparse(self, body: bytes) -> None:
        """Pass a request that was in a batch to the parser."""
        if not self.disconnected:
            self.owner.reparse(body)

    def on_disconnect(self) -> None:
        self.disconnected = True


class RequestBatcher:
    """Collects the requests of one loop turn for one handler. Readers append to the three lists directly, so the list
    objects never change."""

    def __init__(self, server_state: ServerState, handler: BatchHandler) -> None:
        self.server_state, self._handler = server_state, handler
        self.requests: list[FastRequest] = []
        self.bodies: list[bytes] = []
        self.received_us: list[int] = []
        self.now_us = handler.now_us

    def schedule_flush(self) -> None:
        """Flush at the end of this turn. Called before the first request of a batch is added."""
        self._handler.call_at_turn_end(self.flush)

    def check_limits(self) -> None:
        """Flush now if the batch is too large to wait for the end of the turn."""
        if len(self.bodies) >= _BATCH_REQUESTS_MAX or sum(map(len, self.bodies)) > _BATCH_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if not self.requests:
            return
        batch = FastRequestBatch(self.server_state, self.requests[:], self.bodies[:], self.received_us[:])
        self.requests.clear()
        self.bodies.clear()
        self.received_us.clear()
        try:
            self._handler.handle(batch)
        except Exception as error:
            self.server_state.report_error("the handler of a batch of requests failed", error)
            app = self.server_state.app
            batch.respond([app.malformed(UNREADABLE_REQUEST, 500, "the server made a mistake") for _ in batch.bodies])


class FastRequestBatch:
    """Requests with one head that arrived in one loop turn: the `RequestBatch` of the interface."""

    def __init__(
        self, server_state: ServerState, requests: list[FastRequest], bodies: list[bytes], received_us: list[int]
    ) -> None:
        self._server_state, self.requests, self.bodies, self.received_us = server_state, requests, bodies, received_us

    def __len__(self) -> int:
        return len(self.requests)

    def reparse_and_drop(self, positions: Collection[int]) -> FastRequestBatch:
        """Pass the requests at `positions` to the parser and return the batch of the others."""
        kept = [position for position in range(len(self)) if position not in positions]
        for position in positions:
            self.requests[position].reparse(self.bodies[position])
        return FastRequestBatch(
            self._server_state,
            [self.requests[position] for position in kept],
            [self.bodies[position] for position in kept],
            [self.received_us[position] for position in kept],
        )

    def respond_json(self, bodies: list[bytes], ids: RequestIds) -> None:
        """Send each request status 200 and its JSON body."""
        state = self._server_state
        if state.draining:
            for number, (request, body) in enumerate(zip(self.requests, bodies, strict=True), ids.first_number):
                request.respond_json(body, b"%b%x" % (ids.prefix, number))
        else:
            head = h1_encoder.json_head_parts(state.date_header.refresh().line)
            send_responses(self.requests, bodies, *head, ids.prefix, ids.first_number)

    def respond(self, responses: list[Response]) -> None:
        """Send each request its response."""
        for request, response in zip(self.requests, responses, strict=True):
            request.respond(response)


class CachedHead(NamedTuple):
    """A head that a connection sent and will most likely send again."""

    before_length: bytes  # up to the digits of Content-Length
    after_length: bytes  # from the byte after them
    handler: SingleHandler | None  # one of these two is set
    batcher: RequestBatcher | None

    def match_body(self, data: bytes) -> bytes | None:
        """Return the body if `data` is one whole request with this head."""
        return match_body(data, self.before_length, self.after_length)


class HeadCache:
    """The heads that the connections of one listener have sent, with the handler for each.

    Keys are SHA-256 digests: heads contain API keys, and no client can construct a collision.
    """

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._heads: dict[bytes, tuple[SingleHandler | None, RequestBatcher | None]] = {}
        self._batchers: dict[BatchHandler, RequestBatcher] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def remember(self, data: bytes, handler: FastHandler) -> None:
        """Use `handler` for requests with the head at the start of `data`, which was valid."""
        parts = _split_head(data[: data.index(_HEAD_END) + 4])
        if parts is None:
            return
        if len(self._heads) >= _CACHED_HEADS_MAX:  # a client that varies its heads this much gains nothing here
            self._heads.clear()  # the heads of others are learned again
            self._batchers.clear()
        if isinstance(handler, BatchHandler):
            batcher = self._batchers.get(handler)
            if batcher is None:
                batcher = self._batchers[handler] = RequestBatcher(self._server_state, handler)
            self._heads[_head_digest(*parts[:2])] = (None, batcher)
        else:
            self._heads[_head_digest(*parts[:2])] = (handler, None)

    def lookup(self, data: bytes) -> tuple[CachedHead, bytes] | None:
        """Return the head and the body of `data` if it is one whole request with a known head."""
        end = data.find(_HEAD_END) + 4
        parts = _split_head(data[:end])
        if parts is None or parts[2] != len(data) - end:
            return None
        before, after, _ = parts
        entry = self._heads.get(_head_digest(before, after))
        return None if entry is None else (CachedHead(before, after, *entry), data[end:])


def _split_head(head: bytes) -> tuple[bytes, bytes, int] | None:
    """Split a head around the digits of its Content-Length; None if it has none, or an unusual one."""
    match = _CONTENT_LENGTH.search(head)
    return None if match is None else (head[: match.start(1)], head[match.end(1) :], int(match[1]))


def _head_digest(head_before_length: bytes, head_after_length: bytes) -> bytes:
    return sha256(b"%b\0%b" % (head_before_length, head_after_length)).digest()
