"""Fast path of small writes, claims, acks and reads: from the bytes of a body to the bytes of its response.

    writes of a loop turn ──► plain? ──► one batch per topic (`write_pipeline.py`) ──► committed ──► responses
    claim ──► possible without waiting? ──yes──► leased ──► response
    ack   ──► has the queue routers?    ──no───► submitted ──► committed ──► response
    diff  ──► all records in memory?    ──yes──► a page as text ──► response, in three pieces

The HTTP layer calls these handlers for requests with a known head. The rules and responses are those of the normal
path. A request that would have to wait or would be refused is not taken: the normal path handles it and builds the
error. After a change was made, the fast path sends the response in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from tidelog import api_types
from tidelog.api_types import BadBody
from tidelog.engine import Appended, CommitFuture, Topic
from tidelog.engine.queues import AckResult, ClaimResult, Queue
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.topic import topic_operations
from tidelog.errors import Error
from tidelog.http.interface import BatchHandler, FastResponder, RequestBatch, RequestIds, Response, SingleHandler
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.handlers import queues, records
from tidelog.server.handlers.write import encode_write_responses, plain_records_of
from tidelog.server.service import Service
from tidelog.server.write_pipeline import BatchSlice, OnBatchCommitted

_WRITE_PATH: Final = "/v0/topics/{topic}"
_WRITE_RESPONSE_BYTES: Final = 430  # the most of a response without its topic's name and seqs
_WRITE_SEQ_BYTES: Final = 20
_HANDLERS_MAX: Final = 4096
_log = logging.getLogger("tidelog.server")


class _WriteBatch(NamedTuple):
    """Requests of one loop turn to one topic."""

    name: str
    principal: Principal
    requests: RequestBatch
    counts: list[int]  # records of each request
    durability: str  # of the topic at the time of the append


class FastWrites:
    """Runs on the event loop's thread."""

    def __init__(self, service: Service, next_ids: Callable[[int], RequestIds]) -> None:
        self._service, self._next_ids = service, next_ids
        self._now_us = service.clock.monotonic_us
        # One bound method for all requests: the pipeline calls it once per batch.
        self._on_committed: OnBatchCommitted[_WriteBatch] = self._on_batch_committed
        # By topic, key, the most records of a write, and the generation of the keys.
        self._handlers: dict[tuple[str, bytes, int, int], BatchHandler] = {}

    def handler_for(self, topic_name: str, principal: Principal, answer_bytes_max: int) -> BatchHandler | None:
        """The handler of this key's writes to this topic; one for all connections."""
        records_max = (answer_bytes_max - _WRITE_RESPONSE_BYTES - len(topic_name)) // _WRITE_SEQ_BYTES
        if records_max <= 0:
            return None
        generation = self._service.auth.generation
        key = (topic_name, principal.identity, records_max, generation)
        handler = self._handlers.get(key)
        if handler is None:
            if len(self._handlers) >= _HANDLERS_MAX:
                self._handlers.clear()  # connections keep theirs; others are created again
            handle = partial(self._handle_batch, topic_name, principal, records_max, generation)
            handler = self._handlers[key] = BatchHandler(handle, self._call_at_turn_end, self._now_us)
        return handler

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
                or (operations := topic_operations(topic)).needs_expiry
                or not operations.has_no_write_limits
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
        """Send the error of a failed batch to all its requests. One log line: their ids are consecutive."""
        service, problem, now_us = self._service, api_error_from(error), self._now_us()
        count = sum(len(writes.requests) for writes in all_writes)
        prefix, at = self._next_ids(count)
        if problem.status >= 500:
            fields = {"request_id": f"{prefix.decode()}{at:x}", "requests": count, "topic": all_writes[0].name}
            _log.error("POST %s, %d written together: %s", _WRITE_PATH, count, error, extra={"fields": fields})
        for _, principal, requests, *_ in all_writes:
            service.auth.inflight_limit.release(principal, len(requests))
            service.metrics.count_response_batch(
                _WRITE_PATH, "POST", problem.status, [now_us - since for since in requests.received_us]
            )
            requests.respond(
                [_with_request_id(problem.response(), RequestIds(prefix, at), each) for each in range(len(requests))]
            )
            at += len(requests)

    def _respond(self, done: Appended, offset: int, writes: _WriteBatch) -> None:
        service, (name, principal, requests, counts, durability) = self._service, writes
        now_us, ids = self._now_us(), self._next_ids(len(requests))
        service.auth.inflight_limit.release(principal, len(requests))
        took_us = [now_us - since_us for since_us in requests.received_us]
        service.metrics.counters(name).written += sum(counts)
        service.metrics.count_response_batch(_WRITE_PATH, "POST", 200, took_us)
        bodies = encode_write_responses(name, durability, done, offset, counts, took_us)
        requests.respond_json(bodies, ids)


