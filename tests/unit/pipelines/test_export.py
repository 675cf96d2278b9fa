"""Export: table = log after every way to stop it, and what it refuses. No JVM: tasks run here, pickled."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.unit.pipelines.helpers import FORMATS, SMALL_SIZES, PipelineHarness, table_rows
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog.engine.config import ColdCompression
from tidelog.errors import BadInput, Damaged, DiskFull, GapFound, Locked, NotFound, TopicNotFound
from tidelog.pipelines import api
from tidelog.pipelines.export_job import ExportJob, Sizes, commit_end, commit_reason
from tidelog.pipelines.table_formats import interface, parquet
from tidelog.pipelines.table_formats.interface import Format
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
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> PipelineHarness:
    return PipelineHarness(tmp_path, request.param)


def test_a_table_is_its_topic(harness: PipelineHarness) -> None:
    harness.fill(300)
    done = harness.export_once()
    harness.check()
    assert (done.first, done.stop, done.rows) == (1, 301, 300)
    assert done.commits > 1
    assert done.files > done.commits, "commits of several files"
    assert done.largest < 3 * SMALL_SIZES.file_bytes
    again = harness.export_once()
    assert (again.commits, again.rows, again.stop) == (0, 0, 301)
    harness.fill(50, start=300)
    assert harness.export_once().rows == 50
    harness.check()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_table_has_the_records_of_cold_segments(
    harness: PipelineHarness, compression: ColdCompression, tmp_path: Path
) -> None:
    harness.fill(300)
    before = harness.log_rows()
    settings: dict[str, Any] = {"threads": False, "segment_events_max": 40, "cold_compression": compression}
    with tidelog.open(harness.data, cold=str(tmp_path / "cold"), hot_retain_segments=0, **settings) as log:
        moved = log.relocate("orders").segments
        assert moved > 2
        assert len(list(Path(harness.data).rglob("seg-*.data"))) < moved
    assert harness.export_once().rows == 300
    assert harness.table_rows() == before
    harness.check()
    assert not harness.reconcile().differing


def test_a_commit_says_all_that_the_next_one_needs(harness: PipelineHarness) -> None:
    harness.fill(100)
    harness.export_once()
    with harness.open_table(write=False) as table:
        last, made = table.last_commit(), table.commits()
    assert last is not None
    assert (last.topic, last.epoch, last.stop, last.rows) == (
        "orders",
        1,
        101,
        sum(each.rows for each in made[-1].files),
    )
    assert [each.first for each in made] == [1, *(each.stop for each in made[:-1])]
    if harness.format == "delta":
        info = DeltaTable(harness.table).history(1)[0]
        assert json.loads(info["tidelog"])["totals"]["rows"] == last.rows
        assert DeltaTable(harness.table).transaction_version("tidelog/orders/1") == 101


def test_every_step_may_be_the_last(harness: PipelineHarness, tmp_path: Path) -> None:
    """Method: count the steps of an export, then end one at each of them; before the next run no reader may see a row
    twice, and after it the table is the log."""
    harness.fill(60)
    harness.sizes = Sizes(file_bytes=1_200, age_ms=1_000, commit_bytes=2_400)
    counting = Killer()
    harness.on_step, harness.table = counting, str(tmp_path / "count")
    harness.export_once()
    steps = len(counting.steps)
    assert steps > 15, "several commits of several steps"
    for at in range(1, steps + 1):
        harness.table, harness.on_step = str(tmp_path / f"table-{at}"), Killer(at)
        with pytest.raises(Killed) as caught:
            harness.export_once()
        _no_doubles(harness, str(caught.value))
        harness.on_step = lambda _: None
        harness.export_once()
        harness.check()
        assert not harness.reconcile().differing


def _no_doubles(harness: PipelineHarness, step: str) -> None:
    if harness.format == "delta" and not DeltaTable.is_deltatable(harness.table):
        return
    if harness.format == "parquet" and not harness.files():
        return
    rows = harness.table_rows()
    assert len(rows) == len({row[0] for row in rows}), step
    assert set(rows) <= set(harness.log_rows()), step


def _forget_newest(harness: PipelineHarness) -> None:
    log = Path(harness.table) / ("_delta_log" if harness.format == "delta" else "_tidelog/log")
    sorted(log.glob("*.json"))[-1].unlink()


def _forget_all(harness: PipelineHarness) -> None:
    shutil.rmtree(Path(harness.table) / "_tidelog")


def _forget_two(harness: PipelineHarness) -> None:
    _forget_newest(harness)
    _forget_newest(harness)


@pytest.mark.parametrize("forget", [_forget_newest, _forget_all, _forget_two])
def test_what_is_forgotten_is_found_again_or_made_again(
    harness: PipelineHarness, forget: Callable[[PipelineHarness], None]
) -> None:
    harness.fill(100)
    harness.sizes = Sizes(file_bytes=1_200, age_ms=1_000, commit_bytes=2_400)
    harness.export_once()
    forget(harness)
    harness.export_once()
    harness.check()
    harness.fill(30, start=100)
    harness.export_once()
    harness.check()
    assert harness.reconcile().equal


def test_a_log_that_is_gone_is_found_in_the_files(tmp_path: Path) -> None:
    """Nothing is written a second time: footers say which range a file is."""
    harness = PipelineHarness(tmp_path)
    harness.fill(100)
    harness.export_once()
    before = harness.files()
    _forget_all(harness)
    assert harness.export_once().rows == 0
    assert harness.files() == before
    harness.files()[2].unlink()
    _forget_all(harness)
    done = harness.export_once()
    assert 0 < done.rows < 100, "what follows the file that is missing is made again, what lies before it is not"
    harness.check()


def test_a_repair_that_was_half_done_is_not_seen_twice_when_the_log_is_gone(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path)
    harness.fill(100)
    harness.export_once()
    file = harness.files()[1]
    rows, footer = pq.read_table(file), pq.read_metadata(file).metadata
    with pq.ParquetWriter(file, rows.schema) as writer:
        writer.write_table(rows.slice(1))
        writer.add_key_value_metadata({b"tidelog": footer[b"tidelog"]})
    kept = {path.name: path.read_bytes() for path in harness.files()}
    assert harness.reconcile(repair=True).repaired == 1
    (gone,) = set(kept) - {path.name for path in harness.files()}
    (file.parent / gone).write_bytes(kept[gone])
    _forget_all(harness)
    harness.export_once()
    harness.check()


def test_typed_columns_and_quarantine(harness: PipelineHarness) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    from tidelog.pipelines import record_mapping

    harness.fill(60)
    with harness.engine() as engine:
        engine.topic("orders").append([b"not json", {"n": "many"}, {"n": 1, "more": 2}])
    fields = StructType([StructField("n", LongType())])
    harness.mapping = record_mapping.new_mapping(fields, "quarantine")
    done = harness.export_once()
    assert (done.rows, done.quarantined) == (0, 63), "every record has a field text that the schema does not name"
    assert harness.reconcile().equal
    shutil.rmtree(harness.table)
    fields = StructType.fromJson(json.loads(StructType([*fields.fields, StructField("text", LongType())]).json()))
    fields["text"].dataType = __import__("pyspark.sql.types").sql.types.StringType()
    harness.mapping = record_mapping.new_mapping(fields, "quarantine")
    done = harness.export_once()
    assert (done.rows, done.quarantined) == (60, 3)
    assert sorted(harness.read_table()["n"].to_pylist()) == list(range(60))
    found = harness.reconcile()
    assert (found.equal, found.quarantined) == (True, 3)
    for path in (Path(harness.table) / "_quarantine").iterdir():
        path.unlink()
    assert not harness.reconcile().equal, "quarantine is a part of it"
    shutil.rmtree(harness.table)
    harness.mapping = record_mapping.new_mapping(fields, "fail")
    with pytest.raises(BadInput, match=r"in seq 61 data is .*not a JSON object; nothing was written"):
        harness.export_once()


@pytest.mark.parametrize("name", ["seq", "data", "is_json"])
def test_field_with_a_taken_name_gets_another_name(name: str) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from tidelog.pipelines import record_mapping

    with pytest.raises(BadInput, match=f"a field '{name}', .* of ours; nothing was written, call it 'data_{name}'"):
        record_mapping.new_mapping(StructType([StructField(name, StringType())]))
    assert record_mapping.new_mapping(StructType([StructField(f"data_{name}", StringType())])).fields == (
        f"data_{name}",
    )


def test_holes_and_deletes_are_not_rows(harness: PipelineHarness) -> None:
    harness.fill(100)
    with harness.engine() as engine:
        engine.topic("orders").delete(before_seq=41)
        engine.topic("orders").delete(seqs=[50, 99, 100])
    harness.export_once()
    harness.check()
    assert harness.reconcile().equal


def test_a_topic_without_records_is_an_empty_table(harness: PipelineHarness) -> None:
    with harness.engine() as engine:
        engine.topic("orders").append([b"x"])
        engine.topic("orders").delete(seqs=[1])
    harness.export_once()
    assert harness.table_rows() == []
    harness.fill(20)
    harness.export_once()
    harness.check()


def test_from_a_server(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path)
    with run_server(harness.data, segment_events=40) as (engine, address):
        for number in range(10):
            engine.topic("orders").append([{"n": each} for each in range(number * 10, number * 10 + 10)], tag="a")
        engine.checkpoint()
        engine.topic("orders").append([b"tail"])
        options = reading.parse_options({"server": address, "subscribe": "orders"})
        with harness.open_table() as table:
            job = ExportJob(options, table, lambda _: harness.mapping, harness.context(), SMALL_SIZES)
            assert job.run().rows == 101
            job.close()
    harness.check()


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
    assert commit_reason(sizes, seqs=seqs, pending_bytes=pending, oldest_ms=oldest, once=once) == expected


@pytest.mark.parametrize(
    ("head", "stop"), [(11, 11), (101, 51), (60, 60), (61, 51), (52, 52), (2, 2)], ids=lambda seq: f"{seq}"
)
def test_what_would_be_a_crumb_goes_with_the_commit_before_it(head: int, stop: int) -> None:
    sizes = Sizes(file_bytes=100, age_ms=1, commit_bytes=500)
    assert commit_end(sizes, 1, head, lambda seq: 10 * (seq - 1)) == stop


def test_going_on_waits_for_bytes_or_age(harness: PipelineHarness) -> None:
    clock = ManualClock()
    harness.clock = clock
    harness.sizes = Sizes(file_bytes=1 << 20, age_ms=60_000, commit_bytes=1 << 20)
    harness.fill(40)  # at the machine's own time, which is later than the clock's
    with harness.export() as job:
        assert job.run_round(once=False).reason == "wait"
        behind_us = _newest_us(harness) - clock.now_us()
        clock.tick(behind_us // 1000 + 59_000)
        assert job.run_round(once=False).reason == "wait"
        clock.tick(2_000)
        assert job.run_round(once=False).reason == "age"
        assert job.run_round(once=False).reason == "nothing"
        harness.fill(20, start=40)
        clock.tick(120_000)
        asked: list[bool] = []

        def enough(idle: bool) -> bool:
            asked.append(idle)
            return len(asked) == 3

        assert job.run(should_stop=enough).rows == 60
        assert asked == [False, True, True]
    harness.check()


def _newest_us(harness: PipelineHarness) -> int:
    import tidelog

    with tidelog.open(harness.data, read_only=True) as engine:
        found: int = engine.topic("orders", create=False).to_arrow()["ts"].cast("int64").to_pylist()[-1]
        return found * 1000


# ── what it refuses ───────────────────────────────────────────────────────────────────────────────


def test_the_table_of_another_topic(harness: PipelineHarness) -> None:
    harness.fill(20)
    harness.export_once()
    with harness.engine() as engine:
        engine.topic("others").append([b"x"])
    with harness.open_table() as table:
        options = reading.parse_options({"path": harness.data, "subscribe": "others"})
        job = ExportJob(options, table, lambda _: harness.mapping, harness.context(), SMALL_SIZES)
        with pytest.raises(BadInput, match="is the table of topic 'orders', not of 'others'; nothing was written"):
            job.run()
        job.close()


def test_the_table_of_a_topic_that_was_made_again(harness: PipelineHarness) -> None:
    harness.fill(20)
    harness.export_once()
    with harness.engine() as engine:
        engine.drop("orders")
    harness.fill(30)
    with pytest.raises(GapFound, match=r"dropped and made again since .* \(epoch 1 there, \d now\)"):
        harness.export_once()
    with pytest.raises(GapFound, match="dropped and made again"):
        harness.reconcile()


def test_a_table_that_is_ahead_of_its_topic(tmp_path: Path) -> None:
    """As when the topic's directory was put back from a copy."""
    harness = PipelineHarness(tmp_path)
    harness.fill(20)
    shutil.copytree(harness.data, tmp_path / "copy")
    harness.fill(20, start=20)
    harness.export_once()
    harness.data = str(tmp_path / "copy")
    with pytest.raises(BadInput, match="ends at seq 40 and orders at 20: these are not the records"):
        harness.export_once()


