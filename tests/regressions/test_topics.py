"""Bugs of topics, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, get_args

import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, FieldSelection, checkpoint
from tidelog.engine.config import Durability
from tidelog.engine.topic import topic_operations
from tidelog.engine.topic_state import TopicState
from tidelog.errors import Latched
from tidelog.testing import ManualClock, SimDisk, SyncMode

DURABLE = [durability for durability in get_args(Durability) if durability != "ephemeral"]


# A simulated disk keeps reserved room as zeros in memory: files of the default 64 MiB cost 2 GB and a second each.
SETTINGS: dict[str, Any] = {"clock": ManualClock(), "threads": False, "wal_file_bytes": 1 << 14}


def opened(disk: SimDisk, shards: int = 1, **more: Any) -> Engine:
    return engine_of(tidelog.open("data", disk=disk, wal_shards=shards, **SETTINGS | more))


def seqs(log: Engine) -> list[int]:
    return [record.seq for record in log.topic("capped", create=False).read(0).records]


def capped(disk: SimDisk, durability: str, shards: int = 1) -> Engine:
    """Records 1 to 3 are in a segment, and there may be three."""
    log = opened(disk, shards)
    topic = log.topic("capped", durability=durability, cap_records=3)
    for _ in range(3):
        topic.append(b"x")
    log.checkpoint()
    return log


def evict_and_delete(log: Engine, *, is_seen: bool = True) -> None:
    """Record 4 pushes out the first; without the third there would have been room for it. A reader of class `disk`
    makes the floor durable."""
    topic = log.topic("capped", create=False)
    topic.append(b"y")
    topic.delete(seqs=[3])
    if is_seen:
        assert seqs(log) == [2, 4]


class Watch:
    """What a power cut would leave of the topic at each operation from now on."""

    def __init__(
        self, disk: SimDisk, shards: int = 1, allowed: Sequence[list[int]] = ([2, 4],), *, limit: int = 40
    ) -> None:
        self.disk, self.shards, self.limit, self.states, self.allowed = disk, shards, limit, 0, allowed
        disk.on_op = self._look

    def _look(self, op: int) -> None:
        for image in self.disk.images(random=Random(op), limit=self.limit):
            self.states += 1
            assert seqs(opened(image.disk, self.shards)) in self.allowed, f"before op {op}, {image.label}"


@pytest.mark.parametrize("durability", DURABLE)
def test_what_a_cap_took_stays_gone_when_a_checkpoint_after_a_restart_is_cut_short(durability: str) -> None:
    """The deletion vector is there before the snapshot: replay must not find room for the first record again."""
    disk = SimDisk()
    evict_and_delete(capped(disk, durability))
    log = opened(disk := disk.reboot())
    watch = Watch(disk)
    log.checkpoint()
    assert watch.states > 20


images_of_an_instant = pytest.mark.parametrize("limit", [6, pytest.param(40, marks=pytest.mark.sweep)])


@images_of_an_instant
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_what_a_cap_took_of_class_memory_stays_gone_in_every_shard(shards: int, limit: int) -> None:
    disk = SimDisk()
    log = capped(disk, "memory", shards)
    evict_and_delete(log)
    log.gaps()
    log.tick()
    watch = Watch(disk, shards, limit=limit)
    log.checkpoint()
    assert watch.states > 20


@images_of_an_instant
@pytest.mark.parametrize("place", ["capped", "other"])
@pytest.mark.parametrize(
    ("durability", "is_synced"), [*((durability, True) for durability in DURABLE), ("disk", False), ("memory", False)]
)
def test_what_a_cap_took_during_a_checkpoint_stays_gone(
    durability: str, is_synced: bool, place: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: it comes between the floors and the deletion vectors of that checkpoint, or in a checkpoint that does not
    write the topic, because nothing had changed when it began; then another checkpoint."""
    disk = SimDisk()
    log = capped(disk, durability)
    log.topic("other", durability="fsync").append(b"so that there is something to do")
    if place == "capped":
        state = log._find_topic("capped")
        assert state is not None
        state.mark_dirty()
    write = checkpoint._write_topic
    names: list[str] = []
    watches: list[Watch] = []

    def written(core: TopicState, *rest: object) -> None:
        write(core, *rest)  # type: ignore[arg-type]
        if core.context is log._context:  # not of an engine on a crash image
            names.append(core.name)
            if core.name == place and not watches and is_synced:
                # A reader of class `disk`, and the interval sync, would make the floor itself durable.
                evict_and_delete(log, is_seen=durability != "disk")
                log.topic("other").append(b"synced, with all that the shard has")
                watches.append(Watch(disk, limit=limit))
            elif core.name == place and not watches:  # a power cut may take the append and the delete
                evict_and_delete(log, is_seen=False)
                watches.append(Watch(disk, allowed=([1, 2, 3], [2, 3, 4], [2, 4]), limit=limit))

    monkeypatch.setattr(checkpoint, "_write_topic", written)
    log.checkpoint()
    assert ("capped" in names) == (place == "capped")
    assert watches[0].states > 20
    log.checkpoint()
    assert "capped" in names


