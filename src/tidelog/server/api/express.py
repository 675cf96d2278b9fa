"""[hot] Plain writes whose heads are known: from the bytes of a body to the bytes of its answer.

    body ──► plain? ──► gathered with the others of this turn (`gather.py`) ──► committed ──► answer

The same rules as for every write, and the same answers: what is not plain, or would have to be refused, is not taken
and comes again by the ordinary way, which finds the words for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from tidelog.engine import Appended
from tidelog.errors import Error
from tidelog.server.api.auth import Principal
from tidelog.server.api.plain import plain
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.api.write import saying
from tidelog.server.gather import Part, Tell
from tidelog.server.http.seam import Express, Ticket
from tidelog.server.service import Service

_PATH: Final = "/v0/topics/{topic}"
_ANSWER_BYTES: Final = 400  # of an answer without its topic's name and its seqs, at most
_SEQ_BYTES: Final = 20


class _Write(NamedTuple):
    topic: str
    principal: Principal
    began_us: int
    ticket: Ticket


class ExpressWrites:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes]) -> None:
        self._service, self._next_id = service, next_id
        self._now_us = service.clock.monotonic_us
        self._tell: Tell[_Write] = self._answered  # one for all: a batch is told of once

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
            engine = service.engine
            topic = engine.find(name)
            if topic is None or topic.is_due or not topic.is_open:
                return False
            datas = plain(body, engine.limits)
            if datas is None or len(datas) > most:
                return False
            service.inflight.take(principal)
        except (Problem, Error):
            return False
        try:
            service.gather.add(topic, datas, len(body), self._tell, _Write(name, principal, began_us, ticket))
        except Error:
            service.inflight.give(principal)
            return False
        return True

    def _answered(self, done: Appended | Error, parts: list[Part[_Write]]) -> None:
        service, now_us, next_id = self._service, self._now_us(), self._next_id
        name = parts[0][0].topic  # of all of them: a batch is one topic's
        for write, _, _ in parts:
            service.inflight.give(write.principal)
        seconds = [(now_us - write.began_us) / 1e6 for write, _, _ in parts]
        if isinstance(done, Error):
            problem = of_error(done)
            service.metrics.answered(_PATH, "POST", problem.status, *seconds)
            for write, _, _ in parts:
                response = problem.response()
                response.headers = (*response.headers, (b"x-request-id", next_id()))
                write.ticket.respond(response)
            return
        service.metrics.wrote(name, sum(count for _, _, count in parts))
        service.metrics.answered(_PATH, "POST", 200, *seconds)
        say = saying(name, done)
        for write, offset, count in parts:
            write.ticket.answer(say(offset, count, now_us - write.began_us), next_id())
