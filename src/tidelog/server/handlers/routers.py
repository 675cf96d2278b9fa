"""Routers over HTTP: create and change, describe, list, remove."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET

from tidelog import api_types
from tidelog.engine.routing.router import RouterState
from tidelog.errors import RouterNotFound
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.handlers.topics import parse_paging
from tidelog.server.openapi import PAGING_PARAMS, TOPIC_NAME, Parameter, operation
from tidelog.server.request import RequestContext

_router_decoder = api_types.json_decoder(api_types.RouterToMake)


_OPTIONS: Final = responses.RouterOptions.__struct_fields__


def _option_fields(state: RouterState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _OPTIONS}


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
    next_cursor = api_types.encode_page_cursor(rows[-1].router) if len(allowed) > size else UNSET
    return context.json(responses.RouterList(rows, next_cursor))


@operation("dropRouter", response=responses.RouterDropped)
async def delete_router(context: RequestContext) -> Response:
    """Remove a router; copied records stay."""
    engine, name = context.service.engine, context.path_names[0]
    _check_router_allowed(context, engine.find_router(name, fresh=False))
    deleted = await context.service.run_blocking(lambda: engine.drop_router(name))
    return context.json(responses.RouterDropped(name, deleted))
