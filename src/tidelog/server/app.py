"""The application: finds the handler of a request, checks access, and sends exactly one response.

`ROUTES` has every path with its methods, handlers and scopes; `{…}` stands for one decoded part of a path. The OpenAPI
document lists the routes in this order; what it says about a handler is in the handler's `@operation` and docstring.

Checks come in the contract's order: key → requests in flight → scope → name → body → media type → JSON → the checks of
the endpoint itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from tidelog import api_types
from tidelog.engine.config import OWN, check_topic_name
from tidelog.errors import BadInput, Error
from tidelog.http.interface import (
    FAST_REQUEST_BYTES_MAX,
    AnyResponse,
    BodyPolicy,
    Exchange,
    FastHandler,
    Headers,
    Request,
    RequestIds,
    Response,
    Stream,
    Upgrade,
)
from tidelog.server import metrics
from tidelog.server.auth import ADMIN, ANONYMOUS, DELETE, READ, WRITE, Principal, bearer_token
from tidelog.server.errors import ApiError, api_error_for_status, api_error_from
from tidelog.server.handlers import (
    admin,
    backups,
    bulk_write,
    channels,
    events,
    group_leases,
    large_records,
    queues,
    records,
    retention,
    spark,
    sse,
    tiers,
    topics,
    websocket,
)
from tidelog.server.handlers.fast_handlers import FastRequests, FastWrites
from tidelog.server.openapi import build_document, operation, query_schemas
from tidelog.server.request import (
    BULK_CONTENT_TYPES,
    FLAG_VALUES,
    JSON_TYPE,
    Endpoint,
    Handler,
    RequestContext,
    encode_json,
    is_number,
    nearest_name,
    path_segments,
)
from tidelog.server.service import Service


class Route(NamedTuple):
    path: str
    family: str  # the kind of name that the first `{…}` is: "topics", "routers", "channels"; "": none
    methods: Mapping[str, Endpoint]

    @property
    def is_probe(self) -> bool:
        return any(endpoint.is_probe for endpoint in self.methods.values())


class RouteMatch(NamedTuple):
    route: Route
    path_names: tuple[str, ...]


@operation("openapi", response=dict)
def get_openapi(_: RequestContext) -> Response:
    """Read this document."""
    return Response(200, document_bytes())


@cache
def document_bytes() -> bytes:
    """The OpenAPI document."""
    return msgspec.json.encode(build_document(ROUTES))


_READ, _WRITE, _DELETE, _ADMIN = (frozenset((scope,)) for scope in (READ, WRITE, DELETE, ADMIN))
_READ_WRITE = _READ | _WRITE


def _channel_route(path: str, method: str, handler: Handler, scopes: frozenset[str]) -> Route:
    return Route(f"/v0/channels/{{channel}}/{path}", "channels", {method: Endpoint(handler, scopes)})


ROUTES: Final[tuple[Route, ...]] = (
    Route("/v0/topics", "", {"GET": Endpoint(topics.list_topics, _READ)}),
    Route(
        "/v0/topics/{topic}",
        "topics",
        {
            "PUT": Endpoint(topics.configure_topic, _ADMIN),
            "GET": Endpoint(topics.describe_topic, _READ),
            "DELETE": Endpoint(topics.delete_topic, _DELETE),
            "POST": Endpoint(
                bulk_write.append_records,
                _WRITE,
                accepts_large_body=True,
                streamed_types=BULK_CONTENT_TYPES,
                fast_kind="write",
            ),
        },
    ),
    Route("/v0/topics/{topic}/diff", "topics", {"POST": Endpoint(records.diff, _READ, fast_kind="diff")}),
    Route("/v0/topics/{topic}/delete", "topics", {"POST": Endpoint(records.delete_records, _DELETE)}),
    Route("/v0/topics/{topic}/latest", "topics", {"GET": Endpoint(retention.read_latest, _READ)}),
    Route("/v0/topics/{topic}/compact", "topics", {"POST": Endpoint(retention.compact_topic, _ADMIN)}),
    Route("/v0/topics/{topic}/compact/search", "topics", {"POST": Endpoint(retention.search_replaced, _ADMIN)}),
    Route("/v0/topics/{topic}/compact/found", "topics", {"POST": Endpoint(retention.remove_replaced, _ADMIN)}),
    Route("/v0/topics/{topic}/retention/simulate", "topics", {"POST": Endpoint(retention.simulate_retention, _READ)}),
    Route("/v0/topics/{topic}/seal", "topics", {"POST": Endpoint(records.seal_topic, _ADMIN)}),
    Route("/v0/topics/{topic}/rewrite", "topics", {"POST": Endpoint(records.rewrite_topic, _ADMIN)}),
    Route("/v0/topics/{topic}/erase", "topics", {"POST": Endpoint(records.erase_records, _ADMIN | _DELETE)}),
    Route("/v0/topics/{topic}/records", "topics", {"GET": Endpoint(records.read_records, _READ)}),
    Route("/v0/topics/{topic}/records/{seq}/data", "topics", {"GET": Endpoint(large_records.read_data, _READ)}),
    Route(
        "/v0/topics/{topic}/stream",
        "topics",
        {"POST": Endpoint(large_records.append_stream, _WRITE, accepts_large_body=True, streams_all=True)},
    ),
    Route(
        "/v0/topics/{topic}/events", "topics", {"GET": Endpoint(events.follow_topic, _READ, read_token_in_query=True)}
    ),
    Route("/v0/topics/{topic}/seek", "topics", {"POST": Endpoint(records.seek_by_time, _READ)}),
    Route("/v0/topics/{topic}/claim", "topics", {"POST": Endpoint(queues.claim_jobs, _READ_WRITE, fast_kind="claim")}),
    Route("/v0/topics/{topic}/ack", "topics", {"POST": Endpoint(queues.ack_jobs, _WRITE, fast_kind="ack")}),
    Route("/v0/topics/{topic}/reject", "topics", {"POST": Endpoint(queues.reject_jobs, _WRITE)}),
    Route("/v0/topics/{topic}/nack", "topics", {"POST": Endpoint(queues.nack_jobs, _WRITE)}),
    Route("/v0/topics/{topic}/extend", "topics", {"POST": Endpoint(queues.extend_leases, _WRITE)}),
    Route("/v0/topics/{topic}/work", "topics", {"GET": Endpoint(sse.stream_jobs, _READ_WRITE, token_in_query=True)}),
    Route("/v0/topics/{topic}/history", "topics", {"GET": Endpoint(queues.queue_history, _READ)}),
    Route("/v0/topics/{topic}/redrive", "topics", {"POST": Endpoint(queues.redrive_records, _WRITE)}),
    Route("/v0/topics/{topic}/segments", "topics", {"GET": Endpoint(spark.list_segments, _READ)}),
    Route("/v0/topics/{topic}/segments/{base}/{file}", "topics", {"GET": Endpoint(spark.read_segment_file, _READ)}),
    Route("/v0/topics/{topic}/relocate", "topics", {"POST": Endpoint(tiers.relocate_segments, _ADMIN)}),
    Route("/v0/topics/{topic}/recall", "topics", {"POST": Endpoint(tiers.recall_segments, _ADMIN)}),
    Route("/v0/topics/{topic}/groups", "topics", {"GET": Endpoint(topics.list_groups, _READ)}),
    Route(
        "/v0/topics/{topic}/groups/{group}",
        "topics",
        {
            "GET": Endpoint(topics.get_group, _READ),
            "PUT": Endpoint(topics.put_group, _WRITE),
            "DELETE": Endpoint(topics.delete_group, _DELETE),
        },
    ),
    Route("/v0/topics/{topic}/groups/{group}/commit", "topics", {"POST": Endpoint(topics.commit_group, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/fetch", "topics", {"POST": Endpoint(topics.fetch_group, _READ)}),
    Route("/v0/topics/{topic}/groups/{group}/reset", "topics", {"POST": Endpoint(topics.reset_group, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/claim", "topics", {"POST": Endpoint(group_leases.claim, _READ_WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/ack", "topics", {"POST": Endpoint(group_leases.ack, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/release", "topics", {"POST": Endpoint(group_leases.release, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/extend", "topics", {"POST": Endpoint(group_leases.extend, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/leave", "topics", {"POST": Endpoint(group_leases.leave, _WRITE)}),
    Route(
        "/v0/topics/{topic}/groups/{group}/consumers", "topics", {"GET": Endpoint(group_leases.list_consumers, _READ)}
    ),
    Route(
        "/v0/topics/{topic}/batches",
        "topics",
        {
            "GET": Endpoint(spark.list_batches, _READ),
            "POST": Endpoint(spark.publish_batch, _WRITE, accepts_large_body=True),
        },
    ),
    Route(
        "/v0/topics/{topic}/staging/{chunk}",
        "topics",
        {
            "PUT": Endpoint(
                spark.stage_chunk, _WRITE, accepts_large_body=True, streamed_types=spark.STAGING_CONTENT_TYPES
            ),
            "DELETE": Endpoint(spark.clear_staging, _WRITE),
        },
    ),
    Route("/v0/topics/{topic}/gaps", "topics", {"GET": Endpoint(topics.list_topic_gaps, _READ)}),
    Route("/v0/gaps", "", {"GET": Endpoint(topics.list_gaps, _READ)}),
    Route(
        "/v0/backups",
        "",
        {"GET": Endpoint(backups.list_target, _ADMIN), "POST": Endpoint(backups.create_backup, _ADMIN)},
    ),
    Route("/v0/version", "", {"GET": Endpoint(admin.get_version, before_recovery=True)}),
    Route("/v0/settings", "", {"GET": Endpoint(admin.get_settings, _ADMIN, before_recovery=True)}),
    Route("/v0/tiers", "", {"GET": Endpoint(tiers.get_tiers, _ADMIN)}),
    Route("/v0/tiers/segments", "", {"GET": Endpoint(tiers.list_places, _ADMIN)}),
    Route("/v0/tiers/relocate", "", {"POST": Endpoint(tiers.relocate_all, _ADMIN)}),
    Route("/v0/tiers/recall", "", {"POST": Endpoint(tiers.recall_all, _ADMIN)}),
    Route("/v0/tiers/claim", "", {"POST": Endpoint(tiers.claim_store, _ADMIN)}),
    Route("/v0/checkpoint", "", {"POST": Endpoint(admin.checkpoint, _ADMIN)}),
    Route("/v0/health/details", "", {"GET": Endpoint(admin.get_health_details, _ADMIN)}),
    Route("/v0/erasures", "", {"GET": Endpoint(admin.list_erasures, _ADMIN)}),
    Route("/v0/erasures/verify", "", {"POST": Endpoint(admin.verify_erasures, _ADMIN)}),
    Route("/v0/routers", "", {"GET": Endpoint(topics.list_routers, _READ)}),
    Route(
        "/v0/routers/{router}",
        "routers",
        {
            "PUT": Endpoint(topics.put_router, _ADMIN),
            "GET": Endpoint(topics.get_router, _READ),
            "DELETE": Endpoint(topics.delete_router, _DELETE),
        },
    ),
    Route("/v0/channels", "", {"GET": Endpoint(channels.list_channels, _READ)}),
    Route(
        "/v0/channels/{channel}",
        "channels",
        {
            "PUT": Endpoint(channels.put_channel, channels.CONFIGURE_SCOPES),
            "GET": Endpoint(channels.get_channel, _READ),
            "DELETE": Endpoint(channels.delete_channel, channels.DELETE_CHANNEL.scopes),
        },
    ),
    _channel_route("join", "POST", channels.join_channel, channels.JOIN.scopes),
    _channel_route("leave", "POST", channels.leave_channel, channels.LEAVE.scopes),
    _channel_route("members", "GET", channels.list_members, channels.MEMBERS.scopes),
    Route(
        "/v0/channels/{channel}/acl",
        "channels",
        {
            "GET": Endpoint(channels.get_channel_acl, _READ),
            "POST": Endpoint(channels.set_channel_acl, channels.SET_ACL.scopes),
        },
    ),
    _channel_route("publish", "POST", channels.publish_to_channel, channels.PUBLISH_SCOPES),
    _channel_route("history", "GET", channels.channel_history, channels.HISTORY.scopes),
    Route(
        "/v0/channels/{channel}/events",
        "channels",
        {"GET": Endpoint(channels.follow_channel, channels.SUBSCRIBE_SCOPES, token_in_query=True)},
    ),
    _channel_route("push", "POST", channels.push_to_channel, channels.PUSH.scopes),
    _channel_route("pop", "POST", channels.pop_from_channel, channels.POP.scopes),
    _channel_route("clear", "POST", channels.clear_channel, channels.CLEAR.scopes),
    Route("/v0/tokens", "", {"POST": Endpoint(events.create_token, _READ)}),
    Route("/v0/watch", "", {"POST": Endpoint(sse.create_watch, _READ)}),
    Route("/v0/watch/{wid}", "", {"GET": Endpoint(sse.stream_watch, handler_authenticates=True)}),
    Route("/v0/ws", "", {"GET": Endpoint(websocket.open_websocket)}),
    Route("/v0/metrics", "", {"GET": Endpoint(metrics.get_metrics, _READ, before_recovery=True)}),
    Route("/metrics", "", {"GET": Endpoint(metrics.get_metrics_alias, _READ, before_recovery=True)}),
    Route("/v0/openapi.json", "", {"GET": Endpoint(get_openapi, before_recovery=True)}),
    Route("/v0/health", "", {"GET": Endpoint(metrics.get_health, is_probe=True, before_recovery=True)}),
    Route("/healthz", "", {"GET": Endpoint(metrics.get_healthz, is_probe=True, before_recovery=True)}),
    Route("/v0/ready", "", {"GET": Endpoint(metrics.get_ready, is_probe=True, before_recovery=True)}),
    Route("/readyz", "", {"GET": Endpoint(metrics.get_readyz, is_probe=True, before_recovery=True)}),
)

_ROUTES_BY_LENGTH: Final[dict[int, list[tuple[list[str], Route]]]] = {}
for _route in ROUTES:
    _pattern = _route.path.split("/")[1:]
    _ROUTES_BY_LENGTH.setdefault(len(_pattern), []).append((_pattern, _route))


def find_route(path: str) -> RouteMatch | None:
    """Return the route of a path and the names in it, or None."""
    parts = path_segments(path)
    for pattern, route in _ROUTES_BY_LENGTH.get(len(parts), ()):
        if all(
            (expected[0] == "{" and part) or expected == part for expected, part in zip(pattern, parts, strict=True)
        ):
            return RouteMatch(
                route, tuple(part for expected, part in zip(pattern, parts, strict=True) if expected[0] == "{")
            )
    return None


_log = logging.getLogger("tidelog.server")
_NO_BODY_LIMIT: Final = 1 << 62
_SMALL_BODY_BYTES_MAX: Final = 1 << 20  # of a body that is not a write: it is decoded on the loop
_AUTHENTICATION_PARAMETERS: Final = frozenset(("token", "user", "user_token", "operator"))  # of any route
_CACHED_PATH_CHARS_MAX: Final = 1_024  # longer paths are not cached
_RECOVERY_WAIT_S: Final = 2.0  # a request waits so long for the end of recovery
_UNCACHEABLE_HEADERS: Final = frozenset((b"idempotency-key", b"x-request-id"))  # they differ from write to write
_ResponseT = TypeVar("_ResponseT", bound=AnyResponse)


class App:
    """The `Application` that the HTTP layer calls, over a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        limit = service.config.max_body_bytes or _NO_BODY_LIMIT
        self._large_body = BodyPolicy(limit)
        self._small_body = BodyPolicy(min(limit, _SMALL_BODY_BYTES_MAX))
        self._streamed_body = BodyPolicy(_NO_BODY_LIMIT, is_streamed=True, allowance=service.config.decoding_allowance)
        self._cached_route = lru_cache(4096)(find_route)
        self._request_count, self._request_id_prefix = 0, b"%x-" % service.started_ms
        writes = FastWrites(service, self._allocate_ids)
        requests = FastRequests(service, self.next_request_id, error_response)
        self._fast_handlers = {
            "write": writes.handler_for,
            "claim": requests.claim_handler,
            "ack": requests.ack_handler,
            "diff": requests.diff_handler,
        }

    # ── called by the HTTP layer ─────────────────────────────────────────────────────────────────

    def begin(self, request: Request) -> Response | BodyPolicy:
        call = RequestContext(self, self.service, request)
        request.context = call
        try:
            if request.method == "OPTIONS" and self.service.auth.cors.is_preflight(request):
                return self._finish(call, self._preflight(call))
            self._admit(call)
        except ApiError as problem:
            return self._finish(call, problem.response())
        except BadInput as error:
            return self._finish(call, api_error_from(error).response())
        endpoint = call.endpoint
        assert endpoint is not None, "an admitted call has one"
        if endpoint.streams_all or (
            endpoint.streamed_types
            and (request.header(b"content-type") or b"").partition(b";")[0].strip() in endpoint.streamed_types
        ):
            return self._streamed_body
        return self._large_body if endpoint.accepts_large_body else self._small_body

    def handle(self, request: Request, exchange: Exchange) -> None:
        call = request.context
        assert isinstance(call, RequestContext), "set by `begin`"
        assert call.endpoint is not None, "an admitted call has one"
        call.exchange = exchange
        try:
            if call.counts_as_inflight and call.generation != self.service.auth.generation:
                call.check_key()  # keys were reloaded while its body arrived
            answer = call.endpoint.handler(call) if self._is_available(call.endpoint) else self._handle_when_ready(call)
        except Exception as error:
            answer = self._error_response(call, error)
        if answer is None:
            return  # the handler calls `respond` later
        if isinstance(answer, Response | Stream | Upgrade):
            self.respond(call, answer)
        else:
            handling = answer
            task = self.service.spawn(self._handle_async(call, handling))
            task.add_done_callback(lambda _: self._on_handler_done(call, handling))
            exchange.add_disconnect_callback(lambda: _cancel(task))

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """Return the fast handler for requests with this head; None where the normal path has to serve them."""
        call = RequestContext(self, self.service, request)
        is_special = request.query or any(name in _UNCACHEABLE_HEADERS for name, _ in request.headers)
        content_type = request.header(b"content-type") or b""
        if self.service.access_log is not None:
            return None  # every request is logged
        if self.service.auth.cors and request.header(b"origin") is not None:
            return None  # its responses have headers of CORS
        if is_special or not content_type.startswith(JSON_TYPE) or self._large_body.bytes_max < FAST_REQUEST_BYTES_MAX:
            return None
        try:
            self._admit(call)
        except (ApiError, Error):
            return None
        finally:
            self._release(call)
        handler_for = None if call.endpoint is None else self._fast_handlers.get(call.endpoint.fast_kind)
        return None if handler_for is None else handler_for(call.topic, call.principal, answer_bytes_max)

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        call = request.context
        if not isinstance(call, RequestContext):  # `begin` was not called
            call = RequestContext(self, self.service, request)
            call.route_path = _route_path(request.path)
        advice = ", send it in parts" if status == 413 else ""
        return self._finish(call, api_error_for_status(status, f"{reason}; nothing was done{advice}").response())

    def on_abandoned(self, request: Request) -> None:
        if isinstance(request.context, RequestContext):
            self._release(request.context)

    # ── responses ─────────────────────────────────────────────────────────────────────────────

    def respond(self, context: RequestContext, answer: AnyResponse) -> None:
        assert context.exchange is not None, "a call that reached its handler has one"
        context.exchange.respond(self._finish(context, answer))

    def fail(self, context: RequestContext, error: Exception) -> None:
        self.respond(context, self._error_response(context, error))

    def _is_available(self, endpoint: Endpoint) -> bool:
        return self.service.is_ready or endpoint.before_recovery

    async def _handle_when_ready(self, context: RequestContext) -> AnyResponse | None:
        """Wait a while for recovery, so that a request right after the start succeeds. After that the handler responds
        with `not_ready`."""
        await self.service.wait_recovered(_RECOVERY_WAIT_S)
        assert context.endpoint is not None, "an admitted call has one"
        answer = context.endpoint.handler(context)
        return answer if answer is None or isinstance(answer, Response | Stream | Upgrade) else await answer

    async def _handle_async(self, context: RequestContext, handling: Coroutine[Any, Any, AnyResponse | None]) -> None:
        try:
            answer = await handling
        except Exception as error:
            answer = self._error_response(context, error)
        if answer is not None:
            self.respond(context, answer)

    def _on_handler_done(self, context: RequestContext, handling: Coroutine[Any, Any, AnyResponse | None]) -> None:
        """Called when the handler has ended or was cancelled, perhaps before its first step."""
        handling.close()
        self._release(context)

    def _error_response(self, context: RequestContext, error: Exception) -> Response:
        return error_response(context.request.method, context.route_path, error, context.log_fields)

    def _finish(self, context: RequestContext, response: _ResponseT) -> _ResponseT:
        """Count a response and name its request. A stream is no request in flight: it has a limit of its own."""
        self._release(context)
        status = 101 if isinstance(response, Upgrade) else response.status
        self.service.metrics.count_responses(
            context.route_path, context.request.method, status, context.elapsed_ms() / 1000
        )
        if self.service.access_log is not None:
            size = len(response.body) if isinstance(response, Response) else None
            self.service.access_log.add(context, status, size)
        if context.warnings is not None and not isinstance(response, Upgrade):
            response.headers = (*response.headers, *_warning_headers(context.warnings))
            if isinstance(response, Response) and response.content_type == JSON_TYPE and response.status < 300:
                response.body = _with_warnings(response.body, context.warnings)
        if not isinstance(response, Upgrade):
            response.headers = (*response.headers, (b"x-request-id", context.request_id))
            if self.service.auth.cors:
                response.headers = (*response.headers, *self.service.auth.cors.response_headers(context.request))
        return response

    def _release(self, context: RequestContext) -> None:
        if context.counts_as_inflight:
            context.counts_as_inflight = False
            self.service.auth.inflight_limit.release(context.principal)

    def next_request_id(self) -> bytes:
        ids = self._allocate_ids(1)
        return b"%b%x" % ids

    def _allocate_ids(self, count: int) -> RequestIds:
        first, self._request_count = self._request_count + 1, self._request_count + count
        return RequestIds(self._request_id_prefix, first)

    # ── checks ────────────────────────────────────────────────────────────────────────────────

    def _find_route(self, path: str) -> RouteMatch | None:
        return self._cached_route(path) if len(path) <= _CACHED_PATH_CHARS_MAX else find_route(path)

    def _admit(self, context: RequestContext) -> None:
        request, service = context.request, self.service
        try:
            match = self._find_route(request.path)
        except ApiError:  # the path is not UTF-8: as with an unknown path, the key is checked first
            if not service.auth.keys.is_empty:
                self._authorize(context, None, None)
            service.auth.origins.check(request, changes=True, is_public=False)
            raise
        method = "GET" if request.method == "HEAD" else request.method
        endpoint = None if match is None else match.route.methods.get(method)
        context.route_path = "" if match is None else match.route.path
        context.endpoint = endpoint
        if match is not None:
            context.path_names = match.path_names
        if service.auth.keys.is_empty or (match is not None and match.route.is_probe and not service.config.probe_auth):
            context.principal = ANONYMOUS
        elif endpoint is not None and endpoint.handler_authenticates:
            pass
        else:
            self._authorize(context, endpoint, match)
        is_public = match is not None and match.route.is_probe
        changes = request.upgrade or (endpoint is not None and bool(endpoint.scopes - {READ}))
        service.auth.origins.check(request, changes=changes, is_public=is_public)
        if match is None:
            raise ApiError("not_found", f"{api_types.NO_ROUTE}{request.path[:200]}; nothing was done")
        if endpoint is None:
            allowed = ", ".join(sorted({*match.route.methods, *(["HEAD"] if "GET" in match.route.methods else [])}))
            message = f"{match.route.path} takes {allowed}; nothing was done"
            raise ApiError("method_not_allowed", message, headers=((b"allow", allowed.encode()),))
        if context.path_names and context.path_names[0].startswith(OWN) and endpoint.scopes - {READ}:
            check_topic_name(context.path_names[0])  # raises: the engine's own topics are read-only
        if request.query:
            _check_query(context, endpoint)

    def _preflight(self, context: RequestContext) -> Response:
        """Answer a browser that asks, before it sends a request of a page, what the page may send. No key comes with
        the question, and nothing is done."""
        request, auth = context.request, self.service.auth
        auth.origins.check(request, changes=False, is_public=False)
        match = self._find_route(request.path)
        if match is None:
            raise ApiError("not_found", f"there is nothing at {request.path[:200]}; nothing was done")
        context.route_path = match.route.path
        return auth.cors.preflight_response(request, sorted(match.route.methods))

    def _authorize(self, context: RequestContext, endpoint: Endpoint | None, match: RouteMatch | None) -> None:
        secret = bearer_token(context.request.header(b"authorization"))
        if secret is None and endpoint is not None and endpoint.token_in_query:
            secret = context.query.text("token")
        principal = None if secret is None else self.service.auth.keys.find(secret)
        if secret is None and endpoint is not None and endpoint.read_token_in_query:
            principal = self._verify_read_token(context, context.query.text("token"), match)
        if principal is None:
            raise ApiError("unauthorized", "a valid key is needed: Authorization: Bearer <key>; nothing was done")
        context.principal = principal
        self.service.auth.inflight_limit.acquire(principal)
        context.counts_as_inflight = True
        scopes: frozenset[str] = frozenset()
        if endpoint is not None:
            scopes = endpoint.scopes
        elif match is not None:
            scopes = _SCOPES_OF_UNKNOWN_METHOD.get(match.route.family, scopes)
        if not principal.has_scopes(scopes):
            raise ApiError("forbidden", f"this key lacks a scope of {', '.join(sorted(scopes))}; nothing was done")
        if (
            match is not None
            and match.route.family
            and match.path_names
            and not principal.may_use_name(match.path_names[0])
        ):
            raise ApiError("forbidden", "this key is not for that name; nothing was done")

    def _verify_read_token(
        self, context: RequestContext, token: str | None, match: RouteMatch | None
    ) -> Principal | None:
        """Return the key that a read token stands for; None without a valid token. Raises ApiError for a token that has
        expired or is for other topics."""
        tokens = self.service.read_tokens
        grant = None if token is None else tokens.verify(token)
        if grant is None:
            return None
        if tokens.has_expired(grant):
            raise ApiError(
                "unauthorized",
                "this token has expired; nothing was done, have the application give the page a new one",
                {"reason": "token_expired"},
            )
        if match is None or not grant.allows(match.path_names[0]):
            raise ApiError("forbidden", "this token is not for that topic; nothing was done")
        context.grant = grant
        return tokens.find_key(grant, self.service.auth.keys)


