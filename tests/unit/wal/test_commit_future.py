"""The outcome of a commit and the queue of a store, decision by decision and without a disk."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tidelog.errors import Busy, Error, InDoubt
from tidelog.wal import CommitFuture, GroupCommit, group_commit


class Store:
    """Records what a group commit asks for."""

    def __init__(self, **limits: int) -> None:
        self.log: list[Any] = []
        self.outcome: BaseException | None = None
        self.commits: GroupCommit[Any] = GroupCommit(self, wake_writer=lambda: self.log.append("wake"), **limits)

    def commit_batch(self, batch: list[Any], gathered_us: int) -> None:
        self.log.append(([commit.name for commit in batch], gathered_us))
        assert self.commits.commit_lock.locked()
        self.commits.finish_batch(batch, self.outcome)

    def publish(self, batch: list[Any], error: Error | None) -> None:
        for commit in batch:
            commit.on_done(error)

    def fail(self, cause: BaseException) -> Error:
        self.log.append(("fail", type(cause).__name__))
        return Busy("stopped")

    def in_doubt(self, timeout: float | None) -> InDoubt:
        return InDoubt(f"after {timeout}")

    def submit(self, name: str, *, frames: int = 1, size: int = 10, future: Any = None) -> Any:
        made = SimpleNamespace(name=name, frames=frames, size=size, future=future, outcomes=[])
        made.on_done = made.outcomes.append
        self.commits.submit(made)
        return made


@pytest.fixture
def store() -> Store:
    return Store()


# Outcomes -------------------------------------------------------------------------------------------------


def test_a_future_has_one_outcome(store: Store) -> None:
    future: CommitFuture[int] = CommitFuture(store.commits)
    assert future.done is False
    future.set_result(7)
    assert [future.done, future.wait(), future.wait()] == [True, 7, 7]
    with pytest.raises(AssertionError):
        future.set_result(8)
    failed: CommitFuture[int] = CommitFuture(store.commits)
    failed.set_exception(Busy("no"))
    for _ in range(2):
        with pytest.raises(Busy):
            failed.wait()
    known = CommitFuture.completed(store.commits, "value")
    assert (known.done, known.wait()) == (True, "value")
    assert store.log == []


def test_callbacks_are_called_once_and_their_errors_are_suppressed(store: Store) -> None:
    future: CommitFuture[int] = CommitFuture(store.commits)
    called: list[Any] = []

    def fail(_: object) -> None:
        raise ZeroDivisionError

    future.add_done_callback(fail)
    future.add_done_callback(called.append, wake_writer=False)
    assert (called, store.log) == ([], ["wake"])
    future.set_result(1)
    assert called == [future]
    future.add_done_callback(called.append)
    assert (called, store.log) == ([future, future], ["wake"])


def test_a_thread_that_waits_commits_first(store: Store) -> None:
    future: CommitFuture[str] = CommitFuture(store.commits)
    commit = store.submit("a", future=future)
    commit.on_done = lambda error: future.set_result("done" if error is None else error)
    assert future.wait() == "done"
    assert store.log == [(["a"], 0)]


class Waits(Event):
    """An event whose wait runs an action in place of blocking."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action, self.timeouts = action, list[Any]()

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self.action(self)
        return self.is_set()


def blocked(store: Store, monkeypatch: pytest.MonkeyPatch, action: Any) -> tuple[CommitFuture[int], Waits]:
    future: CommitFuture[int] = CommitFuture(store.commits)
    event = Waits(action)
    monkeypatch.setattr(group_commit, "Event", lambda: event)
    return future, event


