"""Content codings (gzip, zstd): negotiation, codecs, and the middleware that applies them."""

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
from tidelog.http.limits import BodyReservation, RequestBodyBudget

GZIP: Final = b"gzip"
ZSTD: Final = b"zstd"
CODINGS: Final = (ZSTD, GZIP)  # in the order of our preference
_ALIASES: Final = {b"x-gzip": GZIP}
_GZIP_WBITS: Final = 31
_COMPRESSION_LEVEL: Final = 1  # of both: the next level is 1.4 times slower and saves 1 % of JSON rows
_INFLATE_STEP_BYTES: Final = 16 << 10  # compressed bytes passed to zlib at once
_GZIP_MEMBERS_MAX: Final = 1_024  # of a body with small members: each costs 5 µs, and an empty one is 20 bytes
_GZIP_MEMBER_BYTES_MIN: Final = 64


class NegotiatedCoding(NamedTuple):
    coding: bytes | None  # None: identity
    is_required: bool = False  # the client does not accept identity, not even for small responses


@lru_cache(maxsize=512)
def negotiate_coding(accept: bytes) -> NegotiatedCoding:
    """Choose the coding of a response by an `Accept-Encoding` header (RFC 9110, 12.5.3).

    1. The coding with the highest q above 0 wins; of equals zstd, which is several times cheaper here than gzip.
    2. `identity` is acceptable unless it or `*` has q=0; with a higher q than the others it wins.
    3. If no known coding is acceptable, the response is sent as identity: better than no response.
    """
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
    """Return the coding that a `Content-Encoding` header names; b"" for identity, None for an unsupported one."""
    name = header.strip().lower()
    name = _ALIASES.get(name, name)
    if name in CODINGS:
        return name
    return b"" if name in (b"", b"identity") else None


# Whole bodies.


class BodyTooLarge(Exception):
    """The decoded body is larger than its limit."""


class BadCoding(Exception):
    """The bytes are not valid in the declared coding."""


def compress_body(coding: bytes, data: bytes) -> bytes:
    if coding == ZSTD:
        packed: bytes = pa.Codec("zstd", compression_level=_COMPRESSION_LEVEL).compress(data, asbytes=True)
        return packed
    packer = zlib.compressobj(_COMPRESSION_LEVEL, wbits=_GZIP_WBITS)
    return packer.compress(data) + packer.flush()


def decompress_body(coding: bytes, data: bytes, limit: int) -> bytes:
    """Decode a body. Raises BadCoding, or BodyTooLarge before more than `limit` bytes were decoded."""
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
    """Decodes gzip in bounded steps. Several members in a row are one body (RFC 1952).

    zlib copies the input that it did not consume, for each member and each step. So it is fed in windows: with a whole
    body of 64 MiB, each member of 20 bytes would cost 64 MiB of copying.
    """

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_WBITS)
        self._is_empty = True
        self._members, self._input_bytes = 1, 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode the next input, in parts of at most `DECODE_STEP_BYTES`."""
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
        """Return output that zlib still has after it consumed its input: a step can end in the middle of a match."""
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
        """The input is complete."""
        if not self._is_empty and not self._member.eof:
            raise BadCoding("the gzip stream is incomplete")


# Streams.


class StreamCompressor(Protocol):
    """Compresses a stream. Each call returns the bytes that are ready to be sent."""

    def compress(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes:
        """Return everything added so far in a form that the client can decode now."""
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
    """A file that collects what is written, for a codec that needs a file."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

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


COMPRESS_BYTES_MIN: Final = 1024  # compressing less saves no packet and costs 25 µs
INLINE_BYTES_MAX: Final = 128 << 10  # more is coded in a thread: zlib needs a millisecond for this much
_DECODE_THREADS_MAX: Final = 2
_VARY: Final = (b"vary", b"accept-encoding")
# A response with one of these describes its exact bytes: a range, an entity tag, or a coding.
_UNCODABLE_HEADERS: Final = frozenset((b"content-encoding", b"content-range", b"etag"))


class _CodedRequest(NamedTuple):
    """The request's context between `begin` and `handle`, with the application's own inside."""

    context: object
    coding: bytes
    body: BodyPolicy


