"""[shell] Where a command finds what it is about: `DIR NAME`, opened here; or `NAME --server URL`, of a server."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tidelog.channels import Engine
from tidelog.cli.data import reading, writing
from tidelog.cli.render import Screen
from tidelog.client import Client
from tidelog.errors import BadInput

Door = TypeVar("Door")


def named(args: Namespace, what: str) -> str:
    """The name that is meant. A directory stands before it, where there is no server."""
    given: list[str] = list(args.places)
    if len(given) != (1 if args.server else 2):
        form = f"{what} --server URL" if args.server else f"DIR {what}"
        raise BadInput(f"this takes {form}, not {' '.join(given)!r:.200}; nothing was done")
    args.dir = None if args.server else given[0]
    return given[-1]


@contextmanager
def opened(
    args: Namespace,
    screen: Screen,
    local: Callable[[Engine], Door],
    remote: Callable[[Client], Door],
    *,
    write: bool,
    create: bool = False,
) -> Iterator[Door]:
    """The door that the command line names. Everything is on disk when this ends."""
    if args.server:
        with Client(args.server, key=args.key) as client:
            yield remote(client)
        return
    if args.key:
        raise BadInput("--key is for a server; nothing was done, leave it out or name a --server")
    if write:
        with writing(args.dir, screen, create=create) as log:
            yield local(log)
    else:
        with reading(args.dir, screen) as log:
            yield local(log)
