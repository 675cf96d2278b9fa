"""Publication of staged chunks, decision by decision: what is read, synced, written, removed, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from threading import Event, RLock, Thread
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.engine.harness import PATH, TIMEOUT_S, EngineHarness
from xxhash import xxh3_64_intdigest

from tidelog.clock import Clock
from tidelog.engine import Appended, idempotency, producer_batches
from tidelog.engine.idempotency import (
    SINGLE_BATCH_PREFIX,
    AckedWrite,
    BatchRange,
    IdempotencyWindow,
    find_written_batch,
)
from tidelog.engine.manifest import WriterRow
from tidelog.engine.producer_batches import (
    BatchId,
    PublicationPlan,
    PublishResult,
    StagedChunk,
    StagingArea,
    _Publication,
    _PublicationLocks,
    chunk_name,
    parts_writer,
    publish_batch,
)
from tidelog.errors import BadInput, BatchConflict, Damaged, DiskFull, Error, NotFound, TooLarge, WriteFailed
from tidelog.formats.control_frames import NumberedBatch
from tidelog.testing import SimDisk

OWNER, OTHER = "ab" * 8, "cd" * 8
WEEK_MS = 7 * 86_400_000


def name_of(number: int, owner: str = OWNER, at_ms: int = 1_000) -> str:
    return chunk_name(owner, at_ms, number.to_bytes(8, "big"))


def stream(*datas: bytes) -> bytes:
    table = pa.table({"data": pa.array(datas, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    made: bytes = sink.getvalue().to_pybytes()
    return made


def put(staging: StagingArea, number: int, *datas: bytes, owner: str = OWNER, at_ms: int = 1_000) -> StagedChunk:
    upload = staging.begin(name_of(number, owner, at_ms))
    upload.write([stream(*datas)])
    return upload.finish(len(datas))


def plan_of(*chunks: StagedChunk, writer: str = "etl", number: int = 3) -> PublicationPlan:
    return PublicationPlan("orders", writer, number, (1, 2), "query", chunks)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(trace=True)


@pytest.fixture
def staging(disk: SimDisk) -> StagingArea:
    made = StagingArea(disk, "data")
    made.create()
    return made


# Names and limits -----------------------------------------------------------------------------------------


def test_limits() -> None:
    assert producer_batches.COMMIT_BYTES_MAX == producer_batches.SINGLE_COMMIT_BYTES_MAX == 1 << 30
    assert producer_batches.CHUNK_BYTES_MAX == 1 << 30
    assert producer_batches.BATCH_BYTES_MAX == 128 << 20
    assert producer_batches.PART_BYTES_MAX == 256 << 20
    assert producer_batches.RECORD_OVERHEAD_BYTES == 8
    assert (producer_batches._CHUNK_BITS, producer_batches._CHUNKS_MAX) == (20, (1 << 20) - 1)
    assert producer_batches._NUMBER_MAX == (1 << 43) - 1
    assert (idempotency.IDEMPOTENCY_KEYS_MAX, idempotency.FORGET_KEYS_MAX) == (1 << 18, 64)
    assert (idempotency._NAME_BYTES_MAX, idempotency._QUERY_ID_BYTES_MAX) == (1024, 128)
    assert (idempotency._NUMBER_MAX, idempotency._U64_LIMIT) == ((1 << 63) - 1, 1 << 64)


def test_names_of_chunks_and_parts() -> None:
    assert chunk_name(OWNER, 0xABC, b"\1" * 8) == f"{OWNER}-000000000abc-0101010101010101"
    assert parts_writer("etl").startswith("parts:")
    assert parts_writer("once:x").startswith("once:parts:")
    assert len({parts_writer("etl"), parts_writer("etl2")}) == 2


# The staging area -----------------------------------------------------------------------------------------


def test_an_upload_replaces_what_a_failed_one_left(staging: StagingArea, disk: SimDisk) -> None:
    left = staging.begin(name_of(1))
    left.write([b"left over"])
    chunk = put(staging, 1, b"a")
    assert disk.list_dir(staging.directory) == [name_of(1)]
    assert (chunk.rows, chunk.size) == (1, len(stream(b"a")))
    upload = staging.begin(name_of(2))
    upload.write([b"ab", b"c"])
    upload.write([b"d"])
    assert upload.finish() == StagedChunk(name_of(2), 0, 4, xxh3_64_intdigest(b"abcd"))


def test_a_chunk_may_have_its_maximum_size(staging: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_batches, "CHUNK_BYTES_MAX", 10)
    upload = staging.begin(name_of(1))
    upload.write([b"x" * 4, b"y" * 5])
    with pytest.raises(TooLarge) as caught:
        upload.write([b"z" * 2])
    assert (caught.value.size, caught.value.limit) == (11, 10)
    upload.write([b"z"])
    assert upload.finish().size == 10


def test_chunks_of_an_owner_are_removed_except_those_of_a_plan(staging: StagingArea, disk: SimDisk) -> None:
    assert StagingArea(disk, "elsewhere").remove_chunks(OWNER) == 0
    first, planned = put(staging, 1, b"a"), put(staging, 2, b"b")
    put(staging, 3, b"c", owner=OTHER)
    staging.begin(name_of(4))  # being written
    disk.write_file(f"{staging.directory}/foreign", b"")
    staging.save_plan(OWNER, "key", plan_of(planned))
    staging.save_plan(OTHER, "key", plan_of(first))  # of another owner: it does not keep chunks of this one
    assert staging.remove_chunks(OWNER) == 2
    kept = [name for name in disk.list_dir(staging.directory) if not name.endswith(".plan")]
    assert sorted(kept) == sorted([name_of(2), name_of(3, OTHER), "foreign"])
    assert staging.remove_chunks(OWNER) == 0
    staging.drop_plan(OWNER, "key")
    assert staging.remove_chunks(OWNER) == 1


@pytest.mark.parametrize("owner", ["", "x" * 16, "ab" * 7 + "c", "ab" * 25, "AB" * 8, "../" + "ab" * 8])
def test_an_owner_is_16_to_48_hex_digits(staging: StagingArea, owner: str) -> None:
    with pytest.raises(BadInput):
        staging.remove_chunks(owner)
    assert staging.remove_chunks("ab" * 24) == 0


def test_old_chunks_are_swept_unless_a_plan_needs_them(staging: StagingArea, disk: SimDisk) -> None:
    old, kept, once, new = (put(staging, n, b"a", at_ms=at_ms) for n, at_ms in ((1, 5), (2, 5), (3, 5), (4, 6)))
    staging.save_plan(OWNER, "named", plan_of(kept))
    staging.save_plan(OWNER, "once", plan_of(once, new, writer=f"{SINGLE_BATCH_PREFIX}x"))
    plans = len([name for name in disk.list_dir(staging.directory) if name.endswith(".plan")])
    assert plans == 2
    assert staging.sweep(5 + WEEK_MS) == 0
    assert staging.sweep(6 + WEEK_MS) == 2
    left = disk.list_dir(staging.directory)
    assert (old.name in left, kept.name in left, once.name in left, new.name in left) == (False, True, False, True)
    assert staging.read_plan(OWNER, "once") is not None, "one of its chunks is still there"
    assert staging.sweep(7 + WEEK_MS) == 1
    assert staging.read_plan(OWNER, "once") is None
    assert staging.read_plan(OWNER, "named") == plan_of(kept)
    assert staging.sweep(1 << 50) == 0
    assert sorted(disk.list_dir(staging.directory))[0] == kept.name


def test_a_sweep_without_a_directory_removes_nothing(disk: SimDisk) -> None:
    assert StagingArea(disk, "elsewhere").sweep(1 << 50) == 0
    assert StagingArea(disk, "elsewhere")._plan_paths() == []


# Plans ----------------------------------------------------------------------------------------------------


def test_a_plan_is_durable_with_its_chunks(staging: StagingArea, disk: SimDisk) -> None:
    disk.sync_dir("data")
    disk.sync_dir("")
    chunks = [put(staging, number, b"%d" % number) for number in (1, 2)]
    assert staging.read_plan(OWNER, "key") is None
    staging.save_plan(OWNER, "key", plan_of(*chunks))
    assert disk.open_files() == []
    after = StagingArea(disk.crash_image("none"), "data")
    assert after.read_plan(OWNER, "key") == plan_of(*chunks)
    assert after.read_plan(OWNER, "other key") is None
    assert after.read_plan(OTHER, "key") is None
    read = [batch.column("data").to_pylist() for chunk in chunks for batch in after.read(chunk)]
    assert read == [[b"1"], [b"2"]]
    staging.drop_plan(OWNER, "key")
    staging.drop_plan(OWNER, "key")
    assert staging.read_plan(OWNER, "key") is None


@pytest.mark.parametrize(("number", "kind"), [(28, DiskFull), (5, WriteFailed)])
def test_a_plan_that_cannot_be_written(staging: StagingArea, disk: SimDisk, number: int, kind: type[Error]) -> None:
    chunk = put(staging, 1, b"a")
    disk.fail("write", at=1, error=number)
    with pytest.raises(kind):
        staging.save_plan(OWNER, "key", plan_of(chunk))
    assert disk.open_files() == []
    disk.fail("sync", at=1, error=5)
    with pytest.raises(OSError, match="5"):
        staging.save_plan(OWNER, "key", plan_of(chunk))
    assert disk.open_files() == [], "also where the chunk does not sync"


def test_a_plan_that_cannot_be_read_stops_a_publication(staging: StagingArea, disk: SimDisk) -> None:
    staging.save_plan(OWNER, "key", plan_of(put(staging, 1, b"a")))
    disk.write_file(staging._plan_path(OWNER, "key"), b"{}")
    with pytest.raises(Damaged):
        staging.read_plan(OWNER, "key")


# One at a time --------------------------------------------------------------------------------------------


def test_publications_of_one_key_take_turns_and_leave_nothing() -> None:
    locks, key, other = _PublicationLocks(), ("d", "t", "w"), ("d", "t", "v")
    order: list[str] = []
    held, proceed = Event(), Event()

    def first() -> None:
        with locks.hold(key):
            held.set()
            proceed.wait(TIMEOUT_S)
            order.append("first")

    def second() -> None:
        with locks.hold(key):
            order.append("second")

    threads = [Thread(target=first, daemon=True), Thread(target=second, daemon=True)]
    threads[0].start()
    held.wait(TIMEOUT_S)
    assert locks._locks[key][1] == 1
    threads[1].start()
    while locks._locks[key][1] != 2:
        Event().wait(0.001)
    with locks.hold(other):
        assert order == []
    assert list(locks._locks) == [key]
    proceed.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert order == ["first", "second"]
    assert locks._locks == {}


# Reading chunks -------------------------------------------------------------------------------------------


class Chunks:
    """A staging area whose chunks have the given sizes; 8 bytes of each are the record's."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.read_names = sizes, list[str]()
        self.chunks = [StagedChunk(name_of(number), 1, size, 0) for number, size in enumerate(sizes)]

    def read(self, chunk: StagedChunk) -> Iterator[pa.RecordBatch]:
        self.read_names.append(chunk.name)
        yield pa.RecordBatch.from_pydict(
            {"data": pa.array([b"x" * (chunk.size - 8)] if chunk.size else [], pa.binary())}
        )