def test_records_that_are_lost_stop_it(harness: PipelineHarness) -> None:
    harness.fill(40)
    harness.export_once()
    with harness.engine() as engine:
        engine.topic("orders", cap_records=10)
    harness.fill(40, start=40)
    with pytest.raises(GapFound, match=r"seqs 41 to 70 are lost \(cap\); nothing was written"):
        harness.export_once()
    assert len(harness.table_rows()) == 40
    assert harness.export_once(onGap="skip").rows == 10
    assert [row[0] for row in harness.table_rows()] == [*range(1, 41), *range(71, 81)]
    found = harness.reconcile()
    assert (found.equal, found.alone) == (True, 40)


def test_two_writers(harness: PipelineHarness) -> None:
    harness.fill(20)
    with harness.export(), pytest.raises(Locked, match="is being written by another process"):
        harness.export_once()


def test_another_machine_that_wrote_meanwhile(tmp_path: Path) -> None:
    """A lock is of one machine; the table's own transactions are not."""
    harness = PipelineHarness(tmp_path, "delta")
    harness.fill(60)
    harness.sizes = Sizes(file_bytes=1_200, age_ms=1_000, commit_bytes=2_400)
    for when in ("commit", "write the commit"):
        other = PipelineHarness(tmp_path, "delta")
        harness.fill(20, start=60)

        def step(name: str, when: str = when, other: PipelineHarness = other) -> None:
            if name == when:
                shutil.rmtree(Path(harness.table) / "_tidelog")  # the lock of the first is none to the second
                other.export_once()

        harness.on_step = step
        with pytest.raises(Locked, match=r"meanwhile.*nothing was committed"):
            harness.export_once()
        harness.check()


