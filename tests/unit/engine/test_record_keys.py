"""The keys of records by a JSON pointer: the compiled search finds what a parser of JSON finds, in any text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.implementations import implementation

from tidelog import _native
from tidelog.engine.record_keys import KeySelector

NAMES = ("a", "b", "é", "", 'q"', "back\\", "tab\t", "longer-than-eight-bytes")
POINTERS = ("/a", "/a/b", "/b/a/b", "/é", "/", "//a", '/q"', "/back\\", "/tab\t", "/longer-than-eight-bytes/a")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["k", "é", "😀", "\x7f", "a\\b", 'say "hi"', "\u2028", "/"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
BLANKS = ("", "", " ", "\n\t ", "\r")


def keys_of(rule: str, texts: list[bytes], *, compiled: bool) -> list[bytes | None]:
    with implementation(compiled=compiled):
        found: list[bytes | None] = KeySelector(rule).keys_of_texts(texts).to_pylist()
        return found


def follow(rule: str, text: bytes) -> bytes | None:
    """The key of one text, as the documentation says it."""
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    for name in rule[1:].split("/"):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    if isinstance(value, str):
        return value.encode() or None
    return msgspec.json.encode(value) if isinstance(value, bool | float | int) else None


@given(st.lists(values, max_size=6), st.sampled_from(POINTERS), st.booleans(), st.sampled_from([None, 1, "\t"]))
@settings(deadline=None, max_examples=300)
def test_the_compiled_search_finds_what_a_parser_finds(
    many: list[Any], rule: str, is_ascii: bool, indent: int | str | None
) -> None:
    texts = [json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "replace") for value in many]
    texts += [msgspec.json.encode(value) for value in many if _is_text(value)]
    expected = [follow(rule, text) for text in texts]
    assert keys_of(rule, texts, compiled=True) == expected
    assert keys_of(rule, texts, compiled=False) == expected


def _is_text(value: Any) -> bool:
    """Whether UTF-8 can express it: half of a surrogate pair is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


PIECES = (
    *("{", "}", "[", "]", ",", ":", '"a"', '"b"', '"a":', '"b":', '"a":"k"', '"b":7', "1", "-0", "0", "01", "1.5"),
    *("1e5", "1E-7", "1e400", "1.", "-", "true", "false", "null", "nul", '""', '"\\u0041"', '"\\u00', '"\\/"', '"\\x"'),
    *('"\\ud800"', '"\\ud83d\\ude00"', " ", "\n", "\x00", "\x1f", '"\x01"', "9" * 20, "9" * 120, '{"a":{"b":', "}}"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(["/a", "/a/b"]))
@example(['{"a":', '"k"', ",", '"a":', "null", "}"], "/a")
@example(['{"a":', '{"b":', "1", "}", ",", '"a":', "{", "}", "}"], "/a/b")
@example(['{"a":{"b":', "1", "}", ",", '"a":{"b":', "2", "}", "}"], "/a/b")
@example(['{"a":', "[", '{"b":', "1", "}", "]", "}"], "/a/b")
@example(['{"b":', '{"a":', "1", "}", ",", '"a":', "2", "}"], "/a")
@settings(deadline=None, max_examples=600)
def test_texts_that_are_no_json_have_no_key(pieces: list[str], rule: str) -> None:
    text = "".join(pieces).encode()
    assert keys_of(rule, [text], compiled=True) == [follow(rule, text)]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"id":"\xc3\xa9"}', b"\xc3\xa9"),
        (b'{"id":"\xc3"}', None),
        (b'{"id":"\xff"}', None),
        (b'{"id":"\xed\xa0\x80"}', None),
        (b'{"id":"\xf4\x90\x80\x80"}', None),
        (b'{"id":"\xc0\x80"}', None),
        (b'{"id":"\xf0\x9f\x98\x80"}', b"\xf0\x9f\x98\x80"),
        (b'{"id":"k","x":"\xe2\x82\xac"}', b"k"),
        (b'{"id":1.50}', b"1.5"),
        (b'{"id":-7}', b"-7"),
        (b'{"id":-0}', b"0"),
        (b'{"id":12345678901234567890}', b"12345678901234567890"),
        (b'{"id":"a\\u0062"}', b"ab"),
        (b'{"i\\u0064":"k"}', b"k"),
        (b'{"id":"k","x":' + b"[" * 70 + b"]" * 70 + b"}", b"k"),
        (b'  {"id" : "k" }\n', b"k"),
        (b'{"id":"k"} x', None),
        (b"", None),
        (b"7", None),
    ],
)
def test_rare_texts(text: bytes, key: bytes | None) -> None:
    for compiled in (True, False):
        assert keys_of("/id", [text], compiled=compiled) == [key], compiled
        assert keys_of("/id", [b'{"id":"x"}', text, b"[]"], compiled=compiled) == [b"x", key, None], compiled


def test_a_text_outside_of_the_buffer_is_refused() -> None:
    import numpy as np

    places = np.zeros(1, np.int64)
    for pos, size in ((0, 8), (8, 1), (-1, 2), (1, -1), (1 << 62, 1 << 62)):
        with pytest.raises(ValueError, match="outside"):
            _native.find_json_values(places, places.copy(), b'{"a":1}', np.array([pos]), np.array([size]), (b"a",))
    for names in ((), (b"a",) * 33):
        with pytest.raises(ValueError, match="names"):
            _native.find_json_values(places, places.copy(), b'{"a":1}', np.array([0]), np.array([7]), names)
