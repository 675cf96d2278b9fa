"""The `tidelog` command: the composition root, the rim where errors become exit codes.

    0     done
    1     damage: bytes on disk are not what they should be
    2     refused or failed, and a bad command line, as argparse has it
    70    a bug in Tidelog
    130   interrupted from the keyboard
    141   a write whose reader went away; every other command just ends when nobody reads on

An error is one line on standard error, or one JSON object with --json. Where a write ended
early it also says which records were written before that.
"""

from __future__ import annotations

import json
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

from tidelog import __version__
from tidelog.cli import channel, check, doctor, gaps, group, log, pipeline, queue, router, serve, topic, worker
from tidelog.cli.log import acked_fields, describe_written
from tidelog.cli.render import Screen
from tidelog.errors import Damaged, Error

EXIT_OK, EXIT_DAMAGE, EXIT_REFUSED, EXIT_BUG, EXIT_INTERRUPTED, EXIT_NO_READER = 0, 1, 2, 70, 130, 141

_COMMANDS = {
    "topic": topic,
    "queue": queue,
    "worker": worker,
    "group": group,
    "gaps": gaps,
    "router": router,
    "channel": channel,
    "serve": serve,
    "check": check,
    "pipeline": pipeline,
    "doctor": doctor,
    "log": log,
}


def build_parser(command: str | None = None) -> ArgumentParser:
    """The whole command line; or only one command of it, which is made in a sixth of the time."""
    made = ArgumentParser(
        prog="tidelog",
        description="Tidelog: a durable event log.",
        epilog="start here:\n  $ tidelog topic --help\n  $ tidelog topic write --help\n  $ tidelog queue --help\n"
        "  $ tidelog log --help\n",
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"tidelog {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        if command in (None, name):
            module.add(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code. Exits by itself only on a bad command line and on --help."""
    given, words = worker.split_command(sys.argv[1:] if argv is None else argv)
    args = build_parser(given[0] if given and given[0] in _COMMANDS else None).parse_args(given)
    args.words = words
    screen = Screen(json=args.json)
    try:
        code: int = args.run(args, screen)
        screen.flush()
        return code
    except BrokenPipeError:
        if screen.acked is None:
            screen.flush_or_discard()
            return EXIT_OK
        return _report_end(screen, EXIT_NO_READER, "no_reader", "nobody reads the answers any more", None)
    except KeyboardInterrupt:
        return _report_end(screen, EXIT_INTERRUPTED, "interrupted", "interrupted", None)
    except Error as error:
        code = EXIT_DAMAGE if isinstance(error, Damaged) else EXIT_REFUSED
        return _report_end(screen, code, error.code, str(error), error.written)
    except OSError as error:
        # What the library does not speak of itself: no permission, standard output on a full device.
        return _report_end(screen, EXIT_REFUSED, "os_error", str(error), None)
    except Exception as error:
        # The rim of the program: left alone, Python would exit with 1, and that says "damage" here.
        traceback.print_exc()
        return _report_end(screen, EXIT_BUG, "bug", f"this is a bug in tidelog: {error!r}", None)


def _report_end(screen: Screen, code: int, name: str, message: str, was_written: bool | None) -> int:
    """Say why a command ended early and what it leaves behind."""
    screen.flush_or_discard()
    # A refusal says by itself that nothing was written; what came before it is news.
    remarks = [describe_written(screen.acked)] if screen.acked or (screen.acked is not None and code > EXIT_BUG) else []
    if screen.unfinished_hint:
        remarks.append(screen.unfinished_hint)
    if screen.json:
        fields: dict[str, Any] = {"error": name, "message": message, "written": was_written}
        fields |= {"acked": acked_fields(screen.acked) if screen.acked is not None else None, "remarks": remarks}
        screen.print_error(json.dumps(fields))
        return code
    line = " ".join(message.split("\n"))
    screen.print_error(f"tidelog: {line}" + "".join(f"; {remark}" for remark in remarks))
    return code


if __name__ == "__main__":
    sys.exit(main())
