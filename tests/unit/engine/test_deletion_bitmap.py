"""Deletes set flags in place: readers that began before see what was there then, and a handful goes as many do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.unit.engine.harness import CLASSES, TINY, EngineHarness, datas

from tidelog.commitlog.codec import Chunk
from tidelog.engine import Topic
from tidelog.engine.batch_encoder import Batch
from tidelog.engine.memtable import MemTable
from tidelog.engine.segment import DeletionBitmap, Segment
from tidelog.engine.topic import topic_operations
from tidelog.engine.topic_index import TopicIndex
from tidelog.formats import scan, sealed_segment, segment_index
from tidelog.formats.sealed_segment import DeletionVector


def test_a_mask_grows_and_forgets_nothing() -> None:
    mask, known = DeletionBitmap(), set[int]()
    random = Random(1)
    for size in (10, 1_000, 1_024, 1_025, 40_000, 40_001):
        some = [random.randrange(size) for _ in range(20)]
        mask.set_many(np.array(some, np.int64))
        known |= set(some)
        one = random.randrange(size)
        assert mask.set(one) == (one not in known)
        known.add(one)
        assert set(np.flatnonzero(mask.view(size)).tolist()) == known
        assert not mask.set(one)
    assert mask.has(next(iter(known)))
    assert not mask.has(1 << 20), "unset flags are not deleted"


def test_a_view_that_was_copied_stays_as_it_was() -> None:
    mask = DeletionBitmap()
    mask.set(3)
    shared = mask.view(8)
    kept = shared.copy()
    mask.set(4)
    mask.view(5_000)
    mask.set(5)
    assert np.flatnonzero(kept).tolist() == [3]
    assert np.flatnonzero(mask.view(8)).tolist() == [3, 4, 5]


@pytest.mark.parametrize("deleted_since", [False, True])
@pytest.mark.parametrize("named", [[2], [2, 5], [2, 4, 5]])
def test_a_vector_not_loaded_yet_covers_the_seqs_its_segment_had_before_it_grew(
    named: list[int], deleted_since: bool
) -> None:
    """Deletes from before stay, and what an unfinished checkpoint wrote of later seqs does not meet them."""
    world = EngineHarness(segment_events_max=100)
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2, 3])
    world.log.checkpoint()
    topic.append([4, 5])
    if deleted_since:
        topic.delete(seqs=[4])
    known, block = topic._state.index.parts
    assert isinstance(known, Segment)
    assert isinstance(block, MemTable)
    vector = DeletionVector(1, max(3, *named))
    vector.mark(named)
    world.disk.write_file(known.path(".del"), sealed_segment.encode_deletion_vector(vector))
    found = Segment(  # as recovery makes it
        known.files,
        1,
        4,
        known.size,
        live=2,
        live_bytes=2,
        first_ts=known.first_ts,
        last_ts=known.last_ts,
        sealed=False,
    )
    found.absorb(block)
    gone = [2, 4] if deleted_since else [2]
    dead = found.deleted_mask()
    assert dead is not None
    assert (np.flatnonzero(dead) + 1).tolist() == gone
    assert found.live_records == 5 - len(gone)
    assert found.has_unsaved_deletions == (deleted_since or named != [2]), "the file says something else by now"
    assert sealed_segment.decode_deletion_vector(found.encode_deletions(), "").seqs().tolist() == gone


def meddled(monkeypatch: pytest.MonkeyPatch, meddle: Callable[[], object]) -> None:
    """Have something done once, between the moment a reader has looked and the moment it reads."""
    plain = MemTable.reader
    left = [meddle]

    def look(block: MemTable, *asked: int) -> Callable[[], Chunk]:
        read = plain(block, *asked)

        def late() -> Chunk:
            while left:
                left.pop()()
            return read()

        return late

    monkeypatch.setattr(MemTable, "reader", look)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_reader_in_the_middle_sees_what_was_there_when_it_looked(
    durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is deleted between a reader's look and its reading is neither missing nor counted as deleted."""
    topic = EngineHarness().log.topic("t", durability=durability)
    topic.append(list(range(10)))
    topic.delete(seqs=[2])
    meddled(monkeypatch, lambda: topic.delete(seqs=[5, 6]))
    page = topic.read()
    assert [record.seq for record in page.records] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (page.counts.rows, page.counts.deleted) == (9, 1)
    assert [record.seq for record in topic.read().records] == [1, 3, 4, 7, 8, 9, 10]


