"""[hot] Plain writes whose heads are known: from the bytes of a body to the bytes of its answer.

    body ──► plain? ──► gathered with the others of this turn (`gather.py`) ──► committed ──► answer

The same rules as for every write, and the same answers: what is not plain, or would have to be refused, is not taken
and comes again by the ordinary way, which finds the words for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from tidelog.engine import Appended
from tidelog.errors import Error
from tidelog.server.api.auth import Principal
from tidelog.server.api.plain import plain
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.api.write import saying
from tidelog.server.gather import Lot, Part, Tell
from tidelog.server.http.seam import Express, Ticket
from tidelog.server.service import Service

_PATH: Final = "/v0/topics/{topic}"
_ANSWER_BYTES: Final = 400  # of an answer without its topic's name and its seqs, at most
_SEQ_BYTES: Final = 20


_Write: TypeAlias = tuple[str, Principal, int, Ticket]
"""Its topic, whose it is, when it began, and how it is answered. A plain tuple: one is made for every write."""


class ExpressWrites:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes]) -> None:
        self._service, self._next_id = service, next_id
        self._now_us = service.clock.monotonic_us
        self._tell: Tell[_Write] = self._answered  # one for all: a batch is told of once
        self._lots: dict[str, Lot[_Write]] = {}  # of this turn, by topic

    def to(self, name: str, principal: Principal, answer_bytes_max: int) -> Express | None:
        """Who takes writes of this principal to this topic."""
        most = (answer_bytes_max - _ANSWER_BYTES - len(name)) // _SEQ_BYTES
        return partial(self._take, name, principal, most) if most > 0 else None

    def _take(self, name: str, principal: Principal, most: int, body: bytes, ticket: Ticket) -> bool:
        service = self._service
        if not service.is_ready:
            return False
        began_us = self._now_us()
        lot, topic = self._lots.get(name), None
        try:
            engine = service.engine
            if lot is None or not lot.is_open:
                topic = engine.find(name)
                if topic is None or topic.is_due or not topic.is_open:
                    return False
            datas = plain(body, engine.limits)
            if datas is None or len(datas) > most:
                return False
            service.inflight.take(principal)
        except (Problem, Error):
            return False
        if topic is not None:
            try:
                lot = self._lots[name] = service.gather.lot(topic, self._tell)
            except Error:
                service.inflight.give(principal)
                return False
        assert lot is not None, "the turn's, or a new one"
        lot.add(datas, len(body), (name, principal, began_us, ticket))
        return True

    def _answered(self, done: Appended | Error, parts: list[Part[_Write]]) -> None:
        service, now_us, next_id = self._service, self._now_us(), self._next_id
        name = parts[0][0][0]  # of all of them: a batch is one topic's
        self._lots.pop(name, None)  # a topic that is not written to any more is not held on to
        give = service.inflight.give
        for (_, principal, _, _), _, _ in parts:
            give(principal)
        seconds = [(now_us - began_us) / 1e6 for (_, _, began_us, _), _, _ in parts]
        if isinstance(done, Error):
            problem = of_error(done)
            service.metrics.answered(_PATH, "POST", problem.status, *seconds)
            for (_, _, _, ticket), _, _ in parts:
                response = problem.response()
                response.headers = (*response.headers, (b"x-request-id", next_id()))
                ticket.respond(response)
            return
        service.metrics.wrote(name, sum(count for _, _, count in parts))
        service.metrics.answered(_PATH, "POST", 200, *seconds)
        say = saying(name, done)
        for (_, _, began_us, ticket), offset, count in parts:
            ticket.answer(say(offset, count, now_us - began_us), next_id())
