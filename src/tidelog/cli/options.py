"""What people type as values: counts, sizes, ages, moments. Each function turns one text into one value, and
says what would have been right where it cannot; argparse prints that and exits with 2."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import UTC, datetime, timedelta

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_AGES_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WORDS = {"true": True, "false": False, "null": None}
COLUMNS = ("node", "tag", "meta")


def count(text: str) -> int:
    """A whole number from 0 on."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):  # what every layout can count to
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    if text.startswith("-"):
        raise ArgumentTypeError(f"{text} is negative, the least is 0")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = count(text)
    if number == 0:
        raise ArgumentTypeError("0 is too small, the least is 1")
    return number


def size(text: str) -> int:
    """Bytes: 4096, or with a binary unit 512k, 64m, 2g."""
    found = re.fullmatch(r"([0-9]{1,18})([kmgt]?)", text.lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a size; write bytes as 4096, 512k, 64m or 2g")
    return int(found[1]) * _SIZES[found[2]]


def positive_size(text: str) -> int:
    """Bytes, at least one."""
    number = size(text)
    if number == 0:
        raise ArgumentTypeError("0 bytes is too small, the least is 1")
    return number


def age_ms(text: str) -> int:
    """A stretch of time with its unit, in milliseconds: 500ms, 30s, 15m, 12h, 7d, 2w."""
    found = re.fullmatch(r"([0-9]{1,9})(ms|s|m|h|d|w)", text.lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not an age; write 500ms, 30s, 15m, 12h, 7d or 2w")
    return int(found[1]) * _AGES_MS[found[2]]


def moment_us(text: str) -> int:
    """A moment in microseconds since the epoch: ISO 8601 (UTC where it names no zone), or that number itself."""
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a moment; write 2026-01-31T12:00:00Z or microseconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)


def columns(text: str) -> frozenset[str]:
    """Names of record columns, with commas between them."""
    names = frozenset(text.split(","))
    if unknown := sorted(names - set(COLUMNS)):
        raise ArgumentTypeError(f"there is no column {unknown[0]!r}; choose from {', '.join(COLUMNS)}")
    return names


def octets(text: str) -> bytes:
    """The bytes that stood on the command line, also where they are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def seconds(text: str) -> float:
    """A stretch of time in seconds: 5, 0.5, or with a unit as an age has it."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return age_ms(text) / 1000
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is no stretch of time; write seconds as 5 or 0.5, or 500ms, 15m") from None


def seqs(text: str) -> list[int]:
    """Seqs with commas between them."""
    return [count(seq) for seq in text.split(",")]


def setting(text: str) -> tuple[str, object]:
    """`name=value` of a topic's config: true, false, null, a number or a word; `_ms` takes ages, `_bytes` sizes."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentTypeError(f"{text!r} is no setting; write name=value, as in ttl_ms=7d")
    if value in _WORDS:
        return name, _WORDS[value]
    if re.fullmatch(r"-?[0-9]{1,20}", value):
        return name, int(value)
    if name.endswith("_ms"):
        return name, age_ms(value)
    return name, size(value) if name.endswith("_bytes") else value
