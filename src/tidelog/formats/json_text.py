"""[hot] JSON that came as text: its value, how deep it is nested, and its escapes that UTF-8 does not need.

Compiled where that was built (`depth` and `unescaped` of the kernel); `plain_depth` and `plain_unescaped` say what is
right.
"""

from __future__ import annotations

import re
from json import loads
from typing import Final

import msgspec

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")
_MARK: Final = re.compile(rb'[\[\]{}"]|\\.', re.DOTALL)


def from_json(text: bytes) -> object:
    """Decode JSON that a server accepted. JSON sets numbers no bounds, but the decoders do: a number that no float
    holds is an infinity, and so is an integer of more digits than Python converts (4,300 unless that was changed).
    Raises msgspec.DecodeError."""
    try:
        return _decode(text)
    except msgspec.DecodeError as error:
        try:
            return loads(text.decode(), parse_int=_integer)
        except ValueError:
            raise error from None


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # converting them takes time by the square of their number
        return float(digits)


def unescaped(text: bytes) -> bytes:
    """The same JSON without escapes that UTF-8 does not need. Raises msgspec.DecodeError for what is no escape."""
    made = _unescaped(text)
    return plain_unescaped(text) if made is None else made


def plain_unescaped(text: bytes) -> bytes:
    return _ESCAPE.sub(_plain, text)


def _plain(escape: re.Match[bytes]) -> bytes:
    said = escape[0]
    if said == b"\\/":
        return b"/"
    return _encode(_decode(b'"%b"' % said))[1:-1] if said[1:2] == b"u" else said


def plain_depth(text: bytes) -> int:
    """It is not decoded: a list of empty lists would take 30 times its text."""
    now = most = 0
    is_quoted = False
    for found in _MARK.finditer(text):
        mark = found[0]
        if mark == b'"':
            is_quoted = not is_quoted
        elif is_quoted or mark[:1] == b"\\":
            continue
        elif mark in (b"[", b"{"):
            now += 1
            most = max(most, now)
        else:
            now -= 1
    return most


def depth(text: bytes) -> int:
    """How deep JSON is nested."""
    return _depth(text)


try:
    from tidelog.kernel import depth as _depth
    from tidelog.kernel import unescaped as _unescaped
except ImportError:  # built where there was no compiler
    _depth, _unescaped = plain_depth, plain_unescaped
