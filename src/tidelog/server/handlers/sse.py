"""Server-Sent Events: records of a watch session's topics, and jobs of a queue.

A job stream (`push/peers.py` has the frames of both):

    capacity? ──► wait in the claim queue ──► jobs, leased to this connection ──► frames ──► capacity? …

A worker holds at most `max` jobs: every ack, nack and expired lease frees capacity for another. When the connection
ends, its leases end at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog import api_types
from tidelog.api_types import HEARTBEAT_MS_MAX, WATCH_TOPICS_MAX, Cursor
from tidelog.engine import FieldSelection, Topic
from tidelog.engine.queues import ClaimRequest, Queue
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.read import parse_nodes
from tidelog.engine.topic import topic_operations
from tidelog.errors import Error
from tidelog.http.interface import AnyResponse, Headers, Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.auth import Principal, bearer_token
from tidelog.server.errors import ApiError
from tidelog.server.handlers.queues import QUEUE_ERRORS, check_node, clamp_lease_ms, requested_queue
from tidelog.server.handlers.records import page_budget
from tidelog.server.handlers.topics import topic_state
from tidelog.server.openapi import (
    LEASE_MS,
    NODE_NAME,
    STRING,
    Parameter,
    flag_param,
    integer_param,
    operation,
    text_schema,
)
from tidelog.server.push.page_cache import ReadOptions
from tidelog.server.push.peers import (
    HIGH_WATER_BYTES,
    JobSsePeer,
    SlowConsumerGuard,
    TopicSsePeer,
)
from tidelog.server.push.topic_stream import TTL_MS, StreamSlot, TopicStream, WatchSession
from tidelog.server.request import RequestContext, find_topic
from tidelog.server.service import Service

if TYPE_CHECKING:
    from tidelog.server.handlers.websocket import SubscribeCommand

EVENT_STREAM: Final = b"text/event-stream"
STREAM_HEADERS: Final[Headers] = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_watch_decoder = api_types.body_decoder(api_types.Watch)


@operation(
    "watch",
    request=api_types.Watch,
    response=responses.WatchSession,
    params=(flag_param("lenient", False, "Skip topics that do not exist."),),
    errors=("topic_not_found",),
)
async def create_watch(context: RequestContext) -> Response:
    """Create a session that follows topics."""
    body = context.decode_body(_watch_decoder)
    if not 1 <= len(body.topics) <= WATCH_TOPICS_MAX:
        raise ApiError("invalid_request", f"a session follows 1 to {WATCH_TOPICS_MAX} topics; nothing was done")
    for name in body.topics:
        context.check_name_allowed(name)
    service = context.service
    sessions = service.push.watch_sessions
    sessions.remove_expired()
    followed = await resolve_topics(service, body.topics, body, lenient=context.query.flag("lenient", False))
    heartbeat_ms = min(max(body.heartbeat_ms, service.config.heartbeat_ms_min), HEARTBEAT_MS_MAX)
    epochs = {name: topic.epoch for name, topic in followed.topics.items()}
    session = sessions.add(context.principal, followed.options, heartbeat_ms, followed.cursors, epochs)
    return context.json(responses.WatchSession(session.wid, f"/v0/watch/{session.wid}", TTL_MS, followed.watermarks))


class FollowedTopics(NamedTuple):
    """The topics of a watch or a subscription, and the seq after which each starts."""

    options: ReadOptions
    topics: dict[str, Topic]
    cursors: dict[str, int]
    watermarks: dict[str, responses.Watermarks]


async def resolve_topics(
    service: Service, cursors: Mapping[str, Cursor], request: api_types.Watch | SubscribeCommand, *, lenient: bool
) -> FollowedTopics:
    """Find the topics and their positions. `lenient`: skip a topic that does not exist, instead of raising."""
    limit, bytes_max = page_budget(request.limit, request.max_batch_bytes)
    show = FieldSelection(data=request.include_data, tags=request.include_tags, meta=request.include_meta)
    options = ReadOptions(limit, bytes_max, parse_nodes(request.node), show, request.consistency == "strong")
    engine = service.engine
    if lenient:
        topics = {name: topic for name in cursors if (topic := engine.find(name)) is not None}
    else:
        topics = {name: find_topic(engine, name) for name in cursors}
    for topic in topics.values() if options.strong else ():
        topic_operations(topic).check_strong_supported()
    positions: dict[str, int] = {}
    watermarks: dict[str, responses.Watermarks] = {}
    for name, topic in topics.items():
        info = await topic_state(service, topic)
        positions[name] = info.head_seq if cursors[name].tail else cursors[name].from_seq
        watermarks[name] = responses.Watermarks(positions[name], info.head_seq, info.earliest_seq)
    return FollowedTopics(options, topics, positions, watermarks)


@operation(
    "followWatch",
    params=(Parameter("Last-Event-ID", STRING, "The position to resume from.", "header"),),
    errors=("not_found", "not_acceptable"),
    response_content={EVENT_STREAM.decode(): text_schema("record, tombstone, caught-up, topic-deleted, error.")},
)
def stream_watch(context: RequestContext) -> AnyResponse:
    """Stream new records of a session's topics.

    On a server with keys, needs the key that created the session.
    """
    request, service = context.request, context.service
    principal = None if service.auth.keys.is_empty else _authenticate(context)
    check_accepts_events(request.header(b"accept"))
    session = service.push.watch_sessions.find(context.path_names[0])
    if session is None:
        raise ApiError(
            "not_found", "there is no such watch session, or it has expired; nothing was done, create a new one"
        )
    if principal is not None and not compare_digest(principal.identity, session.principal.identity):
        raise ApiError("unauthorized", "this session needs the key that created it; nothing was done")
    if request.method == "HEAD":
        return Response(200, content_type=EVENT_STREAM, headers=STREAM_HEADERS)
    topics = {name: service.engine.find(name) for name in session.epochs}
    epochs = {name: topic.epoch for name, topic in topics.items() if topic is not None}
    cursors = session.stream_cursors(decode_last_event_id(request.header(b"last-event-id")), epochs)
    slot = StreamSlot(
        service, session.principal, partial(service.push.watch_sessions.on_stream_closed, session, cursors)
    )
    service.push.watch_sessions.on_stream_opened(session, cursors)
    return Stream(200, partial(_run_watch, service, session, topics, cursors, slot), EVENT_STREAM, STREAM_HEADERS)


def check_accepts_events(header: bytes | None) -> None:
    """Refuse a client that does not accept events."""
    if header and header.strip() and EVENT_STREAM not in header and b"*/*" not in header:
        raise ApiError("not_acceptable", "the response is text/event-stream; nothing was done, accept this type")


def _authenticate(context: RequestContext) -> Principal:
    """The principal. A request without a valid key does not learn whether a session exists."""
    secret = bearer_token(context.request.header(b"authorization")) or context.query.text("token")
    principal = None if secret is None else context.service.auth.keys.find(secret)
    if principal is None:
        raise ApiError("unauthorized", "this session needs the key that created it; nothing was done")
    return principal


def decode_last_event_id(header: bytes | None) -> dict[str, int]:
    """Decode the cursors of the last event that the client got; an id that is none of ours is ignored."""
    if not header:
        return {}
    try:
        return api_types.decode_positions(header.decode("latin-1").strip())
    except api_types.BadCursor:
        return {}


async def _run_watch(
    service: Service,
    session: WatchSession,
    topics: dict[str, Topic | None],
    cursors: dict[str, int],
    slot: StreamSlot,
    sink: Sink,
) -> None:
    events = TopicSsePeer(sink, cursors, service.loop.time)
    delivery = TopicStream(service, events, cursors)
    with slot.open(events, session.heartbeat_ms), closing(delivery):
        events.send_retry()
        if not service.stopping.is_set():
            for name, topic in topics.items():
                delivery.follow(name, topic, session.options, cursors[name])
        await delivery.run()


WORK_HEARTBEAT_MS: Final = 15_000
_ROUND_BYTES: Final = 1 << 20  # of one claim, about: a client that stalls has leased no more
_FIRST_ROUND_JOBS: Final = 32  # before the size of a job is known


@operation(
    "work",
    params=(
        Parameter("node", NODE_NAME, "The holder of the leases.", required=True),
        integer_param(
            "max", "Jobs leased and not settled at one time.", 1, minimum=1, maximum=api_types.CLAIM_JOBS_MAX
        ),
        Parameter("lease_ms", LEASE_MS, "Default: the queue's lease_ms."),
        flag_param(
            "notify_idle",
            False,
            "Send the comment `: idle` when there is no job for this worker, `: full` when it holds `max`.",
        ),
    ),
    errors=("invalid_request", *QUEUE_ERRORS, "not_acceptable"),
    response_content={EVENT_STREAM.decode(): text_schema("job, error. The id of a job is its seq.")},
)
def stream_jobs(context: RequestContext) -> AnyResponse:
    """Stream jobs, leased to this connection.

    Settle jobs with ack and nack. When the connection ends, its other jobs can be claimed at once.
    """
    request, service, query = context.request, context.service, context.query
    check_accepts_events(request.header(b"accept"))
    node = query.text("node") or ""
    check_node(node)
    queue = requested_queue(context)
    jobs_max = min(max(query.number("max", 1), 1), api_types.CLAIM_JOBS_MAX)
    lease_ms = query.number("lease_ms", -1)
    worker = JobStream(
        service,
        queue,
        node,
        jobs_max,
        None if lease_ms < 0 else clamp_lease_ms(lease_ms),
        notify_idle=query.flag("notify_idle", False),
    )
    if request.method == "HEAD":
        return Response(200, content_type=EVENT_STREAM, headers=STREAM_HEADERS)
    return Stream(200, partial(worker.run, StreamSlot(service, context.principal)), EVENT_STREAM, STREAM_HEADERS)


class JobStream:
    """One connection of a worker. It is the owner of its leases, so that they end with it."""

    def __init__(
        self, service: Service, queue: Queue, node: str, jobs_max: int, lease_ms: int | None, *, notify_idle: bool
    ) -> None:
        self._service, self._queue, self._notify_idle = service, queue, notify_idle
        self._node, self._jobs_max, self._lease_ms = node, jobs_max, lease_ms
        self._round_jobs_max = _FIRST_ROUND_JOBS

    def _next_request(self) -> ClaimRequest | None:
        """A claim for as many jobs as the worker can take now."""
        capacity = min(self._jobs_max - operations_of(self._queue).count_leases(self), self._round_jobs_max)
        return ClaimRequest(self._node, capacity, self._lease_ms, self) if capacity > 0 else None

    async def run(self, slot: StreamSlot, sink: Sink) -> None:
        service = self._service
        frames = JobSsePeer(sink, self._queue.topic.name, service.loop.time)
        guard = SlowConsumerGuard(service.loop, frames, service.stopping.is_set, service.limit_counters)
        with slot.open(frames, WORK_HEARTBEAT_MS):
            claim_queue = service.push.claim_queues.queue_for(self._queue)
            claim_queue.add_worker(guard.on_shutdown)
            try:
                frames.send_retry()
                on_idle = partial(self._send_idle, frames) if self._notify_idle else None
                while not service.stopping.is_set():
                    if frames.pending_bytes > HIGH_WATER_BYTES:
                        await guard.wait_writable()  # returns at once where the server stops
                    leased = await claim_queue.wait_for_jobs(self._next_request, on_idle)
                    if leased is not None:
                        self._adapt_round_size(frames.send_jobs(leased), leased.count)
                        service.metrics.counters(self._queue.topic.name).claimed += leased.count
                frames.send_shutdown()
            except Error as error:
                frames.send_error(error)
            finally:
                claim_queue.remove_worker(guard.on_shutdown)
                self._release()

    def _send_idle(self, frames: JobSsePeer) -> None:
        frames.send_idle(is_full=self._next_request() is None)

    def _adapt_round_size(self, size: int, count: int) -> None:
        self._round_jobs_max = min(max(_ROUND_BYTES * count // size, 1), api_types.CLAIM_JOBS_MAX)

    def _release(self) -> None:
        """End its leases. A dropped queue and a closed engine have none."""
        with suppress(Error):
            operations_of(self._queue).release_connection(self)
