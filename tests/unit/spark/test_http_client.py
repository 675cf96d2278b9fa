"""A server that answers badly, or stops in the middle: one of our errors, with what to do, and never half a truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import msgspec
import pyarrow as pa
import pytest

from tidelog.engine.read import SCHEMA
from tidelog.errors import BadInput, Error, NotFound, TopicNotFound, Unavailable
from tidelog.spark.backends.interface import ReadRange
from tidelog.spark.backends.server import ServerBackend
from tidelog.spark.http_client import Client, ServerUnreachable, open_client
from tidelog.testing import ManualClock

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
        wire = open_client(address, None, timeout_s=LIMIT_S)
        with pytest.raises(error, match=why) as caught:
            wire.get("/v0/topics")
        assert isinstance(caught.value, ServerUnreachable) == (error is Unavailable and why != "says 500, oops")
        wire.close()


def test_a_range_that_is_short_is_not_taken_for_the_whole() -> None:
    with answering(said(206, b"1234")) as address:
        wire = open_client(address, None, timeout_s=LIMIT_S)
        assert wire.get_range("/f", 10, 14) == b"1234"
        with pytest.raises(Unavailable, match="4 of the 9 bytes from 10 on"):
            wire.get_range("/f", 10, 19)
        assert wire.get_range("/f", 5, 5) == b"", "nothing is asked for"
        wire.close()


def test_a_connection_that_grew_old_is_opened_again() -> None:
    seen = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.client_address)
        said(200, b"{}")(handler)
        handler.close_connection = True  # without a word

    with answering(answer) as address:
        wire = open_client(address, "k", timeout_s=LIMIT_S)
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


def read(address: str, wire: Client | None = None) -> int:
    place = ServerBackend(address, None, http=wire)
    try:
        found = place.read(ReadRange("t", 1, 1, 11, 100), frozenset(("seq", "data")), verify=True)
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


# A server that is away -------------------------------------------------------------------------------------


class Pauses:
    """A clock that only the pauses between two attempts move."""

    def __init__(self) -> None:
        self.clock, self.taken = ManualClock(), list[float]()

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        self.clock.tick(max(int(seconds * 1000), 1))


def patient(address: str, pauses: Pauses, retry_ms: int = 60_000) -> Client:
    return open_client(address, None, timeout_s=LIMIT_S, retry_ms=retry_ms, clock=pauses.clock, pause=pauses)


def in_turn(*answers: Answer) -> Answer:
    """Each request gets the next answer; the last one stays."""
    left = list(answers)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler)

    return answer


AWAY = said(503, b'{"error":{"code":"not_ready","message":"recovering"}}')


@pytest.mark.parametrize("away", [AWAY, said(502, b""), said(504, b""), said(429, b"slow"), said(200, b"{", length=9)])
def test_a_server_that_is_away_is_asked_again(away: Answer) -> None:
    pauses = Pauses()
    with answering(in_turn(away, away, away, said(200, b"{}"))) as address:
        wire = patient(address, pauses)
        assert wire.get("/x") == {}
        wire.close()
    assert len(pauses.taken) == 3
    assert all(0.05 * 2**n <= each <= 0.1 * 2**n for n, each in enumerate(pauses.taken))


def test_there_is_a_limit_and_the_pauses_stop_growing() -> None:
    pauses = Pauses()
    wire = patient("http://127.0.0.1:9", pauses)
    with pytest.raises(Unavailable, match="cannot be reached"):
        wire.get("/x")
    assert 59 <= sum(pauses.taken) <= 61
    assert max(pauses.taken) <= 5
    for retry_ms, attempts in ((0, 0), (10, 1)):
        pauses.taken.clear()
        with pytest.raises(Unavailable, match="cannot be reached"):
            patient("http://127.0.0.1:9", pauses, retry_ms).get("/x")
        assert len(pauses.taken) == attempts


@pytest.mark.parametrize("refused", [said(500, b"oops"), said(400, b"no"), said(404, b"none"), said(401, b"who")])
def test_a_refusal_is_not_asked_again(refused: Answer) -> None:
    pauses = Pauses()
    with answering(refused) as address, closing(patient(address, pauses)) as wire, pytest.raises(Error):
        wire.get("/x")
    assert pauses.taken == []


def test_a_stream_that_breaks_off_goes_on_where_it_was() -> None:
    """Each row once, wherever it breaks; and a server that always breaks at the same place is given up."""
    whole = stream_of(end=True)
    for size in range(0, len(whole) - 8, 301):
        pauses = Pauses()
        with answering(in_turn(said(200, whole[:size], length=len(whole)), AWAY, said(200, whole))) as address:
            assert read(address, patient(address, pauses)) == 10
        assert len(pauses.taken) == 2
    pauses = Pauses()
    with (
        answering(said(200, whole[: len(whole) - 40], length=len(whole))) as address,
        pytest.raises(Unavailable, match="went away"),
    ):
        read(address, patient(address, pauses))
    assert sum(pauses.taken) >= 59


def records(seqs: list[int], *, counts: dict[str, int] | None, epoch: int = 1, batch: int = 2) -> bytes:
    """An answer with these records of seqs 1 to 10, cut off where there are no counts."""
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({"topic": "t", "epoch": str(epoch), "head_seq": "10"})
    with pa.ipc.new_stream(sink, schema) as writer:
        for first in range(0, len(seqs), batch):
            mine = seqs[first : first + batch]
            columns = [mine, *([0] * len(mine) for _ in range(1)), *([None] * len(mine) for _ in range(3))]
            columns += [[b"x"] * len(mine), [False] * len(mine)]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        if counts is not None:
            zero = {"rows": len(seqs), "deleted": 0, "expired": 0, "evicted": 0, "filtered": 0, "holes": 0}
            nothing = pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)
            told = msgspec.json.encode({**zero, **counts}).decode()
            about = {"next_from_seq": "10", "head_seq": "10", "gap": "null", "counts": told}
            writer.write_batch(nothing, custom_metadata=about)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        (list(range(1, 7)), list(range(1, 11)), {}),
        ([1, 2, 5, 6], [1, 2, 5, 6, 7, 8, 9, 10], {"deleted": 2}),
        ([1, 2, 3, 4], [1, 2, 5, 6, 7, 8, 9, 10], {"deleted": 2}),  # two were deleted that had been handed over
        ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10], {"evicted": 4}),
        ([1, 2, 3, 4], [], {"deleted": 10}),
    ],
)
def test_every_seq_is_accounted_for_where_records_go_between_two_attempts(
    before: list[int], after: list[int], counts: dict[str, int]
) -> None:
    pauses = Pauses()
    broken = records(before, counts=None)
    answers = in_turn(said(200, broken[:-8], length=len(broken) + 99), said(200, records(after, counts=counts)))
    with answering(answers) as address:
        place = ServerBackend(address, None, http=patient(address, pauses))
        found = list(place.read(ReadRange("t", 1, 1, 11, 100), frozenset(("seq", "data")), verify=True))
        place.close()
    rows = [seq for each in found if isinstance(each.rows, pa.RecordBatch) for seq in each.rows["seq"].to_pylist()]
    assert rows == sorted({*before, *after}), "each once, in order"
    assert len(rows) + sum(sum(each.counts) for each in found) == 10


@pytest.mark.parametrize("gone", ["dropped", "recreated"])
def test_a_topic_that_is_gone_after_a_restart_is_a_loss_of_the_rest(gone: str) -> None:
    pauses, broken = Pauses(), records([1, 2, 3, 4], counts=None)
    other = records([1], counts={}, epoch=2)
    missing = said(404, b'{"error":{"code":"topic_not_found","message":"x","detail":{"topic":"t"}}}')
    answers = in_turn(
        said(200, broken[:-8], length=len(broken) + 99), missing if gone == "dropped" else said(200, other)
    )
    with answering(answers) as address:
        place = ServerBackend(address, None, http=patient(address, pauses))
        found = list(place.read(ReadRange("t", 1, 1, 11, 100), frozenset(("seq", "data")), verify=True))
        place.close()
    (lost,) = [lost for each in found for lost in each.gaps]
    assert (lost.first, lost.last, lost.cause) == (5, 10, gone)
    assert found[-1].counts.evicted == 6
