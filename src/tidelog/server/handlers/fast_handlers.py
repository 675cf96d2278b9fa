"""[hot] Plain writes whose heads are known: from the bytes of their bodies to the bytes of their answers.

    bodies of a turn ──► plain? ──► gathered with the others of this turn (`gather.py`) ──► committed ──► answers

The same rules as for every write, and the same answers: what is not plain, or would have to be refused, is not taken
and comes again by the ordinary way, which finds the words for it. Nothing is done for one write that can be done for
all of a turn.

[hot] Claims and acks whose heads are known: from the bytes of a body to the bytes of its answer.

    claim ──► can it be answered at once? ──yes──► leased ──► answer
    ack   ──► are routers to be asked?    ──no───► staged ──► committed ──► answer

As with writes (`express.py`): what would have to wait elsewhere, or to be refused, is not taken and comes again by the
ordinary way, which finds the words for it. Once something was done, whatever follows is the answer.

[hot] Reads whose heads are known: from the bytes of a body to the bytes of its answer.

    body ──► nothing to wait for, and all of it at hand? ──► a page as text ──► answer, in three pieces

As with writes (`express.py`): what would have to wait, or to be refused, is not taken and comes again by the ordinary
way, which finds the words for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from tidelog import api_types
from tidelog.api_types import BadBody
from tidelog.engine import Appended, CommitFuture
from tidelog.engine.queues import AckResult, ClaimResult, Queue
from tidelog.engine.queues.queue import operations_of
from tidelog.errors import Error
from tidelog.http.interface import BatchHandler, FastResponder, RequestBatch, RequestIds, Response, SingleHandler
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.handlers import queues, records
from tidelog.server.handlers.write import encode_write_responses, plain_records_of
from tidelog.server.service import Service
from tidelog.server.write_pipeline import BatchSlice, OnBatchCommitted

_WRITE_PATH: Final = "/v0/topics/{topic}"
_WRITE_RESPONSE_BYTES: Final = 430  # of an answer without its topic's name and its seqs, at most
_WRITE_SEQ_BYTES: Final = 20
_HANDLERS_MAX: Final = 4096
_log = logging.getLogger("tidelog.server")


class _WriteBatch(NamedTuple):
    """Those of one crowd, to one topic."""

    name: str
    principal: Principal
    requests: RequestBatch
    counts: list[int]  # of the records of each
    durability: str  # of the topic when they were taken


class FastWrites:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_ids: Callable[[int], RequestIds]) -> None:
        self._service, self._next_ids = service, next_ids
        self._now_us = service.clock.monotonic_us
        self._on_committed: OnBatchCommitted[_WriteBatch] = (
            self._on_batch_committed
        )  # one for all: a batch is told of once
        # By topic, key, records of a write at most and the settings under which they were admitted.
        self._handlers: dict[tuple[str, bytes, int, int], BatchHandler] = {}

    def handler_for(self, topic_name: str, principal: Principal, answer_bytes_max: int) -> BatchHandler | None:
        """Who takes writes of this principal to this topic: the same for every head that says so."""
        most = (answer_bytes_max - _WRITE_RESPONSE_BYTES - len(topic_name)) // _WRITE_SEQ_BYTES
        if most <= 0:
            return None
        admitted = self._service.auth.generation
        key = (topic_name, principal.identity, most, admitted)
        way = self._handlers.get(key)
        if way is None:
            if len(self._handlers) >= _HANDLERS_MAX:
                self._handlers.clear()  # whoever has one keeps it; others are made again
            take = partial(self._handle_batch, topic_name, principal, most, admitted)
            way = self._handlers[key] = BatchHandler(take, self._call_at_turn_end, self._now_us)
        return way

    def _call_at_turn_end(self, call: Callable[[], None]) -> None:
        if self._service.is_ready:
            self._service.writes.call_at_turn_end(call)
        else:
            self._service.loop.call_soon(call)

    def _handle_batch(
        self, name: str, principal: Principal, records_max: int, auth_generation: int, requests: RequestBatch
    ) -> None:
        service = self._service
        try:
            engine = service.engine
            topic = engine.find(name)
            if (
                auth_generation != service.auth.generation
                or topic is None
                or topic.needs_expiry
                or not topic.has_no_write_limits
            ):
                requests.reparse_and_drop(range(len(requests)))
                return
            datas, counts = plain_records_of(requests.bodies, engine.limits, records_max)
            if 0 in counts:
                requests = requests.reparse_and_drop([at for at, count in enumerate(counts) if not count])
                counts = [count for count in counts if count]
                if not counts:
                    return
            service.auth.inflight_limit.acquire(principal, len(requests))
        except (ApiError, Error):
            requests.reparse_and_drop(range(len(requests)))
            return
        try:
            size = sum(map(len, requests.bodies))
            writes = _WriteBatch(name, principal, requests, counts, topic.config.durability)
            service.writes.add_to_batch(topic, datas, size, self._on_committed, writes)
        except Error:
            service.auth.inflight_limit.release(principal, len(requests))
            requests.reparse_and_drop(range(len(requests)))

    def _on_batch_committed(self, done: Appended | Error, parts: list[BatchSlice[_WriteBatch]]) -> None:
        if isinstance(done, Error):
            self._respond_errors(done, [writes for writes, _, _ in parts])
            return
        for writes, offset, _ in parts:
            self._respond(done, offset, writes)

    def _respond_errors(self, error: Error, all_writes: list[_WriteBatch]) -> None:
        """The batch failed, and with it all of these. That is logged once: their ids follow on each other."""
        service, problem, now_us = self._service, api_error_from(error), self._now_us()
        count = sum(len(writes.requests) for writes in all_writes)
        prefix, at = self._next_ids(count)
        if problem.status >= 500:
            fields = {"request_id": f"{prefix.decode()}{at:x}", "requests": count, "topic": all_writes[0].name}
            _log.error("POST %s, %d written together: %s", _WRITE_PATH, count, error, extra={"fields": fields})
        for _, principal, crowd, *_ in all_writes:
            service.auth.inflight_limit.release(principal, len(crowd))
            service.metrics.count_response_batch(
                _WRITE_PATH, "POST", problem.status, [now_us - since for since in crowd.received_us]
            )
            crowd.respond(
                [_with_request_id(problem.response(), RequestIds(prefix, at), each) for each in range(len(crowd))]
            )
            at += len(crowd)

    def _respond(self, done: Appended, offset: int, writes: _WriteBatch) -> None:
        service, (name, principal, crowd, counts, durability) = self._service, writes
        now_us, ids = self._now_us(), self._next_ids(len(crowd))
        service.auth.inflight_limit.release(principal, len(crowd))
        took_us = [now_us - since_us for since_us in crowd.received_us]
        service.metrics.count_written(name, sum(counts))
        service.metrics.count_response_batch(_WRITE_PATH, "POST", 200, took_us)
        told = encode_write_responses(name, durability, done, offset, counts, took_us)
        crowd.respond_json(told, ids)


def _with_request_id(response: Response, ids: RequestIds, at: int) -> Response:
    response.headers = (*response.headers, (b"x-request-id", b"%b%x" % (ids.prefix, ids.first_number + at)))
    return response


_CLAIM_PATH: Final = "/v0/topics/{topic}/claim"
_ACK_PATH: Final = "/v0/topics/{topic}/ack"
_ACK_RESPONSE_BYTES: Final = (
    300  # of the answer to an ack without its topic's name and the seqs that were skipped, at most
)
_ACK_SEQ_BYTES: Final = 21
_UNLIMITED_RESPONSE_BYTES: Final = (
    1 << 16
)  # who allows so many lets an answer be as long as it is: it would not be compressed
_JOIN_RESPONSE_BYTES_MAX: Final = 1 << 14  # a longer answer is not copied behind its head
ErrorResponse = Callable[[str, str, Exception, Mapping[str, str]], Response]


class FastQueueRequests:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes], failed: ErrorResponse) -> None:
        self._service, self._next_id, self._failed = service, next_id, failed
        self._now_us = service.clock.monotonic_us

    def claim_handler(self, name: str, principal: Principal, answer_bytes_max: int) -> SingleHandler | None:
        """Who takes claims of this principal from this queue."""
        return (
            partial(self._handle_claim, name, principal, self._service.auth.generation)
            if answer_bytes_max >= _UNLIMITED_RESPONSE_BYTES
            else None
        )

    def ack_handler(self, name: str, principal: Principal, answer_bytes_max: int) -> SingleHandler | None:
        """Who takes its acks."""
        most = (answer_bytes_max - _ACK_RESPONSE_BYTES - len(name)) // _ACK_SEQ_BYTES
        return partial(self._handle_ack, name, principal, most, self._service.auth.generation) if most > 0 else None

    def _queue(self, name: str, auth_generation: int) -> Queue | None:
        """None also where keys or hosts were reloaded since the head was admitted."""
        service = self._service
        topic = service.engine.find(name) if service.is_ready and auth_generation == service.auth.generation else None
        return None if topic is None else topic.queue()

    def _handle_claim(
        self, name: str, principal: Principal, auth_generation: int, body: bytes, responder: FastResponder
    ) -> bool:
        began_us, service = self._now_us(), self._service
        try:
            queue = self._queue(name, auth_generation)
            want = queues.decode_claim(body)
            if queue is None or not service.push.claim_queues.can_claim_now(queue, want):
                return False
            service.auth.inflight_limit.acquire(principal)
        except (ApiError, Error, BadBody):
            return False
        try:
            leased = operations_of(queue).claim_for_all([want])[0]
            self._respond_claim(name, leased, began_us, responder)
        except Exception as error:  # told as by the ordinary way: jobs may have been handed out
            self._respond_error(_CLAIM_PATH, name, began_us, error, responder)
        finally:
            service.auth.inflight_limit.release(principal)
        return True

    def _respond_claim(self, name: str, leased: ClaimResult, began_us: int, responder: FastResponder) -> None:
        service, took_us = self._service, self._now_us() - began_us
        service.metrics.count_claimed(name, leased.count)
        answer = queues.encode_claimed(name, leased, leased.ready, took_us / 1000)
        service.metrics.count_responses(_CLAIM_PATH, "POST", 200, took_us / 1e6)
        if len(answer) <= _JOIN_RESPONSE_BYTES_MAX:
            responder.respond_json(answer, self._next_id())
        else:
            responder.respond(Response(200, answer, headers=((b"x-request-id", self._next_id()),)))

    def _handle_ack(
        self,
        name: str,
        principal: Principal,
        seqs_max: int,
        auth_generation: int,
        body: bytes,
        responder: FastResponder,
    ) -> bool:
        began_us, service = self._now_us(), self._service
        try:
            queue = self._queue(name, auth_generation)
            if queue is None or operations_of(queue).has_routers:
                return False
            asked, lease_ids = queues.decode_ack(body)
            if len(asked.seqs) > seqs_max:
                return False
            service.auth.inflight_limit.acquire(principal)
        except (ApiError, Error, BadBody):
            return False
        try:
            token = operations_of(queue).submit_ack(asked.node, asked.seqs, lease_ids)
        except Error:
            service.auth.inflight_limit.release(principal)
            return False
        service.writes.add_done_callback(token, partial(self._respond_ack, name, principal, began_us, responder))
        return True

    def _respond_ack(
        self, name: str, principal: Principal, began_us: int, responder: FastResponder, token: CommitFuture[AckResult]
    ) -> None:
        service = self._service
        service.auth.inflight_limit.release(principal)
        try:
            done = token.wait()  # its outcome is known
        except Error as error:
            self._respond_error(_ACK_PATH, name, began_us, error, responder)
            return
        took_us = self._now_us() - began_us
        service.metrics.count_acked(name, done.count)
        service.metrics.count_responses(_ACK_PATH, "POST", 200, took_us / 1e6)
        responder.respond_json(queues.encode_acked(name, done, took_us / 1000), self._next_id())

    def _respond_error(self, path: str, name: str, began_us: int, error: Exception, responder: FastResponder) -> None:
        request_id = self._next_id()
        response = self._failed("POST", path, error, {"request_id": request_id.decode(), "topic": name})
        self._service.metrics.count_responses(path, "POST", response.status, (self._now_us() - began_us) / 1e6)
        response.headers = (*response.headers, (b"x-request-id", request_id))
        responder.respond(response)


_DIFF_PATH: Final = "/v0/topics/{topic}/diff"
_UNLIMITED_READ_BYTES: Final = (
    1 << 16
)  # who allows so many lets an answer be as long as it is: it would not be compressed
_diff_decoder = api_types.json_decoder(api_types.Diff)


class FastReads:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes]) -> None:
        self._service, self._next_id = service, next_id
        self._now_us = service.clock.monotonic_us

    def diff_handler(self, name: str, principal: Principal, answer_bytes_max: int) -> SingleHandler | None:
        """Who takes reads of this principal from this topic."""
        return (
            partial(self._handle_diff, name, principal, self._service.auth.generation)
            if answer_bytes_max >= _UNLIMITED_READ_BYTES
            else None
        )

    def _handle_diff(
        self, name: str, principal: Principal, auth_generation: int, body: bytes, responder: FastResponder
    ) -> bool:
        service = self._service
        if not service.is_ready or auth_generation != service.auth.generation:
            return False
        began_us = self._now_us()
        try:
            asked = api_types.decode_body(_diff_decoder, body)
            topic = service.engine.find(name)
            if topic is None or asked.wait_ms:
                return False
            service.auth.inflight_limit.check(principal)
            from_seq = records.clamp_seq(asked.from_seq)
            page = topic.read_cached_json(from_seq, *records.page_budget(asked.limit, asked.max_batch_bytes))
            if page is None and (look := records.plan_read(topic, from_seq, asked)).is_cached:
                page = look.read()
        except Exception:  # whatever it is comes again the ordinary way: nothing was done
            return False
        if page is None:
            return False
        topic.record_access()
        service.metrics.count_read(name, page.counts.rows, gap=page.gap is not None)
        took_us = self._now_us() - began_us
        service.metrics.count_responses(_DIFF_PATH, "POST", 200, took_us / 1e6)
        responder.respond_json_parts(records.encode_page_parts(name, page, took_us / 1000), self._next_id())
        return True
