"""Read tokens: short-lived permission to follow topics, for browsers.

    tlt_<claims>.<HMAC-SHA256 of the claims>      both in base64url

A page cannot set the headers of an EventSource, and a key in an address would end in the logs of proxies. The
application's own server, which has a key, asks for a token and gives it to its page. The claims are the end of the
token, a fingerprint of that key, and the topics and prefixes that may be followed; a token never allows more than its
key, and ends with it. The fingerprint needs the secret, so that a token does not help to guess a key.

Nothing about a token is stored. Without the setting `token_secret` the secret of the signatures is random and lives as
long as the process: a restart ends all tokens, and pages ask for new ones, as they do when a token expires.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BadBase64
from collections.abc import Callable, Iterable
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Final

import msgspec

from tidelog.server.auth import Principal

TOKEN_PREFIX: Final = "tlt_"
_SECRET_BYTES: Final = 32
_PURPOSE: Final = b"tidelog read token\0"
_FINGERPRINT_BYTES: Final = 12
_TOKEN_CHARS_MAX: Final = 32 << 10  # as the target of a request


class ReadGrant(msgspec.Struct, array_like=True, frozen=True):
    """What a token allows."""

    expires_ms: int
    key: str  # the fingerprint of the key that asked for it
    topics: tuple[str, ...]
    prefixes: tuple[str, ...]

    def allows(self, name: str) -> bool:
        return name in self.topics or (bool(self.prefixes) and name.startswith(self.prefixes))


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ReadGrant).decode


class ReadTokens:
    """Issues and verifies the read tokens of one server."""

    def __init__(self, now_ms: Callable[[], int], secret: str) -> None:
        """`secret`: that of the settings; empty: a random one."""
        self._now_ms = now_ms
        self._secret = sha256(_PURPOSE + secret.encode()).digest() if secret else secrets.token_bytes(_SECRET_BYTES)

    def issue(self, principal: Principal, topics: list[str], prefixes: list[str], ttl_ms: int) -> tuple[str, int]:
        """Return a token and the time when it ends."""
        expires_ms = self._now_ms() + ttl_ms
        claims = _encode(ReadGrant(expires_ms, self._fingerprint(principal), tuple(topics), tuple(prefixes)))
        text = f"{TOKEN_PREFIX}{_to_base64(claims)}.{_to_base64(self._sign(claims))}"
        return text, expires_ms

    def verify(self, text: str) -> ReadGrant | None:
        """Return what a token allows, also where it has expired; None where this server did not issue it."""
        if not text.startswith(TOKEN_PREFIX) or len(text) > _TOKEN_CHARS_MAX or not text.isascii():
            return None
        claims_text, _, signature_text = text.removeprefix(TOKEN_PREFIX).partition(".")
        try:
            claims, signature = _from_base64(claims_text), _from_base64(signature_text)
        except (BadBase64, ValueError):
            return None
        return _decode(claims) if compare_digest(signature, self._sign(claims)) else None

    def find_key(self, grant: ReadGrant, keys: Iterable[Principal]) -> Principal | None:
        """Return the key that asked for a token; None where it was removed since."""
        return next((each for each in keys if self._fingerprint(each) == grant.key), None)

    def has_expired(self, grant: ReadGrant) -> bool:
        return self._now_ms() >= grant.expires_ms

    def remaining_s(self, grant: ReadGrant) -> float:
        return max(grant.expires_ms - self._now_ms(), 0) / 1000

    def _fingerprint(self, principal: Principal) -> str:
        return _to_base64(hmac_digest(self._secret, b"key" + principal.identity, sha256)[:_FINGERPRINT_BYTES])

    def _sign(self, claims: bytes) -> bytes:
        return hmac_digest(self._secret, claims, sha256)


def _to_base64(content: bytes) -> str:
    return urlsafe_b64encode(content).rstrip(b"=").decode()


def _from_base64(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
