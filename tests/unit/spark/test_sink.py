"""The sink by path and by server: one range a batch, each batch once, and nothing left behind (P4)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.spark.helpers import MODES, Mode, run_server, source
from tests.unit.spark.sink_helpers import batch_of, run_tasks, save, save_micro_batch, stream_writer, writer

import tidelog
from tidelog import database, engine
from tidelog.addresses import Location
from tidelog.disk.posix import PosixDisk
from tidelog.engine import Topic, producer_batches
from tidelog.engine.producer_batches import STAGED_CHUNK_TTL_MS, StagingArea, chunk_name
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, BatchConflict, Error, InDoubt, Locked, TopicFull, Unavailable, WriteFailed
from tidelog.spark import row_encoder, sink, sink_backends
from tidelog.spark import row_encoder as rows
from tidelog.spark.sink import SinkWriter, StagedTask, WriteOptions


class SinkEnv:
    """Where a sink writes, and how a test looks at it."""

    def __init__(self, mode: Mode, path: Path, engine: Any, address: str) -> None:
        self.mode, self.path, self._engine, self._address = mode, path, engine, address

    def options(self, **more: Any) -> dict[str, str]:
        where = {"path": str(self.path)} if self.mode == "path" else {"server": self._address}
        return {**where, "topic": "copy", **{name: str(value) for name, value in more.items()}}

    def stream(self, **more: Any) -> dict[str, str]:
        return self.options(query="etl", **more)

    @contextmanager
    def log(self) -> Iterator[Any]:
        if self.mode == "server":
            yield self._engine
        else:
            with tidelog.open(str(self.path), threads=False) as log:
                yield log

    def with_topic(self, what: Callable[[Topic], Any], topic: str = "copy") -> Any:
        with self.log() as log:
            return what(log.topic(topic))

    def topic_data(self, topic: str = "copy") -> list[bytes]:
        found: list[bytes] = self.with_topic(lambda made: made.to_arrow().column("data").to_pylist(), topic)
        return found

    def staged(self) -> list[str]:
        place = self.path / "staging"
        return sorted(path.name for path in place.iterdir()) if place.exists() else []


@contextmanager
def open_sink_env(mode: Mode, folder: Path) -> Iterator[SinkEnv]:
    if mode == "path":
        yield SinkEnv(mode, folder / "data", None, "")
    else:
        with run_server(str(folder / "data")) as (engine, address):
            yield SinkEnv(mode, folder / "data", engine, address)


@pytest.fixture(params=MODES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkEnv]:
    with open_sink_env(request.param, tmp_path) as opened:
        yield opened


def test_a_batch_is_one_range_of_all_tasks(env: SinkEnv) -> None:
    save(env.options(), [batch_of(b"a", b"b"), batch_of(b"c")], [batch_of()], [batch_of(b"d")])
    assert env.topic_data() == [b"a", b"b", b"c", b"d"]
    save(env.options(), [batch_of(b"a")])
    assert env.topic_data() == [b"a", b"b", b"c", b"d", b"a"], "a batch that is run twice is two"
    assert env.staged() == []


def test_a_batch_without_rows_writes_nothing(env: SinkEnv) -> None:
    save(env.options(), [batch_of()], [batch_of()])
    save_micro_batch(env.stream(), 0, [batch_of()])
    with env.log() as log:
        assert log.find("copy") is None
    save_micro_batch(env.stream(), 1, [batch_of(b"a")])
    save_micro_batch(env.stream(), 2, [batch_of()])
    assert env.topic_data() == [b"a"]


def test_task_returns_what_it_staged(tmp_path: Path) -> None:
    place = sink_backends.DirectorySinkBackend(str(tmp_path / "data"))
    place.prepare()
    options = WriteOptions(Location(str(tmp_path / "data")), "copy", None, None, False)
    parts = [batch_of(b"a", b"bb"), batch_of(b"ccc")]
    told = sink.TaskStaging(place, "ab" * 8, options).run(iter(parts))
    made = [records for part in parts for _, records, _ in rows.encode_rows(part, "copy", json=False)]
    assert (told.rows, told.size) == (3, sum(records.nbytes for records in made))
    ((topic, chunk),) = told.chunks
    content = (tmp_path / "data" / "staging" / chunk.name).read_bytes()
    assert (topic, chunk.rows, chunk.size) == ("copy", 3, len(content))
    assert content.endswith(b"\xff\xff\xff\xff\0\0\0\0"), "a whole Arrow stream says where it ends"


def test_a_repeated_batch_is_where_it_was_whatever_tasks_its_rows_come_in(env: SinkEnv) -> None:
    save_micro_batch(env.stream(), 0, [batch_of(b"a", b"b")], [batch_of(b"c")])
    save_micro_batch(env.stream(), 1, [batch_of(b"d")])
    save_micro_batch(env.stream(), 1, [batch_of(b"d")])
    save_micro_batch(env.stream(), 0, [batch_of(b"c")], [], [batch_of(b"b"), batch_of(b"a")])
    assert env.topic_data() == [b"a", b"b", b"c", b"d"]
    save_micro_batch(env.stream(), 2, [batch_of(b"e")])
    assert env.topic_data() == [b"a", b"b", b"c", b"d", b"e"]
    assert env.staged() == []


def test_a_restart_in_between_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with run_server(str(tmp_path / "data")) as (engine, address):
            options = {"server": address, "topic": "copy", "query": "etl"}
            save_micro_batch(options, 0, [batch_of(b"a")])
            assert engine.topic("copy").head_seq == 1


@pytest.mark.parametrize(
    ("number", "rows"),
    [(3, [b"a", b"c"]), (3, [b"a"]), (3, [b"a", b"b", b"b"]), (2, [b"a", b"b"]), (0, [b"x"])],
)
def test_other_content_and_a_batch_id_that_fell_are_loud(env: SinkEnv, number: int, rows: list[bytes]) -> None:
    save_micro_batch(env.stream(), 3, [batch_of(b"a", b"b")])
    with pytest.raises(BatchConflict) as caught:
        save_micro_batch(env.stream(), number, [batch_of(*rows)])
    for way in ("restore the checkpoint", "under another name (option query)", "drop the topic"):
        assert way in str(caught.value)
    assert env.topic_data() == [b"a", b"b"]
    save_micro_batch(env.options(query="another"), number, [batch_of(*rows)])
    assert env.topic_data() == [b"a", b"b", *rows]


@pytest.fixture
def set_query_id(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the query id that tasks find."""

    def set_to(query_id: str) -> None:
        monkeypatch.setattr(sink, "current_query_id", lambda: query_id)

    return set_to


