"""[hot] Claims and acks whose heads are known: from the bytes of a body to the bytes of its answer.

    claim ──► can it be answered at once? ──yes──► leased ──► answer
    ack   ──► are routers to be asked?    ──no───► staged ──► committed ──► answer

As with writes (`express.py`): what would have to wait elsewhere, or to be refused, is not taken and comes again by the
ordinary way, which finds the words for it. Once something was done, whatever follows is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tidelog.engine import Token
from tidelog.engine.queues import Leased, Queue, Settled
from tidelog.errors import Error
from tidelog.server.api import queues
from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem
from tidelog.server.http.seam import Alone, Response, Ticket
from tidelog.server.service import Service
from tidelog.wire.requests import BadBody

_CLAIM: Final = "/v0/topics/{topic}/claim"
_ACK: Final = "/v0/topics/{topic}/ack"
_ANSWER_BYTES: Final = 300  # of the answer to an ack without its topic's name and the seqs that were skipped, at most
_SEQ_BYTES: Final = 21
_ANY_BYTES: Final = 1 << 16  # who allows so many lets an answer be as long as it is: it would not be compressed
_SMALL_BYTES: Final = 1 << 14  # a longer answer is not copied behind its head
Failed = Callable[[str, str, Exception, Mapping[str, str]], Response]


class ExpressJobs:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes], failed: Failed) -> None:
        self._service, self._next_id, self._failed = service, next_id, failed
        self._now_us = service.clock.monotonic_us

    def claims(self, name: str, principal: Principal, answer_bytes_max: int) -> Alone | None:
        """Who takes claims of this principal from this queue."""
        return (
            partial(self._claim, name, principal, self._service.generation) if answer_bytes_max >= _ANY_BYTES else None
        )

    def acks(self, name: str, principal: Principal, answer_bytes_max: int) -> Alone | None:
        """Who takes its acks."""
        most = (answer_bytes_max - _ANSWER_BYTES - len(name)) // _SEQ_BYTES
        return partial(self._ack, name, principal, most, self._service.generation) if most > 0 else None

    def _queue(self, name: str, admitted: int) -> Queue | None:
        """None also where keys or hosts were reloaded since the head was admitted."""
        service = self._service
        topic = service.engine.find(name) if service.is_ready and admitted == service.generation else None
        return None if topic is None else topic.queue()

    def _claim(self, name: str, principal: Principal, admitted: int, body: bytes, ticket: Ticket) -> bool:
        began_us, service = self._now_us(), self._service
        try:
            queue = self._queue(name, admitted)
            want = queues.want_of(body)
            if queue is None or not service.desks.is_quick(queue, want):
                return False
            service.inflight.take(principal)
        except (Problem, Error, BadBody):
            return False
        try:
            leased = queue.claim_now([want])[0]
            self._leased(name, leased, began_us, ticket)
        except Exception as error:  # told as by the ordinary way: jobs may have been handed out
            self._refuse(_CLAIM, name, began_us, error, ticket)
        finally:
            service.inflight.give(principal)
        return True

    def _leased(self, name: str, leased: Leased, began_us: int, ticket: Ticket) -> None:
        service, took_us = self._service, self._now_us() - began_us
        service.metrics.queues.claimed(name, leased.count)
        answer = queues.claimed(name, leased, leased.ready, took_us / 1000)
        service.metrics.answered(_CLAIM, "POST", 200, took_us / 1e6)
        if len(answer) <= _SMALL_BYTES:
            ticket.answer(answer, self._next_id())
        else:
            ticket.respond(Response(200, answer, headers=((b"x-request-id", self._next_id()),)))

    def _ack(self, name: str, principal: Principal, most: int, admitted: int, body: bytes, ticket: Ticket) -> bool:
        began_us, service = self._now_us(), self._service
        try:
            queue = self._queue(name, admitted)
            if queue is None or queue.is_routed:
                return False
            asked, lease_ids = queues.ack_of(body)
            if len(asked.seqs) > most:
                return False
            service.inflight.take(principal)
        except (Problem, Error, BadBody):
            return False
        try:
            token = queue.stage_ack(asked.node, asked.seqs, lease_ids)
        except Error:
            service.inflight.give(principal)
            return False
        service.commits.when_done(token, partial(self._acked, name, principal, began_us, ticket))
        return True

    def _acked(self, name: str, principal: Principal, began_us: int, ticket: Ticket, token: Token[Settled]) -> None:
        service = self._service
        service.inflight.give(principal)
        try:
            done = token.wait()  # its outcome is known
        except Error as error:
            self._refuse(_ACK, name, began_us, error, ticket)
            return
        took_us = self._now_us() - began_us
        service.metrics.queues.acked(name, done.count)
        service.metrics.answered(_ACK, "POST", 200, took_us / 1e6)
        ticket.answer(queues.acked(name, done, took_us / 1000), self._next_id())

    def _refuse(self, path: str, name: str, began_us: int, error: Exception, ticket: Ticket) -> None:
        request_id = self._next_id()
        response = self._failed("POST", path, error, {"request_id": request_id.decode(), "topic": name})
        self._service.metrics.answered(path, "POST", response.status, (self._now_us() - began_us) / 1e6)
        response.headers = (*response.headers, (b"x-request-id", request_id))
        ticket.respond(response)
