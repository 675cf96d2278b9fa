"""Bugs of deletes by a match, each by the behaviour that was missing. Listed in docs/bugs.md."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.engine.harness import RESTARTS, TIMEOUT_S, TINY, EngineHarness, read_topic, running, seqs

from tidelog.engine import Topic, delete
from tidelog.engine import tag_search as tags
from tidelog.engine.memtable import MemTable
from tidelog.engine.segment import Segment, SegmentFiles
from tidelog.engine.tag_search import TagFile, TagIndex
from tidelog.engine.topic_state import TopicState
from tidelog.errors import TopicNotFound
from tidelog.testing import SimDisk

SMALL: dict[str, Any] = {"segment_events_max": 4, "head_reserve": 4}


def spread(world: EngineHarness, durability: str = "fsync", *, metas: bool = False, topic: str = "t") -> Topic:
    """Records in sealed segments, in one that grows, and in memory; every third is tagged `x:<number>`."""
    made = world.log.topic(topic, durability=durability)
    for number in range(1, 31):
        tag = f"x:{number}" if number % 3 == 0 else f"y:{number % 5}" if number % 3 == 1 else None
        made.append(number, tag=tag, meta={"n": number} if metas else None)
        if number in (12, 22, 26):
            world.log.checkpoint()
    return made


XS = [number for number in range(1, 31) if number % 3 == 0]


class Probe:
    """Notes what a delete does to find its records, and whether it holds the topic's lock then."""

    def __init__(self, patch: pytest.MonkeyPatch, core: TopicState) -> None:
        self.core, self.searches, self.locked_rows = core, 0, 0
        for kind in (TagIndex, TagFile):
            for verb in ("find_exact", "find_prefix"):
                patch.setattr(kind, verb, self._counted(getattr(kind, verb)))
        build = TagIndex.build.__func__  # type: ignore[attr-defined]

        def built(cls: type[TagIndex], tags: pa.Array, first_row: int = 0) -> TagIndex:
            self.locked_rows += len(tags) if self.core.lock.locked() else 0
            made: TagIndex = build(cls, tags, first_row)
            return made

        patch.setattr(TagIndex, "build", classmethod(built))
        for part in (Segment, MemTable):
            patch.setattr(part, "reader", self._looked(part.reader))
        patch.setattr(SegmentFiles, "read_range", self._read(SegmentFiles.read_range))
        self.locked_reads = self.read_bytes = 0

    def _counted(self, search: Callable[..., Any]) -> Callable[..., Any]:
        def counted(index: object, value: bytes) -> Any:
            self.searches += 1
            return search(index, value)

        return counted

    def _looked(self, look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(part: object, *args: Any, **more: Any) -> Any:
            read = look(part, *args, **more)

            def probed() -> Any:
                self.locked_reads += self.core.lock.locked()
                return read()

            return probed

        return looked

    def _read(self, read: Callable[..., bytes]) -> Callable[..., bytes]:
        def probed(home: SegmentFiles, base: int, generation: int, suffix: str, lo: int, hi: int) -> bytes:
            self.locked_reads += self.core.lock.locked()
            self.read_bytes += hi - lo
            return read(home, base, generation, suffix, lo, hi)

        return probed


@pytest.mark.parametrize("metas", [False, True])
@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
@pytest.mark.parametrize("match", ["x:15", "x:*", "nothing", "*"])
def test_match_delete_searches_each_part_once_and_never_under_the_lock(
    match: str, durability: str, metas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It searched under the topic's lock and again in the commit, where every topic of the shard waits."""
    world = EngineHarness(**SMALL)
    topic = spread(world, durability, metas=metas)
    probe = Probe(monkeypatch, topic._state)
    parts = [part for part in topic._state.index.parts if part.stop > part.base]
    gone = {"x:15": [15], "x:*": XS, "nothing": [], "*": [n for n in range(1, 31) if n % 3 != 2]}[match]
    assert topic.delete(match=match).deleted == len(gone)
    assert probe.searches <= len(parts), "each part is searched once"
    assert probe.locked_rows == 0, "no index is built while the lock is held"
    assert probe.locked_reads == 0, "no record and no index is read while the lock is held"
    assert seqs(topic) == [number for number in range(1, 31) if number not in gone]


@pytest.mark.parametrize("same_topic", [True, False])
def test_writers_do_not_wait_for_a_search(same_topic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search stands still in every part in turn; appends to its topic and to others of the shard get through."""
    world = EngineHarness(**SMALL)
    topic, other = spread(world), world.log.topic("other", durability="fsync")
    begun, free = Event(), Event()
    search = tags.search_part

    def slow(*args: Any) -> Any:
        begun.set()
        assert free.wait(TIMEOUT_S)
        return search(*args)

    monkeypatch.setattr(delete, "search_part", slow)
    with running(lambda: topic.delete(match="x:*")):
        assert begun.wait(TIMEOUT_S)
        try:
            target = topic if same_topic else other
            first = target.append("new", tag="x:new").first_seq
            assert target.read(first - 1).records[0].data == "new"
        finally:
            free.set()
    left = [number for number in range(1, 31) if number not in XS]
    assert seqs(topic) == left, "what was appended during the search is caught up with, under the lock"
    if not same_topic:
        assert seqs(other) == [1]


def _meddle(patch: pytest.MonkeyPatch, at: int, act: Callable[[], object]) -> None:
    """Do something before the `at`-th part is searched."""
    search, calls = tags.search_part, 0

    def meddled(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            act()
        return search(*args)

    patch.setattr(delete, "search_part", meddled)


def _act(name: str, world: EngineHarness, topic: Topic) -> None:
    """Something that others do while a search is under way."""
    log = world.log
    match name:
        case "append":
            topic.append(["a", "b"], tag=["x:late", "z"])
        case "append many":
            for number in range(20):
                topic.append("m", tag=f"x:{number}")
        case "checkpoint" | "two checkpoints":
            log.checkpoint()
            if name != "checkpoint":
                log.checkpoint()
        case "seal":
            topic.seal()
        case "seal and checkpoint":
            topic.seal()
            topic.append("s", tag="x:s")
            log.checkpoint()
        case "delete the same":
            topic.delete(seqs=[3, 6, 9])
        case "delete a prefix":
            topic.delete(before_seq=14)
        case "evict" | "evict and forget":
            log.topic("t", cap_records=4)
            for _ in range(3 if name != "evict" else 0):
                log.checkpoint()
        case "another topic's checkpoint":
            spread(world, topic="u")
            log.checkpoint()
        case _:
            raise AssertionError(name)


ACTS = (
    *("append", "append many", "checkpoint", "two checkpoints", "seal", "seal and checkpoint", "delete the same"),
    *("delete a prefix", "evict", "evict and forget", "another topic's checkpoint"),
)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
@pytest.mark.parametrize("act", ACTS)
def test_match_delete_beside_anything_else_leaves_no_match_and_takes_nothing_else(
    act: str, at: int, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = EngineHarness(**SMALL)
    topic = spread(world, durability)
    with monkeypatch.context() as patch:
        _meddle(patch, at, lambda: _act(act, world, topic))
        topic.delete(match="x:*")
    found = read_topic(topic).records  # and the counts of the topic are those of its records
    assert [record.tag for record in found if record.tag and record.tag.startswith("x:")] == []
    if "evict" not in act and "prefix" not in act:
        assert {number for number in range(1, 31) if number % 3} <= {record.seq for record in found}
    live = [(record.seq, record.data) for record in found]
    for how in RESTARTS:
        world.log.tick()
        log = world.restart(how)
        after = [(record.seq, record.data) for record in log.topic("t", create=False).read(0, 1000).records]
        assert after == live, f"after a {how}"


@pytest.mark.parametrize("at", [1, 3])
def test_match_delete_of_a_topic_that_is_dropped_meanwhile(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineHarness(**SMALL)
    topic = spread(world)
    _meddle(monkeypatch, at, lambda: world.log.drop("t"))
    with pytest.raises(TopicNotFound):
        topic.delete(match="x:*")
    assert world.restart("kill").topics() == []


def test_writers_that_are_faster_than_the_search_do_not_keep_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round of the search finds more to search than the lock is held for: the delete ends where it has come to."""
    monkeypatch.setattr(delete, "_LOCKED_SEARCH_RECORDS_MAX", 2)
    world = EngineHarness(**SMALL)
    topic = spread(world)
    search = tags.search_part

    def flooded(*args: Any) -> Any:
        topic.append([b"f"] * 3, tag="x:flood")
        return search(*args)

    with monkeypatch.context() as patch:
        patch.setattr(delete, "search_part", flooded)
        topic.delete(match="x:*")
    left = [record for record in topic.read(0, 1000).records if record.tag and record.tag.startswith("x:")]
    assert {record.tag for record in left} == {"x:flood"}, "what was there when the delete was called is gone"
    live = seqs(topic)
    assert seqs(world.restart("kill").topic("t")) == live


# The tag index of a sealed segment ------------------------------------------------------------------------


def test_cost_of_a_one_record_delete_does_not_grow_with_the_number_of_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in the cache: what is read of the index is the directory and one block, and no record is read."""
    cost = {}
    for count in (1_000, 10_000):
        world = EngineHarness(
            segment_events_max=count, tags_cache_bytes=0, wal_file_bytes=1 << 22, segment_bytes_max=64 << 20
        )
        topic = world.log.topic("t", durability="disk")
        topic.append([b"d"] * count, tag=[f"user:{number * 7_919 % count:08d}" for number in range(count)])
        world.log.checkpoint()
        with monkeypatch.context() as patch:
            probe = Probe(patch, topic._state)
            assert topic.delete(match=f"user:{count // 2:08d}").deleted == 1
            assert probe.searches == 1
            cost[count] = probe.read_bytes
        assert topic._state.context.tag_cache.scan_count == 0
    assert cost[10_000] < 16_384, f"bytes that were read of the index, by tags: {cost}"
    assert cost[10_000] < 2 * cost[1_000], f"bytes that were read of the index, by tags: {cost}"


def test_first_search_after_a_start_does_not_read_the_indexes_of_sealed_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = EngineHarness(**SMALL)
    spread(world)
    topic = world.restart("reopen").topic("t")
    sealed = [part for part in topic._state.index.parts if isinstance(part, Segment) and part.is_sealed]
    assert len(sealed) > 4
    entries, read = Segment.entries, list[int]()

    def probed(segment: Segment) -> Any:
        read.append(segment.base)
        return entries(segment)

    monkeypatch.setattr(Segment, "entries", probed)
    assert topic.delete(match="nothing").deleted == 0
    assert not {part.base for part in sealed} & set(read)


def tag_files(world: EngineHarness) -> list[str]:
    return world.files(".tag")


def test_sealed_segments_with_tags_have_an_index_file_and_others_have_none() -> None:
    world = EngineHarness(**TINY)
    spread(world)
    plain = world.log.topic("plain")
    for number in range(30):
        plain.append(number)
    world.log.checkpoint()
    sealed = {path.removesuffix(".foot") for path in world.files(".foot")}
    tagged = {path.removesuffix(".tag") for path in tag_files(world)}
    assert tagged
    assert tagged < sealed
    assert len({path.rpartition("/")[0] for path in tagged}) == 1, "only of the topic that has tags"


@pytest.mark.parametrize("harm", ["remove", "empty", "cut", "flip head", "flip block", "another's", "version 9"])
@pytest.mark.parametrize("match", ["x:3", "x:*"])
def test_index_that_is_missing_or_bad_is_made_again_from_the_records(match: str, harm: str) -> None:
    world = EngineHarness(**SMALL)
    spread(world)
    whole = {path: world.disk.read_file(path) for path in tag_files(world)}
    disk = world.disk = world.disk.reboot()
    _harm(disk, list(whole), harm)
    topic = world.open(disk).topic("t")
    assert topic.delete(match=match).deleted == len(XS if match == "x:*" else [3])
    assert topic._state.damage == []
    touched = [path for path in whole if path in disk.tree() and disk.read_file(path) == whole[path]]
    assert touched == list(whole) if match == "x:*" else touched
    left = seqs(topic)
    assert seqs(world.open(disk.reboot()).topic("t")) == left


def _harm(disk: SimDisk, paths: list[str], harm: str) -> None:
    contents = [disk.read_file(path) for path in paths]
    for at, path in enumerate(paths):
        disk.remove(path)
        content = bytearray(contents[at])
        if harm == "remove":
            continue
        if harm == "empty":
            content = bytearray()
        elif harm == "cut":
            del content[-3:]
        elif harm == "flip head":
            content[30] ^= 4
        elif harm == "flip block":
            content[-1] ^= 4
        elif harm == "another's":
            content = bytearray(contents[at - 1])
        elif harm == "version 9":
            content[4] = 9
        file = disk.open(path, "create")
        file.write(0, bytes(content))
        file.close()


def test_index_whose_file_goes_bad_under_a_running_engine_is_made_again() -> None:
    world = EngineHarness(**SMALL)
    topic = spread(world)
    assert topic.delete(match="x:6").deleted == 1  # every directory is in memory now
    _harm(world.disk, tag_files(world), "flip block")
    assert topic.delete(match="x:*").deleted == len(XS) - 1
    assert topic._state.context.tag_cache.scan_count > 0


def test_reader_beside_the_writer_and_replay_write_no_index() -> None:
    world = EngineHarness(**SMALL)
    spread(world)
    for path in tag_files(world):
        world.disk.remove(path)
    world.restart("kill")
    assert tag_files(world) == [], "a start writes none"
    world.log.topic("t").delete(match="y:*")
    made = tag_files(world)
    assert made
    for path in made:
        world.disk.remove(path)
    log = world.restart("kill")  # replays the delete: the manifest does not have it
    assert tag_files(world) == []
    assert all(record.tag is None or record.tag[0] == "x" for record in log.topic("t").read(0, 100).records)


def test_index_of_a_segment_that_goes_away_goes_with_it() -> None:
    world = EngineHarness(**SMALL)
    topic = spread(world)
    assert tag_files(world)
    topic.delete(before_seq=29)
    for _ in range(3):
        topic.append("more")
        world.log.checkpoint()
    bases = {path.rpartition(".")[0] for path in world.files(".data")}
    assert {path.rpartition(".")[0] for path in tag_files(world)} <= bases
    world.log.drop("t")
    world.restart("kill")
    assert tag_files(world) == []
