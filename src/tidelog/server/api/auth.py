"""[policy] Who may do what: keys, scopes, and the names a key is for.

    secret                    full access
    secret:scopes             only these scopes, any name
    secret:scopes:prefixes    both; prefixes may contain ':'
    secret::prefixes          every scope, only names that begin so
    user@domain=secret…       any of these, and who it is in channels. A secret has '=' at its end alone

Keys are kept as SHA-256 and compared in constant time against all of them. Whatever does not parse is
refused at the start: a misspelt scope must never mean full access.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from tidelog.channels.names import is_user
from tidelog.errors import BadInput

READ: Final = "read"
WRITE: Final = "write"
DELETE: Final = "delete"
ADMIN: Final = "admin"
ALL: Final = frozenset((READ, WRITE, DELETE, ADMIN))
_SCOPES: Final = {
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
    scopes: frozenset[str] = ALL
    prefixes: tuple[str, ...] = ()
    user: str | None = None  # who that is in channels, where the key says so

    @property
    def name(self) -> str | None:
        """How the ledger calls whoever it was: the beginning of the key's digest. None with authentication off."""
        return self.identity.hex()[:16] or None

    def may(self, scopes: frozenset[str]) -> bool:
        return scopes <= self.scopes

    def owns(self, name: str) -> bool:
        """Whether this name is one the key is for."""
        return not self.prefixes or name.startswith(self.prefixes)


ANYBODY: Final = Principal(b"")  # with authentication off


class Keyring:
    def __init__(self, keys: str = "") -> None:
        self._held = [principal for entry in keys.split(",") if (principal := _parse(entry))]
        if keys.strip() and not self._held:
            raise BadInput("TIDELOG_API_KEYS names no key; the server was not started, give one or leave it out")

    @property
    def open(self) -> bool:
        """No keys: everybody may do everything."""
        return not self._held

    def knows(self, principal: Principal) -> bool:
        """Whether the key of a principal is one of these, and still for the same."""
        return self.open or principal in self._held

    def find(self, secret: str) -> Principal | None:
        digest = sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = None
        for principal in self._held:  # all of them, found or not: time tells nothing
            if compare_digest(principal.identity, digest):
                found = principal
        return found


def _parse(entry: str) -> Principal | None:
    entry = entry.strip()
    if not entry:
        return None
    user, entry = _named(entry)
    secret, _, rest = entry.partition(":")
    scopes, separator, prefixes = rest.partition(":")
    if not secret:
        raise BadInput("a key in TIDELOG_API_KEYS has no secret before its colon; the server was not started")
    granted: set[str] = set()
    for word in scopes.split("+") if scopes.strip() else []:
        known = _SCOPES.get(word.strip().lower())
        if known is None:
            raise BadInput(
                f"a key in TIDELOG_API_KEYS has the scope {word.strip()!r}; known are read, write, delete, admin and "
                "rw, joined by '+'; the server was not started"
            )
        granted |= known
    names = tuple(prefix for prefix in prefixes.split("|") if prefix) if separator else ()
    return Principal(sha256(secret.encode()).digest(), frozenset(granted) or ALL, names, user)


def _named(entry: str) -> tuple[str | None, str]:
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


def bearer(header: bytes | None) -> str | None:
    """The key of an Authorization header."""
    if header is None or not header.startswith(b"Bearer "):
        return None
    return header[7:].decode("utf-8", "surrogateescape").strip() or None
