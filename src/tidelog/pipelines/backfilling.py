"""[shell] Rows that are there already, into a topic or a table, once, and where the live stream takes over.

    files, a table, a range of a topic ──► your function ──► records ──► staged ──► published, chunk by chunk
    a range of a topic                 ──► your function ─────────────► a table: one commit, as an export makes them

The end of a range is fixed when the job begins: `join_seq` is the last seq that was read, and whoever goes on with the
live stream begins behind it. A table keeps it in its commit, so another run goes on there by itself; a job into a topic
keeps it with what it staged. What was staged is never made again, so it does not matter whether a function gives the
same rows twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput, NotEmpty, NotFound
from tidelog.pipelines import commits, frames, publish, tables, transforms, writing
from tidelog.pipelines.columns import Shape
from tidelog.pipelines.commits import Commit, DataFile
from tidelog.pipelines.exporting import Work
from tidelog.pipelines.files import FileWriter
from tidelog.pipelines.footers import Footer
from tidelog.pipelines.publish import Door, Input, Publisher, Stage, Staged
from tidelog.pipelines.tables import Table
from tidelog.spark.place import Sight

CHUNK_ROWS: Final = 5_000  # of 10,000 that a write may have
CHUNK_BYTES: Final = 2 << 20  # of 4 MiB that a server takes for one batch
RECORDS: Final = pa.schema(
    [
        pa.field("data", pa.binary()),
        pa.field("json", pa.bool_()),
        pa.field("tag", pa.string()),
        pa.field("node", pa.string()),
        pa.field("meta", pa.string()),
    ]
)
Function = Callable[[DataFrame], DataFrame]
_SHOWN_MAX: Final = 80
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


def chunked(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
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


def checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, after refusing what a topic would refuse when half of the job is in it."""
    for text in batch.column("data").filter(batch.column("json")).to_pylist():
        try:
            _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(
                f"a row says is_json and its data is {text[:_SHOWN_MAX]!r} ({error}); nothing was written. A function "
                "that makes other data keeps is_json true only where that is JSON, or drops the column"
            ) from None
    return batch


def stage_batches(
    disk: Disk, work: str, partition: int, attempt: int, batches: Iterable[pa.RecordBatch], *, told: bool = False
) -> Staged:
    """Runs on an executor: the rows of one partition, a row group a chunk. `told`: what is JSON is what a column of
    theirs says, and nobody has looked yet whether it is."""
    name = f"stage-{partition:05d}-{attempt}.parquet"
    writer = FileWriter(disk, join(work, name), RECORDS)
    chunks = 0
    try:
        for batch in batches:
            made = batch.cast(RECORDS)
            for piece in chunked(checked(made) if told else made):
                writer.add(piece)
                writer.end_group()
                chunks += 1
        size = writer.close(b"{}")
    except BaseException:
        writer.abandon()
        raise
    return Staged(name, writer.rows, chunks, writer.hash, size)


def _stage(disk: Disk, work: str, told: bool, batches: Iterable[pa.RecordBatch], partition: int, attempt: int) -> bytes:
    return msgspec.json.encode(stage_batches(disk, work, partition, attempt, batches, told=told))


class Source(NamedTuple):
    """Where rows come from. `frame` is made when they are needed."""

    frame: Callable[[], DataFrame]
    join_seq: int | None = None
    content: str | None = None  # what it holds now, in a few words: other words, other rows


def into_topic(
    job: str,
    topic: str,
    given: Input,
    source: Callable[[], Source],
    function: Function | None,
    door: Door,
    work_dir: str,
    work: Work,
    progress: Callable[[int, int], None] | None = None,
) -> Backfilled:
    """Stage once, publish what is not published yet. The same job again writes nothing; other input under its name is
    refused."""
    if not job or "/" in job:
        raise BadInput(f"the job is called {job!r}, its name must be a text without a /; nothing was written")
    publisher = Publisher(work.disk, work_dir, door, work.step)
    stage = publisher.stage()
    if stage is None:
        publisher.begin()
        stage = _staged(job, topic, given, source(), function, door, work_dir, work)
        publisher.keep(stage)
    if (stage.job, stage.topic) != (job, topic):
        raise BadInput(
            f"{work_dir} belongs to job {stage.job!r} into {stage.topic!r}; nothing was written, name another directory"
        )
    _check_same(stage, given, source, work_dir, finished=publisher.is_finished(stage))
    done = publisher.publish(stage, progress)
    rows, last = stage.rows, done.last_seq
    return Backfilled(job, topic, rows, done.chunks, stage.head + 1, last, stage.join_seq, publisher.wrote)


