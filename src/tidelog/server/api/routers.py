"""Routers: made and changed, looked at, listed, dropped."""

from __future__ import annotations

from typing import Any

from tidelog.engine.routing.router import RouterState
from tidelog.errors import RouterNotFound
from tidelog.server.api.call import Call, ok
from tidelog.server.api.topics import paged
from tidelog.server.http.seam import Response
from tidelog.wire import cursor, requests

_decoder = requests.decoder(requests.Router)


def _told(state: RouterState) -> dict[str, Any]:
    return {
        "router": state.router,
        "source": state.source,
        "dest": state.dest,
        "preserve_node": state.preserve_node,
        "preserve_tag": state.preserve_tag,
        "filter": state.filter,
        "allow_cycle": state.allow_cycle,
        "guarantee": state.guarantee,
    }


async def put(call: Call) -> Response:
    """PUT replaces: options that are not given take their defaults; the ends never change."""
    body, name = call.body(_decoder), call.names[0]
    call.own(body.source)
    call.own(body.dest)
    engine = call.service.engine
    _own(call, engine.find_router(name, fresh=False))
    state = await call.service.work(
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
    said = {**_told(state), "created": state.created, "performance": call.performance()}
    return ok(said, status=201 if state.created else 200)


def _own(call: Call, state: RouterState | None) -> None:
    if state is not None:
        call.own(state.source)
        call.own(state.dest)


async def get(call: Call) -> Response:
    engine, name = call.service.engine, call.names[0]
    _own(call, engine.find_router(name, fresh=False))  # before anything is brought on for it
    state = await call.service.work(lambda: engine.find_router(name))
    if state is None:
        raise RouterNotFound(name)
    said = {**_told(state), "forwarded_total": state.forwarded_total, "performance": call.performance()}
    return ok(said)


async def list_all(call: Call) -> Response:
    query, owns = call.query, call.principal.owns
    behind, size = paged(query)
    found = call.service.engine.routers(query.text("prefix") or "", query.text("source"), query.text("dest"))
    mine = [
        state
        for state in found
        if state.router > behind and owns(state.router) and owns(state.source) and owns(state.dest)
    ]
    said: dict[str, Any] = {
        "routers": [
            {
                "router": state.router,
                "source": state.source,
                "dest": state.dest,
                "guarantee": state.guarantee,
                "forwarded_total": state.forwarded_total,
            }
            for state in mine[:size]
        ]
    }
    if len(mine) > size:
        said["next_cursor"] = cursor.page(mine[size - 1].router)
    return ok({**said, "performance": call.performance()})


async def drop(call: Call) -> Response:
    engine, name = call.service.engine, call.names[0]
    _own(call, engine.find_router(name, fresh=False))
    deleted = await call.service.work(lambda: engine.drop_router(name))
    return ok({"router": name, "deleted": deleted, "performance": call.performance()})
