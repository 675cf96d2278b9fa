"""Rewrite: sealed segments get new files without the bytes of deleted records (D3, D13, D15)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.unit.engine.harness import PATH, EngineHarness, Restart

from tidelog.engine import Counts, Engine, Topic
from tidelog.engine.check import check_directory
from tidelog.engine.rewrite import RETRY_MS, NotVerified, _SegmentRewrite, dead_records
from tidelog.engine.segment import Segment
from tidelog.errors import DiskFull, WriteFailed
from tidelog.formats import scan
from tidelog.formats.segment_rewrite import encode_without, find_difference
from tidelog.testing import SimDisk

SMALL: dict[str, Any] = {"segment_events_max": 12}
Found = list[tuple[Any, ...]]
RESTARTS: tuple[Restart, ...] = ("kill", "crash", "reopen")


def rows_of(topic: Topic) -> Found:
    return [tuple(record) for record in topic.read(0, limit=1000).records]


def counts_of(topic: Topic) -> Counts:
    """What every seq is, but for those that a restart reserves."""
    return topic.read(0, limit=1000).counts._replace(holes=0)


def filled(world: EngineHarness, durability: str = "disk", name: str = "t") -> Topic:
    """Twelve records in one sealed segment, singly and in batches, and four in another that grows."""
    topic = world.log.topic(name, durability=durability)
    topic.append(b"one" * 30, tag="a", node="n1", meta={"k": 1})
    topic.append({"two": 2})
    topic.append([b"bytes" * 9, {"json": 4}, b""], tag=["a", None, "b"], node=["n1", "n2", None], meta=[None, {}, None])
    topic.append([b"x" * 40] * 4, tag="shared", node="n3")
    topic.append([{"n": n, "pad": "p" * 30} for n in range(3)])
    topic.append([b"later"] * 4)
    world.log.checkpoint()
    return topic


def segments(topic: Topic) -> list[Segment]:
    return [part for part in topic._state.index.parts if isinstance(part, Segment)]


def no_damage(disk: SimDisk) -> None:
    assert [finding for finding in check_directory(PATH, disk=disk) if finding.damage] == []


@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("seed", range(4))
def test_rewrite_keeps_every_live_record_and_every_count(durability: str, seed: int) -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world, durability)
    gone = sorted(Random(seed).sample(range(1, 13), 7))
    topic.delete(seqs=gone)
    before, counts = rows_of(topic), counts_of(topic)
    result = topic.rewrite(force=True)
    assert (result.segments, result.records_removed, result.skipped) == (1, 7, ())
    assert rows_of(topic) == before
    assert counts_of(topic) == counts
    (segment, _) = segments(topic)
    assert (segment.generation, segment.removed, segment.live_records) == (1, 7, 5)
    assert {
        path for path in world.files(under="topics/00000001") if ".g1." not in path and f"{1:016d}" in path
    } == set()
    no_damage(world.disk)
    for how in RESTARTS:
        topic = world.restart(how).topic("t")
        assert rows_of(topic) == before
        assert counts_of(topic) == counts
        assert world.log.report.damage == []
    assert topic.rewrite(force=True).files == (), "nothing is left to remove"


def test_bytes_of_removed_records_are_in_no_file_of_the_segment() -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.append([b"needle-data"] * 2, tag="needle-tag", node="needle-node", meta={"m": "needle-meta"})
    topic.append(
        [b"needle-data", b"kept"], tag=["needle-tag", "t"], node=["needle-node", "n"], meta=[{"m": "needle-meta"}, None]
    )
    topic.append([b"fill"] * 6)
    topic.append(b"next")
    world.log.checkpoint()
    assert topic.delete(match="needle-*").deleted == 3
    topic.rewrite(force=True)
    held = b"".join(content for path, content in world.disk.tree().items() if "/topics/" in path)
    assert b"needle" not in held
    assert b"kept" in held


def test_records_below_the_first_live_one_are_removed_as_well() -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(before_seq=8)
    counts = counts_of(topic)
    assert topic.rewrite(force=True).records_removed == 7
    assert counts_of(topic) == counts
    topic = world.restart("crash").topic("t")
    assert counts_of(topic) == counts
    assert topic.state().earliest_seq == 8


def test_segment_of_mostly_deleted_records_shrinks() -> None:
    """Of 300 records of which 297 were deleted all 302,820 bytes stayed."""
    world = EngineHarness()
    topic = world.log.topic("t")
    for n in range(300):
        topic.append(b"%4d" % n + bytes(960))
    topic.seal()
    world.log.checkpoint()
    topic.delete(seqs=[seq for seq in range(1, 301) if seq not in (5, 150, 299)])
    (file,) = topic.rewrite().files
    assert file.bytes_before > 300_000
    assert file.bytes_after < 5_000
    assert [record.seq for record in topic.read().records] == [5, 150, 299]


# ── when it happens ───────────────────────────────────────────────────────────────────────────────


def test_background_task_rewrites_segments_above_the_threshold() -> None:
    world = EngineHarness(**SMALL, rewrite_dead_percent=30, rewrite_dead_bytes_min=100, rewrite_bytes_per_second=0)
    topic = filled(world)
    topic.delete(seqs=[1, 2])
    world.log.checkpoint()
    world.log.tick()
    assert segments(topic)[0].generation == 0, "too little is deleted"
    topic.delete(seqs=[3, 6, 7, 8, 9, 10])
    world.log.checkpoint()
    world.log.tick()
    assert segments(topic)[0].generation == 1
    stats = world.log.rewrites
    assert (stats.segments, stats.records_removed, stats.failures) == (1, 8, 0)
    assert stats.bytes_reclaimed > 100
    assert {task.name: task.failures for task in world.log.health().tasks}["rewrite"] == 0


def test_deletions_from_before_a_restart_are_found_by_the_background_task() -> None:
    world = EngineHarness(**SMALL, rewrite_dead_bytes_min=100, rewrite_dead_percent=0)
    topic = filled(world)
    topic.delete(seqs=list(range(1, 11)))
    world.log.checkpoint()
    world.log.tick()
    assert segments(topic)[0].generation == 0, "it is switched off"
    topic = world.restart("reopen", rewrite_dead_percent=40).topic("t")
    world.log.tick()
    assert segments(topic)[0].generation == 1


def test_pace_is_the_limit_of_the_config() -> None:
    world = EngineHarness(**SMALL, rewrite_dead_bytes_min=1, rewrite_bytes_per_second=1000)
    topic = filled(world)
    topic.delete(seqs=list(range(1, 12)))
    world.log.checkpoint()
    waits: list[int] = []
    world.log._rewriter._wait_us = waits.append
    world.log.tick()
    written = segments(topic)[0].size
    assert waits
    assert max(waits) >= written * 1000 // 2, "a microsecond per thousandth of a byte"


def test_sealed_and_active_segments_without_deletions_are_left() -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[14, 15])  # in the segment that grows
    world.log.checkpoint()
    assert topic.rewrite(force=True).files == ()


def test_deletes_during_a_rewrite_are_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[1, 2, 3])
    write = _SegmentRewrite._write

    def and_delete(self: _SegmentRewrite, *args: Any) -> Any:
        file = write(self, *args)
        topic.delete(seqs=[8])
        topic.delete(before_seq=6)
        return file

    monkeypatch.setattr(_SegmentRewrite, "_write", and_delete)
    assert topic.rewrite(force=True).records_removed == 3
    expected = [6, 7, *range(9, 17)]
    assert [row[0] for row in rows_of(topic)] == expected
    for how in RESTARTS:
        topic = world.restart(how).topic("t")
        assert [row[0] for row in rows_of(topic)] == expected
    assert topic.rewrite(force=True).records_removed == 3


def test_a_planted_swap_that_loses_deletes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the swap takes the deletions from the start of the rewrite."""
    monkeypatch.setattr("tidelog.engine.rewrite.dead_records", Stale())
    with pytest.raises(AssertionError):
        test_deletes_during_a_rewrite_are_carried_over(monkeypatch)


