"""Endpoints of the cold tier: where segments are, and moving them by hand.

    GET  /v0/tiers                 the store, and how much is where
    POST /v0/topics/{t}/relocate   {"keep_segments"} → old segments move to the cold store now
    POST /v0/topics/{t}/recall     {"first_seq","last_seq"} → segments come back and stay

`GET /v0/topics/{t}/segments` says where each segment is. Everything here may wait for the store and runs in the threads
for that, so that a store which hangs delays nothing else.
"""

from __future__ import annotations

import msgspec

from tidelog import api_types
from tidelog.engine.tiers import Moved
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError
from tidelog.server.openapi import operation
from tidelog.server.request import RequestContext

_relocate_decoder = msgspec.json.Decoder(api_types.Relocate)
_recall_decoder = msgspec.json.Decoder(api_types.Recall)


@operation("getTiers", response=responses.Tiers)
async def get_tiers(context: RequestContext) -> Response:
    """Show the cold store, and how much is where. The key is for all names, because the counts are."""
    if context.principal.prefixes:
        raise ApiError("forbidden", "the cold tier is of all topics, and this key is for some; nothing was done")
    status = await context.service.run_blocking(context.service.engine.tier_status)
    return context.json(responses.Tiers(**status._asdict()))


@operation(
    "relocateSegments",
    request=api_types.Relocate,
    response=responses.SegmentsMoved,
    errors=("topic_not_found", "store_unavailable", "wrong_store"),
)
async def relocate_segments(context: RequestContext) -> Response:
    """Move old segments of a topic to the cold store now."""
    body = context.decode_body(_relocate_decoder)
    engine, name = context.service.engine, context.get_topic().name
    moved = await context.service.run_cold(lambda: engine.relocate(name, keep_segments=body.keep_segments))
    return context.json(_moved(name, moved))


@operation(
    "recallSegments",
    request=api_types.Recall,
    response=responses.SegmentsMoved,
    errors=("topic_not_found", "store_unavailable", "wrong_store"),
)
async def recall_segments(context: RequestContext) -> Response:
    """Bring segments of a topic back from the cold store. They stay on the disk until they are relocated by hand."""
    body = context.decode_body(_recall_decoder)
    engine, name = context.service.engine, context.get_topic().name
    moved = await context.service.run_cold(
        lambda: engine.recall(name, first_seq=body.first_seq, last_seq=body.last_seq)
    )
    return context.json(_moved(name, moved))


def _moved(topic: str, moved: Moved) -> responses.SegmentsMoved:
    failed = [responses.SegmentNotMoved(base, reason) for _, base, reason in moved.failed]
    return responses.SegmentsMoved(topic, moved.segments, moved.bytes, failed)
