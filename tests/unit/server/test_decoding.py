"""Streamed bodies share bounds over the process: bytes decoded at once, bytes kept, and records that wait for a
checkpoint."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from tests.contract_http.test_batches import body, fields_of
from tests.unit.server.bulk_fixtures import ARROW, NDJSON, Client, listening, run_with_engine, send
from tests.unit.server.fakes import FakeWebSocket, ServerHarness

import tidelog.engine
from tidelog import api_types
from tidelog.database import engine_of
from tidelog.decompression import ExpansionLimit
from tidelog.engine import EngineConfig
from tidelog.engine.background import CHECKPOINT_TASK
from tidelog.engine.engine import Engine
from tidelog.http.interface import Response
from tidelog.server import service
from tidelog.server.errors import ApiError
from tidelog.server.handlers import write
from tidelog.server.handlers.bulk_write import ArrowBatchReader
from tidelog.server.service import DecodeBudget
from tidelog.testing import ManualClock, SimDisk

MIB = 1 << 20


def zeros(times: int, mib: int = 4) -> bytes:
    batch = pa.record_batch({"data": pa.array([b"\0" * MIB] * mib)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return sink.getvalue()


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_reservations_wait_in_order_and_never_exceed_the_limit() -> None:
    """Method: random reservations, releases and cancellations; a size over the bound is admitted alone."""

    async def scenario(random: Random) -> None:
        budget, admitted, held = DecodeBudget(100), [], []

        async def one(number: int, size: int) -> None:
            await budget.reserve(size)
            admitted.append(number)
            held.append(size)

        tasks: list[asyncio.Task[None]] = []
        gone: set[int] = set()
        for _ in range(200):
            act = random.random()
            if act < 0.5:
                tasks.append(asyncio.ensure_future(one(len(tasks), random.choice([1, 30, 60, 100, 130]))))
            elif act < 0.8 and held:
                budget.release(held.pop(random.randrange(len(held))))
            elif tasks:
                number = random.randrange(len(tasks))
                if tasks[number].cancel():
                    gone.add(number)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert budget.used == sum(held)
            assert budget.used <= 100 or len(held) == 1
        while held or budget.waiting:
            if held:
                budget.release(held.pop())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert budget.used == 0
        assert admitted == sorted(admitted)
        assert set(admitted) | gone == set(range(len(tasks)))

    for seed in range(30):
        asyncio.run(scenario(Random(seed)))


def test_reservation_cancelled_and_skipped_at_once_ends_as_cancelled() -> None:
    """The release that follows the cancel in the same turn takes the waiter out of the queue before its task runs."""

    async def scenario() -> None:
        budget = DecodeBudget(10)
        await budget.reserve(10)
        waiting = asyncio.ensure_future(budget.reserve(10))
        await asyncio.sleep(0)
        waiting.cancel()
        budget.release(10)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (budget.used, budget.waiting) == (0, 0)

    asyncio.run(scenario())


def test_reservation_admitted_and_cancelled_at_once_is_released() -> None:
    async def scenario() -> None:
        budget = DecodeBudget(10)
        await budget.reserve(10)
        waiting = asyncio.ensure_future(budget.reserve(10))
        await asyncio.sleep(0)
        budget.release(10)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert (budget.used, budget.waiting) == (0, 0)

    asyncio.run(scenario())


@pytest.mark.usefixtures("no_gc")
def test_rejected_stream_keeps_no_decoded_batch() -> None:
    """The refusal referred to the frames that had decoded the batch before it: 60 MiB for each refused request, until
    the garbage collector ran. 40 requests of 90 KB took the server to 3.4 GB."""
    before = pa.total_allocated_bytes()
    feed = ArrowBatchReader(EngineConfig(), 64 * MIB, ExpansionLimit(5 * MIB, 1).start())
    feed.feed(zeros(3))
    with pytest.raises(ApiError):  # noqa: PT012 - the second batch is the one that is refused
        while feed.has_batch:
            feed.next_batch()
    del feed
    assert pa.total_allocated_bytes() == before


@pytest.mark.usefixtures("no_gc")
def test_rejected_request_keeps_no_decoded_batch(tmp_path: Path) -> None:
    async def scenario(world: ServerHarness) -> None:
        before = pa.total_allocated_bytes()
        for _ in range(3):
            answer = await send(world, "/v0/topics/a", [zeros(3)], ARROW).answer()
            assert isinstance(answer, Response)
            assert answer.status == 413
            del answer
        await asyncio.sleep(0)
        assert pa.total_allocated_bytes() - before < 4 * MIB

    run_with_engine(scenario, tmp_path, server={"max_body_bytes": 5 * MIB, "max_expansion": 1})


@pytest.mark.parametrize("bound", [6 * MIB, 1])
def test_streams_decode_one_after_the_other_under_a_small_limit(tmp_path: Path, bound: int) -> None:
    async def scenario(world: ServerHarness) -> None:
        budget, most = world.service.decoding, []
        plain = budget.reserve

        async def reserve(size: int) -> None:
            await plain(size)
            most.append((budget.used, size))

        budget.reserve = reserve  # type: ignore[method-assign]
        exchanges = [send(world, f"/v0/topics/t{number}", [zeros(3)], ARROW) for number in range(4)]
        for each in exchanges:
            answer = await each.answer()
            assert isinstance(answer, Response)
            assert (answer.status, json.loads(answer.body)["count"]) == (201, 12)
        assert len(most) == 12
        assert all(used <= bound or used == size for used, size in most), most
        assert (budget.used, budget.waiting) == (0, 0)

    run_with_engine(scenario, tmp_path, server={"max_decoded_bytes": bound})


def test_client_that_leaves_during_a_wait_releases_its_reservation(tmp_path: Path) -> None:
    async def scenario(world: ServerHarness) -> None:
        budget = world.service.decoding
        await budget.reserve(1)
        exchange = send(world, "/v0/topics/t", [zeros(1)], ARROW)
        while not budget.waiting:
            await asyncio.sleep(0)
        exchange.leave()
        while budget.waiting:
            await asyncio.sleep(0)
        budget.release(1)
        assert budget.used == 0

    run_with_engine(scenario, tmp_path, server={"max_decoded_bytes": 1})


@pytest.mark.parametrize("kind", [ARROW, NDJSON])
def test_bytes_of_streams_count_as_request_bodies(tmp_path: Path, kind: str) -> None:
    """Unfinished lines of 4 MiB and Arrow messages of 64 MiB were kept for each connection and counted nowhere."""
    body = zeros(1)
    if kind == ARROW:  # a message that claims a body of which only some comes
        batch = pa.record_batch({"data": pa.array([b"x" * (3 * MIB)])})
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        body = sink.getvalue()[: 2 * MIB]
    else:
        body = b'{"data":1}\n' + b'"' + b"x" * (2 * MIB)
    head = f"POST /v0/topics/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {8 * MIB}\r\n\r\n"

    async def scenario(world: ServerHarness) -> None:
        async with listening(world, body_bytes_max=5 * MIB) as first:
            address = first.writer.get_extra_info("peername")
            clients = [first, *[Client(*await asyncio.open_connection(*address)) for _ in range(2)]]
            for client in clients:
                client.send(head.encode() + body)
            done, _ = await asyncio.wait(
                [asyncio.ensure_future(client.reply()) for client in clients], return_when=asyncio.FIRST_COMPLETED
            )
            reply = done.pop().result()
            assert reply.status == 429, reply
            assert reply.json["error"]["code"] == "throttled"
            assert "written" in reply.json["error"]["detail"]
            for client in clients:
                client.writer.close()

    run_with_engine(scenario, tmp_path)


def test_stream_waits_while_the_engine_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records stay in memory until a checkpoint: writers were faster than it, without a bound."""
    lags = True
    looks = 0

    def check_lag(_: Engine) -> bool:
        nonlocal looks
        looks += 1
        return lags

    monkeypatch.setattr(Engine, "is_lagging", property(check_lag))

    async def scenario(world: ServerHarness) -> None:
        nonlocal lags
        exchange = send(world, "/v0/topics/t", [b'{"data":1}\n'], NDJSON)
        while looks < 3:
            await asyncio.sleep(0.001)
        assert not exchange.answered
        lags = False
        answer = await exchange.answer()
        assert isinstance(answer, Response)
        assert answer.status == 201

    run_with_engine(scenario, tmp_path)


