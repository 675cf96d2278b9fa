"""[hot] Plain writes whose heads are known: from the bytes of a body to the bytes of its answer.

    body ──► plain? ──► gathered with the others of this turn (`gather.py`) ──► committed ──► answer

The same rules as for every write, and the same answers: what is not plain, or would have to be refused, is not taken
and comes again by the ordinary way, which finds the words for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tidelog.engine import Appended
from tidelog.errors import Error
from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.api.write import plain, told
from tidelog.server.http.seam import Express, Ticket
from tidelog.server.service import Service

_PATH: Final = "/v0/topics/{topic}"
_ANSWER_BYTES: Final = 400  # of an answer without its topic's name and its seqs, at most
_SEQ_BYTES: Final = 20


class ExpressWrites:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes]) -> None:
        self._service, self._next_id = service, next_id
        self._now_us = service.clock.monotonic_us

    def to(self, name: str, principal: Principal, answer_bytes_max: int) -> Express | None:
        """Who takes writes of this principal to this topic."""
        most = (answer_bytes_max - _ANSWER_BYTES - len(name)) // _SEQ_BYTES
        return partial(self._take, name, principal, most) if most > 0 else None

    def _take(self, name: str, principal: Principal, most: int, body: bytes, ticket: Ticket) -> bool:
        service = self._service
        if not service.is_ready:
            return False
        began_us = self._now_us()
        try:
            topic = service.engine.find(name)
            if topic is None or topic.is_due or not topic.is_open:
                return False
            datas = plain(body, service.engine.limits)
            if datas is None or len(datas) > most:
                return False
            service.inflight.take(principal)
        except (Problem, Error):
            return False
        try:
            service.gather.add(topic, datas, len(body), partial(self._answered, name, principal, began_us, ticket))
        except Error:
            service.inflight.give(principal)
            return False
        return True

    def _answered(self, name: str, principal: Principal, began_us: int, ticket: Ticket, done: Appended | Error) -> None:
        service, took_us = self._service, self._now_us() - began_us
        service.inflight.give(principal)
        if isinstance(done, Error):
            problem = of_error(done)
            service.metrics.answered(_PATH, "POST", problem.status, took_us / 1e6)
            response = problem.response()
            response.headers = (*response.headers, (b"x-request-id", self._next_id()))
            ticket.respond(response)
            return
        service.metrics.wrote(name, done.count)
        service.metrics.answered(_PATH, "POST", 200, took_us / 1e6)
        ticket.answer(told(name, done, took_us / 1000), self._next_id())
