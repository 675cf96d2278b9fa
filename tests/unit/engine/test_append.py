"""What an append promises: the contract's sections 1.6, 1.11, 1.14, 2.5, 3.1, and G4, G6, G7, G13, G15, G25."""

from __future__ import annotations

import errno
from threading import Barrier
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
    running,
    seqs,
)

import tidelog
from tidelog.engine import Engine, Record
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, Busy, DiskFull, TopicFull
from tidelog.formats import batch
from tidelog.testing import ManualClock, SimDisk

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 1 << 53, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 10**30),
    *(0.0, -0.0, 1.0, 0.1, -1.5, 1e300, 5e-324, 1.7976931348623157e308),
    *(
        "",
        "null",
        "text",
        "ä",
        "日本語",
        "😀",
        "a\u0000b",
        "\u2028\u2029",
        '"\\/\b\f\n\r\t',
        "\x7f",
        "\uffff",
        "e\u0301",
    ),
    *({}, {"": 1}, {"a": {"b": [1, {"c": None}]}}, {"😀": "😀"}, {"data": 1, "$seq": 2}, {"n": [[], {}, [[]]]}),
]


def exact(values: list[Any]) -> list[str]:
    """Equal in the type as well: 1 is neither True nor 1.0, and -0.0 is not 0.0."""
    return list(map(repr, values))


def found(log: Engine) -> list[str]:
    return exact(datas(log.topic("a"), weighed=False))


# Seqs and batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_seqs_begin_at_one_and_a_batch_gets_the_next_ones_in_its_order(durability: str) -> None:
    """Contract 2.5, 3.1."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability)
    one = topic.append("first")
    assert (one.first_seq, one.last_seq, one.head_seq, one.count, one.deduped) == (1, 1, 1, 1, False)
    many = topic.append(["second", "third", "fourth"])
    assert (many.first_seq, many.last_seq, many.head_seq, many.count) == (2, 4, 4, 3)
    assert list(many.seqs) == [2, 3, 4]
    found = read_topic(topic)
    assert found.seqs == [1, 2, 3, 4]
    assert found.datas == ["first", "second", "third", "fourth"]


def test_a_batch_has_one_time_and_times_follow_the_clock() -> None:
    """Contract 2.5: one `$ts` for the batch."""
    world = EngineHarness()
    topic = world.log.topic("a")
    now_ms = world.clock.now_us() // 1000
    topic.append([1, 2, 3])
    world.clock.tick(7)
    topic.append(4)
    assert [record.ts_ms for record in topic.read().records] == [now_ms] * 3 + [now_ms + 7]


@pytest.mark.parametrize("restart", [None, *RESTARTS])
def test_times_do_not_fall_when_the_clock_goes_back(restart: Restart | None) -> None:
    """Contract 3.1, G60: also when it goes back across a restart."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append(1)
    before_ms = topic.read().records[0].ts_ms
    world.clock.set_us(world.clock.now_us() - 3_600_000_000)
    if restart is not None:
        topic = world.restart(restart).topic("a")
    topic.append(2)
    world.clock.tick(1)
    topic.append(3)
    assert [record.ts_ms for record in read_topic(topic).records] == [before_ms] * 3


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_or_a_tuple_is_a_batch_and_anything_else_one_record(kind: type) -> None:
    topic = EngineHarness().log.topic("a")
    assert topic.append(kind([1, [2, 3], b"x"])).count == 3
    assert topic.append({"a": [1, 2]}).count == 1
    assert topic.append("text").count == 1
    assert datas(topic) == [1, [2, 3], b"x", {"a": [1, 2]}, "text"]


