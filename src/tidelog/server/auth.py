"""Access control: keys with scopes and prefixes, limits of concurrent use, and the origin policy for browsers.

    secret                    full access
    secret:scopes             only these scopes, any name
    secret:scopes:prefixes    both; prefixes may contain ':'
    secret::prefixes          every scope, only names with these prefixes
    user@domain=secret…       any of these, and the user in channels. A secret has '=' at its end only

`AccessControl` holds all of it for one server. Keys are kept as SHA-256 digests and compared in constant time with all
of them. `CorsPolicy` says which pages may read responses, `OriginPolicy` what they may do. A setting that does not
parse keeps the server from starting: a misspelt scope must never mean full access.
Everything runs on the event loop's thread, so a check and the acquisition that it allows are one step.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import Final, Protocol
from weakref import WeakSet

from tidelog.channels.rules import is_user
from tidelog.errors import BadInput
from tidelog.http.interface import Headers, Request, Response
from tidelog.server.config import ServerConfig, is_loopback
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
    """The holder of a key. Its identity is the key's digest, never the key."""

    identity: bytes
    scopes: frozenset[str] = ALL_SCOPES
    prefixes: tuple[str, ...] = ()
    user: str | None = None  # the user in channels, where the key names one

    @property
    def name(self) -> str | None:
        """The actor in the gap log: the beginning of the key's digest. None with authentication off."""
        return self.identity.hex()[:16] or None

    def has_scopes(self, scopes: frozenset[str]) -> bool:
        return scopes <= self.scopes

    def may_use_name(self, name: str) -> bool:
        """Whether the key's prefixes allow this name."""
        return not self.prefixes or name.startswith(self.prefixes)


ANONYMOUS: Final = Principal(b"")  # with authentication off


