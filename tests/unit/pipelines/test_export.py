"""Export: table = log after every way to stop it, and what it refuses. No JVM: tasks run here, pickled."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.unit.pipelines.world import FORMATS, SMALL, Bench, rows_of
from tests.unit.spark.world import serving

from tidelog.errors import BadInput, Damaged, DiskFull, GapFound, Locked, NotFound, TopicNotFound
from tidelog.pipelines import commits, files, jobs
from tidelog.pipelines.exporting import Export
from tidelog.pipelines.sizing import Sizes, decide, until
from tidelog.pipelines.tables import Format
from tidelog.spark import options as reading
from tidelog.testing import ManualClock, SimDisk


class Killed(BaseException):
    """The process ends here."""


class Killer:
    """Ends the process at the nth step, or counts them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.steps = at, list[str]()

    def __call__(self, step: str) -> None:
        self.steps.append(step)
        if len(self.steps) == self.at:
            raise Killed(step)


@pytest.fixture(params=FORMATS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path, request.param)


def test_a_table_is_its_topic(bench: Bench) -> None:
    bench.fill(300)
    done = bench.once()
    bench.check()
    assert (done.first, done.stop, done.rows) == (1, 301, 300)
    assert done.commits > 1
    assert done.files > done.commits, "commits of several files"
    assert done.largest < 3 * SMALL.file_bytes
    again = bench.once()
    assert (again.commits, again.rows, again.stop) == (0, 0, 301)
    bench.fill(50, start=300)
    assert bench.once().rows == 50
    bench.check()


def test_a_commit_says_all_that_the_next_one_needs(bench: Bench) -> None:
    bench.fill(100)
    bench.once()
    with bench.opened(write=False) as table:
        last, made = table.last(), table.commits()
    assert last is not None
    assert (last.topic, last.epoch, last.stop, last.rows) == (
        "orders",
        1,
        101,
        sum(each.rows for each in made[-1].files),
    )
    assert [each.first for each in made] == [1, *(each.stop for each in made[:-1])]
    if bench.format == "delta":
        info = DeltaTable(bench.table).history(1)[0]
        assert json.loads(info["tidelog"])["totals"]["rows"] == last.rows
        assert DeltaTable(bench.table).transaction_version("tidelog/orders/1") == 101


def test_every_step_may_be_the_last(bench: Bench, tmp_path: Path) -> None:
    """Method: count the steps of an export, then end one at each of them; before the next run no reader may see a row
    twice, and after it the table is the log."""
    bench.fill(60)
    bench.sizes = Sizes(file_bytes=1_200, age_ms=1_000, commit_bytes=2_400)
    counting = Killer()
    bench.step, bench.table = counting, str(tmp_path / "count")
    bench.once()
    steps = len(counting.steps)
    assert steps > 15, "several commits of several steps"
    for at in range(1, steps + 1):
        bench.table, bench.step = str(tmp_path / f"table-{at}"), Killer(at)
        with pytest.raises(Killed) as caught:
            bench.once()
        _no_doubles(bench, str(caught.value))
        bench.step = lambda _: None
        bench.once()
        bench.check()
        assert not bench.reconcile().differing


def _no_doubles(bench: Bench, step: str) -> None:
    if bench.format == "delta" and not DeltaTable.is_deltatable(bench.table):
        return
    if bench.format == "parquet" and not bench.files():
        return
    rows = bench.table_rows()
    assert len(rows) == len({row[0] for row in rows}), step
    assert set(rows) <= set(bench.log_rows()), step


def _forget_newest(bench: Bench) -> None:
    log = Path(bench.table) / ("_delta_log" if bench.format == "delta" else "_tidelog/log")
    sorted(log.glob("*.json"))[-1].unlink()


def _forget_all(bench: Bench) -> None:
    shutil.rmtree(Path(bench.table) / "_tidelog")


def _forget_two(bench: Bench) -> None:
    _forget_newest(bench)
    _forget_newest(bench)


