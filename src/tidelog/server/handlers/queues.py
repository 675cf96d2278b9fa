"""Queues over HTTP: claim, ack, nack, extend, history and redrive.

A claim checks its body, then the queue, then the node; the other requests check their whole body first. Responses are
built from text: the data of a job is not decoded. A redrive is limited in records and in seconds, so that the request
ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, cast

import msgspec
import pyarrow as pa

from tidelog import api_types
from tidelog.api_types import HISTORY_LIMIT, HISTORY_LIMIT_MAX
from tidelog.engine import CommitFuture, Record
from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.engine.queues import AckResult, ClaimRequest, ClaimResult, ExtendResult, History, Queue, parse_lease_token
from tidelog.engine.queues.dead_letter import DEAD_LETTER_FROM
from tidelog.engine.queues.history import HISTORY_SCHEMA
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import AnyResponse, Response
from tidelog.server import response_types as responses
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError
from tidelog.server.handlers.records import clamp_seq
from tidelog.server.openapi import Parameter, binary_schema, integer_param, operation, text_schema
from tidelog.server.request import ARROW, JSON_TYPE, NDJSON, RequestContext

QUEUE_ERRORS: Final = ("topic_not_found", "not_a_queue")
_claim_decoder = api_types.body_decoder(api_types.Claim)
_ack_decoder = api_types.body_decoder(api_types.Ack)
_reject_decoder = api_types.body_decoder(api_types.Reject)
_nack_decoder = api_types.body_decoder(api_types.Nack)
_extend_decoder = api_types.body_decoder(api_types.Extend)
_encode = msgspec.json.Encoder().encode


def requested_queue(context: RequestContext) -> Queue:
    """The queue of the path. Raises TopicNotFound or NotAQueue."""
    return context.get_topic().queue()


def check_node(node: str) -> None:
    if not node:
        raise ApiError(
            "invalid_request", "node is empty: it names the holder of the leases; nothing was done, give a node"
        )
    if len(node.encode("utf-8", "surrogatepass")) > api_types.NODE_BYTES_MAX:
        raise ApiError("invalid_request", f"a node has at most {api_types.NODE_BYTES_MAX} bytes; nothing was done")


def clamp_lease_ms(given: int | None) -> int | None:
    """A lease time within its bounds; None: the queue's default."""
    return None if given is None else min(max(given, LEASE_MS_MIN), LEASE_MS_MAX)


# ── claim ─────────────────────────────────────────────────────────────────────────────────────────


