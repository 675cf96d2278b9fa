"""The idempotency window of a topic, against a plain list of what happened. The rules: contract section 1.11."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.engine.harness import RESTARTS, EngineHarness, Restart

from tidelog.engine import idempotency
from tidelog.engine.idempotency import FORGET_KEYS_MAX, AckedWrite, IdempotencyWindow, PendingWrite
from tidelog.testing import ManualClock

Seqs: TypeAlias = tuple[int, int]


def window() -> IdempotencyWindow[str, Seqs]:
    return IdempotencyWindow()


def acked(keys: IdempotencyWindow[str, Seqs], key: str, seqs: Seqs, now_ms: int) -> None:
    keys.begin(key, f"token of {key}")
    keys.complete(key, seqs, now_ms)


def test_a_write_sent_again_gets_the_first_answer() -> None:
    keys = window()
    assert keys.lookup("a", 1_000, 50) is None
    acked(keys, "a", (1, 3), 1_000)
    assert keys.lookup("a", 1_020, 50) == AckedWrite((1, 3), 1_000)
    assert keys.lookup("A", 1_020, 50) is None, "another key"


@pytest.mark.parametrize("window_ms", [0, 1, 120_000])
def test_a_key_is_known_up_to_the_last_millisecond_of_its_window(window_ms: int) -> None:
    keys = window()
    acked(keys, "a", (1, 1), 5_000)
    assert keys.lookup("a", 5_000 + window_ms, window_ms) == AckedWrite((1, 1), 5_000)
    assert keys.lookup("a", 5_001 + window_ms, window_ms) is None
    assert keys.forget_expired(5_000 + window_ms, window_ms) == 0
    assert keys.forget_expired(5_001 + window_ms, window_ms) == 1
    assert len(keys) == 0


def test_a_second_caller_waits_on_the_first_ones_token() -> None:
    """However long the first write takes: only its ack starts the window."""
    keys = window()
    keys.begin("a", "first")
    assert keys.lookup("a", 0, 50) == PendingWrite("first")
    assert keys.lookup("a", 10_000, 50) == PendingWrite("first")
    assert keys.forget_expired(10_000, 50) == 0
    keys.complete("a", (7, 7), 10_000)
    assert keys.lookup("a", 10_050, 50) == AckedWrite((7, 7), 10_000)


def test_two_writes_of_one_key_are_never_under_way_together() -> None:
    keys = window()
    keys.begin("a", "first")
    with pytest.raises(AssertionError):
        keys.begin("a", "second")
    assert keys.lookup("a", 0, 50) == PendingWrite("first")


def test_a_failed_write_leaves_no_trace() -> None:
    keys = window()
    keys.begin("a", "first")
    keys.abort("a")
    assert keys.lookup("a", 0, 50) is None
    assert len(keys) == 0
    acked(keys, "a", (2, 2), 5)
    assert keys.lookup("a", 5, 50) == AckedWrite((2, 2), 5)


def test_a_failed_write_takes_nothing_from_one_that_was_acked() -> None:
    keys = window()
    acked(keys, "a", (1, 1), 0)
    keys.abort("a")
    assert keys.lookup("a", 0, 50) == AckedWrite((1, 1), 0)


def test_a_key_used_again_after_its_window_starts_a_new_one() -> None:
    """And comes after younger keys: forgetting goes by the time of the last write."""
    keys = window()
    acked(keys, "a", (1, 1), 0)
    acked(keys, "b", (2, 2), 60)
    assert keys.lookup("a", 100, 50) is None
    keys.begin("a", "again")
    assert len(keys) == 2, "the old outcome is gone, whatever becomes of the new write"
    keys.complete("a", (3, 3), 100)
    assert keys.lookup("a", 150, 50) == AckedWrite((3, 3), 100)
    assert keys.forget_expired(120, 50) == 1
    assert keys.lookup("b", 120, 1_000) is None
    assert keys.lookup("a", 120, 50) == AckedWrite((3, 3), 100)


def test_an_outcome_can_be_remembered_anew_without_being_held() -> None:
    keys = window()
    keys.complete("a", (1, 1), 0)
    keys.complete("b", (2, 2), 10)
    keys.complete("a", (3, 3), 20)
    assert keys.forget_expired(65, 50) == 1, "b is the oldest now"
    assert keys.lookup("a", 65, 50) == AckedWrite((3, 3), 20)


def test_a_wider_or_narrower_window_counts_at_once() -> None:
    keys = window()
    acked(keys, "a", (1, 1), 0)
    assert keys.lookup("a", 100, 50) is None
    assert keys.lookup("a", 100, 100) == AckedWrite((1, 1), 0)


def test_one_call_forgets_a_bounded_number_of_keys_and_the_oldest_of_them() -> None:
    keys = window()
    for number in range(3 * FORGET_KEYS_MAX):
        acked(keys, f"{number}", (number, number), 0)
    assert keys.forget_expired(1_000, 50) == FORGET_KEYS_MAX
    assert len(keys) == 2 * FORGET_KEYS_MAX
    assert keys.lookup(f"{FORGET_KEYS_MAX - 1}", 0, 50) is None
    assert keys.lookup(f"{FORGET_KEYS_MAX}", 0, 50) == AckedWrite((FORGET_KEYS_MAX, FORGET_KEYS_MAX), 0)
    assert keys.forget_expired(1_000, 50, count_max=5) == 5
    assert len(keys) == 2 * FORGET_KEYS_MAX - 5


def test_a_burst_long_ago_is_worked_off_by_later_writes() -> None:
    keys = window()
    for number in range(1_000):
        acked(keys, f"old {number}", (number, number), 0)
    for number in range(40):
        keys.forget_expired(1_000, 50)
        acked(keys, f"new {number}", (number, number), 1_000)
    assert len(keys) == 40


class Machine(RuleBasedStateMachine):
    """Any order of writes, failures and pauses. The model keeps everything and looks at the newest."""

    keys = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.window: IdempotencyWindow[int, int] = IdempotencyWindow()
        self.now_ms, self.window_ms, self.counter = 0, 10, 0
        self.pending: dict[str, int] = {}
        self.done: dict[str, tuple[int, int]] = {}

    def expected(self, key: str) -> PendingWrite[int] | AckedWrite[int] | None:
        if key in self.pending:
            return PendingWrite(self.pending[key])
        outcome, at_ms = self.done.get(key, (0, -1_000_000))
        return AckedWrite(outcome, at_ms) if self.now_ms - at_ms <= self.window_ms else None

    @rule(key=keys)
    def write(self, key: str) -> None:
        if self.window.lookup(key, self.now_ms, self.window_ms) is None:
            self.counter += 1
            self.window.begin(key, self.counter)
            self.pending[key] = self.counter

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), succeeds=st.booleans())
    def end(self, data: st.DataObject, succeeds: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.pending)))
        token = self.pending.pop(key)
        if succeeds:
            self.window.complete(key, token * 100, self.now_ms)
            self.done[key] = token * 100, self.now_ms
        else:
            self.window.abort(key)
            # The write was let through because nothing valid was known, so nothing is known now.
            self.done.pop(key, None)

    @rule(ms=st.integers(0, 15))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule(most=st.integers(0, 3))
    def forget(self, most: int) -> None:
        before = len(self.window)
        count = self.window.forget_expired(self.now_ms, self.window_ms, most)
        assert count <= most
        assert len(self.window) == before - count

    @invariant()
    def every_key_is_known_as_it_should_be(self) -> None:
        for key in "abcd":
            assert self.window.lookup(key, self.now_ms, self.window_ms) == self.expected(key)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)


# Over a restart ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", RESTARTS)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_key_outlives_a_restart_for_the_rest_of_its_window(how: Restart, shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    topic = world.log.topic("t", durability="fsync", idempotency_window_ms=1_000)
    first = topic.append(["a", "b"], key="k")
    world.clock.tick(600)
    world.restart(how)
    topic = world.log.topic("t")
    world.clock.tick(400)
    again = topic.append("other", key="k")
    assert (again.deduped, again.first_seq, again.last_seq, again.head_seq) == (True, 1, 2, first.head_seq)
    world.clock.tick(1)
    assert not topic.append("c", key="k").deduped
    world.restart(how)
    assert world.log.topic("t").append("d", key="k").first_seq == 3, "the last write of a key counts"


def test_a_key_is_kept_by_checkpoints_without_its_frames() -> None:
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append("a", key="k")
    for _ in range(3):
        topic.append("x")
        world.log.checkpoint()
    world.restart("kill")
    assert world.log.topic("t").append("b", key="k").first_seq == 1


def test_a_large_batch_keeps_its_key() -> None:
    """Method: a batch of which the records are read where the WAL has them."""
    world = EngineHarness(wal_file_bytes=1 << 22)
    topic = world.log.topic("t")
    topic.append([b"x" * 1_000] * 1_000, key="k")
    assert topic.read(999, 1).records[0].data == b"x" * 1_000
    world.restart("kill")
    topic = world.log.topic("t")
    assert topic.append("again", key="k").last_seq == 1_000
    assert topic.count == 1_000


def test_a_key_of_an_ephemeral_record_goes_with_it() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="ephemeral")
    topic.append("a", key="k")
    world.log.topic("t", durability="disk")
    assert topic.append("b", key="k").deduped
    world.restart("reopen")
    assert not world.log.topic("t").append("c", key="k").deduped


def test_a_clock_that_went_back_does_not_end_a_window() -> None:
    world = EngineHarness()
    world.log.topic("t", idempotency_window_ms=1_000).append("a", key="k")
    world.log.close()
    clock = ManualClock(world.clock.now_us() - 3_600_000_000)
    world.clock = clock
    world.log = world.open(world.disk)
    topic = world.log.topic("t")
    assert topic.append("b", key="k").deduped
    clock.tick(1_001)
    assert not topic.append("c", key="k").deduped


def test_a_topic_that_was_dropped_takes_its_keys_along() -> None:
    world = EngineHarness()
    world.log.topic("t").append("a", key="k")
    world.log.drop("t")
    world.restart("kill")
    assert not world.log.topic("t").append("b", key="k").deduped


def test_the_newest_keys_are_known_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "IDEMPOTENCY_KEYS_MAX", 3)
    world = EngineHarness()
    topic = world.log.topic("t")
    for number in range(5):
        topic.append(number, key=f"k{number}")
    for how in ("kill", "reopen"):
        assert len(world.log.topic("t")._state.producers.keys) == 3
        world.restart(how)
    assert world.log.topic("t").append("again", key="k2").first_seq == 3
    assert not world.log.topic("t").append("again", key="k1").deduped
