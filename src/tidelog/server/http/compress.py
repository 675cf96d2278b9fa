"""[shell] Content codings as an application around the application: neither it nor a connection knows of them.

    request   content-encoding: gzip | zstd      decoded before `handle`; the body's limit holds for what comes out
    answer    accept-encoding: …                 coded when it is large enough to be worth it, or a stream

It is asked only for requests that carry one of the two headers. What is large is coded on another thread, so that
one large answer does not keep the loop from a thousand small ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from tidelog.engine.expansion import Oversized
from tidelog.server.http import codings
from tidelog.server.http.bodies import Bodies, Kept
from tidelog.server.http.seam import (
    Answer,
    Application,
    Body,
    Broken,
    Exchange,
    Express,
    Headers,
    Request,
    Response,
    Sink,
    Stream,
    Upgrade,
)

BYTES_MIN: Final = 1024  # below this a coding saves no packet and costs 25 µs
INLINE_BYTES_MAX: Final = 128 << 10  # above this, another thread; zlib needs a millisecond for as much
_DECODED_AT_ONCE: Final = 2  # bodies, in threads
_VARY: Final = (b"vary", b"accept-encoding")
# An answer that says one of these is about bytes as they are: a part of them, their name, or their coding.
_AS_IT_IS: Final = frozenset((b"content-encoding", b"content-range", b"etag"))


class _Coming(NamedTuple):
    """Between `begin` and `handle`, in the place of the application's own context."""

    context: object
    coding: bytes
    body: Body


class Coded:
    def __init__(self, app: Application, loop: asyncio.AbstractEventLoop, bodies: Bodies | None = None) -> None:
        self._app, self._loop = app, loop
        self._bodies = bodies or Bodies(0, loop.call_soon)
        self._bodies.on_space = self._start_next
        self._waiting: deque[Callable[[], None]] = deque()  # bodies to be decoded in a thread
        self._decoding = self._decoded = 0  # of them: in a thread; decoded and not answered

    def begin(self, request: Request) -> Response | Body:
        wanted = self._app.begin(request)
        header = request.header(b"content-encoding")
        if header is None or isinstance(wanted, Response):
            return wanted
        coding = codings.known(header)
        if coding == b"":
            return wanted
        if coding is None or (wanted.streamed and coding != codings.GZIP):
            self._app.abandoned(request)
            takes = b"gzip" if wanted.streamed else b"gzip, zstd"
            reason = f"content-encoding {header!r} is not taken here, {takes.decode()} is"
            refusal = self._app.malformed(request, 415, reason)
            refusal.headers = (*refusal.headers, (b"accept-encoding", takes))
            return refusal
        request.context = _Coming(request.context, coding, wanted)
        return wanted

    def handle(self, request: Request, exchange: Exchange) -> None:
        accept = request.header(b"accept-encoding")
        choice = codings.Choice(None) if accept is None else codings.choose(accept)
        outer = _Coding(exchange, choice, self._loop)
        coming = request.context
        if not isinstance(coming, _Coming):
            self._app.handle(request, outer)
            return
        request.context = coming.context
        if request.pieces is not None:
            request.pieces, request.length = _decoded(request.pieces, coming.body), None
            self._app.handle(request, outer)
        elif (whole := _small(request.body, coming)) is not None:
            self._decode(request, coming, outer, lambda _: _Done(lambda: whole))
        else:
            self._waiting.append(lambda: self._decode(request, coming, outer, self._in_thread))
            self._start_next()

    def _start_next(self) -> None:
        """Decode bodies that wait, a few at a time and while there is memory for what they become. One is decoded in
        any case."""
        while self._waiting and self._decoding < _DECODED_AT_ONCE:
            if self._bodies.is_full and (self._decoding or self._decoded):
                return
            self._waiting.popleft()()

    def _in_thread(self, work: Callable[[], bytes]) -> asyncio.Future[bytes]:
        self._decoding += 1
        return self._loop.run_in_executor(None, work)

    def _decode(
        self,
        request: Request,
        coming: _Coming,
        exchange: _Coding,
        run: Callable[[Callable[[], bytes]], asyncio.Future[bytes] | _Done],
    ) -> None:
        def finished(done: asyncio.Future[bytes] | _Done) -> None:
            if isinstance(done, asyncio.Future):
                self._decoding -= 1
                self._loop.call_soon(self._start_next)
            try:
                go_on(done)
            except Exception as error:  # the rim: on this side of the thread nobody else would answer
                self._loop.call_exception_handler({"message": f"handle of {request.path} failed", "exception": error})
                exchange.overrule(self._app.malformed(request, 500, "the server made a mistake"))

        def go_on(done: asyncio.Future[bytes] | _Done) -> None:
            if exchange.gone:
                self._app.abandoned(request)
                return
            try:
                request.body = done.result()
            except codings.TooMuch:
                self._app.abandoned(request)
                exchange.respond(self._app.malformed(request, 413, _too_much(coming.body)))
            except codings.NotCoded as error:
                self._app.abandoned(request)
                reason = f"the body is not {coming.coding.decode()}: {error}"
                exchange.respond(self._app.malformed(request, 400, reason))
            else:
                request.length = len(request.body)
                self._keep(request.length, exchange)
                self._app.handle(request, exchange)

        raw, limit = request.body, coming.body.limit
        run(lambda: codings.decode(coming.coding, raw, limit)).add_done_callback(finished)

    def _keep(self, size: int, exchange: _Coding) -> None:
        """Count a decoded body until it is answered, or its peer has left."""
        kept = Kept()
        self._decoded += 1
        self._bodies.set(kept, size)

        def over() -> None:
            self._decoded -= 1
            self._bodies.end(kept)

        exchange.when_over(over)

    def express(self, request: Request, answer_bytes_max: int) -> Express | None:
        """What is too small to be coded goes out as it is."""
        accept = request.header(b"accept-encoding")
        if request.header(b"content-encoding") is not None or (accept is not None and codings.choose(accept).must):
            return None
        return self._app.express(request, min(answer_bytes_max, BYTES_MIN - 1))

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        _give_back(request)
        return self._app.malformed(request, status, reason)

    def abandoned(self, request: Request) -> None:
        _give_back(request)
        self._app.abandoned(request)


