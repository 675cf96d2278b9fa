"""The load generator: prebuilt bytes on raw sockets, one thread, one epoll. The same loop drives every server.

    ask ──► socket ──► server ──► socket ──► is the reply whole? ──yes──► note how long it took, send the next ask
                                                 └──no──► read on

A connection has one ask in the air, as a caller that waits for its answer has; a pipeline of a hundred commands is one
ask with a hundred replies. Replies are not parsed but measured: HTTP by its Content-Length, Redis by its line ends and
NATS by its braces, whose number is known. So an ask costs the generator a `recv`, a `send` and some 2 µs of Python,
whoever answers it: it can make 100 000 a second. What was really stored is counted afterwards, on the server. `busy`
tells how much of a processor the generator used: near 1 it could not keep up, and the figure is a lower bound.
"""

from __future__ import annotations

import gc
import mmap
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from select import EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, epoll
from typing import Protocol

_RECV_BYTES = 64 << 10  # below what the allocator gives back to the system each time
_TIMEOUT_S = 30.0
_LENGTH = b"content-length: "
_CHUNKED = b"transfer-encoding: chunked"


class Reply(Protocol):
    """Tells where the replies to one ask end. One of them serves a connection from ask to ask."""

    def whole(self, data: bytes) -> bool:
        """Whether what came ends with these bytes."""
        ...


class MarkedReply:
    """Replies that have a known number of some byte in them."""

    __slots__ = ("_count", "_left", "_mark")

    def __init__(self, mark: bytes, count: int) -> None:
        self._mark, self._count, self._left = mark, count, count

    def whole(self, data: bytes) -> bool:
        self._left -= data.count(self._mark)
        if self._left:
            return False
        self._left = self._count
        return True


class HttpReply:
    """One answer with a Content-Length, and a status of success."""

    __slots__ = ("_held", "_left")

    def __init__(self) -> None:
        self._held, self._left = b"", 0

    def whole(self, data: bytes) -> bool:
        left = self._left
        if not left:
            if self._held:
                data, self._held = self._held + data, b""
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._held = data
                return False
            if data[9:11] != b"20":
                raise RuntimeError(f"the server answered {data[:600]!r}")
            at = data.index(_LENGTH) + len(_LENGTH)
            left = end + 4 + int(data[at : data.index(b"\r", at)])
        self._left = left = left - len(data)
        return not left


class EndlessReply:
    """What comes is read and never answered: a watcher."""

    def whole(self, data: bytes) -> bool:  # noqa: ARG002
        return False


@dataclass(slots=True)
class Caller:
    """One connection, what it asks and how long it waited for each answer."""

    sock: socket.socket
    asks: Iterator[bytes]
    reply: Reply
    pause_s: float = 0.0  # from one ask to the next, where it is not to ask as fast as it can
    waits: list[float] = field(default_factory=list)  # seconds, of every ask
    began: float = 0.0
    rest: memoryview | None = None  # of an ask that the kernel did not take at once


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    waits: list[float]  # of all callers, sorted
    busy: float  # of one processor, by this process

    @property
    def per_s(self) -> float:
        return len(self.waits) / self.seconds

    def ms(self, share: float) -> float:
        """The wait that this share of all asks did not exceed."""
        return percentile_ms(self.waits, share)


def percentile_ms(waits: Sequence[float], share: float) -> float:
    """Of sorted seconds."""
    return waits[min(int(len(waits) * share), len(waits) - 1)] * 1000 if waits else float("nan")


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def drive(callers: Sequence[Caller], lasting_s: float) -> Outcome:
    """Have all of them ask for so long and wait for the last answer; the clock stops when it is there."""
    enabled = gc.isenabled()
    gc.disable()
    used, start = time.process_time(), time.perf_counter()
    try:
        _drive({caller.sock.fileno(): caller for caller in callers}, lasting_s)
        seconds, used = time.perf_counter() - start, time.process_time() - used
    finally:
        if enabled:
            gc.enable()
        for caller in callers:
            caller.sock.close()
    return Outcome(seconds, sorted(wait for caller in callers for wait in caller.waits), used / seconds)


def _drive(callers: dict[int, Caller], lasting_s: float) -> None:
    clock, numbers = time.perf_counter, count()
    later: list[tuple[float, int, Caller]] = []
    with epoll() as poll:
        for fd, caller in callers.items():
            caller.sock.setblocking(False)
            poll.register(fd, EPOLLIN)
        end, out = clock() + lasting_s, 0
        for caller in callers.values():
            out += _ask(caller, poll, clock())
        while out or (later and clock() < end):
            due = later[0][0] - clock() if later else _TIMEOUT_S
            events = poll.poll(max(min(due, _TIMEOUT_S), 0))
            if not events and not later:
                raise TimeoutError(f"{out} asks were not answered within {_TIMEOUT_S:g} s")
            for fd, event in events:
                caller = callers[fd]
                if event & EPOLLOUT:
                    _send_rest(caller, poll)
                if not event & (EPOLLIN | EPOLLHUP | EPOLLERR):
                    continue
                data = caller.sock.recv(_RECV_BYTES)
                if caller.reply.whole(data):
                    now = clock()
                    caller.waits.append(now - caller.began)
                    if now < end and not caller.pause_s and _ask(caller, poll, now):
                        continue
                    out -= 1
                    if caller.pause_s:
                        heappush(later, (caller.began + caller.pause_s, next(numbers), caller))
                elif not data:
                    raise ConnectionError("the server closed a connection in the middle of an answer")
            while later and later[0][0] <= (now := clock()):
                caller = heappop(later)[2]
                if now < end:
                    out += _ask(caller, poll, now)


def _ask(caller: Caller, poll: epoll, now: float) -> bool:
    ask = next(caller.asks, None)
    if ask is None:
        return False
    caller.began = now
    try:
        sent = caller.sock.send(ask)
    except BlockingIOError:
        sent = 0
    if sent < len(ask):
        caller.rest = memoryview(ask)[sent:]
        poll.modify(caller.sock.fileno(), EPOLLIN | EPOLLOUT)
    return True


def _send_rest(caller: Caller, poll: epoll) -> None:
    assert caller.rest is not None, "nobody asked to be told otherwise"
    caller.rest = caller.rest[caller.sock.send(caller.rest) :]
    if not caller.rest:
        caller.rest = None
        poll.modify(caller.sock.fileno(), EPOLLIN)


def post(path: str, body: bytes) -> bytes:
    """The bytes of a request with a JSON body, with no header more than it needs."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_to_end(port: int, path: str) -> int:
    """GET what is sent in chunks until its end and throw it away; the bytes that came."""
    with connect(port) as sock, mmap.mmap(-1, 1 << 20) as buffer:  # not a bytearray: its offset makes copies slow
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        first = sock.recv_into(buffer)
        if buffer[9:12] != b"200" or _CHUNKED not in buffer[:first]:
            raise RuntimeError(f"the server answered {buffer[:600]!r}")
        total, last = first, bytes(buffer[max(first - 7, 0) : first])
        while got := sock.recv_into(buffer):
            total += got
            last = (last + buffer[max(got - 7, 0) : got])[-7:]
    if last != b"\r\n0\r\n\r\n":
        raise ConnectionError("the answer was cut off")
    return total


def callers(
    port: int,
    asks: Iterable[Iterator[bytes]],
    reply: Callable[[], Reply],
    greet: Callable[[socket.socket], object] = lambda _: None,
) -> list[Caller]:
    """A caller for each of `asks`, connected and past what the protocol says first."""
    made = []
    for each in asks:
        sock = connect(port)
        greet(sock)
        made.append(Caller(sock, each, reply()))
    return made
