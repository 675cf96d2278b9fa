"""The `tidelog` command: builds the command line, runs one command, and turns errors into exit codes.

    0     done
    1     damage: bytes on disk are wrong
    2     refused or failed, and a bad command line, as argparse has it
    70    a bug in Tidelog
    130   interrupted from the keyboard
    141   a write whose output was closed; every other command just ends then

An error is one line on standard error, or one JSON object with --json. After a write it also names the records that
were written before.
"""

from __future__ import annotations

import json
import sys
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

from tidelog import __version__
from tidelog.cli import (
    backup,
    bench,
    channel,
    completion,
    doctor,
    erase,
    export,
    group,
    log,
    pipeline,
    query,
    queue,
    retention,
    router,
    schema,
    serve,
    tier,
    top,
    topic,
    worker,
)
from tidelog.cli.command import CommandParser
from tidelog.cli.log import acked_fields, describe_written
from tidelog.cli.render import Screen
from tidelog.errors import Damaged, Error

EXIT_OK, EXIT_DAMAGE, EXIT_REFUSED, EXIT_BUG, EXIT_INTERRUPTED, EXIT_NO_READER = 0, 1, 2, 70, 130, 141

_COMMANDS = {
    "topic": topic.add,
    "queue": queue.add,
    "worker": worker.add_worker,
    "group": group.add,
    "gaps": group.add_gaps,
    "retention": retention.add,
    "erase": erase.add,
    "router": router.add,
    "tier": tier.add,
    "channel": channel.add,
    "serve": serve.add,
    "backup": backup.add,
    "restore": backup.add_restore,
    "check": doctor.add_check,
    "pipeline": pipeline.add,
    "schema": schema.add,
    "doctor": doctor.add,
    "log": log.add,
    "top": top.add,
    "bench": bench.add,
    "query": query.add,
    "export": export.add,
    "init": serve.add_init,
    "completion": completion.add,
}


def build_parser(command: str | None = None) -> CommandParser:
    """Build the whole command line, or only one command of it, in a sixth of the time."""
    parser = CommandParser(
        prog="tidelog",
        description="Tidelog: a durable event log.",
        epilog="start here:\n  $ tidelog topic --help\n  $ tidelog topic write --help\n  $ tidelog queue --help\n"
        "  $ tidelog log --help\n",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tidelog {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add in _COMMANDS.items():
        if command in (None, name):
            add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Exits only on a bad command line and on --help."""
    argv, words = worker.split_command(sys.argv[1:] if argv is None else argv)
    argv = erase.complete_command(argv)
    args = build_parser(argv[0] if argv and argv[0] in _COMMANDS else None).parse_args(argv)
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
        return _report_end(screen, EXIT_NO_READER, "no_reader", "the output was closed by its reader", None)
    except KeyboardInterrupt:
        return _report_end(screen, EXIT_INTERRUPTED, "interrupted", "interrupted", None)
    except Error as error:
        code = EXIT_DAMAGE if isinstance(error, Damaged) else EXIT_REFUSED
        return _report_end(screen, code, error.code, str(error), error.written)
    except OSError as error:
        # Errors outside the library: no permission, standard output on a full device.
        return _report_end(screen, EXIT_REFUSED, "os_error", str(error), None)
    except Exception as error:
        # Python's own exit code would be 1, which means damage here.
        traceback.print_exc()
        return _report_end(screen, EXIT_BUG, "bug", f"this is a bug in tidelog: {error!r}", None)


def _report_end(screen: Screen, code: int, name: str, message: str, was_written: bool | None) -> int:
    """Print why a command ended early and which records it had written; return the exit code."""
    screen.flush_or_discard()
    # A refusal says that nothing was written; the records written before it are added.
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
