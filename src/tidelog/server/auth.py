"""[policy] Who may do what: keys, scopes, and the names a key is for.

    secret                    full access
    secret:scopes             only these scopes, any name
    secret:scopes:prefixes    both; prefixes may contain ':'
    secret::prefixes          every scope, only names that begin so
    user@domain=secret…       any of these, and who it is in channels. A secret has '=' at its end alone

Keys are kept as SHA-256 and compared in constant time against all of them. Whatever does not parse is
refused at the start: a misspelt scope must never mean full access.

[policy] Caps on what clients hold at once: requests in flight, streams, sessions. Taken and given back in pairs.

All of it happens on the event loop's thread, so a check and what it allows are one step.

[policy] Which hosts a server answers for, and which web pages may use it.

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

import asyncio
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import Final

from tidelog.channels.rules import is_user
from tidelog.errors import BadInput
from tidelog.http.interface import Request
from tidelog.server.errors import ApiError

READ: Final = "read"
WRITE: Final = "write"
DELETE: Final = "delete"
ADMIN: Final = "admin"
ALL_SCOPES: Final = frozenset((READ, WRITE, DELETE, ADMIN))
_SCOPE_NAMES: Final = {
    "read": {READ},
    "r": {READ},
    "write": {WRITE},
    "w": {WRITE},
    "delete": {DELETE},
    "del": {DELETE},
    "d": {DELETE},
    "admin": {ADMIN},
    "a": {ADMIN},
    "rw": {READ, WRITE},
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever presented a key. Its identity is the key's digest, never the key."""

    identity: bytes
    scopes: frozenset[str] = ALL_SCOPES
    prefixes: tuple[str, ...] = ()
    user: str | None = None  # who that is in channels, where the key says so

    @property
    def name(self) -> str | None:
        """How the ledger calls whoever it was: the beginning of the key's digest. None with authentication off."""
        return self.identity.hex()[:16] or None

    def has_scopes(self, scopes: frozenset[str]) -> bool:
        return scopes <= self.scopes

    def may_use_name(self, name: str) -> bool:
        """Whether this name is one the key is for."""
        return not self.prefixes or name.startswith(self.prefixes)


ANONYMOUS: Final = Principal(b"")  # with authentication off


class Keyring:
    def __init__(self, keys: str = "") -> None:
        self._principals = [principal for entry in keys.split(",") if (principal := _parse_key(entry))]
        if keys.strip() and not self._principals:
            raise BadInput("TIDELOG_API_KEYS names no key; the server was not started, give one or leave it out")

    @property
    def is_empty(self) -> bool:
        """No keys: everybody may do everything."""
        return not self._principals

    def contains(self, principal: Principal) -> bool:
        """Whether the key of a principal is one of these, and still for the same."""
        return self.is_empty or principal in self._principals

    def find(self, secret: str) -> Principal | None:
        digest = sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = None
        for principal in self._principals:  # all of them, found or not: time tells nothing
            if compare_digest(principal.identity, digest):
                found = principal
        return found


def _parse_key(entry: str) -> Principal | None:
    entry = entry.strip()
    if not entry:
        return None
    user, entry = _split_user(entry)
    secret, _, rest = entry.partition(":")
    scopes, separator, prefixes = rest.partition(":")
    if not secret:
        raise BadInput("a key in TIDELOG_API_KEYS has no secret before its colon; the server was not started")
    granted: set[str] = set()
    for word in scopes.split("+") if scopes.strip() else []:
        known = _SCOPE_NAMES.get(word.strip().lower())
        if known is None:
            raise BadInput(
                f"a key in TIDELOG_API_KEYS has the scope {word.strip()!r}; known are read, write, delete, admin and "
                "rw, joined by '+'; the server was not started"
            )
        granted |= known
    names = tuple(prefix for prefix in prefixes.split("|") if prefix) if separator else ()
    return Principal(sha256(secret.encode()).digest(), frozenset(granted) or ALL_SCOPES, names, user)


def _split_user(entry: str) -> tuple[str | None, str]:
    """The user before `=`, where there is one, and the rest. A secret may end with `=`, as base64 does, and have none
    elsewhere: `name=key` was meant to name a user, and all of it would be the secret."""
    user, separator, rest = entry.partition("=")
    if not separator or ":" in user.partition("@")[0]:
        return None, entry
    if "@" not in user:
        if rest.partition(":")[0].strip("="):
            raise BadInput(
                "a key in TIDELOG_API_KEYS has a '=' in the middle of its secret: write user@domain=secret for the key "
                "of a user, or choose a secret without it; the server was not started"
            )
        return None, entry
    if not is_user(user):
        raise BadInput(
            f"a key in TIDELOG_API_KEYS is for {user!r}, which is no user: write user@domain=secret; the server was "
            "not started"
        )
    return user, rest


def bearer_token(header: bytes | None) -> str | None:
    """The key of an Authorization header."""
    if header is None or not header.startswith(b"Bearer "):
        return None
    return header[7:].decode("utf-8", "surrogateescape").strip() or None


