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

from tidelog.engine.queues import Cohort, Leased, Queue, Want
from tidelog.errors import TopicNotFound
from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem
from tidelog.server.bells import Bell

if TYPE_CHECKING:
    from tidelog.server.service import Service

_LINE_MAX: Final = 256  # of a line in one pass where it is not known how many jobs there are
_PAUSE_S: Final = 0.25  # behind a pass that found jobs and could hand out none: their dead-letter topic is full
_LOOK_S_MAX: Final = 60.0  # between two looks while somebody waits: a wall clock may be put forward


class Ask:
    """One claimer that waits. `want` is asked for when a pass begins: None, it has enough at the moment."""

    __slots__ = ("future", "ticket", "want")

    def __init__(self, future: asyncio.Future[Leased | None], want: Callable[[], Want | None]) -> None:
        self.future, self.want = future, want
        self.ticket: Any = None  # its place in an open window

    @property
    def has_room(self) -> bool:
        """Whether it takes part in the next pass, and in none already."""
        return self.ticket is None and not self.future.done() and self.want() is not None


class PendingClaim:
    """A claim that waits for its window or for the disk. It ends when its key is removed."""

    def __init__(self, principal: Principal, future: asyncio.Future[Leased | None]) -> None:
        self.principal, self._future = principal, future

    def revoke(self) -> None:
        if not self._future.done():
            self._future.set_exception(
                Problem("unauthorized", "this key was removed or changed in the settings; nothing was claimed")
            )


