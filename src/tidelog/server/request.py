"""What a handler gets: the context of one request, its query parameters and its endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import unquote, unquote_plus

import msgspec

from tidelog import api_types
from tidelog.api_types import BadBody
from tidelog.engine import CommitFuture, Engine, Topic
from tidelog.errors import Error, TopicNotFound
from tidelog.http.interface import AnyResponse, Exchange, Request, Response
from tidelog.server.auth import ANONYMOUS, Principal
from tidelog.server.errors import ApiError
from tidelog.server.read_tokens import ReadGrant
from tidelog.server.response_types import TimedBody

if TYPE_CHECKING:
    from tidelog.server.service import Service

ARROW: Final = b"application/vnd.apache.arrow.stream"
NDJSON: Final = b"application/x-ndjson"
OCTET_STREAM: Final = b"application/octet-stream"
BULK_CONTENT_TYPES: Final = frozenset({ARROW, NDJSON})


FLAG_VALUES: Final = {"true": True, "1": True, "false": False, "0": False}


def is_number(text: str) -> bool:
    """Whether a value of a query is a number."""
    return text.isascii() and text.isdecimal() and len(text) <= 20


class QueryParams:
    """The parameters of a query string; the first one of a name counts. A value that does not parse is the default."""

    __slots__ = ("_values",)

    def __init__(self, text: str) -> None:
        self._values: dict[str, str] = {}
        for pair in text.split("&") if text else ():
            name, _, value = pair.partition("=")
            self._values.setdefault(unquote_plus(name), unquote_plus(value))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._values.items())

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str, default: bool) -> bool:
        return FLAG_VALUES.get(self._values.get(name, ""), default)

    def number(self, name: str, default: int) -> int:
        text = self._values.get(name, "")
        return int(text) if is_number(text) else default


CONTRACT_PATHS: Final = frozenset(
    (
        *("/v0/topics", "/v0/topics/{topic}", "/v0/routers", "/v0/routers/{router}"),
        *(f"/v0/topics/{{topic}}/{verb}" for verb in ("diff", "delete", "claim", "ack", "nack", "extend", "work")),
        *("/v0/watch", "/v0/watch/{wid}", "/v0/ws"),
        *("/v0/health", "/healthz", "/v0/ready", "/readyz", "/v0/metrics"),
    )
)
"""Routes of the contract, which says that a server ignores unknown fields and query values that do not parse."""

_WARNINGS_MAX: Final = 8


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like this one. Truncated: a comparison costs the product of both lengths."""
    return get_close_matches(name[:80].lower(), known, n=1, cutoff=0.0)[0]


def path_segments(path: str) -> list[str]:
    """Split a path at slashes and decode each part once. Raises ApiError for bytes that are not UTF-8."""
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
_LOGGED_PARAMETERS: Final = frozenset(("topic", "group", "router", "channel"))  # not a wid: it opens a session

