"""Rows that are there already, into a topic or a table, once, and where the live stream takes over.

    files, a table, a range of a topic ──► your function ──► records ──► staged ──► published, chunk by chunk
    a range of a topic                 ──► your function ─────────────► a table: one commit, as an export makes them

The end of a range is fixed when the job begins: `join_seq` is the last seq that was read, and a consumer of the live
stream starts after it. A table keeps it in its commit, so another run continues there by itself; a job into a topic
keeps it with what it staged. What was staged is never made again, so it does not matter whether a function gives the
same rows twice.

Staged rows into a topic, chunk by chunk, each of them once.

    work/
      stage.json              what is to be written: files, rows, the topic as it was when the job began
      stage-00003-….parquet   rows; a row group is a chunk, and a chunk is one atomic write
      published.json          how many chunks were written, and the seq of the last one

Every record of a chunk carries the mark `{"_backfill": "<job>/<stage id>/<chunk>"}` in its meta, because the key of a
write is remembered for minutes and a job may be taken up again after days. A resumed run looks for marks after the last
chunk that is on record: a chunk that is marked there was written, though its run died before it could record that. The
id is the time of the staging: a job that is begun anew after its records were deleted has other keys, because the topic
still knows the old ones and would write nothing.

`BatchSink` is the interface to what writes: a directory, of which this process is then the writer, or a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from tidelog import database
from tidelog.client.http import Client, topic_path
from tidelog.disk.durability import read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Damaged, GapFound, NotEmpty, NotFound
from tidelog.pipelines import export_job, spark_tasks, transforms
from tidelog.pipelines.export_job import JobContext
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import commits, interface
from tidelog.pipelines.table_formats import parquet_files as files
from tidelog.pipelines.table_formats.commits import Commit, DataFile
from tidelog.pipelines.table_formats.interface import OnStep, Table
from tidelog.pipelines.table_formats.parquet_files import FileFooter, ParquetFileWriter
from tidelog.spark import backends, plan
from tidelog.spark import options as reading
from tidelog.spark.backends.interface import TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader

MARK_KEY: Final = "_backfill"
STAGE_FILE: Final = "stage.json"
PUBLISHED_FILE: Final = "published.json"
_ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
_MARK_SCHEMA: Final = StructType(
    [StructField("seq", LongType()), StructField("meta", MapType(StringType(), StringType()))]
)


class StagedFile(msgspec.Struct, frozen=True):
    name: str
    rows: int
    chunks: int
    hash: int
    bytes: int | None = None


class JobInput(msgspec.Struct, frozen=True):
    """What a job was given. A job is known by its name, and is the same job only with the same input and target."""

    source: str
    target: str
    from_topic: str | None = None
    format: str | None = None
    first: int | None = None
    until: int | None = None
    function: str | None = None

    def first_difference(self, given: JobInput) -> str | None:
        """What is not the same in another one, in words."""
        for name in self.__struct_fields__:
            here, there = getattr(self, name), getattr(given, name)
            if here != there:
                return f"{name} {there!r:.200}, and before {here!r:.200}"
        return None


class StagedJob(msgspec.Struct, frozen=True):
    job: str
    topic: str
    epoch: int
    head: int  # of the topic, before anything was written
    files: tuple[StagedFile, ...]
    join_seq: int | None = None  # of the source: the read range ends here, the live stream starts after it
    input: JobInput | None = None
    content: str | None = None  # what the source held when it was read; None: not known
    id: str = ""  # the time in microseconds; "": staged by a version that had none

    @property
    def mark(self) -> str:
        """What the marks and keys of its chunks begin with."""
        return f"{self.job}/{self.id}" if self.id else self.job

    @property
    def chunks(self) -> int:
        return sum(file.chunks for file in self.files)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class PublishProgress(msgspec.Struct, frozen=True):
    chunks: int
    last_seq: int


class BatchSink(Protocol):
    source_options: dict[str, str]  # the same place, as options of the source

    def ensure_topic(self, topic: str) -> tuple[int, int]:
        """Epoch and head of a topic, which is made where there is none."""
        ...

    def append_batch(self, topic: str, batch: pa.RecordBatch, key: str) -> tuple[int, int]:
        """Write a batch as a whole; the first seq and the last one. The key guards against a second try."""
        ...

    def close(self) -> None: ...


class DirectorySink:
    def __init__(self, path: str) -> None:
        self.source_options = {"path": path}
        self._engine = database.open(path)

    def ensure_topic(self, topic: str) -> tuple[int, int]:
        found = self._engine.topic(topic)
        return found.epoch, found.head_seq

    def append_batch(self, topic: str, batch: pa.RecordBatch, key: str) -> tuple[int, int]:
        done = self._engine.topic(topic).append_arrow(batch, key=key)
        return done.first_seq, done.last_seq

    def close(self) -> None:
        self._engine.close()


class ServerSink:
    def __init__(self, server: str, key: str | None) -> None:
        self.source_options = {"server": server, **({"key": key} if key is not None else {})}
        self._client = Client(server, key=key)

    def ensure_topic(self, topic: str) -> tuple[int, int]:
        self._client.put(topic_path(topic), {})
        with closing(
            backends.open_backend(reading.parse_options({**self.source_options, "subscribe": topic}))
        ) as place:
            sight = place.snapshot(topic)
            assert sight is not None, "it was made a moment ago"
            return sight.epoch, sight.next_seq - 1

    def append_batch(self, topic: str, batch: pa.RecordBatch, key: str) -> tuple[int, int]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        headers = {"Content-Type": _ARROW_CONTENT_TYPE, "Idempotency-Key": key}
        body = sink.getvalue().to_pybytes()
        said = msgspec.json.decode(
            self._client.request("POST", topic_path(topic), body, retry_safe=True, headers=headers)
        )
        return said["first_seq"], said["last_seq"]

    def close(self) -> None:
        self._client.close()


# ── publishing ────────────────────────────────────────────────────────────────────────────────────


class Publisher:
    def __init__(self, disk: Disk, work_dir: str, sink: BatchSink, on_step: OnStep = interface.no_step) -> None:
        self._disk, self._work_dir, self._sink, self._on_step = disk, work_dir, sink, on_step
        self.rows_written = 0  # rows, by this object

    def load_stage(self) -> StagedJob | None:
        """What was staged before; None: nothing yet."""
        content = read_file(self._disk, join(self._work_dir, STAGE_FILE))
        return None if content is None else msgspec.json.decode(content, type=StagedJob)

    def prepare_stage(self) -> None:
        """Prepare the directory of a stage: remove what an unfinished attempt left."""
        self._disk.make_dir(self._work_dir)
        for name in self._disk.list_dir(self._work_dir):
            if name.startswith("stage-"):
                self._disk.remove(join(self._work_dir, name))

    def save_stage(self, stage: StagedJob) -> None:
        """From here on the staged files are what will be written, whatever happens."""
        for file in stage.files:
            path = join(self._work_dir, file.name)
            found = self._disk.stat(path)
            if found is None or file.bytes not in (None, found.size):
                raise interface.StagedFileMissing(
                    f"{path}, which a task has written, is not there or has another length: executors write to disks "
                    "that the driver does not see; nothing was written, name a --work-dir that all of them see"
                )
        self._disk.sync_dir(self._work_dir)
        self._on_step("write the stage")
        replace_file(self._disk, join(self._work_dir, STAGE_FILE), msgspec.json.encode(stage))
        self._on_step("staged")

    def publish(self, stage: StagedJob, progress: Callable[[int, int], None] | None = None) -> PublishProgress:
        """Write every chunk that was not written yet, in order."""
        self._check_epoch(stage)
        done = self._load_progress(stage)
        for number, batch in enumerate(self._read_chunks(stage)):
            if number < done.chunks:
                continue
            key = f"{stage.mark}/{number}"
            self._on_step("write a chunk")
            _, last = self._sink.append_batch(stage.topic, add_mark(batch, key), f"backfill:{key}")
            self.rows_written += batch.num_rows
            self._on_step("write down the chunk")
            done = PublishProgress(number + 1, last)
            replace_file(self._disk, join(self._work_dir, PUBLISHED_FILE), msgspec.json.encode(done))
            if progress is not None:
                progress(done.chunks, stage.chunks)
        return done

    def _check_epoch(self, stage: StagedJob) -> None:
        epoch, _ = self._sink.ensure_topic(stage.topic)
        if epoch != stage.epoch:
            error = GapFound(stage.topic, (1, 1, "recreated", 0, 1, 0))
            error.args = (
                f"{stage.topic} was dropped and made again since job {stage.job!r} began; nothing was written, remove "
                f"{self._work_dir} to begin anew",
            )
            raise error

    def is_finished(self, stage: StagedJob) -> bool:
        """Whether everything that was staged is on record as written."""
        content = read_file(self._disk, join(self._work_dir, PUBLISHED_FILE))
        return not stage.chunks or (
            content is not None and msgspec.json.decode(content, type=PublishProgress).chunks >= stage.chunks
        )

    def _load_progress(self, stage: StagedJob) -> PublishProgress:
        content = read_file(self._disk, join(self._work_dir, PUBLISHED_FILE))
        known = (
            PublishProgress(0, stage.head) if content is None else msgspec.json.decode(content, type=PublishProgress)
        )
        found = find_published(self._sink, stage.topic, stage.mark, known.last_seq)
        return max(known, found, key=lambda each: each.chunks)

    def _read_chunks(self, stage: StagedJob) -> Iterator[pa.RecordBatch]:
        for file in stage.files:
            found = files.read_row_groups(self._disk, join(self._work_dir, file.name))
            count = 0
            for count, batch in enumerate(found, 1):  # noqa: B007
                yield batch
            if count != file.chunks:
                raise Damaged(
                    f"{join(self._work_dir, file.name)} has {count} chunks of {file.chunks}; nothing more was written, "
                    "remove the directory and what the job wrote, and begin anew"
                )


def find_published(sink: BatchSink, topic: str, mark: str, after_seq: int) -> PublishProgress:
    """The last chunk of a stage, or of a job, that a topic holds after the seq `after`."""
    options = reading.parse_options({**sink.source_options, "subscribe": topic, "onGap": "skip", "columns": "seq,meta"})
    best = PublishProgress(0, after_seq)
    with closing(backends.open_backend(options)) as place:
        sight = place.snapshot(topic)
        if sight is None or sight.next_seq <= after_seq + 1:
            return best
        low = max(after_seq + 1, sight.evict_floor)
        for split in plan.plan_tasks(place, options, [TopicRange(sight, low, sight.next_seq)], RecordFilter()):
            for batch in TaskReader(place, options, _MARK_SCHEMA, RecordFilter(), split).batches():
                marks = pc.map_lookup(batch.column("meta"), MARK_KEY, "first")
                mine = pc.fill_null(pc.starts_with(marks, f"{mark}/"), False)
                for seq, found in zip(
                    batch.column("seq").filter(mine).to_pylist(), marks.filter(mine).to_pylist(), strict=True
                ):
                    best = max(best, PublishProgress(int(found.rpartition("/")[2]) + 1, seq), key=_progress_order)
    return best


def _progress_order(each: PublishProgress) -> tuple[int, int]:
    return each.chunks, each.last_seq


def add_mark(batch: pa.RecordBatch, key: str) -> pa.RecordBatch:
    """Records with the mark of their chunk in their meta, beside whatever is there."""
    meta = batch.column("meta").cast(pa.string())
    mark = f'"{MARK_KEY}":{msgspec.json.encode(key).decode()}'
    inner = pc.utf8_slice_codeunits(pc.utf8_trim_whitespace(pc.fill_null(meta, "{}")), 1)
    comma = pc.if_else(pc.equal(pc.utf8_trim_whitespace(inner), "}"), "", ",")
    made = pc.binary_join_element_wise("{" + mark, comma, inner, "")
    at = batch.schema.get_field_index("meta")
    return batch.set_column(at, "meta", made)


CHUNK_ROWS: Final = 5_000  # of 10,000 that a write may have
CHUNK_BYTES: Final = 2 << 20  # of 4 MiB that a server takes for one batch
STAGED_SCHEMA: Final = pa.schema(
    [
        pa.field("data", pa.binary()),
        pa.field("json", pa.bool_()),
        pa.field("tag", pa.string()),
        pa.field("node", pa.string()),
        pa.field("meta", pa.string()),
    ]
)
Transform = Callable[[DataFrame], DataFrame]
_MESSAGE_VALUE_CHARS: Final = 80
_decode = msgspec.json.Decoder().decode


class Backfilled(NamedTuple):
    job: str
    target: str
    rows: int
    chunks: int
    first: int  # of the target: seqs of a topic; of a table, those of the source that it stands for
    last: int
    join_seq: int | None
    written: int = 0  # rows that this run wrote; 0: the job had written them all before


# ── into a topic ──────────────────────────────────────────────────────────────────────────────────


def split_chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in pieces that one write takes: by rows and by bytes."""
    sizes = np.diff(np.frombuffer(batch.column("data").buffers()[1], np.int32)[batch.column("data").offset :])
    ends = np.cumsum(sizes[: batch.num_rows], dtype=np.int64)
    at = 0
    while at < batch.num_rows:
        before = int(ends[at - 1]) if at else 0
        stop = int(np.searchsorted(ends, before + CHUNK_BYTES, side="right"))
        stop = max(min(stop, at + CHUNK_ROWS), at + 1)
        yield batch.slice(at, stop - at)
        at = stop