def _with_request_id(response: Response, ids: RequestIds, at: int) -> Response:
    response.headers = (*response.headers, (b"x-request-id", b"%b%x" % (ids.prefix, ids.first_number + at)))
    return response


_CLAIM_PATH: Final = "/v0/topics/{topic}/claim"
_ACK_PATH: Final = "/v0/topics/{topic}/ack"
_DIFF_PATH: Final = "/v0/topics/{topic}/diff"
_ACK_RESPONSE_BYTES: Final = 300  # the most of a response without its topic's name and the skipped seqs
_ACK_SEQ_BYTES: Final = 21
# A limit this high means that the HTTP layer sends responses of any length without compression.
_UNLIMITED_RESPONSE_BYTES: Final = 1 << 16
_JOIN_RESPONSE_BYTES_MAX: Final = 1 << 14  # a longer body is not copied after its head
ErrorResponse = Callable[[str, str, Exception, Mapping[str, str]], Response]


class FastRequests:
    """Claims, acks and reads, one at a time. Runs on the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes], failed: ErrorResponse) -> None:
        self._service, self._next_id, self._failed = service, next_id, failed
        self._now_us = service.clock.monotonic_us

    def claim_handler(self, name: str, principal: Principal, answer_bytes_max: int) -> SingleHandler | None:
        """The handler of this key's claims from this queue."""
        if answer_bytes_max < _UNLIMITED_RESPONSE_BYTES:
            return None
        return partial(self._handle_claim, name, principal, self._service.auth.generation)

    def ack_handler(self, name: str, principal: Principal, answer_bytes_max: int) -> SingleHandler | None:
        """The handler of this key's acks to this queue."""
        seqs_max = (answer_bytes_max - _ACK_RESPONSE_BYTES - len(name)) // _ACK_SEQ_BYTES
        if seqs_max <= 0:
            return None
        return partial(self._handle_ack, name, principal, seqs_max, self._service.auth.generation)

    def diff_handler(self, name: str, principal: Principal, answer_bytes_max: int) -> SingleHandler | None:
        """The handler of this key's reads of this topic."""
        if answer_bytes_max < _UNLIMITED_RESPONSE_BYTES:
            return None
        return partial(self._handle_diff, name, principal, self._service.auth.generation)

    def _topic(self, name: str, auth_generation: int) -> Topic | None:
        """The topic; None also after keys or hosts were reloaded since the head was checked."""
        service = self._service
        return service.engine.find(name) if service.is_ready and auth_generation == service.auth.generation else None

    def _queue(self, name: str, auth_generation: int) -> Queue | None:
        topic = self._topic(name, auth_generation)
        return None if topic is None else topic.queue()

    def _handle_claim(
        self, name: str, principal: Principal, auth_generation: int, body: bytes, responder: FastResponder
    ) -> bool:
        began_us, service = self._now_us(), self._service
        try:
            queue = self._queue(name, auth_generation)
            request = queues.decode_claim(body)
            if queue is None or not service.push.claim_queues.can_claim_now(queue, request):
                return False
            service.auth.inflight_limit.acquire(principal)
        except (ApiError, Error, BadBody):
            return False
        try:
            leased = operations_of(queue).claim_for_all([request])[0]
            self._respond_claim(name, leased, began_us, responder)
        except Exception as error:  # an error response as on the normal path: jobs may have been leased
            self._respond_error(_CLAIM_PATH, name, began_us, error, responder)
        finally:
            service.auth.inflight_limit.release(principal)
        return True

    def _respond_claim(self, name: str, leased: ClaimResult, began_us: int, responder: FastResponder) -> None:
        service, took_us = self._service, self._now_us() - began_us
        service.metrics.counters(name).claimed += leased.count
        content = queues.encode_claimed(name, leased, leased.ready, took_us / 1000)
        service.metrics.count_responses(_CLAIM_PATH, "POST", 200, took_us / 1e6)
        if len(content) <= _JOIN_RESPONSE_BYTES_MAX:
            responder.respond_json(content, self._next_id())
        else:
            responder.respond(Response(200, content, headers=((b"x-request-id", self._next_id()),)))

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
            if queue is None or topic_operations(queue.topic).has_routers:
                return False
            ack, lease_ids = queues.decode_ack(body)
            if len(ack.seqs) > seqs_max:
                return False
            service.auth.inflight_limit.acquire(principal)
        except (ApiError, Error, BadBody):
            return False
        try:
            future = operations_of(queue).submit_ack(ack.node, ack.seqs, lease_ids)
        except Error:
            service.auth.inflight_limit.release(principal)
            return False
        service.writes.add_done_callback(future, partial(self._respond_ack, name, principal, began_us, responder))
        return True

    def _respond_ack(
        self, name: str, principal: Principal, began_us: int, responder: FastResponder, future: CommitFuture[AckResult]
    ) -> None:
        service = self._service
        service.auth.inflight_limit.release(principal)
        try:
            done = future.wait()  # does not block: it is done
        except Error as error:
            self._respond_error(_ACK_PATH, name, began_us, error, responder)
            return
        took_us = self._now_us() - began_us
        service.metrics.counters(name).acked += done.count
        service.metrics.count_responses(_ACK_PATH, "POST", 200, took_us / 1e6)
        responder.respond_json(queues.encode_acked(name, done, took_us / 1000), self._next_id())

    def _respond_error(self, path: str, name: str, began_us: int, error: Exception, responder: FastResponder) -> None:
        request_id = self._next_id()
        response = self._failed("POST", path, error, {"request_id": request_id.decode(), "topic": name})
        self._service.metrics.count_responses(path, "POST", response.status, (self._now_us() - began_us) / 1e6)
        response.headers = (*response.headers, (b"x-request-id", request_id))
        responder.respond(response)

    def _handle_diff(
        self, name: str, principal: Principal, auth_generation: int, body: bytes, responder: FastResponder
    ) -> bool:
        began_us, service = self._now_us(), self._service
        try:
            topic = self._topic(name, auth_generation)
            if topic is None:
                return False
            diff = api_types.decode_body(records.diff_decoder, body)
            if diff.wait_ms or diff.consistency == "strong":
                return False
            service.auth.inflight_limit.check(principal)
            from_seq = records.clamp_seq(diff.from_seq)
            page = topic_operations(topic).read_cached_json(
                from_seq, *records.page_budget(diff.limit, diff.max_batch_bytes)
            )
            if page is None and (plan := records.plan_read(topic, from_seq, diff)).is_cached:
                page = plan.read()
        except Exception:  # nothing was done: the normal path handles it
            return False
        if page is None:
            return False
        topic_operations(topic).record_access()
        service.metrics.count_read(name, page.counts.rows, gap=page.gap is not None)
        took_us = self._now_us() - began_us
        service.metrics.count_responses(_DIFF_PATH, "POST", 200, took_us / 1e6)
        parts = records.encode_page_parts(name, page, took_us / 1000, with_counts=diff.include_counts)
        responder.respond_json_parts(parts, self._next_id())
        return True
