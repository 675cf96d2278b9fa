"""Every segment store keeps every promise of the protocol: a directory, the simulated one, S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.kit.s3 import S3Server

from tidelog.disk.bounded_store import BoundedStore
from tidelog.disk.memory import MemoryDisk
from tidelog.disk.posix import PosixDisk
from tidelog.disk.segment_store import DirectoryStore, SegmentStore, StoredObject, open_store
from tidelog.errors import BadInput
from tidelog.testing import SimDisk, SimStore


def _sim_disk(_: pytest.FixtureRequest) -> SegmentStore:
    return DirectoryStore(SimDisk(), "/cold")


def _memory_disk(_: pytest.FixtureRequest) -> SegmentStore:
    return DirectoryStore(MemoryDisk(), "cold")


def _directory(request: pytest.FixtureRequest) -> SegmentStore:
    path: Path = request.getfixturevalue("tmp_path")
    return open_store(f"file://{path}/cold", disk=PosixDisk())


def _bounded(_: pytest.FixtureRequest) -> SegmentStore:
    return BoundedStore(SimStore())


def _s3(request: pytest.FixtureRequest) -> SegmentStore:
    server: S3Server = request.getfixturevalue("s3_server")
    return open_store(server.url(f"contract/{uuid4().hex}"), disk=MemoryDisk())


@pytest.fixture(params=[_sim_disk, _memory_disk, _directory, _bounded, _s3])
def store(request: pytest.FixtureRequest) -> Iterator[SegmentStore]:
    make: Callable[[pytest.FixtureRequest], SegmentStore] = request.param
    made = make(request)
    yield made
    if isinstance(made, BoundedStore):
        made.close()


def test_an_object_is_read_back_by_ranges(store: SegmentStore) -> None:
    store.put("topic/seg-1.data", [b"abc", b"defg", b""])
    assert store.read("topic/seg-1.data", 0, 7) == b"abcdefg"
    assert store.read("topic/seg-1.data", 2, 5) == b"cde"
    assert store.read("topic/seg-1.data", 5, 100) == b"fg"
    assert store.read("topic/seg-1.data", 7, 9) == b""
    assert store.length("topic/seg-1.data") == 7
    assert store.exists("topic/seg-1.data")


def test_put_replaces_an_object(store: SegmentStore) -> None:
    store.put("a", [b"old and longer"])
    assert store.read("a", 0, 3) == b"old"
    store.put("a", [b"new"])
    assert store.read("a", 0, 100) == b"new"
    assert store.length("a") == 3


def test_an_empty_object_exists(store: SegmentStore) -> None:
    store.put("empty", [])
    assert (store.length("empty"), store.exists("empty"), store.read("empty", 0, 1)) == (0, True, b"")


def test_a_missing_object_is_missing(store: SegmentStore) -> None:
    assert store.length("none") is None
    assert not store.exists("none")
    assert store.delete("none") is False
    with pytest.raises(FileNotFoundError):
        store.read("none", 0, 1)
    assert list(store.list("none")) == []


def test_delete_removes_an_object(store: SegmentStore) -> None:
    store.put("a/b", [b"1"])
    assert store.read("a/b", 0, 1) == b"1"
    assert store.delete("a/b") is True
    assert store.delete("a/b") is False
    assert not store.exists("a/b")
    with pytest.raises(FileNotFoundError):
        store.read("a/b", 0, 1)


def test_list_finds_the_objects_below_a_prefix(store: SegmentStore) -> None:
    for key in ("a/1", "a/2", "ab/3", "top"):
        store.put(key, [key.encode()])
    assert sorted(store.list()) == [StoredObject(key, len(key)) for key in ("a/1", "a/2", "ab/3", "top")]
    assert sorted(each.key for each in store.list("a")) == ["a/1", "a/2"]


@pytest.mark.parametrize("key", ["", "/a", "../a", "a//b", "a/", "a/../b", "a b", "ä", "x.tmp", ".hidden", "a" * 501])
def test_a_bad_key_is_refused(store: SegmentStore, key: str) -> None:
    with pytest.raises(BadInput):
        store.put(key, [b"1"])
    assert list(store.list()) == []


def test_an_upload_that_breaks_off_leaves_nothing(store: SegmentStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 6_000_000  # more than a part
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="source is gone"):
        store.put("broken", pieces())
    assert not store.exists("broken")
    assert list(store.list()) == []