@pytest.mark.parametrize("frames", [2, 4096])
def test_after_a_power_cut_a_batch_is_whole_or_absent(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """G4. Method: every image of every policy while a batch of class `disk`, a chain of frames, is not synced."""
    monkeypatch.setattr(batch, "FRAME_RECORDS_MAX", frames)
    world = EngineHarness(head_reserve=100)
    topic = world.log.topic("a")
    topic.append([b"before"])
    world.log.tick()
    topic.append([b"%d" % number * 200 for number in range(7)], tag=[f"t{number}" for number in range(7)])
    found = {len(datas(world.open(image.disk).topic("a"))) for image in world.disk.images()}
    assert found == {1, 8}


def test_a_topic_at_full_speed_soon_reserves_for_many_writes() -> None:
    """Decision 0008: eight times as many each time, so that a hundred writes wait for three syncs; and where a
    reservation lasted a second, as few as at first."""
    world = EngineHarness(head_reserve=10)
    topic = world.log.topic("a", durability="disk")

    def syncs(writes: int) -> int:
        before = topic_operations(topic).shard.stats.fsyncs
        for _ in range(writes):
            topic.append(b"x")
        return topic_operations(topic).shard.stats.fsyncs - before

    assert syncs(100) == 3, "after 0, 11 and 92 records"
    world.clock.tick(5000)
    assert syncs(733 - 100) == 0
    assert syncs(1) == 1
    assert topic._state.reservation.reserved_seq == topic.head_seq + 10


@pytest.mark.parametrize("durability", CLASSES)
def test_one_bad_record_keeps_the_whole_batch_out_and_takes_no_seq(durability: str) -> None:
    """Contract 2.5: atomic, all or nothing."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability)
    before = world.disk.digest()
    with pytest.raises(BadInput):
        topic.append([1, 2, float("nan"), 4])
    assert topic.head_seq == 0
    assert world.disk.digest() == before
    assert topic.append(1).first_seq == 1


@pytest.mark.parametrize("durability", CLASSES)
def test_ten_thousand_records_go_in_at_once(durability: str) -> None:
    """Contract 1.12: exactly the limit is taken, as one batch of several frames."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability)
    assert topic.append([b"%d" % number for number in range(10_000)]).count == 10_000
    assert read_topic(topic, 3_333).datas == [b"%d" % number for number in range(10_000)]


# Data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value)[:30])
def test_a_json_value_comes_back_as_it_was(value: Any) -> None:
    """Contract 1.6, 1.14: alone and in a batch; from memory, from the WAL and from a segment."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append([value])
    topic.append([0, value, "x"])
    expected = exact([value, 0, value, "x"])
    assert found(world.log) == expected
    assert found(world.restart("kill")) == expected
    world.log.checkpoint()
    assert found(world.log) == expected
    assert found(world.restart("reopen")) == expected


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), 1 << 64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
jsons = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@quick
@given(st.lists(jsons | st.binary(max_size=40), min_size=1, max_size=6))
def test_any_mix_of_json_and_bytes_comes_back_as_it_was(values: list[Any]) -> None:
    """Contract 1.6: from memory and from the WAL."""
    world = EngineHarness()
    topic = world.log.topic("a")
    topic.append(values)
    assert found(world.log) == exact(values)
    assert found(world.restart("kill")) == exact(values)


@pytest.mark.parametrize(
    "data", [b"", b"null", b'{"a":1}', bytes(range(256)), b"\xff\xfe", b"\0" * 100, b"x" * 5_000], ids=len
)
def test_bytes_are_not_touched(data: bytes) -> None:
    """However much they look like JSON."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append(data)
    topic.append([data, "json", data])
    topic.append([data, data])
    expected = [data, data, "json", data, data, data]
    assert found(world.log) == exact(expected)
    assert found(world.restart("kill")) == exact(expected)
    assert found(world.restart("reopen")) == exact(expected)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_whatever_holds_bytes_is_kept_as_bytes(kind: type) -> None:
    topic = EngineHarness().log.topic("a")
    content = bytearray(b"abc")
    topic.append(kind(content))
    topic.append([kind(content), b"d", {"e": 1}])
    content[:] = b"xyz"
    assert datas(topic) == [b"abc", b"abc", b"d", {"e": 1}]


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), [float("-inf")], {"a": {"b": float("nan")}}, [None, float("nan")]),
        *("\ud800", "a\udfff", ["\ud83d"], {"\ud800": 1}, {"a": ["\udc00"]}),
        *(..., {"a": ...}, 1j),
    ],
    ids=ascii,
)
def test_what_json_cannot_say_is_refused(value: object) -> None:
    """Contract, appendix E: NaN, infinities, unpaired surrogates, foreign objects."""
    world = EngineHarness()
    topic = world.log.topic("a")
    before = world.disk.digest()
    with pytest.raises(BadInput, match="nothing was written"):
        topic.append([value])
    with pytest.raises(BadInput, match="nothing was written"):
        topic.append(1, meta={"m": value})
    assert (topic.head_seq, world.disk.digest()) == (0, before)


