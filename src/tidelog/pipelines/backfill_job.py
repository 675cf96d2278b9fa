"""Write existing rows into a topic or a table once, and say where the live stream continues.

    files, a table, a range of a topic ──► function ──► records ──► staged ──► published, chunk by chunk
    a range of a topic                 ──► function ─────────────► a table: one commit, as of an export

The end of a range is fixed when the job begins: `join_seq` is the last seq that was read, and a consumer of the live
stream starts after it. A table keeps it in its commit, so the next run continues there; a job into a topic keeps it
with its staged rows. Staged rows are never computed again, so the function need not be deterministic.

    work_dir/
      stage.json              the job: files, rows, the topic when the job began
      stage-00003-….parquet   rows; a row group is a chunk, and a chunk is one atomic write
      published.json          the number of published chunks and the last seq

Every record of a chunk has the mark `{"_backfill": "<job>/<stage id>/<chunk>"}` in its meta, because a topic remembers
idempotency keys for minutes and a job may resume after days. A resumed run looks for marks after the last recorded
chunk: a chunk with a mark was written by a run that died before it recorded that. The stage id is the time of the
staging: a job that starts again after its records were deleted has new keys, because the topic still knows the old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from tidelog.addresses import Location
from tidelog.client import RemoteDatabase
from tidelog.client.database import open_location
from tidelog.database import Database
from tidelog.disk.durability import read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Damaged, GapFound, NotEmpty, NotFound
from tidelog.pipelines import export_job, spark_tasks, transforms
from tidelog.pipelines.export_job import JobContext
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats import parquet as files
from tidelog.pipelines.table_formats.interface import Commit, DataFile, OnStep, Table
from tidelog.pipelines.table_formats.parquet import FileFooter, ParquetFileWriter
from tidelog.spark import backends, plan
from tidelog.spark import options as reading
from tidelog.spark.backends.interface import TopicSnapshot
from tidelog.spark.filters import RecordFilter
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader

MARK_KEY: Final = "_backfill"
STAGE_FILE: Final = "stage.json"
PUBLISHED_FILE: Final = "published.json"
Transform: TypeAlias = Callable[[DataFrame], DataFrame]
Progress: TypeAlias = Callable[[int, int], None]
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
    """The input of a job. A job has a name, and is the same job only with the same input and target."""

    source: str
    target: str
    from_topic: str | None = None
    format: str | None = None
    first: int | None = None
    until: int | None = None
    function: str | None = None

    def first_difference(self, given: JobInput) -> str | None:
        """Describe the first field that differs from another input; None if all are equal."""
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
    content: str | None = None  # a fingerprint of the rows when they were read; None: not known
    id: str = ""  # the time in microseconds; "" in stages of earlier versions

    @property
    def mark(self) -> str:
        """The prefix of the marks and keys of its chunks."""
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


@dataclass(frozen=True)
class BackfillRequest:
    """A job and its input. `topic`: the topic to write to; None: `input.target` is a table."""

    job: str
    topic: str | None
    input: JobInput
    function: Transform | None
    work_dir: str


class BackfillTarget(NamedTuple):
    """The directory or server that a job writes to. This process is the only writer of a directory."""

    location: Location
    database: Database | RemoteDatabase

    def append(self, topic: str, batch: pa.RecordBatch, key: str) -> int:
        """Append a batch as a whole and return its last seq. The key makes a repetition harmless."""
        return self.database.topic(topic, create=False).append_arrow(batch, key=key).last_seq


@contextmanager
def open_target(location: Location) -> Iterator[BackfillTarget]:
    with open_location(location) as opened:
        yield BackfillTarget(location, opened)


# ── publishing ────────────────────────────────────────────────────────────────────────────────────


class Publisher:
    """Publishes the staged chunks of a job."""

    def __init__(self, disk: Disk, work_dir: str, target: BackfillTarget, on_step: OnStep = interface.no_step) -> None:
        self._disk, self._work_dir, self._target, self._on_step = disk, work_dir, target, on_step
        self.rows_written = 0  # by this object

    def load_stage(self) -> StagedJob | None:
        """Return what an earlier run staged; None if there is nothing."""
        content = read_file(self._disk, join(self._work_dir, STAGE_FILE))
        return None if content is None else msgspec.json.decode(content, type=StagedJob)

    def prepare_stage(self) -> None:
        """Create the working directory and remove the files of an unfinished attempt."""
        self._disk.make_dir(self._work_dir)
        for name in self._disk.list_dir(self._work_dir):
            if name.startswith("stage-"):
                self._disk.remove(join(self._work_dir, name))

    def save_stage(self, stage: StagedJob) -> None:
        """Save the stage. From here on the job writes these files, also after a restart."""
        for file in stage.files:
            path = join(self._work_dir, file.name)
            stat = self._disk.stat(path)
            if stat is None or file.bytes not in (None, stat.size):
                raise interface.StagedFileMissing(
                    f"{path}, which a task has written, is not there or has another length: executors write to disks "
                    "that the driver does not see; nothing was written, name a --work-dir that all of them see"
                )
        self._disk.sync_dir(self._work_dir)
        self._on_step("write the stage")
        replace_file(self._disk, join(self._work_dir, STAGE_FILE), msgspec.json.encode(stage))
        self._on_step("staged")

    def publish(self, stage: StagedJob, progress: Progress | None = None) -> PublishProgress:
        """Write every chunk that is not written yet, in order."""
        self._check_epoch(stage)
        done = self._load_progress(stage)
        for number, batch in enumerate(self._read_chunks(stage)):
            if number < done.chunks:
                continue
            key = f"{stage.mark}/{number}"
            self._on_step("write a chunk")
            last_seq = self._target.append(stage.topic, add_mark(batch, key), f"backfill:{key}")
            self.rows_written += batch.num_rows
            self._on_step("write down the chunk")
            done = PublishProgress(number + 1, last_seq)
            replace_file(self._disk, join(self._work_dir, PUBLISHED_FILE), msgspec.json.encode(done))
            if progress is not None:
                progress(done.chunks, stage.chunks)
        return done

    def _check_epoch(self, stage: StagedJob) -> None:
        if self._target.database.topic(stage.topic).state().epoch != stage.epoch:
            error = GapFound(stage.topic, (1, 1, "recreated", 0, 1, 0))
            error.args = (
                f"{stage.topic} was dropped and made again since job {stage.job!r} began; nothing was written, remove "
                f"{self._work_dir} to begin anew",
            )
            raise error

    def is_finished(self, stage: StagedJob) -> bool:
        """Whether every staged chunk is recorded as written."""
        content = read_file(self._disk, join(self._work_dir, PUBLISHED_FILE))
        return not stage.chunks or (
            content is not None and msgspec.json.decode(content, type=PublishProgress).chunks >= stage.chunks
        )

    def _load_progress(self, stage: StagedJob) -> PublishProgress:
        content = read_file(self._disk, join(self._work_dir, PUBLISHED_FILE))
        known = (
            PublishProgress(0, stage.head) if content is None else msgspec.json.decode(content, type=PublishProgress)
        )
        found = find_published(self._target.location, stage.topic, stage.mark, known.last_seq)
        return max(known, found, key=lambda progress: progress.chunks)

    def _read_chunks(self, stage: StagedJob) -> Iterator[pa.RecordBatch]:
        for file in stage.files:
            groups = files.read_row_groups(self._disk, join(self._work_dir, file.name))
            count = 0
            for count, batch in enumerate(groups, 1):  # noqa: B007
                yield batch
            if count != file.chunks:
                raise Damaged(
                    f"{join(self._work_dir, file.name)} has {count} chunks of {file.chunks}; nothing more was written, "
                    "remove the directory and what the job wrote, and begin anew"
                )


def find_published(location: Location, topic: str, mark: str, after_seq: int) -> PublishProgress:
    """Find the last chunk of a stage, or of a job, that a topic has after a seq."""
    options = reading.parse_options(
        {**location.as_options(), "subscribe": topic, "onGap": "skip", "columns": "seq,meta"}
    )
    last = (0, after_seq)  # chunks, seq
    with closing(backends.open_backend(options)) as backend:
        snapshot = backend.snapshot(topic)
        if snapshot is None or snapshot.next_seq <= after_seq + 1:
            return PublishProgress(*last)
        wanted = TopicRange(snapshot, max(after_seq + 1, snapshot.evict_floor), snapshot.next_seq)
        for task in plan.plan_tasks(backend, options, [wanted], RecordFilter()):
            for batch in TaskReader(backend, options, _MARK_SCHEMA, RecordFilter(), task).batches():
                marks = pc.map_lookup(batch.column("meta"), MARK_KEY, "first")
                own = pc.fill_null(pc.starts_with(marks, f"{mark}/"), False)
                seqs = batch.column("seq").filter(own).to_pylist()
                for seq, found in zip(seqs, marks.filter(own).to_pylist(), strict=True):
                    last = max(last, (int(found.rpartition("/")[2]) + 1, seq))
    return PublishProgress(*last)


def add_mark(batch: pa.RecordBatch, key: str) -> pa.RecordBatch:
    """Add the mark of a chunk to the meta of its records."""
    meta = batch.column("meta").cast(pa.string())
    mark = f'"{MARK_KEY}":{msgspec.json.encode(key).decode()}'
    inner = pc.utf8_slice_codeunits(pc.utf8_trim_whitespace(pc.fill_null(meta, "{}")), 1)
    comma = pc.if_else(pc.equal(pc.utf8_trim_whitespace(inner), "}"), "", ",")
    made = pc.binary_join_element_wise("{" + mark, comma, inner, "")
    return batch.set_column(batch.schema.get_field_index("meta"), "meta", made)


CHUNK_ROWS: Final = 5_000  # a write may have 10,000
CHUNK_BYTES: Final = 2 << 20  # a server accepts 4 MiB per batch
STAGED_SCHEMA: Final = pa.schema(
    [
        pa.field("data", pa.binary()),
        pa.field("json", pa.bool_()),
        pa.field("tag", pa.string()),
        pa.field("node", pa.string()),
        pa.field("meta", pa.string()),
    ]
)
_MESSAGE_VALUE_CHARS: Final = 80
_decode = msgspec.json.Decoder().decode


class Backfilled(NamedTuple):
    job: str
    target: str
    rows: int
    chunks: int
    first: int  # seqs of the target topic; for a table, seqs of the source
    last: int
    join_seq: int | None
    written: int = 0  # rows that this run wrote; 0 if an earlier run wrote all


# ── into a topic ──────────────────────────────────────────────────────────────────────────────────


def split_chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into chunks that one write takes, by rows and by bytes."""
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
    """Return the batch. Raises BadInput for invalid JSON, which the topic would refuse after half of the job."""
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
    """Runs on an executor: stage the rows of one partition, a row group per chunk. `has_json_flags`: a column of the
    rows says which are JSON, and is verified here."""
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
    """The source of the rows of a job."""

    load_frame: Callable[[], DataFrame]
    join_seq: int | None = None
    content: str | None = None  # a fingerprint of the present rows


