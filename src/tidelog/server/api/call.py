"""[shell] One request on its way through the checks to its handler and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

from tidelog.server.api.auth import ANYBODY, Principal
from tidelog.server.api.problem import Problem
from tidelog.server.api.query import Query
from tidelog.server.http.seam import Answer, Exchange, Request, Response
from tidelog.server.service import Service
from tidelog.wire import requests
from tidelog.wire.requests import BadBody

T = TypeVar("T")
encode = msgspec.json.Encoder().encode
JSON = b"application/json"
_NO_QUERY = Query("")
_ID_BYTES_MAX: Final = 128
_PLACE: Final = re.compile(r"\{(\w+)\}")
_LOGGED: Final = frozenset(("topic", "group", "router", "channel"))  # of the names in a path; a wid opens a session

Handler = Callable[["Call"], Answer | Coroutine[Any, Any, Answer] | None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    handler: Handler
    scopes: frozenset[str] = frozenset()
    is_probe: bool = False
    is_early: bool = False  # answers before the log is recovered
    own_auth: bool = False  # the handler finds out who asks
    token_in_query: bool = False  # for clients that cannot set headers
    is_large: bool = False  # takes whole bodies up to `max_body_bytes`; the others are small
    streams: frozenset[bytes] = frozenset()  # content types whose bodies are handed over in pieces
    express: str = ""  # which shorter way its requests take when their heads are known, where there is one


class Answers(Protocol):
    """What finishes a call: the application."""

    def answer(self, call: Call, answer: Answer) -> None: ...

    def fail(self, call: Call, error: Exception) -> None: ...

    def next_id(self) -> bytes:
        """For a request that brought none."""
        ...


class Call:
    """Who asks what. Handlers read from it; the application answers through it."""

    __slots__ = (
        "_app",
        "_id",
        "began_us",
        "durability",
        "endpoint",
        "exchange",
        "generation",
        "holds",
        "names",
        "path",
        "principal",
        "query",
        "request",
        "service",
    )

    def __init__(self, app: Answers, service: Service, request: Request) -> None:
        self._app, self.service, self.request = app, service, request
        self.began_us = service.clock.monotonic_us()
        self.generation = service.generation  # of the keys that its head was checked against
        self.principal: Principal = ANYBODY
        self.query = Query(request.query) if request.query else _NO_QUERY
        self.names: tuple[str, ...] = ()
        self.path = ""  # as the route names it, for figures
        self.endpoint: Endpoint | None = None
        self.exchange: Exchange | None = None
        self.durability = ""  # of the topic that is written to, when the write was staged
        self.holds = False  # counts among the key's requests in flight
        self._id: bytes | None = None

    @property
    def topic(self) -> str:
        return self.names[0]

    @property
    def id(self) -> bytes:
        """What its answer and the log call it: what the client calls it, where that can be said again."""
        if self._id is None:
            given = self.request.header(b"x-request-id")
            fits = given and len(given) <= _ID_BYTES_MAX and given.isascii() and given.decode().isprintable()
            self._id = given if given and fits else self._app.next_id()
        return self._id

    @property
    def fields(self) -> dict[str, str]:
        """What a line of the log says of it beside its message."""
        named = zip(_PLACE.findall(self.path), self.names, strict=False)
        return {"request_id": self.id.decode(), **{place: name for place, name in named if place in _LOGGED}}

    def elapsed_ms(self) -> float:
        return (self.service.clock.monotonic_us() - self.began_us) / 1000

    def performance(self, **more: object) -> dict[str, Any]:
        return {"server_total_ms": self.elapsed_ms(), **more}

    def body(self, decoder: msgspec.json.Decoder[T], *, empty: T | None = None) -> T:
        """The body as its type. `empty`: what no body at all means, where it means something."""
        request = self.request
        if empty is not None and not request.body:
            return empty  # whatever it would have been: `curl -d ''` says it is a form
        self.check_type()
        try:
            return requests.decode(decoder, request.body)
        except BadBody as error:
            raise Problem("invalid_request", f"{error}; nothing was done") from None

    def check_type(self) -> None:
        """Refuse a body that does not say it is JSON."""
        kind = self.request.header(b"content-type")
        if kind is None or not kind.lstrip().startswith(JSON):
            raise Problem(
                "unsupported_media_type", "the body must be application/json; nothing was done, set Content-Type"
            )

    def reply(self, answer: Answer) -> None:
        """Answer now: for handlers that returned None. On the loop's thread, once."""
        self._app.answer(self, answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self._app.fail(self, error)

    def check_key(self) -> None:
        """Refuse to go on with a call whose key was removed, or is for less than before, since it began."""
        if not self.service.keys.knows(self.principal):
            raise Problem("unauthorized", "this key was removed or changed in the settings; nothing more was done")

    def own(self, name: str) -> None:
        """Refuse a name from the body that the key is not for."""
        if not self.principal.owns(name):
            raise Problem("forbidden", f"this key is not for the topic {name!r}; nothing was done", {"topic": name})


def ok(value: object, *, status: int = 200) -> Response:
    return Response(status, encode(value))
