"""A body is worked on in bounded slices: others have their turn between two, and it ends when its peer leaves."""

from __future__ import annotations

import asyncio
import io
import select
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from tests.unit.server.bulk_fixtures import ARROW, NDJSON, TIMEOUT_S, Client, listening, run_with_engine
from tests.unit.server.fakes import ServerHarness

from tidelog.decompression import DECODE_STEP_BYTES
from tidelog.http.connection import ServerState
from tidelog.http.limits import Limits
from tidelog.server.handlers.bulk_write import ArrowBatchReader, NdjsonBatchReader

PIECE_BYTES = 256 << 10  # of a body that is not compressed: what the transport reads ahead
SENT_BYTES = 60 << 10  # HTTP/2's first window takes it, and a receive buffer: the kernel takes the end that follows it
PIECES_AFTER_END_MAX = 8  # the loop takes a few turns to read the end and to cancel the request


@cache
def newlines(size: int) -> bytes:
    """A gzip member of so many newlines, a multiple of 1 MiB. Never held inflated: 256 MiB would stay in the peak."""
    packer = zlib.compressobj(4, wbits=31)
    piece = b"\n" * (1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(size >> 20)), packer.flush()])


def empty_batches(count: int) -> bytes:
    """Batches without rows: nothing of them is ever staged."""
    batch = pa.record_batch({"data": pa.array([], pa.binary())})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(count):
            writer.write_batch(batch)
    return sink.getvalue()


def post(client: Client, kind: str, body: bytes, *headers: str, length: int | None = None) -> None:
    lines = (f"Content-Type: {kind}", f"Content-Length: {length or len(body)}", *headers)
    client.send("\r\n".join(["POST /v0/topics/a HTTP/1.1", "Host: localhost", *lines, "", ""]).encode() + body)


class Counted:
    """Bytes of a feed's work between two turns of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, feed: Any) -> None:
        self.turns = self.calls = self.pieces = self.most = 0
        self._since, self._turn = 0, -1
        self._wrap(monkeypatch, feed, "feed", lambda _, piece: len(piece))
        self._wrap(monkeypatch, feed, "next_batch", lambda reader: min(reader.next_batch_bytes, 64 << 10))

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, feed: Any, name: str, size: Callable[..., int]) -> None:
        plain = getattr(feed, name)

        def call(*args: Any) -> Any:
            if self._turn != self.turns:
                self._since, self._turn = 0, self.turns
            self._since += size(*args)
            self.most = max(self.most, self._since)
            self.calls += 1
            self.pieces += name == "feed"
            return plain(*args)

        monkeypatch.setattr(feed, name, call)

    async def tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


def test_decompression_yields_to_the_loop_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waited while a body of blank lines was inflated: no record was ever staged."""

    async def scenario(world: ServerHarness) -> None:
        counted = Counted(monkeypatch, NdjsonBatchReader)
        async with listening(world) as client:
            ticking = asyncio.ensure_future(counted.tick())
            post(client, NDJSON, newlines(32 << 20), "Content-Encoding: gzip")
            reply = await client.reply()
            ticking.cancel()
        assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_request")
        assert counted.calls > (32 << 20) // DECODE_STEP_BYTES
        assert counted.most <= 2 * DECODE_STEP_BYTES

    run_with_engine(scenario, tmp_path)


def test_arrow_messages_without_rows_yield_to_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServerHarness) -> None:
        counted = Counted(monkeypatch, ArrowBatchReader)
        async with listening(world) as client:
            ticking = asyncio.ensure_future(counted.tick())
            post(client, ARROW, empty_batches(20_000))
            reply = await client.reply()
            ticking.cancel()
        assert reply.status == 400, reply
        assert counted.calls > 20_000
        assert counted.most <= 4 * PIECE_BYTES

    run_with_engine(scenario, tmp_path)


def record_connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which every connection that a server accepts is added."""
    accepted: list[Any] = []
    enter = ServerState.add_connection

    def recorded(state: ServerState, connection: Any) -> None:
        accepted.append(connection)
        enter(state, connection)

    monkeypatch.setattr(ServerState, "add_connection", recorded)
    return accepted


def await_end_in_kernel(connection: Any) -> None:
    """Block the loop until the kernel has the end of what the peer sent, or the server closed the connection."""
    descriptor = connection.transport.get_extra_info("socket").fileno()
    if descriptor >= 0:
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        assert poll.poll(TIMEOUT_S * 1_000), "the end of the connection did not arrive"


def send_unfinished(client: Client, framing: str, body: bytes) -> None:
    """A gzip body of NDJSON whose end does not come."""
    if framing == "length":
        post(client, NDJSON, body, "Content-Encoding: gzip", length=2 * len(body))
    elif framing == "chunked":
        lines = (f"Content-Type: {NDJSON}", "Transfer-Encoding: chunked", "Content-Encoding: gzip")
        head = "\r\n".join(["POST /v0/topics/a HTTP/1.1", "Host: localhost", *lines, "", ""])
        chunks = [body[at : at + (64 << 10)] for at in range(0, len(body), 64 << 10)]
        client.send(head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks))
    else:
        state = H2Connection(H2Configuration(client_side=True))
        state.initiate_connection()
        pseudo = [(":method", "POST"), (":path", "/v0/topics/a"), (":scheme", "http"), (":authority", "localhost")]
        state.send_headers(1, [*pseudo, ("content-type", NDJSON), ("content-encoding", "gzip")])
        for at in range(0, len(body), 15 << 10):
            state.send_data(1, body[at : at + (15 << 10)])
        client.send(state.data_to_send())


@pytest.mark.parametrize("leaves", ["abort", "close"])
@pytest.mark.parametrize("framing", ["length", "chunked", "http2"])
def test_decompression_ends_when_its_client_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framing: str, leaves: str
) -> None:
    """A core was busy with it after every client had gone. With a chunked body that was noticed only after all that
    had come was inflated. Connections are checked in every turn of the loop, and pieces are counted from the turn in
    which the kernel has the end of the connection: neither depends on how fast the machine is."""
    monkeypatch.setattr(Limits, "tick_s", 0.0)
    accepted = record_connections(monkeypatch)
    sent_pieces = SENT_BYTES * 1_000 // DECODE_STEP_BYTES  # at least: newlines shrink by more than 1,000

    async def scenario(world: ServerHarness) -> None:
        counted = Counted(monkeypatch, NdjsonBatchReader)
        async with listening(world, ahead_bytes_max=16 << 10) as client:
            send_unfinished(client, framing, newlines(64 << 20)[:SENT_BYTES])
            while not counted.calls:
                await asyncio.sleep(0)
            closing = client.writer.get_extra_info("socket")
            getattr(client.writer.transport, leaves)()
            while closing.fileno() >= 0:
                await asyncio.sleep(0)
            await_end_in_kernel(accepted[0])
            before = counted.pieces
            while world.service._tasks and counted.pieces < sent_pieces:
                await asyncio.sleep(0)
        assert counted.pieces - before <= PIECES_AFTER_END_MAX
        assert counted.pieces < sent_pieces // 2

    run_with_engine(scenario, tmp_path, server={"max_expansion": 0})
