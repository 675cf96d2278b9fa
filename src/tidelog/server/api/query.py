"""Query strings and paths, read as the contract says: what does not parse is the default, except a cursor."""

from __future__ import annotations

from urllib.parse import unquote, unquote_plus

from tidelog.server.api.problem import Problem


class Query:
    """The parameters of a query string; of several with one name the first counts."""

    __slots__ = ("_found",)

    def __init__(self, text: str) -> None:
        self._found: dict[str, str] = {}
        for pair in text.split("&") if text else ():
            name, _, value = pair.partition("=")
            self._found.setdefault(unquote_plus(name), unquote_plus(value))

    def text(self, name: str) -> str | None:
        return self._found.get(name)

    def flag(self, name: str, default: bool) -> bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(self._found.get(name, ""), default)

    def number(self, name: str, default: int) -> int:
        text = self._found.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else default


def segments(path: str) -> list[str]:
    """The parts of a path between slashes, each decoded once. Half a percent sign or bytes that are no text are bad."""
    parts = path.split("/")[1:]
    if "%" not in path and path.isascii():
        return parts
    try:
        return [unquote(part.encode("latin-1").decode("utf-8"), errors="strict") for part in parts]
    except ValueError:
        raise Problem("invalid_request", "the path is not UTF-8; nothing was done, encode it again") from None
