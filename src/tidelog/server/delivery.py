"""[shell] One loop that follows topics for one peer, whatever carries it.

    bell ──► due ──► a page from its cursor ──► tombstone? ──► records? ──► caught up? ──► wait
      │                ▲                                            │                       │
      │                └──────── there is more ─────────────────────┘                       │
      └── while it waits: is all that is new at hand? then it is told, and the loop waits on ┘

A topic is registered with the bells first, then looked at, then waited for. Nearly every write finds a peer that has
everything before it, and a page that is in memory: telling it where the bell rings spares a turn of the loop and a
change of tasks for each peer. Everything else is the loop's. Topics are visited in the order of their
names, each up to the head it had at the visit, so that one that is written all the time does not hold up the others.

What a peer has not taken yet is bounded (`patience`): past a mark nothing is read for it, and when it is ready again
it gets larger pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tidelog.engine import Gap, Topic
from tidelog.errors import Error, TopicNotFound
from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.http.seam import Gone
from tidelog.server.pages import Page, View
from tidelog.server.patience import HIGH_BYTES, Patience
from tidelog.server.service import Service


class Peer(Protocol):
    """Who is told. Says it in its transport's words, and never waits except in `drained`."""

    @property
    def waiting(self) -> int: ...
    async def drained(self) -> None: ...
    def record(self, page: Page) -> None:
        """The records of a page, and behind the last ones there are that the peer is caught up."""

    def tombstone(self, name: str, gap: Gap, *, first: bool) -> None: ...
    def caught_up(self, name: str, head_seq: int) -> None: ...
    def topic_deleted(self, name: str) -> None: ...
    def stopping(self) -> None: ...
    def slow(self) -> None: ...
    def failed(self, name: str, code: str, message: str) -> None: ...


class Slot:
    """A place among the streams: given back when the stream is over, or when a stream that never began is let go."""

    def __init__(self, service: Service, principal: Principal, after: Callable[[], None] | None = None) -> None:
        self._held = self.is_revoked = False
        if not service.keys.knows(principal):
            raise Problem("unauthorized", "this key was removed or changed in the settings; nothing was done, ask anew")
        service.streams.take(principal)
        self._service, self.principal, self._after = service, principal, after
        self._task: asyncio.Task[Any] | None = None
        self._held = True
        service.slots.add(self)

    def begin(self) -> None:
        """The stream runs, in this task. Raises Gone where its key was removed meanwhile."""
        if self.is_revoked:
            raise Gone
        self._task = asyncio.current_task()

    def revoke(self) -> None:
        """The key was removed, or is for less than before: cut the stream off."""
        self.is_revoked = True
        if self._task is not None:
            self._task.cancel()

    def give(self) -> None:
        if self._held:
            self._held = False
            self._task = None
            self._service.slots.discard(self)
            self._service.streams.give(self.principal)
            if self._after is not None:
                self._after()

    # Whoever was handed the answer may drop it unread: the peer left meanwhile, or asked for the head alone.
    __del__ = give


class Follow:
    """One topic, as one peer follows it."""

    __slots__ = ("_due", "caught_up", "fresh", "name", "topic", "view")

    def __init__(self, name: str, topic: Topic | None, view: View, due: Callable[[Follow], None]) -> None:
        self.name, self.topic, self.view, self._due = name, topic, view, due
        self.fresh = True  # nothing was read yet
        self.caught_up = False  # and the peer was told so

    def wake(self) -> None:
        self._due(self)


