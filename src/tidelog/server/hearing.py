"""[shell] One member who listens to one channel, over whatever carries it.

    open ──► (catch up from the history) ──► begin ──► push, whenever it is woken ──► over
                                                        │  ▲
                             takes nothing: held ───────┘  └── resume, once it has taken most of it

Subscribed first and caught up then: what is said meanwhile waits in the queue, and what is in both is sent once, by its
seq. A receiver that is held keeps nobody waiting: its queue is bounded, and one that runs full is the end of it, told
as such. The history has the rest, from the last seq that was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from tidelog.channels import Cut, Event, Message, Subscription, talk
from tidelog.errors import Error, Forbidden, NotPersistent, WrongType
from tidelog.server.api.problem import of_error
from tidelog.server.channel_frames import Kept, Render
from tidelog.server.patience import HIGH_BYTES
from tidelog.server.rooms import Rooms

_TAKE: Final = 64  # events between two looks at what the peer has taken


class Peer(Protocol):
    """Who is told."""

    @property
    def render(self) -> Render: ...
    @property
    def waiting(self) -> int: ...
    def frames(self, made: list[bytes]) -> None: ...
    def gap(self, channel: str, first: int, last: int) -> None: ...
    def failed(self, channel: str, code: str, message: str) -> None: ...


class Receiver:
    """On the loop's thread. `stirred` is called when it is held or over."""

    def __init__(self, rooms: Rooms, channel: str, user: str, stirred: Callable[[], None], source: object) -> None:
        self._rooms, self.channel, self.user, self._stirred = rooms, channel, user, stirred
        self.source = source
        self.head_seq = 0  # of the channel when it was subscribed to, where it keeps nothing
        self.sent = 0  # the last seq that was handed to the peer
        self.over = False
        self.held = True  # until it begins
        self._closed = False
        self._peer: Peer | None = None
        self._subscription: Subscription | None = None

    # ── the beginning and the end ─────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Hear of everything from now on. Raises what the channel says."""
        self._rooms.receivers[self] = None
        try:
            await self._rooms.work(self._open)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        manager = self._rooms.manager
        with manager.locked(self.channel):
            made = talk.subscribe(manager, self.channel, self.user, wake=self._wake, source=self.source)
            room = manager.room(self.channel)
            self.head_seq = 0 if room.meta.config.persist else room.next_seq - 1
        self._subscription = made
        if self._closed:  # by the loop meanwhile: one of the two sees the other
            made.close()

    def close(self) -> None:
        """Hear no more. Membership stays."""
        if not self._closed:
            self._closed = self.over = True
            self._rooms.receivers.pop(self, None)
            if self._subscription is not None and not self._subscription.closed:
                self._rooms.later(self._subscription.close)

    def _wake(self) -> None:
        self._rooms.wake(self)

    def poke(self) -> None:
        """The server stops."""
        self._stirred()

    # ── what was missed ───────────────────────────────────────────────────────────────────────

    async def catch_up(self, peer: Peer, after: int, room: Callable[[], Awaitable[None]]) -> None:
        """Send what the history has behind seq `after`, up to where it was when this began."""
        manager, channel, last = self._rooms.manager, self.channel, 0
        self.sent = after
        while not self.over:
            first = self.sent + 1
            try:
                page = await self._rooms.work(lambda: talk.history(manager, channel, self.user, first=first))  # noqa: B023 - awaited here
            except NotPersistent:
                if self.sent < self.head_seq:
                    peer.gap(channel, self.sent + 1, self.head_seq)
                    self.sent = self.head_seq
                return
            except (WrongType, Forbidden):
                return  # there is nothing that this user could have missed
            except Error as error:
                problem = of_error(error)
                peer.failed(channel, problem.code, problem.message)
                self.end()
                return
            last = last or page.last_seq
            if first > page.last_seq + 1:
                self.sent = page.last_seq  # of a channel that ended and was made again
            elif first < page.first_seq:
                peer.gap(channel, first, page.first_seq - 1)
                self.sent = page.first_seq - 1
            if page.messages:
                peer.frames([peer.render(message) for message in page.messages])
                self.sent = page.messages[-1].seq
            if self.sent >= last or not page.messages:
                return
            if peer.waiting > HIGH_BYTES:
                await room()

    # ── what comes ────────────────────────────────────────────────────────────────────────────

    def begin(self, peer: Peer) -> None:
        """Send what waits, and whatever comes from now on."""
        self._peer = peer
        self.resume()

    def resume(self) -> None:
        """The peer has taken most of what it was sent."""
        self.held = False
        self.push(Kept())

    def push(self, kept: Kept) -> None:
        """Send what waits, as far as the peer takes it."""
        subscription, peer = self._subscription, self._peer
        if subscription is None or peer is None or self.over:
            return
        if self.held:
            if subscription.closed:
                self._rest(subscription, peer)
            return
        while True:
            if peer.waiting > HIGH_BYTES:
                self.held = True
                self._stirred()
                return
            events = subscription.take(_TAKE)
            if not events:
                return
            self._send(events, peer, kept)
            if isinstance(events[-1], Cut):
                self.end()
                return

    def _rest(self, subscription: Subscription, peer: Peer) -> None:
        """It is over for a peer that takes nothing: what it has no room for is not sent to it any more."""
        events = subscription.take()
        last = events[-1] if events else None
        if isinstance(last, Cut) and last.reason in ("slow", "broken"):
            events = [last._replace(last_seq=self.sent)]
        self._send(events, peer, Kept())
        self.end()

    def _send(self, events: list[Event], peer: Peer, kept: Kept) -> None:
        made, render = [], peer.render
        for event in events:
            if isinstance(event, Message):
                if event.seq <= self.sent:
                    continue  # it was in the history
                self.sent = event.seq
            made.append(kept.frame(event, render))
        if made:
            peer.frames(made)

    def end(self) -> None:
        """Nothing more is said to it."""
        self.over = True
        self._stirred()


class Stir:
    """Something happened to a receiver that its own task has to look at."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
