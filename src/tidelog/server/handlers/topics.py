"""Topics, routers and consumer groups over HTTP: create and configure, describe, list, move, remove.

The gap log: what was removed of a topic, or of all that a key is for, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from tidelog import api_types
from tidelog.api_types import GAPS_LIMIT, GAPS_LIMIT_MAX, PAGE_SIZE, PAGE_SIZE_MAX
from tidelog.engine import Engine, GapEntries, Group, GroupState, Topic, TopicConfig, TopicInfo, timestamp_ms
from tidelog.engine.config import ADDED, KEYS, KNOWN, check_dead_letter, check_topic_name, lacks_dead_letter
from tidelog.engine.queues import QueueCounts
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.routing.router import RouterState
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, GroupNotFound, RouterNotFound
from tidelog.http.interface import AnyResponse, Response
from tidelog.server import response_types as responses
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError
from tidelog.server.handlers.records import clamp_seq, read_after
from tidelog.server.openapi import (
    COUNT,
    CURSOR_PARAM,
    PAGING_PARAMS,
    TOPIC_NAME,
    Parameter,
    flag_param,
    integer_param,
    operation,
)
from tidelog.server.request import QueryParams, RequestContext, nearest_name
from tidelog.server.service import Service

_CONFIG_BYTES_MAX: Final = 64 << 10
_SPELLING_CHECKS_MAX: Final = 64  # unknown fields of a config that are compared with the known ones: 0.1 ms each
_object_decoder = api_types.json_decoder(dict[str, Any])


def parse_topic_config(topic: str, text: bytes, warn: Callable[[str], None] | None = None) -> TopicConfig:
    """A config as a client sent it: known fields held to their types, unknown ones reported to `warn` and ignored."""
    if len(text) > _CONFIG_BYTES_MAX:
        raise ApiError("invalid_request", f"a config is over {_CONFIG_BYTES_MAX} bytes; nothing was done")
    try:
        config = TopicConfig.from_json(text)
        check_dead_letter(topic, config)
        _check_spelling(text, warn)
        if warn is not None and lacks_dead_letter(config):
            warn(
                f"max_deliveries is {config.max_deliveries} and dead_letter null, where jobs are delivered until they "
                "are acked"
            )
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


def _check_spelling(text: bytes, warn: Callable[[str], None] | None) -> None:
    """Refuse a field that is almost one of a config, and report others that are not known."""
    others = (name for name in _object_decoder.decode(text) if name not in KNOWN)
    for name in islice(others, _SPELLING_CHECKS_MAX):
        if near := get_close_matches(name[:80].lower(), KNOWN, n=1, cutoff=0.8):
            raise BadInput(f"a config has no field {name[:80]!r}; the nearest is {near[0]}; nothing was done")
        if warn is not None:
            warn(f"a config has no field {name[:80]!r}, the nearest is {nearest_name(name, KNOWN)}")


def config_json(config: TopicConfig) -> msgspec.Raw:
    return msgspec.Raw(config.to_json())


@operation(
    "configureTopic",
    request=TopicConfig,
    response=responses.TopicCreated,
    errors=("topic_exists_incompatible",),
    body_required=False,
    statuses=(200, 201),
)
async def configure_topic(context: RequestContext) -> Response:
    """Create a topic, or replace its config."""
    context.decode_body(_object_decoder, default={})
    service, name = context.service, context.topic
    check_topic_name(name)
    config = parse_topic_config(name, context.request.body or b"{}", context.warn)
    given = {key: getattr(config, key) for key in (*KEYS, *ADDED) if key != "durable"}
    engine = service.engine
    known = engine.find(name)
    check_dead_letter_allowed(context.principal, config, None if known is None else known.config)
    topic, created = await service.run_blocking(lambda: engine.configure(name, given))
    body = responses.TopicCreated(name, created, config_json(topic.config))
    return context.json(body, status=201 if created else 200)


async def topic_state(service: Service, topic: Topic) -> TopicInfo:
    return topic.state() if topic_operations(topic).is_floor_durable else await service.run_blocking(topic.state)


async def _queue_counts(context: RequestContext, topic: Topic) -> QueueCounts:
    queue = topic.queue()
    return (
        queue.counts()
        if operations_of(queue).can_claim_without_blocking(0)
        else await context.service.run_blocking(queue.counts)
    )


@operation(
    "getTopic",
    response=responses.Topic,
    params=(
        flag_param("touch", True, "Count this request as an access."),
        flag_param("details", False, "Send id, epoch and evict_floor as well."),
    ),
    errors=("topic_not_found",),
)
async def describe_topic(context: RequestContext) -> Response:
    """Describe a topic."""
    topic = context.get_topic()
    if context.query.flag("touch", True):
        topic_operations(topic).record_access()
    state = await topic_state(context.service, topic)
    is_queue = state.config.type == "queue"
    details = (state.id, state.epoch, state.evict_floor) if context.query.flag("details", False) else ()
    return context.json(
        responses.Topic(
            state.topic,
            state.config.type,
            state.head_seq,
            state.earliest_seq,
            state.next_seq,
            state.count,
            state.bytes,
            config_json(state.config),
            state.effective_priority,
            state.last_write_ms,
            state.last_read_ms,
            responses.QueueDepth(*await _queue_counts(context, topic)) if is_queue else UNSET,
            *details,
        )
    )


def parse_paging(query: QueryParams) -> tuple[str, int]:
    """The name after which a page of a list begins, and how many rows it has."""
    cursor = query.text("cursor")
    try:
        after = api_types.decode_page_cursor(cursor) if cursor else ""
    except api_types.BadCursor:
        raise ApiError(
            "invalid_request", "the cursor is not one of ours; nothing was done, list from the start"
        ) from None
    return after, min(max(query.number("page_size", PAGE_SIZE), 1), PAGE_SIZE_MAX)


@operation(
    "listTopics",
    response=responses.TopicList,
    params=(
        *PAGING_PARAMS,
        flag_param("touch", False, "Count this request as an access."),
        flag_param("details", False, "Send the config and the other fields of a topic as well."),
    ),
    errors=("invalid_request",),
)
async def list_topics(context: RequestContext) -> Response:
    """List the topics that the key may use, by name."""
    service, query = context.service, context.query
    after, size = parse_paging(query)
    prefix, touch = query.text("prefix") or "", query.flag("touch", False)
    engine, owns, details = service.engine, context.principal.may_use_name, query.flag("details", False)
    rows, more = await service.run_blocking(lambda: _topic_rows(engine, prefix, after, size, owns, touch, details))
    return context.json(responses.TopicList(rows, api_types.encode_page_cursor(rows[-1].topic) if more else UNSET))


def _topic_rows(
    engine: Engine, prefix: str, after: str, size: int, owns: Callable[[str], bool], touch: bool, details: bool
) -> tuple[list[responses.TopicRow], bool]:
    names = list(islice((name for name in engine.iter_names(prefix, after) if owns(name)), size + 1))
    rows = []
    for name in names[:size]:
        if touch and (topic := engine.find(name)) is not None:
            topic_operations(topic).record_access(read=False)
        state = engine.topic_info(name)
        if state is None:
            continue  # dropped meanwhile
        row = responses.TopicRow(
            name,
            state.head_seq,
            state.earliest_seq,
            state.count,
            state.bytes,
            state.config.durable,
            state.effective_priority,
        )
        if details:
            row.id, row.epoch, row.evict_floor = state.id, state.epoch, state.evict_floor
            row.last_write_ts, row.last_read_ts = state.last_write_ms, state.last_read_ms
            row.config = config_json(state.config)
        rows.append(row)
    return rows, len(names) > size and bool(rows)


@operation(
    "dropTopic",
    response=responses.TopicDropped,
    params=(flag_param("if_empty", False, "Only where the topic has no record."),),
    errors=("topic_not_empty",),
)
async def delete_topic(context: RequestContext) -> Response:
    """Remove a topic with all its records."""
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
    return context.json(responses.TopicDropped(name, routers is not None, routers or []))


_GAP_PARAMS: Final = (
    Parameter("from", COUNT, "Only rows of this time or later, in milliseconds since the epoch."),
    integer_param("limit", "", GAPS_LIMIT, minimum=1, maximum=GAPS_LIMIT_MAX),
    CURSOR_PARAM,
)


@operation(
    "listTopicGaps",
    response=responses.TopicGaps,
    params=(*_GAP_PARAMS, flag_param("current", False, "Not those of a dropped topic of the same name.")),
    errors=("invalid_request", "topic_not_found"),
)
async def list_topic_gaps(context: RequestContext) -> Response:
    """List the records removed from a topic, and why.

    Also for a topic that was dropped.
    """
    topic_id = context.get_topic().id if context.query.flag("current", False) else None
    rows, next_cursor = await _gap_rows(context, context.topic, topic_id)
    if not rows and context.query.text("cursor") is None:
        context.get_topic()
    return context.json(responses.TopicGaps(context.topic, rows, next_cursor))


@operation("listGaps", response=responses.GapList, params=_GAP_PARAMS, errors=("invalid_request",))
async def list_gaps(context: RequestContext) -> Response:
    """List the records removed from all topics that the key may use, and why."""
    return context.json(responses.GapList(*await _gap_rows(context, None)))


async def _gap_rows(
    context: RequestContext, topic: str | None, topic_id: int | None = None
) -> tuple[list[responses.GapRow], str | UnsetType]:
    """Rows of one page, and the cursor of the next one."""
    service, query, owns = context.service, context.query, context.principal.may_use_name
    engine, after_seq = service.engine, _decode_gap_cursor(query.text("cursor"))
    limit = min(max(query.number("limit", GAPS_LIMIT), 1), GAPS_LIMIT_MAX)
    from_ms = min(query.number("from", 0), (1 << 48) - 1)

    def work() -> tuple[GapEntries, int | None]:
        # The limit applies before the key's names: the cost of a page depends on its rows, not on the key.
        page = engine.gaps(topic, from_ms, limit, after_seq=after_seq)
        last = page[-1].seq if len(page) == limit else 0
        shown = GapEntries(row for row in page if owns(row.topic) and topic_id in (None, row.topic_id))
        return shown, last or None

    page, last = await service.run_blocking(work)
    rows = [responses.GapRow(*row) for row in page]
    return rows, UNSET if last is None else api_types.encode_page_cursor(str(last))


def _decode_gap_cursor(text: str | None) -> int:
    try:
        given = api_types.decode_page_cursor(text) if text else "0"
    except api_types.BadCursor:
        given = ""
    if not (given.isascii() and given.isdecimal() and len(given) <= 19):
        raise ApiError("invalid_request", "the cursor is not one of ours; nothing was done, read from the start")
    return int(given)


# ── routers ───────────────────────────────────────────────────────────────────────────────────────

_router_decoder = api_types.body_decoder(api_types.RouterToMake)
_ROUTER_OPTIONS: Final = responses.RouterOptions.__struct_fields__


def _option_fields(state: RouterState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _ROUTER_OPTIONS}


@operation(
    "putRouter",
    request=api_types.RouterToMake,
    response=responses.RouterMade,
    errors=("topic_not_found", "topic_exists_incompatible", "router_cycle"),
    statuses=(200, 201),
)
async def put_router(context: RequestContext) -> Response:
    """Create a router, or replace its options.

    Records appended to the source from now on are copied to the dest. Topics that do not exist are created.
    """
    body, name = context.decode_body(_router_decoder), context.path_names[0]
    context.check_name_allowed(body.source)
    context.check_name_allowed(body.dest)
    engine = context.service.engine
    _check_router_allowed(context, engine.find_router(name, fresh=False))
    state = await context.service.run_blocking(
        lambda: engine.router(
            name,
            body.source,
            body.dest,
            preserve_node=body.preserve_node,
            preserve_tag=body.preserve_tag,
            create_dest=body.create_dest,
            filter=body.filter,
            allow_cycle=body.allow_cycle,
            guarantee=body.guarantee,
        )
    )
    response = responses.RouterMade(**_option_fields(state), created=state.created)
    return context.json(response, status=201 if state.created else 200)


def _check_router_allowed(context: RequestContext, state: RouterState | None) -> None:
    if state is not None:
        context.check_name_allowed(state.source)
        context.check_name_allowed(state.dest)


@operation("getRouter", response=responses.Router, errors=("router_not_found",))
async def get_router(context: RequestContext) -> Response:
    """Describe a router and its progress."""
    engine, name = context.service.engine, context.path_names[0]
    _check_router_allowed(context, engine.find_router(name, fresh=False))  # before any record is forwarded for it
    state = await context.service.run_blocking(lambda: engine.find_router(name))
    if state is None:
        raise RouterNotFound(name)
    return context.json(responses.Router(**_option_fields(state), forwarded_total=state.forwarded_total))


@operation(
    "listRouters",
    response=responses.RouterList,
    params=(
        *PAGING_PARAMS,
        Parameter("source", TOPIC_NAME, "Only routers from this topic."),
        Parameter("dest", TOPIC_NAME, "Only routers to this topic."),
        flag_param("details", False, "Send the other options as well."),
    ),
    errors=("invalid_request",),
)
async def list_routers(context: RequestContext) -> Response:
    """List the routers that the key may use, by name."""
    query, owns = context.query, context.principal.may_use_name
    after, size = parse_paging(query)
    states = context.service.engine.routers(query.text("prefix") or "", query.text("source"), query.text("dest"))
    allowed = [
        state
        for state in states
        if state.router > after and owns(state.router) and owns(state.source) and owns(state.dest)
    ]
    rows = [
        responses.RouterRow(state.router, state.source, state.dest, state.guarantee, state.forwarded_total)
        for state in allowed[:size]
    ]
    for row, state in zip(rows, allowed, strict=False) if query.flag("details", False) else ():
        row.preserve_node, row.preserve_tag, row.allow_cycle = (
            state.preserve_node,
            state.preserve_tag,
            state.allow_cycle,
        )
        row.filter = None if state.filter is None else list(state.filter)
    next_cursor = api_types.encode_page_cursor(rows[-1].router) if len(allowed) > size else UNSET
    return context.json(responses.RouterList(rows, next_cursor))


@operation("dropRouter", response=responses.RouterDropped)
async def delete_router(context: RequestContext) -> Response:
    """Remove a router; copied records stay."""
    engine, name = context.service.engine, context.path_names[0]
    _check_router_allowed(context, engine.find_router(name, fresh=False))
    deleted = await context.service.run_blocking(lambda: engine.drop_router(name))
    return context.json(responses.RouterDropped(name, deleted))


# ── consumer groups ───────────────────────────────────────────────────────────────────────────────

_put_decoder = api_types.body_decoder(api_types.PutGroup)
_commit_decoder = api_types.body_decoder(api_types.CommitGroup)
_fetch_decoder = api_types.body_decoder(api_types.Fetch)
_reset_decoder = api_types.body_decoder(api_types.ResetGroup)


def _existing_group(topic: Topic, name: str) -> Group:
    """Return the group. Raises GroupNotFound, also for a name that no group can have."""
    try:
        group = topic.group(name)
    except BadInput:
        raise GroupNotFound(topic.name, name) from None
    if not group.exists:
        raise GroupNotFound(topic.name, name)
    return group


def _resolve_position(to: api_types.GroupPosition) -> int | str:
    if isinstance(to, api_types.Moment):
        return timestamp_ms(to.ts)
    return to if isinstance(to, str) else clamp_seq(to)


def _group_fields(state: GroupState) -> dict[str, Any]:
    return {
        "group": state.group,
        "position": state.position,
        "head_seq": state.head_seq,
        "lag": responses.GroupLag(*state.lag),
        "hold_bytes": state.hold_bytes,
        "hold_broken": state.hold_broken,
        "last_commit_ts": state.last_commit_ms,
    }


@operation("listGroups", response=responses.GroupList, errors=("topic_not_found",))
async def list_groups(context: RequestContext) -> Response:
    """List the consumer groups of a topic, by name."""
    topic = context.get_topic()
    states = await context.service.run_blocking(lambda: [group.state() for group in topic.groups()])
    groups = [responses.GroupInfo(**_group_fields(state)) for state in states]
    return context.json(responses.GroupList(context.topic, groups))


@operation(
    "getGroup",
    response=responses.GroupShown,
    params=(flag_param("missing", False, "Describe a group that does not exist: it is at 0 and was never committed."),),
    errors=("topic_not_found", "group_not_found"),
)
async def get_group(context: RequestContext) -> Response:
    """Read a group's position and lag."""
    topic, name = context.get_topic(), context.path_names[1]
    group = topic.group(name) if context.query.flag("missing", False) else _existing_group(topic, name)
    state = await context.service.run_blocking(group.state)
    return context.json(responses.GroupShown(topic=context.topic, **_group_fields(state)))


