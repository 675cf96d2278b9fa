"""`tidelog init`: a configuration file with every setting of a server, explained and with its default.

The text comes from the fields and docstrings of `ServerConfig`, so it has every setting that a server knows.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Final

from tidelog.addresses import check_path
from tidelog.cli.command import Commands, add_command
from tidelog.cli.render import Screen, write_new_file
from tidelog.errors import NotFound

CONFIG_FILE: Final = "tidelog.toml"


def init(args: Namespace, screen: Screen) -> int:
    """Write a configuration file, or print it."""
    try:
        from tidelog.server.config import config_template
    except ImportError as error:
        raise NotFound(
            f"the server's packages are not installed ({error.name} is missing); nothing was written, run: "
            "pip install 'tidelog[server]'"
        ) from None
    if args.data is not None:
        check_path(args.data)
    values: dict[str, object] = {"strict": True} | ({} if args.data is None else {"data_dir": args.data})
    text = config_template(values)
    if args.file == "-":
        screen.write_data(text.encode())
        return 0
    check_path(args.file, "a file of this machine")
    write_new_file(args.file, [text.encode()])
    screen.print_result(
        {"path": args.file, "set": values},
        f"wrote {args.file}; start the server with: tidelog serve --config {args.file}",
    )
    return 0


def add(commands: Commands) -> None:
    """Add `init` to the command line."""
    parser = add_command(
        commands,
        "init",
        init,
        summary="write a configuration file with every setting explained",
        description="Write a TOML file for tidelog serve --config: every setting with its meaning and its default,\n"
        "all commented out but strict = true, which refuses requests with fields or values that have no effect.\n"
        "A file that exists is not changed.",
        examples="tidelog init tidelog.toml && tidelog serve --config tidelog.toml\n"
        "tidelog init /etc/tidelog.toml --data /srv/log",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default=CONFIG_FILE,
        help=f"where to write; -: standard output ({CONFIG_FILE})",
    )
    parser.add_argument("--data", metavar="DIR", help="the directory of topics that the file names")
