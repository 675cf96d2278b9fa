"""Compaction and retention over HTTP: the newest record of each key, compaction now, what other limits would evict."""

from __future__ import annotations

from base64 import b64encode
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET

from tidelog import api_types
from tidelog.api_types import READ_BYTES, READ_LIMIT, READ_LIMIT_MAX
from tidelog.engine import EvictedRange, LatestPage, LatestRecord, Record, RetentionPreview, Topic
from tidelog.engine.compaction import FoundRecords, SearchRange
from tidelog.engine.large_read import LargeData
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput
from tidelog.formats.frame import SEQ_MAX
from tidelog.http.interface import Response
from tidelog.server import response_types as responses
from tidelog.server.handlers.topics import config_json
from tidelog.server.openapi import STRING, Parameter, binary_schema, integer_param, operation
from tidelog.server.request import ARROW, RequestContext
from tidelog.types import Ints

_simulate_decoder = api_types.body_decoder(api_types.SimulateRetention)
_found_decoder = api_types.body_decoder(api_types.FoundRecords)
_encode: Final = msgspec.json.Encoder().encode


@operation(
    "readLatest",
    response=responses.Latest,
    params=(
        Parameter("key", STRING, "Only this key."),
        Parameter("prefix", STRING, "Only keys that begin so. A page may then have few rows and not be the last."),
        integer_param("limit", "", READ_LIMIT, minimum=1, maximum=READ_LIMIT_MAX),
        Parameter("after", STRING, "next_after of the page before."),
        Parameter(
            "format", {"enum": ["json", "arrow"]}, "arrow: a larger page of columns; key and limit do not apply."
        ),
    ),
    errors=("invalid_request", "topic_not_found"),
    response_content={
        ARROW.decode(): binary_schema(
            "Columns key, seq, ts, node, tag, meta, data, json. The schema's metadata has next_after if there is more."
        )
    },
)
async def read_latest(context: RequestContext) -> Response:
    """Read the newest record of each key of a topic with compaction.

    A key whose newest record was deleted, evicted or is a tombstone is left out. Keys come in a fixed order of their
    own; every key that is there throughout comes once.
    """
    query, topic = context.query, context.get_topic()
    topic_operations(topic).record_access()
    key, prefix, after = query.text("key"), query.text("prefix") or "", query.text("after")
    limit = min(max(query.number("limit", READ_LIMIT), 1), READ_LIMIT_MAX)
    if query.text("format") == "arrow":
        table, next_after = await context.service.run_read(
            topic, 0, lambda: topic.latest(prefix=prefix).arrow_page(after)
        )
        context.service.metrics.count_read(topic.name, len(table), gap=False)
        return Response(200, _encode_arrow(table, next_after), ARROW)
    page = await context.service.run_read(topic, 0, lambda: _read_page(topic, key, prefix, limit, after))
    rows = [_row(*row) for row in page.records]
    context.service.metrics.count_read(topic.name, len(rows), gap=False)
    return context.json(responses.Latest(context.topic, rows, UNSET if page.next_after is None else page.next_after))


def _read_page(topic: Topic, key: str | None, prefix: str, limit: int, after: str | None) -> LatestPage:
    table = topic.latest(prefix=prefix)
    if key is None:
        return table.page(limit, after, bytes_max=READ_BYTES)
    record = table.get(key)
    return LatestPage([] if record is None else [LatestRecord(key, record)], None)


def _encode_arrow(table: pa.Table, next_after: str | None) -> bytes:
    metadata = None if next_after is None else {"next_after": next_after}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table.replace_schema_metadata(metadata))
    return bytes(sink.getvalue())


def _row(key: str, record: Record) -> responses.LatestRow:
    is_bytes = isinstance(record.data, bytes)
    value = record.data.to_reference() if isinstance(record.data, LargeData) else record.data
    data = b64encode(record.data).decode() if is_bytes else value
    return responses.LatestRow(
        key,
        record.seq,
        record.ts_ms,
        UNSET if record.node is None else record.node,
        UNSET if record.tag is None else record.tag,
        msgspec.Raw(_encode(data)),
        UNSET if record.meta is None else record.meta,
        "base64" if is_bytes else UNSET,
    )


@operation("compactTopic", response=responses.TopicCompacted, errors=("invalid_request", "topic_not_found"))
async def compact_topic(context: RequestContext) -> Response:
    """Remove the records that newer ones of their key replaced, now."""
    topic, actor = context.get_topic(), context.principal.name
    done = await context.service.run_long(lambda: topic.compact(actor=actor))
    return context.json(responses.TopicCompacted(context.topic, *done))


@operation("searchReplaced", response=responses.CompactionSearch, errors=("invalid_request", "topic_not_found"))
async def search_replaced(context: RequestContext) -> Response:
    """Close the active segment and read what a search for replaced records, outside of the server, has to read."""
    operations = topic_operations(context.get_topic())
    sought = await context.service.run_long(operations.begin_compaction_search)
    return context.json(responses.CompactionSearch(context.topic, api_types.SearchRange(*sought)))


@operation(
    "removeReplaced",
    request=api_types.FoundRecords,
    response=responses.FoundRemoved,
    errors=("invalid_request", "topic_not_found"),
)
async def remove_replaced(context: RequestContext) -> Response:
    """Remove a part of what such a search has found, by the rules of compaction.

    A part that is sent twice removes nothing more. What was searched before a restart of the server is refused.
    """
    body, actor = context.decode_body(_found_decoder), context.principal.name
    operations = topic_operations(context.get_topic())
    found = FoundRecords(
        SearchRange(*msgspec.structs.astuple(body.range)),
        _to_seqs(body.replaced),
        _to_seqs(body.tombstones),
        body.is_last,
        body.oldest_tombstone_ms,
    )
    done = await context.service.run_long(lambda: operations.remove_found(found, actor=actor))
    return context.json(responses.FoundRemoved(context.topic, *done))


def _to_seqs(numbers: list[int]) -> Ints:
    if numbers and max(numbers) > SEQ_MAX:
        raise BadInput(f"{max(numbers)} is no seq; nothing was removed")
    return np.array(numbers, np.int64)


@operation(
    "simulateRetention",
    request=api_types.SimulateRetention,
    response=responses.RetentionSimulated,
    errors=("invalid_request", "topic_not_found"),
    body_required=False,
)
async def simulate_retention(context: RequestContext) -> Response:
    """Read what other limits would evict, and which groups have not read it. Nothing changes."""
    body = context.decode_body(_simulate_decoder, default=api_types.SimulateRetention())
    topic = context.get_topic()
    found = await context.service.run_blocking(
        lambda: topic.simulate_retention(cap_records=body.cap_records, cap_bytes=body.cap_bytes, ttl_ms=body.ttl_ms)
    )
    return context.json(_simulated(found))


def _simulated(found: RetentionPreview) -> responses.RetentionSimulated:
    return responses.RetentionSimulated(
        found.topic,
        config_json(found.config),
        _range(found.cap),
        _range(found.ttl),
        found.evict_floor,
        responses.Remaining(*found.remaining),
        [responses.UnreadLoss(*loss) for loss in found.groups],
        list(found.held_by),
    )


def _range(evicted: EvictedRange) -> responses.EvictedRange:
    return responses.EvictedRange(*evicted)
