"""Consumer groups over HTTP: the operations of `Topic.group`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tidelog import api_types
from tidelog.engine import Group, GroupState, Topic, timestamp_ms
from tidelog.errors import BadInput, GroupNotFound
from tidelog.http.interface import AnyResponse, Response
from tidelog.server import response_types as responses
from tidelog.server.handlers import records
from tidelog.server.handlers.records import clamp_seq
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext

_put_decoder = api_types.json_decoder(api_types.PutGroup)
_commit_decoder = api_types.json_decoder(api_types.CommitGroup)
_fetch_decoder = api_types.json_decoder(api_types.Fetch)
_reset_decoder = api_types.json_decoder(api_types.ResetGroup)


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


@operation("getGroup", response=responses.GroupShown, errors=("topic_not_found", "group_not_found"))
async def get_group(context: RequestContext) -> Response:
    """Read a group's position and lag."""
    group = _existing_group(context.get_topic(), context.path_names[1])
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
        if not created:
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
    position = await context.service.run_blocking(lambda: group.commit(clamp_seq(body.seq), expect=expect))
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
    return records.read_after(context, topic, _existing_group(topic, context.path_names[1]).position, body)


@operation(
    "resetGroup",
    request=api_types.ResetGroup,
    response=responses.GroupReset,
    errors=("topic_not_found", "group_not_found", "cursor_conflict"),
)
async def reset_group(context: RequestContext) -> Response:
    """Move a group to any position, or preview the move."""
    body = context.decode_body(_reset_decoder)
    group = _existing_group(context.get_topic(), context.path_names[1])
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
