"""`tidelog serve`: run the HTTP server of a directory."""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from argparse import Namespace
from dataclasses import replace
from typing import Any

from tidelog.addresses import check_path
from tidelog.cli.command import (
    Commands,
    add_command,
)
from tidelog.cli.render import Screen
from tidelog.clock import SystemClock
from tidelog.disk.durability import read_file
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, NotFound


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
        "SIGHUP reads --config again and applies keys, allowed hosts and origins and the log level; it never ends\n"
        "the server.",
        examples="tidelog serve --data data\ntidelog serve --data data --port 0 --port-file port.txt\n"
        "TIDELOG_API_KEYS=s3cret:rw:orders tidelog serve --host 0.0.0.0",
    )
    parser.add_argument("--data", metavar="DIR", help="the directory of topics, made where there is none")
    parser.add_argument("--host", metavar="HOST", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="the port to listen on (4000); 0: any that is free")
    parser.add_argument("--port-file", metavar="FILE", help="write host:port here once it listens")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    parser.add_argument("--log-format", choices=("text", "json"), help="how log lines look (text)")
    parser.add_argument(
        "--hook", metavar="MODULE:FUNCTION", help="who users of channels are, and what they may publish"
    )
    parser.add_argument("--accept-loss", action="store_true", help="start although acknowledged records were lost")


def serve(args: Namespace, screen: Screen) -> int:
    """Serve until a signal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server has its own handler: a lost terminal ends nothing
    try:
        from tidelog.server import lifecycle
        from tidelog.server.config import ServerConfig, config_from_env, config_from_file, unknown_settings
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
        "log_format": "json" if args.json else args.log_format,
        "accept_loss": args.accept_loss or None,
        "hook": args.hook,
    }

    def settings() -> ServerConfig:
        """The environment, the file and the command line, each over the one before."""
        found = config_from_env(ServerConfig(), os.environ)
        if args.config is not None:
            found = config_from_file(found, _load_settings(disk, args.config), args.config)
        return replace(found, **{name: value for name, value in given.items() if value is not None})

    config = settings()
    check_path(config.data_dir)
    if config.hook:
        # A hook may be in the current directory; last, so that no file there shadows a module of the server.
        sys.path.append("")
    logger = lifecycle.configure_logging(config.log_format, sys.stderr, config.log_level)
    screen.flush()
    for name in unknown_settings(os.environ):
        logger.warning("%s is no setting of this server and changes nothing; look at the name again", name)
    again = None if args.config is None else settings
    run_server(config, clock=SystemClock(), disk=disk, log_line=logger.info, reload_config=again)
    return 0


def _load_settings(disk: PosixDisk, path: str) -> dict[str, Any]:
    content = read_file(disk, path)
    if content is None:
        raise NotFound(f"there is no file {path}; the server was not started")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}; the server was not started") from None
