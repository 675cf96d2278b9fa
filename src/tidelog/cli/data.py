"""[shell] A directory of topics, opened as a command needs it.

Opening for writing makes what is not there, which is right for the first write and wrong for
everything else: a mistyped path must not become an empty directory of topics. One process writes;
readers need no leave of it and see what was there when they looked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tidelog
from tidelog.addresses import check_path
from tidelog.cli.render import Screen
from tidelog.commitlog.codecs import guess
from tidelog.commitlog.opening import LOCK_FILE
from tidelog.disk.atomic import read_all
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import join
from tidelog.engine import manifest
from tidelog.engine.core import TOPICS, WAL
from tidelog.engine.watch import wal_files
from tidelog.errors import BadInput, Corrupt, Locked, NotFound

_WAL_FILE_BYTES = 4 << 20  # a command writes little and goes: no reason to reserve what a server would


def check_there(path: str) -> None:
    """Raise where there are no topics in `path`."""
    check_path(path)
    disk = PosixDisk()
    stat = disk.stat(path)
    if stat is None:
        raise NotFound(f"there is nothing at {path}; nothing was changed, check the path")
    if not stat.is_dir:
        raise BadInput(f"{path} is a file, topics lie in a directory; nothing was changed, check the path")
    found = disk.names(path)
    if not set(found) & {manifest.DIRECTORY, WAL, TOPICS}:
        what = f"a log: use tidelog log with {path}" if guess(found) is not None else "no topics, check the path"
        raise NotFound(f"{path} holds {what}; nothing was changed")


@contextmanager
def reading(path: str, screen: Screen) -> Iterator[tidelog.Engine]:
    """The topics as they are now; a writer may be at work. Damage that recovery knows of is remarked on."""
    check_there(path)
    with _pointed(path):
        log = _open(path, screen, read_only=True)
        try:
            for line in log.report.damage:
                screen.say(f"damage: {line}; tidelog check {path} tells all of it")
            yield log
        finally:
            log.close()


@contextmanager
def writing(path: str, screen: Screen, *, create: bool = False, accept_loss: bool = False) -> Iterator[tidelog.Engine]:
    """The topics for this process alone; what recovery did is remarked on. Everything is on disk when this ends."""
    if not create:
        check_there(path)
    with _pointed(path):
        try:
            log = _open(path, screen, wal_file_bytes=_WAL_FILE_BYTES, accept_loss=accept_loss)
        except Locked:
            raise Locked(
                f"{path} is being written by another process{_holder(path)}; nothing was changed, stop it first, or "
                "only look: tidelog topic ls, show, read, follow and tidelog check work beside it"
            ) from None
        with log:
            for line in log.report.lines():
                screen.say(f"recovery: {line}")
            yield log


def _open(path: str, screen: Screen, **settings: Any) -> tidelog.Engine:
    with screen.bar(f"opening {path}", total=1) as bar:
        return tidelog.open(path, progress=lambda _, done, total: bar(done, total), **settings)


def _holder(path: str) -> str:
    found = re.fullmatch(rb"pid=(\d+)\n", read_all(PosixDisk(), join(path, LOCK_FILE)) or b"")
    return f" (pid {int(found[1])})" if found else ""


@contextmanager
def _pointed(path: str) -> Iterator[None]:
    """Damage that is met points to the command that tells all of it."""
    try:
        yield
    except Corrupt as error:
        step = f"tidelog check {path} tells all of it"
        raise Corrupt(error.where, pos=error.pos, reason=error.reason, next_step=step) from error


def wal_bytes(path: str) -> int:
    """Bytes of all WAL files that are there."""
    return sum(stat.size for _, stat in wal_files(PosixDisk(), path) if stat is not None)