class Stale:
    """`dead_records` that answers for a segment as it did the first time after its deletes."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, topic: Any, segment: Segment) -> Any:
        return self._known.setdefault(id(segment), dead_records(topic, segment))


def test_topic_that_is_dropped_during_a_rewrite_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[1, 2, 3])
    write = _SegmentRewrite._write

    def and_drop(self: _SegmentRewrite, *args: Any) -> Any:
        file = write(self, *args)
        world.log.drop("t")
        return file

    monkeypatch.setattr(_SegmentRewrite, "_write", and_drop)
    assert topic._state.context.rewriter is not None
    assert topic._state.context.rewriter.rewrite(topic._state, force=True).files == ()
    assert world.files(".data", "topics/00000001/seg-0000000000000001.g1") == []
    world.log.tick()
    assert world.restart("reopen").names() == []


# ── what is not vouched for ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(8))
def test_segment_with_a_flipped_bit_is_reported_and_left(seed: int) -> None:
    world = EngineHarness(**SMALL)
    topic, other = filled(world), filled(world, name="other")
    for each in (topic, other):
        each.delete(seqs=[2, 4, 6])
    (segment, _) = segments(topic)
    world.log.checkpoint()
    random = Random(seed)
    world.disk.flip_bit(segment.path(".data"), random.randrange(segment.size), random.randrange(8))
    segment.unmap()
    result = topic.rewrite(force=True)
    assert result.files == ()
    assert [each.base for each in result.skipped] == [1]
    assert world.log.corruption()[0].topic == "t"
    assert not world.log.health().ok
    assert segments(topic)[0] is segment
    assert other.rewrite(force=True).segments == 1, "another topic is rewritten"
    assert [each.base for each in topic.rewrite(force=True).skipped] == [1], "it is read again: it may be repaired"
    assert world.log.rewrites.refused == 2


@pytest.mark.parametrize("suffix", [".foot", ".data"])
def test_segment_with_a_lost_file_is_left(suffix: str) -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[2, 4, 6])
    (segment, _) = segments(topic)
    world.disk.remove(segment.path(suffix))
    segment.unmap()
    assert [each.base for each in topic.rewrite(force=True).skipped] == [1]


def test_a_planted_rewrite_without_verification_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the rewrite copies what it finds; a flipped bit gets a valid footer."""

    def unverified(self: _SegmentRewrite) -> Any:
        data, _ = self.segment.files.open(self.segment.base, self.segment.generation)
        content = bytearray(data.fetch(0, self.segment.size))
        pristine = scan.scan_records(bytes(content))
        if pristine.end != len(content):
            raise NotVerified("planted")
        return pristine.rows

    monkeypatch.setattr(_SegmentRewrite, "_read_verified", unverified)
    monkeypatch.setattr("tidelog.formats.scan.count_valid_checksums", lambda *columns: len(columns[1]))
    found = 0
    for seed in range(8):
        try:
            test_segment_with_a_flipped_bit_is_reported_and_left(seed)
        except (AssertionError, WriteFailed):
            found += 1
    assert found


