"""What a record is, JSON or bytes, on its way through Spark: read beside its data, written as it was read.

Both kinds here have bytes that could be either, so nothing but the flag tells them apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType
from tests.unit.spark.helpers import MODES, SourceEnv, read, read_micro_batch, source, source_env, stream
from tests.unit.spark.sink_helpers import batch_of, save, save_micro_batch, writer
from tests.unit.spark.test_object_store_backend import ADDRESS, Bucket
from tests.unit.spark.test_object_store_backend import bucket as bucket
from tests.unit.spark.test_sink import SinkEnv, open_sink_env

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.engine import Topic
from tidelog.errors import BadInput, BatchConflict
from tidelog.spark import row_encoder

KIND = "seq,is_json"
PLAIN = ["topic", "seq", "ts", "node", "tag", "meta", "data"]
Kinds = dict[int, bool]


@pytest.fixture(params=MODES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SourceEnv]:
    with source_env(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=MODES)
def sink_env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkEnv]:
    with open_sink_env(request.param, tmp_path) as opened:
        yield opened


def value(number: int, is_json: bool) -> object:
    return {"n": number} if is_json else b'{"n":%d}' % number


def write(topic: Topic, count: int, chance: Random) -> Kinds:
    """Records of either kind: mixed batches, batches of one kind, and single ones."""
    written: Kinds = {}
    while count:
        size = min(chance.choice((1, 1, 7, 40)), count)
        all_alike = chance.random() < 0.3
        kinds = [chance.random() < 0.5] * size if all_alike else [chance.random() < 0.5 for _ in range(size)]
        first = topic.append([value(number, kind) for number, kind in enumerate(kinds)]).first_seq
        written |= {first + place: kind for place, kind in enumerate(kinds)}
        count -= size
    return written


def fill(env: SourceEnv) -> Kinds:
    """1800 records in two segments, 200 in the WAL; in either, deleted ones lie between two of different kinds."""
    topic, chance = env.engine.topic("orders"), Random(5)
    written = write(topic, 1800, chance)
    env.engine.checkpoint()
    written |= write(topic, 200, chance)
    gone = [seq for seq, after in pairwise(sorted(written)) if written[seq] != written[after] and chance.random() < 0.2]
    assert sum(seq <= 1800 for seq in gone) > 50
    assert sum(seq > 1800 for seq in gone) > 5
    topic.delete(seqs=gone)
    return {seq: kind for seq, kind in written.items() if seq not in gone}


def kinds(table: pa.Table) -> Kinds:
    return dict(zip(table.column("seq").to_pylist(), table.column("is_json").to_pylist(), strict=True))


# ── read ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("more", [{}, {"minPartitions": 7, "splitBytes": "4k"}, {"verify": "false"}])
def test_each_record_is_what_it_was_written_as(env: SourceEnv, more: dict[str, Any]) -> None:
    left = fill(env)
    found = read(env.options(columns=KIND, **more))
    assert kinds(found.table) == left
    assert list(read(env.options(columns="is_json,data")).table.column("is_json").to_pylist()) == list(left.values())
    odd = [seq for seq in left if seq > 900 and seq % 2]
    some = read(env.options(columns=KIND, where=f"seq in ({', '.join(map(str, odd))})"))
    assert kinds(some.table) == {seq: left[seq] for seq in odd}


def test_is_json_is_returned_only_when_named(env: SourceEnv) -> None:
    fill(env)
    assert read(env.options()).table.column_names == PLAIN
    assert source(env.options(payload="infer")).schema().names == [*PLAIN[:-1], "n", "_rescued"]
    assert read(env.options(columns=",".join([*PLAIN, "is_json"]))).table.column_names == [*PLAIN, "is_json"]


def test_a_tail_that_travels_in_no_plan(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.spark.plan.INLINE_TAIL_BYTES_MAX", 0)
    left = fill(env)
    made = source(env.options(columns=KIND))
    reader = made.reader(made.schema())
    splits = list(reader.partitions())
    env.engine.topic("orders").append([b"x", 1])
    env.engine.checkpoint()  # the tail is a segment by the time it is read
    found = pa.Table.from_batches([batch for split in splits for batch in reader.read(split)])
    assert kinds(found) == left


def test_segments_that_are_gone_when_they_are_read(env: SourceEnv) -> None:
    left = fill(env)
    made = source(env.options(columns=KIND, onGap="skip"))
    reader = made.reader(made.schema())
    splits = list(reader.partitions())
    topic = env.engine.topic("orders")
    topic.delete(before_seq=1500)
    for _ in range(3):
        topic.append(b"y")
        env.engine.checkpoint()
    found = kinds(pa.Table.from_batches([batch for split in splits for batch in reader.read(split)]))
    assert min(found) > 1000, "the first segment went"
    assert found == {seq: left[seq] for seq in found}
    assert set(found) >= {seq for seq in left if seq >= 1500}


def test_holes_shift_nothing(tmp_path: Path) -> None:
    with source_env("path", tmp_path) as env:
        written = write(env.engine.topic("orders", durability="disk"), 10, Random(1))
        shutil.copytree(env.path, tmp_path / "copy" / "data")
    for mode in MODES:
        with source_env(mode, tmp_path / "copy") as killed:  # what was reserved and not written are holes now
            topic = killed.engine.topic("orders")
            assert topic.head_seq > len(written)
            written |= write(topic, 50, Random(mode))
            killed.engine.checkpoint()
            written |= write(topic, 5, Random(mode))
            assert kinds(read(killed.options(columns=KIND)).table) == written


def test_a_stream_and_a_row_for_what_was_lost(env: SourceEnv) -> None:
    topic = env.engine.topic("orders", cap_records=100)
    written = write(topic, 150, Random(2))
    reader = stream(env.options(columns="seq,is_json,gap", startingOffsets='{"orders": 1}', onGap="emit"))
    start = reader.initialOffset()
    found = read_micro_batch(reader, start, reader.latestOffset(start))
    assert found.column("is_json").to_pylist()[0] is None, "nobody knows what was lost"
    assert found.column("gap").to_pylist()[0]["last"] == 50
    assert kinds(found.slice(1)) == {seq: kind for seq, kind in written.items() if seq > 50}


def test_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    with source_env("path", tmp_path) as env:
        left = fill(env)
        bucket.copy(Path(env.path))
    assert kinds(read({"path": ADDRESS, "subscribe": "orders", "columns": KIND}).table) == left


@pytest.mark.parametrize("codec", ["rustlog", "laminar", "narwhal"])
def test_the_other_codecs_know_bytes_only(codec: str, tmp_path: Path) -> None:
    with SegmentedLog.open(str(tmp_path / "events"), codec) as log:
        log.append_many([b'{"n":1}'] * 30)
        found = read({"path": str(tmp_path / "events"), "codec": codec, "columns": KIND})
        assert found.table.column("is_json").to_pylist() == [False] * 30


def schema(*fields: StructField) -> StructType:
    return StructType(list(fields))


def test_beside_typed_columns_and_text(env: SourceEnv) -> None:
    topic = env.engine.topic("orders")
    topic.append([{"n": 1, "is_json": "mine"}, b'{"n":2}'])
    env.engine.checkpoint()
    topic.append([b'{"n":3}', {"n": 4}])
    own, n = StructField("is_json", BooleanType()), StructField("n", LongType())
    theirs = StructField("data_is_json", StringType())
    found = read(env.options(payload="json"), schema(n, own, theirs)).table.to_pylist()
    assert [(row["n"], row["is_json"], row["data_is_json"]) for row in found] == [
        (1, True, "mine"),
        (2, False, None),
        (3, False, None),
        (4, True, None),
    ]
    texts = read(env.options(payload="json", columns="data,is_json")).table.to_pylist()
    assert texts[1] == {"data": '{"n":2}', "is_json": False}
    inferred = source(env.options(payload="infer")).schema()
    assert inferred.names[-3:] == ["n", "data_is_json", "_rescued"]
    named = read(env.options(payload="infer", columns="n,is_json,data_is_json")).table.to_pylist()
    assert [tuple(row.values()) for row in named] == [tuple(row.values()) for row in found]


def test_it_has_one_type(env: SourceEnv) -> None:
    env.engine.topic("orders").append([b"x"])
    for payload in ("bytes", "json"):
        with pytest.raises(BadInput, match="is_json as string, it is boolean; nothing was read"):
            read(env.options(payload=payload), schema(StructField("is_json", StringType())))
    with pytest.raises(BadInput, match=r"there is no column 'isjson'.*did you mean is_json"):
        read(env.options(columns="isjson"))


# ── written ───────────────────────────────────────────────────────────────────────────────────────


def mixed(*values: bytes, said: Sequence[bool | None], **columns: Any) -> pa.RecordBatch:
    return batch_of(*values, is_json=pa.array(said, pa.bool_()), **columns)


def found_in(sink_env: SinkEnv, topic: str = "copy") -> list[Any]:
    return [record.data for record in sink_env.with_topic(lambda made: made.read(0, 10_000).records, topic)]


def test_rows_are_written_as_they_say(sink_env: SinkEnv) -> None:
    save(
        sink_env.options(),
        [mixed(b"1", b"2", b"{", b'"t"', said=[True, False, None, True])],
        [mixed(b"5", said=[None])],
    )
    assert found_in(sink_env) == [1, b"2", b"{", "t", b"5"]
    texts = pa.RecordBatch.from_pydict({"data": pa.array(["6", "7"]), "is_json": pa.array([False, True])})
    save(sink_env.options(), [texts])
    assert found_in(sink_env)[5:] == [b"6", 7]


def test_rows_for_several_topics_keep_their_kind(sink_env: SinkEnv) -> None:
    options = sink_env.options()
    del options["topic"]
    names, said = pa.array(["x", "y", "x", "y", "x"]), [True, True, False, False, True]
    save(options, [mixed(b"1", b"2", b"3", b"4", b"5", said=said, topic=names)])
    assert (found_in(sink_env, "x"), found_in(sink_env, "y")) == ([1, b"3", 5], [2, b"4"])


def test_a_large_batch_is_cut_with_its_kinds(sink_env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_encoder, "STAGED_BATCH_BYTES_MAX", 3000)
    chance = Random(3)
    said = [chance.random() < 0.5 for _ in range(500)]
    save(sink_env.options(), [mixed(*(b"%d" % number * 3 for number in range(1, 501)), said=said)])
    assert [isinstance(each, int) for each in found_in(sink_env)] == said


def test_a_batch_of_the_same_bytes_and_another_kind_is_another_batch(sink_env: SinkEnv) -> None:
    save_micro_batch(sink_env.stream(), 0, [mixed(b"1", b"2", said=[True, False])])
    save_micro_batch(sink_env.stream(), 0, [mixed(b"2", said=[None])], [mixed(b"1", said=[True])])
    for other in ([True, True], [False, False], [False, True]):
        with pytest.raises(BatchConflict):
            save_micro_batch(sink_env.stream(), 0, [mixed(b"1", b"2", said=other)])
    assert found_in(sink_env) == [1, b"2"]


def test_batch_is_the_same_from_every_caller() -> None:
    """So a query may go over from the option to the column, and what it wrote before is known again."""

    def total(batch: pa.RecordBatch, *, json: bool = False) -> row_encoder.Fingerprint:
        (made,) = row_encoder.encode_rows(batch, "copy", json=json)
        return made.fingerprint

    assert total(mixed(b"1", b"2", said=[None, False])) == total(batch_of(b"1", b"2"))
    assert total(mixed(b"1", b"2", said=[True, True])) == total(batch_of(b"1", b"2"), json=True)
    assert total(batch_of(b"1", b"2")) != total(batch_of(b"1", b"2"), json=True)


def test_text_that_is_no_json_is_refused_as_a_whole(sink_env: SinkEnv) -> None:
    with pytest.raises(BadInput, match="a record is not JSON"):
        save(sink_env.options(), [mixed(b"{", b"1", said=[False, True])], [mixed(b"{", said=[True])])
    assert sink_env.with_topic(lambda topic: topic.head_seq) == 0
    assert found_in(sink_env) == []


@pytest.mark.parametrize(
    ("column", "kind", "options", "words"),
    [
        (pa.bool_(), pa.binary(), {"payload": "json"}, "leave the option out, or drop the column"),
        (pa.bool_(), pa.struct([("a", pa.int32())]), {}, "data as struct, which is always written as JSON"),
        (pa.string(), pa.binary(), {}, "has is_json as string, it must be boolean"),
    ],
)
def test_what_says_it_twice_or_wrongly_is_refused(
    tmp_path: Path, column: pa.DataType, kind: pa.DataType, options: dict[str, str], words: str
) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        writer(
            {"path": str(tmp_path / "data"), "topic": "copy", **options}, pa.schema({"data": kind, "is_json": column})
        )
    assert "nothing was written" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_copy_is_what_it_was_copied_from(env: SourceEnv, tmp_path: Path) -> None:
    fill(env)
    topic = env.engine.topic("orders")
    copied = read(env.options(columns="tag,data,is_json", minPartitions=3))
    path = str(tmp_path / "copy")
    save({"path": path, "topic": "orders"}, copied.table.to_batches())
    given = [record.data for record in topic.read(0, 10_000).records]
    with tidelog.open(path, read_only=True) as log:
        assert [record.data for record in log.topic("orders", create=False).read(0, 10_000).records] == given