class Keyring:
    def __init__(self, keys: str = "") -> None:
        self._principals = [principal for entry in keys.split(",") if (principal := _parse_key(entry))]
        if keys.strip() and not self._principals:
            raise BadInput("TIDELOG_API_KEYS names no key; the server was not started, give one or leave it out")

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys: then every request has full access."""
        return not self._principals

    def contains(self, principal: Principal) -> bool:
        """Whether the key of a principal is one of these, with the same scopes and prefixes."""
        return self.is_empty or principal in self._principals

    def __iter__(self) -> Iterator[Principal]:
        return iter(self._principals)

    def find(self, secret: str) -> Principal | None:
        digest = sha256(secret.encode("utf-8", "surrogateescape")).digest()
        match = None
        for principal in self._principals:  # all of them, so that the time does not depend on the match
            if compare_digest(principal.identity, digest):
                match = principal
        return match


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
    for scope in scopes.split("+") if scopes.strip() else []:
        known = _SCOPE_NAMES.get(scope.strip().lower())
        if known is None:
            raise BadInput(
                f"a key in TIDELOG_API_KEYS has the scope {scope.strip()!r}; known are read, write, delete, admin and "
                "rw, joined by '+'; the server was not started"
            )
        granted |= known
    names = tuple(prefix for prefix in prefixes.split("|") if prefix) if separator else ()
    return Principal(sha256(secret.encode()).digest(), frozenset(granted) or ALL_SCOPES, names, user)


def _split_user(entry: str) -> tuple[str | None, str]:
    """Split `user@domain=rest`. A secret may end with `=`, as base64 does. A `=` elsewhere is an error: `name=key` was
    meant to name a user, and without this check all of it would be the secret."""
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
    """Return the key of an Authorization header."""
    if header is None or not header.startswith(b"Bearer "):
        return None
    return header[7:].decode("utf-8", "surrogateescape").strip() or None


class ConcurrencyLimit:
    """A limit of concurrent use, in total and by key; 0: no limit."""

    def __init__(self, resource: str, total: int, per_key: int = 0, detail_name: str = "") -> None:
        """`detail_name`: the name of the limit in the detail of its errors; empty: they have none."""
        self._resource, self._total, self._per_key, self._detail_name = resource, total, per_key, detail_name
        self.count = 0
        self._emptied: asyncio.Event | None = None
        self._by_key: Counter[bytes] = Counter()

    def check(self, principal: Principal, count: int = 1) -> None:
        """Raise ApiError where the limit is reached. Without keys only the total counts."""
        if self._total and self.count + count > self._total:
            raise self._error(self._total, self._resource, "")
        key = principal.identity
        if self._per_key and key and self._by_key[key] + count > self._per_key:
            raise self._error(self._per_key, f"{self._resource} of one key", "_per_key")

    def _error(self, limit: int, resource: str, suffix: str) -> ApiError:
        detail = {"limit": self._detail_name + suffix, "max": limit} if self._detail_name else None
        return ApiError("throttled", f"{limit} {resource} at once are the limit; nothing was done, retry", detail)

    def acquire(self, principal: Principal, count: int = 1) -> None:
        """Acquire `count` units. Raises ApiError where the limit is reached, and has acquired none then."""
        self.check(principal, count)
        self.count += count
        if principal.identity:
            self._by_key[principal.identity] += count

    async def wait_empty(self) -> None:
        """Wait until all units are released."""
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


ANY_ORIGIN: Final = "*"
_SAME_SITE_VALUES: Final = (b"same-origin", b"none")  # none: the user typed it
_SCHEMES: Final = ("http", "https")
_HOST: Final = re.compile(
    r"(?:\[(?P<address>[0-9a-f:.%a-z_-]+)\]|(?P<name>[^\s:@/?#\[\]\\,]+))(?::[0-9]{0,5})?", re.ASCII
)
_SAFE_METHODS: Final = frozenset(("GET", "HEAD"))


class OriginPolicy:
    """Hosts that the server answers for, and web pages that may use it.

    A page can make a browser send requests to any server. Two headers that no page can set name the page's site:

        Host     without keys it must be a loopback name, the address that the server listens on, or one of
                 `allowed_hosts`: a name that an attacker's DNS resolves to 127.0.0.1 is none of them
        Origin   if present, it must be the server's own (same host and port as `Host`), or one of
                 `allowed_origins`. Programs send none

    A page can make a browser send a GET without Origin, as the address of an image. Current browsers then send
    `Sec-Fetch-Site`; a request that changes something is rejected where it names another site. Probes answer under any
    host: they are public with keys, too.
    """

    def __init__(self, host: str, allowed_hosts: str, allowed_origins: str, *, keys: bool) -> None:
        """`host` is the address to listen on. `keys`: requests need one, and then any host is accepted unless some are
        named."""
        self._hosts = frozenset(split_list(allowed_hosts))
        self._origins = frozenset(split_list(allowed_origins))
        for origin in self._origins - {ANY_ORIGIN}:
            if "://" not in origin or origin.endswith("/"):
                raise BadInput(
                    f"allowed_origins or cors_origins names {origin!r}; an origin is scheme://host[:port], without a "
                    "slash at its end"
                )
        self._listen_name = _host_name(host.lower() if ":" not in host else f"[{host}]")
        self._accepts_addresses = not is_loopback(self._listen_name)
        self._checks_hosts = ANY_ORIGIN not in self._hosts and (bool(self._hosts) or not keys)
        self._is_known_host = lru_cache(1024)(self._check_host)

    def check(self, request: Request, *, changes: bool, is_public: bool) -> None:
        """Raise ApiError for a request from a page of another site, or to a host that is not the server's."""
        host = site = None
        origins: tuple[bytes, ...] = ()
        for name, value in request.headers:
            if name == b"host":
                if host is not None and value != host:  # a proxy in front may have used the other one
                    raise ApiError("invalid_request", "a request has exactly one Host header; nothing was done")
                host = value
            elif name == b"origin":
                origins += (value,)
            elif name == b"sec-fetch-site":
                site = value
        if self._checks_hosts and host is not None and not is_public and not self._is_known_host(host):
            raise ApiError(
                "forbidden",
                f"this server does not answer for the host {host[:80].decode('latin-1')!r}; nothing was done, use "
                "its address, or name the host in TIDELOG_ALLOWED_HOSTS",
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
        if not (own or text in self._origins or ANY_ORIGIN in self._origins):
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
        if text in self._hosts or name in self._hosts or name == self._listen_name or is_loopback(name):
            return True
        return self._accepts_addresses and _is_address(name)  # DNS cannot redirect an address


def split_list(text: str) -> list[str]:
    return [each.strip().lower() for each in text.split(",") if each.strip()]


def _host_name(host: str) -> str:
    """Return a host without port and brackets; empty where it is invalid: with a user name, a path or two ports."""
    match = _HOST.fullmatch(host)
    if match is None:
        return ""
    return match["address"] or (match["name"] or "").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Revocable(Protocol):
    """A stream, a socket or a waiting claim of a key."""

    principal: Principal

    def revoke(self) -> None: ...


class AccessControl:
    """Keys, origin policy and limits of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self.keys = Keyring(config.api_keys)
        self.origins = _origin_policy(config, self.keys)
        self.cors = CorsPolicy(split_list(config.cors_origins))
        self.generation = 0  # of keys and origins: a cached head that an older one admitted is checked again
        self.inflight_limit = ConcurrencyLimit("requests in flight", 0, config.max_inflight_per_key)
        self.stream_limit = ConcurrencyLimit(
            "streams and sockets", config.max_sse_connections, config.max_sse_connections_per_key
        )
        self.stream_slots: WeakSet[Revocable] = WeakSet()  # of the open streams and sockets

    def reload(self, config: ServerConfig) -> None:
        """Replace keys and origins, and revoke the streams of removed keys. Raises BadInput and changes nothing."""
        keys = Keyring(config.api_keys)
        if keys.is_empty != self.keys.is_empty:
            raise BadInput(
                "keys cannot be added to a server without any, nor all be removed, while it runs; restart it"
            )
        self.origins = _origin_policy(config, keys)  # first: it may raise
        self.cors = CorsPolicy(split_list(config.cors_origins))
        self.keys = keys
        self.generation += 1
        for slot in list(self.stream_slots):
            if not keys.contains(slot.principal):
                slot.revoke()


def _origin_policy(config: ServerConfig, keys: Keyring) -> OriginPolicy:
    if keys.is_empty and ANY_ORIGIN in split_list(config.cors_origins):
        raise BadInput(
            "cors_origins is '*' and there are no keys: every web page that a user of this machine opens could read "
            "and write all topics; the server was not started, name the origins or set keys"
        )
    origins = f"{config.allowed_origins},{config.cors_origins}"
    return OriginPolicy(config.host, config.allowed_hosts, origins, keys=not keys.is_empty)


_ANY: Final = "*"
_ALLOWED_HEADERS: Final = (
    b"authorization, content-type, idempotency-key, last-event-id, accept, range, if-range, if-none-match, x-request-id"
)
_EXPOSED_HEADERS: Final = b"x-request-id, retry-after, tidelog-warning, etag, content-range, allow"
_PREFLIGHT_MAX_AGE_S: Final = b"600"
_VARY: Final = (b"vary", b"origin")


class CorsPolicy:
    """The origins whose pages may read responses.

        OPTIONS with Origin and Access-Control-Request-Method ──► 204 with what the route takes, before keys are checked
        any other request with Origin                         ──► Access-Control-Allow-Origin, on errors too

    Origins are compared whole and answered by name. There are no cookies, so credentials are never allowed: a page
    sends its key or its read token itself.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def response_headers(self, request: Request) -> Headers:
        """Headers of a response. `Vary` is always among them: a cache must not mix responses for two origins."""
        origin = request.header(b"origin")
        if origin is None or not self._allows(origin):
            return (_VARY,)
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
            _VARY,
        )

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks, for a page that may, if it may send a request."""
        origin = request.header(b"origin")
        return (
            request.method == "OPTIONS"
            and request.header(b"access-control-request-method") is not None
            and origin is not None
            and self._allows(origin)
        )

    def preflight_response(self, request: Request, methods: Iterable[str]) -> Response:
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", _ALLOWED_HEADERS),
            (b"access-control-max-age", _PREFLIGHT_MAX_AGE_S),
        ]
        if request.header(b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return Response(204, headers=headers)

    def _allows(self, origin: bytes) -> bool:
        return _ANY in self._origins or origin.decode("latin-1").strip().lower() in self._origins
