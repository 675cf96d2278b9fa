"""A stream without a JVM: offsets, admission, restarts, epochs, and what `onGap` makes of a loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from tests.unit.spark.helpers import MODES, Mode, SourceEnv, pickled, read_micro_batch, source_env, stream

from tidelog.errors import BadInput, GapFound, NotFound
from tidelog.spark import backends
from tidelog.spark.backends import server
from tidelog.spark.source import TopicStreamReader
from tidelog.testing import ManualClock


@pytest.fixture(params=MODES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SourceEnv]:
    with source_env(request.param, tmp_path) as made:
        yield made


def at(seq: int, epoch: int = 1, topic: str = "orders") -> dict[str, Any]:
    return {topic: {"epoch": epoch, "seq": seq}}


def seqs(reader: TopicStreamReader, start: Any, end: Any) -> list[int]:
    found: list[int] = read_micro_batch(reader, start, end).column("seq").to_pylist()
    return found


def drained(reader: TopicStreamReader, start: Any) -> tuple[list[list[int]], Any]:
    """Batches until there is nothing new, as the engine of Spark asks for them."""
    batches = []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        batches.append(seqs(reader, start, end))
        start = json.loads(json.dumps(end))
    return batches, start


def test_stream_starts_at_its_option_and_continues(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    topic.append([b"x"] * 10)
    assert stream(env.options()).initialOffset() == at(11), "the latest, as with Kafka"
    assert stream(env.options(startingOffsets='{"orders": 4}')).initialOffset() == at(4)
    reader = stream(env.options(startingOffsets="earliest"))
    start = reader.initialOffset()
    assert start == at(1)
    assert drained(reader, start) == ([list(range(1, 11))], at(11))
    assert reader.latestOffset(at(11), ReadAllAvailable()) == at(11), "nothing new is the same offset, letter by letter"
    topic.append([b"y"] * 5)
    env.engine.checkpoint()
    topic.append([b"z"] * 5)
    assert drained(reader, at(11)) == ([list(range(11, 21))], at(21))
    found = reader.reportLatestOffset()
    assert found is not None
    assert {name: found["orders"][name] for name in ("epoch", "seq")} == at(21)["orders"]
    reader.stop()


@pytest.mark.parametrize("mode", MODES)
def test_progress_shows_lag_and_what_becomes_of_the_seqs(tmp_path: Path, mode: Mode) -> None:
    clock = ManualClock()
    with source_env(mode, tmp_path, clock=clock, segment_events=10) as env:
        topic = env.engine.topic("orders", durability="memory")
        for _ in range(5):
            topic.append([b"x"] * 10)
            clock.tick(1000)
        topic.delete(seqs=[3, 4, 12])
        env.engine.checkpoint()
        reader = stream(env.options(startingOffsets="earliest", maxOffsetsPerTrigger=20))
        reader._clock = clock
        start = reader.initialOffset()
        assert reader.reportLatestOffset() == at(51), "before the first batch"
        end = reader.latestOffset(start, ReadMaxRows(20))
        found = reader.reportLatestOffset()
        assert found is not None
        assert found["orders"] == {**at(51)["orders"], "lag_records": 30, "lag_ms": 3000, "freshness_ms": 4000}
        batch = found["_tidelog"]["batch"]
        assert (batch["seqs"], batch["rows"], batch["deleted"], batch["unknown"]) == (20, 17, 3, 0)
        assert len(seqs(reader, start, end)) == 17
        assert reader.latestOffset(end, ReadAllAvailable()) == at(51)
        last = reader.reportLatestOffset()
        assert last is not None
        assert (last["orders"]["lag_ms"], last["orders"]["freshness_ms"]) == (0, 1000)
        assert reader.latestOffset(at(51), ReadAllAvailable()) == at(51)
        idle = reader.reportLatestOffset()
        assert idle is not None
        assert "freshness_ms" not in idle["orders"], "a batch without records has no newest one"
        reader.stop()


def test_a_reader_from_a_checkpoint_knows_nothing_and_needs_nothing(env: SourceEnv) -> None:
    """Stateless: another process, asked the same, answers the same."""
    env.engine.topic("orders").append([b"x"] * 10)
    options = env.options(maxOffsetsPerTrigger=4)
    one, other = stream(options), stream(options)
    one.initialOffset()
    limit = one.getDefaultReadLimit()
    assert limit == ReadMaxRows(4)
    assert one.latestOffset(at(1), limit) == other.latestOffset(at(1), limit) == at(5)
    assert other.latestOffset(at(5), limit) == at(9)
    assert seqs(other, at(5), at(9)) == [5, 6, 7, 8]
    assert seqs(other, at(1), at(5)) == [1, 2, 3, 4], "a batch may be asked for again"


def test_rows_and_bytes_bound_a_batch(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    for _ in range(100):
        topic.append(b"x" * 1000)
    env.engine.checkpoint()
    reader = stream(env.options(startingOffsets="earliest", maxBytesPerTrigger="10k"))
    assert reader.getDefaultReadLimit() == ReadMaxBytes(10240)
    batches, _ = drained(reader, at(1))
    assert [len(batch) for batch in batches[:-1]] == [9] * 11
    assert [seq for batch in batches for seq in batch] == list(range(1, 101))
    both = stream(env.options(maxBytesPerTrigger="10k", maxOffsetsPerTrigger=4))
    assert both.latestOffset(at(1), both.getDefaultReadLimit()) == at(5)
    both = stream(env.options(maxBytesPerTrigger="2k", maxOffsetsPerTrigger=4))
    assert both.latestOffset(at(1), both.getDefaultReadLimit()) == at(2)
    assert both.latestOffset(at(1), ReadAllAvailable()) == at(101), "Trigger.Once wants all of it"


def test_a_limit_is_shared_between_topics(env: SourceEnv) -> None:
    env.engine.topic("a").append([b"x"] * 90)
    env.engine.topic("b").append([b"x"] * 10)
    options = {**env.options(startingOffsets="earliest", maxOffsetsPerTrigger=20), "subscribe": "a,b"}
    reader = stream(options)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert (end["a"]["seq"], end["b"]["seq"]) == (19, 3)


def test_available_now_ends_where_the_topic_ended_when_it_began(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    topic.append([b"x"] * 10)
    reader = stream(env.options(startingOffsets="earliest", maxOffsetsPerTrigger=4))
    reader.prepareForTriggerAvailableNow()
    topic.append([b"late"] * 10)
    batches, end = drained(reader, at(1))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert end == at(11)
    assert reader.latestOffset(at(15), reader.getDefaultReadLimit()) == at(15), "a start behind the target stays"


def test_a_topic_that_appears_is_read_from_its_start(env: SourceEnv) -> None:
    env.engine.topic("a-1").append([b"x"] * 3)
    options = env.options(subscribePattern="a-.*")
    del options["subscribe"]
    reader = stream(options)
    start = reader.initialOffset()
    assert start == at(4, topic="a-1")
    env.engine.topic("a-2").append([b"y"] * 5)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == {**at(4, topic="a-1"), **at(6, epoch=2, topic="a-2")}
    assert read_micro_batch(reader, start, end).column("topic").to_pylist() == ["a-2"] * 5


def test_few_records_wait_until_one_of_them_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr("tidelog.spark.source.SystemClock", lambda: clock)
    with source_env("path", tmp_path, clock=clock) as env:
        topic = env.engine.topic("orders")
        topic.append([b"x"] * 3)
        clock.tick(5000)
        reader = stream(env.options(minOffsetsPerTrigger=10, maxTriggerDelay="30s"))
        reader._clock = clock
        assert reader.latestOffset(at(1), ReadAllAvailable()) == at(1)
        clock.tick(26_000)
        assert reader.latestOffset(at(1), ReadAllAvailable()) == at(4), "31 s old"
        assert reader.latestOffset(at(4), ReadAllAvailable()) == at(4)
        topic.append([b"x"] * 10)
        assert reader.latestOffset(at(4), ReadAllAvailable()) == at(14), "enough of them"
        reader.prepareForTriggerAvailableNow()
        assert reader.latestOffset(at(12), ReadAllAvailable()) == at(14), "nobody waits who wants what is there"


# ── loss ──────────────────────────────────────────────────────────────────────────────────────────


def test_retention_that_passed_a_stream_is_a_gap(env: SourceEnv) -> None:
    topic = env.engine.topic("orders", cap_records=100)
    for _ in range(30):
        topic.append([b"x"] * 10)
    strict = stream(env.options())
    end = strict.latestOffset(at(150), ReadAllAvailable())
    assert end == at(301)
    with pytest.raises(GapFound, match=r"seqs 150 to 200 are lost \(cap\)"):
        strict.partitions(at(150), end)
    assert seqs(stream(env.options(onGap="skip")), at(150), end) == list(range(201, 301))
    first, *rest = read_micro_batch(stream(env.options(onGap="emit")), at(150), end).to_pylist()
    assert first["gap"] == {"first": 150, "last": 200, "cause": "cap"}
    assert len(rest) == 100
    limited = stream(env.options(onGap="skip", maxOffsetsPerTrigger=10))
    assert limited.latestOffset(at(150), ReadMaxRows(10)) == at(211), "what is lost takes up no room in a batch"
    inside = read_micro_batch(stream(env.options(onGap="emit")), at(150), at(180)).to_pylist()
    assert [row["gap"] for row in inside] == [{"first": 150, "last": 179, "cause": "cap"}], "a batch that is all lost"


def test_deletes_never_stop_a_stream(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    topic.append([b"x"] * 100)
    topic.delete(before_seq=50)
    env.engine.checkpoint()
    reader = stream(env.options())
    assert drained(reader, at(1)) == ([list(range(50, 101))], at(101))


def test_a_topic_made_again_is_another_topic(env: SourceEnv) -> None:
    env.engine.topic("orders").append([b"old"] * 10)
    strict = stream(env.options())
    assert strict.latestOffset(at(1), ReadAllAvailable()) == at(11)
    env.engine.drop("orders")
    with pytest.raises(GapFound, match="dropped"):
        strict.latestOffset(at(5), ReadAllAvailable())
    skipping = stream(env.options(onGap="skip"))
    assert skipping.latestOffset(at(5), ReadAllAvailable()) == at(5), "it may come back"
    env.engine.topic("orders").append([b"new"] * 20)
    with pytest.raises(GapFound, match="made again"):
        strict.latestOffset(at(5), ReadAllAvailable())
    end = skipping.latestOffset(at(5), ReadAllAvailable())
    assert end == at(21, epoch=env.engine.topic("orders").epoch)  # the ledger may have been made in between
    assert seqs(skipping, at(5), end) == list(range(1, 21)), "from its first record on"
    with pytest.raises(GapFound, match="made again"):
        strict.partitions(at(1), at(11))
    assert seqs(skipping, at(1), at(11)) == [], "a batch of the old one, asked for again"
    emitting = stream(env.options(onGap="emit"))
    told = read_micro_batch(emitting, at(1), at(11)).to_pylist()
    assert [row["gap"] for row in told] == [{"first": 1, "last": 10, "cause": "recreated"}]


def test_the_gap_of_a_topic_made_again_is_what_was_lost_of_the_old_one(env: SourceEnv) -> None:
    """It named the seqs of the new topic, which were delivered."""
    env.engine.topic("orders").append([b"old"] * 10)
    env.engine.drop("orders")
    env.engine.checkpoint()
    env.engine.topic("orders").append([b"new"] * 20)
    env.engine.checkpoint()
    emitting = stream(env.options(onGap="emit"))
    end = emitting.latestOffset(at(5), ReadAllAvailable())
    told = read_micro_batch(emitting, at(5), end).to_pylist()
    assert [row["gap"] for row in told if row["gap"]] == [{"first": 5, "last": 10, "cause": "recreated"}]
    assert [row["seq"] for row in told if not row["gap"]] == list(range(1, 21))
    # A query that had read all of the old topic has lost nothing: it goes on, also where a loss fails it.
    assert stream(env.options()).latestOffset(at(11), ReadAllAvailable()) == end
    assert not any(read_micro_batch(emitting, at(11), end).column("gap").to_pylist())
    # An epoch that the ledger does not know: how far its records went is not known either.
    unknown = read_micro_batch(emitting, at(5, epoch=99), end).to_pylist()
    assert [row["gap"] for row in unknown if row["gap"]] == [{"first": 5, "last": None, "cause": "recreated"}]
    with pytest.raises(GapFound, match="made again"):
        stream(env.options()).latestOffset(at(5, epoch=99), ReadAllAvailable())


def test_drop_is_found_after_many_other_entries_of_the_gap_log(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = env.engine.topic("orders")
    for number in range(1, 8):
        topic.append([b"old"] * 2)
        topic.delete(seqs=[2 * number])
        env.engine.checkpoint()
    env.engine.drop("orders")
    env.engine.topic("orders").append([b"new"])
    env.engine.checkpoint()
    monkeypatch.setattr(server, "_PAGE_SIZE", 2)
    reader = stream(env.options(onGap="emit"))
    end = at(2, epoch=env.engine.topic("orders").epoch)
    told = read_micro_batch(reader, at(3), end).to_pylist()
    assert [row["gap"] for row in told if row["gap"]] == [{"first": 3, "last": 14, "cause": "recreated"}]


def test_a_stream_goes_on_after_its_server_restarted(tmp_path: Path) -> None:
    with source_env("server", tmp_path) as env:
        env.engine.topic("orders").append([b"x"] * 10)
        reader = stream(env.options(startingOffsets="earliest"))
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        plan = pickled(list(reader.partitions(start, end)))
    with source_env("server", tmp_path) as again:
        again.engine.topic("orders").append([b"y"] * 5)
        reader = stream(again.options(startingOffsets="earliest"))
        assert len(plan) == 1
        assert seqs(reader, start, end) == list(range(1, 11))
        assert drained(reader, end) == ([list(range(11, 16))], at(16))


def test_a_topic_that_is_not_there_stops_a_stream_before_it_starts(env: SourceEnv) -> None:
    env.engine.topic("other")
    with pytest.raises(NotFound, match="there is no topic 'orders'"):
        stream(env.options()).initialOffset()
    env.engine.topic("orders")
    with pytest.raises(BadInput, match="another query's"):
        stream(env.options()).latestOffset({"offset": 5}, ReadAllAvailable())


def test_what_is_open_does_not_travel(env: SourceEnv) -> None:
    env.engine.topic("orders").append([b"x"])
    reader = stream(env.options())
    reader.latestOffset(at(1), ReadAllAvailable())
    assert reader._opened_backend is not None
    assert pickled(reader)._opened_backend is None
    reader.stop()
    assert isinstance(backends.open_backend(reader._options), object)
