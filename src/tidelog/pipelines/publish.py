"""[shell] Staged rows into a topic, chunk by chunk, each of them once.

    work/
      stage.json              what is to be written: files, rows, the topic as it was when the job began
      stage-00003-….parquet   rows; a row group is a chunk, and a chunk is one atomic write
      published.json          how many chunks were written, and where the last one lies

Every record of a chunk carries the mark `{"_backfill": "<job>/<stage id>/<chunk>"}` in its meta, because the key of a
write is remembered for minutes and a job may be taken up again after days. Whoever takes it up looks for marks behind
the last chunk that is on record: a chunk that is marked there was written, though nobody lived to say so. The id is
the time of the staging: a job that is begun anew after its records were deleted has other keys, because the topic
still knows the old ones and would write nothing.

`Door` is the seam to what writes: a directory, of which this process is then the writer, or a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from tidelog import engine as topics
from tidelog.client.http import Client, topic_path
from tidelog.disk.atomic import read_all, replace
from tidelog.disk.seam import Disk, join
from tidelog.errors import Damaged, GapFound
from tidelog.pipelines import files, tables
from tidelog.pipelines.tables import Steps
from tidelog.spark import options as reading
from tidelog.spark import places, plan
from tidelog.spark.plan import Range
from tidelog.spark.read import Reading
from tidelog.spark.where import Where

MARK: Final = "_backfill"
STAGE: Final = "stage.json"
PUBLISHED: Final = "published.json"
_ARROW: Final = "application/vnd.apache.arrow.stream"
_MARKED: Final = StructType([StructField("seq", LongType()), StructField("meta", MapType(StringType(), StringType()))])


class Staged(msgspec.Struct, frozen=True):
    name: str
    rows: int
    chunks: int
    hash: int
    bytes: int | None = None


class Input(msgspec.Struct, frozen=True):
    """What a job was given. A job is known by its name, and is the same job only with the same input and target."""

    source: str
    target: str
    from_topic: str | None = None
    format: str | None = None
    first: int | None = None
    until: int | None = None
    function: str | None = None

    def other(self, given: Input) -> str | None:
        """What is not the same in another one, in words."""
        for name in self.__struct_fields__:
            here, there = getattr(self, name), getattr(given, name)
            if here != there:
                return f"{name} {there!r:.200}, and before {here!r:.200}"
        return None


class Stage(msgspec.Struct, frozen=True):
    job: str
    topic: str
    epoch: int
    head: int  # of the topic, before anything was written
    files: tuple[Staged, ...]
    join_seq: int | None = None  # of the source: what was read ends here, what is live begins behind it
    input: Input | None = None
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


class Published(msgspec.Struct, frozen=True):
    chunks: int
    last_seq: int


class Door(Protocol):
    where: dict[str, str]  # the same place, as options of the source

    def look(self, topic: str) -> tuple[int, int]:
        """Epoch and head of a topic, which is made where there is none."""
        ...

    def put(self, topic: str, batch: pa.RecordBatch, key: str) -> tuple[int, int]:
        """Write a batch as a whole; the first seq and the last one. The key guards against a second try."""
        ...

    def close(self) -> None: ...


class PathDoor:
    def __init__(self, path: str) -> None:
        self.where = {"path": path}
        self._engine = topics.open(path)

    def look(self, topic: str) -> tuple[int, int]:
        found = self._engine.topic(topic)
        return found.epoch, found.head_seq

    def put(self, topic: str, batch: pa.RecordBatch, key: str) -> tuple[int, int]:
        done = self._engine.topic(topic).append_arrow(batch, key=key)
        return done.first_seq, done.last_seq

    def close(self) -> None:
        self._engine.close()


class ServerDoor:
    def __init__(self, server: str, key: str | None) -> None:
        self.where = {"server": server, **({"key": key} if key is not None else {})}
        self._client = Client(server, key=key)

    def look(self, topic: str) -> tuple[int, int]:
        self._client.put(topic_path(topic), {})
        with closing(places.of(reading.read({**self.where, "subscribe": topic}))) as place:
            sight = place.look(topic)
            assert sight is not None, "it was made a moment ago"
            return sight.epoch, sight.next - 1

    def put(self, topic: str, batch: pa.RecordBatch, key: str) -> tuple[int, int]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        headers = {"Content-Type": _ARROW, "Idempotency-Key": key}
        body = sink.getvalue().to_pybytes()
        said = msgspec.json.decode(self._client.request("POST", topic_path(topic), body, again=True, headers=headers))
        return said["first_seq"], said["last_seq"]

    def close(self) -> None:
        self._client.close()


# ── publishing ────────────────────────────────────────────────────────────────────────────────────


class Publisher:
    def __init__(self, disk: Disk, work: str, door: Door, step: Steps = tables.nothing) -> None:
        self._disk, self._work, self._door, self._step = disk, work, door, step
        self.wrote = 0  # rows, by this object

    def stage(self) -> Stage | None:
        """What was staged before; None: nothing yet."""
        content = read_all(self._disk, join(self._work, STAGE))
        return None if content is None else msgspec.json.decode(content, type=Stage)

    def begin(self) -> None:
        """Make room for a stage: what another try left behind before it was whole goes."""
        self._disk.make_dir(self._work)
        for name in self._disk.names(self._work):
            if name.startswith("stage-"):
                self._disk.remove(join(self._work, name))

    def keep(self, stage: Stage) -> None:
        """From here on the staged files are what will be written, whatever happens."""
        for file in stage.files:
            path = join(self._work, file.name)
            found = self._disk.stat(path)
            if found is None or file.bytes not in (None, found.size):
                raise tables.NotStaged(
                    f"{path}, which a task has written, is not there or has another length: executors write to disks "
                    "that the driver does not see; nothing was written, name a --work-dir that all of them see"
                )
        self._disk.sync_dir(self._work)
        self._step("write the stage")
        replace(self._disk, join(self._work, STAGE), msgspec.json.encode(stage))
        self._step("staged")

    def publish(self, stage: Stage, progress: Callable[[int, int], None] | None = None) -> Published:
        """Write every chunk that was not written yet, in order."""
        self._check(stage)
        done = self._done(stage)
        for number, batch in enumerate(self._chunks(stage)):
            if number < done.chunks:
                continue
            key = f"{stage.mark}/{number}"
            self._step("write a chunk")
            _, last = self._door.put(stage.topic, marked(batch, key), f"backfill:{key}")
            self.wrote += batch.num_rows
            self._step("write down the chunk")
            done = Published(number + 1, last)
            replace(self._disk, join(self._work, PUBLISHED), msgspec.json.encode(done))
            if progress is not None:
                progress(done.chunks, stage.chunks)
        return done

    def _check(self, stage: Stage) -> None:
        epoch, _ = self._door.look(stage.topic)
        if epoch != stage.epoch:
            error = GapFound(stage.topic, (1, 1, "recreated", 0, 1, 0))
            error.args = (
                f"{stage.topic} was dropped and made again since job {stage.job!r} began; nothing was written, remove "
                f"{self._work} to begin anew",
            )
            raise error

    def is_finished(self, stage: Stage) -> bool:
        """Whether everything that was staged is on record as written."""
        content = read_all(self._disk, join(self._work, PUBLISHED))
        return not stage.chunks or (
            content is not None and msgspec.json.decode(content, type=Published).chunks >= stage.chunks
        )

    def _done(self, stage: Stage) -> Published:
        content = read_all(self._disk, join(self._work, PUBLISHED))
        known = Published(0, stage.head) if content is None else msgspec.json.decode(content, type=Published)
        found = written(self._door, stage.topic, stage.mark, known.last_seq)
        return max(known, found, key=lambda each: each.chunks)

    def _chunks(self, stage: Stage) -> Iterator[pa.RecordBatch]:
        for file in stage.files:
            found = files.groups(self._disk, join(self._work, file.name))
            count = 0
            for count, batch in enumerate(found, 1):  # noqa: B007
                yield batch
            if count != file.chunks:
                raise Damaged(
                    f"{join(self._work, file.name)} has {count} chunks of {file.chunks}; nothing more was written, "
                    "remove the directory and what the job wrote, and begin anew"
                )


def written(door: Door, topic: str, mark: str, behind: int) -> Published:
    """The last chunk of a stage, or of a job, that a topic holds after the seq `behind`."""
    options = reading.read({**door.where, "subscribe": topic, "onGap": "skip", "columns": "seq,meta"})
    best = Published(0, behind)
    with closing(places.of(options)) as place:
        sight = place.look(topic)
        if sight is None or sight.next <= behind + 1:
            return best
        low = max(behind + 1, sight.floor)
        for split in plan.splits(place, options, [Range(sight, low, sight.next)], Where()):
            for batch in Reading(place, options, _MARKED, Where(), split).batches():
                marks = pc.map_lookup(batch.column("meta"), MARK, "first")
                mine = pc.fill_null(pc.starts_with(marks, f"{mark}/"), False)
                for seq, found in zip(
                    batch.column("seq").filter(mine).to_pylist(), marks.filter(mine).to_pylist(), strict=True
                ):
                    best = max(best, Published(int(found.rpartition("/")[2]) + 1, seq), key=_order)
    return best


def _order(each: Published) -> tuple[int, int]:
    return each.chunks, each.last_seq


def marked(batch: pa.RecordBatch, key: str) -> pa.RecordBatch:
    """Records with the mark of their chunk in their meta, beside whatever is there."""
    meta = batch.column("meta").cast(pa.string())
    mark = f'"{MARK}":{msgspec.json.encode(key).decode()}'
    inner = pc.utf8_slice_codeunits(pc.utf8_trim_whitespace(pc.fill_null(meta, "{}")), 1)
    comma = pc.if_else(pc.equal(pc.utf8_trim_whitespace(inner), "}"), "", ",")
    made = pc.binary_join_element_wise("{" + mark, comma, inner, "")
    at = batch.schema.get_field_index("meta")
    return batch.set_column(at, "meta", made)
