"""Which path is whose. `{…}` stands for one part of the path, decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tidelog.server.api import (
    batches,
    bulk,
    channel_events,
    channel_messages,
    channels,
    delete,
    diff,
    gaps,
    groups,
    history,
    metrics,
    openapi,
    probes,
    queues,
    redrive,
    routers,
    seek,
    segments,
    socket,
    topics,
    watch,
    work,
    write,
)
from tidelog.server.api.auth import ADMIN, DELETE, READ, WRITE
from tidelog.server.api.call import Endpoint
from tidelog.server.api.query import segments as parts_of


class Route(NamedTuple):
    path: str
    family: str  # whose names the first `{…}` is one of: "topics", "routers", "channels"; "": nobody's
    methods: Mapping[str, Endpoint]

    @property
    def is_probe(self) -> bool:
        return any(endpoint.is_probe for endpoint in self.methods.values())


class Found(NamedTuple):
    route: Route
    names: tuple[str, ...]


_READ, _WRITE, _DELETE, _ADMIN = (frozenset((scope,)) for scope in (READ, WRITE, DELETE, ADMIN))
_WORK = _READ | _WRITE
_PROBES: Final = {
    "/v0/health": probes.health,
    "/healthz": probes.health,
    "/v0/ready": probes.ready,
    "/readyz": probes.ready,
}

TABLE: Final[tuple[Route, ...]] = (
    Route("/v0/topics", "", {"GET": Endpoint(topics.list_all, _READ)}),
    Route(
        "/v0/topics/{topic}",
        "topics",
        {
            "PUT": Endpoint(topics.configure, _ADMIN),
            "GET": Endpoint(topics.state, _READ),
            "DELETE": Endpoint(topics.drop, _DELETE),
            "POST": Endpoint(write.write, _WRITE, is_large=True, streams=bulk.CONTENT_TYPES, express="write"),
        },
    ),
    Route("/v0/topics/{topic}/diff", "topics", {"POST": Endpoint(diff.diff, _READ, express="diff")}),
    Route("/v0/topics/{topic}/delete", "topics", {"POST": Endpoint(delete.delete, _DELETE)}),
    Route("/v0/topics/{topic}/records", "topics", {"GET": Endpoint(bulk.read, _READ)}),
    Route("/v0/topics/{topic}/seek", "topics", {"POST": Endpoint(seek.seek, _READ)}),
    Route("/v0/topics/{topic}/claim", "topics", {"POST": Endpoint(queues.claim, _WORK, express="claim")}),
    Route("/v0/topics/{topic}/ack", "topics", {"POST": Endpoint(queues.ack, _WRITE, express="ack")}),
    Route("/v0/topics/{topic}/nack", "topics", {"POST": Endpoint(queues.nack, _WRITE)}),
    Route("/v0/topics/{topic}/extend", "topics", {"POST": Endpoint(queues.extend, _WRITE)}),
    Route("/v0/topics/{topic}/work", "topics", {"GET": Endpoint(work.work, _WORK, token_in_query=True)}),
    Route("/v0/topics/{topic}/history", "topics", {"GET": Endpoint(history.history, _READ)}),
    Route("/v0/topics/{topic}/redrive", "topics", {"POST": Endpoint(redrive.redrive, _WRITE)}),
    Route("/v0/topics/{topic}/segments", "topics", {"GET": Endpoint(segments.manifest, _READ)}),
    Route("/v0/topics/{topic}/segments/{base}/{file}", "topics", {"GET": Endpoint(segments.file, _READ)}),
    Route("/v0/topics/{topic}/groups", "topics", {"GET": Endpoint(groups.list_all, _READ)}),
    Route(
        "/v0/topics/{topic}/groups/{group}",
        "topics",
        {
            "GET": Endpoint(groups.state, _READ),
            "PUT": Endpoint(groups.put, _WRITE),
            "DELETE": Endpoint(groups.drop, _DELETE),
        },
    ),
    Route("/v0/topics/{topic}/groups/{group}/commit", "topics", {"POST": Endpoint(groups.commit, _WRITE)}),
    Route("/v0/topics/{topic}/groups/{group}/fetch", "topics", {"POST": Endpoint(groups.fetch, _READ)}),
    Route("/v0/topics/{topic}/groups/{group}/reset", "topics", {"POST": Endpoint(groups.reset, _WRITE)}),
    Route(
        "/v0/topics/{topic}/batches",
        "topics",
        {"GET": Endpoint(batches.known, _READ), "POST": Endpoint(batches.publish, _WRITE, is_large=True)},
    ),
    Route(
        "/v0/topics/{topic}/staging/{chunk}",
        "topics",
        {
            "PUT": Endpoint(batches.stage, _WRITE, is_large=True, streams=batches.CONTENT_TYPES),
            "DELETE": Endpoint(batches.clear, _WRITE),
        },
    ),
    Route("/v0/topics/{topic}/gaps", "topics", {"GET": Endpoint(gaps.of_topic, _READ)}),
    Route("/v0/gaps", "", {"GET": Endpoint(gaps.of_all, _READ)}),
    Route("/v0/routers", "", {"GET": Endpoint(routers.list_all, _READ)}),
    Route(
        "/v0/routers/{router}",
        "routers",
        {
            "PUT": Endpoint(routers.put, _ADMIN),
            "GET": Endpoint(routers.get, _READ),
            "DELETE": Endpoint(routers.drop, _DELETE),
        },
    ),
    Route("/v0/channels", "", {"GET": Endpoint(channels.list_all, _READ)}),
    Route(
        "/v0/channels/{channel}",
        "channels",
        {
            "PUT": Endpoint(channels.put, _WRITE),
            "GET": Endpoint(channels.state, _READ),
            "DELETE": Endpoint(channels.drop, _DELETE),
        },
    ),
    Route("/v0/channels/{channel}/join", "channels", {"POST": Endpoint(channels.join, _WRITE)}),
    Route("/v0/channels/{channel}/leave", "channels", {"POST": Endpoint(channels.leave, _WRITE)}),
    Route("/v0/channels/{channel}/members", "channels", {"GET": Endpoint(channels.members, _READ)}),
    Route(
        "/v0/channels/{channel}/acl",
        "channels",
        {"GET": Endpoint(channels.get_acl, _READ), "POST": Endpoint(channels.set_acl, _WRITE)},
    ),
    Route("/v0/channels/{channel}/publish", "channels", {"POST": Endpoint(channel_messages.publish, _WRITE)}),
    Route("/v0/channels/{channel}/history", "channels", {"GET": Endpoint(channel_messages.history, _READ)}),
    Route(
        "/v0/channels/{channel}/events",
        "channels",
        {"GET": Endpoint(channel_events.events, _READ, token_in_query=True)},
    ),
    Route("/v0/channels/{channel}/push", "channels", {"POST": Endpoint(channel_messages.push, _WRITE)}),
    Route("/v0/channels/{channel}/pop", "channels", {"POST": Endpoint(channel_messages.pop, _WORK)}),
    Route("/v0/channels/{channel}/clear", "channels", {"POST": Endpoint(channel_messages.clear, _DELETE)}),
    Route("/v0/watch", "", {"POST": Endpoint(watch.create, _READ)}),
    Route("/v0/watch/{wid}", "", {"GET": Endpoint(watch.stream, own_auth=True)}),
    Route("/v0/ws", "", {"GET": Endpoint(socket.connect)}),
    Route("/v0/metrics", "", {"GET": Endpoint(metrics.metrics, _READ, is_early=True)}),
    Route("/v0/openapi.json", "", {"GET": Endpoint(openapi.document, is_early=True)}),
    *(Route(path, "", {"GET": Endpoint(handler, is_probe=True, is_early=True)}) for path, handler in _PROBES.items()),
)

_BY_LENGTH: Final[dict[int, list[tuple[list[str], Route]]]] = {}
for _route in TABLE:
    _pattern = _route.path.split("/")[1:]
    _BY_LENGTH.setdefault(len(_pattern), []).append((_pattern, _route))


def find(path: str) -> Found | None:
    """The route of a path and the names in it; None where there is none."""
    parts = parts_of(path)
    for pattern, route in _BY_LENGTH.get(len(parts), ()):
        if all((want[0] == "{" and part) or want == part for want, part in zip(pattern, parts, strict=True)):
            return Found(route, tuple(part for want, part in zip(pattern, parts, strict=True) if want[0] == "{"))
    return None