@pytest.mark.parametrize(
    ("sizes", "at", "limit", "single", "rows", "stop", "read"),
    [
        ([10, 10, 10], 0, 20, 100, 2, 2, 3),
        ([10, 10, 10], 0, 19, 100, 1, 1, 2),
        ([10, 10, 10], 1, 30, 100, 2, 3, 2),
        ([10, 10, 10], 2, 30, 100, 1, 3, 1),
        ([50, 10], 0, 20, 50, 1, 1, 2),
        ([0, 10, 0], 0, 10, 100, 1, 3, 3),
        ([10, 60], 0, 20, 50, 1, 1, 2),
    ],
)
def test_chunks_are_read_until_a_commit_is_full(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], at: int, limit: int, single: int, rows: int, stop: int, read: int
) -> None:
    monkeypatch.setattr(producer_batches, "SINGLE_COMMIT_BYTES_MAX", single)
    area: Any = Chunks(sizes)
    batch, found = producer_batches._read_chunks(EngineHarness().log.limits, area, area.chunks, at, limit)
    assert (len(batch), found) == (rows, stop)
    assert area.read_names == [chunk.name for chunk in area.chunks[at : at + read]]


def test_a_chunk_that_exceeds_a_commit_and_a_batch_without_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_batches, "SINGLE_COMMIT_BYTES_MAX", 49)
    limits = EngineHarness().log.limits
    area: Any = Chunks([50])
    with pytest.raises(TooLarge) as caught:
        producer_batches._read_chunks(limits, area, area.chunks, 0, 20)
    assert (caught.value.size, caught.value.limit) == (50, 49)
    empty: Any = Chunks([0, 0])
    with pytest.raises(BadInput):
        producer_batches._read_chunks(limits, empty, empty.chunks, 0, 20)


