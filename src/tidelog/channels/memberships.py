"""[policy] Which channels each user is in, and whether one more is too many. Counts, touches nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from tidelog.errors import Throttled


class Memberships:
    def __init__(self) -> None:
        self._of: dict[str, set[str]] = {}
        self._lock = Lock()

    def restore(self, users: Iterable[str], channel: str) -> None:
        """Take their places again for members that were there before, whatever the limit is now."""
        with self._lock:
            for user in users:
                self._of.setdefault(user, set()).add(channel)

    def reserve(self, user: str, channel: str, limit: int) -> None:
        """Take a place for a user; Throttled where all are taken."""
        with self._lock:
            channels = self._of.setdefault(user, set())
            if channel not in channels and len(channels) >= limit:
                if not channels:
                    del self._of[user]
                raise Throttled("channels_per_client_max", max=limit, used=len(channels), asked=1)
            channels.add(channel)

    def release(self, user: str, channel: str) -> None:
        with self._lock:
            channels = self._of.get(user, set())
            channels.discard(channel)
            if not channels:
                self._of.pop(user, None)

    def of(self, user: str) -> list[str]:
        """The channels of a user, sorted."""
        with self._lock:
            return sorted(self._of.get(user, ()))

    def users(self) -> dict[str, list[str]]:
        """All of it, for whoever wants to look."""
        with self._lock:
            return {user: sorted(channels) for user, channels in sorted(self._of.items())}
