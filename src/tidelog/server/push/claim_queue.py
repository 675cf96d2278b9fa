"""Claimers that wait for jobs of a queue, and the rounds that hand jobs out to all of them.

    POST claim ─────────────────────► waiter ─┐                                        ┌─► a response, even if empty
                                              ├─► (window, if the queue has one) round ┤
    GET work, while it has capacity ► waiter ─┘      ▲                                 └─► frames; empty: it waits on
                                                     └─ a write, ack, nack, release, or a job that becomes due

A claim is served at once, or at the end of the window that it opened or joined. Workers wait in order of arrival. An
event of the queue checks once for all of them, and only as many workers as there are jobs take part in a round: a
thousand idle workers cost one check. A claimer that leaves a window does not end it for the others.

While a round waits for the disk the next one collects. Jobs of a claimer that left meanwhile are returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from tidelog.engine.queues import ClaimRequest, ClaimResult, ClaimWindow, Queue
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.topic import topic_operations
from tidelog.errors import TopicNotFound
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError
from tidelog.server.push.notifier import TopicNotifier

if TYPE_CHECKING:
    from tidelog.server.service import Service

_ROUND_WORKERS_MAX: Final = 256  # in one round where the number of ready jobs is unknown
_BACKOFF_S: Final = 0.25  # after a round that found jobs and handed out none: the dead-letter topic is full
_RECHECK_S_MAX: Final = 60.0  # between two checks while a claimer waits: the wall clock may be set forward


class ClaimWaiter:
    """One claimer that waits. `request` is called when a round begins; None: it has no capacity at the moment.
    `on_idle` is called once, when there is no job for it now."""

    __slots__ = ("_on_idle", "future", "request")

    def __init__(
        self,
        future: asyncio.Future[ClaimResult | None],
        request: Callable[[], ClaimRequest | None],
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.future, self.request, self._on_idle = future, request, on_idle

    def note_idle(self) -> None:
        on_idle, self._on_idle = self._on_idle, None
        if on_idle is not None and not self.future.done():
            on_idle()

    def resolve(self, result: ClaimResult | None) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class PendingClaim:
    """A claim that waits for its window or for the disk. It fails when its key is removed."""

    def __init__(self, principal: Principal, waiter: ClaimWaiter) -> None:
        self.principal, self._waiter = principal, waiter

    def revoke(self) -> None:
        self._waiter.fail(
            ApiError("unauthorized", "this key was removed or changed in the settings; nothing was claimed")
        )


class ClaimQueue:
    """The waiting claimers of one queue. On the event loop's thread."""

    def __init__(self, service: Service, queue: Queue, on_empty: Callable[[], None]) -> None:
        self._service, self._queue, self._on_empty = service, queue, on_empty
        self._notifier = TopicNotifier(queue.topic, service.push.notifiers)
        self._notifier.wakers[self._check_ready] = None
        self._workers: dict[ClaimWaiter, None] = {}  # in order of arrival
        self._window: ClaimWindow[ClaimWaiter] = ClaimWindow(0)  # its length is the queue's setting when it opens
        self._window_timer: asyncio.TimerHandle | None = None
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._next_round: list[ClaimWaiter] = []  # claimers that wait for the running round
        self.is_round_running = False  # a round waits for the disk
        self._recheck_after_round = False
        self._in_backoff = False
        self._shutdown_callbacks: dict[Callable[[], None], None] = {}  # one for each connected worker

    # ── claimers ──────────────────────────────────────────────────────────────────────────────

    async def claim(self, request: ClaimRequest, principal: Principal) -> ClaimResult:
        """Return jobs for one claimer, perhaps none. Raises the error of its round, and ApiError where its key is
        removed while it waits: jobs of a running round are returned then."""
        waiter = ClaimWaiter(self._service.loop.create_future(), lambda: request)
        pending = PendingClaim(principal, waiter)
        self._service.auth.stream_slots.add(pending)  # by a weak reference, so it ends with this call
        if self._jitter_ms:
            self._join_window([waiter])
        else:
            self._run_round([waiter])
        result = await self._wait(waiter)
        assert result is not None, "only workers are resolved without a result"
        return result

    def add_worker(self, on_shutdown: Callable[[], None]) -> None:
        """Register a worker; the first one makes the queue notify. `on_shutdown` is called when the server stops."""
        if not self._shutdown_callbacks:
            self._queue.add_listener(self._notifier.notify)
        self._shutdown_callbacks[on_shutdown] = None

    def remove_worker(self, on_shutdown: Callable[[], None]) -> None:
        del self._shutdown_callbacks[on_shutdown]
        if not self._shutdown_callbacks:
            self._queue.remove_listener(self._notifier.notify)
            self._service.push.scheduler.forget(self._notifier)
            self._release_if_empty()

    async def wait_for_jobs(
        self, request: Callable[[], ClaimRequest | None], on_idle: Callable[[], None] | None
    ) -> ClaimResult | None:
        """Return jobs for a worker as soon as there are any that it has capacity for; None: the server stops.
        `on_idle` is called if there are none at first."""
        if self._service.stopping.is_set():
            return None
        waiter = ClaimWaiter(self._service.loop.create_future(), request, on_idle)
        self._workers[waiter] = None
        self._check_ready()
        if not self.is_round_running and waiter not in self._window:
            waiter.note_idle()
        return await self._wait(waiter)

    async def _wait(self, waiter: ClaimWaiter) -> ClaimResult | None:
        try:
            return await waiter.future
        finally:
            self._workers.pop(waiter, None)
            self._window.leave(waiter)
            self._release_if_empty()

    def stop(self) -> None:
        """The server stops: workers are sent away, and an open window is closed."""
        for on_shutdown in list(self._shutdown_callbacks):
            on_shutdown()
        for waiter in list(self._workers):
            waiter.resolve(None)
        if self._window_timer is not None:
            self._close_window()

    @property
    def _jitter_ms(self) -> int:
        return self._queue.topic.config.claim_jitter_ms

    def _release_if_empty(self) -> None:
        """Cancel timers without a waiter, and drop a queue without claimers."""
        if not self._workers and self._recheck_timer is not None:
            self._recheck_timer.cancel()
            self._recheck_timer = None
        if not self._window and self._window_timer is not None:
            self._window_timer.cancel()
            self._window_timer = None
        if not (self._shutdown_callbacks or self._window or self._next_round or self.is_round_running):
            self._on_empty()

    # ── checks ────────────────────────────────────────────────────────────────────────────────

    def _check_ready(self) -> None:
        """Run a round for the workers where there are jobs for them."""
        if self.is_round_running:
            self._recheck_after_round = True
        if self.is_round_running or self._in_backoff or not self._workers:
            return
        if self._recheck_timer is not None:
            self._recheck_timer.cancel()
            self._recheck_timer = None
        queue = self._queue
        if topic_operations(queue.topic).is_dropped:
            _fail_all(self._workers, TopicNotFound(queue.topic.name))
            return
        try:
            count_max = (
                queue.counts().ready if operations_of(queue).can_claim_without_blocking(1) else _ROUND_WORKERS_MAX
            )
            waiters = list(islice(filter(self._can_claim, self._workers), count_max))
            if waiters and self._jitter_ms:
                self._join_window(waiters)
            elif waiters and self._run_round(waiters) and not any(waiter.future.done() for waiter in waiters):
                self._start_backoff()
            self._schedule_recheck()
        except Exception as error:  # every waiter gets it, whatever it is
            _fail_all(self._workers, error)

    def _can_claim(self, waiter: ClaimWaiter) -> bool:
        """Whether a worker takes part in the next round, and not in an open window already."""
        return waiter not in self._window and not waiter.future.done() and waiter.request() is not None

    def _start_backoff(self) -> None:
        """There are jobs and no worker got one: another check now would find the same."""
        self._in_backoff = True
        self._service.loop.call_later(_BACKOFF_S, self._on_backoff_end)

    def _on_backoff_end(self) -> None:
        self._in_backoff = False
        self._check_ready()

    def _schedule_recheck(self) -> None:
        """Check again when a lease expires or a delayed job becomes due."""
        if self.is_round_running or self._recheck_timer is not None or not self._workers:
            return
        due_ms = self._queue.next_due_ms()
        if due_ms is None:
            return
        wait_s = max(due_ms - self._service.now_ms(), 1) / 1000
        self._recheck_timer = self._service.loop.call_later(min(wait_s, _RECHECK_S_MAX), self._on_recheck)

    def _on_recheck(self) -> None:
        self._recheck_timer = None
        self._check_ready()

    # ── the window ────────────────────────────────────────────────────────────────────────────

    def _join_window(self, waiters: Iterable[ClaimWaiter]) -> None:
        loop = self._service.loop
        now_ms = int(loop.time() * 1000)
        self._window.window_ms = self._jitter_ms
        for waiter in waiters:
            request = waiter.request()
            if request is not None:
                self._window.join(now_ms, waiter, request)
        due_ms = self._window.due_ms
        if due_ms is not None and self._window_timer is None:
            self._window_timer = loop.call_later(max(due_ms - now_ms, 0) / 1000, self._close_window)

    def _close_window(self) -> None:
        if self._window_timer is not None:
            self._window_timer.cancel()
            self._window_timer = None
        self._run_round([waiter for waiter, _ in self._window.close()])

    # ── rounds ────────────────────────────────────────────────────────────────────────────────

    def _run_round(self, waiters: list[ClaimWaiter]) -> bool:
        """Hand out jobs in order of arrival. False: the round waits for the disk or for a running one."""
        if self.is_round_running:
            self._next_round += waiters
            return False
        requests = _active_requests(waiters)
        if not requests:
            return True
        if not operations_of(self._queue).can_claim_without_blocking(sum(request.count_max for _, request in requests)):
            self.is_round_running = True
            self._service.spawn(self._run_blocking_rounds(requests))
            return False
        try:
            self._deliver(requests, operations_of(self._queue).claim_for_all([request for _, request in requests]))
        except Exception as error:
            _fail_all([waiter for waiter, _ in requests], error)
        return True

    async def _run_blocking_rounds(self, requests: list[tuple[ClaimWaiter, ClaimRequest]]) -> None:
        """Run rounds that wait for the disk, one after the other."""
        try:
            while requests:
                may_skip = all(waiter in self._workers for waiter, _ in requests)
                claim = partial(_claim_jobs, self._queue, [request for _, request in requests], may_skip=may_skip)
                try:
                    results = await self._service.run_blocking(claim)
                except Exception as error:  # every waiter gets it, whatever it is
                    _fail_all([waiter for waiter, _ in requests], error)
                else:
                    self._deliver(requests, results)
                    if may_skip and results and not any(result.count for result in results):
                        self._start_backoff()
                waiters, self._next_round = self._next_round, []
                requests = _active_requests(waiters)
        finally:
            self.is_round_running = False
            if self._recheck_after_round:
                self._recheck_after_round = False
                self._check_ready()
            else:
                self._schedule_recheck()
            self._release_if_empty()

    def _deliver(self, requests: list[tuple[ClaimWaiter, ClaimRequest]], results: list[ClaimResult]) -> None:
        if not results:  # there were no jobs, and all of them are workers that wait on
            for waiter, _ in requests:
                waiter.note_idle()
            return
        for (waiter, request), result in zip(requests, results, strict=True):
            if waiter.future.done():
                self._return_jobs(request, result)
            elif result.count or waiter not in self._workers:
                waiter.resolve(result)
            else:
                waiter.note_idle()

    def _return_jobs(self, request: ClaimRequest, result: ClaimResult) -> None:
        """Return the jobs of a claimer that left while its round waited for the disk."""
        if result.count:
            token = operations_of(self._queue).submit_nack(request.node, result.seqs, list(result.lease_ids))
            self._service.writes.add_done_callback(token, _ignore_outcome)