def test_a_listing_keeps_the_deletions_it_was_made_with() -> None:
    world = EngineHarness(**TINY)
    topic = world.log.topic("t")
    topic.append(list(range(8)))
    topic.delete(seqs=[2])
    world.log.checkpoint()
    held = topic.segments().segments[0]
    before = held.content("del")
    topic.delete(seqs=[3])
    assert held.content("del") == before
    assert topic.segments().segments[0].content("del") != before


# ── a handful, and many ───────────────────────────────────────────────────────────────────────────


def counters(index: TopicIndex) -> Any:
    parts = [(part.base, part.live_records, part.live_bytes) for part in index.parts]
    return index.count, index.bytes, index.earliest, index.removal_count, parts


def grown() -> tuple[EngineHarness, Topic]:
    """Segments, a block, records with metas, and holes."""
    world = EngineHarness(**TINY | {"segment_events_max": 16})
    topic = world.log.topic("t", durability="fsync")
    random = Random(7)
    for number in range(40):
        many = ["x" * random.randrange(30) for _ in range(random.randrange(1, 4))]
        topic.append(many, meta={"n": number} if number % 5 == 0 else None, tag="t" if number % 3 else None)
        if number in (11, 25):
            world.log.checkpoint()
        if number == 30:
            topic._state.last_assigned_seq += 3  # seqs that were given to writes that failed
    return world, topic


@pytest.mark.parametrize("seed", range(20))
def test_to_remove_a_few_is_to_delete_them(seed: int) -> None:
    random = Random(seed)
    (_, few), (_, many) = grown(), grown()
    for _ in range(12):
        head = few.head_seq
        seqs = sorted(random.sample(range(1, head + 4), random.randrange(1, 12)))
        assert few._state.index.delete_few(seqs) == many._state.index.delete(np.array(seqs, np.int64))
        assert counters(few._state.index) == counters(many._state.index)
    assert datas(few) == datas(many)


# ── what a writer knows of its records ────────────────────────────────────────────────────────────


SHAPES: tuple[dict[str, Any], ...] = (
    {"datas": [b"1"], "json": True},
    {"datas": [b"1"], "json": False, "tag": b"t"},
    {"datas": [b"12"], "json": True, "node": b"n", "tag": b"t"},
    {"datas": [b"1", b"", b"333"], "json": False},
    {"datas": [b"1", b"22"], "json": True, "tag": b"t"},
    {"datas": [b"1", b"22"], "json": True, "node": b"n"},
    {"datas": [b"1", b"22"], "json": True, "metas": [b"{}", b""]},
    {"datas": [b"1"], "json": True, "metas": [b'{"a":1}']},
    {"datas": [b"1", b"22"], "json": [True, False]},
    {"datas": [b"1", b"22"], "json": True, "tag": [b"", b"t"]},
    {"datas": [b"%d" % n for n in range(5_000)], "json": True},
)


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_index_is_what_a_walk_finds(seed: int, looked: bool) -> None:
    """Whatever wrote or read meanwhile: byte for byte what the frames give."""
    random = Random(seed)
    topic = EngineHarness().log.topic("t", durability="ephemeral")
    for _ in range(30):
        topic_operations(topic).submit(Batch(**random.choice(SHAPES))).wait()
        if looked and random.randrange(3) == 0:
            topic.read()
    for part in topic._state.index.parts:
        assert isinstance(part, MemTable)
        whole = b"".join(bytes(piece) for piece, _ in part.read_pieces())
        walk = scan.scan_records(whole, above=part.base - 1)
        assert (
            bytes(part.index_bytes())
            == segment_index.build_entries(walk.rows, part.base, part.stop, part.size).tobytes()
        )
        with_meta = np.flatnonzero(part.entries()["flags"] & segment_index.HAS_META)
        assert part.no_meta_from > part.base + int(with_meta[-1] if len(with_meta) else -1), "no meta is overlooked"


def test_a_thousand_small_writes_keep_few_objects() -> None:
    topic = EngineHarness().log.topic("t", durability="ephemeral")
    for number in range(1_000):
        topic.append(number)
    (block,) = topic._state.index.parts
    assert isinstance(block, MemTable)
    assert len(block._index._pending) <= 260
