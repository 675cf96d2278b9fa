"""The version of a server, and its settings in effect.

    GET  /v0/version            of the server, its Python and its compiled modules
    GET  /v0/settings           every setting with its value; secrets are hidden

What is about the whole server needs a key for all names.
"""

from __future__ import annotations

import platform
from dataclasses import fields
from typing import Any, Final

from tidelog import native
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.config import ServerConfig
from tidelog.server.errors import ApiError
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext
from tidelog.version import __version__

API_VERSION: Final = "v0"
_SECRET_SETTINGS: Final = tuple(setting.name for setting in fields(ServerConfig) if not setting.repr)


def check_for_all_names(context: RequestContext) -> None:
    """Refuse a key with prefixes."""
    if context.principal.prefixes:
        raise ApiError(
            "forbidden",
            "this is about the whole server, and this key is for some names only; nothing was done, use a key without "
            "prefixes",
        )


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
    check_for_all_names(context)
    config = context.service.config
    shown = {setting.name: getattr(config, setting.name) for setting in fields(config) if setting.repr}
    return context.json(responses.Settings(shown, list(_SECRET_SETTINGS)))