def backfill_topic(
    request: BackfillRequest,
    source: Callable[[], RowSource],
    target: BackfillTarget,
    context: JobContext,
    progress: Progress | None = None,
) -> Backfilled:
    """Stage once, then publish what is not published yet. The same job again writes nothing; other input under its
    name is refused."""
    job, topic, work_dir = request.job, request.topic, request.work_dir
    if not job or "/" in job:
        raise BadInput(f"the job is called {job!r}, its name must be a text without a /; nothing was written")
    assert topic is not None, "a job without a topic writes a table"
    publisher = Publisher(context.disk, work_dir, target, context.on_step)
    stage = publisher.load_stage()
    if stage is None:
        publisher.prepare_stage()
        stage = _stage_source(request, topic, source(), target, context)
        publisher.save_stage(stage)
    if (stage.job, stage.topic) != (job, topic):
        raise BadInput(
            f"{work_dir} belongs to job {stage.job!r} into {stage.topic!r}; nothing was written, name another directory"
        )
    _check_same_input(stage, request, source, finished=publisher.is_finished(stage))
    done = publisher.publish(stage, progress)
    written = publisher.rows_written
    return Backfilled(job, topic, stage.rows, done.chunks, stage.head + 1, done.last_seq, stage.join_seq, written)


def _check_same_input(
    stage: StagedJob, request: BackfillRequest, source: Callable[[], RowSource], *, finished: bool
) -> None:
    """Refuse input that differs from the one staged under this name. An interrupted job continues with the staged
    rows, also if its source has changed or is gone."""
    ways = (
        "nothing was written. Give the new input a name of its own (--job, with a --work-dir of its own if one is "
        f"named), or remove {request.work_dir} and delete what the job wrote to begin it anew"
    )
    other = stage.input.first_difference(request.input) if stage.input is not None else None
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
            f"job {stage.job!r} wrote all that {request.input.source} held when it ran, and that has changed since; "
            f"{ways}"
        )


