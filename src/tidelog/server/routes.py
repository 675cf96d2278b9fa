"""The table of routes: every path with its methods, handlers and scopes.

`{…}` stands for one decoded part of a path. The OpenAPI document lists the routes in this order; what it says about a
handler is in the handler's `@operation` and docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

import msgspec

from tidelog.http.interface import Response
from tidelog.server import openapi
from tidelog.server.auth import ADMIN, DELETE, READ, WRITE
from tidelog.server.handlers import (
    batches,
    bulk_read,
    bulk_write,
    channels,
    groups,
    health,
    queues,
    records,
    routers,
    segments,
    sse,
    topics,
    websocket,
)
from tidelog.server.openapi import operation
from tidelog.server.request import BULK_CONTENT_TYPES, Endpoint, Handler, RequestContext, path_segments


class Route(NamedTuple):
    path: str
    family: str  # the kind of name that the first `{…}` is: "topics", "routers", "channels"; "": none
    methods: Mapping[str, Endpoint]

    @property
    def is_probe(self) -> bool:
        return any(endpoint.is_probe for endpoint in self.methods.values())


class RouteMatch(NamedTuple):
    route: Route
    path_names: tuple[str, ...]


@operation("openapi", response=dict)
def get_openapi(_: RequestContext) -> Response:
    """Read this document."""
    return Response(200, document_bytes())


@cache
def document_bytes() -> bytes:
    """The OpenAPI document."""
    return msgspec.json.encode(openapi.build_document(ROUTES))


_READ, _WRITE, _DELETE, _ADMIN = (frozenset((scope,)) for scope in (READ, WRITE, DELETE, ADMIN))
_READ_WRITE = _READ | _WRITE


def _channel_route(path: str, method: str, handler: Handler, scopes: frozenset[str]) -> Route:
    return Route(f"/v0/channels/{{channel}}/{path}", "channels", {method: Endpoint(handler, scopes)})


ROUTES: Final[tuple[Route, ...]] = (
    Route("/v0/topics", "", {"GET": Endpoint(topics.list_topics, _READ)}),
    Route(
        "/v0/topics/{topic}",
        "topics",
        {
            "PUT": Endpoint(topics.configure_topic, _ADMIN),
            "GET": Endpoint(topics.describe_topic, _READ),
            "DELETE": Endpoint(topics.delete_topic, _DELETE),
            "POST": Endpoint(
                bulk_write.append_records,
                _WRITE,
                accepts_large_body=True,
                streamed_types=BULK_CONTENT_TYPES,
                fast_kind="write",
            ),
        },
    ),
    Route("/v0/topics/{topic}/diff", "topics", {"POST": Endpoint(records.diff, _READ, fast_kind="diff")}),
    Route("/v0/topics/{topic}/delete", "topics", {"POST": Endpoint(records.delete_records, _DELETE)}),
    Route("/v0/topics/{topic}/records", "topics", {"GET": Endpoint(bulk_read.read_records, _READ)}),
    Route("/v0/topics/{topic}/seek", "topics", {"POST": Endpoint(records.seek_by_time, _READ)}),
    Route("/v0/topics/{topic}/claim", "topics", {"POST": Endpoint(queues.claim_jobs, _READ_WRITE, fast_kind="claim")}),
    Route("/v0/topics/{topic}/ack", "topics", {"POST": Endpoint(queues.ack_jobs, _WRITE, fast_kind="ack")}),
    Route("/v0/topics/{topic}/nack", "topics", {"POST": Endpoint(queues.nack_jobs, _WRITE)}),
    Route("/v0/topics/{topic}/extend", "topics", {"POST": Endpoint(queues.extend_leases, _WRITE)}),
    Route("/v0/topics/{topic}/work", "topics", {"GET": Endpoint(sse.stream_jobs, _READ_WRITE, token_in_query=True)}),
    Route("/v0/topics/{topic}/history", "topics", {"GET": Endpoint(queues.queue_history, _READ)}),
    Route("/v0/topics/{topic}/redrive", "topics", {"POST": Endpoint(queues.redrive_records, _WRITE)}),
    Route("/v0/topics/{topic}/segments", "topics", {"GET": Endpoint(segments.list_segments, _READ)}),
    Route("/v0/topics/{topic}/segments/{base}/{file}", "topics", {"GET": Endpoint(segments.read_segment_file, _READ)}),
    Route("/v0/topics/{topic}/groups", "topics", {"GET": Endpoint(groups.list_groups, _READ)}),
    Route(
        "/v0/topics/{topic}/groups/{group}",
        "topics",
        {
            "GET": Endpoint(groups.get_group, _READ),
            "PUT": Endpoint(groups.put_group, _WRITE),
            "DELETE": Endpoint(groups.delete_group, _DELETE),
        },
    ),
    Route("/v0/topics/{topic}/groups/{group}/commit", "topics", {"POST": Endpoint(groups.commit_group, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/fetch", "topics", {"POST": Endpoint(groups.fetch_group, _READ)}),
    Route("/v0/topics/{topic}/groups/{group}/reset", "topics", {"POST": Endpoint(groups.reset_group, _WRITE)}),
    Route(
        "/v0/topics/{topic}/batches",
        "topics",
        {
            "GET": Endpoint(batches.list_batches, _READ),
            "POST": Endpoint(batches.publish_batch, _WRITE, accepts_large_body=True),
        },
    ),
    Route(
        "/v0/topics/{topic}/staging/{chunk}",
        "topics",
        {
            "PUT": Endpoint(
                batches.stage_chunk, _WRITE, accepts_large_body=True, streamed_types=batches.STAGING_CONTENT_TYPES
            ),
            "DELETE": Endpoint(batches.clear_staging, _WRITE),
        },
    ),
    Route("/v0/topics/{topic}/gaps", "topics", {"GET": Endpoint(topics.list_topic_gaps, _READ)}),
    Route("/v0/gaps", "", {"GET": Endpoint(topics.list_gaps, _READ)}),
    Route("/v0/routers", "", {"GET": Endpoint(routers.list_routers, _READ)}),
    Route(
        "/v0/routers/{router}",
        "routers",
        {
            "PUT": Endpoint(routers.put_router, _ADMIN),
            "GET": Endpoint(routers.get_router, _READ),
            "DELETE": Endpoint(routers.delete_router, _DELETE),
        },
    ),
    Route("/v0/channels", "", {"GET": Endpoint(channels.list_channels, _READ)}),
    Route(
        "/v0/channels/{channel}",
        "channels",
        {
            "PUT": Endpoint(channels.put_channel, channels.CONFIGURE_SCOPES),
            "GET": Endpoint(channels.get_channel, _READ),
            "DELETE": Endpoint(channels.delete_channel, channels.DELETE_CHANNEL.scopes),
        },
    ),
    _channel_route("join", "POST", channels.join_channel, channels.JOIN.scopes),
    _channel_route("leave", "POST", channels.leave_channel, channels.LEAVE.scopes),
    _channel_route("members", "GET", channels.list_members, channels.MEMBERS.scopes),
    Route(
        "/v0/channels/{channel}/acl",
        "channels",
        {
            "GET": Endpoint(channels.get_channel_acl, _READ),
            "POST": Endpoint(channels.set_channel_acl, channels.SET_ACL.scopes),
        },
    ),
    _channel_route("publish", "POST", channels.publish_to_channel, channels.PUBLISH_SCOPES),
    _channel_route("history", "GET", channels.channel_history, channels.HISTORY.scopes),
    Route(
        "/v0/channels/{channel}/events",
        "channels",
        {"GET": Endpoint(channels.follow_channel, channels.SUBSCRIBE_SCOPES, token_in_query=True)},
    ),
    _channel_route("push", "POST", channels.push_to_channel, channels.PUSH.scopes),
    _channel_route("pop", "POST", channels.pop_from_channel, channels.POP.scopes),
    _channel_route("clear", "POST", channels.clear_channel, channels.CLEAR.scopes),
    Route("/v0/watch", "", {"POST": Endpoint(sse.create_watch, _READ)}),
    Route("/v0/watch/{wid}", "", {"GET": Endpoint(sse.stream_watch, handler_authenticates=True)}),
    Route("/v0/ws", "", {"GET": Endpoint(websocket.open_websocket)}),
    Route("/v0/metrics", "", {"GET": Endpoint(health.get_metrics, _READ, before_recovery=True)}),
    Route("/v0/openapi.json", "", {"GET": Endpoint(get_openapi, before_recovery=True)}),
    Route("/v0/health", "", {"GET": Endpoint(health.get_health, is_probe=True, before_recovery=True)}),
    Route("/healthz", "", {"GET": Endpoint(health.get_healthz, is_probe=True, before_recovery=True)}),
    Route("/v0/ready", "", {"GET": Endpoint(health.get_ready, is_probe=True, before_recovery=True)}),
    Route("/readyz", "", {"GET": Endpoint(health.get_readyz, is_probe=True, before_recovery=True)}),
)

_ROUTES_BY_LENGTH: Final[dict[int, list[tuple[list[str], Route]]]] = {}
for _route in ROUTES:
    _pattern = _route.path.split("/")[1:]
    _ROUTES_BY_LENGTH.setdefault(len(_pattern), []).append((_pattern, _route))


def find_route(path: str) -> RouteMatch | None:
    """Return the route of a path and the names in it, or None."""
    parts = path_segments(path)
    for pattern, route in _ROUTES_BY_LENGTH.get(len(parts), ()):
        if all(
            (expected[0] == "{" and part) or expected == part for expected, part in zip(pattern, parts, strict=True)
        ):
            return RouteMatch(
                route, tuple(part for expected, part in zip(pattern, parts, strict=True) if expected[0] == "{")
            )
    return None