@pytest.mark.parametrize(("datas", "limit", "fits"), [((b"1234", b"5678"), 24, True), ((b"1234", b"5678"), 23, False)])
def test_tables_of_a_batch_are_weighed(
    monkeypatch: pytest.MonkeyPatch, datas: tuple[bytes, ...], limit: int, fits: bool
) -> None:
    monkeypatch.setattr(producer_batches, "COMMIT_BYTES_MAX", limit)
    tables = [pa.table({"data": [data]}) for data in datas] + [pa.table({"data": pa.array([], pa.binary())})]
    limits = EngineHarness().log.limits
    if fits:
        assert len(producer_batches.prepare_tables(limits, tables)) == 2
    else:
        with pytest.raises(TooLarge) as caught:
            producer_batches.prepare_tables(limits, tables)
        assert (caught.value.size, caught.value.limit) == (24, 23)


# Publication ----------------------------------------------------------------------------------------------


class World:
    """An engine, its staging area, and chunks of one record of 992 bytes (1,000 with its overhead), told apart by the
    first four."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, single: int = 1_999, part: int = 1_000) -> None:
        monkeypatch.setattr(producer_batches, "SINGLE_COMMIT_BYTES_MAX", single)
        monkeypatch.setattr(producer_batches, "PART_BYTES_MAX", part)
        self.harness = EngineHarness()
        self.log = self.harness.log
        self.staging = StagingArea(self.harness.disk, PATH)
        self.staging.create()
        self.staged = 0

    def stage(self, *datas: bytes) -> list[StagedChunk]:
        found = []
        for data in datas:
            self.staged += 1
            found.append(put(self.staging, self.staged, data * 248))
        return found

    def publish(
        self, number: int, chunks: list[StagedChunk], *, total: int = 1, query_id: str = "", writer: str = "etl"
    ) -> PublishResult:
        return publish_batch(self.log, self.staging, "orders", BatchId(writer, number, (total, 0), query_id), chunks)

    def data(self) -> list[bytes]:
        topic = self.log.find("orders")
        return [] if topic is None else [data[:4] for data in topic.to_arrow().column("data").to_pylist()]

    def plans(self) -> int:
        return len(self.staging._plan_paths())


def test_a_batch_in_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, single=2_000)
    chunks = world.stage(b"aaaa", b"bbbb")
    assert world.publish(0, chunks) == PublishResult(Appended(1, 2, 2, False), True, 2, 2)
    world.log.topic("orders").append(b"x")
    assert world.publish(0, chunks) == PublishResult(Appended(1, 2, 3, True), False, 2, 0)
    assert world.publish(1, world.stage(b"cccc")) == PublishResult(Appended(4, 4, 4, False), False, 1, 1)
    assert world.plans() == 0
    assert world.log.topic("orders").producer_batches(parts_writer("etl")) == {}


def test_a_batch_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, part=2_000)
    checkpoints: list[int] = []
    checkpoint = type(world.log).checkpoint

    def counted(log: Any) -> Any:
        checkpoints.append(1)
        return checkpoint(log)

    monkeypatch.setattr(type(world.log), "checkpoint", counted)
    datas = [b"%04d" % number for number in range(5)]
    chunks = world.stage(*datas)
    assert world.publish(7, chunks, query_id="q") == PublishResult(Appended(1, 5, 5, False), True, 5, 5)
    assert world.data() == datas
    assert len(checkpoints) == 2, "after each part but the last"
    parts = world.log.topic("orders").producer_batches(parts_writer("etl"))
    assert {key: (part.first, part.last, part.query_id) for key, part in parts.items()} == {
        7 << 20 | 2: (1, 2, ""),
        7 << 20 | 4: (3, 4, ""),
    }
    known = world.log.topic("orders").producer_batches("etl")
    assert known == {7: BatchRange(5, 5, (1, 0), "q")}
    assert world.plans() == 0
    assert world.publish(7, chunks, query_id="q") == PublishResult(Appended(1, 5, 5, True), False, 5, 0)
    assert world.publish(8, world.stage(b"next")) == PublishResult(Appended(6, 6, 6, False), False, 1, 1)


def break_after(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Fail the append after this many parts."""
    append, done = _Publication._append, list[int]()

    def failing(self: Any, *arguments: Any) -> Appended:
        if len(done) == parts:
            raise WriteFailed("the disk is gone")
        done.append(1)
        return append(self, *arguments)

    monkeypatch.setattr(_Publication, "_append", failing)


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_batch_that_broke_off_goes_on_with_its_plan(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    world = World(monkeypatch)
    chunks = world.stage(b"aaaa", b"bbbb", b"cccc")
    with monkeypatch.context() as patched:
        break_after(patched, parts)
        with pytest.raises(WriteFailed) as caught:
            world.publish(3, chunks)
    assert (f"{parts} of 3 chunks of batch 3 were published" in str(caught.value)) is (parts > 0)
    assert world.plans() == 1
    other = world.stage(b"dddd", b"eeee", b"ffff")
    if parts:
        world.log.topic("orders").append(b"between")
    head = 3 + (parts > 0)
    done = world.publish(3, other)
    assert done == PublishResult(Appended(1, head, head, False), not parts, 3, 3 - parts)
    assert [data for data in world.data() if data != b"betw"] == [b"aaaa", b"bbbb", b"cccc"]
    assert world.plans() == 0
    with pytest.raises(BatchConflict):
        world.publish(3, other, total=9)


def test_a_batch_unlike_its_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    chunks = world.stage(b"aaaa", b"bbbb", b"cccc")
    with monkeypatch.context() as patched, suppress(WriteFailed):
        break_after(patched, 1)
        world.publish(3, chunks, query_id="q")
    with pytest.raises(BatchConflict):
        world.publish(3, chunks, total=2)
    with pytest.raises(BatchConflict):
        world.publish(3, chunks, query_id="other")
    assert world.data() == [b"aaaa"]
    assert world.publish(3, chunks, total=2, query_id="q").rows == 3, "the same query repeats its newest batch"


@pytest.mark.parametrize(
    ("number", "rest"), [(3, "is no longer in the staging area"), (4, "was staged, repeat that batch first")]
)
def test_a_batch_that_is_half_published_is_finished_first(
    monkeypatch: pytest.MonkeyPatch, number: int, rest: str
) -> None:
    world = World(monkeypatch)
    with monkeypatch.context() as patched, suppress(WriteFailed):
        break_after(patched, 2)
        world.publish(3, world.stage(b"aaaa", b"bbbb", b"cccc"))
    for path in world.staging._plan_paths() if number == 3 else ():
        world.harness.disk.remove(path)
    with pytest.raises(BatchConflict, match=rest) as caught:
        world.publish(number, world.stage(b"dddd"))
    assert "in seqs 1 to 2" in str(caught.value)
    assert (caught.value.number, caught.value.newest) == (number, 3)
    assert world.data() == [b"aaaa", b"bbbb"]


@pytest.mark.parametrize(
    ("parts", "known", "plan", "number", "result"),
    [
        ({}, [], True, 3, 0),
        ({3 << 20 | 2: 1}, [], True, 3, 2),
        ({3 << 20 | 2: 1, 3 << 20 | 4: 2}, [], True, 3, 4),
        ({3 << 20 | 2: 1}, [], False, 3, None),
        ({3 << 20 | 2: 1}, [3], False, 4, 0),
        ({3 << 20 | 2: 1}, [3], False, 3, 0),
        ({3 << 20 | 2: 1}, [4, 5], True, 6, 0),
        ({3 << 20 | 2: 1}, [3, 5], True, 6, 0),
        ({3 << 20 | 2: 1}, [2], True, 6, None),
        ({3 << 20 | 2: 1}, [], True, 6, None),
        ({3 << 20 | 2: 1}, [4], True, 2, None),
    ],
)
def test_how_many_chunks_are_published(
    parts: dict[int, int], known: list[int], plan: bool, number: int, result: int | None
) -> None:
    """`known`: finished batches of the writer. None: refused."""
    ranges = {key: BatchRange(seq, seq, (0, 0)) for key, seq in parts.items()}
    finished = {"etl": {each: BatchRange(9, 9, (0, 0)) for each in known}}
    producers = SimpleNamespace(batches=finished)
    topic: Any = SimpleNamespace(lock=RLock(), check_open=lambda: None, producers=producers)
    nothing: Any = None
    publication = _Publication(nothing, nothing, "orders", BatchId("etl", number, (1, 0)))
    found = plan_of() if plan else None
    if result is None:
        with pytest.raises(BatchConflict):
            publication._published_chunks(topic, ranges, found)
    else:
        assert publication._published_chunks(topic, ranges, found) == result
    assert publication._published_chunks(None, ranges, found) == 0


def test_the_result_counts_parts_of_this_batch_only() -> None:
    nothing: Any = None
    publication = _Publication(nothing, nothing, "orders", BatchId("etl", 3, (1, 0)))
    parts = {2 << 20 | 1: BatchRange(1, 2, (0, 0)), 3 << 20 | 1: BatchRange(5, 7, (0, 0))}
    assert publication._result(parts, 10, 11, 20, deduped=True) == PublishResult(Appended(5, 11, 20, True), False, 5, 0)
    assert publication._result({}, 10, 10, 20, deduped=False) == PublishResult(Appended(10, 10, 20, False), False, 1, 0)


@pytest.mark.parametrize(
    ("chunks", "number", "single", "kind"),
    [
        (3, (1 << 43) - 1, 20, None),
        (3, 1 << 43, 20, BadInput),
        (4, 1, 20, BadInput),
        (3, 1, 19, TooLarge),
    ],
)
def test_limits_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, chunks: int, number: int, single: int, kind: type[Error] | None
) -> None:
    monkeypatch.setattr(producer_batches, "_CHUNKS_MAX", 3)
    monkeypatch.setattr(producer_batches, "SINGLE_COMMIT_BYTES_MAX", single)
    saved: list[Any] = []
    staging: Any = SimpleNamespace(save_plan=lambda *arguments: saved.append(arguments))
    nothing: Any = None
    publication = _Publication(nothing, staging, "orders", BatchId("etl", number, (1, 0), "q"))
    given = [StagedChunk(name_of(each), 1, 20, 0) for each in range(chunks)]
    if kind is not None:
        with pytest.raises(kind):
            publication._make_plan(OWNER, "key", given)
        assert saved == []
        return
    plan = publication._make_plan(OWNER, "key", given)
    assert plan == PublicationPlan("orders", "etl", number, (1, 0), "q", tuple(given))
    assert saved == [(OWNER, "key", plan)]