class ConcurrencyLimit:
    """How many of one thing everybody together and each key may hold; 0: as many as they like."""

    def __init__(self, resource: str, total: int, per_key: int = 0) -> None:
        self._resource, self._total, self._per_key = resource, total, per_key
        self.count = 0
        self._emptied: asyncio.Event | None = None
        self._by_key: Counter[bytes] = Counter()

    def check(self, principal: Principal, count: int = 1) -> None:
        """Raises where there is no room. Without keys there is nobody to count by key."""
        if self._total and self.count + count > self._total:
            raise ApiError(
                "throttled", f"{self._total} {self._resource} at once are the limit; nothing was done, retry"
            )
        key = principal.identity
        if self._per_key and key and self._by_key[key] + count > self._per_key:
            raise ApiError(
                "throttled",
                f"{self._per_key} {self._resource} of one key at once are the limit; nothing was done, retry",
            )

    def acquire(self, principal: Principal, count: int = 1) -> None:
        """Take a place, or so many at once. Raises where there are none, and has taken none then."""
        self.check(principal, count)
        self.count += count
        if principal.identity:
            self._by_key[principal.identity] += count

    async def wait_empty(self) -> None:
        """Return when nobody holds any."""
        while self.count:
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    def release(self, principal: Principal, count: int = 1) -> None:
        self.count -= count
        if not self.count and self._emptied is not None:
            self._emptied.set()
        key = principal.identity
        if key:
            self._by_key[key] -= count
            if not self._by_key[key]:
                del self._by_key[key]


_ANY_NAME: Final = "*"
_SAME_SITE_VALUES: Final = (b"same-origin", b"none")  # none: the user typed it
_SCHEMES: Final = ("http", "https")
_HOST: Final = re.compile(
    r"(?:\[(?P<address>[0-9a-f:.%a-z_-]+)\]|(?P<name>[^\s:@/?#\[\]\\,]+))(?::[0-9]{0,5})?", re.ASCII
)
_SAFE_METHODS: Final = frozenset(("GET", "HEAD"))


class OriginPolicy:
    def __init__(self, host: str, allowed_hosts: str, allowed_origins: str, *, keys: bool) -> None:
        """`host` is where the server listens. `keys`: requests need one, and then any host will do unless some are
        named."""
        self._hosts = frozenset(_split_list(allowed_hosts))
        self._origins = frozenset(_split_list(allowed_origins))
        for origin in self._origins - {_ANY_NAME}:
            if "://" not in origin or origin.endswith("/"):
                raise BadInput(
                    f"allowed_origins names {origin!r}; an origin is scheme://host[:port], without a slash at its end"
                )
        self._listen_name = _host_name(host.lower() if ":" not in host else f"[{host}]")
        self._accepts_addresses = not _is_loopback(self._listen_name)
        self._checks_hosts = _ANY_NAME not in self._hosts and (bool(self._hosts) or not keys)
        self._is_known_host = lru_cache(1024)(self._check_host)

    def check(self, request: Request, *, changes: bool, is_public: bool) -> None:
        """Refuse a request that a page of another site made, or that was sent to a name which is not the server's."""
        host = site = None
        origins: tuple[bytes, ...] = ()
        for name, value in request.headers:
            if name == b"host":
                if host is not None and value != host:  # another server in front may have taken the other one
                    raise ApiError("invalid_request", "a request has exactly one Host header; nothing was done")
                host = value
            elif name == b"origin":
                origins += (value,)
            elif name == b"sec-fetch-site":
                site = value
        if self._checks_hosts and host is not None and not is_public and not self._is_known_host(host):
            raise ApiError(
                "forbidden",
                f"this server does not answer for the host {host[:80].decode('latin-1')!r}; nothing was done, ask it "
                "by its address, or name the host in TIDELOG_ALLOWED_HOSTS",
            )
        for origin in origins:
            self._check_origin(origin, host)
        if origins or site is None or site in _SAME_SITE_VALUES:
            return
        if changes or request.method not in _SAFE_METHODS:
            raise ApiError("forbidden", "a page of another site made this request; nothing was done")

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        text = origin.decode("latin-1").strip().lower()
        scheme, _, authority = text.partition("://")  # "null" has neither: a sandboxed page, or a file
        own = (
            host is not None
            and scheme in _SCHEMES
            and _host_name(authority) != ""
            and authority == host.decode("latin-1").strip().lower()
        )
        if not (own or text in self._origins or _ANY_NAME in self._origins):
            raise ApiError(
                "forbidden",
                f"a page of {text[:80]!r} may not use this server; nothing was done, name it in "
                "TIDELOG_ALLOWED_ORIGINS if it may",
            )

    def _check_host(self, host: bytes) -> bool:
        text = host.decode("latin-1").strip().lower()
        name = _host_name(text)
        if not name:
            return False
        if text in self._hosts or name in self._hosts or name == self._listen_name or _is_loopback(name):
            return True
        return self._accepts_addresses and _is_address(name)  # DNS cannot point a number elsewhere


def _split_list(text: str) -> list[str]:
    return [each.strip().lower() for each in text.split(",") if each.strip()]


def _host_name(host: str) -> str:
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
