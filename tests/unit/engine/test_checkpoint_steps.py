"""The steps of a checkpoint, one by one: what makes a segment verify, and which topics are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.engine.harness import PATH, EngineHarness, datas, seqs

from tidelog.engine import Topic, checkpoint, manifest
from tidelog.engine.checkpoint import SegmentWriter
from tidelog.engine.manifest import TopicRow
from tidelog.engine.segment import Segment
from tidelog.engine.topic_state import TopicState
from tidelog.errors import WriteFailed
from tidelog.formats import segment_index
from tidelog.testing import SimDisk


def row(disk: SimDisk, name: str) -> TopicRow:
    return next(row for row in manifest.load_newest(disk, PATH).manifest.topics if row.name == name)


# ── verifying a segment ───────────────────────────────────────────────────────────────────────────


class Sealed:
    """The second segment of a topic: seq 5 in a frame of its own, seqs 6 to 8 in a batch."""

    def __init__(self) -> None:
        self.world = EngineHarness(segment_events_max=4)
        self.topic = self.world.log.topic("a", durability="fsync")
        self.topic.append([b"1", b"2", b"3", b"4"])
        other = self.world.log.topic("b", durability="fsync")
        other.append([b"1", b"2", b"3", b"4"])
        for batch in ([b"five"], [b"six", b"seven", b"eight"]):
            self.topic.append(batch)
            other.append(batch)
        self.world.log.checkpoint()
        self.segment = self._second(self.topic)
        self.data, self.entries = self._content(self.segment)
        self.foreign, _ = self._content(self._second(other))
        self.paused = 0
        self.writer = SegmentWriter(self.topic._state, self.segment.files, 5, self.segment, self._pause)

    def _pause(self) -> None:
        self.paused += 1

    def _second(self, topic: Topic) -> Segment:
        return next(part for part in topic._state.index.parts if isinstance(part, Segment) and part.base == 5)

    def _content(self, segment: Segment) -> tuple[bytes, bytes]:
        disk = self.world.disk
        data, entries = (disk.read_file(segment.path(suffix)) for suffix in (".data", ".idx"))
        return data, entries

    def offsets(self) -> list[int]:
        return sorted(set(segment_index.read_entries(self.entries)["frame_offset"].tolist()))


def changed_index(entries: bytes, at: int, **fields: int) -> bytes:
    copy = segment_index.read_entries(entries).copy()
    for name, value in fields.items():
        copy[name][at] = value
    return copy.tobytes()


@pytest.mark.parametrize("chunk", [1, 10, 60, 1 << 20])
def test_an_intact_segment_verifies_in_chunks_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may be read in several chunks. After each there is a pause."""
    monkeypatch.setattr(checkpoint, "_COPY_CHUNK_BYTES", chunk)
    sealed = Sealed()
    sealed.paused = 0
    assert sealed.writer._find_unverified(9, sealed.data, sealed.entries) is None
    assert sealed.paused == (2 if chunk < 60 else 1)
    assert sealed.writer._rebuild_index(9, sealed.data) == sealed.entries
    assert sealed.writer._end() == (len(sealed.data), 9)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_segment_with_anything_else_does_not_verify(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_COPY_CHUNK_BYTES", chunk)
    sealed = Sealed()
    data, entries, (first, second) = sealed.data, sealed.entries, sealed.offsets()
    assert first == 0
    size = len(data)
    find = sealed.writer._find_unverified
    assert find(9, data, entries[:-1]) == f"its index has {len(entries) - 1} bytes"
    assert find(10, data, entries) == f"its index has {len(entries)} bytes"
    assert find(9, data + b"tail", entries) == f"byte {size}: bytes that are in no frame"
    assert find(9, sealed.foreign, entries) == "its frames are another topic's"
    flipped = data[: second + 40] + bytes((data[second + 40] ^ 1,)) + data[second + 41 :]
    assert find(9, flipped, entries) == f"byte {second}: checksum mismatch"
    between = data[:second] + b"between" + data[second:]
    moved = segment_index.read_entries(entries).copy()
    moved["frame_offset"][1:] += 7
    after = second if chunk == 1 else 0  # the chunk before
    assert find(9, between, moved.tobytes()) == f"byte {after}: bytes that are in no frame"
    before = segment_index.read_entries(entries).copy()
    before["frame_offset"] += 7
    assert find(9, b"between" + data, before.tobytes()) == "byte 0: bytes that are in no frame"
    before["frame_offset"] -= 6
    assert find(9, b"x" + data, before.tobytes()) == "byte 0: bytes that are in no frame"
    assert (find(9, data, changed_index(entries, 0, frame_offset=second)) or "").startswith("its index: ")


def test_an_index_is_rebuilt_from_complete_data_of_its_own_topic_only() -> None:
    sealed = Sealed()
    data, second = sealed.data, sealed.offsets()[1]
    rebuild = sealed.writer._rebuild_index
    assert rebuild(9, data) == sealed.entries
    assert rebuild(9, data[:-1]) is None
    assert rebuild(9, data + b"tail") is None
    assert rebuild(9, data[:second]) is None
    assert rebuild(6, data) is None
    assert rebuild(10, data) is None
    assert rebuild(9, sealed.foreign) is None
    assert rebuild(6, data[:second]) == sealed.entries[: segment_index.ENTRY_BYTES]
    assert rebuild(8, data[second:]) is None, "as many records, of later seqs"


# ── topics ────────────────────────────────────────────────────────────────────────────────────────


def two_segments(durability: str = "fsync", names: Sequence[str] = ("a", "b")) -> tuple[EngineHarness, list[Topic]]:
    """Topics of which the first of two segments has no live record any more."""
    world = EngineHarness(segment_events_max=4, ledger_records=0)
    topics = [world.log.topic(name, durability=durability) for name in names]
    for topic in topics:
        topic.append([1, 2, 3, 4])
        topic.append([5, 6])
    world.log.checkpoint()
    for topic in topics:
        topic.delete(before_seq=5)
        topic.append([7])
    return world, topics


def test_a_topic_whose_row_fails_is_left_out_also_where_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    world, (first, second) = two_segments()
    build = checkpoint._build_topic_row

    def failing(topic: TopicState, *, final: bool) -> TopicRow:
        if topic is first._state:
            raise RuntimeError("a bug")
        return build(topic, final=final)

    before = row(world.disk, "a")
    monkeypatch.setattr(checkpoint, "_build_topic_row", failing)
    failed = world.log._checkpoints._run(final=False, copy=False)
    assert {topic.name: type(error).__name__ for topic, error in failed.items()} == {
        "a": "RuntimeError",
        "b": "OSError",
    }
    assert row(world.disk, "a") == before
    assert [segment.base for segment in row(world.disk, "b").segments] == [5]
    assert manifest.load_newest(world.disk, PATH).manifest.lagging == (first.id, second.id)
    assert {name: seqs(world.crash().topic(name)) for name in "ab"} == {"a": [5, 6, 7], "b": [5, 6, 7]}


@pytest.mark.parametrize("copy", [False, True])
def test_a_topic_that_is_dropped_after_it_was_listed_is_no_failure(copy: bool) -> None:
    world, (first, _) = two_segments()
    persist = checkpoint._persist_floors

    def drop_first(topics: Any) -> Any:
        world.log.drop("a")
        return persist(topics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_persist_floors", drop_first)
        failed = world.log._checkpoints._run(final=False, copy=copy)
    assert first._state not in failed
    assert [topic.name for topic in failed] == ([] if copy else ["b"])
    assert [state.topic for state in world.crash().topics()] == ["b"]


def test_settings_of_a_topic_that_is_not_copied_are_those_at_the_start_of_replay() -> None:
    world, (first, second) = two_segments()
    world.log.topic("a", cap_records=1_000)
    before = row(world.disk, "a").config
    world.log._checkpoints._run(final=False, copy=False)
    assert row(world.disk, "a").config == before
    world.log.checkpoint()
    assert row(world.disk, "a").config != before
    assert (datas(first), datas(second)) == ([5, 6, 7], [5, 6, 7])


@pytest.mark.parametrize(
    ("ranges", "saved"),
    [
        ([(1, 2), (3, 9)], ((1, 2), (3, 4))),
        ([(1, 2), (4, 6)], ((1, 2),)),
        ([(1, 4), (5, 6)], ((1, 4),)),
        ([(2, 3)], ((2, 3),)),
    ],
    ids=str,
)
def test_a_checkpoint_that_writes_rows_while_records_arrive_ends_its_ranges_with_the_row(
    ranges: list[tuple[int, int]], saved: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and trimmed ranges that reach beyond the records that have files end with the row's head."""
    world = EngineHarness(ledger_records=0)
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2, 3])
    write = checkpoint._write_topic

    def written(state: TopicState, *rest: Any) -> None:
        write(state, *rest)
        topic.append([4, 5, 6])
        state.index.deleted_ranges, state.index.trimmed_ranges = [*ranges], [*ranges]

    monkeypatch.setattr(checkpoint, "_write_topic", written)
    world.log.checkpoint()
    found = row(world.disk, "a")
    assert (found.head, found.reserved, found.earliest) == (3, 3, 1)
    assert found.ghosts == found.trims == saved


def test_a_row_has_the_router_frames_that_were_applied_when_its_records_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = EngineHarness(ledger_records=0)
    source, target = (world.log.topic(name, durability="fsync") for name in "sd")
    world.log.router("r", "s", "d")
    source.append([1, 2])
    world.log.tick()
    applied = target._state.applied_router_frame
    write = checkpoint._write_topic

    def written(state: TopicState, *rest: Any) -> None:
        write(state, *rest)
        state.applied_router_frame += 1

    monkeypatch.setattr(checkpoint, "_write_topic", written)
    world.log.checkpoint()
    assert applied > 0
    assert row(world.disk, "d").wired == applied


def test_floors_that_rose_while_files_were_written_are_durable_before_deletes_are_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = EngineHarness(ledger_records=0)
    topic = world.log.topic("a", durability="fsync", cap_records=5)
    topic.append([1, 2, 3, 4])
    write = checkpoint._write_topic

    def written(state: TopicState, *rest: Any) -> None:
        write(state, *rest)
        topic.append([5, 6, 7])
        topic.delete(seqs=[4])

    monkeypatch.setattr(checkpoint, "_write_topic", written)
    world.log.checkpoint()
    assert topic._state.durable_floor == topic._state.index.evict_floor == 3


@pytest.mark.parametrize("durability", ["memory", "fsync"])
def test_the_wal_is_synced_before_deletes_are_saved_also_without_a_gap_log(durability: str) -> None:
    world = EngineHarness(ledger_records=0)
    topic = world.log.topic("a", durability=durability)
    topic.append([1, 2, 3])
    world.log.checkpoint()
    topic.delete(seqs=[2])
    start = len(world.disk.trace)
    world.log.checkpoint()
    done = world.disk.trace[start:]
    saved = next(at for at, line in enumerate(done) if ".del" in line)
    synced = [line for line in done[:saved] if line.startswith("sync ") and "/wal/" in line]
    assert bool(synced) is (durability == "memory"), "a durable delete was synced when it was acknowledged"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_writes_one_frame_to_each_shard(shards: int) -> None:
    world = EngineHarness(ledger_records=0, wal_shards=shards)
    world.log.topic("a", durability="fsync").append([1, 2])
    before = [shard.stats.frames for shard in world.log.shards]
    world.log.checkpoint()
    assert [shard.stats.frames for shard in world.log.shards] == [frames + 1 for frames in before]


def test_a_directory_is_synced_only_if_a_file_of_it_was_removed() -> None:
    world, (first, second) = two_segments()
    world.log.checkpoint()
    state = world.log._checkpoints.state
    files = {topic: world.log._context.segment_files(topic.id) for topic in (first, second)}
    state.files_to_remove = [
        files[first].path(1, 0, ".data"),
        files[first].path(1, 0, ".none"),
        files[second].path(1, 0, ".none"),
    ]
    start = len(world.disk.trace)
    checkpoint._remove_unneeded(world.log._context, state, (), complete=False)
    synced = [line for line in world.disk.trace[start:] if line.startswith("sync_dir ")]
    assert synced == [f"sync_dir {files[first].directory}"]
    assert state.files_to_remove == []


def test_attempts_that_failed_leave_memtables_that_the_next_one_writes_in_order() -> None:
    """Three memtables of one segment: two attempts froze the first two."""
    world = EngineHarness(ledger_records=0, segment_events_max=6)
    topic = world.log.topic("a", durability="fsync")
    for number in range(3):
        topic.append([b"%d" % number, b"more"])
        if number < 2:
            world.disk.fail("create", path="topics/")
            with pytest.raises(WriteFailed):
                world.log.checkpoint()
    topic.append([b"next"])
    assert [part.base for part in topic._state.index.parts] == [1, 3, 5, 7]
    world.log.checkpoint()
    first, second = row(world.disk, "a").segments
    assert (first.base, first.stop, first.sealed, first.unproven, first.live) == (1, 7, True, False, 6)
    assert (second.base, second.stop, second.sealed) == (7, 8, False)
    assert [part.base for part in topic._state.index.parts] == [1, 7]
    assert datas(world.crash().topic("a")) == [b"0", b"more", b"1", b"more", b"2", b"more", b"next"]


def test_a_row_has_the_hops_of_records_that_the_next_router_has_not_passed_on() -> None:
    world = EngineHarness(ledger_records=0)
    source, target, last = (world.log.topic(name, durability="fsync") for name in "sde")
    world.log.router("r", "s", "d")
    world.log.router("q", "d", "e")
    source.append([1, 2, 3])
    assert seqs(target) == [1, 2, 3]
    world.log._checkpoints._run(final=False)
    assert row(world.disk, "d").hops == ((1, 4, 1),)
    assert seqs(last) == [1, 2, 3]
