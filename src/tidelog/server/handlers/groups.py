"""Groups of consumers: where they stand, and how they move. What a program does with `Topic.group`, over HTTP."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tidelog import api_types
from tidelog.engine import Group, GroupState, Topic, timestamp_ms
from tidelog.errors import BadInput, GroupNotFound
from tidelog.http.interface import AnyResponse, Response
from tidelog.server.handlers import records
from tidelog.server.handlers.records import clamp_seq
from tidelog.server.handlers.topics import get_topic
from tidelog.server.request import RequestContext, json_response

_put_decoder = api_types.json_decoder(api_types.PutGroup)
_commit_decoder = api_types.json_decoder(api_types.CommitGroup)
_fetch_decoder = api_types.json_decoder(api_types.Fetch)
_reset_decoder = api_types.json_decoder(api_types.ResetGroup)


def _existing_group(topic: Topic, name: str) -> Group:
    """The group of this name, which is there. A name that no group can have is one that none has."""
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


def _group_json(state: GroupState) -> dict[str, Any]:
    return {
        "group": state.group,
        "position": state.position,
        "head_seq": state.head_seq,
        "lag": state.lag._asdict(),
        "hold_bytes": state.hold_bytes,
        "hold_broken": state.hold_broken,
        "last_commit_ts": state.last_commit_ms,
    }


async def list_groups(context: RequestContext) -> Response:
    topic = get_topic(context.service.engine, context.topic)
    states = await context.service.run_blocking(lambda: [group.state() for group in topic.groups()])
    return json_response(
        {
            "topic": context.topic,
            "groups": [_group_json(state) for state in states],
            "performance": context.performance(),
        }
    )


async def get_group(context: RequestContext) -> Response:
    group = _existing_group(get_topic(context.service.engine, context.topic), context.path_names[1])
    return json_response(
        {
            "topic": context.topic,
            **_group_json(await context.service.run_blocking(group.state)),
            "performance": context.performance(),
        }
    )


async def put_group(context: RequestContext) -> Response:
    """PUT replaces: without `hold_bytes` there is no hold. `from` is for a group that is made."""
    body = context.decode_body(_put_decoder, default=api_types.PutGroup())
    group = get_topic(context.service.engine, context.topic).group(context.path_names[1])

    def work() -> tuple[bool, GroupState]:
        created = group.begin(_resolve_position(body.from_), hold_bytes=body.hold_bytes)  # type: ignore[arg-type]
        if not created:
            group.hold(body.hold_bytes)
        return created, group.state()

    created, now = await context.service.run_blocking(work)
    said = {"topic": context.topic, "created": created, **_group_json(now), "performance": context.performance()}
    return json_response(said, status=201 if created else 200)


async def commit_group(context: RequestContext) -> Response:
    body = context.decode_body(_commit_decoder)
    group = get_topic(context.service.engine, context.topic).group(context.path_names[1])
    expect = None if body.expect is None else clamp_seq(body.expect)
    position = await context.service.run_blocking(lambda: group.commit(clamp_seq(body.seq), expect=expect))
    said = {"topic": context.topic, "group": group.name, "position": position}
    return json_response({**said, "performance": context.performance()})


def fetch_group(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse]:
    """A read behind the group, which stays where it is."""
    body = context.decode_body(_fetch_decoder, default=api_types.Fetch())
    topic = get_topic(context.service.engine, context.topic)
    return records.read_after(context, topic, _existing_group(topic, context.path_names[1]).position, body)


async def reset_group(context: RequestContext) -> Response:
    body = context.decode_body(_reset_decoder)
    group = _existing_group(get_topic(context.service.engine, context.topic), context.path_names[1])
    to: Any = _resolve_position(body.to)

    def work() -> dict[str, Any]:
        look = group.preview(to)
        if not body.preview:
            group.reset(look.to)
        gap = None if look.gap is None else look.gap._asdict()
        return {"from": look.from_, "to": look.to, "records": look.records, "bytes": look.bytes, "gap": gap}

    done = await context.service.run_blocking(work)
    said = {"topic": context.topic, "group": group.name, **done, "preview": body.preview}
    return json_response({**said, "performance": context.performance()})


async def delete_group(context: RequestContext) -> Response:
    group = _existing_group(get_topic(context.service.engine, context.topic), context.path_names[1])
    deleted = await context.service.run_blocking(group.delete)
    return json_response(
        {"topic": context.topic, "group": group.name, "deleted": deleted, "performance": context.performance()}
    )
