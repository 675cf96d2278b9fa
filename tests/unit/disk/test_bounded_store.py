"""Time limits and retries of a segment store."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
from tests.kit.waiting import eventually

from tidelog.disk import bounded_store
from tidelog.disk.bounded_store import BoundedStore
from tidelog.errors import StoreDenied, StoreUnavailable
from tidelog.testing import SimStore

PAUSES = (0.0, 0.0)


def make(store: SimStore, **settings: float) -> BoundedStore:
    return BoundedStore(store, pauses_s=PAUSES, **settings)  # type: ignore[arg-type]


def test_a_retryable_error_is_retried() -> None:
    store = SimStore()
    bounded = make(store)
    store.objects["a"] = b"1"
    store.fail("read", times=len(PAUSES))
    assert bounded.read("a", 0, 1) == b"1"
    assert bounded.retries == len(PAUSES)
    store.fail("read", times=len(PAUSES) + 1)
    with pytest.raises(StoreUnavailable, match="connection was reset"):
        bounded.read("a", 0, 1)
    bounded.close()


def test_a_refusal_and_a_missing_object_are_not_retried() -> None:
    store = SimStore()
    bounded = make(store)
    with pytest.raises(FileNotFoundError):
        bounded.read("a", 0, 1)
    store.fail("read", denied=True)
    with pytest.raises(StoreDenied):
        bounded.read("a", 0, 1)
    assert (len(store.calls), bounded.retries) == (2, 0)
    bounded.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.read("a", 0, 1),
        lambda store: store.put("a", [b"1"]),
        lambda store: store.length("a"),
        lambda store: store.delete("a"),
        lambda store: list(store.list()),
    ],
)
def test_a_store_that_hangs_is_an_error_after_the_time_limit(call: Callable[[BoundedStore], object]) -> None:
    store = SimStore()
    store.hang()
    bounded = BoundedStore(store, threads=1, timeout_s=0.02, pauses_s=())
    with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.02 s"):
        call(bounded)
    with pytest.raises(StoreUnavailable, match="all 1 connections are waiting"):
        call(bounded)
    assert bounded.timeouts == 2
    store.resume()
    store.objects["a"] = b"1"
    eventually(lambda: bounded.busy_threads == 0)
    again = BoundedStore(store, threads=1)
    call(again)
    again.close()
    bounded.close()


def test_closing_ends_calls_that_hang() -> None:
    store = SimStore()
    store.hang()
    bounded = BoundedStore(store, threads=1, timeout_s=3600)
    errors: list[Exception] = []

    def read() -> None:
        try:
            bounded.read("a", 0, 1)
        except StoreUnavailable as error:
            errors.append(error)

    threads = [Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: store.hanging)
    bounded.close()
    for thread in threads:
        thread.join(30)
    assert [error.reason for error in errors if isinstance(error, StoreUnavailable)] == ["it was closed"] * 3
    store.resume()


def test_an_upload_that_advances_may_take_longer_than_the_limit() -> None:
    store = SimStore()
    bounded = BoundedStore(store, timeout_s=3600)
    bounded.put("a", (b"x" for _ in range(100)))
    assert store.objects["a"] == b"x" * 100
    bounded.close()


def test_few_threads_serve_many_callers() -> None:
    store = SimStore()
    store.objects["a"] = b"1"
    bounded = BoundedStore(store, threads=2)
    found: list[bytes] = []
    threads = [Thread(target=lambda: found.append(bounded.read("a", 0, 1))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [b"1"] * 20
    assert bounded._threads <= 2
    bounded.close()


def test_threads_without_work_end_and_later_calls_have_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "IDLE_S", 0.0)
    store = SimStore()
    store.objects["a"] = b"1"
    bounded = BoundedStore(store)
    for _ in range(2):
        assert bounded.read("a", 0, 1) == b"1"
        eventually(lambda: bounded._threads == 0)
        assert bounded.busy_threads == 0
