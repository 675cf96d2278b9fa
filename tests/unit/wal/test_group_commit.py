"""The group commit without a WAL: which thread commits, changes, and unexpected failures."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
from tests.kit.waiting import eventually
from tests.unit.engine.harness import TIMEOUT_S

from tidelog.errors import Damaged, Error, InDoubt
from tidelog.wal import CommitFuture, GroupCommit

Patch = pytest.MonkeyPatch


class Entry:
    """A commit of a store in memory."""

    frames = size = 1

    def __init__(self, commits: GroupCommit[Entry], name: str) -> None:
        self.name = name
        self.future: CommitFuture[str] = CommitFuture(commits)

    def on_done(self, error: Error | None) -> None:
        self.future.set_result(self.name if error is None else error)


class Store:
    """Keeps what was committed; `during` is called in each commit."""

    def __init__(self, during: Callable[[list[str]], object] = lambda _: None) -> None:
        self.batches: list[list[str]] = []
        self.during = during
        self.commits: GroupCommit[Entry] = GroupCommit(self)

    def submit(self, name: str) -> CommitFuture[str]:
        entry = Entry(self.commits, name)
        self.commits.submit(entry)
        return entry.future

    def commit_batch(self, batch: list[Entry], _gathered_us: int) -> None:
        names, outcome = [entry.name for entry in batch], None
        self.batches.append(names)
        try:
            self.during(names)
        except BaseException as error:
            outcome = error
        self.commits.finish_batch(batch, outcome)

    def publish(self, batch: list[Entry], error: Error | None) -> None:
        for entry in batch:
            entry.on_done(error)

    def fail(self, cause: BaseException) -> Error:
        return Damaged(f"failed: {cause}")

    def in_doubt(self, timeout: float | None) -> InDoubt:
        return InDoubt(f"no outcome within {timeout} s")


def started(call: Callable[[], object]) -> Thread:
    thread = Thread(target=call)
    thread.start()
    return thread


class HeldStore(Store):
    """The first commit runs until `release` is set."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.began, self.release = Event(), Event()

    def _hold(self, _: list[str]) -> None:
        if len(self.batches) == 1:
            self.began.set()
            assert self.release.wait(TIMEOUT_S)


def test_a_waiting_thread_takes_over_what_a_committer_leaves() -> None:
    store = HeldStore()
    first = started(store.submit("first").wait)
    assert store.began.wait(TIMEOUT_S)
    second = store.submit("second")
    waiter = started(second.wait)
    eventually(lambda: second._waiting_threads)
    store.release.set()
    first.join(TIMEOUT_S)
    waiter.join(TIMEOUT_S)
    assert store.batches == [["first"], ["second"]]
    assert second.wait() == "second"


def test_a_committer_commits_again_if_no_thread_waits() -> None:
    store = HeldStore()
    first = started(store.submit("first").wait)
    assert store.began.wait(TIMEOUT_S)
    second = store.submit("second")
    store.release.set()
    first.join(TIMEOUT_S)
    assert second.done
    assert store.commits.is_idle


def test_an_interrupted_waiter_commits_what_was_handed_over_to_it(monkeypatch: Patch) -> None:
    """Method: the wait is interrupted after the committer chose this thread."""
    store = HeldStore()
    first = started(store.submit("first").wait)
    assert store.began.wait(TIMEOUT_S)
    second = store.submit("second")
    real = Event.wait

    def interrupted(event: Event, timeout: float | None = None) -> bool:
        if event is second._event:
            store.release.set()
            real(event, TIMEOUT_S)
            raise KeyboardInterrupt
        return real(event, timeout)

    monkeypatch.setattr(Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.wait()
    monkeypatch.undo()
    first.join(TIMEOUT_S)
    assert second.done
    assert store.batches == [["first"], ["second"]]


def test_a_change_comes_before_commits_that_were_queued_after_it() -> None:
    store = HeldStore()
    order: list[Any] = []
    first = started(store.submit("first").wait)
    assert store.began.wait(TIMEOUT_S)

    def change() -> None:
        with store.commits.exclusive():
            order.append(len(store.batches))
        store.commits.commit_all()

    changing = started(change)
    eventually(lambda: store.commits.has_waiting_change)
    second = store.submit("second")
    assert not store.commits.commit_pending(blocking=False)
    store.release.set()
    for thread in (first, changing):
        thread.join(TIMEOUT_S)
    assert order == [1], "the change follows the commit that was running"
    assert second.wait(TIMEOUT_S) == "second"
    assert not store.commits.has_waiting_change


def test_a_waiter_that_times_out_is_in_doubt_and_its_commit_stays_queued() -> None:
    store = HeldStore()
    first = started(store.submit("first").wait)
    assert store.began.wait(TIMEOUT_S)
    second = store.submit("second")
    with pytest.raises(InDoubt):
        second.wait(0.001)
    store.release.set()
    first.join(TIMEOUT_S)
    assert second.wait(TIMEOUT_S) == "second"


def test_an_unexpected_exception_fails_every_commit_and_is_raised() -> None:
    def broken(_: list[str]) -> None:
        store.submit("queued meanwhile")
        raise RuntimeError("a bug")

    store = Store(broken)
    futures = [store.submit("a"), store.submit("b")]
    with pytest.raises(RuntimeError, match="a bug"):
        futures[0].wait()
    for future in futures:
        with pytest.raises(Damaged, match="a bug"):
            future.wait()
    assert store.commits.is_idle, "also what was queued meanwhile has its outcome"
