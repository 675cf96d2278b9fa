"""Batches that their writer numbers (P4): one range each, once, over restarts; and what is refused."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pyarrow as pa
import pytest
from tests.unit.engine.harness import CLASSES, EngineHarness

import tidelog
from tidelog.engine import Appended, Topic, idempotency
from tidelog.engine.config import Durability
from tidelog.engine.idempotency import (
    BATCHES_KEPT,
    PRODUCERS_MAX,
    SINGLE_BATCH_PREFIX,
    SINGLE_BATCH_WRITERS_KEPT,
    BatchRange,
)
from tidelog.errors import BadInput, BatchConflict, DiskFull, TooLarge, TopicFull
from tidelog.formats.control_frames import NumberedBatch


def table(*datas: bytes) -> pa.Table:
    return pa.table({"data": list(datas)})


def put(topic: Topic, number: int, *datas: bytes, total: int = 1, writer: str = "etl", query_id: str = "") -> Appended:
    return topic.append_numbered([table(*datas)], writer=writer, number=number, sum=(total, 0), query_id=query_id)


def all_of(topic: Topic) -> list[bytes]:
    found: list[bytes] = topic.to_arrow().column("data").to_pylist()
    return found


def test_many_tables_are_one_range_and_a_repetition_returns_it(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data")) as log:
        topic = log.topic("orders")
        topic.append(b"before")
        given = [table(b"a", b"b"), table(), table(b"c")]
        done = topic.append_numbered(given, writer="etl", number=0, sum=(1, 2))
        assert (done.first_seq, done.last_seq, done.deduped) == (2, 4, False)
        topic.append(b"after")
        again = topic.append_numbered(given, writer="etl", number=0, sum=(1, 2))
        assert (again.first_seq, again.last_seq, again.deduped, again.head_seq) == (2, 4, True, 5)
        assert topic.producer_batches("etl") == {0: BatchRange(2, 4, (1, 2))}
        assert all_of(topic) == [b"before", b"a", b"b", b"c", b"after"]


@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_restart_remembers(tmp_path: Path, durability: Durability, checkpointed: bool) -> None:
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        topic = log.topic("orders", durability=durability, idempotency_window_ms=0)
        for number in range(3):
            put(topic, number, b"%d" % number, total=number)
        if checkpointed:
            log.checkpoint()
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        topic = log.topic("orders")
        assert [put(topic, number, b"-", total=number).seqs for number in range(3)] == [
            range(seq, seq + 1) for seq in (1, 2, 3)
        ]
        assert put(topic, 3, b"3").deduped is False


def test_an_ephemeral_topic_knows_numbers_as_well(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data")) as log:
        topic = log.topic("orders", durability="ephemeral")
        assert put(topic, 7, b"a").deduped is False
        assert put(topic, 7, b"a").deduped is True
        assert all_of(topic) == [b"a"]


@pytest.mark.parametrize("durability", CLASSES)
def test_readers_that_wait_hear_of_a_numbered_batch(durability: Durability) -> None:
    topic = EngineHarness().log.topic("orders", durability=durability)
    heard: list[int] = []
    topic.add_listener(lambda: heard.append(topic.head_seq))
    put(topic, 0, b"a", b"b")
    assert heard == [2]


def test_how_much_is_remembered() -> None:
    """guarantees.md names the first; the others bound what a topic and its manifest keep."""
    assert (BATCHES_KEPT, SINGLE_BATCH_WRITERS_KEPT, PRODUCERS_MAX) == (256, 16, 1024)


def test_other_content_and_a_number_that_fell_are_refused_with_three_ways_out(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data")) as log:
        topic = log.topic("orders")
        put(topic, 5, b"a", total=1)
        with pytest.raises(BatchConflict, match="batch 5 of writer 'etl' was written before, at seqs 1 to 1") as caught:
            put(topic, 5, b"b", total=2)
        for way in ("restore the checkpoint", "another name", "drop the topic"):
            assert way in str(caught.value)
        with pytest.raises(BatchConflict, match=r"batch 4 .* was not written before, and batch 5 was"):
            put(topic, 4, b"a", total=1)
        assert put(topic, 0, b"another writer's", writer="copy").first_seq == 2
        log.drop("orders")
        assert put(log.topic("orders"), 0, b"anew").first_seq == 1


@pytest.mark.parametrize(
    ("durability", "restart"),
    [("ephemeral", "none"), ("disk", "none"), ("disk", "replayed"), ("disk", "checkpointed")],
)
def test_query_id_distinguishes_a_replay_from_a_reset(tmp_path: Path, restart: str, durability: Durability) -> None:
    """P8: the newest batch of the same query is a replay whatever is in it, and another query is refused."""
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        topic = log.topic("orders", durability=durability)
        put(topic, 0, b"a", total=1, query_id="one")
        put(topic, 1, b"b", b"c", total=2, query_id="one")
        if restart == "checkpointed":
            log.checkpoint()
        if restart == "none":
            _replays_and_resets(topic)
    if restart != "none":
        with tidelog.open(str(tmp_path / "data"), threads=False) as log:
            _replays_and_resets(log.topic("orders"))


def _replays_and_resets(topic: Topic) -> None:
    again = put(topic, 1, b"b", total=3, query_id="one")
    assert (again.seqs, again.deduped) == (range(2, 4), True), "the source lost a record since: the first write stays"
    assert put(topic, 0, b"a", total=1, query_id="one").deduped
    with pytest.raises(BatchConflict, match=r"batch 0 .* was written before"):
        put(topic, 0, b"x", total=9, query_id="one")  # a checkpoint that was put back, and planned anew
    for number, total in ((0, 1), (1, 2), (1, 9), (2, 1)):
        with pytest.raises(BatchConflict, match=r"comes from the query two, .* written by the query one"):
            put(topic, number, b"a", total=total, query_id="two")
    assert put(topic, 1, b"b", b"c", total=2).deduped, "without an id the sum decides"
    with pytest.raises(BatchConflict, match="with other records"):
        put(topic, 1, b"b", total=3)
    assert put(topic, 2, b"d", total=4).first_seq == 4
    with pytest.raises(BatchConflict, match="written by the query one"):  # one without an id does not hide it
        put(topic, 3, b"e", query_id="two")
    assert put(topic, 3, b"e", query_id="one").first_seq == 5
    assert all_of(topic) == [b"a", b"b", b"c", b"d", b"e"]


def test_a_writer_from_before_query_ids_goes_on_with_one(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        topic = log.topic("orders")
        put(topic, 0, b"a", total=1)
        assert put(topic, 0, b"a", total=1, query_id="one").deduped
        with pytest.raises(BatchConflict, match="with other records"):
            put(topic, 0, b"b", total=2, query_id="one")
        put(topic, 1, b"b", total=2, query_id="one")
        assert put(topic, 1, b"c", total=3, query_id="one").deduped


def test_a_full_topic_takes_nothing_and_the_number_is_free(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data")) as log:
        topic = log.topic("orders", cap_records=3, discard="reject")
        put(topic, 0, b"a", b"b")
        with pytest.raises(TopicFull):
            put(topic, 1, b"c", b"d")
        assert topic.producer_batches("etl").keys() == {0}
        topic.delete(before_seq=3)
        assert put(topic, 1, b"c", b"d").seqs == range(3, 5)


def test_expired_records_free_space_for_a_batch() -> None:
    world = EngineHarness()
    topic = world.log.topic("orders", cap_records=2, discard="reject", ttl_ms=1_000)
    put(topic, 0, b"a", b"b")
    world.clock.tick(1_001)
    assert put(topic, 1, b"c", b"d").seqs == range(3, 5)
    assert all_of(topic) == [b"c", b"d"]


def test_a_write_refused_by_a_full_disk_leaves_no_number() -> None:
    world = EngineHarness()
    topic = world.log.topic("orders", durability="fsync")
    world.disk.fail("write", at=1, error=28)
    with pytest.raises(DiskFull):
        put(topic, 0, b"a")
    assert topic.producer_batches("etl") == {}
    assert put(topic, 0, b"a").deduped is False


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"writer": ""}, "a writer name is text"),
        ({"writer": "x" * 1025}, "a writer name is text"),
        ({"number": -1}, "a whole number from 0"),
        ({"number": True}, "a whole number from 0"),
        ({"sum": (1, 1 << 64)}, "two words of 64 bits"),
        ({"sum": (1,)}, "two words of 64 bits"),
        ({"query_id": "x" * 129}, "a query id is text"),
        ({"query_id": None}, "a query id is text"),
    ],
)
def test_bad_input(tmp_path: Path, given: dict[str, object], words: str) -> None:
    with tidelog.open(str(tmp_path / "data")) as log:
        topic = log.topic("orders")
        with pytest.raises(BadInput, match=words):
            topic.append_numbered([table(b"a")], **{"writer": "etl", "number": 0, "sum": (1, 2), **given})  # type: ignore[arg-type]
        assert topic.head_seq == 0


def test_a_batch_without_rows_and_one_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.engine.producer_batches.COMMIT_BYTES_MAX", 10)
    with tidelog.open(str(tmp_path / "data")) as log:
        topic = log.topic("orders")
        with pytest.raises(BadInput, match="at least one record"):
            topic.append_numbered([table()], writer="etl", number=0, sum=(0, 0))
        with pytest.raises(TooLarge, match="a numbered batch"):
            topic.append_numbered([table(b"123456"), table(b"78901")], writer="etl", number=0, sum=(0, 0))
        assert topic.head_seq == 0


def test_repetitions_at_the_same_time_are_one_write(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data")) as log:
        topic, barrier, done = log.topic("orders"), Barrier(8), list[Appended]()

        def repeat() -> None:
            barrier.wait(30)
            for number in range(20):
                done.append(put(topic, number, b"%d" % number, total=number))

        threads = [Thread(target=repeat) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(done) == 160
        assert sum(not each.deduped for each in done) == 20
        assert all_of(topic) == [b"%d" % number for number in range(20)]


def test_the_last_batches_are_kept_and_writers_of_one_batch_forgotten() -> None:
    known: idempotency.ProducerBatches = {}

    def body(writer: str, number: int) -> NumberedBatch:
        return NumberedBatch(writer=writer, number=number, first=number + 1, last=number + 1, sum=(0, 0))

    for number in range(BATCHES_KEPT + 10):
        idempotency.record_batch(known, body("etl", number))
    for number in range(5):  # a replay that begins further back says some again
        idempotency.record_batch(known, body("etl", number))
    assert list(known["etl"]) == list(range(10, BATCHES_KEPT + 10))
    for job in range(SINGLE_BATCH_WRITERS_KEPT + 3):
        idempotency.record_batch(known, body(f"{SINGLE_BATCH_PREFIX}{job}", 0))
    assert [name for name in known if name.startswith(SINGLE_BATCH_PREFIX)] == [
        f"{SINGLE_BATCH_PREFIX}{job}" for job in range(3, SINGLE_BATCH_WRITERS_KEPT + 3)
    ]
    assert idempotency.decode_producers(idempotency.encode_producers(known, 1 << 60)) == known
    assert idempotency.encode_producers({"etl": {3: BatchRange(5, 9, (0, 0))}}, 8) == (), (
        "what a manifest does not hold it does not claim"
    )


def test_there_are_so_many_writers_and_no_more() -> None:
    known = {str(number): {0: BatchRange(1, 1, (0, 0))} for number in range(idempotency.PRODUCERS_MAX)}
    idempotency.check_producer_batch(known, "0", 1, (0, 0))
    with pytest.raises(BadInput, match="1024 writers"):
        idempotency.check_producer_batch(known, "another", 0, (0, 0))
