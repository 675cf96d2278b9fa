"""[policy] Content codings: which one a peer gets, and the codecs behind them.

`Accept-Encoding` is read as RFC 9110, 12.5.3 has it:
  1. The coding with the highest q above 0 wins; of equals zstd, which is several times cheaper here than gzip.
  2. `identity` is always acceptable, unless it or `*` was given q=0; named with a higher q than the rest, it wins.
  3. Where nothing we know is acceptable, the answer goes out as it is: better than no answer.

[shell] Content codings as an application around the application: neither it nor a connection knows of them.

    request   content-encoding: gzip | zstd      decoded before `handle`; the body's limit holds for what comes out
    answer    accept-encoding: …                 coded when it is large enough to be worth it, or a stream

It is asked only for requests that carry one of the two headers. What is large is coded on another thread, so that
one large answer does not keep the loop from a thousand small ones.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from tidelog.decompression import DECODE_STEP_BYTES, DecodedTooLarge
from tidelog.http.interface import (
    AnyResponse,
    Application,
    BodyError,
    BodyPolicy,
    Exchange,
    FastHandler,
    Headers,
    Request,
    Response,
    Sink,
    Stream,
    Upgrade,
)
from tidelog.http.memory_budget import BodyReservation, RequestBodyBudget

GZIP: Final = b"gzip"
ZSTD: Final = b"zstd"
CODINGS: Final = (ZSTD, GZIP)  # in the order of our preference
_ALIASES: Final = {b"x-gzip": GZIP}
_GZIP_WBITS: Final = 31
_COMPRESSION_LEVEL: Final = (
    1  # of either: the next ones are 1.4 times slower and save one byte in a hundred of JSON rows
)
_INFLATE_STEP_BYTES: Final = 16 << 10  # of compressed bytes, handed to zlib at once
_GZIP_MEMBERS_MAX: Final = (
    1_024  # of a gzip body, unless each has some bytes: one costs 5 µs, and is 20 bytes when it is empty
)
_GZIP_MEMBER_BYTES_MIN: Final = 64


class NegotiatedCoding(NamedTuple):
    coding: bytes | None  # None: as it is
    is_required: bool = False  # the peer does not take it as it is, however small


@lru_cache(maxsize=512)
def negotiate_coding(accept: bytes) -> NegotiatedCoding:
    """The coding for an answer, by an `Accept-Encoding` header."""
    weights: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition(b"=")
            if key.strip() == b"q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
        if name:
            weights[_ALIASES.get(name, name)] = weight
    rest = weights.get(b"*", 0.0)
    best = max(CODINGS, key=lambda coding: weights.get(coding, rest))
    weight = weights.get(best, rest)
    identity = weights.get(b"identity")
    if weight <= 0 or (identity is not None and identity > weight):
        return NegotiatedCoding(None)
    return NegotiatedCoding(best, is_required=identity == 0 or (identity is None and weights.get(b"*") == 0))


def parse_content_encoding(header: bytes) -> bytes | None:
    """The coding that a `Content-Encoding` header names; b"" for none at all, None where we cannot read it."""
    name = header.strip().lower()
    name = _ALIASES.get(name, name)
    if name in CODINGS:
        return name
    return b"" if name in (b"", b"identity") else None


# Whole bodies.


class BodyTooLarge(Exception):
    """What was coded is larger than its reader takes."""


class BadCoding(Exception):
    """The bytes are not in the coding that they were said to be in."""


def compress_body(coding: bytes, data: bytes) -> bytes:
    if coding == ZSTD:
        packed: bytes = pa.Codec("zstd", compression_level=_COMPRESSION_LEVEL).compress(data, asbytes=True)
        return packed
    packer = zlib.compressobj(_COMPRESSION_LEVEL, wbits=_GZIP_WBITS)
    return packer.compress(data) + packer.flush()


def decompress_body(coding: bytes, data: bytes, limit: int) -> bytes:
    """The bytes as they were. Raises TooMuch without having made more than `limit` of them, or NotCoded."""
    parts: list[bytes] = []
    left = limit
    for part in _decompress_zstd(data) if coding == ZSTD else _decompress_gzip(data):
        left -= len(part)
        if left < 0:
            raise BodyTooLarge
        parts.append(part)
    return b"".join(parts)


def _decompress_zstd(data: bytes) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as source:
            while part := source.read(DECODE_STEP_BYTES):
                yield part
    except OSError as error:
        raise BadCoding(str(error)) from error


def _decompress_gzip(data: bytes) -> Iterator[bytes]:
    unpacker = GzipDecompressor()
    yield from unpacker.feed(data)
    unpacker.end()


class GzipDecompressor:
    """gzip, a piece at a time, in bounded steps. Several members in a row are one body, as RFC 1952 has it.

    zlib copies what it did not consume, for each member and each step. So it is fed in windows: with a whole body of
    64 MiB, members of 20 bytes each would cost 64 MiB of copying each.
    """

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_WBITS)
        self._is_empty = True
        self._members, self._input_bytes = 1, 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode one more piece, in parts of at most `STEP_BYTES`."""
        for start in range(0, len(data), _INFLATE_STEP_BYTES):
            window = data[start : start + _INFLATE_STEP_BYTES]
            self._input_bytes += len(window)
            while window:
                if self._member.eof:
                    self._next_member()
                self._is_empty = False
                try:
                    part = self._member.decompress(window, DECODE_STEP_BYTES)
                except zlib.error as error:
                    raise BadCoding(str(error)) from error
                window = self._member.unconsumed_tail or self._member.unused_data
                if part:
                    yield part
            while not self._member.eof and (part := self._drain_member()):
                yield part

    def _drain_member(self) -> bytes:
        """What zlib holds back although it has consumed its input: a step can end in the middle of a match."""
        try:
            return self._member.decompress(b"", DECODE_STEP_BYTES)
        except zlib.error as error:
            raise BadCoding(str(error)) from error

    def _next_member(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_WBITS)
        self._members += 1
        if self._members > _GZIP_MEMBERS_MAX and self._members * _GZIP_MEMBER_BYTES_MIN > self._input_bytes:
            raise BadCoding(
                f"more than {_GZIP_MEMBERS_MAX} gzip members of less than {_GZIP_MEMBER_BYTES_MIN} bytes each"
            )

    def end(self) -> None:
        """There are no more pieces."""
        if not self._is_empty and not self._member.eof:
            raise BadCoding("the gzip stream breaks off")


