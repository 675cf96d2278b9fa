"""[shell] The application: which handler, who may call it, and that every answer is one.

Checks come in the contract's order: key → requests in flight → scope → name → body → media type → JSON →
whatever the endpoint itself checks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import lru_cache
from typing import Any, Final

from tidelog.engine.config import OWN, check_topic_name
from tidelog.errors import BadInput, Error
from tidelog.http.interface import (
    FAST_REQUEST_BYTES_MAX,
    AnyResponse,
    BodyPolicy,
    Exchange,
    FastHandler,
    Request,
    RequestIds,
    Response,
    Stream,
    Upgrade,
)
from tidelog.server import auth, routes
from tidelog.server.auth import ANONYMOUS, bearer_token
from tidelog.server.errors import ApiError, api_error_for_status, api_error_from
from tidelog.server.handlers.fast_handlers import FastQueueRequests, FastReads, FastWrites
from tidelog.server.request import JSON_TYPE, Endpoint, RequestContext
from tidelog.server.service import Service

_log = logging.getLogger("tidelog.server")
_NO_BODY_LIMIT: Final = 1 << 62
_SMALL_BODY_BYTES_MAX: Final = 1 << 20  # of a body that is no write: it is decoded on the loop
_CACHED_PATH_CHARS_MAX: Final = 1_024  # of a path whose route is remembered
_RECOVERY_WAIT_S: Final = 2.0  # for which a request waits for the log to be recovered
_UNCACHEABLE_HEADERS: Final = frozenset(
    (b"idempotency-key", b"x-request-id")
)  # what makes one write differ from the next


class App:
    """`Application` of the front end, over a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        limit = service.config.max_body_bytes or _NO_BODY_LIMIT
        self._large_body = BodyPolicy(limit)
        self._small_body = BodyPolicy(min(limit, _SMALL_BODY_BYTES_MAX))
        self._streamed_body = BodyPolicy(_NO_BODY_LIMIT, is_streamed=True, allowance=service.config.decoding_allowance)
        self._cached_route = lru_cache(4096)(routes.find_route)
        self._request_count, self._request_id_prefix = 0, b"%x-" % service.started_ms
        writes, jobs = (
            FastWrites(service, self._allocate_ids),
            FastQueueRequests(service, self.next_request_id, error_response),
        )
        reads = FastReads(service, self.next_request_id)
        self._fast_handlers = {
            "write": writes.handler_for,
            "claim": jobs.claim_handler,
            "ack": jobs.ack_handler,
            "diff": reads.diff_handler,
        }

    # ── the front end's side ──────────────────────────────────────────────────────────────────

    def begin(self, request: Request) -> Response | BodyPolicy:
        call = RequestContext(self, self.service, request)
        request.context = call
        try:
            self._admit(call)
        except ApiError as problem:
            return self._finish_response(call, problem.response())
        except BadInput as error:
            return self._finish_response(call, api_error_from(error).response())
        endpoint = call.endpoint
        assert endpoint is not None, "an admitted call has one"
        if (
            endpoint.streamed_types
            and (request.header(b"content-type") or b"").partition(b";")[0].strip() in endpoint.streamed_types
        ):
            return self._streamed_body
        return self._large_body if endpoint.accepts_large_body else self._small_body

    def handle(self, request: Request, exchange: Exchange) -> None:
        call = request.context
        assert isinstance(call, RequestContext), "what `begin` left there"
        assert call.endpoint is not None, "an admitted call has one"
        call.exchange = exchange
        try:
            if (
                call.counts_as_inflight and call.generation != self.service.auth.generation
            ):  # keys were reloaded while its body came
                call.check_key()
            answer = call.endpoint.handler(call) if self._is_available(call.endpoint) else self._handle_when_ready(call)
        except Exception as error:
            answer = self._error_response(call, error)
        if answer is None:
            return  # it answers later, by `answer`
        if isinstance(answer, Response | Stream | Upgrade):
            self.respond(call, answer)
        else:
            running = answer
            task = self.service.spawn(self._handle_async(call, running))
            task.add_done_callback(lambda _: self._on_handler_done(call, running))
            exchange.add_disconnect_callback(lambda: _cancel(task))

    def fast_handler(self, request: Request, answer_bytes_max: int) -> FastHandler | None:
        """For what was admitted by its head and that nothing in it makes special."""
        call = RequestContext(self, self.service, request)
        special = request.query or any(name in _UNCACHEABLE_HEADERS for name, _ in request.headers)
        kind = request.header(b"content-type") or b""
        if special or not kind.startswith(JSON_TYPE) or self._large_body.bytes_max < FAST_REQUEST_BYTES_MAX:
            return None
        try:
            self._admit(call)
        except (ApiError, Error):
            return None
        finally:
            self._release(call)
        way = None if call.endpoint is None else self._fast_handlers.get(call.endpoint.fast_kind)
        return None if way is None else way(call.topic, call.principal, answer_bytes_max)

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        call = request.context
        if not isinstance(call, RequestContext):  # it did not get as far as `begin`
            call = RequestContext(self, self.service, request)
            call.route_path = _route_path(request.path)
        advice = ", send it in parts" if status == 413 else ""
        return self._finish_response(
            call, api_error_for_status(status, f"{reason}; nothing was done{advice}").response()
        )

    def on_abandoned(self, request: Request) -> None:
        if isinstance(request.context, RequestContext):
            self._release(request.context)

    # ── answering ─────────────────────────────────────────────────────────────────────────────

    def respond(self, context: RequestContext, answer: AnyResponse) -> None:
        assert context.exchange is not None, "a call that reached its handler has one"
        context.exchange.respond(
            self._finish_response(context, answer)
            if isinstance(answer, Response)
            else self._finish_stream(context, answer)
        )

    def fail(self, context: RequestContext, error: Exception) -> None:
        self.respond(context, self._error_response(context, error))

    def _is_available(self, endpoint: Endpoint) -> bool:
        return self.service.is_ready or endpoint.before_recovery

    async def _handle_when_ready(self, context: RequestContext) -> AnyResponse | None:
        """Whoever comes right behind the start is not sent away for the moment that it takes. Where it takes longer the
        handler says so."""
        await self.service.wait_recovered(_RECOVERY_WAIT_S)
        assert context.endpoint is not None, "an admitted call has one"
        answer = context.endpoint.handler(context)
        return answer if answer is None or isinstance(answer, Response | Stream | Upgrade) else await answer

    async def _handle_async(self, context: RequestContext, running: Coroutine[Any, Any, AnyResponse | None]) -> None:
        try:
            answer = await running
        except Exception as error:
            answer = self._error_response(context, error)
        if answer is not None:
            self.respond(context, answer)

    def _on_handler_done(self, context: RequestContext, running: Coroutine[Any, Any, AnyResponse | None]) -> None:
        """The handler has ended, or was cancelled, perhaps before its first step."""
        running.close()
        self._release(context)

    def _error_response(self, context: RequestContext, error: Exception) -> Response:
        return error_response(context.request.method, context.route_path, error, context.log_fields)

    def _finish_response(self, context: RequestContext, response: Response) -> Response:
        self._release(context)
        self.service.metrics.count_responses(
            context.route_path, context.request.method, response.status, context.elapsed_ms() / 1000
        )
        response.headers = (*response.headers, (b"x-request-id", context.request_id))
        return response

    def _finish_stream(self, context: RequestContext, answer: Stream | Upgrade) -> AnyResponse:
        """A stream is not a request in flight: it has a cap of its own."""
        self._release(context)
        status = answer.status if isinstance(answer, Stream) else 101
        self.service.metrics.count_responses(
            context.route_path, context.request.method, status, context.elapsed_ms() / 1000
        )
        if isinstance(answer, Stream):
            answer.headers = (*answer.headers, (b"x-request-id", context.request_id))
        return answer

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

    # ── the checks ────────────────────────────────────────────────────────────────────────────

    def _find_route(self, path: str) -> routes.RouteMatch | None:
        return self._cached_route(path) if len(path) <= _CACHED_PATH_CHARS_MAX else routes.find_route(path)

    def _admit(self, context: RequestContext) -> None:
        request, service = context.request, self.service
        try:
            found = self._find_route(request.path)
        except ApiError:  # no text: that is told to whoever has a key, as with a path that is not there
            if not service.auth.keys.is_empty:
                self._authorize(context, None, None)
            service.auth.origins.check(request, changes=True, is_public=False)
            raise
        method = "GET" if request.method == "HEAD" else request.method
        endpoint = None if found is None else found.route.methods.get(method)
        context.route_path = "" if found is None else found.route.path
        context.endpoint = endpoint
        if found is not None:
            context.path_names = found.path_names
        if service.auth.keys.is_empty or (found is not None and found.route.is_probe and not service.config.probe_auth):
            context.principal = ANONYMOUS
        elif endpoint is not None and endpoint.handler_authenticates:
            pass
        else:
            self._authorize(context, endpoint, found)
        is_public = found is not None and found.route.is_probe
        changes = request.upgrade or (endpoint is not None and bool(endpoint.scopes - {auth.READ}))
        service.auth.origins.check(request, changes=changes, is_public=is_public)
        if found is None:
            raise ApiError("not_found", f"there is nothing at {request.path[:200]}; nothing was done")
        if endpoint is None:
            allowed = ", ".join(sorted({*found.route.methods, *(["HEAD"] if "GET" in found.route.methods else [])}))
            said = f"{found.route.path} takes {allowed}; nothing was done"
            raise ApiError("method_not_allowed", said, headers=((b"allow", allowed.encode()),))
        if context.path_names and context.path_names[0].startswith(OWN) and endpoint.scopes - {auth.READ}:
            check_topic_name(context.path_names[0])  # which it cannot be: the engine's own are read and nothing else

    def _authorize(self, context: RequestContext, endpoint: Endpoint | None, match: routes.RouteMatch | None) -> None:
        secret = bearer_token(context.request.header(b"authorization"))
        if secret is None and endpoint is not None and endpoint.token_in_query:
            secret = context.query.text("token")
        principal = None if secret is None else self.service.auth.keys.find(secret)
        if principal is None:
            raise ApiError("unauthorized", "a valid key is needed: Authorization: Bearer <key>; nothing was done")
        context.principal = principal
        self.service.auth.inflight_limit.acquire(principal)
        context.counts_as_inflight = True
        scopes = (
            _SCOPES_OF_UNKNOWN_METHOD.get(match.route.family, frozenset())
            if endpoint is None and match
            else frozenset()
        )
        if endpoint is not None:
            scopes = endpoint.scopes
        if not principal.has_scopes(scopes):
            raise ApiError("forbidden", f"this key lacks a scope of {', '.join(sorted(scopes))}; nothing was done")
        if (
            match is not None
            and match.route.family
            and match.path_names
            and not principal.may_use_name(match.path_names[0])
        ):
            raise ApiError("forbidden", "this key is not for that name; nothing was done")


def _route_path(path: str) -> str:
    """The route of a path that may be anything; not remembered."""
    try:
        found = routes.find_route(path)
    except ApiError:
        return ""
    return "" if found is None else found.route.path


def error_response(method: str, path: str, error: Exception, fields: Mapping[str, str]) -> Response:
    """What is answered where a handler raised."""
    extra = {"fields": fields}
    if isinstance(error, ApiError):
        if error.code in ("internal", "disk_full"):  # an error of the engine's with what the handler knows of it
            _log.error("%s %s: %s", method, path, error, extra=extra)
        return error.response()
    if isinstance(error, Error):
        problem = api_error_from(error)
        if problem.status >= 500:
            _log.error("%s %s: %s", method, path, error, extra=extra)
        return problem.response()
    _log.error("%s %s broke", method, path, exc_info=error, extra=extra)
    return ApiError("internal", "the server broke on this request; it may have been written, see its log").response()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


# A method that a path does not have: a key that could not have used it is told so first.
_SCOPES_OF_UNKNOWN_METHOD: Final[Mapping[str, frozenset[str]]] = {
    "topics": frozenset((auth.WRITE,)),
    "routers": frozenset((auth.ADMIN,)),
    "channels": frozenset((auth.WRITE,)),
}