def test_written_file_that_reads_back_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[2, 4])
    before = rows_of(topic)

    def wrong(rows: Any, removed: Any) -> Iterator[Any]:
        changed = removed.copy()
        changed[5] = True
        return encode_without(rows, changed)

    monkeypatch.setattr("tidelog.engine.rewrite.encode_without", wrong)
    with pytest.raises(WriteFailed, match="is not what was to be written"):
        topic.rewrite(force=True)
    assert rows_of(topic) == before
    assert [path for path in world.files(under="topics") if ".g1" in path] == []


@pytest.mark.parametrize(("error", "raised"), [(errno.ENOSPC, DiskFull), (errno.EIO, WriteFailed)])
@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_dir"])
def test_failed_call_leaves_the_segment_as_it_was(call: Any, error: int, raised: type[Exception]) -> None:
    world = EngineHarness(**SMALL, rewrite_dead_bytes_min=1, rewrite_dead_percent=1)
    topic, other = filled(world), filled(world, name="other")
    for each in (topic, other):
        each.delete(seqs=[2, 4, 6])
    world.log.checkpoint()
    before = rows_of(topic)
    path = f"{topic.id:08X}/seg-{1:016d}.g1" if call != "sync_dir" else f"{topic.id:08X}"
    if call == "sync":
        world.disk.fail_sync("dropped", path=path)
    else:
        world.disk.fail(call, error=error, path=path, times=1)
    with pytest.raises(raised if call != "sync" else WriteFailed, match="nothing was changed"):
        world.log.tick()
    assert rows_of(topic) == before
    assert segments(topic)[0].generation == 0
    assert [path for path in world.files(under="topics/00000001") if ".g1" in path] == []
    assert segments(other)[0].generation == 1, "another topic is rewritten"
    assert world.log.rewrites.failures == 1
    world.clock.tick(RETRY_MS)
    world.log.tick()
    assert segments(topic)[0].generation == 1, "it is tried again"
    assert rows_of(topic) == before