# Streams.


class StreamCompressor(Protocol):
    """A coding of a stream. Each call returns what is ready to be sent."""

    def compress(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes:
        """All that was added, so that the peer can read it now."""
        ...

    def end(self) -> bytes: ...


class _GzipCompressor:
    def __init__(self) -> None:
        self._compressor = zlib.compressobj(_COMPRESSION_LEVEL, wbits=_GZIP_WBITS)

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data)

    def flush(self) -> bytes:
        return self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._compressor.flush()


class _BytesSink:
    """A file that only remembers, for a codec that wants one."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True

    def take_bytes(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _ZstdCompressor:
    def __init__(self) -> None:
        self._sink = _BytesSink()
        self._stream = pa.CompressedOutputStream(pa.PythonFile(self._sink, mode="w"), "zstd")

    def compress(self, data: bytes) -> bytes:
        self._stream.write(data)
        return self._sink.take_bytes()

    def flush(self) -> bytes:
        self._stream.flush()
        return self._sink.take_bytes()

    def end(self) -> bytes:
        self._stream.close()
        return self._sink.take_bytes()


def create_compressor(coding: bytes) -> StreamCompressor:
    return _ZstdCompressor() if coding == ZSTD else _GzipCompressor()


COMPRESS_BYTES_MIN: Final = 1024  # below this a coding saves no packet and costs 25 µs
INLINE_BYTES_MAX: Final = 128 << 10  # above this, another thread; zlib needs a millisecond for as much
_DECODE_THREADS_MAX: Final = 2  # bodies, in threads
_VARY: Final = (b"vary", b"accept-encoding")
# An answer that says one of these is about bytes as they are: a part of them, their name, or their coding.
_UNCODABLE_HEADERS: Final = frozenset((b"content-encoding", b"content-range", b"etag"))


class _CodedRequest(NamedTuple):
    """Between `begin` and `handle`, in the place of the application's own context."""

    context: object
    coding: bytes
    body: BodyPolicy


