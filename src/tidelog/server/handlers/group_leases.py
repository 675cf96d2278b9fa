"""Consumers that share a group, over HTTP: claim a range of records, ack, release and extend it, leave."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET

from tidelog import api_types
from tidelog.api_types import WAIT_MS_MAX
from tidelog.engine import FieldSelection, JsonPage
from tidelog.engine.group_leases import RangeLease
from tidelog.engine.groups import claim_range, commit_finished, leases_of
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.handlers.records import encode_page_parts, page_budget
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext

_claim_decoder = api_types.body_decoder(api_types.ClaimRange)
_settle_decoder = api_types.body_decoder(api_types.SettleRanges)
_extend_decoder = api_types.body_decoder(api_types.ExtendRanges)
_leave_decoder = api_types.body_decoder(api_types.LeaveGroup)
_encode = msgspec.json.Encoder().encode


@operation(
    "claimRange",
    request=api_types.ClaimRange,
    response=responses.RangeClaimed,
    errors=("topic_not_found", "invalid_request"),
)
async def claim(context: RequestContext) -> Response:
    """Lease the next records to a consumer of a group.

    No other consumer of the group gets them until the lease ends or is released. `lease` is null where there is no
    record.
    """
    body, service = context.decode_body(_claim_decoder), context.service
    topic = context.get_topic()
    group, operations = topic.group(context.path_names[1]), topic_operations(topic)
    operations.record_access()
    limit, bytes_max = page_budget(body.limit, body.max_batch_bytes)
    show = FieldSelection(tags=body.include_tags, meta=body.include_meta)

    def read_range(from_seq: int, to_seq: int | None) -> JsonPage:
        return operations.read_json(from_seq, limit, bytes_max, show=show, to_seq=to_seq)

    def work() -> tuple[RangeLease, JsonPage] | None:
        return claim_range(group, body.consumer, read_range, lease_ms=body.lease_ms)

    leases, clock, woken = leases_of(group), service.clock, asyncio.Event()
    until_ms = clock.monotonic_ms() + min(body.wait_ms, WAIT_MS_MAX)

    def wake_from_thread() -> None:
        service.loop.call_soon_threadsafe(woken.set)

    service.push.notifiers.add(topic, woken.set)  # before the first claim
    leases.add_listener(wake_from_thread)
    try:
        while True:
            woken.clear()
            context.check_key()
            claimed = await service.run_read(topic, group.position, work)
            if claimed is None and leases.can_commit:
                await service.run_blocking(lambda: commit_finished(group))
            now_ms, ends_ms = clock.monotonic_ms(), leases.next_deadline_ms()
            if claimed is not None or now_ms >= until_ms or service.stopping.is_set():
                return _claim_response(context, body, claimed)
            try:
                async with asyncio.timeout(max(min(until_ms, ends_ms or until_ms) - now_ms, 1) / 1000):
                    await woken.wait()
            except TimeoutError:
                pass  # the time is over, or a lease of another consumer ended
    finally:
        service.push.notifiers.remove(topic, woken.set)
        leases.remove_listener(wake_from_thread)


def _claim_response(
    context: RequestContext, body: api_types.ClaimRange, claimed: tuple[RangeLease, JsonPage] | None
) -> Response:
    if claimed is None:
        return context.json(responses.RangeClaimed(context.topic, None, [], UNSET))
    lease, page = claimed
    context.service.metrics.count_read(context.topic, page.counts.rows, gap=page.gap is not None)
    fields = responses.RangeLease(lease.lease_id, lease.consumer, lease.first_seq, lease.last_seq, body.lease_ms)
    head, text, tail = encode_page_parts(context.topic, page, context.elapsed_ms(), with_counts=body.include_counts)
    return Response(200, b'{"lease":' + _encode(fields) + b"," + head[1:] + text + tail)


@operation(
    "ackRanges",
    request=api_types.SettleRanges,
    response=responses.RangesSettled,
    errors=("topic_not_found", "invalid_request"),
)
async def ack(context: RequestContext) -> Response:
    """Finish leased ranges. The group's position moves to the end of the finished ranges that follow it.

    Leases in `void` had ended; their records are delivered again.
    """
    body = context.decode_body(_settle_decoder)
    group = context.get_topic().group(context.path_names[1])

    def work() -> list[int]:
        return [lease_id for lease_id in body.lease_ids if not group.ack(body.consumer, lease_id)]

    void = await context.service.run_blocking(work)
    return _settled(context, body.lease_ids, void, group.position)


@operation(
    "releaseRanges",
    request=api_types.SettleRanges,
    response=responses.RangesSettled,
    errors=("topic_not_found", "invalid_request"),
)
async def release(context: RequestContext) -> Response:
    """Return leased ranges unfinished; the next claim gets them."""
    body = context.decode_body(_settle_decoder)
    group = context.get_topic().group(context.path_names[1])
    void = [lease_id for lease_id in body.lease_ids if not group.release(body.consumer, lease_id)]
    return _settled(context, body.lease_ids, void, group.position)


@operation(
    "extendRanges",
    request=api_types.ExtendRanges,
    response=responses.RangesSettled,
    errors=("topic_not_found", "invalid_request"),
)
async def extend(context: RequestContext) -> Response:
    """Let leases end `lease_ms` from now."""
    body = context.decode_body(_extend_decoder)
    group = context.get_topic().group(context.path_names[1])
    void = [lease_id for lease_id in body.lease_ids if not group.extend(body.consumer, lease_id, body.lease_ms)]
    return _settled(context, body.lease_ids, void, group.position)


def _settled(context: RequestContext, lease_ids: list[int], void: list[int], position: int) -> Response:
    return context.json(responses.RangesSettled(context.topic, len(lease_ids) - len(void), void, position))


@operation("leaveGroup", request=api_types.LeaveGroup, response=responses.GroupLeft, errors=("topic_not_found",))
async def leave(context: RequestContext) -> Response:
    """Return all ranges of a consumer to the other consumers of the group."""
    body = context.decode_body(_leave_decoder)
    group = context.get_topic().group(context.path_names[1])
    return context.json(responses.GroupLeft(context.topic, group.name, group.leave(body.consumer)))


@operation("listConsumers", response=responses.ConsumerList, errors=("topic_not_found",))
async def list_consumers(context: RequestContext) -> Response:
    """List the consumers of a group that have leases now."""
    group = context.get_topic().group(context.path_names[1])
    rows = [responses.Consumer(*state) for state in group.consumers()]
    return context.json(responses.ConsumerList(context.topic, group.name, rows))
