"""One topic as Server-Sent Events, in one request, for browsers; and the read tokens of their pages.

    new EventSource("/v0/topics/orders/events?from_seq=0&token=tlt_…")

The events are those of a watch session (`push/peers.py`); there is no session, so the id of an event has everything
that the next request needs: the position, and the epoch of the topic. A browser sends the last id by itself.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Final

from tidelog import api_types
from tidelog.api_types import (
    HEARTBEAT_MS_DEFAULT,
    HEARTBEAT_MS_MAX,
    READ_LIMIT,
    TOKEN_NAMES_MAX,
    TOKEN_TTL_MS_MAX,
    TOKEN_TTL_MS_MIN,
    WATCH_BYTES,
)
from tidelog.engine import SEQ_MAX, FieldSelection, Topic
from tidelog.engine.read import parse_nodes
from tidelog.engine.topic import topic_operations
from tidelog.http.interface import AnyResponse, Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.handlers.records import clamp_seq, page_budget, wants_strong_read
from tidelog.server.handlers.sse import EVENT_STREAM, STREAM_HEADERS, check_accepts_events, decode_last_event_id
from tidelog.server.handlers.topics import topic_state
from tidelog.server.openapi import (
    CONSISTENCY_PARAM,
    COUNT,
    STRING,
    Parameter,
    flag_param,
    integer_param,
    operation,
    text_schema,
)
from tidelog.server.push.page_cache import ReadOptions
from tidelog.server.push.peers import TopicSsePeer
from tidelog.server.push.topic_stream import EPOCH_PREFIX, StreamSlot, TopicStream
from tidelog.server.read_tokens import ReadGrant
from tidelog.server.request import RequestContext
from tidelog.server.service import Service

_TOKEN_NAME_CHARS_MAX: Final = 255
_token_decoder = api_types.body_decoder(api_types.ReadTokenToMake)


@operation("createToken", request=api_types.ReadTokenToMake, response=responses.ReadToken)
def create_token(context: RequestContext) -> Response:
    """Create a read token for a browser.

    It follows the named topics, and those with the prefixes, by `GET …/events?token=`, until it expires. It never
    allows more than the key, and ends with the key and with the server.
    """
    body = context.decode_body(_token_decoder)
    names = [*body.topics, *body.prefixes]
    if not 1 <= len(names) <= TOKEN_NAMES_MAX:
        raise ApiError(
            "invalid_request", f"a token is for 1 to {TOKEN_NAMES_MAX} topics and prefixes; nothing was done"
        )
    if not all(1 <= len(name) <= _TOKEN_NAME_CHARS_MAX for name in names):
        raise ApiError(
            "invalid_request",
            f"a topic or prefix of a token has 1 to {_TOKEN_NAME_CHARS_MAX} characters; nothing was done",
        )
    if not TOKEN_TTL_MS_MIN <= body.ttl_ms <= TOKEN_TTL_MS_MAX:
        raise ApiError(
            "invalid_request",
            f"ttl_ms is from {TOKEN_TTL_MS_MIN} to {TOKEN_TTL_MS_MAX}; nothing was done",
        )
    for name in names:
        # A prefix that begins with one of the key's prefixes covers no name beyond these.
        context.check_name_allowed(name)
    tokens = context.service.read_tokens
    token, expires_ms = tokens.issue(context.principal, body.topics, body.prefixes, body.ttl_ms)
    response = context.json(responses.ReadToken(token, expires_ms, body.topics, body.prefixes))
    response.headers = ((b"cache-control", b"no-store"),)
    return response


@operation(
    "followTopic",
    params=(
        Parameter("from_seq", COUNT, "The last seq that the reader has. Default: 0, before the first record."),
        flag_param("tail", False, "Only records from now on, instead of those after from_seq."),
        integer_param("limit", "Records of one event.", READ_LIMIT, minimum=1, maximum=api_types.READ_LIMIT_MAX),
        integer_param(
            "heartbeat_ms", "The longest time without an event.", HEARTBEAT_MS_DEFAULT, 1_000, HEARTBEAT_MS_MAX
        ),
        Parameter("node", STRING, "Without records of these nodes, separated by commas."),
        flag_param("include_tags", False),
        flag_param("include_meta", True),
        flag_param("include_data", True),
        CONSISTENCY_PARAM,
        Parameter("Last-Event-ID", STRING, "The position to resume from, in place of from_seq.", "header"),
    ),
    errors=("invalid_request", "topic_not_found", "not_acceptable"),
    response_content={EVENT_STREAM.decode(): text_schema("record, tombstone, caught-up, topic-deleted, error.")},
)
async def follow_topic(context: RequestContext) -> AnyResponse:
    """Stream the records of a topic as they are written.

    On a server with keys, needs a key in the header or a read token in the query.
    """
    request, service, query = context.request, context.service, context.query
    check_accepts_events(request.header(b"accept"))
    options, heartbeat_ms, from_seq = _parse_options(context), _heartbeat_ms(context), query.number("from_seq", 0)
    tail = query.flag("tail", False)
    topic = context.get_topic()
    if options.strong:
        topic_operations(topic).check_strong_supported()
    if request.method == "HEAD":
        return Response(200, content_type=EVENT_STREAM, headers=STREAM_HEADERS)
    state = await topic_state(service, topic)
    cursors = _start_position(
        topic, decode_last_event_id(request.header(b"last-event-id")), state.head_seq if tail else clamp_seq(from_seq)
    )
    slot = StreamSlot(service, context.principal)
    run = partial(_run_events, service, topic, cursors, options, heartbeat_ms, context.grant, slot)
    return Stream(200, run, EVENT_STREAM, STREAM_HEADERS)


def _parse_options(context: RequestContext) -> ReadOptions:
    query = context.query
    limit, bytes_max = page_budget(query.number("limit", READ_LIMIT), WATCH_BYTES)
    show = FieldSelection(
        data=query.flag("include_data", True),
        tags=query.flag("include_tags", False),
        meta=query.flag("include_meta", True),
    )
    nodes = query.text("node")
    excluded = parse_nodes(nodes.split(",") if nodes else None)
    return ReadOptions(limit, bytes_max, excluded, show, wants_strong_read(context))


def _heartbeat_ms(context: RequestContext) -> int:
    minimum = context.service.config.heartbeat_ms_min
    return min(max(context.query.number("heartbeat_ms", HEARTBEAT_MS_DEFAULT), minimum), HEARTBEAT_MS_MAX)


def _start_position(topic: Topic, last_event_id: dict[str, int], from_seq: int) -> dict[str, int]:
    """Return the cursors of a stream: the position, and the epoch that it belongs to. The position of an earlier topic
    of this name is after every seq, which reads as a `recreated` gap and then the first record."""
    name, seq = topic.name, from_seq
    known = last_event_id.get(name, -1)
    if known >= 0:
        seq = clamp_seq(known) if last_event_id.get(EPOCH_PREFIX + name, topic.epoch) == topic.epoch else SEQ_MAX
    return {name: seq, EPOCH_PREFIX + name: topic.epoch}


async def _run_events(
    service: Service,
    topic: Topic,
    cursors: dict[str, int],
    options: ReadOptions,
    heartbeat_ms: int,
    grant: ReadGrant | None,
    slot: StreamSlot,
    sink: Sink,
) -> None:
    events = TopicSsePeer(sink, cursors, service.loop.time)
    delivery = TopicStream(service, events, cursors)

    def on_token_expired() -> None:
        events.send_error(
            topic.name, "token_expired", "the token of this stream has expired; follow on with a new token"
        )
        delivery.end()

    expiry = None
    with slot.open(events, heartbeat_ms), closing(delivery):
        events.send_retry()
        if grant is not None:
            expiry = service.loop.call_later(service.read_tokens.remaining_s(grant), on_token_expired)
        try:
            if not service.stopping.is_set():
                current = service.engine.find(topic.name)
                if current is None or current.epoch != topic.epoch:
                    current = None  # dropped since the request was checked
                delivery.follow(topic.name, current, options, cursors[topic.name])
            await delivery.run()
        finally:
            if expiry is not None:
                expiry.cancel()
