"""Bugs planted on purpose in groups, holds and the ledger: each breaks one rule that they hang on, and the histories of
`cursors` must find it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.crash.topics.group_histories import HistoryStats, run_history

from tidelog.engine import checkpoint, delete, gap_log, groups, recovery
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Error
from tidelog.formats import control_frames
from tidelog.formats.control_frames import GroupCursor

Patch = pytest.MonkeyPatch
SEEDS = 14
CAPPED: dict[str, Any] = {"durability": "fsync", "cap_records": 4}
AGED: dict[str, Any] = {"durability": "fsync", "cap_bytes": 40, "ttl_ms": 1_000}
LOOSE: dict[str, Any] = {"durability": "disk", "cap_records": 4, "shards": 2}


def row_with(**fields: Any) -> Callable[[Patch], None]:
    """The manifest says this of every topic."""

    def bug(patch: Patch) -> None:
        real = checkpoint._build_topic_row

        def stock(core: TopicState, *, final: bool) -> Any:
            row = real(core, final=final)
            return msgspec.structs.replace(row, **fields)

        patch.setattr(checkpoint, "_build_topic_row", stock)

    return bug


# Cursors --------------------------------------------------------------------------------------------


def a_commit_waits_for_no_sync(patch: Patch) -> None:
    real = groups.CursorCommit.__init__

    def init(self: groups.CursorCommit, core: TopicState, body: GroupCursor) -> None:
        real(self, core, body)
        self.durable = False

    patch.setattr(groups.CursorCommit, "__init__", init)


def replay_knows_no_groups(patch: Patch) -> None:
    patch.setattr(recovery, "groups", SimpleNamespace(apply_cursor=lambda *_: None))


def what_is_deleted_comes_back(patch: Patch) -> None:
    def apply(core: TopicState, body: GroupCursor, ts_ms: int) -> None:
        if not body.gone:
            groups.apply_cursor(core, body, ts_ms)

    patch.setattr(recovery, "groups", SimpleNamespace(apply_cursor=apply))


def a_cursor_never_goes_back_in_replay(patch: Patch) -> None:
    def apply(core: TopicState, body: GroupCursor, ts_ms: int) -> None:
        if body.gone or body.group not in core.groups or body.seq >= core.groups[body.group].seq:
            groups.apply_cursor(core, body, ts_ms)

    patch.setattr(recovery, "groups", SimpleNamespace(apply_cursor=apply))


def a_commit_is_seen_before_it_is_written(patch: Patch) -> None:
    real = groups.CursorCommit.before_write

    def prepare(self: groups.CursorCommit) -> None:
        real(self)
        self.pieces = self.pieces[:0]  # and then it is not even written
        self.frames = self.size = 0

    patch.setattr(groups.CursorCommit, "before_write", prepare)


# Holds ----------------------------------------------------------------------------------------------


def floors_of_held_topics_are_shown_before_they_are_durable(patch: Patch) -> None:
    patch.setattr(TopicState, "must_persist_floor", property(lambda self: self.config.durability == "disk"))


def replay_works_out_what_a_hold_held(patch: Patch) -> None:
    real = TopicState.enforce_caps

    def keep(self: TopicState, *args: Any) -> None:
        replaying, self.context.is_replaying = self.context.is_replaying, False
        guarded, self.had_retention_hold = self.had_retention_hold, self.had_retention_hold and not replaying
        real(self, *args)
        self.context.is_replaying, self.had_retention_hold = replaying, guarded

    patch.setattr(TopicState, "enforce_caps", keep)


def recovery_asks_no_hold(patch: Patch) -> None:
    real = TopicState.limit_by_holds
    patch.setattr(
        TopicState,
        "limit_by_holds",
        lambda self, floor: floor if self.context.removals.is_recovering else real(self, floor),
    )


def what_is_let_go_of_is_evicted_later(patch: Patch) -> None:
    real = groups.CursorCommit.on_done

    def done(self: groups.CursorCommit, error: Error | None) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TopicState, "enforce_caps", lambda *_: None)
            real(self, error)

    patch.setattr(groups.CursorCommit, "on_done", done)


# The ledger -----------------------------------------------------------------------------------------


def a_manifest_does_not_wait_for_rows(patch: Patch) -> None:
    patch.setattr(gap_log.GapLog, "flush_durably", lambda *_: None)


def entries_do_not_wait_for_their_removal(patch: Patch) -> None:
    patch.setattr(gap_log, "_split_by_durability", lambda notes: (notes, []))


def everything_is_logged_again(patch: Patch) -> None:
    patch.setattr(gap_log, "_unknown_part", lambda note, _: note)


def nothing_is_logged_again(patch: Patch) -> None:
    patch.setattr(gap_log, "_unknown_part", lambda *_: None)


def deletes_have_no_number(patch: Patch) -> None:
    real = delete.replay_delete
    patch.setattr(delete, "replay_delete", lambda core, body, _, ts_ms: real(core, body, 0, ts_ms))


def deletes_are_matched_by_their_time(patch: Patch) -> None:
    real = gap_log._add_known

    def add_known(known: Any, row: Any) -> None:
        real(known, row)
        if row.cause == "delete":
            known.deleted.update((row.topic_id, number) for number in range(100))

    patch.setattr(gap_log, "_add_known", add_known)


def floors_in_frames_have_no_rows(patch: Patch) -> None:
    def floor(core: TopicState, body: control_frames.EvictWatermark) -> None:
        notes = core.context.removals
        wanted, notes._enabled = notes._enabled, False
        real(core, body)
        notes._enabled = wanted

    real = recovery._apply_floor
    patch.setattr(recovery, "_apply_floor", floor)


BUGS: list[tuple[Callable[[Patch], None], dict[str, Any]]] = [
    (a_commit_waits_for_no_sync, CAPPED),
    (replay_knows_no_groups, CAPPED),
    (what_is_deleted_comes_back, CAPPED),
    (a_cursor_never_goes_back_in_replay, CAPPED),
    (a_commit_is_seen_before_it_is_written, CAPPED),
    (row_with(consumers=()), CAPPED),
    (floors_of_held_topics_are_shown_before_they_are_durable, AGED),
    (replay_works_out_what_a_hold_held, CAPPED),
    (recovery_asks_no_hold, CAPPED),
    (what_is_let_go_of_is_evicted_later, CAPPED),
    (row_with(guarded=False), CAPPED),
    (a_manifest_does_not_wait_for_rows, CAPPED),
    (entries_do_not_wait_for_their_removal, LOOSE),
    (everything_is_logged_again, CAPPED),
    (nothing_is_logged_again, CAPPED),
    (deletes_have_no_number, CAPPED),
    (deletes_are_matched_by_their_time, CAPPED),
    (floors_in_frames_have_no_rows, AGED),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("bug", "config"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(bug: Callable[[Patch], None], config: dict[str, Any], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, Error)):
        run_all(config)


def run_all(config: dict[str, Any]) -> None:
    tally = HistoryStats()
    for seed in range(SEEDS):
        run_history(("planted", seed), tally, steps=30, images=5, **config)
