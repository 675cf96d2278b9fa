"""[policy] Tell the address of a server or an object store from a path in the file system.

Opening for writing makes a directory that is not there, so `open("http://…")` and `open("s3://…")` would make a
directory named `http:` or `s3:` and write into it. Every function and command that takes a directory calls
`check_path` first. A single slash counts too, because `pathlib.Path` turns `s3://bucket` into `s3:/bucket`.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

from tidelog.errors import BadInput

_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # two characters or more: `c:/` is a drive
_SHOWN_MAX: Final = 200
_HTTP: Final = frozenset(("http", "https", "ws", "wss"))


def scheme_of(path: str | PurePath) -> str | None:
    """Return the scheme of an address in lower case, or None for a path."""
    found = _ADDRESS.match(str(path))
    return found[1].lower() if found else None


def check_path(path: str | PurePath, what: str = "a directory of this machine") -> None:
    """Refuse an address where a path is expected.

    Raises:
        BadInput: `path` has a scheme. The message names what to use in its place.
    """
    scheme = scheme_of(path)
    if scheme is None:
        return
    shown = repr(str(path)[:_SHOWN_MAX])
    if scheme in _HTTP:
        step = (
            "to use a server from Python take tidelog.client.Client(url), on the command line --server URL, in Spark "
            "the option server"
        )
    elif scheme == "file":
        step = "leave file:// out"
    else:
        step = "topics in an object store are read through Spark (docs/spark.md); copy them to a directory to open them"
    raise BadInput(
        f"{shown} is an address, and this takes {what}; nothing was done, {step} (a directory with such a name "
        "is ./NAME)"
    )
