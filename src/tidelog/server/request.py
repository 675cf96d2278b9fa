"""Query strings and paths, read as the contract says: what does not parse is the default, except a cursor.

[shell] One request on its way through the checks to its handler and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote, unquote_plus

import msgspec

from tidelog import api_types
from tidelog.api_types import BadBody
from tidelog.http.interface import AnyResponse, Exchange, Request, Response
from tidelog.server.auth import ANONYMOUS, Principal
from tidelog.server.errors import ApiError
from tidelog.server.service import Service

ARROW: Final = b"application/vnd.apache.arrow.stream"
NDJSON: Final = b"application/x-ndjson"
BULK_CONTENT_TYPES: Final = frozenset({ARROW, NDJSON})


class QueryParams:
    """The parameters of a query string; of several with one name the first counts."""

    __slots__ = ("_values",)

    def __init__(self, text: str) -> None:
        self._values: dict[str, str] = {}
        for pair in text.split("&") if text else ():
            name, _, value = pair.partition("=")
            self._values.setdefault(unquote_plus(name), unquote_plus(value))

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str, default: bool) -> bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(self._values.get(name, ""), default)

    def number(self, name: str, default: int) -> int:
        text = self._values.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else default


def path_segments(path: str) -> list[str]:
    """The parts of a path between slashes, each decoded once. Half a percent sign or bytes that are no text are bad."""
    parts = path.split("/")[1:]
    if "%" not in path and path.isascii():
        return parts
    try:
        return [unquote(part.encode("latin-1").decode("utf-8"), errors="strict") for part in parts]
    except ValueError:
        raise ApiError("invalid_request", "the path is not UTF-8; nothing was done, encode it again") from None


T = TypeVar("T")
encode_json = msgspec.json.Encoder().encode
JSON_TYPE = b"application/json"
_EMPTY_QUERY = QueryParams("")
_REQUEST_ID_BYTES_MAX: Final = 128
_PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_LOGGED_PARAMETERS: Final = frozenset(
    ("topic", "group", "router", "channel")
)  # of the names in a path; a wid opens a session

Handler = Callable[["RequestContext"], AnyResponse | Coroutine[Any, Any, AnyResponse] | None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    handler: Handler
    scopes: frozenset[str] = frozenset()
    is_probe: bool = False
    before_recovery: bool = False  # answers before the log is recovered
    handler_authenticates: bool = False  # the handler finds out who asks
    token_in_query: bool = False  # for clients that cannot set headers
    accepts_large_body: bool = False  # takes whole bodies up to `max_body_bytes`; the others are small
    streamed_types: frozenset[bytes] = frozenset()  # content types whose bodies are handed over in pieces
    fast_kind: str = ""  # which shorter way its requests take when their heads are known, where there is one


class Responder(Protocol):
    """What finishes a call: the application."""

    def respond(self, context: RequestContext, answer: AnyResponse) -> None: ...

    def fail(self, context: RequestContext, error: Exception) -> None: ...

    def next_request_id(self) -> bytes:
        """For a request that brought none."""
        ...


class RequestContext:
    """Who asks what. Handlers read from it; the application answers through it."""

    __slots__ = (
        "_request_id",
        "_responder",
        "counts_as_inflight",
        "durability",
        "endpoint",
        "exchange",
        "generation",
        "path_names",
        "principal",
        "query",
        "request",
        "route_path",
        "service",
        "started_us",
    )

    def __init__(self, responder: Responder, service: Service, request: Request) -> None:
        self._responder, self.service, self.request = responder, service, request
        self.started_us = service.clock.monotonic_us()
        self.generation = service.auth.generation  # of the keys that its head was checked against
        self.principal: Principal = ANONYMOUS
        self.query = QueryParams(request.query) if request.query else _EMPTY_QUERY
        self.path_names: tuple[str, ...] = ()
        self.route_path = ""  # as the route names it, for figures
        self.endpoint: Endpoint | None = None
        self.exchange: Exchange | None = None
        self.durability = ""  # of the topic that is written to, when the write was staged
        self.counts_as_inflight = False  # counts among the key's requests in flight
        self._request_id: bytes | None = None

    @property
    def topic(self) -> str:
        return self.path_names[0]

    @property
    def request_id(self) -> bytes:
        """What its answer and the log call it: what the client calls it, where that can be said again."""
        if self._request_id is None:
            given = self.request.header(b"x-request-id")
            fits = given and len(given) <= _REQUEST_ID_BYTES_MAX and given.isascii() and given.decode().isprintable()
            self._request_id = given if given and fits else self._responder.next_request_id()
        return self._request_id

    @property
    def log_fields(self) -> dict[str, str]:
        """What a line of the log says of it beside its message."""
        named = zip(_PATH_PARAMETER.findall(self.route_path), self.path_names, strict=False)
        return {
            "request_id": self.request_id.decode(),
            **{place: name for place, name in named if place in _LOGGED_PARAMETERS},
        }

    def elapsed_ms(self) -> float:
        return (self.service.clock.monotonic_us() - self.started_us) / 1000

    def performance(self, **more: object) -> dict[str, Any]:
        return {"server_total_ms": self.elapsed_ms(), **more}

    def decode_body(self, decoder: msgspec.json.Decoder[T], *, default: T | None = None) -> T:
        """The body as its type. `empty`: what no body at all means, where it means something."""
        request = self.request
        if default is not None and not request.body:
            return default  # whatever it would have been: `curl -d ''` says it is a form
        self.check_json_type()
        try:
            return api_types.decode_body(decoder, request.body)
        except BadBody as error:
            raise ApiError("invalid_request", f"{error}; nothing was done") from None

    def check_json_type(self) -> None:
        """Refuse a body that does not say it is JSON."""
        kind = self.request.header(b"content-type")
        if kind is None or not kind.lstrip().startswith(JSON_TYPE):
            raise ApiError(
                "unsupported_media_type", "the body must be application/json; nothing was done, set Content-Type"
            )

    def respond(self, answer: AnyResponse) -> None:
        """Answer now: for handlers that returned None. On the loop's thread, once."""
        self._responder.respond(self, answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self._responder.fail(self, error)

    def check_key(self) -> None:
        """Refuse to go on with a call whose key was removed, or is for less than before, since it began."""
        if not self.service.auth.keys.contains(self.principal):
            raise ApiError("unauthorized", "this key was removed or changed in the settings; nothing more was done")

    def check_name_allowed(self, name: str) -> None:
        """Refuse a name from the body that the key is not for."""
        if not self.principal.may_use_name(name):
            raise ApiError("forbidden", f"this key is not for the topic {name!r}; nothing was done", {"topic": name})


def json_response(value: object, *, status: int = 200) -> Response:
    return Response(status, encode_json(value))
