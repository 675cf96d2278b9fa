"""What Schemathesis is told in its own process, for test_schema.py: where something is, and what a body may be."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

import pyarrow as pa
import schemathesis
from hypothesis import strategies as st

from tests.contract_http.client import dumps
from tests.contract_http.test_schema import FIFO, JOBS, KNOWN, ROOM, SPARE

OF_FIFOS: Final = ("/push", "/pop", "/clear")
OF_QUEUES: Final = ("/claim", "/ack", "/nack", "/extend", "/history")
WAIT_MS_MAX: Final = 5  # a long poll that is asked for is no hang
_numbers = count()

VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def lines(values: list[Any]) -> bytes:
    return b"".join(dumps({"data": value}) + b"\n" for value in values)


def columns(values: list[Any]) -> bytes:
    batch = pa.record_batch({"data": pa.array([dumps(value) for value in values], pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


BATCHES: Final = st.lists(VALUES, max_size=4)
NOISE: Final = st.binary(max_size=99)
schemathesis.openapi.media_type("application/x-ndjson", BATCHES.map(lines) | NOISE)
schemathesis.openapi.media_type("application/vnd.apache.arrow.stream", BATCHES.map(columns) | NOISE)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - the hook's signature
    """Every second request goes where there is something: a name made up by chance is found by chance."""
    body = case.body
    if isinstance(body, dict) and isinstance(wait := body.get("wait_ms"), int | float) and wait > WAIT_MS_MAX:
        body["wait_ms"] = WAIT_MS_MAX
    if isinstance(body, dict):
        body.pop("rate", None)  # a redrive by the second takes as many seconds
    if next(_numbers) % 2 or case.method in ("PUT", "DELETE"):
        return
    if "topic" in case.path_parameters:
        known = JOBS if case.path.endswith(OF_QUEUES) else SPARE if case.path.endswith("/delete") else KNOWN
        case.path_parameters["topic"] = known
    if "channel" in case.path_parameters and not case.path.endswith("/leave"):
        case.path_parameters["channel"] = FIFO if case.path.endswith(OF_FIFOS) else ROOM
    if "base" in case.path_parameters:
        case.path_parameters["base"] = 1
