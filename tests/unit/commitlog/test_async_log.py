"""The log for asyncio: cancellation, followers, shared syncs, and a loop that never waits. `tests/contract/test_log.py`
compares its answers with those of the plain log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from errno import ENOSPC
from threading import Event
from types import coroutine
from typing import Any

import pytest

from tidelog.commitlog import AsyncSegmentedLog, SegmentedLog
from tidelog.commitlog.writer_thread import Job
from tidelog.errors import (
    BadInput,
    Busy,
    Closed,
    DiskFull,
    Error,
    Forked,
    Latched,
    Locked,
    OutOfRange,
    ReadOnly,
    StreamBroken,
    TooLarge,
    Truncated,
    UnexpectedSeq,
    WriteCancelled,
)
from tidelog.testing import ManualClock, SimDisk

FOREVER_S = 30


async def opened(disk: SimDisk, codec: str = "tide", **settings: Any) -> AsyncSegmentedLog:
    return await AsyncSegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), **settings)


def on_disk(disk: SimDisk, codec: str = "tide") -> list[bytes] | None:
    """Return the records that another open finds; None where there is no log any more."""
    if disk.stat("log") is None:
        return None
    with SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), read_only=True) as log:
        return [record.data for record in log]


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk


async def data_of(records: AsyncIterator[Any]) -> list[bytes]:
    return [record.data async for record in records]


# Cancellation at every await.


class WriterPause:
    """Holds the writer thread, so that a test decides when a job begins or ends."""

    def __init__(self) -> None:
        self.reached, self.open = Event(), Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.open.wait(FOREVER_S)


@coroutine
def cancelled_at(
    work: Coroutine[Any, Any, Any], at: int, before: Callable[[], None], cancel: Callable[[], None]
) -> Generator[Any, Any, bool]:
    """Run a coroutine. Call `before` as it goes on to its suspension number `at`, and `cancel` once it is suspended
    there. Return False where it ended before."""
    awaiting = work.__await__()
    step, send, value = 0, awaiting.send, None
    while True:
        if step == at:
            before()
        try:
            future = send(value)
        except StopIteration:
            return step > at
        if step == at:
            cancel()
        step += 1
        send, value = awaiting.send, None
        try:
            value = yield future
        except BaseException as error:
            send, value = awaiting.throw, error


async def run_cancelled(
    disk: SimDisk, log: AsyncSegmentedLog | None, work: Coroutine[Any, Any, Any], at: int, when: str
) -> tuple[bool, BaseException | None]:
    """Cancel `work` at its suspension `at`: while its job is queued, after it has begun, or whenever it is. Return
    whether it was suspended as often, and the CancelledError."""
    pause, loop = WriterPause(), asyncio.get_running_loop()

    def before() -> None:
        if when == "queued" and log is not None:
            with suppress(Closed):
                log._writer.submit(Job(pause.wait, None))
        elif when == "begun":
            disk.on_op = lambda _: pause.wait() if not pause.open.is_set() else None

    async def cancel() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
            if when == "free" or pause.reached.is_set():
                break
            await loop.run_in_executor(
                None, pause.reached.wait, 0.002
            )  # a job without disk operations never gets there
        task.cancel()
        await asyncio.sleep(0)
        disk.on_op = None
        pause.open.set()

    cancellers: list[asyncio.Task[None]] = []
    task = asyncio.ensure_future(cancelled_at(work, at, before, lambda: cancellers.append(loop.create_task(cancel()))))
    caught: BaseException | None = None
    reached = True
    try:
        reached = await task
    except asyncio.CancelledError as error:
        caught = error
    await asyncio.gather(*cancellers)
    disk.on_op = None
    pause.open.set()
    return reached, caught


OLD = [b"one", b"two", b"three", b"four"]
Operation = Callable[[AsyncSegmentedLog], Coroutine[Any, Any, Any]]
OPERATIONS: dict[str, tuple[Operation, list[bytes] | None]] = {
    "append": (lambda log: log.append(b"new"), [*OLD, b"new"]),
    "append expected": (lambda log: log.append(b"new", expected=log.highest), [*OLD, b"new"]),
    "append_many": (lambda log: log.append_many([b"new", b"er"]), [*OLD, b"new", b"er"]),
    "append_stream": (lambda log: log.append_stream(pieces(b"n", b"e", b"w")), [*OLD, b"new"]),
    "seal": (lambda log: log.seal(), OLD),
    "sync": (lambda log: log.sync(), OLD),
    "truncate": (lambda log: log.truncate(log.highest - 2), OLD[:2]),
    "drop_below": (lambda log: log.drop_below(log.lowest + 1), OLD[1:]),
    "commit": (lambda log: log.offsets.commit("group", log.highest), OLD),
    "close": (lambda log: log.close(), OLD),
    "remove": (lambda log: log.remove(), None),
}


@pytest.mark.parametrize("when", ["queued", "begun", "free"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("codec", ["tide", "laminar"])
def test_a_cancelled_call_is_done_or_not_and_says_which(codec: str, name: str, when: str) -> None:
    """Method: cancel at each await of the call in turn, while its job waits in the queue and after it has begun."""
    work, after = OPERATIONS[name]

    async def cancel_at(at: int) -> bool:
        disk = SimDisk()
        log = await opened(disk, codec)
        await log.append(OLD[0])
        await log.seal()
        await log.append_many(OLD[1:])
        reached, error = await run_cancelled(disk, log, work(log), at, when)
        if error is None:
            assert on_disk(disk, codec) == after
        elif error.__cause__ is None:
            assert (on_disk(disk, codec), log._state.closed) == (OLD, False)
        else:
            assert isinstance(error.__cause__, WriteCancelled)
            assert (on_disk(disk, codec), error.__cause__.written) == (after, True)
            if name.startswith("append") and after is not None:
                assert [record.data for record in await_range(disk, codec, error.__cause__.acked)] == after[4:]
        # Without an operation of the disk to stop at, the call may be faster than its cancellation.
        assert error is not None or not reached or when == "free" or (name, when) == ("sync", "begun")
        if not log._state.closed:
            expected = [*(on_disk(disk, codec) or []), b"later"]
            await log.append(b"later")
            assert await data_of(aiter(log)) == expected
            await log.close()
            again = await opened(disk, codec)
            assert (again.report.clean, await data_of(aiter(again))) == (True, expected)
            await again.close()
        assert disk.open_files() == []
        return reached

    at = 0
    while asyncio.run(cancel_at(at)):
        at += 1
        assert at < 50, "the call never ends by itself"
    assert at >= (8 if name == "append_stream" else 1)


def await_range(disk: SimDisk, codec: str, seqs: range) -> list[Any]:
    with SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), read_only=True) as log:
        return list(log.records(seqs.start, seqs.stop))


@pytest.mark.parametrize("when", ["begun", "free"])
def test_a_cancelled_open_leaves_no_lock_and_no_open_file(when: str) -> None:
    async def cancel_open() -> None:
        disk = SimDisk()
        _, error = await run_cancelled(disk, None, opened(disk), 0, when)
        assert error is not None
        assert disk.open_files() == []
        log = await opened(disk)
        assert await log.append(b"one") == 1
        await log.close()

    asyncio.run(cancel_open())


def test_a_cancelled_read_has_no_effect() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk)
        await log.append_many(OLD)
        reads: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: log.read(1),
            lambda: log.read_range(1),
            lambda: data_of(log.records()),
            lambda: log.to_arrow(),
            lambda: log.segments(),
        ]
        for read in reads:
            at = 0
            while (await run_cancelled(disk, log, read(), at, "free"))[0]:
                at += 1
            assert at >= 1
        assert await data_of(log.records()) == OLD
        await log.close()

    asyncio.run(main())


def test_a_cancelled_write_that_failed_has_its_error_as_the_cause() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk)
        await log.append(b"one")
        disk.fail("write", error=ENOSPC)
        _, error = await run_cancelled(disk, log, log.append(b"two"), 0, "begun")
        assert error is not None
        assert isinstance(error.__cause__, DiskFull)
        assert error.__cause__.written is False
        assert await log.append(b"two") == 2
        await log.close()

    asyncio.run(main())


def test_a_timeout_is_a_timeout_whatever_the_write_did() -> None:
    async def main() -> None:
        disk, pause = SimDisk(), WriterPause()
        log = await opened(disk)
        disk.on_op = lambda _: pause.wait() if not pause.open.is_set() else None
        task = asyncio.create_task(log.append(b"slow"))
        await asyncio.get_running_loop().run_in_executor(None, pause.reached.wait)
        asyncio.get_running_loop().call_later(0.01, pause.open.set)
        with pytest.raises(TimeoutError) as timeout:
            async with asyncio.timeout(0):
                await task
        assert isinstance(timeout.value.__cause__, asyncio.CancelledError)
        outcome = timeout.value.__cause__.__cause__
        assert isinstance(outcome, WriteCancelled)
        assert (outcome.written, outcome.acked, outcome.result) == (True, range(1, 2), 1)
        await log.close()

    asyncio.run(main())


def test_a_stream_whose_task_was_destroyed_is_rolled_back() -> None:
    disk = SimDisk()

    async def endless() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.get_running_loop().create_future()

    async def half_written() -> None:
        while log._state.active_stream is None or log._state.active.data.staged_bytes < 4:
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    log = loop.run_until_complete(opened(disk))
    stream = log.append_stream(endless())
    task = loop.create_task(stream)
    loop.run_until_complete(half_written())
    loop.close()
    stream.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # of asyncio: it would log that the task is gone

    async def go_on() -> None:
        assert await log.append(b"whole") == 1
        await log.close()

    asyncio.run(go_on())
    assert on_disk(disk) == [b"whole"]


# Many tasks.


def test_appends_of_many_tasks_share_syncs_and_keep_their_order() -> None:
    async def main() -> None:
        disk, pause = SimDisk(), WriterPause()
        log = await opened(disk, sync="batch")
        log._writer.submit(Job(pause.wait, None))
        tasks = [asyncio.create_task(log.append(b"%d" % number, tag=b"t%d" % (number % 3))) for number in range(300)]
        await asyncio.sleep(0)
        pause.open.set()
        assert await asyncio.gather(*tasks) == list(range(1, 301))
        assert log.metrics.snapshot()["sync_seconds"]["count"] == 1
        assert [(r.data, r.tag) async for r in log] == [(b"%d" % n, b"t%d" % (n % 3)) for n in range(300)]
        await log.close()

    asyncio.run(main())


async def gathered(log: AsyncSegmentedLog, *appends: Awaitable[Any]) -> list[Any]:
    """Let these appends wait together, and return each result or error."""
    pause = WriterPause()
    log._writer.submit(Job(pause.wait, None))
    tasks = [asyncio.ensure_future(append) for append in appends]
    await asyncio.sleep(0)
    pause.open.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_an_append_that_is_refused_does_not_refuse_those_written_with_it() -> None:
    async def main() -> None:
        log = await opened(SimDisk(), segment_bytes_max=400, segment_overflow_bytes=0)
        too_large, no_utf8 = log.append(bytes(500)), log.append(b"c", tag=b"\xff")
        results = await gathered(log, log.append(b"a"), too_large, log.append(b"b"), no_utf8, log.append(b"d"))
        assert [results[number] for number in (0, 2, 4)] == [1, 2, 3]
        assert (type(results[1]), type(results[3])) == (TooLarge, BadInput)
        assert await data_of(aiter(log)) == [b"a", b"b", b"d"]
        await log.close()

    asyncio.run(main())


def test_a_failed_sync_leaves_every_append_of_the_batch_in_doubt() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk)
        await log.append(b"safe")
        disk.fail_sync("kept")
        results = await gathered(log, log.append(b"a"), log.append(b"b"))
        assert [(type(result), result.written, len(result.acked)) for result in results] == [(Latched, None, 0)] * 2
        with pytest.raises(Latched) as refused:
            await log.append(b"c")
        assert refused.value.written is False
        await log.close()

    asyncio.run(main())


def test_a_failed_sync_that_was_due_has_the_seq_of_each_append() -> None:
    async def main() -> None:
        disk, clock = SimDisk(), ManualClock()
        log = await AsyncSegmentedLog.open("log", disk=disk, clock=clock, sync="interval")
        await log.append(b"safe")
        clock.tick(1000)
        disk.fail_sync("kept")
        results = await gathered(log, log.append(b"a"), log.append(b"b"))
        assert [(type(result), result.acked) for result in results] == [(Latched, range(n, n + 1)) for n in (2, 3)]
        assert await data_of(aiter(log)) == [b"safe", b"a", b"b"]
        with suppress(Latched):
            await log.close()

    asyncio.run(main())


def test_a_full_disk_fails_what_does_not_fit_and_nothing_else() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk, segment_bytes_max=10_000)
        disk.fail("write", at=1, error=ENOSPC)
        assert await gathered(log, log.append(b"a"), log.append(b"b")) == [1, 2], "rolled back, and written one by one"
        disk.fail("write", at=1, error=ENOSPC, times=2)
        results = await gathered(log, log.append(b"c"), log.append(b"d"))
        assert (type(results[0]), results[1]) == (DiskFull, 3)
        assert await data_of(aiter(log)) == [b"a", b"b", b"d"]
        await log.close()

    asyncio.run(main())


def test_a_withdrawn_append_leaves_no_hole_among_others() -> None:
    async def main() -> None:
        log, pause = await opened(SimDisk()), WriterPause()
        log._writer.submit(Job(pause.wait, None))
        tasks = [asyncio.create_task(log.append(b"%d" % number)) for number in range(6)]
        await asyncio.sleep(0)
        for number in (0, 3, 5):
            tasks[number].cancel()
        await asyncio.sleep(0)
        pause.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [result for result in results if isinstance(result, int)] == [1, 2, 3]
        assert await data_of(aiter(log)) == [b"1", b"2", b"4"]
        await log.close()

    asyncio.run(main())


def test_the_loop_runs_while_the_disk_does_not() -> None:
    async def main() -> None:
        disk, pause = SimDisk(), WriterPause()
        log = await opened(disk)
        await log.append(b"one")
        disk.on_op = lambda _: pause.wait() if not pause.open.is_set() else None
        task = asyncio.create_task(log.append(b"two"))
        await asyncio.get_running_loop().run_in_executor(None, pause.reached.wait)
        assert (log.lowest, log.highest, len(log), log.has_index(1), log.is_empty) == (1, 2, 1, True, False)
        assert log.metrics.snapshot()["highest_seq"] == 2
        assert not task.done()
        pause.open.set()
        assert await task == 2
        await log.close()

    asyncio.run(main())


# Streams.


def test_other_writes_are_busy_while_a_stream_runs_and_reads_are_not() -> None:
    async def main() -> None:
        log = await opened(SimDisk())
        await log.append(b"before")

        async def chunks() -> AsyncIterator[bytes]:
            yield b"half "
            with pytest.raises(Busy):
                await log.append(b"other")
            with pytest.raises(Busy):
                await log.append_stream(pieces(b"x"))
            assert await data_of(aiter(log)) == [b"before"]
            yield b"a record"

        seq = await log.append_stream(chunks(), tag=b"tag", meta=b"meta")
        record = await log.read(seq)
        assert (record.data, record.tag, record.meta) == (b"half a record", b"tag", b"meta")
        await log.close()

    asyncio.run(main())


def test_a_broken_stream_leaves_nothing() -> None:
    async def main() -> None:
        log = await opened(SimDisk(), segment_bytes_max=1000)

        async def broken() -> AsyncIterator[bytes]:
            yield b"half"
            raise ConnectionResetError("gone")

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(300)

        for chunks in (broken(), endless()):
            with pytest.raises(StreamBroken):
                await log.append_stream(chunks)
            assert log.is_empty
        with pytest.raises(UnexpectedSeq):
            await log.append_stream(pieces(b"x"), expected=7)
        assert await log.append(b"whole") == 1
        await log.close()

    asyncio.run(main())


def test_closing_during_a_stream_ends_it() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk)

        async def closing() -> AsyncIterator[bytes]:
            yield b"half"
            await log.close()
            yield b"never"

        with pytest.raises(Closed):
            await log.append_stream(closing())
        assert on_disk(disk) == []
        assert disk.open_files() == []

    asyncio.run(main())


# Following.


async def take(records: AsyncIterator[Any], count: int) -> list[bytes]:
    return [(await anext(records)).data for _ in range(count)]


def test_a_follower_gets_old_records_and_then_new_ones() -> None:
    async def main() -> None:
        log = await opened(SimDisk(), segment_bytes_max=100)
        await log.append_many(OLD)
        records = log.follow()
        assert await take(records, 4) == OLD
        waiting = asyncio.create_task(take(records, 3))
        await asyncio.sleep(0)
        await log.append(b"five")
        await log.seal()
        await log.append_many([b"six", b"seven"])
        assert await waiting == [b"five", b"six", b"seven"]
        later = log.follow(log.highest)
        waiting = asyncio.create_task(take(later, 1))
        await asyncio.sleep(0)
        await log.append(b"eight")
        assert await waiting == [b"eight"]
        await log.close()

    asyncio.run(main())


def test_a_follower_with_a_timeout_ends_after_the_last_record() -> None:
    async def main() -> None:
        log = await opened(SimDisk())
        await log.append_many(OLD)
        assert await data_of(log.follow(2, timeout=0)) == OLD[1:]
        assert not log._writer.followers
        await log.close()

    asyncio.run(main())


def test_a_follower_of_a_closed_or_removed_log_raises() -> None:
    async def main(remove: bool) -> None:
        log = await opened(SimDisk())
        waiting = asyncio.create_task(take(log.follow(), 1))
        await asyncio.sleep(0)
        await (log.remove() if remove else log.close())
        with pytest.raises(Closed):
            await waiting
        assert not log._writer.followers
        with pytest.raises(Closed):
            await take(log.follow(), 1)

    for remove in (False, True):
        asyncio.run(main(remove))


@pytest.mark.parametrize("refilled", [0, 1, 2, 5])
def test_a_follower_that_had_read_truncated_records_raises(refilled: int) -> None:
    """Also where new records have taken the seqs of the old ones before the follower runs again."""

    async def main() -> None:
        log = await opened(SimDisk())
        await log.append_many(OLD)
        records, behind = log.follow(), log.follow()
        await take(records, 4)
        await take(behind, 1)
        waiting = asyncio.create_task(take(records, 1))
        await asyncio.sleep(0)
        await asyncio.gather(log.truncate(3), *(log.append(b"new%d" % number) for number in range(refilled)))
        with pytest.raises(Truncated) as error:
            await waiting
        assert (error.value.asked, error.value.seq) == (5, 3)
        again = log.follow(error.value.seq, timeout=0)
        assert await data_of(again) == [b"new%d" % number for number in range(refilled)]
        await log.close()

    asyncio.run(main())


def test_a_follower_that_had_not_read_truncated_records_goes_on() -> None:
    async def main() -> None:
        log = await opened(SimDisk(), segment_bytes_max=60)
        await log.append_many([bytes(50), bytes(50), bytes(50), b"old"])
        records = log.follow(1)
        async for record in records:
            if record.seq == 1:
                await log.truncate(4)
                await log.append(b"new")
            if record.seq == 4:
                assert record.data in (b"old", b"new"), "the page was read before or after"
                break
        await log.close()

    asyncio.run(main())


def test_a_follower_whose_next_record_was_dropped_raises() -> None:
    async def main() -> None:
        log = await opened(SimDisk())
        for data in OLD:
            await log.append(data)
            await log.seal()
        records = log.follow()
        await log.drop_below(4)
        assert log.lowest == 4
        late = log.follow(2)
        for follower in (late,):
            with pytest.raises(OutOfRange) as error:
                await take(follower, 1)
            assert error.value.lowest == 4
        assert await take(records, 1) == [b"four"]
        with pytest.raises(OutOfRange):
            await take(log.follow(9), 1)
        await log.close()

    asyncio.run(main())


# Opening, other loops, other processes.


def test_a_reader_cannot_be_followed() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk)
        await log.append(b"one")
        reader = await opened(disk, read_only=True)
        assert await data_of(aiter(reader)) == [b"one"]
        with pytest.raises(ReadOnly):
            await take(reader.follow(), 1)
        with pytest.raises(ReadOnly):
            await reader.append(b"x")
        await reader.close()
        await log.close()

    asyncio.run(main())


def test_a_failed_open_leaves_no_thread() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = await opened(disk)
        with pytest.raises(Locked):
            await opened(disk)
        with pytest.raises(BadInput, match="readers"):
            await opened(disk, readers=0)
        await log.close()
        await log.close()
        for call in (log.append(b"x"), log.read(1), log.sync(), log.segments()):
            with pytest.raises(Closed):
                await call

    asyncio.run(main())


def test_one_log_serves_several_event_loops() -> None:
    disk = SimDisk()
    log = asyncio.run(opened(disk))

    async def append(data: bytes) -> int:
        return await log.append(data)

    assert [asyncio.run(append(b"%d" % number)) for number in range(3)] == [1, 2, 3]
    asyncio.run(log.close())
    assert on_disk(disk) == [b"0", b"1", b"2"]


def test_a_log_that_is_never_closed_ends_its_thread() -> None:
    log = asyncio.run(opened(SimDisk()))
    thread = log._writer._thread
    del log
    thread.join(FOREVER_S)
    assert not thread.is_alive()


def test_a_forked_child_is_refused_and_can_end(tmp_path: Any) -> None:
    log = asyncio.run(AsyncSegmentedLog.open(str(tmp_path / "log"), sync="interval"))
    asyncio.run(_append(log))
    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(_append(log))
        except Forked:
            asyncio.run(log.close())
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(_append(log))
    asyncio.run(log.close())


async def _append(log: AsyncSegmentedLog) -> int:
    return await log.append(b"x")


def test_write_cancelled_says_what_was_written() -> None:
    error: Error = WriteCancelled("log", result=range(3, 5))
    assert (error.written, error.retryable, error.acked, error.code) == (True, False, range(3, 5), "write_cancelled")
