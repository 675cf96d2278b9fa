"""Segments for outside consumers: by time, listed, and copied (E5, E8, G5, G62, G64, G66, G70).

Sums and bytes are compared with the files on disk, read by its own means: a test must not ask the code under
test what is right.
"""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.unit.engine.harness import CLASSES, TINY, EngineHarness, InterposingDisk, read_topic
from xxhash import xxh3_64_intdigest

from tidelog.disk.interface import Mode
from tidelog.engine import Topic
from tidelog.engine.segment_listing import FILES, SegmentFile
from tidelog.errors import Corrupt, NotFound, TopicNotFound
from tidelog.formats import sealed_segment
from tidelog.testing import SimDisk
from tidelog.testing.simulated_disk import SimFile


def file_of(world: EngineHarness, topic: Topic, base: int, kind: str) -> bytes | None:
    """The files on disk."""
    return world.disk.tree().get(f"data/topics/{topic.id:08X}/seg-{base:016d}.{kind}")


def bytes_of(held: SegmentFile, kind: str) -> bytes | None:
    content = held.content(kind)  # type: ignore[arg-type]  # each of FILES
    return None if content is None else bytes(content)


def filled(world: EngineHarness, count: int = 10, **config: Any) -> Topic:
    """`count` records, one millisecond apart, in segments of four."""
    topic = world.log.topic("a", **{"durability": "fsync", **config})
    for number in range(1, count + 1):
        topic.append({"n": number})
        world.clock.tick(1)
    return topic


# ── by time ───────────────────────────────────────────────────────────────────────────────────────


def first_by_hand(topic: Topic, ts_ms: int) -> int:
    """The oracle: look at every record."""
    found = [record.seq for record in read_topic(topic).records if record.ts_ms >= ts_ms]
    return found[0] if found else topic.head_seq + 1


@pytest.mark.parametrize("durability", CLASSES)
def test_a_time_finds_the_first_record_of_it_or_later(durability: str) -> None:
    world = EngineHarness(**TINY)
    topic = filled(world, 10, durability=durability)
    start_ms = read_topic(topic).records[0].ts_ms
    assert topic.seek(start_ms) == 1
    assert topic.seek(start_ms + 4) == 5
    assert topic.seek(start_ms + 9) == 10
    assert topic.seek(start_ms + 10) == 11, "nothing is that late: one past the head"


@pytest.mark.parametrize("ts_ms", [-(1 << 70), -1, 0])
def test_a_time_before_everything_finds_the_earliest(ts_ms: int) -> None:
    world = EngineHarness(**TINY)
    topic = filled(world)
    topic.delete(before_seq=4)
    assert topic.seek(ts_ms) == 4


def test_a_time_that_no_clock_shows_finds_nothing() -> None:
    assert filled(EngineHarness(**TINY)).seek(1 << 70) == 11


def test_an_empty_topic_has_no_record_of_any_time() -> None:
    topic = EngineHarness(**TINY).log.topic("a")
    assert topic.seek(0) == 1


def test_deleted_records_are_passed_over_also_into_the_next_part() -> None:
    """G72: a delete is silent, here too."""
    world = EngineHarness(**TINY)
    topic = filled(world)
    start_ms = read_topic(topic).records[0].ts_ms
    topic.delete(seqs=[5])
    assert topic.seek(start_ms + 4) == 6
    topic.delete(seqs=[7, 8])
    assert topic.seek(start_ms + 6) == 9, "the live records of its part are before it"
    topic.delete(seqs=[6])
    assert topic.seek(start_ms + 4) == 9
    topic.delete(seqs=[9, 10])
    assert topic.seek(start_ms + 4) == 11


def test_expired_records_are_not_found() -> None:
    """G70: what was lost to age is lost for a seek too."""
    world = EngineHarness(**TINY)
    topic = filled(world, 10, ttl_ms=1_000)
    world.clock.tick(1_000 - 5)
    assert topic.seek(0) == topic.earliest_seq == 6


@pytest.mark.parametrize("seed", range(5))
def test_seeking_finds_what_looking_at_every_record_finds(seed: int) -> None:
    """Method: a seeded life of writes, deletes, checkpoints, restarts and pauses; after every step a few times are
    sought and compared with a full read."""
    random = Random(seed)
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability=random.choice(["memory", "disk", "fsync"]), cap_records=30)
    begin_ms = world.clock.now_us() // 1000
    for _ in range(40):
        match random.randrange(6):
            case 0:
                world.log.checkpoint()
            case 1 if topic.head_seq:
                topic.delete(seqs=sorted({random.randint(1, topic.head_seq) for _ in range(5)}))
            case 2:
                topic = world.restart("reopen").topic("a")
            case _:
                topic.append([b"x"] * random.randint(1, 3))
                world.clock.tick(random.choice([0, 0, 1, 5]))
        span_ms = world.clock.now_us() // 1000 - begin_ms
        for ts_ms in (begin_ms + random.randint(-1, span_ms + 1) for _ in range(2)):
            assert topic.seek(ts_ms) == first_by_hand(topic, ts_ms), f"seed {seed}, {ts_ms}"