def test_replay_keeps_what_is_there_where_the_source_has_changed(
    env: SinkEnv, set_query_id: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The newest batch is repeated without a record that was deleted meanwhile. It was a conflict for good."""
    set_query_id("one")
    save_micro_batch(env.stream(), 0, [batch_of(b"a")])
    save_micro_batch(env.stream(), 1, [batch_of(b"b", b"c")])
    for again in ([batch_of(b"b")], [batch_of(b"b", b"x")], [batch_of()]):
        save_micro_batch(env.stream(), 1, again)
    assert env.topic_data() == [b"a", b"b", b"c"]
    assert "was written before with 2 records, seqs 2 to 3, and is repeated with 1" in caplog.text
    save_micro_batch(env.stream(), 2, [batch_of(b"d")])
    assert env.topic_data() == [b"a", b"b", b"c", b"d"]
    assert env.staged() == []


def test_another_query_id_is_a_reset_and_every_way_out_helps(env: SinkEnv, set_query_id: Callable[[str], None]) -> None:
    set_query_id("one")
    save_micro_batch(env.stream(), 0, [batch_of(b"a")])
    set_query_id("two")
    for number, given in ((0, batch_of(b"a")), (0, batch_of(b"x")), (1, batch_of(b"b"))):
        with pytest.raises(BatchConflict, match="checkpoint was deleted or replaced"):
            save_micro_batch(env.stream(), number, [given])
    assert env.topic_data() == [b"a"]
    set_query_id("one")  # the checkpoint is back
    save_micro_batch(env.stream(), 1, [batch_of(b"b")])
    set_query_id("two")
    save_micro_batch(env.options(query="other"), 0, [batch_of(b"c")])
    assert env.topic_data() == [b"a", b"b", b"c"]
    with env.log() as log:
        log.drop("copy")
    save_micro_batch(env.stream(), 0, [batch_of(b"d")])
    assert env.topic_data() == [b"d"]


def test_a_reset_is_refused_for_all_topics_before_one_is_written(
    env: SinkEnv, set_query_id: Callable[[str], None]
) -> None:
    def both(number: int, *topics: str) -> None:
        rows = batch_of(*(name.encode() for name in topics), topic=pa.array(topics))
        save_micro_batch(_without_topic(env), number, [rows])

    set_query_id("one")
    both(0, "one", "two")
    set_query_id("two")
    with pytest.raises(BatchConflict):
        both(1, "new", "two")
    with env.log() as log:
        assert log.find("new") is None
    assert (env.topic_data("one"), env.topic_data("two")) == ([b"one"], [b"two"])


def _without_topic(env: SinkEnv) -> dict[str, str]:
    return {name: value for name, value in env.stream().items() if name != "topic"}


@pytest.mark.parametrize("place", [{}, {"checkpointLocation": "check/point"}, {"checkpointLocation": "./c"}])
def test_two_jobs_with_the_same_relative_checkpoint_are_two_writers(
    env: SinkEnv, set_query_id: Callable[[str], None], place: dict[str, str]
) -> None:
    """They were one: the second job's first batch counted as a repetition of the first one's."""
    for query_id in ("one", "two"):
        set_query_id(query_id)
        for _ in range(2):
            save_micro_batch(env.options(**place), 0, [batch_of(b"same")])
    assert env.topic_data() == [b"same", b"same"]
    set_query_id("one")
    save_micro_batch(env.options(**place), 1, [batch_of(b"more")])
    assert env.topic_data() == [b"same", b"same", b"more"]
    assert env.staged() == []
    made = stream_writer(env.options(**place), batch_of().schema)
    left = run_tasks(made, [[batch_of(b"a")]])
    made.abort([None], 2)
    assert len(env.staged()) == 1, "no task told whose it is: the next batch sweeps it"
    made.abort(left, 2)
    assert env.staged() == []
    made.commit([None], 2)


def test_only_the_attempt_that_is_committed_counts(env: SinkEnv) -> None:
    made = stream_writer(env.stream(), batch_of().schema)
    run_tasks(made, [[batch_of(b"lost")], [batch_of(b"ran twice")]])
    kept = run_tasks(made, [[batch_of(b"ran twice")]])
    assert len(env.staged()) == 3
    made.commit([*kept, None], 0)
    assert env.topic_data() == [b"ran twice"]
    assert env.staged() == [], "what nobody told of is swept"


def test_an_abort_clears_and_the_next_run_goes_on(env: SinkEnv) -> None:
    made = stream_writer(env.stream(), batch_of().schema)
    made.abort(run_tasks(made, [[batch_of(b"a")], [batch_of(b"b")]]), 0)
    batch = writer(env.options(), batch_of().schema)
    batch.abort([*run_tasks(batch, [[batch_of(b"c")]]), None])
    assert env.staged() == []
    save_micro_batch(env.stream(), 0, [batch_of(b"a")])
    assert env.topic_data() == [b"a"]


def test_what_a_killed_driver_left_goes_with_the_next_batch(env: SinkEnv) -> None:
    run_tasks(stream_writer(env.stream(), batch_of().schema), [[batch_of(b"a")]])
    assert len(env.staged()) == 1
    save_micro_batch(env.stream(), 0, [batch_of(b"a")])
    assert (env.staged(), env.topic_data()) == ([], [b"a"])


def test_abandoned_staging_is_removed_eventually(tmp_path: Path) -> None:
    staging = StagingArea(PosixDisk(), str(tmp_path))
    staging.create()
    for name in (chunk_name("ab" * 8, 1000, b"\0" * 8), chunk_name("ab" * 8, 2000, b"\1" * 8)):
        upload = staging.begin(name)
        upload.write([b"x"])
        upload.finish()
    staging.begin(chunk_name("ab" * 8, 1500, b"\2" * 8))  # never finished
    (tmp_path / "staging" / "somebody.else").write_bytes(b"")
    assert staging.sweep(1500 + STAGED_CHUNK_TTL_MS) == 1
    assert staging.sweep(2001 + STAGED_CHUNK_TTL_MS) == 2
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["somebody.else"]


def test_every_column_arrives(env: SinkEnv) -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    given = batch_of(
        b"1",
        b"2",
        b"3",
        tag=pa.array(["t", None, "u"]),
        node=pa.array([None, "n", "n"]),
        meta=pa.array([[("k", 'a"\\\n'), ("z", None)], None, [("ts", "mine")]], pa.map_(pa.string(), pa.string())),
        ts=pa.array([moment, moment, moment], pa.timestamp("us", "UTC")),
        seq=pa.array([7, 8, 9]),
    )
    save(env.options(), [given])
    first, second, third = env.with_topic(lambda topic: topic.read(0).records)
    when = "2026-01-31T12:00:00.250000Z"
    assert (first.data, first.tag, first.node, first.meta) == (b"1", "t", None, {"ts": when, "k": 'a"\\\n', "z": None})
    assert (second.data, second.tag, second.node, second.meta) == (b"2", None, "n", {"ts": when})
    assert (third.seq, third.meta) == (3, {"ts": "mine"})


def test_text_and_structs(env: SinkEnv) -> None:
    save(env.options(), [pa.RecordBatch.from_pydict({"data": pa.array(["plain"])})])
    save(env.options(payload="json"), [pa.RecordBatch.from_pydict({"data": pa.array(['{"a": 1}'])})])
    struct = pa.array(
        [{"a": 1, "m": [("k", "v")]}], pa.struct([("a", pa.int32()), ("m", pa.map_(pa.string(), pa.string()))])
    )
    save(env.options(), [pa.RecordBatch.from_pydict({"data": struct})])
    found = [record.data for record in env.with_topic(lambda topic: topic.read(0).records)]
    assert found == [b"plain", {"a": 1}, {"a": 1, "m": {"k": "v"}}]
    with pytest.raises(BadInput, match="not JSON"):
        save(env.options(payload="json"), [pa.RecordBatch.from_pydict({"data": pa.array(["{"])})])
    assert env.with_topic(lambda topic: topic.head_seq) == 3


def test_rows_go_where_their_topic_says_and_an_option_says_it_for_all(env: SinkEnv) -> None:
    options = env.stream()
    del options["topic"]
    given = batch_of(b"1", b"2", b"3", topic=pa.array(["x", "y", "x"]))
    for _ in range(2):
        save_micro_batch(options, 0, [given], [batch_of(b"4", topic=pa.array(["y"]))])
    assert (env.topic_data("x"), env.topic_data("y")) == ([b"1", b"3"], [b"2", b"4"])
    save(env.options(), [given])
    assert env.topic_data("copy") == [b"1", b"2", b"3"]


def test_a_batch_that_was_cut_off_between_two_topics_is_finished(env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    options = env.stream()
    del options["topic"]
    given = batch_of(b"1", b"2", topic=pa.array(["x", "y"]))
    with monkeypatch.context() as patch:
        kind = sink_backends.DirectorySinkBackend if env.mode == "path" else sink_backends.ServerSinkBackend
        real = kind.publish
        patch.setattr(kind, "publish", lambda self, batch, chunks: real(self, batch, {"x": chunks["x"]}) and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_micro_batch(options, 5, [given])
    save_micro_batch(options, 5, [given])
    assert (env.topic_data("x"), env.topic_data("y")) == ([b"1"], [b"2"])
    with pytest.raises(BatchConflict):
        save_micro_batch(options, 5, [batch_of(b"1", b"2", b"3", topic=pa.array(["x", "y", "a"]))])
    with env.log() as log:
        assert log.find("a") is None, "what is refused for one topic is for all, also for the first"


def test_a_batch_of_many_chunks_is_one_range(env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "STAGED_CHUNK_BYTES", 100_000)
    monkeypatch.setattr(rows, "STAGED_BATCH_BYTES_MAX", 30_000)
    values = [bytes([number % 256]) * 1000 for number in range(600)]
    save_micro_batch(env.stream(), 0, [batch_of(*values[:400])], [batch_of(*values[400:])])
    assert env.topic_data() == values
    assert env.with_topic(lambda topic: topic.producer_batches("etl")[0])[:2] == (1, 600)


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"server": "http://127.0.0.1:1"}, "path and server: both are given"),
        ({"key": "k"}, "it is for a server, and path is given"),
        ({"path": "s3://bucket/data"}, "s3: is not supported here; nothing was written"),
        ({"path": "s3:bucket/data"}, "s3: is not supported here; nothing was written"),
        ({"path": "http://host/data"}, "a server is named by the option server; nothing was written"),
        ({"path": "file://host/data"}, "a file address has the form"),
        ({"path": "~/data"}, "~ is replaced by a shell"),
        ({"path": "C:/data"}, "a path of Windows"),
        ({"topic": "-x"}, "-x"),
        ({"payload": "xml"}, "option payload is 'xml', it must be bytes or json"),
        ({"query": ""}, "option query is ''"),
        ({"query": "once:x"}, "does not begin with once:"),
        ({"batch": "-1"}, "option batch is '-1'"),
        ({"batch": "1"}, "a batch that may be repeated has both"),
        ({"query": "x"}, "a batch that may be repeated has both"),
        ({"topik": "x"}, "there is no option 'topik'; nothing was written, did you mean topic"),
    ],
)
def test_options_of_a_batch(tmp_path: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        writer({"path": str(tmp_path / "data"), "topic": "copy", **options}, batch_of().schema)
    assert not (tmp_path / "data").exists()


def test_options_of_a_stream(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "data"), "topic": "copy"}
    for unnamed in ({}, {"checkpointLocation": "check/point"}):
        with pytest.raises(BadInput, match="Spark names no query id here"):
            save_micro_batch({**options, **unnamed}, 0, [batch_of(b"a")])
    with pytest.raises(BadInput, match="Spark numbers the batches of a stream"):
        stream_writer({**options, "query": "x", "batch": "1"}, batch_of().schema)
    save_micro_batch({**options, "checkpointLocation": "/check/point/"}, 0, [batch_of(b"a")])
    save_micro_batch({**options, "checkpointLocation": "/check/point"}, 0, [batch_of(b"a")])
    save_micro_batch({**options, "checkpointLocation": "/check/point", "queryName": "other"}, 0, [batch_of(b"a")])
    with tidelog.open(str(tmp_path / "data")) as log:
        assert log.topic("copy").head_seq == 2
    with pytest.raises(BadInput, match="neither is given"):
        stream_writer({"topic": "copy", "query": "x"}, batch_of().schema)
    for made in (source(options).writer, source({**options, "query": "x"}).streamWriter):
        with pytest.raises(BadInput, match="only appended to"):
            made(None, True)  # type: ignore[arg-type]


TEXT, BYTES = pa.string(), pa.binary()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"value": BYTES}, "has the columns value and no data"),
        ({"data": pa.int64()}, "has data as bigint, it must be binary, string or struct"),
        ({"data": BYTES, "price": pa.float64()}, "has a column 'price', which no record has"),
        ({"data": BYTES, "tag": pa.int32()}, "has tag as int, it must be string"),
        ({"data": BYTES, "meta": TEXT}, "has meta as string, it must be map<string,string>"),
        (
            {"data": BYTES, "meta": pa.map_(TEXT, pa.int32())},
            "has meta as map<string,int>, it must be map<string,string>",
        ),
        ({"data": BYTES, "ts": TEXT}, "has ts as string, it must be timestamp"),
        ({"data": BYTES, "ts": pa.timestamp("us")}, "has ts as timestamp_ntz, it must be timestamp"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, columns: dict[str, pa.DataType], words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        writer({"path": str(tmp_path / "data"), "topic": "copy"}, pa.schema(list(columns.items())))


def test_a_topic_is_named_somewhere(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no topic is named and there is no column topic"):
        writer({"path": str(tmp_path / "data")}, batch_of().schema)


def test_rows_that_are_no_records(env: SinkEnv) -> None:
    options = env.options()
    del options["topic"]
    for batch, words in (
        (pa.RecordBatch.from_pydict({"data": pa.array([b"a", None]), "topic": pa.array(["x", "x"])}), "data has nulls"),
        (batch_of(b"a", topic=pa.array([None], TEXT)), "topic has nulls"),
        (batch_of(b"a", topic=pa.array(["no such name!"])), "no such name!"),
    ):
        with pytest.raises(BadInput, match=words):
            save(options, [batch])
    with pytest.raises(Error, match=r"the limit is|limit of"):
        save(env.options(), [batch_of(b"fine", bytes(1 << 21))])
    with env.log() as log:
        assert log.names() == []


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(BadInput, match="it belongs to another program"):
        writer({"path": str(tmp_path), "topic": "copy"}, batch_of().schema)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit takes 1,000 bytes, a part 600; tasks stage chunks of about 200."""
    monkeypatch.setattr(producer_batches, "SINGLE_COMMIT_BYTES_MAX", 1_000)
    monkeypatch.setattr(producer_batches, "PART_BYTES_MAX", 600)
    monkeypatch.setattr(sink, "STAGED_CHUNK_BYTES", 200)


def parts_of(env: SinkEnv, writer: str = "etl") -> list[int]:
    """How many chunks each part ended with."""
    found = env.with_topic(lambda topic: topic.producer_batches(producer_batches.parts_writer(writer)))
    return [number & 0xFFFFF for number in found]


def rows_from(first: int, count: int) -> list[bytes]:
    return [b"%06d" % number + bytes(90) for number in range(first, first + count)]


def in_tasks(rows: list[bytes], *cuts: int) -> list[list[pa.RecordBatch]]:
    """Rows as tasks have them, a row a record batch."""
    bounds = [0, *cuts, len(rows)]
    return [[batch_of(row) for row in rows[low:high]] for low, high in pairwise(bounds)]


@pytest.mark.usefixtures("small_limits")
def test_a_batch_of_more_than_a_commit_takes_is_published_in_parts(env: SinkEnv) -> None:
    one, two = rows_from(0, 9), rows_from(100, 40)
    save_micro_batch(env.stream(), 0, *in_tasks(one))
    assert parts_of(env) == [], "it fits"
    save_micro_batch(env.stream(), 1, *in_tasks(two, 13, 30))
    assert env.topic_data() == one + two, "in the order of the tasks"
    assert len(parts_of(env)) >= 4
    assert env.staged() == []
    save_micro_batch(env.stream(), 1, *in_tasks(two[::-1], 7))
    save_micro_batch(env.stream(), 2, *in_tasks(one))
    assert env.topic_data() == one + two + one, "a repetition is known"
    save(env.options(), *in_tasks(two, 20))
    assert env.topic_data() == one + two + one + two
    assert env.staged() == []


@pytest.mark.usefixtures("small_limits")
def test_parts_do_not_gather_in_memory(env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is in segments before the next one is read: measured, 0.7 GB of memory for a batch of 2 GB."""
    made = engine.Engine.checkpoint
    heads: list[int] = []

    def counted(self: engine.Engine, *args: Any, **more: Any) -> Any:
        heads.append(topic.head_seq if (topic := self.find("copy")) is not None else 0)
        return made(self, *args, **more)

    monkeypatch.setattr(engine.Engine, "checkpoint", counted)
    save_micro_batch(env.stream(), 0, *in_tasks(rows_from(0, 40)))
    monkeypatch.undo()
    assert len({head for head in heads if head < 40}) == len(parts_of(env)) > 4


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("again", ["same", "other order", "other tasks"])
def test_a_batch_that_broke_off_between_two_parts_is_finished(
    env: SinkEnv, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Ended before or after each of its commits, with the records of others between, and repeated: once, all of it."""
    rows = rows_from(0, 30)
    expected, at, append = Counter[bytes](), 0, producer_batches.append_producer_batch
    for after in (False, True):
        for last in range(1, 7):
            at += 1
            calls = 0

            def dying(topic: TopicState, *args: Any, last: int = last, after: bool = after, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == last and not after:
                    raise WriteFailed("the process ends here")
                done = append(topic, *args, **more)
                if calls == last:
                    raise WriteFailed("the process ends here")
                return done

            mine = [b"%d " % at + row for row in rows]
            with monkeypatch.context() as patch:
                patch.setattr(producer_batches, "append_producer_batch", dying)
                with pytest.raises(Error):
                    save_micro_batch(env.stream(), at, *in_tasks(mine, 11))
            env.with_topic(lambda topic: topic.append([b"other"]))
            tasks = {
                "same": in_tasks(mine, 11),
                "other order": in_tasks(mine[::-1], 11),
                "other tasks": in_tasks(mine, 3, 4, 25),
            }
            save_micro_batch(env.stream(), at, *tasks[again])
            expected.update([*mine, b"other"])
            assert Counter(env.topic_data()) == expected, (after, last)
            assert env.staged() == [], (after, last)


@pytest.mark.usefixtures("small_limits")
def test_what_is_half_published_is_finished_before_anything_else(env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, later = rows_from(0, 30), rows_from(100, 30)
    append, calls = producer_batches.append_producer_batch, 0

    def dying(topic: TopicState, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise WriteFailed("the process ends here")
        return append(topic, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(producer_batches, "append_producer_batch", dying)
        with pytest.raises(Error, match=r"of \d+ chunks of batch 4 were published in copy; repeat the batch"):
            save_micro_batch(env.stream(), 4, *in_tasks(rows))
    before = env.topic_data()
    assert 0 < len(before) < len(rows)
    stream_writer(env.stream(), batch_of().schema).abort([], 4)  # as Spark does then
    StagingArea(PosixDisk(), str(env.path)).sweep(1 << 47)
    assert len(env.staged()) > 1, "what is needed to finish it is kept, however long that takes"
    with pytest.raises(BatchConflict, match=r"of batch 4 a part is, in seqs 1 to .*repeat that batch first"):
        save_micro_batch(env.stream(), 5, *in_tasks(later))
    with pytest.raises(BatchConflict, match="with other records"):
        save_micro_batch(env.stream(), 4, *in_tasks(later))
    assert env.topic_data() == before
    save_micro_batch(env.stream(), 4, *in_tasks(rows))
    save_micro_batch(env.stream(), 5, *in_tasks(later))
    assert env.topic_data() == rows + later
    assert env.staged() == []


@pytest.mark.usefixtures("small_limits")
def test_unrepeatable_half_of_a_save_is_removed(env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    append, calls = producer_batches.append_producer_batch, 0

    def dying(topic: TopicState, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise WriteFailed("the process ends here")
        return append(topic, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(producer_batches, "append_producer_batch", dying)
        with pytest.raises(Error, match=r"of \d+ chunks of batch 0 were published in copy"):
            save(env.options(), *in_tasks(rows_from(0, 30)))
    assert 0 < len(env.topic_data()) < 30, "readers see the parts as they come"
    StagingArea(PosixDisk(), str(env.path)).sweep(1 << 47)
    assert env.staged() == []


@pytest.mark.usefixtures("small_limits")
def test_a_half_published_batch_whose_chunks_are_gone_is_loud(env: SinkEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_from(0, 30)
    append, calls = producer_batches.append_producer_batch, 0

    def dying(topic: TopicState, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise WriteFailed("the process ends here")
        return append(topic, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(producer_batches, "append_producer_batch", dying)
        with pytest.raises(Error):
            save_micro_batch(env.stream(), 4, *in_tasks(rows))
    for path in (env.path / "staging").iterdir():
        path.unlink()
    before = env.topic_data()
    with pytest.raises(BatchConflict, match="is no longer in the staging area"):
        save_micro_batch(env.stream(), 4, *in_tasks(rows))
    assert env.topic_data() == before


def test_full_topic_refuses_the_batch_and_takes_it_when_there_is_space(env: SinkEnv) -> None:
    with env.log() as log:
        log.topic("copy", cap_records=3, discard="reject")
    save_micro_batch(env.stream(), 0, [batch_of(b"a", b"b")])
    kinds = (TopicFull, BadInput)  # by server it is the server's own words
    with pytest.raises(kinds, match="is full"):
        save_micro_batch(env.stream(), 1, [batch_of(b"c", b"d")])
    assert env.topic_data() == [b"a", b"b"]
    env.with_topic(lambda topic: topic.delete(before_seq=2))
    save_micro_batch(env.stream(), 1, [batch_of(b"c", b"d")])
    assert env.topic_data() == [b"b", b"c", b"d"]


def test_an_executor_that_cannot_see_the_path(tmp_path: Path) -> None:
    made = stream_writer({"path": str(tmp_path / "data"), "topic": "copy", "query": "x"}, batch_of().schema)
    (tmp_path / "data" / "staging").rmdir()
    with pytest.raises(Unavailable, match="This is an executor"):
        run_tasks(made, [[batch_of(b"a")]])


def test_chunks_that_the_driver_cannot_see(tmp_path: Path) -> None:
    made = stream_writer({"path": str(tmp_path / "data"), "topic": "copy", "query": "x"}, batch_of().schema)
    messages = run_tasks(made, [[batch_of(b"a")]])
    for path in (tmp_path / "data" / "staging").iterdir():
        path.unlink()
    with pytest.raises(Error, match="uses another directory, or it was removed"):
        made.commit(messages, 0)
    with tidelog.open(str(tmp_path / "data")) as log:
        assert log.names() == []


def test_a_chunk_that_changed_is_not_published(tmp_path: Path) -> None:
    made = stream_writer({"path": str(tmp_path / "data"), "topic": "copy", "query": "x"}, batch_of().schema)
    messages = run_tasks(made, [[batch_of(b"a" * 100)]])
    for path in (tmp_path / "data" / "staging").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(Error, match="not what its writer wrote"):
        made.commit(messages, 0)


def test_another_writer_has_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_backends, "WRITE_LOCK_WAIT_MS", 0)
    monkeypatch.setattr(sink_backends.open_when_unlocked, "__defaults__", (0,))
    options = {"path": str(tmp_path / "data"), "topic": "copy", "query": "x"}
    made = stream_writer(options, batch_of().schema)
    messages = run_tasks(made, [[batch_of(b"a")]])
    with tidelog.open(str(tmp_path / "data")) as log:
        with pytest.raises(Locked, match=r"name it \(option server\)"):
            made.commit(messages, 0)
        assert log.names() == []
    made.commit(messages, 0)
    with tidelog.open(str(tmp_path / "data")) as log:
        assert log.topic("copy").head_seq == 1


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    with run_server(str(tmp_path / "data")) as (_, address):
        options = {"server": address, "topic": "copy", "query": "etl", "retryTimeout": "0s"}
        made = stream_writer(options, batch_of().schema)
        messages = run_tasks(made, [[batch_of(b"a")]])
    with pytest.raises(InDoubt, match="what is there is not written twice"):
        made.commit(messages, 0)
    with pytest.raises(Unavailable, match="cannot be reached"):
        run_tasks(made, [[batch_of(b"b")]])
    made.abort(messages, 0)  # says so in the log, and does not hide why the batch failed
    with run_server(str(tmp_path / "data")) as (engine, address):
        save_micro_batch({**options, "server": address}, 0, [batch_of(b"a")])
        assert [record.data for record in engine.topic("copy").read(0).records] == [b"a"]


def test_a_save_to_a_wrong_address_fails_before_a_task_waits_for_it() -> None:
    options = {"server": "http://127.0.0.1:9", "topic": "copy"}
    with pytest.raises(Unavailable, match="cannot be reached"):
        writer(options, batch_of().schema)
    made = writer({**options, "query": "etl", "batch": "1", "retryTimeout": "0s"}, batch_of().schema)
    with pytest.raises(Unavailable, match="cannot be reached"):
        run_tasks(made, [[batch_of(b"a")]])


def test_a_key_that_may_not_write(tmp_path: Path) -> None:
    with (
        run_server(str(tmp_path / "data"), keys="r:read") as (_, address),
        pytest.raises(BadInput, match=r"option key: .* 403, .*nothing was written, give a key that may"),
    ):
        save({"server": address, "key": "r", "topic": "copy"}, [batch_of(b"a")])


def test_what_travels_is_small(tmp_path: Path) -> None:
    made = stream_writer({"path": str(tmp_path / "data"), "topic": "copy", "query": "x"}, batch_of().schema)
    (message,) = run_tasks(made, [[batch_of(*[bytes(1000)] * 1000)]])
    assert isinstance(message, StagedTask)
    assert (message.rows, len(message.chunks)) == (1000, 1)
    assert isinstance(made._sink, SinkWriter)


def test_queries_take_turns_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Locked("held"), Locked("held")]
    real = database.open

    def opened(*given: Any, **more: Any) -> Any:
        if held:
            raise held.pop()
        return real(*given, **more)

    monkeypatch.setattr(database, "open", opened)
    save_micro_batch({"path": str(tmp_path / "data"), "topic": "copy", "query": "x"}, 0, [batch_of(b"a")])
    assert not held
    with tidelog.open(str(tmp_path / "data")) as log:
        assert log.topic("copy").head_seq == 1


def test_no_write_gets_into_the_range_of_a_batch(tmp_path: Path) -> None:
    """Others write, delete and checkpoint meanwhile."""
    over = Event()
    with run_server(str(tmp_path / "data")) as (engine, address):
        topic = engine.topic("copy")

        def others() -> None:
            while not over.is_set():
                head = topic.append([b"other"] * 3).last_seq
                topic.delete(seqs=[head])
                engine.checkpoint()

        thread = Thread(target=others)
        thread.start()
        try:
            for number in range(20):
                mine = [b"%d:%d" % (number, at) for at in range(50)]
                save_micro_batch(
                    {"server": address, "topic": "copy", "query": "x"},
                    number,
                    [batch_of(*mine[:20])],
                    [batch_of(*mine[20:])],
                )
        finally:
            over.set()
            thread.join(60)
        table = topic.to_arrow()
        held = dict(zip(table.column("seq").to_pylist(), table.column("data").to_pylist(), strict=True))
        for number, each in topic.producer_batches("x").items():
            assert [held[seq] for seq in range(each.first, each.last + 1)] == [
                b"%d:%d" % (number, at) for at in range(50)
            ]
        assert len(topic.producer_batches("x")) == 20


@pytest.mark.parametrize("cuts", [[1000], [1, 999], [500, 0, 250, 250], [10] * 100])
def test_the_sum_of_a_batch_does_not_know_of_tasks_or_order(cuts: list[int]) -> None:
    random = Random(repr(cuts))
    values = [random.randbytes(random.choice((0, 1, 8, 100, 3000))) for _ in range(1000)]
    tags = [random.choice(["x", "y", None]) for _ in values]

    def total(order: list[int], cuts: list[int]) -> tuple[int, int]:
        found, at = (0, 0), 0
        for cut in cuts:
            some = order[at : at + cut]
            batch = batch_of(*(values[each] for each in some), tag=pa.array([tags[each] for each in some], pa.string()))
            for made in rows.encode_rows(batch, "copy", json=False):
                found = row_encoder.add_fingerprints(found, made.fingerprint)
            at += cut
        return found

    straight, mixed = list(range(1000)), list(range(1000))
    random.shuffle(mixed)
    assert total(straight, [1000]) == total(mixed, cuts)
    before = total(mixed, cuts)
    values[7] += b"!"
    longer = total(mixed, cuts)
    assert longer != before
    tags[3] = "z"
    before = total(mixed, cuts)
    assert before != longer
    assert total(straight, [999]) != before, "a row less"