def check_json(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, after refusing what a topic would refuse when half of the job is in it."""
    for text in batch.column("data").filter(batch.column("json")).to_pylist():
        try:
            _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(
                f"a row says is_json and its data is {text[:_MESSAGE_VALUE_CHARS]!r} ({error}); nothing was written. "
                f"A function "
                "that makes other data keeps is_json true only where that is JSON, or drops the column"
            ) from None
    return batch


def stage_batches(
    disk: Disk,
    work_dir: str,
    partition: int,
    attempt: int,
    batches: Iterable[pa.RecordBatch],
    *,
    has_json_flags: bool = False,
) -> StagedFile:
    """Runs on an executor: the rows of one partition, a row group a chunk. `flagged`: what is JSON is what a column of
    theirs says, which has not been verified yet."""
    name = f"stage-{partition:05d}-{attempt}.parquet"
    writer = ParquetFileWriter(disk, join(work_dir, name), STAGED_SCHEMA)
    chunks = 0
    try:
        for batch in batches:
            made = batch.cast(STAGED_SCHEMA)
            for piece in split_chunks(check_json(made) if has_json_flags else made):
                writer.add(piece)
                writer.end_group()
                chunks += 1
        size = writer.close(b"{}")
    except BaseException:
        writer.abandon()
        raise
    return StagedFile(name, writer.rows, chunks, writer.hash, size)


def _stage_partition(
    disk: Disk, work_dir: str, has_json_flags: bool, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> bytes:
    return msgspec.json.encode(
        stage_batches(disk, work_dir, partition, attempt, batches, has_json_flags=has_json_flags)
    )


class RowSource(NamedTuple):
    """Where rows come from. `frame` is made when they are needed."""

    load_frame: Callable[[], DataFrame]
    join_seq: int | None = None
    content: str | None = None  # what it holds now, in a few words: other words, other rows


def backfill_topic(
    job: str,
    topic: str,
    given: JobInput,
    source: Callable[[], RowSource],
    function: Transform | None,
    sink: BatchSink,
    work_dir: str,
    context: JobContext,
    progress: Callable[[int, int], None] | None = None,
) -> Backfilled:
    """Stage once, publish what is not published yet. The same job again writes nothing; other input under its name is
    refused."""
    if not job or "/" in job:
        raise BadInput(f"the job is called {job!r}, its name must be a text without a /; nothing was written")
    publisher = Publisher(context.disk, work_dir, sink, context.on_step)
    stage = publisher.load_stage()
    if stage is None:
        publisher.prepare_stage()
        stage = _stage_source(job, topic, given, source(), function, sink, work_dir, context)
        publisher.save_stage(stage)
    if (stage.job, stage.topic) != (job, topic):
        raise BadInput(
            f"{work_dir} belongs to job {stage.job!r} into {stage.topic!r}; nothing was written, name another directory"
        )
    _check_same_input(stage, given, source, work_dir, finished=publisher.is_finished(stage))
    done = publisher.publish(stage, progress)
    rows, last = stage.rows, done.last_seq
    return Backfilled(job, topic, rows, done.chunks, stage.head + 1, last, stage.join_seq, publisher.rows_written)


def _check_same_input(
    stage: StagedJob, given: JobInput, source: Callable[[], RowSource], work_dir: str, *, finished: bool
) -> None:
    """Refuse input that is not the one which was staged under this name. A job that broke off goes on with what it
    staged, also where its source has changed or is gone since."""
    ways = (
        "nothing was written. Give the new input a name of its own (--job, with a --work-dir of its own if one is "
        f"named), or remove {work_dir} and delete what the job wrote to begin it anew"
    )
    other = stage.input.first_difference(given) if stage.input is not None else None
    if other is not None:
        raise BadInput(f"job {stage.job!r} is known with other input ({other}); {ways}")
    if not finished or stage.content is None:
        return
    try:
        content = source().content
    except NotFound:
        return
    if content != stage.content:
        raise BadInput(
            f"job {stage.job!r} wrote all that {given.source} held when it ran, and that has changed since; {ways}"
        )


def _stage_source(
    job: str,
    topic: str,
    given: JobInput,
    source: RowSource,
    function: Transform | None,
    sink: BatchSink,
    work_dir: str,
    context: JobContext,
) -> StagedJob:
    epoch, head = sink.ensure_topic(topic)
    before = find_published(sink, topic, job, 0)
    if before.chunks:
        error = NotEmpty(topic, count=before.chunks)
        error.args = (
            f"job {job!r} has written {before.chunks} chunks into {topic} and nothing is left in {work_dir} to go on "
            "from; nothing was written, put the directory back, or delete what it wrote, or give the job another name",
        )
        raise error
    context.on_step("stage")
    frame = source.load_frame() if function is None else function(source.load_frame())
    stage = partial(_stage_partition, context.disk, work_dir, transforms.has_is_json(frame))
    answers = spark_tasks.run_on_partitions(transforms.records(frame), stage, join(work_dir, "answers"))
    found = [msgspec.json.decode(said, type=StagedFile) for said in answers]
    files = tuple(sorted((file for file in found if file.chunks), key=lambda file: file.name))
    now = f"{context.clock.now_us():016x}"
    return StagedJob(job, topic, epoch, head, files, source.join_seq, given, source.content, now)


# ── into a table ──────────────────────────────────────────────────────────────────────────────────


def backfill_table(
    job: str,
    snapshot: TopicSnapshot,
    load_range: Callable[[int, int], DataFrame],
    function: Transform,
    name: str,
    table: Table,
    context: JobContext,
    start: int | None = None,
    until: int | None = None,
) -> Backfilled:
    """Write one commit with all records after the last one, through a function."""
    last = table.last_commit()
    if last is not None:
        commits.check_same_topic(last, snapshot.topic, snapshot.epoch, table.path)
        if last.transform != name:
            raise BadInput(
                f"rows of {table.path} went through {last.transform or 'no function'}, not through {name}; nothing was "
                "written, name another table"
            )
    else:
        interface.check_empty(table)
    first = last.stop if last is not None else max(snapshot.evict_floor, snapshot.first_seq, start or 0)
    stop = snapshot.next_seq if until is None else min(until, snapshot.next_seq)
    if first >= stop:
        return Backfilled(job, table.path, 0, 0, first, stop - 1, stop - 1)
    rows = function(load_range(first, stop))
    shape = RecordMapping(rows.schema.json())
    if last is not None and shape.schema != last.schema:
        raise BadInput(f"{name} gives other columns than {table.path} has; nothing was written, name another table")
    run = f"{context.clock.now_us():016x}"
    footer = FileFooter(
        snapshot.topic, snapshot.epoch, first, stop, run, shape.schema, shape.options_json, transform=name
    )
    target = export_job.CommitTarget(table.path, table.format, shape, footer, context.disk)
    context.on_step("write files")
    answers = spark_tasks.run_on_partitions(
        rows, partial(export_job.write_frame_partition, target, first, stop), _results_path(table.path, context.disk)
    )
    files = [msgspec.json.decode(said, type=DataFile) for said in answers]
    made = Commit(
        snapshot.topic,
        snapshot.epoch,
        first,
        stop,
        tuple(files),
        shape.schema,
        shape.options_json,
        transform=name,
        ts_ms=context.clock.now_us() // 1000,
    )
    context.on_step("commit")
    table.commit(made)
    return Backfilled(job, table.path, made.rows, 1, first, stop - 1, stop - 1, made.rows)


def _results_path(path: str, disk: Disk) -> str:
    own = join(path, interface.OWN_DIR)
    disk.make_dir(own)
    return join(own, "answers")
