"""Power cuts while jobs are claimed, acked, given back and buried: G93, G94, G95, and that the sweep can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.crash.topics.queue_histories import sweep
from tests.model import test_queues as model

from tidelog.engine import checkpoint
from tidelog.engine.manifest import QueueRow
from tidelog.engine.queues import claim, dead_letter
from tidelog.engine.queues.leases import LeaseTable, QueueSnapshot, TimerHeap
from tidelog.engine.queues.queue_state import QueueCommit, QueueState
from tidelog.engine.topic_index import TopicIndex
from tidelog.formats import frame
from tidelog.formats.control_frames import Lease, LeaseEvent

Patch = pytest.MonkeyPatch
Tell = Callable[[str, int], None]


@pytest.mark.slow
@pytest.mark.parametrize("durable", [False, True])
def test_no_power_cut_breaks_a_queue(durable: bool, record_count: Tell) -> None:
    states, wrong = sweep(2, 25, limit=4, durable=lambda _: durable)
    record_count("crash states of queues", states)
    assert not wrong, wrong[0]
    assert states > 100, "there was something to judge"


@pytest.mark.sweep
def test_no_power_cut_breaks_a_queue_for_long(record_count: Tell) -> None:
    states, wrong = sweep(120, 60, limit=24, durable=lambda seed: bool(seed % 2))
    record_count("crash states of queues", states)
    assert not wrong, wrong[0]
    assert states > 10_000


# Bugs planted on purpose ------------------------------------------------------------------------------------


def expires_at_its_deadline(patch: Patch) -> None:
    real = TimerHeap.pop_due
    patch.setattr(TimerHeap, "pop_due", lambda self, stop_ms: real(self, stop_ms + (stop_ms % 10 == 0)))


def anybody_may_settle(patch: Patch) -> None:
    real = LeaseTable._lease_of

    def owned(self: LeaseTable, seq: int, _: str, lease_id: int | None) -> Any:
        lease = self.leased.get(seq)
        return real(self, seq, lease.node if lease else "", lease_id)

    patch.setattr(LeaseTable, "_lease_of", owned)


def a_stale_id_is_taken(patch: Patch) -> None:
    real = LeaseTable._lease_of
    patch.setattr(LeaseTable, "_lease_of", lambda self, seq, node, _: real(self, seq, node, None))


def a_delay_is_forgotten(patch: Patch) -> None:
    real = LeaseTable.on_released
    patch.setattr(LeaseTable, "on_released", lambda self, seqs, _=None: real(self, seqs))


def an_ack_is_not_written(patch: Patch) -> None:
    real = claim._settle

    def settle(*args: Any, logged: bool) -> Any:
        return real(*args, logged=logged and args[3].__name__ != "apply_ack")

    patch.setattr(claim, "_settle", settle)


def an_ack_deletes_nothing(patch: Patch) -> None:
    patch.setattr(QueueState, "remove_known", lambda *_: None)


def a_failed_ack_loses_the_lease(patch: Patch) -> None:
    patch.setattr(LeaseTable, "on_settle_failed", lambda *_: None)


def a_failed_claim_keeps_the_lease(patch: Patch) -> None:
    patch.setattr(claim, "_revoke_grants", lambda *_: None)


def a_failed_extension_counts(patch: Patch) -> None:
    patch.setattr(LeaseTable, "undo_extend", lambda *_: None)


def the_cursor_hands_out_what_is_held(patch: Patch) -> None:
    real = LeaseTable.take

    def take(self: LeaseTable, most: int, fresh: Any) -> list[int]:
        self._known_after_cursor.clear()
        return real(self, most, fresh)

    patch.setattr(LeaseTable, "take", take)


def counts_are_not_replayed(patch: Patch) -> None:
    real = QueueSnapshot.apply

    def apply(self: QueueSnapshot, seq: int, body: Lease) -> None:
        real(self, seq, body)
        if seq in self.deliveries:
            self.deliveries[seq] = 1

    patch.setattr(QueueSnapshot, "apply", apply)


def a_claim_is_not_written(patch: Patch) -> None:
    patch.setattr(claim, "_log_grants", lambda *_: None)


def extensions_are_not_written(patch: Patch) -> None:
    _without_frames(patch, LeaseEvent.EXTENDED)


def releases_are_not_written(patch: Patch) -> None:
    _without_frames(patch, LeaseEvent.RELEASED)


def _without_frames(patch: Patch, event: LeaseEvent) -> None:
    real = claim._lease_frames
    patch.setattr(claim, "_lease_frames", lambda at, said, *rest: [] if said is event else real(at, said, *rest))


def _finish_function(args: tuple[Any, ...]) -> Any:
    return getattr(args[2], "func", args[2])


def _is_ack(frames: list[bytes]) -> bool:
    found = frame.read_frame(frames[0], 0, len(frames[0]))
    return len(frames) == 1 and isinstance(found, frame.Frame) and found.kind == frame.DELETE


def a_claim_returns_before_it_is_synced(patch: Patch) -> None:
    real = QueueCommit.__init__

    def init(self: Any, *args: Any, durable: bool) -> None:
        real(self, *args, durable=durable and _finish_function(args) is not claim._on_grants_logged)

    patch.setattr(QueueCommit, "__init__", init)


def an_ack_returns_before_it_is_synced(patch: Patch) -> None:
    real = QueueCommit.__init__

    def init(self: Any, *args: Any, durable: bool) -> None:
        real(self, *args, durable=durable and not _is_ack(args[1]))

    patch.setattr(QueueCommit, "__init__", init)


def ids_are_not_reserved(patch: Patch) -> None:
    def reserve(self: QueueState, ids: int) -> None:
        self.lease_id_ceiling = max(self.lease_id_ceiling, self.leases.lease_id + ids)

    patch.setattr(QueueState, "reserve_lease_ids", reserve)


def ids_are_reserved_without_a_sync(patch: Patch) -> None:
    real = QueueCommit.__init__

    def init(self: Any, *args: Any, durable: bool) -> None:
        real(self, *args, durable=durable and "_on_ids_reserved" not in str(_finish_function(args)))

    patch.setattr(QueueCommit, "__init__", init)


def a_checkpoint_forgets_the_reservation(patch: Patch) -> None:
    real = QueueState.row
    patch.setattr(QueueState, "row", lambda self, **_: real(self, final=True))


def a_checkpoint_forgets_leases(patch: Patch) -> None:
    real = checkpoint._build_queue_row

    def row(*args: Any, **more: Any) -> QueueRow | None:
        found = real(*args, **more)
        return found and QueueRow(found.lease_id, found.dead_lettered)

    patch.setattr(checkpoint, "_build_queue_row", row)


def leases_outlive_a_restart_though_they_should_not(patch: Patch) -> None:
    patch.setattr(QueueState, "has_durable_leases", property(lambda self: not self.topic.is_ephemeral))


def removals_by_others_are_not_seen(patch: Patch) -> None:
    real = TopicIndex.delete

    def quiet(self: TopicIndex, seqs: Any) -> Any:
        before = self.removal_count
        gone = real(self, seqs)
        self.removal_count = before
        return gone

    patch.setattr(TopicIndex, "delete", quiet)


def priorities_are_ignored(patch: Patch) -> None:
    real = LeaseTable.schedule
    patch.setattr(LeaseTable, "schedule", lambda self, seq, run_at, _, now: real(self, seq, run_at, 0, now))


def the_first_gets_everything(patch: Patch) -> None:
    def divide(available: int, wants: list[int]) -> list[list[int]]:
        dealt, at = [], 0
        for want in wants:
            dealt.append(list(range(at, min(at + want, available))))
            at = min(at + want, available)
        return dealt

    patch.setattr(claim, "divide_jobs", divide)


def the_dead_are_deleted_first(patch: Patch) -> None:
    real = dead_letter._move_chunk

    def moved(at: QueueState, piece: Any) -> Any:
        dead_letter._delete_moved(at, piece.rows.seq.tolist()).wait()
        real(at, piece)
        return [], None

    patch.setattr(dead_letter, "_move_chunk", moved)


def the_dead_are_not_counted_on_disk(patch: Patch) -> None:
    real = QueueState.encode_lease_mark
    patch.setattr(QueueState, "encode_lease_mark", lambda self, ceiling, _: real(self, ceiling, 0))


def the_dead_stay_in_the_queue(patch: Patch) -> None:
    patch.setattr(dead_letter, "_delete_moved", lambda at, _: at.topic.context.topics and Done())


class Done:
    def wait(self) -> None: ...


BUGS = [
    expires_at_its_deadline,
    anybody_may_settle,
    a_stale_id_is_taken,
    a_delay_is_forgotten,
    an_ack_deletes_nothing,
    a_failed_ack_loses_the_lease,
    a_failed_claim_keeps_the_lease,
    a_failed_extension_counts,
    the_cursor_hands_out_what_is_held,
    counts_are_not_replayed,
    a_claim_is_not_written,
    extensions_are_not_written,
    releases_are_not_written,
    ids_are_not_reserved,
    a_checkpoint_forgets_leases,
    leases_outlive_a_restart_though_they_should_not,
    removals_by_others_are_not_seen,
    priorities_are_ignored,
    the_first_gets_everything,
    the_dead_are_not_counted_on_disk,
    the_dead_stay_in_the_queue,
]
CRASH_BUGS = [
    an_ack_is_not_written,
    an_ack_returns_before_it_is_synced,
    a_claim_returns_before_it_is_synced,
    ids_are_reserved_without_a_sync,
    ids_are_not_reserved,
    a_checkpoint_forgets_the_reservation,
    a_checkpoint_forgets_leases,
    counts_are_not_replayed,
    the_dead_are_deleted_first,
    the_dead_are_not_counted_on_disk,
]


@pytest.mark.sweep
@pytest.mark.parametrize("bug", BUGS)
def test_the_model_finds_a_planted_bug(bug: Any, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):  # whatever gives it away
        model.run(80, 50, derandomize=True, shrink=False)


@pytest.mark.sweep
@pytest.mark.parametrize("bug", CRASH_BUGS)
def test_the_sweep_finds_a_planted_bug(bug: Any, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    _, wrong = sweep(12, 40, limit=6, durable=lambda seed: bool(seed % 2))
    assert wrong, f"{bug.__name__} was not found"