@pytest.mark.parametrize("forget", [_forget_newest, _forget_all, _forget_two])
def test_what_is_forgotten_is_found_again_or_made_again(bench: Bench, forget: Callable[[Bench], None]) -> None:
    bench.fill(100)
    bench.sizes = Sizes(file_bytes=1_200, age_ms=1_000, commit_bytes=2_400)
    bench.once()
    forget(bench)
    bench.once()
    bench.check()
    bench.fill(30, start=100)
    bench.once()
    bench.check()
    assert bench.reconcile().equal


def test_a_log_that_is_gone_is_found_in_the_files(tmp_path: Path) -> None:
    """Nothing is written a second time: footers say which range a file is."""
    bench = Bench(tmp_path)
    bench.fill(100)
    bench.once()
    before = bench.files()
    _forget_all(bench)
    assert bench.once().rows == 0
    assert bench.files() == before
    bench.files()[2].unlink()
    _forget_all(bench)
    done = bench.once()
    assert 0 < done.rows < 100, "what follows the file that is missing is made again, what lies before it is not"
    bench.check()


def test_a_repair_that_was_half_done_is_not_seen_twice_when_the_log_is_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.fill(100)
    bench.once()
    file = bench.files()[1]
    rows, footer = pq.read_table(file), pq.read_metadata(file).metadata
    with pq.ParquetWriter(file, rows.schema) as writer:
        writer.write_table(rows.slice(1))
        writer.add_key_value_metadata({b"tidelog": footer[b"tidelog"]})
    kept = {path.name: path.read_bytes() for path in bench.files()}
    assert bench.reconcile(repair=True).repaired == 1
    (gone,) = set(kept) - {path.name for path in bench.files()}
    (file.parent / gone).write_bytes(kept[gone])
    _forget_all(bench)
    bench.once()
    bench.check()


def test_typed_columns_and_quarantine(bench: Bench) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    from tidelog.pipelines import columns

    bench.fill(60)
    with bench.engine() as engine:
        engine.topic("orders").append([b"not json", {"n": "many"}, {"n": 1, "more": 2}])
    fields = StructType([StructField("n", LongType())])
    bench.shape = columns.shape_of(fields, "quarantine")
    done = bench.once()
    assert (done.rows, done.quarantined) == (0, 63), "every record has a field text that the schema does not name"
    assert bench.reconcile().equal
    shutil.rmtree(bench.table)
    fields = StructType.fromJson(json.loads(StructType([*fields.fields, StructField("text", LongType())]).json()))
    fields["text"].dataType = __import__("pyspark.sql.types").sql.types.StringType()
    bench.shape = columns.shape_of(fields, "quarantine")
    done = bench.once()
    assert (done.rows, done.quarantined) == (60, 3)
    assert sorted(bench.read()["n"].to_pylist()) == list(range(60))
    found = bench.reconcile()
    assert (found.equal, found.quarantined) == (True, 3)
    for path in (Path(bench.table) / "_quarantine").iterdir():
        path.unlink()
    assert not bench.reconcile().equal, "quarantine is a part of it"
    shutil.rmtree(bench.table)
    bench.shape = columns.shape_of(fields, "fail")
    with pytest.raises(BadInput, match=r"in seq 61 data is .*not a JSON object; nothing was written"):
        bench.once()


@pytest.mark.parametrize("name", ["seq", "data", "is_json"])
def test_a_field_whose_name_is_taken_is_told_its_other_one(name: str) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from tidelog.pipelines import columns

    with pytest.raises(BadInput, match=f"a field '{name}', .* of ours; nothing was written, call it 'data_{name}'"):
        columns.shape_of(StructType([StructField(name, StringType())]))
    assert columns.shape_of(StructType([StructField(f"data_{name}", StringType())])).fields == (f"data_{name}",)


def test_holes_and_deletes_are_not_rows(bench: Bench) -> None:
    bench.fill(100)
    with bench.engine() as engine:
        engine.topic("orders").delete(before_seq=41)
        engine.topic("orders").delete(seqs=[50, 99, 100])
    bench.once()
    bench.check()
    assert bench.reconcile().equal