def test_a_batch_of_a_chunk_that_is_missing_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    chunks = world.stage(b"aaaa")
    world.staging.remove_chunks(OWNER)
    with pytest.raises(NotFound):
        world.publish(0, chunks)
    assert world.log.find("orders") is None


# A commit of a numbered batch -----------------------------------------------------------------------------


def test_a_numbered_batch_is_pending_until_it_is_written() -> None:
    harness = EngineHarness()
    topic = harness.log.topic("orders", durability="disk")
    state = topic._state
    harness.disk.fail("write", at=1, error=28)
    with pytest.raises(DiskFull):
        topic.append_numbered([pa.table({"data": [b"a"]})], writer="etl", number=0, sum=(1, 0))
    assert (state.producers.pending, state.producers.batches) == ({}, {})
    harness.disk.trace.clear()
    topic.append_numbered([pa.table({"data": [b"a"]})], writer="etl", number=0, sum=(1, 0), query_id="q")
    assert state.producers.pending == {}
    assert state.producers.batches == {"etl": {0: BatchRange(2, 2, (1, 0), "q")}}
    assert harness.crash("none").topic("orders").producer_batches("etl") == {0: BatchRange(2, 2, (1, 0), "q")}, (
        "durable on return, whatever the class"
    )


def test_a_repetition_waits_for_the_first_write_and_not_for_its_error() -> None:
    harness = EngineHarness()
    topic = harness.log.topic("orders")
    waited: list[int] = []

    class Future:
        def __init__(self, error: Error | None) -> None:
            self._error = error

        def wait(self) -> None:
            waited.append(1)
            topic._state.producers.pending.clear()
            if self._error is not None:
                raise self._error

    for error in (None, WriteFailed("refused")):
        pending: Any = Future(error)
        topic._state.producers.pending["etl"] = pending
        done = topic.append_numbered([pa.table({"data": [b"a"]})], writer="etl", number=len(waited), sum=(1, 0))
        assert done.deduped is False
    assert (waited, topic.head_seq) == ([1, 1], 2)


