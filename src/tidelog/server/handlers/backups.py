"""Endpoints of backups: make one of the whole database while it serves, and list those of a target.

A backup is written by the server, so its target is a place that the server may write: TIDELOG_BACKUP_TARGETS lists
directories and addresses, and a request names one of them or something below one. Without the setting there are no
backups over HTTP. A key needs the scope admin for all names, because a backup contains every topic.
"""

from __future__ import annotations

from functools import partial
from posixpath import normpath

from tidelog import api_types
from tidelog.addresses import scheme_of
from tidelog.disk.segment_store import shown_address
from tidelog.engine.backup_target import BackupInfo, list_backups
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.openapi import STRING, Parameter, operation
from tidelog.server.request import RequestContext

_decoder = api_types.body_decoder(api_types.BackupToMake)


@operation(
    "createBackup",
    request=api_types.BackupToMake,
    response=responses.BackupMade,
    errors=("invalid_request", "forbidden", "throttled", "disk_full", "internal"),
    statuses=(201,),
)
async def create_backup(context: RequestContext) -> Response:
    """Back up the whole database while it serves.

    Returns when the backup is whole. It goes on if the client disconnects. One backup is made at a time.
    """
    body = context.decode_body(_decoder)
    target = _allowed_target(context, body.target)
    call = partial(
        context.service.database.backup,
        target,
        incremental=body.incremental,
        link=body.link,
        accept_damage=body.accept_damage,
    )
    info = await context.service.run_long(call)
    return context.json(responses.BackupMade(shown_address(target), _row(info)), status=201)


@operation(
    "listBackups",
    response=responses.BackupList,
    params=(Parameter("target", STRING, "Where the backups are; by default the first configured target."),),
    errors=("invalid_request", "forbidden", "internal"),
)
async def list_target(context: RequestContext) -> Response:
    """List the backups of a target, oldest first."""
    target = _allowed_target(context, context.query.text("target"))
    disk = context.service.engine.context.disk
    listing = await context.service.run_long(partial(list_backups, target, disk=disk))
    rows = [_row(info) for info in listing.backups]
    return context.json(responses.BackupList(shown_address(target), rows, listing.unfinished, listing.unreadable))


def _row(info: BackupInfo) -> responses.Backup:
    return responses.Backup(**info._asdict() | {"damaged": list(info.damaged), "external": list(info.external)})


def _allowed_target(context: RequestContext, wanted: str | None) -> str:
    """The target that a request names, or the first configured one. Raises ApiError for any other."""
    context.check_all_names_allowed()
    allowed = [target.strip() for target in context.service.config.backup_targets.split(",") if target.strip()]
    if not allowed:
        raise ApiError(
            "forbidden",
            "this server makes no backups over HTTP; nothing was done, set TIDELOG_BACKUP_TARGETS to the directories "
            "and addresses that it may write",
        )
    if wanted is None:
        return allowed[0]
    place = wanted.rstrip("/")
    is_plain = ".." not in place.split("/") and (scheme_of(place) is not None or normpath(place) == place)
    if not is_plain or not any(f"{place}/".startswith(f"{target.rstrip('/')}/") for target in allowed):
        raise ApiError(
            "forbidden",
            "the target is not in TIDELOG_BACKUP_TARGETS of this server; nothing was done",
            {"target": shown_address(wanted)},
        )
    return place