class Desk:
    """Everybody who waits for one queue. On the event loop's thread."""

    def __init__(self, service: Service, queue: Queue, over: Callable[[], None]) -> None:
        self._service, self._queue, self._over = service, queue, over
        self._bell = Bell(queue.topic, service.bells)
        self._bell.waiting[self._look] = None
        self._line: dict[Ask, None] = {}  # workers, in the order they came
        self._window = Cohort(0)  # as long as the queue says when it opens
        self._joined: dict[Any, Ask] = {}  # ticket → who has it
        self._closes: asyncio.TimerHandle | None = None  # the window's end
        self._due: asyncio.TimerHandle | None = None  # the next look, where nobody rings before
        self._next: list[Ask] = []  # waits for the pass under way
        self._passing = False
        self._again = False  # something happened meanwhile
        self._resting = False  # the next look is not before its time
        self._workers: dict[Callable[[], None], None] = {}  # what each of them has to be told at the end

    # ── asking ────────────────────────────────────────────────────────────────────────────────

    async def claim(self, want: Want, principal: Principal) -> Leased:
        """Jobs for one claimer, perhaps none. Raises what the pass did, and Problem where its key is removed while it
        waits: jobs of a pass that is under way are given back."""
        ask = Ask(self._service.loop.create_future(), lambda: want)
        pending = PendingClaim(principal, ask.future)
        self._service.slots.add(pending)  # by a weak reference, so it ends with this call
        if self._jitter_ms:
            self._join([ask])
        else:
            self._pass([ask])
        leased = await self._answer(ask)
        assert leased is not None, "only who stands in line is sent away without an answer"
        return leased

    def enter(self, stopping: Callable[[], None]) -> None:
        """A worker comes; the queue rings from here on. `stopping` is called when the server stops."""
        if not self._workers:
            self._queue.listen(self._bell.strike)
        self._workers[stopping] = None

    def leave(self, stopping: Callable[[], None]) -> None:
        del self._workers[stopping]
        if not self._workers:
            self._queue.unlisten(self._bell.strike)
            self._service.pump.forget(self._bell)
            self._tidy()

    async def stand(self, want: Callable[[], Want | None]) -> Leased | None:
        """Jobs for a worker, as soon as there are any that it has room for; None: the server stops."""
        if self._service.stopping.is_set():
            return None
        ask = Ask(self._service.loop.create_future(), want)
        self._line[ask] = None
        self._look()
        return await self._answer(ask)

    async def _answer(self, ask: Ask) -> Leased | None:
        try:
            return await ask.future
        finally:
            self._line.pop(ask, None)
            if ask.ticket is not None:
                self._window.leave(ask.ticket)
                self._joined.pop(ask.ticket, None)
            self._tidy()

    def stop(self) -> None:
        """The server stops: workers are sent away, and nobody waits for the end of a window."""
        for stopping in list(self._workers):
            stopping()
        for ask in list(self._line):
            _tell(ask, None)
        if self._closes is not None:
            self._close()

    @property
    def is_passing(self) -> bool:
        """Whether a pass is at the disk, behind which others wait."""
        return self._passing

    @property
    def _jitter_ms(self) -> int:
        return self._queue.topic.config.claim_jitter_ms

    def _tidy(self) -> None:
        """Let go of what nobody needs any more."""
        if not self._line and self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._joined and self._closes is not None:
            self._closes.cancel()
            self._closes = None
        if not (self._workers or self._joined or self._next or self._passing):
            self._over()

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        """Whether there is something for those in line."""
        if self._passing:
            self._again = True
        if self._passing or self._resting or not self._line:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        queue = self._queue
        if queue.topic.dropped:
            self._refuse(self._line, TopicNotFound(queue.topic.name))
            return
        try:
            most = queue.counts().ready if queue.is_quick(1) else _LINE_MAX
            asks = list(islice((ask for ask in self._line if ask.has_room), most))
            if asks and self._jitter_ms:
                self._join(asks)
            elif asks and self._pass(asks) and not any(ask.future.done() for ask in asks):
                self._rest()
            self._wait()
        except Exception as error:  # all who wait are told, whatever it is
            self._refuse(self._line, error)

    def _rest(self) -> None:
        """There are jobs and nobody got one: to look again at once would find the same."""
        self._resting = True
        self._service.loop.call_later(_PAUSE_S, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._look()

    def _wait(self) -> None:
        """Look again when something becomes claimable by itself: a lease that runs out, a job whose time has come."""
        if self._passing or self._due is not None or not self._line:
            return
        due_ms = self._queue.next_due_ms()
        if due_ms is None:
            return
        wait_s = max(due_ms - self._service.now_ms(), 1) / 1000
        self._due = self._service.loop.call_later(min(wait_s, _LOOK_S_MAX), self._timed)

    def _timed(self) -> None:
        self._due = None
        self._look()

    # ── the window ────────────────────────────────────────────────────────────────────────────

    def _join(self, asks: Iterable[Ask]) -> None:
        loop = self._service.loop
        now_ms = int(loop.time() * 1000)
        self._window.window_ms = self._jitter_ms
        for ask in asks:
            want = ask.want()
            if want is not None:
                ask.ticket = self._window.join(now_ms, want)
                self._joined[ask.ticket] = ask
        due_ms = self._window.due_ms
        if due_ms is not None and self._closes is None:
            self._closes = loop.call_later(max(due_ms - now_ms, 0) / 1000, self._close)

    def _close(self) -> None:
        if self._closes is not None:
            self._closes.cancel()
            self._closes = None
        asks = [self._joined.pop(ticket) for ticket, _ in self._window.close()]
        for ask in asks:
            ask.ticket = None
        self._pass(asks)

    # ── the pass ──────────────────────────────────────────────────────────────────────────────

    def _pass(self, asks: list[Ask]) -> bool:
        """Hand out jobs to these, in the order they came; whether that is done, or has to wait."""
        if self._passing:
            self._next += asks
            return False
        wanted = _wanted(asks)
        if not wanted:
            return True
        if not self._queue.is_quick(sum(want.most for _, want in wanted)):
            self._passing = True
            self._service.spawn(self._slowly(wanted))
            return False
        try:
            self._give(wanted, self._queue.claim_now([want for _, want in wanted]))
        except Exception as error:
            self._refuse([ask for ask, _ in wanted], error)
        return True

    async def _slowly(self, wanted: list[tuple[Ask, Want]]) -> None:
        """Passes that wait for the disk, one behind the other."""
        try:
            while wanted:
                wants = [want for _, want in wanted]
                patient = all(ask in self._line for ask, _ in wanted)
                try:
                    leased = await self._service.work(partial(_handed, self._queue, wants, patient=patient))
                except Exception as error:  # all who wait are told, whatever it is
                    self._refuse([ask for ask, _ in wanted], error)
                else:
                    self._give(wanted, leased)
                    if patient and leased and not any(got.count for got in leased):
                        self._rest()
                asks, self._next = self._next, []
                wanted = _wanted(asks)
        finally:
            self._passing = False
            if self._again:
                self._again = False
                self._look()
            else:
                self._wait()
            self._tidy()

    def _give(self, wanted: list[tuple[Ask, Want]], leased: list[Leased]) -> None:
        if not leased:
            return  # there was nothing, and all of them wait on
        for (ask, want), got in zip(wanted, leased, strict=True):
            if ask.future.done():
                self._back(want, got)
            elif got.count or ask not in self._line:
                _tell(ask, got)

    def _back(self, want: Want, got: Leased) -> None:
        """Its claimer left while the pass was at the disk: others may have these at once."""
        if not got.count:
            return
        commits = self._service.commits
        commits.when_done(self._queue.stage_nack(want.node, got.seqs, list(got.lease_ids)), _known)

    def _refuse(self, asks: Iterable[Ask], error: Exception) -> None:
        for ask in list(asks):
            if not ask.future.done():
                ask.future.set_exception(error)


def _wanted(asks: Iterable[Ask]) -> list[tuple[Ask, Want]]:
    """Those who are still there and have room."""
    return [(ask, want) for ask in asks if not ask.future.done() and (want := ask.want()) is not None]


def _handed(queue: Queue, wants: list[Want], *, patient: bool) -> list[Leased]:
    """Jobs for these; nothing at all where there is nothing to hand out and nobody needs to be told so."""
    return [] if patient and not queue.counts().ready else queue.claim_now(wants)


def _tell(ask: Ask, got: Leased | None) -> None:
    if not ask.future.done():
        ask.future.set_result(got)


def _known(token: Any) -> None:
    """Nobody waits for this outcome: a lease that could not be given back runs out."""
    assert token.done, "told when it is"


class Desks:
    """The desks of all queues that somebody waits for."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[int, Desk] = {}

    def __len__(self) -> int:
        return len(self._open)

    def now(self, queue: Queue, want: Want) -> Leased | None:
        """Jobs for a claimer without waiting; None where it has to, and `claim` of its desk does that."""
        return queue.claim_now([want])[0] if self.is_quick(queue, want) else None

    def is_quick(self, queue: Queue, want: Want) -> bool:
        """Whether this claimer need not wait: for others of its window, for a pass that is at the disk, or for it."""
        desk = self._open.get(queue.topic.id)
        if queue.topic.config.claim_jitter_ms or (desk is not None and desk.is_passing):
            return False
        return queue.is_quick(want.most)

    def of(self, queue: Queue) -> Desk:
        key = queue.topic.id
        desk = self._open.get(key)
        if desk is None:
            desk = self._open[key] = Desk(self._service, queue, lambda: self._closed(key))
        return desk

    def _closed(self, key: int) -> None:
        self._open.pop(key, None)

    def stop(self) -> None:
        for desk in list(self._open.values()):
            desk.stop()