# Numbers --------------------------------------------------------------------------------------------------


KNOWN = {3: BatchRange(1, 2, (1, 0), "q"), 5: BatchRange(3, 4, (2, 0), "q"), 6: BatchRange(5, 6, (3, 0), "q")}
WITHOUT_ID = {number: batch._replace(query_id="") for number, batch in KNOWN.items()}


@pytest.mark.parametrize(
    ("known", "number", "total", "query_id", "result"),
    [
        ({}, 0, 1, "q", None),
        (KNOWN, 7, 9, "q", None),
        (KNOWN, 7, 9, "", None),
        (KNOWN, 7, 9, "other", "comes from the query other"),
        (KNOWN, 6, 3, "other", "comes from the query other"),
        (KNOWN, 6, 9, "q", 6),
        (KNOWN, 6, 3, "", 6),
        (KNOWN, 6, 9, "", "was written before, at seqs 5 to 6"),
        (KNOWN, 5, 2, "q", 5),
        (KNOWN, 5, 9, "q", "was written before, at seqs 3 to 4"),
        (KNOWN, 4, 9, "q", "was not written before, and batch 6 was"),
        (KNOWN, 0, 1, "q", "was not written before, and batch 6 was"),
        (WITHOUT_ID, 6, 3, "q", 6),
        (WITHOUT_ID, 6, 9, "q", "was written before"),
        (WITHOUT_ID, 6, 9, "", "was written before"),
        (WITHOUT_ID, 7, 9, "q", None),
    ],
)
def test_whether_a_batch_was_written(
    known: dict[int, BatchRange], number: int, total: int, query_id: str, result: int | str | None
) -> None:
    numbers = {"etl": known, "other": {99: BatchRange(1, 1, (0, 0), "x")}}
    if isinstance(result, str):
        with pytest.raises(BatchConflict, match=result) as caught:
            find_written_batch(numbers, "orders", "etl", number, (total, 0), query_id)
        assert (caught.value.number, caught.value.newest) == (number, 6)
    else:
        found = find_written_batch(numbers, "orders", "etl", number, (total, 0), query_id)
        assert found == (None if result is None else known[result])
    assert find_written_batch(numbers, "orders", "new", number, (total, 0), query_id) is None


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"writer": "x" * 1024}, True),
        ({"writer": "ä" * 513}, False),
        ({"writer": 7}, False),
        ({"number": (1 << 63) - 1}, True),
        ({"number": 1 << 63}, False),
        ({"number": 1.0}, False),
        ({"number": False}, False),
        ({"total": (0, (1 << 64) - 1)}, True),
        ({"total": ((1 << 64), 0)}, False),
        ({"total": (-1, 0)}, False),
        ({"total": [1, 0]}, False),
        ({"total": (1, 0, 0)}, False),
        ({"total": (True, 0)}, False),
        ({"query_id": "x" * 128}, True),
        ({"query_id": "ä" * 65}, False),
        ({"query_id": 7}, False),
    ],
)
def test_arguments_of_a_numbered_batch(changed: dict[str, Any], fits: bool) -> None:
    arguments: dict[str, Any] = {"writer": "etl", "number": 0, "total": (1, 0), "query_id": "q", **changed}
    if fits:
        idempotency.check_producer_batch({}, **arguments)
    else:
        with pytest.raises(BadInput):
            idempotency.check_producer_batch({}, **arguments)