class Lag:
    """An engine that lags until the test ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
        self.is_lagging, self.looks = True, 0
        monkeypatch.setattr(Engine, "is_lagging", property(self._look))
        monkeypatch.setattr(service, "_LARGE_WAIT_S", wait_s)

    def _look(self, _: Engine) -> bool:
        self.looks += 1
        return self.is_lagging

    async def looked(self, times: int = 3) -> None:
        until = self.looks + times
        while self.looks < until:
            await asyncio.sleep(0.001)


def large(**more: object) -> bytes:
    return json.dumps({"records": [{"data": "x" * (300 << 10)}], **more}).encode()


def test_large_write_is_rejected_while_the_engine_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only streamed writes waited: plain bodies of 60 MiB went to memory faster than checkpoints moved them."""
    lag = Lag(monkeypatch, wait_s=0.05)

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        answer = await world.begin("POST", "/v0/topics/t", large()).answer()
        assert isinstance(answer, Response)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (429, "throttled")
        assert (b"retry-after", b"1") in answer.headers
        assert b"nothing was written" in answer.body
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "publish", "topic": "t", **json.loads(large())})
            assert (await line.until(1))[0]["code"] == "throttled"
        assert (await world.ask("GET", "/v0/topics/t"))[1]["head_seq"] == 0
        assert (await world.ask("POST", "/v0/topics/t", {"records": [{"data": 1}]}))[0] == 200, "a small one is written"
        lag.is_lagging = False
        assert (await world.ask("POST", "/v0/topics/t", large()))[0] == 200

    run_with_engine(scenario, tmp_path)


