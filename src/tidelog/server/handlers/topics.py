"""Topics themselves: create and configure, look at, list, drop.

The ledger of gaps: what was removed of a topic, or of all that a key is for, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

import msgspec

from tidelog import api_types
from tidelog.engine import Engine, GapEntries, Topic, TopicConfig, TopicInfo
from tidelog.engine.config import ADDED, KEYS, KNOWN, check_topic_name
from tidelog.engine.queues import QueueCounts
from tidelog.errors import BadInput, TopicNotFound
from tidelog.http.interface import Response
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError
from tidelog.server.request import QueryParams, RequestContext, json_response

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1_000
_CONFIG_BYTES_MAX: Final = 64 << 10
_SPELLING_CHECKS_MAX: Final = 64  # unknown fields of a config that are compared with the known ones: 0.1 ms each
_object_decoder = api_types.json_decoder(dict[str, Any])


def get_topic(engine: Engine, name: str) -> Topic:
    topic = engine.find(name)
    if topic is None:
        raise TopicNotFound(name)
    return topic


def parse_topic_config(topic: str, text: bytes) -> TopicConfig:
    """A config as a client sent it: unknown fields ignored, known ones held to their types."""
    if len(text) > _CONFIG_BYTES_MAX:
        raise ApiError("invalid_request", f"a config is over {_CONFIG_BYTES_MAX} bytes; nothing was done")
    try:
        config = TopicConfig.from_json(text)
        config.check_for(topic)
        _check_spelling(text)
        return config
    except BadInput as error:
        detail = _dead_letter_detail(text) if "dead_letter is" in str(error) else None
        raise ApiError("invalid_request", str(error), detail) from None


def _dead_letter_detail(text: bytes) -> dict[str, Any]:
    return {"dead_letter": msgspec.json.decode(text).get("dead_letter")}


def check_dead_letter_allowed(principal: Principal, config: TopicConfig, previous: TopicConfig | None) -> None:
    """Refuse a config that names a topic which the key is not for. What another key has set may stay."""
    target = config.dead_letter
    kept = previous is not None and previous.dead_letter == target
    if target is not None and not kept and not principal.may_use_name(target):
        raise ApiError(
            "forbidden",
            f"this key is not for the topic {target!r} that dead_letter names; nothing was done",
            {"dead_letter": target},
        )


def _check_spelling(text: bytes) -> None:
    """Refuse a field that is almost one of a config. Others that are not known are passed over, as everywhere."""
    others = (name for name in _object_decoder.decode(text) if name not in KNOWN)
    for name in islice(others, _SPELLING_CHECKS_MAX):
        if near := get_close_matches(name[:80].lower(), KNOWN, n=1, cutoff=0.8):
            raise BadInput(f"a config has no field {name[:80]!r}; the nearest is {near[0]}; nothing was done")


def config_json(config: TopicConfig) -> msgspec.Raw:
    return msgspec.Raw(config.to_json())


async def configure_topic(context: RequestContext) -> Response:
    """PUT replaces: fields that are not given take their defaults."""
    context.decode_body(_object_decoder, default={})
    service, name = context.service, context.topic
    check_topic_name(name)
    config = parse_topic_config(name, context.request.body or b"{}")
    given = {key: getattr(config, key) for key in (*KEYS, *ADDED) if key != "durable"}
    engine = service.engine
    known = engine.find(name)
    check_dead_letter_allowed(context.principal, config, None if known is None else known.config)
    topic, created = await service.run_blocking(lambda: engine.configure(name, given))
    return json_response(
        {"topic": name, "created": created, "config": config_json(topic.config), "performance": context.performance()},
        status=201 if created else 200,
    )


async def _topic_state(context: RequestContext, topic: Topic) -> TopicInfo:
    return topic.state() if topic.is_floor_durable else await context.service.run_blocking(topic.state)


async def _queue_counts(context: RequestContext, topic: Topic) -> QueueCounts:
    queue = topic.queue()
    return queue.counts() if queue.can_claim_without_blocking(0) else await context.service.run_blocking(queue.counts)


async def describe_topic(context: RequestContext) -> Response:
    topic = get_topic(context.service.engine, context.topic)
    if context.query.flag("touch", True):
        topic.record_access()
    now = await _topic_state(context, topic)
    queue = {"queue": (await _queue_counts(context, topic))._asdict()} if now.config.type == "queue" else {}
    return json_response(
        {
            "topic": now.topic,
            "type": now.config.type,
            "head_seq": now.head_seq,
            "earliest_seq": now.earliest_seq,
            "next_seq": now.next_seq,
            "count": now.count,
            "bytes": now.bytes,
            "config": config_json(now.config),
            "effective_priority": now.effective_priority,
            "last_write_ts": now.last_write_ms,
            "last_read_ts": now.last_read_ms,
            **queue,
            "performance": context.performance(),
        }
    )


def parse_paging(query: QueryParams) -> tuple[str, int]:
    """Behind which name a page of a list begins, and how many rows it has."""
    after = query.text("cursor")
    try:
        behind = api_types.decode_page_cursor(after) if after else ""
    except api_types.BadCursor:
        raise ApiError(
            "invalid_request", "the cursor is not one of ours; nothing was done, list from the start"
        ) from None
    return behind, min(max(query.number("page_size", PAGE_SIZE), 1), PAGE_SIZE_MAX)


async def list_topics(context: RequestContext) -> Response:
    service, query = context.service, context.query
    behind, size = parse_paging(query)
    prefix, touch = query.text("prefix") or "", query.flag("touch", False)
    engine, owns = service.engine, context.principal.may_use_name
    rows, more = await service.run_blocking(lambda: _topic_rows(engine, prefix, behind, size, owns, touch))
    said: dict[str, Any] = {"topics": rows}
    if more:
        said["next_cursor"] = api_types.encode_page_cursor(rows[-1]["topic"])
    return json_response({**said, "performance": context.performance()})


def _topic_rows(
    engine: Engine, prefix: str, after: str, size: int, owns: Callable[[str], bool], touch: bool
) -> tuple[list[dict[str, Any]], bool]:
    names = [name for name in engine.names() if name.startswith(prefix) and name > after and owns(name)]
    rows = []
    for name in names[:size]:
        topic = engine.find(name)
        if topic is None:
            continue  # dropped meanwhile
        if touch:
            topic.record_access(read=False)
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


async def delete_topic(context: RequestContext) -> Response:
    engine, name, if_empty = context.service.engine, context.topic, context.query.flag("if_empty", False)
    actor = context.principal.name
    owns = context.principal.may_use_name

    def work() -> list[str] | None:
        for state in (*engine.routers(source=name), *engine.routers(dest=name)) if context.principal.prefixes else ():
            if not (owns(state.router) and owns(state.source) and owns(state.dest)):
                raise ApiError(
                    "forbidden",
                    "a router that this key is not for has this topic at one of its ends; nothing was dropped, have "
                    "the router removed first",
                )
        return engine.drop_with_routers(name, if_empty=if_empty, actor=actor)

    routers = await context.service.run_blocking(work)
    said = {"topic": name, "deleted": routers is not None, "routers_removed": routers or []}
    return json_response({**said, "performance": context.performance()})


GAPS_LIMIT: Final = 100
GAPS_LIMIT_MAX: Final = 1_000


async def list_topic_gaps(context: RequestContext) -> Response:
    """Also of a topic that is gone, as long as the ledger knows its name."""
    said = await _gap_rows(context, context.topic)
    if not said["gaps"] and context.query.text("cursor") is None and context.service.engine.find(context.topic) is None:
        raise TopicNotFound(context.topic)
    return json_response({"topic": context.topic, **said, "performance": context.performance()})


async def list_gaps(context: RequestContext) -> Response:
    return json_response({**await _gap_rows(context, None), "performance": context.performance()})


async def _gap_rows(context: RequestContext, topic: str | None) -> dict[str, Any]:
    service, query, owns = context.service, context.query, context.principal.may_use_name
    engine, behind = service.engine, _decode_gap_cursor(query.text("cursor"))
    limit = min(max(query.number("limit", GAPS_LIMIT), 1), GAPS_LIMIT_MAX)
    from_ms = min(query.number("from", 0), (1 << 48) - 1)

    def work() -> tuple[GapEntries, int | None]:
        """Pages are cut before names are looked at, so that one costs no more than its rows, whoever asks."""
        found = engine.gaps(topic, from_ms, limit, after_seq=behind)
        last = found[-1].seq if len(found) == limit else 0
        return GapEntries(row for row in found if owns(row.topic)), last or None

    found, last = await service.run_blocking(work)
    said: dict[str, Any] = {"gaps": [row._asdict() for row in found]}
    if last is not None:
        said["next_cursor"] = api_types.encode_page_cursor(str(last))
    return said


def _decode_gap_cursor(text: str | None) -> int:
    try:
        given = api_types.decode_page_cursor(text) if text else "0"
    except api_types.BadCursor:
        given = ""
    if not (given.isascii() and given.isdecimal() and len(given) <= 19):
        raise ApiError("invalid_request", "the cursor is not one of ours; nothing was done, read from the start")
    return int(given)
