"""[shell] One request, from its head to the end of its answer, whatever carries it.

    start ──► begin ──► Response ──────────────────────────► answered; the rest of the body is thrown away
                 └────► Body ──► feed, feed … end ──► handle ──► respond ──► answered
                          │           └── one byte too many: 413, and so for a length that says as much
                          └────► streamed: handle at once, feed into pieces; what is wrong with them the handler tells

Held for the application: each request for which `begin` gave a Body reaches either `handle` or `abandoned`, once.
An answer is given once; after the front end had to answer in a handler's place, what the handler says is dropped.
A stream that was accepted is always started, and cancelled when its peer leaves; a peer that leaves before is told
through `on_gone`. Which of the two happens depends on whether `respond` came first, and one of them does.

A connection adds how bytes get out: it overrides what stands under "What carries it".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tidelog.server.http.bodies import Kept
from tidelog.server.http.house import House
from tidelog.server.http.pieces import Pieces, append
from tidelog.server.http.seam import (
    Answer,
    Application,
    Body,
    Broken,
    Gone,
    Headers,
    Request,
    Response,
    Sink,
    Stream,
    Upgrade,
)

_COUNTED_BYTES: Final = 16 << 10  # of a body that counts among those that are kept: small ones cost what a head does


class Fault(NamedTuple):
    """What is wrong with a request, in the terms of its answer."""

    status: int
    reason: str
    headers: Headers = ()


class Talk:
    """The exchange that handlers see. Plain class attributes are its defaults: most requests never change most of
    them, and setting all of them would cost as much as parsing the request."""

    fault: Fault | None = None  # the head is wrong: answered in place of asking the application
    started = False
    complete = False  # the whole body is here, or nothing more of it will come
    answered = False
    finished = False  # the whole answer was written
    away = False  # its peer has left
    received = 0  # bytes of the body so far
    _body: Body | None = None
    _chunks: deque[bytes | bytearray] | None = None
    _pieces: Pieces | None = None
    _handled = False
    _overruled = False
    _calls: list[Callable[[], None]] | None = None
    _task: asyncio.Task[None] | None = None
    _kept: Kept | None = None  # its body, where it is not small

    def __init__(self, house: House, app: Application, request: Request) -> None:
        self.house, self.app, self.request = house, app, request

    # The wire's side.

    def start(self) -> None:
        """It is this request's turn. Bytes of its body may have come before."""
        self.started = True
        if self.fault is not None:
            response = self.app.malformed(self.request, self.fault.status, self.fault.reason)
            response.headers = (*response.headers, *self.fault.headers)
            self._settle(response)
            return
        try:
            wanted = self.app.begin(self.request)
        except Exception as error:  # the rim: whatever a handler does wrong is one peer's 500
            self._settle(self._mistake("begin", error))
            return
        if isinstance(wanted, Response):
            self._settle(wanted)
            return
        self._body = wanted
        if self.received > wanted.limit or (self.request.length or 0) > wanted.limit:
            self._too_large(wanted)
        elif wanted.streamed:
            self._begin_pieces()
        elif self.complete:
            self._handle()
        else:
            self.invite()

    def feed(self, data: bytes) -> None:
        """Some more of the body."""
        self.received += len(data)
        if self._pieces is None and (self.answered or self._handled):
            self.consumed(len(data))
            self.thrown_away(len(data))
            return
        body = self._body
        if body is not None and self.received > body.limit:
            self.consumed(len(data))
            self._too_large(body)
        elif self._pieces is not None:
            self._pieces.feed(data)
        else:
            if self._chunks is None:
                self._chunks = deque((data,))
            else:
                append(self._chunks, data)
            if self.received > _COUNTED_BYTES:
                if self._kept is None:
                    self._kept = Kept(self._refuse_body)
                self.house.bodies.set(self._kept, self.received)
            if self.started:
                self.consumed(len(data))

    def end(self) -> None:
        """That was the whole body."""
        self.complete = True
        if self.finished:
            self.over()
        elif self._pieces is not None:
            if self._kept is not None:
                self.house.bodies.whole(self._kept)
            self._pieces.end()
        elif self._body is not None and not self.answered and not self._handled:
            self._handle()

    def broken(self, status: int, reason: str) -> None:
        """The rest of the body will never come, or cannot be understood."""
        self.complete = True
        if not self.started:
            self.fault = Fault(status, reason)
        elif self.finished:
            self.over()
        else:
            self._complain(status, reason)

    def leave(self) -> None:
        """The peer has left."""
        self.away = self.complete = True
        self._chunks = None
        self._let_go()
        self._drop_pieces(Gone)
        if self._task is not None:
            self.house.stop(self._task)
        elif self._body is not None and not self.answered:
            if not self._handled:
                self._abandon()
            for call in self._calls or ():
                self._guarded("on_gone", call)

    @property
    def held_bytes(self) -> int:
        """Of a streamed body: what its handler has not taken."""
        return 0 if self._pieces is None else self._pieces.held_bytes

    # The handler's side.

    @property
    def gone(self) -> bool:
        return self.away

    def on_gone(self, call: Callable[[], None]) -> None:
        if self.answered:
            return
        if self.away:
            self._guarded("on_gone", call)
        elif self._calls is None:
            self._calls = [call]
        else:
            self._calls.append(call)

    def keep_body(self, size: int) -> None:
        if self.answered or self.away or self._pieces is None or (self._kept is None and size <= _COUNTED_BYTES):
            return
        if self._kept is None:
            self._kept = Kept(None if self.complete else self._refuse_body)
        self.house.bodies.set(self._kept, size)

    def respond(self, answer: Answer) -> None:
        if self._overruled or self.away:
            return
        if self.answered:
            raise RuntimeError(f"{self.request.method} {self.request.path} was answered already")
        if isinstance(answer, Response):
            self._settle(answer)
        else:
            self.answered, self._calls = True, None
            self._let_go()
            if isinstance(answer, Upgrade):
                self.upgrade(answer)
                return
            try:
                self.stream(answer)
            except (ValueError, TypeError) as error:
                self.send(self._mistake("the head of the stream", error))

    # Between the two.

    def _begin_pieces(self) -> None:
        """Hand over what came so far, and have the rest come as it is taken."""
        self._let_go()  # from now on the handler says what it keeps
        self._pieces = pieces = Pieces(self.house.loop, self.consumed)
        self.request.pieces = pieces
        for data in self._chunks or ():
            pieces.feed(bytes(data))
        self._chunks = None
        if self.complete:
            pieces.end()
        else:
            self.invite()
        self._handle()

    def _handle(self) -> None:
        chunks = self._chunks
        if chunks is not None:
            self.request.body = bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)
            self._chunks = None
        if self._kept is not None:
            self.house.bodies.whole(self._kept)
        self._handled = True
        try:
            self.app.handle(self.request, self)
        except Exception as error:  # the rim, as above
            if self.answered:
                self._report("handle", error)
            else:
                self._overrule(self._mistake("handle", error))

    def _too_large(self, body: Body) -> None:
        self._complain(413, f"the body is over {body.limit} bytes")

    def _complain(self, status: int, reason: str) -> None:
        """Answer what is wrong with the body, or have the handler do it that has begun to read it."""
        if self._handled:
            self._drop_pieces(Broken(status, reason))
        elif not self.answered:
            self._overrule(self.app.malformed(self.request, status, reason))

    def _overrule(self, response: Response) -> None:
        self._overruled = True
        if self._body is not None and not self._handled:
            self._abandon()
        self._settle(response)

    def _refuse_body(self) -> None:
        """There is no memory for the rest of the body."""
        limit = self.house.bodies.bytes_max
        said = f"request bodies of {limit} bytes are kept already and this was the largest that was still coming"
        self.house.refusals.count("body_bytes", self.request.peer, f"{said}; it was refused")
        self._let_go()
        self._complain(429, said)

    def _let_go(self) -> None:
        """Its body is not needed any more."""
        if self._kept is not None:
            self.house.bodies.end(self._kept)
            self._kept = None

    def _settle(self, response: Response) -> None:
        self.answered, self._calls = True, None
        self._let_go()
        if not self.complete:
            self._chunks = None
            self._drop_pieces(Gone)
        if not self.away:
            try:
                self.send(response)
            except (ValueError, TypeError) as error:  # a header that cannot be sent; nothing was written
                self.send(self._mistake("the answer", error))

    def _drop_pieces(self, error: Exception | type[Exception]) -> None:
        """Whoever reads them gets the error; what else comes is thrown away."""
        if self._pieces is not None:
            self._pieces.fail(error)
            self._pieces = None

    def _abandon(self) -> None:
        self._guarded("abandoned", lambda: self.app.abandoned(self.request))

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the rim, as above; here there is nobody left to tell
            self._report(name, error)

    def _report(self, name: str, error: Exception) -> None:
        self.house.report(f"{name} of {self.request.method} {self.request.path} failed", error)

    def _mistake(self, name: str, error: Exception) -> Response:
        self._report(name, error)
        return self.app.malformed(self.request, 500, "the server made a mistake")

    def spawn(self, stream: Stream, sink: Sink) -> None:
        """Run a stream that was accepted, into `sink`."""
        self._task = self.house.spawn(self._run(stream, sink))

    async def _run(self, stream: Stream, sink: Sink) -> None:
        whole = False
        try:
            await stream.run(sink)
            whole = True
        except (Gone, Broken):
            pass  # the peer left, or its body did, and the stream noticed: nothing to tell anybody
        except Exception as error:  # the rim, as above
            self._report("the stream", error)
        finally:
            self._task = None
            self._drop_pieces(Gone)
            if not self.away:
                self.streamed(whole)

    # What carries it.

    def invite(self) -> None:
        """The body is wanted: tell a peer that waits for it."""

    def consumed(self, size: int) -> None:
        """So many bytes of the body need no room any more."""

    def thrown_away(self, size: int) -> None:
        """So many bytes of the body came that nobody wants."""

    def send(self, response: Response) -> None:
        """Write a whole answer. The body may not be complete."""

    def stream(self, stream: Stream) -> None:
        """Write the head of a stream, and `spawn` it."""

    def streamed(self, whole: bool) -> None:
        """A stream is over: end it, or cut it off."""

    def upgrade(self, answer: Upgrade) -> None:
        """Become a WebSocket."""
        raise RuntimeError(f"{self.request.method} {self.request.path} cannot become a WebSocket for {answer.run}")

    def over(self) -> None:
        """Both the request and its answer are done."""