def test_close_gives_up_a_rewrite() -> None:
    world = EngineHarness(**SMALL, rewrite_dead_bytes_min=1)
    topic = filled(world)
    topic.delete(seqs=list(range(1, 10)))
    world.log.checkpoint()
    world.log._rewriter.stop()
    world.log._rewriter.run()
    assert segments(topic)[0].generation == 0
    assert [path for path in world.files(under="topics") if ".g1" in path] == []


# ── power cuts ────────────────────────────────────────────────────────────────────────────────────


class CrashCheck:
    """Every image of a power cut while a history runs: opened twice, each time with the live records of a model."""

    def __init__(self, world: EngineHarness, expected: Callable[[], Found]) -> None:
        self.world, self._expected = world, expected
        self.states, self._failed = 0, ""
        self._seen: set[bytes] = set()

    def __enter__(self) -> CrashCheck:
        self.world.disk.on_op = self._look
        return self

    def __exit__(self, *_: object) -> None:
        self.world.disk.on_op = None
        assert not self._failed, self._failed

    def _look(self, op: int) -> None:
        self.world.disk.on_op = None
        expected = self._expected()
        for keep in ("none", "all", Random(op)):
            disk = self.world.disk.crash_image(keep)
            digest = disk.digest()
            if digest in self._seen:
                continue
            self._seen.add(digest)
            self.states += 1
            for _ in range(2):
                log = self.world.open(disk)
                if log.report.damage or rows_of(log.topic("t")) != expected:
                    self._failed += f"before operation {op}: {log.report.damage}\n"
                    return  # not an exception: the engine would take it for one of its own
                disk = disk.reboot()
        self.world.disk.on_op = self._look


def cut_during_a_rewrite(shards: int = 1) -> int:
    world = EngineHarness(**SMALL, wal_shards=shards)
    topic = filled(world, "fsync")
    topic.delete(seqs=[1, 4, 6, 7, 8, 9])
    expected = rows_of(topic)
    with CrashCheck(world, lambda: expected) as crashes:
        topic.rewrite(force=True)
        for seq in (2, 11):
            topic._state.context.rewriter.rewrite(topic._state, force=True)  # type: ignore[union-attr]
            world.disk.on_op, look = None, world.disk.on_op
            topic.delete(seqs=[seq])
            expected = rows_of(topic)
            world.disk.on_op = look
            world.log.checkpoint()
        topic.rewrite(force=True)
        world.log.close()
    no_damage(world.disk)
    return crashes.states