@pytest.mark.parametrize(("named", "single", "fits"), [(2, 5, True), (3, 0, False), (3, 5, False)])
def test_writers_of_a_single_batch_do_not_count(
    monkeypatch: pytest.MonkeyPatch, named: int, single: int, fits: bool
) -> None:
    monkeypatch.setattr(idempotency, "PRODUCERS_MAX", 3)
    one = {0: BatchRange(1, 1, (0, 0))}
    known = {**{f"w{n}": one for n in range(named)}, **{f"{SINGLE_BATCH_PREFIX}{n}": one for n in range(single)}}
    idempotency.check_producer_batch(known, "w0", 0, (1, 0))
    if fits:
        idempotency.check_producer_batch(known, "new", 0, (1, 0))
    else:
        with pytest.raises(BadInput):
            idempotency.check_producer_batch(known, "new", 0, (1, 0))


def test_a_recorded_batch_keeps_the_query_id_and_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "BATCHES_KEPT", 2)
    monkeypatch.setattr(idempotency, "SINGLE_BATCH_WRITERS_KEPT", 2)
    known: idempotency.ProducerBatches = {}

    def record(writer: str, number: int, query_id: str = "") -> None:
        body = NumberedBatch(writer=writer, number=number, first=number, last=number, sum=(1, 2), query_id=query_id)
        idempotency.record_batch(known, body)

    record("etl", 5, "q")
    record("etl", 4)
    assert known == {"etl": {4: BatchRange(4, 4, (1, 2), "q"), 5: BatchRange(5, 5, (1, 2), "q")}}
    assert list(known["etl"]) == [4, 5]
    record("etl", 6, "r")
    assert {number: each.query_id for number, each in known["etl"].items()} == {5: "q", 6: "r"}
    for job in range(3):
        record(f"{SINGLE_BATCH_PREFIX}{job}", 0)
    record(f"{SINGLE_BATCH_PREFIX}1", 0)
    assert list(known) == ["etl", "once:2", "once:1"]


