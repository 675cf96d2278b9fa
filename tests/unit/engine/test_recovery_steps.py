"""The steps of recovery, one by one: which frames are applied, in which order, and where a WAL begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.engine.harness import EngineHarness

from tidelog.engine import Topic, delete, idempotency, manifest, recovery
from tidelog.engine.config import TopicConfig
from tidelog.engine.context import Removal
from tidelog.engine.manifest import GroupRow, LoadedManifest, Manifest, Positions
from tidelog.engine.recovery import ShardContents, ShardRecovery, TopicContents, TopicReplayer
from tidelog.engine.results import READING_WAL, REPLAYING_TOPICS, RecoveryReport
from tidelog.engine.topic_index import GroupCursorState, Watermarks
from tidelog.errors import Corrupt, Damaged
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import ConfigUpdate, Delete, EvictWatermark, Forward, ForwardEvent, NumberedBatch
from tidelog.wal import FrameWindow, GatheredRange, LostRange, WalRange

Frame = tuple[int, int, bytes]  # topic, seq, encoded


def record(topic: int, seq: int, data: bytes = b"data", flags: int = 0) -> Frame:
    return topic, seq, frame.encode_append(topic, seq, 1_000 + seq, data, flags=flags)


def control(topic: int, body: Any, seq: int = 0) -> Frame:
    encoded = frame.encode(body.KIND, topic_id=topic, seq=seq, ts_ms=5, data=control_frames.encode(body))
    return topic, seq, encoded


def window(*frames: Frame, file: int = 1, offset: int = 0, losses: int = 0, doubtful: int = 0) -> FrameWindow:
    sizes = [len(encoded) for _, _, encoded in frames]
    starts = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
    buf = b"".join(encoded for _, _, encoded in frames)
    return FrameWindow(file, offset, buf, starts, frame.read_headers(buf, starts), losses, doubtful)


CREATED = control_frames.TopicCreate(name="a", config=TopicConfig().to_json())
UPDATED = ConfigUpdate(name="a", config=TopicConfig(cap_records=3).to_json())
DROPPED = control_frames.TopicDelete(name="a")
RESERVED = control_frames.HeadWatermark(head_seq=9)
DELETED = Delete(before_seq=None, match=None, seqs=(1,), bound_head=2)
NUMBERED = NumberedBatch(writer="w", number=1, first=7, last=8, sum=(1, 2))
KEYED = control_frames.WriteKey(key="k", first=7, last=7)


def replayer(topic_id: int = 1, **found: Any) -> tuple[TopicReplayer, Any]:
    """A replayer and the topic of an engine."""
    topic = EngineHarness().log.topic("a", durability="fsync")._state
    return TopicReplayer(topic.context, {topic_id: topic}, Manifest(**found), RecoveryReport()), topic


# ── what a shard holds ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("contents", "rank"),
    [
        (TopicContents(), 0),
        (TopicContents(first=5), 5),
        (TopicContents(created=True), -1),
        (TopicContents(created=True, first=5), -1),
    ],
    ids=str,
)
def test_the_shard_that_created_a_topic_comes_first_then_the_lower_seqs(contents: TopicContents, rank: int) -> None:
    assert contents.rank == rank


def test_contents_of_a_shard_are_counted_over_its_windows() -> None:
    contents = ShardContents()
    contents.add(window(control(0, control_frames.CheckpointMark(wal_first=1, wal_pos=0, topics=())), record(2, 6)))
    contents.add(window(record(1, 4), record(2, 5), record(1, 3), control(1, RESERVED), losses=2))
    contents.add(window(control(1, CREATED), control(2, DROPPED), record(3, 1), losses=3))
    contents.add(window(control(3, DELETED, 1), losses=4))
    assert contents.frames == 9
    assert contents.topics == {
        1: TopicContents(created=True, first=3, last=4, last_record=2, last_reserved=2),
        2: TopicContents(is_dropped=True, first=5, last=6, last_record=2),
        3: TopicContents(first=1, last=1, last_record=3),
    }


def test_frames_of_a_window_are_grouped_by_topic_in_their_order() -> None:
    found = list(recovery._group_by_topic(window(record(2, 1), record(1, 1), record(2, 2), record(1, 2), record(7, 1))))
    assert [(topic, numbers.tolist()) for topic, numbers in found] == [(1, [1, 3]), (2, [0, 2]), (7, [4])]
    assert list(recovery._group_by_topic(window())) == []


@pytest.mark.parametrize(
    ("file", "lagging", "kept"),
    [(4, (), []), (5, (), [1, 2]), (6, (), [0, 1, 2]), (4, (1,), [0, 1, 2]), (5, (1,), [0, 1, 2])],
    ids=str,
)
def test_frames_that_the_manifest_covers_are_skipped_unless_their_topic_lags(
    file: int, lagging: tuple[int, ...], kept: list[int]
) -> None:
    frames = (record(1, 1), record(1, 2), record(1, 3))
    found = window(*frames, file=file, offset=100)
    start = 100 + len(frames[0][2])
    replay, _ = replayer(lagging=lagging, fresh=(GroupRow("shard-00", 5, start),))
    numbers = np.arange(3)
    assert replay._frames_after_manifest("shard-00", found, 1, numbers).tolist() == kept
    assert replay._frames_after_manifest("shard-01", found, 1, numbers).tolist() == [0, 1, 2]


def test_a_dropped_topic_is_counted_from_the_frames_after_the_manifest() -> None:
    dropped = recovery._DroppedTopic.from_state(8, None)
    assert dropped == recovery._DroppedTopic(8, 1, 0, 0, 0)
    dropped = recovery._DroppedTopic(8, 1, 2, 2, 10)
    dropped.add(window(control(8, RESERVED)), np.arange(1))
    assert dropped == recovery._DroppedTopic(8, 1, 2, 2, 10)
    frames = (record(8, 2, b"known"), record(8, 3, b"three"), control(8, DELETED, 1), record(8, 4, b"fourth"))
    dropped.add(window(*frames), np.arange(4))
    assert dropped == recovery._DroppedTopic(8, 1, 4, 4, 21)
    dropped.add(window(record(8, 4, b"again"), control(8, DROPPED)), np.arange(2))
    assert dropped == recovery._DroppedTopic(8, 1, 4, 4, 21, "a", 5)
    expected = Removal(None, "a", 8, "drop", 1, 4, 4, 21, 5, "recovery")
    assert dropped.to_removal() == expected


# ── the order of steps ────────────────────────────────────────────────────────────────────────────


def planned(frames: Sequence[Frame], **about: Any) -> list[object]:
    """The steps for the frames of topic 1: control frames with seq, records with the numbers of their frames."""
    replay, topic = replayer()
    found = window(*frames, **about)
    numbers = np.flatnonzero(found.headers["topic_id"] == 1)
    steps: list[object] = []
    for step in replay._plan_events(1, recovery._TopicFrames(found, numbers, "path", ())):
        assert isinstance(step, partial)
        if step.func is recovery._apply_control_frame:
            assert step.args[0] is topic
            steps.append((type(step.args[1]).__name__, *step.args[2:]))
        elif step.func.__name__ == "_append_records":
            steps.append(("records", step.args[1].which.tolist()))
        else:
            steps.append(("keys", step.args[2].tolist(), step.args[3].tolist()))
    return steps


@pytest.mark.parametrize(
    ("frames", "steps"),
    [
        ([record(1, 1), record(2, 1), record(1, 2)], [("records", [0, 2])]),
        (
            [control(1, CREATED), record(1, 1), control(1, DELETED, 4), control(1, RESERVED), record(1, 2)],
            [("TopicCreate", 0, 5), ("records", [1]), ("Delete", 4, 5), ("HeadWatermark", 0, 5), ("records", [4])],
        ),
        # a number counts with its records only
        ([control(1, NUMBERED), record(1, 7)], [("NumberedBatch", 0, 5), ("records", [1])]),
        ([control(1, NUMBERED), record(1, 8)], [("records", [1])]),
        ([control(1, NUMBERED), control(1, RESERVED), record(1, 7)], [("HeadWatermark", 0, 5), ("records", [2])]),
        ([record(1, 6), control(1, NUMBERED)], [("records", [0])]),
        # keys and records are one run
        (
            [record(1, 6), control(1, KEYED), record(1, 7)],
            [("keys", [0, 1, 2], [False, True, False]), ("records", [0, 2])],
        ),
        ([control(1, RESERVED), control(1, KEYED)], [("HeadWatermark", 0, 5), ("keys", [1], [True])]),
        # settings of earlier builds have no seq: they count up to the record before the next one
        (
            [control(1, UPDATED), control(1, DELETED, 4), control(2, DELETED, 4), record(1, 6), record(1, 7)],
            [("ConfigUpdate", 5, 5), ("Delete", 4, 5), ("records", [3, 4])],
        ),
        ([record(1, 6), control(1, UPDATED)], [("records", [0]), ("ConfigUpdate", 0, 5)]),
        ([control(1, UPDATED), record(1, 6), record(1, 9)], [("ConfigUpdate", 5, 5), ("records", [1, 2])]),
        ([control(1, UPDATED, 3), record(1, 6)], [("ConfigUpdate", 3, 5), ("records", [1])]),
        ([control(1, DELETED), record(1, 6)], [("Delete", 0, 5), ("records", [1])]),
    ],
)
def test_frames_are_applied_in_order_and_records_between_them_at_once(frames: list[Frame], steps: list[object]) -> None:
    assert planned(frames) == steps


def test_frames_of_a_topic_that_was_dropped_before_the_manifest_are_not_applied() -> None:
    replay, _ = replayer(next_topic_id=9)
    frames = recovery._TopicFrames(window(record(8, 1)), np.arange(1), "path", ())
    assert list(replay._plan_events(8, frames)) == []
    assert replay._report.damage == []


@pytest.mark.parametrize("created", [False, True])
def test_a_topic_that_the_manifest_does_not_know_is_created_or_gets_a_provisional_name(created: bool) -> None:
    replay, _ = replayer(next_topic_id=8)
    frames = [control(8, CREATED), record(8, 1)] if created else [record(8, 1)]
    list(replay._plan_events(8, recovery._TopicFrames(window(*frames), np.arange(len(frames)), "path", ())))
    name = "a" if created else "recovered-00000008"
    assert (replay._topics[8].name, replay._topics[8].id) == (name, 8)
    assert replay._report.damage == ([] if created else [f"topic 8: its creation is lost; it is served as {name}"])


@pytest.mark.parametrize(
    ("body", "seq"),
    [
        (None, 0),
        (CREATED, 0),
        (NUMBERED, 7),
        (Forward(event=ForwardEvent.COPIED, source_id=1, first=1, last=3, dest_head=20, counts=(2, 1)), 18),
        (Forward(event=ForwardEvent.LOST, source_id=1, first=1, last=3, dest_head=20, counts=(2, 1)), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_some_frames_announce_the_records_that_follow_them(body: Any, seq: int) -> None:
    assert recovery._announced_seq(body) == seq


def test_announced_records_follow_at_once_and_begin_at_their_seq() -> None:
    found = window(record(1, 7), control(1, RESERVED, 7), record(1, 8))
    follow = partial(recovery._records_follow, found)
    assert follow(np.array([0, 2]), 7)
    assert not follow(np.array([2, 0]), 7)
    assert not follow(np.array([1, 0]), 7)
    assert not follow(np.array([], int), 7)
    assert follow(np.array([2]), 8)


# ── settings and floors ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lost", "before", "after"),
    [
        ([], 0, False),
        ([3], 1, False),
        ([None], 1, True),
        ([frame.CONFIG_UPDATE], 1, True),
        ([frame.TOPIC_CREATE], 1, True),
        ([frame.CONFIG_UPDATE, 3], 2, True),
        ([3, frame.CONFIG_UPDATE], 1, False),
    ],
    ids=str,
)
def test_settings_are_uncertain_after_a_loss_that_may_have_held_them(
    lost: list[int | None], before: int, after: bool
) -> None:
    replay, topic = replayer()
    losses = [LostRange(1, "f", 0, 1, "", None if kind is None else frozenset((kind,)), 1, 1) for kind in lost]
    replay._note_config_loss(topic, losses, before)
    assert topic.recovery.is_config_uncertain is after
    replay._note_config_loss(topic, (), 0)
    assert topic.recovery.is_config_uncertain is after, "it stays so until the next settings"


@pytest.mark.parametrize(
    ("evict", "expiry", "marks", "found"),
    [
        (1, 1, (0, 0, 0), (0, 0, 0)),
        (4, 1, (3, 0, 0), (3, 0, 0)),
        (4, 4, (0, 3, 0), (0, 3, 0)),
        (5, 3, (4, 2, 0), (4, 2, 0)),
        (9, 1, (6, 0, 0), (8, 0, 0)),
        (9, 9, (0, 6, 0), (0, 8, 0)),
        (7, 1, (6, 0, 0), (6, 0, 0)),
    ],
    ids=str,
)
def test_a_logged_floor_is_applied_up_to_the_head_and_remembered(
    evict: int, expiry: int, marks: tuple[int, ...], found: tuple[int, ...]
) -> None:
    _, topic = replayer()
    Topic(topic).append([b"x"] * 6)
    recovery._apply_floor(topic, EvictWatermark(evict_floor=evict, earliest_seq=evict, expiry_floor=expiry))
    assert tuple(topic.index.watermarks) == marks
    assert tuple(topic.recovery.watermarks) == found
    recovery._apply_floor(topic, EvictWatermark(evict_floor=1, earliest_seq=1, expiry_floor=1))
    assert tuple(topic.recovery.watermarks) == found, "floors never fall"


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ranges", "pieces"),
    [
        ([(2, 5)], [b"cde"]),
        ([(2, 5), (5, 7)], [b"cdefg"]),
        ([(2, 5), (6, 7)], [b"cde", b"g"]),
        ([(0, 1), (1, 2), (4, 5), (5, 6), (9, 10)], [b"ab", b"ef", b"j"]),
    ],
    ids=str,
)
def test_adjacent_frames_are_copied_as_one_piece(ranges: list[tuple[int, int]], pieces: list[bytes]) -> None:
    begins, ends = (np.array(each) for each in zip(*ranges, strict=True))
    assert recovery._copy_frames(b"abcdefghijkl", begins, ends) == pieces


@pytest.mark.parametrize(
    ("starts", "sizes", "pieces"),
    [
        ([100], [40], [(100, 40, None)]),
        ([100, 140], [40, 40], [(100, 80, None)]),
        ([100, 150], [40, 40], [(100, 80, [100, 150])]),
        ([100, 160], [40, 50], [(100, 90, [100, 160])]),
        ([100, 150], [40, 50], [(100, 90, [100, 150])]),
        ([100, 140, 180], [40, 40, 40], [(100, 80, None), (180, 40, None)]),
        ([100, 160, 200, 300], [60, 40, 40, 40], [(100, 60, None), (160, 120, [160, 200, 300])]),
        ([7, 300, 600], [250, 10, 10], [(7, 270, [7, 300, 600])]),
    ],
    ids=str,
)
def test_frames_that_stay_in_the_wal_are_pieces_of_a_file(
    starts: list[int], sizes: list[int], pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_PIECE_BYTES", 100)
    found = recovery._wal_ranges("a file", np.array(starts), np.array(sizes))  # type: ignore[arg-type]
    assert all(type(piece) in (WalRange, GatheredRange) and str(piece.file) == "a file" for piece in found)
    assert [
        (piece.pos, piece.size, piece.starts.tolist() if isinstance(piece, GatheredRange) else None) for piece in found
    ] == pieces


# ── where a WAL begins ────────────────────────────────────────────────────────────────────────────

ONE, TWO, THREE = "shard-00", "shard-01", "shard-02"


@pytest.mark.parametrize(
    ("keys", "first_numbers", "whole"),
    [
        ([], {}, False),
        ([""], {"": 1}, True),
        ([""], {"": 2}, False),
        ([""], {"": 3}, False),
        ([ONE, TWO], {ONE: 1, TWO: 1}, True),
        ([ONE, TWO], {ONE: 2, TWO: 1}, False),
        ([ONE, TWO], {TWO: 1}, True),
        ([TWO], {TWO: 1}, False),
        ([ONE, TWO], {ONE: 1, TWO: 2}, True),
        ([ONE, TWO], {ONE: 1, TWO: 3}, False),
        (["", ONE], {"": 1, ONE: 2}, True),
        (["", ONE], {"": 1, ONE: 1}, False),
        (["", ONE, TWO], {ONE: 1, TWO: 1, "": 2}, True),
        ([ONE, TWO, THREE], {ONE: 1, THREE: 1}, True),
        ([ONE, TWO, THREE], {ONE: 1, TWO: 2, THREE: 1}, False),
    ],
    ids=str,
)
def test_a_wal_is_whole_if_the_shards_of_its_first_count_begin_at_one(
    keys: list[str], first_numbers: dict[str, int], whole: bool
) -> None:
    assert recovery._has_whole_wal(keys, first_numbers) is whole


@pytest.mark.parametrize(
    ("first", "layout"),
    [({""}, [""]), ({"", ONE}, [""]), ({ONE}, [ONE]), ({THREE}, [ONE, TWO, THREE]), ({ONE, TWO}, [ONE, TWO])],
)
def test_the_first_shard_count_follows_from_the_shards_that_are_left(first: set[str], layout: list[str]) -> None:
    assert recovery._first_shard_layout(first) == layout


def test_a_hundred_shards_are_the_most() -> None:
    assert len(recovery._first_shard_layout({"shard-99"})) == 100


@pytest.mark.parametrize(
    ("number", "shards", "key", "first"),
    [
        (0, {}, ONE, 1),
        (0, {ONE: ([], 1)}, TWO, 1),
        (0, {ONE: ([], 1), TWO: ([], 1)}, THREE, 1),
        (0, {ONE: ([1], 5)}, TWO, 2),
        (0, {TWO: ([1, 4], 5)}, ONE, 1),
        (0, {ONE: ([], 1), THREE: ([1], 5)}, TWO, 1),
        (0, {"": ([1], 5)}, ONE, 2),
        (3, {}, TWO, 2),
        (3, {ONE: ([1], 5)}, ONE, 7),
    ],
    ids=str,
)
def test_the_first_file_of_a_shard_without_files(
    number: int, shards: dict[str, tuple[list[int], int]], key: str, first: int
) -> None:
    groups = (GroupRow(THREE, 9, 4), GroupRow(ONE, 7, 4)) if number else ()
    loaded = LoadedManifest(number, Positions(groups=groups))
    found: list[Any] = [
        ShardRecovery(each, SimpleNamespace(file_numbers=files, next_file_number=following), ShardContents())  # type: ignore[arg-type]
        for each, (files, following) in shards.items()
    ]
    assert recovery.first_file_number(loaded, found, key) == first


def test_a_report_names_every_byte_that_was_not_replayed() -> None:
    report = RecoveryReport()
    lost = LostRange(1, "wal-1.log", 10, 25, "a reason", None, 1, 1)
    missing = LostRange(2, "", 0, 0, "", None, 1, 1)
    replay: Any = SimpleNamespace(
        torn_tail=SimpleNamespace(file="wal-3.log", pos=7, size=5, reason="zeros", frames=2),
        losses=[lost, missing],
        missing_file=SimpleNamespace(file_number=4, reason="it was named"),
        missing_frames=[range(5, 9), range(11, 12)],
    )
    recovery._report_shard(report, "wal", replay)
    assert report.cut == [
        "wal/wal-3.log at byte 7, 5 bytes: zeros; 2 frames that read follow it, of which no sync is known: kept in "
        "quarantine"
    ]
    assert report.damage == [
        "wal/wal-1.log at byte 10, 15 bytes that were synced: a reason",
        "wal/wal-0000000000000004.log is missing: it was named; all that was in it is lost",
        "wal: frames 5 to 8 are in no file",
        "wal: frames 11 to 11 are in no file",
    ]
    assert report.lost
    replay.torn_tail.frames, replay.losses, replay.missing_file, replay.missing_frames = 0, [], None, []
    again = RecoveryReport()
    recovery._report_shard(again, "wal", replay)
    assert (again.cut, again.damage, again.lost) == (["wal/wal-3.log at byte 7, 5 bytes: zeros"], [], False)


# ── shards in turns ───────────────────────────────────────────────────────────────────────────────


class FakeReplay:
    """A shard whose frames are given."""

    directory = "data/wal"

    def __init__(self, *windows: FrameWindow, losses: Sequence[LostRange] = ()) -> None:
        self._windows, self.losses, self.dropped = windows, losses, 0

    def windows(self) -> Sequence[FrameWindow]:
        return self._windows

    def drop_cached_windows(self) -> None:
        self.dropped += 1

    def shard(self, key: str) -> ShardRecovery:
        contents = ShardContents()
        for each in self._windows:
            contents.add(each)
        return ShardRecovery(key, self, contents)  # type: ignore[arg-type]


def test_frames_of_a_topic_in_several_shards_are_applied_by_their_seqs() -> None:
    """The last shard created topic 8; the first one has its newest records."""
    replay, _ = replayer(next_topic_id=8)
    lost = LostRange(1, "f", 0, 1, "", frozenset((frame.TOPIC_CREATE,)), 0, 5)
    replays = [
        FakeReplay(window(record(8, 5), record(8, 6))),
        FakeReplay(window(record(8, 3), record(8, 4)), losses=[lost]),
        FakeReplay(window(control(8, CREATED), record(8, 1)), window(record(8, 2), record(9, 1))),
    ]
    steps: list[tuple[str, int, int]] = []
    replay.run(
        [each.shard(key) for each, key in zip(replays, (ONE, TWO, THREE), strict=True)], lambda *at: steps.append(at)
    )
    assert (replay._topics[8].index.head, replay._topics[8].name) == (6, "a")
    assert [each.dropped for each in replays] == [1, 1, 1]
    assert {what for what, _, _ in steps} == {REPLAYING_TOPICS}
    assert [at[1:] for at in steps] == [(2, 8), (3, 8), (4, 8), (6, 8), (8, 8)]
    assert replay.next_id == 9 + 1 + 5, "a lost creation may have given an id"
    assert replay._report.frames == 8


def test_a_topic_that_was_dropped_in_the_end_is_not_replayed_and_its_bytes_are_free() -> None:
    replay, topic = replayer(next_topic_id=8)
    Topic(topic).append([b"one", b"two"])
    before = topic.quota.used
    shard = FakeReplay(window(record(1, 3, b"three"), control(1, DROPPED), control(8, CREATED), control(8, DROPPED)))
    added: list[Removal] = []
    topic.context.removals.add_removal = added.append
    replay.run([shard.shard("")], lambda *_: None)
    assert topic.is_dropped
    assert (before, topic.quota.used) == (6, 0)
    assert added == [
        Removal(None, "a", 1, "drop", 1, 3, 3, 11, 5, "recovery"),
        Removal(None, "a", 8, "drop", 1, 0, 0, 0, 5, "recovery"),
    ]
    assert 8 not in replay._topics


@pytest.mark.parametrize(
    ("seqs", "head", "bases"),
    [([1, 2], 2, [1]), ([1, 2, 3], 3, [1]), ([2, 3], 3, [1]), ([3], 3, [1]), ([5, 6], 6, [1, 5])],
    ids=str,
)
@pytest.mark.parametrize("where", ["memory", "file"])
def test_records_that_the_manifest_has_are_not_added_again(
    where: str, seqs: list[int], head: int, bases: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "file":
        monkeypatch.setattr(recovery, "REPLAY_MEMORY_BYTES", 0)
        monkeypatch.setattr(recovery, "_WAL_RANGE_BYTES_MIN", 0)
    replay, topic = replayer()
    Topic(topic).append([b"one", b"two"])
    topic.context.disk.write_file("data/file", bytes(8))
    frames = window(*(record(1, seq) for seq in seqs), offset=100)
    replay._append_records(topic, recovery._TopicFrames(frames, np.arange(len(seqs)), "data/file", ()))
    assert topic.index.head == head
    assert [part.base for part in topic.index.parts if part.stop > part.base] == bases
    added = [piece for part in topic.index.parts for piece in part._pieces if isinstance(piece, WalRange)]
    new = [seq for seq in seqs if seq > 2]
    first = 100 + int(frames.frame_pos[seqs.index(new[0])]) if new else 0
    assert [(piece.pos, piece.size) for piece in added] == ([(first, 50 * len(new))] if new and where == "file" else [])


@pytest.mark.parametrize(
    ("seqs", "doubtful", "kept", "reserved", "said"),
    [
        ([5, 6], 0, [0, 1], 0, None),
        ([3, 4], 2, [0, 1], 0, None),  # they follow the head
        ([2, 3], 2, [0, 1], 0, None),
        ([4, 5], 2, [], 5, "4 to 5"),
        ([4, 5, 6], 2, [2], 5, "4 to 5"),
        ([4, 5, 6, 7], 3, [3], 6, "4 to 6"),
        ([3, 9], 2, [0, 1], 0, None),
    ],
    ids=str,
)
def test_the_rest_of_a_batch_that_lost_its_beginning_is_not_served(
    seqs: list[int], doubtful: int, kept: list[int], reserved: int, said: str | None
) -> None:
    replay, topic = replayer()
    Topic(topic).append([b"one", b"two"])
    frames = window(*(record(1, seq) for seq in seqs), doubtful=doubtful)
    run = recovery._TopicFrames(frames, np.arange(len(seqs)), "path", ())
    assert replay._trusted_frames(topic, run).tolist() == kept
    assert topic.reservation.reserved_seq == reserved
    expected = [] if said is None else [f"a: seqs {said} may be the rest of a batch that is lost; not served"]
    assert topic.damage == expected


@pytest.mark.parametrize(
    ("frames", "keys"),
    [
        ([control(1, KEYED), record(1, 7)], ["k"]),
        ([control(1, KEYED), record(1, 8)], []),
        ([record(1, 7), control(1, KEYED)], []),
        ([control(1, KEYED), control(1, KEYED), record(1, 7)], ["k"]),
        ([control(1, KEYED), control(1, KEYED)], []),
        ([record(1, 6), control(1, KEYED), record(1, 7), record(1, 8)], ["k"]),
    ],
)
def test_a_key_counts_with_the_records_that_follow_it(
    frames: list[Frame], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, topic = replayer()
    restored: list[Any] = []
    monkeypatch.setattr(idempotency, "restore_keys", lambda _keys, found, _clock: restored.extend(found))
    found = window(*frames)
    replay._restore_keys(topic, found, np.arange(len(frames)), found.headers["kind"] == frame.WRITE_KEY)
    assert restored == [(key, 7, 7, 5) for key in keys]


# ── one frame, one topic ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["recovered-00000001", "other"])
def test_settings_give_a_topic_its_name_back_and_its_caps_up_to_their_seq(name: str) -> None:
    _, topic = replayer()
    Topic(topic).append([b"x"] * 6)
    topic.name = name
    recovery._apply_control_frame(topic, UPDATED, 5, 0)
    assert topic.name == ("a" if name.startswith("recovered") else name)
    assert topic.config.cap_records == 3
    assert topic.index.evict_floor == 3, "of the five records up to then three stay"


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "fsync"])
def test_a_topic_that_becomes_ephemeral_starts_another_segment(durability: Any) -> None:
    _, topic = replayer()
    Topic(topic).append([b"x"] * 2)
    body = ConfigUpdate(name="a", config=TopicConfig(durability=durability).to_json())
    recovery._apply_control_frame(topic, body, 2, 0)
    assert topic.index.active_segment_base() == (3 if durability == "ephemeral" else 1)


def test_a_delete_that_cannot_be_replayed_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    _, topic = replayer()

    def unreadable(*_: object) -> None:
        raise Corrupt("a file", pos=3, reason="bits")

    monkeypatch.setattr(delete, "replay_delete", unreadable)
    recovery._apply_control_frame(topic, DELETED, 1, 0)
    (said,) = topic.damage
    assert said.startswith("a: a delete could not be replayed: a file at byte 3: bits")
    topic.is_dropped, topic.damage = True, []
    recovery._apply_control_frame(topic, DELETED, 1, 0)
    assert topic.damage == []


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
    ("floors", "reserved", "uncertain", "marks", "durable", "head"),
    [
        ((0, 0), 0, False, (3, 0), 1, 6),  # by the cap alone
        ((0, 0), 0, True, (0, 0), 1, 6),
        ((4, 0), 0, False, (4, 0), 5, 6),
        ((0, 4), 0, False, (0, 4), 5, 6),
        ((0, 6), 0, True, (0, 6), 7, 6),
        ((9, 2), 8, True, (8, 2), 9, 8),
        ((0, 0), 8, True, (0, 0), 1, 8),
    ],
    ids=str,
)
def test_a_topic_is_finished_with_its_reserved_seqs_and_logged_floors(
    floors: tuple[int, int],
    reserved: int,
    uncertain: bool,
    marks: tuple[int, int],
    durable: int,
    head: int,
    writable: bool,
) -> None:
    """Six records, and a cap of three. A reader does not pad: its floors end with its head."""
    _, topic = replayer()
    Topic(topic).append([b"x"] * 6)
    topic.config, topic.recovery.is_config_uncertain = TopicConfig(cap_records=3), uncertain
    topic.recovery.watermarks = Watermarks(*floors)
    topic.reservation.reserved_seq = reserved
    topic.groups = {"g": GroupCursorState(40, 0)}
    report = RecoveryReport()
    recovery._finish_topic(topic, report, writable=writable)
    if not writable:
        head, marks, durable = 6, (min(marks[0], 6), min(marks[1], 6)), min(durable, 7)
    assert (topic.index.head, report.padded) == (head, {"a": head - 6} if head > 6 else {})
    assert tuple(topic.index.watermarks)[:2] == marks
    assert topic.durable_floor == durable
    assert (topic.last_assigned_seq, topic.history_seq, topic.recovery.head) == (head, head, head)
    assert topic.reservation.reserving_seq == reserved
    assert topic.groups["g"].seq == head


# ── opening ───────────────────────────────────────────────────────────────────────────────────────


def test_progress_counts_shards_from_one_and_frames_to_their_number() -> None:
    world = EngineHarness(wal_shards=2)
    for name in "abcd":
        world.log.topic(name, durability="fsync").append(b"x")
    steps: list[tuple[str, int, int]] = []
    world.open(world.disk.reboot(), progress=lambda *at: steps.append(at))
    reading = [at[1:] for at in steps if at[0] == READING_WAL]
    replaying = [at[1:] for at in steps if at[0] == REPLAYING_TOPICS]
    assert reading == [(1, 2), (2, 2)]
    assert replaying == [(2, 8), (4, 8), (6, 8), (8, 8)]


@pytest.mark.parametrize("left", ["wal", "topics", "manifest"])
def test_a_directory_with_anything_but_a_whole_wal_needs_a_manifest(left: str) -> None:
    """What is left of a directory: later files of the WAL, files of topics, or a manifest that does not read."""
    world = EngineHarness(wal_file_bytes=2048)
    for _ in range(3):
        world.log.topic("a", durability="fsync").append([bytes(1_000)] * 3)
        world.log.checkpoint()
    world.restart("kill")
    disk = world.disk.reboot()
    for path in list(disk.tree()):
        part = path.split("/")[1]
        if part == "meta" and left == "manifest":
            disk.write_file(path, b"no manifest")
        elif part != {"wal": "wal", "topics": "topics", "manifest": "-"}[left]:
            disk.remove(path)
    with pytest.raises(Damaged, match="no snapshot reads"):
        world.open(disk)


def test_two_topics_of_one_name_are_damage_and_a_dropped_one_is_not_in_the_way() -> None:
    world = EngineHarness()
    for name in "abc":
        world.log.topic(name, durability="fsync").append(b"x")
    world.log.checkpoint()
    loaded = manifest.load_newest(world.disk, "data")
    first, second, third = loaded.manifest.topics
    rows = (first, msgspec.structs.replace(second, name="a"), third)
    manifest.write_base(world.disk, "data", 2, msgspec.structs.replace(loaded.manifest, topics=rows))
    disk = world.disk.reboot()
    log = world.open(disk)
    assert log.report.damage == ["two topics are called 'a': the older one is not served"]
    assert [state.topic for state in log.topics()] == ["a", "c"]
    world.log.drop("a")
    assert [state.topic for state in world.crash().topics()] == ["a", "c"], "the second one of the name"
