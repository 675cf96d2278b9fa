"""Large records of topics: streams, roll-backs, files, readers, copies, damage."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from errno import ENOSPC
from itertools import count
from random import Random
from signal import SIGINT, raise_signal
from typing import Any

import pytest
from tests.unit.engine.harness import PATH, EngineHarness
from xxhash import xxh3_64_hexdigest

from tidelog.engine import Engine, Topic, checkpoint, large_append
from tidelog.engine.check import check_directory
from tidelog.engine.json_pages import BulkScan
from tidelog.engine.large_append import StreamedAppend
from tidelog.engine.large_read import LargeData
from tidelog.engine.topic import topic_operations
from tidelog.errors import (
    BadInput,
    Closed,
    Corrupt,
    DiskFull,
    Error,
    RecordNotFound,
    StreamBroken,
    Throttled,
    TooLarge,
    TopicFull,
    WriteFailed,
)
from tidelog.formats.json_rows import FieldSelection
from tidelog.testing import ManualClock

Patch = pytest.MonkeyPatch
DATA = Random(3).randbytes(5000)
CLASSES = ("memory", "disk", "fsync")


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(large_append, "LARGE_RECORD_BYTES", 100)
    monkeypatch.setattr(large_append, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(large_append, "_WRITE_BYTES", 512)


@pytest.fixture
def world() -> EngineHarness:
    return EngineHarness(ledger_records=0)


def pieces(data: bytes = DATA, size: int = 333) -> list[bytes]:
    return [data[pos : pos + size] for pos in range(0, len(data), size)]


def topic_of(log: Engine, name: str = "t", **config: Any) -> Topic:
    return log.topic(name, **{"durability": "fsync", "max_record_bytes": 10_000, **config})


def files(world: EngineHarness) -> list[str]:
    return [path.rpartition("/")[2] for path in world.disk.tree() if "/blobs/" in path]


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("restart", ["reopen", "kill"])
def test_a_stream_is_a_record_like_any_other(world: EngineHarness, durability: str, restart: Any) -> None:
    topic = topic_of(world.log, durability=durability)
    topic.append("before")
    done = topic.append_stream(iter(pieces()), tag="a:1", node="n", meta={"k": 1}, key="x")
    assert (done.first_seq, done.count) == (2, 1)
    assert topic.append_stream(pieces(), key="x").deduped
    topic.append("after")
    world.log.checkpoint()
    topic.append_stream(pieces(DATA[:200]))
    for again in (False, True):
        topic = (world.restart(restart) if again else world.log).topic("t")
        first, large, last, other = topic.read(bytes_max=1 << 20).records
        assert (first.data, last.data) == ("before", "after")
        assert (large.tag, large.node, large.meta) == ("a:1", "n", {"k": 1})
        assert isinstance(large.data, LargeData)
        assert (large.data.size, large.data.xxh3) == (len(DATA), xxh3_64_hexdigest(DATA))
        assert large.data.read() == DATA
        assert other.data.read() == DATA[:200]
        assert topic.bytes == len('"before"') + len(DATA) + len('{"k":1}') + len('"after"') + 200
        assert topic.append_stream(pieces(), key="x").deduped
    assert not [finding for finding in check_directory(PATH, disk=world.disk) if finding.damage]
    assert len(files(world)) == 2


def test_a_short_stream_is_an_ordinary_record(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    topic.append_stream([])
    topic.append_stream([DATA[:60], DATA[60:100]])
    topic.append_stream([DATA[:60], DATA[60:101]])
    empty, short, large = topic.read().records
    assert (empty.data, short.data) == (b"", DATA[:100])
    assert large.data.read() == DATA[:101]
    assert len(files(world)) == 1


def test_a_stream_that_breaks_at_any_chunk_leaves_nothing(world: EngineHarness) -> None:
    topic = topic_of(world.log)

    def broken(after: int) -> Iterator[bytes]:
        yield from pieces()[:after]
        raise ConnectionResetError

    for after in range(len(pieces()) + 1):
        with pytest.raises(StreamBroken, match="nothing was written"):
            topic.append_stream(broken(after))
        assert (topic.head_seq, topic.bytes, files(world), world.log._context.quota.used) == (0, 0, [], 0)
        with pytest.raises(BadInput, match="bytes"):
            topic.append_stream([*pieces()[:after], "text"])  # type: ignore[list-item]
        assert files(world) == []
    assert topic.append("next").first_seq == 1
    assert world.disk.open_files() == [path for path in world.disk.open_files() if "/blobs/" not in path]


def check_ceiling(log: Engine, size: int) -> None:
    topic = topic_of(log, f"c{size}", max_record_bytes=size)
    for chunk in (1, 300, size + 1):
        with pytest.raises(TooLarge) as refused:
            topic.append_stream(pieces(DATA[: size + 1], chunk))
        assert refused.value.limit == size
    assert topic.head_seq == 0
    topic.append_stream(pieces(DATA[:size]))
    with topic.open_record(1) as reader:
        assert reader.read() == DATA[:size]


@pytest.mark.parametrize("size", [5, 100, 101, 1024, 4999])
def test_the_ceiling_is_exact(world: EngineHarness, size: int) -> None:
    check_ceiling(world.log, size)
    assert len(files(world)) == (size > 100)


def test_a_ceiling_off_by_one_would_be_found(world: EngineHarness, monkeypatch: Patch) -> None:
    real = StreamedAppend._check_length
    monkeypatch.setattr(StreamedAppend, "_check_length", lambda self, length: real(self, length - 1))
    with pytest.raises(pytest.fail.Exception):
        check_ceiling(world.log, 1024)


def test_bad_input_is_refused_before_the_stream_is_read(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    for bad in (b"bytes", "text", 7, None):
        with pytest.raises(BadInput):
            topic.append_stream(bad)  # type: ignore[arg-type]
    for fields in ({"tag": ["a"]}, {"meta": 5}, {"node": 5}, {"key": ""}, {"tag": "x" * 300}):
        with pytest.raises(BadInput):
            topic.append_stream(iter(pieces()), **fields)
    for size in (0, -1, 1 << 32, True, 1.5):
        with pytest.raises(BadInput):
            world.log.topic("u", max_record_bytes=size)
    with pytest.raises(TooLarge):
        topic_operations(topic).begin_stream(length=10_001)
    stream = topic_operations(topic).begin_stream()
    stream.write(DATA)
    stream.roll_back()
    with pytest.raises(BadInput, match="rolled back"):
        stream.write(DATA)
    with pytest.raises(BadInput, match="rolled back"):
        stream.submit()
    assert files(world) == []


def test_an_ephemeral_topic_takes_what_fits_memory() -> None:
    world = EngineHarness(record_bytes_max=1000, ledger_records=0)
    topic = topic_of(world.log, durability="ephemeral")
    topic.append_stream(pieces(DATA[:1000]))
    assert topic.read().records[0].data == DATA[:1000]
    with pytest.raises(TooLarge, match="ephemeral"):
        topic.append_stream(pieces(DATA[:1001]))
    assert files(world) == []


def test_caps_and_quotas_count_blobs() -> None:
    world = EngineHarness(total_bytes_max=16_000, ledger_records=0)
    topic = topic_of(world.log, cap_bytes=11_000)
    for _ in range(3):
        topic.append_stream(pieces())
    assert ([record.seq for record in topic.read(1).records], topic.bytes) == ([2, 3], 10_000)
    full = topic_of(world.log, "full", cap_bytes=4_000, discard="reject")
    for refused in (TooLarge, TooLarge):
        with pytest.raises(refused):
            full.append_stream(pieces())
    other = topic_of(world.log, "other")
    other.append_stream(pieces())
    with pytest.raises(Throttled):
        other.append_stream(pieces())
    with pytest.raises(Throttled):
        topic_operations(other).begin_stream(length=5000)
    reject = topic_of(world.log, "reject", cap_records=1, discard="reject")
    reject.append("x")
    with pytest.raises(TopicFull):
        reject.append_stream(pieces(DATA[:200]))
    assert len(files(world)) == 4  # the checkpoint that removes the evicted one has not run


@pytest.mark.parametrize(
    ("call", "error"),
    [("write", ENOSPC), ("write", 5), ("sync", 5), ("rename", 5), ("sync_dir", 5), ("create", ENOSPC)],
)
def test_a_disk_error_rolls_the_stream_back(call: Any, error: int) -> None:
    seen = set()
    for at in range(1, 12):
        world = EngineHarness(ledger_records=0)
        topic = topic_of(world.log)
        topic.append_stream(pieces())
        if call == "sync":
            world.disk.fail_sync("dropped", at=at)
        else:
            world.disk.fail(call, at=at, error=error)
        try:
            topic.append_stream(pieces(DATA[::-1]))
        except Error as raised:
            seen.add(type(raised))
            readable = topic.read().records
            assert [record.data.read() for record in readable] == [DATA]
            if isinstance(raised, DiskFull | WriteFailed) and "large record" in str(raised):
                assert len(files(world)) == 1
                assert topic.append("goes on").first_seq == 2
        again = world.open(world.disk.reboot()).topic("t")
        large = [record.data for record in again.read().records if isinstance(record.data, LargeData)]
        assert large[0].read() == DATA
    assert seen


async def arrive(data: list[bytes], *, stop: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for piece in data:
        await asyncio.sleep(0)
        yield piece
    if stop is not None:
        stop.set()
        await asyncio.Event().wait()


def test_an_async_stream_is_awaited_and_can_be_cancelled(world: EngineHarness) -> None:
    topic = topic_of(world.log)

    async def run() -> None:
        assert (await topic.append_stream(arrive(pieces()))).first_seq == 1
        assert len(files(world)) == 1
        sent = asyncio.Event()
        task = asyncio.ensure_future(topic.append_stream(arrive(pieces(), stop=sent)))
        await sent.wait()
        assert len(files(world)) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(files(world)) == 1

    asyncio.run(run())
    assert topic.head_seq == 1


# ── removing ──────────────────────────────────────────────────────────────────────────────────────


def check_removal(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    topic.append_stream(pieces())
    topic.append("x")
    world.log.checkpoint()
    topic.delete(seqs=[1])
    assert len(files(world)) == 1
    world.log.checkpoint()
    assert len(files(world)) == 1, "the manifest before the newest one names it"
    topic.append("y")
    world.log.checkpoint()
    assert files(world) == []


def test_a_blob_goes_when_no_manifest_names_it(world: EngineHarness) -> None:
    check_removal(world)


def test_a_blob_that_goes_too_early_would_be_found(world: EngineHarness, monkeypatch: Patch) -> None:
    real = checkpoint._remove_unneeded

    def remove(context: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        state.files_to_remove, state.files_to_remove_next = [*state.files_to_remove, *state.files_to_remove_next], []
        real(context, state, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "_remove_unneeded", remove)
    with pytest.raises(AssertionError, match="names it"):
        check_removal(world)


def test_a_reader_reads_a_removed_record_to_its_end(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    topic.append_stream(pieces())
    large = topic.read().records[0].data
    with topic.open_record(1) as reader:
        assert reader.read(10) == DATA[:10]
        topic.delete(before_seq=2)
        for _ in range(3):
            topic.append("x")
            world.log.checkpoint()
        assert files(world) == []
        assert reader.read() == DATA[10:]
    for gone in (lambda: topic.open_record(1), large.open):
        with pytest.raises(RecordNotFound):
            gone()


@pytest.mark.parametrize("how", ["cap", "ttl", "drop"])
def test_caps_age_and_drops_remove_blobs(world: EngineHarness, how: str) -> None:
    topic = topic_of(world.log, cap_records=1 if how == "cap" else 0, ttl_ms=1000 if how == "ttl" else 0)
    topic.append_stream(pieces())
    world.log.checkpoint()
    if how == "drop":
        world.log.drop("t")
        world.log.tick()
        assert not [path for path in world.disk.tree() if "/topics/" in path]
        return
    world.clock.tick(5000)
    for _ in range(4):
        topic.append("x")
        world.log.checkpoint()
    assert files(world) == []


def test_an_older_version_refuses_the_directory(world: EngineHarness) -> None:
    topic = topic_of(world.log)

    def versions() -> set[int]:
        manifests = [content for path, content in world.disk.tree().items() if "/meta/" in path]
        return {int.from_bytes(content[4:8], "little") for content in manifests}

    topic.append("small")
    assert versions() == set(), "a directory without a manifest opens in any version"
    stream = topic_operations(topic).begin_stream()
    stream.write(DATA)
    assert versions() == {102}, "before the first frame that it would not know"
    stream.roll_back()


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def test_a_reader_is_a_binary_file(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    topic.append_stream(pieces())
    topic.append({"a": 1})
    topic.append(b"raw")
    reader = topic.open_record(1)
    assert (len(reader), reader.xxh3, reader.readable(), reader.seekable()) == (
        len(DATA),
        xxh3_64_hexdigest(DATA),
        True,
        True,
    )
    assert not reader.writable()
    random = Random(1)
    for _ in range(50):
        at, size = random.randrange(len(DATA) + 50), random.randrange(3000)
        assert reader.seek(at) == at == reader.tell()
        assert reader.read(size) == DATA[at : at + size]
    assert reader.seek(-5, io.SEEK_END) == len(DATA) - 5
    assert reader.seek(2, io.SEEK_CUR) == len(DATA) - 3
    assert reader.read() == DATA[-3:]
    assert reader.read(1) == b""
    reader.seek(0)
    target = bytearray(1500)
    assert reader.readinto(target) == 1500
    assert target == DATA[:1500]
    for bad in ((-1, 0), (0, 9)):
        with pytest.raises(BadInput):
            reader.seek(*bad)
    assert io.BufferedReader(reader).read() == DATA[1500:]
    reader.close()
    with pytest.raises(Closed):
        reader.read(1)
    assert topic.open_record(2).read() == b'{"a":1}'
    assert topic.open_record(3).read() == b"raw"
    for missing in (0, 4, 1 << 40):
        with pytest.raises((RecordNotFound, BadInput)):
            topic.open_record(missing)


def test_every_reader_shows_the_reference(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    topic.append_stream(pieces(), tag="t", meta={"k": 1})
    topic.append({"a": 1})
    reference = b'{"$large":{"bytes":5000,"xxh3":"%b","href":"records/1/data"}}' % xxh3_64_hexdigest(DATA).encode()
    for _ in range(2):
        table = topic.to_arrow()
        assert table["data"].to_pylist() == [reference, b'{"a":1}']
        assert table["json"].to_pylist() == [True, True]
        page = topic_operations(topic).read_json(0, 10, 1 << 20, show=FieldSelection())
        assert reference in page.text
        lines = b"".join(BulkScan(topic._state, 0, None, frozenset(), 10).iter_json_lines(FieldSelection()))
        assert lines.count(b"\n") == 2
        assert reference in lines
        assert [blob.seq for blob in topic_operations(topic).blob_files()] == [1]
        assert topic.read().records[0].data.to_reference()["$large"]["bytes"] == 5000
        world.log.checkpoint()
        topic.seal()
        world.log.checkpoint()
    with world.reader() as reading:
        assert reading.topic("t", create=False).read().records[0].data.read() == DATA


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sealed", [False, True])
def test_a_damaged_or_lost_blob_is_damage_and_its_neighbours_are_served(world: EngineHarness, sealed: bool) -> None:
    topic = topic_of(world.log)
    for number in range(3):
        topic.append_stream(pieces(DATA[number:]))
    if sealed:
        world.log.checkpoint()
    path = topic_operations(topic).blob_files()[1].path
    good = world.disk.read_file(path)
    for at in (0, 4, 9, 16, 16 + 1500, len(good) - 9, len(good) - 1):
        world.disk.flip_bit(path, at, 0)
        with pytest.raises(Corrupt, match="blob-") as found:
            topic.open_record(2).read()
        assert found.value.seq == 2
        if at == 16 + 1500:
            assert topic.open_record(2).read(1024) == DATA[1 : 1 + 1024]
            assert found.value.pos == 16 + 1024
        assert topic.open_record(1).read() == DATA
        assert topic.open_record(3).read() == DATA[2:]
        damage = [each for each in check_directory(PATH, disk=world.disk.reboot()) if each.damage]
        assert [(each.kind, each.seqs) for each in damage] == [("blob", range(2, 3))]
        world.disk.flip_bit(path, at, 0)
    assert world.log.corruption()
    world.disk.remove(path)
    with pytest.raises(Corrupt, match="missing"):
        topic.open_record(2)
    log = world.open(world.disk.reboot())
    assert any("record 2" in line for line in log.report.damage)
    assert not log.report.lost
    assert log.topic("t").open_record(3).read() == DATA[2:]
    assert [each for each in check_directory(PATH, disk=world.disk.reboot()) if each.damage]


# ── copies ────────────────────────────────────────────────────────────────────────────────────────


def test_a_router_copies_the_blob(world: EngineHarness) -> None:
    source = topic_of(world.log)
    world.log.router("r", "t", "u")
    world.log.router("r2", "t", "u", preserve_tag=False, guarantee="exactly_once")
    source.append("x")
    source.append_stream(pieces(), tag="big", node="n", meta={"k": 1})
    source.append("y")
    large: list[Any] = []
    for restart in (None, "kill", "reopen"):
        log = world.log if restart is None else world.restart(restart)
        log.tick()
        copies = log.topic("u").read(bytes_max=1 << 20).records
        assert len(copies) == 6
        large = [record for record in copies if isinstance(record.data, LargeData)]
        assert [record.tag for record in large] == ["big", None]
        assert [record.data.read() for record in large] == [DATA, DATA]
        assert large[0].meta == {"k": 1}
    assert len(files(world)) == 3
    world.log.topic("t").delete(seqs=[2])
    world.log.topic("u").delete(seqs=[large[0].seq])
    for _ in range(3):
        world.log.topic("u").append("z")
        world.log.checkpoint()
    assert len(files(world)) == 1


def test_a_router_to_an_ephemeral_topic_loses_large_records_openly(world: EngineHarness) -> None:
    source = topic_of(world.log)
    world.log.topic("u", durability="ephemeral")
    world.log.router("r", "t", "u")
    source.append("x")
    source.append_stream(pieces())
    source.append("y")
    world.log.tick()
    first = world.log.topic("u").read()
    assert [record.data for record in first.records] == ["x"]
    second = world.log.topic("u").read(first.next_from_seq)
    assert second.gap is not None
    assert second.gap.reason == "source_trim"
    assert [record.data for record in second.records] == ["y"]


def test_jobs_may_be_large_and_move_to_the_dead_letters_and_back(world: EngineHarness) -> None:
    queue = world.log.queue("q", durability="fsync", max_record_bytes=10_000, max_deliveries=1, dead_letter="dead")
    topic = world.log.topic("q")
    topic.append({"n": 1})
    topic.append_stream(pieces(), tag="big", meta={"k": 1})
    jobs = queue.claim("w", 10)
    assert [getattr(job.data, "size", None) for job in jobs] == [None, len(DATA)]
    assert jobs[1].data.read() == DATA
    world.clock.tick(100_000)
    assert queue.claim("w", 10) == []
    dead = world.log.topic("dead")
    moved = [record for record in dead.read().records if isinstance(record.data, LargeData)]
    assert [record.data.read() for record in moved] == [DATA]
    assert moved[0].meta is not None
    assert moved[0].meta["k"] == 1
    assert dead.redrive().count == 2
    back = queue.claim("w", 10)
    assert [job.data.read() for job in back if isinstance(job.data, LargeData)] == [DATA]
    assert back[1].meta == {"k": 1}
    for _ in range(3):
        dead.append("x")
        world.log.checkpoint()
    assert len(files(world)) == 1


def test_an_interrupt_at_any_call_leaves_no_record_without_its_data() -> None:
    """A KeyboardInterrupt at any call of the disk: the record is whole, or not there."""
    for at in range(1, 30):
        world = EngineHarness(ledger_records=0)
        topic = topic_of(world.log)
        topic.append("x")
        calls, done = count(1), False

        def interrupt(_: int, at: int = at, calls: Iterator[int] = calls) -> None:
            if next(calls) == at:
                raise_signal(SIGINT)

        world.disk.on_op = interrupt
        with suppress(KeyboardInterrupt):
            topic.append_stream(pieces())
            done = True
        world.disk.on_op = None
        for log in (world.log, world.open(world.disk.reboot())):
            found = [record.data.read() for record in log.topic("t").read(1).records]
            assert found == [DATA] or not (found or done)
            assert not log.report.damage


def test_the_id_of_a_blob_is_not_used_again_when_the_clock_is_set_back(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    topic.append_stream(pieces())
    used = files(world)
    topic.delete(seqs=[1])
    for _ in range(3):
        topic.append("x")
        world.log.checkpoint()
    assert files(world) == []
    world.log.close()
    world.clock = ManualClock(world.clock.now_us() - 3_600_000_000)
    world.log = world.open(world.disk)
    world.log.topic("t").append_stream(pieces())
    assert files(world) > used


def test_an_erasure_removes_the_blob_and_names_it() -> None:
    world = EngineHarness()
    topic = topic_of(world.log)
    topic.append_stream(pieces(), tag="gone")
    topic.append_stream(pieces(DATA[::-1]), tag="kept")
    world.log.checkpoint()
    gone, kept = files(world)
    receipt = topic.erase(match="gone")
    assert files(world) == [kept]
    removed = [file for file in receipt.files if file.path.endswith(gone)]
    assert [(file.action, file.bytes) for file in removed] == [("removed", 16 + len(DATA) + 8 * 5)]
    assert not any(DATA[:64] in content for content in world.disk.tree().values())
    assert topic.open_record(2).read() == DATA[::-1]


def test_a_rewrite_keeps_large_records(world: EngineHarness) -> None:
    topic = topic_of(world.log)
    for number in range(4):
        topic.append_stream(pieces(DATA[number:]))
        topic.append(b"x" * 50)
    topic.seal()
    world.log.checkpoint()
    topic.delete(seqs=[1, 2, 5])
    world.log.checkpoint()
    topic.rewrite(force=True)
    for again in (False, True):
        topic = (world.restart("reopen") if again else world.log).topic("t")
        large = [record for record in topic.read().records if isinstance(record.data, LargeData)]
        assert [(record.seq, record.data.read()) for record in large] == [(3, DATA[1:]), (7, DATA[3:])]
        assert topic.bytes == 3 * 50 + len(DATA) - 1 + len(DATA) - 3
        world.log.checkpoint()
    for _ in range(2):
        topic.append("x")
        world.log.checkpoint()
    assert len(files(world)) == 2
    assert not [finding for finding in check_directory(PATH, disk=world.disk) if finding.damage]
