"""[policy] Which hosts a server answers for, and which web pages may use it.

A browser sends requests wherever a page tells it to. Two headers, which no page can set, say whose page it was:

    Host     without keys it must be a loopback name, the address that the server listens on, or one of
             `allowed_hosts`: a name that an attacker's DNS points at 127.0.0.1 is none of them
    Origin   where there is one, it must be the server's own (same host and port as `Host`), or one of
             `allowed_origins`. Programs send none

A page can make a browser send a GET without Origin, as the address of an image. Current browsers then say
`Sec-Fetch-Site`; a request that changes something is refused where that says another site.

Probes answer under any host: they are public with keys, too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from tidelog.errors import BadInput
from tidelog.server.api.problem import Problem
from tidelog.server.http.seam import Request

_ANY: Final = "*"
_OWN_SITES: Final = (b"same-origin", b"none")  # none: the user typed it
_SCHEMES: Final = ("http", "https")
_HOST: Final = re.compile(
    r"(?:\[(?P<address>[0-9a-f:.%a-z_-]+)\]|(?P<name>[^\s:@/?#\[\]\\,]+))(?::[0-9]{0,5})?", re.ASCII
)
_READS: Final = frozenset(("GET", "HEAD"))


class Origins:
    def __init__(self, host: str, allowed_hosts: str, allowed_origins: str, *, keys: bool) -> None:
        """`host` is where the server listens. `keys`: requests need one, and then any host will do unless some are
        named."""
        self._hosts = frozenset(_listed(allowed_hosts))
        self._origins = frozenset(_listed(allowed_origins))
        for origin in self._origins - {_ANY}:
            if "://" not in origin or origin.endswith("/"):
                raise BadInput(
                    f"allowed_origins names {origin!r}; an origin is scheme://host[:port], without a slash at its end"
                )
        self._listens = _name_of(host.lower() if ":" not in host else f"[{host}]")
        self._takes_addresses = not _is_loopback(self._listens)
        self._checks_hosts = _ANY not in self._hosts and (bool(self._hosts) or not keys)
        self._is_known = lru_cache(1024)(self._look)

    def check(self, request: Request, *, changes: bool, is_public: bool) -> None:
        """Refuse a request that a page of another site made, or that was sent to a name which is not the server's."""
        host = site = None
        origins: tuple[bytes, ...] = ()
        for name, value in request.headers:
            if name == b"host":
                if host is not None and value != host:  # another server in front may have taken the other one
                    raise Problem("invalid_request", "a request has exactly one Host header; nothing was done")
                host = value
            elif name == b"origin":
                origins += (value,)
            elif name == b"sec-fetch-site":
                site = value
        if self._checks_hosts and host is not None and not is_public and not self._is_known(host):
            raise Problem(
                "forbidden",
                f"this server does not answer for the host {host[:80].decode('latin-1')!r}; nothing was done, ask it "
                "by its address, or name the host in TIDELOG_ALLOWED_HOSTS",
            )
        for origin in origins:
            self._check_origin(origin, host)
        if origins or site is None or site in _OWN_SITES:
            return
        if changes or request.method not in _READS:
            raise Problem("forbidden", "a page of another site made this request; nothing was done")

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        text = origin.decode("latin-1").strip().lower()
        scheme, _, authority = text.partition("://")  # "null" has neither: a sandboxed page, or a file
        own = (
            host is not None
            and scheme in _SCHEMES
            and _name_of(authority) != ""
            and authority == host.decode("latin-1").strip().lower()
        )
        if not (own or text in self._origins or _ANY in self._origins):
            raise Problem(
                "forbidden",
                f"a page of {text[:80]!r} may not use this server; nothing was done, name it in "
                "TIDELOG_ALLOWED_ORIGINS if it may",
            )

    def _look(self, host: bytes) -> bool:
        text = host.decode("latin-1").strip().lower()
        name = _name_of(text)
        if not name:
            return False
        if text in self._hosts or name in self._hosts or name == self._listens or _is_loopback(name):
            return True
        return self._takes_addresses and _is_address(name)  # DNS cannot point a number elsewhere


def _listed(text: str) -> list[str]:
    return [each.strip().lower() for each in text.split(",") if each.strip()]


def _name_of(host: str) -> str:
    """A host without its port and brackets; empty where it is no host: with a user's name, a path or two ports."""
    found = _HOST.fullmatch(host)
    if found is None:
        return ""
    return found["address"] or (found["name"] or "").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ip_address(name).is_loopback)