@pytest.mark.parametrize(("wait_s", "more"), [(60.0, {}), (0.001, {"disable_backpressure": True})])
def test_large_write_waits_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float, more: dict[str, bool]
) -> None:
    """For a while, or until it is done where the write asks for that."""
    lag = Lag(monkeypatch, wait_s)

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        exchange = world.begin("POST", "/v0/topics/t", large(**more))
        line = FakeWebSocket()
        async with await world.connect(line):
            line.receive_from_peer({"op": "publish", "topic": "t", **json.loads(large(**more))})
            await lag.looked(8)
            assert not exchange.answered
            assert not line.sent
            lag.is_lagging = False
            answer = await exchange.answer()
            assert isinstance(answer, Response)
            assert answer.status == 200
            assert (await line.until(1))[0]["op"] == "ack"

    run_with_engine(scenario, tmp_path)


def test_numbered_batch_waits_for_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lag = Lag(monkeypatch, wait_s=0.001)

    async def scenario(world: ServerHarness) -> None:
        exchange = world.begin("POST", "/v0/topics/t/batches", body(fields_of(1, 1, b"absent")))
        await lag.looked()
        assert not exchange.answered
        lag.is_lagging = False
        answer = await exchange.answer()
        assert isinstance(answer, Response)
        assert answer.status in (400, 404, 409), "the chunk is looked for after the wait"

    run_with_engine(scenario, tmp_path)


@pytest.mark.parametrize("count", [1, 3])
def test_body_over_the_size_of_one_call_is_decoded_record_by_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    used: list[int] = []

    class Counting:
        def decode(self, text: bytes) -> api_types.LargeWrite:
            used.append(len(text))
            return api_types.json_decoder(api_types.LargeWrite).decode(text)

    monkeypatch.setattr(write, "_large_decoder", Counting())

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        text = json.dumps({"records": [{"data": "x" * 1_000_000}] * count}).encode()
        assert (await world.ask("POST", "/v0/topics/t", text))[0] == 200
        assert used == [len(text)] * (len(text) > 2 * MIB)

    run_with_engine(scenario, tmp_path)


def test_engine_lags_until_a_checkpoint_or_while_none_can_run() -> None:
    with tidelog.open(
        "data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14, checkpoint_bytes=1_000
    ) as database:
        engine = engine_of(database)
        topic = engine.topic("t")

        def lags() -> bool:
            return engine._checkpoints.is_lagging

        assert not lags()
        topic.append(["x" * 4_000])
        assert lags()
        assert not engine.is_lagging, "without threads nothing would end it"
        engine._context.health.failed(CHECKPOINT_TASK, OSError("disk full"))
        assert not lags(), "a checkpoint that fails does not block writers"
        engine.checkpoint()
        assert not lags()
        topic.append(["x" * 4_000])
        assert lags()