def _give_back(request: Request) -> None:
    """Put the application's own context into its place."""
    if isinstance(request.context, _Coming):
        request.context = request.context.context


def _too_much(body: Body) -> str:
    return f"the body is over {body.limit} bytes"


def _small(data: bytes, coming: _Coming) -> bytes | None:
    """A body that is small before and after it is decoded; None for the others, and for what is wrong with it. A few
    bytes can stand for megabytes: so no more than a small body's worth is tried here."""
    if len(data) > INLINE_BYTES_MAX // 8:
        return None
    try:
        return codings.decode(coming.coding, data, min(INLINE_BYTES_MAX, coming.body.limit))
    except (codings.TooMuch, codings.NotCoded):
        return None


async def _decoded(pieces: AsyncIterator[bytes], body: Body) -> AsyncIterator[bytes]:
    """The pieces of a gzip body, inflated a step at a time. Others have their turn between two steps, and a request
    whose peer has left is cancelled there."""
    unpacker, expansion, left = codings.Ungzip(), body.allowance.start(), body.limit
    try:
        async for piece in pieces:
            packed = len(piece)
            for data in unpacker.feed(piece):
                expansion.add(packed, len(data))
                packed, left = 0, left - len(data)
                if left < 0:
                    raise codings.TooMuch
                yield data
                await asyncio.sleep(0)
            expansion.add(packed, 0)
        unpacker.end()
    except Oversized as error:
        raise Broken(413, str(error)) from None
    except codings.TooMuch:
        raise Broken(413, _too_much(body)) from None
    except codings.NotCoded as error:
        raise Broken(400, f"the body is not gzip: {error}") from error


