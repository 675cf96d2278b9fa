"""Streamed records: all of it or nothing, to the byte, whatever goes wrong and wherever."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.append import StreamAppend
from tidelog.commitlog.codec import Batch
from tidelog.errors import (
    BadInput,
    Busy,
    Closed,
    DiskFull,
    Error,
    Latched,
    StreamBroken,
    TooLarge,
    WriteFailed,
)
from tidelog.testing import SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]
Append: TypeAlias = Callable[[SegmentedLog, Iterable[bytes]], int]

MAX, OVERFLOW = 4_000, 500
HEAD = {"tide": 46, "rustlog": 20, "laminar": 9, "narwhal": 26}  # bytes around the data of a record


def plainly(log: SegmentedLog, chunks: Iterable[bytes]) -> int:
    return log.append_stream(chunks)


def awaited(log: SegmentedLog, chunks: Iterable[bytes]) -> int:
    async def slowly() -> AsyncIterator[bytes]:
        for chunk in chunks:
            await asyncio.sleep(0)
            yield chunk

    return asyncio.run(log.append_stream_async(slowly()))


@pytest.fixture(params=[plainly, awaited], ids=["sync", "async"])
def append(request: pytest.FixtureRequest) -> Append:
    found: Append = request.param
    return found


@pytest.fixture
def log(open_log: Opener) -> SegmentedLog:
    """A log with a record in it, whose segments end at a known byte."""
    log = open_log(segment_bytes_max=MAX, segment_overflow_bytes=OVERFLOW)
    log.append(b"before")
    return log


def ceiling(log: SegmentedLog) -> int:
    """The bytes a streamed record may have now: what is left of the segment and the overflow, less what goes around."""
    return MAX + OVERFLOW - log._log_state.active.size - HEAD[log.codec]


def pieces(total: int, size: int = 100) -> Iterator[bytes]:
    for start in range(0, total, size):
        yield bytes([start // size % 251]) * min(size, total - start)


def tree(disk: SimDisk) -> dict[str, bytes]:
    """Every file but the manifest; without the zeros that narwhal reserves behind its index, which may be given back
    at any time."""
    found = {path: data for path, data in disk.tree().items() if not path.endswith(".manifest")}
    return {path: data.rstrip(b"\0") if path.endswith(".idx") else data for path, data in found.items()}


def is_as_before(log: SegmentedLog, disk: SimDisk, before: dict[str, bytes], open_log: Opener) -> bool:
    """Nothing is visible, not a byte is left, and the log works."""
    assert tree(disk) == before
    held, highest = list(log), log.highest
    assert open_log(disk=disk.reboot()).report.clean
    assert log.append(b"goes on") == highest
    assert plainly(log, [b"goes ", b"on"]) == highest + 1
    assert [record.data for record in log] == [*(record.data for record in held), b"goes on", b"goes on"]
    again = open_log(disk=disk.reboot())
    return again.report.clean and list(again) == list(log)


def test_a_stream_of_exactly_the_ceiling_is_accepted(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk
) -> None:
    """G117."""
    total = ceiling(log)
    seq = append(log, pieces(total))
    assert log.read(seq).data == b"".join(pieces(total))
    log.append(b"after")
    assert len(log.segments) == 2
    assert list(open_log(disk=disk.reboot())) == list(log)


def test_a_stream_one_byte_over_the_ceiling_is_rolled_back(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk
) -> None:
    """G115, G118."""
    before, total = tree(disk), ceiling(log) + 1
    with pytest.raises(StreamBroken, match="longer than its limit"):
        append(log, pieces(total))
    assert is_as_before(log, disk, before, open_log)


def test_a_stream_without_end_is_stopped_at_the_ceiling(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk
) -> None:
    """G115."""
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 100

    before = tree(disk)
    with pytest.raises(StreamBroken):
        append(log, endless())
    assert taken == ceiling(log) // 100 + 1, "not a chunk more than it takes to know"
    assert is_as_before(log, disk, before, open_log)


@pytest.mark.parametrize("chunks", [[], [b""], [b"", b"", b""]], ids=["no chunk", "an empty chunk", "empty chunks"])
def test_an_empty_stream_is_an_empty_record(
    log: SegmentedLog, append: Append, chunks: list[bytes], open_log: Opener, disk: SimDisk
) -> None:
    """G117."""
    seq = append(log, chunks)
    assert log.read(seq).data == b""
    assert log.append(b"after") == seq + 1
    assert list(open_log(disk=disk.reboot())) == list(log)


@pytest.mark.parametrize("codec", ["laminar"])
def test_only_an_empty_stream_fits_into_the_space_of_a_header(open_log: Opener, disk: SimDisk) -> None:
    """G117."""
    log = open_log(segment_bytes_max=HEAD["laminar"], segment_overflow_bytes=0)
    before = tree(disk)
    with pytest.raises(StreamBroken):
        log.append_stream([b"x"])
    assert tree(disk) == before
    assert log.read(log.append_stream([])).data == b""
    assert log.read(log.append_stream([b""])).data == b""


def test_a_segment_filled_to_its_last_byte_is_sealed_before_the_next_stream(
    open_log: Opener, disk: SimDisk, data_path: Callable[[int], str], first_seq: int
) -> None:
    """G127."""
    log = open_log(segment_bytes_max=MAX, segment_overflow_bytes=OVERFLOW)
    log.append_stream(pieces(MAX - 2_000))
    log.append_stream(pieces(ceiling(log)))
    assert len(disk.read_file(data_path(first_seq))) == MAX + OVERFLOW
    seq = log.append_stream(pieces(MAX - 200))
    assert log.segments == [range(first_seq, seq), range(seq, seq + 1)]
    assert log.read(seq).data == b"".join(pieces(MAX - 200))


class Broke(Exception):
    pass


def breaking(after: int, error: BaseException) -> Iterator[bytes]:
    yield from pieces(after * 100)
    raise error


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_stream_that_raises_midway_is_rolled_back(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk, after: int
) -> None:
    """G116."""
    before, error = tree(disk), Broke("gone")
    with pytest.raises(StreamBroken, match="gone") as failed:
        append(log, breaking(after, error))
    assert failed.value.__cause__ is error
    assert is_as_before(log, disk, before, open_log)


def test_a_socket_that_breaks_midway_is_a_broken_stream_and_not_a_broken_disk(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk
) -> None:
    """G116. Method: what a socket raises is an OSError too; a caller must not have to know whose it was."""
    before = tree(disk)
    with pytest.raises(StreamBroken, match="gone"):
        append(log, breaking(3, ConnectionResetError("gone")))
    assert is_as_before(log, disk, before, open_log)


def test_a_stream_that_yields_something_else_is_rolled_back(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk
) -> None:
    before = tree(disk)
    with pytest.raises(BadInput, match="str"):
        append(log, [b"fine", "text"])  # type: ignore[list-item]
    assert is_as_before(log, disk, before, open_log)


def test_an_interrupted_stream_is_rolled_back(log: SegmentedLog, open_log: Opener, disk: SimDisk) -> None:
    before = tree(disk)
    with pytest.raises(KeyboardInterrupt):
        log.append_stream(breaking(3, KeyboardInterrupt()))
    assert is_as_before(log, disk, before, open_log)


def test_a_cancelled_stream_is_rolled_back(log: SegmentedLog, open_log: Opener, disk: SimDisk) -> None:
    """G116."""
    before = tree(disk)

    async def scenario() -> None:
        started = asyncio.Event()

        async def waiting() -> AsyncIterator[bytes]:
            yield b"some"
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(log.append_stream_async(waiting()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert is_as_before(log, disk, before, open_log)


def test_another_write_is_busy_while_an_awaited_stream_is_open(
    log: SegmentedLog, open_log: Opener, disk: SimDisk
) -> None:
    held = list(log)

    async def scenario() -> int:
        started, go_on = asyncio.Event(), asyncio.Event()

        async def waiting() -> AsyncIterator[bytes]:
            yield b"some"
            started.set()
            await go_on.wait()
            yield b"thing"

        task = asyncio.create_task(log.append_stream_async(waiting()))
        await started.wait()
        calls: list[Callable[[], object]] = [
            lambda: log.append(b"x"),
            lambda: log.append_many([b"x"]),
            lambda: log.append_stream([b"x"]),
            lambda: log.truncate(log.lowest),
            lambda: log.seal(),
            lambda: log.compact(lambda record: record.data),
        ]
        for call in calls:
            with pytest.raises(Busy):
                call()
        with pytest.raises(Busy):
            await log.append_stream_async(waiting())
        assert list(log) == held, "readers see nothing of it"
        assert list(open_log(disk=disk.reboot())) == held, "and neither does a restart"
        go_on.set()
        return await task

    seq = asyncio.run(scenario())
    assert log.read(seq).data == b"something"
    assert log.append(b"after") == seq + 1


def test_a_tick_leaves_an_open_stream_alone(log: SegmentedLog) -> None:
    stream = StreamAppend(log._log_state, Batch((b"",)), None)
    stream.write(b"some")
    log.tick()
    stream.write(b"thing")
    assert log.read(stream.commit()).data == b"something"


def test_a_stream_ends_once(log: SegmentedLog) -> None:
    stream = StreamAppend(log._log_state, Batch((b"",)), None)
    stream.write(b"some")
    assert stream.bytes_max == ceiling(log)
    seq = stream.commit()
    for call in (stream.commit, lambda: stream.write(b"more")):
        with pytest.raises(Closed):
            call()
    stream.roll_back()
    assert [record.seq for record in log][-1] == seq


def test_closing_the_log_rolls_an_open_stream_back(log: SegmentedLog, open_log: Opener, disk: SimDisk) -> None:
    log.close()  # tide writes its index now
    before, log = tree(disk), open_log(disk=disk)
    stream = StreamAppend(log._log_state, Batch((b"",)), None)
    stream.write(b"some")
    log.close()
    assert tree(disk) == before
    with pytest.raises(Error):
        stream.write(b"thing")
    assert open_log(disk=disk.reboot()).report.clean


@pytest.mark.parametrize("landed", [0, 33])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_full_disk_midway_rolls_the_stream_back(
    log: SegmentedLog,
    append: Append,
    open_log: Opener,
    disk: SimDisk,
    data_path: Callable[[int], str],
    first_seq: int,
    at: int,
    landed: int,
) -> None:
    """G116."""
    before = tree(disk)
    disk.fail("write", at, error=errno.ENOSPC, path=data_path(first_seq), partial=landed)
    with pytest.raises(DiskFull):
        append(log, pieces(700))
    assert is_as_before(log, disk, before, open_log)


@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_write_error_midway_rolls_the_stream_back(
    log: SegmentedLog,
    append: Append,
    open_log: Opener,
    disk: SimDisk,
    codec: str,
    data_path: Callable[[int], str],
    first_seq: int,
    at: int,
) -> None:
    """G116. The laminar design goes on after a failed write; the others latch."""
    before, held = tree(disk), list(log)
    disk.fail("write", at, path=data_path(first_seq), partial=10)
    if codec == "laminar":
        with pytest.raises(WriteFailed):
            append(log, pieces(700))
        assert is_as_before(log, disk, before, open_log)
        return
    with pytest.raises(Latched):
        append(log, pieces(700))
    assert (tree(disk), list(log)) == (before, held)
    with pytest.raises(Latched):
        log.append(b"x")
    assert list(open_log(disk=disk.reboot())) == held


@pytest.mark.parametrize("codec", ["rustlog", "laminar", "narwhal"])  # tide's is written when a segment is sealed
def test_an_index_that_cannot_be_written_takes_the_record_back(
    open_log: Opener, disk: SimDisk, append: Append, index_path: Callable[[int], str], first_seq: int
) -> None:
    """G116, G118, G126."""
    log = open_log(segment_bytes_max=MAX, segment_overflow_bytes=OVERFLOW, index_every=1)
    before = tree(disk)
    disk.fail("write", error=errno.ENOSPC, path=index_path(first_seq), partial=5)
    with pytest.raises(DiskFull):
        append(log, pieces(700))
    assert is_as_before(log, disk, before, partial(open_log, index_every=1))


def test_a_disk_that_is_full_for_ever_latches_nothing_it_can_undo(
    log: SegmentedLog, append: Append, open_log: Opener, disk: SimDisk
) -> None:
    before = tree(disk)
    disk.capacity_bytes = sum(map(len, before.values())) + 300
    for _ in range(2):
        with pytest.raises(DiskFull):
            append(log, pieces(700))
    disk.capacity_bytes = None
    assert is_as_before(log, disk, before, open_log)


@pytest.mark.parametrize("codec", ["tide", "rustlog", "laminar", "narwhal"])
@pytest.mark.parametrize("sync", ["batch", "interval"])
def test_no_restart_finds_part_of_a_stream(open_log: Opener, disk: SimDisk, sync: str, codec: str) -> None:
    """G116, G120. Method: cut the power at every operation of a streamed append; look at many restarts of each."""
    meta = b"its meta" if codec in ("tide", "laminar") else b""
    log = open_log(sync=sync)
    log.append(b"before")
    log.sync()
    record = b"".join(pieces(2_000))
    found: set[tuple[tuple[bytes, bytes], ...]] = set()

    def examine(_: int) -> None:
        for image in disk.images(("none", "all", "torn_last", "prefixes"), limit=8):
            found.add(tuple((item.data, item.meta) for item in open_log(disk=image.disk)))

    disk.on_op = examine
    log.append_stream(pieces(2_000), meta=meta)
    disk.on_op = None
    examine(0)
    assert found == {((b"before", b""),), ((b"before", b""), (record, meta))}


@pytest.mark.parametrize("codec", ["rustlog"])
def test_a_streamed_record_is_held_to_the_limit_of_its_layout(open_log: Opener, disk: SimDisk) -> None:
    log = open_log(segment_bytes_max=64 << 20)
    log.append(b"before")
    before = tree(disk)
    with pytest.raises((StreamBroken, TooLarge)):
        log.append_stream(bytes(1 << 20) for _ in range(11))
    assert tree(disk) == before
    assert log.read(log.append_stream(bytes(1 << 20) for _ in range(10))).data == bytes(10 << 20)