def test_a_topic_without_records_is_an_empty_table(bench: Bench) -> None:
    with bench.engine() as engine:
        engine.topic("orders").append([b"x"])
        engine.topic("orders").delete(seqs=[1])
    bench.once()
    assert bench.table_rows() == []
    bench.fill(20)
    bench.once()
    bench.check()


def test_from_a_server(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with serving(bench.data, segment_events=40) as (engine, address):
        for number in range(10):
            engine.topic("orders").append([{"n": each} for each in range(number * 10, number * 10 + 10)], tag="a")
        engine.checkpoint()
        engine.topic("orders").append([b"tail"])
        options = reading.read({"server": address, "subscribe": "orders"})
        with bench.opened() as table:
            job = Export(options, table, lambda _: bench.shape, bench.work(), SMALL)
            assert job.once().rows == 101
            job.close()
    bench.check()


# ── when ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("seqs", "pending", "oldest", "once", "expected"),
    [
        (0, 0, None, True, "nothing"),
        (5, 10, 0, True, "once"),
        (5, 100, 0, False, "bytes"),
        (5, 99, 999, False, "wait"),
        (5, 1, 1000, False, "age"),
        (5, 1, None, False, "wait"),
    ],
)
def test_when_to_commit(seqs: int, pending: int, oldest: int | None, once: bool, expected: str) -> None:
    sizes = Sizes(file_bytes=100, age_ms=1000, commit_bytes=1000)
    assert decide(sizes, seqs=seqs, pending_bytes=pending, oldest_ms=oldest, once=once) == expected


@pytest.mark.parametrize(
    ("head", "stop"), [(11, 11), (101, 51), (60, 60), (61, 51), (52, 52), (2, 2)], ids=lambda seq: f"{seq}"
)
def test_what_would_be_a_crumb_goes_with_the_commit_before_it(head: int, stop: int) -> None:
    sizes = Sizes(file_bytes=100, age_ms=1, commit_bytes=500)
    assert until(sizes, 1, head, lambda seq: 10 * (seq - 1)) == stop


