"""[policy] What the head of an HTTP/1.1 request asks for, and what is wrong with it.

llhttp has refused by then: several Content-Lengths or one that is no number, a Transfer-Encoding beside it, folded
lines, control characters, blanks before a colon. What it lets pass and we do not, in order:

    505   versions other than 1.0 and 1.1
    400   no Host from a 1.1 peer, or more than one: a proxy in front may have meant another
    400   Transfer-Encoding from a 1.0 peer: who reads it and who does not would see different requests
    501   transfer codings other than chunked; CONNECT
    400   a target that is neither a path, nor `*`, nor an address
    414   a target that is too long    431   a head that is too long
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from httptools import HttpParserError, parse_url

from tidelog.server.http.exchange import Fault
from tidelog.server.http.limits import Limits
from tidelog.server.http.turn import Turn

# What was seen while the head went by, so that nobody has to search for it.
HOST, LENGTH, CODING, EXPECT, UPGRADE, CODED, CONNECTION, ODD_CODING, TWO_HOSTS = (1 << bit for bit in range(9))
MARKS: Final = {
    b"host": HOST,
    b"content-length": LENGTH,
    b"transfer-encoding": CODING,
    b"expect": EXPECT,
    b"upgrade": UPGRADE,
    b"connection": CONNECTION,
    b"accept-encoding": CODED,
    b"content-encoding": CODED,
}
ONCE: Final = HOST | CODING  # where a second one, or another value, makes a difference
PLAIN: Final = HOST | LENGTH | CODED  # nothing else was seen: no closer look is needed
_LINE_BYTES: Final = 4  # colon, blank, line end


def mark(seen: int, value: bytes, before: int) -> int:
    """The mark of one of `ONCE`, by its value and what came before it."""
    if seen == HOST and before & HOST:
        return TWO_HOSTS
    if seen == CODING and value.lower() != b"chunked":
        return CODING | ODD_CODING
    return seen


def look(turn: Turn, marks: int, version: str, keeps: bool, target: bytes) -> None:
    """Set what `turn` must know of its head, and its fault if it has one."""
    request = turn.request
    turn.modern, turn.keep, turn.chunked = version == "1.1", keeps, bool(marks & CODING)
    if marks & EXPECT and turn.modern:
        turn.expects = (request.header(b"expect") or b"").lower() == b"100-continue"
    if version not in ("1.0", "1.1"):
        turn.fault = Fault(505, f"HTTP/{version} is not spoken here, 1.1 is")
    elif marks & TWO_HOSTS or (turn.modern and not marks & HOST):
        turn.fault = Fault(400, "a request has exactly one Host header")
    elif marks & CODING and not turn.modern:
        turn.fault = Fault(400, "Transfer-Encoding is not part of HTTP/1.0")
    elif marks & ODD_CODING:
        turn.fault = Fault(501, "the only transfer coding that is known here is chunked")
    elif request.method == "CONNECT":
        turn.fault = Fault(501, "this is not a proxy")
    elif request.path[:1] != "/" and request.path != "*":
        turn.fault = _shorten(turn, target)


def _shorten(turn: Turn, target: bytes) -> Fault | None:
    """A target with scheme and host, as proxies are sent: only its path matters."""
    try:
        url = parse_url(target)
    except HttpParserError:
        url = None
    if url is None or not url.schema:
        return Fault(400, "the target is neither a path nor an address")
    turn.request.path, turn.request.query = (url.path or b"/").decode(), (url.query or b"").decode()
    return None


def wants_websocket(turn: Turn) -> bool:
    """Whether a request to switch protocols is one to the only other that is spoken here."""
    return turn.modern and (turn.request.header(b"upgrade") or b"").lower() == b"websocket"


def measure(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> Fault | None:
    """What is wrong with the size of a head."""
    if len(target) > limits.target_bytes_max:
        return Fault(414, f"the target is longer than {limits.target_bytes_max} bytes")
    if len(target) + sum(len(name) + len(value) + _LINE_BYTES for name, value in headers) > limits.header_bytes_max:
        return Fault(431, f"the head is longer than {limits.header_bytes_max} bytes")
    return None