def _active_requests(waiters: Iterable[ClaimWaiter]) -> list[tuple[ClaimWaiter, ClaimRequest]]:
    """Return the waiters that have not left and have capacity."""
    return [
        (waiter, request)
        for waiter in waiters
        if not waiter.future.done() and (request := waiter.request()) is not None
    ]


def _fail_all(waiters: Iterable[ClaimWaiter], error: Exception) -> None:
    for waiter in list(waiters):
        waiter.fail(error)


def _claim_jobs(queue: Queue, requests: list[ClaimRequest], *, may_skip: bool) -> list[ClaimResult]:
    """Claim for these; `may_skip`: return no results at all where no job is ready."""
    return [] if may_skip and not queue.counts().ready else operations_of(queue).claim_for_all(requests)


def _ignore_outcome(token: Any) -> None:
    """The lease of a job that could not be returned expires."""
    assert token.done, "called when it is"


class ClaimQueues:
    """The claim queues with a waiting claimer or a connected worker."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._by_topic: dict[int, ClaimQueue] = {}

    def __len__(self) -> int:
        return len(self._by_topic)

    def try_claim(self, queue: Queue, request: ClaimRequest) -> ClaimResult | None:
        """Claim jobs without waiting; None where the claimer has to wait with `ClaimQueue.claim`."""
        return operations_of(queue).claim_for_all([request])[0] if self.can_claim_now(queue, request) else None

    def can_claim_now(self, queue: Queue, request: ClaimRequest) -> bool:
        """Whether this claimer waits neither for a window, nor for a running round, nor for the disk."""
        claim_queue = self._by_topic.get(queue.topic.id)
        if queue.topic.config.claim_jitter_ms or (claim_queue is not None and claim_queue.is_round_running):
            return False
        return operations_of(queue).can_claim_without_blocking(request.count_max)

    def queue_for(self, queue: Queue) -> ClaimQueue:
        key = queue.topic.id
        claim_queue = self._by_topic.get(key)
        if claim_queue is None:
            claim_queue = self._by_topic[key] = ClaimQueue(self._service, queue, lambda: self._remove(key))
        return claim_queue

    def _remove(self, key: int) -> None:
        self._by_topic.pop(key, None)

    def stop(self) -> None:
        for claim_queue in list(self._by_topic.values()):
            claim_queue.stop()
