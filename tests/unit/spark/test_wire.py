"""A server that answers badly, or stops in the middle: one of our errors, with what to do, and never half a truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pyarrow as pa
import pytest

from tidelog.engine.read import SCHEMA
from tidelog.errors import BadInput, Error, NotFound, TopicNotFound, Unavailable
from tidelog.spark.server import ServerPlace
from tidelog.spark.stretches import Stretch
from tidelog.spark.wire import Wire

LIMIT_S = 30.0
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(LIMIT_S)
        server.server_close()


def said(status: int, body: bytes, *, length: int | None = None) -> Answer:
    """An answer; one that promises more than it has is cut off."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)
        if length is not None:
            handler.close_connection = True

    return answer


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (said(200, b'{"a":', length=50), Unavailable, "went away"),
        (said(500, b"oops"), Unavailable, "says 500, oops"),
        (said(503, b'{"error":{"code":"not_ready","message":"recovering"}}'), Unavailable, "recovering"),
        (said(429, b'{"error":{"code":"throttled","message":"slow"}}'), Unavailable, "run the query again"),
        (said(401, b'{"error":{"code":"unauthorized","message":"who?"}}'), BadInput, "option key"),
        (said(404, b'{"error":{"code":"topic_not_found","message":"x","detail":{"topic":"t"}}}'), TopicNotFound, "'t'"),
        (said(404, b"<html>"), NotFound, "<html>"),
        (said(400, b'{"error":{"code":"invalid_request","message":"no"}}'), BadInput, "says 400, no"),
    ],
)
def test_what_a_server_says_is_one_of_our_errors(answer: Answer, error: type[Error], why: str) -> None:
    with answering(answer) as address:
        wire = Wire(address, None, timeout_s=LIMIT_S)
        with pytest.raises(error, match=why) as caught:
            wire.get("/v0/topics")
        assert type(caught.value) is error
        wire.close()


def test_a_range_that_is_short_is_not_taken_for_the_whole() -> None:
    with answering(said(206, b"1234")) as address:
        wire = Wire(address, None, timeout_s=LIMIT_S)
        assert wire.part("/f", 10, 14) == b"1234"
        with pytest.raises(Unavailable, match="4 of the 9 bytes from 10 on"):
            wire.part("/f", 10, 19)
        assert wire.part("/f", 5, 5) == b"", "nothing is asked for"
        wire.close()


def test_a_connection_that_grew_old_is_opened_again() -> None:
    seen = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.client_address)
        said(200, b"{}")(handler)
        handler.close_connection = True  # without a word

    with answering(answer) as address:
        wire = Wire(address, "k", timeout_s=LIMIT_S)
        for _ in range(3):
            assert wire.get("/v0/x") == {}
        wire.close()
    assert len(set(seen)) == 3


def stream_of(*, end: bool, rows: int = 10) -> bytes:
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({"topic": "t", "epoch": "1", "head_seq": "10"})
    columns = [range(1, rows + 1), [0] * rows, *([None] * rows for _ in range(3)), [b"x"] * rows, [False] * rows]
    with pa.ipc.new_stream(sink, schema) as writer:
        arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)]
        writer.write_batch(pa.record_batch(arrays, schema=schema))
        if end:
            nothing = pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)
            counts = '{"rows":10,"deleted":0,"expired":0,"evicted":0,"filtered":0,"holes":0}'
            about = {"next_from_seq": "10", "head_seq": "10", "gap": "null", "counts": counts}
            writer.write_batch(nothing, custom_metadata=about)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read(address: str) -> int:
    place = ServerPlace(address, None)
    try:
        found = place.read(Stretch("t", 1, 1, 11, 100), frozenset(("seq", "data")), verify=True)
        return sum(each.rows.num_rows for each in found if isinstance(each.rows, pa.RecordBatch))
    finally:
        place.close()


def test_a_stream_that_breaks_off_is_an_error_wherever_it_does() -> None:
    whole = stream_of(end=True)
    with answering(said(200, whole)) as address:
        assert read(address) == 10
    for size in range(0, len(whole) - 8, 101):
        with answering(said(200, whole[:size], length=len(whole))) as address, pytest.raises(Unavailable, match="went"):
            read(address)


def test_a_stream_that_ends_without_its_counts_is_cut_off() -> None:
    with answering(said(200, stream_of(end=False))) as address, pytest.raises(Unavailable, match="went away"):
        read(address)
