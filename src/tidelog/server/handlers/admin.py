"""Endpoints about the whole server: its version and settings, a checkpoint now, background work, receipts of erasures.

What is about the whole server needs a key for all names.
"""

from __future__ import annotations

import platform
from dataclasses import fields
from typing import Any, Final

import msgspec

from tidelog import api_types, native
from tidelog.engine.erase import ErasureReceipt
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext
from tidelog.version import __version__

API_VERSION: Final = "v0"
_SECRET_SETTINGS: Final = tuple(setting.name for setting in fields(ServerConfig) if not setting.repr)


@operation("getVersion", response=responses.Version)
def get_version(context: RequestContext) -> Response:
    """Read the version of the server."""
    return context.json(responses.Version(**build_info()))


def build_info() -> dict[str, Any]:
    """What runs here."""
    return {
        "version": __version__,
        "api": API_VERSION,
        "python": platform.python_version(),
        "compiled": native.COMPILED,
    }


@operation("getSettings", response=responses.Settings)
def get_settings(context: RequestContext) -> Response:
    """List the settings in effect.

    Those that hold keys, secrets or addresses with credentials are in `hidden`, without their values.
    """
    context.check_all_names_allowed()
    config = context.service.config
    shown = {setting.name: getattr(config, setting.name) for setting in fields(config) if setting.repr}
    return context.json(responses.Settings(shown, list(_SECRET_SETTINGS)))


_verify_decoder = api_types.json_decoder(api_types.VerifyErasures)


@operation("checkpoint", response=responses.Checkpointed, errors=("disk_full",), body_required=False)
async def checkpoint(context: RequestContext) -> Response:
    """Copy records that only the WAL has into segments, and truncate the WAL."""
    context.check_all_names_allowed()
    engine = context.service.engine
    await context.service.run_long(engine.checkpoint)
    return context.json(responses.Checkpointed(engine.generation))


@operation("getHealthDetails", response=responses.HealthDetails)
async def get_health_details(context: RequestContext) -> Response:
    """Show background work with its last errors, and the stored bytes that did not verify."""
    context.check_all_names_allowed()
    state = await context.service.run_blocking(context.service.engine.health)
    tasks = [responses.TaskDetails(**task._asdict()) for task in state.tasks]
    corrupt = [responses.CorruptPlace(*place) for place in state.corrupt]
    fields = state._asdict() | {"tasks": tasks, "lagging": list(state.lagging), "corrupt": corrupt}
    return context.json(responses.HealthDetails(**fields))


@operation("listErasures", response=responses.ErasureList)
async def list_erasures(context: RequestContext) -> Response:
    """List the receipts of all erasures, oldest first."""
    context.check_all_names_allowed()
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
    context.check_all_names_allowed()
    body = context.decode_body(_verify_decoder, default=api_types.VerifyErasures())
    try:
        receipt = msgspec.json.decode(body.receipt, type=ErasureReceipt | None)
    except msgspec.ValidationError as error:
        raise ApiError("invalid_request", f"that is no receipt: {error}; nothing was done") from None
    engine = context.service.engine
    found = await context.service.run_blocking(lambda: engine.verify_erasures(receipt))
    return context.json(responses.ErasuresVerified(found.receipts, list(found.problems)))