class CompressionMiddleware:
    def __init__(
        self, app: Application, loop: asyncio.AbstractEventLoop, bodies: RequestBodyBudget | None = None
    ) -> None:
        self._app, self._loop = app, loop
        self._bodies = bodies or RequestBodyBudget(0, loop.call_soon)
        self._bodies.on_released = self._start_next
        self._decode_queue: deque[Callable[[], None]] = deque()  # bodies to be decoded in a thread
        self._decoding = self._decoded_pending = 0  # of them: in a thread; decoded and not answered

    def begin(self, request: Request) -> Response | BodyPolicy:
        wanted = self._app.begin(request)
        header = request.header(b"content-encoding")
        if header is None or isinstance(wanted, Response):
            return wanted
        coding = parse_content_encoding(header)
        if coding == b"":
            return wanted
        if coding is None or (wanted.is_streamed and coding != GZIP):
            self._app.on_abandoned(request)
            takes = b"gzip" if wanted.is_streamed else b"gzip, zstd"
            reason = f"content-encoding {header!r} is not taken here, {takes.decode()} is"
            refusal = self._app.malformed(request, 415, reason)
            refusal.headers = (*refusal.headers, (b"accept-encoding", takes))
            return refusal
        request.context = _CodedRequest(request.context, coding, wanted)
        return wanted

    def handle(self, request: Request, exchange: Exchange) -> None:
        accept = request.header(b"accept-encoding")
        choice = NegotiatedCoding(None) if accept is None else negotiate_coding(accept)
        outer = _CompressedExchange(exchange, choice, self._loop)
        coming = request.context
        if not isinstance(coming, _CodedRequest):
            self._app.handle(request, outer)
            return
        request.context = coming.context
        if request.body_stream is not None:
            request.body_stream, request.content_length = _decoded_stream(request.body_stream, coming.body), None
            self._app.handle(request, outer)
        elif (whole := _decode_small_body(request.body, coming)) is not None:
            self._decode(request, coming, outer, lambda _: _CompletedWork(lambda: whole))
        else:
            self._decode_queue.append(lambda: self._decode(request, coming, outer, self._decode_in_thread))
            self._start_next()

    def _start_next(self) -> None:
        """Decode bodies that wait, a few at a time and while there is memory for what they become. One is decoded in
        any case."""
        while self._decode_queue and self._decoding < _DECODE_THREADS_MAX:
            if self._bodies.is_full and (self._decoding or self._decoded_pending):
                return
            self._decode_queue.popleft()()

    def _decode_in_thread(self, work: Callable[[], bytes]) -> asyncio.Future[bytes]:
        self._decoding += 1
        return self._loop.run_in_executor(None, work)

    def _decode(
        self,
        request: Request,
        coded: _CodedRequest,
        exchange: _CompressedExchange,
        execute: Callable[[Callable[[], bytes]], asyncio.Future[bytes] | _CompletedWork],
    ) -> None:
        def finished(done: asyncio.Future[bytes] | _CompletedWork) -> None:
            if isinstance(done, asyncio.Future):
                self._decoding -= 1
                self._loop.call_soon(self._start_next)
            try:
                go_on(done)
            except Exception as error:  # the rim: on this side of the thread nobody else would answer
                self._loop.call_exception_handler({"message": f"handle of {request.path} failed", "exception": error})
                exchange.override_response(self._app.malformed(request, 500, "the server made a mistake"))

        def go_on(done: asyncio.Future[bytes] | _CompletedWork) -> None:
            if exchange.is_disconnected:
                self._app.on_abandoned(request)
                return
            try:
                request.body = done.result()
            except BodyTooLarge:
                self._app.on_abandoned(request)
                exchange.respond(self._app.malformed(request, 413, _too_large_reason(coded.body)))
            except BadCoding as error:
                self._app.on_abandoned(request)
                reason = f"the body is not {coded.coding.decode()}: {error}"
                exchange.respond(self._app.malformed(request, 400, reason))
            else:
                request.content_length = len(request.body)
                self._reserve_decoded(request.content_length, exchange)
                self._app.handle(request, exchange)

        raw, limit = request.body, coded.body.bytes_max
        execute(lambda: decompress_body(coded.coding, raw, limit)).add_done_callback(finished)

    def _reserve_decoded(self, size: int, exchange: _CompressedExchange) -> None:
        """Count a decoded body until it is answered, or its peer has left."""
        kept = BodyReservation()
        self._decoded_pending += 1
        self._bodies.update(kept, size)

        def over() -> None:
            self._decoded_pending -= 1
            self._bodies.release(kept)

        exchange.set_completion_callback(over)

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """What is too small to be coded goes out as it is."""
        accept = request.header(b"accept-encoding")
        if request.header(b"content-encoding") is not None or (
            accept is not None and negotiate_coding(accept).is_required
        ):
            return None
        return self._app.fast_handler(request, min(answer_bytes_max, COMPRESS_BYTES_MIN - 1))

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        _restore_context(request)
        return self._app.malformed(request, status, reason)

    def on_abandoned(self, request: Request) -> None:
        _restore_context(request)
        self._app.on_abandoned(request)


