"""Bugs planted on purpose: each breaks one rule that copies hang on, and the sweep must find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from tests.crash.routers.bench import (
    Letter,
    batch,
    burst,
    checkpoint,
    delete_dest,
    direct,
    kill,
    make_room,
    onward,
    power,
    private,
    second,
    slow,
    tighten,
)
from tests.crash.routers.test_sweep import judged

from tidelog.engine import opening
from tidelog.engine.manifest import FedRow
from tidelog.engine.routing import derive, holding, lane, plan, stretch
from tidelog.engine.routing.lane import Lane, Passed
from tidelog.engine.routing.router import Router
from tidelog.formats.bodies import ForwardEvent
from tidelog.wal import Commit

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None:
    return None


def direct_writes_do_not_tell_where_the_lane_stood(patch: Patch) -> None:
    patch.setattr(Lane, "mark", nothing)


def not_put_on_record(event: ForwardEvent) -> Callable[[Patch], None]:
    def bug(patch: Patch) -> None:
        kept = {act: kind for act, kind in lane._EVENTS.items() if kind is not event}
        patch.setattr(lane, "_EVENTS", kept)

    return bug


def copies_are_made_again_only_from_what_is_left_to_see(patch: Patch) -> None:
    real = stretch.look
    patch.setattr(derive, "look", lambda source, cursor, last, **_: real(source, cursor, last))


def a_manifest_tells_of_copies_that_it_does_not_have(patch: Patch) -> None:
    real = holding.freeze

    def freeze(core: Any) -> None:
        real(core)
        if core.frozen is not None and core.frozen.fed is not None:
            fed = FedRow(core.frozen.fed.source_id, core.lane.source.index.head, core.frozen.fed.copying)
            core.frozen = replace(core.frozen, fed=fed, head=max(core.frozen.head - 1, 0))

    patch.setattr(holding, "freeze", freeze)


def a_manifest_tells_of_fewer_copies_than_it_has(patch: Patch) -> None:
    real = holding.freeze

    def freeze(core: Any) -> None:
        real(core)
        if core.frozen is not None and core.frozen.fed is not None:
            fed = FedRow(core.frozen.fed.source_id, max(core.frozen.fed.cursor - 1, 0), core.frozen.fed.copying)
            core.frozen = replace(core.frozen, fed=fed)

    patch.setattr(holding, "freeze", freeze)


def totals_begin_again(patch: Patch) -> None:
    real = holding._row
    patch.setattr(holding, "_row", lambda *args: structs.replace(real(*args), forwarded=0))


def routers_of_a_lane_come_back_in_another_order(patch: Patch) -> None:
    restore = derive.Derive._restore

    def turned(self: derive.Derive) -> None:
        restore(self)
        for core in self._cores.values():
            if core.lane is not None:
                core.lane.routers = core.lane.routers[::-1]

    patch.setattr(derive.Derive, "_restore", turned)


def nobody_says_that_copies_begin_again(patch: Patch) -> None:
    def prepare(self: Passed) -> None:
        self.lane.direct = False
        self.lane.prepared = self.place

    patch.setattr(Passed, "prepare", prepare)


def a_mark_may_be_lost_with_its_write(patch: Patch) -> None:
    real = Lane.mark

    def mark(self: Lane, commit: Commit) -> None:
        durable = commit.durable
        real(self, commit)
        commit.durable = durable

    patch.setattr(Lane, "mark", mark)


def holes_of_the_source_are_passed_over(patch: Patch) -> None:
    real = plan._every
    where = plan.plan

    def planned(routers: Any, source_id: int, found: Any) -> Any:
        if found.kind == "hole":
            return [plan.Draft("holes", found.first, found.stop - 1, tuple(0 for _ in real(routers, 1, 1)))]
        return where(routers, source_id, found)

    patch.setattr(plan, "plan", planned)


def recovery_fills_a_dest_that_is_full(patch: Patch) -> None:
    real = plan.room_of

    def room_of(dest: Any, *, quota: bool = True) -> plan.Room:
        return real(dest) if quota else plan.Room(1 << 62, 1 << 62)  # recovery does not ask for the quota

    patch.setattr(plan, "room_of", room_of)


def a_filter_is_forgotten_in_recovery(patch: Patch) -> None:
    real = Router.of_body
    patch.setattr(Router, "of_body", lambda body: replace(real(body), match=None))


def nothing_is_saved_behind_a_recovery(patch: Patch) -> None:
    real = opening._writer

    def writer(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        found.history.moved = False
        return found

    patch.setattr(opening, "_writer", writer)


def reserved_seqs_are_left_to_copies(patch: Patch) -> None:
    patch.setattr(derive.Derive, "_pad", nothing)


def nothing_is_pinned(patch: Patch) -> None:
    patch.setattr(plan, "pinned", lambda _routers, steps, _found, loose: (list(steps), loose))


FSYNC = ("fsync", "fsync")
BUGS: list[tuple[Callable[[Patch], None], tuple[str, str], Sequence[Letter]]] = [
    (direct_writes_do_not_tell_where_the_lane_stood, FSYNC, (batch, direct, direct)),
    (not_put_on_record(ForwardEvent.TRIMMED), FSYNC, (batch, burst, checkpoint, burst, checkpoint, direct)),
    (not_put_on_record(ForwardEvent.SKIPPED), FSYNC, (make_room, make_room, make_room, batch)),
    (copies_are_made_again_only_from_what_is_left_to_see, FSYNC, (batch, slow, slow, batch)),
    (a_manifest_tells_of_copies_that_it_does_not_have, FSYNC, (batch, checkpoint, batch)),
    (a_manifest_tells_of_fewer_copies_than_it_has, FSYNC, (batch, checkpoint, batch)),
    (totals_begin_again, FSYNC, (batch, checkpoint, batch)),
    (routers_of_a_lane_come_back_in_another_order, FSYNC, (second, checkpoint, batch, slow, batch, kill)),
    (nobody_says_that_copies_begin_again, ("fsync", "disk"), (direct, batch, direct, batch)),
    (a_mark_may_be_lost_with_its_write, ("fsync", "disk"), (direct, onward, direct, onward)),
    (holes_of_the_source_are_passed_over, ("disk", "fsync"), (batch, power, batch, slow, power)),
    (recovery_fills_a_dest_that_is_full, FSYNC, (make_room, batch, kill, batch, tighten)),
    (a_filter_is_forgotten_in_recovery, FSYNC, (slow, direct, onward)),
    (nothing_is_saved_behind_a_recovery, ("fsync", "disk"), (direct, power, direct, batch, power, direct)),
    (nothing_is_pinned, ("disk", "fsync"), (direct, private, direct, delete_dest, direct)),
    (reserved_seqs_are_left_to_copies, ("fsync", "disk"), (direct, private, private, delete_dest)),
]
SEEDS = 6


@pytest.mark.sweep
@pytest.mark.parametrize(("bug", "classes", "letters"), BUGS, ids=[f"{n}" for n in range(len(BUGS))])
def test_the_sweep_finds(
    bug: Callable[[Patch], None], classes: tuple[str, str], letters: Sequence[Letter], monkeypatch: Patch
) -> None:
    bug(monkeypatch)
    for seed in range(SEEDS):
        try:
            # Where only the source may lose its end, it has to have a shard of its own.
            judged(classes, letters, seed, shards=(1 if classes[0] == "fsync" else 2) + seed % 2)
        except AssertionError:
            return
    pytest.fail(f"{bug.__name__} was not found")
