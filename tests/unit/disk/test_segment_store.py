"""Segment stores on failing disks, and their addresses and markers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random

import pytest

from tidelog.disk.memory import MemoryDisk
from tidelog.disk.segment_store import (
    MARKER_KEY,
    DirectoryStore,
    StoreMarker,
    open_store,
    read_marker,
    shown_address,
)
from tidelog.errors import BadInput, Corrupt, NewerFormat, StoreDenied, StoreUnavailable
from tidelog.testing import SimDisk, SimStore

OLD, NEW = b"o" * 900, b"n" * 1300


def put_new(store: DirectoryStore) -> None:
    store.put("t/a", [NEW[:500], NEW[500:]])


def put_without_sync(store: DirectoryStore) -> None:
    """A planted bug: the new bytes are renamed before they are durable."""
    disk = store._disk
    disk.make_dir("/cold/t")
    file = disk.open("/cold/t/a.tmp", "create")
    file.write(0, NEW)
    file.close()
    disk.rename("/cold/t/a.tmp", "/cold/t/a")
    disk.sync_dir("/cold/t")


def contents_after_power_cuts(old: bytes | None, put: Callable[[DirectoryStore], None]) -> set[bytes | None]:
    """Return what the object may be after a power cut at any instant of a put."""
    disk, found = SimDisk(), set[bytes | None]()
    if old is not None:
        DirectoryStore(disk, "/cold").put("t/a", [old])

    def look(number: int) -> None:
        for image in disk.images(random=Random(number)):
            store = DirectoryStore(image.disk, "/cold")
            content = store.read("t/a", 0, 10_000) if store.exists("t/a") else None
            assert [each.key for each in store.list()] == ([] if content is None else ["t/a"])
            found.add(content)

    disk.on_op = look
    put(DirectoryStore(disk, "/cold"))
    disk.on_op = None
    look(0)
    return found


@pytest.mark.parametrize("old", [None, OLD])
def test_an_object_is_old_or_new_at_every_power_cut(old: bytes | None) -> None:
    assert contents_after_power_cuts(old, put_new) == {old, NEW}
    assert contents_after_power_cuts(old, put_without_sync) > {old, NEW}, "the check finds a planted bug"


def test_put_is_durable_on_return() -> None:
    disk = SimDisk()
    DirectoryStore(disk, "/cold").put("t/a", [NEW])
    for image in disk.images():
        assert DirectoryStore(image.disk, "/cold").read("t/a", 0, 10_000) == NEW


def test_put_is_durable_where_its_directory_was_removed_between_two() -> None:
    disk = SimDisk()
    store = DirectoryStore(disk, "/cold")
    store.put("t/a", [OLD])
    store.delete("t/a")
    disk.remove_dir("/cold/t")
    store.put("t/a", [NEW])
    for image in disk.images():
        assert DirectoryStore(image.disk, "/cold").read("t/a", 0, 10_000) == NEW


@pytest.mark.parametrize(
    ("number", "kind", "step"),
    [
        (errno.ENOSPC, StoreUnavailable, "free space"),
        (errno.EIO, StoreUnavailable, "repair or mount"),
        (errno.EACCES, StoreDenied, "let this user write"),
    ],
)
def test_a_failing_disk_is_an_error_with_a_next_step(number: int, kind: type[StoreUnavailable], step: str) -> None:
    disk = SimDisk()
    store = DirectoryStore(disk, "/cold")
    store.put("t/a", [OLD])
    disk.fail("write", error=number)
    with pytest.raises(kind, match=step) as raised:
        store.put("t/a", [NEW])
    assert raised.value.store == "/cold"
    assert store.read("t/a", 0, 10_000) == OLD


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://key:secret@bucket/a/b?region=x&secret_key=y", "s3://bucket/a/b"),
        ("abfs://container@account.dfs.core.windows.net/a", "abfs://container@account.dfs.core.windows.net/a"),
        ("abfs://account:key@account.dfs.core.windows.net/a", "abfs://account.dfs.core.windows.net/a"),
        ("/mnt/cold", "/mnt/cold"),
        ("hdfs://user@name:9000/a", "hdfs://name:9000/a"),
    ],
)
def test_an_address_is_shown_without_credentials(address: str, shown: str) -> None:
    assert shown_address(address) == shown


@pytest.mark.parametrize("address", ["ftp://host/a", "http://host/a", "swift://x/y", "s3://", "s3://k:geheim@b?bad=1"])
def test_an_unknown_store_is_refused(address: str) -> None:
    with pytest.raises(BadInput) as raised:
        open_store(address, disk=MemoryDisk())
    assert "geheim" not in str(raised.value)


def test_a_marker_is_read_back() -> None:
    store = SimStore()
    assert read_marker(store) is None
    marker = StoreMarker(database="d", claim="c")
    store.put(MARKER_KEY, [marker.encode()])
    assert read_marker(store) == marker
    store.put(MARKER_KEY, [b'{"database":"d"}'])
    with pytest.raises(Corrupt, match="no marker"):
        read_marker(store)
    store.put(MARKER_KEY, [b'{"version":2,"database":"d","claim":"c"}'])
    with pytest.raises(NewerFormat):
        read_marker(store)
