"""[hot] Where the bytes of one HTTP/1.1 connection come in: the twin of the kernel's `Gate`, which says what is right.

    armed ──a request with the known head──► in the lobby ──the turn ends──► taken ──answered──► armed
      │                                         │                              │
      └──anything else──────────────────────────┴──── the lobby is emptied ────┴──► `slow`; not armed again by itself

A head is known by all of it but the digits of its body's length: a client's records are not all of one size.

[hot] The turn of a request whose head is known. Two of a kind, by who keeps the gate: the kernel or its twin.

[hot] Requests with one known head that came in one turn of the loop: they are taken together and answered together.

    gate ─┐                                                       ┌─ answer ──► every connection its own
    gate ─┼─► Lobby ──(the turn ends, or it is full)──► Crowd ──► ┼─ respond ──► one of them something else
    gate ─┘                                                       └─ without ──► some come by the parser, as any other

Nothing is done for one of them that can be done for all.

[hot] Heads that came before. A client sends the same one with every small write, and it need not be read again.

    piece ──► head, hashed ──► known? ──yes──► is the rest exactly its body? ──yes──► its way: alone, or the lobby
                                 └──no───────────────┴──no──► the parser, as ever

It is known by all of it but the digits of its Content-Length: a client's records are not all of one size.

Only what the parser and the application found to be in order is learned, with the application's own answer to how
the like of it may be taken. Kept are hashes that nobody can make collide, because heads carry keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidelog.http import h1_encoder
from tidelog.http.interface import UNREADABLE_REQUEST, BatchHandler, FastHandler, RequestIds, Response, SingleHandler

if TYPE_CHECKING:
    import asyncio

    from tidelog.http.h1 import Http1Connection
    from tidelog.http.server_state import ServerState

_CHECK_ABOVE_BYTES: Final = 4096  # a body from which the lobby looks how much it holds
_CHECK_EVERY_REQUESTS: Final = 256  # requests
_LENGTH_DIGITS_MAX: Final = 5  # of the length of a body that is taken here


class PyFastPathReader:
    is_armed = False  # the next piece may be a request with the head that is known
    is_undisturbed = False  # nothing else came or happened since
    disconnected = False  # the peer left
    was_served = False  # somebody was answered; whoever looks puts it back
    _head_before_length = _head_after_length = (
        b""  # the head up to the digits of its body's length, and from behind them
    )
    _batcher: RequestBatcher | None = None

    def __init__(self, owner: Any, buffer: memoryview, fallback: Callable[[int], None]) -> None:
        """`owner` has a `turn` and goes on with `next(self)`; `slow` gets what is not taken here."""
        self.owner, self._buffer, self._fallback = owner, buffer, fallback

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's idea of a size; ours is larger
        return self._buffer

    def submit(
        self,
        head_before_length: bytes,
        head_after_length: bytes,
        batcher: RequestBatcher,
        transport: asyncio.Transport,
        body: bytes,
    ) -> None:
        """Take this body now, and from now on what comes with this head."""
        self._head_before_length, self._head_after_length, self._batcher = (
            head_before_length,
            head_after_length,
            batcher,
        )
        self.write, self.is_closing = transport.write, transport.is_closing
        self._add_to_batch(body)

    def _add_to_batch(self, body: bytes) -> None:
        self.is_armed, self.is_undisturbed = False, True
        self.owner.current = self
        lobby = self._batcher
        assert lobby is not None, "it was entered"
        if not lobby.requests:
            lobby.schedule_flush()
        lobby.requests.append(self)
        lobby.bodies.append(body)
        lobby.received_us.append(lobby.now_us())
        if len(body) > _CHECK_ABOVE_BYTES or len(lobby.bodies) >= _CHECK_EVERY_REQUESTS:
            lobby.check_limits()

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_armed:
            body = match_body(bytes(self._buffer[:nbytes]), self._head_before_length, self._head_after_length)
            if body is not None:
                self._add_to_batch(body)
                return
        if self._batcher is not None and self.owner.current is self:  # it may still be in there
            self._batcher.flush()
        self.is_armed = self.is_undisturbed = False
        self._fallback(nbytes)


def match_body(data: bytes, head_before_length: bytes, head_after_length: bytes) -> bytes | None:
    """What is behind this head, if that is the whole of the request that `piece` is."""
    start = len(head_before_length)
    most = start + _LENGTH_DIGITS_MAX + 1
    at = data.find(head_after_length[:1], start, most)  # behind the digits
    if at <= start or not data.startswith(head_before_length) or not data.startswith(head_after_length, at):
        return None
    body, digits = data[at + len(head_after_length) :], data[start:at]
    return body if digits == b"%d" % len(body) else None


def send_responses_py(
    readers: list[Any], bodies: list[bytes], first: bytes, second: bytes, third: bytes, prefix: bytes, number: int
) -> None:
    """Send everybody the body that is theirs behind its head: `first`, its length, `second`, `prefix` and a number of
    its own in base 16, `third`. Where anything else came meanwhile the owner goes on from there."""
    for mine, (reader, body) in enumerate(zip(readers, bodies, strict=True), number):
        data = b"%b%d%b%b%x%b%b" % (first, len(body), second, prefix, mine, third, body)
        if reader.disconnected:
            continue
        if not reader.is_undisturbed or reader.is_closing():
            reader.send(data)
            continue
        reader.write(data)
        if reader.is_undisturbed:
            reader.owner.current = None
            reader.is_armed = reader.was_served = True
        else:
            reader.owner.next_request(reader)


try:
    from tidelog._native import FastPathReader
except ImportError:  # built where there was no compiler
    FastPathReader = PyFastPathReader  # type: ignore[assignment, misc]


class FastRequest:
    """A `Turn` that has nothing left to do but to answer. One a connection, because one is under way at a time."""

    body_complete = framing_valid = keep_alive = True
    unread_body_bytes = 0
    owner: Http1Connection
    disconnected: bool

    def respond_json(self, body: bytes, request_id: bytes) -> None:
        house = self.owner.server_state
        says = h1_encoder.CONNECTION_CLOSE if house.draining else b""
        self.send(h1_encoder.encode_json_response(body, request_id, house.date_header.refresh().line, says))

    def respond_json_parts(self, parts: Sequence[bytes], request_id: bytes) -> None:
        house = self.owner.server_state
        says = h1_encoder.CONNECTION_CLOSE if house.draining else b""
        head = h1_encoder.encode_json_head(sum(map(len, parts)), request_id, house.date_header.refresh().line, says)
        self.send(head + parts[0], *parts[1:])

    def respond(self, response: Response) -> None:
        house = self.owner.server_state
        says = h1_encoder.CONNECTION_CLOSE if house.draining else b""
        self.send(*h1_encoder.encode_response(response, house.date_header.refresh().line, says, False))

    def send(self, *data: bytes) -> None:
        owner = self.owner
        if self.disconnected or owner.current is not self:
            return
        owner.write(*data)
        if owner.server_state.draining:
            owner.finish_connection(self)
        else:
            owner.next_request(self)

    def reparse(self, body: bytes) -> None:
        """It was in the lobby and comes by the parser."""
        if not self.disconnected:
            self.owner.reparse(body)

    def on_disconnect(self) -> None:
        self.disconnected = True


class PyFastRequest(FastRequest, PyFastPathReader):
    pass


class NativeFastRequest(FastRequest, FastPathReader):
    pass


try:
    from tidelog._native import send_responses as _compiled
except ImportError:  # built where there was no compiler
    _send_responses = send_responses_py

_BATCH_BYTES_MAX: Final = 1 << 20  # more than that does not wait for the turn's end
_BATCH_REQUESTS_MAX: Final = 1024


class RequestBatcher:
    """On the loop's thread. Gates put themselves, their bodies and the time into its lists, which stay the same."""

    def __init__(self, server_state: ServerState, handler: BatchHandler) -> None:
        self.server_state, self._handler = server_state, handler
        self.requests: list[Any] = []  # `Ticketed`, each with its gate
        self.bodies: list[bytes] = []
        self.received_us: list[int] = []
        self.now_us = handler.now_us

    def schedule_flush(self) -> None:
        """Somebody is about to be the first."""
        self._handler.call_at_turn_end(self.flush)

    def check_limits(self) -> None:
        """Go on at once where too much is held."""
        if len(self.bodies) >= _BATCH_REQUESTS_MAX or sum(map(len, self.bodies)) > _BATCH_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if not self.requests:
            return
        crowd = FastRequestBatch(self.server_state, self.requests[:], self.bodies[:], self.received_us[:])
        self.requests.clear()
        self.bodies.clear()
        self.received_us.clear()
        try:
            self._handler.handle(crowd)
        except Exception as error:
            self.server_state.report_error("requests that came together were not taken", error)
            app = self.server_state.app
            crowd.respond([app.malformed(UNREADABLE_REQUEST, 500, "the server made a mistake") for _ in crowd.bodies])