def _restore_context(request: Request) -> None:
    """Put the application's own context into its place."""
    if isinstance(request.context, _CodedRequest):
        request.context = request.context.context


def _too_large_reason(body: BodyPolicy) -> str:
    return f"the body is over {body.bytes_max} bytes"


def _decode_small_body(data: bytes, coded: _CodedRequest) -> bytes | None:
    """A body that is small before and after it is decoded; None for the others, and for what is wrong with it. A few
    bytes can stand for megabytes: so no more than a small body's worth is tried here."""
    if len(data) > INLINE_BYTES_MAX // 8:
        return None
    try:
        return decompress_body(coded.coding, data, min(INLINE_BYTES_MAX, coded.body.bytes_max))
    except (BodyTooLarge, BadCoding):
        return None


async def _decoded_stream(pieces: AsyncIterator[bytes], body: BodyPolicy) -> AsyncIterator[bytes]:
    """The pieces of a gzip body, inflated a step at a time. Others have their turn between two steps, and a request
    whose peer has left is cancelled there."""
    unpacker, expansion, left = GzipDecompressor(), body.allowance.start(), body.bytes_max
    try:
        async for piece in pieces:
            packed = len(piece)
            for data in unpacker.feed(piece):
                expansion.add(packed, len(data))
                packed, left = 0, left - len(data)
                if left < 0:
                    raise BodyTooLarge
                yield data
                await asyncio.sleep(0)
            expansion.add(packed, 0)
        unpacker.end()
    except DecodedTooLarge as error:
        raise BodyError(413, str(error)) from None
    except BodyTooLarge:
        raise BodyError(413, _too_large_reason(body)) from None
    except BadCoding as error:
        raise BodyError(400, f"the body is not gzip: {error}") from error


