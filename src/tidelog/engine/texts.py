"""[hot] JSON texts: values → what is stored, and back; and a client's own text as it is stored and measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from json import loads
from math import isfinite
from typing import Final

import msgspec

from tidelog.errors import BadInput

_encoder = msgspec.json.Encoder()
_decode = msgspec.json.Decoder().decode
_BLANKS: Final = (b" ", b"\n", b"\t", b"\r")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")
_JSON_DEPTH_MAX: Final = 128


def to_json(values: Sequence[object]) -> list[bytes]:
    """Each value as compact JSON. Refuses what JSON cannot say: NaN, infinities, lone surrogates, unknown types."""
    try:
        # One call for all of them: a newline inside a text is escaped, so lines are values.
        lines = _encoder.encode_lines(values).split(b"\n")[:-1]
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise BadInput(f"a record is not JSON and not bytes: {error}; nothing was written") from None
    for value, line in zip(values, lines, strict=True):
        # The encoder writes null for a number that is not one.
        deep = line.count(b"[") + line.count(b"{") > _JSON_DEPTH_MAX
        if (deep or b"null" in line) and not _is_finite(value):
            raise BadInput("a record holds NaN or an infinity, which JSON cannot say; nothing was written")
    return lines


def _is_finite(value: object, depth: int = 0) -> bool:
    if depth > _JSON_DEPTH_MAX:
        raise BadInput(f"a record is nested deeper than {_JSON_DEPTH_MAX} levels; nothing was written")
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_finite(item, depth + 1) for item in value)
    return True


def from_json(text: bytes) -> object:
    try:
        return _decode(text)
    except msgspec.DecodeError as error:
        try:
            # JSON sets numbers no bounds, the fast decoder does; what the wire let in must come out again.
            return loads(text.decode())
        except ValueError:
            raise error from None


def is_loose(text: bytes) -> bool:
    """Whether JSON may be longer than it has to be."""
    return b" " in text or b"\n" in text or b"\\" in text or b"\t" in text or b"\r" in text


def compact(text: bytes) -> bytes:
    """JSON as it is stored and measured: no blanks between its words, no escapes that UTF-8 does not need. Numbers stay
    as they were written. A line end between words would end a line for those who read lines."""
    if any(blank in text for blank in _BLANKS):
        text = msgspec.json.format(text, indent=-1)
    return _ESCAPE.sub(_plain, text) if b"\\u" in text or b"\\/" in text else text


def _plain(escape: re.Match[bytes]) -> bytes:
    said = escape[0]
    if said == b"\\/":
        return b"/"
    return _encoder.encode(_decode(b'"%b"' % said))[1:-1] if said[1:2] == b"u" else said
