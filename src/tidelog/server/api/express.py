"""[hot] Plain writes whose heads are known: from the bytes of their bodies to the bytes of their answers, a turn of the
loop at a time.

    body ─┐
    body ─┼─► (end of the turn) one batch a topic ─► one commit ─► answer, answer, answer
    body ─┘

The same rules as for every write, and the same answers: what is not plain, or would have to be refused, is not taken
and comes again by the ordinary way, which finds the words for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from tidelog.engine import Appended, Batch, Token, Topic
from tidelog.errors import Error
from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.api.write import plain, told
from tidelog.server.http.seam import Express, Ticket
from tidelog.server.service import Service

_PATH: Final = "/v0/topics/{topic}"
_ANSWER_BYTES: Final = 400  # of an answer without its topic's name and its seqs, at most
_SEQ_BYTES: Final = 20
_RECORDS_MAX: Final = 4_096  # a turn's writes to one topic; more are staged at once


class _Ask(NamedTuple):
    ticket: Ticket
    records: int
    began_us: int
    principal: Principal


class _Group:
    __slots__ = ("asks", "datas", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.datas: list[bytes] = []
        self.asks: list[_Ask] = []


class ExpressWrites:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes]) -> None:
        self._service, self._next_id = service, next_id
        self._now_us = service.clock.monotonic_us
        self._groups: dict[str, _Group] = {}

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
            datas = plain(body, service.engine.limits)
            if datas is None or len(datas) > most:
                return False
            group = self._groups.get(name) or self._begin(name)
            if group is None:
                return False
            service.inflight.take(principal)
        except (Problem, Error):
            return False
        group.datas += datas
        group.asks.append(_Ask(ticket, len(datas), began_us, principal))
        if len(group.datas) > _RECORDS_MAX:
            self._stage(self._groups.pop(name))
        return True

    def _begin(self, name: str) -> _Group | None:
        topic = self._service.engine.find(name)
        if topic is None or topic.is_due or not topic.is_open:
            return None
        if not self._groups:
            self._service.loop.call_soon(self._flush)
        group = self._groups[name] = _Group(topic)
        return group

    def _flush(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            self._stage(group)

    def _stage(self, group: _Group) -> None:
        if not group.asks:
            return  # it was begun for a write that was not taken
        try:
            token = group.topic.stage(Batch(group.datas, True))
        except Error as error:
            self._failed(group, error)
            return
        self._service.commits.when_done(token, partial(self._told, group))

    def _told(self, group: _Group, token: Token[Appended]) -> None:
        try:
            done = token.wait()  # its outcome is known
        except Error as error:
            self._failed(group, error)
            return
        service, name, first, now_us = self._service, group.topic.name, done.first_seq, self._now_us()
        service.metrics.wrote(name, done.count)
        for ticket, count, began_us, principal in group.asks:
            mine = Appended(first, first + count - 1, done.head_seq, False, done.write_us, done.sync_us)
            first += count
            service.inflight.give(principal)
            service.metrics.answered(_PATH, "POST", 200, (now_us - began_us) / 1e6)
            ticket.answer(told(name, mine, (now_us - began_us) / 1000), self._next_id())

    def _failed(self, group: _Group, error: Error) -> None:
        service, now_us = self._service, self._now_us()
        problem = of_error(error)
        for ticket, _, began_us, principal in group.asks:
            service.inflight.give(principal)
            service.metrics.answered(_PATH, "POST", problem.status, (now_us - began_us) / 1e6)
            response = problem.response()
            response.headers = (*response.headers, (b"x-request-id", self._next_id()))
            ticket.respond(response)