def _stage_source(
    request: BackfillRequest, topic: str, source: RowSource, target: BackfillTarget, context: JobContext
) -> StagedJob:
    job, work_dir = request.job, request.work_dir
    state = target.database.topic(topic).state()
    before = find_published(target.location, topic, job, 0)
    if before.chunks:
        error = NotEmpty(topic, count=before.chunks)
        error.args = (
            f"job {job!r} has written {before.chunks} chunks into {topic} and nothing is left in {work_dir} to go on "
            "from; nothing was written, put the directory back, or delete what it wrote, or give the job another name",
        )
        raise error
    context.on_step("stage")
    frame = source.load_frame() if request.function is None else request.function(source.load_frame())
    stage = partial(_stage_partition, context.disk, work_dir, transforms.has_is_json(frame))
    results = spark_tasks.run_on_partitions(transforms.records(frame), stage, context.disk, join(work_dir, "answers"))
    found = [msgspec.json.decode(result, type=StagedFile) for result in results]
    files = tuple(sorted((file for file in found if file.chunks), key=lambda file: file.name))
    now = f"{context.clock.now_us():016x}"
    return StagedJob(
        job, topic, state.epoch, state.head_seq, files, source.join_seq, request.input, source.content, now
    )


# ── into a table ──────────────────────────────────────────────────────────────────────────────────


