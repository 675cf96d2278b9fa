"""Watch sessions (contract 3.7): ids that cannot be guessed, five idle minutes, a limit that is checked at creation."""

from __future__ import annotations

import re
from random import Random

import pytest

from tidelog.engine import SEQ_MAX, FieldSelection
from tidelog.server.auth import ANONYMOUS
from tidelog.server.errors import ApiError
from tidelog.server.push.page_cache import ReadOptions
from tidelog.server.push.topic_stream import TTL_MS, WatchSession, WatchSessions
from tidelog.testing import ManualClock

VIEW = ReadOptions(256, 262_144, frozenset(), FieldSelection())


def add(sessions: WatchSessions, **cursors: int) -> WatchSession:
    return sessions.add(ANONYMOUS, VIEW, 15_000, cursors, dict.fromkeys(cursors, 1))


def test_session_id_is_26_characters_of_16_random_bytes() -> None:
    """Contract 1.5. Method: a source that says which bytes; the two that differ between the alphabets among them."""
    sizes: list[int] = []

    def chance(size: int) -> bytes:
        sizes.append(size)
        return b"\xfb\xef\xff" * 5 + b"\x00"

    session = add(WatchSessions(0, ManualClock(), random_bytes=chance))
    assert sizes == [16]
    assert session.wid == "wid_" + "--__" * 5 + "AA"
    assert len(session.wid) == 26


def test_session_ids_of_the_default_source_differ() -> None:
    sessions = WatchSessions(0, ManualClock())
    wids = {add(sessions).wid for _ in range(100)}
    assert len(wids) == len(sessions) == 100
    assert all(re.fullmatch(r"wid_[A-Za-z0-9_-]{22}", wid) for wid in wids)


def test_idle_session_is_removed_after_five_minutes_and_not_before() -> None:
    clock = ManualClock()
    sessions = WatchSessions(0, clock)
    old = add(sessions)
    clock.tick(TTL_MS)
    sessions.remove_expired()
    assert sessions.find(old.wid) is old, "idle for exactly the limit: not over it"
    young = add(sessions)
    clock.tick(1)
    sessions.remove_expired()
    assert sessions.find(old.wid) is None
    assert sessions.find(young.wid) is young
    assert len(sessions) == 1


def test_expired_session_that_was_not_removed_yet_opens_and_removes_the_others() -> None:
    clock = ManualClock()
    sessions = WatchSessions(0, clock)
    stale, other = add(sessions), add(sessions)
    clock.tick(10 * TTL_MS)
    assert sessions.find(stale.wid) is stale
    sessions.on_stream_opened(stale, {})
    assert sessions.find(stale.wid) is stale
    assert sessions.find(other.wid) is None


def test_session_with_a_stream_is_not_removed_and_idles_after_its_last_stream() -> None:
    clock = ManualClock()
    sessions = WatchSessions(0, clock)
    session = add(sessions)
    first: dict[str, int] = {}
    second: dict[str, int] = {}
    sessions.on_stream_opened(session, first)
    sessions.on_stream_opened(session, second)
    clock.tick(10 * TTL_MS)
    sessions.remove_expired()
    sessions.on_stream_closed(session, first)
    clock.tick(10 * TTL_MS)
    sessions.remove_expired()
    assert sessions.find(session.wid) is session, "one of its two streams is still open"
    sessions.on_stream_closed(session, second)
    clock.tick(TTL_MS)
    sessions.remove_expired()
    assert sessions.find(session.wid) is session
    clock.tick(1)
    sessions.remove_expired()
    assert sessions.find(session.wid) is None


def test_least_recently_used_session_is_removed_first() -> None:
    """Method: seeded chance opens and closes sessions; a plain list of times says who must be left."""
    random, clock = Random(7), ManualClock()
    sessions = WatchSessions(0, clock)
    used: dict[str, int] = {}
    made: dict[str, WatchSession] = {}
    for _ in range(400):
        clock.tick(random.randrange(20_000))
        if random.random() < 0.5 or not made:
            session = add(sessions)
            made[session.wid] = session
        else:
            session = random.choice(list(made.values()))
            if sessions.find(session.wid) is None:
                continue
            cursors: dict[str, int] = {}
            sessions.on_stream_opened(session, cursors)
            clock.tick(random.randrange(5_000))
            sessions.on_stream_closed(session, cursors)
        used[session.wid] = clock.monotonic_ms()
        sessions.remove_expired()
        living = {wid for wid, at in used.items() if clock.monotonic_ms() - at <= TTL_MS}
        assert {wid for wid in made if sessions.find(wid)} == living