def _check_same(stage: Stage, given: Input, source: Callable[[], Source], work_dir: str, *, finished: bool) -> None:
    """Refuse input that is not the one which was staged under this name. A job that broke off goes on with what it
    staged, also where its source has changed or is gone since."""
    ways = (
        "nothing was written. Give the new input a name of its own (--job, with a --work-dir of its own if one is "
        f"named), or remove {work_dir} and delete what the job wrote to begin it anew"
    )
    other = stage.input.other(given) if stage.input is not None else None
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


def _staged(
    job: str,
    topic: str,
    given: Input,
    source: Source,
    function: Function | None,
    door: Door,
    work_dir: str,
    work: Work,
) -> Stage:
    epoch, head = door.look(topic)
    before = publish.written(door, topic, job, 0)
    if before.chunks:
        error = NotEmpty(topic, count=before.chunks)
        error.args = (
            f"job {job!r} has written {before.chunks} chunks into {topic} and nothing is left in {work_dir} to go on "
            "from; nothing was written, put the directory back, or delete what it wrote, or give the job another name",
        )
        raise error
    work.step("stage")
    frame = source.frame() if function is None else function(source.frame())
    stage = partial(_stage, work.disk, work_dir, transforms.is_told(frame))
    answers = frames.answers(transforms.records(frame), stage, join(work_dir, "answers"))
    found = [msgspec.json.decode(said, type=Staged) for said in answers]
    files = tuple(sorted((file for file in found if file.chunks), key=lambda file: file.name))
    now = f"{work.clock.now_us():016x}"
    return Stage(job, topic, epoch, head, files, source.join_seq, given, source.content, now)


# ── into a table ──────────────────────────────────────────────────────────────────────────────────


def into_table(
    job: str,
    sight: Sight,
    frame: Callable[[int, int], DataFrame],
    function: Function,
    name: str,
    table: Table,
    work: Work,
    start: int | None = None,
    until: int | None = None,
) -> Backfilled:
    """One commit with all that the source has behind the last one, through a function."""
    last = table.last()
    if last is not None:
        commits.check_same(last, sight.topic, sight.epoch, table.path)
        if last.transform != name:
            raise BadInput(
                f"rows of {table.path} went through {last.transform or 'no function'}, not through {name}; nothing was "
                "written, name another table"
            )
    else:
        tables.check_new(table)
    first = last.stop if last is not None else max(sight.floor, sight.first, start or 0)
    stop = sight.next if until is None else min(until, sight.next)
    if first >= stop:
        return Backfilled(job, table.path, 0, 0, first, stop - 1, stop - 1)
    rows = function(frame(first, stop))
    shape = Shape(rows.schema.json())
    if last is not None and shape.schema != last.schema:
        raise BadInput(f"{name} gives other columns than {table.path} has; nothing was written, name another table")
    run = f"{work.clock.now_us():016x}"
    footer = Footer(sight.topic, sight.epoch, first, stop, run, shape.schema, shape.told, transform=name)
    target = writing.Target(table.path, table.format, shape, footer, work.disk)
    work.step("write files")
    answers = frames.answers(rows, partial(writing.of_frame, target, first, stop), _answers(table.path, work.disk))
    files = [msgspec.json.decode(said, type=DataFile) for said in answers]
    made = Commit(
        sight.topic,
        sight.epoch,
        first,
        stop,
        tuple(files),
        shape.schema,
        shape.told,
        transform=name,
        ts_ms=work.clock.now_us() // 1000,
    )
    work.step("commit")
    table.commit(made)
    return Backfilled(job, table.path, made.rows, 1, first, stop - 1, stop - 1, made.rows)


def _answers(path: str, disk: Disk) -> str:
    own = join(path, tables.OWN)
    disk.make_dir(own)
    return join(own, "answers")
