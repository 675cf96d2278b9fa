"""Watching topics: a session says what, and a stream of Server-Sent Events tells of it."""

from __future__ import annotations

from functools import partial
from hmac import compare_digest
from typing import Final

from tidelog.engine import Show, Topic, TopicState
from tidelog.engine.read import nodes_of
from tidelog.server.api.auth import Principal, bearer
from tidelog.server.api.call import Call, ok
from tidelog.server.api.diff import budget
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.delivery import Delivery, Pulse, Slot
from tidelog.server.frames import Events
from tidelog.server.http.seam import Answer, Headers, Response, Sink, Stream
from tidelog.server.pages import View
from tidelog.server.service import Service
from tidelog.server.sessions import TTL_MS, Session
from tidelog.wire import cursor, requests
from tidelog.wire.requests import Cursor

TOPICS_MAX: Final = 256
HEARTBEAT_MS_MAX: Final = 60_000
EVENT_STREAM: Final = b"text/event-stream"
HEADERS: Final[Headers] = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_decoder = requests.decoder(requests.Watch)


async def create(call: Call) -> Response:
    body = call.body(_decoder)
    if not 1 <= len(body.topics) <= TOPICS_MAX:
        raise Problem("invalid_request", f"a session follows 1 to {TOPICS_MAX} topics; nothing was done")
    for name in body.topics:
        call.own(name)
    service = call.service
    engine, sessions = service.engine, service.sessions
    sessions.collect()
    limit, bytes_max = budget(body.limit, body.max_batch_bytes)
    show = Show(data=body.include_data, tags=body.include_tags, meta=body.include_meta)
    view = View(limit, bytes_max, nodes_of(body.node), show, body.consistency == "strong")
    if call.query.flag("lenient", False):
        topics = {name: topic for name in body.topics if (topic := engine.find(name)) is not None}
    else:
        topics = {name: found(engine, name) for name in body.topics}
    for topic in topics.values() if view.strong else ():
        topic.check_strong()
    marks = {name: await state_of(service, topic) for name, topic in topics.items()}
    cursors = {name: start_of(body.topics[name], now) for name, now in marks.items()}
    heartbeat_ms = min(max(body.heartbeat_ms, service.config.heartbeat_ms_min), HEARTBEAT_MS_MAX)
    epochs = {name: topic.epoch for name, topic in topics.items()}
    session = sessions.add(call.principal, view, heartbeat_ms, dict(cursors), epochs)
    return ok(
        {
            "wid": session.wid,
            "stream_url": f"/v0/watch/{session.wid}",
            "session_ttl_ms": TTL_MS,
            "topics": {name: watermarks(cursors[name], now) for name, now in marks.items()},
            "performance": call.performance(),
        }
    )


async def state_of(service: Service, topic: Topic) -> TopicState:
    return topic.state() if topic.is_settled else await service.work(topic.state)


def start_of(wanted: Cursor, now: TopicState) -> int:
    """Where to begin; `tail` is behind everything that is there."""
    return now.head_seq if wanted.tail else wanted.from_seq


def watermarks(from_seq: int, now: TopicState) -> dict[str, int]:
    return {"from_seq": from_seq, "head_seq": now.head_seq, "earliest_seq": now.earliest_seq}


def stream(call: Call) -> Answer:
    request, service = call.request, call.service
    principal = None if service.keys.open else _authenticated(call)
    accepts(request.header(b"accept"))
    session = service.sessions.find(call.names[0])
    if session is None:
        raise Problem("not_found", "there is no such watch session, or it was idle for too long; watch again")
    if principal is not None and not compare_digest(principal.identity, session.principal.identity):
        raise Problem("unauthorized", "the key that made this session is needed; nothing was done")
    if request.method == "HEAD":
        return Response(200, content_type=EVENT_STREAM, headers=HEADERS)
    topics = {name: service.engine.find(name) for name in session.epochs}
    epochs = {name: topic.epoch for name, topic in topics.items() if topic is not None}
    cursors = session.start(_last_event_id(request.header(b"last-event-id")), epochs)
    slot = Slot(service, session.principal, partial(service.sessions.closed, session, cursors))
    service.sessions.opened(session, cursors)
    return Stream(200, partial(_run, service, session, topics, cursors, slot), EVENT_STREAM, HEADERS)


def accepts(header: bytes | None) -> None:
    """Refuse a client that does not take events."""
    if header and header.strip() and EVENT_STREAM not in header and b"*/*" not in header:
        raise Problem("not_acceptable", "this is text/event-stream and nothing else; nothing was done, accept that")


def _authenticated(call: Call) -> Principal:
    """Who asks. A request without a valid key learns nothing, not even which sessions there are."""
    secret = bearer(call.request.header(b"authorization")) or call.query.text("token")
    principal = None if secret is None else call.service.keys.find(secret)
    if principal is None:
        raise Problem("unauthorized", "the key that made this session is needed; nothing was done")
    return principal


def _last_event_id(header: bytes | None) -> dict[str, int]:
    """Decode the cursors that the client has seen last; an id that this server did not make is ignored."""
    if not header:
        return {}
    try:
        return cursor.unpositions(header.decode("latin-1").strip())
    except cursor.BadCursor:
        return {}


async def _run(
    service: Service, session: Session, topics: dict[str, Topic | None], cursors: dict[str, int], slot: Slot, sink: Sink
) -> None:
    events = Events(sink, cursors, service.loop.time)
    delivery = Delivery(service, events, cursors)
    pulse = Pulse(service, events, session.heartbeat_ms)
    try:
        slot.begin()
        events.hello()
        if not service.stopping.is_set():
            for name, topic in topics.items():
                delivery.follow(name, topic, session.view, cursors[name])
        await delivery.run()
    finally:
        pulse.stop()
        delivery.close()
        slot.give()
