"""What a delete promises: the contract's section 2.7, and G64, G71, G72, G77–G80, G84."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.harness import (
    CLASSES,
    LOGGED,
    RESTARTS,
    TINY,
    EngineHarness,
    Restart,
    datas,
    read_topic,
    seqs,
)

from tidelog.engine import Deleted, Topic
from tidelog.errors import BadInput, DiskFull, TopicNotFound
from tidelog.testing import SimDisk

TAGS = ["chat-42:a", "chat-42:b", "chat-420:c", "chat-42", "chat-42:", None, "CHAT-42:a", "x", "é:1", "é:2"]


def tagged(world: EngineHarness, durability: str = "fsync", spread: bool = False) -> Topic:
    """Ten records with the tags above; spread: some in a sealed segment, some in one that grows, some in memory."""
    topic = world.log.topic("a", durability=durability)
    for number, tag in enumerate(TAGS, 1):
        topic.append(number, tag=tag)
        if spread and number in (5, 7):
            world.log.checkpoint()
    return topic


# Which --------------------------------------------------------------------------------------------------

MATCHES: list[tuple[Any, list[int]]] = [
    ("x", [8]),
    ("chat-42", [4]),
    ("chat-42:", [5]),
    ("chat-42:*", [1, 2, 5]),
    ("chat-42*", [1, 2, 3, 4, 5]),
    ("chat-420*", [3]),
    ("chat", []),
    ("C*", [7]),
    ("*", [1, 2, 3, 4, 5, 7, 8, 9, 10]),
    ("é:*", [9, 10]),
    ("é*", [9, 10]),
    ("", []),
    ("absent", []),
    ("absent*", []),
    (["tag", "Eq", "chat-42:a"], [1]),
    (("tag", "Eq", "chat-42:*"), []),
    (["tag", "Glob", "chat-42:*"], [1, 2, 5]),
    (["tag", "Glob", "*"], [1, 2, 3, 4, 5, 7, 8, 9, 10]),
]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("match", "gone"), MATCHES, ids=[str(match) for match, _ in MATCHES])
def test_a_match_is_a_tag_or_the_beginning_of_one(match: Any, gone: list[int], spread: bool) -> None:
    """Contract 2.7: `chat-42:*` does not mean `chat-420:c`, and a record without a tag is never meant."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=spread)
    done = topic.delete(match=match)
    left = [seq for seq in range(1, 11) if seq not in gone]
    assert done == Deleted(len(gone), min(left), 10, len(left), read_topic(topic).bytes)
    assert seqs(topic) == left
    assert seqs(world.restart("crash").topic("a")) == left


@pytest.mark.parametrize("tag", ["a*", "*", "a?", "[a]", "a.b", "\\", "\x00", "a*b"])
def test_only_a_star_at_the_end_is_special(tag: str) -> None:
    """Contract 2.7: the prefix is literal."""
    topic = EngineHarness().log.topic("a")
    topic.append([1, 2, 3], tag=["axb", tag, "ab"])
    assert topic.delete(match=["tag", "Eq", tag]).deleted == 1
    assert seqs(topic) == [1, 3]
    topic.append(4, tag=f"{tag}more")
    assert topic.delete(match=["tag", "Glob", f"{tag}*"]).deleted >= 1
    assert 4 not in seqs(topic)


@pytest.mark.parametrize(
    "match",
    [
        *(["tag", "Eq"], ["tag", "Eq", "a", "b"], ["node", "Eq", "a"], ["tag", "eq", "a"], ["tag", "Like", "a"]),
        *(
            ["tag", "Eq", 1],
            ["tag", "Glob", "a"],
            ["tag", "Glob", ""],
            ["tag", "Glob", None],
            [],
            5,
            b"a",
            {"tag": "a"},
        ),
        "a\ud800",
    ],
    ids=ascii,
)
def test_a_match_that_means_nothing_is_refused(match: Any) -> None:
    """Contract 2.7."""
    world = EngineHarness()
    topic = tagged(world)
    before = world.disk.digest()
    with pytest.raises(BadInput):
        topic.delete(match=match)
    assert world.disk.digest() == before
    assert len(seqs(topic)) == 10