def backfill_table(
    request: BackfillRequest,
    snapshot: TopicSnapshot,
    load_range: Callable[[int, int], DataFrame],
    table: Table,
    context: JobContext,
) -> Backfilled:
    """Write all records after the last commit through a function, in one commit."""
    job, function, name = request.job, request.function, request.input.function
    assert function is not None, "rows of a table went through a function"
    start, until = request.input.first, request.input.until
    last = table.last_commit()
    if last is not None:
        interface.check_same_topic(last, snapshot.topic, snapshot.epoch, table.path)
        if last.transform != name:
            raise BadInput(
                f"rows of {table.path} went through {last.transform or 'no function'}, not through {name}; nothing was "
                "written, name another table"
            )
    else:
        interface.check_empty(table)
    first = last.stop if last is not None else max(snapshot.evict_floor, snapshot.first_seq, start or 0)
    stop = snapshot.next_seq if until is None else min(until + 1, snapshot.next_seq)
    if first >= stop:
        return Backfilled(job, table.path, 0, 0, first, stop - 1, stop - 1)
    rows = function(load_range(first, stop))
    mapping = RecordMapping(rows.schema.json())
    if last is not None and mapping.schema != last.schema:
        raise BadInput(f"{name} gives other columns than {table.path} has; nothing was written, name another table")
    run = f"{context.clock.now_us():016x}"
    footer = FileFooter(
        snapshot.topic, snapshot.epoch, first, stop, run, mapping.schema, mapping.options_json, transform=name
    )
    table.prepare(mapping)
    target = export_job.CommitTarget(table.path, table.format, mapping, footer, table.disk)
    context.on_step("write files")
    results = spark_tasks.run_on_partitions(
        rows,
        partial(export_job.write_frame_partition, target, first, stop),
        table.disk,
        _results_path(table.path, table.disk),
    )
    files = [file for result in results for file in msgspec.json.decode(result, type=list[DataFile])]
    commit = Commit(
        snapshot.topic,
        snapshot.epoch,
        first,
        stop,
        tuple(files),
        mapping.schema,
        mapping.options_json,
        transform=name,
        table_first=first if last is None else last.table_first,
        ts_ms=context.clock.now_us() // 1000,
    )
    context.on_step("commit")
    table.commit(commit)
    return Backfilled(job, table.path, commit.rows, 1, first, stop - 1, stop - 1, commit.rows)


def _results_path(path: str, disk: Disk) -> str:
    own = join(path, interface.OWN_DIR)
    disk.make_dir(own)
    return join(own, "answers")
