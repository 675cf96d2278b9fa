"""[shell] `tidelog serve`: topics for every language, over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidelog.addresses import check_path
from tidelog.cli.command import command
from tidelog.cli.render import Screen
from tidelog.clock import SystemClock
from tidelog.disk.atomic import read_all
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, NotFound

if TYPE_CHECKING:
    from tidelog.cli.command import Commands


def add(commands: Commands) -> None:
    """Add `serve` to the command line."""
    made = command(
        commands,
        "serve",
        serve,
        short="serve a directory of topics over HTTP",
        about="Serve a directory of topics over HTTP/1.1, h2c, SSE and WebSocket until SIGTERM or Ctrl-C. Settings\n"
        "come from the environment (TIDELOG_HOST, TIDELOG_API_KEYS and so on), then from --config, a TOML file\n"
        "with the same names in lower case and without the prefix, then from the command line. It listens on\n"
        "loopback unless told otherwise, and refuses any other address without keys. GET /v0/openapi.json\n"
        "describes what it answers. SIGHUP reads --config again and takes over keys, allowed hosts and origins\n"
        "and the log level; it never ends the server.",
        examples="tidelog serve --data data\ntidelog serve --data data --port 0 --port-file port.txt\n"
        "TIDELOG_API_KEYS=s3cret:rw:orders tidelog serve --host 0.0.0.0",
    )
    made.add_argument("--data", metavar="DIR", help="the directory of topics, made where there is none")
    made.add_argument("--host", metavar="HOST", help="the address to listen on (127.0.0.1)")
    made.add_argument("--port", metavar="PORT", type=int, help="the port to listen on (4000); 0: any that is free")
    made.add_argument("--port-file", metavar="FILE", help="write host:port here once it listens")
    made.add_argument("--config", metavar="FILE", help="settings in TOML")
    made.add_argument("--log-format", choices=("text", "json"), help="how log lines look (text)")
    made.add_argument("--hook", metavar="MODULE:FUNCTION", help="who users of channels are, and what they may publish")
    made.add_argument("--accept-loss", action="store_true", help="start although acknowledged records were lost")


def serve(args: Namespace, screen: Screen) -> int:
    """Serve until told to stop."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server has its own handler: a lost terminal ends nothing
    try:
        from tidelog.server import logs
        from tidelog.server.config import ServerConfig, from_env, from_file, unknown
        from tidelog.server.serve import run
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
        "log_format": "json" if args.json else args.log_format,
        "accept_loss": args.accept_loss or None,
        "hook": args.hook,
    }

    def settings() -> ServerConfig:
        """The environment, the file and the command line, each over the one before."""
        found = from_env(ServerConfig(), os.environ)
        if args.config is not None:
            found = from_file(found, _settings(disk, args.config), args.config)
        return replace(found, **{name: value for name, value in given.items() if value is not None})

    config = settings()
    check_path(config.data_dir)
    if config.hook:
        # A hook may lie where the server is started, whichever way that was; last, so that no file there takes the
        # place of a module that the server itself imports.
        sys.path.append("")
    logger = logs.configure(config.log_format, sys.stderr, config.log_level)
    screen.flush()
    for name in unknown(os.environ):
        logger.warning("%s is no setting of this server and changes nothing; look at the name again", name)
    again = None if args.config is None else settings
    run(config, clock=SystemClock(), disk=disk, say=logger.info, again=again)
    return 0


def _settings(disk: PosixDisk, path: str) -> dict[str, Any]:
    content = read_all(disk, path)
    if content is None:
        raise NotFound(f"there is no file {path}; the server was not started")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}; the server was not started") from None