@pytest.mark.parametrize(
    ("before_seq", "gone"), [(0, 0), (1, 0), (2, 1), (6, 5), (10, 9), (11, 10), (12, 10), (1 << 60, 10)]
)
def test_before_seq_is_not_included(before_seq: int, gone: int) -> None:
    """Contract 2.7: seq < min(before_seq, head + 1)."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=True)
    assert topic.delete(before_seq=before_seq).deleted == gone
    assert seqs(topic) == list(range(gone + 1, 11))
    assert topic.earliest_seq == gone + 1
    assert topic.append("later").first_seq == 11
    assert seqs(topic)[-1] == 11


def test_both_selectors_mean_what_both_mean() -> None:
    """Contract 2.7: other records below stay."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=True)
    assert topic.delete(match="chat-42:*", before_seq=3).deleted == 2
    assert seqs(topic) == list(range(3, 11))
    assert topic.delete(match="*", before_seq=1 << 40).deleted == 7
    assert seqs(topic) == [6]


@pytest.mark.parametrize(
    ("given_seqs", "gone"),
    [
        ([5], [5]),
        ([9, 1, 5], [1, 5, 9]),
        ([2, 2, 2], [2]),
        ([0, 11, 500], []),
        (range(3, 6), [3, 4, 5]),
        ((1,), [1]),
        ([], []),
    ],
    ids=str,
)
def test_seqs_are_deleted_as_they_are_named(given_seqs: Any, gone: list[int]) -> None:
    """In any order, named twice or not there; no seqs are no records."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=True)
    assert topic.delete(seqs=given_seqs).deleted == len(gone)
    left = [seq for seq in range(1, 11) if seq not in gone]
    assert seqs(topic) == left
    assert seqs(world.restart("kill").topic("a")) == left


@pytest.mark.parametrize("said", [{}, {"match": None}, {"seqs": [1], "before_seq": 2}, {"seqs": [1], "match": "x"}])
def test_a_delete_says_what(said: Any) -> None:
    """Contract 2.7: neither selector is a bad request."""
    topic = tagged(EngineHarness())
    with pytest.raises(BadInput, match="nothing was deleted"):
        topic.delete(**said)
    assert len(seqs(topic)) == 10


# What it leaves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_delete_returns_the_state_after_it(durability: str) -> None:
    """Contract 2.7: values after the delete; where nothing is left, no bytes are."""
    topic = EngineHarness().log.topic("a", durability=durability)
    topic.append([b"123", b"4567", b"89"], tag=["x", "y", "x"], meta=[None, {"m": 1}, None])
    assert topic.delete(match="y") == Deleted(1, 1, 3, 2, 5)
    assert topic.delete(match="y") == Deleted(0, 1, 3, 2, 5)
    assert topic.delete(before_seq=2) == Deleted(1, 3, 3, 1, 2)
    assert topic.delete(seqs=[3]) == Deleted(1, 4, 3, 0, 0)
    assert topic.append(b"x").first_seq == 4
    assert (topic.earliest_seq, topic.count, topic.bytes) == (4, 1, 1)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_delete_is_silent_and_moves_only_the_earliest(durability: str) -> None:
    """G71, G72; contract 3.2: a run of deleted records at the front counts."""
    topic = EngineHarness(**TINY).log.topic("a", durability=durability)
    topic.append(list(range(1, 11)))
    topic.delete(seqs=[2, 3])
    assert (topic.earliest_seq, topic.evict_floor) == (1, 1)
    topic.delete(seqs=[1])
    assert (topic.earliest_seq, topic.evict_floor) == (4, 1)
    topic.delete(before_seq=6)
    assert (topic.earliest_seq, topic.evict_floor) == (6, 1)
    assert read_topic(topic).gap is None
    for cursor in range(11):
        assert topic.read(cursor).gap is None


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_deleted_then_evicted_is_a_gap_of_its_cap(restart: Restart | None) -> None:
    """Contract, appendix C: delete-then-cap gives reason cap; 3.4: it ends where the loss did."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync", cap_records=3)
    topic.append([1, 2, 3])
    topic.delete(seqs=[1, 3])
    topic.append([4, 5, 6])
    if restart is not None:
        topic = world.restart(restart).topic("a")
    found = read_topic(topic)
    assert found.seqs == [4, 5, 6]
    assert found.gap is not None
    assert (found.gap.gap_from, found.gap.gap_to, found.gap.reason) == (1, 2, "cap")
    assert topic.read(2).gap is None, "after seq 2 there was only a delete"


