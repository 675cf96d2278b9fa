"""Numbered batches and what is staged for them, in the OpenAPI document."""

from __future__ import annotations

from typing import Final

import msgspec

from tidelog.server.api.auth import READ, WRITE
from tidelog.server.api.bulk import ARROW
from tidelog.server.api.openapi_parts import JSON, Operation, Param
from tidelog.server.api.openapi_schemas import ACKED, COUNT, FLAG, TEXT, Schema, each, obj, ref
from tidelog.wire import requests

_TOPIC: Final = "/v0/topics/{topic}"
_STAGED: Final = f"{_TOPIC}/staging/{{chunk}}"
_SUM: Final = {**TEXT, "pattern": "^[0-9a-f]{32}$"}
_PERFORMANCE: Final = {"performance": ref("Performance")}

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "PUT",
        _STAGED,
        "stageChunk",
        "Stage records for a numbered batch",
        (WRITE,),
        takes={ARROW.decode(): {"type": "string", "format": "binary"}},
        gives={200: {JSON: ref("ChunkStaged")}},
        refuses=("invalid_request", "record_too_large", "unsupported_media_type"),
        text="An Arrow stream with data, and where there are such tag, node, meta and json. Nobody reads it before a "
        "batch is made of it; one that nobody makes is swept after a week.",
    ),
    Operation(
        "DELETE",
        _STAGED,
        "clearStaging",
        "Forget everything that an owner has staged",
        (WRITE,),
        gives={200: {JSON: ref("StagingCleared")}},
        refuses=("invalid_request",),
        text="Here the name is the owner's: the first part of the names of its chunks.",
    ),
    Operation(
        "POST",
        f"{_TOPIC}/batches",
        "putBatch",
        "Make one batch of chunks, once",
        (WRITE,),
        takes={JSON: ref("PutBatch")},
        gives={200: {JSON: ref("BatchPut")}, 201: {JSON: ref("BatchPut")}},
        refuses=(
            "invalid_request",
            "not_found",
            "record_too_large",
            "topic_full",
            "batch_conflict",
            "payload_too_large",
            "unsupported_media_type",
        ),
        text="All chunks become one range of seqs, or nothing does. Repeated, also after a restart, it answers with "
        "the range of the first time. query_id tells two queries of one writer apart: the newest number under the same "
        "query_id is a repetition whatever its sum, another query_id is a batch_conflict. So are a known number with "
        "another sum, and a number below one that is known.",
    ),
    Operation(
        "GET",
        f"{_TOPIC}/batches",
        "listBatches",
        "The last batches of a writer",
        (READ,),
        (Param("writer", {**TEXT, "minLength": 1}, "Whose.", required=True),),
        gives={200: {JSON: ref("BatchList")}},
        refuses=("invalid_request", "topic_not_found"),
    ),
)


def _sent() -> dict[str, Schema]:
    _, made = msgspec.json.schema_components((requests.PutBatch,), ref_template="#/components/schemas/{name}")
    for schema in made.values():
        schema.pop("title", None)
    return made


SCHEMAS: Final[dict[str, Schema]] = {
    **_sent(),
    "ChunkStaged": obj({"topic": TEXT, "chunk": TEXT, "bytes": COUNT, **_PERFORMANCE}),
    "StagingCleared": obj({"topic": TEXT, "removed": COUNT, **_PERFORMANCE}),
    "BatchPut": obj(
        {
            "topic": TEXT,
            "first_seq": COUNT,
            "last_seq": COUNT,
            "head_seq": COUNT,
            "count": COUNT,
            "deduped": {**FLAG, "description": "It was written before."},
            **ACKED,
            "created": FLAG,
            **_PERFORMANCE,
        }
    ),
    "BatchList": obj(
        {
            "topic": TEXT,
            "writer": TEXT,
            "batches": each(
                obj({"number": COUNT, "first_seq": COUNT, "last_seq": COUNT, "sum": _SUM, "query_id": TEXT})
            ),
            **_PERFORMANCE,
        }
    ),
}
