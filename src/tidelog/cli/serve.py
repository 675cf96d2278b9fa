"""`tidelog serve`: run the HTTP server of a directory; `tidelog init`: its configuration file with every setting.

The text of the file comes from the fields and docstrings of `ServerConfig`.
"""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from tidelog.addresses import check_path
from tidelog.cli.command import (
    Commands,
    add_command,
)
from tidelog.cli.render import Screen, write_new_file
from tidelog.clock import SystemClock
from tidelog.disk.durability import read_file
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, NotFound

if TYPE_CHECKING:
    from tidelog.server.config import ServerConfig


class HangupSignals:
    """The handler of SIGHUP. A hangup never ends the process, not while it starts and not while it stops."""

    def __init__(self) -> None:
        self._is_pending = False
        self._callback: Callable[[], object] | None = None
        signal.signal(signal.SIGHUP, self._on_signal)

    def forward(self, callback: Callable[[], object] | None) -> None:
        """Call this for every hangup from now on, and now if there was one before; None: remember hangups."""
        self._callback = callback
        if callback is not None and self._is_pending:
            self._is_pending = False
            callback()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of handlers
        if self._callback is None:
            self._is_pending = True
        else:
            self._callback()


def add(commands: Commands) -> None:
    """Add `serve` to the command line."""
    parser = add_command(
        commands,
        "serve",
        serve,
        summary="serve a directory of topics over HTTP",
        description="Serve a directory of topics over HTTP/1.1, h2c, SSE and WebSocket until SIGTERM or Ctrl-C. "
        "Settings\n"
        "come from the environment (TIDELOG_HOST, TIDELOG_API_KEYS and so on), then from --config, a TOML file\n"
        "with the same names in lower case and without the prefix, then from the command line. It listens on\n"
        "loopback by default, and refuses any other address without keys. GET /v0/openapi.json describes the API.\n"
        'Sizes and times may have units: TIDELOG_MAX_BODY_BYTES=64MiB, drain_ms = "30s".\n'
        "SIGHUP reads --config and --keys-file again and applies keys, allowed hosts and origins and the log level;\n"
        "it never ends the server.",
        examples="tidelog serve --data data\ntidelog serve --data data --port 0 --port-file port.txt\n"
        "TIDELOG_API_KEYS=s3cret:rw:orders tidelog serve --host 0.0.0.0",
    )
    parser.add_argument("--data", metavar="DIR", help="the directory of topics, made where there is none")
    parser.add_argument("--host", metavar="HOST", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="the port to listen on (4000); 0: any that is free")
    parser.add_argument("--port-file", metavar="FILE", help="write host:port here once it listens")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    parser.add_argument("--keys-file", metavar="FILE", help="a file with keys, one on each line")
    parser.add_argument("--log-format", choices=("text", "json"), help="how log lines look (text)")
    parser.add_argument("--access-log", choices=("off", "json", "combined"), help="a line for each request (off)")
    parser.add_argument(
        "--hook", metavar="MODULE:FUNCTION", help="who users of channels are, and what they may publish"
    )
    parser.add_argument("--accept-loss", action="store_true", help="start although acknowledged records were lost")


def serve(args: Namespace, screen: Screen) -> int:
    """Serve until a signal."""
    hangups = HangupSignals()  # before the imports, which take a while
    try:
        from tidelog.server import config as server_config
        from tidelog.server import lifecycle
        from tidelog.server.lifecycle import run_server
    except ImportError as error:
        raise NotFound(
            f"the server's packages are not installed ({error.name} is missing); nothing was started, run: "
            "pip install 'tidelog[server]'"
        ) from None
    disk = PosixDisk()
    given: dict[str, Any] = {
        "data_dir": args.data,
        "host": args.host,
        "port": args.port,
        "port_file": args.port_file,
        "access_log": args.access_log,
        "log_format": "json" if args.json else args.log_format,
        "accept_loss": args.accept_loss or None,
        "hook": args.hook,
        "keys_file": args.keys_file,
    }

    def settings() -> ServerConfig:
        """The environment, the file and the command line, each over the one before."""
        found = server_config.config_from_env(server_config.ServerConfig(), os.environ)
        if args.config is not None:
            found = server_config.config_from_file(found, _load_settings(disk, args.config), args.config)
        found = replace(found, **{name: value for name, value in given.items() if value is not None})
        return found if not found.keys_file else _with_keys(disk, found, found.keys_file)

    config = settings()
    check_path(config.data_dir)
    if config.hook:
        # A hook may be in the current directory; last, so that no file there shadows a module of the server.
        sys.path.append("")
    logger = lifecycle.configure_logging(config.log_format, sys.stderr, config.log_level)
    screen.flush()
    for name, near in server_config.unknown_settings(os.environ).items():
        logger.warning("%s is no setting of this server and changes nothing; the nearest is %s", name, near)
    again = None if args.config is None and not config.keys_file else settings
    try:
        run_server(
            config,
            clock=SystemClock(),
            disk=disk,
            log_line=logger.info,
            reload_config=again,
            forward_hangups=hangups.forward,
            access_output=sys.stdout,
        )
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the interpreter removes other handlers before it ends
    return 0


def _with_keys(disk: PosixDisk, config: ServerConfig, path: str) -> ServerConfig:
    """Add the keys of a file. An empty one is an error: it would mean no authentication."""
    from tidelog.server.config import keys_from_file

    content = read_file(disk, path)
    if content is None:
        raise NotFound(f"there is no file of keys {path}; the server was not started")
    try:
        keys = keys_from_file(content.decode(), path)
    except UnicodeDecodeError as error:
        raise BadInput(
            f"the file of keys {path} is not UTF-8 text: {error.reason}; the server was not started"
        ) from None
    if not keys:
        raise BadInput(f"the file of keys {path} has no key; the server was not started, add one or leave the file out")
    return replace(config, api_keys=",".join(filter(None, (config.api_keys, keys))))


def _load_settings(disk: PosixDisk, path: str) -> dict[str, Any]:
    content = read_file(disk, path)
    if content is None:
        raise NotFound(f"there is no file {path}; the server was not started")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}; the server was not started") from None


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


def add_init(commands: Commands) -> None:
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
