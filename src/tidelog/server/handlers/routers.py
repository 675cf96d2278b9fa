"""Routers: made and changed, looked at, listed, dropped."""

from __future__ import annotations

from typing import Any

from tidelog import api_types
from tidelog.engine.routing.router import RouterState
from tidelog.errors import RouterNotFound
from tidelog.http.interface import Response
from tidelog.server.handlers.topics import parse_paging
from tidelog.server.request import RequestContext, json_response

_router_decoder = api_types.json_decoder(api_types.Router)


def _router_json(state: RouterState) -> dict[str, Any]:
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


async def put_router(context: RequestContext) -> Response:
    """PUT replaces: options that are not given take their defaults; the ends never change."""
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
    said = {**_router_json(state), "created": state.created, "performance": context.performance()}
    return json_response(said, status=201 if state.created else 200)


def _check_router_allowed(context: RequestContext, state: RouterState | None) -> None:
    if state is not None:
        context.check_name_allowed(state.source)
        context.check_name_allowed(state.dest)


async def get_router(context: RequestContext) -> Response:
    engine, name = context.service.engine, context.path_names[0]
    _check_router_allowed(context, engine.find_router(name, fresh=False))  # before anything is brought on for it
    state = await context.service.run_blocking(lambda: engine.find_router(name))
    if state is None:
        raise RouterNotFound(name)
    said = {**_router_json(state), "forwarded_total": state.forwarded_total, "performance": context.performance()}
    return json_response(said)


async def list_routers(context: RequestContext) -> Response:
    query, owns = context.query, context.principal.may_use_name
    behind, size = parse_paging(query)
    found = context.service.engine.routers(query.text("prefix") or "", query.text("source"), query.text("dest"))
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
        said["next_cursor"] = api_types.encode_page_cursor(mine[size - 1].router)
    return json_response({**said, "performance": context.performance()})


async def delete_router(context: RequestContext) -> Response:
    engine, name = context.service.engine, context.path_names[0]
    _check_router_allowed(context, engine.find_router(name, fresh=False))
    deleted = await context.service.run_blocking(lambda: engine.drop_router(name))
    return json_response({"router": name, "deleted": deleted, "performance": context.performance()})