class _CompletedWork:
    """Work that was done at once, in the clothes of a future."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._work = work

    def result(self) -> bytes:
        return self._work()

    def add_done_callback(self, callback: Callable[[_CompletedWork], None]) -> None:
        callback(self)


class _CompressedExchange:
    """An exchange whose answer is coded as its peer likes it."""

    def __init__(self, exchange: Exchange, choice: NegotiatedCoding, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange, self._choice, self._loop = exchange, choice, loop
        self._responded = self._overridden = False
        self._on_complete: Callable[[], None] | None = None

    def set_completion_callback(self, callback: Callable[[], None]) -> None:
        """Have it called once, when this is answered or the peer has left."""
        self._on_complete = callback
        self._exchange.add_disconnect_callback(self._complete)

    def _complete(self) -> None:
        over, self._on_complete = self._on_complete, None
        if over is not None:
            over()

    @property
    def is_disconnected(self) -> bool:
        return self._exchange.is_disconnected

    def add_disconnect_callback(self, callback: Callable[[], None]) -> None:
        self._exchange.add_disconnect_callback(lambda: None if self._responded else callback())

    def keep_body(self, size: int) -> None:
        self._exchange.keep_body(size)

    def override_response(self, response: Response) -> None:
        """Answer in the handler's place, unless it has; what it says later is dropped."""
        if not self._responded:
            self._responded = self._overridden = True
            self._complete()
            self._exchange.respond(response)

    def respond(self, answer: AnyResponse) -> None:
        self._complete()
        if self._overridden:
            return
        self._responded = True
        coding = self._choice.coding
        if isinstance(answer, Upgrade) or not self._should_compress(answer) or coding is None:
            self._exchange.respond(answer)
        elif isinstance(answer, Stream):
            self._exchange.respond(self._compressed_stream(answer, coding))
        elif len(answer.body) <= INLINE_BYTES_MAX:
            self._exchange.respond(_compressed_response(answer, coding, compress_body(coding, answer.body)))
        else:
            whole = answer

            def finished(done: asyncio.Future[bytes]) -> None:
                self._exchange.respond(_compressed_response(whole, coding, done.result()))

            self._loop.run_in_executor(None, compress_body, coding, whole.body).add_done_callback(finished)

    def _should_compress(self, answer: Response | Stream) -> bool:
        if isinstance(answer, Stream):
            if answer.content_type.startswith(b"text/event-stream"):
                return False
        elif not answer.body or (len(answer.body) < COMPRESS_BYTES_MIN and not self._choice.is_required):
            return False
        return all(name not in _UNCODABLE_HEADERS for name, _ in answer.headers)

    def _compressed_stream(self, stream: Stream, coding: bytes) -> Stream:
        async def run(sink: Sink) -> None:
            coded = _CompressedSink(sink, create_compressor(coding), self._loop)
            await stream.run(coded)
            coded.end()

        return Stream(stream.status, run, stream.content_type, _with_coding_headers(stream.headers, coding))


def _with_coding_headers(headers: Headers, coding: bytes) -> Headers:
    return (*headers, (b"content-encoding", coding), _VARY)


def _compressed_response(response: Response, coding: bytes, body: bytes) -> Response:
    headers = _with_coding_headers(response.headers, coding)
    return Response(response.status, body, response.content_type, headers, response.close)


class _CompressedSink:
    """Codes what is written, and lets go of it at the next turn of the loop: by then more may have come along."""

    def __init__(self, sink: Sink, compressor: StreamCompressor, loop: asyncio.AbstractEventLoop) -> None:
        self._sink, self._compressor, self._loop = sink, compressor, loop
        self._flush_scheduled = self._ended = False

    @property
    def pending_bytes(self) -> int:
        return self._sink.pending_bytes

    def write(self, data: bytes) -> None:
        if self._ended or not data:
            return
        if ready := self._compressor.compress(data):
            self._sink.write(ready)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self._ended and (ready := self._compressor.flush()):
            self._sink.write(ready)

    def end(self) -> None:
        self._ended = True
        if ready := self._compressor.end():
            self._sink.write(ready)

    def reserve(self, size: int) -> None:
        self._sink.reserve(size)

    @property
    def is_under_pressure(self) -> bool:
        return self._sink.is_under_pressure

    async def wait_ready(self) -> None:
        await self._sink.wait_ready()

    async def drain(self) -> None:
        await self._sink.drain()