Handler = Callable[["RequestContext"], AnyResponse | Coroutine[Any, Any, AnyResponse] | None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    handler: Handler
    scopes: frozenset[str] = frozenset()
    is_probe: bool = False
    before_recovery: bool = False  # available before the log is recovered
    handler_authenticates: bool = False
    token_in_query: bool = False  # a key, for clients that cannot set headers
    read_token_in_query: bool = False  # a read token, and no key
    accepts_large_body: bool = False  # up to `max_body_bytes`; other bodies are small
    streamed_types: frozenset[bytes] = frozenset()  # content types whose bodies are passed on in pieces
    streams_all: bool = False  # bodies of every content type are
    fast_kind: str = ""  # the fast handler for requests with a cached head; empty: none


class Responder(Protocol):
    """Sends the response of a request: the application."""

    def respond(self, context: RequestContext, answer: AnyResponse) -> None: ...

    def fail(self, context: RequestContext, error: Exception) -> None: ...

    def next_request_id(self) -> bytes:
        """Return an id for a request that has none."""
        ...


class RequestContext:
    """One request on its way through the checks to its handler and back."""

    __slots__ = (
        "_request_id",
        "_responder",
        "counts_as_inflight",
        "durability",
        "endpoint",
        "exchange",
        "generation",
        "grant",
        "path_names",
        "principal",
        "query",
        "request",
        "route_path",
        "service",
        "started_us",
        "warnings",
    )

    def __init__(self, responder: Responder, service: Service, request: Request) -> None:
        self._responder, self.service, self.request = responder, service, request
        self.started_us = service.clock.monotonic_us()
        self.generation = service.auth.generation  # of the keys that its head was checked with
        self.principal: Principal = ANONYMOUS
        self.grant: ReadGrant | None = None  # of the read token that it was admitted by
        self.query = QueryParams(request.query) if request.query else _EMPTY_QUERY
        self.path_names: tuple[str, ...] = ()
        self.route_path = ""  # of the route, for metrics
        self.endpoint: Endpoint | None = None
        self.exchange: Exchange | None = None
        self.warnings: list[str] | None = None  # parts of the request that have no effect
        self.durability = ""  # of the topic, when the write was submitted
        self.counts_as_inflight = False  # it holds a unit of the key's limit
        self._request_id: bytes | None = None

    @property
    def topic(self) -> str:
        return self.path_names[0]

    @property
    def request_id(self) -> bytes:
        """The id in the response and the log: the client's, where it is printable and short."""
        if self._request_id is None:
            given = self.request.header(b"x-request-id")
            fits = given and len(given) <= _REQUEST_ID_BYTES_MAX and given.isascii() and given.decode().isprintable()
            self._request_id = given if given and fits else self._responder.next_request_id()
        return self._request_id

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields of its log lines."""
        parameters = zip(_PATH_PARAMETER.findall(self.route_path), self.path_names, strict=False)
        return {
            "request_id": self.request_id.decode(),
            **{parameter: name for parameter, name in parameters if parameter in _LOGGED_PARAMETERS},
        }

    def elapsed_ms(self) -> float:
        return (self.service.clock.monotonic_us() - self.started_us) / 1000

    def performance(self, **fields: object) -> dict[str, Any]:
        return {"server_total_ms": self.elapsed_ms(), **fields}

    def json(self, body: TimedBody, *, status: int = 200, **times_ms: float) -> Response:
        """Build a response with `performance` as its last field."""
        performance = encode_json(self.performance(**times_ms))
        return Response(status, b'%b,"performance":%b}' % (encode_json(body)[:-1], performance))

    def get_topic(self) -> Topic:
        """The topic that the path names. Raises TopicNotFound."""
        return find_topic(self.service.engine, self.path_names[0])

    def warn(self, problem: str, effect: str = "it was ignored", **detail: object) -> None:
        """Report a part of the request that has no effect: in the response where the contract says to ignore it, else,
        and on a strict server, by refusing the request before anything is done."""
        if self.service.config.strict or self.route_path not in CONTRACT_PATHS:
            raise ApiError("invalid_request", f"{problem}; nothing was done", detail or None)
        self.warnings = self.warnings or []
        if len(self.warnings) < _WARNINGS_MAX:
            self.warnings.append(f"{problem}: {effect}")

    def decode_body(
        self, decoder: msgspec.json.Decoder[T] | api_types.BodyDecoder[T], *, default: T | None = None
    ) -> T:
        """Decode the body. `default`: the value of an empty body, where that is allowed."""
        request = self.request
        if default is not None and not request.body:
            return default  # whatever its content type: `curl -d ''` sends that of a form
        self.check_json_type()
        try:
            try:
                return api_types.decode_body(decoder, request.body)
            except api_types.UnknownField as unknown:
                assert isinstance(decoder, api_types.BodyDecoder), "others ignore such fields"
                near = nearest_name(unknown.name, decoder.field_names)
                self.warn(f"{unknown}, the nearest is {near}", field=unknown.name[:80], nearest=near)
                return api_types.decode_body(decoder.lenient, request.body)
        except BadBody as error:
            raise ApiError("invalid_request", f"{error}; nothing was done") from None

    def check_json_type(self) -> None:
        """Raise ApiError where the content type is not JSON."""
        content_type = self.request.header(b"content-type")
        if content_type is None or not content_type.lstrip().startswith(JSON_TYPE):
            raise ApiError(
                "unsupported_media_type", "the body must be application/json; nothing was done, set Content-Type"
            )

    def respond(self, answer: AnyResponse) -> None:
        """Send the response, for handlers that returned None. On the loop's thread, once."""
        self._responder.respond(self, answer)

    def respond_when_done(self, future: CommitFuture[T], build_response: Callable[[T], Response]) -> None:
        """Respond to a write that was submitted, once it is committed or has failed."""

        def on_done(done: CommitFuture[T]) -> None:
            try:
                result = done.wait()  # does not block: it is done
            except Error as error:
                self.fail(error)
            else:
                self.respond(build_response(result))

        self.service.writes.add_done_callback(future, on_done)

    def fail(self, error: Exception) -> None:
        """Respond with an error."""
        self._responder.fail(self, error)

    def check_key(self) -> None:
        """Raise ApiError where the key was removed or lost scopes since the request began."""
        if not self.service.auth.keys.contains(self.principal):
            raise ApiError("unauthorized", "this key was removed or changed in the settings; nothing more was done")

    def check_all_names_allowed(self) -> None:
        """Refuse a key with prefixes: the endpoint is about the whole server."""
        if self.principal.prefixes:
            raise ApiError(
                "forbidden",
                "this is about the whole server, and this key is for some names only; nothing was done, use a key "
                "without prefixes",
            )

    def check_name_allowed(self, name: str) -> None:
        """Raise ApiError for a name from the body that the key's prefixes do not allow."""
        if not self.principal.may_use_name(name):
            raise ApiError("forbidden", f"this key is not for the topic {name!r}; nothing was done", {"topic": name})


def find_topic(engine: Engine, name: str) -> Topic:
    topic = engine.find(name)
    if topic is None:
        raise TopicNotFound(name)
    return topic


def json_response(value: object) -> Response:
    return Response(200, encode_json(value))
