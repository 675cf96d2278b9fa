"""[shell] Who drives commits, and how their outcome comes back to the event loop.

    beside   requests of one turn of the loop stage their writes, and at its end they are written together; the sync
             runs in a thread of its own, and the loop goes on until it hears of it and answers every one of them.
             What would take longer to write, or a new WAL file, is the WAL's writer thread's.
    loop     the same, with the sync on the loop: everybody waits for it.

While a quick disk syncs, small writes wait in the lobby, and are taken together when it is done and all who were
answered have had a turn to come again: one batch for all of them costs less than one for each few. A disk
that is not quick is not waited for (docs/decisions/0009-where-syncs-run.md).

Under pressure commits that need a sync are gathered over more turns of the loop, as the writer thread does it: slice by
slice, until one brings nothing or the governor's window is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any, TypeVar

from tidelog.engine import Shard, Token
from tidelog.server.config import CommitMode

T = TypeVar("T")
_QUICK_US = 600  # a mean sync under this is worth waiting for with what came meanwhile
_PATIENCE_US = 5_000  # for one that takes longer than they do on average
_DECIDE_EVERY = 256  # writes between two looks at the figures
_DECIDE_BY = 16  # syncs that make a mean worth acting on
_SLICE_MS = 1.0  # timers of an event loop are no finer
Told = Callable[[Token[Any]], None]


class Commits:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        shards: Sequence[Shard],
        mode: CommitMode,
        window_ms: Callable[[], float] = lambda: 0.0,
        *,
        compiled: bool = True,
    ) -> None:
        """`window_ms`: how long commits that need a sync may be gathered. `compiled`: the kernel may sync."""
        self._loop, self._shards, self._window_ms = loop, shards, window_ms
        self._thread = get_ident()
        self.on_loop = mode == "loop"
        self._heard: list[int] = []  # descriptors that tell of syncs
        self._closed = False
        self._quick = not self.on_loop  # the disk, as far as is known: whoever waits for it anyway need not know
        self._writes = 0  # of the last batch
        self._once_more = False  # another turn was waited for
        self._alarm: asyncio.TimerHandle | None = None  # while writes wait for a sync
        self._asked = 0
        self._seen = (0, 0)  # syncs and what they took, when it was last decided
        self._told: deque[tuple[Told, Token[Any]]] = deque()
        self._holding = False  # outcomes are kept for a moment
        self._coming = False  # outcomes are on their way to the loop
        self._pumping = False  # a pump at the end of this turn is asked for
        self._arrived = 0
        self._hurried = False  # the next pump gathers nothing
        self._slices = 0  # that are left of a window
        self._slice: asyncio.TimerHandle | None = None  # the one that is under way
        self._began_s = 0.0  # and its window
        self.last_call: Callable[[], int] = lambda: 0
        """Called before a pump, so that what was kept for the end of the turn is staged; tells how much that is."""
        self.first: Callable[[], None] = lambda: None
        """Called when commits are done, before whoever wrote is told: others may wait for what they wrote."""
        self.eased: Callable[[], None] = lambda: None
        """Called when commits are done, so that there may be room for others."""
        if not self.on_loop:
            try:
                for shard in shards:
                    assert shard.threaded, "somebody has to end what cannot be synced beside"
                    self._heard.append(shard.beside(self._ended, compiled=compiled))
                    loop.add_reader(self._heard[-1], self._synced, shard)
            except BaseException:
                self.close()
                raise

    def when_done(self, token: Token[T], tell: Callable[[Token[T]], None]) -> None:
        """Have `tell(token)` called on the loop once the outcome is known. On the loop's thread."""
        if token.done:
            self._back(tell, token)
            return
        self._asked += 1
        if not self._asked % _DECIDE_EVERY and not self.on_loop:
            self._decide()
        token.add_callback(lambda known: self._back(tell, known), want=False)
        self._arrived += 1
        self.want()

    def hurry(self) -> None:
        """Somebody waits for room in a queue: gather no longer."""
        self._hurried = True
        self.want()

    def want(self) -> None:
        """Have a pump at the end of this turn."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    async def outcome(self, token: Token[T]) -> T:
        """The result of a commit, or its error raised."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.when_done(token, lambda _: None if future.done() else future.set_result(None))
        await future
        return token.wait()

    def close(self) -> None:
        """Begin nothing any more and hear of no sync: the WAL's own threads do the rest."""
        self._closed = True
        for descriptor in self._heard:
            self._loop.remove_reader(descriptor)
        self._heard.clear()
        for timer in (self._alarm, self._slice):
            if timer is not None:
                timer.cancel()
        self._slice = None

    def _decide(self) -> None:
        """Whether to wait for syncs, by what the last ones took."""
        figures = [shard.stats for shard in self._shards]
        syncs, took_us = sum(it.fsyncs for it in figures), sum(it.sync_us for it in figures)
        fresh = syncs - self._seen[0]
        if fresh >= _DECIDE_BY:
            self._quick = (took_us - self._seen[1]) / fresh < _QUICK_US
            self._seen = (syncs, took_us)

    def _look(self) -> None:
        """Writes waited for a sync a while ago: is it that one still? Then the disk is not what it was."""
        self._alarm = None
        if any(shard.begun_us >= _PATIENCE_US for shard in self._shards):
            self._quick = False
        self.want()

    def _synced(self, shard: Shard) -> None:
        """The sync of what was begun may be over."""
        try:
            self._holding = True
            try:
                over = shard.finish()
                self.first()
            finally:
                self._let_go()
            if over:
                self.eased()
        finally:
            self.want()

    def _ended(self) -> None:
        """By any thread: what was begun is over."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.want)

    def _pump(self) -> None:
        if self._quick and not self._hurried:
            if any(shard.is_begun for shard in self._shards):
                self._pumping = False  # it is asked for again when that is over
                if self._alarm is None:
                    self._alarm = self._loop.call_later(_PATIENCE_US / 1e6, self._look)
                return
            if self._writes > 1 and not self._once_more:
                self._once_more = True
                self._loop.call_soon(self._pump)
                return
        self._once_more = False
        try:
            self._writes = self.last_call()  # what is staged by it goes along and needs no turn of its own
        finally:
            self._pumping = False
        self._commit(gather=not self._hurried and self._gathers())

    def _commit(self, *, gather: bool) -> None:
        self._hurried = False
        gathered_us = 0
        if self._slice is not None and not gather:  # the window is over, or is broken off
            gathered_us = round(1e6 * (self._loop.time() - self._began_s))
            self._slice.cancel()
            self._slice = None
        self._holding = True
        try:
            for shard in self._shards:
                if gather and not shard.is_quick:
                    continue
                # Where another thread has the turn it sends the writer thread for what was staged here.
                while shard.waiting and self._commit_one(shard, gathered_us):
                    pass
                if shard.waiting and not shard.is_begun:
                    shard.want()
            self.first()
        finally:
            self._let_go()
        self.eased()

    def _commit_one(self, shard: Shard, gathered_us: int) -> bool:
        """Whether a batch was committed, or begun."""
        if self._closed:
            return False
        if not self.on_loop:
            return shard.begin(gathered_us=gathered_us)
        # A new file is the writer thread's to make: that takes milliseconds.
        return not (shard.threaded and shard.is_full) and shard.pump(blocking=False, gathered_us=gathered_us)

    def _gathers(self) -> bool:
        """Whether what needs a sync waits for more of its kind; the first that does begins a window."""
        if self._slice is None:
            self._slices = int(self._window_ms() / _SLICE_MS)
            if self._slices and not all(shard.is_quick for shard in self._shards):
                self._began_s = self._loop.time()
                self._next_slice()
        return self._slice is not None

    def _next_slice(self) -> None:
        self._slice = self._loop.call_later(_SLICE_MS / 1000, self._sliced, self._arrived)

    def _sliced(self, before: int) -> None:
        """A slice of the window is over."""
        self._slices -= 1
        if self._arrived == before or self._slices <= 0:
            self._commit(gather=False)
        else:
            self._next_slice()

    def _let_go(self) -> None:
        """Tell of what was done while outcomes were kept."""
        self._holding = False
        self._drain()

    def _back(self, tell: Told, token: Token[Any]) -> None:
        """By the committer, whichever thread that is. Nobody is told before those who were done earlier."""
        near = get_ident() == self._thread
        if near and not self._told and not self._holding:
            tell(token)
            return
        self._told.append((tell, token))
        if not (near and self._holding):
            self._ask()

    def _came(self) -> None:
        self._drain()
        self.eased()

    def _drain(self) -> None:
        self._coming = False  # first: what is appended from here on asks for another turn
        try:
            while self._told:
                tell, token = self._told.popleft()
                tell(token)
        finally:
            if self._told:  # telling somebody broke: the others are told all the same
                self._ask()

    def _ask(self) -> None:
        if not self._coming:
            self._coming = True
            self._loop.call_soon_threadsafe(self._came)