@pytest.mark.parametrize("format", FORMATS)
def test_a_place_or_a_topic_that_is_not_there(tmp_path: Path, format: Format) -> None:
    harness = PipelineHarness(tmp_path, format)
    with pytest.raises(NotFound):
        api.export(str(tmp_path / "nowhere"), "orders", harness.table)
    harness.fill(10)
    with pytest.raises(TopicNotFound, match="there is no topic 'order'"):
        api.export(harness.data, "order", harness.table)
    assert not Path(harness.table).exists(), "nothing was made"
    with pytest.raises(NotFound, match="there is no table at"):
        harness.reconcile()
    Path(harness.table).write_text("")
    with pytest.raises(BadInput, match="is a file, a table is a directory"):
        harness.export_once()


def test_a_table_of_the_other_format(harness: PipelineHarness) -> None:
    harness.fill(10)
    harness.export_once()
    harness.format = "delta" if harness.format == "parquet" else "parquet"
    with pytest.raises(BadInput, match=r"is a \w+ table, not a \w+ one; nothing was changed"):
        harness.export_once()


def test_foreign_table(harness: PipelineHarness) -> None:
    harness.fill(20)
    rows = pa.table({"seq": [1, 2]})
    if harness.format == "delta":
        write_deltalake(harness.table, rows)
    else:
        Path(harness.table).mkdir()
        pq.write_table(rows, Path(harness.table) / "theirs.parquet")
    with pytest.raises(BadInput, match="and no commit of an export; nothing was written"):
        harness.export_once()
    assert harness.read_table().num_rows == 2


