"""The object store against a real S3 server: large objects, many keys, faults, and credentials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from tests.kit.s3 import FaultyProxy, S3Server

from tidelog.disk.bounded_store import BoundedStore
from tidelog.disk.memory import MemoryDisk
from tidelog.disk.segment_store import SegmentStore, open_store
from tidelog.errors import StoreDenied, StoreUnavailable

MIB = 1 << 20


def connect(url: str, timeout_s: float = 10.0) -> SegmentStore:
    return open_store(url, disk=MemoryDisk(), timeout_s=timeout_s)


def test_a_large_object_is_sent_in_parts_and_read_by_ranges(s3_server: S3Server) -> None:
    store = connect(s3_server.url(f"large/{uuid4().hex}"))
    block = bytes(range(256)) * (MIB // 256)
    store.put("big", (block for _ in range(24)))
    assert store.length("big") == 24 * MIB
    assert store.read("big", 11 * MIB - 3, 11 * MIB + 3) == block[-3:] + block[:3]
    assert store.read("big", 23 * MIB, 30 * MIB) == block


def test_an_upload_takes_no_more_memory_than_a_few_parts(s3_server: S3Server) -> None:
    import pyarrow as pa

    store = connect(s3_server.url(f"memory/{uuid4().hex}"))
    before, peak = pa.total_allocated_bytes(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal peak
        for _ in range(64):
            yield bytes(MIB)
            peak = max(peak, pa.total_allocated_bytes() - before)

    store.put("big", pieces())
    assert store.length("big") == 64 * MIB
    assert peak <= 24 * MIB


def test_more_keys_than_a_page_of_a_listing_are_found(s3_server: S3Server) -> None:
    store = connect(s3_server.url(f"many/{uuid4().hex}"))
    keys = [f"t{number % 3}/{number:05d}" for number in range(1_203)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, [b"x"]), keys))
    assert sorted(each.key for each in store.list()) == sorted(keys)
    assert len(list(store.list("t1"))) == 401


CALLS: list[Callable[[SegmentStore], object]] = [
    lambda store: store.put("a", [b"1"]),
    lambda store: store.put("a", [b"1" * MIB] * 12),
    lambda store: store.read("a", 0, 1),
    lambda store: store.length("a"),
    lambda store: store.delete("a"),
    lambda store: list(store.list()),
]


@pytest.mark.parametrize("call", CALLS)
def test_wrong_credentials_are_an_error_that_names_no_secret(
    s3_server: S3Server, call: Callable[[SegmentStore], object]
) -> None:
    if s3_server.kind == "moto":
        return  # it checks no credentials
    for url in (s3_server.url("x", secret="geheimnis"), s3_server.url("x", key="unbekannt", secret="geheimnis")):
        with pytest.raises(StoreDenied, match="check the bucket, the credentials") as raised:
            call(connect(url))
        assert "geheimnis" not in str(raised.value)
        assert "unbekannt" not in str(raised.value)


def test_a_bucket_that_does_not_exist_is_an_error(s3_server: S3Server) -> None:
    store = connect(s3_server.url("x").replace("tidelog-tests/", "no-such-bucket/"))
    with pytest.raises(StoreDenied, match="NO_SUCH_BUCKET"):
        store.put("a", [b"1"])
    with pytest.raises(StoreDenied, match="no bucket"):
        store.read("a", 0, 1)
    with pytest.raises(StoreDenied, match="no bucket"):
        store.length("a")


@pytest.mark.parametrize("status", [None, "503 Slow Down", "500 Internal Server Error"])
def test_a_request_that_fails_is_sent_again(s3_server: S3Server, status: str | None) -> None:
    proxy = FaultyProxy(s3_server.port)
    store = connect(s3_server.url(f"retry/{uuid4().hex}", endpoint=proxy.endpoint))
    bounded = BoundedStore(store, pauses_s=(0.01, 0.01, 0.01))
    proxy.spoil(1, status)
    bounded.put("a", [b"1"])
    proxy.spoil(1, status)
    assert bounded.read("a", 0, 1) == b"1"
    bounded.close()
    proxy.close()


def test_a_server_that_goes_away_is_an_error_and_comes_back(own_s3_server: S3Server) -> None:
    store = connect(own_s3_server.url("gone"), timeout_s=5)
    store.put("kept", [b"before"])
    assert store.read("kept", 0, 6) == b"before"

    def pieces() -> Iterator[bytes]:
        for number in range(30):
            if number == 15:
                own_s3_server.stop()
            yield bytes(MIB)

    with pytest.raises(StoreUnavailable, match="check the network"):
        store.put("half", pieces())
    for call in CALLS[2:4]:
        with pytest.raises(StoreUnavailable):
            call(store)
    own_s3_server.start()
    if own_s3_server.kind == "moto":
        return  # its objects are gone with the process
    assert store.read("kept", 0, 6) == b"before"
    assert [each.key for each in store.list()] == ["kept"]
    store.put("half", [b"whole"])
    assert store.read("half", 0, 9) == b"whole"
