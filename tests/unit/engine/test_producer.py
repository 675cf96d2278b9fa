"""Producers over a writer that the test controls: space, order, outcomes, interrupts, records in flight at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import pytest
from tests.kit.waiting import eventually

from tidelog import errors
from tidelog.aio.producer import AsyncProducer
from tidelog.engine import Appended, EngineConfig, FailedRecords, UnwrittenRecord
from tidelog.engine.producer import Producer
from tidelog.engine.producer_queue import MAX_BYTES, OnError, ProducerBatch

LIMITS = EngineConfig()
FULL = errors.TopicFull("t", cap_records=1, cap_bytes=0, head_seq=1, earliest_seq=1)
WAITING_BYTES = 65 + 65 + 66
"""Of the records a, b and c, and the tag of c."""
Outcome = errors.Error | None


class Writer:
    """Writes a batch when the test says so: None writes it, an error fails it."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()
        for outcome in outcomes:
            self.outcomes.put(outcome)
        self.attempts: list[tuple[str, list[bytes]]] = []  # names and data of every batch, in order
        self.begun = Event()
        self.records: list[bytes] = []

    def __call__(self, batch: ProducerBatch) -> Appended:
        self.attempts.append((batch.name, batch.encode().datas))
        self.begun.set()
        outcome = self.outcomes.get()
        if outcome is not None:
            raise outcome
        return self.write(batch)

    def write(self, batch: ProducerBatch) -> Appended:
        first = len(self.records) + 1
        self.records += batch.encode().datas
        return Appended(first, len(self.records), len(self.records))


def make(
    write: Callable[[ProducerBatch], Appended],
    *,
    linger_ms: float = 0,
    max_bytes: int = MAX_BYTES,
    on_error: OnError | None = None,
) -> Producer:
    return Producer("t", write, LIMITS, linger_ms=linger_ms, max_bytes=max_bytes, on_error=on_error)


@contextmanager
def begun(writer: Writer, **options: Any) -> Iterator[Producer]:
    """A producer with the batch [a] on its way and [b, c] after it. It is given up at the end."""
    producer = make(writer, **options)
    producer.send(b"a")
    assert writer.begun.wait(60)
    producer.send(b"b")
    producer.send(b"c", tag="t")
    try:
        yield producer
    finally:
        for _ in range(9):
            writer.outcomes.put(None)
        with suppress(errors.NotAllWritten):
            producer.close()


def test_send_waits_for_space_and_raises_after_its_timeout() -> None:
    writer = Writer()
    with begun(writer, max_bytes=WAITING_BYTES) as producer:
        for data in (b"d", {"a": 1}):
            with pytest.raises(errors.Throttled, match="max_bytes") as found:
                producer.send(data, timeout=0)
            assert (found.value.used, found.value.max, found.value.written) == (WAITING_BYTES, WAITING_BYTES, False)
        assert producer.stats()[:5] == (3, 0, 0, 0, 3)
        blocked = Thread(target=producer.send, args=(b"d",))
        blocked.start()
        writer.outcomes.put(None)
        blocked.join()
        assert producer.stats().accepted == 4
        with pytest.raises(errors.TooLarge):
            producer.send(b"x" * 200)
    assert writer.records == [b"a", b"b", b"c", b"d"]


def test_flush_and_result_return_after_their_timeout_and_the_producer_goes_on() -> None:
    writer = Writer()
    with begun(writer) as producer:
        delivery = producer.send(b"d")
        assert not producer.flush(timeout=0)
        with pytest.raises(errors.InDoubt, match="goes on"):
            delivery.result(timeout=0)
        assert not delivery.done
        writer.outcomes.put(None)
        writer.outcomes.put(None)
        assert delivery.result() == 4
        assert producer.flush()
        assert repr(delivery) == "<delivery, seq 4>"
        assert repr(producer) == "<producer of 't', 0 waiting>"


def test_a_batch_lingers_for_others_until_it_is_flushed() -> None:
    writer = Writer(None)
    with make(writer, linger_ms=60_000) as producer:
        for number in range(10):
            producer.send(b"%d" % number)
        assert not writer.begun.is_set()
        assert producer.flush()
    assert len(writer.attempts) == 1


