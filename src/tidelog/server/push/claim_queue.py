"""[shell] Who waits for jobs of a queue, and the one pass that hands them out to all of them.

    POST claim ──────────────► ask ─┐                                          ┌─► an answer, also an empty one
                                    ├─► (window, where the queue has one) pass ┤
    GET work, while it has room ► ask ─┘      ▲                                └─► frames; empty: it waits on
                                              └─ a write, ack, nack, release, or the moment that something is due

A claim is answered at once, or at the end of the window that it opened or joined. A worker stands in line: what
wakes the queue looks once for everybody, and only as many of the line as there are jobs take part, so a thousand idle
workers cost one look. The window's timer is the desk's: whoever leaves it leaves nobody waiting.

While a pass waits for the disk the next one gathers. Whoever has left by the time it is done gives back what it got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from tidelog.engine.queues import ClaimRequest, ClaimResult, ClaimWindow, Queue
from tidelog.errors import TopicNotFound
from tidelog.server.auth import Principal
from tidelog.server.errors import ApiError
from tidelog.server.push.notifier import TopicNotifier

if TYPE_CHECKING:
    from tidelog.server.service import Service

_ROUND_WORKERS_MAX: Final = 256  # of a line in one pass where it is not known how many jobs there are
_BACKOFF_S: Final = 0.25  # behind a pass that found jobs and could hand out none: their dead-letter topic is full
_RECHECK_S_MAX: Final = 60.0  # between two looks while somebody waits: a wall clock may be put forward


class ClaimWaiter:
    """One claimer that waits. `want` is asked for when a pass begins: None, it has enough at the moment."""

    __slots__ = ("future", "request", "window_ticket")

    def __init__(self, future: asyncio.Future[ClaimResult | None], request: Callable[[], ClaimRequest | None]) -> None:
        self.future, self.request = future, request
        self.window_ticket: Any = None  # its place in an open window

    @property
    def can_claim(self) -> bool:
        """Whether it takes part in the next pass, and in none already."""
        return self.window_ticket is None and not self.future.done() and self.request() is not None


class PendingClaim:
    """A claim that waits for its window or for the disk. It ends when its key is removed."""

    def __init__(self, principal: Principal, future: asyncio.Future[ClaimResult | None]) -> None:
        self.principal, self._future = principal, future

    def revoke(self) -> None:
        if not self._future.done():
            self._future.set_exception(
                ApiError("unauthorized", "this key was removed or changed in the settings; nothing was claimed")
            )


class ClaimQueue:
    """Everybody who waits for one queue. On the event loop's thread."""

    def __init__(self, service: Service, queue: Queue, on_empty: Callable[[], None]) -> None:
        self._service, self._queue, self._on_empty = service, queue, on_empty
        self._notifier = TopicNotifier(queue.topic, service.notifiers)
        self._notifier.wakers[self._check_ready] = None
        self._waiters: dict[ClaimWaiter, None] = {}  # workers, in the order they came
        self._claim_window = ClaimWindow(0)  # as long as the queue says when it opens
        self._in_window: dict[Any, ClaimWaiter] = {}  # ticket → who has it
        self._window_timer: asyncio.TimerHandle | None = None  # the window's end
        self._recheck_timer: asyncio.TimerHandle | None = None  # the next look, where nobody rings before
        self._next_round: list[ClaimWaiter] = []  # waits for the pass under way
        self._round_running = False
        self._recheck_after_round = False  # something happened meanwhile
        self._in_backoff = False  # the next look is not before its time
        self._shutdown_callbacks: dict[Callable[[], None], None] = {}  # what each of them has to be told at the end

    # ── asking ────────────────────────────────────────────────────────────────────────────────

    async def claim(self, request: ClaimRequest, principal: Principal) -> ClaimResult:
        """Jobs for one claimer, perhaps none. Raises what the pass did, and Problem where its key is removed while it
        waits: jobs of a pass that is under way are given back."""
        ask = ClaimWaiter(self._service.loop.create_future(), lambda: request)
        pending = PendingClaim(principal, ask.future)
        self._service.stream_slots.add(pending)  # by a weak reference, so it ends with this call
        if self._jitter_ms:
            self._join_window([ask])
        else:
            self._run_round([ask])
        leased = await self._wait_for_jobs(ask)
        assert leased is not None, "only who stands in line is sent away without an answer"
        return leased

    def add_worker(self, on_shutdown: Callable[[], None]) -> None:
        """A worker comes; the queue rings from here on. `stopping` is called when the server stops."""
        if not self._shutdown_callbacks:
            self._queue.add_listener(self._notifier.notify)
        self._shutdown_callbacks[on_shutdown] = None

    def remove_worker(self, on_shutdown: Callable[[], None]) -> None:
        del self._shutdown_callbacks[on_shutdown]
        if not self._shutdown_callbacks:
            self._queue.remove_listener(self._notifier.notify)
            self._service.notify_scheduler.forget(self._notifier)
            self._release_if_empty()

    async def wait_for_jobs(self, request: Callable[[], ClaimRequest | None]) -> ClaimResult | None:
        """Jobs for a worker, as soon as there are any that it has room for; None: the server stops."""
        if self._service.stopping.is_set():
            return None
        ask = ClaimWaiter(self._service.loop.create_future(), request)
        self._waiters[ask] = None
        self._check_ready()
        return await self._wait_for_jobs(ask)

    async def _wait_for_jobs(self, waiter: ClaimWaiter) -> ClaimResult | None:
        try:
            return await waiter.future
        finally:
            self._waiters.pop(waiter, None)
            if waiter.window_ticket is not None:
                self._claim_window.leave(waiter.window_ticket)
                self._in_window.pop(waiter.window_ticket, None)
            self._release_if_empty()

    def stop(self) -> None:
        """The server stops: workers are sent away, and nobody waits for the end of a window."""
        for stopping in list(self._shutdown_callbacks):
            stopping()
        for ask in list(self._waiters):
            _resolve_waiter(ask, None)
        if self._window_timer is not None:
            self._close_window()

    @property
    def is_round_running(self) -> bool:
        """Whether a pass is at the disk, behind which others wait."""
        return self._round_running

    @property
    def _jitter_ms(self) -> int:
        return self._queue.topic.config.claim_jitter_ms

    def _release_if_empty(self) -> None:
        """Let go of what nobody needs any more."""
        if not self._waiters and self._recheck_timer is not None:
            self._recheck_timer.cancel()
            self._recheck_timer = None
        if not self._in_window and self._window_timer is not None:
            self._window_timer.cancel()
            self._window_timer = None
        if not (self._shutdown_callbacks or self._in_window or self._next_round or self._round_running):
            self._on_empty()

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def _check_ready(self) -> None:
        """Whether there is something for those in line."""
        if self._round_running:
            self._recheck_after_round = True
        if self._round_running or self._in_backoff or not self._waiters:
            return
        if self._recheck_timer is not None:
            self._recheck_timer.cancel()
            self._recheck_timer = None
        queue = self._queue
        if queue.topic.is_dropped:
            self._fail_waiters(self._waiters, TopicNotFound(queue.topic.name))
            return
        try:
            most = queue.counts().ready if queue.can_claim_without_blocking(1) else _ROUND_WORKERS_MAX
            asks = list(islice((ask for ask in self._waiters if ask.can_claim), most))
            if asks and self._jitter_ms:
                self._join_window(asks)
            elif asks and self._run_round(asks) and not any(ask.future.done() for ask in asks):
                self._start_backoff()
            self._schedule_recheck()
        except Exception as error:  # all who wait are told, whatever it is
            self._fail_waiters(self._waiters, error)

    def _start_backoff(self) -> None:
        """There are jobs and nobody got one: to look again at once would find the same."""
        self._in_backoff = True
        self._service.loop.call_later(_BACKOFF_S, self._on_backoff_end)

    def _on_backoff_end(self) -> None:
        self._in_backoff = False
        self._check_ready()

    def _schedule_recheck(self) -> None:
        """Look again when something becomes claimable by itself: a lease that runs out, a job whose time has come."""
        if self._round_running or self._recheck_timer is not None or not self._waiters:
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
        self._claim_window.window_ms = self._jitter_ms
        for ask in waiters:
            want = ask.request()
            if want is not None:
                ask.window_ticket = self._claim_window.join(now_ms, want)
                self._in_window[ask.window_ticket] = ask
        due_ms = self._claim_window.due_ms
        if due_ms is not None and self._window_timer is None:
            self._window_timer = loop.call_later(max(due_ms - now_ms, 0) / 1000, self._close_window)

    def _close_window(self) -> None:
        if self._window_timer is not None:
            self._window_timer.cancel()
            self._window_timer = None
        asks = [self._in_window.pop(ticket) for ticket, _ in self._claim_window.close()]
        for ask in asks:
            ask.window_ticket = None
        self._run_round(asks)

    # ── the pass ──────────────────────────────────────────────────────────────────────────────

    def _run_round(self, waiters: list[ClaimWaiter]) -> bool:
        """Hand out jobs to these, in the order they came; whether that is done, or has to wait."""
        if self._round_running:
            self._next_round += waiters
            return False
        wanted = _active_requests(waiters)
        if not wanted:
            return True
        if not self._queue.can_claim_without_blocking(sum(want.count_max for _, want in wanted)):
            self._round_running = True
            self._service.spawn(self._run_blocking_rounds(wanted))
            return False
        try:
            self._deliver(wanted, self._queue.claim_for_all([want for _, want in wanted]))
        except Exception as error:
            self._fail_waiters([ask for ask, _ in wanted], error)
        return True

    async def _run_blocking_rounds(self, requests: list[tuple[ClaimWaiter, ClaimRequest]]) -> None:
        """Passes that wait for the disk, one behind the other."""
        try:
            while requests:
                wants = [want for _, want in requests]
                may_skip = all(ask in self._waiters for ask, _ in requests)
                try:
                    leased = await self._service.run_blocking(
                        partial(_claim_jobs, self._queue, wants, may_skip=may_skip)
                    )
                except Exception as error:  # all who wait are told, whatever it is
                    self._fail_waiters([ask for ask, _ in requests], error)
                else:
                    self._deliver(requests, leased)
                    if may_skip and leased and not any(got.count for got in leased):
                        self._start_backoff()
                asks, self._next_round = self._next_round, []
                requests = _active_requests(asks)
        finally:
            self._round_running = False
            if self._recheck_after_round:
                self._recheck_after_round = False
                self._check_ready()
            else:
                self._schedule_recheck()
            self._release_if_empty()

    def _deliver(self, requests: list[tuple[ClaimWaiter, ClaimRequest]], leased: list[ClaimResult]) -> None:
        if not leased:
            return  # there was nothing, and all of them wait on
        for (ask, want), got in zip(requests, leased, strict=True):
            if ask.future.done():
                self._return_jobs(want, got)
            elif got.count or ask not in self._waiters:
                _resolve_waiter(ask, got)

    def _return_jobs(self, request: ClaimRequest, got: ClaimResult) -> None:
        """Its claimer left while the pass was at the disk: others may have these at once."""
        if not got.count:
            return
        commits = self._service.writes
        commits.add_done_callback(self._queue.submit_nack(request.node, got.seqs, list(got.lease_ids)), _ignore_outcome)

    def _fail_waiters(self, waiters: Iterable[ClaimWaiter], error: Exception) -> None:
        for ask in list(waiters):
            if not ask.future.done():
                ask.future.set_exception(error)


