"""Groups of consumers: where they stand, and how they move. What a program does with `Topic.group`, over HTTP."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tidelog.engine import Group, GroupState, Topic, timestamp_ms
from tidelog.errors import BadInput, GroupNotFound
from tidelog.server.api import diff
from tidelog.server.api.call import Call, ok
from tidelog.server.api.diff import seq
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Answer, Response
from tidelog.wire import requests

_put = requests.decoder(requests.PutGroup)
_commit = requests.decoder(requests.CommitGroup)
_fetch = requests.decoder(requests.Fetch)
_reset = requests.decoder(requests.ResetGroup)


def _known(topic: Topic, name: str) -> Group:
    """The group of this name, which is there. A name that no group can have is one that none has."""
    try:
        group = topic.group(name)
    except BadInput:
        raise GroupNotFound(topic.name, name) from None
    if not group.exists:
        raise GroupNotFound(topic.name, name)
    return group


def _place(to: requests.Place) -> int | str:
    if isinstance(to, requests.Moment):
        return timestamp_ms(to.ts)
    return to if isinstance(to, str) else seq(to)


def _shown(state: GroupState) -> dict[str, Any]:
    return {
        "group": state.group,
        "position": state.position,
        "head_seq": state.head_seq,
        "lag": state.lag._asdict(),
        "hold_bytes": state.hold_bytes,
        "hold_broken": state.hold_broken,
        "last_commit_ts": state.last_commit_ms,
    }


async def list_all(call: Call) -> Response:
    topic = found(call.service.engine, call.topic)
    states = await call.service.work(lambda: [group.state() for group in topic.groups()])
    return ok({"topic": call.topic, "groups": [_shown(state) for state in states], "performance": call.performance()})


async def state(call: Call) -> Response:
    group = _known(found(call.service.engine, call.topic), call.names[1])
    return ok({"topic": call.topic, **_shown(await call.service.work(group.state)), "performance": call.performance()})


async def put(call: Call) -> Response:
    """PUT replaces: without `hold_bytes` there is no hold. `from` is for a group that is made."""
    body = call.body(_put, empty=requests.PutGroup())
    group = found(call.service.engine, call.topic).group(call.names[1])

    def work() -> tuple[bool, GroupState]:
        created = group.begin(_place(body.from_), hold_bytes=body.hold_bytes)  # type: ignore[arg-type]
        if not created:
            group.hold(body.hold_bytes)
        return created, group.state()

    created, now = await call.service.work(work)
    said = {"topic": call.topic, "created": created, **_shown(now), "performance": call.performance()}
    return ok(said, status=201 if created else 200)


async def commit(call: Call) -> Response:
    body = call.body(_commit)
    group = found(call.service.engine, call.topic).group(call.names[1])
    expect = None if body.expect is None else seq(body.expect)
    position = await call.service.work(lambda: group.commit(seq(body.seq), expect=expect))
    said = {"topic": call.topic, "group": group.name, "position": position}
    return ok({**said, "performance": call.performance()})


def fetch(call: Call) -> Answer | Coroutine[Any, Any, Answer]:
    """A read behind the group, which stays where it is."""
    body = call.body(_fetch, empty=requests.Fetch())
    topic = found(call.service.engine, call.topic)
    return diff.behind(call, topic, _known(topic, call.names[1]).position, body)


async def reset(call: Call) -> Response:
    body = call.body(_reset)
    group = _known(found(call.service.engine, call.topic), call.names[1])
    to: Any = _place(body.to)

    def work() -> dict[str, Any]:
        look = group.preview(to)
        if not body.preview:
            group.reset(look.to)
        gap = None if look.gap is None else look.gap._asdict()
        return {"from": look.from_, "to": look.to, "records": look.records, "bytes": look.bytes, "gap": gap}

    done = await call.service.work(work)
    said = {"topic": call.topic, "group": group.name, **done, "preview": body.preview}
    return ok({**said, "performance": call.performance()})


async def drop(call: Call) -> Response:
    group = _known(found(call.service.engine, call.topic), call.names[1])
    deleted = await call.service.work(group.delete)
    return ok({"topic": call.topic, "group": group.name, "deleted": deleted, "performance": call.performance()})
