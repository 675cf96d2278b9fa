"""Watch sessions: the topics and options of a watch, kept between `POST /v0/watch` and its streams.

    POST watch ──► WatchSession ──► GET stream, as often as its connection breaks ──► idle for five minutes: removed
                      └── every stream has cursors of its own

A server may notice the end of a connection minutes after the client has opened the next one; if both moved one cursor,
the new stream would skip records that only the old one was sent.

Without keys a session's id is the secret that opens it, so it comes from a cryptographic random source. Sessions do not
outlive the process.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tidelog.clock import Clock
from tidelog.engine import SEQ_MAX
from tidelog.server.auth import ConcurrencyLimit, Principal
from tidelog.server.push.page_cache import ReadOptions

TTL_MS: Final = 300_000
_SESSION_ID_BYTES: Final = 16
_EPOCH_PREFIX: Final = "\0"  # before a topic's name, in cursors; no name has it


@dataclass(slots=True, eq=False)
class WatchSession:
    wid: str
    principal: Principal  # its creator: only that key may open it, and its streams count for that key
    options: ReadOptions
    heartbeat_ms: int
    cursors: dict[str, int]  # by topic: the last seq that the newest stream was sent
    epochs: dict[str, int]  # by topic: of the topics that existed when the session was created
    stream_count: int = field(default=0, init=False)
    last_used_ms: int = field(default=0, init=False)  # when it was created, or its last stream ended
    _open_cursors: list[dict[str, int]] = field(default_factory=list, init=False)  # the cursors of the open streams
    _highest_sent: dict[str, int] = field(
        default_factory=dict, init=False
    )  # by topic: the highest seq of an ended stream

    def stream_cursors(self, last_event_id: Mapping[str, int], epochs: Mapping[str, int]) -> dict[str, int]:
        """Return the cursors of a new stream. `epochs` are those of the topics that exist now.

        A topic that the client's last event id names continues there, but never after the highest seq that any
        stream of this session was sent. The others continue where the newest stream is.

        Where a topic was dropped and created again, a position of the old one is meaningless. Cursors of the new one
        carry its epoch, in an entry of its own; without that entry the stream begins after every seq, which reads as a
        `recreated` gap and then the first record.
        """
        cursors = dict(self.cursors)
        for name, seq in last_event_id.items():
            if name in self.epochs and seq >= 0:
                sent = (stream.get(name, 0) for stream in (*self._open_cursors, self._highest_sent, self.cursors))
                cursors[name] = min(seq, max(sent))
        for name, epoch in epochs.items():
            if epoch != self.epochs[name]:
                known = last_event_id if name in last_event_id else self.cursors
                if known.get(_EPOCH_PREFIX + name) != epoch or known[name] == SEQ_MAX:
                    cursors[name] = SEQ_MAX
                cursors[_EPOCH_PREFIX + name] = epoch
        return cursors

    def on_stream_opened(self, cursors: dict[str, int]) -> None:
        """Register a stream, which moves these cursors; the session continues from the newest stream's."""
        self.stream_count += 1
        self._open_cursors.append(cursors)
        self.cursors = cursors

    def on_stream_closed(self, cursors: dict[str, int]) -> None:
        self.stream_count -= 1
        self._open_cursors = [stream for stream in self._open_cursors if stream is not cursors]
        for name, seq in cursors.items():
            self._highest_sent[name] = max(seq, self._highest_sent.get(name, 0))


class WatchSessions:
    """The watch sessions of a server. On the event loop's thread."""

    def __init__(
        self,
        limit: int,
        clock: Clock,
        limit_per_key: int = 0,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._limit = ConcurrencyLimit("watch sessions", limit, limit_per_key, "watch_sessions")
        self._clock, self._random_bytes = clock, random_bytes
        self._by_id: dict[str, WatchSession] = {}
        self._idle: dict[str, WatchSession] = {}  # without a stream; the least recently used comes first

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        principal: Principal,
        options: ReadOptions,
        heartbeat_ms: int,
        cursors: dict[str, int],
        epochs: dict[str, int],
    ) -> WatchSession:
        """Create a session. Raises ApiError where a limit is reached."""
        self._limit.acquire(principal)
        wid = "wid_" + urlsafe_b64encode(self._random_bytes(_SESSION_ID_BYTES)).rstrip(b"=").decode()
        session = self._by_id[wid] = WatchSession(wid, principal, options, heartbeat_ms, cursors, epochs)
        self._mark_idle(session)
        return session

    def find(self, wid: str) -> WatchSession | None:
        return self._by_id.get(wid)

    def on_stream_opened(self, session: WatchSession, cursors: dict[str, int]) -> None:
        """Register a stream. A session that was not removed yet is kept, however long it was idle."""
        session.on_stream_opened(cursors)
        self._idle.pop(session.wid, None)
        self.remove_expired()

    def on_stream_closed(self, session: WatchSession, cursors: dict[str, int]) -> None:
        session.on_stream_closed(cursors)
        if not session.stream_count:
            self._mark_idle(session)

    def remove_expired(self) -> None:
        """Remove the sessions that have had no stream for `TTL_MS`."""
        oldest_ms = self._clock.monotonic_ms() - TTL_MS
        while self._idle:
            wid, session = next(iter(self._idle.items()))
            if session.last_used_ms >= oldest_ms:
                return
            del self._idle[wid], self._by_id[wid]
            self._limit.release(session.principal)

    def _mark_idle(self, session: WatchSession) -> None:
        session.last_used_ms = self._clock.monotonic_ms()
        self._idle[session.wid] = session