class FastRequestBatch:
    def __init__(
        self, server_state: ServerState, requests: list[FastRequest], bodies: list[bytes], received_us: list[int]
    ) -> None:
        self._server_state, self.requests, self.bodies, self.received_us = server_state, requests, bodies, received_us

    def __len__(self) -> int:
        return len(self.requests)

    def reparse_and_drop(self, positions: Collection[int]) -> FastRequestBatch:
        """Those that are not in these places, which come by the parser."""
        kept = [at for at in range(len(self)) if at not in positions]
        for at in positions:
            self.requests[at].reparse(self.bodies[at])
        return FastRequestBatch(
            self._server_state,
            [self.requests[at] for at in kept],
            [self.bodies[at] for at in kept],
            [self.received_us[at] for at in kept],
        )

    def respond_json(self, bodies: list[bytes], ids: RequestIds) -> None:
        """200 and a JSON body for each."""
        house = self._server_state
        first, second, third = h1_encoder.json_response_parts(house.date_header.refresh().line)
        if house.draining:
            for number, (each, body) in enumerate(zip(self.requests, bodies, strict=True), ids.first_number):
                each.respond_json(body, b"%b%x" % (ids.prefix, number))
        elif house.use_native:
            _compiled(self.requests, bodies, first, second, third, ids.prefix, ids.first_number)
        else:
            send_responses_py(self.requests, bodies, first, second, third, ids.prefix, ids.first_number)

    def respond(self, responses: list[Response]) -> None:
        """Anything else, for each."""
        for each, response in zip(self.requests, responses, strict=True):
            each.respond(response)


