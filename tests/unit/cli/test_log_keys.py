"""Compaction keys as a command line names them."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from tidelog.cli.log import parse_key_rule
from tidelog.types import Record


def record(data: bytes, tag: bytes = b"") -> Record:
    return Record(1, 0, data, tag=tag)


@pytest.mark.parametrize(
    ("name", "data", "tag", "key"),
    [
        ("tag", b"x", b"t", b"t"),
        ("tag", b"x", b"", None),
        ("prefix:=", b"a=1", b"", b"a"),
        ("prefix:=", b"a=1=2", b"", b"a"),
        ("prefix:=", b"a", b"", None),
        ("prefix:=", b"=1", b"", None),
        ("prefix:::", b"a:b::1", b"", b"a:b"),
        ("prefix:ü", "aü1".encode(), b"", b"a"),
        ("json:id", b'{"id": 7, "v": 1}', b"", b"7"),
        ("json:id", b'{"id":"7"}', b"", b'"7'),
        ("json:id", b'{"id":"\\u0061"}', b"", b'"a'),
        ("json:id", b'{"id":null}', b"", None),
        ("json:id", b'{"ID":7}', b"", None),
        ("json:id", b"[7]", b"", None),
        ("json:id", b"not json", b"", None),
        ("json:id", b'{"id":"\xff"}', b"", None),
        ("json:id", b'{"\xff":1,"id":7}', b"", None),
        ("json:id", b'{"id":"\\ud800"}', b"", None),
        ("json:a:b", b'{"a:b":true}', b"", b"true"),
    ],
)
def test_a_rule_gives_a_record_its_key_or_none(name: str, data: bytes, tag: bytes, key: bytes | None) -> None:
    assert parse_key_rule(name).key(record(data, tag)) == key


def test_numbers_that_a_float_would_merge_are_two_keys() -> None:
    key = parse_key_rule("json:id").key
    near = (b'{"id":12345678901234567890123}', b'{"id":12345678901234567890124}')
    assert key(record(near[0])) != key(record(near[1]))


def test_json_that_nests_past_every_limit_has_no_key() -> None:
    assert parse_key_rule("json:id").key(record(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"id":1}')) is None


@pytest.mark.parametrize(
    ("name", "data", "gone"),
    [
        ("tag", b"", True),
        ("tag", b"x", False),
        ("prefix:=", b"a=", True),
        ("prefix:=", b"a=1", False),
        ("json:id", b'{"id":7}', True),
        ("json:id", b'{"id":7,"v":null,"w": null }', True),
        ("json:id", b'{"id":7,"v":null,"w":0}', False),
    ],
)
def test_a_tombstone_holds_nothing_but_its_key(name: str, data: bytes, gone: bool) -> None:
    assert parse_key_rule(name).is_tombstone(record(data, b"t")) is gone


def test_only_the_tag_needs_a_column() -> None:
    assert [parse_key_rule(name).required_column for name in ("tag", "json:x", "prefix:x")] == ["tag", None, None]


@pytest.mark.parametrize("name", ["", "data", "tag:x", "json", "json:", "prefix:"])
def test_a_name_that_is_no_rule_is_refused(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match="write tag, json:FIELD or prefix:SEP"):
        parse_key_rule(name)
