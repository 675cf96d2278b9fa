"""Topics in an object store: a directory that was copied there is read by ranges of its files, and is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSystem, FileType, LocalFileSystem, S3FileSystem, SubTreeFileSystem, copy_files
from pyarrow.fs import _MockFileSystem as MockFileSystem
from tests.unit.spark.helpers import read, read_micro_batch, stream

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.database import Database
from tidelog.disk import object_store as stores
from tidelog.disk.object_store import ObjectStoreDisk, ObjectStoreFile
from tidelog.errors import BadInput, GapFound, NotFound
from tidelog.spark import backends
from tidelog.spark import options as reading
from tidelog.spark.backends.directory import DirectoryBackend

ADDRESS = "s3://bucket/data"


class Bucket:
    """A store, and how a directory gets there."""

    def __init__(self, made: FileSystem) -> None:
        self.store = made

    def copy(self, path: Path) -> None:
        """As it is now. What went there goes here."""
        if self.store.get_file_info("data").type != FileType.NotFound:
            self.store.delete_dir("data")
        self.store.create_dir("data")
        copy_files(str(path), "data", source_filesystem=LocalFileSystem(), destination_filesystem=self.store)


@pytest.fixture(params=["mock", "local"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    (tmp_path / "bucket").mkdir()
    local = SubTreeFileSystem(str(tmp_path / "bucket"), LocalFileSystem())
    made = Bucket(MockFileSystem() if request.param == "mock" else local)
    monkeypatch.setattr(
        backends,
        "open_object_store",
        lambda address: (ObjectStoreDisk(made.store), "data") if address == ADDRESS else 1 / 0,
    )
    return made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Database]:
    with tidelog.open(str(tmp_path / "data"), threads=False, segment_events_max=100) as made:
        topic = made.topic("orders", durability="memory")
        for part in range(25):
            if part == 22:
                made.checkpoint()
            topic.append([b"%d" % number * 30 for number in range(part * 20, part * 20 + 20)], tag=f"t{part}")
        topic.delete(seqs=[3, 150, 420])
        yield made


def options(**more: Any) -> dict[str, str]:
    return {"path": ADDRESS, "subscribe": "orders", **{name: str(value) for name, value in more.items()}}


@pytest.mark.usefixtures("engine")
def test_a_copy_reads_as_the_directory_does(bucket: Bucket, tmp_path: Path) -> None:
    bucket.copy(tmp_path / "data")
    env = read({"path": str(tmp_path / "data"), "subscribe": "orders", "minPartitions": "4"})
    there = read(options(minPartitions=4))
    assert there.table.equals(env.table)
    assert len(there.seqs) == 497
    assert len(there.tasks) == 4
    assert any(stretch.file is not None for split in there.tasks for stretch in split.ranges)
    assert read(options(where="seq >= 101 and seq <= 120", verify="false")).seqs == list(range(101, 121))


def test_executors_fetch_ranges_and_no_whole_file(
    bucket: Bucket, engine: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.checkpoint()
    bucket.copy(tmp_path / "data")
    fetched: list[tuple[str, int]] = []
    real = ObjectStoreFile.read

    def noted(self: ObjectStoreFile, pos: int, size: int) -> bytes:
        fetched.append((self.path.rpartition(".")[2], size))
        return real(self, pos, size)

    monkeypatch.setattr(ObjectStoreFile, "read", noted)
    assert read(options(startingOffsets='{"orders": 201}', endingOffsets='{"orders": 203}')).seqs == [201, 202]
    datas = [size for kind, size in fetched if kind == "data"]
    (whole,) = {info.size for info in bucket.store.get_file_info(["data/topics/00000001/seg-0000000000000201.data"])}
    assert 0 < sum(datas) < whole / 3, (datas, whole)


def test_a_stream_goes_on_with_a_newer_copy(bucket: Bucket, engine: Database, tmp_path: Path) -> None:
    bucket.copy(tmp_path / "data")
    reader = stream(options(startingOffsets="earliest"))
    first = reader.latestOffset(reader.initialOffset())
    assert read_micro_batch(reader, reader.initialOffset(), first).num_rows == 497
    engine.topic("orders").append([b"new"] * 7)
    bucket.copy(tmp_path / "data")
    then = reader.latestOffset(first)
    assert read_micro_batch(reader, first, then).column("data").to_pylist() == [b"new"] * 7
    reader.stop()


def test_what_went_while_a_query_ran_is_looked_for_again(bucket: Bucket, engine: Database, tmp_path: Path) -> None:
    bucket.copy(tmp_path / "data")
    reader = stream(options(startingOffsets="earliest"))
    start = reader.initialOffset()
    splits = list(reader.partitions(start, reader.latestOffset(start)))
    topic = engine.topic("orders")
    topic.delete(before_seq=201)
    for _ in range(3):
        topic.append(b"x")
        engine.checkpoint()
    bucket.copy(tmp_path / "data")
    rows = sum(batch.num_rows for split in splits for batch in reader.read(split))
    assert rows == 500 - 200 - 1, "deleted since, which is no loss"
    engine.topic("orders", cap_records=50)
    for _ in range(3):
        topic.append(b"x")
        engine.checkpoint()
    bucket.copy(tmp_path / "data")
    with pytest.raises(GapFound):
        [batch for split in splits for batch in reader.read(split)]
    reader.stop()


def test_logs_of_the_library_are_read_there_too(bucket: Bucket, tmp_path: Path) -> None:
    with SegmentedLog.open(str(tmp_path / "log"), "laminar") as log:
        for number in range(10):
            log.append(b"%d" % number)
    bucket.copy(tmp_path / "log")
    found = read({"path": ADDRESS, "codec": "laminar"})
    assert found.table.column("data").to_pylist() == [b"%d" % number for number in range(10)]


def test_a_group_is_read_and_not_moved(bucket: Bucket, engine: Database, tmp_path: Path) -> None:
    engine.topic("orders").group("etl").commit(490)
    bucket.copy(tmp_path / "data")
    assert read(options(startingOffsets="group:etl")).seqs == list(range(491, 501))
    reader = stream(options(group="etl"))
    for call in (reader.initialOffset, lambda: reader.commit({"orders": {"epoch": 1, "seq": 5}})):
        with pytest.raises(BadInput, match="object store, which is only read"):
            call()
    reader.stop()


@pytest.mark.usefixtures("bucket")
def test_nothing_there_and_nothing_known() -> None:
    with pytest.raises(NotFound, match="there is no data at data"):
        read(options())
    for address in ("nowhere://bucket/data", "s3:/x", "https://example.org/data"):
        with pytest.raises(BadInput, match="names no store that can be read here"):
            stores.open_object_store(address)


def test_addresses_name_stores() -> None:
    def is_store(path: str) -> bool:
        backend = backends.open_backend(reading.parse_options({"path": path, "subscribe": "orders"}))
        assert isinstance(backend, DirectoryBackend)
        return backend._is_object_store

    assert not is_store("file:///data")
    assert not is_store("data")
    assert is_store("s3://bucket/some/where?region=us-east-1")
    disk, path = stores.open_object_store("s3://bucket/some/where?region=us-east-1")
    assert isinstance(disk._store, S3FileSystem)
    assert path == "bucket/some/where"


def test_a_store_is_only_read(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "file").write_bytes(b"12345")
    bucket.copy(tmp_path / "some")
    disk = ObjectStoreDisk(bucket.store)
    file = disk.open("data/file")
    assert (file.size(), file.read(1, 2), file.read(4, 9), file.read(9, 1)) == (5, b"23", b"5", b"")
    assert (bytes(file.map()), disk.list_dir("data"), disk.stat("data/none")) == (b"12345", ["file"], None)
    found = disk.stat("data")
    assert found is not None
    assert found.is_dir
    calls: tuple[Callable[[], object], ...] = (
        lambda: disk.open("data/new", "create"),
        lambda: disk.open("data/file", "write"),
        lambda: disk.make_dir("data/x"),
        lambda: disk.remove("data/file"),
        lambda: disk.remove_dir("data"),
        lambda: disk.rename("data/file", "data/other"),
        lambda: disk.sync_dir("data"),
        lambda: disk.lock("data/lock"),
        lambda: file.write(0, b"x"),
        lambda: file.writev(0, [b"x"]),
        lambda: file.truncate(0),
        lambda: file.allocate(9),
        file.sync,
    )
    for call in calls:
        with pytest.raises(OSError, match="only read here"):
            call()
    with pytest.raises(FileNotFoundError):
        disk.list_dir("nowhere")
    with pytest.raises(FileNotFoundError):
        disk.open("data/none")
