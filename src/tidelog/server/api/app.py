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
from tidelog.server.api import auth, routes
from tidelog.server.api.auth import ANYBODY, bearer
from tidelog.server.api.call import JSON, Call, Endpoint
from tidelog.server.api.express import ExpressWrites
from tidelog.server.api.express_jobs import ExpressJobs
from tidelog.server.api.express_reads import ExpressReads
from tidelog.server.api.problem import Problem, of_error, of_status
from tidelog.server.http.seam import (
    EXPRESS_BYTES_MAX,
    Answer,
    Body,
    Exchange,
    Express,
    Ids,
    Request,
    Response,
    Stream,
    Upgrade,
)
from tidelog.server.service import Service

_log = logging.getLogger("tidelog.server")
_NO_LIMIT: Final = 1 << 62
_SMALL_BYTES_MAX: Final = 1 << 20  # of a body that is no write: it is decoded on the loop
_PATH_CHARS_MAX: Final = 1_024  # of a path whose route is remembered
_START_S: Final = 2.0  # for which a request waits for the log to be recovered
_SPECIAL: Final = frozenset((b"idempotency-key", b"x-request-id"))  # what makes one write differ from the next


class App:
    """`Application` of the front end, over a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        limit = service.config.max_body_bytes or _NO_LIMIT
        self._body = Body(limit)
        self._small = Body(min(limit, _SMALL_BYTES_MAX))
        self._streamed = Body(_NO_LIMIT, streamed=True, allowance=service.config.allowance)
        self._remembered = lru_cache(4096)(routes.find)
        self._ids, self._prefix = 0, b"%x-" % service.started_ms
        writes, jobs = ExpressWrites(service, self._next_ids), ExpressJobs(service, self.next_id, _failed)
        reads = ExpressReads(service, self.next_id)
        self._express = {"write": writes.to, "claim": jobs.claims, "ack": jobs.acks, "diff": reads.diffs}

    # ── the front end's side ──────────────────────────────────────────────────────────────────

    def begin(self, request: Request) -> Response | Body:
        call = Call(self, self.service, request)
        request.context = call
        try:
            self._admit(call)
        except Problem as problem:
            return self._finished(call, problem.response())
        except BadInput as error:
            return self._finished(call, of_error(error).response())
        endpoint = call.endpoint
        assert endpoint is not None, "an admitted call has one"
        if endpoint.streams and (request.header(b"content-type") or b"").partition(b";")[0].strip() in endpoint.streams:
            return self._streamed
        return self._body if endpoint.is_large else self._small

    def handle(self, request: Request, exchange: Exchange) -> None:
        call = request.context
        assert isinstance(call, Call), "what `begin` left there"
        assert call.endpoint is not None, "an admitted call has one"
        call.exchange = exchange
        try:
            if call.holds and call.generation != self.service.generation:  # keys were reloaded while its body came
                call.check_key()
            answer = call.endpoint.handler(call) if self._is_time(call.endpoint) else self._when_ready(call)
        except Exception as error:
            answer = self._failed(call, error)
        if answer is None:
            return  # it answers later, by `answer`
        if isinstance(answer, Response | Stream | Upgrade):
            self.answer(call, answer)
        else:
            running = answer
            task = self.service.spawn(self._later(call, running))
            task.add_done_callback(lambda _: self._over(call, running))
            exchange.on_gone(lambda: _cancel(task))

    def express(self, request: Request, answer_bytes_max: int) -> Express | None:
        """For what was admitted by its head and that nothing in it makes special."""
        call = Call(self, self.service, request)
        special = request.query or any(name in _SPECIAL for name, _ in request.headers)
        kind = request.header(b"content-type") or b""
        if special or not kind.startswith(JSON) or self._body.limit < EXPRESS_BYTES_MAX:
            return None
        try:
            self._admit(call)
        except (Problem, Error):
            return None
        finally:
            self._release(call)
        way = None if call.endpoint is None else self._express.get(call.endpoint.express)
        return None if way is None else way(call.topic, call.principal, answer_bytes_max)

    def malformed(self, request: Request, status: int, reason: str) -> Response:
        call = request.context
        if not isinstance(call, Call):  # it did not get as far as `begin`
            call = Call(self, self.service, request)
            call.path = _route_of(request.path)
        advice = ", send it in parts" if status == 413 else ""
        return self._finished(call, of_status(status, f"{reason}; nothing was done{advice}").response())

    def abandoned(self, request: Request) -> None:
        if isinstance(request.context, Call):
            self._release(request.context)

    # ── answering ─────────────────────────────────────────────────────────────────────────────

    def answer(self, call: Call, answer: Answer) -> None:
        assert call.exchange is not None, "a call that reached its handler has one"
        call.exchange.respond(
            self._finished(call, answer) if isinstance(answer, Response) else self._opened(call, answer)
        )

    def fail(self, call: Call, error: Exception) -> None:
        self.answer(call, self._failed(call, error))

    def _is_time(self, endpoint: Endpoint) -> bool:
        return self.service.is_ready or endpoint.is_early

    async def _when_ready(self, call: Call) -> Answer | None:
        """Whoever comes right behind the start is not sent away for the moment that it takes. Where it takes longer the
        handler says so."""
        await self.service.recovered(_START_S)
        assert call.endpoint is not None, "an admitted call has one"
        answer = call.endpoint.handler(call)
        return answer if answer is None or isinstance(answer, Response | Stream | Upgrade) else await answer

    async def _later(self, call: Call, running: Coroutine[Any, Any, Answer | None]) -> None:
        try:
            answer = await running
        except Exception as error:
            answer = self._failed(call, error)
        if answer is not None:
            self.answer(call, answer)

    def _over(self, call: Call, running: Coroutine[Any, Any, Answer | None]) -> None:
        """The handler has ended, or was cancelled, perhaps before its first step."""
        running.close()
        self._release(call)

    def _failed(self, call: Call, error: Exception) -> Response:
        return _failed(call.request.method, call.path, error, call.fields)

    def _finished(self, call: Call, response: Response) -> Response:
        self._release(call)
        self.service.metrics.answered(call.path, call.request.method, response.status, call.elapsed_ms() / 1000)
        response.headers = (*response.headers, (b"x-request-id", call.id))
        return response

    def _opened(self, call: Call, answer: Stream | Upgrade) -> Answer:
        """A stream is not a request in flight: it has a cap of its own."""
        self._release(call)
        status = answer.status if isinstance(answer, Stream) else 101
        self.service.metrics.answered(call.path, call.request.method, status, call.elapsed_ms() / 1000)
        if isinstance(answer, Stream):
            answer.headers = (*answer.headers, (b"x-request-id", call.id))
        return answer

    def _release(self, call: Call) -> None:
        if call.holds:
            call.holds = False
            self.service.inflight.give(call.principal)

    def next_id(self) -> bytes:
        ids = self._next_ids(1)
        return b"%b%x" % ids

    def _next_ids(self, count: int) -> Ids:
        first, self._ids = self._ids + 1, self._ids + count
        return Ids(self._prefix, first)

    # ── the checks ────────────────────────────────────────────────────────────────────────────

    def _find(self, path: str) -> routes.Found | None:
        return self._remembered(path) if len(path) <= _PATH_CHARS_MAX else routes.find(path)

    def _admit(self, call: Call) -> None:
        request, service = call.request, self.service
        try:
            found = self._find(request.path)
        except Problem:  # no text: that is told to whoever has a key, as with a path that is not there
            if not service.keys.open:
                self._authorize(call, None, None)
            service.origins.check(request, changes=True, is_public=False)
            raise
        method = "GET" if request.method == "HEAD" else request.method
        endpoint = None if found is None else found.route.methods.get(method)
        call.path = "" if found is None else found.route.path
        call.endpoint = endpoint
        if found is not None:
            call.names = found.names
        if service.keys.open or (found is not None and found.route.is_probe and not service.config.probe_auth):
            call.principal = ANYBODY
        elif endpoint is not None and endpoint.own_auth:
            pass
        else:
            self._authorize(call, endpoint, found)
        is_public = found is not None and found.route.is_probe
        changes = request.upgrade or (endpoint is not None and bool(endpoint.scopes - {auth.READ}))
        service.origins.check(request, changes=changes, is_public=is_public)
        if found is None:
            raise Problem("not_found", f"there is nothing at {request.path[:200]}; nothing was done")
        if endpoint is None:
            allowed = ", ".join(sorted({*found.route.methods, *(["HEAD"] if "GET" in found.route.methods else [])}))
            said = f"{found.route.path} takes {allowed}; nothing was done"
            raise Problem("method_not_allowed", said, headers=((b"allow", allowed.encode()),))
        if call.names and call.names[0].startswith(OWN) and endpoint.scopes - {auth.READ}:
            check_topic_name(call.names[0])  # which it cannot be: the engine's own are read and nothing else

    def _authorize(self, call: Call, endpoint: Endpoint | None, found: routes.Found | None) -> None:
        secret = bearer(call.request.header(b"authorization"))
        if secret is None and endpoint is not None and endpoint.token_in_query:
            secret = call.query.text("token")
        principal = None if secret is None else self.service.keys.find(secret)
        if principal is None:
            raise Problem("unauthorized", "a valid key is needed: Authorization: Bearer <key>; nothing was done")
        call.principal = principal
        self.service.inflight.take(principal)
        call.holds = True
        scopes = _UNLISTED.get(found.route.family, frozenset()) if endpoint is None and found else frozenset()
        if endpoint is not None:
            scopes = endpoint.scopes
        if not principal.may(scopes):
            raise Problem("forbidden", f"this key lacks a scope of {', '.join(sorted(scopes))}; nothing was done")
        if found is not None and found.route.family and found.names and not principal.owns(found.names[0]):
            raise Problem("forbidden", "this key is not for that name; nothing was done")


def _route_of(path: str) -> str:
    """The route of a path that may be anything; not remembered."""
    try:
        found = routes.find(path)
    except Problem:
        return ""
    return "" if found is None else found.route.path


def _failed(method: str, path: str, error: Exception, fields: Mapping[str, str]) -> Response:
    """What is answered where a handler raised."""
    extra = {"fields": fields}
    if isinstance(error, Problem):
        if error.code in ("internal", "disk_full"):  # an error of the engine's with what the handler knows of it
            _log.error("%s %s: %s", method, path, error, extra=extra)
        return error.response()
    if isinstance(error, Error):
        problem = of_error(error)
        if problem.status >= 500:
            _log.error("%s %s: %s", method, path, error, extra=extra)
        return problem.response()
    _log.error("%s %s broke", method, path, exc_info=error, extra=extra)
    return Problem("internal", "the server broke on this request; it may have been written, see its log").response()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


# A method that a path does not have: a key that could not have used it is told so first.
_UNLISTED: Final[Mapping[str, frozenset[str]]] = {
    "topics": frozenset((auth.WRITE,)),
    "routers": frozenset((auth.ADMIN,)),
    "channels": frozenset((auth.WRITE,)),
}
