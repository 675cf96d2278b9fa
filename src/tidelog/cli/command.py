"""What every command of every group has: a short line, a text that teaches, worked examples, and `--json`.

What people type as values: counts, sizes, ages, moments. Each function turns one text into one value, and
says what would have been right where it cannot; argparse prints that and exits with 2.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from tidelog.cli.render import Screen

if TYPE_CHECKING:
    from argparse import _SubParsersAction

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Commands: TypeAlias = _SubParsersAction[ArgumentParser]

CommandFunction: TypeAlias = Callable[[Namespace, Screen], int]


def add_group(commands: Commands, name: str, *, summary: str, description: str, first_steps: str) -> Commands:
    """A word with commands of its own behind it."""
    made = commands.add_parser(
        name, help=summary, description=description, epilog=first_steps, formatter_class=RawDescriptionHelpFormatter
    )
    return made.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_command(
    subcommands: Commands, name: str, run: CommandFunction, *, summary: str, description: str, examples: str
) -> ArgumentParser:
    """A command; its examples stand one a line."""
    lines = examples.splitlines()
    shown = "".join(f"  $ {line}\n" for line in lines)
    made = subcommands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example{'s' if len(lines) > 1 else ''}:\n{shown}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run)
    made.add_argument("--json", action="store_true", help="answer in JSON; errors too, on standard error")
    return made


_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_AGE_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LITERALS = {"true": True, "false": False, "null": None}
COLUMN_NAMES = ("node", "tag", "meta")


def parse_count(text: str) -> int:
    """A whole number from 0 on."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):  # what every layout can count to
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    if text.startswith("-"):
        raise ArgumentTypeError(f"{text} is negative, the least is 0")
    return int(text)


def parse_positive(text: str) -> int:
    """A whole number from 1 on."""
    number = parse_count(text)
    if number == 0:
        raise ArgumentTypeError("0 is too small, the least is 1")
    return number


def parse_size(text: str) -> int:
    """Bytes: 4096, or with a binary unit 512k, 64m, 2g."""
    found = re.fullmatch(r"([0-9]{1,18})([kmgt]?)", text.lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a size; write bytes as 4096, 512k, 64m or 2g")
    return int(found[1]) * _SIZE_UNITS[found[2]]


def parse_positive_size(text: str) -> int:
    """Bytes, at least one."""
    number = parse_size(text)
    if number == 0:
        raise ArgumentTypeError("0 bytes is too small, the least is 1")
    return number


def parse_age_ms(text: str) -> int:
    """A stretch of time with its unit, in milliseconds: 500ms, 30s, 15m, 12h, 7d, 2w."""
    found = re.fullmatch(r"([0-9]{1,9})(ms|s|m|h|d|w)", text.lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not an age; write 500ms, 30s, 15m, 12h, 7d or 2w")
    return int(found[1]) * _AGE_UNITS_MS[found[2]]


def parse_moment_us(text: str) -> int:
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


def parse_columns(text: str) -> frozenset[str]:
    """Names of record columns, with commas between them."""
    names = frozenset(text.split(","))
    if unknown := sorted(names - set(COLUMN_NAMES)):
        raise ArgumentTypeError(f"there is no column {unknown[0]!r}; choose from {', '.join(COLUMN_NAMES)}")
    return names


def parse_bytes(text: str) -> bytes:
    """The bytes that stood on the command line, also where they are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def parse_seconds(text: str) -> float:
    """A stretch of time in seconds: 5, 0.5, or with a unit as an age has it."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return parse_age_ms(text) / 1000
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is no stretch of time; write seconds as 5 or 0.5, or 500ms, 15m") from None


def parse_seqs(text: str) -> list[int]:
    """Seqs with commas between them."""
    return [parse_count(seq) for seq in text.split(",")]


def parse_setting(text: str) -> tuple[str, object]:
    """`name=value` of a topic's config: true, false, null, a number or a word; `_ms` takes ages, `_bytes` sizes."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentTypeError(f"{text!r} is no setting; write name=value, as in ttl_ms=7d")
    if value in _LITERALS:
        return name, _LITERALS[value]
    if re.fullmatch(r"-?[0-9]{1,20}", value):
        return name, int(value)
    if name.endswith("_ms"):
        return name, parse_age_ms(value)
    return name, parse_size(value) if name.endswith("_bytes") else value