def test_a_thread_that_waits_too_long_is_in_doubt(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    future, event = blocked(store, monkeypatch, lambda _: None)
    with pytest.raises(InDoubt, match=r"after 0\.5"):
        future.wait(0.5)
    assert (event.timeouts, future._waiting_threads) == ([0.5], 0)


def test_a_thread_that_is_woken_to_commit_tries_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    future, event = blocked(store, monkeypatch, lambda event: event.set())

    def commit_for(_: object, timeout: float | None) -> None:
        tries.append(1)
        assert timeout == 0.5
        if len(tries) == 3:
            future.set_result(9)

    monkeypatch.setattr(store.commits, "commit_for", commit_for)
    assert future.wait(0.5) == 9
    assert (len(tries), event.timeouts, future._waiting_threads) == (3, [0.5, 0.5], 0)


def test_a_thread_that_is_interrupted_passes_the_queue_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for woken in (False, True):
        tries: list[int] = []

        def interrupt(event: Waits, woken: bool = woken) -> None:
            if woken:
                event.set()
            raise KeyboardInterrupt

        future, _ = blocked(store, monkeypatch, interrupt)
        monkeypatch.setattr(store.commits, "commit_for", lambda *_, tries=tries: tries.append(1))
        with pytest.raises(KeyboardInterrupt):
            future.wait()
        assert (len(tries), future._waiting_threads) == (1 + woken, 0)


def test_a_committer_hands_over_to_a_thread_that_waits(store: Store) -> None:
    future: CommitFuture[int] = CommitFuture(store.commits)
    assert future.take_over_locked() is False
    future._event = Event()
    assert future.take_over_locked() is False
    assert not future._event.is_set()
    future._waiting_threads = 1
    assert future.take_over_locked() is True
    assert future._event.is_set()
    assert future._end_wait(future._event) is True
    assert (future._event.is_set(), future._waiting_threads) == (False, 0)
    future._waiting_threads = 1
    future.set_result(1)
    assert future._end_wait(future._event) is True
    assert future._event.is_set(), "it stays set for the others"
    future._block(0.1)
    assert future._waiting_threads == 0


# The queue ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({}, [["a", "b", "c"]]),
        ({"batch_frames": 3}, [["a", "b"], ["c"]]),
        ({"batch_frames": 2}, [["a"], ["b"], ["c"]]),
        ({"batch_bytes": 20}, [["a", "b"], ["c"]]),
        ({"batch_bytes": 19}, [["a"], ["b"], ["c"]]),
        ({"batch_bytes": 1}, [["a"], ["b"], ["c"]]),
    ],
)
def test_a_batch_has_limits(limits: dict[str, int], batches: list[list[str]]) -> None:
    store = Store(**limits)
    for name, frames in (("a", 1), ("b", 2), ("c", 1)):
        store.submit(name, frames=frames)
    found = []
    while batch := store.commits.take_batch():
        found.append([commit.name for commit in batch])
    assert found == batches


def test_one_batch_is_committed_at_a_time() -> None:
    store = Store(batch_frames=1)
    commits = store.commits
    assert [commits.is_idle] == [True]
    assert commits.commit_pending() is False
    a, b = store.submit("a"), store.submit("b")
    assert [commits.is_idle] == [False]
    assert commits.commit_pending(gathered_us=5) is True
    assert store.log == [(["a"], 5), "wake"], "a commit is left for the writer thread"
    assert (a.outcomes, b.outcomes) == ([None], [])
    assert commits.commit_pending() is True
    assert store.log[2:] == [(["b"], 0)]
    assert [commits.is_idle] == [True]
    store.submit("c")
    with commits.commit_lock:
        assert commits.commit_pending(blocking=False) is False
        assert commits.commit_pending(timeout=0.001) is False
        assert [commits.is_idle] == [False]
    assert not commits.commit_lock.locked()


def test_a_change_goes_before_a_committer_that_does_not_block(store: Store) -> None:
    commits = store.commits
    assert commits.has_waiting_change is False
    with commits.exclusive():
        assert (commits.has_waiting_change, commits.is_idle, commits.commit_lock.locked()) == (True, False, True)
        store.submit("a")
        assert store.log == []
    assert (commits.has_waiting_change, store.log) == (False, ["wake"])
    commits._waiting_changes = 1
    assert commits.commit_pending(blocking=False) is False
    assert commits.commit_pending() is True
    commits._waiting_changes = 0
    store.log.clear()
    with pytest.raises(ZeroDivisionError), commits.exclusive():
        raise ZeroDivisionError
    assert (commits.has_waiting_change, commits.commit_lock.locked(), store.log) == (False, False, [])


def test_the_queue_is_committed_until_another_thread_takes_over() -> None:
    store = Store(batch_frames=1)
    for name in "abc":
        store.submit(name)
    store.commits.commit_for(CommitFuture(store.commits), None)
    assert [step for step in store.log if step != "wake"] == [(["a"], 0), (["b"], 0), (["c"], 0)]
    store.log.clear()
    waiting: CommitFuture[int] = CommitFuture(store.commits)
    waiting._event, waiting._waiting_threads = Event(), 1
    store.submit("d")
    store.submit("e", future=waiting)
    store.commits.commit_all()
    assert store.log == [(["d"], 0), "wake"]
    assert waiting._event.is_set()
    waiting._event.clear()
    store.submit("f")
    store.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        store.commits.commit_all()


def test_an_exception_fails_every_commit_and_is_raised(store: Store) -> None:
    a, b = store.submit("a"), store.submit("b")

    def fail(_: object) -> None:
        raise KeyError

    a.on_done = fail
    batch = store.commits.take_batch()
    c = store.submit("c")
    cause = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        store.commits.finish_batch(batch, cause)
    assert store.log == [("fail", "ZeroDivisionError")]
    (error,) = b.outcomes
    assert isinstance(error, Busy)
    assert (error.__cause__, c.outcomes) == (cause, [error])
    assert store.commits.drain() == []
    refused = Busy("full")
    d = store.submit("d")
    store.commits.finish_batch(store.commits.take_batch(), refused)
    assert d.outcomes == [refused]