def _check_query(context: RequestContext, endpoint: Endpoint) -> None:
    """Report parameters that the endpoint does not have, and values that do not parse, before it does anything."""
    schemas = query_schemas(endpoint.handler)
    for name, value in context.query:
        schema = schemas.get(name)
        if name in _AUTHENTICATION_PARAMETERS or not (name or value):
            continue
        if schema is None:
            advice = ""
            if schemas:
                advice = f", the nearest is {nearest_name(name, schemas)}"
            context.warn(f"there is no parameter {name[:80]!r}{advice}", parameter=name[:80])
        elif schema.get("type") == "boolean" and value not in FLAG_VALUES:
            context.warn(
                f"{name} is {value[:80]!r}, it is true or false",
                "the default was taken",
                parameter=name,
                value=value[:80],
            )
        elif schema.get("type") == "integer" and not is_number(value):
            context.warn(
                f"{name} is {value[:80]!r}, it is a whole number",
                "the default was taken",
                parameter=name,
                value=value[:80],
            )


def _warning_headers(warnings: list[str]) -> Headers:
    return tuple((b"tidelog-warning", warning.encode("ascii", "backslashreplace")) for warning in warnings)


def _with_warnings(body: bytes, warnings: list[str]) -> bytes:
    """Add `warnings` to the object that a response is."""
    return b'%b,"warnings":%b}' % (body[:-1], encode_json(warnings))


def _route_path(path: str) -> str:
    """Return the route of any path, without the cache."""
    try:
        match = find_route(path)
    except ApiError:
        return ""
    return "" if match is None else match.route.path


def error_response(method: str, path: str, error: Exception, fields: Mapping[str, str]) -> Response:
    """Return the response for an error of a handler, and log errors of the server."""
    extra = {"fields": fields}
    if isinstance(error, ApiError):
        if error.code in ("internal", "disk_full"):  # an error of the engine, with the fields of the handler
            _log.error("%s %s: %s", method, path, error, extra=extra)
        return error.response()
    if isinstance(error, Error):
        problem = api_error_from(error)
        if problem.status >= 500:
            _log.error("%s %s: %s", method, path, error, extra=extra)
        return problem.response()
    _log.error("%s %s failed", method, path, exc_info=error, extra=extra)
    return ApiError("internal", "the server failed on this request; it may have been written, see its log").response()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


# Scopes for a method that a path does not have: a key without them gets 403 instead of 405.
_SCOPES_OF_UNKNOWN_METHOD: Final[Mapping[str, frozenset[str]]] = {
    "topics": _WRITE,
    "routers": _ADMIN,
    "channels": _WRITE,
}