class CompressionMiddleware:
    """Content codings as an application around the application: neither it nor a connection knows of them.

        request    content-encoding: gzip | zstd    decoded before `handle`; the body's limit holds for the result
        response   accept-encoding: …               compressed if it is large enough, or a stream

    Only requests with one of the two headers pass through here. Large bodies are coded in a thread, so that one large
    response does not block the loop for a thousand small ones.
    """

    def __init__(
        self, app: Application, loop: asyncio.AbstractEventLoop, bodies: RequestBodyBudget | None = None
    ) -> None:
        self._app, self._loop = app, loop
        self._bodies = bodies or RequestBodyBudget(0, loop.call_soon)
        self._bodies.on_released = self._start_next
        self._decode_queue: deque[Callable[[], None]] = deque()  # starts the decoding of a body in a thread
        self._decoding = 0  # bodies in threads
        self._decoded_pending = 0  # decoded bodies whose requests are not answered

    def begin(self, request: Request) -> Response | BodyPolicy:
        decision = self._app.begin(request)
        header = request.header(b"content-encoding")
        if header is None or isinstance(decision, Response):
            return decision
        coding = parse_content_encoding(header)
        if coding == b"":
            return decision
        if coding is None or (decision.is_streamed and coding != GZIP):
            self._app.on_abandoned(request)
            supported = b"gzip" if decision.is_streamed else b"gzip, zstd"
            reason = f"content-encoding {header!r} is not supported here, {supported.decode()} is"
            refusal = self._app.malformed(request, 415, reason)
            refusal.headers = (*refusal.headers, (b"accept-encoding", supported))
            return refusal
        request.context = _CodedRequest(request.context, coding, decision)
        return decision

    def handle(self, request: Request, exchange: Exchange) -> None:
        accept = request.header(b"accept-encoding")
        choice = NegotiatedCoding(None) if accept is None else negotiate_coding(accept)
        outer = _CompressedExchange(exchange, choice, self._loop)
        coded = request.context
        if not isinstance(coded, _CodedRequest):
            self._app.handle(request, outer)
            return
        request.context = coded.context
        if request.body_stream is not None:
            request.body_stream, request.content_length = _decoded_stream(request.body_stream, coded.body), None
            self._app.handle(request, outer)
        elif (body := _decode_small_body(request.body, coded)) is not None:
            self._handle_decoded(request, coded, outer, lambda: body)
        else:
            self._decode_queue.append(lambda: self._decode_in_thread(request, coded, outer))
            self._start_next()

    def _start_next(self) -> None:
        """Decode queued bodies, a few at a time and while there is memory for the results. One is decoded in any
        case."""
        while self._decode_queue and self._decoding < _DECODE_THREADS_MAX:
            if self._bodies.is_full and (self._decoding or self._decoded_pending):
                return
            self._decode_queue.popleft()()

    def _decode_in_thread(self, request: Request, coded: _CodedRequest, exchange: _CompressedExchange) -> None:
        def on_decoded(future: asyncio.Future[bytes]) -> None:
            self._decoding -= 1
            self._loop.call_soon(self._start_next)
            self._handle_decoded(request, coded, exchange, future.result)

        self._decoding += 1
        args = (coded.coding, request.body, coded.body.bytes_max)
        self._loop.run_in_executor(None, decompress_body, *args).add_done_callback(on_decoded)

    def _handle_decoded(
        self, request: Request, coded: _CodedRequest, exchange: _CompressedExchange, result: Callable[[], bytes]
    ) -> None:
        """Call the handler with the decoded body, which `result` returns; respond if decoding failed."""
        try:
            if exchange.is_disconnected:
                self._app.on_abandoned(request)
                return
            try:
                request.body = result()
            except (BodyTooLarge, BadCoding) as error:
                self._app.on_abandoned(request)
                is_too_large = isinstance(error, BodyTooLarge)
                reason = _too_large_reason(coded.body) if is_too_large else _bad_coding_reason(coded.coding, error)
                exchange.respond(self._app.malformed(request, 413 if is_too_large else 400, reason))
                return
            request.content_length = len(request.body)
            self._reserve_decoded(request.content_length, exchange)
            self._app.handle(request, exchange)
        except Exception as error:  # after a thread no caller would answer
            self._loop.call_exception_handler({"message": f"handle of {request.path} failed", "exception": error})
            exchange.override_response(self._app.malformed(request, 500, "the server made a mistake"))

    def _reserve_decoded(self, size: int, exchange: _CompressedExchange) -> None:
        """Count a decoded body until its request is answered or the client disconnects."""
        reservation = BodyReservation()
        self._decoded_pending += 1
        self._bodies.update(reservation, size)

        def release() -> None:
            self._decoded_pending -= 1
            self._bodies.release(reservation)

        exchange.set_completion_callback(release)

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """Use the fast path for responses that are too small to be compressed."""
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
    """Restore the application's own context."""
    if isinstance(request.context, _CodedRequest):
        request.context = request.context.context


