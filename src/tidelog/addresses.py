"""Distinguish the address of a server or an object store from a path in the file system.

To a file system `s3://bucket/table` is a directory `s3:`: a job would write there and succeed. `scheme_of` defines what
an address is; the others refuse one where it is not supported, before a job has started or created anything:

    check_path        functions and commands that take a path: refuses every address, also `file:`
    local_directory   options of Spark, where `file:///path` is common: returns the path
    absolute_path     the same for arguments of jobs: tables, input files, staging, plots, topics to write
    Location          topics of jobs and Spark: a directory, an object store, or a server with its API key

A single slash counts, because `pathlib.Path` turns `s3://bucket` into `s3:/bucket`.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final
from urllib.parse import unquote, urlsplit

from tidelog.errors import BadInput

SERVER_SCHEMES: Final = frozenset(("http", "https", "ws", "wss"))
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=.)")  # two characters or more: `c:/` is a drive
_WINDOWS: Final = re.compile(r"[A-Za-z]:([\\/]|$)|\\\\")
# Addresses also without a slash after the colon. Another name with a colon in it is a file name.
_KNOWN_SCHEMES: Final = frozenset(
    {"s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "adl", "az", "azure", "hdfs", "viewfs"}
    | {"webhdfs", "dbfs", "oss", "cos", "obs", "swift", "memory", "ftp", "http", "https", "file"}
)
_SHOWN_CHARS_MAX: Final = 200
_HTTP_SCHEMES: Final = ("http", "https")


def scheme_of(path: str | PurePath) -> str | None:
    """Return the scheme of an address in lower case, or None for a path."""
    text = str(path)
    found = _SCHEME.match(text)
    if found is None:
        return None
    scheme = found[1].lower()
    return scheme if scheme in _KNOWN_SCHEMES or text[found.end()] == "/" else None


def path_text(path: str | os.PathLike[str], what: str = "a path") -> str:
    """Return a path as text. Raises BadInput for what is neither text nor a path."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise BadInput(f"{what} is text or a pathlib.Path, not {path!r:.80}; nothing was done")
    return text


def check_path(path: str | PurePath, what: str = "a directory of this machine") -> None:
    """Refuse an address where a path is expected.

    Raises:
        BadInput: `path` has a scheme. The message names what to use in its place.
    """
    scheme = scheme_of(path)
    if scheme is None:
        return
    shown = repr(str(path)[:_SHOWN_CHARS_MAX])
    if scheme in SERVER_SCHEMES:
        step = (
            "to use a server take tidelog.connect(URL) in Python, --server URL on the command line, the option server "
            "in Spark"
        )
    elif scheme == "file":
        step = "leave file:// out"
    else:
        step = "topics in an object store are read through Spark (docs/spark.md); copy them to a directory to open them"
    raise BadInput(
        f"{shown} is an address, and this takes {what}; nothing was done, {step} (a directory with such a name "
        "is ./NAME)"
    )


def local_directory(text: str, what: str, undone: str = "nothing was done") -> str:
    """Return the path of this machine that a text names.

    Raises:
        BadInput: it names none. The message says `what` it is and what was left `undone`.
    """

    def refused(why: str) -> BadInput:
        return BadInput(
            f"{what} is {text[:_SHOWN_CHARS_MAX]!r}: {why}; {undone}. Give a directory that the driver and all "
            "executors see under the same path, as /mnt/lake/orders or file:///mnt/lake/orders"
        )

    if not text.strip() or "\0" in text:
        raise refused("that is no path")
    if _WINDOWS.match(text):
        raise refused("that is a path of Windows")
    if text == "~" or text.startswith("~/"):
        raise refused("~ is replaced by a shell and not here; write the directory out, or ./~ for that name")
    scheme = scheme_of(text)
    if scheme is None:
        return text.rstrip("/") or "/"
    if scheme != "file":
        raise refused(f"{scheme}: is not supported here")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise refused("that is no address") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise refused("a file address has the form file:///path, of this machine, with nothing after it")
    path = unquote(parts.path)
    if "\0" in path:
        raise refused("that is no path")
    return path.rstrip("/") or "/"


def absolute_path(text: str, what: str) -> str:
    """Return the absolute path that a text names: Spark and its workers may run in another directory."""
    return posixpath.abspath(local_directory(text, what))


@dataclass(frozen=True, slots=True)
class Location:
    """Where topics are: a directory, an object store, or a server with its API key."""

    address: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, where: str, key: str | None = None) -> Location:
        """Return the location that an argument of a job names; a directory becomes an absolute path."""
        if scheme_of(where) in _HTTP_SCHEMES:
            return cls(where, key)
        if key is not None:
            raise BadInput("a key is for a server; nothing was done, leave it out or name a server")
        is_path = scheme_of(where) in (None, "file")
        return cls(absolute_path(where, "the place of the topics") if is_path else where)

    def __str__(self) -> str:
        return self.address

    @property
    def is_server(self) -> bool:
        return scheme_of(self.address) in _HTTP_SCHEMES

    @property
    def is_object_store(self) -> bool:
        return not self.is_server and scheme_of(self.address) is not None

    def as_options(self) -> dict[str, str]:
        """Return the options of a Spark source or sink that name this location."""
        if not self.is_server:
            return {"path": self.address}
        return {"server": self.address, **({} if self.key is None else {"key": self.key})}
