"""The bodies of plain writes: what the kernel takes out of them is what its twin does, the rest it leaves to it.

These tests need the kernel, which `make` builds where there is a compiler; without one the twin is all there is.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.implementations import implementation

from tidelog import _native
from tidelog.engine import EngineConfig
from tidelog.errors import BadInput
from tidelog.server.handlers.write import plain_records, plain_records_of

MOST = EngineConfig().batch_records_max
LIMITS = EngineConfig()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def body_of(*datas: bytes) -> bytes:
    return b'{"records":[' + b",".join(b'{"data":%b}' % data for data in datas) + b"]}"


def outcome(body: bytes, *, compiled: bool) -> Any:
    try:
        with implementation(compiled=compiled):
            return plain_records(body, LIMITS)
    except BadInput as error:
        return str(error)


@given(st.lists(values, min_size=1, max_size=5), st.booleans(), st.booleans())
@example(["\\", '"', "\x7f", "é", "😀", "a" * 7, "a" * 8, "a" * 9 + "\n"], False, False)
def test_whatever_json_says_both_store_the_same(records: list[Any], compact: bool, ascii: bool) -> None:
    separators = (",", ":") if compact else None
    datas = [json.dumps(record, separators=separators, ensure_ascii=ascii) for record in records]
    try:
        body = body_of(*(data.encode() for data in datas))
    except UnicodeEncodeError:
        return  # half a character, which no body can say
    assert outcome(body, compiled=True) == outcome(body, compiled=False)


@given(st.binary(max_size=12) | st.text('{}[]",:\\ntrue0-.1eé \t', max_size=16).map(str.encode))
def test_native_parser_takes_no_text_that_python_refuses(data: bytes) -> None:
    body = body_of(data)
    found = _native.parse_plain_body(body, MOST)
    if found is not None and outcome(body, compiled=True) is not None:
        assert found == outcome(body, compiled=False)
    assert outcome(body, compiled=True) == outcome(body, compiled=False)


def test_no_broken_or_changed_body_is_taken_otherwise() -> None:
    """Method: every truncation, and every byte changed to each of those that mean something to JSON."""
    body = body_of(b'{"a":[1,-2.5,"x\\n"],"b":{}}', b'"text that is longer than a word"', b"[[],true,null,false]")
    assert _native.parse_plain_body(body, MOST) is not None
    for end in range(len(body)):
        assert outcome(body[:end], compiled=True) == outcome(body[:end], compiled=False), body[:end]
    for at in range(len(body)):
        for byte in b'{}[]",:\\-.0e \x00\x1f\n\x80x':
            changed = body[:at] + bytes([byte]) + body[at + 1 :]
            assert outcome(changed, compiled=True) == outcome(changed, compiled=False), changed


@pytest.mark.parametrize(
    "data", [b'"plain"', b"0", b"-0", b"-1.25", b'"\\n\\"\\\\"', b'{"a":{"b":[[],{}]}}', b"true", b'"\xc3\xa9"', b'""']
)
def test_what_is_written_as_it_is_stored_the_kernel_takes(data: bytes) -> None:
    assert _native.parse_plain_body(body_of(data, data), MOST) == [data, data]


@pytest.mark.parametrize(
    "data",
    [b" 1", b"1e3", b'"\\u0041"', b'"\\/"', b'{"a": 1}', b"[" * 40 + b"]" * 40, b"01", b"+1", b".5", b"-"],
)
def test_other_bodies_are_left_to_the_python_parser(data: bytes) -> None:
    assert _native.parse_plain_body(body_of(data), MOST) is None


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b'{"records":[]}', b'{"records":[{}]}', b'{"records":[{"data":1}],"node":"n"}'),
        *(b'{"records":[{"data":1,"tag":"t"}]}', b'{"records":[{"data":1}]} ', b'[{"data":1}]'),
    ],
)
def test_what_is_more_than_data_is_not_plain(body: bytes) -> None:
    assert _native.parse_plain_body(body, MOST) is None


def test_as_many_records_as_are_allowed_and_no_more() -> None:
    assert _native.parse_plain_body(body_of(b"1", b"2"), 2) == [b"1", b"2"]
    assert _native.parse_plain_body(body_of(b"1", b"2", b"3"), 2) is None


def test_text_that_is_not_utf8_is_not_plain() -> None:
    assert plain_records(body_of(b'"\xff"'), LIMITS) is None


def test_a_record_that_is_too_large_is_not_plain() -> None:
    limits = EngineConfig(record_bytes_max=1024)
    assert plain_records(body_of(b'"%b"' % (b"x" * 1022)), limits) is not None
    assert plain_records(body_of(b"1", b'"%b"' % (b"x" * 1023)), limits) is None


def test_depth_is_refused_by_both() -> None:
    deep = body_of(b"[" * 129 + b"]" * 129)
    for compiled in (True, False):
        with implementation(compiled=compiled), pytest.raises(BadInput, match="nested deeper"):
            plain_records(deep, LIMITS)


@given(
    st.lists(st.lists(values, min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(
        [None, b"", b"x", body_of(), body_of(b"1", b"2", b"3", b"4"), body_of(b'"\xff"'), body_of(b"[" * 200)]
    ),
)
def test_of_many_bodies_each_gives_what_it_gives_alone(bodies: list[list[Any]], odd: bytes | None) -> None:
    texts = [body_of(*(json.dumps(record, separators=(",", ":")).encode() for record in records)) for records in bodies]
    if odd is not None:
        texts.insert(1, odd)
    for compiled in (True, False):
        with implementation(compiled=compiled):
            datas, counts = plain_records_of(texts, LIMITS, 3)
        alone = [outcome(text, compiled=False) for text in texts]
        each = [found if isinstance(found, list) and len(found) <= 3 else [] for found in alone]
        assert counts == [len(found) for found in each]
        assert datas == [data for found in each for data in found]


def test_a_record_over_the_limit_is_not_plain_in_company_either() -> None:
    body, small = body_of(b'"%b"' % (b"x" * 2000)), body_of(b"1")
    limits = EngineConfig(record_bytes_max=1024)
    for compiled in (True, False):
        with implementation(compiled=compiled):
            assert plain_records_of([small, body, small], limits, 9) == ([b"1", b"1"], [1, 0, 1])
            assert plain_records_of([body_of(*[b"1"] * 200)], limits, 999)[1] == [200], "it is the record that counts"
