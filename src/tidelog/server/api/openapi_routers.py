"""What the OpenAPI document says of routers."""

from __future__ import annotations

from typing import Final

from tidelog.server.api.auth import ADMIN, DELETE, READ
from tidelog.server.api.openapi_parts import JSON, PAGED, Operation, Param
from tidelog.server.api.openapi_schemas import TOPIC, ref

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET",
        "/v0/routers",
        "listRouters",
        "The routers that the key is for, by name",
        (READ,),
        (*PAGED, Param("source", TOPIC, "Only those from this topic."), Param("dest", TOPIC, "Only those to it.")),
        gives={200: {JSON: ref("RouterList")}},
        refuses=("invalid_request",),
    ),
    Operation(
        "PUT",
        "/v0/routers/{router}",
        "putRouter",
        "Make a router, or replace its options",
        (ADMIN,),
        takes={JSON: ref("RouterToMake")},
        gives={200: {JSON: ref("RouterMade")}, 201: {JSON: ref("RouterMade")}},
        refuses=(
            *("invalid_request", "topic_not_found", "topic_exists_incompatible", "router_cycle"),
            *("payload_too_large", "unsupported_media_type"),
        ),
        text="Records that the source gets from now on are passed on to the dest; topics that are not there are made.",
    ),
    Operation(
        "GET",
        "/v0/routers/{router}",
        "getRouter",
        "A router, and how much it has passed on of all that its source holds",
        (READ,),
        gives={200: {JSON: ref("Router")}},
        refuses=("router_not_found",),
    ),
    Operation(
        "DELETE",
        "/v0/routers/{router}",
        "dropRouter",
        "Stop passing on; copies stay",
        (DELETE,),
        gives={200: {JSON: ref("RouterDropped")}},
    ),
)
