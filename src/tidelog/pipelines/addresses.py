"""[policy] Which addresses a job takes for its tables, files, topics and working directories. All others are refused.

    directory     a path of this machine, or file:///path       tables, input files, staging, plots, topics to write
    topics        the same, a server, or an object store         topics to read

Every argument of every job that names a place goes through here, before anything is started or made. What an address
is, and what a directory, is said by `tidelog.addresses`; here paths become absolute, and topics come from more places.
"""

from __future__ import annotations

import posixpath
from typing import Final

from tidelog.addresses import directory, scheme_of

__all__ = ["absolute", "directory", "is_server", "topics"]

_HTTP: Final = ("http", "https")


def absolute(text: str, what: str) -> str:
    """The path that a text names, from the root: Spark and its workers may have been started in another directory."""
    return posixpath.abspath(directory(text, what))


def topics(text: str, what: str) -> str:
    """Where topics are read: a server and an object store stay as they are, anything else is a directory."""
    return text if scheme_of(text) not in (None, "file") else absolute(text, what)


def is_server(text: str) -> bool:
    return scheme_of(text) in _HTTP