_CACHED_HEADS_MAX: Final = 4096
_HEAD_END: Final = b"\r\n\r\n"
_CONTENT_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(0|[1-9]\d{0,4})[ \t]*\r\n")


class CachedHead(NamedTuple):
    """A head, as a connection sent it and will most likely send it again."""

    before_length: bytes  # up to the digits of its body's length
    after_length: bytes  # and from behind them
    handler: SingleHandler | None
    batcher: RequestBatcher | None  # where those who are taken together wait

    def match_body(self, data: bytes) -> bytes | None:
        """The body of the request that `piece` is, if it has this head."""
        return match_body(data, self.before_length, self.after_length)


class HeadCache:
    """The heads that the connections of one listener have seen."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._heads: dict[bytes, tuple[SingleHandler | None, RequestBatcher | None]] = {}
        self._batchers: dict[BatchHandler, RequestBatcher] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def remember(self, data: bytes, handler: FastHandler) -> None:
        """The head at the front of `piece` was in order, and the like of it go this way."""
        parts = _split_head(data[: data.index(_HEAD_END) + 4])
        if parts is None:
            return
        if len(self._heads) >= _CACHED_HEADS_MAX:  # whoever sends so many different ones gains nothing here
            self._heads.clear()  # others are learned again
            self._batchers.clear()
        if isinstance(handler, BatchHandler):
            lobby = self._batchers.get(handler)
            if lobby is None:
                lobby = self._batchers[handler] = RequestBatcher(self._server_state, handler)
            self._heads[_head_digest(*parts[:2])] = (None, lobby)
        else:
            self._heads[_head_digest(*parts[:2])] = (handler, None)

    def lookup(self, data: bytes) -> tuple[CachedHead, bytes] | None:
        """What is known of the head of the request that `piece` is, to its last byte, and its body."""
        end = data.find(_HEAD_END) + 4
        parts = _split_head(data[:end])
        if parts is None or parts[2] != len(data) - end:
            return None
        before, after, _ = parts
        found = self._heads.get(_head_digest(before, after))
        return None if found is None else (CachedHead(before, after, *found), data[end:])


def _split_head(head: bytes) -> tuple[bytes, bytes, int] | None:
    """A head before and behind the digits of its body's length, and that length; None: it says none, or oddly."""
    found = _CONTENT_LENGTH.search(head)
    return None if found is None else (head[: found.start(1)], head[found.end(1) :], int(found[1]))


def _head_digest(head_before_length: bytes, head_after_length: bytes) -> bytes:
    return sha256(b"%b\0%b" % (head_before_length, head_after_length)).digest()
