"""[policy] Which codec a directory's log has, before anything is opened for writing.

Opening for writing makes what is not there. That is right for the first append and wrong for
everything else: a mistyped path must not become an empty log, and a log must not get a second one
of another layout beside it.
"""

from __future__ import annotations

from tidelog.addresses import check_path
from tidelog.commitlog.codecs import NAMES, codec_named
from tidelog.commitlog.recovery import codec_of
from tidelog.config import LogConfig
from tidelog.disk.seam import Disk
from tidelog.errors import BadInput, NotFound


def codec_there(disk: Disk, path: str, asked: str | None) -> str:
    """The codec of the log in `path`. NotFound where there is none, BadInput where it is not the one asked for."""
    names = _names(disk, path)
    if names is None:
        raise NotFound(f"there is no log at {path}; nothing was changed, check the path")
    found = _among(disk, path, names, asked)
    if found is None:
        raise NotFound(f"{path} holds no log; nothing was changed, check the path")
    return found


def codec_to_write(disk: Disk, path: str, asked: str | None) -> str:
    """The codec to append with: that of the log in `path`; where there is none yet, the one asked for, or tide."""
    found = _among(disk, path, _names(disk, path) or [], asked)
    return found or asked or "tide"


def _names(disk: Disk, path: str) -> list[str] | None:
    check_path(path)
    try:
        return disk.names(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise BadInput(f"{path} is a file, a log is a directory; nothing was changed, check the path") from None


def _among(disk: Disk, path: str, names: list[str], asked: str | None) -> str | None:
    likely = codec_of(disk, path, names)
    if likely is not None:
        if asked not in (None, likely):
            raise BadInput(f"{path} holds a {likely} log, not a {asked} one; nothing was changed, leave --codec out")
        return likely
    fitting = [
        name for name in NAMES if any(codec_named(name, LogConfig()).base_of(file) is not None for file in names)
    ]
    if not fitting or asked in fitting:
        return asked if fitting else None
    raise BadInput(f"{path} may hold a log of {' or '.join(fitting)}; nothing was changed, say which with --codec")
