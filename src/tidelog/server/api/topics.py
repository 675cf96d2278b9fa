"""Topics themselves: create and configure, look at, list, drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tidelog.engine import Engine, Topic, TopicConfig, TopicState
from tidelog.engine.config import ADDED, KEYS, check_topic_name
from tidelog.engine.queues import QueueCounts
from tidelog.errors import BadInput, TopicNotFound
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.api.query import Query
from tidelog.server.http.seam import Response
from tidelog.wire import cursor, requests

PAGE = 100
PAGE_MAX = 1_000
_object = requests.decoder(dict[str, Any])


def found(engine: Engine, name: str) -> Topic:
    topic = engine.find(name)
    if topic is None:
        raise TopicNotFound(name)
    return topic


def config_of(topic: str, text: bytes) -> TopicConfig:
    """A config as a client sent it: unknown fields ignored, known ones held to their types."""
    try:
        config = TopicConfig.from_json(text)
        config.check_for(topic)
        return config
    except BadInput as error:
        detail = _dead_letter(text) if "dead_letter" in str(error) else None
        raise Problem("invalid_request", str(error), detail) from None


def _dead_letter(text: bytes) -> dict[str, Any]:
    return {"dead_letter": msgspec.json.decode(text).get("dead_letter")}


def shown(config: TopicConfig) -> msgspec.Raw:
    return msgspec.Raw(config.to_json())


async def configure(call: Call) -> Response:
    """PUT replaces: fields that are not given take their defaults."""
    call.body(_object, empty={})
    service, name = call.service, call.topic
    check_topic_name(name)
    config = config_of(name, call.request.body or b"{}")
    given = {key: getattr(config, key) for key in (*KEYS, *ADDED) if key != "durable"}
    engine = service.engine
    topic, created = await service.work(lambda: engine.configure(name, given))
    return ok(
        {"topic": name, "created": created, "config": shown(topic.config), "performance": call.performance()},
        status=201 if created else 200,
    )


async def _state(call: Call, topic: Topic) -> TopicState:
    return topic.state() if topic.is_settled else await call.service.work(topic.state)


async def _counts(call: Call, topic: Topic) -> QueueCounts:
    queue = topic.queue()
    return queue.counts() if queue.is_quick(0) else await call.service.work(queue.counts)


async def state(call: Call) -> Response:
    topic = found(call.service.engine, call.topic)
    if call.query.flag("touch", True):
        topic.touch()
    now = await _state(call, topic)
    queue = {"queue": (await _counts(call, topic))._asdict()} if now.config.type == "queue" else {}
    return ok(
        {
            "topic": now.topic,
            "type": now.config.type,
            "head_seq": now.head_seq,
            "earliest_seq": now.earliest_seq,
            "next_seq": now.next_seq,
            "count": now.count,
            "bytes": now.bytes,
            "config": shown(now.config),
            "effective_priority": now.effective_priority,
            "last_write_ts": now.last_write_ms,
            "last_read_ts": now.last_read_ms,
            **queue,
            "performance": call.performance(),
        }
    )


def paged(query: Query) -> tuple[str, int]:
    """Behind which name a page of a list begins, and how many rows it has."""
    after = query.text("cursor")
    try:
        behind = cursor.unpage(after) if after else ""
    except cursor.BadCursor:
        raise Problem(
            "invalid_request", "the cursor is not one of ours; nothing was done, list from the start"
        ) from None
    return behind, min(max(query.number("page_size", PAGE), 1), PAGE_MAX)


async def list_all(call: Call) -> Response:
    service, query = call.service, call.query
    behind, size = paged(query)
    prefix, touch = query.text("prefix") or "", query.flag("touch", False)
    engine, owns = service.engine, call.principal.owns
    rows, more = await service.work(lambda: _rows(engine, prefix, behind, size, owns, touch))
    said: dict[str, Any] = {"topics": rows}
    if more:
        said["next_cursor"] = cursor.page(rows[-1]["topic"])
    return ok({**said, "performance": call.performance()})


def _rows(
    engine: Engine, prefix: str, behind: str, size: int, owns: Callable[[str], bool], touch: bool
) -> tuple[list[dict[str, Any]], bool]:
    names = [name for name in engine.names() if name.startswith(prefix) and name > behind and owns(name)]
    rows = []
    for name in names[:size]:
        topic = engine.find(name)
        if topic is None:
            continue  # dropped meanwhile
        if touch:
            topic.touch(read=False)
        now = topic.state()
        rows.append(
            {
                "topic": name,
                "head_seq": now.head_seq,
                "earliest_seq": now.earliest_seq,
                "count": now.count,
                "bytes": now.bytes,
                "durable": now.config.durable,
                "effective_priority": now.effective_priority,
            }
        )
    return rows, len(names) > size and bool(rows)


async def drop(call: Call) -> Response:
    engine, name, if_empty = call.service.engine, call.topic, call.query.flag("if_empty", False)
    actor = call.principal.name
    routers = await call.service.work(lambda: engine.remove(name, if_empty=if_empty, actor=actor))
    said = {"topic": name, "deleted": routers is not None, "routers_removed": routers or []}
    return ok({**said, "performance": call.performance()})