def _active_requests(waiters: Iterable[ClaimWaiter]) -> list[tuple[ClaimWaiter, ClaimRequest]]:
    """Those who are still there and have room."""
    return [(ask, want) for ask in waiters if not ask.future.done() and (want := ask.request()) is not None]


def _claim_jobs(queue: Queue, requests: list[ClaimRequest], *, may_skip: bool) -> list[ClaimResult]:
    """Jobs for these; nothing at all where there is nothing to hand out and nobody needs to be told so."""
    return [] if may_skip and not queue.counts().ready else queue.claim_for_all(requests)


def _resolve_waiter(waiter: ClaimWaiter, got: ClaimResult | None) -> None:
    if not waiter.future.done():
        waiter.future.set_result(got)


def _ignore_outcome(token: Any) -> None:
    """Nobody waits for this outcome: a lease that could not be given back runs out."""
    assert token.done, "told when it is"


class ClaimQueues:
    """The desks of all queues that somebody waits for."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._by_topic: dict[int, ClaimQueue] = {}

    def __len__(self) -> int:
        return len(self._by_topic)

    def try_claim(self, queue: Queue, request: ClaimRequest) -> ClaimResult | None:
        """Jobs for a claimer without waiting; None where it has to, and `claim` of its desk does that."""
        return queue.claim_for_all([request])[0] if self.can_claim_now(queue, request) else None

    def can_claim_now(self, queue: Queue, request: ClaimRequest) -> bool:
        """Whether this claimer need not wait: for others of its window, for a pass that is at the disk, or for it."""
        desk = self._by_topic.get(queue.topic.id)
        if queue.topic.config.claim_jitter_ms or (desk is not None and desk.is_round_running):
            return False
        return queue.can_claim_without_blocking(request.count_max)

    def queue_for(self, queue: Queue) -> ClaimQueue:
        key = queue.topic.id
        desk = self._by_topic.get(key)
        if desk is None:
            desk = self._by_topic[key] = ClaimQueue(self._service, queue, lambda: self._remove(key))
        return desk

    def _remove(self, key: int) -> None:
        self._by_topic.pop(key, None)

    def stop(self) -> None:
        for desk in list(self._by_topic.values()):
            desk.stop()
