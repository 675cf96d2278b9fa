"""Records over HTTP: read after a cursor with an optional long poll, find a time, delete below a seq or by tag."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

import msgspec

from tidelog import api_types
from tidelog.api_types import READ_BYTES, READ_BYTES_MAX, READ_LIMIT, READ_LIMIT_MAX, WAIT_MS_MAX
from tidelog.engine import SEQ_MAX, FieldSelection, JsonPage, Topic
from tidelog.engine.delete import parse_tag_match
from tidelog.engine.read import ExcludedNodes, parse_nodes
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import AnyResponse, Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext

diff_decoder = api_types.json_decoder(api_types.Diff)
_encode = msgspec.json.Encoder().encode


def page_budget(limit: int, bytes_max: int) -> tuple[int, int]:
    """The most records and bytes of a page; 0 is the default."""
    return min(limit or READ_LIMIT, READ_LIMIT_MAX), min(bytes_max or READ_BYTES, READ_BYTES_MAX)


def clamp_seq(given: int) -> int:
    """Reduce a cursor to the largest seq of the engine."""
    return min(given, SEQ_MAX)


def wants_strong_read(context: RequestContext) -> bool:
    """Whether the query asks only for records that survive a power cut."""
    named = context.query.text("consistency") or "eventual"
    if named not in ("eventual", "strong"):
        raise ApiError("invalid_request", f"consistency is eventual or strong, not {named[:80]!r}; nothing was read")
    return named == "strong"


@operation("diff", request=api_types.Diff, response=responses.Page, errors=("topic_not_found",), body_required=False)
def diff(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """Read records after a seq."""
    body = context.decode_body(diff_decoder, default=api_types.Diff())
    return read_after(context, context.get_topic(), clamp_seq(body.from_seq), body)


class ReadPlan(NamedTuple):
    """The parameters of one page."""

    topic: Topic
    from_seq: int
    limit: int
    bytes_max: int
    nodes: ExcludedNodes
    show: FieldSelection

    @property
    def is_cached(self) -> bool:
        """Whether the read does not block."""
        return topic_operations(self.topic).can_read_without_blocking(
            self.from_seq, 0 if self.nodes else self.limit, self.bytes_max
        )

    def read_cached(self) -> JsonPage | None:
        """The page, or None where the read would block."""
        page = topic_operations(self.topic).read_cached_json(self.from_seq, self.limit, self.bytes_max)
        return page if page is not None or not self.is_cached else self.read()

    def read(self) -> JsonPage:
        return topic_operations(self.topic).read_json(
            self.from_seq, self.limit, self.bytes_max, nodes=self.nodes, show=self.show
        )


def plan_read(topic: Topic, from_seq: int, body: api_types.Diff | api_types.Fetch) -> ReadPlan:
    limit, bytes_max = page_budget(body.limit, body.max_batch_bytes)
    show = FieldSelection(tags=body.include_tags, meta=body.include_meta)
    return ReadPlan(topic, from_seq, limit, bytes_max, parse_nodes(body.node), show)


def read_after(
    context: RequestContext, topic: Topic, from_seq: int, body: api_types.Diff | api_types.Fetch
) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """Respond with the records after a cursor."""
    topic_operations(topic).record_access()
    plan = plan_read(topic, from_seq, body)
    wait_ms = min(body.wait_ms, WAIT_MS_MAX)
    if wait_ms:
        return _long_poll(context, plan, wait_ms)
    page = plan.read_cached()
    return _read_blocking(context, plan) if page is None else page_response(context, page)


async def _read_blocking(context: RequestContext, plan: ReadPlan) -> Response:
    return page_response(context, await context.service.run_blocking(plan.read))


async def _long_poll(context: RequestContext, plan: ReadPlan, wait_ms: int) -> Response:
    """Read; while there is no record, wait for a write and read again until the time is over."""
    service, topic = context.service, plan.topic
    woken = asyncio.Event()
    until_ms = service.clock.monotonic_ms() + wait_ms
    service.push.notifiers.add(topic, woken.set)  # before the first read
    try:
        while True:
            woken.clear()
            context.check_key()
            page = (
                plan.read()
                if topic_operations(topic).can_read_without_blocking(plan.from_seq)
                else await service.run_blocking(plan.read)
            )
            left_ms = until_ms - service.clock.monotonic_ms()
            if page.text or page.gap or not page.caught_up or left_ms <= 0 or service.stopping.is_set():
                return page_response(context, page)
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await woken.wait()
            except TimeoutError:
                until_ms = service.clock.monotonic_ms()  # one last read: a deferred topic sends no notification
    finally:
        service.push.notifiers.remove(topic, woken.set)


def page_response(context: RequestContext, page: JsonPage) -> Response:
    context.service.metrics.count_read(context.topic, page.counts.rows, gap=page.gap is not None)
    return Response(200, b"".join(encode_page_parts(context.topic, page, context.elapsed_ms())))


def encode_page_parts(name: str, page: JsonPage, elapsed_ms: float) -> tuple[bytes, bytes, bytes]:
    """Encode the body of a page in three pieces: the records are stored as JSON text."""
    head = b'{"topic":%b,"records":[' % _encode(name)
    tail = (
        b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
        b'"performance":{"server_total_ms":%b,"records_scanned":%d}}'
    ) % (
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        b"true" if page.caught_up else b"false",
        b"null" if page.gap is None else _encode(page.gap._asdict()),
        page.head_seq - page.next_from_seq,
        _encode(elapsed_ms),
        sum(page.counts),
    )
    return head, page.text, tail


_seek_decoder = api_types.json_decoder(api_types.Seek)


@operation("seek", request=api_types.Seek, response=responses.Sought, errors=("topic_not_found",))
async def seek_by_time(context: RequestContext) -> Response:
    """Find the first record of a time or later."""
    body = context.decode_body(_seek_decoder)
    topic = context.get_topic()
    seq, head_seq, earliest_seq = await context.service.run_blocking(lambda: _find_seq(topic, body.ts))
    return context.json(responses.Sought(context.topic, body.ts, seq, seq - 1, head_seq, earliest_seq))


def _find_seq(topic: Topic, ts_ms: int) -> tuple[int, int, int]:
    state = topic.state()
    seq = topic.seek(ts_ms)
    # A record may be appended between the two calls: the returned head is never below the found seq.
    return seq, max(state.head_seq, seq - 1), state.earliest_seq


_delete_decoder = api_types.json_decoder(api_types.Delete)


@operation("deleteRecords", request=api_types.Delete, response=responses.Deleted, errors=("topic_not_found",))
async def delete_records(context: RequestContext) -> Response:
    """Delete records below a seq, by tag, or both."""
    body = context.decode_body(_delete_decoder)
    if body.before_seq is None and body.match is None:
        raise ApiError("invalid_request", "a delete needs before_seq, match or both; nothing was deleted")
    match, before = body.match, None if body.before_seq is None else clamp_seq(body.before_seq)
    parse_tag_match(match)  # an invalid match is refused also where the topic does not exist
    service, actor = context.service, context.principal.name
    topic = context.get_topic()
    done = await service.run_blocking(lambda: topic.delete(match=match, before_seq=before, actor=actor))
    return context.json(
        responses.Deleted(context.topic, done.deleted, done.earliest_seq, done.head_seq, done.count, done.bytes)
    )
