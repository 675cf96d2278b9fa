"""Topics themselves: create and configure, look at, list, drop."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

import msgspec

from tidelog.engine import Engine, Topic, TopicConfig, TopicState
from tidelog.engine.config import ADDED, KEYS, KNOWN, check_topic_name
from tidelog.engine.queues import QueueCounts
from tidelog.errors import BadInput, TopicNotFound
from tidelog.server.api.auth import Principal
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.api.query import Query
from tidelog.server.http.seam import Response
from tidelog.wire import cursor, requests

PAGE = 100
PAGE_MAX = 1_000
_CONFIG_BYTES_MAX: Final = 64 << 10
_SPELLED_MAX: Final = 64  # unknown fields of a config that are compared with the known ones: 0.1 ms each
_object = requests.decoder(dict[str, Any])


def found(engine: Engine, name: str) -> Topic:
    topic = engine.find(name)
    if topic is None:
        raise TopicNotFound(name)
    return topic


def config_of(topic: str, text: bytes) -> TopicConfig:
    """A config as a client sent it: unknown fields ignored, known ones held to their types."""
    if len(text) > _CONFIG_BYTES_MAX:
        raise Problem("invalid_request", f"a config is over {_CONFIG_BYTES_MAX} bytes; nothing was done")
    try:
        config = TopicConfig.from_json(text)
        config.check_for(topic)
        _check_spelling(text)
        return config
    except BadInput as error:
        detail = _dead_letter(text) if "dead_letter is" in str(error) else None
        raise Problem("invalid_request", str(error), detail) from None


def _dead_letter(text: bytes) -> dict[str, Any]:
    return {"dead_letter": msgspec.json.decode(text).get("dead_letter")}


def own_targets(principal: Principal, config: TopicConfig, before: TopicConfig | None) -> None:
    """Refuse a config that names a topic which the key is not for. What another key has set may stay."""
    target = config.dead_letter
    kept = before is not None and before.dead_letter == target
    if target is not None and not kept and not principal.owns(target):
        raise Problem(
            "forbidden",
            f"this key is not for the topic {target!r} that dead_letter names; nothing was done",
            {"dead_letter": target},
        )


def _check_spelling(text: bytes) -> None:
    """Refuse a field that is almost one of a config. Others that are not known are passed over, as everywhere."""
    others = (name for name in _object.decode(text) if name not in KNOWN)
    for name in islice(others, _SPELLED_MAX):
        if near := get_close_matches(name[:80].lower(), KNOWN, n=1, cutoff=0.8):
            raise BadInput(f"a config has no field {name[:80]!r}; the nearest is {near[0]}; nothing was done")


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
    known = engine.find(name)
    own_targets(call.principal, config, None if known is None else known.config)
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
    owns = call.principal.owns

    def work() -> list[str] | None:
        for state in (*engine.routers(source=name), *engine.routers(dest=name)) if call.principal.prefixes else ():
            if not (owns(state.router) and owns(state.source) and owns(state.dest)):
                raise Problem(
                    "forbidden",
                    "a router that this key is not for has this topic at one of its ends; nothing was dropped, have "
                    "the router removed first",
                )
        return engine.remove(name, if_empty=if_empty, actor=actor)

    routers = await call.service.work(work)
    said = {"topic": name, "deleted": routers is not None, "routers_removed": routers or []}
    return ok({**said, "performance": call.performance()})