@pytest.mark.parametrize("restart", RESTARTS)
def test_tag_node_and_meta_are_common_or_one_each(restart: Restart) -> None:
    """Contract 1.14."""
    world = EngineHarness(**TINY)
    topic = world.log.topic("a", durability="fsync")
    topic.append(b"1", tag="t", node="n", meta={"m": 1})
    topic.append([b"2", 3], tag="t", node="n", meta={"m": [None, "ä"]})
    topic.append([b"4", 5, b"6"], tag=["x", None, "y"], node=[None, "n2", None], meta=[None, {}, {"k": 1.5}])
    topic.append([b"7", b"8"], tag=("x", "x"), node=("n", None))
    topic.append(b"9", tag="", node="")
    ms = world.clock.now_us() // 1000
    expected = [
        Record(1, ms, b"1", "t", "n", {"m": 1}),
        Record(2, ms, b"2", "t", "n", {"m": [None, "ä"]}),
        Record(3, ms, 3, "t", "n", {"m": [None, "ä"]}),
        Record(4, ms, b"4", "x", None, None),
        Record(5, ms, 5, None, "n2", {}),
        Record(6, ms, b"6", "y", None, {"k": 1.5}),
        Record(7, ms, b"7", "x", "n", None),
        Record(8, ms, b"8", "x", None, None),
        Record(9, ms, b"9", None, None, None),
    ]
    assert read_topic(topic).records == expected
    assert read_topic(world.restart("kill").topic("a")).records == expected
    world.log.checkpoint()
    assert read_topic(world.restart(restart).topic("a")).records == expected


# Idempotency keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_write_sent_again_gets_the_first_ones_answer_and_writes_nothing(durability: str) -> None:
    """Contract 1.11: the head is that of the first write, and what is sent again is not compared."""
    topic = EngineHarness().log.topic("a", durability=durability)
    first = topic.append([1, 2], key="k")
    topic.append(3)
    again = topic.append(["other", "things", "entirely"], key="k")
    assert (again.first_seq, again.last_seq, again.head_seq, again.count, again.deduped) == (1, 2, 2, 2, True)
    assert not first.deduped
    assert datas(topic) == [1, 2, 3]
    assert topic.append(4, key="K").first_seq == 4


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
def test_a_key_counts_until_its_window_is_over(durability: str) -> None:
    """Contract 1.11: valid while now − t ≤ window. The wall clock has no say in it."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability, idempotency_window_ms=1_000)
    topic.append(1, key="k")
    world.clock.tick(1_000)
    world.clock.set_us(world.clock.now_us() + 86_400_000_000)
    assert topic.append(2, key="k").deduped
    world.clock.tick(1)
    again = topic.append(3, key="k")
    assert (again.deduped, again.first_seq) == (False, 2)
    world.clock.tick(1_000)
    assert topic.append(4, key="k").first_seq == 2
    assert datas(topic) == [1, 3]


def test_keys_belong_to_one_topic() -> None:
    log = EngineHarness().log
    log.topic("a").append(1, key="k")
    assert not log.topic("b").append(2, key="k").deduped


@pytest.mark.parametrize("failing", ["ENOSPC", "full"])
def test_a_write_that_failed_is_not_remembered(failing: str) -> None:
    """Contract 1.11: failed writes record nothing."""
    world = EngineHarness()
    topic = world.log.topic("a", cap_records=1, discard="reject")
    if failing == "full":
        topic.append("in the way")
        with pytest.raises(TopicFull):
            topic.append(1, key="k")
        topic.delete(seqs=[1])
    else:
        world.disk.fail("write", error=errno.ENOSPC)
        with pytest.raises(DiskFull):
            topic.append(1, key="k")
    assert not topic.append(2, key="k").deduped
    assert topic.append(3, key="k").deduped
    assert datas(topic) == [2]


def test_a_key_is_looked_at_before_caps_and_quota() -> None:
    """Contract 1.11: the dedupe lookup comes before the cap and quota checks."""
    topic = EngineHarness(total_bytes_max=20).log.topic("a", cap_records=1, discard="reject")
    topic.append(b"x" * 20, key="k")
    assert topic.append(b"y" * 20, key="k").deduped


def test_a_second_write_of_a_key_under_way_waits_for_the_first() -> None:
    """Contract 1.11: same-key concurrent writes serialise; the loser gets the winner's seqs."""
    topic = EngineHarness().log.topic("a", durability="fsync")
    first, second = topic.append_nowait([1, 2], key="k"), topic.append_nowait(3, key="k")
    assert not first.done
    assert not second.done
    repeated = second.wait()
    assert (repeated.first_seq, repeated.last_seq, repeated.deduped) == (1, 2, True)
    assert not first.wait().deduped
    assert datas(topic) == [1, 2]