@pytest.mark.parametrize("mode", get_args(SyncMode))
def test_a_close_whose_first_sync_fails_says_so(mode: SyncMode) -> None:
    """Method: the ledger has a row to write about a delete, and it is its sync that fails."""
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("orders", durability="disk")
    topic.append([b"1", b"2", b"3"])
    log.tick()
    topic.append(b"4")
    topic.delete(seqs=[1])
    disk.fail_sync(mode)
    with pytest.raises(Latched):
        log.close()
    with opened(disk.reboot()) as again:  # the directory was let go of all the same
        assert again.topic("orders", create=False).head_seq >= 3


@pytest.mark.parametrize("mode", get_args(SyncMode))
def test_a_topic_whose_making_is_in_doubt_is_not_made_twice(mode: SyncMode) -> None:
    """Method: its shard is latched. Where the next id is another shard's, a second one of its name could be made there,
    dropped there, and the first be back after a restart."""
    disk = SimDisk()
    log = opened(disk, 2)
    disk.fail_sync(mode)
    with pytest.raises(Latched, match="whether the last write is on disk is unknown"):
        log.topic("orders")
    for _ in range(3):
        with pytest.raises(Latched, match="wrote nothing"):
            log.topic("orders")
    made = []
    for number in range(4):
        try:
            made.append(log.topic(f"other-{number}", durability="fsync").name)
        except Latched:
            continue  # the latched shard's turn: the next id is the other's
    assert made, "the other shard goes on"
    assert not log.drop("orders")
    log.close()
    for image in (disk.reboot(), disk.crash_image("none"), disk.crash_image("all")):
        with opened(image, 2) as again:
            assert again.report.damage == []
            assert {*made} <= {*again.names()} <= {*made, "orders"}
            assert again.topic("orders").append(b"1").first_seq == 1


@pytest.mark.parametrize("mode", get_args(SyncMode))
def test_a_close_says_what_a_sync_that_failed_for_a_reader_kept_from_the_disk(mode: SyncMode) -> None:
    """Method: the reader is told of a gap, whose floor cannot be made durable: it reads all the same."""
    disk = SimDisk()
    log = opened(disk)
    topic = log.topic("capped", durability="disk", cap_records=2)
    topic.append([b"1", b"2"])
    topic.append(b"3")  # within what the first one reserved: nothing of it needs a sync
    disk.fail_sync(mode)
    page = topic.read(0)
    assert ([record.seq for record in page.records], page.gap is None) == ([2, 3], False)
    with pytest.raises(Latched, match="may not survive a power cut"):
        log.close()
    log.close()


def started(disk: SimDisk, shards: int, most: int = 30) -> list[SimDisk]:
    """What a power cut may leave of a start: all that was written, before each of the first operations."""
    images: list[SimDisk] = []
    disk.on_op = lambda _: images.append(disk.crash_image("all")) if len(images) < most else None
    opened(disk, shards)
    disk.on_op = None
    return images


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("written", [True, False])
def test_two_starts_with_other_shards_that_are_cut_short_leave_a_directory_that_opens(
    old: int, new: int, written: bool, step: int
) -> None:
    """Method: there is no snapshot yet. Either the very first start is cut short, or somebody wrote before."""
    disk = SimDisk()
    if written:
        opened(disk, old).topic("orders", durability="fsync").append(b"1")
    firsts = started(disk.reboot(), new) if written else started(disk, old)
    opens = 0
    for first in firsts[(old + new) % step :: step]:
        for second in started(first, new):
            with opened(second, new) as log:
                assert log.report.damage == []
                assert log.topic("orders").append(b"x").first_seq == 1 + written
            opens += 1
    assert opens > 300 // step


def _wal_syncs(disk: SimDisk) -> int:
    return sum(op.startswith("sync ") and "/wal" in op for op in disk.trace)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("by", ["records", "bytes"])
