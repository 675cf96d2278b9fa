"""CORS: which web pages of other origins may read responses.

    OPTIONS with Origin and Access-Control-Request-Method ──► 204 with what the route takes, before any key is checked
    any other request with Origin                         ──► Access-Control-Allow-Origin on its response, errors too

Origins are compared whole and answered by name. There are no cookies, so credentials are never allowed: a page sends
its key or its read token itself. The origins are also allowed by the `OriginPolicy`, which decides what a page may do;
this module only lets it read the response.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidelog.http.interface import Headers, Request, Response

_ANY: Final = "*"
_ALLOWED_HEADERS: Final = (
    b"authorization, content-type, idempotency-key, last-event-id, accept, range, if-range, if-none-match, x-request-id"
)
_EXPOSED_HEADERS: Final = b"x-request-id, retry-after, tidelog-warning, etag, content-range, allow"
_PREFLIGHT_MAX_AGE_S: Final = b"600"
_VARY: Final = (b"vary", b"origin")


class CorsPolicy:
    """The origins whose pages may read responses."""

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
