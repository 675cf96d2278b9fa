"""Chunks on their way into a numbered batch: whole or not there, and no trace of what broke off."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tidelog.engine import producer_batches
from tidelog.engine.producer_batches import StagedChunk, StagingArea, chunk_name
from tidelog.errors import BadInput, DiskFull, NotFound, TooLarge, WriteFailed
from tidelog.testing import SimDisk

NAME = chunk_name("ab" * 8, 1000, b"\1" * 8)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def staged(disk: SimDisk) -> StagingArea:
    made = StagingArea(disk, "data")
    made.create()
    return made


def stream(**columns: pa.Array) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    made: bytes = sink.getvalue().to_pybytes()
    return made


def put(staged: StagingArea, content: bytes, rows: int) -> StagedChunk:
    upload = staged.begin(NAME)
    upload.write([content[:7], content[7:]])
    return upload.finish(rows)


def test_a_chunk_is_there_when_it_is_finished(staged: StagingArea, disk: SimDisk) -> None:
    assert staged.exists
    assert not StagingArea(disk, "elsewhere").exists
    upload = staged.begin(NAME)
    upload.write([b"x"])
    assert disk.list_dir(staged.directory) == [f"{NAME}.part"]
    upload.abandon()
    assert disk.list_dir(staged.directory) == []
    chunk = put(staged, stream(data=pa.array([b"a", b"b"])), 2)
    assert disk.list_dir(staged.directory) == [NAME]
    assert [batch.column("data").to_pylist() for batch in staged.read(chunk)] == [[b"a", b"b"]]
    assert (staged.remove_chunks("cd" * 8), staged.remove_chunks("ab" * 8)) == (0, 1)
    with pytest.raises(NotFound, match="or it was removed"):
        list(staged.read(chunk))


@pytest.mark.parametrize(("number", "kind"), [(28, DiskFull), (5, WriteFailed)])
def test_a_disk_that_refuses(staged: StagingArea, disk: SimDisk, number: int, kind: type[Exception]) -> None:
    upload = staged.begin(NAME)
    disk.fail("write", at=1, error=number)
    with pytest.raises(kind, match="nothing was published"):
        upload.write([b"x"])
    upload.abandon()
    assert disk.list_dir(staged.directory) == []


def test_every_way_out_closes_the_file(staged: StagingArea, disk: SimDisk) -> None:
    """A removed file that is still open keeps its bytes on the disk."""
    upload = staged.begin(NAME)
    upload.abandon()
    assert disk.open_files() == []
    chunk = put(staged, stream(data=pa.array([b"a"])), 1)
    assert disk.open_files() == []
    whole, damaged = staged.read(chunk), staged.read(chunk._replace(sum=0))
    list(whole)
    with pytest.raises(BadInput):
        list(damaged)
    assert disk.open_files() == []


def test_an_unpublished_chunk_is_removed_after_a_week(staged: StagingArea, disk: SimDisk) -> None:
    """As docs/http.md says."""
    put(staged, stream(data=pa.array([b"a"])), 1)
    week_ms = 7 * 24 * 3600 * 1000
    assert staged.sweep(1000 + week_ms) == 0
    assert staged.sweep(1000 + week_ms + 1) == 1
    assert disk.list_dir(staged.directory) == []


FINE = stream(data=pa.array([b"a"]))


@pytest.mark.parametrize(
    ("content", "change", "words"),
    [
        (FINE, {"size": 1}, "not what its writer wrote"),
        (FINE, {"sum": 1}, "not what its writer wrote"),
        (FINE, {"rows": 2}, "has 1 rows, its writer reported 2"),
        (b"no arrow at all", {}, "not an Arrow IPC stream"),
        (b"", {}, "not an Arrow IPC stream"),
        (stream(data=pa.array([b"a"]), price=pa.array([1])), {}, "no column 'price'"),
        (stream(data=pa.array([b"a"]).dictionary_encode()), {}, "'data' is dictionary"),
    ],
)
def test_a_chunk_unlike_its_report_is_refused(
    staged: StagingArea, content: bytes, change: dict[str, Any], words: str
) -> None:
    chunk = put(staged, content, 1)._replace(**change)
    with pytest.raises(BadInput, match=words):
        list(staged.read(chunk))


@pytest.mark.parametrize("name", ["", "x", "../x", f"{NAME}.part", NAME.upper(), f"{NAME}/x", f"ab/{NAME}"])
def test_names_that_name_no_chunk(staged: StagingArea, name: str) -> None:
    with pytest.raises(BadInput, match="cannot name a chunk"):
        staged.begin(name)
    with pytest.raises(BadInput):
        list(staged.read(StagedChunk(name, 0, 0, 0)))
    with pytest.raises(BadInput, match="owns no chunks"):
        staged.remove_chunks(name)


def test_a_chunk_has_an_end(staged: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_batches, "CHUNK_BYTES_MAX", 10)
    upload = staged.begin(NAME)
    upload.write([b"x" * 10])
    with pytest.raises(TooLarge):
        upload.write([b"x"])
    upload.abandon()