def test_live_reader_of_a_capped_disk_topic_costs_no_sync_per_push(by: str, shards: int) -> None:
    """Each push moves the floor. A reader that is not below it is shown no gap, so nothing has to be durable for it:
    the syncs follow the sync interval (here: `tick`) and not the pushes."""
    disk = SimDisk(trace=True)
    log = opened(disk, shards)
    caps: dict[str, Any] = {"cap_records": 8} if by == "records" else {"cap_bytes": 8}
    topic, free = log.topic("capped", durability="disk", **caps), log.topic("free", durability="disk")
    for _ in range(20):  # the caps are full, and seqs are reserved ahead
        topic.append(b"x")
        free.append(b"x")
    log.tick()
    counts = []
    for each in (topic, free):
        before, cursor = _wal_syncs(disk), each.head_seq
        for number in range(200):
            each.append(b"x")
            page = each.read(cursor)
            assert [record.seq for record in page.records] == [cursor + 1]
            assert page.gap is None
            assert topic_operations(each).is_floor_durable_for(cursor - 1), "a watcher is sent the page at once"
            text = topic_operations(each).read_json(cursor, 10, 1 << 20, nodes=frozenset(), show=FieldSelection())
            assert (text.counts.rows, text.gap) == (1, None)
            cursor = page.next_from_seq
            if number % 50 == 49:
                log.tick()
        counts.append(_wal_syncs(disk) - before)
    # The rows of the ledger about the evictions have syncs of their own: at most three a tick.
    assert counts[0] <= 4 * 4, f"syncs of 200 pushes in 4 intervals, capped and not: {counts}"
    assert counts[1] <= 4 * 2


def test_interval_sync_makes_the_floor_durable_for_a_later_reader_from_below() -> None:
    disk = SimDisk(trace=True)
    log = opened(disk, ledger_records=0)
    topic, other = log.topic("capped", durability="disk", cap_records=3), log.topic("other", durability="disk")
    for _ in range(10):
        topic.append(b"x")
    other.append(b"x")
    before = _wal_syncs(disk)
    log.tick()
    assert _wal_syncs(disk) == before + 1, "the floor has no sync of its own"
    shown = topic.read(0)
    assert shown.gap is not None
    assert shown.gap.gap_to == 7
    assert _wal_syncs(disk) == before + 1
    topic.append(b"x")
    shown = topic.read(0)
    assert shown.gap is not None
    assert shown.gap.gap_to == 8
    assert _wal_syncs(disk) == before + 2, "a floor that moved since is durable before a gap is shown"


@pytest.mark.parametrize("step", [18, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_shown_gap_of_a_capped_topic_never_falls_back(durability: str, shards: int, step: int) -> None:
    """At one operation in `step` of a history of writes, live reads, reads from below, ticks and checkpoints: what any
    power cut leaves has a gap that is not smaller than the largest that was shown."""
    disk = SimDisk()
    log = opened(disk, shards, wal_file_bytes=2048, head_reserve=4, segment_events_max=4)
    topic, other = log.topic("capped", durability=durability, cap_records=3), log.topic("other", durability="disk")
    shown, states = 1, 0

    def look(op: int) -> None:
        nonlocal states
        if op % step:
            return
        for image in disk.images(random=Random(op), limit=5):
            states += 1
            found = opened(image.disk, shards).topic("capped", create=False)
            gap = found.read(0).gap
            floor = 1 if gap is None else gap.gap_to + 1
            assert floor >= shown, f"before op {op}, {image.label}: a gap up to {shown - 1} was shown"

    disk.on_op = look
    random, live = Random(11), 0
    for number in range(40):
        topic.append([b"x"] * random.choice([1, 1, 2, 5]))
        if number % 3 == 0:
            other.append(b"o")
        page = topic.read(live)
        live = page.next_from_seq
        if page.gap is not None:
            shown = max(shown, page.gap.gap_to + 1)
        if number % 7 == 0:
            behind = topic.read(0).gap
            shown = max(shown, 1 if behind is None else behind.gap_to + 1)
        if number % 11 == 0:
            log.tick()
        if number % 25 == 24:
            log.checkpoint()
    assert shown > 40
    assert states > 200 // step


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", DURABLE)
def test_files_that_a_drop_removed_are_no_damage_after_a_kill(durability: str, shards: int, again: bool) -> None:
    """Until the next checkpoint the manifest still names the files of a dropped topic."""
    disk = SimDisk()
    log = opened(disk, shards)
    for name in ("a", "kept"):
        log.topic(name, durability=durability).append([b"x"] * 3)
    log.checkpoint()
    log.drop("a")
    if again:
        log.topic("a", durability=durability).append(b"y")
    log.tick()
    assert not any("/00000001/" in path for path in disk.tree()), "the files are still there"
    for image in (disk.reboot(), disk.crash_image("all")):
        for read_only in (True, False):
            found = opened(image, shards, read_only=read_only)
            assert found.report.damage == []
            health = found.health()
            assert health.ok
            assert health.corruptions == 0
            assert sorted(state.topic for state in found.topics()) == (["a", "kept"] if again else ["kept"])
            found.close()