def test_a_second_write_of_a_key_shares_the_firsts_failure_and_a_third_goes_through() -> None:
    """Contract 1.11: no caller gets seqs that were never written."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    first, second = topic.append_nowait(1, key="k"), topic.append_nowait(2, key="k")
    world.disk.fail("write", error=errno.ENOSPC)
    for token in (first, second):
        with pytest.raises(DiskFull):
            token.wait()
    assert not topic.append(3, key="k").deduped
    assert datas(topic) == [3]


def test_of_many_threads_with_one_key_exactly_one_writes() -> None:
    """Contract 1.11, with real threads."""
    with tidelog.open("data", disk=SimDisk(), clock=ManualClock(), wal_shards=1, wal_file_bytes=4096) as log:
        topic = log.topic("a", durability="fsync")
        start, found = Barrier(8), []

        def write(number: int) -> None:
            start.wait()
            found.append(topic.append([number, number], key="k"))

        with running(*(lambda number=number: write(number) for number in range(8))):
            pass
        assert sorted(repeated.deduped for repeated in found) == [False] + [True] * 7
        assert {repeated.seqs for repeated in found} == {range(1, 3)}
        assert len(seqs(topic)) == 2


@pytest.mark.parametrize("key", ["k", "é" * 128, "x" * 256])
def test_a_key_has_up_to_256_bytes(key: str) -> None:
    topic = EngineHarness().log.topic("a")
    topic.append(1, key=key)
    assert topic.append(2, key=key).deduped
    with pytest.raises(BadInput, match="nothing was written"):
        topic.append(3, key="é" * 128 + "x")
    assert datas(topic) == [1]


# Commits ------------------------------------------------------------------------------------------------


def test_append_nowait_is_not_visible_before_its_commit() -> None:
    world = EngineHarness()
    topic = world.log.topic("a")
    token = topic.append_nowait([1, 2])
    early = token.done
    assert topic.read().records == []
    assert token.wait().last_seq == 2
    assert (early, token.done) == (False, True)
    assert datas(topic) == [1, 2]


@pytest.mark.parametrize("how", ["tick", "close", "another"])
def test_append_nowait_commits_without_a_wait(how: str) -> None:
    """G19, G20."""
    world = EngineHarness()
    topic = world.log.topic("a")
    token = topic.append_nowait(1)
    if how == "tick":
        world.log.tick()
    elif how == "another":
        topic.append(2)
    else:
        world.log.close()
    assert token.done
    assert token.wait().first_seq == 1
    assert datas(world.restart("kill").topic("a"))[0] == 1


@pytest.mark.parametrize("durability", LOGGED)
def test_no_reader_sees_a_record_before_its_commit(durability: str) -> None:
    """G6. Method: the head is looked at before every operation of the disk, the sync included."""
    world = EngineHarness()
    topic = world.log.topic("a", durability=durability)
    topic.append("first")
    heads: list[int] = []
    world.disk.on_op = lambda _: heads.append(topic.head_seq)
    world.disk.trace.clear()
    topic.append(["second", "third"])
    world.disk.on_op = None
    assert ("sync" in world.disk.trace[-1].split()[0]) == (durability == "fsync")
    assert set(heads) == {1}
    assert topic.head_seq == 3


def test_writes_that_wait_together_share_one_write_and_one_sync() -> None:
    """G15."""
    world = EngineHarness()
    topic, other = world.log.topic("a", durability="fsync"), world.log.topic("b", durability="fsync")
    tokens = [topic.append_nowait([1, 2, 3]), other.append_nowait(b"x" * 1_000), topic.append_nowait(4)]
    world.disk.trace.clear()
    assert [token.wait().last_seq for token in tokens] == [3, 1, 4]
    assert [line.split()[0] for line in world.disk.trace] == ["write", "sync"]


def test_a_full_queue_refuses_the_whole_batch_and_takes_no_seq() -> None:
    """G13."""
    world = EngineHarness(queue_max=2)
    topic = world.log.topic("a")
    tokens = [topic.append_nowait(1), topic.append_nowait([2, 3])]
    with pytest.raises(Busy) as refused:
        topic.append([4, 5])
    assert refused.value.retryable
    assert [token.wait().last_seq for token in tokens] == [1, 3]
    assert topic.append(6).first_seq == 4
    assert datas(world.restart("kill").topic("a")) == [1, 2, 3, 6]


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_batch_refused_by_a_full_disk_leaves_holes(restart: Restart) -> None:
    """G7, G25: not visible before the restart nor after it, and writing goes on without one."""
    world = EngineHarness()
    topic = world.log.topic("a", durability="fsync")
    topic.append([1, 2])
    world.disk.fail("write", error=errno.ENOSPC, partial=60)
    with pytest.raises(DiskFull) as failed:
        topic.append([3, 4, 5])
    assert failed.value.written is False
    assert (topic.head_seq, datas(topic)) == (2, [1, 2])
    first = topic.append(6).first_seq
    assert first in (3, 6)
    page = topic.read()
    assert (page.counts.holes, page.gap) == (first - 3, None)
    assert datas(topic) == [1, 2, 6]
    found = read_topic(world.restart(restart).topic("a"))
    assert (found.datas, found.seqs[-1], found.gap) == ([1, 2, 6], first, None)
