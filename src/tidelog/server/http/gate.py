"""[hot] Where the bytes of one HTTP/1.1 connection come in: the twin of the kernel's `Gate`, which says what is right.

    armed ──a request with the known head──► in the lobby ──the turn ends──► taken ──answered──► armed
      │                                         │                              │
      └──anything else──────────────────────────┴──── the lobby is emptied ────┴──► `slow`; not armed again by itself

A head is known by all of it but the digits of its body's length: a client's records are not all of one size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

    from tidelog.server.http.lobby import Lobby

_LOOK_BYTES: Final = 4096  # a body from which the lobby looks how much it holds
_LOOK_EVERY: Final = 256  # requests
_DIGITS_MAX: Final = 5  # of the length of a body that is taken here


class Gate:
    armed = False  # the next piece may be a request with the head that is known
    clean = False  # nothing else came or happened since
    away = False  # the peer left
    passed = False  # somebody was answered; whoever looks puts it back
    _before = _after = b""  # the head up to the digits of its body's length, and from behind them
    _lobby: Lobby | None = None

    def __init__(self, owner: Any, buffer: memoryview, slow: Callable[[int], None]) -> None:
        """`owner` has a `turn` and goes on with `next(self)`; `slow` gets what is not taken here."""
        self.owner, self._buffer, self._slow = owner, buffer, slow

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's idea of a size; ours is larger
        return self._buffer

    def enter(self, before: bytes, after: bytes, lobby: Lobby, transport: asyncio.Transport, body: bytes) -> None:
        """Take this body now, and from now on what comes with this head."""
        self._before, self._after, self._lobby = before, after, lobby
        self.write, self.is_closing = transport.write, transport.is_closing
        self._hold(body)

    def _hold(self, body: bytes) -> None:
        self.armed, self.clean = False, True
        self.owner.turn = self
        lobby = self._lobby
        assert lobby is not None, "it was entered"
        if not lobby.passes:
            lobby.begin()
        lobby.passes.append(self)
        lobby.bodies.append(body)
        lobby.since_us.append(lobby.now_us())
        if len(body) > _LOOK_BYTES or len(lobby.bodies) >= _LOOK_EVERY:
            lobby.look()

    def buffer_updated(self, nbytes: int) -> None:
        if self.armed:
            body = body_of(bytes(self._buffer[:nbytes]), self._before, self._after)
            if body is not None:
                self._hold(body)
                return
        if self._lobby is not None and self.owner.turn is self:  # it may still be in there
            self._lobby.flush()
        self.armed = self.clean = False
        self._slow(nbytes)


def body_of(piece: bytes, before: bytes, after: bytes) -> bytes | None:
    """What is behind this head, if that is the whole of the request that `piece` is."""
    start = len(before)
    most = start + _DIGITS_MAX + 1
    at = piece.find(after[:1], start, most)  # behind the digits
    if at <= start or not piece.startswith(before) or not piece.startswith(after, at):
        return None
    body, digits = piece[at + len(after) :], piece[start:at]
    return body if digits == b"%d" % len(body) else None


def answer(
    passes: list[Any], bodies: list[bytes], first: bytes, second: bytes, third: bytes, prefix: bytes, number: int
) -> None:
    """Send everybody the body that is theirs behind its head: `first`, its length, `second`, `prefix` and a number of
    its own in base 16, `third`. Where anything else came meanwhile the owner goes on from there."""
    for mine, (gate, body) in enumerate(zip(passes, bodies, strict=True), number):
        data = b"%b%d%b%b%x%b%b" % (first, len(body), second, prefix, mine, third, body)
        if gate.away:
            continue
        if not gate.clean or gate.is_closing():
            gate.send(data)
            continue
        gate.write(data)
        if gate.clean:
            gate.owner.turn = None
            gate.armed = gate.passed = True
        else:
            gate.owner.next(gate)