def test_session_over_the_limit_is_rejected_and_leaves_no_trace() -> None:
    """Contract 1.12."""
    clock = ManualClock()
    sessions = WatchSessions(2, clock)
    first = add(sessions)
    add(sessions)
    with pytest.raises(ApiError) as caught:
        add(sessions)
    assert (caught.value.status, caught.value.code) == (429, "throttled")
    assert caught.value.detail == {"limit": "watch_sessions", "max": 2}
    assert len(sessions) == 2
    sessions.on_stream_opened(first, {})
    clock.tick(TTL_MS + 1)
    sessions.remove_expired()
    add(sessions)
    assert len(sessions) == 2


def test_limit_of_0_means_no_limit() -> None:
    sessions = WatchSessions(0, ManualClock())
    for _ in range(50):
        add(sessions)
    assert len(sessions) == 50


def test_last_event_id_moves_a_stream_back_and_never_forward() -> None:
    """Contract 3.7: `min`; topics that are not followed do not count."""
    session = add(WatchSessions(0, ManualClock()), a=5, b=5, c=5, d=0)
    started = session.stream_cursors({"a": 3, "b": 9, "c": -1, "d": 2, "other": 0}, session.epochs)
    assert started == {"a": 3, "b": 5, "c": 5, "d": 0}
    assert session.cursors == {"a": 5, "b": 5, "c": 5, "d": 0}, "a stream has cursors of its own"


def test_each_stream_moves_its_own_cursors() -> None:
    sessions = WatchSessions(0, ManualClock())
    session = add(sessions, a=0)
    old = session.stream_cursors({}, session.epochs)
    sessions.on_stream_opened(session, old)
    old["a"] = 10
    new = session.stream_cursors({"a": 1}, session.epochs)
    sessions.on_stream_opened(session, new)
    assert new == {"a": 1}
    old["a"] = 50
    assert session.stream_cursors({}, session.epochs) == {"a": 1}, (
        "without an id a stream continues from the newest one"
    )
    assert session.stream_cursors({"a": 50}, session.epochs) == {"a": 50}, "the other stream was sent that far"
    assert session.stream_cursors({"a": 51}, session.epochs) == {"a": 50}
    sessions.on_stream_closed(session, old)
    assert session.stream_cursors({"a": 51}, session.epochs) == {"a": 50}, "also after it has ended"
    sessions.on_stream_closed(session, new)
    assert session.stream_cursors({}, session.epochs) == {"a": 1}


def test_recreated_topic_is_read_from_its_beginning_until_the_client_has_its_epoch() -> None:
    sessions = WatchSessions(0, ManualClock())
    session = add(sessions, a=0, b=0)
    old = session.stream_cursors({}, session.epochs)
    sessions.on_stream_opened(session, old)
    old.update(a=7, b=7)
    now = {"a": 2, "b": 1}
    assert session.stream_cursors({}, now)["a"] == SEQ_MAX
    first = session.stream_cursors({"a": 7, "b": 7}, now)
    sessions.on_stream_opened(session, first)
    assert (first["a"], first["b"]) == (SEQ_MAX, 7)
    seen = dict(first)
    first["a"] = 3
    assert session.stream_cursors({"a": 3, "b": 7}, now)["a"] == SEQ_MAX, "an id of the old topic, whatever its number"
    assert session.stream_cursors(seen, now)["a"] == SEQ_MAX, "an id from before the client had the epoch"
    assert session.stream_cursors(dict(first), now) == first
    assert session.stream_cursors({}, now) == first
    assert session.stream_cursors(dict(first), {"a": 3, "b": 1})["a"] == SEQ_MAX, "and made again once more"
