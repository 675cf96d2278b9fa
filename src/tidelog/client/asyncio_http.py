"""The asyncio HTTP client: kept connections of one event loop, without dependencies.

    request ──► an idle connection, or a new one ──► response ──► idle again

`ClientCore` decides what is sent and repeated, as for the blocking client; this module has the streams. HTTP/1.1
responses are read by `_Connection`: a length, chunks, or up to the end of the connection.

**Cancellation.** A call that has sent nothing but reads is ended at once, and its connection is closed: nothing was
done. A call that has sent a change is finished first, for at most `CANCEL_WAIT_S`. Then the CancelledError is raised;
its `__cause__` is the outcome: `WriteCancelled` with the result, the error of the call, or InDoubt where the server did
not respond in that time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Self, TypeVar

from tidelog.client.core import (
    REQUEST_TIMEOUT_S,
    Call,
    ClientCore,
    ConnectionLost,
    NotConnected,
    Pause,
    Request,
    Response,
    Steps,
)
from tidelog.clock import SystemClock
from tidelog.errors import Closed, Error, InDoubt, WriteCancelled
from tidelog.types import Buffer

CANCEL_WAIT_S: Final = 10.0  # how long a cancelled change is waited for
_CONNECTIONS_MAX: Final = 64  # requests at one time; further ones wait for a connection
_HEAD_BYTES_MAX: Final = 256 << 10
_READ_BYTES: Final = 256 << 10
_ERROR_STATUS_MIN: Final = 300
T = TypeVar("T")


class _Progress:
    """Whether a call has sent a request that may have changed something."""

    __slots__ = ("has_sent_change",)

    def __init__(self) -> None:
        self.has_sent_change = False


class _Connection:
    """One connection: sends a request, then reads its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.is_used = False  # it has had a response before
        self.is_repetition = False  # it was opened for a request that another connection lost
        self._is_reusable = False
        self._left: int | None = 0  # bytes of the body that were not read yet; None: chunks, -1: up to the end
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def is_idle(self) -> bool:
        """Whether the whole response was read and another request may follow."""
        return self._is_reusable and self._left == 0 and not self._reader.at_eof()

    async def send(self, head: bytes, request: Request) -> None:
        try:
            self._writer.write(head if request.body is None else head + bytes(request.body))
            await self._writer.drain()
            if request.chunks is not None:
                async for chunk in _iterate(request.chunks):
                    if chunk:
                        self._writer.write(b"%x\r\n%b\r\n" % (len(chunk), bytes(chunk)))
                        await self._writer.drain()
                self._writer.write(b"0\r\n\r\n")
                await self._writer.drain()
        except OSError as error:
            if request.chunks is None:
                raise ConnectionLost(str(error) or type(error).__name__) from None
            return  # the server may have refused the body before its end: its response says so

    async def read_head(self, method: str) -> None:
        try:
            while True:
                lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                version, status, *_ = lines[0].split(" ", 2)
                self.status = int(status)
                if self.status >= 200:
                    break  # others announce the response
            self.headers = {}
            for line in filter(None, lines[1:]):
                name, _, value = line.partition(":")
                self.headers[name.strip().lower()] = value.strip()
            self._is_reusable = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
            self._left = self._body_length(method)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(str(error) or type(error).__name__) from None

    def _body_length(self, method: str) -> int | None:
        if method == "HEAD" or self.status in (204, 304):
            return 0
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return None
        if "content-length" in self.headers:
            return int(self.headers["content-length"])
        self._is_reusable = False
        return -1

    async def read_piece(self) -> bytes:
        """Return the next bytes of the body; empty at its end."""
        try:
            if self._left is None:
                return await self._read_chunk()
            if self._left == 0:
                return b""
            piece = await self._reader.read(_READ_BYTES if self._left < 0 else min(self._left, _READ_BYTES))
            if not piece:
                if self._left > 0:
                    raise ConnectionLost("the response broke off")
                self._left = 0
            elif self._left > 0:
                self._left -= len(piece)
            return piece
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(str(error) or type(error).__name__) from None

    async def _read_chunk(self) -> bytes:
        size = int((await self._reader.readline()).partition(b";")[0], 16)
        if size:
            piece = await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            return piece
        while (await self._reader.readline()).strip():
            pass  # trailers
        self._left = 0
        return b""

    async def read_body(self) -> bytes:
        pieces = []
        while piece := await self.read_piece():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._is_reusable = False
        with suppress(RuntimeError):  # the loop is closed
            self._writer.close()


async def _iterate(chunks: Iterable[Buffer] | AsyncIterable[Buffer]) -> AsyncIterator[Buffer]:
    """Yield chunks; a blocking iterable runs in a thread."""
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield chunk
        return
    iterator = iter(chunks)
    while (following := await asyncio.to_thread(next, iterator, None)) is not None:
        yield following


