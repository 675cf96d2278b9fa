"""Endpoints of maintenance: a checkpoint now, details of background work, and the receipts of erasures.

All of them are about every topic, so the key is for all names.
"""

from __future__ import annotations

import msgspec

from tidelog import api_types
from tidelog.engine.erase import ErasureReceipt
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext

_verify_decoder = api_types.json_decoder(api_types.VerifyErasures)


def _check_all_names(context: RequestContext) -> None:
    if context.principal.prefixes:
        raise ApiError("forbidden", "this is about all topics, and this key is for some; nothing was done")


@operation("checkpoint", response=responses.Checkpointed, errors=("disk_full",), body_required=False)
async def checkpoint(context: RequestContext) -> Response:
    """Copy records that only the WAL has into segments, and truncate the WAL."""
    _check_all_names(context)
    engine = context.service.engine
    await context.service.run_long(engine.checkpoint)
    return context.json(responses.Checkpointed(engine.generation))


@operation("getHealthDetails", response=responses.HealthDetails)
async def get_health_details(context: RequestContext) -> Response:
    """Show background work with its last errors, and the stored bytes that did not verify."""
    _check_all_names(context)
    state = await context.service.run_blocking(context.service.engine.health)
    tasks = [responses.TaskDetails(**task._asdict()) for task in state.tasks]
    corrupt = [responses.CorruptPlace(*place) for place in state.corrupt]
    fields = state._asdict() | {"tasks": tasks, "lagging": list(state.lagging), "corrupt": corrupt}
    return context.json(responses.HealthDetails(**fields))


@operation("listErasures", response=responses.ErasureList)
async def list_erasures(context: RequestContext) -> Response:
    """List the receipts of all erasures, oldest first."""
    _check_all_names(context)
    receipts = await context.service.run_blocking(context.service.engine.erasures)
    return context.json(responses.ErasureList([msgspec.to_builtins(receipt) for receipt in receipts]))


@operation(
    "verifyErasures",
    request=api_types.VerifyErasures,
    response=responses.ErasuresVerified,
    errors=("invalid_request",),
    body_required=False,
)
async def verify_erasures(context: RequestContext) -> Response:
    """Verify the chain of receipts; a receipt that the caller kept must be part of it."""
    _check_all_names(context)
    body = context.decode_body(_verify_decoder, default=api_types.VerifyErasures())
    try:
        receipt = msgspec.json.decode(body.receipt, type=ErasureReceipt | None)
    except msgspec.ValidationError as error:
        raise ApiError("invalid_request", f"that is no receipt: {error}; nothing was done") from None
    engine = context.service.engine
    found = await context.service.run_blocking(lambda: engine.verify_erasures(receipt))
    return context.json(responses.ErasuresVerified(found.receipts, list(found.problems)))
