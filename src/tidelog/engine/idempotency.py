"""[policy] The idempotency keys of one topic: a write that is sent again gets the first one's answer.

                  hold                    remember
    (unknown) ───────────▶ Pending(token) ──────────▶ Done(outcome, at_ms)
        ▲                        │                          │
        └──────── forget ────────┘                          │
        └───────────────── now − at_ms > window ────────────┘

While the first write is under way, a second one with its key is given its token to wait on; it
shares its fate. A write that failed is forgotten, so that sending it again may succeed. What was
written is not compared: the key alone decides.

A key lies in the WAL in front of the records that were written under it (`WriteKey`), in the same
commit, and from the next checkpoint on in the manifest's row of the topic. So after a restart it is
known if and only if its records survived, for the rest of its window by the wall clock. Records of
an ephemeral topic do not, and neither do their keys. At most `KEYS_MAX` keys of a topic are known,
those of the newest writes.

The owner's lock guards all of it. Time comes in and should be of a clock that does not go back:
whether a key is found is decided by its own time alone, but keys are forgotten oldest write first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from tidelog.clock import Clock
from tidelog.engine.results import Appended

P = TypeVar("P")  # what a second caller waits on
T = TypeVar("T")  # what it is answered

KEYS_MAX: Final = 1 << 18  # of one topic: two minutes of 2,000 keyed writes a second, about 80 MB
FORGET_MAX: Final = 64  # keys a call forgets at most: no write pays for a burst two minutes ago


class Pending(NamedTuple, Generic[P]):
    """The write of this key is under way."""

    token: P


class Done(NamedTuple, Generic[T]):
    """The write of this key was acked."""

    outcome: T
    at_ms: int
    kept: bool = True  # its records outlive the process


class Window(Generic[P, T]):
    """Key → what became of its write. Every call is bounded work, however many keys there are."""

    def __init__(self) -> None:
        self._pending: dict[str, P] = {}
        # Not a dict: finding its first key walks over all that were taken from its front.
        self._done: OrderedDict[str, Done[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending) + len(self._done)

    def lookup(self, key: str, now_ms: int, window_ms: int) -> Pending[P] | Done[T] | None:
        """What is known of this key; None: the write is the first one, or the first within the window."""
        if key in self._pending:
            return Pending(self._pending[key])
        done = self._done.get(key)
        return done if done is not None and now_ms - done.at_ms <= window_ms else None

    def hold(self, key: str, token: P) -> None:
        """The caller's write goes ahead under this key. Only after a lookup that found nothing."""
        assert key not in self._pending, "another write of this key is under way"
        self._done.pop(key, None)  # outlived its window
        self._pending[key] = token

    def remember(self, key: str, outcome: T, now_ms: int, *, kept: bool = True) -> None:
        """The write was acked now; its window begins."""
        self._pending.pop(key, None)
        self._done[key] = Done(outcome, now_ms, kept)
        self._done.move_to_end(key)
        if len(self._done) > KEYS_MAX:
            self._done.popitem(last=False)

    def kept(self) -> list[tuple[str, Done[T]]]:
        """Every acked key whose records outlive the process, oldest first: a copy, for a reader without the lock."""
        return [each for each in self._done.items() if each[1].kept]

    def forget(self, key: str) -> None:
        """The held write failed: the next one of this key is the first."""
        self._pending.pop(key, None)

    def forget_expired(self, now_ms: int, window_ms: int, most: int = FORGET_MAX) -> int:
        """Let go of keys whose window is over, oldest first, `most` at once; return how many.

        Call it with every write that brings a key: it forgets faster than writes can remember.
        """
        count = 0
        while count < most and self._done:
            key = next(iter(self._done))
            if now_ms - self._done[key].at_ms <= window_ms:
                break
            del self._done[key]
            count += 1
        return count


# ── over a restart ────────────────────────────────────────────────────────────────────────────────


def rows(
    kept: Iterable[tuple[str, Done[Appended]]], head: int, clock: Clock, window_ms: int
) -> tuple[tuple[str, int, int, int], ...]:
    """Keys for the manifest, which holds records up to `head`: key, first seq, last seq, and when it was acked, by the
    wall clock. A key of later records is the WAL's to tell of."""
    now_ms, ago_ms = clock.monotonic_ms(), clock.now_us() // 1000 - clock.monotonic_ms()
    return tuple(
        (key, done.outcome.first_seq, done.outcome.last_seq, max(done.at_ms + ago_ms, 0))
        for key, done in kept
        if done.outcome.last_seq <= head and now_ms - done.at_ms <= window_ms
    )


def restore(window: Window[P, Appended], found: Iterable[tuple[str, int, int, int]], clock: Clock) -> None:
    """Remember keys that a restart found, with the age that they have by the wall clock: 0 where that went back."""
    now_ms, wall_ms = clock.monotonic_ms(), clock.now_us() // 1000
    for key, first, last, acked_ms in found:
        window.remember(key, Appended(first, last, last), now_ms - max(wall_ms - acked_ms, 0))