def test_seeking_in_a_dropped_topic_says_so() -> None:
    world = EngineHarness(**TINY)
    topic = filled(world)
    world.log.drop("a")
    with pytest.raises(TopicNotFound):
        topic.seek(0)


# ── listed ────────────────────────────────────────────────────────────────────────────────────────


def test_what_no_file_has_is_the_tail() -> None:
    world = EngineHarness(**TINY)
    topic = filled(world, 10)
    listing = topic.segments()
    assert (listing.segments, listing.tail_from_seq, listing.head_seq) == ([], 0, 10)
    world.log.checkpoint()
    topic.append(b"later")
    listing = topic.segments()
    assert [(held.base, held.stop, held.sealed) for held in listing.segments] == [
        (1, 5, True),
        (5, 9, True),
        (9, 11, False),
    ]
    assert (listing.tail_from_seq, listing.head_seq, listing.earliest_seq, listing.evict_floor) == (10, 11, 1, 1)
    assert [record.data for record in topic.read(listing.tail_from_seq).records] == [b"later"]


def test_segments_and_tail_together_are_every_record() -> None:
    """G5: each seq up to the head is in a listed segment or after the tail's cursor."""
    world = EngineHarness(**TINY)
    topic = filled(world, 13)
    world.log.checkpoint()
    topic.append([b"x"] * 3)
    listing = topic.segments()
    covered = [seq for held in listing.segments for seq in range(held.base, held.stop)]
    covered += range(listing.tail_from_seq + 1, listing.head_seq + 1)
    assert covered == list(range(1, 17))


def test_an_ephemeral_topic_has_no_files() -> None:
    """G11."""
    world = EngineHarness(**TINY)
    topic = filled(world, durability="ephemeral")
    world.log.checkpoint()
    listing = topic.segments()
    assert (listing.segments, listing.tail_from_seq, listing.head_seq) == ([], 0, 10)


def test_records_after_those_in_memory_are_tail_as_well() -> None:
    """A topic that was ephemeral for a while: a reader that took the later segments would miss the records between."""
    world = EngineHarness(**TINY)
    topic = filled(world, 4)
    world.log.topic("a", durability="ephemeral")
    topic.append([b"in memory"] * 2)
    world.log.topic("a", durability="fsync")
    topic.append([b"in a file"] * 4)
    world.log.checkpoint()
    listing = topic.segments()
    assert [held.base for held in listing.segments] == [1]
    assert listing.tail_from_seq == 4
    assert [record.seq for record in topic.read(listing.tail_from_seq).records] == [5, 6, 7, 8, 9, 10]
    topic.delete(seqs=[5, 6])
    assert [held.base for held in topic.segments().segments] == [1, 7], "nothing is between them any more"


def test_segments_below_the_floor_are_not_listed() -> None:
    """G84: what cannot be read is not offered, whether its files are removed already or not."""
    world = EngineHarness(**TINY)
    topic = filled(world, 10)
    world.log.checkpoint()
    topic.delete(before_seq=6)
    listing = topic.segments()
    assert [held.base for held in listing.segments] == [5, 9]
    assert (listing.earliest_seq, listing.evict_floor) == (6, 1)
    assert topic.segment(1) is None
    assert topic.segment(5) is not None


def test_counts_and_times_are_those_of_the_records() -> None:
    world = EngineHarness(**TINY)
    topic = filled(world, 8)
    world.log.checkpoint()
    topic.delete(seqs=[2])
    first = topic.segments().segments[0]
    records = [record for record in read_topic(topic).records if record.seq < 5]
    assert (first.records, first.live_records) == (4, 3)
    assert first.live_bytes == sum(len(b'{"n":%d}' % record.data["n"]) for record in records)
    assert (first.first_ts, first.last_ts) == (records[0].ts_ms, records[-1].ts_ms)


# ── copied ────────────────────────────────────────────────────────────────────────────────────────


def test_files_are_the_bytes_that_lie_on_the_disk() -> None:
    """G64."""
    world = EngineHarness(**TINY)
    topic = filled(world, 10)
    world.log.checkpoint()
    topic.delete(seqs=[2, 6, 7])
    world.log.checkpoint()
    listing = topic.segments()
    assert len(listing.segments) == 3
    for held in listing.segments:
        for kind in FILES:
            content, stored = bytes_of(held, kind), file_of(world, topic, held.base, kind)
            assert content == (None if stored is None else stored[: len(content or b"")]), f"{held.base} {kind}"
            assert held.digest(kind) == (None if content is None else xxh3_64_intdigest(content))
        assert held.length("data") == len(bytes_of(held, "data") or b"")
        assert held.length("idx") == held.records * 20
        assert (bytes_of(held, "foot") is None) == (not held.sealed)


