"""[policy] Compaction keys as a command line names them: a record's key, and when a record says that its key is gone.

    rule         key                                        tombstone
    tag          the tag                                    the data is empty
    json:FIELD   that field of the JSON object in the data  every other field is null, or there is none
    prefix:SEP   the bytes before the first SEP             nothing stands behind that SEP

A record to which the rule does not apply (no tag, no such field or null, not JSON, no SEP, nothing
before it) has no key and is kept whatever comes: compaction never drops on a guess. For the same
reason two JSON numbers are one key only when they are written alike; text is compared decoded.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tidelog.cli.options import octets
from tidelog.types import Record

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


class Rule(NamedTuple):
    name: str
    key: Callable[[Record], bytes | None]
    is_tombstone: Callable[[Record], bool]
    needs: str | None = None  # the column it reads, where not every layout has room for it


def rule(text: str) -> Rule:
    """The rule that `tag`, `json:FIELD` or `prefix:SEP` names."""
    kind, _, rest = text.partition(":")
    if text == "tag":
        return Rule(text, lambda record: record.tag or None, lambda record: not record.data, "tag")
    if kind == "json" and rest:
        return _by_field(text, rest)
    if kind == "prefix" and rest:
        return _by_prefix(text, octets(rest))
    raise ArgumentTypeError(f"{text!r} is no key; write tag, json:FIELD or prefix:SEP")


def _by_prefix(name: str, separator: bytes) -> Rule:
    def key(record: Record) -> bytes | None:
        before, found, _ = record.data.partition(separator)
        return before if found and before else None

    return Rule(name, key, lambda record: not record.data.partition(separator)[2])


def _by_field(name: str, field: str) -> Rule:
    def key(record: Record) -> bytes | None:
        value = _fields(record.data).get(field, b"null")
        return None if value == b"null" else _spelt(value)

    def is_tombstone(record: Record) -> bool:
        return all(value == b"null" for other, value in _fields(record.data).items() if other != field)

    return Rule(name, key, is_tombstone)


def _fields(data: bytes) -> dict[str, bytes]:
    """The fields of a JSON object, each value as its own bytes; none where the data is no such object."""
    try:
        return {name: bytes(value).strip() for name, value in _FIELDS.decode(data).items()}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}


def _spelt(value: bytes) -> bytes | None:
    if not value.startswith(b'"'):
        return value
    try:
        # The quote stays in front, so that "7" and 7 are two keys.
        return b'"' + _TEXT.decode(value).encode()
    except (msgspec.DecodeError, UnicodeError):
        return None
