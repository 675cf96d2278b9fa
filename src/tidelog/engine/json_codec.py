"""JSON text: values to stored text and back, and client text in its stored form."""

from __future__ import annotations

from collections.abc import Sequence
from json import loads
from math import isfinite
from typing import Any, Final

import msgspec

from tidelog import native
from tidelog.errors import BadInput

_decode_string = msgspec.json.Decoder().decode


def from_json(text: bytes) -> object:
    """Decode JSON that a server accepted. Raises msgspec.DecodeError.

    JSON does not bound numbers, the decoders do: a number above the range of a float is an infinity, and so is an
    integer of more digits than Python converts (4,300 by default).
    """
    try:
        return _decode_string(text)
    except msgspec.DecodeError as error:
        try:
            return loads(text.decode(), parse_int=_integer)
        except ValueError:
            raise error from None


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # the conversion is quadratic in the number of digits
        return float(digits)


_encoder = msgspec.json.Encoder()
_decode_meta = msgspec.json.Decoder(dict[str, Any] | None).decode
_JSON_BLANKS: Final = (b" ", b"\n", b"\t", b"\r")
_JSON_DEPTH_MAX: Final = 128
_META_TEXT_BYTES_MAX: Final = 1 << 20  # with blanks and escapes; far above the limit of a meta


def to_json(values: Sequence[object]) -> list[bytes]:
    """Encode each value as compact JSON. Raises BadInput for NaN, infinities, unpaired surrogates and unknown types."""
    try:
        # One call for all values: newlines inside a string are escaped, so each line is a value.
        lines = _encoder.encode_lines(values).split(b"\n")[:-1]
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise BadInput(f"a record is not JSON and not bytes: {error}; nothing was written") from None
    for value, line in zip(values, lines, strict=True):
        # The encoder writes null for NaN and infinities.
        deep = line.count(b"[") + line.count(b"{") > _JSON_DEPTH_MAX
        if (deep or b"null" in line) and not _is_finite(value):
            raise BadInput("a record holds NaN or an infinity, which JSON cannot represent; nothing was written")
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


def decode_meta(text: bytes) -> dict[str, Any] | None:
    """Decode one meta. One at a time, because all metas of a request together can take 30 times its bytes."""
    if len(text) > _META_TEXT_BYTES_MAX:
        raise BadInput(f"a meta of {len(text)} bytes is over the limit; nothing was written")
    check_depth(text)
    try:
        meta: dict[str, Any] | None = _decode_meta(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"a meta is not what it must be: {error}; nothing was written") from None
    return meta


def may_compact(text: bytes) -> bool:
    """Whether JSON may have a shorter form."""
    return b" " in text or b"\n" in text or b"\\" in text or b"\t" in text or b"\r" in text


def compact_json(text: bytes) -> bytes:
    """Return JSON in its stored form: no blanks between tokens, no escapes that UTF-8 does not need, numbers unchanged.

    A newline between tokens would end a line for readers of lines.
    """
    if any(blank in text for blank in _JSON_BLANKS):
        text = msgspec.json.format(text, indent=-1)
    if b"\\u" not in text and b"\\/" not in text:
        return text
    compact = native.remove_json_escapes(text)
    if compact is None:
        raise msgspec.DecodeError("JSON has an escape that is not a character")
    return compact


def check_depths(text: bytes, datas: Sequence[bytes]) -> None:
    """Raise BadInput for JSON nested too deep for a reader's stack. `text` contains all of `datas`."""
    if text.count(b"[") + text.count(b"{") > _JSON_DEPTH_MAX + len(datas):
        for data in datas:
            check_depth(data)


def check_depth(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") > _JSON_DEPTH_MAX and native.json_depth(data) > _JSON_DEPTH_MAX:
        raise BadInput(f"a record is nested deeper than {_JSON_DEPTH_MAX} levels; nothing was written")