def test_a_commit_that_does_not_read(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path)
    harness.fill(40)
    harness.export_once()
    log = sorted((Path(harness.table) / "_tidelog/log").glob("*.json"))[-1]
    said = log.read_text()
    log.write_text(said[:-10])
    with pytest.raises(Damaged, match="is not a commit of tidelog"):
        harness.export_once()
    log.write_text(said.replace('"hash":', '"hash":1', 1))
    with pytest.raises(Damaged, match="its sums are not those of its files"):
        harness.export_once()
    log.write_text(said.replace('"format":1', '"format":4'))
    with pytest.raises(Exception, match="format version 4"):
        harness.export_once()


@pytest.mark.parametrize("file", ["part", "json"])
def test_a_disk_that_is_full(tmp_path: Path, file: str) -> None:
    harness = PipelineHarness(tmp_path, table="table")
    harness.fill(60)
    harness.disk, harness.pickled = disk, _ = SimDisk(), False
    disk.fail("write", at=2 if file == "part" else 1, times=None, path=file, error=errno.ENOSPC)
    with pytest.raises(DiskFull, match="nothing was committed, free space and run it again"):
        harness.export_once()
    disk.clear_faults()
    harness.export_once()
    assert _sim_rows(disk) == harness.log_rows()


def _sim_rows(disk: SimDisk) -> list[object]:
    tables = [
        pq.read_table(pa.BufferReader(content))
        for path, content in disk.tree().items()
        if path.startswith("table/part-")
    ]
    return list(table_rows(pa.concat_tables(tables))) if tables else []


