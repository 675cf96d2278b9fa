"""Bugs planted on purpose: each breaks one rule that copies hang on, and the sweep must find it.

A bug that lets a cycle run for ever would not return to be judged: a lane that makes `PASSES_MAX` passes is taken for
one. Without a bug a lane of these histories makes a few dozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from msgspec import structs
from tests.crash.routers.harness import (
    Operation,
    around,
    batch,
    burst,
    checkpoint,
    delete_source,
    direct,
    exchange,
    expire,
    feed,
    flood,
    free_space,
    gone_target,
    group,
    kill,
    late,
    new_source,
    new_target,
    power,
    reopen,
    second,
    slow,
    trim_jobs,
    trim_wired,
    wait_around,
    work,
)
from tests.crash.routers.test_sweep import judged

from tidelog.engine import delete, topic_index
from tidelog.engine import recovery as engine_recovery
from tidelog.engine.manifest import FedRow
from tidelog.engine.routing import forwarder, manager
from tidelog.engine.routing.forwarder import ForwardCommit, Forwarder
from tidelog.engine.routing.router import HOPS_MAX, HopCounts, Router
from tidelog.engine.topic_index import TopicIndex
from tidelog.formats.control_frames import GroupCursor, RouterDelete

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None:
    return None


def copies_are_in_no_wal(patch: Patch) -> None:
    real = ForwardCommit.__init__

    def made(self: ForwardCommit, *args: Any) -> None:
        real(self, *args)
        self.pieces, self.frames, self.size, self.copied_frames = [], 0, 0, 0

    patch.setattr(ForwardCommit, "__init__", made)


def copies_of_a_class_that_syncs_are_shown_before_they_are_synced(patch: Patch) -> None:
    real = ForwardCommit.__init__

    def made(self: ForwardCommit, *args: Any) -> None:
        real(self, *args)
        self.durable = False

    patch.setattr(ForwardCommit, "__init__", made)


def copies_take_seqs_that_are_not_reserved(patch: Patch) -> None:
    patch.setattr(ForwardCommit, "before_write", nothing)


def replay_passes_over_cursors(patch: Patch) -> None:
    real = manager._apply_forward

    def forward(core: Any, wires: Any, body: Any) -> None:
        before = wires.cursor
        real(core, wires, body)
        wires.cursor = before

    patch.setattr(manager, "_apply_forward", forward)


def replay_passes_over_trims(patch: Patch) -> None:
    patch.setattr(manager, "record_source_loss", nothing)


def a_trim_evicts_what_is_below_it(patch: Patch) -> None:
    real = TopicIndex.add_trimmed_range

    def trim(self: TopicIndex, lo: int, hi: int) -> None:
        real(self, lo, hi)
        self.evict(hi, "source")

    patch.setattr(TopicIndex, "add_trimmed_range", trim)


def readers_get_no_gap_for_trims(patch: Patch) -> None:
    real = topic_index.find_gap
    patch.setattr(topic_index, "find_gap", lambda *args: real(*args[:4]))


def a_dropped_router_is_not_logged(patch: Patch) -> None:
    real = manager.RouterManager._log_router_frame

    def log(self: Any, its: Forwarder, body: Any, apply: Any) -> None:
        if isinstance(body, RouterDelete):
            apply(its.dest.applied_router_frame)
        else:
            real(self, its, body, apply)

    patch.setattr(manager.RouterManager, "_log_router_frame", log)


def a_dropped_router_leaves_its_cursor(patch: Patch) -> None:
    real = manager._apply_create

    def create(wires: Any, router: Router, *, unnumbered: bool) -> None:
        before = wires.source_id, wires.cursor
        real(wires, router, unnumbered=unnumbered)
        if before[1]:
            wires.source_id, wires.cursor = before

    patch.setattr(manager, "_apply_create", create)
    patch.setattr(manager.RouterRecovery, "clear", lambda self: (self.routers.clear(), self.forwarded.clear()))


def a_manifest_counts_fewer_copies_than_it_has(patch: Patch) -> None:
    real = manager.snapshot_forwarder

    def freeze(core: Any) -> None:
        real(core)
        if core.forwarder_snapshot is not None and core.forwarder_snapshot.fed is not None:
            fed = FedRow(core.forwarder_snapshot.fed.source_id, max(core.forwarder_snapshot.fed.cursor - 1, 0))
            core.forwarder_snapshot = replace(core.forwarder_snapshot, fed=fed)

    patch.setattr(manager, "snapshot_forwarder", freeze)


def totals_begin_again(patch: Patch) -> None:
    real = Router.to_row
    patch.setattr(Router, "to_row", lambda *args: structs.replace(real(*args), forwarded=0))


def expired_records_are_passed_on(patch: Patch) -> None:
    patch.setattr(forwarder, "_source_expiry", lambda _: 0)


def deleted_records_are_passed_on(patch: Patch) -> None:
    real = forwarder.read_source

    def look(source: Any, cursor: int) -> Any:
        found = real(source, cursor)
        return found and replace(found, deleted=None)

    patch.setattr(forwarder, "read_source", look)


def a_filter_is_forgotten_in_recovery(patch: Patch) -> None:
    real = Router.from_body
    patch.setattr(Router, "from_body", lambda body: replace(real(body), match=None))


def a_source_that_ends_early_is_waited_for(patch: Patch) -> None:
    real = manager.link_forwarders

    def link(cores: Any, report: Any, *, writable: bool) -> bool:
        wanted = {core.id: core.router_recovery.cursor for core in cores.values() if core.router_recovery is not None}
        found = real(cores, report, writable=writable)
        for core in cores.values():
            if core.upstream is not None:
                core.upstream.cursor = wanted[core.id]
        return found

    patch.setattr(manager, "link_forwarders", link)


def dropped_targets_keep_their_forwarders(patch: Patch) -> None:
    patch.setattr(manager.RouterManager, "forget_topic", nothing)


def a_new_router_takes_what_was_there_before(patch: Patch) -> None:
    real = Router.to_body
    patch.setattr(Router, "to_body", lambda self: replace(real(self), initial_cursor=0))


def records_are_passed_around_for_ever(patch: Patch) -> None:
    patch.setattr(HopCounts, "between", lambda _, lo, hi: np.zeros(hi - lo, np.int64))


def losses_are_passed_around_for_ever(patch: Patch) -> None:
    real = forwarder._loss_step
    patch.setattr(forwarder, "_loss_step", lambda routers, first, last, _: real(routers, first, last, 0))


def holes_are_passed_on_as_losses(patch: Patch) -> None:
    real = forwarder._empty_chunk

    def unfilled(source: Any, first: int, stop: int, floor: int) -> Any:
        found = real(source, first, stop, floor)
        return replace(found, kind="lost") if found.kind == "hole" else found

    patch.setattr(forwarder, "_empty_chunk", unfilled)


def a_record_goes_one_router_too_far(patch: Patch) -> None:
    patch.setattr(forwarder, "HOPS_MAX", HOPS_MAX + 1)


def hops_are_not_replayed(patch: Patch) -> None:
    real = manager._apply_forward

    def forward(core: Any, wires: Any, body: Any) -> None:
        real(core, wires, replace(body, hops=()))

    patch.setattr(manager, "_apply_forward", forward)


def a_manifest_forgets_hops(patch: Patch) -> None:
    real = manager.snapshot_forwarder

    def freeze(core: Any) -> None:
        real(core)
        if core.forwarder_snapshot is not None:
            core.forwarder_snapshot = replace(core.forwarder_snapshot, hops=())

    patch.setattr(manager, "snapshot_forwarder", freeze)


def hops_are_forgotten_before_they_were_used(patch: Patch) -> None:
    real = HopCounts.forget_below
    patch.setattr(HopCounts, "forget_below", lambda self, _: real(self, 1 << 60))


def a_trim_is_one_seq_short(patch: Patch) -> None:
    real = TopicIndex.add_trimmed_range
    patch.setattr(TopicIndex, "add_trimmed_range", lambda self, lo, hi: real(self, lo, max(hi - 1, lo)))


def deletes_are_not_replayed(patch: Patch) -> None:
    """Class `disk` may lose a delete in a power cut. A kill loses none."""
    patch.setattr(delete, "replay_delete", nothing)


def a_replayed_group_is_two_seqs_further(patch: Patch) -> None:
    real = engine_recovery._apply_control_frame

    def control(core: Any, body: Any, seq: int, ts_ms: int) -> None:
        real(core, replace(body, seq=body.seq + 2) if isinstance(body, GroupCursor) else body, seq, ts_ms)

    patch.setattr(engine_recovery, "_apply_control_frame", control)


class Plant(NamedTuple):
    bug: Callable[[Patch], None]
    layout: str
    classes: tuple[str, str]
    letters: Sequence[Operation]


FSYNC, DISK = ("fsync", "fsync"), ("disk", "disk")
PLANTS = [
    Plant(copies_are_in_no_wal, "main", FSYNC, (batch, direct, direct)),
    Plant(copies_of_a_class_that_syncs_are_shown_before_they_are_synced, "main", FSYNC, (batch, direct, slow, direct)),
    Plant(copies_take_seqs_that_are_not_reserved, "main", ("fsync", "disk"), (batch, direct, slow, batch)),
    Plant(replay_passes_over_cursors, "main", FSYNC, (batch, direct, slow)),
    Plant(replay_passes_over_trims, "wires", FSYNC, (feed, trim_wired, trim_wired)),
    Plant(a_trim_evicts_what_is_below_it, "jobs", FSYNC, (group, trim_jobs, trim_jobs)),
    Plant(a_trim_evicts_what_is_below_it, "wires", DISK, (feed, trim_wired, feed)),
    Plant(readers_get_no_gap_for_trims, "main", FSYNC, (batch, burst, burst)),
    Plant(a_dropped_router_is_not_logged, "wires", FSYNC, (feed, exchange, feed)),
    Plant(a_dropped_router_leaves_its_cursor, "wires", FSYNC, (feed, exchange, feed, exchange, kill, feed)),
    Plant(a_manifest_counts_fewer_copies_than_it_has, "main", FSYNC, (batch, checkpoint, batch)),
    Plant(totals_begin_again, "main", FSYNC, (batch, checkpoint, batch)),
    Plant(expired_records_are_passed_on, "jobs", FSYNC, (expire, expire)),
    Plant(deleted_records_are_passed_on, "main", FSYNC, (free_space, free_space, delete_source, free_space)),
    Plant(a_filter_is_forgotten_in_recovery, "main", FSYNC, (slow, direct, second, slow)),
    Plant(a_source_that_ends_early_is_waited_for, "jobs", ("memory", "fsync"), (work, group, power, work)),
    Plant(dropped_targets_keep_their_forwarders, "wires", FSYNC, (feed, gone_target, new_target, reopen)),
    Plant(a_new_router_takes_what_was_there_before, "wires", FSYNC, (feed, late, new_source, kill, late)),
    Plant(records_are_passed_around_for_ever, "cycle", FSYNC, (around, flood)),
    Plant(losses_are_passed_around_for_ever, "cycle", FSYNC, (flood, flood)),
    Plant(holes_are_passed_on_as_losses, "cycle", DISK, (around, power, around, kill, around)),
    Plant(a_record_goes_one_router_too_far, "cycle", FSYNC, (around, around)),
    Plant(hops_are_not_replayed, "cycle", FSYNC, (around, kill, around, kill, flood)),
    Plant(a_manifest_forgets_hops, "cycle", FSYNC, (around, wait_around, kill, around)),
    Plant(hops_are_forgotten_before_they_were_used, "cycle", FSYNC, (around, wait_around, around)),
    Plant(a_trim_is_one_seq_short, "wires", FSYNC, (feed, trim_wired, feed)),
    Plant(deletes_are_not_replayed, "main", DISK, (batch, direct, free_space, batch)),
    Plant(a_replayed_group_is_two_seqs_further, "jobs", FSYNC, (work, group, trim_jobs, trim_jobs)),
    Plant(a_replayed_group_is_two_seqs_further, "jobs", DISK, (work, group, trim_jobs, trim_jobs)),
]
SEEDS = 6
PASSES_MAX = 1_500


class Endless(AssertionError):
    """A lane is passing on what it passed on before."""


@pytest.fixture(autouse=True)
def _bounded_passes(monkeypatch: Patch) -> None:
    real, passes = Forwarder.begin_pass, WeakKeyDictionary[Forwarder, int]()

    def begin(self: Forwarder) -> Callable[[], bool]:
        passes[self] = passes.get(self, 0) + 1
        if passes[self] > PASSES_MAX:
            self.is_ended = True  # or closing the engine would not end
            raise Endless(f"{self.source.name} to {self.dest.name}: {PASSES_MAX} passes")
        return real(self)

    monkeypatch.setattr(Forwarder, "begin_pass", begin)


@pytest.mark.sweep
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.bug.__name__)
def test_the_sweep_finds(plant: Plant, monkeypatch: Patch) -> None:
    plant.bug(monkeypatch)
    for seed in range(SEEDS):
        try:
            # Where only one topic may lose its end, it has to have a shard of its own.
            judged(plant.classes, plant.letters, seed, layout=plant.layout, shards=1 + seed % 3)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{plant.bug.__name__} was not found")


@pytest.mark.sweep
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.bug.__name__)
def test_these_histories_are_good_without_the_bug(plant: Plant) -> None:
    judged(plant.classes, plant.letters, 0, layout=plant.layout, shards=2)
