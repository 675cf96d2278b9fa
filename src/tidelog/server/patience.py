"""[shell] A peer that is slow, and how long it is waited for.

    waiting ≤ 256 KiB ──► more is made for it
    waiting > 256 KiB ──► nothing is, until it has taken most of it ──► told after 5 s ──► let go after 30 s

Whoever takes anything at all has time; only a peer that takes nothing is given up. Nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from tidelog.server.http.refusals import Refusals
from tidelog.server.http.seam import Gone

HIGH_BYTES: Final = 256 << 10  # not taken yet: past it nothing more is read for a peer
GRACE_S: Final = 5.0  # without taking anything, before a peer is told
CLOSE_S: Final = 30.0  # and before it is let go; a multiple of the grace


class TooSlow(Gone):
    """A peer that takes nothing. As good as gone: an end would not reach it either."""


class Taker(Protocol):
    """Who is sent something."""

    @property
    def waiting(self) -> int: ...
    async def drained(self) -> None: ...
    def slow(self) -> None:
        """Tell it that it takes nothing."""


class Patience:
    """With one peer. `is_ending`: nobody is waited for any more."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: Taker, is_ending: Callable[[], bool], refusals: Refusals
    ) -> None:
        self._loop, self._peer, self._is_ending, self._refusals = loop, peer, is_ending, refusals
        self._waiting = asyncio.Lock()  # one at a time waits for the peer
        self._timeout: asyncio.Timeout | None = None

    def look(self) -> None:
        """At the end nobody waits for the peer."""
        if self._is_ending() and self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    async def room(self) -> None:
        """Wait until the peer has taken most of what it was sent, or all is over. Raises TooSlow, and Gone."""
        async with self._waiting:
            left, stalled_s = self._peer.waiting, 0.0
            while self._peer.waiting > HIGH_BYTES and not self._is_ending():
                try:
                    async with asyncio.timeout(GRACE_S) as self._timeout:
                        await self._peer.drained()
                    return
                except TimeoutError:
                    pass
                finally:
                    self._timeout = None
                if self._is_ending():
                    return
                stalled_s = 0.0 if self._peer.waiting < left else stalled_s + GRACE_S
                if stalled_s >= CLOSE_S:
                    said = f"a consumer took nothing for {CLOSE_S:g} s; its stream was closed"
                    self._refusals.count("slow_consumer", "", said)
                    raise TooSlow
                if stalled_s == GRACE_S:
                    self._peer.slow()
                left = self._peer.waiting
