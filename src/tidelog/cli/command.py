"""Declaration of commands, and parsers of their values.

Every command has a summary, a description, worked examples and `--json`. A `parse_` function turns one argument into
one value; on an error it says what would have been right, and argparse prints that and exits with 2.

A command whose first positional argument is DATABASE works on a directory or on a server:

    tidelog topic ls data                                 args.dir = "data"
    tidelog topic ls http://127.0.0.1:4000                args.server = "http://127.0.0.1:4000"
    tidelog topic ls --server http://127.0.0.1:4000       the same
    TIDELOG_SERVER=http://127.0.0.1:4000 tidelog topic ls the same, for as long as no directory is given
"""

from __future__ import annotations

import os
import re
import signal
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tidelog.addresses import SERVER_SCHEMES, scheme_of
from tidelog.cli.render import Screen

if TYPE_CHECKING:
    from argparse import _SubParsersAction

Commands: TypeAlias = "_SubParsersAction[CommandParser]"
CommandFunction: TypeAlias = Callable[[Namespace, Screen], int]

DATABASE = "DATABASE"
SERVER_VARIABLE, KEY_VARIABLE = "TIDELOG_SERVER", "TIDELOG_KEY"


class Positional(NamedTuple):
    """A positional argument after DATABASE: `TOPIC`, `[TOPIC]` (optional), `TABLE...` (one or more), or `name=value...`
    (any number)."""

    metavar: str
    parse: Callable[[str], Any] = str
    choices: Sequence[str] = ()

    @property
    def name(self) -> str:
        return "settings" if self.is_setting else self.metavar.strip("[].").lower()

    @property
    def is_optional(self) -> bool:
        return self.metavar.startswith("[")

    @property
    def is_setting(self) -> bool:
        return self.metavar.endswith("=value...")

    @property
    def is_repeated(self) -> bool:
        return self.metavar.endswith("...") and not self.is_setting


class CommandParser(ArgumentParser):
    """A parser that divides positional arguments into the database and the rest, wherever options stand among them."""

    positionals: Sequence[Positional] | None = None  # after DATABASE; None: the command has no database
    names_no_database: Callable[[list[str]], bool] | None = None  # for words that mean something else: `args.others`

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        parsed, extras = super().parse_known_args(args, namespace)
        if self.positionals is None:
            return parsed, extras
        words = [*parsed.words_given, *extras]
        del parsed.words_given
        if any(len(word) > 1 and word[0] == "-" for word in extras):
            return parsed, extras  # unknown options, which the caller refuses
        parsed.others = words if self.names_no_database is not None and self.names_no_database(words) else []
        if not parsed.others:
            self._assign(parsed, words)
        return parsed, []

    def _assign(self, parsed: Namespace, words: list[str]) -> None:
        """Set `dir` or `server`, `api_key`, and the arguments after the database."""
        assert self.positionals is not None, "the caller has looked"
        settings: list[str] = []
        if any(each.is_setting for each in self.positionals):
            while len(words) > 1 and "=" in words[-1]:
                settings.insert(0, words.pop())
        named = [each for each in self.positionals if not each.is_setting]
        required = sum(not each.is_optional for each in named)
        parsed.dir = None
        if words and scheme_of(words[0]) in SERVER_SCHEMES:
            if parsed.server:
                self.error(f"the server is named twice, by {words[0]} and by --server {parsed.server}")
            parsed.server = words.pop(0)
        elif not parsed.server and len(words) <= required and os.environ.get(SERVER_VARIABLE):
            parsed.server = os.environ[SERVER_VARIABLE]
        elif not parsed.server:
            if not words:
                self.error(f"name a database: a directory, the URL of a server, --server or {SERVER_VARIABLE}")
            parsed.dir = words.pop(0)
        is_open = any(each.is_repeated for each in named)
        if len(words) < required or (len(words) > len(named) and not is_open):
            given = " ".join([*([parsed.dir] if parsed.dir else []), *words])
            where = f"--server {parsed.server}" if parsed.server else "DIR"
            form = " ".join([where, *(each.metavar for each in self.positionals)])
            self.error(f"this takes {form}, not {given!r:.200}")
        if parsed.server:
            parsed.api_key = parsed.api_key or os.environ.get(KEY_VARIABLE)
        elif parsed.api_key:
            self.error("an API key is for a server; leave it out, or name a server")
        for at, each in enumerate(named):
            if each.is_repeated:  # the last
                setattr(parsed, each.name, [self._parse(each, word) for word in words[at:]])
            else:
                setattr(parsed, each.name, self._parse(each, words[at]) if at < len(words) else None)
        for each in self.positionals:
            if each.is_setting:
                parsed.settings = [self._parse(each, word) for word in settings]

    def _parse(self, positional: Positional, word: str) -> Any:
        if positional.choices and word not in positional.choices:
            self.error(f"argument {positional.metavar}: {word!r} is none of {', '.join(positional.choices)}")
        try:
            return positional.parse(word)
        except ArgumentTypeError as error:
            self.error(f"argument {positional.metavar}: {error}")


