"""[policy] Watch sessions: what somebody wants to follow, kept between the request that says so and the streams.

    POST watch ──► Session ──► GET stream, as often as its connection breaks ──► idle for five minutes: collected
                      └── cursors: how far it was sent, the same for all its streams

A session's id is the secret that opens it where there are no keys, so it comes from a source that cannot be guessed.
Nothing of this outlives the process.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tidelog.clock import Clock
from tidelog.server.api.auth import Principal
from tidelog.server.api.problem import Problem
from tidelog.server.pages import Pages, View

TTL_MS: Final = 300_000
_WID_BYTES: Final = 16


@dataclass(slots=True, eq=False)
class Session:
    wid: str
    principal: Principal  # who made it: nobody else may open it, and its streams count as theirs
    view: View
    heartbeat_ms: int
    cursors: dict[str, int]  # by topic: the last seq that was handed to the transport
    streams: int = field(default=0, init=False)
    used_ms: int = field(default=0, init=False)  # when it was made, or its last stream ended

    def rewind(self, cursors: dict[str, int]) -> None:
        """Go back to where a client says it is; never forward, and only for topics that are followed."""
        for name, seq in cursors.items():
            if 0 <= seq < self.cursors.get(name, 0):
                self.cursors[name] = seq


class Sessions:
    """The sessions of a server, and the pages that watchers share. All of it on the event loop's thread."""

    def __init__(self, limit: int, clock: Clock, chance: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._limit, self._clock, self._chance = limit, clock, chance
        self._known: dict[str, Session] = {}
        self._idle: dict[str, Session] = {}  # without a stream; who was used longest ago comes first
        self.pages = Pages()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, principal: Principal, view: View, heartbeat_ms: int, cursors: dict[str, int]) -> Session:
        """A new session. Raises where there are as many as may be."""
        if self._limit and len(self._known) >= self._limit:
            raise Problem(
                "throttled",
                f"{self._limit} watch sessions at once are the limit; nothing was done, retry",
                {"limit": "watch_sessions", "max": self._limit},
            )
        wid = "wid_" + urlsafe_b64encode(self._chance(_WID_BYTES)).rstrip(b"=").decode()
        session = self._known[wid] = Session(wid, principal, view, heartbeat_ms, cursors)
        self._rest(session)
        return session

    def find(self, wid: str) -> Session | None:
        return self._known.get(wid)

    def opened(self, session: Session) -> None:
        """A stream of it begins. A session that nobody has collected yet lives on, however long it was idle."""
        session.streams += 1
        self._idle.pop(session.wid, None)
        self.collect()

    def closed(self, session: Session) -> None:
        """A stream of it is over."""
        session.streams -= 1
        if not session.streams:
            self._rest(session)

    def collect(self) -> None:
        """Forget the sessions that have had no stream for too long."""
        oldest_ms = self._clock.monotonic_ms() - TTL_MS
        while self._idle:
            wid, session = next(iter(self._idle.items()))
            if session.used_ms >= oldest_ms:
                return
            del self._idle[wid], self._known[wid]

    def _rest(self, session: Session) -> None:
        session.used_ms = self._clock.monotonic_ms()
        self._idle[session.wid] = session