def test_a_sender_that_waits_for_space_waits_for_no_linger() -> None:
    writer = Writer(None, None)
    with make(writer, linger_ms=60_000, max_bytes=2 * 65) as producer:
        for data in (b"a", b"b", b"c"):
            producer.send(data)
        assert writer.records == [b"a", b"b"]

    async def main() -> None:
        writer = AsyncWriter()
        options: dict[str, Any] = {"linger_ms": 60_000, "max_bytes": 2 * 65, "on_error": None}
        producer = AsyncProducer("t", writer.write_batch, nothing, LIMITS, **options)
        for _ in range(2):
            writer.pending.put_nowait(None)
        for data in (b"a", b"b", b"c"):
            await producer.send(data)
        assert writer.records == [b"a", b"b"]
        await producer.close()

    run(main())


def test_a_record_that_never_fits_is_refused() -> None:
    with make(Writer().write, max_bytes=200) as producer:
        producer.send(b"x" * 136)
        for data, tag in ((b"x" * 137, None), (b"x" * 136, "t")):
            with pytest.raises(errors.TooLarge) as found:
                producer.send(data, tag=tag)
            assert found.value.written is False


def test_a_batch_is_sent_when_its_time_is_over() -> None:
    writer = Writer(None)
    with make(writer, linger_ms=1) as producer:
        assert producer.send(b"x").result() == 1


def test_a_batch_ends_before_it_is_larger_than_one_write() -> None:
    writer = Writer(None, None, None)
    with make(writer, linger_ms=60_000) as producer:
        for _ in range(5):
            producer.send(b"x" * (1 << 19))
    assert [len(datas) for _, datas in writer.attempts] == [3, 2]


def test_a_batch_in_doubt_stops_the_producer_even_with_on_error() -> None:
    writer, reports = Writer(), list[FailedRecords]()
    with begun(writer, on_error=reports.append) as producer:
        writer.outcomes.put(errors.InDoubt("lost"))
        with pytest.raises(errors.NotAllWritten) as found:
            producer.flush()
        assert found.value.written is None
        assert found.value.in_doubt == [UnwrittenRecord(b"a")]
        assert found.value.records == [UnwrittenRecord(b"b"), UnwrittenRecord(b"c", "t")]
        with pytest.raises(errors.NotAllWritten):
            producer.send(b"d")
        assert producer.stats()[:5] == (3, 0, 2, 1, 0)
    assert [(report.error.written, len(report.records)) for report in reports] == [(None, 1), (False, 2)]
    assert len(writer.attempts) == 1


def test_a_sender_that_waits_for_space_learns_that_the_producer_stopped() -> None:
    writer = Writer()
    with begun(writer, max_bytes=WAITING_BYTES) as producer:
        raised: SimpleQueue[BaseException] = SimpleQueue()

        def send() -> None:
            try:
                producer.send(b"d")
            except errors.Error as error:
                raised.put(error)

        thread = Thread(target=send)
        thread.start()
        writer.outcomes.put(FULL)
        thread.join()
        assert isinstance(raised.get(), errors.NotAllWritten)


def test_an_error_that_is_not_ours_leaves_the_batch_in_doubt() -> None:
    def fail(batch: ProducerBatch) -> Appended:
        raise KeyError(batch.name)

    producer = make(fail)
    producer.send(b"x")
    with pytest.raises(errors.NotAllWritten) as found:
        producer.close()
    assert found.value.in_doubt == [UnwrittenRecord(b"x")]
    assert isinstance(found.value.__cause__, errors.InDoubt)