def test_going_on_waits_for_bytes_or_age(bench: Bench) -> None:
    clock = ManualClock()
    bench.clock = clock
    bench.sizes = Sizes(file_bytes=1 << 20, age_ms=60_000, commit_bytes=1 << 20)
    bench.fill(40)  # at the machine's own time, which is later than the clock's
    with bench.export() as job:
        assert job.turn(once=False).reason == "wait"
        behind_us = _newest_us(bench) - clock.now_us()
        clock.tick(behind_us // 1000 + 59_000)
        assert job.turn(once=False).reason == "wait"
        clock.tick(2_000)
        assert job.turn(once=False).reason == "age"
        assert job.turn(once=False).reason == "nothing"
        bench.fill(20, start=40)
        clock.tick(120_000)
        asked: list[bool] = []

        def enough(idle: bool) -> bool:
            asked.append(idle)
            return len(asked) == 3

        assert job.on(enough).rows == 60
        assert asked == [False, True, True]
    bench.check()


def _newest_us(bench: Bench) -> int:
    import tidelog

    with tidelog.open(bench.data, read_only=True) as engine:
        found: int = engine.topic("orders", create=False).to_arrow()["ts"].cast("int64").to_pylist()[-1]
        return found


# ── what it refuses ───────────────────────────────────────────────────────────────────────────────


def test_the_table_of_another_topic(bench: Bench) -> None:
    bench.fill(20)
    bench.once()
    with bench.engine() as engine:
        engine.topic("others").append([b"x"])
    with bench.opened() as table:
        options = reading.read({"path": bench.data, "subscribe": "others"})
        job = Export(options, table, lambda _: bench.shape, bench.work(), SMALL)
        with pytest.raises(BadInput, match="is the table of topic 'orders', not of 'others'; nothing was written"):
            job.once()
        job.close()


def test_the_table_of_a_topic_that_was_made_again(bench: Bench) -> None:
    bench.fill(20)
    bench.once()
    with bench.engine() as engine:
        engine.drop("orders")
    bench.fill(30)
    with pytest.raises(GapFound, match=r"dropped and made again since .* \(epoch 1 there, \d now\)"):
        bench.once()
    with pytest.raises(GapFound, match="dropped and made again"):
        bench.reconcile()


def test_a_table_that_is_ahead_of_its_topic(tmp_path: Path) -> None:
    """As when the topic's directory was put back from a copy."""
    bench = Bench(tmp_path)
    bench.fill(20)
    shutil.copytree(bench.data, tmp_path / "copy")
    bench.fill(20, start=20)
    bench.once()
    bench.data = str(tmp_path / "copy")
    with pytest.raises(BadInput, match="ends at seq 40 and orders at 20: these are not the records"):
        bench.once()


def test_records_that_are_lost_stop_it(bench: Bench) -> None:
    bench.fill(40)
    bench.once()
    with bench.engine() as engine:
        engine.topic("orders", cap_records=10)
    bench.fill(40, start=40)
    with pytest.raises(GapFound, match=r"seqs 41 to 70 are lost \(cap\); nothing was written"):
        bench.once()
    assert len(bench.table_rows()) == 40
    assert bench.once(onGap="skip").rows == 10
    assert [row[0] for row in bench.table_rows()] == [*range(1, 41), *range(71, 81)]
    found = bench.reconcile()
    assert (found.equal, found.alone) == (True, 40)


def test_two_writers(bench: Bench) -> None:
    bench.fill(20)
    with bench.export(), pytest.raises(Locked, match="is being written by another process"):
        bench.once()


def test_another_machine_that_wrote_meanwhile(tmp_path: Path) -> None:
    """A lock is of one machine; the table's own transactions are not."""
    bench = Bench(tmp_path, "delta")
    bench.fill(60)
    bench.sizes = Sizes(file_bytes=1_200, age_ms=1_000, commit_bytes=2_400)
    for when in ("commit", "write the commit"):
        other = Bench(tmp_path, "delta")
        bench.fill(20, start=60)

        def step(name: str, when: str = when, other: Bench = other) -> None:
            if name == when:
                shutil.rmtree(Path(bench.table) / "_tidelog")  # the lock of the first is none to the second
                other.once()

        bench.step = step
        with pytest.raises(Locked, match=r"meanwhile.*nothing was committed"):
            bench.once()
        bench.check()


@pytest.mark.parametrize("format", FORMATS)
def test_a_place_or_a_topic_that_is_not_there(tmp_path: Path, format: Format) -> None:
    bench = Bench(tmp_path, format)
    with pytest.raises(NotFound):
        jobs.export(str(tmp_path / "nowhere"), "orders", bench.table)
    bench.fill(10)
    with pytest.raises(TopicNotFound, match="there is no topic 'order'"):
        jobs.export(bench.data, "order", bench.table)
    assert not Path(bench.table).exists(), "nothing was made"
    with pytest.raises(NotFound, match="there is no table at"):
        bench.reconcile()
    Path(bench.table).write_text("")
    with pytest.raises(BadInput, match="is a file, a table is a directory"):
        bench.once()


def test_a_table_of_the_other_format(bench: Bench) -> None:
    bench.fill(10)
    bench.once()
    bench.format = "delta" if bench.format == "parquet" else "parquet"
    with pytest.raises(BadInput, match=r"is a \w+ table, not a \w+ one; nothing was changed"):
        bench.once()


def test_a_table_that_somebody_else_has_made(bench: Bench) -> None:
    bench.fill(20)
    rows = pa.table({"seq": [1, 2]})
    if bench.format == "delta":
        write_deltalake(bench.table, rows)
    else:
        Path(bench.table).mkdir()
        pq.write_table(rows, Path(bench.table) / "theirs.parquet")
    with pytest.raises(BadInput, match="and no commit of an export; nothing was written"):
        bench.once()
    assert bench.read().num_rows == 2


def test_a_commit_that_does_not_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.fill(40)
    bench.once()
    log = sorted((Path(bench.table) / "_tidelog/log").glob("*.json"))[-1]
    said = log.read_text()
    log.write_text(said[:-10])
    with pytest.raises(Damaged, match="is not a commit of tidelog"):
        bench.once()
    log.write_text(said.replace('"hash":', '"hash":1', 1))
    with pytest.raises(Damaged, match="its sums are not those of its files"):
        bench.once()
    log.write_text(said.replace('"format":1', '"format":3'))
    with pytest.raises(Exception, match="format version 3"):
        bench.once()


@pytest.mark.parametrize("file", ["part", "json"])
def test_a_disk_that_is_full(tmp_path: Path, file: str) -> None:
    bench = Bench(tmp_path, table="table")
    bench.fill(60)
    bench.disk, bench.pickled = disk, _ = SimDisk(), False
    disk.fail("write", at=2 if file == "part" else 1, times=None, path=file, error=errno.ENOSPC)
    with pytest.raises(DiskFull, match="nothing was committed, make room and run it again"):
        bench.once()
    disk.heal()
    bench.once()
    assert _sim_rows(disk) == bench.log_rows()


def _sim_rows(disk: SimDisk) -> list[object]:
    tables = [
        pq.read_table(pa.BufferReader(content))
        for path, content in disk.tree().items()
        if path.startswith("table/part-")
    ]
    return list(rows_of(pa.concat_tables(tables))) if tables else []


def test_a_power_cut_at_every_operation_loses_and_doubles_nothing(
    tmp_path: Path, tell: Callable[[str, int], None]
) -> None:
    """Method: export onto a simulated disk; before every operation look at images that a power cut could leave: what a
    reader of the directory sees has no row twice and none that is not the log's, and the next run makes it the log."""
    bench = Bench(tmp_path, table="table")
    bench.fill(40)
    bench.sizes = Sizes(file_bytes=1_000, age_ms=1_000, commit_bytes=2_000)
    expected, looked = bench.log_rows(), 0
    bench.disk, bench.pickled = disk, _ = SimDisk(), False
    images: dict[bytes, tuple[int, str, SimDisk]] = {}

    def look(*_: object) -> None:
        for label, image in disk.images(("none", "all", "all_but_one", "directories"), limit=12):
            images.setdefault(image.digest(), (disk.ops, label, image))

    disk.on_op = look
    bench.once()
    disk.on_op = None
    for ops, label, image in images.values():
        seen = _sim_rows(image)
        assert len(seen) == len(set(seen)), (ops, label)
        assert set(seen) <= set(expected), (ops, label)
        bench.disk = image
        bench.once()
        assert _sim_rows(image) == expected, (ops, label)
        looked += 1
    tell("crash images of an export", looked)
    assert looked > 50


def test_rows_of_a_file_are_read_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GROUP_BYTES", 500)
    bench = Bench(tmp_path)
    bench.fill(100)
    bench.sizes = Sizes()
    bench.once()
    (file,) = bench.files()
    found = [
        seq for batch in files.batches(bench.disk, bench.table, [file.name], 30, 52) for seq in batch["seq"].to_pylist()
    ]
    assert found == list(range(30, 52))


def test_words_of_a_commit_are_frozen() -> None:
    """It is kept in tables, so it never changes."""
    file = commits.DataFile("part-1.parquet", 1, 3, 2, 100, 7)
    made = commits.Commit("orders", 1, 1, 3, (file,), "{}", "{}", ts_ms=5)
    said = commits.encode(made)
    assert said == (
        b'{"topic":"orders","epoch":1,"first":1,"stop":3,"files":[{"name":"part-1.parquet","first":1,"stop":3,"rows":2,'
        b'"bytes":100,"hash":7,"bad":0,"bad_name":null}],"schema":"{}","shape":"{}","number":0,"removed":[],'
        b'"repair":false,"transform":null,"ts_ms":5,"format":1,"totals":{"rows":2,"quarantined":0,'
        b'"hash":"0000000000000007"}}'
    )
    assert commits.decode(said, "here") == made
