"""Endpoints of the cold tier: where segments are, and moving them by hand.

    GET  /v0/tiers                 the store, and how much is where
    GET  /v0/tiers/segments        where each segment is
    POST /v0/tiers/relocate, /v0/tiers/recall, /v0/tiers/claim       of all topics; take the store from another copy
    POST /v0/topics/{t}/relocate   {"keep_segments"} → old segments move to the cold store now
    POST /v0/topics/{t}/recall     {"first_seq","last_seq"} → segments come back and stay

`GET /v0/topics/{t}/segments` says where each segment is. Everything here may wait for the store and runs in the threads
for that, so that a store which hangs delays nothing else.
"""

from __future__ import annotations

from tidelog import api_types
from tidelog.engine.tiers import Moved
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.openapi import TOPIC_NAME, Parameter, operation
from tidelog.server.request import RequestContext

_relocate_all_decoder = api_types.body_decoder(api_types.RelocateAll)
_recall_all_decoder = api_types.body_decoder(api_types.RecallAll)
_relocate_decoder = api_types.body_decoder(api_types.Relocate)
_recall_decoder = api_types.body_decoder(api_types.Recall)


@operation("getTiers", response=responses.Tiers)
async def get_tiers(context: RequestContext) -> Response:
    """Show the cold store, and how much is where. The key is for all names, because the counts are."""
    context.check_all_names_allowed()
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


@operation(
    "listSegmentPlaces",
    response=responses.SegmentPlaces,
    params=(Parameter("topic", TOPIC_NAME, "Only segments of this topic."),),
    errors=("topic_not_found",),
)
async def list_places(context: RequestContext) -> Response:
    """List where each sealed segment is. The key is for all names."""
    context.check_all_names_allowed()
    engine, topic = context.service.engine, context.query.text("topic")
    places = await context.service.run_blocking(lambda: engine.segment_places(topic))
    return context.json(responses.SegmentPlaces([responses.SegmentPlace(*place) for place in places]))


@operation(
    "relocateAll",
    request=api_types.RelocateAll,
    response=responses.AllSegmentsMoved,
    errors=("topic_not_found", "store_unavailable", "wrong_store"),
    body_required=False,
)
async def relocate_all(context: RequestContext) -> Response:
    """Move old segments of a topic, or of all topics, to the cold store now. The key is for all names."""
    context.check_all_names_allowed()
    body = context.decode_body(_relocate_all_decoder, default=api_types.RelocateAll())
    engine = context.service.engine
    moved = await context.service.run_cold(lambda: engine.relocate(body.topic, keep_segments=body.keep_segments))
    return context.json(_all_moved(moved))


@operation(
    "recallAll",
    request=api_types.RecallAll,
    response=responses.AllSegmentsMoved,
    errors=("topic_not_found", "store_unavailable", "wrong_store"),
    body_required=False,
)
async def recall_all(context: RequestContext) -> Response:
    """Bring segments of a topic, or of all topics, back from the cold store. The key is for all names."""
    context.check_all_names_allowed()
    body = context.decode_body(_recall_all_decoder, default=api_types.RecallAll())
    engine = context.service.engine
    moved = await context.service.run_cold(
        lambda: engine.recall(body.topic, first_seq=body.first_seq, last_seq=body.last_seq)
    )
    return context.json(_all_moved(moved))


@operation("claimColdStore", response=responses.ColdStoreClaimed, errors=("store_unavailable",), body_required=False)
async def claim_store(context: RequestContext) -> Response:
    """Take the cold store from another copy of this database. The key is for all names."""
    context.check_all_names_allowed()
    engine = context.service.engine
    await context.service.run_cold(engine.claim_cold_store)
    return context.json(responses.ColdStoreClaimed(engine.cold_address))


def _failed(moved: Moved) -> list[responses.SegmentNotMoved]:
    return [responses.SegmentNotMoved(base, reason, topic) for topic, base, reason in moved.failed]


def _moved(topic: str, moved: Moved) -> responses.SegmentsMoved:
    return responses.SegmentsMoved(topic, moved.segments, moved.bytes, _failed(moved))


def _all_moved(moved: Moved) -> responses.AllSegmentsMoved:
    return responses.AllSegmentsMoved(moved.segments, moved.bytes, _failed(moved))
