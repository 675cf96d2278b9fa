"""[policy] Which addresses a job takes for its tables, files, topics and working directories. All others are refused.

    directory     a path of this machine, or file:///path       tables, input files, staging, plots, topics to write
    topics        the same, a server, or an object store         topics to read

An address that is not understood would be a path as well: to a file system `s3://bucket/table` is a directory `s3:`,
and a job that wrote there would report success. So every argument of every job that names a place goes through here,
before anything is started or made.
"""

from __future__ import annotations

import posixpath
import re
from typing import Final
from urllib.parse import unquote, urlsplit

from tidelog.errors import BadInput

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_WINDOWS: Final = re.compile(r"[A-Za-z]:([\\/]|$)|\\\\")
# Addresses also without a slash after the colon. Another name with a colon in it is a file name.
_STORES: Final = frozenset(
    {"s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "adl", "az", "azure", "hdfs", "viewfs"}
    | {"webhdfs", "dbfs", "oss", "cos", "obs", "swift", "memory", "ftp", "http", "https", "file"}
)
_SHOWN_MAX: Final = 200


def directory(text: str, what: str) -> str:
    """The path of this machine that a text names, or BadInput."""
    if not text.strip() or "\0" in text:
        raise _refused(text, what, "that is no path")
    if _WINDOWS.match(text):
        raise _refused(text, what, "that is a path of Windows")
    if text == "~" or text.startswith("~/"):
        raise _refused(
            text, what, "~ is replaced by a shell and not here; write the directory out, or ./~ for that name"
        )
    scheme = _scheme(text)
    if scheme is None:
        return text.rstrip("/") or "/"
    if scheme != "file":
        raise _refused(text, what, f"{scheme}: is not supported here")
    return _of_file_url(text, what)


def absolute(text: str, what: str) -> str:
    """The same, from the root: Spark and its workers may have been started in another directory."""
    return posixpath.abspath(directory(text, what))


def topics(text: str, what: str) -> str:
    """Where topics are read: a server and an object store stay as they are, anything else is a directory."""
    scheme = _scheme(text)
    if scheme in ("http", "https") or (scheme not in (None, "file") and not _WINDOWS.match(text)):
        return text
    return absolute(text, what)


def is_server(text: str) -> bool:
    return _scheme(text) in ("http", "https")


def _scheme(text: str) -> str | None:
    """What stands before the colon of an address; None: it is a path."""
    found = _SCHEME.match(text)
    if found is None:
        return None
    scheme = found[1].lower()
    return scheme if scheme in _STORES or text[found.end() :].startswith("/") else None


def _of_file_url(text: str, what: str) -> str:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise _refused(text, what, "that is no address") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise _refused(text, what, "a file address has the form file:///path, of this machine, with nothing after it")
    path = unquote(parts.path)
    if "\0" in path:
        raise _refused(text, what, "that is no path")
    return path.rstrip("/") or "/"


def _refused(text: str, what: str, why: str) -> BadInput:
    return BadInput(
        f"{what} is {text[:_SHOWN_MAX]!r}: {why}; nothing was done. Give a directory that the driver and all executors "
        "see under the same path, as /mnt/lake/orders or file:///mnt/lake/orders"
    )
