"""What every command of every group has: a short line, a text that teaches, worked examples, and `--json`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tidelog.cli.render import Screen

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Commands: TypeAlias = _SubParsersAction[ArgumentParser]

Run: TypeAlias = Callable[[Namespace, Screen], int]


def group(commands: Commands, name: str, *, short: str, about: str, start: str) -> Commands:
    """A word with commands of its own behind it."""
    made = commands.add_parser(
        name, help=short, description=about, epilog=start, formatter_class=RawDescriptionHelpFormatter
    )
    return made.add_subparsers(title="commands", metavar="COMMAND", required=True)


def command(verbs: Commands, name: str, run: Run, *, short: str, about: str, examples: str) -> ArgumentParser:
    """A command; its examples stand one a line."""
    lines = examples.splitlines()
    shown = "".join(f"  $ {line}\n" for line in lines)
    made = verbs.add_parser(
        name,
        help=short,
        description=about,
        epilog=f"example{'s' if len(lines) > 1 else ''}:\n{shown}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run)
    made.add_argument("--json", action="store_true", help="answer in JSON; errors too, on standard error")
    return made
