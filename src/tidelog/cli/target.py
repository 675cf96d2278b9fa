"""The database of a command: a directory, opened here, or a server. Both have the methods of `protocols.Database`.

Opening for writing creates a missing directory. Only the first write wants that: a mistyped path must not become an
empty directory of topics. One process writes; readers work beside it and see the state at the time they open it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tidelog
from tidelog import protocols
from tidelog.addresses import check_path
from tidelog.cli.render import Screen
from tidelog.client import connect
from tidelog.commitlog.codecs import guess_codec
from tidelog.disk.posix import PosixDisk
from tidelog.engine import manifest
from tidelog.engine.context import TOPICS_DIR, WAL_DIR
from tidelog.engine.read import iter_wal_files
from tidelog.errors import BadInput, Corrupt, Locked, NotFound

_WAL_FILE_BYTES = 4 << 20  # a command writes little and goes: no reason to reserve what a server would


def check_holds_topics(path: str) -> None:
    """Raise where there are no topics in `path`."""
    check_path(path)
    disk = PosixDisk()
    stat = disk.stat(path)
    if stat is None:
        raise NotFound(f"there is nothing at {path}; nothing was changed, check the path")
    if not stat.is_dir:
        raise BadInput(f"{path} is a file, topics are in a directory; nothing was changed, check the path")
    names = disk.list_dir(path)
    if not set(names) & {manifest.MANIFEST_DIR, WAL_DIR, TOPICS_DIR}:
        hint = f"a log: use tidelog log with {path}" if guess_codec(names) is not None else "no topics, check the path"
        raise NotFound(f"{path} holds {hint}; nothing was changed")


@contextmanager
def open_for_reading(path: str, screen: Screen, **settings: Any) -> Iterator[tidelog.Database]:
    """Open a directory for reading, beside a writer. Prints the damage that recovery found."""
    check_holds_topics(path)
    with _point_to_check(path):
        log = _open_database(path, screen, read_only=True, **settings)
        try:
            for line in log.report.damage:
                screen.print_note(f"damage: {line}; tidelog check {path} lists all of it")
            yield log
        finally:
            log.close()


@contextmanager
def open_for_writing(
    path: str, screen: Screen, *, create: bool = False, accept_loss: bool = False, **settings: Any
) -> Iterator[tidelog.Database]:
    """Open a directory for writing and print the repairs of recovery. Everything is durable when the block ends."""
    if not create:
        check_holds_topics(path)
    with _point_to_check(path):
        try:
            log = _open_database(path, screen, wal_file_bytes=_WAL_FILE_BYTES, accept_loss=accept_loss, **settings)
        except Locked as error:
            holder = "" if error.pid is None else f" (pid {error.pid})"
            writer, step = f"is being written by another process{holder}", "stop it first"
            if error.server is not None:
                writer, step = f"is served at {error.server}", f"give --server {error.server} in place of the directory"
            raise Locked(
                f"{path} {writer}; nothing was changed, {step}, or only read: tidelog topic ls, show, read, follow and "
                "tidelog check work beside it",
                pid=error.pid,
                server=error.server,
            ) from None
        with log:
            for line in log.report.lines():
                screen.print_note(f"recovery: {line}")
            yield log


def _open_database(path: str, screen: Screen, **settings: Any) -> tidelog.Database:
    with screen.progress_bar(f"opening {path}", total=1) as bar:
        return tidelog.open(path, progress=lambda _, done, total: bar(done, total), **settings)


@contextmanager
def _point_to_check(path: str) -> Iterator[None]:
    """Let a Corrupt error name the command that lists all damage."""
    try:
        yield
    except Corrupt as error:
        step = f"tidelog check {path} lists all of it"
        raise Corrupt(error.where, pos=error.pos, reason=error.reason, next_step=step) from error


def wal_bytes(path: str) -> int:
    """Return the bytes of all WAL files."""
    return sum(stat.size for _, stat in iter_wal_files(PosixDisk(), path) if stat is not None)


def target_place(args: Namespace) -> str:
    """Return the directory or the URL of a command, for messages and results."""
    place: str = args.server or args.dir
    return place


def target_words(args: Namespace, *words: str) -> str:
    """Return how the same database is named in another command: `data orders`, or `orders --server URL`."""
    return " ".join([*words, "--server", args.server] if args.server else [args.dir, *words])


def check_target(args: Namespace) -> None:
    """Raise at once where there are no topics or no server, for what would wait for a server that is away."""
    if args.server:
        connect(args.server, key=args.api_key).close()
    else:
        check_holds_topics(args.dir)


@contextmanager
def open_target(
    args: Namespace, screen: Screen, *, write: bool, create: bool = False, **settings: Any
) -> Iterator[protocols.Database]:
    """Open the database that the command line names; `settings` are those of `tidelog.open`. Everything is durable when
    the block ends. A command that only reads works beside a writer of the directory."""
    if args.server:
        if settings:
            raise BadInput(
                f"{', '.join(sorted(settings))} can be set for a directory only: the settings of a server are its own; "
                "nothing was done"
            )
        with connect(args.server, key=args.api_key) as remote:
            yield remote
    elif write:
        with open_for_writing(args.dir, screen, create=create, **settings) as database:
            yield database
    else:
        with open_for_reading(args.dir, screen, **settings) as database:
            yield database