def add_group(commands: Commands, name: str, *, summary: str, description: str, first_steps: str) -> Commands:
    """Add a group of commands, such as `tidelog topic`."""
    parser = commands.add_parser(
        name, help=summary, description=description, epilog=first_steps, formatter_class=RawDescriptionHelpFormatter
    )
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_command(
    subcommands: Commands,
    name: str,
    run: CommandFunction,
    *positionals: str | Positional,
    summary: str,
    description: str,
    examples: str,
    key_option: str = "--key",
) -> CommandParser:
    """Add a command with these positional arguments (`TOPIC` becomes `args.topic`); `examples` has one per line. With
    DATABASE as the first, also the options that name a server. `key_option`: beside `--api-key`, if it is free."""
    lines = examples.splitlines()
    shown = "".join(f"  $ {line}\n" for line in lines)
    parser = subcommands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example{'s' if len(lines) > 1 else ''}:\n{shown}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    given = [Positional(each) if isinstance(each, str) else each for each in positionals]
    if given and given[0].metavar == DATABASE:
        _add_database(parser, given[1:], key_option)
        given = []
    for each in given:
        parser.add_argument(each.name, metavar=each.metavar)
    parser.add_argument("--json", action="store_true", help="answer in JSON; errors too, on standard error")
    return parser


def _add_database(parser: CommandParser, positionals: Sequence[Positional], key_option: str) -> None:
    parser.positionals = positionals
    parser.usage = " ".join(["%(prog)s [options] [DATABASE]", *(each.metavar for each in positionals)])
    parser.add_argument(
        "words_given",
        nargs="*",
        metavar=DATABASE,
        help="a directory, or the URL of a server; left out with --server and with TIDELOG_SERVER",
    )
    parser.add_argument("--server", metavar="URL", help=f"a server, as http://127.0.0.1:4000 ({SERVER_VARIABLE})")
    names = ["--api-key", *([key_option] if key_option else [])]
    parser.add_argument(*names, dest="api_key", metavar="KEY", help=f"a key of that server ({KEY_VARIABLE})")


def add_dry_run(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only print the changes; reads only")


def add_line_options(parser: ArgumentParser, batch: int = 1000, help_text: str = "lines in one write at most") -> None:
    """Add `--batch` of a command that reads lines."""
    parser.add_argument("--batch", type=parse_positive, default=batch, metavar="N", help=f"{help_text} ({batch})")


@contextmanager
def stop_event(on_repeat: Callable[[], None] | None = None) -> Iterator[Event]:
    """Yield an event that SIGINT or SIGTERM sets while the block runs. A second signal calls `on_repeat`; without it,
    the signal has its usual effect again."""
    stopping = Event()

    def on_stop(number: int, _: object) -> None:
        if stopping.is_set() and on_repeat is not None:
            on_repeat()
            return
        stopping.set()
        if on_repeat is None:
            signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, on_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    match = re.fullmatch(r"([0-9]{1,18})([kmgt]?)", text.lower())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a size; write bytes as 4096, 512k, 64m or 2g")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def parse_positive_size(text: str) -> int:
    """Bytes, at least one."""
    number = parse_size(text)
    if number == 0:
        raise ArgumentTypeError("0 bytes is too small, the least is 1")
    return number


def parse_age_ms(text: str) -> int:
    """A duration with its unit, in milliseconds: 500ms, 30s, 15m, 12h, 7d, 2w."""
    match = re.fullmatch(r"([0-9]{1,9})(ms|s|m|h|d|w)", text.lower())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not an age; write 500ms, 30s, 15m, 12h, 7d or 2w")
    return int(match[1]) * _AGE_UNITS_MS[match[2]]


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


def parse_hex(text: str) -> bytes:
    """Bytes in hex digits."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not bytes in hex; write two digits for each, as 0a1f") from None


def parse_seconds(text: str) -> float:
    """A duration in seconds: 5, 0.5, or with a unit as an age has it."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return parse_age_ms(text) / 1000
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is no duration; write seconds as 5 or 0.5, or 500ms, 15m") from None


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