def test_a_refused_batch_is_divided_until_one_record_is_refused() -> None:
    names: list[str] = []
    writer = Writer()

    def write(batch: ProducerBatch) -> Appended:
        names.append(batch.name)
        if b"bad" in batch.encode().datas:
            raise errors.BadInput("bad; nothing was written")
        return writer.write(batch)

    reports: list[FailedRecords] = []
    with make(write, linger_ms=60_000, on_error=reports.append) as producer:
        sent = [producer.send(data) for data in (b"1", b"2", b"3", b"bad", b"4")]
        assert producer.flush()
        assert producer.stats() == (5, 4, 1, 0, 0, 0, 3, 0)
        assert [delivery.result() for delivery in sent if delivery is not sent[3]] == [1, 2, 3, 4]
        assert sent[3].done
    assert reports[0].records == [UnwrittenRecord(b"bad")]
    assert writer.records == [b"1", b"2", b"3", b"4"]
    assert names == ["1", "1a", "1b", "1ba", "1bb", "1bba", "1bbb"]


def test_close_with_records_in_flight_says_what_was_written_and_what_was_not() -> None:
    writer = Writer()
    with begun(writer) as producer:
        writer.begun.clear()
        writer.outcomes.put(None)
        assert writer.begun.wait(60)
        producer.send({"d": 1}, node="eu")
        with pytest.raises(errors.NotAllWritten, match="1 were written, 1 were not") as found:
            producer.close(timeout=0)
        assert (found.value.written, found.value.count_written) == (None, 1)
        assert found.value.in_doubt == [UnwrittenRecord(b"b"), UnwrittenRecord(b"c", "t")]
        assert found.value.records == [UnwrittenRecord({"d": 1}, None, "eu")]
        writer.outcomes.put(None)
        assert eventually(lambda: not producer._thread.is_alive())
        assert producer.stats()[:5] == (4, 1, 1, 2, 0), "the late outcome changes nothing"
        with pytest.raises(errors.NotAllWritten):
            producer.close()


def interrupt_when(event: Event) -> Thread:
    """Send this process SIGINT once the event is set."""

    def interrupt() -> None:
        event.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interrupt_of_close_has_what_was_not_written_as_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    with begun(writer) as producer:
        wait_for = producer._settled.wait_for

        def interrupted(is_done: Callable[[], bool], timeout: float | None) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return wait_for(is_done, timeout)

        monkeypatch.setattr(producer._settled, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt) as found:
            producer.close()
        monkeypatch.undo()
        failure = found.value.__cause__
        assert isinstance(failure, errors.NotAllWritten)
        assert failure.in_doubt == [UnwrittenRecord(b"a")]
        assert failure.records == [UnwrittenRecord(b"b"), UnwrittenRecord(b"c", "t")]


def test_interrupts_at_random_moments_of_send_lose_and_repeat_nothing() -> None:
    """An interrupted `send` took its record or did not; the count of accepted records says which."""
    writer = Writer()
    sent = 0
    with make(writer.write, linger_ms=0, max_bytes=10_000) as producer:
        for _ in range(30):
            ready = Event()
            thread = interrupt_when(ready)
            try:
                while True:
                    ready.set()
                    for _ in range(100):
                        producer.send(b"%d" % sent)
                        sent += 1
            except KeyboardInterrupt:
                pass
            thread.join()
            sent = producer.stats().accepted
        assert producer.flush()
    assert writer.records == [b"%d" % number for number in range(sent)]


def test_an_error_of_the_block_is_raised_with_what_was_not_written_as_its_cause() -> None:
    def send(outcome: Exception | None) -> None:
        with make(Writer(FULL)) as producer:
            producer.send(b"x")
            if outcome is not None:
                raise outcome

    with pytest.raises(ValueError, match="mine") as found:
        send(ValueError("mine"))
    assert isinstance(found.value.__cause__, errors.NotAllWritten)
    with pytest.raises(errors.NotAllWritten):
        send(None)


def test_on_error_may_send_but_not_wait_and_its_exceptions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    writer, raised = Writer(FULL, None), list[BaseException]()

    def on_error(failed: FailedRecords) -> None:
        producer.send(b"again: " + failed.records[0].data)
        try:
            producer.flush()
        except errors.BadInput as error:
            raised.append(error)
        raise ValueError("of the callback")

    with make(writer, on_error=on_error) as producer:
        producer.send(b"x")
        assert eventually(lambda: writer.records == [b"again: x"])
    assert len(raised) == 1
    assert "of the callback" in caplog.text