class _Done:
    """Work that was done at once, in the clothes of a future."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._work = work

    def result(self) -> bytes:
        return self._work()

    def add_done_callback(self, call: Callable[[_Done], None]) -> None:
        call(self)


class _Coding:
    """An exchange whose answer is coded as its peer likes it."""

    def __init__(self, exchange: Exchange, choice: codings.Choice, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange, self._choice, self._loop = exchange, choice, loop
        self._answered = self._overruled = False
        self._over: Callable[[], None] | None = None

    def when_over(self, call: Callable[[], None]) -> None:
        """Have it called once, when this is answered or the peer has left."""
        self._over = call
        self._exchange.on_gone(self._end)

    def _end(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            over()

    @property
    def gone(self) -> bool:
        return self._exchange.gone

    def on_gone(self, call: Callable[[], None]) -> None:
        self._exchange.on_gone(lambda: None if self._answered else call())

    def keep_body(self, size: int) -> None:
        self._exchange.keep_body(size)

    def overrule(self, response: Response) -> None:
        """Answer in the handler's place, unless it has; what it says later is dropped."""
        if not self._answered:
            self._answered = self._overruled = True
            self._end()
            self._exchange.respond(response)

    def respond(self, answer: Answer) -> None:
        self._end()
        if self._overruled:
            return
        self._answered = True
        coding = self._choice.coding
        if isinstance(answer, Upgrade) or not self._worth_it(answer) or coding is None:
            self._exchange.respond(answer)
        elif isinstance(answer, Stream):
            self._exchange.respond(self._stream(answer, coding))
        elif len(answer.body) <= INLINE_BYTES_MAX:
            self._exchange.respond(_whole(answer, coding, codings.encode(coding, answer.body)))
        else:
            whole = answer

            def finished(done: asyncio.Future[bytes]) -> None:
                self._exchange.respond(_whole(whole, coding, done.result()))

            self._loop.run_in_executor(None, codings.encode, coding, whole.body).add_done_callback(finished)

    def _worth_it(self, answer: Response | Stream) -> bool:
        if isinstance(answer, Stream):
            if answer.content_type.startswith(b"text/event-stream"):
                return False
        elif not answer.body or (len(answer.body) < BYTES_MIN and not self._choice.must):
            return False
        return all(name not in _AS_IT_IS for name, _ in answer.headers)

    def _stream(self, stream: Stream, coding: bytes) -> Stream:
        async def run(sink: Sink) -> None:
            coded = _CodedSink(sink, codings.packer(coding), self._loop)
            await stream.run(coded)
            coded.end()

        return Stream(stream.status, run, stream.content_type, _labelled(stream.headers, coding))


def _labelled(headers: Headers, coding: bytes) -> Headers:
    return (*headers, (b"content-encoding", coding), _VARY)


def _whole(response: Response, coding: bytes, body: bytes) -> Response:
    headers = _labelled(response.headers, coding)
    return Response(response.status, body, response.content_type, headers, response.close)


class _CodedSink:
    """Codes what is written, and lets go of it at the next turn of the loop: by then more may have come along."""

    def __init__(self, sink: Sink, packer: codings.Packer, loop: asyncio.AbstractEventLoop) -> None:
        self._sink, self._packer, self._loop = sink, packer, loop
        self._due = self._over = False

    @property
    def waiting(self) -> int:
        return self._sink.waiting

    def write(self, data: bytes) -> None:
        if self._over or not data:
            return
        if ready := self._packer.add(data):
            self._sink.write(ready)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        if not self._over and (ready := self._packer.flush()):
            self._sink.write(ready)

    def end(self) -> None:
        self._over = True
        if ready := self._packer.end():
            self._sink.write(ready)

    def hold(self, size: int) -> None:
        self._sink.hold(size)

    @property
    def is_pressed(self) -> bool:
        return self._sink.is_pressed

    async def ready(self) -> None:
        await self._sink.ready()

    async def drained(self) -> None:
        await self._sink.drained()