# Point in time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [None, *RESTARTS])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("said", [{"match": "t"}, {"match": "*"}, {"before_seq": 100}, {"seqs": [1, 2, 3, 4]}], ids=str)
def test_what_is_written_later_is_not_meant(said: Any, checkpointed: bool, restart: Restart | None) -> None:
    """G78, contract 2.7: also not by replaying the delete."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2], tag="t")
    assert topic.delete(**said).deleted == 2
    topic.append([3, 4], tag="t")
    if checkpointed:
        world.log.checkpoint()
    if restart is not None:
        topic = world.restart(restart).topic("a")
    assert datas(topic) == [3, 4]


def test_a_write_under_way_is_not_meant() -> None:
    """G78, contract 2.7: the bound is the head at the call, also where the write stands before it in the WAL."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append(1, tag="t")
    token = topic.append_nowait([2, 3], tag="t")
    assert topic.delete(match="t").deleted == 1
    assert token.wait().first_seq == 2
    assert datas(topic) == [2, 3]
    assert datas(world.restart("kill").topic("a")) == [2, 3]


# Restarts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("checkpoints", [0, 1, 3])
@pytest.mark.parametrize("said", [{"match": "chat-42:*"}, {"before_seq": 6}, {"seqs": [3, 5, 8, 10]}], ids=str)
def test_what_was_deleted_stays_deleted(said: Any, checkpoints: int, restart: Restart) -> None:
    """G77, G80: from the WAL, from the vectors, and when the WAL has forgotten the delete."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=True)
    topic.delete(**said)
    before = read_topic(topic)
    for number in range(checkpoints):
        world.log.checkpoint()
        world.log.topic("other").append(number)
    found = world.restart(restart).topic("a")
    assert read_topic(found) == before
    assert read_topic(world.restart(restart).topic("a")) == before


def test_the_wal_forgets_a_delete_only_when_a_vector_has_it() -> None:
    """G80. Method: checkpoints until the file with the delete's frame is gone, then a power cut."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=True)
    topic.delete(seqs=[2, 9])
    held = world.files(".log")
    for number in range(4):
        world.log.topic("other", durability="fsync").append(b"x" * 1500 + b"%d" % number)
        world.log.checkpoint()
    assert not set(held) & set(world.files(".log"))
    assert seqs(world.restart("crash").topic("a")) == [1, 3, 4, 5, 6, 7, 8, 10]


@pytest.mark.parametrize("durability", LOGGED)
@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_delete_that_failed_removed_nothing(durability: str, restart: Restart | None) -> None:
    """G79."""
    world = EngineHarness(**TINY)
    topic = tagged(world, durability, spread=True)
    world.log.tick()
    before = read_topic(topic)
    world.disk.fail("write", error=errno.ENOSPC, times=None, path="/wal-")  # CURRENT is a hint and may fail
    with pytest.raises(DiskFull) as failed:
        topic.delete(match="*")
    world.disk.clear_faults()
    assert failed.value.written is False
    assert read_topic(topic) == before
    if restart is not None:
        topic = world.restart(restart).topic("a")
    found = read_topic(topic)
    assert (found.records, found.gap) == (before.records, None)
    assert topic.delete(match="*").deleted == 9, "and it works once there is space"


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_a_delete_for_which_the_reserve_was_too_small_removed_nothing(restart: Restart | None) -> None:
    """G79, decision 0021. Method: real capacity; another program takes more than the reserve gives back, while the
    delete needs a new WAL file."""
    disk = SimDisk()
    disk.capacity_bytes = 1 << 20
    world = EngineHarness(disk, **TINY)
    topic = tagged(world, spread=True)
    world.log.tick()
    reserve = world.log._context.disk_reserve
    disk.capacity_bytes = sum(map(len, disk.tree().values())) - reserve.size
    with pytest.raises(DiskFull):
        list(map(topic.append, [b""] * 1000))  # without a tag, until the WAL file is full
    before = read_topic(topic)
    assert world.files("/RESERVE"), "records do not use it"
    with pytest.raises(DiskFull) as failed:
        topic.delete(match="*")
    assert not world.files("/RESERVE"), "it was used, and too small"
    assert failed.value.written is False
    assert read_topic(topic) == before
    disk.capacity_bytes = 1 << 20
    if restart is not None:
        topic = world.restart(restart).topic("a")
    found = read_topic(topic)
    assert (found.records, found.gap) == (before.records, None)
    assert topic.delete(match="*").deleted == 9, "and it works once there is space"


