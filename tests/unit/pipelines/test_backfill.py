"""Backfill into a topic: every chunk once, whatever ends the process and however long ago that was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa
import pytest
from tests.unit.pipelines.test_export import Killed, Killer
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog.addresses import Location
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, Damaged, GapFound, NotEmpty, NotFound, Unavailable
from tidelog.pipelines import backfill_job
from tidelog.pipelines.backfill_job import BackfillRequest, BackfillTarget, JobInput, Publisher, StagedJob, open_target
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.interface import OnStep

ROWS = 23
GIVEN = JobInput("x", "y")


def rows(count: int = ROWS) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "data": [b"row %d" % number for number in range(count)],
            "json": [False] * count,
            "tag": [f"t{number}" for number in range(count)],
            "node": [None] * count,
            "meta": [
                None if number % 2 else json.dumps({"n": number} if number % 4 else {}) for number in range(count)
            ],
        },
        schema=backfill_job.STAGED_SCHEMA,
    )


def ensure_topic(target: BackfillTarget) -> tuple[int, int]:
    state = target.database.topic("orders").state()
    return state.epoch, state.head_seq


class BackfillEnv:
    def __init__(self, root: Path, kind: Literal["path", "server"]) -> None:
        self.root, self.kind = root, kind
        self.data, self.work = str(root / "data"), str(root / "work")

    @contextmanager
    def sink(self) -> Iterator[BackfillTarget]:
        if self.kind == "path":
            with open_target(Location(self.data)) as door:
                yield door
        else:
            with run_server(self.data) as (_, address), open_target(Location(address)) as server:
                yield server

    def run(
        self, sink: BackfillTarget, step: OnStep = interface.no_step, *, job: str = "old"
    ) -> backfill_job.PublishProgress:
        disk = PosixDisk()
        publisher = Publisher(disk, self.work, sink, step)
        stage = publisher.load_stage()
        if stage is None:
            epoch, head = ensure_topic(sink)
            publisher.prepare_stage()
            files = [
                backfill_job.stage_batches(disk, self.work, part, 0, [rows().slice(part * 12, 12)]) for part in (0, 1)
            ]
            stage = StagedJob(job, "orders", epoch, head, tuple(files), id=f"{SystemClock().now_us():016x}")
            publisher.save_stage(stage)
        return publisher.publish(stage)

    def found(self) -> list[bytes]:
        with tidelog.open(self.data, read_only=True) as engine:
            datas: list[bytes] = engine.topic("orders", create=False).to_arrow()["data"].to_pylist()
            return [data for data in datas if data.startswith(b"row")]


@pytest.fixture(params=["path", "server"])
def env(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackfillEnv:
    monkeypatch.setattr(backfill_job, "CHUNK_ROWS", 5)
    return BackfillEnv(tmp_path, request.param)


EXPECTED = [b"row %d" % number for number in range(ROWS)]


def test_every_step_may_be_the_last(env: BackfillEnv) -> None:
    """Method: end the job at its nth step, with records of others in between, and take it up again, for all n. What is
    written down beside the topic is thrown away half of the time: marks in the records are enough."""
    with env.sink() as door:
        counting = Killer()
        env.run(door, counting)
    assert env.found() == EXPECTED
    assert len(counting.steps) == 2 + 2 * 6, "six chunks: 5, 5, 2 and 5, 5, 1 rows"
    for at in range(1, len(counting.steps) + 1):
        again = BackfillEnv(env.root / str(at), env.kind)
        with again.sink() as door:
            ensure_topic(door)
            door.append("orders", rows(1).set_column(0, "data", pa.array([b"other"])), "k")
            with pytest.raises(Killed):
                again.run(door, Killer(at))
            door.append("orders", rows(1).set_column(0, "data", pa.array([b"other"])), "l")
        if at % 2:
            (Path(again.work) / backfill_job.PUBLISHED_FILE).unlink(missing_ok=True)
        with again.sink() as door:
            again.run(door)
            again.run(door)
        assert again.found() == EXPECTED, (at, counting.steps[at - 1])


def test_a_mark_stands_beside_what_is_there() -> None:
    marked = backfill_job.add_mark(rows(5), 'jo"b/3')
    found = [json.loads(meta) for meta in marked.column("meta").to_pylist()]
    mark = {backfill_job.MARK_KEY: 'jo"b/3'}
    assert found == [mark, mark, {**mark, "n": 2}, mark, mark]


def test_a_job_whose_directory_is_gone_does_not_begin_anew(env: BackfillEnv) -> None:
    with env.sink() as door:
        env.run(door)
        before = backfill_job.find_published(door.location, "orders", "old", 0)
        assert before == backfill_job.PublishProgress(6, ROWS)
        assert backfill_job.find_published(door.location, "orders", "ol", 0).chunks == 0, "another job"


def test_the_settings_of_an_existing_topic_stay(env: BackfillEnv) -> None:
    """A job into a topic of a server set all of its settings to their defaults."""
    with tidelog.open(env.data) as engine:
        engine.topic("orders", cap_records=1_000, durability="fsync")
    with env.sink() as door:
        env.run(door)
    with tidelog.open(env.data, read_only=True) as engine:
        config = engine.topic("orders", create=False).config
    assert (config.cap_records, config.durability) == (1_000, "fsync")
    assert env.found() == EXPECTED


def test_what_is_refused(tmp_path: Path) -> None:
    from tidelog.pipelines.backfill_job import RowSource, backfill_topic
    from tidelog.pipelines.export_job import JobContext

    env = BackfillEnv(tmp_path, "path")
    from tests.unit.pipelines.helpers import InlineRunner

    work = JobContext(InlineRunner(), PosixDisk(), SystemClock())

    def never() -> RowSource:
        raise AssertionError("nothing is staged again")

    def request(job: str, work_dir: str = env.work) -> BackfillRequest:
        return BackfillRequest(job, "orders", GIVEN, None, work_dir)

    with env.sink() as door:
        env.run(door)
        with pytest.raises(BadInput, match="without a /"):
            backfill_topic(request("a/b"), never, door, work)
        with pytest.raises(BadInput, match="belongs to job 'old' into 'orders'"):
            backfill_topic(request("new"), never, door, work)
        with pytest.raises(NotEmpty, match=r"job 'old' has written \d chunks into orders and nothing is left"):
            backfill_topic(
                request("old", str(tmp_path / "w")), lambda: RowSource(lambda: pytest.fail("read")), door, work
            )
        assert backfill_topic(request("old"), never, door, work).rows == ROWS
        (Path(env.work) / backfill_job.PUBLISHED_FILE).unlink()
        staged = sorted(Path(env.work).glob("stage-*.parquet"))[1]
        staged.write_bytes(b"")
        with pytest.raises(Damaged, match="cannot be read"):
            env.run(door)
    with tidelog.open(env.data) as engine:
        engine.drop("orders")
    with env.sink() as door, pytest.raises(GapFound, match="dropped and made again since job 'old' began"):
        env.run(door)


def flagged(*values: bytes, said: list[bool]) -> pa.RecordBatch:
    nothing = [None] * len(values)
    columns = {"data": list(values), "json": said, "tag": nothing, "node": nothing, "meta": nothing}
    return pa.RecordBatch.from_pydict(columns, schema=backfill_job.STAGED_SCHEMA)


def test_what_is_json_stays_json_and_bytes_stay_bytes(env: BackfillEnv) -> None:
    given = flagged(*(b"%d" % number for number in range(13)), said=[number % 3 == 1 for number in range(13)])
    disk = PosixDisk()
    with env.sink() as door:
        publisher = Publisher(disk, env.work, door)
        publisher.prepare_stage()
        staged = backfill_job.stage_batches(disk, env.work, 0, 0, [given], has_json_flags=True)
        stage = StagedJob("old", "orders", *ensure_topic(door), (staged,))
        publisher.save_stage(stage)
        assert publisher.publish(stage) == backfill_job.PublishProgress(3, 13)
    with tidelog.open(env.data, read_only=True) as engine:
        found = [record.data for record in engine.topic("orders", create=False).read(0).records]
    assert found == [number if number % 3 == 1 else b"%d" % number for number in range(13)]


@pytest.mark.parametrize("text", [b"{", b"", b"1 2", b'"\xff"', b"[" * 100_000])
def test_what_says_json_and_is_none_is_refused_before_anything_is_written(tmp_path: Path, text: bytes) -> None:
    """A topic would refuse its chunk only, with those before it written and the same end at every new try."""
    work = str(tmp_path / "work")
    PosixDisk().make_dir(work)
    good = flagged(b"1", text, said=[True, False])
    assert backfill_job.stage_batches(PosixDisk(), work, 0, 0, [good], has_json_flags=True).rows == 2
    with pytest.raises(BadInput, match=r"a row says is_json and its data is .*; nothing was written\. A function"):
        backfill_job.stage_batches(PosixDisk(), work, 1, 0, [good, flagged(text, said=[True])], has_json_flags=True)
    assert [path.name for path in Path(work).iterdir()] == ["stage-00000-0.parquet"]


def test_chunks_are_cut_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill_job, "CHUNK_ROWS", 3)
    monkeypatch.setattr(backfill_job, "CHUNK_BYTES", 10)
    batch = pa.RecordBatch.from_pydict({"data": [b"123", b"123", b"123", b"1234567", b"12345678901", b"1", b""]})
    assert [each.num_rows for each in backfill_job.split_chunks(batch)] == [3, 1, 1, 2]
    assert [each.num_rows for each in backfill_job.split_chunks(batch.slice(2, 3))] == [2, 1]
    assert list(backfill_job.split_chunks(batch.slice(0, 0))) == []


def test_other_input_under_a_known_name_is_refused(tmp_path: Path) -> None:
    """The same input again is a job that has nothing left to do; any other is not what the name stands for."""
    from tests.unit.pipelines.helpers import InlineRunner

    from tidelog.pipelines.backfill_job import RowSource, backfill_topic
    from tidelog.pipelines.export_job import JobContext

    env, work = BackfillEnv(tmp_path, "path"), JobContext(InlineRunner(), PosixDisk(), SystemClock())
    given = JobInput("/in", "/out", first=3, function="shop:by_day")
    disk = PosixDisk()
    with env.sink() as door:
        epoch, head = ensure_topic(door)
        publisher = Publisher(disk, env.work, door)
        publisher.prepare_stage()
        staged = backfill_job.stage_batches(disk, env.work, 0, 0, [rows()])
        publisher.save_stage(StagedJob("old", "orders", epoch, head, (staged,), input=given, content="a"))

        def run(given: JobInput, content: str | None = "a") -> backfill_job.Backfilled:
            def source() -> RowSource:
                if content is None:
                    raise NotFound("it is gone")
                return RowSource(lambda: pytest.fail("read"), content=content)

            return backfill_topic(BackfillRequest("old", "orders", given, None, env.work), source, door, work)

        with pytest.raises(
            BadInput, match=r"source '/other', and before '/in'\); nothing was written. Give the new input"
        ):
            run(msgspec.structs.replace(given, source="/other"))
        assert run(given, "b").written == ROWS, "it goes on with what it staged"
        assert (run(given).rows, run(given).written) == (ROWS, 0)
        assert run(given, None).written == 0, "the source may be gone by then"
        for changed in ({"target": "/o"}, {"first": None}, {"function": None}, {"from_topic": "a"}, {"format": "csv"}):
            with pytest.raises(BadInput, match="is known with other input"):
                run(msgspec.structs.replace(given, **changed))
        with pytest.raises(BadInput, match=r"wrote all that /in held when it ran, and that has changed since"):
            run(given, "b")
    assert env.found() == EXPECTED


def test_staged_files_that_the_driver_does_not_see(tmp_path: Path) -> None:
    env, disk = BackfillEnv(tmp_path, "path"), PosixDisk()
    with env.sink() as door:
        publisher = Publisher(disk, env.work, door)
        publisher.prepare_stage()
        staged = backfill_job.stage_batches(disk, env.work, 0, 0, [rows()])
        path = Path(env.work) / staged.name
        content = path.read_bytes()
        for harm in (path.unlink, lambda: path.write_bytes(content[:-1])):
            harm()
            with pytest.raises(Unavailable, match="disks that the driver does not see; nothing was written"):
                publisher.save_stage(StagedJob("old", "orders", 1, 0, (staged,)))
            assert publisher.load_stage() is None


def test_a_job_that_is_begun_anew_is_written_anew(env: BackfillEnv) -> None:
    """The way that errors name: remove the working directory and delete what the job wrote. The topic still knows the
    keys of its writes then, and has nothing of them."""
    with env.sink() as door:
        env.run(door)
    with tidelog.open(env.data) as engine:
        engine.topic("orders").delete(before_seq=ROWS + 1)
    shutil.rmtree(env.work)
    with env.sink() as door:
        env.run(door)
    assert env.found() == EXPECTED
