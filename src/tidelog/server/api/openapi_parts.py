"""What the OpenAPI document is put together from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tidelog.server.api import topics
from tidelog.server.api.openapi_schemas import FLAG, TEXT, Schema, number

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
EVENTS: Final = "text/event-stream"
OCTETS: Final = "application/octet-stream"


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class Param(NamedTuple):
    name: str
    schema: Schema
    text: str = ""
    where: str = "query"
    required: bool = False


class Operation(NamedTuple):
    method: str
    path: str
    id: str
    summary: str
    scopes: tuple[str, ...] = ()
    params: tuple[Param, ...] = ()
    takes: Mapping[str, Schema] = _NOTHING  # media type → body
    body_required: bool = True
    gives: Mapping[int, Mapping[str, Schema]] = _NOTHING  # status → media type → body
    refuses: tuple[str, ...] = ()  # codes beside those of every route
    security: tuple[str, ...] = ("bearer",)
    text: str = ""


def flag(name: str, default: bool, text: str) -> Param:
    return Param(name, {**FLAG, "default": default}, text)


PAGED: Final = (
    Param("prefix", TEXT, "Names that begin so."),
    Param("page_size", number("", topics.PAGE, least=1, most=topics.PAGE_MAX)),
    Param("cursor", TEXT, "next_cursor of the page before."),
)