def test_deletions_are_those_of_now_before_any_checkpoint_wrote_them() -> None:
    """G77: a copy of a segment must not bring back what was deleted before it was listed."""
    world = EngineHarness(**TINY)
    topic = filled(world, 4)
    world.log.checkpoint()
    assert topic.segments().segments[0].content("del") is None
    topic.delete(seqs=[3])
    assert file_of(world, topic, 1, "del") is None
    held = topic.segments().segments[0]
    vector = bytes_of(held, "del")
    assert vector is not None
    assert sealed_segment.decode_deletion_vector(vector).seqs().tolist() == [3]
    world.log.checkpoint()
    assert file_of(world, topic, 1, "del") == vector, "and the checkpoint writes these very bytes"
    topic.delete(seqs=[1])
    assert bytes_of(held, "del") == vector, "a listing is of its moment"


def test_a_segment_that_grew_gives_what_was_listed() -> None:
    """G62: bytes after the listed length are not returned."""
    world = EngineHarness(**TINY)
    topic = filled(world, 2)
    world.log.checkpoint()
    before = topic.segments().segments[0]
    data, digest = bytes_of(before, "data"), before.digest("data")
    topic.append({"n": 3})
    world.log.checkpoint()
    after = topic.segments().segments[0]
    assert (before.stop, after.stop) == (3, 4)
    assert bytes_of(before, "data") == data
    assert before.digest("data") == digest
    assert (bytes_of(after, "data") or b"").startswith(data or b"-")
    assert after.digest("data") == xxh3_64_intdigest(bytes_of(after, "data") or b"") != digest
    assert after.cached_digest("data") == after.digest("data")


def test_a_copy_that_has_begun_outlives_the_files() -> None:
    """G64: an open mapping survives the removal of its file."""
    world = EngineHarness(**TINY)
    topic = filled(world, 8)
    world.log.checkpoint()
    held = topic.segments().segments[0]
    content = held.content("data")
    assert content is not None
    copy = bytes(content)
    topic.delete(before_seq=7)
    for number in range(3):
        topic.append({"n": number})
        world.log.checkpoint()
    assert file_of(world, topic, 1, "data") is None, "the files are gone"
    assert bytes(content) == copy
    assert topic.segment(1) is None
    for kind in ("data", "idx"):
        with pytest.raises(NotFound, match="list the segments again"):
            held.content(kind)


def test_an_index_that_is_lost_is_made_again() -> None:
    """G66."""
    world = EngineHarness(**TINY)
    topic = filled(world, 4)
    world.log.checkpoint()
    stored = file_of(world, topic, 1, "idx")
    world.log.close()
    world.disk.remove(f"data/topics/{topic.id:08X}/seg-{1:016d}.idx")
    topic = world.open(world.disk).topic("a")
    held = topic.segments().segments[0]
    assert bytes_of(held, "idx") == stored


def test_data_that_is_cut_off_is_damage_and_not_a_shorter_file() -> None:
    """G65: a file that lost its end is never handed out as if it were whole."""
    world = EngineHarness(**TINY)
    topic = filled(world, 4)
    world.log.checkpoint()
    world.log.close()
    path = f"data/topics/{topic.id:08X}/seg-{1:016d}.data"
    whole_file = world.disk.read_file(path)
    topic = world.open(world.disk).topic("a")
    world.disk.write_file(path, whole_file[:-1])
    held = topic.segment(1)
    assert held is not None
    with pytest.raises(Corrupt, match="were written"):
        held.content("data")


def test_a_listing_of_a_dropped_topic_says_so() -> None:
    world = EngineHarness(**TINY)
    topic = filled(world)
    world.log.drop("a")
    for look in (topic.segments, lambda: topic.segment(1)):
        with pytest.raises(TopicNotFound):
            look()


class Between(InterposingDisk):
    """Steps are writes alone: files are mapped under a lock of their own, for which another thread would wait."""

    def open(self, path: str, mode: Mode = "read", /) -> SimFile:
        return SimDisk.open(self, path, mode) if mode == "read" else super().open(path, mode)


def test_a_listing_amid_a_checkpoint_is_consistent() -> None:
    """G5, G62. Method: look between any two writes of a checkpoint, one run for each place; what is listed has all
    its bytes, and the rest is after the tail's cursor."""
    looked = 0
    for at in count(1):
        disk = Between(trace=True)
        world = EngineHarness(disk, **TINY)
        topic = filled(world, 10)
        world.log.checkpoint()
        topic.append([{"n": number} for number in range(11, 15)])
        topic.delete(seqs=[6])
        seen: list[int] = []

        def look(topic: Topic = topic, seen: list[int] = seen) -> None:
            listing = topic.segments()
            covered = [seq for held in listing.segments for seq in range(held.base, held.stop)]
            assert covered == list(range(1, listing.tail_from_seq + 1))
            for held in listing.segments:
                assert len(bytes_of(held, "data") or b"") == held.size
                offsets = np.frombuffer(bytes_of(held, "idx") or b"", "<u4")[::5]
                assert len(offsets) == held.records
                assert offsets.max() < held.size
            after_tail = [record.seq for record in topic.read(listing.tail_from_seq).records]
            assert after_tail == list(range(listing.tail_from_seq + 1, 15))
            seen.append(listing.tail_from_seq)

        disk.arm(at, look)
        world.log.checkpoint()
        looked += len(seen)
        if disk.steps < at:
            break
    assert looked >= 10, "a checkpoint has so many steps"