@operation(
    "putGroup",
    request=api_types.PutGroup,
    response=responses.GroupPut,
    errors=("topic_not_found", "cursor_conflict"),
    body_required=False,
    statuses=(200, 201),
)
async def put_group(context: RequestContext) -> Response:
    """Create a group, or set its hold.

    Without hold_bytes the group has no hold. `from` applies to a new group only.
    """
    body = context.decode_body(_put_decoder, default=api_types.PutGroup())
    group = context.get_topic().group(context.path_names[1])

    def work() -> tuple[bool, GroupState]:
        created = group.begin(_resolve_position(body.from_), hold_bytes=body.hold_bytes)  # type: ignore[arg-type]
        if not created and not body.keep:
            group.hold(body.hold_bytes)
        return created, group.state()

    created, state = await context.service.run_blocking(work)
    response = responses.GroupPut(topic=context.topic, created=created, **_group_fields(state))
    return context.json(response, status=201 if created else 200)


@operation(
    "commitGroup",
    request=api_types.CommitGroup,
    response=responses.GroupCommitted,
    errors=("topic_not_found", "cursor_conflict"),
)
async def commit_group(context: RequestContext) -> Response:
    """Commit a position.

    Creates a group that does not exist. A seq above the head, a seq below the position, and a group that is not at
    `expect` are a cursor_conflict.
    """
    body = context.decode_body(_commit_decoder)
    group = context.get_topic().group(context.path_names[1])
    expect = None if body.expect is None else clamp_seq(body.expect)
    seq = clamp_seq(body.seq)
    if body.preview:
        preview = await context.service.run_blocking(lambda: group.would_commit(seq, expect=expect))
        return context.json(responses.GroupCommitted(context.topic, group.name, preview.from_))
    position = await context.service.run_blocking(lambda: group.commit(seq, expect=expect))
    return context.json(responses.GroupCommitted(context.topic, group.name, position))