def test_batches_of_a_manifest_row() -> None:
    numbers = {"etl": KNOWN, "late": {0: BatchRange(4, 5, (7, 8), "z")}}
    encoded = (WriterRow("etl", ((3, 1, 2, 1, 0), (5, 3, 4, 2, 0)), "q"),)
    assert idempotency.encode_producers(numbers, 4) == encoded
    assert len(idempotency.encode_producers(numbers, 5)) == 2
    assert idempotency.decode_producers(encoded) == {"etl": {3: KNOWN[3], 5: KNOWN[5]}}


# Keys -----------------------------------------------------------------------------------------------------


def clock_at(monotonic_ms: int, wall_ms: int) -> Clock:
    made: Any = SimpleNamespace(monotonic_ms=lambda: monotonic_ms, now_us=lambda: wall_ms * 1_000 + 999)
    found: Clock = made
    return found


def test_keys_across_a_restart() -> None:
    window: IdempotencyWindow[object, Appended] = IdempotencyWindow()
    for number, (last, at_ms, persistent) in enumerate(
        [(4, 50, True), (5, 60, True), (6, 60, True), (4, 49, True), (4, 60, False)]
    ):
        window.complete(f"k{number}", Appended(last, last, last), at_ms, persistent=persistent)
    assert [key for key, _ in window.persistent_keys()] == ["k0", "k1", "k2", "k3"]
    rows = idempotency.encode_keys(window.persistent_keys(), 5, clock_at(100, 1_000), 50)
    assert rows == (("k0", 4, 4, 950), ("k1", 5, 5, 960))
    early = idempotency.encode_keys(window.persistent_keys(), 5, clock_at(100, 10), 50)
    assert [row[3] for row in early] == [0, 0], "never before the epoch"
    after: IdempotencyWindow[object, Appended] = IdempotencyWindow()
    idempotency.restore_keys(after, (*rows, ("future", 9, 9, 2_000)), clock_at(7, 1_010))
    assert {key: done.at_ms for key, done in after.persistent_keys()} == {"k0": -53, "k1": -43, "future": 7}
    assert after.lookup("k0", 7, 60) == AckedWrite(Appended(4, 4, 4), -53)
    assert after.lookup("k0", 8, 60) is None


def test_keys_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "IDEMPOTENCY_KEYS_MAX", 3)
    window: IdempotencyWindow[str, int] = IdempotencyWindow()
    for number in range(5):
        window.complete(f"k{number}", number, number)
    assert [key for key, _ in window.persistent_keys()] == ["k2", "k3", "k4"]
    window.begin("new", "future")
    window.complete("k2", 9, 9)
    assert [key for key, _ in window.persistent_keys()] == ["k3", "k4", "k2"]
    assert len(window) == 4
    assert window.forget_expired(13, 10) == 0
    assert window.forget_expired(14, 10) == 1
    assert window.forget_expired(99, 10, 1) == 1
    assert window.forget_expired(99, 10) == 1
    assert window.forget_expired(99, 10) == 0
    window.abort("new")
    window.abort("new")
    assert len(window) == 0
