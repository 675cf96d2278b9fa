"""The sink, decision by decision: options, columns, what a task stages, what a driver asks of its backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from tests.unit.spark.sink_helpers import batch_of
from xxhash import xxh3_64_intdigest

from tidelog.addresses import Location
from tidelog.engine import Appended
from tidelog.engine.idempotency import BatchRange
from tidelog.engine.producer_batches import StagedChunk, StagingArea
from tidelog.errors import BadInput, BatchConflict, Error, InDoubt, Locked, TopicNotFound, Unavailable
from tidelog.spark import sink, sink_backends
from tidelog.spark.row_encoder import encode_rows
from tidelog.spark.sink import (
    SinkWriter,
    StagedTask,
    TaskStaging,
    TopicStreamWriter,
    TopicWriter,
    WriteOptions,
    check_sink_schema,
    parse_sink_options,
)
from tidelog.spark.sink_backends import DirectorySinkBackend, ServerSinkBackend, SinkBatch, open_when_unlocked
from tidelog.testing import ManualClock, SimDisk

PATH = {"path": "/data"}
SERVER = {"server": "http://host:1"}


def options_of(**changed: Any) -> WriteOptions:
    fields: dict[str, Any] = {
        "location": Location("/data"), "topic": None, "writer": None, "batch": None, "is_json": False,
        "retry_ms": 120_000,
    }  # fmt: skip
    return WriteOptions(**{**fields, **changed})


# Options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        (PATH, {}),
        ({"PATH": " /data "}, {}),
        ({**PATH, "topic": "t"}, {"topic": "t"}),
        ({**PATH, "query": " q "}, {"writer": "q"}),
        ({**PATH, "query": "q", "queryName": "n", "checkpointLocation": "/c"}, {"writer": "q"}),
        ({**PATH, "queryName": "n", "checkpointLocation": "/c"}, {"writer": "n"}),
        ({**PATH, "checkpointLocation": "/c/d//"}, {"writer": "checkpoint:/c/d"}),
        ({**PATH, "checkpointLocation": "s3://b/c/"}, {"writer": "checkpoint:s3://b/c"}),
        ({**PATH, "checkpointLocation": "c/d"}, {}),
        ({**PATH, "batch": "0"}, {"batch": 0}),
        ({**PATH, "batch": "9" * 18}, {"batch": 10**18 - 1}),
        ({**PATH, "payload": "JSON"}, {"is_json": True}),
        ({**PATH, "payload": "Bytes"}, {"is_json": False}),
        (SERVER, {"location": Location("http://host:1")}),
        ({**SERVER, "key": " k "}, {"location": Location("http://host:1", "k")}),
        ({**SERVER, "retryTimeout": "2s"}, {"location": Location("http://host:1"), "retry_ms": 2_000}),
    ],
)
def test_options_are_parsed(given: dict[str, str], changed: dict[str, Any]) -> None:
    found = parse_sink_options(given)
    assert found == options_of(**changed)
    assert str(found.location) == given.get("server", "/data")
    assert "key" not in repr(found)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {**PATH, **SERVER},
        {**PATH, "key": "k"},
        {**PATH, "retryTimeout": "2s"},
        {"path": " "},
        {**PATH, "query": "checkpoint:x"},
        {**PATH, "queryName": "query:x"},
        {**PATH, "batch": "9" * 19},
        {**PATH, "batch": ""},
        {**PATH, "batch": "1.5"},
        {**PATH, "payload": ""},
        {**SERVER, "retryTimeout": "2"},
        {**PATH, "other": "x"},
    ],
)
def test_options_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="nothing was written"):
        parse_sink_options(given)


def test_the_value_of_an_option_is_shortened_in_a_message() -> None:
    with pytest.raises(BadInput) as caught:
        parse_sink_options({**PATH, "batch": "x" * 100})
    assert "'" + "x" * 80 + "'" in str(caught.value)


@pytest.mark.parametrize(
    ("writer", "batch", "fits"), [(None, None, True), ("q", 0, True), ("q", None, False), (None, 0, False)]
)
def test_a_batch_has_a_name_and_a_number_or_neither(writer: str | None, batch: int | None, fits: bool) -> None:
    options = options_of(writer=writer, batch=batch)
    if fits:
        assert options.for_batch() is options
    else:
        with pytest.raises(BadInput):
            options.for_batch()
    if batch is None:
        assert options.for_stream() is options
    else:
        with pytest.raises(BadInput):
            options.for_stream()


# Columns --------------------------------------------------------------------------------------------------


def schema_of(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


TEXTS = MapType(StringType(), StringType())


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"data": BinaryType()}, {"topic": "t"}, None),
        ({"data": StringType(), "topic": StringType()}, {}, None),
        ({"data": StructType()}, {"topic": "t"}, None),
        ({"data": BinaryType(), "tag": StringType(), "node": StringType(), "ts": TimestampType(), "meta": TEXTS,
          "is_json": BooleanType(), "seq": IntegerType()}, {"topic": "t"}, None),
        ({"data": BinaryType()}, {}, "no topic is named"),
        ({"data": IntegerType()}, {"topic": "t"}, "binary, string or struct"),
        ({"data": TEXTS}, {"topic": "t"}, "binary, string or struct"),
        ({"data": BinaryType(), "node": BinaryType()}, {"topic": "t"}, "must be string"),
        ({"data": BinaryType(), "topic": BinaryType()}, {"topic": "t"}, "must be string"),
        ({"data": BinaryType(), "ts": TimestampNTZType()}, {"topic": "t"}, "must be timestamp"),
        ({"data": BinaryType(), "meta": MapType(IntegerType(), StringType())}, {"topic": "t"}, "must be map"),
        ({"data": BinaryType(), "meta": MapType(StringType(), IntegerType())}, {"topic": "t"}, "must be map"),
        ({"data": BinaryType(), "meta": ArrayType(StringType())}, {"topic": "t"}, "must be map"),
        ({"data": BinaryType(), "is_json": StringType()}, {"topic": "t"}, "must be boolean"),
        ({"data": BinaryType(), "is_json": BooleanType()}, {"topic": "t", "is_json": True}, "option payload is 'json'"),
        ({"data": StructType(), "is_json": BooleanType()}, {"topic": "t"}, "data as struct"),
        ({"data": StructType()}, {"topic": "t", "is_json": True}, None),
        ({"tag": StringType()}, {"topic": "t"}, "and no data"),
        ({"data": BinaryType(), "more": StringType()}, {"topic": "t"}, "which no record has"),
    ],
)  # fmt: skip
def test_columns_of_a_writer(columns: dict[str, DataType], options: dict[str, Any], words: str | None) -> None:
    if words is None:
        check_sink_schema(schema_of(**columns), options_of(**options))
    else:
        with pytest.raises(BadInput, match=words):
            check_sink_schema(schema_of(**columns), options_of(**options))


def test_a_column_is_named_once() -> None:
    twice = StructType([StructField("data", BinaryType()), StructField("data", BinaryType())])
    with pytest.raises(BadInput, match="twice"):
        check_sink_schema(twice, options_of(topic="t"))


# The writer of a query ------------------------------------------------------------------------------------


class Backend:
    """Records what a driver asks for."""

    def __init__(self, log: list[Any], deduped: bool = False, error: Exception | None = None) -> None:
        self.log, self.deduped, self.error = log, deduped, error

    def prepare(self) -> None:
        self.log.append("prepare")

    def stage(self, topic: str, chunk: str, rows: int, content: Any) -> StagedChunk:
        self.log.append(("stage", topic, rows))
        return StagedChunk(chunk, rows, len(content), 0)

    def publish(self, batch: SinkBatch, chunks: Any) -> dict[str, Appended]:
        self.log.append(("publish", batch, {topic: [each.name for each in mine] for topic, mine in chunks.items()}))
        return {topic: Appended(1, 2, 9, self.deduped) for topic in chunks}

    def clear_staging(self, owner: str, topics: Any) -> None:
        self.log.append(("clear", owner, list(topics)))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(sink, "open_sink_backend", lambda _: Backend(found))
    return found


def writer_of(log: list[Any], name: str | None, **options: Any) -> SinkWriter:
    made = SinkWriter(options_of(**{"topic": "t", **options}), schema_of(data=BinaryType()), name)
    assert log == ["prepare", "close"]
    log.clear()
    return made


def message(*chunks: tuple[str, str, int], total: int = 0, query_id: str = "") -> StagedTask:
    staged = tuple((topic, StagedChunk(name, rows, 5, 0)) for topic, name, rows in chunks)
    return StagedTask(staged, sum(rows for _, _, rows in chunks), 0, (total, total), query_id)


def owner_of(writer: str) -> str:
    return sink._staging_owner(writer)


def test_a_driver_publishes_what_the_tasks_staged(log: list[Any]) -> None:
    messages = [
        message(("b", "c1", 1), ("a", "c2", 1), total=3),
        None,
        message(("b", "c3", 2), total=4, query_id="q"),
    ]
    writer_of(log, "etl").publish(messages, 7)
    assert log == [
        ("publish", SinkBatch("etl", 7, (7, 7), "q"), {"a": ["c2"], "b": ["c1", "c3"]}),
        ("clear", owner_of("etl"), ["a", "b", "t"]),
        "close",
    ]
    assert list(log[0][2]) == ["a", "b"]


def test_the_query_id_names_a_writer_without_another_name(log: list[Any]) -> None:
    made = writer_of(log, None)
    made.publish([message(("t", "c1", 1), total=1, query_id="q")], 0)
    assert log[0] == ("publish", SinkBatch("query:q", 0, (1, 1), "q"), {"t": ["c1"]})
    assert log[1:] == [("clear", owner_of("query:q"), ["t"]), "close"]


def test_a_batch_of_a_single_write_has_no_query_id(log: list[Any]) -> None:
    writer_of(log, "once:x").publish([message(("t", "c1", 1), query_id="q")], 0)
    assert log[0][1] == SinkBatch("once:x", 0, (0, 0), "")


@pytest.mark.parametrize(
    ("name", "messages", "steps"),
    [
        (None, [], []),
        (None, [message()], []),
        ("etl", [], [("clear", owner_of("etl"), ["t"]), "close"]),
        ("etl", [message()], [("clear", owner_of("etl"), ["t"]), "close"]),
        (None, [message(query_id="q")], [("clear", owner_of("query:q"), ["t"]), "close"]),
    ],
)
def test_a_batch_without_rows_publishes_nothing(log: list[Any], name: str | None, messages: Any, steps: Any) -> None:
    made = writer_of(log, name)
    made.publish(messages, 0)
    assert log == steps
    log.clear()
    made.abort(messages)
    assert log == steps


def test_chunks_of_a_query_without_a_name_are_refused(log: list[Any]) -> None:
    with pytest.raises(BadInput, match="names no query id"):
        writer_of(log, None).publish([message(("t", "c1", 1))], 0)
    assert log == []


def test_an_abort_clears_what_was_staged(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer_of(log, "etl")
    messages = [None, message(("b", "c1", 1)), message(("a", "c2", 1), query_id="q")]
    made.abort(messages)
    assert log == [("clear", owner_of("etl"), ["a", "b", "t"]), "close"]
    for error in (Unavailable("gone"), OSError("gone")):
        monkeypatch.setattr(sink, "open_sink_backend", lambda _, error=error: Backend([], error=error))
        made.abort(messages)
    monkeypatch.setattr(sink, "open_sink_backend", lambda _: Backend([], error=KeyError("a bug")))
    with pytest.raises(KeyError):
        made.abort(messages)


def test_topics_of_rows_are_cleared_without_an_option(log: list[Any]) -> None:
    made = SinkWriter(options_of(), schema_of(data=BinaryType(), topic=StringType()), "etl")
    log.clear()
    made.publish([message(("b", "c1", 1))], 0)
    assert log[-2] == ("clear", owner_of("etl"), ["b"])


@pytest.mark.parametrize(
    ("deduped", "rows", "warned"), [(True, 2, False), (True, 3, True), (True, 1, True), (False, 3, False)]
)
def test_a_changed_replay_is_logged(caplog: pytest.LogCaptureFixture, deduped: bool, rows: int, warned: bool) -> None:
    with caplog.at_level(logging.WARNING, "tidelog.spark"):
        sink._warn_changed_replay("etl", 0, "t", Appended(1, 2, 9, deduped), rows)
    assert bool(caplog.records) is warned


def test_a_driver_compares_the_rows_of_each_topic(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(sink, "_warn_changed_replay", lambda *arguments: compared.append(arguments))
    writer_of(log, "etl").publish([message(("b", "c1", 1), ("a", "c2", 4)), message(("b", "c3", 2))], 7)
    assert compared == [("etl", 7, "a", Appended(1, 2, 9), 4), ("etl", 7, "b", Appended(1, 2, 9), 3)]


def test_a_task_carries_its_query_id(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer_of(log, None)
    with pytest.raises(BadInput):
        made.stage(iter([batch_of(b"a")]))
    assert log == []
    context = SimpleNamespace(getLocalProperty={"sql.streaming.queryId": "q"}.get)
    monkeypatch.setattr(sink, "TaskContext", SimpleNamespace(get=lambda: context))
    staged = made.stage(iter([batch_of(b"a")]))
    assert (staged.query_id, staged.rows, len(staged.chunks)) == ("q", 1, 1)
    assert staged.chunks[0][1].name.startswith(owner_of("query:q") + "-")
    assert log == [("stage", "t", 1), "close"]
    assert StagedTask() == StagedTask((), 0, 0, (0, 0), "")


# Writers --------------------------------------------------------------------------------------------------


def test_a_save_has_a_name_of_its_own_or_the_given_one(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    schema = schema_of(data=BinaryType())
    first, second = (TopicWriter(options_of(topic="t"), schema) for _ in range(2))
    names = [str(each._sink._writer) for each in (first, second)]
    assert all(name.startswith("once:") and len(name) == 5 + 32 for name in names)
    assert names[0] != names[1]
    log.clear()
    TopicWriter(options_of(topic="t", writer="etl", batch=5), schema).commit([message(("t", "c", 1))])
    assert log[2][1] == SinkBatch("etl", 5, (0, 0), "")
    log.clear()
    first.commit([message(("t", "c", 1))])
    assert log[0][1] == SinkBatch(names[0], 0, (0, 0), "")
    log.clear()
    first.abort([message(("t", "c", 1))])
    assert log == [("clear", owner_of(names[0]), ["t"]), "close"]
    stream = TopicStreamWriter(options_of(topic="t", writer="etl"), schema)
    log.clear()
    stream.commit([message(("t", "c", 1))], 8)
    assert log[0][1] == SinkBatch("etl", 8, (0, 0), "")
    log.clear()
    stream.abort([message(("t", "c", 1))], 8)
    assert log == [("clear", owner_of("etl"), ["t"]), "close"]
    asked: list[Any] = []
    monkeypatch.setattr(sink, "check_reachable", lambda *arguments: asked.append(arguments))
    TopicWriter(options_of(topic="t", location=Location("http://h:1", "k")), schema)
    assert asked == [("http://h:1", "k")]
    TopicWriter(options_of(topic="t", location=Location("http://h:1"), writer="etl", batch=0), schema)
    assert len(asked) == 1, "one in foreachBatch waits, as a stream does"


# Tasks ----------------------------------------------------------------------------------------------------


def staging_of(log: list[Any], **options: Any) -> TaskStaging:
    clock = ManualClock()
    clock.set_us(5_999)
    return TaskStaging(
        Backend(log), "ab" * 8, options_of(**options), clock=clock, random_bytes=lambda count: b"\2" * count
    )


def test_a_task_stages_one_chunk_for_each_topic() -> None:
    log: list[Any] = []
    parts = [batch_of(b"1", b"2", topic=pa.array(["a", "b"])), batch_of(b"3", topic=pa.array(["a"]))]
    made = [each for part in parts for each in encode_rows(part, None, json=False)]
    staged = staging_of(log).run(iter(parts))
    assert log == [("stage", "a", 2), ("stage", "b", 1)]
    assert [(topic, chunk.name, chunk.rows) for topic, chunk in staged.chunks] == [
        ("a", f"{'ab' * 8}-000000000005-0202020202020202", 2),
        ("b", f"{'ab' * 8}-000000000005-0202020202020202", 1),
    ]
    assert (staged.rows, staged.size) == (3, sum(records.nbytes for _, records, _ in made))
    whole = [about for _, _, about in made]
    assert staged.fingerprint == tuple(sum(each[word] for each in whole) % (1 << 64) for word in (0, 1))
    assert staging_of(log).run(iter([])) == StagedTask()


def test_the_largest_chunk_is_closed_when_all_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    small, large = batch_of(b"1", topic=pa.array(["a"])), batch_of(b"2" * 500, topic=pa.array(["b"]))
    sizes = [records.nbytes for part in (small, large) for _, records, _ in encode_rows(part, None, json=False)]
    monkeypatch.setattr(sink, "STAGED_CHUNK_BYTES", sum(sizes))
    staging_of(log).run(iter([small, large, small]))
    assert log == [("stage", "b", 1), ("stage", "a", 2)]
    log.clear()
    monkeypatch.setattr(sink, "STAGED_CHUNK_BYTES", sum(sizes) + 1)
    staging_of(log).run(iter([small, large]))
    assert log == [("stage", "a", 1), ("stage", "b", 1)]


# The backend of a directory -------------------------------------------------------------------------------


def test_a_directory_is_prepared_staged_published_and_cleared() -> None:
    disk, clock = SimDisk(), ManualClock()
    backend = DirectorySinkBackend("data/", disk=disk, clock=clock)
    other = DirectorySinkBackend("data", disk=disk, clock=clock)
    with pytest.raises(Unavailable):
        backend.stage("t", "x", 1, b"")
    backend.prepare()
    assert disk.list_dir("data/staging") == []
    staging = TaskStaging(other, "ab" * 8, options_of(topic="t"), clock=clock, random_bytes=lambda count: b"\2" * count)
    task = staging.run(iter([batch_of(b"1", b"2")]))
    chunks = {"t": [chunk for _, chunk in task.chunks]}
    batch = SinkBatch("etl", 0, (1, 2), "q")
    for deduped in (False, True):
        done = backend.publish(batch, chunks)["t"]
        assert (done.first_seq, done.last_seq, done.head_seq, done.deduped) == (1, 2, 2, deduped)
    with pytest.raises(BatchConflict):
        backend.publish(SinkBatch("etl", 0, (9, 9), ""), {"new": chunks["t"], "t": chunks["t"]})
    assert len(disk.list_dir("data/staging")) == 1
    backend.clear_staging("cd" * 8, ["t"])
    assert len(disk.list_dir("data/staging")) == 1
    backend.clear_staging("ab" * 8, ["t"])
    assert disk.list_dir("data/staging") == []
    backend.close()
    assert DirectorySinkBackend("/", disk=disk)._path == "/"


def test_a_chunk_that_cannot_be_staged_leaves_nothing() -> None:
    disk = SimDisk()
    backend = DirectorySinkBackend("data", disk=disk)
    backend.prepare()
    disk.fail("write", at=1, error=28)
    name = f"{'ab' * 8}-000000000005-0202020202020202"
    with pytest.raises(Error):
        backend.stage("t", name, 1, b"content")
    assert (disk.list_dir("data/staging"), disk.open_files()) == ([], [])
    assert backend.stage("t", name, 3, b"content")[:3] == (name, 3, 7)


def test_old_chunks_of_others_are_swept() -> None:
    disk, clock = SimDisk(), ManualClock()
    backend = DirectorySinkBackend("data", disk=disk, clock=clock)
    backend.prepare()
    clock.set_us(5_999)
    TaskStaging(backend, "cd" * 8, options_of(topic="t"), clock=clock).run(iter([batch_of(b"1")]))
    clock.set_us((5 + 7 * 86_400_000) * 1_000 + 999)
    backend.clear_staging("ab" * 8, [])
    assert len(disk.list_dir("data/staging")) == 1
    clock.tick(1)
    backend.clear_staging("ab" * 8, [])
    assert disk.list_dir("data/staging") == []


@pytest.mark.parametrize(("wait_ms", "tries"), [(0, 1), (10, 2), (11, 3), (30, 4)])
def test_a_directory_is_tried_until_it_is_unlocked(monkeypatch: pytest.MonkeyPatch, wait_ms: int, tries: int) -> None:
    clock, tried = ManualClock(), list[int]()
    monkeypatch.setattr(sink_backends, "Event", lambda: SimpleNamespace(wait=lambda _: clock.tick(10)))

    def locked() -> Any:
        tried.append(1)
        raise Locked("held")

    with pytest.raises(Locked, match="data is held by another writer"):
        open_when_unlocked(locked, "data", clock, wait_ms)
    assert len(tried) == tries

    def free() -> Any:
        tried.append(1)
        return "opened" if len(tried) == tries + 1 else locked()

    opened: Any = open_when_unlocked(free, "data", clock, wait_ms)
    assert opened == "opened"


# The backend of a server ----------------------------------------------------------------------------------


class Http:
    def __init__(self, answers: dict[str, Callable[[], Any]]) -> None:
        self.answers, self.log = answers, list[Any]()

    def _answer(self, *asked: Any) -> Any:
        self.log.append(asked)
        return self.answers[f"{asked[0]} {asked[1]}"]()

    def put_bytes(self, path: str, content: Any, kind: str) -> None:
        self.log.append(("put", path, bytes(content), kind))

    def get(self, path: str, **arguments: Any) -> Any:
        return self._answer("get", path, arguments)

    def post(self, path: str, body: Any) -> Any:
        return self._answer("post", path, body)

    def delete(self, path: str) -> None:
        self.log.append(("delete", path))

    def close(self) -> None:
        self.log.append("close")


def server_of(**answers: Callable[[], Any]) -> tuple[ServerSinkBackend, list[Any]]:
    http: Any = Http({name.replace("_", " /v0/topics/", 1) + "/batches": answer for name, answer in answers.items()})
    return ServerSinkBackend("http://h:1", "k", http=http), http.log


ANSWER = {"first_seq": 4, "last_seq": 6, "head_seq": 9, "deduped": True}
CHUNK = StagedChunk("c1", 2, 30, 0xAB)


def fail(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def test_a_server_is_sent_chunks_and_batches() -> None:
    backend, log = server_of(post_a=lambda: ANSWER)
    backend.prepare()
    chunk = backend.stage("a/b", "c1", 2, b"content")
    assert chunk == StagedChunk("c1", 2, 7, xxh3_64_intdigest(b"content"))
    assert log == [("put", "/v0/topics/a%2Fb/staging/c1", b"content", "application/vnd.apache.arrow.stream")]
    log.clear()
    assert backend.publish(SinkBatch("etl", 5, (1, 2), "q"), {"a": [CHUNK]}) == {"a": Appended(4, 6, 9, True)}
    body = {
        "writer": "etl",
        "number": 5,
        "sum": "00000000000000010000000000000002",
        "query_id": "q",
        "chunks": [{"chunk": "c1", "rows": 2, "bytes": 30, "sum": "00000000000000ab"}],
    }
    assert log == [("post", "/v0/topics/a/batches", body)], "one topic is checked by its own request"
    log.clear()
    backend.clear_staging("ab", ["a", "b"])
    backend.close()
    assert log == [("delete", "/v0/topics/a/staging/ab"), ("delete", "/v0/topics/b/staging/ab"), "close"]


def test_several_topics_are_checked_before_one_is_written() -> None:
    row = {"number": 5, "first_seq": 1, "last_seq": 2, "sum": f"{7:016x}{8:016x}", "query_id": "q"}
    known = {"batches": [row]}
    backend, log = server_of(
        get_a=fail(TopicNotFound("a")), get_b=lambda: known, post_a=lambda: ANSWER, post_b=lambda: ANSWER
    )
    assert backend._written_batches("b", "etl") == {5: BatchRange(1, 2, (7, 8), "q")}
    log.clear()
    with pytest.raises(BatchConflict):
        backend.publish(SinkBatch("etl", 5, (1, 2)), {"a": [CHUNK], "b": [CHUNK]})
    assert [step[:2] for step in log] == [("get", "/v0/topics/a/batches"), ("get", "/v0/topics/b/batches")]
    assert log[0][2] == {"writer": "etl"}
    log.clear()
    assert list(backend.publish(SinkBatch("etl", 5, (7, 8)), {"a": [CHUNK], "b": [CHUNK]})) == ["a", "b"]
    assert [step[0] for step in log] == ["get", "get", "post", "post"]


def test_an_answer_that_is_lost_is_in_doubt() -> None:
    backend, _ = server_of(post_a=fail(Unavailable("gone")))
    with pytest.raises(InDoubt, match="not known whether batch 5 reached a"):
        backend.publish(SinkBatch("etl", 5, (1, 2)), {"a": [CHUNK]})
    refused, _ = server_of(post_a=fail(BadInput("refused")))
    with pytest.raises(BadInput):
        refused.publish(SinkBatch("etl", 5, (1, 2)), {"a": [CHUNK]})


def test_the_settings_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Client:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            made.append((*arguments, more))

        def get_bytes(self, path: str) -> None:
            made.append(path)

        def close(self) -> None:
            made.append("close")

    monkeypatch.setattr(sink_backends, "open_client", Client)
    ServerSinkBackend("http://h:1", "k")
    ServerSinkBackend("http://h:1", "k", retry_ms=5)
    assert [each[2] for each in made] == [
        {"timeout_s": 300.0, "for_writes": True, "retry_ms": retry_ms} for retry_ms in (0, 5)
    ]
    made.clear()
    sink_backends.check_reachable("http://h:1", "k")
    assert made == [("http://h:1", "k", {"for_writes": True}), "/healthz", "close"]


def test_the_backend_follows_the_options() -> None:
    by_path, by_server = (
        sink.open_sink_backend(options_of()),
        sink.open_sink_backend(options_of(location=Location("http://h:1"), retry_ms=7)),
    )
    assert isinstance(by_path, DirectorySinkBackend)
    assert isinstance(by_path._staging, StagingArea)
    assert isinstance(by_server, ServerSinkBackend)
    assert by_server._server == "http://h:1"
