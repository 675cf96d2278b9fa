"""[hot] Plain writes whose heads are known: from the bytes of their bodies to the bytes of their answers.

    bodies of a turn ──► plain? ──► gathered with the others of this turn (`gather.py`) ──► committed ──► answers

The same rules as for every write, and the same answers: what is not plain, or would have to be refused, is not taken
and comes again by the ordinary way, which finds the words for it. Nothing is done for one write that can be done for
all of a turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from tidelog.engine import Appended
from tidelog.errors import Error
from tidelog.server.api.auth import Principal
from tidelog.server.api.plain import plain_all
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.api.write import told_all
from tidelog.server.gather import Part, Tell
from tidelog.server.http.seam import Crowd, Ids, Response, Together
from tidelog.server.service import Service

_PATH: Final = "/v0/topics/{topic}"
_ANSWER_BYTES: Final = 430  # of an answer without its topic's name and its seqs, at most
_SEQ_BYTES: Final = 20
_WAYS_MAX: Final = 4096
_log = logging.getLogger("tidelog.server")


class _Writes(NamedTuple):
    """Those of one crowd, to one topic."""

    name: str
    principal: Principal
    crowd: Crowd
    counts: list[int]  # of the records of each
    durability: str  # of the topic when they were taken


class ExpressWrites:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_ids: Callable[[int], Ids]) -> None:
        self._service, self._next_ids = service, next_ids
        self._now_us = service.clock.monotonic_us
        self._tell: Tell[_Writes] = self._answered  # one for all: a batch is told of once
        # By topic, key, records of a write at most and the settings under which they were admitted.
        self._ways: dict[tuple[str, bytes, int, int], Together] = {}

    def to(self, name: str, principal: Principal, answer_bytes_max: int) -> Together | None:
        """Who takes writes of this principal to this topic: the same for every head that says so."""
        most = (answer_bytes_max - _ANSWER_BYTES - len(name)) // _SEQ_BYTES
        if most <= 0:
            return None
        admitted = self._service.generation
        key = (name, principal.identity, most, admitted)
        way = self._ways.get(key)
        if way is None:
            if len(self._ways) >= _WAYS_MAX:
                self._ways.clear()  # whoever has one keeps it; others are made again
            take = partial(self._take, name, principal, most, admitted)
            way = self._ways[key] = Together(take, self._soon, self._now_us)
        return way

    def _soon(self, call: Callable[[], None]) -> None:
        if self._service.is_ready:
            self._service.gather.soon(call)
        else:
            self._service.loop.call_soon(call)

    def _take(self, name: str, principal: Principal, most: int, admitted: int, crowd: Crowd) -> None:
        service = self._service
        try:
            engine = service.engine
            topic = engine.find(name)
            if admitted != service.generation or topic is None or topic.is_due or not topic.is_open:
                crowd.without(range(len(crowd)))
                return
            datas, counts = plain_all(crowd.bodies, engine.limits, most)
            if 0 in counts:
                crowd = crowd.without([at for at, count in enumerate(counts) if not count])
                counts = [count for count in counts if count]
                if not counts:
                    return
            service.inflight.take(principal, len(crowd))
        except (Problem, Error):
            crowd.without(range(len(crowd)))
            return
        try:
            size = sum(map(len, crowd.bodies))
            writes = _Writes(name, principal, crowd, counts, topic.config.durability)
            service.gather.add(topic, datas, size, self._tell, writes)
        except Error:
            service.inflight.give(principal, len(crowd))
            crowd.without(range(len(crowd)))

    def _answered(self, done: Appended | Error, parts: list[Part[_Writes]]) -> None:
        if isinstance(done, Error):
            self._failed(done, [writes for writes, _, _ in parts])
            return
        for writes, offset, _ in parts:
            self._answer(done, offset, writes)

    def _failed(self, error: Error, all_writes: list[_Writes]) -> None:
        """The batch failed, and with it all of these. That is logged once: their ids follow on each other."""
        service, problem, now_us = self._service, of_error(error), self._now_us()
        count = sum(len(writes.crowd) for writes in all_writes)
        prefix, at = self._next_ids(count)
        if problem.status >= 500:
            fields = {"request_id": f"{prefix.decode()}{at:x}", "requests": count, "topic": all_writes[0].name}
            _log.error("POST %s, %d written together: %s", _PATH, count, error, extra={"fields": fields})
        for _, principal, crowd, *_ in all_writes:
            service.inflight.give(principal, len(crowd))
            service.metrics.answered_all(_PATH, "POST", problem.status, [now_us - since for since in crowd.since_us])
            crowd.respond([_named(problem.response(), Ids(prefix, at), each) for each in range(len(crowd))])
            at += len(crowd)

    def _answer(self, done: Appended, offset: int, writes: _Writes) -> None:
        service, (name, principal, crowd, counts, durability) = self._service, writes
        now_us, ids = self._now_us(), self._next_ids(len(crowd))
        service.inflight.give(principal, len(crowd))
        took_us = [now_us - since_us for since_us in crowd.since_us]
        service.metrics.wrote(name, sum(counts))
        service.metrics.answered_all(_PATH, "POST", 200, took_us)
        told = told_all(name, durability, done, offset, counts, took_us, kernel=service.config.kernel)
        crowd.answer(told, ids)


def _named(response: Response, ids: Ids, at: int) -> Response:
    response.headers = (*response.headers, (b"x-request-id", b"%b%x" % (ids.prefix, ids.first + at)))
    return response