def _too_large_reason(body: BodyPolicy) -> str:
    return f"the body is over {body.bytes_max} bytes"


def _bad_coding_reason(coding: bytes, error: Exception) -> str:
    return f"the body is not {coding.decode()}: {error}"


def _decode_small_body(data: bytes, coded: _CodedRequest) -> bytes | None:
    """Decode a body that is small before and after; None for others and for invalid ones. A few bytes can decode to
    megabytes, so this stops at the size of a small body."""
    if len(data) > INLINE_BYTES_MAX // 8:
        return None
    try:
        return decompress_body(coded.coding, data, min(INLINE_BYTES_MAX, coded.body.bytes_max))
    except (BodyTooLarge, BadCoding):
        return None


async def _decoded_stream(chunks: AsyncIterator[bytes], body: BodyPolicy) -> AsyncIterator[bytes]:
    """Decode a streamed gzip body in steps. The loop runs between two steps, and a request whose client disconnected is
    cancelled there."""
    decompressor, expansion, bytes_left = GzipDecompressor(), body.allowance.start(), body.bytes_max
    try:
        async for chunk in chunks:
            input_bytes = len(chunk)
            for data in decompressor.feed(chunk):
                expansion.add(input_bytes, len(data))
                input_bytes, bytes_left = 0, bytes_left - len(data)
                if bytes_left < 0:
                    raise BodyTooLarge
                yield data
                await asyncio.sleep(0)
            expansion.add(input_bytes, 0)
        decompressor.end()
    except DecodedTooLarge as error:
        raise BodyError(413, str(error)) from None
    except BodyTooLarge:
        raise BodyError(413, _too_large_reason(body)) from None
    except BadCoding as error:
        raise BodyError(400, _bad_coding_reason(GZIP, error)) from error


class _CompressedExchange:
    """An exchange that compresses its response with the negotiated coding."""

    def __init__(self, exchange: Exchange, choice: NegotiatedCoding, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange, self._choice, self._loop = exchange, choice, loop
        self._responded = self._overridden = False
        self._on_complete: Callable[[], None] | None = None

    def set_completion_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when this is answered or the client disconnects."""
        self._on_complete = callback
        self._exchange.add_disconnect_callback(self._complete)

    def _complete(self) -> None:
        callback, self._on_complete = self._on_complete, None
        if callback is not None:
            callback()

    @property
    def is_disconnected(self) -> bool:
        return self._exchange.is_disconnected

    def add_disconnect_callback(self, callback: Callable[[], None]) -> None:
        self._exchange.add_disconnect_callback(lambda: None if self._responded else callback())

    def keep_body(self, size: int) -> None:
        self._exchange.keep_body(size)

    def override_response(self, response: Response) -> None:
        """Respond in the handler's place unless it has responded; a later response of it is dropped."""
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
            response = answer

            def on_compressed(future: asyncio.Future[bytes]) -> None:
                self._exchange.respond(_compressed_response(response, coding, future.result()))

            self._loop.run_in_executor(None, compress_body, coding, response.body).add_done_callback(on_compressed)

    def _should_compress(self, answer: Response | Stream) -> bool:
        if isinstance(answer, Stream):
            if answer.content_type.startswith(b"text/event-stream"):
                return False
        elif not answer.body or (len(answer.body) < COMPRESS_BYTES_MIN and not self._choice.is_required):
            return False
        return all(name not in _UNCODABLE_HEADERS for name, _ in answer.headers)

    def _compressed_stream(self, stream: Stream, coding: bytes) -> Stream:
        async def run(sink: Sink) -> None:
            compressed_sink = _CompressedSink(sink, create_compressor(coding), self._loop)
            await stream.run(compressed_sink)
            compressed_sink.end()

        return Stream(stream.status, run, stream.content_type, _with_coding_headers(stream.headers, coding))


def _with_coding_headers(headers: Headers, coding: bytes) -> Headers:
    return (*headers, (b"content-encoding", coding), _VARY)


def _compressed_response(response: Response, coding: bytes, body: bytes) -> Response:
    headers = _with_coding_headers(response.headers, coding)
    return Response(response.status, body, response.content_type, headers, response.close)


class _CompressedSink:
    """Compresses what is written and flushes in the next loop turn, so that writes of one turn share a flush."""

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