@pytest.mark.parametrize("shards", [1, 2])
def test_rewrite_survives_a_power_cut_at_every_disk_call(shards: int) -> None:
    assert cut_during_a_rewrite(shards) > 50


def test_a_planted_swap_before_the_sync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    written = _SegmentRewrite._write_data

    def without_sync(self: _SegmentRewrite, pieces: Any) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tidelog.testing.simulated_disk.SimFile.sync", lambda *_: None)
            return written(self, pieces)

    monkeypatch.setattr(_SegmentRewrite, "_write_data", without_sync)
    with pytest.raises(AssertionError):
        cut_during_a_rewrite()


def test_a_planted_early_removal_of_the_old_files_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the old files go at once, while the older manifest names them."""
    swap = _SegmentRewrite._swap

    def and_remove(self: _SegmentRewrite, *args: Any) -> None:
        swap(self, *args)
        for suffix in (".data", ".idx", ".foot"):
            self.segment.files.disk.remove(self.segment.path(suffix))

    monkeypatch.setattr(_SegmentRewrite, "_swap", and_remove)
    with pytest.raises(AssertionError):
        cut_during_a_rewrite()


def test_rewrite_between_the_row_and_the_manifest_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest of that checkpoint names the old files: they stay for it and for the next one."""
    world = EngineHarness(**SMALL)
    topic = filled(world, "fsync")
    topic.delete(seqs=[1, 4, 6, 7, 8, 9])
    expected = rows_of(topic)
    from tidelog.engine import checkpoint

    build, done = checkpoint._build_topic_row, list[int]()

    def and_rewrite(state: Any, *, final: bool) -> Any:
        built = build(state, final=final)
        if state.name == "t" and not done:
            done.append(1)
            state.context.rewriter.rewrite(state, force=True)
        return built

    monkeypatch.setattr(checkpoint, "_build_topic_row", and_rewrite)
    with CrashCheck(world, lambda: expected):
        for _ in range(3):
            world.log.checkpoint()
    assert done
    assert {path.count(".g1.") for path in world.files(".data", "topics/00000001") if f"{1:016d}" in path} == {1}


# ── readers ───────────────────────────────────────────────────────────────────────────────────────


def test_readers_of_the_old_files_finish() -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[1, 4, 6])
    world.log.checkpoint()
    expected = rows_of(topic)
    with topic._state.lock:
        (part, *_) = topic._state.index.parts
        read = part.reader(1, 13, 1 << 20)
    listed = topic.segments().segments[0]
    beside: Engine = world.reader()
    topic.rewrite(force=True)
    assert len(read().rows) == 12, "a page that was planned before"
    assert rows_of(beside.topic("t", create=False)) == expected, "a reader in another process"
    assert topic.segment(1, 0) is None
    now = topic.segment(1)
    assert now is not None
    assert now.generation == 1
    assert listed.generation == 0


def test_delete_by_tag_searches_the_new_files_where_the_old_ones_are_gone() -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    topic.delete(seqs=[1, 4])
    topic.rewrite(force=True)
    assert topic.delete(match="shared").deleted == 4
    assert topic.delete(match="a").deleted == 1


def test_difference_of_any_column_is_found() -> None:
    world = EngineHarness(**SMALL)
    topic = filled(world)
    (segment, _) = segments(topic)
    data, _ = segment.files.open(1, 0)
    rows = scan.scan_records(data.fetch(0, segment.size)).rows
    none = np.zeros(len(rows), bool)
    assert find_difference(rows, rows, none) is None
    for number in range(len(rows)):
        dead = none.copy()
        dead[number] = True
        made = scan.scan_records(b"".join(encode_without(rows, dead))).rows
        assert find_difference(rows, made, dead) is None
        if rows.data.size[number]:
            assert find_difference(rows, made, none) is not None