def test_a_power_cut_at_every_operation_loses_and_doubles_nothing(
    tmp_path: Path, record_count: Callable[[str, int], None]
) -> None:
    """Method: export onto a simulated disk; before every operation look at images that a power cut could leave: what a
    reader of the directory sees has no row twice and none that is not the log's, and the next run makes it the log."""
    harness = PipelineHarness(tmp_path, table="table")
    harness.fill(40)
    harness.sizes = Sizes(file_bytes=1_000, age_ms=1_000, commit_bytes=2_000)
    expected, looked = harness.log_rows(), 0
    harness.disk, harness.pickled = disk, _ = SimDisk(), False
    images: dict[bytes, tuple[int, str, SimDisk]] = {}

    def look(*_: object) -> None:
        for label, image in disk.images(("none", "all", "all_but_one", "directories"), limit=12):
            images.setdefault(image.digest(), (disk.op_count, label, image))

    disk.on_op = look
    harness.export_once()
    disk.on_op = None
    for ops, label, image in images.values():
        seen = _sim_rows(image)
        assert len(seen) == len(set(seen)), (ops, label)
        assert set(seen) <= set(expected), (ops, label)
        harness.disk = image
        harness.export_once()
        assert _sim_rows(image) == expected, (ops, label)
        looked += 1
    record_count("crash images of an export", looked)
    assert looked > 50


def test_rows_of_a_file_are_read_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 500)
    harness = PipelineHarness(tmp_path)
    harness.fill(100)
    harness.sizes = Sizes()
    harness.export_once()
    (file,) = harness.files()
    found = [
        seq
        for batch in parquet.read_batches(harness.disk, harness.table, [file.name], 30, 52)
        for seq in batch["seq"].to_pylist()
    ]
    assert found == list(range(30, 52))


def test_words_of_a_commit_are_frozen() -> None:
    """It is kept in tables, so it never changes."""
    file = interface.DataFile("part-1.parquet", 1, 3, 2, 100, 7)
    made = interface.Commit("orders", 1, 1, 3, (file,), "{}", "{}", ts_ms=5)
    said = interface.encode_commit(made)
    assert said == (
        b'{"topic":"orders","epoch":1,"first":1,"stop":3,"files":[{"name":"part-1.parquet","first":1,"stop":3,"rows":2,'
        b'"bytes":100,"hash":7,"bad":0,"bad_name":null}],"schema":"{}","shape":"{}","number":0,"removed":[],'
        b'"repair":false,"transform":null,"ts_ms":5,"format":1,"totals":{"rows":2,"quarantined":0,'
        b'"hash":"0000000000000007"}}'
    )
    assert interface.decode_commit(said, "here") == made