class AsyncClient:
    """A server at `url`, for the tasks of one event loop."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        retry_ms: int = 0,
    ) -> None:
        self._clock = SystemClock()
        self.core = ClientCore(url, key=key, retry_ms=retry_ms, clock=self._clock)
        self.url, self._timeout_s = url, timeout_s
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(_CONNECTIONS_MAX)
        self._is_closed = False
        self._tls = ssl.create_default_context() if self.core.address.is_tls else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls that are under way are finished by their own tasks."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @property
    def repeats_for_ms(self) -> int:
        """The longest time from the first attempt of a request to the last one."""
        return self.core.retry_ms + int(self._timeout_s * 1000)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────

    async def call(self, call: Call[T]) -> T:
        """Run a call to its end and return its result."""
        progress = _Progress()
        task = asyncio.ensure_future(self._perform(self.core.run(call), progress))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as cancelled:
            if not progress.has_sent_change and not task.done():
                task.cancel()
                await _wait_quietly(task)
                raise
            raise cancelled from await self._outcome(task)

    async def _outcome(self, task: asyncio.Future[T]) -> BaseException | None:
        """Wait for a change that was cancelled; return what became of it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CANCEL_WAIT_S
        while not task.done() and (left := until - loop.time()) > 0:
            with suppress(asyncio.CancelledError):  # again: the outcome is still to be known
                await asyncio.wait({task}, timeout=left)
        if not task.done():
            task.cancel()
            await _wait_quietly(task)
            return InDoubt(
                f"{self.url} did not respond to a call that was cancelled; it is unknown whether anything was written, "
                "check before you retry"
            )
        if task.cancelled():
            return None
        return task.exception() or WriteCancelled(self.url, result=task.result())

    async def _perform(self, steps: Steps[T], progress: _Progress) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    response = await self._exchange(step, progress)
                except (ConnectionLost, NotConnected) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(response)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    # ── connections ───────────────────────────────────────────────────────────────────────────

    async def _exchange(self, request: Request, progress: _Progress) -> Response:
        """Send a request and read its response. Raises ConnectionLost or NotConnected."""
        started_ms = self._clock.monotonic_ms()
        try:
            async with asyncio.timeout(self._timeout_s + request.wait_s), self._slots:
                connection = await self._send(request, progress)
                try:
                    content = await connection.read_body()
                finally:
                    self._release(connection)
        except TimeoutError:
            raise ConnectionLost(f"no response within {self._timeout_s + request.wait_s:g} s") from None
        elapsed_ms = self._clock.monotonic_ms() - started_ms
        return Response(connection.status, connection.headers, content, elapsed_ms, connection.is_repetition)

    async def _send(self, request: Request, progress: _Progress, *, new: bool = False) -> _Connection:
        target, headers = self.core.head(request)  # raises for an argument that cannot be sent
        connection = await self._take_connection(new)
        connection.is_repetition = new
        address = self.core.address
        lines = [f"{request.method} {target} HTTP/1.1", f"Host: {address.host}:{address.port}"]
        if request.chunks is not None:
            headers["Transfer-Encoding"] = "chunked"
        elif request.body is not None or request.method not in ("GET", "HEAD"):
            headers["Content-Length"] = str(len(memoryview(request.body or b"")))
        lines += [f"{name}: {value}" for name, value in headers.items()]
        try:
            progress.has_sent_change = progress.has_sent_change or not request.is_read
            await connection.send("\r\n".join([*lines, "", ""]).encode("latin-1"), request)
            await connection.read_head(request.method)
            connection.is_used = True
            return connection
        except ConnectionLost:
            connection.close()
            if connection.is_used and request.retry_safe and request.chunks is None:
                try:
                    return await self._send(request, progress, new=True)
                except NotConnected as error:
                    raise ConnectionLost(str(error)) from None  # the first attempt may have been executed
            raise
        except BaseException:
            connection.close()
            raise

    async def _take_connection(self, new: bool) -> _Connection:
        if self._is_closed:
            raise Closed(f"the client of {self.url} is closed; nothing was done, connect again")
        while self._idle and not new:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
            connection.close()
        address = self.core.address
        try:
            streams = await asyncio.open_connection(address.host, address.port, ssl=self._tls, limit=_HEAD_BYTES_MAX)
        except OSError as error:
            raise NotConnected(str(error) or type(error).__name__) from None
        return _Connection(*streams)

    def _release(self, connection: _Connection) -> None:
        if connection.is_idle and not self._is_closed:
            self._idle.append(connection)
        else:
            connection.close()

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[_Connection]:
        """Send a GET request and yield the connection, to read the body while it arrives."""
        request = Request("GET", path, query=query or {}, headers=headers or {}, retry_safe=True, accept="*/*")
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._send(request, _Progress())
                if connection.status >= _ERROR_STATUS_MIN:
                    content = await connection.read_body()
                    raise self.core.errors.refused(path, connection.status, connection.headers, content)
            yield connection
        except ConnectionLost as error:
            raise self.core.errors.lost(str(error)) from None
        except NotConnected as error:
            raise self.core.errors.unreachable(str(error)) from None
        finally:
            if connection is not None:
                connection.close()


async def _wait_quietly(task: asyncio.Future[T]) -> None:
    """Wait until a cancelled task has ended."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    with suppress(asyncio.CancelledError, Error):
        task.result()