def test_a_forked_child_refuses_the_producer_of_its_parent() -> None:
    with make(Writer(None).write) as producer:
        producer.send(b"x")
        producer.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                producer.send(b"y")
            except errors.Forked:
                producer.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert producer.send(b"z").result() == 2


# ── asyncio ───────────────────────────────────────────────────────────────────────────────────────


class AsyncWriter(Writer):
    """`Writer` for a task. A write that is cancelled is finished first, as those of `tidelog.aio` are."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: asyncio.Queue[Outcome] = asyncio.Queue()
        self.started = asyncio.Event()

    async def write_batch(self, batch: ProducerBatch) -> Appended:
        self.started.set()
        try:
            outcome = await self.pending.get()
        except asyncio.CancelledError as cancelled:
            raise cancelled from errors.WriteCancelled("t", result=self.write(batch))
        if outcome is not None:
            raise outcome
        return self.write(batch)


async def nothing() -> None:
    """No topic to check."""


async def begun_async(writer: AsyncWriter, **options: Any) -> AsyncProducer:
    options = {"linger_ms": 0, "max_bytes": MAX_BYTES, "on_error": None, **options}
    producer = AsyncProducer("t", writer.write_batch, nothing, LIMITS, **options)
    await producer.send(b"a")
    await writer.started.wait()
    await producer.send(b"b")
    return producer


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


def test_tasks_wait_for_space_for_outcomes_and_for_the_end() -> None:
    async def main() -> None:
        writer = AsyncWriter()
        producer = await begun_async(writer, max_bytes=2 * 65)
        with pytest.raises(errors.Throttled):
            await producer.send(b"c", timeout=0.001)
        assert not await producer.flush(timeout=0.001)
        sending, flushing = asyncio.ensure_future(producer.send(b"c")), asyncio.ensure_future(producer.flush())
        await asyncio.sleep(0)
        for _ in range(3):
            writer.pending.put_nowait(None)
        assert await flushing
        assert await (await sending).result() == 3
        await producer.close()
        assert writer.records == [b"a", b"b", b"c"]
        with pytest.raises(errors.Closed):
            await producer.send(b"d")

    run(main())


def test_a_cancelled_close_finishes_the_batch_on_its_way_and_names_the_rest() -> None:
    async def main() -> None:
        writer = AsyncWriter()
        producer = await begun_async(writer)
        closing = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError) as found:
            await closing
        failure = found.value.__cause__
        assert isinstance(failure, errors.NotAllWritten)
        assert (failure.written, failure.count_written, failure.in_doubt) == (False, 1, [])
        assert failure.records == [UnwrittenRecord(b"b")]
        assert (await producer.stats())[:5] == (2, 1, 1, 0, 0)
        assert writer.records == [b"a"]

    run(main())


def test_close_after_its_timeout_finishes_the_batch_on_its_way_and_raises_the_rest() -> None:
    async def main() -> None:
        writer = AsyncWriter()
        producer = await begun_async(writer)
        with pytest.raises(errors.NotAllWritten) as found:
            await producer.close(timeout=0)
        assert (found.value.count_written, found.value.records) == (1, [UnwrittenRecord(b"b")])

    run(main())


def test_a_loop_that_ends_leaves_no_record_without_an_outcome() -> None:
    writers: list[AsyncWriter] = []
    producers: list[AsyncProducer] = []

    async def main() -> None:
        writers.append(AsyncWriter())
        producers.append(await begun_async(writers[0]))

    run(main())
    assert writers[0].records == [b"a"]
    assert producers[0]._queue.stats()[:5] == (2, 1, 1, 0, 0)


def test_other_tasks_run_while_one_sends_without_waiting() -> None:
    async def main() -> None:
        writer = AsyncWriter()
        producer = AsyncProducer(
            "t", writer.write_batch, nothing, LIMITS, linger_ms=0, max_bytes=MAX_BYTES, on_error=None
        )
        writer.pending.put_nowait(None)
        for _ in range(5_000):
            await producer.send(b"x")
        assert writer.records, "a batch was written meanwhile"
        for _ in range(5):
            writer.pending.put_nowait(None)
        await producer.close()
        assert len(writer.records) == 5_000

    run(main())