@operation(
    "fetchGroup",
    request=api_types.Fetch,
    response=responses.Page,
    errors=("topic_not_found", "group_not_found"),
    body_required=False,
)
def fetch_group(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """Read records after a group's position, which does not change."""
    body = context.decode_body(_fetch_decoder, default=api_types.Fetch())
    topic = context.get_topic()
    return read_after(context, topic, _existing_group(topic, context.path_names[1]).position, body)


@operation(
    "resetGroup",
    request=api_types.ResetGroup,
    response=responses.GroupReset,
    errors=("topic_not_found", "group_not_found", "cursor_conflict"),
)
async def reset_group(context: RequestContext) -> Response:
    """Move a group to any position, or preview the move."""
    body = context.decode_body(_reset_decoder)
    topic, name = context.get_topic(), context.path_names[1]
    group = topic.group(name) if body.create else _existing_group(topic, name)
    to: Any = _resolve_position(body.to)

    def work() -> responses.GroupReset:
        move = group.preview(to)
        if not body.preview:
            group.reset(move.to)
        gap = None if move.gap is None else responses.Tombstone(*move.gap)
        return responses.GroupReset(
            context.topic, group.name, move.from_, move.to, move.records, move.bytes, gap, body.preview
        )

    return context.json(await context.service.run_blocking(work))


@operation(
    "dropGroup", response=responses.GroupDropped, errors=("invalid_request", "topic_not_found", "group_not_found")
)
async def delete_group(context: RequestContext) -> Response:
    """Delete a group."""
    group = _existing_group(context.get_topic(), context.path_names[1])
    deleted = await context.service.run_blocking(group.delete)
    return context.json(responses.GroupDropped(context.topic, group.name, deleted))