@operation("claim", request=api_types.Claim, response=responses.Claimed, errors=QUEUE_ERRORS)
def claim_jobs(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """Lease jobs of a queue."""
    if not context.request.body:
        raise ApiError("invalid_request", 'a claim needs a body with its node: {"node": …}; nothing was done')
    body = context.decode_body(_claim_decoder)
    queue = requested_queue(context)
    request = _claim_request(body)
    leased = context.service.push.claim_queues.try_claim(queue, request)
    return _claim_async(context, queue, request) if leased is None else _claim_response(context, leased, leased.ready)


def decode_claim(text: bytes) -> ClaimRequest:
    """Decode the body of a claim. Raises BadBody or ApiError."""
    return _claim_request(api_types.decode_body(_claim_decoder, text))


def _claim_request(body: api_types.Claim) -> ClaimRequest:
    check_node(body.node)
    jobs_max = min(body.max or 1, api_types.CLAIM_JOBS_MAX)
    return ClaimRequest(body.node, jobs_max, clamp_lease_ms(body.lease_ms), bytes_max=api_types.CLAIM_BYTES_MAX)


async def _claim_async(context: RequestContext, queue: Queue, request: ClaimRequest) -> Response:
    leased = await context.service.push.claim_queues.queue_for(queue).claim(request, context.principal)
    counts = (
        queue.counts()
        if topic_operations(queue.topic).is_floor_durable
        else await context.service.run_blocking(queue.counts)
    )
    return _claim_response(context, leased, counts.ready)


def _claim_response(context: RequestContext, leased: ClaimResult, ready: int) -> Response:
    context.service.metrics.counters(context.topic).claimed += leased.count
    return Response(200, encode_claimed(context.topic, leased, ready, context.elapsed_ms()))


def encode_claimed(topic: str, leased: ClaimResult, ready: int, elapsed_ms: float) -> bytes:
    """Encode the response to a claim."""
    return b'{"topic":%b,"claimed":[%b],"count":%d,"ready":%d,"performance":{"server_total_ms":%b}}' % (
        _encode(topic),
        b",".join(leased.to_json_texts()),
        leased.count,
        ready,
        _encode(elapsed_ms),
    )


# ── ack, nack, extend ─────────────────────────────────────────────────────────────────────────────


def decode_ack(text: bytes) -> tuple[api_types.Ack, list[int | None] | None]:
    """Decode and check the body of an ack; return it with its lease ids. Raises BadBody, ApiError or BadInput."""
    body = api_types.decode_body(_ack_decoder, text)
    return body, _check_settle(body)


def encode_acked(topic: str, done: AckResult, elapsed_ms: float) -> bytes:
    """Encode the response to an ack."""
    return b'{"topic":%b,"acked":%d,"skipped":%b,"ready":%d,"in_flight":%d,"performance":{"server_total_ms":%b}}' % (
        _encode(topic),
        done.count,
        _encode(done.skipped),
        done.ready,
        done.in_flight,
        _encode(elapsed_ms),
    )


@operation("ack", request=api_types.Ack, response=responses.Acked, errors=(*QUEUE_ERRORS, "batch_too_large"))
def ack_jobs(context: RequestContext) -> Coroutine[Any, Any, AnyResponse] | None:
    """Remove finished jobs.

    Jobs that the node does not hold, or not under that lease, are skipped; this is no error.
    """
    body = context.decode_body(_ack_decoder)
    lease_ids = _check_settle(body)
    queue = requested_queue(context)
    submit = partial(operations_of(queue).submit_ack, body.node, body.seqs, lease_ids)
    if topic_operations(queue.topic).has_routers:
        return _ack_routed(context, submit)
    context.respond_when_done(submit(), partial(_ack_response, context))
    return None


async def _ack_routed(context: RequestContext, submit: Callable[[], CommitFuture[AckResult]]) -> AnyResponse:
    """Ack jobs of a queue with routers: they are forwarded first, which may wait for a disk."""
    done = await context.service.writes.wait(await context.service.run_blocking(submit))
    return _ack_response(context, done)


@operation("nack", request=api_types.Nack, response=responses.Nacked, errors=(*QUEUE_ERRORS, "batch_too_large"))
def nack_jobs(context: RequestContext) -> None:
    """Return jobs to the queue, at once or after a delay.

    Jobs that the node does not hold, or not under that lease, are skipped; this is no error.
    """
    body = context.decode_body(_nack_decoder)
    lease_ids = _check_settle(body)
    delay_ms = min(body.delay_ms, api_types.DELAY_MS_MAX)
    future = operations_of(requested_queue(context)).submit_nack(
        body.node, body.seqs, lease_ids, delay_ms, _job_error(body.error)
    )
    context.respond_when_done(future, partial(_nack_response, context))


@operation("reject", request=api_types.Reject, response=responses.Rejected, errors=(*QUEUE_ERRORS, "batch_too_large"))
async def reject_jobs(context: RequestContext) -> Response:
    """Move jobs to the dead-letter topic now, however often they were delivered.

    Jobs that the node does not hold, or not under that lease, are skipped; this is no error.
    """
    body = context.decode_body(_reject_decoder)
    lease_ids = _check_settle(body)
    operations, error = operations_of(requested_queue(context)), _job_error(body.error)
    done = await context.service.run_blocking(lambda: operations.reject(body.node, body.seqs, lease_ids, error))
    return context.json(responses.Rejected(context.topic, done.count, done.skipped, done.ready, done.in_flight))


def _job_error(error: api_types.JobError | None) -> tuple[str, str] | None:
    return None if error is None else (error.message, error.type)


@operation("extend", request=api_types.Extend, response=responses.Extended, errors=(*QUEUE_ERRORS, "batch_too_large"))
def extend_leases(context: RequestContext) -> None:
    """Extend leases, from now on.

    Jobs that the node does not hold, or not under that lease, are skipped; this is no error.
    """
    body = context.decode_body(_extend_decoder)
    lease_ids = _check_settle(body)
    length_ms = clamp_lease_ms(body.lease_ms)
    assert length_ms is not None, "the type requires lease_ms"
    operations = operations_of(requested_queue(context))
    future = operations.submit_extend(body.node, body.seqs, lease_ids, lease_ms=length_ms)
    context.respond_when_done(future, partial(_extend_response, context))


def _check_settle(body: api_types.Ack) -> list[int | None] | None:
    """Check a body in the order of the contract; return its lease ids, None where it has none."""
    lease_ids = [parse_lease_token(token) for token in body.lease_ids]
    check_node(body.node)
    count = len(body.seqs)
    if count > api_types.SETTLE_SEQS_MAX:
        raise ApiError(
            "batch_too_large",
            f"{count} seqs in one call, the limit is {api_types.SETTLE_SEQS_MAX}; nothing was done, send them in parts",
            {"seqs": count, "max": api_types.SETTLE_SEQS_MAX},
        )
    if lease_ids and len(lease_ids) != count:
        raise ApiError(
            "invalid_request",
            f"{count} seqs came with {len(lease_ids)} lease_ids; nothing was done, send one for each seq",
        )
    return lease_ids or None


def _ack_response(context: RequestContext, done: AckResult) -> Response:
    context.service.metrics.counters(context.topic).acked += done.count
    return Response(200, encode_acked(context.topic, done, context.elapsed_ms()))


def _nack_response(context: RequestContext, done: AckResult) -> Response:
    context.service.metrics.counters(context.topic).nacked += done.count
    return context.json(responses.Nacked(context.topic, done.count, done.skipped, done.ready, done.in_flight))


def _extend_response(context: RequestContext, done: ExtendResult) -> Response:
    context.service.metrics.counters(context.topic).extended += done.count
    deadlines = {str(seq): deadline for seq, deadline in done.deadlines.items()}
    return context.json(responses.Extended(context.topic, done.count, done.skipped, deadlines))


HISTORY_COLUMNS: Final = ("at", *HISTORY_SCHEMA.names)
_HISTORY_SCHEMA: Final = pa.schema([pa.field("at", pa.int64(), nullable=False), *HISTORY_SCHEMA])
_HISTORY_FORMATS: Final = {"json": JSON_TYPE, "ndjson": NDJSON, "arrow": ARROW}


@operation(
    "history",
    response=responses.History,
    params=(
        integer_param("from_seq", "The last seq of the history that the reader has.", 0),
        integer_param(
            "limit",
            "The most events to return.",
            api_types.HISTORY_LIMIT,
            minimum=1,
            maximum=api_types.HISTORY_LIMIT_MAX,
        ),
        Parameter("format", {"enum": ["json", "ndjson", "arrow"]}, "Instead of an Accept header."),
    ),
    errors=("invalid_request", *QUEUE_ERRORS, "not_acceptable"),
    response_content={
        NDJSON.decode(): text_schema("One HistoryEvent per line."),
        ARROW.decode(): binary_schema(f"An IPC stream with the columns {', '.join(HISTORY_COLUMNS)}."),
    },
)
async def queue_history(context: RequestContext) -> Response:
    """Read the events of a queue's jobs, oldest first."""
    kind = _negotiate_history_format(context)
    queue = requested_queue(context)
    from_seq = clamp_seq(context.query.number("from_seq", 0))
    limit = min(context.query.number("limit", HISTORY_LIMIT) or HISTORY_LIMIT, HISTORY_LIMIT_MAX)
    history: History = queue.history()
    events = await context.service.run_blocking(lambda: history.read(from_seq, limit))
    if kind == ARROW:
        return Response(200, _encode_history_arrow(events), ARROW)
    if kind == NDJSON:
        return Response(200, b"".join(_encode(event) + b"\n" for event in events), NDJSON)
    next_from_seq = events[-1]["at"] if events else from_seq
    rows = cast(list[responses.HistoryEvent], events)  # as they are stored
    return context.json(responses.History(context.topic, rows, len(rows), next_from_seq))


def _negotiate_history_format(context: RequestContext) -> bytes:
    """The media type: that of the query, else that of the Accept header, else JSON."""
    format = context.query.text("format")
    if format is not None:
        if format not in _HISTORY_FORMATS:
            raise ApiError("invalid_request", f"format is json, ndjson or arrow, not {format[:80]!r}; nothing was read")
        return _HISTORY_FORMATS[format]
    header = (context.request.header(b"accept") or b"*/*").lower()
    for item in header.split(b","):
        name = item.partition(b";")[0].strip()
        if name in (b"*/*", b"application/*", b""):
            return JSON_TYPE
        if name in _HISTORY_FORMATS.values():
            return name
    known = " or ".join(kind.decode() for kind in _HISTORY_FORMATS.values())
    raise ApiError("not_acceptable", f"a history is sent as {known}; nothing was read, accept one of them")


def _encode_history_arrow(events: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(events, schema=_HISTORY_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _HISTORY_SCHEMA) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


_redrive_decoder = api_types.body_decoder(api_types.Redrive)


class _RedriveFilter:
    """Selects the records of one step: after those of earlier steps, and only for queues that the key may use."""

    def __init__(self, principal: Principal, to: str | None) -> None:
        self._may_use_name, self._to = principal.may_use_name, to
        self._last_seq = 0
        self.remaining = 0  # records of this step

    def __call__(self, record: Record) -> bool:
        if record.seq <= self._last_seq or not self.remaining:
            return False
        self._last_seq = record.seq
        queue: Any = self._to if self._to is not None else (record.meta or {}).get(DEAD_LETTER_FROM)
        if isinstance(queue, str) and not self._may_use_name(queue):
            return False
        self.remaining -= 1
        return True


@operation("redrive", request=api_types.Redrive, response=responses.Redriven, errors=QUEUE_ERRORS, body_required=False)
async def redrive_records(context: RequestContext) -> Response:
    """Move records of a dead-letter topic back into their queues.

    A crash during a redrive may move one batch twice and loses none. A key with name prefixes moves only records of
    queues that it may use.
    """
    body = context.decode_body(_redrive_decoder, default=api_types.Redrive())
    if body.rate == 0:
        raise ApiError(
            "invalid_request", "rate must be at least 1 record per second; nothing was moved, raise it or leave it out"
        )
    if body.to is not None:
        context.check_name_allowed(body.to)
    topic = context.get_topic()
    remaining = min(body.limit or api_types.REDRIVE_LIMIT, api_types.REDRIVE_RECORDS_MAX)
    if body.rate is not None:
        remaining = min(remaining, body.rate * api_types.REDRIVE_S_MAX)
    step = body.rate or remaining
    redrive_filter = _RedriveFilter(context.principal, body.to)
    redrive_step = partial(topic.redrive, to=body.to, match=body.match, where=redrive_filter)
    queues: Counter[str] = Counter()
    skipped = 0
    while True:
        redrive_filter.remaining = size = min(step, remaining)
        done = await context.service.run_blocking(redrive_step)
        queues.update(done.queues)
        skipped += done.skipped
        remaining -= size
        if remaining <= 0 or redrive_filter.remaining or context.service.stopping.is_set():
            break
        await asyncio.sleep(1.0)
    return context.json(responses.Redriven(context.topic, queues.total(), dict(queues), skipped))