def test_the_data_of_a_segment_never_changes() -> None:
    """G64, D3: deletes lie beside it."""
    world = EngineHarness(**TINY)
    topic = tagged(world, spread=True)
    world.log.checkpoint()
    before = {path: world.disk.read_file(path) for path in world.files(".data")}
    topic.delete(seqs=[1, 4, 6, 9])
    world.log.checkpoint()
    after = {path: world.disk.read_file(path) for path in world.files(".data")}
    assert {path: data[: len(before[path])] for path, data in after.items() if path in before} == before
    assert world.files(".del")


def test_a_segment_of_which_nothing_is_left_is_removed() -> None:
    """G84: and no other; the checkpoint after the one that no longer names it takes the files."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    for number in range(1, 13):
        topic.append(number)
    world.log.checkpoint()
    bases = {int(path.rpartition("seg-")[2].split(".")[0]) for path in world.files(".data")}
    assert bases == {1, 5, 9}
    topic.delete(seqs=[5, 6, 7, 8, 10])
    for _ in range(3):
        world.log.checkpoint()
    bases = {int(path.rpartition("seg-")[2].split(".")[0]) for path in world.files(under="topics")}
    assert bases == {1, 9}
    assert seqs(world.restart("crash").topic("a")) == [1, 2, 3, 4, 9, 11, 12]


def test_a_topic_that_was_dropped_has_nothing_to_delete() -> None:
    """Contract 2.7: an absent topic is not found."""
    world = EngineHarness()
    topic = tagged(world)
    world.log.drop("a")
    with pytest.raises(TopicNotFound):
        topic.delete(match="x")


# Any deletes --------------------------------------------------------------------------------------------

selectors = st.one_of(
    st.builds(lambda seqs: {"seqs": seqs}, st.lists(st.integers(1, 45), min_size=1, max_size=8)),
    st.builds(lambda seq: {"before_seq": seq}, st.integers(0, 45)),
    st.builds(lambda match: {"match": match}, st.sampled_from(["a", "b", "ab", "a*", "b*", "*", "c"])),
    st.builds(
        lambda match, seq: {"match": match, "before_seq": seq}, st.sampled_from(["a*", "ab", "*"]), st.integers(0, 45)
    ),
)


def meant(seq: int, tag: str | None, said: dict[str, Any]) -> bool:
    """Contract 2.7, once more."""
    if "seqs" in said:
        return seq in said["seqs"]
    match, bound = said.get("match"), said.get("before_seq", 1 << 60)
    if match is not None and (tag is None or not _begins(tag, match)):
        return False
    return bool(seq < bound)


def _begins(tag: str, match: str) -> bool:
    return tag.startswith(match[:-1]) if match.endswith("*") else tag == match


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "ab", "abc", None]), min_size=1, max_size=7) | selectors | st.none(),
        max_size=14,
    ),
    st.sampled_from(RESTARTS),
)
def test_any_deletes_leave_what_a_dict_would_keep(history: list[Any], restart: Restart) -> None:
    """G77, G78, G80: a list of tags is a batch, None a checkpoint."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    model: dict[int, str | None] = {}
    for step in history:
        if step is None:
            world.log.checkpoint()
        elif isinstance(step, list):
            model |= dict(zip(topic.append([0] * len(step), tag=step).seqs, step, strict=True))
        else:
            gone = [seq for seq, tag in model.items() if meant(seq, tag, step)]
            assert topic.delete(**step).deleted == len(gone)
            for seq in gone:
                del model[seq]
        found = read_topic(topic, 5)
        assert {record.seq: record.tag for record in found.records} == model
        assert found.gap is None
    found = read_topic(world.restart(restart).topic("a"))
    assert {record.seq: record.tag for record in found.records} == model
    assert found.gap is None