class Delivery:
    """What one peer follows. `cursors` are moved with every frame that is handed over."""

    def __init__(self, service: Service, peer: Peer, cursors: dict[str, int], *, lasting: bool = False) -> None:
        self._service, self._peer, self._cursors = service, peer, cursors
        self._pages = service.sessions.pages
        self._lasting = lasting  # goes on when there is nothing to follow
        self._follows: dict[str, Follow] = {}
        self._due: dict[str, Follow] = {}
        self._woken = asyncio.Event()
        self._waits = False  # the loop: everybody was told everything
        self._broke: Exception | None = None  # the server's own mistake, for the loop to raise
        self._over = False
        self._patience = Patience(service.loop, peer, self._is_ending, service.refusals)

    # ── what to follow ────────────────────────────────────────────────────────────────────────

    def follow(self, name: str, topic: Topic | None, view: View, from_seq: int) -> None:
        """Follow a topic from here, in place of how it was followed before. None: it is not there any more."""
        self.unfollow(name)
        self._cursors[name] = from_seq
        follow = self._follows[name] = Follow(name, topic, view, self._rang)
        if topic is not None:
            self._service.bells.add(topic, follow.wake)  # before the first look
        self._is_due(follow)

    def unfollow(self, name: str) -> None:
        """Nothing more is said of this topic."""
        follow = self._follows.pop(name, None)
        if follow is not None and follow.topic is not None:
            self._service.bells.remove(follow.topic, follow.wake)
        if self._lasting:
            self._cursors.pop(name, None)  # a session keeps its own: they are in every id

    def close(self) -> None:
        for name in list(self._follows):
            self.unfollow(name)

    def end(self) -> None:
        """Have `run` return."""
        self._over = True
        self.wake()

    def wake(self) -> None:
        self._woken.set()
        self._patience.look()

    def _is_ending(self) -> bool:
        return self._over or self._service.stopping.is_set()

    def _rang(self, follow: Follow) -> None:
        if not self._waits or not self._at_once(follow):
            self._is_due(follow)

    def _is_due(self, follow: Follow) -> None:
        self._waits = False
        self._due[follow.name] = follow
        self.wake()

    def _at_once(self, follow: Follow) -> bool:
        """Whether the peer was told all there is, here and now. Whatever is out of the ordinary is left to the loop,
        which looks again and finds the same."""
        topic = follow.topic
        if topic is None or self._is_ending() or self._peer.waiting > HIGH_BYTES:
            return False
        found, key = self._service.bells.found, (self._cursors[follow.name], follow.view)
        try:
            if key not in found:
                found[key] = self._pages.newest(topic, *key)
                topic.touch()
            page = found[key]
        except Exception:  # whatever it is, it is this peer's: the bell's turn is everybody's
            return False
        if page is None or not page.caught_up:
            return False
        try:
            self._tell(follow, page)
        except Exception as error:  # as above, and the loop would not find it again
            self._broke = error
            self.wake()
        return True

    # ── the loop ──────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Deliver until the server stops or nothing is left to follow. Raises Gone where the peer is, and TooSlow."""
        stopping = self._service.stopping
        while not stopping.is_set():
            due, self._due = self._due, {}
            for name in sorted(due):
                await self._visit(due[name])
            if self._over or not (self._follows or self._lasting):
                return
            if self._due:
                await asyncio.sleep(0)
            else:
                self._woken.clear()
                self._waits = True
                await self._woken.wait()
                self._waits = False
            if self._broke is not None:
                raise self._broke
        if not self._over:
            self._peer.stopping()

    def _is_on(self, follow: Follow) -> bool:
        """Whether this is still wanted: it may have been given up, or replaced, while something was waited for."""
        return self._follows.get(follow.name) is follow and not self._is_ending()

    async def _visit(self, follow: Follow) -> None:
        """Bring a peer up to the head that the topic has now."""
        name, topic, service = follow.name, follow.topic, self._service
        head_seq = 0 if topic is None else topic.head_seq
        while self._is_on(follow):
            if topic is None:
                self.unfollow(name)
                self._peer.topic_deleted(name)
                return
            if self._peer.waiting > HIGH_BYTES:
                await self.room()
                if not self._is_on(follow):
                    return
            try:
                page = await self._pages.get(topic, self._cursors[name], follow.view, service.work)
            except TopicNotFound:
                topic = None
                continue
            except Error as error:
                if self._is_on(follow):
                    self._failed(follow, error)
                return
            if not self._is_on(follow):
                return
            topic.touch()
            self._tell(follow, page)
            if page.caught_up:
                return
            if page.next_from_seq >= head_seq:
                self._due[name] = follow  # written meanwhile: after the others
                return
            await asyncio.sleep(0)

    def _tell(self, follow: Follow, page: Page) -> None:
        name, gap = follow.name, page.gap
        if gap is not None:
            # Where the topic is another one now, this is its beginning and not the end of what is missing.
            self._cursors[name] = gap.earliest_seq - 1
            self._peer.tombstone(name, gap, first=follow.fresh)
        follow.fresh = False
        self._cursors[name] = page.next_from_seq
        if page.count or gap is not None:
            follow.caught_up = False
            self._service.metrics.read(name, page.count, gap=gap is not None)
        if page.count:
            self._peer.record(page)
        elif page.caught_up and not follow.caught_up:
            self._peer.caught_up(name, page.head_seq)
        follow.caught_up = follow.caught_up or page.caught_up

    def _failed(self, follow: Follow, error: Error) -> None:
        """Records that cannot be read: going on behind them would hide that."""
        problem = of_error(error)
        self.unfollow(follow.name)
        self._peer.failed(follow.name, problem.code, problem.message)
        self._over = self._over or not self._lasting

    async def room(self) -> None:
        """Wait until the peer has taken most of what it was sent, or all is over."""
        await self._patience.room()


class Beating(Protocol):
    """A stream that is kept alive."""

    sent_s: float  # when something was last said, by the loop's clock

    @property
    def waiting(self) -> int: ...
    def heartbeat(self, epoch_ms: int) -> None: ...


class Pulse:
    """Heartbeats of one stream: something is said when nothing was said for so long."""

    def __init__(self, service: Service, events: Beating, every_ms: int) -> None:
        self._service, self._events, self._every_s = service, events, every_ms / 1000
        self._timer = service.loop.call_later(self._every_s, self._beat)

    def _beat(self) -> None:
        loop, events = self._service.loop, self._events
        due_s = events.sent_s + self._every_s
        if loop.time() >= due_s:
            try:
                if not events.waiting:  # a peer that has not taken the last word needs no other
                    events.heartbeat(self._service.clock.now_us() // 1000)
            except Exception as error:
                self._service.health.failed("heartbeats", error)
            else:
                self._service.health.recovered("heartbeats")
            due_s = loop.time() + self._every_s
        self._timer = loop.call_at(due_s, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
